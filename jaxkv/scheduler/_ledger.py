"""Requests that a scheduler knows, and their numbers in arrays. No jax."""

import dataclasses
import functools
from collections.abc import Collection, Hashable
from typing import NamedTuple

import numpy as np

ANYWHERE = np.iinfo(np.int64).max  # a chunk may end after any token


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
    numbers: int64[4, N], the arrays.
    """

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self.numbers = np.zeros((4, 64), np.int64)
        self._free: list[int] = list(range(64))
        self._last: tuple[list[Hashable], np.ndarray] | None = None  # that were asked for last

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens that are known: prompt, sampled ones and drafts."""
        return self.numbers[0]

    @property
    def max_tokens(self) -> np.ndarray:
        """The most tokens that a request will have."""
        return self.numbers[1]

    @property
    def prefill_tokens(self) -> np.ndarray:
        """Tokens that were known when a request was admitted."""
        return self.numbers[2]

    @property
    def chunk_ends(self) -> np.ndarray:
        """Tokens after which the next chunk has to end."""
        return self.numbers[3]

    def enter(self, request: Hashable, num_tokens: int, max_tokens: int) -> int:
        """Finds room for a request, and returns its index."""
        if not self._free:
            size = self.numbers.shape[1]
            self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)], axis=1)
            self._free = list(range(size, 2 * size))
        index = self.of[request] = self._free.pop()
        self.numbers[:, index] = num_tokens, max_tokens, 0, ANYWHERE
        return index

    def leave(self, request: Hashable) -> None:
        """Forgets a request."""
        self._free.append(self.of.pop(request))
        self._last = None

    def index(self, request: Hashable) -> int:
        """Returns where the numbers of a request lie.

        Raises:
          ValueError: an unknown request.
        """
        if request not in self.of:
            raise ValueError(f"request={request!r} is unknown; add it first")
        return self.of[request]

    def indices(self, requests: Collection[Hashable]) -> np.ndarray:
        """Returns where the numbers of requests lie, int64[N].

        Raises:
          ValueError: an unknown request.
        """
        names = list(requests)
        if self._last is not None and self._last[0] == names:
            return self._last[1]
        index = np.array([self.index(name) for name in names], np.int64)
        self._last = names, index
        return index


@dataclasses.dataclass(eq=False)
class InOrder:
    """The requests that run, oldest first, for as long as none comes or goes.

    index: where their numbers lie in the ledger.
    """

    names: list[Hashable]
    index: np.ndarray  # int64[N]
    rows: np.ndarray  # int64[N]

    @functools.cached_property
    def one_each(self) -> dict[Hashable, int]:
        """The work of a step in which everyone decodes."""
        return dict.fromkeys(self.names, 1)

    @functools.cached_property
    def places(self) -> dict[Hashable, int]:
        """The place of every request."""
        return dict(zip(self.names, range(len(self.names)), strict=True))


class Running(NamedTuple):
    """The requests that run, oldest first, and their tokens."""

    in_order: InOrder
    names: list[Hashable]
    rows: np.ndarray  # int64[N]
    computed: np.ndarray  # int64[N]
    num_tokens: np.ndarray  # int64[N]
    prefill_tokens: np.ndarray  # int64[N]
    chunk_ends: np.ndarray  # int64[N], tokens after which the next chunk has to end
    has_chunk_ends: bool
