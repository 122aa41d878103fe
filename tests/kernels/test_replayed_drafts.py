"""Rings that take drafts: steps whose last tokens are rejected, next to float64 token by token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    Convolution,
    Replay,
    RequestStates,
    StatePages,
    _mosaic,
    gated_delta_rule,
    selective_scan,
)
from pallas_kernels._recurrence.rule import replay_shapes
from tests.helpers import ON_GPU, kernels_run, needs_mosaic
from tests.reference_recurrence import RecurrentCase, convolve, normalized

PAGES, REQUESTS, TOKENS, STEPS = 9, 3, 24, 14


class Layer(NamedTuple):
    """A layer, the rows of its ring, and the most drafts of a step."""

    rows: int
    drafts: int
    width: int = 0
    delta: bool = True
    state: Any = np.float32
    key_heads: int = 1
    heads: int = 2
    key: int = 8
    value: int = 4
    implementation: str = "xla"
    inputs: Any = np.float32

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """The arrays of a page, and their dtypes."""
        window = (max(self.width - 1 + self.drafts, 1), self.channels), self.inputs
        states, item = (self.heads, self.value, self.key), np.dtype(self.state).itemsize
        rings = replay_shapes(self.rows, states, self.key_heads, item, self.drafts)
        return [window, *((shape, self.state) for shape in (states, *rings))]


LAYERS = {
    "delta": Layer(9, 3, width=3, key_heads=2),
    "one of each, in bfloat16": Layer(
        4, 1, width=2, delta=False, state=ml_dtypes.bfloat16, heads=1, key=1, value=1
    ),
}
KERNEL = Layer(
    8,
    2,
    width=3,
    delta=False,
    key=128,
    value=64,
    inputs=ml_dtypes.bfloat16,
    implementation="mosaic_gpu",
)


@functools.partial(jax.jit, static_argnames=("layer", "form"))
def run(layer: Layer, form: str, data: Any, given: dict[str, Any], lists: dict[str, Any]) -> Any:
    """Runs a step of one token each, of few, or of any number."""
    pages, start = list[StatePages](), 0
    for shape, dtype in layer.shapes:
        pages.append(StatePages(data, dtype, shape, num_pages=PAGES, start=start))
        start += pages[-1].num_bytes
    conv = Convolution(pages[0], given["weights"]) if layer.width else None
    computed = lists["computed"]
    requests = RequestStates(lists["read"], lists["write"], num_computed_tokens=computed)
    if form != "one":
        most = 1 + layer.drafts if form == "few" else None
        args = lists["read"], lists["write"], lists["starts"], lists["lens"]
        requests = RequestStates(*args, max_query_len=most, num_computed_tokens=computed)
    options = {"implementation": layer.implementation, "convolution": conv}
    options |= {"replay": Replay(*pages[2:], drafts=layer.drafts)}
    tokens = given["inputs"], given["log_decay"], given["beta"], pages[1], requests
    if layer.delta:
        return gated_delta_rule(*tokens, num_key_heads=layer.key_heads, **options)
    return selective_scan(*tokens, num_groups=layer.key_heads, values_first=False, **options)


class Request:
    """Tokens that are in the cache, and the page of their state."""

    def __init__(self, layer: Layer, page: int, tokens: list[dict[str, np.ndarray]]):
        self.layer, self.page, self.tokens = layer, page, tokens

    def outputs(self, weights: np.ndarray, more: list[dict[str, np.ndarray]]) -> np.ndarray:
        """Returns those of more tokens, as the definition has it."""
        layer, tokens = self.layer, [*self.tokens, *more]
        names = ("inputs", "log_decay", "beta")
        x, log, beta = (np.stack([t[n] for t in tokens]).astype(np.float64) for n in names)
        if layer.width:
            _, x = convolve(x, np.zeros((layer.width - 1, x.shape[1])), weights, None, True)
        queries, keys, values = np.split(x, np.cumsum([layer.key_heads * layer.key] * 2), axis=1)
        queries, keys = (y.reshape(len(x), layer.key_heads, -1) for y in (queries, keys))
        if layer.delta:
            queries, keys = normalized(queries) * layer.key**-0.5, normalized(keys)
        queries, keys = (np.repeat(y, layer.heads // layer.key_heads, 1) for y in (queries, keys))
        values = values.reshape(len(x), layer.heads, layer.value)
        case = RecurrentCase(queries, keys, values, np.exp(log)[..., None], beta, layer.delta)
        state = np.zeros((layer.heads, layer.value, layer.key))
        return np.stack(case.run(state, range(len(x)))[1][len(self.tokens) :])


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_step_goes_on_after_the_drafts_that_were_accepted(name: str, seed: int) -> None:
    """Requests also begin, go on as others (forks), move to other pages, and have long prompts."""
    check(LAYERS[name], seed, STEPS)


@needs_mosaic
def test_the_kernel_goes_on_after_the_drafts_that_were_accepted(monkeypatch: Any) -> None:
    if not ON_GPU:
        monkeypatch.setattr(_mosaic, "OPERANDS_IN_REGISTERS", False)
    with kernels_run():
        check(KERNEL, 1, STEPS if ON_GPU else 5)


def check(layer: Layer, seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    size = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layer.shapes)
    row = layer.key * np.dtype(layer.state).itemsize  # of which kernels take whole ones
    data = jnp.full((PAGES, -(-size // row) * row), 0xFF, jnp.uint8)  # NaN
    weights = rng.normal(size=(max(layer.width, 1), layer.channels)).astype(np.float32) / 2
    requests = [Request(layer, -1, []) for _ in range(REQUESTS)]
    is_exact = layer.state == layer.inputs == np.float32 and not ON_GPU
    bound = 5e-5 if is_exact else 4e-2
    for _ in range(steps):
        form = rng.choice(["one", "few", "any"])
        if form != "one" and rng.random() < 0.3:  # a fork, or a request that begins anew
            i, j = rng.integers(0, REQUESTS, 2)
            requests[i] = Request(layer, requests[j].page, list(requests[j].tokens))
            if rng.random() < 0.3:
                requests[i] = Request(layer, -1, [])
        most = {"one": 1, "few": 1 + layer.drafts, "any": TOKENS // REQUESTS}[form]
        counts = rng.integers(1, most + 1, REQUESTS) * (form == "one" or rng.random(REQUESTS) < 0.9)
        tokens = [token(layer, rng) for _ in range(counts.sum())]
        padding = REQUESTS if form == "one" else TOKENS
        given = {"weights": weights}
        for n, like in token(layer, rng).items():
            given[n] = np.full((padding, *like.shape), np.nan, like.dtype)
            for array, one in zip(given[n], tokens, strict=False):
                array[:] = one[n]
        shared = [r.page for r in requests]
        free = [*rng.permutation(np.setdiff1d(range(PAGES), shared))]
        write = list[int]()
        for request in requests:  # a page that others read is left to them
            moves = request.page < 0 or shared.count(request.page) > 1 or rng.random() < 0.2
            write.append(int(free.pop()) if moves else request.page)
        write = [page if n else -1 for page, n in zip(write, counts, strict=True)]
        starts = np.cumsum([0, *counts])
        lists = {"read": shared, "write": write, "starts": starts, "lens": counts}
        lists["computed"] = [len(r.tokens) for r in requests]
        lists = {n: np.asarray(array, np.int32) for n, array in lists.items()}
        data, out = run(layer, str(form), data, given, lists)
        for i, request in enumerate(requests):
            mine = tokens[starts[i] : starts[i + 1]]
            if mine:
                expected = request.outputs(weights.astype(np.float64), mine)
                found = np.asarray(out[starts[i] : starts[i + 1]], np.float64)
                np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)
                may_reject = len(mine) <= 1 + layer.drafts
                accepted = rng.integers(1, len(mine) + 1) if may_reject else len(mine)
                request.tokens += mine[:accepted]
                request.page = write[i]


def token(layer: Layer, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the inputs of a token; some keep nothing of a state, others all of it."""
    strength = rng.choice([0.0, 0.1, 1.0, np.inf], p=[0.3, 0.4, 0.25, 0.05])
    token = {
        "inputs": rng.normal(size=layer.channels),
        "log_decay": -rng.exponential(size=layer.heads) * strength,
        "beta": rng.uniform(size=layer.heads),
    }
    token = {name: array.astype(np.float32) for name, array in token.items()}
    return token | {"inputs": token["inputs"].astype(layer.inputs)}
