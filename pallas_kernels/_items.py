"""How the Mosaic GPU kernels over blocks share their work out: items, strips, one launch.

A work item is a part of a page of a listed block. Thread blocks stride over the items of
one buffer after the other, each going on where the last buffer ended. Knows nothing of
what is done to an item.

The buffers travel as mutable references, so a kernel writes into them and XLA hands the
same memory on: no copy under donation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic_gpu
from pallas_kernels._mosaic_gpu import Tiling, count_items, own_buffers, tile_page
from pallas_kernels._pages import Blocks

# No thread reads what another has written, so none waits for another.
PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)

Live = Sequence[tuple[Blocks, int]]  # the buffers that have work items, and how many
Lists = Sequence[tuple[Array, ...]]


class Item(NamedTuple):
    """A work item of one buffer: a part of a page of an entry of its lists."""

    entry: Any  # int32: which entry of the lists
    listed: Any  # int32: the same, counted on through the outer indices
    first_row: Any  # int32: row of block 0 of the outer index
    part: Any  # int32: which part of the page
    num_blocks: int  # of the buffer


Body = Callable[[Item, Sequence[Any], Sequence[Any]], None]


def on_live(
    work: Sequence[Blocks], lists: Lists, write: Callable[[Live, list[Any]], Any]
) -> list[Array]:
    """Runs ``write(live, refs)`` on references to the buffers that have work items.

    Returns:
      The pages of all buffers, what was written among them.
    """
    counts = [count_items(b.pages, b.num_blocks, lists[b.list_index][0].size) for b in work]
    live = [(blocks, count) for blocks, count in zip(work, counts, strict=True) if count]
    if not live:
        return [blocks.pages for blocks in work]
    refs = [jax.new_ref(blocks.pages) for blocks, _ in live]
    write(live, refs)
    written = iter([jax.freeze(ref) for ref in refs])
    return [
        next(written) if count else blocks.pages for blocks, count in zip(work, counts, strict=True)
    ]


def launch(
    name: str,
    body: Body,
    lists: Lists,
    live: Live,
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

    call = plgpu.kernel(
        kernel,
        out_type=list(out_type),
        grid=(grid,),
        grid_names=("cta",),
        kernel_name=name,
        compiler_params=PARAMETERS,
    )
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        return call(*own_buffers(ids), *operands)


def _run_items(body: Body, blocks: Blocks, count: int, lists, refs, first, grid: int) -> None:
    """Runs the items of one buffer that fall to this thread block."""
    tiling = tile_page(blocks.pages.shape[1], blocks.pages.dtype.itemsize)
    parts = tiling.items if tiling else 1
    num_entries = lists[0].shape[0]

    @pl.loop(first, count, step=grid)
    def _(index):
        listed = lax.div(index, parts)
        first_row = lax.div(listed, num_entries) * blocks.num_blocks
        entry, part = lax.rem(listed, num_entries), lax.rem(index, parts)
        body(Item(entry, listed, first_row, part, blocks.num_blocks), lists, refs)


def strip_at(page: int, tiling: Tiling, strip):
    """Where a strip lies in its page; strips beyond the last are the last one again."""
    start = jnp.minimum(strip * tiling.width, page - tiling.width)
    return pl.ds(pl.multiple_of(start, tiling.vector), tiling.width)


def layout_of(tiling: Tiling):
    """How the threads of a warpgroup hold a strip."""
    return plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)


def load_strip(ref, place, tiling: Tiling):
    return plgpu.load(ref.at[place], layout=layout_of(tiling))
