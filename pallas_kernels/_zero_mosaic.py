"""The Mosaic GPU kernel of `zero_blocks`.

Registers are stored straight to memory: bulk copies need a descriptor per buffer, which
costs more than it saves.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._items import Item, Lists, launch, layout_of, on_live, strip_at
from pallas_kernels._mosaic_gpu import tile_page
from pallas_kernels._pages import Blocks


def zero_pages(work: Sequence[Blocks], lists: Lists, first_id: int) -> list[Array]:
    """Zeroes the listed rows of every array of pages, in one launch; ids from first_id on."""
    body = functools.partial(_zero, first_id)
    return on_live(work, lists, functools.partial(launch, "zero_blocks", body, lists))


def _zero(first_id: int, item: Item, lists, refs) -> None:
    ((ids,), (pages,)) = lists, refs
    block_id = ids[item.entry]

    @pl.when((block_id >= first_id) & (block_id < item.num_blocks))
    def _():
        _zero_part(pages, item.first_row + block_id, item.part)


def _zero_part(pages, row, part) -> None:
    """Zeroes a part of one row of pages."""
    page, dtype = pages.shape[1], pages.dtype
    tiling = tile_page(page, dtype.itemsize)
    if tiling is None:
        pl.loop(0, page)(lambda i: pages.__setitem__((row, i), jnp.zeros((), dtype)))
        return
    begin = part * tiling.strips_per_item

    @pl.loop(begin, jnp.minimum(begin + tiling.strips_per_item, tiling.strips))
    def _(strip):
        zeros = plgpu.layout_cast(jnp.zeros((tiling.width,), dtype), layout_of(tiling))
        pages[row, strip_at(page, tiling, strip)] = zeros
