"""`attend` over all devices of a mesh, by the kernel that each device would take alone.

The Mosaic kernels support these heads, so they run on GPUs; on a CPU, XLA attends.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv.testing import assert_no_recompilation
from tests.helpers import ON_GPU

KV_HEADS, GROUP, SIZE, REQUESTS, TOKENS, LONGEST = 8, 4, 64, 3, 96, 320
DEVICES = jax.devices()
RANKS = max(count for count in (1, 2, 4, 8) if count <= len(DEVICES))
CASES = (
    ("positions", "bf16"),
    ("heads", "bf16"),
    ("heads", "fp8_e4m3"),
    ("positions", "fp8_e4m3"),
    ("heads", "int4_per_token_head"),
)
# A prompt in chunks, next to decodes; drafts of four tokens; decodes alone.
STEPS = ({"a": 96}, {"a": 90, "b": 3}, {"a": 1, "b": 4, "c": 80}, *[{"a": 1, "b": 1, "c": 1}] * 3)


def plan_for(ranks_of_heads: int, ranks_of_positions: int, dtype: str) -> jaxkv.Plan:
    common: dict[str, Any] = {"block_size": 16, "head_size": SIZE, "dtype": dtype}
    spec = jaxkv.FullAttentionSpec(num_kv_heads=KV_HEADS // ranks_of_heads, **common)
    return jaxkv.plan_cache(
        {"a": spec, "b": spec},
        2**24,
        max_model_len=LONGEST,
        num_blocks_override=64,
        context_parallel=ranks_of_positions,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
    )


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, upload, queries, keys, values):
    cache, batch = jaxkv.apply_step(cache, upload)

    def attend(carry, layer_index):
        cache, queries = carry
        cache, out = jaxkv.attend(cache, "a", batch, queries, keys, values, layer_index=layer_index)
        return (cache, queries + out / 4), out  # so that the second layer follows from the first

    (cache, _), outs = jax.lax.scan(attend, (cache, queries), jnp.arange(2))
    return cache, outs


def serve(plan: jaxkv.Plan, dtype: str, **place: Any) -> list[np.ndarray]:
    """Returns the output of each step, float64[layers, T, heads, V]."""
    scales = (0.5, 0.25) if dtype == "fp8_e4m3" else None
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, scales=scales, **place)
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    shapes = [
        jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=n, max_query_len=longest)
        for n, longest in ((REQUESTS, 1), (TOKENS, TOKENS))
    ]
    rng, outs = np.random.default_rng(0), []
    for name in "abc":
        manager.start(name)
    for turn, work in enumerate(STEPS):
        shape = shapes[max(work.values()) > 1]
        rows = [(KV_HEADS * GROUP, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE)]
        tokens = [rng.standard_normal((shape.max_tokens, *row), np.float32) for row in rows]
        arrays = [array.astype(jnp.bfloat16) for array in tokens]
        if turn == len(STEPS) - 1:  # both shapes are compiled, and no length compiles again
            with assert_no_recompilation():
                cache, out = step(cache, manager.step(shape, work), *arrays)
        else:
            cache, out = step(cache, manager.step(shape, work), *arrays)
        outs.append(np.asarray(out, np.float64)[:, : sum(work.values())])
    jaxkv.check_errors(cache)
    return outs


@functools.cache
def on_one_device(dtype: str) -> list[np.ndarray]:
    return serve(plan_for(1, 1, dtype), dtype, device=DEVICES[0])


@pytest.mark.skipif(RANKS == 1, reason="needs two devices")
@pytest.mark.parametrize(("divided", "dtype"), CASES if ON_GPU else (CASES[0], CASES[-1]))
def test_all_devices_of_a_mesh_attend_as_one_device_does(divided: str, dtype: str) -> None:
    """Weights add up to 1, values are below 5, and both sides round each to 16 bits twice."""
    mesh = Mesh(np.array(DEVICES[:RANKS]), ("axis",))
    of_heads, of_positions = (RANKS, 1) if divided == "heads" else (1, RANKS)
    options = {"interleave_tokens": 4} if divided == "positions" else {}
    plan = plan_for(of_heads, of_positions, dtype)
    outs = serve(plan, dtype, mesh=mesh, axis="axis", **options)
    for got, wanted in zip(outs, on_one_device(dtype), strict=True):
        assert np.abs(wanted).max() > 1, "nothing was attended to"
        np.testing.assert_allclose(got, wanted, rtol=0, atol=5 * 2 * 2 * 2.0**-8)
