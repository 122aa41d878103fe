"""The blocks that host memory keeps and brings back, checked against the rules in words."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from jaxkv import HostMemory
from jaxkv._src.offload import _host_pool
from jaxkv._src.offload._memory import block_bytes
from jaxkv._src.planning import plan_cache
from jaxkv.prefixes import BlocksStored, EventLog, block_keys
from tests.test_offload import FULL, STATE, WINDOW, Served, host

BLOCK = FULL.block_size
ALIGN = dataclasses.replace(STATE, cache_mode="align")


class Recent(Served):
    """Prompts of ``size`` whole blocks, in a pool for ``together`` of them and one block more.

    Each time blocks are evicted, they are those of a single prompt.
    """

    def __init__(self, size: int, together: int, host_blocks: int):
        super().__init__({"a": FULL}, size * together + 2, host(host_blocks, {"a": FULL}))
        self.prompts = [100 * i + np.arange(BLOCK * size + 1) for i in range(12)]
        self.used: list[int] = []  # the most recently used first

    def use(self, number: int) -> None:
        hit = self.start(number, self.prompts[number])
        self.step({})  # what waits to be stored cannot make room for anything
        self.step({number: len(self.prompts[number]) - hit.num_cached_tokens})
        self.manager.finish(number)
        self.used = [number] + [other for other in self.used if other != number]

    def found(self) -> list[tuple[int, int]]:
        """Returns how many blocks of each prompt are found, and how many it has."""
        prompts = [self.prompts[number] for number in self.used]
        found = [self.manager.find_prefix(tokens).num_cached_tokens for tokens in prompts]
        return [(n // BLOCK, len(p) // BLOCK) for n, p in zip(found, prompts, strict=True)]


@pytest.mark.parametrize("sizes", [(1,), (4, 1)])
def test_what_was_used_last_is_kept(monkeypatch, sizes: tuple[int, ...]) -> None:
    """And no block is kept that is of no use, because those before it are gone."""
    monkeypatch.setattr(_host_pool, "CHUNK_SIZES", sizes)
    for seed in range(6):
        draw = random.Random(seed)
        size, together = draw.choice([(1, 8), (2, 4), (3, 3), (4, 2), (5, 2)])
        host_blocks = draw.randint(1, 6 * size)
        served = Recent(size, together, host_blocks)
        for _ in range(40):
            served.use(draw.choice([draw.randrange(12), *served.used[:3]]))
            found = served.found()
            lost = [have < of for have, of in found]
            first = lost.index(True) if True in lost else len(found)
            assert not any(have for have, _ in found[first + 1 :]), (seed, found)
            offload, num_found = served.manager._offload, sum(have for have, _ in found)
            assert offload is not None and num_found == np.count_nonzero(
                offload._tree.read_only_until
            )
            if sizes == (1,):  # larger chunks leave as a whole
                assert num_found >= min(host_blocks, sum(of for _, of in found)), (seed, found)


def test_host_memory_gives_up_first_what_is_on_the_device_again(monkeypatch) -> None:
    monkeypatch.setattr(_host_pool, "CHUNK_SIZES", (1,))
    served = Recent(1, 8, host_blocks=3)
    for number in (*range(11), 0, 11):  # the second last one makes room for what it loads
        served.use(number)
    assert [of for of in served.found() if of != (1, 1)] == [(0, 1)]
    assert served.manager.offload_stats().loaded_blocks == 1


def test_a_prefix_is_loaded_where_that_is_worth_it() -> None:
    """Only what device memory lacks counts, and each chunk that holds a part of it once."""
    seen = {True: 0, False: 0}
    for seed in range(15):
        draw = random.Random(seed)
        layers = {"a": FULL, "s": STATE} if seed % 3 == 0 else {"a": FULL}
        served = Served(layers, draw.randint(11, 14), host(100, layers), checkpoint_share=1.0)
        prompts = [(100 * i + np.arange(draw.randint(9, 32))).tolist() for i in range(4)]
        for _ in range(6):
            served.run(object(), draw.choice(prompts))
        if draw.random() < 0.5:  # evicts blocks that no chunk holds before the next step
            served.start("last", range(1000, 1032))
            served.manager.grow({"last": draw.randint(1, 32)})
        offload = served.manager._offload
        assert offload is not None
        of_chunk = {
            c.number: (c.group, c.block_ids.size) for m in served.transfers for c in m.stores
        }
        for tokens in prompts:
            rules = [HostMemory(num_bytes=1, min_tokens=n) for n in (1, 10**6)]
            found, here = (match(served, tokens, rule) for rule in rules)
            ids = np.concatenate([part.block_ids for part in found.shared])
            ids = ids[ids >= served.plan.num_blocks].astype(np.int64)
            gained = found.num_tokens - here.num_tokens
            assert found.num_host_tokens == gained, "of a prefix that lies in both memories"
            if not gained:
                continue
            numbers = offload.pool.chunks(ids)
            size = sum(
                of_chunk[n][1] * int(offload.pool.block_bytes[of_chunk[n][0]])
                for n in {*numbers.tolist()} - {_host_pool.UNFLUSHED}
            )
            alone = ids[numbers == _host_pool.UNFLUSHED]
            size += sum(int(offload.pool.block_bytes[g]) for g in offload.pool.groups(alone))
            least = -(-size // gained)
            for tokens_wanted, most, wanted in (
                (gained, least, True),
                (gained + 1, least, False),
                (gained, least - 1, False),
            ):
                rule = HostMemory(
                    num_bytes=1, min_tokens=tokens_wanted, max_bytes_per_token=max(1, most)
                )
                got = match(served, tokens, rule).num_tokens
                assert got == (found if wanted else here).num_tokens, (seed, tokens_wanted, most)
                seen[here.num_tokens > 0] += 1
    assert min(seen.values()) > 20, seen


def match(served: Served, tokens, rule: HostMemory, most: int | None = None):
    """Returns the prefix of ``most`` tokens that a lookup finds by a rule."""
    served.manager._offload._memory = rule
    served.manager._prefixes._tree.state = object()
    return served.manager.find_prefix(tokens, max_cached_tokens=most).found


def move_to_host(served: Served, ids: np.ndarray) -> None:
    """Evicts kept blocks that no request holds."""
    pool = served.manager.block_pool
    pool.uncache(np.concatenate([ids, pool.on_evict(ids)]))


def kept_on_device(served: Served) -> np.ndarray:
    return np.flatnonzero(served.manager.block_pool.read_only_until).astype(np.int32)


def run_to(served: Served, tokens, ends: list[int]) -> None:
    """Computes a prompt and ends it; its states are kept at these numbers of tokens, too."""
    served.manager.start("a", tokens, boundaries=ends)
    at = served.manager.num_computed_tokens("a")
    for end in [end for end in (*ends, len(tokens)) if end > at]:
        served.step({"a": end - at})
        at = end
    served.manager.finish("a")


@pytest.mark.parametrize("is_swapped_out", [False, True])
@pytest.mark.parametrize("layers", [{"a": FULL}, {"w": WINDOW}, {"a": FULL, "s": STATE}], ids=list)
def test_events_say_that_device_memory_holds_what_was_loaded(layers, is_swapped_out: bool) -> None:
    log, tokens = EventLog(), np.arange(18)
    served = Served(layers, 20, host(100, layers), events=log, checkpoint_share=1.0)
    if is_swapped_out:
        served.start("a", tokens)
        served.step({"a": 18})
        assert served.manager.swap_out("a")
    else:
        served.run("a", tokens)
    move_to_host(served, kept_on_device(served))
    log.take()
    hit = served.manager.swap_in("a") if is_swapped_out else served.start("a", tokens)
    size, batch = served.plan.groups[0].block_size, log.take()  # that of "s" is no whole block
    end, rest = divmod(hit.num_cached_tokens, size)
    first, keys = end + (rest > 0) - hit.shared_blocks[0], block_keys(tokens, size)
    assert hit.num_host_tokens and batch is not None
    (stored,) = [event for event in batch.events if isinstance(event, BlocksStored)]
    assert stored.medium == "GPU" and stored.block_keys == tuple(keys[first:end])
    assert stored.token_ids == tuple(range(first * size, end * size))
    assert stored.parent_key == (keys[first - 1] if first else None)


@pytest.mark.parametrize(
    "layers",
    [{"w": WINDOW, "s": STATE}, {"a": FULL, "w": WINDOW, "s": STATE}, {"a": FULL, "s": ALIGN}],
    ids=["window", "all", "align"],
)
def test_every_prefix_with_states_is_found_as_before_once_all_lies_on_the_host(layers) -> None:
    seen: set[int] = set()
    for seed in range(5):
        draw = random.Random(seed)
        served = Served(layers, 60, host(100, layers), checkpoint_share=1.0)
        prompts = [np.arange(32), np.append(np.arange(draw.randint(1, 30)), np.arange(100, 132))]
        for tokens in prompts:
            run_to(served, tokens[:32], sorted(draw.sample(range(1, 32), draw.randint(1, 3))))
        asked = [tokens[:size] for tokens in prompts for size in range(2, 33)]
        before = [served.manager.find_prefix(tokens).num_cached_tokens for tokens in asked]
        move_to_host(served, kept_on_device(served))
        found = [served.manager.find_prefix(tokens).found for tokens in asked]
        assert [each.num_tokens for each in found] == before, seed
        assert [each.num_host_tokens for each in found] == before, seed
        seen |= {*before}
    assert len(seen) > 8, seen


def test_of_blocks_that_leave_together_those_that_were_used_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(_host_pool, "CHUNK_SIZES", (1,))
    served = Recent(1, 8, host_blocks=2)
    for number in range(8):
        served.use(number)
    served.start("last", range(1000, 1032))
    served.manager.grow({"last": 32})  # takes all blocks but one
    assert [have for have, _ in served.found()] == [1, 1, 1, 0, 0, 0, 0, 0]


class CheckedHostPool:
    """The blocks and the chunks of a `HostBlockPool`, by the rules in words."""

    def __init__(self, num_bytes: int):
        self.pool, self.num_bytes = _host_pool.HostBlockPool([4, 8], num_bytes, 2), num_bytes
        self.sizes = 4, 8
        self.group: dict[int, int] = {}
        self.chunk: dict[int, int] = {}
        self.alive: list[int] = []
        self.leaving: list[int] = []
        self.unsealed: list[int] = []
        self.chunks: dict[int, list[int]] = {}  # the least recently used first
        self.group_of: dict[int, int] = {}  # by chunk
        self.pins: Counter[int] = Counter()
        self.dropped: list[int] = []

    @property
    def used_bytes(self) -> int:
        bytes_of = {n: self.sizes[self.group_of[n]] * len(ids) for n, ids in self.chunks.items()}
        return sum(bytes_of.values()) + sum(self.sizes[self.group[i]] for i in self.unsealed)

    def check(self) -> None:
        room, ids = self.pool, np.array(self.alive, np.int64)
        assert room.alive.tolist() == sorted(self.alive)
        assert room.groups(ids).tolist() == [self.group[i] for i in self.alive]
        assert room.chunks(ids).tolist() == [self.chunk[i] for i in self.alive]
        assert room.used_bytes == self.used_bytes <= self.num_bytes
        assert room.num_used_ids == len(self.alive) + len(self.leaving)
        assert room.has_changed == bool(self.unsealed or self.dropped or self.leaving)

    def take(self, groups: list[int]) -> None:
        ids = self.pool.take(np.array(groups, np.int64)).tolist()
        assert len({*ids, *self.alive, *self.leaving}) == (
            len(ids) + len(self.alive) + len(self.leaving)
        )
        assert not ids or 2 <= min(ids) <= max(ids) < 2 + self.pool.num_ids
        self.group |= zip(ids, groups, strict=True)
        self.chunk |= dict.fromkeys(ids, _host_pool.UNFLUSHED)
        self.alive += ids
        self.unsealed += ids

    def members(self, number: int) -> list[int]:
        """Returns the blocks of a chunk that are alive."""
        return [i for i in self.chunks[number] if i in self.alive and self.chunk[i] == number]

    def let_go(self, ids: list[int]) -> None:
        for host_id in ids:
            self.alive.remove(host_id)
            self.leaving.append(host_id)
            self.drop(self.chunk[host_id])

    def drop(self, number: int) -> None:
        if number in self.chunks and not self.members(number) and not self.pins[number]:
            del self.chunks[number]
            self.dropped.append(number)

    def oldest(self, spared: set[int]) -> None:
        spared |= {number for number, count in self.pins.items() if count}
        number = next((n for n in self.chunks if n not in spared), None)
        gone = None if number is None else self.members(number)
        assert self.pool.oldest(spared) == gone
        self.let_go(gone or [])

    def touch(self, ids: list[int]) -> None:
        self.pool.touch(np.array(ids, np.int64))
        for number in dict.fromkeys(self.chunk[i] for i in ids):
            if number in self.chunks:
                self.chunks[number] = self.chunks.pop(number)

    def pin(self, number: int) -> None:
        assert self.pool.pin(number) == (number in self.chunks)
        self.pins[number] += number in self.chunks

    def unpin(self, number: int) -> None:
        self.pool.unpin(number)
        self.pins[number] -= 1
        self.drop(number)

    def move(self, wanted: set[int]) -> None:
        made = self.pool.flush({i: 100 + i for i in self.unsealed}, wanted)
        stored = [i for i in self.unsealed if i in self.alive or i in wanted]
        self.unsealed.clear()
        for chunk in made:
            ids = (chunk.block_ids - 100).tolist()
            assert len(ids) in _host_pool.CHUNK_SIZES and {self.group[i] for i in ids} == {
                chunk.group
            }
            self.chunks[chunk.number], self.group_of[chunk.number] = ids, chunk.group
            self.chunk |= dict.fromkeys(ids, chunk.number)
            if not self.members(chunk.number):
                self.pin(chunk.number)
        for group in (0, 1):
            of_group = [chunk.block_ids for chunk in made if chunk.group == group]
            ids = [i for i in stored if self.group[i] == group]
            assert [i - 100 for part in of_group for i in part.tolist()] == ids
            fewest = len(ids) // 16 + len(ids) % 16 // 4 + len(ids) % 4
            assert len(of_group) == fewest, "more chunks than needed"
        assert self.pool.settle() == tuple(self.dropped)
        self.dropped.clear()
        self.leaving.clear()


def test_host_room_equals_its_rules_after_every_call() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        of = CheckedHostPool(draw.choice([8, 41, 400]))
        for _ in range(60):
            what = draw.choice(
                ["take", "take", "release", "oldest", "touch", "pin", "unpin", "move"]
            )
            some = draw.sample(of.alive, draw.randint(0, min(3, len(of.alive))))
            if what == "take":
                groups = [draw.randint(0, 1) for _ in range(draw.choice([1, 3, 20, 50]))]
                while of.used_bytes + sum(of.sizes[group] for group in groups) > of.num_bytes:
                    groups.pop()
                of.take(groups)
            elif what == "release":
                of.pool.release(some)
                of.let_go(some)
            elif what == "oldest":
                of.oldest({*draw.sample([*of.chunks], min(len(of.chunks), draw.randint(0, 2)))})
            elif what == "touch":
                of.touch(some)
            elif what == "pin":
                of.pin(draw.choice([*of.chunks, 1]))
            elif what == "unpin" and any(of.pins.values()):
                of.unpin(draw.choice([number for number, count in of.pins.items() if count]))
            elif what == "move":
                gone = [i for i in of.unsealed if i not in of.alive]
                of.move({*draw.sample(gone, draw.randint(0, len(gone)))})
            of.check()


def test_a_load_brings_each_block_to_all_that_want_it() -> None:
    for seed in range(20):
        draw, room = random.Random(seed), _host_pool.HostBlockPool([4, 8], 1000, 50)
        stored: dict[int, tuple[int, int]] = {}  # chunk and place
        for _ in range(draw.randint(1, 6)):
            ids = room.take(np.array([draw.randint(0, 1) for _ in range(draw.randint(1, 7))]))
            for chunk in room.flush(dict.fromkeys(ids.tolist(), 1), set()):
                members = room._members[chunk.number]
                stored |= {host_id: (chunk.number, at) for at, host_id in enumerate(members)}
        pairs = {into: draw.choice([*stored]) for into in range(1, draw.randint(2, 12))}
        loads = room.loads(pairs)
        brought = [
            (into, chunk.number, at)
            for chunk in loads
            for at, into in enumerate(chunk.block_ids.tolist())
            if into >= 0
        ]
        assert sorted(brought) == [(into, *stored[host_id]) for into, host_id in pairs.items()]


def test_a_block_on_the_host_has_the_bytes_of_the_worker_that_has_most() -> None:
    plan = plan_cache([{"a": FULL}, {"b": FULL, "c": FULL}], [2**20] * 2, max_model_len=32)
    assert block_bytes(plan) == (2 * FULL.page_bytes,)
