"""A cache sleeps and wakes: content, places, memory, compiled steps, and what is refused."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from jax.sharding import AxisType

import jaxkv
from jaxkv._src.sleeping import (
    PARTS,
    ClosedOverError,
    SleepError,
    SleepingCache,
    _host,
    check_not_closed_over,
    sleep,
    wake_up,
)
from jaxkv.testing import assert_same_bytes, count_compilations
from tests.helpers import garbage, hybrid_plan, needs_devices, snapshot

PLAN = hybrid_plan(num_blocks=24)
SMALL_CHUNKS = 2 * PLAN.layout.bytes_per_block  # the pool goes out in twelve parts
HEADS = jaxkv.plan_cache(  # layers whose heads can be divided in any order
    {
        f"layer.{i}": jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
        for i in range(3)
    },
    2**20,
    max_model_len=24,
    num_blocks_override=24,
)
SHAPE = jaxkv.StepShape.for_plan(PLAN, max_requests=4, max_tokens=8)
CONTENT = ("buffers", "rows", "status")
SCALES = (0.02, 3.0)

HOMES = [
    "default",
    "unstacked",
    "BHLNC",
    "uncommitted",
    pytest.param("mesh", marks=needs_devices(2)),
    pytest.param("explicit mesh", marks=needs_devices(2)),
]


def empty_cache(home: str = "default") -> jaxkv.KVCache:
    plan, options = PLAN, {"max_requests": 4, "scales": SCALES}
    if home == "unstacked":
        options["stacked"] = False
    elif home == "BHLNC":
        plan, options["order"] = HEADS, home
    elif "mesh" in home:
        axis_type = AxisType.Explicit if "explicit" in home else AxisType.Auto
        options["mesh"] = jax.make_mesh(
            (2,), ("heads",), axis_types=(axis_type,), devices=jax.devices()[:2]
        )
        options["axis"] = "heads"
        if axis_type == AxisType.Explicit:
            plan, options["order"] = HEADS, "LHBNC"
    cache = jaxkv.make_cache(plan, **options)
    if home == "uncommitted":  # and on another device than the default one
        with jax.default_device(jax.devices()[-1]):
            cache = jax.tree.map(lambda array: jax.device_put(np.asarray(array)), cache)
    return cache


def full_cache(home: str = "default") -> jaxkv.KVCache:
    """Random bytes in pool and tables, each array in the place it had."""
    cache = empty_cache(home)
    filled = jax.tree.map(_filled, {name: getattr(cache, name) for name in CONTENT})
    return dataclasses.replace(cache, **filled)


def _filled(array: jax.Array) -> jax.Array:
    content = garbage(array.shape, array.dtype.name)
    with jax.default_device(None if array.committed else next(iter(array.sharding.device_set))):
        return jax.device_put(content, array.sharding if array.committed else None, may_alias=False)


def places(tree: object) -> list[tuple[Any, ...]]:
    return [
        (array.shape, array.dtype, array.sharding, array.committed)
        for array in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("chunk_bytes", [1, SMALL_CHUNKS, 6 * SMALL_CHUNKS, 2**30])
@pytest.mark.parametrize("home", HOMES)
def test_level_1_gives_back_what_was_there(home: str, chunk_bytes: int) -> None:
    cache = full_cache(home)
    kept, where = snapshot(cache), places(cache)
    sleeping = sleep(cache, level=1, chunk_bytes=chunk_bytes)
    held = jax.tree.leaves([getattr(kept, name) for name in CONTENT])
    assert sleeping.host_bytes == sum(array.nbytes for array in held)
    awake = wake_up(sleeping)
    assert_same_bytes(awake, kept)
    assert places(awake) == where
    assert awake.layout == cache.layout and awake.scales is cache.scales


@pytest.mark.parametrize("home", HOMES)
def test_level_2_zeroes_the_pool_and_keeps_tables_and_scales(home: str) -> None:
    cache = full_cache(home)
    kept, where = snapshot(cache), places(cache)
    sleeping = sleep(cache, level=2)
    tables = [getattr(kept, name) for name in CONTENT[1:]]
    assert sleeping.host_bytes == sum(array.nbytes for array in tables)
    awake = wake_up(sleeping)
    empty = tuple(np.zeros_like(buffer) for buffer in kept.buffers)
    assert_same_bytes(awake, dataclasses.replace(kept, buffers=empty))
    assert places(awake) == where
    assert awake.scales is cache.scales


def test_a_cache_without_scales_or_without_a_pool_sleeps_as_well() -> None:
    cache = jaxkv.make_cache(PLAN, max_requests=4, tables_only=True)
    kept = snapshot(cache)
    sleeping = sleep(cache)
    assert sleeping.host_bytes == sleeping.released_bytes > 0
    awake = wake_up(sleeping, reset_scales=True)
    assert awake.scales is None and awake.buffers == ()
    assert_same_bytes(awake, kept)


def test_memory_goes_back_to_the_allocator() -> None:
    """A pool of 64 MiB, out and back in parts of 4 MiB."""
    plan = hybrid_plan(num_blocks=2**26 // PLAN.layout.bytes_per_block)
    part = 4 * 2**20
    cache = jaxkv.make_cache(plan, max_requests=4)
    held = sum(array.nbytes for array in jax.tree.leaves(cache))
    gc.collect()  # what earlier tests left over is not to go in between
    before = _device_bytes()
    sleeping = sleep(cache, chunk_bytes=part)
    assert sleeping.released_bytes == sleeping.host_bytes == held
    assert before - _device_bytes() >= held
    awake = wake_up(sleeping)
    assert abs(_device_bytes() - before) < 2**16
    again = sleep(awake, level=2)
    assert before - _device_bytes() >= held and again.host_bytes < part
    wake_up(again)


def _device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["bytes_in_use"]
    arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind == "device"]
    return sum(a.nbytes for a in arrays)


def test_at_most_two_chunks_lie_beside_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    def watch(function):
        @functools.wraps(function)
        def watched(*args, **options):
            arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind == "device"]
            alive.append(sum(a.shape in shapes and id(a) not in others for a in arrays))
            return function(*args, **options)

        return watched

    others = {id(array): array for array in jax.live_arrays()}  # of other tests, in any shape
    cache = full_cache()
    (buffer,) = cache.buffers
    axis, bounds = _host._cut(buffer, SMALL_CHUNKS)
    shapes = {(*buffer.shape[:axis], size, *buffer.shape[axis + 1 :]) for _, size in bounds}
    del buffer
    monkeypatch.setattr(_host, "_take", watch(_host._take))
    monkeypatch.setattr(_host, "_insert", watch(_host._insert))
    wait, in_flight = _host._wait_for_room, list[int]()
    monkeypatch.setattr(
        _host, "_wait_for_room", lambda pending: (in_flight.append(len(pending)), wait(pending))
    )
    sleeping = sleep(cache, chunk_bytes=SMALL_CHUNKS)
    assert in_flight == [0, 1, *[2] * (len(in_flight) - 2)]  # on their way out
    in_flight.clear()
    wake_up(sleeping)
    assert in_flight == [0, 1, *[2] * (len(in_flight) - 2)]
    assert len(alive) > 10
    assert max(alive) == 2


def touch(cache: jaxkv.KVCache) -> jaxkv.KVCache:
    """A step over everything: one more in every byte and every id."""
    content = {name: getattr(cache, name) for name in CONTENT}
    return dataclasses.replace(
        cache, **jax.tree.map(lambda array: array + array.dtype.type(1), content)
    )


@pytest.mark.parametrize("home", HOMES)
def test_compiled_steps_survive(home: str) -> None:
    """The same programs run on what woke: that of jit, and one compiled ahead."""
    cache = full_cache(home)
    step = jax.jit(touch, donate_argnums=0)
    cache = step(step(cache))  # explicit axes are spelt out by the first
    lookahead = jax.jit(touch).lower(cache).compile()
    programs = step._cache_size()
    for level, parts in [(1, PARTS), (2, PARTS), (1, PARTS[:1]), (2, PARTS[:1]), (1, PARTS[1:])]:
        sleeping = sleep(cache, level=level, parts=parts, chunk_bytes=SMALL_CHUNKS)
        cache = wake_up(sleeping)
        with count_compilations() as compilations:
            jax.block_until_ready(lookahead(cache))
            cache = step(cache)
            jax.block_until_ready(cache)
        assert not compilations
    assert step._cache_size() == programs


@functools.partial(jax.jit, donate_argnums=0)
def write_and_read(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    tokens = jnp.broadcast_to(batch.positions[:, None, None] / 8, (8, 2, 4))
    cache = jaxkv.write_tokens(cache, "full.0", batch, tokens, -tokens)
    return cache, jaxkv.read_tokens(cache, "full.0", batch)


def serve(naps: bool) -> list[np.ndarray]:
    """Seven steps of two requests, which read all they have written; naps between steps."""
    manager, cache = jaxkv.BlockManager(PLAN, max_requests=4), empty_cache()
    for name in "ab":
        manager.start(name)
    read = []
    for i in range(7):
        cache, kept = write_and_read(cache, manager.step(SHAPE, {"a": 2, "b": 3}))
        read += [np.asarray(array) for array in kept]
        if naps:
            cache = wake_up(sleep(cache, parts=PARTS[i % 3 : i % 3 + 1] or PARTS))
    assert write_and_read._cache_size() == 1
    jaxkv.check_errors(cache)
    return read


def test_serving_goes_on_where_it_was() -> None:
    awake = serve(naps=False)
    assert any(array.any() for array in awake)
    for napped, expected in zip(serve(naps=True), awake, strict=True):
        np.testing.assert_array_equal(napped, expected)


class Nights(RuleBasedStateMachine):
    """Parts fall asleep and wake in any order; content is what a model in NumPy says."""

    def __init__(self):
        super().__init__()
        self.cache = full_cache()
        self.content = snapshot(self.cache)
        self.scales = self.cache.scales
        self.asleep: dict[str, int] = {}

    @precondition(lambda self: not self.asleep)
    @rule()
    def step(self) -> None:
        self.cache = dataclasses.replace(TOUCH(self.cache), scales=self.scales)
        self.content = touch(self.content)

    @rule(level=st.sampled_from([1, 2]), parts=st.sets(st.sampled_from(PARTS), min_size=1))
    def sleep(self, level: int, parts: set[str]) -> None:
        if parts & self.asleep.keys():
            with pytest.raises(SleepError, match="sleeps already"):
                sleep(self.cache, level=level, parts=parts)
            return
        before = self.cache
        self.cache = sleep(before, level=level, parts=parts, chunk_bytes=SMALL_CHUNKS)
        self.check_spent(before)
        self.asleep |= dict.fromkeys(parts, level)
        if level == 2 and "kv_cache" in parts:
            empty = tuple(np.zeros_like(buffer) for buffer in self.content.buffers)
            self.content = dataclasses.replace(self.content, buffers=empty)

    @rule(parts=st.sets(st.sampled_from(PARTS), min_size=1))
    def wake(self, parts: set[str]) -> None:
        if parts - self.asleep.keys():
            with pytest.raises(SleepError, match="is awake"):
                wake_up(self.cache, parts=parts)
            return
        before = self.cache
        self.cache = wake_up(before, parts=parts)
        self.check_spent(before)
        for part in parts:
            del self.asleep[part]

    def check_spent(self, handle: jaxkv.KVCache | SleepingCache) -> None:
        if isinstance(handle, SleepingCache):
            assert repr(handle).startswith("SleepingCache(spent") and not handle.levels

    @invariant()
    def holds(self) -> None:
        if self.asleep:
            assert isinstance(self.cache, SleepingCache)
            assert self.cache.levels == self.asleep
            return
        assert isinstance(self.cache, jaxkv.KVCache)
        assert self.cache.scales is self.scales
        assert_same_bytes(self.cache, self.content)


TOUCH = jax.jit(touch)
TestNights = Nights.TestCase
TestNights.settings = settings(max_examples=20, stateful_step_count=15)


def test_a_sleeping_cache_cannot_be_used() -> None:
    sleeping = sleep(full_cache(), parts=("kv_cache",))
    for name in (*CONTENT, "scales", "error_flags", "block_tables", "row_lengths"):
        with pytest.raises(SleepError, match=f"{name} of a sleeping cache .*kv_cache asleep"):
            getattr(sleeping, name)
    for use in (jax.jit(lambda cache: 0), jax.tree.leaves, jax.block_until_ready, jax.device_put):
        with pytest.raises(SleepError, match="call wake_up first"):
            use(sleeping)
    with pytest.raises(AttributeError, match="'pool'"):
        _ = sleeping.pool
    assert isinstance(wake_up(sleeping), jaxkv.KVCache)


def test_a_handle_is_spent_by_the_call_that_takes_it() -> None:
    dozing = sleep(full_cache(), parts=("kv_cache",))
    asleep = sleep(dozing, parts=("block_tables",))
    woken = wake_up(asleep, parts=("block_tables",))
    cache = wake_up(woken)
    held = [weakref.ref(array) for array in (*cache.buffers, cache.status, cache.scales)]
    for handle in (dozing, asleep, woken):
        assert not handle.levels and not handle.released_bytes and not handle.host_bytes
        for use in (sleep, wake_up):
            with pytest.raises(SleepError, match="spent: a later sleep or wake_up took it"):
                use(handle)
    del cache
    gc.collect()
    assert not any(array() for array in held), "a spent handle keeps arrays alive"


def test_states_that_were_left_are_refused() -> None:
    cache = full_cache()
    with pytest.raises(SleepError, match="the cache is awake, all of it"):
        wake_up(cache)
    sleeping = sleep(cache)
    with pytest.raises(SleepError, match="kv_cache has an array that was deleted: it sleeps"):
        sleep(cache)
    with pytest.raises(SleepError, match=r"sleeps already; .*: SleepingCache\(kv_cache asleep"):
        sleep(sleeping)
    dozing = wake_up(sleeping, parts=("block_tables",))
    with pytest.raises(SleepError, match="block_tables is awake already"):
        wake_up(dozing, parts=("block_tables",))
    half = full_cache()
    dozing = sleep(half, parts=("kv_cache",))
    half.status.delete()
    with pytest.raises(SleepError, match="block_tables has an array that was deleted"):
        wake_up(dozing)
    donated = full_cache()
    jax.jit(touch, donate_argnums=0)(donated)
    with pytest.raises(SleepError, match="donated to a step"):
        sleep(donated)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": 0}, ValueError, "level=0; use 1 to keep content on the host, 2 to drop it"),
        ({"parts": "kv_cache"}, ValueError, "parts='kv_cache'; give at least one of .*as a tuple"),
        ({"parts": ()}, ValueError, "at least one"),
        ({"parts": ("kv_cache", "weights")}, ValueError, "weights"),
    ],
)
def test_bad_options(options: dict, error: type, message: str) -> None:
    cache = full_cache()
    kept = snapshot(cache)
    with pytest.raises(error, match=message):
        sleep(cache, **options)
    assert_same_bytes(cache, kept)
    if "parts" in options:
        sleeping = sleep(cache)
        with pytest.raises(error, match=message):
            wake_up(sleeping, parts=options["parts"])


def test_other_things_than_a_cache_are_refused() -> None:
    cache = full_cache()
    with pytest.raises(TypeError, match="a jitted function cannot call it"):
        jax.jit(lambda cache: sleep(cache).host_bytes)(cache)
    with pytest.raises(TypeError, match="kv_cache has a ndarray"):
        sleep(snapshot(cache))
    with pytest.raises(TypeError, match="cache must be a KVCache that is awake, got tuple"):
        check_not_closed_over(cache.buffers, touch, cache)
    with pytest.raises(TypeError, match="step must be a function, got KVCache"):
        check_not_closed_over(cache, cache)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Lets collections look at new objects alone; those of a whole run take seconds each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("fails_at", [0, 3, 9, 15, -1, -2, -3])
def test_a_failure_leaves_things_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Whether the pool is on its way, in chunks, or the small arrays are (at -1 the last)."""
    error = KeyboardInterrupt if fails_at % 3 == 0 else MemoryError
    cache = full_cache()
    kept = snapshot(cache)
    to_host, to_device = fails_at, fails_at
    if fails_at < 0:
        with mock.patch.object(_host.jax, "device_put", wraps=jax.device_put) as puts:
            sleeping = sleep(cache, chunk_bytes=SMALL_CHUNKS)
            to_host += puts.call_count
            cache = wake_up(sleeping)
            to_device += puts.call_count - to_host + fails_at
    before = _live_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(_host.jax, "device_put", _fails_at(to_host, error))
        with pytest.raises(error) as failure:
            sleep(cache, chunk_bytes=SMALL_CHUNKS)
    # While the traceback still holds its frames, and before reads: on a GPU, jax keeps a second
    # array of the same memory for each array that was read.
    assert _live_bytes() == before
    del failure
    assert_same_bytes(cache, kept)
    sleeping = sleep(cache, chunk_bytes=SMALL_CHUNKS)
    before = _live_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(_host.jax, "device_put", _fails_at(to_device, error))
        with pytest.raises(error) as failure:
            wake_up(sleeping)
    assert _live_bytes() == before
    del failure
    assert sleeping.levels == dict.fromkeys(PARTS, 1)
    awake = wake_up(sleeping)
    assert_same_bytes(awake, kept)


