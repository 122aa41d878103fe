"""`jaxkv.testing`: strategies draw what they promise, planted bugs are found, assertions fail.

The references are tested in `tests/test_references.py`; the machine over a jaxkv without bugs is
in `tests/test_whole_cache.py`, the example for users in `tests/test_example_suite.py`.
"""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as hst
from hypothesis.stateful import run_state_machine_as_test

import jaxkv.testing
from jaxkv._src.block_tables import pack_entries
from jaxkv._src.blocks import (
    BlockManager,
    _changes,
    _manager,
    _resuming,
)
from jaxkv._src.blocks._copies import PendingCopies
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.cache import CacheError, KVCache, make_cache
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.pool import zero_blocks
from jaxkv._src.prefixes import PrefixTree, _policies
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.specs import FullAttentionSpec, Limits, SlidingWindowSpec, StateSpec
from jaxkv._src.testing.strategies import FIRST_NAN, KINDS, LIMITS
from jaxkv.testing import (
    CacheStateMachine,
    assert_in_place,
    assert_no_recompilation,
    assert_same_bytes,
    assert_unchanged,
    strategies,
)
from tests import jaxkv_state_machine as machines
from tests.helpers import ON_GPU
from tests.jaxkv_state_machine import JaxkvStateMachine
from tests.test_example_suite import ToyMachine
from tests.toy_cache import BLOCK_SIZE, ToyCache

# --- strategies -----------------------------------------------------------------------

SURE = settings(derandomize=True, database=None, deadline=None)
SOME = settings(SURE, max_examples=1000, phases=[Phase.generate])


def can_draw(sampled: hst.SearchStrategy[Any], wanted: Callable[[Any], bool]) -> bool:
    find(sampled, wanted, settings=SOME)  # raises where there is none
    return True


def smallest(sampled: hst.SearchStrategy[Any]) -> Any:
    return find(sampled, lambda value: True, settings=SURE)


@given(strategies.models(without_cache=True))
def test_every_model_has_a_plan(layers) -> None:
    plan = plan_cache(layers, 2**24, max_model_len=20, limits=LIMITS)
    assert plan.num_blocks > plan.admission_blocks(20)


def test_models_are_uniform_and_hybrid_and_shrink_to_one_layer_of_full_attention() -> None:
    for kind in KINDS:
        spec = smallest(strategies.layer_specs([kind]))
        assert spec.kind == kind and spec.block_size == 4
    (spec,) = smallest(strategies.models()).values()
    assert spec == FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
    for count, kinds in ((3, 1), (3, 3)):
        assert can_draw(
            strategies.models(min_layers=count), lambda m, n=kinds: len(set(m.values())) == n
        )
    assert can_draw(strategies.models(without_cache=True), lambda model: "shared" in model)
    for kind in KINDS:  # one token, one head
        assert can_draw(
            strategies.layer_specs([kind]),
            lambda spec: spec.block_size == 1 == getattr(spec, "num_kv_heads", 1),
        )


@settings(max_examples=50)
@given(strategies.plans(max_spare=0), hst.data())
def test_a_plan_holds_its_longest_request_and_no_more_than_it_says(plan: Plan, data) -> None:
    manager = BlockManager(plan, max_requests=1)
    manager.start("r", encoder_tokens=LIMITS.max_encoder_tokens)
    shape = machines._widest_shape(plan, 1)
    while left := plan.max_model_len - manager.num_computed_tokens("r"):
        chunk = data.draw(hst.integers(1, LIMITS.max_in_flight_tokens))
        manager.step(shape, {"r": min(chunk, left)})
    assert plan.usable_blocks == max(plan.admission_blocks(plan.max_model_len), 1)


