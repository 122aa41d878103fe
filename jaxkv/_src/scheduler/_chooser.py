"""`Chooser`, which chooses the work of a step for a scheduler. No jax."""

import itertools
from collections.abc import Hashable

import numpy as np

from jaxkv._src.blocks import BlockManager, OutOfBlocksError
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._ledger import ANYWHERE, Request, Running
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._step import Schedule, Step


class Chooser:
    """Chooses the work of every step, takes blocks for it, and preempts requests."""

    def __init__(
        self,
        manager: BlockManager,
        queues: Queues,
        prompts: Prompts,
        admission: Admission,
        *,
        max_tokens: int,
        batch_size: int,
        decode_first: bool,
        preempts: bool,
        forks: int,
        cached_tokens: int,
    ):
        """Creates a chooser; the arguments after ``admission`` are those of `Scheduler`."""
        self._manager, self._prompts, self._admission = manager, prompts, admission
        self._queues, self._ledger = queues, queues.ledger
        self._max_tokens, self._batch_size, self._forks = max_tokens, batch_size, forks
        self._longest_chunk = min(max_tokens, manager.plan.limits.max_in_flight_tokens)
        self._decode_first, self._preempts = decode_first, preempts
        self._cached_tokens = cached_tokens

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
        for chosen in first:
            step.give_all(running, chosen)
        entrants = self._admission.entrants(step)
        for chosen in later:
            step.give_all(running, chosen)
        preempted = self._take_blocks(step, running, entrants)
        hits = self._admission.admit(step, entrants)
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
        manager, rows = self._manager, running.order.rows
        has_work = running.num_tokens > running.computed
        if self._forks and manager.block_pool.has_shared_blocks:
            pending = manager.pending_copies_by_row[rows]
            copies = pending | (has_work & manager.may_copy_by_row[rows])
            has_work &= ~copies | pending | (np.cumsum(copies) <= self._forks)
            step.forks -= min(self._forks, int(np.count_nonzero(copies)))
        unsent = manager.unsent_tokens_by_row[rows] * has_work
        if unsent.any():
            has_work &= (unsent == 0) | (np.cumsum(unsent) <= step.cached_tokens)
            step.cached_tokens -= int(unsent[has_work].sum())
        is_prefill = running.computed < running.prefill_tokens
        return (has_work & ~is_prefill).nonzero()[0], (has_work & is_prefill).nonzero()[0]

    # --- blocks of running requests -------------------------------------------------

    def _take_blocks(self, step: Step, running: Running, entrants: list[Request]) -> list[Hashable]:
        """Takes the blocks of all running requests with work; returns the preempted requests.

        If there are too few blocks, no waiting request is admitted.
        """
        names, work = running.order.names, step.work
        if entrants:
            waiting = {request.name for request in entrants}
            work = {name: count for name, count in work.items() if name not in waiting}
        if len(work) < len(names):
            self._manager.trim(name for name in names if name not in work)
        try:
            self._manager.grow(work)  # looked up once for this call and the step, if it is the same
        except OutOfBlocksError:
            for request in entrants:
                step.take_back(request.name)
            entrants.clear()
            is_prefill = running.computed < running.prefill_tokens
            return self._take_by_age(step, set(itertools.compress(names, is_prefill)))
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
        for name in [running.order.names[i] for i in decodes.tolist()]:
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
        self._queues.waiting.insert(request)
