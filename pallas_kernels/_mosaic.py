"""Code that Mosaic GPU kernels share: launches, operands of products, and strips of pages."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, core, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels import _capability
from pallas_kernels._tiling import Tiling

# jax annotates Mosaic's functions with classes that it does not export.
type Ref = Any  # a reference within a kernel; `jax.Ref` is none of these classes
type Layout = Any  # of an array in the registers of a warpgroup
# Shared memory or a barrier that a kernel asks for; None: not needed.
type Scratch = pl.MemoryRef | plgpu.Barrier | plgpu.ClusterBarrier | None

# Interpret mode supports neither wgmma with an operand in registers nor wgmma that accumulates.
# With False, operands go through shared memory, and sums are computed separately.
OPERANDS_IN_REGISTERS = True

if (forced := _capability.forced_capability()) is not None:
    # Mosaic then lowers for the other GPU, and ptxas compiles that for this one.
    utils._infer_arch = lambda: forced
    # A kernel with more is an error.
    core._SMEM_SIZE_BOUND = _capability.shared_memory_bytes()  # pyrefly: ignore[bad-assignment]


def call_kernel(
    kernel: Callable[..., None],
    *,
    name: str,
    num_thread_blocks: int,
    operands: Sequence[Array],
    refs: Sequence[Ref],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    approx_math: bool = False,
) -> Sequence[Array]:
    """Runs a kernel on thread blocks, numbered along the axis ``"cta"``.

    Args:
      kernel: takes references to operands, refs and outputs, in that order.
      operands: arrays that the kernel reads.
      refs: references that the kernel writes in place, as from `writable`; or arrays to read that
        another kernel returned.
      out_type: shapes of the arrays that the kernel fills, and that this function returns.
      approx_math: whether exponentials and roots may be off by an ulp or two.
    """
    call = plgpu.kernel(
        kernel,
        out_type=list(out_type),
        grid=(num_thread_blocks,),
        grid_names=("cta",),
        kernel_name=name,
        # No thread reads what another one wrote, so no barriers are needed.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=approx_math),
    )
    return call_unfused(call, operands, refs)


def call_unfused[T](
    call: Callable[..., T], operands: Sequence[Array], refs: Sequence[Ref] = ()
) -> T:
    """Calls a kernel on arrays that it reads and on references that it writes.

    On GPUs XLA fuses a call with the slices that it reads, and with the larger arrays that its
    results are written into. The fused call reads slices where they lie, at multiples of 128 bytes
    (Mosaic needs 256), and no longer knows which results are written in place: it returns memory
    that nobody wrote. Barriers around all that goes in and comes out keep XLA from fusing; for
    references they are in `writable` and `written`.
    """
    with jax.enable_x64(False):  # kernels count in int32, even for callers with x64
        return lax.optimization_barrier(call(*lax.optimization_barrier(list(operands)), *refs))


def writable(array: Array) -> jax.Ref:
    """Returns a reference to an array that kernels write in place; see `call_unfused`."""
    return jax.new_ref(lax.optimization_barrier(array))


def written(ref: jax.Ref) -> Array:
    """Returns what kernels wrote in place, and ends the reference; see `call_unfused`."""
    return lax.optimization_barrier(jax.freeze(ref))


def tiled(shape: tuple[int, ...], dtype: DTypeLike, align: int = 0) -> pl.MemoryRef:
    """Returns shared memory in the layout that wgmma and TMA need.

    Args:
      align: slices of columns begin at multiples of this many elements; 0: columns are not sliced.
    """
    item = jnp.dtype(dtype).itemsize
    return tiled_by(shape, dtype, math.gcd(128, (align or shape[-1]) * item))


def tiled_by(shape: tuple[int, ...], dtype: DTypeLike, swizzle: int) -> pl.MemoryRef:
    """Returns shared memory in tiles of 8 rows of ``swizzle`` bytes."""
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def add_by_mma(sums: Array, left: Array | Ref, right: Array | Ref) -> Array:
    """Returns float32 sums plus the product of two matrices, by mma, which all GPUs have.

    Args:
      sums: in the layout of wgmma, which mma shares.
      left, right: in shared memory, or loaded in the layouts of `plgpu.mma`.
    """
    layouts = plgpu.Layout.MMA_LHS(left.dtype), plgpu.Layout.MMA_RHS(right.dtype)
    operands = [
        ref if isinstance(ref, Array) else plgpu.load(ref, layout=layout)
        for ref, layout in zip((left, right), layouts, strict=True)
    ]
    return plgpu.mma(plgpu.layout_cast(sums, plgpu.Layout.MMA_ACC(left.dtype)), *operands)


def as_left(sums: Array) -> Array:
    """Returns 16-bit sums of mma, [64 n, m], as the left operand of another one.

    Their numbers lie in the same registers, but Mosaic does not know it.
    """
    if not OPERANDS_IN_REGISTERS:
        return sums
    layout: Any = plgpu.Layout.MMA_LHS(sums.dtype)
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def convert(_: Any, given: Any) -> Any:
        # Through integers: the new layout would be dropped if the registers were the same values.
        word = ir.IntegerType.get_signless(32)
        registers = np.empty(layout.to_mgpu().registers_shape(sums.shape), object)
        for i, register in enumerate(given.registers.flat):
            bits = utils.bitcast(register, word)
            registers.flat[i] = utils.bitcast(bits, register.type)
        return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return convert(sums)


def sync_warps() -> None:
    """Waits for all warps of a warpgroup, in a kernel without Mosaic's own barriers.

    For copies that follow reads; those that follow stores need `plgpu.commit_smem` from compute
    capability 9.0 on, which takes longer.
    """
    if not OPERANDS_IN_REGISTERS:
        return plgpu.commit_smem()

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        utils.warpgroup_barrier()

    wait()


def widen(array: Array, dtype: DTypeLike) -> Array:
    """Returns 8-bit numbers in 16 bits, also on GPUs without instructions for it."""
    if _capability.widens_8_bits(array.dtype):
        return array.astype(dtype)
    bits = lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint16)
    if array.dtype == jnp.int8:  # 1,024 plus the number and 128
        value = lax.bitcast_convert_type((bits ^ 0x80) | 0x6400, jnp.float16) - 1152
    elif array.dtype == jnp.float8_e5m2:  # the upper half of a float16
        value = lax.bitcast_convert_type(bits << 8, jnp.float16)
    else:
        magnitude = (bits & 0x7F) << 7  # of a float16, but for the bias of its exponent
        magnitude = lax.select(magnitude == 0x3F80, full_like(magnitude, 0x7E00), magnitude)  # NaN
        value = lax.bitcast_convert_type(magnitude | ((bits & 0x80) << 8), jnp.float16) * 2**8
    return value if dtype == jnp.float16 else value.astype(jnp.float32).astype(dtype)


def widen_finite(array: Array) -> Array:
    """Returns float8_e4m3fn as bfloat16, and 480 for NaN, which other conversions keep."""
    bits = lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint16)
    magnitude, sign = (bits & 0x7F) << 4, (bits & 0x80) << 8  # but for the bias of the exponent
    return lax.bitcast_convert_type(magnitude | sign, jnp.bfloat16) * 2.0**120


def widen_halves(array: Array) -> tuple[Array, Array]:
    """Returns the lower 4 bits of bytes less 8, and 16 times the same of the upper ones, as f16."""
    bits = array.astype(jnp.uint16)
    low, high = [
        lax.bitcast_convert_type((bits & mask) | 0x6400, jnp.float16)  # 1,024 plus the bits
        for mask in (0xF, 0xF0)
    ]
    return low - (1024 + 8), high - (1024 + 16 * 8)


def widen_halves_to_bf16(array: Array) -> tuple[Array, Array]:
    """Returns the lower 4 bits of bytes less 8, and the same of the upper ones, as bfloat16."""
    bits = array.astype(jnp.uint16)
    # There is no shift of two numbers at once, but there are products.
    high = lax.bitcast_convert_type((bits & 0xF0) | 0x6400, jnp.float16) * (1 / 16) + (1024 - 64)
    parts = bits, lax.bitcast_convert_type(high, jnp.uint16)
    low, high = [
        lax.bitcast_convert_type((part & 0xF) | 0x4300, jnp.bfloat16) - (128 + 8) for part in parts
    ]
    return low, high


def full_like(array: Array, value: float) -> Array:
    """Returns an array of one value, like another one of a kernel.

    jax's functions of this kind give it the sharding of a mesh, which kernels cannot take.
    """
    return lax.full(array.shape, value, array.dtype)


def load(ref: Ref, layout: Layout) -> Array:
    """Loads numbers as float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def store(ref: Ref, value: Array) -> None:
    """Stores a value whose size or layout does not allow an optimized store."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11 has no optimized store
        ref[...] = value


# Thread t of a warpgroup has 2 elements of every 8 columns in rows 16 * (t // 32) + t % 32 // 4,
# ``half`` 0, and 8 rows below them, ``half`` 1.
STORE_BEGIN = """{{
    .reg .b32 t, r, c; .reg .b64 at; .reg .pred p;
    mov.u32 t, %tid.x;
    and.b32 r, t, 96;
    shr.u32 r, r, 1;
    bfe.u32 c, t, 2, 3;
    add.u32 r, r, c;
    add.u32 r, r, {first};
    setp.lt.u32 p, r, {rows};
    and.b32 c, t, 3;
    mad.wide.u32 at, r, {row_bytes}, $0;
    mad.wide.u32 at, c, 8, at;
"""
STORE_PAIR = "    @p st.global.v2.f32 [at + {offset}], {{${low}, ${high}}};\n"


def store_first_rows(ref: Ref, value: Array) -> None:
    """Stores as many rows of float32 sums of wgmma, [64, n], as a reference to rows has."""
    rows, width = ref.shape
    if rows == value.shape[0]:
        return store(ref, value)
    if not OPERANDS_IN_REGISTERS:
        ref[...] = value[:rows]
        return None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def write(_: Any, target: Any, given: Any) -> None:
        strides, _ = target.type.get_strides_and_offset()
        registers = given.registers.reshape(width // 8, 2)
        for half in range(2 if rows > 8 else 1):
            words = [
                vector.extract(register, [], [i]) for register in registers[:, half] for i in (0, 1)
            ]
            code = STORE_BEGIN.format(first=8 * half, rows=rows, row_bytes=4 * strides[0])
            for i in range(width // 8):
                code += STORE_PAIR.format(offset=32 * i, low=2 * i + 1, high=2 * i + 2)
            utils.inline_ptx(code + "}", utils.memref_ptr(target), *words, has_side_effects=True)

    write(ref, value)


def strip_at(page: int, tiling: Tiling, strip: Array | int) -> pl.Slice:
    """Returns the slice of a strip in its page; strips beyond the last are the last one."""
    start = jnp.minimum(strip * tiling.width, page - tiling.width)
    return pl.ds(pl.multiple_of(start, tiling.vector), tiling.width)


def strip_layout(tiling: Tiling) -> Layout:
    """Returns the register layout of a strip in a warpgroup."""
    return plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)


def load_strip(page: Ref, strip: pl.Slice, tiling: Tiling) -> Array:
    """Loads a strip of a page, dtype[width]."""
    return plgpu.load(page.at[strip], layout=strip_layout(tiling))