def test_table_entries_are_in_range_unless_they_are_asked_to_be_malformed() -> None:
    sizes = {"max_requests": 4, "num_blocks": 9, "max_entries": 5, "max_block_ids": 7}

    def ids(entries):
        return [i for entry in entries for group in entry.block_ids for i in group]

    @given(strategies.table_entries(3, **sizes))
    def check(entries) -> None:
        packed = pack_entries(entries, num_groups=3, max_requests=4, max_rows=4, max_block_ids=7)
        assert packed.rows.shape == (7,) and packed.changed_rows.shape == (4,)
        assert set(ids(entries)) <= set(range(9)) and {e.row for e in entries} <= set(range(4))

    check()
    sampled = strategies.table_entries(3, **sizes, malformed=True)
    for wanted in (
        *(lambda entries, bad=bad: bad in ids(entries) for bad in (-1, 2**31 - 1, 9)),
        lambda entries: any(len(set(ids([entry]))) < len(ids([entry])) for entry in entries),
        lambda entries: len({entry.row for entry in entries}) < len(entries),
        lambda entries: any(entry.starts and any(entry.starts) for entry in entries),
    ):
        assert can_draw(sampled, wanted)
    assert smallest(sampled) == []


@given(
    strategies.layer_specs(["sliding", "chunked"], block_sizes=[8], windows=[5], kv_dtypes=["f16"]),
    strategies.models(min_layers=2, max_layers=3, max_kinds=1),
    strategies.plans(
        hst.just({"a": FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)}),
        lengths=[9],
        max_spare=0.5,
        limits=Limits(max_in_flight_tokens=5),
    ),
    strategies.table_entries(
        2, max_requests=4, num_blocks=9, max_entries=1, max_block_ids=2, max_start=1
    ),
)
def test_strategies_draw_from_what_they_are_given(spec, model, plan: Plan, entries) -> None:
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else spec.chunk_size
    assert (spec.block_size, window, spec.dtype) == (8, 5, "float16")
    assert 2 <= len(model) <= 3 and len(set(model.values())) == 1
    assert (plan.max_model_len, plan.limits) == (9, Limits(max_in_flight_tokens=5))
    assert 3 <= plan.usable_blocks <= 4
    assert len(entries) <= 1
    for entry in entries:
        assert sum(map(len, entry.block_ids)) <= 2 and len(entry.block_ids) == 2
        assert entry.starts is None or (len(entry.starts) == 2 and max(entry.starts) <= 1)


@pytest.mark.parametrize("dtype", FIRST_NAN)
def test_nan_arrays_are_nan_of_every_payload_that_the_dtype_has(dtype) -> None:
    kind = jnp.dtype(dtype)
    bits = 8 * kind.itemsize

    @given(strategies.nan_arrays((2, 3), dtype))
    def check(array) -> None:
        assert array.dtype == kind and array.shape == (2, 3)
        assert np.isnan(array.astype(np.float32)).all()

    check()
    sampled = strategies.nan_arrays((1,), dtype)
    assert can_draw(sampled, lambda array: np.signbit(array.astype(np.float32)).all())
    assert can_draw(sampled, lambda array: not np.signbit(array.astype(np.float32)).any())
    if bits < 32:  # the range that is drawn from leaves out no NaN
        every = np.arange(2**bits).astype(f"uint{bits}")
        is_nan = np.isnan(every.view(kind).astype(np.float32))
        assert (is_nan == (every & (2 ** (bits - 1) - 1) >= FIRST_NAN[dtype])).all()


# --- the state machine finds planted bugs ---------------------------------------------


def find_bug(machine: type, max_examples: int = 300) -> None:
    """Runs until the first failure, which is not shrunk; draws the same in every run.

    The seed is one by which all bugs are found soon.
    """
    options = settings(
        SURE, max_examples=max_examples, phases=[Phase.generate], report_multiple_bugs=False
    )
    run_state_machine_as_test(seed(3)(machine), settings=options)


def start_as_nan(cache: ToyCache) -> int:
    block = ToyCache.take_block(cache)
    cache.pages[block] = 0xFF
    return block


def refuse_long_requests(cache: ToyCache, request: int, computed: int, total: int) -> None:
    if total > 12:
        raise MemoryError("too long")
    ToyCache.grow(cache, request, computed, total)


def name_no_block(cache: ToyCache, request: int, computed: int, total: int) -> None:
    ToyCache.grow(cache, request, computed, total)
    cache.tables[request][-1] = len(cache.pages)


def write_one_token_too_far(cache: ToyCache, request: int, positions, rows) -> None:
    end = len(cache.tables[request]) * BLOCK_SIZE
    where = np.unique(np.minimum(positions + 1, end - 1))
    ToyCache.write(cache, request, where, rows[: len(where)])


