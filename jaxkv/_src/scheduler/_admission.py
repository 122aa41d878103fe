"""`Admission`, which starts waiting requests and forks. No jax."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv._src.blocks import OutOfBlocksError, PrefixHit, RowWork
from jaxkv._src.scheduler._budget import StepBudget
from jaxkv._src.scheduler._options import Options
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._requests import ANYWHERE, Request, Running

MOST_BLOCKED = 4  # waiting requests that do not fit, at which a step looks


class AdmissionBudget:
    """Blocks that are left for requests that start, kept up to date while they do.

    reserved: with preemption, free blocks that unfinished prompts will still take.
    steady, in_flight: without preemption, the most blocks that requests hold while they decode,
      and the most that computing the prompt of one of them takes in addition.
    """

    def __init__(self, reserved: int, blocks: tuple[int, int]):
        self.reserved, (self.steady, self.in_flight) = reserved, blocks

    def take(self, request: Request, reserved: int) -> None:
        """Counts a request that starts, and the free blocks that its prompt will take."""
        steady, in_flight = request.blocks
        self.steady, self.in_flight = self.steady + steady, max(self.in_flight, in_flight)
        self.reserved += reserved


class Line:
    """Waiting requests, in line, up to one that nobody may pass.

    blocked: those so far that do not fit, which others pass.
    """

    def __init__(self, waiting: Sequence[Request]):
        self._waiting, self._passes_left = waiting, ANYWHERE
        self.blocked: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        for request in self._waiting:
            if self._passes_left < 1:
                return
            yield request

    def block(self, request: Request) -> None:
        """Notes that a request does not fit."""
        self.blocked.append(request)
        most = 0 if len(self.blocked) == MOST_BLOCKED else request.passes_left
        self._passes_left = min(self._passes_left, most)

    def start(self) -> None:
        """Notes that a request starts, which passes those that do not fit."""
        self._passes_left -= bool(self.blocked)


class Admission:
    """Admits waiting requests and forks, for as long as there are rows and blocks."""

    def __init__(self, options: Options, queues: Queues, prompts: Prompts):
        self._options, self._queues, self._prompts = options, queues, prompts
        self._manager, self._plan = options.manager, options.manager.plan
        self._admission_blocks = functools.lru_cache(maxsize=4096)(self._plan.admission_blocks)

    # --- waiting requests -----------------------------------------------------------

    def entering_tokens(self, running: Running) -> tuple[int, bool]:
        """Returns the known tokens of waiting requests that start, and whether others do not.

        As if no prefix were cached: only a start tells how many tokens and blocks one saves.
        """
        queues, found, count, line = self._queues, 0, 0, Line(self._queues.waiting)
        if not queues.may_admit:
            return found, bool(queues.waiting)
        budget = self._budget_left(running)
        for request in line:
            blocks = self._prompt_blocks(request)
            if not self._fits_budget(request, budget, blocks):
                line.block(request)
                continue
            budget.take(request, blocks)
            found, count = found + queues.num_tokens(request), count + 1
            line.start()
            if count == queues.num_free_rows:
                break
        return found, count < len(queues.waiting)

    def admit(
        self, step: StepBudget, running: Running, *, may_wait: bool
    ) -> list[tuple[Request, PrefixHit]]:
        """Starts waiting requests in line, while blocks are left; returns them and their hits.

        Those that do not fit may be passed, see `Line`.

        Args:
          may_wait: whether those that wait for host memory get no tokens, because others have work.
        """
        queues, budget, first = self._queues, self._budget_left(running), step.index.size
        started, line = list[tuple[Request, PrefixHit]](), Line(queues.waiting)
        try:
            for request in line:
                if step.is_full or not queues.num_free_rows:
                    break
                if (hit := self._start(step, request, budget)) is None:
                    line.block(request)
                    continue
                line.start()
                if may_wait and self._manager.is_loading(request.name):
                    step.take_back(request.index)
                started.append((request, hit))
        except Exception:  # of one whose token ids are missing, say; none starts then
            for request, _ in started:
                self._undo(request)
            raise
        while step.index.size > first and not self.grows(self.work(*step.work)):
            last, _ = started.pop()  # some of the blocks in `AdmissionBudget` are no longer there
            self._undo(last)
            step.take_back(last.index)
        for request in line.blocked:
            request.passes_left -= sum(one.place > request.place for one, _ in started)
        for request, _ in started:
            queues.leave(request)
            queues.table.prefill_tokens[request.index] = queues.num_tokens(request)
            if request.chunk_ends:
                queues.in_chunks.add(request)
        return started

    def _undo(self, request: Request) -> None:
        """Ends a request that was just started."""
        self._prompts.swap_out(request)
        self._queues.stop(request)

    def _start(
        self, step: StepBudget, request: Request, budget: AdmissionBudget
    ) -> PrefixHit | None:
        """Starts a request with its cached prefix and gives it tokens, if the budget allows."""
        index, limit = request.index, self._options.cached_tokens
        if self._queues.table.needs_token[index] or not self._knows_ids(request):
            return None
        num_tokens, draft_start = self._queues.num_tokens(request), self._draft_start(request)
        # Only a request that has the whole budget of a step to itself may take a part of a prefix.
        most = limit if step.cached_tokens == limit else ANYWHERE
        most = min(most, draft_start)
        cached, held = self._prompts.num_swapped(request, most), 0
        may_copy = self._options.forks > 0  # or it shares no blocks
        donor = None if cached else self._donor(step, request, most)
        if donor is not None:
            cached = request.prompt_tokens - 1
            held = sum(self._prompts.whole_blocks(cached))
        elif not cached:
            cached, held = self._prompts.find(request, num_tokens, most)
            may_copy = self._options.has_states
        blocks = self._prompt_blocks(request)
        if not self._fits_budget(request, budget, blocks - held):
            return None
        if cached > step.cached_tokens or (cached and may_copy > step.forks):
            return None
        if not step.num_given(num_tokens - cached, draft_start=draft_start - cached):
            return None
        hit = (
            self._prompts.start(
                request, num_tokens, draft_start=draft_start, max_cached_tokens=most
            )
            if donor is None
            else self._prompts.fork(donor, request)
        )
        # Too few blocks may be free for those of the prefix that are in host memory.
        cached = hit.num_cached_tokens
        end = self._prompts.next_chunk_end(request, cached)  # which the start has chosen
        more, drafts = num_tokens - cached, draft_start - cached
        step.give(index, step.num_given(more, at_most=end - cached, draft_start=drafts))
        step.cached_tokens -= cached
        step.forks -= bool(cached) and may_copy
        budget.take(request, blocks - sum(hit.shared_blocks))
        self._queues.run(request, hit.row)
        return hit

    def _donor(self, step: StepBudget, request: Request, most: int) -> Request | None:
        """Returns a running request from which a waiting sample of its prompt can fork; or None.

        The sample then computes one token in a step of decodes, and copies the block of that one.
        With whole blocks alone it would compute the others of its last one, in a step for prompts.
        From one that was preempted and knows its answer, too, what follows would not be cached.

        Args:
          most: tokens that it may share.
        """
        end, queues, manager = request.prompt_tokens, self._queues, self._manager
        is_first = queues.num_tokens(request) == end and self._options.forks_late
        if not is_first or step.forks < 1 or not 0 < end - 1 <= min(most, step.cached_tokens):
            return None
        for one in request.family:
            has_all = one.row >= 0 and queues.num_computed(one) >= end
            if has_all and not manager.pending_copies_by_row[one.row]:
                if manager.num_known_tokens(one.name) <= end and not manager.is_loading(one.name):
                    return one
        return None

    def _draft_start(self, request: Request) -> int:
        return self._queues.table.draft_starts.item(request.index)

    def _knows_ids(self, request: Request) -> bool:
        """Returns whether the ids of a waiting request are known, except those of its drafts."""
        tokens = min(self._queues.num_tokens(request), self._draft_start(request) + 1)
        return self._prompts.is_known(request.name, tokens)

    def work(self, index: np.ndarray, counts: np.ndarray) -> RowWork:
        """Returns new tokens of running requests, int64[N] each, as work of the manager."""
        return self._manager.work_by_row(self._queues.table.rows[index], counts)

    def grows(self, work: RowWork) -> bool:
        """Takes the blocks of requests. Returns False if there are too few, and none is taken."""
        try:
            self._manager.grow(work)
        except OutOfBlocksError:
            return False
        return True

    # --- budget ---------------------------------------------------------------------

    def _budget_left(self, running: Running) -> AdmissionBudget:
        """Returns the budget next to the running requests."""
        if not self._options.preemption:
            return AdmissionBudget(0, self._queues.most_blocks())
        prefills = self._queues.table.requests[running.index[running.is_prefill]].tolist()
        return AdmissionBudget(sum(map(self._reserved_blocks, prefills)), (0, 0))

    def _fits_budget(self, request: Request, budget: AdmissionBudget, reserved: int) -> bool:
        """Returns whether a request can start, whose prompt takes ``reserved`` free blocks."""
        if not self._options.preemption:
            steady, in_flight = request.blocks
            most = budget.steady + steady + max(budget.in_flight, in_flight)
            return most <= self._plan.usable_blocks
        return budget.reserved + reserved <= self._manager.num_free_blocks

    def _reserved_blocks(self, request: Request) -> int:
        """Returns the blocks that a running request will still take until it decodes."""
        held = sum(self._manager.allocated_blocks(request.name))
        return max(0, self._prompt_blocks(request) - held)

    def _prompt_blocks(self, request: Request) -> int:
        """Returns the blocks that a request takes until it decodes, if it does."""
        longest = self._queues.table.max_tokens.item(request.index)
        return self._admission_blocks(min(self._queues.num_tokens(request) + 1, longest))

    def has_room_for(self, request: Request, num_tokens: int) -> bool:
        """Returns whether a request can start that brings all of its tokens along."""
        reserved = self._admission_blocks(num_tokens)
        return self._queues.num_free_rows > 0 and self._fits_budget(
            request, self._budget_left(self._queues.now_running()), reserved
        )

    # --- forks ----------------------------------------------------------------------

    def fork_budget(self) -> AdmissionBudget:
        """Returns the budget of samples that start together."""
        return AdmissionBudget(0, self._queues.most_blocks())

    def num_forks(self, donor: Request, most: int, budget: AdmissionBudget) -> int:
        """Returns how many of ``most`` samples can share a request's blocks; takes their budget."""
        tokens = max(donor.prompt_tokens, self._queues.num_computed(donor))
        if not self._options.forks or tokens > self._options.cached_tokens:
            return 0  # no step takes the copies, or the tokens
        count = 0
        while count < most and (self._options.preemption or self._fits_budget(donor, budget, 0)):
            budget.take(donor, 0)
            count += 1
        return count

    def fork(self, donor: Request, sample: Request) -> bool:
        """Starts a sample with the blocks of its donor. Returns False if it has to wait."""
        if not self.num_forks(donor, 1, self.fork_budget()):
            return False
        try:
            self._manager.fork(donor.name, [sample.name])
        except ValueError:  # no row is free, or the newest state may be in the block of a draft
            return False
        self._queues.run(sample, self._manager.requests[sample.name])
        return True
