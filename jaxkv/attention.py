"""Attention over the pages of a cache, and page lists for other kernels."""

from jaxkv._src.attention import (
    BlockMaskIndices,
    PageCSR,
    PageListError,
    PageLists,
    block_mask_indices,
    build_page_csr,
    build_page_lists,
    page_list_sizes,
    physical_to_logical,
)

__all__ = [
    "BlockMaskIndices",
    "PageCSR",
    "PageListError",
    "PageLists",
    "block_mask_indices",
    "build_page_csr",
    "build_page_lists",
    "page_list_sizes",
    "physical_to_logical",
]
