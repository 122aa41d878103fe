"""Groupings and block sizes, compared by the requests that run at once."""

import dataclasses
import itertools
import pickle
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv._src.planning import (
    Grouping,
    GroupingFigures,
    KVCacheCapacityError,
    Plan,
    make_groups,
    plan_cache,
)
from jaxkv._src.planning._choice import in_small_blocks as planned_in_small_blocks
from jaxkv._src.planning._choice import may_waste_states
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, Limits, MLASpec, StateSpec
from tests.layer_examples import (
    LIMITS,
    MODELS,
    Layers,
    by_name,
    chunked,
    cross,
    full,
    mla,
    need,
    sliding,
    state,
)
from tests.test_golden_plans import CASES, make_workers
from tests.test_grouping import deepseek_v4_flash, plan_of

GIB = 2**30


def request_bytes(plan: Plan, num_tokens: int) -> int:
    return plan.steady_blocks(num_tokens) * sum(plan.bytes_per_block)


def hybrid(**attention: Any) -> Layers:
    """Eight layers of attention and 24 with a state as large as 528 of their tokens."""
    kv = FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 4, "head_size": 256} | attention)
    state = StateSpec(block_size=16, shapes=((3, 8192), (32, 128, 128)), dtypes=("bf16", "f32"))
    return {f"layers.{i}": state if (i + 1) % 4 else kv for i in range(32)}


# --- groupings ----------------------------------------------------------------------


@given(MODELS, LIMITS, st.integers(2, 400), st.integers(1, 40), st.sampled_from([40, 60]))
def test_least_waste_is_never_shorter_and_never_runs_fewer_requests(
    layers, limits, blocks, request_len, max_model_len
) -> None:
    memory = blocks * max(spec.page_bytes for spec in layers.values()) * len(layers)
    options: dict[str, Any] = {"max_model_len": max_model_len, "fit_max_model_len": True}
    options |= {"limits": limits, "request_len": request_len}
    try:
        usual = plan_cache(layers, memory, **options, grouping="packed")
    except KVCacheCapacityError:
        assume(False)
        raise
    best = [plan_cache(layers, memory, **options, grouping=g) for g in ("auto", "least_waste")]
    for plan, other in itertools.pairwise([usual, *best]):
        assert plan.max_model_len <= other.max_model_len
        if plan.max_model_len == other.max_model_len:
            assert plan.requests_that_fit(request_len) <= other.requests_that_fit(request_len)


def test_without_a_length_groupings_compare_by_the_longest_requests() -> None:
    for case in CASES:
        if case["expect"]["error"] or case["num_blocks_override"]:
            continue
        workers = make_workers(case)
        memory = [worker["available_memory"] for worker in case["workers"]]
        limits = Limits(
            max_in_flight_tokens=case["max_in_flight_tokens"],
            max_encoder_tokens=case["max_encoder_len"],
        )
        length = case["expect"]["max_model_len"]
        plans = [
            plan_cache(workers, memory, max_model_len=length, limits=limits, grouping=grouping)
            for grouping in ("auto", "least_waste")
        ]
        usual, least = (plan.requests_that_fit(length) for plan in plans)
        assert usual <= least, case["name"]
        figures = [plan.requests for plan in plans[1].compared]
        assert figures == ([least, usual] if len(plans[1].groups) > 1 else [])


def test_least_waste_saves_a_quarter_on_20_full_and_30_sliding() -> None:
    layers = by_name([full(block_size=4)] * 20 + [sliding(block_size=4)] * 30)
    rule, least = plan_of(layers), plan_of(layers, grouping="least_waste")
    assert [len(g.layers) for g in rule.groups] == [20, 15, 15]
    assert [len(g.layers) for g in least.groups] == [10] * 5
    assert min(rule.unused_bytes_per_block) == 0 and not any(least.unused_bytes_per_block)
    assert request_bytes(least, 40) < request_bytes(rule, 40)
    assert least.requests_that_fit(40) > rule.requests_that_fit(40)


