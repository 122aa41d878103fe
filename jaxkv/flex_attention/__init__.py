"""Block-sparse metadata for attention kernels in the style of PyTorch's FlexAttention.

Knows which pages each run of ``q_block_tokens`` queries can see, and how many bytes it
takes to say so. Knows no attention kernel; `reference_attention` shows how one reads it.

Plan with `MetadataSizes` and `metadata_bytes`, before the pool is sized (from
`jaxkv.flex_sizes` without jax); build with `build_page_lists` or `build_page_csr` inside
the step. One `MetadataSizes` decides both the planned bytes and the built shapes, so the
two cannot disagree.
"""

from jaxkv.flex_attention._block_mask import block_mask_indices, physical_to_logical
from jaxkv.flex_attention._metadata import PageCSR, PageLists, build_page_csr, build_page_lists
from jaxkv.flex_attention._problems import (
    BAD_BATCH,
    BAD_PAGE_ID,
    MISSING_PAGE,
    TOO_MANY_PAGES,
    MetadataError,
    check_metadata,
)
from jaxkv.flex_attention._reference_attention import reference_attention
from jaxkv.flex_sizes import MetadataSizes, max_num_query_groups, metadata_bytes

__all__ = [
    "BAD_BATCH",
    "BAD_PAGE_ID",
    "MISSING_PAGE",
    "TOO_MANY_PAGES",
    "MetadataError",
    "MetadataSizes",
    "PageCSR",
    "PageLists",
    "block_mask_indices",
    "build_page_csr",
    "build_page_lists",
    "check_metadata",
    "max_num_query_groups",
    "metadata_bytes",
    "physical_to_logical",
    "reference_attention",
]
