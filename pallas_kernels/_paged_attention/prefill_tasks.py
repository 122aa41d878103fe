"""The tiles of prefill: their queries and keys, and the steps that need masks.

Few tiles of long requests would leave most of the GPU idle. So these are split, as in decoding.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels import _capability
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import Link, Tile, running_sum
from pallas_kernels._paged_attention.tiles import AttentionArrays, QueryTiles, count_ended, take

QUERIES, ROWS = 128, 64  # of a tile, and of a warpgroup
LEAST_STEPS = 8  # of a split; a tile takes about the time of 3 to 8 steps besides its own
CACHED_BYTES = 96 * 2**20  # more than the 50 MB of L2 cache: some of them are read twice


class PrefillTile(NamedTuple):
    """The numbers of a tile that the kernel reads: columns of an array of tiles.

    index: index of the tile and of its results; of a split the number of all tiles and its own.
    request: row of the block tables.
    octet: first row of the tile among the tokens, divided by 8.
    skip, count: rows ``skip`` to ``count - 1`` are queries of the request.
    position: position of the first row in the request.
    chunk_offset, rank: as in `AttentionArrays`.
    begin, end: no query of the tile sees keys outside ``begin`` to ``end - 1``.
    first_step, last_step: the steps of keys, ``last_step`` excluded.
    full_begin, full_end: in these steps of the tile every query sees all keys, ``full_end``
      excluded; in none if it is not the larger one.
    has_holes: whether any page of the request has no keys.
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


class TileSplits(NamedTuple):
    """The splits of tiles: runs of consecutive steps. Most tiles have one, of all their steps.

    counts: splits of each tile.
    first_splits: the number of the first split of each tile that has several.
    workers: splits that all steps together would have. At most ``workers`` tiles have several, and
      all of these together ``2 * workers`` at most.
    """

    counts: Int32[Array, " tiles"]
    first_splits: Int32[Array, " tiles"]
    workers: int


def split_tiles(
    arrays: AttentionArrays, config: Config, tiles: QueryTiles, keys: int
) -> TileSplits | None:
    """Splits the tiles that are longer than others, where the GPU has thread blocks left for them.

    Args:
      keys: keys of a step.

    Returns:
      The splits, or None if no step of this shape needs them.
    """
    capacity = arrays.block_tables.shape[1] * config.page_tokens
    workers = _capability.max_thread_blocks(1) // (config.kv_heads * config.group)
    is_small = arrays.queries.shape[0] <= 2 * QUERIES * workers
    if workers < 2 or not is_small or capacity < 2 * LEAST_STEPS * keys:
        return None
    first, last = _steps(tiles, keys)
    steps = jnp.where(tiles.counts > 0, last - first, 0)
    total = steps.sum()
    each = jnp.maximum(lax.div(total + (workers - 1), workers), LEAST_STEPS)
    counts = jnp.where(4 * steps > 5 * each, lax.div(steps + each - 1, each), 1)
    splits = jnp.where(counts > 1, counts, 0)
    return TileSplits(counts, running_sum(splits) - splits, workers)


def prefill_tiles(
    arrays: AttentionArrays,
    config: Config,
    tiles: QueryTiles,
    keys: int,
    tile_splits: TileSplits | None = None,
) -> Array:
    """Returns int32[N, ...], a `PrefillTile` per row: the longest first, empty ones last.

    Every tile has at least one step, even if its queries see no key.

    Args:
      keys: keys of a step.
      tile_splits: from `split_tiles`; adds ``tile_splits.workers`` rows, one for each split.
    """
    first, last = _steps(tiles, keys)
    full_begin, full_end = _full_steps(arrays, config, tiles, keys)
    holed = has_holes(arrays, config, tiles)
    # The longest splits come first, whatever their heads.
    heads = _heads_together(arrays, config, tiles) if tile_splits is None else config.kv_heads
    tile = PrefillTile(
        index=jnp.arange(tiles.requests.shape[0]),
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
        num_tiles=jnp.broadcast_to(jnp.sum(tiles.counts > 0), last.shape),
        heads_together=jnp.broadcast_to(heads, last.shape),
        first_row=jnp.broadcast_to(arrays.pages.first_row(), last.shape),
    )
    if tile_splits is not None:
        tile = _apply_splits(tile, tile_splits)
    steps = jnp.where(tile.count > 0, tile.last_step - tile.first_step, 0)
    return take(jnp.stack(tile, axis=1), _longest_first(steps))


def _full_steps(
    arrays: AttentionArrays, config: Config, tiles: QueryTiles, keys: int
) -> tuple[Array, Array]:
    """Returns the range of steps in which all queries of each tile see all keys."""
    last_query = jnp.maximum(tiles.positions + tiles.counts - 1, 0)
    seen_by_last = config.first_visible(last_query, tiles.chunk_offsets)
    begin, end = lax.div(seen_by_last + (keys - 1), keys), lax.div(tiles.ends, keys)
    if config.causal:
        seen_by_all = config.allocated_before(tiles.positions + 1, arrays.rank)
        end = lax.div(jnp.minimum(seen_by_all, tiles.ends), keys)
    return begin, end


