"""Recurrent layers over pages against NumPy: steps, drafts, prompts, and states in place."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jaxkv.testing import assert_same_bytes
from pallas_kernels import (
    Convolution,
    Replay,
    RequestStates,
    StatePages,
    _capability,
    _mosaic,
    causal_conv1d,
    gated_delta_rule,
    selective_scan,
)
from pallas_kernels._recurrence import (
    limits,
    prompt,
    prompt_parts,
    step,
    step_convolution,
    step_shape,
    xla,
)
from pallas_kernels._recurrence.chunks import CHUNK, Chunks
from pallas_kernels._recurrence.prompt_shape import PromptShape
from pallas_kernels._recurrence.rule import Requests, Rule, Tokens, replay_shapes
from tests.helpers import (
    HAS_MOSAIC,
    IMPLEMENTATIONS,
    ON_GPU,
    as_ids,
    interpret_as,
    kernels_run,
    needs_mosaic,
)
from tests.reference_recurrence import (
    RecurrentCase,
    convolve,
    normalized,
    replayed,
    state_of,
    write_states,
)

PAGES, STEP, FIRST = 12, 2, 1  # a page is every second extent, from the second one on
AS_DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink an example takes minutes
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
    state, conv, inputs, gates, out: dtypes; gates are decay and beta; no out: that of inputs.
    before: bytes of an extent before the inputs that the convolution keeps.
    conv_first: extent of the first page of these.
    typed: whether the pages are an array of the state's dtype, not of bytes.
    holes: tokens between one request and the next.
    replay: tokens of a ring; 0: none.
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
    gates: str = "float32"
    out: str | None = None
    bias: bool = False
    silu: bool = True
    normalize: bool = True
    scale: float | None = None
    values_first: bool = True
    before: int = 512
    conv_first: int = FIRST
    typed: bool = False
    holes: int = 0
    replay: int = 0

    def __str__(self) -> str:
        defaults = self._field_defaults
        fields = zip(self._fields, self, strict=True)
        return " ".join(f"{name}={value}" for name, value in fields if value != defaults[name])

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
        return -(-(self.before + self.conv_bytes) // row) * row

    @property
    def ring_shapes(self) -> tuple[tuple[int, ...], ...]:
        if not self.replay:
            return ()
        item = dtype(self.state).itemsize
        return replay_shapes(self.replay, self.state_shape, self.key_heads, item)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, and of a ring behind it."""
        shapes = self.state_shape, *self.ring_shapes
        return sum(map(math.prod, shapes)) * dtype(self.state).itemsize

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.value, self.key

    @property
    def tolerance(self) -> float:
        narrow = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
        return max(narrow[name] for name in (self.state, self.conv, self.inputs, self.of_out))

    @property
    def of_out(self) -> str:
        return self.out or self.inputs


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
    lens: np.ndarray
    computed: np.ndarray


def states_in(layer: Layer, data: Any, computed: dict[int, int]) -> np.ndarray:
    """The states of all pages, in float64.

    Args:
      computed: tokens that a page has the state after; of others, the checkpoint is returned.
    """
    end = layer.start + layer.state_bytes
    part = np.asarray(data).view(np.uint8)[FIRST::STEP][:PAGES, layer.start : end]
    part = np.ascontiguousarray(part).view(dtype(layer.state)).astype(np.float64)
    shapes = layer.state_shape, *layer.ring_shapes
    parts = np.split(part, np.cumsum([*map(math.prod, shapes)])[:-1], axis=1)
    states, *ring = (x.reshape(PAGES, *shape) for x, shape in zip(parts, shapes, strict=True))
    for page, count in computed.items() if layer.replay else ():
        if 0 <= page < PAGES:
            mine = [array[page] for array in ring]
            states[page] = replayed(states[page], mine, count % layer.replay)
    return states


def windows_in(layer: Layer, data: Any) -> np.ndarray:
    """The inputs that the convolution keeps in all pages, in float64."""
    part = np.asarray(data).view(np.uint8)[layer.conv_first :: STEP][:PAGES]
    part = part[:, layer.before : layer.before + layer.conv_bytes]
    part = np.ascontiguousarray(part).view(dtype(layer.conv))
    return part.reshape(PAGES, layer.width - 1, layer.channels).astype(np.float64)


