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
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32

from pallas_kernels import _capability, _mosaic
from pallas_kernels._mosaic import Ref, Scratch, call_unfused, full_like, store, tiled
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import (
    LOG2E,
    PartialSoftmax,
    Steps,
    add_product,
    multiply,
)
from pallas_kernels._paged_attention.decode_block import Outputs
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.prefill_tasks import QUERIES, ROWS, PrefillTile
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.steps import GRANULE
from pallas_kernels._paged_attention.tasks import load_field, load_row

WARPGROUPS = QUERIES // ROWS  # that compute
STAGES = 2  # steps that are prefetched
SPARE_ROWS = 8  # of splits, undefined: 8 rows are read from the first row of any request on
SMEM_BYTES = 227 * 1024 - 1024  # of a thread block, without barriers
UNSEEN = -1e30  # a score below all others; -inf would need checks in every step
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


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
        config, rows, item = self.config, WARPGROUPS * ROWS, self.compute.itemsize
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


class PrefillArrays[T](NamedTuple):
    """Arrays of a call, or references to them; few, because each takes a launch to fill.

    tiles: int32[N, ...], a `PrefillTile` per row.
    block_tables: int32[B, W].
    numbers: float32[heads, 3]: the factors of the scores and of the values, and the logit of the
      sink in base 2, -inf for none.
    """

    tiles: T
    block_tables: T
    numbers: T


