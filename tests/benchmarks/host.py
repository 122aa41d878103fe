"""Bookkeeping and packing of a step on the host, next to vLLM's `KVCacheManager`.

Ours is `BlockManager.step`: it grows all requests or none and packs everything that the device
must learn. vLLM's is ``allocate_slots`` for each request and the new block ids as lists, without
the work of its model runner.
"""

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import Plan
from jaxkv._src.uploads import StepShape
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer
from tests.benchmarks.workload import (
    FULL,
    LONG_WINDOW,
    LONGEST_CHUNK,
    STATE,
    WINDOW,
    VllmManager,
    make_plan,
    prefill,
    prompt_len,
    settle,
)

GROUPS = {
    "1 full": (FULL,),
    "full + 3 states": (FULL, STATE, STATE, STATE),
    "full + 3 windows": (FULL, WINDOW, WINDOW, WINDOW),
    "full + 4 windows": (FULL, WINDOW, WINDOW, LONG_WINDOW, LONG_WINDOW),
}
REQUESTS = (64, 256, 1024, 4096)
LIVES = ("start", "grow by 8,000 tokens", "finish", "first decode after 4,096")


class Figure(NamedTuple):
    """Microseconds of one call: medians of wall clock and thread time, and the worst 1%.

    Thread time leaves out what other processes take from a shared core.
    """

    wall: float
    thread: float
    p99: float


def run(report: Report, peer: VllmPeer | None) -> None:
    report.title(
        "Bookkeeping and packing of a decode step on the host: median us, thread time in brackets"
    )
    for name in GROUPS:
        for count in by_size(full=REQUESTS, small=REQUESTS, smallest=(8,)):
            _decode(report, peer, name, count)
    report.title("One request next to 256 others: median us of the wall clock")
    for name in by_size(full=tuple(GROUPS), small=tuple(GROUPS), smallest=("full + 4 windows",)):
        _one_request(report, peer, name, by_size(full=256, small=256, smallest=4))
    report.title("A step of an Engine on the host, without the call of the device: median us")
    for count in by_size(full=(1, 16, 256), small=(1, 16, 256), smallest=(2,)):
        _engine_step(report, count, by_size(full=400, small=400, smallest=4))
    count = by_size(full=256, small=256, smallest=2)
    _live_traffic(report, count, by_size(full=1000, small=1000, smallest=3))
    report.title("Objects that the interpreter keeps for decode steps")
    _kept_objects(report, by_size(full=10_000, small=10_000, smallest=50))


# --- a decode step ------------------------------------------------------------------


