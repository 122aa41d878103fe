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
    """The tokens of a request, prompt first, and the logits of those that were picked.

    logits: f32[new tokens, vocab].
    """

    tokens: Sequence[int]
    logits: np.ndarray


class Comparison(NamedTuple):
    """The largest difference between two logits of the same token, and the tokens that agree."""

    largest_difference: float
    num_equal: int  # tokens that both would have picked
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
    """Computes every request anew, prompt and served tokens at once, and compares the logits.

    Args:
      served: answers.
    """
    step = _compiled(model, tuple(layers.items()))
    largest, equal, count = 0.0, 0, 0
    for batch in itertools.batched(served, BATCH):
        ids = np.zeros((BATCH, max_model_len), np.int32)
        for row, answer in zip(ids, batch, strict=False):
            row[: len(answer.tokens)] = answer.tokens
        expected = np.asarray(step(params, ids))
        for row, answer in zip(expected, batch, strict=False):
            got = answer.logits
            first = len(answer.tokens) - len(got) - 1
            wanted = row[first : first + len(got)]
            largest = float(np.maximum(largest, np.abs(got - wanted).max()))  # NaN stays
            equal += int((got.argmax(axis=-1) == wanted.argmax(axis=-1)).sum())
            count += len(got)
            on_finish()
    return Comparison(largest, equal, count)


@functools.lru_cache(maxsize=4)
def _compiled(model: Model, layers: tuple[tuple[str, object], ...]) -> Callable[..., jax.Array]:
    """Returns `_logits_of_all` of a model, compiled once however many runs are compared."""
    return jax.jit(functools.partial(_logits_of_all, model, dict(layers)))


def _logits_of_all(
    model: Model, layers: Mapping[str, object], params: Params, ids: jax.Array
) -> jax.Array:
    """Returns f32[B, L, vocab] for whole requests, int32[B, L]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    index = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    tokens = Tokens(ids.reshape(-1), positions.reshape(-1), index)
    with jax.default_matmul_precision("highest"):
        _, x = forward(model, params, tokens, NoMemory(layers, tokens))
        return logits(model, params, x).reshape(*ids.shape, -1)
