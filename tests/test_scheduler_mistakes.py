"""Slips of the scheduler's callers are refused by name, change nothing, and stop nobody."""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import plan_cache
from jaxkv._src.prefixes import ExtraKey
from jaxkv._src.scheduler import Schedule, Scheduler
from jaxkv._src.specs import LayerSpec, StateSpec
from jaxkv._src.uploads import StepShape
from tests.test_scheduler import FULL, LAYERS, WINDOW, Server, small_plan


class Host:
    """A caller that does everything right: one more token for each sample.

    tokens: of all requests.
    """

    def __init__(self, layers: dict[str, LayerSpec] | None = None, blocks: int = 60, **options):
        plan = small_plan(blocks, layers, in_flight=32)
        self.manager = BlockManager(plan, max_requests=4)
        self.tokens: dict[Hashable, Any] = {}
        options = {"max_tokens": 16, "forks": 2} | options
        self.scheduler = Scheduler(self.manager, tokens=self.tokens, **options)

    def add(self, name: Hashable, ids: Any, **options) -> None:
        self.tokens[name] = ids
        self.scheduler.add(name, len(ids), **options)

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        self.manager.step(self.scheduler.shape(), schedule.work, extra=schedule.token_ids)
        return schedule

    def answer(self, schedule: Schedule) -> None:
        for name in schedule.samples:
            self.tokens[name].append(7)
        self.scheduler.append(dict.fromkeys(schedule.samples, 1))


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# --- calls ---------------------------------------------------------------------------

MISTAKES = {
    "a batch beyond the rows": (
        lambda s: Scheduler(
            BlockManager(s.manager.plan, max_requests=1), max_tokens=1, batch_size=2
        ),
        "batch_size=2 is more than max_requests=1 of the manager",
    ),
    "a used manager": (lambda s: Scheduler(s.manager, max_tokens=1), "runs 1 requests"),
    "a name twice": (lambda s: s.scheduler.add("a", 3), "'a' is in use"),
    "too long": (lambda s: s.scheduler.add("b", 99), "num_tokens=99 must be at most"),
    "longer than the plan": (lambda s: s.scheduler.add("b", 3, max_tokens=99), "max_model_len=32"),
    "encoder": (lambda s: s.scheduler.add("b", 3, encoder_tokens=9), "max_encoder_tokens=0"),
    "a salt without tokens": (
        lambda s: s.scheduler.add("b", 3, salt="x"),
        "salt='x' has no effect without tokens; pass tokens= when you make the Scheduler, or leave",
    ),
    "a key without tokens": (
        lambda s: s.scheduler.add("b", 3, extra_keys=[ExtraKey.lora("a", "/a")]),
        "extra_keys=.* has no effect without tokens; pass tokens= when you make the Scheduler",
    ),
    "endless samples": (
        lambda s: s.scheduler.add("b", 3, samples=2**40),
        "samples=1099511627776 must be at most 1048576",
    ),
    "samples, no forks": (lambda s: s.scheduler.add("b", 3, samples=2), "forks=0; pass forks="),
    "unknown": (lambda s: s.scheduler.finish("b"), "'b' is unknown; add it first"),
    "append": (lambda s: s.scheduler.append({"a": 1, "b": 1}), "'b' is unknown"),
    "append early": (lambda s: s.scheduler.append({"a": 1}), "computed 4 of its 5 tokens"),
    "rewind": (lambda s: s.scheduler.rewind({"a": 9}), r"must be in 5\.\.5"),
    "rewind the prompt": (lambda s: s.scheduler.rewind({"a": 4}), r"must be in 5\.\.5"),
    "fork": (lambda s: s.scheduler.fork("a", ["b"]), "forks=0; pass forks="),
    "a rectangle": (lambda s: s.scheduler.shape(tokens_per_request=2), "chunk_tokens=None; pass"),
    "ids": (lambda s: s.scheduler.schedule().token_ids, "pass tokens= when you make"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_by_name_and_change_nothing(mistake: str) -> None:
    server = Server(small_plan(40), max_requests=2, max_tokens=4)
    server.add("a", 5, 12)
    server.step()
    refused(lambda: MISTAKES[mistake][0](server), MISTAKES[mistake][1])
    assert server.scheduler.num_tokens("a") == 5
    assert server.scheduler.running == ("a",) and not server.scheduler.waiting
    assert server.step().work == {"a": 1}


def test_a_fork_needs_a_computed_prompt_and_the_ids_of_its_samples() -> None:
    host = Host(max_tokens=4)
    host.add("a", [1] * 6)
    host.step()
    host.tokens["b"] = [1] * 6
    refused(lambda: host.scheduler.fork("a", ["b"]), "computed 4 of 6 tokens")
    schedule = host.step()
    refused(lambda: host.scheduler.fork("a", ["b", "c"]), "hold 0 token ids of it")
    assert host.scheduler.running == ("a",)
    host.scheduler.fork("a", ["b"])
    host.answer(schedule)
    assert host.step().work == {"a": 1}


def test_more_tokens_than_a_request_may_have_are_refused() -> None:
    """Also for samples, which have as many as the request that they start from."""
    host, names = Host(forks=4), ["a", ("a", 1), "fork"]
    host.tokens |= {name: [1] * 6 for name in names}
    host.add("a", host.tokens["a"], max_tokens=7, samples=2)
    schedule = host.step()
    host.scheduler.fork("a", ["fork"])
    for name in names:
        host.tokens[name].append(7)
    host.scheduler.append(dict.fromkeys(names, 1))
    assert [*schedule.samples] == names[:2] and [*host.step().samples] == names
    for name in names:
        said = "would have 8 tokens.*max_tokens=7; finish it"
        refused(lambda name=name: host.scheduler.append({name: 1}), said)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda s: s.append({"a": 1, "b": 2}),  # "b" may have one more
        lambda s: s.append({"a": 1, "late": 1}),
        lambda s: s.append({"a": 1, "who": 1}),
        lambda s: s.append({"a": 1, "b": -1}),
        lambda s: s.rewind({"a": 6, "b": 8}),
        lambda s: s.rewind({"a": 6, "b": 5}),
        lambda s: s.rewind({"a": 6, "who": 6}),
        lambda s: s.fork("a", ["c", "b"]),
        lambda s: s.fork("a", ["c", "c"]),
        lambda s: s.fork("a", ["c", []]),
    ],
)
def test_a_call_that_is_refused_for_one_request_changes_none(refuse) -> None:
    schedules = []
    for is_refused in (False, True):
        host = Host(max_tokens=14)
        host.tokens["c"] = [1] * 7
        host.add("a", [1] * 6)
        host.add("b", [1] * 6, max_tokens=8)
        host.answer(host.step())
        host.add("late", [1] * 20)
        host.step()
        scheduler = host.scheduler
        if is_refused:
            before = known(host)
            refused(functools.partial(refuse, scheduler), "request|tokens|name|sample")
            assert known(host) == before
        host.tokens["a"].append(7)
        host.tokens["b"].append(7)
        scheduler.append({"a": 1, "b": 1})
        schedules.append([(s.work, [*s.samples]) for s in (host.step(), host.step())])
    assert schedules[0] == schedules[1]


