"""The scheduler: budgets, order, preemption, forks, and as many requests as the plan promises."""

import copy
import dataclasses
import pickle
import random
import subprocess
import sys
import types
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxkv._src.blocks import BlockManager
from jaxkv._src.hf_config import layers_from_config, load_config
from jaxkv._src.offload import HostMemory
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._budget import StepBudget
from jaxkv._src.scheduler._chooser import Chooser
from jaxkv._src.scheduler._requests import ANYWHERE, Running
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, Limits, SlidingWindowSpec, StateSpec
from jaxkv._src.uploads import StepShape

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, num_kv_heads=1, head_size=4)
ORDERS = ["decode_first", "prefill_first"]


def small_plan(
    num_blocks: int, layers: dict[str, LayerSpec] | None = None, in_flight: int = 8, **options
) -> Plan:
    return plan_cache(
        {"full": FULL} if layers is None else layers,
        2**30,
        num_blocks_override=num_blocks,
        limits=Limits(max_in_flight_tokens=in_flight),
        **({"max_model_len": 32} | options),
    )


def tight_plan(spare_blocks: int, layers: dict[str, LayerSpec], **options) -> Plan:
    """Returns a plan with ``spare_blocks`` more blocks than its longest request takes."""
    plan = small_plan(200, layers, **options)
    least = 1 + plan.admission_blocks(plan.max_model_len)
    return small_plan(least + spare_blocks, layers, **options)


