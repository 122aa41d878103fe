"""The two arrays that a FlexAttention BlockMask and its mask function work with.

PyTorch's kernels walk *distinct pages of the pool* and ask a mask function about each
(query, slot of the pool). So each group's pages must be listed once even where requests
share them, and the mask function needs a dense way back from page to position.

Knows these forms only; `_metadata` knows which pages are seen.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.block_tables._index import bit, gather_bits, within
from jaxkv.flex_attention._metadata import PageLists, check_tables
from jaxkv.flex_attention._problems import BAD_PAGE_ID, TOO_MANY_PAGES
from jaxkv.flex_sizes import INT32_MAX, MetadataSizes
from jaxkv.jit_int32 import jit_int32


@jax.jit
def block_mask_indices(lists: PageLists) -> tuple[Array, Array, Array]:
    """Distinct pages per query group, ascending, as ``BlockMask.from_kv_blocks`` takes them.

    Sorts each list: temporaries are a few times [G, L], whatever the pool.

    Returns:
      ``kv_num_blocks`` int32[G], ``kv_indices`` int32[G, K] with K =
      ``sizes.block_mask_width`` (0 past the count), and int32[], the lists' problems and
      this function's, for `check_metadata`. The null page is never listed.
    """
    width = lists.sizes.block_mask_width
    pages = _sort(jnp.where(lists.pages > 0, lists.pages, INT32_MAX))
    again = jnp.pad(pages[:, 1:] == pages[:, :-1], ((0, 0), (1, 0)))
    pages = _sort(jnp.where(again, INT32_MAX, pages))
    counts = (pages < INT32_MAX).sum(axis=1, dtype=jnp.int32)
    problems = gather_bits(lists.problems, bit(TOO_MANY_PAGES, counts > width))
    pages = jnp.where(pages < INT32_MAX, pages, 0)[:, :width]
    return jnp.minimum(counts, width), pages, problems


@jit_int32("block_tables", "seq_lengths", static_argnames="sizes")
def physical_to_logical(
    block_tables: Array, seq_lengths: Array, *, sizes: MetadataSizes
) -> tuple[Array, Array]:
    """A dense map for mask functions that are given slots of the pool.

    It grows with requests times the pool, 4 bytes each; kernels that read `PageLists` or
    `PageCSR` need none.

    Args:
      block_tables: int32[B, W], 0 = null; B <= ``sizes.max_num_seqs``.
      seq_lengths: int32[B], tokens of each request, those computed now among them: its
        ``first_positions`` + ``lengths``. Pages past them are ignored.
      sizes: static.

    Returns:
      int32[B, num_blocks]: which page of request b a page of the pool is, -1 for none (the
      null page always); of several the last. And int32[], problems for `check_metadata`.
    """
    check_tables(block_tables, sizes, seq_lengths=seq_lengths)
    column = lax.broadcasted_iota(jnp.int32, block_tables.shape, 1)
    # Whether page c begins before the end: c * page_size could pass int32.
    last_page = jnp.where(seq_lengths > 0, (seq_lengths - 1) // sizes.page_size, -1)
    held = (column <= last_page[:, None]) & (block_tables != 0)
    known = within(block_tables, sizes.num_blocks)
    row = lax.broadcasted_iota(jnp.int32, block_tables.shape, 0)
    dropped = jnp.where(held & known, block_tables, sizes.num_blocks)
    empty = jnp.full((block_tables.shape[0], sizes.num_blocks), -1, jnp.int32)
    mapped = empty.at[row, dropped].max(column, mode="drop")
    return mapped, gather_bits(bit(BAD_PAGE_ID, held & ~known))


def _sort(pages: Array) -> Array:
    return lax.sort(pages, dimension=1, is_stable=False)
