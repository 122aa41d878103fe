"""`StepBudget`: the work of a step that is being chosen, and what more the step takes. No jax."""

import numpy as np

from jaxkv._src.scheduler._requests import ANYWHERE, Running

NONE = np.zeros(0, np.int64)


class StepBudget:
    """The work of a step that is being chosen, and what more the step takes.

    forks, cached_tokens: how many more the step takes; see `StepShape.for_plan`.
    """

    def __init__(
        self, max_tokens: int, batch_size: int, longest: int, *, forks: int, cached_tokens: int
    ):
        self._work, self._given = (NONE, NONE), list[tuple[int, int]]()  # later ones, one by one
        self.forks, self.cached_tokens = forks, cached_tokens
        self._tokens, self._requests, self._longest = max_tokens, batch_size, longest

    @property
    def is_full(self) -> bool:
        """Whether the step takes neither another token nor another request."""
        return self._tokens < 1 or self._requests < 1

    def __contains__(self, index: int) -> bool:
        """Returns whether the request of an index gets tokens."""
        return bool(np.count_nonzero(self.index == index))

    @property
    def work(self) -> tuple[np.ndarray, np.ndarray]:
        """The requests of the step in the `RequestTable`, and their new tokens, int64[N] each."""
        if self._given:
            given = np.array(self._given, np.int64).T
            self._given.clear()
            self._join(*given)
        return self._work

    @property
    def index(self) -> np.ndarray:
        """The requests of the step in the `RequestTable`, int64[N]."""
        return self.work[0]

    def work_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the part of `work` that is of one request."""
        requests, counts = self.work
        return requests[requests == index], counts[requests == index]

    def includes(self, index: np.ndarray) -> np.ndarray:
        """Returns whether the requests of N indices get tokens, bool[N]."""
        chosen = np.zeros(1 + max(index.max(initial=0), self.index.max(initial=0)), bool)
        chosen[self.index] = True
        return chosen[index]

    def has_room_for(self, running: Running) -> np.ndarray:
        """Returns the requests that get tokens if no other request does, bool[N]."""
        wanted = running.num_wanted
        if np.maximum.reduce(wanted, initial=0) <= 1:
            return wanted > 0
        at_most = np.minimum(running.chunk_ends - running.computed, self._tokens)
        is_whole = (running.draft_starts <= running.computed) & (wanted <= self._longest)
        return (wanted > 0) & ~(is_whole & (wanted > at_most))

    def num_given(
        self, num_tokens: int, *, at_most: int = ANYWHERE, draft_start: int = ANYWHERE
    ) -> int:
        """Returns how many of a request's next ``num_tokens`` tokens the step takes.

        Args:
          at_most: the most of these tokens until its chunk ends.
          draft_start: number of them after which the others are computed in one step, unless
            these are more than a step takes.
        """
        count = min(num_tokens, self._tokens, self._longest, at_most)
        if self.is_full or (draft_start <= 0 and count < num_tokens <= self._longest):
            return 0
        return max(0, count)

    def give(self, index: int, count: int) -> bool:
        """Gives a request tokens, of which the step takes all. Returns whether it got any."""
        if count:
            self._given.append((index, count))
            self._tokens, self._requests = self._tokens - count, self._requests - 1
        return count > 0

    def give_all(self, running: Running, chosen: np.ndarray) -> None:
        """Gives running requests their tokens, in order, while the step takes more.

        Args:
          chosen: int64[K], the positions of requests in ``running``.
        """
        if not chosen.size:
            return
        wanted = running.num_wanted[chosen]
        if np.maximum.reduce(wanted) <= 1:
            fit = max(0, min(wanted.size, self._tokens, self._requests))
            return self._add(running.index[chosen[:fit]], wanted[:fit])
        counts = np.minimum(wanted, self._longest)
        counts = np.minimum(counts, (running.chunk_ends - running.computed)[chosen])
        counts = np.minimum(counts, self._tokens - (np.add.accumulate(counts) - counts))
        is_cut = counts < wanted
        if is_cut.any() and (running.num_tokens > running.draft_starts)[chosen][is_cut].any():
            for at in chosen.tolist():  # some drafts may not fit
                self.give_one(running, at)
            return
        fit = min(int(np.count_nonzero(counts > 0)), self._requests)
        self._add(running.index[chosen[:fit]], counts[:fit])

    def give_one(self, running: Running, at: int) -> bool:
        """Gives a running request its tokens. Returns whether it got any."""
        computed = running.computed.item(at)
        count = self.num_given(
            running.num_tokens.item(at) - computed,
            at_most=running.chunk_ends.item(at) - computed,
            draft_start=running.draft_starts.item(at) - computed,
        )
        return self.give(running.index.item(at), count)

    def take_back(self, index: int) -> None:
        """Takes back the tokens of a request, if it has any."""
        requests, counts = self.work
        stays = requests != index
        if np.count_nonzero(stays) < stays.size:
            self._tokens, self._requests = (
                self._tokens + int(counts[~stays].sum()),
                self._requests + 1,
            )
            self._work = requests[stays], counts[stays]

    def _add(self, index: np.ndarray, counts: np.ndarray) -> None:
        self._tokens -= int(np.add.reduce(counts))
        self._requests -= index.size
        self._join(index, counts)

    def _join(self, index: np.ndarray, counts: np.ndarray) -> None:
        before, counts_before = self.work
        if before.size:
            index, counts = np.concatenate([before, index]), np.concatenate([counts_before, counts])
        self._work = index, counts
