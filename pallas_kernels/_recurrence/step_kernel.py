"""The code of one thread block in the kernel of a recurrent step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, load, store
from pallas_kernels._recurrence.rule import NORM_EPSILON
from pallas_kernels._recurrence.step_common import Item, tile_layout
from pallas_kernels._recurrence.step_convolution import StepConvolution
from pallas_kernels._recurrence.step_shape import StepShape

VECTOR = plgpu.Layout.WGMMA.reduce(1)  # of the numbers of a head
Gates = tuple[Array | None, Array]  # the decay, None if each key has its own; and beta


class Stepper:
    """The kernel's references, and the code of one thread block."""

    def __init__(
        self,
        shape: StepShape,
        head_row: int,
        conv_start: int,
        refs: tuple[Ref, ...],
    ) -> None:
        self.shape, self.rule = shape, shape.rule
        self.head_row = head_row
        rest = iter(refs)
        self.first, self.read_ids, self.write_ids = (next(rest) for _ in range(3))
        self.computed: Ref = next(rest) if shape.replay else None
        self.starts: Ref = next(rest) if shape.ragged else None
        self.counts: Ref = next(rest) if shape.ragged else None
        self.write_after: Ref = next(rest) if shape.ragged else None
        self.log_decay, self.beta, self.inputs = (next(rest) for _ in range(3))
        weights = next(rest) if shape.conv_width else None
        bias = next(rest) if shape.conv_rows > shape.conv_width else None
        self.pages, self.out, self.loaded = (next(rest) for _ in range(3))
        self.staged: Ref = next(rest) if shape.staged else None
        self.decays: Ref = next(rest) if shape.decay_per_key else None
        self.conv: StepConvolution | None = None
        if shape.conv_width:
            given = self.pages, conv_start, self.inputs, weights, bias, next(rest)
            self.conv = StepConvolution(shape, *given)
        self.ring_scratch = [next(rest) for _ in shape.ring_scratch]
        self.full: Ref = next(rest) if shape.by_tma else None
        self.ready: Ref = next(rest) if shape.by_tma and shape.copies else None
        self.layout = tile_layout(shape.page.itemsize)
        self.row, self.column = self.layout.reduce(1), self.layout.reduce(0)

    def run(self) -> None:
        item = self._locate(lax.axis_index("cta"))
        pl.when(item.is_needed)(lambda: self._run_item(item))
        if not self.shape.ragged:
            pl.when(~item.is_needed)(lambda: self._store_zeros(item))

    def _locate(self, index: Array) -> Item:
        shape = self.shape
        tile, index = lax.rem(index, shape.parts), lax.div(index, shape.parts)
        parts = self.rule.value_heads // shape.heads
        request, head = lax.div(index, parts), lax.rem(index, parts) * shape.heads
        page, is_known = self._page(self.read_ids[request])
        if self.starts is None:
            token, count = request, jnp.int32(1)
            is_needed = is_known | self._page(self.write_ids[request, 0])[1]
        else:
            token, count = self.starts[request], self.counts[request]
            is_needed = count > 0
        return Item(
            request=request,
            key_head=lax.div(head, self.rule.group),
            head=head,
            token=token,
            count=count,
            page=page,
            is_known=is_known,
            is_needed=is_needed,
            tile=tile,
        )

    def _page(self, page: Array) -> tuple[Array, Array]:
        """Returns the first row of a page, and whether there is one."""
        is_known = (page >= 0) & (page < self.shape.num_pages)
        return self.first[0] + jnp.where(is_known, page, 0) * self.shape.page_rows, is_known

    def _rows(self, page: Array, item: Item, tile: Array | int) -> Ref:
        """Returns a tile of the state in a page."""
        rows = self.shape.rows
        start = page + self.head_row + item.head * self.rule.value_size + tile * rows
        if not self.shape.by_tma:  # tiles are copied
            start = pl.multiple_of(start, 8)
        return self.pages.at[pl.ds(start, rows)]

    def _fetch(self, item: Item, tile: Array | int, stage: Array | int) -> None:
        source, target = self._rows(item.page, item, tile), self.loaded.at[stage]
        if self.shape.by_tma:
            plgpu.copy_gmem_to_smem(source, target, self.full.at[stage])
        else:
            promised = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source, target, oob_mode=promised)

    def _wait(self, tile: Array) -> None:
        """Waits for a tile."""
        shape = self.shape
        if shape.by_tma:
            plgpu.barrier_wait(self.full.at[lax.rem(tile, shape.stages)])
            return
        ahead = max(shape.stages - 2, 0)  # tiles that are loaded later, or already
        are_ahead = tile + ahead < shape.tiles
        pl.when(are_ahead)(lambda: plgpu.wait_gmem_to_smem(ahead))
        pl.when(~are_ahead)(lambda: plgpu.wait_gmem_to_smem(0))

    def _input_copies(self, item: Item) -> list[tuple[Ref, Ref]]:
        """Returns sources and targets of the inputs of an item; those of a convolution are not."""
        shape, width = self.shape, self.rule.key_size
        copies: list[tuple[Ref, Ref]] = []
        for t in range(shape.tokens):
            token = item.token + jnp.clip(item.count - 1, 0, t)
            for offset, column, n in shape.segments(item.head, item.key_head):
                if self.conv is None:
                    source = self.inputs.at[token, pl.ds(column, n)]
                    copies.append((source, self.staged.at[t, pl.ds(offset, n)]))
            for j in range(shape.heads if shape.decay_per_key else 0):
                source = self.log_decay.at[token, pl.ds((item.head + j) * width, width)]
                copies.append((source, self.decays.at[t, pl.ds(j * width, width)]))
        return copies

    def _fetch_small(self, item: Item) -> None:
        """Starts loading what an item needs before it begins."""
        copies = [*self._input_copies(item), *self._more_copies(item)]
        if self.shape.by_tma:
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target, self.ready)
            return
        loaded = [plgpu.load(ref, layout=VECTOR, optimized=False) for ref, _ in copies]
        for value, (_, target) in zip(loaded, copies, strict=True):
            store(target, value)

    def _more_copies(self, item: Item) -> list[tuple[Ref, Ref]]:
        """Returns its sources and targets."""
        return []

    def _run_item(self, item: Item) -> None:
        shape = self.shape
        windows = self.conv.read(item) if self.conv is not None else []
        for stage in range(0 if shape.by_tma else shape.stages):
            self._fetch(item, stage, stage)
        self._fetch_small(item)
        for stage in range(shape.stages if shape.by_tma else 0):
            self._fetch(item, stage, stage)
        write = self._page(self.write_ids[item.request, 0])
        gates: list[Any] = [
            [self._gates(item, t, j) for t in range(shape.tokens)] for j in range(shape.heads)
        ]
        if self.conv is not None:
            self.conv.run(item, windows, *write)
        if self.ready is not None:
            plgpu.barrier_wait(self.ready)
        vectors = None if shape.ragged else self._vectors(0)

        @pl.loop(0, shape.tiles)
        def _(tile: Array) -> None:
            stage = lax.rem(tile, shape.stages)
            j = lax.div(tile, shape.tiles // shape.heads)
            chosen = functools.reduce(
                lambda last, i: jax.tree.map(functools.partial(jnp.where, j == i), gates[i], last),
                range(1, shape.heads),
                gates[0],
            )
            self._run_tile(item, stage, j, tile, vectors, chosen, write)
            if shape.by_tma:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            # The stage of the tile before this one is free.
            lookahead = tile + shape.stages - 1

            @pl.when((tile > 0) & (lookahead < shape.tiles))
            def _() -> None:
                self._fetch(item, lookahead, lax.rem(lookahead, shape.stages))

        if shape.by_tma:
            plgpu.wait_smem_to_gmem(0)

    def _store_zeros(self, item: Item) -> None:
        zeros = plgpu.layout_cast(jnp.zeros(self.shape.rows, jnp.float32), self.row)
        per_head = self.shape.tiles // self.shape.heads

        @pl.loop(0, self.shape.tiles)
        def _(tile: Array) -> None:
            self._store_output(item, 0, lax.div(tile, per_head), tile, zeros)

    def _gates(self, item: Item, t: int, j: int) -> Gates:
        """Returns the decay and beta of a token and head; no decay if each key has its own."""
        token = jnp.minimum(item.token + t, self.beta.shape[0] - 1)
        head = item.head + j
        decay = None if self.decays is not None else jnp.exp(self.log_decay[token, head])
        return decay, self.beta[token, head]

    def _vectors(self, t: Array | int) -> tuple[Array, Array, Array]:
        """Returns a token's query and key as columns, and their product."""
        width = self.rule.key_size
        source = self._inputs(t)
        query = load(source.at[pl.ds(0, width)], self.column)
        key = load(source.at[pl.ds(width, width)], self.column)
        if self.rule.normalize:
            query *= lax.rsqrt(jnp.sum(query * query) + NORM_EPSILON) * self.rule.scale
            key *= lax.rsqrt(jnp.sum(key * key) + NORM_EPSILON)
        elif self.rule.scale != 1.0:
            query *= self.rule.scale
        return query, key, jnp.sum(query * key)

    def _values(self, t: Array | int, tile: Array) -> Array:
        source = self._inputs(t)
        start = 2 * self.rule.key_size + tile * self.shape.rows
        return load(source.at[pl.ds(start, self.shape.rows)], self.row)

    def _inputs(self, t: Array | int) -> Ref:
        """Returns a reference to the queries, keys and values of a token."""
        return self.staged.at[t] if self.conv is None else self.conv.outputs

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
        """Updates a tile of a state by all tokens of the request."""
        shape, loaded = self.shape, self.loaded.at[stage]
        size = (shape.rows, self.rule.key_size)
        values = self._values(0, tile)
        self._wait(tile)
        state = load(loaded, self.layout)
        state = jnp.where(lax.broadcast(item.is_known, size), state, 0.0)
        if vectors is not None:  # of one token
            state, out = self._update(state, values, vectors, gates[0], 0, j)
            self._store_state(item, loaded, state, tile, *write)
            self._store_output(item, 0, j, tile, out)
            return
        for t in range(shape.tokens):
            state = self._run_token(item, loaded, state, t, j, tile, gates[t])

    def _run_token(
        self,
        item: Item,
        loaded: Ref,
        state: Array,
        t: int,
        j: Array,
        tile: Array,
        gates: Gates,
    ) -> Array:
        """Updates a tile of a state by one of several tokens, which may be none."""
        values = self._values(t, tile)
        updated, out = self._update(state, values, self._vectors(t), gates, t, j)
        is_there = t < item.count
        state = jnp.where(lax.broadcast(is_there, state.shape), updated, state)
        pl.when(is_there)(lambda: self._store_output(item, t, j, tile, out))
        for w in range(self.shape.writes):
            page, is_known = self._page(self.write_ids[item.request, w])
            after = self.write_after[item.request, w]
            due = is_known & (after == t + 1) & is_there

            @pl.when(due)
            def _(page: Array = page, due: Array = due) -> None:
                if self.shape.by_tma:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._store_state(item, loaded, state, tile, page, due)

        return state

    def _update(
        self,
        state: Array,
        values: Array,
        vectors: tuple[Array, Array, Array],
        gates: Gates,
        t: int,
        j: Array,
    ) -> tuple[Array, Array]:
        """Returns the state after a token, and the token's output."""
        (query, key, product), (decay, beta), size = vectors, gates, state.shape
        if decay is None:
            channels = pl.ds(j * self.rule.key_size, self.rule.key_size)
            decays = jnp.exp(load(self.decays.at[t, channels], self.column))
            state = state * lax.broadcast_in_dim(decays, size, [1])
        else:
            state = state * decay
        keys = lax.broadcast_in_dim(key, size, [1])
        seen = (state * lax.broadcast_in_dim(query, size, [1])).sum(axis=1)
        if self.rule.delta:
            values = values - (state * keys).sum(axis=1)
        added = values * beta
        state = state + lax.broadcast_in_dim(added, size, [0]) * keys
        return state, seen + added * product

    def _store_state(
        self, item: Item, loaded: Ref, state: Array, tile: Array, page: Array, is_known: Array
    ) -> None:
        """Starts writing a tile of a state to its page, by TMA from where it was loaded to."""
        if not self.shape.by_tma:
            rows = self._rows(page, item, tile)
            pl.when(is_known)(lambda: store(rows, state.astype(self.shape.page)))
            return
        store(loaded, state.astype(self.shape.page))
        plgpu.commit_smem()

        @pl.when(is_known)
        def _() -> None:
            plgpu.copy_smem_to_gmem(loaded, self._rows(page, item, tile), commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    def _store_output(self, item: Item, t: Array | int, j: Array, tile: Array, out: Array) -> None:
        rows = self.shape.rows
        start = lax.rem(tile, self.rule.value_size // rows) * rows
        target = self.out.at[item.token + t, item.head + j, pl.ds(start, rows)]
        store(target, out.astype(target.dtype))
