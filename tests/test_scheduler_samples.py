"""Several samples of one prompt: it is computed once, and all first tokens come from its end."""

import random
from collections.abc import Hashable

import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.prefixes import ExtraKey
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.scheduler._requests import Request
from tests.reference_device import Content
from tests.simulation.device import Stories
from tests.test_prefixes import LAYERS, plan_of


class Server:
    """An engine over `Content`, whose next token follows from a sample's number and tokens.

    computed: tokens that were computed for all requests.
    """

    def __init__(self, plan, *, max_requests: int = 6, forks: int = 6, **options):
        self.manager = BlockManager(plan, max_requests=max_requests, checkpoint_share=0.5)
        self.tokens: dict[Hashable, list[int]] = {}
        self.limits: dict[Hashable, int] = {}
        self.scheduler = Scheduler(
            self.manager, max_tokens=16, forks=forks, tokens=self.tokens, **options
        )
        self.shape = self.scheduler.shape(extra=16)
        self.content, self.stories = Content(plan, max_requests), Stories()
        self.computed = 0
        self.answers: dict[Hashable, list[int]] = {}

    def add(self, name: Hashable, prompt: list[int], length: int, samples: int) -> None:
        for sample in (name, *((name, i) for i in range(1, samples))):
            self.tokens[sample], self.limits[sample] = list(prompt), length
        self.scheduler.add(name, len(prompt), max_tokens=length, samples=samples)

    def step(self, schedule: Schedule | None = None) -> Schedule:
        schedule = schedule or self.scheduler.schedule()
        ids: list[int] = []
        for name, count in schedule.work.items():
            done = self.computed_of(name)
            ids += self.tokens[name][done : done + count]
        assert schedule.token_ids.tolist() == ids
        before = {name: self.computed_of(name) for name in schedule.work}
        upload = self.manager.step(self.shape, schedule.work, extra=schedule.token_ids)
        assert upload.parts()["extra"][: len(ids)].tolist() == ids
        self.content.apply(upload)
        for name, count in schedule.work.items():
            story, row = self.stories.of((), self.tokens[name]), self.manager.requests[name]
            self.content.compute(row, story, before[name], before[name] + count)
        self.computed += len(ids)
        return schedule

    def computed_of(self, name: Hashable) -> int:
        return self.manager.num_computed_tokens(name)

    def answer(self, schedule: Schedule) -> None:
        names = list(schedule.work)
        assert len(schedule.samples) <= self.manager.max_requests
        for name, index in schedule.samples.items():
            parent = names[index]
            assert self.tokens[name] == self.tokens[parent] or name == parent
        ends = [name for name in schedule.samples if len(self.tokens[name]) == self.limits[name]]
        for name in schedule.samples:
            if name not in ends:
                number = name[1] if isinstance(name, tuple) else 0
                self.tokens[name].append((sum(self.tokens[name][-5:]) * 7 + number) % 5)
        self.scheduler.append({name: 1 for name in schedule.samples if name not in ends})
        assert set(schedule.samples) <= {*self.scheduler.running}
        for name in ends:
            self.scheduler.finish(name)
            self.answers[name] = self.tokens.pop(name)

    def serve(self) -> dict[Hashable, list[int]]:
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.answer(self.step())
        assert not self.scheduler.has_work, "requests starve"
        assert not self.manager.requests
        return self.answers


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    server = Server(plan_of("full", 150), cached_tokens=100)
    server.add("a", [1, 2, 3, 4, 0] * 4, 30, samples=4)
    assert server.scheduler.waiting == ("a", ("a", 1), ("a", 2), ("a", 3))
    first = server.step()
    assert first.work == {"a": 12} and not first.samples
    server.answer(first)
    second = server.step()
    assert second.work == {"a": 8}
    assert second.samples == {"a": 0, ("a", 1): 0, ("a", 2): 0, ("a", 3): 0}
    server.answer(second)
    assert server.computed == 20
    assert server.scheduler.running == ("a", ("a", 1), ("a", 2), ("a", 3))
    third = server.step()
    assert third.work == dict.fromkeys(server.scheduler.running, 1)
    assert list(third.samples.values()) == [0, 1, 2, 3]


def test_samples_wait_in_the_order_of_their_requests() -> None:
    server, waiting = Server(plan_of("full", 150), max_requests=1), list[Hashable]()
    for name in "abc":
        server.add(name, [1] * 6, 8, samples=2)
        waiting += [name, (name, 1)]
        assert server.scheduler.waiting == tuple(waiting)
    for name in waiting:
        while server.scheduler.running != (name,):
            server.answer(server.step())
        later = waiting[waiting.index(name) + 1 :]
        assert server.scheduler.waiting == tuple(later)


