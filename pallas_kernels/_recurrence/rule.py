"""The rules of recurrent layers, and the arrays of a call."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels._recurrence.pages import StatePages


class Convolution(NamedTuple):
    """A causal depthwise convolution over the inputs of a recurrence, with its own state.

    pages: the last inputs of each request, [width - 1, channels], oldest first.
    weights: the newest input's last.
    bias: None: zeros.
    silu: whether SiLU follows.
    """

    pages: StatePages
    weights: Float[Array, "width channels"]
    bias: Float[Array, " channels"] | None = None
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

    starts: first token of each request.
    counts: tokens of each request.
    write_after: after how many of its tokens a state is written; None: after the last.
    """

    starts: Int32[Array, " requests"]
    counts: Int32[Array, " requests"]
    write_after: Int32[Array, "requests writes"] | None

    @classmethod
    def from_batch_size(cls, batch: int) -> Self:
        """Returns the spans of requests with one token each."""
        starts = jnp.arange(batch, dtype=jnp.int32)
        return cls(starts, jnp.ones_like(starts), None)

    def arrays(self) -> tuple[Array, Array, Array]:
        """Returns all three as arrays."""
        after = self.counts[:, None] if self.write_after is None else self.write_after
        return self.starts, self.counts, after

    def cover(self, num_tokens: int) -> Array:
        """Returns bool[num_tokens]: whether each token is of a request."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        begins, ends = self.starts[None], (self.starts + self.counts)[None]
        return jnp.any((token >= begins) & (token < ends), axis=1)

    def only(self, mine: Array) -> Self:
        """Returns the spans of the requests in bool[B]; the others have no tokens."""
        return self._replace(counts=jnp.where(mine, self.counts, 0))


class Requests(NamedTuple):
    """The requests of a call, and the states that they read and write.

    read_ids: pages to resume from; ids of no page: zeros.
    write_ids: pages that take a state; ids of no page: none.
    spans: their tokens; None: request i has token i alone.
    """

    read_ids: Int32[Array, " requests"]
    write_ids: Int32[Array, "requests writes"]
    spans: Spans | None = None

    @property
    def batch(self) -> int:
        return self.read_ids.shape[0]


class Tokens(NamedTuple):
    """The tokens of a call.

    log_decay: the logarithm of the decay, of a head or of each key channel.
    states: [value_heads, V, K] in pages.
    """

    inputs: Float[Array, "tokens columns"]
    log_decay: Float[Array, "tokens value_heads *key_size"]
    beta: Float[Array, "tokens value_heads"]
    states: StatePages

    def after(self, data: Array, inputs: Array) -> Self:
        """Returns the tokens after their convolution."""
        return self._replace(inputs=inputs, states=self.states._replace(data=data))
