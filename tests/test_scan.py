"""Models that scan over their layers, and meshes whose axes are typed explicitly.

`test_pool` compares writes and reads in a scan with layers by name; here they are whole layers
with attention, in one `jax.lax.scan` with the cache in its carry.
"""

import contextlib
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxkv
from jaxkv.testing import assert_in_place, assert_same_bytes
from tests.test_attend import poisoned

REQUESTS, TOKENS, PERIODS, HEADS, SIZE = 2, 8, 2, 2, 4
WORKS = ({"a": 5, "b": 3}, {"b": 1, "a": 1}, {"a": 6})
DEVICES = jax.devices()


KV: dict[str, Any] = {"block_size": 4, "num_kv_heads": HEADS, "head_size": SIZE}


@functools.cache
def hybrid() -> jaxkv.Plan:
    """Periods of a window, a state and full attention, all on the same bytes: megabytes."""
    window = jaxkv.SlidingWindowSpec(sliding_window=6, **KV)
    layers: dict[str, Any] = {}
    for i in range(PERIODS):
        layers[f"window.{i}"] = window
        layers[f"state.{i}"] = jaxkv.StateSpec(block_size=4, shapes=((3, 4),), dtypes=("f32",))
        layers[f"full.{i}"] = jaxkv.FullAttentionSpec(**KV)
    return planned(layers, 30_000)


def planned(layers: dict[str, Any], num_blocks: int) -> jaxkv.Plan:
    limits = jaxkv.Limits(max_in_flight_tokens=TOKENS)
    sizes: dict[str, Any] = {"max_model_len": 24, "num_blocks_override": num_blocks}
    return jaxkv.plan_cache(layers, 2**40, limits=limits, **sizes)


# Of every period, as powers of two.
SCALES = {f"full.{i}": (0.5**i, 0.25) for i in range(PERIODS)}


def cache_of(plan: jaxkv.Plan) -> jaxkv.KVCache:
    scales: Any = SCALES
    return poisoned(jaxkv.make_cache(plan, max_requests=REQUESTS, scales=scales))


def shape_of(plan: jaxkv.Plan) -> jaxkv.StepShape:
    return jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)


def one_period(cache, batch, x, names, layer_index):
    """A window, a state and full attention; each reads what the one before it gave."""
    for name in names:
        if name.startswith("state"):
            (state,) = jaxkv.read_state(cache, name, batch, layer_index=layer_index)
            state = state + x[batch.last_tokens, 0, 0][:, None, None]
            cache = jaxkv.write_state(cache, name, batch, [state], layer_index=layer_index)
            requests = jnp.maximum(batch.token_requests, 0)
            x = x + state[requests, 0, 0][:, None, None] / 8
        else:
            keys = x[:, :HEADS]
            cache, out = jaxkv.attend(cache, name, batch, x, keys, -keys, layer_index=layer_index)
            x = jnp.round((x + out) * 16) / 16  # so that both ways agree to the byte
    return cache, x


def scanned(cache, upload, x):
    cache, batch = jaxkv.apply_step(cache, upload)

    def body(carry, i):
        names = ("window.0", "state.0", "full.0")
        return one_period(carry[0], batch, carry[1], names, i), None

    (cache, x), _ = lax.scan(body, (cache, x), jnp.arange(PERIODS, dtype=jnp.int32))
    return cache, x


def unrolled(cache, upload, x):
    cache, batch = jaxkv.apply_step(cache, upload)
    for i in range(PERIODS):
        names = (f"window.{i}", f"state.{i}", f"full.{i}")
        cache, x = one_period(cache, batch, x, names, None)
    return cache, x


def inputs() -> list[Any]:
    rng = np.random.default_rng(0)
    shape = (TOKENS, 2 * HEADS, SIZE)
    return [(rng.integers(-8, 9, shape) / 8).astype(np.float32) for _ in WORKS]


run_scanned = jax.jit(scanned, donate_argnums=0)


def started(plan: jaxkv.Plan) -> jaxkv.BlockManager:
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    manager.start("a")
    manager.start("b")
    return manager


def test_a_scan_over_periods_equals_the_unrolled_model() -> None:
    """To the byte, in the whole of the pool and in the outputs of every step."""
    plan, ends = hybrid(), []
    assert [len(group.layers) for group in plan.groups] == [PERIODS] * 3
    for run in (run_scanned, jax.jit(unrolled, donate_argnums=0)):
        manager, cache, outs = started(plan), cache_of(plan), []
        for work, x in zip(WORKS, inputs(), strict=True):
            cache, out = run(cache, manager.step(shape_of(plan), work), x)
            outs.append(np.asarray(out)[: sum(work.values())])
        jaxkv.check_errors(cache)
        ends.append((cache, outs))
    assert_same_bytes(*ends)
    assert all(np.isfinite(out).all() and out.any() for out in ends[0][1])


