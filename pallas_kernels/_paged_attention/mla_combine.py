"""The Mosaic GPU kernel that combines the splits of latent attention into the output."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, call_unfused
from pallas_kernels._paged_attention.combine import CombineOperands
from pallas_kernels._paged_attention.common import PartialSoftmax, add_up, normalize
from pallas_kernels._paged_attention.decode_shape import SINKS, VALUE_SCALE
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.shared import SharedSplits
from pallas_kernels._paged_attention.tasks import Even, Link, TaskMap, Tile, load_row

# Splits that are loaded at once, because each load waits long for memory: all of 8 tiles.
FEW, MANY, MANY_PER_TILE = 2, 18, 4
WORKERS = 128  # threads of a warpgroup
ROWS = 2  # most rows that a thread block combines, so that more loads overlap; of many splits 1


def combine_latents(
    config: Config,
    tasks: TaskMap,
    splits: PartialSoftmax[Array],
    numbers: Array,
    out: Ref,
    shared: SharedSplits | None = None,
    lens: Array | None = None,
) -> Array:
    """Writes the output of all tiles, and zeros for tokens of padding, into [T, heads, V].

    Args:
      shared: other splits that tiles take a part in, if any; their links are in ``tasks``.
      numbers: as `decode` takes them, for the R rows of queries of a tile.
      lens: int32[B], the keys of each request; needed if the steps of workers are fixed.

    Returns:
      The log-sum-exp, float32[N, 1, R]; undefined for empty tiles.
    """
    num_tiles, rows = tasks.tiles.shape[0], numbers.shape[1] - SINKS
    rows_each, together = math.gcd(rows, ROWS), FEW
    if tasks.workers.shape[0] > MANY_PER_TILE * num_tiles:
        rows_each, together = 1, MANY
    even = [lens] if tasks.even is not None and lens is not None else []

    def combine(*refs: Ref) -> None:
        lens, others = refs[: len(even)], CombineOperands.from_refs(*refs[len(even) :])
        combiner = _Combiner(config, together, rows_each, others)
        combiner.run(tasks.even, *lens)

    call = plgpu.kernel(
        combine,
        out_type=[jax.ShapeDtypeStruct((num_tiles, 1, rows), jnp.float32)],
        grid=(rows // rows_each, num_tiles),
        grid_names=("rows", "tile"),
        kernel_name="paged_attention_mla_combine",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # threads read nothing that other threads write
        ),
    )
    arrays = [*even, tasks.tiles, numbers, *splits, *(shared.splits if shared else ())]
    return call_unfused(call, arrays, [out])[0]


class _Combiner:
    """The code of one thread block."""

    def __init__(self, config: Config, together: int, rows: int, operands: CombineOperands) -> None:
        self.config, self.together, self.operands = config, together, operands
        first, self.index = lax.axis_index("rows") * rows, lax.axis_index("tile")
        self.rows = [first + row for row in range(rows)]
        vector = math.gcd(4, config.value_width // WORKERS)
        self.layout = plgpu.Layout.WG_STRIDED((config.value_width,), vec_size=vector)

    def run(self, even: Even | None = None, lens: Ref = None) -> None:
        tile = load_row(Tile, self.operands.tiles, self.index)
        if even is not None:
            num_splits = even.num_splits(tile, lens[self.index])
            tile = tile._replace(num_splits=num_splits)
        # Loaded early to hide the latency.
        value_scale = self.operands.numbers[0, VALUE_SCALE]
        sinks = [self.operands.numbers[0, SINKS + row] for row in self.rows]

        @pl.when(lax.div(self.rows[0], self.config.group) < tile.count)
        def _() -> None:
            for row, sink, summed in zip(self.rows, sinks, self._sums(tile), strict=True):
                weight, lse = normalize(*summed[1:], sink, value_scale)
                self.operands.lse[self.index, 0, row] = lse
                self._write(tile, row, summed.out * weight)

        self._clear_padding(tile.used_tokens)

    def _sums(self, tile: Tile) -> list[PartialSoftmax[Array]]:
        """Adds up the splits of the tile, for each row."""
        zeros = jnp.zeros((self.config.value_width,), jnp.float32)
        start = PartialSoftmax(
            plgpu.layout_cast(zeros, self.layout), jnp.float32(-jnp.inf), jnp.float32(0)
        )

        sums = [start] * len(self.rows)
        for splits, link in self.operands.parts_of(tile, self.index):
            sums = self._add(sums, splits, link)
        return sums

    def _add(
        self, running: list[PartialSoftmax[Array]], splits: PartialSoftmax[Ref], link: Link
    ) -> list[PartialSoftmax[Array]]:
        """Adds some splits, for each row."""

        def add(i: Array, running: list[PartialSoftmax[Array]]) -> list[PartialSoftmax[Array]]:
            indices = [i * self.together + j for j in range(self.together)]
            loaded = [
                [self._load(splits, link, row, index) for index in indices] for row in self.rows
            ]
            in_order = self.config.reproducible
            return [
                add_up([own, *parts], in_order=in_order)
                for own, parts in zip(running, loaded, strict=True)
            ]

        rounds = lax.div(link.num_splits + (self.together - 1), self.together)
        return lax.fori_loop(0, rounds, add, running)

    def _load(
        self, splits: PartialSoftmax[Ref], link: Link, row: Array, index: Array
    ) -> PartialSoftmax[Array]:
        """Loads a row of one of the splits, or an empty one past the last split."""
        number = link.first_split + jnp.minimum(index, link.num_splits - 1)
        slot = number, link.first_row + row
        out = plgpu.load(splits.out.at[slot], layout=self.layout)
        highest = jnp.where(index < link.num_splits, splits.highest[slot], -jnp.inf)
        return PartialSoftmax(out, highest, splits.total[slot])

    def _write(self, tile: Tile, row: Array, out: Array) -> None:
        """Writes a row to its token and head, if the tile has such a token."""
        token, head = lax.div(row, self.config.group), lax.rem(row, self.config.group)

        @pl.when(token < tile.count)
        def _() -> None:
            self.operands.out.at[tile.token + token, head][...] = out.astype(
                self.operands.out.dtype
            )

    def _clear_padding(self, used_tokens: Array) -> None:
        """Writes zeros to the tokens of padding that this thread block has to clear."""
        num_tokens, num_tiles = self.operands.out.shape[0], self.operands.tiles.shape[0]
        zeros = jnp.zeros((self.config.value_width,), self.operands.out.dtype)
        cleared = plgpu.layout_cast(zeros, self.layout)
        for row in self.rows:
            first = jnp.where(row < self.config.group, used_tokens + self.index, num_tokens)

            @pl.loop(first, num_tokens, step=num_tiles)
            def _(token: Array, row: Array = row) -> None:
                self.operands.out.at[token, row][...] = cleared
