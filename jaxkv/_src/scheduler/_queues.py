"""The waiting and the running requests of a scheduler. No jax."""

import bisect
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.scheduler._requests import ANYWHERE, Request, RequestTable, Running


class Queues:
    """All requests of a scheduler.

    table: all requests, with their token counts.
    waiting: those that wait to be admitted, in line.
    running: those that run, in line.
    parents: requests that others of the same prompt wait for, to fork from them.
    in_chunks: running requests with a chunk that has to end after a given token.
    exporting: running requests whose blocks another cache may be reading or writing.
    """

    def __init__(self, manager: BlockManager):
        self._manager = manager
        self.table = RequestTable()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parents: dict[Request, None] = {}  # in order
        self.in_chunks: set[Request] = set()
        self.exporting: set[Request] = set()
        self._order: np.ndarray | None = None
        self._num_added = 0

    # --- reading --------------------------------------------------------------------

    @property
    def by_name(self) -> dict[Hashable, Request]:
        """All requests by name."""
        return self.table.by_name

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
        """All requests without a row, in line."""
        samples = [sample for parent in self.parents for sample in parent.samples]
        waiting = sorted([*self.waiting, *samples], key=_place) if samples else self.waiting
        return [request.name for request in waiting]

    def num_tokens(self, request: Request) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return self.table.num_tokens.item(request.index)

    def num_computed(self, request: Request) -> int:
        """Returns the tokens of a request that are in the cache."""
        return self._manager.computed_by_row.item(request.row) if request.row >= 0 else 0

    def waits(self, request: Request) -> bool:
        """Returns whether a request has no row; False if it has ended."""
        return request.row < 0 and self.by_name.get(request.name) is request

    def needs_token(self, request: Request) -> bool:
        """Returns whether all tokens of a request have been computed."""
        if request.row >= 0:
            return self.num_computed(request) >= self.num_tokens(request)
        return bool(self.table.needs_token[request.index])

    @property
    def in_line(self) -> list[Request]:
        """All requests, by priority and arrival."""
        return sorted(self.by_name.values(), key=_place)

    @property
    def order(self) -> np.ndarray:
        """The indices of the running requests, in line, int64[N]."""
        if self._order is None:
            self._order = np.array([request.index for request in self.running], np.int64)
        return self._order

    def now_running(self) -> Running:
        """Returns the running requests and their token counts, in line."""
        return self.table.at(self.order, self._manager.computed_by_row)

    def most_blocks(self) -> tuple[int, int]:
        """Returns the blocks of all running requests while they decode, and the most that one adds.

        See `Request.blocks`.
        """
        steady = sum([request.blocks[0] for request in self.running])
        return steady, max([request.blocks[1] for request in self.running], default=0)

    # --- changes --------------------------------------------------------------------

    def next_place(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a place in line behind those of a priority, or right behind that of a donor."""
        self._num_added += 1
        return (*before, self._num_added)

    def run(self, request: Request, row: int) -> None:
        """Marks a request as running in a row of the block tables."""
        request.row = self.table.rows[request.index] = row
        bisect.insort(self.running, request, key=_place)
        self._order = None

    def enter(self, request: Request) -> None:
        """Puts a request in line."""
        bisect.insort(self.waiting, request, key=_place)

    def leave(self, request: Request) -> None:
        """Takes a request out of line."""
        del self.waiting[bisect.bisect_left(self.waiting, request.place, key=_place)]

    def stop(self, request: Request) -> None:
        """Marks a request as no longer running."""
        del self.running[bisect.bisect_left(self.running, request.place, key=_place)]
        request.row = self.table.rows[request.index] = -1
        self._order = None
        self.in_chunks.discard(request)
        self.exporting.discard(request)
        self.table.chunk_ends[request.index] = ANYWHERE

    def wait(self, request: Request, *, needs_token: bool) -> None:
        """Puts a request that ran, or forks, in line, where none passes it any more."""
        self.table.needs_token[request.index], request.passes_left = needs_token, 0
        self.enter(request)

    def hold(self, parent: Request, samples: Sequence[Request]) -> None:
        """Queues samples until the prompt of their parent is computed, to fork from it."""
        if samples:
            parent.samples = list(samples)
            self.parents[parent] = None
        for sample in samples:
            sample.parent = parent

    def release(self, parent: Request) -> list[Request]:
        """Returns the samples that wait for the prompt of their parent, which then has none."""
        samples = parent.samples.copy()
        parent.samples.clear()
        self.parents.pop(parent, None)
        for sample in samples:
            sample.parent = sample.ids = None  # other tokens may follow the prompt
        return samples

    def restart(self) -> None:
        """Makes all requests wait. All but ``by_name`` and each one's parent is derived again."""
        requests = self.in_line
        for request in requests:
            request.row, request.chunk_ends = -1, ()
            request.samples = []
        for request in requests:
            parent = request.parent
            if parent is not None and self.by_name.get(parent.name) is parent:
                parent.samples.append(request)
            else:
                request.parent = None
        self.waiting = [request for request in requests if request.parent is None]
        self.parents = dict.fromkeys([request for request in requests if request.samples])
        for of_running in (self.running, self.in_chunks, self.exporting):
            of_running.clear()
        self._order = None
        self.table.restart()

    def remove(self, request: Request) -> None:
        """Forgets a request; the first of its samples computes the prompt instead."""
        parent, heir = request.parent, None
        if parent is not None:
            self.hold(parent, [sample for sample in self.release(parent) if sample is not request])
        elif request.samples:
            heir, *others = self.release(request)
            self.hold(heir, others)
        if request.row >= 0:
            self.stop(request)
        elif parent is None:
            self.leave(request)
        if heir is not None:
            self.enter(heir)
        request.family.pop(request, None)
        self.table.remove(request)


def _place(request: Request) -> tuple[int, ...]:
    return request.place
