"""The Mosaic GPU kernel of `copy_blocks`.

Thread blocks run in no order, so a block that one pair overwrites and another copies is
first set aside, by a launch of its own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels._items import Item, Lists, Live, launch, load_strip, on_live, strip_at
from pallas_kernels._mosaic_gpu import Tiling, tile_page
from pallas_kernels._pages import Blocks

# Strips that a thread block loads before it stores the first: memory is far away, and
# loads that are under way together are waited for once.
STRIPS = 2

copy_launch = functools.partial(launch, "copy_blocks")


def copy_pages(work: Sequence[Blocks], pairs: Lists, *, disjoint: bool) -> list[Array]:
    """Copies the listed rows of every array of pages; a destination of -1 does nothing."""
    if disjoint:
        return on_live(work, pairs, functools.partial(copy_launch, _copy_directly, pairs))
    lists = [(*ids, _endangered(*ids)) for ids in pairs]

    def write(live: Live, refs: list[Any]) -> None:
        aside = copy_launch(_set_aside, lists, live, refs, _room_aside(live, lists))
        copy_launch(_copy, lists, live, [*refs, *aside])

    return on_live(work, pairs, write)


def _endangered(sources: Array, destinations: Array) -> Array:
    """int32[K], 1 for each pair whose source is overwritten by some pair."""
    overwritten = (sources[:, None] == destinations[None]) & (destinations >= 0)[None]
    return (overwritten.any(axis=1) & (destinations >= 0)).astype(jnp.int32)


def _room_aside(live: Live, lists: Sequence[tuple[Array, ...]]) -> list[jax.ShapeDtypeStruct]:
    """Per buffer a page for each pair of each outer index."""
    return [
        jax.ShapeDtypeStruct(
            (
                blocks.pages.shape[0] // blocks.num_blocks * lists[blocks.list_index][0].size,
                blocks.pages.shape[1],
            ),
            blocks.pages.dtype,
        )
        for blocks, _ in live
    ]


def _copy_directly(item: Item, lists, refs) -> None:
    sources, destinations = lists
    (pages,) = refs
    destination = destinations[item.entry]

    @pl.when(destination >= 0)
    def _():
        source = pages.at[item.first_row + sources[item.entry]]
        _copy_part(source, pages.at[item.first_row + destination], item.part)


def _set_aside(item: Item, lists, refs) -> None:
    sources, _, endangered = lists
    pages, aside = refs

    @pl.when(endangered[item.entry] != 0)
    def _():
        source = pages.at[item.first_row + sources[item.entry]]
        _copy_part(source, aside.at[item.listed], item.part)


def _copy(item: Item, lists, refs) -> None:
    *pairs, endangered = lists
    pages, aside = refs
    is_aside = endangered[item.entry] != 0
    pl.when(~is_aside)(lambda: _copy_directly(item, pairs, (pages,)))

    @pl.when(is_aside)
    def _():
        target = pages.at[item.first_row + pairs[1][item.entry]]
        _copy_part(aside.at[item.listed], target, item.part)


def _copy_part(source, target, part) -> None:
    """Copies a part of a page between references to pages, dtype[page]."""
    page = source.shape[0]
    tiling = tile_page(page, source.dtype.itemsize)
    if tiling is None:
        pl.loop(0, page)(lambda i: target.__setitem__(i, source[i]))
    else:
        _copy_strips(source, target, part, tiling)


def _copy_strips(source, target, part, tiling: Tiling) -> None:
    page = source.shape[0]
    strips = min(tiling.strips, tiling.strips_per_item)
    together = -(-strips // -(-strips // STRIPS))  # as many each time
    begin = part * tiling.strips_per_item

    @pl.loop(begin, jnp.minimum(begin + tiling.strips_per_item, tiling.strips), step=together)
    def _(strip):
        places = [strip_at(page, tiling, strip + i) for i in range(together)]
        values = [load_strip(source, place, tiling) for place in places]
        for place, value in zip(places, values, strict=True):
            target[place] = value
