"""`StepBudget`: the work of a step that is being chosen, and the room that is left. No jax."""

import itertools
from collections.abc import Hashable

import numpy as np

from jaxkv._src.internal.frozen import FrozenDict
from jaxkv._src.scheduler._requests import ANYWHERE, InOrder, Running


class StepBudget:
    """The work of a step that is being chosen, and the room that is left in it.

    unfinished: requests of the work that will still have tokens to compute after the step.
    forks, cached_tokens: room for these that is left; see `StepShape.for_plan`.
    everyone: all running requests, if the work is one token of each; else None.
    """

    def __init__(
        self, max_tokens: int, batch_size: int, longest: int, *, forks: int, cached_tokens: int
    ):
        self.work: dict[Hashable, int] = {}
        self.forks, self.cached_tokens = forks, cached_tokens
        self.unfinished: set[Hashable] = set()
        self._tokens, self._requests, self._longest = max_tokens, batch_size, longest
        self.everyone: InOrder | None = None

    @property
    def is_full(self) -> bool:
        """Whether the step has no room for another token or another request."""
        return self._tokens < 1 or self._requests < 1

    def has_room_for(self, running: Running) -> np.ndarray:
        """Returns the requests that get tokens if no other request does, bool[N]."""
        wanted = running.num_tokens - running.computed
        at_most = np.minimum(running.chunk_ends - running.computed, self._tokens)
        is_whole = (running.draft_starts <= running.computed) & (wanted <= self._longest)
        return (wanted > 0) & ~(is_whole & (wanted > at_most))

    def give(
        self,
        name: Hashable,
        num_tokens: int,
        *,
        at_most: int = ANYWHERE,
        draft_start: int = ANYWHERE,
    ) -> bool:
        """Gives a request up to ``num_tokens`` tokens. Returns whether it got any.

        Args:
          at_most: the most of these tokens until its chunk ends.
          draft_start: number of them after which the others are computed in one step, unless
            these are more than a step takes.
        """
        count = min(num_tokens, self._tokens, self._longest, at_most)
        if draft_start <= 0 and count < num_tokens <= self._longest:
            count = 0
        if count < 1 or self.is_full:
            return False
        self._add({name: count}, count)
        if count < num_tokens:
            self.unfinished.add(name)
        return True

    def give_all(self, running: Running, chosen: np.ndarray) -> None:
        """Gives running requests their tokens, in order, for as long as there is room.

        Args:
          chosen: int64[K], the indices of requests in ``running``.
        """
        if not chosen.size:
            return
        wanted = (running.num_tokens - running.computed)[chosen]
        counts = np.minimum(wanted, self._longest)
        counts = np.minimum(counts, (running.chunk_ends - running.computed)[chosen])
        counts = np.minimum(counts, self._tokens - (np.add.accumulate(counts) - counts))
        is_cut = counts < wanted
        if is_cut.any() and (running.num_tokens > running.draft_starts)[chosen][is_cut].any():
            for at in chosen.tolist():  # some drafts may not fit
                self.give_one(running, at)
            return
        fit = min(int(np.count_nonzero(counts > 0)), self._requests)
        names, num_tokens = running.order.names, int(np.add.reduce(counts[:fit]))
        if num_tokens == fit == len(names):
            self._add(running.order.one_each, num_tokens)
            self.everyone = running.order
        else:
            names = [names[i] for i in chosen[:fit].tolist()]
            self._add(dict(zip(names, counts[:fit].tolist(), strict=True)), num_tokens)
        unfinished = is_cut[:fit].tolist()
        if True in unfinished:
            self.unfinished.update(itertools.compress(names, unfinished))

    def give_one(self, running: Running, at: int) -> bool:
        """Gives a running request its tokens. Returns whether it got any."""
        computed = running.computed.item(at)
        return self.give(
            running.order.names[at],
            running.num_tokens.item(at) - computed,
            at_most=running.chunk_ends.item(at) - computed,
            draft_start=running.draft_starts.item(at) - computed,
        )

    def take_back(self, name: Hashable) -> None:
        """Takes back the tokens of a request."""
        self._tokens += self.work.pop(name)
        self._requests += 1
        self.unfinished.discard(name)
        self.everyone = None

    @property
    def chosen(self) -> FrozenDict[Hashable, int]:
        """The work as it is now: the same object for as long as all requests get one token."""
        return FrozenDict(self.work) if self.everyone is None else self.everyone.one_each

    def samples(self) -> FrozenDict[Hashable, int]:
        """Returns the requests that compute their last token, and their indices in the step."""
        if self.everyone is not None and not self.unfinished:
            return self.everyone.places
        places = enumerate(self.work)
        return FrozenDict({name: i for i, name in places if name not in self.unfinished})

    def _add(self, work: dict[Hashable, int], num_tokens: int) -> None:
        if self.work:
            self.work.update(work)
        else:
            self.work = work.copy()
        self._tokens -= num_tokens
        self._requests -= len(work)
        self.everyone = None
