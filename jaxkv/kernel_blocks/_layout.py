"""Where the elements of one layer lie: shapes and strides of its part of a pool.

Knows physical orders of the five axes layer, block, head, token and content (L, B, H, N
and C), and tiles. Knows nothing of arrays or devices: a view is numbers.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxkv.checks import check_count, check_positive
from jaxkv.kernel_blocks._rows import (
    blocks_per_kv_block,
    check_kernel_block_size,
    check_spec,
    row_format,
    rows_per_block,
)
from jaxkv.kernel_blocks._view import LayerRuns, LayerView
from jaxkv.specs import LayerSpec, packed_bytes

LAYOUT_ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")

# How kernels name the order of head and token inside a block.
LAYOUT_ALIASES: Mapping[str, str] = MappingProxyType({"NHD": "LBNHC", "HND": "LBHNC"})


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """A physical order of the axes, slowest first, of blocks or of the tiles of blocks.

    order: one of `LAYOUT_ORDERS`, NHD or HND.
    tile_tokens: None, or tokens of a tile. Each block then is tiles, one after the other,
      and all of them lie as the blocks of a pool of blocks of that size would: so kernels
      of that size have a view in every order. Each takes its share of the page.

    Pages are padded at the end of what is contiguous, which is the page where neither L
    nor B comes after H, else each head's share of it; of tiles, at the end of each.
    """

    order: str
    tile_tokens: int | None = None

    def __post_init__(self) -> None:
        order = LAYOUT_ALIASES.get(self.order, self.order)
        if order not in LAYOUT_ORDERS:
            known = ", ".join((*LAYOUT_ORDERS, *LAYOUT_ALIASES))
            raise ValueError(f"order={self.order!r} is not a cache layout; use one of {known}")
        if self.tile_tokens is not None:
            check_positive(tile_tokens=self.tile_tokens)
        object.__setattr__(self, "order", order)

    @property
    def has_whole_pages(self) -> bool:
        """Is the page of one layer and block (or tile) contiguous?"""
        return self.order.index("H") > 1

    @property
    def has_whole_blocks(self) -> bool:
        """Do all layers of a block lie side by side, one transfer for them all?"""
        return self.order[0] == "B"

    @property
    def run_axes(self) -> str:
        """The axes that count contiguous runs, slowest first; the others lie in a run."""
        return self.order[: 1 + max(self.order.index("L"), self.order.index("B"))]

    def view(
        self,
        spec: LayerSpec,
        *,
        num_blocks: int,
        num_layers: int = 1,
        layer: int = 0,
        page_bytes: int | None = None,
        page_offset_bytes: int = 0,
        kernel_block_size: int | None = None,
    ) -> LayerView:
        """One layer's part of a buffer of ``num_layers * num_blocks`` pages.

        Args:
          spec: what the layer stores. Its rows are read as `jaxkv.pool` writes them: K
            then V of every head; bytes, under one head, where scales lie between.
          num_layers, layer: layers in the buffer, and the index of this one.
          page_bytes: bytes of a page, padding included; None: the spec's.
          page_offset_bytes: where in its page the layer starts (`Place.offset_bytes`).
          kernel_block_size: tokens of a kernel block; None: the block size.

        Returns:
          The view in physical order. Blocks count kernel blocks if these are smaller;
          kernel block ``b * k + i`` is part i of block b.

        Raises:
          ValueError: a page that cannot hold the layer or whole elements, tiles that the
            spec does not divide into, or kernel blocks (with tiles: whole blocks, too)
            whose rows do not follow each other at one stride, for padding, other layers
            or heads lie between.
        """
        runs = self.runs(
            spec,
            num_blocks=num_blocks,
            num_layers=num_layers,
            layer=layer,
            page_bytes=page_bytes,
            page_offset_bytes=page_offset_bytes,
        )
        size = spec.block_size if kernel_block_size is None else kernel_block_size
        parts = blocks_per_kv_block(spec, size)
        heads, content, dtype, key_elements = row_format(spec)
        itemsize = packed_bytes(1, dtype)
        if runs.run_bytes % itemsize or runs.start_bytes % itemsize:
            self._refuse_page(spec, runs.tiles, page_bytes or spec.page_bytes, page_offset_bytes)
        if parts != runs.tiles and not runs.rows_run_on:
            self._refuse_size(spec, runs, size, num_layers)
        tile_bytes = runs.tile_runs * runs.run_bytes
        rows = runs.rows * runs.tiles // parts
        sizes = {"B": num_blocks * parts, "H": heads, "N": rows, "C": content}
        strides = {
            "B": tile_bytes if parts == runs.tiles else rows * runs.row_bytes,
            "H": runs.head_runs * runs.run_bytes + runs.head_bytes,
            "N": runs.row_bytes,
            "C": itemsize,
        }
        start = runs.first_run * runs.run_bytes + runs.start_bytes
        return self._in_order(sizes, strides, start, dtype, num_blocks, key_elements)

    def byte_view(self, spec: LayerSpec, *, num_blocks: int, **where: Any) -> LayerView:
        """One layer's bytes in contiguous runs, for whoever moves whole blocks.

        There is one in every layout, with tiles or without.

        Args:
          spec, num_blocks: as for `view`.
          where: the rest of what `runs` takes.

        Returns:
          A view of ``uint8``. B counts blocks, N the tiles of a block, C the bytes of a
          run without its padding, and H heads where each has a run of its own, else 1.
        """
        runs = self.runs(spec, num_blocks=num_blocks, **where)
        tile_bytes = runs.tile_runs * runs.run_bytes
        sizes = {
            "B": num_blocks,
            "H": runs.heads if runs.head_runs else 1,
            "N": runs.tiles,
            "C": runs.data_bytes,
        }
        head_bytes = runs.head_runs * runs.run_bytes or runs.data_bytes
        strides = {"B": runs.tiles * tile_bytes, "H": head_bytes, "N": tile_bytes, "C": 1}
        start = runs.first_run * runs.run_bytes + runs.start_bytes
        return self._in_order(sizes, strides, start, "uint8", num_blocks, None)

    def _in_order(
        self,
        sizes: dict[str, int],
        strides_bytes: dict[str, int],
        offset_bytes: int,
        dtype: str,
        num_blocks: int,
        key_elements: int | None,
    ) -> LayerView:
        axes, itemsize = self.order.replace("L", ""), packed_bytes(1, dtype)
        return LayerView(
            axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            strides=tuple(strides_bytes[axis] // itemsize for axis in axes),
            offset=offset_bytes // itemsize,
            dtype=dtype,
            num_blocks=num_blocks,
            key_elements=key_elements,
        )

    def runs(
        self,
        spec: LayerSpec,
        *,
        num_blocks: int,
        num_layers: int = 1,
        layer: int = 0,
        page_bytes: int | None = None,
        page_offset_bytes: int = 0,
    ) -> LayerRuns:
        """Where one layer lies, in runs of bytes: what `view` and the pool are made from.

        Args, raises: as `view`, but pages need not be whole elements.
        """
        check_spec(spec)
        check_positive(num_blocks=num_blocks, num_layers=num_layers)
        check_count(layer=layer, page_offset_bytes=page_offset_bytes)
        if layer >= num_layers:
            raise ValueError(f"layer={layer} is not one of num_layers={num_layers}; count from 0")
        tiles = self._tiles(spec)
        page_bytes = spec.page_bytes if page_bytes is None else page_bytes
        heads, content, dtype, _ = row_format(spec)
        self._check_page(spec, tiles, page_bytes, page_offset_bytes)
        counts = {"L": num_layers, "B": num_blocks * tiles, "H": heads}
        axes = self.run_axes
        per = {a: math.prod(counts[b] for b in axes[axes.index(a) + 1 :]) for a in axes}
        rows, cell = rows_per_block(spec) // tiles, packed_bytes(content, dtype)
        tokens_first = self.order.endswith("NHC")
        return LayerRuns(
            tiles=tiles,
            rows=rows,
            heads=heads,
            cell_bytes=cell,
            run_bytes=page_bytes // tiles // self._heads_apart(spec),
            first_run=layer * per["L"],
            tile_runs=per["B"],
            head_runs=per.get("H", 0),
            start_bytes=page_offset_bytes // tiles,
            row_bytes=heads * cell if tokens_first else cell,
            head_bytes=0 if "H" in per else cell if tokens_first else rows * cell,
        )

    def _tiles(self, spec: LayerSpec) -> int:
        if self.tile_tokens is None:
            return 1
        check_kernel_block_size(spec, self.tile_tokens, "tile_tokens")
        return spec.block_size // self.tile_tokens

    def _check_page(self, spec: LayerSpec, tiles: int, page_bytes: int, start_bytes: int) -> None:
        check_positive(page_bytes=page_bytes)
        if page_bytes < start_bytes + spec.data_bytes:
            raise ValueError(
                f"page_bytes={page_bytes} cannot hold {spec.data_bytes} bytes of this {spec.kind} "
                f"layer from page_offset_bytes={start_bytes}; use at least "
                f"{start_bytes + spec.data_bytes}"
            )
        if start_bytes and not self.has_whole_pages:
            raise ValueError(
                f"page_offset_bytes={start_bytes}: {self.order} deals a page out among the heads, "
                "so nothing else can share it; use an order with L and B before H"
            )
        if page_bytes % (tiles * self._heads_apart(spec)) or start_bytes % tiles:
            self._refuse_page(spec, tiles, page_bytes, start_bytes)

    def _heads_apart(self, spec: LayerSpec) -> int:
        """Runs that a page is dealt out to."""
        return 1 if self.has_whole_pages else row_format(spec).heads

    def _refuse_page(self, spec: LayerSpec, tiles: int, page_bytes: int, start_bytes: int) -> None:
        shares, dtype = tiles * self._heads_apart(spec), row_format(spec).dtype
        raise ValueError(
            f"page_bytes={page_bytes} and page_offset_bytes={start_bytes} must be whole elements "
            f"of {dtype} for each of {shares} contiguous parts of a page (tiles, heads); use "
            f"multiples of {shares * packed_bytes(1, dtype)} bytes"
        )

    def _refuse_size(self, spec: LayerSpec, runs: LayerRuns, size: int, num_layers: int) -> None:
        """Raises why blocks of this size have no strides."""
        between = []
        if self.order.index("L") > self.order.index("B") and num_layers > 1:
            between.append(f"the other of {num_layers} layers")
        if self.order.index("H") in range(self.order.index("B"), self.order.index("N")):
            between += [f"the other of {runs.heads} heads"] if runs.heads > 1 else []
        if self.tile_tokens is None:
            remedy = f"give the layout tile_tokens={size}, or use LBNHC and pages without padding"
        else:
            remedy = (
                f"its tiles are of {self.tile_tokens}: use that as kernel_block_size, or "
                "byte_view for whole blocks"
            )
        raise ValueError(
            f"kernel_block_size: {self.order} cannot be read as {spec.block_size // size} kernel "
            f"blocks of {size} tokens per block, for {' and '.join(between) or 'padding'} would "
            f"lie between them; {remedy}"
        )
