"""Blocks in host memory: the manager, checked on a device of dictionaries."""

import dataclasses
import itertools
import os
import random
from collections import Counter

import numpy as np
import pytest

from jaxkv import (
    BlockManager,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostMemory,
    Limits,
    OutOfBlocksError,
    Scheduler,
    SlidingWindowSpec,
    StateSpec,
    StepShape,
)
from jaxkv._src.offload import HostBlockPool, _host_pool
from jaxkv.blocks import Chunk, OffloadStats, Transfers
from jaxkv.prefixes import BlocksRemoved, BlocksStored, EventLog, encode_events
from tests.layer_examples import plan_of
from tests.simulation import run_simulation
from tests.simulation.of_offload import STORED

IS_LONG = os.environ.get("JAXKV_HYPOTHESIS_PROFILE") == "long"
FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=4, sliding_window=6)
CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
STATE = StateSpec(block_size=4, shapes=((32,),), dtypes=("f32",), cache_mode="none")


def test_requests_read_their_own_bytes_from_both_memories() -> None:
    """Also with hits, parking, forks, epochs, resets and lost uploads, in any order."""
    first = random.SystemRandom().randrange(2**40) if IS_LONG else 0
    seen: Counter[str] = Counter()
    for seed, kind in itertools.product(range(first, first + (80 if IS_LONG else 1)), STORED):
        seen += run_simulation(seed, kind, offload=True)
    assert min(seen[what] for what in ("stored", "loaded", "parked", "resumed")) > 0, seen


@pytest.mark.parametrize(
    ("seed", "calls"),
    [
        (44, "blocks that a dropped checkpoint has released are not stored"),
        (320, "a block that was written on frees its old copy"),
        (50225, "a checkpoint that is dropped for its own blocks frees each once"),
        (33000077, "a block is copied before others take it, and loaded before that"),
        (33001436, "loads into blocks that all were taken keep no host memory"),
        (9100001041, "one that waits for a load goes on if the others, all younger, get no blocks"),
        (9810014029, "checkpoints that come from the host with blocks computed anew are bounded"),
    ],
)
def test_simulations_that_found_a_fault(seed: int, calls: str) -> None:
    run_simulation(seed, offload=True)


def test_a_block_that_was_taken_is_not_loaded_after_a_copy_of_it_was_dropped() -> None:
    """Found by a simulation whose kind is drawn, and that has host memory by chance."""
    run_simulation(41024000082)


class Served:
    """Requests that compute their prompts one after another."""

    def __init__(self, layers, num_blocks: int, host: HostMemory | None, **options):
        self.plan = plan_of(layers, num_blocks, 32)
        self.manager = BlockManager(self.plan, max_requests=4, host_memory=host, **options)
        self.shape = StepShape.for_plan(
            self.plan, max_requests=4, max_tokens=64, forks=4, cached_tokens=128
        )
        self.transfers: list[Transfers] = []

    def start(self, name, tokens):
        return self.manager.start(name, np.asarray(tokens))

    def step(self, work) -> Transfers | None:
        before = self.manager.offload_stats()
        self.manager.step(self.shape, work)
        transfers = self.manager.take_transfers()
        self.check_counts(before, self.manager.offload_stats(), transfers)
        self.transfers += [] if transfers is None else [transfers]
        self.check_that_host_blocks_are_wanted()
        return transfers

    def check_counts(
        self, before: OffloadStats | None, after: OffloadStats | None, transfers: Transfers | None
    ) -> None:
        """Checks what a step has counted of its moves."""
        for what in ("stored", "loaded") if before and after else ():
            chunks = (
                []
                if transfers is None
                else transfers.stores
                if what == "stored"
                else transfers.loads
            )
            blocks = sum(np.count_nonzero(chunk.block_ids >= 0) for chunk in chunks)
            layout = self.plan.layouts[0]
            size = sum(layout.group_bytes(of.group) * of.block_ids.size for of in chunks)
            for unit, count in (("blocks", blocks), ("bytes", size)):
                name = f"{what}_{unit}"
                assert getattr(after, name) - getattr(before, name) == count, name
        numbers = [each.number for each in (*self.transfers, transfers) if each is not None]
        assert numbers == sorted({*numbers}), "moves of one number"

    def check_that_host_blocks_are_wanted(self) -> None:
        """By a prefix that lies there, or as the copy of one on the device."""
        prefixes = self.manager._prefixes
        if prefixes._offload is not None:
            room, copies = prefixes._offload.pool, prefixes._offload._copy_of
            ids = room.first_id + np.flatnonzero(room.is_alive)
            assert ((prefixes._tree.read_only_until[ids] > 0) | (copies[ids] > 0)).all()

    def run(self, name, tokens):
        """Starts a request, computes its prompt and ends it; returns its hit."""
        hit = self.start(name, tokens)
        at = hit.num_cached_tokens
        for end in (*hit.chunk_ends, len(tokens)):
            if end > at:
                self.step({name: end - at})
                at = end
        self.manager.finish(name)
        return hit


