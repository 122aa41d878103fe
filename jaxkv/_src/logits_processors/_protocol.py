"""`LogitsProcessor`, the protocol of logits processors."""

from collections.abc import Sequence, Set
from typing import Protocol

import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, PyTree

from jaxkv._src.internal.checks import check_positive, plain_ints
from jaxkv._src.prefixes import as_tokens

Logits = Float32[Array, "vocab"]
Token = Int32[Array, ""]
Ids = Int32[np.ndarray, "tokens"]


class LogitsProcessor[Data, State](Protocol):
    """Changes the logits of one request before a token is drawn.

    An engine keeps the state of each request in a row of arrays on the device. `apply` and
    `advance` are traced, and mapped over the requests of a step by `jax.vmap`. A state follows from
    the request's data and tokens alone, so that a request that is computed again gets the same
    one, and each sample of a prompt begins with its own.

    Data: of a request, from `jaxkv.Sampling`. State: any pytree of arrays.
    """

    def init(self, data: Data | None, prompt: Ids) -> PyTree[np.ndarray]:
        """Returns the state after a prompt, as NumPy arrays of shapes that are always the same.

        It runs on the host. Raises TypeError or ValueError for data that it does not take.

        Args:
          data: None: that of no request. Of such a state only the shapes and dtypes matter.
        """
        ...

    def apply(self, state: State, logits: Logits) -> Logits:
        """Returns the logits to draw the next token from."""
        ...

    def advance(self, state: State, token: Token) -> State:
        """Returns the state after a token. Arrays that it returns as they are cost nothing."""
        ...


class OverVocabulary:
    """A processor over logits of one width."""

    @plain_ints
    def __init__(self, vocab_size: int):
        """Creates a processor.

        Args:
          vocab_size: columns of the logits.
        """
        check_positive(vocab_size=vocab_size)
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"

    def _ids(self, what: str, ids: Sequence[int] | Set[int]) -> Int32[np.ndarray, "ids"]:
        """Returns token ids, checked; ``what`` names them."""
        as_list = list(ids) if isinstance(ids, Set) else ids
        found = as_tokens(what, as_list, np.int32)
        if found.size and found.max() >= self.vocab_size:
            raise ValueError(
                f"{what} holds the token id {found.max()}, and vocab_size is {self.vocab_size}"
            )
        return found

    def _counts(self, ids: Int32[np.ndarray, "ids"]) -> Int32[np.ndarray, "vocab"]:
        """Returns how often each token is among ids."""
        return np.bincount(ids, minlength=self.vocab_size).astype(np.int32)
