"""The state machine over jaxkv itself: block manager, block tables and pool.

Knows how a serving loop calls them. Subclass it to test a plan, a device, an
implementation of the kernels, or a part that you put in the place of one of jaxkv's.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.block_tables import (
    PAD_ROW,
    BlockTables,
    check_overflow,
    gather_block_tables,
    make_block_tables,
    swap_rows,
)
from jaxkv.blocks import BlockManager
from jaxkv.kernel_blocks import rows_per_block
from jaxkv.planning import Plan
from jaxkv.pool import KVPool, make_pool, read_rows, read_state, write_rows, write_state
from jaxkv.specs import StateSpec
from jaxkv.step import StepShape, apply_step, pack_step
from jaxkv.testing._extra import extra
from jaxkv.testing.reference import ReferenceTables
from jaxkv.testing.reference_cache import Write, place_in_row

with extra(__name__):
    from hypothesis.stateful import invariant

    from jaxkv.testing.state_machine import CacheStateMachine


class JaxkvStateMachine(CacheStateMachine):
    """Drives jaxkv; also holds its tables against `ReferenceTables`. Set `plan`.

    Every slot that is always zeroed first starts as NaN in all dtypes.

    stacked, implementation, zero_policy: as `make_pool`, `apply_step` and `BlockManager` take
      them; rows are written by the device's default implementation.
    """

    stacked: ClassVar[bool] = False
    implementation: ClassVar[str | None] = None
    zero_policy: ClassVar[str] = "when_needed"

    @override
    def make_cache(self) -> None:
        self.manager = BlockManager(
            self.plan, max_requests=self.max_requests, zero_policy=self.zero_policy
        )
        empty = _make_empty(self.plan, self.max_requests, self.stacked)
        self.tables, self.pool = jax.tree.map(jnp.copy, empty)  # steps consume theirs
        self.lists = ReferenceTables(
            [group.spec for group in self.plan.groups],
            self.tables.widths,
            max_requests=self.max_requests,
            pool_blocks=self.plan.num_blocks,
        )
        in_flight = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        held = sum(self.tables.widths) * self.max_requests
        self.shape = StepShape(
            entries=self.max_requests,
            block_ids=held,
            zero_ids=self.plan.num_blocks,
            batch=self.max_requests,
            widths=self.tables.widths,
            tokens=self.max_requests * in_flight,
        )
        self._batch: dict[Hashable, tuple[int, int]] = {}  # tokens computed and wanted, by request
        self._is_behind = False  # the manager has something to tell the device
        self._read: dict[str, np.ndarray] | None = None  # by layer, until something changes

    @override
    def start(self, request: int) -> None:
        self.manager.start(request)
        self._is_behind = True

    @override
    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        self.manager.grow(request, num_computed_tokens, num_tokens)
        self._batch[request] = num_computed_tokens, num_tokens
        self._is_behind = True

    @override
    def finish(self, request: int) -> None:
        self.manager.finish(request)
        self._is_behind = True

    @override
    def fork(self, request: int, donor: int, num_tokens: int) -> None:
        counts = [num_tokens // group.block_size for group in self.plan.groups]
        rows = zip(self.manager.block_ids(donor), counts, strict=True)
        self.manager.start(request, shared_block_ids=[ids[:count] for ids, count in rows])
        self._is_behind = True

    @override
    def swap(self, first: int, second: int) -> None:
        rows = [self.manager.requests[request] for request in (first, second)]
        if first != second:
            device_rows = [jnp.array([row], jnp.int32) for row in rows]
            self.tables = swap_rows(self.tables, *device_rows)
            self.manager.swap_rows(*rows)
            self.lists.move(rows, rows[::-1])
        self._read = None

    @override
    def num_free_blocks(self) -> int:
        return self.manager.pool.num_free_blocks

    @override
    def block_ids(self, request: int) -> Sequence[Sequence[int]]:
        return self.manager.block_ids(request)

    @override
    def read_null_block(self) -> list[np.ndarray]:
        return [np.asarray(buffer[..., 0, :]) for buffer in self.pool.buffers]

    @override
    def write(self, writes: Sequence[Write]) -> None:
        self._dispatch(writes)

    @override
    def read_pages(self, request: int, layer: str) -> np.ndarray:
        if self._is_behind:
            self._dispatch(())
        if self._read is None:
            rows = np.full(self.max_requests, PAD_ROW, np.int32)
            rows[: len(self.computed)] = [self.manager.requests[name] for name in self.computed]
            first = np.zeros(self.max_requests, np.int32)
            first[: len(self.computed)] = list(self.computed.values())
            self._read = jax.tree.map(np.asarray, _read_all(self.tables, self.pool, rows, first))
        return self._read[layer][list(self.computed).index(request)]

    @invariant()
    def device_rows_equal_the_lists(self) -> None:
        check_overflow(self.tables)
        used = np.asarray(self.tables.num_blocks)
        for group, (table, rows) in enumerate(
            zip(map(np.asarray, self.tables.tables), self.lists.rows, strict=True)
        ):
            got = [table[row, : used[group, row]].tolist() for row in range(len(rows))]
            if got != rows:
                raise AssertionError(f"group {group}: device rows {got}, lists {rows}")

    def _dispatch(self, writes: Sequence[Write]) -> None:
        """One step, as a serving loop makes it."""
        batch = self._batch if writes else {}
        update = self.manager.take_update()
        self.lists.append(update.entries)
        upload = pack_step(
            self.shape,
            update=update,
            rows=[self.manager.requests[request] for request in batch],
            first_positions=[first for first, _ in batch.values()],
            lengths=[total - first for first, total in batch.values()],
        )
        self.tables, self.pool = _step(
            self.tables,
            self.pool,
            upload,
            self._lay_out(batch, writes),
            shape=self.shape,
            implementation=self.implementation,
        )
        self._is_behind, self._read = False, None
        if writes:
            self._batch = {}

    def _lay_out(
        self, batch: Mapping[Hashable, tuple[int, int]], writes: Sequence[Write]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The ``rows`` of `_step`: those of all requests, end to end, in the batch's order."""
        laid_out: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for layer, place in self.reference.layers.items():
            is_state = isinstance(place.spec, StateSpec)
            count = self.shape.batch if is_state else self.shape.tokens
            width = place.spec.data_bytes // rows_per_block(place.spec)
            laid_out[layer] = np.full(count, -1, np.int32), np.zeros((count, width), np.uint8)
        ends = itertools.accumulate((total - first for first, total in batch.values()), initial=0)
        start = {
            request: end - first
            for (request, (first, _)), end in zip(batch.items(), ends, strict=False)
        }
        for request, layer, positions, rows in writes:
            spec, (where, data) = self.reference.layers[layer].spec, laid_out[layer]
            if isinstance(spec, StateSpec):
                index = list(batch).index(request)
                where[index], _ = place_in_row(spec, int(positions[0]))
                data[index] = rows[0]
            else:
                where[start[request] + positions] = 0
                data[start[request] + positions] = rows
        return laid_out


