"""The arrays that a FlexAttention BlockMask and its mask function need.

PyTorch's kernels walk *distinct pages of the pool*, and call a mask function with each (query, slot
of the pool). So a query group must list a page once even if requests share it, and the mask
function needs a dense map from pages back to positions.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.attention._page_list_errors import BAD_PAGE_ID, PageListError
from jaxkv._src.attention._page_lists import PageLists
from jaxkv._src.attention._page_tables import checked_sizes, page_ids, page_tables
from jaxkv._src.attention._segments import NULL_PAGE, PageTables
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import FlagsError
from jaxkv._src.internal.indexing import bit, gather_bits, within
from jaxkv._src.internal.jit_int32 import jit_int32
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.layout import PageListSizes
from jaxkv._src.pool import SAME, on_devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockMaskIndices:
    """Distinct pages per query group, ascending, as ``BlockMask.from_kv_blocks`` takes them."""

    kv_num_blocks: Array  # int32[G]
    kv_indices: Array  # int32[G, K], 0 past the count; the null page is never listed
    error_flags: Array  # int32[], bits; see `jaxkv.check_errors`
    error: ClassVar[type[FlagsError]] = PageListError

    def __repr__(self) -> str:
        groups, pages = self.kv_indices.shape
        return f"BlockMaskIndices({groups} query groups, up to {pages} pages each)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PhysicalToLogical:
    """A dense map from pages of the pool to pages of requests, for mask functions over slots.

    Page ``p`` of `layer_view` is page ``logical_pages[b, p - first_page]`` of request b; -1 if the
    request does not hold it, and for the null page.
    """

    logical_pages: Array  # int32[B, num_pages], index of the page in its request
    first_page: Array  # int32[], the id of the layer's first page
    error_flags: Array  # int32[], bits; see `jaxkv.check_errors`
    error: ClassVar[type[FlagsError]] = PageListError

    def __repr__(self) -> str:
        requests, pages = self.logical_pages.shape
        return f"PhysicalToLogical({requests} requests, {pages} pages)"


@jit_int32()
def block_mask_indices(lists: PageLists) -> BlockMaskIndices:
    """Returns the distinct pages of each query group.

    Sorts each list; temporaries are a few times [G, L], independent of the pool. The result keeps
    the error flags of the lists.

    Args:
      lists: from `build_page_lists`.

    Returns:
      Indices with K = ``lists.sizes.block_mask_width``.
    """
    width = lists.sizes.block_mask_width
    pages = _sort(jnp.where(lists.pages > NULL_PAGE, lists.pages, INT32_MAX))
    again = jnp.pad(pages[:, 1:] == pages[:, :-1], ((0, 0), (1, 0)))
    pages = _sort(jnp.where(again, INT32_MAX, pages))
    counts = (pages < INT32_MAX).sum(axis=1, dtype=jnp.int32)
    pages = jnp.where(pages < INT32_MAX, pages, NULL_PAGE)[:, :width]
    return BlockMaskIndices(
        kv_num_blocks=counts,
        kv_indices=pages,
        error_flags=lists.error_flags,
    )


def physical_to_logical(
    cache: KVCache, layer: str, batch: StepBatch, *, layer_index: LayerIndex = None
) -> PhysicalToLogical:
    """Maps the pages of a layer to the pages of a step's requests.

    The map takes 4 bytes for each request and page of the pool; kernels that read `PageLists` or
    `PageCSR` do not need it. If several pages of a request are the same page of the pool, the map
    names the last of them.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer that stores tokens.
      period: int32[], may be traced: maps another layer of the group; see `jaxkv.write_tokens`.

    Raises:
      TypeError, ValueError: as for `build_page_lists`.
    """
    sizes = checked_sizes(cache, layer, batch, layer_index)

    def build(cache: KVCache, batch: StepBatch, layer_index: LayerIndex) -> PhysicalToLogical:
        tables = page_tables(batch, layer)
        mapped, flags = map_pages(tables, batch.seq_lens, sizes=sizes)
        _, first_page, bad_layer_index = page_ids(mapped, batch, layer, layer_index)
        return PhysicalToLogical(
            logical_pages=jnp.where(bad_layer_index > 0, -1, mapped),
            first_page=first_page,
            error_flags=flags | bad_layer_index,
        )

    return on_devices(build, cache, batch, layer_index, in_specs=(SAME, SAME), out_specs=SAME)


@functools.partial(jax.jit, static_argnames="sizes")
def map_pages(tables: PageTables, seq_lens: Array, *, sizes: PageListSizes) -> tuple[Array, Array]:
    """Returns `PhysicalToLogical.logical_pages`, and the error flags, int32[].

    Args:
      tables: of B requests.
      seq_lens: int32[B]; pages past them are ignored.
      sizes: static.
    """
    pages, width = tables.pages, tables.pages.shape[1]
    page = tables.first_pages[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    # Compares pages, not tokens, because page * page_tokens could overflow int32.
    last = (seq_lens - 1) // sizes.page_tokens
    held = (page <= last[:, None]) & (pages != NULL_PAGE)
    known = within(pages, sizes.num_pages)
    row = lax.broadcasted_iota(jnp.int32, pages.shape, 0)
    index = jnp.where(held & known, pages, sizes.num_pages)
    empty = jnp.full((pages.shape[0], sizes.num_pages), -1, jnp.int32)
    mapped = empty.at[row, index].max(page, mode="drop")
    return mapped, gather_bits(bit(BAD_PAGE_ID, held & ~known))


def _sort(pages: Array) -> Array:
    return lax.sort(pages, dimension=1, is_stable=False)
