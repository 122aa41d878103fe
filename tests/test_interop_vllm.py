"""Plans and steps from vLLM: against recorded plans and schedules of vLLM 0.33.

``golden/vllm_0_33.json`` was recorded by running vLLM 0.33.0's own planner
(``kv_cache_planning``) and scheduler (``core.sched.scheduler``), which are pure Python, with
stand-ins for torch and for the configuration. Fields that are None or False are left out.
"""

import copy
import dataclasses
import functools
import itertools
import json
import pathlib
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.interop.vllm import SchedulerTables, cache_order, layer_specs, plan_from_config
from jaxkv._src.interop.vllm._specs import convert_spec
from jaxkv._src.interop.vllm._split import _split_entries
from jaxkv._src.planning import KVCacheCapacityError, Plan
from jaxkv._src.specs import LayerSpec, Limits, MLASpec, StateSpec
from jaxkv._src.uploads import TableEntry

RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "vllm_0_33.json").read_text())
CASES = {case["name"]: case for case in RECORDED["cases"]}
TRACES = {trace["name"]: trace for trace in RECORDED["traces"]}
WINDOWS = "windows, a shared prefix and preemption"
STATES = "states that are kept, and resumed from a prefix"
INSIDE = "states, a prefix that ends inside of a block"
# Bytes of a block that vLLM adds so that strides are aligned: here, 3 pages of 72 to 128 KiB.
PADDING = {"latent vectors in aligned strides": 3 * 56 * 2**10}
OPTIONS = {"kv_dtype": "fp8_e4m3", "value_size": 512}

Data = dict[str, Any]


def limits_of(case: Data) -> Limits:
    return Limits(
        max_in_flight_tokens=case["max_in_flight_tokens"],
        max_encoder_tokens=case.get("max_encoder_tokens", 0),
    )


def plan_of(case: Data, configs: Any = None, **changes: Any) -> Plan:
    configs = case["configs"] if configs is None else configs
    options = {"max_model_len": case["max_model_len"], "limits": limits_of(case), **OPTIONS}
    return plan_from_config(configs, **options | changes)


def as_objects(data: Any) -> Any:
    """Mappings as objects with attributes, of a class of the name that ``type`` says."""
    if isinstance(data, list):
        return [as_objects(item) for item in data]
    if not isinstance(data, dict) or any("." in key for key in data):  # keyed by layers
        return {k: as_objects(v) for k, v in data.items()} if isinstance(data, dict) else data
    cls = type(data.get("type", "Anything"), (types.SimpleNamespace,), {})
    return cls(**{k: as_objects(v) for k, v in data.items() if k != "type"})


# --- plans --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_plan_has_the_groups_blocks_and_bytes_that_vllm_planned(case: Data) -> None:
    plan = plan_of(case)
    first = case["configs"][0]
    assert plan.num_blocks == first["num_blocks"] and len(plan.layouts) == len(case["configs"])
    assert plan.memory_bytes == tuple(plan.num_blocks * n for n in case["pool_bytes_per_block"])
    for index, group in enumerate(plan.groups):
        given = [config["kv_cache_groups"][index] for config in case["configs"]]
        assert list(group.layers) == [name for g in given for name in g["layer_names"]]
        spec = given[0]["kv_cache_spec"]
        assert group.block_size == spec["block_size"]
    pages = {n: s.page_bytes for g in plan.groups for n, s in zip(g.layers, g.specs, strict=True)}
    assert pages == case["page_bytes"]
    for config, layout, pool in zip(
        case["configs"], plan.layouts, case["pool_bytes_per_block"], strict=True
    ):
        here = [name for group in config["kv_cache_groups"] for name in group["layer_names"]]
        assert [name for group in layout.groups for name in group.layers] == here
        assert layout.bytes_per_block == pool - PADDING.get(case["name"], 0)
        specs = layer_specs(config, **OPTIONS)
        assert all(layout.placement_of(name).spec == specs[name] for name in here)
    assert str(plan).count("\n") == 7


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_objects_are_read_as_mappings_are(case: Data) -> None:
    plan = plan_of(case)
    assert (
        plan_of(case, as_objects(case["configs"])) == plan_of(case, tuple(case["configs"])) == plan
    )


@pytest.mark.parametrize("slots", [False, True])
def test_a_dataclass_has_its_fields_and_no_other_attributes(slots: bool) -> None:
    """Such as what a property of vLLM's specs has computed once."""
    for spec in recorded_specs():
        fields = {name: value for name, value in spec.items() if name != "type"}
        kept = {} if slots else {"real_page_size_bytes": functools.cached_property(lambda _: 7)}
        cls = dataclasses.make_dataclass(spec["type"], fields, namespace=kept, slots=slots)
        made = cls(**fields)
        assert slots or made.real_page_size_bytes == vars(made)["real_page_size_bytes"] == 7
        converted = convert_spec("layer", made, **OPTIONS)
        assert converted == convert_spec("layer", spec, **OPTIONS)


def specs_of(name: str) -> list[LayerSpec]:
    (config,) = CASES[name]["configs"]
    return list(layer_specs(config, **OPTIONS).values())


