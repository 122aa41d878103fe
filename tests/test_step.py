"""Packing a step into one upload, and taking it apart again in one dispatch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.block_tables import (
    append_block_ids,
    check_overflow,
    gather_block_tables,
    make_block_tables,
    map_slots,
)
from jaxkv.blocks import BlockManager, TableEntry, TableUpdate
from jaxkv.pool import make_pool
from jaxkv.step import (
    StepShape,
    UploadRing,
    apply_step,
    apply_step_donating,
    compose_entries,
    lay_out_tokens,
    pack_entries,
    pack_step,
    warm_up,
)
from jaxkv.testing import count_compilations
from tests.helpers import hybrid_plan, ids_of_group, pointers

PLAN = hybrid_plan(num_blocks=60)
GROUPS = len(PLAN.groups)
TABLES = make_block_tables(PLAN, max_requests=4)
SHAPE = StepShape(
    entries=4, block_ids=40, zero_ids=6, batch=3, widths=TABLES.widths, tokens=16, extra=5
)
NOTHING = TableUpdate((), ((),) * GROUPS)
EMPTY_STEP = {"update": NOTHING, "rows": [], "first_positions": [], "lengths": []}


def step(tables, upload):
    tables, _, batch = apply_step(tables, None, upload, shape=SHAPE)
    return tables, batch


only = functools.partial(ids_of_group, GROUPS)


def pack(**changes) -> np.ndarray:
    return pack_step(SHAPE, **{**EMPTY_STEP, **changes})


def test_one_step_equals_its_parts() -> None:
    manager = BlockManager(PLAN, max_requests=4)
    rows = [manager.start(name) for name in "abc"]
    lengths, extra = [8, 3, 5], [7, 8, 9]
    for name, length in zip("abc", lengths, strict=True):
        manager.grow(name, 0, length)
    update = manager.take_update()
    first = [0, 0, 0]
    upload = pack(update=update, rows=rows, first_positions=first, lengths=lengths, extra=extra)
    tables, batch = step(TABLES, upload)
    check_overflow(tables)

    expected = TABLES
    for entry in update.entries:  # one by one, through the public function
        one = pack_entries([entry], num_groups=GROUPS, max_entries=1, max_block_ids=20)
        expected = append_block_ids(expected, one)
    for got, wanted in zip(tables.tables, expected.tables, strict=True):
        np.testing.assert_array_equal(got, wanted)
    _, gathered = gather_block_tables(
        expected, jnp.array(rows), jnp.array(first), widths=SHAPE.widths
    )
    for got, wanted in zip(batch.block_tables, gathered, strict=True):
        np.testing.assert_array_equal(got, wanted)
    token_rows = np.repeat(rows, lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    _, slots = map_slots(expected, jnp.array(token_rows), jnp.array(positions, jnp.int32))
    np.testing.assert_array_equal(batch.slots, slots)
    np.testing.assert_array_equal(batch.positions, positions)
    np.testing.assert_array_equal(batch.extra, [7, 8, 9, 0, 0])
    for ids, wanted in zip(np.asarray(batch.zero_ids), update.zero_ids, strict=True):
        np.testing.assert_array_equal(ids, [*wanted, *[-1] * (SHAPE.zero_ids - len(wanted))])


def test_an_empty_step_changes_nothing_and_is_all_padding() -> None:
    tables, batch = step(TABLES, pack())
    check_overflow(tables)
    np.testing.assert_array_equal(tables.num_blocks, TABLES.num_blocks)
    assert (np.asarray(batch.rows) == -1).all() and (np.asarray(batch.slots) == -1).all()
    assert all((np.asarray(ids) == 0).all() for ids in batch.block_tables)


@given(
    lengths=st.tuples(*[st.integers(0, 5)] * 3),
    first=st.tuples(*[st.integers(0, 9)] * 3),
    padding=st.integers(0, 3),
)
def test_tokens_lie_end_to_end(lengths, first, padding) -> None:
    rows = [2, 0, 3][: 3 - padding] + [-1] * padding
    lengths = [n if row >= 0 else 0 for n, row in zip(lengths, rows, strict=True)]
    expected = [
        (row, start + i)
        for row, start, length in zip(rows, first, lengths, strict=True)
        for i in range(length)
    ]
    expected += [(-1, -1)] * (16 - len(expected))
    parts = (jnp.array(v, jnp.int32) for v in (rows, first, np.cumsum(lengths)))
    got = lay_out_tokens(*parts, num_tokens=16)
    np.testing.assert_array_equal(np.stack(got, axis=1), expected)


entries = st.builds(
    TableEntry,
    row=st.integers(0, 2),
    block_ids=st.tuples(*[st.lists(st.integers(0, 9), max_size=3)] * 2),
    overwrite=st.booleans(),
)


@given(st.lists(entries, max_size=8))
def test_composed_entries_do_what_the_originals_do_in_order(listed) -> None:
    def replay(entries: list[TableEntry]) -> dict[tuple[int, int], list[int]]:
        rows: dict[tuple[int, int], list[int]] = {}
        for entry in entries:
            for group, ids in enumerate(entry.block_ids):
                before = [] if entry.overwrite else rows.get((entry.row, group), [77])
                rows[entry.row, group] = [*before, *ids]
        return rows

    composed = compose_entries(listed)
    assert replay(composed) == replay(listed)
    assert len({entry.row for entry in composed}) == len(composed)


def test_every_upload_is_a_fresh_buffer() -> None:
    first, second = pack(), pack()
    assert not np.shares_memory(first, second)


def test_packed_entries_work_on_their_own() -> None:
    entries = [TableEntry(3, only(0, [4, 5]))]
    entries = pack_entries(entries, num_groups=GROUPS, max_entries=2, max_block_ids=4)
    tables = append_block_ids(TABLES, entries)
    check_overflow(tables)
    assert int(tables.num_blocks[0, 3]) == 2


def test_a_donating_step_keeps_the_tables_where_they_are() -> None:
    tables = make_block_tables(PLAN, max_requests=4)
    where = pointers(tables.tables)
    for _ in range(3):
        tables, _, _ = apply_step_donating(tables, None, pack(), shape=SHAPE)
    assert pointers(tables.tables) == where


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [0, 1, 2, 3]}, "differ in length"),
        (
            {"rows": [0, 1, 2, 3], "first_positions": [0] * 4, "lengths": [1] * 4},
            "4 rows and its shape has 3",
        ),
        ({"rows": [0], "first_positions": [0], "lengths": [17]}, "17 tokens and its shape has 16"),
        ({"extra": range(6)}, "6 extra and its shape has 5"),
        ({"extra": [2**31]}, "extra holds a value that int32 does not"),
        ({"extra": np.array([2**32 + 7])}, "extra holds a value that int32 does not"),
        ({"extra": [2**70]}, "extra"),
        ({"extra": np.array([1.5])}, "extra must be ints"),
        ({"rows": [1, 1], "first_positions": [0, 1], "lengths": [1, 1]}, "names a row twice"),
        ({"rows": [1], "first_positions": [0], "lengths": [-1]}, "lengths must be >= 0"),
        ({"rows": [1], "first_positions": [-2], "lengths": [4]}, "first_positions must be >= 0"),
        ({"rows": [-1], "first_positions": [0], "lengths": [4]}, "rows must be >= 0"),
        (
            {"rows": [0, 1, 2], "first_positions": [0] * 3, "lengths": [2**31 - 1] * 2 + [4]},
            "4294967298 tokens and its shape has 16",
        ),
        (
            {"rows": np.array([[0], [1]]), "first_positions": [0] * 2, "lengths": [1] * 2},
            "rows must be a flat list",
        ),
        (
            {"update": TableUpdate([TableEntry(3, [[1]])] * 2, NOTHING.zero_ids)},
            rf"ids for \{{3: 1\}} groups by row and shape.widths has {GROUPS}",
        ),
        ({"copies": [(1, 2)] * GROUPS}, "copies must be, per group, a list of pairs"),
        ({"copies": np.ones((GROUPS, 1, 3), int)}, "copies must be, per group, a list of pairs"),
        ({"update": TableUpdate((), ((),))}, "update has 1 groups"),
        (
            {"update": TableUpdate((), ((1,) * 7, *((),) * (GROUPS - 1)))},
            "7 zero_ids and its shape has 6",
        ),
        (
            {"update": TableUpdate((TableEntry(0, only(0, [1] * 41)),), ((),) * GROUPS)},
            "41 block_ids and its shape has 40",
        ),
        (
            {
                "update": TableUpdate(
                    [TableEntry(i, only(0, [])) for i in range(5)], NOTHING.zero_ids
                )
            },
            "5 entries and its shape has 4",
        ),
        (
            {"update": TableUpdate([TableEntry(-1, only(0, []))], NOTHING.zero_ids)},
            "row=-1 must be >= 0",
        ),
        (
            {"update": TableUpdate([TableEntry(3, [[1]])], NOTHING.zero_ids)},
            rf"ids for \{{3: 1\}} groups by row and shape.widths has {GROUPS}",
        ),
        (
            {"update": TableUpdate([TableEntry(3, only(0, [2**31]))], NOTHING.zero_ids)},
            "block_ids holds a value that int32 does not",
        ),
        (
            {"update": TableUpdate([TableEntry(3, only(0, [1.5]))], NOTHING.zero_ids)},
            "block_ids must be ints",
        ),
        ({"copies": [[(1, 2)]]}, "copies has 1 groups"),
        (
            {"copies": [[(1, 2)], *[[]] * (GROUPS - 1)]},
            "1 copies and its shape has 0",
        ),
    ],
)
def test_what_does_not_fit_the_shape_is_refused_by_name(changes, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pack(**changes)


def test_an_update_that_did_not_fit_can_be_packed_again() -> None:
    manager = BlockManager(PLAN, max_requests=4)
    row = manager.start("r")
    manager.grow("r", 0, 8)
    update = manager.take_update()
    batch = {"rows": [row], "first_positions": [0], "lengths": [8]}
    small = dataclasses.replace(SHAPE, block_ids=3)
    with pytest.raises(ValueError, match="block_ids and its shape has 3"):
        pack_step(small, update=update, **batch)
    tables, _ = step(TABLES, pack(update=update, **batch))
    check_overflow(tables)
    assert int(tables.num_blocks[0, row]) == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"entries": -1}, "entries must be at least 0"),
        ({"widths": (1, -1)}, r"widths\[1\] must be at least 0"),
        ({"entries": 0, "block_ids": 3}, "need entries"),
        ({"batch": 0, "tokens": 3}, "need a batch"),
        ({"extra": 1.5}, "extra must be an int"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(sizes, message) -> None:
    good = {"entries": 1, "block_ids": 1, "zero_ids": 1, "batch": 1, "widths": (1,)}
    with pytest.raises((ValueError, TypeError), match=message):
        StepShape(**{**good, **sizes})


def test_an_upload_that_is_not_int32_is_refused() -> None:
    with pytest.raises(TypeError, match="upload must be an array of int32, got int64"):
        step(TABLES, np.zeros(SHAPE.size, np.int64))


def test_an_upload_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="this step shape wants"):
        step(TABLES, jnp.zeros(3, jnp.int32))


def ring_step(ring: UploadRing, tables, block_id: int):
    """Appends one block to row 0."""
    entries = [TableEntry(0, [[block_id]] * GROUPS, overwrite=True)]
    upload = ring.pack(
        update=TableUpdate(entries, NOTHING.zero_ids),
        rows=[0],
        first_positions=[0],
        lengths=[1],
        extra=[block_id],
    )
    tables, _, batch = apply_step_donating(tables, None, upload, shape=SHAPE)
    ring.sent(batch)
    return tables, batch


def test_a_ring_s_uploads_arrive_as_packed_however_many_are_under_way() -> None:
    ring, tables, batches = UploadRing(SHAPE, depth=2), make_block_tables(PLAN, max_requests=4), []
    for block_id in range(1, 51):
        tables, batch = ring_step(ring, tables, block_id)
        batches.append(batch)
    check_overflow(tables)
    for block_id, batch in enumerate(batches, 1):
        assert int(batch.extra[0]) == block_id
        assert int(batch.slots[0, 0]) == block_id * PLAN.groups[0].spec.block_size


def test_a_ring_packs_what_pack_step_packs() -> None:
    ring = UploadRing(SHAPE)
    step = {"update": NOTHING, "rows": [1, 0], "first_positions": [3, 4], "lengths": [1, 2]}
    np.testing.assert_array_equal(ring.pack(**step), pack_step(SHAPE, **step))


def test_a_ring_does_not_write_over_an_upload_that_no_step_has_read() -> None:
    ring = UploadRing(SHAPE)
    with pytest.raises(RuntimeError, match="no upload is waiting"):
        ring.sent(None)
    ring.pack(**EMPTY_STEP)
    with pytest.raises(RuntimeError, match="packed and not sent"):
        ring.pack(**EMPTY_STEP)
    ring.sent(None)
    ring.pack(**EMPTY_STEP)


def test_warming_up_leaves_nothing_to_compile() -> None:
    ring = UploadRing(SHAPE)
    tables, pool = make_block_tables(PLAN, max_requests=4), make_pool(PLAN)
    tables, pool = warm_up(tables, pool, [SHAPE, ring])
    with count_compilations() as compilations:
        for turn in range(6):
            upload = pack_step(SHAPE, **EMPTY_STEP) if turn % 2 else ring.pack(**EMPTY_STEP)
            if turn % 3:
                tables, pool, batch = apply_step_donating(tables, pool, upload, shape=SHAPE)
            else:
                tables, pool, batch = apply_step_donating(
                    tables, pool, upload, shape=SHAPE, implementation=None
                )
            if not turn % 2:
                ring.sent(batch)
    assert not compilations


def test_a_ring_refuses_what_it_cannot_wait_for() -> None:
    ring = UploadRing(SHAPE, depth=1)
    ring.pack(**EMPTY_STEP)
    with pytest.raises(TypeError, match="outputs must hold arrays of jax, got ndarray"):
        ring.sent(np.zeros(3))
    output = jnp.zeros(3)
    ring.sent(output)
    output.delete()
    with pytest.raises(RuntimeError, match="are deleted or donated"):
        ring.pack(**EMPTY_STEP)


def test_a_ring_notices_that_a_step_took_its_buffer() -> None:
    ring = UploadRing(SHAPE, depth=1)
    upload = ring.pack(**EMPTY_STEP)
    ring.sent(None)
    upload.delete()  # as donating it does
    with pytest.raises(RuntimeError, match="a step donated its upload"):
        ring.pack(**EMPTY_STEP)


def test_a_ring_waits_for_the_step_that_reads_a_buffer_before_it_writes_again() -> None:
    ring, order = UploadRing(SHAPE, depth=2), []

    class Output(list):
        """Stands for an array: says when it was waited for."""

        def is_deleted(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            order.append(self[0])

    for turn in range(5):
        ring.pack(**EMPTY_STEP)
        ring.sent(None)
        ring._fences[turn % 2] = [Output([turn])]
    assert order == [0, 1, 2]


def test_a_pool_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="pool must be a KVPool, or None, got dict"):
        apply_step(TABLES, {"x": jnp.ones(3)}, pack(), shape=SHAPE)


def test_a_pack_that_failed_leaves_the_ring_as_it_was() -> None:
    ring, tables = UploadRing(SHAPE, depth=1), make_block_tables(PLAN, max_requests=4)
    with pytest.raises(ValueError, match="names a row twice"):
        ring.pack(update=NOTHING, rows=[1, 1], first_positions=[0, 0], lengths=[1, 1])
    tables, batch = ring_step(ring, tables, 7)
    assert int(batch.extra[0]) == 7
