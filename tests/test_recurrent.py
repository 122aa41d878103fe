"""Recurrent layers of a cache: what is served in pieces, with drafts, and what is refused."""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import jaxkv
from jaxkv._src.recurrent import _layers
from jaxkv._src.recurrent._heads import (
    Heads,
    by_rank,
    check_convolution,
    check_heads,
    count_channels,
)
from tests.helpers import ON_GPU, needs_devices
from tests.reference_recurrence import RecurrentCase, convolve, normalized
from tests.test_attend import poisoned

HEADS, SIZE, KEY_HEADS, WIDTH, BLOCK = 2, 8, 1, 4, 4
QKV = 2 * KEY_HEADS * SIZE + HEADS * SIZE
TOKENS, REQUESTS, LENGTH = 12, 2, 40
SHAPES = {
    "gated_delta": ((WIDTH - 1, QKV), (HEADS, SIZE, SIZE)),
    "mamba2": ((WIDTH - 1, QKV), (HEADS, SIZE, SIZE)),
    "linear_attention": ((HEADS, SIZE, SIZE),),
    "short_conv": ((WIDTH - 1, QKV),),
}
KINDS = tuple(SHAPES)
OPTIONS: dict[str, dict[str, Any]] = {  # that models seldom give
    "gated_delta": {"scale": 0.5},
    "mamba2": {},
    "linear_attention": {"scale": 0.25},
    "short_conv": {},
}


def plan_of(
    kind: str, mode: Any = "none", drafts: int = 0, shapes: Any = None, replay: int = 0
) -> jaxkv.Plan:
    shapes = shapes or SHAPES[kind]
    spec = jaxkv.StateSpec(
        block_size=BLOCK,
        shapes=shapes,
        dtypes=("f32",) * len(shapes),
        cache_mode=mode,
        speculative_blocks=drafts,
        replay=replay,
    )
    return jaxkv.plan_cache(
        {f"layer.{i}": spec for i in range(2)},
        2**30,
        max_model_len=LENGTH,
        num_blocks_override=60,
        limits=jaxkv.Limits(max_in_flight_tokens=TOKENS),
    )


@functools.cache
def weights() -> np.ndarray:
    return (np.random.default_rng(1).normal(size=(WIDTH, QKV)) / 2).astype(np.float32)


@functools.cache
def bias() -> np.ndarray:
    return np.random.default_rng(2).normal(size=QKV).astype(np.float32)


@functools.cache
def tokens_of(request: str) -> dict[str, np.ndarray]:
    """The inputs of all tokens of a request."""
    rng = np.random.default_rng(ord(request))
    return {
        "inputs": rng.normal(size=(LENGTH, QKV)).astype(np.float32),
        "log_decay": -rng.exponential(size=(LENGTH, HEADS)).astype(np.float32),
        "beta": rng.uniform(size=(LENGTH, HEADS)).astype(np.float32),
    }


