"""Attention over pages: its rule, its arrays, and its queries cut into tiles."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._paged_attention.packed import PackedRow, RowPacking
from pallas_kernels._paged_attention.pages import StridedPages


class AttentionRule(NamedTuple):
    """Constants of a compiled program: the keys that a query sees, and their scores.

    kv_heads: KV heads.
    group: query heads of one KV head.
    key_width, value_width: elements of a key and of a value.
    page_tokens: tokens of a page.
    scale: factor of the scores.
    window: keys that a query sees, including its own; None: no window.
    chunk: positions of a chunk; a query sees only keys of its own. None: no chunks.
    soft_cap: cap of the scores; None: no cap.
    causal: whether a query sees only keys up to its own position.
    values_in_keys: whether a row is only a key, whose first elements are the value.
    row_packing: format of the rows of pages; None: elements of one dtype.
    ranks, interleave_tokens: of the `Interleaving`; 1 rank without one.
    reproducible: whether the bits of the output depend on the request alone.
    max_queries: queries that requests are expected to have at most; more take longer.
    out_dtype: dtype of the output.
    """

    kv_heads: int
    group: int
    key_width: int
    value_width: int
    page_tokens: int
    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None
    causal: bool
    values_in_keys: bool
    row_packing: RowPacking | None
    ranks: int
    interleave_tokens: int
    reproducible: bool
    max_queries: int
    out_dtype: jnp.dtype

    @property
    def row_width(self) -> int:
        """Returns the elements of a row: a key and its value, or a key that contains it."""
        return self.key_width + (0 if self.values_in_keys else self.value_width)

    @property
    def first_value(self) -> int:
        """Returns the index of the first element of the value in a row."""
        return 0 if self.values_in_keys else self.key_width

    @property
    def packed_row(self) -> PackedRow:
        """Returns the parts of a packed row."""
        return PackedRow(self.value_width, self.key_width - self.value_width)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Returns the first column and the width of parts of a value that wgmma takes.

        Their widths are multiples of 64. The last one may overlap the one before, and end with the
        value.
        """
        whole = self.value_width // 64 * 64
        return [(0, whole)] + [(self.value_width - 64, 64)] * (self.value_width > whole)

    def first_visible(self, positions: Array, chunk_offset: Array) -> Array:
        """Returns the first position that queries at these positions see.

        Args:
          positions: counted from the first position in the block tables.
          chunk_offset: distance of that first position from the beginning of its chunk.
        """
        first = jnp.zeros_like(positions)
        if self.window is not None:
            first = jnp.maximum(first, positions - (self.window - 1))
        if self.chunk is not None:
            within = lax.rem(positions + chunk_offset, self.chunk)
            first = jnp.maximum(first, positions - within)
        return first

    def allocated_before(self, positions: Array, rank: Array) -> Array:
        """Returns how many of the positions below these belong to the rank."""
        if self.ranks == 1:
            return positions
        interleave, turn = self.interleave_tokens, self.ranks * self.interleave_tokens
        positions = jnp.maximum(positions, 0)
        whole = lax.div(positions, turn)
        rest = positions - whole * turn - rank * interleave
        return whole * interleave + jnp.minimum(jnp.maximum(rest, 0), interleave)


class Interleaving(NamedTuple):
    """A division of the positions of every request among ranks, for context parallelism.

    Ranks take turns: each gets the next ``interleave_tokens`` positions. The pages of a rank hold
    its positions without gaps.

    rank: int or int32[], the rank whose pages these are.
    ranks: number of ranks.
    interleave_tokens: consecutive positions that a rank gets in its turn.
    """

    rank: Array | int
    ranks: int
    interleave_tokens: int


class SharedPrefixes(NamedTuple):
    """Groups of requests that begin with the same pages.

    The first ``lens[g]`` tokens of all members of group g must be in pages that hold the same. They
    are read once for the whole group, from the table of its first member.

    members: int32[M], requests, by their index in the batch, group after group; a request is in one
      group at most. -1: padding.
    ends: int32[G], ascending: the members of group g end here, and those of the next one begin.
    lens: int32[G], tokens that the members of each group share; 0: none.
    """

    members: Array
    ends: Array
    lens: Array


class AttentionArrays(NamedTuple):
    """The arrays of a call.

    queries: [T, heads, K].
    pages: keys and values.
    block_tables: int32[B, W].
    seq_lens: int32[B], counted from the first position in each row of the tables.
    query_start_loc: int32[B + 1], or None for one query per request.
    chunk_offsets: int32[B], distance of that first position from the beginning of its chunk.
    rank: int32[], the rank whose pages these are.
    sinks: float32[heads], or None.
    key_scale, value_scale: float32[kv_heads].
    shared: beginnings that requests share, or None.
    """

    queries: Array
    pages: StridedPages
    block_tables: Array
    seq_lens: Array
    query_start_loc: Array | None
    chunk_offsets: Array
    rank: Array
    sinks: Array | None
    key_scale: Array
    value_scale: Array
    shared: SharedPrefixes | None = None


