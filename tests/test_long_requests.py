"""Very long requests, ids up to int32, and steps that leak nothing. No jax."""

import gc
import itertools
import sys
from typing import Any

import numpy as np
import pytest

from jaxkv._src.blocks import BlockManager
from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import (
    CacheMode,
    FullAttentionSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import StepShape, TableEntry, pack_step

INT32_MAX = 2**31 - 1
KV = {"num_kv_heads": 1, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, **KV)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, **KV)


def state(mode: CacheMode, drafts: int = 0) -> StateSpec:
    shapes = {"shapes": ((2,),), "dtypes": ("f32",)}
    return StateSpec(block_size=4, cache_mode=mode, speculative_blocks=drafts, **shapes)


LONGEST = 30


# --- sizes ----------------------------------------------------------------------------


def test_a_request_of_a_million_tokens_holds_what_the_plan_says() -> None:
    """The row on the device is rebuilt from the uploads alone."""
    length, chunk = 2**20, 2**13
    layers = {
        "full": FullAttentionSpec(block_size=16, **KV),
        "window": SlidingWindowSpec(block_size=16, sliding_window=4096, **KV),
        "state": state("all"),
    }
    options: dict[str, Any] = {"limits": Limits(max_in_flight_tokens=chunk)}
    plan = plan_cache(layers, 2**40, max_model_len=length, num_blocks_override=2**19, **options)
    manager = BlockManager(plan, max_requests=2)
    shape = StepShape.for_plan(plan, max_requests=2, max_tokens=chunk)
    device = [np.zeros(width, np.int32) for width in plan.row_blocks]
    row = 0
    manager.start("long")
    for _ in range(length // chunk):
        parts = manager.step(shape, {"long": chunk}).parts()
        for group, (begin, end) in enumerate(itertools.pairwise([0, *parts["entry_ends"]])):
            device[group][parts["entry_logical_blocks"][begin:end]] = parts["entry_ids"][begin:end]
        assert set(parts["entry_rows"].tolist()) == {row}
    held = manager.allocated_blocks("long")
    assert all(n <= most for n, most in zip(held, plan.blocks_per_group(length), strict=True))
    for group, ids in enumerate(manager.block_ids("long")):
        known = np.array(ids)
        np.testing.assert_array_equal(device[group][: known.size][known > 0], known[known > 0])
    with pytest.raises(ValueError, match="more than the plan's max_model_len=1048576"):
        manager.step(shape, {"long": 1})
    manager.rewind({"long": length - 4})  # a state is kept at the end of a block
    manager.step(shape, {"long": 4})
    manager.finish("long")
    assert manager.num_free_blocks == plan.usable_blocks


def test_pack_step_accepts_ids_up_to_int32_and_rows_up_to_the_last() -> None:
    plan = plan_cache({"a": FULL}, 2**30, max_model_len=LONGEST, num_blocks_override=20)
    shape = StepShape.for_plan(plan, max_requests=3, max_tokens=8)
    row, step = 2, {"rows": [2], "num_computed_tokens": [0], "num_new_tokens": [5]}
    parts = pack_step(shape, entries=[TableEntry(row, [[INT32_MAX, 1]])], **step).parts()
    assert parts["entry_ids"].tolist() == [INT32_MAX, 1]
    assert parts["entry_rows"].tolist() == [row, row] and parts["row_lengths"].tolist() == [[2]]
    for entry, message in (
        (TableEntry(row, [[INT32_MAX + 1]]), "not fit int32"),
        (TableEntry(row, [[-INT32_MAX - 2]]), "not fit int32"),
        (TableEntry(row, [[1]], starts=[INT32_MAX + 1]), "not fit int32"),
        (TableEntry(row + 1, [[1]]), r"row=3 is not in 0\.\.2"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_step(shape, entries=[entry], **step)


def test_decode_steps_leak_no_objects() -> None:
    layers = {"full": FULL, "state": state("none")} | {f"window.{i}": WINDOW for i in range(3)}
    requests, warm, steps = 4, 1000, 10_000
    plan = plan_cache(layers, 2**40, max_model_len=warm + steps, num_blocks_override=2**15)
    manager = BlockManager(plan, max_requests=requests)
    shape = StepShape.for_plan(plan, max_requests=requests, max_tokens=requests)
    for name in range(requests):
        manager.start(name)
    work = dict.fromkeys(range(requests), 1)
    for _ in range(warm):
        manager.step(shape, work)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(steps):
        manager.step(shape, work)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100
