"""Host blocks against plain lists: one pool, then whole requests over several groups.

The model of the block manager is written from the definitions alone: which positions
a layer may still read decides which blocks must be held, one position at a time.
"""

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from jaxkv.blocks import (
    NULL_BLOCK,
    BlockManager,
    BlockPool,
    OutOfBlocksError,
)
from jaxkv.planning import Plan, plan_cache
from jaxkv.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv.testing import strategies

Held = dict[int, int]  # of one request and group: index into its row -> block id

MAX_LEN, ROWS = 36, 4
LIMITS = strategies.LIMITS
SPECS = strategies.layer_specs(windows=range(1, 14))
CHUNKS = st.integers(1, LIMITS.max_in_flight_tokens)


def plans(min_layers: int = 1, min_len: int = 1, max_spare: float = 0) -> st.SearchStrategy[Plan]:
    """Up to five layers of any kinds; blocks for a longest request, and some to spare."""
    layers = strategies.models(SPECS, min_layers=min_layers, max_kinds=5)
    lengths = range(min_len, MAX_LEN + 1)
    return strategies.plans(layers, lengths=lengths, max_spare=max_spare, limits=LIMITS)


# --- the pool ---------------------------------------------------------------------


def pool_state(pool: BlockPool) -> tuple[int, list[int], list[int]]:
    """All that a caller can see: free count, references, ids in the order they come."""
    references = [pool.references(i) for i in range(pool.num_blocks)]
    free = copy.deepcopy(pool).allocate(pool.num_free_blocks)
    return pool.num_free_blocks, references, free


ACTIONS = st.sampled_from(["allocate", "share", "free"])
ANY_IDS = st.lists(st.integers(-9, 9), max_size=4)


@given(st.integers(2, 8), st.data())
def test_the_pool_equals_a_list_of_free_ids_and_a_count_per_id(
    num_blocks: int, data: st.DataObject
) -> None:
    pool = BlockPool(num_blocks)
    free, count = list(range(1, num_blocks)), [0] * num_blocks
    for action in data.draw(st.lists(ACTIONS, min_size=5, max_size=30)):
        owned = [i for i, owners in enumerate(count) if owners] or [NULL_BLOCK]
        some_ids = st.lists(st.sampled_from(owned), max_size=3, unique=True) | ANY_IDS
        ids = data.draw(some_ids, label=action)
        before = pool_state(pool)
        ids = ids if action == "free" else list(dict.fromkeys(ids))
        uses = Counter(ids)
        held = all(0 < i < num_blocks and n <= count[i] for i, n in uses.items())
        if action == "allocate" and len(ids) > len(free):
            with pytest.raises(OutOfBlocksError) as error:
                pool.allocate(len(ids))
            asked = (error.value.needed_blocks, error.value.free_blocks)
            assert asked == (len(ids), len(free))
            assert pool_state(pool) == before
        elif action == "allocate":
            taken, free = free[: len(ids)], free[len(ids) :]
            assert pool.allocate(len(ids)) == taken
            for i in taken:
                count[i] = 1
        elif not held:
            with pytest.raises(ValueError, match="block_ids"):
                (pool.free if action == "free" else pool.share)(ids)
            assert pool_state(pool) == before
        elif action == "share":
            pool.share(ids)
            for i in ids:
                count[i] += 1
        else:
            pool.free(ids)
            for i in ids:
                count[i] -= 1
                free += [i] * (count[i] == 0)
        assert pool_state(pool) == (len(free), count, free)


def test_running_out_says_what_was_needed_and_free_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    before = pool_state(pool)
    with pytest.raises(OutOfBlocksError, match="3 blocks needed and 2 free") as error:
        pool.allocate(3)
    assert (error.value.needed_blocks, error.value.free_blocks) == (3, 2)
    assert pool_state(pool) == before


@pytest.mark.parametrize("operation", [BlockPool.free, BlockPool.share])
@pytest.mark.parametrize("bad", [[NULL_BLOCK], [3], [-1], [4], [99], [1, 3], [2, -3]])
def test_ids_that_are_not_held_are_refused_and_change_nothing(
    operation: Callable[[BlockPool, list[int]], None], bad: list[int]
) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    before = pool_state(pool)
    with pytest.raises(ValueError, match=r"block_ids .* in 1\.\.3"):
        operation(pool, bad)
    assert pool_state(pool) == before


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    before = pool_state(pool)
    with pytest.raises(ValueError, match="block_ids"):
        pool.free([second, first, first])
    assert pool_state(pool) == before
    pool.free([first])
    before = pool_state(pool)
    with pytest.raises(ValueError, match="block_ids"):
        pool.free([second, first])
    assert pool_state(pool) == before


