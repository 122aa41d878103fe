"""The sampler: a token and its log-probability for every sample of a step."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.engine._outputs import Kind
from jaxkv._src.engine._samples import NAMES, RECORD, RECORD_SIZE

BITS = 2  # of a pass of `_threshold`: 1 takes 1.5 times as long, 4 1.3 times


def fields_of(records: Array) -> dict[str, Array]:
    """Returns the fields of `RECORD`s by name, [S, 1]; of int32[S * RECORD_SIZE]."""
    records = records.reshape(-1, RECORD_SIZE)
    of = {name: records[:, at:][:, : RECORD[name].itemsize // 4] for at, name in enumerate(NAMES)}
    return {name: lax.bitcast_convert_type(part, RECORD[name].base) for name, part in of.items()}


def draw(
    logits: Array,
    of: Mapping[str, Array],
    kind: Kind,
    process: Callable[[Array], Array] | None = None,
    *,
    are_processed: bool = False,
) -> tuple[Array, Array]:
    """Draws the next token of every sample.

    Args:
      logits: float[B, vocab].
      of: the `fields_of` S records.
      kind: the most that any of them needs. It is static, because a condition on the device keeps
        the host from running ahead.
      process: from f32[S, vocab], the logits of the samples, to those to draw from; None: these.
      are_processed: whether log-probabilities are in the latter.

    Returns:
      int32[S], the tokens, and f32[S], their log-probabilities in the logits.
    """
    logits = logits.astype(jnp.float32)[of["index"][:, 0]]
    given = logits
    logits = scores = logits if process is None else process(logits)
    if kind != Kind.GREEDY:
        is_sampled = of["temperature"] > 0
        scores = _scaled(logits, jnp.where(is_sampled, of["temperature"], 1))
        if kind == Kind.LIMITED:
            scores = _keep(scores, of["top_k"], of["top_p"], of["min_p"])
        keys = jax.vmap(_key)(of["seed"][:, 0], of["sample"][:, 0], of["position"][:, 0])
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        scores = jnp.where(is_sampled, scores + noise, logits)
    tokens = scores.argmax(axis=-1).astype(jnp.int32)
    logits = logits if are_processed else given
    picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, picked - jax.nn.logsumexp(logits, axis=-1)


def _key(seed: Array, sample: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)


def _scaled(logits: Array, temperature: Array) -> Array:
    """Returns logits over the temperature, minus the largest, so that none overflows."""
    largest = logits.max(axis=-1, keepdims=True)
    # Infinity less itself is no number.
    return jnp.where(logits == largest, 0, (logits - largest) / temperature)


def _keep(scores: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns scores, with -inf for tokens that a limit leaves out; one limit after another.

    Of equally likely tokens, the first ones stay.

    Args:
      scores: f32[S, vocab]; the largest of each row is 0.
    """
    order, parts, vocab = _ordered(scores), jnp.exp(scores), scores.shape[-1]
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    last = _threshold(order, lambda above: _sum(above) >= count)
    num_last = count - _sum(order > last)
    part = jnp.where(order == last, parts, 0).max(axis=-1, keepdims=True)
    total = _sum(jnp.where(order > last, parts, 0)) + num_last.astype(jnp.float32) * part
    wanted = top_p * (1 - 1e-6) * total  # sums are rounded

    # The set of top_p ends at the same token, or at one that is more likely.
    ends = _threshold(order, lambda above: _sum(jnp.where(above, parts, 0)) >= wanted)
    ends = jnp.where(top_p < 1, jnp.maximum(ends, last), last)
    part = jnp.where(order == ends, parts, 0).max(axis=-1, keepdims=True)
    num_ends = jnp.ceil((wanted - _sum(jnp.where(order > ends, parts, 0))) / part)
    num_ends = jnp.where(top_p < 1, jnp.clip(num_ends, 1, vocab), vocab).astype(jnp.int32)
    num_ends = jnp.where(ends == last, jnp.minimum(num_ends, num_last), num_ends)

    from_end = jnp.arange(vocab, dtype=jnp.uint32)[None, ::-1]
    is_end = order == ends
    first = _threshold(
        from_end, lambda above: _sum(is_end & above) >= num_ends, bits=(vocab - 1).bit_length()
    )
    is_kept = (order > ends) | (is_end & (from_end >= first))
    return jnp.where(is_kept & (parts >= min_p), scores, -jnp.inf)


def _sum(x: Array) -> Array:
    return x.sum(axis=-1, keepdims=True)


def _threshold(order: Array, is_enough: Callable[[Array], Array], bits: int = 32) -> Array:
    """Returns the largest uint32[S, 1] such that the elements from there on are enough; or 0.

    It is found in some passes, a few bits in each, because sorting a vocabulary takes longer.
    """
    passes, values = -(-bits // BITS), range(1, 1 << BITS)

    def add_digit(i: Array, found: Array) -> Array:
        shift = (BITS * (passes - 1 - i)).astype(jnp.uint32)
        higher = [found | (jnp.uint32(value) << shift) for value in values]
        return found | (sum(is_enough(order >= h).astype(jnp.uint32) for h in higher) << shift)

    like = is_enough(order >= 0)
    return lax.fori_loop(0, passes, add_digit, jnp.zeros(like.shape, jnp.uint32))


def _ordered(x: Array) -> Array:
    """Returns uint32s in the order of f32s."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
