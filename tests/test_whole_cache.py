"""Host, tables and pool together: no request ever sees bytes that are not its own.

A random serving loop over a hybrid plan whose groups overlay each other. Every token and
state carries its request's mark. The pool starts as NaN; blocks are freed and handed out
again between groups all the time; after every step each request must read exactly what
it wrote, and zeros where it has not written yet.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.pool import (
    KVPool,
    make_pool,
    read_state,
    read_tokens,
    write_state,
    write_tokens,
)
from jaxkv.specs import StateSpec
from jaxkv.step import StepShape, apply_step, pack_step
from tests.helpers import IMPLEMENTATIONS, ON_GPU, hybrid_plan, kernels_run

ROWS, LONGEST, CHUNK = 4, 24, 8
PLAN = hybrid_plan(num_blocks=48, max_model_len=LONGEST, kv_dtype="bf16")
LAYERS = {layer: PLAN.layout.place_of(layer) for group in PLAN.groups for layer in group.layers}
SHAPE = StepShape(
    entries=ROWS,
    block_ids=100,
    zero_ids=40,
    batch=ROWS,
    widths=make_block_tables(PLAN, max_requests=ROWS).widths,
    tokens=ROWS * CHUNK,
    extra=2 * ROWS,
)


@functools.cache
def device_step(implementation: str, stacked: bool):
    """One jitted step: tables, zeroing, marked writes, and a read of everything."""

    def step(tables, pool, upload):
        tables, pool, batch = apply_step(
            tables, pool, upload, shape=SHAPE, implementation=implementation
        )
        tags, totals = batch.extra[:ROWS], batch.extra[ROWS:]
        by_row = (
            jnp.zeros(ROWS, jnp.int32)
            .at[batch.rows]
            .set(tags, mode="drop", wrap_negative_indices=False)
        )
        mark = (by_row.at[batch.token_rows].get(mode="fill") * 13 + batch.positions) % 251
        token = jnp.broadcast_to(mark[:, None, None], (SHAPE.tokens, 2, 4)).astype(jnp.float32)
        for layer, place in LAYERS.items():
            ids = batch.block_tables[place.group]
            if isinstance(place.spec, StateSpec):
                state = (tags * 1000 + totals).astype(jnp.float32)
                arrays = [
                    jnp.broadcast_to(state.reshape(-1, *[1] * len(shape)), (ROWS, *shape))
                    for shape in place.spec.shapes
                ]
                moved = jnp.where(batch.lengths > 0, ids[:, 0], -1)
                pool = write_state(pool, layer, moved, arrays)
            else:
                pool = write_tokens(pool, layer, batch.slots[place.group], token, -token)
        return tables, pool, _read_all(pool, batch.block_tables)

    del stacked  # part of the cache key: the pool's form changes the program
    return jax.jit(step, donate_argnums=(0, 1))


def _read_all(pool, block_tables):
    return {
        layer: read_state(pool, layer, block_tables[place.group][:, 0])
        if isinstance(place.spec, StateSpec)
        else read_tokens(pool, layer, block_tables[place.group])
        for layer, place in LAYERS.items()
    }


def poisoned_pool(stacked: bool) -> KVPool:
    pool = make_pool(PLAN, stacked=stacked)
    buffers = [jnp.full_like(b, 0xFF).at[..., 0, :].set(0) for b in pool.buffers]
    return KVPool(buffers=tuple(buffers), layout=pool.layout)


class CacheMachine(RuleBasedStateMachine):
    implementation = "xla"
    stacked = False

    @initialize()
    def begin(self) -> None:
        self.manager = BlockManager(PLAN, max_requests=ROWS)
        self.tables = make_block_tables(PLAN, max_requests=ROWS)
        self.pool = poisoned_pool(self.stacked)
        self.computed: dict[int, int] = {}
        self.next_tag = 1

    @precondition(lambda self: len(self.computed) < ROWS)
    @rule()
    def start(self) -> None:
        self.manager.start(self.next_tag)
        self.computed[self.next_tag] = 0
        self.next_tag += 1

    @precondition(lambda self: self.computed)
    @rule(which=st.integers(0, ROWS - 1))
    def finish(self, which) -> None:
        tag = list(self.computed)[which % len(self.computed)]
        self.manager.finish(tag)
        del self.computed[tag]

    @precondition(lambda self: self.computed)
    @rule(wanted=st.tuples(*[st.integers(0, CHUNK)] * ROWS))
    def step(self, wanted) -> None:
        first = dict(self.computed)
        lengths = {}
        for tag, length in zip(first, wanted, strict=False):
            length = min(length, LONGEST - first[tag])
            free = self.manager.pool.num_free_blocks
            try:
                self.manager.grow(tag, first[tag], first[tag] + length)
            except OutOfBlocksError:
                assert self.manager.pool.num_free_blocks == free
                length = 0
            lengths[tag] = length
            self.computed[tag] += length
        self.check(first, lengths, self.run(first, lengths))

    def run(self, first, lengths):
        totals = [self.computed[tag] for tag in first]
        padding = [0] * (ROWS - len(first))
        upload = pack_step(
            SHAPE,
            update=self.manager.take_update(),
            rows=[self.manager.requests[tag] for tag in first],
            first_positions=list(first.values()),
            lengths=[lengths[tag] for tag in first],
            extra=[*first, *padding, *totals],
        )
        with kernels_run():
            step = device_step(self.implementation, self.stacked)
            self.tables, self.pool, read = step(self.tables, self.pool, upload)
        check_overflow(self.tables)
        return jax.tree.map(np.asarray, read)

    def check(self, first, lengths, read) -> None:
        for i, tag in enumerate(first):
            for layer, place in LAYERS.items():
                if isinstance(place.spec, StateSpec):
                    for array in read[layer]:
                        expected = tag * 1000 + self.computed[tag] if self.computed[tag] else 0
                        assert (array[i] == expected).all(), (layer, tag)
                    continue
                keys, values = (array[i] for array in read[layer])
                expected = self.expected_row(place, tag, first[tag], len(keys))
                np.testing.assert_array_equal(keys[:, 0, 0], expected, str((layer, tag)))
                np.testing.assert_array_equal(values[:, 1, 3], -expected, str((layer, tag)))

    def expected_row(self, place, tag, first, size) -> np.ndarray:
        """What positions 0 .. size - 1 read: marks where written and still in view."""
        spec = place.spec
        oldest = {
            "full": 0,
            "sliding": max(0, first - getattr(spec, "sliding_window", 0) + 1),
            "chunked": first - first % getattr(spec, "chunk_size", 1),
        }[spec.kind]
        row = np.zeros(size, np.float32)
        for position in range(self.computed[tag]):
            block_end = position - position % spec.block_size + spec.block_size - 1
            if block_end >= oldest:
                row[position] = (tag * 13 + position) % 251
        return row


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_request_reads_what_it_wrote_and_nothing_else(implementation, stacked) -> None:
    machine = type(
        "Machine", (CacheMachine,), {"implementation": implementation, "stacked": stacked}
    )
    interpreted = implementation == "mosaic_gpu" and not ON_GPU
    examples = 4 if interpreted else 30  # interpreting costs a tenth of a second a step
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=30)
    )
    if not interpreted:  # entering interpret mode changes jax's configuration, once
        assert device_step(implementation, stacked)._cache_size() == 1


def test_without_zeroing_the_machine_finds_stale_bytes() -> None:
    """The check above can fail: the same loop with zeroing off reads somebody's bytes."""
    machine = CacheMachine()
    machine.begin()
    machine.manager = BlockManager(PLAN, max_requests=ROWS, zero_policy="never")
    machine.start()
    with pytest.raises(AssertionError):
        machine.step((1, 0, 0, 0))
