"""Latent vectors in the shared memory of the Mosaic GPU kernel that attends to them."""

from collections.abc import Sequence
from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, Scratch, full_like, tiled
from pallas_kernels._paged_attention import mla_rows
from pallas_kernels._paged_attention.common import FOURS
from pallas_kernels._paged_attention.decode_shape import DecodeShape
from pallas_kernels._paged_attention.packed import GROUP
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.tasks import STEP

HALVES = 2  # of a value, one for each warpgroup that computes
COLUMNS = 64  # of values that are cleaned or widened together: registers are short
NARROW, WIDE = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA


def opaque_zero(line_step: Array) -> Array:
    """Returns 0, which the compiler cannot tell.

    If it could, it would compute the addresses of all operands early, and run out of registers.
    """
    return line_step >> 30


class Latents:
    """16-bit vectors, used where the copy engine put them.

    stages: steps of loaded vectors that fit into shared memory.
    num_views: arrays of pages that the kernel takes.
    num_copies: copies that load a granule.
    """

    stages, num_views, num_copies = 2, 1, 1

    def __init__(self, shape: DecodeShape, pages: Sequence[Ref], loaded: Ref) -> None:
        self.shape, self.pages, self.loaded = shape, pages, loaded

    @staticmethod
    def views(pages: StridedPages) -> list[Array]:
        """Returns the arrays of pages that the kernel takes."""
        return [pages.rows()]

    @classmethod
    def scratch(cls, shape: DecodeShape) -> tuple[Scratch, list[Scratch]]:
        """Returns the shared memory for vectors as they are loaded, and all else that they need."""
        return tiled((cls.stages, STEP, shape.config.key_width), shape.page), []

    def fetch(self, row: Array, stage: Array, first: int, full: Ref, axes: str | None) -> None:
        """Starts to load the granule at ``row`` of the pages into a stage, from ``first`` on."""
        n = self.shape.steps.granule
        plgpu.copy_gmem_to_smem(
            self.pages[0].at[pl.ds(row, n)],
            self.loaded.at[stage, pl.ds(first, n)],
            full.at[stage],
            collective_axes=axes,
        )

    def fetch_rows(self, found: Array, rows: Ref, stage: Array) -> None:
        """Starts to load rows of the pages into a stage; see `mla_rows`."""
        mla_rows.start_tiled(self.pages[0], rows, found, self.loaded.at[stage])

    def keys(self, line_step: Array, stage: Array) -> Ref:
        """Returns the rows of a step in 16 bits."""
        del line_step
        return self.loaded.at[stage]

    def values(self, line_step: Array, stage: Array, columns: pl.Slice) -> Ref:
        """Returns some columns of the rows of a step in 16 bits."""
        del line_step
        return self.loaded.at[stage, :, columns]


class WidenedLatents(Latents):
    """8-bit vectors, which are widened before they are used.

    Each warpgroup that computes widens the columns of its own values, and the second one the rest
    of the keys, too. One step of wide vectors fits; meanwhile the next steps are loaded.

    full: barrier; the second warpgroup has widened its columns.
    """

    def __init__(
        self,
        shape: DecodeShape,
        pages: Sequence[Ref],
        loaded: Ref,
        wide: Ref,
        full: Ref,
    ) -> None:
        super().__init__(shape, pages, loaded)
        self.wide, self.full = wide, full

    @override
    @classmethod
    def scratch(cls, shape: DecodeShape) -> tuple[Scratch, list[Scratch]]:
        width = shape.config.key_width
        wide = tiled((1, STEP, width), shape.compute)
        return tiled((cls.stages, STEP, width), shape.page, COLUMNS), [wide, plgpu.Barrier()]

    @override
    def keys(self, line_step: Array, stage: Array) -> Ref:
        del stage
        return self.wide.at[opaque_zero(line_step)]

    @override
    def values(self, line_step: Array, stage: Array, columns: pl.Slice) -> Ref:
        del stage
        return self.wide.at[opaque_zero(line_step), :, columns]

    def widen(self, line_step: Array, stage: Array, half: int, known: Array | None) -> None:
        """Widens the columns of a half, and puts zeros in line_step of values that are not known.

        Args:
          known: bool[STEP, COLUMNS], in the layout `NARROW`; None: all values are known.
        """
        config = self.shape.config
        width = config.value_width // HALVES
        firsts = range(half * width, width if half == 0 else config.key_width, COLUMNS)
        plgpu.commit_smem()  # also a barrier: all have added the values of the step before
        parts = [self._load(stage, first) for first in firsts]
        for first, part in zip(firsts, self._widen(stage, firsts, parts), strict=True):
            if known is not None and first < config.value_width:
                part = jnp.where(known, part, full_like(part, 0))
            self.values(line_step, stage, pl.ds(first, COLUMNS))[...] = part
        plgpu.commit_smem()

    def _load(self, stage: Array, first: int) -> Array:
        return plgpu.load(self.loaded.at[stage, :, pl.ds(first, COLUMNS)], layout=NARROW)

    def _widen(self, stage: Array, firsts: Sequence[int], parts: list[Array]) -> list[Array]:
        """Returns some columns, which begin at ``firsts``, in 16 bits."""
        del stage, firsts
        return [part.astype(self.shape.compute) for part in parts]


