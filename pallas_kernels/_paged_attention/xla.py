"""The XLA implementation of `paged_attention`: a running softmax over rounds of blocks."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from pallas_kernels._paged_attention.requests import SharedPrefixes
from pallas_kernels._paged_attention.rounds import in_parts
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.shared import SharedTiles, own_tiles, tile_shared
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    Cut,
    QueryTiles,
    cut_queries,
    one_query_each,
)

MAX_TILE = 64  # queries of a tile
KEYS_AT_ONCE = 512  # keys that a tile reads per round, within `ROUND_BYTES`
TILES_AT_ONCE = 8  # of one query each, for reproducible bits
ROUND_BYTES = 2**26  # of gathered rows per round, in float32

Running = tuple[Array, Array, Array]  # highest score, sum of weights, weighted sum of values


class _Round(NamedTuple):
    """Some blocks of every tile, and the keys that each query sees."""

    rows: Float[Array, "tiles keys kv_heads width"]
    seen: Bool[Array, "tiles queries keys"]


def attend_xla(arrays: AttentionArrays, config: Config) -> tuple[Array, Array]:
    """Returns [T, heads, V], the output, and float32[T, heads], the log-sum-exp."""
    if arrays.shared is not None:
        return _attend_shared(arrays, config, arrays.shared)
    tiles = _cut(arrays, config)
    queries = _tile_queries(arrays.queries, tiles, config)
    if not config.reproducible:
        return _finish(_attend(arrays, config, tiles, queries), tiles, config, arrays.value_scale)
    # XLA's code, and with it the bits, depends on shapes, which are the same for each part.
    running = in_parts(
        lambda tiles, queries: _attend(arrays, config, tiles, queries),
        tiles,
        queries,
        TILES_AT_ONCE,
    )
    return _finish(running, tiles, config, arrays.value_scale)


def _attend_shared(
    arrays: AttentionArrays, config: Config, shared: SharedPrefixes
) -> tuple[Array, Array]:
    """Attends to what requests share for all of them together, and to the rest for each."""
    parts = tile_shared(arrays, config, shared)
    queries = _split_heads(arrays.queries[parts.requests], config)
    shared_softmax = _attend(
        arrays._replace(sinks=None), config.replace(causal=False), parts.tiles, queries
    )
    tiles = own_tiles(arrays, config, parts)
    own = _attend(arrays, config, tiles, _tile_queries(arrays.queries, tiles, config))
    common = [  # [B, kv_heads, group, 1, ...]
        _gather_requests(array, parts, nothing)[:, :, :, None]
        for array, nothing in zip(shared_softmax, (-jnp.inf, 0.0, 0.0), strict=True)
    ]
    highest = jnp.maximum(own[0], common[0])
    weights = [jnp.exp(part[0] - _finite(highest)) for part in (own, common)]
    total = own[1] * weights[0] + common[1] * weights[1]
    out = own[2] * weights[0][..., None] + common[2] * weights[1][..., None]
    return _finish((highest, total, out), tiles, config, arrays.value_scale)


def _gather_requests(array: Array, parts: SharedTiles, nothing: float) -> Array:
    """Returns [B, ...]: the part of an array of tiles of each request that shares something."""
    part = array[parts.request_tiles, :, :, parts.slots]
    # The last tile stands for none, and may be NaN.
    return jnp.where((parts.request_tiles < 0).reshape(-1, *[1] * (part.ndim - 1)), nothing, part)


def _attend(arrays: AttentionArrays, config: Config, tiles: QueryTiles, queries: Array) -> Running:
    """Returns the softmax of queries, [N, kv_heads, group, Q, K]."""
    compute = _compute_dtype(arrays)
    # In float16, weights times the scales of their values could be 0 or infinite.
    is_scaled, is_half = config.token_head_row is not None, compute == jnp.float16
    of_values = jnp.bfloat16 if is_scaled and is_half else compute

    def one_round(i: Array, running: Running) -> Running:
        rows, seen = _gather(arrays, tiles, config, i)
        key_scale, value_scale = arrays.key_scale[None, :, None, None, None], None
        if config.latent_row is not None:
            rows = config.latent_row.unpack(rows)
        elif config.token_head_row is not None:
            rows, scales = config.token_head_row.split(rows[:, :, 0])
            scales = jnp.moveaxis(scales, 1, 2)[:, :, None, None]  # [N, kv_heads, 1, 1, S, 2]
            key_scale, value_scale = key_scale * scales[..., 0], scales[..., 1]
        keys = rows[..., : config.key_width].astype(compute)
        values = rows[..., config.first_value : config.first_value + config.value_width]
        # Unseen bytes may be NaN, and 0 * NaN is NaN, so values are masked, too.
        values = jnp.where(seen.any(axis=1)[:, :, None, None], values.astype(of_values), 0)
        scores = _scores(queries.astype(compute), keys, config, key_scale)
        return _accumulate(running, scores, values, seen, value_scale)

    span = _blocks_at_once(arrays, tiles, config) * config.page_tokens
    tokens = tiles.ends - tiles.begins // config.page_tokens * config.page_tokens
    num_rounds = (jnp.max(tokens, initial=0) + (span - 1)) // span
    return lax.fori_loop(0, num_rounds, one_round, _start(queries, config, arrays.sinks))


def _cut(arrays: AttentionArrays, config: Config) -> QueryTiles:
    """Cuts the queries into tiles of about as many queries as the requests have.

    For reproducible bits, each query has a tile and rounds of its own: what it reads, and in which
    order, then depends on its position alone.
    """
    if arrays.query_start_loc is None:
        return one_query_each(arrays, config)
    if config.reproducible:
        return cut_queries(arrays, config, Cut(1))
    per_request = -(-arrays.queries.shape[0] // arrays.block_tables.shape[0])
    return cut_queries(arrays, config, Cut(min(MAX_TILE, 1 << (per_request - 1).bit_length())))


def _blocks_at_once(arrays: AttentionArrays, tiles: QueryTiles, config: Config) -> int:
    num_tiles, width = tiles.requests.shape[0], arrays.block_tables.shape[1]
    row_bytes = 4 * config.kv_heads * config.row_width
    budget = ROUND_BYTES // (row_bytes * config.page_tokens * num_tiles)
    if config.reproducible:
        return -(-KEYS_AT_ONCE // config.page_tokens)
    return max(1, min(width, -(-KEYS_AT_ONCE // config.page_tokens), budget))


def _gather(arrays: AttentionArrays, tiles: QueryTiles, config: Config, i: Array) -> _Round:
    """Returns the rows of round i; each tile begins with the first block that it sees."""
    blocks, tokens = _blocks_at_once(arrays, tiles, config), config.page_tokens
    logical_blocks = i * blocks + jnp.arange(blocks)[None]
    logical_blocks = logical_blocks + (tiles.begins // tokens)[:, None]
    ids = arrays.block_tables.at[tiles.requests[:, None], logical_blocks].get(
        mode="fill", fill_value=-1, wrap_negative_indices=False
    )
    allocated = (ids >= 0) & (ids < arrays.pages.num_pages)
    rows = arrays.pages.read(jnp.where(allocated, ids, 0))
    rows = rows.reshape(ids.shape[0], -1, *rows.shape[3:])
    keys = logical_blocks[:, :, None] * tokens + jnp.arange(tokens)[None, None]
    keys = keys.reshape(ids.shape[0], 1, -1)
    allocated = jnp.repeat(allocated, tokens, axis=1)[:, None]
    inner = jnp.arange(tiles.size)[None]
    seen = allocated & (keys >= tiles.begins[:, None, None]) & (keys < tiles.ends[:, None, None])
    if config.causal:
        queries = (tiles.positions[:, None] + inner)[:, :, None]
        seen &= keys < config.allocated_before(queries + 1, arrays.rank)
        seen &= keys >= config.first_visible(queries, tiles.chunk_offsets[:, None, None])
    return _Round(rows, seen & (inner < tiles.counts[:, None])[:, :, None])


def _tile_queries(queries: Array, tiles: QueryTiles, config: Config) -> Array:
    """Returns [N, kv_heads, group, Q, K]; rows past a tile's queries are other queries."""
    inner = jnp.arange(tiles.size)
    return _split_heads(queries.at[tiles.tokens[:, None] + inner[None]].get(mode="clip"), config)


