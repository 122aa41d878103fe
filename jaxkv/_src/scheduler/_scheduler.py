"""`Scheduler`, which chooses the work of every step. No jax."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.internal.checks import check_choice, check_count, check_positive
from jaxkv._src.prefixes import ExtraKey, check_boundaries, check_content
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._chooser import Chooser
from jaxkv._src.scheduler._ledger import Request
from jaxkv._src.scheduler._prompts import Prompt, Prompts, Tokens
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._step import Schedule

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
        cached_tokens = manager.plan.max_model_len if cached_tokens is None else cached_tokens
        check_count(cached_tokens=cached_tokens)
        check_positive(chunk_tokens=1 if chunk_tokens is None else chunk_tokens)
        self._manager, self._plan = manager, manager.plan
        self._queues = Queues(manager)
        self._ledger = self._queues.ledger
        self._prompts = Prompts(manager, tokens, chunk_tokens=chunk_tokens, forks=forks)
        self._admission = Admission(
            manager, self._queues, self._prompts, preempts=preemption, forks=forks
        )
        self._chooser = Chooser(
            manager,
            self._queues,
            self._prompts,
            self._admission,
            max_tokens=max_tokens,
            batch_size=batch_size,
            decode_first=order == "decode_first",
            preempts=preemption,
            forks=forks,
            cached_tokens=cached_tokens,
        )

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} requests run, {len(self.waiting)} wait, "
            f"{self._manager.num_free_blocks:,} blocks free)"
        )

    # --- requests -----------------------------------------------------------------

    @property
    def running(self) -> tuple[Any, ...]:
        """Requests that have a row, oldest first."""
        return tuple(self._queues.running)

    @property
    def waiting(self) -> tuple[Any, ...]:
        """Requests that have no row, in the order in which they will be admitted."""
        return tuple([request.name for request in self._queues.waiting])

    @property
    def has_work(self) -> bool:
        """Whether any request has tokens to compute."""
        running = self._queues.now_running()
        return bool(len(self._queues.waiting)) or bool(
            (running.num_tokens > running.computed).any()
        )

    def num_tokens(self, request: Hashable) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return self._queues.num_tokens(request)

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
        self._queues.check_new([request])
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
        age = self._queues.next_age(())
        self._queues.waiting.arrive(Request(request, age, encoder_tokens, blocks))

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
        queues, ledger = self._queues, self._ledger
        donor = queues.known(request)
        if isinstance(into, str) or not isinstance(into, Sequence):
            raise TypeError(f"into must be a sequence of names, got {into!r}")
        queues.check_new(into)
        computed, at = queues.num_computed(donor), ledger.of[request]
        if computed < ledger.prefill_tokens[at] or donor.row < 0:
            raise ValueError(
                f"request={request!r} has computed {computed} of {self.num_tokens(request)} "
                "tokens; fork it after the step that computes its prompt"
            )
        for name in into:
            index = ledger.enter(name, computed, int(ledger.max_tokens[at]))
            sample = dataclasses.replace(donor, name=name, age=queues.next_age(donor.age), row=-1)
            self._prompts.fork(request, name)
            if self._admission.fork(request, sample):
                ledger.prefill_tokens[index] = computed
            else:
                queues.waiting.insert(sample)
        queues.sort_running()

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
        computed = [self._queues.num_computed(self._queues.known(name)) for name in num_tokens]
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
        known = self._queues.known(request)
        if known.row >= 0:
            self._prompts.finish(request)
            self._queues.stop(known)
        else:
            self._queues.waiting.remove(known)
        self._ledger.leave(request)
        self._prompts.forget(request)

    # --- steps --------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Chooses the work of the next step, and takes blocks for it.

        If a schedule is not carried out, the next call chooses its work again.

        Returns:
          The work, the requests to sample from, those preempted, and the prefix hits.
        """
        return self._chooser.schedule()

    # --- checks -------------------------------------------------------------------

    def _indices(self, requests: Mapping[Hashable, object]) -> np.ndarray:
        """Returns the indices of requests in the ledger, int64[N]."""
        if not isinstance(requests, Mapping):
            raise TypeError(
                f"num_tokens must map requests to numbers of tokens, got {type(requests).__name__}"
            )
        return self._ledger.indices(requests)


def _as_counts(num_tokens: Mapping[Any, int]) -> np.ndarray:
    """Returns the positive ints of a mapping, int64[N]."""
    counts = list(num_tokens.values())
    if counts.count(1) == len(counts) and type(sum(counts)) is int:  # 1.0 equals 1
        return np.ones(len(counts), np.int64)
    if set(map(type, counts)) - {int} or (counts and min(counts) < 1):
        for count in counts:
            check_positive(num_tokens=count)
    return np.array(counts, np.int64)
