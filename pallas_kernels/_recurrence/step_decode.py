"""The code of one thread block in the kernel of a decode with replay: one token of a request.

Its output needs the products of the checkpoint with its key and with its query, and those of what
the ring adds to the checkpoint: a state is read, and not computed. Every L-th token computes it, to
become the checkpoint, while it is in registers.
"""

from typing import NamedTuple, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import load, store, sync_warps
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY
from pallas_kernels._recurrence.step_common import Item, pair_layout
from pallas_kernels._recurrence.step_replay import RingStepper
from pallas_kernels._recurrence.step_rings import THREADS, Total


class Head(NamedTuple):
    """A value head, as its output needs it beside the state.

    log_decay, beta: of the new token.
    total: the decays of the ring.
    decay: from the checkpoint to the new token.
    """

    log_decay: Array
    beta: Array
    total: Total
    decay: Array


class ReplayDecoder(RingStepper):
    """Steps of one token."""

    @override
    def _name_scratch(self) -> None:
        keys, self.weights, _, self.vectors, self.products, *wide = self.ring_scratch
        self.keys = wide[0] if wide else keys  # in float32
        size = self.rule.value_size
        # Of a head's values: a number for each thread, or for two.
        self.values = self.ring.vector if size == THREADS else pair_layout().reduce(1)

    @override
    def _run_item(self, item: Item) -> None:
        shape, ring = self.shape, self.ring
        ring.start(item)
        for stage in range(shape.stages):
            self._fetch(item, stage, stage)
        self._fetch_small(item)
        write = self._page(self.write_ids[item.request, 0])
        windows = self.conv.read(item) if self.conv is not None else []
        heads = [self._read_head(item, j) for j in range(shape.heads)]
        if self.conv is not None:
            self.conv.run(item, windows, *write)
            sync_warps()
        plgpu.barrier_wait(self.ready)
        query, key, product = self._vectors(0)
        adds = write[1] & ~ring.is_last(item)
        store(self.vectors, key)
        heads = self._weigh(item, (write[0], adds), query, key, heads)
        sums = [self._add_up(item, j) for j in range(shape.heads)]
        last = write[1] & ring.is_last(item)
        pl.when(last)(lambda: self._store_ended(item, [seen for seen, _ in sums]))
        self._multiply(item, query, key, heads, write[0], last)
        for j, head in enumerate(heads):
            self._finish(item, j, head, sums[j], product, (write[0], adds))
        ring.store_key(item, (write[0], adds), load(self.vectors, ring.vector))
        moves = self.read_ids[item.request] != self.write_ids[item.request, 0]

        @pl.when(adds & moves)
        def _() -> None:
            ring.move(item, write[0])
            self._copy_checkpoint(item, write[0])

    def _read_head(self, item: Item, j: int) -> Head:
        head = item.head + j
        total = self.ring.read_total(item, j)
        return Head(self.log_decay[item.token, head], self.beta[item.token, head], total, total[0])

    def _weigh(
        self, item: Item, write: tuple[Array, Array], query: Array, key: Array, heads: list[Head]
    ) -> list[Head]:
        """Stores the weights of the ring's tokens, and the decays since the checkpoint.

        Returns:
          The heads with the decay from the checkpoint to the new token.
        """
        ring = self.ring
        keys = load(ring.keys, ring.tile)
        seen = [(keys * lax.broadcast_in_dim(v, keys.shape, [1])).sum(axis=1) for v in (key, query)]
        found, written = list[Head](), list[Array]()
        self._store_keys(keys)
        for j, head in enumerate(heads):
            before, total, is_there = head.total
            after = before + jnp.maximum(head.log_decay, LEAST_LOG_DECAY)
            to_new = jnp.where(is_there, jnp.exp(after - total), 0.0)
            for n, one in enumerate(seen):  # of rows that hold nothing they may be NaN
                store(self.weights.at[j, n], jnp.where(is_there, one * to_new, 0.0))
            store(self.weights.at[j, 2], to_new)
            written.append(ring.put(total, ring.filled(item), after))
            found.append(head._replace(decay=jnp.exp(after)))
        sync_warps()  # all threads have read the decays that are overwritten, too
        for j, total in enumerate(written):
            ring.store_total(item, write, j, total)
        return found

    def _add_up(self, item: Item, j: int) -> list[Array]:
        """Returns the products of what the ring adds with the new token's key and query."""
        known = self.ring.known(item)
        sums = [plgpu.layout_cast(jnp.zeros(self.rule.value_size), self.values)] * 2
        for i in range(self.shape.replay):
            added = load(self.ring.added_at(j, i, (0, self.rule.value_size)), self.values)
            added = jnp.where(lax.broadcast(i < known, added.shape), added, 0.0)
            sums = [total + added * self.weights[j, n, i] for n, total in enumerate(sums)]
        return sums

    def _store_keys(self, keys: Array) -> None:
        """Stores the keys of the ring for `_store_checkpoint`, unless they are there."""
        if self.shape.page.itemsize < 4:
            store(self.keys, keys)

    def _store_ended(self, item: Item, sums: list[Array]) -> None:
        """Stores what `_multiply` needs of a ring that the new token ends.

        Args:
          sums: products of what the ring adds with the new token's key.
        """
        size = self.rule.value_size
        for j, seen in enumerate(sums):
            store(self.products.at[1, pl.ds(j * size, size)], seen)
        sync_warps()

    def _multiply(
        self, item: Item, query: Array, key: Array, heads: list[Head], page: Array, writes: Array
    ) -> None:
        """Stores the products of the checkpoint with the new token's key and query.

        Args:
          page: takes the next checkpoint where ``writes`` is true.
        """
        shape, rule = self.shape, self.rule

        @pl.loop(0, shape.tiles)
        def _(tile: Array) -> None:
            stage = lax.rem(tile, shape.stages)
            plgpu.barrier_wait(self.full.at[stage])
            part, size = pl.ds(tile * shape.rows, shape.rows), (shape.rows, rule.key_size)
            state = load(self.loaded.at[stage], self.layout)
            products = [
                (state * lax.broadcast_in_dim(one, size, [1])).sum(axis=1)
                for one in ((query, key) if rule.delta else (query,))
            ]
            seen = load(self.products.at[1, part], self.row)
            for n, product in enumerate(products):
                store(self.products.at[n, part], product)

            @pl.when(writes)
            def _() -> None:
                self._store_checkpoint(item, tile, state, products[-1], seen, heads, page)

            if shape.stages < shape.tiles:
                sync_warps()  # all have read the stage
                later = tile + shape.stages
                pl.when(later < shape.tiles)(lambda: self._fetch(item, later, stage))

        sync_warps()

    def _store_checkpoint(
        self,
        item: Item,
        tile: Array,
        state: Array,
        held: Array,
        seen: Array,
        heads: list[Head],
        page: Array,
    ) -> None:
        """Writes a tile of the state after the new token, which ends a ring: all else is there.

        Args:
          state: of the checkpoint before.
          held, seen: products with the new token's key, of ``state`` and of what the ring adds.
        """
        size, rows, value_size = state.shape, self.shape.rows, self.rule.value_size
        j = lax.div(tile * rows, value_size)
        start = tile * rows - j * value_size
        decay, beta = heads[0].decay, heads[0].beta
        for n, head in enumerate(heads[1:], 1):
            decay, beta = jnp.where(j == n, head.decay, decay), jnp.where(j == n, head.beta, beta)

        def plus(state: Array, added: Array, key: Array) -> Array:
            added = lax.broadcast_in_dim(added, size, [0])
            return state + added * lax.broadcast_in_dim(key, size, [1])

        state *= decay
        for i in range(self.shape.replay - 1):
            added = load(self.ring.added_at(j, i, (start, rows)), self.row)
            state = plus(state, added * self.weights[j, 2, i], load(self.keys.at[i], self.column))
        resumed = lax.broadcast(item.is_known, (rows,))
        new = self._values(0, tile)
        if self.rule.delta:
            new -= jnp.where(resumed, held, 0.0) * decay + seen
        state = jnp.where(lax.broadcast(item.is_known, size), state, 0.0)
        state = plus(state, new * beta, load(self.vectors, self.column))
        store(self._rows(page, item, tile), state.astype(self.shape.page))

    def _finish(
        self,
        item: Item,
        j: int,
        head: Head,
        sums: list[Array],
        product: Array,
        write: tuple[Array, Array],
    ) -> None:
        """Stores the output of a head, and what the token adds."""
        size = self.rule.value_size
        part = pl.ds(j * size, size)
        resumed = lax.broadcast(item.is_known, (size,))

        def products(n: int) -> Array:
            return (
                jnp.where(resumed, load(self.products.at[n, part], self.values), 0.0) * head.decay
            )

        source = self._inputs(0).at[pl.ds(2 * self.rule.key_size + j * size, size)]
        added = load(source, self.values)
        if self.rule.delta:
            added = added - (products(1) + sums[0])
        added *= head.beta
        out = products(0) + sums[1] + added * product
        target = self.out.at[item.token, item.head + j]
        store(target, out.astype(target.dtype))

        @pl.when(write[1])
        def _() -> None:
            row = self.ring.added_row(write[0], item, j, self.ring.filled(item), (0, size))
            store(row, added.astype(self.shape.page))

    def _copy_checkpoint(self, item: Item, page: Array) -> None:
        """Writes the checkpoint to another page."""

        @pl.loop(0, self.shape.tiles)
        def _(tile: Array) -> None:
            source, target = (self._rows(one, item, tile) for one in (item.page, page))
            state = plgpu.load(source, layout=self.layout, optimized=False)
            state = jnp.where(lax.broadcast(item.is_known, state.shape), state, 0)
            store(target, state)
