"""The inputs since a checkpoint, as a part of the kernels of a recurrent step with replay."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load, store
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY
from pallas_kernels._recurrence.step_common import Item, tile_layout
from pallas_kernels._recurrence.step_shape import GRANULE, LOADED, StepShape

THREADS = 128
TOGETHER = 2  # tokens that are added to a state at once: more take more registers


class Total(NamedTuple):
    """Logarithms of decays from the checkpoint, of a head.

    before: to the new token, exclusive.
    total: to each token of the ring, [16].
    is_there: which of them there are.
    """

    before: Array
    total: Array
    is_there: Array


class StepRing:
    """The ring of one thread block's item: references, and its code.

    rows: of a page before its arrays of keys, of what is added, and of decays.
    pages: [rows, K], of the whole pool.
    computed: tokens of each request before the step.
    keys, added: shared memory, [16, K], and [heads, L * V / K, K] for the values that L tokens add,
      in elements of the pages.
    weights: shared memory, float32[heads, 3, 16]: of each token in the products with the key and
      the query of a new one, and in a state.
    """

    def __init__(
        self,
        shape: StepShape,
        rows: tuple[int, ...],
        pages: Ref,
        computed: Ref,
        keys: Ref,
        weights: Ref,
        added: Ref,
    ) -> None:
        self.shape, self.rule, self.length = shape, shape.rule, shape.replay
        self.rows, self.pages, self.computed = rows, pages, computed
        self.keys, self.added, self.weights = keys, added, weights
        tile = tile_layout(shape.page.itemsize)
        self.tile, self.row, self.column = tile, tile.reduce(1), tile.reduce(0)
        # Vectors of values: of a number for each thread, if there are as many.
        width, value_size = min(self.rule.value_size, THREADS), self.rule.value_size
        self.parts = [(start, width) for start in range(0, value_size, width)]
        self.vector = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        self.values = self.vector if width == THREADS else self.row

    def start(self, item: Item) -> None:
        """Reads what there is of the ring of an item, once."""
        self._filled = lax.rem(self.computed[item.request], self.length)

    def filled(self, item: Item) -> Array:
        """Returns the ring row of an item's next token."""
        return self._filled

    def known(self, item: Item) -> Array:
        """Returns how many rows of the ring there are to read."""
        return jnp.where(item.is_known, self.filled(item), 0)

    def old_row(self, item: Item, i: Array) -> Array:
        """Returns the ring row of a token before the item's, counted from the checkpoint."""
        return i

    def new_row(self, item: Item, t: Array | int) -> Array:
        """Returns the ring row of one of the item's tokens."""
        return self.filled(item) + t

    def is_last(self, item: Item) -> Array:
        """Returns whether the item's last token is followed by a checkpoint."""
        return self.filled(item) + item.count == self.length

    def _key_row(self, page: Array, item: Item, i: Array) -> Ref:
        return self.pages.at[page + self.rows[0] + item.key_head * self.length + i]

    def added_row(
        self, page: Array, item: Item, j: Array | int, i: Array, part: tuple[Array | int, int]
    ) -> Ref:
        """Returns a part of the values that token ``i`` adds, by its start and size."""
        head, width = item.head + j, self.rule.key_size
        first = (head * self.length + i) * self.rule.value_size + part[0]
        row = page + self.rows[1] + lax.div(first, width)
        return self.pages.at[row, pl.ds(lax.rem(first, width), part[1])]

    def added_at(self, j: Array | int, i: Array | int, part: tuple[Array | int, int]) -> Ref:
        """Returns the same in shared memory."""
        first, width = i * self.rule.value_size + part[0], self.rule.key_size
        if isinstance(first, int):
            return self.added.at[j, first // width, pl.ds(first % width, part[1])]
        return self.added.at[j, lax.div(first, width), pl.ds(lax.rem(first, width), part[1])]

    def _totals(self, page: Array, item: Item, j: int, term: int) -> tuple[Array, Array]:
        """Returns the row and the first column of a head's decays."""
        width, terms = self.rule.key_size, self.shape.terms
        start = ((item.head + j) * terms + term) * LOADED
        return page + self.rows[2] + lax.div(start, width), lax.rem(start, width)

    def _granules(self, item: Item) -> list[tuple[int, Array]]:
        """Returns which granule of rows to load to which one.

        Rows that hold nothing yet are not loaded: for them the first ones are, which are cached.
        """
        known = self.known(item)
        granules = range(self.length // GRANULE)
        return [(n, jnp.where(n * GRANULE < known, n, 0)) for n in granules]

    def copies(self, item: Item) -> list[tuple[Ref, Ref]]:
        """Returns the parts of rings to load, sources and targets in shared memory."""
        found: list[tuple[Ref, Ref]] = []
        some, each = GRANULE * self.rule.value_size // self.rule.key_size, self.length // GRANULE
        for n, chosen in self._granules(item):
            source = item.page + self.rows[0] + (item.key_head * each + chosen) * GRANULE
            target = self.keys.at[pl.ds(n * GRANULE, GRANULE)]
            found.append((self.pages.at[pl.ds(source, GRANULE)], target))
            for j in range(self.shape.heads):
                source = item.page + self.rows[1] + ((item.head + j) * each + chosen) * some
                target = self.added.at[j, pl.ds(n * some, some)]
                found.append((self.pages.at[pl.ds(source, some)], target))
        return found

    def prepare(
        self, item: Item, write: tuple[Array, Array], logs: list[Array], total_read: Total
    ) -> Array:
        """Finds the weights of the ring's tokens, and writes the decays of new tokens of one head.

        Returns:
          The decay from the checkpoint to the first of them.
        """
        before, total, is_there = total_read
        self._store_weights(0, before, total, is_there)
        after = before
        for t, log in enumerate(logs):
            after += jnp.maximum(log, LEAST_LOG_DECAY)
            row = jnp.where(t < item.count, self.filled(item) + t, -1)
            total = self.put(total, row, after)
        self._commit()  # a barrier: all threads have read what is overwritten
        self.store_total(item, write, 0, total)
        return jnp.exp(before)

    def read_total(self, item: Item, j: int) -> Total:
        """Reads the logarithms of decays of a head."""
        known, last = self.known(item), jnp.float32(0)
        terms: list[Array] = []
        for term in range(self.shape.terms):
            row, column = self._totals(item.page, item, j, term)
            terms.append(load(self.pages.at[row, pl.ds(column, LOADED)], self.row))
            last += self.pages[row, column + jnp.maximum(known - 1, 0)].astype(jnp.float32)
        is_there = self._index() < known
        total = jnp.where(is_there, sum(terms[1:], terms[0]), 0.0)
        return Total(jnp.where(known > 0, last, 0.0), total, is_there)

    def _index(self) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (LOADED,), 0, layout=self.row)

    def put(self, total: Array, row: Array, value: Array) -> Array:
        return jnp.where(self._index() == row, lax.broadcast(value, total.shape), total)

    def _store_weights(self, j: int, before: Array, total: Array, is_there: Array) -> None:
        """Stores the decays from the ring's tokens to the new one."""
        store(self.weights.at[j, 2], jnp.where(is_there, jnp.exp(before - total), 0.0))

    def store_total(self, item: Item, write: tuple[Array, Array], j: int, total: Array) -> None:
        page, is_known = write
        for term in range(self.shape.terms - bool(self.shape.drafts)):
            part = total.astype(self.shape.page)
            total = total - part.astype(jnp.float32)
            row, column = self._totals(page, item, j, term)

            @pl.when(is_known)
            def _(row: Array = row, column: Array = column, part: Array = part) -> None:
                store(self.pages.at[row, pl.ds(column, LOADED)], part)

    def _commit(self) -> None:
        if self.shape.by_tma:  # without, Mosaic's own barriers are enough
            plgpu.commit_smem()

    def resume(self, item: Item, state: Array, j: Array, start: Array) -> Array:
        """Returns a tile of the state before the new token, from the decayed checkpoint."""

        known, part = self.known(item), (start, self.shape.rows)

        def add(turn: Array, state: Array) -> Array:
            for n in range(TOGETHER):  # to hide the latency
                i = turn * TOGETHER + n
                is_there, i = i < known, self.old_row(item, i)
                added = load(self.added_at(j, i, part), self.row) * self.weights[j, 2, i]
                added = jnp.where(lax.broadcast(is_there, added.shape), added, 0.0)
                key = load(self.keys.at[i], self.column)
                key = jnp.where(lax.broadcast(is_there, key.shape), key, 0.0)
                key = lax.broadcast_in_dim(key, state.shape, [1])
                state = state + lax.broadcast_in_dim(added, state.shape, [0]) * key
            return state

        return lax.fori_loop(0, lax.div(known + (TOGETHER - 1), TOGETHER), add, state)

    def store_key(
        self, item: Item, write: tuple[Array, Array], key: Array, t: Array | int = 0
    ) -> None:
        """Writes a new token's key, once for all value heads of a key head."""
        page, is_known = write

        @pl.when(is_known & (lax.rem(item.head, self.rule.group) == 0) & (item.tile == 0))
        def _() -> None:
            store(self._key_row(page, item, self.new_row(item, t)), key.astype(self.shape.page))

    def store_added(
        self,
        item: Item,
        write: tuple[Array, Array],
        j: Array | int,
        start: Array,
        added: Array,
        t: Array | int = 0,
    ) -> None:
        """Writes what a new token adds, for a tile of values."""
        page, is_known = write

        @pl.when(is_known)
        def _() -> None:
            part = start, self.shape.rows
            row = self.added_row(page, item, j, self.new_row(item, t), part)
            store(row, added.astype(self.shape.page))

    def move(self, item: Item, page: Array) -> None:
        """Writes the rows of the ring to another page; zeros if there are none to read."""

        @pl.loop(0, self.filled(item))
        def _(i: Array) -> None:
            i = self.old_row(item, i)
            keys = load(self.keys.at[i], self.vector)
            moved = [(self._key_row(page, item, i), keys)]
            for j, part in itertools.product(range(self.shape.heads), self.parts):
                added = load(self.added_at(j, i, part), self.values)
                moved.append((self.added_row(page, item, j, i, part), added))
            for target, value in moved:
                value = jnp.where(lax.broadcast(item.is_known, value.shape), value, 0.0)
                store(target, value.astype(self.shape.page))
