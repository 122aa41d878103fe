"""The requests of a scheduler, and their token counts in arrays. No jax."""

import dataclasses
import functools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.blocks import PrefixMatch
from jaxkv._src.internal.checks import check_at_most, check_name, check_positive
from jaxkv._src.internal.frozen import FrozenDict
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.prefixes import ExtraKey

ANYWHERE = 2**62  # past all tokens: a chunk may end after any token


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request.

    age: its place in the order of arrival, which a preemption does not change.
    blocks: the most blocks that it holds while it decodes, and the most that computing its prompt
      takes in addition.
    salt, extra_keys, boundaries: of its prefix, as for `BlockManager.start`.
    ids: the token ids, int32[N], as `Scheduler.add` found them, until they are looked up.
    found: the latest result of a lookup while it waits; None: none yet.
    num_known: number of token ids that the manager knows while it runs or is parked; None: none.
    may_go_on: whether the ids after these are those of what it computes, so that they may be kept.
    chunk_ends: numbers of tokens after which a later chunk has to end, while it runs.
    index: of its counts in the `Ledger`.
    row: its row in the block tables while it runs; -1: it waits.
    leader: a request of the same prompt, from which it forks once the prompt is computed.
    samples: requests of which this one is the leader.
    num_sampled: how many of ``samples`` get a token from the step that computes the prompt.
    """

    name: Hashable
    age: tuple[int, ...]
    prompt_tokens: int
    encoder_tokens: int
    blocks: tuple[int, int]
    salt: str | None
    extra_keys: Sequence[ExtraKey]
    boundaries: Sequence[int]
    ids: np.ndarray | None = None  # int32[N]
    found: PrefixMatch | None = None
    num_known: int | None = None
    may_go_on: bool = True
    chunk_ends: Sequence[int] = ()
    index: int = -1
    row: int = -1
    parent: "Request | None" = None
    samples: list["Request"] = dataclasses.field(default_factory=list)
    num_sampled: int = 0

    def sample(self, name: Hashable, age: tuple[int, ...]) -> "Request":
        """Returns another request of the same prompt."""
        sizes = self.prompt_tokens, self.encoder_tokens, self.blocks
        return Request(name, age, *sizes, self.salt, self.extra_keys, self.boundaries)


class Ledger:
    """Token counts of all requests, in arrays that a step reads at once: int64[N] each.

    num_tokens: known tokens of each request: prompt, sampled tokens and drafts.
    max_tokens: the most tokens that it will have.
    prefill_tokens: tokens that were known when it was admitted.
    chunk_ends: tokens after which its next chunk has to end; or `ANYWHERE`.
    draft_starts: tokens from which on one step computes all that it has, because a sampled token
      and its drafts are verified, and rejected, together; or `ANYWHERE`.
    rows: its row; -1: it waits.
    needs_token: whether it waits for a token that was sampled from it.
    """

    def __init__(self) -> None:
        self._hold(np.zeros((7, 64), np.int64))
        self._free: list[int] = list(range(64))
        # The counts that were read last, their names, and what was read.
        self._last: tuple[object, list[Hashable], np.ndarray, np.ndarray] | None = None

    def _hold(self, numbers: np.ndarray) -> None:
        self.numbers = numbers
        self.num_tokens, self.max_tokens, self.prefill_tokens, self.chunk_ends = numbers[:4]
        self.draft_starts, self.rows, self.needs_token = numbers[4:]

    def enter(self, num_tokens: int, max_tokens: int) -> int:
        """Adds a request, and returns its index in the arrays."""
        if not self._free:
            size = self.numbers.shape[1]
            self._hold(np.concatenate([self.numbers, np.zeros_like(self.numbers)], axis=1))
            self._free = list(range(size, 2 * size))
        index = self._free.pop()
        self.numbers[:, index] = num_tokens, max_tokens, 0, ANYWHERE, ANYWHERE, -1, 0
        return index

    def restart(self, index: Sequence[int]) -> None:
        """Makes all requests wait, whose indices these are."""
        self._hold(self.numbers)
        self.chunk_ends[:], self.rows[:], self.needs_token[:] = ANYWHERE, -1, False
        self._free = sorted({*range(self.rows.size)}.difference(index))
        self._last = None

    def leave(self, index: int) -> None:
        """Removes a request."""
        self._free.append(index)
        self._last = None

    def read(
        self, of: Mapping[Hashable, Request], num_tokens: Mapping[Any, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of requests in the arrays, and their numbers of tokens: int64[N].

        Raises:
          TypeError, ValueError: an unknown request, or numbers that are not positive ints.
        """
        if not isinstance(num_tokens, Mapping):
            raise TypeError(
                f"num_tokens must map requests to ints, got {type(num_tokens).__name__}"
            )
        names, index = list(num_tokens), None
        if self._last is not None:
            last, known, index, counts = self._last
            if last is num_tokens and isinstance(last, FrozenDict):
                return index, counts
            # Compared by identity, because `==` of a name may return an array.
            if not (len(known) == len(names) and all(map(operator.is_, known, names))):
                index = None
        if index is None:
            try:
                index = np.array([of[name].index for name in names], np.int64)
            except (KeyError, TypeError):
                index = np.array([find(of, name).index for name in names], np.int64)
        counts = _as_counts(list(num_tokens.values()))
        self._last = num_tokens, names, index, counts
        return index, counts


