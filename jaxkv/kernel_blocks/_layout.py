"""Where the elements of one layer lie: shapes and strides of its part of a pool.

Knows physical orders of the five axes layer, block, head, token and content (L, B, H, N
and C). Knows nothing of arrays or devices: a view is numbers.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxkv.checks import check_count, check_positive
from jaxkv.kernel_blocks._rows import (
    blocks_per_kv_block,
    check_spec,
    row_format,
    rows_per_block,
)
from jaxkv.specs import LayerSpec, packed_bytes

LAYOUT_ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")

# How kernels name the order of head and token inside a block.
LAYOUT_ALIASES: Mapping[str, str] = MappingProxyType({"NHD": "LBNHC", "HND": "LBHNC"})


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


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """A physical order of the axes, slowest first: one of `LAYOUT_ORDERS`, NHD or HND.

    Pages are padded at the end of what is contiguous: of the page where neither L nor B
    comes after H, else of each head's share of it.
    """

    order: str

    def __post_init__(self) -> None:
        order = LAYOUT_ALIASES.get(self.order, self.order)
        if order not in LAYOUT_ORDERS:
            known = ", ".join((*LAYOUT_ORDERS, *LAYOUT_ALIASES))
            raise ValueError(f"order={self.order!r} is not a cache layout; use one of {known}")
        object.__setattr__(self, "order", order)

    @property
    def has_whole_pages(self) -> bool:
        """Is the page of one layer and block contiguous?"""
        return self.order.index("H") > 1

    @property
    def has_whole_blocks(self) -> bool:
        """Do all layers of a block lie side by side, one transfer for them all?"""
        return self.order[0] == "B"

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
          ValueError: a page that cannot hold the layer or whole elements, or kernel
            blocks that do not follow each other at one stride (padding, other layers or
            heads lie between).
        """
        check_spec(spec)
        check_positive(num_blocks=num_blocks, num_layers=num_layers)
        check_count(layer=layer, page_offset_bytes=page_offset_bytes)
        if layer >= num_layers:
            raise ValueError(f"layer={layer} is not one of num_layers={num_layers}; count from 0")
        parts = 1 if kernel_block_size is None else blocks_per_kv_block(spec, kernel_block_size)
        page_bytes = spec.page_bytes if page_bytes is None else page_bytes
        heads, content, dtype, key_elements = row_format(spec)
        rows = rows_per_block(spec)
        sizes = {"L": num_layers, "B": num_blocks, "H": heads, "N": rows, "C": content}
        run = self._run_elements(spec, sizes, dtype, page_bytes, page_offset_bytes)
        strides = self._strides(sizes, run)
        if parts > 1:
            self._check_splits(sizes, strides, parts)
            sizes |= {"B": num_blocks * parts, "N": rows // parts}
            strides["B"] = sizes["N"] * strides["N"]
        axes = self.order.replace("L", "")
        return LayerView(
            axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            strides=tuple(strides[axis] for axis in axes),
            offset=layer * strides["L"] + page_offset_bytes // packed_bytes(1, dtype),
            dtype=dtype,
            num_blocks=num_blocks,
            key_elements=key_elements,
        )

    def _run_elements(
        self, spec: LayerSpec, sizes: dict[str, int], dtype: str, page_bytes: int, start_bytes: int
    ) -> int:
        """Elements from one contiguous run (a page, or a head's share of it) to the next."""
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
        shares = 1 if self.has_whole_pages else sizes["H"]
        itemsize = packed_bytes(1, dtype)
        if page_bytes % (shares * itemsize) or start_bytes % itemsize:
            raise ValueError(
                f"page_bytes={page_bytes} and page_offset_bytes={start_bytes} must be whole "
                f"elements of {dtype} for each of {shares} contiguous parts of a page; use "
                f"multiples of {shares * itemsize} bytes"
            )
        return page_bytes // shares // itemsize

    def _strides(self, sizes: dict[str, int], run: int) -> dict[str, int]:
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(self.order):
            if axis in "LB" and not {"L", "B"} & strides.keys():
                step = run  # padding, if any, ends here
            strides[axis] = step
            step *= sizes[axis]
        return strides

    def _check_splits(self, sizes: dict[str, int], strides: dict[str, int], parts: int) -> None:
        """Kernel blocks need one stride, so rows must run on from each block to the next."""
        if strides["B"] == sizes["N"] * strides["N"]:
            return
        between = []
        if self.order.index("L") > self.order.index("B") and sizes["L"] > 1:
            between.append(f"the other of {sizes['L']} layers")
        if self.order.index("H") in range(self.order.index("B"), self.order.index("N")):
            between += [f"the other of {sizes['H']} heads"] if sizes["H"] > 1 else []
        raise ValueError(
            f"kernel_block_size: {self.order} cannot be read as {parts} kernel blocks per block, "
            f"for {' and '.join(between) or 'padding'} would lie between them; plan with that "
            "size as block_size, or use LBNHC and pages without padding"
        )