def prefill(
    shape: PrefillShape,
    arrays: PrefillArrays[Array],
    queries: Array,
    pages: StridedPages,
    *,
    num_tiles: int = 0,
    num_splits: int = 0,
    out: Ref | None = None,
) -> Sequence[Array]:
    """Attends from tiles of queries: writes their output, or returns them as splits.

    Args:
      queries: [T with padding, heads, K], a multiple of 8 tokens, and at least `ROWS`.
      num_tiles: tiles whose output is written; tiles from this index on are splits.
      num_splits: the most splits that there can be.
      out: the output, [T, heads, V], if there are any tiles that are no splits.

    Returns:
      If there are tiles, their log-sum-exp, float32[num_tiles, heads, 2, 64], undefined for rows
      without a query. If there are splits, the fields of a `PartialSoftmax`, as `decode` returns
      it, with `SPARE_ROWS`.
    """
    heads, results = queries.shape[1], list[tuple[int, ...]]()
    if num_tiles:
        results.append((num_tiles, heads, WARPGROUPS, ROWS))
    if num_splits:
        rows, width = QUERIES + SPARE_ROWS, sum(width for _, width in shape.config.value_parts)
        results += [(num_splits, heads, width, rows), *[(num_splits, heads, rows)] * 2]
    call = plgpu.kernel(
        lambda *refs: _Prefiller(shape, _Operands.from_refs(*refs[:-1]), refs[-1]).run(),
        out_type=[jax.ShapeDtypeStruct(result, jnp.float32) for result in results],
        grid=(min(heads * arrays.tiles.shape[0], _capability.max_thread_blocks(1)),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        scratch_types=[_Scratch.from_shape(shape)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # threads read only what they wrote or waited for
            reduction_scratch_bytes=0,  # maxima and sums of rows stay within warps
        ),
    )
    return call_unfused(call, [*arrays, queries, pages.rows()], [] if out is None else [out])


class _Operands(NamedTuple):
    """References to the arrays of a call, to the output and its log-sum-exp, and to splits.

    Either of the latter may be None.
    """

    arrays: PrefillArrays[Ref]
    queries: Ref
    pages: Ref
    outputs: Outputs | None
    splits: PartialSoftmax[Ref] | None

    @classmethod
    def from_refs(cls, *refs: Ref) -> Self:
        tiles, tables, numbers, queries, pages, *results = refs
        outputs = splits = None
        if len(results) != len(PartialSoftmax._fields):
            outputs, results = Outputs(*results[:2]), results[2:]
        if results:
            splits = PartialSoftmax(*results)
        return cls(PrefillArrays(tiles, tables, numbers), queries, pages, outputs, splits)


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
            weights = tiled((WARPGROUPS, ROWS, shape.keys), dtype)

        def full(stages: int) -> plgpu.Barrier:
            return plgpu.Barrier(num_barriers=stages, num_arrivals=1 if shape.widens else copies)

        def free(stages: int) -> plgpu.Barrier:
            return plgpu.Barrier(num_barriers=stages, num_arrivals=WARPGROUPS)

        return cls(
            query=tiled((WARPGROUPS, ROWS, config.key_width), dtype, align),
            keys=tiled((STAGES, shape.keys, config.key_width), dtype, align),
            values=tiled((shape.value_stages, shape.keys, config.value_width), dtype, align),
            staged=plgpu.SMEM((WARPGROUPS, ROWS, shape.staged_width), config.out_dtype),
            query_full=plgpu.Barrier(num_barriers=WARPGROUPS),
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


class _Item(NamedTuple):
    """A tile and a head, with the numbers of that head.

    steps_before: steps of the thread block's earlier items.
    """

    tile: PrefillTile
    head: Array
    first_row: Array
    first_column: Array | int
    steps_before: Array
    scale: Array
    value_scale: Array
    sink: Array

    def steps_until(self, step: Array) -> Array:
        """Returns how many steps the thread block takes before a step of this tile."""
        return self.steps_before + step - self.tile.first_step


class _Running(NamedTuple):
    """A running softmax, and the weights of the last step, whose values are not added yet.

    Each thread adds up a part of ``total``; the sum of the parts is taken at the end.
    """

    out: Float32[Array, "rows values"]
    highest: Float32[Array, " rows"]
    total: Float32[Array, "rows 8"]
    weights: Float[Array, "rows keys"]  # in 16 bits


class _Prefiller:
    """The code of one thread block."""

    def __init__(self, shape: PrefillShape, operands: _Operands, scratch: _Scratch[Ref]) -> None:
        self.shape, self.config, self.steps = shape, shape.config, shape.steps
        self.arrays, self.queries, self.pages, self.outputs, self.splits = operands
        self.smem = scratch
        self.warpgroup, self.block = lax.axis_index("warpgroup"), lax.axis_index("block")
        self.num_blocks = lax.axis_size("block")
        self.num_tiles, self.heads_together = [
            load_field(PrefillTile, self.arrays.tiles, 0, field)
            for field in ("num_tiles", "heads_together")
        ]
        self.num_items = self.num_tiles * self.queries.shape[1]
        self.num_rounds = lax.div(self.num_items + (self.num_blocks - 1), self.num_blocks)

    def run(self) -> None:
        @pl.when(self.warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[0], action="increase")
            self._load_queries(0)
            self._each_item(self._compute)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[1], action="decrease")
            self._each_item(self._load_and_widen if self.shape.widens else self._load)

    def _each_item(self, do: Callable[[Array, _Item], None]) -> None:
        """Calls ``do(turn, item)`` for every item of this thread block."""

        def one(turn: Array, steps_before: Array) -> Array:
            is_item, index, head = self._locate_item(turn)
            tile = load_row(PrefillTile, self.arrays.tiles, index)
            kv_head = lax.div(head, self.config.group)
            first_row, column = self.steps.head(tile.first_row, kv_head)
            # Loaded early to hide the latency.
            numbers = [self.arrays.numbers[head, column] for column in range(3)]
            item = _Item(tile, head, first_row, column, steps_before, *numbers)
            pl.when(is_item)(lambda: do(turn, item))
            return item.steps_until(tile.last_step)

        lax.fori_loop(0, self.num_rounds, one, jnp.int32(0))

    def _number(self, turn: Array | int) -> Array:
        """Returns the number of an item; every other round is reversed, to balance the load."""
        back = self.num_blocks - 1 - self.block
        is_even = lax.rem(jnp.asarray(turn, jnp.int32), 2) == 0
        return turn * self.num_blocks + lax.select(is_even, self.block, back)

    def _locate_item(self, turn: Array | int) -> tuple[Array, Array, Array]:
        """Returns whether there is an item, its row of the tiles, and its head.

        Past the last item, row and head are the last ones.
        """
        number = self._number(turn)
        is_item = number < self.num_items
        number = lax.max(lax.min(number, self.num_items - 1), 0)
        heads = self.heads_together * self.config.group
        of_section = lax.max(self.num_tiles * heads, 1)
        section, within = lax.div(number, of_section), lax.rem(number, of_section)
        # From long to short tiles, back in the next section, and to short ones in the last: so
        # neighbours are alike, which balances the load.
        is_back = lax.rem(lax.div(self.queries.shape[1], heads) - section, 2) == 0
        index = lax.div(within, heads)
        index = lax.select(is_back, lax.max(self.num_tiles - 1 - index, 0), index)
        head = section * heads + lax.rem(within, heads)
        return is_item, index, head

    # --- the last warpgroup: loads ------------------------------------------------

    def _load(self, turn: Array, item: _Item) -> None:
        """Loads the keys of each step, and the values of the step before, which are used later."""
        del turn
        keys, values = self._parts(item)
        first, last = item.tile.first_step, item.tile.last_step

        def fetch(granule_rows: list[Array], step: Array, part: _Part) -> None:
            stage = self._reuse(item, step, part)
            self._fetch(granule_rows, part.columns, part.wide, part.full.at[stage], stage)

        granule_rows = self._locate(item, first)
        fetch(granule_rows, first, keys)

        def load(step: Array, before: list[Array]) -> list[Array]:
            # Loads ids before the wait for stages, to hide the latency.
            granule_rows = self._locate(item, step)
            fetch(granule_rows, step, keys)
            fetch(before, step - 1, values)
            return granule_rows

        granule_rows = lax.fori_loop(first + 1, last, load, granule_rows)
        fetch(granule_rows, last - 1, values)

    def _load_and_widen(self, turn: Array, item: _Item) -> None:
        """Loads 8-bit keys and values, and widens them to 16 bits for the other warpgroups."""
        del turn
        keys, values = self._parts(item)
        first, last = item.tile.first_step, item.tile.last_step
        granule_rows = self._locate(item, first)
        for part in keys, values:
            self._fetch(granule_rows, part.columns, part.narrow, part.narrow_full)

        def widen(step: Array, part: _Part, later: list[Array]) -> None:
            self._widen(item, step, part)
            given = later, part.columns, part.narrow, part.narrow_full
            pl.when(step + 1 < last)(lambda: self._fetch(*given))

        later = self._locate(item, first + 1)
        widen(first, keys, later)

        def load(step: Array, granule_rows: list[Array]) -> list[Array]:
            later = self._locate(item, step + 1)
            widen(step, keys, later)
            widen(step - 1, values, granule_rows)
            return later

        later = lax.fori_loop(first + 1, last, load, later)
        widen(last - 1, values, later)

    def _widen(self, item: _Item, step: Array, part: "_Part") -> None:
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

    def _reuse(self, item: _Item, step: Array, part: "_Part") -> Array:
        """Waits until the stage of a step is free, and returns it."""
        steps = item.steps_until(step)
        stage = lax.rem(steps, part.stages)
        pl.when(steps >= part.stages)(lambda: plgpu.barrier_wait(part.free.at[stage]))
        return stage

    def _parts(self, item: _Item) -> tuple["_Part", "_Part"]:
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

    def _locate(self, item: _Item, step: Array) -> list[Array]:
        """Returns the first row of each granule of a step."""
        found = self.steps.find(self.arrays.block_tables, item.tile.request, step)
        return self.steps.rows(found, item.first_row)

    # --- the other warpgroups: attention ------------------------------------------

    def _load_queries(self, turn: Array | int) -> None:
        """Starts loading the queries of an item, if there is one."""
        is_item, index, head = self._locate_item(turn)

        @pl.when(is_item)
        def _() -> None:
            octet = self._octet(load_field(PrefillTile, self.arrays.tiles, index, "octet"))
            source = self.queries.at[pl.ds(octet * 8, ROWS), head]
            target = self.smem.query.at[self.warpgroup]
            plgpu.copy_gmem_to_smem(source, target, self.smem.query_full.at[self.warpgroup])

    def _octet(self, first: Array) -> Array:
        """Returns the first row of this warpgroup, given the tile's, in multiples of 8.

        Rows past the end of the array are moved back to lie within it.
        """
        last = self.queries.shape[0] // 8 - ROWS // 8
        return lax.min(first + self.warpgroup * (ROWS // 8), last)

    def _compute(self, turn: Array, item: _Item) -> None:
        plgpu.barrier_wait(self.smem.query_full.at[self.warpgroup])
        has_rows = item.tile.count > self.warpgroup * ROWS
        pl.when(has_rows)(lambda: self._compute_rows(turn, item))
        pl.when(~has_rows)(lambda: self._pass(turn, item))

    def _pass(self, turn: Array, item: _Item) -> None:
        """Gives back the stages of an item, in which this warpgroup has no rows."""
        self._load_queries(turn + 1)

        @pl.loop(item.tile.first_step, item.tile.last_step)
        def _(step: Array) -> None:
            for part in self._parts(item):
                stage = lax.rem(item.steps_until(step), part.stages)
                plgpu.barrier_wait(part.full.at[stage])
                plgpu.barrier_arrive(part.free.at[stage])

    def _compute_rows(self, turn: Array, item: _Item) -> None:
        tile, index = item.tile, self.warpgroup
        octet = self._octet(tile.octet)
        shift = (octet - tile.octet) * 8  # of this warpgroup's first row, in rows of the tile
        running = self._attend(item, tile.position + shift)
        plgpu.commit_smem()  # a barrier: all warps have read the queries
        self._load_queries(turn + 1)
        stage = self._value_stage(item, tile.last_step - 1)
        out = self._add_product(running, stage)
        plgpu.barrier_arrive(self.smem.values_free.at[stage])
        begin = lax.max(tile.skip, index * ROWS) - shift
        end = lax.min(tile.count, (index + 1) * ROWS) - shift
        running = running._replace(out=out)
        self._finish(item, running, _Rows(octet * 8, begin, end))

    def _finish(self, item: _Item, running: _Running, rows: "_Rows") -> None:
        """Writes the output of a tile, or stores the results of a split."""
        outputs, splits, index = self.outputs, self.splits, item.tile.index
        if outputs is not None and splits is not None:
            number = index - outputs.lse.shape[0]
            pl.when(number < 0)(lambda: self._write(item, running, rows, outputs))
            pl.when(number >= 0)(lambda: self._store((number, item.head), running, splits))
        elif outputs is not None:
            self._write(item, running, rows, outputs)
        elif splits is not None:
            self._store((index, item.head), running, splits)

    def _attend(self, item: _Item, position: Array) -> _Running:
        """Attends to all keys of a tile; the values of the last step are not added yet."""
        first, last = item.tile.first_step, item.tile.last_step

        def step(step: Array, running: _Running) -> _Running:
            return self._step(item, position, step, running)

        return lax.fori_loop(first + 1, last, step, self._first_step(item, position))

    def _key_stage(self, item: _Item, step: Array) -> Array:
        return lax.rem(item.steps_until(step), STAGES)

    def _value_stage(self, item: _Item, step: Array) -> Array:
        return lax.rem(item.steps_until(step), self.shape.value_stages)

    def _first_step(self, item: _Item, position: Array) -> _Running:
        """Returns the softmax of a tile's first step."""
        step, config = item.tile.first_step, self.config
        stage = self._key_stage(item, step)
        plgpu.barrier_wait(self.smem.keys_full.at[stage])
        scores = multiply(self.smem.query.at[self.warpgroup], self.smem.keys.at[stage].T)
        plgpu.barrier_arrive(self.smem.keys_free.at[stage])
        highest = plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW)
        highest, _, weights = self._softmax(item, position, step, scores, highest)
        plgpu.barrier_wait(self.smem.values_full.at[self._value_stage(item, step)])
        self._clean_values(item, step)
        zeros = jnp.zeros((ROWS, config.value_width), jnp.float32)
        total = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
        return _Running(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            highest,
            common.add_columns(total, weights),
            weights.astype(self.shape.compute),
        )

    def _step(self, item: _Item, position: Array, step: Array, running: _Running) -> _Running:
        """Scores a step of keys, while it adds the values of the step before."""
        stage, before = self._key_stage(item, step), self._value_stage(item, step - 1)
        values_full = self.smem.values_full.at[self._value_stage(item, step)]
        plgpu.barrier_wait(self.smem.keys_full.at[stage])

        def soften(scores: Array) -> tuple[Array, Array, Array, Array]:
            plgpu.barrier_arrive(self.smem.keys_free.at[stage])
            found = self._softmax(item, position, step, scores, running.highest)
            highest, shrink, weights = found
            total = running.total * lax.broadcast_in_dim(shrink, running.total.shape, [0])
            total = common.add_columns(total, weights)
            softened = lax.optimization_barrier((highest, shrink, weights, total))
            # A wait between the softmax and the end of the sums, or the compiler moves the softmax
            # behind that end.
            if self.shape.value_stages > 1:
                plgpu.barrier_wait(values_full)
                self._clean_values(item, step)
            return softened

        keys = self.smem.keys.at[stage].T
        out, (highest, shrink, weights, total) = self._score_and_add(running, keys, before, soften)
        plgpu.barrier_arrive(self.smem.values_free.at[before])
        if self.shape.value_stages == 1:
            plgpu.barrier_wait(values_full)
            self._clean_values(item, step)
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

    def _softmax(
        self, item: _Item, position: Array, step: Array, products: Array, before: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the highest scores, the factor by which sums shrink, and the weights of keys."""
        scores, scale = common.cap(self.config, products, item.scale)
        scale = jnp.asarray(scale, jnp.float32)

        def mask(scores: Array) -> tuple[Array, Array]:
            seen = self._seen(item, position, step)
            unseen = full_like(scores, UNSEEN)
            return lax.select(seen, scores * scale, unseen), jnp.float32(1)

        is_full = (step >= item.tile.full_begin) & (step < item.tile.full_end)
        scores, scale = lax.cond(is_full, lambda scores: (scores, scale), mask, scores)
        highest = lax.max(before, scores.max(axis=1) * scale)
        shrink = jnp.exp2(before - highest)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(highest, scores.shape, [0]))
        return highest, shrink, weights

    def _add_product(self, running: _Running, stage: Array) -> Array:
        """Returns the output plus the weighted sum of the values in a stage."""
        values = self.smem.values.at[stage]
        if _mosaic.OPERANDS_IN_REGISTERS:
            return add_product(running.out, running.weights, values)
        staged = self.smem.weights.at[self.warpgroup]
        staged[...] = running.weights
        plgpu.commit_smem()
        return running.out + multiply(staged, values)

    def _seen(self, item: _Item, position: Array, step: Array) -> Array:
        """Returns bool[ROWS, keys]: which keys of a step each query sees."""
        keys = self.shape.keys
        shape, layout = (ROWS, keys), plgpu.Layout.WGMMA
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        queries = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + position
        seen = common.sees(self.config, item.tile, queries, key + step * keys)
        return seen & self.steps.is_allocated(key, self._holes(item, step))

    def _holes(self, item: _Item, step: Array) -> Array:
        """Returns a bit for each hole of a step."""
        tables, request = self.arrays.block_tables, item.tile.request
        return lax.cond(
            item.tile.has_holes != 0,
            lambda: self.steps.find_holes(tables, request, step),
            lambda: jnp.int32(0),
        )

    def _clean_values(self, item: _Item, step: Array) -> None:
        """Overwrites the values that no query of the tile sees with zeros.

        All warpgroups do so, and write the same values.
        """
        tile, keys = item.tile, self.shape.keys
        key, stage = step * keys, self._value_stage(item, step)

        @pl.when((key < tile.begin) | (key + keys > tile.end) | (tile.has_holes != 0))
        def _() -> None:
            holes = self._holes(item, step)
            width = math.gcd(self.config.value_width, 64)  # registers are short
            columns = self.config.value_width // width

            @pl.loop(0, keys // 64 * columns)
            def _(i: Array) -> None:
                first = pl.multiple_of(lax.div(i, columns) * 64, 64)
                column = pl.multiple_of(lax.rem(i, columns) * width, width)
                part = self.smem.values.at[stage, pl.ds(first, 64), pl.ds(column, width)]
                seen = tile.begin, tile.end
                common.zero_unseen(part, part, self.steps, holes, key + first, seen)

            plgpu.commit_smem()

    def _store(
        self, slot: tuple[Array, Array], running: _Running, splits: PartialSoftmax[Ref]
    ) -> None:
        """Stores the results of a split, given its number and the head."""
        rows, row = pl.ds(self.warpgroup * ROWS, ROWS), 0
        # Rows that saw no key have added up values that they do not see, which may be infinite.
        seen = running.highest > UNSEEN
        out = lax.broadcast_in_dim(seen, running.out.shape, [0])
        out = lax.select(out, running.out, full_like(running.out, 0))
        for first, width in self.config.value_parts:
            part = lax.slice(out, (0, first), (ROWS, first + width))
            part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            store(splits.out.at[(*slot, pl.ds(row, width), rows)].T, part)
            row += width
        highest = jnp.where(seen, running.highest, -jnp.inf)
        store(splits.highest.at[(*slot, rows)], highest)
        store(splits.total.at[(*slot, rows)], running.total.sum(axis=1))

    def _write(self, item: _Item, running: _Running, rows: "_Rows", outputs: Outputs) -> None:
        """Writes rows to their tokens."""
        sink = item.sink
        highest = jnp.maximum(running.highest, sink)
        shrink = jnp.exp2(running.highest - highest)
        # A query that saw no key has accumulated weights of unseen keys.
        seen = running.highest > UNSEEN
        shrink = jnp.where(seen, shrink, 0.0)
        total = running.total.sum(axis=1) * shrink + jnp.exp2(sink - highest)
        weight = shrink * item.value_scale / jnp.where(total > 0, total, 1.0)
        lse = jnp.log(total) + highest * (1 / LOG2E)
        store(outputs.lse.at[item.tile.index, item.head, self.warpgroup], lse)
        out = running.out * lax.broadcast_in_dim(weight, running.out.shape, [0])
        # The output of a query that saw no key may be infinite.
        seen = lax.broadcast_in_dim(seen, out.shape, [0])
        out = lax.select(seen, out, full_like(out, 0)).astype(self.config.out_dtype)
        width = self.shape.staged_width
        for start in range(0, self.config.value_width, width):
            first = min(start, self.config.value_width - width)  # the last part may overlap
            part = lax.slice(out, (0, first), (ROWS, first + width))
            self._write_columns(part, outputs.out.at[:, item.head, pl.ds(first, width)], rows)

    def _write_columns(self, part: Array, out: Ref, rows: "_Rows") -> None:
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


class _Rows(NamedTuple):
    """Rows ``begin`` to ``end - 1`` of a warpgroup, whose first row is a token."""

    token: Array
    begin: Array
    end: Array