def small_model(num_full: int, num_sliding: int, memory: int, **options: Any) -> list[Plan]:
    """Plans with the length fitted: by the rule, packed, and with the least waste."""
    layers = by_name([full(block_size=8)] * num_full)
    layers |= {f"w{i}": sliding(3, block_size=16, num_kv_heads=3) for i in range(num_sliding)}
    groupings = ("rule", "packed", "least_waste", "auto")
    options |= {"max_model_len": 308, "fit_max_model_len": True}
    return [plan_cache(layers, memory, grouping=g, **options) for g in groupings]


def test_no_gain_in_requests_is_worth_a_shorter_longest_request() -> None:
    limits = Limits(max_in_flight_tokens=256)
    plans = small_model(8, 3, 258_048, request_len=4, limits=limits)
    lengths = [(plan.max_model_len, plan.requests_that_fit(4)) for plan in plans]
    assert lengths == [(288, 13), (240, 20), (308, 15), (288, 13)]
    assert str(plans[-1]).endswith(
        "rule runs 13 requests of 4 tokens at once in 4 groups; packed 20 in 3, of up to 240 tokens"
    )


def test_the_bytes_of_a_request_count_all_workers() -> None:
    """The grouping with the fewest bytes on the widest worker takes 5,632 bytes, this one 5,120."""
    layers = by_name([full(block_size=4)] + [sliding(block_size=4, num_kv_heads=1)] * 5)
    workers = [dict(part) for part in itertools.batched(layers.items(), 3)]
    options: dict[str, Any] = {"max_model_len": 40, "request_len": 20, "num_blocks_override": 80}
    options["limits"] = Limits(max_in_flight_tokens=8)
    rule, packed, least = (
        plan_cache(workers, [2**24] * 2, grouping=grouping, **options)
        for grouping in ("rule", "packed", "least_waste")
    )
    assert request_bytes(least, 20) < min(request_bytes(rule, 20), request_bytes(packed, 20))


def test_least_waste_runs_more_of_deepseek_v4_at_8k_and_says_at_what_price() -> None:
    """Chosen by the bytes that admission charges, it would run 1,258 instead of 1,540."""
    layers = deepseek_v4_flash()
    plan = plan_cache(layers, 80 * GIB, max_model_len=8192, grouping="least_waste")
    assert plan.compared == (
        GroupingFigures("least_waste", 34, 1540, 8192),
        GroupingFigures("packed", 5, 1420, 8192),
    )
    assert (len(plan.groups), plan.requests_that_fit(8192)) == (34, 1540)
    line = "least_waste runs 1,540 requests of 8,192 tokens at once in 34 groups; packed 1,420 in 5"
    assert line in str(plan) and line in plan._repr_html_()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_usual_length_lets_auto_choose_between_the_rule_and_packing() -> None:
    """One layer has large blocks: all pages grow to its page, or keep their sizes when packed."""
    layers = hybrid()
    layers["layers.3"] = dataclasses.replace(layers["layers.3"], block_size=4096)
    options: dict[str, Any] = {"max_model_len": 100_000}
    rule = plan_cache(layers, 80 * GIB, **options)
    plan = plan_cache(layers, 80 * GIB, request_len=8192, **options)
    assert (rule.compared, rule.requests_that_fit(8192)) == ((), 37)
    assert plan.compared == (
        GroupingFigures("packed", 6, 232, 100_000),
        GroupingFigures("rule", 32, 37, 100_000),
    )
    assert plan.requests_that_fit(8192) == 232
    assert plan.groups == plan_cache(layers, 80 * GIB, grouping="packed", **options).groups
    *_, usual, choice = str(plan).splitlines()
    assert (
        usual == "usual requests   8,192 tokens: 232 run at once, 22 blocks each once they decode"
    )
    assert choice.endswith(
        "packed runs 232 requests of 8,192 tokens at once in 6 groups; rule 37 in 32"
    )


