"""Shared memory of the kernels of prompts: its types, or references to it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Scratch, tiled
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_copies import copies_of
from pallas_kernels._recurrence.prompt_shape import COPIED, FACTORS, PromptParts, PromptShape

SQUARE = (CHUNK, CHUNK)
SOLVING = jnp.float16  # of the operands of a triangular matrix's inverse


class PartsScratch[T](NamedTuple):
    """Shared memory of the kernel of parts. Matrices are in squares, side by side.

    queries, keys: also for parts on their way out, when they are not needed any more.
    decayed: queries and keys with decays for each key channel; None without.
    solving: the triangular matrix, and operands of the products of its inverse; until then, the
      logarithms of decays for each key channel, and at last the tokens that they are summed over.
    numbers: of each token, the logarithm of the decay, beta, and the factor of its key.
    lefts: operands that interpret mode does not take from registers; None on a GPU.
    """

    queries: T
    keys: T
    values: T
    decayed: T
    solving: T
    numbers: T
    lefts: tuple[T, T]
    loaded: T

    @classmethod
    def from_shape(cls, shape: PromptShape) -> "PartsScratch[Scratch]":
        rule, operand = shape.rule, shape.operand
        key_squares, value_squares = rule.key_size // CHUNK, rule.value_size // CHUNK
        lefts: tuple[Scratch, Scratch] = None, None
        if shape.by_wgmma and not _mosaic.OPERANDS_IN_REGISTERS:
            lefts = tiled(SQUARE, operand), tiled(SQUARE, SOLVING)
        return cls(
            queries=tiled((key_squares, *SQUARE), operand),
            keys=tiled((key_squares, *SQUARE), operand),
            values=tiled((value_squares, *SQUARE), operand),
            decayed=tiled((2, key_squares, *SQUARE), operand) if shape.decay_per_key else None,
            solving=tiled((3, *SQUARE), SOLVING) if rule.delta else None,
            numbers=plgpu.SMEM((3 * CHUNK,), jnp.float32),
            lefts=lefts,
            loaded=copies_of(shape.by_tma).barrier(1, 1 + 2 * key_squares + value_squares),
        )


class StatesScratch[T](NamedTuple):
    """Shared memory of the kernel of states.

    decay: of each key channel; None if all have one.
    staged, plain: outputs on their way out, of whole tiles and of others.
    left: operands that interpret mode does not take from registers; None on a GPU.
    loaded: barriers of all parts; with mma, of erased, values and queries.
    rest: barriers of the other parts, with mma; else None.
    """

    parts: PromptParts[T]
    decay: T
    staged: T
    plain: T
    left: T
    loaded: T
    rest: T

    @classmethod
    def from_shape(cls, shape: PromptShape, out: DTypeLike) -> "StatesScratch[Scratch]":
        rule, dtype, stages = shape.rule, shape.operand, shape.stages
        tokens, squares = tiled((stages, CHUNK, rule.key_size), dtype), (stages, *SQUARE)
        copies, left = copies_of(shape.by_tma), None
        if shape.by_wgmma and not _mosaic.OPERANDS_IN_REGISTERS:
            left = tiled((CHUNK, rule.key_size), dtype)
        early, late = 2 + rule.delta, 3 + shape.decay_per_key
        return cls(
            parts=PromptParts(
                inner=tiled(squares, dtype),
                erased=tokens if rule.delta else None,
                values=tiled(squares, dtype),
                factors=plgpu.SMEM((stages, FACTORS), jnp.float32),
                queries=tokens,
                keys=tokens,
            ),
            decay=plgpu.SMEM((stages, COPIED), jnp.float32) if shape.decay_per_key else None,
            staged=tiled(SQUARE, out),
            plain=plgpu.SMEM(SQUARE, out),
            left=left,
            loaded=copies.barrier(stages, early + (late if shape.by_wgmma else 0)),
            rest=None if shape.by_wgmma else copies.barrier(stages, late),
        )
