"""Block tables against lists: every operation, long random runs, bad rows and ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxkv.block_tables import (
    BAD_BLOCK_ID,
    BAD_ROW,
    DUPLICATE,
    MISPLACED,
    NO_BLOCK,
    ROW_FULL,
    TOO_NARROW,
    BlockTableError,
    BlockTables,
    TableEntries,
    append_block_ids,
    check_overflow,
    expand_blocks,
    gather_block_tables,
    make_block_tables,
    map_slots,
    move_rows,
    release_rows,
    swap_rows,
)
from jaxkv.blocks import BlockManager, TableEntry, TableUpdate
from jaxkv.planning import plan_cache
from jaxkv.pool import make_pool
from jaxkv.specs import CrossAttentionSpec, FullAttentionSpec, Limits
from jaxkv.step import StepShape, apply_step, pack_entries, pack_step
from jaxkv.testing import ReferenceTables, assert_same_bytes, count_compilations, strategies
from tests.helpers import hybrid_plan, ids_of_group, snapshot

PLAN = hybrid_plan()
ROWS, BATCH, TOKENS, ENTRIES, IDS = 5, 4, 6, 8, 12
KERNEL_SIZES = (2, 4, 1, 4, 4)
GROUPS = len(PLAN.groups)

append = append_block_ids
release = release_rows
move = move_rows
swap = swap_rows
gather = gather_block_tables
slots_of = map_slots


def make() -> tuple[BlockTables, ReferenceTables]:
    tables = make_block_tables(PLAN, max_requests=ROWS, kernel_block_sizes=KERNEL_SIZES)
    reference = ReferenceTables(
        [group.spec for group in PLAN.groups],
        tables.widths,
        max_requests=ROWS,
        pool_blocks=PLAN.num_blocks,
        kernel_block_sizes=KERNEL_SIZES,
    )
    return tables, reference


def int32(values) -> np.ndarray:
    return np.asarray(values, np.int32)


def pack(entries: list[TableEntry]) -> TableEntries:
    return pack_entries(entries, num_groups=GROUPS, max_entries=ENTRIES, max_block_ids=IDS)


only = functools.partial(ids_of_group, GROUPS)


good_rows, any_rows = strategies.ids(ROWS), strategies.ids(ROWS, malformed=True)
positions = st.integers(-2, 30) | st.sampled_from(strategies.EXTREMES)
entry_lists = functools.partial(
    strategies.table_entries,
    GROUPS,
    max_requests=ROWS,
    pool_blocks=PLAN.num_blocks,
    max_block_ids=IDS,
)


class TablesMachine(RuleBasedStateMachine):
    """Drives the tables and the lists side by side; keeps old states and checks them."""

    @initialize()
    def start(self) -> None:
        self.tables, self.reference = make()
        self.old: list[tuple[BlockTables, list[np.ndarray]]] = []

    def remember(self) -> None:
        if len(self.old) < 5:
            self.old.append((self.tables, snapshot(self.tables)))

    @rule(entries=entry_lists())
    def append_good(self, entries) -> None:
        self.remember()
        self.tables = append(self.tables, pack(entries))
        self.reference.append(entries)

    @rule(entries=entry_lists(malformed=True))
    def append_anything(self, entries) -> None:
        self.append_good(entries)

    @rule(rows=st.tuples(any_rows, any_rows))
    def release(self, rows) -> None:
        self.remember()
        self.tables = release(self.tables, int32(rows))
        self.reference.release(rows)

    @rule(pairs=st.tuples(*[st.tuples(any_rows, any_rows)] * 3))
    def move(self, pairs) -> None:
        self.remember()
        sources, destinations = zip(*pairs, strict=True)
        self.tables = move(self.tables, int32(sources), int32(destinations))
        self.reference.move(sources, destinations)

    @rule(first=good_rows, second=good_rows)
    def swap(self, first, second) -> None:
        self.tables = swap(self.tables, int32([first]), int32([second]))
        self.reference.move([first, second], [second, first])

    @rule(
        batch=st.tuples(*[st.tuples(any_rows, st.integers(0, 30))] * BATCH),
        narrow=st.booleans(),
    )
    def gather(self, batch, narrow) -> None:
        widths = tuple(max(1, width - 1) if narrow else width for width in self.tables.widths)
        rows, first = zip(*batch, strict=True)
        self.tables, got = gather(self.tables, int32(rows), int32(first), widths=widths)
        for ids, expected in zip(got, self.reference.gather(rows, first, widths), strict=True):
            np.testing.assert_array_equal(ids, expected)

    @rule(tokens=st.tuples(*[st.tuples(any_rows, positions)] * TOKENS))
    def map_slots(self, tokens) -> None:
        rows, places = zip(*tokens, strict=True)
        self.tables, got = slots_of(self.tables, int32(rows), int32(places))
        np.testing.assert_array_equal(got, self.reference.slots(rows, places))

    @invariant()
    def rows_and_flags_agree(self) -> None:
        assert int(self.tables.overflow) == self.reference.flags
        used = np.asarray(self.tables.num_blocks)
        for group, rows in enumerate(self.reference.rows):
            table = np.asarray(self.tables.tables[group])
            assert [list(table[r, : used[group, r]]) for r in range(ROWS)] == rows

    def teardown(self) -> None:
        for tables, before in getattr(self, "old", []):
            assert_same_bytes(tables, before)


TestTablesMachine = TablesMachine.TestCase


def test_a_thousand_random_updates_compile_nothing_after_the_first() -> None:
    rng = np.random.default_rng(0)
    tables, _ = make()

    def run(tables: BlockTables) -> BlockTables:
        row, ids = int(rng.integers(ROWS)), tuple(rng.integers(1, 40, rng.integers(3)).tolist())
        entry = TableEntry(row, only(int(rng.integers(GROUPS)), ids), bool(rng.integers(2)))
        tables = append(tables, pack([entry]))
        tables = move(tables, int32([row, 0]), int32([0, 0]))
        tables = release(tables, int32([row, 0]))
        tables, _ = gather(tables, int32([row] * BATCH), int32([0] * BATCH), widths=tables.widths)
        return slots_of(tables, int32([row] * TOKENS), int32([-1] * TOKENS))[0]

    tables = run(tables)
    with count_compilations() as compilations:
        for _ in range(1000):
            tables = run(tables)
    assert not compilations


@pytest.mark.parametrize("device", [None, jax.devices()[0]], ids=["default", "device"])
def test_tables_and_pool_on_a_device_keep_one_signature(device) -> None:
    tables = make_block_tables(PLAN, max_requests=ROWS, device=device)
    pool = make_pool(PLAN, device=device)
    shape = StepShape(entries=2, block_ids=4, zero_ids=2, batch=2, widths=tables.widths)
    nothing = TableUpdate((), ((),) * GROUPS)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(tables, pool, upload):
        return apply_step(tables, pool, upload, shape=shape)[:2]

    for _ in range(4):
        upload = pack_step(shape, update=nothing, rows=[], first_positions=[], lengths=[])
        tables, pool = step(tables, pool, upload)
    assert step._cache_size() == 1


def test_int64_ids_are_refused_and_not_cut_down_to_other_ids() -> None:
    tables, _ = make()
    with pytest.raises(TypeError, match="rows must be an array of int32, got int64"):
        release(tables, np.array([2**32]))
    with pytest.raises(TypeError, match="rows must be an array of int32, got int64"):
        slots_of(tables, np.array([2**32]), int32([0]))
    with pytest.raises(TypeError, match="block_ids must be an array of int32, got int64"):
        append(tables, raw_entries()._replace(block_ids=np.array([2**32 + 7, 1, 1])))


@pytest.mark.parametrize(
    "changes",
    [
        {"owners": [2 * GROUPS, 0, 0]},
        {"owners": [0, 2 * GROUPS, 0]},
        {"owners": [0, 1, 2 * GROUPS]},
        {"owners": [0, -1, 2**31 - 1]},
        {"counts": [3] + [0] * (2 * GROUPS - 1)},
        {"counts": [1] + [0] * (2 * GROUPS - 1)},
        {"firsts": [1] + [2] * (2 * GROUPS - 1)},
        {"firsts": [-1] + [2] * (2 * GROUPS - 1)},
        {"firsts": [2**31 - 1] + [2] * (2 * GROUPS - 1)},
        {"counts": [2, -(2**31)] + [0] * (2 * GROUPS - 2)},
        {"counts": [2**31 - 1] + [0] * (2 * GROUPS - 1)},
        {"counts": [2**31 - 1] * 2 + [2] + [0] * (2 * GROUPS - 3), "owners": [2 * GROUPS] * 3},
    ],
)
def test_ids_that_are_not_where_the_counts_say_are_dropped_and_reported(changes) -> None:
    tables = append(make()[0], raw_entries(rows=[1, 0], **changes))
    assert int(tables.overflow) & MISPLACED and not np.asarray(tables.num_blocks)[:, 1].any()


def test_the_encoder_s_tokens_have_slots_in_groups_of_cross_attention_only() -> None:
    shape = {"block_size": 4, "num_kv_heads": 1, "head_size": 4}
    layers = {"self": FullAttentionSpec(**shape), "cross": CrossAttentionSpec(**shape)}
    plan = plan_cache(layers, 2**20, max_model_len=16, limits=Limits(max_encoder_tokens=8))
    manager = BlockManager(plan, max_requests=1)
    row = manager.start("r", encoder_tokens=8)
    manager.grow("r", 0, 12)
    tables = make_block_tables(plan, max_requests=1)
    entries = manager.take_update().entries
    packed = pack_entries(entries, num_groups=2, max_entries=2, max_block_ids=8)
    tables = append(tables, packed)
    rows, positions = int32([row] * 12), np.arange(12, dtype=np.int32)
    tables, slots = slots_of(tables, rows, positions)
    assert (np.asarray(slots)[0] >= 0).all() and (np.asarray(slots)[1] == -1).all()
    tables, slots = slots_of(tables, rows[:8], positions[:8], encoder=True)
    assert (np.asarray(slots)[0] == -1).all() and (np.asarray(slots)[1] >= 0).all()
    check_overflow(tables)


def test_the_manager_follows_a_swap_of_rows() -> None:
    manager = BlockManager(PLAN, max_requests=ROWS)
    tables = make_block_tables(PLAN, max_requests=ROWS)

    def update(tables: BlockTables) -> BlockTables:
        entries = manager.take_update().entries
        packed = pack_entries(entries, num_groups=GROUPS, max_entries=20, max_block_ids=20)
        return append(tables, packed)

    for name in "ab":
        manager.start(name)
        manager.grow(name, 0, 4)
    tables = update(tables)
    manager.grow("a", 4, 8)  # on its way when the rows are swapped
    tables = swap(tables, int32([0]), int32([1]))
    manager.swap_rows(0, 1)
    tables = update(tables)
    check_overflow(tables)
    for name, row in manager.requests.items():
        for group, ids in enumerate(manager.block_ids(name)):
            used = int(tables.num_blocks[group, row])
            assert list(np.asarray(tables.tables[group])[row, :used]) == list(ids)
    with pytest.raises(ValueError, match="row 9 is not in"):
        manager.swap_rows(0, 9)


@given(ids=st.lists(st.integers(0, 1000), min_size=6, max_size=6), parts=st.sampled_from([1, 2, 7]))
def test_a_block_expands_to_the_kernel_blocks_it_consists_of(ids, parts) -> None:
    expected = [block_id * parts + k for block_id in ids for k in range(parts)]
    np.testing.assert_array_equal(expand_blocks(jnp.array(ids, jnp.int32), parts), expected)


def test_expanding_never_wraps_into_another_block() -> None:
    ids = int32([-1, -(2**31), 2**31 - 1, 2**28 + 1, 3])
    got = np.asarray(expand_blocks(ids, 16)).reshape(5, 16)
    assert (got[:4] == -1).all() and list(got[4]) == list(range(48, 64))


def test_expanding_keeps_leading_axes() -> None:
    ids = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    assert expand_blocks(ids, 4).shape == (2, 12)
    with pytest.raises(ValueError, match="blocks_per_kv_block"):
        expand_blocks(ids, 0)


def test_entries_for_one_row_compose_in_order() -> None:
    tables, _ = make()
    entries = [
        TableEntry(2, only(0, [9, 8])),
        TableEntry(2, only(0, [5]), overwrite=True),
        TableEntry(2, only(0, [6, 7])),
    ]
    tables = append(tables, pack(entries))
    check_overflow(tables)
    assert list(np.asarray(tables.tables[0])[2, : int(tables.num_blocks[0, 2])]) == [5, 6, 7]


def raw_entries(**changes) -> TableEntries:
    """One good entry (row 1, group 0, ids 3 and 4) as arrays, with changes."""
    fields = {
        "rows": [1, -1],
        "overwrite": [0, 0],
        "firsts": [0] + [2] * (2 * GROUPS - 1),
        "counts": [2] + [0] * (2 * GROUPS - 1),
        "block_ids": [3, 4, 0],
        "owners": [0, 0, 2 * GROUPS],
    }
    arrays = {name: int32(changes.get(name, value)) for name, value in fields.items()}
    by_group = {name: arrays[name].reshape(-1, GROUPS) for name in ("firsts", "counts")}
    return TableEntries(**{**arrays, **by_group})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"rows": [-1, -1]}, BAD_ROW),  # padding that has ids
        ({"rows": [-2, -1]}, BAD_ROW),
        ({"rows": [-(2**31), -1]}, BAD_ROW),
        ({"rows": [ROWS, -1]}, BAD_ROW),
        ({"rows": [2**31 - 1, -1]}, BAD_ROW),
        ({"block_ids": [3, -1, 0]}, BAD_BLOCK_ID),
        ({"block_ids": [3, PLAN.num_blocks, 0]}, BAD_BLOCK_ID),
        ({"block_ids": [3, 2**31 - 1, 0]}, BAD_BLOCK_ID),
        ({"rows": [1, 1]}, DUPLICATE),
        (
            {
                "owners": [3, 3, 2 * GROUPS],
                "firsts": [0] * (2 * GROUPS),
                "counts": [0, 0, 0, 2] + [0] * (2 * GROUPS - 4),
            },
            ROW_FULL,  # a row of group 3 holds one block of state
        ),
    ],
)
def test_a_bad_entry_is_dropped_whole_and_reported_until_it_is_read(changes, flag) -> None:
    tables, _ = make()
    before = snapshot(tables.num_blocks)
    tables = append(tables, raw_entries(**changes))
    assert_same_bytes(tables.num_blocks, before)
    assert int(tables.overflow) == flag
    tables = append(tables, raw_entries())  # a good one does not clear the flag
    with pytest.raises(BlockTableError, match="dropped") as caught:
        check_overflow(tables)
    assert caught.value.flags == flag


def test_garbage_owners_of_ids_are_padding() -> None:
    tables, _ = make()
    counts = [1] + [0] * (2 * GROUPS - 1)
    tables = append(tables, raw_entries(owners=[0, -1, 2**31 - 1], counts=counts))
    check_overflow(tables)
    assert int(tables.num_blocks[0, 1]) == 1


def test_a_width_that_cuts_a_row_is_reported() -> None:
    tables = append(make()[0], raw_entries())
    widths = (1,) * GROUPS
    tables, (ids, *_) = gather(tables, int32([1] * BATCH), int32([0] * BATCH), widths=widths)
    np.testing.assert_array_equal(ids[0], [6, 7])  # block 3 as two kernel blocks
    assert int(tables.overflow) == TOO_NARROW


def test_a_width_beyond_the_row_pads_with_null() -> None:
    tables = append(make()[0], raw_entries())
    widths = tuple(width + 3 for width in tables.widths)
    tables, gathered = gather(tables, int32([1] * BATCH), int32([0] * BATCH), widths=widths)
    check_overflow(tables)
    assert gathered[0].shape == (BATCH, widths[0] * 2)
    np.testing.assert_array_equal(gathered[0][0, :6], [6, 7, 8, 9, 0, 0])


def test_a_position_without_a_block_has_no_slot_and_is_reported() -> None:
    tables = append(make()[0], raw_entries())
    tables, slots = slots_of(tables, int32([1] * TOKENS), int32([0, 7, 8, -1, -1, -1]))
    np.testing.assert_array_equal(slots[0], [12, 19, -1, -1, -1, -1])
    assert int(tables.overflow) == NO_BLOCK


def test_blocks_below_the_window_read_null_though_the_row_still_lists_them() -> None:
    tables, _ = make()
    group = next(i for i, g in enumerate(tables.groups) if g.sliding_window)
    tables = append(tables, pack([TableEntry(0, only(group, [11, 12, 13]))]))
    rows = int32([0] * BATCH)
    # Window 6, block 4: position 8 sees 3..8, position 9 sees 4..9 and no longer block 0.
    tables, gathered = gather(tables, rows, int32([8, 9, 13, 14]), widths=tables.widths)
    kernel = 4 // KERNEL_SIZES[group]
    first_of_block = np.asarray(gathered[group])[:, ::kernel] // kernel
    np.testing.assert_array_equal(
        first_of_block[:, :3], [[11, 12, 13], [0, 12, 13], [0, 0, 13], [0, 0, 13]]
    )


def test_old_tables_stay_valid_unless_the_caller_donates_them() -> None:
    tables, _ = make()
    before = snapshot(tables)
    new = append(tables, raw_entries())
    assert_same_bytes(tables, before)
    donating = jax.jit(append_block_ids, donate_argnums=0)
    donating(new, raw_entries())
    assert all(array.is_deleted() for array in jax.tree.leaves(new))


def test_appending_in_a_donating_jit_copies_no_table() -> None:
    tables, _ = make()
    compiled = jax.jit(append_block_ids, donate_argnums=0).lower(tables, raw_entries()).compile()
    table_bytes = sum(array.nbytes for array in jax.tree.leaves(tables))
    assert compiled.memory_analysis().alias_size_in_bytes >= table_bytes
    where = [array.unsafe_buffer_pointer() for array in tables.tables]
    tables = compiled(tables, raw_entries())
    assert [array.unsafe_buffer_pointer() for array in tables.tables] == where


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: release(t, [1]), TypeError, "rows must be an array of int32, got list"),
        (lambda t: release(t, jnp.ones(2)), TypeError, "rows must be an array of int32"),
        (lambda t: move(t, int32([1]), int32([1, 2])), ValueError, "destinations"),
        (lambda t: slots_of(t, int32([1]), jnp.ones(1)), TypeError, "positions must be"),
        (lambda t: expand_blocks(jnp.ones(2), 2), TypeError, "block_ids must be"),
        (
            lambda t: gather(t, int32([1]), int32([1]), widths=(1,)),
            ValueError,
            "widths has 1 groups",
        ),
        (
            lambda t: gather(t, int32([1]), int32([1, 2]), widths=t.widths),
            ValueError,
            "first_positions",
        ),
        (lambda t: append(t, raw_entries(rows=[1])), ValueError, "one shape: rows"),
        (lambda t: append(t, raw_entries(block_ids=[1])), ValueError, "one shape: block_ids"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused_by_name(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(make()[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_requests": 0}, "max_requests must be at least 1"),
        ({"max_requests": 2, "kernel_block_sizes": [4]}, "kernel_block_sizes has 1 entries"),
        ({"max_requests": 2, "kernel_block_sizes": [3] * GROUPS}, "3 does not divide"),
        ({"max_requests": 2, "kernel_block_sizes": [0] * GROUPS}, "kernel_block_size must be"),
        ({"max_requests": 2, "kernel_block_sizes": [2] * GROUPS}, "would split a state"),
        ({"max_requests": 2, "kernel_block_sizes": []}, "kernel_block_sizes has 0 entries"),
    ],
)
def test_tables_that_cannot_be_made_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_block_tables(PLAN, **arguments)


def test_the_printed_form_is_one_line_without_arrays() -> None:
    text = repr(make()[0])
    assert "5 rows" in text and "\n" not in text and "Array" not in text


def test_tables_can_be_the_carry_of_a_scan() -> None:
    tables, _ = make()

    @functools.partial(jax.jit, static_argnames="count")
    def grow(tables: BlockTables, count: int) -> BlockTables:
        def body(carry, block_id):
            ids = jnp.stack([block_id, jnp.int32(0), jnp.int32(0)])
            one = raw_entries(owners=[0, 99, 99], counts=[1] + [0] * (2 * GROUPS - 1))
            return append_block_ids(carry, one._replace(block_ids=ids)), None

        return jax.lax.scan(body, tables, jnp.arange(1, count + 1, dtype=jnp.int32))[0]

    grown = grow(tables, 4)
    check_overflow(grown)
    np.testing.assert_array_equal(np.asarray(grown.tables[0])[1, :4], [1, 2, 3, 4])