def make(layer: Layer, counts: list[int], num_tokens: int, seed: int, **given: Any) -> Arrays:
    """Makes arguments; what is no state of a listed page is NaN in every dtype."""
    rng = np.random.default_rng(seed)
    heads, key = layer.value_heads, layer.key
    row = key * dtype(layer.state).itemsize
    size = -(-(layer.start + layer.state_bytes + max(layer.before, row)) // row) * row
    computed = rng.integers(0, 3 * layer.replay, len(given["read_ids"]), endpoint=True)
    if layer.replay:  # the first token of some ends a ring
        computed[::2] += (layer.replay - 1 - computed[::2]) % layer.replay
    data = np.full((FIRST + STEP * PAGES, size), 0xFF, np.uint8)

    def put(extent: int, start: int, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data[extent, start : start + raw.size] = raw

    for page, before in zip(given["read_ids"], computed, strict=True):
        if 0 <= page < PAGES:
            state = rng.normal(size=layer.state_shape)
            arrays = [state, *make_ring(layer, before % max(1, layer.replay), rng)]
            flat = np.concatenate([array.reshape(-1) for array in arrays])
            put(FIRST + STEP * page, layer.start, flat.astype(dtype(layer.state)))
            if layer.width:
                window = rng.normal(size=(layer.width - 1, layer.channels))
                extent = layer.conv_first + STEP * page
                put(extent, layer.before, window.astype(dtype(layer.conv)))
    inputs = rng.normal(size=(num_tokens, layer.channels))
    per_key = (key,) if layer.rule == "delta per key" else ()
    strength = rng.choice([0.0, 1e-3, 0.3, 8.0, np.inf], size=(num_tokens, 1, *[1] * len(per_key)))
    strength[40:128] = 0.02  # so that something of a state is left after a chunk
    log_decay = -rng.exponential(size=(num_tokens, heads, *per_key)) * strength
    if num_tokens > 8:  # alike keys, no decay, and all taken away: hard for the chunked form
        inputs[2:7], log_decay[2:7] = inputs[1], 0
    for token, start in ((0, layer.key_heads * layer.key), (1, 0)):  # a key and a query of length 0
        inputs[token : token + 1, start : start + layer.key] = 0
    # Keys and queries as short as what is added to their norms.
    inputs[2:3, : 2 * layer.key_heads * layer.key] *= 1e-4
    beta = rng.choice([0.0, 0.5, 1.0], size=(num_tokens, heads))
    starts = np.cumsum([0, *(count + layer.holes for count in counts)])
    spans = zip(starts, counts, strict=False)
    owned = np.concatenate([range(start, start + count) for start, count in spans]).astype(int)
    padding = np.setdiff1d(range(num_tokens), owned)
    inputs[padding], log_decay[padding], beta[padding] = np.nan, np.nan, np.nan
    return Arrays(
        data,
        inputs.astype(dtype(layer.inputs)),
        log_decay.astype(dtype(layer.gates)),
        beta.astype(dtype(layer.gates)),
        (rng.normal(size=(max(1, layer.width), layer.channels)) / 2).astype(dtype(layer.inputs)),
        rng.normal(size=layer.channels).astype(dtype(layer.inputs)),
        starts=as_ids(starts),
        lens=as_ids(counts),
        computed=as_ids(computed),
        **given,
    )


def make_ring(layer: Layer, filled: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the arrays of a ring with so many tokens, and NaN in its other rows."""
    if not layer.replay:
        return []
    keys, added, log_decay = ring = [np.full(shape, np.nan) for shape in layer.ring_shapes]
    keys[:, :filled] = normalized(rng.normal(size=keys.shape))[:, :filled]
    added[:, :filled] = rng.normal(size=added.shape)[:, :filled]
    log_decay[..., :filled] = -np.cumsum(rng.exponential(size=log_decay.shape) / 8, -1)[
        ..., :filled
    ]
    return ring


def pages_of(layer: Layer, data: Any) -> tuple[StatePages, StatePages, Replay | None]:
    common = {"num_pages": PAGES, "page_step": STEP}
    states = StatePages(
        data, dtype(layer.state), layer.state_shape, first=FIRST, start=layer.start, **common
    )
    shape = (max(1, layer.width - 1), layer.channels)
    windows = StatePages(
        data, dtype(layer.conv), shape, first=layer.conv_first, start=layer.before, **common
    )
    ring, start = [], states.start + states.num_bytes
    for shape in layer.ring_shapes:
        ring.append(states._replace(shape=shape, start=start))
        start += ring[-1].num_bytes
    return states, windows, Replay(*ring) if ring else None


def call(
    layer: Layer,
    given: Arrays,
    *,
    ragged: bool,
    most: int | None,
    implementation: Any,
    alone: bool = False,
) -> Any:
    """Calls the kernel of a layer; alone: without a list of states, the last ones by default."""
    states, windows, replay = pages_of(layer, given.data)
    conv = None
    if layer.width:
        bias = given.bias if layer.bias else None
        conv = Convolution(windows, given.weights, bias)
        conv = conv if layer.silu else conv._replace(silu=False)
    options: dict[str, Any] = {"convolution": conv, "implementation": implementation}
    options |= {"replay": replay} if replay else {}
    options |= {"scale": layer.scale} if layer.scale is not None else {}
    options |= {"out_dtype": dtype(layer.out)} if layer.out else {}
    before = given.computed if replay else None
    requests = RequestStates(given.read_ids, given.write_ids[:, 0], num_computed_tokens=before)
    if ragged:
        lens = given.lens if layer.holes else None
        after = None if alone else given.write_after
        lists = given.read_ids, given.write_ids, given.starts, lens, after
        requests = RequestStates(*lists, max_query_len=most, num_computed_tokens=before)
    arguments = given.inputs, given.log_decay, given.beta, states, requests
    if layer.rule == "scan":
        options |= {} if layer.values_first else {"values_first": False}
        return selective_scan(*arguments, num_groups=layer.key_heads, **options)
    options |= {} if layer.normalize else {"normalize": False}
    return gated_delta_rule(*arguments, num_key_heads=layer.key_heads, **options)


run = jax.jit(call, static_argnames=("layer", "ragged", "most", "implementation", "alone"))


def expect(layer: Layer, given: Arrays) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Returns the states and windows of all pages, and the outputs."""
    read = dict(zip(given.read_ids.tolist(), given.computed.tolist(), strict=True))
    states = states_in(layer, given.data, read)
    windows = windows_in(layer, given.data) if layer.width else None
    new_states = states.copy()
    new_windows = None if windows is None else windows.copy()
    inputs = given.inputs.astype(np.float64)
    outputs = np.zeros((len(inputs), layer.value_heads, layer.value))
    for i, page in enumerate(given.read_ids):
        tokens = range(given.starts[i], given.starts[i] + given.lens[i])
        after = given.write_after[i]
        if windows is not None:
            bias = given.bias.astype(np.float64) if layer.bias else None
            weights = given.weights.astype(np.float64)
            before = state_of(windows, page)
            saved, inputs[tokens] = convolve(inputs[tokens], before, weights, bias, layer.silu)
            write_states(new_windows, saved, given.write_ids[i], after)
        case = as_case(layer, given, inputs)
        reached, found = case.run(state_of(states, page), tokens)
        if found:
            outputs[tokens] = found
        write_states(new_states, reached, given.write_ids[i], after)
    return new_states, new_windows, outputs


def as_case(layer: Layer, given: Arrays, inputs: np.ndarray) -> RecurrentCase:
    widths = [layer.key_heads * layer.key] * 2 + [layer.value_heads * layer.value]
    names = ["queries", "keys", "values"]
    if layer.rule == "scan" and layer.values_first:
        widths, names = widths[::-1], names[::-1]
    parts = dict(zip(names, np.split(inputs, np.cumsum(widths)[:-1], axis=1), strict=True))
    count, group = len(inputs), layer.value_heads // layer.key_heads
    queries, keys = (
        parts[name].reshape(count, layer.key_heads, layer.key) for name in ("queries", "keys")
    )
    if layer.rule != "scan" and layer.normalize:
        queries, keys = normalized(queries), normalized(keys)
    default = 1.0 if layer.rule == "scan" else layer.key**-0.5
    queries = queries * (default if layer.scale is None else layer.scale)
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
    pages = given.data.view(dtype(layer.state)) if layer.typed else given.data
    arrays = jax.tree.map(jnp.array, given._replace(data=pages))
    with kernels_run():
        data, outputs = run(layer, arrays, implementation=implementation, **how)
    assert outputs.dtype == layer.of_out
    if layer.out:  # not rounded to the inputs' dtype before
        numbers = np.asarray(outputs)
        assert (numbers != numbers.astype(dtype(layer.inputs)).astype(numbers.dtype)).any()
    states, windows, expected = expect(layer, given)
    # The products of chunks are of the precision that jax chooses: TF32 on a GPU.
    bound = max(layer.tolerance, 5e-3) if in_chunks and ON_GPU else layer.tolerance
    close = functools.partial(np.testing.assert_allclose, rtol=bound, atol=5 * bound)
    close(np.asarray(outputs, np.float64), expected)
    found = states_in(layer, data, computed_in(given))
    close(found, states)
    if in_chunks and layer.inputs == "bfloat16":  # the bound above is wide, because of 1 + 1 / 256
        assert relative_error(outputs, expected) < 1e-2
        assert relative_error(found, states) < 1e-2
    if implementation == "mosaic_gpu" and not in_chunks and layer.out == layer.state == "float32":
        assert relative_error(outputs, expected) < 1e-5  # nothing is rounded but to float32
    if windows is not None:
        close(windows_in(layer, data), windows, rtol=0, atol=0)
    untouched, size = np.array(data).view(np.uint8), layer.state_bytes
    for page in given.write_ids.reshape(-1):
        if 0 <= page < PAGES:  # all other bytes are those that were there
            saved = layer.conv_first, layer.before, layer.conv_bytes
            for first, start, length in ((FIRST, layer.start, size), saved):
                place = first + STEP * page, slice(start, start + length)
                untouched[place] = given.data[place]
    assert_same_bytes(untouched, given.data)


def computed_in(given: Arrays) -> dict[int, int]:
    """Returns after how many tokens pages have the state of, when the step is done."""
    computed = dict(zip(given.read_ids.tolist(), given.computed.tolist(), strict=True))
    rows = given.write_ids, given.write_after, given.computed, given.lens
    for ids, afters, before, count in zip(*rows, strict=True):
        for page, after in zip(ids.tolist(), afters.tolist(), strict=True):
            if 1 <= after <= count:
                computed[page] = before + after
    return computed


def relative_error(found: Any, expected: np.ndarray) -> float:
    """Returns the error in proportion, of numbers that are not NaN."""
    found, known = np.asarray(found, np.float64), ~np.isnan(expected)
    return float(np.linalg.norm((found - expected)[known]) / np.linalg.norm(expected[known]))


def choose_ids(seed: int, batch: int, writes: int) -> dict[str, np.ndarray]:
    """Chooses pages to read and, apart from each other, to write: the same, others, or none.

    By a seed, because the first example that Hypothesis draws would read no page at all.
    """
    rng = np.random.default_rng(seed)
    pages, extremes = rng.permutation(PAGES), rng.choice(EXTREMES, (2, batch))
    read = np.where(rng.random(batch) < 0.7, pages[:batch], extremes[0])
    write = pages[batch : batch + batch * writes].reshape(batch, writes)
    forms = pages[:batch], write[:, 0], extremes[1]  # in place, elsewhere, nowhere
    write[:, 0] = np.choose(rng.permutation(batch) % 3, forms)
    return {"read_ids": as_ids(read), "write_ids": as_ids(write)}


STEPS = (
    Layer(rule="delta per key", key_heads=2, state="bfloat16", key=64, value=64, value_heads=4),
    Layer(
        **{"rule": "scan", "key": 64, "value": 128, "width": 3, "bias": True},
        **{"state": "float16", "scale": 0.5, "conv_first": 0},
    ),
    Layer(
        **{"key": 128, "value": 128, "width": 4, "conv": "bfloat16", "inputs": "bfloat16"},
        **{"out": "float32", "gates": "bfloat16"},
    ),
    Layer(
        **{"key": 128, "value": 128, "value_heads": 1, "width": 2, "silu": False, "bias": True},
        **{"typed": True, "normalize": False},
    ),
)


DRAFTS = (
    STEPS[1]._replace(holes=1, values_first=False),
    # Of the value heads of a key head, each thread block takes two.
    STEPS[0]._replace(key_heads=1, value_heads=6, state="float32", scale=0.7),
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", STEPS, ids=str)
@settings(max_examples=1, phases=AS_DRAWN)
@given(seed=st.integers(0, 99))
def test_a_step_moves_each_state_by_one_token(implementation, layer, seed) -> None:
    ids = choose_ids_of_steps(seed)
    given = make(layer, [1] * 3, 3, seed, write_after=as_ids([[1]] * 3), **ids)
    check(layer, given, implementation, ragged=False, most=None)


def choose_ids_of_steps(seed: int) -> dict[str, np.ndarray]:
    """Chooses pages for three requests that are no padding: each reads or writes one."""
    ids = choose_ids(seed, 3, 1)
    # Those that neither read nor write a page are padding: theirs get one to write.
    spare = iter(
        [page for page in range(PAGES) if page not in [*ids["read_ids"], *ids["write_ids"]]]
    )
    for i, (read, write) in enumerate(zip(ids["read_ids"], ids["write_ids"][:, 0], strict=True)):
        if not (0 <= read < PAGES or 0 <= write < PAGES):
            ids["write_ids"][i] = next(spare)
    return ids


NAMES = ["float32", "bfloat16", "float16"]


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@settings(max_examples=300)
@given(data=st.data())
def test_a_convolution_is_fused_if_inputs_of_each_head_lie_within_a_row(data) -> None:
    """Of the array that a kernel sees: as wide as a key, in the dtype of the states."""
    state = data.draw(st.sampled_from(NAMES))
    conv = data.draw(st.just(state) | st.sampled_from(NAMES))
    taps, bias = (data.draw(st.just(conv) | st.sampled_from(NAMES)) for _ in range(2))
    forms = [(data.draw(st.integers(8, 9)), 3, data.draw(st.integers(1, 2))) for _ in range(2)]
    states_form, windows_form = [data.draw(st.sampled_from(forms)) for _ in range(2)]
    key, value = (data.draw(st.sampled_from([128, 256])) for _ in range(2))
    key_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    start, is_scan = data.draw(st.integers(0, 16)) * 128, data.draw(st.booleans())
    rule = Rule(key_heads, group * key_heads, key, value, True, True, 1.0, values_first=is_scan)
    data_of, width = jax.ShapeDtypeStruct((9, 2**20), jnp.uint8), 3
    shape = rule.value_heads, value, key
    states: Any = StatePages(*(data_of, dtype(state), shape, *states_form), start=2**18)
    windows: Any = StatePages(
        *(data_of, dtype(conv), (width - 1, rule.columns), *windows_form), start=start
    )
    given: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct((width, rule.columns), dtype(taps))
    biases: Any = jax.ShapeDtypeStruct((rule.columns,), dtype(bias))
    convolution = Convolution(windows, weights, data.draw(st.sampled_from([None, biases])))
    written: Any = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    tokens, requests = Tokens(given, given, given, states), Requests(given, written)
    is_fused = step.can_fuse(rule, tokens, requests, convolution)
    given_in = {taps} if convolution.bias is None else {taps, bias}
    row, heads = key * states.itemsize, (rule.key_heads, rule.key_heads, rule.value_heads)
    for first, count, size in zip(rule.starts, heads, (key, key, value), strict=True):
        for tap, head in itertools.product(range(width - 1), range(count)):
            begin = start + (tap * rule.columns + first + head * size) * windows.itemsize
            last = begin + size * windows.itemsize - 1
            assert not is_fused or begin // row == last // row
    if is_fused:
        assert states_form == windows_form
        assert conv == state or (state, conv) == ("float32", "bfloat16")
        assert given_in == {conv} or conv == "float32"  # neither weights nor bias are rounded
    elif states_form == windows_form and key == value and {state, *given_in} == {conv}:
        assert start % (key * windows.itemsize)


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("other", ["", "first", "num_pages", "page_step", "data", "traced"])
def test_a_convolution_is_fused_if_its_inputs_lie_in_the_extents_of_the_states(other: str) -> None:
    rule = Rule(1, 1, 128, 128, True, True, 1.0, values_first=False)
    data, again = (jax.ShapeDtypeStruct((9, 2**20), jnp.uint8) for _ in range(2))
    first = np.zeros(()), np.zeros(())  # as traced: equal only if they are one
    states: Any = StatePages(data, "float32", (1, 128, 128), 9, first=first[0], start=2**18)
    windows: Any = StatePages(data, "float32", (2, rule.columns), 9, first=first[0])
    changed = {"first": 3, "num_pages": 8, "page_step": 2, "data": again, "traced": first[1]}
    field = "first" if other == "traced" else other
    windows = windows._replace(**{field: changed[other]} if other else {})
    given: Any = jax.ShapeDtypeStruct((200,), jnp.int32)
    written: Any = jax.ShapeDtypeStruct((200, 1), jnp.int32)
    conv = Convolution(windows, jax.ShapeDtypeStruct((3, rule.columns), jnp.float32))
    tokens = Tokens(given, given, given, states)
    assert step.can_fuse(rule, tokens, Requests(given, written), conv) == (not other)


@pytest.mark.parametrize(
    ("layer", "implementation"),
    [
        (DRAFTS[0], "xla"),
        *(pytest.param(layer, "mosaic_gpu", marks=needs_mosaic) for layer in DRAFTS),
    ],
    ids=str,
)
@settings(max_examples=1, phases=AS_DRAWN)
@given(st.sampled_from([[3, 1, 0], [2, 0, 3], [3, 3, 3], [0, 1, 2]]), st.integers(0, 99))
def test_the_state_after_each_draft_is_written(implementation, layer, counts, seed) -> None:
    after = as_ids([[1, 2, 3]] * 3)
    given = make(layer, counts, 12, seed, write_after=after, **choose_ids(seed, 3, 3))
    in_chunks = implementation == "xla"
    check(layer, given, implementation, in_chunks=in_chunks, ragged=True, most=3)


REPLAYS = (
    Layer(key_heads=2, value_heads=4, key=8, value=4, replay=3, width=4),
    Layer(rule="scan", replay=16, state="bfloat16", scale=0.5),
    Layer(key=8, value=16, replay=17, state="float16"),
    Layer(1, 1, 1, 1, replay=1, rule="scan"),
)


REPLAYS_IN_KERNELS = (
    Layer(key=128, value=128, width=4, conv="bfloat16", inputs="bfloat16", replay=8),
    Layer(key=128, value=64, value_heads=4, state="bfloat16", replay=16, rule="scan", scale=0.5),
)


@pytest.mark.parametrize(
    ("layer", "implementation"),
    [
        *((layer, "xla") for layer in REPLAYS),
        *(pytest.param(layer, "mosaic_gpu", marks=needs_mosaic) for layer in REPLAYS_IN_KERNELS),
    ],
    ids=str,
)
@settings(max_examples=3, phases=AS_DRAWN)
@example(0)
@given(seed=st.integers(0, 99))
def test_a_step_adds_to_a_ring_or_writes_a_checkpoint(layer, implementation, seed) -> None:
    ids = choose_ids_of_steps(seed)
    given = make(layer, [1] * 3, 3, seed, write_after=as_ids([[1]] * 3), **ids)
    check(layer, given, implementation, ragged=False, most=None)


@pytest.mark.parametrize("layer", REPLAYS, ids=str)
@settings(max_examples=4, phases=AS_DRAWN)
@given(
    st.sampled_from([[1, 150, 1], [0, 5, 65], [2, 0, 1], [63, 1, 64], [70, 60, 7]]),
    st.integers(0, 99),
)
def test_prompts_end_with_a_checkpoint_and_a_ring(layer: Layer, counts: Any, seed: int) -> None:
    after = choose_ends(seed, counts, beyond=3)
    given = make(layer, counts, 200, seed, write_after=after, **choose_ids(seed, 3, 2))
    check(layer, given, "xla", in_chunks=True, ragged=True, most=None)


def choose_ends(seed: int, counts: list[int], beyond: int) -> np.ndarray:
    """Chooses two counts of tokens for each request, after which a page takes its state.

    Before the first token there is none to take.
    """
    rng = np.random.default_rng(seed)
    ends = np.array([np.sort(rng.integers(0, n + beyond, 2, endpoint=True)) for n in counts])
    return as_ids(np.where(ends > 0, ends, -(seed % 3)))


PROMPTS = (Layer(width=4, bias=True), Layer(rule="delta per key", key_heads=2))


@pytest.mark.parametrize("layer", PROMPTS, ids=str)
@settings(max_examples=3, phases=AS_DRAWN)
@example([70, 60, 70], 0)  # as many chunks as there can be of them
@example([1, 150, 1], 23)  # states of which some are written before the first token
@example([200, 0, 0], 27)  # an odd number of chunks, and a page of a request without a token
@given(
    st.sampled_from([[1, 150, 1], [0, 64, 65], [200, 0, 0], [63, 1, 64], [70, 60, 70]]),
    st.integers(0, 99),
)
def test_chunks_are_equal_to_tokens_one_by_one(layer, counts, seed) -> None:
    after = choose_ends(seed, counts, beyond=3)
    given = make(layer, counts, 200, seed, write_after=after, **choose_ids(seed, 3, 2))
    check(layer, given, "xla", in_chunks=True, ragged=True, most=None)


PROMPTS_IN_KERNELS = (
    Layer(
        **{"key": 128, "value": 64, "inputs": "bfloat16", "state": "bfloat16"},
    ),
    Layer(
        **{"rule": "scan", "key": 64, "value": 128, "key_heads": 2, "inputs": "bfloat16"},
        **{"gates": "bfloat16", "out": "float16", "scale": 0.5, "holes": 3},
    ),
    Layer(key=128, value=128, inputs="bfloat16", conv="bfloat16", width=4),
    Layer(rule="delta per key", key=64, value=64, inputs="bfloat16"),
    Layer(rule="delta per key", key=128, value=128, inputs="bfloat16", conv="bfloat16", width=4),
    Layer(key=64, value=64, value_heads=1, inputs="bfloat16", state="bfloat16"),
)


# By wgmma, and by mma with cp.async. A GPU runs its own, with all layers.
INTERPRETED_PROMPTS = (
    (PROMPTS_IN_KERNELS[0], (9, 0)),
    (PROMPTS_IN_KERNELS[1]._replace(before=2048), (8, 0)),
)


@needs_mosaic
@pytest.mark.parametrize(
    ("layer", "capability"),
    [(layer, None) for layer in PROMPTS_IN_KERNELS] if ON_GPU else INTERPRETED_PROMPTS,
    ids=str,
)
@settings(max_examples=8, phases=AS_DRAWN if ON_GPU else [Phase.explicit])
@example([2, 100, 0], 18)  # a state is written after rows that are of no request
@example([2, 100, 0], 2)  # loads the parts of four chunks, ahead of three that are in memory
@given(
    st.sampled_from([[1, 30, 0], [0, 64, 30], [3, 61, 64], [2, 100, 0], [70, 1, 50]]),
    st.integers(0, 99),
)
def test_prompts_go_through_kernels(layer, capability, counts: list[int], seed: int) -> None:
    after = choose_ends(seed, counts, beyond=0)
    given = make(layer, counts, 140, seed, write_after=after, **choose_ids(seed, 3, 2))
    with pytest.MonkeyPatch.context() as patch:
        if capability is not None:
            interpret_as(capability, patch)
        check(layer, given, "mosaic_gpu", in_chunks=True, ragged=True, most=None)


REPLAYED_PROMPTS = REPLAYS_IN_KERNELS[0]._replace(inputs="bfloat16", replay=16, width=0)


@needs_mosaic
@settings(max_examples=8, phases=AS_DRAWN if ON_GPU else [Phase.explicit])
@example([1, 3, 70], 4)
@example([1, 3, 0], 5)
@given(
    st.sampled_from([[1, 30, 0], [0, 64, 30], [3, 61, 64], [16, 100, 1], [70, 1, 50]]),
    st.integers(0, 99),
)
def test_prompts_in_kernels_end_with_a_checkpoint_and_a_ring(counts: list[int], seed: int) -> None:
    ids = choose_ids(seed, 3, 2)
    given = make(REPLAYED_PROMPTS, counts, 140, seed, write_after=as_ids([[0, 0]] * 3), **ids)
    # A page takes the last state, and another one a checkpoint before, if there is one.
    last = given.computed + given.lens
    checkpoints = np.maximum((last - 1) // 16 * 16 - given.computed, 0)
    after = as_ids(np.stack([given.lens, checkpoints], axis=1))
    given = given._replace(write_after=np.where(after > 0, after, -1))
    spare = np.setdiff1d(range(PAGES), np.concatenate([ids["read_ids"], *ids["write_ids"]]))
    for i in np.flatnonzero(~np.isin(ids["write_ids"][:, 0], range(PAGES))):
        given.write_ids[i, 0], spare = spare[0], spare[1:]
    how: dict[str, Any] = {"in_chunks": True, "ragged": True, "most": None, "alone": seed % 2 > 0}
    if how["alone"]:
        columns = given.write_ids[:, :1], given.write_after[:, :1]
        given = given._replace(write_ids=columns[0], write_after=columns[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_shape, "MOST_BLOCKS", 16)  # of one request, which go to the others
        check(REPLAYED_PROMPTS, given, "mosaic_gpu", **how)


@needs_mosaic
@pytest.mark.parametrize("instructions", [None] if ON_GPU else ["wgmma, TMA", "mma, TMA"])
def test_the_inverse_of_a_chunk_is_as_precise_as_what_it_becomes(instructions) -> None:
    """Rounding to bfloat16 comes last: what it hides in an output adds up where keys are alike."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=CHUNK) + 0.3 * rng.normal(size=(CHUNK, CHUNK))
    parts = keys, keys, np.eye(CHUNK)  # of values of one token each, the products are the inverse
    inputs = np.concatenate(parts, axis=1).astype(dtype("bfloat16"))
    gates = np.repeat(np.float32([0, 1]), CHUNK)[None, None]  # no decay, and all is taken away
    rule = Rule(1, 1, CHUNK, CHUNK, delta=True, normalize=True, scale=1.0)
    instructions = instructions or _capability.instructions_of("recurrent_prompt")
    operand, page = jnp.dtype(inputs.dtype), jnp.dtype("float32")
    shape = PromptShape(rule, 1, 1, operand, page, False, instructions)
    find = jax.jit(functools.partial(prompt_parts.find_parts, shape))
    with kernels_run():
        found = find(as_ids([[0, 0, CHUNK, -1]]), gates, jnp.array(inputs), None).values
    keys = normalized(inputs[:, :CHUNK].astype(np.float64))
    exact = np.linalg.inv(np.eye(CHUNK) + np.tril(keys @ keys.T, -1))
    assert relative_error(found, exact) < 3e-3


@needs_mosaic
def test_prompts_go_on_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of few chunks are in memory at once, and a state goes on between them."""
    if not ON_GPU:
        interpret_as((12, 0), monkeypatch)  # by mma with TMA
    layer = PROMPTS_IN_KERNELS[3]
    columns, chunks = layer.value + 64 + 3 * layer.key, 2  # of a turn
    monkeypatch.setattr(prompt, "TURN_BYTES", chunks * layer.value_heads * 64 * columns * 2)
    given = make(
        layer,
        [90, 9],  # 4 chunks, the first one a whole tile, and one that begins a turn
        105,
        0,
        read_ids=as_ids([1, -1]),
        write_ids=as_ids([[4, 6], [8, 9]]),
        write_after=as_ids([[70, 80], [9, 9]]),  # two pages take one state
    )
    check(layer, given, "mosaic_gpu", in_chunks=True, ragged=True, most=90)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_a_turn_carries_over_the_states_of_requests_that_go_on(
    counts: list[int], size: int
) -> None:
    """Of each turn's runs: chunks from and to, the state before, whether to carry the one after."""
    begins, ids = np.cumsum([0, *counts]), np.arange(len(counts))
    pages = StatePages(jnp.zeros((9, 32), jnp.uint8), "float32", (1, 1, 8), num_pages=9)
    requests, nothing = Requests(as_ids(ids), as_ids(ids)), (jnp.zeros(0, jnp.int32),) * 6
    chunks = Chunks(*nothing, as_ids(begins), as_ids(begins[-1]))
    for first in range(0, begins[-1], size):
        runs = np.array(prompt._runs(pages, requests, chunks, first, size))
        expected = [
            (
                min(max(begin - first, 0), size),
                min(max(end - first, 0), size),
                prompt.CARRIED if begin < first else request,
                int(end > first + size),
            )
            for request, (begin, end) in enumerate(itertools.pairwise(begins))
        ]
        assert sorted(map(tuple, runs)) == sorted(expected)
        assert (np.diff(runs[:, 1] - runs[:, 0]) <= 0).all()  # the longest first


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("alone", [False, True], ids=["with states", "a convolution alone"])
def test_padding_gives_zeros(alone: bool, implementation: str) -> None:
    """One request only writes, one only reads, and one is padding."""
    layer = Layer(width=4, bias=True) if alone else STEPS[0]
    ids = {"read_ids": as_ids([-1, 1, -1]), "write_ids": as_ids([[2], [PAGES], [PAGES]])}
    given = make(layer, [1, 1], 3, 0, write_after=as_ids([[1]] * 3), **ids)

    @jax.jit
    def outputs_of(given: Arrays) -> Any:
        if not alone:
            return call(layer, given, ragged=False, most=None, implementation=implementation)[1]
        conv = Convolution(pages_of(layer, given.data)[1], given.weights, given.bias)
        requests = RequestStates(given.read_ids, given.write_ids[:, 0])
        return causal_conv1d(given.inputs, conv, requests, implementation=implementation)[1]

    with kernels_run():
        outputs = np.asarray(outputs_of(jax.tree.map(jnp.array, given))).reshape(3, -1)
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
        (PROMPTS_IN_KERNELS[1], 8, 2, 2),  # still a step
        (PROMPTS_IN_KERNELS[1], 9, 4, 4),
        (PROMPTS_IN_KERNELS[1]._replace(out="float32"), 64, 2, 2),  # XLA's prompts
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


# Of more channels than a thread block takes.
CONVOLUTIONS = (
    Layer(key=128, value=128, value_heads=4, width=4, bias=True, before=264, holes=1),
    Layer(key=128, value=128, value_heads=1, width=3, conv="bfloat16", silu=False),
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("layer", "counts", "most"),
    [(CONVOLUTIONS[0], [3, 0, 1], 3), (CONVOLUTIONS[1], [33, 1, 2], None)],
    ids=str,
)
def test_a_convolution_by_itself(
    implementation: str, layer: Layer, counts: list[int], most: int | None
) -> None:
    given = make(
        layer,
        counts,
        sum(counts) + 4,
        1,
        read_ids=as_ids([3, 4, 99]),
        write_ids=as_ids([[3, 5, 6], [7, 8, 9], [1, -1, 2]]),
        write_after=as_ids([[1, 2, 3], [0, 1, 2], [0, 1, 2]]),  # none after no token
    )

    @jax.jit
    def convolved(given: Arrays) -> Any:
        pages = pages_of(layer, given.data)[1]
        bias = given.bias if layer.bias else None
        conv = Convolution(pages, given.weights, bias, silu=layer.silu)
        lens = given.lens if layer.holes else None
        lists = given.read_ids, given.write_ids, given.starts, lens, given.write_after
        requests = RequestStates(*lists, max_query_len=most)
        return causal_conv1d(given.inputs, conv, requests, implementation=implementation)

    with kernels_run():
        data, out = convolved(jax.tree.map(jnp.array, given))
    saved = windows_in(layer, given.data)
    expected, windows = np.zeros(out.shape), saved.copy()
    inputs = given.inputs.astype(dtype(layer.conv)).astype(np.float64)
    weights, bias = given.weights.astype(np.float64), given.bias.astype(np.float64)
    how = weights, bias if layer.bias else None, layer.silu
    for i, page in enumerate(given.read_ids):
        tokens = slice(given.starts[i], given.starts[i] + given.lens[i])
        reached, expected[tokens] = convolve(inputs[tokens], state_of(saved, page), *how)
        write_states(windows, reached, given.write_ids[i], given.write_after[i])
    np.testing.assert_array_equal(windows_in(layer, data), windows)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


GOOD = {
    "inputs": jnp.ones((3, 256)),
    "log_decay": jnp.zeros((3, 2)),
    "beta": jnp.ones((3, 2)),
    "states": StatePages(jnp.zeros((9, 8192)), jnp.float32, (2, 64, 64), 9),
    "num_key_heads": 1,
    "requests": RequestStates(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32)),
}
OF_REQUESTS = {field.name for field in dataclasses.fields(RequestStates)}


def arguments_of(changed: dict[str, Any], good: dict[str, Any] = GOOD) -> dict[str, Any]:
    """Returns good arguments with some of them, or fields of requests, changed."""
    fields = {name: value for name, value in changed.items() if name in OF_REQUESTS}
    requests = dataclasses.replace(good["requests"], **fields)
    others = {name: value for name, value in changed.items() if name not in fields}
    return good | {"requests": requests} | others


IDS = as_ids([0, 1])
STATES = GOOD["states"]
WINDOWS = StatePages(STATES.data, jnp.float32, (3, 256), 9)
TAPS, INTS = jnp.ones((4, 256)), functools.partial(jnp.zeros, dtype=jnp.int32)


def refused_states() -> Iterator[tuple[str, Any, type, str]]:
    """States that do not lie in their data, or have no such dtype."""
    for fields, text in (
        ({"start": 4}, "must lie within its extent"),
        ({"start": -4}, "must lie within its extent"),
        ({"num_pages": -1}, "states.num_pages=-1 must be an int"),
        ({"num_pages": 2.0}, "states.num_pages=2.0 must be an int"),
        ({"page_step": 0}, "states.page_step=0 must be an int"),
        ({"num_pages": 10}, "in extents 0 to 9, and"),
        ({"first": 1}, "in extents 1 to 9, and"),
        ({"first": -1}, "in extents -1 to 7, and"),
        ({"first": 2, "page_step": 2, "num_pages": 5}, "in extents 2 to 10, and"),
        ({"shape": (2, 64)}, "must have 3 sizes"),
        ({"shape": (2, 0, 64)}, "3 sizes of at least 1"),
        ({"data": jnp.zeros((9, 16384), jnp.bfloat16)}, "states.data must be"),
        ({"data": jnp.zeros((9, 2, 8192))}, "states.data must be"),
        ({"data": jnp.zeros((9, 40000), jnp.uint8), "start": 2}, "multiple of the element size"),
    ):
        yield "states", STATES._replace(**fields), ValueError, text
    yield "states", STATES._replace(dtype=jnp.int8), TypeError, "states.dtype must be one of"
    yield "states", STATES._replace(dtype="x"), TypeError, "dtype must be one of .* got 'x'"
    yield "states", 5, TypeError, "states must be of type StatePages, got int"


def refused_convolutions() -> Iterator[tuple[str, Any, type, str]]:
    lone, wide = WINDOWS._replace(data=jnp.zeros((9, 8192))), WINDOWS._replace(shape=(4, 256))
    half, bytewise = WINDOWS._replace(shape=(3, 128)), WINDOWS._replace(dtype=jnp.int8)
    within = "convolution.pages has pages in extents 0 to 9, and convolution.pages.data has 9"
    for conv, error, text in (
        (5, TypeError, "convolution must be of type Convolution, got int"),
        (Convolution(5, TAPS), TypeError, "must be of type StatePages"),
        (Convolution(bytewise, TAPS), TypeError, "convolution.pages.dtype must be one of"),
        (Convolution(WINDOWS, INTS((4, 256))), TypeError, "convolution.weights must be one"),
        (Convolution(WINDOWS, TAPS, INTS(256)), TypeError, "convolution.bias must be one"),
        (Convolution(WINDOWS._replace(num_pages=10), TAPS), ValueError, within),
        (Convolution(wide, jnp.ones((5, 256))), ValueError, "with a width of 2 to 4"),
        (
            Convolution(WINDOWS, jnp.ones((3, 256))),
            ValueError,
            "needs requests.num_computed_tokens",
        ),
        (Convolution(half, TAPS), ValueError, r"want \(4, 128\)"),
        (Convolution(WINDOWS, TAPS, jnp.ones((1, 256))), ValueError, "convolution.bias has shape"),
        (Convolution(half, jnp.ones((4, 128))), ValueError, r"convolution wants \[T, 128\]"),
        (Convolution(lone, TAPS), ValueError, "must be the very array"),
    ):
        yield "convolution", conv, error, text


RINGS = Replay(*(STATES._replace(shape=one) for one in replay_shapes(4, STATES.shape, 1, 4)))
REFUSED_RINGS = [
    ("replay", 5, TypeError, "replay must be of type Replay, got int"),
    ("replay", RINGS, ValueError, "replay needs requests.num_computed_tokens"),
    ("replay", RINGS._replace(drafts=2), ValueError, "replay.drafts=2 must be .* half of the 4"),
    ("replay", RINGS._replace(keys=RINGS.added), ValueError, r"replay has .* want \(\(1, 4, 64\)"),
    ("replay", RINGS._replace(keys=WINDOWS), ValueError, "replay.keys.shape=.* must have 3 sizes"),
    (
        *("replay", RINGS._replace(added=RINGS.added._replace(num_pages=8)), ValueError),
        "replay.added must have data, num_pages, first and page_step of states, the very same",
    ),
    ("num_computed_tokens", INTS(2), ValueError, r"num_computed_tokens must be int32\[3\]"),
]
BAD = [
    *REFUSED_RINGS,
    ("inputs", None, TypeError, "inputs must be an array of numbers, got NoneType"),
    ("inputs", jnp.ones((3, 250)), ValueError, r"want \[T, 256\]"),
    ("inputs", jnp.ones((256,)), ValueError, r"want \[T, 256\]"),
    ("inputs", jnp.ones((3, 256), jnp.int8), TypeError, "inputs must be one of float32"),
    ("inputs", jnp.ones((4, 256)), ValueError, "log_decay has shape"),
    ("requests", 5, TypeError, "requests must be of type RequestStates, got int"),
    ("scale", "1.5", ValueError, "scale='1.5' must be a finite number, or None"),
    ("scale", float("inf"), ValueError, "scale=inf must be a finite number, or None"),
    ("scale", 10**400, ValueError, "0 must be a finite number, or None"),
    ("normalize", 1, TypeError, "normalize must be of type bool, got int"),
    ("implementation", "triton", ValueError, "implementation='triton'; use one of"),
    ("log_decay", jnp.ones((3, 4)), ValueError, r"wants \(3, 2\) or \(3, 2, 64\)"),
    ("log_decay", INTS((3, 2)), TypeError, "log_decay must be one of float32"),
    ("beta", jnp.ones((3, 1)), ValueError, "beta has shape"),
    ("beta", INTS((3, 2)), TypeError, "beta must be one of float32"),
    ("num_key_heads", 3, ValueError, "num_key_heads=3 must be an int that divides"),
    ("num_key_heads", 0, ValueError, "num_key_heads=0 must be an int that divides"),
    ("num_key_heads", 1.0, ValueError, "num_key_heads=1.0 must be an int that divides"),
    ("read_ids", jnp.zeros(3), TypeError, "read_ids must be int32"),
    ("read_ids", INTS(2), ValueError, r"write_ids must be int32\[2\]"),
    ("write_ids", np.zeros(3, np.int64), TypeError, "write_ids must be int32"),
    ("write_ids", INTS((3, 2)), ValueError, "pass write_after"),
    ("write_ids", INTS((3, 0)), ValueError, "write_ids has 0 pages"),
    ("write_ids", INTS((2, 1)), ValueError, r"write_ids must be int32\[3, n\]"),
    ("query_lens", INTS(2), ValueError, r"query_lens must be int32\[3\]"),
    ("write_after", INTS((3, 2)), ValueError, r"write_after must be int32\[3, 1\]"),
    ("query_start_loc", INTS(3), ValueError, "query_start_loc must be int32"),
    ("max_query_len", 0, ValueError, "max_query_len=0 must be an int of at least 1"),
    ("max_query_len", 1.5, ValueError, r"max_query_len=1\.5 must be an int of at least 1"),
    ("out_dtype", "x", TypeError, "out_dtype must be one of float32, bfl.*, got 'x'"),
    *refused_states(),
    *refused_convolutions(),
]
BAD_SCANS = [
    ("values_first", 1, TypeError, "values_first must be of type bool, got int"),
    ("num_groups", 3, ValueError, "num_groups=3 must be an int that divides the 2 heads"),
    ("log_decay", jnp.zeros((3, 2, 64)), ValueError, r"log_decay has .* wants \(3, 2\)$"),
    ("steps", jnp.ones((3, 1)), ValueError, "steps has shape"),
    ("steps", INTS((3, 2)), TypeError, "steps must be one of float32"),
    ("requests", RequestStates(IDS, IDS), ValueError, "3 tokens for 2 requests"),
]
GOOD_SCAN = {name: GOOD[name] for name in ("inputs", "log_decay", "states", "requests")}
GOOD_SCAN |= {"steps": GOOD["beta"], "num_groups": 1}


@pytest.mark.parametrize(
    ("kernel", "name", "value", "error", "text"),
    [*((gated_delta_rule, *bad) for bad in BAD), *((selective_scan, *bad) for bad in BAD_SCANS)],
)
def test_bad_arguments_are_refused_by_name(kernel, name, value, error, text) -> None:
    good = GOOD if kernel is gated_delta_rule else GOOD_SCAN
    with pytest.raises(error, match=text):
        kernel(**arguments_of({name: value}, good))


@pytest.mark.parametrize(
    ("given", "equal"),
    [
        (
            {"write_ids": [[4, 5], [6, 7], [8, 0]], "write_after": [[0, 1], [1, 2], [1, 0]]},
            {"write_ids": [5, 6, 8]},
        ),
        (
            {"write_ids": [4, 5, 6], "query_lens": [1, 0, 1]},
            {"read_ids": [1, -1, 3], "write_ids": [4, -1, 6]},
        ),
    ],
    ids=["several pages", "a request without a token"],
)
def test_requests_of_single_tokens_need_no_starts(given: Any, equal: Any) -> None:
    def run_with(fields: dict[str, Any]) -> Any:
        fields = {name: as_ids(ids) for name, ids in ({"read_ids": [1, 2, 3]} | fields).items()}
        return jax.jit(lambda: gated_delta_rule(**arguments_of(fields)))()

    found, wanted = run_with(given), run_with(equal)
    for array, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_requests_nothing_runs_and_all_is_padding(implementation, count) -> None:
    none, start = as_ids([]), as_ids([0])
    states = GOOD["states"]._replace(shape=(2, 32, 96))
    inputs, beta = (jnp.full((count, n), jnp.nan) for n in (256, 2))
    requests = RequestStates(none, none, start, max_query_len=1)
    how = {"requests": requests, "implementation": implementation}

    def run_both(data: Any) -> Any:
        pages = states._replace(data=data), WINDOWS._replace(data=data)
        conv = Convolution(pages[1], jnp.ones((4, 256)))
        arguments = {"states": pages[0], "inputs": inputs}
        arguments |= {"log_decay": beta, "beta": beta, "convolution": conv} | how
        arguments["out_dtype"] = jnp.bfloat16
        return (causal_conv1d(inputs, conv, **how), gated_delta_rule(**GOOD | arguments))

    lowered = jax.jit(run_both).trace(states.data).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in lowered.as_text()
    wanted = [((256,), "float32"), ((2, 32), "bfloat16")]
    for (data, out), (shape, kind) in zip(run_both(states.data), wanted, strict=True):
        np.testing.assert_array_equal(data, states.data)
        np.testing.assert_array_equal(out, np.zeros((count, *shape)))
        assert out.dtype == kind


@pytest.mark.parametrize(
    ("name", "out", "key", "value", "text"),
    [
        ("bfloat16", "bfloat16", 64, 64, ""),
        ("bfloat16", "float16", 128, 192, ""),
        ("bfloat16", "bfloat16", 256, 64, "keys are 256 wide and values 64"),
        ("bfloat16", "bfloat16", 64, 96, "keys are 64 wide and values 96"),
        ("float16", "float16", 64, 64, "inputs are float16"),
        ("bfloat16", "float32", 64, 64, "outputs are float32"),
    ],
)
def test_prompts_of_other_shapes_are_left_to_xla(name, out, key, value, text) -> None:
    inputs: Any = jax.ShapeDtypeStruct((9, 2 * key + value), dtype(name))
    rule = Rule(1, 1, key, value, delta=True, normalize=True, scale=1.0)
    tokens = Tokens(inputs, inputs, inputs, GOOD["states"])
    reason = limits.why_not_prompt(rule, tokens, dtype(out))
    assert (reason or "").startswith(text) and bool(reason) == bool(text)


@pytest.mark.usefixtures("hopper")
@given(
    *(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    *(st.sampled_from([16, 32, 64, 96, 128, 192, 256]) for _ in range(2)),
)
def test_the_kernel_of_a_step_takes_rows_of_whole_lines_of_memory(name, other, key, value) -> None:
    """Of keys and of values, in the dtype of the states and in that of the inputs."""
    rule = Rule(1, 1, key, value, delta=True, normalize=True, scale=1.0)
    inputs: Any = jax.ShapeDtypeStruct((9, rule.columns), dtype(other))
    data: Any = jax.ShapeDtypeStruct((9, value * key * dtype(name).itemsize), jnp.uint8)
    tokens = Tokens(inputs, inputs, inputs, StatePages(data, dtype(name), (1, value, key), 9))
    ids: Any = jax.ShapeDtypeStruct((9, 1), jnp.int32)
    reason = limits.why_not_step(rule, tokens, Requests(ids, ids), 1) or ""
    rows = [size * dtype(of).itemsize for size in (key, value) for of in (name, other)]
    assert bool(reason) == any(row % 128 for row in rows)
    assert reason.startswith("keys are" if reason else "")


@given(
    *(st.integers(0, 40), st.integers(100, 140), st.sampled_from(range(128, 2049, 128))),
    *(st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2)),
)
def test_threads_take_as_many_channels_as_lie_aligned_in_each_page(
    start, extent, channels, name, odd
) -> None:
    """Of extents that are no whole elements none do."""
    item = dtype(name).itemsize
    extent_bytes = (extent + 8192) * item + odd
    data: Any = jax.ShapeDtypeStruct((9, extent_bytes), jnp.uint8)
    pages = StatePages(data, dtype(name), (1, channels), 9, start=start * item)
    weights: Any = jax.ShapeDtypeStruct((2, channels), dtype(name))
    addresses = [page * extent_bytes + start * item for page in range(9)]
    fitting = [
        n
        for n in (1, 2, 4, 8)
        if n * item <= 16
        and channels % (128 * n) == 0
        and not any(a % (n * item) for a in addresses)
    ]
    conv = Convolution(pages, weights)
    assert limits.channels_per_thread(conv) == max(fitting, default=0)
    assert bool(limits.why_not_convolution(conv)) == (not fitting)


WIDE = GOOD["states"]._replace(data=jnp.zeros((9, 2 * 64 * 512)))


@needs_mosaic
@pytest.mark.parametrize(
    ("states", "text"),
    [
        (StatePages(jnp.zeros((9, 2 * 24 * 24)), jnp.float32, (2, 24, 24), 9), "keys are 24 wide"),
        (StatePages(jnp.zeros((9, 2 * 24 * 64)), jnp.float32, (2, 24, 64), 9), "values 24, and"),
        (WIDE._replace(shape=(2, 64, 512)), "wider than 256"),
        (WIDE._replace(shape=(2, 512, 64)), "wider than 256"),
        (WIDE._replace(start=128), "not multiples of 256 bytes"),
        (GOOD["states"]._replace(data=jnp.zeros((9, 8192 + 32))), "not multiples of 256 bytes"),
        (StatePages(jnp.zeros((9, 16448)), jnp.float32, (2, 64, 128), 9), "multiples of 512 bytes"),
        (StatePages(jnp.zeros((9, 16448)), jnp.float32, (2, 128, 64), 9), ""),
        # Also those of other layers, among which a few pages lie.
        (
            GOOD["states"]._replace(data=jax.ShapeDtypeStruct((2**24, 8192), jnp.float32)),
            "pages have more rows than int32 counts",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_mosaic_does_not_support_is_named(dtype: str, states: StatePages, text: str) -> None:
    _, value, key = states.shape
    inputs = jnp.ones((3, 2 * key + 2 * value), dtype)

    def run(data: jax.Array, implementation: Any) -> Any:
        given = {"states": states._replace(data=data), "inputs": inputs}
        return gated_delta_rule(**GOOD | given, implementation=implementation)

    jax.eval_shape(functools.partial(run, implementation=None), states.data)
    refused = pytest.raises(NotImplementedError, match=text) if text else contextlib.nullcontext()
    with refused:
        jax.eval_shape(functools.partial(run, implementation="mosaic_gpu"), states.data)
