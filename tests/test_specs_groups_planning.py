"""From layer specs to a plan: bytes by hand, group rules, capacity against brute force.

Nothing here needs an array. Lengths and pools are small, so that every figure the
planner finds by formula or bisection can be found again by trying all of them.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv.blocks import BlockManager
from jaxkv.groups import (
    Group,
    hybrid_block_size,
    make_groups,
    make_layout,
    unify_pages,
)
from jaxkv.models import layers_from_config, load_config, model_len
from jaxkv.planning import KVCacheCapacityError, Plan, longest_admitted, plan_cache
from jaxkv.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)

Layers = dict[str, LayerSpec]

MAX_LEN = 40
TERABYTE = 2**40


def full(block_size: int = 16, **changes: Any) -> FullAttentionSpec:
    fields = {"block_size": block_size, "num_kv_heads": 2, "head_size": 8} | changes
    return FullAttentionSpec(**fields)


def sliding(window: int = 6, **changes: Any) -> SlidingWindowSpec:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8} | changes
    return SlidingWindowSpec(sliding_window=window, **fields)


def chunked(chunk: int = 6, **changes: Any) -> ChunkedAttentionSpec:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8} | changes
    return ChunkedAttentionSpec(chunk_size=chunk, **fields)


def cross(**changes: Any) -> CrossAttentionSpec:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8} | changes
    return CrossAttentionSpec(**fields)


def mla(**changes: Any) -> MLASpec:
    return MLASpec(**({"block_size": 64, "head_size": 576} | changes))


def state(**changes: Any) -> StateSpec:
    fields = {"block_size": 16, "shapes": ((3, 8), (2, 4)), "dtypes": ("bf16", "f32")}
    return StateSpec(**(fields | changes))


def small_int(high: int) -> st.SearchStrategy[int]:
    return st.integers(1, high)


ATTENTION = {
    "block_size": st.sampled_from([1, 2, 3, 4, 8]),
    "num_kv_heads": st.sampled_from([1, 2, 3]),
    "head_size": st.just(4),
    "head_size_v": st.sampled_from([None, 2]),
    "dtype": st.sampled_from(["fp8", "bf16", "f32"]),
}
SPECS = st.one_of(
    st.builds(FullAttentionSpec, **ATTENTION),
    st.builds(SlidingWindowSpec, sliding_window=small_int(12), **ATTENTION),
    st.builds(ChunkedAttentionSpec, chunk_size=small_int(12), **ATTENTION),
    st.builds(CrossAttentionSpec, **ATTENTION),
    st.builds(
        MLASpec,
        block_size=st.sampled_from([2, 4, 8]),
        head_size=st.sampled_from([4, 16]),
        compress_ratio=small_int(2),
        bytes_per_token=st.none() | st.just(32),
    ),
    st.builds(
        StateSpec,
        block_size=st.sampled_from([1, 2, 4, 8]),
        shapes=st.just(((4,), (3, 4))),
        dtypes=st.sampled_from([("f32", "f32"), ("bf16", "f32")]),
        cache_mode=st.sampled_from(["none", "align", "all"]),
        speculative_blocks=st.integers(0, 2),
    ),
)
LIMITS = st.builds(Limits, max_in_flight_tokens=small_int(10), max_encoder_tokens=small_int(12))


def unpaddable(layers: Mapping[str, LayerSpec]) -> bool:
    """Whether an MLA page does not divide the largest page and may not be padded."""
    largest = max(spec.page_bytes for spec in layers.values())
    mla_pages = [s.page_bytes for s in layers.values() if isinstance(s, MLASpec)]
    return any(largest % page for page in mla_pages)


@st.composite
def model_layers(draw: st.DrawFn) -> Layers:
    """Layers of one to four kinds, interleaved, that can share one pool."""
    kinds = draw(st.lists(SPECS, min_size=1, max_size=4))
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    layers = {f"layer.{i}": spec for i, spec in enumerate(order)}
    assume(not unpaddable(layers))
    return layers


def need(groups: Sequence[Group], num_tokens: int, limits: Limits) -> int:
    return sum(group.spec.max_blocks(num_tokens, limits) for group in groups)


def live_steps(spec: LayerSpec) -> list[list[int]]:
    """The blocks that each step of a small request needs: how a layer grows."""
    steps = [(n, n + 1 + n % 3) for n in range(MAX_LEN)]
    return [list(spec.live_blocks(n, stop, encoder_tokens=9)) for n, stop in steps]


# --- bytes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        (full(), 16 * 2 * (8 + 8) * 2),
        (full(head_size_v=4, dtype="f32"), 16 * 2 * (8 + 4) * 4),
        (full(dtype="fp8_e5m2", page_bytes_padded=1000), 1000),
        (sliding(dtype="fp8"), 16 * 2 * (8 + 8) * 1),
        (chunked(dtype="int8", num_kv_heads=1), 16 * 1 * (8 + 8) * 1),
        (cross(dtype="float16"), 16 * 2 * (8 + 8) * 2),
        (mla(), 64 * 576 * 2),
        (mla(bytes_per_token=656, dtype="fp8"), 64 * 656),
        (mla(compress_ratio=4, bytes_per_token=584), 16 * 584),
        (state(), 3 * 8 * 2 + 2 * 4 * 4),
        (state(block_size=999), 3 * 8 * 2 + 2 * 4 * 4),
        (state(page_bytes_padded=4096), 4096),
    ],
)
def test_a_page_has_the_bytes_counted_by_hand(spec: LayerSpec, page_bytes: int) -> None:
    assert spec.page_bytes == page_bytes


@pytest.mark.parametrize(
    ("spec", "num_tokens", "blocks"),
    [
        (full(), 1, 1),
        (full(), 33, 3),
        (mla(), 129, 3),
        (sliding(window=7), 1000, 2),  # ceil(min(6 + 10, 1000) / 16) + 1
        (sliding(window=8), 1000, 3),
        (sliding(window=6), 16, 1),  # never more than ceil(16 / 16)
        (sliding(window=64), 1000, 6),  # ceil(73 / 16) + 1
        (chunked(chunk=6), 1000, 2),  # ceil(16 / 16) + 1: chunks start inside blocks
        (chunked(chunk=32), 1000, 3),  # ceil(42 / 16): they never do
        (chunked(chunk=32), 20, 2),
        (cross(), 1, 2),  # ceil(20 / 16) of the encoder's tokens, at any length
        (cross(), 1000, 2),
        (state(), 1000, 1),
        (state(speculative_blocks=3), 1, 4),
        (state(cache_mode="align", speculative_blocks=3), 1000, 5),
        (state(cache_mode="all", speculative_blocks=3), 33, 6),
    ],
)
def test_admission_charges_the_blocks_counted_by_hand(
    spec: LayerSpec, num_tokens: int, blocks: int
) -> None:
    limits = Limits(max_in_flight_tokens=10, max_encoder_tokens=20)
    assert spec.max_blocks(num_tokens, limits) == blocks


# --- groups and layouts -----------------------------------------------------------


@given(st.dictionaries(st.text("abc", max_size=2), SPECS, min_size=1, max_size=6))
def test_unified_pages_have_one_size_or_an_mla_page_is_refused(layers: Layers) -> None:
    if unpaddable(layers):
        with pytest.raises(ValueError, match="MLA"):
            unify_pages(layers)
        return
    unified = unify_pages(layers)
    largest = max(spec.page_bytes for spec in layers.values())
    assert list(unified) == list(layers)
    assert {spec.page_bytes for spec in unified.values()} == {largest}
    for old, new in zip(layers.values(), unified.values(), strict=True):
        scale, rest = divmod(largest, old.page_bytes)
        scales = not rest and not isinstance(old, StateSpec)
        assert new.block_size == old.block_size * (scale if scales else 1)
        changes = {"block_size": old.block_size, "page_bytes_padded": None}
        assert dataclasses.replace(new, **changes) == old


@given(model_layers())
def test_groups_are_a_partition_into_equal_growth(layers: Layers) -> None:
    groups = make_groups(layers)
    assert sorted(name for g in groups for name in g.layers) == sorted(layers)
    for group in groups:
        assert len(group.layers) == len(group.specs) > 0
        assert all(live_steps(spec) == live_steps(group.spec) for spec in group.specs)
    if len(groups) > 1:
        assert len({spec.page_bytes for g in groups for spec in g.specs}) == 1


@given(model_layers(), st.data())
def test_every_slot_holds_at_most_one_layer_of_a_group(layers: Layers, data: st.DataObject) -> None:
    here = data.draw(st.lists(st.sampled_from(list(layers)), unique=True))
    groups = make_groups(layers)
    layout = make_layout(groups, here)
    assert Counter(n for slot in layout.slots for n in slot.layers) == Counter(here)
    assert [g.spec.growth for g in layout.groups if g.specs] == [
        g.spec.growth for g in groups if set(g.layers) & set(here)
    ]
    for index, slot in enumerate(layout.slots):
        places = [layout.place_of(name) for name in slot.layers]
        assert {place.slot for place in places} == {index}
        assert len({place.group for place in places}) == len(places)
        assert all(name in groups[layout.place_of(name).group].layers for name in here)
        assert slot.page_bytes == max(place.spec.page_bytes for place in places)
    assert layout.bytes_per_block == sum(slot.page_bytes for slot in layout.slots)


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "sizes"),
    [
        (1, 3, [1, 1, 1, 1]),
        (2, 3, [2, 2, 1]),  # 3 is not less than 1.5 * 2: the smallest bucket counts
        (4, 5, [4, 5]),  # 5 is less than 1.5 * 4: the largest one does
        (20, 30, [20, 15, 15]),
        (3, 0, [3]),
    ],
)
def test_group_sizes_follow_the_smallest_bucket_or_a_close_largest(
    num_full: int, num_sliding: int, sizes: list[int]
) -> None:
    layers: Layers = {f"full.{i}": full() for i in range(num_full)}
    layers |= {f"sliding.{i}": sliding() for i in range(num_sliding)}
    assert [len(group.layers) for group in make_groups(layers)] == sizes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (full(), sliding()),
        (full(), cross()),
        (mla(), chunked(num_kv_heads=18, head_size=64)),
        (sliding(window=6), sliding(window=7)),
        (chunked(chunk=6), chunked(chunk=7)),
        (state(cache_mode="none"), state(cache_mode="align")),
        (state(cache_mode="align"), state(cache_mode="all")),
        (state(), state(speculative_blocks=1)),
    ],
)
def test_layers_that_need_different_blocks_never_share_a_group(
    one: LayerSpec, other: LayerSpec
) -> None:
    groups = make_groups({"a": one, "b": other, "c": one})
    assert {frozenset(group.layers) for group in groups} >= {frozenset("b")}


def test_a_bucket_is_dealt_out_like_cards() -> None:
    layers: Layers = {"full": full()} | {f"s{i}": sliding() for i in range(3)}
    layers["full.1"] = full()
    assert [g.layers for g in make_groups(layers)] == [
        ("full", "full.1"),
        ("s0", "s2"),
        ("s1",),
    ]


def test_equal_growth_of_different_widths_is_one_group_of_mixed_pages() -> None:
    layers: Layers = {"a": full(), "b": full(num_kv_heads=1), "c": full(dtype="fp8")}
    (group,) = make_groups(layers)
    assert [slot.page_bytes for slot in make_layout([group]).slots] == [1024, 512, 512]


@given(small_int(5000), st.sampled_from([full(block_size=3), mla(block_size=2)]))
def test_the_hybrid_block_is_the_smallest_that_holds_a_state(
    state_bytes: int, spec: FullAttentionSpec | MLASpec
) -> None:
    step = 128 if isinstance(spec, MLASpec) else 3
    sizes = range(step, 10_000, step)
    expected = next(b for b in sizes if b * spec.token_bytes >= state_bytes)
    assert hybrid_block_size(spec, state_bytes) == expected


# --- zeroing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        ({"a": full(), "b": full(dtype="fp8"), "c": full(dtype="f32")}, [False]),
        ({"a": full(), "b": sliding()}, [False, False]),
        ({"a": full(), "b": chunked(), "c": cross()}, [False] * 3),
        ({"a": full(dtype="fp8"), "b": state(dtypes=("f32", "f32"))}, [True, True]),
        ({"a": full(dtype="fp8"), "b": sliding(dtype="fp8_e5m2")}, [True, True]),
        ({"a": full(), "b": sliding(num_kv_heads=1)}, [True, True]),
        ({"a": full(), "b": sliding(head_size_v=4)}, [True, True]),
        (
            {"a": state(), "b": state(cache_mode="all"), "c": full()},
            [True, True, True],
        ),
        ({"a": state(), "b": state(cache_mode="all")}, [False, False]),
    ],
)
def test_blocks_are_zeroed_where_groups_read_the_same_bytes_differently(
    layers: Layers, flags: list[bool]
) -> None:
    assert list(make_layout(make_groups(layers)).groups_to_zero()) == flags


def test_a_group_that_overlays_nothing_on_its_worker_needs_no_zeroing_there() -> None:
    groups = make_groups({"kv": full(), "state": state()})
    assert make_layout(groups, ["kv"]).groups_to_zero() == (False, False)
    plan = plan_cache([{"kv": full()}, {"state": state()}], [2**20] * 2, max_model_len=8)
    assert plan.groups_to_zero == (False, False)


# --- capacity ---------------------------------------------------------------------


@given(model_layers(), LIMITS, st.integers(2, 60), st.integers(0, 10**6))
def test_the_pool_fills_memory_to_less_than_one_block(
    layers: Layers, limits: Limits, num_blocks: int, slack: int
) -> None:
    block_bytes = make_layout(make_groups(layers)).bytes_per_block
    memory = num_blocks * block_bytes + slack % block_bytes
    try:
        plan = plan_cache(layers, memory, max_model_len=1, fit_max_model_len=True, limits=limits)
    except KVCacheCapacityError as refusal:
        assert need(make_groups(layers), 1, limits) > num_blocks - 1
        assert (refusal.usable_blocks, refusal.longest_len) == (num_blocks - 1, 0)
        return
    assert plan.num_blocks == num_blocks
    assert plan.bytes_per_block == (block_bytes,)


@given(model_layers(), LIMITS, st.integers(0, 150), small_int(MAX_LEN))
def test_the_longest_admitted_length_is_the_longest_of_all(
    layers: Layers, limits: Limits, usable: int, max_len: int
) -> None:
    groups = make_groups(layers)
    lengths = [n for n in range(1, max_len + 1) if need(groups, n, limits) <= usable]
    longest = max(lengths, default=0)
    assert longest_admitted(groups, usable, max_len, limits) == longest
    assert lengths == list(range(1, longest + 1))


@given(model_layers(), LIMITS, st.integers(2, 150), st.booleans())
def test_a_plan_admits_its_own_length_and_refuses_by_name_what_it_cannot_hold(
    layers: Layers, limits: Limits, num_blocks: int, fit: bool
) -> None:
    def plan_with(fit_max_model_len: bool) -> Plan:
        return plan_cache(
            layers,
            TERABYTE,
            max_model_len=MAX_LEN,
            fit_max_model_len=fit_max_model_len,
            num_blocks_override=num_blocks,
            limits=limits,
        )

    groups, usable = make_groups(layers), num_blocks - 1
    longest = longest_admitted(groups, usable, MAX_LEN, limits)
    if longest < (1 if fit else MAX_LEN):
        with pytest.raises(KVCacheCapacityError, match="max_model_len") as refusal:
            plan_with(fit)
        assert refusal.value.needed_blocks == need(groups, MAX_LEN, limits) > usable
        assert refusal.value.usable_blocks == usable
        assert refusal.value.longest_len == longest
        return
    plan = plan_with(fit)
    assert plan.max_model_len == longest
    assert plan.admits(longest)
    assert plan.admission_blocks(longest) == sum(plan.blocks_per_group(longest))
    assert longest == MAX_LEN or not plan.admits(longest + 1)


@given(model_layers(), LIMITS, small_int(TERABYTE), small_int(TERABYTE))
def test_more_memory_never_shortens_the_fitted_length(
    layers: Layers, limits: Limits, one: int, other: int
) -> None:
    def fitted(memory: int) -> int:
        try:
            return plan_cache(
                layers,
                memory,
                max_model_len=10**9,
                fit_max_model_len=True,
                num_blocks_override=None,
                limits=limits,
            ).max_model_len
        except KVCacheCapacityError as refusal:
            return refusal.longest_len

    block_bytes = make_layout(make_groups(layers)).bytes_per_block
    few, many = sorted((2 * block_bytes + one % 4096, 2 * block_bytes + other % 2**20))
    assert fitted(few) <= fitted(many)


@given(st.integers(-3, 30), st.booleans())
def test_an_override_replaces_memory_and_stays_within_it_unless_allowed(
    override: int, beyond: bool
) -> None:
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


@given(model_layers(), st.lists(st.integers(2, 30), min_size=1, max_size=4), st.data())
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
    assume(longest_admitted(groups, expected - 1, 10**6, limits))
    plan = plan_cache(workers, memory, max_model_len=10**6, fit_max_model_len=True, limits=limits)
    assert plan.num_blocks == expected
    assert plan.bytes_per_block == tuple(sizes)
    assert plan.groups == groups


def test_a_worker_without_layers_has_an_empty_pool_and_limits_nobody() -> None:
    workers: list[Layers] = [{"a": full()}, {}, {"b": full()}]
    block = full().page_bytes
    plan = plan_cache(workers, [9 * block, 1, 7 * block], max_model_len=96)
    assert plan.num_blocks == 7
    assert plan.bytes_per_block == (block, 0, block)
    assert plan.layouts[1].slots == ()


def test_slots_beyond_int32_are_refused_at_plan_time() -> None:
    def plan_with(num_blocks: int, spec: LayerSpec) -> Plan:
        return plan_cache(
            {"layer": spec},
            1,
            max_model_len=1,
            num_blocks_override=num_blocks,
            override_beyond_memory=True,
        )

    assert plan_with(2**27 - 1, full()).num_blocks == 2**27 - 1
    assert plan_with(2**27 + 1, state()).num_blocks == 2**27 + 1  # state has no slots
    with pytest.raises(ValueError, match="num_blocks_override"):
        plan_with(2**27 + 1, full())


@pytest.mark.parametrize(("num_blocks", "requests"), [(13, 2), (14, 3), (16, 3), (17, 4)])
def test_a_full_step_in_flight_is_counted_once_and_not_for_each_request(
    num_blocks: int, requests: int
) -> None:
    plan = plan_cache(
        {"kv": sliding(window=8, block_size=4)},
        TERABYTE,
        max_model_len=40,
        num_blocks_override=num_blocks,
        limits=Limits(max_in_flight_tokens=16),
    )
    assert plan.admission_blocks(40) == 7  # ceil((8 - 1 + 16) / 4) + 1
    assert plan.steady_blocks(40) == 3  # ceil(8 / 4) + 1
    assert plan.requests_that_fit(40) == requests == (num_blocks - 1 - (7 - 3)) // 3


@given(model_layers(), LIMITS, st.integers(2, MAX_LEN), st.integers(0, 60), st.data())
def test_the_requests_that_fit_really_run(
    layers: Layers, limits: Limits, length: int, spare: int, data: st.DataObject
) -> None:
    num_blocks = need(make_groups(layers), length, limits) + 1 + spare
    plan = plan_cache(
        layers,
        TERABYTE,
        max_model_len=length,
        num_blocks_override=num_blocks,
        limits=limits,
    )
    count = plan.requests_that_fit(length)
    assert count >= 1
    assert plan.steady_blocks(length) <= plan.admission_blocks(length)
    run_together(plan, length, min(count, 8), data)


def run_together(plan: Plan, length: int, count: int, data: st.DataObject) -> None:
    """Requests arrive one by one: each prefills in full steps while others decode."""
    manager = BlockManager(plan, max_requests=count)
    computed: dict[int, int] = {}
    for newcomer in range(count):
        prompt = data.draw(st.just(length - 1) | st.integers(1, length - 1))
        manager.start(newcomer, encoder_tokens=plan.limits.max_encoder_tokens)
        computed[newcomer] = 0
        while computed[newcomer] < prompt:
            decode(manager, {r: n for r, n in computed.items() if r != newcomer}, length)
            start = computed[newcomer]
            stop = min(start + plan.limits.max_in_flight_tokens, prompt)
            manager.grow(newcomer, start, stop)
            computed = {r: min(n + 1, length) for r, n in computed.items()}
            computed[newcomer] = stop
        decode(manager, computed, length)
        computed = {r: min(n + 1, length) for r, n in computed.items()}
    for _ in range(length):
        decode(manager, computed, length)
        computed = {r: min(n + 1, length) for r, n in computed.items()}
    assert list(manager.requests) == list(range(count))


def decode(manager: BlockManager, computed: Mapping[int, int], length: int) -> None:
    for request, num_tokens in computed.items():
        if num_tokens < length:
            manager.grow(request, num_tokens, num_tokens + 1)


# --- what users see ---------------------------------------------------------------


@given(model_layers(), LIMITS, st.integers(0, 50))
def test_a_plan_prints_itself_in_eight_lines(layers: Layers, limits: Limits, spare: int) -> None:
    num_blocks = need(make_groups(layers), MAX_LEN, limits) + 1 + spare
    plan = plan_cache(
        layers,
        TERABYTE,
        max_model_len=MAX_LEN,
        num_blocks_override=num_blocks,
        limits=limits,
    )
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


def test_qwen3_next_has_three_groups_of_state_beside_one_of_attention() -> None:
    config = load_config("qwen3-next-80b-a3b")
    plan = plan_cache(layers_from_config(config), 141 * 10**9, max_model_len=model_len(config))
    kinds = Counter((g.spec.kind, len(g.layers), g.block_size) for g in plan.groups)
    assert kinds == {("state", 12, 544): 3, ("full", 12, 544): 1}
    assert plan.bytes_per_block == (13_369_344,)
    assert plan.max_model_len == 262_144
    assert all(plan.groups_to_zero)


# --- bad input --------------------------------------------------------------------


def plan_one(memory_bytes: Any = 2**20, **changes: Any) -> Plan:
    options: dict[str, Any] = {"layers": {"kv": full()}, "max_model_len": 8} | changes
    return plan_cache(memory_bytes=memory_bytes, **options)


def config_with(**changes: Any) -> dict[str, Any]:
    return load_config("qwen3-next-80b-a3b") | changes


def config_without(name: str) -> dict[str, Any]:
    config = load_config("qwen3-next-80b-a3b")
    del config[name]
    return config


QWEN_FIELDS = [
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_hidden_layers",
    "full_attention_interval",
]
BAD_INPUTS: list[tuple[str, Callable[[], object]]] = [
    # specs
    ("block_size", lambda: full(block_size=0)),
    ("block_size", lambda: state(block_size=16.0)),
    ("block_size", lambda: mla(block_size=6, compress_ratio=4)),
    ("num_kv_heads", lambda: full(num_kv_heads=0)),
    ("num_kv_heads", lambda: sliding(num_kv_heads=True)),
    ("head_size", lambda: cross(head_size=-1)),
    ("head_size", lambda: mla(head_size=None)),
    ("head_size_v", lambda: full(head_size_v=0)),
    ("dtype", lambda: full(dtype="float64")),
    ("dtype", lambda: mla(dtype=2)),
    ("page_bytes_padded", lambda: full(page_bytes_padded=1023)),
    ("page_bytes_padded", lambda: full(page_bytes_padded="2048")),
    ("page_bytes_padded", lambda: state(page_bytes_padded=4096.0)),
    ("sliding_window", lambda: sliding(window=0)),
    ("chunk_size", lambda: chunked(chunk=0)),
    ("bytes_per_token", lambda: mla(bytes_per_token=0)),
    ("compress_ratio", lambda: mla(compress_ratio=0)),
    ("shapes", lambda: state(shapes=((3, 8),))),
    ("shapes", lambda: state(shapes=(), dtypes=())),
    ("shapes", lambda: state(shapes=((3, 0), (2, 4)))),
    ("shapes", lambda: state(shapes=(3, 4))),
    ("dtypes", lambda: state(dtypes=("bf16", "f64"))),
    ("cache_mode", lambda: state(cache_mode="some")),
    ("speculative_blocks", lambda: state(speculative_blocks=-1)),
    ("speculative_blocks", lambda: state(speculative_blocks=1.5)),
    ("max_in_flight_tokens", lambda: Limits(max_in_flight_tokens=0)),
    ("max_encoder_tokens", lambda: Limits(max_encoder_tokens=-1)),
    ("max_encoder_tokens", lambda: Limits(max_encoder_tokens="1500")),
    ("max_encoder_tokens", lambda: Limits(max_encoder_tokens=1.5)),
    # groups
    ("layers", lambda: unify_pages({})),
    ("layers", lambda: unify_pages({"a": mla(), "b": full(num_kv_heads=999)})),
    ("layers", lambda: make_layout(make_groups({"a": full()}), ["b"])),
    ("layer", lambda: make_layout(make_groups({"a": full()})).place_of("b")),
    ("state_page_bytes", lambda: hybrid_block_size(full(), 0)),
    # planning
    ("layers", lambda: plan_one(layers={})),
    ("layers", lambda: plan_one([1, 1], layers=[{}, {}])),
    ("layers", lambda: plan_one([10**6] * 2, layers=[{"a": full()}, {"a": sliding()}])),
    ("memory_bytes", lambda: plan_one(0)),
    ("memory_bytes", lambda: plan_one(-1)),
    ("memory_bytes", lambda: plan_one(True)),
    ("memory_bytes", lambda: plan_one(80e9)),
    ("memory_bytes", lambda: plan_one([80e9])),
    ("memory_bytes", lambda: plan_one([10**6, 10**6])),
    ("memory_bytes", lambda: plan_one(2 * full().page_bytes - 1)),
    ("max_model_len", lambda: plan_one(max_model_len=0)),
    ("max_model_len", lambda: plan_one(max_model_len="8")),
    ("max_model_len", lambda: plan_one(2 * full().page_bytes, max_model_len=17)),
    ("num_blocks_override", lambda: plan_one(num_blocks_override=0)),
    ("num_blocks_override", lambda: plan_one(num_blocks_override=1)),
    ("num_blocks_override", lambda: plan_one(num_blocks_override=2.0)),
    ("num_blocks_override", lambda: plan_one(num_blocks_override=2**40)),
    (
        "plan.layouts",
        lambda: plan_one([10**6] * 2, layers=[{"a": full()}, {"b": full()}]).layout,
    ),
    # models
    ("config", lambda: load_config("no-such-model")),
    ("config", lambda: load_config(os.devnull)),
    ("model_type", lambda: layers_from_config({})),
    ("model_type", lambda: layers_from_config(config_with(model_type="llama"))),
    ("block_size", lambda: layers_from_config(config_with(), block_size=0)),
    ("kv_dtype", lambda: layers_from_config(config_with(), kv_dtype="fp4")),
    ("max_position_embeddings", lambda: model_len({})),
    ("sliding_window", lambda: layers_from_config(config_with(sliding_window=4096))),
    (
        "layer_types",
        lambda: layers_from_config(config_with(layer_types=["mamba"] * 48)),
    ),
    ("layer_types", lambda: layers_from_config(config_with(layer_types=["mamba"]))),
    ("torch_dtype", lambda: layers_from_config(config_without("torch_dtype"))),
    *[(name, lambda name=name: layers_from_config(config_without(name))) for name in QWEN_FIELDS],
    *[
        (name, lambda name=name: layers_from_config(config_with(**{name: "4"})))
        for name in QWEN_FIELDS
    ],
]


@pytest.mark.parametrize(
    ("argument", "call"),
    BAD_INPUTS,
    ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD_INPUTS)],
)
def test_bad_input_is_refused_by_the_name_of_the_argument(
    argument: str, call: Callable[[], object]
) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b"):
        call()
