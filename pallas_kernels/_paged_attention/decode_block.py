"""A thread block that decodes: its operands and its shared memory."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, Scratch, tiled, tiled_by
from pallas_kernels._paged_attention.copies import copies_of
from pallas_kernels._paged_attention.decode_shape import (
    MERGED,
    SCALES,
    DecodeShape,
)
from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.tasks import STEP
from pallas_kernels._warp_rows import GROUP

PACKED_DTYPE = jnp.dtype(jnp.float8_e4m3fn)  # of the values of packed vectors
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
    scales: Ref | None
    outputs: Outputs | None
    splits: PartialSoftmax[Ref]

    @classmethod
    def from_refs(cls, *refs: Ref, shape: DecodeShape) -> Self:
        tiles, workers, tables, queries, numbers, first_row, pages, *rest, out, high, total = refs
        scales = None if shape.config.token_head_row is None else rest.pop(0)
        arrays = tiles, workers, tables, queries, numbers, first_row, pages, scales
        written = Outputs(*rest) if shape.finishes else None
        return cls(*arrays, written, PartialSoftmax(out, high, total))


class DecodeScratch[T](NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    loaded: stages of steps, each key followed by its value.
    query: the queries of a tile.
    weights: of the keys of a step.
    reduced: what warps exchange of sums over keys; None: Mosaic has memory for it.
    staged: some rows of the output, for each window of values; none if tiles are not finished.
    loaded_full, query_full: barriers of copies by TMA; None for others.
    loaded_free: a barrier for each stage, at which the warpgroups arrive; None for one warpgroup.
    widened: values of 8 or 4 bits in 16 bits; None for 16-bit pages, and for warps.
    merged: sums of warps; None if they have none of their own.
    scales: stages of the scales of keys and values, or of the groups of packed vectors; None if
      tokens have none of their own.
    rotary: stages of the rotary parts of packed vectors; None for others.
    rows: stages of the numbers of rows, -1 for zeros; None if rows are not copied by them.
    """

    loaded: T
    query: T
    weights: T
    reduced: T
    staged: list[T]
    loaded_full: T
    loaded_free: T
    query_full: T
    widened: T
    merged: T
    scales: T
    rotary: T
    rows: T

    @classmethod
    def from_shape(cls, shape: DecodeShape) -> "DecodeScratch[Scratch]":
        config, row, own = shape.config, shape.config.token_head_row, shape.own
        # Elements of 4 bits are those of a half of a key or of a value.
        align = math.gcd(*config.stored_widths, GROUP if shape.by_warp else 0)
        of_weights = math.gcd(align, STEP)
        align = math.gcd(align, GROUP) if shape.is_packed else align
        copies = copies_of(shape)
        num_copies = shape.steps.granules * (1 if row is None else 2)
        loaded = tiled_by((shape.stages, STEP, shape.width), shape.page, shape.swizzle)
        rotary = None
        if shape.is_packed:
            widths = config.value_width, config.key_width - config.value_width
            loaded = tiled_by((shape.stages, STEP, widths[0]), PACKED_DTYPE, shape.swizzle)
            rotary = tiled_by((shape.stages, STEP, widths[1]), shape.compute, shape.swizzle)
        full = copies.barrier(shape.stages, num_copies)
        if shape.by_row:  # one warpgroup tells the other one
            full = plgpu.Barrier(num_barriers=shape.stages) if own else None
        has_scales = row is not None or shape.is_packed
        return cls(
            loaded=loaded,
            query=tiled((*own, shape.rows, config.key_width), shape.query_dtype, align),
            weights=tiled((*own, shape.rows, STEP), shape.value_compute, of_weights),
            reduced=plgpu.SMEM((*own, shape.reduced), jnp.float32) if shape.reduced else None,
            staged=[
                plgpu.SMEM((shape.staged, width), config.out_dtype)
                for _, width in config.value_parts
                if shape.finishes
            ],
            loaded_full=full,
            loaded_free=plgpu.Barrier(num_barriers=shape.stages, num_arrivals=shape.warpgroups)
            if own
            else None,
            query_full=copies.barrier(shape.warpgroups, 1),
            widened=tiled((STEP, shape.widened_width), shape.value_compute, config.stored_widths[1])
            if shape.widens and not shape.by_warp
            else None,
            merged=plgpu.SMEM((MERGED,), jnp.float32) if shape.by_warp else None,
            scales=plgpu.SMEM((shape.stages, STEP, SCALES), jnp.float32) if has_scales else None,
            rotary=rotary,
            rows=plgpu.SMEM((shape.stages, STEP), jnp.int32) if shape.by_row else None,
        )
