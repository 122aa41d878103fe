"""Block tables on the device against lists, and the batch of a step against its definition."""

import dataclasses
import functools
import itertools
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv._src.block_tables import append_block_ids, gather_batch, pack_entries
from jaxkv._src.blocks import BlockManager
from jaxkv._src.cache import (
    PAD_ROW,
    CacheError,
    CacheFlags,
    StepBatch,
    check_errors,
    expand_blocks,
    make_cache,
)
from jaxkv._src.internal import indexing
from jaxkv._src.internal.indexing import FEW_ENDS, gather_bits, group_of, take_cells
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning import plan_cache
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Limits,
    MLASpec,
    RingSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.step import apply_step
from jaxkv._src.uploads import StepShape, TableEntry, pack_step
from jaxkv.testing import (
    ReferenceTables,
    assert_in_place,
    strategies,
)
from tests.helpers import as_ids

ROWS, BATCH, TOKENS, ENCODER = 4, 3, 12, 7
KV = {"num_kv_heads": 1, "head_size": 4}
STATE = {"block_size": 4, "shapes": ((2,),), "dtypes": ("f32",)}
EVERY_KIND = {
    "full": FullAttentionSpec(block_size=4, **KV),
    "sliding": SlidingWindowSpec(block_size=4, sliding_window=6, **KV),
    "chunked": ChunkedAttentionSpec(block_size=2, chunk_size=7, **KV),
    "mla": MLASpec(block_size=8, head_size=4, compress_ratio=2),
    "sliding mla": SlidingWindowMLASpec(block_size=4, head_size=8, sliding_window=3),
    "cross": CrossAttentionSpec(block_size=4, **KV),
    "ring": RingSpec(block_size=3, group_size=2, head_size=4),
    "none": StateSpec(speculative_blocks=1, **STATE),
    "align": StateSpec(speculative_blocks=1, cache_mode="align", **STATE),
    "all": StateSpec(cache_mode="all", **STATE),
}
PLAN = plan_cache(
    EVERY_KIND,
    2**20,
    max_model_len=24,
    num_blocks_override=60,
    grouping="packed",
    limits=Limits(max_in_flight_tokens=8, max_encoder_tokens=ENCODER),
)
KERNEL_SIZES = {"full": 2, "sliding": 1, "chunked": 2, "mla": 4, "sliding_mla": 4, "cross": 2}
SIZES = [KERNEL_SIZES.get(g.specs[0].kind, g.block_size) for g in PLAN.groups]
SHAPE = StepShape.for_plan(PLAN, max_requests=ROWS, batch_size=BATCH, max_tokens=TOKENS)
GROUPS = len(PLAN.groups)
NAMES = [group.layers[0] for group in PLAN.groups]

