"""Products of matrices in the kernels of prompts: by wgmma, or by mma, which all GPUs have."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, add_by_mma, as_left
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_shape import TILE

type Matrix = Array | Ref  # in registers, or in shared memory
DEPTH = 16  # rows of a right operand that an mma takes


def multiply_sum(
    by_wgmma: bool, *sums: Sequence[tuple[Matrix, Ref]], transposed: bool = False
) -> list[Array]:
    """Returns the sum of the products of pairs of matrices in float32, for each list of pairs.

    Args:
      by_wgmma: else by mma.
      sums: right ones in shared memory.
      transposed: whether right ones are transposed.
    """
    if not by_wgmma:
        return [_multiply_by_mma(pairs, transposed) for pairs in sums]
    if transposed:
        sums = tuple([(left, right.T) for left, right in pairs] for pairs in sums)
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return [_multiply_in_turn(pairs) for pairs in sums]

    def run(*totals: Ref) -> list[Array]:
        for total, pairs in zip(totals, sums, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left, right)
        return [plgpu.layout_cast(total[...], TILE) for total in totals]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def add_product(sums: Array, left: Matrix, right: Ref, transposed: bool = False) -> Array:
    """Returns float32 sums plus the product of two matrices by mma.

    Args:
      transposed: whether the right one is transposed; it has a multiple of CHUNK columns then.
    """
    if isinstance(left, Array):
        left = as_left(left)
    else:
        left = plgpu.load(left, layout=plgpu.Layout.MMA_LHS(left.dtype))
    depth = CHUNK if transposed else DEPTH  # columns of less than a tile cannot be loaded
    for first in range(0, left.shape[1], depth):
        some = lax.slice(left, (0, first), (left.shape[0], first + depth))
        part = pl.ds(first, depth)
        sums = add_by_mma(sums, some, right.at[:, part].T if transposed else right.at[part])
    return plgpu.layout_cast(sums, TILE)


def zeros(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def _multiply_by_mma(pairs: Sequence[tuple[Matrix, Ref]], transposed: bool) -> Array:
    left, right = pairs[0]
    total = zeros((left.shape[0], right.shape[0 if transposed else 1]))
    for left, right in pairs:
        total = add_product(total, left, right, transposed)
    return total


def _multiply_in_turn(pairs: Sequence[tuple[Matrix, Ref]]) -> Array:
    """Multiplies by wgmma in interpret mode."""

    def run(total: Ref, left: Matrix, right: Ref) -> Array:
        plgpu.wgmma(total, left, right)
        return plgpu.layout_cast(total[...], TILE)

    products = [
        pl.run_scoped(
            functools.partial(run, left=left, right=right),
            plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32),
        )
        for left, right in pairs
    ]
    return functools.reduce(jnp.add, products)
