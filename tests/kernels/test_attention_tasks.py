"""Tiles of queries, and the steps of keys that kernels take for them, against the definition."""

import itertools
import math
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _capability
from pallas_kernels._paged_attention import prefill_tasks, rounds
from pallas_kernels._paged_attention import tiles as tiles_module
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.prefill_tasks import (
    ROWS,
    PrefillTile,
    list_halves,
    prefill_tiles,
    split_tiles,
)
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import (
    MAX_COMPARED,
    STEP,
    FixedSplits,
    Link,
    Tile,
    Worker,
    running_sum,
    share_out,
    spread,
)
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    Cut,
    QueryTiles,
    cut_queries,
    one_query_each,
    take,
)
from pallas_kernels._paged_attention.widened import list_pages
from tests.helpers import as_ids, needs_mosaic

BATCH, TOKENS, COLUMNS, PAGES = 4, 90, 12, 60
FIRST_ROW = 24  # of the first page
LOC = as_ids([0, 90, 90, 90, 90])  # one request has all queries
RULES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "a window": {"sliding_window": 300},
    "a window of one": {"sliding_window": 1},
    "chunks": {"chunk_size": 600},
    "a window in chunks": {"sliding_window": 300, "chunk_size": 400},
    "all keys of a rank": {"causal": False, "ranks": 2, "interleave_tokens": 16},
    "interleaved": {"ranks": 2, "interleave_tokens": 16},
}


@pytest.fixture(autouse=True)
def take_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses indices that are out of range, which `take` promises that there are none of."""

    def taken(values: Any, index: Any) -> Any:
        if not isinstance(index, jax.core.Tracer):
            assert ((index >= 0) & (index < values.shape[0])).all()
        return take(values, index)

    for module in (tiles_module, prefill_tasks):
        monkeypatch.setattr(module, "take", taken)


def rule_of(name: str) -> Config:
    return Config(
        kv_heads=1,
        group=1,
        key_width=64,
        value_width=64,
        page_tokens=64,
        scale=1.0,
        values_in_keys=False,
        max_queries=TOKENS,
        out_dtype=jnp.dtype("float32"),
        **{"ranks": 1, "interleave_tokens": 1} | RULES[name],
    )


def batches(rule: Config, each_one: bool = False) -> Iterator[AttentionArrays]:
    """Requests of any lengths, some without queries or keys, and queries before the first key.

    The last batch has one that is longer than its table.
    """
    for seed in range(10):
        rng = np.random.default_rng(seed)
        counts = rng.multinomial(rng.integers(0, TOKENS + 1), rng.dirichlet([0.7] * BATCH))
        counts[rng.integers(BATCH)] *= rng.integers(2)
        first = rng.integers(0, min(3, TOKENS - counts.sum()) + 1)  # tokens of no request
        counts = counts if seed else np.array([17 - first, 1, 0, 33])  # a query ends a tile
        most = COLUMNS * rule.page_tokens * rule.ranks
        lens = np.minimum(rng.integers(0, most, BATCH) * rng.integers(0, 2, BATCH) + counts, most)
        lens[0] = max(0, lens[0] - rng.choice([0, 2]))
        lens[2] += most if seed == 9 else 0
        tables = rng.integers(0, PAGES, (BATCH, COLUMNS))
        if seed % 2:
            tables[rng.random(tables.shape) < 0.05] = rng.choice([-1, PAGES])
        yield AttentionArrays(
            queries=np.zeros((BATCH if each_one else TOKENS, 1, 64)),
            pages=types.SimpleNamespace(itemsize=2, num_pages=PAGES, first_row=lambda: FIRST_ROW),
            block_tables=as_ids(tables),
            seq_lens=as_ids(lens),
            query_start_loc=None if each_one else as_ids(np.cumsum([first, *counts])),
            chunk_offsets=as_ids(rng.integers(0, 200, BATCH)),
            rank=np.int32(rng.integers(rule.ranks)),
            sinks=None,
            key_scale=np.ones(1),
            value_scale=np.ones(1),
        )


def seen_keys(arrays: AttentionArrays, rule: Config, request: int, position: int) -> set:
    """The keys of the pages, by index, that a query at a position sees, one by one."""
    keys = np.arange(max(int(arrays.seq_lens[request]), 0))
    keys = keys[keys // rule.interleave_tokens % rule.ranks == int(arrays.rank)]
    keys = keys[: COLUMNS * rule.page_tokens]
    seen = np.ones(keys.shape, bool)
    if rule.causal:
        seen &= keys <= position
        if rule.sliding_window:
            seen &= keys > position - rule.sliding_window
        if rule.chunk_size:
            offset = int(arrays.chunk_offsets[request])
            seen &= (keys + offset) // rule.chunk_size == (position + offset) // rule.chunk_size
    return set(np.flatnonzero(seen).tolist())


def queries_of(arrays: AttentionArrays, cut: Cut) -> dict[int, tuple[int, int]]:
    """Request and position of each token that a cut counts."""
    found = {}
    loc = np.asarray(arrays.query_start_loc).tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(loc)):
        if cut.least <= end - begin <= (cut.size if cut.is_single else TOKENS):
            length = max(int(arrays.seq_lens[request]), 0)
            found |= {token: (request, length - end + token) for token in range(begin, end)}
    return found


def check_tiles(arrays: AttentionArrays, rule: Config, tiles: QueryTiles, queries) -> None:
    """Checks that each query is in one tile, and that the tile's keys are those that are seen."""
    tiles = QueryTiles(*(np.asarray(field) for field in tiles))
    size, taken = int(tiles.size), {}
    for tile, (skip, count) in enumerate(zip(tiles.skips, tiles.counts, strict=True)):
        seen = set()
        for row in range(skip, count):
            token = int(tiles.tokens[tile]) + row
            assert token not in taken, "a query is in two tiles"
            taken[token] = tile
            assert (tiles.token_tiles[token], tiles.rows[token]) == (tile, row)
            assert queries[token] == (tiles.requests[tile], tiles.positions[tile] + row)
            seen |= seen_keys(arrays, rule, *queries[token])
        assert count <= size
        if seen and rule.ranks == 1:
            assert (tiles.begins[tile], tiles.ends[tile]) == (min(seen), max(seen) + 1)
        elif seen:
            assert tiles.begins[tile] <= min(seen) and tiles.ends[tile] == max(seen) + 1
        elif skip < count:  # one without queries may have any keys: nobody reads its results
            assert tiles.ends[tile] <= max(tiles.begins[tile], 0)
    assert set(taken) == set(queries)
    outside = [token for token in range(len(tiles.token_tiles)) if token not in queries]
    assert (tiles.token_tiles[outside] == -1).all()


