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
    filled: rows since the checkpoint, up to the token's; of pages that take drafts.
    """

    keys: Float32[Array, "*pages key_heads rows key_size"]
    added: Float32[Array, "*pages value_heads rows value_size"]
    total: Float32[Array, "*pages value_heads rows"]
    filled: Float32[Array, "*pages 1 rows"]

    @classmethod
    def read(cls, replay: Replay, data: Array, ids: Array) -> Self:
        """Reads the rings of pages, int32[...]; zeros for ids of no page."""
        read = [part._replace(data=data).read(ids).astype(jnp.float32) for part in replay.arrays]
        log_decay = read[2][..., : replay.rows]
        terms = log_decay[..., :-1, :] if replay.drafts else log_decay
        return cls(read[0], read[1], terms.sum(axis=-2), log_decay[..., :1, -1, :])

    def write(self, replay: Replay, data: Array, ids: Array) -> Array:
        """Returns the data of the pages with the rings of pages int32[N] written."""
        keys, added, log_decay = replay.arrays
        data = keys._replace(data=data).write(ids, self.keys)
        data = added._replace(data=data).write(ids, self.added)
        terms = _terms(log_decay, log_decay.shape[1] - bool(replay.drafts), self.total)
        if replay.drafts:
            filled = jnp.broadcast_to(self.filled, self.total.shape)[..., None, :]
            terms = jnp.concatenate([terms, filled], axis=-2)
        missing = log_decay.shape[-1] - replay.rows
        terms = jnp.pad(terms, [*[(0, 0)] * (terms.ndim - 1), (0, missing)])
        return log_decay._replace(data=data).write(ids, terms)

    def resume(self, checkpoint: Array, computed: Array, filled: Array) -> Array:
        """Returns the state after some tokens, the last ``filled`` of which are in the ring.

        Args:
          checkpoint: float32[value_heads, V, K], the state before these.
          computed, filled: int32[].
        """
        heads, rows = self.total.shape
        age = (computed - 1 - lax.broadcasted_iota(jnp.int32, self.total.shape, 1)) % rows
        is_there = age < filled
        last = jnp.sum(jnp.where(is_there & (age == 0), self.total, 0), axis=1, keepdims=True)
        weights = jnp.where(is_there, jnp.exp(last - self.total), 0)
        # Rows of other tokens may be NaN.
        added = jnp.where(is_there[..., None], self.added * weights[..., None], 0)
        keys = jnp.where(is_there[: len(self.keys), :, None], self.keys, 0)
        keys = jnp.repeat(keys, heads // len(keys), axis=0)
        since = jnp.einsum("hlv,hlk->hvk", added, keys, precision=lax.Precision.HIGHEST)
        return checkpoint * jnp.exp(last)[..., None] + since

    def append(
        self, rows: Array, filled: Array, keys: Array, added: Array, log_decay: Array
    ) -> Self:
        """Returns a ring with more tokens, which follow each other.

        Args:
          rows: int32[n], of the tokens; beyond the ring for ones that it does not take.
          filled: int32[], rows since the checkpoint before these.
          keys, added, log_decay: of the tokens, [n, key_heads or value_heads, ...].
        """
        length = self.total.shape[-1]
        before = jnp.where(filled > 0, self.total[:, (rows[0] - 1) % length], 0)[None]
        log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
        total = before + jnp.cumsum(log_decay, axis=0)
        counts = (filled + 1 + jnp.arange(len(rows), dtype=jnp.int32))[:, None]
        given = keys, added, total, counts.astype(jnp.float32)
        new = type(self)(*(jnp.swapaxes(x, 0, 1) for x in given))
        return jax.tree.map(lambda old, x: old.at[:, rows].set(x, mode="drop"), self, new)


def count_rows(replay: Replay, data: Array, ids: Array, computed: Array) -> Array:
    """Returns the rows since the checkpoints of pages int32[N] after so many tokens, int32[N]."""
    if not replay.drafts:
        return computed % replay.rows
    filled = replay.log_decay._replace(data=data).read(ids)[:, 0, -1]
    newest = jnp.take_along_axis(filled, (computed[:, None] - 1) % replay.rows, axis=1)[:, 0]
    return jnp.where(computed > 0, newest, 0).astype(jnp.int32)


def empty_rings(replay: Replay, data: Array, ids: Array) -> Array:
    """Returns the data with no rows since the checkpoints of pages int32[N]."""
    shape = *ids.shape, *replay.log_decay.shape
    return replay.log_decay._replace(data=data).write(ids, jnp.zeros(shape, jnp.float32))


def _terms(pages: StatePages, count: int, total: Array) -> Array:
    """Returns numbers of the pages' dtype whose sum is a float32, as `Replay` stores them."""
    info, terms = jnp.finfo(pages.dtype), list[Array]()
    for _ in range(count):  # not by conversions: XLA may drop them
        term = lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        terms.append(term)
        total = total - term
    return jnp.stack(terms, axis=-2)
