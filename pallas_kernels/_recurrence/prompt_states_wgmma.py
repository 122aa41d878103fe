"""A thread block that passes a state through chunks by wgmma."""

from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, load
from pallas_kernels._recurrence.prompt_products import multiply_sum, zeros
from pallas_kernels._recurrence.prompt_scratch import SQUARE
from pallas_kernels._recurrence.prompt_shape import TILE
from pallas_kernels._recurrence.prompt_states_block import Chunk, StatesBlock


class _Carry(NamedTuple):
    """The state and the outputs of a thread block, on its way from chunk to chunk.

    outputs: [CHUNK, CHUNK], values as rows, of the chunk before; not written yet.
    chunk, lookahead: the chunk to come, and the tile of the one to load next; read from memory in
      advance, to hide the latency.
    """

    state: Array
    outputs: Array
    before: Chunk
    chunk: Chunk
    lookahead: Array


class WgmmaBlock(StatesBlock):
    """With wgmma, whose right operands are in shared memory."""

    @override
    def pass_chunks(self, state: Array) -> Array:
        nothing = plgpu.layout_cast(jnp.zeros(SQUARE, self.smem.staged.dtype), TILE)
        zero = jnp.int32(0)
        start = _Carry(
            state,
            nothing,
            Chunk(zero, zero, zero, zero),
            self.chunk(self.begin),
            self.tile(self.begin + (self.shape.stages - 1)),
        )
        state, outputs, before, _, _ = lax.fori_loop(self.begin, self.end, self._pass, start)
        self.store_outputs(before, outputs)
        return state

    def _pass(self, index: Array, carry: _Carry) -> _Carry:
        """Passes the state through a chunk."""
        chunk, next_chunk = carry.chunk, self.chunk(index + 1)
        later = self.tile(index + self.shape.stages)
        stage = lax.rem(index - self.begin, self.shape.stages)
        plgpu.barrier_wait(self.smem.loaded.at[stage])
        self.zero_others(chunk, stage)
        state, outputs = self._update(index, carry, stage)
        self.finish_chunk(index, chunk, state)
        return _Carry(state, outputs, chunk, next_chunk, later)

    def _finish_before(self, index: Array, carry: _Carry) -> None:
        """Writes the outputs of the chunk before, and loads another one in its stage."""
        # Has a barrier: all warps have read the stage.
        self.store_outputs(carry.before, carry.outputs)
        later = index + (self.shape.stages - 1)

        @pl.when((index > self.begin) & (later < self.end))
        def _() -> None:
            self.fetch(later, carry.lookahead, lax.rem(later - self.begin, self.shape.stages))

    def _update(self, index: Array, carry: _Carry, stage: Array) -> tuple[Array, Array]:
        """Returns the state after a chunk, and its outputs, [values, tokens].

        Finishes the chunk before while the tensor cores work.
        """
        parts = self.smem.parts
        before = carry.state.astype(self.shape.operand)
        values, state = load(parts.values.at[stage].T, TILE), self.decayed(carry.state, stage)
        erased = parts.erased.at[stage].T if self.rule.delta else None
        queries, keys = parts.queries.at[stage].T, parts.keys.at[stage]
        inner = parts.inner.at[stage].T
        if not _mosaic.OPERANDS_IN_REGISTERS:
            self._finish_before(index, carry)
            if self.rule.delta:
                values = values + self._multiply(before, erased)
            added, weighed = self.weigh(values, stage)
            state = state + self._multiply(weighed, keys)
            seen, own = self._multiply(before, queries), self._multiply(added, inner)
        else:

            def run(sums: tuple[Ref, ...]) -> None:
                added_sum, state_sum, seen, own = sums
                if self.rule.delta:
                    plgpu.wgmma(added_sum, before, erased)
                plgpu.wgmma(seen, before, queries)
                self._finish_before(index, carry)
                found = plgpu.wgmma_accumulator_load(added_sum, wait_n=1)
                added, weighed = self.weigh(found, stage)
                plgpu.wgmma(state_sum, weighed, keys)
                plgpu.wgmma(own, added, inner)

            nothing = zeros(SQUARE)
            start: Ref = tuple(map(plgpu.ACC.init, (values, state, nothing, nothing)))
            sums: Ref = pl.run_state(run)(start)
            _, state, seen, own = sums
        outputs = self.from_start(seen, stage) + own  # late, because registers are short
        return state, outputs.astype(self.smem.staged.dtype)

    def _multiply(self, left: Array, right: Ref) -> Array:
        """Returns a product in interpret mode."""
        staged = self.smem.left.at[:, pl.ds(0, left.shape[1])]
        plgpu.commit_smem()
        staged[...] = left
        plgpu.commit_smem()
        return multiply_sum(True, [(staged, right)])[0]