def prompt(number: int, size: int = 16) -> np.ndarray:
    return np.arange(size) + 100 * number


def host(blocks: float, layers, **options) -> HostMemory:
    size = plan_of(layers, 60, 32).layouts[0].bytes_per_block
    return HostMemory(**{"num_bytes": int(blocks * size), "min_tokens": 1} | options)


def test_a_text_of_moves_counts_the_blocks_that_are_copied() -> None:
    stores = [Chunk(1, 0, np.array([4, 5])), Chunk(2, 1, np.array([6]))]
    loads = [Chunk(3, 0, np.array([-1, 7, -1])), Chunk(4, 0, np.array([0, 8]))]
    transfers = Transfers(3, tuple(stores), tuple(loads), ())
    assert repr(transfers) == "Transfers(number 3: 3 blocks to the host, 3 back)"


def test_an_evicted_prefix_comes_back() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(100, layers))
    served.run("a", prompt(1, 17))
    served.run("b", prompt(2, 32))  # all 8 blocks
    assert len(stored_by(served.transfers)) == 4
    hit = served.start("c", prompt(1, 17))
    assert (hit.num_cached_tokens, hit.num_host_tokens) == (16, 16)
    assert hit.reasons == ("complete",)
    transfers = served.step({"c": 1})
    assert transfers is not None
    loaded = [i for chunk in transfers.loads for i in chunk.block_ids.tolist() if i >= 0]
    assert sorted(loaded) == sorted(served.manager.block_ids("c")[0][:4])
    stats = served.manager.offload_stats()
    assert isinstance(stats, OffloadStats) and stats.loaded_blocks == 4
    prefixes = served.manager.prefix_stats()
    assert (prefixes.host_tokens, prefixes.hits, prefixes.host_hits) == (16, 1, 1)


def test_a_block_that_was_loaded_is_not_stored_again() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(100, layers))
    for name in range(6):
        served.run(name, prompt(name % 2, 32))
    stats = served.manager.offload_stats()
    assert stats is not None
    assert stats.stored_blocks == 16 and stats.loaded_blocks > 16, stats


def test_a_prefix_that_was_computed_anew_is_kept_in_device_memory_again() -> None:
    layers = {"a": FULL, "s": STATE}
    served = Served(layers, 13, host(100, layers, min_tokens=18), checkpoint_share=1.0)
    served.run("a", prompt(1, 18))
    for name in "bc":
        served.run(name, prompt(ord(name), 32))
    assert served.run("d", prompt(1, 18)).reasons == ("on_host", "on_host")
    hit = served.start("e", prompt(1, 18))
    assert (hit.num_cached_tokens, hit.num_host_tokens) == (17, 0)


def test_a_state_that_was_computed_anew_takes_the_place_of_that_on_the_host() -> None:
    layers, tokens = {"a": FULL, "s": STATE}, prompt(1, 20)
    served = Served(layers, 20, host(100, layers), checkpoint_share=1.0)
    served.manager.start("a", tokens, boundaries=[17])
    for count in (17, 2):  # both ends lie in one block
        served.step({"a": count})
    served.manager.finish("a")
    for number in range(2, 8):
        served.run(number, prompt(number, 32))
    served.manager.start("b", tokens, boundaries=[17], max_cached_tokens=0)
    served.step({"b": 17})
    upload = served.manager.step(served.shape, {"b": 1})
    served.manager.take_transfers()
    assert upload.parts()["copy_sources"].size == 1  # of the state after 17 tokens
    served.manager.rewind({"b": 18})
    hit = served.start("c", tokens)
    assert hit.num_cached_tokens == 19
    transfers = served.step({"c": 1})
    assert transfers is not None and {chunk.group for chunk in transfers.loads} == {0, 1}