def _decode(report: Report, peer: VllmPeer | None, name: str, count: int) -> None:
    many = 320 if count <= 256 else 48
    steps = by_size(full=many, small=many, smallest=4)
    plan = make_plan(GROUPS[name], count)
    manager = BlockManager(plan, max_requests=count)
    prefill(manager, {i: prompt_len(i) for i in range(count)})
    shape = StepShape.for_plan(plan, max_requests=count, max_tokens=count)
    work = dict.fromkeys(range(count), 1)
    settle()
    ours = _figure(functools.partial(manager.step, shape, work), steps)
    lookahead = _figure(functools.partial(_grow_and_step, manager, shape, work), steps // 2)
    text = f"{name:<17} {count:5,} requests  jaxkv {ours.wall:6.1f} ({ours.thread:.1f}; "
    text += f"p99 {ours.p99:.1f}; after grow {lookahead.wall:.1f})"
    figures = {"jaxkv": ours.wall, "jaxkv_thread": ours.thread, "jaxkv_grow": lookahead.wall}
    if peer is not None:
        vllm_manager = VllmManager(peer, plan)
        for i in range(count):
            vllm_manager.start(i, prompt_len(i))
            vllm_manager.step({i: prompt_len(i)})
        settle()
        theirs = _figure(functools.partial(vllm_manager.step, work), min(steps, 32))
        while manager.num_computed_tokens(0) > vllm_manager.requests[0].num_computed_tokens:
            vllm_manager.step(work)
        _check_same_blocks(manager, vllm_manager)
        figures |= {"vllm": theirs.wall, "vllm_thread": theirs.thread}
        text += f"  vLLM {theirs.wall:8.1f} ({theirs.thread:.1f})"
        text += f"  {theirs.thread / ours.thread:5.1f} times ours"
    report.note(text, **figures)


def _grow_and_step(manager: BlockManager, shape: StepShape, work: dict[int, int]) -> None:
    """Takes a step as `jaxkv.Scheduler` does, which takes the blocks first."""
    manager.grow(work)
    manager.step(shape, work)


def _figure(call: Callable[[], object], repeats: int) -> Figure:
    """Times a call again and again, after one that is not counted."""
    wall: list[float] = []
    thread: list[float] = []
    for _ in range(1 + repeats):
        cpu, started = time.thread_time(), time.perf_counter()
        call()
        wall.append(time.perf_counter() - started)
        thread.append(time.thread_time() - cpu)
    return Figure(
        1e6 * float(np.median(wall[1:])),
        1e6 * float(np.median(thread[1:])),
        1e6 * float(np.quantile(wall[1:], 0.99)),
    )


def _check_same_blocks(manager: BlockManager, vllm_manager: VllmManager) -> None:
    """Raises unless both hold as many blocks: else they did not do the same work."""
    if manager.num_free_blocks != vllm_manager.num_free_blocks:
        raise RuntimeError(
            f"jaxkv has {manager.num_free_blocks} free blocks, "
            f"and vLLM {vllm_manager.num_free_blocks}"
        )


# --- one request --------------------------------------------------------------------


class Calls(NamedTuple):
    """The life of a request, in jaxkv or in vLLM; each takes its name and tokens.

    upload: carries what ``grow`` did to the device.
    """

    start: Callable[[str, int], object]
    grow: Callable[[str, int], object]
    upload: Callable[[str, int], object]
    step: Callable[[str, int], object]
    finish: Callable[[str], object]


def _one_request(report: Report, peer: VllmPeer | None, name: str, others: int) -> None:
    plan = make_plan(GROUPS[name], others + 2)
    figures = dict(zip(LIVES, _life(_our_calls(plan, others)), strict=True))
    texts = [f"{life} {us:.1f}" for life, us in figures.items()]
    if peer is not None:
        theirs = _life(_vllm_calls(peer, plan, others))
        figures |= {f"vLLM, {life}": us for life, us in zip(LIVES, theirs, strict=True)}
        texts = [f"{text} (vLLM {us:.1f})" for text, us in zip(texts, theirs, strict=True)]
    report.note(f"{name:<17} {', '.join(texts)}", **figures)


def _our_calls(plan: Plan, others: int) -> Calls:
    manager = BlockManager(plan, max_requests=others + 2)
    prefill(manager, {i: prompt_len(i) for i in range(others)})
    sizes = {"max_requests": others + 2, "batch_size": others + 2}
    decode = StepShape.for_plan(plan, **sizes, max_tokens=others + 2)
    chunk = StepShape.for_plan(plan, **sizes, max_tokens=LONGEST_CHUNK)

    def step(name: str, tokens: int) -> None:
        manager.step(decode if tokens == 1 else chunk, {name: tokens})

    return Calls(
        start=lambda name, tokens: manager.start(name),
        grow=lambda name, tokens: manager.grow({name: tokens}),
        upload=step,
        step=step,
        finish=manager.finish,
    )


def _vllm_calls(peer: VllmPeer, plan: Plan, others: int) -> Calls:
    vllm_manager = VllmManager(peer, plan)
    for i in range(others):
        vllm_manager.start(i, prompt_len(i))
        vllm_manager.step({i: prompt_len(i)})

    def step(name: str, tokens: int) -> None:
        vllm_manager.step({name: tokens})

    return Calls(vllm_manager.start, step, lambda name, tokens: None, step, vllm_manager.finish)


def _life(calls: Calls) -> list[float]:
    """Returns the median microseconds of the calls of `LIVES`."""
    settle()
    samples: dict[str, list[float]] = {life: [] for life in LIVES}

    def timed(life: str, call: Callable[..., object], *values: object) -> None:
        started = time.perf_counter()
        call(*values)
        samples[life].append(time.perf_counter() - started)

    for _ in range(by_size(full=100, small=100, smallest=3)):
        timed("start", calls.start, "long", 8000)
        timed("grow by 8,000 tokens", calls.grow, "long", 8000)
        calls.upload("long", 8000)
        timed("finish", calls.finish, "long")
        calls.start("x", 4096)
        calls.step("x", 4096)
        timed("first decode after 4,096", calls.step, "x", 1)
        calls.finish("x")
    return [1e6 * float(np.median(samples[life][1:])) for life in LIVES]


# --- memory ---------------------------------------------------------------------------


def _kept_objects(report: Report, steps: int) -> None:
    """Counts the interpreter's blocks before and after decode steps of 16 requests."""
    count = 16
    plan = make_plan(GROUPS["full + 4 windows"], 8 * count, max_model_len=16_384)
    manager = BlockManager(plan, max_requests=count)
    prefill(manager, {i: prompt_len(i) for i in range(count)})
    shape = StepShape.for_plan(plan, max_requests=count, max_tokens=count)
    work = dict.fromkeys(range(count), 1)
    for _ in range(steps // 10):
        manager.step(shape, work)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(steps):
        manager.step(shape, work)
    gc.collect()
    kept = sys.getallocatedblocks() - before
    report.note(f"{steps:,} steps of {count} requests keep {kept:,} objects", kept=kept)


# --- an engine --------------------------------------------------------------------------


def _engine_step(report: Report, count: int, steps: int) -> None:
    """Times decode steps of an engine whose device answers at once."""
    from jaxkv._src.engine import Sampling

    engine, packed = _engine(count)
    for i in range(count):
        engine.add(i, np.arange(16) + i % 1000, Sampling(max_tokens=4 * steps + 99))
    for _ in range(50):
        engine.step()
    settle()
    whole = _figure(engine.step, steps)
    median = float(np.median(packed[-steps:]))
    text = f"{count:5,} requests  scheduler to dispatch {median:6.1f}, whole step {whole.wall:6.1f}"
    report.note(text, packed=median, whole=whole.wall)


def _live_traffic(report: Report, count: int, requests: int) -> None:
    """Times the steps of such an engine while requests of 32 to 512 tokens come and go."""
    from jaxkv._src.engine import Sampling

    engine, packed = _engine(count)
    rng = np.random.default_rng(0)
    for i in range(requests):
        prompt, most = rng.integers(0, 1000, rng.integers(32, 513)), int(rng.integers(32, 513))
        engine.add(i, prompt, Sampling(max_tokens=most))
    settle()
    whole: list[float] = []
    thread: list[float] = []
    while engine.has_work:
        cpu, started = time.thread_time(), time.perf_counter()
        engine.step()
        whole.append(1e6 * (time.perf_counter() - started))
        thread.append(1e6 * (time.thread_time() - cpu))
    median, of_all, mean = (float(np.median(packed)), float(np.median(whole)), np.mean(thread))
    text = f"live traffic: {count:,} requests at a time, {requests:,} in all  "
    text += f"scheduler to dispatch {median:6.1f}, whole step {of_all:6.1f} "
    text += f"(mean of thread time {mean:.1f})"
    report.note(text, packed=median, whole=of_all, thread=float(mean))


def _engine(count: int) -> tuple[Any, list[float]]:
    """Returns an engine without a device, and the microseconds that packing takes, as it goes."""
    import jax.numpy as jnp

    from jaxkv._src.engine import Engine

    def forward(params: Any, step: Any) -> Any:
        for layer in step.batch.layout.layer_numbers:
            x = jnp.zeros((step.token_ids.size, 1, 1), jnp.bfloat16)
            step.attend(layer, x, x, x)
        return jnp.zeros((step.batch.shape.batch_size, 1024))

    plan = make_plan(GROUPS["1 full"], count)
    engine = Engine(forward, (), plan, max_requests=count, max_tokens=max(count, 2048))
    packed: list[float] = []
    pack = engine._packer.pack

    def timed(most_steps: int) -> Any:
        started = time.perf_counter()
        calls = pack(most_steps)
        packed.append(1e6 * (time.perf_counter() - started))
        return calls

    @functools.cache
    def answer(samples: int) -> dict[str, np.ndarray]:
        return {"sampled": np.zeros((1, 2 * samples + 1), np.int32)}

    engine._packer.pack = timed
    engine._device.run = lambda uploads, wants: answer(uploads[0].shape.batch_size)
    return engine, packed
