"""Attention over pages against its definition in float64, with poison where no query looks.

On a machine without a GPU the Mosaic kernels run in interpret mode, and are lowered for CUDA.
"""

import functools
import itertools
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxkv.testing import assert_same_bytes
from pallas_kernels import (
    AttentionRule,
    Interleaving,
    PackedRow,
    RequestPages,
    SharedPrefixes,
    StridedPages,
    TokenHeadRow,
    _capability,
    paged_attention,
)
from pallas_kernels._paged_attention import xla
from tests.helpers import (
    HAS_LATE_BARRIERS,
    ON_GPU,
    as_ids,
    interpret_as,
    needs_mosaic,
    skip_without,
)
from tests.kernels import calls
from tests.reference_attention import (
    PACKED,
    Case,
    attend,
    check,
    check_output,
    interpret_copies_of_rows,
    interpret_on_a_small_gpu,
    make,
    quietly,
    strided,
    unpack,
)
from tests.reference_token_heads import BY_HEADS

INT8, FP8_HEADS, INT4 = BY_HEADS
LATENTS = Case(heads=8, kv_heads=1, key=192, value=128, latent=True)
PLACES = ("NHD in an array", "HND in an array", "NHD", "HND", "heads apart")


@needs_mosaic
@pytest.mark.parametrize("place", PLACES)
def test_rows_of_strided_pages_lie_where_kernels_look(place: str) -> None:
    from pallas_kernels._paged_attention.mosaic import step_sizes

    shape, ids = (3, 8, 2, 4), np.array([[2, 0], [1, 1]])
    array = as_ids(range(math.prod(shape))).reshape(shape)
    block, token, head = np.indices(shape[:3])

    @jax.jit
    def look(array: jax.Array) -> Any:
        pages = strided(array, place)
        assert isinstance(pages, StridedPages) and pages.rows_per_extent
        arrays: Any = types.SimpleNamespace(pages=pages, block_tables=np.zeros((1, 5)))
        steps = step_sizes(arrays, 64)
        assert (steps.page_tokens, steps.num_pages, steps.width) == (8, 3, 5)
        first, column = steps.head(pages.first_row(), as_ids(head))
        return pages.rows(), first + block * steps.page_rows + token, column, pages.read(ids)

    rows, index, column, read = map(np.asarray, look(array))
    columns = column[..., None] + np.arange(shape[-1])
    np.testing.assert_array_equal(np.take_along_axis(rows[index], columns, axis=-1), array)
    np.testing.assert_array_equal(read, array[ids])


