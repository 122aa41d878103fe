"""FlexAttention metadata against the definition of its mask, written out with loops."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.flex_attention import (
    BAD_BATCH,
    BAD_PAGE_ID,
    MISSING_PAGE,
    TOO_MANY_PAGES,
    MetadataError,
    MetadataSizes,
    _metadata,
    _segments,
    block_mask_indices,
    build_page_csr,
    build_page_lists,
    check_metadata,
    max_num_query_groups,
    metadata_bytes,
    physical_to_logical,
    reference_attention,
)

# Nothing divides anything: the last page, group and batch are all partly filled.
SIZES = MetadataSizes(
    max_num_batched_tokens=14,
    max_num_seqs=5,
    max_model_len=20,
    page_size=3,
    q_block_tokens=4,
    num_blocks=60,
)
PAGES = SIZES.pages_per_seq
MASKS = [
    pytest.param(SIZES, id="causal"),
    pytest.param(dataclasses.replace(SIZES, sliding_window=1), id="window 1"),
    pytest.param(dataclasses.replace(SIZES, sliding_window=5), id="window 5"),
    pytest.param(dataclasses.replace(SIZES, causal=False), id="not causal"),
]


@dataclasses.dataclass
class Case:
    tables: np.ndarray  # int32[B, PAGES]
    lengths: list[int]
    first: list[int]

    @property
    def token_ends(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int32)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every token of the batch."""
        return [
            (request, first + i)
            for request, (first, length) in enumerate(zip(self.first, self.lengths, strict=True))
            for i in range(length)
        ]

    @property
    def seq_lengths(self) -> np.ndarray:
        pairs = zip(self.first, self.lengths, strict=True)
        return np.array([first + n if n else 0 for first, n in pairs], np.int32)

    @property
    def arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.tables, self.token_ends, np.array(self.first, np.int32)


