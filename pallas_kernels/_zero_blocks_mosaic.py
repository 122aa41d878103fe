"""The Mosaic GPU kernel of `zero_blocks`.

It stores registers to memory directly: bulk copies would need a descriptor for each buffer, which
costs more than they save.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._arguments import IdLists, PagedBuffer
from pallas_kernels._mosaic import strip_at, strip_layout
from pallas_kernels._tiling import tile_page
from pallas_kernels._work_items import Item, Task, launch, run_in_place


def zero_pages(buffers: Sequence[PagedBuffer], ids: IdLists) -> list[Array]:
    """Zeroes the listed blocks of every buffer, in one launch, and returns all pages."""

    def launch_all(tasks: Sequence[Task], refs: Sequence[jax.Ref]) -> None:
        launch("zero_blocks", _zero, ids, tasks, refs)

    return run_in_place(buffers, ids, launch_all)


def _zero(item: Item, lists: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    (block_ids,), (pages,) = lists, refs
    block_id = block_ids[item.entry]

    @pl.when((block_id >= 0) & (block_id < item.num_blocks))
    def _() -> None:
        _zero_part(pages.at[item.first_page + block_id], item.part)


def _zero_part(page: jax.Ref, part: Array) -> None:
    """Zeroes a part of a page, dtype[page]."""
    (size,), dtype = page.shape, page.dtype
    tiling = tile_page(size, dtype.itemsize)
    if tiling is None:

        @pl.loop(0, size)
        def _(i: Array) -> None:
            page[i] = jnp.zeros((), dtype)

        return
    begin = part * tiling.strips_per_item

    @pl.loop(begin, jnp.minimum(begin + tiling.strips_per_item, tiling.strips))
    def _(strip: Array) -> None:
        zeros = plgpu.layout_cast(jnp.zeros((tiling.width,), dtype), strip_layout(tiling))
        page[strip_at(size, tiling, strip)] = zeros
