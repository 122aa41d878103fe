"""The code of one thread block in the kernel of a recurrent step with replay."""

from typing import Any, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load
from pallas_kernels._recurrence.step_common import Item
from pallas_kernels._recurrence.step_kernel import Stepper
from pallas_kernels._recurrence.step_rings import StepRing, Total
from pallas_kernels._recurrence.step_shape import StepShape


class Replayer(Stepper):
    """Steps of states that pages have as checkpoints and rings.

    There are no barriers but those in the code, where shared memory is written and read.
    """

    def __init__(
        self,
        shape: StepShape,
        head_row: int,
        conv_start: int,
        ring_rows: tuple[int, ...],
        refs: tuple[Ref, ...],
    ) -> None:
        super().__init__(shape, head_row, conv_start, refs)
        scratch = self.ring_scratch
        self.ring = StepRing(shape, ring_rows, self.pages, self.computed, scratch)

    @override
    def _more_copies(self, item: Item) -> list[tuple[Ref, Ref]]:
        return self.ring.copies(item)

    @override
    def _read_ahead(self, item: Item) -> list[Total]:
        return [self.ring.read_total(item, j) for j in range(self.shape.heads)]

    @override
    def _begin(
        self, item: Item, gates: list[Any], write: tuple[Array, Array], ahead: list[Total]
    ) -> tuple[Array, Array, Array]:
        """Adds the token to the ring, and its decays since the checkpoint to the gates."""
        ring, (page, is_known), vectors = self.ring, write, self._vectors(0)
        adds = is_known & ~ring.is_last(item)
        logs = [self.log_decay[item.token, item.head + j] for j in range(self.shape.heads)]
        for j, decays in enumerate(ring.weigh(item, (page, adds), *vectors[:2], logs, ahead)):
            gates[j].append(decays)
        ring.store_key(item, (page, adds), vectors[1])
        pl.when(adds & self._moves(item))(lambda: ring.move(item, page))
        return vectors

    @override
    def _run_item(self, item: Item) -> None:
        run = super()._run_item if self.shape.parts == 1 else self._run_few
        run(item)

    def _run_few(self, item: Item) -> None:
        """Adds a few tokens to a ring, up to the next checkpoint at most; one tile of a state."""
        ring, shape, tile, head = self.ring, self.shape, item.tile, item.head
        self._fetch(item, tile, 0)
        self._fetch_inputs(item)
        self._fetch_more(item)
        page, is_known = self._page(self.write_ids[item.request, 0])
        adds = is_known & ~ring.is_last(item)
        last_token = self.beta.shape[0] - 1
        tokens = [jnp.minimum(item.token + t, last_token) for t in range(shape.tokens)]
        logs = [self.log_decay[token, head] for token in tokens]
        total = ring.read_total(item, 0)
        if shape.by_tma:
            plgpu.barrier_wait(self.ready)
        before = ring.prepare(item, (page, adds & (tile == 0)), logs, total)
        pl.when(adds & self._moves(item) & (tile == 0))(lambda: ring.move(item, page))
        self._wait(jnp.int32(0))
        loaded, start = self.loaded.at[0], tile * shape.rows
        checkpoint = load(loaded, self.layout)
        known = lax.broadcast(item.is_known, checkpoint.shape)
        checkpoint = jnp.where(known, checkpoint, 0.0)
        state = ring.resume(item, checkpoint * before, jnp.int32(0), start)

        def add(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            state, log, beta = carry
            later = jnp.minimum(item.token + t + 1, last_token)  # read in advance
            following = self.log_decay[later, head], self.beta[later, head]
            vectors, values = self._vectors(t), self._values(t, tile)
            keys = lax.broadcast_in_dim(vectors[1], state.shape, [1])
            state = state * jnp.exp(log)
            if self.rule.delta:
                values = values - (state * keys).sum(axis=1)
            added = values * beta
            state = state + lax.broadcast_in_dim(added, state.shape, [0]) * keys
            out = (state * lax.broadcast_in_dim(vectors[0], state.shape, [1])).sum(axis=1)
            self._store_output(item, t, jnp.int32(0), tile, out)
            ring.store_added(item, (page, adds), 0, start, added, t)
            ring.store_key(item, (page, adds), vectors[1], t)
            return state, *following

        first = logs[0], self.beta[tokens[0], head]
        state, _, _ = lax.fori_loop(0, item.count, add, (state, *first))
        is_last, moves = ring.is_last(item), is_known & self._moves(item)
        checkpoint = jnp.where(lax.broadcast(is_last, state.shape), state, checkpoint)
        self._store_state(item, loaded, checkpoint, tile, page, (is_known & is_last) | moves)
        for w in range(1, shape.writes):
            other, is_other = self._page(self.write_ids[item.request, w])
            due = is_other & is_last & (self.write_after[item.request, w] == item.count)
            if shape.by_tma:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._store_state(item, loaded, checkpoint, tile, other, due)
        if shape.by_tma:
            plgpu.wait_smem_to_gmem(0)

    def _stored(self, vectors: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Returns the vectors of the new token, of which shared memory holds two."""
        query, key = (load(self.ring.vectors.at[n], self.column) for n in range(2))
        return query, key, vectors[2]

    def _moves(self, item: Item) -> Array:
        """Returns whether an item is written to another page than it is read from."""
        return self.read_ids[item.request] != self.write_ids[item.request, 0]

    @override
    def _run_tile(
        self,
        item: Item,
        stage: Array,
        j: Array,
        tile: Array,
        vectors: tuple[Array, Array, Array] | None,
        gates: list[Any],
        write: tuple[Array, Array],
    ) -> None:
        """Computes a tile of outputs; every L-th time, of the checkpoint."""
        ring, shape, loaded, (page, is_known) = self.ring, self.shape, self.loaded.at[stage], write
        assert vectors is not None
        (_, beta), (before, after) = gates
        size = (shape.rows, self.rule.key_size)
        start = lax.rem(tile, self.rule.value_size // shape.rows) * shape.rows
        values = self._values(0, tile)
        self._wait(tile)
        checkpoint = load(loaded, self.layout)
        checkpoint = jnp.where(lax.broadcast(item.is_known, size), checkpoint, 0.0)

        @pl.when(ring.is_last(item))
        def _() -> None:
            state = ring.resume(item, checkpoint * before, j, start)
            state, out = self._update(state, values, self._stored(vectors), gates[0], 0, j)
            self._store_state(item, loaded, state, tile, page, is_known)
            self._store_output(item, 0, j, tile, out)

        @pl.when(~ring.is_last(item))
        def _() -> None:
            query, key, product = self._stored(vectors)
            seen, shown = ring.products(j, start)
            shown += (checkpoint * lax.broadcast_in_dim(query, size, [1])).sum(axis=1) * after
            added = values
            if self.rule.delta:
                held = (checkpoint * lax.broadcast_in_dim(key, size, [1])).sum(axis=1)
                added = values - (held * after + seen)
            added *= beta
            self._store_output(item, 0, j, tile, shown + added * product)
            ring.store_added(item, write, j, start, added)

            @pl.when(is_known & self._moves(item))
            def _() -> None:
                self._store_state(item, loaded, checkpoint, tile, page, is_known)

        if shape.by_tma:
            plgpu.commit_smem()  # a barrier: all warps have read the stage