@st.composite
def cases(draw, sharing: bool = True) -> Case:
    lengths, room = [], SIZES.max_num_batched_tokens
    for _ in range(SIZES.max_num_seqs):
        lengths.append(draw(st.integers(0, min(room, 9))))
        room -= lengths[-1]
    first = [draw(st.integers(0, SIZES.max_model_len - n)) for n in lengths]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.permutation(np.arange(1, SIZES.num_blocks, dtype=np.int32))
    tables = ids[: SIZES.max_num_seqs * PAGES].reshape(SIZES.max_num_seqs, PAGES).copy()
    if sharing:  # a common prefix, as prefix caching makes them
        for request in range(1, SIZES.max_num_seqs):
            shared = draw(st.integers(0, PAGES))
            tables[request, :shared] = tables[request - 1, :shared]
    for request, (start, length) in enumerate(zip(first, lengths, strict=True)):
        tables[request, -(-(start + length) // SIZES.page_size) :] = 0  # the tail
    return Case(tables, lengths, first)


def sees(case: Case, sizes: MetadataSizes, token: tuple[int, int], key: tuple[int, int]) -> bool:
    """The definition. Both are (request, position)."""
    (request, position), (key_request, key_position) = token, key
    if request != key_request or key_position >= case.seq_lengths[request]:
        return False
    if not sizes.causal:
        return True
    if key_position > position:
        return False
    return sizes.sliding_window is None or position - key_position < sizes.sliding_window


def seen_pages(case: Case, sizes: MetadataSizes) -> list[list[tuple[int, int]]]:
    """Per query group, every (request, logical page) that it sees, by trying every key."""
    seen = [set() for _ in range(sizes.num_query_groups)]
    for index, token in enumerate(case.tokens):
        for request in range(len(case.lengths)):
            for position in range(sizes.max_model_len):
                if sees(case, sizes, token, (request, position)):
                    group = index // sizes.q_block_tokens
                    seen[group].add((request, position // sizes.page_size))
    return [sorted(pages) for pages in seen]


def entries(metadata, where) -> list[tuple[int, int, int]]:
    columns = (metadata.owners, metadata.logical_pages, metadata.pages)
    return list(zip(*(np.asarray(c)[where].tolist() for c in columns), strict=True))


@pytest.mark.parametrize("sizes", MASKS)
@given(case=cases())
def test_a_page_is_listed_iff_it_is_seen(sizes, case) -> None:
    lists = build_page_lists(*case.arguments, sizes=sizes)
    csr = build_page_csr(*case.arguments, sizes=sizes)
    check_metadata(lists.problems)
    check_metadata(csr.problems)
    offsets = np.asarray(csr.offsets)
    for group, wanted in enumerate(seen_pages(case, sizes)):
        wanted = [(request, page, case.tables[request, page]) for request, page in wanted]
        count = int(lists.counts[group])
        assert entries(lists, (group, slice(count))) == wanted
        assert entries(csr, slice(offsets[group], offsets[group + 1])) == wanted
        padding = entries(lists, (group, slice(count, None)))
        assert set(padding) <= {(-1, -1, 0)}
    assert set(entries(csr, slice(offsets[-1], None))) <= {(-1, -1, 0)}
    for metadata in (lists, csr):
        documents, positions = np.asarray(metadata.documents), np.asarray(metadata.positions)
        padding = [(-1, -1)] * (sizes.max_num_batched_tokens - len(case.tokens))
        assert list(zip(documents, positions, strict=True)) == case.tokens + padding
        np.testing.assert_array_equal(metadata.seq_lengths, case.seq_lengths)


@pytest.mark.parametrize("sizes", MASKS)
@given(case=cases())
def test_a_block_mask_lists_every_page_of_the_pool_once(sizes, case) -> None:
    lists = build_page_lists(*case.arguments, sizes=sizes)
    counts, indices, problems = block_mask_indices(lists)
    check_metadata(problems)
    for group, seen in enumerate(seen_pages(case, sizes)):
        wanted = sorted({int(case.tables[pair]) for pair in seen})
        count = int(counts[group])
        assert np.asarray(indices)[group].tolist() == wanted + [0] * (indices.shape[1] - count)


@given(case=cases(), data=st.data())
def test_the_dense_map_takes_the_last_and_ignores_null_and_tails(case, data) -> None:
    twice = data.draw(st.integers(0, SIZES.max_num_seqs - 1))
    case.tables[twice, -1] = case.tables[twice, 0]
    lengths = [data.draw(st.integers(0, SIZES.max_model_len)) for _ in case.lengths]
    wanted = np.full((SIZES.max_num_seqs, SIZES.num_blocks), -1)
    for request, length in enumerate(lengths):
        for page in range(-(-length // SIZES.page_size)):
            if case.tables[request, page]:
                wanted[request, case.tables[request, page]] = page
    got, problems = physical_to_logical(case.tables, np.array(lengths, np.int32), sizes=SIZES)
    check_metadata(problems)
    np.testing.assert_array_equal(got, wanted)


@given(case=cases())
def test_lists_made_in_pieces_are_the_lists(case) -> None:
    """As for large batches, whose pairs are not all worked out at once."""
    sizes = dataclasses.replace(SIZES, num_blocks=SIZES.num_blocks + 1)  # compiled here only
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segments, "PAIRS_AT_ONCE", 65)
        patch.setattr(_metadata, "CSR_ROW", 10)
        lists = build_page_lists(*case.arguments, sizes=sizes)
        csr = build_page_csr(*case.arguments, sizes=sizes)
    for build, pieces in ((build_page_lists, lists), (build_page_csr, csr)):
        whole = build(*case.arguments, sizes=SIZES)
        for got, wanted in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(got, wanted)


def dense_attention(queries, keys, values, case: Case, sizes: MetadataSizes) -> np.ndarray:
    """One token and head at a time, over the keys of its own request, page by page."""
    out = np.zeros((queries.shape[0], queries.shape[1], values.shape[3]))
    copies = queries.shape[1] // keys.shape[2]
    for index, (request, position) in enumerate(case.tokens):
        token = (request, position)
        key_positions = range(case.seq_lengths[request])
        seen = [k for k in key_positions if sees(case, sizes, token, (request, k))]
        slots = [(case.tables[request, k // sizes.page_size], k % sizes.page_size) for k in seen]
        for head in range(queries.shape[1]):
            rows = np.array([keys[(*slot, head // copies)] for slot in slots], np.float64)
            scores = rows @ queries[index, head] / np.sqrt(queries.shape[2])
            weights = np.exp(scores - scores.max())
            rows = np.array([values[(*slot, head // copies)] for slot in slots], np.float64)
            out[index, head] = weights / weights.sum() @ rows
    return out


@pytest.mark.parametrize("sizes", MASKS)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_attention_over_the_lists_is_attention_over_all_keys(sizes, case, seed) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(sizes.max_num_batched_tokens, 4, 5)).astype(np.float32)
    pool = (sizes.num_blocks, sizes.page_size, 2)
    keys, values = (rng.normal(size=(*pool, width)).astype(np.float32) for width in (5, 3))
    wanted = dense_attention(queries, keys, values, case, sizes)
    # What no token of the batch sees is poison: null, strangers' pages, unwritten rows.
    seen = np.zeros(pool[:2], bool)
    for token in case.tokens:
        for position in range(case.seq_lengths[token[0]]):
            if sees(case, sizes, token, (token[0], position)):
                page, offset = divmod(position, sizes.page_size)
                seen[case.tables[token[0], page], offset] = True
    keys[~seen] = np.nan
    values[~seen] = np.nan
    lists = build_page_lists(*case.arguments, sizes=sizes)
    out = reference_attention(jnp.array(queries), jnp.array(keys), jnp.array(values), lists)
    np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e-5)
    assert not np.asarray(out)[len(case.tokens) :].any()


def torch_seen_pages(torch, documents, positions, mapping, sizes) -> list[list[int]]:
    """Per query group the pages of the pool in PyTorch's own block mask of the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_queries = sizes.num_query_groups * sizes.q_block_tokens
    padding = num_queries - len(documents)
    documents, positions = (
        torch.tensor(np.pad(array, (0, padding), constant_values=-1).astype(np.int64))
        for array in (documents, positions)
    )
    mapping = torch.tensor(np.asarray(mapping).astype(np.int64))

    def mask_mod(b, h, query, slot):
        document, position = documents[query], positions[query]
        page = mapping[document.clamp(min=0), slot // sizes.page_size]
        key_position = page * sizes.page_size + slot % sizes.page_size
        seen = (document >= 0) & (page >= 0) & (key_position <= position)
        if sizes.sliding_window is not None:
            seen = seen & (position - key_position < sizes.sliding_window)
        return seen

    mask = create_block_mask(
        mask_mod,
        B=None,
        H=None,
        Q_LEN=num_queries,
        KV_LEN=sizes.num_blocks * sizes.page_size,
        device="cpu",
        BLOCK_SIZE=(sizes.q_block_tokens, sizes.page_size),
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


@pytest.mark.parametrize("sizes", MASKS[:3])
@pytest.mark.filterwarnings("ignore")  # torch's own, on import
def test_the_same_pages_as_pytorch(sizes) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch's create_block_mask")
    pytest.importorskip(
        "torch.nn.attention.flex_attention", reason="FlexAttention needs torch >= 2.5"
    )
    for seed in range(5):
        case = random_case(seed)
        lists = build_page_lists(*case.arguments, sizes=sizes)
        mapping, _ = physical_to_logical(case.tables, case.seq_lengths, sizes=sizes)
        wanted = torch_seen_pages(torch, lists.documents, lists.positions, mapping, sizes)
        counts, indices, _ = block_mask_indices(lists)
        for count, listed, pages in zip(counts.tolist(), indices.tolist(), wanted, strict=True):
            assert listed[:count] == pages


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    lengths = rng.multinomial(rng.integers(0, 15), [1 / 5] * 5).tolist()
    first = [int(rng.integers(0, SIZES.max_model_len - n + 1)) for n in lengths]
    tables = rng.permutation(np.arange(1, SIZES.num_blocks, dtype=np.int32))[: 5 * PAGES]
    tables = tables.reshape(5, PAGES)
    tables[1, :2] = tables[0, :2]
    return Case(tables, lengths, first)


# Sizes.


def test_the_shapes_whose_mismatch_stopped_an_engine() -> None:
    """Planned [4096, 256] from the longest sequence, built [1024, 4096] from the batch."""
    sizes = MetadataSizes(
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        max_model_len=4096,
        page_size=16,
        q_block_tokens=16,
        num_blocks=100_000,
    )
    assert (sizes.num_query_groups, sizes.list_width) == (1024, 4096)
    tables = jax.ShapeDtypeStruct((256, 256), jnp.int32)
    vector = jax.ShapeDtypeStruct((256,), jnp.int32)
    built = jax.eval_shape(
        lambda *batch: build_page_lists(*batch, sizes=sizes), tables, vector, vector
    )
    assert built.pages.shape == (1024, 4096)
    # The other way round: few tokens a step, long sequences.
    sizes = dataclasses.replace(sizes, max_num_batched_tokens=64, max_model_len=131_072)
    assert (sizes.num_query_groups, sizes.list_width) == (4, 16 * 8192)


def test_widths_follow_requests_pool_and_window() -> None:
    def width(**changes) -> int:
        return dataclasses.replace(SIZES, **changes).list_width

    assert max_num_query_groups(14, 4) == SIZES.num_query_groups == 4
    assert width() == 4 * PAGES  # of 5 requests only 4 fit into a group
    assert width(max_num_seqs=1) == PAGES
    assert width(num_blocks=4) == 4 * 3  # four requests may see the same three pages
    assert width(num_blocks=4, pages_are_shared=False) == 3
    assert dataclasses.replace(SIZES, num_blocks=4).block_mask_width == 3
    assert width(sliding_window=1) == 4  # each token sees one page
    assert width(sliding_window=2) == 4 * 2
    assert width(sliding_window=1, max_num_seqs=1) == 2  # 4 tokens
    assert width(sliding_window=2, max_num_seqs=1) == 3  # 5, of which the first ends a page
    assert width(sliding_window=1000) == 4 * PAGES
    assert SIZES.csr_capacity == (4 + 5 - 1) * PAGES
    large = dataclasses.replace(
        SIZES,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=131_072,
        page_size=16,
        q_block_tokens=16,
        num_blocks=500_000,
    )
    assert large.num_query_groups * large.list_width * 4 == 256 << 20
    assert large.csr_capacity * 4 == (512 + 255) * 8192 * 4


@pytest.mark.parametrize("sizes", MASKS)
@given(tokens=st.integers(1, 14), seed=st.integers(0, 2**32 - 1))
def test_the_bounds_hold_for_batches_that_try_to_pass_them(sizes, tokens, seed) -> None:
    """Every request at its longest, the batch cut in every way."""
    rng = np.random.default_rng(seed)
    lengths = rng.multinomial(tokens, rng.dirichlet([1] * 5)).tolist()
    case = Case(np.ones((5, PAGES), np.int32), lengths, [sizes.max_model_len - n for n in lengths])
    seen = [len(pages) for pages in seen_pages(case, sizes)]
    assert max(seen) <= sizes.list_width and sum(seen) <= sizes.csr_capacity


@pytest.mark.parametrize("sizes", MASKS)
def test_planned_bytes_are_the_bytes_that_exist(sizes) -> None:
    arguments = random_case(0).arguments
    lists = build_page_lists(*arguments, sizes=sizes)
    made = {
        "lists": lists,
        "csr": build_page_csr(*arguments, sizes=sizes),
        "block_mask": block_mask_indices(lists),
        "physical_to_logical": physical_to_logical(*arguments[:2], sizes=sizes),
    }
    for form, arrays in made.items():
        assert sum(a.nbytes for a in jax.tree.leaves(arrays)) == metadata_bytes(sizes, form)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"page_size": 0}, ValueError, "page_size must be at least 1"),
        ({"q_block_tokens": 16.0}, TypeError, "q_block_tokens must be an int"),
        ({"max_num_seqs": -1}, ValueError, "max_num_seqs"),
        ({"num_blocks": 1}, ValueError, "num_blocks=1 has no page beside the null page"),
        ({"sliding_window": 0}, ValueError, "sliding_window"),
        ({"sliding_window": 4, "causal": False}, ValueError, "needs causal=True"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"max_model_len": 2**31}, ValueError, "token positions reach"),
        (
            {"max_model_len": 2**30, "page_size": 1, "num_blocks": 2**30},
            ValueError,
            "the pages that a batch lists reach",
        ),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(SIZES, **changes)


def test_bad_arguments_are_refused_by_name() -> None:
    tables, ends, first = random_case(0).arguments
    with pytest.raises(ValueError, match="form must be one of lists"):
        metadata_bytes(SIZES, "dense")
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        max_num_query_groups(0, 16)
    for build in (build_page_lists, build_page_csr):
        with pytest.raises(TypeError, match="token_ends must be an array of int32, got int64"):
            build(tables, ends.astype(np.int64), first, sizes=SIZES)
        with pytest.raises(ValueError, match=r"first_positions \(4,\)"):
            build(tables, ends, first[:4], sizes=SIZES)
        with pytest.raises(ValueError, match=r"block_tables has shape \(7,\)"):
            build(tables[0], ends, first, sizes=SIZES)
        with pytest.raises(ValueError, match=r"block_tables has 10 requests.*max_num_seqs=5"):
            build(np.tile(tables, (2, 1)), np.tile(ends, 2), np.tile(first, 2), sizes=SIZES)
    with pytest.raises(ValueError, match="seq_lengths"):
        physical_to_logical(tables, ends[:2], sizes=SIZES)
    lists = build_page_lists(tables, ends, first, sizes=SIZES)
    with pytest.raises(TypeError, match="problems must be an array of int32, got PageLists"):
        check_metadata(lists)
    queries, keys = jnp.zeros((14, 4, 5)), jnp.zeros((60, 3, 2, 5))
    for name, arrays in {
        "queries": (queries[:3], keys, keys),
        "values": (queries, keys, keys[:5]),
        "3 heads of queries": (queries[:, :3], keys, keys),
        "queries are 4 wide": (queries[..., :4], keys, keys),
    }.items():
        with pytest.raises(ValueError, match=name):
            reference_attention(*arrays, lists)


# Problems on the device.


def problems_of(tables, ends, first, sizes=SIZES) -> list[int]:
    arguments = (tables, np.array(ends, np.int32), np.array(first, np.int32))
    builders = (build_page_lists, build_page_csr)
    return [int(build(*arguments, sizes=sizes).problems) for build in builders]


def test_what_does_not_fit_is_flagged_and_cut_where_the_lists_end() -> None:
    narrow = dataclasses.replace(SIZES, num_blocks=3, pages_are_shared=False)
    assert (narrow.list_width, narrow.csr_capacity) == (2, 8)
    tables = np.tile(np.array([[1, 2]], np.int32), (5, 1))  # shared after all
    ends, first = np.arange(1, 6, dtype=np.int32), np.full(5, 5, np.int32)
    lists = build_page_lists(tables, ends, first, sizes=narrow)
    np.testing.assert_array_equal(lists.counts, [2, 2, 0, 0])
    assert int(lists.problems) == TOO_MANY_PAGES
    csr = build_page_csr(tables, ends, first, sizes=narrow)
    np.testing.assert_array_equal(csr.offsets, [0, 8, 8, 8, 8])  # 8 pairs, then 2 more
    assert int(csr.problems) == TOO_MANY_PAGES
    assert int(block_mask_indices(lists)[2]) == TOO_MANY_PAGES
    with pytest.raises(MetadataError, match="more pages than the lists hold") as caught:
        check_metadata(lists.problems)
    assert pickle.loads(pickle.dumps(caught.value)).flags == TOO_MANY_PAGES
    assert problems_of(tables, [1, 1, 1, 1, 1], [5, 0, 0, 0, 0], narrow) == [0, 0]


def test_visible_pages_that_are_not_there_are_flagged_and_read_as_null() -> None:
    tables = np.zeros((1, 4), np.int32)
    tables[0] = [3, 0, 60, 9]
    ends = np.array([1], np.int32)
    for position, problems, pages in [
        (2, 0, [3]),
        (3, MISSING_PAGE, [3, 0]),
        (6, MISSING_PAGE | BAD_PAGE_ID, [3, 0, 0]),
        (12, MISSING_PAGE | BAD_PAGE_ID, [3, 0, 0, 9]),  # past the table
    ]:
        first = np.array([position], np.int32)
        assert problems_of(tables, ends, first) == [problems] * 2
        lists = build_page_lists(tables, ends, first, sizes=SIZES)
        assert lists.pages[0, : int(lists.counts[0])].tolist() == pages
    windowed = dataclasses.replace(SIZES, sliding_window=2)
    assert problems_of(tables, ends, [10], windowed) == [0, 0]  # the null one is not visible
    wide = np.arange(1, 11, dtype=np.int32)[None]
    assert problems_of(wide, ends, [22]) == [MISSING_PAGE] * 2  # past max_model_len
    _, problems = physical_to_logical(tables, np.array([9], np.int32), sizes=SIZES)
    assert int(problems) == BAD_PAGE_ID


@pytest.mark.parametrize(
    "ends, first",
    [
        ([3, 2, 4, 4, 4], [0, 0, 0, 0, 0]),
        ([-1, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([-(2**31), 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1], [0, 0, 0, 0, 0]),
        ([3, 6, 9, 12, 15], [0, 0, 0, 0, 0]),
        ([3, 6, 6, 6, 6], [0, -1, 0, 0, 0]),
        ([3, 6, 6, 6, 6], [0, 2**31 - 2, 0, 0, 0]),
    ],
)
def test_a_batch_that_makes_no_sense_lists_nothing(ends, first) -> None:
    tables = random_case(0).tables
    assert problems_of(tables, ends, first) == [BAD_BATCH] * 2
    lists = build_page_lists(
        tables, np.array(ends, np.int32), np.array(first, np.int32), sizes=SIZES
    )
    assert not lists.counts.any() and (lists.documents == -1).all()


def test_no_tokens_and_padding_requests_list_nothing() -> None:
    tables = random_case(0).tables
    lists = build_page_lists(*Case(tables, [0] * 5, [0, 7, -1, 0, 0]).arguments, sizes=SIZES)
    check_metadata(lists.problems)
    assert not lists.counts.any() and not lists.pages.any() and (lists.documents == -1).all()
    counts, indices, _ = block_mask_indices(lists)
    assert not counts.any() and not indices.any()
    queries, pool = jnp.ones((14, 2, 4)), jnp.full((60, 3, 2, 4), jnp.nan)
    assert not reference_attention(queries, pool, pool, lists).any()
    csr = build_page_csr(*Case(tables, [0] * 5, [0] * 5).arguments, sizes=SIZES)
    assert not csr.offsets.any() and not csr.pages.any()


@pytest.mark.parametrize("build", [build_page_lists, build_page_csr, block_mask_indices])
def test_temporaries_do_not_grow_with_the_pool(build) -> None:
    def temporary_bytes(num_blocks: int) -> int:
        sizes = MetadataSizes(
            max_num_batched_tokens=1024,
            max_num_seqs=8,
            max_model_len=1024,
            page_size=16,
            q_block_tokens=16,
            num_blocks=num_blocks,
        )
        vector = jax.ShapeDtypeStruct((8,), jnp.int32)
        batch = (jax.ShapeDtypeStruct((8, 64), jnp.int32), vector, vector)
        if build is block_mask_indices:
            batch = (jax.eval_shape(lambda *a: build_page_lists(*a, sizes=sizes), *batch),)
            lowered = jax.jit(build).lower(*batch)
        else:
            lowered = jax.jit(lambda *a: build(*a, sizes=sizes)).lower(*batch)
        used = lowered.compile().memory_analysis().temp_size_in_bytes
        assert used <= 8 * sizes.num_query_groups * sizes.list_width * 4
        return used

    assert temporary_bytes(10_000) == temporary_bytes(1_000_000)
