"""A model of every kind of layer for an engine, and the same in NumPy, without a cache."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv

VOCAB, HIDDEN, HEADS, WINDOW = 50, 16, 2, 6
WIDTH = HIDDEN // HEADS
KV: dict[str, Any] = {"block_size": 4, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": "f32"}
SPECS: dict[str, Any] = {
    "full": jaxkv.FullAttentionSpec(**KV),
    "window": jaxkv.SlidingWindowSpec(sliding_window=WINDOW, **KV),
    "latent": jaxkv.MLASpec(block_size=4, head_size=HIDDEN, value_size=WIDTH, dtype="f32"),
    "state": jaxkv.StateSpec(block_size=4, shapes=((1, 4, 1),), dtypes=("f32",)),
}
Params = dict[str, Any]


def make_plan(
    layers: tuple[str, ...] = tuple(SPECS),
    num_blocks: int = 60,
    max_model_len: int = 48,
    ranks: int = 1,
) -> jaxkv.Plan:
    of_rank = {"num_kv_heads": HEADS // ranks} if ranks > 1 else {}
    return jaxkv.plan_cache(
        {layer: dataclasses.replace(SPECS[layer], **of_rank) for layer in layers},
        2**30,
        max_model_len=max_model_len,
        num_blocks_override=num_blocks,
        limits=jaxkv.Limits(max_in_flight_tokens=16),
    )


@functools.cache
def make_params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return np.asarray(rng.normal(size=shape) / shape[0] ** 0.5, np.float32)

    params: Params = {"embed": matrix(VOCAB, HIDDEN) * 7, "head": matrix(HIDDEN, VOCAB)}
    params["turn"] = matrix(1, HIDDEN) * 0.1
    for layer in SPECS:
        into = {"q": HEADS * HIDDEN if layer == "latent" else HIDDEN, "k": HIDDEN, "v": HIDDEN}
        into["u"] = 4
        params[layer] = {name: matrix(HIDDEN, width) for name, width in into.items()}
        params[layer]["q"] *= 0.3  # scores of a few units, so that rounding stays small
        params[layer]["o"] = matrix(4 if layer == "state" else HIDDEN, HIDDEN)
    return jax.device_put(params)


# --- over the cache -------------------------------------------------------------------


@jax.default_matmul_precision("highest")  # a GPU's products of float32 are of TF32 otherwise
def forward(params: Params, step: jaxkv.StepContext, hidden: bool = False) -> jax.Array:
    x = params["embed"][step.token_ids]
    x = x + jnp.sin(step.positions[:, None].astype(jnp.float32) * params["turn"])
    for layer in step.batch.layout.layer_numbers:
        x = x + mixed(params[layer], layer, x, step) @ params[layer]["o"]
    return x if hidden else x[step.last_tokens] @ params["head"]


@jax.default_matmul_precision("highest")
def head(params: Params, hidden: jax.Array) -> jax.Array:
    return hidden @ params["head"]


@jax.jit
def hidden_states(params: Params, step: jaxkv.StepContext) -> jaxkv.ModelOutput:
    """The same for an engine with a `head`, with side outputs, in a jit of its own."""
    x = forward(params, step, hidden=True)
    return jaxkv.ModelOutput(x, step, side={"x": x, "at": (step.token_ids, step.positions)})


@jax.jit
def forward_in_a_jit(params: Params, step: jaxkv.StepContext) -> jaxkv.ModelOutput:
    """The same in a jit of its own, whose copy of the step is the one that has written."""
    return jaxkv.ModelOutput(forward(params, step), step)


def mixed(weights: Params, layer: str, x: jax.Array, step: jaxkv.StepContext) -> jax.Array:
    if layer == "state":
        return recurrent(x @ weights["u"], step)
    queries = (x @ weights["q"]).reshape(len(x), HEADS, -1)
    if layer == "latent":
        return step.attend(layer, queries, x @ weights["k"]).reshape(len(x), -1)
    keys, values = ((x @ weights[name]).reshape(len(x), HEADS, WIDTH) for name in "kv")
    return step.attend(layer, queries, keys, values).reshape(len(x), -1)


def recurrent(inputs: jax.Array, step: jaxkv.StepContext) -> jax.Array:
    """``state = 0.7 * state + input``, token by token."""
    qkv = jnp.concatenate([jnp.ones((len(inputs), 2)), inputs], axis=1)
    out = step.linear_attention("state", qkv, jnp.log(jnp.array([0.7])))
    return out.reshape(inputs.shape)


# --- without it -----------------------------------------------------------------------


def whole(params: Params, layers: tuple[str, ...], ids: list[int]) -> np.ndarray:
    """Returns the logits of all tokens, f64[len(ids), VOCAB]."""
    return whole_hidden(params, layers, ids) @ np.asarray(params["head"], np.float64)


def whole_hidden(params: Params, layers: tuple[str, ...], ids: list[int]) -> np.ndarray:
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = weights["embed"][ids] + np.sin(np.arange(len(ids))[:, None] * weights["turn"])
    for layer in layers:
        w = weights[layer]
        x = x + (states(x @ w["u"]) if layer == "state" else attention(w, layer, x)) @ w["o"]
    return x


def states(inputs: np.ndarray) -> np.ndarray:
    out = np.zeros_like(inputs)
    for i, new in enumerate(inputs):
        out[i] = 0.7 * out[i - 1] + new if i else new
    return out


def attention(w: Params, layer: str, x: np.ndarray) -> np.ndarray:
    queries = (x @ w["q"]).reshape(len(x), HEADS, -1)
    if layer == "latent":
        keys = np.repeat((x @ w["k"])[:, None], HEADS, axis=1)
        values = keys[..., :WIDTH]
    else:
        keys, values = ((x @ w[name]).reshape(len(x), HEADS, WIDTH) for name in "kv")
    scores = np.einsum("qhk,shk->hqs", queries, keys) / queries.shape[-1] ** 0.5
    distance = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
    seen = (distance >= 0) & (distance < (WINDOW if layer == "window" else len(x)))
    scores = np.where(seen, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("hqs,shv->qhv", scores, values).reshape(len(x), -1)


# --- what a sampler draws -------------------------------------------------------------


@jax.jit
@jax.vmap
def noise(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
    return jax.random.gumbel(key, (VOCAB,))


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: np.ndarray


def redrawn(
    params: Params,
    layers: tuple[str, ...],
    prompt: list[int],
    sampling: jaxkv.Sampling,
    output: Any,
    longest: int,
) -> Sampled:
    """Returns the tokens that follow from an output's own, one by one, and their logprobs."""
    logits = whole(params, layers, [*prompt, *output.tokens])[len(prompt) - 1 : -1]
    seeds = np.full(longest, sampling.seed or 0, np.uint32)
    gumbel = np.asarray(noise(seeds, np.full(longest, output.sample), np.arange(longest)))
    tokens = [
        int(row.argmax()) if not sampling.temperature else int((kept(row, sampling) + g).argmax())
        for row, g in zip(logits, gumbel, strict=False)
    ]
    return Sampled(tokens, chosen(logprobs_of(logits), output.tokens))


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def chosen(logprobs: np.ndarray, tokens: list[int]) -> np.ndarray:
    return np.take_along_axis(logprobs, np.array([tokens]).T, 1)[:, 0]


