"""`Admission`, which starts waiting requests and forks. No jax."""

import functools
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import OutOfBlocksError, PrefixHit
from jaxkv._src.scheduler._budget import StepBudget
from jaxkv._src.scheduler._options import Options
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._requests import ANYWHERE, Request


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

    def __init__(self, options: Options, queues: Queues, prompts: Prompts):
        self._options, self._queues, self._prompts = options, queues, prompts
        self._manager, self._plan = options.manager, options.manager.plan
        self._admission_blocks = functools.lru_cache(maxsize=4096)(self._plan.admission_blocks)

    # --- waiting requests -----------------------------------------------------------

    def entrants(self, step: StepBudget) -> list[Request]:
        """Returns the waiting requests that may start, in order, and gives them tokens."""
        entrants: list[Request] = []
        free_rows, ledger = self._queues.num_free_rows, self._queues.ledger
        if not (self._queues.waiting and free_rows) or step.is_full:
            return entrants
        cached_left, room = step.cached_tokens, self._room()
        for request in self._queues.waiting:
            if len(entrants) == free_rows or step.is_full:
                break
            num_tokens = self._queues.num_tokens(request)
            if ledger.needs_token[request.index] or not self._knows_ids(request):
                break
            # Only a request that has all the room of a step to itself may take a part of a prefix.
            most = cached_left if cached_left == self._options.cached_tokens else ANYWHERE
            draft_start = ledger.draft_starts.item(request.index)
            cached, held = self._prompts.find(request, num_tokens, min(most, draft_start))
            owed = self._prompt_blocks(request) - held
            if not self._has_room(request, room, owed):
                break
            copies_state = bool(cached) and self._options.has_states
            if cached > cached_left or (copies_state and not step.forks):
                break
            count = num_tokens - cached
            if not step.give(request.name, count, draft_start=draft_start - cached):
                break
            cached_left -= cached
            step.forks -= copies_state
            step.has_shared |= cached > 0
            room.take(request, owed)
            entrants.append(request)
        return entrants

    def _knows_ids(self, request: Request) -> bool:
        """Returns whether the ids of a waiting request are known, except those of its drafts."""
        drafts = self._queues.ledger.draft_starts.item(request.index)
        return self._prompts.is_known(
            request.name, min(self._queues.num_tokens(request), drafts + 1)
        )

    def admit(self, step: StepBudget, entrants: Sequence[Request]) -> dict[Hashable, PrefixHit]:
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
        self, step: StepBudget, requests: Sequence[Request], room: Room
    ) -> dict[Hashable, PrefixHit]:
        """Starts requests, and takes the blocks of all of them at once; returns their hits."""
        hits: dict[Hashable, PrefixHit] = {}
        for request in requests:
            hit = self._start(step, request, room)
            if hit is None:
                break
            hits[request.name] = hit
        started = requests[: len(hits)]
        if hits and not self.grows({name: step.work[name] for name in hits}):
            started = self._grow_each(step, started)
        for request in started:
            self._queues.admitted(request)
            self._queues.run(request, hits[request.name].row)
            self._queues.ledger.prefill_tokens[request.index] = self._queues.num_tokens(request)
            if request.prompt.chunk_ends:
                self._queues.in_chunks[request.name] = request
        return {request.name: hits[request.name] for request in started}

    def _grow_each(self, step: StepBudget, started: Sequence[Request]) -> Sequence[Request]:
        """Takes blocks for the first requests, and ends the others; returns the first."""
        for count, request in enumerate(started):
            if not self.grows({request.name: step.work[request.name]}):
                for left_out in started[count:]:
                    self._prompts.finish(left_out)
                return started[:count]
        return started

    def _start(self, step: StepBudget, request: Request, room: Room) -> PrefixHit | None:
        """Starts a request with its cached prefix, if there are blocks for the rest."""
        name, num_tokens = request.name, self._queues.num_tokens(request)
        draft_start, held = self._queues.ledger.draft_starts.item(request.index), 0
        most = min(step.cached_tokens, draft_start)
        if step.has_shared:
            _, held = self._prompts.find(request, num_tokens, most)
        blocks = self._prompt_blocks(request)
        if not self._has_room(request, room, blocks - held):
            return None
        hit = self._prompts.start(
            request, num_tokens, draft_start=draft_start, max_cached_tokens=most
        )
        cached = hit.num_cached_tokens
        end = self._prompts.next_chunk_end(request, cached)
        step.take_back(name)
        step.give(name, num_tokens - cached, at_most=end - cached, draft_start=draft_start - cached)
        step.cached_tokens -= cached
        room.take(request, blocks - sum(hit.shared_blocks))
        return hit

    def grows(self, work: dict[Hashable, int]) -> bool:
        """Takes the blocks of requests. Returns False if there are too few, and none is taken."""
        try:
            self._manager.grow(work)
        except OutOfBlocksError:
            return False
        return True

    # --- room -----------------------------------------------------------------------

    def _room(self) -> Room:
        """Returns the room next to the running requests."""
        running, owed = self._queues.now_running(), 0
        if self._options.preemption:
            for at in np.flatnonzero(running.is_prefill).tolist():
                owed += self._owed_blocks(self._queues.running[running.order.names[at]])
        return Room(owed, running.order.blocks)

    def _has_room(self, request: Request, room: Room, owed: int = 0) -> bool:
        """Returns whether a request can start, whose prompt takes ``owed`` free blocks."""
        if not self._options.preemption:
            steady, in_flight = request.blocks
            most = room.steady + steady + max(room.in_flight, in_flight)
            return most <= self._plan.usable_blocks
        return room.owed + owed <= self._manager.num_free_blocks

    def _owed_blocks(self, request: Request) -> int:
        """Returns the blocks that a running request will still take until it decodes."""
        held = sum(self._manager.held_blocks(request.name))
        return max(0, self._prompt_blocks(request) - held)

    def _prompt_blocks(self, request: Request) -> int:
        """Returns the blocks that a request takes until it decodes, if it does."""
        longest = self._queues.ledger.max_tokens.item(request.index)
        return self._admission_blocks(min(self._queues.num_tokens(request) + 1, longest))

    # --- forks ----------------------------------------------------------------------

    def num_forks(self, donor: Request) -> int:
        """Returns how many samples of a request can share its blocks now."""
        tokens = max(donor.prompt_tokens, self._queues.num_computed(donor))
        if not self._options.forks or tokens > self._options.cached_tokens:
            return 0  # no step has room for the copies, or for the tokens
        count, free_rows = 0, self._queues.num_free_rows
        if self._options.preemption:
            return free_rows
        room = self._room()
        while count < free_rows and self._has_room(donor, room):
            room.take(donor, 0)
            count += 1
        return count

    def fork(self, donor: Request, sample: Request) -> bool:
        """Starts a sample with the blocks of its donor. Returns False if it has to wait."""
        if not self.num_forks(donor):
            return False
        try:
            self._manager.fork(donor.name, [sample.name])
        except ValueError:  # the newest state may be in the block of a draft
            return False
        sample.prompt.num_known = donor.prompt.num_known
        ledger = self._queues.ledger
        ledger.prefill_tokens[sample.index] = self._queues.num_computed(donor)
        self._queues.run(sample, self._manager.requests[sample.name])
        return True