def _live_bytes() -> dict[str, int]:
    gc.collect()
    kinds: dict[str, int] = {}
    for array in jax.live_arrays():
        kind = array.sharding.memory_kind
        # An index sent to the device is not what is meant.
        kinds[kind] = kinds.get(kind, 0) + (array.nbytes if array.nbytes > 4 else 0)
    return kinds


def _fails_at(count: int, error: type[BaseException]):
    calls = iter(range(count))
    put = jax.device_put

    def device_put(*args, **options):
        if next(calls, None) is None:
            raise error("no room")
        return put(*args, **options)

    return device_put


def test_closed_over_arrays_are_found() -> None:
    """The one way to break a sleeping cache, what it does, and the guard against it."""
    cache = full_cache()
    first_id = int(cache.block_tables[0, 0])

    @jax.jit
    def broken(rows):
        return cache.block_tables[rows]

    rows = jnp.array([0])
    assert broken(rows)[0, 0] == first_id
    later = TOUCH(cache)
    awake = wake_up(sleep(later))
    assert awake.block_tables[0, 0] == first_id + 1 and broken(rows)[0, 0] == first_id
    for state in (cache, awake):  # the very arrays, and a later state of them
        with pytest.raises(ClosedOverError, match=r"broken closes .* \(as cache.rows\)"):
            check_not_closed_over(state, broken, rows)
        with pytest.raises(ClosedOverError, match=r"^step closes .* \(as cache.rows\)"):
            check_not_closed_over(state, functools.partial(broken), rows=rows)  # without a name
    with pytest.raises(ClosedOverError, match=r"\(as cache.status\)"):
        check_not_closed_over(awake, lambda: awake.status + 1)
    with pytest.raises(ClosedOverError, match=r"\(as cache.rows\), .* \(as cache.status\)"):
        check_not_closed_over(awake, lambda: (awake.rows + 1, awake.status + 1))

    @jax.jit
    def right(cache, rows):
        others = [array.astype(jnp.int32).sum() for array in (vector, of_floats, cut, scales)]
        return cache.block_tables[rows] + jnp.int32(3) * scalar + sum(others)

    # A vector as long as one of the cache, and arrays of another dtype or shape than any of it but
    # the scales, which steps never change.
    scalar, vector, scales = jnp.int32(2), jnp.ones_like(cache.status), awake.scales
    of_floats, cut = cache.rows.astype(jnp.float32), cache.rows[:, 1:]
    check_not_closed_over(awake, right, awake, rows)
    check_not_closed_over(awake, lambda cache: right(cache, rows), awake)


