"""Attention over pages in plain XLA: blocks of keys, a running softmax, any device.

Queries are cut into tiles of one request each. A loop walks over the pages of all tiles at once,
some blocks at a time, as long as any tile has some left.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._internal.indexing import group_of, take
from jaxkv._internal.numbers import INT32_MAX, NULL_BLOCK, cdiv
from jaxkv.cache import KVCache, Period, StepBatch
from jaxkv.pool import layer_scales, read_block_rows
from jaxkv.specs import first_visible_token

MAX_TILE = 64  # queries of a tile
KEYS_AT_ONCE = 512  # keys that a tile reads per round, if memory allows
ROUND_BYTES = 2**26  # of gathered rows per round, in float32


class AttentionRule(NamedTuple):
    """The keys that a token sees in a layer, and the shape of its rows."""

    kv_heads: int
    key_size: int
    value_size: int
    is_latent: bool  # the value is a prefix of the key
    scale: float
    soft_cap: float | None
    window: int
    chunk: int
    causal: bool  # False: all tokens of the encoder


class Tiles(NamedTuple):
    """N tiles of up to Q consecutive queries of one request.

    tokens: index into the flat tokens of the batch; padding repeats some token.
    """

    requests: Array  # int32[N], -1 for padding
    tokens: Array  # int32[N, Q]
    valid: Array  # bool[N, Q]
    of_token: tuple[Array, Array]  # int32[T] each: tile and query of every token

    @classmethod
    def of_batch(cls, batch: StepBatch) -> Self:
        """Cuts a batch into tiles, as large as its requests usually are."""
        shape = batch.shape
        size = min(MAX_TILE, _power_of_two(cdiv(shape.max_tokens, shape.batch_size)))
        size = min(size, _power_of_two(shape.max_query_len))
        most = min(shape.batch_size, shape.max_tokens)
        count = most + (shape.max_tokens - most) // size
        per_request = cdiv(batch.query_lens, size)
        ends = jnp.cumsum(per_request, dtype=jnp.int32)
        index = jnp.arange(count, dtype=jnp.int32)
        requests = group_of(index, ends)
        inner = index - take(ends - per_request, requests)
        starts = _token_starts(batch)
        offsets = inner[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
        known = requests < shape.batch_size
        valid = known[:, None] & (offsets < take(batch.query_lens, requests)[:, None])
        token_requests = batch.token_requests.reshape(-1)
        tokens = jnp.arange(shape.max_tokens, dtype=jnp.int32)
        within = tokens - take(starts, token_requests)
        tile = take(ends - per_request, token_requests) + within // size
        return cls(
            requests=jnp.where(known, requests, -1),
            tokens=jnp.where(valid, take(starts, requests)[:, None] + offsets, 0),
            valid=valid,
            of_token=(jnp.where(token_requests < 0, -1, tile), within % size),
        )


def _token_starts(batch: StepBatch) -> Array:
    """Returns int32[B], where each request's tokens begin among the flat tokens."""
    if not batch.is_rectangular:
        return batch.query_start_loc[:-1]
    columns = batch.token_shape[1]
    return jnp.arange(batch.shape.batch_size, dtype=jnp.int32) * columns