class Server:
    """An engine without a model, which checks the invariants of every schedule."""

    def __init__(
        self, plan: Plan, *, max_requests: int, max_tokens: int, forks: int = 0, **options
    ):
        self.manager = BlockManager(plan, max_requests=max_requests)
        self.scheduler = Scheduler(self.manager, max_tokens=max_tokens, forks=forks, **options)
        self.shape = StepShape.for_plan(
            plan, max_requests=max_requests, max_tokens=max_tokens, forks=forks
        )
        self.limits: dict[Hashable, int] = {}
        self.arrived: list[Hashable] = []
        self.schedules: list[Schedule] = []
        self.preemptions = 0

    def add(self, name: Hashable, prompt: int, tokens: int, encoder_tokens: int = 0) -> None:
        """Adds a request that ends when it has ``tokens`` tokens."""
        self.scheduler.add(name, prompt, max_tokens=tokens, encoder_tokens=encoder_tokens)
        self.limits[name] = tokens
        self.arrived.append(name)

    def step(self, *, carry_out: bool = True) -> Schedule:
        schedule = self.scheduler.schedule()
        self.schedules.append(schedule)
        self.preemptions += len(schedule.preempted)
        self._check(schedule)
        if carry_out:
            self.manager.step(self.shape, schedule.work)  # raises if anything does not fit
        return schedule

    def sample(self, schedule: Schedule) -> None:
        """Appends a token to each sampled request, and finishes those that have all tokens."""
        for name in schedule.samples:
            if self.scheduler.num_tokens(name) == self.limits[name]:
                self.scheduler.finish(name)
            else:
                self.scheduler.append({name: 1})

    def _check(self, schedule: Schedule) -> None:
        work, computed = schedule.work, self.manager.computed_tokens
        assert sum(work.values()) <= self.shape.max_tokens
        assert len(work) <= self.shape.batch_size
        assert set(work) <= set(self.scheduler.running)
        assert set(schedule.preempted) <= set(self.scheduler.waiting)
        for name, count in work.items():
            left = self.scheduler.num_tokens(name) - computed[name]
            assert 1 <= count <= left
            assert (name in schedule.samples) == (count == left)
        assert list(self.scheduler.running) == self._by_age(self.scheduler.running)
        if schedule.preempted:
            oldest = self._by_age(schedule.preempted)[0]
            running = self.scheduler.running
            assert self._by_age([*running, oldest])[-1] == oldest, "an older request was preempted"

    def _by_age(self, names) -> list[Hashable]:
        return sorted(names, key=self.arrived.index)

    def serve(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.sample(self.step())
        assert not self.scheduler.has_work, "requests starve"
        assert not self.manager.requests
        held = self.manager.block_pool.num_blocks - 1 - self.manager.num_free_blocks
        assert held == sum(map(len, self.manager.sink_block_ids))


LAYERS: dict[str, dict[str, LayerSpec]] = {
    "full": {"full": FULL},
    "windows": {"full": FULL, "window": WINDOW},
    "states": {"full": FULL, "state": StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",))},
}


def run_random(plan: Plan, seed: int, **options) -> Server:
    """Serves random arrivals, aborts and discarded schedules, then all requests to their end."""
    draw = random.Random(seed)
    server = Server(
        plan, max_requests=draw.randint(1, 5), max_tokens=draw.randint(1, 12), **options
    )
    tokens = 0
    for name in range(draw.randint(1, 8)):
        length = draw.randint(1, plan.max_model_len)
        tokens += length
        server.add(name, draw.randint(1, min(length, draw.choice([3, 99]))), length)
        for _ in range(draw.randint(0, 4)):
            carry_out = draw.random() < 0.8
            schedule = server.step(carry_out=carry_out)
            if carry_out:
                server.sample(schedule)
        alive = [*server.scheduler.running, *server.scheduler.waiting]
        if alive and draw.random() < 0.2:
            server.scheduler.finish(draw.choice(alive))
    server.serve(most_steps=20 * tokens)
    return server


@settings(max_examples=120)
@given(
    st.sampled_from([0, 3, 30]),
    st.sampled_from(list(LAYERS)),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_every_request_ends_and_every_step_fits(
    spare_blocks: int, kind: str, order: str, preemption: bool, seed: int
) -> None:
    plan = tight_plan(spare_blocks, LAYERS[kind])
    server = run_random(plan, seed, order=order, preemption=preemption)
    again = run_random(plan, seed, order=order, preemption=preemption)
    assert server.schedules == again.schedules, "the same calls gave other schedules"
    assert preemption or not server.preemptions
    event(f"preemptions: {min(server.preemptions, 3)}")


def test_random_traffic_preempts() -> None:
    servers = [run_random(tight_plan(2, LAYERS["windows"]), seed) for seed in range(40)]
    assert sum(server.preemptions > 0 for server in servers) >= 5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("preemption", [True, False])
@pytest.mark.parametrize(
    ("name", "memory", "length"),
    [
        *[("gemma-3-27b", 12, 9000), ("gpt-oss-20b", 3, 9000), ("gemma-2-9b", 12, 8192)],
        *[("llama-4-scout", 16, 17000), ("qwen3.5-4b", 3, 9000), ("deepseek-v4-flash", 3, 5000)],
    ],
)
def test_as_many_requests_run_at_once_as_the_plan_says(
    name: str, memory: int, length: int, preemption: bool, order: str
) -> None:
    plan = plan_cache(layers_from_config(load_config(name)), memory * 2**30, max_model_len=length)
    promised = plan.requests_that_fit(length)
    assert promised > 1
    server = Server(
        plan, max_requests=promised + 1, max_tokens=8192, order=order, preemption=preemption
    )
    for request in range(promised):
        server.add(request, length - 1, length)
    for _ in range(3 * promised * -(-length // 8192)):
        schedule = server.step()
        server.scheduler.append(
            {r: 1 for r in schedule.samples if server.scheduler.num_tokens(r) < length}
        )
    computed = server.manager.computed_tokens
    assert list(computed.values()) == [length] * promised
    assert not server.preemptions


@pytest.mark.parametrize("in_flight", [8, 16])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("order", ORDERS)
def test_prompts_that_start_together_wait_for_the_blocks_of_one(kind, order, in_flight) -> None:
    """Without preemption, no pool has room for what all of them take while they are computed."""
    for count in range(1, 6):
        plan = small_plan(500, LAYERS[kind], in_flight)
        steady, whole = plan.steady_blocks(32), plan.admission_blocks(32)
        plan = small_plan(1 + (count - 1) * steady + whole, LAYERS[kind], in_flight)
        server = Server(plan, max_requests=6, max_tokens=96, order=order, preemption=False)
        for name in range(6):
            server.add(name, 31, 32)
        server.step()
        assert len(server.scheduler.running) == count
        server.sample(server.schedules[-1])
        server.serve(most_steps=200)
        assert not server.preemptions


@pytest.mark.parametrize("preemption", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_requests_start_in_order_for_as_long_as_they_fit_together(
    kind: str, preemption: bool
) -> None:
    draw = random.Random(kind)
    # With preemption, windows give blocks back while a long prompt is computed.
    spare, in_flight = (40, [2, 8]) if preemption else (20, [2, 8, 24])
    for _ in range(40):
        plan = tight_plan(draw.randint(0, spare), LAYERS[kind], in_flight=draw.choice(in_flight))
        server = Server(plan, max_requests=12, max_tokens=200, preemption=preemption)
        sizes: dict[Hashable, tuple[int, int]] = {}
        for name in range(8):
            tokens = draw.randint(1, 32)
            sizes[name] = draw.randint(1, tokens), tokens
            server.add(name, *sizes[name])
            if name % 3 == 2:  # the first ones compute a part of their prompts
                running = fitting(server, sizes, preemption)
                assert list(server.step().work.keys() - running) == []
                assert list(server.scheduler.running) == running


def fitting(server: Server, sizes: dict[Hashable, tuple[int, int]], preemption: bool) -> list:
    """Returns the requests that are to run in the next step of prompts, by the definitions."""
    plan, manager = server.scheduler._plan, server.manager
    running = list(server.scheduler.running)
    needed = {n: plan.admission_blocks(min(p + 1, t)) for n, (p, t) in sizes.items()}
    reserved = sum(
        max(0, needed[n] - sum(manager.allocated_blocks(n)))
        for n in running
        if manager.num_computed_tokens(n) < sizes[n][0]
    )
    steady = {n: plan.steady_blocks(t) for n, (_, t) in sizes.items()}
    share = {n: plan.admission_blocks(t) - steady[n] for n, (_, t) in sizes.items()}
    for name in server.scheduler.waiting:
        reserved += needed[name]
        most = sum(steady[n] for n in [*running, name]) + max(share[n] for n in [*running, name])
        if (reserved > manager.num_free_blocks) if preemption else (most > plan.usable_blocks):
            break
        running.append(name)
    return running


def test_decodes_or_prompts_get_the_tokens_of_a_step_first() -> None:
    for order, first in (("decode_first", {"a": 1, "b": 3}), ("prefill_first", {"b": 4})):
        server = Server(small_plan(40), max_requests=4, max_tokens=4, order=order)
        server.add("a", 3, 20)
        server.sample(server.step())
        server.add("b", 7, 20)
        assert server.step().work == first


def test_the_youngest_is_preempted_and_returns_before_later_arrivals() -> None:
    server = Server(small_plan(9, max_model_len=24), max_requests=4, max_tokens=8)
    for name in ("a", "b"):
        server.add(name, 8, 24)
    seen: list[Schedule] = []
    while not server.preemptions:
        seen.append(server.step())
        server.sample(seen[-1])
    server.add("c", 4, 8)
    assert seen[-1].preempted == ("b",)
    assert list(seen[-1].work) == ["a"]
    assert server.scheduler.waiting == ("b", "c")
    server.serve(most_steps=100)


def calls_of(function: Callable[[], object]) -> int:
    """Returns the number of calls of Python and C functions that a function makes."""
    count = 0

    def note(frame, event: str, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def admit_at_once(prompts: int, *, preemption: bool, tokens: bool) -> int:
    """Returns the calls of a schedule that admits new prompts."""
    manager = BlockManager(small_plan(40 * prompts, LAYERS["windows"]), max_requests=prompts)
    ids = {name: [name] * 12 for name in range(prompts)} if tokens else None
    scheduler = Scheduler(manager, max_tokens=12 * prompts, preemption=preemption, tokens=ids)
    for name in range(prompts):
        scheduler.add(name, 12)
    calls = calls_of(scheduler.schedule)
    assert len(scheduler.running) == prompts
    return calls


@pytest.mark.parametrize("preemption", [True, False])
@pytest.mark.parametrize("tokens", [True, False])
def test_admission_is_linear_in_the_prompts(preemption: bool, tokens: bool) -> None:
    few, many = (admit_at_once(n, preemption=preemption, tokens=tokens) for n in (32, 128))
    assert many < 4.5 * few


def test_requests_that_wait_cost_a_steady_step_nothing() -> None:
    def calls(waiting: int) -> int:
        server = Server(small_plan(40), max_requests=4, max_tokens=16)
        for name in range(4 + waiting):
            server.add(name, 4, 30)
        server.sample(server.step())
        return calls_of(server.scheduler.schedule)

    assert calls(1000) <= calls(1) + 10


@pytest.mark.parametrize("reason", ["forks", "preemptions"])
def test_requests_return_to_a_long_queue_at_no_cost(reason: str) -> None:
    def calls(waiting: int) -> int:
        server = Server(small_plan(9, max_model_len=24), max_requests=3, max_tokens=8, forks=1)
        for name in "ab":
            server.add(name, 8, 24)
        server.step()
        server.step()
        for name in range(waiting):
            server.add(name, 8, 24)
        if reason == "forks":
            return calls_of(lambda: server.scheduler.fork("a", [("a", i) for i in range(20)]))
        count = 0
        while not server.preemptions:
            server.scheduler.append({"a": 1, "b": 1})
            count = calls_of(server.step)
        return count

    assert calls(1000) <= 1.2 * calls(10)


@pytest.mark.parametrize(("chunk", "prompt", "left"), [(3, 28, 1), (4, 30, 2)])
def test_the_oldest_goes_on_if_the_youngest_has_all_tokens_of_a_step_and_no_blocks(
    chunk: int, prompt: int, left: int
) -> None:
    """Whether its last tokens have a block, or take one of the youngest."""
    server = Server(small_plan(10), max_requests=2, max_tokens=chunk + 1, chunk_tokens=chunk)
    server.add("old", prompt, 32)
    for _ in range(24 // chunk):
        server.step()
    server.add("young", 1, 32)
    assert server.step().work == {"old": chunk, "young": 1}
    server.scheduler.append({"young": 20})
    assert server.step().work == {"young": chunk + 1}
    schedule = server.step()
    assert schedule.work == {"old": left}
    assert schedule.preempted == (() if prompt == 28 else ("young",))
    server.sample(schedule)
    server.serve(most_steps=60)


def test_a_prompt_is_computed_in_chunks_next_to_decodes() -> None:
    server = Server(small_plan(40), max_requests=4, max_tokens=5)
    server.add("a", 2, 30)
    server.sample(server.step())
    server.add("b", 11, 30)
    found = []
    for _ in range(4):
        found.append(server.step())
        server.sample(found[-1])
    assert [schedule.work for schedule in found] == [
        *[{"a": 1, "b": 4}] * 2,
        {"a": 1, "b": 3},
        {"a": 1, "b": 1},
    ]
    alone, both = {"a": 0}, {"a": 0, "b": 1}
    assert [schedule.samples for schedule in found] == [alone, alone, both, both]


@given(st.integers(0, 2**32 - 1), st.sampled_from(list(LAYERS)), st.booleans())
def test_samples_share_their_prompt_and_fit_into_the_shape(
    seed: int, kind: str, preemption: bool
) -> None:
    draw = random.Random(seed)
    plan = tight_plan(draw.choice([1, 20]), LAYERS[kind], max_model_len=24)
    forks = draw.randint(1, 4)
    sizes = draw.choice([(5, 8), (8, 4)])  # the second has forks that wait for a step
    server = Server(
        plan, max_requests=sizes[0], max_tokens=sizes[1], forks=forks, preemption=preemption
    )
    shared = 0
    for name in range(3):
        prompt = draw.randint(1, 20)
        server.add(name, prompt, 24)
        server.add((name, "other"), draw.randint(1, 20), 24)
        while server.scheduler.num_tokens(name) == prompt:
            schedule = server.step()
            if name in schedule.samples:
                samples = [(name, i) for i in range(draw.randint(1, 4))]
                before = server.manager.num_free_blocks
                server.scheduler.fork(name, samples)
                assert server.manager.num_free_blocks == before, "a fork takes no blocks"
                shared += sum(s in server.scheduler.running for s in samples)
                at = server.arrived.index(name) + 1
                server.arrived[at:at] = samples
                server.limits |= dict.fromkeys(samples, 24)
                server.scheduler.append(dict.fromkeys(samples, 1))
            server.sample(schedule)
    event(f"samples that share: {min(shared, 3)}")
    server.serve(most_steps=3000)


def test_a_sample_whose_state_may_be_in_the_block_of_a_draft_computes_its_prompt() -> None:
    state = StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",), speculative_blocks=2)
    server = Server(small_plan(60, {"state": state}), max_requests=4, max_tokens=8, forks=2)
    server.add("a", 3, 12)  # as short as drafts are
    server.step()
    server.arrived += ["b"]
    server.scheduler.fork("a", ["b"])
    assert server.scheduler.waiting == ("b",)
    server.scheduler.append({"a": 1, "b": 1})
    assert server.step().work == {"a": 1, "b": 4}
    server.scheduler.fork("a", ["c"])
    assert server.manager.computed_tokens == {"a": 4, "b": 4, "c": 4}


def test_a_schedule_cannot_be_changed() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=9)
    for name in "abc":
        server.add(name, 3, 30)
    for _ in range(3):
        schedule = server.step()
        assert list(schedule.samples.items()) == [("a", 0), ("b", 1), ("c", 2)]
        server.sample(schedule)
        for mine in (schedule.work, schedule.samples):
            assert not isinstance(mine, MutableMapping)
            assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
    server.scheduler.finish("b")
    server.arrived.remove("b")
    server.step()
    server.scheduler.append({"a": 1, "c": 2})
    server.add("b", 2, 5)
    schedule = server.step()
    assert schedule.work == {"a": 1, "c": 2, "b": 2}
    assert schedule.samples == {"a": 0, "c": 1, "b": 2}
    server.scheduler.append({"a": 1, "c": 1, "b": 1})
    assert [server.scheduler.num_tokens(name) for name in "acb"] == [8, 9, 3]


def test_numbers_of_tokens_are_read_anew_if_they_or_their_requests_have_changed() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=9)
    for name in "ab":
        server.add(name, 3, 30)
    more = {"a": 1, "b": 2}
    for a, b in ((1, 2), (2, 2), (1, 1)):
        server.step()
        more |= {"a": a, "b": b}
        server.scheduler.append(more)
    server.step()
    server.scheduler.append({"b": 1, "a": 2})
    assert [server.scheduler.num_tokens(name) for name in "ab"] == [9, 9]
    server.step()
    more.clear()
    more |= {"b": 2}
    server.scheduler.append(more)
    more.clear()
    more |= {"a": 1}
    server.scheduler.append(more)
    assert [server.scheduler.num_tokens(name) for name in "ab"] == [10, 11]
    server.step()
    server.scheduler.append({"a": 1, "b": 1})
    for name in "ab":
        server.scheduler.finish(name)
    for name in "ab":  # the second one's counts take the place of the first one's
        server.add(name, 3, 30)
    server.step()
    server.scheduler.append({"a": 1, "b": 2})
    assert [server.scheduler.num_tokens(name) for name in "ab"] == [4, 5]


def test_rejected_drafts_are_rewound() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=8)
    server.add("a", 5, 30)
    server.step()
    server.scheduler.append({"a": 4})  # one token and three drafts
    assert server.step().work == {"a": 4}
    server.scheduler.rewind({"a": 7})
    assert server.manager.computed_tokens == {"a": 7}
    server.scheduler.append({"a": 2})
    server.scheduler.rewind({"a": 8})  # a draft that was not even computed
    assert server.step().work == {"a": 1}


def test_scheduling_needs_no_jax() -> None:
    code = "import sys, jaxkv; jaxkv.Scheduler; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- schedules that are not carried out ----------------------------------------------


@pytest.mark.parametrize("seed", [541, 245, 411])
@pytest.mark.parametrize("preemption", [True, False])
def test_schedules_that_are_not_carried_out_fit_later(seed: int, preemption: bool) -> None:
    plan = tight_plan(3, LAYERS["full"])
    run_random(plan, seed, order="prefill_first", preemption=preemption)


@pytest.mark.parametrize(("max_tokens", "prompt"), [(1, 4), (5, 4), (5, 8)])
def test_a_prompt_after_a_lost_schedule_waits_for_it(max_tokens: int, prompt: int) -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=max_tokens, order="prefill_first")
    server.add("a", prompt, 30)
    while not server.step().samples:
        pass
    server.scheduler.append({"a": 1})
    assert server.step(carry_out=False).work == {"a": 1}  # takes a block
    server.add("b", 16, 30)
    assert server.step().work == {"a": 1}
    assert server.step().work == {"b": max_tokens}


def test_many_rollouts_and_a_prompt_after_a_lost_schedule() -> None:
    plan = small_plan(1000, in_flight=64, max_model_len=128)
    server = Server(plan, max_requests=32, max_tokens=64, order="prefill_first")
    for name in range(31):
        server.add(name, 4, 128)
    for _ in range(2):
        server.sample(server.step())
    lost = server.step(carry_out=False)
    server.add("new", 64, 128)
    assert server.step() == lost
    assert server.step().work == {"new": 64}


def test_a_lost_schedule_comes_again_as_it_was_less_what_ended_or_changed() -> None:
    server = Server(small_plan(40), max_requests=4, max_tokens=8)
    for name in "abc":
        server.add(name, 6, 30)
    lost = server.step(carry_out=False)
    assert lost.work == {"a": 6, "b": 2}
    assert server.step(carry_out=False) == lost
    server.scheduler.finish("a")
    server.arrived.remove("a")
    again = server.step()
    assert again.work == {"b": 2}
    assert again.hits == {"b": lost.hits["b"]}
    assert server.step().work == {"b": 4, "c": 4}
    server.scheduler.append({"b": 4})
    assert server.step(carry_out=False).work == {"b": 4, "c": 2}
    server.scheduler.rewind({"b": 8})
    assert server.step().work == {"c": 2}
    assert server.step().work == {"b": 2}


def test_a_request_named_none_ends_alone() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=4)
    server.add(None, 2, 30)
    server.add("b", 6, 30)
    assert server.step(carry_out=False).work == {None: 2, "b": 2}
    server.scheduler.finish(None)
    server.arrived.remove(None)
    assert server.step().work == {"b": 2}


def test_a_sample_of_a_request_that_is_scheduled_already_waits() -> None:
    """The step was chosen without room for a copy of the block that they share."""
    server = Server(small_plan(40), max_requests=4, max_tokens=8, forks=2)
    server.add("a", 6, 30)
    server.sample(server.step())
    lost = server.step(carry_out=False)
    server.scheduler.fork("a", ["b"])
    assert server.scheduler.waiting == ("b",)
    server.arrived.append("b")
    server.scheduler.append({"b": 1})
    assert server.step() == lost
    assert server.step().work == {"b": 7}


def test_a_lost_schedule_is_forgotten_once_any_step_is_packed() -> None:
    server = Server(small_plan(40), max_requests=4, max_tokens=8)
    server.add("a", 6, 30)
    assert server.step(carry_out=False).work == {"a": 6}
    server.add("b", 2, 30)
    server.manager.step(server.shape, {})
    assert server.step().work == {"a": 6, "b": 2}


def test_a_request_waits_for_the_blocks_of_an_older_one_that_is_not_answered_yet() -> None:
    server = Server(small_plan(9), max_requests=2, max_tokens=8)
    server.add("a", 16, 32)
    server.add("b", 11, 32)
    while server.scheduler.num_tokens("b") < 13:  # the last of which takes a fourth block
        server.sample(server.step())
    assert server.step().work == {"a": 1}
    assert not server.step().work
    with pytest.raises(ValueError, match=r"request='a' .* got no token since"):
        server.step()
    server.scheduler.append({"a": 1})
    assert server.step().work == {"a": 1}


def test_a_request_that_no_step_can_bring_back_from_the_host_is_computed_again() -> None:
    memory = HostMemory(num_bytes=2**20, min_tokens=1)
    manager = BlockManager(small_plan(9), max_requests=2, host_memory=memory)
    scheduler = Scheduler(manager, max_tokens=8, cached_tokens=4)
    shape, limits, preempted = scheduler.shape(), {"a": 28, "b": 20}, list[str]()
    for name, prompt in (("a", 16), ("b", 11)):
        scheduler.add(name, prompt, max_tokens=limits[name])
    for _ in range(40):
        schedule = scheduler.schedule()
        preempted += schedule.preempted
        manager.step(shape, schedule.work)
        manager.take_transfers()
        for name in schedule.samples:
            if scheduler.num_tokens(name) == limits[name]:
                scheduler.finish(name)
            else:
                scheduler.append({name: 1})
    assert preempted == ["b"]
    assert not scheduler.has_work


def test_ids_of_drafts_may_be_missing_when_a_request_starts_again() -> None:
    tokens = {"a": [1] * 16, "b": [2] * 11}
    server = Server(small_plan(9), max_requests=2, max_tokens=8, tokens=tokens)
    for name in "ab":
        server.add(name, len(tokens[name]), 32)
    while "b" not in (schedule := server.step()).samples:
        for name in schedule.samples:
            tokens[name].append(1)
        server.sample(schedule)
    tokens["b"].append(1)
    server.scheduler.append({"b": 3})
    while "b" not in server.scheduler.waiting:
        tokens["a"].append(1)
        server.scheduler.append({"a": 1})
        server.step()
    server.scheduler.finish("a")
    sampled = tokens["b"].pop()
    with pytest.raises(ValueError, match="hold 11 token ids"):
        server.step()
    tokens["b"].append(sampled)
    assert "b" in server.step().work


@pytest.mark.parametrize("prompts", ["a", "ab"])
@pytest.mark.parametrize("kind", LAYERS)
def test_samples_start_for_as_long_as_they_fit_together_at_their_longest(
    kind: str, prompts: str
) -> None:
    for spare in range(0, 40, 3):
        plan = tight_plan(spare, LAYERS[kind])
        server = Server(plan, max_requests=9, max_tokens=64, forks=9, preemption=False)
        for name in prompts:
            server.scheduler.add(name, 5, samples=8 // len(prompts), max_tokens=20)
        steady = plan.steady_blocks(20)
        share = plan.admission_blocks(20) - steady
        fit = min(8, (plan.usable_blocks - share) // steady)
        schedule = server.scheduler.schedule()
        assert len(schedule.samples) == fit
        server.manager.step(server.shape, schedule.work)
        server.scheduler.append({"a": 1})
        assert {*server.scheduler.running} == {*schedule.samples}


def test_what_was_preempted_for_a_lost_schedule_and_ended_is_not_told_again() -> None:
    server = Server(small_plan(9), max_requests=2, max_tokens=8)
    server.add("a", 16, 32)
    server.add("b", 11, 32)
    while not server.step(carry_out=False).preempted:
        server.sample(server.step())
    server.scheduler.finish("b")
    assert not server.step().preempted


def test_samples_of_two_prompts_share_the_rows_that_are_left() -> None:
    server = Server(small_plan(60), max_requests=4, max_tokens=32, forks=4)
    for name in "ab":
        server.scheduler.add(name, 3, samples=3)
    schedule = server.scheduler.schedule()
    assert list(schedule.samples) == ["a", "b", ("a", 1), ("a", 2)]


@pytest.mark.parametrize("is_forked", [False, True])
def test_what_a_lost_schedule_copies_leaves_less_room_for_the_copies_of_the_next(
    is_forked: bool,
) -> None:
    server = Server(small_plan(60), max_requests=5, max_tokens=32, forks=1)
    server.add("a", 6, 32)
    server.step()
    server.scheduler.fork("a", ["b", "c"])
    server.arrived += ["b", "d", "c"]
    server.scheduler.append({"b": 1})
    assert server.step(carry_out=False).work == {"b": 1}
    server.scheduler.rewind({"b": 6})  # which takes it out of that schedule
    if is_forked:
        server.scheduler.fork("b", ["d"])
    server.scheduler.append({"b": 1, "d" if is_forked else "a": 1})
    assert server.step().work == {"b": 1} | ({"d": 7} if is_forked else {})


@pytest.mark.parametrize("is_late", [False, True])  # after the donor's next token is known
@pytest.mark.parametrize("computed", [6, 7, 8, 9, 10])
def test_a_fork_of_more_tokens_than_a_step_brings_to_the_device_computes_them(
    computed: int, is_late: bool
) -> None:
    server = Server(small_plan(60), max_requests=2, max_tokens=32, forks=1, cached_tokens=8)
    server.add("a", 6, 32)
    server.step()
    while server.manager.num_computed_tokens("a") < computed:
        server.scheduler.append({"a": 1})
        server.step()
    if is_late:
        server.scheduler.append({"a": 1})
    server.scheduler.fork("a", ["b"])
    server.arrived += ["b"]
    assert ("b" in server.scheduler.running) == (computed <= 8)
    server.scheduler.append({"b": 1} if is_late else {"a": 1, "b": 1})
    for _ in range(3):
        server.step()
        server.scheduler.append({"a": 1})
    assert server.manager.num_computed_tokens("b") == computed + 1


def test_one_that_waits_for_a_load_has_all_of_a_step_if_nobody_else_gets_blocks(
    monkeypatch,
) -> None:
    monkeypatch.setattr(BlockManager, "is_loading", lambda manager, name: name == "a")
    server = Server(small_plan(60), max_requests=3, max_tokens=32, forks=3, cached_tokens=8)
    server.add("donor", 8, 32)
    server.step()
    server.scheduler.fork("donor", ["a", "b"])
    server.scheduler.finish("donor")
    server.arrived += ["a", "b"]
    server.scheduler.append({"a": 1, "b": 5})  # "b" needs two blocks
    server.manager.block_pool.allocate(server.manager.num_free_blocks - 1)
    assert server.step().work == {"a": 1}


def test_requests_that_share_nothing_do_not_wait_for_samples_that_do() -> None:
    server = Server(small_plan(60), max_requests=4, max_tokens=32, forks=4, cached_tokens=12)
    server.add("a", 8, 32)
    server.add("b", 3, 32)
    server.step()
    server.scheduler.fork("a", ["first", "second"])
    server.scheduler.append(dict.fromkeys(("a", "first", "second", "b"), 1))
    assert set(server.scheduler.schedule().work) == {"a", "first", "b"}


def test_steady_steps_copy_the_states_of_no_more_requests_than_forks() -> None:
    tokens = {"a": [1] * 5, "b": [2] * 5}
    plan = small_plan(60, LAYERS["states"])
    server = Server(plan, max_requests=2, max_tokens=16, forks=1, tokens=tokens)
    for name in tokens:
        server.add(name, 5, 32)
    copied: list[int] = []
    for _ in range(8):
        schedule = server.scheduler.schedule()
        upload = server.manager.step(server.shape, schedule.work)
        copied.append(upload.parts()["copy_sources"].size)
        for name in schedule.samples:
            tokens[name].append(3)
        server.scheduler.append(dict.fromkeys(schedule.samples, 1))
    assert sorted(copied) == [0] * 6 + [1, 1]


@pytest.mark.parametrize("forks", [1, 2])
def test_forks_that_go_back_together_copy_in_no_step_more_than_it_has_room_for(forks: int) -> None:
    server = Server(small_plan(60), max_requests=3, max_tokens=16, forks=forks)
    server.add("a", 5, 32)
    for _ in range(5):
        server.scheduler.append(dict.fromkeys(server.step().samples, 1))
    server.step()
    server.scheduler.fork("a", ["b", "c"])
    server.arrived += ["b", "c"]
    copied: list[int] = []
    for number in range(12):
        if number == 6:
            server.scheduler.rewind(dict.fromkeys("abc", 7))  # into a block that they share
        of_last = "abc" if number in (0, 6) else server.schedules[-1].samples
        server.scheduler.append(dict.fromkeys(of_last, 1))
        schedule = server.scheduler.schedule()
        server.schedules.append(schedule)
        upload = server.manager.step(server.shape, schedule.work)
        copied.append(upload.parts()["copy_sources"].size)
    assert max(copied) <= forks and sum(copied[:6]) == sum(copied[6:]) == 2


def test_the_newest_tokens_of_a_request_that_starts_again_are_computed_together() -> None:
    tokens = {"a": [1] * 7}
    server = Server(small_plan(60), max_requests=1, max_tokens=8, tokens=tokens)
    server.add("a", 7, 32)
    server.sample(server.step())
    tokens["a"] += [2]
    server.step()
    tokens["a"] += [3, 4, 5]
    server.scheduler.append({"a": 3})  # a token and two drafts
    server.scheduler.restart()
    schedules = [server.scheduler.schedule(max_tokens=most) for most in (2, 3)]
    assert [schedule.work for schedule in schedules] == [{}, {"a": 3}]
    assert [set(schedule.hits) for schedule in schedules] == [set(), {"a"}]


def test_ids_that_are_missing_follow_those_of_their_request_that_are_known() -> None:
    tokens = {"a": [1] * 4}
    server = Server(small_plan(60), max_requests=1, max_tokens=8, tokens=tokens, lookahead_steps=2)
    server.add("a", 4, 32)
    server.step()
    tokens["a"] += [7]
    server.scheduler.append({"a": 3})
    assert server.scheduler.schedule().token_ids.tolist() == [7, -1, -1]


@pytest.mark.parametrize("count", [2, 40])
def test_missing_ids_are_found_in_steady_steps(count: int) -> None:
    tokens = {name: [1] * 3 for name in range(count)}
    server = Server(small_plan(400), max_requests=count, max_tokens=3 * count, tokens=tokens)
    for name in tokens:
        server.add(name, 3, 32)
    missing = len(tokens)  # none
    with pytest.raises(ValueError, match="token ids of it"):  # after one turn or two
        for step in range(6):
            missing = missing if step < 3 else count - 1
            schedule = server.step()
            for name in schedule.samples:
                tokens[name] += [1] * (name != missing or step > 3)
            server.scheduler.append(dict.fromkeys(schedule.samples, 1))
    assert missing == count - 1


def test_ids_of_a_prompt_are_there_when_it_is_added_however_far_the_host_is_ahead() -> None:
    tokens = {"a": [1, 2, 3]}
    server = Server(small_plan(9), max_requests=1, max_tokens=8, tokens=tokens, lookahead_steps=2)
    with pytest.raises(ValueError, match="hold 3 token ids of it"):
        server.scheduler.add("a", 4)
    assert not server.scheduler.has_work


def test_blocks_that_a_request_needs_no_more_are_no_room_for_those_that_others_owe() -> None:
    """A lost schedule gave it blocks for tokens that were taken back."""
    server = Server(small_plan(13, in_flight=24), max_requests=3, max_tokens=24)
    scheduler = server.scheduler
    server.add("a", 4, 32)
    for _ in range(17):
        server.step()
        scheduler.append({"a": 1})
    scheduler.restart()
    assert scheduler.schedule().work == {"a": 21}
    scheduler.rewind({"a": 4})
    server.add("b", 16, 32)
    server.add("c", 5, 32)
    assert scheduler.schedule().work == {"a": 4, "b": 16}


def test_a_prompt_that_gets_no_blocks_gives_those_that_left_its_window_to_an_older_request() -> (
    None
):
    plan = small_plan(13, {"window": WINDOW}, in_flight=24, max_model_len=64)
    server = Server(plan, max_requests=2, max_tokens=64, preemption=False)
    server.add("a", 9, 64)
    server.step()
    server.add("b", 60, 64)
    assert server.step().work == {"b": 24}
    server.scheduler.append({"a": 24})
    assert server.step().work == {"a": 24}


@pytest.mark.parametrize(("more", "allocated"), [(1, 2), (2, 3)])
def test_a_request_that_waits_for_its_answer_keeps_what_its_next_token_sees(
    more, allocated
) -> None:
    """And with a draft, which may be rejected, what the tokens before that one see."""
    server = Server(small_plan(40, {"window": WINDOW}), max_requests=2, max_tokens=8)
    server.add("a", 9 - more, 32)
    server.step()
    server.scheduler.append({"a": more})
    server.add("b", 3, 32)
    assert server.step().work == {"a": more, "b": 3}
    assert server.manager.allocated_blocks("a") == (3,)
    server.scheduler.append({"b": 1})
    assert server.step().work == {"b": 1}
    assert server.manager.allocated_blocks("a") == (allocated,)


def test_a_request_that_is_preempted_before_its_answer_waits_for_it() -> None:
    server = Server(small_plan(9), max_requests=2, max_tokens=8)
    server.add("a", 16, 32)
    server.add("b", 11, 32)
    while "b" not in (schedule := server.step()).samples:
        server.sample(schedule)
    while not schedule.preempted:
        server.scheduler.append({"a": 1})
        schedule = server.step()
    server.scheduler.finish("a")
    assert not server.step().work
    server.scheduler.append({"b": 1})
    assert server.step().work == {"b": 8}


# --- drafts ---------------------------------------------------------------------------

DRAFTED: dict[str, dict[str, LayerSpec]] = {
    "window": {"full": FULL, "window": WINDOW},
    "state": {
        "full": FULL,
        "state": StateSpec(block_size=4, shapes=((2,),), dtypes=("f32",), speculative_blocks=3),
    },
}


def test_drafts_can_be_rejected_after_steps_of_others() -> None:
    server = Server(small_plan(60, DRAFTED["window"]), max_requests=2, max_tokens=8)
    server.add("a", 5, 32)
    server.add("b", 3, 32)
    server.step()
    server.scheduler.append({"a": 4, "b": 1})  # a sampled token and three drafts
    server.step()
    server.scheduler.append({"b": 1})
    assert server.step().work == {"b": 1}
    server.scheduler.rewind({"a": 6})


@pytest.mark.parametrize("kind", DRAFTED)
@pytest.mark.parametrize("order", ORDERS)
def test_drafts_are_computed_together_so_that_they_can_be_rejected(kind: str, order: str) -> None:
    server = Server(small_plan(60, DRAFTED[kind]), max_requests=2, max_tokens=6, order=order)
    for name in "ab":
        server.add(name, 3, 32)
    server.step()
    for _ in range(6):
        before = {name: server.scheduler.num_tokens(name) for name in "ab"}
        server.scheduler.append({"a": 4, "b": 4})  # a sampled token and three drafts each
        for name in "ab":
            assert server.step().work == {name: 4}
            server.scheduler.rewind({name: before[name] + 1})
    assert server.manager.computed_tokens == {"a": 9, "b": 9}


def test_drafts_of_a_preempted_request_are_computed_together_too() -> None:
    """They get a step of their own, as the manager cannot tell them from a prompt's tokens."""
    draw = random.Random(0)
    seen = 0
    for _ in range(20):
        server = Server(
            tight_plan(draw.randint(0, 4), DRAFTED["state"]), max_requests=3, max_tokens=7
        )
        for name in range(3):
            server.add(name, draw.randint(1, 9), 32)
        drafted: dict[Hashable, int] = {}  # the tokens that stay if all drafts are rejected
        for _ in range(60):
            schedule = server.step()
            seen += any(name in drafted for name in schedule.preempted)
            for name in drafted.keys() & schedule.samples.keys():
                known = server.scheduler.num_tokens(name)
                if known > drafted[name]:
                    assert schedule.work[name] == known - drafted[name] + 1
            for name in schedule.samples:
                if name in drafted:
                    server.scheduler.rewind({name: drafted.pop(name)})
                known = server.scheduler.num_tokens(name)
                more = min(draw.randint(1, 4), 32 - known)
                if not more:
                    server.scheduler.finish(name)
                    server.arrived.remove(name)
                    continue
                server.scheduler.append({name: more})
                drafted[name] = known + 1
            if not server.scheduler.has_work:
                break
    assert seen > 3


@pytest.mark.parametrize(
    ("mode", "counts"), [("align", [1, 8, 3]), ("all", [8, 4]), ("none", [8, 4])]
)
def test_one_token_goes_in_front_of_many_after_rejected_drafts(mode: str, counts) -> None:
    """The "align" state that follows the accepted tokens may be in the block of rejected ones."""
    state = StateSpec(
        block_size=4, shapes=((2,),), dtypes=("f32",), cache_mode=mode, speculative_blocks=2
    )
    server = Server(small_plan(40, {"state": state}), max_requests=2, max_tokens=8)
    server.add("a", 6, 32)
    server.step()
    server.scheduler.append({"a": 3})
    server.step()
    server.scheduler.rewind({"a": 7})
    server.scheduler.append({"a": 12})  # what the user says next
    assert [server.step().work["a"] for _ in counts] == counts


@pytest.mark.parametrize("drafts", [[2], [2, 4], [4, 2], [0, 2]], ids=str)
@pytest.mark.parametrize("more", [2, 3, 4])
def test_drafts_next_to_more_tokens_than_drafts_are_computed_together(
    more: int, drafts: list[int]
) -> None:
    """Of the layers with drafts, that with room for the fewest counts."""
    aligned = StateSpec(block_size=4, shapes=((2,),), dtypes=("f32",), cache_mode="align")
    layers = {str(n): dataclasses.replace(aligned, speculative_blocks=n) for n in drafts}
    server = Server(small_plan(40, layers), max_requests=2, max_tokens=8)
    for name in "ab":
        server.add(name, 3, 32)
    server.step()
    server.scheduler.append({"a": 4, "b": more})
    assert server.step().work == {"a": 1, "b": more if more <= 3 else 1}


def test_drafts_that_are_left_when_others_are_rejected_early_are_computed_together() -> None:
    server = Server(small_plan(60, DRAFTED["window"]), max_requests=2, max_tokens=5)
    for name in "ab":
        server.add(name, 2, 32)
    server.step()
    server.scheduler.append({"a": 4, "b": 4})
    server.scheduler.rewind({"a": 5, "b": 5})
    assert [server.step().work for _ in range(2)] == [{"a": 3}, {"b": 3}]


def test_more_tokens_than_a_step_takes_are_computed_in_several() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=6)
    server.add("a", 3, 32)
    server.step()
    server.scheduler.append({"a": 20})  # what the user says next
    assert [server.step().work["a"] for _ in range(4)] == [6, 6, 6, 2]


# --- room -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("order", ORDERS)
def test_as_many_prompts_run_as_fit_if_they_do_not_decode(kind: str, order: str) -> None:
    for length in (4, 16, 31, 32):
        for blocks in (17, 30, 41):
            plan = small_plan(blocks, LAYERS[kind], in_flight=32)
            promised = plan.requests_that_fit(length)
            server = Server(plan, max_requests=50, max_tokens=32, order=order)
            for name in range(promised):
                server.add(name, length, length)
            while sum(server.manager.computed_tokens.values()) < promised * length:
                assert not server.step().preempted


def test_tokens_of_a_step_can_be_cut() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=8)
    for name in "ab":
        server.add(name, 6, 30)
    assert server.scheduler.wanted() == (12, False)
    schedule = server.scheduler.schedule(max_tokens=4)
    assert schedule.work == {"a": 4}
    server.manager.step(server.shape, schedule.work)
    assert server.scheduler.wanted() == (8, False)
    assert server.step().work == {"a": 2, "b": 6}
    assert server.scheduler.wanted() == (0, False)
    for name in "cd":  # of which one finds a row
        server.add(name, 6, 30)
    assert server.scheduler.wanted() == (6, True)
    server.scheduler.append({"a": 1, "b": 1})
    assert server.step().work == {"a": 1, "b": 1, "c": 6}
    assert server.scheduler.wanted() == (0, True)  # no row is free
    free = server.manager.num_free_blocks
    assert repr(server.scheduler) == f"Scheduler(3 requests run, 1 wait, {free} blocks free)"


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 99])
def test_a_step_takes_no_more_tokens_than_the_scheduler_said(cut: int) -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=8)
    for name in "ab":
        server.add(name, 6, 30)
    assert sum(server.scheduler.schedule(max_tokens=cut).work.values()) == min(cut, 8)


