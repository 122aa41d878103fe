"""The scheduler with token ids: prefixes found, states kept, and the same answers as without."""

import dataclasses
import random
from collections.abc import Hashable

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.hf_config import layers_from_config, load_config
from jaxkv._src.offload import HostMemory
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.specs import FullAttentionSpec, Limits
from jaxkv._src.uploads import StepShape
from tests.reference_device import Content
from tests.simulation.device import Stories
from tests.test_prefixes import LAYERS, plan_of, state


class Server:
    """An engine over `Content`, whose next token follows from the last five.

    computed: tokens that were computed for all requests.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        cached: bool = True,
        max_requests: int = 4,
        host_memory: HostMemory | None = None,
        **options,
    ):
        self.manager = BlockManager(
            plan, max_requests=max_requests, checkpoint_share=0.5, host_memory=host_memory
        )
        self.tokens: dict[Hashable, list[int]] = {}
        self.is_cached = cached
        self.scheduler = Scheduler(
            self.manager,
            tokens=self.tokens if cached else None,
            **({"max_tokens": 16, "forks": max_requests} | options),
        )
        self.shape = self.scheduler.shape(extra=16)
        self.content, self.stories = Content(plan, max_requests), Stories()
        self.limits: dict[Hashable, int] = {}
        self.chunks: dict[Hashable, list[int]] = {}
        self.computed = self.preemptions = 0

    def add(self, name: Hashable, prompt: list[int], length: int, **options) -> None:
        self.tokens[name], self.limits[name] = list(prompt), length
        self.chunks[name] = []
        if not self.is_cached:
            options.pop("boundaries", None)
        self.scheduler.add(name, len(prompt), max_tokens=length, **options)

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        before = {name: self.manager.num_computed_tokens(name) for name in schedule.work}
        upload = self.manager.step(self.shape, schedule.work)
        self.content.apply(upload)
        for name, count in schedule.work.items():
            story = self.stories.of((), self.tokens[name])
            row, total = self.manager.requests[name], before[name] + count
            self.content.compute(row, story, before[name], total)
            self.chunks[name].append(total)
        self.computed += sum(schedule.work.values())
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


def run_random(name: str, seed: int, **options) -> Server:
    draw = random.Random(seed)
    plan = plan_of(name, draw.choice([24, 48, 150]))
    server = Server(plan, order=draw.choice(["decode_first", "prefill_first"]), **options)
    roots = [[draw.randrange(3) for _ in range(20)] for _ in range(2)]
    for request in range(12):
        root = draw.choice(roots)[: draw.randint(1, 20)]
        prompt = root + [draw.randrange(3) for _ in range(draw.randint(0, 10))]
        boundaries = [len(root)] if draw.random() < 0.5 else []
        length = draw.randint(len(prompt), 48)
        server.add(request, prompt, length, boundaries=boundaries)
        for _ in range(draw.randint(0, 6)):
            server.sample(server.step())
        if draw.random() < 0.1:
            server.manager.new_epoch()
    server.serve()
    return server


@pytest.mark.parametrize("name", LAYERS)
def test_answers_are_those_of_a_scheduler_that_shares_nothing(name: str) -> None:
    saved = preempted = 0
    for seed in range(6):
        warm, cold = run_random(name, seed), run_random(name, seed, cached=False)
        assert warm.tokens == cold.tokens
        saved += cold.computed - warm.computed
        preempted += warm.preemptions
    assert saved > 0
    assert preempted > 0


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


def test_a_partial_hit_next_to_its_donor_does_not_stop_both() -> None:
    """The room for a hit counts the blocks that it shares, and not all that it could share."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)
    plan = plan_cache(
        {"l": spec},
        2**40,
        max_model_len=1024,
        num_blocks_override=65,
        limits=Limits(max_in_flight_tokens=64),
    )
    manager, tokens = BlockManager(plan, max_requests=4), {"x": list(range(512))}
    scheduler = Scheduler(
        manager, max_tokens=64, order="prefill_first", tokens=tokens, cached_tokens=64
    )
    scheduler.add("x", 512)
    shape = scheduler.shape(extra=0)
    steps = 0
    while scheduler.has_work:
        schedule = scheduler.schedule()
        assert schedule.work
        manager.step(shape, schedule.work)
        for name in schedule.samples:
            if len(tokens[name]) == 1000:
                scheduler.finish(name)
                continue
            tokens[name].append(7)
            scheduler.append({name: 1})
        steps += 1
        if steps == 8:
            tokens["p"] = [*range(512), *range(478)]
            scheduler.add("p", 990)


