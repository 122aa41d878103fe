"""The Mosaic GPU kernel of `write_rows`.

A thread block looks where a row goes and then moves it. What is loaded must be stored in
the same breath: carried past a branch, wide registers are taken apart into bytes.
"""

import math

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._items import PARAMETERS, load_strip, strip_at
from pallas_kernels._mosaic_gpu import Tiling, own_buffers, tile_page

STRIPS = 4  # of a row at most, per work item
GRID = 132 * 16  # a call moves little and waits for memory: as many as fit wait together


def write_pages(
    pages: Array, block_ids: Array, offsets: Array, rows: Array, *, align: int
) -> Array:
    """Writes rows into pages, in one launch. Offsets that are no multiple of align are -1."""
    (num_rows, n), page = rows.shape, pages.shape[1]
    if not rows.size:
        return pages
    tiling = tile_page(n, rows.dtype.itemsize, math.gcd(align, page))
    parts = -(-tiling.strips // STRIPS) if tiling else 1
    count = num_rows * parts
    grid = min(count, GRID)

    def kernel(ids_ref, offsets_ref, rows_ref, pages_ref):
        @pl.loop(lax.axis_index("cta"), count, step=grid)
        def _(index):
            row = lax.div(index, parts)
            block_id, offset = ids_ref[row], offsets_ref[row]
            inside = (block_id >= 0) & (block_id < pages.shape[0])
            inside &= (offset >= 0) & (offset <= page - n)

            @pl.when(inside)
            def _():
                target = pages_ref.at[block_id]
                _move(rows_ref.at[row], target, offset, tiling, lax.rem(index, parts), parts)

    launch = plgpu.kernel(
        kernel,
        grid=(grid,),
        grid_names=("cta",),
        kernel_name="write_rows",
        compiler_params=PARAMETERS,
    )
    ref = jax.new_ref(pages)
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        launch(*own_buffers([block_ids, offsets, rows]), ref)
    return jax.freeze(ref)


def _move(row_ref, page_ref, offset, tiling: Tiling | None, part, parts: int) -> None:
    """Moves a part of a row, dtype[n], to its place in a page, dtype[page]."""
    n = row_ref.shape[0]
    if tiling is None:
        pl.loop(0, n)(lambda i: page_ref.__setitem__(offset + i, row_ref[i]))
        return
    together = -(-tiling.strips // parts)
    places = [strip_at(n, tiling, part * together + i) for i in range(together)]
    values = [load_strip(row_ref, place, tiling) for place in places]
    # Spelled out for the compiler: it splits what it cannot see is aligned into bytes.
    offset = lax.div(offset, tiling.vector) * tiling.vector
    for place, value in zip(places, values, strict=True):
        start = pl.multiple_of(offset + place.start, tiling.vector)
        page_ref[pl.ds(start, tiling.width)] = value
