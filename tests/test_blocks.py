"""Tests of block pool, block manager and uploads; `tests/test_simulation.py` draws their calls."""

import dataclasses
import itertools
import pickle
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.blocks import BlockManager, BlockPool, OutOfBlocksError
from jaxkv._src.internal.id_queue import IdQueue
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import StepShape, TableEntry
from tests.helpers import hybrid_plan
from tests.layer_examples import Layers
from tests.simulation.traffic import Watched

KV = {"num_kv_heads": 1, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, **KV)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, **KV)


def small_plan(layers: Layers | list[Layers], num_blocks: int = 24, **options) -> Plan:
    options = {"max_model_len": 30, "limits": Limits(max_in_flight_tokens=9)} | options
    memory = [2**30] * len(layers) if isinstance(layers, list) else 2**30
    return plan_cache(layers, memory, num_blocks_override=num_blocks, **options)


def shape_of(plan: Plan, max_requests: int = 4, **options) -> StepShape:
    options = {"max_tokens": 40} | options
    return StepShape.for_plan(plan, max_requests=max_requests, **options)


# --- pool -----------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=60
    )
)
def test_the_pool_matches_a_free_list_with_reference_counts(calls) -> None:
    pool, free, held = BlockPool(8), deque(range(1, 8)), Counter()
    for call, size in calls:
        ids = np.array([*itertools.islice(held.elements(), size)], np.int32)
        if call == "allocate" and size > len(free):
            with pytest.raises(OutOfBlocksError):
                pool.allocate(size)
        elif call == "allocate":
            got = pool.allocate(size).tolist()
            assert got == [free.popleft() for _ in range(size)]
            held.update(got)
        elif call == "share":
            pool.hold(np.unique(ids))
            held.update(set(ids.tolist()))
        else:
            pool.release(ids)
            for block_id in ids.tolist():
                held[block_id] -= 1
                if not held[block_id]:
                    free.append(block_id)
        assert pool.num_free_blocks == len(free)
        assert pool.references_of(np.arange(8)).tolist() == [held[i] for i in range(8)]


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 7))))
def test_the_block_queue_matches_a_list(calls) -> None:
    queue, listed, popped = IdQueue(8), [], []
    for call, size in [("push", 7), *calls]:
        if call == "push":
            ids = [i for i in range(7, 0, -1) if i not in listed][:size]
            queue.push(np.array(ids, np.int64))
            listed += ids
        elif call == "pop":
            size = min(size, len(listed))
            popped.append((queue.pop(size), listed[:size]))
            listed = listed[size:]
        else:
            asked = np.arange(1, 8)[size % 3 :: 2]
            is_there = [i in listed for i in asked]
            assert queue.contains(asked).tolist() == queue.remove(asked).tolist() == is_there
            listed = [i for i in listed if i not in asked]
        assert queue.size == len(listed)
    for turn in range(18):  # past the end of its array
        queue.push(queue.pop(min(queue.size, 1 + turn % 3)))
        if turn % 4 == 0:  # ids are elsewhere when they are looked up again
            assert queue.contains(np.arange(8)).tolist() == [i in listed for i in range(8)]
    assert all(ids.tolist() == wanted for ids, wanted in popped)


@pytest.mark.parametrize(("num_blocks", "spare"), [(257, 1), (600, 2), (20_001, 64)])
def test_few_kept_blocks_are_forgotten_at_once(num_blocks: int, spare: int) -> None:
    """As many as are taken, and some to spare, so that not each call forgets a few."""
    pool = BlockPool(num_blocks)
    ids = pool.allocate(num_blocks - 1)
    pool.has_cached, pool.read_only_until[ids] = True, 1
    pool.release(ids)
    pool.allocate(3)
    assert (pool.use.evictable, pool.use.uncached) == (num_blocks - 4 - spare, spare)


@pytest.mark.parametrize("num_blocks", [2, 8])
def test_out_of_blocks_errors_name_both_counts_and_can_be_pickled(num_blocks: int) -> None:
    pool, free = BlockPool(num_blocks), num_blocks - 1
    with pytest.raises(
        OutOfBlocksError, match=f"{num_blocks} blocks needed and {free} f"
    ) as caught:
        pool.allocate(num_blocks)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.needed_blocks, copy.free_blocks, str(copy)) == (
        num_blocks,
        free,
        str(caught.value),
    )
    assert pool.num_free_blocks == free


STATE = {"shapes": ((2,),), "dtypes": ("f32",)}


def held_logical_blocks(manager: BlockManager, name: object) -> list[set[int]]:
    return [{c for c, i in enumerate(ids) if i} for ids in manager.block_ids(name)]


# --- steps ----------------------------------------------------------------------------


class unchanged:
    """Asserts that the state of a manager and its pending upload do not change."""

    def __init__(self, manager: BlockManager):
        self.manager = manager

    def state(self) -> object:
        manager = self.manager
        manager.block_pool.references_of(np.array([1]))  # lets the queues note where ids are
        parts = manager._state.__dict__, manager.block_pool.__dict__
        return pickle.dumps((parts, dict(manager.requests), manager.num_uploads))

    def __enter__(self) -> None:
        self.before = self.state()

    def __exit__(self, *_) -> None:
        assert self.state() == self.before


