"""The arrays of a call of attention over pages, and its queries cut into tiles."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.requests import SharedPrefixes
from pallas_kernels._paged_attention.rule import Config


class AttentionArrays(NamedTuple):
    """The arrays of a call.

    pages: keys and values.
    seq_lens: counted from the first position in each row of the tables.
    query_start_loc: None for one query per request.
    chunk_offsets: distance of that first position from the beginning of its chunk.
    rank: the rank whose pages these are.
    """

    queries: Float[Array, "tokens heads key_width"]
    pages: StridedPages
    block_tables: Int32[Array, "requests pages"]
    seq_lens: Int32[Array, " requests"]
    query_start_loc: Int32[Array, " requests+1"] | None
    chunk_offsets: Int32[Array, " requests"]
    rank: Int32[Array, ""]
    sinks: Float32[Array, " heads"] | None
    key_scale: Float32[Array, " kv_heads"]
    value_scale: Float32[Array, " kv_heads"]
    shared: SharedPrefixes | None = None


class QueryTiles(NamedTuple):
    """Tiles of ``size`` rows, consecutive tokens; some of them are queries of the tile's request.

    requests: a row of the block tables, even for an empty tile.
    tokens: index of the first row among the flat tokens.
    skips, counts: rows ``skips`` to ``counts - 1`` are queries of the request.
    positions: position of the first row in the request.
    chunk_offsets, ranks: as in `AttentionArrays`.
    begins, ends: no query of the tile sees keys outside ``begins`` to ``ends - 1``.
    token_tiles: the tile of each token; -1 for none.
    rows: the row of each token in its tile.
    """

    size: int
    requests: Int32[Array, " tiles"]
    tokens: Int32[Array, " tiles"]
    skips: Int32[Array, " tiles"]
    counts: Int32[Array, " tiles"]
    positions: Int32[Array, " tiles"]
    chunk_offsets: Int32[Array, " tiles"]
    ranks: Int32[Array, " tiles"]
    begins: Int32[Array, " tiles"]
    ends: Int32[Array, " tiles"]
    token_tiles: Int32[Array, " tokens"]
    rows: Int32[Array, " tokens"]


class Cut(NamedTuple):
    """The division of the queries of a batch into tiles.

    size: rows of a tile.
    align: every tile begins at a multiple of this among the flat tokens.
    least: requests with fewer queries get no tiles.
    is_single: requests with more queries than a tile has rows get none either.
    """

    size: int
    align: int = 1
    least: int = 1
    is_single: bool = False

    def max_tiles(self, batch: int, num_tokens: int) -> int:
        """Returns the number of tiles, some of which may be empty, for a batch of this shape."""
        if self.is_single or self.size == 1:
            return batch if self.is_single else num_tokens
        return batch + num_tokens // self.size

    def first_tiles(self, first_rows: Array) -> Array:
        """Returns the index of the first tile of each request, int32[B].

        Rows and requests both ascend, so tiles are numbered by both: a request's tiles end before
        the next one begins, and no sum over requests is needed.

        Args:
          first_rows: int32[B], the first row of each request's first tile, multiples of ``align``.
        """
        index = jnp.arange(first_rows.shape[0])
        if self.is_single or self.size == 1:
            return index if self.is_single else first_rows
        return index + lax.div(first_rows, self.size)


def one_query_each(arrays: AttentionArrays, config: Config) -> QueryTiles:
    """Returns one tile per request, for a call without ``query_start_loc``.

    The tile of a request without keys also has a query, whose output is zeros.
    """
    seq_lens = jnp.maximum(arrays.seq_lens, 0)
    index = jnp.arange(seq_lens.shape[0])
    zeros = jnp.zeros_like(index)
    cut = index, index, zeros, zeros + 1, seq_lens - 1
    return _tiles(arrays, config, 1, cut, jnp.where(seq_lens > 0, index, -1), zeros)


def cut_queries(
    arrays: AttentionArrays, config: Config, cut: Cut, among: Array | None = None
) -> QueryTiles:
    """Cuts the queries of a call with ``query_start_loc`` into tiles of one request each.

    Args:
      among: bool[B], the requests that get tiles; None: all.
    """
    num_tokens, batch = arrays.queries.shape[0], arrays.block_tables.shape[0]
    loc = jnp.clip(arrays.query_start_loc, 0, num_tokens)
    starts, ends = loc[:-1], loc[1:]
    query_lens = ends - starts
    first_rows = lax.div(starts, cut.align) * cut.align
    counted = query_lens >= cut.least
    if cut.is_single:
        counted &= query_lens <= cut.size
    if among is not None:
        counted &= among
    first_tiles = cut.first_tiles(first_rows)
    index = jnp.arange(max(1, cut.max_tiles(batch, num_tokens)))
    if cut.is_single:
        requests = index
    else:
        requests = jnp.maximum(count_ended(first_tiles, index) - 1, 0)
    tokens = take(first_rows, requests) + (index - take(first_tiles, requests)) * cut.size
    counts = jnp.clip(take(ends, requests) - tokens, 0, cut.size)
    counts = jnp.where(take(counted, requests), counts, 0)
    tokens = jnp.where(counts > 0, tokens, 0)
    skips = jnp.clip(take(starts, requests) - tokens, 0, cut.size)
    positions = take(jnp.maximum(arrays.seq_lens, 0) - ends, requests) + tokens

    token = jnp.arange(num_tokens)
    owner = count_ended(ends, token)
    known = (owner < batch) & (token >= loc[0])
    owner = jnp.minimum(owner, batch - 1)
    within = jnp.maximum(token - take(first_rows, owner), 0)
    tile = take(first_tiles, owner) + lax.div(within, cut.size)
    token_tiles = jnp.where(known & take(counted, owner), tile, -1)
    fields = requests, tokens, skips, counts, positions
    return _tiles(arrays, config, cut.size, fields, token_tiles, lax.rem(within, cut.size))


def _tiles(
    arrays: AttentionArrays,
    config: Config,
    size: int,
    fields: tuple[Array, Array, Array, Array, Array],
    token_tiles: Array,
    rows: Array,
) -> QueryTiles:
    """Returns tiles, with the range of keys that each sees."""
    requests, tokens, skips, counts, positions = fields
    capacity = arrays.block_tables.shape[1] * config.page_tokens
    offsets = take(arrays.chunk_offsets, requests)
    begins = jnp.zeros_like(positions)
    ends = config.allocated_before(take(arrays.seq_lens, requests), arrays.rank)
    if config.causal:
        begins = config.first_visible(jnp.maximum(positions + skips, 0), offsets)
        ends = config.allocated_before(positions + counts, arrays.rank)
    return QueryTiles(
        size,
        *(requests, tokens, skips, counts, positions),
        chunk_offsets=offsets,
        ranks=jnp.broadcast_to(arrays.rank, requests.shape),
        begins=begins,
        ends=jnp.clip(jnp.where(counts > 0, ends, 0), 0, capacity),
        token_tiles=token_tiles,
        rows=rows,
    )


def take(values: Array, index: Array) -> Array:
    """Returns ``values[index]``, for indices that are in range: less code than for any index."""
    cells = jnp.asarray(values).at[index]
    return cells.get(mode="promise_in_bounds", wrap_negative_indices=False)


def count_ended(ends: Array, index: Array) -> Array:
    """Returns how many of the ascending ends are at or before each index."""
    return (ends[None] <= index[:, None]).sum(axis=1)  # one kernel
