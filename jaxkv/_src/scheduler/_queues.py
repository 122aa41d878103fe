"""The waiting and the running requests of a scheduler. No jax."""

import bisect
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.scheduler._requests import ANYWHERE, InOrder, Ledger, Request, Running


class Queues:
    """All requests of a scheduler.

    of: all requests by name.
    waiting: those that wait to be admitted, the oldest first.
    running: those that run by name, the oldest first.
    leaders: requests by name that others of the same prompt wait for, to fork from them.
    ledger: token counts of all requests.
    in_chunks: running requests with a chunk that has to end after a given token.
    handed: running requests whose blocks another cache may be reading or writing.
    """

    def __init__(self, manager: BlockManager):
        self._manager = manager
        self.of: dict[Hashable, Request] = {}
        self.waiting: list[Request] = []
        self.running: dict[Hashable, Request] = {}
        self.parents: dict[Hashable, Request] = {}
        self.ledger = Ledger()
        self.in_chunks: dict[Hashable, Request] = {}
        self.exporting: set[Hashable] = set()
        self._in_order: InOrder | None = None
        self._is_sorted = True  # `running`
        self._num_added = 0

    # --- reading --------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        """Requests that can run next to those that do."""
        return self._manager.max_requests - len(self.running)

    @property
    def may_admit(self) -> bool:
        """Whether requests wait, and rows are free."""
        return bool(self.waiting) and self.num_free_rows > 0

    @property
    def waiting_names(self) -> list[Hashable]:
        """All requests without a row, the oldest first."""
        held = [sample for parent in self.parents.values() for sample in parent.samples]
        if held:
            return [request.name for request in sorted([*self.waiting, *held], key=_age)]
        return [request.name for request in self.waiting]

    def num_tokens(self, request: Request) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return self.ledger.num_tokens.item(request.index)

    def num_computed(self, request: Request) -> int:
        """Returns the tokens of a request that are in the cache."""
        return self._manager.computed_by_row.item(request.row) if request.row >= 0 else 0

    def waits(self, name: Hashable) -> bool:
        """Returns whether a request has no row; False if it has ended."""
        return name in self.of and name not in self.running

    def needs_token(self, name: Hashable) -> bool:
        """Returns whether all tokens of a request have been computed."""
        request = self.of[name]
        if request.row >= 0:
            return self.num_computed(request) >= self.num_tokens(request)
        return bool(self.ledger.needs_token[request.index])

    @property
    def by_age(self) -> list[Request]:
        """All requests, the oldest first."""
        return sorted(self.of.values(), key=_age)

    @property
    def order(self) -> InOrder:
        """The running requests, oldest first."""
        if self._in_order is None:
            names, requests = list(self.running), list(self.running.values())
            index = np.array([request.index for request in requests], np.int64)
            self._in_order = InOrder(names, requests, index, self.ledger.rows[index])
        return self._in_order

    def now_running(self) -> Running:
        """Returns the running requests and their token counts, oldest first."""
        order = self.order
        tokens, _, prefill_tokens, ends, drafts, _, _ = self.ledger.numbers.take(
            order.index, axis=1
        )
        computed = self._manager.computed_by_row[order.rows]
        return Running(order, computed, tokens, prefill_tokens, ends, drafts)

    # --- changes --------------------------------------------------------------------

    def next_age(self, donor: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns the age of a new request; that of a fork follows its donor's."""
        self._num_added += 1
        return (*donor, self._num_added)

    def enter(self, request: Request, num_tokens: int, max_tokens: int) -> None:
        """Adds a request that neither waits nor runs yet."""
        request.index = self.ledger.enter(num_tokens, max_tokens)
        self.of[request.name] = request

    def run(self, request: Request, row: int) -> None:
        """Marks a request as running in a row of the block tables."""
        request.row = self.ledger.rows[request.index] = row
        youngest = next(reversed(self.running.values()), request)
        self._is_sorted = self._is_sorted and youngest.age <= request.age
        self.running[request.name] = request
        self._in_order = None

    def stop(self, request: Request) -> None:
        """Marks a request as no longer running."""
        del self.running[request.name]
        request.row = self.ledger.rows[request.index] = -1
        self._in_order = None
        self.in_chunks.pop(request.name, None)
        self.exporting.discard(request.name)
        self.ledger.chunk_ends[request.index] = ANYWHERE

    def wait(self, request: Request, *, needs_token: bool) -> None:
        """Puts a request that ran, or forks, ahead of all that wait and are younger."""
        self.ledger.needs_token[request.index] = needs_token
        bisect.insort(self.waiting, request, key=_age)

    def sort_running(self) -> None:
        """Restores the order of the running requests, after some were added."""
        if not self._is_sorted:
            by_age = sorted(self.running.values(), key=_age)
            self.running, self._in_order = {request.name: request for request in by_age}, None
            self._is_sorted = True

    def hold(self, parent: Request, samples: Sequence[Request]) -> None:
        """Lets requests wait until the prompt of another one is computed, to fork from it."""
        if samples:
            parent.samples = list(samples)
            self.parents[parent.name] = parent
        for sample in samples:
            sample.parent = parent

    def release(self, parent: Request) -> list[Request]:
        """Returns the requests that wait for the prompt of another one, and forgets that."""
        samples = parent.samples.copy()
        parent.samples.clear()
        self.parents.pop(parent.name, None)
        for sample in samples:
            sample.parent = sample.ids = None  # other tokens may follow the prompt
        return samples

    def restart(self) -> None:
        """Makes all requests wait. All but ``of`` and the leader of each is derived again."""
        requests = self.by_age
        for request in requests:
            request.row, request.chunk_ends = -1, ()
            request.samples = []
        for request in requests:
            parent = request.parent
            if parent is not None and self.of.get(parent.name) is parent:
                parent.samples.append(request)
            else:
                request.parent = None
        self.waiting = [request for request in requests if request.parent is None]
        self.parents = {request.name: request for request in requests if request.samples}
        for of_running in (self.running, self.in_chunks, self.exporting):
            of_running.clear()
        self._in_order, self._is_sorted = None, True
        self.ledger.restart([request.index for request in requests])

    def remove(self, request: Request) -> None:
        """Forgets a request; the first of its samples computes the prompt in its place."""
        parent, heir = request.parent, None
        if parent is not None:
            self.hold(parent, [sample for sample in self.release(parent) if sample is not request])
        elif request.samples:
            heir, *others = self.release(request)
            self.hold(heir, others)
        if request.row >= 0:
            self.stop(request)
        elif parent is None:
            del self.waiting[bisect.bisect_left(self.waiting, request.age, key=_age)]
        if heir is not None:
            bisect.insort(self.waiting, heir, key=_age)
        del self.of[request.name]
        self.ledger.leave(request.index)


def _age(request: Request) -> tuple[int, ...]:
    return request.age
