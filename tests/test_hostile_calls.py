"""Random valid and invalid calls of block managers, and very long requests. No jax.

``JAXKV_HOSTILE_CALLS=100000`` sets the number of random calls.
"""

import gc
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from jaxkv._src.blocks import (
    BlockManager,
    OutOfBlocksError,
    PrefixHit,
    StepShape,
    TableEntry,
    Upload,
    pack_step,
)
from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import (
    CacheMode,
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    SlidingWindowSpec,
    StateSpec,
)

CALLS = int(os.environ.get("JAXKV_HOSTILE_CALLS", "1000"))
INT32_MAX = 2**31 - 1
KV = {"num_kv_heads": 1, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, **KV)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=6, **KV)


def state(mode: CacheMode, drafts: int = 0) -> StateSpec:
    shapes = {"shapes": ((2,),), "dtypes": ("f32",)}
    return StateSpec(block_size=4, cache_mode=mode, speculative_blocks=drafts, **shapes)


MODELS: dict[str, dict[str, LayerSpec]] = {
    "full": {"a": FULL},
    "windows": {
        "a": FULL,
        "b": WINDOW,
        "c": ChunkedAttentionSpec(block_size=2, chunk_size=7, **KV),
    },
    "states": {"a": FULL, "n": state("none", 1), "s": state("align", 2), "t": state("all")},
    "cross": {"a": FULL, "b": CrossAttentionSpec(block_size=4, **KV)},
}
ROWS, LONGEST = 4, 30
LIMITS = Limits(max_in_flight_tokens=9, max_encoder_tokens=9)
INVALID_COUNTS = [-1, 0.5, 2.0, None, "1", [1], float("nan"), 2**31, 2**63, 2**70, np.array([1, 2])]


