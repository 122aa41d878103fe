"""Recurrent layers over pages against NumPy: steps, drafts, prompts, and states in place."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.testing import assert_same_bytes
from pallas_kernels import (
    Convolution,
    StatePages,
    _mosaic,
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)
from pallas_kernels._recurrence import prompt, step_convolution, xla
from tests.helpers import HAS_MOSAIC, IMPLEMENTATIONS, ON_GPU, as_ids, kernels_run, needs_mosaic
from tests.reference_recurrence import (
    RecurrentCase,
    convolve,
    normalized,
    state_of,
    write_states,
)

PAGES, STEP, FIRST = 12, 2, 1  # a page is every second extent, from the second one on
EXTREMES = [-1, PAGES, -(2**31), 2**31 - 1]


@pytest.fixture(autouse=True)
def small_and_interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "TOGETHER", 2)  # so that several turns are needed
    if HAS_MOSAIC and not ON_GPU:
        monkeypatch.setattr(step_convolution, "RESHAPES_REFERENCES", False)
        monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)


class Layer(NamedTuple):
    """The shape of a layer.

    width: of its convolution; 0: none.
    rule: "delta", "delta per key", or "scan".
    state, conv, inputs: dtypes.
    """

    key_heads: int = 1
    value_heads: int = 2
    key: int = 32
    value: int = 32
    width: int = 0
    rule: str = "delta"
    state: str = "float32"
    conv: str = "float32"
    inputs: str = "float32"
    bias: bool = False
    silu: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def conv_bytes(self) -> int:
        return max(0, self.width - 1) * self.channels * np.dtype(dtype(self.conv)).itemsize

    @property
    def start(self) -> int:
        """Bytes of an extent before the state: some, and the inputs of the convolution."""
        row = self.key * np.dtype(dtype(self.state)).itemsize
        return -(-(512 + self.conv_bytes) // row) * row

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.value, self.key

    @property
    def tolerance(self) -> float:
        narrow = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
        return max(narrow[name] for name in (self.state, self.conv, self.inputs))


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


class Arrays(NamedTuple):
    """Arguments of a call in NumPy; ``data`` is uint8[extents, bytes]."""

    data: np.ndarray
    inputs: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    weights: np.ndarray
    bias: np.ndarray
    read_ids: np.ndarray
    write_ids: np.ndarray
    write_after: np.ndarray
    starts: np.ndarray


def states_in(layer: Layer, data: Any) -> np.ndarray:
    """The states of all pages, in float64."""
    size = np.prod(layer.state_shape) * dtype(layer.state).itemsize
    part = np.asarray(data)[FIRST::STEP][:PAGES, layer.start : layer.start + size]
    part = np.ascontiguousarray(part).view(dtype(layer.state))
    return part.reshape(PAGES, *layer.state_shape).astype(np.float64)


def windows_in(layer: Layer, data: Any) -> np.ndarray:
    """The inputs that the convolution keeps in all pages, in float64."""
    part = np.asarray(data)[FIRST::STEP][:PAGES, 512 : 512 + layer.conv_bytes]
    part = np.ascontiguousarray(part).view(dtype(layer.conv))
    return part.reshape(PAGES, layer.width - 1, layer.channels).astype(np.float64)


def make(layer: Layer, counts: list[int], num_tokens: int, seed: int, **given: Any) -> Arrays:
    """Makes arguments; what is no state of a listed page is NaN in every dtype."""
    rng = np.random.default_rng(seed)
    heads, value, key = layer.state_shape
    size = layer.start + heads * value * key * dtype(layer.state).itemsize + 512
    data = np.full((FIRST + STEP * PAGES, size), 0xFF, np.uint8)

    def put(page: int, start: int, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data[FIRST + STEP * page, start : start + raw.size] = raw

    for page in given["read_ids"]:
        if 0 <= page < PAGES:
            put(page, layer.start, rng.normal(size=layer.state_shape).astype(dtype(layer.state)))
            if layer.width:
                shape = (layer.width - 1, layer.channels)
                put(page, 512, rng.normal(size=shape).astype(dtype(layer.conv)))
    inputs = rng.normal(size=(num_tokens, layer.channels))
    inputs[sum(counts) :] = np.nan
    per_key = (key,) if layer.rule == "delta per key" else ()
    strength = rng.choice([0.0, 1e-3, 0.3, 8.0, np.inf], size=(num_tokens, 1, *[1] * len(per_key)))
    log_decay = -rng.exponential(size=(num_tokens, heads, *per_key)) * strength
    if num_tokens > 8:  # alike keys, no decay, and all taken away: hard for the chunked form
        inputs[2:7], log_decay[2:7] = inputs[1], 0
    return Arrays(
        data,
        inputs.astype(dtype(layer.inputs)),
        log_decay.astype(np.float32),
        rng.choice([0.0, 0.5, 1.0], size=(num_tokens, heads)).astype(np.float32),
        (rng.normal(size=(max(1, layer.width), layer.channels)) / 2).astype(dtype(layer.inputs)),
        rng.normal(size=layer.channels).astype(dtype(layer.inputs)),
        starts=as_ids([0, *np.cumsum(counts)]),
        **given,
    )


def pages_of(layer: Layer, data: Any) -> tuple[StatePages, StatePages]:
    common = {"num_pages": PAGES, "first": FIRST, "page_step": STEP}
    states = StatePages(data, dtype(layer.state), layer.state_shape, start=layer.start, **common)
    shape = (max(1, layer.width - 1), layer.channels)
    return states, StatePages(data, dtype(layer.conv), shape, start=512, **common)


def call(
    layer: Layer, given: Arrays, *, ragged: bool, most: int | None, implementation: Any
) -> Any:
    """Calls the kernel of a layer."""
    states, windows = pages_of(layer, given.data)
    conv = None
    if layer.width:
        bias = given.bias if layer.bias else None
        conv = Convolution(windows, given.weights, bias, layer.silu)
    options: dict[str, Any] = {"convolution": conv, "implementation": implementation}
    ids = given.read_ids, given.write_ids[:, 0]
    if ragged:
        ids = (given.read_ids, given.write_ids, given.starts)
        options |= {"write_after": given.write_after, "max_query_len": most}
    arguments = given.inputs, given.log_decay, given.beta, states, *ids
    if layer.rule == "scan":
        return selective_scan(*arguments, num_groups=layer.key_heads, scale=0.5, **options)
    return gated_delta_rule(*arguments, num_key_heads=layer.key_heads, **options)


run = jax.jit(call, static_argnames=("layer", "ragged", "most", "implementation"))


def expect(layer: Layer, given: Arrays) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Returns the states and windows of all pages, and the outputs."""
    states = states_in(layer, given.data)
    windows = windows_in(layer, given.data) if layer.width else None
    new_states = states.copy()
    new_windows = None if windows is None else windows.copy()
    inputs = given.inputs.astype(np.float64)
    outputs = np.zeros((len(inputs), layer.value_heads, layer.value))
    for i, page in enumerate(given.read_ids):
        tokens = range(given.starts[i], given.starts[i + 1])
        after = given.write_after[i]
        if windows is not None:
            bias = given.bias.astype(np.float64) if layer.bias else None
            weights = given.weights.astype(np.float64)
            before = state_of(windows, page)
            kept, inputs[tokens] = convolve(inputs[tokens], before, weights, bias, layer.silu)
            write_states(new_windows, kept, given.write_ids[i], after)
        case = as_case(layer, given, inputs)
        reached, found = case.run(state_of(states, page), tokens)
        if found:
            outputs[tokens] = found
        write_states(new_states, reached, given.write_ids[i], after)
    return new_states, new_windows, outputs