@pytest.mark.parametrize("name", ["full", "windows", "none", "align"])
def test_small_budgets_never_stop_all_requests(name: str) -> None:
    partial = 0
    for seed in range(10):
        draw = random.Random(seed)
        plan = plan_of(name, draw.choice([24, 30, 48]))
        room = draw.choice([4, 8, 20, 48]) if seed else 0
        options = {"max_tokens": draw.randint(1, 6), "cached_tokens": room}
        order = draw.choice(["decode_first", "prefill_first"])
        server = Server(plan, order=order, preemption=draw.random() < 0.8, **options)
        root = [draw.randrange(3) for _ in range(36)]
        for request in range(6):
            prompt = root[: draw.randint(1, 36)] + [draw.randrange(3)] * draw.randint(0, 4)
            server.add(request, prompt, draw.randint(len(prompt), 48))
            for _ in range(draw.randint(0, 8)):
                schedule = server.step()
                assert schedule.work or not server.scheduler.has_work
                cached = [hit.num_cached_tokens for hit in schedule.hits.values()]
                assert sum(cached) <= room
                partial += room > 0 and room in cached
                server.sample(schedule)
        server.serve()
    assert partial > 1 or name in ("none", "align")


def _preempted_with_drafts(**options) -> Server:
    """Returns a server whose request "a" is computed again, two drafts included, in chunks."""
    server = Server(plan_of("full", 150), **options)
    server.add("a", [1] * 10, 48)
    for draft in ([], [2, 2]):
        server.step()
        server.tokens["a"] += [0, *draft]
        server.scheduler.append({"a": 1 + len(draft)})
    server.step()  # 14 tokens, of which the last two are drafts
    server.scheduler.restart()
    server.manager.reset_prefixes()
    return server


@pytest.mark.parametrize("is_computed", [False, True])
def test_rejected_drafts_of_a_request_that_started_again_are_not_kept(is_computed: bool) -> None:
    server = _preempted_with_drafts()
    assert server.step().work == {"a": 11}
    if is_computed:
        assert server.step().work == {"a": 3}
    server.scheduler.rewind({"a": 12})
    del server.tokens["a"][12:]
    if not is_computed:
        assert server.step().work == {"a": 1}
    server.tokens["a"] += [1, 1, 1, 1]
    server.scheduler.append({"a": 4})
    server.step()
    server.scheduler.finish("a")
    old, new = [1] * 10 + [0, 0, 2, 2, 0, 0], server.tokens["a"] + [0]
    assert server.manager.find_prefix(old).num_cached_tokens <= 12
    assert server.manager.find_prefix(new).num_cached_tokens == 12


def test_a_request_that_starts_again_after_a_rewind_is_kept_to_its_last_token() -> None:
    server = _preempted_with_drafts()
    server.step()
    server.scheduler.rewind({"a": 12})
    del server.tokens["a"][12:]
    server.scheduler.restart()
    while "a" not in server.step().samples:
        pass
    server.tokens["a"] += [1] * 6
    server.scheduler.append({"a": 6})
    server.step()
    server.scheduler.finish("a")
    assert server.manager.find_prefix([*server.tokens["a"], 0]).num_cached_tokens >= 16


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_drafts_are_never_found_in_the_cache(mode: str) -> None:
    """A request could not go back to a state in front of a cached draft."""
    states = dataclasses.replace(state(mode, 4), speculative_blocks=2)
    plan = plan_cache({"s": states}, 2**30, max_model_len=48, num_blocks_override=60)
    server = Server(plan)
    server.add("b", [1] * 10 + [0, 2, 0, 2], 20, boundaries=[12])
    while "b" not in server.step().samples:
        pass
    server.scheduler.finish("b")
    server.add("a", [1] * 10, 48)
    while "a" not in server.step().samples:
        pass
    server.tokens["a"] += [0, 2, 0]  # of which two are drafts
    server.scheduler.append({"a": 3})
    server.scheduler.restart()
    schedule = server.step()
    assert schedule.hits["a"].num_cached_tokens <= 10
    while "a" not in schedule.samples:
        schedule = server.step()
    assert schedule.work == {"a": 3}
    server.scheduler.rewind({"a": 11})


