"""A cache on a mesh holds, reads and attends to what one device with all heads does."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.pool import copy_blocks, zero_blocks
from jaxkv.testing import assert_no_recompilation
from tests.helpers import as_ids, kernels_run, needs_devices, needs_mosaic, pointers

HEADS, SIZE, TOKENS, REQUESTS, BLOCKS = 8, 4, 8, 2, 12
LAYERS = ("full.0", "full.1", "window.0", "window.1")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DEVICES = jax.devices()
SAME = PartitionSpec()
NO_PADDING = ((0, 0),) * 2  # of heads and their elements

# Sums may be taken in another order where there are fewer heads; all else agrees bit by bit.
# Outputs are means of up to 24 values up to 2, in float32; weights are exponentials of scores
# up to 16, which are sums of 4 products.
BOUND = 2 * 2 * (24 + 4 * 16) * 2.0**-24


class Setting(NamedTuple):
    """A mesh, and how a step is run on it.

    mesh: devices along each axis; the last axis is "heads".
    how: "jit": the user's jit and nothing else; "set_mesh": the same in the context of the
      mesh; "shard_map": the user's own, over all axes.
    """

    mesh: tuple[int, ...]
    types: tuple[AxisType, ...]
    how: str
    order: str = "LBNHC"
    stacked: bool = True
    columns: int | None = None  # of a rectangular batch

    def make_mesh(self) -> Mesh:
        names = ("data", "heads")[-len(self.mesh) :]
        devices = DEVICES[: math.prod(self.mesh)]
        return jax.make_mesh(self.mesh, names, axis_types=self.types, devices=devices)

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        types = "".join(axis_type.name for axis_type in self.types)
        form = ["rectangular"] * (self.columns is not None)
        return "-".join([mesh, types, self.how, self.order, *form])


SETTINGS = [
    Setting((8,), (AUTO,), "shard_map", "LBHNC", stacked=False),
    Setting((2,), (EXPLICIT,), "jit", "LHBNC", columns=5),
    Setting((2, 4), (EXPLICIT, EXPLICIT), "set_mesh", "BHLNC"),
    Setting((2, 2), (EXPLICIT, AUTO), "set_mesh", "BLHNC"),
]
RUNS = [pytest.param(of, marks=needs_devices(math.prod(of.mesh))) for of in SETTINGS]


def plan_for(ranks: int) -> jaxkv.Plan:
    """The plan of one rank: its share of the heads."""
    common = {"block_size": 4, "num_kv_heads": HEADS // ranks, "head_size": SIZE, "dtype": "bf16"}
    full = jaxkv.FullAttentionSpec(**common)
    window = jaxkv.SlidingWindowSpec(sliding_window=6, **common)
    return jaxkv.plan_cache(
        {"full.0": full, "full.1": full, "window.0": window, "window.1": window},
        2**20,
        max_model_len=24,
        num_blocks_override=BLOCKS,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
        zero_policy="always",
    )


def step(cache, upload, queries, keys, values):
    """Every layer writes its tokens, full attention attends, and all is read that is there."""
    cache, batch = jaxkv.apply_step(cache, upload)

    def layer(cache, index, number=0, layer_index=None):
        scaled = keys / (1 + index.astype(keys.dtype))
        cache = jaxkv.write_tokens(
            cache, f"window.{number}", batch, scaled, values, layer_index=layer_index
        )
        arguments = batch, queries, scaled, values
        sinks = queries[(0,) * (queries.ndim - 2)][:, 0]
        return jaxkv.attend(
            cache, f"full.{number}", *arguments, sinks=sinks, layer_index=layer_index
        )

    if cache.layout.buffers.stacked:  # as models do that scan over their layers
        cache, attended = jax.lax.scan(
            lambda cache, index: layer(cache, index, layer_index=index), cache, jnp.arange(2)
        )
    else:
        cache, first = layer(cache, jnp.int32(0), 0)
        cache, second = layer(cache, jnp.int32(1), 1)
        attended = jnp.stack([first, second])
    return cache, attended, [jaxkv.read_tokens(cache, name, batch) for name in LAYERS]


def serve(
    run: Any,
    cache: jaxkv.KVCache,
    plan: jaxkv.Plan,
    place: Callable[..., Any],
    columns: int | None = None,
) -> list[Any]:
    """Steps of two requests, one of which starts over; what each attended to and read.

    A rectangular batch gets the same tokens, and what they attend to is returned as of a flat one.
    """
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    sizes = {"tokens_per_request": columns} if columns else {"max_tokens": TOKENS}
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, **sizes)
    rng, seen, programs = np.random.default_rng(0), [], set()
    where = parts_of(cache)
    manager.start("a")
    manager.start("b")
    for turn, work in enumerate(
        [{"a": 5, "b": 3}, {"b": 3, "a": 1}, {"a": 3, "b": 5}, {"a": 1, "b": 1}, {"b": 4, "a": 4}]
    ):
        if turn == 2:  # blocks that it held are b's later on
            manager.finish("a")
            manager.start("a")
        heads = (2 * HEADS, HEADS, HEADS)
        tokens = [rng.uniform(-2, 2, (TOKENS, count, SIZE)).astype(np.float32) for count in heads]
        places = [(i, at) for i, count in enumerate(work.values()) for at in range(count)]
        if columns:
            tokens = [in_rectangle(array, places, columns) for array in tokens]
        arguments = manager.step(shape, work), *map(place, tokens)
        quiet = contextlib.nullcontext() if turn == 0 else assert_no_recompilation()
        with quiet:
            cache, attended, read = run(cache, *arguments)
            jax.block_until_ready(cache)
        programs.add(run._cache_size())
        attended = np.asarray(attended)
        if columns:
            rows = attended[:, *np.transpose(places)]
            assert np.count_nonzero(attended) == np.count_nonzero(rows), "padding"
            attended = np.pad(rows, ((0, 0), (0, TOKENS - len(places)), *NO_PADDING))
        seen.append((attended, jax.tree.map(np.asarray, read)))
        assert parts_of(cache) == where, "a device's part of the cache has moved"
    assert len(programs) == 1, "a step returns other shardings than make_cache"
    jaxkv.check_errors(cache)
    return seen


def in_rectangle(array: np.ndarray, places: list[tuple[int, int]], columns: int) -> np.ndarray:
    """Returns the tokens of a flat batch at their places in a rectangular one, NaN elsewhere."""
    found = np.full((REQUESTS, columns, *array.shape[1:]), np.nan, array.dtype)
    found[*np.transpose(places)] = array[: len(places)]
    return found


def parts_of(cache: jaxkv.KVCache) -> list[int]:
    arrays = jax.tree.leaves(cache)
    return pointers([shard.data for array in arrays for shard in array.addressable_shards])


@functools.cache
def on_one_device() -> list[Any]:
    """By a cache without a mesh, in the context of an explicit one of its device."""
    plan, run = plan_for(1), jax.jit(step, donate_argnums=0)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(EXPLICIT,), devices=DEVICES[:1])
    with jax.set_mesh(mesh):
        return serve(run, jaxkv.make_cache(plan, max_requests=REQUESTS), plan, jnp.asarray)


@pytest.mark.parametrize("setting", RUNS, ids=str)
def test_a_mesh_holds_what_one_device_holds_and_each_part_stays_in_place(setting) -> None:
    mesh, plan = setting.make_mesh(), plan_for(setting.mesh[-1])
    run, place = step, jnp.asarray
    context = jax.set_mesh(mesh) if setting.how == "set_mesh" else contextlib.nullcontext()
    with context:
        cache = jaxkv.make_cache(
            plan,
            max_requests=REQUESTS,
            mesh=mesh,
            axis="heads",
            order=setting.order,
            stacked=setting.stacked,
        )
        assert all(buffer.sharding.device_set == set(mesh.devices.flat) for buffer in cache.buffers)
        if setting.how == "shard_map":
            specs, heads = cache.partition_specs(), PartitionSpec(None, None, "heads")
            by_head = PartitionSpec(None, "heads")
            run = jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(specs, SAME, by_head, by_head, by_head),
                out_specs=(specs, heads, heads),
                check_vma=False,
            )
            place = functools.partial(jax.device_put, device=NamedSharding(mesh, by_head))
        seen = serve(jax.jit(run, donate_argnums=0), cache, plan, place, setting.columns)
    for (attended, read), (wanted, stored) in zip(seen, on_one_device(), strict=True):
        for got, expected in zip(jax.tree.leaves(read), jax.tree.leaves(stored), strict=True):
            more = expected.shape[1] - got.shape[1]  # which longer steps could need
            np.testing.assert_array_equal(np.pad(got, ((0, 0), (0, more), *NO_PADDING)), expected)
        np.testing.assert_allclose(attended, wanted, rtol=0, atol=BOUND)
        assert np.abs(wanted).max() > 0.5, "nothing was attended to"


# --- one function at a time -------------------------------------------------------------


STATE = jaxkv.plan_cache(
    {"state": jaxkv.StateSpec(block_size=4, shapes=((2, 3),), dtypes=("f32",))},
    2**20,
    max_model_len=8,
    num_blocks_override=8,
)
STATE_SHAPE = jaxkv.StepShape.for_plan(STATE, max_requests=2, max_tokens=4)


def state_step(cache, upload):
    cache, batch = jaxkv.apply_step(cache, upload)
    (state,) = jaxkv.read_state(cache, "state", batch)
    return jaxkv.write_state(cache, "state", batch, [state + 1]), state


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_states_of_a_replicated_cache_are_kept_on_every_device(types) -> None:
    devices = min(2, len(DEVICES))
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(types,), devices=DEVICES[:devices])
    manager = jaxkv.BlockManager(STATE, max_requests=2)
    manager.start("a")
    run = jax.jit(state_step, donate_argnums=0)
    with jax.set_mesh(mesh):
        cache = jaxkv.make_cache(STATE, max_requests=2, device=NamedSharding(mesh, SAME))
        for turn in range(3):
            cache, state = run(cache, manager.step(STATE_SHAPE, {"a": 1}))
            for shard in state.addressable_shards:
                assert np.unique(np.asarray(shard.data)[0]).tolist() == [turn]
            assert len(state.addressable_shards) == devices


@needs_devices(2)
@pytest.mark.parametrize(
    ("types", "implementation"),
    [(AUTO, "xla"), (EXPLICIT, "xla"), pytest.param(EXPLICIT, "mosaic_gpu", marks=needs_mosaic)],
)
def test_blocks_are_zeroed_and_copied_on_every_device_of_a_mesh(types, implementation) -> None:
    """No context tells the mesh: it is that of the arrays alone."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(types,), devices=DEVICES[:2])
    cache = jaxkv.make_cache(plan_for(2), max_requests=REQUESTS, mesh=mesh, axis="heads")
    (buffer,) = cache.buffers
    content = np.random.default_rng(0).integers(1, 256, buffer.shape, np.uint8)
    cache = dataclasses.replace(cache, buffers=(jax.device_put(content, buffer.sharding),))

    @functools.partial(jax.jit, donate_argnums=0)
    def zero_and_copy(cache, ids, pairs, ends):
        cache = zero_blocks(cache, ids, ends, implementation=implementation)
        return copy_blocks(cache, *pairs, ends, implementation=implementation)

    ids, pairs, ends = as_ids([3, 4]), as_ids([[5, 7], [6, 8]]), as_ids([1, 2])
    with kernels_run():
        (after,) = zero_and_copy(cache, ids, pairs, ends).buffers
    content[:, [6, 8]] = content[:, [5, 7]]
    content[:, [3, 4]] = 0
    np.testing.assert_array_equal(after, content)
    assert after.sharding.is_equivalent_to(buffer.sharding, buffer.ndim)


