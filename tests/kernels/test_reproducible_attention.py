"""Bits of attention that depend on a token's own request alone.

On a machine without a GPU the Mosaic kernels run in interpret mode.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import _capability
from pallas_kernels._paged_attention import rounds, tasks
from pallas_kernels._paged_attention.arguments import _whole_splits
from tests.helpers import ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.kernels import calls
from tests.kernels.test_attention_tasks import rule_of
from tests.kernels.test_paged_attention import lower

PAGES = 400  # of the pool
Bits = tuple[bytes, bytes]  # of the output of a token, and of its log-sum-exp


class Case(NamedTuple):
    """A layer, and the shapes of calls that are compiled: requests, tokens, columns of a table.

    No tokens: one query each. The first shape is that of a request by itself.
    """

    shapes: tuple[tuple[int, int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    key: int = 64
    value: int = 64
    page_tokens: int = 32
    dtype: str = "bfloat16"
    window: int | None = None
    latent: bool = False

    @property
    def longest(self) -> int:
        return self.shapes[0][2] * self.page_tokens


class Request(NamedTuple):
    """The request whose bits are looked at."""

    queries: np.ndarray  # [longest, heads, K]
    rows: np.ndarray  # [longest, kv_heads, width]


@functools.cache
def request_of(case: Case) -> Request:
    rng = np.random.default_rng(0)
    width = case.key + (0 if case.latent else case.value)
    queries = rng.normal(size=(case.longest, case.heads, case.key)).astype(jnp.bfloat16)
    rows = rng.normal(size=(case.longest, case.kv_heads, width)).astype(jnp.dtype(case.dtype))
    return Request(queries, rows)


class Site(NamedTuple):
    """The site of the request: shape and row, its end and last tokens, and all else by a seed.

    first: the page that the table of a window begins with; None: any.
    """

    shape: int
    row: int
    end: int
    count: int
    seed: int
    first: int | None = None


def attend_at(case: Case, site: Site, attend: Callable) -> dict[int, Bits]:
    """Returns the bits of the last tokens of the request, by position."""
    request, rng = request_of(case), np.random.default_rng(site.seed)
    batch, tokens, width = case.shapes[site.shape]
    lens = rng.integers(0, width * case.page_tokens + 1, batch)
    counts = np.minimum(rng.integers(0, 9, batch), lens) if tokens else np.ones(batch, int)
    lens[site.row], counts[site.row] = site.end, site.count
    counts *= np.cumsum(counts) <= (tokens or batch)  # what does not fit computes nothing
    assert counts[site.row] == site.count
    pages = rng.normal(size=(PAGES, case.page_tokens, *request.rows.shape[1:]))
    tables = rng.integers(0, PAGES, (batch, width))
    tables[rng.random(tables.shape) < 0.05] = rng.choice([-1, PAGES])
    num_pages = -(-site.end // case.page_tokens)
    ids = rng.permutation(PAGES)[:num_pages]
    first = 0  # tables of windows may begin anywhere before the first key that is seen
    if case.window is not None:
        first = max(0, site.end - site.count + 1 - case.window) // case.page_tokens
        first = int(rng.integers(0, first + 1)) if site.first is None else site.first
    tables[site.row] = rng.integers(0, PAGES, width)
    tables[site.row, : num_pages - first] = ids[first:]
    content = np.full((num_pages * case.page_tokens, *pages.shape[2:]), math.nan)
    content[: site.end] = request.rows[: site.end]
    pages[ids] = content.reshape(num_pages, *pages.shape[1:])
    begin = int(counts[: site.row].sum()) if tokens else site.row
    queries = rng.normal(size=(tokens or batch, case.heads, case.key)).astype(jnp.bfloat16)
    queries[begin : begin + site.count] = request.queries[site.end - site.count : site.end]
    firsts = np.zeros(batch, int)
    firsts[site.row] = first * case.page_tokens
    loc = as_ids(np.cumsum([0, *counts])) if tokens else None
    pages = jnp.asarray(pages.astype(request.rows.dtype))
    with kernels_run():
        arrays = jax.tree.map(jnp.asarray, (as_ids(tables), as_ids(lens), loc, as_ids(firsts)))
        out, lse = map(np.asarray, attend(jnp.asarray(queries), pages, *arrays))
    assert np.isfinite(out[begin : begin + site.count].astype(float)).all()
    return {
        site.end - site.count + i: (out[begin + i].tobytes(), lse[begin + i].tobytes())
        for i in range(site.count)
    }


def make_attend(case: Case, implementation: str) -> Callable:
    def attend(queries, pages, tables, lens, loc, firsts):
        return calls.attend(
            *(queries, pages, tables, lens, loc),
            first_positions=None if case.window is None else firsts,
            sliding_window=case.window,
            value_width=case.value if case.latent else None,
            key_scale=0.7,
            value_scale=1.3,
            reproducible=True,
            return_lse=True,
            implementation=implementation,
        )

    return jax.jit(attend)


@st.composite
def sites(draw: st.DrawFn, case: Case) -> Site:
    shape = draw(st.sampled_from(range(len(case.shapes))))
    batch, tokens, _ = case.shapes[shape]
    ends = [1, case.page_tokens, 64, 65, 128, 129, case.longest]
    end = draw(st.sampled_from(ends) | st.integers(1, case.longest))
    count = 1
    if tokens:  # the others compute up to 8 tokens each
        count = draw(st.integers(1, 6) | st.just(tokens - 8 * (batch - 1)))
    row = draw(st.integers(0, batch - 1))
    return Site(shape, row, end, min(count, end), draw(st.integers(0, 2**16)))


def check_same_bits(case: Case, site: Site, attend: Callable) -> None:
    """Checks that the tokens have the bits that they have one by one, in requests alone."""
    found = attend_at(case, site, attend)
    for position in {max(found), min(found), max(min(found), max(found) - 9)}:
        alone = attend_at(case, Site(0, 0, position + 1, 1, seed=1), attend)
        assert found[position] == alone[position], f"position {position} has other bits"


SHAPES = ((1, 0, 30), (4, 40, 31))
XLA_CASES = {
    "8 bits": Case(SHAPES, heads=6, kv_heads=2, dtype="float8_e4m3fn"),
    "window": Case(SHAPES, heads=3, key=20, value=12, page_tokens=20, dtype="float32", window=70),
    "latent": Case(SHAPES, heads=4, key=72, value=40, latent=True),
}


@pytest.mark.skipif(ON_GPU, reason="XLA chooses GEMMs on GPUs by their shapes")
@pytest.mark.parametrize("name", XLA_CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_xla_gives_a_token_the_same_bits_wherever_it_is(name: str, data: st.DataObject) -> None:
    case = XLA_CASES[name]
    check_same_bits(case, data.draw(sites(case)), attend_of(case, "xla"))


@functools.cache
def attend_of(case: Case, implementation: str) -> Callable:
    return make_attend(case, implementation)


LONG = ((1, 0, 300), (5, 0, 320), (9, 90, 310), (3, 2100, 300), (64, 0, 300))
GPU_CASES = {
    "full": Case(LONG, heads=8, kv_heads=2, key=128, value=128),
    "8 bits": Case(LONG, heads=8, kv_heads=1, key=128, value=128, dtype="float8_e4m3fn"),
    "window": Case(LONG, heads=8, kv_heads=4, window=1000, key=128, value=128),
    "256 wide": Case(LONG, heads=4, kv_heads=1, key=256, value=256),
    "latent": Case(LONG, heads=16, key=576, value=512, latent=True),
    "latent, 8 bits": Case(LONG, heads=128, key=576, value=512, latent=True, dtype="float8_e4m3fn"),
}


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in interpret mode; on a GPU")
@needs_mosaic
@pytest.mark.parametrize("name", GPU_CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_mosaic_gives_a_token_the_same_bits_wherever_it_is(name: str, data: st.DataObject) -> None:
    case = GPU_CASES[name]
    check_same_bits(case, data.draw(sites(case)), attend_of(case, "mosaic_gpu"))


@pytest.fixture(scope="module", autouse=True)
def several_rounds() -> Iterator[None]:
    """Lets requests of many queries, or with tables of many columns, take more than one round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "WORKSPACE", 2**24 if ON_GPU else 40_000)
        yield