ROW = st.integers(0, ROWS - 1)
BLOCK_IDS = st.integers(1, 59)
ENTRIES = strategies.table_entries(
    GROUPS, max_requests=ROWS, num_blocks=60, max_block_ids=40, max_entries=3
)
ENTRIES |= strategies.table_entries(
    GROUPS, max_requests=ROWS, num_blocks=60, max_block_ids=40, malformed=True
)
IS_HELD = st.integers(0, 9).map(lambda sampled: sampled < 9)
# The first new token, the number of new tokens, the encoder's tokens.
REQUEST = st.tuples(
    st.integers(0, 23), st.integers(1, TOKENS // BATCH), st.integers(0, ENCODER), IS_HELD
)

append = jax.jit(append_block_ids, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="shape")
def gather(cache, data, shape):
    batch, flags = gather_batch(cache, data, shape)
    return batch, gather_bits(flags)


@jax.jit
def views(batch):
    tables = [batch.kernel_block_tables(name) for name in NAMES]
    firsts = [batch.first_positions(name) for name in NAMES]
    growths = batch.layout.growths
    slots = [
        batch.slot_mapping(n)
        for n, g in zip(NAMES, growths, strict=True)
        if g.stores in ("tokens", "ring")
    ]
    return tables, firsts, slots, batch.positions, batch.token_requests, batch.last_tokens


def small_cache():
    return make_cache(PLAN, max_requests=ROWS, tables_only=True, kernel_block_sizes=SIZES)


def ids_from(first: int) -> list[list[int]]:
    """Ids for every column of a row, counted on from a first one."""
    starts = itertools.accumulate(PLAN.row_blocks, initial=first)
    return [
        [1 + (start + i) % 59 for i in range(width)]
        for start, width in zip(starts, PLAN.row_blocks, strict=False)
    ]


class TablesMachine(RuleBasedStateMachine):
    """Random updates and steps. Most steps compute tokens whose blocks their rows hold."""

    seen: ClassVar[Counter[bool]] = Counter()  # tokens, by whether they had a slot

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache()
        self.lists = ReferenceTables(PLAN, max_requests=ROWS, kernel_block_sizes=SIZES)

    @initialize(first=BLOCK_IDS)
    def fill(self, first: int) -> None:
        self._append([TableEntry(row, ids_from(first + 13 * row)) for row in range(ROWS)])

    @rule(row=ROW, first=BLOCK_IDS, kept=st.integers(0, 8))
    def rewrite(self, row: int, first: int, kept: int) -> None:
        """New ids from a column of each group on: the row is full afterwards."""
        starts = [min(kept, self.lists.lengths[group][row]) for group in range(GROUPS)]
        ids = [part[start:] for part, start in zip(ids_from(first), starts, strict=True)]
        self._append([TableEntry(row, ids, starts)])

    @rule(row=ROW, lengths=st.lists(st.integers(1, 6), min_size=GROUPS, max_size=GROUPS))
    def shorten(self, row: int, lengths) -> None:
        """Ends a row early; what lies past its end stays in the table and must not be seen."""
        ends = [min(n, self.lists.lengths[g][row]) for g, n in enumerate(lengths)]
        self._append([TableEntry(row, [[]] * GROUPS, ends)])

    @rule(entries=ENTRIES)
    def append(self, entries) -> None:
        self._append(entries)

    @rule(rows=st.permutations(range(ROWS)), requests=st.lists(REQUEST, min_size=1, max_size=BATCH))
    def gather(self, rows, requests) -> None:
        rows = sorted(rows, key=lambda row: not self._held_tokens(row))[: len(requests)]
        spans = [self._span(row, *request) for row, request in zip(rows, requests, strict=True)]
        self._gather(rows, spans, [request[2] for request in requests])

    def teardown(self) -> None:
        """Every row and position once."""
        for start in range(0, PLAN.max_model_len, TOKENS // BATCH):
            for rows in ([0, 1, 2], [3]):
                spans = [range(start, start + TOKENS // BATCH)] * len(rows)
                self._gather(rows, spans, [ENCODER] * len(rows))

    def _gather(self, rows, spans, encoder) -> None:
        """Runs one step and checks all of its batch."""
        upload = pack_step(
            SHAPE,
            rows=rows,
            num_computed_tokens=[span.start for span in spans],
            num_new_tokens=list(map(len, spans)),
            encoder_lens=encoder,
            accepted_tokens=[0] * len(spans),
        )
        batch, flags = gather(self.cache, upload.data[SHAPE.format.batch_fields], shape=SHAPE)
        tables, firsts, slots, *tokens = jax.tree.map(np.asarray, views(batch))
        self._check_batch(spans, *tokens)
        before, self.lists.flags = self.lists.flags, 0
        of_tokens, held = iter(slots), []
        for group, spec in enumerate(self.lists.specs):
            wanted = [
                self.lists.table(group, row, span.start, span.stop, e)
                for row, span, e in zip(rows, spans, encoder, strict=True)
            ]
            wanted += [[]] * (BATCH - len(rows))
            padded = [ids + [0] * (tables[group].shape[1] - len(ids)) for ids in wanted]
            np.testing.assert_array_equal(tables[group], padded, err_msg=str(spec))
            if spec.kind not in ("state", "cross"):
                held += self._check_tokens(group, rows, spans, next(of_tokens), firsts[group])
        assert int(flags) == self.lists.flags & CacheFlags.NO_BLOCK
        self.lists.flags = before
        self.seen.update(held)

    def _span(self, row: int, start: int, new: int, _encoder: int, is_allocated: bool) -> range:
        """Returns the new tokens of a request: of those whose blocks the row holds, or any."""
        longest = self._held_tokens(row) if is_allocated else 0
        longest = longest or PLAN.max_model_len
        start %= longest
        return range(start, min(start + new, longest))

    def _held_tokens(self, row: int) -> int:
        """Returns the tokens whose blocks a row holds in every group."""
        groups = zip(self.lists.lengths, self.lists.specs, strict=True)
        ends = [
            lengths[row] * spec.block_size
            for lengths, spec in groups
            if spec.kind not in ("state", "cross", "ring")
        ]
        return min(PLAN.max_model_len, *ends)

    def _check_batch(self, spans, positions, requests, last) -> None:
        total = sum(map(len, spans))
        assert positions[:total].tolist() == [p for span in spans for p in span]
        assert requests[:total].tolist() == [i for i, span in enumerate(spans) for _ in span]
        assert set(positions[total:]) | set(requests[total:]) <= {-1}
        ends = list(itertools.accumulate(map(len, spans)))
        assert last.tolist() == [end - 1 for end in ends] + [0] * (BATCH - len(spans))

    def _check_tokens(self, group, rows, spans, slots, firsts) -> list[bool]:
        wanted = [
            self.lists.slot(group, row, position, span.stop)
            for row, span in zip(rows, spans, strict=True)
            for position in span
        ]
        assert slots[: len(wanted)].tolist() == wanted
        assert set(slots[len(wanted) :]) <= {-1}
        size = self.lists.specs[group].block_size
        for first, span in zip(firsts, spans, strict=False):
            assert first == self.lists.logical_blocks(group, span.start, span.stop)[0] * size
        return [slot >= 0 for slot in wanted]

    def _append(self, entries) -> None:
        packed = pack_entries(
            entries, num_groups=GROUPS, max_requests=ROWS, max_block_ids=400, max_rows=ROWS
        )
        self.cache = append(self.cache, packed)
        self.lists.append(entries)

    @invariant()
    def rows_equal_the_lists(self) -> None:
        tables, lengths = np.asarray(self.cache.block_tables), np.asarray(self.cache.row_lengths)
        starts = self.cache.layout.table_offsets
        assert lengths.T.tolist() == self.lists.lengths
        for group, (start, stop) in enumerate(itertools.pairwise(starts)):
            assert tables[:, start:stop].tolist() == self.lists.cells[group]

    @precondition(lambda self: self.lists.flags)
    @invariant()
    def dropped_entries_are_reported(self) -> None:
        assert int(self.cache.error_flags) == self.lists.flags


def test_tables_equal_lists_after_any_updates() -> None:
    machine = type("Machine", (TablesMachine,), {"seen": Counter()})
    run_state_machine_as_test(machine, settings=settings(max_examples=30))
    assert min(machine.seen[True], machine.seen[False]) > 500, machine.seen


# --- one thing at a time --------------------------------------------------------------


def entry(row: int, *ids, starts=None):
    """An entry of the group of full attention, or of the groups given by their ids."""
    per_group = [list(ids[g]) if g < len(ids) else [] for g in range(GROUPS)]
    full_starts = None if starts is None else [*starts, *[0] * (GROUPS - len(starts))]
    return TableEntry(row, per_group, full_starts)


def packed(*entries, ids: int = 20):
    return pack_entries(
        entries, num_groups=GROUPS, max_requests=ROWS, max_block_ids=ids, max_rows=ROWS
    )


def row_of(cache, row: int, group: int = 0) -> list[int]:
    start = cache.layout.table_offsets[group]
    length = int(cache.row_lengths[row, group])
    return np.asarray(cache.block_tables)[row, start : start + length].tolist()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"rows": -2}, CacheFlags.BAD_ROW),
        ({"rows": ROWS}, CacheFlags.BAD_ROW),
        ({"logical_blocks": -1}, CacheFlags.BAD_LOGICAL_BLOCK),
        ({"logical_blocks": 6}, CacheFlags.BAD_LOGICAL_BLOCK),
        ({"block_ids": -1}, CacheFlags.BAD_BLOCK_ID),
        ({"block_ids": 60}, CacheFlags.BAD_BLOCK_ID),
        ({"changed_rows": ROWS}, CacheFlags.BAD_ROW),
        ({"row_lengths": 7}, CacheFlags.BAD_LOGICAL_BLOCK),
        ({"row_lengths": -1}, CacheFlags.BAD_LOGICAL_BLOCK),
        (
            {"rows": ROWS, "logical_blocks": 6},
            CacheFlags.BAD_ROW,
        ),  # a row that there is not has no columns
    ],
)
def test_entries_out_of_range_are_dropped_and_reported_until_they_are_read(changes, flag) -> None:
    """Other rows and the columns of other groups keep what they held."""
    full = append_block_ids(
        small_cache(), packed(*(entry(row, [9] * 6, [9] * 6) for row in range(ROWS)), ids=60)
    )
    arrays = packed(entry(2, [5]))
    bad = {name: np.array(getattr(arrays, name)) for name in changes}
    for name, value in changes.items():
        bad[name][(0,) * bad[name].ndim] = value
    cache = append_block_ids(full, dataclasses.replace(arrays, **bad))
    assert int(cache.error_flags) == flag
    with pytest.raises(CacheError, match="the device found errors"):
        check_errors(cache)
    before, after = np.asarray(full.block_tables), np.array(cache.block_tables)
    if "block_ids" in changes:
        assert after[2, 0] == 0, "an id that the pool does not have reads as null"
    after[2, 0] = 9
    np.testing.assert_array_equal(after, before)


