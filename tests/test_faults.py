"""Faults that hostile tests once found, and what they tried: none may come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import (
    BlockManager,
    FullAttentionSpec,
    Limits,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
    StepShape,
    TableEntry,
)
from jaxkv._src.cache import CacheFlags
from tests.helpers import as_ids, hybrid_plan
from tests.layer_examples import plan_of

KV = {"num_kv_heads": 1, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, **KV)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5, **KV)
INT32_MAX = 2**31 - 1
LIMITS = Limits(max_in_flight_tokens=8)


def state(mode: str, block_size: int = 4) -> StateSpec:
    return StateSpec(block_size=block_size, shapes=((2,),), dtypes=("f32",), cache_mode=mode)


def manager_of(layers, num_blocks: int = 40, requests: int = 3, forks: int = 0, **options):
    plan = plan_of(layers, num_blocks, 24, limits=LIMITS, **options)
    shape = StepShape.for_plan(plan, max_requests=requests, max_tokens=8, forks=forks)
    return plan, BlockManager(plan, max_requests=requests), shape


def free_ids(manager: BlockManager) -> list[int]:
    """The free blocks, each of them allocated once."""
    return manager.block_pool.allocate(manager.num_free_blocks).tolist()


# --- the manager ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_numbers_of_numpy_count_tokens_as_ints_do(dtype: str) -> None:
    uploads = []
    for number in (int, np.dtype(dtype).type):
        _, manager, shape = manager_of({"a": FULL, "w": WINDOW})
        manager.start("r")
        uploads += [manager.step(shape, {"r": number(count)}).data for count in (5, 1, 8)]
    np.testing.assert_array_equal(uploads[:3], uploads[3:])


def test_work_that_is_changed_in_place_is_read_anew() -> None:
    _, manager, shape = manager_of({"a": FULL, "w": WINDOW})
    for name in ("r", "s"):
        manager.start(name)
    work = {"r": 1, "s": 2}
    manager.step(shape, work)
    work["r"] = 2
    manager.grow(work)
    del work["s"]
    manager.step(shape, work)
    assert manager.computed_tokens == {"r": 3, "s": 2}


def test_a_name_that_does_not_equal_itself_runs_like_any_other() -> None:
    plan, manager, shape = manager_of({"a": FULL})
    name = float("nan")
    manager.start(name)
    manager.step(shape, {name: 5})
    assert manager.num_computed_tokens(name) == 5
    with pytest.raises(ValueError, match="request=nan is not running"):
        manager.step(shape, {float("nan"): 1})
    manager.finish(name)
    assert manager.num_free_blocks == plan.usable_blocks


# --- the device -----------------------------------------------------------------------


def test_numbers_of_uploads_begin_anew_after_the_last_of_int32() -> None:
    plan, manager, shape = manager_of({"a": FULL})
    manager.start("r")
    manager._steps.num_uploads = INT32_MAX - 2
    uploads = [manager.step(shape, {"r": 1}) for _ in range(4)]
    assert [int(upload.data[0]) for upload in uploads] == [INT32_MAX - 1, INT32_MAX, 1, 2]
    step = jax.jit(jaxkv.apply_step)
    cache = jaxkv.make_cache(plan, max_requests=3)
    for order, flag in (
        ((0, 1, 2, 3), 0),
        ((0, 1, 3), CacheFlags.LOST_UPLOAD),
        ((0, 1, 2, 2), CacheFlags.REPEATED_UPLOAD),
        ((0, 1, 1), CacheFlags.LOST_UPLOAD),
    ):
        after = jax.tree.map(jnp.copy, cache)
        object.__setattr__(after, "status", as_ids([0, INT32_MAX - 2]))
        for index in order:
            after, _ = step(after, uploads[index])
        assert int(after.error_flags) == flag, order


def test_requests_may_be_as_long_as_int32_counts_and_no_longer() -> None:
    layers = {"w": SlidingWindowSpec(block_size=2**12, sliding_window=64, **KV)}
    plan = plan_of(layers, 20, INT32_MAX, limits=LIMITS)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=8)
    upload = jaxkv.pack_step(
        shape,
        entries=[TableEntry(0, [[7]], starts=[2**19 - 1])],
        rows=[0],
        num_computed_tokens=[INT32_MAX - 8],
        num_new_tokens=[8],
    )

    @jax.jit
    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return cache, batch.positions, batch.first_positions("w"), batch.slot_mapping("w")

    cache, positions, firsts, slots = step(jaxkv.make_cache(plan, max_requests=1), upload)
    jaxkv.check_errors(cache)
    assert positions.tolist() == list(range(INT32_MAX - 8, INT32_MAX))
    assert firsts.tolist() == [INT32_MAX + 1 - 2**12]
    offsets = range(2**12 - 9, 2**12 - 1)
    assert slots.tolist() == [7 * 2**12 + offset for offset in offsets]
    for layer in (layers["w"], state("none")):
        with pytest.raises(ValueError, match="has positions beyond int32; set it to at most 2,147"):
            plan_of({"a": layer}, 20, INT32_MAX + 1, limits=LIMITS)


@pytest.mark.parametrize("max_requests", [3, 5])
def test_a_state_of_one_request_is_not_taken_for_those_of_all(max_requests) -> None:
    """All of the step, which may be fewer than the cache has room for."""
    plan, _, _ = manager_of({"s": state("none")})
    shape = StepShape.for_plan(plan, max_requests=max_requests, batch_size=3, max_tokens=8)
    cache = jaxkv.make_cache(plan, max_requests=max_requests)

    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        right = as_ids([0] * 3)
        (read,) = jaxkv.read_state(cache, "s", batch, at=right)
        jaxkv.write_state(cache, "s", batch, [read], at=right)
        for at, error, message in (
            (as_ids([0]), ValueError, r"at has shape \(1,\); wants \(3,\), one block per request"),
            (np.int32(0), ValueError, r"at has shape \(\)"),
            (as_ids([0] * 5), ValueError, r"at has shape \(5,\); wants \(3,\)"),
            (np.array([2**32] * 3), TypeError, "at must be an array of int32, got int64"),
        ):
            with pytest.raises(error, match=message):
                jaxkv.read_state(cache, "s", batch, at=at)
            with pytest.raises(error, match=message):
                jaxkv.write_state(cache, "s", batch, [read], at=at)

    jax.eval_shape(step, cache, shape.idle())


def test_every_function_of_a_step_runs_in_the_strictest_modes_of_jax() -> None:
    layers = {
        "full": FullAttentionSpec(block_size=1, dtype="fp8_e4m3", **KV),
        "latent": MLASpec(block_size=4, head_size=8),
        "state": state("align"),
    }
    plan, manager, shape = manager_of(layers, requests=1)
    queries = {"full": np.ones((8, 2, 4), np.float32), "latent": np.ones((8, 2, 8), np.float32)}

    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        keys = queries["full"][:, :1]
        cache, one = jaxkv.attend(cache, "full", batch, queries["full"], keys, keys, soft_cap=9.0)
        rows = queries["latent"][:, 0]
        cache, two = jaxkv.attend(cache, "latent", batch, queries["latent"], rows)
        (found,) = jaxkv.read_state(cache, "state", batch)
        cache = jaxkv.write_state(cache, "state", batch, [found + 1])
        read = jaxkv.read_tokens(cache, "full", batch), jaxkv.read_rows(cache, "latent", batch)
        ints = batch.kernel_block_tables("full"), batch.slot_mapping("latent"), batch.last_tokens
        return cache, (one, two, found, *read), ints

    manager.start("r")
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        cache = jaxkv.make_cache(plan, max_requests=1, scales=(1.0, 1.0))
        cache = jaxkv.set_scales(cache, {"full": (2.0, 0.5)})
        step = jax.jit(step, donate_argnums=0)
        for count in (3, 1):
            cache, floats, ints = step(cache, manager.step(shape, {"r": count}))
        assert {array.dtype for array in jax.tree.leaves(ints)} == {jnp.dtype("int32")}
        floats = jax.tree.map(lambda x: np.asarray(x, np.float32), floats)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(floats))
        np.testing.assert_allclose(floats[0][:1], 1.0)
        np.testing.assert_array_equal(floats[2], 1.0)
        jaxkv.check_errors(cache)


def test_one_row_one_token_a_step_and_blocks_of_one_token_are_enough() -> None:
    layers = {"a": FullAttentionSpec(block_size=1, **KV), "s": state("all", 1)}
    plan = plan_of(layers, 17, 8, limits=Limits(max_in_flight_tokens=1))
    manager = BlockManager(plan, max_requests=1)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=1)
    cache = jaxkv.make_cache(plan, max_requests=1)

    @jax.jit
    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return cache, batch.positions, batch.slot_mapping("a")

    for request in range(3):
        manager.start(request)
        for position in range(8):
            cache, positions, slots = step(cache, manager.step(shape, {request: 1}))
            assert positions.tolist() == [position]
            assert slots.tolist() == [manager.block_ids(request)[0][position]]
        assert manager.num_free_blocks == 0
        with pytest.raises(
            ValueError, match="would have 9 tokens, more than the plan's max_model_"
        ):
            manager.step(shape, {request: 1})
        manager.finish(request)
    jaxkv.check_errors(cache)


def test_a_manager_of_ten_thousand_requests_gives_everything_back() -> None:
    plan = hybrid_plan(num_blocks=150_000)
    manager = BlockManager(plan, max_requests=10_000)
    shape = StepShape.for_plan(plan, max_requests=10_000, max_tokens=40_000)
    names = range(10_000)
    for name in names:
        manager.start(name)
    manager.step(shape, dict.fromkeys(names, 4))
    for _ in range(8):
        manager.step(shape, dict.fromkeys(names, 1))
    assert len({i for name in names for row in manager.block_ids(name) for i in row if i}) == sum(
        manager.allocated_blocks()
    )
    for name in names:
        manager.finish(name)
    assert manager.num_free_blocks == plan.usable_blocks
    assert len(set(free_ids(manager))) == plan.usable_blocks


def test_names_are_told_apart_by_what_they_are() -> None:
    """NumPy compares a number with a tuple element by element, so equality says little."""
    _, manager, shape = manager_of({"a": FULL, "s": state("align")})
    names = [np.int64(1), (1,), (1, 2)]
    for name in names:
        manager.start(name)
    for count, name in enumerate(names, 1):
        manager.step(shape, {name: count})
    assert list(manager.computed_tokens.values()) == [1, 2, 3]


def test_what_grew_and_is_not_in_the_step_takes_no_room_in_it() -> None:
    plan, manager, shape = manager_of({"a": FULL, "w": WINDOW}, forks=1)
    small = StepShape.for_plan(plan, max_requests=3, batch_size=1, max_tokens=1)
    for name in "ab":
        manager.start(name)
    manager.grow({"a": 8})
    manager.step(small, {"b": 1})
    parts = manager.step(small, {"a": 1}).parts()  # the blocks of one token of eight
    assert parts["entry_ids"].size == 2 and parts["row_lengths"].tolist() == [[1, 1]]
    assert manager.step(shape, {"a": 7}).parts()["entry_ids"].size == 2
    manager.fork("a", ["f"], num_tokens=8)
    assert manager.unsynced_tokens_by_row.tolist() == [0, 0, 8]
    manager.step(small, {"b": 1})
    with pytest.raises(ValueError, match=r"block_ids=.*cached_tokens="):
        manager.step(small, {"f": 1})
    assert manager.step(shape, {"f": 1}).parts()["entry_ids"].size == 5
    assert not manager.unsynced_tokens_by_row.any()


def test_calls_that_overlap_are_refused() -> None:
    _, manager, shape = manager_of({"a": FULL})
    manager.start("r")

    class Ring:
        def __init__(self, call: str):
            self.call = call

        def buffer(self, shape: StepShape) -> np.ndarray:
            getattr(manager, self.call)()  # refused before its arguments are missed
            raise AssertionError(f"{self.call} was not refused")

        def flush(self) -> None: ...

    calls = [
        "start",
        "fork",
        "finish",
        "swap_out",
        "swap_in",
        "discard_swapped",
        "trim",
        "rewind",
        "reset",
    ]
    calls += ["import_blocks", "new_epoch", "reset_prefixes", "step", "grow"]
    for call in [*calls, "take_transfers"]:
        said = f"^{call} was called during another call of the same"
        with pytest.raises(RuntimeError, match=said):
            manager.step(shape, {"r": 1}, ring=Ring(call))
    manager.step(shape, {"r": 1})


def test_tokens_of_a_prompt_can_be_taken_back_before_they_are_computed() -> None:
    _, manager, shape = manager_of({"a": FULL}, forks=1)
    manager.start("r", [1] * 12)
    manager.step(shape, {"r": 5})
    with pytest.raises(ValueError, match="num_tokens=13 is more than"):
        manager.rewind({"r": 13})
    manager.rewind({"r": 6})  # other tokens follow than those of the prompt
    assert manager.num_computed_tokens("r") == 5
    manager.step(shape, {"r": 7})
    manager.finish("r")
    assert manager.start("s", [1] * 12).num_cached_tokens == 4
