"""The code of a thread block that passes a state through chunks, but for its products."""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._mosaic import Ref, load, store
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_copies import copies_of
from pallas_kernels._recurrence.prompt_scratch import SQUARE
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


class Chunk(NamedTuple):
    """A chunk: its tile of tokens, its own rows of that, and the row that takes the state."""

    tile: Array
    begin: Array
    end: Array
    target: Array

    @property
    def is_whole(self) -> Array:
        return (self.begin == 0) & (self.end == CHUNK)


class StatesBlock(abc.ABC):
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
    def pass_chunks(self, state: Array) -> Array:
        """Writes outputs; returns the state after the last chunk."""

    def _run(self) -> None:
        for stage in range(self.shape.stages):
            index = self.begin + stage

            @pl.when(index < self.end)
            def _(index: Array = index, stage: int = stage) -> None:
                self.fetch(index, self.chunks[index, 0], stage)

        state = self.pass_chunks(self._first_state())

        @pl.when(self.keeps != 0)
        def _() -> None:
            store(self.carried.at[self._rows(0)], state)

        self.copies.end_writes()

    def tile(self, index: Array) -> Array:
        return self.chunks[jnp.minimum(index, self.shape.chunks - 1), 0]

    def chunk(self, index: Array) -> Chunk:
        index = jnp.minimum(index, self.shape.chunks - 1)
        return Chunk(*(self.chunks[index, i] for i in range(4)))

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

    def fetch(self, index: Array, tile: Array, stage: Array | int) -> None:
        """Starts loading a chunk."""
        self.fetch_early(index, tile, stage)
        self.fetch_late(index, tile, stage)

    def fetch_early(self, index: Array, tile: Array, stage: Array | int) -> None:
        """Starts loading what is multiplied by the state, and values."""
        parts, rows = self.smem.parts, self._rows_of(index)
        columns = pl.ds(self.value_block * CHUNK, CHUNK)
        loaded = self.smem.loaded.at[stage] if self.shape.by_tma else None
        self.copies.start(self.parts.values.at[rows, columns], parts.values.at[stage], loaded)
        if self.rule.delta:
            self.copies.start(self.parts.erased.at[rows], parts.erased.at[stage], loaded)
        queries = self.parts.queries.at[rows] if self.decay is not None else self._input(0, tile)
        self.copies.start(queries, parts.queries.at[stage], loaded)

    def fetch_late(self, index: Array, tile: Array, stage: Array | int) -> None:
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

    def zero_others(self, chunk: Chunk, stage: Array) -> None:
        """Overwrites the keys of tokens that are not the chunk's own."""

        @pl.when(~chunk.is_whole)
        def _() -> None:
            zero_rows(self.smem.parts.keys.at[stage], chunk.begin, chunk.end)
            self.copies.commit()

    def finish_chunk(self, index: Array, chunk: Chunk, state: Array) -> None:
        """Writes the state after a chunk to the pages that take it."""

        @pl.when(chunk.target >= 0)
        def _() -> None:
            self._store_state(index, state.astype(self.shape.page))

    def _store_state(self, index: Array, state: Array) -> None:
        """Writes a state to the pages that take it after a chunk."""
        fields = len(Chunk._fields)

        @pl.loop(fields, self.chunks.shape[1])
        def _(i: Array) -> None:
            row = self.chunks[index, i]

            @pl.when(row >= 0)
            def _() -> None:
                store(self.pages.at[self._rows(row)], state)

    def decayed(self, state: Array, stage: Array) -> Array:
        """Returns a state with the decay of a chunk."""
        if self.decay is None:
            decay = load(self.smem.parts.factors.at[stage, pl.ds(2 * CHUNK, CHUNK)], ROW)
            return state * along_rows(decay, state.shape)
        decay = load(self.smem.decay.at[stage, pl.ds(0, self.rule.key_size)], COLUMN)
        return state * along_columns(decay, state.shape)

    def weigh(self, added: Array, stage: Array) -> tuple[Array, Array]:
        """Returns what the tokens add: in their own chunk, and to the state."""
        to_end = load(self.smem.parts.factors.at[stage, pl.ds(CHUNK, CHUNK)], COLUMN)
        weighed = added * along_columns(to_end, SQUARE)
        return added.astype(self.shape.operand), weighed.astype(self.shape.operand)

    def from_start(self, seen: Array, stage: Array) -> Array:
        """Returns what queries see of a state, with the decay up to them."""
        factors = load(self.smem.parts.factors.at[stage, pl.ds(0, CHUNK)], COLUMN)
        return seen * along_columns(factors, SQUARE)

    def store_outputs(self, chunk: Chunk, outputs: Array) -> None:
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
