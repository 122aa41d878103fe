"""FlexAttention's block masks over the pages of a cache, and a rotation for keys in few bits.

`block_mask_sizes` says before serving how large they get; `BlockMaskSizes` even before there is a
cache. `hadamard` rotates queries, keys and values before `attend` stores them in 4 bits.
"""

from jaxkv._src.attention import (
    block_mask_indices,
    block_mask_sizes,
    hadamard,
    physical_to_logical,
)
from jaxkv._src.layout import BlockMaskSizes

__all__ = [
    "BlockMaskSizes",
    "block_mask_indices",
    "block_mask_sizes",
    "hadamard",
    "physical_to_logical",
]
