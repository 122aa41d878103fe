"""`Admission`, which starts waiting requests and forks. No jax."""

import functools
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager, OutOfBlocksError, PrefixHit
from jaxkv._src.scheduler._ledger import Request
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._step import Step


class Room:
    """Blocks that are left for requests that start, kept up to date while they do.

    owed: with preemption, free blocks that unfinished prompts will still take.
    steady, in_flight: without preemption, the most blocks that requests hold while they decode,
      and the most that computing the prompt of one of them takes in addition.
    """

    def __init__(self, owed: int, blocks: tuple[int, int]):
        self.owed, (self.steady, self.in_flight) = owed, blocks

    def take(self, request: Request, owed: int) -> None:
        """Counts a request that starts, and the free blocks that its prompt will take."""
        steady, in_flight = request.blocks
        self.steady, self.in_flight = self.steady + steady, max(self.in_flight, in_flight)
        self.owed += owed


class Admission:
    """Admits waiting requests and forks, for as long as there are rows and blocks."""

    def __init__(
        self,
        manager: BlockManager,
        queues: Queues,
        prompts: Prompts,
        *,
        preempts: bool,
        forks: int,
    ):
        """Creates an admission; ``preempts`` and ``forks`` are arguments of `Scheduler`."""
        self._manager, self._queues, self._prompts = manager, queues, prompts
        self._preempts, self._forks, self._plan = preempts, forks, manager.plan
        self._admission_blocks = functools.lru_cache(maxsize=4096)(self._plan.admission_blocks)
        self._row_copies = 0, 0  # number of the last upload, and row copies since

    # --- waiting requests -----------------------------------------------------------

    def entrants(self, step: Step) -> list[Request]:
        """Returns the waiting requests that may start, in order, and gives them tokens."""
        entrants: list[Request] = []
        free_rows = self._manager.max_requests - len(self._queues.running)
        if not (len(self._queues.waiting) and free_rows) or step.is_full:
            return entrants
        cached_left, room = step.cached_tokens, self._room()
        for request in self._queues.waiting:
            if len(entrants) == free_rows or step.is_full:
                break
            num_tokens = self._queues.num_tokens(request.name)
            cached, held = self._prompts.find(request.name, num_tokens)
            if not self._has_room(request, room, held):
                break
            copies_state = bool(cached) and self._prompts.has_states
            if copies_state and not step.forks:
                break
            if cached > cached_left < step.cached_tokens:  # the first one may take a part
                break
            if not step.give(request.name, num_tokens - cached):
                break
            cached_left -= min(cached, cached_left)
            step.has_shared |= cached > 0
            step.forks -= copies_state
            room.take(request, self._prompt_blocks(request) - held)
            entrants.append(request)
        return entrants

    def admit(self, step: Step, entrants: Sequence[Request]) -> dict[Hashable, PrefixHit]:
        """Starts requests in order, for as long as there are blocks; returns their hits."""
        hits: dict[Hashable, PrefixHit] = {}
        if not entrants:
            return hits
        room, share = self._room(), step.has_shared
        # A request that shares blocks may find them evicted for the one before it, which then has
        # to have its blocks first.
        for together in [[request] for request in entrants] if share else [entrants]:
            owed = room.owed
            hits |= self._start_all(step, together, room)
            if together[-1].row < 0:
                break
            if share:
                room.owed = owed + self._owed_blocks(together[-1])
        for request in entrants:
            if request.row < 0:
                step.take_back(request.name)
        self._queues.sort_running()
        return hits

    def _start_all(
        self, step: Step, requests: Sequence[Request], room: Room
    ) -> dict[Hashable, PrefixHit]:
        """Starts requests, and takes the blocks of all of them at once; returns their hits."""
        hits: dict[Hashable, PrefixHit] = {}
        for request in requests:
            hit = self._start(step, request, room)
            if hit is None:
                break
            hits[request.name] = hit
        if hits and not self._grows({name: step.work[name] for name in hits}):
            hits = self._grow_each(step, hits)
        for request in requests[: len(hits)]:
            self._queues.waiting.remove(request)
            self._queues.run(request, hits[request.name].row)
        return hits

    def _grow_each(self, step: Step, hits: dict[Hashable, PrefixHit]) -> dict[Hashable, PrefixHit]:
        """Takes blocks for the first requests, and ends the others; returns the hits of these."""
        for count, name in enumerate(hits):
            if not self._grows({name: step.work[name]}):
                for left_out in list(hits)[count:]:
                    self._prompts.finish(left_out)
                    self._queues.in_chunks.discard(left_out)
                return dict(list(hits.items())[:count])
        return hits

    def _start(self, step: Step, request: Request, room: Room) -> PrefixHit | None:
        """Starts a request with its cached prefix, if there are blocks for the rest."""
        name, num_tokens = request.name, self._queues.num_tokens(request.name)
        held = self._prompts.find(name, num_tokens)[1] if step.has_shared else 0
        if not self._has_room(request, room, held):
            return None
        hit = self._prompts.start(
            name,
            num_tokens,
            encoder_tokens=request.encoder_tokens,
            max_cached_tokens=step.cached_tokens,
        )
        cached = hit.num_cached_tokens
        end = self._prompts.next_chunk_end(name, cached)
        step.take_back(name)
        step.give(name, num_tokens - cached, None if end is None else end - cached)
        step.cached_tokens -= cached
        if end is not None:
            self._queues.in_chunks.add(name)
        self._queues.ledger.prefill_tokens[self._queues.ledger.of[name]] = num_tokens
        room.take(request, self._prompt_blocks(request) - sum(hit.shared_blocks))
        return hit

    def _grows(self, work: dict[Hashable, int]) -> bool:
        try:
            self._manager.grow(work)
        except OutOfBlocksError:
            return False
        return True

    # --- room -----------------------------------------------------------------------

    def _room(self) -> Room:
        """Returns the room next to the running requests."""
        running, owed = self._queues.now_running(), 0
        if self._preempts:
            for at in np.flatnonzero(running.computed < running.prefill_tokens).tolist():
                owed += self._owed_blocks(self._queues.running[running.order.names[at]])
        return Room(owed, running.order.blocks)

    def _has_room(self, request: Request, room: Room, held: int = 0) -> bool:
        """Returns whether a request can start; see ``preemption``.

        Args:
          request: the request.
          room: the room that is left.
          held: blocks of its prefix that running requests hold already.
        """
        if not self._preempts:
            steady, in_flight = request.blocks
            most = room.steady + steady + max(room.in_flight, in_flight)
            return most <= self._plan.usable_blocks
        needed = room.owed + self._prompt_blocks(request) - held
        return needed <= self._manager.num_free_blocks

    def _owed_blocks(self, request: Request) -> int:
        """Returns the blocks that a running request will still take until it decodes."""
        held = sum(self._manager.held_blocks(request.name))
        return max(0, self._prompt_blocks(request) - held)

    def _prompt_blocks(self, request: Request) -> int:
        """Returns the blocks that a request takes until it decodes."""
        tokens = min(self._queues.num_tokens(request.name) + 1, self._plan.max_model_len)
        return self._admission_blocks(tokens)

    # --- forks ----------------------------------------------------------------------

    def fork(self, donor: Hashable, sample: Request) -> bool:
        """Starts a sample with the blocks of its donor. Returns False if it has to wait."""
        if not self._can_fork(sample):
            return False
        try:
            self._manager.fork(donor, [sample.name])
        except ValueError:  # the newest state may be in the block of a draft
            return False
        self._prompts.join(donor, sample.name)
        self._queues.run(sample, self._manager.requests[sample.name])
        return True

    def _can_fork(self, sample: Request) -> bool:
        """Returns whether a sample can share blocks now; counts the rows that are copied."""
        uploads, copies = self._row_copies
        copies = copies if uploads == self._manager.num_uploads else 0
        if copies >= self._forks or not self._queues.has_free_row:
            return False
        if not self._preempts and not self._has_room(sample, self._room()):
            return False
        self._row_copies = self._manager.num_uploads, copies + 1
        return True
