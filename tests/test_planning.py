"""Plans: capacity against brute force and against requests that run, differences from vLLM.

Lengths and pools are small, so that trying all lengths checks every figure that the planner finds
by formula or bisection.
"""

import dataclasses
import itertools
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv._src.blocks import BlockManager, OutOfBlocksError
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.text import readable
from jaxkv._src.planning import (
    KVCacheCapacityError,
    Plan,
    check_rows,
    longest_model_len,
    make_groups,
    make_layout,
    plan_cache,
)
from jaxkv._src.specs import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec, StateSpec
from jaxkv._src.uploads import StepShape
from tests.layer_examples import (
    LIMITS,
    MAX_LEN,
    MODELS,
    Layers,
    chunked,
    cross,
    full,
    mla,
    need,
    plan_of,
    sliding,
    state,
)

FULL, SLIDING, CHUNKED = full(block_size=4), sliding(block_size=4), chunked(block_size=4)
ONE = {"a": FULL}


def bytes_per_block(layers: Layers) -> int:
    return make_layout(make_groups(layers)).bytes_per_block


# --- the longest request ----------------------------------------------------------


@given(MODELS, LIMITS, st.integers(2, 60), st.integers(0, 10**6))
def test_the_pool_fills_memory_to_less_than_one_block(
    layers: Layers, limits: Limits, num_blocks: int, slack: int
) -> None:
    block_bytes = bytes_per_block(layers)
    memory = num_blocks * block_bytes + slack % block_bytes
    try:
        plan = plan_cache(layers, memory, max_model_len=1, fit_max_model_len=True, limits=limits)
    except KVCacheCapacityError as refusal:
        assert need(make_groups(layers), 1, limits) > num_blocks - 1
        assert (refusal.usable_blocks, refusal.longest_len) == (num_blocks - 1, 0)
        assert "set max_model_len" not in str(refusal)  # no length would do
        return
    assert plan.num_blocks == num_blocks
    assert plan.bytes_per_block == (block_bytes,)


@given(MODELS, LIMITS, st.integers(2, 150), st.booleans())
def test_plans_find_the_longest_request_that_fits_and_refusals_name_it(
    layers: Layers, limits: Limits, num_blocks: int, fit: bool
) -> None:
    groups, usable = make_groups(layers), num_blocks - 1
    lengths = [n for n in range(1, MAX_LEN + 1) if need(groups, n, limits) <= usable]
    longest = max(lengths, default=0)
    assert lengths == list(range(1, longest + 1))
    if longest < (1 if fit else MAX_LEN):
        with pytest.raises(KVCacheCapacityError, match="max_model_len") as refusal:
            plan_of(layers, num_blocks, MAX_LEN, fit_max_model_len=fit, limits=limits)
        assert refusal.value.needed_blocks == need(groups, MAX_LEN, limits) > usable
        assert refusal.value.usable_blocks == usable
        assert refusal.value.longest_len == longest
        named = re.findall(r"set max_model_len to at most (\d+) or raise", str(refusal.value))
        assert named == [str(longest)] * (longest > 0)
        return
    plan = plan_of(layers, num_blocks, MAX_LEN, fit_max_model_len=fit, limits=limits)
    assert plan.max_model_len == longest
    assert plan.admits(longest) and not plan.admits(longest + 1)
    assert plan.admission_blocks(longest) == sum(plan.blocks_per_group(longest))


@given(MODELS, LIMITS, st.integers(2, 60), st.integers(0, 20))
def test_more_blocks_never_shorten_the_longest_request(layers, limits, blocks, more) -> None:
    def longest(count: int) -> int:
        try:
            plan = plan_of(layers, count, 10**9, fit_max_model_len=True, limits=limits)
        except KVCacheCapacityError as refusal:
            return refusal.longest_len
        return plan.max_model_len

    assert longest(blocks) <= longest(blocks + more)


