"""Prefixes that requests share; `tests.simulation` finds more of them, in random traffic."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.prefixes import (
    BlocksStored,
    EventGroup,
    EventLog,
    ExtraKey,
    TokenCodes,
    as_tokens,
)
from jaxkv._src.prefixes._checkpoints import WANTED_PART, Checkpoint
from jaxkv._src.prefixes._nodes import PromptTree
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import StepShape

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
    assert repr(found) == f"PrefixMatch({wanted.num_cached_tokens} of 12 tokens)"
    monkeypatch.setattr(PromptTree, "walk", lambda *_: pytest.fail("the prefix is looked up again"))
    assert found.num_cached_tokens == wanted.num_cached_tokens > 0
    assert manager.find_prefix(found).num_allocated_blocks == found.num_allocated_blocks == 0
    assert manager.start("a", found)._replace(row=wanted.row) == wanted
    assert manager.find_prefix(found).num_allocated_blocks == sum(wanted.shared_blocks)
    shorter = manager.start("b", found, max_cached_tokens=wanted.num_cached_tokens - 1)
    assert shorter.num_cached_tokens < wanted.num_cached_tokens
    assert manager.find_prefix(found).num_allocated_blocks == sum(wanted.shared_blocks)


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
    assert empty.prefix_stats().hit_rate == 0.0
    assert manager.find_prefix(tokens).num_cached_tokens == 8
    assert empty.start("a", manager.find_prefix(tokens)).num_cached_tokens == 0
    assert manager.start("a", empty.find_prefix(tokens)).num_cached_tokens == 8


IDS = [-(2**70), -(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**63, 2**64]


@pytest.mark.parametrize("dtype", [list, np.int32, np.int64, np.uint64, np.int8])
def test_a_refusal_names_a_token_that_is_out_of_range(dtype: Any) -> None:
    info = None if dtype is list else np.iinfo(dtype)
    ids = [i for i in IDS if info is None or info.min <= i <= info.max]
    for size in (1, 2, 3):
        for given in itertools.product(ids, repeat=size):
            tokens = list(given) if info is None else np.array(given, dtype)
            bad = [i for i in given if not 0 <= i < 2**31]
            if not bad:
                assert as_tokens("tokens", tokens).tolist() == list(given)
                continue
            with pytest.raises(ValueError, match=r"tokens holds the token id") as refusal:
                as_tokens("tokens", tokens)
            assert int(str(refusal.value).split("id ")[1].partition(";")[0]) in bad


def test_media_that_overlap_or_reach_past_the_tokens_get_no_codes() -> None:
    one, manager = ExtraKey.mm("x", 2, 6), BlockManager(plan_of("full"), max_requests=1)
    for keys, said in (
        ([ExtraKey.mm("x", 4, 9)], "reaches past the 8 tokens"),
        ([one, ExtraKey.mm("y", 5, 8)], "overlaps another key"),
        ([ExtraKey.mm("y", 0, 3), one], "overlaps another key"),
    ):
        with pytest.raises(ValueError, match=said):
            TokenCodes().encode([1] * 8, keys)
        with pytest.raises(ValueError, match=said):
            manager.start("a", [1] * 8, extra_keys=keys)
    assert not manager.requests


def test_a_prompt_with_an_image_later_on_is_known_under_its_salt() -> None:
    """By its first tokens, which are codes of 64 bits there and of 32 where nothing is added."""
    for images in ([ExtraKey.mm("cat", 8, 12)], []):
        manager = BlockManager(plan_of("full"), max_requests=2)
        shape = StepShape.for_plan(manager.plan, max_requests=2, max_tokens=12)
        manager.start("first", np.arange(12), extra_keys=images)
        manager.step(shape, {"first": 12})
        for more in ([], [ExtraKey.mm("dog", 8, 12)]):
            hit = manager.start("a", np.arange(12), salt="b", extra_keys=more)
            assert hit.reasons == ("other_salt",)
            manager.finish("a")


def test_token_ids_of_a_step_are_compared_with_a_prompt_with_images() -> None:
    """Its codes of 64 bits stand for a token id and an image each."""
    manager, ids = BlockManager(plan_of("full"), max_requests=1), np.arange(20)
    shape = StepShape.for_plan(
        manager.plan, max_requests=1, max_tokens=12, extra=12, token_ids=True
    )
    manager.start("a", ids, extra_keys=[ExtraKey.mm("cat", 2, 10), ExtraKey.lora("b", "/b")])
    for start in (0, 8):
        given = ids[start : start + 8]
        for at in range(8):
            with pytest.raises(ValueError, match=f"other token ids .* from token {start} on"):
                manager.step(shape, {"a": 8}, extra=given + (np.arange(8) == at))
        manager.step(shape, {"a": 8}, extra=given)


def test_as_many_prompts_as_blocks_are_known_under_their_salt() -> None:
    manager, shape = computed_prompt(plan_of("full", 14), np.arange(4))
    for first, reason in [*((i, "other_salt") for i in range(13)), (13, "never_seen")]:
        manager.start("b", [first] * 4)
        manager.step(shape, {"b": 4})
        manager.finish("b")
        assert manager.start("a", np.arange(5), salt="b").reasons == (reason,)
        manager.finish("a")


def test_a_prompt_longer_than_the_plan_is_refused_before_it_is_looked_up(monkeypatch) -> None:
    manager = BlockManager(plan_of("full"), max_requests=2)
    manager.start("as long", np.arange(48))
    found = manager.find_prefix(np.arange(49))  # asks how much there is of all tokens
    monkeypatch.setattr(PromptTree, "walk", lambda *_: pytest.fail("it is looked up"))
    monkeypatch.setattr(PromptTree, "touch", lambda *_: pytest.fail("it is looked up"))
    for tokens in (np.arange(49), list(range(49)), found):
        with pytest.raises(ValueError, match=r"holds 49 token ids, .* max_model_len=48; cut the p"):
            manager.start("b", tokens)


def test_a_found_prefix_keeps_its_salt() -> None:
    tokens = np.arange(12)
    manager, _ = computed_prompt(plan_of("full"), tokens)
    found = manager.find_prefix(tokens, salt="b")
    for options in ({"salt": "b"}, {"extra_keys": [ExtraKey.lora("b", "/b")]}):
        with pytest.raises(ValueError, match="salt and extra_keys are those of find_prefix"):
            manager.start("a", found, **options)
    manager.start("large")  # the lookup stays valid
    assert manager.start("a", found).reasons == ("other_salt",)


@pytest.mark.parametrize(("count", "goes_on"), [(7, False), (8, True), (9, True)])
@pytest.mark.parametrize("way", ["fork", "rewind"])
def test_tokens_behind_a_prompt_are_cached_unless_some_of_it_were_left_out(
    way: str, count: int, goes_on: bool
) -> None:
    """Others may have taken their place, and nobody has told which."""
    manager, shape = computed_prompt(plan_of("full"), np.arange(1))
    name = "a" if way == "rewind" else "sample"
    manager.start("a", np.arange(8))
    for size in (8, 1):
        manager.step(shape, {"a": size})
    manager.rewind({"a": count}) if way == "rewind" else manager.fork("a", [name], num_tokens=count)
    manager.step(shape, {name: 16 - count})
    manager.finish(name, np.arange(8, 16))
    assert manager.find_prefix(np.arange(17)).num_cached_tokens == (16 if goes_on else 8)
    without = [*range(7), *range(8, 16), 0]
    assert manager.find_prefix(without).num_cached_tokens == 4


def test_an_answer_with_its_prompt_is_refused_and_the_request_goes_on() -> None:
    """Otherwise the next prompt would hit what was never computed."""
    manager, shape = computed_prompt(plan_of("full"), np.arange(1))
    manager.start("a", np.arange(8))
    for size in (8, 1, 1):
        manager.step(shape, {"a": size})
    with pytest.raises(ValueError, match=r"tokens must be at most 3, .* leave the prompt out"):
        manager.finish("a", np.arange(11))
    manager.finish("a", np.arange(8, 11))
    assert manager.find_prefix(np.arange(17)).num_cached_tokens == 8


@pytest.mark.parametrize(("name", "ranks"), [("windows", 1), ("chunks", 1), ("full", 2)])
def test_events_describe_the_group_of_their_blocks(name: str, ranks: int) -> None:
    """A block of a group holds tokens of all ranks."""
    plan, log = plan_of(name, context_parallel=ranks), EventLog()
    manager = BlockManager(plan, max_requests=1, events=log)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=12)
    manager.start("a", np.arange(12))
    manager.step(shape, {"a": 12})
    batch = log.take()
    assert batch is not None
    windows = {spec: getattr(spec, "sliding_window", None) for spec in LAYERS[name].values()}
    assert [event.group for event in batch.events if isinstance(event, BlocksStored)] == [
        EventGroup(index, group.specs[0].kind, 4 * ranks, windows[group.specs[0]])
        for index, group in enumerate(plan.groups)
    ]


@pytest.mark.parametrize("name", ["full", "windows", "chunks", "all", "single"])
def test_a_prompt_computed_twice_outlives_the_blocks_that_were_cached_first(
    name: str, monkeypatch
) -> None:
    monkeypatch.setitem(LAYERS, "single", {"a": full(block_size=1)})
    manager = BlockManager(plan_of(name, 80 if name == "single" else 40), max_requests=3)
    shape = StepShape.for_plan(manager.plan, max_requests=3, max_tokens=36)
    tokens = np.arange(12)
    for request in "ab":
        manager.start(request, tokens)
    manager.step(shape, dict.fromkeys("ab", 12))  # each has blocks of its own
    kept = manager.prefix_stats().cached_blocks
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


@pytest.mark.parametrize("wanted", ["shared", "named", "neither"])
def test_a_state_that_prompts_go_on_from_outlives_ends_of_others(wanted: str) -> None:
    manager = BlockManager(plan_of("none", num_blocks=100), max_requests=1, checkpoint_share=0.1)
    shape = StepShape.for_plan(
        manager.plan, max_requests=1, max_tokens=12, forks=1, cached_tokens=9
    )

    def serve(tokens: list[int], **options) -> None:
        hit = manager.start("a", tokens, **options)
        for end in (*hit.chunk_ends[:-1], len(tokens)):
            manager.step(shape, {"a": end - manager.num_computed_tokens("a")})
        manager.finish("a")

    serve([1] * 9, boundaries=[4] if wanted == "named" else ())
    if wanted == "shared":
        serve([1] * 10)
    for number in range(2, 22):  # more than there is room for
        serve([number] * 9)
    assert (manager.find_prefix([1] * 11).num_cached_tokens > 0) == (wanted != "neither")


class InOrderOfUse:
    """A manager of states, and the order in which they are to be evicted, by its definition.

    States are named by the token that their prompt repeats, and their position.
    """

    def __init__(self, seed: int):
        self.draw = np.random.default_rng(seed)
        plan = plan_of("none", num_blocks=200)
        self.manager = BlockManager(plan, max_requests=3, checkpoint_share=0.05)
        self.shape = StepShape.for_plan(
            plan, max_requests=3, max_tokens=12, forks=1, cached_tokens=16
        )
        self.most = 10  # that part of all 200
        self.is_wanted: dict[tuple[int, int], bool] = {}  # the least recently used first
        self.prompts: dict[int, tuple[int, int, list[int]]] = {}  # token, size, ends of chunks
        self.used: dict[int, list[tuple[int, int]]] = {}  # states of each request
        self.counts, self.reasons = Counter[str](), Counter[str]()

    def act(self, name: int) -> None:
        donors = [one for one in self.prompts if self.manager.num_computed_tokens(one)]
        if name not in self.prompts:
            self.fork(name, donors[0]) if donors and self.draw.random() < 0.2 else self.start(name)
        elif self.prompts[name][2] and self.draw.random() < 0.9:
            self.step(name)
        else:
            self.finish(name)

    def start(self, name: int) -> None:
        token, size = (int(n) for n in (self.draw.integers(5), self.draw.choice([7, 10, 12])))
        named = [int(self.draw.integers(1, size))] if self.draw.random() < 0.3 else []
        most = int(self.draw.integers(size)) if self.draw.random() < 0.2 else None
        hit = self.manager.start(name, [token] * size, boundaries=named, max_cached_tokens=most)
        found = hit.num_cached_tokens
        self.counts.update(requests=1, hits=found > 0, prompt_tokens=size, cached_tokens=found)
        self.reasons.update({*hit.reasons} - {"complete", "other_groups"})
        self.prompts[name], self.used[name] = (token, size, [*hit.chunk_ends, size]), []
        if hit.num_cached_tokens:
            self.used[name].append((token, hit.num_cached_tokens))
            self.touch(token, hit.num_cached_tokens, is_wanted=True)

    def fork(self, name: int, donor: int) -> None:
        """Starts a request that has used what its donor has, and goes no further."""
        self.manager.fork(donor, [name])
        self.prompts[name] = *self.prompts[donor][:2], []
        self.used[name] = self.used[donor].copy()

    def step(self, name: int) -> None:
        token, size, ends = self.prompts[name]
        end = ends.pop(0)
        self.manager.step(self.shape, {name: end - self.manager.num_computed_tokens(name)})
        if end < size:
            self.keep(name, token, end)

    def finish(self, name: int) -> None:
        token, _, _ = self.prompts.pop(name)
        if computed := self.manager.num_computed_tokens(name):
            self.keep(name, token, computed)
        self.manager.finish(name)
        pool, last, made = self.manager.block_pool, list[int](), self.made()
        for state in self.used.pop(name):
            self.touch(*state)
            ids = made[state].blocks[made[state].blocks > 0]
            ids = ids[pool.references_of(ids) == 0].tolist()
            last = [block_id for block_id in last if block_id not in ids] + ids
        free = pool._evictable._ids[pool._evictable._head : pool._evictable._tail]
        assert free[free > 0].tolist()[-len(last) :] == last or not last, "blocks to be taken last"

    def keep(self, name: int, token: int, position: int) -> None:
        prompt = self.manager._prefixes.cached.get(self.manager.requests[name])
        is_wanted = prompt is not None and position in prompt.wanted
        if (token, position) not in self.is_wanted:
            self.used[name].append((token, position))
        self.touch(token, position, is_wanted=is_wanted)
        while self.num_blocks(False) + self.num_blocks(True) > self.most:
            crowds = self.num_blocks(True) > WANTED_PART * self.most
            last = next(at for at, wanted in self.is_wanted.items() if wanted == crowds)
            del self.is_wanted[last]
            for states in self.used.values():  # it may be made again
                states[:] = [state for state in states if state != last]

    def touch(self, token: int, position: int, is_wanted: bool = False) -> None:
        before = self.is_wanted.pop((token, position), False)
        self.is_wanted[token, position] = before or is_wanted

    def num_blocks(self, is_wanted: bool) -> int:
        """One block of the state, and one of keys if these end inside it."""
        kept = [at for at, wanted in self.is_wanted.items() if wanted == is_wanted]
        return sum(1 + (position % 4 > 0) for _, position in kept)

    def made(self) -> dict[tuple[int, int], Checkpoint]:
        nodes = filter(None, self.manager._prefixes._tree.prompts.nodes)
        each = [(int(node.tokens[0]), made) for node in nodes for made in node.checkpoints.values()]
        return {(token, made.position): made for token, made in each}

    def check(self) -> None:
        made = self.made()
        for is_wanted, queue in self.manager._prefixes._tree.checkpoints._queues.items():
            in_order = [made[at] for at, wanted in self.is_wanted.items() if wanted == is_wanted]
            assert list(queue) == in_order, "states in another order"


def test_a_start_that_is_refused_is_not_counted() -> None:
    manager = BlockManager(plan_of("full"), max_requests=1)
    manager.start("a", [1] * 8)
    before = manager.prefix_stats()
    for name, options in (("a", {}), ("b", {}), ("b", {"boundaries": [9]}), ("b", {"salt": 5})):
        with pytest.raises((TypeError, ValueError)):
            manager.start(name, [1] * 8, **options)
    assert manager.prefix_stats() == before


@pytest.mark.parametrize("seed", range(6))
def test_states_are_evicted_in_the_order_of_their_last_use(seed: int) -> None:
    """Those are used that a request makes, finds or goes on from, until it ends."""
    states = InOrderOfUse(seed)
    for _ in range(150):
        states.act(int(states.draw.integers(3)))
        states.check()
    stats = states.manager.prefix_stats()
    assert stats.hits > 5 and stats.reasons == states.reasons
    assert {name: getattr(stats, name) for name in states.counts} == states.counts
    assert stats.hit_rate == stats.cached_tokens / stats.prompt_tokens


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 2)], ids=str)
def test_the_end_of_a_prefix_is_evicted_before_its_beginning(sizes: tuple[int, int]) -> None:
    """In all groups together, by the first tokens of their blocks."""
    tokens = np.arange(25)
    one, other = (HEADS | {"head_size": 32 // size, "block_size": size} for size in sizes)
    layers = {
        "a": FullAttentionSpec(**one),
        "b": ChunkedAttentionSpec(chunk_size=48, **other),
    }
    plan = plan_cache(layers, 2**30, max_model_len=48, num_blocks_override=40)
    assert sorted(group.block_size for group in plan.groups) == sorted(sizes)
    starts = sorted((n for size in sizes for n in range(0, 25 // size * size, size)), reverse=True)
    for num_evicted in range(len(starts) + 1):
        gone, kept = starts[:num_evicted], starts[num_evicted:]
        if gone and kept and gone[-1] == kept[0]:
            continue  # either of the two may be the first
        manager = BlockManager(plan, max_requests=1)
        shape = StepShape.for_plan(plan, max_requests=1, max_tokens=25)
        manager.start("a", tokens)
        manager.step(shape, {"a": 25})
        manager.finish("a")
        manager.block_pool.allocate(manager.block_pool.use.uncached + num_evicted)
        left = min(gone, default=24) // max(sizes) * max(sizes)
        assert manager.find_prefix(tokens).num_cached_tokens == left
