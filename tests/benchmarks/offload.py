"""Blocks in host memory: their copies, steps beside these, prefixes and preempted requests."""

import copy
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
from jaxkv._src.offload._manager import LOOKAHEAD_BYTES
from jaxkv.blocks import Chunk, Transfers
from tests.benchmarks.served import comparison, workloads
from tests.benchmarks.served.jaxkv_engine import Server
from tests.benchmarks.served.workloads import Prefill, Trace
from tests.benchmarks.sleep import plan_of
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer

CHUNK = 16  # blocks, the most that are copied together
BURSTS = 4  # of copies, next to some steps


class Sizes(NamedTuple):
    """Sizes of a run; a page of a layer has 64 KiB.

    weights: of one layer of a step that stands for a model's.
    config: of a model that is served whole.
    prompt: tokens of the prefix that comes back.
    burst: requests that come at once; the pool holds half of them.
    again: prompts that come again; the pool has half of them.
    """

    layers: int
    num_blocks: int
    weights: tuple[int, int]
    steps: int
    decodes: int
    config: Mapping[str, Any]
    prompt: int
    burst: Trace
    again: Trace


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer  # its offloading is part of its engine
    tiny = functools.partial(
        Sizes,
        config=comparison.TINY,
        prompt=48,
        burst=Trace(4, (24, 25), (16, 17)),
        again=Trace(4, (24, 25), (2, 3)),
    )
    sizes = by_size(
        full=Sizes(
            *(32, 4096, (4096, 57_344), 100, 256),
            config=comparison.text_config("llama-3.1-8b"),
            prompt=32_768,
            burst=Trace(64, (1024, 1025), (512, 513)),
            again=Trace(64, (1024, 1025), (32, 33)),
        ),
        small=tiny(4, 128, (256, 512), 20, 64),
        smallest=tiny(2, 48, (32, 64), 4, 4),
    )
    _time_copies(report, sizes)
    _time_idle_steps(report, sizes)
    gc.collect()
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

    def made(turn: int) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(turn * chunks + i, 0, np.arange(CHUNK * i, CHUNK * (i + 1), dtype=np.int32))
            for i in range(1, chunks + 1)
        )

    def transfers(stores=(), loads=(), lookahead=()) -> Transfers:
        dropped, later = ([chunk.number for chunk in some] for some in (loads, lookahead))
        return Transfers(next(numbers), stores, loads, tuple(dropped), lookahead=tuple(later))

    seconds: dict[str, list[float]] = {"stores": [], "loads": []}
    for name in ("stores", "loads") * 3:
        began = time.perf_counter()
        cache = memory.transfer(cache, transfers(**{name: made(0)}))
        jax.block_until_ready((cache, memory._chunks))
        seconds[name].append(time.perf_counter() - began)
    for name, found in seconds.items():
        rate = num_bytes / min(found[1:]) / 1e9
        text = f"{name} of {num_bytes / 2**20:g} MiB"
        report.note(f"{text:<44} {rate:8.1f} GB/s, at first {num_bytes / found[0] / 1e9:.1f}")
    every, each = sizes.steps // BURSTS, max(1, LOOKAHEAD_BYTES // (num_bytes // chunks))

    def moves_of(kind: str, turn: int, at: int) -> Transfers | None:
        """Returns the moves of a manager, ``at`` steps after blocks had to move."""
        if kind == "loads":  # which no step needs
            now, later = made(turn)[max(at - 1, 0) * each : at * each], made(turn)[at * each :]
            return transfers(loads=now, lookahead=later[:each]) if now or later else None
        if kind == "none" or at:
            return None
        return transfers(stores=made(turn)) if kind == "stores" else transfers(loads=made(turn))

    def steps(kind: str) -> float:
        """Returns seconds of a step; from one of ``every`` on, all chunks are moved."""
        nonlocal tokens, cache
        for turn in range(BURSTS if "loads" in kind else 0):
            cache = memory.transfer(cache, transfers(stores=made(turn)))
        jax.block_until_ready((cache, memory._chunks))
        began = time.perf_counter()
        for number in range(sizes.steps):
            cache = memory.transfer(cache, moves_of(kind, *divmod(number, every)))
            tokens, cache = _step(weights, tokens, cache)
        jax.block_until_ready((tokens, cache, memory._chunks))
        memory._chunks.clear()
        return (time.perf_counter() - began) / sizes.steps

    kinds = ("none", "stores", "loads", "loads that each step needs")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds * 3:
        found[kind].append(steps(kind))
    alone, *others = (min(of_kind[1:]) for of_kind in found.values())
    rate = BURSTS * num_bytes / sizes.steps / alone / 1e9
    for name, beside in zip(kinds[1:], others, strict=True):
        cost = 1e3 * (beside - alone) * sizes.steps / (BURSTS * num_bytes / 1e9)
        report.note(
            f"{f'a step; next to {name} of {rate:.1f} GB/s':<44} {1e3 * alone:8.3f}; "
            f"{1e3 * beside:.3f} ms, {beside / alone:.3f}; {cost:.1f} ms for each GB",
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
            manager.take_transfers()
            found[has_tier].append(1e6 * (time.perf_counter() - began))
    without, with_tier = (statistics.median(found[has_tier]) for has_tier in (False, True))
    name = f"host time of a step of {sizes.decodes} decodes"
    report.note(f"{name:<44} {without:8.1f} us, with an idle offload {with_tier:.1f}")


# --- served -----------------------------------------------------------------------------


def _serve(report: Report, sizes: Sizes) -> None:
    """Times prompts that come back from host memory, and requests that preempt each other."""
    report.title("Llama-3.1-8B, or a tiny model: prefixes and requests from host memory")
    began = time.perf_counter()
    server = _server(sizes)
    report.note(f"{'start, with host memory':<52} {time.perf_counter() - began:8.1f} s")
    prompts = _time_prefix(report, sizes, server)
    _time_decodes(report, server, prompts)
    servers = {"computed again": _without_host_memory(server), "from host memory": server}
    for name, trace, runs in (("burst", sizes.burst, 1), ("prompts again", sizes.again, 2)):
        rates: list[float] = []
        for what, one in servers.items():
            before = one.engine.stats.preemptions
            for _ in range(runs):
                figures = workloads.run(one, trace)
            rates.append(figures.tokens / figures.seconds)
            size = f"{trace.requests} x {trace.prompt_tokens[0]} + {trace.answer_tokens[0]}"
            report.note(
                f"{f'{name}, {size}, {what}':<52} {rates[-1]:8.1f} tokens/s, "
                f"{one.engine.stats.preemptions - before} preemptions",
                rate=rates[-1],
            )
        report.note(f"{f'{name}: ratio':<52} {rates[1] / rates[0]:8.2f}")
    stats = server.engine.manager.offload_stats()
    assert stats is not None and stats.swapped_in_tokens, stats
    report.note(f"{stats}")


def _time_prefix(report: Report, sizes: Sizes, server: Server) -> np.ndarray:
    """Times prompts, one and a half pools of them: computed, and from host memory."""
    prompts = np.random.default_rng(0).integers(0, server.vocab, (3, sizes.prompt))
    seconds = np.zeros((4, len(prompts)))
    before = 0
    for turn, at in np.ndindex(*seconds.shape):
        began = time.perf_counter()
        server.add(prompts[at], 1)
        while server.has_work:
            server.step()
        seconds[turn, at] = time.perf_counter() - began
        if not turn:
            before = server.engine.manager.prefix_stats().host_tokens
    each = (server.engine.manager.prefix_stats().host_tokens - before) // (3 * len(prompts))
    assert each > sizes.prompt / 2, each
    # In the second turn, blocks that were computed in the first go to host memory meanwhile.
    computed, storing, loaded = seconds[0, 1:].min(), seconds[1].max(), seconds[2:].min()
    name = f"{sizes.prompt} tokens to the first token, computed; loaded"
    report.note(
        f"{name:<52} {1e3 * computed:8.1f}; {1e3 * loaded:.1f} ms, {each} from the host; "
        f"{1e3 * storing:.1f} ms while others go there",
        computed=computed,
        loaded=loaded,
    )
    return prompts


def _time_decodes(report: Report, server: Server, prompts: np.ndarray) -> None:
    """Times the steps of some requests while prompts come back from host memory, one by one."""
    decodes, answer = by_size(full=8, small=2, smallest=2), by_size(full=96, small=24, smallest=8)
    for _ in range(2):
        for name, prompt in {"alone": None, "next to a prompt that is loaded": prompts[0]}.items():
            for first in range(decodes):
                server.add(np.arange(first, first + 8) % server.vocab, answer)
            for _ in range(answer // 3):
                server.step()
            began, seconds, first_token, loaded = time.perf_counter(), list[float](), 0.0, None
            if prompt is not None:
                loaded = server.add(prompt, 1)
            while server.has_work:
                before = time.perf_counter()
                if loaded in server.step():
                    first_token = time.perf_counter() - began
                seconds.append(time.perf_counter() - before)
            prompts = np.roll(prompts, 1, axis=0)
            figures = statistics.median(seconds), max(seconds), sum(seconds), first_token
            text = "{:8.2f}; the longest {:.1f}, all {:.0f} ms".format(*(1e3 * f for f in figures))
            more = f", its first token {1e3 * first_token:.1f}" if first_token else ""
            report.note(f"{f'a step of {decodes} decodes {name}':<52} {text}{more}")


def _server(sizes: Sizes) -> Server:
    """Returns an engine whose pool caches half of the burst, and the host all of it."""
    burst = sizes.burst
    tokens = burst.requests * (burst.prompt_tokens[0] + burst.answer_tokens[0]) // 2
    specs = jaxkv.layers_from_config(sizes.config).values()
    per_token = sum(spec.page_bytes / spec.block_size for spec in specs)
    num_bytes = int((tokens + 32) * per_token)  # and the null block
    server = Server(
        sizes.config,
        max_requests=burst.requests,
        max_tokens=by_size(full=1024, small=32, smallest=8),
        memory_bytes=num_bytes,
        max_model_len=sizes.prompt + 2,
        host_memory=jaxkv.HostMemory(num_bytes=int(2.4 * num_bytes), min_tokens=1),
    )
    if by_size(full=True, small=True, smallest=False):
        server.engine.warm_up()
        workloads.run(server, Prefill(1, 8, repeats=1))
    return server


def _without_host_memory(server: Server) -> Server:
    """Returns the same engine without host memory; it runs the steps that were compiled for it."""
    twin, device, manager = copy.copy(server), server.engine._device, server.engine.manager
    twin.engine = jaxkv.Engine(
        *(server.decoder.hidden_states, device.params, manager.plan),
        head=server.decoder.head,
        max_requests=manager.max_requests,
        max_tokens=max(server.engine._buckets.mixed),
    )
    twin.engine._device.steps = device.steps
    return twin
