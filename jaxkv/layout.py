"""The memory of a pool: rows, physical orders, buffers, views, and kernel blocks. No jax.

A *kernel block* is ``kernel_block_size`` tokens and divides a block into k: block ``b`` is the
kernel blocks ``b * k .. b * k + k - 1``. A *row* is what is stored for one token, or for the
``compress_ratio`` tokens that share it. An *extent* is a contiguous range of bytes of one layer.

A physical order decides where every byte lies, and a view never moves one. A view in kernel
blocks is a second reading of the same bytes. Where heads, layers or padding lie between the rows
of two kernel blocks there is none, and it is refused, unless blocks are stored as tiles of the
kernel's size. `LayerView` has the shape and the strides of a view.

`select_kernel_block_sizes` finds the kernel blocks that all kernels of a group accept, and
`select_kernel_block_size` those of one block size.
"""

from jaxkv._src.layout import (
    ORDERS,
    AcceptedSizes,
    LayerView,
    PhysicalOrder,
    select_kernel_block_size,
    select_kernel_block_sizes,
)

__all__ = [
    "ORDERS",
    "AcceptedSizes",
    "LayerView",
    "PhysicalOrder",
    "select_kernel_block_size",
    "select_kernel_block_sizes",
]