def test_ids_past_the_last_group_are_padding() -> None:
    arrays = packed(entry(0, [5]))
    rows, ids = np.array(arrays.rows), np.array(arrays.block_ids)
    rows[2:4], ids[3] = [PAD_ROW, 1], 7
    cache = append_block_ids(
        small_cache(), dataclasses.replace(arrays, rows=rows, block_ids=ids, logical_blocks=ids * 0)
    )
    assert row_of(cache, 1) == [] and int(cache.block_tables.sum()) == 5
    check_errors(cache)


@pytest.mark.parametrize("largest", [INT32_MAX, 5], ids=["one index", "pairs of indices"])
def test_cells_out_of_range_are_filled(largest: int, monkeypatch) -> None:
    """Tables with more cells than int32 counts are indexed by pairs."""
    monkeypatch.setattr(indexing, "INT32_MAX", largest)
    table = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    columns = as_ids([-(2**31), -1, 0, 3, 4, 2**31 - 1])[None]
    cells = take_cells(table, as_ids([2, 0])[:, None], columns, -7)
    assert cells.tolist() == [[-7, -7, 8, 11, -7, -7], [-7, -7, 0, 3, -7, -7]]


@pytest.mark.parametrize("count", [0, 3, FEW_ENDS, FEW_ENDS + 1])
def test_an_index_is_in_the_first_group_that_ends_after_it(count: int) -> None:
    ends = np.sort(np.random.default_rng(0).integers(0, 50, count, np.int32))
    index = np.arange(60, dtype=np.int32).reshape(6, 10)
    wanted = np.searchsorted(ends, index, side="right")
    groups = group_of(jnp.asarray(index), jnp.asarray(ends))
    np.testing.assert_array_equal(groups, wanted)
    assert groups.dtype == jnp.int32


