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
from tests.helpers import ON_GPU, kernels_run, needs_devices, needs_mosaic

KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64}
GROUP, LENGTH = 2, 160  # query heads of a KV head; the longest request
LAYERS = {
    "full.0": jaxkv.FullAttentionSpec(**KV),
    "full.1": jaxkv.FullAttentionSpec(**KV),
    "window.0": jaxkv.SlidingWindowSpec(sliding_window=20, **KV),
    "window.1": jaxkv.SlidingWindowSpec(sliding_window=20, **KV),
    "chunked.0": jaxkv.ChunkedAttentionSpec(chunk_size=40, **KV),
    "chunked.1": jaxkv.ChunkedAttentionSpec(chunk_size=40, **KV),
}


class Setting(NamedTuple):
    dtype: str = "bf16"
    kernel_block_size: int | None = None
    stacked: bool | None = None
    tokens: int = 2  # of a step
    order: str = "NHD"
    kv_heads: int = 1
    padding_rows: int = 0  # of a page
    rectangular: bool = False
    scales: tuple[float, float] | None = None
    interpreted: tuple[str, ...] = ()  # layers that attend in interpret mode, which is slow


SETTINGS = {
    "decode": Setting(),
    "decode of fp8, unstacked": Setting(
        "fp8_e4m3", 8, stacked=False, scales=(0.5, 0.25), interpreted=("window.1",)
    ),
    "chunks and decodes": Setting(tokens=24, kernel_block_size=8),
    "by head, padded": Setting(
        kernel_block_size=8,
        order="HND",
        kv_heads=2,
        padding_rows=32,
        interpreted=("chunked.1",),
    ),
    "rectangular, heads apart": Setting(tokens=24, order="LHBNC", kv_heads=2, rectangular=True),
    "all layers of a block, int8": Setting(
        "int8", tokens=24, order="BLHNC", kv_heads=2, scales=(0.1, 0.1)
    ),
}


