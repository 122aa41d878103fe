"""Products of bfloat16 states with a key and a query, by tensor cores.

A key is the sum of three bfloat16, its pieces, and so is a query: their products with a bfloat16,
added up in float32, are as precise as products of float32. The pieces are rows of an operand of
mma, and the rows of a state are columns of the other one, where a thread has 16 bytes of each 64.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, full_like, load, store
from pallas_kernels._recurrence.step_common import tile_layout

ROWS, KEYS, THREADS = 32, 128, 128
PIECES = 3  # bfloat16 numbers whose sum is a float32
CHUNKS = KEYS // 8  # of 16 bytes in a row
EACH = CHUNKS // 4  # of a thread
FACTORS: Any = plgpu.Layout.WG_STRIDED((4 * EACH * THREADS,), vec_size=1)


def store_factors(vectors: Ref, factors: Ref) -> None:
    """Stores the pieces of a query and of a key, float32[2, 128], as bfloat16[8, 128]."""
    layout = plgpu.Layout.WG_STRIDED((KEYS,), vec_size=1)
    for n in range(2):
        vector = load(vectors.at[n], layout)
        store(factors.at[4 * n + PIECES], full_like(vector, 0).astype(jnp.bfloat16))
        for i in range(PIECES):
            piece = vector.astype(jnp.bfloat16)
            store(factors.at[4 * n + i], piece)
            vector = vector - piece.astype(jnp.float32)


def load_factors(factors: Ref) -> Array:
    """Loads what a thread needs of the factors, for `multiply_state`."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return factors[...]
    result = instructions.struct((4 * EACH * THREADS,), jnp.int32, FACTORS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def read(_: Any, factors: Any) -> Any:
        group, member = _place()
        base = utils.memref_ptr(factors)
        first = arith.addi(arith.muli(group, instructions.word(CHUNKS)), member)
        chunks = [arith.addi(first, instructions.word(4 * i)) for i in range(EACH)]
        words = [word for chunk in chunks for word in instructions.load_four(base, chunk)]
        return instructions.as_fragments(words, result.shape, jnp.int32, FACTORS)

    return read(factors)


def multiply_state(factors: Array, states: Ref, products: Ref, stage: Array, tile: Array) -> None:
    """Stores the products of 32 rows of a state with the query and the key.

    Args:
      factors: of `load_factors`.
      states: bfloat16[stages, 32, 128], in shared memory.
      products: float32[2 or more, n], in shared memory, those of the query first.
      stage, tile: which rows of states, and where their products lie, in tiles of 32.
    """
    if not _mosaic.OPERANDS_IN_REGISTERS:
        vectors = factors.astype(jnp.float32).reshape(2, -1, KEYS).sum(axis=1)
        state = states[stage].astype(jnp.float32)
        found = jnp.einsum("nk,vk->nv", vectors, state, precision=lax.Precision.HIGHEST)
        products[:2, pl.ds(tile * ROWS, ROWS)] = found
        return
    row, plain = tile_layout(2).reduce(1), plgpu.RefType()
    size = products.shape[1]

    @plgpu.inline_mgpu(arg_types=(FACTORS, plain, plain, row, row))
    def multiply(_: Any, factors: Any, states: Any, products: Any, *places: Any) -> None:
        stage, tile = (instructions.element(x.registers.flat[0]) for x in places)
        warp, (group, member) = utils.warp_idx(sync=False), _place()
        first = arith.muli(warp, instructions.word(4))  # of the rows of a warp
        own = arith.addi(first, _apart(group, 2))
        own = arith.addi(own, arith.muli(stage, instructions.word(ROWS)))
        own = arith.addi(arith.muli(own, instructions.word(CHUNKS)), member)
        base, words = utils.memref_ptr(states), [instructions.element(x) for x in factors.registers]
        zero, nothing = arith.constant(ir.F32Type.get(), 0.0), instructions.word(0)
        sums = [[zero] * 4 for _ in range(2)]
        for i in range(EACH):
            four = instructions.load_four(base, arith.addi(own, instructions.word(4 * i)))
            for n in range(2):
                low, high = words[4 * i + 2 * n : 4 * i + 2 * n + 2]
                left, right = [low, nothing, high, nothing], four[2 * n : 2 * n + 2]
                sums[n] = instructions.mma(jnp.bfloat16, sums[n], left, right)
        found = [arith.addf(*pair) for pair in zip(*(one[:2] for one in sums), strict=True)]
        for distance in (4, 8):  # of the pieces
            found = [arith.addf(x, utils.shfl_bfly(x, distance)) for x in found]
        target = arith.addi(first, _apart(arith.muli(member, instructions.word(2)), 2))
        target = arith.addi(target, arith.muli(tile, instructions.word(ROWS)))
        which = arith.muli(instructions.shift(group, 2), instructions.word(size))
        where = [arith.addi(target, which)]
        where = utils.getelementptr(utils.memref_ptr(products), where, ir.F32Type.get())
        llvm.store(instructions.pack(found), where, alignment=8)
        utils.warp_barrier()

    given = [plgpu.layout_cast(lax.broadcast(x, (ROWS,)), row) for x in (stage, tile)]
    multiply(factors, states, products, *given)


def _place() -> tuple[Any, Any]:
    """Returns a thread's row of the left operand and column of the right one, and its quarter."""
    lane = instructions.mask(utils.thread_idx(), 31)
    return instructions.shift(lane, 2), instructions.mask(lane, 3)


def _apart(row: Any, bits: int) -> Any:
    """Returns which row of a tile is one of the 8 rows of a warp, beside its first."""
    low = instructions.mask(row, (1 << bits) - 1)
    return arith.addi(low, instructions.shift_left(instructions.shift(row, bits), 4))