def one_pass(
    kind: str,
    given: dict[str, np.ndarray],
    weights: np.ndarray,
    bias: np.ndarray,
    key_heads: int = KEY_HEADS,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the last array of the state after each token, and all outputs."""
    given = {name: array.astype(np.float64) for name, array in given.items()}
    inputs, (length, heads) = given["inputs"], given["beta"].shape
    before = np.zeros((len(weights) - 1, inputs.shape[1]))
    conv = before, weights.astype(np.float64), bias.astype(np.float64)
    if kind == "short_conv":
        return convolve(inputs, *conv, False)
    if kind != "linear_attention":
        _, inputs = convolve(inputs, *conv, True)
    widths = [key_heads * SIZE] * 2
    if kind == "mamba2":
        ends = np.cumsum([heads * SIZE, *widths[:1]])
        values, keys, queries = np.split(inputs, ends, axis=1)
    else:
        queries, keys, values = np.split(inputs, np.cumsum(widths), axis=1)
    queries, keys = (x.reshape(length, key_heads, SIZE) for x in (queries, keys))
    if kind == "gated_delta":
        queries, keys = normalized(queries), normalized(keys)
    queries = queries * OPTIONS[kind].get("scale", 1.0)
    case = RecurrentCase(
        *(np.repeat(x, heads // key_heads, axis=1) for x in (queries, keys)),
        values.reshape(length, heads, SIZE),
        np.exp(given["log_decay"])[..., None],
        np.ones((length, heads)) if kind == "linear_attention" else given["beta"],
        delta=kind == "gated_delta",
    )
    states, outputs = case.run(np.zeros((heads, SIZE, SIZE)), range(length))
    return states, np.stack(outputs)


@functools.cache
def expected(kind: str, request: str) -> tuple[list[np.ndarray], np.ndarray]:
    return one_pass(kind, tokens_of(request), weights(), bias())


def run_layer(kind: str, cache: Any, layer: str, batch: Any, x: Any, **options: Any) -> Any:
    options = {"conv_weights": weights(), "conv_bias": bias()} | OPTIONS[kind] | options
    conv = {name: options.pop(name) for name in ("conv_weights", "conv_bias")}
    key_heads = options.pop("key_heads", KEY_HEADS)
    if kind == "short_conv":
        return jaxkv.short_conv(cache, layer, batch, x["inputs"], **conv, **options)
    if kind == "linear_attention":
        return jaxkv.linear_attention(
            cache, layer, batch, x["inputs"], x["log_decay"], num_key_heads=key_heads, **options
        )
    arguments = cache, layer, batch, x["inputs"], x["log_decay"], x["beta"]
    if kind == "mamba2":
        return jaxkv.mamba2(*arguments, num_groups=key_heads, **conv, **options)
    return jaxkv.gated_delta(*arguments, num_key_heads=key_heads, **conv, **options)


@functools.partial(jax.jit, static_argnames=("kind", "blocks"), donate_argnums=1)
def step(kind, cache, upload, x, blocks=1):
    """The second layer, and the states that it left in the first blocks of each request."""
    cache, batch = jaxkv.apply_step(cache, upload)
    x = {name: array.reshape(*batch.token_shape, -1) for name, array in x.items()}
    if batch.is_rectangular and kind == "gated_delta" and blocks:  # a decay for each key
        x["log_decay"] = jnp.repeat(x["log_decay"][..., None], SIZE, axis=-1)
    cache, out = run_layer(kind, cache, "layer.1", batch, x)
    places = [jnp.full(batch.shape.batch_size, i, jnp.int32) for i in range(blocks)]
    kept = [jaxkv.read_state(cache, "layer.1", batch, at=place)[-1] for place in places]
    return cache, out, kept


def inputs_of(work: dict[str, int], computed: dict[str, int], columns: int | None) -> Any:
    """Returns the step's inputs in a token array, with NaN for padding."""
    names = ("inputs", "log_decay", "beta")
    rows = columns * REQUESTS if columns else TOKENS
    x = {n: np.full((rows, tokens_of("a")[n].shape[1]), np.nan, np.float32) for n in names}
    place = 0
    for i, (request, count) in enumerate(work.items()):
        place = i * columns if columns else place
        for name in names:
            begin = computed[request]
            x[name][place : place + count] = tokens_of(request)[name][begin : begin + count]
        place += count
    return x


def outputs_of(out: Any, work: dict[str, int], columns: int | None) -> dict[str, np.ndarray]:
    out = np.asarray(out)
    if columns:
        return {r: out[i, :n] for i, (r, n) in enumerate(work.items())}
    ends = np.cumsum(list(work.values()))
    return dict(zip(work, np.split(out[: ends[-1]], ends[:-1]), strict=True))


zeros = functools.partial(np.zeros, dtype=np.float32)
BOUND = 5e-3 if ON_GPU else 2e-5  # a GPU's products of float32 are of TF32
close = functools.partial(np.testing.assert_allclose, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("kind", "mode", "columns", "replay"),
    [
        ("gated_delta", "all", None, 0),
        ("mamba2", "align", None, 0),
        ("short_conv", "all", None, 0),
        ("gated_delta", "align", 5, 0),
        ("short_conv", "all", 1, 0),
        ("short_conv", "align", 3, 0),
        ("linear_attention", "none", 3, 0),
        ("gated_delta", "all", None, 2),
        ("gated_delta", "align", 1, 3),
        ("mamba2", "none", None, 5),
        ("gated_delta", "all", 5, 4),
    ],
)
@settings(max_examples=2)
@given(data=st.data())
def test_what_is_served_in_pieces_is_what_one_pass_gives(kind, mode, columns, replay, data) -> None:
    plan = plan_of(kind, mode, replay=replay)
    options = {"tokens_per_request": columns} if columns else {"max_tokens": TOKENS}
    # As many requests as tokens, which need not be one of each.
    requests = TOKENS if kind == "mamba2" else REQUESTS
    shape = jaxkv.StepShape.for_plan(plan, max_requests=requests, **options)
    manager = jaxkv.BlockManager(plan, max_requests=requests)
    cache = poisoned(jaxkv.make_cache(plan, max_requests=requests))
    computed = {"a": 0, "b": 0}
    for request in computed:
        manager.start(request)
    blocks = -(-(columns or TOKENS) // BLOCK) + 1 if mode == "all" else 1
    blocks = 0 if replay else blocks  # `read_state` reads no pages with rings
    most = min(columns, 3) if columns else TOKENS // 2
    shape = dataclasses.replace(shape, max_query_len=most)  # of columns there may be more
    for turn in range(max(3, 2 * BLOCK // most + 2)):
        counts = {r: min(data.draw(st.integers(0, most)), LENGTH - computed[r]) for r in computed}
        counts["a"] = max(counts["a"], int(turn > 2))  # so that it begins another block
        work = {request: count for request, count in counts.items() if count}
        if not work:
            continue
        x = inputs_of(work, computed, columns)
        cache, out, kept = step(kind, cache, manager.step(shape, work), x, blocks)
        for i, (request, found) in enumerate(outputs_of(out, work, columns).items()):
            states, outputs = expected(kind, request)
            begin, end = computed[request], computed[request] + work[request]
            close(found.reshape(end - begin, -1), outputs[begin:end].reshape(end - begin, -1))
            ends = [end]
            if mode == "all":  # the ends of the blocks that the step's tokens touch
                ends = [*range((begin // BLOCK + 1) * BLOCK, end, BLOCK), end]
            for block, position in enumerate(ends[:blocks] if begin else ()):
                close(kept[block][i], states[position - 1])  # zeros of a fresh one
            computed[request] = end
        assert np.isfinite(out).all()
    jaxkv.check_errors(cache)


def test_states_of_rings_are_not_read_or_written_by_themselves() -> None:
    plan = plan_of("gated_delta", replay=3)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS)

    def call(cache, upload, is_read):
        cache, batch = jaxkv.apply_step(cache, upload)
        arrays = [jnp.zeros((REQUESTS, *shape)) for shape in SHAPES["gated_delta"]]
        if is_read:
            return jaxkv.read_state(cache, "layer.0", batch)
        return jaxkv.write_state(cache, "layer.0", batch, arrays)

    for is_read in (True, False):
        with pytest.raises(ValueError, match="has replay=3: its pages hold"):
            jax.eval_shape(functools.partial(call, is_read=is_read), cache, shape.idle())


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_states_that_move_are_refused(kind, mode) -> None:
    """The blocks of drafts are not where the next step looks, if a step begins another block."""
    plan = plan_of(kind, mode, 2)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS)
    run = functools.partial(outputs_of_layer, kind=kind, x=inputs_of({}, {}, None))
    with pytest.raises(ValueError, match=f"cache_mode='{mode}' and speculative_blocks=2, whose"):
        jax.eval_shape(run, cache, shape.idle())

    def reads(cache, upload):
        return jaxkv.read_state(cache, "layer.0", jaxkv.apply_step(cache, upload)[1])

    with pytest.raises(ValueError, match=f"cache_mode='{mode}' and speculative_blocks=2: pass at="):
        jax.eval_shape(reads, cache, shape.idle())


def test_a_state_of_drafts_is_written_token_by_token() -> None:
    def writes(cache, upload):
        cache, batch = jaxkv.apply_step(cache, upload)
        return jaxkv.write_state(cache, "layer.0", batch, [jnp.zeros((REQUESTS, WIDTH - 1, QKV))])

    plan = plan_of("short_conv", "none", 1)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    with pytest.raises(ValueError, match="speculative_blocks=1, and a step may verify drafts"):
        jax.eval_shape(writes, cache, shape.idle())
    jax.eval_shape(writes, cache, dataclasses.replace(shape, max_query_len=1).idle())


@pytest.mark.parametrize(
    ("kind", "drafts", "columns"),
    [("gated_delta", 2, None), ("short_conv", 1, 4), ("linear_attention", 3, None)],
)
@settings(max_examples=8)
@given(data=st.data())
def test_rewound_requests_go_on_after_what_they_have_or_are_refused(
    kind, drafts, columns, data
) -> None:
    """Whatever a step has computed, drafts or a part of a prompt: nobody tells the layers."""
    shapes = ((WIDTH - 1 + drafts, QKV),) if kind == "short_conv" else None  # rows for drafts
    plan = plan_of(kind, "none", drafts, shapes)
    form = {"tokens_per_request": columns} if columns else {"max_tokens": TOKENS}
    sizes = {"max_requests": REQUESTS, "forks": REQUESTS} | form
    several = jaxkv.StepShape.for_plan(plan, **sizes)
    one = jaxkv.StepShape.for_plan(plan, **sizes | (form if columns else {"max_tokens": REQUESTS}))
    one = dataclasses.replace(one, max_query_len=1)
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    cache = poisoned(jaxkv.make_cache(plan, max_requests=REQUESTS))
    computed, wrong = {"a": 0, "b": 0}, {"a": LENGTH, "b": LENGTH}  # from where drafts are wrong
    for request in computed:
        manager.start(request)
    for _ in range(10):
        most = data.draw(st.sampled_from([1, 1 + drafts, columns or TOKENS // REQUESTS]))
        counts = {r: min(data.draw(st.integers(0, most)), LENGTH - n) for r, n in computed.items()}
        if not (work := {request: count for request, count in counts.items() if count}):
            continue
        x, place = inputs_of(work, computed, columns), 0
        for i, (request, count) in enumerate(work.items()):
            place = i * columns if columns else place
            wrong[request] = computed[request] + data.draw(st.integers(1, count))
            x["inputs"][place + wrong[request] - computed[request] : place + count] = 7.0
            place += count
        upload = manager.step(one if most == 1 and not columns else several, work)
        if most == 1 and not columns:
            x = {name: array[:REQUESTS] for name, array in x.items()}
        cache, out, _ = step(kind, cache, upload, x)
        for request, found in outputs_of(out, work, columns).items():
            right = slice(computed[request], wrong[request])
            found = found[: wrong[request] - computed[request]]
            close(found, expected(kind, request)[1][right].reshape(found.shape))
            computed[request] += work[request]
        for request in work:
            keep, before = wrong[request], computed[request] - work[request]
            if keep == computed[request]:
                keep = data.draw(st.sampled_from([keep, max(keep - 1, 0), before]))
            try:
                manager.rewind({request: keep})
            except ValueError as error:
                assert "no longer holds" in str(error) and keep < computed[request]
                assert work[request] > 1 + drafts or keep == before
                manager.finish(request)
                manager.start(request)
                keep = 0
            computed[request] = keep
    jaxkv.check_errors(cache)


def test_each_rank_runs_its_own_heads_inside_of_shard_map() -> None:
    plan, ranks = plan_of("linear_attention"), min(2, len(jax.devices()))
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("heads",))
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, mesh=mesh, axis="heads")
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    manager.start("a")
    parts = {name: array[None] for name, array in inputs_of({"a": 6}, {"a": 0}, None).items()}
    x = jax.tree.map(lambda array: np.concatenate([array * (1 + r) for r in range(ranks)]), parts)

    def body(cache, upload, x):
        cache, batch = jaxkv.apply_step(cache, upload)
        mine = {name: array[0] for name, array in x.items()}
        cache, out = run_layer("linear_attention", cache, "layer.0", batch, mine)
        return cache, out[None]

    specs, split = cache.partition_specs(), PartitionSpec("heads")
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, PartitionSpec(), split), out_specs=(specs, split),
        check_vma=False,
    )  # fmt: skip
    _, out = jax.jit(run)(cache, manager.step(shape, {"a": 6}), x)
    out = np.asarray(out)
    close(out[0, :6], expected("linear_attention", "a")[1][:6])
    assert ranks == 1 or np.abs(out[1, :6] - out[0, :6]).max() > 0.1


@needs_devices(2)
@pytest.mark.parametrize(
    ("kind", "key_heads"),
    [("gated_delta", 2), ("mamba2", 1), ("linear_attention", 1), ("short_conv", 2)],
)
def test_outside_of_shard_map_arrays_have_the_heads_of_all_ranks(kind: str, key_heads: int) -> None:
    """Each rank computes its own; fewer key heads are shared."""
    mesh, heads = Mesh(np.array(jax.devices()[:2]), ("heads",)), 2 * HEADS
    rng, columns = np.random.default_rng(0), 2 * key_heads * SIZE + heads * SIZE
    given = {
        "inputs": rng.normal(size=(TOKENS, columns)),
        "log_decay": -rng.exponential(size=(TOKENS, heads)),
        "beta": rng.uniform(size=(TOKENS, heads)),
    }
    given = {name: array.astype(np.float32) for name, array in given.items()}
    taps = rng.normal(size=(WIDTH + 1, columns)).astype(np.float32) / 2
    if kind == "linear_attention":  # the same for all tokens
        given["log_decay"][:] = given["log_decay"][0]
    plan = plan_of(kind)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    manager = jaxkv.BlockManager(plan, max_requests=REQUESTS)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS, mesh=mesh, axis="heads")
    tokens = {"a": [*range(7), 3], "b": [*range(7, 11), *range(3)]}  # of the two steps
    outputs: dict[str, list[np.ndarray]] = {request: [] for request in tokens}
    for request in tokens:
        manager.start(request)

    @jax.jit
    def run(cache, upload, x):
        cache, batch = jaxkv.apply_step(cache, upload)
        options = {"key_heads": key_heads, "conv_weights": taps[1:], "conv_bias": taps[0]}
        if kind == "linear_attention":
            x = x | {"log_decay": x["log_decay"][0]}
        return run_layer(kind, cache, "layer.0", batch, x, **options)

    for work in ({"a": 7, "b": 4}, {"b": 3, "a": 1}):
        cache, out = run(cache, manager.step(shape, work), given)
        for request, found in outputs_of(out, work, None).items():
            outputs[request] += [*found]
    for request, rows in tokens.items():
        own = {name: array[rows] for name, array in given.items()}
        close(outputs[request], one_pass(kind, own, taps[1:], taps[0], key_heads)[1])


def refuses(check: Any, *args: Any) -> bool:
    try:
        check(*args)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_the_count_channels_its_heads_of_every_part(ranks: int) -> None:
    parts = Heads(1, 3), Heads(2, 1), Heads(4, 2), Heads(8, 1)
    columns = np.arange(2 * count_channels(parts)).reshape(2, -1)
    wanted: list[int] = []
    for rank in range(ranks):
        begin = 0
        for count, size in parts:
            first = rank * count // ranks  # of fewer heads than ranks, each serves several
            end = first + max(1, count // ranks)
            wanted += range(begin + first * size, begin + end * size)
            begin += count * size
    found = jax.jit(by_rank, static_argnums=(1, 2))(columns, parts, ranks)
    np.testing.assert_array_equal(found, columns[:, wanted])


def test_heads_of_keys_divide_those_of_values_and_ranks_or_are_refused() -> None:
    for ranks, count, values in itertools.product((1, 2, 3, 4, 6), range(-1, 9), range(1, 13)):
        fits = count > 0 and values % count == 0 and (count % ranks == 0 or ranks % count == 0)
        bound = types.SimpleNamespace(ranks_of_heads=ranks)
        assert refuses(check_heads, bound, "heads", count, values) != fits, (ranks, count, values)


def outputs_of_layer(
    cache: Any, upload: Any, x: Any, kind: str = "gated_delta", **options: Any
) -> Any:
    cache, batch = jaxkv.apply_step(cache, upload)
    return run_layer(kind, cache, "layer.0", batch, x, **options)[1]


class Asked(Exception):
    """The arguments of a kernel, raised instead of its outputs."""


@pytest.mark.parametrize(
    ("kind", "option", "values"),
    [
        ("gated_delta", "scale", (None, 0.0, 2.0)),
        ("linear_attention", "scale", (0.0, 2.0)),
        ("short_conv", "silu", (False, True)),
    ],
)
def test_what_a_call_asks_for_reaches_the_kernel(kind, option, values, monkeypatch) -> None:
    def kernel(*arguments, **options):
        conv = options.get("convolution", arguments[1])
        raise Asked({"scale": options.get("scale"), "silu": getattr(conv, "silu", None)})

    for name in ("gated_delta_rule", "selective_scan", "causal_conv1d"):
        monkeypatch.setattr(_layers, name, kernel)
    plan = plan_of(kind)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(plan, max_requests=REQUESTS)
    step = jax.eval_shape(jaxkv.apply_step, cache, shape.idle())
    x = inputs_of({}, {}, None)
    for value in values:
        run = lambda *step, **given: run_layer(kind, step[0], "layer.0", step[1], x, **given)  # noqa: E731
        with pytest.raises(Asked) as asked:
            jax.eval_shape(functools.partial(run, **{option: value}), *step)
        (found,) = asked.value.args
        assert found[option] == value
        assert option == "silu" or found["silu"] in (True, None)


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_a_convolution_is_over_the_inputs_that_are_kept_with_or_without_drafts(drafts: int) -> None:
    kept, columns = 4, 3
    state = jaxkv.StateSpec(
        block_size=4, shapes=((kept, columns),), dtypes=("f32",), speculative_blocks=drafts
    )
    shapes = [(rows, n) for rows in range(1, 7) for n in range(1, 5)] + [(5,), (5, 3, 1)]
    for shape in shapes:
        fits = shape in [(kept + 1, columns), (kept + 1 - drafts, columns)]
        weights, bias = np.zeros(shape), np.zeros(columns)
        assert refuses(check_convolution, "a", state, columns, weights, bias) != fits, shape
    for size in range(1, 5):
        weights, bias = np.zeros((kept + 1, columns)), np.zeros(size)
        assert refuses(check_convolution, "a", state, columns, weights, bias) == (size != columns)


FULL = jaxkv.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
BAD = [
    ({"inputs": zeros((TOKENS, QKV + 1))}, ValueError, r"qkv has shape .* wants \(12, 32\)"),
    ({"conv_weights": zeros((3, QKV))}, ValueError, r"conv_weights has shape \(3, 32\)"),
    ({"conv_weights": [[0.0]]}, TypeError, "conv_weights must be an array, got list"),
    ({"conv_bias": zeros(3)}, ValueError, r"conv_bias has shape \(3,\); wants \(32,\)"),
    ({"num_key_heads": 3}, ValueError, f"num_key_heads=3 .* divides the {HEADS} heads of states$"),
    ({"layer": "full"}, TypeError, "stores tokens, not states; use attend"),
    ({"layer": "other"}, ValueError, r"wants those of \(width - 1, channels\), \(heads, V, K\)"),
    ({"layer": "ring", "log_decay": zeros((TOKENS, HEADS, SIZE))}, ValueError,
     "with replay, each head has one decay"),
    ({"implementation": "mosaic_gpu"}, NotImplementedError, "keys are 8 wide"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "text"), BAD, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_is_refused_by_name(wrong, error, text) -> None:
    state = jaxkv.StateSpec(block_size=4, shapes=SHAPES["gated_delta"], dtypes=("f32", "f32"))
    other = jaxkv.StateSpec(block_size=4, shapes=((3, 4),), dtypes=("f32",))
    ring = dataclasses.replace(state, replay=4)
    layers = {"layer.0": state, "full": FULL, "other": other, "ring": ring}
    plan = jaxkv.plan_cache(layers, 2**30, max_model_len=LENGTH, num_blocks_override=40)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=REQUESTS, max_tokens=TOKENS)
    cache = jaxkv.make_cache(plan, max_requests=2)
    cache, batch = jax.jit(jaxkv.apply_step)(cache, shape.idle())
    given = {
        "inputs": zeros((TOKENS, QKV)),
        "log_decay": zeros((TOKENS, HEADS)),
        "beta": zeros((TOKENS, HEADS)),
        "layer": "layer.0",
        "conv_weights": weights(),
        "num_key_heads": KEY_HEADS,
    } | wrong
    arrays = [given.pop(name) for name in ("layer", "inputs", "log_decay", "beta")]
    with pytest.raises(error, match=text):
        jaxkv.gated_delta(cache, arrays[0], batch, *arrays[1:], **given)
