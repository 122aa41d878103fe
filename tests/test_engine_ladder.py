"""The shapes of an engine's steps, and how full its steps are."""

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.engine._ladder import PADDING, PADDING_OF_BACKLOG, READING, Ladder
from jaxkv._src.planning import plan_cache
from jaxkv._src.scheduler import Scheduler, Wanted
from jaxkv._src.specs import FullAttentionSpec

LAYERS = {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)}


def make(
    max_requests: int, max_tokens: int, num_bytes: int = 2**28
) -> tuple[BlockManager, Scheduler, Ladder]:
    plan = plan_cache(LAYERS, num_bytes, max_model_len=2048)
    manager = BlockManager(plan, max_requests=max_requests)
    scheduler = Scheduler(manager, max_tokens=max_tokens)
    return manager, scheduler, Ladder(scheduler, max_requests, max_tokens)


def test_shapes_are_few_and_hold_what_the_engine_may_run() -> None:
    _, _, ladder = make(256, 8192)
    assert list(ladder.decode) == [8, 32, 64, 128, 192, 256]
    assert list(ladder.mixed) == [256, 512, 768, 2048, 8192]
    for max_requests, max_tokens in [(1, 1), (1, 16), (3, 16), (8, 100), (100, 100), (1000, 3000)]:
        _, _, ladder = make(max_requests, max_tokens)
        assert list(ladder.mixed) == sorted(ladder.mixed)
        assert min(ladder.mixed) >= min(max_requests, max_tokens)  # or decodes leave no room
        assert max(ladder.decode) == max_requests
        assert max(ladder.mixed) == max_tokens
        assert list(ladder.decode) == sorted(ladder.decode)


def test_steps_take_what_waits_in_nearly_the_shortest_time() -> None:
    """Next to all ways to compute it, by the same estimate of a step's time."""
    _, _, ladder = make(64, 4096)
    for decodes in (0, 10, 64):
        for has_backlog, padding in ((False, PADDING), (True, PADDING_OF_BACKLOG)):

            def time_of(size: int, wanted: int, padding: int = padding) -> int:
                return READING + size + padding * max(0, size - wanted)

            best, taken = dict[int, int](), dict[int, int]()
            for wanted in range(decodes + 1, 4096):
                sizes = [size for size in ladder.mixed if size > decodes]
                best[wanted] = min(
                    time_of(size, wanted) + best.get(wanted - size + decodes, 0) for size in sizes
                )
                size = ladder.fill(Wanted(wanted, has_backlog), decodes)
                taken[wanted] = time_of(size, wanted) + taken.get(wanted - size + decodes, 0)
                assert taken[wanted] <= 1.1 * best[wanted], (wanted, decodes)


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(2**28, 0.02), (2**18, 0.05)], ids=["plenty", "half of the requests"]
)
def test_steps_of_a_burst_are_padded_little(num_bytes: int, most: float) -> None:
    """Prompts that arrive at once, of which more wait than run, and that end at random times."""
    manager, scheduler, ladder = make(32, 2048, num_bytes)
    rng = np.random.default_rng(0)
    left = {}
    for name in range(100):
        left[name] = int(rng.integers(20, 60))
        scheduler.add(name, int(rng.integers(100, 800)), max_tokens=1024)
    computed = padded = 0
    drawn: list[int] = []
    while left:
        filled = ladder.fill(scheduler.wanted(), len(drawn))
        schedule = scheduler.schedule(max_tokens=filled)
        shape = ladder.fitting(schedule, sum(schedule.work.values()))
        manager.step(shape, schedule.work)
        if shape.max_tokens > READING:
            computed += sum(schedule.work.values())
            padded += shape.max_tokens - sum(schedule.work.values())
        for name in schedule.samples:
            left[name] -= 1
            if left[name]:
                scheduler.append({name: 1})
            else:
                scheduler.finish(name)
                del left[name]
    assert computed > 20_000
    assert padded < most * computed, padded / computed


@pytest.mark.parametrize("prompt", [40, 200, 1700])
def test_a_prompt_next_to_many_decodes_takes_few_steps(prompt: int) -> None:
    """Decodes fill all but one token of the smallest step, and the prompt no larger one."""
    manager, scheduler, ladder = make(256, 2048)
    for name in range(255):
        scheduler.add(name, 1)
    steps, drawn = 0, list[int | str]()
    while "prompt" not in drawn:
        most = ladder.fill(scheduler.wanted(), len(drawn))
        schedule = scheduler.schedule(max_tokens=most)
        manager.step(ladder.fitting(schedule, sum(schedule.work.values())), schedule.work)
        drawn = list(schedule.samples)
        scheduler.append(dict.fromkeys(drawn, 1))
        if not steps:
            scheduler.add("prompt", prompt)
        steps += 1
    assert steps < 20
