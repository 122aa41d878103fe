"""Prefix caching: its time on the host.

Requests with and without token ids are timed in turns. vLLM's side hashes the
prompt, looks it up and allocates its blocks, with its prefix cache and without; it hashes by
SHA-256 over pickle, its default.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import Plan
from jaxkv._src.uploads import StepShape
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer
from tests.benchmarks.workload import (
    BLOCK_SIZE,
    FULL,
    LONG_WINDOW,
    LONGEST_CHUNK,
    STATE,
    WINDOW,
    VllmManager,
    make_plan,
    prompt_len,
    settle,
)

GROUPS = {
    "1 full": (FULL,),
    "full + 4 windows": (FULL, WINDOW, WINDOW, LONG_WINDOW, LONG_WINDOW),
    "full + 3 states": (FULL, STATE, STATE, STATE),
}
CALLS = ("start", "step", "finish")
CASES = ("new", "known", "evicting")
Life = Callable[[np.ndarray | None], "Seconds"]


class Seconds(NamedTuple):
    """Times of the calls in the life of one request whose prompt is computed at once."""

    start: float
    step: float
    finish: float


def run(report: Report, peer: VllmPeer | None) -> None:
    length = by_size(full=8192, small=8192, smallest=256)
    report.title(f"A prompt of {length:,} tokens: added by prefix caching, us of thread time")
    names = by_size(full=tuple(GROUPS), small=tuple(GROUPS), smallest=tuple(GROUPS)[-1:])
    for name in names:
        _prompts(report, peer, name, length)
    requests = by_size(full=256, small=256, smallest=4)
    report.title(f"A decode step of {requests} requests: added by prefix caching, us")
    for name in names:
        _decode(report, name, requests)


# --- the life of a prompt -------------------------------------------------------------


def _prompts(report: Report, peer: VllmPeer | None, name: str, length: int) -> None:
    repeats = by_size(full=60, small=40, smallest=3)
    plans = {  # with pools for the blocks of all prompts, and of two
        room: make_plan(GROUPS[name], room * length // 3000 + 2, max_model_len=length + BLOCK_SIZE)
        for room in (2 * repeats, 2)
    }
    lives = {"jaxkv": [_our_life(plan, length) for plan in plans.values()]}
    if peer is not None and STATE not in GROUPS[name]:
        lives["vLLM"] = [_vllm_life(peer, plan, length) for plan in plans.values()]
    for who, (roomy, tight) in lives.items():
        figures = _added(roomy, tight, length, repeats)
        both = figures["new start"] + figures["new step"]
        text = ", ".join(f"{call} {us:.1f}" for call, us in figures.items())
        report.note(f"{name:<17} {who:<6} lookup + registration {both:.1f}: {text}", **figures)


def _added(roomy: Life, tight: Life, length: int, repeats: int) -> dict[str, float]:
    """Returns the microseconds that token ids add to each call.

    Args:
      roomy: requests in a pool that evicts no block; prompts are new, then known.
      tight: requests in a pool in which each prompt takes the blocks of another one.
    """
    rng = np.random.default_rng(0)
    taken: dict[str, list[Seconds]] = {case: [] for case in ("", *CASES)}
    settle()
    for _ in range(repeats):
        prompt = rng.integers(0, 150_000, length, np.int32)  # as tokenized prompts are stored
        taken[""].append(roomy(None))
        taken["new"].append(roomy(prompt))
        taken["known"].append(roomy(prompt))
        taken["evicting"].append(tight(prompt))
    medians = {case: np.median(np.array(times)[1:], axis=0) for case, times in taken.items()}
    return {
        f"{case} {call}": 1e6 * float(with_tokens - without)
        for case in CASES
        for call, with_tokens, without in zip(CALLS, medians[case], medians[""], strict=True)
    }


def _our_life(plan: Plan, length: int) -> Life:
    managers = {shares: BlockManager(plan, max_requests=16) for shares in (False, True)}
    shape = StepShape.for_plan(
        plan, max_requests=16, max_tokens=length, forks=1, cached_tokens=length
    )
    has_states = any(group.growth.stores == "state" for group in plan.groups)

    def life(prompt: np.ndarray | None) -> Seconds:
        manager, clocks = managers[prompt is not None], [time.thread_time()]
        hit = manager.start("a", prompt)
        clocks.append(time.thread_time())
        rest = length - hit.num_cached_tokens
        first = max(rest - has_states, 1)  # a state is cached before the last token
        manager.step(shape, {"a": first})
        clocks.append(time.thread_time())
        if rest > first:
            manager.step(shape, {"a": rest - first})
        clocks.append(time.thread_time())
        manager.finish("a")
        clocks.append(time.thread_time())
        start, step, _, finish = np.diff(clocks).tolist()
        return Seconds(start, step, finish)

    return life


def _vllm_life(peer: VllmPeer, plan: Plan, length: int) -> Life:
    managers = {caches: VllmManager(peer, plan, caches=caches) for caches in (False, True)}

    def life(prompt: np.ndarray | None) -> Seconds:
        mine = managers[prompt is not None]
        tokens = [0] * length if prompt is None else prompt.tolist()
        clocks = [time.thread_time()]
        cached = mine.start("a", length, tokens)
        clocks.append(time.thread_time())
        mine.step({"a": length - cached})
        clocks.append(time.thread_time())
        mine.finish("a")
        clocks.append(time.thread_time())
        return Seconds(*np.diff(clocks).tolist())

    return life


# --- decoding -------------------------------------------------------------------------


def _decode(report: Report, name: str, count: int) -> None:
    """Times decode steps of requests with token ids and without, in turns."""
    plan = make_plan(GROUPS[name], count)
    shape = StepShape.for_plan(plan, max_requests=count, max_tokens=count, forks=count)
    rng = np.random.default_rng(0)
    steps = {
        what: functools.partial(_manager(plan, count, rng, what == "with").step, shape)
        for what in ("without", "with")
    }
    settle()
    work, taken = dict.fromkeys(range(count), 1), {what: list[float]() for what in steps}
    for _ in range(by_size(full=320, small=320, smallest=6)):
        for what, step in steps.items():
            started = time.thread_time()
            step(work)
            taken[what].append(1e6 * (time.thread_time() - started))
    without, with_tokens = (float(np.median(times[1:])) for times in taken.values())
    report.note(
        f"{name:<17} {with_tokens:.1f} instead of {without:.1f}: {with_tokens - without:.1f} added",
        without=without,
        with_tokens=with_tokens,
    )


def _manager(plan: Plan, count: int, rng: np.random.Generator, has_tokens: bool) -> BlockManager:
    """Returns a manager whose requests have computed their prompts."""
    manager = BlockManager(plan, max_requests=count)
    prefill = StepShape.for_plan(plan, max_requests=count, max_tokens=LONGEST_CHUNK, forks=1)
    for request in range(count):
        length = prompt_len(request)
        manager.start(request, rng.integers(0, 150_000, length) if has_tokens else None)
        for chunk in (length - 1, 1):
            manager.step(prefill, {request: chunk})
    return manager