def plan_of(setting: Setting) -> jaxkv.Plan:
    options: dict[str, Any] = {"dtype": setting.dtype, "num_kv_heads": setting.kv_heads}
    layers = {name: dataclasses.replace(spec, **options) for name, spec in LAYERS.items()}
    if setting.padding_rows:
        page = layers["full.0"].data_bytes + setting.padding_rows * 2 * 64 * 2
        layers = {
            name: dataclasses.replace(spec, page_bytes_padded=page) for name, spec in layers.items()
        }
    return jaxkv.plan_cache(
        layers,
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
        order=setting.order,
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
        rows = rng.standard_normal((2, len(LAYERS), 96, setting.kv_heads, 64), np.float32)
        cache = step(cache, manager.step(shape, work), *jnp.asarray(rows, jnp.bfloat16))
    return cache, manager, plan


def shape_of(setting: Setting, plan: jaxkv.Plan) -> jaxkv.StepShape:
    longest = 1 if setting.tokens == 2 else None
    sizes: dict[str, Any] = {"max_requests": 3, "max_tokens": setting.tokens}
    if setting.rectangular:
        sizes = {"max_requests": 3, "tokens_per_request": setting.tokens // 3}
    return jaxkv.StepShape.for_plan(plan, max_query_len=longest, **sizes)


@needs_mosaic
@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernel_and_xla_attend_alike(name: str, monkeypatch) -> None:
    """Sums of weights up to 1 with values up to 5, each rounded to 16 bits once by either."""
    if not ON_GPU:
        from pallas_kernels import _mosaic

        monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
        monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 2)
    setting = SETTINGS[name]
    layers = ("full.1", "window.0", "chunked.1") if ON_GPU else setting.interpreted
    if not layers:
        pytest.skip("takes a minute in interpret mode; on a GPU")
    cache, manager, plan = prefilled(setting)
    shape = shape_of(setting, plan)
    upload = manager.step(shape, {"a": 1, "b": 1} if setting.tokens == 2 else {"a": 7, "b": 1})
    rng = np.random.default_rng(1)
    tokens = (3, setting.tokens // 3) if setting.rectangular else (setting.tokens,)
    heads = setting.kv_heads * GROUP
    queries = jnp.asarray(rng.standard_normal((*tokens, heads, 64)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((2, *tokens, setting.kv_heads, 64)), jnp.bfloat16)

    @jax.jit
    def written(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        for layer in layers:
            cache = jaxkv.write_tokens(cache, layer, batch, *rows)
        return cache, batch

    cache, batch = written(cache, upload)
    bound = 5 * 2 * 2 * 2.0**-8
    call = jax.jit(jaxkv.attend, static_argnums=1, static_argnames="implementation")
    for layer in layers:
        sinks = jnp.ones(heads) if layer.startswith("chunked") else None
        _, wanted = call(cache, layer, batch, queries, sinks=sinks, implementation="xla")
        with kernels_run():
            _, out = call(cache, layer, batch, queries, sinks=sinks, implementation="mosaic_gpu")
        assert np.isfinite(np.asarray(out, float)).all() and np.asarray(wanted, float).any()
        np.testing.assert_allclose(np.asarray(out, float), np.asarray(wanted, float), atol=bound)
    if setting.stacked is not False:  # a traced layer is lowered for CUDA, too
        options = {"layer_index": jnp.int32(1), "implementation": "mosaic_gpu"}
        traced = call.trace(cache, "full.0", batch, queries, **options)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("options", "query_dtype", "reason"),
    [
        ({}, "float32", "queries are float32"),
        ({"head_size": 40}, "bfloat16", "keys are 40 wide"),
        (
            {"head_size": 64, "value_size": 64},
            "bfloat16",
            "latent vectors are 64 wide and their valu",
        ),
        ({"page_bytes_padded": 4224}, "bfloat16", "pages, or the bytes between them, are not mult"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_xla_or_says_why(
    options, query_dtype, reason
) -> None:
    if "value_size" in options:
        spec: Any = jaxkv.MLASpec(block_size=16, **options)
    else:
        spec = jaxkv.FullAttentionSpec(**{**KV, **options})
    plan = jaxkv.plan_cache({"a": spec}, 2**22, max_model_len=64)
    cache = jaxkv.make_cache(plan, max_requests=2)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    manager.start("r")
    cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, {"r": 3}))
    queries = jnp.ones((*batch.token_shape, 1, spec.head_size), query_dtype)
    _, out = jax.jit(jaxkv.attend, static_argnums=1)(cache, "a", batch, queries)
    assert out.shape[:-1] == queries.shape[:-1] and np.isfinite(np.asarray(out, float)).all()
    with pytest.raises(NotImplementedError, match=f'"mosaic_gpu": {reason}'):
        jaxkv.attend(cache, "a", batch, queries, implementation="mosaic_gpu")


@needs_mosaic
@pytest.mark.parametrize(
    "selected", [None, np.arange(8 * 70, dtype=np.int32).reshape(8, 70) % 9 - 1]
)
def test_the_kernel_for_latents_and_xla_attend_alike(selected: Any) -> None:
    """Without a GPU the kernel is only lowered for CUDA; interpret mode has tests of its own."""
    spec = jaxkv.MLASpec(block_size=16, head_size=192, value_size=128)
    plan = jaxkv.plan_cache({"a": spec}, 2**22, max_model_len=64)
    cache = jaxkv.make_cache(plan, max_requests=2)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=8)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    manager.start("r")
    cache, batch = jax.jit(jaxkv.apply_step)(cache, manager.step(shape, {"r": 7}))
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.standard_normal((8, 16, 192)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((8, 192)), jnp.bfloat16)
    call = jax.jit(jaxkv.attend, static_argnums=1, static_argnames="implementation")
    given = {"selected": selected} if selected is not None else {}
    traced = call.trace(cache, "a", batch, queries, rows, **given, implementation="mosaic_gpu")
    assert "_decode" in traced.lower(lowering_platforms=("cuda",)).as_text()
    if ON_GPU:
        out, wanted = [
            np.asarray(
                call(cache, "a", batch, queries, rows, **given, implementation=name)[1], float
            )
            for name in ("mosaic_gpu", "xla")
        ]
        np.testing.assert_allclose(out, wanted, atol=5 * 2 * 2 * 2.0**-8)
        assert wanted[:7].any() and not out[7:].any()


@needs_mosaic
@needs_devices(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_over_a_mesh_is_attended_to_by_the_kernel_of_each_device(ranks: int) -> None:
    """Heads are divided, or positions interleaved."""
    spec = jaxkv.FullAttentionSpec(**KV)
    plan = jaxkv.plan_cache({"a": spec}, 2**22, max_model_len=64, context_parallel=ranks)
    mesh = jax.make_mesh((2,), ("axis",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = jaxkv.make_cache(plan, max_requests=2, mesh=mesh, axis="axis")
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=2, max_query_len=1)

    @jax.jit
    def step(cache, upload, queries):
        cache, batch = jaxkv.apply_step(cache, upload, implementation="mosaic_gpu")
        return jaxkv.attend(cache, "a", batch, queries, implementation="mosaic_gpu")

    traced = step.trace(cache, shape.idle(), jnp.ones((2, 2 * GROUP, 64), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    own, dtype = (GROUP, "bf16") if ranks == 1 else (2 * GROUP, "f32")
    assert "mosaic_gpu" in text and f"tensor<2x{own}x64x{dtype}>" in text  # its own heads, or parts
