"""The Mosaic GPU kernel of `write_rows`.

A call moves little, so its time is that of waiting for memory: a thread block loads all
that it needs for a few items, ids and rows alike, before it stores the first.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic_gpu
from pallas_kernels._copy_mosaic import PARAMETERS, load_strip, strip_at
from pallas_kernels._mosaic_gpu import Tiling, tile_page

STRIPS = 4  # of a row at most, per work item
ITEMS = 2  # that a thread block loads together, once each has one


class Item(NamedTuple):
    """A part of a row on its way: where it goes, and its strips in registers."""

    row: Any
    block_id: Any
    offset: Any
    strips: list[tuple[Any, Any]]  # where each lies in its row, and what is in it


def write_pages(
    pages: Array, block_ids: Array, offsets: Array, rows: Array, *, align: int
) -> Array:
    """Writes rows into pages, in one launch."""
    (num_rows, n), page = rows.shape, pages.shape[1]
    if not rows.size:
        return pages
    tiling = tile_page(n, rows.dtype.itemsize, math.gcd(align, page))
    parts = -(-tiling.strips // STRIPS) if tiling else 1
    count = num_rows * parts
    together = min(ITEMS, -(-count // _mosaic_gpu.GRID))
    grid = min(-(-count // together), _mosaic_gpu.GRID)

    def kernel(ids_ref, offsets_ref, rows_ref, pages_ref):
        def load(index):
            row = lax.div(index, parts)
            strips = _load_strips(rows_ref.at[row], tiling, lax.rem(index, parts), parts)
            return Item(row, ids_ref[row], offsets_ref[row], strips)

        @pl.loop(lax.axis_index("cta"), count, step=grid * together)
        def _(first):
            # Beyond the last item comes the last again, which writes the same once more.
            indices = [jnp.minimum(first + i * grid, count - 1) for i in range(together)]
            for item in [load(index) for index in indices]:
                inside = _is_inside(item, pages.shape, n, align)
                pl.when(inside)(lambda item=item: _store(item, tiling, rows_ref, pages_ref))

    launch = plgpu.kernel(
        kernel,
        grid=(grid,),
        grid_names=("cta",),
        kernel_name="write_rows",
        compiler_params=PARAMETERS,
    )
    ref = jax.new_ref(pages)
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        launch(block_ids, offsets, rows, ref)
    return jax.freeze(ref)


def _load_strips(row_ref, tiling: Tiling | None, part, parts: int) -> list[tuple[Any, Any]]:
    """The strips of a part of a row; none when it is too short for one warpgroup."""
    if tiling is None:
        return []
    together = -(-tiling.strips // parts)
    strips = [part * together + i for i in range(together)]
    places = [strip_at(row_ref.shape[0], tiling, strip) for strip in strips]
    return [(place, load_strip(row_ref, place, tiling)) for place in places]


def _is_inside(item: Item, shape: tuple[int, ...], n: int, align: int):
    num_pages, page = shape
    inside = (item.block_id >= 0) & (item.block_id < num_pages)
    inside &= (item.offset >= 0) & (item.offset <= page - n)
    return inside & (lax.rem(item.offset, align) == 0) if align > 1 else inside


def _store(item: Item, tiling: Tiling | None, rows_ref, pages_ref) -> None:
    if tiling is None:

        @pl.loop(0, rows_ref.shape[1])
        def _(i):
            pages_ref[item.block_id, item.offset + i] = rows_ref[item.row, i]

        return
    # Spelled out for the compiler: it splits what it cannot see is aligned into bytes.
    offset = lax.div(item.offset, tiling.vector) * tiling.vector
    for place, value in item.strips:
        start = pl.multiple_of(offset + place.start, tiling.vector)
        pages_ref[item.block_id, pl.ds(start, tiling.width)] = value
