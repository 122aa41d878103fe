"""The command ``python -m jaxkv demo``: plan, serve, and compare with the model without a cache."""

import argparse
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxkv
from jaxkv._src.demo.model import (
    KEY_SCALE,
    VALUE_SCALE,
    Model,
    Params,
    forward_step,
    init_params,
    query_dtype,
)
from jaxkv._src.demo.reference import logprobs_of

#: keys' and values' dtype -> the largest difference between two log-probabilities from rounding
BOUNDS = {"f32": 0.001, "f16": 0.003, "bf16": 0.003, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06}
BF16_QUERIES = 0.02  # instead, where the kernel rounds queries to bf16 as well
POOL_BYTES, MAX_REQUESTS, MAX_TOKENS = 300_000, 8, 64
SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 96
PROMPT_TOKENS, NEW_TOKENS = (8, 120), (8, 48)  # the fewest and the most


class Served(NamedTuple):
    """An engine, and what computes the same without a cache."""

    engine: jaxkv.Engine
    model: Model
    params: Params
    layers: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=24, help="how many to serve (default 24)")
    parser.add_argument(
        "--kv-dtype",
        default="fp8_e4m3",
        choices=tuple(BOUNDS),
        help=f"dtype of keys and values: {', '.join(BOUNDS)} (default fp8_e4m3)",
        metavar="DTYPE",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 when all that was served equals the model without a cache."""
    if options.requests < 1:
        raise ValueError(f"--requests must be at least 1, got {options.requests}")
    jax.config.update("jax_enable_x64", False)  # the model's own dtypes, whatever the shell says
    served = make_engine(demo_config(), options.kv_dtype, POOL_BYTES)
    engine = served.engine
    print(f"A small model of the Qwen3-Next shape:\n{engine.manager.plan}\n")
    prompts, samplings = make_requests(options.requests)
    print(f"Serving {len(prompts)} requests on {jax.devices()[0].device_kind} ...", flush=True)
    started = time.perf_counter()
    outputs = list(engine.generate(prompts, samplings))
    stats, seconds = engine.stats, time.perf_counter() - started
    print(
        f"  {stats.sampled_tokens:,} tokens in {stats.steps:,} steps, {seconds:.0f} s to compile "
        f"and serve\n  {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens found in "
        f"the cache, {stats.preemptions:,} requests preempted\n"
        "Computing each request once more, whole and without a cache ...",
        flush=True,
    )
    bound = bound_of(options.kv_dtype)
    difference, equal, total = compare(served, prompts, outputs)
    print(
        f"  {equal:,} of {total:,} tokens are the same; log-probabilities differ by up to "
        f"{difference:.2g} (rounding: {bound:g})"
    )
    agrees = difference <= bound  # never, if one is NaN
    verdict = "OK: the paged cache gives" if agrees else "FAILED: the paged cache does not give"
    print(f"{verdict} what the model gives without a cache.")
    return 0 if agrees else 1


def demo_config() -> dict[str, Any]:
    """Returns the configuration of the model: three layers with states and one of attention."""
    return jaxkv.load_config("qwen3-next-demo") | {"num_hidden_layers": 4}


def make_engine(
    config: Mapping[str, Any], kv_dtype: str, pool_bytes: int | None = None, num_blocks: int = 0
) -> Served:
    """Returns an engine of a random model, over a pool of these bytes or blocks."""
    layers = jaxkv.layers_from_config(config, kv_dtype=kv_dtype)
    plan = jaxkv.plan_cache(
        layers,
        pool_bytes or 2**30,
        max_model_len=jaxkv.hf_config.model_len(config),
        limits=jaxkv.Limits(max_in_flight_tokens=MAX_TOKENS),
        num_blocks_override=num_blocks or None,
    )
    model = Model(config, tuple(layers), query_dtype(kv_dtype))
    params, scales = init_params(model, jax.random.key(0)), (KEY_SCALE, VALUE_SCALE)
    engine = jaxkv.Engine(
        functools.partial(forward_step, model),
        params,
        plan,
        max_requests=MAX_REQUESTS,
        max_tokens=MAX_TOKENS,
        cache=jaxkv.make_cache(plan, max_requests=MAX_REQUESTS, scales=scales),
    )
    return Served(engine, model, params, layers)


def make_requests(count: int) -> tuple[list[list[int]], list[jaxkv.Sampling]]:
    """Returns random prompts that begin with one of a few system prompts, and their samplings."""
    rng = np.random.default_rng(0)
    systems = rng.integers(0, 256, (SYSTEM_PROMPTS, SYSTEM_TOKENS)).tolist()
    prompts, samplings = [], []
    for number in range(count):
        own = rng.integers(0, 256, rng.integers(*PROMPT_TOKENS)).tolist()
        prompts.append(systems[number % SYSTEM_PROMPTS] + own)
        length = int(rng.integers(*NEW_TOKENS))
        samplings.append(jaxkv.Sampling(max_tokens=length, temperature=0.0, logprobs=True))
    return prompts, samplings


def compare(
    served: Served, prompts: Sequence[Sequence[int]], outputs: Sequence[Any]
) -> tuple[float, int, int]:
    """Computes every request again, prompt and output at once, without a cache.

    Returns:
      The largest difference of log-probabilities, and how many picks are equal, of how many.
    """
    model = Model(served.model.config, served.model.layers)  # with queries of 32 bits
    reference = jax.jit(functools.partial(logprobs_of, model, served.layers))
    longest = max(len(prompts[output.request]) + len(output.tokens) for output in outputs)
    differences, equal = [], 0
    for output in outputs:
        tokens, start = np.array(output.tokens), len(prompts[output.request])
        ids = np.zeros(longest, np.int32)
        ids[: start + len(tokens)] = [*prompts[output.request], *output.tokens]
        logprobs = np.asarray(reference(served.params, ids))[start - 1 :][: len(tokens)]
        equal += int((logprobs.argmax(axis=-1) == tokens).sum())
        differences.append(np.abs(logprobs[np.arange(len(tokens)), tokens] - output.logprobs))
    every = np.concatenate(differences)
    return float(every.max()), equal, len(every)


def bound_of(kv_dtype: str) -> float:
    """Returns the bound for a dtype on this device; see `BOUNDS`."""
    return BF16_QUERIES if query_dtype(kv_dtype) == "bfloat16" else BOUNDS[kv_dtype]
