"""The rules of recurrent layers, and the arrays of a call."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels._recurrence.pages import StatePages


class Convolution(NamedTuple):
    """A causal depthwise convolution over the inputs of a recurrence, with its own state.

    pages: the last inputs of each request, [width - 1, channels], oldest first. Of more rows, row
      ``p % rows`` has the input of token p, so that drafts can be rejected: as many as there are
      rows more.
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

    @property
    def takes_drafts(self) -> bool:
        """Returns whether pages have rows by position."""
        return self.pages.shape[0] >= self.width


def replay_shapes(
    rows: int, states: tuple[int, ...], key_heads: int, itemsize: int, drafts: int = 0
) -> tuple[tuple[int, int, int], ...]:
    """Returns the shapes of the arrays of `Replay`, for states of [value_heads, V, K]."""
    value_heads, value_size, key_size = states
    # A float32 is the sum of so many numbers of the states' dtype; a load takes 16 of each.
    terms, columns = 1 if itemsize == 4 else 3, -(-rows // 16) * 16
    return (
        (key_heads, rows, key_size),
        (value_heads, rows, value_size),
        (value_heads, terms + bool(drafts), columns),
    )


class Replay(NamedTuple):
    """Inputs since a checkpoint of the state, instead of a state after each token.

    After n tokens of a request, its page has the state after the first c of them, the checkpoint,
    and in ring row ``p % rows`` what each later token p has added to the state. The arrays lie in
    the pages of the states, and have their dtype; rows of other tokens are undefined.

    Without ``drafts``, ``c = n // rows * rows``. With them, a step of up to ``1 + drafts`` tokens
    adds rows alone, so that the next one may go on after any of these tokens, and overwrites those
    that were rejected. The state before its tokens, which stay, becomes the checkpoint if there are
    too few rows for this step and the next: a row that is read is never written. A longer step
    leaves no rows, but the state after its last token. So c depends on what came before, and the
    row of token n - 1 tells it.

    keys: [key_heads, rows, K], as the state takes them.
    added: [value_heads, rows, V], the vector that the token adds for its key: ``d`` of `Rule`.
    log_decay: [value_heads, n, 16 or more], the logarithm of the decay from the checkpoint to the
      token, as the sum of n numbers: 1 of 4 bytes, or 3 of 2 bytes. With drafts, another one
      follows: how many rows there are since the checkpoint.
    drafts: most drafts of a step.
    """

    keys: StatePages
    added: StatePages
    log_decay: StatePages
    drafts: int = 0

    @property
    def arrays(self) -> tuple[StatePages, StatePages, StatePages]:
        return self.keys, self.added, self.log_decay

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def limit(self) -> int:
        """Returns with how many rows since the checkpoint a step writes the next one."""
        return self.rows - (2 * self.drafts + 1 if self.drafts else 0)


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
    computed: how many tokens of each came before, for `Replay`.
    """

    read_ids: Int32[Array, " requests"]
    write_ids: Int32[Array, "requests writes"]
    spans: Spans | None = None
    computed: Int32[Array, " requests"] | None = None

    @property
    def batch(self) -> int:
        return self.read_ids.shape[0]

    def tokens_before(self) -> Array:
        """Returns how many tokens of each came before; raises ValueError if that is not known."""
        if self.computed is None:
            raise ValueError(
                "replay needs requests.num_computed_tokens, the tokens before the call; so do "
                "inputs of a convolution with drafts"
            )
        return self.computed

    def last_page(self) -> Array:
        """Returns the page that takes the state after the last token of each; -1: none."""
        if self.spans is None or self.spans.write_after is None:
            return self.write_ids[:, 0]
        _, counts, after = self.spans.arrays()
        return jnp.max(jnp.where(after == counts[:, None], self.write_ids, -1), axis=1)

    def writing_last(self) -> Self:
        """Returns the requests with this page alone."""
        spans = self.spans and self.spans._replace(write_after=None)
        return self._replace(write_ids=self.last_page()[:, None], spans=spans)


class Tokens(NamedTuple):
    """The tokens of a call.

    log_decay: the logarithm of the decay, of a head or of each key channel.
    states: [value_heads, V, K] in pages.
    replay: the rings of their pages; None: pages have the state after the last token.
    """

    inputs: Float[Array, "tokens columns"]
    log_decay: Float[Array, "tokens value_heads *key_size"]
    beta: Float[Array, "tokens value_heads"]
    states: StatePages
    replay: Replay | None = None

    def after(self, data: Array, inputs: Array) -> Self:
        """Returns the tokens after their convolution."""
        return self._replace(inputs=inputs, states=self.states._replace(data=data))
