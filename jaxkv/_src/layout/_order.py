"""The physical order of a pool's axes: extents, shapes and strides of one layer. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NoReturn, get_args

from jaxkv._src.internal.checks import check_choice, check_count, check_positive
from jaxkv._src.layout._rows import (
    blocks_per_kv_block,
    check_kernel_block_size,
    check_spec,
    row_format,
    rows_per_block,
)
from jaxkv._src.layout._view import LayerExtents, LayerView, PagePlacement
from jaxkv._src.specs import LayerSpec, packed_bytes

Order = Literal["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC", "NHD", "HND"]
ORDERS: tuple[str, ...] = get_args(Order)[:6]

# The names by which kernels call the order of head and token inside a block.
ORDER_ALIASES: Mapping[str, str] = MappingProxyType({"NHD": "LBNHC", "HND": "LBHNC"})


@dataclasses.dataclass(frozen=True)
class PhysicalOrder:
    """A physical order of layer, block, head, token and content (L, B, H, N, C), slowest first.

    order: one of `ORDERS`, NHD or HND.
    tile_tokens: optional tile size in tokens. A block is then stored as consecutive tiles,
      laid out as if the pool had blocks of that size, so that a kernel with that block size
      gets a strided view in every order.

    Padding lies at the end of each extent: of a page where neither L nor B comes after H, else
    of each head's share of it. With tiles, it lies at the end of each tile's extents.
    """

    order: str
    tile_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice((*ORDERS, *ORDER_ALIASES), order=self.order)
        if self.tile_tokens is not None:
            check_positive(tile_tokens=self.tile_tokens)
        object.__setattr__(self, "order", ORDER_ALIASES.get(self.order, self.order))

    @property
    def has_whole_pages(self) -> bool:
        """Whether the page of one layer and block (or tile) is contiguous."""
        return self.order.index("H") > 1

    @property
    def has_whole_blocks(self) -> bool:
        """Whether all layers of a block lie side by side, one transfer for them all."""
        return self.order[0] == "B"

    @property
    def extent_axes(self) -> str:
        """The axes that count contiguous extents, slowest first; the others lie inside one."""
        return self.order[: 1 + max(self.order.index("L"), self.order.index("B"))]

    def view(
        self, spec: LayerSpec, placement: PagePlacement, *, kernel_block_size: int | None = None
    ) -> LayerView:
        """Returns one layer's part of a buffer as a strided array.

        Args:
          spec: of the layer. A row is K then V of every head; bytes, under one head, where
            scales lie between.
          placement: of the layer's pages in the buffer.
          kernel_block_size: tokens of a kernel block; None: the block size.

        Returns:
          The view in physical order. Axis B counts kernel blocks if these are smaller; kernel
          block ``b * k + i`` is part i of block b.

        Raises:
          ValueError: a page that cannot hold the layer or whole elements, tiles that do not
            divide a block, or kernel blocks (with tiles: whole blocks, too) whose rows are
            not evenly spaced, because padding, other layers or heads lie between them.
        """
        extents = self.extents(spec, placement)
        size = spec.block_size if kernel_block_size is None else kernel_block_size
        parts = blocks_per_kv_block(spec, size)
        heads, content, dtype, key_elements = row_format(spec)
        itemsize = packed_bytes(1, dtype)
        if extents.extent_bytes % itemsize or extents.start_bytes % itemsize:
            self._refuse_page(spec, extents.tiles, placement)
        if parts != extents.tiles and not extents.rows_are_evenly_spaced:
            self._refuse_size(spec, extents, size, placement.num_layers)
        tile_bytes = extents.tile_step * extents.extent_bytes
        rows = extents.rows * extents.tiles // parts
        sizes = {"B": placement.num_blocks * parts, "H": heads, "N": rows, "C": content}
        strides = {
            "B": tile_bytes if parts == extents.tiles else rows * extents.row_bytes,
            "H": extents.head_step * extents.extent_bytes + extents.head_bytes,
            "N": extents.row_bytes,
            "C": itemsize,
        }
        return self._in_order(sizes, strides, extents, dtype, placement.num_blocks, key_elements)

    def byte_view(self, spec: LayerSpec, placement: PagePlacement) -> LayerView:
        """Returns one layer's bytes as contiguous extents of whole blocks, for connectors.

        Every order has one, with tiles or without.

        Args:
          spec: of the layer.
          placement: of the layer's pages in the buffer.

        Returns:
          A view of ``uint8``. B counts blocks, N the tiles of a block, C the bytes of an
          extent without its padding, and H heads where each has an extent of its own, else 1.
        """
        extents = self.extents(spec, placement)
        tile_bytes = extents.tile_step * extents.extent_bytes
        sizes = {
            "B": placement.num_blocks,
            "H": extents.heads if extents.head_step else 1,
            "N": extents.tiles,
            "C": extents.data_bytes,
        }
        head_bytes = extents.head_step * extents.extent_bytes or extents.data_bytes
        strides = {"B": extents.tiles * tile_bytes, "H": head_bytes, "N": tile_bytes, "C": 1}
        return self._in_order(sizes, strides, extents, "uint8", placement.num_blocks, None)

    def _in_order(
        self,
        sizes: dict[str, int],
        strides_bytes: dict[str, int],
        extents: LayerExtents,
        dtype: str,
        num_blocks: int,
        key_elements: int | None,
    ) -> LayerView:
        axes = self.order.replace("L", "")
        return LayerView(
            axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            strides_bytes=tuple(strides_bytes[axis] for axis in axes),
            dtype=dtype,
            num_blocks=num_blocks,
            offset_bytes=extents.first * extents.extent_bytes + extents.start_bytes,
            key_elements=key_elements,
        )

    def extents(self, spec: LayerSpec, placement: PagePlacement) -> LayerExtents:
        """Returns the extents of one layer, from which `view` and all reads and writes derive.

        Args:
          spec: of the layer.
          placement: of the layer's pages in the buffer.

        Raises:
          ValueError: as for `view`, but pages need not be whole elements.
        """
        check_spec(spec)
        check_positive(num_blocks=placement.num_blocks, num_layers=placement.num_layers)
        check_count(layer=placement.layer, page_offset_bytes=placement.page_offset_bytes)
        if placement.layer >= placement.num_layers:
            raise ValueError(
                f"layer={placement.layer} is not one of num_layers={placement.num_layers}; count "
                "from 0"
            )
        tiles = self._tiles(spec)
        page_bytes = spec.page_bytes if placement.page_bytes is None else placement.page_bytes
        self._check_page(spec, tiles, page_bytes, placement)
        heads, content, dtype, _ = row_format(spec)
        counts = {"L": placement.num_layers, "B": placement.num_blocks * tiles, "H": heads}
        axes = self.extent_axes
        per = {a: math.prod(counts[b] for b in axes[axes.index(a) + 1 :]) for a in axes}
        rows, cell = rows_per_block(spec) // tiles, packed_bytes(content, dtype)
        tokens_first = self.order.endswith("NHC")
        # One head lies in one extent, whatever the order.
        head_step = per.get("H", 0) if heads > 1 else 0
        if head_step:
            head_bytes = 0
        else:
            head_bytes = cell if tokens_first else rows * cell
        return LayerExtents(
            tiles=tiles,
            rows=rows,
            heads=heads,
            cell_bytes=cell,
            extent_bytes=page_bytes // tiles // self._heads_apart(spec),
            first=placement.layer * per["L"],
            tile_step=per["B"],
            head_step=head_step,
            start_bytes=placement.page_offset_bytes // tiles,
            row_bytes=heads * cell if tokens_first else cell,
            head_bytes=head_bytes,
        )

    def _tiles(self, spec: LayerSpec) -> int:
        if self.tile_tokens is None:
            return 1
        check_kernel_block_size(spec, self.tile_tokens, "tile_tokens")
        return spec.block_size // self.tile_tokens

    def _check_page(
        self, spec: LayerSpec, tiles: int, page_bytes: int, placement: PagePlacement
    ) -> None:
        check_positive(page_bytes=page_bytes)
        start_bytes = placement.page_offset_bytes
        if page_bytes < start_bytes + spec.data_bytes:
            raise ValueError(
                f"page_bytes={page_bytes} cannot hold {spec.data_bytes} bytes of this {spec.kind} "
                f"layer from page_offset_bytes={start_bytes}; use at least "
                f"{start_bytes + spec.data_bytes}"
            )
        if start_bytes and not self.has_whole_pages:
            raise ValueError(
                f"page_offset_bytes={start_bytes}: {self.order} divides a page among the heads, "
                "so no other layer can share it; use an order with L and B before H"
            )
        if page_bytes % (tiles * self._heads_apart(spec)) or start_bytes % tiles:
            self._refuse_page(spec, tiles, placement)

    def _heads_apart(self, spec: LayerSpec) -> int:
        """Returns the extents that a page is divided among."""
        return 1 if self.has_whole_pages else row_format(spec).heads

    def _refuse_page(self, spec: LayerSpec, tiles: int, placement: PagePlacement) -> NoReturn:
        shares, dtype = tiles * self._heads_apart(spec), row_format(spec).dtype
        raise ValueError(
            f"page_bytes={placement.page_bytes or spec.page_bytes} and "
            f"page_offset_bytes={placement.page_offset_bytes} must be whole elements "
            f"of {dtype} for each of {shares} contiguous parts of a page (tiles, heads); use "
            f"multiples of {shares * packed_bytes(1, dtype)} bytes"
        )

    def _refuse_size(
        self, spec: LayerSpec, extents: LayerExtents, size: int, num_layers: int
    ) -> NoReturn:
        """Raises because blocks of this size have no strides, and names what lies between."""
        between = []
        if self.order.index("L") > self.order.index("B") and num_layers > 1:
            between.append(f"the other of {num_layers} layers")
        if self.order.index("H") in range(self.order.index("B"), self.order.index("N")):
            between += [f"the other of {extents.heads} heads"] if extents.heads > 1 else []
        if self.tile_tokens is None:
            remedy = f"make the cache with kernel_block_sizes of {size}, or use LBNHC and pages "
            remedy += "without padding"
        else:
            remedy = (
                f"its tiles are of {self.tile_tokens}: use that as kernel_block_size, or "
                "byte_view for whole blocks"
            )
        raise ValueError(
            f"kernel_block_size: {self.order} cannot be read as {spec.block_size // size} kernel "
            f"blocks of {size} tokens per block, because {' and '.join(between) or 'padding'} "
            f"would lie between them; {remedy}"
        )
