"""Mosaic GPU kernels (Hopper and newer; jax >= 0.11). Imported lazily where heavy.

The buffers travel as mutable references, so the kernel writes into them and XLA hands
the same memory on: no copy under donation.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from pallas_kernels.zero_blocks import Blocks

DTYPES = (
    "float32",
    "int32",
    "uint32",
    "bfloat16",
    "float16",
    "int16",
    "uint16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
)
THREADS = 128  # one warpgroup
STORE_BYTES = 16  # widest store of one thread
STORES = 8  # stores of a thread per work item, when the page is large enough
MAX_GRID = 132 * 16  # enough to fill the largest Hopper part; work items stride over it
MIN_JAX = (0, 11)


class Tiling(NamedTuple):
    """How a page is cut. The last tile is shifted back to end with the page: it may
    overlap its neighbour, which zeroing does not mind, and needs no tail code."""

    width: int  # elements per tile
    vector: int  # elements per store of one thread
    tiles: int  # per page


def why_unsupported(any_platform: bool = False) -> str | None:
    """Why the kernels cannot run on the default device; None when they can.

    any_platform: do not object to a machine without a GPU, so that tests can lower for
      CUDA or interpret.
    """
    if jax.__version_info__ < MIN_JAX:
        return f"Mosaic kernels need jax >= 0.11, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return None if any_platform else "the default device is no GPU"
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < 9.0:
        return f"Mosaic kernels need compute capability 9.0, this GPU has {capability}"
    return None


def stores(dtype: jnp.dtype) -> bool:
    """Can the kernel store this dtype?"""
    return dtype.name in DTYPES


def tile_page(page: int, itemsize: int) -> Tiling | None:
    """Cuts a page of ``page`` elements; None when it is too short for one warpgroup."""
    vector = STORE_BYTES // itemsize
    while page % vector or page < THREADS * vector:
        vector //= 2
        if vector == 0:
            return None
    stores = STORES
    while page < THREADS * vector * stores:
        stores //= 2
    width = THREADS * vector * stores
    return Tiling(width, vector, -(-page // width))


def zero_pages(work: "Sequence[Blocks]", ids: Sequence[Array]) -> list[Array]:
    """Zeroes the listed rows of every array of pages, in one launch."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    counts = [_num_items(blocks, ids[blocks.list_index].size) for blocks in work]
    live = [(blocks, count) for blocks, count in zip(work, counts, strict=True) if count]
    if not live:
        return [blocks.pages for blocks in work]
    refs = [jax.new_ref(blocks.pages) for blocks, _ in live]
    grid = min(sum(counts), MAX_GRID)

    def kernel(*args):
        id_refs, page_refs = args[: len(ids)], args[len(ids) :]
        first = lax.axis_index("cta")
        for (blocks, count), ref in zip(live, page_refs, strict=True):
            _zero_one(blocks, count, id_refs[blocks.list_index], ref, first, grid)
            first = lax.rem(first + grid - count % grid, grid)  # go on where this one ended

    launch = plgpu.kernel(kernel, grid=(grid,), grid_names=("cta",), kernel_name="zero_blocks")
    with jax.enable_x64(False):  # the kernel counts in int32, whatever its caller does
        launch(*ids, *refs)
    zeroed = iter([jax.freeze(ref) for ref in refs])
    return [
        next(zeroed) if count else blocks.pages for blocks, count in zip(work, counts, strict=True)
    ]


def _num_items(blocks: "Blocks", num_ids: int) -> int:
    """Work items of one buffer: a tile of a page of a listed block of an outer index."""
    rows, page = blocks.pages.shape
    if not rows * page * num_ids:
        return 0
    tiling = tile_page(page, blocks.pages.dtype.itemsize)
    items = rows // blocks.num_blocks * num_ids * (tiling.tiles if tiling else 1)
    if items > 2**31 - 1 - MAX_GRID:
        raise ValueError(
            f"block_ids: {num_ids} ids over {rows} pages are {items} work items, "
            "more than int32 counts; zero them in several calls"
        )
    return items


def _zero_one(blocks: "Blocks", count: int, ids_ref, pages_ref, first, grid: int) -> None:
    """Zeroes the tiles of one buffer that fall to this thread block."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    page, dtype = blocks.pages.shape[1], blocks.pages.dtype
    num_ids = ids_ref.shape[0]
    tiling = tile_page(page, dtype.itemsize)

    def store(row, tile):
        if tiling is None:
            pl.loop(0, page)(lambda i: pages_ref.__setitem__((row, i), jnp.zeros((), dtype)))
            return
        layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)
        start = jnp.minimum(tile * tiling.width, page - tiling.width)
        start = pl.multiple_of(start, tiling.vector)
        zeros = plgpu.layout_cast(jnp.zeros((tiling.width,), dtype), layout)
        pages_ref[row, pl.ds(start, tiling.width)] = zeros

    @pl.loop(first, count, step=grid)
    def _(item):
        tiles = tiling.tiles if tiling else 1
        listed = lax.div(item, tiles)
        block_id = ids_ref[lax.rem(listed, num_ids)]
        row = lax.div(listed, num_ids) * blocks.num_blocks + block_id

        @pl.when((block_id >= 0) & (block_id < blocks.num_blocks))
        def _():
            store(row, lax.rem(item, tiles))
