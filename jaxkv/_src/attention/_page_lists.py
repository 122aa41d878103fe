"""The pages that every query group sees: padded lists, or one compact list with offsets.

Both list (request, page) *pairs*, in the order of the requests in the batch and of the pages in
each request. A pair has the page's id, its logical page (the index of the page in its request)
and the request, so a kernel needs no other map from pages to positions. The lists do not grow with
the pool, as a map over every (request, page of the pool) would, or a mask over every (query group,
page of the pool). A page that two requests share is in two pairs, one for each of them: a kernel
that lets tokens see only pairs of their own request counts no key twice. `block_mask_indices` makes
lists of distinct pages, for kernels that do not tell requests apart.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.attention._page_list_errors import TOO_MANY_PAGES, PageListError
from jaxkv._src.attention._page_tables import checked_sizes, page_ids, page_tables
from jaxkv._src.attention._segments import (
    PageTables,
    Requests,
    check_tables,
    count_before,
    find_requests,
    find_segments,
    list_pairs,
)
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import FlagsError
from jaxkv._src.internal.indexing import bit, gather_bits
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import PageListSizes
from jaxkv._src.pool import SAME, on_devices

CSR_ROW = 2**16  # pairs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PageLists:
    """The pages that the tokens of each query group see; G groups, T tokens of B requests.

    A group's first ``counts`` entries are valid. In the others the page is 0, the null page, and
    the rest -1. Token t sees key n of an entry if the entry's request is ``token_requests[t]`` and
    the mask lets ``positions[t]`` see the position ``logical_pages * page_tokens + n``. No token
    sees keys of page 0, which also stands for a missing page.
    """

    pages: Array  # int32[G, L], on the block axis of `layer_view`
    logical_pages: Array  # int32[G, L], index of the page in its request
    requests: Array  # int32[G, L], index of the request in the batch
    counts: Array  # int32[G], valid entries
    token_requests: Array  # int32[T], index of each token's request; -1 for padding
    positions: Array  # int32[T], in its request; -1 for padding
    seq_lens: Array  # int32[B], tokens of each request, this step's included; 0 for padding
    error_flags: Array  # int32[], bits; see `jaxkv.check_errors`
    sizes: PageListSizes = dataclasses.field(metadata={"static": True})
    error: ClassVar[type[FlagsError]] = PageListError

    def __repr__(self) -> str:
        groups, pages = self.pages.shape
        return f"PageLists({groups} query groups, up to {pages} pages each)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PageCSR:
    """The lists of all query groups end to end; G groups, C entries, T tokens of B requests.

    Group g's entries are ``offsets[g] : offsets[g + 1]``. In entries past the last group the page
    is 0, the null page, and the rest -1.
    """

    offsets: Array  # int32[G + 1]
    pages: Array  # int32[C], on the block axis of `layer_view`
    logical_pages: Array  # int32[C], index of the page in its request
    requests: Array  # int32[C], index of the request in the batch
    token_requests: Array  # int32[T], index of each token's request; -1 for padding
    positions: Array  # int32[T], in its request; -1 for padding
    seq_lens: Array  # int32[B], tokens of each request, this step's included; 0 for padding
    error_flags: Array  # int32[], bits; see `jaxkv.check_errors`
    sizes: PageListSizes = dataclasses.field(metadata={"static": True})
    error: ClassVar[type[FlagsError]] = PageListError

    def __repr__(self) -> str:
        groups, pages = self.offsets.shape[0] - 1, self.pages.shape[0]
        return f"PageCSR({groups} query groups, up to {pages} pages in all)"


def build_page_lists(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    q_block_tokens: int,
    causal: bool = True,
    pages_are_shared: bool = True,
    layer_index: LayerIndex = None,
) -> PageLists:
    """Lists, for each query group of a step, the pages of a layer that its tokens see.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        lists = jaxkv.attention.build_page_lists(cache, "layer", batch, q_block_tokens=16)
        distinct = jaxkv.attention.block_mask_indices(lists)     # if your kernel wants these

    A page is listed if and only if a token of the group sees a token of the page: within the
    layer's window or chunk, and not after the token itself. Blocks of attention sinks are not
    listed, because block tables do not contain them. Inside one ``jit`` XLA builds the lists of a
    group's layers once, because only their ids differ.

    A visible page that the request does not hold is listed as page 0 and sets an error flag, which
    `jaxkv.check_errors` raises.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer that stores tokens. Its kernel blocks are the pages.
      q_block_tokens: tokens of a query group; static.
      causal: False: tokens see their whole request; for layers without window and chunks.
      pages_are_shared: False makes the lists smaller; for batches in which no two requests hold
        the same block.
      period: int32[], may be traced: lists for another layer of the group; see
        `jaxkv.write_tokens`.

    Returns:
      Lists whose ids index the block axis of ``layer_view(cache, layer)``, like those of
      ``batch.kernel_block_tables(layer)``. Shapes are those of `page_list_sizes`.

    Raises:
      TypeError: a layer that stores no tokens of its requests, or arguments of other types.
      ValueError: a rectangular batch, context parallelism, or a batch of another cache.
    """
    return _build(
        make_lists,
        *(cache, layer, batch, layer_index),
        q_block_tokens=q_block_tokens,
        causal=causal,
        pages_are_shared=pages_are_shared,
    )


def build_page_csr(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    q_block_tokens: int,
    causal: bool = True,
    pages_are_shared: bool = True,
    layer_index: LayerIndex = None,
) -> PageCSR:
    """Lists the same pairs in the same order as `build_page_lists`, without padding between groups.

    Takes and raises the same. The list has ``(groups + requests - 1) * pages`` entries instead of
    ``groups * requests * pages``.
    """
    return _build(
        make_csr,
        *(cache, layer, batch, layer_index),
        q_block_tokens=q_block_tokens,
        causal=causal,
        pages_are_shared=pages_are_shared,
    )


def _build(
    make: Callable[..., Any],
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    layer_index: LayerIndex,
    **options: Any,
) -> Any:
    """Lists the pages of a step by ``make``, with ids on the block axis of the layer's view."""
    sizes = checked_sizes(cache, layer, batch, layer_index, **options)

    def build(cache: KVCache, batch: StepBatch, layer_index: LayerIndex) -> PageLists | PageCSR:
        listed = make(page_tables(batch, layer), sizes=sizes)
        pages, _, flags = page_ids(listed.pages, batch, layer, layer_index)
        flags |= listed.error_flags
        return dataclasses.replace(listed, pages=pages, error_flags=flags)

    return on_devices(build, cache, batch, layer_index, in_specs=(SAME, SAME), out_specs=SAME)