@pytest.mark.parametrize(
    ("message", "bug"),
    [
        ("some leaked", {"finish": lambda cache, r: cache.give_back(cache.tables.pop(r)[1:])}),
        ("11 blocks are free at the start; the plan", {"make_free": lambda _, n: list(range(n))}),
        (
            "holds no block, and computing tokens",
            {"grow": lambda cache, r, computed, n: ToyCache.grow(cache, r, computed, n - 1)},
        ),
        ("holds block 11, which is not in the pool", {"grow": name_no_block}),
        ("was refused blocks (with|, and no other holds any)", {"grow": refuse_long_requests}),
        ("which the request wrote as", {"write": write_one_token_too_far}),
        ("reads as NaN, and no request wrote that", {"take_block": start_as_nan}),
        (
            "freed twice|belongs to request|something changed",
            {
                "fork": lambda cache, r, d, n: (
                    cache.tables.update({r: cache.tables[d][: -(-n // 4)]}) or True
                )
            },
        ),
        (
            "belongs to request .* two may share what a fork shares until",
            {"fork": lambda cache, r, d, n: ToyCache.fork(cache, r, d, 4 * len(cache.tables[d]))},
        ),
    ],
)
def test_bugs_of_a_cache_of_your_own_are_found(message, bug) -> None:
    kind = type("Buggy", (ToyCache,), bug)
    with pytest.raises(AssertionError, match=message):
        find_bug(type("Machine", (ToyMachine,), {"kind": kind}))


HEADS = {"block_size": 4, "num_kv_heads": 2, "head_size": 4}
FULL = FullAttentionSpec(**HEADS, dtype="fp8_e4m3")
WINDOW = SlidingWindowSpec(**HEADS, dtype="fp8_e5m2", sliding_window=6)
STATE = StateSpec(block_size=4, shapes=((2,), (2, 3)), dtypes=("bf16", "f32"), cache_mode="align")


class Machine(JaxkvStateMachine):
    """Windows, states and full attention, on common bytes of few blocks."""

    plan = plan_cache(
        {"full": FULL, "window": WINDOW, "state": STATE},
        2**30,
        max_model_len=24,
        num_blocks_override=20,
        limits=Limits(max_in_flight_tokens=8),
    )
    max_requests = 3
    unwritten_reads_zero = True


def lose(*parts: str):
    def without(run_step):
        def broken(cache, upload, rows, **options):
            data = np.array(upload.data)
            for part in parts:
                where = upload.shape.format.fields[part]
                data[where] = upload.shape.format.padding[where]
            return run_step(cache, dataclasses.replace(upload, data=data), rows, **options)

        return broken

    return without


def short(blocks_to_share):
    return lambda *arguments: [
        part._replace(end=max(part.first, part.end - 1), block_ids=part.block_ids[:-1])
        for part in blocks_to_share(*arguments)
    ]


BUGS = {  # where, and its replacement made of what was there
    "a fork shares one block too few": (_manager, "blocks_to_share", short),
    "a shared block is written": (
        _changes, "_written", lambda _: lambda *arguments: range(0)
    ),
    "the copy of a shared block starts empty": (
        PendingCopies, "add", lambda _: lambda copies, new, cell: None
    ),
    "more blocks are taken than are free": (
        _changes, "_blocks_needed", lambda _: lambda state, changes, shared: 0
    ),
    "a lost state is resumed from": (
        _resuming, "_lost_states", lambda _: lambda b, g, rows, n: np.zeros(rows.size, bool)
    ),
    "nothing is zeroed": (machines, "_step", lose("zero_ends")),
    "nothing is copied": (machines, "_step", lose("copy_ends")),
}  # fmt: skip


def without_salt(encode):
    return lambda prefixes, tokens, salt, extra_keys: encode(prefixes, tokens, None, extra_keys)


def to_the_end_of_the_block(walk):
    def broken(tree, namespace, tokens):
        path, seen = walk(tree, namespace, tokens)
        return path, min(-(-seen // 16) * 16, path[-1].end, tokens.size) if path else seen

    return broken


PREFIX_BUGS = {
    "the salt is forgotten": (Prefixes, "_encode", without_salt),
    "a state that is kept is written in place": (_policies, "WHOLE", lambda _: 1),
    "a hit is one block too long": (PromptTree, "walk", to_the_end_of_the_block),
    "an evicted block is still found": (
        PrefixTree,
        "_replace",
        lambda _: lambda tree, ids, into: 0,
    ),
}


class Prompts(Machine):
    """Large blocks, so that many prefixes end inside one, and as many states as there is room."""

    plan = plan_cache(
        {
            name: dataclasses.replace(spec, block_size=16)
            for name, spec in {"full": FULL, "state": STATE}.items()
        },
        2**30,
        max_model_len=24,
        num_blocks_override=20,
        limits=Limits(max_in_flight_tokens=8),
    )
    checkpoint_share = 1.0


class Drafts(Machine):
    """Without states, so that drafts can be rejected."""

    plan = plan_cache(
        {"full": FULL},
        2**30,
        max_model_len=24,
        num_blocks_override=20,
        limits=Limits(max_in_flight_tokens=8),
    )


@pytest.mark.parametrize("bug", PREFIX_BUGS)
def test_bugs_of_prefixes_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = PREFIX_BUGS[bug]
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    with pytest.raises(AssertionError):
        find_bug(Drafts if "drafts" in bug else Machine if "evicted" in bug else Prompts)


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_of_jaxkv_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BUGS[bug]
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    with pytest.raises((AssertionError, CacheError, ValueError, IndexError)):
        find_bug(Prompts if "kept state" in bug else Machine)


def test_without_a_bug_the_machine_finds_none() -> None:
    found: list[int] = []

    class Counting(Prompts):
        def start_prompt(self, request, tokens, salt):
            found.append(super().start_prompt(request, tokens, salt))
            return found[-1]

    find_bug(Counting, max_examples=12)
    assert sum(count > 0 for count in found) > 5 and any(count % 4 for count in found)


HELD = {1: [[1]], 2: [[2]]}


@pytest.mark.parametrize(
    ("before", "after", "message"),  # free blocks, and what requests hold
    [
        ((1, HELD), (1, HELD), None),
        ((2, HELD), (2, HELD), "was refused blocks with 2 free; it never holds more than 2"),
        ((1, HELD), (0, HELD), "something changed: free blocks: 1 -> 0"),
        ((1, HELD), (1, HELD | {1: [[3]]}), r"something changed.*request 1: \[\[1\]\] ->"),
        ((1, HELD | {1: [[0]]}), (1, HELD | {1: [[0]]}), "refused blocks, and no other holds any"),
    ],
)
def test_a_refusal_is_a_bug_unless_blocks_are_short_and_nothing_changes(
    before, after, message: str | None
) -> None:
    """Request 2 grows to two blocks."""
    now = [before]

    def refuse(machine: CacheStateMachine, *_: int) -> None:
        now[0] = after
        raise MemoryError

    methods = {
        "plan": plan_cache({"full": FULL}, 2**20, max_model_len=24),
        "out_of_blocks": MemoryError,
        "grow": refuse,
        "block_ids": lambda machine, request: now[0][1][request],
        "num_free_blocks": lambda machine: now[0][0],
    }
    machine = type("Host", (JaxkvStateMachine,), methods)()
    machine.computed = {1: 4, 2: 4}
    wanted = pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext()
    with wanted:
        assert not machine._grow(2, 8)


def test_a_prompt_that_need_not_be_computed_at_all_is_a_bug() -> None:
    methods = {"start_prompt": lambda machine, request, tokens, salt: len(tokens)}
    with pytest.raises(AssertionError, match="the last one has to be computed"):
        find_bug(type("Machine", (ToyMachine,), methods))


@pytest.mark.parametrize(
    "bad",
    [*(np.zeros(shape, np.uint8) for shape in ((9, 31), (0, 32), 32)), np.zeros((9, 32), np.int8)],
)
def test_pages_of_another_shape_are_refused_and_say_what_is_wanted(bad) -> None:
    methods = {"read_pages": lambda machine, request, layer: bad}
    with pytest.raises(ValueError, match=r"read_pages gave .*; wanted uint8\[\d, 32\]"):
        find_bug(type("Machine", (ToyMachine,), methods))


@pytest.mark.parametrize(
    "method",
    [
        *("make_cache", "start", "grow", "write", "finish"),
        *("num_free_blocks", "block_ids", "read_pages", "read_null_block"),
    ],
)
def test_a_method_that_was_not_written_is_named(method) -> None:
    unwritten = {method: getattr(CacheStateMachine, method)}
    with pytest.raises(NotImplementedError, match=method):
        find_bug(type("Machine", (ToyMachine,), unwritten))


# --- assertions -----------------------------------------------------------------------

LARGE = (512, 512)


def scattered(array: jax.Array) -> jax.Array:
    return array.at[3].set(1.0)


def large_cache() -> KVCache:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bf16")
    return make_cache(plan_cache({"a": spec, "b": spec}, 2**22, max_model_len=64), max_requests=2)


def test_what_works_in_place_passes_and_its_results_come_back() -> None:
    cache = large_cache()
    after = assert_in_place(zero_blocks, cache, jnp.array([3, 5]), jnp.array([2]))
    assert isinstance(after, KVCache) and cache.buffers[0].is_deleted()


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


@pytest.mark.skipif(ON_GPU, reason="on a GPU, NumPy never shares the memory of an array")
def test_a_buffer_that_cannot_be_reused_when_it_runs_is_found() -> None:
    array = jnp.zeros(LARGE)
    view = np.asarray(array)  # shares memory, so XLA has to copy what it would write
    with pytest.raises(AssertionError, match=r"not returned at the same address: float32\[512"):
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


def nan(payload: int) -> np.ndarray:
    return np.array([payload], np.uint16).view(jnp.dtype("bfloat16"))


def test_trees_of_the_same_bytes_pass() -> None:
    cache = large_cache()
    assert_same_bytes(cache, jax.tree.map(np.array, cache))
    assert_same_bytes({"a": [nan(0x7FC1), 3]}, {"a": [jnp.asarray(nan(0x7FC1)), 3]})
    assert_same_bytes((np.zeros((2, 0)),), (np.zeros((2, 0)),))


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
    with pytest.raises(AssertionError, match="numpy"), assert_unchanged(tree):
        tree["numpy"][1] = 2


def test_a_tree_that_is_donated_is_found() -> None:
    tree = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    with pytest.raises(AssertionError, match=r"deleted or donated: \['b'\]"):
        with assert_unchanged(tree):
            jax.jit(scattered, donate_argnums=0)(tree["b"])


# --- without the extra ----------------------------------------------------------------

WITHOUT = """
import sys
import numpy as np
import jaxkv.testing
from jaxkv.testing import ReferenceCache, ReferenceTables
with jaxkv.testing.assert_no_recompilation():
    print(jaxkv.testing.reference_zero_blocks(np.ones((2, 1)), [1]).tolist())
print([module for module in {packages} if module in sys.modules])
sys.modules.update(dict.fromkeys({packages}, None))
for name in {names}:
    for get in (getattr, lambda module, name: exec(f"from jaxkv.testing import {{name}}")):
        try:
            get(jaxkv.testing, name)
        except ImportError as error:
            print(error)
"""
NEEDED = {
    "hypothesis": ["strategies", "CacheStateMachine"],
    "chex": ["assert_in_place", "assert_same_bytes", "assert_unchanged"],
}


def test_references_work_without_the_extra_and_the_rest_says_that_it_needs_it() -> None:
    """Each of them when it is first used, so that the packages may be missing until then."""
    needed_by = [(name, package) for package, names in NEEDED.items() for name in names]
    code = WITHOUT.format(packages=list(NEEDED), names=[name for name, _ in needed_by])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    content, loaded, *lines = (done.stdout + done.stderr).decode().splitlines()
    assert (content, loaded) == ("[[1.0], [0.0]]", "[]")
    assert lines == [
        f'jaxkv.testing needs {package}, which is not installed: pip install "jaxkv[testing]"'
        for _, package in needed_by
        for _ in range(2)
    ]


def test_names_that_do_not_exist_are_attribute_errors_and_those_that_do_are_listed() -> None:
    with pytest.raises(AttributeError, match=r"'jaxkv\.testing' has no attribute 'nothing'"):
        _ = jaxkv.testing.nothing
    assert set(jaxkv.testing.__all__) <= set(dir(jaxkv.testing))
    assert all(getattr(jaxkv.testing, name) for name in jaxkv.testing.__all__)