@given(MODELS, st.integers(1, 40))
def test_auto_keeps_to_the_rule_where_packing_runs_no_more(layers, request_len) -> None:
    blocks = need(make_groups(layers), 40, Limits(max_encoder_tokens=4)) + 9
    options: dict[str, Any] = {"limits": Limits(max_encoder_tokens=4), "max_model_len": 40}
    plain = plan_cache(layers, blocks * 2**20, **options)
    plan = plan_cache(layers, blocks * 2**20, request_len=request_len, **options)
    if not plan.compared:  # there is one grouping only
        assert plan.groups == plain.groups
        return
    chosen, other = plan.compared
    assert {chosen.grouping, other.grouping} == {"packed", "rule"}
    assert (plan.groups == plain.groups) or chosen.grouping == "packed"
    assert chosen.requests > other.requests or chosen.grouping == "rule"
    assert chosen.requests == plan.requests_that_fit(request_len) >= other.requests


def test_a_usual_request_must_fit_as_well() -> None:
    layers = {"a": full(block_size=4)}
    options: dict[str, Any] = {"max_model_len": 1000, "fit_max_model_len": True}
    memory = 101 * layers["a"].page_bytes
    with pytest.raises(KVCacheCapacityError, match="set request_len to at most 400 or raise"):
        plan_cache(layers, memory, request_len=401, **options)
    assert plan_cache(layers, memory, request_len=400, **options).max_model_len == 400


# --- blocks next to states ----------------------------------------------------------


def in_small_blocks(layers: Layers) -> Layers:
    changes = {"block_size": 16, "page_bytes_padded": None}
    return {name: dataclasses.replace(spec, **changes) for name, spec in layers.items()}


def promised(text: str) -> tuple[int, int, int]:
    """The figures of a warning: requests now, their length, requests in smaller blocks."""
    match = re.search(r"([\d,]+) requests of ([\d,]+) tokens run at once, and ([\d,]+) would", text)
    assert match, text
    now, length, then = (int(figure.replace(",", "")) for figure in match.groups())
    return now, length, then


def test_layers_whose_blocks_need_no_whole_vectors_get_small_blocks() -> None:
    layers = {
        **{make.__name__: make(block_size=64) for make in (full, sliding, chunked, cross, mla)},
        **{"state": state(page_bytes_padded=4096), "padded": full(page_bytes_padded=4096)},
    }
    compressed = {f"{n}": mla(block_size=256, compress_ratio=n) for n in (2, 16, 128)}
    assert planned_in_small_blocks(layers | compressed) == in_small_blocks(layers) | compressed


@pytest.mark.parametrize("elements", [127, 128, 129])
def test_a_page_wastes_states_if_over_half_of_it_is_unused(elements: int) -> None:
    for padded, grouping in ((1024, "rule"), (2048, "rule"), (None, "packed")):
        small = state(shapes=((elements,),), dtypes=("f32",), page_bytes_padded=padded)
        of_attention = full(page_bytes_padded=padded)
        used = elements * 4 / (padded or of_attention.page_bytes)
        assert may_waste_states(
            make_groups({"a": of_attention, "s": small}, grouping=grouping)
        ) == (used < 1 / 2)
    for alone in (full(page_bytes_padded=4096), small):
        assert not may_waste_states(make_groups({"a": alone}))


@pytest.mark.parametrize("request_len", [None, 1000])
@pytest.mark.parametrize(
    "attention",
    [
        {"page_bytes_padded": hybrid()["layers.0"].page_bytes},  # 16 tokens in a page for 528
        {"block_size": 8192},  # states are padded to 16 times their bytes
    ],
    ids=["padded", "large"],
)
def test_blocks_by_hand_that_cost_most_requests_get_a_warning(attention, request_len) -> None:
    layers = hybrid(**attention)
    options: dict[str, Any] = {"max_model_len": 32768, "request_len": request_len}
    plan = plan_cache(layers, 80 * GIB, **options)
    now, length, then = promised(plan.warning)
    assert plan.warning in str(plan).splitlines()[-1] and plan.warning in plan._repr_html_()
    assert length == (request_len or 8192)
    assert now == plan.requests_that_fit(length) < then / 2
    better = plan_cache(in_small_blocks(layers), 80 * GIB, **options)
    assert better.requests_that_fit(length) == then and not better.warning


