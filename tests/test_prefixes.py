"""Prefixes that requests share, compared with a reference written from the definition."""

import os
import random
from typing import Any

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager, OutOfBlocksError
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.prefixes import ExtraKey, TokenCodes
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import StepShape
from tests.reference_prefixes import Content, ReferencePrefixes

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"  # 14,000 histories in all
HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
SMALL = {"shapes": ((4,),), "dtypes": ("float32",)}


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def sliding(block_size: int = 4, window: int = 6) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=window, **HEADS)


def state(mode: str, block_size: int = 8) -> StateSpec:
    return StateSpec(block_size=block_size, cache_mode=mode, **SMALL)


LAYERS = {
    "full": {"a": full()},
    "windows": {"a": full(), "b": sliding(), "c": sliding(window=3)},
    "chunks": {"a": full(), "b": ChunkedAttentionSpec(block_size=4, chunk_size=6, **HEADS)},
    "none": {"a": full(), "s": state("none")},
    "align": {"a": full(), "w": sliding(), "s": state("align")},
    "all": {"a": full(), "s": state("all")},
    "modes": {"a": full(), "s": state("none"), "t": state("align", 4)},
}


def plan_of(name: str, num_blocks: int = 48, **options) -> Plan:
    return plan_cache(
        LAYERS[name],
        2**30,
        max_model_len=48,
        num_blocks_override=num_blocks,
        limits=Limits(max_in_flight_tokens=12),
        **options,
    )


class Driver:
    """Random requests over few prompts, checked against `ReferencePrefixes` and `Content`.

    asks_first: whether prompts are looked up before they start, with other calls in between.
    """

    asks_first = False

    def __init__(self, plan: Plan, seed: int, *, max_requests: int = 4, **options):
        self.random = random.Random(seed)
        self.plan = plan
        self.manager = BlockManager(plan, max_requests=max_requests, **options)
        self.shape = StepShape.for_plan(
            plan,
            max_requests=max_requests,
            max_tokens=12 * max_requests,
            forks=max_requests,
            cached_tokens=48 * max_requests,
        )
        self.free = self.manager.num_free_blocks
        self.content, self.reference = Content(self.manager), ReferencePrefixes(self.manager)
        self.running: dict[int, dict] = {}  # request -> namespace, codes, story, prompt, ends
        self.names = iter(range(10**9))
        self.hits = 0
        roots = [[self.random.randrange(3) for _ in range(30)] for _ in range(2)]
        self.roots = roots

    def prompt(self) -> list[int]:
        root = self.random.choice(self.roots)
        tokens = root[: self.random.randrange(1, 30)]
        return tokens + [self.random.randrange(3) for _ in range(self.random.randrange(8))]

    def start(self, tokens: list[int] | None = None, salt: str | None = None) -> None:
        tokens = self.prompt() if tokens is None else tokens
        name = next(self.names)
        boundaries = [n for n in (5, 11, 16) if n <= len(tokens) and self.random.random() < 0.3]
        given: dict[str, Any] = {"tokens": np.array(tokens), "salt": salt}
        if self.asks_first and self.random.random() < 0.6:
            given = {"tokens": self.manager.find_prefix(**given)}
            self._meanwhile()
        namespace = self.reference.epoch, salt, frozenset()
        story = self.reference.story.of(namespace, tokens)
        hit = self.manager.start(name, **given, boundaries=boundaries)
        self.reference.check(hit, namespace, tokens, story, len(tokens) - 1)
        self.hits += hit.num_cached_tokens > 0
        self.running[name] = {
            "namespace": namespace,
            "codes": list(tokens),
            "story": story,
            "prompt": len(tokens),
            "ends": hit.chunk_ends,
            "kept": hit.num_cached_tokens,
            "goes_on": True,
        }

    def _meanwhile(self) -> None:
        what = self.random.random()
        if what < 0.3:
            self.step()
        elif what < 0.5 and self.running:
            self.finish(self.random.choice(list(self.running)), known=True)
        elif what < 0.55:
            self.manager.new_epoch()
            self.reference.clear(forget=False)

    def computed(self, name: int) -> int:
        return self.manager.num_computed_tokens(name)

    def step(self) -> None:
        work: dict[int, int] = {}
        for name, request in self.running.items():
            if self.random.random() < 0.8:
                self._choose(name, request, work)
        while True:
            try:
                upload = self.manager.step(self.shape, work)
                break
            except OutOfBlocksError:
                self._make_way(work)
        self.content.apply(upload)
        self._check_rows(work)
        for name, count in work.items():
            total = self.computed(name)
            request = self.running[name]
            row = self.manager.requests[name]
            self.content.compute(row, request["story"], total - count, total)
            count = min(total, request["prompt"])
            is_end = total == count and total in request["ends"]
            codes = request["codes"][: request["prompt"]]
            self.reference.keep(name, request, codes, count, is_end=is_end)

    def _choose(self, name: int, request: dict, work: dict[int, int]) -> None:
        done = self.computed(name)
        left = request["prompt"] - done
        if left > 0:
            most = min(left, 12)
            ends = [end - done for end in request["ends"] if done < end <= done + most]
            keep_to_end = ends and self.random.random() < 0.8
            work[name] = ends[0] if keep_to_end else self.random.randint(1, most)
        elif done < 48:
            token = self.random.randrange(3)
            request["codes"].append(token)
            request["story"].append(self.reference.story.number(request["story"][-1], token))
            work[name] = 1

    def _make_way(self, work: dict[int, int]) -> None:
        victim = self.random.choice(list(self.running))
        if victim in work and self.running[victim]["prompt"] <= self.computed(victim):
            self.running[victim]["codes"].pop()
            self.running[victim]["story"].pop()
        work.pop(victim, None)
        self.finish(victim, known=True)

    def finish(self, name: int, *, known: bool) -> None:
        request = self.running.pop(name)
        done, prompt = self.computed(name), request["prompt"]
        tokens = request["codes"][prompt:] if known else None
        known = known and request["goes_on"]
        count = min(done, len(request["codes"]) if known else prompt)
        codes = request["codes"] if known else request["codes"][:prompt]
        request["kept"] = 0  # what was kept in place of its own blocks may be gone by now
        self.reference.keep(name, request, codes, count, is_end=0 < count == done)
        self.manager.finish(name, tokens)

    def fork(self, name: int) -> None:
        request, new = self.running[name], next(self.names)
        self.manager.fork(name, [new])
        copied = {**request, "codes": [*request["codes"]], "story": [*request["story"]], "ends": ()}
        done = self.computed(name)
        if done < request["prompt"]:
            copied["prompt"] = done
            copied["codes"], copied["story"] = copied["codes"][:done], copied["story"][: done + 1]
            copied["goes_on"] = False  # its next tokens are not the donor's
        copied["kept"] = min(request["kept"], done)
        self.running[new] = copied

    def _check_rows(self, work: dict[int, int]) -> None:
        for name in work:
            row = self.manager.requests[name]
            for group, ids in enumerate(self.manager.block_ids(name)):
                there = self.content.rows[group][row]
                assert all(mine in (0, theirs) for mine, theirs in zip(ids, there, strict=False))

    def check_leaks(self) -> None:
        held: set[int] = set()
        for name in self.running:
            held |= {i for ids in self.manager.block_ids(name) for i in ids if i}
        assert len(held) + self.manager.num_free_blocks == self.free

    def run(self, steps: int) -> None:
        for _ in range(steps):
            what = self.random.random()
            room = len(self.running) < self.manager.max_requests
            if room and what < 0.35:
                self.start(salt=self.random.choice([None, None, None, "b"]))
            elif room and self.running and what < 0.4:
                self.fork(self.random.choice(list(self.running)))
            elif self.running and what < 0.55:
                self.finish(
                    self.random.choice(list(self.running)), known=self.random.random() < 0.7
                )
            elif what < 0.56:
                self.manager.new_epoch()
                self.reference.clear(forget=False)
            elif what < 0.565:
                self.manager.reset_prefixes()
                self.reference.clear(forget=True)
            else:
                self.step()
            self.check_leaks()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_blocks", [40, 120])
