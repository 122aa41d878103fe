"""Logits processors that add to logits, or leave tokens out."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32

from jaxkv._src.internal.checks import check_count, check_kind, check_number
from jaxkv._src.logits_processors._protocol import Ids, Logits, OverVocabulary, Token

LEAST = -np.inf  # the logit of a token that is left out


class LogitBias(OverVocabulary):
    """Adds a number to the logit of some tokens; -inf leaves one out.

    Data: a mapping from token ids to numbers.
    """

    def init(self, data: Mapping[int, float] | None, prompt: Ids) -> Float32[np.ndarray, "vocab"]:
        bias = np.zeros(self.vocab_size, np.float32)
        if data is not None:
            check_kind(Mapping, "a mapping from token ids to numbers", LogitBias=data)
            for value in data.values():
                check_number(LogitBias=value)
            bias[self._ids("LogitBias", [*data])] = [*data.values()]
        return bias

    def apply(self, state: Array, logits: Logits) -> Logits:
        return logits + state

    def advance(self, state: Array, token: Token) -> Array:
        return state


class AllowedTokens(OverVocabulary):
    """Leaves out all tokens but some.

    Data: a collection of token ids.
    """

    def init(self, data: Sequence[int] | Set[int] | None, prompt: Ids) -> Bool[np.ndarray, "vocab"]:
        allowed = np.zeros(self.vocab_size, bool)
        if data is not None:
            allowed[self._ids("AllowedTokens", data)] = True
            if not allowed.any():
                raise ValueError("AllowedTokens is empty; allow at least one token")
        return allowed

    def apply(self, state: Array, logits: Logits) -> Logits:
        return jnp.where(state, logits, LEAST)

    def advance(self, state: Array, token: Token) -> Array:
        return state


class MinTokensState[A](NamedTuple):
    """State of `MinTokens`."""

    left: A  # int32
    ends: A  # bool[vocab]


class MinTokens(OverVocabulary):
    """Leaves out tokens that would end a request before it has so many.

    Data: the number of tokens, and the ids that end it: usually `Sampling.stop_token_ids`.
    """

    def init(
        self, data: tuple[int, Sequence[int] | Set[int]] | None, prompt: Ids
    ) -> MinTokensState[np.ndarray]:
        least, ends = 0, np.zeros(self.vocab_size, bool)
        if data is not None:
            check_kind(tuple, "(a number of tokens, the ids that end it)", MinTokens=data)
            if len(data) != 2:
                raise ValueError(f"MinTokens={data} must be (a number of tokens, ids that end it)")
            least, ids = data
            check_count(MinTokens=least)
            ends[self._ids("MinTokens", ids)] = True
        return MinTokensState(np.asarray(least, np.int32), ends)

    def apply(self, state: MinTokensState[Array], logits: Logits) -> Logits:
        return jnp.where(state.ends & (state.left > 0), LEAST, logits)

    def advance(self, state: MinTokensState[Array], token: Token) -> MinTokensState[Array]:
        return state._replace(left=jnp.maximum(state.left - 1, 0))