def test_a_lookup_of_tokens_that_were_rejected_since_is_not_used() -> None:
    server = _preempted_with_drafts(max_requests=1)
    server.add("y", [2] * 12, 13)
    server.scheduler.finish("a")
    server.sample(server.step())
    server.add("a", [1] * 10, 48)
    server.tokens["a"] += [0, 2, 2]  # of which the last two are rejected
    server.scheduler.schedule()
    assert server.scheduler.waiting == ("a",)
    server.tokens["a"][10:] = [1, 1]
    while server.scheduler.has_work and "a" not in (schedule := server.step()).samples:
        server.sample(schedule)
    assert server.manager.find_prefix([1] * 10 + [0, 2, 2]).num_cached_tokens <= 8


def test_a_lookup_of_drafts_that_were_rejected_since_is_not_used() -> None:
    server = Server(plan_of("full", 13), max_requests=2)
    server.add("y", [2] * 12, 48)
    server.add("a", [1] * 12, 48)
    kept, waited = 12, 0
    while waited < 2:  # "a" is preempted with its drafts, and looked up in the next step
        samples = server.step().samples
        waited += kept > 12 and server.scheduler.running == ("y",)
        if "a" in samples or waited == 2:
            server.scheduler.rewind({"a": kept})
            del server.tokens["a"][kept:]
        for name in samples:
            more = [0] if name == "y" else [0, 2, 2]
            server.tokens[name] += more
            server.scheduler.append({name: len(more)})
        kept += "a" in samples
    server.scheduler.finish("y")
    assert server.step().work == {"a": kept - 20}
    server.tokens["a"] += [1] * 6
    server.scheduler.append({"a": 6})
    server.step()
    server.scheduler.finish("a")
    assert server.manager.find_prefix([*server.tokens["a"], 0]).num_cached_tokens >= kept + 4


def test_a_lookup_before_a_restart_with_other_tokens_is_not_used() -> None:
    server = Server(plan_of("full", 13), max_requests=2)
    server.add("y", [2] * 12, 48)
    server.add("a", [1] * 12, 48)
    while server.scheduler.running != ("y",):  # "a" is preempted, looked up, and finds no room
        schedule = server.step()
        server.sample(schedule)
    old = server.tokens["a"]
    assert len(old) > 12
    server.scheduler.schedule()
    server.manager.new_epoch()
    server.tokens["a"], server.tokens["y"] = [1] * 12, [2] * 12
    server.scheduler.restart()
    server.scheduler.finish("y")
    assert server.step().work == {"a": 12}
    server.tokens["a"] += [3 - old[12]] * 9
    server.scheduler.append({"a": 9})
    server.step()
    server.scheduler.finish("a")
    assert server.manager.find_prefix([*old, 0]).num_cached_tokens <= 12
    assert server.manager.find_prefix([*server.tokens["a"], 0]).num_cached_tokens >= 20


@pytest.mark.parametrize("host_memory", [None, HostMemory(num_bytes=2**20)])
@pytest.mark.parametrize("num_tokens", range(6, 14))
def test_a_rewind_into_kept_blocks_needs_no_copy_without_forks(
    num_tokens: int, host_memory: HostMemory | None
) -> None:
    server = Server(plan_of("full", 150), forks=0, host_memory=host_memory)
    server.add("a", [1] * 6, 48)
    for _ in range(8):
        server.sample(server.step())
    server.scheduler.restart()
    while "a" not in server.step().samples:  # keeps blocks of 12 tokens
        pass
    server.scheduler.rewind({"a": num_tokens})
    del server.tokens["a"][num_tokens:]
    server.tokens["a"] += [2]
    server.scheduler.append({"a": 1})
    while "a" not in server.step().samples:
        pass
    assert server.manager.num_computed_tokens("a") == num_tokens + 1


