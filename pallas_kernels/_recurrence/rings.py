"""The inputs since a checkpoint of a state, in rings of its pages, in XLA."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32

from pallas_kernels._recurrence.pages import StatePages
from pallas_kernels._recurrence.rule import LEAST_LOG_DECAY, Replay


class Ring(NamedTuple):
    """The content of rings; see `Replay`.

    total: the logarithm of the decay from the checkpoint to the token.
    """

    keys: Float32[Array, "*pages key_heads length key_size"]
    added: Float32[Array, "*pages value_heads length value_size"]
    total: Float32[Array, "*pages value_heads length"]

    @classmethod
    def read(cls, replay: Replay, data: Array, ids: Array) -> Self:
        """Reads the rings of pages, int32[...]; zeros for ids of no page."""
        read = [part._replace(data=data).read(ids).astype(jnp.float32) for part in replay]
        return cls(read[0], read[1], read[2].sum(axis=-2)[..., : replay.length])

    def write(self, replay: Replay, data: Array, ids: Array) -> Array:
        """Returns the data of the pages with the rings of pages int32[N] written."""
        keys, added, log_decay = replay
        data = keys._replace(data=data).write(ids, self.keys)
        data = added._replace(data=data).write(ids, self.added)
        return log_decay._replace(data=data).write(ids, _terms(log_decay, self.total))

    def resume(self, checkpoint: Array, filled: Array) -> Array:
        """Returns the state after the first ``filled`` rows of a ring, from the one before them.

        Args:
          checkpoint: float32[value_heads, V, K].
          filled: int32[].
        """
        heads = len(self.added)
        row = lax.broadcasted_iota(jnp.int32, self.total.shape, 1)
        is_there = row < filled
        last = jnp.sum(jnp.where(row == filled - 1, self.total, 0), axis=1, keepdims=True)
        weights = jnp.where(is_there, jnp.exp(last - self.total), 0)
        # Rows of other tokens may be NaN.
        added = jnp.where(is_there[..., None], self.added * weights[..., None], 0)
        keys = jnp.where(is_there[: len(self.keys), :, None], self.keys, 0)
        keys = jnp.repeat(keys, heads // len(keys), axis=0)
        since = jnp.einsum("hlv,hlk->hvk", added, keys, precision=lax.Precision.HIGHEST)
        return checkpoint * jnp.exp(last)[..., None] + since

    def append(self, rows: Array, keys: Array, added: Array, log_decay: Array) -> Self:
        """Returns a ring with more tokens, which follow each other.

        Args:
          rows: int32[n], of the tokens; beyond the ring for ones that it does not take.
          keys, added, log_decay: of the tokens, [n, key_heads or value_heads, ...].
        """
        length = self.total.shape[-1]
        before = jnp.where(rows[0] % length > 0, self.total[:, (rows[0] - 1) % length], 0)[None]
        log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
        total = before + jnp.cumsum(log_decay, axis=0)
        new = type(self)(*(jnp.swapaxes(x, 0, 1) for x in (keys, added, total)))
        return jax.tree.map(lambda old, x: old.at[:, rows].set(x, mode="drop"), self, new)


def _terms(pages: StatePages, total: Array) -> Array:
    """Returns numbers of the pages' dtype whose sum is a float32, as `Replay` stores them."""
    info, terms = jnp.finfo(pages.dtype), list[Array]()
    for _ in range(pages.shape[1]):  # not by conversions: XLA may drop them
        term = lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        terms.append(term)
        total = total - term
    missing = pages.shape[-1] - total.shape[-1]
    return jnp.pad(jnp.stack(terms, axis=-2), [*[(0, 0)] * total.ndim, (0, missing)])