def test_a_scan_copies_nothing_as_large_as_the_pool() -> None:
    """It works on the donated buffer itself, whatever the number of periods."""
    plan = hybrid()
    cache, upload = cache_of(plan), started(plan).step(shape_of(plan), WORKS[0])
    x, pool = jnp.asarray(inputs()[0]), cache.num_bytes
    assert pool > 40 * 150_000
    text = run_scanned.lower(cache, upload, x).compile().as_text()
    copied = [math.prod(map(int, dims.split(","))) for dims in COPIES.findall(text)]
    assert max(copied, default=0) < pool / PERIODS / 10, "no copy of a layer's part either"
    sent = jax.tree.map(jnp.asarray, upload)
    cache, out = assert_in_place(scanned, cache, sent, x, max_temp_bytes=150_000)
    jaxkv.check_errors(cache)
    assert np.isfinite(np.asarray(out)).all()


# Results of copies in compiled programs, the asynchronous ones of GPUs too.
COPIES = re.compile(r"= \(?u8\[([\d,]+)\][^=]* copy(?:-start)?\(")


def test_copies_are_found_in_a_compiled_program() -> None:
    """Shows that the check above can fail."""

    def keep_both(array):
        return array, lax.dynamic_update_slice(array, jnp.zeros(3, jnp.uint8), (jnp.int32(4),))

    text = jax.jit(keep_both).lower(jnp.zeros(4096, jnp.uint8)).compile().as_text()
    assert "4096" in COPIES.findall(text)


# --- explicit axes --------------------------------------------------------------------


class Place(NamedTuple):
    """A mesh of explicit axes, what of a step lies on it, and whether it is the context's.

    queries: the axis that the model's arrays are sharded over; "": they are replicated over
      the mesh; None: they are not on it.
    """

    devices: int
    mesh_of_cache: bool
    queries: str | None
    is_context: bool
    refusal: str | None = None


SHARDED = r"float32\[8@data,2,4\] is sharded over the explicit mesh axis 'data': .* jax.shard_map"
ONE_DEVICE = "jax.set_mesh has set a mesh of 2 devices: pass mesh= and axis= to shard"
PLACES = [  # `test_sharded` has arrays that are not on a mesh of one device or of several
    Place(1, False, "", False),
    Place(1, False, "data", True),
    Place(1, False, "data", False, SHARDED),
    Place(2, True, "", False),
    Place(2, True, "data", True),
    Place(2, True, "data", False, SHARDED),
    Place(2, False, None, True, ONE_DEVICE),
]


def whole_step(cache, upload, x):
    cache, batch = jaxkv.apply_step(cache, upload)
    keys = x[:, :HEADS]
    cache = jaxkv.write_tokens(cache, "other", batch, keys, keys)
    cache, out = jaxkv.attend(cache, "full", batch, x, keys, -keys)
    return cache, (out, jaxkv.read_tokens(cache, "other", batch))


PLAIN = planned(dict.fromkeys(("full", "other"), jaxkv.FullAttentionSpec(**KV)), 40)


@functools.cache
def on_one_device() -> Any:
    upload = started(PLAIN).step(shape_of(PLAIN), WORKS[0])
    _, outs = jax.jit(whole_step)(plain_cache(), upload, inputs()[0])
    return jax.tree.map(np.asarray, outs)


def plain_cache(**options: Any) -> jaxkv.KVCache:
    return jaxkv.make_cache(PLAIN, max_requests=REQUESTS, **options)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_explicit_axes_change_nothing_or_are_refused_by_name(place: Place) -> None:
    if place.devices > len(DEVICES):
        pytest.skip("needs two devices")
    mesh = jax.make_mesh(
        (place.devices,),
        ("data",),
        axis_types=(AxisType.Explicit,),
        devices=DEVICES[: place.devices],
    )
    x = inputs()[0]
    wanted, refused = on_one_device(), contextlib.nullcontext()
    if place.refusal is not None:
        refused = pytest.raises(ValueError, match=place.refusal)
    with refused, jax.set_mesh(mesh) if place.is_context else contextlib.nullcontext():
        everywhere = {"device": NamedSharding(mesh, PartitionSpec())}
        cache = plain_cache(**everywhere if place.mesh_of_cache else {})
        if place.queries is not None:
            spec = PartitionSpec(place.queries or None)
            x = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        upload = started(PLAIN).step(shape_of(PLAIN), WORKS[0])
        cache, outs = jax.jit(whole_step)(cache, upload, x)
        jaxkv.check_errors(cache)
        assert_same_bytes(outs, wanted)