KEYS = 128  # of a step
CUTS = [
    Cut(8),
    Cut(16, align=8),
    Cut(64, least=2),
    Cut(4, least=2, is_single=True),
    Cut(1),
    Cut(16, align=8, least=5),
]


@pytest.mark.parametrize("name", RULES)
def test_each_query_is_in_one_tile_with_the_keys_that_its_queries_see(name: str) -> None:
    rule = rule_of(name)
    for seed, arrays in enumerate(batches(rule)):
        for cut in CUTS[seed % 2 :: 2] if seed else CUTS:
            tiles = cut_queries(arrays, rule, cut)
            assert (np.asarray(tiles.tokens) % cut.align == 0).all()
            most = TOKENS if cut.size == 1 else BATCH + TOKENS // cut.size
            assert len(tiles.requests) == (BATCH if cut.is_single else most)
            check_tiles(arrays, rule, tiles, queries_of(arrays, cut))
    for arrays in batches(rule, each_one=True):
        lens = np.asarray(arrays.seq_lens).tolist()
        queries = {request: (request, length - 1) for request, length in enumerate(lens)}
        tiles = one_query_each(arrays, rule)
        wanted = [i if length else -1 for i, length in enumerate(lens)]
        assert np.asarray(tiles.token_tiles).tolist() == wanted
        check_tiles(arrays, rule, tiles._replace(token_tiles=as_ids(range(BATCH))), queries)


