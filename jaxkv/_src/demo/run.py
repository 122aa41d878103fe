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
BF16_QUERIES = 0.02  # instead of that for bf16, where the kernel rounds queries as well
POOL_BYTES, MAX_REQUESTS, MAX_TOKENS = 300_000, 8, 64
SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 96
PROMPT_TOKENS, NEW_TOKENS = (8, 120), (8, 48)  # the fewest and the most
Prompts = Sequence[Sequence[int]]


class Comparison(NamedTuple):
    """The largest difference of log-probabilities, and how many picks are equal, of how many."""

    largest_difference: float
    num_equal: int
    num_tokens: int


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
    config = demo_config()
    layers = jaxkv.layers_from_config(config, kv_dtype=options.kv_dtype)
    plan = make_plan(config, layers, POOL_BYTES)
    print(f"A small model of the Qwen3-Next shape, with {len(layers)} layers:\n{plan}\n")
    model = Model(config, tuple(layers), query_dtype(options.kv_dtype))
    params = init_params(model, jax.random.key(0))
    engine = make_engine(model, params, plan)
    prompts, samplings = make_requests(options.requests)
    print(f"Serving {len(prompts)} requests on {jax.devices()[0].device_kind} ...", flush=True)
    started = time.perf_counter()
    outputs = serve(engine, prompts, samplings)
    stats, seconds = engine.stats, time.perf_counter() - started
    print(
        f"  {stats.sampled_tokens:,} tokens in {stats.steps:,} steps, {seconds:.0f} s to compile "
        f"and serve\n  {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens found in "
        f"the cache, {stats.preemptions:,} requests preempted\n"
        "Computing each request once more, whole and without a cache ...",
        flush=True,
    )
    found = compare(model, params, layers, prompts, outputs)
    agrees = found.largest_difference <= bound_of(options.kv_dtype)  # never, if one is NaN
    print(
        f"  {found.num_equal:,} of {found.num_tokens:,} tokens are the same; log-probabilities "
        f"differ by up to {found.largest_difference:.2g} (rounding: {bound_of(options.kv_dtype):g})"
    )
    verdict = "OK: the paged cache gives" if agrees else "FAILED: the paged cache does not give"
    print(f"{verdict} what the model gives without a cache.")
    return 0 if agrees else 1


def demo_config() -> dict[str, Any]:
    """Returns the configuration of the model: three layers with states and one of attention."""
    return jaxkv.load_config("qwen3-next-demo") | {"num_hidden_layers": 4}


def make_plan(config: Mapping[str, Any], layers: Mapping[str, Any], num_bytes: int) -> jaxkv.Plan:
    """Returns a plan of the layers for the steps of `make_engine`."""
    limits = jaxkv.Limits(max_in_flight_tokens=MAX_TOKENS)
    longest = jaxkv.hf_config.model_len(config)
    return jaxkv.plan_cache(layers, num_bytes, max_model_len=longest, limits=limits)


def make_engine(model: Model, params: Params, plan: jaxkv.Plan) -> jaxkv.Engine:
    """Returns an engine of the model over a cache of the plan."""
    scales = KEY_SCALE, VALUE_SCALE
    return jaxkv.Engine(
        functools.partial(forward_step, model),
        params,
        plan,
        max_requests=MAX_REQUESTS,
        max_tokens=MAX_TOKENS,
        cache=jaxkv.make_cache(plan, max_requests=MAX_REQUESTS, scales=scales),
    )


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


def serve(
    engine: jaxkv.Engine, prompts: Prompts, samplings: Sequence[jaxkv.Sampling]
) -> dict[int, Any]:
    """Returns the output of each prompt, by its number."""
    return {output.request: output for output in engine.generate(prompts, samplings)}


def compare(
    model: Model, params: Params, layers: Mapping[str, Any], prompts: Prompts, outputs: Mapping
) -> Comparison:
    """Computes every request anew, prompt and served tokens at once, and compares the results."""
    model = Model(model.config, model.layers)  # with queries of 32 bits
    reference = jax.jit(functools.partial(logprobs_of, model, layers))
    longest = max(len(prompts[name]) + len(output.tokens) for name, output in outputs.items())
    differences, equal = [], 0
    for name, output in outputs.items():
        tokens, ids = np.array(output.tokens), np.zeros(longest, np.int32)
        whole = [*prompts[name], *output.tokens]
        ids[: len(whole)] = whole
        rows = np.asarray(reference(params, ids))[len(prompts[name]) - 1 : len(whole) - 1]
        equal += int((rows.argmax(axis=-1) == tokens).sum())
        logprobs = np.take_along_axis(rows, tokens[:, None], axis=-1)[:, 0]
        differences.append(np.abs(logprobs - output.logprobs))
    every = np.concatenate(differences)
    return Comparison(float(every.max()), equal, len(every))


def bound_of(kv_dtype: str) -> float:
    """Returns the bound for a dtype on this device; see `BOUNDS`."""
    return BF16_QUERIES if query_dtype(kv_dtype) == "bfloat16" else BOUNDS[kv_dtype]