def _as_counts(counts: list[Any]) -> np.ndarray:
    """Returns positive ints as an array, int64[N]."""
    if counts.count(1) == len(counts) and type(sum(counts)) is int:  # 1.0 equals 1
        return np.ones(len(counts), np.int64)
    if set(map(type, counts)) - {int} or (counts and min(counts) < 1):
        for count in counts:
            check_positive(num_tokens=count)
    check_at_most(INT32_MAX, num_tokens=max(counts))
    return np.array(counts, np.int64)


def find(of: Mapping[Hashable, Request], name: Hashable) -> Request:
    """Returns the request of a name; raises ValueError if it is unknown."""
    check_name(name)
    if name not in of:
        raise ValueError(f"request={name!r} is unknown; add it first")
    return of[name]


@dataclasses.dataclass(eq=False)
class InOrder:
    """The running requests, oldest first; made anew when a request starts or stops running.

    index: their indices in the ledger.
    """

    names: list[Hashable]
    requests: list[Request]
    index: np.ndarray  # int64[N]
    rows: np.ndarray  # int64[N]

    @functools.cached_property
    def blocks(self) -> tuple[int, int]:
        """The sum of `Request.blocks` while all decode, and the most that one prompt adds."""
        steady = sum([request.blocks[0] for request in self.requests])
        return steady, max([request.blocks[1] for request in self.requests], default=0)

    @functools.cached_property
    def one_each(self) -> FrozenDict[Hashable, int]:
        """The work of a step in which each request computes one token."""
        return FrozenDict(dict.fromkeys(self.names, 1))

    @functools.cached_property
    def places(self) -> FrozenDict[Hashable, int]:
        """The index of each request among all that run."""
        return FrozenDict(zip(self.names, range(len(self.names)), strict=True))


class Running(NamedTuple):
    """The running requests, oldest first, and their token counts."""

    order: InOrder
    computed: np.ndarray  # int64[N]
    num_tokens: np.ndarray  # int64[N]
    prefill_tokens: np.ndarray  # int64[N]
    chunk_ends: np.ndarray  # int64[N]
    draft_starts: np.ndarray  # int64[N]

    @property
    def num_sampled(self) -> np.ndarray:
        """Tokens of each request without the drafts that are not verified yet, int64[N]."""
        return np.minimum(self.num_tokens, self.draft_starts + 1)

    @property
    def has_drafts(self) -> np.ndarray:
        """Whether each request has drafts that are not verified yet, bool[N]."""
        return self.num_tokens > self.draft_starts + 1

    @property
    def is_prefill(self) -> np.ndarray:
        """Whether each request still computes tokens that were known when it started, bool[N]."""
        return self.computed < self.prefill_tokens