@needs_mosaic
@pytest.mark.parametrize("case", [Case(), LATENTS], ids=["keys and values", "latents"])
@pytest.mark.parametrize(("before", "after"), [(1, 15), (0, 1), (2, 14), (8, 0), (0, 8)])
def test_mosaic_takes_pages_among_whole_groups_of_8_rows_only(
    before: int, after: int, case: Case
) -> None:
    """Before and after each page lie so many half rows."""
    given = make(case, [70, 40, 128], None)
    array = given.pages
    row_bytes = 2 * case.row * case.kv_heads
    widths = [(0, 0), (before * row_bytes // 2, after * row_bytes // 2)]
    data = np.pad(array.reshape(len(array), -1).view(np.uint8), widths, constant_values=0xFF)
    pages = StridedPages(jnp.array(data), array.dtype, *array.shape, start=widths[1][0])
    assert_same_bytes(jax.jit(lambda: pages.read(np.arange(len(array))))(), array)
    with pytest.raises(NotImplementedError, match="between them, are not multiples of 8 rows"):
        calls.attend(
            *(given.queries, pages, *given[2:4]),
            value_width=case.value,
            implementation="mosaic_gpu",
        )


at_once = jax.jit(calls.attend, static_argnames=("return_lse", "out_dtype"))  # in one program


@st.composite
def batches(draw: st.DrawFn, case: Case) -> tuple[list[int], list[int] | None, int]:
    """Draws lengths, where queries begin, and a seed."""
    ends = [0, 1, 63, 64, 65, case.longest]
    length = st.sampled_from(ends) | st.integers(0, case.longest)
    lens = [min(draw(length), case.longest) for _ in range(case.batch)]
    seed = draw(st.integers(0, 2**16))
    if not case.tokens:
        return lens, None, seed
    loc = [0]
    for length in lens:
        room = min(length, case.tokens - loc[-1])
        loc.append(loc[-1] + draw(st.integers(0, room) | st.just(min(room, 4))))
    return lens, loc, seed


KEYS_AT_ONCE = 32  # of XLA, so that a request takes several rounds


@pytest.fixture(scope="module", autouse=True)
def several_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "KEYS_AT_ONCE", KEYS_AT_ONCE)
        yield


XLA_CASES = {
    "f32": Case(tokens=9, pages="float32", queries="float32", key=20, value=12, sinks=True),
    "f32 over bf16": Case(tokens=5, pages="bfloat16", queries="float32", window=KEYS_AT_ONCE),
    "window in chunks": Case(
        tokens=40,
        window=21,
        chunk=33,
        pages="float16",
        queries="float16",
        firsts=True,
        place="HND in an array",
    ),
    "chunk": Case(tokens=40, chunk=40, heads=3, kv_heads=1, cap=5.0, scaled=True, firsts=True),
    "fp8_e4m3": Case(tokens=40, pages="float8_e4m3fn", scaled=True, sinks=True, holes=True),
    "fp8_e5m2": Case(pages="float8_e5m2", queries="float16", scaled=True, place="NHD in an array"),
    "int8": Case(tokens=20, pages="int8", scaled=True, cap=30.0, window=70, place="heads apart"),
    "all keys, bf16 over f32": Case(
        *(8, 2, 64, 32, 12), tokens=90, pages="float32", causal=False, place="HND"
    ),
    "interleaved": Case(tokens=40, ranks=2, sinks=True, place="NHD"),
    "latent": Case(tokens=20, kv_heads=1, key=72, value=40, latent=True, place="heads apart"),
    "packed": Case(tokens=20, kv_heads=1, key=264, value=256, latent=True, pages=PACKED),
    "reproducible": Case(
        *(2, 1),
        tokens=20,
        window=KEYS_AT_ONCE,
        chunk=72,
        firsts=True,
        holes=True,
        reproducible=True,
    ),
    "int8 per token and head": Case(
        *(6, 3), tokens=40, key=12, value=20, pages=INT8, sinks=True, holes=True, scaled=True
    ),
    "fp8 per token and head": Case(
        *(2, 1), tokens=20, pages=FP8_HEADS, queries="float16", window=21, firsts=True, place="NHD"
    ),
    "int4 per token and head": Case(
        *(8, 4), key=40, tokens=20, pages=INT4, queries="float32", cap=9.0, place="heads apart"
    ),
    "int4, reproducible": Case(tokens=20, chunk=40, pages=INT4, firsts=True, reproducible=True),
    "packed, f32": Case(
        *(2, 1, 136, 128), latent=True, pages=PACKED, queries="float32", place="HND", scaled=True
    ),
}


@pytest.mark.parametrize("name", XLA_CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_xla_attends_by_the_definition(name: str, data: st.DataObject) -> None:
    case = XLA_CASES[name]
    lens, loc, seed = data.draw(batches(case))
    check(case, make(case, lens, loc, seed), "xla")


MOSAIC_CASES = {
    "decode": Case(),
    "mixed": Case(tokens=90, heads=8, value=128),
    "window in chunks": Case(
        tokens=40, window=21, chunk=33, pages="float16", queries="float16", sinks=True
    ),
    "chunk": Case(tokens=40, chunk=24, heads=3, kv_heads=1, cap=5.0, scaled=True),
    "fp8_e4m3": Case(tokens=20, pages="float8_e4m3fn", scaled=True, sinks=True),
    "fp8_e5m2": Case(pages="float8_e5m2", queries="float16", key=128, scaled=True),
    "int8": Case(tokens=20, pages="int8", scaled=True, cap=30.0, window=70),
    "pages of 272": Case(page_tokens=272, width=2, heads=10, key=192, value=128),
    "pages of 8": Case(page_tokens=8, width=20, key=256, value=256, heads=16, kv_heads=1),
    "holes": Case(holes=True, tokens=9, sinks=True),
    "long": Case(width=600, batch=2, heads=2, sinks=True),
    "prefill": Case(tokens=320, width=20, heads=4, key=128, value=128, sinks=True),
    "prefill, window": Case(tokens=328, width=20, heads=2, window=70, key=128, scaled=True),
    "prefill, window in chunks": Case(tokens=200, width=20, window=70, chunk=99, firsts=True),
    "prefill, chunk": Case(tokens=200, width=3, page_tokens=80, chunk=64, cap=9.0, scaled=True),
    "prefill, holes": Case(tokens=200, width=20, holes=True, pages="float16", queries="float16"),
    "prefill in fp8": Case(tokens=320, width=20, key=128, value=128, pages="float8_e4m3fn"),
    "prefill in int8": Case(tokens=320, width=20, pages="int8", scaled=True, place="NHD"),
    "all keys": Case(tokens=200, width=20, causal=False, place="HND"),
    "chunk, from its middle on": Case(tokens=200, width=20, chunk=72, firsts=True, place="NHD"),
    "window, from a table on": Case(window=21, firsts=True, pages="int8", place="HND in an array"),
    "interleaved": Case(tokens=200, width=12, ranks=2, sinks=True, place="heads apart"),
    "80 wide": Case(key=80, value=80, heads=8, sinks=True),
    "80 wide, 40 heads": Case(40, 1, 80, 80, batch=1, width=600, scaled=True),
    "80 wide, long": Case(4, 1, 80, 80, batch=1, width=600, scaled=True),
    "112 wide, long": Case(tokens=9, key=112, value=112, holes=True, width=600, batch=2),
    "240 and 176 wide": Case(tokens=9, key=240, value=176, heads=2),
    "prefill, 80 wide": Case(tokens=200, width=20, key=80, value=80, window=70, place="HND"),
    "prefill, 96 wide": Case(tokens=203, width=40, key=96, value=96, sinks=True, page_tokens=8),
    "prefill, 192 and 128 wide": Case(tokens=328, width=20, heads=2, key=192, value=128, cap=9.0),
    "prefill, 256 wide": Case(tokens=323, width=20, key=256, value=256, sinks=True),
    "prefill, 256 wide, window": Case(
        *(2, 1, 256, 256, 8), tokens=200, width=40, window=70, scaled=True
    ),
    "prefill, 256 wide in int8": Case(
        tokens=203, width=20, key=256, value=256, pages="int8", scaled=True, place="NHD"
    ),
    "prefill in pieces": Case(tokens=200, width=300, heads=4, key=128, value=128, sinks=True),
    "prefill in pieces, window": Case(tokens=130, width=300, heads=2, window=2300, scaled=True),
    "prefill in pieces, 80 wide": Case(
        tokens=99, width=300, key=80, value=80, holes=True, scaled=True
    ),
    "prefill in pieces, fp8": Case(tokens=90, width=300, pages="float8_e4m3fn", scaled=True),
    "prefill in pieces, 256 wide": Case(
        tokens=150, width=300, heads=2, key=256, value=256, cap=9.0
    ),
    "prefill in pieces, interleaved": Case(tokens=90, width=300, heads=8, ranks=2, holes=True),
    "prefill of few": Case(*(2, 1, 128, 128), tokens=65, width=20, window=70),
    "int8 by heads": Case(tokens=20, pages=INT8, scaled=True, cap=30.0, window=70, kv_heads=4),
    "int8 by heads, 128 wide": Case(32, 8, 128, 128, pages=INT8, holes=True, sinks=True),
    "fp8 by heads": Case(8, 1, 128, 256, pages=FP8_HEADS, tokens=9, width=100, batch=2),
    "fp8 by heads in float16": Case(12, 3, pages=FP8_HEADS, queries="float16", place="NHD"),
    "int4 by heads": Case(16, 2, 256, 256, pages=INT4, tokens=9, holes=True, sinks=True),
    "int4 by heads, 64 wide": Case(64, 8, pages=INT4, width=100, batch=2, queries="float16"),
    "prefill in int4 by heads": Case(16, 4, 128, 128, tokens=200, width=20, pages=INT4, chunk=99),
    "reproducible in int4 by heads": Case(
        8, 2, tokens=200, width=100, window=70, firsts=True, pages=INT4, reproducible=True
    ),
    "reproducible": Case(tokens=9, width=100, reproducible=True, holes=True, sinks=True),
    "reproducible prefill": Case(tokens=200, width=100, key=128, value=128, reproducible=True),
    "reproducible window": Case(
        tokens=200, width=100, window=70, firsts=True, pages="int8", reproducible=True
    ),
}
# Small enough for interpret mode, which takes seconds for each.
FP8 = Case(2, 1, page_tokens=32, width=5, tokens=8, pages="float8_e4m3fn", scaled=True, holes=True)
FP8 = FP8._replace(most=2)  # some have more
INTERLEAVED = Case(
    1, 1, 256, batch=1, page_tokens=96, width=4, tokens=72, ranks=2, pages="int8", place="HND"
)
WIDE = Case(4, 2, 80, 96, page_tokens=16, width=12, tokens=84, sinks=True, window=30, holes=True)
WIDE = WIDE._replace(chunk=115, firsts=True, scaled=True, cap=4.0)  # two tables begin in a chunk
PIECES = Case(1, 1, 64, 80, batch=2, page_tokens=32, width=8, tokens=75, sinks=True, holes=True)
INTERPRETED = {
    "decode": (
        Case(batch=2, page_tokens=32, width=16, heads=2, kv_heads=1, holes=True, low=True),
        [512, 0],
        None,
    ),
    # Of the last 8 rows, 4 are of no head. The fourth of five tiles is divided.
    "speculation by 20 heads of each, 80 wide": (
        Case(40, 2, 80, 80, width=12, tokens=5, sinks=True, window=130),
        [180, 50, 128],
        [0, 1, 3, 5],
    ),
    "speculation in fp8": (FP8, [130, 70, 0], [0, 4, 6, 6]),
    # All queries see the keys of its first step. A thread block takes two steps, and has room for
    # the values of one, of which the last ones are of no token.
    "int8 of 2 heads": (
        Case(4, 2, batch=2, page_tokens=32, width=5, pages=INT8, holes=True),
        [130, 70],
        None,
    ),
    "fp8 of 3 heads": (
        Case(6, 3, batch=2, page_tokens=16, width=9, tokens=4, pages=FP8_HEADS, sinks=True),
        *([130, 70], [0, 3, 4]),
    ),
    "speculation in int4": (
        Case(2, 1, 128, 64, 16, 2, 5, tokens=4, pages=INT4, window=60),
        [70, 3],
        [0, 2, 3],
    ),
    # There is room for the four widened pages of one of two prompts.
    "a decode and two prefills in int4": (
        Case(2, 1, page_tokens=32, width=5, tokens=70, pages=INT4, window=75, holes=True),
        *([40, 155, 130], [0, 1, 21, 70]),
    ),
    "a prefill in fp8": (INTERLEAVED._replace(pages="float8_e4m3fn"), [700], [0, 70]),
    # Ten see no key, and add up the values of 28 that others see.
    "a prefill of more queries than tokens": (
        INTERLEAVED._replace(heads=2, key=64, pages="bfloat16", sinks=True, huge=1.3e37),
        *([60], [0, 70]),
    ),
    "reproducible prefill in two rounds": (
        # The last tile begins with the second segment, and the one before lies in both.
        Case(1, 1, batch=2, page_tokens=32, width=5, tokens=66, reproducible=True, window=15),
        [160, 40],
        [0, 64, 66],
    ),
    # The first step of the last one ends with a key that is seen.
    "a decode and two prefills, 80 and 96 wide": (WIDE, [120, 41, 312], [0, 1, 21, 82]),
    # The rows of the first one are moved back, because the second warpgroup has no others.
    "prefills in pieces": (PIECES, [70, 250], [0, 2, 67]),
}

# By the kernels of other GPUs: mma, and copies by cp.async.
INTERPRETED_AS = [
    ("decode", (8, 0)),
    ("speculation in fp8", (8, 0)),
    ("prefills in pieces", (10, 0)),
    ("a prefill of more queries than tokens", (8, 0)),
    ("a decode and two prefills, 80 and 96 wide", (10, 0)),
    ("a prefill in fp8", (10, 0)),
]


def some_batches(case: Case) -> list[tuple[list[int], list[int] | None, int]]:
    """Returns lengths around the ends of pages and steps, none, and all that fits."""
    given = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = [[0, 65, case.longest], [case.longest] * 3, [1, 64, 0]][seed][: case.batch]
        lens = [min(length, case.longest) for length in ends]
        loc = [0]
        for length in lens:
            count = rng.integers(0, min(length, case.tokens - loc[-1]) + 1) if case.tokens else 0
            loc.append(loc[-1] + int(count))
        given.append((lens, loc if case.tokens else None, seed))
    return given


MLA = Case(heads=128, kv_heads=1, key=576, value=512, latent=True)
ROWS = MLA._replace(page_tokens=1, width=300, holes=True, sinks=True)
LATENT_CASES = {
    "decode": MLA._replace(page_tokens=64, width=4),
    "16 heads, speculation": MLA._replace(heads=16, tokens=12, width=20, sinks=True),
    "pages of 8 in float16": MLA._replace(
        page_tokens=8, width=20, queries="float16", pages="float16"
    ),
    "holes and a cap": MLA._replace(heads=64, holes=True, tokens=9, page_tokens=32, cap=30.0),
    "speculation with scales": MLA._replace(tokens=9, width=20, scaled=True),
    "window": MLA._replace(heads=32, window=70, page_tokens=48, width=6, tokens=30),
    "chunk": MLA._replace(heads=32, chunk=48, width=20, tokens=30),
    "many steps": MLA._replace(heads=16, batch=2, width=600, sinks=True),
    "interleaved": MLA._replace(heads=64, ranks=2, tokens=9, page_tokens=32),
    "encoder": MLA._replace(heads=64, causal=False, tokens=9, page_tokens=32),
    "among other layers": MLA._replace(heads=64, place="heads apart"),
    "narrow rows": MLA._replace(heads=80, key=192, value=128, width=20),
    "fp8_e4m3": MLA._replace(page_tokens=64, width=4, pages="float8_e4m3fn", scaled=True),
    "fp8_e4m3, speculation": MLA._replace(tokens=9, width=20, pages="float8_e4m3fn", holes=True),
    "fp8_e4m3, many steps": MLA._replace(heads=16, batch=2, width=600, pages="float8_e4m3fn"),
    "fp8_e5m2, window": MLA._replace(heads=32, window=70, tokens=30, pages="float8_e5m2"),
    "int8, among other layers": MLA._replace(
        heads=64, pages="int8", scaled=True, place="heads apart"
    ),
    "packed": MLA._replace(page_tokens=64, width=4, pages=PACKED),
    "packed, speculation": MLA._replace(tokens=9, width=20, pages=PACKED, holes=True, sinks=True),
    "packed, many steps": MLA._replace(heads=16, batch=2, width=600, pages=PACKED),
    "packed, window": MLA._replace(heads=32, window=70, tokens=30, page_tokens=48, pages=PACKED),
    "reproducible": MLA._replace(tokens=9, width=300, reproducible=True, sinks=True),
    "reproducible, window": MLA._replace(tokens=9, width=300, reproducible=True, window=3000),
    "packed, among other layers": MLA._replace(
        heads=64, page_tokens=8, width=20, pages=PACKED, place="heads apart"
    ),
    "rows": ROWS,
    "rows, speculation": ROWS._replace(heads=16, tokens=12, scaled=True, holes=False),
    "rows, window": ROWS._replace(heads=32, window=70, tokens=30, place="heads apart"),
    "rows, reproducible": ROWS._replace(heads=8, tokens=9, width=3000, reproducible=True),
    "rows of one token": ROWS._replace(heads=16, width=3000),
    "rows, packed": ROWS._replace(pages=PACKED, width=3000),
    "rows, packed, speculation": ROWS._replace(heads=40, pages=PACKED, tokens=9),
}
# Small enough for interpret mode, which takes seconds for each.
NARROW = MLA._replace(heads=8, key=192, value=128, page_tokens=32, width=5, sinks=True)
# Two tiles of a request with a hole in its second step, one of a request with one in its first, and
# one whose first query sees no key of the rank.
SPECULATION = NARROW._replace(
    heads=15, cap=9.0, batch=3, tokens=10, width=4, holes=True, scaled=True, sinks=False
)
SPECULATION = SPECULATION._replace(ranks=2, place="NHD", pages="float8_e4m3fn")
ONE = NARROW._replace(batch=1, width=3)
# The second thread block has heads of the second token, which alone sees the last key.
PAIRS = NARROW._replace(heads=40, batch=1, tokens=2, page_tokens=16)
# Three splits, which are added up in two rounds; the first one begins in its middle, and the
# second one has a hole.
REPRODUCIBLE = ONE._replace(width=13, batch=3, window=200, reproducible=True, holes=True)
INTERPRETED_LATENTS = {
    "speculation in fp8, interleaved, holes": (SPECULATION, [150, 100, 5], [0, 5, 6, 8], 345),
    "two thread blocks that load together": (PAIRS, [65], [0, 2], 0),
    "packed": (
        ONE._replace(pages=PACKED, key=576, value=512, tokens=4, window=20),
        *([70], [0, 1], 0),
    ),
    "reproducible": (REPRODUCIBLE, [410, 30, 90], None, 0),
    # A step of no rows, and one of which all are seen.
    "rows": (
        NARROW._replace(page_tokens=1, width=200, batch=3, tokens=4, holes=True, place="NHD"),
        *([180, 3, 70], [0, 2, 3, 4], 0),
    ),
    # The steps of thread blocks are fixed, and some have nothing to do.
    "rows of one token": (
        NARROW._replace(page_tokens=1, width=200, batch=4, holes=True, place="NHD"),
        *([70, 0, 190, 3], None, 0),
    ),
}
INTERPRETED_LATENTS_AS = [
    ("speculation in fp8, interleaved, holes", (8, 0)),
    ("two thread blocks that load together", (10, 0)),  # there two warpgroups
    ("packed", (10, 0)),
    ("rows", (8, 0)),
]
# Barriers of two thread blocks, or ones at which nobody waits for the last arrival.
WITH_LATE_BARRIERS = ("two thread blocks that load together", "reproducible")
MOSAIC_CASES |= {f"latents, {name}": case for name, case in LATENT_CASES.items()}


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in interpret mode; on a GPU")
@needs_mosaic
@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_mosaic_attends_by_the_definition(name: str) -> None:
    case = MOSAIC_CASES[name]
    for lens, loc, seed in some_batches(case):
        check(case, make(case, lens, loc, seed), "mosaic_gpu")


@quietly
@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.parametrize(
    ("name", "capability"), [*((name, (9, 0)) for name in INTERPRETED), *INTERPRETED_AS]
)
def test_mosaic_attends_by_the_definition_in_interpret_mode(
    name: str, capability: tuple[int, int], monkeypatch
) -> None:
    from pallas_kernels._paged_attention import (
        decode_shape,
        prefill_mma_shape,
        prefill_tasks,
        rounds,
        tasks,
        widened,
    )
    from pallas_kernels._paged_attention.decode_shape import DecodeShape

    interpret_as(capability, monkeypatch)
    if capability == (8, 0):  # as for heads too wide to interpret
        monkeypatch.setattr(prefill_mma_shape, "KEYS", prefill_mma_shape.FEWER_KEYS)
    thread_blocks = interpret_on_a_small_gpu(monkeypatch)
    monkeypatch.setattr(decode_shape, "MAX_ROWS", 16)
    monkeypatch.setattr(tasks, "SPLIT", 2)  # of reproducible attention
    monkeypatch.setattr(rounds, "WORKSPACE", 20_000)
    monkeypatch.setattr(widened, "WORKSPACE", 40_960)
    monkeypatch.setattr(prefill_tasks, "CACHED_BYTES", 0)  # one KV head after another
    monkeypatch.setattr(prefill_tasks, "LEAST_STEPS", 1)
    monkeypatch.setattr(DecodeShape, "num_workers", thread_blocks)
    case, lens, loc = INTERPRETED[name]
    given = make(case, lens, loc, seed=16 if case.firsts else 0)
    if case.firsts:
        assert np.count_nonzero(given.first_positions % case.chunk) == 2
    check(case, given, "mosaic_gpu")


@quietly
@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.parametrize(
    ("name", "capability"),
    [*((name, (9, 0)) for name in INTERPRETED_LATENTS), *INTERPRETED_LATENTS_AS],
)
def test_mosaic_attends_to_latents_in_interpret_mode(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels._paged_attention import decode_shape, rounds, tasks

    monkeypatch.setattr(decode_shape, "MAX_ROWS", 32)
    if name in WITH_LATE_BARRIERS and not HAS_LATE_BARRIERS:
        pytest.skip("interpret mode of jax 0.11 refuses such barriers")
    interpret_as(capability, monkeypatch)
    interpret_on_a_small_gpu(monkeypatch, thread_blocks=2)
    interpret_copies_of_rows(monkeypatch)
    monkeypatch.setattr(tasks, "LATENT_SPLIT", 2)  # of reproducible attention
    monkeypatch.setattr(rounds, "WORKSPACE", 300_000)  # two tiles at a time
    case, lens, loc, seed = INTERPRETED_LATENTS[name]
    check(case, make(case, lens, loc, seed), "mosaic_gpu")


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
def test_many_splits_are_added_up_by_several_warpgroups_in_several_rounds(monkeypatch) -> None:
    from pallas_kernels import _mosaic
    from pallas_kernels._paged_attention import combine

    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    monkeypatch.setattr(combine, "MANY", 2)
    # About six splits a tile, so that each warpgroup loads two at a time.
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 10)
    case = Case(batch=2, page_tokens=32, width=24, heads=1, kv_heads=1, sinks=True)
    given = make(case, [768, 0], None)
    check(case, given._replace(sinks=np.full(1, -math.inf, np.float32)), "mosaic_gpu")


@needs_mosaic
@pytest.mark.parametrize("value_width", [64, 128, 192, 256])
def test_thread_blocks_that_combine_cover_all_columns_and_load_at_most_1024(value_width) -> None:
    """Of a row, over all splits: more do not fit into the registers of a warpgroup."""
    from pallas_kernels._paged_attention.combine import _Division

    for workers, tiles in itertools.product((1, 8, 15, 66, 132, 528), (1, 2, 7, 64, 4096)):
        split = _Division.choose(value_width, workers, tiles)
        assert value_width % split.width == 0
        assert split.together * split.width <= 1024
        assert split.together >= 2, "a tile that is not whole has two"
        assert split.warpgroups == (4 if workers > 15 * tiles else 1)


class Shape(NamedTuple):
    """Arguments of models that are lowered, and the launches that they take."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    page_tokens: int
    pages: str
    launches: int
    value: int = 0  # width of values; 0: as wide as keys
    most: int | None = None  # queries of a request

    @property
    def row(self) -> int:
        return self.width + (self.value or self.width)

    def arguments(self, per_request: bool) -> list[jax.ShapeDtypeStruct]:
        struct, ids = jax.ShapeDtypeStruct, jnp.int32
        loc = [] if per_request else [struct((self.batch + 1,), ids)]
        return [
            struct((self.tokens, self.heads, self.width), jnp.bfloat16),
            struct((999, self.page_tokens, self.kv_heads, self.row), self.pages),
            struct((self.batch, 64), ids),
            struct((self.batch,), ids),
            *loc,
        ]


PLAIN = Shape(64, 64, 32, 8, 128, 16, "bfloat16", 2)
NARROW = Shape(8, 1024, 16, 1, 64, 48, "bfloat16", 4)
# Those of prompts have a kernel for decodes, too, and one for pieces of long prompts if tables are
# long enough; `PLAIN` and `NARROW` are lowered below.
SHAPES = [
    Shape(8, 1024, 32, 8, 128, 16, "float8_e5m2", 3),
    Shape(8, 1023, 16, 2, 256, 8, "bfloat16", 3),
    Shape(8, 1024, 16, 2, 256, 16, "int8", 4),
    Shape(8, 1024, 8, 8, 192, 16, "bfloat16", 3, value=128),
    Shape(8, 1024, 32, 8, 112, 16, "bfloat16", 3),
    Shape(8, 8, 16, 2, 96, 544, "bfloat16", 2),
    Shape(128, 1024, 40, 8, 128, 16, "bfloat16", 2, most=8),
]


def lower(function: Any, arguments: list[jax.ShapeDtypeStruct], platform: str = "cuda") -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_shapes_of_models_lower_for_cuda(shape: Shape) -> None:
    attend = functools.partial(
        calls.attend, implementation="mosaic_gpu", sliding_window=99, max_query_len=shape.most
    )
    if shape.launches > 2:
        skip_without("prefill")
    text = lower(attend, shape.arguments(per_request=shape.tokens == shape.batch))
    assert text.count("custom_call @mosaic_gpu") == shape.launches
    # The pages go straight to kernels: nothing else has as many elements.
    pages = f"tensor<999x{shape.page_tokens}x{shape.kv_heads}x{shape.row}x"
    users = [line for line in text.splitlines() if pages in line and "func" not in line]
    assert users and all("reshape" in line or "call" in line for line in users)


def structs(case: Case, tokens: int, batch: int) -> list[Any]:
    struct, ids = jax.ShapeDtypeStruct, jnp.int32
    loc = [struct((batch + 1,), ids)] if tokens != batch else []
    packed = case.pages == PACKED
    return [
        struct((tokens, case.heads, case.key), case.queries),
        struct((999, case.page_tokens, 1, case.row), "uint8" if packed else case.pages),
        struct((batch, 64), ids),
        struct((batch,), ids),
        *loc,
    ]


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "tokens", "page_tokens", "pages"),
    [(16, 32, 16, "bfloat16"), (128, 32, 64, "float8_e4m3fn"), (128, 8, 64, PACKED)],
)
def test_the_shapes_of_latents_lower_for_cuda(
    heads: int, tokens: int, page_tokens: int, pages: str
) -> None:
    case = MLA._replace(heads=heads, page_tokens=page_tokens, pages=pages)
    call = functools.partial(
        calls.attend,
        value_width=512,
        row_packing=PACKED if pages == PACKED else None,
        implementation="mosaic_gpu",
    )
    text = lower(call, structs(case, tokens, batch=8))
    assert text.count("custom_call @mosaic_gpu") == 2
    # The pages go straight to the kernel: nothing else has as many elements.
    shape = f"tensor<999x{page_tokens}x1x{case.row}x"
    users = [line for line in text.splitlines() if shape in line and "func" not in line]
    assert users and all("reshape" in line or "call" in line for line in users)


@needs_mosaic
def test_the_kernels_count_in_int32_under_x64_too() -> None:
    attend = functools.partial(calls.attend, implementation="mosaic_gpu")
    with jax.enable_x64(True):
        text = lower(attend, NARROW.arguments(per_request=False))
    assert text.count("custom_call @mosaic_gpu") == NARROW.launches


@needs_mosaic
@pytest.mark.usefixtures("hopper")
def test_without_a_choice_the_device_of_a_program_decides(monkeypatch) -> None:
    monkeypatch.setattr(_capability, "compute_capability", lambda: (9, 0))
    arguments = PLAIN.arguments(per_request=True)
    assert lower(calls.attend, arguments).count("custom_call @mosaic_gpu") == PLAIN.launches
    assert "mosaic_gpu" not in lower(calls.attend, arguments, "cpu")
    arguments[0] = jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)
    assert "mosaic_gpu" not in lower(calls.attend, arguments)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(queries="float32"), "queries are float32, and the kernels take bfloat16"),
        (Case(pages="float16"), "pages are float16 and queries bfloat16"),
        (Case(value=72), "keys are 64 wide and values 72, and the kernels take multiples of 16 in"),
        (Case(value=272), "keys are 64 wide and values 272, and the kernels take widths from 64"),
        (Case(key=48), "keys are 48 wide and values 64, and the kernels take widths from 64"),
        (Case(value=96, pages="int8"), "keys are 64 wide and values 96, .* multiples of 64"),
        (Case(key=72), "keys are 72 wide and values 64, and the kernels take multiples of 16 in"),
        (
            Case(key=96, pages="int8"),
            "keys are 96 wide and values 64, and the kernels take multiples of 64 in pages of 8",
        ),
        (Case(key=272), "keys are 272 wide and values 64, and the kernels take widths from 64"),
        (Case(value=48), "keys are 64 wide and values 48, and the kernels take widths from 64"),
        (
            Case(heads=65, kv_heads=1),
            "a KV head has 65 query heads, and the kernels take at most 64",
        ),
        (Case(page_tokens=12), "pages have 12 tokens, and the kernels take multiples of 8"),
        (MLA._replace(pages="float16"), "pages are float16 and queries bfloat16"),
        (
            MLA._replace(pages=PACKED, queries="float16"),
            "queries are float16, and the kernel of packed vectors takes bfloat16",
        ),
        (
            MLA._replace(pages=PACKED, value=384),
            "packed vectors are 576 wide and their values 384, and the kernel takes 576 and 512",
        ),
        (
            MLA._replace(pages=PACKED, key=192, value=128),
            "packed vectors are 192 wide and their values 128, and the kernel takes 576 and 512",
        ),
        (MLA._replace(heads=256, kv_heads=2), "latent vectors have 2 KV heads"),
        (MLA._replace(key=544), "latent vectors are 544 wide and their values 512"),
        (MLA._replace(key=640), "latent vectors are 640 wide and their values 512"),
        (MLA._replace(key=192, value=64), "latent vectors are 192 wide and their values 64"),
        (MLA._replace(heads=136), "136 query heads, and the kernel takes at most 128"),
        (MLA._replace(page_tokens=1, pages="int8"), "latent vectors of 8 bits lie in pages of one"),
        (MLA._replace(page_tokens=12), "pages have 12 tokens, and the kernels take multiples of 8"),
    ],
)
def test_what_mosaic_does_not_take_is_named(case: Case, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f'implementation="mosaic_gpu": .*{reason}'):
        attend(make(case, [3, 2, 1], None), case, "mosaic_gpu")


LIMITS = [
    Case(key=64, value=256, page_tokens=8),
    Case(key=256, value=64, queries="float16", pages="float16"),
    Case(key=80, value=112),
    Case(key=128, value=192, pages="int8"),
    Case(heads=64, kv_heads=1),
    LATENTS._replace(key=64 * 3, heads=128, page_tokens=8),
    LATENTS._replace(key=576, value=512, pages="float8_e5m2"),
    LATENTS._replace(key=576, value=512, pages=PACKED),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", LIMITS, ids=str)
def test_mosaic_takes_all_up_to_its_limits(case: Case, monkeypatch) -> None:
    from pallas_kernels._paged_attention import call

    monkeypatch.setattr(call, "choose", lambda _, reason, **attend: (reason, None))
    packing = PACKED if case.pages == PACKED else None
    options: Any = {"value_width": case.value, "row_packing": packing}
    assert calls.attend(*make(case, [3, 2, 1], None)[:4], **options) is None


def test_an_old_jax_is_told_what_mosaic_needs(monkeypatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    given = make(Case(), [3, 2, 1], None)
    with pytest.raises(NotImplementedError, match=r"jax >= 0\.11, and this is jax 0\.10\.2; use"):
        calls.attend(*given[:4], implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("tokens", "batch", "width", "blocks"),
    [(0, 0, 3, 4), (0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (3, 2, 0, 4), (2, 0, 3, 4)],
)
def test_no_queries_and_no_keys_are_no_error(tokens, batch, width, blocks) -> None:
    out, lse = at_once(
        jnp.ones((tokens, 4, 8), jnp.bfloat16),
        jnp.ones((blocks, 2, 2, 12), jnp.bfloat16),
        jnp.zeros((batch, width), jnp.int32),
        jnp.full(batch, 6, jnp.int32),
        jnp.arange(batch + 1, dtype=jnp.int32) if batch != tokens else None,
        sinks=jnp.arange(4.0),
        out_dtype="float32",
        return_lse=True,
    )
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.zeros((tokens, 4, 4)))
    is_padding = np.arange(tokens)[:, None] >= batch
    np.testing.assert_array_equal(lse, np.where(is_padding, -np.inf, np.arange(4.0)))


def test_what_sees_no_key_has_the_log_sum_exp_of_its_sinks() -> None:
    case = XLA_CASES["f32"]
    sinks = np.array([-math.inf, 1.5, -math.inf, -2], np.float32)
    given = make(case, [0, 5, 9], [0, 1, 2, 9])
    holes = np.full_like(given.block_tables, -1)
    out, lse = attend(given._replace(block_tables=holes, sinks=sinks), case, "xla")
    np.testing.assert_array_equal(out, np.zeros((9, 4, 12)))
    np.testing.assert_allclose(lse[1], sinks)
    # No request has a key that this rank holds.
    apart = case._replace(ranks=2)
    given = make(apart, [1, 3, 4], [0, 1, 3, 7])._replace(sinks=sinks)
    out, lse = attend(given, apart, "xla")
    np.testing.assert_array_equal(out, np.zeros((9, 4, 12)))
    np.testing.assert_allclose(lse[:7], np.tile(sinks, (7, 1)))


def test_more_queries_than_tokens_see_what_there_is() -> None:
    """The first queries of such a request come before its first key."""
    case = XLA_CASES["f32"]
    given = make(case, [3, 0, 20], [0, 5, 5, 9])
    check(case, given, "xla")
    check(case, given._replace(sinks=np.full(4, -math.inf, np.float32)), "xla")


def test_parts_of_a_sequence_combine_by_their_log_sum_exp() -> None:
    case = Case(batch=2, width=6, queries="float32", pages="float32")
    lens = np.array([90, 61])
    given = make(case, lens.tolist(), None)
    whole = at_once(*given[:4])
    parts = [
        at_once(
            given.queries,
            given.pages,
            given.block_tables[:, columns],
            as_ids(np.clip(lens - 16 * columns.start, 0, 48)),
            return_lse=True,
        )
        for columns in (slice(0, 3), slice(3, 6))
    ]
    lse = np.stack([lse for _, lse in parts])
    weights = np.exp(lse - np.logaddexp(*lse))[..., None]
    combined = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(combined, whole, atol=1e-6)


def test_it_composes_with_scan_and_shard_map_over_heads() -> None:
    case = Case(queries="float32", pages="float32", tokens=9)
    given = make(case, [100, 3, 40], [0, 5, 6, 9])
    mesh = Mesh(np.array(jax.devices()[: min(2, len(jax.devices()))]), ("heads",))
    by_head = PartitionSpec(None, "heads")

    def layers(queries, pages, *others):
        def layer(queries, _):
            return calls.attend(queries, pages, *others), None

        return jax.lax.scan(layer, queries, None, length=2)[0]

    sharded = jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=(by_head, PartitionSpec(None, None, "heads"), *[PartitionSpec()] * 3),
        out_specs=by_head,
        check_vma=False,
    )
    arrays = jax.tree.map(jnp.asarray, given[:5])
    np.testing.assert_allclose(jax.jit(sharded)(*arrays), jax.jit(layers)(*arrays), atol=1e-6)


GOOD: dict[str, Any] = {
    "queries": jnp.ones((3, 4, 8)),
    "pages": jnp.ones((5, 2, 2, 14)),
    "block_tables": jnp.zeros((3, 2), jnp.int32),
    "seq_lens": jnp.ones(3, jnp.int32),
}
ONES, INTS = jnp.ones, functools.partial(jnp.ones, dtype=jnp.int32)


def shared(*arrays: list[float]) -> SharedPrefixes:
    kinds = {int: np.int32, float: np.float32}
    return SharedPrefixes(*(np.array(array, kinds[type(array[0])]) for array in arrays))


def refused_pages() -> Iterator[tuple[str, Any, type, str]]:
    good = StridedPages.from_array(GOOD["pages"])
    for change, message in (
        ({"data": good.data[None]}, r"pages.data must be \[extents, n\] of uint8 or float32"),
        ({"data": good.data.astype(jnp.int32)}, "pages.data must be .*, got int32"),
        ({"start": 4}, "pages end at byte 228 of an extent, from start=4 on, .* 56 elements of"),
        ({"tokens": 1, "start": 2}, "start be a multiple of the element size"),
        ({"head_step": 2}, "pages has head_step=2, which needs heads_first=True"),
    ):
        yield "pages", good._replace(**change), ValueError, message


BAD = [
    ("implementation", "triton", ValueError, "implementation='triton'; use one of"),
    ("queries", INTS((3, 4, 8)), TypeError, "queries must be one of float32, bfl"),
    ("queries", ONES((3, 4)), ValueError, r"queries must be \[T, heads, K\], got shape \(3, 4"),
    ("queries", ONES((3, 3, 8)), ValueError, "queries has 3 heads; wants a multiple of the 2"),
    ("queries", ONES((3, 0, 8)), ValueError, "queries has 0 heads; wants a multiple of the 2"),
    ("queries", ONES((4, 4, 8)), ValueError, "4 tokens for 3 requests; pass query_start_loc"),
    ("queries", None, TypeError, "queries must be an array of numbers, got NoneType"),
    ("pages", "x", TypeError, "pages must be an array of numbers, got str"),
    ("pages", ONES((5, 2, 2, 14), jnp.uint8), TypeError, "pages must be one of .*, got uint8"),
    ("pages", ONES((5, 2, 28)), ValueError, "pages must be .blocks, tokens, kv_heads, K"),
    ("pages", ONES((5, 0, 2, 14)), ValueError, "pages has blocks of 0 tokens"),
    ("pages", ONES((5, 2, 0, 14)), ValueError, "4 heads; wants a multiple of the 0 KV heads"),
    *refused_pages(),
    ("block_tables", np.zeros((3, 2), int), TypeError, "block_tables must be int32.B, W., got"),
    ("block_tables", INTS(3), TypeError, "block_tables must be int32.B, W., got"),
    ("seq_lens", ONES(3), TypeError, "seq_lens must be int32.3., got float32"),
    ("seq_lens", INTS(4), ValueError, "seq_lens must be int32.3., got int32.4."),
    ("query_start_loc", INTS(3), ValueError, "query_start_loc must be int32.4."),
    ("first_positions", INTS(4), ValueError, "first_positions must be int32.3."),
    ("out_dtype", "int8", TypeError, "out_dtype must be one of float32, bfl.*, got int8"),
    ("out_dtype", "x", TypeError, "out_dtype must be one of float32, bfl.*, got 'x'"),
    ("scale", -1.0, ValueError, "scale=-1.0 must be positive"),
    ("scale", "x", ValueError, "scale='x' must be a finite number, or None"),
    ("soft_cap", 0.0, ValueError, "soft_cap=0.0 must be positive"),
    ("causal", 1, TypeError, "causal must be of type bool, got int"),
    ("reproducible", 1, TypeError, "reproducible must be of type bool, got int"),
    ("interleaving", 2, TypeError, "interleaving must be of type Interleaving, got int"),
    ("interleaving", Interleaving(0, 0, 1), ValueError, "interleaving.ranks=0 must be an int of"),
    ("interleaving", Interleaving(0, 2, 0), ValueError, "interleaving.interleave_tokens=0 must"),
    ("interleaving", Interleaving(0, None, 1), ValueError, "interleaving.ranks=None must be"),
    ("interleaving", Interleaving(2, 2, 1), ValueError, "interleaving.rank=2 must be in 0..1"),
    ("shared_prefixes", 2, TypeError, "shared_prefixes must be of type SharedPrefixes, got int"),
    ("shared_prefixes", shared([0.0], [1], [1]), TypeError, "prefixes.members must be int32"),
    ("shared_prefixes", shared([0], [1.0], [1]), TypeError, "prefixes.ends must be int32"),
    ("shared_prefixes", shared([0], [1], [1, 2]), ValueError, "prefixes.lens must be int32.1."),
    ("sliding_window", [3], ValueError, r"sliding_window=\[3\] must be a finite number, or None"),
    ("sliding_window", 0, ValueError, "sliding_window=0 must be an int of at least 1"),
    ("max_query_len", 0, ValueError, "max_query_len=0 must be an int of at least 1"),
    ("chunk_size", 1.5, ValueError, "chunk_size=1.5 must be an int of at least 1"),
    ("value_width", 0, ValueError, "value_width=0 must be an int of at least 1"),
    ("sinks", ONES(3), ValueError, r"sinks has shape \(3,\); wants \[4\]"),
    ("sinks", INTS(4), TypeError, "sinks must be floats, got int32"),
    ("key_scale", ONES(3), ValueError, r"key_scale has shape \(3,\); wants a number or \[2\]"),
    ("value_scale", ONES((2, 1)), ValueError, "value_scale has shape"),
    ("row_packing", "nvfp4", ValueError, "row_packing='nvfp4'; use one of 'fp8_ds_mla' or None"),
    ("row_packing", PACKED, TypeError, "pages must be uint8 with row_packing='fp8_ds_mla', got f"),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)]
)
def test_bad_input_is_refused_by_name(argument, value, error, message) -> None:
    with pytest.raises(error, match=message):
        calls.attend(**{**GOOD, argument: value})


@pytest.mark.parametrize(
    ("record", "kind"), [("requests", "RequestPages"), ("rule", "AttentionRule")]
)
def test_records_are_of_their_types(record: str, kind: str) -> None:
    good = {
        "requests": RequestPages(GOOD["block_tables"], GOOD["seq_lens"]),
        "rule": AttentionRule(),
    }
    with pytest.raises(TypeError, match=f"{record} must be of type {kind}, got int"):
        paged_attention(GOOD["queries"], GOOD["pages"], **good | {record: 2})


PACKED_WIDTHS = "with row_packing='fp8_ds_mla'; pass a multiple of 128"


@pytest.mark.parametrize(
    ("key", "row", "value", "packing", "message"),
    [
        *(
            (key, row, value, None, f"queries are {key} wide and rows of pages {row}; a.row must")
            for key, row, value in [
                (8, 14, 7),
                (8, 8, 9),
                (8, 8, None),
                (8, 7, None),
                (0, 14, None),
            ]
        ),
        (576, 528, None, PACKED, f"value_width=None {PACKED_WIDTHS}"),
        (576, 528, 64, PACKED, f"value_width=64 {PACKED_WIDTHS}"),
        (640, 660, 640, PACKED, "value_width=640 .* less than the width of queries, 640"),
        (576, 576, 512, PACKED, "a row of pages is 576 bytes; .* value_width=512 it must be 656"),
        (8, 32, None, TokenHeadRow(INT8, 0, 8, 8), r"row_packing\.kv_heads=0 must be an int of at"),
        (8, 32, None, TokenHeadRow("int2", 1, 8, 8), r"row_packing\.packing='int2'; use one of"),
        (7, 32, None, TokenHeadRow(INT4, 1, 7, 8), "has odd widths, of which 4 bits do not fill"),
        (8, 64, None, TokenHeadRow(INT8, 1, 8, 8), r"of pages 2 x 64 bytes; .* must be 1 x 32"),
        (8, 32, 4, TokenHeadRow(INT8, 1, 8, 8), "queries are 8 wide, value_width=4 and rows"),
    ],
)
def test_rows_of_other_widths_are_refused(key, row, value, packing, message) -> None:
    pages = jnp.ones((5, 2, 2, row), jnp.uint8 if packing else jnp.float32)
    arguments = {**GOOD, "queries": jnp.ones((3, 4, key)), "pages": pages}
    with pytest.raises(ValueError, match=message):
        calls.attend(**arguments, value_width=value, row_packing=packing)


def test_limits_beyond_int32_are_none() -> None:
    given = make(Case(), [70, 40, 128], None)
    limits = {"sliding_window": 2**31, "chunk_size": 2**40, "max_query_len": 2**40}
    attend_all = jax.jit(functools.partial(calls.attend, **limits, return_lse=True))
    check_output(Case(), given, *attend_all(*given[:4]))


@pytest.mark.parametrize(
    ("extents", "blocks", "columns", "error", "message"),
    [
        (2**27, 2**27, 2, NotImplementedError, "pages have more rows than int32 counts"),
        (2**27, 9, 2, NotImplementedError, "pages have more rows than int32 counts"),
        (9, 9, 2**27, ValueError, "rows of 134217728 pages of 16 tokens, more than int32 count"),
    ],
)
@needs_mosaic
def test_more_tokens_than_int32_counts_are_refused(
    extents, blocks, columns, error, message
) -> None:
    """Also those of other layers, among which a few pages lie."""
    struct, ids = jax.ShapeDtypeStruct, jnp.int32
    arguments = [
        struct((3, 2, 64), jnp.bfloat16),
        struct((extents, 16 * 128), jnp.bfloat16),
        struct((3, columns), ids),
        struct((3,), ids),
    ]

    def run(queries: jax.Array, data: jax.Array, *rest: jax.Array) -> jax.Array:
        pages = StridedPages(data, data.dtype, blocks, 16, 1, 128, page_step=extents // blocks)
        return calls.attend(queries, pages, *rest, implementation="mosaic_gpu")

    with pytest.raises(error, match=message):
        jax.eval_shape(run, *arguments)


@pytest.mark.parametrize("limit", ["sliding_window", "chunk_size"])
@pytest.mark.parametrize("other", [{"causal": False}, {"interleaving": Interleaving(0, 2, 4)}])
def test_limits_go_neither_with_interleaving_nor_with_all_keys(limit, other) -> None:
    (name,) = other
    with pytest.raises(ValueError, match=f"{name}.* does not go with sliding_window or chunk_size"):
        calls.attend(**GOOD | other | {limit: 4})


@needs_mosaic
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_an_output_has_the_dtype_that_is_asked_for(implementation) -> None:
    wide = functools.partial(calls.attend, out_dtype="float32", implementation=implementation)
    program = jax.make_jaxpr(wide)(*PLAIN._replace(value=64).arguments(per_request=True))
    (out,) = program.out_avals
    assert out.dtype == jnp.float32 and out.shape == (64, 32, 64)
    assert ("bf16[64,32,64]" in str(program)) == (implementation == "mosaic_gpu")  # as queries are


@pytest.mark.parametrize(("row", "value"), [(14, 6), (14, None), (8, 8), (8, 3)])
def test_good_input_is_not_refused(row, value) -> None:
    attend_all = functools.partial(calls.attend, value_width=value)
    out = jax.eval_shape(attend_all, **GOOD | {"pages": jnp.ones((5, 2, 2, row))})
    assert out.shape == (3, 4, value or 6)


def test_packed_rows_hold_what_float8_can() -> None:
    """To 3 bits of mantissa, or the least step of float8 times the scale of the group."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, 320)) * np.logspace(-9, 9, 9)[:, None]
    rows = np.where(rng.random(rows.shape) < 0.1, 0, rows).astype(np.float32)
    rows[3, :128] = 0
    row = PackedRow(latent=256, rotary=64)
    packed = np.asarray(jax.jit(row.pack)(rows))
    assert packed.dtype == np.uint8 and packed.shape == (9, row.row_bytes) == (9, 392)
    case = Case(key=320, value=256, pages=PACKED, queries="float32")
    unpacked = unpack(case, packed).astype(float)
    np.testing.assert_array_equal(unpacked, jax.jit(row.unpack)(packed))
    highest = abs(rows[:, :256]).reshape(9, 2, 128).max(axis=2).repeat(128, axis=1)
    bound = np.maximum(abs(rows[:, :256]) * 2.0**-4, highest / 448 * 2.0**-10) * (1 + 2.0**-20)
    assert (abs(unpacked - rows)[:, :256] <= bound).all()
    np.testing.assert_array_equal(
        unpacked[:, 256:], rows[:, 256:].astype(jnp.bfloat16).astype(float)
    )
