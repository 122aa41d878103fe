"""A flat batch cut into segments, and the pages that each segment sees.

A segment is the set of tokens that one query group and one request have in common. These are
consecutive in the request, so together they see one range of tokens (with a causal mask, a window,
chunks or no mask), and hence one range of pages ``first .. first + count - 1`` without gaps. That
is why page lists are computed from two integers per segment, not from a mask over the pool.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.attention._page_list_errors import BAD_PAGE_ID, MISSING_PAGE
from jaxkv._src.cache import BAD_BATCH
from jaxkv._src.internal.indexing import bit, gather_bits, take, within
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.layout import PageListSizes
from jaxkv._src.specs import first_visible_token

NULL_PAGE = 0

# At most this many (request, page) pairs are computed at a time: a search over more would have
# temporaries several times as large as the lists themselves.
PAIRS_AT_ONCE = 2**20


class PageTables(NamedTuple):
    """The pages of a flat batch's B requests in one layer, unchecked."""

    pages: Array  # int32[B, W], counted from the layer's first; 0 = null
    first_pages: Array  # int32[B], index in its request of each row's first page
    query_start_loc: Array  # int32[B + 1]
    num_computed_tokens: Array  # int32[B]


class Requests(NamedTuple):
    """B requests whose values are safe to index with; all are empty for a malformed batch."""

    pages: Array  # int32[B, W], null for ids that the layer does not have
    first_pages: Array  # int32[B]
    token_starts: Array  # int32[B]
    token_ends: Array  # int32[B]
    num_computed_tokens: Array  # int32[B]
    seq_lens: Array  # int32[B], 0 for a request without tokens
    error_flags: Array  # int32[]


class Segments(NamedTuple):
    """S = G + B - 1 segments, in the order of their tokens; those without tokens see no pages."""

    starts: Array  # int32[S], first token of each
    requests: Array  # int32[S], index in the batch
    first_pages: Array  # int32[S], index in the request
    counts: Array  # int32[S], pages
    page_ends: Array  # int32[S], pages of this and all earlier segments


class Pairs(NamedTuple):
    """(request, page) pairs, int32 of one shape; padding is page 0, and -1 elsewhere."""

    pages: Array
    logical_pages: Array
    requests: Array


def check_tables(tables: PageTables, sizes: PageListSizes) -> Requests:
    """Returns the requests of a batch, or empty ones with an error flag for a malformed batch."""
    loc, computed = tables.query_start_loc, tables.num_computed_tokens
    lens = jnp.diff(loc)
    # Compared before they are subtracted: differences of wild entries may overflow.
    bad = (loc[0] != 0) | (loc[1:] < loc[:-1]).any() | (loc[-1] > sizes.max_num_batched_tokens)
    bad |= ((lens > 0) & ~within(computed, INT32_MAX - lens)).any()
    loc = jnp.where(bad, 0, loc)
    lens = jnp.diff(loc)
    seq_lens = jnp.where(lens > 0, computed + lens, 0)
    pages, flags = _check_pages(tables, seq_lens, sizes)
    flags |= bit(BAD_BATCH, bad)
    return Requests(pages, tables.first_pages, loc[:-1], loc[1:], computed, seq_lens, flags)


def _check_pages(tables: PageTables, seq_lens: Array, sizes: PageListSizes) -> tuple[Array, Array]:
    """Returns the tables without unknown ids, and the error flags of pages that a batch sees."""
    pages, start = tables.pages, tables.first_pages
    first, end = _visible_pages(tables.num_computed_tokens, seq_lens, sizes)
    allocated_end = jnp.minimum(start + pages.shape[1], sizes.pages_per_seq)
    page = start[:, None] + jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    seen = (page >= first[:, None]) & (page < end[:, None])
    known = within(pages, sizes.num_pages)
    flags = bit(MISSING_PAGE, seen & (pages == NULL_PAGE)) | bit(BAD_PAGE_ID, seen & ~known)
    outside = (end > first) & ((first < start) | (end > allocated_end))
    flags = gather_bits(flags, bit(MISSING_PAGE, outside))
    return jnp.where(known, pages, NULL_PAGE), flags