def test_drafts_that_do_not_fit_into_a_cut_step_wait_for_the_next() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=8)
    server.add("a", 2, 30)
    server.step()
    server.scheduler.append({"a": 4})
    for cut in (3, 1, 2):
        assert not server.scheduler.schedule(max_tokens=cut).work
    assert server.scheduler.schedule(max_tokens=4).work == {"a": 4}


def test_a_restart_lets_requests_wait_for_their_tokens_anew() -> None:
    manager = BlockManager(small_plan(20), max_requests=1)
    scheduler = Scheduler(manager, max_tokens=8)
    scheduler.add("a", 3)
    for _ in range(2):
        manager.step(scheduler.shape(), scheduler.schedule().work)
        assert not scheduler.schedule().work
        scheduler.restart()


def test_a_restart_computes_all_that_ran_again_in_order() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=8)
    for name in "abc":
        server.add(name, 3, 30)
    server.sample(server.step())
    server.step(carry_out=False)
    server.scheduler.restart()
    assert server.scheduler.waiting == ("a", "b", "c")
    assert not server.manager.requests
    assert server.step().work == {"a": 4, "b": 4}


@pytest.mark.parametrize("num_blocks", [9, 14, 17, 21, 30])
def test_prompts_that_turn_out_to_get_no_blocks_wait(num_blocks: int, monkeypatch) -> None:
    monkeypatch.setattr(Admission, "_fits_budget", lambda *_: True)
    server = Server(small_plan(num_blocks, in_flight=32), max_requests=6, max_tokens=96)
    for name in range(6):
        server.add(name, 13, 20)
    fit = min(6, (num_blocks - 1) // 4)
    schedule = server.step()
    assert list(schedule.work) == list(schedule.hits) == list(range(fit))
    assert server.scheduler.waiting == tuple(range(fit, 6))
    server.sample(schedule)
    server.serve(500)


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_that_arrives_before_the_answers_starts_with_them(order: str) -> None:
    """All running requests get one token more, as in the steps before."""
    server = Server(small_plan(40), max_requests=3, max_tokens=8, order=order)
    for name in "ab":
        server.add(name, 2, 30)
    for _ in range(3):
        server.step()
        server.scheduler.append({"a": 1, "b": 1})
    server.step()
    server.add("c", 4, 30)
    server.scheduler.append({"a": 1, "b": 1})
    assert server.step().work == {"a": 1, "b": 1, "c": 4}


def test_a_step_in_which_all_decode_can_be_cut() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=8)
    for name in "abc":
        server.add(name, 2, 30)
    for _ in range(3):
        server.step()
        server.scheduler.append({"a": 1, "b": 1, "c": 1})
    schedule = server.scheduler.schedule(max_tokens=2)
    assert schedule.work == {"a": 1, "b": 1} and list(schedule.samples) == ["a", "b"]
    server.manager.step(server.shape, schedule.work)
    server.scheduler.append({"a": 1, "b": 1})
    assert server.step().work == {"a": 1, "b": 1, "c": 1}