def _split_heads(tiled: Array, config: Config) -> Array:
    """Returns [N, kv_heads, group, Q, K] of [N, Q, heads, K]."""
    tiled = tiled.reshape(*tiled.shape[:2], config.kv_heads, config.group, config.key_width)
    return jnp.moveaxis(tiled, 1, 3)


def _compute_dtype(arrays: AttentionArrays) -> jnp.dtype:
    """Returns the dtype of products; 8-bit pages are widened to the dtype of queries."""
    queries, pages = arrays.queries.dtype, jnp.dtype(arrays.pages.dtype)
    if pages.itemsize == 1 or queries == pages:
        return queries
    return jnp.dtype(jnp.float32)


def _scores(queries: Array, keys: Array, config: Config, key_scale: Array) -> Array:
    """Returns float32[N, kv_heads, group, Q, S].

    Args:
      key_scale: [N or 1, kv_heads, 1, 1, S or 1].
    """
    scores = jnp.einsum(
        "nhgqk,nshk->nhgqs",
        queries,
        keys,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
    )
    scores = scores * (key_scale * config.scale)
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    return scores


def _accumulate(
    running: Running, scores: Array, values: Array, seen: Array, value_scale: Array | None
) -> Running:
    """Adds a round to the running softmax.

    Args:
      value_scale: [N, kv_heads, 1, 1, S], the factor of each value; None: 1.
    """
    highest, total, out = running
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, scores.max(axis=-1))
    weights = jnp.exp(scores - _finite(new_highest)[..., None])
    shrink = jnp.exp(highest - _finite(new_highest))
    total = total * shrink + weights.sum(axis=-1)
    if value_scale is not None:
        weights = jnp.where(seen, weights * value_scale, 0)
    added = jnp.einsum(
        "nhgqs,nshv->nhgqv",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if values.dtype == jnp.float32 else None,
    )
    return new_highest, total, out * shrink[..., None] + added


