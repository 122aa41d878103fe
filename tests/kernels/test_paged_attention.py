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
from pallas_kernels import Interleaving, SharedPrefixes, StridedPages, _capability
from pallas_kernels._paged_attention import xla
from tests.helpers import HAS_LATE_BARRIERS, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.kernels import calls

INTERLEAVE, RANK = 4, 1  # of positions
PACKED, SCALED = "fp8_ds_mla", 128  # rows of bytes, and how many of their values share a scale


class Case(NamedTuple):
    """Shapes and options of calls that are compiled once."""

    heads: int = 4
    kv_heads: int = 2
    key: int = 64
    value: int = 64
    page_tokens: int = 16
    batch: int = 3
    width: int = 8
    tokens: int = 0  # of the queries of all requests; 0: one each
    pages: str = "bfloat16"  # or `PACKED`
    queries: str = "bfloat16"
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: bool = False
    scaled: bool = False
    holes: bool = False  # some pages of the first two requests are not there
    low: bool = False  # scores are so far below 0 that their powers are 0
    huge: float = 0.0  # the first element of each value; sums of unseen ones are infinite
    causal: bool = True
    firsts: bool = False  # tables begin behind the first tokens
    ranks: int = 1  # positions are interleaved, and these pages are the second rank's
    place: str = ""  # of pages among other bytes; see `strided`
    latent: bool = False  # values are the first elements of keys
    reproducible: bool = False
    most: int | None = None  # queries of a request, as the caller says

    @property
    def scale(self) -> float | None:
        return 0.07 if self.scaled else None

    @property
    def row(self) -> int:
        if self.pages == PACKED:
            return self.value + 4 * (self.value // SCALED) + 2 * (self.key - self.value)
        return self.key + (0 if self.latent else self.value)

    @property
    def capacity(self) -> int:
        return self.width * self.page_tokens

    @property
    def longest(self) -> int:
        """Tokens of a request; the tables that begin behind some hold the last of them."""
        return self.capacity * (2 if self.firsts else 1)


class Arguments(NamedTuple):
    queries: np.ndarray
    pages: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray | None
    first_positions: np.ndarray | None
    sinks: np.ndarray | None
    key_scale: Any
    value_scale: Any


class Expected(NamedTuple):
    """The definition in float64, and what an implementation may be off by, per output."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray


def make(case: Case, lens: list[int], loc: list[int] | None, seed: int = 0) -> Arguments:
    """Returns arguments whose pages hold numbers where queries look, and poison elsewhere."""
    rng = np.random.default_rng(seed)
    blocks = case.batch * case.width + 3
    ids = rng.permutation(blocks)[: case.batch * case.width].reshape(case.batch, case.width)
    if case.holes:  # kernels read page 0 in place of them: it holds poison
        ids[ids == 0] = np.setdiff1d(np.arange(1, blocks), ids)[0]
    shape = (blocks, case.page_tokens, case.kv_heads, case.row)
    if case.pages == PACKED:
        numbers, poison = pack(case, rng, shape[:-1]), 0xFF  # NaN in all parts of a row
    else:
        numbers = rng.normal(size=shape) * (30 if case.pages == "int8" else 1)
        numbers = numbers.astype(jnp.dtype(case.pages))
        numbers[..., 0] = 40 if case.low else numbers[..., 0]
        if case.huge:
            numbers[..., case.key] = case.huge
        poison = 127 if case.pages == "int8" else math.nan
    pages = np.full(shape, poison, numbers.dtype)
    starts = np.zeros(case.batch, np.int32)
    for request, length in enumerate(lens):
        count = 1 if loc is None else loc[request + 1] - loc[request]
        lowest = first_visible(case, max(length - count, 0))
        if case.firsts:  # anywhere from where a table is full to where it begins at what is seen
            least = max(0, length - case.capacity)
            starts[request] = rng.choice([least, max(least, lowest - 5), lowest])
        held = positions(case, starts[request])
        assert starts[request] <= lowest, "a table has no room for what is seen"
        for index in np.flatnonzero((held >= lowest) & (held < length)):
            page, offset = divmod(index, case.page_tokens)
            place = ids[request, page], offset
            pages[place] = numbers[place]
    for request, length in enumerate(lens):  # what tables hold past the last page is anything
        last = (positions(case, starts[request]) < length).sum()
        ids[request, -(-last // case.page_tokens) :] = rng.integers(-3, blocks + 3)
    if case.holes:
        where = rng.random(ids.shape) < 0.3
        where[2:] = False
        ids[where] = rng.choice([-1, -(2**31), blocks, 2**31 - 1], where.sum())
    tokens = case.tokens or case.batch
    scales = rng.uniform(0.5, 2, (2, case.kv_heads)).astype(np.float32)
    queries = rng.normal(size=(tokens, case.heads, case.key)).astype(jnp.dtype(case.queries))
    queries[..., 0] = -60 if case.low else queries[..., 0]
    queries[tokens if loc is None else loc[-1] :] = math.nan
    return Arguments(
        queries,
        pages,
        as_ids(ids),
        as_ids(lens),
        None if loc is None else as_ids(loc),
        starts if case.firsts else None,
        draw_sinks(rng, case.heads) if case.sinks else None,
        (scales[0] if case.kv_heads > 1 else scales[0, 0]) if case.scaled else 1.0,
        scales[1] if case.scaled else 1.0,
    )


def draw_sinks(rng: np.random.Generator, heads: int) -> np.ndarray:
    """Returns logits, every other one above most scores, and few so far that keys count nothing.

    Of several heads the first one has no sink.
    """
    index = np.arange(heads)
    sinks = rng.normal(size=heads) + index % 2 * 4 + (index % 8 == 2) * 300
    return np.where((index == 0) & (heads > 1), -np.inf, sinks).astype(np.float32)


def pack(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns rows of values, their scales and the rest of the key, as bytes.

    Scales of the second group are far below what float16 holds.
    """
    latent = rng.normal(size=(*shape, case.value)).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (*shape, case.value // SCALED)).astype(np.float32)
    scales[..., 1:2] *= 2.0**-40
    rotary = rng.normal(size=(*shape, case.key - case.value)).astype(jnp.bfloat16)
    parts = [part.view(np.uint8) for part in (latent, scales, rotary)]
    return np.concatenate(parts, axis=-1)


def unpack(case: Case, rows: np.ndarray) -> np.ndarray:
    """Returns the elements of rows of bytes, rounded to the dtype of queries."""
    ends = np.cumsum([case.value, 4 * (case.value // SCALED)])
    parts = [np.ascontiguousarray(part) for part in np.split(rows, ends, axis=-1)]
    dtypes = (jnp.float8_e4m3fn, np.float32, jnp.bfloat16)
    pairs = zip(parts, dtypes, strict=True)
    latent, scales, rotary = [part.view(dtype).astype(np.float32) for part, dtype in pairs]
    keys = np.concatenate([latent * np.repeat(scales, SCALED, axis=-1), rotary], axis=-1)
    return keys.astype(jnp.dtype(case.queries))


def positions(case: Case, first: int) -> np.ndarray:
    """The position of each key of a request, in the order of its pages."""
    if case.ranks == 1:
        return first + np.arange(case.capacity)
    turns, within = np.divmod(np.arange(case.capacity), INTERLEAVE)
    return (turns * case.ranks + RANK) * INTERLEAVE + within


def first_visible(case: Case, position: int) -> int:
    first = 0
    if case.window is not None:
        first = max(first, position - case.window + 1)
    if case.chunk is not None:
        first = max(first, position // case.chunk * case.chunk)
    return first


def define(case: Case, given: Arguments) -> Expected:
    """Attends by the definition, one query and one head at a time, and derives the bounds.

    With u the rounding of 16 bits (or of float32) and n keys: a score is a sum of K products in
    float32, so it is off by at most d = (K + 8) 2^-24 of the sum of their magnitudes; weights
    are off by 2d and by the u they are rounded to before they meet values; a float16 weight
    below 2^-14 by 2^-25 of the largest; the output is rounded by u.
    """
    tokens, group = given.queries.shape[0], case.heads // case.kv_heads
    out = np.zeros((tokens, case.heads, case.value))
    lse = np.full((tokens, case.heads), -np.inf)
    out_bound, lse_bound = np.zeros_like(out), np.zeros_like(lse)
    loc, starts = given.query_start_loc, given.first_positions
    key_scale = np.broadcast_to(np.asarray(given.key_scale, float), case.kv_heads)
    value_scale = np.broadcast_to(np.asarray(given.value_scale, float), case.kv_heads)
    rounding = 2.0**-8 if "bfloat16" in (case.queries, case.pages) else 2.0**-11
    if case.queries == case.pages == "float32":
        rounding = 2.0**-22
    for request, length in enumerate(given.seq_lens.tolist()):
        begin, end = (request, request + 1) if loc is None else loc[request : request + 2].tolist()
        for token in range(begin, end):
            position = length - end + token
            if loc is None and not length:
                continue  # padding
            held_at = positions(case, 0 if starts is None else starts[request])
            last = position if case.causal else length
            seen = (held_at >= first_visible(case, position)) & (held_at <= last)
            seen = np.flatnonzero(seen & (held_at < length))
            ids = given.block_tables[request, seen // case.page_tokens]
            held = (ids >= 0) & (ids < len(given.pages))
            rows = given.pages[ids[held], seen[held] % case.page_tokens]
            rows = (unpack(case, rows) if case.pages == PACKED else rows).astype(float)
            for head in range(case.heads):
                kv_head = head // group
                keys = rows[:, kv_head, : case.key]
                values = rows[:, kv_head, 0 if case.latent else case.key :][:, : case.value]
                query = given.queries[token, head].astype(float)
                scale = (case.scale or case.key**-0.5) * key_scale[kv_head]
                scores = keys @ query * scale
                if case.cap is not None:
                    scores = case.cap * np.tanh(scores / case.cap)
                sink = -np.inf if given.sinks is None else float(given.sinks[head])
                highest = max(scores.max(initial=-np.inf), sink)
                if highest == -np.inf:
                    continue
                weights = np.exp(scores - highest)
                total = weights.sum() + np.exp(sink - highest)
                lse[token, head] = highest + np.log(total)
                values = values * value_scale[kv_head]
                out[token, head] = weights @ values / total
                sums = (abs(keys) @ abs(query)).max(initial=0) + abs(keys).max(initial=0)
                off = (case.key + 8) * 2.0**-24 * (sums * scale + (case.cap or 0) + abs(highest))
                off += 2.0**-18
                spread = weights @ abs(values) / total
                tiny = 2.0**-25 * abs(values).sum(axis=0) / total
                out_bound[token, head] = (rounding + 2 * off) * spread + tiny
                out_bound[token, head] += rounding * abs(out[token, head]) + 1e-30
                lse_bound[token, head] = 2 * off + 2.0**-22 * abs(lse[token, head])
    return Expected(out, lse, out_bound, lse_bound)


def strided(pages: jax.Array, place: str) -> jax.Array | StridedPages:
    """Returns pages in another order, or among bytes or elements (``"HND"``) that are NaN."""
    if not place:
        return pages
    if place == "NHD in an array":
        return StridedPages.from_array(pages)
    by_head = jnp.swapaxes(pages, 1, 2)
    if place == "HND in an array":
        return StridedPages.from_array(by_head, heads_first=True)
    blocks, tokens, kv_heads, width = pages.shape
    start = 8 * width * pages.dtype.itemsize * (kv_heads if place == "NHD" else 1)
    if place == "heads apart":  # [heads, layers, blocks, bytes], the second of two layers
        data = as_bytes(jnp.moveaxis(by_head, 1, 0), 2)[:, None]
        steps = {"first": blocks, "page_step": 1, "head_step": 2 * blocks}
        before = ((0, 0), (1, 0), (0, 0), (0, start))
        start = 0
    else:  # [blocks, layers, bytes], the second of two layers, which begins behind some rows
        data = as_bytes(pages if place == "NHD" else by_head, 1)[:, None]
        steps, before = {"first": 1, "page_step": 2}, ((0, 0), (1, 0), (start, start))
    data = jnp.pad(data, before, constant_values=0xFF)
    data = data.view(pages.dtype) if place == "HND" else data
    return StridedPages(
        data.reshape(-1, data.shape[-1]),
        pages.dtype,
        *(blocks, tokens, kv_heads, width),
        **steps,
        start=start,
        heads_first=place != "NHD",
    )


def as_bytes(array: jax.Array, ndim: int) -> jax.Array:
    data = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return data.reshape(*array.shape[:ndim], -1)


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


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def attend(arguments: Arguments, case: Case, implementation: str) -> tuple[jax.Array, jax.Array]:
    queries, pages, *arrays, first_positions, sinks, key_scale, value_scale = arguments
    return calls.attend(
        queries,
        strided(pages, case.place),
        *arrays,
        scale=case.scale,
        sliding_window=case.window,
        chunk_size=case.chunk,
        soft_cap=case.cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        value_width=case.value if case.latent else None,
        row_packing=PACKED if case.pages == PACKED else None,
        causal=case.causal,
        first_positions=first_positions,
        interleaving=Interleaving(RANK, case.ranks, INTERLEAVE) if case.ranks > 1 else None,
        reproducible=case.reproducible,
        max_query_len=case.most,
        return_lse=True,
        implementation=implementation,
    )


at_once = jax.jit(calls.attend, static_argnames=("return_lse", "out_dtype"))  # in one program


def check(case: Case, arguments: Arguments, implementation: str) -> None:
    with kernels_run():
        out, lse = attend(arguments, case, implementation)
    check_output(case, arguments, out, lse)


def check_output(case: Case, arguments: Arguments, out: jax.Array, lse: jax.Array) -> None:
    """Checks an output and its log-sum-exp against the definition."""
    assert out.dtype == jnp.dtype(case.queries) and lse.dtype == jnp.float32
    expected = define(case, arguments)
    found, found_lse = np.asarray(out, float), np.asarray(lse, float)
    assert np.isfinite(found).all() and not np.isnan(found_lse).any()
    off = abs(found - expected.out)
    assert (off <= expected.out_bound).all(), (off / np.maximum(expected.out_bound, 1e-30)).max()
    np.testing.assert_array_equal(np.isinf(found_lse), np.isinf(expected.lse))
    known = np.isfinite(expected.lse)
    assert (abs(found_lse[known] - expected.lse[known]) <= expected.lse_bound[known]).all()


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


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes NaN of what no kernel writes: on a GPU it is anything, and zeros on a CPU."""
    monkeypatch.setattr(jnp, "empty", lambda shape, dtype: jnp.full(shape, math.nan, dtype))


# Of poison, and of sums of what is not seen.
quietly = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")


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
@pytest.mark.parametrize("name", INTERPRETED)
def test_mosaic_attends_by_the_definition_in_interpret_mode(name: str, monkeypatch) -> None:
    """All but the operands that a GPU takes from registers."""
    from pallas_kernels import _mosaic
    from pallas_kernels._paged_attention import mosaic, prefill_tasks, rounds, tasks
    from pallas_kernels._paged_attention.decode_block import DecodeShape

    poison_outputs(monkeypatch)
    monkeypatch.setattr(mosaic, "MAX_ROWS", 16)
    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    monkeypatch.setattr(tasks, "SPLIT", 2)  # of reproducible attention
    monkeypatch.setattr(rounds, "WORKSPACE", 20_000)
    monkeypatch.setattr(prefill_tasks, "CACHED_BYTES", 0)  # one KV head after another
    monkeypatch.setattr(prefill_tasks, "LEAST_STEPS", 1)
    # Of few steps each where nobody may miss the last arrival at a barrier.
    thread_blocks = 3 if HAS_LATE_BARRIERS else 8
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: thread_blocks)
    monkeypatch.setattr(DecodeShape, "num_workers", thread_blocks)
    case, lens, loc = INTERPRETED[name]
    given = make(case, lens, loc, seed=16 if case.firsts else 0)
    if case.firsts:
        assert np.count_nonzero(given.first_positions % case.chunk) == 2
    check(case, given, "mosaic_gpu")


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
def test_many_segments_are_added_up_by_several_warpgroups_in_several_rounds(monkeypatch) -> None:
    from pallas_kernels import _mosaic
    from pallas_kernels._paged_attention import combine

    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    monkeypatch.setattr(combine, "MANY", 2)
    # About six segments a tile, so that each warpgroup loads two at a time.
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 10)
    case = Case(batch=2, page_tokens=32, width=24, heads=1, kv_heads=1, sinks=True)
    given = make(case, [768, 0], None)
    check(case, given._replace(sinks=np.full(1, -math.inf, np.float32)), "mosaic_gpu")


@needs_mosaic
@pytest.mark.parametrize("value_width", [64, 128, 192, 256])
def test_thread_blocks_that_combine_cover_all_columns_and_load_at_most_1024(value_width) -> None:
    """Of a row, over all segments: more do not fit into the registers of a warpgroup."""
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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_shapes_of_models_lower_for_cuda(shape: Shape) -> None:
    attend = functools.partial(
        calls.attend, implementation="mosaic_gpu", sliding_window=99, max_query_len=shape.most
    )
    text = lower(attend, shape.arguments(per_request=shape.tokens == shape.batch))
    assert text.count("custom_call @mosaic_gpu") == shape.launches
    # The pages go straight to kernels: nothing else has as many elements.
    pages = f"tensor<999x{shape.page_tokens}x{shape.kv_heads}x{shape.row}x"
    users = [line for line in text.splitlines() if pages in line and "func" not in line]
    assert users and all("reshape" in line or "call" in line for line in users)


@needs_mosaic
def test_the_kernels_count_in_int32_under_x64_too() -> None:
    attend = functools.partial(calls.attend, implementation="mosaic_gpu")
    with jax.enable_x64(True):
        text = lower(attend, NARROW.arguments(per_request=False))
    assert text.count("custom_call @mosaic_gpu") == NARROW.launches


@needs_mosaic
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
    ],
)
def test_what_mosaic_does_not_take_is_named(case: Case, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f'implementation="mosaic_gpu": {reason}'):
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


def shared(*arrays: list[float]) -> SharedPrefixes:
    kinds = {int: np.int32, float: np.float32}
    return SharedPrefixes(*(np.array(array, kinds[type(array[0])]) for array in arrays))


BAD = [
    ("implementation", "triton", ValueError, "implementation='triton'; use one of"),
    ("queries", jnp.ones((3, 4, 8), jnp.int32), TypeError, "queries must be one of float32, bfl"),
    ("queries", jnp.ones((3, 4)), ValueError, r"queries must be \[T, heads, K\], got shape \(3, 4"),
    ("queries", jnp.ones((3, 3, 8)), ValueError, "queries has 3 heads; wants a multiple of the 2"),
    ("queries", jnp.ones((4, 4, 8)), ValueError, "4 tokens for 3 requests; pass query_start_loc"),
    (
        "queries",
        jnp.ones((3, 4, 14)),
        ValueError,
        "queries are 14 wide and rows of pages 14; a row",
    ),
    ("pages", jnp.ones((5, 2, 2, 14), jnp.uint8), TypeError, "pages must be one of .*, got uint8"),
    ("pages", jnp.ones((5, 2, 28)), ValueError, "pages must be .blocks, tokens, kv_heads, K"),
    ("pages", jnp.ones((5, 0, 2, 14)), ValueError, "pages has blocks of 0 tokens"),
    (
        "block_tables",
        np.zeros((3, 2), np.int64),
        TypeError,
        "block_tables must be int32.B, W., got",
    ),
    ("seq_lens", jnp.ones(3), TypeError, "seq_lens must be int32.3., got float32"),
    ("seq_lens", jnp.ones(4, jnp.int32), ValueError, "seq_lens must be int32.3., got int32.4."),
    ("query_start_loc", jnp.ones(3, jnp.int32), ValueError, "query_start_loc must be int32.4."),
    ("first_positions", jnp.ones(4, jnp.int32), ValueError, "first_positions must be int32.3."),
    ("first_positions", np.ones(3, np.int64), TypeError, "first_positions must be int32.3., got"),
    ("block_tables", jnp.ones(3, jnp.int32), TypeError, "block_tables must be int32.B, W., got"),
    ("seq_lens", jnp.ones((3, 1), jnp.int32), TypeError, "seq_lens must be int32.3., got"),
    ("queries", jnp.ones((3, 0, 8)), ValueError, "queries has 0 heads; wants a multiple of the 2"),
    ("pages", jnp.ones((5, 2, 0, 14)), ValueError, "4 heads; wants a multiple of the 0 KV heads"),
    ("out_dtype", "int8", TypeError, "out_dtype must be one of float32, bfl.*, got int8"),
    ("out_dtype", "x", TypeError, "out_dtype must be one of float32, bfl.*, got 'x'"),
    ("queries", None, TypeError, "queries must be an array of numbers, got NoneType"),
    ("pages", "x", TypeError, "pages must be an array of numbers, got str"),
    ("scale", -1.0, ValueError, "scale=-1.0 must be positive"),
    ("scale", "x", ValueError, "scale='x' must be a finite number, or None"),
    ("soft_cap", jnp.ones(2), ValueError, "soft_cap=Array.* must be a finite number, or None"),
    ("sliding_window", [3], ValueError, r"sliding_window=\[3\] must be a finite number, or None"),
    ("causal", 1, TypeError, "causal must be of type bool, got int"),
    ("reproducible", 1, TypeError, "reproducible must be of type bool, got int"),
    ("interleaving", 2, TypeError, "interleaving must be of type Interleaving, got int"),
    ("interleaving", Interleaving(0, 0, 1), ValueError, "interleaving.ranks=0 must be an int of"),
    ("interleaving", Interleaving(0, 2, 0), ValueError, "interleaving.interleave_tokens=0 must"),
    ("interleaving", Interleaving(0, None, 1), ValueError, "interleaving.ranks=None must be"),
    ("interleaving", Interleaving(-1, 2, 1), ValueError, "interleaving.rank=-1 must be in 0..1"),
    ("interleaving", Interleaving(2, 2, 1), ValueError, "interleaving.rank=2 must be in 0..1"),
    ("shared_prefixes", 2, TypeError, "shared_prefixes must be of type SharedPrefixes, got int"),
    ("shared_prefixes", shared([0.0], [1], [1]), TypeError, "prefixes.members must be int32"),
    ("shared_prefixes", shared([0], [1.0], [1]), TypeError, "prefixes.ends must be int32"),
    ("shared_prefixes", shared([0], [1], [1.0]), TypeError, "prefixes.lens must be int32"),
    ("shared_prefixes", shared([0], [1], [1, 2]), ValueError, "prefixes.lens must be int32.1."),
    ("soft_cap", 0.0, ValueError, "soft_cap=0.0 must be positive"),
    ("sliding_window", 0, ValueError, "sliding_window=0 must be an int of at least 1"),
    ("max_query_len", 0, ValueError, "max_query_len=0 must be an int of at least 1"),
    ("chunk_size", 1.5, ValueError, "chunk_size=1.5 must be an int of at least 1"),
    ("chunk_size", jnp.int32(4), ValueError, "chunk_size=Array.* must be an int of at least 1"),
    ("value_width", 0, ValueError, "value_width=0 must be an int of at least 1"),
    ("sinks", jnp.ones(3), ValueError, r"sinks has shape \(3,\); wants \[4\]"),
    ("sinks", jnp.ones(4, jnp.int32), TypeError, "sinks must be floats, got int32"),
    ("key_scale", jnp.ones(3), ValueError, r"key_scale has shape \(3,\); wants a number or \[2\]"),
    ("value_scale", jnp.ones((2, 1)), ValueError, "value_scale has shape"),
    ("row_packing", "nvfp4", ValueError, "row_packing='nvfp4'; use one of 'fp8_ds_mla' or None"),
    (
        "row_packing",
        PACKED,
        TypeError,
        "pages must be uint8 with row_packing='fp8_ds_mla', got flo",
    ),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)]
)
def test_bad_input_is_refused_by_name(argument, value, error, message) -> None:
    with pytest.raises(error, match=message):
        calls.attend(**{**GOOD, argument: value})


@pytest.mark.parametrize(
    ("key", "row", "value"),
    [(8, 14, 7), (8, 14, 5), (8, 8, 9), (8, 8, None), (8, 7, None), (0, 14, None)],
)
def test_rows_that_are_no_key_and_value_are_refused(key, row, value) -> None:
    widths = f"queries are {key} wide and rows of pages {row}; a.row must be a key"
    arguments = {**GOOD, "queries": jnp.ones((3, 4, key)), "pages": jnp.ones((5, 2, 2, row))}
    with pytest.raises(ValueError, match=widths):
        calls.attend(**arguments, value_width=value)


@pytest.mark.parametrize(
    ("key", "value", "row", "message"),
    [
        (576, None, 528, "value_width=None with row_packing='fp8_ds_mla'; pass a multiple of 128"),
        (576, 64, 528, "value_width=64 with row_packing='fp8_ds_mla'; pass a multiple of 128"),
        (640, 640, 660, "value_width=640 .* less than the width of queries, 640"),
        (576, 512, 576, "a row of pages is 576 bytes; .* value_width=512 it must be 656"),
    ],
)
def test_packed_rows_of_other_widths_are_refused(key, value, row, message) -> None:
    arguments = {**GOOD, "queries": jnp.ones((3, 4, key)), "row_packing": PACKED}
    arguments["pages"] = jnp.ones((5, 2, 2, row), jnp.uint8)
    with pytest.raises(ValueError, match=message):
        calls.attend(**arguments, value_width=value)


GOOD_PAGES = StridedPages.from_array(GOOD["pages"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": GOOD_PAGES.data[None]}, r"pages.data must be \[extents, n\] of uint8 or float32"),
        ({"data": GOOD_PAGES.data.astype(jnp.int32)}, "pages.data must be .*, got int32"),
        ({"start": 4}, "pages end at byte 228 of an extent, from start=4 on, .* 56 elements of"),
        ({"tokens": 1, "start": 2}, "start be a multiple of the element size"),
        ({"tokens": 1, "start": 14}, "start be a multiple of the element size"),
        ({"head_step": 2}, "pages has head_step=2, which needs heads_first=True"),
    ],
)
def test_pages_that_do_not_lie_in_their_data_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        calls.attend(**GOOD | {"pages": GOOD_PAGES._replace(**change)})


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