def test_a_request_that_starts_again_is_a_prompt_with_all_its_tokens() -> None:
    options = {"order": "prefill_first", "forks": 1}
    server = Server(small_plan(40), max_requests=4, max_tokens=4, **options)
    for name in "ab":
        server.add(name, 2, 30)
    while server.scheduler.num_tokens("b") < 11:
        server.sample(server.step())
    server.scheduler.rewind({"a": 3})
    server.scheduler.restart()
    server.sample(server.step())
    for computed in (5, 9):
        schedule = server.step()
        assert schedule.work == {"b": 4} and not schedule.samples
        assert server.manager.computed_tokens == {"a": 3, "b": computed}
        with pytest.raises(ValueError, match=f"has computed {computed} of 11 tokens"):
            server.scheduler.fork("b", ["c"])
    assert server.step().work == {"b": 2, "a": 1}
    server.scheduler.fork("b", ["c"])


def test_a_request_that_starts_again_can_be_forked_after_a_rewind() -> None:
    """Its prompt is then no longer all that was known when it was admitted."""
    server = Server(small_plan(40), max_requests=4, max_tokens=8, forks=1)
    server.add("a", 4, 20)
    for _ in range(5):
        server.sample(server.step())
    server.scheduler.restart()
    assert server.step().work == {"a": 8}  # of 9 tokens
    server.scheduler.rewind({"a": 8})
    server.scheduler.fork("a", ["b"])
    assert server.scheduler.running == ("a", "b")