class PackedLatents(WidenedLatents):
    """Packed vectors, whose groups of values, scales and rotary parts are loaded separately.

    A copy of 128 bytes a row would put all of them into the same banks of shared memory. So a copy
    brings 16 bytes more, after a group or before the rotary part.
    """

    stages, num_views, num_copies = 1, 3, 6
    GROUPS = 4

    def __init__(self, shape: DecodeShape, pages: Sequence[Ref], *arguments: Ref) -> None:
        *others, self.scales, self.rotary = arguments
        super().__init__(shape, pages, *others)

    @override
    @staticmethod
    def views(pages: StridedPages) -> list[Array]:
        return [pages.rows_as(dtype) for dtype in ("float8_e4m3fn", "float32", "bfloat16")]

    @override
    @classmethod
    def scratch(cls, shape: DecodeShape) -> tuple[Scratch, list[Scratch]]:
        loaded = plgpu.SMEM((1, cls.GROUPS, STEP, GROUP + 16), jnp.float8_e4m3fn)
        wide = tiled((1, STEP, shape.config.key_width), shape.compute)
        scales = plgpu.SMEM((1, STEP, cls.GROUPS), jnp.float32)
        rotary = plgpu.SMEM((1, STEP, COLUMNS + 8), shape.compute)
        return loaded, [wide, plgpu.Barrier(), scales, rotary]

    @override
    def fetch(self, row: Array, stage: Array, first: int, full: Ref, axes: str | None) -> None:
        n, width = self.shape.steps.granule, self.shape.config.value_width
        values, scales, rotary = [view.at[pl.ds(row, n)] for view in self.pages]
        rows = pl.ds(first, n)
        copies = [(scales, width // 4, self.scales.at[stage, rows])]
        copies.append((rotary, width // 2, self.rotary.at[stage, rows]))
        for group in range(self.GROUPS):
            copies.append((values, group * GROUP, self.loaded.at[stage, group, rows]))
        for source, begin, target in copies:
            part = source.at[:, pl.ds(begin, target.shape[1])]
            plgpu.copy_gmem_to_smem(part, target, full.at[stage], collective_axes=axes)

    @override
    def fetch_rows(self, found: Array, rows: Ref, stage: Array) -> None:
        parts = self.loaded.at[stage], self.scales.at[stage], self.rotary.at[stage]
        mla_rows.start_packed(self.pages[0], rows, found, *parts)

    @override
    def _load(self, stage: Array, first: int) -> Array:
        if first < self.shape.config.value_width:
            group, column = divmod(first, GROUP)
            rows = plgpu.load(self.loaded.at[stage, group], layout=NARROW, optimized=False)
        else:
            rows, column = plgpu.load(self.rotary.at[stage], layout=WIDE, optimized=False), 8
        return lax.slice(rows, (0, column), (STEP, column + COLUMNS))

    @override
    def _widen(self, stage: Array, firsts: Sequence[int], parts: list[Array]) -> list[Array]:
        loaded = plgpu.load(self.scales.at[stage], layout=FOURS, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 1, layout=FOURS)
        scales: dict[int, Array] = {}
        widened: list[Array] = []
        for first, part in zip(firsts, parts, strict=True):
            group = first // GROUP
            if group < self.GROUPS:
                if group not in scales:
                    own = jnp.where(column == group, loaded, full_like(loaded, 0)).sum(axis=1)
                    scales[group] = plgpu.layout_cast(own, NARROW.reduce(1))
                # Through float16, because no conversion to float32 is direct.
                part = part.astype(jnp.float16).astype(jnp.float32)
                part = part * lax.broadcast_in_dim(scales[group], part.shape, [0])
            widened.append(part.astype(self.shape.compute))
        return widened
