"""The constants of the kernels of prompts, and code that they share."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.rule import Rule

type Matrix = Array | Ref  # in registers, or in shared memory

TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)  # layouts of a number for each row, or column


class PromptShape(NamedTuple):
    """Constants of compiled kernels.

    chunks: of a turn.
    batch: requests.
    operand: dtype of the inputs, and of the factors of products.
    page: dtype of the states in pages.
    decay_per_key: whether every key channel has a decay of its own.
    """

    rule: Rule
    chunks: int
    batch: int
    operand: jnp.dtype
    page: jnp.dtype
    decay_per_key: bool


class PromptParts[T](NamedTuple):
    """The parts of the chunks of a turn that do not depend on the state, for each value head.

    Arrays, or references to them; a chunk c of head h begins at row ``(c * heads + h) * CHUNK``.

    inner: [N * heads * CHUNK, CHUNK], weights of the chunk's own tokens in the outputs.
    erased: [N * heads * CHUNK, K], what is added of a state for each token, which takes it away; a
      single row without a delta rule.
    values: [N * heads * V, CHUNK], what is added by each token if the state were zeros.
    factors: float32[N, heads, 3 * CHUNK], of each token's query, with the decay from the chunk's
      beginning; of its key, with the decay to the chunk's end; and the chunk's decay.
    queries, keys: [N * heads * CHUNK, K], with these decays if each key channel has its own, which
      factors do not have then; otherwise a single row.
    """

    inner: T
    erased: T
    values: T
    factors: T
    queries: T
    keys: T


def along_rows(vector: Array, shape: tuple[int, ...]) -> Array:
    """Returns a matrix from a number for each row."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Array, shape: tuple[int, ...]) -> Array:
    """Returns a matrix from a number for each column."""
    return lax.broadcast_in_dim(vector, shape, [1])


def multiply(left: Matrix, right: Ref) -> Array:
    """Returns the product of two matrices, the right one in shared memory, in float32."""
    return multiply_sum([(left, right)])[0]


def multiply_sum(*sums: Sequence[tuple[Matrix, Ref]]) -> list[Array]:
    """Returns the sum of the products of pairs of matrices, for each list of pairs."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return [_multiply_in_turn(pairs) for pairs in sums]

    def run(*totals: Ref) -> list[Array]:
        for total, pairs in zip(totals, sums, strict=True):
            for left, right in pairs:
                plgpu.wgmma(total, left, right)
        return [plgpu.layout_cast(total[...], TILE) for total in totals]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _multiply_in_turn(pairs: Sequence[tuple[Matrix, Ref]]) -> Array:
    """Does the same in interpret mode."""

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


def zero_rows(ref: Ref, begin: Array, end: Array) -> None:
    """Overwrites the rows of a chunk's tile that are not its own, because 0 * NaN is NaN."""
    for column in range(0, ref.shape[1], CHUNK):
        part = ref.at[:, pl.ds(column, CHUNK)]
        values = plgpu.load(part, layout=TILE)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=TILE)
        part[...] = jnp.where((row >= begin) & (row < end), values, _mosaic.full_like(values, 0))
