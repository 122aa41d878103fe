"""`jaxkv.testing`: each check fails when its property is broken, each strategy draws what it says.

The machine over jaxkv itself is in `tests/test_whole_cache.py`, the example for users in
`tests/test_example_suite.py`.
"""

import contextlib
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as hst
from hypothesis.stateful import run_state_machine_as_test

from jaxkv.block_tables import append_block_ids, make_block_tables
from jaxkv.blocks import BlockManager, OutOfBlocksError, TableEntry
from jaxkv.planning import Plan, plan_cache
from jaxkv.pool import KVPool, make_pool, zero_new_blocks
from jaxkv.specs import EncoderOnlySpec, FullAttentionSpec, MLASpec, StateSpec
from jaxkv.step import pack_entries
from jaxkv.testing import (
    ReferenceCache,
    assert_in_place,
    assert_no_recompilation,
    assert_same_bytes,
    assert_unchanged,
    count_compilations,
    place_in_row,
    strategies,
)
from jaxkv.testing.strategies import FIRST_NAN, KINDS, LIMITS
from tests.helpers import ON_GPU, hybrid_plan
from tests.test_example_suite import ToyMachine
from tests.toy_cache import BLOCK_SIZE, ToyCache

# --- the state machine finds what it says it finds --------------------------------


class Leaks(ToyCache):
    def finish(self, request):
        self.free += self.tables.pop(request)[1:]


class SharesWithoutCounting(ToyCache):
    def take_block(self):
        block = super().take_block()
        if len(self.tables) > 1 and len(self.free) % 2:
            self.free.append(block)
        return block


class HandsOutTheNullBlock(ToyCache):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.free.append(0)


class ForgetsABlock(ToyCache):
    def grow(self, request, num_tokens):
        super().grow(request, num_tokens - 1)


class NamesABlockOutOfRange(ToyCache):
    def take_block(self):
        return super().take_block() if len(self.free) > 3 else 10**6


class RefusesWithoutReason(ToyCache):
    def grow(self, request, num_tokens):
        if num_tokens > 20:
            raise MemoryError("too long")
        super().grow(request, num_tokens)


class WritesOneTokenTooFar(ToyCache):
    def write(self, request, positions, rows):
        where = np.minimum(positions + 1, len(self.tables[request]) * BLOCK_SIZE - 1)
        super().write(request, np.unique(where), rows[: len(np.unique(where))])


class StartsAsNaN(ToyCache):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.pages = self.pages.at[1:].set(jnp.nan)

    def take_block(self):
        return self.free.pop()


smallest = functools.partial(find, settings=settings(max_examples=2000, database=None))


def run(machine: type, max_examples: int = 300) -> None:
    """Until the first failure; what fails is not shrunk."""
    options = settings(
        max_examples=max_examples, phases=[Phase.generate], report_multiple_bugs=False
    )
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Leaks, "some leaked"),
        (SharesWithoutCounting, "is held by request .* and by request|freed twice"),
        (HandsOutTheNullBlock, "9 blocks are free at the start"),
        (ForgetsABlock, "holds no block, and computing tokens"),
        (NamesABlockOutOfRange, "holds block 1000000, which is not in the pool"),
        (RefusesWithoutReason, "was refused blocks, and no other holds any"),
        (WritesOneTokenTooFar, "which the request wrote as"),
        (StartsAsNaN, "reads as NaN, and no request wrote that"),
    ],
)
def test_the_machine_finds_what_is_broken(kind, message) -> None:
    with pytest.raises(AssertionError, match=message):
        run(type("Machine", (ToyMachine,), {"kind": kind}))


