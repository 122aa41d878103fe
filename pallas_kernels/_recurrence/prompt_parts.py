"""The Mosaic GPU kernel of what in a prompt does not depend on states: the parts of its chunks.

A thread block computes one chunk of one value head. It inverts blocks on the diagonal of a chunk's
triangular matrix, of 1, 2, 4 ... rows, by products of float16: with keys of length 1, all numbers
are small, and float16 is more precise than the bfloat16 of the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, call_unfused, load, store
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_copies import copies_of
from pallas_kernels._recurrence.prompt_products import Matrix, multiply_sum
from pallas_kernels._recurrence.prompt_scratch import SOLVING, SQUARE, PartsScratch
from pallas_kernels._recurrence.prompt_shape import (
    COLUMN,
    FACTORS,
    ROW,
    TILE,
    PromptParts,
    PromptShape,
    along_columns,
    along_rows,
    zero_rows,
)
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY, NORM_EPSILON


def find_parts(
    shape: PromptShape, chunks: Array, gates: Array, inputs: Array, log_decay: Array | None
) -> PromptParts[Array]:
    """Returns the parts of the chunks of a turn.

    Args:
      chunks: int32[N, n], of each chunk: its tile of tokens, the first row of it that is its own,
        one past the last, and anything.
      gates: float32[N, value_heads, 2 * CHUNK], of each token: the logarithm of the decay up to it,
        from the chunk's beginning; and beta, 0 for rows that are not the chunk's own.
      inputs: [T, columns], T a multiple of CHUNK.
      log_decay: float32[T, value_heads * K], if each key channel has its own; otherwise None.
    """
    rule, count = shape.rule, shape.chunks * shape.rule.value_heads
    tokens, one = (count * CHUNK, rule.key_size), (1, rule.key_size)
    decayed = jax.ShapeDtypeStruct(tokens if shape.decay_per_key else one, shape.operand)
    call = plgpu.kernel(
        lambda *refs: _PartsKernel(shape, refs).run(),
        out_type=PromptParts(
            inner=jax.ShapeDtypeStruct((count * CHUNK, CHUNK), shape.operand),
            erased=jax.ShapeDtypeStruct(tokens if rule.delta else one, shape.operand),
            values=jax.ShapeDtypeStruct((count * CHUNK, rule.value_size), shape.operand),
            factors=jax.ShapeDtypeStruct((*gates.shape[:2], FACTORS), jnp.float32),
            queries=decayed,
            keys=decayed,
        ),
        grid=(count,),
        grid_names=("cta",),
        kernel_name="recurrent_prompt_parts",
        scratch_types=[PartsScratch.from_shape(shape)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return call_unfused(call, [chunks, gates, inputs, *([] if log_decay is None else [log_decay])])


class _PartsKernel:
    """The code of one thread block."""

    def __init__(self, shape: PromptShape, refs: tuple[Ref, ...]) -> None:
        self.shape, self.rule, self.copies = shape, shape.rule, copies_of(shape.by_tma)
        self.chunks, self.gates, self.inputs = refs[:3]
        self.log_decay = refs[3]  # of the inputs without decay per key: not read
        self.out, self.smem = PromptParts(*refs[-7:-1]), refs[-1]
        index = lax.axis_index("cta")
        self.item = index
        self.chunk = lax.div(index, self.rule.value_heads)
        self.head = lax.rem(index, self.rule.value_heads)
        self.begin, self.end = self.chunks[self.chunk, 1], self.chunks[self.chunk, 2]

    def run(self) -> None:
        pl.when(self.end > self.begin)(self._run)

    def _run(self) -> None:
        shape, rule, smem = self.shape, self.rule, self.smem
        gates = self.gates.at[self.chunk, self.head]
        totals, rates, norms = (pl.ds(i * CHUNK, CHUNK) for i in range(3))
        # A load of one address in two layouts would be one load, in neither of them.
        to_row, rate = load(gates.at[totals], ROW), load(gates.at[rates], ROW)
        last = gates[CHUNK - 1]
        self._load()
        to_column = load(smem.numbers.at[totals], COLUMN)
        queries, keys = self._norms()
        keys_of_columns = self._as_column(keys)
        row, column = (plgpu.broadcasted_iota(jnp.int32, SQUARE, a, layout=TILE) for a in (0, 1))
        between = along_rows(to_row, SQUARE) - along_columns(to_column, SQUARE)
        decay = jnp.exp(jnp.where(row >= column, between, -1e9))
        decay *= along_columns(keys_of_columns, SQUARE)
        rows, staged = pl.ds(self.item * CHUNK, CHUNK), smem.queries.at[0]
        if shape.decay_per_key:
            inner, lower = self._decayed_products(row, column)
            self._store_decayed(row, column)
            staged = smem.decayed.at[0, 0]
        else:
            (inner,), lower = self._with_keys(smem.keys, smem.queries), None
        inner *= decay * along_rows(queries, SQUARE)
        self.copies.commit()  # a barrier: all warps have read the queries
        self._copy_out(inner, staged, self.out.inner.at[rows])
        if rule.delta:
            if lower is None:
                (lower,) = self._with_keys(smem.keys, smem.keys)
            lower *= decay * along_rows(rate * keys, SQUARE)
            solution = self._invert(jnp.where(row > column, lower, 0.0), row, column)
        else:
            solution = jnp.where(row == column, 1.0, 0.0)
        self._store_factors(to_row, last, queries, keys)
        # Loaded again: they would take registers in the meantime.
        rate = load(smem.numbers.at[rates], COLUMN)
        to_column, keys_of_columns = (
            load(ref, COLUMN) for ref in (smem.numbers.at[totals], smem.numbers.at[norms])
        )
        solution *= along_columns(rate, SQUARE)
        if rule.delta:
            erase = -keys_of_columns * jnp.exp(to_column)
            self._store_erased(solution * along_columns(erase, SQUARE))
        self._store_values(solution.astype(self.shape.operand))
        self.copies.end_writes()

    def _copy_out(self, part: Array, staged: Ref, out: Ref) -> None:
        """Writes a part, from where it is staged; has a barrier."""
        self.copies.write(part.astype(self.shape.operand), staged, out)

    def _with_keys(self, keys: Ref, *several: Ref) -> list[Array]:
        """Returns the products of several rows, queries or keys, with keys."""
        squares = range(self.rule.key_size // CHUNK)
        sums = [[(rows.at[i], keys.at[i]) for i in squares] for rows in several]
        return multiply_sum(self.shape.by_wgmma, *sums, transposed=True)

    def _multiply(self, left: Matrix, right: Ref) -> Array:
        """Returns a product with a matrix in shared memory."""
        if isinstance(left, Array) and self.smem.lefts[0] is not None:
            staged = self.smem.lefts[left.dtype == SOLVING]
            staged[...] = left
            self.copies.commit()
            left = staged
        return multiply_sum(self.shape.by_wgmma, [(left, right)])[0]

    def _decayed_products(self, row: Array, column: Array) -> tuple[Array, Array]:
        """Returns products of queries with keys, and of keys with keys, decayed for each channel.

        Those of tokens in the halves of a block, of 2, 4 ... 64 tokens, with each other: queries
        have the decay from the middle of the block, and keys the one up to there, so that no number
        is large. What is above the diagonal, of keys also on it, is undefined.
        """
        smem, squares = self.smem, range(self.rule.key_size // CHUNK)
        queries, keys = smem.decayed.at[0], smem.decayed.at[1]
        self._load_log_decay(row)
        apart = row ^ column  # its highest bit is the size of the halves that separate two tokens

        def join(bit: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            def half(index: Array) -> Array:
                return lax.shift_right_logical(index, lax.broadcast(bit, SQUARE))

            # Tokens up to one in the second half, and after one in the first half.
            is_second = (half(row) & 1) == 1
            tokens = (half(apart) == 0) & ((column <= row) == is_second)
            self._count(tokens)  # has a barrier: all warps have read what is overwritten
            for i in squares:
                decay = self._decay(i)
                for source, target in ((smem.queries, queries), (smem.keys, keys)):
                    value = load(source.at[i], TILE) * decay
                    target.at[i][...] = value.astype(self.shape.operand)
            self.copies.commit()
            inner, lower = self._with_keys(keys, queries, keys)
            is_joined = half(apart) == 1
            return jnp.where(is_joined, inner, carry[0]), jnp.where(is_joined, lower, carry[1])

        # Without decay, for each query with the key of its token.
        (start,) = self._with_keys(smem.keys, smem.queries)
        return lax.fori_loop(0, CHUNK.bit_length() - 1, join, (start, start))

    def _load_log_decay(self, row: Array) -> None:
        """Loads the logarithms of decays, in the precision that products take."""
        smem, key_size = self.smem, self.rule.key_size
        tokens = pl.ds(self.chunks[self.chunk, 0] * CHUNK, CHUNK)
        is_own = (row >= self.begin) & (row < self.end)
        for i in range(key_size // CHUNK):
            columns = pl.ds(self.head * key_size + i * CHUNK, CHUNK)
            value = load(self.log_decay.at[tokens, columns], TILE)
            value = jnp.where(is_own, jnp.maximum(value, LEAST_LOG_DECAY), 0.0)
            smem.solving.at[i][...] = value.astype(SOLVING)
        self.copies.commit()

    def _count(self, tokens: Array) -> None:
        """Sets over which tokens `_decay` returns the decay, for each row.

        In shared memory, because a mask has constants (see `_invert`), and registers are short.
        """
        self.smem.solving.at[2][...] = jnp.where(tokens, 1.0, 0.0).astype(SOLVING)
        self.copies.commit()

    def _decay(self, i: int) -> Array:
        """Returns the decay in some channels over the tokens that each row counts.

        A logarithm of 11 bits is off by less than the bfloat16 that the decay becomes a factor of.
        """
        return jnp.exp(self._multiply(self.smem.solving.at[2], self.smem.solving.at[i]))

    def _store_decayed(self, row: Array, column: Array) -> None:
        """Writes queries and keys with their decays; keys from the beginning replace the keys."""
        smem, rows = self.smem, pl.ds(self.item * CHUNK, CHUNK)
        columns = [pl.ds(i * CHUNK, CHUNK) for i in range(self.rule.key_size // CHUNK)]
        self._count(column > row)  # has a barrier: all warps have read what is overwritten
        for i, part in enumerate(columns):
            to_end = load(smem.keys.at[i], TILE) * self._decay(i)
            self._copy_out(to_end, smem.decayed.at[1, i], self.out.keys.at[rows, part])
        self._count(column <= row)
        for i, part in enumerate(columns):
            from_start = self._decay(i)
            queries, keys = load(smem.queries.at[i], TILE), load(smem.keys.at[i], TILE)
            smem.keys.at[i][...] = (keys * from_start).astype(self.shape.operand)
            queries *= from_start
            self._copy_out(queries, smem.queries.at[i], self.out.queries.at[rows, part])

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
        squares = [
            (target.at[i], start + i * CHUNK)
            for target, start, width in parts
            for i in range(width // CHUNK)
        ]
        for target, start in squares:
            source = self.inputs.at[pl.ds(first, CHUNK), pl.ds(start, CHUNK)]
            self.copies.start(source, target, smem.loaded)
        gates = self.gates.at[self.chunk, self.head]
        self.copies.start(gates, smem.numbers.at[pl.ds(0, 2 * CHUNK)], smem.loaded)
        self.copies.wait(smem.loaded, 0, 0, True)

        @pl.when((self.begin > 0) | (self.end < CHUNK))
        def _() -> None:
            for target, _ in squares:
                zero_rows(target, self.begin, self.end)
            self.copies.commit()

    def _norms(self) -> tuple[Array, Array]:
        """Returns the factors of queries and of keys, float32[CHUNK]."""
        ones = plgpu.layout_cast(jnp.ones(CHUNK, jnp.float32), ROW)
        if not self.rule.normalize:
            return ones * self.rule.scale, ones
        queries, keys = (self._norm(ref) for ref in (self.smem.queries, self.smem.keys))
        return queries * self.rule.scale, keys

    def _norm(self, ref: Ref) -> Array:
        parts = (load(ref.at[i], TILE) for i in range(self.rule.key_size // CHUNK))
        total = functools.reduce(jnp.add, ((part * part).sum(axis=1) for part in parts))
        return lax.rsqrt(total + NORM_EPSILON)

    def _as_column(self, vector: Array) -> Array:
        """Returns a number for each row as one for each column."""
        column = self.smem.numbers.at[pl.ds(2 * CHUNK, CHUNK)]
        column[...] = vector
        self.copies.commit()
        return load(column, COLUMN)

    def _invert(self, lower: Array, row: Array, column: Array) -> Array:
        """Returns ``(I + lower)^-1`` of a strictly lower triangular matrix.

        Powers of ``lower`` would need fewer products, but theirs cancel out where keys are alike.
        """
        # Adds 0, which no compiler knows: ptxas 13.0 loses constants among the registers that are
        # the left operand of wgmma.
        row += lax.broadcast(jnp.minimum(self.begin, 0), SQUARE)
        apart = row ^ column  # its highest bit is the size of the blocks that separate two tokens
        inverse = jnp.where(row == column, 1.0, jnp.where(apart == 1, -lower, 0.0))
        whole, blocks, products = (self.smem.solving.at[i] for i in range(3))
        whole[...] = lower.astype(SOLVING)
        for bit in range(1, CHUNK.bit_length() - 1):
            narrow = inverse.astype(SOLVING)
            blocks[...] = narrow
            self.copies.commit()
            product = self._multiply(whole, blocks)
            below = lax.shift_right_logical(apart, bit) == 1
            products[...] = jnp.where(below, product, 0.0).astype(SOLVING)
            self.copies.commit()
            inverse = inverse - self._multiply(narrow, products)
        return inverse

    def _store_erased(self, solution: Array) -> None:
        smem, solution = self.smem, solution.astype(self.shape.operand)
        self.copies.end_writes(only_reads=True)  # what was staged before is read
        rows = pl.ds(self.item * CHUNK, CHUNK)
        for i in range(self.rule.key_size // CHUNK):
            erased = self._multiply(solution, smem.keys.at[i])
            columns = pl.ds(i * CHUNK, CHUNK)
            self._copy_out(erased, smem.queries.at[i], self.out.erased.at[rows, columns])

    def _store_values(self, solution: Array) -> None:
        """Writes the values that are added."""
        rule, smem = self.rule, self.smem
        rows = pl.ds(self.item * CHUNK, CHUNK)
        self.copies.commit()
        for i in range(rule.value_size // CHUNK):
            added = self._multiply(solution, smem.values.at[i])
            if i * CHUNK >= rule.key_size:
                self.copies.end_writes(only_reads=True)  # what was staged before is read
            staged = smem.keys.at[i % (rule.key_size // CHUNK)]
            columns = pl.ds(i * CHUNK, CHUNK)
            self._copy_out(added, staged, self.out.values.at[rows, columns])

    def _store_factors(self, total: Array, last: Array, queries: Array, keys: Array) -> None:
        end = plgpu.layout_cast(lax.broadcast_in_dim(last, total.shape, []), ROW)
        factors = queries * jnp.exp(total), keys * jnp.exp(end - total), jnp.exp(end)
        for i, factor in enumerate(factors):
            target = self.out.factors.at[self.chunk, self.head, pl.ds(i * CHUNK, CHUNK)]
            store(target, factor)
