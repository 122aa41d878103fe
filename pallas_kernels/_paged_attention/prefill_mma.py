"""The kernel that prefills by mma, for GPUs without wgmma.

A thread block is one warpgroup, which also loads: with TMA or with cp.async, see `Copies`. It has
128 or 64 queries of one head, so that several thread blocks fit on an SM: one computes a softmax
while another one multiplies. Scores become weights in the registers of the second product.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, Scratch, as_left, store, sync_warps, tiled, tiled_by, widen
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.copies import Copies, copies_ahead
from pallas_kernels._paged_attention.decode_block import COLUMNS
from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.prefill_block import (
    PER_ROW,
    UNSEEN,
    Item,
    Launch,
    PrefillBlock,
    PrefillOperands,
    Rows,
)
from pallas_kernels._paged_attention.prefill_mma_shape import MmaShape
from pallas_kernels._paged_attention.prefill_tasks import ROWS
from pallas_kernels._paged_attention.steps import GRANULE

DEPTH = 16  # keys that an mma adds up


def launch_of(shape: MmaShape) -> Launch:
    """Returns how the kernel is launched."""
    return Launch(
        lambda operands, scratch: _Prefiller(shape, operands, scratch).run(),
        _Scratch.from_shape(shape),
        per_sm=shape.per_sm,
        parts=shape.parts,
    )


def _copies_of(shape: MmaShape) -> Copies:
    # When a step's keys are used, its values and all of the steps after it may be on their way.
    return copies_ahead((2 * shape.stages - 1) * shape.steps.granules, shape.by_tma)


class _Scratch[T](NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    query: the queries of each half.
    loaded: a pair: stages of keys and of values in 16 bits, and what takes their place at the end:
      rows of the output.
    narrow: a step of 8-bit keys, and of values, as they are loaded; None for 16-bit ones.
    *_full: barriers of copies by TMA; None for others.
    """

    query: T
    loaded: T
    narrow: tuple[T, T]
    query_full: T
    keys_full: T
    values_full: T

    @classmethod
    def from_shape(cls, shape: MmaShape) -> "_Scratch[Scratch]":
        config, dtype, copies = shape.config, shape.compute, _copies_of(shape)
        of_keys, of_values = shape.swizzles or (0, 0)

        def wide(width: int, swizzle: int) -> Scratch:
            size = shape.stages, shape.keys, width
            return tiled(size, dtype) if shape.widens else tiled_by(size, dtype, swizzle)

        def narrow(width: int, swizzle: int) -> Scratch:
            return tiled_by((shape.keys, width), shape.page, swizzle) if shape.widens else None

        parts = (config.key_width, of_keys), (config.value_width, of_values)
        stages = wide(*parts[0]), wide(*parts[1])
        loaded = stages, plgpu.SMEM((ROWS, config.value_width), config.out_dtype)
        granules = shape.steps.granules
        return cls(
            query=tiled((shape.halves, ROWS, config.key_width), dtype),
            # Interpret mode does not know unions.
            loaded=plgpu.RefUnion(*loaded) if _mosaic.OPERANDS_IN_REGISTERS else loaded,
            narrow=(narrow(*parts[0]), narrow(*parts[1])),
            query_full=copies.barrier(1, shape.halves),
            keys_full=copies.barrier(shape.stages, granules),
            values_full=copies.barrier(shape.stages, granules),
        )


class _Part(NamedTuple):
    """The keys, or the values: their columns in a row of pages, and their shared memory."""

    columns: pl.Slice
    wide: Ref
    narrow: Ref
    full: Ref