def test_a_budget_counts_what_is_given_and_taken_back() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        tokens, requests, longest = draw.randint(1, 20), draw.randint(1, 4), draw.randint(1, 12)
        budget = StepBudget(tokens, requests, longest, forks=0, cached_tokens=0)
        given: dict[int, tuple[int, int]] = {}  # tokens that each got, and wanted
        for _ in range(20):
            name, wanted = draw.randrange(6), draw.randint(1, 9)
            if name in given:
                budget.take_back(name)
                del given[name]
            else:
                at_most, draft_start = draw.choice([1, 3, 99]), draw.choice([-1, 0, 2, 99])
                left = tokens - sum(count for count, _ in given.values())
                count = min(wanted, left, longest, at_most)
                if (draft_start <= 0 and count < wanted <= longest) or len(given) == requests:
                    count = 0
                taken = budget.num_given(wanted, at_most=at_most, draft_start=draft_start)
                got = budget.give(name, taken)
                assert got == (count > 0)
                given |= {name: (count, wanted)} if got else {}
            counts = {name: count for name, (count, _) in given.items()}
            assert dict(zip(*map(np.ndarray.tolist, budget.work), strict=True)) == counts
            assert all((name in budget) == (name in given) for name in range(6))
            assert budget.is_full == (sum(counts.values()) == tokens or len(given) == requests)


