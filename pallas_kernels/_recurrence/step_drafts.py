"""The code of one thread block in the kernel of a recurrent step with rings that take drafts."""

from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load, store, sync_warps
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY
from pallas_kernels._recurrence.step_common import Item
from pallas_kernels._recurrence.step_replay import RingStepper
from pallas_kernels._recurrence.step_rings import TOGETHER, StepRing, Total
from pallas_kernels._recurrence.step_shape import GRANULE, LOADED, StepShape

FLUSH = -1  # tokens of a request whose state is to be written, and nothing else


class DraftRing(StepRing):
    """The ring of one thread block's item, with rows by position."""

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


class Token(NamedTuple):
    """A token of an item, in scalars, as each row of a state needs it.

    decay: from the state before the item's tokens.
    held, seen: of each earlier token, its key's product with this one's key, and with this one's
      query, decayed; of the token itself, the latter alone.
    """

    beta: Array
    decay: Array
    held: list[Array]
    seen: list[Array]


class DraftReplayer(RingStepper):
    """Steps of a few tokens, the last of which may be rejected; tiles of one value head.

    A state before the tokens becomes the checkpoint if the ring would be too full after the next
    step. Tokens add to the ring alone: outputs need the products of that state with all keys and
    queries, and of these with each other.
    """

    def __init__(
        self,
        shape: StepShape,
        head_row: int,
        conv_start: int,
        ring_rows: tuple[int, ...],
        refs: tuple[Ref, ...],
    ) -> None:
        super().__init__(shape, head_row, conv_start, ring_rows, refs)
        self.drafts = DraftRing(shape, ring_rows, self.pages, self.computed, *self.ring_scratch[:3])
        self.ring = self.drafts
        self.vectors = self.ring_scratch[3]

    @override
    def _locate(self) -> Item:
        item = super()._locate()
        return item if self.starts is None else item._replace(is_needed=item.count != 0)

    @override
    def _run_item(self, item: Item) -> None:
        ring, shape, first = self.drafts, self.shape, item.tile * self.shape.tiles
        ring.start(item)
        for stage in range(shape.stages):
            self._fetch(item, first + stage, stage)
        self._fetch_small(item)
        page, is_known = self._page(self.write_ids[item.request, 0])
        leads = page, is_known & (item.tile == 0)
        places = [jnp.clip(item.token + t, 0, len(self.beta) - 1) for t in range(shape.tokens)]
        logs = [self.log_decay[place, item.head] for place in places]
        betas = [self.beta[place, item.head] for place in places]
        total = ring.read_total(item, 0)
        plgpu.barrier_wait(self.ready)
        tokens = self._prepare(item, leads, logs, betas)
        before = ring.prepare(item, leads, logs, total)
        moves = self.read_ids[item.request] != self.write_ids[item.request, 0]
        pl.when(leads[1] & moves)(lambda: ring.move(item, page))
        begins = is_known & (ring.begins | moves)

        @pl.loop(0, shape.tiles)
        def _(n: Array) -> None:
            stage = lax.rem(n, shape.stages)
            plgpu.barrier_wait(self.full.at[stage])
            checkpoint = load(self.loaded.at[stage], self.layout)
            known = lax.broadcast(item.is_known, checkpoint.shape)
            checkpoint = jnp.where(known, checkpoint, 0.0)
            tile = first + n
            state = ring.resume(item, checkpoint * before, jnp.int32(0), tile * shape.rows)
            new = jnp.where(lax.broadcast(ring.begins, state.shape), state, checkpoint)
            rows = self._rows(page, item, tile)
            pl.when(begins)(lambda: store(rows, new.astype(shape.page)))
            self._add(item, state, tile, tokens, (page, is_known))
            if shape.stages < shape.tiles:
                sync_warps()  # all have read the stage
                later = n + shape.stages
                pl.when(later < shape.tiles)(lambda: self._fetch(item, first + later, stage))

    def _prepare(
        self, item: Item, write: tuple[Array, Array], logs: list[Array], betas: list[Array]
    ) -> list[Token]:
        """Stores keys and queries, and returns the tokens; those beyond the item's are any."""
        products, tokens = list[Array](), list[Token]()
        for t in range(len(betas)):
            query, key, product = self._vectors(t)
            store(self.vectors.at[2 * t], key)
            store(self.vectors.at[2 * t + 1], query)
            self.ring.store_key(item, (write[0], write[1] & (t < item.count)), key, t)
            products.append(product)
        for t, beta in enumerate(betas):  # each thread reads what it has stored
            key, query = (load(self.vectors.at[2 * t + n], self.column) for n in range(2))
            decays = [jnp.exp(sum(logs[s + 1 : t + 1], jnp.float32(0))) for s in range(-1, t)]
            held, seen = list[Array](), list[Array]()
            for s, decay in enumerate(decays[1:]):
                earlier = load(self.vectors.at[2 * s], self.column)
                held.append(jnp.sum(earlier * key) * decay)
                seen.append(jnp.sum(earlier * query) * decay)
            tokens.append(Token(beta, decays[0], held, [*seen, products[t]]))
        return tokens

    def _add(
        self,
        item: Item,
        state: Array,
        tile: Array,
        tokens: list[Token],
        write: tuple[Array, Array],
    ) -> None:
        """Stores outputs, and what tokens add to a tile of the state before them."""

        def product(n: int) -> Array:
            vector = load(self.vectors.at[n], self.column)
            return (state * lax.broadcast_in_dim(vector, state.shape, [1])).sum(axis=1)

        start, earlier = tile * self.shape.rows, list[Array]()
        for t, token in enumerate(tokens):
            added, out = self._values(t, tile), product(2 * t + 1) * token.decay
            if self.rule.delta:
                added -= product(2 * t) * token.decay
                for one, weight in zip(earlier, token.held, strict=True):
                    added -= one * weight
            added *= token.beta
            earlier.append(added)
            for one, weight in zip(earlier, token.seen, strict=True):
                out += one * weight

            @pl.when(t < item.count)
            def _(t: int = t, added: Array = added, out: Array = out) -> None:
                self._store_output(item, t, jnp.int32(0), tile, out)
                self.ring.store_added(item, write, 0, start, added, t)