class QueryTiles(NamedTuple):
    """N tiles of ``size`` rows, consecutive tokens; some of them are queries of the tile's request.

    requests: int32[N], a row of the block tables, even for an empty tile.
    tokens: int32[N], index of the first row among the flat tokens.
    skips, counts: int32[N], rows ``skips`` to ``counts - 1`` are queries of the request.
    positions: int32[N], position of the first row in the request.
    chunk_offsets, ranks: int32[N], as in `AttentionArrays`.
    begins, ends: int32[N], no query of the tile sees keys outside ``begins`` to ``ends - 1``.
    of_token: int32[T], the tile of each token; -1 for none.
    rows: int32[T], the row of each token in its tile.
    """

    size: int
    requests: Array
    tokens: Array
    skips: Array
    counts: Array
    positions: Array
    chunk_offsets: Array
    ranks: Array
    begins: Array
    ends: Array
    of_token: Array
    rows: Array


class Cut(NamedTuple):
    """Parameters by which the queries of a batch are cut into tiles.

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
        """Returns the number of tiles, some of which may be empty, for a batch of that shape."""
        if self.is_single or self.size == 1:
            return batch if self.is_single else num_tokens
        return batch + num_tokens // self.size

    def first_tiles(self, first_rows: Array) -> Array:
        """Returns the index of the first tile of each request, int32[B].

        Rows and requests both ascend, so tiles are numbered by both: a request's tiles end before
        those of the next one begin, and no sum over requests is needed.

        Args:
          first_rows: int32[B], the first row of each request's first tile, multiples of ``align``.
        """
        index = jnp.arange(first_rows.shape[0])
        if self.is_single or self.size == 1:
            return index if self.is_single else first_rows
        return index + lax.div(first_rows, self.size)


def one_query_each(arrays: AttentionArrays, rule: AttentionRule) -> QueryTiles:
    """Returns one tile per request, for a call without ``query_start_loc``.

    The tile of a request without keys also has a query, whose output is zeros.
    """
    seq_lens = jnp.maximum(arrays.seq_lens, 0)
    index = jnp.arange(seq_lens.shape[0])
    zeros = jnp.zeros_like(index)
    cut = index, index, zeros, zeros + 1, seq_lens - 1
    return _tiles(arrays, rule, 1, cut, jnp.where(seq_lens > 0, index, -1), zeros)


def cut_queries(arrays: AttentionArrays, rule: AttentionRule, cut: Cut) -> QueryTiles:
    """Cuts the queries of a call with ``query_start_loc`` into tiles of one request each."""
    num_tokens, batch = arrays.queries.shape[0], arrays.block_tables.shape[0]
    loc = jnp.clip(arrays.query_start_loc, 0, num_tokens)
    starts, ends = loc[:-1], loc[1:]
    query_lens = ends - starts
    first_rows = lax.div(starts, cut.align) * cut.align
    counted = query_lens >= cut.least
    if cut.is_single:
        counted &= query_lens <= cut.size
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
    of_token = jnp.where(known & take(counted, owner), tile, -1)
    places = requests, tokens, skips, counts, positions
    return _tiles(arrays, rule, cut.size, places, of_token, lax.rem(within, cut.size))


def _tiles(
    arrays: AttentionArrays,
    rule: AttentionRule,
    size: int,
    places: tuple[Array, Array, Array, Array, Array],
    of_token: Array,
    rows: Array,
) -> QueryTiles:
    """Returns tiles, with the range of keys that each sees."""
    requests, tokens, skips, counts, positions = places
    capacity = arrays.block_tables.shape[1] * rule.page_tokens
    offsets = take(arrays.chunk_offsets, requests)
    begins = jnp.zeros_like(positions)
    ends = rule.allocated_before(take(arrays.seq_lens, requests), arrays.rank)
    if rule.causal:
        begins = rule.first_visible(jnp.maximum(positions + skips, 0), offsets)
        ends = rule.allocated_before(positions + counts, arrays.rank)
    return QueryTiles(
        size,
        *(requests, tokens, skips, counts, positions),
        chunk_offsets=offsets,
        ranks=jnp.broadcast_to(arrays.rank, requests.shape),
        begins=begins,
        ends=jnp.clip(jnp.where(counts > 0, ends, 0), 0, capacity),
        of_token=of_token,
        rows=rows,
    )


def take(values: Array, index: Array) -> Array:
    """Returns ``values[index]``, for indices that are in range: less code than for any index."""
    cells = jnp.asarray(values).at[index]
    return cells.get(mode="promise_in_bounds", wrap_negative_indices=False)


def count_ended(ends: Array, index: Array) -> Array:
    """Returns how many of the ascending ends are at or before each index."""
    return (ends[None] <= index[:, None]).sum(axis=1)  # one kernel
