"""The rules of recurrent layers, and the arrays of a call."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels._recurrence.pages import StatePages


class Convolution(NamedTuple):
    """A causal depthwise convolution over the inputs of a recurrence, with its own state.

    pages: the last inputs of each request, [width - 1, channels], oldest first.
    weights: [width, channels], the newest input's last.
    bias: [channels]; None: zeros.
    silu: whether SiLU follows.
    """

    pages: StatePages
    weights: Array
    bias: Array | None = None
    silu: bool = True

    @property
    def width(self) -> int:
        return self.weights.shape[0]


class Rule(NamedTuple):
    """The recurrence of a layer: ``S = decay * S + d k^T``, ``o = S q``, for each value head.

    ``d`` is ``beta * (v - decay * S k)`` with ``delta`` (Gated DeltaNet, Yang et al. 2024,
    arXiv:2412.06464; per key channel: Kimi Linear, arXiv:2510.26692), and ``beta * v`` without
    (Mamba-2, Dao and Gu 2024, arXiv:2405.21060; linear attention with decay).

    key_heads, value_heads: heads of queries and keys, and of values; the latter a multiple.
    key_size, value_size: widths.
    delta: as above.
    normalize: whether queries and keys are divided by their l2 norm.
    scale: factor of the queries.
    values_first: order of the columns of the inputs: queries, keys, values; or values, keys,
      queries.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    delta: bool
    normalize: bool
    scale: float
    values_first: bool = False

    @property
    def group(self) -> int:
        """Returns the value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def columns(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def starts(self) -> tuple[int, int, int]:
        """Returns the first columns of queries, keys and values."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return (values + keys, values, 0) if self.values_first else (0, keys, 2 * keys)

    def split(self, inputs: Array) -> tuple[Array, Array, Array]:
        """Splits [..., columns] into queries and keys, [..., key_heads, K], and values."""
        heads = (self.key_heads, self.key_heads, self.value_heads)
        widths = (self.key_size, self.key_size, self.value_size)
        parts = (
            inputs[..., start : start + count * width].reshape(*inputs.shape[:-1], count, width)
            for start, count, width in zip(self.starts, heads, widths, strict=True)
        )
        queries, keys, values = parts
        return queries, keys, values


# A decay below exp(-104) is 0 in float32. Sums of logarithms of such would lose other digits.
LEAST_LOG_DECAY = -104.0
NORM_EPSILON = 1e-6  # added to the squared norm of queries and keys, as the models do


class Spans(NamedTuple):
    """The tokens of each request of a ragged batch.

    starts: int32[B], first token of each request.
    counts: int32[B], tokens of each request.
    write_after: int32[B, W], after how many of its tokens a state is written; None: after the last.
    """

    starts: Array
    counts: Array
    write_after: Array | None

    @classmethod
    def of_single_tokens(cls, batch: int) -> Self:
        """Returns those of requests with one token each."""
        starts = jnp.arange(batch, dtype=jnp.int32)
        return cls(starts, jnp.ones_like(starts), None)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Returns all three as arrays."""
        after = self.counts[:, None] if self.write_after is None else self.write_after
        return self.starts, self.counts, after

    def holds(self, num_tokens: int) -> Array:
        """Returns bool[num_tokens]: which tokens are those of a request."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        begins, ends = self.starts[None], (self.starts + self.counts)[None]
        return jnp.any((token >= begins) & (token < ends), axis=1)

    def only(self, mine: Array) -> Self:
        """Returns the same without the tokens of requests other than those in bool[B]."""
        return self._replace(counts=jnp.where(mine, self.counts, 0))


class Requests(NamedTuple):
    """The requests of a call, and the states that they read and write.

    read_ids: int32[B], pages to resume from; other ids than pages': zeros.
    write_ids: int32[B, W], pages that take a state; other ids: none.
    spans: their tokens; None: token i is that of request i, alone.
    """

    read_ids: Array
    write_ids: Array
    spans: Spans | None = None

    @property
    def batch(self) -> int:
        return self.read_ids.shape[0]


class Tokens(NamedTuple):
    """The tokens of a call.

    inputs: [T, columns].
    log_decay: float[T, value_heads], or [T, value_heads, K]; the logarithm of the decay.
    beta: float[T, value_heads].
    states: [value_heads, V, K] in pages.
    """

    inputs: Array
    log_decay: Array
    beta: Array
    states: StatePages

    def after(self, data: Array, inputs: Array) -> Self:
        """Returns the tokens after their convolution."""
        return self._replace(inputs=inputs, states=self.states._replace(data=data))
