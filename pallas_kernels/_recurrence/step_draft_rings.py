"""Rings that take drafts, as a part of the kernel of a recurrent step."""

from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._mosaic import load, store
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY
from pallas_kernels._recurrence.step_common import Item
from pallas_kernels._recurrence.step_rings import TOGETHER, StepRing, Total
from pallas_kernels._recurrence.step_shape import GRANULE, LOADED

FLUSH = -1  # tokens of a request whose state is to be written, and nothing else


class DraftRing(StepRing):
    """The ring of one thread block's item, with rows by position.

    begins: whether the state before the item's tokens is to become the checkpoint.
    """

    @override
    def start(self, item: Item) -> None:
        computed = self.computed[item.request]
        self._newest = lax.rem(computed + (self.length - 1), self.length)  # row
        row, column = self._totals(item.page, item, 0, self.shape.terms - 1)
        filled = self.pages[row, column + self._newest].astype(jnp.float32)
        filled = jnp.where(item.is_known & (computed > 0), filled, 0.0)
        self._filled = filled.astype(jnp.int32)
        self.begins = (self._filled >= self.shape.limit) | (item.count == FLUSH)

    @override
    def old_row(self, item: Item, i: Array) -> Array:
        return lax.rem(self._newest + (1 + self.length) - self._filled + i, self.length)

    @override
    def new_row(self, item: Item, t: Array | int) -> Array:
        return lax.rem(self._newest + 1 + t, self.length)

    @override
    def _granules(self, item: Item) -> list[tuple[int, Array]]:
        newest, found = lax.div(self._newest, GRANULE), list[tuple[int, Array]]()
        for n in range(self.length // GRANULE):
            last = self._newest + self.length - (n * GRANULE + GRANULE - 1)
            age = jnp.where(newest == n, 0, lax.rem(last, self.length))
            found.append((n, jnp.where(age < self._filled, n, newest)))
        return found

    @override
    def read_total(self, item: Item, j: int) -> Total:
        last, terms = jnp.float32(0), list[Array]()
        for term in range(self.shape.terms - 1):
            row, column = self._totals(item.page, item, j, term)
            terms.append(load(self.pages.at[row, pl.ds(column, LOADED)], self.row))
            last += self.pages[row, column + self._newest].astype(jnp.float32)
        index = self._index()
        age = lax.rem(lax.broadcast(self._newest + self.length, index.shape) - index, self.length)
        is_there = (index < self.length) & (age < self._filled)
        total = jnp.where(is_there, sum(terms[1:], terms[0]), 0.0)
        return Total(jnp.where(self._filled > 0, last, 0.0), total, is_there)

    @override
    def resume(self, item: Item, state: Array, j: Array, start: Array) -> Array:
        known, part = self._filled, (start, self.shape.rows)

        def add(turn: Array, state: Array) -> Array:
            for n in range(TOGETHER):  # to hide the latency
                i = turn * TOGETHER + n
                row = self.old_row(item, jnp.minimum(i, known - 1))
                weight = jnp.where(i < known, self.weights[0, 2, row], 0.0)
                added = load(self.added_at(0, row, part), self.row) * weight
                key = lax.broadcast_in_dim(load(self.keys.at[row], self.column), state.shape, [1])
                state = state + lax.broadcast_in_dim(added, state.shape, [0]) * key
            return state

        return lax.fori_loop(0, lax.div(known + (TOGETHER - 1), TOGETHER), add, state)

    @override
    def prepare(
        self, item: Item, write: tuple[Array, Array], logs: list[Array], total_read: Total
    ) -> Array:
        before, total, is_there = total_read
        self._store_weights(0, before, total, is_there)
        row, column = self._totals(item.page, item, 0, self.shape.terms - 1)
        counts = load(self.pages.at[row, pl.ds(column, LOADED)], self.row).astype(jnp.float32)
        after, count = (jnp.where(self.begins, 0, x) for x in (before, self._filled))
        for t, log in enumerate(logs):
            after += jnp.maximum(log, LEAST_LOG_DECAY)
            row = jnp.where(t < item.count, self.new_row(item, t), -1)
            total = self.put(total, row, after)
            counts = self.put(counts, row, (count + (t + 1)).astype(jnp.float32))
        self._commit()  # a barrier: all threads have read what is overwritten
        self.store_total(item, write, 0, total)
        row, column = self._totals(write[0], item, 0, self.shape.terms - 1)
        counts = counts.astype(self.shape.page)
        pl.when(write[1])(lambda: store(self.pages.at[row, pl.ds(column, LOADED)], counts))
        return jnp.exp(before)
