"""Block masks of hand-made batches and of served steps, against the definition of their mask."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import jaxkv
from jaxkv._src.attention import block_mask_indices, block_mask_sizes, physical_to_logical
from jaxkv._src.attention._block_mask import PageTables, list_pages, map_pages
from jaxkv._src.cache import CacheFlags
from jaxkv._src.layout import BlockMaskSizes
from jaxkv.testing import assert_same_bytes

# Nothing divides anything: the last page, group and batch are all partly filled.
SIZES = BlockMaskSizes(
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
    def seq_lens(self) -> list[int]:
        pairs = zip(self.computed, self.lens, strict=True)
        return [computed + n if n else 0 for computed, n in pairs]

    def tables(self, first_pages: list[int] | None = None) -> PageTables:
        """Tables that begin at these pages: nothing before them is in reach."""
        first_pages = first_pages or [0] * len(self.lens)
        cut = np.zeros_like(self.pages)
        for request, first in enumerate(first_pages):
            cut[request, : cut.shape[1] - first] = self.pages[request, first:]
        arrays = cut, first_pages, self.query_start_loc, self.computed
        return PageTables(*(np.array(array, np.int32) for array in arrays))

    def tables_from(self, data: st.DataObject, sizes: BlockMaskSizes) -> PageTables:
        """Tables that begin anywhere up to the first page that a request sees."""
        starts = []
        for request, computed in enumerate(self.computed):
            seen = [k for k in range(computed + 1) if sees(self, sizes, (request, computed), k)]
            first = seen[0] // sizes.page_tokens if seen else 0
            starts.append(data.draw(st.integers(0, first)))
        return self.tables(starts)


@st.composite
def cases(draw) -> Case:
    """Requests with tokens, and padding after them."""
    lens, budget = [], SIZES.max_num_batched_tokens
    for _ in range(SIZES.max_num_seqs):
        lens.append(draw(st.integers(min(1, budget), min(budget, 9))))
        budget -= lens[-1]
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


def sees(case: Case, sizes: BlockMaskSizes, token: tuple[int, int], key: int) -> bool:
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


def seen_pages(case: Case, sizes: BlockMaskSizes) -> list[set[tuple[int, int]]]:
    """Per query group, every (request, logical page) that it sees, by trying every key."""
    seen = [set() for _ in range(sizes.max_num_query_groups)]
    for index, token in enumerate(case.tokens):
        for key in range(sizes.max_model_len):
            if sees(case, sizes, token, key):
                page = token[0], key // sizes.page_tokens
                seen[index // sizes.q_block_tokens].add(page)
    return seen


@pytest.mark.parametrize("sizes", MASKS)
@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_a_page_is_listed_once_iff_it_is_seen(sizes, case, data) -> None:
    in_pool = 1 + case.pages % (sizes.num_pages - 1)
    case = dataclasses.replace(case, pages=np.where(case.pages > 0, in_pool, 0))
    counts, pages = list_pages(case.tables_from(data, sizes), sizes=sizes)
    assert pages.shape == (sizes.max_num_query_groups, sizes.max_num_kv_indices)
    for group, seen in enumerate(seen_pages(case, sizes)):
        wanted = sorted({int(case.pages[request, page]) for request, page in seen})
        assert int(counts[group]) == len(wanted)
        assert pages[group].tolist() == wanted + [0] * (pages.shape[1] - len(wanted))


def test_pages_that_a_request_lacks_are_left_out() -> None:
    case = Case(np.array([[3, 0, 7, 9, 0, 0, 0]], np.int32), [1], [12])
    counts, pages = list_pages(case.tables(), sizes=dataclasses.replace(SIZES, max_num_seqs=1))
    assert counts.tolist() == [3, 0, 0, 0] and pages[0, :3].tolist() == [3, 7, 9]


@given(case=cases(), data=st.data())
def test_the_dense_map_takes_the_last_and_ignores_null_and_tails(case, data) -> None:
    twice = data.draw(st.integers(0, SIZES.max_num_seqs - 1))
    case.pages[twice, -1] = case.pages[twice, 0]
    starts = [data.draw(st.integers(0, 2)) for _ in case.lens]
    wanted = np.full((SIZES.max_num_seqs, SIZES.num_pages), -1)
    for request, (n, start) in enumerate(zip(case.seq_lens, starts, strict=True)):
        for page in range(start, -(-n // SIZES.page_tokens)):
            if case.pages[request, page]:
                wanted[request, case.pages[request, page]] = page
    np.testing.assert_array_equal(map_pages(case.tables(starts), sizes=SIZES), wanted)


# --- sizes ----------------------------------------------------------------------------


def shapes_of(requests: int, width: int) -> PageTables:
    shapes = (requests, width), (requests,), (requests + 1,), (requests,)
    return PageTables(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


def test_widths_follow_requests_pool_and_window() -> None:
    def width(**changes) -> int:
        return dataclasses.replace(SIZES, **changes).max_num_kv_indices

    assert SIZES.max_num_query_groups == 4
    assert width() == 4 * PAGES  # of 5 requests only 4 fit into a group
    assert width(num_pages=4) == 3  # four requests see the same three pages
    assert width(max_num_batched_tokens=2) == 2 * PAGES  # tokens are fewer than requests
    assert width(num_pages=2) == 1
    assert width(sliding_window=1) == 4  # each token sees one page
    assert width(sliding_window=2) == 4 * 2
    assert width(chunk_size=3) == 4  # chunks are pages
    assert width(chunk_size=4) == 4 * 2
    assert width(sliding_window=1000) == 4 * PAGES


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
            assert sizes.max_num_kv_indices == sizes.pages_per_request == max(seen)


@pytest.mark.parametrize("sizes", MASKS)
@settings(max_examples=40)
@given(tokens=st.integers(1, 14), seed=st.integers(0, 2**32 - 1))
def test_the_bounds_hold_for_batches_that_try_to_pass_them(sizes, tokens, seed) -> None:
    """Every request at its longest with pages of its own, the batch cut in every way."""
    rng = np.random.default_rng(seed)
    lens = rng.multinomial(tokens, rng.dirichlet([1] * 5)).tolist()
    case = Case(np.zeros(0), lens, [sizes.max_model_len - n for n in lens])
    for seen in seen_pages(case, sizes):
        requests = [request for request, _ in seen]
        assert min(len(seen), sizes.num_pages - 1) <= sizes.max_num_kv_indices
        assert len(set(requests)) <= sizes.requests_per_group
        assert max(map(requests.count, requests), default=0) <= sizes.pages_per_request


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"num_pages": 1}, ValueError, "num_pages=1 leaves no page next to the null page"),
        ({"sliding_window": 4, "causal": False}, ValueError, "sliding_window=4.* causal=True"),
        ({"chunk_size": 4, "causal": False}, ValueError, "chunk_size=4.* needs causal=True"),
        ({"chunk_size": 4, "sliding_window": 4}, ValueError, "both given"),
        *(
            (changes, ValueError, "token positions reach")
            for changes in (
                {"max_model_len": 2**31},
                {"max_model_len": 2**31 - 100, "page_tokens": 2**20},  # of the last page, too
                {"max_model_len": 2**30, "q_block_tokens": 2**30},  # and of the last query group
            )
        ),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(SIZES, **changes)


def test_temporaries_do_not_grow_with_the_pool() -> None:
    sizes = BlockMaskSizes(
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        max_model_len=1024,
        page_tokens=16,
        q_block_tokens=16,
        num_pages=10_000_000,
    )
    bound = 2 * sizes.block_mask_bytes
    assert bound < sizes.num_pages / 8, "a bit for each page would be more"
    lowered = jax.jit(lambda t: list_pages(t, sizes=sizes)).lower(shapes_of(8, 64))
    assert "while" not in lowered.as_text()  # a GPU launches kernels for each round
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= bound


# --- served steps ---------------------------------------------------------------------

BLOCK, WINDOW, CHUNK, HEADS = 8, 7, 12, 2
REQUESTS, TOKENS, LENGTH, BLOCKS, GROUP_TOKENS = 3, 16, 48, 50, 5
COMMON = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": 4, "dtype": "f32"}
LAYERS = {
    f"{name}.{i}": spec
    for name, spec in {
        "full": jaxkv.FullAttentionSpec(**COMMON),
        "window": jaxkv.SlidingWindowSpec(sliding_window=WINDOW, **COMMON),
        "chunk": jaxkv.ChunkedAttentionSpec(chunk_size=CHUNK, **COMMON),
    }.items()
    for i in range(2)
}
WORK = [(9, 5, 2), (1, 8, 7), (1, 1, 1), (12, 1, 3), (0, 1, 15), (7, 9, 0), (14, 1, 1), (3, 4, 0)]


def make_plan(layers=LAYERS, **options) -> jaxkv.Plan:
    limits = jaxkv.Limits(max_in_flight_tokens=TOKENS)
    options = {"max_model_len": LENGTH, "num_blocks_override": BLOCKS, "limits": limits} | options
    return jaxkv.plan_cache(layers, 2**20, **options)


PLAN = make_plan()
SHAPE = jaxkv.StepShape.for_plan(PLAN, max_requests=REQUESTS, max_tokens=TOKENS, forks=2)
apply_step = jax.jit(jaxkv.apply_step)


def make_cache(kernel_block_size: int, **options) -> jaxkv.KVCache:
    sizes = [kernel_block_size] * len(PLAN.groups)
    return jaxkv.make_cache(PLAN, max_requests=REQUESTS, kernel_block_sizes=sizes, **options)


def first_seen(layer: str, position: int) -> int:
    """The definition of each layer's mask."""
    kind = layer.partition(".")[0]
    return {
        "full": 0,
        "window": max(0, position - WINDOW + 1),
        "chunk": position // CHUNK * CHUNK,
    }[kind]


