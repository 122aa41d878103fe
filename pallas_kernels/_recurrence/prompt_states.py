"""The Mosaic GPU kernel that passes states through the chunks of prompts, in index.

A thread block has 64 values of one head, and goes from chunk to chunk of one request. The state
stays in registers, where it is an operand of products as it is: everything else is transposed, with
values as rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, call_unfused, load, store
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_scratch import SQUARE, STAGES, StatesScratch
from pallas_kernels._recurrence.prompt_shape import (
    COLUMN,
    ROW,
    TILE,
    PromptParts,
    PromptShape,
    along_columns,
    along_rows,
    multiply,
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
      decay: float32[N, value_heads, K], of chunks, if each key channel has its own; otherwise None.
      carried: float32[value_heads * V, K], the state carried over from the turn before.
      pages: reference to [rows, K].
      out: reference to [T, value_heads, V], T a multiple of 8.

    Returns:
      The state to carry over to the next turn; undefined if no run goes on.
    """
    rule = shape.rule
    call = plgpu.kernel(
        lambda *refs: _StatesKernel(shape, refs).run(),
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


class _StatesKernel:
    """The code of one thread block."""

    def __init__(self, shape: PromptShape, refs: tuple[Ref, ...]) -> None:
        self.shape, self.rule = shape, shape.rule
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

    def _run(self) -> None:
        for stage in range(STAGES):
            index = self.begin + stage

            @pl.when(index < self.end)
            def _(index: Array = index, stage: int = stage) -> None:
                self._fetch(index, self.chunks[index, 0], stage)

        nothing = plgpu.layout_cast(jnp.zeros(SQUARE, self.smem.staged.dtype), TILE)
        zero = jnp.int32(0)
        start = _Carry(
            self._first_state(),
            nothing,
            _Chunk(zero, zero, zero, zero),
            self._chunk(self.begin),
            self._tile(self.begin + (STAGES - 1)),
        )
        state, outputs, before, _, _ = lax.fori_loop(self.begin, self.end, self._pass, start)
        self._store_outputs(before, outputs)

        @pl.when(self.keeps != 0)
        def _() -> None:
            store(self.carried.at[self._rows(0)], state)

        plgpu.wait_smem_to_gmem(0)

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
        rule, smem = self.rule, self.smem
        barrier = smem.loaded.at[stage]
        item = index * rule.value_heads + self.head
        rows = pl.ds(item * CHUNK, CHUNK)
        values = pl.ds(item * rule.value_size + self.value_block * CHUNK, CHUNK)
        key_head = lax.div(self.head, rule.group)

        def get(source: Ref, target: Ref) -> None:
            plgpu.copy_gmem_to_smem(source, target.at[stage], barrier)

        if rule.delta:
            get(self.parts.erased.at[rows], smem.parts.erased)
        get(self.parts.values.at[values], smem.parts.values)
        if self.decay is not None:
            get(self.decay.at[index, self.head], smem.decay)
            get(self.parts.queries.at[rows], smem.parts.queries)
            get(self.parts.keys.at[rows], smem.parts.keys)
        else:
            tokens = pl.ds(tile * CHUNK, CHUNK)
            targets = smem.parts.queries, smem.parts.keys
            for start, target in zip(rule.starts, targets, strict=False):
                columns = pl.ds(start + key_head * rule.key_size, rule.key_size)
                get(self.inputs.at[tokens, columns], target)
        get(self.parts.inner.at[rows], smem.parts.inner)
        get(self.parts.factors.at[index, self.head], smem.parts.factors)

    def _pass(self, index: Array, carry: "_Carry") -> "_Carry":
        """Passes the state through a chunk."""
        chunk, next_chunk = carry.chunk, self._chunk(index + 1)
        later = self._tile(index + STAGES)
        stage = lax.rem(index - self.begin, STAGES)
        plgpu.barrier_wait(self.smem.loaded.at[stage])

        @pl.when(~chunk.is_whole)
        def _() -> None:
            zero_rows(self.smem.parts.keys.at[stage], chunk.begin, chunk.end)
            plgpu.commit_smem()

        state, outputs = self._update(index, carry, stage)

        @pl.when(chunk.target >= 0)
        def _() -> None:
            self._store_state(index, state.astype(self.shape.page))

        return _Carry(state, outputs, chunk, next_chunk, later)

    def _store_state(self, index: Array, state: Array) -> None:
        """Writes a state to the pages that take it after a chunk."""
        fields = len(_Chunk._fields)

        @pl.loop(fields, self.chunks.shape[1])
        def _(i: Array) -> None:
            row = self.chunks[index, i]

            @pl.when(row >= 0)
            def _() -> None:
                store(self.pages.at[self._rows(row)], state)

    def _finish_before(self, index: Array, carry: "_Carry") -> None:
        """Writes the outputs of the chunk before, and loads another one in its stage."""
        # Has a barrier: all warps have read the stage.
        self._store_outputs(carry.before, carry.outputs)
        later = index + (STAGES - 1)

        @pl.when((index > self.begin) & (later < self.end))
        def _() -> None:
            self._fetch(later, carry.lookahead, lax.rem(later - self.begin, STAGES))

    def _update(self, index: Array, carry: "_Carry", stage: Array) -> tuple[Array, Array]:
        """Returns the state after a chunk, and its outputs, [values, tokens].

        Finishes the chunk before while the tensor cores work.
        """
        smem, parts, operand = self.smem, self.smem.parts, self.shape.operand
        factors = parts.factors.at[stage]
        before = carry.state.astype(operand)
        values = load(parts.values.at[stage], TILE)
        if self.decay is None:
            decay = load(factors.at[pl.ds(2 * CHUNK, CHUNK)], ROW)
            state = carry.state * along_rows(decay, carry.state.shape)
        else:
            decay = load(smem.decay.at[stage], COLUMN)
            state = carry.state * along_columns(decay, carry.state.shape)
        erased = parts.erased.at[stage].T if self.rule.delta else None
        queries, keys = parts.queries.at[stage].T, parts.keys.at[stage]
        inner = parts.inner.at[stage].T

        def weigh(added: Array) -> tuple[Array, Array]:
            to_end = load(factors.at[pl.ds(CHUNK, CHUNK)], COLUMN)
            weighed = added * along_columns(to_end, SQUARE)
            return added.astype(operand), weighed.astype(operand)

        if not _mosaic.OPERANDS_IN_REGISTERS:
            self._finish_before(index, carry)
            if self.rule.delta:
                values = values + self._multiply(before, erased)
            added, weighed = weigh(values)
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
                added, weighed = weigh(found)
                plgpu.wgmma(state_sum, weighed, keys)
                plgpu.wgmma(own, added, inner)

            zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), TILE)
            start: Ref = tuple(map(plgpu.ACC.init, (values, state, zeros, zeros)))
            sums: Ref = pl.run_state(run)(start)
            _, state, seen, own = sums
        from_start = load(factors.at[pl.ds(0, CHUNK)], COLUMN)  # late, because registers are short
        outputs = seen * along_columns(from_start, SQUARE) + own
        return state, outputs.astype(smem.staged.dtype)

    def _multiply(self, left: Array, right: Ref) -> Array:
        """Returns a product in interpret mode."""
        staged = self.smem.left.at[:, pl.ds(0, left.shape[1])]
        plgpu.commit_smem()
        staged[...] = left
        plgpu.commit_smem()
        return multiply(staged, right)

    def _store_outputs(self, chunk: _Chunk, outputs: Array) -> None:
        """Writes the outputs of a chunk's own tokens."""
        smem, columns = self.smem, pl.ds(self.value_block * CHUNK, CHUNK)
        out = self.out.at[:, self.head, columns]
        first = chunk.tile * CHUNK
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is read

        @pl.when(chunk.is_whole)
        def _() -> None:
            smem.staged.T[...] = outputs
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.staged, out.at[pl.ds(first, CHUNK)])

        @pl.when(~chunk.is_whole)
        def _() -> None:
            store(smem.plain.T, outputs)
            plgpu.commit_smem()

            @pl.loop(chunk.begin, chunk.end)
            def _(row: Array) -> None:
                plgpu.copy_smem_to_gmem(smem.plain.at[pl.ds(row, 1)], out.at[pl.ds(first + row, 1)])
