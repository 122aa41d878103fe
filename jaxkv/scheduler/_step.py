"""The work of one step: as it is chosen, and as it is handed out. No jax."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxkv.scheduler._ledger import Running


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one step.

    work: new tokens by request, for `BlockManager.step`.
    samples: requests of ``work`` whose newest token the step computes, and the index of each in
      the batch: sample the next one of each, and tell the scheduler by `Scheduler.append`.
    preempted: requests that lost their blocks and wait to be computed again from the start.
    """

    work: dict[Any, int]
    samples: dict[Any, int]
    preempted: tuple[Any, ...]


class Step:
    """The work of a step in the making, and what is left of its sizes.

    unfinished: requests of the work that will not have computed all their tokens.
    """

    def __init__(self, max_tokens: int, batch_size: int, longest: int):
        self.work: dict[Hashable, int] = {}
        self.unfinished: set[Hashable] = set()
        self._tokens, self._requests, self._longest = max_tokens, batch_size, longest

    def give(self, name: Hashable, num_tokens: int) -> bool:
        """Gives a request the tokens that it has to compute, as far as they go."""
        count = min(num_tokens, self._tokens, self._longest)
        if count < 1 or self._requests < 1:
            return False
        self._add([name], [count], [count < num_tokens])
        return True

    def give_all(self, running: Running, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gives running requests their tokens, int64[K] indices. Returns rows and counts."""
        wanted = (running.num_tokens - running.computed)[chosen]
        counts = np.minimum(wanted, self._longest)
        ends = np.cumsum(counts)
        counts = np.minimum(counts, self._tokens - (ends - counts))
        fit = min(int(np.count_nonzero(counts > 0)), self._requests)
        chosen, counts, wanted = chosen[:fit], counts[:fit], wanted[:fit]
        names = running.names
        if fit < len(names):
            names = [names[i] for i in chosen.tolist()]
        self._add(names, counts.tolist(), (counts < wanted).tolist())
        return running.rows[chosen], counts

    def take_back(self, name: Hashable) -> None:
        """Takes back what a request was given."""
        self._tokens += self.work.pop(name)
        self._requests += 1
        self.unfinished.discard(name)

    def samples(self) -> dict[Hashable, int]:
        """Returns the requests that compute their last token, and their indices in the step."""
        if not self.unfinished:
            return dict(zip(self.work, range(len(self.work)), strict=True))
        return {name: i for i, name in enumerate(self.work) if name not in self.unfinished}

    def _add(self, names: Sequence[Hashable], counts: list[int], unfinished: list[bool]) -> None:
        self.work.update(zip(names, counts, strict=True))
        self._tokens -= sum(counts)
        self._requests -= len(counts)
        if any(unfinished):
            self.unfinished.update(itertools.compress(names, unfinished))