def test_every_kind_of_layer_becomes_its_counterpart() -> None:
    """Bytes are compared for all cases above; here is what bytes do not tell."""
    kinds = Counter(spec.kind for name in CASES for spec in specs_or_none(name))
    assert set(kinds) == {"full", "sliding", "chunked", "cross", "mla", "sliding_mla", "state"}
    growths = {spec.growth for spec in specs_of("full and windows")}
    assert {(g.kind, g.window if g.kind == "sliding" else 0) for g in growths} == {
        ("full", 0),
        ("sliding", 40),
    }
    assert {g.growth.chunk for g in specs_of("chunks") if g.kind == "chunked"} == {48}
    (fp8, *_), (scaled, *_) = specs_of("fp8"), specs_of("fp8 with scales of each head")
    assert fp8 == dataclasses.replace(fp8, dtype="fp8_e4m3", scale_bytes=0)
    given = CASES["fp8"]["configs"][0]["kv_cache_groups"][0]["kv_cache_spec"]
    named = convert_spec("layer", given | {"dtype": "torch.float8_e5m2"}, **OPTIONS)
    assert named == dataclasses.replace(fp8, dtype="fp8_e5m2")  # whatever "fp8" is to mean
    narrow = given | {"head_size": 32, "head_size_v": 16, "state_content_bytes": 32 + 16 + 2 * 4}
    of_heads = convert_spec("layer", narrow | {"kv_quant_mode": 3}, **OPTIONS)
    assert of_heads == dataclasses.replace(fp8, head_size=32, head_size_v=16, scale_bytes=4)
    assert scaled == dataclasses.replace(fp8, scale_bytes=4)
    rows = {
        (s.head_size, s.value_size, s.dtype, s.bytes_per_token, s.compress_ratio)
        for name in ("latent vectors", "deepseek v3.2", "deepseek v4")
        for s in specs_of(name)
        if isinstance(s, MLASpec) and s.kind == "mla"
    }
    assert rows == {
        (576, 512, "bfloat16", None, 1),
        (576, 512, "uint8", 656, 1),
        (128, None, "uint8", 132, 1),
        (512, None, "uint8", 584, 4),
        (512, None, "uint8", 584, 128),
        (128, None, "uint8", 132, 4),
    }
    narrow = layer_specs(CASES["deepseek v3.2"]["configs"][0], value_size=64).values()
    values = {(s.head_size, s.value_size) for s in narrow if isinstance(s, MLASpec)}
    assert values == {(576, 64), (128, None)}, "indexers have no value"
    modes = [
        {(s.cache_mode, s.speculative_blocks) for s in specs_of(name) if isinstance(s, StateSpec)}
        for name in ("states", "states without checkpoints", "states with drafts")
    ]
    assert modes == [{("align", 0)}, {("none", 0)}, {("align", 2)}]


def specs_or_none(name: str) -> list[LayerSpec]:
    return specs_of(name) if len(CASES[name]["configs"]) == 1 else []


def test_the_physical_order_is_read_from_vllm() -> None:
    names = ("full", "full and windows, heads outermost", "full and windows, blocks outermost")
    orders = [cache_order(CASES[name]["configs"][0]) for name in names]
    assert orders == ["LBNHC", "LHBNC", "BHLNC"]
    with pytest.raises(ValueError, match="kv_cache_layout='NBC'; use one of 'LBNHC'"):
        cache_order({"kv_cache_layout": "NBC"})


def test_layers_that_share_a_cache_read_it_where_it_is() -> None:
    plan = plan_of(CASES["two pipeline stages"], shared={"layers.7.attn": "layers.5.attn"})
    assert plan.layouts[1].placement_of("layers.7.attn") == plan.layouts[1].placement_of(
        "layers.5.attn"
    )
    with pytest.raises(ValueError, match=r"layer='layers\.7\.attn' has no cache here"):
        plan.layouts[0].placement_of("layers.7.attn")
    owners = {"layers.7.attn": "layers.5.attn", "layers.8.attn": "layers.0.attn"}
    layouts = plan_of(CASES["two pipeline stages"], shared=owners).layouts
    assert [dict(layout.shared) for layout in layouts] == [
        {"layers.8.attn": "layers.0.attn"},
        {"layers.7.attn": "layers.5.attn"},
    ]
    with pytest.raises(ValueError, match=r"shared names \['layers\.9\.attn'\], which own no cache"):
        plan_of(CASES["full"], shared={"layers.7.attn": "layers.9.attn"})


def test_a_plan_is_refused_or_shortened_by_its_own_count_of_blocks() -> None:
    """vLLM admits chunks that straddle a block by one block too few, and the request hangs."""
    case = CASES["chunks"]
    with pytest.raises(KVCacheCapacityError, match="raise num_blocks to at least 65") as caught:
        plan_of(case, max_model_len=800)
    assert plan_of(case, max_model_len=800, fit_max_model_len=True).max_model_len == (
        caught.value.longest_len
    )
    with pytest.raises(ValueError, match=r"limits\.max_encoder_tokens=0"):
        plan_of(CASES["encoder and decoder"], limits=Limits())


