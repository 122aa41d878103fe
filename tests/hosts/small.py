"""A cache that forks, copies, zeroes and sleeps, and an engine, over any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from tests.engine_models import forward, make_params, make_plan

HEADS, SIZE, TOKENS = 4, 4, 8


def small_plan(ranks: int) -> jaxkv.Plan:
    common = {"block_size": 4, "num_kv_heads": HEADS // ranks, "head_size": SIZE, "dtype": "f32"}
    layers = {
        "full": jaxkv.FullAttentionSpec(**common),
        "window": jaxkv.SlidingWindowSpec(sliding_window=6, **common),
    }
    return jaxkv.plan_cache(
        layers,
        2**20,
        max_model_len=24,
        num_blocks_override=24,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
        zero_policy="always",
    )


@functools.partial(jax.jit, donate_argnums=0)
def small_step(cache, upload, queries, keys):
    cache, batch = jaxkv.apply_step(cache, upload)
    cache = jaxkv.write_tokens(cache, "window", batch, keys, -keys)
    return jaxkv.attend(cache, "full", batch, queries, keys, -keys)


def serve_small(mesh: Mesh, seed: int = 0, nap: bool = True) -> dict[str, Any]:
    """Forks, copies, zeroes and sleeps. Returns this process's part of all arrays, by place."""
    plan = small_plan(mesh.shape["heads"])
    cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads", scales=(1.0, 1.0))
    cache = jaxkv.set_scales(cache, {"full": (0.5, 0.25)})
    stale = jax.jit(lambda buffer: buffer + jnp.uint8(171))
    cache = dataclasses.replace(cache, buffers=tuple(map(stale, cache.buffers)))
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=TOKENS, forks=2)
    manager, rng = jaxkv.BlockManager(plan, max_requests=4), np.random.default_rng(seed)
    outs = []

    def step(work: dict[str, int]) -> None:
        nonlocal cache
        queries, keys = (rng.normal(size=(TOKENS, n, SIZE)) for n in (2 * HEADS, HEADS))
        upload = manager.step(shape, work)
        jaxkv.step.check_same_upload(upload, mesh)
        cache, out = small_step(cache, upload, queries.astype(np.float32), keys.astype(np.float32))
        outs.append(parts_of(out, mesh))

    manager.start("a")
    manager.start("b")
    step({"a": 5, "b": 3 - seed})
    manager.fork("a", ["c"])
    step({"c": 1, "b": 3})
    if nap:
        cache = jaxkv.wake_up(jaxkv.sleep(cache, chunk_bytes=1024))
    manager.finish("b")
    manager.start("d")
    step({"d": 6, "a": 1})
    step({"c": 2, "d": 3})
    jaxkv.check_errors(cache)
    kept = [parts_of(array, mesh) for array in jax.tree.leaves(cache)]
    if nap:
        cache = jaxkv.wake_up(jaxkv.sleep(cache, level=2), reset_scales=True)
        step({"d": 1})
        jaxkv.check_errors(cache)
    return {"outs": outs, "cache": kept, "programs": small_step._cache_size()}


def generate(mesh: Mesh) -> list[list[int]]:
    """Returns the tokens of an engine, two samples of each prompt."""
    plan = make_plan(("full",), ranks=mesh.size)
    cache = jaxkv.make_cache(plan, max_requests=4, mesh=mesh, axis="heads")
    params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
    engine = jaxkv.Engine(forward, params, plan, max_requests=4, max_tokens=16, cache=cache)
    sampling = jaxkv.Sampling(max_tokens=7, n=2, temperature=0.8, seed=5)
    outputs = engine.generate([[1, 2, 3], [4, 5], [6] * 9], sampling)
    return [o.tokens for o in sorted(outputs, key=lambda o: (o.request, o.sample))]


def parts_of(array: jax.Array, mesh: Mesh) -> dict[int, np.ndarray]:
    """The parts that lie on devices of this process, by the devices' places in the mesh."""
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    return {places[shard.device]: np.asarray(shard.data) for shard in array.addressable_shards}