# --- the batch of a step --------------------------------------------------------------


def upload_of(rows, computed, new, shape=SHAPE):
    sizes = {"num_computed_tokens": computed, "num_new_tokens": new}
    return pack_step(shape, rows=rows, **sizes, accepted_tokens=[0] * len(rows))


@jax.jit
def of_tokens(batch):
    arrays = batch.positions, batch.token_requests, batch.last_tokens, batch.seq_lens
    return *arrays, batch.slot_mapping("full")


def changed(upload, **fields):
    data = np.array(upload.data)
    for name, (index, value) in fields.items():
        data[upload.shape.format.fields[name].start + index] = value
    return data[upload.shape.format.batch_fields]


def full_rows():
    ids = [list(range(1, 1 + width)) for width in PLAN.row_blocks]
    entries = packed(*(TableEntry(row, ids) for row in range(ROWS)), ids=400)
    return append_block_ids(small_cache(), entries)


@pytest.mark.parametrize(
    ("fields", "flag", "bad"),
    [
        ({"request_rows": (0, -2)}, CacheFlags.BAD_ROW, 0),
        ({"request_rows": (1, ROWS)}, CacheFlags.BAD_ROW, 1),
        ({"num_computed_tokens": (0, -1)}, CacheFlags.BAD_BATCH, 0),
        ({"num_computed_tokens": (0, 22)}, CacheFlags.TOO_LONG, 0),
        ({"encoder_lens": (0, ENCODER + 2)}, CacheFlags.TOO_LONG, 0),
        ({"query_start_loc": (1, 8)}, CacheFlags.BAD_BATCH, 1),  # which computes -1 tokens
        ({"query_start_loc": (2, TOKENS + 1)}, CacheFlags.BAD_BATCH, 1),
        ({"query_start_loc": (1, -1)}, CacheFlags.BAD_BATCH, 0),
        (
            {"query_start_loc": (0, 1)},
            CacheFlags.BAD_BATCH,
            [0, 1],
        ),  # all are elsewhere than their tokens
    ],
)
def test_a_batch_that_makes_no_sense_reads_no_block_and_is_reported(fields, flag, bad) -> None:
    upload = upload_of([0, 1], [4, 5], [3, 4])
    batch, flags = gather(full_rows(), changed(upload, **fields), shape=SHAPE)
    assert int(flags) & flag
    for table in batch.tables:
        assert flag == CacheFlags.TOO_LONG or not np.asarray(table)[bad].any()
    others = [row for row in (0, 1) if row not in np.atleast_1d(bad)]
    assert np.asarray(batch.tables[0])[others].any(axis=1).all()  # which are read as ever


