"""The Mosaic GPU kernel of `zero_blocks`.

The buffers travel as mutable references, so the kernel writes into them and XLA hands
the same memory on: no copy under donation. Registers are stored straight to memory: bulk
copies need a descriptor per buffer, which costs more than it saves.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._copy_mosaic import PARAMETERS
from pallas_kernels._mosaic_gpu import GRID, count_items, tile_page
from pallas_kernels._pages import Blocks


def zero_pages(work: Sequence[Blocks], ids: Sequence[Array], first_id: int) -> list[Array]:
    """Zeroes the listed rows of every array of pages, in one launch; ids from first_id on."""
    counts = [count_items(b.pages, b.num_blocks, ids[b.list_index].size) for b in work]
    live = [(blocks, count) for blocks, count in zip(work, counts, strict=True) if count]
    if not live:
        return [blocks.pages for blocks in work]
    refs = [jax.new_ref(blocks.pages) for blocks, _ in live]
    grid = min(sum(counts), GRID)

    def kernel(*args):
        id_refs, page_refs = args[: len(ids)], args[len(ids) :]
        first = lax.axis_index("cta")
        for (blocks, count), ref in zip(live, page_refs, strict=True):
            _zero_one(blocks, count, id_refs[blocks.list_index], ref, first_id, first, grid)
            first = lax.rem(first + grid - count % grid, grid)  # go on where this one ended

    launch = plgpu.kernel(
        kernel,
        grid=(grid,),
        grid_names=("cta",),
        kernel_name="zero_blocks",
        compiler_params=PARAMETERS,
    )
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        launch(*ids, *refs)
    zeroed = iter([jax.freeze(ref) for ref in refs])
    return [
        next(zeroed) if count else blocks.pages for blocks, count in zip(work, counts, strict=True)
    ]


def _zero_one(
    blocks: Blocks, count: int, ids_ref, pages_ref, first_id: int, first, grid: int
) -> None:
    """Zeroes the parts of one buffer that fall to this thread block."""
    page, dtype = blocks.pages.shape[1], blocks.pages.dtype
    num_ids = ids_ref.shape[0]
    tiling = tile_page(page, dtype.itemsize)

    def zero_item(row, part):
        if tiling is None:
            pl.loop(0, page)(lambda i: pages_ref.__setitem__((row, i), jnp.zeros((), dtype)))
            return
        layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)
        begin = part * tiling.strips_per_item

        @pl.loop(begin, jnp.minimum(begin + tiling.strips_per_item, tiling.strips))
        def _(strip):
            start = jnp.minimum(strip * tiling.width, page - tiling.width)
            start = pl.multiple_of(start, tiling.vector)
            zeros = plgpu.layout_cast(jnp.zeros((tiling.width,), dtype), layout)
            pages_ref[row, pl.ds(start, tiling.width)] = zeros

    @pl.loop(first, count, step=grid)
    def _(item):
        parts = tiling.items if tiling else 1
        listed = lax.div(item, parts)
        block_id = ids_ref[lax.rem(listed, num_ids)]
        row = lax.div(listed, num_ids) * blocks.num_blocks + block_id

        @pl.when((block_id >= first_id) & (block_id < blocks.num_blocks))
        def _():
            zero_item(row, lax.rem(item, parts))
