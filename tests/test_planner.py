"""What the planner does beyond one pool of equal pages, and where it differs from vLLM."""

import functools
import itertools
import pickle

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.block_tables import BlockTableError
from jaxkv.blocks import BlockManager, OutOfBlocksError
from jaxkv.groups import make_groups
from jaxkv.planning import KVCacheCapacityError, Plan, plan_cache
from jaxkv.pool import make_pool
from jaxkv.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SharedKVSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
    gated_delta_net_state,
    heads_per_rank,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)
from tests.test_golden_plans import CASES, make_workers

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": "bf16"}
FULL = FullAttentionSpec(block_size=4, **SHAPE)
SLIDING = SlidingWindowSpec(block_size=4, sliding_window=6, **SHAPE)
CHUNKED = ChunkedAttentionSpec(block_size=4, chunk_size=6, **SHAPE)
STATE = StateSpec(block_size=4, shapes=((5, 7),), dtypes=("f32",))
KINDS: list[LayerSpec] = [FULL, SLIDING, CHUNKED, STATE]
roomy = functools.partial(plan_cache, memory_bytes=2**24, max_model_len=40)

mixes = st.lists(st.sampled_from(KINDS), min_size=1, max_size=12).map(
    lambda specs: {f"layers.{i}": spec for i, spec in enumerate(specs)}
)


# Pages and blocks of the kinds that other files do not touch.


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        (FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="nvfp4"), 18432),
        (FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="int8"), 128),
        (
            FullAttentionSpec(
                block_size=4, num_kv_heads=2, head_size=8, dtype="int8", scale_bytes=4
            ),
            128 + 4 * 2 * 2 * 4,
        ),
        (
            FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=192, head_size_v=128),
            16 * 4 * (192 + 128) * 2,
        ),
        (MLASpec(block_size=64, head_size=576, bytes_per_token=656), 64 * 656),
        (
            MLASpec(block_size=256, head_size=512, bytes_per_token=584, compress_ratio=4),
            64 * 584,
        ),
        (
            MLASpec(
                block_size=256,
                head_size=512,
                bytes_per_token=584,
                compress_ratio=128,
                page_alignment_bytes=576,
            ),
            1728,  # 2 rows of 584 bytes are 1168, rounded up to 3 * 576
        ),
        (SlidingWindowMLASpec(block_size=64, head_size=512, sliding_window=128), 65536),
    ],
)
def test_pages_of_quantised_and_compressed_layers(spec: LayerSpec, page_bytes: int) -> None:
    assert spec.page_bytes == page_bytes


@pytest.mark.parametrize(
    ("shapes", "dtype", "page_bytes"),
    [
        (
            gated_delta_net_state(
                num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_kernel=4
            ),
            "bf16",
            1_097_728,  # Qwen3-Next
        ),
        (mamba1_state(inner_size=8192, state_size=16, conv_kernel=4), "bf16", 311_296),  # Jamba
        (
            mamba2_state(num_heads=24, head_size=128, state_size=256, num_groups=1, conv_kernel=4),
            "bf16",
            1_594_368,  # Falcon-H1-7B
        ),
        (linear_attention_state(num_heads=64, head_size=128), "f32", 4_194_304),  # MiniMax
    ],
)
def test_state_pages_of_known_models(shapes, dtype: str, page_bytes: int) -> None:
    spec = StateSpec(block_size=16, shapes=shapes, dtypes=(dtype,) * len(shapes))
    assert spec.page_bytes == page_bytes


def test_kimi_states_keep_convolution_inputs_in_the_model_dtype() -> None:
    shapes = kda_state(num_heads=32, head_size=128, conv_kernel=4)
    spec = StateSpec(block_size=16, shapes=shapes, dtypes=("bf16", "f32"))
    assert spec.page_bytes == 2_170_880


@pytest.mark.parametrize(("heads", "ranks", "each"), [(8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 1, 1)])
def test_heads_are_divided_or_replicated(heads: int, ranks: int, each: int) -> None:
    assert heads_per_rank(heads, ranks) == each


