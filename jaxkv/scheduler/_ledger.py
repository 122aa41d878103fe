"""Requests that a scheduler knows, and their numbers in arrays. No jax."""

import dataclasses
from collections.abc import Collection, Hashable
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs.

    age: its place in the order of arrival, kept when it is preempted.
    blocks: the most that it holds while it decodes; what a prompt under way takes beyond them.
    row: in the manager's tables, while it runs.
    """

    name: Hashable
    age: tuple[int, ...]
    encoder_tokens: int
    blocks: tuple[int, int]
    row: int = -1


class Ledger:
    """Numbers of all known requests, in arrays: what a step looks at for everyone.

    of: where in the arrays the numbers of a request lie.
    """

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self._numbers = np.zeros((4, 64), np.int64)
        self._free: list[int] = list(range(64))

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens that are known: prompt, sampled ones and drafts."""
        return self._numbers[0]

    @property
    def max_tokens(self) -> np.ndarray:
        """The most tokens that a request will have."""
        return self._numbers[1]

    @property
    def prefill_tokens(self) -> np.ndarray:
        """Tokens that were known when a request was admitted."""
        return self._numbers[2]

    @property
    def forked_at(self) -> np.ndarray:
        """Tokens that a request shares with another one; -1: none."""
        return self._numbers[3]

    def enter(self, request: Hashable, num_tokens: int, max_tokens: int) -> int:
        """Finds room for a request, and returns its index."""
        if not self._free:
            size = self._numbers.shape[1]
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
            self._free = list(range(size, 2 * size))
        index = self.of[request] = self._free.pop()
        self._numbers[:, index] = num_tokens, max_tokens, 0, -1
        return index

    def leave(self, request: Hashable) -> None:
        """Forgets a request."""
        self._free.append(self.of.pop(request))

    def indices(self, requests: Collection[Hashable]) -> np.ndarray:
        """Returns where the numbers of requests lie, int64[N].

        Raises:
          ValueError: an unknown request.
        """
        try:
            return np.fromiter(map(self.of.__getitem__, requests), np.int64, len(requests))
        except KeyError as error:
            raise ValueError(f"request={error.args[0]!r} is unknown; add it first") from None


class Running(NamedTuple):
    """The requests that run, oldest first, and their tokens."""

    names: list[Hashable]
    rows: np.ndarray  # int64[N]
    computed: np.ndarray  # int64[N]
    num_tokens: np.ndarray  # int64[N]
    prefill_tokens: np.ndarray  # int64[N]
    forked_at: np.ndarray  # int64[N]
