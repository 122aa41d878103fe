"""The code of one thread block in the kernel of a recurrent step with replay: a few tokens."""

from typing import override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load, sync_warps
from pallas_kernels._recurrence.step_common import Item
from pallas_kernels._recurrence.step_kernel import Stepper
from pallas_kernels._recurrence.step_rings import StepRing
from pallas_kernels._recurrence.step_shape import StepShape


class RingStepper(Stepper):
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
        self.ring = StepRing(shape, ring_rows, self.pages, self.computed, *self.ring_scratch[:3])
        self._name_scratch()

    def _name_scratch(self) -> None:
        """Names the arrays in shared memory that only these steps have."""

    @override
    def _more_copies(self, item: Item) -> list[tuple[Ref, Ref]]:
        return self.ring.copies(item)


class Replayer(RingStepper):
    """Steps of a few tokens."""

    @override
    def run(self) -> None:
        """Goes from request to request: few of many have such tokens."""
        shape, index = self.shape, lax.axis_index("cta")
        turns = -(-shape.batch // shape.at_once)

        @pl.loop(0, turns)
        def _(turn: Array) -> None:
            mine = index + turn * (shape.at_once * shape.items_of_request)
            item = self._locate(jnp.minimum(mine, shape.items - 1))

            @pl.when(item.is_needed & (mine < shape.items))
            def _() -> None:
                sync_warps()  # all have read what the item before has left
                self._run_item(item)

    @override
    def _run_item(self, item: Item) -> None:
        """Adds a few tokens to a ring, up to the next checkpoint at most; one tile of a state."""
        ring, shape, tile, head = self.ring, self.shape, item.tile, item.head
        ring.start(item)
        self._fetch(item, tile, 0)
        self._fetch_small(item)
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

    def _moves(self, item: Item) -> Array:
        """Returns whether an item is written to another page than it is read from."""
        return self.read_ids[item.request] != self.write_ids[item.request, 0]
