"""Where one layer lies, as numbers: runs of bytes, and shapes with strides."""

import dataclasses
from typing import NamedTuple

from jaxkv.specs import packed_bytes


class LayerRuns(NamedTuple):
    """Where one layer lies in a buffer seen as uint8[runs, run_bytes].

    A run is what is contiguous of the layer in one tile: its share of the page, or of one
    head's part of that. Tile ``t`` is tile ``t % tiles`` of block ``t // tiles``. A head's
    content of row n of tile t is ``cell_bytes`` long and begins in run ``first_run +
    t * tile_runs + head * head_runs`` at byte ``start_bytes + n * row_bytes +
    head * head_bytes``.
    """

    tiles: int  # per block; 1: blocks are not cut into tiles
    rows: int  # per tile
    heads: int
    cell_bytes: int
    run_bytes: int  # padding included
    first_run: int
    tile_runs: int
    head_runs: int  # 0: all heads lie in one run
    start_bytes: int
    row_bytes: int
    head_bytes: int  # 0: each head has a run of its own

    @property
    def rows_are_whole(self) -> bool:
        """Do all heads of a row lie side by side?"""
        return self.heads == 1 or self.head_bytes == self.cell_bytes

    @property
    def rows_run_on(self) -> bool:
        """Do all rows follow each other at one stride, from tile to tile too?"""
        return self.tile_runs * self.run_bytes == self.rows * self.row_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of a run that carry data."""
        return self.rows * self.cell_bytes * (1 if self.head_runs else self.heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer's elements in a pool, at one granularity of blocks.

    axes: the letters of `shape`, slowest first, such as ``"BNHC"``; N counts stored rows.
    shape, strides: elements along each axis, and elements from one to the next.
    offset: elements from the start of the buffer.
    dtype: as jaxkv names them; ``"uint8"`` where a row is not plain elements.
    num_blocks: blocks of the pool, whatever `shape` counts.
    key_elements: the first so many of the content axis are K and the rest V; None:
      the content is something else (a latent row, a state, packed bytes).
    """

    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str
    num_blocks: int
    key_elements: int | None

    @property
    def itemsize_bytes(self) -> int:
        return packed_bytes(1, self.dtype)

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        return tuple(stride * self.itemsize_bytes for stride in self.strides)

    @property
    def offset_bytes(self) -> int:
        return self.offset * self.itemsize_bytes

    @property
    def block_axis(self) -> int:
        """The axis of `shape` that counts blocks, or kernel blocks."""
        return self.axes.index("B")

    @property
    def fuses_keys_and_values(self) -> bool:
        """Do K and V lie side by side in one content axis?"""
        return self.key_elements is not None
