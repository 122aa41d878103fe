"""The memory of a pool: rows, physical orders, buffers, views, and kernel blocks. No jax."""

from jaxkv._src.layout._block_mask import BlockMaskSizes
from jaxkv._src.layout._buffers import PoolBuffers, plan_buffers
from jaxkv._src.layout._descriptors import BlockDescriptors, list_descriptors
from jaxkv._src.layout._kernel_sizes import (
    AcceptedSizes,
    select_kernel_block_size,
    select_kernel_block_sizes,
)
from jaxkv._src.layout._order import ORDER_ALIASES, ORDERS, Order, PhysicalOrder
from jaxkv._src.layout._rows import RowFormat, blocks_per_kv_block, row_format, rows_per_block
from jaxkv._src.layout._view import LayerExtents, LayerView, PagePlacement

__all__ = [
    "ORDERS",
    "ORDER_ALIASES",
    "AcceptedSizes",
    "BlockDescriptors",
    "BlockMaskSizes",
    "LayerExtents",
    "LayerView",
    "Order",
    "PagePlacement",
    "PhysicalOrder",
    "PoolBuffers",
    "RowFormat",
    "blocks_per_kv_block",
    "list_descriptors",
    "plan_buffers",
    "row_format",
    "rows_per_block",
    "select_kernel_block_size",
    "select_kernel_block_sizes",
]
