"""The constants of the kernels of prompts, and code that they share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.rule import Rule

TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)  # layouts of a number for each row, or column


class PromptShape(NamedTuple):
    """Constants of compiled kernels.

    chunks: of a turn.
    batch: requests.
    operand: dtype of the inputs, and of the factors of products.
    page: dtype of the states in pages.
    """

    rule: Rule
    chunks: int
    batch: int
    operand: jnp.dtype
    page: jnp.dtype


class PromptParts(NamedTuple):
    """The parts of the chunks of a turn that do not depend on the state, for each value head.

    Arrays, or references to them; a chunk c of head h begins at row ``(c * heads + h) * CHUNK``.

    inner: [N * heads * CHUNK, CHUNK], weights of the chunk's own tokens in the outputs.
    erased: [N * heads * CHUNK, K], what is added of a state for each token, which takes it away; a
      single row without a delta rule.
    values: [N * heads * V, CHUNK], what is added by each token if the state were zeros.
    factors: float32[N, heads, 3 * CHUNK], of each token: that of its query, with the decay from the
      chunk's beginning; that of its key, with the decay to the chunk's end; the chunk's decay.
    """

    inner: Any
    erased: Any
    values: Any
    factors: Any


def along_rows(vector: Array, shape: tuple[int, ...]) -> Array:
    """Returns a matrix from a number for each row."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Array, shape: tuple[int, ...]) -> Array:
    """Returns a matrix from a number for each column."""
    return lax.broadcast_in_dim(vector, shape, [1])


def multiply(left: Any, right: Any) -> Array:
    """Returns the product of two matrices, the right one in shared memory, in float32."""
    return multiply_sum([(left, right)])


def multiply_sum(pairs: Sequence[tuple[Any, Any]]) -> Array:
    """Returns the sum of the products of pairs of matrices."""
    if not _mosaic.OPERANDS_IN_REGISTERS and len(pairs) > 1:
        first, *others = (multiply(*pair) for pair in pairs)
        return sum(others, first)

    def run(total: Any) -> Array:
        for left, right in pairs:
            plgpu.wgmma(total, left, right)
        return plgpu.layout_cast(total[...], TILE)

    left, right = pairs[0]
    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def zero_rows(ref: Any, begin: Array, end: Array) -> None:
    """Overwrites the rows of a chunk's tile that are not its own, because 0 * NaN is NaN."""
    for column in range(0, ref.shape[1], CHUNK):
        part = ref.at[:, pl.ds(column, CHUNK)]
        values = plgpu.load(part, layout=TILE)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=TILE)
        part[...] = jnp.where((row >= begin) & (row < end), values, jnp.zeros_like(values))