def running(plan: Plan | None = None, tokens: int = 8) -> tuple[BlockManager, StepShape]:
    """Returns a manager of four rows in which "r" has computed some tokens, and a shape."""
    plan = hybrid_plan() if plan is None else plan
    manager, shape = BlockManager(plan, max_requests=4), shape_of(plan)
    manager.start("r")
    manager.step(shape, {"r": tokens})
    return manager, shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_tokens": 8}, "max_tokens=9 and its shape has 8"),
        ({"max_query_len": 4}, "max_query_len=8 and its shape has 4"),
        ({"max_seq_len": 12}, "max_seq_len=16 and its shape has 12"),
        ({"batch_size": 1}, "batch_size=2 and its shape has 1"),
        ({"extra": 1}, "extra=2 and its shape has 1"),
    ],
)
def test_a_shape_that_is_too_small_is_refused_and_nothing_is_lost(sizes, message) -> None:
    """The next step still carries the entries of an earlier `grow`."""
    manager, shape = running()
    manager.start("s")
    manager.grow({"r": 5})
    small = shape_of(hybrid_plan(), **({"max_tokens": 40} | sizes))
    with unchanged(manager), pytest.raises(ValueError, match=message):
        manager.step(small, {"r": 8, "s": 1}, extra=[1, 2])
    upload = manager.step(shape, {"r": 8, "s": 1})
    parts = shape.format.split(upload.data)
    written = parts["entry_ids"][: parts["entry_ends"][-1]].tolist()
    rows = [ids for name in ("r", "s") for ids in manager.block_ids(name)]
    assert set(written) <= {i for ids in rows for i in ids} and written


@pytest.mark.parametrize("room", ["block_ids", "zero_ids", "block_copies"])
def test_a_shape_without_room_for_the_changes_is_refused_by_name(room: str) -> None:
    manager, shape = running(tokens=6)
    manager.fork("r", ["s"])
    roomy = dataclasses.replace(shape, block_copies=8)
    with unchanged(manager), pytest.raises(ValueError, match=f"{room}="):
        manager.step(dataclasses.replace(roomy, **{room: 0}), {"r": 5, "s": 1})
    manager.step(roomy, {"r": 5, "s": 1})


def test_a_ring_without_a_buffer_of_the_right_size_changes_nothing() -> None:
    class ShortRing:
        def buffer(self, shape: StepShape) -> np.ndarray:
            return np.zeros(shape.format.size - 1, np.int32)

        def flush(self) -> np.ndarray:
            raise AssertionError("nothing was packed")

    manager, shape = running(small_plan({"a": FULL}, 12))
    with unchanged(manager), pytest.raises(ValueError, match="broadcast"):
        manager.step(shape, {"r": 5}, ring=ShortRing())
    manager.step(shape, {"r": 5})


def test_shapes_have_room_for_zeroing_only_if_the_plan_zeroes_blocks() -> None:
    assert shape_of(small_plan({"a": FULL})).zero_ids == 0
    assert shape_of(small_plan({"a": FULL}, zero_policy="always")).zero_ids > 0
    aligned = StateSpec(block_size=4, speculative_blocks=1, cache_mode="align", **STATE)
    some = small_plan([{"a": aligned, "b": WINDOW}, {"c": FULL}], 200)
    assert some.groups_to_zero.count(False) == 1
    most = [group.growth.most_new_blocks(4, 40, 9, 0, 1) for group in some.groups]
    zeroed = sum(n for n, zero in zip(most, some.groups_to_zero, strict=True) if zero)
    assert shape_of(some).zero_ids == zeroed < shape_of(some).block_ids == sum(most)


def test_sizes_that_are_left_out_are_those_of_the_plan() -> None:
    plan = hybrid_plan()
    longest, most = plan.max_model_len, plan.limits.max_in_flight_tokens
    assert 4 < most < longest
    for sizes, wanted in (
        ({}, {"max_seq_len": longest, "max_query_len": most}),
        ({"max_seq_len": longest + 1}, {"max_seq_len": longest, "max_query_len": most}),
        ({"max_seq_len": 4}, {"max_query_len": 4}),
        ({"max_tokens": 4}, {"max_query_len": 4}),
        ({"max_tokens": None, "tokens_per_request": 3}, {"max_query_len": 3}),
        ({"max_query_len": most + 1}, {"max_query_len": most}),
    ):
        shape = shape_of(plan, **sizes)
        assert {name: getattr(shape, name) for name in wanted} == wanted
    for sizes, cached in (
        ({}, 0),
        ({"forks": 1}, longest),
        ({"forks": 1, "max_seq_len": 12}, 12),
        ({"forks": 1, "max_seq_len": longest + 1}, longest),
    ):
        assert shape_of(plan, **sizes) == shape_of(plan, **sizes, cached_tokens=cached)


def test_a_step_has_as_many_requests_as_tokens_at_most_unless_told() -> None:
    plan = hybrid_plan()
    assert [shape_of(plan, max_tokens=count).batch_size for count in (2, 8)] == [2, 4]
    assert shape_of(plan, max_tokens=None, tokens_per_request=2).batch_size == 4
    assert shape_of(plan, max_tokens=2, batch_size=3).batch_size == 3


def test_uploads_have_no_integers_for_what_a_plan_or_a_shape_leaves_out() -> None:
    cross, limits = CrossAttentionSpec(block_size=4, **KV), Limits(max_encoder_tokens=4)
    plain, encoder = small_plan({"a": FULL}), small_plan({"a": cross}, limits=limits)
    for plan, options, wanted in (
        (plain, {}, (0, 0)),
        (plain, {"max_query_len": 1, "shared_prefixes": 2}, (0, 4)),
        (encoder, {}, (4, 0)),
    ):
        parts = shape_of(plan, **options).format.split(np.zeros(1000, np.int32))
        assert (parts["encoder_lens"].size, parts["prefix_members"].size) == wanted


def test_floats_and_zeros_are_refused_after_a_step_of_the_same_requests() -> None:
    manager, shape = running(small_plan({"a": FULL}), 1)
    manager.start("s")
    manager.step(shape, {"r": 1, "s": 1})
    for call in (lambda work: manager.step(shape, work), manager.grow):
        for odd in ((1, 1.0), (np.ones(2, int), np.ones(3, int))):
            with unchanged(manager), pytest.raises(TypeError, match=r"ints, got (1\.0|array)"):
                call(dict(zip("rs", odd, strict=True)))
        with unchanged(manager), pytest.raises(ValueError, match="request 's' computes 0 tokens"):
            call({"r": 1, "s": 0})


