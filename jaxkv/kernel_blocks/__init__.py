"""The block that an attention kernel works on, and where its elements lie in memory.

Knows which block sizes backends accept, how many stored rows a kernel block holds, and
the shapes and strides of one layer's part of a pool. Knows nothing of arrays, tables or
requests, and never imports jax.

Words: a *kernel block* is ``kernel_block_size`` tokens and divides a block; block ``b``
is the kernel blocks ``b * k .. b * k + k - 1`` with k = ``blocks_per_kv_block``. A *row*
is what is stored for one token, or for the ``compress_ratio`` tokens that share it.

One rule holds throughout: the layout of whole blocks decides where every byte lies, and
a kernel block size never moves one. A kernel view is a second reading of the same bytes,
given where such a reading exists and refused where it does not; so whoever moves blocks
(offload, transfer between engines) sees the same memory whatever the kernels like.
"""

from jaxkv.kernel_blocks._accepted import JAX_BACKENDS as JAX_BACKENDS
from jaxkv.kernel_blocks._accepted import AcceptedSizes as AcceptedSizes
from jaxkv.kernel_blocks._describe import ViewDescription as ViewDescription
from jaxkv.kernel_blocks._describe import describe as describe
from jaxkv.kernel_blocks._describe import describe_array as describe_array
from jaxkv.kernel_blocks._layout import LAYOUT_ALIASES as LAYOUT_ALIASES
from jaxkv.kernel_blocks._layout import LAYOUT_ORDERS as LAYOUT_ORDERS
from jaxkv.kernel_blocks._layout import CacheLayout as CacheLayout
from jaxkv.kernel_blocks._layout import LayerView as LayerView
from jaxkv.kernel_blocks._rows import RowFormat as RowFormat
from jaxkv.kernel_blocks._rows import blocks_per_kv_block as blocks_per_kv_block
from jaxkv.kernel_blocks._rows import row_format as row_format
from jaxkv.kernel_blocks._rows import rows_per_block as rows_per_block
from jaxkv.kernel_blocks._rows import rows_per_kernel_block as rows_per_kernel_block
from jaxkv.kernel_blocks._select import select_kernel_block_size as select_kernel_block_size
from jaxkv.kernel_blocks._select import select_kernel_block_sizes as select_kernel_block_sizes
