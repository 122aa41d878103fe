"""A batch cut into segments, and the pages each one sees.

A segment is what one query group and one request have in common. Its tokens are
consecutive in the request, so under a causal mask with or without a window, and without a
mask, what they see is one run of tokens, and hence one run ``[first, first + count)`` of
the request's pages: exactly those pages, none between them unseen. That is why the
metadata needs two integers a segment instead of a mark for every page of the pool.

Knows the mask and the order of a batch. Knows no list formats.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.block_tables._index import bit, gather_bits, take, within
from jaxkv.flex_attention._problems import BAD_BATCH, BAD_PAGE_ID, MISSING_PAGE
from jaxkv.flex_sizes import INT32_MAX, MetadataSizes

# At most this many (request, page) pairs are worked out at a time: a search over more would
# have temporaries several times as large as the lists themselves.
PAIRS_AT_ONCE = 2**20


class Batch(NamedTuple):
    """B requests laid end to end; all of them empty where a batch made no sense."""

    block_tables: Array  # int32[B, W], null for ids that the pool does not have
    token_starts: Array  # int32[B]
    token_ends: Array  # int32[B]
    first_positions: Array  # int32[B]
    seq_lengths: Array  # int32[B], 0 for a request without tokens
    problems: Array  # int32[]


class Segments(NamedTuple):
    """S = G + B - 1 segments, in the order of their tokens; those without tokens see no pages."""

    starts: Array  # int32[S], first token of each
    owners: Array  # int32[S], the request
    first_pages: Array  # int32[S], logical
    counts: Array  # int32[S], pages
    page_ends: Array  # int32[S], pages of this and all earlier segments


class Listed(NamedTuple):
    """(request, page) pairs, int32 of one shape; padding reads page 0 and -1 elsewhere."""

    pages: Array
    logical_pages: Array
    owners: Array


def check_batch(
    block_tables: Array, token_ends: Array, first_positions: Array, sizes: MetadataSizes
) -> Batch:
    """A batch that is safe to index with: a bad one becomes empty and says so."""
    lengths = jnp.diff(token_ends, prepend=0)
    # Decreasing first: differences of wild ends may wrap.
    bad = (token_ends < 0).any() | (token_ends[1:] < token_ends[:-1]).any()
    bad |= token_ends[-1] > sizes.max_num_batched_tokens
    bad |= ((lengths > 0) & ~within(first_positions, INT32_MAX - lengths)).any()
    token_ends = jnp.where(bad, 0, token_ends)
    starts = jnp.pad(token_ends, (1, 0))[:-1]
    lengths = token_ends - starts
    seq_lengths = jnp.where(lengths > 0, first_positions + lengths, 0)
    visible = _visible_pages(first_positions, seq_lengths, sizes)
    tables, problems = _check_pages(block_tables, visible, sizes)
    problems |= bit(BAD_BATCH, bad)
    return Batch(tables, starts, token_ends, first_positions, seq_lengths, problems)


def _check_pages(
    block_tables: Array, visible: tuple[Array, Array], sizes: MetadataSizes
) -> tuple[Array, Array]:
    """Tables of ids that the pool has, and what is wrong with pages that the batch sees."""
    first, past = visible
    held_pages = min(block_tables.shape[1], sizes.pages_per_seq)
    column = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None]
    seen = (column >= first[:, None]) & (column < jnp.minimum(past, held_pages)[:, None])
    known = within(block_tables, sizes.num_blocks)
    problems = bit(MISSING_PAGE, seen & (block_tables == 0)) | bit(BAD_PAGE_ID, seen & ~known)
    problems = gather_bits(problems, bit(MISSING_PAGE, past > held_pages))
    return jnp.where(known, block_tables, 0), problems


def _visible_pages(
    first_positions: Array, ends: Array, sizes: MetadataSizes
) -> tuple[Array, Array]:
    """The run of pages that tokens see whose first is at a position: first page, one past.

    ``ends``: one past the last position that any of them sees; 0 for none.
    """
    first_seen = jnp.zeros_like(ends)
    if sizes.sliding_window is not None:
        first_seen = jnp.maximum(first_positions - (sizes.sliding_window - 1), 0)
    past = (ends - 1) // sizes.page_size + 1  # adding first could pass int32
    return first_seen // sizes.page_size, past


def find_owners(batch: Batch, tokens: Array) -> tuple[Array, Array]:
    """Request and position of tokens, int32[N] each; -1 past the last token.

    The search is unrolled: jax's default is a loop, a kernel launch per round on a GPU.
    """
    owners = jnp.searchsorted(batch.token_ends, tokens, side="right", method="scan_unrolled")
    known = tokens < batch.token_ends[-1]
    inner = tokens - take(batch.token_starts, owners)
    positions = take(batch.first_positions, owners) + inner
    return jnp.where(known, owners, -1), jnp.where(known, positions, -1)


def find_segments(batch: Batch, sizes: MetadataSizes) -> Segments:
    """Cuts a batch where a query group or a request begins."""
    num_tokens = batch.token_ends[-1]
    group_starts = jnp.arange(sizes.num_query_groups, dtype=jnp.int32) * sizes.q_block_tokens
    starts = jnp.sort(jnp.concatenate([group_starts, batch.token_starts[1:]]))
    starts = jnp.minimum(starts, num_tokens)
    lengths = jnp.append(starts[1:], num_tokens) - starts
    owners, first_positions = find_owners(batch, starts)
    ends = first_positions + lengths if sizes.causal else take(batch.seq_lengths, owners)
    first_pages, past_pages = _visible_pages(first_positions, ends, sizes)
    # A longer run is a problem of the batch; here it would overflow the prefix sum.
    past_pages = jnp.minimum(past_pages, min(batch.block_tables.shape[1], sizes.pages_per_seq))
    counts = jnp.where(lengths > 0, jnp.maximum(past_pages - first_pages, 0), 0)
    page_ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Segments(starts, owners, first_pages, counts, page_ends)


def count_before(segments: Segments, sizes: MetadataSizes) -> Array:
    """int32[G + 1]: (request, page) pairs of all earlier query groups."""
    borders = jnp.arange(sizes.num_query_groups + 1, dtype=jnp.int32) * sizes.q_block_tokens
    segment = jnp.searchsorted(segments.starts, borders, method="scan_unrolled")
    return jnp.pad(segments.page_ends, (1, 0))[segment]


def list_pages(
    batch: Batch, segments: Segments, firsts: Array, counts: Array, width: int
) -> Listed:
    """Rows of ``width``: of the batch's pairs, numbers ``firsts`` and on, as many as ``counts``.

    Args:
      firsts, counts: int32[N].

    Returns:
      int32[N, width] each.
    """
    column = jnp.arange(width, dtype=jnp.int32)

    def list_row(row: tuple[Array, Array]) -> Listed:
        first, count = row
        return _list_pairs(batch, segments, first + column, column < count)

    rows = max(1, PAIRS_AT_ONCE // width)
    if len(firsts) <= rows:
        return jax.vmap(list_row)((firsts, counts))
    return lax.map(list_row, (firsts, counts), batch_size=rows)


def _list_pairs(batch: Batch, segments: Segments, index: Array, wanted: Array) -> Listed:
    """The pairs number ``index`` of the batch, where ``wanted``."""
    segment = jnp.searchsorted(segments.page_ends, index, side="right", method="scan_unrolled")
    segment = jnp.where(wanted, segment, 0)
    # The page of number 0 of the batch, were it in this segment: one gather instead of two.
    shift = segments.first_pages - (segments.page_ends - segments.counts)
    owners = jnp.where(wanted, take(segments.owners, segment), -1)
    logical_pages = jnp.where(wanted, take(shift, segment) + index, -1)
    pages = batch.block_tables.at[owners, logical_pages].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    return Listed(pages, logical_pages, owners)
