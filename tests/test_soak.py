"""Random steps over the front door, each checked against dense caches in NumPy.

Every request keeps the bytes of its tokens and its state in dictionaries that know no blocks.
``JAXKV_SOAK_STEPS=10000`` makes it as long as you like.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.testing import count_compilations
from tests.helpers import hybrid_plan, pointers

STEPS = int(os.environ.get("JAXKV_SOAK_STEPS", "1000"))
ROWS, LONGEST, CHUNK = 6, 24, 8
PLAN = hybrid_plan(num_blocks=52, max_model_len=LONGEST)
SHAPE = jaxkv.StepShape.for_plan(PLAN, max_requests=ROWS, max_tokens=ROWS * CHUNK, forks=3, extra=1)
GROWTHS = {layer: group.growth for group in PLAN.groups for layer in group.layers}
TOKENS = [layer for layer, growth in GROWTHS.items() if growth.stores == "tokens"]
STATES = [layer for layer, growth in GROWTHS.items() if growth.stores == "state"]


@functools.partial(jax.jit, donate_argnums=0)
def device_step(cache, upload):
    """Writes a marked row for every token and adds up every state; reads all of it back."""
    cache, batch = jaxkv.apply_step(cache, upload)
    mark, rows = batch.extra[0], batch.request_rows[batch.token_requests]
    marks = ((batch.positions * 31 + rows * 7 + mark) % 251).astype(jnp.uint8)
    read = {}
    for layer in TOKENS:
        width = cache.layout.place_of(layer).spec.token_bytes
        data = jnp.broadcast_to(marks[:, None], (SHAPE.max_tokens, width))
        cache = jaxkv.write_rows(cache, layer, batch, data)
        stored = jax.lax.bitcast_convert_type(jaxkv.read_rows(cache, layer, batch), jnp.uint8)
        read[layer] = batch.first_positions(layer), stored.reshape(*stored.shape[:2], -1)
    for layer in STATES:
        before = jaxkv.read_state(cache, layer, batch)
        added = (batch.seq_lens + mark).astype(jnp.float32)
        after = [array + added.reshape(-1, *[1] * (array.ndim - 1)) for array in before]
        cache = jaxkv.write_state(cache, layer, batch, after)
        read[layer] = before
    return cache, read


class Soak:
    """A cache on the device, and next to it what each request must read."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.manager = jaxkv.BlockManager(PLAN, max_requests=ROWS)
        self.cache = jaxkv.make_cache(PLAN, max_requests=ROWS)
        self.tokens: dict[int, list[int]] = {}  # the mark of every token
        self.states: dict[int, int] = {}
        self.names = iter(range(10**9))
        self.forks = self.refusals = 0

    def step(self, mark: int) -> None:
        """Runs a step of random requests and checks all that they read."""
        self.come_and_go()
        work = {
            name: int(self.rng.integers(1, min(CHUNK, LONGEST - len(tokens)) + 1))
            for name, tokens in self.tokens.items()
            if len(tokens) < LONGEST and self.rng.random() < 0.7
        }
        while True:
            try:
                upload = self.manager.step(SHAPE, work, extra=[mark])
                break
            except jaxkv.OutOfBlocksError:
                self.refusals += 1
                self.finish(next(iter(self.tokens)))
                work = {name: count for name, count in work.items() if name in self.tokens}
        self.cache, read = device_step(self.cache, upload)
        rows = self.manager.requests
        for name, count in work.items():
            tokens = self.tokens[name]
            new = range(len(tokens), len(tokens) + count)
            tokens += [(position * 31 + rows[name] * 7 + mark) % 251 for position in new]
        self.check(work, read)
        for name in work:
            self.states[name] += len(self.tokens[name]) + mark

    def come_and_go(self) -> None:
        """Finishes, starts and forks requests at random, as blocks and rows allow."""
        for name in list(self.tokens):
            if self.rng.random() < (0.5 if len(self.tokens[name]) == LONGEST else 0.05):
                self.finish(name)
        while len(self.tokens) < ROWS and self.rng.random() < 0.5:
            self.start([], 0)
        donors = [name for name, tokens in self.tokens.items() if tokens]
        if donors and len(self.tokens) < ROWS and self.rng.random() < 0.3:
            donor = donors[int(self.rng.integers(len(donors)))]
            self.manager.fork(donor, [self.start(self.tokens[donor], self.states[donor], donor)])
            self.forks += 1

    def start(self, tokens: list[int], state: int, donor: int | None = None) -> int:
        name = next(self.names)
        if donor is None:
            self.manager.start(name)
        self.tokens[name], self.states[name] = list(tokens), state
        return name

    def finish(self, name: int) -> None:
        self.manager.finish(name)
        del self.tokens[name], self.states[name]

    def check(self, work, read) -> None:
        for layer in TOKENS:
            firsts, stored = map(np.asarray, read[layer])
            for index, (name, count) in enumerate(work.items()):
                tokens, first = self.tokens[name], firsts[index]
                oldest = int(GROWTHS[layer].first_visible(len(tokens) - count))
                got = stored[index, oldest - first : len(tokens) - first]
                assert (got == np.array(tokens[oldest:], np.uint8)[:, None]).all(), (layer, name)
        for layer in STATES:
            for array in read[layer]:
                for index, name in enumerate(work):
                    assert (np.asarray(array)[index] == self.states[name]).all(), (layer, name)


def device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else sum(array.nbytes for array in jax.live_arrays())


def test_random_steps_read_what_they_wrote_compile_nothing_and_keep_memory_flat() -> None:
    soak = Soak()
    for mark in range(20):
        soak.step(mark)
    before, where = device_bytes(), pointers(soak.cache)
    with count_compilations() as compilations:
        for count in range(STEPS):
            soak.step(count % 251)
    jaxkv.check_errors(soak.cache)
    assert not compilations and device_bytes() <= before and pointers(soak.cache) == where
    assert soak.forks > STEPS // 20 and soak.refusals > STEPS // 50
    for name in list(soak.tokens):
        soak.finish(name)
    assert soak.manager.num_free_blocks == PLAN.usable_blocks


if __name__ == "__main__":
    test_random_steps_read_what_they_wrote_compile_nothing_and_keep_memory_flat()
