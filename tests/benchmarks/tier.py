"""Blocks in host memory: their copies, steps beside these, prefixes and preempted requests."""

import functools
import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxkv
from jaxkv.blocks import Chunk, Moves
from tests.benchmarks.served import comparison, workloads
from tests.benchmarks.served.jaxkv_engine import Server
from tests.benchmarks.served.workloads import Prefill, Trace
from tests.benchmarks.sleep import plan_of
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

CHUNK = 16  # blocks, the most that are copied together


class Sizes(NamedTuple):
    """Sizes of a run; a page of a layer has 64 KiB.

    weights: of one layer of a step that stands for a model's.
    config: of a model that is served whole.
    prompt: tokens of the prefix that comes back.
    burst: requests that come at once; the pool holds half of them.
    """

    layers: int
    num_blocks: int
    weights: tuple[int, int]
    steps: int
    decodes: int
    config: Mapping[str, Any]
    prompt: int
    burst: Trace


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # its offloading is part of its engine
    tiny = functools.partial(
        Sizes, config=comparison.TINY, prompt=48, burst=Trace(4, (24, 25), (16, 17))
    )
    sizes = by_size(
        full=Sizes(
            *(32, 4096, (4096, 57_344), 200, 256),
            config=comparison.text_config("llama-3.1-8b"),
            prompt=32_768,
            burst=Trace(64, (2048, 2049), (1024, 1025)),
        ),
        small=tiny(4, 128, (256, 512), 20, 64),
        smallest=tiny(2, 48, (32, 64), 3, 4),
    )
    _time_copies(report, sizes)
    _time_idle_steps(report, sizes)
    _serve(report, sizes)


# --- copies -----------------------------------------------------------------------------


