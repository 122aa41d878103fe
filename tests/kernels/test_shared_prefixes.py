"""Beginnings that requests share are read once, with the results of reading them for each.

On a machine without a GPU the Mosaic kernels run in interpret mode, and are lowered for CUDA.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Interleaving, SharedPrefixes
from pallas_kernels._paged_attention import shared as shared_tiles
from pallas_kernels._paged_attention.prefill_tasks import PrefillTile, has_holes
from tests.helpers import HAS_LATE_BARRIERS, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.kernels import calls
from tests.kernels.test_attention_tasks import FIRST_ROW, batches, rule_of
from tests.kernels.test_paged_attention import lower
from tests.reference_attention import (
    PACKED,
    Arguments,
    Case,
    check_output,
    interpret_on_a_small_gpu,
    make,
)
from tests.reference_token_heads import BY_HEADS

INT8, _, INT4 = BY_HEADS
GROUPS, STEP = 3, 64  # that there is room for; tokens that are shared or not together


class Forest(NamedTuple):
    """Requests of these lengths, and groups of them with the tokens that they share."""

    lens: list[int]
    groups: list[list[int]]
    shared: list[int]
    seed: int


def share_pages(case: Case, forest: Forest) -> tuple[Arguments, SharedPrefixes]:
    """Returns arguments whose groups have the same pages first, and poison where nobody looks."""
    given = make(case, forest.lens, None, forest.seed)
    tables = given.block_tables.copy()
    for members, tokens in zip(forest.groups, forest.shared, strict=True):
        pages = tokens // case.page_tokens
        # What the longest member holds: the last page of a shorter one is partly poison.
        longest = max(members, key=lambda member: forest.lens[member])
        tables[members, :pages] = given.block_tables[longest, :pages]
    rng = np.random.default_rng(forest.seed)
    flat = [member for members in forest.groups for member in members]
    padding = rng.choice([-1, 0, case.batch - 1], case.batch - len(flat))
    ends = np.cumsum([len(members) for members in forest.groups])
    spare = GROUPS - len(ends)
    last = ends[-1] if len(ends) else 0
    return given._replace(block_tables=tables), SharedPrefixes(
        as_ids([*flat, *padding]),
        as_ids([*ends, *[last] * spare]),
        as_ids([*forest.shared, *rng.integers(0, case.capacity, spare)]),
    )


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def attend(arguments: Arguments, shared: SharedPrefixes, case: Case, implementation: str) -> Any:
    queries, pages, tables, lens, _, _, sinks, key_scale, value_scale = arguments
    return calls.attend(
        *(queries, pages, tables, lens),
        scale=case.scale,
        soft_cap=case.cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        value_width=case.value if case.latent else None,
        row_packing=case.packing,
        shared_prefixes=shared,
        return_lse=True,
        implementation=implementation,
    )


def check(case: Case, forest: Forest, implementation: str) -> None:
    """Checks an output, computed without the members' own pages of what they share."""
    arguments, shared = share_pages(case, forest)
    tables = arguments.block_tables.copy()
    for members, tokens in zip(forest.groups, forest.shared, strict=True):
        steps = max(0, min(tokens, *[forest.lens[member] - 1 for member in members])) // STEP
        tables[members[1:], : steps * STEP // case.page_tokens] = -1
    with kernels_run():
        given = arguments._replace(block_tables=tables)
        out, lse = attend(given, shared, case, implementation)
    check_output(case, arguments, out, lse)


@st.composite
def forests(draw: st.DrawFn, case: Case) -> Forest:
    """Draws groups of requests, some alone, and parts that end anywhere in their pages."""
    page = case.page_tokens
    names = draw(st.permutations(range(case.batch)))
    cuts = sorted(draw(st.lists(st.integers(0, case.batch), max_size=2 * GROUPS)))
    groups = [names[begin:end] for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    length = st.sampled_from([1, 64, 65, case.capacity]) | st.integers(1, case.capacity)
    lens = [draw(length | st.just(0)) for _ in range(case.batch)]
    groups = [group for group in groups if group]
    shared = []
    for group in groups:
        tokens = draw(st.integers(0, case.capacity // page)) * page
        shared.append(tokens)
        for member in group:
            lens[member] = max(lens[member], 1 if tokens > 128 and draw(st.booleans()) else tokens)
    return Forest(lens, groups, shared, draw(st.integers(0, 2**16)))


CROWDED = Forest([200, 300, 100, 290, 250], [[0], [3, 1], [4]], [192, 240, 144], seed=0)
XLA_CASES = {
    "8 bits": Case(batch=5, width=9, page_tokens=48, pages="float8_e4m3fn", scaled=True, cap=9.0),
    "latent": Case(batch=5, width=20, kv_heads=1, key=72, value=40, latent=True, sinks=True),
    "int4 by heads": Case(batch=5, width=20, pages=INT4, sinks=True),
}


@pytest.mark.parametrize("name", XLA_CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_xla_attends_by_the_definition(name: str, data: st.DataObject) -> None:
    case = XLA_CASES[name]
    check(case, data.draw(forests(case)), "xla")


@pytest.mark.parametrize("name", XLA_CASES)
def test_a_request_alone_sees_its_own_keys_if_groups_take_all_the_room(name: str) -> None:
    assert len(CROWDED.groups) == GROUPS
    check(XLA_CASES[name], CROWDED, "xla")


@pytest.mark.parametrize("name", XLA_CASES)
def test_what_a_group_shares_reaches_no_other_request(name: str) -> None:
    """Whatever it is: NaN here."""
    case = XLA_CASES[name]
    given, shared = share_pages(case, CROWDED)
    right = jax.tree.map(np.asarray, attend(given, shared, case, "xla"))
    for group in CROWDED.groups:
        pages, others = given.pages.copy(), np.setdiff1d(range(case.batch), group)
        pages[given.block_tables[group[0], 0]] = 0xFF if case.by_heads else math.nan
        found = attend(given._replace(pages=pages), shared, case, "xla")
        assert np.isnan(np.asarray(found[0], np.float32)[group]).any()
        for of_all, among_nan in zip(right, map(np.asarray, found), strict=True):
            np.testing.assert_array_equal(among_nan[others], of_all[others])


def test_each_request_that_shares_has_one_slot_in_the_tiles_of_its_group(monkeypatch) -> None:
    monkeypatch.setattr(shared_tiles, "tile_size", lambda _: 2)
    rule, batch = rule_of("all keys"), 9
    given = next(batches(rule, each_one=True))._replace(block_tables=np.zeros((batch, 4)))

    @jax.jit
    def tile(lens, *shared):
        arrays = given._replace(seq_lens=lens)
        parts = shared_tiles.tile_shared(arrays, rule, SharedPrefixes(*shared))
        return parts, shared_tiles.PackedRows.from_tiles(rule, parts)

    for seed in range(20):
        rng = np.random.default_rng(seed)
        cuts = np.sort(rng.integers(0, batch + 1, GROUPS))  # groups without members, too
        members, lens = rng.permutation(batch), rng.integers(0, 4 * STEP, batch)
        tokens = rng.integers(0, 4 * STEP, GROUPS)
        padded = np.where(np.arange(batch) < cuts[-1], members, -1)
        given_ids = map(as_ids, (lens, padded, cuts, tokens))
        found, packed = jax.tree.map(np.asarray, tile(*given_ids))
        slots, rows = {}, dict[int, int]()
        for group, of_group in enumerate(np.split(members, cuts)[:-1]):
            shared = max(0, min([tokens[group], *lens[of_group] - 1])) // STEP * STEP
            for member in of_group.tolist() if shared else ():
                at = slots[member] = int(found.request_tiles[member]), int(found.slots[member])
                assert found.requests[at] == member and at[1] < found.tiles.counts[at[0]]
                assert found.tiles.requests[at[0]] == of_group[0]
                assert found.lens[member] == found.tiles.ends[at[0]] == shared
                first = packed.first_rows[at[0]]
                assert first % 8 == 0 and first + 128 <= packed.requests.size
                for head in range(rule.group):
                    row = first + at[1] * shared_tiles.row_stride(rule) + head
                    assert (packed.requests[row], packed.heads[row]) == (member, head)
                    assert rows.setdefault(row, member) == member
        assert found.tiles.counts.sum() == len({*slots.values()}) == len(slots)
        alone = as_ids([request for request in range(batch) if request not in slots])
        assert (found.request_tiles[alone] == -1).all() and not found.lens[alone].any()


@pytest.mark.parametrize("latent", [False, True])
def test_a_tile_has_as_many_requests_as_fit_its_rows_and_at_least_one(latent: bool) -> None:
    rows = 64 if latent else 128
    for group in range(1, 2 * rows):
        rule = rule_of("all keys").replace(group=group, values_in_keys=latent)
        each = -(-group // 2) * 2
        fitting = [size for size in range(1, rows + 1) if size * each <= rows]
        assert shared_tiles.tile_size(rule) == max(fitting, default=1)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_splits_take_each_step_of_a_shared_part_once_and_are_equally_long(workers: int) -> None:
    rule, keys = rule_of("all keys").replace(group=3, kv_heads=2), 128
    zeros, forms = as_ids([0] * 4), list(batches(rule, each_one=True))

    @jax.jit
    def split(tables, lens, requests, counts, ends):
        given = forms[0]._replace(block_tables=tables, seq_lens=lens)
        of_tiles = requests, zeros, zeros, counts
        tiles = shared_tiles.QueryTiles(40, *of_tiles, *[zeros] * 4, ends, zeros, zeros)
        first_rows = jnp.arange(4) * 128
        splits = shared_tiles.split_shared(given, rule, tiles, first_rows, keys, workers)
        return *splits, has_holes(given, rule, tiles)

    num_holed = 0
    for seed in range(18):
        rng = np.random.default_rng(seed)
        requests, ends = rng.integers(0, 4, 4), rng.integers(0, 13, 4) * rng.integers(0, 2, 4) * 64
        counts = rng.integers(1, 40, 4)
        form = forms[seed % len(forms)]
        given = form.block_tables, form.seq_lens, *map(as_ids, (requests, counts, ends))
        found, spans, holed = map(np.asarray, split(*given))
        num_holed += (holed & (ends >= keys)).sum()
        steps = -(-ends // keys)
        each = max(1, -(-steps.sum() // workers))
        wanted = [
            PrefillTile(
                index=0,
                request=requests[tile],
                octet=tile * 16,
                count=counts[tile] * 4,
                end=ends[tile],
                first_step=first,
                full_begin=first,
                full_end=first if holed[tile] else min(first + each, ends[tile] // keys),
                last_step=min(first + each, steps[tile]),
                has_holes=bool(holed[tile]),
                num_tiles=0,
                heads_together=2,
                **dict.fromkeys(("skip", "position", "chunk_offset", "rank", "begin"), 0),
                first_row=FIRST_ROW,
            )
            for tile in range(4)
            for first in range(0, steps[tile], each)
        ]
        wanted = [row._replace(index=i, num_tiles=len(wanted)) for i, row in enumerate(wanted)]
        assert len(wanted) <= len(found) == 4 + workers
        assert found[: len(wanted)].tolist() == [list(map(int, row)) for row in wanted]
        assert (found[:, PrefillTile._fields.index("num_tiles")] == len(wanted)).all()
        numbers = -(-steps // each)
        assert spans.tolist() == np.stack([np.cumsum(numbers) - numbers, numbers], axis=1).tolist()
    assert num_holed > 1


LATENT = Case(
    *(8, 1, 192, 128), batch=3, width=7, page_tokens=32, latent=True, sinks=True, scaled=True
)
SMALL = Case(batch=4, width=14, page_tokens=16, heads=6, kv_heads=2, sinks=True, scaled=True)
# An odd number of heads, groups of more requests than a tile has, a step that is partly shared, and
# one that shares nothing.
FOREST = Forest([200, 0, 195, 199], [[3, 0, 2], [1]], [194, 0], seed=1)


@pytest.fixture
def small_gpu(monkeypatch) -> None:
    """A GPU of few thread blocks, and tiles of few requests."""
    interpret_on_a_small_gpu(monkeypatch)
    monkeypatch.setattr(shared_tiles, "tile_size", lambda _: 2)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.usefixtures("small_gpu")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of poison
def test_mosaic_attends_by_the_definition_in_interpret_mode() -> None:
    check(SMALL, FOREST, "mosaic_gpu")


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@pytest.mark.skipif(not HAS_LATE_BARRIERS, reason="interpret mode of jax 0.11 refuses its barriers")
@needs_mosaic
@pytest.mark.usefixtures("small_gpu")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of poison
def test_mosaic_attends_to_latents_by_the_definition_in_interpret_mode() -> None:
    # The first request has no hole: a step of its own part has no mask.
    check(LATENT, Forest([200, 70, 131], [[0, 2]], [128], seed=1), "mosaic_gpu")


GPU_CASES = {
    "bf16": Case(batch=40, width=60, heads=32, kv_heads=8, key=128, value=128, sinks=True),
    "odd": Case(batch=9, width=60, heads=6, kv_heads=2, key=80, value=80, page_tokens=48),
    "8 bits": Case(
        batch=20, width=60, heads=16, kv_heads=2, key=256, value=256, pages="float8_e4m3fn"
    ),
    "int8": Case(batch=9, width=20, heads=12, kv_heads=1, pages="int8", scaled=True, cap=9.0),
    "int4 by heads": Case(
        batch=20, width=60, heads=32, kv_heads=8, key=128, value=128, pages=INT4, sinks=True
    ),
    "int8 by heads": Case(batch=9, width=20, heads=12, kv_heads=2, pages=INT8, cap=9.0),
    "latent": Case(
        batch=12, width=40, heads=16, kv_heads=1, key=576, value=512, latent=True, sinks=True
    ),
    "packed": Case(
        *(16, 1, 576, 512), batch=5, width=20, page_tokens=64, latent=True, pages=PACKED
    ),
    "latent, 8 bits": Case(
        *(32, 1, 576, 512), batch=5, width=20, page_tokens=64, latent=True, pages="float8_e4m3fn"
    ),
}


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in interpret mode; on a GPU")
@needs_mosaic
@pytest.mark.parametrize("name", GPU_CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_mosaic_attends_by_the_definition(name: str, data: st.DataObject) -> None:
    case = GPU_CASES[name]
    check(case, data.draw(forests(case)), "mosaic_gpu")


@needs_mosaic
@pytest.mark.parametrize("heads", [32, 33])
def test_latents_of_many_heads_are_read_for_each(heads: int) -> None:
    struct: Any = jax.ShapeDtypeStruct
    ids = functools.partial(struct, dtype=jnp.int32)
    shared = SharedPrefixes(ids((8,)), ids((2,)), ids((2,)))

    def attend(queries, pages, tables, lens, shared):
        options: Any = {"value_width": 512, "implementation": "mosaic_gpu"}
        return calls.attend(queries, pages, tables, lens, shared_prefixes=shared, **options)

    queries = struct((8, heads, 576), jnp.bfloat16)
    pages = struct((99, 64, 1, 576), jnp.bfloat16)
    text = lower(attend, [queries, pages, ids((8, 64)), ids((8,)), shared])
    assert text.count("custom_call @mosaic_gpu") == (3 if heads == 32 else 2)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sliding_window", 4),
        ("chunk_size", 4),
        ("causal", False),
        ("interleaving", Interleaving(0, 2, 4)),
        ("reproducible", True),
        ("query_start_loc", np.array([0, 1, 2, 3], np.int32)),
    ],
)
def test_what_does_not_go_with_sharing_is_refused(argument: str, value: Any) -> None:
    given = make(Case(), [3, 2, 1], None)
    nothing = SharedPrefixes(*(as_ids(array) for array in ([-1] * 3, [0], [0])))
    with pytest.raises(ValueError, match=f"shared_prefixes does not go with {argument}"):
        calls.attend(*given[:4], **{"shared_prefixes": nothing, argument: value})


@pytest.mark.parametrize(("members", "groups"), [(0, 0), (0, 2), (3, 0)])
def test_without_room_for_a_group_or_a_member_nothing_is_shared(members: int, groups: int) -> None:
    given = make(Case(), [3, 2, 1], None)
    room = SharedPrefixes(*(as_ids([0] * size) for size in (members, groups, groups)))
    call = jax.jit(calls.attend)
    found, wanted = (call(*given[:4], shared_prefixes=shared) for shared in (room, None))
    np.testing.assert_array_equal(found, wanted)