def test_drafts_after_rejected_ones_need_no_chunk_of_those() -> None:
    """A plan with states ends a chunk before the last token that a request started with."""
    server = Server(plan_of("none", 150), max_tokens=5)
    server.add("a", [1] * 10, 48)
    while len(server.tokens["a"]) < 13:
        server.sample(server.step())
    server.scheduler.restart()
    server.manager.reset_prefixes()
    assert [server.step().work["a"] for _ in range(2)] == [5, 5]  # the next chunk ends after 12
    server.scheduler.rewind({"a": 10})
    server.tokens["a"][10:] = [2, 2, 2]
    server.scheduler.append({"a": 3})
    assert server.step().work == {"a": 3}


def test_a_request_that_starts_again_forgets_where_its_chunk_was_to_end() -> None:
    server = Server(plan_of("none", 150))
    server.add("a", [1] * 10, 48, boundaries=[4])
    assert [server.step().work["a"] for _ in range(2)] == [4, 5]
    server.scheduler.restart()
    while "a" not in (schedule := server.step()).samples:
        pass
    for _ in range(3):
        server.sample(schedule)
        schedule = server.step()
        assert schedule.work == {"a": 1}


def test_what_a_sample_generated_is_found_by_later_prompts() -> None:
    server = Server(plan_of("full", 150))
    server.add("a", [1] * 8, 30)
    server.step()
    server.tokens["b"], server.limits["b"], server.chunks["b"] = [1] * 8, 30, []
    server.scheduler.fork("a", ["b"])
    for token in range(10):
        for name in "ab":
            server.tokens[name].append(token + 2 * (name == "b"))
        server.scheduler.append({"a": 1, "b": 1})
        server.step()
    server.scheduler.finish("b")
    assert server.manager.find_prefix(server.tokens["b"]).num_cached_tokens >= 16


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


def test_tokens_that_were_rejected_before_they_were_computed_are_not_kept() -> None:
    server = Server(plan_of("full", 150))
    server.add("a", [1] * 10, 48)
    server.step()
    server.tokens["a"] += [0] + [2] * 6  # drafts
    server.scheduler.append({"a": 7})
    server.scheduler.restart()
    server.manager.reset_prefixes()
    assert server.step().work == {"a": 10}
    rejected = server.tokens["a"].copy()
    server.scheduler.rewind({"a": 11})
    del server.tokens["a"][11:]
    assert server.step().work == {"a": 1}
    server.tokens["a"] += [1] * 7
    server.scheduler.append({"a": 7})
    server.step()
    assert server.manager.find_prefix(rejected).num_cached_tokens <= 11


@pytest.mark.parametrize("mode", ["none", "align", "full"])
@pytest.mark.parametrize("forks", [1, 2, 3])
@pytest.mark.parametrize("others", ["fg", "bcde", "bdf", "e"])
def test_as_many_prompts_start_after_a_kept_state_as_a_step_copies_states(
    mode, forks, others
) -> None:
    plan, prompt = plan_of(mode, 120), [1, 2, 0] * 5
    server = Server(plan, max_requests=7, max_tokens=64, forks=forks, cached_tokens=48)
    server.add("a", prompt, 16, boundaries=[12])
    server.serve()
    for name in "bcdefg":
        server.add(name, [0] if name in others else [*prompt[:12], 2, 2, 1], 16)
    started = []
    while server.scheduler.waiting:
        schedule = server.step()
        for name, hit in schedule.hits.items():
            assert name in others or hit.num_cached_tokens >= 12
        started.append(len(schedule.hits))
        server.sample(schedule)
    copied = [at for at, name in enumerate("bcdefg") if name not in others]
    # Whole blocks need no copy; a step has room for 48 cached tokens.
    assert started[0] == [*copied, 6][min(4 if mode == "full" else forks, len(copied))]
    server.serve()


