"""Faults that hostile tests once found, and what they tried: none may come back."""

import itertools
import random
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import (
    BlockManager,
    ChunkedAttentionSpec,
    FullAttentionSpec,
    Limits,
    MLASpec,
    OutOfBlocksError,
    SlidingWindowSpec,
    StateSpec,
    StepShape,
    TableEntry,
)
from jaxkv._src.cache import LOST_UPLOAD, REPEATED_UPLOAD
from jaxkv._src.planning import Plan
from tests.helpers import as_ids, hybrid_plan
from tests.layer_examples import plan_of

KV = {"num_kv_heads": 1, "head_size": 4}
FULL = FullAttentionSpec(block_size=4, **KV)
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=5, **KV)
INT32_MAX = 2**31 - 1
LIMITS = Limits(max_in_flight_tokens=8)


def state(mode: str, block_size: int = 4) -> StateSpec:
    return StateSpec(block_size=block_size, shapes=((2,),), dtypes=("f32",), cache_mode=mode)


def serving(layers, num_blocks: int = 40, requests: int = 3, forks: int = 0, **options):
    plan = plan_of(layers, num_blocks, 24, limits=LIMITS, **options)
    shape = StepShape.for_plan(plan, max_requests=requests, max_tokens=8, forks=forks)
    return plan, BlockManager(plan, max_requests=requests), shape


def free_ids(manager: BlockManager) -> list[int]:
    """The free blocks, each of them allocated once."""
    return manager.block_pool.allocate(manager.num_free_blocks).tolist()


# --- the books ------------------------------------------------------------------------


def test_blocks_of_a_request_that_is_named_twice_are_given_back_once() -> None:
    plan, manager, shape = serving({"a": WINDOW})
    manager.start("r")
    for count in (8, 8):
        manager.step(shape, {"r": count})
    manager.trim(["r", "r"])
    held = [i for i in manager.block_ids("r")[0] if i]
    assert sorted(free_ids(manager) + held) == list(range(1, plan.num_blocks))


def test_a_shared_state_that_a_rewound_fork_leaves_is_given_back() -> None:
    plan, manager, shape = serving({"s": state("align", 1)}, forks=2)
    manager.start("r")
    for _ in range(2):
        manager.step(shape, {"r": 1})
    manager.fork("r", ["s"])
    manager.rewind("s", 0)
    manager.step(shape, {"s": 1, "r": 1})
    for request in "rs":
        manager.finish(request)
    assert manager.num_free_blocks == plan.usable_blocks


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_numbers_of_numpy_count_tokens_as_ints_do(dtype: str) -> None:
    uploads = []
    for number in (int, np.dtype(dtype).type):
        _, manager, shape = serving({"a": FULL, "w": WINDOW})
        manager.start("r")
        uploads += [manager.step(shape, {"r": number(count)}).data for count in (5, 1, 8)]
    np.testing.assert_array_equal(uploads[:3], uploads[3:])


@pytest.mark.parametrize(
    "count", [True, 1.0, 2**70, 2**63, -1, None, "1", [1], np.array([1, 2]), float("nan")], ids=str
)
def test_what_counts_no_tokens_is_refused_and_changes_nothing(count) -> None:
    _, manager, shape = serving({"a": FULL, "w": WINDOW})
    manager.start("r")
    with pytest.raises((TypeError, ValueError), match="work"):
        manager.step(shape, {"r": count})
    assert manager.block_ids("r") == ((), ()) and manager.num_uploads == 0


def test_a_name_that_does_not_equal_itself_runs_like_any_other() -> None:
    plan, manager, shape = serving({"a": FULL})
    name = float("nan")
    manager.start(name)
    manager.step(shape, {name: 5})
    assert manager.num_computed_tokens(name) == 5
    with pytest.raises(ValueError, match="request=nan is not running"):
        manager.step(shape, {float("nan"): 1})
    manager.finish(name)
    assert manager.num_free_blocks == plan.usable_blocks


