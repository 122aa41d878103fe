"""The Mosaic GPU kernel of `copy_blocks`, and how Mosaic kernels move elements.

The buffers travel as mutable references, as in `_zero_mosaic`. Thread blocks run in no
order, so a block that one pair overwrites and another copies is first set aside, by a
launch of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic_gpu
from pallas_kernels._mosaic_gpu import Tiling, count_items, tile_page
from pallas_kernels._pages import Blocks

# Strips that a thread block loads before it stores the first: memory is far away, and
# loads that are under way together are waited for once.
STRIPS = 2
# No thread reads what another has written, so none waits for another.
PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)

Live = Sequence[tuple[Blocks, int]]  # the buffers that have work items, and how many


class Item(NamedTuple):
    """A work item of one buffer: a part of a page of a pair of an outer index."""

    pair: Any  # int32: which pair of the lists
    listed: Any  # int32: the same, counted on through the outer indices
    first_row: Any  # int32: row of block 0 of the outer index
    part: Any  # int32: which part of the page


def copy_pages(
    work: Sequence[Blocks], pairs: Sequence[tuple[Array, ...]], *, disjoint: bool
) -> list[Array]:
    """Copies the listed rows of every array of pages; a destination of -1 does nothing."""
    counts = [count_items(b.pages, b.num_blocks, pairs[b.list_index][0].size) for b in work]
    live = [(blocks, count) for blocks, count in zip(work, counts, strict=True) if count]
    if not live:
        return [blocks.pages for blocks in work]
    refs = [jax.new_ref(blocks.pages) for blocks, _ in live]
    if disjoint:
        _launch(_copy_directly, live, pairs, refs)
    else:
        lists = [(*ids, _endangered(*ids)) for ids in pairs]
        aside = _launch(_set_aside, live, lists, refs, _room_aside(live, lists))
        _launch(_copy, live, lists, [*refs, *aside])
    copied = iter([jax.freeze(ref) for ref in refs])
    return [
        next(copied) if count else blocks.pages for blocks, count in zip(work, counts, strict=True)
    ]


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


def _launch(
    body: Callable[..., None],
    live: Live,
    lists: Sequence[tuple[Array, ...]],
    operands: Sequence[Any],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Sequence[Array]:
    """Runs ``body(item, lists, refs)`` for every work item of every buffer, in one launch.

    operands: what the kernel works on, all buffers' first arrays before their second.
    """
    ids = [ids for named in lists for ids in named]
    per_list = len(lists[0])
    grid = min(sum(count for _, count in live), _mosaic_gpu.GRID)

    def kernel(*args):
        id_refs, refs = args[: len(ids)], args[len(ids) :]
        first = lax.axis_index("cta")
        for i, (blocks, count) in enumerate(live):
            start = blocks.list_index * per_list
            listed = id_refs[start : start + per_list]
            _run_items(body, blocks, count, listed, refs[i :: len(live)], first, grid)
            first = lax.rem(first + grid - count % grid, grid)  # go on where this one ended

    launch = plgpu.kernel(
        kernel,
        out_type=list(out_type),
        grid=(grid,),
        grid_names=("cta",),
        kernel_name="copy_blocks",
        compiler_params=PARAMETERS,
    )
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        return launch(*ids, *operands)


def _run_items(
    body: Callable[..., None], blocks: Blocks, count: int, lists, refs, first, grid: int
) -> None:
    """Runs the items of one buffer that fall to this thread block."""
    tiling = tile_page(blocks.pages.shape[1], blocks.pages.dtype.itemsize)
    parts = tiling.items if tiling else 1
    num_pairs = lists[0].shape[0]

    @pl.loop(first, count, step=grid)
    def _(index):
        listed = lax.div(index, parts)
        first_row = lax.div(listed, num_pairs) * blocks.num_blocks
        item = Item(lax.rem(listed, num_pairs), listed, first_row, lax.rem(index, parts))
        body(item, lists, refs)


def _copy_directly(item: Item, lists, refs) -> None:
    sources, destinations = lists
    (pages,) = refs
    destination = destinations[item.pair]

    @pl.when(destination >= 0)
    def _():
        source = pages.at[item.first_row + sources[item.pair]]
        _copy_part(source, pages.at[item.first_row + destination], item.part)


def _set_aside(item: Item, lists, refs) -> None:
    sources, _, endangered = lists
    pages, aside = refs

    @pl.when(endangered[item.pair] != 0)
    def _():
        source = pages.at[item.first_row + sources[item.pair]]
        _copy_part(source, aside.at[item.listed], item.part)


def _copy(item: Item, lists, refs) -> None:
    *pairs, endangered = lists
    pages, aside = refs
    is_aside = endangered[item.pair] != 0
    pl.when(~is_aside)(lambda: _copy_directly(item, pairs, (pages,)))

    @pl.when(is_aside)
    def _():
        target = pages.at[item.first_row + pairs[1][item.pair]]
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


def strip_at(page: int, tiling: Tiling, strip):
    """Where a strip lies in its page; strips beyond the last are the last one again."""
    start = jnp.minimum(strip * tiling.width, page - tiling.width)
    return pl.ds(pl.multiple_of(start, tiling.vector), tiling.width)


def load_strip(ref, place, tiling: Tiling):
    layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)
    return plgpu.load(ref.at[place], layout=layout)
