"""Code that the two kernels that prefill share: operands, the order of tiles, masks and results.

One multiplies by wgmma, the other by mma. In both, a warpgroup has the queries of half a tile.
Thread blocks are persistent: they run many tiles, long ones first.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float32

from pallas_kernels import _capability
from pallas_kernels._mosaic import Ref, call_unfused, full_like, store
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import LOG2E, PartialSoftmax, Steps
from pallas_kernels._paged_attention.decode_block import Outputs
from pallas_kernels._paged_attention.prefill_tasks import QUERIES, ROWS, PrefillTile
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import load_field, load_row

HALVES = QUERIES // ROWS  # of a tile
SPARE_ROWS = 8  # of splits, undefined: 8 rows are read from the first row of any request on
UNSEEN = -1e30  # a score below all others; -inf would need checks in every step
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


class Launch(NamedTuple):
    """The launch of a kernel.

    run: the code of a thread block, given its operands and its shared memory.
    scratch: that memory.
    warpgroups: of a thread block.
    per_sm: thread blocks on an SM.
    parts: thread blocks that share the queries of a tile and a head.
    """

    run: Callable[["PrefillOperands", Any], None]
    scratch: Any
    warpgroups: int = 1
    per_sm: int = 1
    parts: int = 1


def launch(
    how: Launch,
    config: Config,
    arrays: "PrefillArrays[Array]",
    queries: Array,
    rows: Array,
    *,
    num_tiles: int = 0,
    num_splits: int = 0,
    out: Ref | None = None,
) -> Sequence[Array]:
    """Attends from tiles of queries: writes their output, or returns them as splits.

    Args:
      queries: [T with padding, ...], a multiple of 8 tokens, and at least `ROWS`.
      rows: of the pages.
      num_tiles: tiles whose output is written; tiles from this index on are splits.
      num_splits: the most splits that there can be.
      out: the output, [T, heads, V], if there are any tiles that are no splits.

    Returns:
      If there are tiles, their log-sum-exp, float32[num_tiles, heads, 2, 64], undefined for rows
      without a query. If there are splits, the fields of a `PartialSoftmax`, as `decode` returns
      it, with `SPARE_ROWS`.
    """
    heads, results = config.kv_heads * config.group, list[tuple[int, ...]]()
    if num_tiles:
        results.append((num_tiles, heads, HALVES, ROWS))
    if num_splits:
        stored, width = QUERIES + SPARE_ROWS, sum(width for _, width in config.value_parts)
        results += [(num_splits, heads, width, stored), *[(num_splits, heads, stored)] * 2]
    items = heads * arrays.tiles.shape[0] * how.parts
    call = plgpu.kernel(
        lambda *refs: how.run(PrefillOperands.from_refs(*refs[:-1]), refs[-1]),
        out_type=[jax.ShapeDtypeStruct(result, jnp.float32) for result in results],
        grid=(min(items, _capability.max_thread_blocks(how.per_sm)),),
        grid_names=("block",),
        num_threads=how.warpgroups,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        scratch_types=[how.scratch],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # threads read only what they wrote or waited for
            reduction_scratch_bytes=0,  # maxima and sums of rows stay within warps
        ),
    )
    return call_unfused(call, [*arrays, queries, rows], [] if out is None else [out])


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


class PrefillOperands(NamedTuple):
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


class Item(NamedTuple):
    """A tile and a head, or a part of its rows, with the numbers of that head.

    part: see `Place`.
    steps_before: steps of the thread block's earlier items.
    """

    tile: PrefillTile
    head: Array
    part: Array | int
    first_row: Array
    first_column: Array | int
    steps_before: Array
    scale: Array
    value_scale: Array
    sink: Array

    def steps_until(self, step: Array) -> Array:
        """Returns how many steps the thread block takes before a step of this tile."""
        return self.steps_before + step - self.tile.first_step


class Place(NamedTuple):
    """Whether there is an item, its row of the tiles, its head, and its part of the rows."""

    is_item: Array
    index: Array
    head: Array
    part: Array | int


class Rows(NamedTuple):
    """Rows ``begin`` to ``end - 1`` of half a tile, whose first row is a token."""

    token: Array
    begin: Array
    end: Array


class Running(Protocol):
    """A running softmax: `PartialSoftmax`, with ``total`` in 8 parts, added up at the end."""

    @property
    def out(self) -> Float32[Array, "rows values"]: ...
    @property
    def highest(self) -> Float32[Array, " rows"]: ...
    @property
    def total(self) -> Float32[Array, "rows 8"]: ...


class PrefillBlock:
    """The code of one thread block, but for its loads and products."""

    def __init__(
        self, config: Config, steps: Steps, operands: PrefillOperands, parts: int = 1
    ) -> None:
        self.config, self.steps, self.parts = config, steps, parts
        self.arrays, self.queries, self.pages, self.outputs, self.splits = operands
        self.heads = config.kv_heads * config.group
        self.block, self.num_blocks = lax.axis_index("block"), lax.axis_size("block")
        self.num_tiles, self.heads_together = [
            load_field(PrefillTile, self.arrays.tiles, 0, field)
            for field in ("num_tiles", "heads_together")
        ]
        self.num_items = self.num_tiles * (self.heads * parts)
        self.num_rounds = lax.div(self.num_items + (self.num_blocks - 1), self.num_blocks)

    def values_of(self, item: Item, step: Array) -> Ref:
        """Returns the values of a step in shared memory, in 16 bits."""
        raise NotImplementedError

    def commit(self) -> None:
        """Orders stores to shared memory before products and copies that follow."""
        plgpu.commit_smem()

    def write_rows(self, half: Array | int, values: Array, out: Ref, rows: Rows) -> None:
        """Writes rows of [ROWS, V] to their tokens of an output [T, V]."""
        raise NotImplementedError

    def each_item(self, do: Callable[[Array, Item], None]) -> None:
        """Calls ``do(turn, item)`` for every item of this thread block."""

        def one(turn: Array, steps_before: Array) -> Array:
            place = self.locate_item(turn)
            head, index = place.head, place.index
            tile = load_row(PrefillTile, self.arrays.tiles, index)
            kv_head = lax.div(head, self.config.group)
            first_row, column = self.steps.head(tile.first_row, kv_head)
            # Loaded early to hide the latency.
            numbers = [self.arrays.numbers[head, column] for column in range(3)]
            item = Item(tile, head, place.part, first_row, column, steps_before, *numbers)
            pl.when(place.is_item)(lambda: do(turn, item))
            return item.steps_until(tile.last_step)

        lax.fori_loop(0, self.num_rounds, one, jnp.int32(0))

    def _number(self, turn: Array | int) -> Array:
        """Returns the number of an item; every other round is reversed, to balance the load."""
        back = self.num_blocks - 1 - self.block
        is_even = lax.rem(jnp.asarray(turn, jnp.int32), 2) == 0
        return turn * self.num_blocks + lax.select(is_even, self.block, back)

    def locate_item(self, turn: Array | int) -> "Place":
        """Returns where an item lies; past the last item, where the last one does."""
        number, part = self._number(turn), 0
        is_item = number < self.num_items
        number = lax.max(lax.min(number, self.num_items - 1), 0)
        if self.parts > 1:
            number, part = lax.div(number, self.parts), lax.rem(number, self.parts)
        heads = self.heads_together * self.config.group
        of_section = lax.max(self.num_tiles * heads, 1)
        section, within = lax.div(number, of_section), lax.rem(number, of_section)
        # From long to short tiles, back in the next section, and to short ones in the last: so
        # neighbours are alike, which balances the load.
        is_back = lax.rem(lax.div(self.heads, heads) - section, 2) == 0
        index = lax.div(within, heads)
        index = lax.select(is_back, lax.max(self.num_tiles - 1 - index, 0), index)
        head = section * heads + lax.rem(within, heads)
        return Place(is_item, index, head, part)

    def locate(self, item: Item, step: Array) -> list[Array]:
        """Returns the first row of each granule of a step."""
        found = self.steps.find(self.arrays.block_tables, item.tile.request, step)
        return self.steps.rows(found, item.first_row)

    def octet(self, first: Array, half: Array | int) -> Array:
        """Returns the first row of a half, given the tile's, in multiples of 8.

        Rows past the end of the array are moved back to lie within it.
        """
        last = self.queries.shape[0] // 8 - ROWS // 8
        return lax.min(first + half * (ROWS // 8), last)

    def finish(self, item: Item, half: Array | int, running: Running) -> None:
        """Writes the output of half a tile, or stores the results of a split."""
        outputs, splits, index = self.outputs, self.splits, item.tile.index
        if outputs is not None and splits is not None:
            number = index - outputs.lse.shape[0]
            pl.when(number < 0)(lambda: self._write(item, half, running, outputs))
            pl.when(number >= 0)(lambda: self._store((number, item.head), half, running, splits))
        elif outputs is not None:
            self._write(item, half, running, outputs)
        elif splits is not None:
            self._store((index, item.head), half, running, splits)

    def softmax(
        self, item: Item, position: Array, step: Array, products: Array, before: Array
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

    def _seen(self, item: Item, position: Array, step: Array) -> Array:
        """Returns bool[ROWS, keys]: which keys of a step each query sees."""
        keys = self.steps.size
        shape, layout = (ROWS, keys), plgpu.Layout.WGMMA
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        queries = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + position
        seen = common.sees(self.config, item.tile, queries, key + step * keys)
        return seen & self.steps.is_allocated(key, self._holes(item, step))

    def _holes(self, item: Item, step: Array) -> Array:
        """Returns a bit for each hole of a step."""
        tables, request = self.arrays.block_tables, item.tile.request
        return lax.cond(
            item.tile.has_holes != 0,
            lambda: self.steps.find_holes(tables, request, step),
            lambda: jnp.int32(0),
        )

    def clean_values(self, item: Item, step: Array) -> None:
        """Overwrites the values that no query of the tile sees with zeros.

        All warpgroups do so, and write the same values.
        """
        tile, keys = item.tile, self.steps.size
        key, values = step * keys, self.values_of(item, step)

        @pl.when((key < tile.begin) | (key + keys > tile.end) | (tile.has_holes != 0))
        def _() -> None:
            holes = self._holes(item, step)
            width = math.gcd(self.config.value_width, 64)  # registers are short
            columns, rows = self.config.value_width // width, min(keys, 64)

            @pl.loop(0, keys // rows * columns)
            def _(i: Array) -> None:
                first = pl.multiple_of(lax.div(i, columns) * rows, rows)
                column = pl.multiple_of(lax.rem(i, columns) * width, width)
                part = values.at[pl.ds(first, rows), pl.ds(column, width)]
                seen = tile.begin, tile.end
                common.zero_unseen(part, part, self.steps, holes, key + first, seen)

            self.commit()

    def _store(
        self,
        slot: tuple[Array, Array],
        half: Array | int,
        running: Running,
        splits: PartialSoftmax[Ref],
    ) -> None:
        """Stores the results of a split, given its number and the head."""
        rows, row = pl.ds(half * ROWS, ROWS), 0
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

    def _write(self, item: Item, half: Array | int, running: Running, outputs: Outputs) -> None:
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
        store(outputs.lse.at[item.tile.index, item.head, half], lse)
        out = running.out * lax.broadcast_in_dim(weight, running.out.shape, [0])
        # The output of a query that saw no key may be infinite.
        seen = lax.broadcast_in_dim(seen, out.shape, [0])
        out = lax.select(seen, out, full_like(out, 0)).astype(self.config.out_dtype)
        self.write_rows(half, out, outputs.out.at[:, item.head], self._rows(item.tile, half))

    def _rows(self, tile: PrefillTile, half: Array | int) -> Rows:
        """Returns the rows of a half that are queries of the tile."""
        octet = self.octet(tile.octet, half)
        moved = (octet - tile.octet) * 8  # the first row, in rows of the tile
        begin = lax.max(tile.skip, half * ROWS) - moved
        return Rows(octet * 8, begin, lax.min(tile.count, (half + 1) * ROWS) - moved)
