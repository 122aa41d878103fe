"""The tiles of prefill: their queries and keys, and the steps that need masks."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._paged_attention.tiles import AttentionArrays, AttentionRule, QueryTiles, take

QUERIES, ROWS = 128, 64  # of a tile, and of a warpgroup
CACHED_BYTES = 96 * 2**20  # some of which are gone from the 50 MB of L2 cache when they are needed


class PrefillTile(NamedTuple):
    """The numbers of a tile that the kernel reads: columns of an array of tiles.

    index: index of the tile and of its results.
    request: row of the block tables.
    octet: first row of the tile among the tokens, divided by 8.
    skip, count: rows ``skip`` to ``count - 1`` are queries of the request.
    position: position of the first row in the request.
    chunk_offset, rank: as in `AttentionArrays`.
    begin, end: no query of the tile sees keys outside ``begin`` to ``end - 1``.
    first_step, last_step: the steps of keys, ``last_step`` excluded.
    full_begin, full_end: steps in which every query sees all keys, ``full_end`` excluded.
    has_holes: whether any page of the request holds no keys.
    num_tiles: how many tiles count, in every row.
    heads_together: KV heads whose tiles come together; see `_heads_together`.
    first_row: the row at which the first page begins, in every row.
    """

    index: Array
    request: Array
    octet: Array
    skip: Array
    count: Array
    position: Array
    chunk_offset: Array
    rank: Array
    begin: Array
    end: Array
    first_step: Array
    full_begin: Array
    full_end: Array
    last_step: Array
    has_holes: Array
    num_tiles: Array
    heads_together: Array
    first_row: Array

    @classmethod
    def load(cls, tiles: jax.Ref, index: Array | int) -> Self:
        """Loads a row of the tiles within a kernel."""
        return cls(*[tiles[index, column] for column in range(len(cls._fields))])

    @classmethod
    def load_one(cls, tiles: jax.Ref, index: Array | int, field: str) -> Array:
        """Loads one field of a row: fewer operations to compile."""
        return tiles[index, cls._fields.index(field)]


def prefill_tiles(
    arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles, keys: int
) -> Array:
    """Returns int32[N, ...], a `PrefillTile` per row: the longest first, empty ones last.

    Every tile has at least one step, even if its queries see no key.

    Args:
      keys: keys of a step.
    """
    first = lax.div(tiles.begins, keys)
    last = jnp.maximum(lax.div(tiles.ends + (keys - 1), keys), first + 1)
    first_query = jnp.maximum(tiles.positions, 0)
    last_query = jnp.maximum(tiles.positions + tiles.counts - 1, 0)
    seen_by_last = rule.first_visible(last_query, tiles.chunk_offsets)
    full_begin, full_end = lax.div(seen_by_last + (keys - 1), keys), lax.div(tiles.ends, keys)
    if rule.causal:
        seen_by_all = rule.held_before(first_query + 1, arrays.rank)
        seen_by_all = jnp.where(tiles.positions < 0, 0, seen_by_all)
        full_end = lax.div(jnp.minimum(seen_by_all, tiles.ends), keys)
    full_begin = jnp.clip(full_begin, first, last)
    full_end = jnp.clip(full_end, full_begin, last)
    holed = has_holes(arrays, rule, tiles)
    tile = PrefillTile(
        index=jnp.arange(tiles.requests.shape[0], dtype=jnp.int32),
        request=tiles.requests,
        octet=lax.div(tiles.tokens, 8),
        skip=tiles.skips,
        count=tiles.counts,
        position=tiles.positions,
        chunk_offset=tiles.chunk_offsets,
        rank=tiles.ranks,
        begin=tiles.begins,
        end=tiles.ends,
        first_step=first,
        full_begin=full_begin,
        full_end=jnp.where(holed, full_begin, full_end),
        last_step=last,
        has_holes=holed.astype(jnp.int32),
        num_tiles=jnp.broadcast_to(jnp.sum(tiles.counts > 0, dtype=jnp.int32), last.shape),
        heads_together=jnp.broadcast_to(_heads_together(arrays, rule, tiles), last.shape),
        first_row=jnp.broadcast_to(arrays.pages.first_row(), last.shape),
    )
    steps = jnp.where(tiles.counts > 0, last - first, 0)
    # Sorted by comparison, because XLA's sort of so few rows takes many kernels.
    before = (steps[None] > steps[:, None]) | (
        (steps[None] == steps[:, None]) & (tile.index[None] < tile.index[:, None])
    )
    rank = before.sum(axis=1, dtype=jnp.int32)
    order = jnp.where(rank[None] == tile.index[:, None], tile.index[None], 0).sum(axis=1)
    return take(jnp.stack(tile, axis=1), order)


def _heads_together(arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles) -> Array:
    """Returns how many KV heads are attended to together: a divisor of all, at least 1.

    All tiles of these heads come before those of others, so that the keys and values of all
    requests with tiles stay in the L2 cache; with few bytes those of all heads do.
    """
    requests = jnp.where(tiles.counts > 0, tiles.requests, -1)
    is_last = requests != jnp.append(requests[1:], -1)  # tile of its request
    tokens = jnp.where(is_last, tiles.ends, 0).sum(dtype=jnp.float32)
    row_bytes = rule.row_width * arrays.pages.itemsize
    together = jnp.int32(1)
    for heads in range(2, rule.kv_heads + 1):
        if rule.kv_heads % heads == 0:
            together = jnp.where(tokens * (row_bytes * heads) <= CACHED_BYTES, heads, together)
    return together


def has_holes(arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles) -> Array:
    """Returns bool[N]: whether any page that the tile's request may read holds no keys."""
    tables = arrays.block_tables
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None] * rule.page_tokens
    read = columns < rule.held_before(arrays.seq_lens, arrays.rank)[:, None]
    holes = read & ((tables < 0) | (tables >= arrays.pages.num_pages))
    return take(holes.any(axis=1), tiles.requests)
