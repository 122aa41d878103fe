"""The arrays that PyTorch's FlexAttention needs: a block mask, and its map from pages to positions.

FlexAttention walks *distinct pages of the pool*, and calls a mask function with each (query, slot
of the pool). So a query group lists a page once even if requests share it, and the mask function
needs a dense map from pages back to the pages of requests.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from jaxkv._src.cache import (
    KVCache,
    LayerIndex,
    StepBatch,
    check_cache,
    check_layout,
    expand_blocks,
)
from jaxkv._src.internal.indexing import group_of, take, take_cells
from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv._src.layout import BlockMaskSizes
from jaxkv._src.pool import SAME, check_batch, on_devices
from jaxkv._src.specs import first_visible_token
from jaxkv._src.uploads import StepShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockMaskIndices:
    """Distinct pages per query group; see `block_mask_indices`."""

    kv_num_blocks: Int32[Array, "query_groups"]
    kv_indices: Int32[Array, "query_groups pages"]

    def __repr__(self) -> str:
        groups, pages = self.kv_indices.shape
        return f"BlockMaskIndices({groups} query groups, up to {pages} pages each)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PhysicalToLogical:
    """A dense map from pages of the pool to pages of requests; see `physical_to_logical`."""

    logical_pages: Int32[Array, "requests num_pages"]
    first_page: Int32[Array, ""]

    def __repr__(self) -> str:
        requests, pages = self.logical_pages.shape
        return f"PhysicalToLogical({requests} requests, {pages} pages)"


def block_mask_sizes(
    cache: KVCache, layer: str, shape: StepShape, *, q_block_tokens: int, causal: bool = True
) -> BlockMaskSizes:
    """Returns the sizes of a layer's block mask in steps of a shape.

    Args:
      cache: made from the same plan as the shape.
      layer: name of a layer that stores tokens.
      shape: the shape of the steps, not a rectangular one.
      q_block_tokens, causal: as for `block_mask_indices`.

    Raises:
      TypeError: a layer that stores states or the encoder's tokens, or arguments of other types.
      ValueError: a rectangular shape, context parallelism, a shape of another plan, or sizes
        that contradict each other.
    """
    check_cache(cache)
    layout = cache.layout
    check_layout(layout, shape)
    group = layout.placement_of(layer).group
    growth = layout.growths[group]
    if growth.stores != "tokens":
        raise TypeError(
            f"layer={layer!r} is a {growth.kind} layer, whose blocks are not the tokens of its "
            "requests; block masks are for layers that store tokens"
        )
    if layout.context_parallel > 1:
        raise ValueError(
            f"the block mask of layer={layer!r} needs whole requests: with "
            f"context_parallel={layout.context_parallel} each rank stores a part of every request; "
            "use jaxkv.attend"
        )
    if shape.tokens_per_request is not None:
        raise ValueError(
            f"the batch is rectangular, tokens_per_request={shape.tokens_per_request}; query "
            "groups are cut from a flat batch: make the StepShape with max_tokens alone"
        )
    parts = layout.blocks_per_kv_block[group]
    return BlockMaskSizes(
        max_num_batched_tokens=shape.max_tokens,
        max_num_seqs=shape.batch_size,
        max_model_len=shape.max_seq_len,
        page_tokens=growth.block_size // parts,
        q_block_tokens=q_block_tokens,
        num_pages=layout.num_blocks * parts,
        causal=causal,
        sliding_window=None if growth.window == INT32_MAX else growth.window,
        chunk_size=None if growth.chunk == INT32_MAX else growth.chunk,
    )


def block_mask_indices(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    q_block_tokens: int,
    causal: bool = True,
    layer_index: LayerIndex = None,
) -> BlockMaskIndices:
    """Lists, for each query group of a step, the distinct pages of a layer that its tokens see.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        mask = jaxkv.attention.block_mask_indices(cache, "layer", batch, q_block_tokens=16)

    A page is listed if and only if a token of the group sees a token of the page: within the
    layer's window or chunk, and not after the token itself. Attention sinks are not listed, because
    block tables do not contain them. Pages that a request lacks are left out; `apply_step` has set
    the cache's error flag for them.

    Inside one ``jit`` XLA builds the block mask of a group's layers once, because only ids differ.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer that stores tokens. Its kernel blocks are the pages.
      q_block_tokens: tokens of a query group; static.
      causal: False: tokens see their whole request; for layers without window and chunks.
      layer_index: int32[], may be traced: lists the pages of another layer of the group; see
        `jaxkv.write_tokens`. Of a layer that does not exist no page is listed.

    Returns:
      ``kv_num_blocks``, int32[G], and ``kv_indices``, int32[G, K], as ``BlockMask.from_kv_blocks``
      takes them: ascending ids on the block axis of ``layer_view(cache, layer)``, like
      ``batch.kernel_block_tables(layer)``; 0, the null page, past the count. G is
      ``max_num_query_groups`` and K ``max_num_kv_indices`` of `block_mask_sizes`.

    Raises:
      TypeError: a layer that stores no tokens of its requests, or arguments of other types.
      ValueError: a rectangular batch, context parallelism, or a batch of another cache.
    """
    sizes = _checked_sizes(cache, layer, batch, layer_index, q_block_tokens, causal)

    def build(cache: KVCache, batch: StepBatch, layer_index: LayerIndex) -> BlockMaskIndices:
        counts, pages = list_pages(_page_tables(batch, layer), sizes=sizes)
        first, exists = _first_page(batch, layer, layer_index)
        return BlockMaskIndices(
            kv_num_blocks=jnp.where(exists, counts, 0),
            kv_indices=jnp.where((pages > NULL_BLOCK) & exists, pages + first, NULL_BLOCK),
        )

    return on_devices(build, cache, batch, layer_index, in_specs=(SAME, SAME), out_specs=SAME)


def physical_to_logical(
    cache: KVCache, layer: str, batch: StepBatch, *, layer_index: LayerIndex = None
) -> PhysicalToLogical:
    """Maps the pages of a layer to the pages of a step's requests.

    The map takes 4 bytes for each request and page of the pool. If several pages of a request are
    the same page of the pool, the map names the last of them.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer that stores tokens.
      layer_index: as for `block_mask_indices`.

    Returns:
      ``logical_pages``, int32[B, num_pages], and ``first_page``, int32[]: page ``p`` of
      `layer_view` is page ``logical_pages[b, p - first_page]`` of request b; -1 if it is none of
      the request's, and for the null page.

    Raises:
      TypeError, ValueError: as for `block_mask_indices`.
    """
    sizes = _checked_sizes(cache, layer, batch, layer_index)

    def build(cache: KVCache, batch: StepBatch, layer_index: LayerIndex) -> PhysicalToLogical:
        first, exists = _first_page(batch, layer, layer_index)
        mapped = map_pages(_page_tables(batch, layer), sizes=sizes)
        return PhysicalToLogical(logical_pages=jnp.where(exists, mapped, -1), first_page=first)

    return on_devices(build, cache, batch, layer_index, in_specs=(SAME, SAME), out_specs=SAME)


def _checked_sizes(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    layer_index: LayerIndex,
    q_block_tokens: int = 1,
    causal: bool = True,
) -> BlockMaskSizes:
    check_batch(cache, batch)
    layout = cache.layout
    layout.at_layer_index(layer, layer_index, layout.id_offset, -1)  # raises for a bad one
    parts = layout.blocks_per_kv_block[layout.placement_of(layer).group]
    layout.check_ids(layer, layer_index, parts, "kernel blocks")
    return block_mask_sizes(cache, layer, batch.shape, q_block_tokens=q_block_tokens, causal=causal)


class PageTables(NamedTuple):
    """The pages of a flat batch's B requests, and the tokens that the step computes.

    Equal for all layers of a group.
    """

    pages: Int32[Array, "requests width"]  # counted from the layer's first page; 0: none
    first_pages: Int32[Array, "requests"]  # index in its request of each row's first page
    query_start_loc: Int32[Array, "requests+1"]
    num_computed_tokens: Int32[Array, "requests"]


def _page_tables(batch: StepBatch, layer: str) -> PageTables:
    group = batch.layout.placement_of(layer).group
    requests, parts = batch.in_group(group), batch.layout.blocks_per_kv_block[group]
    is_null = jnp.repeat(requests.table == NULL_BLOCK, parts, axis=1)
    return PageTables(
        pages=jnp.where(is_null, NULL_BLOCK, expand_blocks(requests.table, parts)),
        first_pages=requests.first_blocks * parts,
        query_start_loc=batch.query_start_loc,
        num_computed_tokens=batch.num_computed_tokens,
    )


def _first_page(
    batch: StepBatch, layer: str, layer_index: LayerIndex
) -> tuple[Array, Array | bool]:
    """Returns the id of a layer's first page in its view, int32[], and whether the layer exists."""
    layout = batch.layout
    parts = layout.blocks_per_kv_block[layout.placement_of(layer).group]
    first = layout.at_layer_index(layer, layer_index, layout.id_offset, -1)
    exists = jnp.asarray(first, jnp.int32) >= 0
    return jnp.asarray(first * parts, jnp.int32), exists


