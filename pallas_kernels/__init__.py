"""GPU kernels over plain arrays and block ids. Knows nothing of jaxkv.

Each kernel has a Mosaic GPU implementation, for NVIDIA Hopper and newer, and an XLA
one beside it that serves as reference and as fallback everywhere else; ``implementation=``
chooses.
"""

from pallas_kernels._pages import default_implementation as default_implementation
from pallas_kernels.copy_blocks import copy_blocks as copy_blocks
from pallas_kernels.write_rows import write_rows as write_rows
from pallas_kernels.zero_blocks import zero_blocks as zero_blocks

__all__ = ["copy_blocks", "default_implementation", "write_rows", "zero_blocks"]
