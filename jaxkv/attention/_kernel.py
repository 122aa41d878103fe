"""Attention by `pallas_kernels.paged_attention`, for the layers and batches that it takes."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxkv._internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv.attention._paged import AttentionRule
from jaxkv.cache import KVCache, Period, StepBatch
from jaxkv.layout import PhysicalOrder
from jaxkv.pool import layer_scales, layer_view
from pallas_kernels import (
    Implementation,
    default_implementation,
    paged_attention,
    why_not_paged_attention,
)

Attend = Callable[[Array], Array]


def attend_fastest(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Array,
    rule: AttentionRule,
    sinks: Array | None,
    period: Period,
    *,
    xla: Attend,
    implementation: Implementation | None,
) -> Array:
    """Attends from flat queries, [T, heads, K], by the kernel or, where it cannot, by ``xla``.

    Raises:
      NotImplementedError: ``implementation="mosaic_gpu"`` for what the kernel does not take.
    """
    if (implementation or default_implementation()) == "xla":
        return xla(queries)
    reason = _why_not(cache, layer, batch, rule) or why_not_paged_attention(
        queries, layer_view(cache, layer)
    )
    if implementation == "mosaic_gpu" and reason:
        raise NotImplementedError(
            f'implementation="mosaic_gpu": {reason}; use "xla", or None for what is fastest'
        )
    if reason:
        return xla(queries)

    def kernel(queries: Array) -> Array:
        return _attend(cache, layer, batch, queries, rule, sinks, period)

    if implementation == "mosaic_gpu":
        return kernel(queries)
    # A program may be compiled for the CPU of a machine that has a GPU.
    return lax.platform_dependent(queries, cuda=kernel, default=xla)


def _why_not(cache: KVCache, layer: str, batch: StepBatch, rule: AttentionRule) -> str | None:
    """Returns why the kernel does not take a layer; None where its view may do."""
    layout, place = cache.layout, cache.layout.place_of(layer)
    if rule.is_latent or not rule.causal:
        return f"layer={layer!r} keeps {place.spec.kind}"
    if layout.context_parallel > 1:
        return "positions are dealt out to ranks"
    if batch.is_rectangular and batch.shape.max_query_len > 1:
        return "the batch is rectangular, and queries do not lie end to end"
    if rule.chunk != INT32_MAX and rule.chunk % place.spec.block_size:
        return (
            f"chunk_size={rule.chunk} is not a multiple of block_size={place.spec.block_size}, and "
            "tables begin in the middle of a chunk"
        )
    order = PhysicalOrder(layout.buffers.order)
    if not order.has_whole_pages or order.order != "LBNHC":
        return f"order={order.order!r}, and the kernel takes LBNHC"
    page_bytes = layout.buffers.page_placement(layer).page_bytes
    if page_bytes != place.spec.data_bytes:
        return f"layer={layer!r} has padding in its pages"
    return None


def _attend(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Array,
    rule: AttentionRule,
    sinks: Array | None,
    period: Period,
) -> Array:
    """Hands the kernel a layer's view, and tables that begin at the first page of each window.

    Windows and chunks are the same when all positions are counted from there.
    """
    tables = batch.block_tables(layer, period=period)
    key_scale, value_scale = layer_scales(cache, layer, period)
    one_each = batch.shape.max_query_len == 1 and queries.shape[0] == batch.shape.batch_size
    return paged_attention(
        queries,
        layer_view(cache, layer),
        jnp.where(tables == NULL_BLOCK, -1, tables),
        jnp.where(batch.query_lens > 0, batch.seq_lens - batch.first_positions(layer), 0),
        None if one_each else batch.query_start_loc,
        scale=rule.scale,
        sliding_window=None if rule.window == INT32_MAX else rule.window,
        chunk_size=None if rule.chunk == INT32_MAX else rule.chunk,
        soft_cap=rule.soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        implementation="mosaic_gpu",
    )
