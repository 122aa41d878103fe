"""`Scheduler`, which chooses the work of every step. No jax."""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxkv._internal.checks import check_choice, check_count, check_positive
from jaxkv.blocks import BlockManager, OutOfBlocksError, PrefixHit
from jaxkv.prefixes import ExtraKey, check_boundaries, check_content
from jaxkv.scheduler._ledger import ANYWHERE, InOrder, Ledger, Request, Running
from jaxkv.scheduler._prompts import Prompt, Prompts, Tokens
from jaxkv.scheduler._step import Schedule, Step

Order = Literal["decode_first", "prefill_first"]


class Scheduler:
    """Chooses the work of every step: tokens of each request, admission and preemption.

    Example::

        scheduler = jaxkv.Scheduler(manager, max_tokens=8192)
        for name in tokens:                                 # token ids by request: the prompts
            scheduler.add(name, len(tokens[name]))
        while scheduler.has_work:
            schedule = scheduler.schedule()
            ids = []                                        # token ids of this step
            for name, count in schedule.work.items():
                done = manager.num_computed_tokens(name)
                ids += tokens[name][done : done + count]
            upload = manager.step(shape, schedule.work, extra=ids)
            cache, picked = step(params, cache, upload)     # a token for each request of the step
            for name, index in schedule.samples.items():
                tokens[name].append(int(picked[index]))
                if len(tokens[name]) < longest:
                    scheduler.append({name: 1})
                else:
                    scheduler.finish(name)

    Requests get blocks in the order of their arrival. When blocks run out, the youngest request
    that got none in this step is preempted: it gives back all of its blocks, and waits ahead of
    requests that arrived later. The same calls give the same schedules.

    The scheduler owns the manager: call only its ``step`` and its methods that change nothing.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_tokens: int,
        batch_size: int | None = None,
        order: Order = "decode_first",
        preemption: bool = True,
        forks: int = 0,
        tokens: Tokens | None = None,
        cached_tokens: int | None = None,
        chunk_tokens: int | None = None,
    ):
        """Creates a scheduler without requests.

        Args:
          manager: a manager without requests.
          max_tokens: tokens of a step over all its requests, as in its `StepShape`.
          batch_size: requests of a step; None: the manager's ``max_requests``.
          order: which requests get the tokens of a step first: "decode_first" or "prefill_first".
          preemption: True: admits a request once its prompt fits next to the unfinished prompts.
            False: admits it once all requests fit at their longest, so that none is ever
            preempted; pass ``max_tokens`` to `add` then.
          forks: as for `StepShape.for_plan`.
          tokens: mapping from requests to token ids that you keep up to date: the prompt, followed
            by the tokens that were sampled and accepted. With it, requests share prefixes that
            the cache still holds, and their own blocks are kept for later prompts. Plans with
            states need ``forks`` for that.
          cached_tokens: as for `StepShape.for_plan`; None: the plan's ``max_model_len``.
          chunk_tokens: chunks of a prompt end at multiples of this, so that a prompt is computed in
            the same chunks however much of it was cached; None: chunks end anywhere.
        """
        check_count(forks=forks)
        if tokens is not None and not isinstance(tokens, Mapping):
            raise TypeError(f"tokens must map requests to token ids, got {type(tokens).__name__}")
        check_choice(get_args(Order), order=order)
        if not isinstance(manager, BlockManager):
            raise TypeError(f"manager must be a BlockManager, got {type(manager).__name__}")
        if manager.requests:
            raise ValueError(f"manager runs {len(manager.requests)} requests; pass a new manager")
        batch_size = manager.max_requests if batch_size is None else batch_size
        check_positive(max_tokens=max_tokens, batch_size=batch_size)
        self._manager, self._plan = manager, manager.plan
        self._max_tokens, self._batch_size, self._forks = max_tokens, batch_size, forks
        self._longest_chunk = min(max_tokens, manager.plan.limits.max_in_flight_tokens)
        self._decode_first, self._preempts = order == "decode_first", preemption
        self._waiting: dict[Hashable, Request] = {}  # by age
        self._running: dict[Hashable, Request] = {}  # by age
        self._ledger = Ledger()
        self._in_order: InOrder | None = None
        self._prompts = Prompts(manager, tokens, chunk_tokens=chunk_tokens, forks=forks)
        self._cached_tokens = manager.plan.max_model_len if cached_tokens is None else cached_tokens
        check_count(cached_tokens=self._cached_tokens)
        check_positive(chunk_tokens=1 if chunk_tokens is None else chunk_tokens)
        # Running requests with a chunk that has to end after a given token.
        self._in_chunks: set[Hashable] = set()
        self._num_added = 0
        self._row_copies = 0, 0  # number of the last upload, and row copies since

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self._running)} requests run, {len(self._waiting)} wait, "
            f"{self._manager.num_free_blocks:,} blocks free)"
        )

    # --- requests -----------------------------------------------------------------

    @property
    def running(self) -> tuple[Any, ...]:
        """Requests that have a row, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Any, ...]:
        """Requests that have no row, in the order in which they will be admitted."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request has tokens to compute."""
        running = self._now_running()
        return bool(self._waiting) or bool((running.num_tokens > running.computed).any())

    def num_tokens(self, request: Hashable) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return int(self._ledger.num_tokens[self._ledger.index(request)])

    def add(
        self,
        request: Hashable,
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        encoder_tokens: int = 0,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        """Queues a request.

        Args:
          request: any hashable name.
          num_tokens: tokens of its prompt.
          max_tokens: the most tokens that it will have, the prompt's included; None: the
            plan's ``max_model_len``.
          encoder_tokens: encoder tokens of the request, for cross attention.
          salt, extra_keys, boundaries: as for `BlockManager.start`.

        Raises:
          TypeError, ValueError: a name that is in use, more tokens than the plan admits, or
            fewer token ids in the scheduler's ``tokens`` than ``num_tokens``.
        """
        longest = self._plan.max_model_len if max_tokens is None else max_tokens
        if not isinstance(num_tokens, int):
            raise TypeError(
                "num_tokens must be an int, the length of the prompt, got "
                f"{type(num_tokens).__name__}; token ids go into Scheduler(tokens=)"
            )
        check_positive(num_tokens=num_tokens, max_tokens=longest)
        check_count(encoder_tokens=encoder_tokens)
        check_content(salt, extra_keys)
        check_boundaries(boundaries, num_tokens)
        self._check_new([request])
        if not num_tokens <= longest <= self._plan.max_model_len:
            given = "" if max_tokens is None else f"max_tokens={max_tokens}, which must be at most "
            raise ValueError(
                f"num_tokens={num_tokens} must be at most {given}the plan's "
                f"max_model_len={self._plan.max_model_len}"
            )
        if encoder_tokens > self._plan.limits.max_encoder_tokens:
            raise ValueError(
                f"encoder_tokens={encoder_tokens} is more than the plan admits: "
                f"limits.max_encoder_tokens={self._plan.limits.max_encoder_tokens}"
            )
        prompt = Prompt(salt=salt, extra_keys=extra_keys, boundaries=boundaries)
        self._prompts.add(request, num_tokens, prompt)
        steady = self._plan.steady_blocks(longest)
        blocks = steady, self._plan.admission_blocks(longest) - steady
        self._ledger.enter(request, num_tokens, longest)
        self._waiting[request] = Request(request, self._next_age(()), encoder_tokens, blocks)

    def fork(self, request: Hashable, into: Sequence[Hashable]) -> None:
        """Starts more samples of a request, which share the blocks of its computed tokens.

        Call it after the step that computed the prompt, and `append` the first token of every
        sample. If no row, no blocks or no ``forks`` are left for a sample, or the state is in the
        block of a draft, the sample waits like a new request and computes the prompt itself.

        Args:
          request: the request whose computed tokens the samples start with.
          into: names of the samples.

        Raises:
          ValueError: a request that does not run or has not computed its prompt, or a name
            that is in use; nothing is started.
        """
        donor, ledger = self._known(request), self._ledger
        if isinstance(into, str) or not isinstance(into, Sequence):
            raise TypeError(f"into must be a sequence of names, got {into!r}")
        self._check_new(into)
        computed, at = self._num_computed(donor), ledger.of[request]
        if computed < ledger.prefill_tokens[at] or donor.row < 0:
            raise ValueError(
                f"request={request!r} has computed {computed} of {self.num_tokens(request)} "
                "tokens; fork it after the step that computes its prompt"
            )
        for name in into:
            index = ledger.enter(name, computed, int(ledger.max_tokens[at]))
            sample = dataclasses.replace(donor, name=name, age=self._next_age(donor.age), row=-1)
            self._prompts.fork(request, name)
            if self._can_fork(sample) and self._forks_now(request, name):
                self._prompts.join(request, name)
                ledger.prefill_tokens[index] = computed
                self._run(sample, self._manager.requests[name])
            else:
                self._waiting[name] = sample
        self._running, self._waiting = _by_age(self._running), _by_age(self._waiting)

    def append(self, num_tokens: Mapping[Any, int]) -> None:
        """Gives requests more tokens to compute: sampled ones, and drafts to verify with them.

        Args:
          num_tokens: mapping from requests to numbers of tokens, usually 1.

        Raises:
          TypeError, ValueError: an unknown request, or more tokens than its ``max_tokens``;
            nothing is appended.
        """
        index, counts = self._indices(num_tokens), _as_counts(num_tokens)
        totals = self._ledger.num_tokens[index] + counts
        over = totals > self._ledger.max_tokens[index]
        if over.any():
            at = int(over.argmax())
            raise ValueError(
                f"request={list(num_tokens)[at]!r} would have {totals[at]} tokens, more than its "
                f"max_tokens={self._ledger.max_tokens[index[at]]}; finish it"
            )
        self._ledger.num_tokens[index] = totals

    def rewind(self, num_tokens: Mapping[Any, int]) -> None:
        """Removes the last tokens of requests: drafts that were rejected.

        Args:
          num_tokens: mapping from requests to the number of tokens that stay.

        Raises:
          TypeError, ValueError: an unknown request, more tokens than it has, or as
            `BlockManager.rewind`; nothing is taken back.
        """
        index, counts = self._indices(num_tokens), _as_counts(num_tokens)
        over = counts > self._ledger.num_tokens[index]
        if over.any():
            at = int(over.argmax())
            raise ValueError(
                f"num_tokens={counts[at]} is more than the {self._ledger.num_tokens[index[at]]} "
                f"tokens of request={list(num_tokens)[at]!r}; give the number of tokens that stay"
            )
        computed = [self._num_computed(self._known(name)) for name in num_tokens]
        lost = {
            name: n
            for (name, n), done in zip(num_tokens.items(), computed, strict=True)
            if done > n
        }
        if lost:
            self._manager.rewind(lost)
        self._ledger.num_tokens[index] = counts

    def finish(self, request: Hashable) -> None:
        """Removes a request that has ended or is aborted, and gives back its blocks.

        Raises:
          ValueError: an unknown request.
        """
        known = self._known(request)
        if known.row >= 0:
            self._prompts.finish(request)
            self._stop(known)
        else:
            del self._waiting[request]
        self._ledger.leave(request)
        self._prompts.forget(request)

    # --- steps --------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Chooses the work of the next step, and takes blocks for it.

        If a schedule is not carried out, the next call chooses its work again.

        Returns:
          The work, the requests to sample from, those preempted, and the prefix hits.
        """
        step = Step(
            *(self._max_tokens, self._batch_size, self._longest_chunk),
            forks=self._forks,
            cached_tokens=self._cached_tokens,
        )
        self._move_chunk_ends()
        running = self._now_running()
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

    def _now_running(self) -> Running:
        """Returns the running requests and their token counts, oldest first."""
        if self._in_order is None:
            names, rows = list(self._running), [request.row for request in self._running.values()]
            index = self._ledger.indices(names)
            self._in_order = InOrder(names, index, np.array(rows, np.int64))
        order = self._in_order
        tokens, _, prefill_tokens, ends = self._ledger.numbers.take(order.index, axis=1)
        computed, in_chunks = self._manager.computed_by_row[order.rows], bool(self._in_chunks)
        return Running(
            order, order.names, order.rows, computed, tokens, prefill_tokens, ends, in_chunks
        )

    def _move_chunk_ends(self) -> None:
        """Updates the tokens after which the next chunks of prompts have to end."""
        for name in list(self._in_chunks):
            computed = self._num_computed(self._running[name])
            end = self._prompts.next_chunk_end(name, computed)
            self._ledger.chunk_ends[self._ledger.of[name]] = ANYWHERE if end is None else end
            if end is None:
                self._in_chunks.remove(name)

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

    def _entrants(self, step: Step) -> list[Request]:
        """Returns the waiting requests that may start, in order, and gives them tokens."""
        entrants: list[Request] = []
        cached_left, shared = step.cached_tokens, 0
        for request in self._waiting.values():
            is_full = len(self._running) + len(entrants) == self._manager.max_requests
            if is_full or step.is_full:
                break
            num_tokens = self.num_tokens(request.name)
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
        left = list(self._running)  # to preempt, the youngest last
        is_short = False
        for name in list(self._running):
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
            if name not in step.work and name in self._running:
                request = self._running[name]
                if not step.give(name, self.num_tokens(name) - self._num_computed(request)):
                    break
                if not self._grows(name, step.work[name]):
                    step.take_back(name)

    def _run(self, request: Request, row: int) -> None:
        """Marks a request as running in a row of the block tables."""
        request.row = row
        self._running[request.name] = request
        self._in_order = None

    def _stop(self, request: Request) -> None:
        """Marks a request as no longer running."""
        del self._running[request.name]
        request.row, self._in_order = -1, None
        self._in_chunks.discard(request.name)
        self._ledger.chunk_ends[self._ledger.of[request.name]] = ANYWHERE

    def _preempt(self, name: Hashable) -> None:
        self._prompts.finish(name)
        request = self._running[name]
        self._stop(request)
        self._waiting = _by_age({**self._waiting, name: request})

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
            self._ledger.prefill_tokens[self._ledger.of[name]] = self.num_tokens(name)
            del self._waiting[name]
            self._run(request, hit.row)
        if entrants:
            self._running, self._in_order = _by_age(self._running), None
        return hits

    def _starts(self, step: Step, request: Request) -> PrefixHit | None:
        """Starts a request with its cached prefix, if there are blocks for the rest."""
        name, num_tokens = request.name, self.num_tokens(request.name)
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
            self._in_chunks.add(name)
        return hit

    def _has_room(self, request: Request, ahead: Sequence[Request], shared: int = 0) -> bool:
        """Returns whether a request can start after others; see ``preemption``.

        Args:
          request: the request to start.
          ahead: requests that start before it in the same step.
          shared: blocks of the prefixes of all these that running requests hold already.
        """
        if not self._preempts:
            everyone = (request, *ahead, *self._running.values())
            steady, in_flight = zip(*(other.blocks for other in everyone), strict=True)
            return sum(steady) + max(in_flight) <= self._plan.usable_blocks
        needed = sum(self._prompt_blocks(other) for other in (request, *ahead)) - shared
        running = self._now_running()
        for at in np.flatnonzero(running.computed < running.prefill_tokens).tolist():
            other = self._running[running.names[at]]
            held = sum(self._manager.held_blocks(other.name))
            needed += max(0, self._prompt_blocks(other) - held)
        return needed <= self._manager.num_free_blocks

    def _prompt_blocks(self, request: Request) -> int:
        """Returns the blocks that a request takes until it decodes."""
        tokens = min(self.num_tokens(request.name) + 1, self._plan.max_model_len)
        return self._plan.admission_blocks(tokens)

    def _forks_now(self, request: Hashable, name: Hashable) -> bool:
        """Forks a request; returns False if its newest state may be in the block of a draft."""
        try:
            self._manager.fork(request, [name])
        except ValueError:
            return False
        return True

    def _can_fork(self, sample: Request) -> bool:
        """Returns whether a sample can share blocks now; counts the rows that are copied."""
        uploads, copies = self._row_copies
        copies = copies if uploads == self._manager.num_uploads else 0
        if copies >= self._forks or len(self._running) == self._manager.max_requests:
            return False
        if not self._preempts and not self._has_room(sample, ()):
            return False
        self._row_copies = self._manager.num_uploads, copies + 1
        return True

    def _next_age(self, donor: tuple[int, ...]) -> tuple[int, ...]:
        self._num_added += 1
        return (*donor, self._num_added)

    # --- checks -------------------------------------------------------------------

    def _known(self, request: Hashable) -> Request:
        found = self._running.get(request) or self._waiting.get(request)
        if found is None:
            raise ValueError(f"request={request!r} is unknown; add it first")
        return found

    def _indices(self, requests: Mapping[Hashable, object]) -> np.ndarray:
        """Returns the indices of requests in the ledger, int64[N]."""
        if not isinstance(requests, Mapping):
            raise TypeError(
                f"num_tokens must map requests to numbers of tokens, got {type(requests).__name__}"
            )
        return self._ledger.indices(requests)

    def _num_computed(self, request: Request) -> int:
        return int(self._manager.computed_by_row[request.row]) if request.row >= 0 else 0

    def _check_new(self, requests: Sequence[Hashable]) -> None:
        for request in requests:
            if request in self._running or request in self._waiting:
                raise ValueError(
                    f"request={request!r} waits or runs already; finish it, or use another name"
                )
        if len(set(requests)) < len(requests):
            raise ValueError(f"{list(requests)!r} names a request twice")


def _by_age(requests: Mapping[Hashable, Request]) -> dict[Hashable, Request]:
    return {request.name: request for request in sorted(requests.values(), key=lambda r: r.age)}


def _as_counts(num_tokens: Mapping[Any, int]) -> np.ndarray:
    """Returns the positive ints of a mapping, int64[N]."""
    counts = list(num_tokens.values())
    if counts.count(1) == len(counts) and type(sum(counts)) is int:  # 1.0 equals 1
        return np.ones(len(counts), np.int64)
    if set(map(type, counts)) - {int} or (counts and min(counts) < 1):
        for count in counts:
            check_positive(num_tokens=count)
    return np.array(counts, np.int64)
