"""Layers that are alike share one trace and one lowering, in a Python loop over layers.

Also: the batch of a step knows which cache it belongs to.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.engine._device import OF_SEVERAL
from jaxkv._src.step._apply import _shared
from jaxkv.cache import CacheFlags
from jaxkv.testing import assert_in_place
from tests.helpers import HAS_MOSAIC, ON_GPU, needs_devices, needs_mosaic

KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
TOKENS, REQUESTS, HEADS = 64, 2, 4
FULL = jaxkv.FullAttentionSpec(**KV)
WINDOW = jaxkv.SlidingWindowSpec(sliding_window=20, **KV)
STATE = jaxkv.StateSpec(block_size=16, shapes=((4, 16), (8, 8)), dtypes=("bf16", "f32"))
MAMBA = jaxkv.StateSpec(block_size=16, shapes=((3, 256), (2, 64, 64)), dtypes=("bf16", "f32"))
LATENT = jaxkv.MLASpec(block_size=16, head_size=192, value_size=128)


def attend(cache, layer, batch, x, by=None):
    keys = x[:, : x.shape[1] // 2]
    cache, out = jaxkv.attend(cache, layer, batch, x, keys, -keys, implementation=by)
    return cache, x + out / 2


def attend_to_latents(cache, layer, batch, x):
    queries = jnp.concatenate([x, x, x], axis=-1)
    cache, out = jaxkv.attend(cache, layer, batch, queries, queries[:, 0])
    return cache, x + out[..., :64]


def write_then_read(cache, layer, batch, x):
    keys = x[:, : KV["num_kv_heads"]]
    cache = jaxkv.write_tokens(cache, layer, batch, keys, -keys)
    keys, values = jaxkv.read_tokens(cache, layer, batch, dtype=x.dtype)
    return cache, x + (keys + values).sum(dtype=x.dtype)


def write_rows_then_read(cache, layer, batch, x):
    rows = jnp.concatenate([x[:, :2], x[:, 2:]], axis=-1)
    cache = jaxkv.write_rows(cache, layer, batch, rows)
    return cache, x + jaxkv.read_rows(cache, layer, batch).sum(dtype=x.dtype)


def keep_states(cache, layer, batch, x):
    states = jaxkv.read_state(cache, layer, batch)
    cache = jaxkv.write_state(cache, layer, batch, [state + 1 for state in states])
    return cache, x + sum(state.sum(dtype=x.dtype) for state in states)


def recur(cache, layer, batch, x):
    qkv, gates = x.reshape(len(x), -1), x[:, :2, 0]
    weights = jnp.ones((4, qkv.shape[1]), x.dtype)
    given = {"conv_weights": weights, "num_groups": 1}
    cache, out = jaxkv.mamba2(cache, layer, batch, qkv, -gates, gates, **given)
    return cache, x + jnp.concatenate([out, out], axis=1)


class Model(NamedTuple):
    """A model of alike layers: what it does in each, and the functions that do it.

    functions: name -> how often it is lowered, whatever the number of layers.
    """

    layers: Mapping[str, Any]
    run: Callable[..., Any]
    functions: Mapping[str, int]


def of(count: int, spec: Any) -> dict[str, Any]:
    return {f"{spec.kind}.{i}": spec for i in range(count)}


MODELS = {
    "attend": Model(of(3, FULL), attend, {"_attend": 1}),
    # Two windows for each full layer: three groups, two of which are unlike in growth.
    "attend in many groups": Model(of(4, WINDOW) | of(2, FULL), attend, {"_attend": 2}),
    "latents": Model(of(2, LATENT), attend_to_latents, {"_attend": 1}),
    "tokens": Model(of(3, FULL), write_then_read, {"_write_tokens": 1, "_read_tokens": 1}),
    "rows": Model(of(3, FULL), write_rows_then_read, {"_write_rows": 1, "_read_rows": 1}),
    "recurrent": Model(of(2, MAMBA), recur, {"_recur": 1}),
    "states": Model(of(3, STATE), keep_states, {"_write_state": 1, "_read_state": 1}),
}


def plan_of(model: Model, num_blocks: int = 64, **options: Any) -> jaxkv.Plan:
    return jaxkv.plan_cache(
        model.layers,
        2**40,
        max_model_len=96,
        num_blocks_override=num_blocks,
        override_beyond_memory=True,
        **options,
    )


def step(model: Model, cache: Any, upload: Any, x: Any) -> Any:
    cache, batch = jaxkv.apply_step(cache, upload)
    for layer in model.layers:
        cache, x = model.run(cache, layer, batch, x)
    return cache, x


def lowered(model: Model, plan: jaxkv.Plan, max_tokens: int = TOKENS, **options: Any) -> str:
    """Returns the program of a step for a GPU; with one token it is a decode."""
    requests = min(REQUESTS, max_tokens)
    cache = jaxkv.make_cache(plan, max_requests=requests, **options)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=requests, max_tokens=max_tokens)
    heads = HEADS * (cache.layout.num_ranks if cache.layout.heads_axis else 1)
    x = jnp.ones((max_tokens, heads, 64), jnp.bfloat16)
    run = jax.jit(functools.partial(step, model), donate_argnums=0)
    return run.trace(cache, shape.idle(), x).lower(lowering_platforms=("cuda",)).as_text()


def count_functions(text: str, model: Model) -> dict[str, int]:
    """Returns how many functions of each name a program has; jax numbers those after the first."""
    found = re.findall(r"func\.func private @(\w+?)(?:_\d+)?\(", text)
    return {name: found.count(name) for name in model.functions}


@pytest.mark.parametrize(("name", "stacked"), [*((x, None) for x in MODELS), ("attend", False)])
def test_layers_that_are_alike_are_lowered_once(name: str, stacked: bool | None) -> None:
    model = MODELS[name]
    text = lowered(model, plan_of(model), stacked=stacked)
    assert count_functions(text, model) == model.functions


def test_layers_that_share_a_page_are_lowered_once() -> None:
    """They differ in the byte at which they begin there."""
    wide = jaxkv.SlidingWindowSpec(sliding_window=20, **{**KV, "num_kv_heads": 8})
    model = Model(of(4, FULL), attend, {"_attend": 1})
    plan = plan_of(model._replace(layers={**model.layers, "wide": wide}), grouping="packed")
    places = [plan.layout.placement_of(layer) for layer in model.layers]
    assert len({place.tensor for place in places}) == 1
    assert len({place.offset_bytes for place in places}) == len(model.layers)
    assert count_functions(lowered(model, plan), model) == model.functions


@needs_devices(2)
@pytest.mark.parametrize(("ranks", "is_context"), [(1, False), (2, True)])
def test_layers_over_a_mesh_are_lowered_once(ranks: int, is_context: bool) -> None:
    """Twice without the mesh in the context: jax tells arrays of the mesh from the first input."""
    mesh = jax.make_mesh((2,), ("axis",), axis_types=(jax.sharding.AxisType.Auto,))
    model = MODELS["attend"]
    plan = plan_of(model, context_parallel=ranks)
    with jax.set_mesh(mesh) if is_context else contextlib.nullcontext():
        text = lowered(model, plan, mesh=mesh, axis="axis")
    assert count_functions(text, model) == {"_attend": 1 if is_context else 2}


def test_a_layer_of_another_form_is_lowered_by_itself() -> None:
    """Shows that the counts above can differ."""
    wide = jaxkv.FullAttentionSpec(**{**KV, "head_size": 64, "dtype": "fp8_e4m3"})
    model = Model(of(3, FULL) | {"wide": wide}, attend, {"_attend": 2})
    assert count_functions(lowered(model, plan_of(model)), model) == model.functions


def test_positions_are_lowered_once() -> None:
    """However many layers ask for them."""

    def turned(cache: Any, layer: str, batch: jaxkv.StepBatch, x: jax.Array) -> Any:
        return attend(cache, layer, batch, x * batch.positions[:, None, None].astype(x.dtype))

    model = Model(of(3, FULL), turned, {"_positions": 1})
    assert count_functions(lowered(model, plan_of(model)), model) == model.functions


@needs_mosaic
def test_kernels_are_as_many_as_for_one_layer() -> None:
    model = Model(of(3, FULL), functools.partial(attend, by="mosaic_gpu"), {})
    text = lowered(model, plan_of(model), max_tokens=1)
    assert text.count("custom_call @mosaic_gpu") == 3  # one writes, and two attend


@needs_mosaic
def test_the_convolution_of_a_decode_is_a_part_of_its_kernel() -> None:
    spec = jaxkv.StateSpec(block_size=16, shapes=((3, 512), (2, 128, 128)), dtypes=("bf16", "f32"))

    def run(cache: Any, layer: str, batch: jaxkv.StepBatch, x: jax.Array) -> Any:
        qkv, gates = jnp.concatenate([x, x], axis=1).reshape(1, -1), x[:, 0, :2]
        given = {"conv_weights": jnp.ones((4, 512), x.dtype), "num_key_heads": 1}
        cache, out = jaxkv.gated_delta(
            cache, layer, batch, qkv, -gates, gates, implementation="mosaic_gpu", **given
        )
        return cache, x + out.sum(dtype=x.dtype)

    model = Model(of(2, spec), run, {})
    assert lowered(model, plan_of(model), max_tokens=1).count("custom_call @mosaic_gpu") == 1


# --- in place -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stacked"),
    [*((x, None) for x in ("attend", "tokens", "states", "recurrent")), ("attend", False)],
)
def test_sharing_copies_no_pool(name: str, stacked: bool | None) -> None:
    if name == "states" and not (HAS_MOSAIC or ON_GPU):
        pytest.skip("XLA's CPU backend of jax 0.10 drops barriers before it places copies")
    model = MODELS[name]
    plan = plan_of(model, num_blocks={"states": 40_000, "recurrent": 200}.get(name, 2000))
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, stacked=stacked)
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    manager.start("a")
    upload = jax.tree.map(jnp.asarray, manager.step(shape, {"a": 20}))
    smallest = min(buffer.size for buffer in cache.buffers)
    assert smallest > 2e6
    x = jnp.ones((TOKENS, HEADS, 64), jnp.bfloat16)
    run = functools.partial(step, model)
    cache, _ = assert_in_place(run, cache, upload, x, max_temp_bytes=smallest // 2)
    jaxkv.check_errors(cache)


# --- batches of other steps -----------------------------------------------------------


class Loop:
    def __init__(self) -> None:
        self.plan = plan_of(MODELS["attend"])
        self.cache = jaxkv.make_cache(self.plan, max_requests=REQUESTS)
        self.manager = jaxkv.BlockManager(self.plan, max_requests=REQUESTS)
        self.shape = jaxkv.StepShape.for_plan(self.plan, max_requests=REQUESTS, max_tokens=TOKENS)
        self.manager.start("a")

    def upload(self) -> jaxkv.blocks.Upload:
        return self.manager.step(self.shape, {"a": 3})


X = jnp.ones((TOKENS, HEADS, 64), jnp.bfloat16)
apply = jax.jit(jaxkv.apply_step)
each = jax.jit(attend, static_argnums=1, donate_argnums=0)


@jax.jit
def attend_in_old(cache, upload):
    _, batch = jaxkv.apply_step(cache, upload)
    return attend(cache, "full.0", batch, X)[0]


def drops_the_cache(loop: Loop) -> Any:
    return attend_in_old(loop.cache, loop.upload())


def keeps_an_old_batch(loop: Loop) -> Any:
    cache, batch = apply(loop.cache, loop.upload())
    cache, _ = apply(cache, loop.upload())
    cache, _ = each(cache, "full.0", batch, X)
    return cache


def writes_by_an_old_batch(loop: Loop) -> Any:
    cache, batch = apply(loop.cache, loop.upload())
    cache, _ = apply(cache, loop.upload())
    return jaxkv.write_tokens(cache, "full.0", batch, X[:, :2], X[:, :2])


@pytest.mark.parametrize("mistake", [drops_the_cache, keeps_an_old_batch, writes_by_an_old_batch])
def test_a_batch_of_another_step_is_reported(mistake: Callable[..., Any]) -> None:
    cache = mistake(Loop())
    assert int(cache.error_flags) == CacheFlags.STALE_BATCH
    with pytest.raises(jaxkv.CacheError, match="a batch of another step than the cache's"):
        jaxkv.check_errors(cache)


def test_errors_of_a_step_survive_a_cache_that_is_dropped() -> None:
    """The batch brings them to the cache that goes on."""
    loop = Loop()
    loop.upload()  # and never runs it
    cache = drops_the_cache(loop)
    assert (
        int(cache.error_flags) & (CacheFlags.STALE_BATCH | CacheFlags.LOST_UPLOAD)
        == CacheFlags.STALE_BATCH | CacheFlags.LOST_UPLOAD
    )


@pytest.mark.parametrize("in_scan", [False, True])
def test_a_batch_of_this_step_is_not_reported(in_scan: bool) -> None:
    """In an idle step, too, and by a traced period."""
    loop = Loop()
    cache = loop.cache

    def run(cache, batch):
        if not in_scan:
            for layer in MODELS["attend"].layers:
                cache, _ = attend(cache, layer, batch, X)
            return cache

        def body(cache, i):
            return jaxkv.attend(cache, "full.0", batch, X, layer_index=i)[0], None

        return jax.lax.scan(body, cache, jnp.arange(3, dtype=jnp.int32))[0]

    for upload in (loop.upload(), loop.shape.idle(), loop.upload()):
        cache = jax.jit(run)(*apply(cache, upload))
    jaxkv.check_errors(cache)
    assert cache.status.tolist() == [0, 2]


def test_the_batch_of_a_step_outlives_the_donated_cache() -> None:
    loop = Loop()
    cache, batch = apply(loop.cache, loop.upload())
    after, _ = each(cache, "full.0", batch, X)
    jaxkv.check_errors(after)
    assert batch.status.tolist() == [0, 1]
    status = jnp.array([0, 1], jnp.int32)
    shared = _shared(status)  # by a call outside of jit
    status.delete()
    assert shared.tolist() == [0, 1]


def test_xla_knows_the_options_for_programs_with_a_pool() -> None:
    """It refuses an option of another name."""
    known = jaxkv.step.COMPILER_OPTIONS | OF_SEVERAL
    assert jax.jit(jnp.negative, compiler_options=known)(1.0) == -1
    unknown = {f"{name}_of_old": value for name, value in known.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(jnp.negative, compiler_options=unknown)(1.0)
