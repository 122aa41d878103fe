"""Page lists of real steps: tables of a running cache, ids of its views, attention over both."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxkv
from jaxkv._src.attention import (
    MISSING_PAGE,
    PageListError,
    PageLists,
    block_mask_indices,
    build_page_csr,
    build_page_lists,
    page_list_sizes,
    physical_to_logical,
)
from jaxkv._src.cache import BAD_LAYER_INDEX
from jaxkv._src.layout import PageListSizes, page_list_bytes
from jaxkv.testing import assert_same_bytes

BLOCK, WINDOW, CHUNK, HEADS, SIZE = 8, 7, 12, 2, 4
REQUESTS, TOKENS, LENGTH, BLOCKS, GROUP_TOKENS = 3, 16, 48, 50, 5
COMMON = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": "f32"}
LAYERS = {
    f"{name}.{i}": spec
    for name, spec in {
        "full": jaxkv.FullAttentionSpec(**COMMON),
        "window": jaxkv.SlidingWindowSpec(sliding_window=WINDOW, **COMMON),
        "chunk": jaxkv.ChunkedAttentionSpec(chunk_size=CHUNK, **COMMON),
    }.items()
    for i in range(2)
}
SECOND = [name for name in LAYERS if name.endswith("1")]  # a stack's second: ids are offset
WORK = [
    (9, 5, 2),
    (1, 8, 7),
    (1, 1, 1),
    (12, 1, 3),
    (0, 1, 15),
    (7, 9, 0),
    (1, 1, 1),
    (14, 1, 1),
    (3, 4, 0),
]


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


def tokens_of(request: str) -> np.ndarray:
    """[3, LENGTH, HEADS, SIZE]: queries, keys and values that a request's name decides."""
    rng = np.random.default_rng(ord(request))
    return rng.normal(size=(3, LENGTH, HEADS, SIZE)).astype(np.float32)


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[HEADS, SIZE]: one token over keys and values of [n, HEADS, SIZE]."""
    scores = np.einsum("hd,nhd->hn", queries, keys) / np.sqrt(SIZE)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def attention_over_lists(layer: str, queries: np.ndarray, view: np.ndarray, lists: PageLists):
    """[T, HEADS, SIZE]: all that a kernel does, from the lists and the listed pages alone."""
    lists = jax.tree.map(np.asarray, lists)
    sizes, out = lists.sizes, np.zeros_like(queries)
    offsets = np.arange(sizes.page_tokens)
    for token, (request, position) in enumerate(
        zip(lists.token_requests, lists.positions, strict=True)
    ):
        if request < 0:
            continue
        group = token // sizes.q_block_tokens
        valid = slice(lists.counts[group])
        rows = view[lists.pages[group, valid]].reshape(-1, HEADS, 2 * SIZE)
        keys = lists.logical_pages[group, valid, None] * sizes.page_tokens + offsets
        seen = (keys <= position) & (keys >= first_seen(layer, position))
        seen &= (lists.requests[group, valid] == request)[:, None]
        rows = rows[seen.reshape(-1)]
        out[token] = attention(queries[token], rows[..., :SIZE], rows[..., SIZE:])
    return out


@dataclasses.dataclass
class Served:
    """A step that has run, and what the host knows of it."""

    spans: dict[str, range]  # positions that each request computes
    ids: dict[str, tuple[int, ...]]  # blocks of the layer's group, by column
    first_page: int  # of the layer in its view
    page_tokens: int

    @property
    def tokens(self) -> list[tuple[str, int]]:
        return [(name, position) for name, span in self.spans.items() for position in span]

    def page(self, request: str, logical_page: int) -> int:
        """The id of a page in the layer's view, from the ids that the manager handed out."""
        column, part = divmod(logical_page, BLOCK // self.page_tokens)
        block = self.ids[request][column]
        assert block > 0
        return self.first_page + block * (BLOCK // self.page_tokens) + part

    def seen_pages(self, layer: str) -> list[list[tuple[int, int, int]]]:
        """Per query group, (request, logical page, page id) of all that its tokens see."""
        seen = [set() for _ in range(-(-TOKENS // GROUP_TOKENS))]
        names = list(self.spans)
        for index, (name, position) in enumerate(self.tokens):
            for key in range(first_seen(layer, position), position + 1):
                page = key // self.page_tokens
                entry = names.index(name), page, self.page(name, page)
                seen[index // GROUP_TOKENS].add(entry)
        return [sorted(pages) for pages in seen]

    def poisoned(self, layer: str, view: np.ndarray) -> np.ndarray:
        """The view with NaN wherever no token of the step sees."""
        poisoned = np.full_like(view, np.nan)
        for name, position in self.tokens:
            for key in range(first_seen(layer, position), position + 1):
                page, row = divmod(key, self.page_tokens)
                at = self.page(name, page), row
                poisoned[at] = view[at]
        return poisoned


def pack_tokens(spans: dict[str, range]) -> np.ndarray:
    """[3, TOKENS, HEADS, SIZE]: the tokens of a step, padded with NaN."""
    padded = np.full((3, TOKENS, HEADS, SIZE), np.nan, np.float32)
    rows = [tokens_of(name)[:, span.start : span.stop] for name, span in spans.items()]
    padded[:, : sum(map(len, spans.values()))] = np.concatenate(rows, axis=1)
    return padded


@pytest.mark.parametrize(
    "kernel_block_size, stacked, layers",
    [(4, True, (*SECOND,)), (BLOCK, False, ("window.1",))],
    ids=str,
)
def test_served_batches_attend_through_their_lists(kernel_block_size, stacked, layers) -> None:
    """Chunked prefill and decode mixed; tables of windows and chunks start mid-request."""
    cache = make_cache(kernel_block_size, stacked=stacked)
    first_page = BLOCKS * BLOCK // kernel_block_size if stacked else 0
    manager = jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    done, late_starts = dict.fromkeys("abc", 0), dict.fromkeys(layers, 0)
    for name in "abc":
        manager.start(name)
    for lens in WORK:
        work = {name: n for name, n in zip("abc", lens, strict=True) if n}
        upload = manager.step(SHAPE, work)
        spans = {name: range(done[name], done[name] + n) for name, n in work.items()}
        done |= {name: span.stop for name, span in spans.items()}
        tokens = pack_tokens(spans)
        cache, results = step(cache, upload, layers, *tokens)
        for layer, (view, out, made, starts) in results.items():
            late_starts[layer] += np.count_nonzero(starts)
            group = PLAN.layouts[0].placement_of(layer).group
            ids = {name: manager.block_ids(name)[group] for name in spans}
            served = Served(spans, ids, first_page, kernel_block_size)
            check_lists(served, layer, *made)
            view = served.poisoned(layer, np.asarray(view))
            over_lists = attention_over_lists(layer, tokens[0], view, made[0])
            wanted = [expected(layer, *token) for token in served.tokens]
            for got in (over_lists, np.asarray(out)):
                np.testing.assert_allclose(got[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    jaxkv.check_errors(cache)
    assert all((count > 0) == (layer != "full.1") for layer, count in late_starts.items())


@functools.partial(jax.jit, static_argnames="layers", donate_argnums=0)
def step(cache, upload, layers, queries, keys, values):
    cache, batch = jaxkv.apply_step(cache, upload)
    results = {}
    for layer in layers:
        cache, out = jaxkv.attend(cache, layer, batch, queries, keys, values)
        view, made = jaxkv.layer_view(cache, layer), lists_of(cache, layer, batch)
        results[layer] = view, out, made, batch.first_positions(layer)
    return cache, results


def lists_of(cache, layer, batch, layer_index=None):
    options = {"q_block_tokens": GROUP_TOKENS, "layer_index": layer_index}
    return (
        build_page_lists(cache, layer, batch, **options),
        build_page_csr(cache, layer, batch, **options),
        physical_to_logical(cache, layer, batch, layer_index=layer_index),
    )


def expected(layer: str, request: str, position: int) -> np.ndarray:
    """Attention of one token over all keys that it sees, which no cache was asked for."""
    queries, keys, values = tokens_of(request)
    seen = slice(first_seen(layer, position), position + 1)
    return attention(queries[position], keys[seen], values[seen])


def check_lists(served: Served, layer: str, lists, csr, dense) -> None:
    for made in (lists, csr, dense):
        jaxkv.check_errors(made)
    lists, csr, dense = jax.tree.map(np.asarray, (lists, csr, dense))
    columns = np.stack([csr.requests, csr.logical_pages, csr.pages], axis=1)
    for group, wanted in enumerate(served.seen_pages(layer)):
        valid = group, slice(lists.counts[group])
        listed = [array[valid] for array in (lists.requests, lists.logical_pages, lists.pages)]
        assert list(zip(*(a.tolist() for a in listed), strict=True)) == wanted
        part = columns[csr.offsets[group] : csr.offsets[group + 1]]
        assert list(map(tuple, part.tolist())) == wanted
        for request, logical_page, page in wanted:
            assert dense.logical_pages[request, page - dense.first_page] == logical_page
    names = list(served.spans)
    tokens = [(names.index(name), position) for name, position in served.tokens]
    tokens += [(-1, -1)] * (TOKENS - len(tokens))
    assert list(zip(lists.token_requests, lists.positions, strict=True)) == tokens
    ends = [span.stop for span in served.spans.values()]
    assert lists.seq_lens.tolist() == ends + [0] * (REQUESTS - len(ends))


# Sizes and other arguments.


@functools.cache
def running() -> tuple[jaxkv.KVCache, jaxkv.StepBatch]:
    """A cache and the batch of its second step."""
    cache, manager = make_cache(4), jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    for name in "ab":
        manager.start(name)
    for _ in range(2):
        cache, batch = apply_step(cache, manager.step(SHAPE, {"a": 5, "b": 7}))
    return cache, batch


def test_planned_bytes_are_the_bytes_that_exist() -> None:
    cache, batch = running()
    for layer in SECOND:
        kind = layer.partition(".")[0]
        sizes = page_list_sizes(cache, layer, SHAPE, q_block_tokens=GROUP_TOKENS)
        assert sizes == PageListSizes(
            max_num_batched_tokens=TOKENS,
            max_num_seqs=REQUESTS,
            max_model_len=LENGTH,
            page_tokens=4,
            q_block_tokens=GROUP_TOKENS,
            num_pages=2 * BLOCKS,
            sliding_window=WINDOW if kind == "window" else None,
            chunk_size=CHUNK if kind == "chunk" else None,
        )
        for kind, arrays in jax.eval_shape(build_all, cache, batch)[layer].items():
            sizes_of = [a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays)]
            assert sum(sizes_of) == page_list_bytes(sizes, kind)


def build_all(cache, batch, layers=SECOND):
    """Per layer and kind, all that the builders make."""
    made = {}
    for layer in layers:
        lists = build_page_lists(cache, layer, batch, q_block_tokens=GROUP_TOKENS)
        made[layer] = {
            "lists": lists,
            "csr": build_page_csr(cache, layer, batch, q_block_tokens=GROUP_TOKENS),
            "block_mask": block_mask_indices(lists),
            "physical_to_logical": physical_to_logical(cache, layer, batch),
        }
    return made


def test_lists_are_made_of_int32_in_every_mode_of_jax() -> None:
    cache, batch = running()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        made = jax.eval_shape(lambda *given: build_all(*given, LAYERS), cache, batch)
    assert {array.dtype for array in jax.tree.leaves(made)} == {np.dtype("int32")}


def test_the_layers_of_a_group_cost_one_build_together() -> None:
    cache, batch = running()

    def build(cache, batch):
        layers = "full.0", "full.1"
        return [build_page_lists(cache, x, batch, q_block_tokens=5).pages for x in layers]

    text = jax.jit(build).lower(cache, batch).compile().as_text()
    assert len(re.findall(r" sort\(", text)) == 1


def test_a_period_names_a_layer_of_the_group() -> None:
    cache, batch = running()

    @jax.jit
    def build(cache, batch, layer_index):
        named = [lists_of(cache, layer, batch) for layer in ("full.0", "full.1")]
        return lists_of(cache, "full.0", batch, layer_index), named

    for layer_index in range(2):
        found, named = build(cache, batch, np.int32(layer_index))
        assert_same_bytes(found, named[layer_index])
    for layer_index in (-1, 2):
        found, _ = build(cache, batch, np.int32(layer_index))
        lists, csr, dense = jax.tree.map(np.asarray, found)
        assert not lists.pages.any() and not csr.pages.any() and (dense.logical_pages == -1).all()
        for made in found:
            assert int(made.error_flags) == BAD_LAYER_INDEX
            with pytest.raises(PageListError, match="a period beyond the layers"):
                jaxkv.check_errors(made)


def test_without_a_causal_mask_every_group_lists_whole_requests() -> None:
    options = {"q_block_tokens": GROUP_TOKENS, "causal": False, "pages_are_shared": False}

    def build(cache, batch, layer="full.0", **options):
        builders = build_page_lists, build_page_csr
        return [builder(cache, layer, batch, **options) for builder in builders]

    made = jax.jit(functools.partial(build, **options))(*running())
    usual = jax.eval_shape(functools.partial(build, q_block_tokens=GROUP_TOKENS), *running())
    for ours, other in zip(made, usual, strict=True):
        jaxkv.check_errors(ours)
        assert ours.sizes == page_list_sizes(running()[0], "full.0", SHAPE, **options)
        assert other.sizes == dataclasses.replace(ours.sizes, causal=True, pages_are_shared=True)
    # Tokens 5..9 of a, then 7..13 of b: 3 and 4 pages of 4 tokens.
    lists, csr = made
    assert lists.counts.tolist() == np.diff(csr.offsets).tolist() == [3, 4, 4, 0]
    for layer in ("window.0", "chunk.0"):
        for builder in (build_page_lists, build_page_csr):
            with pytest.raises(ValueError, match="needs causal=True"):
                builder(running()[0], layer, running()[1], **options)


def test_a_page_of_two_requests_is_a_pair_of_each_and_once_in_a_block_mask() -> None:
    cache, manager = make_cache(4), jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    manager.start("a")
    cache, _ = apply_step(cache, manager.step(SHAPE, {"a": 12}))
    manager.fork("a", ["b"])

    @jax.jit
    def build(cache, batch):
        lists = build_page_lists(cache, "full.0", batch, q_block_tokens=2)
        return lists, block_mask_indices(lists)

    lists, mask = build(*apply_step(cache, manager.step(SHAPE, {"a": 1, "b": 1})))
    group = PLAN.layouts[0].placement_of("full.0").group
    (first, last), (same, copy) = (manager.block_ids(name)[group] for name in "ab")
    assert first == same and last != copy
    jaxkv.check_errors(lists)
    first, last, copy = ([2 * block, 2 * block + 1] for block in (first, last, copy))
    pages, requests = np.asarray(lists.pages), np.asarray(lists.requests)
    assert pages[0, :8].tolist() == first + last + first + copy
    assert requests[0, :8].tolist() == [0] * 4 + [1] * 4
    distinct = np.asarray(mask.kv_indices)[0, : int(mask.kv_num_blocks[0])]
    assert distinct.tolist() == sorted(first + last + copy)


def test_a_request_that_was_not_grown_is_flagged() -> None:
    upload = jaxkv.pack_step(SHAPE, rows=[0], num_computed_tokens=[0], num_new_tokens=[9])
    zeros = np.zeros((TOKENS, HEADS, SIZE), np.float32)
    _, results = step(make_cache(4, stacked=True), upload, tuple(SECOND), *[zeros] * 3)
    for _, _, (lists, *_), _ in results.values():
        assert int(lists.error_flags) == MISSING_PAGE and not np.asarray(lists.pages).any()
        with pytest.raises(PageListError, match="the request does not hold"):
            jaxkv.check_errors(lists)


def test_what_has_no_page_lists_is_refused_by_name() -> None:
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
            lambda x: build_page_lists(cache, x, batch, q_block_tokens=4),
            lambda x: build_page_csr(cache, x, batch, q_block_tokens=4),
            lambda x: physical_to_logical(cache, x, batch),
            lambda x: page_list_sizes(cache, x, shape, q_block_tokens=4),
        ):
            with pytest.raises(TypeError, match=f"layer='{layer}' is {kind}"):
                call(layer)
    square = jaxkv.StepShape.for_plan(mixed, max_requests=REQUESTS, tokens_per_request=4)
    _, batch = jax.eval_shape(jaxkv.apply_step, cache, square.idle())
    with pytest.raises(ValueError, match="rectangular, tokens_per_request=4"):
        build_page_lists(cache, "full", batch, q_block_tokens=4)
    other, batch = running()
    with pytest.raises(ValueError, match="batch belongs to another cache"):
        build_page_lists(cache, "full", batch, q_block_tokens=4)
    with pytest.raises(TypeError, match="cache must be a KVCache"):
        page_list_sizes(PLAN, "full.0", SHAPE, q_block_tokens=4)
    with pytest.raises(ValueError, match="made for another plan"):
        page_list_sizes(cache, "full", SHAPE, q_block_tokens=4)
    with pytest.raises(ValueError, match="q_block_tokens must be at least 1, got 0"):
        build_page_lists(other, "full.0", batch, q_block_tokens=0)
    divided = make_plan({"full": LAYERS["full.0"]}, context_parallel=2)
    shape = jaxkv.StepShape.for_plan(divided, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(divided, max_requests=REQUESTS, rank=0)
    with pytest.raises(ValueError, match="context_parallel=2"):
        page_list_sizes(cache, "full", shape, q_block_tokens=4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_cache_sharded_by_head_has_the_same_lists(axis_type) -> None:
    devices = np.array(jax.devices()[:2])
    if devices.size < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(devices, ("heads",), axis_types=(axis_type,))
    cache = make_cache(4, stacked=True, mesh=mesh, axis="heads")
    manager = jaxkv.BlockManager(PLAN, max_requests=REQUESTS)
    for name in "ab":
        manager.start(name)

    @jax.jit
    def step(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        made = lists_of(cache, "window.1", batch)
        return cache, made, block_mask_indices(made[0])

    with jax.set_mesh(mesh):
        for _ in range(2):
            cache, made, mask = step(cache, manager.step(SHAPE, {"a": 5, "b": 7}))
    group = PLAN.layouts[0].placement_of("window.1").group
    ids = {name: manager.block_ids(name)[group] for name in "ab"}
    served = Served({"a": range(5, 10), "b": range(7, 14)}, ids, BLOCKS * BLOCK // 4, 4)
    check_lists(served, "window.1", *made)
    distinct = [len({page for *_, page in seen}) for seen in served.seen_pages("window.1")]
    assert mask.kv_num_blocks.tolist() == distinct
