"""The Mosaic GPU implementation of `paged_attention` for latent rows."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._paged_attention.decode import DecodeShape
from pallas_kernels._paged_attention.mla_combine import combine_latents
from pallas_kernels._paged_attention.mla_decode import ROWS, decode_latents, num_lanes
from pallas_kernels._paged_attention.mosaic import (
    lse_of_tokens,
    page_and_compute_dtype,
    step_sizes,
    tile_queries,
    tile_sinks,
    used_tokens,
)
from pallas_kernels._paged_attention.prefill_tasks import has_holes
from pallas_kernels._paged_attention.rounds import in_rounds
from pallas_kernels._paged_attention.tasks import STEP, FixedSegments, share_out
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    AttentionRule,
    Cut,
    QueryTiles,
    cut_queries,
    one_query_each,
)

MAX_QUERIES = 8  # of a tile


def attend_latents(arrays: AttentionArrays, rule: AttentionRule) -> tuple[Array, Array]:
    """Returns [T, heads, V], the output, and float32[T, heads], the log-sum-exp."""
    num_tokens, heads, _ = arrays.queries.shape
    out = jax.new_ref(jnp.empty((num_tokens, heads, rule.value_width), rule.out_dtype))
    if arrays.query_start_loc is None:
        tiles = one_query_each(arrays, rule)
    else:
        tiles = cut_queries(arrays, rule, Cut(_tile_size(arrays, rule)))
    rows = -(-tiles.size * rule.group // ROWS) * ROWS
    page, compute = page_and_compute_dtype(arrays)
    shape = DecodeShape(rule, step_sizes(arrays, STEP), rows, page, compute)
    fixed = FixedSegments.of(rule, arrays.block_tables.shape[1])
    filled = tiles.size * rule.group  # rows past the queries of a tile hold nothing
    sinks = tile_sinks(arrays, shape)[0, :filled]

    def run(tiles: QueryTiles, queries: Array) -> Array:
        tasks = share_out(tiles, num_lanes(shape), used_tokens(arrays), fixed)
        full, scales = _full_steps(arrays, rule, tiles), arrays.key_scale * jnp.float32(rule.scale)
        tables, pages = arrays.block_tables, arrays.pages
        segments = decode_latents(shape, tasks, full, tables, queries, pages, scales)
        return combine_latents(rule, tasks, segments, sinks, arrays.value_scale, out)

    lse = in_rounds(run, tiles, tile_queries(arrays.queries, tiles, shape), rule, fixed)
    return jax.freeze(out), lse_of_tokens(lse, tiles, rule)


def _tile_size(arrays: AttentionArrays, rule: AttentionRule) -> int:
    """Returns the queries of a tile: as many as a request has on average, or as fill its rows."""
    per_request = -(-arrays.queries.shape[0] // arrays.block_tables.shape[0])
    usual = 1 << (per_request - 1).bit_length()
    return min(MAX_QUERIES, max(usual, ROWS // rule.group))


def _full_steps(arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles) -> Array:
    """Returns int32[N]: below this step all queries of a tile see all keys, none in a hole.

    With and without masks, scores differ in their last bits, and the other queries of a tile decide
    which steps have masks: for reproducible bits, all have.
    """
    if rule.window is not None or rule.chunk is not None or rule.reproducible:
        return jnp.zeros_like(tiles.positions)
    seen_by_all = tiles.ends
    if rule.causal:
        seen_by_all = rule.held_before(tiles.positions + 1, arrays.rank)
        seen_by_all = jnp.clip(seen_by_all, 0, tiles.ends)
    return jnp.where(has_holes(arrays, rule, tiles), 0, seen_by_all // STEP)