def running_of(draw: random.Random, count: int) -> Running:
    """Returns requests in any state, whose rows are their indices."""
    computed = [draw.randint(0, 9) for _ in range(count)]
    tokens = [n + draw.randint(0, 6) for n in computed]
    prefill = [draw.choice([n, n + 1, 0]) for n in computed]
    ends = [draw.choice([n + draw.randint(1, 6), ANYWHERE]) for n in computed]
    drafts = [draw.choice([draw.randint(0, n), ANYWHERE]) for n in tokens]
    return Running(
        np.arange(count),
        np.arange(count),
        *map(np.array, (computed, tokens, prefill, ends, drafts)),
    )


def test_requests_get_together_what_each_would_get_after_those_before_it() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        sizes = draw.randint(1, 20), draw.randint(1, 4), draw.randint(1, 7)
        running = running_of(draw, draw.randint(1, 5))
        chosen = np.flatnonzero(running.num_tokens > running.computed)
        together, alone = (StepBudget(*sizes, forks=0, cached_tokens=0) for _ in range(2))
        together.give_all(running, chosen)
        for at in chosen.tolist():
            alone.give_one(running, at)
        assert np.array_equal(together.work, alone.work) and together.is_full == alone.is_full


def test_the_oldest_that_a_step_has_room_for_have_work() -> None:
    """Of requests that copy blocks, or bring cached tokens to the device, or wait for loads."""
    for seed in range(200):
        draw = random.Random(seed)
        running, forks, room = running_of(draw, 5), draw.randint(1, 3), draw.randint(0, 9)
        copies, pending = ([draw.random() < chance for _ in range(5)] for chance in (0.5, 0.2))
        unsynced = [draw.choice([0, 0, 2, 4]) for _ in range(5)]
        loading = {at for at in range(5) if unsynced[at] and draw.random() < 0.3}
        manager = types.SimpleNamespace(
            may_copy_by_row=np.array(copies),
            pending_copies_by_row=np.array(pending),
            unsynced_tokens_by_row=np.array(unsynced),
            is_loading=loading.__contains__,
            block_pool=types.SimpleNamespace(has_shared_blocks=True),
        )
        options = types.SimpleNamespace(forks=forks)
        table = types.SimpleNamespace(names=np.arange(5))
        chooser: Any = types.SimpleNamespace(_manager=manager, _options=options, _table=table)
        max_tokens, longest = draw.choice([(99, 9), (2, 4)])
        step = StepBudget(max_tokens, 9, longest, forks=forks, cached_tokens=room)
        decodes, prefills, *needs = Chooser._candidates(chooser, step, running)
        alone = [StepBudget(max_tokens, 9, longest, forks=0, cached_tokens=0) for _ in range(5)]
        wanted = [at for at, alone_in in enumerate(alone) if alone_in.give_one(running, at)]
        wanted = [at for at in wanted if at not in loading] or wanted
        copying = [at for at in wanted if copies[at] and not pending[at]]
        late = copying[max(0, forks - sum(pending)) :]
        wanted = [at for at in wanted if at not in late]
        brings = [at for at in wanted if unsynced[at]]
        while sum(unsynced[at] for at in brings) > room:
            wanted.remove(brings.pop())
        assert sorted([*decodes, *prefills]) == wanted
        assert [at for at in wanted if needs[0][at]] == [at for at in wanted if at in copying]
        assert needs[1][wanted].tolist() == [unsynced[at] for at in wanted]
        assert step.forks == forks - sum(pending)


def test_requests_are_appended_to_by_their_indices_as_by_their_names() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=9)
    for name in "ab":
        server.add(name, 3, 5)
    schedule = server.step()
    index = np.array([server.scheduler.index(name) for name in "ab"])
    assert np.array_equal(schedule.samples.index, index) and np.array_equal(schedule.index, index)
    for wrong in (index.astype(float), index[None]):
        with pytest.raises(TypeError, match="num_tokens"):
            server.scheduler.append(wrong)
    for wrong in (index[[0, 0]], index - 64, index + 64, np.array([0])):
        with pytest.raises(ValueError, match="must be indices of distinct requests"):
            server.scheduler.append(wrong)
    with pytest.raises(TypeError, match="num_tokens must map requests to ints, got ndarray"):
        server.scheduler.rewind(index)  # pyrefly: ignore
    with pytest.raises(ValueError, match="has computed 3 of its 4"):
        server.scheduler.append({"a": 1, "b": 1})
        server.scheduler.append(index)
    assert server.step().work == {"a": 1, "b": 1}
    server.scheduler.append(index[1:])
    assert server.step().work == {"b": 1}
    with pytest.raises(ValueError, match="more than its max_tokens=5"):
        server.scheduler.append(index[1:])