def assert_details(
    params: Params,
    layers: tuple[str, ...],
    prompt: list[int],
    sampling: jaxkv.Sampling,
    output: Any,
    atol: float = 1e-4,
) -> None:
    """Compares what an output with all tokens holds besides them with the model without a cache."""
    ids, num = [*prompt, *output.tokens], len(prompt)
    x = whole_hidden(params, layers, ids)
    logprobs = logprobs_of(whole(params, layers, ids))[:-1]  # of the token after each
    asked = sampling.prompt_logprobs
    assert (output.prompt_logprobs is None) == (asked is None)
    assert (output.top_logprobs is None) == (not sampling.logprobs)
    assert (output.prompt_top_logprobs is None) == (not asked)
    assert (output.side is None) == (not sampling.side)
    if asked is not None:
        assert output.prompt_logprobs.dtype == np.float32
        wanted = [np.nan, *chosen(logprobs[: num - 1], prompt[1:])]
        np.testing.assert_allclose(output.prompt_logprobs, wanted, atol=atol)
    if asked:
        assert (output.prompt_top_logprobs.token_ids[0] == -1).all()
        top = jaxkv.TopLogprobs(*(part[1:] for part in output.prompt_top_logprobs))
        assert_top(top, logprobs[: num - 1], asked, atol)
    if sampling.logprobs:
        assert_top(output.top_logprobs, logprobs[num - 1 :], sampling.logprobs, atol)
    if sampling.side:
        tokens, positions = output.side["at"]
        assert tokens.tolist() == ids[:-1] and positions.tolist() == [*range(len(ids) - 1)]
        np.testing.assert_allclose(output.side["x"], x[:-1], atol=20 * atol)


def assert_top(top: jaxkv.TopLogprobs, logprobs: np.ndarray, count: int, atol: float) -> None:
    assert top.token_ids.dtype == np.int32 and top.logprobs.dtype == np.float32
    assert top.token_ids.shape == top.logprobs.shape == (len(logprobs), count)
    np.testing.assert_allclose(top.logprobs, -np.sort(-logprobs)[:, :count], atol=atol)
    found = np.take_along_axis(logprobs, top.token_ids.astype(np.int64), 1)
    np.testing.assert_allclose(top.logprobs, found, atol=atol)


def kept(logits: np.ndarray, sampling: jaxkv.Sampling) -> np.ndarray:
    """Returns logits over the temperature, -inf where a limit leaves a token out; by sorting."""
    scaled = (logits - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k]
    parts = np.exp(scaled[order])
    before = np.cumsum(parts / parts.sum()) - parts / parts.sum()
    order = order[(before < sampling.top_p * (1 - 1e-7)) & (parts >= sampling.min_p)]
    out = np.full(logits.size, -np.inf)
    out[order] = scaled[order]
    return out
