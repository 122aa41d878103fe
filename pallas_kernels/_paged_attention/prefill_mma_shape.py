"""The constants of the kernel that prefills by mma, and what fits into shared memory. No Mosaic."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp

from pallas_kernels import _capability
from pallas_kernels._paged_attention.decode_shape import (
    BARRIER_BYTES,
    SHARED_ALIGN,
    page_and_compute_dtype,
    step_sizes,
    swizzle_of,
)
from pallas_kernels._paged_attention.prefill_tasks import QUERIES, ROWS
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.steps import Steps
from pallas_kernels._paged_attention.tiles import AttentionArrays

KEYS, FEWER_KEYS = 64, 32  # of a step; with fewer, more thread blocks with wide rows fit on an SM
MAX_STAGES = 2
BY_REGISTERS = 2  # thread blocks on an SM: threads have up to 255 registers
WIDEST_TILE = 128  # of keys and of values, for which registers hold the sums of a whole tile


class MmaShape(NamedTuple):
    """Constants of a compiled kernel.

    page: dtype of the pages.
    compute: 16-bit dtype of the products.
    by_tma: whether pages are copied by TMA; else by cp.async.
    halves: of a tile that a thread block takes; with both, fewer bytes are loaded for each product.
    stages: steps that are prefetched.
    """

    config: Config
    steps: Steps
    page: jnp.dtype
    compute: jnp.dtype
    by_tma: bool
    halves: int
    stages: int

    @classmethod
    def choose(cls, arrays: AttentionArrays, config: Config) -> Self | None:
        """Returns the constants of a call on the default device; None if it does not fit."""
        page, compute = page_and_compute_dtype(arrays)
        by_tma = _capability.instructions_of("prefill") != "mma, cp.async"
        most = 1 if max(config.key_width, config.value_width) > WIDEST_TILE else 2
        stages = 1 if page.itemsize == 1 else MAX_STAGES
        # Rows that are widened are loaded by 64, and 32 are cleaned by 32 columns.
        may_have_fewer = most == 1 and page.itemsize > 1 and config.value_width % 32 == 0
        sizes = (KEYS, FEWER_KEYS) if may_have_fewer else (KEYS,)
        shapes = [
            cls(config, step_sizes(arrays, keys), page, compute, by_tma, halves, count)
            for keys in sizes
            for halves in range(most, 0, -1)
            for count in range(stages, 0, -1)
        ]
        # First as many queries on an SM as fit, then thread blocks and stages.
        return max(
            [shape for shape in shapes if shape.swizzles and shape.per_sm],
            key=lambda shape: (shape.halves * shape.per_sm, shape.per_sm),
            default=None,
        )

    @property
    def widens(self) -> bool:
        return self.page.itemsize == 1

    @property
    def keys(self) -> int:
        """Returns the keys of a step."""
        return self.steps.size

    @property
    def parts(self) -> int:
        """Returns the thread blocks that share the queries of a tile and a head."""
        return QUERIES // (self.halves * ROWS)

    @property
    def swizzles(self) -> tuple[int, int] | None:
        """Returns the bytes of a row in a tile of loaded keys and of values; None: no tiling."""
        widths, page = (self.config.key_width, self.config.value_width), self.page.itemsize
        of_keys, of_values = [
            swizzle_of(width * page, math.gcd(*widths) * page, self.steps.granule, self.by_tma)
            for width in widths
        ]
        return (of_keys, of_values) if of_keys and of_values else None

    @property
    def per_sm(self) -> int:
        """Returns the thread blocks that fit on an SM."""
        limit, used = _capability.shared_memory_bytes(), self._shared_bytes()
        return min(BY_REGISTERS, limit // used)

    def _shared_bytes(self) -> int:
        """Returns the shared memory of a thread block."""
        config, item = self.config, self.compute.itemsize
        queries = self.halves * ROWS * config.key_width * item
        step = self.keys * config.row_width
        # The output is staged where keys and values were.
        loaded = max(self.stages * step * item, ROWS * config.value_width * item)
        arrays = queries, loaded, step * self.widens
        aligned = sum(-(-size // SHARED_ALIGN) * SHARED_ALIGN for size in arrays)
        return aligned + BARRIER_BYTES
