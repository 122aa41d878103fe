"""What the Mosaic GPU kernels share: where they run, and how a page is cut.

Imported before anything knows whether Mosaic is there, so it must not import Mosaic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

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
ACCESS_BYTES = 16  # widest load or store of one thread
# Measured on an H200: a kernel over many buffers has code for each, and it runs at the
# speed at which instructions arrive. So a strip is short, and a loop runs over strips.
ACCESSES = 2  # of a thread per strip, when the page is large enough
ITEM_BYTES = 8192  # of a work item: enough to pay for finding it
GRID = 132 * 4  # thread blocks; more of them gain nothing on the largest Hopper part
MIN_JAX = (0, 11)


class Tiling(NamedTuple):
    """How a page is cut into strips, and strips gathered into work items.

    The last strip is shifted back to end with the page: it may overlap its neighbour,
    which writing the same bytes twice does not mind, and needs no tail code.
    """

    width: int  # elements per strip
    vector: int  # elements per access of one thread
    strips: int  # per page
    strips_per_item: int

    @property
    def items(self) -> int:
        """Work items per page."""
        return -(-self.strips // self.strips_per_item)


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
    """Can the kernels load and store this dtype?"""
    return dtype.name in DTYPES


def own_buffers(operands: Sequence[Array]) -> list[Array]:
    """The operands of a kernel, each at the start of a buffer.

    XLA passes a slice of a larger array on where it lies, if it lies at a multiple of 128
    bytes, and Mosaic takes multiples of 256 only; XLA cuts no slice through a barrier.
    """
    return lax.optimization_barrier(list(operands))


def tile_page(page: int, itemsize: int, alignment: int = 0) -> Tiling | None:
    """Cuts a page of ``page`` elements; None when it is too short for one warpgroup.

    alignment: what pages start at a multiple of, in elements; by default at their length.
    """
    vector = ACCESS_BYTES // itemsize
    while page % vector or alignment % vector or page < THREADS * vector:
        vector //= 2
        if vector == 0:
            return None
    widths = [THREADS * vector * n for n in range(ACCESSES, 0, -1) if page >= THREADS * vector * n]
    width = min(widths, key=lambda width: -(-page // width) * width)  # the least overlap
    strips = -(-page // width)
    items = max(1, round(strips * width * itemsize / ITEM_BYTES))
    return Tiling(width, vector, strips, -(-strips // items))


def count_items(pages: Array, num_blocks: int, num_ids: int) -> int:
    """Work items of one buffer: parts of a page of a listed block of an outer index.

    Raises:
      ValueError: more than the kernel counts.
    """
    rows, page = pages.shape
    if not rows * page * num_ids:
        return 0
    tiling = tile_page(page, pages.dtype.itemsize)
    items = rows // num_blocks * num_ids * (tiling.items if tiling else 1)
    if items > 2**31 - 1 - GRID:
        raise ValueError(
            f"{num_ids} block ids over {rows} pages are {items} work items, "
            "more than int32 counts; pass them in several calls"
        )
    return items
