"""A whole step on the device: what an upload says happens, in order, in place, once."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager, OutOfBlocksError
from jaxkv._src.cache import CacheError, CacheFlags, check_errors, make_cache
from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import FullAttentionSpec, StateSpec
from jaxkv._src.step import UploadRing, _ring, apply_step
from jaxkv._src.uploads import StepShape, Upload, pack_step
from jaxkv.testing import (
    assert_in_place,
    assert_no_recompilation,
    assert_same_bytes,
    count_compilations,
)
from tests.helpers import (
    IMPLEMENTATIONS,
    hybrid_plan,
    kernels_run,
    needs_mosaic,
    pointers,
    snapshot,
)

PLAN = hybrid_plan()
SHAPE = StepShape.for_plan(PLAN, max_requests=4, max_tokens=16, forks=2)
step = jax.jit(apply_step, donate_argnums=0)
slots_of = jax.jit(lambda batch: batch.slot_mapping("full.0"))


def filled(marks: dict[int, int]):
    """A cache whose every byte is 0xFF, except those of some blocks."""
    cache = make_cache(PLAN, max_requests=4)
    content = np.full(cache.buffers[0].shape, 0xFF, np.uint8)
    for block, mark in marks.items():
        content[:, block] = mark
    return dataclasses.replace(cache, buffers=(jnp.asarray(content),))


def blocks_of(cache) -> np.ndarray:
    """uint8[tensors, blocks, page]."""
    (buffer,) = cache.buffers
    return np.asarray(buffer)


def upload(**parts) -> Upload:
    groups = len(PLAN.groups)
    for name in ("zero_ids", "copies"):
        if name in parts:
            parts[name] = parts[name] + [[]] * (groups - len(parts[name]))
    return pack_step(SHAPE, **parts)


# --- in order -------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_are_copied_then_fresh_ones_are_zeroed(implementation) -> None:
    """A block may be given back, copied from once more, and zeroed for another request."""
    cache = filled({0: 0, 5: 7, 6: 9})
    with kernels_run():
        run = functools.partial(apply_step, implementation=implementation)
        run = jax.jit(run, donate_argnums=0)
        cache, _ = run(cache, upload(copies=[[(5, 6), (6, 8)]], zero_ids=[[5], [4]]))
    blocks = blocks_of(cache)
    assert (blocks[:, 6] == 7).all() and (blocks[:, 8] == 9).all(), "all at once"
    assert not blocks[:, [4, 5]].any()
    assert (blocks[:, [1, 2, 3, 7]] == 0xFF).all() and not blocks[:, 0].any()


@needs_mosaic
def test_a_gpu_saves_what_copies_overwrite_before_it_copies() -> None:
    """By a kernel of its own, without which a source that is a destination, too, is lost."""
    run = functools.partial(apply_step, implementation="mosaic_gpu")
    traced = jax.jit(run).trace(make_cache(PLAN, max_requests=4), SHAPE.idle())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3  # and one that zeroes


@pytest.mark.parametrize("stacked", [True, False])
def test_only_buffers_of_the_groups_are_zeroed_and_copied(stacked: bool) -> None:
    """Three layers of states make three tensors; the groups of attention use two of them."""
    cache = make_cache(PLAN, max_requests=4, stacked=stacked)
    full = tuple(jnp.full_like(buffer, 0xFF) for buffer in cache.buffers)
    cache = dataclasses.replace(cache, buffers=full)
    states = next(g for g, group in enumerate(PLAN.groups) if group.growth.stores == "state")
    ids = [[] for _ in PLAN.groups]
    ids[0], ids[states] = [3], [4]
    cache, _ = step(cache, upload(zero_ids=ids, copies=[]))
    tensors = [*map(np.asarray, np.asarray(cache.buffers[0]) if stacked else cache.buffers)]
    used = [tensor for tensor in range(3) if tensor in PLAN.layout.tensors_of(0)]
    assert used == [0, 1]
    for tensor, pages in enumerate(tensors):
        assert not pages[4].any()
        assert stacked or pages[3].any() == (tensor not in used)


# --- once, and for this cache ---------------------------------------------------------


def numbered(count: int = 3) -> tuple[BlockManager, list[Upload]]:
    manager = BlockManager(PLAN, max_requests=4)
    manager.start("a")
    return manager, [manager.step(SHAPE, {"a": 1}) for _ in range(count)]


@pytest.mark.parametrize(
    ("order", "flag"),
    [
        ([0, 1, 2], 0),
        ([0, 2], CacheFlags.LOST_UPLOAD),
        ([0, 1, 1], CacheFlags.REPEATED_UPLOAD),
        ([1], CacheFlags.LOST_UPLOAD),
    ],
)
def test_an_upload_that_is_lost_or_applied_twice_is_reported(order, flag) -> None:
    _, uploads = numbered()
    cache = make_cache(PLAN, max_requests=4)
    for index in order:
        cache, _ = step(cache, uploads[index])
    assert int(cache.error_flags) & (CacheFlags.LOST_UPLOAD | CacheFlags.REPEATED_UPLOAD) == flag
    if flag:
        with pytest.raises(CacheError, match="upload was"):
            check_errors(cache)


def test_an_idle_step_changes_nothing_and_is_all_padding() -> None:
    cache = make_cache(PLAN, max_requests=4)
    before = snapshot(cache)
    after, batch = step(cache, SHAPE.idle())
    assert_same_bytes(after, before)
    assert set(batch.positions.tolist()) == {-1} and set(batch.request_rows.tolist()) == {-1}
    assert not any(np.asarray(table).any() for table in batch.tables)
    check_errors(after)


def test_a_request_whose_block_never_came_is_reported() -> None:
    cache, batch = step(
        make_cache(PLAN, max_requests=4),
        upload(rows=[0], num_computed_tokens=[0], num_new_tokens=[3]),
    )
    assert int(cache.error_flags) == CacheFlags.NO_BLOCK
    assert set(slots_of(batch).tolist()) == {-1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": hybrid_plan(41)}, "num_blocks is 41 and the cache's 40"),
        ({"max_requests": 3}, "max_requests is 3 and the cache's 4"),
        ({"plan": dataclasses.replace(PLAN, context_parallel=2)}, "context_parallel is 2 and the"),
        ({"plan": hybrid_plan(kv_dtype="bf16", max_model_len=20)}, None),
        ({"plan": hybrid_plan(grouping="packed")}, "its groups take other blocks"),
    ],
)  # fmt: skip
def test_an_upload_of_another_plan_is_refused(change, message) -> None:
    options = {"plan": PLAN, "max_requests": 4} | change
    other = StepShape.for_plan(options.pop("plan"), **options, max_tokens=16)
    cache = make_cache(PLAN, max_requests=4)
    if message is None:  # shorter rows of the same blocks do no harm
        jax.eval_shape(apply_step, cache, other.idle())
        return
    with pytest.raises(ValueError, match=f"step shape was made for another plan .* {message}"):
        apply_step(cache, other.idle())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda c, u: (c, Upload(data=u.data.astype(np.int64), shape=SHAPE)), TypeError, "int32"),
        (lambda c, u: (c, Upload(data=u.data[:-1], shape=SHAPE)), ValueError, "has shape"),
    ],
)
def test_uploads_of_another_form_are_refused_by_name(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        apply_step(*arguments(make_cache(PLAN, max_requests=4), SHAPE.idle()))


# --- jax ------------------------------------------------------------------------------


def test_a_donating_step_keeps_everything_where_it_is() -> None:
    state = StateSpec(block_size=16, shapes=((16, 128),), dtypes=("f32",))
    kv = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype="fp8_e4m3")
    plan = plan_cache({"a": kv, "b": kv, "c": state}, 2**23, max_model_len=64)
    shape = StepShape.for_plan(plan, max_requests=4, max_tokens=16)
    manager = BlockManager(plan, max_requests=4)
    manager.start("a")
    cache = make_cache(plan, max_requests=4)
    assert len(jax.tree.leaves(cache)) == 3
    sent = jax.tree.map(jnp.asarray, manager.step(shape, {"a": 9}))
    with kernels_run():
        assert_in_place(apply_step, cache, sent)


def test_steps_can_be_vmapped_over_replicas_and_scanned() -> None:
    _, uploads = numbered(3)
    late = [uploads[1], SHAPE.idle(), SHAPE.idle()]
    data = np.stack([[one.data for one in steps] for steps in (uploads, late)])

    def body(cache, data):
        cache, batch = apply_step(cache, Upload(data=data, shape=SHAPE))
        return cache, batch.positions[0]

    empty = make_cache(PLAN, max_requests=4)
    replicas = jax.tree.map(lambda array: np.stack([array, array]), empty)
    scan = jax.jit(jax.vmap(functools.partial(jax.lax.scan, body)))
    replicas, positions = scan(replicas, data)
    assert positions.tolist() == [[0, 1, 2], [1, -1, -1]]
    assert replicas.status.tolist() == [[0, 3], [CacheFlags.LOST_UPLOAD | CacheFlags.NO_BLOCK, 2]]
    cache = make_cache(PLAN, max_requests=4)
    for one in uploads:
        cache, _ = step(cache, one)
    for name in ("block_tables", "row_lengths"):
        of_each = np.asarray(getattr(replicas, name))
        np.testing.assert_array_equal(of_each[0], getattr(cache, name))
        np.testing.assert_array_equal(of_each[1], getattr(empty, name))
    assert replicas._repr_html_() is None and cache.partition_specs()._repr_html_() is None


# --- a ring of uploads ----------------------------------------------------------------


def test_a_ring_carries_what_a_fresh_upload_carries() -> None:
    (one, _), (two, _) = numbered(0), numbered(0)
    ring = UploadRing(depth=2)
    for count in (1, 2, 3, 1, 1):
        fresh, ringed = one.step(SHAPE, {"a": count}), two.step(SHAPE, {"a": count}, ring=ring)
        np.testing.assert_array_equal(fresh.data, ringed.data)
        assert ringed.shape == SHAPE


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_upload_outlives_as_many_others_as_the_ring_is_deep(depth: int, jitted: bool) -> None:
    manager, _ = numbered(0)
    ring, sent = UploadRing(depth=depth), []
    for number in range(1, 16):
        with jax.disable_jit(not jitted):
            sent.append(manager.step(SHAPE, {"a": 1}, ring=ring))
        alive = sent[-depth - 1 :]
        first = number - len(alive) + 1
        assert [int(one.data[0]) for one in alive] == list(range(first, number + 1))
        assert all(one.data.is_deleted() for one in sent[: -2 * depth])


@pytest.mark.parametrize("depth", [1, 4])
def test_a_device_that_gives_two_buffers_one_memory_has_no_ring(depth: int, monkeypatch) -> None:
    made: list[jax.Array] = []

    def give_one_twice(uploads: list[jax.Array]) -> list[jax.Array]:
        made.extend(uploads)
        return [*uploads[:-1], made[0]]

    monkeypatch.setattr(_ring, "_take_back", give_one_twice)
    with pytest.raises(NotImplementedError, match="gives two buffers the same memory; call step"):
        UploadRing(depth=depth).buffer(SHAPE)


def test_a_step_refuses_an_upload_whose_buffer_was_taken_back() -> None:
    """It would read a later upload, which has the same memory."""
    manager, _ = numbered(0)
    ring = UploadRing(depth=1)
    stale, *_, last = [manager.step(SHAPE, {"a": 1}, ring=ring) for _ in range(5)]
    cache, _ = step(make_cache(PLAN, max_requests=4), last)
    for run in (step, apply_step):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            run(cache, stale)
    assert not cache.status.is_deleted()


def test_a_device_that_lags_behind_reads_every_upload_as_it_was_packed() -> None:
    manager, _ = numbered(0)
    ring, cache = UploadRing(depth=2), make_cache(PLAN, max_requests=4)
    matrix = jnp.full((256, 256), 1e-3)

    @jax.jit
    def slow(matrix):
        return jax.lax.fori_loop(0, 10, lambda _, a: jnp.tanh(a @ a), matrix)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, upload, matrix):  # cannot begin before the matrix is there
        cache, batch = apply_step(cache, upload)
        return cache, batch.positions[0] + 0 * matrix[0, 0].astype(jnp.int32)

    positions = []
    for _ in range(20):
        matrix = slow(matrix)
        cache, position = run(cache, manager.step(SHAPE, {"a": 1}, ring=ring), matrix)
        positions.append(position)
    assert [int(position) for position in positions] == list(range(20))
    check_errors(cache)


def test_a_ring_packs_the_same_memory_again_and_again() -> None:
    manager, _ = numbered(0)
    ring, places = UploadRing(depth=2), []
    for _ in range(18):
        places.append(ring.buffer(SHAPE).ctypes.data)
        assert ring.buffer(SHAPE).ctypes.data == places[-1], "an upload that came to nothing"
        step(make_cache(PLAN, max_requests=4), manager.step(SHAPE, {"a": 1}, ring=ring))
    assert len(set(places)) == 6
    assert places == places[:6] * 3


def test_a_ring_serves_many_shapes_and_compiles_each_step_once() -> None:
    shapes = [SHAPE, StepShape.for_plan(PLAN, max_requests=4, max_tokens=4)]
    manager, cache = BlockManager(PLAN, max_requests=4), make_cache(PLAN, max_requests=4)
    manager.start("a")
    ring, run = UploadRing(depth=2), jax.jit(apply_step, donate_argnums=0)
    for shape in shapes:
        cache, _ = run(cache, manager.step(shape, {"a": 1}, ring=ring))
    with assert_no_recompilation():
        for shape in shapes * 3:
            cache, _ = run(cache, manager.step(shape, {"a": 1}, ring=ring))
    assert "2 shapes, depth 2" in repr(ring)
    check_errors(cache)


OTHERS = [  # shapes of the same tokens, and of as many integers or more
    {"max_query_len": 4},
    {"reproducible": True},
    {"block_copies": SHAPE.block_copies + 2},
    {"batch_size": 2},
    {"extra": 3},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_each_shape_of_a_ring_has_buffers_of_its_own(change) -> None:
    """Uploads of one outlive those of others, whatever the two have in common."""
    ring, other = UploadRing(depth=1), dataclasses.replace(SHAPE, **change)
    kept, first = SHAPE.idle(ring), other.idle(ring)
    for _ in range(5):
        np.testing.assert_array_equal(other.idle(ring).data, other.idle().data)
    assert first.data.is_deleted() and not kept.data.is_deleted()
    np.testing.assert_array_equal(kept.data, SHAPE.idle().data)


def test_a_ring_notices_that_a_step_took_its_upload() -> None:
    manager, _ = numbered(0)
    ring = UploadRing(depth=1)
    manager.step(SHAPE, {"a": 1}, ring=ring).data.delete()
    manager.step(SHAPE, {"a": 1}, ring=ring)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="donate only the cache"):
            manager.step(SHAPE, {"a": 1}, ring=ring)
    assert manager.num_computed_tokens("a") == 2, "the step did not happen"


def test_a_ring_flushes_a_buffer_once() -> None:
    ring = UploadRing(depth=2)
    with pytest.raises(RuntimeError, match="flush was called before buffer"):
        ring.flush()
    assert SHAPE.idle(ring).data.tolist() == SHAPE.idle().data.tolist()
    small = StepShape.for_plan(PLAN, max_requests=4, max_tokens=4)
    ring.buffer(small)
    assert ring.flush().size == small.format.size, "the last buffer that was asked for"
    with pytest.raises(RuntimeError, match="flush was called before buffer"):
        ring.flush()


def test_a_failed_step_leaves_the_ring_usable() -> None:
    manager, _ = numbered(0)
    ring = UploadRing(depth=1)
    with pytest.raises(ValueError, match="extra=3"):
        manager.step(SHAPE, {"a": 1}, extra=[1, 2, 3], ring=ring)
    assert manager.step(SHAPE, {"a": 1}, ring=ring).data[0] == 1


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("entry_ids", PLAN.num_blocks, CacheFlags.BAD_BLOCK_ID),
        ("entry_logical_blocks", 99, CacheFlags.BAD_LOGICAL_BLOCK),
        ("request_rows", 4, CacheFlags.BAD_ROW),
        ("num_computed_tokens", -1, CacheFlags.BAD_BATCH),
        ("query_start_loc", 1, CacheFlags.BAD_BATCH),
        ("changed_rows", 4, CacheFlags.BAD_ROW),
    ],
)
def test_whatever_a_step_drops_is_reported(field: str, value: int, flag: int) -> None:
    """Entries, changed rows and the batch each have a check of their own."""
    _, (sent,) = numbered(1)
    data = sent.data.copy()
    data[SHAPE.format.fields[field].start] = value
    cache, _ = step(make_cache(PLAN, max_requests=4), Upload(data=data, shape=SHAPE))
    assert int(cache.error_flags) & flag


def test_a_decode_step_reports_a_request_that_is_not_at_its_token() -> None:
    """In such a step token i belongs to request i, or to none."""
    (manager, _), cache = numbered(0), make_cache(PLAN, max_requests=4)
    manager.start("b")
    shape = StepShape.for_plan(PLAN, max_requests=4, max_tokens=4, max_query_len=1)
    cache, batch = step(cache, manager.step(shape, {"a": 1, "b": 1}))
    assert not int(cache.error_flags)
    assert batch.token_requests.tolist() == [0, 1, -1, -1]
    data = manager.step(shape, {"a": 1, "b": 1}).data
    starts = shape.format.fields["query_start_loc"].start
    data[starts : starts + 4] = [0, 0, 1, 2]
    cache, batch = step(cache, Upload(data=data, shape=shape))
    assert int(cache.error_flags) == CacheFlags.BAD_BATCH
    assert set(slots_of(batch).tolist()) == {-1}


def test_random_steps_compile_nothing_and_keep_memory_flat() -> None:
    """Requests come, fork and end, in one compiled step over the same buffers."""
    rng, names = np.random.default_rng(0), itertools.count()
    manager, cache = BlockManager(PLAN, max_requests=4), make_cache(PLAN, max_requests=4)
    where, most = pointers(cache), PLAN.max_model_len

    def serve() -> None:
        nonlocal cache
        running = manager.computed_tokens
        if len(running) == 4 or (running and rng.random() < 0.2):
            manager.finish(min(running))
        elif running and rng.random() < 0.5:
            manager.fork(max(running), [next(names)])
        else:
            manager.start(next(names))
        left = {name: most - done for name, done in manager.computed_tokens.items()}
        work = {name: min(n, int(rng.integers(1, 5))) for name, n in left.items() if n}
        try:
            cache, _ = step(cache, manager.step(SHAPE, work))
        except OutOfBlocksError:
            manager.finish(min(manager.requests))

    for _ in range(5):
        serve()
    before = sum(array.nbytes for array in jax.live_arrays())
    with count_compilations() as compilations:
        for _ in range(300):
            serve()
    check_errors(cache)
    assert not compilations and pointers(cache) == where
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