def test_a_refusal_names_the_blocks_that_would_fit() -> None:
    """Padded blocks run 9 requests of 8,192 tokens, and blocks that grow run 261."""
    layers = hybrid(page_bytes_padded=hybrid()["layers.0"].page_bytes)
    assert promised(plan_cache(layers, 80 * GIB, max_model_len=8192).warning) == (9, 8192, 261)
    with pytest.raises(KVCacheCapacityError, match=r"block_size=16 and no page_bytes_padded$"):
        plan_cache(layers, 80 * GIB, max_model_len=100_000)
    options: dict[str, Any] = {"max_model_len": 100_000, "fit_max_model_len": True}
    with pytest.raises(KVCacheCapacityError, match=r"^request_len=.* no page_bytes_padded$"):
        plan_cache(layers, 80 * GIB, request_len=99_000, **options)
    plan_cache(in_small_blocks(layers), 80 * GIB, max_model_len=100_000)
    with pytest.raises(KVCacheCapacityError, match=r"\(62,500 blocks\)$"):  # nor do small ones fit
        plan_cache(layers, 2 * GIB, max_model_len=999_936)


@pytest.mark.parametrize("grouping", ["auto", "rule", "packed"])
def test_a_warning_compares_with_small_blocks_in_groups_of_the_same_kind(
    grouping: Grouping,
) -> None:
    """And there is none for a number of blocks by hand, which does not follow from their bytes."""
    wide = {"block_size": 2048}
    layers: Layers = {f"full.{i}": full(num_kv_heads=4, head_size=64, **wide) for i in range(3)}
    layers |= {f"state.{i}": state(shapes=((30_000,),), dtypes=("f32",), **wide) for i in range(2)}
    options: dict[str, Any] = {"max_model_len": 1024, "grouping": grouping}
    plan = plan_cache(layers, GIB, **options)
    now, _, then = promised(plan.warning)
    rule, packed = (
        plan_cache(in_small_blocks(layers), GIB, max_model_len=1024, grouping=name)
        for name in ("rule", "packed")
    )
    usual = (packed if grouping == "packed" else rule).requests_that_fit(1024)
    assert now == plan.requests_that_fit(1024)
    assert then == usual != packed.requests_that_fit(1024) + rule.requests_that_fit(1024) - usual
    assert not plan_cache(layers, GIB, num_blocks_override=plan.num_blocks, **options).warning
    padded = hybrid(page_bytes_padded=hybrid()["layers.0"].page_bytes)
    assert not plan_cache(padded, 80 * GIB, max_model_len=8192, num_blocks_override=999).warning


def test_blocks_that_waste_little_are_not_warned_of() -> None:
    latent = MLASpec(block_size=64, head_size=576)
    states = {n: s for n, s in hybrid().items() if isinstance(s, StateSpec)}
    models: list[dict[str, LayerSpec]] = [
        hybrid(),
        hybrid(block_size=2048),  # 182 requests instead of 261
        {"a": latent, **states},
        {"a": full(block_size=4096), "b": sliding(block_size=16)},
        dict(states),
    ]
    for layers in models:
        for grouping in ("auto", "packed"):
            plan = plan_cache(layers, 80 * GIB, max_model_len=8192, grouping=grouping)
            assert plan.warning == ""
    overridden = hybrid(block_size=8192)
    assert not plan_cache(overridden, 80 * GIB, max_model_len=8192, num_blocks_override=99).warning
