"""Log-probabilities on the device: of the most likely tokens, and of prompts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.internal.mesh import with_auto_axes
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.step import StepContext

PIECE = 512  # tokens whose logits are in memory at a time


def most_likely(logits: Array, count: int) -> Array:
    """Returns the most likely tokens of each row of logits, the likeliest first.

    Args:
      logits: float[N, vocab].

    Returns:
      int32[N, 2, count], token ids, and the bits of their log-probabilities in f32.
    """
    if not count:
        return jnp.zeros((len(logits), 2, 0), jnp.int32)
    logits = logits.astype(jnp.float32)
    top, ids = lax.top_k(logits, count)
    top = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.stack([ids, lax.bitcast_convert_type(top, jnp.int32)], axis=1)


def next_tokens(step: StepContext, of_requests: Array) -> Array:
    """Returns the token after each of a step, int32[T].

    Args:
      of_requests: int32[B], the one after each request's last.
    """
    count = step.token_ids.size
    last = jnp.where(step.batch.query_lens > 0, step.last_tokens, count)
    return jnp.roll(step.token_ids, -1).at[last].set(of_requests, mode="drop")


def prompt_logprobs(
    head: Callable[[Array], Array], hidden: Array, tokens: Array, num_top: int
) -> Array:
    """Returns the log-probability of a token after each hidden state, and of the most likely ones.

    Args:
      head: makes logits, float[N, vocab], of hidden states.
      hidden: float[T, ...].
      tokens: int32[T].
      num_top: how many of the most likely ones.

    Returns:
      int32[T, 1 + 2 * num_top]: bits of the log-probability, ids, and the bits of theirs.
    """

    def of_piece(piece: tuple[Array, Array]) -> Array:
        return with_auto_axes(of_logits, head(piece[0]), piece[1])

    def of_logits(logits: Array, wanted: Array) -> Array:
        logits = logits.astype(jnp.float32)
        picked = jnp.take_along_axis(logits, wanted[:, None], axis=-1)
        picked = picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        bits, top = lax.bitcast_convert_type(picked, jnp.int32), most_likely(logits, num_top)
        return jnp.concatenate([bits, top.reshape(len(top), 2 * num_top)], axis=1)

    size = tokens.size
    if size <= PIECE:
        return of_piece((hidden, tokens))
    pieces = cdiv(size, PIECE)

    def cut(rows: Array) -> Array:
        rows = jnp.pad(rows, [(0, pieces * PIECE - size)] + [(0, 0)] * (rows.ndim - 1))
        return rows.reshape(pieces, PIECE, *rows.shape[1:])

    return lax.map(of_piece, (cut(hidden), cut(tokens))).reshape(pieces * PIECE, -1)[:size]