def test_hits_are_the_longest_that_the_definition_allows(name: str, num_blocks: int) -> None:
    hits = 0
    for seed in range(1_000 if IS_LONG else 6):
        driver = Driver(plan_of(name, num_blocks), seed, checkpoint_share=1.0)
        driver.asks_first = seed % 2 == 1
        driver.run(150)
        hits += driver.hits
    assert hits


def computed_prompt(plan: Plan, tokens: np.ndarray) -> tuple[BlockManager, StepShape]:
    """Returns a manager that keeps the prompt of a finished request, and its shape."""
    manager = BlockManager(plan, max_requests=4)
    shape = StepShape.for_plan(
        plan, max_requests=4, max_tokens=12, forks=4, cached_tokens=plan.max_model_len
    )
    for end in (*manager.start("first", tokens).chunk_ends, tokens.size):
        manager.step(shape, {"first": end - manager.num_computed_tokens("first")})
    manager.finish("first")
    return manager, shape


@pytest.mark.parametrize("name", ["full", "windows", "none", "all"])
def test_a_found_prefix_is_not_looked_up_again(name: str, monkeypatch) -> None:
    tokens = np.arange(12)
    manager, _ = computed_prompt(plan_of(name), tokens)
    wanted = manager.start("by its tokens", tokens)
    manager.finish("by its tokens")
    found = manager.find_prefix(tokens)
    monkeypatch.setattr(PromptTree, "walk", lambda *_: pytest.fail("the prefix is looked up again"))
    assert found.num_cached_tokens == wanted.num_cached_tokens > 0
    assert manager.find_prefix(found).num_held_blocks == found.num_held_blocks == 0
    assert manager.start("a", found)._replace(row=wanted.row) == wanted
    assert manager.find_prefix(found).num_held_blocks == sum(wanted.shared_blocks)
    shorter = manager.start("b", found, max_cached_tokens=wanted.num_cached_tokens - 1)
    assert shorter.num_cached_tokens < wanted.num_cached_tokens