def _time_copies(report: Report, sizes: Sizes) -> None:
    report.title("Blocks to host memory and back, GB/s of the host's clock, and steps beside them")
    plan = plan_of(sizes.num_blocks * sizes.layers * 2**16, sizes.layers)
    cache, memory = jaxkv.make_cache(plan, max_requests=8), jaxkv.HostBlocks()
    cache, numbers = memory.warm_up(cache), iter(range(1, 1_000_000))
    chunks = max(1, min(16, sizes.num_blocks // CHUNK - 1))
    num_bytes = chunks * CHUNK * plan.layouts[0].bytes_per_block
    weights = [jnp.full(sizes.weights, 0.01, jnp.bfloat16) for _ in range(sizes.layers)]
    tokens = jnp.ones((8, sizes.weights[0]), jnp.bfloat16)

    def moves(*, load: bool) -> Moves:
        number = next(numbers)
        made = [
            Chunk(chunk, 0, np.arange(CHUNK * chunk, CHUNK * (chunk + 1), dtype=np.int32))
            for chunk in range(1, chunks + 1)
        ]
        if load:
            return Moves(number, (), tuple(made), tuple(chunk.number for chunk in made))
        return Moves(number, tuple(made), (), ())

    seconds: dict[str, list[float]] = {"stored": [], "loaded": []}
    for turn in range(6):
        name = "loaded" if turn % 2 else "stored"
        began = time.perf_counter()
        cache = memory.move(cache, moves(load=bool(turn % 2)))
        jax.block_until_ready((cache, memory._chunks))
        seconds[name].append(time.perf_counter() - began)
    for name, found in seconds.items():
        rate = num_bytes / min(found[1:]) / 1e9
        text = f"{num_bytes / 2**20:g} MiB {name}"
        report.note(f"{text:<44} {rate:8.1f} GB/s, at first {num_bytes / found[0] / 1e9:.1f}")
    alone = beside = 0.0
    for moving in (False, True, False, True):
        began = time.perf_counter()
        for number in range(sizes.steps):
            if moving and number % max(1, sizes.steps // 8) == 0:
                cache = memory.move(cache, moves(load=bool(number * 8 // sizes.steps % 2)))
            tokens, cache = _step(weights, tokens, cache)
        jax.block_until_ready((tokens, cache))
        each = (time.perf_counter() - began) / sizes.steps
        alone, beside = (alone, each) if moving else (each, beside)
    report.note(
        f"{'a step; with some GB of moves beside steps':<44} {1e3 * alone:8.3f}; "
        f"{1e3 * beside:.3f} ms, {beside / alone:.3f}",
        alone=alone,
        beside=beside,
    )


@functools.partial(jax.jit, donate_argnums=(1, 2))
def _step(weights: list[Array], tokens: Array, cache: jaxkv.KVCache) -> tuple[Array, Any]:
    for matrix in weights:
        tokens = jnp.tanh(tokens @ matrix) @ matrix.T * 1e-3
    return tokens, cache


def _time_idle_steps(report: Report, sizes: Sizes) -> None:
    """Times the host's part of steps that move nothing."""
    found: dict[bool, list[float]] = {False: [], True: []}
    plan = plan_of((8 * sizes.decodes + 8) * 4 * 2**16, 4)
    for has_tier in (False, True, False, True):
        memory = jaxkv.HostMemory(num_bytes=2**30) if has_tier else None
        manager = jaxkv.BlockManager(plan, max_requests=sizes.decodes, host_memory=memory)
        work = dict.fromkeys(range(sizes.decodes), 1)
        for name in work:
            manager.start(name)
        shape = jaxkv.StepShape.for_plan(plan, max_requests=sizes.decodes, max_tokens=sizes.decodes)
        for _ in range(plan.max_model_len - 1):
            began = time.perf_counter()
            manager.step(shape, work)
            manager.take_moves()
            found[has_tier].append(1e6 * (time.perf_counter() - began))
    without, with_tier = (statistics.median(found[has_tier]) for has_tier in (False, True))
    name = f"host time of a step of {sizes.decodes} decodes"
    report.note(f"{name:<44} {without:8.1f} us, with a tier that is idle {with_tier:.1f}")


# --- served -----------------------------------------------------------------------------


def _serve(report: Report, sizes: Sizes) -> None:
    """Times requests that preempt each other, and prompts that come back."""
    report.title("A burst of which the pool holds half, and a prefix from host memory")
    burst, rates = sizes.burst, dict[bool, float]()
    for has_tier in by_size(full=(False, True), small=(False, True), smallest=(True,)):
        server = _server(sizes, has_tier=has_tier)
        figures = workloads.run(server, burst)
        rates[has_tier] = figures.tokens / figures.seconds
        stats = server.engine.manager.tier_stats()
        name = f"burst of {burst.requests}, {'parked' if has_tier else 'computed again'}"
        report.note(
            f"{name:<52} {rates[has_tier]:8.1f} tokens/s, "
            f"{server.engine.stats.preemptions} preemptions, "
            f"{0 if stats is None else stats.resumed_tokens} tokens resumed",
            rate=rates[has_tier],
        )
        if has_tier:
            _time_prefix(report, sizes, server)
        del server  # and its weights
        gc.collect()
    if len(rates) > 1:
        report.note(f"{'parked to computed again':<52} {rates[True] / rates[False]:8.2f}")


def _time_prefix(report: Report, sizes: Sizes, server: Server) -> None:
    """Times a prompt that is computed, and then comes back from host memory."""
    seconds: list[list[float]] = []
    draw = np.random.default_rng(0)
    first = draw.integers(0, server.vocab, sizes.prompt)
    for _ in range(3):
        others = draw.integers(0, server.vocab, (3, sizes.prompt))  # fill the pool
        seconds.append([])
        for prompt in (first, *others):
            began = time.perf_counter()
            server.add(prompt, 1)
            while server.has_work:
                server.step()
            seconds[-1].append(time.perf_counter() - began)
    stats = server.engine.manager.prefix_stats()
    assert stats.host_hits, stats
    computed, loaded = min(seconds[1][1:] + seconds[2][1:]), min(seconds[1][0], seconds[2][0])
    name = f"{sizes.prompt} tokens to the first token, computed; loaded"
    report.note(
        f"{name:<52} {1e3 * computed:8.1f}; {1e3 * loaded:.1f} ms",
        computed=computed,
        loaded=loaded,
    )


def _server(sizes: Sizes, *, has_tier: bool) -> Server:
    """Returns a warm engine whose pool holds half of the burst."""
    burst = sizes.burst
    tokens = burst.requests * (burst.prompt_tokens[0] + burst.answer_tokens[0]) // 2
    specs = jaxkv.layers_from_config(sizes.config).values()
    per_token = sum(spec.page_bytes / spec.block_size for spec in specs)
    num_bytes = int((tokens + 32) * per_token)  # and the null block
    server = Server(
        sizes.config,
        max_requests=burst.requests,
        max_tokens=by_size(full=8192, small=32, smallest=8),
        memory_bytes=num_bytes,
        max_model_len=sizes.prompt + 2,
        host_memory=jaxkv.HostMemory(num_bytes=4 * num_bytes, min_tokens=1) if has_tier else None,
    )
    if by_size(full=True, small=True, smallest=False):
        server.engine.warm_up()
        workloads.run(server, Prefill(1, 8, repeats=1))
    return server