@pytest.fixture
def small_gpu(monkeypatch) -> None:
    """A GPU of few thread blocks whose splits are short."""
    from pallas_kernels import _mosaic

    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    monkeypatch.setattr(_capability, "max_thread_blocks", lambda per_sm: 3)
    monkeypatch.setattr(tasks, "SPLIT", 2)
    monkeypatch.setattr(tasks, "LATENT_SPLIT", 2)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.usefixtures("small_gpu")
def test_mosaic_gives_a_token_the_same_bits_in_interpret_mode() -> None:
    """Among decodes only: products of other shapes have other bits on a CPU, not on a GPU."""
    case = Case(((2, 0, 3),), window=90, page_tokens=96)  # a split ends within a page
    attend = make_attend(case, "mosaic_gpu")
    one, other = (attend_at(case, Site(0, row, 200, 1, 3, first=row), attend) for row in range(2))
    assert one == other


@pytest.mark.parametrize("steps", [2, 3])
def test_tables_that_begin_anywhere_have_each_page_in_one_place_of_a_segment(
    steps: int, monkeypatch
) -> None:
    monkeypatch.setattr(tasks, "SPLIT", steps)
    for page in [24, 96, 100, 192]:
        rule = rule_of("a window").replace(page_tokens=page, reproducible=True)
        pages = np.arange(40)[:, None] + np.arange(3)[None]  # tables that begin with any page
        arrays = map(jnp.asarray, (as_ids(pages), as_ids(pages[:, 0] * page)))
        found, firsts = _whole_splits(rule, *arrays)
        width = found.shape[1] * page
        fixed = tasks.FixedSplits.from_config(rule, found.shape[1])
        assert fixed == (steps, -(-width // (steps * tasks.STEP)))
        assert (np.asarray(firsts) % (steps * tasks.STEP) == 0).all()
        for table, first, own in zip(*map(np.asarray, (found, firsts)), pages, strict=True):
            assert 0 <= first <= own[0] * page, "a table begins before it is there"
            wanted = np.full(len(table), -1)
            wanted[own - first // page] = own
            assert table.tolist() == wanted.tolist()


@pytest.mark.skipif(ON_GPU, reason="a GPU runs more")
@needs_mosaic
@pytest.mark.usefixtures("small_gpu")
def test_splits_that_workers_decide_are_found(monkeypatch) -> None:
    """So the tests see a dependence on others, and splits are what it comes from."""
    from pallas_kernels._paged_attention import decode, mosaic

    monkeypatch.setattr(decode, "split_steps", lambda rule: None)
    monkeypatch.setattr(mosaic.FixedSplits, "from_config", lambda rule, width: None)
    case = Case(((2, 0, 3),), page_tokens=64)
    with pytest.raises(AssertionError, match="position 179 has other bits"):
        check_same_bits(case, Site(0, 1, 180, 1, seed=2), make_attend(case, "mosaic_gpu"))


@needs_mosaic
@pytest.mark.parametrize("latent", [False, True])
def test_splits_have_the_same_sum_however_many_workers_there_are(latent: bool, monkeypatch) -> None:
    """Workers come from the GPU and the batch, and decide how many splits are added at once."""
    from pallas_kernels._mosaic import written
    from pallas_kernels._paged_attention import combine
    from pallas_kernels._paged_attention.decode_block import Outputs
    from pallas_kernels._paged_attention.decode_shape import SINKS
    from pallas_kernels._paged_attention.mla_combine import combine_latents
    from pallas_kernels._paged_attention.partial import PartialSoftmax

    monkeypatch.setattr(combine, "ELEMENTS_TOGETHER", 256)  # 2 or 4 splits
    rng, width = np.random.default_rng(0), 128
    rows, count = (2, 4) if latent else (8, 6)
    rule = rule_of("all keys").replace(group=rows, value_width=width, reproducible=True)
    fields = dict.fromkeys(tasks.Tile._fields, 0) | {"count": 1, "used_tokens": 1}
    tiles = as_ids([[*(fields | {"num_splits": count}).values()]])
    shape = (count, rows) if latent else (count, 1, rows)
    of_values = (count, rows, width) if latent else (count, 1, width, rows)
    highest = np.sort(rng.normal(size=shape), axis=0)  # so that each shrinks the sum before it
    parts = rng.normal(size=of_values), highest, rng.uniform(1, 9, shape)
    splits = PartialSoftmax(*(jnp.asarray(part, jnp.float32) for part in parts))
    numbers = jnp.ones((1, SINKS + rows), jnp.float32)
    # All bits, where Mosaic can store them transposed; the log-sum-exp has all of them anyway.
    dtype = jnp.bfloat16 if ON_GPU and not latent else jnp.float32

    @functools.partial(jax.jit, static_argnums=0)
    def add_up(workers: int, splits: PartialSoftmax) -> tuple[jax.Array, jax.Array]:
        out = jax.new_ref(jnp.zeros((1, rows, width), dtype))
        if latent:
            task_map = tasks.TaskMap(jnp.asarray(tiles), jnp.zeros((workers, 4), jnp.int32), count)
            return combine_latents(rule, task_map, splits, numbers, out), written(out)
        lse = jax.new_ref(jnp.zeros((1, 1, rows), jnp.float32))
        given = rule, jnp.asarray(tiles), splits, numbers, Outputs(out, lse)
        combine.combine(*given, num_workers=workers, finished=False)
        return written(lse), written(out)

    with kernels_run():
        few, many = [jax.tree.map(np.asarray, add_up(workers, splits)) for workers in (1, 90)]
    assert np.isfinite(few[0]).all() and few[1].all()
    jax.tree.map(np.testing.assert_array_equal, few, many)


@pytest.mark.skipif(ON_GPU, reason="XLA chooses GEMMs on GPUs by their shapes")
def test_rounds_that_the_batch_decides_are_found(monkeypatch) -> None:
    from pallas_kernels._paged_attention import xla

    monkeypatch.setattr(xla, "_blocks_at_once", lambda arrays, *_: arrays.block_tables.shape[0])
    case = XLA_CASES["latent"]
    with pytest.raises(AssertionError, match="position 499 has other bits"):
        check_same_bits(case, Site(1, 1, 500, 1, seed=2), make_attend(case, "xla"))


@needs_mosaic
def test_one_kernel_serves_decodes_and_prompts() -> None:
    """One call of it each for requests of few queries and of many; no other kernel attends."""
    struct: Any = jax.ShapeDtypeStruct
    arguments = [
        struct((1024, 32, 128), jnp.bfloat16),
        struct((999, 16, 8, 256), jnp.bfloat16),
        *(struct(shape, jnp.int32) for shape in ((64, 64), (64,), (65,))),
    ]
    attend = functools.partial(calls.attend, reproducible=True, implementation="mosaic_gpu")
    text = lower(attend, arguments)
    assert text.count("custom_call @mosaic_gpu") == 4
    assert "paged_attention_prefill" not in text
