"""Which pages every query group sees: padded lists, or one compact list with offsets.

Both name (request, page) *pairs*, in the order of the requests in the batch and of the
pages in each. Beside a pair's physical page stand its logical page and its owner. That is
the physical-to-logical map: it has one entry for each listed page, where a map for every
(request, page of the pool), or a mark for every (group, page of the pool), grows with the
pool. A page that two requests share is a pair of each, and a kernel that lets tokens see
only pairs of their own request counts no key twice. `_block_mask` makes lists of distinct
pages for kernels that know no owners.

Knows formats and shapes. `_segments` knows the mask; `_sizes` every size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.block_tables._index import bit, gather_bits
from jaxkv.checks import check_same_shape
from jaxkv.flex_attention._problems import TOO_MANY_PAGES
from jaxkv.flex_attention._segments import (
    Batch,
    Segments,
    check_batch,
    count_before,
    find_owners,
    find_segments,
    list_pages,
)
from jaxkv.flex_sizes import MetadataSizes
from jaxkv.jit_int32 import jit_int32

BATCH_ARGUMENTS = ("block_tables", "token_ends", "first_positions")

CSR_ROW = 2**16  # pairs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PageLists:
    """Per query group, G, up to L pages that any of its tokens sees; T tokens of B requests.

    Entries at and past a group's count read page 0, the null page, and -1 elsewhere.
    """

    pages: Array  # int32[G, L], physical
    logical_pages: Array  # int32[G, L], index of the page in its request
    owners: Array  # int32[G, L], the request, a row of block_tables
    counts: Array  # int32[G], valid entries
    documents: Array  # int32[T], the request of each token, -1 for padding
    positions: Array  # int32[T], in its request, -1 for padding
    seq_lengths: Array  # int32[B], tokens of each request, past ones too; 0 for padding
    problems: Array  # int32[], bits; see `check_metadata`
    sizes: MetadataSizes = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        groups, pages = self.pages.shape
        return f"PageLists({groups} query groups, up to {pages} pages each)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PageCSR:
    """The lists of all query groups end to end: T tokens, B requests, G groups, C entries.

    Group g's entries are ``offsets[g]`` to ``offsets[g + 1]``. Those past the last group's
    read page 0, the null page, and -1 elsewhere.
    """

    offsets: Array  # int32[G + 1]
    pages: Array  # int32[C], physical
    logical_pages: Array  # int32[C], index of the page in its request
    owners: Array  # int32[C], the request, a row of block_tables
    documents: Array  # int32[T], the request of each token, -1 for padding
    positions: Array  # int32[T], in its request, -1 for padding
    seq_lengths: Array  # int32[B], tokens of each request, past ones too; 0 for padding
    problems: Array  # int32[], bits; see `check_metadata`
    sizes: MetadataSizes = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        groups, pages = self.offsets.shape[0] - 1, self.pages.shape[0]
        return f"PageCSR({groups} query groups, up to {pages} pages in all)"


@jit_int32(*BATCH_ARGUMENTS, static_argnames="sizes")
def build_page_lists(
    block_tables: Array, token_ends: Array, first_positions: Array, *, sizes: MetadataSizes
) -> PageLists:
    """Padded lists. A page is listed iff a token of the group sees a token of the page.

    The arguments are as `jaxkv.step.StepBatch` has them. A visible page that the table
    does not hold, or whose id the pool does not have, sets a bit and reads as page 0,
    which kernels must not look into; what does not fit sets `TOO_MANY_PAGES`.

    Args:
      block_tables: int32[B, W], kernel blocks of each request, 0 = null;
        B <= ``sizes.max_num_seqs``.
      token_ends: int32[B], tokens computed now by this and all earlier requests; a
        padding request computes none.
      first_positions: int32[B], position of the first token that each computes now.
      sizes: static.

    Raises:
      TypeError: an array that is not int32.
      ValueError: shapes that do not fit each other or the sizes.
    """
    batch, segments = _start(block_tables, token_ends, first_positions, sizes)
    before = count_before(segments, sizes)
    counts = jnp.diff(before)
    listed = list_pages(batch, segments, before[:-1], counts, sizes.list_width)
    overflow = bit(TOO_MANY_PAGES, counts > sizes.list_width)
    documents, positions = _of_tokens(batch, sizes)
    return PageLists(
        pages=listed.pages,
        logical_pages=listed.logical_pages,
        owners=listed.owners,
        counts=jnp.minimum(counts, sizes.list_width),
        documents=documents,
        positions=positions,
        seq_lengths=batch.seq_lengths,
        problems=gather_bits(batch.problems, overflow),
        sizes=sizes,
    )


@jit_int32(*BATCH_ARGUMENTS, static_argnames="sizes")
def build_page_csr(
    block_tables: Array, token_ends: Array, first_positions: Array, *, sizes: MetadataSizes
) -> PageCSR:
    """The same pairs in the same order as `build_page_lists`, without padding between groups.

    Its size is ``(groups + requests - 1) * pages`` instead of ``groups * requests * pages``.
    Arguments and errors as there.
    """
    batch, segments = _start(block_tables, token_ends, first_positions, sizes)
    before = count_before(segments, sizes)
    # In rows only so that not all of it is worked out at once.
    width = min(sizes.csr_capacity, CSR_ROW)
    firsts = jnp.arange(-(-sizes.csr_capacity // width), dtype=jnp.int32) * width
    listed = list_pages(batch, segments, firsts, before[-1] - firsts, width)
    pages, logical_pages, owners = (a.reshape(-1)[: sizes.csr_capacity] for a in listed)
    overflow = bit(TOO_MANY_PAGES, before[-1] > sizes.csr_capacity)
    documents, positions = _of_tokens(batch, sizes)
    return PageCSR(
        offsets=jnp.minimum(before, sizes.csr_capacity),
        pages=pages,
        logical_pages=logical_pages,
        owners=owners,
        documents=documents,
        positions=positions,
        seq_lengths=batch.seq_lengths,
        problems=gather_bits(batch.problems, overflow),
        sizes=sizes,
    )


def _start(
    block_tables: Array, token_ends: Array, first_positions: Array, sizes: MetadataSizes
) -> tuple[Batch, Segments]:
    check_tables(block_tables, sizes, token_ends=token_ends, first_positions=first_positions)
    batch = check_batch(block_tables, token_ends, first_positions, sizes)
    return batch, find_segments(batch, sizes)


def check_tables(block_tables: Array, sizes: MetadataSizes, **of_requests: Array) -> None:
    """Raises ValueError unless the tables fit the sizes and the other arrays the tables."""
    if block_tables.ndim != 2 or not block_tables.size:
        raise ValueError(
            f"block_tables has shape {block_tables.shape}; wanted [requests, pages], not empty"
        )
    num_requests = block_tables.shape[0]
    if num_requests > sizes.max_num_seqs:
        raise ValueError(
            f"block_tables has {num_requests} requests, more than "
            f"max_num_seqs={sizes.max_num_seqs} of the sizes; raise it or pass fewer rows"
        )
    check_same_shape(**{"block_tables[:, 0]": block_tables[:, 0], **of_requests})


def _of_tokens(batch: Batch, sizes: MetadataSizes) -> tuple[Array, Array]:
    return find_owners(batch, jnp.arange(sizes.max_num_batched_tokens, dtype=jnp.int32))