@pytest.mark.parametrize(("what", "left"), [("new_epoch", 0), ("reset_prefixes", 0), ("evict", 4)])
def test_a_found_prefix_that_is_gone_is_not_shared(what: str, left: int) -> None:
    tokens = np.arange(12)
    manager, shape = computed_prompt(plan_of("full", 14), tokens)
    found = manager.find_prefix(tokens)
    assert found.num_cached_tokens == 8
    if what == "evict":
        manager.start("large")
        for _ in range(4):
            manager.step(shape, {"large": 12})
        manager.finish("large")
    else:
        getattr(manager, what)()
    assert manager.start("a", found).num_cached_tokens == left


def test_a_prefix_that_another_manager_found_is_looked_up_again() -> None:
    tokens, plan = np.arange(12), plan_of("full")
    (manager, _), empty = computed_prompt(plan, tokens), BlockManager(plan, max_requests=4)
    assert manager.find_prefix(tokens).num_cached_tokens == 8
    assert empty.start("a", manager.find_prefix(tokens)).num_cached_tokens == 0
    assert manager.start("a", empty.find_prefix(tokens)).num_cached_tokens == 8


def test_a_prefix_stays_as_it_is_when_the_array_of_its_tokens_changes() -> None:
    tokens = np.arange(12, dtype=np.int32)
    manager, _ = computed_prompt(plan_of("full"), tokens)
    tokens[:] = 7
    assert manager.find_prefix(tokens).num_cached_tokens == 0
    assert manager.find_prefix(np.arange(12)).num_cached_tokens == 8


def test_two_images_side_by_side_are_not_one() -> None:
    pair = [ExtraKey.mm("x", 0, 4), ExtraKey.mm("x", 4, 8)]
    codes = [TokenCodes().encode([1] * 8, keys) for keys in (pair, [ExtraKey.mm("x", 0, 8)])]
    assert not np.array_equal(*codes)


def test_a_prompt_of_one_block_is_known_under_its_salt() -> None:
    manager, _ = computed_prompt(plan_of("full"), np.arange(4))
    assert manager.start("a", np.arange(5), salt="b").reasons == ("other_salt",)


def test_a_found_prefix_keeps_its_salt() -> None:
    tokens = np.arange(12)
    manager, _ = computed_prompt(plan_of("full"), tokens)
    found = manager.find_prefix(tokens, salt="b")
    with pytest.raises(ValueError, match="salt and extra_keys are those of find_prefix"):
        manager.start("a", found, salt="b")
    manager.start("large")  # the lookup stays valid
    assert manager.start("a", found).reasons == ("other_salt",)


@pytest.mark.parametrize("name", ["full", "windows", "chunks", "all"])
def test_a_prompt_computed_twice_outlives_the_blocks_that_were_kept_first(name: str) -> None:
    manager = BlockManager(plan_of(name, num_blocks=40), max_requests=3)
    shape = StepShape.for_plan(manager.plan, max_requests=3, max_tokens=36)
    tokens = np.arange(12)
    for request in "ab":
        manager.start(request, tokens)
    manager.step(shape, dict.fromkeys("ab", 12))  # each has blocks of its own
    kept = manager.prefix_stats().kept_blocks
    manager.finish("a")
    free = manager.num_free_blocks
    while manager.prefix_stats().evicted_blocks < kept:
        manager.start("c", np.arange(100, 148) + 100 * manager.num_uploads)
        for _ in range(4):
            manager.step(shape, {"c": 12})
        manager.finish("c")
    assert manager.num_free_blocks == free
    assert not manager.find_prefix([*tokens, 0]).num_cached_tokens
    manager.finish("b")
    assert manager.find_prefix([*tokens, 0]).num_cached_tokens == (8 if name == "all" else 12)


@pytest.mark.parametrize("blocks", [0.75, 1, 5])
def test_a_chunk_ends_where_a_prompt_parts_from_a_remembered_one(blocks: float) -> None:
    """If a block or more is the same."""
    manager = BlockManager(plan_of("none"), max_requests=2)
    shape = StepShape.for_plan(manager.plan, max_requests=2, max_tokens=12)
    manager.start("a", [1] * 30)
    for _ in range(3):
        manager.step(shape, {"a": 10})
    manager.finish("a")
    count = int(blocks * min(group.block_size for group in manager.plan.groups))
    ends = (count, count + 9)[blocks < 1 :]
    assert manager.start("b", [1] * count + [2] * 10).chunk_ends == ends


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_state_that_a_prompt_went_on_from_outlives_ends_of_others(is_shared: bool) -> None:
    manager = BlockManager(plan_of("none", num_blocks=100), max_requests=1, checkpoint_share=0.1)
    shape = StepShape.for_plan(
        manager.plan, max_requests=1, max_tokens=12, forks=1, cached_tokens=9
    )

    def serve(tokens: list[int]) -> None:
        hit = manager.start("a", tokens)
        manager.step(shape, {"a": len(tokens) - hit.num_cached_tokens})
        manager.finish("a")

    serve([1] * 9)
    if is_shared:
        serve([1] * 10)
    for number in range(2, 22):  # more than there is room for
        serve([number] * 9)
    assert (manager.find_prefix([1] * 11).num_cached_tokens > 0) == is_shared
