"""Attention to chosen tokens, and their choice, equal their definitions in float64.

What is not chosen is poison: a third of the tokens have NaN for keys and values, and no query
chooses those; the pool starts full of NaN.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.attention import _selected
from jaxkv.attention import top_blocks
from pallas_kernels import PackedRow
from tests.helpers import needs_devices
from tests.test_attend import (
    LENGTH,
    OPTIONS,
    REQUESTS,
    TOKENS,
    Engine,
    Setting,
    attention,
    bound_of,
    poisoned,
    shape_of,
    visible,
)

CHOSEN, COUNT, RATIO = 5, 4, 4
SETTINGS = [
    Setting("f32", "float32", kernel_block_size=2, rectangular=True, layers=("full", "latent")),
    Setting("bf16", "bfloat16", "BLHNC", heads=2, layers=("full", "chunked", "latent")),
    Setting("f16", "float32", "HND", kernel_block_size=2, layers=("full", "shared", "window")),
    Setting("fp8_e5m2", "float16", "HND", layers=("window", "window_latent")),
    pytest.param(
        Setting("bf16", "float32", layers=("full", "shared"), ranks=2), marks=needs_devices(2)
    ),
]
OF_HEADS = [  # with the size of blocks; 5 is no multiple of a block of the cache, nor it of 5
    (Setting("f32", "float32", kernel_block_size=2, rectangular=True, layers=("full",)), 2),
    (Setting("bf16", "bfloat16", "HND", layers=("window", "shared", "full", "latent")), 5),
    (Setting("int8_per_token_head", "float32", "BLNHC", 2, layers=("full", "chunked")), 1),
]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="size")
def step(cache: jaxkv.KVCache, upload: Any, inputs: Any, selected: Any, size: int) -> Any:
    cache, batch = jaxkv.apply_step(cache, upload)
    outs = {}
    for layer, arrays in inputs.items():
        options = OPTIONS.get(layer, {}) | {"selected": selected[layer]}
        options["sparse_block_size"] = size
        if "sinks" in options:
            options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
        cache, outs[layer] = jaxkv.attend(cache, layer, batch, *arrays, **options)
    return cache, outs


class Chooser(Engine):
    """An engine whose queries attend to random tokens, or each KV head to random blocks of them."""

    block, by_head = 1, False

    def step(self, work: dict[Any, int]) -> dict[str, np.ndarray]:
        before = self.manager.computed_tokens
        places = self._places(work)
        inputs = {layer: self._inputs(layer, work, places) for layer in self.layers}
        queries = {layer: one[0].reshape(-1, *one[0].shape[-2:]) for layer, one in inputs.items()}
        chosen, wanted = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for layer, one in queries.items():
            keys, values = next(iter(self.stored.values()))[self._owner(layer)]
            heads = keys.shape[1] if self.by_head else 1
            chosen[layer] = np.full((len(one), heads, CHOSEN), 2, np.int32)
            wanted[layer] = np.zeros((*one.shape[:2], values.shape[-1]))
            for request, (first, count) in places.items():
                stored = self.stored[request][self._owner(layer)]
                for i, head in itertools.product(range(first, first + count), range(heads)):
                    numbers, some = self._pick(layer, before[request] + i - first, stored[0])
                    chosen[layer][i, head] = numbers
                    of = slice(None)  # heads of queries and of keys
                    keys, values = stored
                    if self.by_head:
                        of = slice(head * one.shape[1] // heads, (head + 1) * one.shape[1] // heads)
                        keys, values = keys[:, [head]], values[:, [head]]
                    options = dict(OPTIONS.get(layer, {}))
                    if "sinks" in options:
                        options["sinks"] = options["sinks"][of]
                    query = one[i, of].astype(np.float64)
                    wanted[layer][i, of] = attention(query, keys[some], values[some], **options)
        selected = {
            layer: (rows if self.by_head else rows[:, 0]).reshape(
                *inputs[layer][0].shape[:-2], *rows.shape[1 : 1 + self.by_head], CHOSEN
            )
            for layer, rows in chosen.items()
        }
        upload = self.manager.step(self.shape, work)
        self.cache, outs = step(self.cache, upload, inputs, selected, self.block)
        for layer, out in outs.items():
            got = np.asarray(out).astype(np.float64).reshape(wanted[layer].shape)
            bound = bound_of(self.setting.queries, LENGTH)
            np.testing.assert_allclose(got, wanted[layer], rtol=0, atol=bound, err_msg=layer)
            assert out.dtype == self.setting.queries
        return {}

    def _pick(self, layer: str, position: int, keys: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Draws numbers of blocks, padded with some that are hidden, and returns their tokens."""
        good = ~np.isnan(keys).any(axis=(1, 2))
        blocks = dict[int, list[int]]()
        for token in visible(layer, position):
            blocks.setdefault(token // self.block, []).append(token)
        names = [name for name, tokens in blocks.items() if good[tokens].all()]
        names = self.rng.permutation(names)[: self.rng.integers(0, CHOSEN + 1)].tolist()
        hidden = [position // self.block + 1, LENGTH, -5, 10**9, -1, -1]  # as others may pad
        numbers = self.rng.permutation([*names, *hidden][:CHOSEN])
        return numbers, [token for name in names for token in blocks[name]]

    @staticmethod
    def _owner(layer: str) -> str:
        return "full" if layer == "shared" else layer

    def _inputs(self, layer: str, work: Any, places: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values of a step; a third of the keys and values are NaN."""
        queries, keys, values = super()._inputs(layer, work, places)
        if keys is None:
            return queries, keys, values
        axes = queries.ndim - 2
        arrays = [a.reshape(-1, *a.shape[axes:]) for a in (keys, values) if a is not None]
        for request, (first, count) in places.items():
            stored = self.stored[request][layer]
            for i in np.flatnonzero(self.rng.random(count) < 1 / 3):
                for array in arrays:
                    array[first + i] = np.nan
                for array in stored:
                    array[len(array) - count + i] = np.nan
        return queries, keys, values


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_queries_attend_to_the_tokens_that_are_chosen_and_to_no_other(setting: Setting) -> None:
    serve(setting)


def test_chosen_tokens_are_attended_to_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selected, "PART_BYTES", 1)
    right, sizes = _selected.in_parts, set[int]()

    def noted(attend: Any, size: int, *arrays: Any) -> Any:
        sizes.add(size)
        return right(attend, size, *arrays)

    monkeypatch.setattr(_selected, "in_parts", noted)
    serve(Setting("f32", "float32", "HND", layers=("full", "chunked")))
    assert sizes == {1}


@pytest.mark.parametrize(("setting", "block"), OF_HEADS, ids=str)
def test_each_head_attends_to_the_blocks_that_are_chosen_for_it(
    setting: Setting, block: int
) -> None:
    serve(setting, block, by_head=True)


def serve(setting: Setting, block: int = 1, by_head: bool = False) -> None:
    engine = Chooser(setting, shape_of(setting), seed=3)
    engine.block, engine.by_head = block, by_head
    for name, first in enumerate((5, 6, 1)):
        engine.start(name, 0)
        engine.step({name: first})
    engine.step({0: 5, 1: 1, 2: 6})
    for _ in range(3):
        engine.step({0: 1, 1: 1, 2: 1})
    engine.step({1: 6, 0: 1})


@needs_devices(2)
def test_devices_attend_to_the_chosen_tokens_for_their_own_heads() -> None:
    """And choose the same ones, in layers by their index in a loop."""
    rng, outs = np.random.default_rng(4), []
    queries, keys = (rng.standard_normal((TOKENS, n, 8)).astype(np.float32) for n in (4, 2))
    weights = rng.random((TOKENS, 4)).astype(np.float32)
    for ranks in (1, 2):
        kv = jaxkv.FullAttentionSpec(
            block_size=4, num_kv_heads=2 // ranks, head_size=8, dtype="f32"
        )
        place: dict[str, Any] = {"device": jax.devices()[0]}
        if ranks == 2:
            place = {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:2]), ("h",)), "axis": "h"}
        index = INDEXES["plain"]
        server = Server({"a": kv, "b": kv, "a.i": index, "b.i": index}, **place)

        def layers(cache: Any, layer: str, batch: Any, queries: Any, keys: Any, weights: Any):
            def run(carry: Any, i: Any) -> Any:
                cache, x = carry
                index = {"count": 3, "layer_index": i}
                arrays = x, weights, x[:, 0]
                cache, chosen = jaxkv.top_tokens(cache, f"{layer}.i", batch, *arrays, **index)
                options = {"selected": chosen, "layer_index": i}
                cache, out = jaxkv.attend(cache, layer, batch, x, keys, keys, **options)
                size = {"sparse_block_size": 2, "layer_index": i}
                each = size | {"count": 2, "local_blocks": 1}
                cache, blocks = top_blocks(cache, f"{layer}.i", batch, x[:, ::2], **each)
                cache, more = jaxkv.attend(cache, layer, batch, x, selected=blocks, **size)
                return (cache, x + out + more), chosen

            (cache, x), chosen = jax.lax.scan(run, (cache, queries), jnp.arange(2))
            return cache, (x, chosen)

        for work in ({0: 9}, {0: 3, 1: 8}):
            _, out = server.call(layers, "a", work, queries, keys, weights)
        outs.append((np.asarray(out[0])[:11], np.asarray(out[1])[:, :11]))
    for one, two in zip(*outs, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_packed_latents_are_chosen_by_their_unpacked_values() -> None:
    spec = jaxkv.MLASpec(block_size=4, head_size=192, value_size=128, bytes_per_token=260)
    server = Server({"a": spec})
    rng = np.random.default_rng(0)
    row, keys = PackedRow(128, 64), rng.standard_normal((TOKENS, 192))
    keys[3::4] = np.nan
    queries = rng.standard_normal((TOKENS, 2, 192)).astype(np.float32)
    chosen = np.stack([np.arange(TOKENS) // 2 // 4 * 4, np.full(TOKENS, -1)], axis=1)
    chosen[9:, 1] = 6
    arrays = queries, keys.astype(np.float32), None
    options = {"selected": chosen.astype(np.int32), "row_packing": "fp8_ds_mla"}
    _, out = server.call(jaxkv.attend, "a", {0: TOKENS}, *arrays, **options)
    stored = np.asarray(row.unpack(row.pack(jnp.asarray(keys, jnp.float32))), np.float64)[:, None]
    for i in range(TOKENS):
        some = [at for at in chosen[i] if 0 <= at <= i]
        right = attention(queries[i].astype(np.float64), stored[some], stored[some, :, :128])
        np.testing.assert_allclose(np.asarray(out)[i], right, atol=1e-5)


# --- the choice -----------------------------------------------------------------------

INDEXES: dict[str, Any] = {
    "plain": jaxkv.MLASpec(block_size=4, head_size=8, dtype="f32"),
    "bf16": jaxkv.MLASpec(block_size=8, head_size=8),
    "packed": jaxkv.MLASpec(block_size=4, head_size=128, bytes_per_token=132),
    "groups": jaxkv.MLASpec(block_size=8, head_size=8, dtype="f32", compress_ratio=RATIO),
}


class Server:
    """A poisoned cache of some layers and its manager; requests start at their first step."""

    def __init__(self, layers: dict[str, Any], ranks: int = 1, **place: Any):
        plan = jaxkv.plan_cache(
            layers,
            2**30,
            max_model_len=LENGTH,
            num_blocks_override=100,
            limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
            zero_policy="never",
            context_parallel=ranks,
        )
        options = place
        if ranks > 1:
            auto = (jax.sharding.AxisType.Auto,)
            mesh = jax.make_mesh((ranks,), ("c",), axis_types=auto, devices=jax.devices()[:ranks])
            options = {"mesh": mesh, "axis": "c", "interleave_tokens": 2}
        self.cache = poisoned(jaxkv.make_cache(plan, max_requests=REQUESTS, **options))
        self.manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
        sizes = {"max_requests": REQUESTS, "max_tokens": TOKENS}
        self.shape = jaxkv.StepShape.for_plan(plan, **sizes)
        self.compiled: dict[Any, Any] = {}  # by function; its options are the same each time

    def call(self, function: Any, layer: str, work: dict[int, int], *arrays: Any, **options: Any):
        """Calls a function of a layer in a step, and keeps its cache."""
        for request in work:
            if request not in self.manager.computed_tokens:
                self.manager.start(request)
        upload = self.manager.step(self.shape, work)

        @jax.jit
        def run(cache: Any, upload: Any, arrays: Any) -> Any:
            cache, batch = jaxkv.apply_step(cache, upload)
            return function(cache, layer, batch, *arrays, **options)

        self.cache, _ = result = self.compiled.setdefault(function, run)(self.cache, upload, arrays)
        return result


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 1) for name in INDEXES), pytest.param("plain", 2, marks=needs_devices(2))],
)
def test_the_tokens_of_the_highest_scores_are_chosen(name: str, ranks: int) -> None:
    spec = INDEXES[name]
    server, rng = Server({"i": spec}, ranks), np.random.default_rng(1)
    heads, width, ratio = 3, spec.head_size, spec.compress_ratio
    keys = {request: np.zeros((0, width)) for request in range(REQUESTS)}
    row = PackedRow(width, 0)

    def choose(cache: Any, layer: str, batch: Any, *arrays: Any) -> Any:
        if ratio == 1:
            return jaxkv.top_tokens(cache, layer, batch, *arrays, count=COUNT)
        ends = (batch.positions + 1) % ratio == 0  # the key of a group is that of its last
        cache = jaxkv.write_rows(cache, layer, batch, arrays[2], mask=ends)
        return jaxkv.top_tokens(cache, layer, batch, *arrays[:2], count=COUNT)

    for work in ({0: 7, 1: 9}, {0: 5, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 1}, {2: 3, 1: 1, 0: 11}):
        given = np.full((TOKENS, width), np.nan)
        queries = np.full((TOKENS, heads, width), np.nan)
        weights = np.full((TOKENS, heads), np.nan)
        total = sum(work.values())
        given[:total] = rng.integers(-8, 9, (total, width)) / 4
        queries[:total] = rng.integers(-8, 9, (total, heads, width)) / 4
        weights[:total] = rng.integers(-2, 5, (total, heads)) / 4
        before = {request: len(keys[request]) for request in work}
        starts = dict(zip(work, np.cumsum([0, *work.values()]), strict=False))
        for request, count in work.items():
            new = given[starts[request] :][:count]
            keys[request] = np.concatenate([keys[request], new])
        arrays = [array.astype(np.float32) for array in (queries, weights, given)]
        _, chosen = server.call(choose, "i", work, *arrays)
        chosen = np.asarray(chosen)
        assert chosen.dtype == np.int32 and (chosen[total:] == -1).all()
        for request, count in work.items():
            stored = keys[request][ratio - 1 :: ratio]
            if name == "packed":
                packed = row.unpack(row.pack(jnp.asarray(stored, jnp.float32)))
                stored = np.asarray(packed, np.float64)
            for i in range(count):
                at = starts[request] + i
                num = (before[request] + i + 1) // ratio
                found = np.maximum(queries[at] @ stored[:num].T, 0)
                scores = weights[at] @ found
                right = np.argsort(-scores, kind="stable")[:COUNT]
                padded = np.pad(right, (0, COUNT - len(right)), constant_values=-1)
                if name == "packed":
                    got = chosen[at][chosen[at] >= 0]
                    assert len({*got.tolist()}) == len(right) == len(got)
                    np.testing.assert_allclose(scores[got], scores[right], atol=1e-4)
                else:
                    assert chosen[at].tolist() == padded.tolist()


@pytest.mark.parametrize(
    ("name", "ranks"), [("bf16", 1), pytest.param("plain", 2, marks=needs_devices(2))]
)
def test_each_head_chooses_the_blocks_of_its_highest_products(name: str, ranks: int) -> None:
    """And the first block and the last two, which count: 3 tokens each, of 4 or 8 in the cache."""
    server, rng, size, count = Server({"i": INDEXES[name]}, ranks), np.random.default_rng(5), 3, 5
    always = {"init_blocks": 1, "local_blocks": 2}
    choose = functools.partial(top_blocks, count=count, sparse_block_size=size, **always)
    keys = {request: np.zeros((0, 8)) for request in range(REQUESTS)}
    for work in ({0: 7, 1: 9}, {0: 5, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 1}, {2: 3, 1: 1, 0: 11}):
        queries, new = np.full((TOKENS, 2, 8), np.nan), np.full((TOKENS, 8), np.nan)
        total = sum(work.values())
        queries[:total] = rng.integers(-8, 9, (total, 2, 8)) / 4
        new[:total] = rng.integers(-8, 9, (total, 8)) / 4
        arrays = queries.astype(np.float32), new.astype(np.float32)
        chosen = np.asarray(server.call(choose, "i", work, *arrays)[1])
        assert chosen.shape == (TOKENS, 2, count) and (chosen[total:] == -1).all()
        row = 0
        for request, tokens in work.items():
            before = len(keys[request])
            keys[request] = np.concatenate([keys[request], new[row : row + tokens]])
            for position in range(before, before + tokens):
                last = position // size
                for head in range(2):
                    products = keys[request][: position + 1] @ queries[row, head]
                    starts = range(0, position + 1, size)
                    scores = {start // size: products[start:][:size].max() for start in starts}
                    forced = sorted({0, *range(max(last - 1, 0), last + 1)})
                    rest = sorted(scores.keys() - set(forced), key=lambda i: (-scores[i], i))
                    right = [*forced, *rest][:count]
                    padded = right + [-1] * (count - len(right))
                    assert chosen[row, head].tolist() == padded
                row += 1


def test_the_chosen_tokens_are_attended_to_in_a_step_context() -> None:
    """Of as many tokens as there are, none is left out: as without ``selected``."""
    layers = {"a": jaxkv.MLASpec(block_size=4, head_size=8, dtype="f32"), "i": INDEXES["plain"]}
    rng, outs = np.random.default_rng(2), []
    queries = rng.standard_normal((TOKENS, 3, 8)).astype(np.float32)
    keys = rng.standard_normal((TOKENS, 8)).astype(np.float32)
    for chosen_by in (None, "tokens", "blocks"):
        server = Server(layers)
        server.manager.start(0)

        def run(cache: Any, upload: Any, chosen_by: str | None = chosen_by) -> Any:
            step = jaxkv.StepContext(cache, upload, token_ids=jnp.zeros(TOKENS, jnp.int32))
            options: dict[str, Any] = {}
            if chosen_by != "blocks":
                weights = jnp.ones((1, TOKENS, 3))
                chosen = step.top_tokens("i", queries[None], weights, keys[None], count=LENGTH)
                assert chosen.shape == (1, TOKENS, LENGTH)
                options = {"selected": chosen} if chosen_by else {}
            else:
                size = {"sparse_block_size": 2}
                arrays = queries[None, :, :1], keys[None]
                chosen = step.top_blocks("i", *arrays, count=LENGTH // 2, **size)
                assert chosen.shape == (1, TOKENS, 1, LENGTH // 2)
                options = {"selected": chosen, **size}
            out = step.attend("a", queries[None], keys[None], **options)
            return step.done(), out

        outs.append(jax.jit(run)(server.cache, server.manager.step(server.shape, {0: 13}))[1])
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)
    np.testing.assert_allclose(outs[0], outs[2], atol=1e-5)
    assert outs[0].shape == (1, TOKENS, 3, 8)


def memory_of_a_step(num_blocks: int) -> tuple[int, int]:
    """Bytes of temporaries and of what is reused, of a step that is compiled and never run."""
    layers = {"a": jaxkv.MLASpec(block_size=16, head_size=8), "i": INDEXES["bf16"]}
    more = {"num_blocks_override": num_blocks, "limits": jaxkv.Limits(max_in_flight_tokens=TOKENS)}
    plan = jaxkv.plan_cache(layers, 2**30, max_model_len=256, **more)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jax.eval_shape(functools.partial(jaxkv.make_cache, plan, max_requests=REQUESTS))

    @functools.partial(jax.jit, donate_argnums=0)
    def model(cache: Any, upload: Any, x: Any) -> Any:
        cache, batch = jaxkv.apply_step(cache, upload)
        cache, chosen = jaxkv.top_tokens(cache, "i", batch, x, x[..., 0], x[:, 0], count=4)
        return jaxkv.attend(cache, "a", batch, x, x[:, 0], selected=chosen)

    x = jax.ShapeDtypeStruct((TOKENS, 2, 8), jnp.bfloat16)
    memory = model.lower(cache, shape.idle(), x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(buffer.size for buffer in cache.buffers)
    return memory.temp_size_in_bytes, memory.alias_size_in_bytes


def test_no_temporary_grows_with_the_pool() -> None:
    (small, pool), (large, larger) = memory_of_a_step(100), memory_of_a_step(10_000)
    assert large == small and larger > 50 * pool


WRONG = {
    "int64 positions": ({"selected": np.zeros((TOKENS, 2), np.int64)}, TypeError, "int32, got"),
    "positions for other tokens": (
        {"selected": np.zeros((3, 2), np.int32)},
        ValueError,
        r"selected has shape \(3, 2\); this batch wants \(16, 'N'\)",
    ),
    "positions for other heads": (
        {"selected": np.zeros((TOKENS, 2, 2), np.int32)},
        ValueError,
        r"or \(16, 1, 'N'\), those of each KV head",
    ),
    "a size of nothing": ({"sparse_block_size": 4}, ValueError, "of blocks in selected, which is"),
    "no positions": ({"selected": np.zeros((TOKENS, 0), np.int32)}, ValueError, "selected has sh"),
    "kernels": (
        {"selected": np.zeros((TOKENS, 2), np.int32), "implementation": "mosaic_gpu"},
        NotImplementedError,
        "attends to selected tokens of latent vectors whose pages are whole rows alone",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_choices_are_refused_by_name(what: str) -> None:
    options, error, message = WRONG[what]
    spec = INDEXES["plain"]
    if what == "kernels":  # a row and a half more
        spec = dataclasses.replace(spec, page_bytes_padded=spec.page_bytes + 48)
    server = Server({"a": spec})
    arrays = jnp.zeros((TOKENS, 2, 8)), jnp.zeros((TOKENS, 8))
    with pytest.raises(error, match=message):
        server.call(jaxkv.attend, "a", {0: 1}, *arrays, **options)


def test_top_blocks_refuses_groups_and_sizes_that_do_not_fit() -> None:
    queries, keys = jnp.zeros((TOKENS, 2, 8)), jnp.zeros((TOKENS, 8))
    right = {"count": 2, "sparse_block_size": 4}
    for layer, arrays, options, message in [
        ("groups", (queries,), {}, "layer='groups' has a key for each 4 tokens; top_blocks wants"),
        ("plain", (queries[:, 0],), {}, r"queries has shape \(16, 8\); layer 'plain'"),
        ("plain", (queries, keys[:3]), {}, r"keys has shape \(3, 8\)"),
        ("plain", (queries,), {"sparse_block_size": 0}, "sparse_block_size must be at least 1"),
        ("plain", (queries,), {"local_blocks": -1}, "local_blocks must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            options = right | options
            function = functools.partial(top_blocks, **options)
            Server(INDEXES).call(function, layer, {0: 1}, *arrays)


def test_top_tokens_refuses_what_holds_no_index_and_what_does_not_fit() -> None:
    layers = {
        "full": jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8),
        "window": jaxkv.SlidingWindowMLASpec(block_size=4, head_size=8, sliding_window=4),
        "bytes": jaxkv.MLASpec(block_size=4, head_size=8, bytes_per_token=9),
        **INDEXES,
    }
    queries, weights, keys = jnp.zeros((TOKENS, 2, 8)), jnp.zeros((TOKENS, 2)), jnp.zeros((16, 8))
    for layer, arrays, count, error, message in [
        ("full", (queries, weights), 1, TypeError, "layer='full' is no layer of one key per token"),
        ("window", (queries, weights), 1, TypeError, "layer='window' is no layer of one key"),
        ("bytes", (queries, weights), 1, TypeError, "bytes_per_token=9, which is no key"),
        ("groups", (queries, weights, keys), 1, ValueError, "one for each 4 tokens: write those"),
        ("plain", (queries, weights[:, :1]), 1, ValueError, r"weights has shape \(16, 1\); wants"),
        ("plain", (queries[..., :4], weights), 1, ValueError, r"queries has shape \(16, 2, 4\)"),
        ("plain", (queries, weights, keys[:, :4]), 1, ValueError, r"keys has shape \(16, 4\)"),
        ("plain", (queries, weights), 0, ValueError, "count must be at least 1"),
        ("plain", (queries.astype("int32"), weights), 1, TypeError, "queries has dtype int32"),
    ]:
        server = Server(layers)
        with pytest.raises(error, match=message):
            server.call(functools.partial(jaxkv.top_tokens, count=count), layer, {0: 1}, *arrays)
