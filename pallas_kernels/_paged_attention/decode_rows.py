"""A step of decoding over latent vectors whose rows are copied by their numbers.

They are packed vectors, or those of chosen tokens, which lie anywhere. Each thread copies 16 bytes
at a time by cp.async; see `mla_rows`. Rows that no query sees are not copied: zeros take their
place.

Packed values are used a group at a time. As keys they are widened in registers, and the products
are multiplied by their scales; as values they go through shared memory.
"""

from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from pallas_kernels._fragments import as_keys, encodings, interleave, widen_fours
from pallas_kernels._mosaic import add_by_mma, full_like, sync_warps
from pallas_kernels._paged_attention import mla_rows
from pallas_kernels._paged_attention.decode_block import PACKED_DTYPE
from pallas_kernels._paged_attention.decode_steps import NARROW, DecodeSteps, Step
from pallas_kernels._paged_attention.packed import GROUP
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import STEP, Tile

KEYS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = 64  # of a group that are widened together: registers are short
WORDS = 32  # columns that are loaded together as keys


def packed_queries(queries: Array, config: Config) -> Array:
    """Returns queries as packed keys want them, float16[..., K].

    In the order of these, and the bits of bfloat16 for the rotary part.
    """
    values, rotary = jnp.split(queries, [config.value_width], axis=-1)
    values = interleave(values.astype(jnp.float16), PACKED_DTYPE, is_4_bit=False)
    return jnp.concatenate([values, lax.bitcast_convert_type(rotary, jnp.float16)], axis=-1)


class RowSteps(DecodeSteps):
    """Loads and computes steps whose rows are copied by their numbers."""

    @override
    def _locate(self, tile: Tile, step: Array) -> tuple[list[Array], Array]:
        tables, first_key = self.operands.tables, step * STEP
        seen, no_holes = (tile.begin, tile.end), jnp.int32(0)
        if self.steps.by_row:  # tables have whole steps
            key = lax.min(first_key, jnp.int32(self.steps.width - STEP))
            table = tables.at[tile.request, pl.ds(key, STEP)]
            found = mla_rows.find_rows(self.steps, table, first_key, seen, self.first_row)
            return [found], no_holes
        granules = self.steps.find(tables, tile.request, step)
        first_rows = self.steps.rows(granules, self.first_row)
        index = plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=mla_rows.OF_THREADS)
        none = rows = full_like(index, -1)
        for j, (granule, row) in enumerate(zip(granules, first_rows, strict=True)):
            own = lax.select(granule.allocated, row, jnp.int32(-STEP)) - j * self.steps.granule
            own = lax.broadcast(own, (STEP,))
            is_own = lax.div(index, self.steps.granule) == j
            rows = lax.select(is_own, index + own, rows)
        known = (index + first_key >= seen[0]) & (index + first_key < seen[1])
        return [lax.select(known, rows, none)], no_holes

    @override
    def _fetch(self, granule_rows: list[Array], stage: Array | int) -> None:
        sync_warps()  # what was there is read
        smem, rows = self.smem, self.smem.rows.at[stage]
        if not self.shape.is_packed:
            mla_rows.start_tiled(self.operands.pages, rows, granule_rows[0], smem.loaded.at[stage])
            return
        parts = smem.loaded.at[stage], smem.scales.at[stage], smem.rotary.at[stage]
        mla_rows.start_tiled_packed(self.operands.pages, rows, granule_rows[0], *parts)

    @override
    def _wait(self, stage: Array, is_last: Array) -> None:
        full = self.smem.loaded_full
        if full is None:
            self._wait_for_copies(is_last)
            sync_warps()
            return

        @pl.when(self.warpgroup == 0)  # it copies for both
        def _() -> None:
            self._wait_for_copies(is_last)
            plgpu.barrier_arrive(full.at[stage])

        plgpu.barrier_wait(full.at[stage])

    def _wait_for_copies(self, is_last: Array) -> None:
        ahead = self.shape.stages - 1
        pl.when(is_last)(lambda: mla_rows.finish(0, by_wgmma=False))
        pl.when(~is_last)(lambda: mla_rows.finish(ahead, by_wgmma=False))

    @override
    def _is_allocated(self, here: Step, key: Array) -> Array:
        rows = plgpu.load(self.smem.rows.at[here.stage], layout=KEYS, optimized=False)
        return lax.broadcast_in_dim(rows, key.shape, [0]) >= 0

    @override
    def _clean_values(self, here: Step) -> None:
        """Leaves values as they are: zeros, if no query sees them."""

    @override
    def _multiply_keys(self, stage: Array) -> Array:
        if not self.shape.is_packed:
            return super()._multiply_keys(stage)
        products, width = self._no_products(), self.config.value_width
        factor = encodings(PACKED_DTYPE, is_4_bit=False, values=False)[0].factor
        for group, scales in enumerate(mla_rows.load_scales(self.smem.scales.at[stage])):
            found = self._no_products()
            for first in range(group * GROUP, (group + 1) * GROUP, WORDS):
                words = mla_rows.load_words(self.smem.loaded.at[stage], first)
                (keys,) = as_keys(words, PACKED_DTYPE, is_4_bit=False)
                found = add_by_mma(found, keys, self.query.at[:, pl.ds(first, WORDS)].T)
            scales = lax.broadcast_in_dim(scales * (1 / factor), found.shape, [0])
            products += found * scales
        layout = plgpu.Layout.MMA_RHS(self.query.dtype)
        query = plgpu.load(
            self.query.at[:, pl.ds(width, self.config.key_width - width)].T, layout=layout
        )
        query = lax.bitcast_convert_type(query, self.shape.compute)
        return add_by_mma(products, self.smem.rotary.at[stage], query)

    @override
    def _add_values(self, before: list[Array], shrink: Array, stage: Array) -> list[Array]:
        if not self.shape.is_packed:
            return super()._add_values(before, shrink, stage)
        compute, out = self.shape.compute, list[Array]()
        weights = plgpu.load(self.weights.T, layout=plgpu.Layout.MMA_RHS(compute))
        scales = [
            plgpu.layout_cast(one, NARROW.reduce(1))
            for one in mla_rows.load_scales(self.smem.scales.at[stage])
        ]
        for group, sums in enumerate(before):
            parts = [
                (part * lax.broadcast_in_dim(scales[group], part.shape, [0])).astype(compute)
                for part in self._load(stage, group)
            ]
            if group:  # the values of the step before were read before its maxima
                sync_warps()
            for i, part in enumerate(parts):
                self.smem.widened.at[:, pl.ds(i * COLUMNS, COLUMNS)][...] = part
            self._commit()
            sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [1])
            out.append(add_by_mma(sums, self.smem.widened.T, weights))
        return out

    def _no_products(self) -> Array:
        zeros = jnp.zeros((STEP, self.shape.rows), jnp.float32)
        return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def _load(self, stage: Array, group: int) -> list[Array]:
        """Returns the values of a group in float32, some columns each, without their scales."""
        source = self.smem.loaded.at[stage, :, pl.ds(group * GROUP, GROUP)]
        loaded = plgpu.load(source, layout=NARROW, optimized=False)
        firsts = range(0, GROUP, COLUMNS)
        parts = [lax.slice(loaded, (0, i), (STEP, i + COLUMNS)) for i in firsts]
        if not _capability.widens_8_bits(PACKED_DTYPE):
            return [widen_fours(part) for part in parts]
        return [part.astype(jnp.float16).astype(jnp.float32) for part in parts]