def test_a_sample_is_of_the_prompt_of_its_request() -> None:
    """With all that its prefix depends on: it may have to compute it by itself."""
    prompt = {"prompt_tokens": 6, "encoder_tokens": 2, "blocks": (5, 3), "salt": "s"}
    prompt |= {"extra_keys": (ExtraKey.lora("a", "/a"),), "boundaries": (4,)}
    sample = Request("a", (1,), **prompt).sample("b", (1, 2))
    assert {name: getattr(sample, name) for name in prompt} == prompt
    assert (sample.name, sample.age, sample.row, sample.samples) == ("b", (1, 2), -1, [])


@pytest.mark.parametrize("cached_tokens", [11, 12, 19, 20])
def test_samples_of_a_prompt_that_no_step_has_room_for_start_one_by_one(cached_tokens: int) -> None:
    """Those of a step are named before its tokens are counted."""
    server = Server(plan_of("full", 150), cached_tokens=cached_tokens)
    server.add("a", [1] * 20, 24, samples=2)
    server.answer(server.step())
    last = server.step()
    assert last.samples.keys() == ({"a", ("a", 1)} if cached_tokens == 20 else {"a"})
    server.answer(last)
    assert server.serve().keys() == {"a", ("a", 1)}


@pytest.mark.parametrize("name", LAYERS)
def test_samples_are_those_of_requests_that_are_added_one_by_one(name: str) -> None:
    saved = 0
    for seed in range(4):
        draw = random.Random(seed)
        plan, rows = plan_of(name, draw.choice([40, 150])), draw.choice([2, 6])
        together, alone = (Server(plan, max_requests=rows) for _ in range(2))
        for group in range(3):
            prompt = [draw.randrange(5) for _ in range(draw.randint(1, 28))]
            length, count = draw.randint(len(prompt) + 1, 40), draw.randint(1, 5)
            together.add(group, prompt, length, samples=count)
            for sample in range(count):
                own = group if sample == 0 else (group, sample)
                alone.tokens[own], alone.limits[own] = list(prompt), length
                alone.scheduler.add(own, len(prompt), max_tokens=length)
            for _ in range(draw.randint(0, 3)):
                for server in (together, alone):
                    if server.scheduler.has_work:
                        server.answer(server.step())
        assert together.serve() == alone.serve()
        saved += alone.computed - together.computed
    assert saved > 0


def test_samples_without_a_row_compute_what_is_left_of_the_prompt_later() -> None:
    server = Server(plan_of("full", 150), max_requests=2)
    server.add("a", [1] * 10, 14, samples=4)
    schedule = server.step()
    assert schedule.samples == {"a": 0, ("a", 1): 0}
    server.answer(schedule)
    assert server.scheduler.waiting == (("a", 2), ("a", 3))
    answers = server.serve()
    assert sorted(map(str, answers)) == sorted(map(str, ["a", ("a", 1), ("a", 2), ("a", 3)]))
    assert server.computed < 10 + 4 * 4 + 2 * 5  # two blocks of the prompt were found again


@pytest.mark.parametrize("when", ["before", "while", "after"])
@pytest.mark.parametrize("who", ["a", ("a", 1)])
def test_a_sample_may_be_aborted_at_any_time(when: str, who: Hashable) -> None:
    server = Server(plan_of("full", 150))
    server.add("a", [1] * 20, 24, samples=3)
    server.add("b", [2] * 4, 6, samples=2)
    if when != "before":
        server.answer(server.step())
    if when == "after":
        server.answer(server.step())
    server.scheduler.finish(who)
    others = {"a", ("a", 1), ("a", 2), "b", ("b", 1)} - {who}
    assert {*server.scheduler.running, *server.scheduler.waiting} == others
    assert set(server.serve()) == others


def test_the_next_sample_takes_the_place_of_one_that_ends_in_the_queue() -> None:
    server = Server(plan_of("full", 150))
    for name, samples in (("a", 1), ("b", 3), ("c", 1)):
        server.add(name, [1] * 4, 8, samples=samples)
    server.scheduler.finish("b")
    assert server.scheduler.waiting == ("a", ("b", 1), ("b", 2), "c")
    assert list(server.step().work) == ["a", ("b", 1), "c"]


def test_a_row_that_is_freed_after_a_schedule_gives_it_no_more_samples() -> None:
    server = Server(plan_of("full", 150), max_requests=2)
    server.add("b", [2] * 4, 8, samples=1)
    server.step()
    server.add("a", [1] * 8, 12, samples=2)
    schedule = server.scheduler.schedule()
    server.scheduler.finish("b")
    server.answer(server.step(schedule))
    assert schedule.samples == {"a": 0} and set(server.serve()) == {"a", ("a", 1)}