def cache_on_two(types: AxisType, **options: Any) -> jaxkv.KVCache:
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(types,), devices=DEVICES[:2])
    return jaxkv.make_cache(plan_for(2), max_requests=REQUESTS, mesh=mesh, axis="heads", **options)


@needs_devices(2)
@pytest.mark.parametrize(
    ("order", "shape"),
    [("LBNHC", (2 * BLOCKS, 4, HEADS, 2 * SIZE)), ("LHBNC", (HEADS, BLOCKS, 4, 2 * SIZE))],
)
def test_a_view_of_a_sharded_layer_has_all_heads(order, shape) -> None:
    cache = cache_on_two(EXPLICIT, order=order, stacked=order == "LBNHC")
    view = jaxkv.layer_view(cache, "full.1")
    assert view.shape == shape
    content = np.random.default_rng(0).normal(size=view.shape).astype(view.dtype)
    cache = jaxkv.with_layer_view(cache, "full.1", jax.device_put(content, view.sharding))
    first = "full.0" if order == "LBNHC" else "full.1"  # views of a stack have all layers
    np.testing.assert_array_equal(jaxkv.layer_view(cache, first), content)


# --- refusals ---------------------------------------------------------------------------


@needs_devices(2)
@pytest.mark.parametrize(
    "use",
    [
        lambda cache, batch, ones: jaxkv.write_tokens(cache, "full.0", batch, ones, ones).status,
        lambda cache, batch, ones: jaxkv.read_tokens(cache, "full.0", batch),
        lambda cache, batch, ones: jaxkv.layer_view(cache, "full.0"),
        lambda cache, batch, ones: (
            jaxkv.with_layer_view(
                cache, "full.0", jnp.zeros((2 * BLOCKS, 4, HEADS // 2, 2 * SIZE), jnp.bfloat16)
            ).status
        ),
    ],
    ids=["write_tokens", "read_tokens", "layer_view", "with_layer_view"],
)
def test_a_pool_that_a_shard_map_leaves_whole_is_refused(use) -> None:
    """A rank would write into the part of the first."""
    cache = cache_on_two(AUTO)
    shape = jaxkv.StepShape.for_plan(plan_for(2), max_requests=REQUESTS, max_tokens=TOKENS)

    def body(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return use(cache, batch, jnp.ones((TOKENS, HEADS, SIZE)))

    mapped = jax.shard_map(
        body, mesh=cache.layout.mesh, in_specs=(SAME, SAME), out_specs=SAME, check_vma=False
    )
    with pytest.raises(ValueError, match=r"the pool is sharded; .* with cache.partition_specs"):
        jax.eval_shape(mapped, cache, shape.idle())


@needs_devices(4)
def test_a_shard_map_over_another_axis_leaves_the_heads_to_each_function() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AUTO, AUTO), devices=DEVICES[:4])
    cache = jaxkv.make_cache(plan_for(2), max_requests=REQUESTS, mesh=mesh, axis="heads")
    shape = jaxkv.StepShape.for_plan(plan_for(2), max_requests=REQUESTS, max_tokens=TOKENS)

    def body(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        ones = jnp.ones((TOKENS, HEADS, SIZE))
        cache = jaxkv.write_tokens(cache, "window.0", batch, ones, ones)
        keys, _ = jaxkv.read_tokens(cache, "window.0", batch)
        view = jaxkv.layer_view(cache, "full.0")
        return jaxkv.attend(cache, "full.0", batch, ones, ones, ones)[1], keys, view

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=SAME, out_specs=SAME, axis_names={"data"}, check_vma=False
    )
    out, keys, view = jax.eval_shape(mapped, cache, shape.idle())
    assert out.shape == (TOKENS, HEADS, SIZE) and keys.shape[2:] == (HEADS, SIZE)
    assert view.shape == (2 * BLOCKS, 4, HEADS, 2 * SIZE)


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns an output of one query, [heads, K], over keys and values, [M, kv_heads, ...]."""
    keys, values = (x.repeat(len(query) // x.shape[1], axis=1) for x in (keys, values))
    weights = np.exp(np.einsum("hk,mhk->hm", query, keys) * SIZE**-0.5)
    return np.einsum("hm,mhv->hv", weights / weights.sum(axis=1, keepdims=True), values)


@needs_devices(2)
def test_latent_rows_are_on_every_device_and_those_of_an_encoder_are_divided_by_heads() -> None:
    common: dict[str, Any] = {"block_size": 4, "head_size": SIZE, "dtype": "f32"}
    plan = jaxkv.plan_cache(
        {
            "latent": jaxkv.MLASpec(value_size=SIZE // 2, **common),
            "cross": jaxkv.CrossAttentionSpec(num_kv_heads=1, **common),  # of each rank
        },
        2**20,
        max_model_len=24,
        num_blocks_override=BLOCKS,
        limits=jaxkv.Limits(max_encoder_tokens=6),
    )
    rng, work, encoder_lens = np.random.default_rng(0), {"a": 3, "b": 2}, {"a": 5, "b": 3}
    sizes = [(TOKENS, 4, SIZE), (TOKENS, SIZE), (REQUESTS, 6, 2, SIZE), (REQUESTS, 6, 2, SIZE)]
    queries, latents, keys, values = (rng.uniform(-2, 2, size) for size in sizes)

    @jax.jit
    def attend_both(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        cache, out = jaxkv.attend(cache, "latent", batch, queries, latents)
        return out, jaxkv.attend(cache, "cross", batch, queries, keys, values)[1]

    mesh = Mesh(np.array(DEVICES[:2]), ("heads",))
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, mesh=mesh, axis="heads")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    for request, length in encoder_lens.items():
        manager.start(request, encoder_tokens=length)
    latent, cross = map(np.asarray, attend_both(cache, manager.step(shape, work)))
    for token in range(5):
        request, first = (0, 0) if token < 3 else (1, 3)
        rows, seen = latents[first : token + 1, None], slice([5, 3][request])
        wanted = attended(queries[token], rows, rows[..., : SIZE // 2])
        np.testing.assert_allclose(latent[token], wanted, rtol=0, atol=BOUND)
        wanted = attended(queries[token], keys[request, seen], values[request, seen])
        np.testing.assert_allclose(cross[token], wanted, rtol=0, atol=BOUND)


@needs_devices(2)
@pytest.mark.parametrize("columns", [None, 6], ids=["flat", "rectangular"])
def test_rows_as_they_are_stored_are_those_of_all_heads_or_the_same_on_every_rank(columns) -> None:
    common: dict[str, Any] = {"block_size": 4, "head_size": SIZE, "dtype": "f32"}
    layers = {
        "full": jaxkv.FullAttentionSpec(num_kv_heads=1, **common),  # of each rank
        "latent": jaxkv.MLASpec(**common),
        "bytes": jaxkv.MLASpec(block_size=4, head_size=4, bytes_per_token=7),
    }
    plan = jaxkv.plan_cache(layers, 2**20, max_model_len=24, num_blocks_override=BLOCKS)
    mesh = Mesh(np.array(DEVICES[:2]), ("heads",))
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, mesh=mesh, axis="heads")
    sizes = {"tokens_per_request": columns} if columns else {"max_tokens": TOKENS}
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, **sizes)
    tokens = (REQUESTS, columns) if columns else (TOKENS,)
    manager, rng = jaxkv.BlockManager(plan, max_requests=REQUESTS), np.random.default_rng(0)
    manager.start("a")
    rows = {
        "full": rng.normal(size=(*tokens, 2, 2 * SIZE)).astype(np.float32),
        "latent": rng.normal(size=(*tokens, SIZE)).astype(np.float32),
        "bytes": rng.integers(0, 256, (*tokens, 7), np.uint8),
    }

    @jax.jit
    def run(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        for name, given in rows.items():
            cache = jaxkv.write_rows(cache, name, batch, given)
        return [jaxkv.read_rows(cache, name, batch)[0] for name in rows]

    for given, found in zip(rows.values(), run(cache, manager.step(shape, {"a": 5})), strict=True):
        assert len(found.addressable_shards) == 2
        first = given[0] if columns else given  # the tokens of "a"
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(shard.data[:5], first[:5][shard.index])


@needs_devices(2)
def test_heads_of_queries_that_do_not_divide_among_ranks_are_refused() -> None:
    spec = jaxkv.MLASpec(block_size=4, head_size=SIZE)
    plan = jaxkv.plan_cache({"latent": spec}, 2**20, max_model_len=24, num_blocks_override=BLOCKS)
    mesh = Mesh(np.array(DEVICES[:2]), ("heads",))
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, mesh=mesh, axis="heads")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)

    def run(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return jaxkv.attend(cache, "latent", batch, jnp.ones((TOKENS, 3, SIZE)))

    with pytest.raises(ValueError, match=r"a multiple of 2 \(1 on each of 2 devices"):
        jax.eval_shape(run, cache, shape.idle())


def one_axis() -> Mesh:
    return Mesh(np.array(DEVICES[:1]), ("heads",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": "heads"}, "axis='heads' was given without mesh=: pass the mesh with this"),
        ({"axis": "model", "mesh": one_axis()}, "axis='model' is not an axis of the mesh"),
        ({"device": DEVICES[0], "mesh": one_axis()}, "mesh= and device= both say"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        jaxkv.make_cache(plan_for(1), max_requests=REQUESTS, **options)


def test_states_of_a_sharded_cache_are_refused_outside_of_shard_map() -> None:
    cache = jaxkv.make_cache(STATE, max_requests=2, mesh=one_axis(), axis="heads")

    def run(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        for use in (
            lambda: jaxkv.read_state(cache, "state", batch),
            lambda: jaxkv.write_state(cache, "state", batch, [jnp.zeros((2, 2, 3))]),
        ):
            refused = r"layer='state' .*: call this inside jax\.shard_map"
            with pytest.raises(ValueError, match=refused):
                use()

    jax.eval_shape(run, cache, STATE_SHAPE.idle())


def test_states_of_a_sharded_cache_are_each_rank_s_own_inside_of_shard_map() -> None:
    ranks = min(2, len(DEVICES))
    mesh = Mesh(np.array(DEVICES[:ranks]), ("heads",))
    cache = jaxkv.make_cache(STATE, max_requests=2, mesh=mesh, axis="heads")
    manager = jaxkv.BlockManager(STATE, max_requests=2)
    manager.start("a")

    def body(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)
        rank = jax.lax.axis_index("heads").astype(jnp.float32)
        return jaxkv.write_state(cache, "state", batch, [state + 1 + rank]), state[None]

    specs = cache.partition_specs()
    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, SAME),
            out_specs=(specs, PartitionSpec("heads")),
            check_vma=False,
        )
    )
    for turn in range(3):
        cache, states = run(cache, manager.step(STATE_SHAPE, {"a": 1}))
        np.testing.assert_array_equal(states[:, 0, 0, 0], [turn * (1 + r) for r in range(ranks)])


def test_packed_rows_of_a_sharded_cache_are_refused_outside_of_shard_map() -> None:
    spec = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="nvfp4")
    plan = jaxkv.plan_cache({"packed": spec}, 2**20, max_model_len=8, num_blocks_override=8)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=4)
    cache = jaxkv.make_cache(plan, max_requests=2, mesh=one_axis(), axis="heads")

    def run(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        rows = jnp.zeros((4, spec.token_bytes), jnp.uint8)
        for use in (
            lambda: jaxkv.write_rows(cache, "packed", batch, rows),
            lambda: jaxkv.read_rows(cache, "packed", batch),
            lambda: jaxkv.layer_view(cache, "packed"),
        ):
            refused = r"its own heads.* call this inside jax\.shard_map"
            with pytest.raises(ValueError, match=refused):
                use()

    jax.eval_shape(run, cache, shape.idle())