def test_a_request_without_tokens_reads_no_block_and_is_no_error() -> None:
    """Its other fields may say anything: here 4 tokens, and more of an encoder than tables hold."""
    fields = {"query_start_loc": (1, 0), "encoder_lens": (0, ENCODER + 2)}
    data = changed(upload_of([0, 1], [4, 5], [3, 4]), **fields)
    batch, flags = gather(full_rows(), data, shape=SHAPE)
    assert int(flags) == 0
    assert not any(np.asarray(table)[0].any() for table in batch.tables)


def test_a_request_that_is_longer_than_its_step_may_be_is_reported() -> None:
    """Also if its last token is in a block that the tables have."""
    shape = StepShape.for_plan(PLAN, max_requests=ROWS, max_tokens=TOKENS, max_seq_len=21)
    for end in range(19, 25):
        data = upload_of([1], [16], [1], shape)
        data = changed(data, num_computed_tokens=(0, end - 1))
        flags = int(gather(full_rows(), data, shape=shape)[1])
        assert flags == CacheFlags.TOO_LONG * (end > 21), end


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_a_fresh_request_has_no_state_to_resume_from(mode: str) -> None:
    group = next(
        i
        for i, s in enumerate(map(lambda g: g.specs[0], PLAN.groups))
        if getattr(s, "cache_mode", 0) == mode
    )
    data = upload_of([0, 1], [0, 4], [5, 1]).data[SHAPE.format.batch_fields]
    batch, _ = gather(full_rows(), data, shape=SHAPE)
    table = np.asarray(batch.tables[group])
    assert table[0, 0] == 0 and table[1, 0] == 1 and (table[:2, 1] > 0).all()

    @jax.jit
    def blocks(batch):
        return [batch.in_group(group).state_blocks(None, reading=by) for by in (True, False)]

    resumed, written = blocks(batch)
    assert resumed.tolist() == [-1, 1, -1]
    assert written.tolist() == [
        {"none": 1, "align": 2, "all": 2}[mode],
        {"none": 1}.get(mode, 2),
        -1,
    ]


def test_a_rectangular_batch_has_a_row_of_tokens_per_request() -> None:
    shape = StepShape.for_plan(PLAN, max_requests=ROWS, batch_size=BATCH, tokens_per_request=5)
    data = upload_of([2, 0], [4, 0], [3, 5], shape).data[shape.format.batch_fields]
    batch, flags = gather(full_rows(), data, shape=shape)
    assert int(flags) == 0
    positions, requests, last, lens, slots = of_tokens(batch)
    assert positions.tolist() == [[4, 5, 6, -1, -1], [0, 1, 2, 3, 4], [-1] * 5]
    assert requests.tolist() == [[0, 0, 0, -1, -1], [1] * 5, [-1] * 5]
    assert last.tolist() == [2, 4, 0] and lens.tolist() == [7, 5, 0]
    assert batch.query_start_loc.tolist() == [0, 3, 8, 8]
    assert slots.tolist() == [[8, 9, 10, -1, -1], [4, 5, 6, 7, 8], [-1] * 5]