def _start(queries: Array, config: Config, sinks: Array | None) -> Running:
    """Returns the softmax before the first key: empty, or with the sinks."""
    shape = queries.shape[:-1]
    out = jnp.zeros((*shape, config.value_width), jnp.float32)
    if sinks is None:
        return jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), out
    logits = sinks.reshape(1, config.kv_heads, config.group, 1)
    total = (logits > -jnp.inf).astype(jnp.float32)
    return jnp.broadcast_to(logits, shape), jnp.broadcast_to(total, shape), out


def _finish(
    running: Running, tiles: QueryTiles, config: Config, value_scale: Array
) -> tuple[Array, Array]:
    """Returns the output and the log-sum-exp of every token; zeros and -inf for padding."""
    highest, total, out = running
    out = out / jnp.where(total > 0, total, 1)[..., None]
    out = out * value_scale[None, :, None, None, None]
    lse = jnp.log(total) + _finite(highest)
    heads = config.kv_heads * config.group

    def gather_tokens(array: Array, fill: float) -> Array:
        flat = jnp.moveaxis(array, 3, 1).reshape(-1, heads, *array.shape[4:])
        index = jnp.where(tiles.token_tiles < 0, flat.shape[0], tiles.token_tiles * tiles.size)
        return flat.at[index + tiles.rows].get(
            mode="fill", fill_value=fill, wrap_negative_indices=False
        )

    return gather_tokens(out, 0).astype(config.out_dtype), gather_tokens(lse, -jnp.inf)


def _finite(highest: Array) -> Array:
    """Returns the highest score, or 0 instead of -inf, because -inf - -inf is NaN."""
    return jnp.where(highest > -jnp.inf, highest, 0)
