"""A scheduler on top of the block manager: admission, chunked prefill, preemption. No jax."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxkv._internal.checks import check_choice, check_count, check_positive
from jaxkv.blocks import BlockManager, OutOfBlocksError

Order = Literal["decode_first", "prefill_first"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one step.

    work: new tokens by request, for `BlockManager.step`.
    samples: requests of ``work`` whose newest token the step computes, and the index of each in
      the batch: sample the next one of each, and tell the scheduler by `Scheduler.append`.
    preempted: requests that lost their blocks and wait to be computed again from the start.
    """

    work: dict[Any, int]
    samples: dict[Any, int]
    preempted: tuple[Any, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    """A request that waits or runs.

    age: its place in the order of arrival, kept when it is preempted.
    num_tokens: tokens that are known: prompt, sampled ones and drafts.
    max_tokens: the most that it will have.
    blocks: the most that it holds while it decodes; what a prompt under way takes beyond them.
    prefill_tokens: tokens that were known when it was admitted.
    forked_at: tokens that it shares with another request; -1: none.
    """

    name: Hashable
    age: tuple[int, ...]
    num_tokens: int
    max_tokens: int
    encoder_tokens: int
    blocks: tuple[int, int]
    prefill_tokens: int = 0
    forked_at: int = -1


class _Step:
    """The work of a step in the making, and what is left of its sizes."""

    def __init__(self, max_tokens: int, batch_size: int, longest: int):
        self.work: dict[Hashable, int] = {}
        self._tokens, self._requests, self._longest = max_tokens, batch_size, longest

    def give(self, request: _Request, computed: int) -> bool:
        """Gives a request the tokens that it has to compute, as far as they go."""
        count = min(request.num_tokens - computed, self._tokens, self._longest)
        if count < 1 or self._requests < 1:
            return False
        self.work[request.name] = count
        self._tokens -= count
        self._requests -= 1
        return True

    def take_back(self, name: Hashable) -> None:
        """Takes back what a request was given."""
        self._tokens += self.work.pop(name)
        self._requests += 1


class Scheduler:
    """Chooses the work of every step: who computes how many tokens, who starts, who gives way.

    ::

        scheduler = jaxkv.Scheduler(manager, max_tokens=8192)
        scheduler.add("a", 40)                                  # a prompt of 40 tokens
        while scheduler.has_work:
            schedule = scheduler.schedule()
            upload = manager.step(shape, schedule.work)
            ...                                                 # the step, and sampling
            scheduler.append(dict.fromkeys(schedule.samples, 1))
            ...                                                 # finish what has ended

    Requests get blocks in the order of their arrival. When blocks run out, the youngest one
    that has got none in this step is preempted: it gives back all it has, and waits ahead of
    those that arrived later. The same calls give the same schedules.

    The manager is the scheduler's: of its methods call ``step`` and those that read.
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
    ):
        """Starts without requests.

        Args:
          manager: without requests.
          max_tokens: tokens of a step over all its requests, as of its `StepShape`.
          batch_size: requests of a step; None: the manager's ``max_requests``.
          order: who gets the tokens of a step first: requests that decode, or prompts.
          preemption: True admits a request once its prompt fits next to what prompts under way
            still need. False admits it once the longest forms of all requests fit, so that
            none is ever preempted; `add` then wants to know ``max_tokens``.
          forks: as of `StepShape.for_plan`.
        """
        check_count(forks=forks)
        check_choice(get_args(Order), order=order)
        if not isinstance(manager, BlockManager):
            raise TypeError(f"manager must be a BlockManager, got {type(manager).__name__}")
        if manager.requests:
            raise ValueError(f"manager runs {len(manager.requests)} requests; pass one without any")
        batch_size = manager.max_requests if batch_size is None else batch_size
        check_positive(max_tokens=max_tokens, batch_size=batch_size)
        self._manager, self._plan = manager, manager.plan
        self._max_tokens, self._batch_size, self._forks = max_tokens, batch_size, forks
        self._longest_chunk = min(max_tokens, manager.plan.limits.max_in_flight_tokens)
        self._decode_first, self._preempts = order == "decode_first", preemption
        self._waiting: dict[Hashable, _Request] = {}  # by age
        self._running: dict[Hashable, _Request] = {}  # by age
        self._num_added = 0
        self._row_copies = 0, 0  # since the upload of that number

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
        """Requests that have none, in the order in which they are admitted."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request has tokens to compute."""
        computed = self._manager.computed_tokens
        return bool(self._waiting) or any(
            request.num_tokens > computed[name] for name, request in self._running.items()
        )

    def num_tokens(self, request: Hashable) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return self._known(request).num_tokens

    def add(
        self,
        request: Hashable,
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        encoder_tokens: int = 0,
    ) -> None:
        """Queues a request.

        Args:
          request: any hashable name.
          num_tokens: tokens of its prompt.
          max_tokens: the most tokens that it will have, the prompt's included; None: the
            plan's ``max_model_len``.
          encoder_tokens: encoder tokens of the request, for cross attention.

        Raises:
          TypeError, ValueError: a name that is in use, or more tokens than the plan admits.
        """
        longest = self._plan.max_model_len if max_tokens is None else max_tokens
        check_positive(num_tokens=num_tokens, max_tokens=longest)
        check_count(encoder_tokens=encoder_tokens)
        self._check_new([request])
        if not num_tokens <= longest <= self._plan.max_model_len:
            raise ValueError(
                f"num_tokens={num_tokens} must be at most max_tokens={longest}, and that at most "
                f"the plan's max_model_len={self._plan.max_model_len}"
            )
        if encoder_tokens > self._plan.limits.max_encoder_tokens:
            raise ValueError(
                f"encoder_tokens={encoder_tokens} is more than the plan admits: "
                f"limits.max_encoder_tokens={self._plan.limits.max_encoder_tokens}"
            )
        steady = self._plan.steady_blocks(longest)
        blocks = steady, self._plan.admission_blocks(longest) - steady
        self._waiting[request] = _Request(
            request, self._next_age(()), num_tokens, longest, encoder_tokens, blocks
        )

    def fork(self, request: Hashable, into: Sequence[Hashable]) -> None:
        """Starts further samples of a request: they share the blocks of what it has computed.

        Call it after the step that computed the prompt, and `append` the first token of every
        sample. A sample for which no row, no room or none of ``forks`` is left waits like a
        new request, and computes the prompt by itself.

        Args:
          request: whose computed tokens the samples begin with.
          into: names of the samples.

        Raises:
          ValueError: a request that does not run or has not computed its prompt, or a name
            that is in use; nothing is started.
        """
        donor = self._known(request)
        if isinstance(into, str) or not isinstance(into, Sequence):
            raise TypeError(f"into must be a sequence of names, got {into!r}")
        self._check_new(into)
        computed = self._manager.computed_tokens.get(request, 0)
        if request not in self._running or computed < donor.prefill_tokens:
            raise ValueError(
                f"request={request!r} has computed {computed} of {donor.num_tokens} tokens; fork "
                "it after the step that computes its prompt"
            )
        for name in into:
            sample = dataclasses.replace(
                donor, name=name, age=self._next_age(donor.age), num_tokens=computed
            )
            if self._can_fork(sample):
                self._manager.fork(request, [name])
                sample.forked_at = donor.forked_at = sample.prefill_tokens = computed
                self._running[name] = sample
            else:
                self._waiting[name] = sample
        self._running, self._waiting = _by_age(self._running), _by_age(self._waiting)

    def append(self, num_tokens: Mapping[Any, int]) -> None:
        """Gives requests more tokens to compute: sampled ones, and drafts to verify with them.

        Args:
          num_tokens: by request, usually 1.

        Raises:
          TypeError, ValueError: an unknown request, or more tokens than its ``max_tokens``;
            nothing is appended.
        """
        for name, count in num_tokens.items():
            request = self._known(name)
            check_positive(num_tokens=count)
            if request.num_tokens + count > request.max_tokens:
                raise ValueError(
                    f"request={name!r} would have {request.num_tokens + count} tokens, more than "
                    f"its max_tokens={request.max_tokens}; finish it"
                )
        for name, count in num_tokens.items():
            self._known(name).num_tokens += count

    def rewind(self, num_tokens: Mapping[Any, int]) -> None:
        """Takes back the last tokens of requests: drafts that were rejected.

        Args:
          num_tokens: by request, the tokens that stay.

        Raises:
          TypeError, ValueError: an unknown request, more tokens than it has, or as
            `BlockManager.rewind`; nothing is taken back.
        """
        for name, count in num_tokens.items():
            request = self._known(name)
            check_positive(num_tokens=count)
            if count > request.num_tokens:
                raise ValueError(
                    f"num_tokens={count} is more than the {request.num_tokens} tokens of "
                    f"request={name!r}"
                )
        computed = self._manager.computed_tokens
        lost = {name: n for name, n in num_tokens.items() if computed.get(name, 0) > n}
        if lost:
            self._manager.rewind(lost)
        for name, count in num_tokens.items():
            self._known(name).num_tokens = count

    def finish(self, request: Hashable) -> None:
        """Forgets a request that has ended or is aborted, and gives back its blocks.

        Raises:
          ValueError: an unknown request.
        """
        self._known(request)
        if request in self._running:
            self._manager.finish(request)
            del self._running[request]
        else:
            del self._waiting[request]

    # --- steps --------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Chooses the work of the next step, and takes its blocks.

        The work of a schedule that is not carried out is chosen again by the next one.
        """
        computed = self._manager.computed_tokens
        step = _Step(self._max_tokens, self._batch_size, self._longest_chunk)
        decodes, prefills = self._with_work(computed)
        for request in (*decodes, *prefills) if self._decode_first else prefills:
            step.give(request, computed[request.name])
        entrants = self._entrants(step, computed)
        later = [] if self._decode_first else decodes
        for request in later:
            step.give(request, computed[request.name])
        preempted = self._take_blocks(step, {request.name for request in prefills}, entrants)
        self._admit(step, entrants, computed)
        for request in later:  # what those left who did not get in
            if request.name not in step.work and request.name in self._running:
                if not step.give(request, computed[request.name]):
                    break
                if not self._grows(request.name, step.work[request.name]):
                    step.take_back(request.name)
        samples = {
            name: index
            for index, (name, count) in enumerate(step.work.items())
            if computed.get(name, 0) + count == self._running[name].num_tokens
        }
        return Schedule(step.work, samples, tuple(preempted))

    def _with_work(self, computed: Mapping[Hashable, int]) -> tuple[list[_Request], list[_Request]]:
        """Returns the running requests with tokens to compute: those that decode, and prompts.

        Those that write for the first time since they were forked copy a block, for which the
        shape of a step has limited room: the younger ones of too many are left out.
        """
        decodes: list[_Request] = []
        prefills: list[_Request] = []
        forks = self._forks
        for name, request in self._running.items():
            done = computed[name]
            if request.num_tokens <= done:
                continue
            if request.forked_at == done:
                forks -= 1
                if forks < 0:
                    continue
            (prefills if done < request.prefill_tokens else decodes).append(request)
        return decodes, prefills

    def _entrants(self, step: _Step, computed: Mapping[Hashable, int]) -> list[_Request]:
        """Returns the waiting requests that may start, in order, and gives them tokens."""
        entrants: list[_Request] = []
        for request in self._waiting.values():
            has_row = len(self._running) + len(entrants) < self._manager.max_requests
            if not (has_row and self._has_room(request, entrants, computed)):
                break
            if not step.give(request, 0):
                break
            entrants.append(request)
        return entrants

    def _take_blocks(
        self, step: _Step, prefills: set[Hashable], entrants: list[_Request]
    ) -> list[Hashable]:
        """Takes the blocks of all running requests with work; returns those preempted for it.

        If there are too few for all, nobody enters.
        """
        names = {request.name for request in entrants}
        claims = {name: count for name, count in step.work.items() if name not in names}
        self._manager.trim(name for name in self._running if name not in claims)
        try:
            self._manager.grow(claims)
        except OutOfBlocksError:
            for name in names:
                step.take_back(name)
            entrants.clear()
            return self._take_by_age(step, prefills)
        return []

    def _take_by_age(self, step: _Step, prefills: set[Hashable]) -> list[Hashable]:
        """Takes blocks for one request after the other, the oldest first."""
        preempted: list[Hashable] = []
        left = list(self._running)  # to preempt, the youngest last
        is_short = False
        for name in list(self._running):
            if name not in step.work:
                continue
            if is_short and name in prefills:  # what is free belongs to an older one
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

    def _preempt(self, name: Hashable) -> None:
        self._manager.finish(name)
        request = self._running.pop(name)
        request.forked_at = -1
        self._waiting = _by_age({**self._waiting, name: request})

    def _admit(
        self, step: _Step, entrants: Sequence[_Request], computed: Mapping[Hashable, int]
    ) -> None:
        """Starts requests in order, for as long as there are blocks."""
        is_full = False
        for request in entrants:
            name = request.name
            if not is_full and self._has_room(request, (), computed):
                self._manager.start(name, encoder_tokens=request.encoder_tokens)
                if self._grows(name, step.work[name]):
                    request.prefill_tokens = request.num_tokens
                    self._running[name] = self._waiting.pop(name)
                    continue
                self._manager.finish(name)
            is_full = True
            step.take_back(name)
        self._running = _by_age(self._running) if entrants else self._running

    def _has_room(
        self, request: _Request, ahead: Sequence[_Request], computed: Mapping[Hashable, int]
    ) -> bool:
        """Returns whether a request can start after others; see ``preemption``."""
        if not self._preempts:
            everyone = (request, *ahead, *self._running.values())
            steady, in_flight = zip(*(other.blocks for other in everyone), strict=True)
            return sum(steady) + max(in_flight) <= self._plan.usable_blocks
        needed = sum(self._prompt_blocks(other) for other in (request, *ahead))
        for name, other in self._running.items():
            if computed.get(name, 0) < other.prefill_tokens:
                held = sum(self._manager.held_blocks(name))
                needed += max(0, self._prompt_blocks(other) - held)
        return needed <= self._manager.num_free_blocks

    def _prompt_blocks(self, request: _Request) -> int:
        """Returns the blocks that a request takes until it decodes."""
        tokens = min(request.num_tokens + 1, self._plan.max_model_len)
        return self._plan.admission_blocks(tokens)

    def _can_fork(self, sample: _Request) -> bool:
        """Returns whether a sample can share blocks now; counts the rows that are copied."""
        uploads, copies = self._row_copies
        copies = copies if uploads == self._manager.num_uploads else 0
        if copies >= self._forks or len(self._running) == self._manager.max_requests:
            return False
        if not self._preempts and not self._has_room(sample, (), {}):
            return False
        self._row_copies = self._manager.num_uploads, copies + 1
        return True

    def _next_age(self, donor: tuple[int, ...]) -> tuple[int, ...]:
        self._num_added += 1
        return (*donor, self._num_added)

    # --- checks -------------------------------------------------------------------

    def _known(self, request: Hashable) -> _Request:
        found = self._running.get(request) or self._waiting.get(request)
        if found is None:
            raise ValueError(f"request={request!r} is unknown; add it first")
        return found

    def _check_new(self, requests: Sequence[Hashable]) -> None:
        for request in requests:
            if request in self._running or request in self._waiting:
                raise ValueError(f"request={request!r} is there already; finish it first")
        if len(set(requests)) < len(requests):
            raise ValueError(f"{list(requests)!r} names a request twice")


def _by_age(requests: Mapping[Hashable, _Request]) -> dict[Hashable, _Request]:
    return {request.name: request for request in sorted(requests.values(), key=lambda r: r.age)}
