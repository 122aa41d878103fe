"""References of `jaxkv.testing`: right by small examples that were worked out by hand."""

import contextlib
import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hst

from jaxkv._src.cache import CacheFlags
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import ORDERS
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import (
    PER_TOKEN_HEAD,
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import TableEntry
from jaxkv.testing import (
    ReferenceCache,
    ReferenceTables,
    locate_in_row,
    reference_copy_blocks,
    reference_write_rows,
    reference_zero_blocks,
    strategies,
)
from tests.reference_pool import ReferencePool

HEADS = {"block_size": 4, "num_kv_heads": 2, "head_size": 4}
FULL = FullAttentionSpec(**HEADS, dtype="fp8_e4m3")
WINDOW = SlidingWindowSpec(**HEADS, dtype="fp8_e5m2", sliding_window=6)
CHUNKED = ChunkedAttentionSpec(**HEADS, chunk_size=6)
CROSS = CrossAttentionSpec(**HEADS)
STATE = StateSpec(block_size=4, shapes=((2,),), dtypes=("f32",), cache_mode="align")


def plan_of(layers: dict[str, LayerSpec], num_blocks: int = 20, **options) -> Plan:
    limits = Limits(max_in_flight_tokens=8, max_encoder_tokens=8)
    options = {"max_model_len": 24, "num_blocks_override": num_blocks, "limits": limits} | options
    return plan_cache(layers, 2**30, **options)


# --- tables ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "columns"),  # of a request that goes from 5 tokens to 9, and encodes 5
    [
        (FULL, [0, 1, 2]),
        (WINDOW, [0, 1, 2]),
        (dataclasses.replace(WINDOW, sliding_window=3), [0, 1, 2]),
        (dataclasses.replace(WINDOW, sliding_window=2), [1, 2]),
        (CHUNKED, [0, 1, 2]),
        (dataclasses.replace(CHUNKED, chunk_size=5), [1, 2]),
        (CROSS, [0, 1]),
        (STATE, [1, 2]),
        (dataclasses.replace(STATE, cache_mode="all"), [1, 1, 2]),
        (dataclasses.replace(STATE, cache_mode="none", speculative_blocks=1), [0, 0, 1]),
    ],
)
def test_the_columns_that_a_step_reads_are_those_of_the_definition(spec, columns) -> None:
    tables = ReferenceTables(plan_of({"a": spec}), max_requests=2)
    assert tables.logical_blocks(0, 5, 9, encoder_tokens=5) == columns
    fresh = tables.logical_blocks(0, 0, 1, encoder_tokens=1)
    assert fresh == [None, 0, 1][spec.kind != "state" :][: len(fresh)]


def test_reference_rows_keep_what_was_written_last_and_flag_what_was_dropped() -> None:
    tables = ReferenceTables(plan_of({"a": FULL}), max_requests=3, kernel_block_sizes=[2])
    tables.append([TableEntry(0, [[5, 6, 7]]), TableEntry(0, [[0]], [1]), TableEntry(1, [[9]])])
    assert (tables.row(0, 0), tables.row(0, 1), tables.flags) == ([5, 0], [9], 0)
    tables.append([TableEntry(0, [[7, 3]], [2])])
    assert tables.row(0, 0) == [5, 0, 7, 3]
    tables.append([TableEntry(2, [[9]])])
    assert [tables.slot(0, 0, p) for p in (1, 3, 5, 9, 16)] == [21, 23, -1, 29, -1]
    assert tables.table(0, 2, 0, 4) == [18, 19] and tables.flags == 0
    assert (
        tables.table(0, 0, 0, 9) == [10, 11, 0, 0, 14, 15] and tables.flags == CacheFlags.NO_BLOCK
    )
    tables.append([TableEntry(2, [[20]])])
    assert tables.row(0, 2) == [0] and tables.flags == CacheFlags.NO_BLOCK | CacheFlags.BAD_BLOCK_ID
    tables.append([TableEntry(2, [[1, 2]], [5])])
    assert (
        tables.row(0, 2) == []
        and tables.flags
        == CacheFlags.NO_BLOCK | CacheFlags.BAD_BLOCK_ID | CacheFlags.BAD_LOGICAL_BLOCK
    )


