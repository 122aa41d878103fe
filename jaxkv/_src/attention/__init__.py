"""Attention over the pages of a cache, and FlexAttention's block masks over them."""

from jaxkv._src.attention._attend import attend
from jaxkv._src.attention._block_mask import (
    BlockMaskIndices,
    PhysicalToLogical,
    block_mask_indices,
    block_mask_sizes,
    physical_to_logical,
)
from jaxkv._src.attention._hadamard import hadamard
from jaxkv._src.attention._top_blocks import top_blocks
from jaxkv._src.attention._top_tokens import top_tokens

__all__ = [
    "BlockMaskIndices",
    "PhysicalToLogical",
    "attend",
    "block_mask_indices",
    "block_mask_sizes",
    "hadamard",
    "physical_to_logical",
    "top_blocks",
    "top_tokens",
]