def _visible_pages(positions: Array, ends: Array, sizes: PageListSizes) -> tuple[Array, Array]:
    """Returns the pages that consecutive tokens of a request see: the first, and one past the last.

    Args:
      positions: of the first token.
      ends: one past the last position that any of the tokens sees; 0 for none.
    """
    first = jnp.zeros_like(ends)
    if sizes.causal:
        window, chunk = sizes.sliding_window or INT32_MAX, sizes.chunk_size or INT32_MAX
        first = first_visible_token(positions, window, chunk, jnp)
    end = (ends - 1) // sizes.page_tokens + 1  # adding before could overflow int32
    return first // sizes.page_tokens, end


def find_requests(batch: Requests, tokens: Array) -> tuple[Array, Array]:
    """Returns request and position of tokens, int32[N] each; -1 past the last token.

    The search is unrolled, because jax's default loop launches a kernel per round on a GPU.
    """
    requests = jnp.searchsorted(batch.token_ends, tokens, side="right", method="scan_unrolled")
    known = tokens < batch.token_ends[-1]
    inner = tokens - take(batch.token_starts, requests)
    positions = take(batch.num_computed_tokens, requests) + inner
    return jnp.where(known, requests, -1), jnp.where(known, positions, -1)


def find_segments(batch: Requests, sizes: PageListSizes) -> Segments:
    """Cuts a batch where a query group or a request begins."""
    num_tokens = batch.token_ends[-1]
    group_starts = jnp.arange(sizes.num_query_groups, dtype=jnp.int32) * sizes.q_block_tokens
    starts = jnp.sort(jnp.concatenate([group_starts, batch.token_starts[1:]]))
    starts = jnp.minimum(starts, num_tokens)
    lens = jnp.append(starts[1:], num_tokens) - starts
    requests, positions = find_requests(batch, starts)
    ends = positions + lens if sizes.causal else take(batch.seq_lens, requests)
    first, end = _visible_pages(positions, ends, sizes)
    # Cut, because a longer range, which is flagged already, would overflow the prefix sum.
    allocated_end = take(batch.first_pages, requests) + batch.pages.shape[1]
    end = jnp.minimum(end, jnp.minimum(allocated_end, sizes.pages_per_seq))
    counts = jnp.where(lens > 0, jnp.maximum(end - first, 0), 0)
    return Segments(starts, requests, first, counts, jnp.cumsum(counts, dtype=jnp.int32))


def count_before(segments: Segments, sizes: PageListSizes) -> Array:
    """Returns int32[G + 1], the (request, page) pairs of all earlier query groups."""
    borders = jnp.arange(sizes.num_query_groups + 1, dtype=jnp.int32) * sizes.q_block_tokens
    segment = jnp.searchsorted(segments.starts, borders, method="scan_unrolled")
    return jnp.pad(segments.page_ends, (1, 0))[segment]


def list_pairs(
    batch: Requests, segments: Segments, firsts: Array, counts: Array, width: int
) -> Pairs:
    """For each i, lists pairs ``firsts[i] .. firsts[i] + counts[i] - 1`` of the batch.

    Args:
      firsts, counts: int32[N].

    Returns:
      int32[N, width] each, padded.
    """
    column = jnp.arange(width, dtype=jnp.int32)

    def list_row(row: tuple[Array, Array]) -> Pairs:
        first, count = row
        return _pairs_at(batch, segments, first + column, column < count)

    rows = max(1, PAIRS_AT_ONCE // width)
    if len(firsts) <= rows:
        return jax.vmap(list_row)((firsts, counts))
    return lax.map(list_row, (firsts, counts), batch_size=rows)


def _pairs_at(batch: Requests, segments: Segments, index: Array, wanted: Array) -> Pairs:
    """Returns the pairs of the batch at these indices, padding where not ``wanted``."""
    segment = jnp.searchsorted(segments.page_ends, index, side="right", method="scan_unrolled")
    # Logical page minus index is the same for all pairs of a segment: one gather, not two.
    shift = segments.first_pages - (segments.page_ends - segments.counts)
    requests = jnp.where(wanted, take(segments.requests, segment), -1)
    logical_pages = jnp.where(wanted, take(shift, segment) + index, -1)
    column = logical_pages - take(batch.first_pages, requests)
    pages = batch.pages.at[requests, column].get(
        mode="fill", fill_value=NULL_PAGE, wrap_negative_indices=False
    )
    return Pairs(pages, logical_pages, requests)
