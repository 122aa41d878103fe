"""The Mosaic GPU kernel of what in a prompt does not depend on states: the parts of its chunks.

A thread block computes one chunk of one value head. The inverse of a chunk's triangular matrix
comes from those of blocks on the diagonal, of 1, 2, 4 ... rows; its products are of float32 split
into two numbers of 16 bits.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import load, own_buffers, store, tiled
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_shape import (
    COLUMN,
    ROW,
    TILE,
    PromptParts,
    PromptShape,
    along_columns,
    along_rows,
    multiply,
    zero_rows,
)
from pallas_kernels._recurrence.rule import NORM_EPSILON

SQUARE = (CHUNK, CHUNK)


def find_parts(shape: PromptShape, chunks: Array, gates: Array, inputs: Array) -> PromptParts:
    """Returns the parts of the chunks of a turn.

    Args:
      chunks: int32[N, 4], of each chunk: its tile of tokens, the first row of it that is its own,
        one past the last, and anything.
      gates: float32[N, value_heads, 2 * CHUNK], of each token: the logarithm of the decay up to it,
        from the chunk's beginning; and beta, 0 for rows that are not the chunk's own.
      inputs: [T, columns], T a multiple of CHUNK.
    """
    rule, count = shape.rule, shape.chunks * shape.rule.value_heads
    erased = (count * CHUNK, rule.key_size) if rule.delta else (1, rule.key_size)
    call = plgpu.kernel(
        lambda *refs: _PartsKernel(shape, refs).run(),
        out_type=PromptParts(
            inner=jax.ShapeDtypeStruct((count * CHUNK, CHUNK), shape.operand),
            erased=jax.ShapeDtypeStruct(erased, shape.operand),
            values=jax.ShapeDtypeStruct((count * rule.value_size, CHUNK), shape.operand),
            factors=jax.ShapeDtypeStruct((*gates.shape[:2], 3 * CHUNK), jnp.float32),
        ),
        grid=(count,),
        grid_names=("cta",),
        kernel_name="recurrent_prompt_parts",
        scratch_types=[_Scratch.of(shape)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    with jax.enable_x64(False):
        return call(*own_buffers([chunks, gates, inputs]))


class _Scratch(NamedTuple):
    """Shared memory: its types, or references to it.

    inner, solved: parts on their way out.
    split: a matrix of float32 as two of 16 bits, [2, CHUNK, CHUNK]; two of them.
    vector: a number for each row.
    left: operands that interpret mode does not take from registers; None on a GPU.
    """

    queries: Any
    keys: Any
    values: Any
    inner: Any
    solved: Any
    split: Any
    gates: Any
    vector: Any
    left: Any
    loaded: Any

    @classmethod
    def of(cls, shape: PromptShape) -> Self:
        rule, dtype = shape.rule, shape.operand
        return cls(
            queries=tiled((CHUNK, rule.key_size), dtype),
            keys=tiled((CHUNK, rule.key_size), dtype),
            values=tiled((CHUNK, rule.value_size), dtype),
            inner=tiled(SQUARE, dtype),
            solved=tiled((rule.value_size, CHUNK), dtype),
            split=tiled((2, 2, *SQUARE), dtype),
            gates=plgpu.SMEM((2 * CHUNK,), jnp.float32),
            vector=plgpu.SMEM((CHUNK,), jnp.float32),
            left=None if _mosaic.OPERANDS_IN_REGISTERS else tiled((2, *SQUARE), dtype),
            loaded=plgpu.Barrier(num_arrivals=4),
        )


class _PartsKernel:
    """The code of one thread block."""

    def __init__(self, shape: PromptShape, refs: tuple[Any, ...]) -> None:
        self.shape, self.rule = shape, shape.rule
        self.chunks, self.gates, self.inputs = refs[:3]
        self.out, self.smem = PromptParts(*refs[3:-1]), refs[-1]
        index = lax.axis_index("cta")
        self.item = index
        self.chunk = lax.div(index, self.rule.value_heads)
        self.head = lax.rem(index, self.rule.value_heads)
        self.begin, self.end = self.chunks[self.chunk, 1], self.chunks[self.chunk, 2]

    def run(self) -> None:
        pl.when(self.end > self.begin)(self._run)

    def _run(self) -> None:
        rule, smem = self.rule, self.smem
        gates = self.gates.at[self.chunk, self.head]
        totals, rates = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
        # A load of one place in two layouts would be one load, in neither of them.
        to_row, rate = load(gates.at[totals], ROW), load(gates.at[rates], ROW)
        last = gates[CHUNK - 1]
        self._load()
        to_column = load(smem.gates.at[totals], COLUMN)
        queries, keys = self._norms()
        keys_of_columns = self._as_column(keys)
        row, column = (plgpu.broadcasted_iota(jnp.int32, SQUARE, a, layout=TILE) for a in (0, 1))
        between = along_rows(to_row, SQUARE) - along_columns(to_column, SQUARE)
        decay = jnp.exp(jnp.where(row >= column, between, -1e9))
        decay *= along_columns(keys_of_columns, SQUARE)
        inner = multiply(smem.queries, smem.keys.T) * decay * along_rows(queries, SQUARE)
        smem.inner[...] = inner.astype(self.shape.operand)
        if rule.delta:
            lower = multiply(smem.keys, smem.keys.T) * decay * along_rows(rate * keys, SQUARE)
            solution = self._invert(jnp.where(row > column, lower, 0.0), row, column)
        else:
            solution = jnp.where(row == column, 1.0, 0.0)
        self._solve(solution, keys_of_columns, to_column, load(smem.gates.at[rates], COLUMN))
        self._write(to_row, last, queries, keys)

    def _load(self) -> None:
        """Loads the chunk's tile of tokens; rows that are not its own become zeros."""
        rule, smem = self.rule, self.smem
        first = self.chunks[self.chunk, 0] * CHUNK
        key_head = lax.div(self.head, rule.group)
        parts = (
            (smem.queries, rule.starts[0] + key_head * rule.key_size, rule.key_size),
            (smem.keys, rule.starts[1] + key_head * rule.key_size, rule.key_size),
            (smem.values, rule.starts[2] + self.head * rule.value_size, rule.value_size),
        )
        for target, start, width in parts:
            source = self.inputs.at[pl.ds(first, CHUNK), pl.ds(start, width)]
            plgpu.copy_gmem_to_smem(source, target, smem.loaded)
        plgpu.copy_gmem_to_smem(self.gates.at[self.chunk, self.head], smem.gates, smem.loaded)
        plgpu.barrier_wait(smem.loaded)

        @pl.when((self.begin > 0) | (self.end < CHUNK))
        def _() -> None:
            for target, _, _ in parts:
                zero_rows(target, self.begin, self.end)
            plgpu.commit_smem()

    def _norms(self) -> tuple[Array, Array]:
        """Returns the factors of queries and of keys, float32[CHUNK]."""
        ones = plgpu.layout_cast(jnp.ones(CHUNK, jnp.float32), ROW)
        if not self.rule.normalize:
            return ones * self.rule.scale, ones
        queries, keys = (self._norm(ref) for ref in (self.smem.queries, self.smem.keys))
        return queries * self.rule.scale, keys

    def _norm(self, ref: Any) -> Array:
        total: Any = None
        for column in range(0, self.rule.key_size, CHUNK):
            part = load(ref.at[:, pl.ds(column, CHUNK)], TILE)
            squares = (part * part).sum(axis=1)
            total = squares if total is None else total + squares
        return lax.rsqrt(total + NORM_EPSILON)

    def _as_column(self, vector: Array) -> Array:
        """Returns a number for each row as one for each column."""
        self.smem.vector[...] = vector
        plgpu.commit_smem()
        return load(self.smem.vector, COLUMN)

    def _invert(self, lower: Array, row: Array, column: Array) -> Array:
        """Returns ``(I + lower)^-1`` of a strictly lower triangular matrix.

        Powers of ``lower`` would need fewer products, but theirs cancel out where keys are alike.
        """
        apart = row ^ column  # its highest bit is the size of the blocks that part two places
        inverse = jnp.where(row == column, 1.0, jnp.where(apart == 1, -lower, 0.0))
        for bit in range(1, CHUNK.bit_length() - 1):
            below = jnp.where(lax.shift_right_logical(apart, bit) == 1, lower, 0.0)
            product = self._multiply(below, inverse, 0)
            inverse = inverse - self._multiply(inverse, product, 1)
        return inverse

    def _multiply(self, left: Array, right: Array, place: int) -> Array:
        """Returns the product of two matrices of float32.

        Args:
          place: place of ``right`` in shared memory; not that of the product before, which other
            warps may still read.
        """
        split = self.smem.split.at[place]
        pair = self._split(left)
        for i, part in enumerate(self._split(right)):
            split[i] = part
        if not _mosaic.OPERANDS_IN_REGISTERS:
            for i, part in enumerate(pair):
                self.smem.left[i] = part
            pair = self.smem.left.at[0], self.smem.left.at[1]
        plgpu.commit_smem()
        if not _mosaic.OPERANDS_IN_REGISTERS:
            products = [multiply(pair[i], split.at[j]) for i, j in ((0, 0), (0, 1), (1, 0))]
            return sum(products[1:], products[0])

        def run(product: Any) -> Array:
            for i, j in ((0, 1), (1, 0), (0, 0)):
                plgpu.wgmma(product, pair[i], split.at[j])
            return product[...]

        return pl.run_scoped(run, plgpu.ACC(SQUARE, jnp.float32))

    def _split(self, matrix: Array) -> tuple[Array, Array]:
        """Returns two matrices of 16 bits whose sum is about the given one."""
        high = matrix.astype(self.shape.operand)
        return high, (matrix - high.astype(jnp.float32)).astype(self.shape.operand)

    def _solve(self, solution: Array, keys: Array, total: Array, rate: Array) -> None:
        """Stages the values and the erased, from the inverse and factors of its columns."""
        rule, smem, operand = self.rule, self.smem, self.shape.operand
        split = smem.split.at[0]
        split[0] = (solution * along_columns(rate, SQUARE)).astype(operand)
        if rule.delta:
            rate = -rate * keys * jnp.exp(total)
            split[1] = (solution * along_columns(rate, SQUARE)).astype(operand)
        plgpu.commit_smem()
        for start in range(0, rule.value_size, CHUNK):
            values = smem.values.at[:, pl.ds(start, CHUNK)].T
            smem.solved[pl.ds(start, CHUNK)] = multiply(values, split.at[0].T).astype(operand)
        if rule.delta:
            smem.queries[...] = multiply(split.at[1], smem.keys).astype(operand)

    def _write(self, total: Array, last: Array, queries: Array, keys: Array) -> None:
        """Writes the parts."""
        out, smem, rule = self.out, self.smem, self.rule
        plgpu.commit_smem()
        rows = pl.ds(self.item * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(smem.inner, out.inner.at[rows])
        if rule.delta:
            plgpu.copy_smem_to_gmem(smem.queries, out.erased.at[rows])
        values = pl.ds(self.item * rule.value_size, rule.value_size)
        plgpu.copy_smem_to_gmem(smem.solved, out.values.at[values])
        end = lax.broadcast_in_dim(last, total.shape, [])
        end = plgpu.layout_cast(end, ROW)
        factors = queries * jnp.exp(total), keys * jnp.exp(end - total), jnp.exp(end)
        for i, factor in enumerate(factors):
            target = out.factors.at[self.chunk, self.head, pl.ds(i * CHUNK, CHUNK)]
            store(target, factor)
        plgpu.wait_smem_to_gmem(0)
