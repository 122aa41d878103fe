"""Attention over the pages of a cache, and page lists for other kernels."""

from jaxkv._src.attention._attend import attend
from jaxkv._src.attention._block_mask import (
    BlockMaskIndices,
    PhysicalToLogical,
    block_mask_indices,
    physical_to_logical,
)
from jaxkv._src.attention._page_list_errors import (
    BAD_PAGE_ID,
    MISSING_PAGE,
    TOO_MANY_PAGES,
    PageListError,
)
from jaxkv._src.attention._page_lists import PageCSR, PageLists, build_page_csr, build_page_lists
from jaxkv._src.attention._page_tables import page_list_sizes

__all__ = [
    "BAD_PAGE_ID",
    "MISSING_PAGE",
    "TOO_MANY_PAGES",
    "BlockMaskIndices",
    "PageCSR",
    "PageListError",
    "PageLists",
    "PhysicalToLogical",
    "attend",
    "block_mask_indices",
    "build_page_csr",
    "build_page_lists",
    "page_list_sizes",
    "physical_to_logical",
]
