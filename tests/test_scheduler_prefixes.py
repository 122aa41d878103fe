"""The scheduler with token ids: prefixes found, states kept, samples of one prompt."""

from collections.abc import Hashable

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.hf_config import layers_from_config, load_config
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.uploads import StepShape
from tests.test_prefixes import plan_of


class Server:
    """An engine with token ids and without a model, whose next token follows from the last five."""

    def __init__(self, plan: Plan, *, max_requests: int = 4, **options):
        self.manager = BlockManager(plan, max_requests=max_requests, checkpoint_share=0.5)
        self.tokens: dict[Hashable, list[int]] = {}
        options = {"max_tokens": 16, "forks": max_requests} | options
        self.scheduler = Scheduler(self.manager, tokens=self.tokens, **options)
        self.shape = self.scheduler.shape(extra=16)
        self.limits: dict[Hashable, int] = {}
        self.chunks: dict[Hashable, list[int]] = {}
        self.preemptions = 0

    def add(self, name: Hashable, prompt: list[int], length: int, samples: int = 1) -> None:
        for sample in (name, *((name, i) for i in range(1, samples))):
            self.tokens[sample], self.limits[sample] = list(prompt), length
            self.chunks[sample] = []
        self.scheduler.add(name, len(prompt), max_tokens=length, samples=samples)

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        self.manager.step(self.shape, schedule.work, extra=schedule.token_ids)
        for name in schedule.work:
            self.chunks[name].append(self.manager.num_computed_tokens(name))
        self.preemptions += len(schedule.preempted)
        return schedule

    def sample(self, schedule: Schedule) -> None:
        for name in schedule.samples:
            if len(self.tokens[name]) == self.limits[name]:
                self.scheduler.finish(name)
            else:
                self.tokens[name].append(sum(self.tokens[name][-5:]) * 7 % 3)
                self.scheduler.append({name: 1})

    def serve(self) -> None:
        for _ in range(5_000):
            if not self.scheduler.has_work:
                break
            self.sample(self.step())
        assert not self.scheduler.has_work, "requests starve"
        assert not self.manager.requests


@pytest.mark.parametrize("name", ["full", "windows", "align", "modes"])
def test_chunks_end_where_those_of_a_cold_run_do(name: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 40).tolist()
    ends: list[set[int]] = []
    for warm_up in (0, 17, 31):
        server = Server(plan_of(name, 150), chunk_tokens=8)
        if warm_up:
            server.add("before", tokens[:warm_up], warm_up)
            server.serve()
        server.add("r", tokens, 40)
        server.serve()
        ends.append({end for end in server.chunks["r"] if end < 40})
        cached = 40 - sum(np.diff([0, *server.chunks["r"]]))
        assert cached == 0 or server.manager.prefix_stats().hits
    cold = ends[0]
    for warm in ends[1:]:
        first = min(warm, default=40)
        assert {end for end in cold if end >= first} <= warm


def test_a_preempted_request_finds_its_computed_blocks_again() -> None:
    server = Server(plan_of("full", 18), max_requests=2)
    for request in range(2):
        server.add(request, [request] * 20, 44)
    while not server.preemptions:
        schedule = server.step()
        server.sample(schedule)
    (victim,) = schedule.preempted
    computed = server.chunks[victim][-1]
    server.scheduler.finish(1 - victim)
    hit = server.step().hits[victim]
    taken = 4  # the block for which it was preempted
    assert hit.num_cached_tokens == computed // 4 * 4 - taken


# The load of vllm#45238: 64 prompts of 8 system prompts, 1500 tokens shared and 700 of their own,
# one after the other. Each system prompt misses once, so at most 56 can hit. vLLM: 0 of 64 at
# first, 40 with the states of junctions, 48 with states at intervals.
def _shared_prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(8):
        prefix = rng.integers(0, 248_320, 1500)
        prompts += [np.concatenate([prefix, rng.integers(0, 248_320, 700)]) for _ in range(8)]
    return [prompts[i] for i in rng.permutation(64)]


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize(("boundaries", "wanted"), [((1500,), 56), ((), 48)])
def test_hybrid_prompts_hit_wherever_they_can(mode: str, boundaries, wanted: int) -> None:
    layers = layers_from_config(load_config("qwen3-next-80b-a3b"), state_cache_mode=mode)
    plan = plan_cache(layers, 2**60, max_model_len=4096, num_blocks_override=641)  # 8 GiB
    tokens = dict(enumerate(_shared_prompts()))
    manager = BlockManager(plan, max_requests=4)
    scheduler = Scheduler(manager, max_tokens=8192, forks=4, tokens=tokens)
    shape = StepShape.for_plan(
        plan, max_requests=4, max_tokens=8192, forks=4, cached_tokens=plan.max_model_len
    )
    most_kept = cached = 0
    for name, prompt in tokens.items():
        scheduler.add(name, len(prompt), boundaries=boundaries)
        while manager.computed_tokens.get(name, 0) < len(prompt):
            schedule = scheduler.schedule()
            manager.step(shape, schedule.work)
            cached += sum(hit.num_cached_tokens for hit in schedule.hits.values())
            most_kept = max(most_kept, manager.prefix_stats().checkpoint_blocks)
        scheduler.finish(name)
    stats = manager.prefix_stats()
    assert (stats.requests, stats.hits) == (64, wanted)
    assert cached == wanted * 1500
    assert most_kept <= plan.num_blocks // 10