def test_a_load_that_is_not_worth_it_is_not_made() -> None:
    layers = {"a": FULL}
    size = plan_of(layers, 9, 32).layouts[0].bytes_per_block
    for rule in ({"min_tokens": 17}, {"max_bytes_per_token": size // 4 - 1}):
        served = Served(layers, 9, host(100, layers, **rule))
        served.run("a", prompt(1, 17))
        served.run("b", prompt(2, 32))
        hit = served.start("c", prompt(1, 17))
        assert (hit.num_cached_tokens, hit.num_host_tokens) == (0, 0)
        assert hit.reasons == ("on_host",)


def hybrid() -> Served:
    """Returns a hybrid whose first prompt, of 18 tokens, has gone to host memory for others."""
    layers = {"a": FULL, "s": STATE}
    served = Served(layers, 13, host(100, layers), checkpoint_share=1.0)
    served.run("a", prompt(1, 18))
    served.run("b", prompt(2, 32))
    served.run("c", prompt(3, 32))
    return served


@pytest.mark.parametrize("layers", [{"a": FULL, "s": STATE}, {"s": STATE}], ids=len)
def test_prompts_of_any_length_come_back_from_the_host(layers) -> None:
    for size in range(1, 6):
        served = Served(layers, 13, host(100, layers), checkpoint_share=1.0)
        served.run("a", prompt(1, size))
        for number in range(2, 10):
            served.run(number, prompt(number, 32))
        hit = served.start("b", prompt(1, size + 1))
        assert (hit.num_cached_tokens, hit.num_host_tokens) == (size, size)


# --- loads next to steps ----------------------------------------------------------------


def beside(blocks: float = 100) -> Served:
    """Returns a manager that runs "b"; the prefixes of prompts 1 and 2 are in host memory."""
    served = Served({"a": FULL}, 21, host(blocks, {"a": FULL}))
    for number in (1, 2, 3, 4, 5):
        served.run(number, prompt(number, 17))
    served.start("b", prompt(6, 24))
    served.step({"b": 24})
    return served


def loaded_by(transfers: Transfers | None) -> list[int]:
    return (
        []
        if transfers is None
        else [i for c in transfers.loads for i in c.block_ids.tolist() if i >= 0]
    )


def test_loads_are_copied_next_to_a_step_that_does_not_need_them() -> None:
    served = beside()
    served.start("c", prompt(1, 17))
    assert served.manager.is_loading("c") and not served.manager.is_loading("b")
    transfers = served.step({"b": 1})
    assert transfers is not None and transfers.lookahead and not transfers.loads
    assert not served.manager.is_loading("c")  # its step waits for no more than that
    assert sorted(loaded_by(served.step({"b": 1, "c": 1}))) == sorted(
        served.manager.block_ids("c")[0][:4]
    )
    assert served.step({"b": 1, "c": 1}) is None


def test_a_step_that_needs_loads_has_them() -> None:
    for work in ({"c": 1}, {"b": 1, "c": 1}, {"b": 1, "d": 1}, {}):
        served = beside()
        served.start("c", prompt(1, 17))
        served.start("d", prompt(1, 17))  # shares the blocks that wait
        transfers = served.step(work)
        assert len(loaded_by(transfers)) == 4 and transfers is not None and not transfers.lookahead
    served = hybrid()
    served.start("d", prompt(1, 18))
    served.manager.start("e")
    served.manager.grow({"d": 1})
    assert len(loaded_by(served.step({"e": 1}))) == 4  # the step copies the state


def test_loads_are_spread_over_steps() -> None:
    served = beside()
    assert served.manager._offload is not None
    served.manager._offload.lookahead_bytes = 1  # a chunk
    for number, name in ((1, "c"), (2, "d")):
        served.start(name, prompt(number, 17))
    waiting, counts = [], []
    while not waiting or waiting[-1]:
        transfers = served.step({"b": 1})
        assert transfers is not None and len(transfers.lookahead) == 1
        waiting.append([name for name in "bcd" if served.manager.is_loading(name)])
        counts.append(len(loaded_by(transfers)))
    assert waiting == [["c", "d"], ["d"], ["d"], []] and counts[0] == 0
    assert sum(counts) + len(loaded_by(served.step({"b": 1}))) == 8


@pytest.mark.parametrize("blocks", [0.5, 4, 4.5, 8])
def test_as_many_bytes_of_loads_are_ahead_as_a_step_hides(blocks: float) -> None:
    served = beside()
    offload = served.manager._offload
    assert offload is not None
    block = offload.pool.block_bytes.item(0)
    offload.lookahead_bytes = int(blocks * block)
    for number, name in ((1, "c"), (2, "d")):
        served.start(name, prompt(number, 17))
    transfers = served.step({"b": 1})
    sizes = [chunk.block_ids.size * block for chunk in (*offload._lookahead, *offload._later)]
    most = [at for at in range(1, 1 + len(sizes)) if sum(sizes[:at]) <= offload.lookahead_bytes]
    assert transfers is not None and len(transfers.lookahead) == max([1, *most]) and len(sizes) > 1


@pytest.mark.parametrize("order", ["decode_first", "prefill_first"])
def test_a_request_waits_for_its_loads_while_others_have_work(order) -> None:
    layers, tokens = {"a": FULL}, {n: list(prompt(n, 17)) for n in range(1, 7)}
    manager = BlockManager(plan_of(layers, 21, 32), max_requests=4, host_memory=host(100, layers))
    scheduler = Scheduler(manager, max_tokens=32, tokens=tokens, order=order)

    def step():
        schedule = scheduler.schedule()
        manager.step(scheduler.shape(), schedule.work, extra=schedule.token_ids)
        return schedule, manager.take_transfers()

    for name in [*range(1, 7)]:
        scheduler.add(name, 17)
        step()
        if name < 6:
            scheduler.finish(name)
            tokens.pop(name)
    tokens |= {"a": list(prompt(1, 17)), "b": list(prompt(2, 18))}
    scheduler.add("a", 17)  # 6 has computed all its tokens, so that "a" need not wait
    schedule, transfers = step()
    assert schedule.work == {"a": 1} and len(loaded_by(transfers)) == 4
    tokens["a"].append(0)
    scheduler.append({"a": 1})
    scheduler.add("b", 18)
    schedule, transfers = step()
    assert schedule.work == {"a": 1} and schedule.samples == {"a": 0} and not loaded_by(transfers)
    assert schedule.hits["b"].num_host_tokens == 16
    schedule, transfers = step()
    assert schedule.work == {"b": 2} and not schedule.hits and len(loaded_by(transfers)) == 4


# --- preempted requests -----------------------------------------------------------------

ALL = {"a": FULL, "w": WINDOW, "s": STATE}


def swapped(tokens, **options) -> Served:
    """Returns a manager that has parked a request of 18 tokens, whose blocks others took."""
    served = Served(ALL, 20, host(100, ALL, **options))
    served.manager.start("a", tokens)
    served.step({"a": 18})
    assert served.manager.swap_out("a")
    for number in range(2, 6):
        served.run(number, prompt(number, 32))
    return served


@pytest.mark.parametrize("tokens", [None, prompt(1, 18), prompt(1, 30)])
def test_a_parked_request_goes_on_after_its_last_token(tokens) -> None:
    served = swapped(tokens)
    assert served.manager.num_swapped_tokens("a") == 18
    hit = served.manager.swap_in("a")
    assert (hit.num_cached_tokens, hit.num_host_tokens) == (18, 18)
    assert hit.reasons == ("complete",) * 3
    assert hit.shared_blocks == (3, 2, 1)  # partial last blocks, and the newest state
    upload = served.manager.step(served.shape, {"a": 1})
    transfers = served.manager.take_transfers()
    assert transfers is not None and {chunk.group for chunk in transfers.loads} == {0, 1, 2}
    assert not upload.parts()["copy_sources"].size
    stats = served.manager.offload_stats()
    assert stats is not None and (stats.swapped_in_requests, stats.swapped_in_tokens) == (1, 18)
    served.manager.finish("a")
    served.manager.new_epoch()
    served.step({})
    stats = served.manager.offload_stats()
    assert stats is not None and stats.used_bytes == 0
    assert served.manager.block_use.evictable == 0


def test_a_request_that_goes_on_is_told_of_the_ends_that_are_still_to_come() -> None:
    served, ends = Served(ALL, 40, host(100, ALL)), [9, 18, 24]
    assert served.manager.start("a", prompt(1, 30), boundaries=ends).chunk_ends == (*ends, 29)
    for _ in range(2):
        served.step({"a": 9})
    assert served.manager.swap_out("a")
    assert served.manager.swap_in("a").chunk_ends == (24, 29)
    served.manager.fork("a", ["sample"])  # whose tokens go on as it likes
    served.step({"sample": 1})
    assert served.manager.swap_out("sample")
    assert served.manager.swap_in("sample").chunk_ends == ()


def test_a_parked_request_is_forgotten_where_it_cannot_go_on() -> None:
    served = swapped(None, min_tokens=19)
    assert served.manager.num_swapped_tokens("a") == 0  # computing 18 tokens is cheaper
    served = swapped(prompt(1, 18))
    served.manager.discard_swapped("a")
    # The state at its end was for it alone.
    assert served.manager.find_prefix(prompt(1, 30)).num_cached_tokens == 0
    for forget in (
        lambda manager: manager.new_epoch(),
        lambda manager: manager.reset(),
        lambda manager: manager.discard_swapped("a"),
        lambda manager: manager.start("a"),
        lambda manager: manager.import_blocks("a", 4),
    ):
        served = swapped(prompt(1, 18))
        forget(served.manager)
        assert served.manager.num_swapped_tokens("a") == 0
        served.manager.reset()
        with pytest.raises(ValueError, match="no swapped-out tokens"):
            served.manager.swap_in("a")


def test_a_refused_call_leaves_what_is_parked() -> None:
    manager = swapped(prompt(1, 18)).manager
    for name in "bcd":
        manager.import_blocks(name, 32)
        manager.take_transfers()
    for refused in (
        lambda: manager.import_blocks("a", 32),  # too few blocks are free
        lambda: manager.import_blocks("a", 33),
        lambda: manager.start("a", prompt(1, 33)),
        lambda: manager.start("a", prompt(1, 18), boundaries=[19]),
        lambda: manager.fork("b", ["a"], num_tokens=33),
        lambda: manager.fork("b", ["a", "b"]),
    ):
        with pytest.raises((ValueError, OutOfBlocksError)):
            refused()
    for name in "bcd":
        manager.finish(name)
    for name in "bcde":
        manager.start(name)
    with pytest.raises(ValueError, match="1 requests need rows, and 0 rows are free"):
        manager.swap_in("a")
    for name in "bcde":
        manager.finish(name)
    assert manager.num_swapped_tokens("a") == 18 and not manager.requests
    stats = manager.offload_stats()
    assert stats is not None and (stats.swapped_out_requests, stats.swapped_in_requests) == (1, 0)


def test_only_what_can_be_parked_is() -> None:
    served = Served(ALL, 30, host(100, ALL))
    served.manager.start("a")
    assert not served.manager.swap_out("a")  # it has computed nothing
    drafts = StateSpec(
        block_size=4, shapes=((32,),), dtypes=("f32",), cache_mode="none", speculative_blocks=2
    )
    served = Served({"a": FULL, "s": drafts}, 30, host(100, ALL))
    served.manager.start("a")
    served.step({"a": 8})
    served.step({"a": 3})  # a token and its drafts, of which one is accepted
    served.manager.rewind({"a": 10})
    assert not served.manager.swap_out("a")
    with pytest.raises(ValueError, match="host_memory"):
        served = Served(ALL, 30, None)
        served.manager.start("a")
        served.manager.swap_out("a")


def test_a_request_that_is_resumed_brings_no_more_states_than_are_kept() -> None:
    layers = {"a": FULL, "s": STATE}
    served = Served(layers, 20, host(100, layers), checkpoint_share=0.16)
    served.start("a", prompt(1, 17))
    served.step({"a": 16})  # its state is kept, and it goes on from there
    assert served.manager.swap_out("a")
    for number in range(2, 6):
        served.run(number, prompt(number, 32))
    kept = served.manager.prefix_stats().checkpoint_blocks
    assert served.manager.swap_in("a").num_host_tokens == 16
    assert 0 < served.manager.prefix_stats().checkpoint_blocks <= kept == 3


def test_prefixes_do_not_push_parked_requests_out_of_host_memory() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(6, layers))
    served.manager.start("a", prompt(1, 17))
    served.step({"a": 17})
    assert served.manager.swap_out("a")
    for number in range(2, 8):
        served.run(number, prompt(number, 32))
    stats = served.manager.offload_stats()
    assert stats is not None and stats.evicted_blocks and stats.used_bytes == stats.num_bytes
    assert served.manager.swap_in("a").num_host_tokens == 17


@pytest.mark.parametrize("layers", [{"a": FULL}, {"a": FULL, "s": STATE}], ids=len)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_scheduler_computes_no_token_of_a_preempted_request_twice(layers, has_tokens) -> None:
    tokens = {name: list(prompt(name, 12)) for name in range(4)}
    manager = BlockManager(plan_of(layers, 12, 32), max_requests=4, host_memory=host(100, layers))
    scheduler = Scheduler(
        manager, max_tokens=32, tokens=tokens if has_tokens else None, forks=4 * has_tokens
    )
    for name in tokens:
        scheduler.add(name, 12)
    num_computed = num_preempted = 0
    while scheduler.has_work:
        schedule = scheduler.schedule()
        manager.step(scheduler.shape(extra=0), schedule.work)
        manager.take_transfers()
        num_computed += sum(schedule.work.values())
        num_preempted += len(schedule.preempted)
        for name in schedule.samples:
            tokens[name].append(7 * name)
            if len(tokens[name]) < 32:
                scheduler.append({name: 1})
            else:
                scheduler.finish(name)
    assert num_preempted and num_computed == 4 * 31


@pytest.mark.parametrize("size", [7, 11])
def test_a_preempted_request_goes_on_once_its_blocks_are_free(size: int) -> None:
    seen: set[bool] = set()
    for other in range(2, 27, 3):
        sizes = {"other": other, "older": 9, "younger": size}
        tokens = {name: prompt(i, n).tolist() for i, (name, n) in enumerate(sizes.items())}
        plan = plan_of({"a": FULL}, 99, 40)
        least = sum(plan.admission_blocks(n + 1) for n in sizes.values())
        plan = plan_of({"a": FULL}, 1 + max(least, 10), 40)
        manager = BlockManager(plan, max_requests=3, host_memory=host(100, {"a": FULL}))
        scheduler = Scheduler(manager, max_tokens=64, tokens=tokens)
        for name, count in sizes.items():
            scheduler.add(name, count)
        while not (schedule := scheduler.schedule()).preempted:
            manager.step(scheduler.shape(extra=0), schedule.work)
            manager.take_transfers()
            tokens["older"].append(0)
            scheduler.append({"older": 1})
        manager.step(scheduler.shape(extra=0), schedule.work)
        manager.take_transfers()
        tokens["younger"].append(0)
        scheduler.append({"younger": 1})
        scheduler.finish("other")
        fits = plan.admission_blocks(size + 2) <= manager.num_free_blocks
        schedule = scheduler.schedule()
        assert schedule.work == ({"younger": 1} if fits else {})
        assert [hit.num_cached_tokens for hit in schedule.hits.values()] == [size] * fits
        seen.add(fits)
    assert seen == {True, False}


def test_nothing_leaks() -> None:
    """Ten thousand requests in the long profile, which preempt each other."""
    count, draw, tokens = 10_000 if IS_LONG else 100, random.Random(5), {}
    plan = plan_of(ALL, 26, 32)
    manager = BlockManager(plan, max_requests=4, host_memory=host(20, ALL), events=EventLog())
    scheduler = Scheduler(manager, max_tokens=64, tokens=tokens, forks=4)
    shape, arrived, preempted = scheduler.shape(), 0, 0
    while arrived < count or scheduler.has_work:
        while arrived < count and len(tokens) < 6:
            tokens[arrived] = list(prompt(draw.randint(1, 5), draw.randint(1, 24)))
            scheduler.add(arrived, len(tokens[arrived]))
            arrived += 1
        schedule = scheduler.schedule()
        preempted += len(schedule.preempted)
        manager.step(shape, schedule.work, extra=schedule.token_ids)
        manager.take_transfers()
        for name in schedule.samples:
            tokens[name].append(draw.randint(0, 2))
            if len(tokens[name]) < 32 and draw.random() < 0.95:
                scheduler.append({name: 1})
            else:
                scheduler.finish(name)
                del tokens[name]
    loads, tree = manager._prefixes.loads, manager._prefixes._tree
    stats, room = manager.offload_stats(), manager._offload.pool  # pyrefly: ignore
    assert stats is not None and preempted > count / 50, preempted
    assert stats.swapped_in_requests and stats.loaded_blocks and stats.evicted_blocks
    assert not loads.swapped and not tree.swapped and not manager.requests
    assert len(tree.prompts.nodes) < 4000 and len(room._members) <= room.num_ids
    named = manager._prefixes.events  # pyrefly: ignore
    names = set(named._names.values())
    assert named._counts.keys() == names and {name[0] for name in names} == {"GPU", "CPU"}
    assert named._places.keys() == {name[1:] for name in names if name[0] == "GPU"}
    manager.new_epoch()
    manager.step(shape, {})
    transfers = manager.take_transfers()
    assert transfers is not None and not (room._sizes or room._members or room._unflushed)
    assert not room.num_used_ids and not room.used_bytes
    assert manager.block_use.uncached == plan.num_blocks - 1 and not tree._of_block


def test_events_say_which_blocks_host_memory_holds() -> None:
    log, layers = EventLog(), {"a": FULL}
    served = Served(layers, 9, host(8, layers), events=log)
    served.run("a", prompt(1, 17))
    served.run("b", prompt(2, 32))
    first = log.take()
    assert first is not None
    (stored,) = [e for e in first.events if isinstance(e, BlocksStored) and e.medium == "CPU"]
    known = [e for e in first.events if isinstance(e, BlocksStored) and e.medium == "GPU"]
    assert stored == dataclasses.replace(known[0], medium="CPU") and encode_events(first)
    for number in range(3, 6):
        served.run(number, prompt(number, 32))
    later = log.take()
    assert later is not None
    gone = [e for e in later.events if isinstance(e, BlocksRemoved) and e.medium == "CPU"]
    assert set(stored.block_keys) <= {key for event in gone for key in event.block_keys}


def stored_by(transfers: list[Transfers]) -> list[int]:
    return [i for each in transfers for chunk in each.stores for i in chunk.block_ids.tolist()]


def test_blocks_that_are_to_be_stored_keep_their_room() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(4, layers))
    served.run("a", prompt(1, 32))
    served.start("b", prompt(2, 32))
    for count in (16, 32):  # each takes four blocks, and no step comes between
        served.manager.grow({"b": count})
        stats = served.manager.offload_stats()
        assert stats is not None and stats.used_bytes == stats.num_bytes
    assert stats.skipped_blocks == 4


