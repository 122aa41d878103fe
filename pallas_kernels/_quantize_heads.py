"""Keys and values of heads in the registers of a warpgroup: loaded, and quantised.

Some lanes of a warp have a head, 8 elements each; of 4 bits 8 of each half.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import TiledLayout
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Layout, Ref, full_like
from pallas_kernels._paged_attention.token_heads import BIAS, HIGHEST, LEAST, TokenHeadRow

ELEMENTS = 8  # of a thread, and bytes once they are quantised
WARPS, LANES = 4, 32
ROUNDER = 1.5 * 2**23  # its sum with a small float32 has the rounded number in its lowest bits


def layout_of(lanes: int) -> Layout:
    """Returns the layout of keys, [heads, 8 * lanes], in a warpgroup."""
    rows, width = LANES // lanes, ELEMENTS * lanes
    tiling = Tiling(((WARPS * rows, width), (rows, width), (1, ELEMENTS)))
    found = TiledLayout(tiling, (-6,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        found.tiling,
        warp_dims=found.warp_dims,
        lane_dims=found.lane_dims,
        vector_dim=found.vector_dim,
    )


def load(ref: Ref, heads: pl.Slice, row: TokenHeadRow, layout: Layout) -> list[Array]:
    """Returns keys, or values, as float32[heads, width]; of 4 bits their halves."""
    width = ref.shape[-1] // (1 + row.is_4_bit)
    starts = range(0, ref.shape[-1], width)
    parts = [ref.at[heads, pl.ds(start, width)] for start in starts]
    return [plgpu.load(part, layout=layout, optimized=False) for part in parts]


def quantize(halves: list[Array], row: TokenHeadRow, layout: Layout) -> tuple[Array, Array]:
    """Returns the bytes of keys, or of values, and their scales, as `TokenHeadRow.pack` has them.

    Args:
      halves: from `load`.

    Returns:
      int32[heads, bytes], of which the lowest 8 bits count, or fp8; and float32[heads].
    """
    halves, highest = [half.astype(jnp.float32) for half in halves], HIGHEST[row.packing]
    largest = [jnp.max(jnp.abs(half), axis=1) for half in halves]
    largest = jnp.maximum(*largest) if row.is_4_bit else largest[0]
    is_plain = (largest >= LEAST) & (largest < jnp.inf)
    zeros, ones, nans = (full_like(largest, value) for value in (0, 1, jnp.nan))
    factor = divide(highest, lax.select(is_plain, largest, ones), layout)
    factor = lax.select(is_plain, factor, zeros)
    scale = largest * jnp.float32(1 / highest)
    scale = lax.select(is_plain, scale, lax.select(largest < LEAST, zeros, nans))
    shape = halves[0].shape
    wide = plgpu.layout_cast(lax.broadcast_in_dim(factor, shape, (0,)), layout)
    if row.packing == "fp8_per_token_head":
        scaled = lax.select(wide > 0, halves[0] * wide, full_like(wide, 0))
        return scaled.astype(jnp.float8_e4m3fn), scale
    bias = BIAS * row.is_4_bit
    rounded = [round_products(half, wide, bias, layout) for half in halves]
    zeros = full_like(rounded[0], bias)
    rounded = [lax.select(wide > 0, one, zeros) for one in rounded]
    return (rounded[0] & 15) | (rounded[1] << 4) if row.is_4_bit else rounded[0], scale


def divide(numerator: float, denominators: Array, layout: Layout) -> Array:
    """Returns quotients, float32[heads], exactly rounded, as Mosaic's are not on GPUs."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return numerator / denominators
    code = f"div.rn.f32 $0, {_constant(numerator)}, $1;"
    return _compute(code, layout.reduce(1), denominators)


def round_products(left: Array, right: Array, more: int, layout: Layout) -> Array:
    """Returns rounded products plus an even number; their lowest 8 bits, in int32[heads, width]."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return jnp.round(left * right).astype(jnp.int32) + more
    # Else the sum would be of the product before it is rounded.
    code = f"""{{
        .reg .f32 product;
        mul.rn.f32 product, $1, $2;
        add.rn.f32 $0, product, {_constant(ROUNDER + more)};
    }}"""
    products = _compute(code, layout, left, right)
    return lax.bitcast_convert_type(products, jnp.int32)


def _constant(number: float) -> str:
    return f"0f{int(np.float32(number).view(np.uint32)):08X}"


def _compute(code: str, layout: Layout, *arrays: Array) -> Array:
    """Returns what instructions compute from the float32 of arrays, in their layout."""
    result = instructions.struct(arrays[0].shape, jnp.float32, layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=result)
    def compute(_: Any, *arrays: Any) -> Any:
        found = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            (count,) = ir.VectorType(registers[0].type).shape
            numbers = [
                llvm.inline_asm(
                    ir.F32Type.get(),
                    [instructions.extract(register, i) for register in registers],
                    code,
                    "=f" + ",f" * len(arrays),
                )
                for i in range(count)
            ]
            found.append(instructions.pack(numbers))
        return instructions.as_fragments(found, arrays[0].shape, jnp.float32, layout)

    return compute(*arrays)