def test_every_upload_is_a_new_array_with_the_next_number() -> None:
    manager, shape = running()
    first, second = manager.step(shape, {"r": 1}), manager.step(shape, {})
    assert not np.shares_memory(first.data, second.data)
    idle = shape.idle()
    assert (first.data[0], second.data[0], idle.data[0]) == (2, 3, 0)
    idle.data[:] = 7  # is the caller's alone
    assert shape.idle().data[0] == 0


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_a_state_in_the_block_of_a_draft_is_not_forked(mode: str) -> None:
    """Forks share the running state, and only the caller knows which draft's state that is."""
    state = StateSpec(block_size=8, speculative_blocks=2, cache_mode=mode, **STATE)
    plan = small_plan({"s": state})
    manager, _ = running(plan, 4)  # more tokens than drafts: a prompt
    shape = shape_of(plan, 4, forks=4)
    manager.fork("r", ["prompt"])
    manager.step(shape, {"r": 2})
    with unchanged(manager), pytest.raises(ValueError, match="fork after a step of one token"):
        manager.fork("r", ["s"])
    manager.rewind({"r": 5})
    manager.fork("r", ["first"])
    manager.step(shape, {"first": 7})
    with unchanged(manager), pytest.raises(ValueError, match="no longer holds"):
        manager.rewind({"first": 11})  # the state after the last token but one of a chunk
    manager.finish("first")
    manager.fork("r", ["first"])
    manager.step(shape, {"r": 1})
    manager.fork("r", ["second"])
    with unchanged(manager), pytest.raises(ValueError, match="no longer holds"):
        manager.rewind({"second": 5})  # only the donor's newest state is shared
    assert manager.computed_tokens == {"r": 6, "prompt": 4, "first": 5, "second": 6}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("sizes", [(4,), (4, 16), (16, 4)])
def test_a_step_past_the_block_where_drafts_left_a_state_is_refused(sizes, count: int) -> None:
    aligned = StateSpec(block_size=4, speculative_blocks=2, cache_mode="align", **STATE)
    layers = {f"s{size}": dataclasses.replace(aligned, block_size=size) for size in sizes}
    manager, shape = running(small_plan(layers), 6)
    manager.step(shape, {"r": 3})
    manager.rewind({"r": 7})  # whose state is in the third block
    manager.start("s")
    for call in (lambda work: manager.step(shape, work), manager.grow):
        with (
            unchanged(manager),
            pytest.raises(ValueError, match=r"'r' computes 6 .* one token first"),
        ):
            call({"s": 1, "r": 6})
    manager.step(shape, {"r": count})
    manager.step(shape, {"r": 6})


def test_blocks_of_a_donor_that_ends_before_the_step_are_zeroed_for_its_fork() -> None:
    """A fork shares encoder blocks that the donor's next step was to zero."""
    layers = {
        "cross": CrossAttentionSpec(block_size=4, **KV),
        "s": StateSpec(block_size=4, **STATE),
    }
    limits = Limits(max_in_flight_tokens=8, max_encoder_tokens=8)
    plan = small_plan(layers, 40, limits=limits)
    manager = BlockManager(plan, max_requests=4)
    manager.start("r", encoder_tokens=8)
    manager.grow({"r": 3})
    manager.fork("r", ["s"])
    manager.finish("r")
    upload = manager.step(shape_of(plan, 4, forks=2), {"s": 1})
    held = [block_id for ids in manager.block_ids("s") for block_id in ids if block_id]
    assert sorted(upload.parts()["zero_ids"].tolist()) == sorted(held)


def test_cross_attention_is_told_the_number_of_encoder_tokens() -> None:
    """Left out, it would return zeros in silence."""
    limits = Limits(max_encoder_tokens=8)
    manager = BlockManager(
        small_plan({"a": FULL, "b": CrossAttentionSpec(block_size=4, **KV)}, limits=limits),
        max_requests=4,
    )
    scheduler = jaxkv.Scheduler(manager, max_tokens=4)
    with unchanged(manager), pytest.raises(ValueError, match="encoder_tokens is missing, and the"):
        manager.start("r")
    with pytest.raises(ValueError, match="encoder_tokens is missing, and the plan has cross"):
        scheduler.add("r", 3)
    assert not scheduler.has_work
    scheduler.add("r", 3, encoder_tokens=0)
    scheduler.schedule()
    manager.start("s", encoder_tokens=np.int32(8))
    manager.fork("s", ["t"])
    upload = manager.step(shape_of(manager.plan, 4, forks=4), {"r": 1, "s": 1, "t": 1})
    assert upload.parts()["encoder_lens"].tolist() == [0, 8, 8]


def test_a_step_that_is_shorter_than_its_grow_holds_its_own_states() -> None:
    """With cache_mode="align", `grow` takes blocks only for the states at the end of its chunk."""
    state = StateSpec(block_size=4, cache_mode="align", speculative_blocks=1, **STATE)
    plan = small_plan({"s": state}, 8, limits=Limits(max_in_flight_tokens=32))
    manager, shape = BlockManager(plan, max_requests=2), shape_of(plan, 2, max_query_len=32)
    for name in "ab":
        manager.start(name)
    manager.step(shape, {"a": 9})
    manager.grow({"a": 15})
    assert held_logical_blocks(manager, "a") == [{2, 5, 6}]
    manager.step(shape, {"b": 4})
    manager.step(shape, {"a": 3})
    assert held_logical_blocks(manager, "a") == [{2, 3}]
    ids = [{i for i in manager.block_ids(name)[0] if i} for name in "ab"]
    assert not ids[0] & ids[1]


def test_fifteen_of_sixteen_decode_steps_change_no_table() -> None:
    manager, shape = running(small_plan({"a": FullAttentionSpec(block_size=16, **KV)}, 20), 1)
    for _ in range(14):
        upload = manager.step(shape, {"r": 1})
        assert shape.format.split(upload.data)["entry_ends"].tolist() == [0]