def test_blocks_that_left_the_window_are_not_stored() -> None:
    layers = {"a": FULL, "w": WINDOW}
    served = Served(layers, 20, host(100, layers))
    served.run("a", prompt(1, 32))
    for number in range(2, 6):
        served.run(number, prompt(number, 32))
    stored = Counter[int]()
    for chunk in (chunk for transfers in served.transfers for chunk in transfers.stores):
        stored[chunk.group] += chunk.block_ids.size
    assert 0 < stored[1] < stored[0]
    hit = served.start("b", prompt(1, 32))
    assert (hit.num_cached_tokens, hit.num_host_tokens) == (28, 28)
    assert hit.shared_blocks == (7, 2)  # those of positions 23 to 27, and no others


@pytest.mark.parametrize("blocks", [1, 5, 12.5])
def test_host_memory_holds_as_many_blocks_as_it_has_bytes_for(monkeypatch, blocks: float) -> None:
    monkeypatch.setattr(_host_pool, "CHUNK_SIZES", (1,))  # larger chunks leave as a whole
    layers = {"a": FULL}
    served = Served(layers, 9, host(blocks, layers))
    used = []
    for number in range(20):
        served.run(number, prompt(number, 8))
        stats = served.manager.offload_stats()
        assert stats is not None and stats.used_bytes <= stats.num_bytes
        used.append(stats.used_bytes)
    size = served.plan.layouts[0].bytes_per_block
    assert used[-1] == int(blocks) * size and used == sorted(used)


