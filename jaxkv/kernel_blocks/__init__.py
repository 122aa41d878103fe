"""The block that an attention kernel works on, and where its elements lie in memory.

Knows which block sizes backends accept, how many stored rows a kernel block holds, and
the shapes and strides of one layer's part of a pool. Knows nothing of arrays, tables or
requests, and never imports jax.

Words: a *kernel block* is ``kernel_block_size`` tokens and divides a block; block ``b``
is the kernel blocks ``b * k .. b * k + k - 1`` with k = ``blocks_per_kv_block``. A *row*
is what is stored for one token, or for the ``compress_ratio`` tokens that share it.

One rule holds throughout: a layout decides where every byte lies, and a view never moves
one. A kernel view is a second reading of the same bytes, given where such a reading exists
and refused where it does not. Where heads, layers or padding lie between the rows of two
kernel blocks there is none, unless the layout is one of tiles (``tile_tokens``), which is
settled when the pool is made: blocks are then cut up for that kernel, whole blocks may
have no strides, and whoever moves them (offload, transfer between engines) finds each as
contiguous runs of bytes (`CacheLayout.byte_view`), whatever the kernels like.

Layers that compress store fewer rows per block than the block has tokens, and a table that
splits blocks by their tokens beside a tensor that splits them by their rows sends kernels
out of bounds. Here both ask `blocks_per_kv_block`, which counts tokens; rows follow from it
(`rows_per_kernel_block`), and a size that holds no whole rows is refused. The tests address
the bytes of pools both ways, over block size, kernel block size and compression.
"""

from jaxkv.kernel_blocks._accepted import JAX_BACKENDS, AcceptedSizes
from jaxkv.kernel_blocks._describe import ViewDescription, describe, describe_array
from jaxkv.kernel_blocks._layout import LAYOUT_ALIASES, LAYOUT_ORDERS, CacheLayout
from jaxkv.kernel_blocks._rows import (
    RowFormat,
    blocks_per_kv_block,
    row_format,
    rows_per_block,
    rows_per_kernel_block,
)
from jaxkv.kernel_blocks._select import select_kernel_block_size, select_kernel_block_sizes
from jaxkv.kernel_blocks._view import LayerRuns, LayerView

__all__ = [
    "JAX_BACKENDS",
    "LAYOUT_ALIASES",
    "LAYOUT_ORDERS",
    "AcceptedSizes",
    "CacheLayout",
    "LayerRuns",
    "LayerView",
    "RowFormat",
    "ViewDescription",
    "blocks_per_kv_block",
    "describe",
    "describe_array",
    "row_format",
    "rows_per_block",
    "rows_per_kernel_block",
    "select_kernel_block_size",
    "select_kernel_block_sizes",
]
