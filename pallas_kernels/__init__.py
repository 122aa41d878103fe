"""GPU kernels over plain arrays and block ids, independent of jaxkv.

Each kernel has a Mosaic GPU implementation, for NVIDIA Hopper and newer, and an XLA
implementation, which is the reference and the fallback everywhere else;
``implementation=`` chooses. A kernel ignores block ids that are out of range and treats
every other block alike, block 0 included.
"""

from pallas_kernels._capability import Implementation as Implementation
from pallas_kernels._capability import default_implementation as default_implementation
from pallas_kernels._copy_blocks import copy_blocks as copy_blocks
from pallas_kernels._paged_attention import paged_attention as paged_attention
from pallas_kernels._paged_attention_pages import StridedPages as StridedPages
from pallas_kernels._paged_attention_tiles import Deal as Deal
from pallas_kernels._write_rows import write_rows as write_rows
from pallas_kernels._zero_blocks import zero_blocks as zero_blocks

__all__ = [
    "Deal",
    "Implementation",
    "StridedPages",
    "copy_blocks",
    "default_implementation",
    "paged_attention",
    "write_rows",
    "zero_blocks",
]