def test_a_block_of_a_group_with_fewer_layers_takes_fewer_bytes() -> None:
    layers = {name: FULL for name in "abc"} | {name: WINDOW for name in "vw"}
    plan = plan_of(layers, 60, 32)
    layout = plan.layouts[0]
    each = [layout.group_bytes(group) for group in range(len(plan.groups))]
    assert [len(group.layers) for group in plan.groups] == [2, 1, 2]
    assert each == [layout.bytes_per_block, layout.bytes_per_block // 2, layout.bytes_per_block]
    served = Served(layers, 60, HostMemory(num_bytes=1000 * layout.bytes_per_block, min_tokens=1))
    for number in range(8):
        served.run(number, prompt(number, 32))
    stats, stored = served.manager.offload_stats(), Counter[int]()
    for chunk in (chunk for transfers in served.transfers for chunk in transfers.stores):
        stored[chunk.group] += chunk.block_ids.size
    assert stored[0] and stored[1] and stored[2]
    assert stats is not None
    assert stats.used_bytes == sum(each[group] * count for group, count in stored.items())
    Served(layers, 60, HostMemory(num_bytes=min(each)))
    with pytest.raises(ValueError, match=f"the smallest has {min(each):,} bytes"):
        Served(layers, 60, HostMemory(num_bytes=min(each) - 1))


def test_bytes_of_a_chunk_stay_when_its_ids_are_those_of_another_group() -> None:
    room = HostBlockPool([128, 64], 1000, 10)

    def sealed(*groups: int) -> list[int]:
        ids = room.take(np.array(groups)).tolist()
        room.flush(dict.fromkeys(ids, 1), set())
        room.settle()
        return ids

    first, second = sealed(0, 0, 0, 0)[:2]
    room.release([first, second])
    room.settle()
    assert {*sealed(1, 1)} == {first, second}
    assert room.used_bytes == 4 * 128 + 2 * 64
    room.oldest(frozenset())
    assert room.used_bytes == 2 * 64


def test_a_block_of_a_chunk_may_be_loaded_more_than_once() -> None:
    room = HostBlockPool([64], 1000, 10)
    ids = room.take(np.zeros(4, np.int64)).tolist()
    room.flush(dict.fromkeys(ids, 1), set())
    chunks = room.loads({1: ids[0], 2: ids[2], 3: ids[0], 4: ids[0], 5: ids[2]})
    loaded = [chunk.block_ids.tolist() for chunk in chunks]
    assert loaded == [[1, -1, 2, -1], [3, -1, 5, -1], [4, -1, -1, -1]]


def test_moves_that_nobody_took_stop_the_next_step() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(100, layers))
    served.run("a", prompt(1, 32))
    served.start("b", prompt(2, 32))
    served.manager.step(served.shape, {"b": 32})
    for refused in (
        lambda: served.manager.step(served.shape, {}),
        lambda: served.manager.import_blocks("c", 4),
    ):
        with pytest.raises(RuntimeError, match="take_transfers"):
            refused()
    assert served.manager.take_transfers() is not None
    assert served.manager.take_transfers() is None
    served.manager.step(served.shape, {})