def test_a_block_is_free_only_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.allocate(1)
    pool.share([block_id])
    pool.free([block_id])
    assert (pool.references(block_id), pool.num_free_blocks) == (1, 1)
    pool.free([block_id])
    assert (pool.references(block_id), pool.num_free_blocks) == (0, 2)
    with pytest.raises(ValueError, match="block_ids"):
        pool.free([block_id])


# --- what a request must hold, position by position -------------------------------


def sees(spec: LayerSpec, query: int, key: int) -> bool:
    """Whether the token at ``query`` may read the one at ``key``."""
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return query - spec.sliding_window < key <= query
    if isinstance(spec, ChunkedAttentionSpec):
        return key <= query and key // spec.chunk_size == query // spec.chunk_size
    return key <= query


def live_indices(spec: LayerSpec, computed: int, total: int, encoder_tokens: int) -> set[int]:
    """Blocks that computing tokens ``computed .. total - 1`` reads or writes."""
    size = spec.block_size
    if isinstance(spec, CrossAttentionSpec):
        return {key // size for key in range(encoder_tokens)}
    if not isinstance(spec, StateSpec):
        queries = range(computed, total)
        return {k // size for q in queries for k in range(total) if sees(spec, q, k)}
    if spec.cache_mode == "none":  # one running state, whatever the position
        return set(range(1 + spec.speculative_blocks))
    newest = (total - 1) // size
    live = {newest + i for i in range(1 + spec.speculative_blocks)}
    if spec.cache_mode == "all":
        return live | {position // size for position in range(total)}
    return live | {(computed - 1) // size for _ in range(computed > 0)}


def held_blocks(row: Sequence[int]) -> Held:
    return {i: block_id for i, block_id in enumerate(row) if block_id != NULL_BLOCK}


def reading(spec: LayerSpec) -> tuple[object, ...]:
    """Element types and geometry of a page, without what only decides its growth."""
    growth = {"block_size", "page_bytes_padded", "sliding_window", "chunk_size"}
    growth |= {"cache_mode", "speculative_blocks", "compress_ratio"}
    fields = dataclasses.asdict(spec)
    return tuple(sorted((k, str(v)) for k, v in fields.items() if k not in growth))


def groups_to_zero(plan: Plan) -> list[bool]:
    """Per group: does another group read one of its slots differently?"""
    specs = [dict(zip(g.layers, g.specs, strict=True)) for g in plan.groups]
    overlays = [
        (mine, other) for slot in plan.layout.slots for mine in slot.layers for other in slot.layers
    ]
    readings = {name: reading(spec) for group in specs for name, spec in group.items()}
    return [any(a in group and readings[a] != readings[b] for a, b in overlays) for group in specs]


def manager_state(manager: BlockManager) -> tuple[object, ...]:
    """All that a caller can see, including the update that it would take next."""
    requests = dict(manager.requests)
    rows = {request: manager.block_ids(request) for request in requests}
    update = copy.deepcopy(manager).take_update()
    return requests, rows, manager.held_blocks(), pool_state(manager.pool), update


# --- admission --------------------------------------------------------------------


@given(plans(), st.data())
def test_what_the_planner_admits_the_allocator_can_hold(plan: Plan, data: st.DataObject) -> None:
    manager = BlockManager(plan, max_requests=1)
    length, charged = plan.max_model_len, plan.blocks_per_group(plan.max_model_len)
    encoder_tokens = data.draw(st.integers(0, LIMITS.max_encoder_tokens))
    manager.start("r", encoder_tokens=encoder_tokens)
    computed = 0
    while computed < length:
        chunk = data.draw(CHUNKS, label="chunk")
        total = min(computed + chunk, length)
        manager.grow("r", computed, total)
        held = [len(held_blocks(row)) for row in manager.block_ids("r")]
        assert manager.held_blocks() == tuple(held)
        assert all(h <= most for h, most in zip(held, charged, strict=True))
        computed = total
    widths = [g.spec.row_blocks(length, LIMITS) for g in plan.groups]
    rows = manager.block_ids("r")
    assert all(len(row) <= width for row, width in zip(rows, widths, strict=True))


def test_admission_charges_no_more_than_a_request_of_full_attention_holds() -> None:
    plan = plan_cache({"kv": FULL}, 2**20, max_model_len=16, num_blocks_override=5)
    manager = BlockManager(plan, max_requests=2)
    manager.start("r")
    manager.grow("r", 0, 16)
    assert manager.held_blocks() == plan.blocks_per_group(16) == (4,)
    manager.start("s")
    before = manager_state(manager)
    with pytest.raises(OutOfBlocksError, match="1 blocks needed and 0 free"):
        manager.grow("s", 0, 1)
    assert manager_state(manager) == before


FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)


@given(plans(), st.data())
def test_rejected_drafts_keep_every_live_block_within_what_admission_charges(
    plan: Plan, data: st.DataObject
) -> None:
    """Speculative decoding: after the prompt, the cache moves on by fewer tokens than
    were computed. A step verifies fewer drafts than a block has tokens.
    """
    specs = [group.spec for group in plan.groups]
    states = [spec for spec in specs if isinstance(spec, StateSpec)]
    room = [min(s.speculative_blocks, s.block_size - 1) for s in states]
    most = min([*room, LIMITS.max_in_flight_tokens - 1])
    manager = BlockManager(plan, max_requests=1)
    manager.start("r")
    length, charged = plan.max_model_len, plan.blocks_per_group(plan.max_model_len)
    computed = min(data.draw(st.integers(1, most + 1), label="prompt"), length)
    manager.grow("r", 0, computed)
    while computed < length:
        drafted = data.draw(st.integers(0, most), label="drafted")
        total = min(computed + 1 + drafted, length)
        manager.grow("r", computed, total)
        held = [held_blocks(row) for row in manager.block_ids("r")]
        for spec, blocks, bound in zip(specs, held, charged, strict=True):
            assert live_indices(spec, computed, total, 0) <= blocks.keys()
            assert len(blocks) <= bound
        computed = data.draw(st.integers(computed + 1, total), label="accepted up to")


# --- requests that start, grow, share and finish ----------------------------------


class BlockManagerMachine(RuleBasedStateMachine):
    """The manager beside what each request must hold and what a device was told."""

    @initialize(
        plan=plans(min_layers=2, min_len=16, max_spare=1),
        policy=st.sampled_from(["never", "when_needed", "always"]),
    )
    def begin(self, plan: Plan, policy: str) -> None:
        self.manager = BlockManager(plan, max_requests=ROWS, zero_policy=policy)
        self.specs = [group.spec for group in plan.groups]
        self.num_blocks, self.max_len = plan.num_blocks, plan.max_model_len
        every = [policy == "always"] * len(self.specs)
        self.zeroed = groups_to_zero(plan) if policy == "when_needed" else every
        self.names = (f"r{i:03}" for i in itertools.count())
        self.held: dict[str, list[Held]] = {}  # per running request and group
        self.row: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.encoder_tokens: dict[str, int] = {}
        self.fresh: list[set[int]] = [set() for _ in self.specs]  # since the update
        self.device: dict[tuple[int, int], list[int]] = {}

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One of the actions that are possible now.

        A rule for each would be cut off from the others: Hypothesis switches rules off
        at random, and without ``start`` or ``grow`` a run shows nothing.
        """
        actions = [self.take_update]
        actions += [self.start] * (len(self.held) < ROWS)
        actions += [self.grow] * (2 * bool(self.growing()))
        actions += [self.finish] * bool(self.held)
        data.draw(st.sampled_from(actions))(data)

    def start(self, data: st.DataObject) -> None:
        prefixes = self.prefixes()
        if prefixes and data.draw(st.booleans(), label="share a prefix"):
            donor, length, ids = data.draw(st.sampled_from(prefixes))
            self.start_after(ids, length, self.encoder_tokens[donor])
        else:
            most = LIMITS.max_encoder_tokens
            self.start_after(None, 0, data.draw(st.integers(0, most)))

    def grow(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.growing()))
        for chunk in data.draw(st.lists(CHUNKS, min_size=1, max_size=6)):
            total = min(self.computed[name] + chunk, self.max_len)
            if total > self.computed[name]:
                self.grow_to(name, total)

    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.manager.finish(name)
        for known in (self.held, self.row, self.computed, self.encoder_tokens):
            del known[name]

    def take_update(self, data: st.DataObject) -> None:
        del data
        update = self.manager.take_update()
        rows = [entry.row for entry in update.entries]
        assert len(rows) == len(set(rows))
        for entry in update.entries:
            for group, ids in enumerate(entry.block_ids):
                key = entry.row, group
                before = [] if entry.overwrite else self.device.get(key, [])
                self.device[key] = [*before, *ids]
        for name, row in self.row.items():
            for group, held in enumerate(self.held[name]):
                ids = self.device.get((row, group), [])
                assert {index: ids[index] for index in held} == held
        used = set(self.row.values())
        assert not any(ids for (row, _), ids in self.device.items() if row not in used)
        pairs = zip(self.fresh, self.zeroed, strict=True)
        expected = [fresh if zeroed else set() for fresh, zeroed in pairs]
        assert [set(ids) for ids in update.zero_ids] == expected
        self.fresh = [set() for _ in self.specs]

    @invariant()
    def every_request_holds_its_live_blocks(self) -> None:
        assert self.manager.requests == self.row
        for name, groups in self.held.items():
            rows = self.manager.block_ids(name)
            assert [held_blocks(row) for row in rows] == groups
        counts = [sum(map(len, groups)) for groups in self.by_group()]
        assert list(self.manager.held_blocks()) == counts

    @invariant()
    def every_block_is_free_or_has_the_owners_that_share_it(self) -> None:
        owners, pool = self.owners(), self.manager.pool
        assert NULL_BLOCK not in owners
        references = [pool.references(i) for i in range(self.num_blocks)]
        assert references == [owners[i] for i in range(self.num_blocks)]
        assert pool.num_free_blocks == self.num_blocks - 1 - len(owners)
        groups = [set().union(*map(dict.values, held)) for held in self.by_group()]
        assert sum(map(len, groups)) == len(owners)  # no block is in two groups

    def start_after(
        self, prefix: list[list[int]] | None, computed: int, encoder_tokens: int
    ) -> None:
        name = next(self.names)
        row = self.manager.start(name, shared_block_ids=prefix, encoder_tokens=encoder_tokens)
        assert row in set(range(ROWS)) - set(self.row.values())
        self.held[name] = [held_blocks(ids) for ids in prefix or [[]] * len(self.specs)]
        self.row[name] = row
        self.computed[name] = computed
        self.encoder_tokens[name] = encoder_tokens

    def grow_to(self, name: str, total: int) -> None:
        """Grows a request, or finds that blocks run out."""
        computed, encoder_tokens = self.computed[name], self.encoder_tokens[name]
        held, owners = self.held[name], self.owners()
        live = [live_indices(s, computed, total, encoder_tokens) for s in self.specs]
        wanted = [now - old.keys() for now, old in zip(live, held, strict=True)]
        dropped = [
            old[index] for now, old in zip(live, held, strict=True) for index in old.keys() - now
        ]
        returned = {block_id for block_id in dropped if owners[block_id] == 1}
        free = set(range(1, self.num_blocks)) - owners.keys()
        needed = max(0, sum(map(len, wanted)) - len(returned))
        assert self.manager.missing_blocks(name, computed, total) == needed
        if needed > len(free):
            before = manager_state(self.manager)
            with pytest.raises(OutOfBlocksError) as error:
                self.manager.grow(name, computed, total)
            asked = (error.value.needed_blocks, error.value.free_blocks)
            assert asked == (needed, len(free))
            assert manager_state(self.manager) == before
            return
        self.manager.grow(name, computed, total)
        self.computed[name] = total
        rows = self.manager.block_ids(name)
        handed = [{i: r[i] for i in want} for r, want in zip(rows, wanted, strict=True)]
        ids = [block_id for group in handed for block_id in group.values()]
        assert len(ids) == len(set(ids))
        assert set(ids) <= free | returned
        self.held[name] = [
            {index: old[index] for index in old.keys() & now} | new
            for old, now, new in zip(held, live, handed, strict=True)
        ]
        for fresh, new in zip(self.fresh, handed, strict=True):
            fresh.update(new.values())

    def by_group(self) -> list[list[Held]]:
        """What is held of each group, by every request."""
        return [[h[g] for h in self.held.values()] for g in range(len(self.specs))]

    def owners(self) -> Counter[int]:
        """How many table entries hold each block."""
        return Counter(
            block_id
            for groups in self.held.values()
            for held in groups
            for block_id in held.values()
        )

    def growing(self) -> list[str]:
        return sorted(name for name, n in self.computed.items() if n < self.max_len)

    def prefixes(self) -> list[tuple[str, int, list[list[int]]]]:
        """Donor, tokens and ids of every prefix that a new request could share."""
        candidates = [
            (name, length, self.prefix(name, length))
            for name, computed in self.computed.items()
            for length in range(1, min(computed, self.max_len - 1) + 1)
        ]
        return [(name, n, ids) for name, n, ids in candidates if ids is not None]

    def prefix(self, donor: str, length: int) -> list[list[int]] | None:
        """Rows of a donor's first tokens, where whole blocks hold all that is read."""
        rows: list[list[int]] = []
        for spec, held in zip(self.specs, self.held[donor], strict=True):
            count, part = divmod(length, spec.block_size)
            read = live_indices(spec, length, length + 1, 0)
            if isinstance(spec, CrossAttentionSpec):
                count = len(held)
            elif isinstance(spec, StateSpec) and spec.cache_mode == "none":
                count = 0  # a running state cannot be shared; it is computed again
            elif part or not {i for i in read if i < count} <= held.keys():
                return None
            rows.append([held.get(index, NULL_BLOCK) for index in range(count)])
        return rows


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=4 * settings().max_examples)


# --- bad input --------------------------------------------------------------------


def manager_of_two_groups() -> BlockManager:
    """One running request "r" of 8 tokens, in blocks 1, 2 (KV) and 3 (state)."""
    state = StateSpec(block_size=4, shapes=((4,),), dtypes=("f32",))
    plan = plan_cache({"kv": FULL, "state": state}, 2**20, max_model_len=16)
    manager = BlockManager(plan, max_requests=2)
    manager.start("r")
    manager.grow("r", 0, 8)
    return manager


BAD_INPUTS: list[tuple[str, Callable[[BlockManager], object]]] = [
    ("num_blocks", lambda _: BlockPool(1)),
    ("num_blocks", lambda _: BlockPool(2.0)),
    ("count", lambda m: m.pool.allocate(-1)),
    ("count", lambda m: m.pool.allocate(1.5)),
    ("block_ids", lambda m: m.pool.free([0])),
    ("block_ids", lambda m: m.pool.share([4])),
    ("block_ids", lambda m: m.pool.free([1.0])),
    ("block_id", lambda m: m.pool.references(-1)),
    ("block_id", lambda m: m.pool.references(10**6)),
    ("request", lambda m: m.start("r")),
    ("request", lambda m: m.grow("s", 0, 1)),
    ("request", lambda m: m.missing_blocks("s", 0, 1)),
    ("request", lambda m: m.finish("s")),
    ("request", lambda m: m.block_ids("s")),
    ("shared_block_ids", lambda m: m.start("s", shared_block_ids=[[1]])),
    ("block_ids", lambda m: m.start("s", shared_block_ids=[[1], [4]])),
    ("encoder_tokens", lambda m: m.start("s", encoder_tokens=-1)),
    ("encoder_tokens", lambda m: m.start("s", encoder_tokens="many")),
    ("num_computed_tokens", lambda m: m.grow("r", 9, 8)),
    ("num_computed_tokens", lambda m: m.grow("r", -1, 8)),
    ("num_tokens", lambda m: m.grow("r", 8, 9.5)),
    ("max_model_len", lambda m: m.grow("r", 8, 17)),
]


@pytest.mark.parametrize(
    ("argument", "call"),
    BAD_INPUTS,
    ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD_INPUTS)],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(
    argument: str, call: Callable[[BlockManager], object]
) -> None:
    manager = manager_of_two_groups()
    before = manager_state(manager)
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b"):
        call(manager)
    assert manager_state(manager) == before


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("max_requests", {"max_requests": 0}),
        ("max_requests", {"max_requests": "2"}),
        ("zero_policy", {"max_requests": 1, "zero_policy": "sometimes"}),
    ],
)
def test_a_manager_refuses_bad_options_by_name(argument: str, options: dict[str, Any]) -> None:
    plan = plan_cache({"kv": FULL}, 2**20, max_model_len=16)
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b"):
        BlockManager(plan, **options)


def test_a_request_that_finds_no_free_row_is_refused_and_changes_nothing() -> None:
    manager = manager_of_two_groups()
    manager.start("s")
    before = manager_state(manager)
    with pytest.raises(ValueError, match=r"request='t' .* max_requests"):
        manager.start("t", shared_block_ids=[[1], []])
    assert manager_state(manager) == before


def test_encoder_input_beyond_what_admission_charged_is_refused() -> None:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=4)
    limits = Limits(max_encoder_tokens=8)
    plan = plan_cache({"x": cross}, 2**20, max_model_len=16, limits=limits)
    manager = BlockManager(plan, max_requests=1)
    with pytest.raises(ValueError, match="encoder_tokens"):
        manager.start("r", encoder_tokens=9)
