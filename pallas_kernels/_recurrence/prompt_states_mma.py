"""A thread block that passes a state through chunks by mma, on GPUs without wgmma."""

from typing import override

from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._mosaic import load, sync_warps
from pallas_kernels._recurrence.prompt_products import add_product, zeros
from pallas_kernels._recurrence.prompt_scratch import SQUARE
from pallas_kernels._recurrence.prompt_shape import TILE
from pallas_kernels._recurrence.prompt_states_block import Chunk, StatesBlock


class MmaBlock(StatesBlock):
    """With mma, whose operands go through registers.

    What is multiplied by the state, and the rest, take turns: one is loaded for a later chunk while
    the other one is used, so that little shared memory is enough.
    """

    @override
    def pass_chunks(self, state: Array) -> Array:
        start = state, self.chunk(self.begin)
        return lax.fori_loop(self.begin, self.end, self._pass, start)[0]

    def _pass(self, index: Array, carry: tuple[Array, Chunk]) -> tuple[Array, Chunk]:
        """Passes the state through a chunk."""
        (state, chunk), smem, parts = carry, self.smem, self.smem.parts
        stages = self.shape.stages
        later, stage = index + stages, lax.rem(index - self.begin, stages)
        next_chunk, later_tile = self.chunk(index + 1), self.tile(later)
        early, late = 2 + self.rule.delta, 3 + self.shape.decay_per_key
        is_last = later > self.end
        self.copies.wait(smem.loaded, stage, (early + late) * (stages - 1) + late, is_last)
        before = state.astype(self.shape.operand)
        added = load(parts.values.at[stage].T, TILE)
        if self.rule.delta:
            added = add_product(added, before, parts.erased.at[stage], transposed=True)
        seen = add_product(zeros(SQUARE), before, parts.queries.at[stage], transposed=True)
        sync_warps()
        pl.when(later < self.end)(lambda: self.fetch_early(later, later_tile, stage))
        self.copies.wait(smem.rest, stage, (early + late) * (stages - 1) + early, later >= self.end)
        self.zero_others(chunk, stage)
        own, weighed = self.weigh(added, stage)
        state = add_product(self.decayed(state, stage), weighed, parts.keys.at[stage])
        seen = self.from_start(seen, stage)
        outputs = add_product(seen, own, parts.inner.at[stage], transposed=True)
        sync_warps()
        pl.when(later < self.end)(lambda: self.fetch_late(later, later_tile, stage))
        self.store_outputs(chunk, outputs.astype(smem.staged.dtype))
        self.finish_chunk(index, chunk, state)
        return state, next_chunk
