"""The Mosaic GPU kernel that passes states through the chunks of prompts, in order.

A thread block has 64 values of one head, and goes from chunk to chunk of one request. The state
stays in registers, where it is an operand of products as it is: everything else is transposed, with
values as rows.
"""

import abc
from typing import NamedTuple, override

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, call_unfused, load, store, sync_warps
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_copies import copies_of
from pallas_kernels._recurrence.prompt_products import add_product, multiply_sum, zeros
from pallas_kernels._recurrence.prompt_scratch import SQUARE, StatesScratch
from pallas_kernels._recurrence.prompt_shape import (
    COLUMN,
    ROW,
    TILE,
    PromptParts,
    PromptShape,
    along_columns,
    along_rows,
    zero_rows,
)

NOTHING, CARRIED = -1, -2  # instead of rows: zeros or no write, and the state of the turn before


def pass_states(
    shape: PromptShape,
    runs: Array,
    chunks: Array,
    parts: PromptParts[Array],
    decay: Array | None,
    inputs: Array,
    carried: Array,
    pages: Ref,
    out: Ref,
) -> Array:
    """Writes the outputs of a turn's chunks, and the states that its chunks name.

    Args:
      runs: int32[B, 4], of each request: its first chunk of this turn, one past the last, the
        first row of the state to resume from, or `NOTHING`, or `CARRIED`, and whether to carry the
        state for the next turn.
      chunks: int32[N, 4 + W], as for `find_parts`, and at last the first rows of the pages that
        take the state after the chunk, or `NOTHING`, after the largest of them.
      decay: float32[N, value_heads, COPIED], of chunks, if each key channel has its own, K of them;
        otherwise None.
      carried: float32[value_heads * V, K], the state carried over from the turn before.
      pages: reference to [rows, K].
      out: reference to [T, value_heads, V], T a multiple of 8.

    Returns:
      The state to carry over to the next turn; undefined if no run goes on.
    """
    rule = shape.rule
    call = plgpu.kernel(
        lambda *refs: (_ByWgmma if shape.by_wgmma else _ByMma)(shape, refs).run(),
        out_type=[jax.ShapeDtypeStruct(carried.shape, jnp.float32)],
        grid=(shape.batch * rule.value_heads * (rule.value_size // CHUNK),),
        grid_names=("cta",),
        kernel_name="recurrent_prompt_states",
        scratch_types=[StatesScratch.from_shape(shape, out.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    decays = [] if decay is None else [decay]
    return call_unfused(call, [runs, chunks, *parts, *decays, inputs, carried], [pages, out])[0]


class _Chunk(NamedTuple):
    """A chunk: its tile of tokens, its own rows of that, and the row that takes the state."""

    tile: Array
    begin: Array
    end: Array
    target: Array

    @property
    def is_whole(self) -> Array:
        return (self.begin == 0) & (self.end == CHUNK)


class _StatesKernel(abc.ABC):
    """The code of one thread block."""

    def __init__(self, shape: PromptShape, refs: tuple[Ref, ...]) -> None:
        self.shape, self.rule, self.copies = shape, shape.rule, copies_of(shape.by_tma)
        self.runs, self.chunks = refs[:2]
        self.parts = PromptParts(*refs[2:8])
        self.decay = refs[8] if shape.decay_per_key else None
        self.inputs, self.before, self.pages, self.out, self.carried, self.smem = refs[-6:]
        index, value_blocks = lax.axis_index("cta"), self.rule.value_size // CHUNK
        self.value_block = lax.rem(index, value_blocks)
        head = lax.div(index, value_blocks)
        self.head = lax.rem(head, self.rule.value_heads)
        request = lax.div(head, self.rule.value_heads)
        self.begin, self.end, self.source, self.keeps = (self.runs[request, i] for i in range(4))

    def run(self) -> None:
        pl.when(self.end > self.begin)(self._run)

    @abc.abstractmethod
    def _pass_chunks(self, state: Array) -> Array:
        """Writes outputs; returns the state after the last chunk."""

    def _run(self) -> None:
        for stage in range(self.shape.stages):
            index = self.begin + stage

            @pl.when(index < self.end)
            def _(index: Array = index, stage: int = stage) -> None:
                self._fetch(index, self.chunks[index, 0], stage)

        state = self._pass_chunks(self._first_state())

        @pl.when(self.keeps != 0)
        def _() -> None:
            store(self.carried.at[self._rows(0)], state)

        self.copies.end_writes()

    def _tile(self, index: Array) -> Array:
        return self.chunks[jnp.minimum(index, self.shape.chunks - 1), 0]

    def _chunk(self, index: Array) -> _Chunk:
        index = jnp.minimum(index, self.shape.chunks - 1)
        return _Chunk(*(self.chunks[index, i] for i in range(4)))

    def _rows(self, first: Array | int) -> pl.Slice:
        """Returns the rows of the part of this thread block in a state that begins at a row."""
        offset = self.head * self.rule.value_size + self.value_block * CHUNK
        return pl.ds(first + offset, CHUNK)

    def _first_state(self) -> Array:
        """Returns the state to resume from, [CHUNK, K]."""
        is_known = self.source >= 0
        loaded = load(self.pages.at[self._rows(jnp.where(is_known, self.source, 0))], TILE)
        carried = load(self.before.at[self._rows(0)], TILE)
        is_carried = lax.broadcast(self.source == CARRIED, loaded.shape)
        resumed = jnp.where(lax.broadcast(is_known, loaded.shape), loaded, 0.0)
        return jnp.where(is_carried, carried, resumed)

    def _fetch(self, index: Array, tile: Array, stage: Array | int) -> None:
        """Starts loading a chunk."""
        self._fetch_early(index, tile, stage)
        self._fetch_late(index, tile, stage)

    def _fetch_early(self, index: Array, tile: Array, stage: Array | int) -> None:
        """Starts loading what is multiplied by the state, and values."""
        parts, rows = self.smem.parts, self._rows_of(index)
        columns = pl.ds(self.value_block * CHUNK, CHUNK)
        loaded = self.smem.loaded.at[stage] if self.shape.by_tma else None
        self.copies.start(self.parts.values.at[rows, columns], parts.values.at[stage], loaded)
        if self.rule.delta:
            self.copies.start(self.parts.erased.at[rows], parts.erased.at[stage], loaded)
        queries = self.parts.queries.at[rows] if self.decay is not None else self._input(0, tile)
        self.copies.start(queries, parts.queries.at[stage], loaded)

    def _fetch_late(self, index: Array, tile: Array, stage: Array | int) -> None:
        """Starts loading the rest."""
        smem, rows = self.smem, self._rows_of(index)
        barrier = smem.loaded if self.shape.by_wgmma else smem.rest
        loaded = barrier.at[stage] if self.shape.by_tma else None
        keys = self._input(1, tile)
        if self.decay is not None:
            keys = self.parts.keys.at[rows]
            self.copies.start(self.decay.at[index, self.head], smem.decay.at[stage], loaded)
        self.copies.start(keys, smem.parts.keys.at[stage], loaded)
        self.copies.start(self.parts.inner.at[rows], smem.parts.inner.at[stage], loaded)
        factors = self.parts.factors.at[index, self.head]
        self.copies.start(factors, smem.parts.factors.at[stage], loaded)

    def _rows_of(self, index: Array) -> pl.Slice:
        """Returns the rows of a chunk in the parts."""
        return pl.ds((index * self.rule.value_heads + self.head) * CHUNK, CHUNK)

    def _input(self, i: int, tile: Array) -> Ref:
        """Returns the queries, ``i`` 0, or the keys of a tile of tokens."""
        width = self.rule.key_size
        column = self.rule.starts[i] + lax.div(self.head, self.rule.group) * width
        return self.inputs.at[pl.ds(tile * CHUNK, CHUNK), pl.ds(column, width)]

    def _zero_others(self, chunk: _Chunk, stage: Array) -> None:
        """Overwrites the keys of tokens that are not the chunk's own."""

        @pl.when(~chunk.is_whole)
        def _() -> None:
            zero_rows(self.smem.parts.keys.at[stage], chunk.begin, chunk.end)
            self.copies.commit()

    def _finish_chunk(self, index: Array, chunk: _Chunk, state: Array) -> None:
        """Writes the state after a chunk to the pages that take it."""

        @pl.when(chunk.target >= 0)
        def _() -> None:
            self._store_state(index, state.astype(self.shape.page))

    def _store_state(self, index: Array, state: Array) -> None:
        """Writes a state to the pages that take it after a chunk."""
        fields = len(_Chunk._fields)

        @pl.loop(fields, self.chunks.shape[1])
        def _(i: Array) -> None:
            row = self.chunks[index, i]

            @pl.when(row >= 0)
            def _() -> None:
                store(self.pages.at[self._rows(row)], state)

    def _decayed(self, state: Array, stage: Array) -> Array:
        """Returns a state with the decay of a chunk."""
        if self.decay is None:
            decay = load(self.smem.parts.factors.at[stage, pl.ds(2 * CHUNK, CHUNK)], ROW)
            return state * along_rows(decay, state.shape)
        decay = load(self.smem.decay.at[stage, pl.ds(0, self.rule.key_size)], COLUMN)
        return state * along_columns(decay, state.shape)

    def _weigh(self, added: Array, stage: Array) -> tuple[Array, Array]:
        """Returns what the tokens add: in their own chunk, and to the state."""
        to_end = load(self.smem.parts.factors.at[stage, pl.ds(CHUNK, CHUNK)], COLUMN)
        weighed = added * along_columns(to_end, SQUARE)
        return added.astype(self.shape.operand), weighed.astype(self.shape.operand)

    def _from_start(self, seen: Array, stage: Array) -> Array:
        """Returns what queries see of a state, with the decay up to them."""
        factors = load(self.smem.parts.factors.at[stage, pl.ds(0, CHUNK)], COLUMN)
        return seen * along_columns(factors, SQUARE)

    def _store_outputs(self, chunk: _Chunk, outputs: Array) -> None:
        """Writes the outputs of a chunk's own tokens, [values, tokens]."""
        smem, columns = self.smem, pl.ds(self.value_block * CHUNK, CHUNK)
        out = self.out.at[:, self.head, columns]
        first = chunk.tile * CHUNK
        self.copies.end_writes(only_reads=True)  # what was staged before is read

        @pl.when(chunk.is_whole)
        def _() -> None:
            self.copies.write_transposed(outputs, smem.staged, out.at[pl.ds(first, CHUNK)])

        @pl.when(~chunk.is_whole)
        def _() -> None:
            self.copies.write_rows(outputs, smem.plain, out, first, chunk.begin, chunk.end)


class _ByMma(_StatesKernel):
    """With mma, whose operands go through registers.

    What is multiplied by the state, and the rest, take turns: one is loaded for a later chunk while
    the other one is used, so that little shared memory is enough.
    """

    @override
    def _pass_chunks(self, state: Array) -> Array:
        start = state, self._chunk(self.begin)
        return lax.fori_loop(self.begin, self.end, self._pass, start)[0]

    def _pass(self, index: Array, carry: tuple[Array, _Chunk]) -> tuple[Array, _Chunk]:
        """Passes the state through a chunk."""
        (state, chunk), smem, parts = carry, self.smem, self.smem.parts
        stages = self.shape.stages
        later, stage = index + stages, lax.rem(index - self.begin, stages)
        next_chunk, later_tile = self._chunk(index + 1), self._tile(later)
        early, late = 2 + self.rule.delta, 3 + self.shape.decay_per_key
        is_last = later > self.end
        self.copies.wait(smem.loaded, stage, (early + late) * (stages - 1) + late, is_last)
        before = state.astype(self.shape.operand)
        added = load(parts.values.at[stage].T, TILE)
        if self.rule.delta:
            added = add_product(added, before, parts.erased.at[stage], transposed=True)
        seen = add_product(zeros(SQUARE), before, parts.queries.at[stage], transposed=True)
        sync_warps()
        pl.when(later < self.end)(lambda: self._fetch_early(later, later_tile, stage))
        self.copies.wait(smem.rest, stage, (early + late) * (stages - 1) + early, later >= self.end)
        self._zero_others(chunk, stage)
        own, weighed = self._weigh(added, stage)
        state = add_product(self._decayed(state, stage), weighed, parts.keys.at[stage])
        seen = self._from_start(seen, stage)
        outputs = add_product(seen, own, parts.inner.at[stage], transposed=True)
        sync_warps()
        pl.when(later < self.end)(lambda: self._fetch_late(later, later_tile, stage))
        self._store_outputs(chunk, outputs.astype(smem.staged.dtype))
        self._finish_chunk(index, chunk, state)
        return state, next_chunk


class _Carry(NamedTuple):
    """The state and the outputs of a thread block, on its way from chunk to chunk.

    outputs: [CHUNK, CHUNK], values as rows, of the chunk before; not written yet.
    chunk, lookahead: the chunk to come, and the tile of the one to load next; read from memory in
      advance, to hide the latency.
    """

    state: Array
    outputs: Array
    before: _Chunk
    chunk: _Chunk
    lookahead: Array


class _ByWgmma(_StatesKernel):
    """With wgmma, whose right operands are in shared memory."""

    @override
    def _pass_chunks(self, state: Array) -> Array:
        nothing = plgpu.layout_cast(jnp.zeros(SQUARE, self.smem.staged.dtype), TILE)
        zero = jnp.int32(0)
        start = _Carry(
            state,
            nothing,
            _Chunk(zero, zero, zero, zero),
            self._chunk(self.begin),
            self._tile(self.begin + (self.shape.stages - 1)),
        )
        state, outputs, before, _, _ = lax.fori_loop(self.begin, self.end, self._pass, start)
        self._store_outputs(before, outputs)
        return state

    def _pass(self, index: Array, carry: _Carry) -> _Carry:
        """Passes the state through a chunk."""
        chunk, next_chunk = carry.chunk, self._chunk(index + 1)
        later = self._tile(index + self.shape.stages)
        stage = lax.rem(index - self.begin, self.shape.stages)
        plgpu.barrier_wait(self.smem.loaded.at[stage])
        self._zero_others(chunk, stage)
        state, outputs = self._update(index, carry, stage)
        self._finish_chunk(index, chunk, state)
        return _Carry(state, outputs, chunk, next_chunk, later)

    def _finish_before(self, index: Array, carry: _Carry) -> None:
        """Writes the outputs of the chunk before, and loads another one in its stage."""
        # Has a barrier: all warps have read the stage.
        self._store_outputs(carry.before, carry.outputs)
        later = index + (self.shape.stages - 1)

        @pl.when((index > self.begin) & (later < self.end))
        def _() -> None:
            self._fetch(later, carry.lookahead, lax.rem(later - self.begin, self.shape.stages))

    def _update(self, index: Array, carry: _Carry, stage: Array) -> tuple[Array, Array]:
        """Returns the state after a chunk, and its outputs, [values, tokens].

        Finishes the chunk before while the tensor cores work.
        """
        parts = self.smem.parts
        before = carry.state.astype(self.shape.operand)
        values, state = load(parts.values.at[stage].T, TILE), self._decayed(carry.state, stage)
        erased = parts.erased.at[stage].T if self.rule.delta else None
        queries, keys = parts.queries.at[stage].T, parts.keys.at[stage]
        inner = parts.inner.at[stage].T
        if not _mosaic.OPERANDS_IN_REGISTERS:
            self._finish_before(index, carry)
            if self.rule.delta:
                values = values + self._multiply(before, erased)
            added, weighed = self._weigh(values, stage)
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
                added, weighed = self._weigh(found, stage)
                plgpu.wgmma(state_sum, weighed, keys)
                plgpu.wgmma(own, added, inner)

            nothing = zeros(SQUARE)
            start: Ref = tuple(map(plgpu.ACC.init, (values, state, nothing, nothing)))
            sums: Ref = pl.run_state(run)(start)
            _, state, seen, own = sums
        outputs = self._from_start(seen, stage) + own  # late, because registers are short
        return state, outputs.astype(self.smem.staged.dtype)

    def _multiply(self, left: Array, right: Ref) -> Array:
        """Returns a product in interpret mode."""
        staged = self.smem.left.at[:, pl.ds(0, left.shape[1])]
        plgpu.commit_smem()
        staged[...] = left
        plgpu.commit_smem()
        return multiply_sum(True, [(staged, right)])[0]