def test_a_new_epoch_empties_host_memory() -> None:
    layers = {"a": FULL}
    served = Served(layers, 9, host(100, layers))
    served.run("a", prompt(1, 32))
    served.run("b", prompt(2, 32))
    served.manager.new_epoch()
    hit = served.start("c", prompt(1, 32))
    assert hit.num_cached_tokens == 0 and hit.reasons == ("other_epoch",)
    transfers, stats = served.step({"c": 1}), served.manager.offload_stats()
    assert transfers is not None and len(transfers.dropped) == len(served.transfers[0].stores)
    assert stats is not None and stats.used_bytes == 0


@pytest.mark.parametrize(
    ("layers", "num_bytes", "message"),
    [
        ({"a": FULL}, 63, "num_bytes=63 holds no block; .* 64 bytes"),
        ({"a": FULL}, 2**80, "more blocks than int32 counts; give it at most"),
        ({"a": FULL, "b": CROSS}, 999, "a plan that stores encoder tokens keeps no blocks"),
    ],
)
def test_host_memory_that_does_not_suit_the_plan_is_refused(layers, num_bytes, message) -> None:
    plan = plan_of(layers, 99, 32, limits=Limits(max_encoder_tokens=4))
    with pytest.raises(ValueError, match=message):
        BlockManager(plan, max_requests=1, host_memory=HostMemory(num_bytes=num_bytes))
