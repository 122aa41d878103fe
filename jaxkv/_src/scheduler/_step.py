"""`Schedule`, the work of one step, and `Step`, which collects that work. No jax."""

import dataclasses
import itertools
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxkv._src.blocks import PrefixHit
from jaxkv._src.scheduler._ledger import InOrder, Running


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one step.

    work: new tokens by request, for `BlockManager.step`.
    samples: requests of ``work`` whose last known token the step computes, and the index of each
      in the batch: sample the next token of each, and report it with `Scheduler.append`.
    preempted: requests that lost their blocks and wait to be computed again: from the start, or
      from where the cache still holds what they computed.
    hits: requests that start in this step, and the prefix hit of each.
    """

    work: dict[Any, int]
    samples: dict[Any, int]
    preempted: tuple[Any, ...]
    hits: dict[Any, PrefixHit]


class Step:
    """The work of a step that is being chosen, and the room that is left in it.

    unfinished: requests of the work that will still have tokens to compute after the step.
    forks, cached_tokens: room for these that is left; see `StepShape.for_plan`.
    has_shared: whether a request that starts in the step has a cached prefix.
    """

    def __init__(
        self, max_tokens: int, batch_size: int, longest: int, *, forks: int, cached_tokens: int
    ):
        self.work: dict[Hashable, int] = {}
        self.forks, self.cached_tokens = forks, cached_tokens
        self.unfinished: set[Hashable] = set()
        self.has_shared = False
        self._tokens, self._requests, self._longest = max_tokens, batch_size, longest
        self._everyone: InOrder | None = None  # all that run, if the work is one token of each

    @property
    def is_full(self) -> bool:
        """Whether the step has no room for another token or another request."""
        return self._tokens < 1 or self._requests < 1

    def give(self, name: Hashable, num_tokens: int, at_most: int | None = None) -> bool:
        """Gives a request up to ``num_tokens`` tokens. Returns whether it got any."""
        count = min(num_tokens, self._tokens, self._longest)
        count = count if at_most is None else min(count, at_most)
        if count < 1 or self.is_full:
            return False
        self._add({name: count}, count)
        if count < num_tokens:
            self.unfinished.add(name)
        return True

    def give_all(self, running: Running, chosen: np.ndarray) -> None:
        """Gives running requests their tokens, in order.

        Args:
          running: the running requests.
          chosen: int64[K], the indices of requests in ``running``.
        """
        if not chosen.size:
            return
        wanted = (running.num_tokens - running.computed)[chosen]
        counts = np.minimum(wanted, self._longest)
        if running.has_chunk_ends:
            counts = np.minimum(counts, (running.chunk_ends - running.computed)[chosen])
        counts = np.minimum(counts, self._tokens - (np.add.accumulate(counts) - counts))
        fit = min(int(np.count_nonzero(counts > 0)), self._requests)
        chosen, counts, wanted = chosen[:fit], counts[:fit], wanted[:fit]
        names, num_tokens = running.order.names, int(np.add.reduce(counts))
        if num_tokens == fit == len(names) and not self.work:
            self._add(running.order.one_each, num_tokens)
            self._everyone = running.order
        else:
            names = [names[i] for i in chosen.tolist()]
            self._add(dict(zip(names, counts.tolist(), strict=True)), num_tokens)
        unfinished = (counts < wanted).tolist()
        if True in unfinished:
            self.unfinished.update(itertools.compress(names, unfinished))

    def take_back(self, name: Hashable) -> None:
        """Takes back the tokens of a request."""
        self._tokens += self.work.pop(name)
        self._requests += 1
        self.unfinished.discard(name)
        self._everyone = None

    def samples(self) -> dict[Hashable, int]:
        """Returns the requests that compute their last token, and their indices in the step."""
        if self.unfinished:
            return {name: i for i, name in enumerate(self.work) if name not in self.unfinished}
        if self._everyone is not None:
            return self._everyone.places.copy()
        return dict(zip(self.work, range(len(self.work)), strict=True))

    def _add(self, work: dict[Hashable, int], num_tokens: int) -> None:
        if self.work:
            self.work.update(work)
        else:
            self.work = work.copy()
        self._tokens -= num_tokens
        self._requests -= len(work)
        self._everyone = None