def as_case(layer: Layer, given: Arrays, inputs: np.ndarray) -> RecurrentCase:
    widths = [layer.key_heads * layer.key] * 2 + [layer.value_heads * layer.value]
    names = ["queries", "keys", "values"]
    if layer.rule == "scan":
        widths, names = widths[::-1], names[::-1]
    parts = dict(zip(names, np.split(inputs, np.cumsum(widths)[:-1], axis=1), strict=True))
    count, group = len(inputs), layer.value_heads // layer.key_heads
    queries, keys = (
        parts[name].reshape(count, layer.key_heads, layer.key) for name in ("queries", "keys")
    )
    if layer.rule == "scan":
        queries = queries * 0.5
    else:
        queries, keys = normalized(queries) * layer.key**-0.5, normalized(keys)
    decay = np.exp(given.log_decay.astype(np.float64))
    return RecurrentCase(
        np.repeat(queries, group, axis=1),
        np.repeat(keys, group, axis=1),
        parts["values"].reshape(count, layer.value_heads, layer.value),
        decay if decay.ndim == 3 else decay[..., None],
        given.beta.astype(np.float64),
        delta=layer.rule != "scan",
    )


def check(
    layer: Layer, given: Arrays, implementation: str, in_chunks: bool = False, **how: Any
) -> None:
    with kernels_run():
        data, outputs = run(
            layer, jax.tree.map(jnp.array, given), implementation=implementation, **how
        )
    states, windows, expected = expect(layer, given)
    # The products of chunks are of the precision that jax chooses: TF32 on a GPU.
    bound = max(layer.tolerance, 5e-3) if in_chunks and ON_GPU else layer.tolerance
    close = functools.partial(np.testing.assert_allclose, rtol=bound, atol=5 * bound)
    close(np.asarray(outputs, np.float64), expected)
    close(states_in(layer, data), states)
    if in_chunks and layer.inputs == "bfloat16":  # the bound above is wide, because of 1 + 1 / 256
        assert relative_error(outputs, expected) < 1e-2
        assert relative_error(states_in(layer, data), states) < 1e-2
    if windows is not None:
        close(windows_in(layer, data), windows, rtol=0, atol=0)
    untouched = np.array(data)
    size = np.prod(layer.state_shape) * dtype(layer.state).itemsize
    for page in given.write_ids.reshape(-1):
        if 0 <= page < PAGES:  # all other bytes are those that were there
            for start, length in ((layer.start, size), (512, layer.conv_bytes)):
                place = FIRST + STEP * page, slice(start, start + length)
                untouched[place] = given.data[place]
    assert_same_bytes(untouched, given.data)


