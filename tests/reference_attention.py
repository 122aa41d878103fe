"""Attention over pages by its definition in float64, with poison where no query looks."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import Interleaving, StridedPages, TokenHeadRow, _capability
from pallas_kernels._paged_attention.decode_shape import MIN_QUERIES, PREFILL_ROWS
from tests.helpers import HAS_LATE_BARRIERS, as_ids, kernels_run
from tests.kernels import calls
from tests.reference_token_heads import BY_HEADS, HIGHEST, unpack_by_heads

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
    pages: str = "bfloat16"  # or `PACKED`, or one of `BY_HEADS`
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
        if self.by_heads is not None:
            return self.by_heads.row_bytes
        return self.key + (0 if self.latent else self.value)

    @property
    def by_heads(self) -> TokenHeadRow | None:
        if self.pages not in BY_HEADS:
            return None
        return TokenHeadRow(self.pages, self.kv_heads, self.key, self.value)

    @property
    def packing(self) -> Any:
        return PACKED if self.pages == PACKED else self.by_heads

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
    shape = (blocks, case.page_tokens, 1 if case.by_heads else case.kv_heads, case.row)
    if case.by_heads is not None:
        numbers, poison = pack_heads(case, rng, shape[:-2]), 0xFF  # NaN in all scales
    elif case.pages == PACKED:
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


def pack_heads(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns rows of any elements of all heads, and scales far from each other and from 1."""
    row = case.by_heads
    assert row is not None
    elements = rng.integers(0, 256, (*shape, 1, row.first_scale), np.uint8)
    if case.pages == "int8_per_token_head":
        elements[elements == 128] = 0  # -128 is never stored
    elif case.pages == "fp8_per_token_head":
        elements[(elements & 127) == 127] = 0  # nor is NaN
    else:
        elements |= np.where(elements & 15, 0, 1).astype(np.uint8)  # nor is -8
        elements |= np.where(elements >> 4, 0, 16).astype(np.uint8)
    scales = 2.0 ** rng.uniform(-4, 2, (*shape, 1, case.kv_heads, 2)) / HIGHEST[case.pages]
    scales = scales.astype(np.float32).view(np.uint8).reshape(*elements.shape[:-1], -1)
    spare = np.full((*shape, 1, row.row_bytes - elements.shape[-1] - scales.shape[-1]), 0xFF)
    return np.concatenate([elements, scales, spare.astype(np.uint8)], axis=-1)