@needs_mosaic
@pytest.mark.parametrize("name", RULES)
def test_each_page_that_prompts_see_has_a_place_of_its_own_if_there_is_room(name: str) -> None:
    rule, least = rule_of(name), 9
    for seed, arrays in enumerate(batches(rule)):
        places = [PAGES, 7, 1][seed % 3]
        held = jax.tree.map(np.asarray, list_pages(arrays, rule, least, places))
        needs, taken = dict[int, set[int]](), list[int]()
        for request, position in queries_of(arrays, Cut(TOKENS, least=least)).values():
            blocks = {key // rule.page_tokens for key in seen_keys(arrays, rule, request, position)}
            needs[request] = needs.get(request, set()) | blocks
        for request, blocks in needs.items():
            smaller = [other for other in needs.values() if len(other) <= len(blocks)]
            assert held.fits[request] or sum(map(len, smaller)) > places
            for block in blocks if held.fits[request] else ():
                page, place = arrays.block_tables[request, block], held.block_tables[request, block]
                if 0 <= page < PAGES:
                    assert 0 <= place < held.count <= places and held.ids[place] == page
                    taken.append(place)
                else:
                    assert place == -1
        assert len(set(taken)) == len(taken)
        assert not held.fits[[request not in needs for request in range(BATCH)]].any()


@pytest.mark.parametrize("name", RULES)
def test_masks_leave_each_query_the_keys_that_it_sees(name: str) -> None:
    from pallas_kernels._paged_attention.common import sees

    rule, cut = rule_of(name), Cut(16, align=8)

    @jax.jit
    def look(tiles: QueryTiles) -> Any:
        of_tiles = tiles.ends, tiles.chunk_offsets, tiles.ranks
        end, offset, rank = [field[:, None, None] for field in of_tiles]
        bounds = types.SimpleNamespace(end=end, chunk_offset=offset, rank=rank)
        positions = tiles.positions[:, None, None] + jnp.arange(cut.size)[None, :, None]
        keys = jnp.arange(COLUMNS * 64 + KEYS)[None, None]
        return jnp.broadcast_to(
            sees(rule, bounds, positions, keys), positions.shape[:2] + keys.shape[2:]
        )

    for arrays in itertools.islice(batches(rule), 4):
        tiles = QueryTiles(*map(np.asarray, cut_queries(arrays, rule, cut)))
        found = np.asarray(look(tiles))
        for token, (request, position) in queries_of(arrays, Cut(TOKENS)).items():
            seen = found[tiles.token_tiles[token], tiles.rows[token]]
            assert set(np.flatnonzero(seen).tolist()) == seen_keys(arrays, rule, request, position)


@needs_mosaic
@pytest.mark.parametrize("name", RULES)
def test_steps_of_latents_skip_masks_only_where_all_is_seen(name: str) -> None:
    from pallas_kernels._paged_attention.mla import _full_steps

    rule, unmasked = rule_of(name), 0
    for arrays in batches(rule):
        tiles = cut_queries(arrays, rule, Cut(8))
        full = np.asarray(_full_steps(arrays, rule, tiles))
        assert not _full_steps(arrays, rule.replace(reproducible=True), tiles).any()
        for token, query in queries_of(arrays, Cut(TOKENS)).items():
            steps = full[tiles.token_tiles[token]]
            assert set(range(steps * STEP)) <= seen_keys(arrays, rule, *query), "a mask is missing"
            pages = np.asarray(arrays.block_tables)[query[0], : steps * STEP // rule.page_tokens]
            assert ((pages >= 0) & (pages < PAGES)).all(), "a step without a mask has a hole"
            unmasked += int(steps)
    assert (unmasked > 0) == (rule.sliding_window is None and rule.chunk_size is None)


@needs_mosaic
@pytest.mark.parametrize(
    ("page_tokens", "size"), [(8, 64), (48, 128), (64, 64), (192, 128), (128, 64)]
)
def test_granules_of_a_step_lie_where_its_keys_are(page_tokens: int, size: int) -> None:
    from pallas_kernels._paged_attention.common import Steps

    rng = np.random.default_rng(page_tokens)
    steps = Steps(size, page_tokens, PAGES, 3, 5 * page_tokens, 2 * page_tokens, 0)
    assert steps._replace(head_rows=0, head_columns=64).head(jnp.int32(7), 3) == (7, 192)
    first_row, _ = steps.head(jnp.int32(16), 2)
    assert first_row == 16 + 4 * page_tokens

    @jax.jit
    def find(tables: Any, step: Any) -> Any:
        found, request = steps.find(tables, jnp.int32(1), step), jnp.int32(1)
        holes, rows = steps.holes(found), jnp.stack(steps.rows(found, first_row))
        allocated = steps.is_allocated(jnp.arange(size), holes)
        return rows, allocated, holes == steps.find_holes(tables, request, step)

    for are_holes in itertools.product((False, True), repeat=3):
        ids = rng.integers(0, PAGES, (2, 3))
        ids[1] = np.where(are_holes, rng.choice([-2, -1, PAGES, PAGES + 1], 3), ids[1])
        tables = as_ids(ids)
        for step in range(-(-3 * page_tokens // size)):
            rows, are_allocated, is_same = map(np.asarray, find(tables, jnp.int32(step)))
            keys = np.arange(step * size, min((step + 1) * size, 3 * page_tokens))
            pages = tables[1, keys // page_tokens]
            allocated = (pages >= 0) & (pages < PAGES)
            inner = np.where(allocated, pages, 0) * steps.page_rows + keys % page_tokens
            found = np.repeat(rows, steps.granule) + np.tile(np.arange(steps.granule), len(rows))
            assert (found[keys % size] == first_row + inner).all()
            assert (are_allocated[keys % size] == allocated).all() and is_same


@pytest.mark.parametrize("size", [1, MAX_COMPARED, MAX_COMPARED + 1])
def test_a_running_sum_counts_up_to_each_whatever_their_number(size: int) -> None:
    counts = as_ids(np.random.default_rng(size).integers(0, 9, size))
    found = running_sum(jnp.asarray(counts))
    np.testing.assert_array_equal(found, np.cumsum(counts))


@pytest.mark.parametrize("width", range(64, 272, 16))
def test_parts_of_a_value_are_as_few_as_cover_it(width: int) -> None:
    windows = rule_of("all keys").replace(value_width=width).value_parts
    covered = [column for first, size in windows for column in range(first, first + size)]
    assert {*covered} == {*range(width)} and len(covered) == -(-width // 64) * 64
    assert all(size % 64 == 0 for _, size in windows)


@pytest.mark.parametrize("fixed", [None, FixedSplits(1, 30), FixedSplits(8, 4)], ids=str)
@pytest.mark.parametrize("num_workers", [1, 3, 17])
def test_workers_take_each_step_of_each_tile_once_and_are_equally_long(
    num_workers: int, fixed: FixedSplits | None
) -> None:
    share = jax.jit(share_out, static_argnums=(1, 3))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        begins = rng.integers(0, 700, 6) * rng.integers(0, 2, 6)
        ends = begins + rng.integers(-5, 900, 6) * rng.integers(0, 2, 6)
        numbers = as_ids(rng.integers(0, 999, (7, 6)))  # from the requests to the ranks
        keys = as_ids(begins), as_ids(ends)
        tiles = QueryTiles(3, *numbers, *keys, *as_ids(np.zeros((2, 6))))
        tasks = share(tiles, num_workers, np.int32(seed), fixed)
        for index, row in enumerate(np.asarray(tasks.tiles).tolist()):
            check_numbers(Tile(*row), tiles, index)
            assert (Tile(*row).token, Tile(*row).used_tokens) == (tiles.tokens[index], seed)
        # Those without keys, such as padding, take no step.
        steps = np.where(ends > begins, -(-ends // STEP) - begins // STEP, 0)
        check_workers(np.asarray(tasks.tiles), np.asarray(tasks.workers), begins, steps, fixed)
        if fixed is not None:
            last = Tile(*np.asarray(tasks.tiles)[-1].tolist())
            assert last.first_split + last.num_splits <= tasks.num_splits == 6 * fixed[1]


@pytest.mark.parametrize(("tiles", "steps"), [(8, 32), (3, 5), (64, 32), (1, 7), (5, 0)])
def test_tiles_of_fixed_steps_are_divided_evenly_and_shorter_ones_have_fewer_splits(
    tiles: int, steps: int
) -> None:
    tasks = spread(tiles, steps, 132)
    table, workers = np.asarray(tasks.tiles), np.asarray(tasks.workers)
    check_workers(table, workers, np.zeros(tiles, int), np.full(tiles, steps), None)
    assert len(workers) <= 132 and tasks.even is not None
    for index, row in enumerate(table.tolist()):
        tile = Tile(*row)
        for length in {0, 1, STEP, STEP * steps // 2 + 1, STEP * steps, STEP * steps + 9}:
            used = min(-(-length // STEP), steps) + tile.line_begin
            begins = [max(begin, tile.line_begin) for _, _, begin, _ in workers.tolist()]
            ends = [min(end, used) for *_, end in workers.tolist()]
            count = sum(begin < end for begin, end in zip(begins, ends, strict=True))
            assert tasks.even.num_splits(tile, jnp.int32(length)) == count, (index, length)
        assert tile.first_split + tile.num_splits <= tasks.num_splits


def check_workers(
    tiles: np.ndarray, workers: np.ndarray, begins, num_steps, fixed: FixedSplits | None
) -> None:
    splits: dict[int, list[int]] = {tile: [] for tile in range(len(tiles))}
    steps: list[tuple[int, int]] = []
    lengths = []
    for number, row in enumerate(workers):
        worker = Worker(*row.tolist())
        lengths.append(worker.line_end - worker.line_begin)
        for index in range(worker.first_tile, worker.last_tile + 1):
            tile = Tile(*tiles[index].tolist())
            first = max(worker.line_begin, tile.line_begin)
            last = min(worker.line_end, tile.line_end)
            if first < last:
                offset = tile.first_step - tile.line_begin
                steps += [(index, step + offset) for step in range(first, last)]
                splits[index] += [number + index]
                if fixed is not None:  # whole ranges, by their order
                    inner = {offset + first, offset + last} - {
                        tile.first_step,
                        tile.line_end + offset,
                    }
                    assert all(step % fixed.steps == 0 for step in inner)
                    ranges = {step // fixed.steps for step in range(first + offset, last + offset)}
                    base = tile.first_split - tile.first_step // fixed.steps
                    splits[index] = splits[index][:-1] + [base + k for k in sorted(ranges)]
    wanted = [
        (tile, begin // STEP + step)
        for tile, (begin, count) in enumerate(zip(begins, num_steps, strict=True))
        for step in range(count)
    ]
    assert steps == wanted, "each step once, in order"
    assert max(lengths) - min(lengths) <= (1 if fixed is None else fixed.steps + 1)
    numbers = [number for of_tile in splits.values() for number in of_tile]
    assert len(set(numbers)) == len(numbers), "two splits have one number"
    for index, of_tile in splits.items():
        tile = Tile(*tiles[index].tolist())
        assert tile.num_splits == len(of_tile)
        if of_tile:
            assert of_tile == list(range(tile.first_split, tile.first_split + len(of_tile)))


@pytest.mark.parametrize("name", RULES)
def test_steps_of_prefill_have_all_seen_keys_and_skip_masks_only_where_all_are_seen(
    name: str,
) -> None:
    rule, cut = rule_of(name), Cut(16, align=8, least=2)
    unmasked = 0
    for arrays in batches(rule):
        tiles = cut_queries(arrays, rule, cut)
        found = np.asarray(prefill_tiles(arrays, rule, tiles, KEYS))
        rows = [PrefillTile(*row) for row in found.tolist()]
        assert sorted(row.index for row in rows) == list(range(len(rows)))
        assert {row.num_tiles for row in rows} == {sum(row.count > 0 for row in rows)}
        lengths = [row.last_step - row.first_step if row.count else -1 for row in rows]
        assert lengths == sorted(lengths, reverse=True), "the longest first, empty ones last"
        for row in rows:
            check_numbers(row, tiles, row.index)
            assert (8 * row.octet, row.first_row) == (tiles.tokens[row.index], FIRST_ROW)
            unmasked += check_steps(arrays, rule, row)
    assert unmasked or name == "a window of one"


@pytest.mark.parametrize(
    ("name", "workers"), [("all keys", 5), ("all keys", 40), ("a window", 40), ("interleaved", 5)]
)
def test_splits_take_each_step_of_a_long_tile_once(name: str, workers: int, monkeypatch) -> None:
    rule, cut, num_splits = rule_of(name), Cut(128, align=8, least=2), 0
    rule = rule.replace(kv_heads=2, group=3)
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 6 * workers + 5)
    monkeypatch.setattr(prefill_tasks, "LEAST_STEPS", 1)
    monkeypatch.setattr(prefill_tasks, "CACHED_BYTES", 0)
    for arrays in batches(rule):
        tiles = cut_queries(arrays, rule, cut)
        tile_splits = split_tiles(arrays, rule, tiles, KEYS)
        assert tile_splits is not None and tile_splits.workers == workers
        whole = [PrefillTile(*row) for row in prefill_tiles(arrays, rule, tiles, KEYS).tolist()]
        rows = prefill_tiles(arrays, rule, tiles, KEYS, tile_splits).tolist()
        rows = [PrefillTile(*row) for row in rows if PrefillTile(*row).count]
        assert {(row.num_tiles, row.heads_together) for row in rows} <= {(len(rows), 2)}
        steps = [row.last_step - row.first_step for row in rows]
        assert steps == sorted(steps, reverse=True), "the longest first"
        firsts, counts = np.asarray(tile_splits.first_splits), np.asarray(tile_splits.counts)
        assert len(rows) == sum(counts[row.index] for row in whole if row.count)
        total = sum(row.last_step - row.first_step for row in whole if row.count)
        for row in whole:
            if row.count:
                splits = range(firsts[row.index], firsts[row.index] + counts[row.index])
                index = [len(counts) + i for i in splits] if len(splits) > 1 else [row.index]
                check_splits(row, [next(r for r in rows if r.index == i) for i in index])
                longest = max(1, -(-total // workers))
                length = row.last_step - row.first_step
                assert (len(index) > 1) == (length > 1.25 * longest)
                assert -(-length // len(index)) <= 1.25 * longest
        used = [row.index - len(counts) for row in rows if row.index >= len(counts)]
        assert sorted(used) == list(range(len(used))) and len(used) <= 2 * workers
        check_halves(tiles, *list_halves(tiles, tile_splits, max(96, ROWS)), tile_splits.counts)
        num_splits += len(used)
    assert num_splits


@pytest.mark.parametrize(
    ("workers", "least", "queries", "most"),
    [
        (2, 3, 512, 2),
        (1, 3, 256, None),
        (2, 3, 513, None),
        (40, 1, 90, 6),
        (40, 3, 90, 2),
        (40, 4, 90, None),
    ],
)
def test_tiles_are_divided_where_thread_blocks_are_left_into_splits_of_enough_steps(
    workers: int, least: int, queries: int, most: int | None, monkeypatch
) -> None:
    """A table has 6 steps."""
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: workers)
    monkeypatch.setattr(prefill_tasks, "LEAST_STEPS", least)
    rule = rule_of("all keys")
    (arrays,) = itertools.islice(batches(rule), 1)
    arrays = arrays._replace(
        queries=np.zeros((queries, 1, 64)), seq_lens=as_ids([768, 0, 0, 0]), query_start_loc=LOC
    )
    tile_splits = split_tiles(
        arrays, rule, cut_queries(arrays, rule, Cut(128, align=8, least=2)), KEYS
    )
    assert (None if tile_splits is None else tile_splits.counts.max()) == most


@pytest.mark.parametrize(
    ("fitting", "at_once"), [(0.5, 1), (3.99, 3), (4, 4), (6, 5), (9.99, 5), (10, 10)]
)
def test_rounds_are_as_few_as_the_workspace_allows_and_alike(
    fitting: float, at_once: int, monkeypatch
) -> None:
    rule = rule_of("all keys").replace(value_width=96)
    queries = np.arange(10 * 2 * 8 * 4).reshape(10, 2, 8, 4)
    of_tile = 3 * 2 * 8 * (96 + 2) * 4  # bytes of the results of its splits
    monkeypatch.setattr(rounds, "WORKSPACE", int(fitting * of_tile))
    numbers = as_ids(np.arange(10))
    tiles = QueryTiles(1, *[numbers] * 11)
    sizes = []

    def run(tiles: QueryTiles, queries: Any) -> Any:
        sizes.append(len(tiles.requests))
        return tiles.ends, queries

    ends, found = rounds.in_rounds(run, tiles, queries, rule, FixedSplits(2, 3))
    assert sizes == [at_once]
    np.testing.assert_array_equal(ends, numbers)
    np.testing.assert_array_equal(found, queries)


def call_of(rule: Config, dtype: str, tokens: int = 1, batch: int = 1) -> Any:
    """The shapes and dtypes of a call."""
    data = jax.ShapeDtypeStruct((9, 64 * rule.row_width), dtype)
    return types.SimpleNamespace(
        pages=StridedPages(data, data.dtype, 9, 64, 1, rule.row_width),
        block_tables=np.zeros((batch, 5)),
        queries=np.zeros(tokens, jnp.bfloat16),
    )


def bytes_of(scratch: Any) -> int:
    """The shared memory that a kernel asks for, without barriers."""
    avals = [leaf.inner_aval for leaf in jax.tree.leaves(scratch) if hasattr(leaf, "inner_aval")]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


@needs_mosaic
@pytest.mark.parametrize(("pages", "unit"), [("bfloat16", 16), ("int8", 64)])
def test_kernels_for_all_widths_fit_into_shared_memory(pages: str, unit: int, monkeypatch) -> None:
    from pallas_kernels._paged_attention import mosaic, prefill, prefill_mma
    from pallas_kernels._paged_attention.decode_block import DecodeScratch
    from pallas_kernels._paged_attention.decode_shape import decode_shape
    from pallas_kernels._paged_attention.prefill_mma_shape import MmaShape

    for key, value in itertools.product(range(64, 272, unit), repeat=2):
        rule = rule_of("all keys").replace(
            key_width=key, value_width=value, out_dtype=jnp.dtype("bfloat16")
        )
        arrays = call_of(rule, pages)
        shape = mosaic._prefill_shape(arrays, rule)
        assert bytes_of(prefill._Scratch.from_shape(shape)) <= 226 * 1024
        assert shape.keys * value <= 128 * 128, "registers are short"
        assert shape.keys == 128 or max(key, value) > 128, "small steps though large ones fit"
        assert value % shape.staged_width == 0 or shape.staged_width == 64
        for capability, limit in {(8, 0): 163, (8, 9): 99, (9, 0): 227, (12, 0): 99}.items():
            monkeypatch.setattr(_capability, "compute_capability", lambda at=capability: at)
            for rows in (8, 40, 64):
                decode = decode_shape(arrays, rule, rows, finishes=True)
                assert decode.by_tma == (capability >= (9, 0))
                assert decode.stages == 2 or (limit < 227 and max(key, value) > 128)
                if not decode.stages:  # and then tiles have fewer rows
                    assert limit == 99 and rows > 8 and key + value >= 400
                    continue
                used = bytes_of(DecodeScratch.from_shape(decode))
                assert used * decode.thread_blocks_per_sm <= limit * 1024
            many = MmaShape.choose(arrays, rule)
            if many is None:  # the kernel of decodes takes all
                assert limit == 99 and (pages == "int8" and key + value > 256)
                continue
            used = bytes_of(prefill_mma._Scratch.from_shape(many))
            assert used * many.per_sm <= limit * 1024
        monkeypatch.undo()


@needs_mosaic
def test_a_tile_of_decoding_has_about_as_many_queries_as_requests_and_few_rows() -> None:
    from pallas_kernels._paged_attention.decode_shape import decode_size
    from pallas_kernels._paged_attention.mla import _tile_size

    sizes = itertools.product((1, 3, 20, 40, 64), (8, 12, 20, 100), (1, 2, 6, 99))
    for group, tokens, most in sizes:
        rule = rule_of("all keys").replace(group=group, max_queries=most)
        arrays = call_of(rule, "bfloat16", tokens, batch=8)
        size = decode_size(arrays, rule)
        wanted = min(most, max(4, math.ceil(tokens / 8)))
        assert size == 1 or (size <= 8 and size * group <= 64)
        assert size < 2 * wanted and (size >= wanted or 2 * size > min(8, 64 // group))
        size, wanted = _tile_size(arrays, rule), max(math.ceil(tokens / 8), 64 // group)
        assert min(8, wanted) <= size <= min(8, 2 * wanted - 1)


def test_rounds_of_xla_take_as_many_blocks_as_512_keys_have_within_their_memory() -> None:
    from pallas_kernels._paged_attention.xla import _blocks_at_once

    for tiles, page, heads, width in itertools.product((1, 40, 2000), (16, 200), (1, 8), (2, 99)):
        rule = rule_of("all keys").replace(page_tokens=page, kv_heads=heads)
        arrays = types.SimpleNamespace(block_tables=np.zeros((1, width)))
        of_tiles: Any = types.SimpleNamespace(requests=np.zeros(tiles))
        blocks = _blocks_at_once(arrays, of_tiles, rule)
        wanted, bytes_each = min(width, math.ceil(512 / page)), tiles * page * heads * 128 * 4
        assert blocks == 1 or (blocks <= wanted and blocks * bytes_each <= 2**26)
        assert blocks == wanted or (blocks + 1) * bytes_each > 2**26
        alone = _blocks_at_once(arrays, of_tiles, rule.replace(reproducible=True))
        assert alone == math.ceil(512 / page), "bits depend on the batch"


@needs_mosaic
@pytest.mark.parametrize(("group", "parts"), [(1, 1), (1, 2), (3, 1)])
def test_thread_blocks_take_each_head_of_each_tile_once_and_some_heads_first(
    group: int, parts: int
) -> None:
    from pallas_kernels._paged_attention.prefill_block import PrefillBlock

    kv_heads = 4
    most = 5 * kv_heads * group * parts + 1
    blocks, turns = map(np.ravel, np.meshgrid(np.arange(7), np.arange(most)))

    @jax.jit
    def place(num_tiles: Any, heads_together: Any, num_blocks: Any) -> Any:
        kernel: Any = PrefillBlock.__new__(PrefillBlock)
        kernel.config = rule_of("all keys").replace(kv_heads=kv_heads, group=group)
        kernel.heads, kernel.parts = kv_heads * group, parts
        kernel.num_tiles, kernel.heads_together = num_tiles, heads_together
        kernel.num_blocks, kernel.num_items = num_blocks, num_tiles * (kv_heads * group * parts)

        def of_block(block: Any, turn: Any) -> Any:
            kernel.block = block
            return kernel.locate_item(turn)

        return jax.vmap(of_block)(as_ids(blocks), as_ids(turns))

    for num_tiles, together, num_blocks in itertools.product((0, 1, 5), (1, 2, 4), (1, 3, 7)):
        found = place(*as_ids([num_tiles, together, num_blocks]))
        is_item, tiles, heads, part = map(np.asarray, found)
        part = np.broadcast_to(part, heads.shape)
        assert ((tiles >= 0) & (tiles < max(1, num_tiles))).all()
        assert ((heads >= 0) & (heads < kv_heads * group)).all(), "numbers of no head are loaded"
        taken = is_item & (blocks < num_blocks)
        items = np.stack([tiles, heads, part], axis=1)[taken].tolist()
        wanted = itertools.product(range(num_tiles), range(kv_heads * group), range(parts))
        assert sorted(items) == [*map(list, wanted)], "each head of each tile once"
        sections = heads // (together * group)
        is_last = sections == kv_heads // together - 1
        for turn in range(1, turns.max() + 1):
            before, now = taken & (turns == turn - 1), taken & (turns == turn)
            least = sections[now].min(initial=kv_heads)
            assert sections[before].max(initial=0) <= least, "heads that come together first"
            longest = tiles[before & is_last].max(initial=0)
            assert longest <= tiles[now & is_last].min(initial=num_tiles), "short tiles at the end"


def check_numbers(row: Tile | PrefillTile, tiles: QueryTiles, index: int) -> None:
    """Checks what a kernel reads of a tile: the numbers of the tile with that index."""
    columns = "requests skips counts positions chunk_offsets ranks begins ends".split()
    found = [getattr(row, column[:-1]) for column in columns]
    assert found == [getattr(tiles, column)[index] for column in columns]


def check_splits(whole: PrefillTile, parts: list[PrefillTile]) -> None:
    """Checks that parts take each step of a tile once, and the same masks."""
    taken = [step for part in parts for step in range(part.first_step, part.last_step)]
    assert taken == list(range(whole.first_step, whole.last_step))
    full = [step for part in parts for step in range(part.full_begin, part.full_end)]
    assert full == list(range(whole.full_begin, whole.full_end))
    for part in parts:
        same = part._replace(
            **{name: getattr(whole, name) for name in ("index", "num_tiles", "heads_together")},
            **{name: getattr(whole, name) for name in PrefillTile._fields if "step" in name},
            **{name: getattr(whole, name) for name in PrefillTile._fields if "full" in name},
        )
        assert same == whole


def check_halves(tiles: QueryTiles, halves: Any, slots: Any, counts: Any) -> None:
    """Checks that each query of a divided tile is combined once, from its row of the splits."""
    found = np.asarray(halves)
    combined = list[tuple[int, int, int]]()
    queries = {int(slot): int(n) for slot, n in zip(slots, tiles.counts, strict=True)}
    for number, row in enumerate(found.tolist()):
        tile, link = Tile(*row[: len(Tile._fields)]), Link(*row[len(Tile._fields) :])
        assert 0 <= tile.token and tile.count <= ROWS
        assert link.first_row == number % 2 * ROWS
        assert (tile.count > 0) == (queries.get(number // 2, 0) > link.first_row), (
            "work for nothing"
        )
        combined += [(number // 2, tile.token + r, r) for r in range(tile.skip, tile.count)]
    wanted = list[tuple[int, int]]()
    for index in np.flatnonzero(np.asarray(counts) > 1):
        begin, end = int(tiles.skips[index]), int(tiles.counts[index])
        wanted += [(int(slots[index]), int(tiles.tokens[index]) + r) for r in range(begin, end)]
    assert sorted(pair[:2] for pair in combined) == sorted(wanted)
    assert set(np.flatnonzero(np.asarray(slots) >= 0)) == set(
        np.flatnonzero(np.asarray(counts) > 1)
    )


def check_steps(arrays: AttentionArrays, rule: Config, row: PrefillTile) -> int:
    """Checks the steps of a tile. Returns how many of them take no mask."""
    steps, full = range(row.first_step, row.last_step), range(row.full_begin, row.full_end)
    assert row.count == 0 or set(full) <= set(steps)
    tables = np.asarray(arrays.block_tables)[row.request]
    for query in range(row.skip, row.count):
        seen = seen_keys(arrays, rule, row.request, row.position + query)
        assert {key // KEYS for key in seen} <= set(steps), "a seen key is in no step"
        for step in full:
            assert set(range(step * KEYS, (step + 1) * KEYS)) <= seen, "a mask is missing"
            for page in tables[step * KEYS // 64 : (step + 1) * KEYS // 64]:
                assert 0 <= page < PAGES, "a step without a mask has a hole"
    return len(full) if row.count > row.skip else 0


@pytest.mark.parametrize(
    ("kv_heads", "fit", "together"), [(1, 0, 1), (8, 5, 4), (12, 5, 4), (6, 6, 6)]
)
def test_as_many_heads_come_together_as_the_cache_holds_of_requests_with_tiles(
    kv_heads: int, fit: int, together: int, monkeypatch
) -> None:
    rule = rule_of("all keys").replace(kv_heads=kv_heads)
    for arrays in batches(rule):
        tiles = cut_queries(arrays, rule, Cut(16, align=8, least=2))
        lens, counts = np.asarray(arrays.seq_lens), np.diff(np.asarray(arrays.query_start_loc))
        tokens = int(np.minimum(lens, COLUMNS * rule.page_tokens)[counts >= 2].sum())
        monkeypatch.setattr(prefill_tasks, "CACHED_BYTES", fit * tokens * rule.row_width * 2)
        found = PrefillTile(*prefill_tiles(arrays, rule, tiles, KEYS)[0])
        assert found.heads_together == (together if tokens else kv_heads)


@needs_mosaic
def test_scores_far_beyond_the_cap_are_the_cap() -> None:
    from pallas_kernels._paged_attention.common import LOG2E, cap

    rule = rule_of("all keys").replace(soft_cap=2.0)
    scores = np.array([-1e9, -1e4, -1, 0, 2, 1e4, 1e9], np.float32)
    capped, factor = cap(rule, jnp.asarray(scores / 4), jnp.float32(4))
    np.testing.assert_allclose(capped * factor / LOG2E, 2 * np.tanh(scores / 2), rtol=1e-6)
