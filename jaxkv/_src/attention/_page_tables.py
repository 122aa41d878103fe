"""Sizes, page tables and page ids of page lists, from a cache and a step's batch."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.attention._segments import NULL_PAGE, PageTables
from jaxkv._src.cache import (
    BAD_LAYER_INDEX,
    KVCache,
    LayerIndex,
    StepBatch,
    check_cache,
    check_layout,
    expand_blocks,
    first_columns,
)
from jaxkv._src.internal.indexing import bit, within
from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv._src.layout import PageListSizes
from jaxkv._src.pool import check_batch
from jaxkv._src.uploads import StepShape


def page_list_sizes(
    cache: KVCache,
    layer: str,
    shape: StepShape,
    *,
    q_block_tokens: int,
    causal: bool = True,
    pages_are_shared: bool = True,
) -> PageListSizes:
    """Returns the sizes of a layer's page lists in steps of a shape.

    `jaxkv.layout.page_list_bytes` turns them into bytes. The sizes of pages, windows and chunks
    come from the cache, those of the batch from the shape.

    Args:
      cache: made from the same plan as the shape.
      layer: name of a layer that stores tokens.
      shape: the shape of the steps, not a rectangular one.
      q_block_tokens, causal, pages_are_shared: as for `build_page_lists`.

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
            "requests; page lists are for layers that store tokens"
        )
    if layout.context_parallel > 1:
        raise ValueError(
            f"page lists of layer={layer!r} need whole requests: with "
            f"context_parallel={layout.context_parallel} each rank holds a part of every request; "
            "use jaxkv.attend"
        )
    if shape.tokens_per_request is not None:
        raise ValueError(
            f"the batch is rectangular, tokens_per_request={shape.tokens_per_request}; query "
            "groups are cut from a flat batch: make the StepShape with max_tokens alone"
        )
    parts = layout.blocks_per_kv_block[group]
    return PageListSizes(
        max_num_batched_tokens=shape.max_tokens,
        max_num_seqs=shape.batch_size,
        max_model_len=shape.max_seq_len,
        page_tokens=growth.block_size // parts,
        q_block_tokens=q_block_tokens,
        num_pages=layout.num_blocks * parts,
        causal=causal,
        sliding_window=None if growth.window == INT32_MAX else growth.window,
        chunk_size=None if growth.chunk == INT32_MAX else growth.chunk,
        pages_are_shared=pages_are_shared,
    )


def checked_sizes(
    cache: KVCache, layer: str, batch: StepBatch, layer_index: LayerIndex, **options: Any
) -> PageListSizes:
    """Returns the sizes of the lists of a step; raises as `build_page_lists` does.

    Without ``q_block_tokens`` all tokens are one query group.
    """
    check_batch(cache, batch)
    layout = cache.layout
    layout.at_layer_index(layer, layer_index, layout.id_offset, -1)  # raises for a bad one
    parts = layout.blocks_per_kv_block[layout.placement_of(layer).group]
    layout.check_ids(layer, layer_index, parts, "kernel blocks")
    options.setdefault("q_block_tokens", batch.shape.max_tokens)
    return page_list_sizes(cache, layer, batch.shape, **options)


def page_tables(batch: StepBatch, layer: str) -> PageTables:
    """Returns the pages of a step's requests, counted from the layer's first page.

    These are the same for all layers of a group; `page_ids` turns them into a layer's ids.
    """
    group = batch.layout.placement_of(layer).group
    ids, parts = batch.tables[group], batch.layout.blocks_per_kv_block[group]
    is_null = jnp.repeat(ids == NULL_BLOCK, parts, axis=1)
    return PageTables(
        pages=jnp.where(is_null, NULL_PAGE, expand_blocks(ids, parts)),
        first_pages=first_columns(batch, group) * parts,
        query_start_loc=batch.query_start_loc,
        num_computed_tokens=batch.num_computed_tokens,
    )


def page_ids(
    pages: Array, batch: StepBatch, layer: str, layer_index: LayerIndex
) -> tuple[Array, Array, Array]:
    """Turns pages counted from a layer's first page into ids on the block axis of its view.

    Returns:
      The ids, int32 like ``pages``; the id of the layer's first page, int32[]; error flags,
      int32[]. With a period that does not exist all ids are null.
    """
    layout = batch.layout
    parts = layout.blocks_per_kv_block[layout.placement_of(layer).group]
    first = layout.at_layer_index(layer, layer_index, layout.id_offset, -1) * parts
    first = jnp.asarray(first, jnp.int32)
    known = jnp.bool_(True)
    if layer_index is not None:
        count = len(layout.buffers.stacked_layers(layer))
        known = within(jnp.asarray(layer_index, jnp.int32), count)
    ids = jnp.where((pages > NULL_PAGE) & known, pages + first, NULL_PAGE)
    return ids, first, bit(BAD_LAYER_INDEX, ~known)