def masks_of(cache, layer, batch, layer_index=None):
    return (
        block_mask_indices(
            cache, layer, batch, q_block_tokens=GROUP_TOKENS, layer_index=layer_index
        ),
        physical_to_logical(cache, layer, batch, layer_index=layer_index),
    )


@functools.partial(jax.jit, static_argnames="layers", donate_argnums=0)
def step(cache, upload, layers):
    cache, batch = jaxkv.apply_step(cache, upload)
    return cache, {layer: masks_of(cache, layer, batch) for layer in layers}


def check_masks(manager, spans, layer, mask, back, *, page_tokens: int, first_page: int) -> None:
    """Compares with what each token sees, by the ids that the manager allocated."""
    parts = BLOCK // page_tokens
    group = PLAN.layouts[0].placement_of(layer).group
    seen = [{} for _ in mask.kv_num_blocks]
    tokens = [(name, position) for name, span in spans.items() for position in span]
    for index, (name, position) in enumerate(tokens):
        for key in range(first_seen(layer, position), position + 1):
            page = key // page_tokens
            block = manager.block_ids(name)[group][page // parts]
            assert block > 0
            page_id = first_page + block * parts + page % parts
            seen[index // GROUP_TOKENS][page_id] = [*spans].index(name), page
    for wanted, count, listed in zip(seen, mask.kv_num_blocks, mask.kv_indices, strict=True):
        assert listed.tolist()[: int(count)] == sorted(wanted)
        for page_id, (request, page) in wanted.items():
            assert back.logical_pages[request, page_id - int(back.first_page)] == page


@pytest.mark.parametrize(
    "page_tokens, stacked, layers",
    [(4, True, ("full.1", "window.1", "chunk.1")), (BLOCK, False, ("window.1",))],
    ids=str,
)
def test_served_batches_list_what_their_tokens_see(page_tokens, stacked, layers) -> None:
    """Chunked prefill and decode mixed; tables of windows and chunks start mid-request."""
    cache = make_cache(page_tokens, stacked=stacked)
    manager = jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    first_page = BLOCKS * BLOCK // page_tokens if stacked else 0
    for name in "abc":
        manager.start(name)
    for lens in WORK:
        work = {name: n for name, n in zip("abc", lens, strict=True) if n}
        done = {name: manager.num_computed_tokens(name) for name in work}
        spans = {name: range(done[name], done[name] + n) for name, n in work.items()}
        cache, made = step(cache, manager.step(SHAPE, work), layers)
        for layer, masks in jax.tree.map(np.asarray, made).items():
            where = {"page_tokens": page_tokens, "first_page": first_page}
            check_masks(manager, spans, layer, *masks, **where)
    jaxkv.check_errors(cache)


@functools.cache
def running() -> tuple[jaxkv.KVCache, jaxkv.StepBatch]:
    """A cache and the batch of its second step."""
    cache, manager = make_cache(4), jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    for name in "ab":
        manager.start(name)
    for _ in range(2):
        cache, batch = apply_step(cache, manager.step(SHAPE, {"a": 5, "b": 7}))
    return cache, batch


def test_sizes_and_bytes_are_what_is_built_in_every_mode_of_jax() -> None:
    cache, batch = running()
    for layer in LAYERS:
        kind = layer.partition(".")[0]
        sizes = block_mask_sizes(cache, layer, SHAPE, q_block_tokens=GROUP_TOKENS)
        assert sizes == BlockMaskSizes(
            max_num_batched_tokens=TOKENS,
            max_num_seqs=REQUESTS,
            max_model_len=LENGTH,
            page_tokens=4,
            q_block_tokens=GROUP_TOKENS,
            num_pages=2 * BLOCKS,
            sliding_window=WINDOW if kind == "window" else None,
            chunk_size=CHUNK if kind == "chunk" else None,
        )
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            made = jax.eval_shape(functools.partial(masks_of, layer=layer), cache, batch=batch)
        assert {array.dtype for array in jax.tree.leaves(made)} == {np.dtype("int32")}
        num_bytes = [sum(4 * array.size for array in jax.tree.leaves(each)) for each in made]
        assert num_bytes == [sizes.block_mask_bytes, sizes.physical_to_logical_bytes]


def test_the_layers_of_a_group_cost_one_build_together() -> None:
    def build(cache, batch):
        layers = "full.0", "full.1"
        return [block_mask_indices(cache, x, batch, q_block_tokens=5).kv_indices for x in layers]

    text = jax.jit(build).lower(*running()).compile().as_text()
    assert len(re.findall(r" sort\(", text)) == 2


def test_a_layer_index_names_a_layer_of_the_group() -> None:
    cache, batch = running()

    @jax.jit
    def build(cache, batch, layer_index):
        named = [masks_of(cache, layer, batch) for layer in ("full.0", "full.1")]
        return masks_of(cache, "full.0", batch, layer_index), named

    for layer_index in range(2):
        found, named = build(cache, batch, np.int32(layer_index))
        assert_same_bytes(found, named[layer_index])
    for layer_index in (-1, 2):
        mask, back = build(cache, batch, np.int32(layer_index))[0]
        assert not mask.kv_num_blocks.any() and not mask.kv_indices.any()
        assert (back.logical_pages == -1).all()


def test_without_a_causal_mask_every_group_lists_whole_requests() -> None:
    cache, batch = running()
    options = {"q_block_tokens": GROUP_TOKENS, "causal": False}
    # Tokens 5..9 of a, then 7..13 of b: 3 and 4 pages of 4 tokens.
    mask = block_mask_indices(cache, "full.0", batch, **options)
    assert mask.kv_num_blocks.tolist() == [3, 4, 4, 0]
    for layer in ("window.0", "chunk.0"):
        with pytest.raises(ValueError, match="needs causal=True"):
            block_mask_indices(cache, layer, batch, **options)


def test_a_request_that_was_not_grown_lists_nothing_and_sets_a_flag() -> None:
    upload = jaxkv.pack_step(SHAPE, rows=[0], num_computed_tokens=[0], num_new_tokens=[9])
    cache, made = step(make_cache(4), upload, ("full.1", "window.1"))
    assert int(cache.error_flags) == CacheFlags.NO_BLOCK
    for mask, back in made.values():
        assert not mask.kv_num_blocks.any() and (back.logical_pages == -1).all()


def test_what_has_no_block_mask_is_refused_by_name() -> None:
    layers = {
        "full": LAYERS["full.0"],
        "state": jaxkv.StateSpec(block_size=BLOCK, shapes=((4,),), dtypes=("f32",)),
        "cross": jaxkv.CrossAttentionSpec(**COMMON),
    }
    limits = jaxkv.Limits(max_in_flight_tokens=TOKENS, max_encoder_tokens=8)
    mixed = make_plan(layers, limits=limits)
    shape = jaxkv.StepShape.for_plan(mixed, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(mixed, max_requests=REQUESTS)
    _, batch = jax.eval_shape(jaxkv.apply_step, cache, shape.idle())
    for layer, kind in {"state": "a state layer", "cross": "a cross layer"}.items():
        for call in (
            lambda x: block_mask_indices(cache, x, batch, q_block_tokens=4),
            lambda x: physical_to_logical(cache, x, batch),
            lambda x: block_mask_sizes(cache, x, shape, q_block_tokens=4),
        ):
            with pytest.raises(TypeError, match=f"layer='{layer}' is {kind}"):
                call(layer)
    square = jaxkv.StepShape.for_plan(mixed, max_requests=REQUESTS, tokens_per_request=4)
    _, batch = jax.eval_shape(jaxkv.apply_step, cache, square.idle())
    with pytest.raises(ValueError, match="rectangular, tokens_per_request=4"):
        block_mask_indices(cache, "full", batch, q_block_tokens=4)
    _, batch = running()
    with pytest.raises(ValueError, match="batch belongs to another cache"):
        block_mask_indices(cache, "full", batch, q_block_tokens=4)
    with pytest.raises(ValueError, match="made for another plan"):
        block_mask_sizes(cache, "full", SHAPE, q_block_tokens=4)
    divided = make_plan({"full": LAYERS["full.0"]}, context_parallel=2)
    shape = jaxkv.StepShape.for_plan(divided, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(divided, max_requests=REQUESTS, rank=0)
    with pytest.raises(ValueError, match="context_parallel=2"):
        block_mask_sizes(cache, "full", shape, q_block_tokens=4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_cache_sharded_by_head_has_the_same_block_masks(axis_type) -> None:
    devices = np.array(jax.devices()[:2])
    if devices.size < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(devices, ("heads",), axis_types=(axis_type,))
    cache = make_cache(4, stacked=True, mesh=mesh, axis="heads")
    manager = jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    for name in "ab":
        manager.start(name)
    with jax.set_mesh(mesh):
        for _ in range(2):
            cache, made = step(cache, manager.step(SHAPE, {"a": 5, "b": 7}), ("window.1",))
    spans = {"a": range(5, 10), "b": range(7, 14)}
    where = {"page_tokens": 4, "first_page": BLOCKS * BLOCK // 4}
    check_masks(manager, spans, "window.1", *jax.tree.map(np.asarray, made["window.1"]), **where)
