"""The pieces that all Mosaic GPU kernels share: their launch, and strips of pages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._tiling import Tiling


def call_kernel(
    kernel: Callable[..., None],
    *,
    name: str,
    num_thread_blocks: int,
    operands: Sequence[Array],
    refs: Sequence[Any],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
) -> Sequence[Array]:
    """Runs a kernel on thread blocks that are numbered along the axis ``"cta"``.

    Args:
      kernel: takes references to operands, refs and outputs, in that order.
      operands: arrays to read.
      refs: what the kernel writes in place, as from ``jax.new_ref``; or arrays to read that
        are known to start at their own buffer.
      out_type: arrays that the kernel fills and this function returns.
    """
    call = plgpu.kernel(
        kernel,
        out_type=list(out_type),
        grid=(num_thread_blocks,),
        grid_names=("cta",),
        kernel_name=name,
        # No thread reads what another has written, so none waits for another.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    with jax.enable_x64(False):  # kernels count in int32, whatever their caller does
        return call(*own_buffers(operands), *refs)


def own_buffers(operands: Sequence[Array]) -> list[Array]:
    """Returns the operands of a kernel, each at the start of a buffer.

    XLA passes a slice of a larger array on at its place there, which is a multiple of 128
    bytes, and Mosaic takes multiples of 256 only; XLA moves no slice through a barrier.
    """
    return lax.optimization_barrier(list(operands))


def strip_at(page: int, tiling: Tiling, strip: Array | int) -> pl.Slice:
    """Returns the place of a strip in its page; a strip beyond the last is the last one again."""
    start = jnp.minimum(strip * tiling.width, page - tiling.width)
    return pl.ds(pl.multiple_of(start, tiling.vector), tiling.width)


def strip_layout(tiling: Tiling) -> Any:
    """Returns how the threads of a warpgroup hold a strip."""
    return plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)


def load_strip(page: jax.Ref, place: pl.Slice, tiling: Tiling) -> Array:
    """Loads a strip of a page, dtype[width]."""
    return plgpu.load(page.at[place], layout=strip_layout(tiling))
