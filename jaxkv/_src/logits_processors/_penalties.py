"""Penalties of tokens that a request has already, as OpenAI and vLLM define them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.internal.checks import check_number
from jaxkv._src.logits_processors._protocol import Ids, Logits, OverVocabulary, Token


class PenaltyState[A](NamedTuple):
    """State of a penalty: its strength, and the tokens that it concerns."""

    penalty: A  # float32
    tokens: A  # bool or int32, [vocab]


class RepetitionPenalty(OverVocabulary):
    """Divides the logits of tokens of prompt and answer; multiplies them where they are negative.

    Data: the divisor, more than 0; more than 1 makes these tokens less likely.
    """

    def init(self, data: float | None, prompt: Ids) -> PenaltyState[np.ndarray]:
        penalty = 1.0 if data is None else data
        check_number(RepetitionPenalty=penalty)
        if not 0 < penalty < np.inf:
            raise ValueError(f"RepetitionPenalty={penalty} must be a number more than 0")
        return PenaltyState(np.asarray(penalty, np.float32), self._counts(prompt) > 0)

    def apply(self, state: PenaltyState[Array], logits: Logits) -> Logits:
        penalized = jnp.where(logits > 0, logits / state.penalty, logits * state.penalty)
        return jnp.where(state.tokens, penalized, logits)

    def advance(self, state: PenaltyState[Array], token: Token) -> PenaltyState[Array]:
        return state._replace(tokens=state.tokens.at[token].set(True))


class _AnswerPenalty(OverVocabulary):
    """A penalty of tokens of the answer, of which the state counts each."""

    def init(self, data: float | None, prompt: Ids) -> PenaltyState[np.ndarray]:
        penalty = 0.0 if data is None else data
        check_number(**{type(self).__name__: penalty})
        if not np.isfinite(penalty):
            raise ValueError(f"{type(self).__name__}={penalty} must be finite")
        return PenaltyState(np.asarray(penalty, np.float32), self._counts(prompt[:0]))

    def advance(self, state: PenaltyState[Array], token: Token) -> PenaltyState[Array]:
        return state._replace(tokens=state.tokens.at[token].add(1))


class FrequencyPenalty(_AnswerPenalty):
    """Takes a number from the logit of a token for each time that it is in the answer.

    Data: the number, usually -2 to 2.
    """

    def apply(self, state: PenaltyState[Array], logits: Logits) -> Logits:
        return logits - state.penalty * state.tokens.astype(logits.dtype)


class PresencePenalty(_AnswerPenalty):
    """Takes a number from the logit of each token that is in the answer.

    Data: the number, usually -2 to 2.
    """

    def apply(self, state: PenaltyState[Array], logits: Logits) -> Logits:
        return logits - jnp.where(state.tokens > 0, state.penalty, 0)
