"""Page lists of hand-made batches against the definition of their mask, written out with loops."""

import dataclasses
import functools
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.attention import (
    BAD_PAGE_ID,
    MISSING_PAGE,
    TOO_MANY_PAGES,
    BlockMaskIndices,
    PageCSR,
    PageListError,
    PageLists,
    _page_lists,
    _segments,
    block_mask_indices,
)
from jaxkv._src.attention._block_mask import map_pages
from jaxkv._src.attention._page_lists import make_csr, make_lists
from jaxkv._src.attention._segments import PageTables
from jaxkv._src.cache import BAD_BATCH
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import PageListSizes, max_num_query_groups, page_list_bytes
from tests.helpers import as_ids

# Nothing divides anything: the last page, group and batch are all partly filled.
SIZES = PageListSizes(
    max_num_batched_tokens=14,
    max_num_seqs=5,
    max_model_len=20,
    page_tokens=3,
    q_block_tokens=4,
    num_pages=60,
)
PAGES = SIZES.pages_per_seq
MASKS = [
    pytest.param(SIZES, id="causal"),
    pytest.param(dataclasses.replace(SIZES, sliding_window=1), id="window 1"),
    pytest.param(dataclasses.replace(SIZES, sliding_window=5), id="window 5"),
    pytest.param(dataclasses.replace(SIZES, chunk_size=4), id="chunks 4"),
    pytest.param(dataclasses.replace(SIZES, chunk_size=6), id="chunks 6"),
    pytest.param(  # of fewer pages than a query group lists
        dataclasses.replace(SIZES, causal=False, num_pages=PAGES + 2), id="not causal"
    ),
]


@dataclasses.dataclass
class Case:
    """Requests laid end to end; ``pages`` knows all of their pages, the past ones too."""

    pages: np.ndarray  # int32[B, PAGES]
    lens: list[int]
    computed: list[int]

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int32)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every token of the batch."""
        return [
            (request, computed + i)
            for request, (computed, n) in enumerate(zip(self.computed, self.lens, strict=True))
            for i in range(n)
        ]

    @property
    def seq_lens(self) -> np.ndarray:
        pairs = zip(self.computed, self.lens, strict=True)
        return np.array([computed + n if n else 0 for computed, n in pairs], np.int32)

    def tables(self, first_pages: list[int] | None = None) -> PageTables:
        """Tables that begin at these pages: nothing before them is in reach."""
        first_pages = first_pages or [0] * len(self.lens)
        cut = np.zeros_like(self.pages)
        for request, first in enumerate(first_pages):
            cut[request, : cut.shape[1] - first] = self.pages[request, first:]
        arrays = cut, first_pages, self.query_start_loc, self.computed
        return PageTables(*(np.array(array, np.int32) for array in arrays))

    def tables_from(self, data: st.DataObject, sizes: PageListSizes) -> PageTables:
        """Tables that begin anywhere up to the first page that a request sees."""
        starts = []
        for request, computed in enumerate(self.computed):
            seen = [k for k in range(computed + 1) if sees(self, sizes, (request, computed), k)]
            first = seen[0] // sizes.page_tokens if seen else 0
            starts.append(data.draw(st.integers(0, first)))
        return self.tables(starts)


@st.composite
def cases(draw) -> Case:
    lens, room = [], SIZES.max_num_batched_tokens
    for _ in range(SIZES.max_num_seqs):
        lens.append(draw(st.integers(0, min(room, 9))))
        room -= lens[-1]
    computed = [draw(st.integers(0, SIZES.max_model_len - n)) for n in lens]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.permutation(np.arange(1, SIZES.num_pages, dtype=np.int32))
    pages = ids[: SIZES.max_num_seqs * PAGES].reshape(SIZES.max_num_seqs, PAGES).copy()
    for request in range(1, SIZES.max_num_seqs):  # a common prefix, as prefix caching makes them
        shared = draw(st.integers(0, PAGES))
        pages[request, :shared] = pages[request - 1, :shared]
    for request, (start, n) in enumerate(zip(computed, lens, strict=True)):
        pages[request, -(-(start + n) // SIZES.page_tokens) :] = 0  # the tail
    return Case(pages, lens, computed)


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    lens = rng.multinomial(rng.integers(0, 15), [1 / 5] * 5).tolist()
    computed = [int(rng.integers(0, SIZES.max_model_len - n + 1)) for n in lens]
    pages = rng.permutation(np.arange(1, SIZES.num_pages, dtype=np.int32))[: 5 * PAGES]
    pages = pages.reshape(5, PAGES)
    pages[1, :2] = pages[0, :2]
    return Case(pages, lens, computed)


def sees(case: Case, sizes: PageListSizes, token: tuple[int, int], key: int) -> bool:
    """The definition, for keys of the token's own request."""
    request, position = token
    if key >= case.seq_lens[request]:
        return False
    if not sizes.causal:
        return True
    if key > position:
        return False
    if sizes.chunk_size is not None:
        return key // sizes.chunk_size == position // sizes.chunk_size
    return sizes.sliding_window is None or position - key < sizes.sliding_window