class _Prefiller(PrefillBlock):
    """The code of one thread block."""

    def __init__(self, shape: MmaShape, operands: PrefillOperands, scratch: _Scratch[Ref]) -> None:
        super().__init__(shape.config, shape.steps, operands, shape.parts)
        self.shape, self.smem, self.copies = shape, scratch, _copies_of(shape)
        (self.keys, self.values), self.staged = scratch.loaded

    def run(self) -> None:
        self.each_item(lambda _, item: self._attend(item))

    def _attend(self, item: Item) -> None:
        """Attends from the halves of a tile that this thread block has."""
        first = 0 if self.shape.parts == 1 else item.part
        halves = [first + i for i in range(self.shape.halves)]
        pl.when(item.tile.count > first * ROWS)(lambda: self._attend_from(item, halves))

    def _attend_from(self, item: Item, halves: Sequence[Array | int]) -> None:
        tile, stages = item.tile, self.shape.stages
        first, last = tile.first_step, self._last_step(item, halves[-1])
        octets = [self.octet(tile.octet, half) for half in halves]
        columns = pl.ds(item.head * self.config.key_width, self.config.key_width)
        for i, octet in enumerate(octets):
            source = self.queries.at[pl.ds(octet * 8, ROWS), columns]
            self.copies.start(source, self.smem.query.at[i], self.smem.query_full, 0)
        keys, values = self._parts(item)

        def begin(stage: Array, carry: None) -> None:
            granule_rows = self.locate(item, first + stage)

            @pl.when(first + stage < last)
            def _() -> None:
                for part in keys, values:
                    self._fetch(granule_rows, part, stage)

        lax.fori_loop(0, stages, begin, None)
        if self.shape.by_tma:  # other copies end in order
            plgpu.barrier_wait(self.smem.query_full.at[0])
        positions = [tile.position + (octet - tile.octet) * 8 for octet in octets]

        def step(step: Array, running: list[PartialSoftmax[Array]]) -> list[PartialSoftmax[Array]]:
            stage, later = lax.rem(step - first, stages), step + stages
            # Loads ids before the waits, to hide the latency.
            granule_rows = self.locate(item, later)

            def refill(part: _Part) -> None:
                sync_warps()
                pl.when(later < last)(lambda: self._fetch(granule_rows, part, stage))

            self._wait(keys, stage, later >= last)
            if self.shape.widens:
                refill(keys)
            products = self._score(keys.wide.at[stage])
            if not self.shape.widens:
                refill(keys)
            weights: list[Array] = []
            for i, (position, before) in enumerate(zip(positions, running, strict=True)):
                running[i], of_half = self._soften(item, position, step, products[i], before)
                weights.append(of_half)
            self._wait(values, stage, later >= last)
            if self.shape.widens:
                refill(values)
            self.clean_values(item, step)
            out = self._add([some.out for some in running], weights, values.wide.at[stage])
            if not self.shape.widens:
                refill(values)
            return [some._replace(out=sums) for some, sums in zip(running, out, strict=True)]

        running = lax.fori_loop(first, last, step, [self._start() for _ in halves])
        for half, of_half in zip(halves, running, strict=True):
            self.finish(item, half, of_half)

    def _last_step(self, item: Item, half: Array | int) -> Array:
        """Returns the step at which the steps of a half end."""
        tile, last, keys = item.tile, item.tile.last_step, self.shape.keys
        if not self.config.causal or self.shape.parts == 1:
            return last
        seen = self.config.allocated_before(tile.position + (half + 1) * ROWS, tile.rank)
        return lax.max(lax.min(last, lax.div(seen + (keys - 1), keys)), tile.first_step + 1)

    # --- loads ----------------------------------------------------------------------

    def _parts(self, item: Item) -> tuple[_Part, _Part]:
        """Returns the keys and the values of a row."""
        config, first, smem = self.config, item.first_column, self.smem
        keys, values = pl.ds(first, config.key_width), first + config.key_width
        return (
            _Part(keys, self.keys, smem.narrow[0], smem.keys_full),
            _Part(pl.ds(values, config.value_width), self.values, smem.narrow[1], smem.values_full),
        )

    def _fetch(self, granule_rows: list[Array], part: _Part, stage: Array) -> None:
        """Starts loading the keys or the values of a step."""
        n, target = self.steps.granule, part.narrow if self.shape.widens else part.wide.at[stage]
        for j, row in enumerate(granule_rows):
            source = self.pages.at[pl.ds(pl.multiple_of(row, GRANULE), n), part.columns]
            self.copies.start(source, target.at[pl.ds(j * n, n)], part.full, stage)

    def _wait(self, part: _Part, stage: Array, is_last: Array) -> None:
        """Waits for the keys or the values of a step, and widens 8-bit ones."""
        self.copies.wait(part.full, stage, is_last)
        if self.shape.widens:
            narrow = plgpu.load(part.narrow, layout=plgpu.Layout.WGMMA_8BIT)
            part.wide[stage] = widen(narrow, self.shape.compute)

    # --- products -------------------------------------------------------------------

    def _start(self) -> PartialSoftmax[Array]:
        rows = plgpu.Layout.WGMMA
        return PartialSoftmax(
            plgpu.layout_cast(jnp.zeros((ROWS, self.config.value_width), jnp.float32), rows),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), rows),
        )

    def _score(self, keys: Ref) -> list[Array]:
        """Returns the products of each half's queries and the keys."""
        dtype = self.shape.compute
        left, right = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype)
        zeros = jnp.zeros((ROWS, self.shape.keys), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.MMA_ACC(dtype))
        products, width = [zeros] * self.shape.halves, math.gcd(self.config.key_width, 64)
        for first in range(0, self.config.key_width, width):
            columns = pl.ds(first, width)
            loaded = plgpu.load(keys.at[:, columns].T, layout=right)  # once for all halves
            for i, before in enumerate(products):
                queries = plgpu.load(self.smem.query.at[i, :, columns], layout=left)
                products[i] = plgpu.mma(before, queries, loaded)
        return products

    def _soften(
        self,
        item: Item,
        position: Array,
        step: Array,
        products: Array,
        before: PartialSoftmax[Array],
    ) -> tuple[PartialSoftmax[Array], Array]:
        """Returns the softmax with the keys of a step, but for their values, and their weights."""
        highest, shrink, weights = self.softmax(item, position, step, products, before.highest)
        out = before.out * lax.broadcast_in_dim(shrink, before.out.shape, [0])
        total = before.total * lax.broadcast_in_dim(shrink, before.total.shape, [0])
        total = common.add_columns(total, weights)
        return PartialSoftmax(out, highest, total), as_left(weights.astype(self.shape.compute))

    def _add(self, sums: list[Array], weights: list[Array], values: Ref) -> list[Array]:
        """Returns the sums of each half plus the values of a step times their weights."""
        right = plgpu.Layout.MMA_RHS(self.shape.compute)
        for key in range(0, self.shape.keys, DEPTH):
            loaded = plgpu.load(values.at[pl.ds(key, DEPTH)], layout=right)
            for i, some in enumerate(weights):
                left = lax.slice(some, (0, key), (ROWS, key + DEPTH))
                sums[i] = plgpu.mma(sums[i], left, loaded)
        return sums

    # --- results --------------------------------------------------------------------

    @override
    def values_of(self, item: Item, step: Array) -> Ref:
        return self.values.at[lax.rem(step - item.tile.first_step, self.shape.stages)]

    @override
    def commit(self) -> None:
        if self.shape.by_tma:
            plgpu.commit_smem()
        else:
            sync_warps()

    @override
    def write_rows(self, half: Array | int, values: Array, out: Ref, rows: Rows) -> None:
        whole = (rows.begin == 0) & (rows.end == ROWS)
        pl.when(whole)(lambda: store(out.at[pl.ds(rows.token, ROWS)], values))

        @pl.when(~whole)
        def _() -> None:
            store(self.staged, values)
            self.commit()

            @pl.loop(rows.begin, rows.end)
            def _(row: Array) -> None:
                loaded = plgpu.load(self.staged.at[row], layout=COLUMNS, optimized=False)
                store(out.at[rows.token + row], loaded)

            self.commit()
