"""A step of decoding over latent vectors of chosen tokens, in pages of one token.

They lie anywhere, so that each thread copies 16 bytes at a time by cp.async; see `mla_rows`. Rows
that no query sees are not copied: zeros take their place.
"""

from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import sync_warps
from pallas_kernels._paged_attention import mla_rows
from pallas_kernels._paged_attention.decode_steps import DecodeSteps, Step
from pallas_kernels._paged_attention.tasks import STEP, Tile

KEYS = plgpu.Layout.WGMMA.reduce(1)


class RowSteps(DecodeSteps):
    """Loads and computes steps whose rows are copied by their numbers."""

    @override
    def _locate(self, tile: Tile, step: Array) -> tuple[list[Array], Array]:
        tables, first_key = self.operands.tables, step * STEP
        seen, no_holes = (tile.begin, tile.end), jnp.int32(0)
        key = lax.min(first_key, jnp.int32(self.steps.width - STEP))  # tables have whole steps
        table = tables.at[tile.request, pl.ds(key, STEP)]
        found = mla_rows.find_rows(self.steps, table, first_key, seen, self.first_row)
        return [found], no_holes

    @override
    def _fetch(self, granule_rows: list[Array], stage: Array | int) -> None:
        sync_warps()  # what was there is read
        rows, target = self.smem.rows.at[stage], self.smem.loaded.at[stage]
        mla_rows.start_tiled(self.operands.pages, rows, granule_rows[0], target)

    @override
    def _wait(self, stage: Array, is_last: Array) -> None:
        pl.when(is_last)(lambda: mla_rows.finish(0, by_wgmma=False))
        ahead = self.shape.stages - 1
        pl.when(~is_last)(lambda: mla_rows.finish(ahead, by_wgmma=False))
        sync_warps()

    @override
    def _is_allocated(self, here: Step, key: Array) -> Array:
        rows = plgpu.load(self.smem.rows.at[here.stage], layout=KEYS, optimized=False)
        return lax.broadcast_in_dim(rows, key.shape, [0]) >= 0

    @override
    def _clean_values(self, here: Step) -> None:
        """Leaves values as they are: zeros, if no query sees them."""