def relative_error(found: Any, expected: np.ndarray) -> float:
    """Returns the error in proportion, of numbers that are not NaN."""
    found, known = np.asarray(found, np.float64), ~np.isnan(expected)
    return float(np.linalg.norm((found - expected)[known]) / np.linalg.norm(expected[known]))


def draw_ids(data: st.DataObject, batch: int, writes: int) -> dict[str, np.ndarray]:
    """Draws pages to read and, apart from each other, to write: the same, others, or none."""
    pages = data.draw(st.permutations(range(PAGES)))
    read = [
        page if data.draw(st.booleans()) else data.draw(st.sampled_from(EXTREMES))
        for page in pages[:batch]
    ]
    write = np.array(pages[batch : batch + batch * writes]).reshape(batch, writes)
    for i in range(batch):
        choice = data.draw(st.sampled_from(["in place", "elsewhere", "nowhere"]))
        if choice == "in place":
            write[i, 0] = pages[i]
        elif choice == "nowhere":
            write[i, 0] = data.draw(st.sampled_from(EXTREMES))
    return {"read_ids": as_ids(read), "write_ids": as_ids(write)}


STEPS = (
    Layer(rule="delta per key", key_heads=2, state="bfloat16", key=64, value=64),
    Layer(rule="scan", key=64, width=3, bias=True, state="float16", value_heads=2, value=64),
    Layer(key=128, value=128, width=4, conv="bfloat16", inputs="bfloat16"),
    Layer(key=128, value=128, value_heads=1, width=2, silu=False, bias=True),
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", STEPS, ids=str)
@settings(max_examples=1)
@given(data=st.data())
def test_a_step_moves_each_state_by_one_token(implementation, layer, data) -> None:
    ids = draw_ids(data, 3, 1)
    given = make(
        layer, [1] * 3, 3, data.draw(st.integers(0, 99)), write_after=as_ids([[1]] * 3), **ids
    )
    idle = [
        i
        for i in range(3)
        if not {0 <= given.read_ids[i] < PAGES, 0 <= given.write_ids[i, 0] < PAGES} & {True}
    ]
    check_step = given if not idle else without(given, idle)
    check(layer, check_step, implementation, ragged=False, most=None)


def without(given: Arrays, idle: list[int]) -> Arrays:
    """Gives requests that neither read nor write a page to write: theirs are padding."""
    write_ids = given.write_ids.copy()
    spare = [p for p in range(PAGES) if p not in {*given.read_ids, *write_ids.reshape(-1)}]
    write_ids[idle, 0] = spare[: len(idle)]
    return given._replace(write_ids=write_ids)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", STEPS[1:2], ids=str)
@settings(max_examples=1)
@given(data=st.data())
def test_the_state_after_each_draft_is_kept(implementation, layer, data) -> None:
    counts = data.draw(st.sampled_from([[1, 3, 0], [2, 0, 3], [3, 3, 3], [0, 1, 1]]))
    given = make(
        layer,
        counts,
        10,
        data.draw(st.integers(0, 99)),
        write_after=as_ids([[1, 2, 3]] * 3),
        **draw_ids(data, 3, 3),
    )
    in_chunks = implementation == "xla"
    check(layer, given, implementation, in_chunks=in_chunks, ragged=True, most=3)


PROMPTS = (Layer(width=4, bias=True), Layer(rule="delta per key", key_heads=2, state="bfloat16"))


@pytest.mark.parametrize("layer", PROMPTS, ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_chunks_are_equal_to_tokens_one_by_one(layer, data) -> None:
    mixtures = [[1, 150, 1], [0, 64, 65], [200, 0, 0], [63, 1, 64], [70, 60, 70]]
    counts = data.draw(st.sampled_from(mixtures))
    after = [
        sorted(data.draw(st.sets(st.integers(1, n + 3), min_size=2, max_size=2))) for n in counts
    ]
    given = make(
        layer,
        counts,
        200,
        data.draw(st.integers(0, 99)),
        write_after=as_ids(after),
        **draw_ids(data, 3, 2),
    )
    check(layer, given, "xla", in_chunks=True, ragged=True, most=None)


@needs_mosaic
def test_decodes_and_prompts_go_together_through_the_kernels() -> None:
    layer = Layer(width=4)
    given = make(
        layer,
        [1, 70, 1],
        80,
        0,
        read_ids=as_ids([1, 2, -1]),
        write_ids=as_ids([[1], [5], [3]]),
        write_after=as_ids([[1], [70], [1]]),
    )
    check(layer, given, "mosaic_gpu", in_chunks=True, ragged=True, most=None)


PROMPTS_IN_KERNELS = (
    Layer(key=64, value=64, value_heads=1, inputs="bfloat16", state="bfloat16"),
    Layer(rule="scan", key=64, value=128, value_heads=1, inputs="bfloat16"),
    Layer(key=128, value=128, inputs="bfloat16", conv="bfloat16", width=4),
    Layer(rule="delta per key", key=64, value=64, value_heads=1, inputs="bfloat16"),
    Layer(rule="delta per key", key=128, value=128, inputs="bfloat16", conv="bfloat16", width=4),
)


@needs_mosaic
@pytest.mark.parametrize(
    "layer", PROMPTS_IN_KERNELS if ON_GPU else PROMPTS_IN_KERNELS[1::2], ids=str
)
@settings(max_examples=8 if ON_GPU else 1)
@given(data=st.data())
def test_prompts_go_through_kernels(layer: Layer, data: st.DataObject) -> None:
    counts = data.draw(st.sampled_from([[70, 1, 50], [0, 64, 30], [3, 61, 64], [2, 100, 0]]))
    after = [[data.draw(st.integers(0, n)), n] for n in counts]
    seed, ids = data.draw(st.integers(0, 99)), draw_ids(data, 3, 2)
    given = make(layer, counts, 130, seed, write_after=as_ids(after), **ids)
    check(layer, given, "mosaic_gpu", in_chunks=True, ragged=True, most=None)


@needs_mosaic
def test_prompts_go_on_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of few chunks are in memory at once, and a state goes on between them."""
    layer = PROMPTS_IN_KERNELS[0]
    monkeypatch.setattr(prompt, "TURN_BYTES", 3 * 64 * 192 * 2)
    given = make(
        layer,
        [30, 1, 150],
        190,
        0,
        read_ids=as_ids([-1, 2, 1]),
        write_ids=as_ids([[3, -1], [2, 5], [4, 6]]),
        write_after=as_ids([[30, 9], [1, 9], [150, 150]]),  # two pages take one state
    )
    for implementation in ("mosaic_gpu", "xla"):
        check(layer, given, implementation, in_chunks=True, ragged=True, most=150)


def test_padding_gives_zeros() -> None:
    layer = STEPS[0]
    for implementation in ["xla"] + ["mosaic_gpu"] * HAS_MOSAIC:
        given = make(
            layer,
            [1, 1],
            2,
            0,
            read_ids=as_ids([1, -1]),
            write_ids=as_ids([[1], [-1]]),
            write_after=as_ids([[1], [1]]),
        )
        given.inputs[1] = np.nan
        with kernels_run():
            _, outputs = run(layer, given, ragged=False, most=None, implementation=implementation)
        assert np.isfinite(outputs[0]).all() and not np.asarray(outputs[1]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_convolution_of_padding_gives_zeros(implementation: str) -> None:
    """One request only writes, one only reads, and one is padding."""
    layer = Layer(key_heads=1, value_heads=2, width=4, bias=True)
    read_ids, write_ids = as_ids([-1, 1, -1]), as_ids([2, PAGES, PAGES])
    ids = {"read_ids": read_ids, "write_ids": write_ids[:, None]}
    given = make(layer, [1, 1], 3, 0, write_after=as_ids([[1]] * 3), **ids)

    @jax.jit
    def convolved(given: Arrays) -> Any:
        conv = Convolution(pages_of(layer, given.data)[1], given.weights, given.bias)
        how = {"implementation": implementation}
        return causal_conv1d(given.inputs, conv, read_ids, write_ids, **how)[1]

    with kernels_run():
        outputs = np.asarray(convolved(jax.tree.map(jnp.array, given)))
    assert np.isfinite(outputs).all() and outputs[:2].any(axis=1).all() and not outputs[2].any()


@pytest.mark.parametrize(("layer", "ragged"), [(STEPS[0], False), (STEPS[1], True)], ids=str)
def test_donated_states_stay_where_they_are(layer: Layer, ragged: bool) -> None:
    """The pool is aliased, and the kernel makes nothing as large as the states beside them."""
    heads = 64
    layer = layer._replace(value_heads=heads)
    given = make(
        layer,
        [1] * 4,
        4,
        0,
        read_ids=as_ids(range(4)),
        write_ids=as_ids(range(4))[:, None],
        write_after=as_ids([[1]] * 4),
    )
    how = "mosaic_gpu" if ON_GPU else "xla"
    step_of = functools.partial(call, layer, ragged=ragged, most=1, implementation=how)

    def on_data(data: Any, rest: Arrays) -> Any:
        return step_of(rest._replace(data=data))

    compiled = jax.jit(on_data, donate_argnums=0).lower(given.data, given).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= given.data.nbytes
    if ON_GPU:
        states = len(given.read_ids) * np.prod(layer.state_shape) * dtype(layer.state).itemsize
        assert memory.temp_size_in_bytes < states


@needs_mosaic
@pytest.mark.parametrize(
    ("layer", "most", "kernels", "aliases"),
    [
        (STEPS[0], 2, 2, 2),  # zeros for the tokens of no request come last
        (STEPS[1], 1, 2, 2),  # the convolution is a kernel of its own
        (STEPS[2], 1, 1, 1),
        (PROMPTS_IN_KERNELS[2], 64, 5, 4),  # convolution, single tokens, parts, states, zeros
        (PROMPTS_IN_KERNELS[3], 64, 4, 4),
    ],
    ids=str,
)
def test_the_cuda_lowering_is_aliased(
    layer: Layer, most: int, kernels: int, aliases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_convolution, "RESHAPES_REFERENCES", True)
    monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", True)
    ids = {"read_ids": as_ids([0, 1]), "write_ids": as_ids([[0], [1]])}
    given = make(layer, [most] * 2, 2 * most, 0, write_after=as_ids([[most]] * 2), **ids)

    def on_data(data: Any, rest: Arrays) -> Any:
        rest = rest._replace(data=data)
        return call(layer, rest, ragged=most > 1, most=most, implementation="mosaic_gpu")

    rest = jax.tree.map(jnp.array, given)
    traced = jax.jit(on_data, donate_argnums=0).trace(rest.data, rest)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
    assert text.count("stablehlo.output_operand_alias<") == aliases
    assert text.count("tf.aliasing_output") == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("width", "counts", "most"), [(2, [3, 0, 1], 3), (4, [12, 1, 2], None)])
def test_a_convolution_by_itself(
    implementation: str, width: int, counts: list[int], most: int | None
) -> None:
    layer = Layer(key_heads=1, value_heads=2, width=width, bias=True)
    given = make(
        layer,
        counts,
        sum(counts) + 2,
        1,
        read_ids=as_ids([3, 4, 99]),
        write_ids=as_ids([[3, 5, 6], [7, 8, 9], [1, -1, 2]]),
        write_after=as_ids([[1, 2, 3]] * 3),
    )

    @jax.jit
    def convolved(given: Arrays) -> Any:
        _, pages = pages_of(layer, given.data)
        conv = Convolution(pages, given.weights, given.bias, silu=True)
        return causal_conv1d(
            given.inputs, conv, given.read_ids, given.write_ids, given.starts,
            write_after=given.write_after, max_query_len=most, implementation=implementation,
        )  # fmt: skip

    with kernels_run():
        data, out = convolved(jax.tree.map(jnp.array, given))
    kept = windows_in(layer, given.data)
    expected, windows = np.zeros(out.shape), kept.copy()
    inputs, weights = given.inputs.astype(np.float64), given.weights.astype(np.float64)
    for i, page in enumerate(given.read_ids):
        tokens = slice(given.starts[i], given.starts[i + 1])
        before, bias = state_of(kept, page), given.bias.astype(np.float64)
        reached, expected[tokens] = convolve(inputs[tokens], before, weights, bias, True)
        write_states(windows, reached, given.write_ids[i], given.write_after[i])
    np.testing.assert_array_equal(windows_in(layer, data), windows)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


GOOD = {
    "inputs": jnp.ones((3, 256)),
    "log_decay": jnp.zeros((3, 2)),
    "beta": jnp.ones((3, 2)),
    "states": StatePages(jnp.zeros((9, 8192)), jnp.float32, (2, 64, 64), 9),
    "read_ids": jnp.zeros(3, jnp.int32),
    "write_ids": jnp.zeros(3, jnp.int32),
    "num_key_heads": 1,
}
WINDOWS = StatePages(GOOD["states"].data, jnp.float32, (3, 256), 9)
BAD = [
    ("inputs", None, TypeError, "inputs must be an array of numbers, got NoneType"),
    ("states", 5, TypeError, "states must be of type StatePages, got int"),
    ("scale", "x", ValueError, "scale='x' must be a finite number, or None"),
    ("convolution", 5, TypeError, "convolution must be of type Convolution, got int"),
    ("implementation", "triton", ValueError, "implementation='triton'; use one of"),
    ("inputs", jnp.ones((3, 250)), ValueError, r"want \[T, 256\]"),
    ("inputs", jnp.ones((3, 256), jnp.int8), TypeError, "inputs must be one of float32"),
    ("inputs", jnp.ones((4, 256)), ValueError, "log_decay has shape"),
    ("log_decay", jnp.ones((3, 4)), ValueError, r"wants \(3, 2\) or \(3, 2, 64\)"),
    ("beta", jnp.ones((3, 1)), ValueError, "beta has shape"),
    ("num_key_heads", 3, ValueError, "num_key_heads=3 must be an int that divides the 2 heads"),
    ("read_ids", jnp.zeros(3), TypeError, "read_ids must be int32"),
    ("read_ids", jnp.zeros(2, jnp.int32), ValueError, r"write_ids must be int32\[2\]"),
    ("write_ids", np.zeros(3, np.int64), TypeError, "write_ids must be int32"),
    ("write_ids", jnp.zeros((3, 2), jnp.int32), ValueError, "pass write_after"),
    ("query_start_loc", jnp.zeros(3, jnp.int32), ValueError, "query_start_loc must be int32"),
    ("max_query_len", 0, ValueError, "pass query_start_loc|max_query_len=0"),
    ("states", GOOD["states"]._replace(start=4), ValueError, "must lie within its extent"),
    ("states", GOOD["states"]._replace(dtype=jnp.int8), TypeError, "states.dtype must be one of"),
    ("states", GOOD["states"]._replace(shape=(2, 64)), ValueError, "must have 3 sizes"),
    ("convolution", Convolution(WINDOWS, jnp.ones((3, 256))), ValueError, r"want \(4, 256\)"),
    (
        "convolution",
        Convolution(WINDOWS._replace(data=jnp.zeros((9, 8192))), jnp.ones((4, 256))),
        ValueError,
        "must be the very array",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD)
def test_bad_arguments_are_refused_by_name(name, value, error, text) -> None:
    given = GOOD | {name: value}
    if name == "max_query_len":
        given["query_start_loc"] = as_ids([0, 1, 2, 3])
    with pytest.raises(error, match=text):
        gated_delta_rule(**given)


@needs_mosaic
def test_what_mosaic_does_not_support_is_named() -> None:
    states = StatePages(jnp.zeros((9, 2 * 24 * 24)), jnp.float32, (2, 24, 24), 9)
    given = GOOD | {"states": states, "inputs": jnp.ones((3, 96))}
    jax.eval_shape(lambda: gated_delta_rule(**given))
    with pytest.raises(NotImplementedError, match="keys are 24 wide"):
        gated_delta_rule(**given, implementation="mosaic_gpu")
