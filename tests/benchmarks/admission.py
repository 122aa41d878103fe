"""Schedules that admit many prompts at once, and steady schedules next to many that wait.

Times are of the thread, without what other processes take from a shared core.
"""

import gc
import time
from collections.abc import Callable

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.scheduler import Scheduler
from jaxkv._src.uploads import StepShape
from tests.benchmarks.host import GROUPS
from tests.benchmarks.timing import Report, by_size
from tests.benchmarks.workload import make_plan

PROMPT, LONGEST = 300, 600


def run(report: Report, _peer: object) -> None:
    report.title(f"Admission of new prompts of {PROMPT} tokens in one schedule: median ms")
    for name in ("1 full", "full + 3 states", "full + 3 windows"):
        for count in by_size(full=(256, 1024), small=(256, 1024), smallest=(8,)):
            _admission(report, name, count)
    report.title("A schedule of 256 decodes next to prompts that wait: median us")
    for waiting in by_size(full=(0, 10_000), small=(0, 10_000), smallest=(0, 8)):
        _steady(report, by_size(full=256, small=256, smallest=4), waiting)
    report.title("Forks of one prompt while others wait: ms in all")
    for count in by_size(full=(1000, 4000), small=(1000, 4000), smallest=(8,)):
        _waiting_forks(report, count)


def _admission(report: Report, name: str, count: int) -> None:
    figures = {
        "ids": _median(lambda: _admitting(name, count, shares=True, preemption=True)),
        "preemption": _median(lambda: _admitting(name, count, shares=False, preemption=True)),
        "reservation": _median(lambda: _admitting(name, count, shares=False, preemption=False)),
    }
    text = f"{name:<17} {count:5,} prompts  {1e3 * figures['preemption']:6.1f}"
    text += f" (preemption=False {1e3 * figures['reservation']:.1f}"
    report.note(f"{text}, with token ids {1e3 * figures['ids']:.1f})", **figures)


def _admitting(name: str, count: int, *, shares: bool, preemption: bool) -> Callable[[], object]:
    ids = np.random.default_rng(0).integers(0, 100_000, (count, PROMPT)).tolist()
    manager = BlockManager(make_plan(GROUPS[name], count), max_requests=count)
    scheduler = Scheduler(
        manager,
        max_tokens=count * PROMPT,
        preemption=preemption,
        tokens=dict(enumerate(ids)) if shares else None,
        forks=8,
    )
    for request in range(count):
        scheduler.add(request, PROMPT, max_tokens=LONGEST)
    return scheduler.schedule


def _median(make: Callable[[], Callable[[], object]]) -> float:
    seconds: list[float] = []
    for _ in range(by_size(full=5, small=5, smallest=1)):
        call = make()
        gc.disable()
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
        gc.enable()
    return float(np.median(seconds))


def _steady(report: Report, count: int, waiting: int) -> None:
    plan = make_plan(GROUPS["1 full"], count)
    manager = BlockManager(plan, max_requests=count)
    scheduler = Scheduler(manager, max_tokens=8192)
    shape = StepShape.for_plan(plan, max_requests=count, max_tokens=8192)
    for request in range(count):
        scheduler.add(request, 32)
    manager.step(shape, scheduler.schedule().work)
    for request in range(count, count + waiting):
        scheduler.add(request, 32)
    seconds: list[float] = []
    for _ in range(200):
        scheduler.append(dict.fromkeys(range(count), 1))
        started = time.thread_time()
        schedule = scheduler.schedule()
        seconds.append(time.thread_time() - started)
        manager.step(shape, schedule.work)
    median = float(np.median(seconds))
    report.note(f"{count} decode, {waiting:6,} wait  {1e6 * median:6.1f}", seconds=median)


def _waiting_forks(report: Report, count: int) -> None:
    plan = make_plan(GROUPS["1 full"], 8)
    manager = BlockManager(plan, max_requests=8)
    scheduler = Scheduler(manager, max_tokens=8192, forks=1)
    shape = StepShape.for_plan(plan, max_requests=8, max_tokens=8192, forks=1)
    scheduler.add("donor", 32)
    manager.step(shape, scheduler.schedule().work)
    for request in range(count):
        scheduler.add(request, 32)
    started = time.thread_time()
    for sample in range(count):
        scheduler.fork("donor", [("sample", sample)])
    seconds = time.thread_time() - started
    report.note(f"{count:5,} forks, one by one  {1e3 * seconds:7.1f}", seconds=seconds)