def test_a_sample_that_ends_with_its_first_token() -> None:
    server = Server(plan_of("full", 150))
    server.add("a", [1] * 8, 20, samples=3)
    schedule = server.step()
    server.scheduler.finish("a")
    server.scheduler.finish(("a", 2))
    server.tokens["a", 1].append(3)
    server.scheduler.append({("a", 1): 1})
    assert server.step().work == {("a", 1): 1}
    assert list(schedule.samples) == ["a", ("a", 1), ("a", 2)]


def test_a_lost_schedule_names_its_samples_again() -> None:
    server = Server(plan_of("full", 150))
    server.add("a", [1] * 8, 20, samples=3)
    lost = server.scheduler.schedule()
    server.scheduler.finish(("a", 1))
    again = server.step()
    assert again.work == lost.work
    assert again.samples == {"a": 0, ("a", 2): 0}
    server.answer(again)
    assert server.scheduler.running == ("a", ("a", 2))


def test_samples_need_their_own_ids() -> None:
    server = Server(plan_of("full", 150))
    server.tokens["a"] = [1] * 8
    with pytest.raises(ValueError, match=r"\('a', 1\) has 8 tokens, .* hold 0 token ids"):
        server.scheduler.add("a", 8, samples=2)
    assert not server.scheduler.has_work


@pytest.mark.parametrize("name", ["full", "windows", "none", "align"])
@pytest.mark.parametrize("loses", [True, False])
def test_a_restart_changes_no_answer(name: str, loses: bool) -> None:
    """After an upload that was packed and never run, or for all requests to be computed anew."""
    answers = []
    for at in (None, 2, 4, 7):
        server = Server(plan_of(name, 150))
        for group, count in enumerate((1, 3, 2)):
            server.add(group, [group + 1, 2, 3, 4] * 3, 24, samples=count)
        for number in range(10):
            if number == at:
                if loses:
                    server.manager.step(server.shape, server.scheduler.schedule().work)
                    server.manager.reset()
                    server.content.goes_on_anew = True
                running = server.scheduler.running
                server.scheduler.restart()
                again = [n for n in server.scheduler.waiting if n in running]
                assert again == list(running)
                assert not server.manager.requests
            server.answer(server.step())
        answers.append(server.serve())
    assert answers[1:] == answers[:1] * 3


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


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_host_ahead_gets_the_same_answers(lookahead: int) -> None:
    """Ids are noted ``ahead`` steps late; an end is noticed late, and preemptions wait for ids."""
    draw = random.Random(0)
    for blocks in (24, 150):
        late = Server(plan_of("full", blocks), lookahead_steps=lookahead)
        prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 20))] for _ in range(6)]
        for name, prompt in enumerate(prompts):
            late.add(name, prompt, 24, samples=1 + name % 3)
        in_flight: list[list[Hashable]] = []
        preempted = steps = 0
        while late.scheduler.has_work:
            steps += 1
            schedule = late.scheduler.schedule()
            preempted += len(schedule.preempted)
            assert schedule.work or in_flight
            late.manager.step(late.shape, schedule.work, extra=schedule.token_ids)
            missing = int((schedule.token_ids < 0).sum())
            assert missing <= lookahead * len(schedule.work)
            goes_on = [n for n in schedule.samples if late.scheduler.num_tokens(n) < 24]
            late.scheduler.append(dict.fromkeys(goes_on, 1))
            in_flight.append(list(schedule.samples))
            if len(in_flight) > lookahead or not schedule.work:
                for name in in_flight.pop(0):
                    if len(late.tokens[name]) == 24:
                        late.scheduler.finish(name)
                    else:
                        late.tokens[name].append(sum(late.tokens[name]) % 5)
            assert steps < 2000
        assert preempted or blocks > 24
        for name, tokens in late.tokens.items():
            start = len(prompts[name[0] if isinstance(name, tuple) else name])
            for at in range(start, 24):
                assert tokens[at] == sum(tokens[:at]) % 5


def test_a_preempted_sample_finds_the_tokens_that_it_generated() -> None:
    server = Server(plan_of("full", 14))
    server.add("a", [1] * 8, 40, samples=2)
    while not (schedule := server.step()).preempted:
        server.answer(schedule)
    assert schedule.preempted == (("a", 1),)
    server.scheduler.finish("a")
    assert server.scheduler.schedule().hits["a", 1].num_cached_tokens > 8