def test_context_parallelism_divides_groups_that_vllm_shards() -> None:
    (config,) = copy.deepcopy(CASES["full"]["configs"])
    with pytest.raises(ValueError, match=r"kv_cache_groups\[0\] is not dcp_sharded"):
        plan_of(CASES["full"], config, context_parallel=2)
    plain = copy.deepcopy(config)
    config["kv_cache_groups"][0]["kv_cache_spec"]["dcp_sharded"] = True
    plan = plan_of(CASES["full"], config, context_parallel=2)
    assert plan.admission_blocks(256) == 8
    (several,) = copy.deepcopy(CASES["full and windows"]["configs"])
    specs = [group["kv_cache_spec"] for group in several["kv_cache_groups"]]
    for flags in itertools.product([True, False], repeat=len(specs)):
        for spec, flag in zip(specs, flags, strict=True):
            spec["dcp_sharded"] = flag
        first = f"\\[{flags.index(False)}\\] is not dcp_sharded" if not all(flags) else "sliding"
        with pytest.raises(ValueError, match=first):
            plan_of(CASES["full and windows"], several, context_parallel=2)
    for workers in ([config, plain], [plain, config]):
        with pytest.raises(ValueError, match=r"kv_cache_groups\[0\] is not dcp_sharded"):
            plan_of(CASES["full"], workers, context_parallel=2)


@pytest.mark.parametrize("larger", [0, 1])
def test_workers_that_have_other_blocks_or_groups_are_refused(larger: int) -> None:
    case = CASES["two pipeline stages"]
    workers = copy.deepcopy(case["configs"])
    workers[larger]["num_blocks"] *= 2
    for tensor in workers[larger]["kv_cache_tensors"]:
        tensor["layer_stride"] *= 2
    with pytest.raises(ValueError, match="num_blocks must be the same for all"):
        plan_of(case, workers)
    workers = copy.deepcopy(case["configs"])
    workers[larger]["kv_cache_groups"].append(
        {**workers[0]["kv_cache_groups"][0], "layer_names": []}
    )
    with pytest.raises(ValueError, match="number of kv_cache_groups must be the same for all"):
        plan_of(case, workers)
    workers = copy.deepcopy(case["configs"])  # memory alone may differ
    for tensor in workers[larger]["kv_cache_tensors"]:
        tensor["size"] *= 2
    given = [
        bytes_of * case["configs"][0]["num_blocks"] for bytes_of in case["pool_bytes_per_block"]
    ]
    given[larger] *= 2
    assert plan_of(case, workers).memory_bytes == tuple(given)


# --- fields without a counterpart ----------------------------------------------------


def changed(name: str, group: int, field: str, value: Any) -> Callable[[], object]:
    (config,) = copy.deepcopy(CASES[name]["configs"])
    config["kv_cache_groups"][group]["kv_cache_spec"][field] = value
    return lambda: plan_of(CASES[name], config)


def altered(name: str, **fields: Any) -> Callable[[], object]:
    (config,) = copy.deepcopy(CASES[name]["configs"])
    return lambda: plan_of(CASES[name], config | fields)


def in_group(name: str, group: int, **fields: Any) -> Callable[[], object]:
    (config,) = copy.deepcopy(CASES[name]["configs"])
    config["kv_cache_groups"][group] |= fields
    return lambda: plan_of(CASES[name], config)


def in_stage(stage: int, **fields: Any) -> Callable[[], object]:
    configs = copy.deepcopy(CASES["two pipeline stages"]["configs"])
    configs[stage] |= fields
    return lambda: plan_of(CASES["two pipeline stages"], configs)