def known(host: Host) -> list[Any]:
    """All that a scheduler says of its requests."""
    s = host.scheduler
    tokens = {name: s.num_tokens(name) for name in (*s.running, *s.waiting)}
    return [tokens, s.running, s.waiting, host.manager.computed_tokens, host.manager.requests]


# --- prompts ---------------------------------------------------------------------------

STATES: dict[str, LayerSpec] = {
    "f": FULL,
    "s": StateSpec(block_size=4, shapes=((2,),), dtypes=("f32",)),
}
PROMPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medium past the prompt": ([1] * 6, {"extra_keys": (ExtraKey.mm("image", 0, 8),)}),
    "boundary past the prompt": ([1] * 6, {"boundaries": [7]}),
    "past int32": ([2**31] * 6, {}),
    "floats": ([1.5] * 6, {}),
    "ragged": ([[1], [1, 2], 3, 4, 5, 6], {}),
}


@pytest.mark.parametrize("what", PROMPTS)
def test_a_wrong_prompt_is_refused_when_it_is_added_and_stops_nobody(what: str) -> None:
    host = Host(STATES)
    host.add("good", [1, 2, 3])
    ids, options = PROMPTS[what]
    refused(lambda: host.add("bad", ids, **options), "tokens|extra_keys|boundaries|salt")
    assert host.scheduler.waiting == ("good",)
    for _ in range(4):
        host.answer(host.step())
    assert host.scheduler.num_tokens("good") == 6  # one chunk ends before the last token
    host.add("bad", [1] * 6)
    assert host.step().work == {"good": 1, "bad": 5}


def test_ids_that_are_not_known_are_left_out_and_numbers_in_their_place_refused() -> None:
    host = Host(lookahead_steps=2)
    host.add("a", [1, 2, 3])
    host.step()
    host.scheduler.append({"a": 1})  # its id is not known yet
    assert host.step().token_ids.tolist() == [-1]
    host.scheduler.append({"a": 1})
    host.tokens["a"].append(-1)
    schedule = host.scheduler.schedule()
    assert schedule.token_ids.tolist() == [-1]
    host.manager.step(host.scheduler.shape(extra=0), schedule.work)
    host.tokens["a"].append(-1)
    host.scheduler.append({"a": 1})
    host.tokens["a"].append(-1)
    refused(lambda: host.scheduler.schedule().token_ids, r"tokens\['a'\] holds the token id")


