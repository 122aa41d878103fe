"""The call of `pallas_kernels.paged_attention` for a layer: its pages, tables and lengths."""

import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.cache import BatchRequests, expand_blocks
from jaxkv._src.internal.indexing import take
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.pool import BoundLayer
from jaxkv._src.specs import MLASpec
from pallas_kernels import (
    AttentionRule,
    Interleaving,
    RequestPages,
    SharedPrefixes,
    StridedPages,
    paged_attention,
)


def attend_to_layer(
    bound: BoundLayer,
    queries: Array,
    sinks: Array | None,
    rule: AttentionRule,
) -> Array:
    """Attends from queries, [..., heads, K], to a layer's pages: [..., heads, V], 0 for padding.

    With context parallelism over a mesh axis, combines the results of all ranks.
    """
    layout, batch, shape = bound.layout, bound.batch, queries.shape[:-1]
    one_each = queries[..., 0, 0].size == batch.shape.batch_size and batch.shape.max_query_len == 1
    flat = queries.reshape(-1, *queries.shape[-2:])
    if not one_each and batch.is_rectangular:
        flat = flat.at[_flat_indices(batch)].get(mode="fill", fill_value=0)
    key_scale, value_scale = bound.key_value_scales
    if rule.row_packing is not None:
        key_scale = value_scale = 1.0
    rank, is_interleaved = layout.context_rank(), layout.context_parallel > 1
    if sinks is not None and is_interleaved:  # only one rank counts the sinks
        sinks = jnp.where(jnp.equal(rank, 0), sinks, -jnp.inf)
    out, lse = paged_attention(
        flat,
        pages_of(bound),
        _requests(bound, rule, one_each),
        rule,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=key_scale if isinstance(bound.form.spec, MLASpec) else value_scale,
        return_lse=True,
        implementation=bound.implementation,
    )
    if is_interleaved and layout.axis is not None:
        out = combine_ranks(out, lse, layout.axis).astype(queries.dtype)
    if not one_each and batch.is_rectangular:
        indices = _rectangular_indices(batch)
        out = out.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return out.reshape(*shape, rule.value_width)


def _requests(bound: BoundLayer, rule: AttentionRule, one_each: bool) -> RequestPages:
    """Returns the requests of a step; ``one_each``: each has one query."""
    layout, batch = bound.layout, bound.batch
    lens = batch.seq_lens if rule.causal else batch.encoder_lens
    limited = rule.sliding_window is not None or rule.chunk_size is not None
    interleaving = shared_prefixes = None
    if layout.context_parallel > 1:
        ranks, tokens = layout.context_parallel, layout.interleave_tokens
        interleaving = Interleaving(layout.context_rank(), ranks, tokens)
    if batch.shape.shared_prefixes and rule.causal and one_each and not limited:
        shared_prefixes = SharedPrefixes(*batch.prefix_groups)
    return RequestPages(
        _tables(bound),
        jnp.where(batch.query_lens > 0, lens, 0),
        None if one_each else batch.query_start_loc,
        first_positions=bound.requests.first_positions if limited else None,
        interleaving=interleaving,
        shared_prefixes=shared_prefixes,
        max_query_len=batch.shape.max_query_len,
    )


def pages_of(bound: BoundLayer) -> StridedPages:
    """Returns a layer's pages in its buffer."""
    extents, row = bound.form.extents, bound.form.row
    return StridedPages(
        bound.buffer.reshape(-1, extents.extent_bytes),
        row.dtype,
        num_pages=bound.layout.num_blocks * extents.tiles,
        tokens=extents.rows,
        kv_heads=extents.heads,
        width=row.width,
        first=bound.first,
        page_step=extents.tile_step,
        head_step=extents.head_step,
        start=extents.start_bytes,
        heads_first=not extents.rows_are_whole,
    )


def _tables(bound: BoundLayer) -> Array:
    """Returns the pages of each request, int32[B, W]; -1 for pages that it lacks."""
    ids, tiles = bound.requests.table, bound.form.extents.tiles
    ids = jnp.where((ids == NULL_BLOCK) | (bound.first < 0), -1, ids)
    return expand_blocks(ids, tiles) if tiles > 1 else ids


def _flat_indices(batch: BatchRequests) -> Array:
    """Returns int32[T], the index in a rectangular batch of each token of a flat one."""
    num_requests, width = batch.token_shape
    index = jnp.arange(num_requests * width, dtype=jnp.int32)
    ends = batch.query_start_loc[1:]
    request = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    return request * width + index - take(batch.query_start_loc, request)


def _rectangular_indices(batch: BatchRequests) -> Array:
    """Returns int32[B, T / B], the index of each token in a flat batch; -1 for padding."""
    offsets = jnp.arange(batch.token_shape[1], dtype=jnp.int32)[None]
    indices = batch.query_start_loc[:-1, None] + offsets
    return jnp.where(offsets < batch.query_lens[:, None], indices, -1)


def combine_ranks(out: Array, lse: Array, axis: str) -> Array:
    """Combines the outputs of all ranks, each over its own keys."""
    highest = lax.pmax(lse, axis)
    weight = jnp.exp(lse - jnp.where(highest > -jnp.inf, highest, 0))[..., None]
    total, out = lax.psum((weight, out * weight), axis)
    return out / jnp.where(total > 0, total, 1)