def seen_pages(case: Case, sizes: PageListSizes) -> list[list[tuple[int, int]]]:
    """Per query group, every (request, logical page) that it sees, by trying every key."""
    seen = [set() for _ in range(sizes.num_query_groups)]
    for index, token in enumerate(case.tokens):
        for key in range(sizes.max_model_len):
            if sees(case, sizes, token, key):
                page = token[0], key // sizes.page_tokens
                seen[index // sizes.q_block_tokens].add(page)
    return [sorted(pages) for pages in seen]


def entries(lists: PageLists | PageCSR, where) -> list[tuple[int, int, int]]:
    columns = (lists.requests, lists.logical_pages, lists.pages)
    return list(zip(*(c[where].tolist() for c in columns), strict=True))


@functools.partial(jax.jit, static_argnames="sizes")
def make_all(
    tables: PageTables, sizes: PageListSizes = SIZES
) -> tuple[PageLists, PageCSR, BlockMaskIndices]:
    lists = make_lists(tables, sizes=sizes)
    return lists, make_csr(tables, sizes=sizes), block_mask_indices(lists)


@pytest.mark.parametrize("sizes", MASKS)
@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_a_page_is_listed_iff_it_is_seen(sizes, case, data) -> None:
    in_pool = 1 + case.pages % (sizes.num_pages - 1)
    case = dataclasses.replace(case, pages=np.where(case.pages > 0, in_pool, 0))
    made = make_all(case.tables_from(data, sizes), sizes)
    for each in made:
        jaxkv.check_errors(each)
    lists, csr, mask = jax.tree.map(np.asarray, made)
    offsets = csr.offsets
    for group, seen in enumerate(seen_pages(case, sizes)):
        wanted = [(request, page, case.pages[request, page]) for request, page in seen]
        count = int(lists.counts[group])
        assert entries(lists, (group, slice(count))) == wanted
        assert entries(csr, slice(offsets[group], offsets[group + 1])) == wanted
        assert set(entries(lists, (group, slice(count, None)))) <= {(-1, -1, 0)}
        distinct = sorted({int(page) for _, _, page in wanted})
        assert int(mask.kv_num_blocks[group]) == len(distinct)
        padding = [0] * (mask.kv_indices.shape[1] - len(distinct))
        assert mask.kv_indices[group].tolist() == distinct + padding
    assert set(entries(csr, slice(offsets[-1], None))) <= {(-1, -1, 0)}
    for made in (lists, csr):
        padding = [(-1, -1)] * (sizes.max_num_batched_tokens - len(case.tokens))
        tokens = list(zip(made.token_requests, made.positions, strict=True))
        assert tokens == case.tokens + padding
        np.testing.assert_array_equal(made.seq_lens, case.seq_lens)


@given(case=cases(), data=st.data())
def test_the_dense_map_takes_the_last_and_ignores_null_and_tails(case, data) -> None:
    twice = data.draw(st.integers(0, SIZES.max_num_seqs - 1))
    case.pages[twice, -1] = case.pages[twice, 0]
    lens = [data.draw(st.integers(0, SIZES.max_model_len)) for _ in case.lens]
    starts = [data.draw(st.integers(0, 2)) for _ in case.lens]
    wanted = np.full((SIZES.max_num_seqs, SIZES.num_pages), -1)
    for request, (n, start) in enumerate(zip(lens, starts, strict=True)):
        for page in range(start, -(-n // SIZES.page_tokens)):
            if case.pages[request, page]:
                wanted[request, case.pages[request, page]] = page
    got, flags = map_pages(case.tables(starts), as_ids(lens), sizes=SIZES)
    assert int(flags) == 0
    np.testing.assert_array_equal(got, wanted)


@settings(max_examples=20)
@given(case=cases())
def test_lists_made_in_pieces_are_the_lists(case) -> None:
    """As for large batches, whose pairs are not all computed at once."""
    sizes = dataclasses.replace(SIZES, num_pages=SIZES.num_pages + 1)  # compiled here only
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segments, "PAIRS_AT_ONCE", 65)
        patch.setattr(_page_lists, "CSR_ROW", 10)
        pieces = make_all(case.tables(), sizes)[:2]
    for made, whole in zip(pieces, make_all(case.tables())[:2], strict=True):
        for got, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(got, wanted)


def torch_seen_pages(torch, token_requests, positions, mapping, sizes) -> list[list[int]]:
    """Per query group the pages of the pool in PyTorch's own block mask of the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_queries = sizes.num_query_groups * sizes.q_block_tokens
    padding = num_queries - len(token_requests)
    requests, positions = (
        torch.tensor(np.pad(array, (0, padding), constant_values=-1).astype(np.int64))
        for array in (token_requests, positions)
    )
    mapping = torch.tensor(np.asarray(mapping).astype(np.int64))

    def mask_mod(b, h, query, slot):
        request, position = requests[query], positions[query]
        page = mapping[request.clamp(min=0), slot // sizes.page_tokens]
        key = page * sizes.page_tokens + slot % sizes.page_tokens
        seen = (request >= 0) & (page >= 0) & (key <= position)
        if sizes.sliding_window is not None:
            seen = seen & (position - key < sizes.sliding_window)
        if sizes.chunk_size is not None:
            seen = seen & (position // sizes.chunk_size == key // sizes.chunk_size)
        return seen

    mask = create_block_mask(
        mask_mod,
        B=None,
        H=None,
        Q_LEN=num_queries,
        KV_LEN=sizes.num_pages * sizes.page_tokens,
        device="cpu",
        BLOCK_SIZE=(sizes.q_block_tokens, sizes.page_tokens),
    )
    pages = [[] for _ in range(sizes.num_query_groups)]
    # PyTorch keeps blocks without a masked element in lists of their own.
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for group, listed in enumerate(pages):
            listed += indices[0, 0, group, : counts[0, 0, group]].tolist()
    return [sorted(listed) for listed in pages]


@pytest.mark.parametrize("sizes", MASKS[:5])
@pytest.mark.filterwarnings("ignore")  # torch's own, on import
def test_the_same_pages_as_pytorch(sizes) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch's create_block_mask")
    pytest.importorskip(
        "torch.nn.attention.flex_attention", reason="FlexAttention needs torch >= 2.5"
    )
    for seed in range(5):
        case = random_case(seed)
        lists = make_lists(case.tables(), sizes=sizes)
        mapping, _ = map_pages(case.tables(), case.seq_lens, sizes=sizes)
        wanted = torch_seen_pages(torch, lists.token_requests, lists.positions, mapping, sizes)
        mask = block_mask_indices(lists)
        counts, indices = mask.kv_num_blocks.tolist(), mask.kv_indices.tolist()
        for count, listed, pages in zip(counts, indices, wanted, strict=True):
            assert listed[:count] == pages


# Sizes.


def test_the_shapes_whose_mismatch_stopped_an_engine() -> None:
    """Planned [4096, 256] from the longest sequence, built [1024, 4096] from the batch."""
    sizes = PageListSizes(
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        max_model_len=4096,
        page_tokens=16,
        q_block_tokens=16,
        num_pages=100_000,
    )
    assert (sizes.num_query_groups, sizes.list_width) == (1024, 4096)
    built = jax.eval_shape(lambda tables: make_lists(tables, sizes=sizes), shapes_of(256, 256))
    assert built.pages.shape == (1024, 4096)
    # The other way round: few tokens a step, long sequences.
    sizes = dataclasses.replace(sizes, max_num_batched_tokens=64, max_model_len=131_072)
    assert (sizes.num_query_groups, sizes.list_width) == (4, 16 * 8192)


def shapes_of(requests: int, width: int) -> PageTables:
    shapes = (requests, width), (requests,), (requests + 1,), (requests,)
    return PageTables(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


def test_widths_follow_requests_pool_and_window() -> None:
    def width(**changes) -> int:
        return dataclasses.replace(SIZES, **changes).list_width

    assert max_num_query_groups(14, 4) == SIZES.num_query_groups == 4
    assert width() == 4 * PAGES  # of 5 requests only 4 fit into a group
    assert width(num_pages=4) == 4 * 3  # four requests may see the same three pages
    assert width(num_pages=4, pages_are_shared=False) == 3
    assert width(pages_are_shared=False) == 4 * PAGES  # less than the layer's
    few = dataclasses.replace(SIZES, max_num_batched_tokens=2)  # than requests, and in a group
    assert few.list_width == few.csr_capacity == 2 * PAGES
    assert dataclasses.replace(SIZES, max_num_batched_tokens=5).csr_capacity == 5 * PAGES
    assert width(num_pages=2) == 4  # the fewest: one page, which all may see
    assert dataclasses.replace(SIZES, num_pages=4).block_mask_width == 3
    assert width(sliding_window=1) == 4  # each token sees one page
    assert width(sliding_window=2) == 4 * 2
    assert width(chunk_size=3) == 4  # chunks are pages
    assert width(chunk_size=4) == 4 * 2
    assert width(sliding_window=1000) == 4 * PAGES
    assert SIZES.csr_capacity == (4 + 5 - 1) * PAGES
    large = dataclasses.replace(
        SIZES,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=131_072,
        page_tokens=16,
        q_block_tokens=16,
        num_pages=500_000,
    )
    assert large.num_query_groups * large.list_width * 4 == 256 << 20
    assert large.csr_capacity * 4 == (512 + 255) * 8192 * 4


@pytest.mark.parametrize("kind", ["sliding_window", "chunk_size"])
@pytest.mark.parametrize("page_tokens", [1, 4, 6])
def test_the_width_for_one_request_is_what_its_worst_query_group_sees(kind, page_tokens) -> None:
    for size in (*range(1, 10), 12):
        for tokens in range(1, 10):
            sizes = dataclasses.replace(
                SIZES,
                **{kind: size},
                page_tokens=page_tokens,
                q_block_tokens=tokens,
                max_num_seqs=1,
                max_model_len=100,
                num_pages=200,
            )
            seen = []
            for position in range(size, size + 3 * page_tokens * size):
                first = position - size + 1 if kind == "sliding_window" else position // size * size
                last = position + tokens - 1
                seen.append(last // page_tokens - first // page_tokens + 1)
            assert sizes.list_width == max(seen)


@pytest.mark.parametrize("sizes", MASKS)
@settings(max_examples=40)
@given(tokens=st.integers(1, 14), seed=st.integers(0, 2**32 - 1))
def test_the_bounds_hold_for_batches_that_try_to_pass_them(sizes, tokens, seed) -> None:
    """Every request at its longest, the batch cut in every way."""
    rng = np.random.default_rng(seed)
    lens = rng.multinomial(tokens, rng.dirichlet([1] * 5)).tolist()
    case = Case(np.ones((5, PAGES), np.int32), lens, [sizes.max_model_len - n for n in lens])
    seen = [len(pages) for pages in seen_pages(case, sizes)]
    assert max(seen) <= sizes.list_width and sum(seen) <= sizes.csr_capacity


@st.composite
def small_sizes(draw) -> PageListSizes:
    """Of every mask, and of pools that hold a request and little more."""
    sizes = PageListSizes(
        max_num_batched_tokens=draw(st.integers(1, 12)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_model_len=draw(st.integers(1, 12)),
        page_tokens=draw(st.integers(1, 4)),
        q_block_tokens=draw(st.integers(1, 6)),
        num_pages=60,
    )
    masks = [{}, {"causal": False}]
    masks += [{n: draw(st.integers(1, 12))} for n in ("sliding_window", "chunk_size")]
    pages = sizes.pages_per_seq + draw(st.integers(1, 4))
    return dataclasses.replace(sizes, num_pages=pages, **draw(st.sampled_from(masks)))


@given(sizes=small_sizes(), data=st.data())
def test_the_bounds_hold_for_requests_that_hold_pages_together_and_apart(sizes, data) -> None:
    """The pages of a request are its own, or all of them are those of the others as well."""
    lens, room, pages = [], sizes.max_num_batched_tokens, sizes.num_pages - 1
    computed = []
    for _ in range(sizes.max_num_seqs):
        total = min(room, sizes.max_model_len)
        lens.append(data.draw(st.integers(total // 2, total)))
        room -= lens[-1]
        computed.append(sizes.max_model_len - lens[-1])
    case = Case(np.zeros(0), lens, computed)
    seen = [len(pages) for pages in seen_pages(case, sizes)]
    assert max(seen) <= sizes.list_width and sum(seen) <= sizes.csr_capacity
    alone = dataclasses.replace(sizes, pages_are_shared=False)
    for request in range(sizes.max_num_seqs):  # no more of them than have pages of their own
        held = cdiv(computed[request] + lens[request], sizes.page_tokens)
        lens[request] = lens[request] if held <= pages else 0
        pages -= held if lens[request] else 0
    seen = [len(pages) for pages in seen_pages(case, alone)]
    assert max(seen) <= alone.list_width and sum(seen) <= alone.csr_capacity


@pytest.mark.parametrize("num_pages", [3, 60])  # fewer than a group lists, and more
def test_planned_bytes_are_those_of_what_is_made(num_pages: int) -> None:
    sizes = dataclasses.replace(SIZES, num_pages=num_pages, q_block_tokens=2)
    assert (sizes.block_mask_width < sizes.list_width) == (num_pages == 3)
    tables = shapes_of(sizes.max_num_seqs, PAGES)
    lists = jax.eval_shape(functools.partial(make_lists, sizes=sizes), tables)
    made = {
        "lists": lists,
        "csr": jax.eval_shape(functools.partial(make_csr, sizes=sizes), tables),
        "block_mask": jax.eval_shape(block_mask_indices, lists),
    }
    for kind, arrays in made.items():
        found = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        assert page_list_bytes(sizes, kind) == found


def test_a_batch_reaches_the_bounds() -> None:
    sizes, lens = dataclasses.replace(SIZES, causal=False), [1, 1, 1, 5, 6]
    case = Case(np.ones((5, PAGES), np.int32), lens, [sizes.max_model_len - n for n in lens])
    seen = [len(pages) for pages in seen_pages(case, sizes)]
    assert max(seen) == sizes.list_width and sum(seen) == sizes.csr_capacity - PAGES
    lens = [3, 3, 3, 2, 3]  # no request begins where a query group does
    case = Case(np.ones((5, PAGES), np.int32), lens, [sizes.max_model_len - n for n in lens])
    assert sum(len(pages) for pages in seen_pages(case, sizes)) == sizes.csr_capacity


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"page_tokens": 0}, ValueError, "page_tokens must be at least 1"),
        ({"q_block_tokens": 16.0}, TypeError, "q_block_tokens must be an int"),
        ({"max_num_seqs": -1}, ValueError, "max_num_seqs"),
        ({"num_pages": 1}, ValueError, "num_pages=1 leaves no page next to the null page"),
        ({"sliding_window": 0}, ValueError, "sliding_window"),
        ({"sliding_window": 4, "causal": False}, ValueError, "sliding_window=4.* causal=True"),
        ({"chunk_size": 4, "causal": False}, ValueError, "chunk_size=4.* needs causal=True"),
        ({"chunk_size": 4, "sliding_window": 4}, ValueError, "both given"),
        ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
        *(
            (changes, ValueError, "token positions reach")
            for changes in (
                {"max_model_len": 2**31},
                {"max_model_len": 2**31 - 100, "page_tokens": 2**20},  # of the last page, too
                {"max_model_len": 2**30, "q_block_tokens": 2**30},  # and of the last query group
            )
        ),
        (
            {"max_model_len": 2**30, "page_tokens": 1, "num_pages": 2**30},
            ValueError,
            "the pages that a batch lists reach",
        ),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(SIZES, **changes)
    with pytest.raises(ValueError, match="kind='dense'; use one of 'lists'"):
        page_list_bytes(SIZES, "dense")
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        max_num_query_groups(0, 16)


@pytest.mark.parametrize(
    ("page_tokens", "longest", "message"),
    [(2**30 - 1, 2**31 - 2, "token positions"), (1, 2**30 - 2, "the pages that a batch lists")],
)
def test_sizes_are_taken_as_long_as_int32_counts_what_is_listed(
    page_tokens: int, longest: int, message: str
) -> None:
    one = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "q_block_tokens": 1, "num_pages": 4}
    sizes = PageListSizes(**one, max_model_len=longest, page_tokens=page_tokens)
    with pytest.raises(ValueError, match=f"{message} reach"):
        dataclasses.replace(sizes, max_model_len=longest + 1)


# Error flags.


def flags_of(tables: PageTables, sizes: PageListSizes = SIZES) -> list[int]:
    return [int(made.error_flags) for made in make_all(tables, sizes)[:2]]


def one_request(pages: list[int], position: int) -> PageTables:
    arrays = [pages], [0], [0, 1], [position]
    return PageTables(*map(as_ids, arrays))


def test_what_does_not_fit_is_flagged_and_cut_where_the_lists_end() -> None:
    narrow = dataclasses.replace(SIZES, num_pages=3, pages_are_shared=False)
    assert (narrow.list_width, narrow.csr_capacity) == (2, 8)
    pages = np.tile(np.array([[1, 2]], np.int32), (5, 1))  # shared after all
    tables = Case(pages, [1] * 5, [5] * 5).tables()
    lists, csr, mask = make_all(tables, narrow)
    np.testing.assert_array_equal(lists.counts, [2, 2, 0, 0])
    np.testing.assert_array_equal(csr.offsets, [0, 8, 8, 8, 8])  # 8 pairs, then 2 more
    for made in (lists, csr, mask):
        assert int(made.error_flags) == TOO_MANY_PAGES
        with pytest.raises(PageListError, match="more pages than the lists hold") as caught:
            jaxkv.check_errors(made)
    assert pickle.loads(pickle.dumps(caught.value)).flags == TOO_MANY_PAGES
    assert flags_of(Case(pages, [1, 0, 0, 0, 0], [5] * 5).tables(), narrow) == [0, 0]


def test_a_batch_that_fills_the_lists_exactly_is_not_flagged() -> None:
    narrow = dataclasses.replace(SIZES, num_pages=3, pages_are_shared=False)
    pages = np.tile(np.array([[1, 2]], np.int32), (5, 1))
    made = make_all(Case(pages, [1, 1, 1, 1, 0], [5] * 5).tables(), narrow)
    _, full_csr, _ = jax.tree.map(np.asarray, made)
    assert (full_csr.offsets[-1], full_csr.error_flags) == (narrow.csr_capacity, 0)
    assert (full_csr.pages > 0).all()
    made = make_all(Case(pages, [1, 0, 0, 0, 0], [5] * 5).tables(), narrow)
    full_list, _, _ = jax.tree.map(np.asarray, made)
    assert (full_list.counts[0], full_list.error_flags) == (narrow.list_width, 0)


def first_pages(tables: PageTables, sizes: PageListSizes = SIZES) -> list[int]:
    """The pages that the first query group lists."""
    lists = jax.tree.map(np.asarray, make_all(tables, sizes)[0])
    return lists.pages[0, : lists.counts[0]].tolist()


def test_visible_pages_that_are_not_there_are_flagged_and_read_as_null() -> None:
    held = [3, 0, 60, 9]
    for position, flags, pages in [
        (2, 0, [3]),
        (3, MISSING_PAGE, [3, 0]),
        (6, MISSING_PAGE | BAD_PAGE_ID, [3, 0, 0]),
        (12, MISSING_PAGE | BAD_PAGE_ID, [3, 0, 0, 9]),  # past the table
    ]:
        tables = one_request(held, position)
        assert flags_of(tables) == [flags] * 2
        assert first_pages(tables) == pages
    windowed = dataclasses.replace(SIZES, sliding_window=5)
    case = Case(np.tile(as_ids([*held, 8, 0, 0]), (5, 1)), [1, 0, 0, 0, 0], [13, 0, 0, 0, 0])
    assert flags_of(case.tables(), windowed) == [0, 0]  # the null one is not visible
    late = dataclasses.replace(case, computed=[11, 0, 0, 0, 0]).tables([3, 0, 0, 0, 0])
    assert flags_of(late, windowed) == [MISSING_PAGE] * 2  # page 2 lies before the table
    assert first_pages(late, windowed) == [0, 9]
    assert flags_of(case.tables([3, 0, 0, 0, 0]), windowed) == [0, 0]
    long = one_request(list(range(1, 11)), 22)  # > max_model_len
    assert flags_of(long) == [MISSING_PAGE] * 2
    assert np.asarray(make_all(long)[1].offsets)[-1] == PAGES
    assert first_pages(long) == [*range(1, 1 + PAGES)]
    _, flags = map_pages(one_request(held, 8), as_ids([9]), sizes=SIZES)
    assert int(flags) == BAD_PAGE_ID


@pytest.mark.parametrize(
    "query_start_loc, computed",
    [
        ([0, 3, 2, 4, 4, 4], [0, 0, 0, 0, 0]),
        ([1, 3, 4, 4, 4, 4], [0, 0, 0, 0, 0]),
        ([0, -1, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([0, -(2**31), *[2**31 - 1] * 4], [0, 0, 0, 0, 0]),
        ([0, 3, 6, 9, 12, 15], [0, 0, 0, 0, 0]),
        ([0, 3, 6, 6, 6, 6], [0, -1, 0, 0, 0]),
        ([0, 3, 6, 6, 6, 6], [0, -(2**31), 0, 0, 0]),
        ([0, 3, 6, 6, 6, 6], [0, 2**31 - 2, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("sizes", [MASKS[0], MASKS[2], MASKS[3]])
def test_a_malformed_batch_lists_nothing(sizes, query_start_loc, computed) -> None:
    tables = (
        random_case(0)
        .tables()
        ._replace(query_start_loc=as_ids(query_start_loc), num_computed_tokens=as_ids(computed))
    )
    assert flags_of(tables, sizes) == [BAD_BATCH] * 2
    lists = jax.tree.map(np.asarray, make_all(tables, sizes)[0])
    assert not lists.counts.any() and (lists.token_requests == -1).all()
    assert not lists.seq_lens.any()
    with pytest.raises(PageListError, match="query_start_loc that decreases"):
        jaxkv.check_errors(lists)


def test_no_tokens_and_padding_requests_list_nothing() -> None:
    tables = Case(random_case(0).pages, [0] * 5, [0, 7, -1, 0, 0]).tables()
    made = make_all(tables)
    jaxkv.check_errors(made[0])
    lists, csr, mask = jax.tree.map(np.asarray, made)
    assert not lists.counts.any() and not lists.pages.any() and (lists.token_requests == -1).all()
    assert not mask.kv_num_blocks.any() and not mask.kv_indices.any()
    assert not csr.offsets.any() and not csr.pages.any()


@pytest.mark.parametrize("make", [make_lists, make_csr, block_mask_indices])
def test_temporaries_do_not_grow_with_the_pool(make: Callable) -> None:
    sizes = PageListSizes(
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        max_model_len=1024,
        page_tokens=16,
        q_block_tokens=16,
        num_pages=10_000_000,
    )
    tables, bound = shapes_of(8, 64), 8 * sizes.num_query_groups * sizes.list_width * 4
    assert bound < sizes.num_pages / 8, "a bit for each page would be more"
    if make is block_mask_indices:
        lists = jax.eval_shape(lambda t: make_lists(t, sizes=sizes), tables)
        lowered = jax.jit(make).lower(lists)
    else:
        lowered = jax.jit(lambda t: make(t, sizes=sizes)).lower(tables)
    assert "while" not in lowered.as_text()  # a GPU launches kernels for each round
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= bound