# --- the loop ------------------------------------------------------------------------


def test_a_token_for_a_request_that_was_not_sampled_is_refused() -> None:
    host = Host(max_tokens=4)
    host.add("a", [1] * 6)
    host.add("b", [1] * 6)
    schedule = host.step()
    assert "a" in schedule.work and not schedule.samples
    for name in "ab":
        refused(lambda name=name: host.scheduler.append({name: 1}), "of its 6 tokens")


def test_a_token_that_is_not_noted_is_noticed() -> None:
    host = Host()
    host.add("a", [1, 2, 3])
    host.step()
    host.scheduler.append({"a": 1})
    refused(host.scheduler.schedule, "'a' has 4 tokens, .* hold 3 token ids of it; put")
    host.tokens["a"].append(9)
    schedule = host.scheduler.schedule()
    del host.tokens["a"][2:]
    refused(lambda: schedule.token_ids, "'a' has 4 tokens, .* hold 2 token ids of it")
    host.tokens["a"] += [3, 9]
    assert schedule.token_ids.tolist() == [9]


def test_ids_of_running_requests_that_disappear_are_noticed() -> None:
    host = Host()
    host.add("a", [1, 2, 3])
    host.answer(host.step())
    ids = host.tokens.pop("a")
    refused(host.scheduler.schedule, "hold 0 token ids")
    host.tokens["a"] = ids
    assert host.step().work == {"a": 1}


def test_samples_that_are_never_answered_are_noticed() -> None:
    host = Host()
    host.add("a", [1, 2, 3])
    host.add("b", [1, 2, 3])
    schedule = host.step()
    assert list(schedule.samples) == ["a", "b"]
    host.scheduler.finish("b")
    assert host.scheduler.has_work
    assert not host.scheduler.schedule().work  # there is time to answer
    refused(host.scheduler.schedule, "'a' was in the samples .* append its token, or finish it")
    host.scheduler.finish("a")
    assert not host.scheduler.has_work
    assert not host.scheduler.schedule().work


def test_a_host_ahead_may_ask_again_while_all_requests_wait_for_tokens() -> None:
    host = Host(lookahead_steps=1)
    host.add("a", [1, 2, 3])
    schedule = host.step()
    for _ in range(3):
        assert not host.scheduler.schedule().work
    host.answer(schedule)
    assert host.step().work == {"a": 1}


def test_work_of_a_request_that_has_ended_since_is_refused_and_chosen_again_without_it() -> None:
    host = Host()
    host.add("a", [1, 2, 3])
    host.add("b", [1, 2, 3])
    schedule = host.scheduler.schedule()
    host.scheduler.finish("a")
    refused(lambda: host.manager.step(host.scheduler.shape(), schedule.work), "'a' is not running")
    assert host.step().work == {"b": 3}


def test_odd_names() -> None:
    """Lists of names are compared, and ``==`` of NumPy's scalars and tuples is an array."""
    host = Host()
    names = [np.int64(1), (1,), (1, 2), "1", frozenset({1}), None]
    for name in names:
        host.add(name, [3, 4, 5])
        host.answer(host.step())
        host.scheduler.finish(name)
    for first, second in itertools.pairwise(names):
        host.add(first, [3, 4, 5])
        host.add(second, [3, 4, 5])
        schedule = host.step()
        for name in (first, second):
            host.tokens[name].append(1)
            host.scheduler.append({name: 1})
        assert list(schedule.samples) == [first, second]
        assert host.step().work == {first: 1, second: 1}
        host.scheduler.finish(first)
        host.scheduler.finish(second)


def test_a_schedule_with_an_error_leaves_nothing_half_applied(monkeypatch) -> None:
    host = Host()
    host.add("a", [1, 2, 3])
    host.answer(host.step())
    host.add("b", [1, 2, 3])
    before = host.manager.num_free_blocks
    with monkeypatch.context() as patch:
        patch.setattr(BlockManager, "find_prefix", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            host.scheduler.schedule()
    assert host.manager.num_free_blocks == before
    assert host.scheduler.waiting == ("b",)
    assert host.step().work == {"a": 1, "b": 3}


def test_ids_that_are_missing_for_a_while_stop_no_other_request() -> None:
    host = Host()
    for name in "abc":
        host.add(name, [1, 2, 3])
    for hidden in "bcb":
        kept, host.tokens[hidden] = host.tokens[hidden], []
        with pytest.raises(ValueError, match=f"request='{hidden}' has 3 tokens"):
            host.scheduler.schedule()
        host.tokens[hidden] = kept
        assert host.scheduler.waiting == ("a", "b", "c") and not host.manager.requests
    assert host.step().work == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("max_model_len", "max_requests", "room"),
    [(100, 1, 100), (100, 9, 900), (10_000, 9, 2**16), (70_000, 9, 70_000), (70_000, 1, 70_000)],
)
def test_a_step_has_room_for_many_cached_tokens_if_there_can_be_any(
    max_model_len: int, max_requests: int, room: int
) -> None:
    sizes = {"max_model_len": max_model_len, "num_blocks_override": 20_000}
    plan = plan_cache({"a": FULL}, 2**30, **sizes)
    for more, wanted in (({}, 0), ({"forks": 1}, room), ({"tokens": {}}, room)):
        manager = BlockManager(plan, max_requests=max_requests)
        assert Scheduler(manager, max_tokens=8, **more)._options.cached_tokens == wanted


