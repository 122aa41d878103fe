"""Products of the keys of a ring in bfloat16 and what they add to a state, by tensor cores.

What a token adds, decayed, is the sum of two bfloat16, its pieces. A piece of two tokens, which lie
next to each other in an operand of mma, is a word.

Sums are in `tile_layout`, as the state: 8 threads share a row. In sums of mma 4 threads do; so a
row of its left operand stands for a row of the state and one half of its columns, and has zeros
for the tokens' keys of the other half.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Layout, Ref
from pallas_kernels._recurrence.step_common import tile_layout

THREADS, ROWS = 128, 32
OCTET = 8  # tokens: half of the terms of an instruction
NUMBERS = 8  # that lie together for a thread, 16 bytes
COLUMNS = 8 * NUMBERS  # of 8 threads: a block
WORDS = 16  # of an octet for each thread, for keys of 128
PIECES = 2  # of what a token adds


def pairs_layout() -> Layout:
    """Returns the layout of the keys of 8 tokens, in each warp: of two tokens for a thread."""
    n = NUMBERS // 2
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((OCTET, 8 * n), (2, n))),
        warp_dims=(fragmented_array.Replicated(4),),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


def store_pairs(keys: Array, words: Ref) -> None:
    """Stores keys as each thread takes them later, in every warp alike.

    Args:
      keys: float32[L, 128], in `pairs_layout`; they are rounded.
      words: of 4 bytes, [L / 2, 128].
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        bits = lax.bitcast_convert_type(keys.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        words[...] = lax.bitcast_convert_type(bits[::2] | (bits[1::2] << 16), jnp.float32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), pairs_layout()))
    def write(_: Any, ref: Any, given: Any) -> None:
        lane, base = instructions.mask(utils.thread_idx(), 31), utils.memref_ptr(ref)
        octets = given.registers.reshape(keys.shape[0] // OCTET, -1, 2)
        for octet, columns in enumerate(octets):
            pairs = [  # of either half of some columns, which are an operand together
                [instructions.extract(token, i) for token in half]
                for halves in columns.reshape(-1, 2, 2)
                for i in range(NUMBERS // 2)
                for half in halves
            ]
            for n in range(0, WORDS, 4):
                four = [_split_pair(pair, 1)[0] for pair in pairs[n : n + 4]]
                row = (octet * WORDS + n) // 4 * 32
                where = instructions.at(base, arith.addi(lane, instructions.word(row)))
                llvm.store(instructions.pack(four), where, alignment=16)

    write(words, keys)


def split_added(
    added: Ref, weights: Ref, new: Array, place: tuple[Array, Array], length: int
) -> Array:
    """Returns the pieces of what the tokens of a ring add to 32 rows of a state.

    Args:
      added, weights: of `StepRing`; tokens of weight 0 may be NaN.
      new: float32[32], of the last token, in the layout of the rows of a tile.
      place: which head of the item, and the first row of its state.
      length: tokens of the ring.
    """
    (j, start), rows = place, new.shape[0]
    size, octets = added.shape[-2] * added.shape[-1] // length, length // OCTET
    if not _mosaic.OPERANDS_IN_REGISTERS:
        values = added[j].reshape(length, size).astype(jnp.float32)
        values = lax.dynamic_slice(values, (0, start), (length, rows))
        weight = weights[j][2, :length, None]
        return jnp.where(weight != 0, values * weight, 0.0).at[-1].set(new)
    row, plain = tile_layout(2).reduce(1), plgpu.RefType()
    result = _bag(2 * PIECES * octets)

    @plgpu.inline_mgpu(arg_types=(plain, plain, row, row, row), return_type=result)
    def split(_: Any, added: Any, weights: Any, new: Any, *first: Any) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 31), utils.warp_idx(sync=False)
        added_at, weight_at = (instructions.element(x.registers.flat[0]) for x in first)
        token = arith.muli(instructions.mask(lane, 3), instructions.word(2))
        own = arith.addi(arith.muli(warp, instructions.word(4)), instructions.shift(lane, 3))
        own = arith.addi(own, arith.muli(token, instructions.word(size)))
        added_at, weight_at = arith.addi(added_at, own), arith.addi(weight_at, token)
        zero = arith.constant(ir.F32Type.get(), 0.0)

        def read(octet: int, block: int) -> list[Any]:
            """Reads what two tokens add to a row."""
            numbers = []
            for i in range(2):
                offset = instructions.word((octet * OCTET + i) * size + 16 * block)
                number = _load(added, arith.addi(added_at, offset), jnp.bfloat16)
                offset = instructions.word(octet * OCTET + i)
                weight = _load(weights, arith.addi(weight_at, offset), jnp.float32)
                counts = arith.cmpf(arith.CmpFPredicate.UNE, weight, zero)
                numbers.append(arith.select(counts, arith.mulf(number, weight), zero))
            if octet == octets - 1:
                is_last = arith.cmpi(arith.CmpIPredicate.eq, token, instructions.word(OCTET - 2))
                last = instructions.element(new.registers.flat[block])
                numbers[1] = arith.select(is_last, last, numbers[1])
            return numbers

        found: list[Any] = []
        for octet in range(octets):
            blocks = [_split_pair(read(octet, block), PIECES) for block in range(2)]
            found += [word for pair in zip(*blocks, strict=True) for word in pair]
        return instructions.as_fragments(found, result.shape, jnp.int32, result.layout)

    offsets = j * (length * size) + start, (3 * j + 2) * weights.shape[-1]
    first = [plgpu.layout_cast(lax.broadcast(x, (rows,)), row) for x in offsets]
    return split(added, weights, new, *first)


def multiply_ring(words: Ref, pieces: Array, block: int, length: int) -> Array:
    """Returns the sum over tokens of the products of what they add and some columns of their keys.

    Args:
      words: of `store_pairs`.
      pieces: of `split_added`.
      block: of `COLUMNS`.
      length: tokens of the ring.

    Returns:
      float32[32, COLUMNS], in `tile_layout`.
    """
    octets = length // OCTET
    if not _mosaic.OPERANDS_IN_REGISTERS:
        bits = lax.bitcast_convert_type(words[...], jnp.uint32)
        halves = bits << 16, bits & jnp.uint32(0xFFFF0000)
        keys = jnp.stack([lax.bitcast_convert_type(half, jnp.float32) for half in halves], axis=1)
        keys = keys.reshape(length, -1)[:, COLUMNS * block : COLUMNS * (block + 1)]
        return jnp.einsum("lv,lk->vk", pieces, keys, precision=lax.Precision.HIGHEST)
    given = _bag(2 * PIECES * octets)
    result = instructions.struct((ROWS, COLUMNS), jnp.float32, tile_layout(2))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), given.layout), return_type=result)
    def run(_: Any, words: Any, pieces: Any) -> Any:
        utils.warp_barrier()  # or all blocks are loaded first, which takes registers
        lane, base = instructions.mask(utils.thread_idx(), 31), utils.memref_ptr(words)
        rights: list[list[Any]] = [[] for _ in range(octets)]
        for octet, first in itertools.product(range(octets), range(0, NUMBERS, 4)):
            row = (octet * WORDS + NUMBERS * block + first) // 4 * 32
            rights[octet] += instructions.load_four(base, arith.addi(lane, instructions.word(row)))
        is_second = arith.cmpi(
            arith.CmpIPredicate.ne, instructions.mask(lane, 4), instructions.word(0)
        )
        nothing, blocks = instructions.word(0), pieces.registers.reshape(octets, PIECES, 2)
        sums = [[arith.constant(ir.F32Type.get(), 0.0)] * 4 for _ in range(NUMBERS // 2)]
        for octet, i in itertools.product(range(octets), range(PIECES)):
            pair = [instructions.element(word) for word in blocks[octet, i]]
            left = [arith.select(is_second, nothing, word) for word in pair]
            left += [arith.select(is_second, word, nothing) for word in pair]
            for q, total in enumerate(sums):
                sums[q] = instructions.mma(
                    jnp.bfloat16, total, left, rights[octet][2 * q : 2 * q + 2]
                )
        # Numbers of a thread: of either half of the columns those of 4.
        found = [
            instructions.pack([total[2 * r + half] for half in range(2) for total in sums])
            for r in range(2)
        ]
        return instructions.as_fragments(found, result.shape, jnp.float32, result.layout)

    return run(words, pieces)


def _bag(count: int) -> Any:
    """Returns the type of so many words of each thread."""
    layout: Any = plgpu.Layout.WG_STRIDED((count * THREADS,), vec_size=1)
    return instructions.struct((count * THREADS,), jnp.int32, layout)


def _load(ref: Any, index: Any, dtype: Any) -> Any:
    """Loads a number as float32."""
    kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
    number = llvm.load(kind, utils.getelementptr(utils.memref_ptr(ref), [index], kind))
    return number if kind == ir.F32Type.get() else arith.extf(ir.F32Type.get(), number)


def _split_pair(pair: Sequence[Any], count: int) -> list[Any]:
    """Returns the pieces of two numbers, which are the halves of a word each."""
    (low, high), words = pair, list[Any]()
    for left in reversed(range(count)):
        code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
        word = llvm.inline_asm(instructions.word_type(), [high, low], code, "=r,f,f")
        words.append(word)
        if left:
            low = arith.subf(low, _as_number(instructions.shift_left(word, 16)))
            high = arith.subf(high, _as_number(instructions.mask(word, 0xFFFF0000)))
    return words


def _as_number(word: Any) -> Any:
    return arith.bitcast(ir.F32Type.get(), word)