FULL, SLIDING, MLA = ("full", 0), ("full and windows", 0), ("latent vectors", 0)
STATE = "states", 0
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a class without a counterpart": (
        changed(*FULL, "type", "SinkFullAttentionSpec"),
        "SinkFullAttentionSpec of 'layers.0.attn' has no counterpart here; .* FullAttentionSpec",
    ),
    "a window that keeps all": (changed(*FULL, "sliding_window", 8), "sliding_window=8 keeps the"),
    "no causal mask": (changed(*FULL, "non_causal", True), "non_causal=True attends to later"),
    "packed heads": (changed(*FULL, "num_head_slots", 4), "num_head_slots=4 packs its 2 heads"),
    "states of tokens": (changed(*FULL, "tokens_per_state", 2), "tokens_per_state=2 is not 1"),
    "another quantisation": (changed(*FULL, "kv_quant_mode", 9), "kv_quant_mode=9 has no"),
    "content of other bytes": (
        changed(*FULL, "state_content_bytes", 130),
        "state_content_bytes=130 is not a key and a value of bfloat16, 128 bytes$",
    ),
    "scales of no bytes": (
        changed("fp8 with scales of each head", 0, "state_content_bytes", 62),
        "62 is not a key and a value of float8_e4m3fn, 64 bytes and a scale each$",
    ),
    "retained tokens": (changed(*SLIDING, "extra_retained_tokens", 3), "extra_retained_tokens"),
    "checkpoints": (changed(*STATE, "num_prefill_checkpoint_blocks", 1), "num_prefill_checkpoint"),
    "a field of a later version": (
        changed(*FULL, "rotated", "by 45"),
        "FullAttentionSpec of 'layers.0.attn': rotated='by 45' is not understood",
    ),
    "a dtype that is none": (changed(*FULL, "dtype", "torch.int64"), "dtype='int64' is not a"),
    "other bytes": (changed(*FULL, "num_kv_heads", 4), "pages of 8,192 bytes here, and a layer_s"),
    **{
        f"host memory of {group}": (
            in_group("full and windows", group, host_resident=True),
            rf"kv_cache_groups\[{group}\] is host_resident",
        )
        for group in (0, 2)
    },
    **{
        f"sparse host pool of stage {stage}": (
            in_stage(stage, hisparse_host_num_blocks=8),
            "hisparse_host_num_blocks",
        )
        for stage in (0, 1)
    },
    "no tensors": (altered("full", kv_cache_tensors=[]), r"kv_cache_tensors has no \['layers.0"),
    "no groups": (
        altered("full", kv_cache_groups=[], kv_cache_tensors=[]),
        "kv_cache_groups is empty",
    ),
    "layers from nowhere": (
        altered("full", kv_cache_groups=[]),
        "kv_cache_tensors names 'layers.0.attn', which is in no group",
    ),
    "no fp8": (lambda: plan_of(CASES["fp8"], kv_dtype="bf16"), "kv_dtype='bf16' is not fp8; use"),
    "fp8 of no kind": (
        lambda: plan_of(CASES["fp8"], kv_dtype=None),
        'stores fp8 as bytes and does not name its kind; pass kv_dtype="fp8_e4m3"',
    ),
    "workers that disagree": (
        lambda: plan_of(CASES["full"], [*CASES["full"]["configs"], *CASES["fp8"]["configs"]]),
        "workers disagree about the spec of 'layers.0.attn'",
    ),
    "unlike growth": (
        lambda: plan_of(CASES["full"], [unlike_growth()]),
        r"kv_cache_groups\[0\] must have layers that need the same blocks",
    ),
}


def unlike_growth() -> Data:
    """A uniform group into which a window strayed."""
    (config,) = copy.deepcopy(CASES["heads of mixed width in one group"]["configs"])
    specs = config["kv_cache_groups"][0]["kv_cache_spec"]["kv_cache_specs"]
    specs["layers.1.attn"] |= {"type": "SlidingWindowSpec", "sliding_window": 8}
    return config


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# What a field is where it is left out; "head_size_v" is 0 in latent vectors, else as "head_size".
NEUTRAL = {"tokens_per_state": 1, "kv_quant_mode": "NONE", "mamba_cache_mode": "none"}
NEUTRAL |= dict.fromkeys(("extra_retained_tokens", "num_speculative_blocks"), 0)
NEUTRAL |= {"num_prefill_checkpoint_blocks": 0}
COUNTS = {"num_kv_heads", "head_size", "block_size", "sliding_window", "attention_chunk_size"}
NEEDED = COUNTS | {"dtype", "shapes", "dtypes"}


def recorded_specs() -> Iterator[Data]:
    for case in CASES.values():
        for config in case["configs"]:
            for group in config["kv_cache_groups"]:
                spec = group["kv_cache_spec"]
                yield from spec.get("kv_cache_specs", {"layer": spec}).values()


def test_fields_that_are_left_out_are_neutral_or_missed_and_counts_are_positive() -> None:
    tried, convert = Counter[str](), functools.partial(convert_spec, "layer", **OPTIONS)
    for spec in recorded_specs():
        neutral = NEUTRAL | {"head_size_v": 0 if "MLA" in spec["type"] else spec.get("head_size")}
        for name, value in spec.items():
            left = {key: value for key, value in spec.items() if key != name}
            if name in NEEDED:
                with pytest.raises(TypeError, match=f"has no '{name}'; pass vLLM's own"):
                    convert(left)
            elif name in neutral and value == neutral[name]:
                assert convert(left) == convert(spec)
                tried[name] += 1
            if name in COUNTS:
                with pytest.raises(ValueError, match=f"'layer': {name} must be at least 1, got 0"):
                    convert(spec | {name: 0})
    assert neutral.keys() <= tried.keys()


# --- steps --------------------------------------------------------------------------


class Setting(NamedTuple):
    trace: Data
    plan: Plan
    tables: SchedulerTables
    shape: jaxkv.StepShape


def setting(name: str, max_tokens: int = 64, **room: int) -> Setting:
    trace = TRACES[name]
    plan = plan_of(trace)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=max_tokens, forks=3, extra=64)
    shape = dataclasses.replace(shape, **room)
    return Setting(trace, plan, SchedulerTables(plan, max_requests=4), shape)


def live_ids(plan: Plan, ids: Any, computed: int, total: int) -> Iterator[tuple[int, int, int]]:
    """Group, logical block and id of the blocks that a step reads or writes."""
    for group, of_group in enumerate(ids):
        for logical_block in plan.groups[group].growth.live_blocks(computed, total):
            yield group, logical_block, of_group[logical_block]