@pytest.mark.parametrize("name", ["full", "none"])
def test_a_prompt_is_looked_up_once_when_it_is_admitted(name: str, monkeypatch) -> None:
    server = Server(plan_of(name, 150))
    server.add("first", [1] * 20, 20)
    server.serve()
    looked_up: list[int] = []

    def walk(tree, namespace, tokens, walk=PromptTree.walk):
        looked_up.append(tokens.size)
        return walk(tree, namespace, tokens)

    monkeypatch.setattr(PromptTree, "walk", walk)
    for request in range(2):
        server.add(request, [1] * 20, 20)
    hits = server.scheduler.schedule().hits
    assert looked_up == [20, 20]
    assert all(hits[request].num_cached_tokens > 0 for request in range(2))


@pytest.mark.parametrize(("mode", "shares"), [("none", False), ("align", False), ("all", True)])
def test_a_plan_that_overwrites_states_needs_forks_to_share(mode: str, shares: bool) -> None:
    manager = BlockManager(plan_of(mode), max_requests=2)
    tokens = {name: list(range(20)) for name in "ab"}
    scheduler = Scheduler(manager, max_tokens=32, tokens=tokens)
    shape = scheduler.shape(extra=32)
    for name in tokens:
        scheduler.add(name, 20)
        manager.step(shape, scheduler.schedule().work)
        scheduler.finish(name)
    assert manager.prefix_stats().hits == shares


def test_a_prompt_without_its_token_ids_is_refused() -> None:
    scheduler = Scheduler(
        BlockManager(plan_of("full"), max_requests=2), max_tokens=8, tokens={"a": [1, 2]}
    )
    with pytest.raises(ValueError, match="hold 2 token ids"):
        scheduler.add("a", 3)
    with pytest.raises(ValueError, match="hold 0 token ids"):
        scheduler.add("b", 1)


# --- faults of earlier schedulers ----------------------------------------------------


def add_two_after_one(server: Server, prompt: list[int], max_tokens: int) -> None:
    """Adds "a" and "b" after another request has computed their prompt and ended."""
    server.add("x", list(prompt), len(prompt) + 1)
    while "x" not in server.step().samples:
        pass
    server.scheduler.finish("x")
    for name in "ab":
        server.add(name, list(prompt), max_tokens)


def test_a_prompt_waits_for_room_rather_than_share_a_part_of_its_prefix() -> None:
    server = Server(plan_of("full", 150), cached_tokens=30)
    add_two_after_one(server, [1] * 24, 30)
    for name in "ab":
        hits = server.step().hits
        assert {request: hit.num_cached_tokens for request, hit in hits.items()} == {name: 20}


def test_ids_past_the_prompt_are_not_those_of_the_prompt() -> None:
    server = Server(plan_of("full"))
    server.add("x", [1] * 20, 21)
    server.serve()
    server.tokens["a"], server.chunks["a"] = [1] * 20, []
    server.scheduler.add("a", 8)
    schedule = server.step()
    assert schedule.hits["a"].num_cached_tokens == schedule.work["a"] == 4


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    server = Server(plan_of("full", 150), cached_tokens=100)
    server.add("a", [1, 2, 3, 4, 0] * 4, 30, samples=4)
    samples = ("a", ("a", 1), ("a", 2), ("a", 3))
    assert server.scheduler.waiting == samples
    found = [server.step()]
    assert found[0].work == {"a": 12} and not found[0].samples
    found.append(server.step())
    assert found[1].work == {"a": 8} and found[1].samples == dict.fromkeys(samples, 0)
    server.sample(found[1])
    assert server.scheduler.running == samples
    third = server.step()
    assert third.work == dict.fromkeys(samples, 1)
    assert list(third.samples.values()) == [0, 1, 2, 3]
    server.sample(third)
    server.serve()


@pytest.mark.parametrize(("name", "cached"), [("full", 9), ("windows", 8)])
def test_samples_that_wait_for_a_row_start_with_all_of_the_prompt_that_one_has(
    name: str, cached: int
) -> None:
    """Without windows that is all but the last token, and else the whole blocks."""
    server, hits = Server(plan_of(name, 150), max_requests=2), dict[Hashable, int]()
    server.add("a", [1, 2, 3, 4, 0] * 2, 16, samples=5)
    server.limits["a", 1] = 12  # so that one or the other runs at any time
    while server.scheduler.has_work:
        schedule = server.step()
        hits |= {one: hit.num_cached_tokens for one, hit in schedule.hits.items()}
        server.sample(schedule)
    assert hits == {"a": 0} | {("a", number): cached for number in range(2, 5)}
    assert server.manager.prefix_stats().cached_blocks


def test_samples_need_their_own_ids() -> None:
    server = Server(plan_of("full", 150))
    server.tokens["a"] = [1] * 8
    with pytest.raises(ValueError, match=r"\('a', 1\) has 8 tokens, .* hold 0 token ids"):
        server.scheduler.add("a", 8, samples=2)
    assert not server.scheduler.has_work


def test_a_restart_forgets_tokens_that_no_step_will_bring() -> None:
    plan = plan_of("full", 150)
    manager, tokens = BlockManager(plan, max_requests=2), {"a": [1] * 6}
    scheduler = Scheduler(manager, max_tokens=8, tokens=tokens, lookahead_steps=3)
    scheduler.add("a", 6)
    for _ in range(3):
        manager.step(scheduler.shape(extra=0), scheduler.schedule().work)
        scheduler.append({"a": 1})
    tokens["a"].append(5)  # of the first step; the others are lost
    manager.reset()
    scheduler.restart()
    assert scheduler.num_tokens("a") == 7
    assert scheduler.schedule().work == {"a": 7}
    tokens["a"].clear()  # a prompt is none of them
    scheduler.restart()
    assert scheduler.num_tokens("a") == 6 and not scheduler.schedule().work
