"""Block-sparse metadata for attention kernels in the style of PyTorch's FlexAttention.

Knows which pages each run of ``q_block_tokens`` queries can see, and how many bytes it
takes to say so. Knows no attention kernel; `reference_attention` shows how one reads it.

Plan with `MetadataSizes` and `metadata_bytes`, before the pool is sized (from
`jaxkv.flex_sizes` without jax); build with `build_page_lists` or `build_page_csr` inside
the step. One `MetadataSizes` decides both the planned bytes and the built shapes, so the
two cannot disagree.
"""

from jaxkv.flex_attention._block_mask import block_mask_indices as block_mask_indices
from jaxkv.flex_attention._block_mask import physical_to_logical as physical_to_logical
from jaxkv.flex_attention._metadata import PageCSR as PageCSR
from jaxkv.flex_attention._metadata import PageLists as PageLists
from jaxkv.flex_attention._metadata import build_page_csr as build_page_csr
from jaxkv.flex_attention._metadata import build_page_lists as build_page_lists
from jaxkv.flex_attention._problems import BAD_BATCH as BAD_BATCH
from jaxkv.flex_attention._problems import BAD_PAGE_ID as BAD_PAGE_ID
from jaxkv.flex_attention._problems import MISSING_PAGE as MISSING_PAGE
from jaxkv.flex_attention._problems import TOO_MANY_PAGES as TOO_MANY_PAGES
from jaxkv.flex_attention._problems import MetadataError as MetadataError
from jaxkv.flex_attention._problems import check_metadata as check_metadata
from jaxkv.flex_attention._reference_attention import (
    reference_attention as reference_attention,
)
from jaxkv.flex_sizes import MetadataSizes as MetadataSizes
from jaxkv.flex_sizes import max_num_query_groups as max_num_query_groups
from jaxkv.flex_sizes import metadata_bytes as metadata_bytes