def test_states_are_divided_among_ranks_and_scarce_groups_repeated() -> None:
    whole = mamba2_state(num_heads=8, head_size=4, state_size=6, num_groups=1, conv_kernel=4)
    split = mamba2_state(
        num_heads=8, head_size=4, state_size=6, num_groups=1, conv_kernel=4, tensor_parallel=2
    )
    assert whole == ((3, 32 + 12), (8, 4, 6))
    assert split == ((3, (32 + 24) // 2), (4, 4, 6))
    with pytest.raises(ValueError, match="num_heads=9 does not divide"):
        kda_state(num_heads=9, head_size=4, conv_kernel=4, tensor_parallel=2)
    with pytest.raises(ValueError, match="num_kv_heads=6 does not divide"):
        heads_per_rank(6, 4)


# Layers that own no cache, sinks, reserves, context parallelism.


def test_a_layer_that_shares_a_cache_reads_it_where_it_is() -> None:
    layers = {"a": FULL, "b": SharedKVSpec("a"), "encoder": EncoderOnlySpec()}
    plan = roomy(layers)
    assert plan.bytes_per_block == (FULL.page_bytes,)
    assert plan.layout.place_of("b") == plan.layout.place_of("a")
    with pytest.raises(ValueError, match="layer='encoder'"):
        plan.layout.place_of("encoder")
    with pytest.raises(ValueError, match=r"layers\['b'\] shares the cache of 'c'"):
        roomy({"a": FULL, "b": SharedKVSpec("c")})
    with pytest.raises(TypeError, match=r"layers\['a'\] must be a layer spec"):
        roomy({"a": "full"})  # pyrefly: ignore[bad-argument-type]


def test_sinks_and_copy_on_write_blocks_are_kept_back() -> None:
    sink = FullAttentionSpec(block_size=4, sink_tokens=6, **SHAPE)
    plan = roomy({"a": sink}, num_blocks_override=20, copy_on_write_blocks=3)
    assert plan.reserved_blocks == 1 + 2 + 3 and plan.usable_blocks == 14
    manager = BlockManager(plan, max_requests=1)
    assert [len(ids) for ids in manager.sink_block_ids] == [2]
    assert manager.pool.num_free_blocks == 17  # the reserve for copies is for the scheduler


@given(length=st.integers(1, 200), ranks=st.integers(1, 5))
def test_context_parallel_ranks_share_the_blocks_of_a_request(length: int, ranks: int) -> None:
    plan = plan_cache({"a": FULL}, 2**24, max_model_len=200, context_parallel=ranks)
    local = -(-length // ranks)
    assert plan.admission_blocks(length) == -(-local // 4)
    manager = BlockManager(plan, max_requests=1)
    manager.start("r")
    manager.grow("r", 0, length)
    assert manager.held_blocks() == (plan.admission_blocks(length),)


def test_context_parallelism_is_refused_where_groups_drop_tokens() -> None:
    with pytest.raises(ValueError, match=r"context_parallel=2 .* sliding @ 4"):
        roomy({"a": FULL, "b": SLIDING}, context_parallel=2)


# Groupings.


def request_bytes(plan: Plan) -> int:
    return plan.admission_blocks(plan.max_model_len) * sum(plan.bytes_per_block)


def test_least_waste_saves_a_quarter_on_20_full_and_30_sliding() -> None:
    specs = [FULL] * 20 + [SLIDING] * 30
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
    rule, least = roomy(layers), roomy(layers, grouping="least_waste")
    assert [len(g.layers) for g in rule.groups] == [20, 15, 15]
    assert [len(g.layers) for g in least.groups] == [10] * 5
    assert min(rule.unused_bytes_per_block) == 0 and not any(least.unused_bytes_per_block)
    assert request_bytes(least) < request_bytes(rule)


def test_least_waste_is_never_worse_than_the_rule_on_a_golden_case() -> None:
    gains = []
    for case in CASES:
        workers = make_workers(case)
        limits = Limits(
            max_in_flight_tokens=case["max_in_flight_tokens"],
            max_encoder_tokens=case["max_encoder_len"],
        )
        options = {
            "max_model_len": case["max_model_len"],
            "limits": limits,
            "num_blocks_override": 2**19,
            "override_beyond_memory": True,
        }
        memory = [worker["available_memory"] for worker in case["workers"]]
        rule = plan_cache(workers, memory, **options)
        least = plan_cache(workers, memory, grouping="least_waste", **options)
        gains.append(1 - request_bytes(least) / request_bytes(rule))
        assert gains[-1] >= 0, case["name"]
    print(f"least_waste saves up to {100 * max(gains):.1f} % of a request's bytes")
    assert max(gains) > 0


@pytest.mark.parametrize("grouping", ["rule", "least_waste", "packed"])
@given(layers=mixes)
def test_every_grouping_is_a_partition_and_its_pool_has_the_planned_bytes(grouping, layers):
    plan = roomy(layers, grouping=grouping)
    names = [name for group in plan.groups for name in group.layers]
    assert sorted(names) == sorted(layers)
    for index in range(len(plan.groups)):
        spans = sorted(
            (place.slot, place.offset_bytes, place.offset_bytes + place.spec.page_bytes)
            for place in map(plan.layout.place_of, plan.groups[index].layers)
        )
        for (slot, _, end), (next_slot, start, _) in itertools.pairwise(spans):
            assert slot != next_slot or end <= start  # layers of one group never overlap
        for slot, _, end in spans:
            assert end <= plan.layout.slots[slot].page_bytes
    shapes = jax.eval_shape(lambda: make_pool(plan).buffers)
    assert sum(shape.size for shape in shapes) == plan.num_blocks * plan.bytes_per_block[0]
    assert plan.num_blocks * plan.bytes_per_block[0] <= 2**24


def deepseek_v4_flash() -> dict[str, LayerSpec]:
    """43 layers: 21 compressed by 4 (with an indexer), 20 by 128, each with a window."""
    aligned = {"page_alignment_bytes": 576, "dtype": "uint8"}
    row = {"head_size": 512, "bytes_per_token": 584, **aligned}
    state = {"dtype": "f32", "page_alignment_bytes": 576}
    layers: dict[str, LayerSpec] = {}
    for i in range(43):
        layers[f"layers.{i}.window"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=128, **row
        )
        if i < 2:
            continue
        ratio = 4 if i % 2 == 0 else 128
        layers[f"layers.{i}.main"] = MLASpec(block_size=256, compress_ratio=ratio, **row)
        if ratio == 4:
            layers[f"layers.{i}.indexer"] = MLASpec(
                block_size=256, head_size=132, compress_ratio=4, **aligned
            )
        states = {"main": 2048, "index": 512} if ratio == 4 else {"main": 1024}
        block, window = (4, 8) if ratio == 4 else (8, 128)
        for name, width in states.items():
            layers[f"layers.{i}.{name}_state"] = SlidingWindowMLASpec(
                block_size=block, sliding_window=window, head_size=width, **state
            )
    return layers


def test_deepseek_v4_packs_five_groups_of_mixed_pages() -> None:
    layers = deepseek_v4_flash()
    plan = plan_cache(layers, 40 * 2**30, max_model_len=65536)
    assert len(plan.groups) == 5
    assert plan.bytes_per_block == (1_002_240,)
    assert len(plan.layout.slots) == 1
    assert plan.groups_to_zero == (True,) * 5
    with pytest.raises(ValueError, match='grouping="packed"'):
        make_groups(layers, grouping="rule")


def test_deepseek_v4_holds_far_fewer_blocks_once_it_decodes() -> None:
    plan = plan_cache(deepseek_v4_flash(), 40 * 2**30, max_model_len=65536)
    assert plan.admission_blocks(65536) == 3610 and plan.steady_blocks(65536) == 282


def test_least_waste_never_shortens_the_longest_request() -> None:
    layers = {f"l{i}": FULL if i % 6 == 5 else SLIDING for i in range(62)}
    for blocks in (30, 50, 80):
        options = {"fit_max_model_len": True, "num_blocks_override": blocks}
        rule = roomy(layers, grouping="rule", **options)
        assert roomy(layers, grouping="least_waste", **options).max_model_len >= rule.max_model_len


def test_ranks_with_the_same_layers_leave_no_more_unused() -> None:
    plan = plan_cache([{"a": FULL, "b": SLIDING}] * 4, [2**20] * 4, max_model_len=40)
    assert plan.unused_bytes_per_block == (0, 0)


def test_cross_attention_without_encoder_tokens_is_refused() -> None:
    cross = CrossAttentionSpec(block_size=4, **SHAPE)
    with pytest.raises(ValueError, match=r"limits\.max_encoder_tokens=0"):
        roomy({"x": cross})
    limits = Limits(max_encoder_tokens=4)
    with pytest.raises(KVCacheCapacityError):
        roomy({"x": cross}, memory_bytes=cross.page_bytes, limits=limits)


@pytest.mark.parametrize("length", [0, -16, 1.5])
def test_capacity_of_no_length_is_refused(length) -> None:
    plan = roomy({"a": FULL})
    for figure in (plan.requests_that_fit, plan.tokens_that_fit):
        with pytest.raises((ValueError, TypeError), match="num_tokens"):
            figure(length)
    assert plan.requests_that_fit(41) == plan.tokens_that_fit(41) == 0


def test_refusals_cross_process_boundaries() -> None:
    with pytest.raises(KVCacheCapacityError) as caught:
        roomy({"a": FULL}, num_blocks_override=2)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.longest_len == 4
    assert again.plan == caught.value.plan
    assert pickle.loads(pickle.dumps(OutOfBlocksError(3, 1))).needed_blocks == 3
    assert pickle.loads(pickle.dumps(BlockTableError(4))).flags == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": None}, "layers"),
        ({"layers": [FULL]}, "layers must map names"),
        ({"layers": {"a": FULL}, "limits": 5}, "limits must be a Limits"),
        ({"layers": {"a": FULL}, "memory_bytes": "80GiB"}, "memory_bytes must be an int"),
        ({"layers": {"a": FULL}, "copy_on_write_blocks": -1}, "copy_on_write_blocks"),
        ({"layers": {"a": FULL}, "context_parallel": 0}, "context_parallel"),
    ],
)
def test_bad_arguments_of_a_plan_are_named(options, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan_cache(**{"memory_bytes": 2**20, "max_model_len": 8, **options})


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match="grouping='best'"):
        roomy({"a": FULL}, grouping="best")


# Monotone and maximal.


@given(layers=mixes, blocks=st.integers(2, 60), more=st.integers(0, 20))
def test_more_blocks_never_shorten_the_longest_request(layers, blocks, more) -> None:
    def longest(count: int) -> int:
        try:
            plan = roomy(layers, fit_max_model_len=True, num_blocks_override=count)
        except KVCacheCapacityError:
            return 0
        assert plan.admits(plan.max_model_len)
        beyond = plan.admission_blocks(plan.max_model_len + 1)
        assert plan.max_model_len == 40 or beyond > plan.usable_blocks
        assert not plan.admits(plan.max_model_len + 1)
        return plan.max_model_len

    assert longest(blocks) <= longest(blocks + more)


@given(layers=mixes, memory=st.integers(2**12, 2**16), cut=st.integers(0, 12))
def test_more_workers_never_raise_the_answer(layers, memory, cut) -> None:
    """The same layers on two ranks (each with all of them) hold no more than on one."""
    stages = [dict(list(layers.items())[:cut]), dict(list(layers.items())[cut:])]

    def blocks(workers, budgets) -> int:
        try:
            return plan_cache(workers, budgets, max_model_len=40, fit_max_model_len=True).num_blocks
        except KVCacheCapacityError:
            return 0

    alone = blocks([layers], [memory])
    assert blocks([layers, layers], [memory, memory]) == alone
    assert blocks([layers, layers], [memory, memory // 2]) <= alone
    assert blocks(stages, [memory, memory]) >= alone  # each stage holds fewer layers


# Differences from vLLM 0.33, each with a run that shows the other answer wrong.


def lone_request(plan: Plan, length: int, step: int) -> None:
    """Runs one request to its end; OutOfBlocksError here is a request that waits for ever."""
    manager = BlockManager(plan, max_requests=1)
    manager.start("r")
    for computed in range(0, length, step):
        manager.grow("r", computed, min(computed + step, length))


def pool_of(layers: dict[str, LayerSpec], usable: int, length: int, step: int) -> Plan:
    return plan_cache(
        layers,
        2**24,
        max_model_len=length,
        fit_max_model_len=True,
        num_blocks_override=usable + 1,
        limits=Limits(max_in_flight_tokens=step),
    )


def test_a_window_as_long_as_the_request_needs_no_block_more_than_full_attention() -> None:
    """vLLM charges ``ceil(L / b) + 1`` = 11 blocks and refuses a pool of 10 that is enough."""
    window = SlidingWindowSpec(block_size=4, sliding_window=40, **SHAPE)
    plan = pool_of({"a": window}, usable=10, length=40, step=8)
    assert plan.admission_blocks(40) == 10
    lone_request(plan, 40, 8)


def test_a_chunk_that_straddles_blocks_needs_one_more() -> None:
    """vLLM charges ``ceil((c + F) / b)`` = 3 blocks, accepts, and the request hangs."""
    theirs, ours = -(-(6 + 6) // 4), CHUNKED.max_blocks(60, Limits(max_in_flight_tokens=6))
    assert (theirs, ours) == (3, 4)

    def serve(manager: BlockManager) -> None:
        manager.start("r")
        for computed in (0, *range(5, 60, 6)):
            manager.grow("r", computed, min(computed + 6, 60) if computed else 5)

    plan = pool_of({"a": CHUNKED}, usable=ours, length=60, step=6)
    serve(BlockManager(plan, max_requests=1))
    short = BlockManager(plan, max_requests=1)
    short.pool.allocate(ours - theirs)  # what is left is what vLLM would have admitted
    with pytest.raises(OutOfBlocksError):
        serve(short)


def test_a_pipeline_stage_without_cache_layers_is_legal() -> None:
    """vLLM divides by the zero bytes that a block takes there."""
    plan = plan_cache([{"a": FULL}, {}], [2**16, 2**16], max_model_len=40)
    assert plan.bytes_per_block == (FULL.page_bytes, 0)
    assert plan.num_blocks == 2**16 // FULL.page_bytes
    assert make_pool(plan, worker=1).buffers == ()


def test_an_override_beyond_memory_is_refused() -> None:
    """vLLM accepts it and runs out of memory when it allocates."""
    with pytest.raises(ValueError, match="num_blocks_override=101 is more than"):
        plan_cache({"a": FULL}, 100 * FULL.page_bytes, max_model_len=4, num_blocks_override=101)


def test_the_in_flight_share_is_counted_once_in_the_capacity_figure() -> None:
    """Charging it to every request, as vLLM does, promises 3 requests where 9 run."""
    plan = plan_cache(
        {"a": SLIDING},
        2**24,
        max_model_len=400,
        num_blocks_override=1 + 35,
        limits=Limits(max_in_flight_tokens=32),
    )
    need, steady = plan.admission_blocks(400), plan.steady_blocks(400)
    assert (need, steady) == (11, 3)
    assert plan.usable_blocks // need == 3 and plan.requests_that_fit(400) == 9
    manager = BlockManager(plan, max_requests=9)
    for request in range(9):  # one after the other prefills, the others decode
        manager.start(request)
        for computed in range(0, 96, 32):
            manager.grow(request, computed, computed + 32)
        manager.grow(request, 96, 97)
    for position in range(97, 120):
        for request in range(9):
            manager.grow(request, position, position + 1)


def test_the_null_block_is_in_no_figure() -> None:
    """101 blocks of 4 tokens hold 400 tokens, not the 404 that vLLM prints."""
    plan = plan_cache(
        {"a": FULL}, 101 * FULL.page_bytes, max_model_len=1000, fit_max_model_len=True
    )
    assert plan.num_blocks == 101 and plan.max_model_len == 400
    assert plan.tokens_that_fit(400) == 400


@given(layers=mixes, blocks=st.integers(130, 400), length=st.integers(1, 40))
def test_tokens_that_fit_are_whole_requests_and_one_shorter(layers, blocks, length) -> None:
    plan = roomy(layers, fit_max_model_len=True, num_blocks_override=blocks)
    length = min(length, plan.max_model_len)
    whole, rest = divmod(plan.tokens_that_fit(length), length)
    assert whole == plan.requests_that_fit(length) >= 1
    left = plan.usable_blocks - whole * plan.steady_blocks(length)
    assert rest == 0 or plan.admission_blocks(rest) <= left
    assert rest + 1 == length or plan.admission_blocks(rest + 1) > left


def test_absurd_sizes_neither_overflow_nor_hang() -> None:
    with pytest.raises(KVCacheCapacityError) as caught:
        plan_cache({"a": FULL}, 2**36, max_model_len=10**30)
    assert caught.value.longest_len == (2**36 // FULL.page_bytes - 1) * 4
    assert caught.value.needed_blocks == 10**30 // 4
    with pytest.raises(ValueError, match="beyond int32"):
        plan_cache({"a": FULL}, 2**80, max_model_len=10**30)