def test_a_decode_step_has_the_token_of_request_i_at_i() -> None:
    shape = StepShape.for_plan(PLAN, max_requests=ROWS, batch_size=3, max_tokens=3, max_query_len=1)
    data = upload_of([2, 0], [4, 7], [1, 1], shape).data[shape.format.batch_fields]
    cache = full_rows()
    batch, flags = gather(cache, data, shape=shape)
    assert int(flags) == 0
    positions, requests, *_ = of_tokens(batch)
    assert requests.tolist() == [0, 1, -1] and positions.tolist() == [4, 7, -1]
    for lens in itertools.product((0, 1), repeat=3):
        loc = np.cumsum([0, *lens])
        data = changed(
            upload_of([2, 0, 1], [4, 7, 5], [1, 1, 1], shape),
            query_start_loc=(np.arange(4), loc),
        )
        wanted = any(loc[i] != i for i in range(3) if lens[i])
        assert bool(int(gather(cache, data, shape=shape)[1]) & CacheFlags.BAD_BATCH) == wanted, lens


@pytest.mark.parametrize("form", ["max_tokens", "tokens_per_request"])
def test_a_request_of_more_tokens_than_the_shape_has_for_one_is_reported(form: str) -> None:
    """Also where a row of a rectangular batch has room for them."""
    sizes = {"batch_size": BATCH, "max_query_len": 3, form: 5}
    shape, cache = StepShape.for_plan(PLAN, max_requests=ROWS, **sizes), full_rows()
    for count in range(1, 6):
        data = changed(upload_of([2], [4], [1], shape), query_start_loc=(np.arange(1, 4), count))
        flags = int(gather(cache, data, shape=shape)[1])
        assert bool(flags & CacheFlags.BAD_BATCH) == (count > 3), count


def test_states_have_no_slots() -> None:
    batch, _ = gather(
        full_rows(), upload_of([0], [4], [3]).data[SHAPE.format.batch_fields], shape=SHAPE
    )
    for layer in ("none", "cross"):
        with pytest.raises(TypeError, match="which has no slot for each token"):
            batch.slot_mapping(layer)


# --- jax ------------------------------------------------------------------------------


def test_appending_in_a_donating_jit_copies_no_table() -> None:
    plan = plan_cache({"a": FullAttentionSpec(block_size=1, **KV)}, 2**30, max_model_len=2**16)
    cache = make_cache(plan, max_requests=16, tables_only=True)
    entries = pack_entries(
        [TableEntry(3, [[7, 8]])], num_groups=1, max_requests=16, max_block_ids=4, max_rows=2
    )
    cache = assert_in_place(append_block_ids, cache, jax.tree.map(jnp.asarray, entries))
    assert row_of(cache, 3) == [7, 8]


@pytest.mark.parametrize(("x64", "promotion"), [(False, "standard"), (True, "strict")])
def test_a_step_runs_in_every_mode_of_jax(x64: bool, promotion: str) -> None:
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
        manager = BlockManager(PLAN, max_requests=ROWS)
        manager.start("a", encoder_tokens=0)

        @jax.jit
        def run(cache, upload):
            cache, batch = apply_step(cache, upload)
            return cache, batch.positions, batch.slot_mapping("full")

        cache, positions, slots = run(small_cache(), manager.step(SHAPE, {"a": 8}))
        assert positions.dtype == jnp.int32 and positions.tolist()[:9] == [*range(8), -1]
        assert slots.dtype == jnp.int32
        check_errors(cache)
        for sizes in ({"tokens_per_request": 2}, {"max_tokens": ROWS, "max_query_len": 1}):
            other = StepShape.for_plan(PLAN, max_requests=ROWS, **sizes)
            get = lambda *step: integers_of(apply_step(*step)[1])  # noqa: E731
            seen = {array.dtype for array in jax.eval_shape(get, cache, other.idle())}
            assert seen == {jnp.dtype("int32")}


