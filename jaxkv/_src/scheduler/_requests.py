"""The requests of a scheduler, and their token counts in arrays. No jax."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.blocks import PrefixMatch
from jaxkv._src.internal.checks import check_at_most, check_name, check_positive
from jaxkv._src.internal.named_ints import are_distinct
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.prefixes import ExtraKey

ANYWHERE = 2**62  # past all tokens: a chunk may end after any token
MOST_PASSES = 16  # of a request that does not fit


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request.

    place: in line: its priority, then its number in the order of arrival; no preemption changes it.
    blocks: the most blocks that it holds while it decodes, and the most that computing its prompt
      takes in addition.
    salt, extra_keys, boundaries: of its prefix, as for `BlockManager.start`.
    ids: the token ids, int32[N], as `Scheduler.add` found them, until they are looked up.
    found: the latest result of a lookup while it waits; None: none yet.
    chunk_ends: numbers of tokens after which a later chunk has to end, while it runs.
    index: in the `RequestTable`.
    row: its row in the block tables while it runs; -1: it waits.
    parent: a request of the same prompt, from which it forks once the prompt is computed.
    samples: requests whose parent this one is.
    num_sampled: how many of ``samples`` get a token from the step that computes the prompt.
    family: all requests of its prompt that have not ended, itself included, if there are several.
    passes_left: how many others may start that are behind it in line, while it does not fit.
    """

    name: Hashable
    place: tuple[int, ...]
    prompt_tokens: int
    encoder_tokens: int
    blocks: tuple[int, int]
    salt: str | None
    extra_keys: Sequence[ExtraKey]
    boundaries: Sequence[int]
    ids: np.ndarray | None = None  # int32[N]
    found: PrefixMatch | None = None
    chunk_ends: Sequence[int] = ()
    index: int = -1
    row: int = -1
    parent: "Request | None" = None
    samples: list["Request"] = dataclasses.field(default_factory=list)
    num_sampled: int = 0
    family: dict["Request", None] = dataclasses.field(default_factory=dict)  # in order
    passes_left: int = MOST_PASSES

    def sample(self, name: Hashable, place: tuple[int, ...]) -> "Request":
        """Returns another request of the same prompt."""
        sizes = self.prompt_tokens, self.encoder_tokens, self.blocks
        new = Request(name, place, *sizes, self.salt, self.extra_keys, self.boundaries)
        new.family = self.family
        self.family |= {self: None, new: None}
        return new


class RequestTable:
    """All requests, in arrays by index that a step reads at once: int64[N] each.

    by_name: all requests by name.
    requests, names: object[N].
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
        self.by_name: dict[Hashable, Request] = {}
        self._set(np.zeros((7, 64), np.int64), np.empty((2, 64), object))
        self._free: list[int] = list(range(64))

    def _set(self, numbers: np.ndarray, objects: np.ndarray) -> None:
        self._numbers, self._objects = numbers, objects
        self.num_tokens, self.max_tokens, self.prefill_tokens, self.chunk_ends = numbers[:4]
        self.draft_starts, self.rows, self.needs_token = numbers[4:]
        self.requests, self.names = objects

    def add(self, request: Request, num_tokens: int, max_tokens: int) -> None:
        """Adds a request, and gives it an index."""
        if not self._free:
            size, parts = self.rows.size, (self._numbers, self._objects)
            self._set(*[np.append(part, np.empty_like(part), axis=1) for part in parts])
            self._free = list(range(size, 2 * size))
        index = request.index = self._free.pop()
        self._numbers[:, index] = num_tokens, max_tokens, 0, ANYWHERE, ANYWHERE, -1, 0
        self.requests[index], self.names[index] = request, request.name
        self.by_name[request.name] = request

    def remove(self, request: Request) -> None:
        """Removes a request."""
        del self.by_name[request.name]
        self._numbers[:, request.index], self._objects[:, request.index] = 0, None
        self._free.append(request.index)

    def restart(self) -> None:
        """Makes all requests wait. All but ``by_name`` is derived again."""
        self._set(self._numbers, self._objects)
        self.chunk_ends[:], self.rows[:], self.needs_token[:] = ANYWHERE, -1, False
        self._objects[:] = None
        for request in self.by_name.values():
            self.requests[request.index], self.names[request.index] = request, request.name
        self._free = [index for index, request in enumerate(self.requests) if request is None]
        self.max_tokens[self._free] = 0

    def at(self, index: np.ndarray, computed_by_row: np.ndarray) -> "Running":
        """Returns the token counts of running requests at indices."""
        tokens, _, prefill_tokens, ends, drafts, rows, _ = self._numbers.take(index, axis=1)
        return Running(index, rows, computed_by_row[rows], tokens, prefill_tokens, ends, drafts)

    def check_index(self, index: np.ndarray) -> None:
        """Raises TypeError or ValueError unless an array holds indices of distinct requests."""
        if index.dtype != np.int64 or index.ndim != 1:
            raise TypeError(
                "num_tokens must map requests to ints, or be the int64[N] of their indices, "
                f"got {index.dtype}{list(index.shape)}"
            )
        if not are_distinct(index, self.max_tokens > 0):
            raise ValueError(
                f"num_tokens={index.tolist()} must be indices of distinct requests, from "
                "Scheduler.index or Schedule.index, none of which has ended"
            )

    def read(self, num_tokens: Mapping[Any, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of requests, and their numbers of tokens: int64[N] each.

        Raises:
          TypeError, ValueError: an unknown request, or numbers that are not positive ints.
        """
        if not isinstance(num_tokens, Mapping):
            raise TypeError(
                f"num_tokens must map requests to ints, got {type(num_tokens).__name__}"
            )
        try:
            index = [self.by_name[name].index for name in num_tokens]
        except (KeyError, TypeError):
            index = [find(self.by_name, name).index for name in num_tokens]
        return np.array(index, np.int64), _as_counts(list(num_tokens.values()))


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


class Running(NamedTuple):
    """N running requests, first in line first, and their token counts, int64[N] each."""

    index: np.ndarray  # in the `RequestTable`
    rows: np.ndarray
    computed: np.ndarray
    num_tokens: np.ndarray
    prefill_tokens: np.ndarray
    chunk_ends: np.ndarray
    draft_starts: np.ndarray

    @property
    def num_wanted(self) -> np.ndarray:
        """Tokens of each request that are to be computed, int64[N]."""
        return self.num_tokens - self.computed

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
