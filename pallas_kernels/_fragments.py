"""Operands of mma made of numbers of 8 and 4 bits in shared memory, and sums of single warps.

Each of the four warps of a warpgroup has 16 of 64 rows for itself, and sums of its own. An array
that has a part for each warp has them side by side in its first axis, 16 rows of each warp in
turn. Registers come from ldmatrix, which moves pairs of bytes, so that even and odd
columns of 16 lie apart; `interleave` orders the other operand alike. Interpret mode has one warp,
which does the same with arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import _capability, _mosaic
from pallas_kernels import _instructions as instructions
from pallas_kernels._mosaic import Ref, widen_finite
from pallas_kernels._warp_rows import GROUP, ROWS, WORDS

NARROW: Any = plgpu.Layout.WGMMA_8BIT
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# Sums whose rows come in pairs, as bytes did.
PAIRED: Any = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (2, 8), (2,))),
    warp_dims=(-7,),
    lane_dims=(-5, -2),
    vector_dim=-1,
)


def warps() -> int:
    """Returns the parts of arrays that have one for each warp."""
    return 4 if _mosaic.OPERANDS_IN_REGISTERS else 1


def unit() -> float:
    """Returns what numbers are multiplied by that become float16 by their bits alone."""
    return 2.0**-24 if _mosaic.OPERANDS_IN_REGISTERS else 1.0


class Encoding(NamedTuple):
    """The number that operands hold for another one: ``factor * (number + bias)``."""

    factor: float
    bias: float


def encodings(page: jnp.dtype, is_4_bit: bool, *, values: bool) -> list[Encoding]:
    """Returns the encodings of `as_keys` or `as_values`, one or two of 4 bits."""
    if is_4_bit:
        return [Encoding(unit(), 8), Encoding(16 * unit(), 8)]
    if page == jnp.int8:
        return [Encoding(unit(), 128)]
    shifted = (values or not _capability.widens_8_bits(page)) and _mosaic.OPERANDS_IN_REGISTERS
    return [Encoding(2.0**-8 if shifted else 1.0, 0)]


def interleave(array: Array, page: jnp.dtype, is_4_bit: bool) -> Array:
    """Returns an array with its last axis as the columns of `as_keys` want it.

    In their order, and divided by 16 where these are multiplied by it.
    """
    if is_4_bit:
        low, high = jnp.split(array, 2, axis=-1)
        array = jnp.concatenate([low, high * (1 / 16)], axis=-1)
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return array
    together = (
        2 if page == jnp.float8_e4m3fn and _capability.widens_8_bits(page) else 1
    )  # are converted together
    parts = array.reshape(*array.shape[:-1], -1, 16 // 2 // together, 2, together)
    return jnp.swapaxes(parts, -3, -2).reshape(array.shape)


def as_keys(words: Array, page: jnp.dtype, is_4_bit: bool) -> list[Array]:
    """Returns what `load_words` loaded as left operands float16[64, 32], see `encodings`."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return _encode(words, page, is_4_bit)
    shape = ROWS, GROUP
    if page == jnp.float8_e4m3fn:
        convert_fp8 = _fp8_pairs if _capability.widens_8_bits(page) else _fp8_bits
        return _convert(words, convert_fp8, (0, 2, 1, 3), shape, 1)
    convert, count = (_halves, 2) if is_4_bit else (_bytes, 1)
    return _convert(words, convert, (0, 2, 1, 3), shape, count)