# --- forks ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_free", range(4))
def test_a_request_overwrites_what_is_kept_if_no_block_is_left_for_a_copy(num_free: int) -> None:
    plan = small_plan({"a": FULL})
    manager, shape = Watched(plan, max_requests=1), shape_of(plan, 1, forks=1)
    manager.start("r", range(12))
    manager.step(shape, {"r": 8})
    manager.rewind({"r": 6})
    manager.block_pool.allocate(manager.num_free_blocks - num_free)
    if num_free < 2:
        with (
            unchanged(manager),
            pytest.raises(OutOfBlocksError, match=f"2 blocks needed and {num_free} free"),
        ):
            manager.step(shape, {"r": 9})
        return
    copies = manager.step(shape, {"r": 9}).parts()["copy_sources"].size
    left = manager.find_prefix(range(9)).num_cached_tokens
    assert (copies, left) == ((1, 8) if num_free == 3 else (0, 4))


def test_a_request_copies_no_block_of_which_a_later_one_shares_what_it_has_written() -> None:
    """It still holds the state that it began with, as the later one does."""
    layers = {
        "a": FullAttentionSpec(block_size=8, **KV),
        "s": StateSpec(block_size=4, cache_mode="align", **STATE),
    }
    plan = small_plan(layers)
    manager, shape = Watched(plan, max_requests=2, checkpoint_share=1.0), shape_of(plan, 2, forks=2)
    manager.start("first", range(9), boundaries=[4])
    manager.step(shape, {"first": 4})
    manager.finish("first")
    assert manager.start("r", range(9)).num_cached_tokens == 4
    manager.step(shape, {"r": 1})
    assert manager.start("later", range(9)).num_cached_tokens == 4
    assert manager.may_copy_by_row[manager.requests["later"]]
    assert not manager.step(shape, {"r": 3}).parts()["copy_sources"].size
    assert manager.step(shape, {"later": 1}).parts()["copy_sources"].size == 1


def test_a_request_that_goes_back_to_a_shared_state_says_that_it_may_copy_it() -> None:
    """The state lies in a longer block than the whole ones that were kept of the prompt since."""
    state = StateSpec(block_size=6, cache_mode="align", speculative_blocks=3, **STATE)
    plan = small_plan({"a": FULL, "s": state}, 60)
    manager, shape = Watched(plan, max_requests=2), shape_of(plan, 2, forks=2)
    manager.start("r", range(9))
    for count in (2, 1):
        manager.step(shape, {"r": count})
    manager.fork("r", ["s"])
    manager.step(shape, {"r": 4})
    manager.rewind({"r": 5})
    assert manager.may_copy_by_row.tolist() == [True, True]
    assert manager.step(shape, {"r": 1}).parts()["copy_destinations"].size == 1


def test_a_shape_has_room_for_the_copies_that_others_read_of_a_block_that_is_dropped() -> None:
    plan = small_plan({"s": StateSpec(block_size=4, cache_mode="align", **STATE)})
    manager, shape = running(plan, 3)
    manager.fork("r", ["s"])
    manager.grow({"r": 1})
    manager.fork("r", ["t"])  # reads the copy, too
    manager.rewind({"r": 0})
    without = dataclasses.replace(shape, block_copies=0)
    with unchanged(manager), pytest.raises(ValueError, match="block_copies=1"):
        manager.step(without, {"r": 5})
    parts = manager.step(dataclasses.replace(shape, block_copies=1), {"r": 5}).parts()
    assert parts["copy_destinations"].tolist() == [manager.block_ids("t")[0][0]]


def test_the_device_learns_of_a_copy_of_a_copy_with_the_upload_that_makes_both() -> None:
    manager, shape = running(small_plan({"a": FULL}), 3)
    shape = dataclasses.replace(shape, block_copies=2)
    manager.fork("r", ["s"])
    manager.start("u")
    manager.grow({"r": 1})
    manager.fork("r", ["t"])
    manager.grow({"t": 1})
    manager.step(shape, {"u": 1})
    for name in "rt":
        assert not manager.step(shape, {name: 1}).parts()["entry_ids"].size


@pytest.mark.parametrize("count", [8, 7, 4, 3, 0])
def test_a_rewind_to_where_a_copied_block_begins_leaves_no_copy(count: int) -> None:
    manager, shape = running(small_plan({"a": FULL}), 9)
    manager.fork("r", ["s"])
    manager.grow({"r": 1})  # copies the block of the last token
    manager.rewind({"r": count})
    shape = dataclasses.replace(shape, block_copies=int(count % 4 > 0))
    parts = manager.step(shape, {"r": 9}).parts()
    (own,), (shared,) = manager.block_ids("r"), manager.block_ids("s")
    at, num_copies = count // 4, int(count % 4 > 0)
    assert own[:at] == shared[:at]
    assert parts["copy_sources"].tolist() == list(shared[at : at + num_copies])
    assert parts["copy_destinations"].tolist() == list(own[at : at + num_copies])


@pytest.mark.parametrize(("rewound", "readers"), [("r", ""), ("rt", ""), ("r", "t")])
def test_a_rewind_before_the_block_that_grow_copies_leaves_the_copies_that_are_read(
    rewound: str, readers: str
) -> None:
    manager, shape = running(small_plan({"a": FULL}, zero_policy="always"), 9)
    manager.fork("r", ["s"])
    manager.grow({"r": 1})
    copies = {(manager.block_ids("s")[0][2], manager.block_ids("r")[0][2])}
    if "t" in readers + rewound:
        manager.fork("r", ["t"])
    manager.rewind(dict.fromkeys(rewound, 2))
    parts = manager.step(dataclasses.replace(shape, block_copies=2), {"r": 8}).parts()
    (own,), (shared,) = manager.block_ids("r"), manager.block_ids("s")
    made = zip(parts["copy_sources"].tolist(), parts["copy_destinations"].tolist(), strict=True)
    assert {*made} == {(shared[0], own[0])} | (copies if readers else set())
    assert sorted(parts["zero_ids"].tolist()) == sorted(own[1:])


# --- schedulers that assign block ids themselves --------------------------------------