class Fuzzer:
    """A manager that gets random calls, and one that gets only those that the first accepts."""

    def __init__(self, layers: dict[str, LayerSpec], seed: int):
        self.draw = random.Random(seed)
        options: dict[str, Any] = {"max_model_len": LONGEST, "limits": LIMITS}
        roomy = plan_cache(layers, 2**30, num_blocks_override=400, **options)
        blocks = roomy.admission_blocks(LONGEST) + roomy.reserved_blocks
        blocks = 1 + int(blocks * self.draw.choice([1, 1.5, 3]))
        self.plan = plan_cache(layers, 2**30, num_blocks_override=blocks, **options)
        self.manager = BlockManager(self.plan, max_requests=ROWS)
        self.accepted = BlockManager(self.plan, max_requests=ROWS)
        self.shapes = [
            StepShape.for_plan(
                self.plan,
                max_requests=ROWS,
                max_tokens=36,
                forks=forks,
                extra=extra,
                cached_tokens=LONGEST * ROWS,
            )
            for forks, extra in ((8, 2), (0, 0))
        ]
        self.shapes.append(StepShape.for_plan(self.plan, max_requests=ROWS, max_tokens=2))
        self.shapes.append(StepShape.for_plan(roomy, max_requests=ROWS, max_tokens=36))
        self.shapes.append(StepShape.for_plan(self.plan, max_requests=ROWS + 1, max_tokens=36))
        self.fresh = itertools.count()
        self.seen: Counter[str] = Counter()

    # --- arguments ----------------------------------------------------------------

    def name(self) -> Hashable:
        """Returns a running request or, sometimes, a name that is not running."""
        names = list(self.manager.requests)
        return self.draw.choice([*names * 8, "nobody", -1, None])

    def count(self, *good: int) -> Any:
        return self.draw.choice(good if self.draw.random() < 0.97 else INVALID_COUNTS)

    def work(self) -> Any:
        names = list(self.manager.requests)
        chosen = self.draw.sample(names, self.draw.randint(0, len(names)))
        counts = [self.count(1, 1, 2, self.draw.randint(1, 9)) for _ in chosen]
        kind = self.draw.random()
        if kind < 0.8:
            return dict(zip(chosen, counts, strict=True))
        if kind < 0.95:
            return {self.name(): self.count(1, 3) for _ in range(3)}
        return self.draw.choice([list(chosen), (chosen, counts), 7, "ab"])

    # --- calls --------------------------------------------------------------------

    def act(self) -> None:
        calls = ["start", "start", "fork", "finish", "rewind", "trim", "grow"]
        getattr(self, f"_{self.draw.choice([*calls, *['step'] * 8, 'pool', 'read'])}")()
        assert view(self.manager) == view(self.accepted)

    def call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Makes a call and, if it is accepted, repeats it with the second manager."""
        try:
            got = getattr(self.manager, method)(*arguments, **options)
        except (TypeError, ValueError, OutOfBlocksError) as error:
            self.seen[f"{method} refused"] += 1
            assert str(error)
            return
        self.seen[method] += 1
        wanted = getattr(self.accepted, method)(*arguments, **options)
        if isinstance(got, Upload):
            np.testing.assert_array_equal(got.data, wanted.data)
            return
        assert got == wanted
        self.seen["prefix found"] += isinstance(got, PrefixHit) and got.num_cached_tokens > 0

    def _start(self) -> None:
        name = self.draw.choice([next(self.fresh)] * 20 + [self.name(), ["list"], {1: 2}])
        options: dict[str, Any] = {"encoder_tokens": self.count(0, 3, 9)}
        if self.draw.random() < 0.8:
            options["tokens"] = self.tokens()
            options["salt"] = self.draw.choice([*[None] * 8, "x", 5])
            options["boundaries"] = self.draw.choice([(), [4]] * 9 + [[-1], [99], [0.5], 7])
            options["max_cached_tokens"] = self.draw.choice([*[None] * 8, self.count(0, 4, 7, 99)])
        self.call("start", name, **options)

    def tokens(self) -> Any:
        """Returns token ids of a prompt that begins like others or, sometimes, invalid ones."""
        length, same = self.draw.randint(5, LONGEST), self.draw.randint(5, 2 * LONGEST)
        tokens = [int(i >= same) for i in range(length)]
        bad = [[0.5], "ab", [[1]], [2**70], [-1], [None], [0] * (LONGEST + 1), 7, {1: 2}, [True]]
        return self.draw.choice(
            [tokens, np.array(tokens, np.int32)] if self.draw.random() < 0.9 else bad
        )

    def _fork(self) -> None:
        into: Any = [next(self.fresh) for _ in range(self.draw.randint(0, 2))]
        donor = self.name()
        into = self.draw.choice([into] * 6 + [[*into, *into], [donor], "ab", 3, [["list"]]])
        computed = self.manager.computed_tokens.get(donor, 3)
        some = self.draw.choice(
            [None, computed, computed, self.count(0, computed - 1, computed + 1)]
        )
        self.call("fork", donor, into, num_tokens=some)

    def _finish(self) -> None:
        self.call("finish", self.name(), self.draw.choice([None, self.tokens()]))

    def _rewind(self) -> None:
        name = self.name()
        computed = self.manager.computed_tokens.get(name, 3)
        count = self.count(computed, computed - 1, computed - 2, 0, computed + 1)
        both = {name: count, self.name(): self.count(1, computed)}
        self.call("rewind", self.draw.choice([{name: count}] * 3 + [both, name, [name]]))

    def _trim(self) -> None:
        self.call("trim", self.draw.choice([[], 5, [self.name()], [self.name(), self.name()]]))

    def _grow(self) -> None:
        self.call("grow", self.work())

    def _step(self) -> None:
        shape = self.draw.choice([*self.shapes, *self.shapes[:1] * 20, "shape"])
        extra = self.draw.choice([(), [1]] * 9 + [[1, 2, 3], [0.5], [2**31], [[1]]])
        self.call("step", shape, self.work(), extra=extra)

    def _pool(self) -> None:
        """Asks the pool for impossible numbers of blocks, which it refuses."""
        most = self.pool.num_free_blocks
        with pytest.raises((TypeError, ValueError, OutOfBlocksError)):
            count: Any = self.draw.choice([most + 1, -1, 0.5, None])
            self.pool.allocate(count)
        self.seen["pool refused"] += 1

    @property
    def pool(self):
        return self.manager.block_pool

    def _read(self) -> None:
        reads: list[tuple[Callable[..., Any], int]] = [
            (self.manager.block_ids, 1),
            (self.manager.num_computed_tokens, 1),
            (self.manager.held_blocks, 2),
        ]
        method, names = self.draw.choice(reads)
        self.call(method.__name__, *(self.name() for _ in range(names)))


def view(manager: BlockManager) -> object:
    """Returns all that a manager reports, and asserts that its counts are consistent."""
    rows = {name: manager.block_ids(name) for name in manager.requests}
    held: Counter[int] = Counter()
    for row in rows.values():
        ids = [i for group in row for i in group if i]
        assert len(set(ids)) == len(ids), "a row holds a block twice"
        held.update(ids)
    references = manager.block_pool.references_of(np.array([*held], np.int64))
    assert references.tolist() == list(held.values())
    assert manager.num_free_blocks + len(held) == manager.plan.usable_blocks
    computed = dict(manager.computed_tokens)
    return rows, dict(manager.requests), computed, manager.num_free_blocks, manager.num_uploads


@pytest.mark.parametrize("model", list(MODELS))
def test_refused_calls_change_nothing_and_accepted_calls_keep_counts_consistent(model: str) -> None:
    """One manager sees all calls, the other only the accepted ones, and both stay equal."""
    seen: Counter[str] = Counter()
    per_run = 100
    for seed in range(max(10, -(-CALLS // per_run // len(MODELS)))):
        fuzzer = Fuzzer(MODELS[model], seed)
        for _ in range(per_run):
            fuzzer.act()
        seen += fuzzer.seen
        for name in list(fuzzer.manager.requests):
            fuzzer.call("finish", name)
        assert fuzzer.manager.num_free_blocks == fuzzer.plan.usable_blocks
        assert len(set(fuzzer.pool.allocate(fuzzer.plan.usable_blocks).tolist())) == (
            fuzzer.plan.usable_blocks
        )
    methods = ("start", "fork", "finish", "rewind", "trim", "grow", "step")
    assert all(seen[method] and seen[f"{method} refused"] for method in methods), seen
    assert seen["prefix found"] or model == "cross"


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
            device[group][parts["entry_columns"][begin:end]] = parts["entry_ids"][begin:end]
        assert set(parts["entry_rows"].tolist()) == {row}
    held = manager.held_blocks("long")
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
