"""The waiting and the running requests of a scheduler. No jax."""

import bisect
import itertools
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.scheduler._ledger import ANYWHERE, InOrder, Ledger, Request, Running


class Waiting:
    """The waiting requests. Iterates over them, the oldest first.

    Requests that arrive are the youngest, and join the end. Forks and preempted requests are
    older than these; they are few, and kept apart, so that none of them costs a look at all.
    """

    def __init__(self) -> None:
        self._arrived: dict[Hashable, Request] = {}
        self._older: list[Request] = []  # by age
        self._of: dict[Hashable, Request] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._of

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self._older, self._arrived.values())

    def get(self, name: Hashable) -> Request | None:
        """Returns a request; None if it does not wait."""
        return self._of.get(name)

    def arrive(self, request: Request) -> None:
        """Adds the youngest of all requests."""
        self._of[request.name] = self._arrived[request.name] = request

    def insert(self, request: Request) -> None:
        """Adds a request ahead of all that are younger."""
        self._of[request.name] = request
        bisect.insort(self._older, request, key=_age)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        del self._of[request.name]
        if self._arrived.pop(request.name, None) is None:
            del self._older[bisect.bisect_left(self._older, request.age, key=_age)]


class Queues:
    """All requests of a scheduler, in two queues.

    waiting: see `Waiting`.
    running: requests by name, the oldest first.
    ledger: token counts of all requests.
    in_chunks: running requests with a chunk that has to end after a given token.
    """

    def __init__(self, manager: BlockManager):
        self._manager = manager
        self.waiting = Waiting()
        self.running: dict[Hashable, Request] = {}
        self.ledger = Ledger()
        self.in_chunks: set[Hashable] = set()
        self._in_order: InOrder | None = None
        self._num_added = 0

    # --- reading --------------------------------------------------------------------

    @property
    def has_free_row(self) -> bool:
        """Whether another request can run."""
        return len(self.running) < self._manager.max_requests

    def known(self, request: Hashable) -> Request:
        """Returns a request; raises ValueError if it is unknown."""
        found = self.running.get(request) or self.waiting.get(request)
        if found is None:
            raise ValueError(f"request={request!r} is unknown; add it first")
        return found

    def num_tokens(self, request: Hashable) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return int(self.ledger.num_tokens[self.ledger.index(request)])

    def num_computed(self, request: Request) -> int:
        """Returns the tokens of a request that are in the cache."""
        return int(self._manager.computed_by_row[request.row]) if request.row >= 0 else 0

    def check_new(self, requests: Sequence[Hashable]) -> None:
        """Raises ValueError unless all names are new."""
        for request in requests:
            if request in self.running or request in self.waiting:
                raise ValueError(
                    f"request={request!r} waits or runs already; finish it, or use another name"
                )
        if len(set(requests)) < len(requests):
            raise ValueError(f"{list(requests)!r} names a request twice")

    def now_running(self) -> Running:
        """Returns the running requests and their token counts, oldest first."""
        if self._in_order is None:
            names, requests = list(self.running), self.running.values()
            rows = np.array([request.row for request in requests], np.int64)
            blocks = (
                sum([request.blocks[0] for request in requests]),
                max([request.blocks[1] for request in requests], default=0),
            )
            self._in_order = InOrder(names, self.ledger.indices(names), rows, blocks)
        order = self._in_order
        tokens, _, prefill_tokens, ends = self.ledger.numbers.take(order.index, axis=1)
        computed, in_chunks = self._manager.computed_by_row[order.rows], bool(self.in_chunks)
        return Running(order, computed, tokens, prefill_tokens, ends, in_chunks)

    # --- changes --------------------------------------------------------------------

    def next_age(self, donor: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the age of a new request; that of a fork follows its donor's."""
        self._num_added += 1
        return (*donor, self._num_added)

    def run(self, request: Request, row: int) -> None:
        """Marks a request as running in a row of the block tables."""
        request.row = row
        self.running[request.name] = request
        self._in_order = None

    def stop(self, request: Request) -> None:
        """Marks a request as no longer running."""
        del self.running[request.name]
        request.row, self._in_order = -1, None
        self.in_chunks.discard(request.name)
        self.ledger.chunk_ends[self.ledger.of[request.name]] = ANYWHERE

    def sort_running(self) -> None:
        """Restores the order of the running requests, after some were added."""
        by_age = sorted(self.running.values(), key=_age)
        self.running, self._in_order = {request.name: request for request in by_age}, None


def _age(request: Request) -> tuple[int, ...]:
    return request.age