SIZES = ("batch_size", "max_tokens", "max_query_len", "max_seq_len")
SIZES += ("extra", "block_ids", "zero_ids", "block_copies")


def padded(values: Sequence[int], size: int, fill: int) -> list[int]:
    return [*values, *[fill] * (size - len(values))]


def by_definition(
    shape: StepShape, given: dict[str, Any]
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The sizes of a step, and all parts of its upload."""
    cells: dict[tuple[int, int, int], int] = {}
    lengths: dict[int, list[int]] = {}
    groups, size = len(shape.growths), shape.batch_size
    for row, ids, starts in given["entries"]:
        starts = starts or [0] * groups
        lengths[row] = [start + len(new) for start, new in zip(starts, ids, strict=True)]
        cells |= {(g, row, starts[g] + i): n for g, of in enumerate(ids) for i, n in enumerate(of)}
    zeroed = list(itertools.chain(*given["zero_ids"]))
    copies = list(itertools.chain(*given["copies"]))
    new = given["num_new_tokens"]
    ends = list(itertools.accumulate(new, initial=0))
    totals = [a + b for a, b in zip(given["num_computed_tokens"], new, strict=True)]
    sizes = max(len(new), len(lengths)), sum(new), max(new, default=0), max(totals, default=0)
    sizes += len(given["extra"]), len(cells), len(zeroed), len(copies)

    def ends_of(lists: Sequence[Any]) -> list[int]:
        return list(itertools.accumulate(map(len, lists)))

    places = [list(column) for column in zip(*sorted(cells), strict=True)] or [[], [], []]
    parts = {
        "number": [0],
        "request_rows": padded(given["rows"], size, -1),
        "num_computed_tokens": padded(given["num_computed_tokens"], size, 0),
        "query_start_loc": padded(ends, size + 1, ends[-1]),
        "encoder_lens": padded(given["encoder_lens"], size, 0),
        "accepted_tokens": [],
        "prefix_members": [],
        "prefix_ends": [],
        "prefix_lens": [],
        "extra": padded(given["extra"], shape.extra, 0),
        "changed_rows": padded(list(lengths), size, -1),
        "row_lengths": padded(list(itertools.chain(*lengths.values())), size * groups, 0),
        "entry_rows": padded(places[1], shape.block_ids, -1),
        "entry_logical_blocks": padded(places[2], shape.block_ids, 0),
        "entry_ids": padded([cells[cell] for cell in sorted(cells)], shape.block_ids, 0),
        "entry_ends": [sum(group <= g for group, *_ in cells) for g in range(groups)],
        "zero_ids": padded(zeroed, shape.zero_ids, -1),
        "zero_ends": ends_of(given["zero_ids"]),
        "copy_sources": padded([source for source, _ in copies], shape.block_copies, -1),
        "copy_destinations": padded([into for _, into in copies], shape.block_copies, -1),
        "copy_ends": ends_of(given["copies"]),
    }
    return dict(zip(SIZES, sizes, strict=True)), parts


def test_an_upload_of_a_scheduler_has_what_it_gave_in_all_parts_or_is_refused() -> None:
    """By the first size that the shape has not; sizes of all kinds are just enough in others."""
    layers = {"a": FULL, "b": WINDOW, "c": CrossAttentionSpec(block_size=4, **KV)}
    limits = Limits(max_encoder_tokens=8)
    plan = plan_cache(layers, 2**20, max_model_len=32, limits=limits, grouping="packed")
    groups, room = len(plan.groups), dict(zip(SIZES, (3, 9, 5, 18, 2, 7, 4, 3), strict=True))
    shape = dataclasses.replace(StepShape.for_plan(plan, max_requests=5, max_tokens=9), **room)
    draw, seen = random.Random(0), Counter[tuple[str, int]]()

    def ids(count: int) -> list[int]:
        return [draw.randint(1, 30) for _ in range(draw.randint(0, count))]

    for _ in range(600):
        rows = draw.sample(range(5), draw.choice([0, 1, 2, 2, 3, 3, 4]))
        entries = []
        for _ in range(draw.choice([0, 1, 2, 2, 3, 4])):
            starts = draw.choice([None, [draw.randint(0, 2) for _ in range(groups)]])
            cells = [ids(2) for _ in range(groups)]
            entries.append(TableEntry(draw.randrange(5), cells, starts))
        given: dict[str, Any] = {
            "entries": entries,
            "rows": rows,
            "num_computed_tokens": [draw.choice([0, draw.randint(0, 15)]) for _ in rows],
            "num_new_tokens": [draw.choice([1, 2, 3, 3, 4, 5, 6]) for _ in rows],
            "zero_ids": [ids(2) for _ in range(groups)],
            "copies": [[(i, 40 + i) for i in ids(2)] for _ in range(groups)],
            "encoder_lens": draw.choice([[], [draw.randint(0, 8) for _ in rows]]),
            "extra": ids(3),
        }
        sizes, wanted = by_definition(shape, given)
        over = next((name for name in SIZES if sizes[name] > room[name]), None)
        if over:
            seen[over, sizes[over] - room[over]] += 1
            with pytest.raises(ValueError, match=f"^the step needs {over}={sizes[over]} and its"):
                jaxkv.pack_step(shape, **given)
            continue
        seen.update((name, 0) for name in SIZES if sizes[name] == room[name])
        upload = jaxkv.pack_step(shape, **given)
        parts = shape.format.split(np.asarray(upload.data))
        assert {name: part.reshape(-1).tolist() for name, part in parts.items()} == wanted
        changed = len({entry.row for entry in entries})
        used = dict.fromkeys(("request_rows", "num_computed_tokens", "encoder_lens"), len(rows))
        used |= {"query_start_loc": len(rows) + 1, "changed_rows": changed}
        used |= {"row_lengths": changed * groups}
        used |= dict.fromkeys(
            ("entry_rows", "entry_logical_blocks", "entry_ids"), sizes["block_ids"]
        )
        used |= {"zero_ids": sizes["zero_ids"]}
        used |= dict.fromkeys(("copy_sources", "copy_destinations"), sizes["block_copies"])
        without_padding = {name: part.reshape(-1).tolist() for name, part in upload.parts().items()}
        assert without_padding == {name: part[: used.get(name)] for name, part in wanted.items()}
    never = {(name, beyond) for name in SIZES for beyond in (0, 1)} - set(seen)
    assert not never


# --- bad input ------------------------------------------------------------------------

LARGER, OF_FEWER = shape_of(hybrid_plan(41)), shape_of(hybrid_plan(), 3)
BAD_CALLS = [
    ("num_blocks", lambda m, s: BlockPool(1)),
    ("count", lambda m, s: m.block_pool.allocate(-1)),
    ("request='r' is in use", lambda m, s: m.start("r")),
    ("encoder_tokens=1 is more", lambda m, s: m.start("s", encoder_tokens=1)),
    ("request='s' is not running", lambda m, s: m.step(s, {"s": 1})),
    ("request='s' is not running", lambda m, s: m.finish("s")),
    ("request='s' is not running", lambda m, s: m.block_ids("s")),
    ("request='s' is not running", lambda m, s: m.num_computed_tokens("s")),
    ("request 'r' computes 0 tokens", lambda m, s: m.step(s, {"r": 0})),
    ("request 'r' computes 9 tokens", lambda m, s: m.step(s, {"r": 9})),
    ("computes 2147483647 tokens", lambda m, s: m.step(s, {"r": 2**64})),
    ("computes -1 tokens", lambda m, s: m.step(s, {"r": -(2**64)})),
    ("read-only", lambda m, s: m.computed_by_row.fill(0)),
    ("read-only", lambda m, s: m.unsynced_tokens_by_row.fill(0)),
    ("checkpoint_share=1.01 must", lambda m, s: of_share(1.01)),
    ("boundaries=", lambda m, s: m.start("s", [1], boundaries=[0])),
    ("its num_blocks is 41 and the manager's 40", lambda m, s: m.step(LARGER, {"r": 1})),
    ("its max_requests is 3 and the manager's 4", lambda m, s: m.step(OF_FEWER, {"r": 1})),
    (
        "its context_parallel is 2 and the manager's 1",
        lambda m, s: m.step(dataclasses.replace(s, context_parallel=2), {"r": 1}),
    ),
    (
        "its groups take other blocks",
        lambda m, s: m.step(dataclasses.replace(s, growths=s.growths[::-1]), {"r": 1}),
    ),
    ("num_tokens=9 is more than the 8", lambda m, s: m.rewind({"r": 9})),
    ("num_tokens", lambda m, s: m.rewind({"r": -1})),
    ("not running", lambda m, s: m.rewind({"r": 3, "s": 1})),
    ("is in use", lambda m, s: m.fork("r", ["r"])),
    ("names a request twice", lambda m, s: m.fork("r", ["s", "s"])),
    ("4 requests need rows, and 3", lambda m, s: m.fork("r", list("abcd"))),
    ("num_tokens=9 is more than the 8", lambda m, s: m.fork("r", ["s"], num_tokens=9)),
    ("no longer holds the blocks", lambda m, s: m.fork("r", ["s"], num_tokens=3)),
    ("rows must be in", lambda m, s: foreign(s, rows=[4])),
    ("rows names a row twice", lambda m, s: foreign(s, rows=[1, 1])),
    ("differ in length", lambda m, s: foreign(s, rows=[1], num_new_tokens=[1, 1])),
    ("num_new_tokens must be at least 1", lambda m, s: foreign(s, rows=[1], num_new_tokens=[0])),
    ("num_computed_tokens must be", lambda m, s: foreign(s, rows=[1], num_computed_tokens=[-1])),
    ("not fit int32", lambda m, s: foreign(s, rows=[1], num_computed_tokens=[2**31])),
    ("row 0 has ids for 1 groups", lambda m, s: foreign(s, entries=[TableEntry(0, [[1]])])),
    ("row=4 is not in", lambda m, s: foreign(s, entries=[TableEntry(4, [[1]] * 5)])),
    ("row must be at least 0", lambda m, s: foreign(s, entries=[TableEntry(-1, [[1]] * 5)])),
    ("zero_ids has 1 groups", lambda m, s: foreign(s, zero_ids=[[1]])),
    ("copies must be pairs", lambda m, s: foreign(s, copies=[[1]] * 5)),
    ("copies has 1 groups", lambda m, s: foreign(s, copies=[[(1, 2)]])),
    ("encoder_lens has 2", lambda m, s: foreign(s, rows=[1], encoder_lens=[1, 2])),
]  # fmt: skip


def of_share(checkpoint_share: float) -> BlockManager:
    return BlockManager(hybrid_plan(), max_requests=1, checkpoint_share=checkpoint_share)


def foreign(shape: StepShape, rows=(), **changes):
    given = {"num_computed_tokens": [0] * len(rows), "num_new_tokens": [1] * len(rows)}
    return jaxkv.pack_step(shape, rows=rows, **(given | changes))


@pytest.mark.parametrize(("message", "call"), BAD_CALLS, ids=[name for name, _ in BAD_CALLS])
def test_bad_input_is_refused_by_name_and_changes_nothing(message, call) -> None:
    manager, shape = running(hybrid_plan())
    for _ in range(2):  # what was refused once is refused again
        with unchanged(manager), pytest.raises((ValueError, TypeError), match=message):
            call(manager, shape)


@pytest.mark.parametrize("odd", "abc")
def test_a_refused_call_names_the_request_at_fault_among_others(odd: str) -> None:
    manager = BlockManager(small_plan({"a": FULL, "b": WINDOW}, 60), max_requests=3)
    shape = shape_of(manager.plan, 3)
    with_ids = shape_of(manager.plan, 3, extra=40, token_ids=True)

    def refused(call: Callable, message: str) -> None:
        with unchanged(manager), pytest.raises(ValueError, match=message):
            call()

    for number, name in enumerate("abc"):
        manager.start(name, [number] * 9)
    ids = [number + (name == odd) for number, name in enumerate("abc") for _ in range(9)]
    work = dict.fromkeys("abc", 9)
    refused(
        lambda: manager.step(with_ids, work, extra=ids),
        f"other token ids for request '{odd}' than its prompt has from token 0 on",
    )
    manager.step(shape, work)
    for _ in range(2):
        manager.step(shape, {odd: 9})
    refused(lambda: manager.step(shape, work), f"request '{odd}' would have 36 tokens")
    refused(lambda: manager.grow(work), f"request '{odd}' would have 36 tokens")
    for count in (0, 10):
        wrong = dict.fromkeys("abc", 9) | {odd: count}
        refused(lambda: manager.step(shape, wrong), f"request '{odd}' computes {count} tokens")  # noqa: B023
    back = {name: manager.num_computed_tokens(name) for name in "abc"} | {odd: 9}
    refused(lambda: manager.rewind(back), f"9: request '{odd}' no longer holds a block of group 1")
    refused(lambda: manager.rewind(back | {odd: 28}), f"28 .* 27 tokens that '{odd}' has computed")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"batch_size": 5}, "batch_size=5 is more than max_requests=4"),
        ({"tokens_per_request": 3, "max_tokens": 13}, "max_tokens=13 must be batch_size"),
    ],
)
def test_a_shape_with_invalid_sizes_is_refused(sizes, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        StepShape.for_plan(hybrid_plan(), **({"max_requests": 4, "max_tokens": 8} | sizes))


def test_every_field_of_a_shape_is_an_int32() -> None:
    shape = shape_of(hybrid_plan(), batch_size=1, max_tokens=1)
    for name in {field.name for field in dataclasses.fields(shape)} - {"growths"}:
        is_flag = isinstance(getattr(shape, name), bool)
        for wrong in (1,) if is_flag else (-1, 2**31, "1", 1.0, True):
            with pytest.raises((ValueError, TypeError), match=f"^(max_tokens=1 .* )?{name}"):
                dataclasses.replace(shape, **{name: wrong})


def test_a_step_takes_no_more_blocks_than_the_pool_has() -> None:
    plan = hybrid_plan(num_blocks=24, zero_policy="always")
    shape = shape_of(plan, max_tokens=1000, forks=1000, cached_tokens=0)
    assert (shape.block_ids, shape.zero_ids, shape.block_copies) == (plan.usable_blocks,) * 3
    one = shape_of(plan, max_tokens=1, forks=1, cached_tokens=0)
    assert one.block_copies == len(plan.groups) < one.block_ids < plan.usable_blocks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_room_for_the_blocks_of_cached_tokens_and_hardly_more(ranks: int) -> None:
    """As many as any division of the tokens among the requests needs, in each group.

    At most as many as with another token for each request.
    """
    small, large = (
        FullAttentionSpec(block_size=size, **KV | {"head_size": 16 // size}) for size in (2, 4)
    )
    plan = small_plan({"a": small, "b": large}, context_parallel=ranks)
    assert [group.block_size for group in plan.groups] == [2, 4]

    def most(tokens: int, requests: int, size: int) -> int:
        if requests == 1:
            return -(-tokens // size)
        of_first = range(tokens + 1)
        return max(-(-n // size) + most(tokens - n, requests - 1, size) for n in of_first)

    for requests, tokens in itertools.product((1, 2, 3), (1, 3, 8, 16)):
        none, some = (shape_of(plan, batch_size=requests, cached_tokens=n) for n in (0, tokens))
        least, enough = (
            sum(most(count, requests, group.block_size * ranks) for group in plan.groups)
            for count in (tokens, tokens + min(tokens, requests))
        )
        assert least <= some.block_ids - none.block_ids <= enough, (requests, tokens)


def test_integers_of_a_step_that_are_traced_are_refused() -> None:
    shape = shape_of(hybrid_plan())
    for name in ("rows", "num_computed_tokens", "num_new_tokens", "encoder_lens", "extra"):
        with pytest.raises(TypeError, match=f"^{name} is a .*Tracer; it is traced"):
            jax.eval_shape(
                lambda ids, name=name: jaxkv.pack_step(shape, **{name: ids}), np.zeros(1, np.int32)
            )


@pytest.mark.parametrize("dtype", "int8 uint8 int16 uint16 int32 uint32 int64 uint64".split())
def test_integers_of_a_step_are_those_given_or_are_refused(dtype: str) -> None:
    """Whatever their type, none wraps."""
    shape, info = dataclasses.replace(shape_of(hybrid_plan()), extra=1), np.iinfo(dtype)
    limits = (end + by for end in (-(2**31), 0, 2**31) for by in (-1, 0, 1))
    for value in {info.min, info.max, *limits}:
        if not info.min <= value <= info.max:
            continue
        extra = np.array([value], dtype)
        if -(2**31) <= value < 2**31:
            assert jaxkv.pack_step(shape, extra=extra).parts()["extra"].tolist() == [value]
            continue
        for call in (
            lambda extra=extra: jaxkv.pack_step(shape, extra=extra),
            lambda extra=extra: jaxkv.pack_step(shape, extra=extra.tolist()),
        ):
            with pytest.raises(ValueError, match="extra holds a value that does not fit int32"):
                call()


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, -(2**70)])
def test_integers_that_no_array_holds_are_refused_by_name(value: int) -> None:
    shape = shape_of(small_plan({"a": FULL}))
    for extra in ([value], [value, -1], [np.int8(0), value]):
        with pytest.raises(ValueError, match="extra holds a value that does not fit int32"):
            jaxkv.pack_step(shape, extra=extra)
    with pytest.raises(TypeError, match="extra must be ints, got"):
        jaxkv.pack_step(shape, extra=[value, 0.5])
    for ids in ([], [1]) if value > 0 else ():
        with pytest.raises(ValueError, match=r"(entries|starts) holds a value that does not fit"):
            jaxkv.pack_step(shape, entries=[TableEntry(0, [ids], [value - len(ids)])])


def test_a_step_of_another_scheduler_fits_its_shape_or_is_refused() -> None:
    plan = hybrid_plan()
    groups, longest = len(plan.groups), plan.max_model_len
    shape = StepShape.for_plan(plan, max_requests=4, max_tokens=8, batch_size=2)
    step = {"rows": [0], "num_new_tokens": [2]}
    entries = [TableEntry(row, [[1]] * groups) for row in range(3)]
    with pytest.raises(ValueError, match="needs batch_size=3 and its shape has 2"):
        jaxkv.pack_step(shape, entries=entries, num_computed_tokens=[0], **step)
    with pytest.raises(ValueError, match=f"needs max_seq_len={longest + 1} and its shape has"):
        jaxkv.pack_step(shape, num_computed_tokens=[longest - 1], **step)
    for computed in (2**31 - 3, 2**31 - 2, 2**31 - 1):
        with pytest.raises(ValueError, match=f"needs max_seq_len={computed + 2} and its shape"):
            jaxkv.pack_step(shape, num_computed_tokens=[computed], **step)
    jaxkv.pack_step(shape, entries=entries[:2], num_computed_tokens=[longest - 2], **step)


def test_texts_count_what_they_name() -> None:
    plan = small_plan({"a": FULL}, 2000, zero_policy="always")
    manager, shape = BlockManager(plan, max_requests=5), shape_of(plan, 5, batch_size=3, forks=2)
    assert repr(shape.idle()).startswith("Upload(not numbered: 0 requests, 0 tokens, 0 table")
    manager.start("kept", [1] * 9)
    manager.step(shape, {"kept": 9})
    manager.reset_prefixes()
    manager.reset()  # the next number is negative, and the text has it without its sign
    manager.start("r", [1] * 9)
    first = manager.step(shape, {"r": 9})
    assert repr(first) == (
        "Upload(number 2: 1 requests, 9 tokens, 3 table entries, 3 blocks to zero, 0 to copy)"
    )
    manager.fork("r", ["s"])
    assert repr(manager.step(shape, {"r": 5, "s": 1})) == (
        "Upload(number 3: 2 requests, 6 tokens, 5 table entries, 1 blocks to zero, 1 to copy)"
    )
    manager.finish("r")
    assert repr(manager) == "BlockManager(1 of 5 rows taken, 1,996 of 1,999 blocks free)"
    manager.finish("s")
    assert manager.block_use.evictable == 2  # which are free, too
    assert repr(manager.block_pool) == "BlockPool(2,000 blocks, 1,999 free)"
    rectangle = shape_of(plan, 5, max_tokens=None, batch_size=3, tokens_per_request=4)
    for of, form in ((shape, "40 tokens"), (rectangle, "4 tokens each")):
        assert repr(dataclasses.replace(of, max_query_len=2)) == (
            f"StepShape(3 of 5 requests, {form}, up to 30 tokens a request, "
            f"{of.format.size:,} int32s)"
        )


@pytest.mark.parametrize("count", [1, 8, 9])
def test_a_table_of_requests_shows_the_first_eight(count: int) -> None:
    plan = small_plan({"a": FULL, "b": WINDOW}, 200)
    manager, shape = BlockManager(plan, max_requests=9), shape_of(plan, 9)
    for number in range(count):
        manager.start(f"r{number}")
        manager.step(shape, {f"r{number}": number + 1})
    manager.step(shape, {"r0": 8})
    shown = re.findall(r"<t[dh] [^>]*>([^<]*)<", manager._repr_html_())
    rows = [
        [name, row, manager.num_computed_tokens(name), *manager.allocated_blocks(name)]
        for name, row in [*manager.requests.items()][:8]
    ]
    header = ["request", "row", "computed tokens", "blocks of group 0", "blocks of group 1"]
    assert shown == [*header, *map(str, itertools.chain(*rows))]
    caption = repr(manager) + "; 8 of them shown" * (count > 8)
    assert f">{caption}</caption>" in manager._repr_html_()


def test_work_by_row_is_that_by_name_until_rows_change_hands_and_then_it_is_read_by_name() -> None:
    plan = plan_cache({"full": FULL}, 2**20, max_model_len=64)
    uploads: list[bytes] = []
    for by_row in (False, True):
        manager = BlockManager(plan, max_requests=4)
        shape = StepShape.for_plan(plan, max_requests=4, max_tokens=16)
        for name in ("a", (1, 2), np.int64(5)):
            manager.start(name)
        rows = np.array([manager.requests[name] for name in ((1, 2), "a")])
        work: Any = {(1, 2): 3, "a": 2}
        if by_row:
            assert manager.work_by_row(rows, np.array([3, 2])) == work
            work = manager.work_by_row(rows, np.array([3, 2]))
        manager.grow(work)
        uploads.append(manager.step(shape, work).data.tobytes())
        manager.finish(np.int64(5))
        manager.start("b")
        uploads.append(manager.step(shape, work).data.tobytes())
        manager.finish("a")
        with pytest.raises(ValueError, match="'a' is not running"):
            manager.step(shape, work)
    assert uploads[:2] == uploads[2:]


@pytest.mark.parametrize(
    ("rows", "counts", "error"),
    [
        ([0], np.array([1]), TypeError),
        (np.array([0.0]), np.array([1]), TypeError),
        (np.array([0]), np.array([1, 1]), TypeError),
        (np.array([0, 0]), np.array([1, 1]), ValueError),
        (np.array([1]), np.array([1]), ValueError),
        (np.array([9]), np.array([1]), ValueError),
        (np.array([-1]), np.array([1]), ValueError),
        (np.array([0]), np.array([0]), ValueError),
    ],
)
def test_work_of_rows_where_no_request_runs_is_refused(rows, counts, error) -> None:
    manager = BlockManager(plan_cache({"full": FULL}, 2**20, max_model_len=64), max_requests=2)
    manager.start("a")
    with pytest.raises(error):
        manager.work_by_row(rows, counts)
