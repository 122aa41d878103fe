"""`Chooser`, which chooses the work of a step for a scheduler. No jax."""

from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks import PrefixHit
from jaxkv._src.internal.log import LOGGER
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._budget import StepBudget
from jaxkv._src.scheduler._options import Options
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._requests import Request, Running
from jaxkv._src.scheduler._schedule import SampledRequests, Schedule

CHECKED_AT_ONCE = 32  # requests whose token ids a step checks


class Candidates(NamedTuple):
    """Running requests that may get tokens, and what each brings into a step.

    A request copies the block that it writes next if that block is shared or cached. Requests that
    a fork, or a schedule that was not carried out, gave blocks of cached tokens bring these to the
    device.
    """

    decodes: np.ndarray  # int64[D], positions in a `Running` of N
    prefills: np.ndarray  # int64[P]
    copies: np.ndarray  # int64[N]
    unsynced: np.ndarray  # int64[N], tokens


class Choice(NamedTuple):
    """A step, the requests preempted for it, and those that start."""

    step: StepBudget
    preempted: list[Request]
    started: list[tuple[Request, PrefixHit]]


class Chooser:
    """Chooses the work of every step, takes blocks for it, and preempts requests."""

    def __init__(self, options: Options, queues: Queues, prompts: Prompts, admission: Admission):
        self._options, self._manager = options, options.manager
        self._queues, self._table = queues, queues.table
        self._prompts, self._admission = prompts, admission
        limits = options.manager.plan.limits
        self._longest_chunk = min(options.max_tokens, limits.max_in_flight_tokens)
        self._last: Choice | None = None
        self._num_uploads = 0  # when that was chosen
        self._schedule: Schedule | None = None
        #: whether the last schedule was empty, and no request has changed since
        self.is_idle = False
        #: whether all running requests have got one token since the last schedule, and no more
        self.is_extended = False

    def schedule(self, max_tokens: int) -> Schedule:
        """Chooses the work of the next step; see `Scheduler.schedule`."""
        if self._last is None or self._is_carried_out or not self._last.step.index.size:
            if (schedule := self._same_again(max_tokens)) is not None:
                return schedule
            self._last = self._choose(min(max_tokens, self._options.max_tokens))
            self._num_uploads = self._manager.num_uploads
        (index, counts), preempted, started = self._last.step.work, *self._last[1:]
        work = self._admission.work(index, counts)
        computed = self._manager.computed_by_row[work.batch.rows]
        self._schedule = Schedule(
            work,
            self._samples(index, computed + counts),
            tuple([request.name for request in preempted if self._queues.waits(request)]),
            {request.name: hit for request, hit in started if request.row >= 0},
            index,
            computed,
            self._prompts.ids_of_step,
        )
        return self._schedule

    def _same_again(self, max_tokens: int) -> Schedule | None:
        """Returns the schedule of one more token for each, if that is the next one; or None.

        That is so while all running requests decode and none can start. None of them copies a block
        then: what shares one starts, and what is rewound leaves the last step.
        """
        last, order = self._schedule, self._queues.order
        if not self.is_extended or last is None or self._last is None or self._queues.may_admit:
            return None
        if not len(last.samples) == last.num_tokens == order.size <= max_tokens:
            return None
        if not np.array_equal(last.index, order):
            return None
        self._check(order)
        if not self._admission.grows(last.work):
            return None
        self._num_uploads = self._manager.num_uploads
        self._last = Choice(self._last.step, [], [])
        more = order, last.num_computed + 1, self._prompts.ids_of_step
        self._schedule = Schedule(last.work, last.samples, (), {}, *more)
        return self._schedule

    def restart(self) -> None:
        """Forgets all schedules so far."""
        self._last, self._schedule, self.is_idle, self.is_extended = None, None, False, False

    @property
    def _is_carried_out(self) -> bool:
        return self._num_uploads != self._manager.num_uploads

    def is_chosen(self, request: Request) -> bool:
        """Returns whether a request is in a schedule that was not carried out yet."""
        return (
            self._last is not None and not self._is_carried_out and request.index in self._last.step
        )

    def forget(self, request: Request) -> None:
        """Takes a request out of the schedule that was not carried out, and repeats no schedule."""
        self._schedule = None
        if self._last is not None and not self._is_carried_out:
            self._last.step.take_back(request.index)

    def _choose(self, max_tokens: int) -> Choice:
        """Returns a new step, the requests preempted for it, and those that start."""
        self._move_chunk_ends()
        running = self._queues.now_running()
        self._check(running.index)
        step = self._budget(max_tokens)
        candidates = self._candidates(step, running)
        preempted, started = self._fill(step, running, candidates)
        if not step.index.size:
            preempted += self._force(step, running, candidates)
        is_loading = self._manager.is_loading
        if not step.index.size and any(is_loading(one.name) for one in self._queues.running):
            # The others get no blocks, so that the step has to wait for host memory.
            step = self._budget(max_tokens)
            candidates = self._candidates(step, running, may_wait=False)
            preempted += self._force(step, running, candidates)
        if not step.index.size and max_tokens == self._options.max_tokens:
            self._check_idle()
        return Choice(step, preempted, started)

    def _fill(
        self, step: StepBudget, running: Running, candidates: Candidates
    ) -> tuple[list[Request], list[tuple[Request, PrefixHit]]]:
        """Gives tokens to requests that run and then to waiting ones, and takes their blocks.

        Returns the requests preempted, and those that start.
        """
        prefill_first = self._options.order == "prefill_first"
        decodes, prefills, copies, unsynced = candidates
        for chosen in (prefills, decodes) if prefill_first else (decodes, prefills):
            step.give_all(running, chosen)
        if np.count_nonzero(copies) or np.count_nonzero(unsynced):
            chosen = step.includes(running.index)
            step.forks -= int(copies[chosen].sum())
            step.cached_tokens -= int(unsynced[chosen].sum())
        if not self._take_blocks(step, running):
            return self._take_in_line(step, running), []
        if not self._queues.may_admit:
            return [], []
        # Prompts come before decodes, which keep their blocks and get the tokens that are left.
        may_wait, later = step.index.size > 0, decodes[:0]
        if prefill_first:
            later = decodes[step.includes(running.index[decodes])]
        for at in later.tolist():
            step.take_back(running.index.item(at))
        started = self._admission.admit(step, running, may_wait=may_wait)
        for at in later.tolist():
            step.give_one(running, at)
        return [], started

    def _budget(self, max_tokens: int) -> StepBudget:
        return StepBudget(
            *(max_tokens, self._options.batch_size, self._longest_chunk),
            forks=self._options.forks,
            cached_tokens=self._options.cached_tokens,
        )

    def _samples(self, index: np.ndarray, totals: np.ndarray) -> SampledRequests:
        """Returns the ``samples`` of a schedule, and notes the samples that fork in it.

        Args:
          index, totals: int64[N], the requests of the step, and their tokens after it.
        """
        table, free_rows = self._table, self._queues.num_free_rows
        positions = (totals >= table.num_tokens[index]).nonzero()[0]
        sampled = index[positions]
        if self._queues.parents:
            more: list[tuple[int, int]] = []
            budget = self._admission.fork_budget()
            for at, parent in zip(
                positions.tolist(), table.requests[sampled].tolist(), strict=True
            ):
                most = min(free_rows, len(parent.samples))
                parent.num_sampled = self._admission.num_forks(parent, most, budget)
                more += [(sample.index, at) for sample in parent.samples[: parent.num_sampled]]
                free_rows -= parent.num_sampled
            forked = np.array(more, np.int64).reshape(-1, 2).T
            sampled, positions = np.hstack([[sampled, positions], forked])
        return SampledRequests(table.names[sampled], sampled, positions)

    # --- the requests of a step -----------------------------------------------------

    def _check(self, order: np.ndarray) -> None:
        """Raises ValueError if requests are not in the state in which the scheduler left them.

        A part of their token ids is checked each time.
        """
        if len(self._manager.requests) != len(self._queues.running):
            raise ValueError(
                f"the manager runs {len(self._manager.requests)} requests, and its scheduler "
                f"{len(self._queues.running)}; start and finish them by the scheduler only"
            )
        turns = max(1, cdiv(order.size, CHECKED_AT_ONCE))
        start = CHECKED_AT_ONCE * (self._manager.num_uploads % turns)
        checked = order[start : start + CHECKED_AT_ONCE]
        num_tokens = self._table.at(checked, self._manager.computed_by_row).num_sampled
        self._prompts.check_known(self._table.names[checked].tolist(), num_tokens)

    def _check_idle(self) -> None:
        """Raises an error if no request can go on, although the caller has no answer to give."""
        queues = self._queues
        if queues.exporting:  # they may hold the blocks that others wait for
            return
        requests = queues.by_name.values()
        unanswered = [request.name for request in requests if queues.needs_token(request)]
        if requests and not unanswered and not self._options.lookahead_steps:
            raise RuntimeError(
                f"none of {len(requests)} requests gets its blocks, and "
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
        for request in list(self._queues.in_chunks):
            computed = self._queues.num_computed(request)
            self._table.chunk_ends[request.index] = self._prompts.next_chunk_end(request, computed)
            if not request.chunk_ends:
                self._queues.in_chunks.remove(request)

    def _candidates(
        self, step: StepBudget, running: Running, *, may_wait: bool = True
    ) -> Candidates:
        """Returns the requests that have tokens to compute.

        Of those that need more copies or cached tokens than a step takes, the last in line are left
        out, and so are those that wait for host memory, if they may, unless nobody else has work.
        """
        manager, rows = self._manager, running.rows
        has_work, unsynced = step.has_room_for(running), manager.unsynced_tokens_by_row[rows]
        if may_wait and np.count_nonzero(unsynced):
            goes_on = has_work.copy()
            for at in unsynced.nonzero()[0].tolist():
                goes_on[at] &= not manager.is_loading(self._table.names[running.index[at]])
            has_work = goes_on if np.count_nonzero(goes_on) else has_work
        copies = np.zeros_like(unsynced)
        if self._options.forks and manager.block_pool.may_copy_on_write:
            pending = manager.pending_copies_by_row[rows]  # in any case
            step.forks -= int(np.count_nonzero(pending))
            copies |= manager.may_copy_by_row[rows] & ~pending
        for need, most in ((copies, step.forks), (unsynced, step.cached_tokens)):
            if np.count_nonzero(need):
                need *= has_work
                has_work &= (need == 0) | (np.cumsum(need) <= most)
        is_prefill = running.is_prefill
        decodes, prefills = has_work & ~is_prefill, has_work & is_prefill
        return Candidates(decodes.nonzero()[0], prefills.nonzero()[0], copies, unsynced)

    # --- blocks of running requests -------------------------------------------------

    def _take_blocks(self, step: StepBudget, running: Running) -> bool:
        """Takes the blocks of a step of running requests; False: they are too few for all."""
        if self._options.has_windows and step.index.size < running.index.size:
            # Drafts that wait to be rejected may need what they alone do not attend to.
            waits = (running.computed >= running.num_tokens) & running.has_drafts
            idle = ~waits & ~step.includes(running.index)
            self._manager.trim(self._table.names[running.index[idle]].tolist())
        return self._admission.grows(self._admission.work(*step.work))

    def _take_in_line(self, step: StepBudget, running: Running) -> list[Request]:
        """Takes blocks request by request, in line; returns the preempted requests."""
        prefills = set(running.index[running.is_prefill].tolist())
        preempted: list[Request] = []
        # To preempt, the last one first.
        left = [one for one in self._queues.running if one not in self._queues.exporting]
        is_short = False
        for request in list(self._queues.running):
            if request.index not in step:
                continue
            if is_short and request.index in prefills:  # one before it gets the free blocks
                step.take_back(request.index)
                self._manager.trim([request.name])
                continue
            while not self._admission.grows(self._admission.work(*step.work_of(request.index))):
                if not self._options.preemption or left[-1] is request:
                    is_short = True
                    step.take_back(request.index)
                    break
                preempted.append(left.pop())
                step.take_back(preempted[-1].index)
                self.preempt(preempted[-1])
        return preempted

    def _force(self, step: StepBudget, running: Running, candidates: Candidates) -> list[Request]:
        """Gives the first request in line its tokens, for which others are preempted.

        The last one may have got all tokens of the step, and no blocks.
        """
        preempted: list[Request] = []
        for at in np.union1d(candidates.decodes, candidates.prefills).tolist():
            if self._table.rows[running.index[at]] >= 0 and step.give_one(running, at):
                preempted += self._take_in_line(step, running)
                if step.index.size:
                    break
        return preempted

    def preempt(self, request: Request, *, may_go_on: bool = True) -> None:
        """Takes the blocks of a running request, which waits to go on or to be computed again."""
        computed = self._queues.num_computed(request)
        LOGGER.info("preempts %r, which has computed %d tokens", request.name, computed)
        (self._prompts.swap_out if may_go_on else self._prompts.finish)(request)
        self.forget(request)
        self._queues.stop(request)
        needs_token = computed >= self._queues.num_tokens(request)
        self._queues.wait(request, needs_token=needs_token)
