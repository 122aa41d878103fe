"""A thread block that decodes: its constants, its operands and its shared memory."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import _capability, _mosaic
from pallas_kernels._mosaic import Ref, Scratch, tiled
from pallas_kernels._paged_attention.common import PartialSoftmax, Steps
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import STEP

SMEM_PER_SM = 227 * 1024
LOOKAHEAD_BYTES = 128 * 1024  # in flight per SM; with more, thread blocks slow each other down
STAGES = 2  # steps that a thread block prefetches
SCALE, VALUE_SCALE, SINKS = range(3)  # columns of the numbers of a KV head
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # of a vector with one number per column


class DecodeShape(NamedTuple):
    """Constants of a compiled kernel.

    rows: query heads of a tile, a multiple of 8.
    page: dtype of the pages.
    compute: 16-bit dtype of the products.
    """

    config: Config
    steps: Steps
    rows: int
    page: jnp.dtype
    compute: jnp.dtype

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def staged(self) -> int:
        """Returns the rows of the output that are written at once; few where memory is short."""
        return 8 if self.widens else math.gcd(self.rows, 32)

    @property
    def is_small(self) -> bool:
        """Returns whether a thread has registers for the keys and the values of a step at once."""
        return self.rows == 8

    @property
    def thread_blocks_per_sm(self) -> int:
        """Returns the thread blocks that fit on an SM and load `LOOKAHEAD_BYTES` at most."""
        config = self.config
        lookahead = STAGES * STEP * (config.key_width + config.value_width) * self.page.itemsize
        used = lookahead + self.rows * (config.key_width + STEP) * 2 + 4096
        if self.widens:
            used += STEP * config.value_width * 2
        else:
            used += self.staged * (config.value_width + STEP) * config.out_dtype.itemsize
        fits_three = self.rows <= 16 and (self.widens or config.value_width <= 64)
        by_registers = 4 if self.is_small and not self.widens else 3 if fits_three else 2
        return max(1, min(by_registers, SMEM_PER_SM // used, LOOKAHEAD_BYTES // lookahead))

    @property
    def num_workers(self) -> int:
        blocks = _capability.max_thread_blocks(self.thread_blocks_per_sm)
        return max(1, blocks // self.config.kv_heads)


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
    widened: 8-bit values in 16 bits; None for 16-bit pages.
    widened_keys: 8-bit keys in 16 bits, for interpret mode; None on a GPU.
    """

    loaded: T
    query: T
    weights: T
    staged: list[T]
    loaded_full: T
    query_full: T
    widened: T
    widened_keys: T

    @classmethod
    def from_shape(cls, shape: DecodeShape, out: DTypeLike | None) -> "DecodeScratch[Scratch]":
        """Returns the types for a kernel that finishes tiles in dtype ``out``, or None."""
        config = shape.config
        align = math.gcd(config.key_width, config.value_width)
        widened = widened_keys = None
        if shape.widens:
            widened = tiled((STEP, config.value_width), shape.compute)
            if not _mosaic.OPERANDS_IN_REGISTERS:
                widened_keys = tiled((STEP, config.key_width), shape.compute)
        return cls(
            loaded=tiled((STAGES, STEP, config.key_width + config.value_width), shape.page, align),
            query=tiled((shape.rows, config.key_width), shape.compute, align),
            weights=tiled((shape.rows, STEP), shape.compute, math.gcd(align, STEP)),
            staged=[
                plgpu.SMEM((shape.staged, width), out)
                for _, width in config.value_parts
                if out is not None
            ],
            loaded_full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=shape.steps.granules),
            query_full=plgpu.Barrier(),
            widened=widened,
            widened_keys=widened_keys,
        )
