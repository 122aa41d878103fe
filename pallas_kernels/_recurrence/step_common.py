"""Code that the parts of the kernel of a recurrent step share: layouts, loads, and its item."""

from typing import NamedTuple

from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Layout


def tile_layout(itemsize: int) -> Layout:
    """Returns the layout of a tile: 8 threads for a row, with 16 bytes of each 128."""
    n = 16 // itemsize
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((16, 8 * n), (4, 8 * n), (n,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def pair_layout() -> Layout:
    """Returns the layout of [n, 2] with one number for each thread, n a multiple of 64."""
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64, 2), (16, 2), (1,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


class Item(NamedTuple):
    """The value heads that a thread block computes, in int32 scalars and flags."""

    request: Array
    key_head: Array
    head: Array
    token: Array  # first of the request
    count: Array  # tokens of the request
    page: Array  # first row of the page to read
    is_known: Array  # whether there is such a page
    is_needed: Array  # whether there is anything to do
    tile: Array  # the first of a state's
