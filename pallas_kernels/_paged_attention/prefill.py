"""The Mosaic GPU kernel that prefills: many queries of a request over all of its keys.

Two warpgroups compute, each with 64 queries of one head, and a third one loads keys and values,
and widens 8-bit ones. A warpgroup scores the keys of a step and adds up the values of the
step before at the same time, and computes the softmax of a step while the tensor cores add up.
Steps whose keys every query sees skip the masks. Thread blocks are persistent: they run many tiles,
long ones first, and prefetch the first keys of the next tile. Another kernel combines the splits of
long tiles, and of tiles that requests share, whose rows are queries of several requests.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, Scratch, store, tiled
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import Steps, add_product, multiply
from pallas_kernels._paged_attention.prefill_block import (
    HALVES,
    PER_ROW,
    UNSEEN,
    Item,
    Launch,
    PrefillBlock,
    PrefillOperands,
    Rows,
)
from pallas_kernels._paged_attention.prefill_tasks import ROWS, PrefillTile
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.steps import GRANULE
from pallas_kernels._paged_attention.tasks import load_field

STAGES = 2  # steps that are prefetched
SMEM_BYTES = 227 * 1024 - 1024  # of a thread block, without barriers


class PrefillShape(NamedTuple):
    """Constants of a compiled kernel.

    page: dtype of the pages.
    compute: 16-bit dtype of the products.
    """

    config: Config
    steps: Steps
    page: jnp.dtype
    compute: jnp.dtype

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def keys(self) -> int:
        """Returns the keys of a step."""
        return self.steps.size

    @property
    def registers(self) -> tuple[int, int]:
        """Returns the registers of a computing and of a loading thread.

        All three warpgroups have 504 together, as they start with; with more, one waits forever.
        """
        return (224, 56) if self.widens else (240, 24)

    @property
    def value_stages(self) -> int:
        """Returns the steps of values that there is shared memory for."""
        is_wide = max(self.config.key_width, self.config.value_width) > 192
        return 1 if self.widens and is_wide else STAGES

    @property
    def staged_width(self) -> int:
        """Returns the columns of the output that are written at once; 0 if nothing fits."""
        config, rows, item = self.config, HALVES * ROWS, self.compute.itemsize
        elements = STAGES * config.key_width + self.value_stages * config.value_width
        used = (rows * config.key_width + self.keys * elements) * item
        if self.widens:
            used += self.keys * (config.key_width + config.value_width)
        if not _mosaic.OPERANDS_IN_REGISTERS:
            used += rows * self.keys * item
        budget = (SMEM_BYTES - used) // (rows * item)
        # Rows begin at multiples of 128 bytes; a width that they do not divide is written by 64s.
        whole = config.value_width // 64 if config.value_width % 64 == 0 else 1
        return max(
            (64 * n for n in range(1, whole + 1) if whole % n == 0 and 64 * n <= budget), default=0
        )


def launch_of(shape: PrefillShape) -> Launch:
    """Returns how the kernel is launched."""
    return Launch(
        lambda operands, scratch: _Prefiller(shape, operands, scratch).run(),
        _Scratch.from_shape(shape),
        warpgroups=HALVES + 1,
    )


class _Scratch[T](NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    query: the queries of each warpgroup.
    keys, values: stages of steps.
    staged: outputs of each warpgroup, all columns or a part of them at a time.
    *_full, *_free: barriers, of each warpgroup's queries and of each stage.
    narrow_*: a step of 8-bit keys and values as they are loaded; None for 16-bit ones.
    weights: operands that interpret mode does not take from registers; None on a GPU.
    """

    query: T
    keys: T
    values: T
    staged: T
    query_full: T
    keys_full: T
    values_full: T
    keys_free: T
    values_free: T
    narrow_keys: T
    narrow_values: T
    narrow_keys_full: T
    narrow_values_full: T
    weights: T

    @classmethod
    def from_shape(cls, shape: PrefillShape) -> "_Scratch[Scratch]":
        """Returns the types for a kernel."""
        config, dtype = shape.config, shape.compute
        align = math.gcd(config.key_width, config.value_width)
        copies = shape.steps.granules
        narrow_keys = narrow_values = narrow_full = weights = None
        if shape.widens:
            narrow_keys = tiled((shape.keys, config.key_width), shape.page, align)
            narrow_values = tiled((shape.keys, config.value_width), shape.page, align)
            narrow_full = plgpu.Barrier(num_arrivals=copies)
        if not _mosaic.OPERANDS_IN_REGISTERS:
            weights = tiled((HALVES, ROWS, shape.keys), dtype)

        def full(stages: int) -> plgpu.Barrier:
            return plgpu.Barrier(num_barriers=stages, num_arrivals=1 if shape.widens else copies)

        def free(stages: int) -> plgpu.Barrier:
            return plgpu.Barrier(num_barriers=stages, num_arrivals=HALVES)

        return cls(
            query=tiled((HALVES, ROWS, config.key_width), dtype, align),
            keys=tiled((STAGES, shape.keys, config.key_width), dtype, align),
            values=tiled((shape.value_stages, shape.keys, config.value_width), dtype, align),
            staged=plgpu.SMEM((HALVES, ROWS, shape.staged_width), config.out_dtype),
            query_full=plgpu.Barrier(num_barriers=HALVES),
            keys_full=full(STAGES),
            values_full=full(shape.value_stages),
            keys_free=free(STAGES),
            values_free=free(shape.value_stages),
            narrow_keys=narrow_keys,
            narrow_values=narrow_values,
            narrow_keys_full=narrow_full,
            narrow_values_full=narrow_full,
            weights=weights,
        )


