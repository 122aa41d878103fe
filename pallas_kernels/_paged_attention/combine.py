"""The Mosaic GPU kernel that combines splits of decoding into the output.

Tiles that decoding has finished, because they are one split, are left out.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import _capability
from pallas_kernels._mosaic import Ref, Scratch, call_unfused, store
from pallas_kernels._paged_attention.common import PartialSoftmax, add_up, normalize
from pallas_kernels._paged_attention.decode_block import COLUMNS, Outputs
from pallas_kernels._paged_attention.decode_shape import SINKS, VALUE_SCALE
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import Link, Tile, load_row

ROWS = 8  # of the output that a thread block computes
# Several splits are loaded together, to overlap their latencies: a few by one warpgroup, for all
# columns of the output, and many by several, for 64 of the columns.
MANY, WARPGROUPS, WIDTH_OF_MANY = 16, 4, 64
IN_ORDER = 16  # splits that are loaded together to be added one after another
VALUES = plgpu.Layout.WGMMA.reduce(1)  # of a row of the output
ELEMENTS_TOGETHER = 1024  # most elements of a row that a warpgroup loads together


class _Division(NamedTuple):
    """Division of the work among thread blocks, and within one.

    warpgroups: of a thread block; each adds up a share of the splits.
    width: columns of the output that a thread block computes.
    together: splits that a warpgroup loads together.
    """

    warpgroups: int
    width: int
    together: int

    @classmethod
    def choose(cls, value_width: int, num_workers: int, num_tiles: int) -> Self:
        """Returns a division for tiles of about the same length."""
        splits = -(-num_workers // num_tiles) + 1
        warpgroups, width = 1, value_width
        if value_width % WIDTH_OF_MANY:  # parts of values overlap
            width = WIDTH_OF_MANY
        if splits > MANY:
            warpgroups, width = WARPGROUPS, WIDTH_OF_MANY
        rounds = -(-splits // (warpgroups * ELEMENTS_TOGETHER // width))
        return cls(warpgroups, width, -(-splits // (rounds * warpgroups)))


def combine(
    config: Config,
    tiles: Array,
    splits: PartialSoftmax[Array] | None,
    numbers: Array,
    outputs: Outputs,
    linked: PartialSoftmax[Array] | None = None,
    *,
    num_workers: int,
    finished: bool,
) -> None:
    """Writes the output of tiles, and zeros for padding.

    Args:
      tiles: int32[N, ...], a `Tile` per row, and a `Link` if there are linked splits.
      splits: of the tiles, if any.
      numbers: as `decode` takes them.
      linked: splits that tiles take a part in by their links, if any.
      num_workers: splits of all tiles together, about.
      finished: whether tiles of one split are left out.
    """
    num_tiles, rows = tiles.shape[0], outputs.lse.shape[2]
    parts = [*(splits or ()), *(linked or ())]
    rows_of_values = parts[0].shape[2]
    split = _Division.choose(config.value_width, num_workers, num_tiles)
    if config.reproducible:  # one warpgroup, to add up in order
        width = min(config.value_width, split.width)
        split = _Division(1, width, min(IN_ORDER, ELEMENTS_TOGETHER // width))
    warpgroups, width, _ = split
    call = plgpu.kernel(
        lambda *refs: _Combiner(
            *(config, split),
            CombineOperands.from_refs(*refs[:-1], has_own=splits is not None),
            refs[-1],
        ).run(finished),
        out_type=[],
        grid=(rows_of_values // width, rows // ROWS, config.kv_heads, num_tiles),
        grid_names=("part", "row", "head", "tile"),
        kernel_name="paged_attention_combine",
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[_Scratch.from_shape(split, outputs.out.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    call_unfused(call, [tiles, numbers, *parts], outputs)


class CombineOperands(NamedTuple):
    """References to the arrays of a call, and to the log-sum-exp; splits may be None."""

    tiles: Ref
    numbers: Ref
    splits: PartialSoftmax[Ref] | None
    linked: PartialSoftmax[Ref] | None
    out: Ref
    lse: Ref

    @classmethod
    def from_refs(cls, *refs: Ref, has_own: bool = True) -> Self:
        tiles, numbers, *parts, out, lse = refs
        own, others = (parts[:3], parts[3:]) if has_own else ((), parts)
        splits, linked = [PartialSoftmax(*some) if some else None for some in (own, others)]
        return cls(tiles, numbers, splits, linked, out, lse)

    def parts_of(self, tile: Tile, index: Array) -> Iterator[tuple[PartialSoftmax[Ref], Link]]:
        """Yields the splits of a tile, and the splits that it takes a part in."""
        if self.splits is not None:
            yield self.splits, Link(tile.first_split, tile.num_splits, jnp.int32(0))
        if self.linked is not None:
            yield self.linked, load_row(Link, self.tiles, index, len(Tile._fields))


class _Scratch[T](NamedTuple):
    """Shared memory and a barrier: their types, or references to them.

    staged: rows of the output.
    parts: the sum of each warpgroup, if there are several.
    arrived: barrier; all sums are there.
    """

    staged: T
    parts: PartialSoftmax[T]
    arrived: T

    @classmethod
    def from_shape(cls, split: _Division, dtype: DTypeLike) -> "_Scratch[Scratch]":
        """Returns the types for a kernel."""
        warpgroups, width, _ = split
        several = warpgroups > 1
        rows = plgpu.SMEM((warpgroups, ROWS), jnp.float32)
        values = plgpu.SMEM((warpgroups, width, ROWS), jnp.float32)
        return cls(
            staged=plgpu.SMEM((ROWS, width), dtype),
            parts=PartialSoftmax(values, rows, rows)
            if several
            else PartialSoftmax(None, None, None),
            arrived=plgpu.Barrier(num_arrivals=warpgroups) if several else None,
        )


class _Combiner:
    """The code of one thread block."""

    def __init__(
        self, config: Config, split: _Division, operands: CombineOperands, scratch: _Scratch[Ref]
    ) -> None:
        self.config, self.operands, self.smem = config, operands, scratch
        self.warpgroups, self.width, self.together = split
        self.warpgroup = lax.axis_index("warpgroup")
        self.head, self.index = lax.axis_index("head"), lax.axis_index("tile")
        part, row = lax.axis_index("part"), lax.axis_index("row")
        self.values, self.rows = pl.ds(part * self.width, self.width), pl.ds(row * ROWS, ROWS)
        self.columns = self.values
        if config.value_width % WIDTH_OF_MANY:  # the last window ends with the value
            last = config.value_width - self.width
            self.columns = pl.ds(lax.min(part * self.width, last), self.width)
        self.first_row = row * ROWS
        self.by_tma = _capability.instructions_of("combine") == "TMA"
        # Known beforehand where there is only one, for less code.
        self.is_first_part = lax.axis_size("part") == 1 or part == 0
        self.is_first_warpgroup = self.warpgroups == 1 or self.warpgroup == 0

    def run(self, finished: bool) -> None:
        """Combines a tile, and clears padding.

        Args:
          finished: whether tiles of one split are left out.
        """
        tile = load_row(Tile, self.operands.tiles, self.index)
        is_left = (tile.num_splits != 1) | (not finished)
        # Loaded early to hide the latency.
        numbers = self.operands.numbers.at[self.head]
        value_scale = numbers[VALUE_SCALE]
        sinks = self._load_rows(numbers, pl.ds(SINKS + self.first_row, ROWS))

        @pl.when(is_left & (tile.count * self.config.group > self.first_row))
        def _() -> None:
            summed = self._sum(tile)
            if self.warpgroups > 1:
                self._hand_over(summed)

            @pl.when(self.is_first_warpgroup)
            def _() -> None:
                all_summed = summed if self.warpgroups == 1 else self._sum_of_all()
                weight, lse = normalize(*all_summed[1:], sinks, value_scale)
                lses = self.operands.lse.at[self.index, self.head, self.rows]
                pl.when(self.is_first_part)(lambda: store(lses, lse))
                out = all_summed.out
                self._write(tile, out * lax.broadcast_in_dim(weight, out.shape, [1]))

        pl.when(self.is_first_warpgroup)(lambda: self._clear_padding(tile.used_tokens))

    def _sum(self, tile: Tile) -> PartialSoftmax[Array]:
        """Returns the sum of this warpgroup's share of the splits of the tile."""
        zeros = jnp.zeros((self.width, ROWS), jnp.float32)
        start = PartialSoftmax(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), COLUMNS),
        )

        for splits, link in self.operands.parts_of(tile, self.index):
            start = self._add(start, splits, link)
        return start

    def _add(
        self, running: PartialSoftmax[Array], splits: PartialSoftmax[Ref], link: Link
    ) -> PartialSoftmax[Array]:
        """Adds this warpgroup's share of some splits."""

        def add(i: Array, running: PartialSoftmax[Array]) -> PartialSoftmax[Array]:
            first = (i * self.warpgroups + self.warpgroup) * self.together
            parts = [self._load(splits, link, first + j) for j in range(self.together)]
            return add_up([running, *parts], in_order=self.config.reproducible)

        each_round = self.warpgroups * self.together
        rounds = lax.div(link.num_splits + (each_round - 1), each_round)
        return lax.fori_loop(0, rounds, add, running)

    def _hand_over(self, summed: PartialSoftmax[Array]) -> None:
        """Passes the sum of this warpgroup to the first one."""
        for ref, value in zip(self.smem.parts, summed, strict=True):
            store(ref.at[self.warpgroup], value)
        plgpu.barrier_arrive(self.smem.arrived)

    def _sum_of_all(self) -> PartialSoftmax[Array]:
        """Waits for the sums of all warpgroups, and returns their sum."""
        plgpu.barrier_wait(self.smem.arrived)
        layouts = PartialSoftmax(plgpu.Layout.WGMMA, COLUMNS, COLUMNS)
        return add_up(
            [
                PartialSoftmax(
                    *[
                        plgpu.load(ref.at[index], layout=layout, optimized=False)
                        for ref, layout in zip(self.smem.parts, layouts, strict=True)
                    ]
                )
                for index in range(self.warpgroups)
            ]
        )

    def _write(self, tile: Tile, result: Array) -> None:
        """Writes the tile's rows to their tokens."""
        self._stage(result)
        self._write_rows(tile.token, tile.count, tile.skip)

    def _stage(self, result: Array) -> None:
        """Stores [columns, rows] to the staged rows."""
        result = result.astype(self.smem.staged.dtype)
        if not self.by_tma:  # nor stmatrix
            result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        store(self.smem.staged.T, result)

    def _load(self, splits: PartialSoftmax[Ref], link: Link, index: Array) -> PartialSoftmax[Array]:
        """Loads one of the splits; past the last one, an empty split."""
        number = link.first_split + lax.min(index, link.num_splits - 1)
        penalty = lax.select(index < link.num_splits, jnp.float32(0), jnp.float32(-jnp.inf))
        rows = pl.ds(link.first_row + self.first_row, ROWS)
        # In the layouts of the sum: to name them again takes more code.
        out = plgpu.load(splits.out.at[number, self.head, self.values, rows], optimized=False)
        highest = self._load_rows(splits.highest.at[number, self.head], rows)
        total = self._load_rows(splits.total.at[number, self.head], rows)
        return PartialSoftmax(out, highest + penalty, total)

    def _load_rows(self, ref: Ref, rows: pl.Slice) -> Array:
        return plgpu.load(ref.at[rows], optimized=False)

    def _write_rows(self, first_token: Array, count: Array | int, skip: Array | int = 0) -> None:
        """Writes the staged rows of tokens ``skip`` to ``count - 1`` to their tokens and heads."""
        group, together = self.config.group, math.gcd(self.config.group, ROWS)
        begin = lax.max(skip * group - self.first_row, 0)
        if self.by_tma:
            plgpu.commit_smem()

        @pl.loop(begin, lax.min(count * group - self.first_row, ROWS), step=together)
        def _(row: Array) -> None:
            token = lax.div(self.first_row + row, group)
            head = self.head * group + lax.rem(self.first_row + row, group)
            if self.by_tma:
                source = self.smem.staged.at[pl.ds(row, together)]
                target = self.operands.out.at[first_token + token, pl.ds(head, together)]
                plgpu.copy_smem_to_gmem(source, target.at[:, self.columns])
                return
            for i in range(together):
                loaded = plgpu.load(self.smem.staged.at[row + i], layout=VALUES, optimized=False)
                store(self.operands.out.at[first_token + token, head + i, self.columns], loaded)

        if self.by_tma:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _clear_padding(self, used_tokens: Array) -> None:
        """Writes zeros for this thread block's share of the padding."""
        num_tokens, num_tiles = self.operands.out.shape[0], lax.axis_size("tile")
        begin = used_tokens + self.index

        @pl.when(begin < num_tokens)
        def _() -> None:
            zeros = jnp.zeros((self.width, ROWS), jnp.float32)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            self._stage(zeros)

            @pl.loop(begin, num_tokens, step=num_tiles)
            def _(token: Array) -> None:
                self._write_rows(token, 1)