class CountingCache(ToyCache):
    """Counts references, so that requests can share blocks."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.owners = [0] * num_blocks

    def take_block(self):
        block = super().take_block()
        self.owners[block] = 1
        return block

    def fork(self, request, donor, num_tokens):
        self.tables[request] = self.tables[donor][: num_tokens // BLOCK_SIZE]
        for block in self.tables[request]:
            self.owners[block] += 1

    def finish(self, request):
        for block in self.tables.pop(request):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)


class ForgetsOwners(CountingCache):
    def fork(self, request, donor, num_tokens):
        self.tables[request] = self.tables[donor][: num_tokens // BLOCK_SIZE]


class SharesTheUnfinishedBlock(CountingCache):
    def fork(self, request, donor, num_tokens):
        super().fork(request, donor, len(self.tables[donor]) * BLOCK_SIZE)


class ForkingMachine(ToyMachine):
    kind = CountingCache

    def fork(self, request, donor, num_tokens):
        self.cache.fork(request, donor, num_tokens)


def test_the_machine_forks_requests_and_accepts_that_they_share() -> None:
    forks = []

    class Machine(ForkingMachine):
        def fork(self, request, donor, num_tokens):
            super().fork(request, donor, num_tokens)
            forks.append(num_tokens)

    run(Machine, max_examples=150)
    assert forks and all(length % BLOCK_SIZE == 0 for length in forks)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsOwners, "freed twice|is held by|something changed"),
        (SharesTheUnfinishedBlock, "is held by request .* and by request"),
    ],
)
def test_the_machine_finds_blocks_shared_in_the_wrong_way(kind, message) -> None:
    with pytest.raises(AssertionError, match=message):
        run(type("Machine", (ForkingMachine,), {"kind": kind}))


@pytest.mark.parametrize("bad", [np.zeros((9, 31), np.uint8), np.zeros((9, 32), np.int8)])
def test_pages_of_another_shape_are_refused_and_say_what_is_wanted(bad) -> None:
    class Machine(ToyMachine):
        def read_pages(self, request, layer):
            return bad

    with pytest.raises(ValueError, match=r"read_pages gave .*; wanted uint8\[\d, 32\]"):
        run(Machine)


@pytest.mark.parametrize(
    "method",
    [
        "make_cache",
        "start",
        "grow",
        "write",
        "finish",
        "num_free_blocks",
        "block_ids",
        "read_pages",
        "read_null_block",
    ],
)
def test_a_method_that_was_not_written_is_named(method) -> None:
    from jaxkv.testing import CacheStateMachine

    unwritten = {method: getattr(CacheStateMachine, method)}
    with pytest.raises(NotImplementedError, match=method):
        run(type("Machine", (ToyMachine,), unwritten))


# --- what requests write and where ------------------------------------------------


@given(strategies.plans(lengths=[20]), hst.lists(hst.integers(1, 4), min_size=1, max_size=5))
def test_what_requests_write_lands_within_their_rows_and_must_be_read_again(
    plan: Plan, chunks: list[int]
) -> None:
    cache = ReferenceCache(plan)
    cache.start("r")
    for computed, total in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        for _, layer, positions, rows in cache.write("r", computed, total):
            place = plan.layout.place_of(layer)
            assert computed <= positions[0] and positions[-1] < total
            for position, row in zip(positions.tolist(), rows, strict=True):
                entry, offset = place_in_row(place.spec, position)
                assert 0 <= entry < plan.row_blocks[place.group]
                assert 0 <= offset <= place.spec.data_bytes - len(row)
            if not isinstance(place.spec, StateSpec):
                numbers = rows.view(jnp.dtype(place.spec.dtype)).astype(np.float32)
                assert np.isfinite(numbers).all() and numbers.all()
        for layer, place in cache.layers.items():
            pages = cache._pages["r", layer].data
            live = place.spec.live_blocks(total, total)
            problem = functools.partial(cache.find_problem, "r", layer, live)
            assert problem(pages, unwritten_reads_zero=True) is None
            for entry in live:
                if pages[entry].any():
                    wrong = pages.copy()
                    wrong[entry] ^= 1
                    assert f"entry {entry} has" in problem(wrong, unwritten_reads_zero=False)


def test_a_state_that_somebody_reads_as_keys_is_nan() -> None:
    state = StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",))
    cache = ReferenceCache(plan_cache({"state": state}, 2**20, max_model_len=8))
    cache.start("r")
    (write,) = cache.write("r", 0, 3)
    assert list(write.positions) == [2]
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        assert np.isnan(write.rows.view(jnp.dtype(dtype)).astype(np.float32)).any()
    assert np.isfinite(write.rows.view(np.float32)).all()


def test_layers_without_rows_of_their_own_have_no_place() -> None:
    with pytest.raises(TypeError, match="stores neither tokens nor a state"):
        place_in_row(EncoderOnlySpec(), 0)
    latent = MLASpec(block_size=8, head_size=4, compress_ratio=4)
    assert place_in_row(latent, 13) == (1, 8)


# --- strategies -------------------------------------------------------------------


@given(strategies.models(without_cache=True))
def test_every_model_has_a_plan(layers) -> None:
    plan = plan_cache(layers, 2**24, max_model_len=20, limits=LIMITS)
    assert plan.num_blocks > plan.admission_blocks(20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_of_each_kind_alone(kind) -> None:
    spec = smallest(strategies.layer_specs([kind]), lambda spec: True)
    assert spec.kind == kind and spec.block_size == 4


def test_models_are_uniform_and_hybrid_and_shrink_to_one_layer_of_full_attention() -> None:
    (spec,) = smallest(strategies.models(), lambda layers: True).values()
    assert spec == FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
    smallest(strategies.models(), lambda layers: len(layers) > 2 and len(set(layers.values())) == 1)
    smallest(strategies.models(), lambda layers: len(set(layers.values())) == 3)
    smallest(strategies.models(without_cache=True), lambda layers: "shared" in layers)


@given(strategies.plans(max_spare=0), hst.data())
def test_a_plan_holds_its_longest_request_and_no_more_than_it_says(plan: Plan, data) -> None:
    manager = BlockManager(plan, max_requests=1)
    manager.start("r")
    computed = 0
    while computed < plan.max_model_len:
        chunk = data.draw(hst.integers(1, LIMITS.max_in_flight_tokens))
        total = min(computed + chunk, plan.max_model_len)
        manager.grow("r", computed, total)
        computed = total
    assert plan.usable_blocks == max(plan.admission_blocks(plan.max_model_len), 1)


@given(hst.data())
def test_traffic_is_what_a_manager_accepts(data) -> None:
    plan = data.draw(strategies.plans())
    kinds = [*strategies.EVENTS, "fork"]
    events = data.draw(strategies.traffic(plan, max_requests=3, kinds=kinds))
    manager = BlockManager(plan, max_requests=3)
    tokens: dict[int, int] = {}
    for event in events:
        if event.kind in ("start", "fork"):
            manager.start(event.request)  # a fork that computes its tokens itself
            tokens[event.request] = 0
            if event.kind == "fork":
                assert event.donor in tokens and event.donor != event.request
                assert event.tokens <= plan.max_model_len
        elif event.kind == "finish":
            manager.finish(event.request)
            del tokens[event.request]
        elif event.kind == "preempt":
            manager.finish(event.request)
            manager.start(event.request)
            tokens[event.request] = 0
        else:
            assert event.kind == "grow" or event.tokens == 1
            computed = tokens[event.request]
            with contextlib.suppress(OutOfBlocksError):
                manager.grow(event.request, computed, computed + event.tokens)
                tokens[event.request] = computed + event.tokens


@pytest.mark.parametrize("kind", [*strategies.EVENTS, "fork"])
def test_traffic_shrinks_to_nothing_and_holds_every_kind_of_event(kind) -> None:
    plan = hybrid_plan()
    assert smallest(strategies.traffic(plan), lambda events: True) == []
    kinds = [*strategies.EVENTS, "fork"]
    events = smallest(
        strategies.traffic(plan, kinds=kinds), lambda events: any(e.kind == kind for e in events)
    )
    before = {"start": 0, "fork": 2}.get(kind, 1)  # who forks has grown first
    assert [event.kind for event in events][before:] == [kind]


def test_a_traffic_s_requests_never_outgrow_the_plan() -> None:
    plan = hybrid_plan(max_model_len=9)

    @given(strategies.traffic(plan, max_events=60))
    def check(events) -> None:
        tokens: dict[int, int] = {}
        for event in events:
            restarts = event.kind in ("start", "preempt")
            tokens[event.request] = 0 if restarts else tokens[event.request] + event.tokens
            assert tokens[event.request] <= 9 and event.tokens <= 8

    check()


@given(hst.booleans(), hst.data())
def test_table_entries_fit_what_they_are_packed_into(malformed, data) -> None:
    entries = data.draw(
        strategies.table_entries(
            3, max_requests=4, pool_blocks=9, max_entries=5, max_block_ids=7, malformed=malformed
        )
    )
    packed = pack_entries(entries, num_groups=3, max_entries=5, max_block_ids=7)
    assert packed.rows.shape == (5,) and packed.block_ids.shape == (7,)
    ids = [i for entry in entries for group in entry.block_ids for i in group]
    assert malformed or all(0 <= i < 9 for i in ids)
    assert malformed or all(0 <= entry.row < 4 for entry in entries)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda entries: any(-1 in ids for e in entries for ids in e.block_ids),
        lambda entries: any(2**31 - 1 in ids for e in entries for ids in e.block_ids),
        lambda entries: any(9 in ids for e in entries for ids in e.block_ids),
        lambda entries: any(len(set(ids)) < len(ids) for e in entries for ids in e.block_ids),
        lambda entries: len({entry.row for entry in entries}) < len(entries),
        lambda entries: any(entry.row in (4, 2**31 - 1) for entry in entries),
        lambda entries: any(entry.overwrite for entry in entries),
    ],
)
def test_malformed_entries_of_every_sort_are_drawn(wanted) -> None:
    drawn = strategies.table_entries(3, max_requests=4, pool_blocks=9, malformed=True)
    assert len(smallest(drawn, wanted)) <= 2
    assert smallest(drawn, lambda entries: True) == []


@given(strategies.id_arrays(5, 4), strategies.id_arrays(5, 4, malformed=True, unique=True))
def test_id_arrays_are_int32_of_one_size(good, bad) -> None:
    assert good.dtype == bad.dtype == np.int32 and good.shape == bad.shape == (4,)
    assert ((good >= 0) & (good < 5)).all() and len(set(bad.tolist())) == 4
    assert set(bad.tolist()) <= {*range(6), *strategies.EXTREMES}


@pytest.mark.parametrize("dtype", FIRST_NAN)
def test_nan_arrays_are_nan_of_every_payload_that_the_dtype_has(dtype) -> None:
    kind = jnp.dtype(dtype)
    bits = 8 * kind.itemsize

    @given(strategies.nan_arrays((2, 3), dtype))
    def check(array) -> None:
        assert array.dtype == kind and array.shape == (2, 3)
        assert np.isnan(array.astype(np.float32)).all()

    check()
    if bits < 32:  # the range that is drawn from leaves out no NaN
        every = np.arange(2**bits).astype(f"uint{bits}")
        is_nan = np.isnan(every.view(kind).astype(np.float32))
        assert (is_nan == (every & (2 ** (bits - 1) - 1) >= FIRST_NAN[dtype])).all()


@given(strategies.poisoned_buffers([(3, 5)]))
def test_poisoned_buffers_keep_the_shapes_and_dtypes_they_are_drawn_from(buffer) -> None:
    assert buffer.shape == (3, 5)
    assert buffer.dtype in [jnp.dtype(d) for d in ("bfloat16", "float8_e4m3fn", "float32")]


def test_poisoned_buffers_hold_any_bytes() -> None:
    drawn = strategies.byte_arrays((4,), "f32")
    smallest(drawn, lambda array: np.isnan(array).any() and np.isfinite(array).any())
    assert not smallest(drawn, lambda array: True).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: strategies.layer_specs(["full", "mamba"]), r"kinds=\['full', 'mamba'\]; use"),
        (lambda: strategies.layer_specs([]), r"kinds=\[\]; use some of"),
        (lambda: strategies.nan_arrays((1,), "int8"), "dtype='int8' has no NaN; use one of"),
        (lambda: strategies.nan_arrays((1,), "f64"), "dtype='f64' is not a cache dtype"),
        (lambda: strategies.ids(0), "count must be at least 1"),
        (lambda: strategies.traffic(hybrid_plan(), kinds=["stop"]), r"kinds=\['stop'\]; use"),
    ],
)
def test_strategies_refuse_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- assertions -------------------------------------------------------------------


def large_pool() -> KVPool:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bf16")
    return make_pool(plan_cache({"a": spec, "b": spec}, 2**22, max_model_len=64))


def test_what_works_in_place_passes_and_its_results_come_back() -> None:
    pool = large_pool()
    buffers = pool.buffers
    ids = jnp.array([[3, -1, 5]], jnp.int32)
    pool = assert_in_place(zero_new_blocks, pool, ids)
    assert isinstance(pool, KVPool) and all(buffer.is_deleted() for buffer in buffers)
    tables = make_block_tables(hybrid_plan(max_model_len=24), max_requests=4096)
    entry = [TableEntry(7, [[3]] * 5)]
    entries = pack_entries(entry, num_groups=5, max_entries=2, max_block_ids=8)
    tables = assert_in_place(append_block_ids, tables, entries, max_temp_bytes=200_000)
    assert int(tables.num_blocks[0, 7]) == 1


LARGE = (512, 512)


def scattered(array: jax.Array) -> jax.Array:
    return array.at[3].set(1.0)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda a, b: (a.sum(), scattered(b)), "1 of 2 donated arrays can become an output"),
        (lambda a, b: (a[::2], scattered(b)), "1 of 2 donated arrays can become an output"),
        (lambda a, b: (a.astype(jnp.int8), scattered(b)), "of .* donated bytes are reused"),
        (lambda a, b: (jnp.cumsum(a[::-1], 1) @ a, scattered(b)), "bytes of temporary memory"),
    ],
)
def test_what_is_not_in_place_is_found(fn, message) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_in_place(fn, jnp.zeros(LARGE), jnp.zeros(LARGE), donate_argnums=(0, 1))


def test_the_bound_on_temporary_memory_is_the_caller_s() -> None:
    def sort_rows(array: jax.Array) -> jax.Array:
        return jnp.sort(array[::-1], axis=0)

    with pytest.raises(AssertionError, match="may take 10:"):
        assert_in_place(sort_rows, jnp.zeros(LARGE), max_temp_bytes=10)
    assert_in_place(scattered, jnp.zeros(LARGE), donate_argnums=0, max_temp_bytes=2**20)


@pytest.mark.skipif(ON_GPU, reason="on a GPU, NumPy never shares the memory of an array")
def test_a_buffer_that_cannot_be_reused_when_it_runs_is_found() -> None:
    array = jnp.zeros(LARGE)
    view = np.asarray(array)  # shares memory, so XLA has to copy what it would write
    with pytest.raises(AssertionError, match=r"not returned at their own place: float32\[512"):
        assert_in_place(scattered, array)
    assert not view.any()


@pytest.mark.parametrize("donate", [1, (0, 1), ()])
def test_only_arrays_of_jax_can_be_donated(donate) -> None:
    with pytest.raises(ValueError, match=r"donate_argnums=.* must name arguments made of jax"):
        assert_in_place(lambda a, b: (a, b), jnp.zeros(3), np.zeros(3), donate_argnums=donate)


def test_a_steady_state_compiles_nothing_and_a_new_shape_is_found_by_name() -> None:
    @jax.jit
    def double_it(array: jax.Array) -> jax.Array:
        return array * 2

    arrays = [jnp.zeros(n) for n in (3, 4, 5)]
    double_it(arrays[0])
    with assert_no_recompilation():
        double_it(arrays[0])
    with pytest.raises(AssertionError, match=r"1 compilation.*jit\(double_it\)"):
        with assert_no_recompilation():
            double_it(arrays[1])

    @assert_no_recompilation()
    def decorated(array: jax.Array) -> None:
        double_it(array)

    decorated(arrays[1])
    with pytest.raises(AssertionError, match="double_it"):
        decorated(arrays[2])


def test_an_error_inside_is_not_hidden_by_the_compilations_before_it() -> None:
    with pytest.raises(KeyError), assert_no_recompilation():
        jax.jit(lambda array: array + 3)(np.zeros(7))
        raise KeyError
    with pytest.raises(KeyError), assert_unchanged({"a": jnp.zeros(3)}):
        raise KeyError


def test_counts_can_be_nested_and_end_where_they_end() -> None:
    def compile_one() -> None:
        jax.jit(lambda array: array - 1)(np.zeros(3))

    with count_compilations() as outer:
        compile_one()
        with count_compilations() as inner:
            compile_one()
        compile_one()
    compile_one()
    assert (len(outer), len(inner)) == (3, 1)
    assert all("lambda" in seen.function and seen.seconds > 0 for seen in outer)


def nan(payload: int) -> np.ndarray:
    return np.array([payload], np.uint16).view(jnp.dtype("bfloat16"))


def test_trees_of_the_same_bytes_pass() -> None:
    pool = large_pool()
    assert_same_bytes(pool, jax.tree.map(np.array, pool))
    assert_same_bytes({"a": [nan(0x7FC1), 3]}, {"a": [jnp.asarray(nan(0x7FC1)), 3]})
    assert_same_bytes((), ())
    assert_same_bytes(np.zeros((2, 0)), np.zeros((2, 0)))


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (nan(0x7FC1), nan(0x7FC2), "not exactly equal"),
        (np.float32(0.0), np.float32(-0.0), "not exactly equal"),
        (np.zeros(2, np.int32), np.zeros(2, np.float32), "int32 != float32"),
        (np.zeros(2), np.zeros((1, 2)), r"\(2,\) != \(1, 2\)"),
        ([np.zeros(2)], (np.zeros(2),), "do not match"),
        ({"a": {"b": np.ones(2)}}, {"a": {"b": np.zeros(2)}}, "'a/b'"),
    ],
)
def test_trees_that_differ_in_any_byte_are_found(got, expected, message) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bytes(got, expected)


def test_a_tree_that_is_written_is_found() -> None:
    tree = {"numpy": np.zeros(8), "jax": jnp.zeros(8)}
    with assert_unchanged(tree):
        scattered(tree["jax"])
    with pytest.raises(AssertionError, match="numpy"):
        with assert_unchanged(tree):
            tree["numpy"][1] = 2


def test_a_tree_that_is_donated_is_found() -> None:
    tree = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    with pytest.raises(AssertionError, match=r"deleted or donated: \['b'\]"):
        with assert_unchanged(tree):
            jax.jit(scattered, donate_argnums=0)(tree["b"])


def test_chex_bounds_the_traces_of_a_step() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(array: jax.Array) -> jax.Array:
        return array + 1

    step(step(jnp.zeros(3)))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(jnp.zeros(4))


# --- without the extra ------------------------------------------------------------

BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({blocked}, None))
import jaxkv.testing
"""


