"""The Mosaic GPU kernel of `write_rows`.

A thread block looks up the page of a row, and then moves the row. Load and store are in the same
basic block, because the compiler splits registers that cross a branch into bytes.
"""

import math

import jax
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _capability
from pallas_kernels._mosaic import call_kernel, load_strip, strip_at, writable, written
from pallas_kernels._tiling import Tiling, tile_page

STRIPS = 4  # per work item, at most
# A call moves few bytes and mostly waits for memory, so as many thread blocks run as fit.
THREAD_BLOCKS_PER_SM = 16


def write_pages(
    pages: Array, block_ids: Array, offsets: Array, rows: Array, *, align: int
) -> Array:
    """Writes rows into pages, in one launch; rows that do not lie within a page do nothing.

    Args:
      offsets: int32[T], multiples of ``align`` or negative.
    """
    (num_rows, n), (num_pages, page) = rows.shape, pages.shape
    if not rows.size:
        return pages
    tiling = tile_page(n, rows.dtype.itemsize, math.gcd(align, page))
    parts = -(-tiling.strips // STRIPS) if tiling else 1
    num_items = num_rows * parts
    grid = min(num_items, _capability.max_thread_blocks(THREAD_BLOCKS_PER_SM))

    def kernel(
        ids_ref: jax.Ref, offsets_ref: jax.Ref, rows_ref: jax.Ref, pages_ref: jax.Ref
    ) -> None:
        @pl.loop(lax.axis_index("cta"), num_items, step=grid)
        def _(index: Array) -> None:
            row, part = lax.div(index, parts), lax.rem(index, parts)
            block_id, offset = ids_ref[row], offsets_ref[row]
            inside = (block_id >= 0) & (block_id < num_pages)
            inside &= (offset >= 0) & (offset <= page - n)

            @pl.when(inside)
            def _() -> None:
                _move_part(rows_ref.at[row], pages_ref.at[block_id], offset, tiling, part, parts)

    ref = writable(pages)
    call_kernel(
        kernel,
        name="write_rows",
        num_thread_blocks=grid,
        operands=[block_ids, offsets, rows],
        refs=[ref],
    )
    return written(ref)


def _move_part(
    row: jax.Ref, page: jax.Ref, offset: Array, tiling: Tiling | None, part: Array, parts: int
) -> None:
    """Transfers a part of a row, dtype[n], to its slot in a page, dtype[page]."""
    (n,) = row.shape
    if tiling is None:

        @pl.loop(0, n)
        def _(i: Array) -> None:
            page[offset + i] = row[i]

        return
    together = -(-tiling.strips // parts)
    strips = [strip_at(n, tiling, part * together + i) for i in range(together)]
    values = [load_strip(row, strip, tiling) for strip in strips]
    # Shows the compiler the alignment, without which it splits the store into bytes.
    offset = lax.div(offset, tiling.vector) * tiling.vector
    for strip, value in zip(strips, values, strict=True):
        start = pl.multiple_of(offset + strip.start, tiling.vector)
        page[pl.ds(start, tiling.width)] = value
