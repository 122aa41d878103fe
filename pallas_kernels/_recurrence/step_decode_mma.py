"""The same as `step_decode` for bfloat16 states, whose products tensor cores compute."""

from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import load, store, sync_warps
from pallas_kernels._recurrence.ring_products import (
    COLUMNS,
    multiply_ring,
    pairs_layout,
    split_added,
    store_pairs,
)
from pallas_kernels._recurrence.state_products import load_factors, multiply_state, store_factors
from pallas_kernels._recurrence.step_common import Item
from pallas_kernels._recurrence.step_decode import Head, ReplayDecoder


class MmaReplayDecoder(ReplayDecoder):
    """Steps of one token, of bfloat16 states."""

    @override
    def _name_scratch(self) -> None:
        super()._name_scratch()
        self.added, self.pair, _, self.words, self.factors = self.ring_scratch[2:]
        self.vectors = self.pair.at[1]  # the key; before it the query

    @override
    def _weigh(
        self, item: Item, write: tuple[Array, Array], query: Array, key: Array, heads: list[Head]
    ) -> list[Head]:
        store(self.pair.at[0], query)
        heads = super()._weigh(item, write, query, key, heads)
        store_factors(self.pair, self.factors)
        return heads

    @override
    def _store_keys(self, keys: Array) -> None:
        """Leaves them where they are."""

    @override
    def _store_ended(self, item: Item, sums: list[Array]) -> None:
        size, length = self.rule.value_size, self.shape.replay
        for j, seen in enumerate(sums):
            store(self.products.at[2, pl.ds(j * size, size)], seen)
        layout = pairs_layout()
        keys = load(self.ring.keys.at[pl.ds(0, length)], layout)
        # Where no page is read, there is the new token alone.
        keys = jnp.where(lax.broadcast(item.is_known, keys.shape), keys, 0.0)
        is_new = plgpu.broadcasted_iota(jnp.int32, keys.shape, 0, layout=layout) == length - 1
        key = lax.broadcast_in_dim(load(self.vectors, layout.reduce(0)), keys.shape, [1])
        store_pairs(jnp.where(is_new, key, keys), self.words)
        sync_warps()

    @override
    def _multiply(
        self, item: Item, query: Array, key: Array, heads: list[Head], page: Array, writes: Array
    ) -> None:
        shape = self.shape
        sync_warps()  # all have stored their factors
        factors = load_factors(self.factors)

        @pl.loop(0, shape.tiles)
        def _(tile: Array) -> None:
            stage = lax.rem(tile, shape.stages)
            plgpu.barrier_wait(self.full.at[stage])
            multiply_state(factors, self.loaded, self.products, stage, tile)
            pl.when(writes)(lambda: self._write_checkpoint(item, tile, stage, heads, page))
            if shape.stages < shape.tiles:
                sync_warps()  # all have read the stage
                later = tile + shape.stages
                pl.when(later < shape.tiles)(lambda: self._fetch(item, later, stage))

        sync_warps()

    def _write_checkpoint(
        self, item: Item, tile: Array, stage: Array, heads: list[Head], page: Array
    ) -> None:
        """Writes a tile of the state after the new token, which ends a ring: all else is there."""
        rows, value_size, length = self.shape.rows, self.rule.value_size, self.shape.replay
        j = lax.div(tile * rows, value_size)
        decay, beta = heads[0].decay, heads[0].beta
        for n, head in enumerate(heads[1:], 1):
            decay, beta = jnp.where(j == n, head.decay, decay), jnp.where(j == n, head.beta, beta)
        new = self._values(0, tile)
        if self.rule.delta:
            # Products with its key, of the checkpoint before and of what the ring adds.
            held, seen = (
                load(self.products.at[n, pl.ds(tile * rows, rows)], self.row) for n in (1, 2)
            )
            resumed = lax.broadcast(item.is_known, (rows,))
            new -= jnp.where(resumed, held, 0.0) * decay + seen
        place = j, tile * rows - j * value_size
        added = split_added(self.added, self.weights, new * beta, place, length)
        loaded, target = self.loaded.at[stage], self._rows(page, item, tile)
        for block in range(self.rule.key_size // COLUMNS):
            part = pl.ds(block * COLUMNS, COLUMNS)
            # In order, as `multiply_state` has it: Mosaic loads columns of swizzled rows wrongly.
            state = load(loaded.at[:, part], self.layout)
            state = jnp.where(lax.broadcast(item.is_known, state.shape), state, 0.0) * decay
            state += multiply_ring(self.words, added, block, length)
            store(target.at[:, part], state.astype(self.shape.page))
