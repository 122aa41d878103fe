"""Scores of the keys of an index, and the highest of them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from jaxkv._src.attention._rows import (
    PART_BYTES,
    compute_dtype,
    in_parts,
    index_row,
    product,
    read_at,
)
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import rows_per_block
from jaxkv._src.pool import BoundLayer

KEYS_AT_ONCE = 512  # of an index per round


def choose_blocks(
    bound: BoundLayer,
    queries: Float[Array, "*tokens heads key_size"],
    count: int,
    sparse_block_size: int,
    init_blocks: int,
    local_blocks: int,
) -> Int32[Array, "*tokens heads count"]:
    """Returns the blocks of the highest scores for each query and head, highest first; -1: none."""
    batch, requests = bound.batch, bound.requests
    size, (heads, width) = sparse_block_size, queries.shape[-2:]
    at_once = max(KEYS_AT_ONCE // size, 1)  # blocks
    num_tokens = requests.table.shape[1] * requests.block_tokens
    num_blocks = cdiv(cdiv(num_tokens, size), at_once) * at_once
    numbers = jnp.arange(num_blocks, dtype=jnp.int32)[None, None]

    def score(found: Array, seen: Array) -> Array:
        found = jnp.where(seen[:, None], found, -jnp.inf)
        return found.reshape(*found.shape[:2], -1, size).max(axis=-1)

    def choose(queries: Array, of: Array, positions: Array) -> tuple[Array]:
        scores = jnp.full((len(queries), heads, num_blocks), -jnp.inf, jnp.float32)
        visible = jnp.where(of < 0, 0, jnp.minimum(positions + 1, num_tokens))
        keys_at_once = at_once * size
        scores = score_rows(bound, queries, of, visible, score, scores, keys_at_once)
        last = jnp.where(of < 0, -1, positions // size)[:, None, None]
        is_local = (numbers <= last) & (numbers > last - local_blocks)
        # vLLM and transformers take these before any other, the first blocks before the last ones.
        scores = jnp.where(is_local, jnp.finfo(jnp.float32).max, scores)
        scores = jnp.where((numbers <= last) & (numbers < init_blocks), jnp.inf, scores)
        return (choose_highest(bound, scores, count),)

    by_row = at_once * size * (width + heads) + heads * num_blocks
    (chosen,) = in_parts(
        choose,
        max(PART_BYTES // (4 * by_row), 1),
        queries.reshape(-1, heads, width),
        *(batch.token_requests.reshape(-1), batch.positions.reshape(-1)),
    )
    return chosen.reshape(*queries.shape[:-1], count)


def score_rows(
    bound: BoundLayer,
    queries: Float[Array, "queries heads key_size"],
    requests: Int32[Array, "queries"],
    visible: Int32[Array, "queries"],
    score: Callable[[Array, Array], Array],
    scores: Float32[Array, "queries ... rows"],
    keys_at_once: int = KEYS_AT_ONCE,
) -> Float32[Array, "queries ... rows"]:
    """Returns the scores of the stored rows of each query's request, or of groups of them.

    Args:
      requests: the request of each query.
      visible: rows that each query sees: those before this one.
      score: makes scores of the products of queries and some keys, float32[Q, heads, n], and of
        which of these keys are seen, bool[Q, n].
      scores: what those have that no query sees: as many as whole rounds of keys give, or more.
      keys_at_once: keys per round.
    """
    spec = bound.form.spec
    ratio = bound.requests.growth.block_size // rows_per_block(spec)
    packed = index_row(spec)

    def one_round(i: Array, scores: Array) -> Array:
        numbers = i * keys_at_once + jnp.arange(keys_at_once, dtype=jnp.int32)[None]
        seen = numbers < visible[:, None]
        slots = bound.requests.slots_at(requests[:, None], jnp.where(seen, numbers * ratio, -1))
        keys = read_at(bound, slots, packed)
        compute = compute_dtype(keys, queries)
        found = product("qhk,qnk->qhn", queries.astype(compute), keys.astype(compute))
        part = score(found * bound.key_value_scales[0], (slots >= 0) & seen)
        return lax.dynamic_update_slice_in_dim(scores, part, i * part.shape[-1], axis=-1)

    rounds = cdiv(jnp.max(visible, initial=0), keys_at_once)
    return lax.fori_loop(0, rounds, one_round, scores)


def choose_rows(
    bound: BoundLayer,
    queries: Float[Array, "*tokens heads key_size"],
    weights: Float[Array, "*tokens heads"],
    count: int,
) -> Int32[Array, "*tokens count"]:
    """Returns the rows of the highest scores for each query, highest first; -1 for none."""
    batch, requests = bound.batch, bound.requests
    ratio = requests.growth.block_size // rows_per_block(bound.form.spec)
    num_rows = requests.table.shape[1] * requests.block_tokens // ratio
    flat = queries.reshape(-1, *queries.shape[-2:])

    def choose(queries: Array, weights: Array, of: Array, positions: Array) -> tuple[Array]:
        def score(found: Array, seen: Array) -> Array:
            found = jnp.maximum(found, 0) * weights.astype(jnp.float32)[:, :, None]
            return jnp.where(seen, found.sum(axis=1), -jnp.inf)

        visible = jnp.where(of < 0, 0, jnp.minimum((positions + 1) // ratio, num_rows))
        size = cdiv(num_rows, KEYS_AT_ONCE) * KEYS_AT_ONCE
        scores = jnp.full((len(queries), size), -jnp.inf, jnp.float32)
        scores = score_rows(bound, queries, of, visible, score, scores)
        return (choose_highest(bound, scores[:, :num_rows], count),)

    by_row = KEYS_AT_ONCE * bound.form.spec.head_size + num_rows
    (chosen,) = in_parts(
        choose,
        max(PART_BYTES // (4 * by_row), 1),
        *(flat, weights.reshape(flat.shape[:2])),
        *(batch.token_requests.reshape(-1), batch.positions.reshape(-1)),
    )
    return chosen.reshape(*queries.shape[:-2], count)


def choose_highest(
    bound: BoundLayer, scores: Float32[Array, "... rows"], count: int
) -> Int32[Array, "... count"]:
    """Returns the numbers of the highest scores of all ranks, highest first; -1 for none."""
    if bound.layout.context_parallel > 1 and bound.layout.axis is not None:
        scores = lax.pmax(scores, bound.layout.axis)
    highest, rows = lax.top_k(scores, min(count, scores.shape[-1]))
    rows = jnp.where(highest > -jnp.inf, rows.astype(jnp.int32), -1)
    pads = [(0, 0)] * (rows.ndim - 1) + [(0, count - rows.shape[-1])]
    return jnp.pad(rows, pads, constant_values=-1)
