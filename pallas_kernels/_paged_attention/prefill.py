"""The Mosaic GPU kernel that prefills: many queries of a request over all of its keys.

Two warpgroups, each with 64 queries of one head, take turns on the tensor cores. A third warpgroup
loads keys and values, and widens 8-bit ones. Steps whose keys every query sees skip the masks.
Thread blocks are persistent: they run many tiles, long ones first, and load the first keys of the
next tile in advance.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from pallas_kernels._mosaic import own_buffers
from pallas_kernels._paged_attention import pieces
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.pieces import LOG2E, Steps, multiply, store, tiled
from pallas_kernels._paged_attention.prefill_tasks import KEYS, QUERIES, PrefillTile
from pallas_kernels._paged_attention.tiles import AttentionRule

WARPGROUPS = 2  # that compute
ROWS = QUERIES // WARPGROUPS
STAGES = 2  # steps that are loaded ahead
UNSEEN = -1e30  # a score below all others; -inf would need checks in every step
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


class PrefillShape(NamedTuple):
    """Constants of a compiled kernel.

    page: dtype of the pages.
    compute: 16-bit dtype of the products.
    """

    rule: AttentionRule
    steps: Steps
    page: jnp.dtype
    compute: jnp.dtype

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def registers(self) -> tuple[int, int]:
        """Returns the registers of a computing and of a loading thread; two and one make 504."""
        return (216, 72) if self.widens else (232, 40)


class PrefillArrays(NamedTuple):
    """Arrays of a call, or references to them.

    tiles: int32[N, ...], a `PrefillTile` per row.
    num_tiles: int32[1], how many of the tiles count.
    block_tables: int32[B, W].
    scales: float32[kv_heads], factors of the scores.
    value_scale: float32[kv_heads].
    sinks: float32[heads], logits in base 2; -inf for none.
    first_row: int32[1], the row at which the first page begins.
    """

    tiles: Any
    num_tiles: Any
    block_tables: Any
    scales: Any
    value_scale: Any
    sinks: Any
    first_row: Any


def prefill(
    shape: PrefillShape, arrays: PrefillArrays, queries: Array, pages: StridedPages, out: Any
) -> Array:
    """Writes the output of tiles of queries into ``out``, [T, heads, V].

    Returns:
      The log-sum-exp, float32[N, heads, 2, 64]; undefined for rows without a query.
    """
    num_tiles, heads = arrays.tiles.shape[0], queries.shape[1]
    call = plgpu.kernel(
        lambda *refs: _Prefiller(shape, *refs).run(),
        out_type=[jax.ShapeDtypeStruct((num_tiles, heads, WARPGROUPS, ROWS), jnp.float32)],
        grid=(min(heads * num_tiles, _capability.max_thread_blocks(1)),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    with jax.enable_x64(False):
        return call(*own_buffers([*arrays, queries]), pages.rows(), out)[0]


def _scratch(shape: PrefillShape) -> list[Any]:
    rule, dtype = shape.rule, shape.compute
    align = math.gcd(rule.key_width, rule.value_width)
    arrivals = 1 if shape.widens else shape.steps.granules  # that fill a stage
    scratch = [
        tiled((WARPGROUPS, ROWS, rule.key_width), dtype),
        tiled((STAGES, KEYS, rule.key_width), dtype, align),
        tiled((STAGES, KEYS, rule.value_width), dtype, align),
        plgpu.SMEM((WARPGROUPS, ROWS, rule.value_width), rule.out_dtype),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    if shape.widens:
        for width in (rule.key_width, rule.value_width):
            scratch.append(tiled((KEYS, width), shape.page, align))
            scratch.append(plgpu.Barrier(num_arrivals=shape.steps.granules))
    if not pieces.OPERANDS_IN_REGISTERS:
        scratch.append(tiled((WARPGROUPS, ROWS, KEYS), dtype))
    return scratch


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

    def stage(self, step: Array) -> Array:
        return lax.rem(self.steps_until(step), STAGES)


class _Softmax(NamedTuple):
    """A running softmax.

    Each thread adds up a part of ``total``; the sum of the parts is taken at the end.
    """

    out: Array  # [ROWS, V]
    highest: Array  # [ROWS]
    total: Array  # [ROWS, 8]


class _Prefiller:
    """The kernel's references, and the code of one thread block."""

    def __init__(self, shape: PrefillShape, *refs: Any) -> None:
        self.shape, self.rule, self.steps = shape, shape.rule, shape.steps
        self.arrays = PrefillArrays(*refs[:7])
        self.queries, self.pages, self.out, self.lse = refs[7:11]
        self.query, self.keys, self.values, self.staged = refs[11:15]
        self.query_full, self.keys_full, self.values_full = refs[15:18]
        self.keys_free, self.values_free, self.turn, *self.others = refs[18:]
        self.warpgroup, self.block = lax.axis_index("warpgroup"), lax.axis_index("block")
        self.num_blocks = lax.axis_size("block")
        self.num_items = self.arrays.num_tiles[0] * self.queries.shape[1]
        self.num_rounds = lax.div(self.num_items + (self.num_blocks - 1), self.num_blocks)

    def run(self) -> None:
        @pl.when(self.warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[0], action="increase")
            pl.when(self._is_item(0))(lambda: self._load_queries(0))
            pl.when(self._is_item(0) & (self.warpgroup == 1))(self._swap)
            self._each_item(self._compute)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(self.shape.registers[1], action="decrease")
            self._each_item(self._widen if self.shape.widens else self._load)

    def _each_item(self, do: Callable[[Array, _Item], None]) -> None:
        """Calls ``do(turn, item)`` for every item of this thread block."""

        def one(turn: Array, steps_before: Array) -> Array:
            tile, head = self._tile(turn)
            kv_head = lax.div(head, self.rule.group)
            first_row, column = self.steps.head(self.arrays.first_row, kv_head)
            # Loaded early to hide the latency.
            numbers = (
                self.arrays.scales[kv_head],
                self.arrays.value_scale[kv_head],
                self.arrays.sinks[head],
            )
            item = _Item(tile, head, first_row, column, steps_before, *numbers)
            pl.when(self._is_item(turn))(lambda: do(turn, item))
            return item.steps_until(tile.last_step)

        lax.fori_loop(0, self.num_rounds, one, jnp.int32(0))

    def _number(self, turn: Array | int) -> Array:
        """Returns the number of an item; every other round is reversed, to balance the load."""
        back = self.num_blocks - 1 - self.block
        is_even = lax.rem(jnp.asarray(turn, jnp.int32), 2) == 0
        return turn * self.num_blocks + jnp.where(is_even, self.block, back)

    def _is_item(self, turn: Array | int) -> Array:
        return self._number(turn) < self.num_items

    def _tile(self, turn: Array | int) -> tuple[PrefillTile, Array]:
        """Returns the tile and the head of an item; past the last item, those of the last."""
        number = jnp.minimum(self._number(turn), self.num_items - 1)
        heads = self.queries.shape[1]
        return PrefillTile.load(self.arrays.tiles, lax.div(number, heads)), lax.rem(number, heads)

    # --- the third warpgroup: loads -----------------------------------------------

    def _load(self, turn: Array, item: _Item) -> None:
        del turn
        buffers = (
            (self.keys, self.keys_full, self.keys_free),
            (self.values, self.values_full, self.values_free),
        )

        @pl.loop(item.tile.first_step, item.tile.last_step)
        def _(step: Array) -> None:
            # Loads ids before the wait for stages, to hide the latency.
            places, _ = self._locate(item, step)
            for columns, (buffer, full, free) in zip(self._columns(item), buffers, strict=True):
                stage = self._reuse(item, step, free)
                self._fetch(places, columns, buffer.at[stage], full.at[stage])

    def _widen(self, turn: Array, item: _Item) -> None:
        """Loads 8-bit keys and values, and widens them to 16 bits for the other warpgroups."""
        del turn
        narrow_keys, keys_came, narrow_values, values_came = self.others[:4]
        parts = (
            (narrow_keys, keys_came, self.keys, self.keys_full, self.keys_free),
            (narrow_values, values_came, self.values, self.values_full, self.values_free),
        )
        first, last = item.tile.first_step, item.tile.last_step
        places, _ = self._locate(item, first)

        @pl.when(first < last)
        def _() -> None:
            for columns, (narrow, came, *_) in zip(self._columns(item), parts, strict=True):
                self._fetch(places, columns, narrow, came)

        @pl.loop(first, last)
        def _(step: Array) -> None:
            later, _ = self._locate(item, step + 1)
            for columns, part in zip(self._columns(item), parts, strict=True):
                narrow, came, wide, full, free = part
                stage = self._reuse(item, step, free)
                plgpu.barrier_wait(came)
                for begin in range(0, KEYS, 64):
                    rows = pl.ds(begin, 64)
                    wide[stage, rows] = narrow[rows].astype(self.shape.compute)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[stage])
                given = later, columns, narrow, came
                pl.when(step + 1 < last)(lambda given=given: self._fetch(*given))

    def _reuse(self, item: _Item, step: Array, free: Any) -> Array:
        """Waits until the stage of a step is free, and returns it."""
        stage = item.stage(step)
        pl.when(item.steps_until(step) >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
        return stage

    def _columns(self, item: _Item) -> tuple[pl.Slice, pl.Slice]:
        """Returns the columns of the keys and of the values in a row."""
        rule, first = self.rule, item.first_column
        return pl.ds(first, rule.key_width), pl.ds(first + rule.key_width, rule.value_width)

    def _fetch(self, places: list[Array], columns: pl.Slice, buffer: Any, full: Any) -> None:
        """Starts loading the keys or the values of a step."""
        n = self.steps.granule
        for j, place in enumerate(places):
            source = self.pages.at[pl.ds(place, n), columns]
            plgpu.copy_gmem_to_smem(source, buffer.at[pl.ds(j * n, n)], full)

    def _locate(self, item: _Item, step: Array) -> tuple[list[Array], Array]:
        request, tables = item.tile.request, self.arrays.block_tables
        return self.steps.locate(tables, request, step, item.first_row)

    # --- the other two warpgroups: attention --------------------------------------

    def _load_queries(self, turn: Array | int) -> None:
        """Starts loading the queries of an item."""
        tile, head = self._tile(turn)
        source = self.queries.at[pl.ds(self._octet(tile) * 8, ROWS), head]
        target = self.query.at[self.warpgroup]
        plgpu.copy_gmem_to_smem(source, target, self.query_full.at[self.warpgroup])

    def _octet(self, tile: PrefillTile) -> Array:
        """Returns the first row of this warpgroup, in multiples of 8 tokens.

        Rows past the end of the array are moved back to lie within it.
        """
        last = self.queries.shape[0] // 8 - ROWS // 8
        return jnp.minimum(tile.octet + self.warpgroup * (ROWS // 8), last)

    def _compute(self, turn: Array, item: _Item) -> None:
        tile, index = item.tile, self.warpgroup
        octet = self._octet(tile)
        shift = (octet - tile.octet) * 8  # of this warpgroup's first row, in rows of the tile
        plgpu.barrier_wait(self.query_full.at[index])
        position = tile.position + shift
        running = self._start()
        if self.rule.window is not None or self.rule.chunk is not None:
            running = self._steps(item, position, tile.first_step, tile.full_begin, True, running)
        running = self._steps(item, position, tile.full_begin, tile.full_end, False, running)
        running = self._steps(item, position, tile.full_end, tile.last_step, True, running)
        goes_on = self._is_item(turn + 1)
        # The other warpgroup may continue meanwhile; the second one takes the last turn.
        swaps = goes_on | (index == 0)
        pl.when(swaps)(lambda: plgpu.barrier_arrive(self.turn))
        pl.when(goes_on)(lambda: self._load_queries(turn + 1))
        begin = jnp.maximum(tile.skip, index * ROWS) - shift
        end = jnp.minimum(tile.count, (index + 1) * ROWS) - shift
        self._write(item, running, octet, begin, end)
        pl.when(swaps)(lambda: plgpu.barrier_wait(self.turn))

    def _start(self) -> _Softmax:
        zeros = jnp.zeros((ROWS, self.rule.value_width), jnp.float32)
        return _Softmax(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA),
        )

    def _swap(self) -> None:
        """Passes the tensor cores to the other warpgroup, and waits until it passes them back."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def _steps(
        self,
        item: _Item,
        position: Array,
        begin: Array,
        end: Array,
        masked: bool,
        running: _Softmax,
    ) -> _Softmax:
        def step(i: Array, running: _Softmax) -> _Softmax:
            return self._step(item, position, i, masked, running)

        return lax.fori_loop(begin, end, step, running)

    def _step(
        self, item: _Item, position: Array, step: Array, masked: bool, running: _Softmax
    ) -> _Softmax:
        """Adds a step of keys to a running softmax."""
        stage = item.stage(step)
        holes = jnp.int32(0)
        if masked:
            _, holes = self._locate(item, step)
            plgpu.barrier_wait(self.values_full.at[stage])
            self._clean_values(item, step, stage, holes)
        plgpu.barrier_wait(self.keys_full.at[stage])

        def score(product: Any) -> Array:
            plgpu.wgmma(product, self.query.at[self.warpgroup], self.keys.at[stage].T)
            self._swap()
            return product[...]

        scores = pl.run_scoped(score, plgpu.ACC((ROWS, KEYS), jnp.float32))
        plgpu.barrier_arrive(self.keys_free.at[stage])
        scores, scale = pieces.cap(self.rule, scores, item.scale)
        if masked:
            scores = jnp.where(self._seen(item, position, step, holes), scores * scale, UNSEEN)
            scale = 1.0
        highest = jnp.maximum(running.highest, scores.max(axis=1) * scale)
        shrink = jnp.exp2(running.highest - highest)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(highest, scores.shape, [0]))
        out = running.out * lax.broadcast_in_dim(shrink, running.out.shape, [0])
        narrow = weights.astype(self.shape.compute)
        total = running.total * lax.broadcast_in_dim(shrink, running.total.shape, [0])
        total = pieces.add_columns(total, weights)
        out, total, highest, narrow = lax.optimization_barrier((out, total, highest, narrow))
        plgpu.barrier_arrive(self.turn)  # the softmax is done
        if not masked:
            plgpu.barrier_wait(self.values_full.at[stage])
        plgpu.barrier_wait(self.turn)  # the tensor cores are free
        out = self._add_product(out, narrow, self.values.at[stage])
        plgpu.barrier_arrive(self.values_free.at[stage])
        return _Softmax(out, highest, total)

    def _add_product(self, out: Array, weights: Array, values: Any) -> Array:
        """Returns an output plus the weighted sum of more values."""
        if pieces.OPERANDS_IN_REGISTERS:
            start: Any = plgpu.ACC.init(out)
            sums: Any = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values))(start)
            return sums
        staged: Any = self.others[-1].at[self.warpgroup]
        staged[...] = weights
        plgpu.commit_smem()
        return out + multiply(staged, values)

    def _seen(self, item: _Item, position: Array, step: Array, holes: Array) -> Array:
        """Returns bool[ROWS, KEYS]: which keys of a step each query sees."""
        shape, layout = (ROWS, KEYS), plgpu.Layout.WGMMA
        place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        queries = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + position
        seen = pieces.sees(self.rule, item.tile, queries, place + step * KEYS)
        return seen & self.steps.held(place, holes)

    def _clean_values(self, item: _Item, step: Array, stage: Array, holes: Array) -> None:
        """Overwrites the values that no query of the tile sees with zeros.

        Both warpgroups do so, and write the same values.
        """
        tile, key = item.tile, step * KEYS

        @pl.when((key < tile.begin) | (key + KEYS > tile.end) | (holes != 0))
        def _() -> None:
            for first in range(0, KEYS, 64):
                part = self.values.at[stage, pl.ds(first, 64)]
                seen = tile.begin, tile.end
                pieces.zero_unseen(part, part, self.steps, holes, key + first, seen)
            plgpu.commit_smem()

    def _write(
        self, item: _Item, running: _Softmax, octet: Array, begin: Array, end: Array
    ) -> None:
        """Writes rows ``begin`` to ``end - 1`` to their tokens."""
        index, sink = self.warpgroup, item.sink
        highest = jnp.maximum(running.highest, sink)
        shrink = jnp.exp2(running.highest - highest)
        # A query that saw no key has accumulated weights of unseen keys.
        shrink = jnp.where(running.highest > UNSEEN, shrink, 0.0)
        total = running.total.sum(axis=1) * shrink + jnp.exp2(sink - highest)
        weight = shrink * item.value_scale / jnp.where(total > 0, total, 1.0)
        lse = jnp.log(total) + highest * (1 / LOG2E)
        store(self.lse.at[item.tile.index, item.head, index], lse)
        out = running.out * lax.broadcast_in_dim(weight, running.out.shape, [0])
        # The output of a query that saw no key may be infinite.
        known = lax.broadcast_in_dim(total, out.shape, [0]) > 0
        out = jnp.where(known, out, jnp.zeros_like(out))
        staged = self.staged.at[index]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous item is read
        store(staged, out.astype(self.rule.out_dtype))
        plgpu.commit_smem()
        whole = (begin == 0) & (end == ROWS)

        @pl.when(whole)
        def _() -> None:
            plgpu.copy_smem_to_gmem(staged, self.out.at[pl.ds(octet * 8, ROWS), item.head])

        @pl.when(~whole)
        def _() -> None:
            @pl.loop(begin, end)
            def _(row: Array) -> None:
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(row, 1)], self.out.at[pl.ds(octet * 8 + row, 1), item.head]
                )
