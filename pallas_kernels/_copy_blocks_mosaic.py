"""The Mosaic GPU kernels of `copy_blocks`.

Thread blocks run in no particular order. So a block that one pair overwrites and another copies is
first copied to a staging buffer, in a separate launch.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels._arguments import IdLists, PagedBuffer
from pallas_kernels._mosaic import load_strip, strip_at
from pallas_kernels._tiling import Tiling, tile_page
from pallas_kernels._work_items import Item, Task, launch, run_in_place

# Strips that a thread block loads before it stores the first one, so that the latencies of the
# loads overlap.
STRIPS = 2


def copy_pages(buffers: Sequence[PagedBuffer], ids: IdLists, *, disjoint: bool) -> list[Array]:
    """Copies the listed blocks of every buffer and returns all pages.

    Args:
      ids: lists of sources and destinations; a destination of -1 does nothing, and the ids of
        all other pairs are in range.
    """

    def launch_one(tasks: Sequence[Task], refs: Sequence[jax.Ref]) -> None:
        launch("copy_blocks", _copy, ids, tasks, refs)

    def launch_two(tasks: Sequence[Task], refs: Sequence[jax.Ref]) -> None:
        lists = [(*pairs, source_is_overwritten(*pairs)) for pairs in ids.lists]
        flagged = IdLists(lists, ids.num_ids)
        staging = [_staging_buffer(task) for task in tasks]
        staged = launch("copy_blocks", _stage, flagged, tasks, refs, staging)
        launch("copy_blocks", _copy_or_unstage, flagged, tasks, [*refs, *staged])

    return run_in_place(buffers, ids, launch_one if disjoint else launch_two)


def source_is_overwritten(sources: Array, destinations: Array) -> Array:
    """Returns int32[K], 1 for each pair whose source is overwritten by some pair."""
    overwritten = (sources[:, None] == destinations[None]).any(axis=1)
    return (overwritten & (destinations >= 0)).astype(jnp.int32)


def _staging_buffer(task: Task) -> jax.ShapeDtypeStruct:
    """Returns the shape of a buffer with a page for each listed page."""
    pages = task.buffer.pages
    return jax.ShapeDtypeStruct((task.buffer.outer * task.num_entries, pages.shape[1]), pages.dtype)


def _copy(item: Item, lists: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    sources, destinations = lists
    (pages,) = refs
    destination = destinations[item.entry]

    @pl.when(destination >= 0)
    def _() -> None:
        source = pages.at[item.first_page + sources[item.entry]]
        _copy_part(source, pages.at[item.first_page + destination], item.part)


def _stage(item: Item, lists: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    sources, _, overwritten = lists
    pages, staged = refs

    @pl.when(overwritten[item.entry] != 0)
    def _() -> None:
        source = pages.at[item.first_page + sources[item.entry]]
        _copy_part(source, staged.at[item.listed_page], item.part)


def _copy_or_unstage(item: Item, lists: Sequence[jax.Ref], refs: Sequence[jax.Ref]) -> None:
    sources, destinations, overwritten = lists
    pages, staged = refs
    is_staged = overwritten[item.entry] != 0

    @pl.when(~is_staged)
    def _() -> None:
        _copy(item, (sources, destinations), (pages,))

    @pl.when(is_staged)
    def _() -> None:
        destination = pages.at[item.first_page + destinations[item.entry]]
        _copy_part(staged.at[item.listed_page], destination, item.part)


def _copy_part(source: jax.Ref, destination: jax.Ref, part: Array) -> None:
    """Copies a part of a page to another page; references to dtype[page]."""
    (page,) = source.shape
    tiling = tile_page(page, source.dtype.itemsize)
    if tiling is not None:
        _copy_strips(source, destination, part, tiling)
        return

    @pl.loop(0, page)
    def _(i: Array) -> None:
        destination[i] = source[i]


def _copy_strips(source: jax.Ref, destination: jax.Ref, part: Array, tiling: Tiling) -> None:
    (page,) = source.shape
    strips = min(tiling.strips, tiling.strips_per_item)
    together = -(-strips // -(-strips // STRIPS))  # as many in each round
    begin = part * tiling.strips_per_item

    @pl.loop(begin, jnp.minimum(begin + tiling.strips_per_item, tiling.strips), step=together)
    def _(strip: Array) -> None:
        slices = [strip_at(page, tiling, strip + i) for i in range(together)]
        values = [load_strip(source, where, tiling) for where in slices]
        for where, value in zip(slices, values, strict=True):
            destination[where] = value