def attend_to_pages(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Array,
    tiles: Tiles,
    rule: AttentionRule,
    sinks: Array | None,
    period: Period,
) -> Array:
    """Attends from flat queries, [T, heads, K], to a layer's pages. Returns f32[T, heads, V]."""
    tile_queries = _tile_queries(queries, tiles, rule)
    compute = tile_queries.dtype
    key_scale, value_scale = layer_scales(cache, layer, period)
    value_scale = key_scale if rule.is_latent else value_scale
    pages = _Pages.of_layer(cache, layer, batch, tiles, rule)

    def one_round(i: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        ids, positions = pages.of_round(i)
        rows = read_block_rows(cache, layer, ids, period)
        keys, values = _keys_and_values(rows, rule, compute)
        seen = _visible(pages, positions, ids, rule)
        # Bytes that nobody sees may be NaN, and 0 * NaN is NaN: values are masked, too.
        values = jnp.where(seen.any(axis=1)[:, :, None, None], values, 0)
        scores = _scores(tile_queries, keys, rule, key_scale)
        return _accumulate(running, scores, values, seen)

    running = lax.fori_loop(
        0, pages.num_rounds, one_round, _start(cache, tile_queries, rule, sinks)
    )
    out = _combine(cache, running)
    tile, query = tiles.of_token
    out = out.at[tile, :, :, query].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return (out * value_scale).reshape(queries.shape[0], -1, rule.value_size)


class _Pages(NamedTuple):
    """The blocks of N tiles, P of them per round of the loop."""

    ids: Array  # int32[N, W], logical blocks; columns past the last are null
    first_positions: Array  # int32[N]
    query_positions: Array  # int32[N, Q], -1 for padding
    ends: Array  # int32[N], one past the last position that a tile may see
    offsets: Array  # int32[rows], position of each row of a block, from the block's first
    tokens_per_block: int  # positions that one column stands for
    blocks: int  # P
    num_rounds: Array  # int32[]

    @classmethod
    def of_layer(
        cls, cache: KVCache, layer: str, batch: StepBatch, tiles: Tiles, rule: AttentionRule
    ) -> Self:
        place = cache.layout.place_of(layer)
        group, spec = place.group, place.spec
        per_block = cache.layout.dealt_tokens(group)
        width = batch.tables[group].shape[1]
        row_elements = rule.kv_heads * (rule.key_size + rule.value_size)
        room = ROUND_BYTES // (4 * row_elements * spec.block_size * tiles.requests.shape[0])
        blocks = min(width, max(1, min(cdiv(KEYS_AT_ONCE, spec.block_size), room)))
        table = jnp.pad(batch.tables[group], ((0, 0), (0, -width % blocks)))
        lens = batch.seq_lens if rule.causal else batch.encoder_lens
        firsts = batch.first_positions(layer) if rule.causal else jnp.zeros_like(lens)
        positions = batch.positions.reshape(-1)[tiles.tokens]
        positions = jnp.where(tiles.valid, positions, -1)
        ends = take(lens, tiles.requests)
        first_positions = take(firsts, tiles.requests)
        columns = jnp.where(tiles.valid.any(axis=1), cdiv(ends - first_positions, per_block), 0)
        return cls(
            ids=table.at[tiles.requests].get(
                mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
            ),
            first_positions=first_positions,
            query_positions=positions,
            ends=ends,
            offsets=_row_offsets(cache, group),
            tokens_per_block=per_block,
            blocks=blocks,
            num_rounds=cdiv(jnp.minimum(columns.max(initial=0), width), blocks),
        )

    def of_round(self, i: Array) -> tuple[Array, Array]:
        """Returns int32[N, P], the blocks of a round, and int32[N, S], positions of their rows."""
        start = i * self.blocks
        ids = lax.dynamic_slice_in_dim(self.ids, start, self.blocks, axis=1)
        column = start + jnp.arange(self.blocks, dtype=jnp.int32)
        offsets = column[:, None] * self.tokens_per_block + self.offsets[None]
        return ids, self.first_positions[:, None] + offsets.reshape(-1)[None]


def _row_offsets(cache: KVCache, group: int) -> Array:
    """Returns the positions, from a column's first, of the rows that this rank was dealt."""
    layout = cache.layout
    rows = jnp.arange(layout.growths[group].block_size, dtype=jnp.int32)
    turn, within = jnp.divmod(rows, layout.interleave_tokens)
    turn = turn * layout.context_parallel + layout.context_rank()
    return turn * layout.interleave_tokens + within


def _tile_queries(queries: Array, tiles: Tiles, rule: AttentionRule) -> Array:
    """Returns [N, kv_heads, heads / kv_heads, Q, K]."""
    tiled = queries[tiles.tokens]
    tiled = tiled.reshape(*tiles.tokens.shape, rule.kv_heads, -1, rule.key_size)
    return jnp.moveaxis(tiled, 1, 3)


def _keys_and_values(rows: Array, rule: AttentionRule, compute: jnp.dtype) -> tuple[Array, Array]:
    """Returns [N, S, kv_heads, K] and the same with V, in a dtype to compute in."""
    rows = rows.reshape(rows.shape[0], -1, rule.kv_heads, rows.shape[-1])
    if rows.dtype.itemsize > 1:  # fp8 and int8 are widened to what queries are
        with jax.numpy_dtype_promotion("standard"):  # of dtypes: strict mode is about arrays
            compute = jnp.promote_types(rows.dtype, compute)
    rows = rows.astype(compute)
    if rule.is_latent:
        return rows, rows[..., : rule.value_size]
    return rows[..., : rule.key_size], rows[..., rule.key_size :]


def _visible(pages: _Pages, positions: Array, ids: Array, rule: AttentionRule) -> Array:
    """Returns bool[N, Q, S]: which keys each query of a tile sees."""
    queries, keys = pages.query_positions[:, :, None], positions[:, None]
    held = jnp.repeat(ids != NULL_BLOCK, pages.offsets.shape[0], axis=1)
    seen = (held & (positions < pages.ends[:, None]))[:, None] & (queries >= 0)
    if not rule.causal:
        return seen
    seen &= keys <= queries
    if rule.window == INT32_MAX and rule.chunk == INT32_MAX:
        return seen
    return seen & (keys >= first_visible_token(queries, rule.window, rule.chunk, jnp))


def _scores(queries: Array, keys: Array, rule: AttentionRule, key_scale: Array | float) -> Array:
    """Returns f32[N, kv_heads, heads / kv_heads, Q, S]."""
    queries = queries.astype(keys.dtype)
    scores = jnp.einsum(
        "nhgqk,nshk->nhgqs",
        queries,
        keys,
        preferred_element_type=jnp.float32,
        precision=_precision(keys.dtype),
    )
    scores = scores * (rule.scale * key_scale)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    return scores


def _accumulate(
    running: tuple[Array, Array, Array], scores: Array, values: Array, seen: Array
) -> tuple[Array, Array, Array]:
    """Adds a round to the running maximum, sum and output of a softmax."""
    highest, total, out = running
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    new_highest = jnp.maximum(highest, scores.max(axis=-1))
    weights = jnp.exp(scores - _finite(new_highest)[..., None])
    shrink = jnp.exp(highest - _finite(new_highest))
    added = jnp.einsum(
        "nhgqs,nshv->nhgqv",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=_precision(values.dtype),
    )
    total = total * shrink + weights.sum(axis=-1)
    return new_highest, total, out * shrink[..., None] + added


def _start(
    cache: KVCache, queries: Array, rule: AttentionRule, sinks: Array | None
) -> tuple[Array, Array, Array]:
    """Returns the softmax before the first key: empty, or holding the sinks."""
    shape = queries.shape[:-1]
    highest, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        here = cache.layout.context_rank() == 0  # one rank counts them
        logits = sinks.astype(jnp.float32).reshape(1, rule.kv_heads, -1, 1)
        highest = jnp.broadcast_to(jnp.where(here, logits, -jnp.inf), shape)
        total = jnp.where(highest > -jnp.inf, total + 1, total)
    return highest, total, jnp.zeros((*shape, rule.value_size), jnp.float32)


def _combine(cache: KVCache, running: tuple[Array, Array, Array]) -> Array:
    """Returns the output of a finished softmax, over all context-parallel ranks."""
    highest, total, out = running
    axis = cache.layout.axis
    if cache.layout.context_parallel > 1 and axis is not None:
        shrink = jnp.exp(highest - _finite(lax.pmax(highest, axis)))
        total, out = lax.psum((total * shrink, out * shrink[..., None]), axis)
    return out / jnp.where(total > 0, total, 1)[..., None]


def _finite(highest: Array) -> Array:
    """Returns the maximum, with 0 where nothing was seen: -inf - -inf is NaN."""
    return jnp.where(highest > -jnp.inf, highest, 0)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