def unpack(case: Case, rows: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """Returns the elements of rows of bytes, rounded to the dtype of queries if not exact."""
    ends = np.cumsum([case.value, 4 * (case.value // SCALED)])
    parts = [np.ascontiguousarray(part) for part in np.split(rows, ends, axis=-1)]
    dtypes = (jnp.float8_e4m3fn, np.float32, jnp.bfloat16)
    pairs = zip(parts, dtypes, strict=True)
    latent, scales, rotary = [part.view(dtype).astype(np.float32) for part, dtype in pairs]
    keys = np.concatenate([latent * np.repeat(scales, SCALED, axis=-1), rotary], axis=-1)
    return keys if exact else keys.astype(jnp.dtype(case.queries))


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


def define(case: Case, given: Arguments, *, exact_keys: bool = False) -> Expected:
    """Attends by the definition, one query and one head at a time, and derives the bounds.

    With u the rounding of 16 bits (or of float32) and n keys: a score is a sum of K products in
    float32, so it is off by at most d = (K + 8) 2^-24 of the sum of their magnitudes; weights
    are off by 2d and by the u they are rounded to before they meet values; a float16 weight
    below 2^-14 by 2^-25 of the largest; the output is rounded by u, or by 2^-25 in float16. Prompts
    may round keys and values with scales of heads to 16 bits, by half of u.
    """
    tokens, group = given.queries.shape[0], case.heads // case.kv_heads
    out = np.zeros((tokens, case.heads, case.value))
    lse = np.full((tokens, case.heads), -np.inf)
    out_bound, lse_bound = np.zeros_like(out), np.zeros_like(lse)
    loc, starts = given.query_start_loc, given.first_positions
    key_scale = np.broadcast_to(np.asarray(given.key_scale, float), case.kv_heads)
    value_scale = np.broadcast_to(np.asarray(given.value_scale, float), case.kv_heads)
    is_bf16 = "bfloat16" in (case.queries, case.pages) or case.by_heads is not None
    rounding = 2.0**-8 if is_bf16 else 2.0**-11
    if case.queries == "float32" and case.pages in ("float32", *BY_HEADS):
        rounding = 2.0**-22
    least = 2.0**-25 if case.queries == "float16" else 1e-30
    for request, length in enumerate(given.seq_lens.tolist()):
        begin, end = (request, request + 1) if loc is None else loc[request : request + 2].tolist()
        is_prompt = case.tokens >= PREFILL_ROWS and end - begin > MIN_QUERIES
        widened = 0.0
        if case.by_heads is not None and is_prompt and not case.reproducible:
            widened = 2.0**-9 if case.queries == "bfloat16" else 2.0**-12
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
            if case.by_heads is not None:
                widths = case.kv_heads, case.key, case.value
                parts = unpack_by_heads(case.pages, rows[:, 0], *widths)
                rows = np.concatenate(parts, axis=-1)
            rows_of_keys = rows
            if case.pages == PACKED:
                rows, rows_of_keys = unpack(case, rows), unpack(case, rows, exact=exact_keys)
            rows, rows_of_keys = rows.astype(float), rows_of_keys.astype(float)
            for head in range(case.heads):
                kv_head = head // group
                keys = rows_of_keys[:, kv_head, : case.key]
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
                off += 2.0**-18 + widened * sums * scale
                spread = weights @ abs(values) / total
                tiny = 2.0**-25 * abs(values).sum(axis=0) / total
                out_bound[token, head] = (rounding + widened + 2 * off) * spread + tiny
                out_bound[token, head] += rounding * abs(out[token, head]) + least
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


@functools.partial(jax.jit, static_argnames=("case", "implementation", "capability"))
def attend(
    arguments: Arguments,
    case: Case,
    implementation: str,
    capability: tuple[int, int] | None = None,  # each has a program of its own
) -> tuple[jax.Array, jax.Array]:
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
        row_packing=case.packing,
        causal=case.causal,
        first_positions=first_positions,
        interleaving=Interleaving(RANK, case.ranks, INTERLEAVE) if case.ranks > 1 else None,
        reproducible=case.reproducible,
        max_query_len=case.most,
        return_lse=True,
        implementation=implementation,
    )


def check(case: Case, arguments: Arguments, implementation: str) -> None:
    with kernels_run():
        capability = _capability.compute_capability()
        out, lse = attend(arguments, case, implementation, capability)
    check_output(case, arguments, out, lse)


def check_output(case: Case, arguments: Arguments, out: jax.Array, lse: jax.Array) -> None:
    """Checks an output and its log-sum-exp against the definition."""
    assert out.dtype == jnp.dtype(case.queries) and lse.dtype == jnp.float32
    found, found_lse = np.asarray(out, float), np.asarray(lse, float)
    assert np.isfinite(found).all() and not np.isnan(found_lse).any()
    ratios = list[tuple[float, float]]()
    # Without wgmma, products of packed keys are multiplied by their scales, and not the keys.
    for exact_keys in (False, True) if case.pages == PACKED else (False,):
        expected = define(case, arguments, exact_keys=exact_keys)
        np.testing.assert_array_equal(np.isinf(found_lse), np.isinf(expected.lse))
        known = np.isfinite(expected.lse)
        off_lse = abs(found_lse[known] - expected.lse[known]) / expected.lse_bound[known]
        off = abs(found - expected.out) / np.maximum(expected.out_bound, 1e-30)
        ratios.append((off.max(initial=0), off_lse.max(initial=0)))
    assert min(map(max, ratios)) <= 1, ratios


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes NaN of what no kernel writes: on a GPU it is anything, and zeros on a CPU."""
    monkeypatch.setattr(jnp, "empty", lambda shape, dtype: jnp.full(shape, math.nan, dtype))


# Of poison, and of sums of what is not seen.
quietly = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")


def interpret_on_a_small_gpu(monkeypatch: pytest.MonkeyPatch, thread_blocks: int = 3) -> int:
    """Interprets all but the operands that a GPU takes from registers; returns the thread blocks.

    There are more, of few steps each, where nobody may miss the last arrival at a barrier.
    """
    from pallas_kernels import _mosaic

    count = thread_blocks if HAS_LATE_BARRIERS else 8
    poison_outputs(monkeypatch)
    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: count)
    return count


def interpret_copies_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies rows at once, because interpret mode does not know cp.async."""
    from pallas_kernels._paged_attention import mla_rows

    def start(source: Any, rows: Any, found: Any, target: Any) -> None:
        rows[...] = found
        for i in range(len(found)):
            row = source[jnp.maximum(rows[i], 0)]
            target[i] = jnp.where(rows[i] < 0, jnp.zeros_like(row), row)

    def start_packed(source: Any, rows: Any, found: Any, *targets: Any) -> None:
        rows[...] = found
        for i in range(len(found)):
            row = source[jnp.maximum(rows[i], 0)]
            row = jnp.where(rows[i] < 0, jnp.zeros_like(row), row)
            for target in targets:
                part, row = jnp.split(row, [target.shape[1] * target.dtype.itemsize])
                dtype = target.dtype
                part = part.reshape(-1, dtype.itemsize) if dtype.itemsize > 1 else part
                target[i] = lax.bitcast_convert_type(part, dtype)

    monkeypatch.setattr(mla_rows, "start_tiled", start)
    monkeypatch.setattr(mla_rows, "start_tiled_packed", start_packed)
    monkeypatch.setattr(mla_rows, "finish", lambda pending, **_: None)
