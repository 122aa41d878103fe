"""The code of one thread block in the kernel of a recurrent step with rings that take drafts."""

from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import load, store, sync_warps
from pallas_kernels._recurrence.step_common import Item, pair_layout
from pallas_kernels._recurrence.step_draft_rings import DraftRing
from pallas_kernels._recurrence.step_replay import RingStepper
from pallas_kernels._recurrence.step_rings import THREADS, Total


class Token(NamedTuple):
    """A token of an item, in scalars, as each value needs it.

    decay: from the state before the item's tokens.
    held, seen: of each earlier token, its key's product with this one's key, and with this one's
      query, decayed; of the token itself, the latter alone.
    """

    beta: Array
    decay: Array
    held: list[Array]
    seen: list[Array]


class DraftReplayer(RingStepper):
    """Steps of a few tokens, the last of which may be rejected; values of one head.

    Tokens add to the ring alone: their outputs need the products of the checkpoint, of what the
    ring adds to it, and of each other, with all keys and queries. The state before the tokens is
    computed if it is to become the checkpoint, because the ring would be too full after the next
    step.
    """

    @override
    def _name_scratch(self) -> None:
        given = self.pages, self.computed, *self.ring_scratch[:3]
        self.drafts = DraftRing(self.shape, self.ring.rows, *given)
        self.ring = self.drafts
        self.vectors, self.weights, self.products = self.ring_scratch[3:]
        self.size = self.shape.tiles * self.shape.rows  # values of a thread block
        layouts = {THREADS: self.ring.vector, THREADS // 2: pair_layout().reduce(1)}
        self.values = layouts.get(self.size, self.row)

    @override
    def _locate(self, index: Array) -> Item:
        item = super()._locate(index)
        return item if self.starts is None else item._replace(is_needed=item.count != 0)

    @override
    def _run_item(self, item: Item) -> None:
        ring, shape, first = self.drafts, self.shape, item.tile * self.shape.tiles
        ring.start(item)
        for stage in range(shape.stages):
            self._fetch(item, first + stage, stage)
        self._fetch_small(item)
        write = self._page(self.write_ids[item.request, 0])
        leads = write[0], write[1] & (item.tile == 0)
        last = self.beta.shape[0] - 1
        places = [jnp.clip(item.token + t, 0, last) for t in range(shape.tokens)]
        logs = [self.log_decay[place, item.head] for place in places]
        betas = [self.beta[place, item.head] for place in places]
        total = ring.read_total(item, 0)
        plgpu.barrier_wait(self.ready)
        tokens = self._prepare(item, leads, logs, betas, total)
        before = ring.prepare(item, leads, logs, total)
        moves = self.read_ids[item.request] != self.write_ids[item.request, 0]
        pl.when(leads[1] & moves)(lambda: ring.move(item, write[0]))
        self._multiply(item, before, (write[0], write[1] & moves), write)
        self._finish(item, before, self._add_up(item), tokens, write)

    def _prepare(
        self,
        item: Item,
        write: tuple[Array, Array],
        logs: list[Array],
        betas: list[Array],
        total: Total,
    ) -> list[Token]:
        """Stores keys and queries, and their products with the ring's keys.

        Returns:
          The tokens; those beyond the item's are any.
        """
        ring, products, tokens = self.drafts, list[Array](), list[Token]()
        keys = load(ring.keys, ring.tile)
        weights = jnp.where(total.is_there, jnp.exp(total.before - total.total), 0.0)
        for t in range(len(betas)):
            query, key, product = self._vectors(t)
            for n, vector in enumerate((key, query)):
                store(self.vectors.at[2 * t + n], vector)
                one = (keys * lax.broadcast_in_dim(vector, keys.shape, [1])).sum(axis=1) * weights
                # Of rows that hold nothing they may be NaN.
                store(self.weights.at[2 * t + n], jnp.where(total.is_there, one, 0.0))
            ring.store_key(item, (write[0], write[1] & (t < item.count)), key, t)
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

    def _multiply(
        self, item: Item, before: Array, moved: tuple[Array, Array], write: tuple[Array, Array]
    ) -> None:
        """Stores the products of the checkpoint with keys and queries, and a new checkpoint.

        Args:
          before: decay from the checkpoint to the first token.
          moved: takes the checkpoint as it is, where a page is written that was not read.
        """
        ring, shape, first = self.drafts, self.shape, item.tile * self.shape.tiles
        begins = write[1] & ring.begins

        @pl.loop(0, shape.tiles)
        def _(n: Array) -> None:
            stage, part = lax.rem(n, shape.stages), pl.ds(n * shape.rows, shape.rows)
            plgpu.barrier_wait(self.full.at[stage])
            state = load(self.loaded.at[stage], self.layout)

            @pl.loop(0, shape.tokens)  # unrolled, it takes more registers
            def _(t: Array) -> None:
                for i in range(0 if self.rule.delta else 1, 2):
                    vector = load(self.vectors.at[2 * t + i], self.column)
                    one = state * lax.broadcast_in_dim(vector, state.shape, [1])
                    store(self.products.at[2 * t + i, part], one.sum(axis=1))

            @pl.when(begins | moved[1])
            def _() -> None:
                loaded = load(self.loaded.at[stage], self.layout)
                known = lax.broadcast(item.is_known, loaded.shape)
                loaded = jnp.where(known, loaded, 0.0)
                rows = self._rows(write[0], item, first + n)

                @pl.when(begins)
                def _() -> None:
                    start = (first + n) * shape.rows
                    resumed = ring.resume(item, loaded * before, jnp.int32(0), start)
                    store(rows, resumed.astype(shape.page))

                pl.when(~begins)(lambda: store(rows, loaded.astype(shape.page)))

            if shape.stages < shape.tiles:
                sync_warps()  # all have read the stage
                later = n + shape.stages
                pl.when(later < shape.tiles)(lambda: self._fetch(item, first + later, stage))

    def _add_up(self, item: Item) -> list[Array]:
        """Returns the products of what the ring adds with keys and queries."""
        start = item.tile * self.size
        zeros = plgpu.layout_cast(jnp.zeros(self.size, jnp.float32), self.values)

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            row = self.drafts.old_row(item, i)
            added = load(self.drafts.added_at(0, row, (start, self.size)), self.values)
            return tuple([one + added * self.weights[n, row] for n, one in enumerate(sums)])

        sums = (zeros,) * (2 * self.shape.tokens)
        return [*lax.fori_loop(0, self.drafts.known(item), add, sums)]

    def _finish(
        self,
        item: Item,
        before: Array,
        sums: list[Array],
        tokens: list[Token],
        write: tuple[Array, Array],
    ) -> None:
        """Stores outputs, and what tokens add."""
        sync_warps()  # products are there
        part, earlier = (item.tile * self.size, self.size), list[Array]()
        known = lax.broadcast(item.is_known, (self.size,))

        def product(n: int, decay: Array) -> Array:
            of_checkpoint = jnp.where(known, load(self.products.at[n], self.values), 0.0)
            return (of_checkpoint * before + sums[n]) * decay

        for t, token in enumerate(tokens):
            source = self._inputs(t).at[pl.ds(2 * self.rule.key_size + part[0], self.size)]
            added, out = load(source, self.values), product(2 * t + 1, token.decay)
            if self.rule.delta:
                added -= product(2 * t, token.decay)
                for one, weight in zip(earlier, token.held, strict=True):
                    added -= one * weight
            added *= token.beta
            earlier.append(added)
            for one, weight in zip(earlier, token.seen, strict=True):
                out += one * weight

            @pl.when(t < item.count)
            def _(t: int = t, added: Array = added, out: Array = out) -> None:
                target = self.out.at[item.token + t, item.head, pl.ds(*part)]
                store(target, out.astype(target.dtype))
                row = self.drafts.added_row(write[0], item, 0, self.drafts.new_row(item, t), part)
                pl.when(write[1])(lambda: store(row, added.astype(self.shape.page)))