def _scan(buffer):
    return jax.lax.scan(lambda carry, _: (carry + buffer, None), buffer, None, length=2)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda buffer: lambda x: x + buffer.sum(dtype=jnp.uint8),
        lambda buffer: lambda x: jax.jit(lambda y: y + buffer[0, 0, 0])(x),
        lambda buffer: lambda x: x + _scan(buffer)[0, 0, 0],
        lambda buffer: lambda x: jax.lax.cond(x[0] > 0, lambda: buffer[0, 0, 0], lambda: x[0]),
    ],
    ids=["plain", "nested", "scan", "cond"],
)
@pytest.mark.parametrize("are_literals", [False, True])
def test_closed_over_buffers_are_found_in_nested_programs(wrap, are_literals: bool) -> None:
    jax.config.update("jax_use_simplified_jaxpr_constants", are_literals)  # later versions do
    try:
        check_closed_over(wrap)
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)


def check_closed_over(wrap) -> None:
    cache = full_cache()
    x = jnp.zeros(3, jnp.uint8)
    for step in (wrap(cache.buffers[0]), jax.jit(wrap(cache.buffers[0]))):
        with pytest.raises(ClosedOverError, match=r"uint8.* \(as cache.buffers\[0\]\)"):
            check_not_closed_over(cache, step, x)
    check_not_closed_over(cache, lambda x, buffer: wrap(buffer)(x), x, cache.buffers[0])


def test_a_transfer_guard_has_nothing_to_object_to() -> None:
    cache = full_cache()
    kept = snapshot(cache)
    with jax.transfer_guard("disallow"):
        awake = wake_up(sleep(cache, chunk_bytes=SMALL_CHUNKS))
    assert_same_bytes(awake, kept)
