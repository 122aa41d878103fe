"""FlexAttention's block masks over the pages of a cache.

`block_mask_sizes` says before serving how large they get; `BlockMaskSizes` even before there is a
cache.
"""

from jaxkv._src.attention import block_mask_indices, block_mask_sizes, physical_to_logical
from jaxkv._src.layout import BlockMaskSizes

__all__ = [
    "BlockMaskSizes",
    "block_mask_indices",
    "block_mask_sizes",
    "physical_to_logical",
]