@pytest.mark.parametrize("name", TRACES)
def test_rows_list_the_block_ids_of_the_scheduler(name: str) -> None:
    trace, plan, tables, _ = setting(name)
    for step in trace["steps"]:
        output, before = step["output"], tables.rows
        changes = tables.follow(output)
        assert list(tables.rows.values()) == list(dict.fromkeys(tables.rows.values()))
        left = {*output["finished_req_ids"], *output.get("preempted_req_ids", ())}
        arrived = {new["req_id"] for new in output["scheduled_new_reqs"]}
        assert not (left - arrived) & set(tables.rows)
        assert all(tables.rows[r] == row for r, row in before.items() if r not in left)
        work = output["num_scheduled_tokens"]
        assert changes.num_new_tokens == list(work.values())
        assert changes.rows == [tables.rows[request] for request in work]
        for request, computed in zip(work, changes.num_computed_tokens, strict=True):
            now = computed, computed + work[request]
            kept = list(live_ids(plan, tables.block_ids(request), *now))
            assert kept == list(live_ids(plan, step["tables"][request], *now))
            assert all(block for _, _, block in kept)
    assert set(tables.rows) <= set(trace["prompts"])


@pytest.mark.parametrize("name", [STATES, INSIDE, "states without checkpoints", WINDOWS])
def test_fresh_blocks_are_zeroed_and_blocks_with_content_are_not(name: str) -> None:
    trace, plan, tables, _ = setting(name)
    zeroed: Counter[str] = Counter()
    for step in trace["steps"]:
        output = step["output"]
        changes = tables.follow(output)
        copies = {tuple(pair) for pair in output.get("kv_cache_block_copies", ())}
        assert {pair for of_group in changes.copies for pair in of_group} == copies
        ids = {block for of_group in changes.zero_ids for block in of_group}
        wanted = set(output.get("new_block_ids_to_zero", ()))
        targets = {target for _, target in copies}
        assert wanted - targets <= ids and not targets & ids and 0 not in ids
        work = output["num_scheduled_tokens"]
        for request, computed in zip(work, changes.num_computed_tokens, strict=True):
            for group, of_group in enumerate(tables.block_ids(request)):
                filled = of_group[: computed // plan.groups[group].block_size]
                fresh = set(changes.zero_ids[group]) & set(filled) - {0}
                assert not fresh, (request, group)
        zeroed.update(str(group) for group, of_group in enumerate(changes.zero_ids) if of_group)
    assert bool(zeroed) == any(plan.groups_to_zero) == (name != WINDOWS)


def rows_on_device(cache: jaxkv.KVCache, plan: Plan, row: int) -> list[list[int]]:
    starts, lengths = cache.layout.table_offsets, np.asarray(cache.row_lengths)[row]
    tables = np.asarray(cache.block_tables)[row]
    return [tables[s : s + n].tolist() for s, n in zip(starts[:-1], lengths, strict=True)]


@pytest.mark.parametrize("room", [{}, {"block_ids": 3}], ids=str)
def test_uploads_of_any_size_bring_the_tables_to_the_device(room) -> None:
    trace, plan, tables, shape = setting(WINDOWS, **room)
    cache = jaxkv.make_cache(plan, max_requests=4)
    apply = jax.jit(lambda cache, upload: jaxkv.apply_step(cache, upload), donate_argnums=0)
    most = 0
    for step in trace["steps"]:
        uploads = tables.pack(shape, step["output"], extra=[7, 8])
        assert uploads[-1].parts()["extra"][:2].tolist() == [7, 8]
        most = max(most, len(uploads))
        for upload in uploads:
            cache, batch = apply(cache, upload)
        assert sum(step["output"]["num_scheduled_tokens"].values()) == batch.query_start_loc[-1]
        for request, row in tables.rows.items():
            on_device, ids = rows_on_device(cache, plan, row), tables.block_ids(request)
            assert [list(of_group) for of_group in ids] == on_device
    jaxkv.check_errors(cache)
    assert apply._cache_size() == 1
    assert (most > 1) == bool(room)


ENTRIES = st.lists(
    st.tuples(*[st.lists(st.integers(1, 99), max_size=6)] * 2, *[st.integers(0, 9)] * 2),
    min_size=3,  # the room that is left depends on all before
    max_size=6,
)


@given(entries=ENTRIES, room=st.integers(1, 8))
@example(entries=[([1, 2], [3], 0, 0), ([4], [5, 6], 2, 0), ([7], [8, 9, 10], 0, 5)], room=8)
def test_parts_have_all_ids_of_entries_in_order_and_no_more_than_fit(entries, room) -> None:
    given = [TableEntry(row, [one, two], starts) for row, (one, two, *starts) in enumerate(entries)]
    parts = list(_split_entries(given, room))
    sizes = [sum(len(ids) for entry in part for ids in entry.block_ids) for part in parts]
    total = sum(len(ids) for entry in given for ids in entry.block_ids)
    assert all(size <= room for size in sizes)
    assert all(size == room for size in sizes[:-1]) and sum(sizes) == total
    assert {e.row for part in parts for e in part} == {e.row for e in given}

    def cells(entries: Iterable[TableEntry]) -> list[Any]:
        """Row, group, logical block and id, in order of the first three."""
        return sorted(
            (entry.row, group, start + i, block_id)
            for entry in entries
            for group, (start, ids) in enumerate(
                zip(entry.starts or (), entry.block_ids, strict=True)
            )
            for i, block_id in enumerate(ids)
        )

    assert cells(entry for part in parts for entry in part) == cells(given)


def token_ids(step: Data) -> list[int]:
    return [
        i for request in step["output"]["num_scheduled_tokens"] for i in step["token_ids"][request]
    ]


def vectors(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32[T, 2, 32]: keys, values and queries of tokens, exact in bfloat16."""
    mixed = (ids[:, None] * 5 + positions[:, None] * 3 + np.arange(64) * 7) % 17
    return (mixed.reshape(-1, 2, 32) - 8).astype(np.float32) / 8


def attention(x: np.ndarray, window: int) -> np.ndarray:
    """float64[T, 2, 32] of one request over its own tokens."""
    x = x.astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", x, x) / np.sqrt(32)
    behind = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), x)


LAYERS = {"layers.0.attn": 40, "layers.2.attn": 10**6}  # and their windows


@jax.jit(donate_argnums=0)
def attend_step(cache, upload, x):
    cache, batch = jaxkv.apply_step(cache, upload)
    outs = []
    for layer in LAYERS:
        cache, out = jaxkv.attend(cache, layer, batch, x, x, x)
        outs.append(out)
    return cache, outs


def poisoned(plan: Plan) -> jaxkv.KVCache:
    """A cache whose every byte is 0xFF."""
    cache = jaxkv.make_cache(plan, max_requests=4)
    buffers = tuple(jnp.full_like(buffer, 0xFF) for buffer in cache.buffers)
    return dataclasses.replace(cache, buffers=buffers)


@pytest.mark.parametrize("name", [WINDOWS, "the same with vLLM's first model runner"])
def test_a_recorded_schedule_attends_to_what_every_request_has_written(name: str) -> None:
    """Prefixes are shared, requests preempted, and blocks below windows reused."""
    trace, plan, tables, shape = setting(name)
    cache = poisoned(plan)
    texts: dict[str, list[int]] = {}
    for record in trace["steps"]:
        *earlier, upload = tables.pack(shape, record["output"])
        assert not earlier
        parts, new = upload.parts(), np.array(token_ids(record), int)
        starts, computed = parts["query_start_loc"], parts["num_computed_tokens"]
        spans = list(zip(starts[:-1], starts[1:], computed, strict=True))
        places = [np.arange(b - a) + c for a, b, c in spans]
        x = np.zeros((64, 2, 32), np.float32)
        x[: len(new)] = vectors(new, np.concatenate([np.zeros(0, int), *places]))
        cache, outs = attend_step(cache, upload, x)
        for request, (a, b, c) in zip(record["output"]["num_scheduled_tokens"], spans, strict=True):
            text = texts.get(request, trace["prompts"][request])
            texts[request] = text = [*text[:c], *new[a:b].tolist(), *text[c + b - a :]]
            whole = vectors(np.array(text[: c + b - a]), np.arange(c + b - a))
            for window, out in zip(LAYERS.values(), map(np.asarray, outs), strict=True):
                np.testing.assert_allclose(out[a:b], attention(whole, window)[c:], atol=2e-2)
    jaxkv.check_errors(cache)


@pytest.mark.parametrize("name", [STATES, INSIDE, "states without checkpoints"])
def test_a_recorded_schedule_resumes_every_state(name: str) -> None:
    """Prefixes end at blocks and inside of them; vLLM copies the states of the latter."""
    trace, plan, tables, shape = setting(name)
    layer = "layers.1.attn"
    cache = poisoned(plan)

    @jax.jit
    def step(cache, upload, ids):
        cache, batch = jaxkv.apply_step(cache, upload)
        window, total = jaxkv.read_state(cache, layer, batch)
        starts = batch.query_start_loc
        sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(ids)])
        total = total + (sums[starts[1:]] - sums[starts[:-1]])[:, None, None, None]
        return jaxkv.write_state(cache, layer, batch, [window, total]), total[:, 0, 0, 0]

    texts: dict[str, list[int]] = {}
    for record in trace["steps"]:
        *earlier, upload = tables.pack(shape, record["output"])
        ids = np.zeros(64, np.float32)
        new = token_ids(record)
        ids[: len(new)] = new
        assert not earlier
        cache, totals = step(cache, upload, ids)
        parts, totals = upload.parts(), totals.tolist()
        starts, computed = parts["query_start_loc"], parts["num_computed_tokens"]
        for index, request in enumerate(record["output"]["num_scheduled_tokens"]):
            text = texts.get(request, trace["prompts"][request])[: computed[index]]
            texts[request] = [*text, *new[starts[index] : starts[index + 1]]]
            assert totals[index] == sum(texts[request]), (request, computed[index])
    jaxkv.check_errors(cache)


# --- misuse -------------------------------------------------------------------------


def output(**fields: Any) -> Data:
    cached = {"req_ids": [], "resumed_req_ids": [], "new_block_ids": [], "num_computed_tokens": []}
    nothing = {"scheduled_new_reqs": [], "num_scheduled_tokens": {}, "finished_req_ids": []}
    cached = cached | fields.pop("cached", {})
    return nothing | {"scheduled_cached_reqs": cached} | fields


def new(request: str, *ids: list[int], computed: int = 0) -> Data:
    return {"req_id": request, "block_ids": ids, "num_computed_tokens": computed}


def running(request: str, ids: Any, computed: int) -> Data:
    cached = {"req_ids": [request], "new_block_ids": [ids], "num_computed_tokens": [computed]}
    return {"cached": cached, "num_scheduled_tokens": {request: 1}}


BAD_STEPS = {
    "of other groups": (output(scheduled_new_reqs=[new("b", [1])]), "has block ids of 1 groups"),
    "of nobody": (output(**running("b", None, 5)), "request 'b' is not known"),
    "without data": (output(num_scheduled_tokens={"a": 1}), r"names \['a'\], which are neither in"),
    "of too many": (
        output(scheduled_new_reqs=[new(f"r{i}", [7], [8], [9]) for i in range(4)]),
        "max_requests=4 rows are taken",
    ),
    "a copy of nothing": (
        output(**running("a", None, 5), kv_cache_block_copies=[(40, 41)]),
        "no request of this step holds block 40 or 41",
    ),
    "with fields of unlike lengths": (
        output(
            **running("a", None, 5) | {"cached": {"req_ids": ["a"], "num_computed_tokens": [5]}}
        ),
        "argument 2 is shorter",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_bad_step_is_refused_and_changes_nothing(name: str) -> None:
    bad, message = BAD_STEPS[name]
    _, _, tables, shape = setting(WINDOWS)
    tables.pack(
        shape,
        output(scheduled_new_reqs=[new("a", [1], [2], [3])], num_scheduled_tokens={"a": 5}),
    )
    before = tables.rows, tables.block_ids("a")
    with pytest.raises(ValueError, match=message):
        tables.pack(shape, bad)
    assert (tables.rows, tables.block_ids("a")) == before
    (upload,) = tables.pack(shape, output(**running("a", ([4], [5], [6]), 5)))
    assert upload.parts()["entry_logical_blocks"].tolist() == [1, 1, 1]


def test_fields_that_every_step_has_are_missed() -> None:
    step = output(scheduled_new_reqs=[new("a", [1], [2], [3])], num_scheduled_tokens={"a": 5})
    (arrival,), cached = step["scheduled_new_reqs"], step["scheduled_cached_reqs"]
    for part in (step, arrival, cached):
        for name in list(part):
            left = {key: value for key, value in part.items() if key != name}
            changes = {
                id(step): left,
                id(arrival): {**step, "scheduled_new_reqs": [left]},
                id(cached): {**step, "scheduled_cached_reqs": left},
            }
            with pytest.raises(TypeError, match=f"has no '{name}'"):
                setting(WINDOWS).tables.follow(changes[id(part)])


@pytest.mark.parametrize("name", TRACES)
def test_a_step_that_does_not_fit_is_packed_again_as_if_for_the_first_time(name: str) -> None:
    """Whatever it brings: new requests, more blocks, ended and preempted requests, copies."""
    trace, plan, tables, shape = setting(name)
    others = SchedulerTables(plan, max_requests=4)
    small = dataclasses.replace(shape, batch_size=1, max_tokens=1, extra=0)
    for step in trace["steps"]:
        given = {"extra": [7]}  # none has room for it
        with pytest.raises(ValueError, match="the step needs"):
            tables.pack(small, step["output"], **given)
        again, first = (t.pack(shape, step["output"], **given) for t in (tables, others))
        assert [u.data.tolist() for u in again] == [u.data.tolist() for u in first]
        assert tables.rows == others.rows
        assert all(tables.block_ids(r) == others.block_ids(r) for r in others.rows)


def test_a_request_that_comes_again_replaces_all_that_it_had() -> None:
    """A session that goes on with another prompt, say."""
    _, _, tables, shape = setting(WINDOWS)
    for ids in ([[1, 2], [3, 4], [5, 6]], [[7], [8], [9]]):
        step = output(scheduled_new_reqs=[new("a", *ids)], num_scheduled_tokens={"a": 5})
        (upload,) = tables.pack(shape, step)
    assert tables.block_ids("a") == ((7,), (8,), (9,)) and tables.rows == {"a": 0}
    parts = upload.parts()
    assert parts["entry_logical_blocks"].tolist() == [0, 0, 0]
    assert parts["row_lengths"].tolist() == [[1, 1, 1]]
    for request, row in (("a", 0), ("b", 1)):  # without blocks a request has a row, too
        tables.follow(output(scheduled_new_reqs=[new(request, [], [], [])]))
        assert tables.block_ids(request) == ((), (), ()) and tables.rows[request] == row


def test_a_block_is_zeroed_iff_it_has_no_computed_token() -> None:
    """States without checkpoints and encoders are there as a whole after the first token."""
    cases = CASES["encoder and decoder"], TRACES["states without checkpoints"]
    for plan in [plan_of(case, zero_policy="always") for case in cases]:
        growths = [group.growth for group in plan.groups]
        for computed in (0, 1, 15, 16, 17, 32, 40):  # blocks are of 16 tokens
            ids = [[10 * group + i for i in (1, 2, 3)] for group in range(len(growths))]
            arrival = output(
                scheduled_new_reqs=[new("a", *ids, computed=computed)],
                num_scheduled_tokens={"a": 1},
            )
            wanted = [
                [
                    block
                    for index, block in enumerate(of_group)
                    if computed <= (index * growth.block_size if growth.stores == "tokens" else 0)
                ]
                for growth, of_group in zip(growths, ids, strict=True)
            ]
            assert SchedulerTables(plan, max_requests=1).follow(arrival).zero_ids == wanted
        assert {growth.stores for growth in growths} > {"tokens"}


def test_the_last_upload_of_a_step_has_the_lengths_of_the_encoders() -> None:
    plan = plan_of(CASES["encoder and decoder"])
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8)
    for small in (shape, dataclasses.replace(shape, block_ids=1)):
        tables = SchedulerTables(plan, max_requests=2)
        step = output(scheduled_new_reqs=[new("a", [1], [2])], num_scheduled_tokens={"a": 5})
        *earlier, last = tables.pack(small, step, encoder_lens=[7])
        assert len(earlier) == (small is not shape)
        assert last.parts()["encoder_lens"].tolist() == [7]


@pytest.mark.parametrize("name", [STATES, "states without checkpoints"])
def test_blocks_to_zero_are_spread_over_uploads_and_zeroed_once(name: str) -> None:
    trace, plan, tables, shape = setting(name, zero_ids=2)
    others = SchedulerTables(plan, max_requests=4)
    most = 0
    for step in trace["steps"]:
        found: list[list[int]] = [[] for _ in plan.groups]
        uploads = tables.pack(shape, step["output"])
        for parts in (upload.parts() for upload in uploads):
            of_groups = np.split(parts["zero_ids"], parts["zero_ends"][:-1])
            for group, ids in zip(found, of_groups, strict=True):
                group += ids.tolist()
        assert found == others.follow(step["output"]).zero_ids
        most = max(most, len(uploads))
    assert most > 1


def test_a_copy_has_the_group_that_reads_its_source_and_not_one_that_freed_it() -> None:
    """A window of 40 tokens in blocks of 16 has left logical block 0 after 64 tokens."""
    _, plan, tables, _ = setting(WINDOWS)
    assert [group.growth.window for group in plan.groups[:2]] == [40, 40]
    for reads, other in ((0, 1), (1, 0)):
        ids = [[10 * group + index for index in range(1, 6)] for group in range(3)]
        ids[other][0] = ids[reads][3]
        name = f"request {reads}"
        tables.follow(output(scheduled_new_reqs=[new(name, *ids)], num_scheduled_tokens={name: 64}))
        copied = [(ids[reads][3], 99)]
        step = output(**running(name, None, 64), kv_cache_block_copies=copied)
        assert [bool(pairs) for pairs in tables.follow(step).copies] == [
            group == reads for group in range(3)
        ]


def test_blocks_of_a_load_that_failed_are_zeroed_again() -> None:
    _, plan, tables, _ = setting(STATES)
    assert all(plan.groups_to_zero)
    ids = [[i, i + 1] for i in range(1, 2 * len(plan.groups), 2)]
    first = tables.follow(
        output(scheduled_new_reqs=[new("a", *ids, computed=16)], num_scheduled_tokens={"a": 5})
    )
    assert first.zero_ids == [[of_group[1]] for of_group in ids]
    again = tables.follow(output(**running("a", None, 0), new_block_ids_to_zero=[1, 2, 99]))
    assert again.zero_ids == [[1, 2], [], [], []]
    others = [[i, i + 1] for i in range(11, 11 + 2 * len(plan.groups), 2)]
    tables.follow(
        output(scheduled_new_reqs=[new("b", *others, computed=16)], num_scheduled_tokens={"b": 5})
    )
    listed = [1, 11, 13, others[-1][1], ids[-1][0]]  # of both requests, in several groups
    both = tables.follow(output(**running("a", None, 0), new_block_ids_to_zero=listed))
    assert list(map(set, both.zero_ids)) == [{1, 11}, {13}, set(), {others[-1][1], ids[-1][0]}]
    # Blocks that come with a step are fresh or loaded, whatever their group.
    loaded = [[31], [32], [33], [34]]
    arrival = new("c", *loaded, computed=16)
    step = output(scheduled_new_reqs=[arrival], num_scheduled_tokens={"c": 1})
    assert tables.follow({**step, "new_block_ids_to_zero": [31, 32, 33, 34]}).zero_ids == [[]] * 4
