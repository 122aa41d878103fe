"""`Chooser`, which chooses the work of a step for a scheduler. No jax."""

import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager, OutOfBlocksError, PrefixHit
from jaxkv._src.scheduler._ledger import ANYWHERE, Request, Running
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._step import Schedule, Step


class Chooser:
    """Chooses the work of every step, takes blocks for it, and admits and preempts requests.

    It moves requests between the queues and starts and ends them in the manager; `Scheduler` adds
    and removes them.
    """

    def __init__(
        self,
        manager: BlockManager,
        queues: Queues,
        prompts: Prompts,
        *,
        max_tokens: int,
        batch_size: int,
        decode_first: bool,
        preempts: bool,
        forks: int,
        cached_tokens: int,
    ):
        """Creates a chooser; the arguments after ``prompts`` are those of `Scheduler`."""
        self._manager, self._prompts = manager, prompts
        self._queues, self._ledger = queues, queues.ledger
        self._max_tokens, self._batch_size, self._forks = max_tokens, batch_size, forks
        self._longest_chunk = min(max_tokens, manager.plan.limits.max_in_flight_tokens)
        self._decode_first, self._preempts = decode_first, preempts
        self._cached_tokens = cached_tokens
        self._row_copies = 0, 0  # number of the last upload, and row copies since

    def schedule(self) -> Schedule:
        """Chooses the work of the next step; see `Scheduler.schedule`."""
        step = Step(
            *(self._max_tokens, self._batch_size, self._longest_chunk),
            forks=self._forks,
            cached_tokens=self._cached_tokens,
        )
        self._move_chunk_ends()
        running = self._queues.now_running()
        decodes, prefills = self._with_work(step, running)
        first, later = (
            ((decodes, prefills), ()) if self._decode_first else ((prefills,), (decodes,))
        )
        claims = [step.give_all(running, chosen) for chosen in first]
        entrants = self._entrants(step)
        claims += [step.give_all(running, chosen) for chosen in later]
        rows, counts = (np.concatenate(part) for part in zip(*claims, strict=True))
        preempted = self._take_blocks(step, running, rows, counts, entrants)
        hits = self._admit(step, entrants)
        for chosen in later:
            self._fill(step, running, chosen)
        return Schedule(step.work, step.samples(), tuple(preempted), hits)

    def _move_chunk_ends(self) -> None:
        """Updates the tokens after which the next chunks of prompts have to end."""
        for name in list(self._queues.in_chunks):
            computed = self._queues.num_computed(self._queues.running[name])
            end = self._prompts.next_chunk_end(name, computed)
            self._ledger.chunk_ends[self._ledger.of[name]] = ANYWHERE if end is None else end
            if end is None:
                self._queues.in_chunks.remove(name)

    def _with_work(self, step: Step, running: Running) -> tuple[np.ndarray, np.ndarray]:
        """Returns the running requests with tokens to compute: decodes and prefills, as indices.

        A request copies the block that it writes next if that block is shared or kept. A step has
        room for ``forks`` copies; the youngest requests that would need more are left out.
        """
        has_work = running.num_tokens > running.computed
        if self._forks and self._manager.block_pool.has_shared_blocks:
            copies = has_work & self._manager.may_copy_by_row[running.rows]
            has_work &= ~copies | (np.cumsum(copies) <= self._forks)
            step.forks -= min(self._forks, int(np.count_nonzero(copies)))
        is_prefill = running.computed < running.prefill_tokens
        return (has_work & ~is_prefill).nonzero()[0], (has_work & is_prefill).nonzero()[0]

    # --- blocks of running requests -------------------------------------------------

    def _take_blocks(
        self,
        step: Step,
        running: Running,
        rows: np.ndarray,
        counts: np.ndarray,
        entrants: list[Request],
    ) -> list[Hashable]:
        """Takes the blocks of all running requests with work; returns the preempted requests.

        If there are too few blocks, no waiting request is admitted.
        """
        if rows.size < len(running.names):
            given = set(rows.tolist())
            left_out = zip(running.names, running.rows.tolist(), strict=True)
            self._manager.trim(name for name, row in left_out if row not in given)
        try:
            # As a mapping, the work is looked up once for this call and the step.
            self._manager.grow((rows, counts) if entrants else step.work)
        except OutOfBlocksError:
            for request in entrants:
                step.take_back(request.name)
            entrants.clear()
            is_prefill = running.computed < running.prefill_tokens
            return self._take_by_age(step, set(itertools.compress(running.names, is_prefill)))
        return []

    def _take_by_age(self, step: Step, prefills: set[Hashable]) -> list[Hashable]:
        """Takes blocks request by request, oldest first; returns the preempted requests."""
        preempted: list[Hashable] = []
        left = list(self._queues.running)  # to preempt, the youngest last
        is_short = False
        for name in list(self._queues.running):
            if name not in step.work:
                continue
            if is_short and name in prefills:  # an older one gets the free blocks
                step.take_back(name)
                self._manager.trim([name])
                continue
            while not self._grows(name, step.work[name]):
                if not self._preempts or left[-1] == name:
                    is_short = True
                    step.take_back(name)
                    break
                preempted.append(left.pop())
                if preempted[-1] in step.work:
                    step.take_back(preempted[-1])
                self._preempt(preempted[-1])
        return preempted

    def _grows(self, name: Hashable, count: int) -> bool:
        try:
            self._manager.grow({name: count})
        except OutOfBlocksError:
            return False
        return True

    def _fill(self, step: Step, running: Running, decodes: np.ndarray) -> None:
        """Gives decodes the tokens and blocks that requests which were not admitted left over."""
        for name in [running.names[i] for i in decodes.tolist()]:
            if name not in step.work and name in self._queues.running:
                computed = self._queues.num_computed(self._queues.running[name])
                if not step.give(name, self._queues.num_tokens(name) - computed):
                    break
                if not self._grows(name, step.work[name]):
                    step.take_back(name)

    def _preempt(self, name: Hashable) -> None:
        self._prompts.finish(name)
        request = self._queues.running[name]
        self._queues.stop(request)
        self._queues.wait(request)

    # --- admission ------------------------------------------------------------------

    def _entrants(self, step: Step) -> list[Request]:
        """Returns the waiting requests that may start, in order, and gives them tokens."""
        entrants: list[Request] = []
        cached_left, shared = step.cached_tokens, 0
        for request in self._queues.waiting.values():
            is_full = len(self._queues.running) + len(entrants) == self._manager.max_requests
            if is_full or step.is_full:
                break
            num_tokens = self._queues.num_tokens(request.name)
            cached, held = self._prompts.find(request.name, num_tokens)
            if not self._has_room(request, entrants, shared + held):
                break
            copies_state = bool(cached) and self._prompts.has_states
            if copies_state and not step.forks:
                break
            if cached > cached_left < step.cached_tokens:  # the first one may take a part
                break
            if not step.give(request.name, num_tokens - cached):
                break
            cached_left -= min(cached, cached_left)
            step.forks -= copies_state
            shared += held
            entrants.append(request)
        return entrants

    def _admit(self, step: Step, entrants: Sequence[Request]) -> dict[Hashable, PrefixHit]:
        """Starts requests in order, for as long as there are blocks; returns their hits."""
        hits: dict[Hashable, PrefixHit] = {}
        is_full = False
        for request in entrants:
            name = request.name
            hit = None if is_full else self._starts(step, request)
            if hit is None:
                is_full = True
                step.take_back(name)
                continue
            hits[name] = hit
            self._ledger.prefill_tokens[self._ledger.of[name]] = self._queues.num_tokens(name)
            del self._queues.waiting[name]
            self._queues.run(request, hit.row)
        if entrants:
            self._queues.sort_running()
        return hits

    def _starts(self, step: Step, request: Request) -> PrefixHit | None:
        """Starts a request with its cached prefix, if there are blocks for the rest."""
        name, num_tokens = request.name, self._queues.num_tokens(request.name)
        _, held = self._prompts.find(name, num_tokens)
        if not self._has_room(request, (), held):
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
        if not self._grows(name, step.work[name]):
            self._prompts.finish(name)
            return None
        step.cached_tokens -= cached
        if end is not None:
            self._queues.in_chunks.add(name)
        return hit

    def _has_room(self, request: Request, ahead: Sequence[Request], shared: int = 0) -> bool:
        """Returns whether a request can start after others; see ``preemption``.

        Args:
          request: the request to start.
          ahead: requests that start before it in the same step.
          shared: blocks of the prefixes of all these that running requests hold already.
        """
        if not self._preempts:
            everyone = (request, *ahead, *self._queues.running.values())
            steady, in_flight = zip(*(other.blocks for other in everyone), strict=True)
            return sum(steady) + max(in_flight) <= self._manager.plan.usable_blocks
        needed = sum(self._prompt_blocks(other) for other in (request, *ahead)) - shared
        running = self._queues.now_running()
        for at in np.flatnonzero(running.computed < running.prefill_tokens).tolist():
            other = self._queues.running[running.names[at]]
            held = sum(self._manager.held_blocks(other.name))
            needed += max(0, self._prompt_blocks(other) - held)
        return needed <= self._manager.num_free_blocks

    def _prompt_blocks(self, request: Request) -> int:
        """Returns the blocks that a request takes until it decodes."""
        tokens = min(self._queues.num_tokens(request.name) + 1, self._manager.plan.max_model_len)
        return self._manager.plan.admission_blocks(tokens)

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
        if not self._preempts and not self._has_room(sample, ()):
            return False
        self._row_copies = self._manager.num_uploads, copies + 1
        return True