@functools.lru_cache(maxsize=4)
def _make_empty(plan: Plan, max_requests: int, stacked: bool) -> tuple[BlockTables, KVPool]:
    """Kept, since every example wants them anew and making them compiles."""
    tables = make_block_tables(plan, max_requests=max_requests)
    return tables, _poison(make_pool(plan, stacked=stacked), plan.groups_to_zero)


@functools.partial(jax.jit, static_argnames=("shape", "implementation"), donate_argnums=(0, 1))
def _step(
    tables: BlockTables,
    pool: KVPool,
    upload: np.ndarray,
    rows: Mapping[str, tuple[Array, Array]],
    *,
    shape: StepShape,
    implementation: str | None,
) -> tuple[BlockTables, KVPool]:
    """Tables, zeroing, and the rows of every layer.

    rows: int32[N] and uint8[N, row_bytes] by layer. For tokens, N of them: 0 to write, -1 not
      to. For a state, N requests: the entry of the row that holds it, or -1.
    """
    tables, pool, batch = apply_step(
        tables, pool, upload, shape=shape, implementation=implementation
    )
    for layer, (where, data) in rows.items():
        place = pool.layout.place_of(layer)
        if isinstance(place.spec, StateSpec):
            ids = jnp.take_along_axis(batch.block_tables[place.group], where[:, None], axis=1)
            ids = jnp.where(where < 0, -1, ids[:, 0])
            arrays = _split(place.spec, data)
            pool = write_state(pool, layer, ids, arrays)
        else:
            slots = jnp.where(where < 0, -1, batch.slots[place.group])
            pool = write_rows(pool, layer, slots, data)
    return tables, pool


@jax.jit
def _read_all(
    tables: BlockTables, pool: KVPool, rows: Array, first_positions: Array
) -> dict[str, Array]:
    """By layer uint8[B, W, data_bytes], through the gathered tables."""
    _, gathered = gather_block_tables(tables, rows, first_positions, widths=tables.widths)
    pages = {}
    for group in pool.layout.groups:
        for layer in group.layers:
            place = pool.layout.place_of(layer)
            ids = gathered[place.group]
            if isinstance(place.spec, StateSpec):
                arrays = read_state(pool, layer, ids.reshape(-1))
                data = jnp.concatenate([_bytes(a, 1) for a in arrays], axis=-1)
            else:
                data = _bytes(read_rows(pool, layer, ids), 1)
            pages[layer] = data.reshape(*ids.shape, place.spec.data_bytes)
    return pages


def _split(spec: StateSpec, data: Array) -> list[Array]:
    """The arrays of states, [N, *shape], from their bytes, uint8[N, data_bytes]."""
    ends = np.cumsum(spec.array_bytes)[:-1]
    arrays = []
    for part, shape, dtype in zip(
        jnp.split(data, ends, axis=1), spec.shapes, spec.dtypes, strict=True
    ):
        itemsize = jnp.dtype(dtype).itemsize
        split = part.reshape(len(part), *shape, *([itemsize] if itemsize > 1 else []))
        arrays.append(lax.bitcast_convert_type(split, jnp.dtype(dtype)))
    return arrays


def _bytes(array: Array, batch_dims: int) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    return data.reshape(*array.shape[:batch_dims], -1)


def _poison(pool: KVPool, zeroed: Sequence[bool]) -> KVPool:
    """0xFF in every slot whose groups are all zeroed first; the null block stays zero."""
    users = {
        slot: [group for group in range(len(zeroed)) if slot in pool.layout.slots_of(group)]
        for slot in range(len(pool.layout.slots))
    }
    stale = [all(zeroed[group] for group in groups) for groups in users.values()]
    fill = [jnp.uint8(0xFF if poisoned else 0) for poisoned in stale]
    if pool.stacked:
        fill = [jnp.stack(fill)[:, None, None]]
    buffers = [
        jnp.broadcast_to(value, buffer.shape).at[..., 0, :].set(0)
        for value, buffer in zip(fill, pool.buffers, strict=True)
    ]
    return dataclasses.replace(pool, buffers=tuple(buffers))
