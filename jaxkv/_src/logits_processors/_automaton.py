"""`TokenAutomaton`, for constrained decoding: tokens that a grammar allows next."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int16, Int64

from jaxkv._src.internal.checks import check_count, check_kind, check_positive, plain_ints
from jaxkv._src.internal.indexing import take
from jaxkv._src.logits_processors._masks import LEAST
from jaxkv._src.logits_processors._protocol import Ids, Logits, OverVocabulary, Token

REFUSED = -1
FINAL = "let a final state allow the tokens that end an answer"
OUT_OF_RANGE = (
    "allows token {0}; tokens are from 0 to {1}, by vocab_size",
    f"leads to state {{0}}, which has no transitions; states are from 0 to {{1}}: {FINAL}",
)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """A grammar, as an automaton over tokens.

    classes: class of each token. Tokens of one class lead from each state to the same one.
    next_states: the state that follows each state and class; -1: the token is not allowed.
    start: the state before the first token of an answer.
    """

    classes: Int16[np.ndarray, "vocab"]
    next_states: Int16[np.ndarray, "states classes"]
    start: int = 0

    @classmethod
    @plain_ints
    def from_transitions(
        cls, transitions: Mapping[int, Mapping[int, int]], *, vocab_size: int, start: int = 0
    ) -> Self:
        """Returns the table of an automaton.

        Args:
          transitions: by state, 0 to S - 1, the state that follows each token that is allowed. The
            automata of outlines are such mappings. Each state allows a token: one that may end an
            answer allows the tokens that end it.
          vocab_size: columns of the logits.
          start: the first state.

        Raises:
          TypeError, ValueError: a state that allows nothing, or is unknown; a token id out of
            range; more than 32,767 states or classes.
        """
        check_kind(Mapping, "a mapping from states to mappings", transitions=transitions)
        check_positive(vocab_size=vocab_size)
        check_count(start=start)
        if start not in transitions:
            raise ValueError(f"start={start} must be a state of transitions")
        classes, lists = np.zeros(vocab_size, np.int64), list[tuple[int, np.ndarray, np.ndarray]]()
        for state, following in transitions.items():
            tokens, states = _checked(state, following, len(transitions), vocab_size)
            lists.append((state, tokens, states))
            # Tokens of one class that lead to different states are of different classes from here.
            pairs = classes[tokens] * len(transitions) + states
            classes[tokens] = classes.max() + 1 + np.unique(pairs, return_inverse=True)[1]
        classes = np.unique(classes, return_inverse=True)[1]
        sizes = len(transitions), int(classes.max()) + 1
        if max(sizes) > np.iinfo(np.int16).max:
            raise ValueError(f"transitions has {sizes} states and classes; 32,767 at most")
        table = np.full(sizes, REFUSED, np.int16)
        for state, tokens, states in lists:
            table[state, classes[tokens]] = states
        return cls(classes.astype(np.int16), table, start)


def _checked(
    state: int, following: Mapping[int, int], num_states: int, vocab_size: int
) -> Int64[np.ndarray, "2 tokens"]:
    """Returns the tokens that a state allows, and the states that follow."""
    if not following or state not in range(num_states):
        raise ValueError(
            f"transitions[{state}] must be of a state from 0 to {num_states - 1}, and allow a "
            f"token; {FINAL}"
        )
    both = np.array([*following.items()], np.int64).T
    for ids, size, text in zip(both, (vocab_size, num_states), OUT_OF_RANGE, strict=True):
        if (bad := ids[(ids < 0) | (ids >= size)]).size:
            raise ValueError(f"transitions[{state}] {text.format(bad[0], size - 1)}")
    return both


class AutomatonState[A](NamedTuple):
    """State of `TokenAutomaton`; of these arrays only the first one changes."""

    state: A  # int32
    classes: A  # int16[vocab]
    next_states: A  # int16[states, classes]


class TokenAutomaton(OverVocabulary):
    """Leaves out tokens that a grammar does not allow next, so that an answer never leaves it.

    Data: a `TokenTable`. Each request that runs has a copy on the device: 2 bytes for each token,
    and for each state and class.
    """

    @plain_ints
    def __init__(self, vocab_size: int, *, max_states: int = 256, max_classes: int = 64):
        """Creates a processor.

        Args:
          vocab_size: columns of the logits.
          max_states, max_classes: of the largest table.
        """
        super().__init__(vocab_size)
        check_positive(max_states=max_states, max_classes=max_classes)
        self._sizes = max_states, max_classes

    def init(self, data: TokenTable | None, prompt: Ids) -> AutomatonState[np.ndarray]:
        next_states = np.full(self._sizes, REFUSED, np.int16)
        if data is None:
            return AutomatonState(
                np.zeros((), np.int32), np.zeros(self.vocab_size, np.int16), next_states
            )
        check_kind(TokenTable, TokenAutomaton=data)
        states, classes = data.next_states.shape
        if data.classes.size != self.vocab_size:
            raise ValueError(
                f"TokenAutomaton has vocab_size={self.vocab_size}, and its TokenTable was made "
                f"with vocab_size={data.classes.size}; make both with the columns of the logits"
            )
        if states > self._sizes[0] or classes > self._sizes[1]:
            raise ValueError(
                f"a table of {states} states and {classes} classes is larger than "
                f"max_states={self._sizes[0]} and max_classes={self._sizes[1]} of TokenAutomaton"
            )
        next_states[:states, :classes] = data.next_states
        return AutomatonState(np.asarray(data.start, np.int32), data.classes, next_states)

    def apply(self, state: AutomatonState[Array], logits: Logits) -> Logits:
        following = take(state.next_states, state.state, REFUSED)
        return jnp.where(following[state.classes] > REFUSED, logits, LEAST)

    def advance(self, state: AutomatonState[Array], token: Token) -> AutomatonState[Array]:
        of_token = state.classes[token]
        following = take(state.next_states, state.state, REFUSED)[of_token]
        return state._replace(state=following.astype(jnp.int32))
