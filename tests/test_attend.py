"""`attend` equals attention in float64, written from the rule of each layer kind.

What a request never wrote is poison: every byte of the pool starts as 0xFF, which is NaN in
every float dtype and -1 in int8, and padding of the inputs is NaN. Blocks are zeroed only where
a cache could not do without.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.attention import _kernel
from jaxkv._src.specs import LayerSpec
from jaxkv.testing import assert_no_recompilation, assert_same_bytes
from tests import pool_cases as cases
from tests.helpers import needs_devices
from tests.reference_token_heads import BY_HEADS, pack_by_heads, unpack_by_heads

REQUESTS, LENGTH, TOKENS, EACH, ENCODER = 3, 24, 16, 7, 5
WINDOW, CHUNK, KV_HEADS, SIZE, VALUE_SIZE, LATENT = 6, 7, 2, 4, 3, 14
KEYS_AT_ONCE = 512  # at least; keys that the loop of `attend` takes per round
DEVICES = jax.devices()
NAMES = ("full", "shared", "window", "chunked", "cross", "latent", "window_latent")

# What a call of each layer asks for beyond its rule.
OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"sinks": (-1.0, 0.5, 1.0, 3.0, 0.0, -np.inf), "soft_cap": 2.0, "scale": 0.75},
    "window": {"sinks": (0.0, 2.0, 1.0, 0.5, -3.0, 1.0)},
    "cross": {"sinks": (1.0,) * 6, "scale": 0.25},
    "window_latent": {"soft_cap": 5.0},
}


class Setting(NamedTuple):
    """The way a cache lies in memory, and what is asked of it."""

    dtype: str
    queries: str
    order: str = "NHD"
    kernel_block_size: int | None = None
    stacked: bool | None = None
    rectangular: bool = False
    heads: int = 6  # of the queries; KV_HEADS divide them
    layers: tuple[str, ...] = NAMES  # those that attend
    ranks: int = 1  # of context parallelism

    @property
    def by_heads(self) -> bool:
        """Whether each token and head has a scale, so that what is stored is rounded."""
        return self.dtype in BY_HEADS

    @property
    def has_tiles(self) -> bool:
        """Whether blocks with heads are cut in another way than latent ones on the same bytes."""
        return self.kernel_block_size is not None and self.order == "HND"

    def __str__(self) -> str:
        form = "rectangular" if self.rectangular else "flat"
        ranks = f"-{self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.dtype}-{self.queries}-{self.order}-{self.kernel_block_size}-{form}{ranks}"


MOST = ("full", "chunked", "cross", "latent")
SETTINGS = [
    Setting("f32", "float32", kernel_block_size=2, rectangular=True),
    Setting("bf16", "bfloat16", "BLHNC", heads=2, layers=MOST),
    Setting("f16", "float32", "HND", kernel_block_size=2, layers=("full", "shared", "latent")),
    Setting(
        "fp8_e4m3",
        "bfloat16",
        rectangular=True,
        stacked=False,
        layers=("full", "window", "cross"),
    ),
    Setting("fp8_e5m2", "float16", "HND", layers=("window", "cross", "window_latent")),
    Setting("int8", "float32", "BLNHC", kernel_block_size=1, layers=("full", "chunked", "latent")),
    Setting(
        *("int8_per_token_head", "float32", "BLNHC", 2),
        layers=("full", "shared", "window", "chunked"),
    ),
    Setting("fp8_per_token_head", "bfloat16", rectangular=True, layers=("full", "cross")),
    pytest.param(
        Setting("bf16", "float32", rectangular=True, layers=("full", "shared"), ranks=2),
        marks=needs_devices(2),
    ),
]


@functools.cache
def plan_of(setting: Setting) -> jaxkv.Plan:
    """Every kind of layer, all on one page size."""
    dtype = setting.dtype
    kv: dict[str, Any] = {"block_size": 4, "num_kv_heads": KV_HEADS, "dtype": dtype}
    kv |= {"head_size": SIZE, "head_size_v": VALUE_SIZE}
    of_latents = "bf16" if setting.by_heads else dtype
    latent: dict[str, Any] = {"block_size": 4, "head_size": LATENT, "dtype": of_latents}
    layers: dict[str, Any] = {
        "full": jaxkv.FullAttentionSpec(**kv),
        "shared": jaxkv.SharedKVSpec("full"),
        "window": jaxkv.SlidingWindowSpec(sliding_window=WINDOW, **kv),
        "chunked": jaxkv.ChunkedAttentionSpec(chunk_size=CHUNK, **kv),
        "cross": jaxkv.CrossAttentionSpec(**kv),
        "latent": jaxkv.MLASpec(value_size=9, **latent),
        "window_latent": jaxkv.SlidingWindowMLASpec(sliding_window=WINDOW, **latent),
    }
    return jaxkv.plan_cache(
        {
            name: layers[name]
            for name in (NAMES if setting.ranks == 1 and not setting.by_heads else setting.layers)
        },
        2**40,
        max_model_len=LENGTH,
        num_blocks_override=100,
        override_beyond_memory=True,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS, max_encoder_tokens=ENCODER),
        context_parallel=setting.ranks,
        zero_policy="always" if setting.has_tiles else "never",
    )


# Powers of two, so that what is stored is exact.
SCALES = {
    "full": (0.25, 0.125),
    "window": (0.25, 0.125),
    "chunked": (0.25, 0.25),
    "cross": (0.25, 0.125),
    "latent": (0.25, 0.5),
    "window_latent": (0.125, 0.5),
}


def poisoned(cache: jaxkv.KVCache) -> jaxkv.KVCache:
    buffers = tuple(jnp.full_like(buffer, 0xFF) for buffer in cache.buffers)
    return dataclasses.replace(cache, buffers=buffers)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, upload, inputs):
    """Every layer writes its rows and attends."""
    return attend_layers(*jaxkv.apply_step(cache, upload), inputs)


def attend_layers(cache, batch, inputs):
    outs = {}
    for layer, (queries, keys, values) in inputs.items():
        options = dict(OPTIONS.get(layer, {}))
        if "sinks" in options:
            sinks = options["sinks"][: queries.shape[-2]]
            options["sinks"] = jnp.array(sinks, queries.dtype)
        cache, outs[layer] = jaxkv.attend(cache, layer, batch, queries, keys, values, **options)
    return cache, outs


# --- the definition -------------------------------------------------------------------


def visible(
    layer: str, position: int, encoder_len: int = 0, window: int = WINDOW, chunk: int = CHUNK
) -> range:
    """Positions that a token sees in a layer, from the definition of its kind."""
    match layer:
        case "full" | "shared" | "latent":
            return range(position + 1)
        case "window" | "window_latent":
            return range(max(0, position - window + 1), position + 1)
        case "chunked":
            return range(position - position % chunk, position + 1)
        case "cross":
            return range(encoder_len)
    raise AssertionError(layer)


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: tuple[float, ...] | None = None,
) -> np.ndarray:
    """float64[heads, V] of one query, [heads, K], over the keys that it sees, [n, kv_heads, K]."""
    heads, scale = len(query), query.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((heads, values.shape[-1]))
    for head in range(heads):
        kv_head = head // (heads // keys.shape[1])
        scores = keys[:, kv_head] @ query[head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        logits = scores if sinks is None else np.append(scores, sinks[head])
        if len(scores):
            weights = np.exp(scores - logits.max())
            out[head] = weights @ values[:, kv_head] / np.exp(logits - logits.max()).sum()
    return out


def bound_of(queries: str, num_tokens: int) -> float:
    """The most by which an output differs from attention in float64.

    What is stored is exact: keys, values and queries are multiples of 1/4 up to V = 2, scales
    powers of two, and dot products of them are exact in float32, too. With u = 2**-24, a score
    of at most S = 4 * sqrt(14) passes at most 8 roundings (scales, soft cap), the maximum that
    is subtracted from it as many and the difference, up to 2 S, one more; the exponential has a
    relative error of that and some 4 u of its own. The running softmax multiplies it by one more
    such exponential in each of its rounds. So weights and their sum are off by
    E = (1 + rounds) * (18 S + 4) u, either sum of n terms adds n u, and quotient and scale 4 u.
    Low precision rounds each weight, which is at most 1 next to a sum of at least 1, to u' for
    its product with a value, or to half of the smallest number 2**-24 of float16; and the output
    once more.
    """
    u, largest, score = 2.0**-24, 2.0, 4 * LATENT**0.5
    rounds = -(-num_tokens // KEYS_AT_ONCE)
    relative = (1 + rounds) * (18 * score + 4)
    bound = largest * (2 * relative + 2 * (num_tokens + 1) + 4) * u
    low = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[queries]
    return bound + 2 * low * largest + (num_tokens * 2.0**-25 * largest if low else 0)


# --- an engine with a dense cache next to it ------------------------------------------


class Engine:
    """Runs steps, and keeps every request's keys and values as it was given them."""

    def __init__(self, setting: Setting, shape: jaxkv.StepShape, seed: int = 0):
        self.setting, self.shape, plan = setting, shape, plan_of(setting)
        self.layers = setting.layers
        self.manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
        self.cache = poisoned(cache_of(setting))
        self.rng = np.random.default_rng(seed)
        self.stored: dict[Any, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        self.sick: set[Any] = set()  # requests whose queries, keys and values are all NaN

    def start(self, request: Any, encoder_tokens: int) -> None:
        self.manager.start(request, encoder_tokens=encoder_tokens)
        self.stored[request] = {
            layer: (np.zeros((0, heads, k)), np.zeros((0, heads, v)))
            for layer, (heads, k, v) in ROWS.items()
        }
        heads, *widths = ROWS["cross"]
        keys, values = (self._draw((encoder_tokens, heads, width)) for width in widths)
        if request in self.sick:
            keys, values = np.full_like(keys, np.nan), np.full_like(values, np.nan)
        self.stored[request]["cross"] = self._held(keys, values)

    def step(self, work: dict[Any, int]) -> dict[str, np.ndarray]:
        """Runs a step, and fails where an output is not that of the definition."""
        before = self.manager.computed_tokens
        places = self._places(work)
        inputs = {layer: self._inputs(layer, work, places) for layer in self.layers}
        upload = self.manager.step(self.shape, work)
        self.cache, outs = step(self.cache, upload, inputs)
        outs = jax.tree.map(np.asarray, outs)
        for layer, (queries, *_) in inputs.items():
            got = outs[layer].astype(np.float64).reshape(-1, *outs[layer].shape[-2:])
            queries = queries.astype(np.float64).reshape(-1, *queries.shape[-2:])
            wanted = np.zeros_like(got)
            for request, (first, count) in places.items():
                if request in self.sick:
                    wanted[first : first + count] = got[first : first + count]
                    continue
                for i in range(count):
                    position = before[request] + i
                    wanted[first + i] = self._expected(layer, request, position, queries[first + i])
            assert outs[layer].dtype == self.setting.queries
            bound = bound_of(self.setting.queries, LENGTH)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=bound, err_msg=layer)
            padding = np.ones(len(got), bool)
            for first, count in places.values():
                padding[first : first + count] = False
            assert not got[padding].any(), f"{layer}: padding"
        return {layer: outs[layer].reshape(-1, *outs[layer].shape[-2:])[~padding] for layer in outs}

    def _places(self, work: dict[Any, int]) -> dict[Any, tuple[int, int]]:
        """Each request's first place among the flattened tokens, and its number of tokens."""
        starts = np.cumsum([0, *work.values()]).tolist()
        if self.shape.tokens_per_request is not None:
            starts = [i * self.shape.tokens_per_request for i in range(len(work))]
        return {request: (starts[i], n) for i, (request, n) in enumerate(work.items())}

    def _inputs(self, layer: str, work: Mapping[Any, int], places) -> tuple[Any, Any, Any]:
        """Queries, keys and values of a step, NaN where there is no token."""
        heads, width, value_width = ROWS["full" if layer == "shared" else layer]
        queries = self._padded((self.setting.heads, width))
        if layer == "cross":
            arrays = [
                np.full((self.shape.batch_size, ENCODER, heads, w), np.nan)
                for w in (width, value_width)
            ]
            for entry, request in enumerate(work):
                for array, rows in zip(arrays, self.stored[request]["cross"], strict=True):
                    array[entry, : len(rows)] = rows
        else:
            arrays = [self._padded((heads, w)) for w in (width, value_width)]
        flat = [array.reshape(-1, *array.shape[-2:]) for array in (queries, *arrays)]
        for request, (first, count) in places.items():
            own = slice(first, first + count)
            if request in self.sick:
                continue
            flat[0][own] = self._draw(flat[0][own].shape)
            if layer in ("cross", "shared"):
                continue
            new = [self._draw(array[own].shape) for array in flat[1:]]
            if "latent" in layer:
                new[1] = new[0][..., : new[1].shape[-1]]
            for array, rows in zip(flat[1:], new, strict=True):
                array[own] = rows
            pairs = zip(self.stored[request][layer], self._held(*new), strict=True)
            keys, values = (np.concatenate(pair) for pair in pairs)
            self.stored[request][layer] = keys, values
        queries, keys, values = (a.astype(self.setting.queries) for a in (queries, *arrays))
        if layer == "shared":
            return queries, None, None
        return queries, *((keys[..., 0, :], None) if "latent" in layer else (keys, values))

    def _held(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and values as they are read back."""
        if not self.setting.by_heads:
            return keys, values
        dtype, sizes = self.setting.dtype, (keys.shape[1], keys.shape[2], values.shape[2])
        return unpack_by_heads(dtype, pack_by_heads(dtype, keys, values), *sizes)

    def _expected(self, layer: str, request: Any, position: int, query: np.ndarray) -> np.ndarray:
        keys, values = self.stored[request]["full" if layer == "shared" else layer]
        seen = visible(layer, position, len(keys))
        own = slice(seen.start, seen.stop)
        return attention(query, keys[own], values[own], **OPTIONS.get(layer, {}))

    def _padded(self, row: tuple[int, ...]) -> np.ndarray:
        each = self.shape.tokens_per_request
        tokens = (self.shape.max_tokens,) if each is None else (self.shape.batch_size, each)
        return np.full((*tokens, *row), np.nan)

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Multiples of 1/4 up to 2: three bits, which every dtype holds."""
        return self.rng.integers(-8, 9, shape) / 4


# Heads, width of K and width of V of what each layer stores.
ROWS = dict.fromkeys(("full", "window", "chunked", "cross"), (KV_HEADS, SIZE, VALUE_SIZE))
ROWS |= {"latent": (1, LATENT, 9), "window_latent": (1, LATENT, LATENT)}


def cache_of(setting: Setting) -> jaxkv.KVCache:
    plan, size = plan_of(setting), setting.kernel_block_size
    owners = [name for group in plan.layout.groups for name in group.layers]
    options: dict[str, Any] = {"scales": {name: SCALES[name] for name in owners}}
    if setting.ranks > 1:
        options["mesh"] = jax.make_mesh(
            (setting.ranks,),
            ("context",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=DEVICES[: setting.ranks],
        )
        options |= {"axis": "context", "interleave_tokens": 2}
    return jaxkv.make_cache(
        plan,
        max_requests=REQUESTS,
        order=setting.order,
        stacked=setting.stacked,
        kernel_block_sizes=None if size is None else [size] * len(plan.groups),
        **options,
    )


@functools.cache
def shape_of(setting: Setting, max_tokens: int = TOKENS) -> jaxkv.StepShape:
    sizes: dict[str, Any] = {"max_tokens": max_tokens}
    if setting.rectangular:
        sizes = {"tokens_per_request": EACH, "max_query_len": EACH - 1}
    return jaxkv.StepShape.for_plan(plan_of(setting), max_requests=REQUESTS, **sizes)


@st.composite
def traffic(draw: st.DrawFn) -> list[dict[int, int]]:
    """Steps: request -> wanted tokens, in the order of the batch."""
    sizes = st.sampled_from([1, 1, 1, 2, 3, 7, 12, 16])
    works = []
    for _ in range(draw(st.integers(1, 6))):
        order = draw(st.permutations(range(REQUESTS)))
        works.append({r: draw(sizes) for r in order[: draw(st.integers(1, REQUESTS))]})
    return works


def fitted(engine: Engine, wanted: dict[int, int], encoder_tokens: int) -> dict[int, int]:
    """A step's work cut to what its shape and the longest request allow; requests start over."""
    room, work = TOKENS, {}
    for request, count in wanted.items():
        computed = engine.manager.computed_tokens.get(request)
        if computed == LENGTH:
            engine.manager.finish(request)
        if computed in (None, LENGTH):
            engine.start(request, encoder_tokens=(encoder_tokens + request) % (ENCODER + 1))
            computed = 0
        count = min(count, room, engine.shape.max_query_len, LENGTH - computed)
        if count:
            work[request] = count
        room -= count
    return work


warm: set[Any] = set()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(max_examples=8)
@given(works=traffic(), seed=st.integers(0, 9), encoder_tokens=st.integers(0, ENCODER))
def test_every_kind_of_layer_attends_by_its_definition(
    setting, works, seed, encoder_tokens
) -> None:
    """Decodes next to chunks of prompts next to whole prompts, in one compilation."""
    engine = Engine(setting, shape_of(setting), seed)
    if setting not in warm:
        engine.step(fitted(engine, works[0], encoder_tokens))
        warm.add(setting)
    with assert_no_recompilation():
        for wanted in works:
            work = fitted(engine, wanted, encoder_tokens)
            if work:
                engine.step(work)
    jaxkv.check_errors(engine.cache)


# --- other ways to the same output ----------------------------------------------------


LONG, LONG_WINDOW, LONG_CHUNK = 1100, 600, 700


def test_requests_of_many_rounds_attend_by_their_definition() -> None:
    """The loop over pages goes round several times, and stops in the middle of a round."""
    kv: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": SIZE, "dtype": "bf16"}
    layers = {
        "full": jaxkv.FullAttentionSpec(**kv),
        "window": jaxkv.SlidingWindowSpec(sliding_window=LONG_WINDOW, **kv),
        "chunked": jaxkv.ChunkedAttentionSpec(chunk_size=LONG_CHUNK, **kv),
    }
    plan = jaxkv.plan_cache(
        layers,
        2**24,
        max_model_len=LONG,
        limits=jaxkv.Limits(max_in_flight_tokens=600),
        zero_policy="never",
    )
    shape = jaxkv.StepShape.for_plan(plan, max_requests=2, max_tokens=600)
    manager = jaxkv.BlockManager(plan, max_requests=2)
    cache, rng = poisoned(jaxkv.make_cache(plan, max_requests=2)), np.random.default_rng(0)
    stored = {layer: (np.zeros((0, 1, SIZE)), np.zeros((0, 1, SIZE))) for layer in layers}
    manager.start("long")
    manager.start("next to it")
    first = 0
    for count in (511, 2, 512, 1, 70):
        new = {
            layer: [rng.integers(-8, 9, (600, heads, SIZE)) / 4 for heads in (2, 1, 1)]
            for layer in layers
        }
        upload = manager.step(shape, {"next to it": 1, "long": count})
        inputs = jax.tree.map(lambda array: array.astype(np.float32), new)
        cache, outs = step(cache, upload, inputs)
        own = slice(1, 1 + count)
        for layer, (queries, *rows) in new.items():
            pairs = zip(stored[layer], rows, strict=True)
            keys, values = stored[layer] = tuple(np.concatenate((a, b[own])) for a, b in pairs)
            wanted = np.zeros((600, 2, SIZE))
            for i in range(count) if count < 3 else range(0, count, 13):
                seen = visible(layer, first + i, window=LONG_WINDOW, chunk=LONG_CHUNK)
                at = slice(seen.start, seen.stop)
                options = OPTIONS.get(layer, {})
                wanted[1 + i] = attention(queries[1 + i], keys[at], values[at], **options)
            checked = wanted.any(axis=(1, 2))
            assert checked.sum() >= count / 14
            got = np.asarray(outs[layer], np.float64)
            bound = bound_of("float32", first + count)
            np.testing.assert_allclose(
                got[checked], wanted[checked], rtol=0, atol=bound, err_msg=layer
            )
            assert np.isfinite(got).all() and not got[1 + count :].any()
        first += count
    jaxkv.check_errors(cache)


def test_without_keys_nothing_is_written_and_what_is_there_is_attended_to() -> None:
    """Also the encoder's tokens, which no later step of a request brings again."""
    engine = Engine(SETTINGS[4], shape_of(SETTINGS[4]))
    engine.start("a", encoder_tokens=3)
    engine.start("b", encoder_tokens=0)
    work = {"b": 7, "a": 5}
    inputs = {layer: engine._inputs(layer, work, engine._places(work)) for layer in engine.layers}
    upload = engine.manager.step(engine.shape, work)
    before = jax.tree.map(jnp.array, engine.cache)
    cache, wanted = step(engine.cache, upload, inputs)
    before, batch = jax.jit(jaxkv.apply_step)(before, upload)
    queries = {layer: (array, None, None) for layer, (array, *_) in inputs.items()}
    after, outs = jax.jit(attend_layers)(cache, batch, queries)
    assert_same_bytes(after, cache)
    assert_same_bytes(outs, wanted)
    seen = np.asarray(outs["cross"], np.float32)
    assert seen[7:12].any() and not seen[:7].any(), "b has no encoder tokens"


def test_what_a_call_and_a_shape_ask_for_reaches_the_kernel(monkeypatch) -> None:
    """Also a scale of 0, and what changes no output on a CPU."""
    asked: list[tuple[Any, Any]] = []

    def kernel(queries, pages, requests, rule, **options):
        asked.append((requests, rule))
        return jnp.zeros((*queries.shape[:-1], rule.value_width)), None

    monkeypatch.setattr(_kernel, "paged_attention", kernel)
    plan, limits = plan_of(SETTINGS[0]), {"window": WINDOW, "window_latent": WINDOW}
    for sizes in ({"reproducible": True}, {"shared_prefixes": 2}, {"max_query_len": 2}):
        sizes = {"max_requests": REQUESTS, "max_tokens": REQUESTS, "max_query_len": 1} | sizes
        shape = jaxkv.StepShape.for_plan(plan, **sizes)
        step = jax.eval_shape(jaxkv.apply_step, cache_of(SETTINGS[0]), shape.idle())
        for layer, scale, cap in itertools.product(ROWS, (None, 0.0), (None, 1.5)):
            width = ROWS[layer][1]
            queries = jnp.ones((REQUESTS, 10, width))  # so many heads that nobody has traced it
            attend = lambda cache, batch, **of: jaxkv.attend(cache, layer, batch, queries, **of)  # noqa: B023, E731
            jax.eval_shape(functools.partial(attend, scale=scale, soft_cap=cap), *step)
            (requests, rule), one_each = asked.pop(), shape.max_query_len == 1
            assert rule.scale == (width**-0.5 if scale is None else scale)
            assert rule.soft_cap == cap and requests.max_query_len == shape.max_query_len
            assert rule.reproducible == shape.reproducible
            assert rule.causal == (layer != "cross")
            assert rule.sliding_window == limits.get(layer)
            assert rule.chunk_size == (CHUNK if layer == "chunked" else None)
            assert (requests.first_positions is None) == (layer not in (*limits, "chunked"))
            assert (requests.query_start_loc is None) == one_each
            shares = shape.shared_prefixes and layer in ("full", "latent")
            assert (requests.shared_prefixes is None) != bool(shares and one_each), layer


# --- what must not be seen ------------------------------------------------------------


def test_nan_that_one_request_wrote_never_reaches_another() -> None:
    """Neither from the same step nor from blocks that it gave back."""
    setting = SETTINGS[3]
    engine = Engine(setting, shape_of(setting))
    sick_blocks, well_blocks = set(), set()
    for life in range(4):
        sick = ("sick", life)
        engine.sick.add(sick)
        engine.start(sick, encoder_tokens=ENCODER)
        engine.start(("well", life), encoder_tokens=3)
        for _ in range(3):
            engine.step({("well", life): 5, sick: engine.shape.max_query_len})
            well_blocks |= sick_blocks & ids_of(engine, ("well", life))
            sick_blocks |= ids_of(engine, sick)
        engine.manager.finish(sick)
        engine.manager.finish(("well", life))
    assert len(well_blocks) > 5, "blocks of NaN were given to others"
    jaxkv.check_errors(engine.cache)


def ids_of(engine: Engine, request: Any) -> set[int]:
    return {i for ids in engine.manager.block_ids(request) for i in ids} - {0}


def test_a_request_that_lacks_a_block_is_reported_and_reads_no_other() -> None:
    """Its tokens see what it holds; the null block is full of NaN."""
    setting = SETTINGS[1]
    plan, cache = plan_of(setting), poisoned(cache_of(setting))
    ids = [[5 + group] for group in range(len(plan.groups))]
    upload = jaxkv.pack_step(
        shape_of(setting),
        entries=[jaxkv.TableEntry(0, ids)],
        rows=[0],
        num_computed_tokens=[0],
        num_new_tokens=[10],
        encoder_lens=[2],
    )
    engine = Engine(setting, shape_of(setting))
    inputs = {layer: engine._inputs(layer, {}, {}) for layer in engine.layers}
    for layer, arrays in inputs.items():
        inputs[layer] = tuple(None if x is None else np.ones_like(x) for x in arrays)
    cache, outs = step(cache, upload, inputs)
    with pytest.raises(jaxkv.CacheError, match="a request lacks a block"):
        jaxkv.check_errors(cache)
    for layer, array in outs.items():
        got = np.asarray(array, np.float32)
        assert np.isfinite(got).all(), layer
        assert got[0].any(), layer


# --- memory ---------------------------------------------------------------------------


def memory_of_a_step(num_blocks: int, max_model_len: int, max_tokens: int) -> tuple[int, int]:
    """Bytes of temporaries and of the pool, of a step that is compiled and never run."""
    kv: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
    layers = {
        "full": jaxkv.FullAttentionSpec(**kv),
        "window": jaxkv.SlidingWindowSpec(sliding_window=100, **kv),
    }
    plan = jaxkv.plan_cache(
        layers,
        2**40,
        max_model_len=max_model_len,
        num_blocks_override=num_blocks,
        limits=jaxkv.Limits(max_in_flight_tokens=max_tokens),
    )
    shape = jaxkv.StepShape.for_plan(plan, max_requests=4, max_tokens=max_tokens)
    cache = jax.eval_shape(functools.partial(jaxkv.make_cache, plan, max_requests=4))
    x = jax.ShapeDtypeStruct((max_tokens, 4, 64), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def model(cache, upload, x):
        cache, batch = jaxkv.apply_step(cache, upload)
        for layer in layers:
            cache, x = jaxkv.attend(cache, layer, batch, x, x[:, :2], x[:, 2:])
        return cache, x

    compiled = model.lower(cache, shape.idle(), x).compile()
    memory, pool = compiled.memory_analysis(), sum(buffer.size for buffer in cache.buffers)
    assert memory.alias_size_in_bytes >= pool, "the pool is not reused"
    return memory.temp_size_in_bytes, pool


def test_no_temporary_grows_with_the_pool_or_with_the_scores_of_the_longest_request() -> None:
    """Eight times the pool and four times the length take some more int32 tables.

    A matrix of the new tokens' scores alone would have 1 MiB; of all tokens', 4 GiB.
    """
    requests, length = 4, 4096
    temporary, pool = memory_of_a_step(4096, length, requests)
    longer, larger_pool = memory_of_a_step(8 * 4096, 4 * length, requests)
    assert temporary < pool / 8 and larger_pool == 8 * pool
    table = requests * 4 * length // 16 * 4
    assert longer - temporary < 4 * table < 300_000


# --- refusals -------------------------------------------------------------------------

STEP = cases.TOKENS
QUERIES, KEYS, VALUES = (jnp.ones((STEP, heads, n)) for heads, n in ((4, 4), (2, 4), (2, 2)))


@functools.cache
def plain_latent() -> jaxkv.Plan:
    spec = jaxkv.MLASpec(block_size=4, head_size=4)
    return cases.planned({"mla": spec, "shares": jaxkv.SharedKVSpec("mla")})


latents = functools.partial(jaxkv.MLASpec, block_size=4, head_size=16)


@pytest.mark.parametrize(
    ("what", "spec"),
    [
        ("bytes_per_token=7", latents(bytes_per_token=7)),
        ("compress_ratio=2", latents(compress_ratio=2)),
        ("scale_bytes=4", cases.attention(dtype="int8", scale_bytes=4)),
        ("sink_tokens=3", cases.attention(sink_tokens=3)),
        ("dtype='uint8'", latents(dtype="uint8")),
        ("dtype='nvfp4'", cases.attention(dtype="nvfp4", head_size=16)),
    ],
)
def test_rows_that_attend_does_not_understand_are_refused(what: str, spec: LayerSpec) -> None:
    plan = cases.planned({"a": spec})
    cache = jaxkv.make_cache(plan, max_requests=cases.REQUESTS)
    batch = cases.fixed_step(plan).batch(cache, plan)
    with pytest.raises(TypeError, match=f"layer='a' has {what}, which .* write them with"):
        jaxkv.attend(cache, "a", batch, QUERIES)


@pytest.mark.parametrize(
    ("plan", "arguments", "options", "error", "message"),
    [
        (cases.windows, ("full.0", QUERIES[1:]), {}, ValueError,
         r"shape \(8, 4, 4\); layer 'full.0' and this batch want \(9, heads, head_size=4\)"),
        (cases.windows, ("full.0", QUERIES[:, :3]), {}, ValueError, "a multiple of num_kv_heads=2"),
        (cases.windows, ("full.0", QUERIES.astype(int)), {}, TypeError,
         "queries has dtype int32, which attend cannot compute in; cast it to bfloat16"),
        (cases.windows, ("full.0", QUERIES, KEYS), {}, ValueError,
         "values is None; layer 'full.0' stores keys and values"),
        (cases.windows, ("full.0", QUERIES, None, VALUES), {}, ValueError, "values without keys"),
        (cases.windows, ("full.0", QUERIES, KEYS[:, :1], VALUES), {}, ValueError,
         r"keys has shape \(9, 1, 4\); layer 'full.0' wants \(9, 2, 4\)"),
        (cases.windows, ("full.0", QUERIES), {"sinks": jnp.ones(2)}, ValueError,
         r"sinks has shape \(2,\); wants \(4,\), one per head"),
        *((cases.windows, ("full.0", QUERIES), {"soft_cap": cap}, ValueError,
           f"soft_cap={cap} must be positive; None means no cap") for cap in (0.0, -1.0, np.nan)),
        (cases.cross, ("cross.0", QUERIES, KEYS, KEYS), {}, ValueError,
         r"keys has shape \(9, 2, 4\); cross attention wants the encoder's, \[3, encoder"),
        (plain_latent, ("mla", QUERIES, KEYS[:, 0], VALUES), {}, ValueError,
         "layer='mla' stores latent vectors: pass them as keys, and None as"),
        (plain_latent, ("mla", QUERIES, KEYS), {}, ValueError, 
         r"keys has shape \(9, 2, 4\); layer 'mla' wants latent vectors, \(9, 4\)"),
        (plain_latent, ("shares", QUERIES, KEYS[:, 0]), {}, ValueError,
         "layer='shares' shares the cache of 'mla' and writes nothing"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(plan, arguments, options, error, message) -> None:
    cache = cases.empty(cases.Case(plan))
    batch = cases.fixed_step(plan()).batch(cache, plan())
    layer, *arrays = arguments
    with pytest.raises(error, match=message):
        jaxkv.attend(cache, layer, batch, *arrays, **options)


def test_batches_of_another_cache_are_refused() -> None:
    cache = cases.empty(cases.Case(cases.windows))
    batch = cases.fixed_step(cases.windows()).batch(cache, cases.windows())
    with pytest.raises(ValueError, match="batch belongs to another cache"):
        jaxkv.attend(cases.empty(cases.Case(cases.cross)), "own.0", batch, QUERIES)
    tables = jaxkv.make_cache(cases.windows(), max_requests=cases.REQUESTS, tables_only=True)
    batch = cases.fixed_step(cases.windows()).batch(tables, cases.windows())
    with pytest.raises(ValueError, match="the cache has no pool"):
        jaxkv.attend(tables, "full.0", batch, QUERIES)