def run_without(blocked: list[str], code: str) -> str:
    script = BLOCKED.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True)
    return done.stdout.decode() + done.stderr.decode()


def test_references_work_without_the_extra_and_import_nothing_of_it() -> None:
    code = """
import numpy as np
from jaxkv.testing import ReferenceCache, ReferenceTables, count_compilations
from jaxkv.testing import assert_no_recompilation, reference_zero_blocks
with assert_no_recompilation():
    print(reference_zero_blocks(np.ones((2, 1)), [1]).tolist())
"""
    assert run_without(["hypothesis", "chex"], code) == "[[1.0], [0.0]]\n"
    code = "print([m for m in ('hypothesis', 'chex') if m in sys.modules])"
    assert run_without([], code) == "[]\n"


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("hypothesis", ["strategies", "CacheStateMachine", "JaxkvStateMachine"]),
        ("chex", ["assert_in_place", "assert_same_bytes", "assert_unchanged"]),
    ],
)
def test_what_needs_the_extra_names_it(package, names) -> None:
    code = f"""
for name in {names}:
    for get in (getattr, lambda module, name: exec(f"from jaxkv.testing import {{name}}")):
        try:
            get(jaxkv.testing, name)
        except ImportError as error:
            print(error)
"""
    lines = run_without([package], code).splitlines()
    assert len(lines) == 2 * len(names)
    said = f'needs {package}, which is not installed: pip install "jaxkv[testing]"'
    assert all(line.startswith("jaxkv.testing.") and line.endswith(said) for line in lines)


def test_names_that_do_not_exist_are_attribute_errors_and_those_that_do_are_listed() -> None:
    import jaxkv.testing

    with pytest.raises(AttributeError, match=r"'jaxkv\.testing' has no attribute 'nothing'"):
        _ = jaxkv.testing.nothing
    assert {"strategies", "CacheStateMachine", "ReferencePool"} <= set(dir(jaxkv.testing))
    assert all(getattr(jaxkv.testing, name) for name in jaxkv.testing.__all__)