@functools.partial(jax.jit, static_argnames="sizes")
def make_lists(tables: PageTables, *, sizes: PageListSizes) -> PageLists:
    """Returns padded lists of page ids that count from the layer's first page."""
    batch = check_tables(tables, sizes)
    segments = find_segments(batch, sizes)
    before = count_before(segments, sizes)
    counts = jnp.diff(before)
    listed = list_pairs(batch, segments, before[:-1], counts, sizes.list_width)
    overflow = bit(TOO_MANY_PAGES, counts > sizes.list_width)
    token_requests, positions = _find_tokens(batch, sizes)
    return PageLists(
        pages=listed.pages,
        logical_pages=listed.logical_pages,
        requests=listed.requests,
        counts=jnp.minimum(counts, sizes.list_width),
        token_requests=token_requests,
        positions=positions,
        seq_lens=batch.seq_lens,
        error_flags=gather_bits(batch.error_flags, overflow),
        sizes=sizes,
    )


@functools.partial(jax.jit, static_argnames="sizes")
def make_csr(tables: PageTables, *, sizes: PageListSizes) -> PageCSR:
    """Returns compact lists of page ids that count from the layer's first page."""
    batch = check_tables(tables, sizes)
    segments = find_segments(batch, sizes)
    before = count_before(segments, sizes)
    # In rows, so that `list_pairs` need not compute all of them at once.
    width = min(sizes.csr_capacity, CSR_ROW)
    firsts = jnp.arange(cdiv(sizes.csr_capacity, width), dtype=jnp.int32) * width
    listed = list_pairs(batch, segments, firsts, before[-1] - firsts, width)
    pages, logical_pages, requests = (a.reshape(-1)[: sizes.csr_capacity] for a in listed)
    overflow = bit(TOO_MANY_PAGES, before[-1] > sizes.csr_capacity)
    token_requests, positions = _find_tokens(batch, sizes)
    return PageCSR(
        offsets=jnp.minimum(before, sizes.csr_capacity),
        pages=pages,
        logical_pages=logical_pages,
        requests=requests,
        token_requests=token_requests,
        positions=positions,
        seq_lens=batch.seq_lens,
        error_flags=gather_bits(batch.error_flags, overflow),
        sizes=sizes,
    )


def _find_tokens(batch: Requests, sizes: PageListSizes) -> tuple[Array, Array]:
    return find_requests(batch, jnp.arange(sizes.max_num_batched_tokens, dtype=jnp.int32))