@pytest.mark.parametrize(
    ("forks", "cached_tokens"), [(3, 64), (3, 0), (0, 0), (0, 9), (3, None), (0, None)]
)
def test_shapes_are_the_schedulers(forks: int, cached_tokens: int | None) -> None:
    """Without room said for cached tokens, all requests may begin with as many as they may have."""
    given = {"forks": forks, "cached_tokens": cached_tokens}
    host = Host(LAYERS["windows"], max_tokens=16, chunk_tokens=4, **given)
    plan = host.manager.plan
    room = 4 * plan.max_model_len if cached_tokens is None else cached_tokens
    options = {"max_requests": 4, "forks": forks, "cached_tokens": room}
    assert host.scheduler.shape() == StepShape.for_plan(
        plan, max_tokens=16, batch_size=4, extra=16, token_ids=True, **options
    )
    assert host.scheduler.shape(max_query_len=1) == StepShape.for_plan(
        plan, max_tokens=4, batch_size=4, max_query_len=1, extra=4, token_ids=True, **options
    )
    assert host.scheduler.shape(batch_size=2, tokens_per_request=4, extra=1) == StepShape.for_plan(
        plan, batch_size=2, tokens_per_request=4, extra=1, **options
    )
    for least in (1, 3):  # chunks are longer
        refused(
            lambda least=least: host.scheduler.shape(tokens_per_request=least),
            f"tokens_per_request={least} needs chunks of at most as many .* chunk_tokens=4; pass",
        )
    for more in (
        {"max_query_len": 1, "shared_prefixes": 2},
        {"max_query_len": 5, "reproducible": True},
    ):
        given = {"max_tokens": 9, "batch_size": 3, "max_seq_len": 20} | more
        assert host.scheduler.shape(**given, extra=7) == StepShape.for_plan(
            plan, **given, extra=7, **options
        )


@pytest.mark.parametrize("ids", [(), [1, 2, 3]], ids=["none", "too few"])
def test_a_step_without_an_id_for_each_token_is_refused(ids: list[int]) -> None:
    host = Host()
    host.add("a", [1] * 12)
    work, shape = host.scheduler.schedule().work, host.scheduler.shape()
    said = f"extra holds {len(ids)} token ids for 12 tokens; pass extra=schedule.token_ids"
    refused(lambda: host.manager.step(shape, work, extra=ids), said)
    host.step()


def test_ids_that_are_not_those_of_the_prompts_are_refused() -> None:
    """Swapped prompts, and a prompt that is computed again from its beginning after a hit."""
    host = Host()
    host.add("a", [*range(6)])
    host.add("b", [*range(10, 16)])
    schedule, shape = host.scheduler.schedule(), host.scheduler.shape()
    swapped = [*schedule.token_ids[6:], *schedule.token_ids[:6]]
    said = "other token ids for request 'a' than its prompt has from token 0 on"
    refused(lambda: host.manager.step(shape, schedule.work, extra=swapped), said)
    host.step()
    plan = host.manager.plan
    manager, prompt = BlockManager(plan, max_requests=2), [*range(12)]
    shape = StepShape.for_plan(
        plan, max_requests=2, max_tokens=16, cached_tokens=16, extra=16, token_ids=True
    )
    manager.start("a", prompt)
    manager.step(shape, {"a": 12}, extra=prompt)
    assert manager.start("b", prompt).num_cached_tokens == 8
    said = "other token ids for request 'b' than its prompt has from token 8 on"
    refused(lambda: manager.step(shape, {"b": 12}, extra=prompt), said)
    manager.step(shape, {"b": 4}, extra=prompt[8:])


def test_a_rewind_that_the_manager_refuses_takes_nothing_back() -> None:
    host = Host({"full": FULL, "window": WINDOW})
    host.add("a", [7, 7])
    host.add("b", [7, 7])
    while host.scheduler.num_tokens("a") < 16:
        host.answer(host.step())
    host.step()
    refused(lambda: host.scheduler.rewind({"b": 15, "a": 3}), "'a' no longer holds a block")
    assert [host.scheduler.num_tokens(name) for name in "ab"] == [16, 16]
    assert not host.scheduler.schedule().work
    host.scheduler.append({"a": 1, "b": 1})
