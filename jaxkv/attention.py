"""FlexAttention's block masks over the pages of a cache, chosen blocks, and a rotation of keys.

`block_mask_sizes` says before serving how large masks get; `BlockMaskSizes` even before there is a
cache. `top_blocks` chooses blocks of tokens for each KV head, by an index, to which `attend` then
attends. `hadamard` rotates queries, keys and values before `attend` stores them in 4 bits.
"""

from jaxkv._src.attention import (
    block_mask_indices,
    block_mask_sizes,
    hadamard,
    physical_to_logical,
    top_blocks,
)
from jaxkv._src.layout import BlockMaskSizes

__all__ = [
    "BlockMaskSizes",
    "block_mask_indices",
    "block_mask_sizes",
    "hadamard",
    "physical_to_logical",
    "top_blocks",
]
