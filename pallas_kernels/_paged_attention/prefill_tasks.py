"""The tiles of prefill: their queries and keys, and the steps that need masks."""

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels._paged_attention.tiles import AttentionArrays, AttentionRule, QueryTiles

QUERIES, KEYS = 128, 128  # of a tile, and of a step


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

    @classmethod
    def load(cls, tiles: Any, index: Array) -> Self:
        """Loads a row of the tiles within a kernel."""
        return cls(*[tiles[index, column] for column in range(len(cls._fields))])


def prefill_tiles(arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles) -> Array:
    """Returns int32[N, ...], a `PrefillTile` per row: the longest first, empty ones last."""
    first = tiles.begins // KEYS
    last = jnp.where(tiles.ends > tiles.begins, (tiles.ends + (KEYS - 1)) // KEYS, first)
    first_query = jnp.maximum(tiles.positions, 0)
    last_query = jnp.maximum(tiles.positions + tiles.counts - 1, 0)
    full_begin = (rule.first_visible(last_query, tiles.chunk_offsets) + (KEYS - 1)) // KEYS
    full_end = tiles.ends // KEYS
    if rule.causal:
        seen_by_all = rule.held_before(first_query + 1, arrays.rank)
        seen_by_all = jnp.where(tiles.positions < 0, 0, seen_by_all)
        full_end = jnp.minimum(seen_by_all, tiles.ends) // KEYS
    full_begin = jnp.clip(full_begin, first, last)
    full_end = jnp.clip(full_end, full_begin, last)
    holed = has_holes(arrays, rule, tiles)
    if rule.window is None and rule.chunk is None:
        full_begin = first
    tile = PrefillTile(
        index=jnp.arange(tiles.requests.shape[0], dtype=jnp.int32),
        request=tiles.requests,
        octet=tiles.tokens // 8,
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
    )
    steps = jnp.where(tiles.counts > 0, last - first + 1, 0)
    rows = jnp.stack(tile, axis=1)
    # Ranks by comparison, because XLA's sort of so few rows takes many kernels.
    before = (steps[None] > steps[:, None]) | (
        (steps[None] == steps[:, None]) & (tile.index[None] < tile.index[:, None])
    )
    rank = before.sum(axis=1, dtype=jnp.int32)
    return jnp.zeros_like(rows).at[rank].set(rows, unique_indices=True)


def has_holes(arrays: AttentionArrays, rule: AttentionRule, tiles: QueryTiles) -> Array:
    """Returns bool[N]: whether any page that the tile's request may read holds no keys."""
    tables = arrays.block_tables
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None] * rule.page_tokens
    read = columns < rule.held_before(arrays.seq_lens, arrays.rank)[:, None]
    holes = read & ((tables < 0) | (tables >= arrays.pages.num_pages))
    return holes.any(axis=1)[tiles.requests]