def as_values(words: Array, page: jnp.dtype, is_4_bit: bool) -> list[Array]:
    """Returns what `load_words` loaded as left operands float16[warps x 32, 64 / warps]."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return [part.T for part in _encode(words, page, is_4_bit)]
    shape = 4 * GROUP, ROWS // 4
    if page == jnp.float8_e4m3fn:
        return _convert(words, _fp8_bits, (0, 1, 2, 3), shape, 1)
    convert, count = (_halves, 2) if is_4_bit else (_bytes, 1)
    return _convert(words, convert, (0, 1, 2, 3), shape, count)


def widen_fours(array: Array) -> Array:
    """Returns float8_e4m3fn [64, n] in float32, NaN as 480, by the bits of four numbers at once.

    For GPUs without instructions for it; in the layout `NARROW`.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return widen_finite(array).astype(jnp.float32)
    result = instructions.struct(array.shape, jnp.float32, NARROW)

    @plgpu.inline_mgpu(arg_types=(NARROW,), return_type=result)
    def run(_: Any, given: Any) -> Any:
        kind, found = ir.F32Type.get(), list[Any]()
        for register in given.registers.flat:
            word = utils.bitcast(register, instructions.word_type())
            even, odd = [
                arith.ori(
                    instructions.mask(magnitude, 0x07F007F0), instructions.mask(sign, 0x80008000)
                )
                for magnitude, sign in (
                    (instructions.shift_left(word, 4), instructions.shift_left(word, 8)),
                    (instructions.shift(word, 4), word),
                )
            ]
            lower = [instructions.shift_left(pair, 16) for pair in (even, odd)]
            upper = [instructions.mask(pair, 0xFFFF0000) for pair in (even, odd)]
            numbers = [utils.bitcast(bits, kind) for bits in (*lower, *upper)]
            bias = arith.constant(kind, ir.FloatAttr.get(kind, 2.0**120))  # of the exponents
            found.append(instructions.pack([arith.mulf(one, bias) for one in numbers]))
        return instructions.as_fragments(found, result.shape, jnp.float32, NARROW)

    return run(array)


def _encode(words: Array, page: jnp.dtype, is_4_bit: bool) -> list[Array]:
    if is_4_bit:
        bits = words.astype(jnp.int32)
        return [(bits & mask).astype(jnp.float16) for mask in (0xF, 0xF0)]
    if page == jnp.int8:
        return [words.astype(jnp.float16) + 128]
    finite = widen_finite(words).astype(jnp.float16)
    return [finite]