def _longest_first(steps: Array) -> Array:
    """Returns the order of tiles with these steps; by comparison, as XLA's sort is many kernels."""
    index = jnp.arange(steps.shape[0])
    before = (steps[None] > steps[:, None]) | (
        (steps[None] == steps[:, None]) & (index[None] < index[:, None])
    )
    rank = before.sum(axis=1)
    return jnp.where(rank[None] == index[:, None], index[None], 0).sum(axis=1)


def _steps(tiles: QueryTiles, keys: int) -> tuple[Array, Array]:
    """Returns the first and the last step of each tile, the last one excluded."""
    first = lax.div(tiles.begins, keys)
    return first, jnp.maximum(lax.div(tiles.ends + (keys - 1), keys), first + 1)


def _apply_splits(tile: PrefillTile, tile_splits: TileSplits) -> PrefillTile:
    """Returns the splits of tiles, and rows that count none."""
    num_tiles, ends = tile_splits.counts.shape[0], running_sum(tile_splits.counts)
    index = jnp.arange(num_tiles + tile_splits.workers)
    tile_index = jnp.minimum(count_ended(ends, index), num_tiles - 1)
    added = tile_splits.counts, tile_splits.first_splits, ends
    *found, counts, splits, ends_of = take(jnp.stack([*tile, *added], axis=1), tile_index).T
    whole, number = PrefillTile(*found), index - (ends_of - counts)
    steps = whole.last_step - whole.first_step
    first = whole.first_step + lax.div(number * steps, counts)
    last = whole.first_step + lax.div((number + 1) * steps, counts)
    full_begin = jnp.clip(whole.full_begin, first, last)
    count = jnp.where(index < ends[-1], whole.count, 0)
    kv_split = num_tiles + splits + number
    return whole._replace(
        index=jnp.where(counts > 1, kv_split, whole.index),
        count=count,
        first_step=first,
        full_begin=full_begin,
        full_end=jnp.clip(whole.full_end, full_begin, last),
        last_step=last,
        num_tiles=jnp.broadcast_to(jnp.sum(count > 0), index.shape),
    )


def list_halves(tiles: QueryTiles, tile_splits: TileSplits, num_rows: int) -> tuple[Array, Array]:
    """Returns what is left to combine: the rows of each warpgroup of the divided tiles.

    Args:
      num_rows: of the queries with padding; rows past them are moved back to lie within.

    Returns:
      int32[2 * workers, ...], a `Tile` and a `Link` per row, and int32[N], the slot of each divided
      tile among them, or -1.
    """
    is_divided, index = tile_splits.counts > 1, jnp.arange(tile_splits.workers)
    ends = running_sum(is_divided.astype(jnp.int32))
    tile_index = jnp.minimum(count_ended(ends, index), is_divided.shape[0] - 1)
    fields = tiles.tokens, tiles.skips, tiles.counts, tile_splits.first_splits, tile_splits.counts
    tokens, skips, counts, splits, num_splits = take(jnp.stack(fields, axis=1), tile_index).T
    counts = jnp.where(index < ends[-1], counts, 0)
    halves: list[Array] = []
    for first in (0, ROWS):
        token = jnp.minimum(tokens + first, num_rows - ROWS)
        shift, zeros = token - tokens, jnp.zeros_like(token)
        tile = dict.fromkeys(Tile._fields, zeros) | {
            "token": token,
            "skip": jnp.maximum(skips, first) - shift,
            "count": jnp.where(counts > first, jnp.minimum(counts, first + ROWS) - shift, 0),
            "used_tokens": zeros + num_rows,  # the padding is cleared elsewhere
        }
        halves.append(jnp.stack([*Tile(**tile), *Link(splits, num_splits, zeros + first)], axis=1))
    table = jnp.stack(halves, axis=1).reshape(2 * tile_splits.workers, -1)
    return table, jnp.where(is_divided, ends - 1, -1)


def _heads_together(arrays: AttentionArrays, config: Config, tiles: QueryTiles) -> Array:
    """Returns how many KV heads are attended to together: a divisor of all, at least 1.

    All tiles of these heads come before the tiles of others, so that the keys and values of all
    requests with tiles stay in the L2 cache; few bytes stay for all heads.
    """
    requests = jnp.where(tiles.counts > 0, tiles.requests, -1)
    is_last = requests != jnp.append(requests[1:], -1)  # tile of its request
    tokens = jnp.where(is_last, tiles.ends, 0).sum(dtype=jnp.float32)
    row_bytes = config.row_width * arrays.pages.itemsize
    together = jnp.int32(1)
    for heads in range(2, config.kv_heads + 1):
        if config.kv_heads % heads == 0:
            together = jnp.where(tokens * (row_bytes * heads) <= CACHED_BYTES, heads, together)
    return together


def has_holes(arrays: AttentionArrays, config: Config, tiles: QueryTiles) -> Array:
    """Returns bool[N]: whether any page that the tile's request may read has no keys."""
    tables = arrays.block_tables
    positions = jnp.arange(tables.shape[1])[None] * config.page_tokens
    read = positions < config.allocated_before(arrays.seq_lens, arrays.rank)[:, None]
    holes = read & ((tables < 0) | (tables >= arrays.pages.num_pages))
    return take(holes.any(axis=1), tiles.requests)
