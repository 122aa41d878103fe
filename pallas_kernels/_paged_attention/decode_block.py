"""A thread block that decodes: its operands and its shared memory."""

import math
from typing import NamedTuple, Self

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, Scratch, tiled, tiled_by
from pallas_kernels._paged_attention.copies import copies_of
from pallas_kernels._paged_attention.decode_shape import DecodeShape
from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.tasks import STEP

COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # of a vector with one number per column


class Outputs(NamedTuple):
    """References to the output, [T, heads, V], and to the log-sum-exp of tiles.

    lse: float32[N, kv_heads, rows], of prefill float32[N, heads, 2, 64]; undefined for empty tiles.
    """

    out: Ref
    lse: Ref


class DecodeOperands(NamedTuple):
    """References to the arrays of a call, and to the results of splits."""

    tiles: Ref
    workers: Ref
    tables: Ref
    queries: Ref
    numbers: Ref
    first_row: Ref
    pages: Ref
    outputs: Outputs | None
    splits: PartialSoftmax[Ref]

    @classmethod
    def from_refs(cls, *refs: Ref, finishes: bool) -> Self:
        tiles, workers, tables, queries, numbers, first_row, pages, *outputs, out, high, total = (
            refs
        )
        arrays = tiles, workers, tables, queries, numbers, first_row, pages
        written = Outputs(*outputs) if finishes else None
        return cls(*arrays, written, PartialSoftmax(out, high, total))


class DecodeScratch[T](NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    loaded: stages of steps, each key followed by its value.
    query: the queries of a tile.
    weights: of the keys of a step.
    staged: some rows of the output, for each window of values; none if tiles are not finished.
    loaded_full, query_full: barriers of copies by TMA; None for others.
    widened: 8-bit values in 16 bits; None for 16-bit pages.
    """

    loaded: T
    query: T
    weights: T
    staged: list[T]
    loaded_full: T
    query_full: T
    widened: T

    @classmethod
    def from_shape(cls, shape: DecodeShape) -> "DecodeScratch[Scratch]":
        config, width = shape.config, shape.config.row_width
        align = math.gcd(config.key_width, config.value_width)
        copies = copies_of(shape)
        return cls(
            loaded=tiled_by((shape.stages, STEP, width), shape.page, shape.swizzle),
            query=tiled((shape.rows, config.key_width), shape.compute, align),
            weights=tiled((shape.rows, STEP), shape.compute, math.gcd(align, STEP)),
            staged=[
                plgpu.SMEM((shape.staged, width), config.out_dtype)
                for _, width in config.value_parts
                if shape.finishes
            ],
            loaded_full=copies.barrier(shape.stages, shape.steps.granules),
            query_full=copies.barrier(1, 1),
            widened=tiled((STEP, config.value_width), shape.compute) if shape.widens else None,
        )