@pytest.mark.parametrize("is_allocated", [False, True])
@pytest.mark.parametrize("cached", [4, 12])
def test_prompts_of_one_prefix_need_its_blocks_once(cached: int, is_allocated: bool) -> None:
    """In pools of every size: a first request takes those that nobody holds, and others share."""
    prompt, started = [1] * (cached + 1), set()
    for usable in range(12, 22):
        budgets = {"max_tokens": 64, "cached_tokens": 64}
        server = Server(plan_of("full", 1 + usable), max_requests=6, **budgets)
        server.add("x", prompt, cached + 1)
        while "x" not in (schedule := server.step()).samples:
            pass
        if not is_allocated:
            server.sample(schedule)
        whole, shared = (cached + 12) // 4, cached // 4
        for name in "abcde":
            server.add(name, [*prompt[:cached], *range(2, 13)], 40)
        server.scheduler.schedule()
        free = usable - (shared + 1 if is_allocated else 0)
        first = whole - (shared if is_allocated else 0)
        wanted = min(5, 1 + (free - first) // (whole - shared))
        running = [name for name in server.scheduler.running if name != "x"]
        assert len(running) == wanted, (usable, running)
        started.add(wanted)
    assert len(started) > 2


def test_ids_past_the_prompt_are_not_those_of_the_prompt() -> None:
    server = Server(plan_of("full"))
    server.add("x", [1] * 20, 21)
    server.serve()
    server.tokens["a"], server.chunks["a"] = [1] * 20, []
    server.scheduler.add("a", 8)
    schedule = server.step()
    assert schedule.hits["a"].num_cached_tokens == schedule.work["a"] == 4


@pytest.mark.parametrize("has_host_memory", [True, False])
def test_tokens_that_are_not_computed_can_be_replaced_more_than_once(has_host_memory) -> None:
    """Also after a preemption, and by a sample of such a request."""
    memory = HostMemory(num_bytes=2**20) if has_host_memory else None
    manager = BlockManager(plan_of("full"), max_requests=2, host_memory=memory)
    tokens = {"a": list(range(4))}
    scheduler = Scheduler(manager, max_tokens=4, tokens=tokens, forks=1)
    shape = scheduler.shape()

    def step(max_tokens: int = 4) -> None:
        schedule = scheduler.schedule(max_tokens=max_tokens)
        manager.step(shape, schedule.work, extra=schedule.token_ids)
        manager.take_transfers()

    scheduler.add("a", 4)
    for number in range(6):
        step()
        tokens["a"].append(100 + number)
        scheduler.append({"a": 1})
    scheduler.restart()
    step()
    for is_preempted in (False, True, True):
        scheduler.rewind({"a": 6})
        del tokens["a"][6:]
        while manager.computed_tokens["a"] < 6:
            step()
        tokens["a"] += [7] * 5
        scheduler.append({"a": 5})
        if is_preempted:
            scheduler._chooser.preempt(scheduler._queues.by_name["a"])
            step(1)
        for count in (10, 8):
            scheduler.rewind({"a": count})
            assert scheduler.num_tokens("a") == count
    del tokens["a"][8:]
    while manager.computed_tokens["a"] < 8:
        step()
    tokens["b"] = tokens["a"][:8]
    scheduler.fork("a", ["b"])
    tokens["b"] += [8] * 3
    scheduler.append({"b": 3})
    scheduler.rewind({"b": 10})
    for name in "ab":
        scheduler.finish(name)
    assert manager.find_prefix(list(range(4)) + [9] * 4).num_cached_tokens == 4


@pytest.mark.parametrize(("others", "starts"), [(24, "ab"), (28, "a")])
def test_prompts_that_share_kept_blocks_start_as_far_as_the_others_fit(others, starts) -> None:
    """The first takes 4 kept blocks and one of its own, and the second one of its own."""
    server = Server(plan_of("full", 13), max_tokens=64, cached_tokens=64)
    server.shape = server.scheduler.shape(extra=64)
    server.add("y", [2] * others, others + 1)
    add_two_after_one(server, [1] * 17, 18)
    assert list(server.step().hits) == list(starts)
