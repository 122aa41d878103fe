"""The Mosaic GPU kernel that decodes: a few queries of a request over all of its keys.

Operands are swapped (scores are keys times queries), so that 64 keys are the rows of a wgmma and
the query heads of one KV head its columns. A thread block has one warpgroup, which also loads, so
that several thread blocks fit on an SM and hide each other's latencies. 16-bit pages are used in
place in shared memory; 8-bit pages are widened to 16 bits, keys in registers, values through shared
memory. While the last keys of a tile are used, the first ones of the next are loaded. A tile that
one thread block serves whole is finished there; the others are combined by another kernel.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability, _mosaic
from pallas_kernels._mosaic import own_buffers, store, tiled
from pallas_kernels._paged_attention import pieces
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.pieces import PartialSoftmax, Steps, multiply
from pallas_kernels._paged_attention.tasks import STEP, Lane, TaskMap, Tile, segment_steps
from pallas_kernels._paged_attention.tiles import AttentionRule

SMEM_PER_SM = 227 * 1024
BYTES_AHEAD = 128 * 1024  # in flight per SM; with more, thread blocks slow each other down
STAGES = 2  # steps that a thread block loads ahead
STAGED = 8  # rows of the output that are written at once
NARROW = plgpu.Layout.WGMMA_8BIT
SCALE, VALUE_SCALE, SINKS = range(3)  # columns of the numbers of a KV head
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # of a vector with one number per column


class DecodeShape(NamedTuple):
    """Constants of a compiled kernel.

    rows: query heads of a tile, a multiple of 8.
    page: dtype of the pages.
    compute: 16-bit dtype of the products.
    spare_rows: rows that results have besides, undefined.
    """

    rule: AttentionRule
    steps: Steps
    rows: int
    page: jnp.dtype
    compute: jnp.dtype
    spare_rows: int = 0

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Returns the first column and the width of parts of a value that wgmma takes.

        Their widths are multiples of 64. The last one may overlap the one before, and end with the
        value.
        """
        width = self.rule.value_width
        whole = width // 64 * 64
        return [(0, whole)] + [(width - 64, 64)] * (width > whole)

    @property
    def is_small(self) -> bool:
        """Returns whether a thread has registers for the keys and the values of a step at once."""
        return self.rows == 8

    @property
    def thread_blocks_per_sm(self) -> int:
        """Returns how many thread blocks fit on an SM and load at most `BYTES_AHEAD` together."""
        rule = self.rule
        ahead = STAGES * STEP * (rule.key_width + rule.value_width) * self.page.itemsize
        used = ahead + self.rows * (2 * rule.key_width + STEP) * 2 + 4096
        used += STAGED * (rule.value_width + STEP) * rule.out_dtype.itemsize
        used += STEP * rule.value_width * 2 if self.widens else 0
        by_registers = 2 if self.rows > 16 else 3 if self.widens or not self.is_small else 4
        return max(1, min(by_registers, SMEM_PER_SM // used, BYTES_AHEAD // ahead))

    @property
    def num_lanes(self) -> int:
        blocks = _capability.max_thread_blocks(self.thread_blocks_per_sm)
        return max(1, blocks // self.rule.kv_heads)


class Outputs(NamedTuple):
    """References to the output, [T, heads, V], and to the log-sum-exp of tiles.

    lse: float32[N, kv_heads, rows]; undefined for empty tiles.
    """

    out: Any
    lse: Any


def decode(
    shape: DecodeShape,
    tasks: TaskMap,
    tables: Array,
    queries: Array,
    pages: StridedPages,
    numbers: Array,
    outputs: Outputs | None = None,
) -> PartialSoftmax:
    """Attends from all tiles, and returns the partial softmax of each segment.

    Args:
      tables: int32[B, W].
      queries: [N, kv_heads, rows, K].
      numbers: float32[kv_heads, 2 + rows]: `SCALE`, `VALUE_SCALE` and from `SINKS` on logits of the
        rows in base 2, -inf for none.
      outputs: the results of tiles that are one segment, which are finished and not returned; None:
        all are returned.

    Returns:
      ``out`` float32[S, kv_heads, V, rows], of one window of values after another, ``highest`` and
      ``total`` float32[S, kv_heads, rows], and spare rows; undefined where S
      counts more segments than there are.
    """
    rule, rows = shape.rule, shape.rows
    results = (tasks.num_segments, rule.kv_heads, rows + shape.spare_rows)
    call = plgpu.kernel(
        lambda *refs: _Decoder(
            shape, _Operands.of(*refs[:-1], finishes=outputs is not None), refs[-1]
        ).run(),
        out_type=[
            jax.ShapeDtypeStruct(
                (*results[:2], sum(width for _, width in shape.windows), results[2]), jnp.float32
            ),
            jax.ShapeDtypeStruct(results, jnp.float32),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ],
        grid=(rule.kv_heads, shape.num_lanes),
        grid_names=("head", "lane"),
        kernel_name="paged_attention_decode",
        scratch_types=[_Scratch.of(shape, None if outputs is None else rule.out_dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    first_row = pages.first_row().reshape(1)
    inputs = own_buffers([tasks.tiles, tasks.lanes, tables, queries, numbers, first_row])
    with jax.enable_x64(False):  # pages.rows() is a whole buffer
        return PartialSoftmax(*call(*inputs, pages.rows(), *(outputs or ())))


class _Operands(NamedTuple):
    """References to the arrays of a call, and to the results of segments."""

    tiles: jax.Ref
    lanes: jax.Ref
    tables: jax.Ref
    queries: jax.Ref
    numbers: jax.Ref
    first_row: jax.Ref
    pages: jax.Ref
    outputs: Outputs | None
    segments: PartialSoftmax

    @classmethod
    def of(cls, *refs: jax.Ref, finishes: bool) -> Self:
        tiles, lanes, tables, queries, numbers, first_row, pages, *outputs, out, high, total = refs
        arrays = tiles, lanes, tables, queries, numbers, first_row, pages
        written = Outputs(*outputs) if finishes else None
        return cls(*arrays, written, PartialSoftmax(out, high, total))


class _Scratch(NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    loaded: stages of steps, each key followed by its value.
    query: the queries of a tile, and of the next.
    weights: of the keys of a step.
    staged: some rows of the output, for each window of values; none if tiles are not finished.
    widened: 8-bit values in 16 bits; None for 16-bit pages.
    widened_keys: 8-bit keys in 16 bits, for interpret mode; None on a GPU.
    """

    loaded: Any
    query: Any
    weights: Any
    staged: Any
    loaded_full: Any
    query_full: Any
    widened: Any
    widened_keys: Any

    @classmethod
    def of(cls, shape: DecodeShape, out: Any) -> Self:
        """Returns the types for a kernel that finishes tiles in dtype ``out``, or None."""
        rule = shape.rule
        align = math.gcd(rule.key_width, rule.value_width)
        widened = widened_keys = None
        if shape.widens:
            widened = tiled((STEP, rule.value_width), shape.compute)
            if not _mosaic.OPERANDS_IN_REGISTERS:
                widened_keys = tiled((STEP, rule.key_width), shape.compute)
        return cls(
            loaded=tiled((STAGES, STEP, rule.key_width + rule.value_width), shape.page, align),
            query=tiled((2, shape.rows, rule.key_width), shape.compute, align),
            weights=tiled((shape.rows, STEP), shape.compute, math.gcd(align, STEP)),
            staged=[
                plgpu.SMEM((STAGED, width), out) for _, width in shape.windows if out is not None
            ],
            loaded_full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=shape.steps.granules),
            query_full=plgpu.Barrier(num_barriers=2),
            widened=widened,
            widened_keys=widened_keys,
        )


class _Softmax(NamedTuple):
    """A running softmax. ``total`` is kept per key and column, and summed at the end."""

    out: list[Array]  # [width, columns] for each window
    highest: Array  # [columns]
    total: Array  # [STEP, columns]


class _Part(NamedTuple):
    """The steps of a tile that a lane takes; none past the lane's last tile."""

    tile: Tile
    index: Array
    first_step: Array
    num_steps: Array


class _Ahead(NamedTuple):
    """What a lane has done before a part, and what it loads in advance.

    steps, parts: the number of those before, which determine where the next are loaded.
    is_loading: whether the queries and the first steps of the part are being loaded.
    holes: a bit for each hole of the steps in each stage.
    """

    steps: Array
    parts: Array
    is_loading: Array
    holes: Array


class _Here(NamedTuple):
    """A step: its tile, its number, its stage, a bit for each hole, and the buffer of queries."""

    tile: Tile
    step: Array
    stage: Array
    holes: Array
    buffer: Array


_Carry = tuple[_Softmax, Array]  # and the holes


class _Decoder:
    """The code of one thread block."""

    def __init__(self, shape: DecodeShape, operands: _Operands, scratch: _Scratch) -> None:
        self.shape, self.rule, self.steps = shape, shape.rule, shape.steps
        self.operands, self.smem = operands, scratch
        self.head, self.lane = lax.axis_index("head"), lax.axis_index("lane")
        self.first_row, column = self.steps.head(operands.first_row[0], self.head)
        self.columns = pl.ds(column, self.rule.row_width)

    def run(self) -> None:
        lane = Lane.load(self.operands.lanes, self.lane)

        def one(index: Array, ahead: _Ahead) -> _Ahead:
            part, later = self._part(lane, index), self._part(lane, index + 1)
            attend = functools.partial(self._attend, part, later)
            return lax.cond(part.num_steps > 0, attend, lambda ahead: ahead, ahead)

        zero = jnp.int32(0)
        start = _Ahead(zero, zero, zero > 0, zero)
        lax.fori_loop(lane.first_tile, lane.last_tile + 1, one, start)
        if self.operands.outputs is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _part(self, lane: Lane, index: Array) -> _Part:
        is_in_lane = index <= lane.last_tile
        index = jnp.minimum(index, lane.last_tile)
        tile = Tile.load(self.operands.tiles, index)
        begin = jnp.maximum(lane.line_begin, tile.line_begin)
        num_steps = jnp.minimum(lane.line_end, tile.line_end) - begin
        first_step = tile.first_step + begin - tile.line_begin
        return _Part(tile, index, first_step, jnp.where(is_in_lane, num_steps, 0))

    def _attend(self, part: _Part, later: _Part, ahead: _Ahead) -> _Ahead:
        """Attends from a tile's queries to the keys of a part, and begins to load the later one."""
        granules, buffer = self.steps.granules, lax.rem(ahead.parts, 2)
        pl.when(~ahead.is_loading)(lambda: self._load_queries(part, buffer))
        pl.when(later.num_steps > 0)(lambda: self._load_queries(later, 1 - buffer))

        def place(i: Array | int) -> tuple[Array, Array, list[Array], Array]:
            """Returns where step i is loaded, whether it exists, and its granules.

            Steps after the part's last are those of the later one.
            """
            is_own, after = i < part.num_steps, i - part.num_steps
            request = jnp.where(is_own, part.tile.request, later.tile.request)
            step = jnp.where(is_own, part.first_step + i, later.first_step + after)
            places, holes = self._locate(request, step)
            return lax.rem(ahead.steps + i, STAGES), after < later.num_steps, places, holes

        def note(holes: Array, stage: Array, found: Array) -> Array:
            mask, shift = (1 << granules) - 1, stage * granules
            return (holes & ~(mask << shift)) | (found << shift)

        holes = ahead.holes
        for i in range(STAGES):
            stage, exists, places, found = place(i)
            exists &= ~(ahead.is_loading & (i < part.num_steps))
            pl.when(exists)(functools.partial(self._fetch, places, stage))
            holes = jnp.where(exists, note(holes, stage, found), holes)
        plgpu.barrier_wait(self.smem.query_full.at[buffer])
        scale = self.operands.numbers[self.head, SCALE]

        def step(i: Array, carry: _Carry) -> _Carry:
            running, holes = carry
            # Loads the ids of a later step before the wait for this one, to hide the latency.
            stage, exists, places, found = place(i + STAGES)
            of_step = (holes >> (stage * granules)) & ((1 << granules) - 1)
            here = _Here(part.tile, part.first_step + i, stage, of_step, buffer)
            running = self._step(here, scale, running)
            pl.when(exists)(lambda: self._fetch(places, stage))
            return running, note(holes, stage, found)

        holes = self._each_step(part, step, holes)
        steps = ahead.steps + part.num_steps
        return _Ahead(steps, ahead.parts + 1, later.num_steps > 0, holes)

    def _each_step(
        self, part: _Part, step: Callable[[Array, _Carry], _Carry], holes: Array
    ) -> Array:
        """Takes the steps of a part, and stores the results of its segments; returns the holes."""
        fixed, start = segment_steps(self.rule), (self._start(), holes)
        if fixed is None:
            running, holes = lax.fori_loop(0, part.num_steps, step, start)
            self._close(part, running)
            return holes
        tile, first_step = part.tile, part.first_step
        first_number = tile.first_segment - lax.div(tile.first_step, fixed)

        def step_of_segments(i: Array, carry: _Carry) -> _Carry:
            running, holes = step(i, carry)
            end = first_step + i + 1
            closes = (lax.rem(end, fixed) == 0) | (i + 1 == part.num_steps)
            number = first_number + lax.div(end - 1, fixed)
            pl.when(closes)(lambda: self._store(number, running))
            # The next step multiplies the sums by 0.
            highest = running.highest + jnp.where(closes, -jnp.inf, 0.0)
            return running._replace(highest=highest), holes

        return lax.fori_loop(0, part.num_steps, step_of_segments, start)[1]

    def _load_queries(self, part: _Part, buffer: Array) -> None:
        """Starts loading the queries of a part."""
        source = self.operands.queries.at[part.index, self.head]
        target, full = self.smem.query.at[buffer], self.smem.query_full.at[buffer]
        plgpu.copy_gmem_to_smem(source, target, full)

    def _close(self, part: _Part, running: _Softmax) -> None:
        """Writes the results of a part: of a whole tile, or of a segment."""
        number, outputs = self.lane + part.index, self.operands.outputs
        if outputs is None:
            self._store(number, running)
            return
        is_whole = Tile.load(self.operands.tiles, part.index).num_segments == 1
        pl.when(is_whole)(lambda: self._finish(part, outputs, running))
        pl.when(~is_whole)(lambda: self._store(number, running))

    def _finish(self, part: _Part, outputs: Outputs, running: _Softmax) -> None:
        """Writes the output of a whole tile, and its log-sum-exp."""
        numbers, rows = self.operands.numbers, pl.ds(SINKS, self.shape.rows)
        sinks = plgpu.load(numbers.at[self.head, rows], layout=COLUMNS, optimized=False)
        total, scale = running.total.sum(axis=0), numbers[self.head, VALUE_SCALE]
        weight, lse = pieces.normalize(running.highest, total, sinks, scale)
        store(outputs.lse.at[part.index, self.head], lse)
        tile = Tile.load(self.operands.tiles, part.index)  # again, to have more registers before
        for first_row in range(0, self.shape.rows, STAGED):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is read
            rows = slice(first_row, first_row + STAGED)
            for staged, out in zip(self.smem.staged, running.out, strict=True):
                scaled = out * lax.broadcast_in_dim(weight, out.shape, [1])
                store(staged.T, scaled[:, rows].astype(staged.dtype))
            plgpu.commit_smem()
            for row in range(STAGED):
                self._write_row(tile, outputs.out, row, first_row + row)

    def _write_row(self, tile: Tile, out: Any, row: int, number: int) -> None:
        """Writes a staged row to its token and head, if the tile has such a token."""
        token, head = divmod(number, self.rule.group)

        @pl.when(token < tile.count)
        def _() -> None:
            place = tile.token + token, self.head * self.rule.group + head
            for (first, width), staged in zip(self.shape.windows, self.smem.staged, strict=True):
                plgpu.copy_smem_to_gmem(staged.at[row], out.at[(*place, pl.ds(first, width))])

    def _store(self, number: Array, running: _Softmax) -> None:
        """Stores the results of a segment."""
        place, rows = (number, self.head), pl.ds(0, self.shape.rows)
        first = 0
        for out in running.out:
            store(self.operands.segments.out.at[(*place, pl.ds(first, len(out)), rows)], out)
            first += len(out)
        store(self.operands.segments.highest.at[(*place, rows)], running.highest)
        store(self.operands.segments.total.at[(*place, rows)], running.total.sum(axis=0))

    def _start(self) -> _Softmax:
        rows, columns = plgpu.Layout.WGMMA, self.shape.rows
        return _Softmax(
            [
                plgpu.layout_cast(jnp.zeros((width, columns), jnp.float32), rows)
                for _, width in self.shape.windows
            ],
            plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((STEP, columns), jnp.float32), rows),
        )

    def _locate(self, request: Array, step: Array) -> tuple[list[Array], Array]:
        return self.steps.locate(self.operands.tables, request, step, self.first_row)

    def _fetch(self, places: list[Array], stage: Array | int) -> None:
        """Starts loading the keys and values of a step."""
        n = self.steps.granule
        for j, place in enumerate(places):
            plgpu.copy_gmem_to_smem(
                self.operands.pages.at[pl.ds(place, n), self.columns],
                self.smem.loaded.at[stage, pl.ds(j * n, n)],
                self.smem.loaded_full.at[stage],
            )

    def _step(self, here: _Here, scale: Array, running: _Softmax) -> _Softmax:
        """Adds the 64 keys in a stage to a running softmax."""
        shape, (tile, step, stage, holes, buffer) = (STEP, self.shape.rows), here
        query = self.smem.query.at[buffer]
        plgpu.barrier_wait(self.smem.loaded_full.at[stage])
        values = self.smem.loaded.at[stage, :, pl.ds(self.rule.key_width, self.rule.value_width)]
        clean = values if self.smem.widened is None else self.smem.widened
        keys = self._keys(stage)

        def multiply_keys(products: Any) -> Array:
            plgpu.wgmma(products, keys, query.T)
            if self.shape.is_small:  # while the tensor cores work
                self._clean_values(tile, step, holes, values, clean)
            return products[...]

        products = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
        scores, factor = pieces.cap(self.rule, products, scale)
        seen = self._seen(tile, step, holes, shape)
        scores = jnp.where(seen, scores * factor, -jnp.inf)
        highest = jnp.maximum(running.highest, scores.max(axis=0))
        # Without a seen key, highest is -inf, and -inf - -inf is NaN.
        finite = jnp.where(highest > -jnp.inf, highest, 0.0)
        shrink = jnp.exp2(running.highest - finite)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(finite, shape, [1]))
        total = running.total * lax.broadcast_in_dim(shrink, shape, [1]) + weights
        self.smem.weights.T[...] = weights.astype(self.shape.compute)
        if not self.shape.is_small:
            self._clean_values(tile, step, holes, values, clean)
        plgpu.commit_smem()
        out: list[Array] = []
        for (first, width), before in zip(self.shape.windows, running.out, strict=True):
            added = multiply(clean.at[:, pl.ds(first, width)].T, self.smem.weights.T)
            out.append(before * lax.broadcast_in_dim(shrink, added.shape, [1]) + added)
        return _Softmax(out, highest, total)

    def _keys(self, stage: Array) -> Any:
        """Returns a step's keys in 16 bits."""
        keys = self.smem.loaded.at[stage, :, pl.ds(0, self.rule.key_width)]
        if not self.shape.widens:
            return keys
        widened = keys[...].astype(self.shape.compute)
        if self.smem.widened_keys is None:
            return widened
        self.smem.widened_keys[...] = widened
        plgpu.commit_smem()
        return self.smem.widened_keys

    def _seen(self, tile: Tile, step: Array, holes: Array, shape: tuple[int, int]) -> Array:
        """Returns bool[STEP, columns]: which keys of a step each query sees."""
        place = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        queries = lax.div(column, self.rule.group) + tile.position
        seen = pieces.sees(self.rule, tile, queries, place + step * STEP)
        return seen & self.steps.held(place, holes)

    def _clean_values(self, tile: Tile, step: Array, holes: Array, values: Any, clean: Any) -> None:
        """Writes a step's values in 16 bits, with zeros where no query sees them."""
        key = step * STEP
        partial = (key < tile.begin) | (key + STEP > tile.end) | (holes != 0)

        @pl.when(partial)
        def _() -> None:
            pieces.zero_unseen(values, clean, self.steps, holes, key, (tile.begin, tile.end))

        if self.smem.widened is not None:

            @pl.when(~partial)
            def _() -> None:
                loaded = plgpu.load(values, layout=NARROW)
                clean[...] = loaded.astype(self.shape.compute)