class _Running(NamedTuple):
    """A running softmax, and the weights of the last step, whose values are not added yet.

    Each thread adds up a part of ``total``; the sum of the parts is taken at the end.
    """

    out: Float32[Array, "rows values"]
    highest: Float32[Array, " rows"]
    total: Float32[Array, "rows 8"]
    weights: Float[Array, "rows keys"]  # in 16 bits


class _Prefiller(PrefillBlock):
    """The code of one thread block."""

    def __init__(
        self, shape: PrefillShape, operands: PrefillOperands, scratch: _Scratch[Ref]
    ) -> None:
        super().__init__(shape.config, shape.steps, operands)
        self.shape, self.smem = shape, scratch
        self.warpgroup = lax.axis_index("warpgroup")

    def run(self) -> None:
        @pl.when(self.warpgroup < HALVES)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[0], action="increase")
            self._load_queries(0)
            self.each_item(self._compute)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == HALVES)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[1], action="decrease")
            self.each_item(self._load_and_widen if self.shape.widens else self._load)

    # --- the last warpgroup: loads ------------------------------------------------

    def _load(self, turn: Array, item: Item) -> None:
        """Loads the keys of each step, and the values of the step before, which are used later."""
        del turn
        keys, values = self._parts(item)
        first, last = item.tile.first_step, item.tile.last_step

        def fetch(granule_rows: list[Array], step: Array, part: _Part) -> None:
            stage = self._reuse(item, step, part)
            self._fetch(granule_rows, part.columns, part.wide, part.full.at[stage], stage)

        granule_rows = self.locate(item, first)
        fetch(granule_rows, first, keys)

        def load(step: Array, before: list[Array]) -> list[Array]:
            # Loads ids before the wait for stages, to hide the latency.
            granule_rows = self.locate(item, step)
            fetch(granule_rows, step, keys)
            fetch(before, step - 1, values)
            return granule_rows

        granule_rows = lax.fori_loop(first + 1, last, load, granule_rows)
        fetch(granule_rows, last - 1, values)

    def _load_and_widen(self, turn: Array, item: Item) -> None:
        """Loads 8-bit keys and values, and widens them to 16 bits for the other warpgroups."""
        del turn
        keys, values = self._parts(item)
        first, last = item.tile.first_step, item.tile.last_step
        granule_rows = self.locate(item, first)
        for part in keys, values:
            self._fetch(granule_rows, part.columns, part.narrow, part.narrow_full)

        def widen(step: Array, part: _Part, later: list[Array]) -> None:
            self._widen(item, step, part)
            given = later, part.columns, part.narrow, part.narrow_full
            pl.when(step + 1 < last)(lambda: self._fetch(*given))

        later = self.locate(item, first + 1)
        widen(first, keys, later)

        def load(step: Array, granule_rows: list[Array]) -> list[Array]:
            later = self.locate(item, step + 1)
            widen(step, keys, later)
            widen(step - 1, values, granule_rows)
            return later

        later = lax.fori_loop(first + 1, last, load, later)
        widen(last - 1, values, later)

    def _widen(self, item: Item, step: Array, part: "_Part") -> None:
        """Widens a step of keys or of values."""
        stage = self._reuse(item, step, part)
        plgpu.barrier_wait(part.narrow_full)
        width = math.gcd(part.columns.size, 128)  # at once, because registers are short
        starts = range(0, self.shape.keys, 64), range(0, part.columns.size, width)
        for row, column in itertools.product(*starts):
            block = pl.ds(row, 64), pl.ds(column, width)
            part.wide[(stage, *block)] = part.narrow[block].astype(self.shape.compute)
        plgpu.commit_smem()
        plgpu.barrier_arrive(part.full.at[stage])

    def _reuse(self, item: Item, step: Array, part: "_Part") -> Array:
        """Waits until the stage of a step is free, and returns it."""
        steps = item.steps_until(step)
        stage = lax.rem(steps, part.stages)
        pl.when(steps >= part.stages)(lambda: plgpu.barrier_wait(part.free.at[stage]))
        return stage

    def _parts(self, item: Item) -> tuple["_Part", "_Part"]:
        """Returns the keys and the values of a row."""
        config, first, smem = self.config, item.first_column, self.smem
        keys = _Part(
            pl.ds(first, config.key_width),
            STAGES,
            *(smem.keys, smem.keys_full, smem.keys_free, smem.narrow_keys, smem.narrow_keys_full),
        )
        values = _Part(
            pl.ds(first + config.key_width, config.value_width),
            self.shape.value_stages,
            *(smem.values, smem.values_full, smem.values_free),
            *(smem.narrow_values, smem.narrow_values_full),
        )
        return keys, values

    def _fetch(
        self, granule_rows: list[Array], columns: pl.Slice, buffer: Ref, full: Ref, *stage: Array
    ) -> None:
        """Starts loading the keys or the values of a step."""
        n = self.steps.granule
        for j, row in enumerate(granule_rows):
            source = self.pages.at[pl.ds(pl.multiple_of(row, GRANULE), n), columns]
            plgpu.copy_gmem_to_smem(source, buffer.at[(*stage, pl.ds(j * n, n))], full)

    # --- the other warpgroups: attention ------------------------------------------

    def _load_queries(self, turn: Array | int) -> None:
        """Starts loading the queries of an item, if there is one."""
        place = self.locate_item(turn)

        @pl.when(place.is_item)
        def _() -> None:
            octet = load_field(PrefillTile, self.arrays.tiles, place.index, "octet")
            octet = self.octet(octet, self.warpgroup)
            source = self.queries.at[pl.ds(octet * 8, ROWS), place.head]
            target = self.smem.query.at[self.warpgroup]
            plgpu.copy_gmem_to_smem(source, target, self.smem.query_full.at[self.warpgroup])

    def _compute(self, turn: Array, item: Item) -> None:
        plgpu.barrier_wait(self.smem.query_full.at[self.warpgroup])
        has_rows = item.tile.count > self.warpgroup * ROWS
        pl.when(has_rows)(lambda: self._compute_rows(turn, item))
        pl.when(~has_rows)(lambda: self._pass(turn, item))

    def _pass(self, turn: Array, item: Item) -> None:
        """Gives back the stages of an item, in which this warpgroup has no rows."""
        self._load_queries(turn + 1)

        @pl.loop(item.tile.first_step, item.tile.last_step)
        def _(step: Array) -> None:
            for part in self._parts(item):
                stage = lax.rem(item.steps_until(step), part.stages)
                plgpu.barrier_wait(part.full.at[stage])
                plgpu.barrier_arrive(part.free.at[stage])

    def _compute_rows(self, turn: Array, item: Item) -> None:
        tile, index = item.tile, self.warpgroup
        moved = (self.octet(tile.octet, index) - tile.octet) * 8  # its first row, in rows of a tile
        running = self._attend(item, tile.position + moved)
        plgpu.commit_smem()  # a barrier: all warps have read the queries
        self._load_queries(turn + 1)
        stage = self._value_stage(item, tile.last_step - 1)
        out = self._add_product(running, stage)
        plgpu.barrier_arrive(self.smem.values_free.at[stage])
        self.finish(item, index, running._replace(out=out))

    def _attend(self, item: Item, position: Array) -> _Running:
        """Attends to all keys of a tile; the values of the last step are not added yet."""
        first, last = item.tile.first_step, item.tile.last_step

        def step(step: Array, running: _Running) -> _Running:
            return self._step(item, position, step, running)

        return lax.fori_loop(first + 1, last, step, self._first_step(item, position))

    def _key_stage(self, item: Item, step: Array) -> Array:
        return lax.rem(item.steps_until(step), STAGES)

    def _value_stage(self, item: Item, step: Array) -> Array:
        return lax.rem(item.steps_until(step), self.shape.value_stages)

    def _first_step(self, item: Item, position: Array) -> _Running:
        """Returns the softmax of a tile's first step."""
        step, config = item.tile.first_step, self.config
        stage = self._key_stage(item, step)
        plgpu.barrier_wait(self.smem.keys_full.at[stage])
        scores = multiply(self.smem.query.at[self.warpgroup], self.smem.keys.at[stage].T)
        plgpu.barrier_arrive(self.smem.keys_free.at[stage])
        highest = plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW)
        highest, _, weights = self.softmax(item, position, step, scores, highest)
        plgpu.barrier_wait(self.smem.values_full.at[self._value_stage(item, step)])
        self.clean_values(item, step)
        zeros = jnp.zeros((ROWS, config.value_width), jnp.float32)
        total = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
        return _Running(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            highest,
            common.add_columns(total, weights),
            weights.astype(self.shape.compute),
        )

    def _step(self, item: Item, position: Array, step: Array, running: _Running) -> _Running:
        """Scores a step of keys, while it adds the values of the step before."""
        stage, before = self._key_stage(item, step), self._value_stage(item, step - 1)
        values_full = self.smem.values_full.at[self._value_stage(item, step)]
        plgpu.barrier_wait(self.smem.keys_full.at[stage])

        def soften(scores: Array) -> tuple[Array, Array, Array, Array]:
            plgpu.barrier_arrive(self.smem.keys_free.at[stage])
            found = self.softmax(item, position, step, scores, running.highest)
            highest, shrink, weights = found
            total = running.total * lax.broadcast_in_dim(shrink, running.total.shape, [0])
            total = common.add_columns(total, weights)
            softened = lax.optimization_barrier((highest, shrink, weights, total))
            # A wait between the softmax and the end of the sums, or the compiler moves the softmax
            # behind that end.
            if self.shape.value_stages > 1:
                plgpu.barrier_wait(values_full)
                self.clean_values(item, step)
            return softened

        keys = self.smem.keys.at[stage].T
        out, (highest, shrink, weights, total) = self._score_and_add(running, keys, before, soften)
        plgpu.barrier_arrive(self.smem.values_free.at[before])
        if self.shape.value_stages == 1:
            plgpu.barrier_wait(values_full)
            self.clean_values(item, step)
        out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        return _Running(out, highest, total, weights.astype(self.shape.compute))

    def _score_and_add(
        self,
        running: _Running,
        keys: Ref,
        before: Array,
        soften: Callable[[Array], tuple[Array, ...]],
    ) -> tuple[Array, Sequence[Array]]:
        """Returns the output with the values of the step before, and ``soften(scores)``.

        The tensor cores add values while scores are softened.
        """
        query, values = self.smem.query.at[self.warpgroup], self.smem.values.at[before]
        if not _mosaic.OPERANDS_IN_REGISTERS:
            softened = soften(multiply(query, keys))
            return self._add_product(running, before), softened
        shape = (ROWS, self.shape.keys)

        def both(refs: Sequence[Ref]) -> None:
            sums, *results = refs

            def run(product: Ref) -> None:
                plgpu.wgmma(product, query, keys)
                plgpu.wgmma(sums, running.weights, values)
                scores = plgpu.wgmma_accumulator_load(product, wait_n=1)
                for ref, value in zip(results, soften(scores), strict=True):
                    ref[...] = value

            pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

        # In 16 bits, weights would take registers that the tensor cores still read.
        weights = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        buffers = running.highest, running.highest, weights, running.total
        start: Ref = (plgpu.ACC.init(running.out), *buffers)
        out, *softened = pl.run_state(both)(start)
        return out, softened

    def _add_product(self, running: _Running, stage: Array) -> Array:
        """Returns the output plus the weighted sum of the values in a stage."""
        values = self.smem.values.at[stage]
        weights = running.weights
        if not _mosaic.OPERANDS_IN_REGISTERS:
            staged = self.smem.weights.at[self.warpgroup]
            staged[...] = weights
            plgpu.commit_smem()
            weights = staged
        return add_product(running.out, weights, values)

    @override
    def values_of(self, item: Item, step: Array) -> Ref:
        return self.smem.values.at[self._value_stage(item, step)]

    @override
    def write_rows(self, half: Array | int, values: Array, out: Ref, rows: Rows) -> None:
        width = self.shape.staged_width
        for start in range(0, self.config.value_width, width):
            first = min(start, self.config.value_width - width)  # the last part may overlap
            part = lax.slice(values, (0, first), (ROWS, first + width))
            self._write_columns(part, out.at[:, pl.ds(first, width)], rows)

    def _write_columns(self, part: Array, out: Ref, rows: Rows) -> None:
        """Writes some columns of the rows of an output."""
        staged = self.smem.staged.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is read
        store(staged, part)
        plgpu.commit_smem()
        whole = (rows.begin == 0) & (rows.end == ROWS)

        @pl.when(whole)
        def _() -> None:
            plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(rows.token, ROWS)])

        @pl.when(~whole)
        def _() -> None:
            @pl.loop(rows.begin, rows.end)
            def _(row: Array) -> None:
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(row, 1)], out.at[pl.ds(rows.token + row, 1)]
                )


class _Part(NamedTuple):
    """The keys, or the values: their columns in a row of pages, and their shared memory."""

    columns: pl.Slice
    stages: int
    wide: Ref
    full: Ref
    free: Ref
    narrow: Ref
    narrow_full: Ref
