"""Served tokens against the same model over whole requests, without any cache."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.demo.memory import NoMemory
from jaxkv._src.demo.model import Model, Params, Tokens, forward, logits

BATCH = 4  # requests side by side


class Answer(NamedTuple):
    """The tokens of a request, prompt first, and the log-probabilities of those generated.

    is_greedy: whether these are the most likely ones; otherwise they were drawn.
    """

    tokens: Sequence[int]
    logprobs: np.ndarray  # f64[new tokens]
    is_greedy: bool


class Comparison(NamedTuple):
    """The largest difference between two log-probabilities of a token, and the tokens that agree.

    num_picked: tokens that were picked as the most likely ones; num_equal: those of them that the
      model without a cache picks, too.
    """

    largest_difference: float
    num_equal: int
    num_picked: int
    num_tokens: int


def compare(
    model: Model,
    params: Params,
    layers: Mapping[str, object],
    served: Sequence[Answer],
    *,
    max_model_len: int,
    on_finish: Callable[[], object],
) -> Comparison:
    """Computes every request anew, prompt and served tokens at once, and compares the results.

    Args:
      served: answers.
    """
    step = _compiled(model, tuple(layers.items()))
    largest, equal, picked, count = 0.0, 0, 0, 0
    for batch in itertools.batched(served, BATCH):
        ids = np.zeros((BATCH, max_model_len), np.int32)
        for row, answer in zip(ids, batch, strict=False):
            row[: len(answer.tokens)] = answer.tokens
        expected = np.asarray(step(params, ids))
        for row, answer in zip(expected, batch, strict=False):
            num_new = len(answer.logprobs)
            first = len(answer.tokens) - num_new - 1
            wanted, tokens = row[first : first + num_new], np.array(answer.tokens[-num_new:])
            logprobs = np.take_along_axis(wanted, tokens[:, None], axis=-1)[:, 0]
            largest = float(np.maximum(largest, np.abs(answer.logprobs - logprobs).max()))
            if answer.is_greedy:
                equal += int((wanted.argmax(axis=-1) == tokens).sum())
                picked += num_new
            count += num_new
            on_finish()
    return Comparison(largest, equal, picked, count)  # NaN, if one of them is


@functools.lru_cache(maxsize=4)
def _compiled(model: Model, layers: tuple[tuple[str, object], ...]) -> Callable[..., jax.Array]:
    """Returns `_logprobs_of_all` of a model, compiled once however many runs are compared."""
    return jax.jit(functools.partial(_logprobs_of_all, model, dict(layers)))


def _logprobs_of_all(
    model: Model, layers: Mapping[str, object], params: Params, ids: jax.Array
) -> jax.Array:
    """Returns log-probabilities f32[B, L, vocab] for whole requests, int32[B, L]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    index = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    tokens = Tokens(ids.reshape(-1), positions.reshape(-1), index)
    with jax.default_matmul_precision("highest"):
        x = forward(model, params, tokens, NoMemory(layers, tokens))
        return jax.nn.log_softmax(logits(model, params, x)).reshape(*ids.shape, -1)
