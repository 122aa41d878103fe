"""The requests of a scheduler, and their token counts in arrays. No jax."""

import dataclasses
import functools
from collections.abc import Collection, Hashable
from typing import NamedTuple

import numpy as np

ANYWHERE = np.iinfo(np.int64).max  # a chunk may end after any token


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request.

    age: its place in the order of arrival, which a preemption does not change.
    blocks: the most blocks that it holds while it decodes, and the most that computing its prompt
      takes in addition.
    row: its row in the block tables while it runs; -1: it waits.
    """

    name: Hashable
    age: tuple[int, ...]
    encoder_tokens: int
    blocks: tuple[int, int]
    row: int = -1


class Ledger:
    """Token counts of all requests, in arrays that a step reads at once.

    of: index of each request in the arrays.
    numbers: int64[4, N]: `num_tokens`, `max_tokens`, `prefill_tokens` and `chunk_ends`.
    """

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self.numbers = np.zeros((4, 64), np.int64)
        self._free: list[int] = list(range(64))
        self._last: tuple[list[Hashable], np.ndarray] | None = None  # of `indices`

    @property
    def num_tokens(self) -> np.ndarray:
        """Known tokens of each request: prompt, sampled tokens and drafts, int64[N]."""
        return self.numbers[0]

    @property
    def max_tokens(self) -> np.ndarray:
        """The most tokens that each request will have, int64[N]."""
        return self.numbers[1]

    @property
    def prefill_tokens(self) -> np.ndarray:
        """Tokens of each request that were known when it was admitted, int64[N]."""
        return self.numbers[2]

    @property
    def chunk_ends(self) -> np.ndarray:
        """Tokens after which the next chunk of each request has to end, int64[N]; or `ANYWHERE`."""
        return self.numbers[3]

    def enter(self, request: Hashable, num_tokens: int, max_tokens: int) -> int:
        """Adds a request, and returns its index in the arrays."""
        if not self._free:
            size = self.numbers.shape[1]
            self.numbers = np.concatenate([self.numbers, np.zeros_like(self.numbers)], axis=1)
            self._free = list(range(size, 2 * size))
        index = self.of[request] = self._free.pop()
        self.numbers[:, index] = num_tokens, max_tokens, 0, ANYWHERE
        return index

    def leave(self, request: Hashable) -> None:
        """Removes a request."""
        self._free.append(self.of.pop(request))
        self._last = None

    def index(self, request: Hashable) -> int:
        """Returns the index of a request in the arrays.

        Raises:
          ValueError: an unknown request.
        """
        if request not in self.of:
            raise ValueError(f"request={request!r} is unknown; add it first")
        return self.of[request]

    def indices(self, requests: Collection[Hashable]) -> np.ndarray:
        """Returns the indices of requests in the arrays, int64[N].

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
    """The running requests, oldest first; made anew when a request starts or stops running.

    index: their indices in the ledger.
    blocks: the most blocks that all of them hold while they decode, and the most that computing
      the prompt of one of them takes in addition.
    """

    names: list[Hashable]
    index: np.ndarray  # int64[N]
    rows: np.ndarray  # int64[N]
    blocks: tuple[int, int]

    @functools.cached_property
    def one_each(self) -> dict[Hashable, int]:
        """The work of a step in which each request computes one token."""
        return dict.fromkeys(self.names, 1)

    @functools.cached_property
    def places(self) -> dict[Hashable, int]:
        """The index of each request in such a step."""
        return dict(zip(self.names, range(len(self.names)), strict=True))


class Running(NamedTuple):
    """The running requests, oldest first, and their token counts."""

    order: InOrder
    computed: np.ndarray  # int64[N]
    num_tokens: np.ndarray  # int64[N]
    prefill_tokens: np.ndarray  # int64[N]
    chunk_ends: np.ndarray  # int64[N], tokens after which the next chunk has to end
    has_chunk_ends: bool
