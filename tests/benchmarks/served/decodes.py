"""Decode steps of a whole model by the dtype of keys and values: the device's part alone.

One program runs a step. Keys and values of the tokens before it are random, and only written, so
that long contexts cost seconds; `served` computes prompts, through the engine.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxkv
from jaxkv._src.specs import PER_TOKEN_HEAD
from jaxkv.step import COMPILER_OPTIONS
from tests.benchmarks import timing
from tests.benchmarks.served import profiling
from tests.benchmarks.served.comparison import TINY, text_config
from tests.benchmarks.served.decoders import Decoder, Params
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

DTYPES = (None, "fp8", *PER_TOKEN_HEAD)
ROOM = 3 * 2**30  # beside weights and pool


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Requests, the lengths at which their decodes are timed, and steps of each."""

    requests: int
    lengths: tuple[int, ...]
    steps: int
    chunk: int  # tokens of a request that are written at once


def run(report: Report, peer: VllmPeer | None) -> None:
    """Times decode steps over keys and values of each dtype."""
    del peer
    report.title("Decode steps of Llama-3.1-8B's shape by the dtype of keys and values")
    config = by_size(full=text_config("llama-3.1-8b"), small=TINY, smallest=TINY)
    smaller = Sizes(3, (8, 24), 2, 4)
    sizes = by_size(full=Sizes(256, (1024, 4096), 32, 32), small=smaller, smallest=smaller)
    params = Decoder.from_config(config).init_params(jax.random.key(0), config["torch_dtype"])
    build = functools.partial(Decodes, config, params=params, sizes=sizes)
    first, *others = by_size(full=DTYPES, small=DTYPES, smallest=DTYPES[-1:])
    built = [build(first)]  # by itself, because products are tuned by time, and once
    with ThreadPoolExecutor() as pool:
        built += pool.map(build, others)
    for decodes in built:
        for length, found in decodes.time(params, sizes).items():
            dtype = decodes.kv_dtype or config["torch_dtype"]
            text = f"{sizes.requests} x {length}, {dtype:<24} {found['step'] / 1e3:8.3f} ms; us: "
            text += ", ".join(f"{kind} {us:.0f}" for kind, us in found.items() if us)
            report.note(text, seconds=found["step"] / 1e6)


class Decodes:
    """The programs of a decoder with keys and values of a dtype, compiled.

    lengths: those of the sizes that fit the device.
    """

    def __init__(self, config: Any, kv_dtype: str | None, params: Params, sizes: Sizes):
        self.kv_dtype = kv_dtype
        self.decoder = Decoder.from_config(config, kv_dtype=kv_dtype)
        page = sum(spec.page_bytes for spec in self.decoder.layers.values())
        block_size = next(iter(self.decoder.layers.values())).block_size
        self.lengths: tuple[int, ...] = ()
        for length in sizes.lengths:
            longest = length + sizes.chunk + 2 * (sizes.steps + profiling.STEPS)
            blocks = sizes.requests * (longest // block_size + 2) + 8
            if blocks * page > room(params):
                break
            self.plan = jaxkv.plan_cache(self.decoder.layers, blocks * page, max_model_len=longest)
            self.lengths = *self.lengths, length
        self.count = sizes.requests
        self.shapes = [
            jaxkv.StepShape.for_plan(
                self.plan, max_requests=self.count, max_tokens=self.count * each, max_query_len=each
            )
            for each in (sizes.chunk, 1)
        ]
        cache = jax.eval_shape(lambda: jaxkv.make_cache(self.plan, max_requests=self.count))
        self.fill, self.step = (
            jax.jit(function, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
            .lower(params, cache, shape.idle(), jnp.zeros(shape.max_tokens, jnp.int32))
            .compile()
            for function, shape in zip((self._fill, self._step), self.shapes, strict=True)
        )

    def _fill(
        self, params: Params, cache: jaxkv.KVCache, upload: Any, ids: Array
    ) -> tuple[jaxkv.KVCache, Array]:
        step = jaxkv.StepContext(cache, upload, token_ids=ids)
        for name, spec in self.decoder.layers.items():
            shape = 2, len(ids), spec.num_kv_heads, spec.head_size
            keys, values = jax.random.normal(jax.random.key(step.positions[0]), shape, jnp.bfloat16)
            step.call(jaxkv.write_tokens, name, keys, values)
        return step.done(), ids

    def _step(
        self, params: Params, cache: jaxkv.KVCache, upload: Any, ids: Array
    ) -> tuple[jaxkv.KVCache, Array]:
        step = jaxkv.StepContext(cache, upload, token_ids=ids)
        logits = self.decoder.forward(params, step)
        return step.done(), jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def time(self, params: Params, sizes: Sizes) -> dict[int, dict[str, float]]:
        """Returns for each length the microseconds of a step, and those of its kinds of work."""
        self.cache = jaxkv.make_cache(self.plan, max_requests=self.count)
        manager = jaxkv.BlockManager(self.plan, max_requests=self.count)
        for name in range(self.count):
            manager.start(name)
        found: dict[int, dict[str, float]] = {}

        def advance(program: Any, shape: Any, each: int, ids: Array) -> Array:
            upload = manager.step(shape, dict.fromkeys(range(self.count), each))
            self.cache, ids = program(params, self.cache, upload, ids)
            return ids

        for length in self.lengths:
            ids = jnp.zeros(self.count * sizes.chunk, jnp.int32)
            while manager.num_computed_tokens(0) + sizes.chunk <= length - sizes.steps // 2:
                advance(self.fill, self.shapes[0], sizes.chunk, ids)
            step = functools.partial(advance, self.step, self.shapes[1], 1)
            ids = step(jnp.arange(self.count, dtype=jnp.int32))
            jax.block_until_ready(ids)
            started = time.perf_counter()
            for _ in range(sizes.steps):
                ids = step(ids)
            jax.block_until_ready(ids)
            found[length] = {"step": 1e6 * (time.perf_counter() - started) / sizes.steps}
            if timing.ON_GPU:
                again = functools.partial(step, ids)
                events = timing.gpu_events(again, timing.poll, 4)
                found[length] |= profiling.by_kind(events, len(self.decoder.layers))
        del self.cache
        return found


def room(params: Params) -> int:
    """Returns the bytes of the device for a pool."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**40)
    return limit - sum(array.nbytes for array in jax.tree.leaves(params)) - ROOM