@functools.partial(jax.jit, static_argnames="sizes")
def list_pages(
    tables: PageTables, *, sizes: BlockMaskSizes
) -> tuple[Int32[Array, "query_groups"], Int32[Array, "query_groups pages"]]:
    """Returns the number of distinct pages of each query group, and the pages.

    Pages count from the layer's first one.
    """
    groups, width = sizes.max_num_query_groups, sizes.max_num_kv_indices
    pages = _seen_pages(tables, sizes).reshape(groups, -1)
    pages = _sort(jnp.where(pages > NULL_BLOCK, pages, INT32_MAX))
    again = jnp.pad(pages[:, 1:] == pages[:, :-1], ((0, 0), (1, 0)))
    pages = _sort(jnp.where(again, INT32_MAX, pages))
    counts = (pages < INT32_MAX).sum(axis=1, dtype=jnp.int32)
    return counts, jnp.where(pages < INT32_MAX, pages, NULL_BLOCK)[:, :width]


def _seen_pages(
    tables: PageTables, sizes: BlockMaskSizes
) -> Int32[Array, "query_groups requests pages"]:
    """Returns the pages that each query group sees of each of its requests."""
    starts, ends = tables.query_start_loc[:-1], tables.query_start_loc[1:]
    group = jnp.arange(sizes.max_num_query_groups, dtype=jnp.int32) * sizes.q_block_tokens
    request = jnp.arange(sizes.requests_per_group, dtype=jnp.int32)[None]
    request, group = group_of(group, ends)[:, None] + request, group[:, None]
    start = jnp.maximum(group, take(starts, request))
    end = jnp.minimum(group + sizes.q_block_tokens, take(ends, request))
    computed = take(tables.num_computed_tokens, request) - take(starts, request)
    first, last = computed + start, computed + end - 1  # positions
    if sizes.causal:
        limits = (sizes.sliding_window or INT32_MAX, sizes.chunk_size or INT32_MAX)
        first = first_visible_token(first, *limits, jnp)
    else:
        first, last = jnp.zeros_like(first), computed + take(ends, request) - 1
    page = jnp.arange(sizes.pages_per_request, dtype=jnp.int32)[None, None]
    page += (first // sizes.page_tokens)[..., None]
    is_seen = (end > start)[..., None] & (page <= (last // sizes.page_tokens)[..., None])
    row = jnp.minimum(request, len(starts) - 1)[..., None]
    pages = take_cells(tables.pages, row, page - tables.first_pages[row], NULL_BLOCK)
    return jnp.where(is_seen, pages, NULL_BLOCK)


@functools.partial(jax.jit, static_argnames="sizes")
def map_pages(tables: PageTables, *, sizes: BlockMaskSizes) -> Int32[Array, "requests num_pages"]:
    """Returns `PhysicalToLogical.logical_pages`."""
    page = tables.first_pages[:, None] + jnp.arange(tables.pages.shape[1], dtype=jnp.int32)[None]
    lens = jnp.diff(tables.query_start_loc)
    last = (tables.num_computed_tokens + lens - 1) // sizes.page_tokens
    is_page = (tables.pages != NULL_BLOCK) & (page <= last[:, None]) & (lens > 0)[:, None]
    row = lax.broadcasted_iota(jnp.int32, page.shape, 0)
    index = jnp.where(is_page, tables.pages, sizes.num_pages)
    empty = jnp.full((len(lens), sizes.num_pages), -1, jnp.int32)
    return empty.at[row, index].max(page, mode="drop")


def _sort(pages: Array) -> Array:
    return lax.sort(pages, dimension=1, is_stable=False)
