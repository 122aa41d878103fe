"""`Chooser`, which chooses the work of a step for a scheduler. No jax."""

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxkv._src.blocks import PrefixHit
from jaxkv._src.internal.frozen import FrozenDict
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._budget import StepBudget
from jaxkv._src.scheduler._options import Options
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._requests import InOrder, Request, Running
from jaxkv._src.scheduler._schedule import Schedule

CHECKED_AT_ONCE = 32  # requests whose token ids a step checks that goes on from the last one


class Chooser:
    """Chooses the work of every step, takes blocks for it, and preempts requests."""

    def __init__(self, options: Options, queues: Queues, prompts: Prompts, admission: Admission):
        self._options, self._manager = options, options.manager
        self._queues, self._ledger = queues, queues.ledger
        self._prompts, self._admission = prompts, admission
        limits = options.manager.plan.limits
        self._longest_chunk = min(options.max_tokens, limits.max_in_flight_tokens)
        # A step, those preempted for it, and its hits, less what was forgotten since.
        self._last: tuple[StepBudget, list[Hashable], dict[Hashable, PrefixHit]] | None = None
        self._num_uploads = 0  # when that was chosen
        #: whether the last schedule was empty, and no request has changed since
        self.is_idle = False
        #: all running requests, if each has got one token since the last schedule; nothing else did
        self.extended: InOrder | None = None

    def schedule(self, max_tokens: int) -> Schedule:
        """Chooses the work of the next step; see `Scheduler.schedule`."""
        is_carried_out = self._num_uploads != self._manager.num_uploads
        if self._last is None or is_carried_out or not self._last[0].work:
            if self._last is None or not self._goes_on(self._last[0], max_tokens):
                self._last = self._choose(min(max_tokens, self._options.max_tokens))
            self._num_uploads = self._manager.num_uploads
        step, preempted, hits = self._last
        order, work = self._queues.order, step.chosen
        computed = self._manager.computed_by_row[order.rows]
        places = None if step.everyone is order else order.places
        return Schedule(
            work,
            self._samples(step),
            tuple([name for name in preempted if self._queues.waits(name)]),
            {name: hit for name, hit in hits.items() if name in self._queues.running},
            functools.partial(self._token_ids, work, places, computed),
        )

    def restart(self) -> None:
        """Forgets all schedules so far."""
        self._last, self.is_idle, self.extended = None, False, None

    def is_chosen(self, name: Hashable) -> bool:
        """Returns whether a request is in a schedule that was not carried out yet."""
        is_carried_out = self._num_uploads != self._manager.num_uploads
        return self._last is not None and not is_carried_out and name in self._last[0].work

    def forget(self, name: Hashable) -> None:
        """Takes a request out of the schedule that was not carried out."""
        if self._last is not None and name in self._last[0].work:
            self._last[0].take_back(name)

    def _goes_on(self, step: StepBudget, max_tokens: int) -> bool:
        """Takes blocks for the work of the last step, if that is the work of this one.

        That is so while all running requests decode and none can start. None of them copies a block
        then: what shares one starts, and what is rewound leaves the last step. A part of their
        token ids is checked each time.
        """
        order, manager = self._queues.order, self._manager
        if not (order is step.everyone is self.extended) or self._queues.may_admit:
            return False
        turns = cdiv(len(order.names), CHECKED_AT_ONCE)
        start = CHECKED_AT_ONCE * (manager.num_uploads % turns)
        checked = slice(start, start + CHECKED_AT_ONCE)
        self._check(order.names[checked], manager.computed_by_row[order.rows[checked]] + 1)
        return max_tokens >= len(order.names) and self._admission.grows(order.one_each)

    def _choose(
        self, max_tokens: int
    ) -> tuple[StepBudget, list[Hashable], dict[Hashable, PrefixHit]]:
        """Returns a new step, the requests preempted for it, and its hits."""
        step = self._budget(max_tokens)
        self._move_chunk_ends()
        running = self._queues.now_running()
        self._check(running.order.names, running.num_sampled)
        decodes, prefills, needs = self._with_work(step, running)
        prefill_first, names = self._options.order == "prefill_first", running.order.names
        for chosen in (prefills, decodes) if prefill_first else (decodes, prefills):
            step.give_all(running, chosen)
        if needs.any():
            copies, cached_tokens = needs[:, [name in step.work for name in names]].sum(axis=1)
            step.forks, step.cached_tokens = step.forks - copies, step.cached_tokens - cached_tokens
        preempted: list[Hashable] = []
        hits: dict[Hashable, PrefixHit] = {}
        if not self._take_blocks(step, running):
            preempted = self._take_by_age(step, running)
        elif self._queues.may_admit:
            # Prompts come before decodes, which keep their blocks and get the tokens that are left.
            may_wait = bool(step.work)
            later = [at for at in decodes.tolist() if prefill_first and names[at] in step.work]
            for at in later:
                step.take_back(names[at])
            hits = self._admission.admit(step, may_wait=may_wait)
            for at in later:
                step.give_one(running, at)
        if not step.work:
            preempted += self._force(step, running, np.union1d(decodes, prefills))
        if not step.work and any(map(self._manager.is_loading, self._queues.running)):
            # The others get no blocks, so that the step has to wait for host memory.
            step = self._budget(max_tokens)
            *with_work, _ = self._with_work(step, running, may_wait=False)
            preempted += self._force(step, running, np.union1d(*with_work))
        if not step.work and max_tokens == self._options.max_tokens:
            self._check_idle()
        return step, preempted, hits

    def _budget(self, max_tokens: int) -> StepBudget:
        return StepBudget(
            *(max_tokens, self._options.batch_size, self._longest_chunk),
            forks=self._options.forks,
            cached_tokens=self._options.cached_tokens,
        )

    def _samples(self, step: StepBudget) -> FrozenDict[Hashable, int]:
        """Returns the ``samples`` of a schedule, and notes the requests that others lead."""
        own, free_rows = step.samples(), self._queues.num_free_rows
        if not self._queues.parents:
            return own
        samples, room = dict(own), self._admission.fork_budget()
        for name, place in own.items():
            parent = self._queues.of[name]
            most = min(free_rows, len(parent.samples))
            parent.num_sampled = self._admission.num_forks(parent, most, room)
            samples |= {sample.name: place for sample in parent.samples[: parent.num_sampled]}
            free_rows -= parent.num_sampled
        return FrozenDict(samples)

    def _token_ids(
        self,
        work: Mapping[Hashable, int],
        places: dict[Hashable, int] | None,
        computed: np.ndarray,
    ) -> np.ndarray:
        """Returns the token ids of work on top of the tokens that were computed before it.

        Args:
          places: the index of each request in ``computed``; None: the order of ``work``.
          computed: the tokens before the step, int64[N].
        """
        if places is not None:
            computed = computed[[places[name] for name in work]]
        return self._prompts.ids_of_step(work, computed)

    # --- the requests of a step -----------------------------------------------------

    def _check(self, names: Sequence[Hashable], num_tokens: np.ndarray) -> None:
        """Raises ValueError if requests are not in the state in which the scheduler left them."""
        if len(self._manager.requests) != len(self._queues.running):
            raise ValueError(
                f"the manager runs {len(self._manager.requests)} requests, and its scheduler "
                f"{len(self._queues.running)}; start and finish them by the scheduler only"
            )
        self._prompts.check_known(names, num_tokens)

    def _check_idle(self) -> None:
        """Raises an error if no request can go on, although the caller has no answer to give."""
        queues = self._queues
        if queues.exporting:  # they may hold the blocks that others wait for
            return
        unanswered = [name for name in queues.of if queues.needs_token(name)]
        if queues.of and not unanswered and not self._options.lookahead_steps:
            raise RuntimeError(
                f"none of {len(queues.of)} requests gets its blocks, and "
                f"{self._manager.num_free_blocks} blocks are free; please report this"
            )
        if unanswered and self.is_idle and not self._options.lookahead_steps:
            raise ValueError(
                f"request={unanswered[0]!r} was in the samples of a schedule and got no token "
                "since, and no other request can go on; append its token, or finish it (a caller "
                "that knows tokens later needs lookahead_steps= of Scheduler)"
            )
        self.is_idle = True

    def _move_chunk_ends(self) -> None:
        """Updates the tokens after which the next chunks of prompts have to end."""
        for request in list(self._queues.in_chunks.values()):
            computed = self._queues.num_computed(request)
            self._ledger.chunk_ends[request.index] = self._prompts.next_chunk_end(request, computed)
            if not request.chunk_ends:
                del self._queues.in_chunks[request.name]

    def _with_work(
        self, step: StepBudget, running: Running, *, may_wait: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the running requests with tokens to compute, and what they need of a step's room.

        A request copies the block that it writes next if that block is shared or kept, and a step
        has room for ``forks`` copies. Requests that a fork, or a schedule that was not carried out,
        gave blocks of cached tokens bring these to the device, as far as there is room for
        ``cached_tokens``. The youngest requests that need more are left out, and so are those that
        wait for host memory, if they may wait, unless nobody else has work.

        Returns:
          The indices of decodes and of prefills, and copies and cached tokens of each running
          request, int64[2, N].
        """
        manager, rows = self._manager, running.order.rows
        has_work = step.has_room_for(running)
        goes_on, unsynced = has_work.copy(), manager.unsynced_tokens_by_row[rows]
        for at in unsynced.nonzero()[0].tolist() if may_wait else ():
            goes_on[at] &= not manager.is_loading(running.order.names[at])
        if np.count_nonzero(goes_on):
            has_work = goes_on
        needs = np.stack([np.zeros_like(unsynced), unsynced])
        if self._options.forks and manager.block_pool.has_shared_blocks:
            pending = manager.pending_copies_by_row[rows]  # in any case
            step.forks -= int(np.count_nonzero(pending))
            needs[0] = manager.may_copy_by_row[rows] & ~pending
        for need, room in zip(needs, (step.forks, step.cached_tokens), strict=True):
            need *= has_work
            has_work &= (need == 0) | (np.cumsum(need) <= room)
        is_prefill = running.is_prefill
        return (has_work & ~is_prefill).nonzero()[0], (has_work & is_prefill).nonzero()[0], needs

    # --- blocks of running requests -------------------------------------------------

    def _take_blocks(self, step: StepBudget, running: Running) -> bool:
        """Takes the blocks of a step of running requests; False: they are too few for all."""
        names, work = running.order.names, step.work
        if len(work) < len(names):
            # Drafts that wait to be rejected may need what they alone do not attend to.
            waits = (running.computed >= running.num_tokens) & running.has_drafts
            idle = itertools.compress(names, ~waits)
            self._manager.trim(name for name in idle if name not in work)
        return self._admission.grows(work)

    def _take_by_age(self, step: StepBudget, running: Running) -> list[Hashable]:
        """Takes blocks request by request, oldest first; returns the preempted requests."""
        prefills = set(itertools.compress(running.order.names, running.is_prefill))
        preempted: list[Hashable] = []
        # To preempt, the youngest last.
        left = [name for name in self._queues.running if name not in self._queues.exporting]
        is_short = False
        for name in list(self._queues.running):
            if name not in step.work:
                continue
            if is_short and name in prefills:  # an older one gets the free blocks
                step.take_back(name)
                self._manager.trim([name])
                continue
            while not self._admission.grows({name: step.work[name]}):
                if not self._options.preemption or left[-1] == name:
                    is_short = True
                    step.take_back(name)
                    break
                preempted.append(left.pop())
                if preempted[-1] in step.work:
                    step.take_back(preempted[-1])
                self.preempt(self._queues.running[preempted[-1]])
        return preempted

    def _force(self, step: StepBudget, running: Running, with_work: np.ndarray) -> list[Hashable]:
        """Gives the oldest request its tokens, for which younger ones are preempted.

        The youngest request may have got all tokens of the step, and no blocks.
        """
        preempted: list[Hashable] = []
        for at in with_work.tolist():
            if running.order.names[at] in self._queues.running and step.give_one(running, at):
                preempted += self._take_by_age(step, running)
                if step.work:
                    break
        return preempted

    def preempt(self, request: Request, *, may_go_on: bool = True) -> None:
        """Takes the blocks of a running request, which waits to go on or to be computed again."""
        computed = self._queues.num_computed(request)
        (self._prompts.swap_out if may_go_on else self._prompts.finish)(request)
        self.forget(request.name)
        self._queues.stop(request)
        needs_token = computed >= self._queues.num_tokens(request)
        self._queues.wait(request, needs_token=needs_token)
