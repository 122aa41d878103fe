"""`attend` by the Mosaic kernel: the pages, tables and lengths that it is handed, for each layer.

On a machine without a GPU the kernel runs in interpret mode. That it attends rightly to what it is
handed is tested in `tests/kernels/test_paged_attention.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from pallas_kernels import _capability
from tests.helpers import ON_GPU, kernels_run, needs_mosaic

KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64}
HEADS, LENGTH = 2, 160
LAYERS = {
    "full.0": jaxkv.FullAttentionSpec(**KV),
    "full.1": jaxkv.FullAttentionSpec(**KV),
    "window.0": jaxkv.SlidingWindowSpec(sliding_window=20, **KV),
    "window.1": jaxkv.SlidingWindowSpec(sliding_window=20, **KV),
    "chunked.0": jaxkv.ChunkedAttentionSpec(chunk_size=48, **KV),
    "chunked.1": jaxkv.ChunkedAttentionSpec(chunk_size=48, **KV),
}


class Setting(NamedTuple):
    dtype: str = "bf16"
    kernel_block_size: int | None = None
    stacked: bool | None = None
    tokens: int = 2  # of a step
    scales: tuple[float, float] | None = None
    interpreted: tuple[str, ...] = ()  # layers that attend in interpret mode, which is slow


SETTINGS = {
    "decode": Setting(interpreted=("chunked.1",)),
    "decode of fp8, unstacked": Setting(
        "fp8_e4m3", 8, stacked=False, scales=(0.5, 0.25), interpreted=("window.1",)
    ),
    "chunks and decodes": Setting(tokens=24, kernel_block_size=8),
}


def plan_of(setting: Setting) -> jaxkv.Plan:
    return jaxkv.plan_cache(
        {name: dataclasses.replace(spec, dtype=setting.dtype) for name, spec in LAYERS.items()},
        2**30,
        max_model_len=LENGTH,
        num_blocks_override=64,
        limits=jaxkv.Limits(max_in_flight_tokens=96),
        zero_policy="never",
    )


def prefilled(setting: Setting) -> tuple[jaxkv.KVCache, jaxkv.BlockManager, jaxkv.Plan]:
    """A poisoned cache with two requests, of 130 and 31 tokens."""
    plan = plan_of(setting)
    sizes = [setting.kernel_block_size or 16] * len(plan.groups)
    cache = jaxkv.make_cache(
        plan,
        max_requests=3,
        kernel_block_sizes=sizes,
        stacked=setting.stacked,
        scales=setting.scales,
    )
    buffers = tuple(jnp.full_like(buffer, 0xFF) for buffer in cache.buffers)
    cache, manager = (
        dataclasses.replace(cache, buffers=buffers),
        jaxkv.BlockManager(plan, max_requests=3),
    )
    shape = jaxkv.StepShape.for_plan(plan, max_requests=3, max_tokens=96)
    for name in "ab":
        manager.start(name)

    @jax.jit
    def step(cache, upload, keys, values):
        cache, batch = jaxkv.apply_step(cache, upload)
        for i, layer in enumerate(LAYERS):
            cache = jaxkv.write_tokens(cache, layer, batch, keys[i], values[i])
        return cache

    rng = np.random.default_rng(0)
    for work in ({"a": 90}, {"a": 40, "b": 31}):
        rows = rng.standard_normal((2, len(LAYERS), 96, 1, 64), np.float32)
        cache = step(cache, manager.step(shape, work), *jnp.asarray(rows, jnp.bfloat16))
    return cache, manager, plan


def shape_of(setting: Setting, plan: jaxkv.Plan) -> jaxkv.StepShape:
    longest = 1 if setting.tokens == 2 else None
    sizes: dict[str, Any] = {"max_requests": 3, "max_tokens": setting.tokens}
    return jaxkv.StepShape.for_plan(plan, max_query_len=longest, **sizes)


@needs_mosaic
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernel_and_xla_attend_alike(name: str, monkeypatch) -> None:
    """Sums of weights up to 1 with values up to 5, each rounded to 16 bits once by either."""
    if not ON_GPU:
        from pallas_kernels import _paged_attention_pieces

        monkeypatch.setattr(_paged_attention_pieces, "OPERANDS_IN_REGISTERS", False)
        monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 2)
    setting = SETTINGS[name]
    layers = list(LAYERS) if ON_GPU else setting.interpreted
    if not layers:
        pytest.skip("takes a minute in interpret mode; on a GPU")
    cache, manager, plan = prefilled(setting)
    shape = shape_of(setting, plan)
    upload = manager.step(shape, {"a": 1, "b": 1} if setting.tokens == 2 else {"a": 7, "b": 1})
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.standard_normal((shape.max_tokens, HEADS, 64)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((2, shape.max_tokens, 1, 64)), jnp.bfloat16)

    @jax.jit
    def written(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        for layer in LAYERS:
            cache = jaxkv.write_tokens(cache, layer, batch, *rows)
        return cache, batch

    cache, batch = written(cache, upload)
    bound = 5 * 2 * 2 * 2.0**-8
    call = jax.jit(jaxkv.attend, static_argnums=1, static_argnames="implementation")
    for layer in layers:
        sinks = jnp.ones(HEADS) if layer.startswith("chunked") else None
        _, wanted = call(cache, layer, batch, queries, sinks=sinks, implementation="xla")
        with kernels_run():
            _, out = call(cache, layer, batch, queries, sinks=sinks, implementation="mosaic_gpu")
        assert np.isfinite(np.asarray(out, float)).all() and np.asarray(wanted, float).any()
        np.testing.assert_allclose(np.asarray(out, float), np.asarray(wanted, float), atol=bound)
    if setting.stacked is not False:  # a traced layer is lowered for CUDA, too
        options = {"period": jnp.int32(1), "implementation": "mosaic_gpu"}
        traced = call.trace(cache, "full.0", batch, queries, **options)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("options", "query_dtype", "reason"),
    [
        ({}, "float32", "queries are float32"),
        ({"order": "HND"}, "bfloat16", "order='LBHNC', and the kernel takes LBNHC"),
        ({"rectangular": True}, "bfloat16", "the batch is rectangular"),
        ({"chunk": 40}, "bfloat16", "chunk_size=40 is not a multiple of block_size=16"),
        ({"head_size": 40}, "bfloat16", "keys are 40 wide"),
        ({"latent": True}, "bfloat16", "layer='a' keeps mla"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_xla_or_says_why(
    options, query_dtype, reason
) -> None:
    size = options.get("head_size", 64)
    spec: Any = jaxkv.FullAttentionSpec(**{**KV, "head_size": size})
    if "chunk" in options:
        spec = jaxkv.ChunkedAttentionSpec(chunk_size=options["chunk"], **KV)
    if "latent" in options:
        spec = jaxkv.MLASpec(block_size=16, head_size=64, value_size=64)
    plan = jaxkv.plan_cache({"a": spec}, 2**22, max_model_len=64)
    cache = jaxkv.make_cache(plan, max_requests=2, order=options.get("order", "NHD"))
    sizes = {"tokens_per_request": 4} if "rectangular" in options else {"max_tokens": 8}
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, **sizes)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    manager.start("r")
    cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, {"r": 3}))
    queries = jnp.ones((*batch.token_shape, 1, size), query_dtype)
    _, out = jax.jit(jaxkv.attend, static_argnums=1)(cache, "a", batch, queries)
    assert out.shape[:-1] == queries.shape[:-1] and np.isfinite(np.asarray(out, float)).all()
    with pytest.raises(NotImplementedError, match=f'"mosaic_gpu": {reason}'):
        jaxkv.attend(cache, "a", batch, queries, implementation="mosaic_gpu")


@needs_mosaic
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_cache_over_a_mesh_is_attended_to_by_the_kernel_of_each_device() -> None:
    spec = jaxkv.FullAttentionSpec(**KV)
    plan = jaxkv.plan_cache({"a": spec}, 2**22, max_model_len=64)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = jaxkv.make_cache(plan, max_requests=2, mesh=mesh, axis="heads")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8)

    @jax.jit
    def step(cache, upload, queries):
        cache, batch = jaxkv.apply_step(cache, upload, implementation="mosaic_gpu")
        return jaxkv.attend(cache, "a", batch, queries, implementation="mosaic_gpu")

    traced = step.trace(cache, shape.idle(), jnp.ones((8, 2 * HEADS, 64), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and f"tensor<8x{HEADS}x64xbf16>" in text  # its own heads
