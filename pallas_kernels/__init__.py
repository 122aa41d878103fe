"""GPU kernels over plain arrays and block ids. Knows nothing of jaxkv.

Each kernel has a Mosaic GPU implementation, for NVIDIA Hopper and newer, and an XLA
one beside it that serves as reference and as fallback everywhere else; ``implementation=``
chooses.
"""

from pallas_kernels._pages import default_implementation as default_implementation
from pallas_kernels.zero_blocks import zero_blocks as zero_blocks

__all__ = ["default_implementation", "zero_blocks"]