def highest_of_warps(scores: Array) -> Array:
    """Returns the highest number of each column [64, n]; each warp has that of its own rows."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return scores.max(axis=0)
    result = instructions.struct(scores.shape[1:], jnp.float32, COLUMNS)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def reduce(_: Any, given: Any) -> Any:
        found = []
        for low, high in given.registers.reshape(-1, 2):
            pair = arith.maximumf(low, high)
            numbers = [instructions.extract(pair, i) for i in range(2)]
            for distance in (4, 8, 16):
                numbers = [arith.maximumf(n, utils.shfl_bfly(n, distance)) for n in numbers]
            found.append(instructions.pack(numbers))
        return instructions.as_fragments(found, result.shape, jnp.float32, COLUMNS)

    return reduce(scores)


def turn_in_warps(weights: Array) -> Array:
    """Returns 16-bit weights [64, n] as right operands [64 / warps, n] of each warp."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return weights
    layout: Any = plgpu.Layout.MMA_RHS(weights.dtype)
    result = instructions.struct((ROWS // 4, weights.shape[1]), weights.dtype, layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def turn(_: Any, given: Any) -> Any:
        words = [
            utils.bitcast(register, instructions.word_type()) for register in given.registers.flat
        ]
        turned = [
            llvm.inline_asm(
                instructions.word_type(),
                [word],
                "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
                "=r,r",
            )
            for word in words
        ]
        return instructions.as_fragments(turned, result.shape, weights.dtype, layout)

    return turn(weights)


def merge_warps(sums: Sequence[Array], scratch: Ref) -> Array:
    """Returns the sums of all warps of float32[warps x 32, n] each, one below another.

    Args:
      scratch: float32[2048].
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return jnp.concatenate(sums)
    columns = sums[0].shape[1]
    shape = len(sums) * GROUP, columns
    result = instructions.struct(shape, jnp.float32, PAIRED)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WGMMA] * len(sums)), return_type=result
    )
    def merge(_: Any, ref: Any, *given: Any) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        tiles = np.concatenate([part.registers.reshape(2, columns // 8, 2) for part in given])
        base = utils.memref_ptr(ref)
        found = np.empty((len(tiles) // 4, columns // 8, 2), object)
        for i, n in np.ndindex(found.shape[:2]):
            utils.warpgroup_barrier()
            for j, (low, high) in enumerate(tiles[4 * i : 4 * i + 4, n]):
                four = vector.shuffle(low, high, ir.DenseI64ArrayAttr.get([0, 1, 2, 3]))
                row = arith.addi(arith.muli(warp, instructions.word(32)), lane)
                llvm.store(
                    four,
                    instructions.at(base, arith.addi(row, instructions.word(128 * j))),
                    alignment=16,
                )
            utils.warpgroup_barrier()
            total = None
            for j in range(4):
                row = arith.addi(arith.muli(warp, instructions.word(128)), lane)
                where = instructions.at(base, arith.addi(row, instructions.word(32 * j)))
                kind = ir.VectorType.get((4,), ir.F32Type.get())
                four = llvm.load(kind, where, alignment=16)
                total = four if total is None else arith.addf(total, four)
            for half in range(2):
                found[i, n, half] = instructions.pack(
                    [instructions.extract(total, 2 * half + k) for k in range(2)]
                )
        return instructions.as_fragments(found.flat, shape, jnp.float32, PAIRED)

    return merge(scratch, *sums)


def _convert(
    words: Array,
    convert: Callable[[Any], list[list[Any]]],
    order: tuple[int, int, int, int],
    shape: tuple[int, int],
    count: int,
) -> list[Array]:
    """Returns operands of what ``convert`` makes of words.

    Args:
      order: of the two parts of a word of rows 0 to 7, and the two of rows 8 to 15.
    """
    layout: Any = plgpu.Layout.MMA_LHS(jnp.float16)
    results = [instructions.struct(shape, jnp.float16, layout)] * count

    @plgpu.inline_mgpu(arg_types=(WORDS,), return_type=results)
    def run(_: Any, given: Any) -> Any:
        # Of 16 columns rows 0 to 7 and 8 to 15, then of the next 16.
        parts = [convert(instructions.element(register)) for register in given.registers.flat]
        found = []
        for i in range(count):
            fours = [[*parts[first][i], *parts[first + 1][i]] for first in (0, 2)]
            registers = [four[k] for four in fours for k in order]
            found.append(instructions.as_fragments(registers, shape, jnp.float16, layout))
        return found

    return run(words)


def _bytes(word: Any) -> list[list[Any]]:
    """Returns the even and the odd bytes, plus 128, which is their bits with another sign."""
    word = arith.xori(word, instructions.word(0x80808080))
    return [[instructions.mask(pair, 0x00FF00FF) for pair in (word, instructions.shift(word, 8))]]


def _halves(word: Any) -> list[list[Any]]:
    """Returns the lower halves of the even and the odd bytes, and 16 times the upper ones."""
    pairs = word, instructions.shift(word, 8)
    return [[instructions.mask(pair, mask) for pair in pairs] for mask in (0x000F000F, 0x00F000F0)]


def _fp8_pairs(word: Any) -> list[list[Any]]:
    """Converts the two lower and the two upper bytes."""
    half = ir.IntegerType.get_signless(16)
    halves = [arith.trunci(half, part) for part in (word, instructions.shift(word, 16))]
    code = "cvt.rn.f16x2.e4m3x2 $0, $1;"
    return [[llvm.inline_asm(instructions.word_type(), [part], code, "=r,h") for part in halves]]


def _fp8_bits(word: Any) -> list[list[Any]]:
    """Returns the even and the odd bytes divided by 2**8, NaN as 480 divided by it."""
    return [
        [
            arith.ori(instructions.mask(magnitude, 0x3F803F80), instructions.mask(sign, 0x80008000))
            for magnitude, sign in (
                (instructions.shift_left(word, 7), instructions.shift_left(word, 8)),
                (instructions.shift(word, 1), word),
            )
        ]
    ]