class Serving:
    """Random calls of a manager, and a device that knows only the uploads.

    Every token has a mark of its own, and a state is the mark of its last token. Blocks hold
    ``(group, mark)`` by offset, so that what a request finds tells who wrote it.
    """

    def __init__(self, plan: Plan, seed: int):
        self.plan, self.rng = plan, random.Random(seed)
        self.manager = BlockManager(plan, max_requests=4)
        self.growths = [group.growth for group in plan.groups]
        self.rows = [[{} for _ in range(4)] for _ in plan.groups]
        self.blocks: dict[int, dict] = defaultdict(dict)
        self.tokens: dict[int, list[int]] = {}
        self.names, self.marks = itertools.count(), itertools.count(1)
        self.seen: Counter[str] = Counter()
        room = {"block_ids": 400, "zero_ids": 400, "block_copies": 400, "row_copies": 400}
        self.shape = StepShape(
            growths=tuple(self.growths),
            num_blocks=plan.num_blocks,
            max_requests=4,
            batch_size=4,
            max_tokens=32,
            max_query_len=8,
            max_seq_len=24,
            **room,
        )

    def act(self) -> None:
        calls = [self.start] * 2 * (len(self.tokens) < 4)
        if self.tokens:
            calls += [self.step] * 8 + [self.grow, self.fork, self.rewind, self.swap, self.trim]
            calls += [self.finish]
        self.rng.choice(calls)()
        self.check_holders()

    def start(self) -> None:
        name = next(self.names)
        self.manager.start(name)
        self.tokens[name] = []

    def finish(self) -> None:
        name = self.rng.choice(list(self.tokens))
        self.manager.finish(name)
        del self.tokens[name]

    def swap(self) -> None:
        self.manager.swap_rows(self.rng.randrange(4), self.rng.randrange(4))

    def trim(self) -> None:
        self.manager.trim(self.rng.choices(list(self.tokens), k=2))

    def fork(self) -> None:
        donor, name = self.rng.choice(list(self.tokens)), next(self.names)
        count = len(self.tokens[donor]) - self.rng.choice([0, 0, 0, 1, 4])
        if len(self.tokens) < 4 and count >= 0 and self.accepts("fork", donor, [name], count):
            self.tokens[name] = self.tokens[donor][:count]

    def rewind(self) -> None:
        name = self.rng.choice(list(self.tokens))
        count = max(0, len(self.tokens[name]) - self.rng.choice([1, 1, 2, 4]))
        if self.accepts("rewind", name, count):
            del self.tokens[name][count:]

    def accepts(self, call: str, *arguments) -> bool:
        *others, count = arguments
        try:
            getattr(self.manager, call)(*others, num_tokens=count)
        except ValueError:
            return False
        self.seen[call] += 1
        return True

    def work(self) -> dict[int, int]:
        names = self.rng.sample(list(self.tokens), self.rng.randint(0, len(self.tokens)))
        room = {name: min(8, 24 - len(self.tokens[name])) for name in names}
        return {
            n: self.rng.choice([1, 1, self.rng.randint(1, most)])
            for n, most in room.items()
            if most
        }

    def grow(self) -> None:
        try:
            self.manager.grow(self.work())
        except OutOfBlocksError:
            self.seen["refused"] += 1

    def step(self) -> None:
        work = self.work()
        try:
            upload = self.manager.step(self.shape, work)
        except OutOfBlocksError:
            self.seen["refused"] += 1
            return
        self.apply(upload.parts())
        for name, count in work.items():
            self.check_states(name)
            self.tokens[name] += itertools.islice(self.marks, count)
        for name, count in work.items():
            self.write(name, count)
        for name, count in work.items():
            self.check_tokens(name, count)

    def apply(self, parts) -> None:
        """Does what the device does, in its order."""
        pairs = list(zip(parts["row_sources"], parts["row_destinations"], strict=True))
        ends = parts["entry_ends"].tolist()
        cells = zip(
            *(parts[f"entry_{x}"].tolist() for x in ("rows", "columns", "ids")), strict=True
        )
        for rows in self.rows:
            for (_, row), copied in zip(pairs, [dict(rows[a]) for a, _ in pairs], strict=True):
                rows[row] = copied
        for index, (row, column, block) in enumerate(cells):
            group = next(g for g, end in enumerate(ends) if index < end)
            self.rows[group][row][column] = block
        copies = list(zip(parts["copy_sources"], parts["copy_destinations"], strict=True))
        assert len({into for _, into in copies}) == len(copies), "two copies into one block"
        self.blocks |= {int(b): dict(self.blocks[int(a)]) for a, b in copies}
        self.blocks |= {block: {} for block in parts["zero_ids"].tolist()}
        self.seen["copied"] += len(copies)

    def block(self, name: int, group: int, column: int) -> dict:
        """The content of a block, as the device finds it and the manager says."""
        block = self.rows[group][self.manager.requests[name]].get(column, 0)
        assert block and self.manager.block_ids(name)[group][column] == block
        return self.blocks[block]

    def write(self, name: int, count: int) -> None:
        tokens = self.tokens[name]
        first, last = len(tokens) - count, len(tokens) - 1
        for group, growth in enumerate(self.growths):
            size, mode = growth.block_size, growth.cache_mode
            if growth.stores == "tokens":
                for position in range(first, last + 1):
                    content = self.block(name, group, position // size)
                    content[position % size] = group, tokens[position]
            elif mode == "all":
                for column in range(first // size, last // size + 1):
                    end = min((column + 1) * size, last + 1)
                    self.block(name, group, column)[0] = group, tokens[end - 1]
            else:
                self.block(name, group, 0 if mode == "none" else last // size)[0] = (
                    group,
                    tokens[last],
                )

    def check_states(self, name: int) -> None:
        tokens = self.tokens[name]
        for group, growth in enumerate(self.growths):
            if growth.stores == "state" and tokens:
                column = (len(tokens) - 1) // growth.block_size * (growth.cache_mode != "none")
                assert self.block(name, group, column)[0] == (group, tokens[-1])

    def check_tokens(self, name: int, count: int) -> None:
        tokens = self.tokens[name]
        for group, growth in enumerate(self.growths):
            if growth.stores == "tokens":
                oldest = int(growth.first_visible(len(tokens) - count))
                for position in range(oldest, len(tokens)):
                    column, offset = divmod(position, growth.block_size)
                    content = self.block(name, group, column)
                    assert content[offset] == (group, tokens[position])
                    if self.plan.groups_to_zero[group]:
                        assert {g for g, _ in content.values()} == {group}, "stale bytes"

    def check_holders(self) -> None:
        manager, holders = self.manager, Counter()
        for name in self.tokens:
            ids = [i for row in manager.block_ids(name) for i in row if i]
            assert len(set(ids)) == len(ids)
            holders.update(ids)
        assert all(manager.block_pool.references(i) == count for i, count in holders.items())
        assert manager.num_free_blocks + len(holders) == self.plan.usable_blocks


def test_requests_find_what_they_wrote_whatever_was_called_in_between() -> None:
    """Growth ahead of the steps, forks of forks, rewinds over shared blocks, swaps, trims."""
    chunked = ChunkedAttentionSpec(block_size=2, chunk_size=5, **KV)
    models = [
        {"a": FULL, "w": WINDOW, "c": chunked},
        {"n": state("none"), "a": FullAttentionSpec(block_size=8, **KV)},
        {"s": state("align", 1), "w": SlidingWindowSpec(block_size=1, sliding_window=3, **KV)},
        {"s": state("align"), "t": state("all", 2), "a": FULL},
    ]
    seen: Counter[str] = Counter()
    for seed, layers in itertools.product(range(25), models):
        needed = plan_of(layers, 200, 24, limits=LIMITS).admission_blocks(24)
        blocks = 1 + int(needed * random.Random(seed).choice([1, 1.5, 3]))
        run = Serving(plan_of(layers, blocks, 24, limits=LIMITS), seed)
        for _ in range(60):
            run.act()
        seen += run.seen
    assert all(seen[event] > 100 for event in ("fork", "rewind", "copied", "refused")), seen


# --- the device -----------------------------------------------------------------------


def test_a_fork_of_a_request_that_only_grew_has_its_tokens() -> None:
    """The copies of one upload happen at once: a copy of a copy is one of what was there."""
    plan, manager, shape = serving({"a": FULL}, forks=3)
    cache = jaxkv.make_cache(plan, max_requests=3)

    @jax.jit
    def write(cache, upload, value):
        cache, batch = jaxkv.apply_step(cache, upload)
        keys = jnp.full((8, 1, 4), value)
        cache = jaxkv.write_tokens(cache, "a", batch, keys, keys)
        return cache, jaxkv.read_rows(cache, "a", batch)[0, :, 0, 0]

    manager.start("r")
    cache, _ = write(cache, manager.step(shape, {"r": 6}), 1.0)
    manager.fork("r", ["s"])
    manager.grow({"s": 1})
    manager.fork("s", ["t"])
    cache, rows = write(cache, manager.step(shape, {"t": 1}), 2.0)
    assert rows[:7].tolist() == [1] * 6 + [2]
    cache, rows = write(cache, manager.step(shape, {"s": 1}), 3.0)
    assert rows[:7].tolist() == [1] * 6 + [3]
    jaxkv.check_errors(cache)


def test_numbers_of_uploads_begin_anew_after_the_last_of_int32() -> None:
    plan, manager, shape = serving({"a": FULL})
    manager.start("r")
    manager._steps.num_uploads = INT32_MAX - 2
    uploads = [manager.step(shape, {"r": 1}) for _ in range(4)]
    assert [int(upload.data[0]) for upload in uploads] == [INT32_MAX - 1, INT32_MAX, 1, 2]
    step = jax.jit(jaxkv.apply_step)
    cache = jaxkv.make_cache(plan, max_requests=3)
    for order, flag in (
        ((0, 1, 2, 3), 0),
        ((0, 1, 3), LOST_UPLOAD),
        ((0, 1, 2, 2), REPEATED_UPLOAD),
        ((0, 1, 1), LOST_UPLOAD),
    ):
        after = jax.tree.map(jnp.copy, cache)
        object.__setattr__(after, "status", as_ids([0, INT32_MAX - 2]))
        for index in order:
            after, _ = step(after, uploads[index])
        assert int(after.error_flags) == flag, order


def test_requests_may_be_as_long_as_int32_counts_and_no_longer() -> None:
    layers = {"w": SlidingWindowSpec(block_size=2**12, sliding_window=64, **KV)}
    plan = plan_of(layers, 20, INT32_MAX, limits=LIMITS)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=8)
    upload = jaxkv.pack_step(
        shape,
        entries=[TableEntry(0, [[7]], starts=[2**19 - 1])],
        rows=[0],
        num_computed_tokens=[INT32_MAX - 8],
        num_new_tokens=[8],
    )
    cache, batch = jax.jit(jaxkv.apply_step)(jaxkv.make_cache(plan, max_requests=1), upload)
    jaxkv.check_errors(cache)
    assert batch.positions.tolist() == list(range(INT32_MAX - 8, INT32_MAX))
    assert batch.first_positions("w").tolist() == [INT32_MAX + 1 - 2**12]
    offsets = range(2**12 - 9, 2**12 - 1)
    assert batch.slot_mapping("w").tolist() == [7 * 2**12 + offset for offset in offsets]
    for layer in (layers["w"], state("none")):
        with pytest.raises(ValueError, match="has positions beyond int32; set it to at most 2,147"):
            plan_of({"a": layer}, 20, INT32_MAX + 1, limits=LIMITS)


@pytest.mark.parametrize("layers", [{}, {"attention": FULL}], ids=["states only", "hybrid"])
def test_a_request_never_reads_a_state_that_it_did_not_write(layers) -> None:
    states = {mode: state(mode) for mode in ("none", "align", "all")}
    plan, manager, shape = serving(states | layers, num_blocks=20, requests=1)

    @jax.jit
    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        found = {mode: jaxkv.read_state(cache, mode, batch)[0][0] for mode in states}
        at = jnp.zeros(1, jnp.int32)
        there = {mode: jaxkv.read_state(cache, mode, batch, at=at)[0][0] for mode in states}
        for mode in states:
            cache = jaxkv.write_state(cache, mode, batch, [jnp.full((1, 2), 7.0)])
        return cache, found, there

    cache = jaxkv.make_cache(plan, max_requests=1)
    for request in range(12):  # until every block had an owner
        manager.start(request)
        for computed in (0, 3):
            cache, found, there = step(cache, manager.step(shape, {request: 3}))
            for read in (found,) if computed else (found, there):
                assert {mode: got.tolist() for mode, got in read.items()} == dict.fromkeys(
                    states, [7.0 * (computed > 0)] * 2
                )
        manager.finish(request)
    jaxkv.check_errors(cache)


def test_a_state_of_one_request_is_not_taken_for_those_of_all() -> None:
    plan, _, shape = serving({"s": state("none")})
    cache, batch = jax.jit(jaxkv.apply_step)(jaxkv.make_cache(plan, max_requests=3), shape.idle())
    for at, error, message in (
        (as_ids([0]), ValueError, r"at has shape \(1,\); wants \(3,\), one block per request"),
        (np.int32(0), ValueError, r"at has shape \(\)"),
        (np.array([2**32] * 3), TypeError, "at must be an array of int32, got int64"),
    ):
        with pytest.raises(error, match=message):
            jaxkv.read_state(cache, "s", batch, at=at)
        with pytest.raises(error, match=message):
            jaxkv.write_state(cache, "s", batch, [jnp.ones((3, 2))], at=at)


@pytest.mark.parametrize("sizes", [None, [2, 4]], ids=["blocks", "kernel blocks"])
def test_reads_are_of_the_request_whatever_the_blocks_of_its_kernel(sizes) -> None:
    """Readers take the batch: nobody can pass ids of one size where the other is wanted."""
    plan, manager, shape = serving({"a": FULL, "s": state("none")})
    for request in "rs":
        manager.start(request)

    @jax.jit
    def write(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        marks = batch.token_requests.astype(jnp.float32) + 1
        keys = jnp.broadcast_to(marks[:, None, None], (8, 1, 4))
        cache = jaxkv.write_tokens(cache, "a", batch, keys, -keys)
        return cache, jaxkv.read_tokens(cache, "a", batch)

    cache = jaxkv.make_cache(plan, max_requests=3, kernel_block_sizes=sizes)
    cache, (keys, values) = write(cache, manager.step(shape, {"r": 5, "s": 3}))
    for request, (count, mark) in enumerate([(5, 1.0), (3, 2.0)]):
        assert set(np.unique(keys[request, :count])) == {mark}
        assert set(np.unique(values[request, :count])) == {-mark}
        assert not keys[request, count:].any()
    jaxkv.check_errors(cache)


def test_every_function_of_a_step_runs_in_the_strictest_modes_of_jax() -> None:
    layers = {
        "full": FullAttentionSpec(block_size=1, dtype="fp8_e4m3", **KV),
        "latent": MLASpec(block_size=4, head_size=8),
        "state": state("align"),
    }
    plan, manager, shape = serving(layers, requests=1)
    queries = {"full": jnp.ones((8, 2, 4)), "latent": jnp.ones((8, 2, 8))}

    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        keys = queries["full"][:, :1]
        cache, one = jaxkv.attend(cache, "full", batch, queries["full"], keys, keys, soft_cap=9.0)
        rows = queries["latent"][:, 0]
        cache, two = jaxkv.attend(cache, "latent", batch, queries["latent"], rows)
        (found,) = jaxkv.read_state(cache, "state", batch)
        cache = jaxkv.write_state(cache, "state", batch, [found + 1])
        read = jaxkv.read_tokens(cache, "full", batch), jaxkv.read_rows(cache, "latent", batch)
        ints = batch.block_tables("full"), batch.slot_mapping("latent"), batch.last_tokens
        return cache, (one, two, found, *read), ints

    manager.start("r")
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        cache = jaxkv.make_cache(plan, max_requests=1, scales=(2.0, 0.5))
        step = jax.jit(step, donate_argnums=0)
        for count in (3, 1):
            cache, floats, ints = step(cache, manager.step(shape, {"r": count}))
        assert {array.dtype for array in jax.tree.leaves(ints)} == {jnp.dtype("int32")}
        assert all(jnp.isfinite(x.astype(jnp.float32)).all() for x in jax.tree.leaves(floats))
        np.testing.assert_allclose(floats[0][:1], 1.0)
        np.testing.assert_array_equal(floats[2], 1.0)
        jaxkv.check_errors(cache)


def test_one_row_one_token_a_step_and_blocks_of_one_token_are_enough() -> None:
    layers = {"a": FullAttentionSpec(block_size=1, **KV), "s": state("all", 1)}
    plan = plan_of(layers, 17, 8, limits=Limits(max_in_flight_tokens=1))
    manager = BlockManager(plan, max_requests=1)
    shape = StepShape.for_plan(plan, max_requests=1, max_tokens=1)
    cache, step = jaxkv.make_cache(plan, max_requests=1), jax.jit(jaxkv.apply_step)
    for request in range(3):
        manager.start(request)
        for position in range(8):
            cache, batch = step(cache, manager.step(shape, {request: 1}))
            assert batch.positions.tolist() == [position]
            assert manager.block_ids(request)[0][position] == batch.slot_mapping("a")[0]
        assert manager.num_free_blocks == 0
        with pytest.raises(
            ValueError, match="would have 9 tokens, more than the plan's max_model_"
        ):
            manager.step(shape, {request: 1})
        manager.finish(request)
    jaxkv.check_errors(cache)


def test_a_manager_of_ten_thousand_requests_gives_everything_back() -> None:
    plan = hybrid_plan(num_blocks=150_000)
    manager = BlockManager(plan, max_requests=10_000)
    shape = StepShape.for_plan(plan, max_requests=10_000, max_tokens=40_000)
    names = range(10_000)
    for name in names:
        manager.start(name)
    manager.step(shape, dict.fromkeys(names, 4))
    for _ in range(8):
        manager.step(shape, dict.fromkeys(names, 1))
    assert len({i for name in names for row in manager.block_ids(name) for i in row if i}) == sum(
        manager.held_blocks()
    )
    for name in names:
        manager.finish(name)
    assert manager.num_free_blocks == plan.usable_blocks
    assert len(set(free_ids(manager))) == plan.usable_blocks
