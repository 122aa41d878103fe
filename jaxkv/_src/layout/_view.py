"""The memory of one layer as numbers: contiguous extents, and shapes with strides. No jax."""

import dataclasses
from typing import NamedTuple

from jaxkv._src.internal.checks import check_count, check_positive

_AXES = frozenset("BHNC")


class PagePlacement(NamedTuple):
    """The location of one layer's pages in a buffer of ``num_layers * num_blocks`` pages.

    num_blocks: blocks of the pool.
    num_layers: layers that share the buffer.
    layer: index of this one among them.
    page_bytes: bytes of a page, padding included; None: the spec's.
    page_offset_bytes: bytes of the page that lie before the layer
      (`LayerPlacement.offset_bytes`).
    """

    num_blocks: int
    num_layers: int = 1
    layer: int = 0
    page_bytes: int | None = None
    page_offset_bytes: int = 0


class LayerExtents(NamedTuple):
    """The bytes of one layer in a buffer seen as uint8[extents, extent_bytes].

    An extent is a contiguous part of one tile: the layer's share of the page, or one head's
    part of that. Tile ``t`` is tile ``t % tiles`` of block ``t // tiles``. A head's
    content of row n of tile t is ``cell_bytes`` long and begins in extent
    ``first + t * tile_step + head * head_step`` at byte
    ``start_bytes + n * row_bytes + head * head_bytes``.
    """

    tiles: int  # per block; 1: blocks are not cut into tiles
    rows: int  # per tile
    heads: int
    cell_bytes: int
    extent_bytes: int  # padding included
    first: int  # extent of the layer's first tile and head
    tile_step: int
    head_step: int  # 0: all heads lie in one extent
    start_bytes: int
    row_bytes: int
    head_bytes: int  # 0: each head has an extent of its own

    @property
    def rows_are_whole(self) -> bool:
        """Whether all heads of a row lie side by side."""
        return self.heads == 1 or self.head_bytes == self.cell_bytes

    @property
    def rows_are_evenly_spaced(self) -> bool:
        """Whether all rows follow each other at one stride, across tiles too."""
        return self.tile_step * self.extent_bytes == self.rows * self.row_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of an extent that carry data."""
        return self.rows * self.cell_bytes * (1 if self.head_step else self.heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer's memory as a strided array; equal views are the same bytes of a buffer.

    axes: the letters of `shape`, slowest first: B counts blocks or kernel blocks, N stored
      rows, H heads, C elements.
    shape: elements along each axis.
    strides_bytes: bytes from one element of an axis to the next. An axis of one head or one
      row, whose stride does not matter, gets that of an array without gaps.
    dtype: name of the element type; "uint8" where a row is not plain elements.
    num_blocks: blocks of the pool, whatever B counts.
    offset_bytes: bytes of the buffer before the first element.
    key_elements: how many elements of axis C are K, the rest being V; None: the content is
      something else (a latent vector, a state, packed bytes).

    Raises:
      ValueError: axes, shape and strides that do not fit each other, or a block axis that
        does not count whole blocks.
    """

    axes: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    num_blocks: int
    offset_bytes: int
    key_elements: int | None

    def __post_init__(self) -> None:
        check_positive(num_blocks=self.num_blocks)
        check_count(offset_bytes=self.offset_bytes)
        letters = set(self.axes)
        if len(letters) < len(self.axes) or not {"B", "N"} <= letters <= _AXES:
            raise ValueError(
                f"axes={self.axes!r} must name B and N, and H and C where there are such axes, "
                "each once"
            )
        if not len(self.axes) == len(self.shape) == len(self.strides_bytes):
            raise ValueError(
                f"axes={self.axes!r}, shape={self.shape} and strides_bytes={self.strides_bytes} "
                "must have one entry per axis"
            )
        check_positive(**{f"shape[{i}]": size for i, size in enumerate(self.shape)})
        if self.shape[self.block_axis] % self.num_blocks:
            raise ValueError(
                f"shape={self.shape} counts {self.shape[self.block_axis]} blocks on axis "
                f"{self.block_axis}, not a multiple of num_blocks={self.num_blocks}; check which "
                "axis counts blocks"
            )
        strides = list(self.strides_bytes)
        for axis in reversed(range(len(strides) - 1)):
            if self.shape[axis] == 1 and self.axes[axis] in "HN":
                strides[axis] = self.shape[axis + 1] * strides[axis + 1]
        object.__setattr__(self, "strides_bytes", tuple(strides))

    @property
    def block_axis(self) -> int:
        """The axis that counts blocks or kernel blocks."""
        return self.axes.index("B")

    @property
    def blocks_per_kv_block(self) -> int:
        """Entries of the block axis per block."""
        return self.shape[self.block_axis] // self.num_blocks

    def whole_blocks(self) -> "LayerView":
        """Returns the same memory with a block axis that counts whole blocks.

        Raises:
          ValueError: the rows of a block are not evenly spaced across its kernel blocks.
        """
        if self.blocks_per_kv_block == 1:
            return self
        block, token = self.block_axis, self.axes.index("N")
        shape, strides = list(self.shape), list(self.strides_bytes)
        if strides[block] != shape[token] * strides[token]:
            raise ValueError(
                f"kernel blocks of {shape[token]} rows lie {strides[block]} bytes apart and rows "
                f"{strides[token]}: whole blocks would have no common stride, because padding, "
                "heads or layers lie between; use LBNHC and pages without padding, or kernel "
                "blocks as large as blocks"
            )
        shape[token] *= self.blocks_per_kv_block
        shape[block] = self.num_blocks
        strides[block] = shape[token] * strides[token]
        return dataclasses.replace(self, shape=tuple(shape), strides_bytes=tuple(strides))
