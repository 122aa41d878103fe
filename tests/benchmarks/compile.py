"""Seconds to trace, lower and compile one shape of a model, with the cache and without.

The model is a decoder in plain JAX with a Python loop over its layers. Without a cache the keys of
each layer go to its output as they are, so that the rest of the program is the same. On a machine
without a GPU the Mosaic kernels are lowered for CUDA, and nothing is compiled.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jaxkv
from tests.benchmarks import timing
from tests.benchmarks.timing import ON_GPU, Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

HEADS, KV_HEADS, SIZE, WIDTH, INNER, VOCABULARY = 32, 8, 128, 4096, 14336, 128_256
REQUESTS, LONGEST = 64, 16_384
BYTES_PER_LAYER = 2**28


class Case(NamedTuple):
    """A model of Llama-3.1-8B's shape, and the tokens of a step."""

    layers: int
    tokens: int

    @property
    def names(self) -> list[str]:
        return [f"layers.{i}" for i in range(self.layers)]

    @property
    def decodes(self) -> bool:
        return self.tokens == REQUESTS

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {'decode' if self.decodes else 'prefill'} {self.tokens}"


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title("Trace, lowering and compilation of one shape, seconds of the host's clock")
    if timing.size != "smallest":
        _run_once(Case(1, REQUESTS))  # imports
    for tokens in by_size(full=(REQUESTS, 2048), small=(REQUESTS, 2048), smallest=(REQUESTS,)):
        for layers in by_size(full=(1, 8, 32), small=(1, 8, 32), smallest=(1,)):
            case = Case(layers, tokens)
            ours, without = _run_once(case), _run_once(case, cached=False)
            report.note(
                f"{case.name:<28} {_text(ours)}; without a cache {_text(without)}",
                **{f"cached_{name}": value for name, value in ours.items()},
                **without,
            )


def _text(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


def _run_once(case: Case, cached: bool = True) -> dict[str, float]:
    """Returns the seconds of each stage, with nothing left from an earlier run."""
    jax.clear_caches()
    plan = _plan_of(case)
    cache = jax.eval_shape(lambda: jaxkv.make_cache(plan, max_requests=REQUESTS))
    shape = jaxkv.StepShape.for_plan(
        plan,
        max_requests=REQUESTS,
        max_tokens=case.tokens,
        batch_size=REQUESTS if case.decodes else 8,
        max_query_len=1 if case.decodes else None,
    )
    step = functools.partial(_step, case, cached)
    jitted = jax.jit(step, donate_argnums=1, compiler_options=jaxkv.step.COMPILER_OPTIONS)
    tokens = jax.ShapeDtypeStruct((case.tokens,), jnp.int32)
    seconds = {}

    def timed(stage: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        seconds[stage] = time.perf_counter() - started
        return result

    traced = timed("trace", lambda: jitted.trace(_weights(case), cache, shape.idle(), tokens))
    lowered = timed("lower", lambda: traced.lower(lowering_platforms=("cuda",)))
    if ON_GPU:
        timed("compile", lowered.compile)
    return seconds


def _plan_of(case: Case) -> jaxkv.Plan:
    spec = jaxkv.FullAttentionSpec(block_size=16, num_kv_heads=KV_HEADS, head_size=SIZE)
    layers = dict.fromkeys(case.names, spec)
    return jaxkv.plan_cache(layers, case.layers * BYTES_PER_LAYER, max_model_len=LONGEST)


def _weights(case: Case) -> Any:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layer = {
        "qkv": array(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE),
        "out": array(HEADS * SIZE, WIDTH),
        "up": array(WIDTH, 2 * INNER),
        "down": array(INNER, WIDTH),
        "norms": array(2, WIDTH),
    }
    ends = {"embed": array(VOCABULARY, WIDTH), "head": array(WIDTH, VOCABULARY)}
    return {"layers": [layer] * case.layers, **ends}


def _step(
    case: Case, cached: bool, weights: Any, cache: jaxkv.KVCache, upload: Any, tokens: Array
) -> tuple[jaxkv.KVCache, Array]:
    cache, batch = jaxkv.apply_step(cache, upload)
    x = weights["embed"][tokens]
    for name, layer in zip(case.names, weights["layers"], strict=True):
        rows = (_norm(x, layer["norms"][0]) @ layer["qkv"]).reshape(case.tokens, -1, SIZE)
        queries, keys, values = jnp.split(rows, [HEADS, HEADS + KV_HEADS], axis=1)
        queries, keys = _rotate(queries, batch.positions), _rotate(keys, batch.positions)
        if cached:
            cache, out = jaxkv.attend(
                cache, name, batch, queries, keys, values, implementation="mosaic_gpu"
            )
        else:
            out = queries + jnp.repeat(keys + values, HEADS // KV_HEADS, axis=1)
        x = x + out.reshape(case.tokens, -1) @ layer["out"]
        gate, up = jnp.split(_norm(x, layer["norms"][1]) @ layer["up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    return cache, jnp.argmax(x[batch.last_tokens] @ weights["head"], axis=-1)


def _norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weight[None]


def _rotate(x: Array, positions: Array) -> Array:
    half = SIZE // 2
    rates = 5e5 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * rates[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
