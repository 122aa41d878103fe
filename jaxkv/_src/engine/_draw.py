"""The sampler: a token and its log-probability for every sample of a step."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.engine._samples import NAMES, RECORD, RECORD_SIZE
from jaxkv._src.engine._sampling import Kind


def fields_of(records: Array) -> dict[str, Array]:
    """Returns the fields of `RECORD`s by name, [S, 1]; of int32[S * RECORD_SIZE]."""
    records = records.reshape(-1, RECORD_SIZE)
    of = {name: records[:, at:][:, : RECORD[name].itemsize // 4] for at, name in enumerate(NAMES)}
    return {name: lax.bitcast_convert_type(part, RECORD[name].base) for name, part in of.items()}


def draw(logits: Array, of: Mapping[str, Array], kind: Kind) -> tuple[Array, Array]:
    """Draws the next token of every sample.

    Args:
      logits: float[B, vocab].
      of: the `fields_of` S records.
      kind: the most that any of them needs. It is static, because a condition on the device keeps
        the host from running ahead.

    Returns:
      int32[S], the tokens, and f32[S], their log-probabilities in the logits as they are given.
    """
    logits = logits.astype(jnp.float32)[of["index"][:, 0]]
    scores = logits
    if kind != Kind.GREEDY:
        is_drawn = of["temperature"] > 0
        scores = logits / jnp.where(is_drawn, of["temperature"], 1)
        if kind == Kind.LIMITED:
            scores = _keep(scores, of["top_k"], of["top_p"], of["min_p"])
        keys = jax.vmap(_key)(of["seed"][:, 0], of["sample"][:, 0], of["position"][:, 0])
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        scores = jnp.where(is_drawn, scores + noise, logits)
    tokens = scores.argmax(axis=-1).astype(jnp.int32)
    picked = jnp.take_along_axis(logits, tokens[:, None])[:, 0]
    return tokens, picked - jax.nn.logsumexp(logits, axis=-1)


def _key(seed: Array, sample: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)


def _keep(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns the logits, with -inf for tokens that a limit leaves out; one limit after another."""
    order = _ordered(logits)
    count = jnp.where(top_k > 0, top_k, logits.shape[-1])
    kth = _threshold(order, lambda above: above.sum(axis=-1, keepdims=True) >= count)
    kept = jnp.where(order >= kth, logits, -jnp.inf)
    parts = jax.nn.softmax(kept)
    wanted = jnp.minimum(top_p, 1 - 1e-6) * parts.sum(axis=-1, keepdims=True)

    def reaches(above: Array) -> Array:
        return jnp.where(above, parts, 0).sum(axis=-1, keepdims=True) >= wanted

    is_kept = (top_p == 1) | (order >= _threshold(order, reaches))
    least = jnp.where(min_p > 0, kept.max(axis=-1, keepdims=True) + jnp.log(min_p), -jnp.inf)
    return jnp.where(is_kept & (kept >= least), kept, -jnp.inf)


def _threshold(order: Array, is_enough: Callable[[Array], Array]) -> Array:
    """Returns the largest uint32[S, 1] such that the elements from there on are enough.

    It is found bit by bit, in 32 passes, because sorting a vocabulary takes longer.
    """

    def add_bit(i: Array, found: Array) -> Array:
        higher = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(is_enough(order >= higher), higher, found)

    return lax.fori_loop(0, 32, add_bit, jnp.zeros((order.shape[0], 1), jnp.uint32))


def _ordered(x: Array) -> Array:
    """Returns uint32s in the order of f32s."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
