"""Writes of rows of elements into the pages of an array, in place under donation.

A paged cache stores tokens this way: a row is what one token adds to one block.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, Shaped

from pallas_kernels._arguments import PagedBuffer, as_array, as_ids
from pallas_kernels._bitcast import as_integers, as_words, from_words
from pallas_kernels._capability import Implementation
from pallas_kernels._dispatch import run
from pallas_kernels._in_place import write_extents

SHORT_BYTES = 512  # of a row; XLA's scatter writes shorter ones at least as fast (on an H200)

Rows = tuple[Array, Array, Array]  # block_ids, offsets, rows


def write_rows(
    pages: Shaped[Array, "blocks page"],
    block_ids: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    rows: Shaped[Array, "rows elements"],
    *,
    align: int = 1,
    implementation: Implementation | None = None,
) -> Shaped[Array, "blocks page"]:
    """Writes ``rows[i]`` to ``pages[block_ids[i], offsets[i] : offsets[i] + n]``.

    Example::

        pages = jnp.zeros((4, 32))                             # 4 blocks of 8 tokens of 4 elements
        block_ids, tokens = jnp.array([2, 2], jnp.int32), jnp.array([0, 1], jnp.int32)
        rows = jnp.ones((2, 4))
        pages = pallas_kernels.write_rows(pages, block_ids, 4 * tokens, rows, align=4)

    Args:
      pages: any shape and dtype.
      block_ids: the page of each row. A row is ignored if its id is out of range, so lists can be
        padded with -1.
      offsets: the first element of each row within its page. A row is ignored if it does not lie
        within the page, or if its offset is not a multiple of ``align``. Rows must not overlap; the
        content of an overlap is unspecified.
      rows: in the dtype of ``pages``.
      align: a divisor of every offset, in elements. ``"mosaic_gpu"`` is fastest if ``align``, a row
        and a page are multiples of 16 bytes.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best (XLA for rows of less than
        512 bytes); see `pallas_kernels`.

    Returns:
      The pages, same shape and dtype.

    Raises:
      TypeError: ids or offsets that are not int32, rows of another dtype than pages, or
        a dtype that the implementation cannot store.
      ValueError: an unknown implementation, shapes that do not fit, or ``align`` < 1.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    pages, rows = as_array("pages", pages), as_array("rows", rows)
    ids, offsets = as_ids(block_ids, "block_ids"), as_ids(offsets, "offsets")
    _check(pages, ids, offsets, rows, align)
    if implementation is None and rows.shape[1] * rows.dtype.itemsize < SHORT_BYTES:
        implementation = "xla"
    if not pages.size or not rows.size:
        rows, ids, offsets = rows[:0], ids[:0], offsets[:0]
    (written,) = run(
        [PagedBuffer(pages, num_blocks=pages.shape[0])],
        (ids, offsets, rows),
        implementation,
        kernel="write_rows",
        mosaic_gpu=functools.partial(_write_mosaic, align=align),
        xla=functools.partial(_write_xla, align=align),
    )
    return written


def _check(pages: Array, block_ids: Array, offsets: Array, rows: Array, align: int) -> None:
    if pages.ndim != 2:
        raise ValueError(f"pages must be dtype[N, page], got shape {pages.shape}")
    if rows.ndim != 2 or rows.shape[1] > pages.shape[1]:
        raise ValueError(
            f"rows must be dtype[T, n] with n <= {pages.shape[1]} elements of a page, "
            f"got shape {rows.shape}"
        )
    if rows.dtype != pages.dtype:
        raise TypeError(f"rows must be {pages.dtype}, the dtype of pages, got {rows.dtype}")
    if not len(block_ids) == len(offsets) == len(rows):
        raise ValueError(
            f"block_ids, offsets and rows must have one length, got {len(block_ids)}, "
            f"{len(offsets)} and {len(rows)}"
        )
    check_align(align)


def check_align(align: int) -> None:
    """Raises TypeError or ValueError for what is no alignment."""
    if not isinstance(align, int):
        raise TypeError(f"align must be an int, got {align!r}")
    if align < 1:
        raise ValueError(f"align must be at least 1, got {align}")


def _write_mosaic(buffers: list[PagedBuffer], operands: Rows, *, align: int) -> list[Array]:
    from pallas_kernels._write_rows_mosaic import write_pages

    (buffer,), (ids, offsets, rows) = buffers, operands
    pages = buffer.pages
    multiple = math.gcd(align, rows.shape[1], pages.shape[1])
    words, row_words = as_words(pages, multiple), as_words(rows, multiple)
    # Rows whose offset is not a multiple of ``align`` are ignored, so the division is exact.
    ratio = pages.shape[1] // words.shape[1] if words.size else 1
    offsets = jnp.where(offsets % align == 0, offsets // ratio, -1)
    written = write_pages(words, ids, offsets, row_words, align=max(1, align // ratio))
    return [from_words(written, pages)]


def _write_xla(buffers: list[PagedBuffer], operands: Rows, *, align: int) -> list[Array]:
    (buffer,), (block_ids, offsets, rows) = buffers, operands
    block_ids = jnp.where(offsets % align == 0, block_ids, -1)
    pages, rows = as_integers(buffer.pages), as_integers(rows)
    written = write_extents(pages, block_ids, offsets, rows)
    return [lax.bitcast_convert_type(written, buffer.pages.dtype)]
