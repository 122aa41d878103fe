"""The cache as a whole: how it is made, scaled, placed and shown, and what its errors say."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.cache import (
    CacheError,
    CacheFlags,
    check_errors,
    expand_blocks,
    make_cache,
    set_scales,
)
from jaxkv._src.hf_config import layers_from_config, load_config, preset_names
from jaxkv._src.layout import ORDERS
from jaxkv._src.specs import FullAttentionSpec, Limits, SharedKVSpec, SlidingWindowSpec
from jaxkv.testing import assert_no_recompilation
from tests import pool_cases as cases
from tests.helpers import as_ids, hybrid_plan, needs_devices

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
LAYERS = {"a": SPEC, "b": SPEC, "shared": SharedKVSpec("a")}
MESH = Mesh(np.array(jax.devices()[:2]), ("heads",))


def plan_of(layers=LAYERS, **options):
    return jaxkv.plan_cache(
        layers, 2**20, **{"max_model_len": 8, "num_blocks_override": 8} | options
    )


PLAN = plan_of()
cache_of = functools.partial(make_cache, PLAN, max_requests=2)


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["NHD", "HND", *ORDERS])
def test_a_cache_is_zero_and_its_pool_has_the_planned_bytes(order) -> None:
    plan = cases.windows()
    cache = make_cache(plan, max_requests=3, order=order)
    assert (cache.num_bytes,) == jaxkv.planning.pool_bytes(plan)
    assert all(array.committed and not np.asarray(array).any() for array in jax.tree.leaves(cache))
    assert cache.layout.buffers.order in ORDERS and cache.num_blocks == plan.num_blocks


@pytest.mark.parametrize("name", preset_names())
def test_a_cache_has_a_buffer_for_each_page_size_and_few_arrays(name) -> None:
    """Every array of a jitted call costs the host some microseconds."""
    limits = Limits(max_encoder_tokens=1500)
    plan = jaxkv.plan_cache(
        layers_from_config(load_config(name)), 2**37, max_model_len=4096, limits=limits
    )
    make = functools.partial(make_cache, plan, max_requests=8, scales=(1.0, 1.0))
    cache = jax.eval_shape(make)
    pages = {tensor.page_bytes for tensor in plan.layout.tensors}
    assert len(cache.buffers) == len(pages) and len(jax.tree.leaves(cache)) <= 8
    apart = jax.eval_shape(functools.partial(make, stacked=False))
    assert len(apart.buffers) == len(plan.layout.tensors)
    assert cache.num_bytes == apart.num_bytes == plan.num_blocks * plan.bytes_per_block[0]


def test_each_worker_gets_the_pool_of_its_own_layers() -> None:
    workers = [{"a": SPEC}, {"b": SPEC, "c": SPEC}, {}]
    plan = jaxkv.plan_cache(workers, [2**12] * 3, max_model_len=8)
    for worker, layers in enumerate((["a"], ["b", "c"], [])):
        cache = make_cache(plan, max_requests=1, worker=worker)
        assert cache.num_bytes == plan.num_blocks * plan.bytes_per_block[worker]
        assert list(cache.layout.layer_numbers) == layers
        with pytest.raises(ValueError, match="has no cache here"):
            cache.layout.placement_of("d")


def test_a_cache_that_is_made_again_compiles_nothing() -> None:
    plan = hybrid_plan(num_blocks=24)
    for _ in range(2):
        make_cache(plan, max_requests=4, scales=(1.0, 2.0))
    with assert_no_recompilation():
        make_cache(plan, max_requests=4, scales=(2.0, 1.0))


# --- places ---------------------------------------------------------------------------


@needs_devices(2)
def test_arrays_are_committed_to_the_device_that_is_asked_for() -> None:
    last = jax.devices()[1]
    with jax.default_device(last):
        default = cache_of(scales=(1.0, 1.0))
    for cache in (default, cache_of(device=last, scales=(1.0, 1.0))):
        there = jax.device_put(2.0, jax.devices()[0])  # as of weights on another device
        cache = set_scales(cache, (there, 1.0))
        assert all(a.committed and a.devices() == {last} for a in jax.tree.leaves(cache))
    everywhere = cache_of(device=NamedSharding(MESH, PartitionSpec()), scales=(1.0, 1.0))
    assert all(
        a.sharding == NamedSharding(MESH, PartitionSpec()) for a in jax.tree.leaves(everywhere)
    )
    assert everywhere.num_bytes == default.num_bytes and everywhere.layout.num_ranks == 1
    with pytest.raises(
        ValueError, match="would shard every array of the cache; pass mesh= and axis="
    ):
        cache_of(device=NamedSharding(MESH, PartitionSpec("heads")))


@needs_devices(2)
@pytest.mark.parametrize("order", ORDERS)
def test_partition_specs_are_those_of_the_arrays(order) -> None:
    cache = cache_of(mesh=MESH, axis="heads", order=order, scales=(1.0, 1.0))
    specs = cache.partition_specs()
    assert jax.tree.structure(specs) == jax.tree.structure(cache)
    for array, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(specs), strict=True):
        assert array.sharding == NamedSharding(MESH, spec)
    assert cache.num_bytes == 2 * cache_of().num_bytes, "the plan is that of one rank"
    assert (
        "on each device" in repr(cache)
        and jax.tree.leaves(cache_of().partition_specs()) == [PartitionSpec()] * 3
    )


# --- scales ---------------------------------------------------------------------------


def scales_of(cache) -> dict[str, list[float]]:
    assert cache.scales is not None and cache.scales.dtype == jnp.float32
    return {layer: cache.scales[i].tolist() for layer, i in cache.layout.layer_numbers.items()}


def test_scales_are_given_for_all_layers_or_by_layer() -> None:
    assert cache_of().scales is None
    assert scales_of(cache_of(scales=(0.5, 2.0))) == {"a": [0.5, 2], "b": [0.5, 2]}
    cache = cache_of(scales={"b": (jnp.float32(3), np.float64(4))})
    assert scales_of(cache) == {"a": [1, 1], "b": [3, 4]}
    assert scales_of(cache_of(scales={"shared": (2, 3)})) == {"a": [2, 3], "b": [1, 1]}
    assert scales_of(set_scales(cache, (5, 6.0))) == {"a": [5, 6], "b": [5, 6]}
    traced = jax.jit(lambda cache, k: set_scales(cache, {"shared": (k, 8.0)}))
    assert scales_of(traced(cache, jnp.float32(7))) == {"a": [7, 8], "b": [3, 4]}
    assert scales_of(cache) == {"a": [1, 1], "b": [3, 4]}


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        (2.0, TypeError, "scales must be pairs .* got 2.0"),
        ({"a": 2.0}, TypeError, "scales must be pairs"),
        *(((1.0, odd), TypeError, "scales must be a number") for odd in (True, "2", None)),
        ({"c": (1.0, 1.0)}, ValueError, "layer='c' has no cache here"),
        *(
            (pair, ValueError, "scales must be finite float32 greater than 0")
            for odd in (0.0, -1.0, np.inf, np.nan, 1e-60, 1e39, 10**400, np.float64(1e-60))
            for pair in ((odd, 1.0), (1.0, odd))
        ),
    ],
)
def test_scales_that_are_none_are_refused_by_name(scales, error, message) -> None:
    for call in (
        functools.partial(set_scales, cache_of(scales=(1, 1))),
        lambda s: cache_of(scales=s),
    ):
        with pytest.raises(error, match=message):
            call(scales)
    with pytest.raises(ValueError, match=r"the cache has no scales; make it with scales=\(1.0"):
        set_scales(cache_of(), (1.0, 1.0))


# --- refusals -------------------------------------------------------------------------

WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=4, sliding_window=3)
TWO_GROUPS = plan_of({"a": SPEC, "w": WINDOW})
RANKS = plan_of({"a": SPEC}, context_parallel=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"worker": 1}, ValueError, "worker=1 is not in 0\\.\\.0"),
        ({"rank": 1}, ValueError, "rank=1 is not in 0\\.\\.0; the plan has context_parallel=1"),
        ({"axis": "heads"}, ValueError, "axis='heads' was given without mesh=: pass the mesh"),
        ({"mesh": MESH, "device": jax.devices()[0]}, ValueError, "mesh= and device= both say"),
        ({"mesh": MESH, "axis": "x"}, ValueError, r"axis='x' is not an axis of the mesh, .*heads"),
        ({"mesh": MESH}, ValueError, r"was given without axis=: .*device=NamedSharding\("),
        ({"plan": RANKS, "mesh": MESH, "axis": "heads"}, ValueError, r"pass context_parallel=\d"),
        ({"interleave_tokens": 3}, ValueError, "interleave_tokens=3 does not divide"),
                            ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused_by_name(options, error, message) -> None:
    with pytest.raises(error, match=message):
        make_cache(**{"plan": PLAN, "max_requests": 2} | options)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"mesh": MESH, "axis": "heads"}, marks=needs_devices(2))],
    ids=["one device", "a mesh"],
)
def test_a_cache_of_tables_only_has_no_bytes_to_read(options) -> None:
    cache = cache_of(tables_only=True, **options)
    batch = cases.fixed_step(PLAN)
    assert cache.buffers == () and cache.num_bytes == 0 and "no pool" in repr(cache)
    shape = jaxkv.StepShape.for_plan(PLAN, max_requests=2, max_tokens=4)
    cache, batch = jax.jit(jaxkv.apply_step)(cache, shape.idle())
    ones = jnp.ones((4, 2, 4))
    for call in (
        lambda: jaxkv.write_tokens(cache, "a", batch, ones, ones),
        lambda: jaxkv.write_rows(cache, "a", batch, jnp.ones((4, 32), jnp.uint8)),
        lambda: jaxkv.read_tokens(cache, "a", batch),
        lambda: jaxkv.read_rows(cache, "a", batch),
        lambda: jaxkv.attend(cache, "a", batch, ones),
        lambda: jaxkv.layer_view(cache, "a"),
    ):
        with pytest.raises(ValueError, match="no pool: make it without tables_only=True"):
            call()


# --- errors ---------------------------------------------------------------------------

WORDS = {
    "BAD_ROW": "a row out of range",
    "BAD_BLOCK_ID": "a block id outside the pool",
    "BAD_LOGICAL_BLOCK": "more blocks for a row than the tables have for its group",
    "NO_BLOCK": "a request lacks a block",
    "TOO_LONG": "a request with more tokens than the step's shape allows",
    "BAD_BATCH": "new tokens that are negative, more than the step's shape allows, or not where",
    "LOST_UPLOAD": "an upload was lost: the numbers of two uploads in a row have a gap",
    "REPEATED_UPLOAD": "an upload was applied twice, or to another cache. Run every upload once",
    "BAD_LAYER_INDEX": "a layer_index beyond the layers of its group",
    "STALE_BATCH": "a batch of another step than the cache's: go on with the cache",
}


@pytest.mark.parametrize("name", WORDS)
def test_each_error_flag_is_raised_in_words(name) -> None:
    flag = CacheFlags[name]
    cache = cache_of()
    check_errors(cache)
    cache = dataclasses.replace(cache, status=cache.status.at[0].set(flag))
    with pytest.raises(
        CacheError, match=f"^the device found errors: {WORDS[name]}[^;]*$"
    ) as caught:
        check_errors(cache)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is CacheError and copy.flags == caught.value.flags == flag
    assert str(copy) == str(caught.value)


def test_flags_are_distinct_bits_and_are_raised_together() -> None:
    bits = [CacheFlags[name] for name in WORDS]
    assert sorted(bits) == [2**i for i in range(len(WORDS))] and set(CacheFlags) == set(bits)
    message = str(CacheError(sum(bits)))
    assert (
        all(words in message for words in WORDS.values()) and message.count("; ") == len(bits) - 1
    )
    with pytest.raises(TypeError, match="cache must be a KVCache, got int"):
        check_errors(0)


# --- static parts ---------------------------------------------------------------------


def test_positions_are_interleaved_within_the_blocks_of_every_group() -> None:
    large, small = SPEC, FullAttentionSpec(block_size=2, num_kv_heads=4, head_size=4)
    for layers in ({"a": large, "b": small}, {"b": small, "a": large}):
        plan = plan_of(layers)
        assert {group.block_size for group in plan.groups} == {2, 4}
        assert make_cache(plan, max_requests=2, interleave_tokens=2).layout.interleave_tokens == 2
        with pytest.raises(ValueError, match="=4 does not divide the block size 2 of a group"):
            make_cache(plan, max_requests=2, interleave_tokens=4)


def test_equal_layouts_are_equal_after_pickling_and_others_are_not() -> None:
    def layout(**options):
        return cache_of(**options).layout

    one = layout()
    for same in (
        layout(),
        layout(order="NHD"),
        pickle.loads(pickle.dumps(one)),
        layout(scales=(1, 1)),
    ):
        assert same == one and hash(same) == hash(one) and same.buffers == one.buffers
    assert one.table_offsets == (0, 2), "cached values come back"
    fields = {field.name for field in dataclasses.fields(one)}
    assert {*vars(pickle.loads(pickle.dumps(one)))} == fields < {*vars(one)}, "they are left behind"
    others = [{"order": "BLNHC"}, {"stacked": False}, {"kernel_block_sizes": [2]}]
    others += [
        {"interleave_tokens": 2},
        {"tables_only": True},
        {"max_requests": 3},
        {"device": NamedSharding(MESH, PartitionSpec())},
    ]
    assert len({one, *(make_cache(PLAN, **{"max_requests": 2} | o).layout for o in others)}) == 8
    assert repr(one) == "CacheLayout(1 groups, 8 blocks, 2 rows, LBNHC)"


def test_a_cache_shows_its_sizes_and_its_first_rows() -> None:
    cache = make_cache(TWO_GROUPS, max_requests=12)
    assert (
        repr(cache) == "KVCache(12 rows of (2, 2) blocks, 8 blocks, 1,024 bytes in 1 buffer, LBNHC)"
    )
    cache = dataclasses.replace(cache, rows=cache.rows.at[1].set(as_ids([5, 6, 7, 3, 2, 1])))
    shown = cache._repr_html_()
    assert shown.count("<tr>") == 9 and ">5, 6<" in shown and ">7<" in shown and "group 1" in shown
    jax.jit(lambda cache: [cache, str(cache._repr_html_())][0])(cache)
    assert jax.eval_shape(lambda: cache)._repr_html_() is None
    jax.jit(lambda cache: cache, donate_argnums=0).lower(cache).compile()(cache)
    assert cache._repr_html_() is None or not cache.status.is_deleted()


def test_a_cache_shows_the_first_ids_of_long_rows_and_counts_all() -> None:
    plan = plan_of(max_model_len=40, num_blocks_override=16)
    cache = make_cache(plan, max_requests=9, stacked=False)
    assert "bytes in 2 buffers, LBNHC" in repr(cache)
    ids = [*range(1, 11)]
    rows = as_ids([[*ids, used] for used in range(2, 11)])
    shown = dataclasses.replace(cache, rows=rows)._repr_html_()
    for used in range(2, 10):  # the ninth row is not shown
        text = ", ".join(map(str, ids[: min(used, 8)]))
        assert f">{text}{f', ... ({used} ids)' * (used > 8)}<" in shown
    assert shown.count("... (") == 1


def test_expanded_ids_are_kept_to_the_last_that_int32_holds() -> None:
    ids = as_ids([2**30 - 1, 2**30, -1, 0])
    got = expand_blocks(ids, 2).tolist()
    assert got == [2**31 - 2, 2**31 - 1, -1, -1, -1, -1, 0, 1]
