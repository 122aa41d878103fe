"""A cache sleeps and wakes: content, places, memory, compiled steps, and what is refused."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.block_tables import check_overflow, make_block_tables
from jaxkv.blocks import BlockManager
from jaxkv.planning import plan_cache
from jaxkv.pool import make_pool, make_sharded_pool, read_tokens, write_tokens
from jaxkv.sleep import (
    PARTS,
    ClosedOverError,
    KVCache,
    SleepError,
    SleepingCache,
    _host,
    check_not_closed_over,
    sleep,
    wake_up,
)
from jaxkv.specs import FullAttentionSpec
from jaxkv.step import StepShape, apply_step, pack_step
from jaxkv.testing import assert_same_bytes, count_compilations
from tests.helpers import garbage, hybrid_plan, snapshot

PLAN = hybrid_plan(num_blocks=24)
SMALL_CHUNKS = 5 * PLAN.layout.slots[0].page_bytes  # a buffer goes out in five parts
two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
HOMES = [
    "uncommitted",
    "committed",
    "stacked",
    "BHLNC",
    pytest.param("other default", marks=two_devices),
    pytest.param("mesh", marks=two_devices),
    pytest.param("explicit mesh", marks=two_devices),
]
HEADS = plan_cache(  # layers whose heads can be dealt out in any order
    {f"layer.{i}": FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4) for i in range(3)},
    2**20,
    max_model_len=24,
    num_blocks_override=24,
)
SHAPE = StepShape(
    entries=4,
    block_ids=40,
    zero_ids=12,
    batch=2,
    tokens=8,
    widths=make_block_tables(PLAN, max_requests=4).widths,
)


def empty_cache(home: str = "uncommitted") -> KVCache:
    """Scales stand beside, one of them weakly typed, where tables are."""
    plan, order, pool_of, device = PLAN, "LBNHC", make_pool, None
    default = jax.devices()[-1] if home == "other default" else None
    if "mesh" in home:
        axis_type = jax.sharding.AxisType.Explicit if "explicit" in home else None
        mesh = jax.make_mesh((2,), ("heads",), axis_types=axis_type and (axis_type,))
        device = NamedSharding(mesh, PartitionSpec())
        pool_of = functools.partial(make_sharded_pool, mesh=mesh, axis="heads")
        if axis_type:
            plan, order = HEADS, "LHBNC"
    elif home == "BHLNC":
        plan, order = HEADS, home
    elif home == "committed":
        device = jax.devices()[0]
        pool_of = functools.partial(make_pool, device=device)
    with jax.default_device(default):
        scales = {"a": jnp.full((2,), 0.02), "b": jnp.float32(3)}
        return KVCache(
            pool=pool_of(plan, stacked=True if home == "stacked" else None, order=order),
            tables=make_block_tables(plan, max_requests=4, device=device),
            scales=scales if device is None else jax.device_put(scales, device),
        )


def full_cache(home: str = "uncommitted") -> KVCache:
    """Random bytes in pool and tables, each array in the place it had."""
    cache = empty_cache(home)
    pool, tables = jax.tree.map(_filled, (cache.pool, cache.tables))
    return dataclasses.replace(cache, pool=pool, tables=tables)


def _filled(array: jax.Array) -> jax.Array:
    content = garbage(array.shape, array.dtype.name)
    with jax.default_device(None if array.committed else next(iter(array.sharding.device_set))):
        return jax.device_put(content, array.sharding if array.committed else None, may_alias=False)


def places(tree: object) -> list[tuple]:
    return [
        (array.shape, array.dtype, array.sharding, array.committed, array.weak_type)
        for array in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("chunk_bytes", [1, SMALL_CHUNKS, 2**30])
@pytest.mark.parametrize("home", HOMES)
def test_level_1_gives_back_what_was_there(home: str, chunk_bytes: int) -> None:
    cache = full_cache(home)
    kept, where = snapshot((cache.pool, cache.tables)), places(cache)
    awake = wake_up(sleep(cache, level=1, chunk_bytes=chunk_bytes))
    assert_same_bytes((awake.pool, awake.tables), kept)
    assert places(awake) == where
    assert awake.pool.layout == cache.pool.layout


@pytest.mark.parametrize("home", HOMES)
def test_level_2_zeroes_the_pool_and_keeps_the_tables(home: str) -> None:
    cache = full_cache(home)
    kept, where = snapshot(cache.tables), places(cache)
    sleeping = sleep(cache, level=2)
    assert sleeping.host_bytes == sum(array.nbytes for array in jax.tree.leaves(kept))
    awake = wake_up(sleeping)
    assert_same_bytes(awake.tables, kept)
    assert all(not np.asarray(buffer).any() for buffer in awake.pool.buffers)
    assert places(awake) == where


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("home", HOMES)
def test_scales_stay_unless_a_reset_is_asked_for(home: str, level: int) -> None:
    cache = empty_cache(home)
    awake = wake_up(sleep(cache, level=level))
    assert awake.scales is cache.scales
    reset = wake_up(sleep(awake, level=level), reset_scales=True)
    assert [np.asarray(scale).tolist() for scale in jax.tree.leaves(reset.scales)] == [[1, 1], 1]
    assert places(reset.scales) == places(cache.scales)


def test_memory_goes_back_to_the_allocator() -> None:
    """A pool of 64 MiB, out and back in parts of 4 MiB."""
    plan = hybrid_plan(num_blocks=2**26 // PLAN.layout.bytes_per_block)
    part = 4 * 2**20
    cache = KVCache(
        pool=make_pool(plan, stacked=True), tables=make_block_tables(plan, max_requests=4)
    )
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
            alive.append(sum(array.shape in shapes for array in arrays))
            return function(*args, **options)

        return watched

    cache = full_cache()
    buffer = cache.pool.buffers[0]
    axis, bounds = _host._cut(buffer, SMALL_CHUNKS)
    shapes = {(*buffer.shape[:axis], size, *buffer.shape[axis + 1 :]) for _, size in bounds}
    del buffer
    monkeypatch.setattr(_host, "_take", watch(_host._take))
    monkeypatch.setattr(_host, "_insert", watch(_host._insert))
    wake_up(sleep(cache, chunk_bytes=SMALL_CHUNKS))
    assert len(alive) > 10
    assert max(alive) == 2


def touch(cache: KVCache) -> KVCache:
    """A step over everything: one more in every byte and every id."""
    pool, tables = jax.tree.map(
        lambda array: array + array.dtype.type(1), (cache.pool, cache.tables)
    )
    return dataclasses.replace(cache, pool=pool, tables=tables)


@pytest.mark.parametrize("home", HOMES)
def test_compiled_steps_survive(home: str) -> None:
    """The same programs run on what woke: that of jit, and one compiled ahead."""
    cache = full_cache(home)
    step = jax.jit(touch, donate_argnums=0)
    cache = step(step(cache))  # what was uncommitted comes back committed from the first
    ahead = jax.jit(touch).lower(cache).compile()
    programs = step._cache_size()
    for level, parts in [(1, PARTS), (2, PARTS), (1, PARTS[:1]), (2, PARTS[:1]), (1, PARTS[1:])]:
        sleeping = sleep(cache, level=level, parts=parts, chunk_bytes=SMALL_CHUNKS)
        cache = wake_up(sleeping)
        with count_compilations() as compilations:
            jax.block_until_ready(ahead(cache))
            cache = step(cache)
            jax.block_until_ready(cache)
        assert not compilations
    assert step._cache_size() == programs


def serve(naps: bool) -> list[np.ndarray]:
    """Seven steps of two requests, which read all they have written; naps between steps."""
    manager, cache = BlockManager(PLAN, max_requests=4), empty_cache()
    rows, read = [manager.start(name) for name in "ab"], []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, upload):
        tables, pool, batch = apply_step(cache.tables, cache.pool, upload, shape=SHAPE)
        tokens = jnp.broadcast_to(batch.positions[:, None, None] / 8, (SHAPE.tokens, 2, 4))
        pool = write_tokens(pool, "full.0", batch.slots[group], tokens, -tokens)
        kept = read_tokens(pool, "full.0", batch.block_tables[group])
        return dataclasses.replace(cache, pool=pool, tables=tables), kept

    group = PLAN.layout.place_of("full.0").group
    for i in range(7):
        for name in "ab":
            manager.grow(name, 2 * i, 2 * i + 2)
        upload = pack_step(
            SHAPE,
            update=manager.take_update(),
            rows=rows,
            first_positions=[2 * i] * 2,
            lengths=[2, 2],
        )
        cache, kept = step(cache, upload)
        read += [np.asarray(array) for array in kept]
        if naps:
            cache = wake_up(sleep(cache, parts=PARTS[i % 3 : i % 3 + 1] or PARTS))
    assert step._cache_size() == 1
    check_overflow(cache.tables)
    return read


def test_serving_goes_on_where_it_was() -> None:
    for napped, awake in zip(serve(naps=True), serve(naps=False), strict=True):
        np.testing.assert_array_equal(napped, awake)


class Nights(RuleBasedStateMachine):
    """Parts fall asleep and wake in any order; content is what a model in NumPy says."""

    def __init__(self):
        super().__init__()
        self.cache = full_cache()
        self.content = {
            "kv_cache": jax.tree.leaves(snapshot(self.cache.pool)),
            "block_tables": jax.tree.leaves(snapshot(self.cache.tables)),
        }
        self.asleep: dict[str, int] = {}

    @precondition(lambda self: not self.asleep)
    @rule()
    def step(self) -> None:
        self.cache = TOUCH(self.cache)
        for arrays in self.content.values():
            arrays[:] = [array + array.dtype.type(1) for array in arrays]

    @rule(level=st.sampled_from([1, 2]), parts=st.sets(st.sampled_from(PARTS), min_size=1))
    def sleep(self, level: int, parts: set[str]) -> None:
        if parts & self.asleep.keys():
            with pytest.raises(SleepError, match="sleeps already"):
                sleep(self.cache, level=level, parts=parts)
            return
        self.cache = sleep(self.cache, level=level, parts=parts, chunk_bytes=SMALL_CHUNKS)
        self.asleep |= dict.fromkeys(parts, level)
        if level == 2 and "kv_cache" in parts:
            self.content["kv_cache"] = [0 * array for array in self.content["kv_cache"]]

    @rule(parts=st.sets(st.sampled_from(PARTS), min_size=1))
    def wake(self, parts: set[str]) -> None:
        if parts - self.asleep.keys():
            with pytest.raises(SleepError, match="is awake"):
                wake_up(self.cache, parts=parts)
            return
        self.cache = wake_up(self.cache, parts=parts)
        for part in parts:
            del self.asleep[part]

    @invariant()
    def holds(self) -> None:
        if self.asleep:
            assert isinstance(self.cache, SleepingCache)
            assert self.cache.levels == self.asleep
            return
        assert isinstance(self.cache, KVCache)
        assert_same_bytes(jax.tree.leaves(self.cache.pool), self.content["kv_cache"])
        assert_same_bytes(jax.tree.leaves(self.cache.tables), self.content["block_tables"])


TOUCH = jax.jit(touch)
TestNights = Nights.TestCase
TestNights.settings = settings(max_examples=20, stateful_step_count=15)


def test_a_part_at_a_time() -> None:
    cache = full_cache()
    kept = snapshot((cache.pool, cache.tables))
    dozing = sleep(cache, parts=("kv_cache",))
    assert dozing.levels == {"kv_cache": 1}
    assert not cache.tables.num_blocks.is_deleted() and cache.pool.buffers[0].is_deleted()
    asleep = sleep(dozing, level=2, parts=("block_tables",))
    assert asleep.levels == {"kv_cache": 1, "block_tables": 2}
    dozing = wake_up(asleep, parts=("kv_cache",))
    assert isinstance(dozing, SleepingCache) and dozing.levels == {"block_tables": 2}
    awake = wake_up(dozing)
    assert_same_bytes((awake.pool, awake.tables), kept)


def test_a_sleeping_cache_cannot_be_used() -> None:
    sleeping = sleep(full_cache(), parts=("kv_cache",))
    for name in ("pool", "tables", "scales"):
        with pytest.raises(SleepError, match=f"{name} of a sleeping cache .*kv_cache asleep"):
            getattr(sleeping, name)
    for use in (jax.jit(lambda cache: 0), jax.tree.leaves, jax.block_until_ready, jax.device_put):
        with pytest.raises(SleepError, match="call wake_up first"):
            use(sleeping)
    with pytest.raises(AttributeError, match="'buffers'"):
        _ = sleeping.buffers
    assert isinstance(wake_up(sleeping), KVCache)


def test_states_that_were_left_are_refused() -> None:
    cache = full_cache()
    with pytest.raises(SleepError, match="the cache is awake, all of it"):
        wake_up(cache)
    sleeping = sleep(cache)
    with pytest.raises(SleepError, match="kv_cache: an array of it was deleted, for it sleeps"):
        sleep(cache)
    with pytest.raises(SleepError, match=r"sleeps already: SleepingCache\(kv_cache asleep"):
        sleep(sleeping)
    dozing = wake_up(sleeping, parts=("block_tables",))
    with pytest.raises(SleepError, match="block_tables is awake already"):
        wake_up(dozing, parts=("block_tables",))
    for use in (sleep, wake_up):
        with pytest.raises(SleepError, match="spent: a later call"):
            use(sleeping)
    wake_up(dozing)
    with pytest.raises(SleepError, match="spent"):
        wake_up(dozing)
    half = full_cache()
    dozing = sleep(half, parts=("kv_cache",))
    half.tables.num_blocks.delete()
    with pytest.raises(SleepError, match="block_tables: an array of it was deleted"):
        wake_up(dozing)
    donated = full_cache()
    jax.jit(touch, donate_argnums=0)(donated)
    with pytest.raises(SleepError, match="donated to a step"):
        sleep(donated)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": 0}, ValueError, "level=0; use 1 to keep content on the host, 2 to drop it"),
        ({"level": True}, ValueError, "level=True"),
        ({"parts": "kv_cache"}, ValueError, "parts='kv_cache'; give at least one of .*as a tuple"),
        ({"parts": ()}, ValueError, "at least one"),
        ({"parts": ("weights",)}, ValueError, "weights"),
        ({"parts": iter(PARTS)}, ValueError, "as a tuple"),
        ({"parts": 3}, ValueError, "parts=3"),
        ({"parts": [["kv_cache"]]}, ValueError, "as a tuple"),
        ({"level": 1.0}, ValueError, r"level=1\.0"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
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


def test_what_is_no_cache() -> None:
    cache = full_cache()
    for use in (sleep, wake_up):
        with pytest.raises(TypeError, match=r"cache must be a .*, got KVPool"):
            use(cache.pool)
    with pytest.raises(TypeError, match="cannot be part of a jitted function"):
        jax.jit(lambda cache: sleep(cache).host_bytes)(cache)
    host_side = dataclasses.replace(cache, pool=jax.tree.map(np.asarray, cache.pool))
    with pytest.raises(TypeError, match="kv_cache has a ndarray"):
        sleep(host_side)
    with pytest.raises(TypeError, match="pool of the cache must be KVPool, got BlockTables"):
        sleep(KVCache(pool=cache.tables, tables=cache.pool))
    with pytest.raises(TypeError, match="cache must be a KVCache that is awake, got KVPool"):
        check_not_closed_over(cache.pool, touch, cache)
    pinned = jax.devices()[0].memory("pinned_host")
    outside = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=pinned.kind)
    asleep_already = jax.device_put(cache.pool, outside)
    with pytest.raises(ValueError, match="kv_cache has an array in pinned_host memory; leave"):
        sleep(dataclasses.replace(cache, pool=asleep_already))
    assert not asleep_already.buffers[0].is_deleted()


@pytest.mark.parametrize("fails_at", [0, 3, 9, 15])
def test_a_failure_leaves_things_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    cache = full_cache()
    kept = snapshot((cache.pool, cache.tables))
    before = _live_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(_host.jax, "device_put", _fails_at(fails_at))
        with pytest.raises(MemoryError) as failure:
            sleep(cache, chunk_bytes=SMALL_CHUNKS)
    assert_same_bytes((cache.pool, cache.tables), kept)
    assert _live_bytes() == before  # while the traceback still holds its frames
    del failure
    sleeping = sleep(cache, chunk_bytes=SMALL_CHUNKS)
    before = _live_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(_host.jax, "device_put", _fails_at(fails_at))
        with pytest.raises(MemoryError) as failure:
            wake_up(sleeping)
    assert _live_bytes() == before
    del failure
    assert sleeping.levels == dict.fromkeys(PARTS, 1)
    awake = wake_up(sleeping)
    assert_same_bytes((awake.pool, awake.tables), kept)


def _live_bytes() -> dict[str, int]:
    gc.collect()
    kinds: dict[str, int] = {}
    for array in jax.live_arrays():
        kind = array.sharding.memory_kind
        # An index sent to the device is not what is meant.
        kinds[kind] = kinds.get(kind, 0) + (array.nbytes if array.nbytes > 4 else 0)
    return kinds


def _fails_at(count: int):
    calls = iter(range(count))
    put = jax.device_put

    def device_put(*args, **options):
        if next(calls, None) is None:
            raise MemoryError("no room")
        return put(*args, **options)

    return device_put


def test_closed_over_arrays_are_found() -> None:
    """The one way to break a sleeping cache, what it does, and the guard against it."""
    cache = full_cache()
    first_id = int(cache.tables.tables[0][0, 0])

    @jax.jit
    def broken(rows):
        return cache.tables.tables[0][rows]

    rows = jnp.array([0])
    assert broken(rows)[0, 0] == first_id
    later = TOUCH(cache)
    awake = wake_up(sleep(later))
    assert awake.tables.tables[0][0, 0] == first_id + 1 and broken(rows)[0, 0] == first_id
    for state in (cache, awake):  # the very arrays, and a later state of them
        with pytest.raises(ClosedOverError, match=r"broken closes over int32.* \(as tables.tables"):
            check_not_closed_over(state, broken, rows)

    @jax.jit
    def right(tables, rows):
        return tables.tables[0][rows] + jnp.int32(3) * scalar

    scalar = jnp.int32(2)
    check_not_closed_over(awake, right, awake.tables, rows)
    check_not_closed_over(awake, lambda tables: right(tables, rows), awake.tables)


def _scan(buffer):
    return jax.lax.scan(lambda carry, _: (carry + buffer, None), buffer, None, length=2)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda buffer: lambda x: x + buffer.sum(dtype=jnp.uint8),
        lambda buffer: lambda x: jax.jit(lambda y: y + buffer[0, 0])(x),
        lambda buffer: lambda x: x + _scan(buffer)[0, 0],
        lambda buffer: lambda x: jax.lax.cond(x[0] > 0, lambda: buffer[0, 0], lambda: x[0]),
    ],
    ids=["plain", "nested", "scan", "cond"],
)
def test_closed_over_buffers_are_found_in_nested_programs(wrap) -> None:
    cache = full_cache()
    x = jnp.zeros(3, jnp.uint8)
    for step in (wrap(cache.pool.buffers[0]), jax.jit(wrap(cache.pool.buffers[0]))):
        with pytest.raises(ClosedOverError, match=r"uint8.* \(as pool.buffers\[0\]\)"):
            check_not_closed_over(cache, step, x)
    check_not_closed_over(cache, lambda x, buffer: wrap(buffer)(x), x, cache.pool.buffers[0])


def test_a_transfer_guard_has_nothing_to_object_to() -> None:
    cache = full_cache()
    kept = snapshot((cache.pool, cache.tables))
    with jax.transfer_guard("disallow"):
        awake = wake_up(sleep(cache, chunk_bytes=SMALL_CHUNKS))
    assert_same_bytes((awake.pool, awake.tables), kept)


def test_reprs_say_the_state() -> None:
    cache = full_cache()
    assert repr(cache).startswith("KVCache(KVPool(24 blocks")
    sleeping = sleep(cache, level=2, parts=("kv_cache",))
    assert repr(sleeping).startswith(
        "SleepingCache(kv_cache asleep at level 2, block_tables awake; "
    )
    assert len(repr(sleeping)) < 200