def test_reference_slots_deal_positions_out_among_ranks_as_cards() -> None:
    plan = plan_of({"a": FULL}, context_parallel=2)
    for rank, wanted in ((0, [4, 5, -1, -1, 6, 7, -1, -1, 24]), (1, [-1, -1, 4, 5, -1, -1, 6])):
        tables = ReferenceTables(plan, max_requests=1, interleave_tokens=2, rank=rank)
        tables.append([TableEntry(0, [[1, 6]])])
        assert [tables.slot(0, 0, position) for position in range(len(wanted))] == wanted


# --- bytes of a pool, and kernels ----------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", [1, 2])
def test_reference_addresses_count_the_axes_in_order(order: str, tile: int) -> None:
    """Pages without padding lie as an array of five axes does."""
    spec = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=1, dtype="fp8")
    plan = plan_of({"a": spec, "b": spec}, 3, max_model_len=2)
    pool = ReferencePool(plan.layout, 3, order=order, kernel_block_sizes=[tile])
    sizes = {"L": 2, "B": 3 * 2 // tile, "H": 2, "N": tile, "C": 2}
    memory = np.arange(pool.memory.size).reshape([sizes[axis] for axis in order])
    memory = memory.transpose([order.index(axis) for axis in "LBNHC"])
    for index, layer in enumerate("ab"):
        np.testing.assert_array_equal(pool.addresses(layer), memory[index].reshape(3, -1))
    data = np.arange(1, 9, dtype=np.uint8)
    pool.write("b", 2, 0, data[:3]), pool.write("b", 2, 3, data[3:]), pool.write("b", 0, 0, data)
    assert pool.page("b", 2).tolist() == data.tolist() and pool.memory.sum() == data.sum()
    assert not pool.page("b", 0).any() and not pool.page("b", 3).any()


def test_reference_kernels_work_at_once_and_leave_out_what_is_out_of_range() -> None:
    pages = np.arange(8, dtype=np.uint8).reshape(4, 2)
    assert reference_zero_blocks(pages, [1, 4, -1]).tolist() == [[0, 1], [0, 0], [4, 5], [6, 7]]
    assert reference_zero_blocks(pages, [1], block_axis=1)[:, 1].tolist() == [0] * 4
    swapped = reference_copy_blocks(pages, [0, 1, 2, 9], [1, 0, 9, 2])
    assert swapped.tolist() == [[2, 3], [0, 1], [4, 5], [6, 7]]
    rows = [np.array([9], np.uint8)] * 4
    written = reference_write_rows(pages, [0, 1, 2, 4], [0, 1, 2, 0], rows)
    assert written.tolist() == [[9, 1], [2, 9], [4, 5], [6, 7]]
    assert (reference_write_rows(pages, [0], [1], rows[:1], align=2) == pages).all()


# --- content -------------------------------------------------------------------------


@given(strategies.plans(lengths=[20]), hst.lists(hst.integers(1, 4), min_size=1, max_size=5))
def test_what_requests_write_lands_within_their_rows_and_must_be_read_again(
    plan: Plan, chunks: list[int]
) -> None:
    cache = ReferenceCache(plan)
    cache.start("r")
    for computed, total in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        for _, layer, positions, rows in cache.write("r", computed, total):
            place = plan.layout.placement_of(layer)
            assert computed <= positions[0] and positions[-1] < total
            for position, row in zip(positions.tolist(), rows, strict=True):
                column, offset = locate_in_row(place.spec, position)
                assert 0 <= column < plan.row_blocks[place.group]
                assert 0 <= offset <= place.spec.data_bytes - len(row)
            if not isinstance(place.spec, StateSpec) and place.spec.dtype not in PER_TOKEN_HEAD:
                numbers = rows.view(jnp.dtype(place.spec.dtype)).astype(np.float32)
                assert np.isfinite(numbers).all() and numbers.all()
    for layer, place in cache.layers.items():
        pages = cache._pages["r", layer].data
        live = place.spec.growth.live_blocks(total, total)
        problem = functools.partial(cache.find_problem, "r", layer, live)
        assert problem(pages, unwritten_reads_zero=True) is None
        for column in live:
            if column < len(pages) and pages[column].any():
                wrong = pages.copy()
                wrong[column] ^= 1
                assert f"logical block {column} has" in problem(wrong, unwritten_reads_zero=False)


@pytest.mark.parametrize(
    ("spec", "tokens_of_row"),
    [(FULL, 1), (MLASpec(block_size=8, head_size=4, compress_ratio=4), 4)],
)
@given(data=hst.data())
def test_the_rows_of_kept_tokens_must_be_read_and_those_of_rejected_ones_need_not(
    spec, tokens_of_row: int, data
) -> None:
    """Of forks of forks, too: each is compared with a dictionary of rows of its own."""
    cache = ReferenceCache(plan_of({"a": spec}))
    lengths: dict[int, int] = {0: 0}
    rows: dict[int, dict[int, bytes]] = {0: {}}
    cache.start(0)
    for fork in range(1, data.draw(hst.integers(2, 9))):
        request = data.draw(hst.sampled_from([*lengths]))
        length, mine = lengths[request], rows[request]
        event = data.draw(hst.sampled_from(["write", "rewind", "fork"]))
        if event == "write" and length < 24:
            lengths[request] = data.draw(hst.integers(length + 1, 24))
            (written,) = cache.write(request, length, lengths[request])
            numbers = (written.positions // tokens_of_row).tolist()
            mine.update(zip(numbers, map(bytes, written.rows), strict=True))
            continue
        kept = data.draw(hst.integers(0, length))
        if event == "fork":
            cache.fork(fork, request, kept)
            blocks = cdiv(kept, spec.block_size)  # whole ones are shared
            in_blocks = range(blocks * spec.block_size // tokens_of_row)
            rows[fork] = {number: row for number, row in mine.items() if number in in_blocks}
            request = fork
        else:
            cache.rewind(request, kept)
            for number in range(cdiv(kept, tokens_of_row), cdiv(length, tokens_of_row)):
                del mine[number]
        lengths[request] = kept
    columns = range(cache.plan.row_blocks[0])
    row_bytes = spec.data_bytes * tokens_of_row // spec.block_size
    for request, wanted in rows.items():
        pages = np.ones((len(columns), spec.data_bytes), np.uint8)  # any number
        by_row = pages.reshape(-1, row_bytes)
        for number, row in wanted.items():
            by_row[number] = np.frombuffer(row, np.uint8)
        problem = functools.partial(
            cache.find_problem, request, "a", columns, pages, unwritten_reads_zero=False
        )
        assert problem() is None
        for number in wanted:
            by_row[number, 0] ^= 1
            assert "which the request wrote as" in (problem() or "")
            by_row[number, 0] ^= 1


@pytest.mark.parametrize("drafts", range(4))
@pytest.mark.parametrize("cache_mode", ["none", "align", "all"])
def test_a_state_is_set_back_to_where_a_block_or_a_draft_keeps_it(cache_mode, drafts) -> None:
    state = dataclasses.replace(STATE, cache_mode=cache_mode, speculative_blocks=drafts)
    ends = [8] if cache_mode == "none" else [4, 8]
    for kept in range(9):
        cache = ReferenceCache(plan_of({"a": state}))
        cache.start("r"), cache.write("r", 0, 4), cache.write("r", 4, 8)
        is_kept = kept in (0, *ends) or 8 - kept <= drafts
        refused = pytest.raises(AssertionError, match=f"set back to {kept} tokens")
        with contextlib.nullcontext() if is_kept else refused:
            cache.rewind("r", kept)
