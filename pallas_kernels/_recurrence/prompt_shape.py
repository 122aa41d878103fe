"""The constants of the kernels of prompts, and code that they share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability, _mosaic
from pallas_kernels._capability import Instructions
from pallas_kernels._mosaic import Ref
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.rule import Rule

COPIED = 128  # numbers of 4 bytes, of which cp.async copies multiples
MAX_STAGES = 3  # chunks that the kernel of states prefetches
FACTORS = 4 * CHUNK  # see `PromptParts`
OTHER_BYTES = 4096  # of its shared memory, for barriers, and to begin arrays at multiples of 1,024

TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)  # layouts of a number for each row, or column


class PromptShape(NamedTuple):
    """Constants of compiled kernels.

    chunks: of a turn.
    batch: requests.
    operand: dtype of the inputs, and of the factors of products.
    page: dtype of the states in pages.
    decay_per_key: whether every key channel has a decay of its own.
    instructions: what the kernels move and multiply with; None where none of them runs.
    """

    rule: Rule
    chunks: int
    batch: int
    operand: jnp.dtype
    page: jnp.dtype
    decay_per_key: bool
    instructions: Instructions | None

    @property
    def by_wgmma(self) -> bool:
        return self.instructions == "wgmma, TMA"

    @property
    def by_tma(self) -> bool:
        return self.instructions != "mma, cp.async"

    @property
    def stages(self) -> int:
        """Returns the chunks that the kernel of states has in shared memory."""
        rule, square = self.rule, 2 * CHUNK * CHUNK
        tokens = (2 + rule.delta) * CHUNK * rule.key_size
        numbers = FACTORS + self.decay_per_key * COPIED
        stage = 2 * square + 2 * tokens + 4 * numbers
        staged = 2 * square
        limit = _capability.shared_memory_bytes() - staged - OTHER_BYTES
        return min(MAX_STAGES, limit // stage)


class PromptParts[T](NamedTuple):
    """The parts of the chunks of a turn that do not depend on the state, for each value head.

    Arrays, or references to them; a chunk c of head h begins at row ``(c * heads + h) * CHUNK``.

    inner: [N * heads * CHUNK, CHUNK], weights of the chunk's own tokens in the outputs.
    erased: [N * heads * CHUNK, K], what is added of a state for each token, which takes it away; a
      single row without a delta rule.
    values: [N * heads * CHUNK, V], what is added by each token if the state were zeros.
    factors: float32[N, heads, FACTORS], of each token's query, with the decay from the chunk's
      beginning; of its key, with the decay to the chunk's end; the chunk's decay; and CHUNK unused.
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


def zero_rows(ref: Ref, begin: Array, end: Array) -> None:
    """Overwrites the rows of a chunk's tile that are not its own, because 0 * NaN is NaN."""
    for column in range(0, ref.shape[1], CHUNK):
        part = ref.at[:, pl.ds(column, CHUNK)]
        values = plgpu.load(part, layout=TILE)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=TILE)
        part[...] = jnp.where((row >= begin) & (row < end), values, _mosaic.full_like(values, 0))