def integers_of(batch: StepBatch) -> list[jax.Array]:
    """Returns all arrays of a batch, but for groups of prefixes."""
    of_layer = [batch.kernel_block_tables, batch.first_positions, batch.slot_mapping]
    names = "request_rows num_computed_tokens query_start_loc query_lens seq_lens last_tokens "
    names += "encoder_lens accepted_tokens extra token_requests positions"
    return [getattr(batch, name) for name in names.split()] + [get("full") for get in of_layer]


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int16", "bool"])
def test_integers_that_are_not_int32_are_refused_and_not_truncated(dtype: str) -> None:
    cache, entries = small_cache(), packed(entry(0, [5]))
    ids = np.array(entries.block_ids, np.int64) + 2**32
    wide = dataclasses.replace(entries, block_ids=ids.astype(dtype))
    with pytest.raises(
        TypeError, match=rf"entries.block_ids must be an array of int32, got {dtype}"
    ):
        append_block_ids(cache, wide)
    for ids in (np.ones(2, dtype), [1, 2]):
        with pytest.raises(TypeError, match="block_ids must be an array of int32"):
            expand_blocks(ids, 2)


def test_jitted_functions_keep_the_methods_of_jit() -> None:
    cache, entries = small_cache(), packed(entry(0, [5]))
    assert "stablehlo" in append_block_ids.lower(cache, entries).as_text()
    assert append_block_ids.trace(cache, entries).jaxpr.eqns
    assert expand_blocks.eval_shape(as_ids([1, 2]), 3).shape == (6,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": as_ids([0])}, "one shape"),
        ({"ends": as_ids([0])}, "ends has shape"),
        ({"row_lengths": np.zeros((4, 2), np.int32)}, "row_lengths has shape"),
    ],
)
def test_entries_of_shapes_that_do_not_fit_are_refused(changes, message) -> None:
    entries = dataclasses.replace(packed(entry(0, [5])), **changes)
    with pytest.raises(ValueError, match=message):
        append_block_ids(small_cache(), entries)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_block_ids": 1}, "max_block_ids=2"),
        ({"max_rows": 0}, "max_rows=1"),
        *(
            ({name: 2**60}, f"{name}={2**60} must be at most {INT32_MAX}")
            for name in ("num_groups", "max_block_ids", "max_rows")
        ),
    ],
)
def test_entries_that_do_not_fit_their_arrays_are_refused(sizes, message) -> None:
    room = {"num_groups": GROUPS, "max_requests": ROWS, "max_block_ids": 9, "max_rows": 2}
    with pytest.raises(ValueError, match=message):
        pack_entries([entry(0, [5, 6])], **(room | sizes))


# --- kernel blocks --------------------------------------------------------------------


@given(
    ids=st.lists(strategies.ids(60, malformed=True), min_size=5, max_size=5),
    parts=st.sampled_from([1, 2, 3]),
)
def test_a_block_expands_to_the_kernel_blocks_it_consists_of(ids, parts: int) -> None:
    wanted = [
        i * parts + part if 0 <= i and i * parts + parts <= 2**31 else -1
        for i in ids
        for part in range(parts)
    ]
    assert expand_blocks(as_ids(ids), parts).tolist() == wanted


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16])
def test_the_last_id_whose_kernel_ids_fit_expands_and_the_next_does_not(parts: int) -> None:
    last = 2**31 // parts - 1
    ids = as_ids([last, min(last + 1, 2**31 - 1)])
    got = expand_blocks(ids, parts).tolist()
    assert got[:parts] == [last * parts + part for part in range(parts)]
    assert parts == 1 or got[parts:] == [-1] * parts


def test_expanding_keeps_leading_axes_and_refuses_no_parts_and_too_many() -> None:
    assert expand_blocks(as_ids([[1], [2]]), 2).tolist() == [[2, 3], [4, 5]]
    assert expand_blocks.eval_shape(as_ids([1]), INT32_MAX).shape == (INT32_MAX,)
    for parts, wanted in ((0, "at least 1"), (INT32_MAX + 1, f"at most {INT32_MAX}")):
        with pytest.raises(ValueError, match=f"blocks_per_kv_block.* must be {wanted}"):
            expand_blocks(as_ids([1]), parts)
