"""The scheduler: budgets, order, preemption, forks, and as many requests as the plan promises."""

import copy
import dataclasses
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Hashable, MutableMapping

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.hf_config import layers_from_config, load_config
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.scheduler._admission import MOST_BLOCKED
from jaxkv._src.scheduler._requests import MOST_PASSES
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
def test_requests_that_fit_start_in_line(kind: str, preemption: bool) -> None:
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
    blocked = 0
    for name in server.scheduler.waiting:
        together = [*running, name]
        most = sum(steady[n] for n in together) + max(share[n] for n in together)
        free = manager.num_free_blocks - reserved - needed[name]
        if (free < 0) if preemption else (most > plan.usable_blocks):
            blocked += 1
            if blocked == MOST_BLOCKED:
                break
            continue
        reserved, running = reserved + needed[name], together
    return sorted(running)


def test_lower_priorities_come_first_and_equal_ones_as_they_arrive() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=16)
    for name, priority in {"a": 0, "b": 5, "c": 1, "d": 5, "e": -1, "f": 1}.items():
        server.scheduler.add(name, 4, priority=priority)
    assert server.scheduler.waiting == ("e", "a", "c", "f", "b", "d")
    assert server.scheduler.schedule().work == {"e": 4, "a": 4}


def test_the_last_of_the_highest_number_is_preempted() -> None:
    server = Server(small_plan(9), max_requests=3, max_tokens=24)
    for name, priority in {"a": 1, "b": 1, "c": 0}.items():
        server.scheduler.add(name, 8 if name == "c" else 6, max_tokens=24, priority=priority)
    preempted: list[Hashable] = []
    for _ in range(8):
        schedule = server.scheduler.schedule()
        preempted += schedule.preempted
        server.manager.step(server.shape, schedule.work)
        server.scheduler.append({name: 1 for name in schedule.samples})
    assert preempted == ["b"]


def test_few_requests_pass_one_that_does_not_fit() -> None:
    server = Server(small_plan(11), max_requests=4, max_tokens=32)
    server.add("long", 24, 30)
    server.step()
    server.add("large", 30, 31)
    started: list[Hashable] = []
    for number in range(2 * MOST_PASSES):
        server.add(number, 3, 3)
        schedule = server.step()
        started += schedule.hits
        for name in schedule.samples.keys() - {"long"}:
            server.scheduler.finish(name)
    assert started == [*range(MOST_PASSES)]
    server.scheduler.finish("long")
    assert next(iter(server.step().hits)) == "large"


def test_decodes_or_prompts_get_the_tokens_of_a_step_first() -> None:
    for order, first in (("decode_first", {"a": 1, "b": 3}), ("prefill_first", {"b": 4})):
        server = Server(small_plan(40), max_requests=4, max_tokens=4, order=order)
        server.add("a", 3, 20)
        server.sample(server.step())
        server.add("b", 7, 20)
        assert server.step().work == first


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


def test_scheduling_needs_no_jax() -> None:
    code = "import sys, jaxkv; jaxkv.Scheduler; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- schedules that are not carried out ----------------------------------------------


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


# --- drafts ---------------------------------------------------------------------------

DRAFTED: dict[str, dict[str, LayerSpec]] = {
    "window": {"full": FULL, "window": WINDOW},
    "state": {
        "full": FULL,
        "state": StateSpec(block_size=4, shapes=((2,),), dtypes=("f32",), speculative_blocks=3),
    },
}


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


def test_more_tokens_than_a_step_takes_are_computed_in_several() -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=6)
    server.add("a", 3, 32)
    server.step()
    server.scheduler.append({"a": 20})  # what the user says next
    assert [server.step().work["a"] for _ in range(4)] == [6, 6, 6, 2]


# --- room -----------------------------------------------------------------------------


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


def test_drafts_that_do_not_fit_into_a_cut_step_wait_for_the_next() -> None:
    server = Server(small_plan(40), max_requests=3, max_tokens=8)
    server.add("a", 2, 30)
    server.step()
    server.scheduler.append({"a": 4})
    for cut in (3, 1, 2):
        assert not server.scheduler.schedule(max_tokens=cut).work
    assert server.scheduler.schedule(max_tokens=4).work == {"a": 4}


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
