"""The demo over several devices and over one: the host's time in a step, and the logits."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.testing import count_compilations
from tests.benchmarks import timing
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.vllm_peer import VllmPeer
from tests.hosts.demo import CONFIG, demo_engine
from tests.hosts.engine import Report as Served
from tests.hosts.engine import make_trace

# Eight KV heads, and as many state heads, because the demo's config names these too.
HEADS = {"num_key_value_heads": 8, "num_attention_heads": 16, "full_attention_interval": 1}
HEADS |= {"linear_num_value_heads": 8, "linear_num_key_heads": 8}


class Course(NamedTuple):
    """A trace that was served.

    host: median microseconds of the host in a step: schedule, block manager and dispatch.
    """

    served: Served
    host: dict[str, float]
    compilations: int


def run(report: Report, peer: VllmPeer | None) -> None:
    del peer
    report.title("The demo, served over devices: the host's share of a step, and its logits")
    count = timing.device_counts()[-1]
    dtypes = ("f32", "bf16", "fp8_e4m3") if timing.every_case and timing.ON_GPU else ("f32",)
    axes = by_size(full=("heads", "context"), small=("heads", "context"), smallest=("context",))
    for axis, dtype in [(axis, dtype) for dtype in dtypes for axis in axes]:
        alone = _serve(axis, by_size(full=1, small=1, smallest=count), dtype)
        others = _serve(axis, count, dtype)
        _compare(report, f"{axis}, {dtype}", alone, others, count)


def _serve(axis: str, count: int, dtype: str) -> Course:
    mesh = Mesh(np.array(jax.devices()[:count]), (axis,))
    changes = by_size(full=HEADS, small=HEADS, smallest=CONFIG)
    engine = demo_engine(mesh, axis, changes, dtype, pool_bytes=2**25)
    engine.warm_up()
    times: dict[str, list[float]] = {"schedule": [], "manager": [], "dispatch": []}
    engine.scheduler.schedule = _timed(times["schedule"], engine.scheduler.schedule)
    engine.manager.step = _timed(times["manager"], engine.manager.step)
    engine.step = _timed(times["dispatch"], engine.step)
    requests = by_size(full=24, small=4, smallest=2)
    prompts = by_size(full=(8, 160), small=(8, 40), smallest=(3, 20))
    answers = by_size(full=(16, 96), small=(3, 9), smallest=(2, 4))
    trace = make_trace(requests, 0, prompt_tokens=prompts, new_tokens=answers)
    with count_compilations() as compilations:
        served = engine.serve(trace)
    return Course(served, timing.medians(times), len(compilations))


def _timed(seconds: list[float], function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        out = function(*args, **options)
        seconds.append(time.perf_counter() - started)
        return out

    return call


def _compare(report: Report, name: str, alone: Course, others: Course, count: int) -> None:
    host = [sum(course.host.values()) for course in (alone, others)]
    parts = ", ".join(f"{part} {us:.0f}" for part, us in others.host.items())
    answers = [course.served.answers for course in (alone, others)]
    equal = sum(answers[0][each].tokens == answers[1][each].tokens for each in answers[0])
    off = max(_difference(answers[0][each], answers[1][each]) for each in answers[0])
    report.note(
        f"{name:<18} host {host[0]:.0f} us on 1, {host[1]:.0f} on {count} ({parts}), "
        f"{host[1] / host[0]:.2f} times; {equal} of {len(answers[0])} answers equal, logits off by "
        f"{off:.2g}; {others.compilations} compilations",
        alone=host[0],
        others=host[1],
        off=off,
    )


def _difference(one: Any, other: Any) -> float:
    """Returns the largest difference of logits up to the first token that differs."""
    off = 0.0
    for ours, theirs in zip(one.logits, other.logits, strict=True):
        off = max(off, float(np.abs(ours - theirs).max()))
        if ours.argmax() != theirs.argmax():
            break
    return off