@given(st.integers(-3, 30), st.booleans())
def test_an_override_replaces_memory_and_stays_within_it_unless_allowed(
    override: int, beyond: bool
) -> None:
    """vLLM accepts an override beyond memory, and runs out of memory when it allocates."""

    def plan_with_override() -> Plan:
        return plan_cache(
            {"kv": full()},
            20 * full().page_bytes,
            max_model_len=10_000,
            fit_max_model_len=True,
            num_blocks_override=override,
            override_beyond_memory=beyond,
        )

    if override < 2 or (override > 20 and not beyond):
        with pytest.raises(ValueError, match="num_blocks_override"):
            plan_with_override()
        return
    plan = plan_with_override()
    assert (plan.num_blocks, plan.usable_blocks) == (override, override - 1)
    assert plan.max_model_len == 16 * (override - 1)


def test_no_figure_counts_the_null_block() -> None:
    """101 blocks of 4 tokens hold 400 tokens, not the 404 that vLLM prints."""
    plan = plan_cache(ONE, 101 * FULL.page_bytes, max_model_len=1000, fit_max_model_len=True)
    assert plan.num_blocks == 101 and plan.max_model_len == 400
    assert plan.tokens_that_fit(400) == 400


def test_absurd_sizes_neither_overflow_nor_hang() -> None:
    with pytest.raises(KVCacheCapacityError) as caught:
        plan_cache(ONE, 2**36, max_model_len=10**30)
    assert caught.value.longest_len == (2**36 // FULL.page_bytes - 1) * 4
    assert caught.value.needed_blocks == 10**30 // 4
    with pytest.raises(ValueError, match="beyond int32"):
        plan_cache(ONE, 2**80, max_model_len=10**30)


@pytest.mark.parametrize("fit", [False, True])
def test_a_length_beyond_int32_is_refused_unless_the_pool_shortens_it(fit: bool) -> None:
    """A window holds a request of any length, and full attention one that its blocks hold."""

    def longest(layers: Layers, wanted: int) -> int:
        limits = Limits(max_in_flight_tokens=4)
        plan = plan_of(layers, 9, wanted, fit_max_model_len=fit, limits=limits)
        return plan.max_model_len

    assert longest({"w": SLIDING}, INT32_MAX) == INT32_MAX
    for wanted in (INT32_MAX + 1, 10**30):
        with pytest.raises(ValueError, match=f"set it to at most {INT32_MAX:,}"):
            longest({"w": SLIDING}, wanted)
        with nullcontext() if fit else pytest.raises(KVCacheCapacityError):
            assert longest(ONE, wanted) == 8 * 4


def test_rows_are_as_many_as_int32_counts_their_cells() -> None:
    for layers in (ONE, ONE | {"w": SLIDING, "s": state(cache_mode="all")}):
        plan = plan_cache(layers, 2**20, max_model_len=40)
        cells = sum(-(-40 // group.block_size) + 1 for group in plan.groups)  # and a length
        check_rows(plan, INT32_MAX // cells)
        with pytest.raises(ValueError, match=f"set it to at most {INT32_MAX // cells:,}, the"):
            check_rows(plan, INT32_MAX // cells + 1)


def test_slots_beyond_int32_are_refused_at_plan_time() -> None:
    assert plan_of({"a": state()}, 2**27 + 1, 1).num_blocks == 2**27 + 1  # states have no slots
    limits = Limits(max_encoder_tokens=1)
    cases = [(spec, 2**27 - 1) for spec in (full(), sliding(), chunked(), cross())]
    for spec, most in [*cases, (full(block_size=1), 2**31 - 1), (state(), 2**31 - 1)]:
        assert plan_of({"a": spec}, most, 1, limits=limits).num_blocks == most
        with pytest.raises(ValueError, match=f"num_blocks_override to at most {most:,}"):
            plan_of({"a": spec}, most + 1, 1, limits=limits)


# --- workers ----------------------------------------------------------------------


@given(MODELS, st.lists(st.integers(2, 30), min_size=1, max_size=4), st.data())
def test_several_workers_take_the_fewest_blocks_that_any_of_them_has(
    layers: Layers, blocks: list[int], data: st.DataObject
) -> None:
    stage = st.integers(0, len(blocks) - 1)
    homes = [data.draw(stage, label=name) for name in layers]
    workers = [
        {name: spec for (name, spec), h in zip(layers.items(), homes, strict=True) if h == i}
        for i in range(len(blocks))
    ]
    model = {name: spec for worker in workers for name, spec in worker.items()}
    groups = make_groups(model)
    sizes = [make_layout(groups, tuple(w)).bytes_per_block for w in workers]
    memory = [max(1, n * size) for n, size in zip(blocks, sizes, strict=True)]
    expected = min(n for n, size in zip(blocks, sizes, strict=True) if size)
    limits = Limits(max_in_flight_tokens=1, max_encoder_tokens=1)
    assume(need(groups, 1, limits) <= expected - 1)
    plan = plan_cache(workers, memory, max_model_len=10**6, fit_max_model_len=True, limits=limits)
    longest = longest_model_len(plan.groups, plan.usable_blocks, 10**6, limits)
    assert plan.max_model_len == longest
    assert plan.num_blocks == expected
    assert plan.bytes_per_block == tuple(sizes)
    assert plan.groups == groups
    kept = [sum(spec.data_bytes for spec in group.specs) for group in groups]
    assert plan.unused_bytes_per_block == tuple(sum(sizes) - num_bytes for num_bytes in kept)


@pytest.mark.parametrize(
    "lengths",
    [
        {"max_model_len": 40},
        # What does not fit is a usual request; longer ones need not.
        {"max_model_len": 100, "fit_max_model_len": True, "request_len": 40},
    ],
)
@pytest.mark.parametrize("overrides", [{}, {"num_blocks_override": 5}])
def test_a_refusal_names_the_least_that_would_do(
    overrides: dict[str, int], lengths: dict[str, int]
) -> None:
    """Memory is that of each worker; sinks take blocks that requests do not get."""
    layers = {name: full(block_size=4, sink_tokens=6) for name in "abc"}
    workers = [{"a": layers["a"]}, {name: layers[name] for name in "bc"}]

    def planned(memory: int, **options: int) -> Plan:
        return plan_cache(workers, [memory] * 2, **lengths, **options)

    with pytest.raises(KVCacheCapacityError) as caught:
        planned(2**20 if overrides else 5 * 2 * layers["a"].page_bytes, **overrides)
    refusal = caught.value
    assert (refusal.needed_blocks, refusal.usable_blocks) == (40 // 4, 5 - 1 - 2)
    assert refusal.longest_len == 2 * 4
    (advice,) = re.findall(r"raise \S+ to at least ([\d,]+)", str(caught.value))
    least = int(advice.replace(",", ""))
    enough = [planned(2**20, num_blocks_override=least)] if overrides else [planned(least)]
    assert [plan.num_blocks for plan in enough] == [1 + 2 + 40 // 4]
    with pytest.raises(KVCacheCapacityError):
        planned(2**20, num_blocks_override=least - 1) if overrides else planned(least - 1)


def test_a_worker_without_layers_has_an_empty_pool_and_limits_no_other() -> None:
    """vLLM divides by the zero bytes that a block takes there."""
    workers: list[Layers] = [{"a": full()}, {}, {"b": full()}]
    block = full().page_bytes
    plan = plan_cache(workers, [9 * block, 1, 7 * block], max_model_len=96)
    assert plan.num_blocks == 7
    assert plan.bytes_per_block == (block, 0, block)
    assert plan.layouts[1].tensors == ()
    assert repr(plan) == f"Plan(1 groups, 7 blocks of {block:,} bytes, requests up to 96 tokens)"
    assert f"{(9 + 7) * block + 1:,} bytes" in str(plan)
    assert f"{2 * block + 1:,} left over" in str(plan)
    with pytest.raises(ValueError, match="num_blocks_override=8 is more than the 7 blocks"):
        plan_cache(workers, plan.memory_bytes, max_model_len=96, num_blocks_override=8)
    for several in ([*workers, {"c": full(), "d": full()}], [{"c": full(), "d": full()}, *workers]):
        text = str(plan_cache(several, [9 * block] * 4, max_model_len=16))
        assert f" {2 * block:,} bytes in 2 tensors" in text
    with pytest.raises(ValueError, match=r"3 workers; use plan\.layouts\[i\]"):
        _ = plan.layout


@given(MODELS, st.integers(2, 60))
def test_ranks_with_the_same_layers_are_planned_as_one(layers: Layers, num_blocks: int) -> None:
    memory = num_blocks * bytes_per_block(layers)

    def planned(workers: list[Layers], budgets: list[int]) -> Plan | None:
        options: Any = {"max_model_len": MAX_LEN, "fit_max_model_len": True}
        try:
            return plan_cache(workers, budgets, limits=Limits(max_encoder_tokens=4), **options)
        except KVCacheCapacityError:
            return None

    alone, both = planned([layers], [memory]), planned([layers] * 2, [memory] * 2)
    assert (alone is None) == (both is None)
    if alone is None or both is None:
        return
    assert (both.num_blocks, both.max_model_len) == (alone.num_blocks, alone.max_model_len)
    assert both.layouts[0] is both.layouts[1] and both.layouts[0] == alone.layout
    assert both.unused_bytes_per_block == tuple(2 * n for n in alone.unused_bytes_per_block)


# --- layers that own no cache, sinks, zeroing, context parallelism ----------------


def test_a_layer_that_shares_a_cache_reads_it_where_it_is() -> None:
    layers = {"a": FULL, "b": SharedKVSpec("a"), "encoder": EncoderOnlySpec()}
    plan = plan_cache(layers, 2**20, max_model_len=8)
    assert plan.bytes_per_block == (FULL.page_bytes,)
    assert plan.layout.placement_of("b") == plan.layout.placement_of("a")
    with pytest.raises(ValueError, match="layer='encoder'"):
        plan.layout.placement_of("encoder")
    workers = [{"a": FULL}, layers, {"a": FULL}]
    some = plan_cache(workers, [2**20] * 3, max_model_len=8).layouts
    assert [layout.shared for layout in some] == [(), (("b", "a"),), ()]
    with pytest.raises(ValueError, match=r"layers\['b'\] shares the cache of 'c'"):
        plan_cache({"a": FULL, "b": SharedKVSpec("c")}, 2**20, max_model_len=8)


def test_requests_never_get_the_blocks_of_sinks() -> None:
    plan = plan_of({"a": full(block_size=4, sink_tokens=6)}, 20, MAX_LEN)
    assert plan.reserved_blocks == 1 + 2 and plan.usable_blocks == 17
    manager = BlockManager(plan, max_requests=1)
    assert [len(ids) for ids in manager.sink_block_ids] == [2]
    assert manager.num_free_blocks == plan.usable_blocks
    with pytest.raises(KVCacheCapacityError) as refusal:
        plan_of({"a": full(block_size=4, sink_tokens=6)}, 5, MAX_LEN)
    assert refusal.value.usable_blocks == 5 - 1 - 2
    several = {"a": full(block_size=4, sink_tokens=6), "b": full(block_size=8, sink_tokens=6)}
    plan = plan_of(several, 20, MAX_LEN, grouping="packed")
    assert plan.reserved_blocks == 1 + 2 + 1
    manager = BlockManager(plan, max_requests=1)
    assert manager.num_free_blocks == plan.usable_blocks == 16


@pytest.mark.parametrize(
    ("zero_policy", "flags", "text"),
    [
        ("when_needed", (True, False, True), "yes: groups 0, 2 reuse blocks of another format ("),
        ("always", (True, True, True), 'yes: zero_policy="always"'),
        ("never", (False, False, False), 'no: zero_policy="never"'),
    ],
)
def test_the_plan_says_which_fresh_blocks_are_zeroed(zero_policy, flags, text) -> None:
    workers = [{"a": full(), "s": state()}, {"b": full()}]
    plan = plan_cache(workers, [2**20] * 2, max_model_len=8, zero_policy=zero_policy)
    assert plan.zero_policy == zero_policy
    # Group 1 has a layer on the second worker only, where it overlays nothing.
    assert plan.groups_to_zero == flags
    assert text in str(plan) and text.replace('"', "&quot;") in plan._repr_html_()
    plain = plan_cache(ONE, 2**20, max_model_len=8)
    assert plain.zero_policy == "when_needed" and plain.groups_to_zero == (False,)
    assert "no: every block keeps one meaning" in str(plain)


@given(length=st.integers(1, 200), ranks=st.integers(1, 5))
def test_context_parallel_ranks_share_the_blocks_of_a_request(length: int, ranks: int) -> None:
    plan = plan_cache(ONE, 2**24, max_model_len=200, context_parallel=ranks)
    local = -(-length // ranks)
    assert plan.admission_blocks(length) == -(-local // 4)
    assert plan.row_blocks == (plan.admission_blocks(200),)
    manager = BlockManager(plan, max_requests=1)
    manager.start("r")
    manager.grow({"r": length})
    assert manager.allocated_blocks() == (plan.admission_blocks(length),)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_longest_request_of_several_ranks_fills_the_blocks_of_every_group(ranks: int) -> None:
    layers = {"a": full(block_size=4), "b": full(block_size=8), "c": full(block_size=12)}
    for blocks in range(4, 16):
        options = {"context_parallel": ranks, "fit_max_model_len": True, "grouping": "packed"}
        plan = plan_of(layers, blocks, 10**6, **options)
        longest = plan.max_model_len
        assert plan.admission_blocks(longest) <= blocks - 1 < plan.admission_blocks(longest + 1)


@pytest.mark.parametrize(
    "spec",
    [
        *(SLIDING, CHUNKED, cross(block_size=4)),
        *(state(block_size=4, cache_mode=mode) for mode in ("none", "align", "all")),
    ],
    ids=str,
)
def test_context_parallelism_is_refused_where_groups_drop_tokens(spec: LayerSpec) -> None:
    limits = Limits(max_encoder_tokens=4)
    options: dict[str, Any] = {"max_model_len": 8, "limits": limits, "context_parallel": 2}
    for layers in ({"b": spec}, {"a": FULL, "b": spec}, {"b": spec, "a": FULL}):
        groups = rf"1 x \(1 {spec.kind} @ \d+\)"
        with pytest.raises(ValueError, match=rf"context_parallel=2 .* tokens, and {groups} do not"):
            plan_cache(layers, 2**20, **options)


def test_cross_attention_without_encoder_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limits\.max_encoder_tokens=0"):
        plan_cache({"x": cross()}, 2**20, max_model_len=8)
    limits = Limits(max_encoder_tokens=4)
    with pytest.raises(KVCacheCapacityError):
        plan_cache({"x": cross()}, cross().page_bytes, max_model_len=8, limits=limits)


# --- requests that run at once ----------------------------------------------------


def run_alone(plan: Plan, length: int, chunks: list[int]) -> None:
    """Runs one request to its end, in repeated chunks of these sizes.

    An OutOfBlocksError would mean a request that waits forever.
    """
    manager = BlockManager(plan, max_requests=1)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=max(chunks))
    manager.start("r", encoder_tokens=plan.limits.max_encoder_tokens)
    computed = 0
    for chunk in itertools.cycle(chunks):
        count = min(chunk, length - computed)
        if not count:
            return
        manager.step(shape, {"r": count})
        computed += count


def run_together(plan: Plan, length: int, prompts: list[int]) -> None:
    """Requests arrive one by one: each prefills in full steps while the others decode."""
    manager = BlockManager(plan, max_requests=len(prompts))
    in_flight = plan.limits.max_in_flight_tokens
    tokens = len(prompts) + in_flight
    shape = StepShape.for_plan(plan, max_requests=len(prompts), max_tokens=tokens)
    computed: dict[int, int] = {}

    def step(prefill: Mapping[int, int]) -> None:
        decode = {r: 1 for r, n in computed.items() if r not in prefill and n < length}
        work = decode | prefill
        manager.step(shape, work)
        for request, count in work.items():
            computed[request] += count

    for newcomer, prompt in enumerate(prompts):
        manager.start(newcomer, encoder_tokens=plan.limits.max_encoder_tokens)
        computed[newcomer] = 0
        while computed[newcomer] < prompt:
            step({newcomer: min(in_flight, prompt - computed[newcomer])})
        step({})
    for _ in range(length):
        step({})
    assert set(computed.values()) == {length} and len(manager.requests) == len(prompts)


@given(MODELS, LIMITS, st.integers(2, MAX_LEN), st.integers(0, 60), st.data())
def test_the_requests_that_fit_run_together(
    layers: Layers, limits: Limits, length: int, spare: int, data: st.DataObject
) -> None:
    num_blocks = need(make_groups(layers), length, limits) + 1 + spare
    plan = plan_of(layers, num_blocks, length, limits=limits)
    count = plan.requests_that_fit(length)
    assert count >= 1
    assert plan.steady_blocks(length) <= plan.admission_blocks(length)
    prompt = st.just(length - 1) | st.integers(1, length - 1)
    size = min(count, 8)
    run_together(plan, length, data.draw(st.lists(prompt, min_size=size, max_size=size)))


@pytest.mark.parametrize(("num_blocks", "requests"), [(13, 2), (14, 3), (16, 3), (17, 4), (36, 10)])
def test_tokens_in_flight_are_counted_once_and_not_for_each_request(
    num_blocks: int, requests: int
) -> None:
    """Charging it to every request, as vLLM does, promises 5 requests of 36 blocks."""
    limits = Limits(max_in_flight_tokens=16)
    plan = plan_of({"kv": sliding(window=8, block_size=4)}, num_blocks, 40, limits=limits)
    assert plan.admission_blocks(40) == 7  # ceil((8 - 1 + 16) / 4) + 1
    assert plan.steady_blocks(40) == 3  # ceil(8 / 4) + 1
    assert plan.requests_that_fit(40) == requests == (num_blocks - 1 - (7 - 3)) // 3
    run_together(plan, 40, [33] * requests)
    for blocks in range(1, 8):  # groupings are compared, too, that hold not even one request
        assert dataclasses.replace(plan, num_blocks=blocks).requests_that_fit(40) == 0


@given(MODELS, LIMITS, st.integers(2, 400), st.integers(1, MAX_LEN))
def test_tokens_that_fit_fill_whole_requests_and_a_shorter_one(
    layers, limits, blocks, length
) -> None:
    assume(need(make_groups(layers), length, limits) < blocks)
    plan = plan_of(layers, blocks, MAX_LEN, fit_max_model_len=True, limits=limits)
    check_tokens_that_fit(plan, length)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_that_fit_count_all_ranks(ranks: int) -> None:
    for blocks, length in itertools.product(range(12, 30), (7, 20, 40)):
        plan = plan_of(ONE, blocks, MAX_LEN, context_parallel=ranks)
        check_tokens_that_fit(plan, length)


def check_tokens_that_fit(plan: Plan, length: int) -> None:
    whole, rest = divmod(plan.tokens_that_fit(length), length)
    assert whole == plan.requests_that_fit(length) >= 1
    left = plan.usable_blocks - whole * plan.steady_blocks(length)
    assert rest == 0 or plan.admission_blocks(rest) <= left
    assert rest + 1 == length or plan.admission_blocks(rest + 1) > left


def test_a_window_as_long_as_the_request_needs_as_many_blocks_as_full_attention() -> None:
    """vLLM charges ``ceil(L / b) + 1`` = 11 blocks and refuses a pool of 10 that is enough."""
    limits = Limits(max_in_flight_tokens=8)
    plan = plan_of({"a": sliding(window=40, block_size=4)}, 11, 40, limits=limits)
    assert plan.admission_blocks(40) == 10
    run_alone(plan, 40, [8])


def test_a_chunk_that_straddles_blocks_needs_one_more() -> None:
    """vLLM charges ``ceil((c + F) / b)`` = 3 blocks, accepts, and the request hangs."""
    limits = Limits(max_in_flight_tokens=6)
    plan = plan_of({"a": CHUNKED}, 5, 60, limits=limits)
    assert plan.admission_blocks(60) == 4
    run_alone(plan, 60, [5, 6, 6])
    manager = BlockManager(plan, max_requests=1)
    manager.block_pool.allocate(1)  # leaves the three blocks that vLLM would have admitted
    manager.start("r")
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=6)
    with pytest.raises(OutOfBlocksError):
        for count in (5, 6, 6):
            manager.step(shape, {"r": count})


# --- text, pickles, bad input -----------------------------------------------------


@given(MODELS, LIMITS, st.integers(0, 50))
def test_a_plan_prints_itself_in_eight_lines(layers: Layers, limits: Limits, spare: int) -> None:
    num_blocks = need(make_groups(layers), MAX_LEN, limits) + 1 + spare
    plan = plan_of(layers, num_blocks, MAX_LEN, limits=limits)
    lines = str(plan).splitlines()
    assert len(lines) == 8
    assert all(line == line.strip() for line in lines)
    shown = (
        f"{sum(plan.bytes_per_block):,} bytes",
        f"{num_blocks:,} of which {num_blocks - 1:,} usable",
        f"{MAX_LEN} tokens",
        f"{plan.admission_blocks(MAX_LEN):,} blocks",
        f"{plan.requests_that_fit(MAX_LEN):,} run at once",
        f"{plan.steady_blocks(MAX_LEN):,} blocks",
    )
    assert [text for text in shown if text not in str(plan)] == []
    for count in (plan.admission_blocks(MAX_LEN), plan.steady_blocks(MAX_LEN)):
        num_bytes = readable(count * sum(plan.bytes_per_block))
        assert f"{count:,} blocks, {num_bytes}<" in plan._repr_html_()


# What a plan says of two workers with blocks of other sizes, sinks, and windows with padding.
IN_BOTH = {
    "groups": "1 x (3 full @ 4) + 1 x (3 sliding @ 4)",
    "zero new blocks": "yes: groups 0, 1 reuse blocks of another format (needs no action)",
}
IN_TEXT = IN_BOTH | {
    "layers": "6 with a cache",
    "block": "512 bytes in 2 tensors, 0 to 384 unused, by group",
    "longest request": "40 tokens: admission charges 15 blocks",
}
IN_HTML = IN_BOTH | {
    "workers": "2; bytes are of all together",
    "block": "768 bytes, 0 to 384 unused, by group",
    "memory": "24.75 KiB",
    "admission charges": "15 blocks, 11.25 KiB",
    "while it decodes": "13 blocks, 9,984 B",
}


@pytest.mark.parametrize(
    ("override", "left", "blocks", "run", "tokens", "usual"),
    [
        (None, "0 left over", "33 of which 30 usable", 2, 2 * 40 + 8, 3),
        (64, "23,808 too few", "64 of which 61 usable", 4, 4 * 40 + 16, 7),
    ],
)
def test_a_plan_prints_the_figures_of_all_workers(
    override, left, blocks, run, tokens, usual
) -> None:
    kept = full(block_size=4, sink_tokens=6)
    window = sliding(block_size=4, num_kv_heads=1, page_bytes_padded=kept.page_bytes)
    workers = [{"f0": kept, "w0": window}, {"f1": kept, "f2": kept, "w1": window, "w2": window}]
    options: dict[str, Any] = {"num_blocks_override": override, "override_beyond_memory": True}
    options |= {"max_model_len": 40, "request_len": 20, "limits": Limits(max_in_flight_tokens=8)}
    plan = plan_cache(workers, [33 * 256, 33 * 512], **options)
    each = "blocks each once they decode"
    both = {"blocks": blocks, "usual requests": f"20 tokens: {usual} run at once, 8 {each}"}
    if override is None:
        both["grouping"] = "rule runs 3 requests of 20 tokens at once in 2 groups; packed 3 in 2"
    assert {line[:16].strip(): line[17:] for line in str(plan).splitlines()} == IN_TEXT | both | {
        "memory": f"25,344 bytes (24.75 KiB) given, {left}",
        "such requests": f"{run} run at once, 13 {each}; {tokens} tokens in all",
    }
    _, *cells = re.findall(r">([^<>\n]+)<", plan._repr_html_())
    of_html = {"run at once": f"{run} requests", "tokens in all": str(tokens)}
    assert dict(itertools.batched(cells, 2)) == IN_HTML | both | of_html


def test_plans_and_refusals_cross_process_boundaries() -> None:
    with pytest.raises(KVCacheCapacityError) as caught:
        plan_of(ONE, 2, MAX_LEN)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.longest_len == 4
    assert again.plan == caught.value.plan
    layout = again.plan.layout
    assert layout.placement_of("a") == caught.value.plan.layout.placement_of("a")
    assert hash(layout) == hash(caught.value.plan.layout)
    assert pickle.loads(pickle.dumps(OutOfBlocksError(3, 1))).needed_blocks == 3


def plan_one(memory_bytes: Any = 2**20, **changes: Any) -> Plan:
    options: dict[str, Any] = {"layers": {"kv": full()}, "max_model_len": 8} | changes
    return plan_cache(memory_bytes=memory_bytes, **options)


BAD_INPUTS: list[tuple[str, Callable[[], object]]] = [
    ("layers", lambda: plan_one(layers={})),
    ("layers", lambda: plan_one([1, 1], layers=[{}, {}])),
    (
        "layers: workers disagree about the spec of 'a'",
        lambda: plan_one([10**6] * 2, layers=[{"a": full()}, {"a": full(dtype="f16")}]),
    ),
    ("memory_bytes", lambda: plan_one(0)),
    ("memory_bytes must", lambda: plan_one([10**6, 0], layers=[{"a": full()}] * 2)),
    ("memory_bytes has 2 entries for 1 workers", lambda: plan_one([10**6, 10**6])),
    ("memory_bytes to at least", lambda: plan_one(2 * full().page_bytes - 1)),
    ("max_model_len to at most 16 ", lambda: plan_one(2 * full().page_bytes, max_model_len=17)),
    ("request_len=9 is beyond max_model_len=8", lambda: plan_one(request_len=9)),
    ("num_blocks_override=1 leaves", lambda: plan_one(num_blocks_override=1)),
    (
        "num_blocks_override=1025 is more than the 1024 ",
        lambda: plan_one(num_blocks_override=1025),
    ),
    (
        "layers.* MLA page",
        lambda: plan_one(layers={"a": mla(), "b": full(num_kv_heads=999)}, grouping="rule"),
    ),
]


@pytest.mark.parametrize(
    ("message", "call"), BAD_INPUTS, ids=[str(i) for i in range(len(BAD_INPUTS))]
)
def test_bad_input_is_refused_by_the_name_of_the_argument(
    message: str, call: Callable[[], object]
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{message}"):
        call()


DEGENERATE: Layers = {
    "cross": cross(),
    "encoder": EncoderOnlySpec(),
    "full": full(),
    "state": StateSpec(block_size=2, shapes=((2,),), dtypes=("f32",)),
}


@pytest.mark.parametrize("names", [(), *itertools.combinations(DEGENERATE, 1)], ids=str)
@pytest.mark.parametrize("encoder_tokens", [0, 3])
@pytest.mark.parametrize("request_len", [None, 5])
@pytest.mark.parametrize("grouping", ["auto", "least_waste", "packed"])
def test_layers_without_tokens_are_planned_or_refused(
    grouping: Any, request_len: int | None, encoder_tokens: int, names: tuple[str, ...]
) -> None:
    """Also where a pipeline stage has none."""
    layers = {name: DEGENERATE[name] for name in names}
    for stages in ([layers], [layers, {}]):
        try:
            plan = plan_cache(
                stages,
                [2**20] * len(stages),
                max_model_len=10,
                request_len=request_len,
                grouping=grouping,
                limits=Limits(max_encoder_tokens=encoder_tokens),
            )
        except ValueError as error:
            assert re.search(r"layers|max_encoder_tokens=0", str(error))
        else:
            assert plan.requests_that_fit(5) >= 1 and str(plan)
