"""A step of decoding: 64 keys of a request, added to the softmax of its queries."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float32

from pallas_kernels._mosaic import Ref, full_like
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import multiply
from pallas_kernels._paged_attention.decode_block import (
    COLUMNS,
    DecodeOperands,
    DecodeScratch,
    DecodeShape,
)
from pallas_kernels._paged_attention.tasks import STEP, Tile

NARROW = plgpu.Layout.WGMMA_8BIT


class RunningSoftmax(NamedTuple):
    """A running softmax. ``total`` is per key and column, and summed at the end."""

    out: list[Float32[Array, "values columns"]]  # for each part of the values
    highest: Float32[Array, " columns"]
    total: Float32[Array, "keys columns"]


class Step(NamedTuple):
    """A step: its tile, its number, its stage, and a bit for each hole."""

    tile: Tile
    step: Array
    stage: Array
    holes: Array


class DecodeSteps:
    """Loads and computes steps, in one thread block."""

    def __init__(
        self, shape: DecodeShape, operands: DecodeOperands, scratch: DecodeScratch[Ref]
    ) -> None:
        self.shape, self.config, self.steps = shape, shape.config, shape.steps
        self.operands, self.smem = operands, scratch
        self.head, self.worker = lax.axis_index("head"), lax.axis_index("worker")
        self.first_row, column = self.steps.head(operands.first_row[0], self.head)
        self.columns = pl.ds(column, self.config.row_width)

    def _start(self) -> RunningSoftmax:
        rows, columns = plgpu.Layout.WGMMA, self.shape.rows
        return RunningSoftmax(
            [
                plgpu.layout_cast(jnp.zeros((width, columns), jnp.float32), rows)
                for _, width in self.config.value_parts
            ],
            plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((STEP, columns), jnp.float32), rows),
        )

    def _locate(self, request: Array, step: Array) -> tuple[list[Array], Array]:
        found = self.steps.find(self.operands.tables, request, step)
        return self.steps.rows(found, self.first_row), self.steps.holes(found)

    def _fetch(self, granule_rows: list[Array], stage: Array | int) -> None:
        """Starts loading the keys and values of a step."""
        n = self.steps.granule
        for j, row in enumerate(granule_rows):
            plgpu.copy_gmem_to_smem(
                self.operands.pages.at[pl.ds(row, n), self.columns],
                self.smem.loaded.at[stage, pl.ds(j * n, n)],
                self.smem.loaded_full.at[stage],
            )

    def _step(self, here: Step, scale: Array, running: RunningSoftmax) -> RunningSoftmax:
        """Adds the 64 keys in a stage to a running softmax."""
        shape, (tile, step, stage, holes) = (STEP, self.shape.rows), here
        plgpu.barrier_wait(self.smem.loaded_full.at[stage])
        values = self.smem.loaded.at[
            stage, :, pl.ds(self.config.key_width, self.config.value_width)
        ]
        clean = values if self.smem.widened is None else self.smem.widened
        keys = self._keys(stage)

        def multiply_keys(products: Ref) -> Array:
            plgpu.wgmma(products, keys, self.smem.query.T)
            if self.shape.is_small:  # while the tensor cores work
                self._clean_values(tile, step, holes, values, clean)
            return products[...]

        products = pl.run_scoped(multiply_keys, plgpu.ACC(shape, jnp.float32))
        scores, factor = common.cap(self.config, products, scale)
        seen = self._seen(tile, step, holes, shape)
        scores = lax.select(seen, scores * factor, full_like(scores, -jnp.inf))
        highest = lax.max(running.highest, scores.max(axis=0))
        finite = common.finite_or_zero(highest)
        shrink = jnp.exp2(running.highest - finite)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(finite, shape, [1]))
        total = running.total * lax.broadcast_in_dim(shrink, shape, [1]) + weights
        self.smem.weights.T[...] = weights.astype(self.shape.compute)
        if not self.shape.is_small:
            self._clean_values(tile, step, holes, values, clean)
        plgpu.commit_smem()
        out: list[Array] = []
        for (first, width), before in zip(self.config.value_parts, running.out, strict=True):
            added = multiply(clean.at[:, pl.ds(first, width)].T, self.smem.weights.T)
            out.append(before * lax.broadcast_in_dim(shrink, added.shape, [1]) + added)
        return RunningSoftmax(out, highest, total)

    def _keys(self, stage: Array) -> Array | Ref:
        """Returns a step's keys in 16 bits."""
        keys = self.smem.loaded.at[stage, :, pl.ds(0, self.config.key_width)]
        if not self.shape.widens:
            return keys
        widened = keys[...].astype(self.shape.compute)
        if self.smem.widened_keys is None:
            return widened
        self.smem.widened_keys[...] = widened
        plgpu.commit_smem()
        return self.smem.widened_keys

    def _seen(self, tile: Tile, step: Array, holes: Array, shape: tuple[int, int]) -> Array:
        """Returns bool[STEP, columns]: which keys of a step each query sees."""
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        queries = lax.div(column, self.config.group) + tile.position
        seen = common.sees(self.config, tile, queries, key + step * STEP)
        return seen & self.steps.is_allocated(key, holes)

    def _clean_values(self, tile: Tile, step: Array, holes: Array, values: Ref, clean: Ref) -> None:
        """Writes a step's values in 16 bits, with zeros where no query sees them."""
        key = step * STEP
        partial = (key < tile.begin) | (key + STEP > tile.end) | (holes != 0)

        @pl.when(partial)
        def _() -> None:
            common.zero_unseen(values, clean, self.steps, holes, key, (tile.begin, tile.end))

        if self.smem.widened is not None:

            @pl.when(~partial)
            def _() -> None:
                loaded = plgpu.load(values, layout=NARROW)
                clean[...] = loaded.astype(self.shape.compute)
