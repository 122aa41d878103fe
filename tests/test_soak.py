"""Thousands of random steps against the references: tables, pool, compilations, memory.

``JAXKV_SOAK_STEPS=10000`` makes it as long as you like; the references are compared with
the device every 500 steps, and at the end.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.pool import make_pool, write_rows
from jaxkv.specs import StateSpec
from jaxkv.step import StepShape, apply_step, pack_step
from jaxkv.testing import ReferencePool, ReferenceTables, count_compilations
from tests.helpers import hybrid_plan, pointers

STEPS = int(os.environ.get("JAXKV_SOAK_STEPS", "1000"))
COMPARE_EVERY = 500
ROWS, LONGEST, CHUNK = 6, 24, 8
PLAN = hybrid_plan(num_blocks=64, max_model_len=LONGEST)
WRITTEN = [
    (layer, PLAN.layout.place_of(layer))
    for group in PLAN.groups
    for layer in group.layers
    if not isinstance(group.spec, StateSpec)
]
SHAPE = StepShape(
    entries=ROWS,
    block_ids=120,
    zero_ids=40,
    copies=3,
    batch=ROWS,
    tokens=ROWS * CHUNK,
    widths=make_block_tables(PLAN, max_requests=ROWS).widths,
    extra=1,
)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def device_step(tables, pool, upload):
    """Tables, zeroing, copies, and a row of marked bytes for every token of every layer."""
    tables, pool, batch = apply_step(tables, pool, upload, shape=SHAPE)
    mark = (batch.positions * 31 + batch.token_rows * 7 + batch.extra[0]) % 251
    for layer, place in WRITTEN:
        row = jnp.broadcast_to(mark[:, None], (SHAPE.tokens, place.spec.token_bytes))
        pool = write_rows(pool, layer, batch.slots[place.group], row.astype(jnp.uint8))
    return tables, pool, batch.slots


class Soak:
    """The device and the references side by side."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.manager = BlockManager(PLAN, max_requests=ROWS)
        self.tables, self.pool = make_block_tables(PLAN, max_requests=ROWS), make_pool(PLAN)
        self.lists = ReferenceTables(
            [group.spec for group in PLAN.groups],
            self.tables.widths,
            max_requests=ROWS,
            pool_blocks=PLAN.num_blocks,
        )
        self.bytes = ReferencePool(PLAN.layout, PLAN.num_blocks)
        self.computed: dict[int, int] = {}
        self.names = iter(range(10**9))

    def step(self, mark: int) -> None:
        first, lengths = self.schedule()
        update = self.manager.take_update()
        copies = self.rng.integers(-1, PLAN.num_blocks + 1, (len(PLAN.groups), 3, 2))
        copies[:, :, 1] = [self.rng.permutation(PLAN.num_blocks)[:3] for _ in PLAN.groups]
        rows = [self.manager.requests[name] for name in lengths]
        upload = pack_step(
            SHAPE,
            update=update,
            rows=rows,
            first_positions=first,
            lengths=list(lengths.values()),
            copies=copies.tolist(),
            extra=[mark],
        )
        self.tables, self.pool, self.slots = device_step(self.tables, self.pool, upload)
        self.follow(update, copies, rows, first, list(lengths.values()), mark)

    def schedule(self) -> tuple[list[int], dict[int, int]]:
        """Starts and finishes requests at random, and grows some of those that run."""
        for name in [name for name in self.computed if self.rng.random() < 0.1]:
            self.manager.finish(name)
            del self.computed[name]
        while len(self.computed) < ROWS and self.rng.random() < 0.5:
            name = next(self.names)
            self.manager.start(name)
            self.computed[name] = 0
        lengths = {}
        for name, done in self.computed.items():
            length = min(int(self.rng.integers(0, CHUNK + 1)), LONGEST - done)
            try:
                self.manager.grow(name, done, done + length)
            except OutOfBlocksError:
                continue
            lengths[name] = length
        first = [self.computed[name] for name in lengths]
        for name, length in lengths.items():
            self.computed[name] += length
        return first, lengths

    def follow(self, update, copies, rows, first, lengths, mark) -> None:
        """The same step, from the definitions."""
        self.lists.append(update.entries)
        self.bytes.zero(update.zero_ids)
        self.bytes.copy(copies[:, :, 0], copies[:, :, 1])
        tokens = [
            (row, start + i)
            for row, start, length in zip(rows, first, lengths, strict=True)
            for i in range(length)
        ]
        self.expected_slots = self.lists.slots([t[0] for t in tokens], [t[1] for t in tokens])
        for layer, place in WRITTEN:
            size, width = place.spec.block_size, place.spec.token_bytes
            for (row, position), slot in zip(tokens, self.expected_slots[place.group], strict=True):
                data = np.full(width, (position * 31 + row * 7 + mark) % 251, np.uint8)
                self.bytes.write(layer, slot // size, slot % size * width, data)

    def compare(self) -> None:
        check_overflow(self.tables)
        assert self.lists.flags == 0
        used = np.asarray(self.tables.num_blocks)
        for group, rows in enumerate(self.lists.rows):
            table = np.asarray(self.tables.tables[group])
            assert [list(table[r, : used[group, r]]) for r in range(ROWS)] == rows
        count = self.expected_slots.shape[1]
        np.testing.assert_array_equal(np.asarray(self.slots)[:, :count], self.expected_slots)
        for buffer, expected in zip(self.pool.buffers, self.bytes.slots, strict=True):
            np.testing.assert_array_equal(buffer, expected)


def device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else sum(array.nbytes for array in jax.live_arrays())


def test_random_steps_stay_right_compile_nothing_and_keep_memory_flat() -> None:
    soak = Soak()
    for mark in range(20):
        soak.step(mark)
    soak.compare()
    before, where = device_bytes(), pointers((soak.tables.tables, soak.pool))
    with count_compilations() as compilations:
        for count in range(1, STEPS + 1):
            soak.step(count % 251)
            if count % COMPARE_EVERY == 0 or count == STEPS:
                soak.compare()
    assert not compilations
    assert device_bytes() <= before
    assert pointers((soak.tables.tables, soak.pool)) == where


if __name__ == "__main__":
    test_random_steps_stay_right_compile_nothing_and_keep_memory_flat()
