"""`Scheduler`, which chooses the work of every step. No jax."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager, ExportedBlocks, OutOfBlocksError
from jaxkv._src.internal.checks import (
    check_at_most,
    check_int,
    check_kind,
    check_left_out,
    check_new_names,
    check_positive,
    plain_ints,
)
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.numbers import MAX_SAMPLES
from jaxkv._src.internal.unique import Unique
from jaxkv._src.planning import checked_encoder_tokens
from jaxkv._src.prefixes import ExtraKey, check_boundaries, check_content, check_ranges
from jaxkv._src.scheduler._admission import Admission
from jaxkv._src.scheduler._chooser import Chooser
from jaxkv._src.scheduler._options import Options, Order, Tokens
from jaxkv._src.scheduler._prompts import Prompts
from jaxkv._src.scheduler._queues import Queues
from jaxkv._src.scheduler._requests import ANYWHERE, Request, find
from jaxkv._src.scheduler._schedule import Schedule, Wanted
from jaxkv._src.uploads import StepShape


class Scheduler(Unique):
    """Chooses the work of every step: tokens of each request, admission and preemption.

    Example::

        scheduler = jaxkv.Scheduler(manager, max_tokens=8192, tokens=tokens)
        shape = scheduler.shape()
        for name in tokens:                                 # token ids by request: the prompts
            scheduler.add(name, len(tokens[name]))
        while scheduler.has_work:
            schedule = scheduler.schedule()
            upload = manager.step(shape, schedule.work, extra=schedule.token_ids)
            cache, picked = step(params, cache, upload)     # a token for each request of the step
            for name, index in schedule.samples.items():
                tokens[name].append(int(picked[index]))
                if len(tokens[name]) < longest:
                    scheduler.append({name: 1})
                else:
                    scheduler.finish(name)

    Requests get blocks in line: by priority, then in the order of their arrival. When blocks run
    out, the last request in line that got none in this step is preempted: it gives back all of its
    blocks, and waits where it was in line. With host memory, it goes on where it was if its blocks
    are still there (`BlockManager.swap_out`); otherwise it is computed again.

    A request that does not fit holds up nobody at once: 16 others that fit may start before it,
    and then none that is behind it in line. None passes one that ran before, or that forks. So
    each starts in the end, unless requests of a lower number keep coming. The same calls give the
    same schedules.

    The scheduler owns the manager: call only its ``step``, its methods that change no request, and
    `restart` after `BlockManager.reset`. It cannot see new weights: call `BlockManager.new_epoch`
    when they come, or later prompts share what the old ones computed.
    """

    why = (
        "its manager keeps the blocks of one cache; make another manager and another scheduler, "
        "and add the requests again"
    )

    @knows_remedies()
    @plain_ints
    def __init__[Name: Hashable](
        self,
        manager: BlockManager,
        *,
        max_tokens: int,
        batch_size: int | None = None,
        order: Order = "decode_first",
        preemption: bool = True,
        forks: int = 0,
        tokens: Tokens[Name] | None = None,
        cached_tokens: int | None = None,
        chunk_tokens: int | None = None,
        lookahead_steps: int = 0,
    ):
        """Creates a scheduler without requests.

        Args:
          manager: a manager without requests.
          max_tokens: the most tokens of a step, over all its requests.
          batch_size: the most requests of a step; None: the manager's ``max_requests``.
          order: which requests get the tokens of a step first: "decode_first" or "prefill_first".
          preemption: True: admits a request once its prompt fits next to the unfinished prompts.
            False: admits it once all requests fit at their longest, so that none is ever
            preempted; pass ``max_tokens`` to `add` then.
          forks: as for `StepShape.for_plan`.
          tokens: mapping from requests to token ids that you keep up to date: the prompt, then the
            tokens that were sampled, and drafts while they are verified. With it, requests share
            prefixes that the cache still holds, and their own blocks are cached for later prompts.
            Plans with states need ``forks`` for that.
          cached_tokens: as for `StepShape.for_plan`; None: 65,536, or the plan's ``max_model_len``
            if that is more, and no more than all requests have together; 0 if requests neither
            share prefixes nor fork nor are swapped out.
          chunk_tokens: chunks of a prompt end at multiples of this, so that a prompt is computed in
            the same chunks however much of it was cached; None: chunks end anywhere.
          lookahead_steps: how many steps the caller schedules before it knows the tokens of an
            earlier one. That many of the newest ids of a request may be missing in ``tokens``;
            leave these out, because any number in their place would be taken for a token.
        """
        check_kind(BlockManager, manager=manager)
        self._manager, self._plan = manager, manager.plan
        self._options = options = Options(
            manager=manager,
            max_tokens=max_tokens,
            batch_size=manager.max_requests if batch_size is None else batch_size,
            order=order,
            preemption=preemption,
            forks=forks,
            tokens=tokens,
            most_cached_tokens=cached_tokens,
            chunk_tokens=chunk_tokens,
            lookahead_steps=lookahead_steps,
        )
        self._queues, self._most_drafts = Queues(manager), options.most_drafts
        self._table = self._queues.table
        self._prompts = Prompts(options)
        self._admission = Admission(options, self._queues, self._prompts)
        self._chooser = Chooser(options, self._queues, self._prompts, self._admission)

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} requests run, {len(self.waiting)} wait, "
            f"{self._manager.num_free_blocks:,} blocks free)"
        )

    # --- reading ------------------------------------------------------------------

    @property
    def running(self) -> tuple[Hashable, ...]:
        """Requests that have a row, in line."""
        return tuple([request.name for request in self._queues.running])

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Requests that have no row, in line."""
        return tuple(self._queues.waiting_names)

    @property
    def has_work(self) -> bool:
        """Whether any request has not been finished."""
        return bool(self._queues.by_name)

    def wanted(self) -> Wanted:
        """Returns what there is to compute, for the choice of a step's shape."""
        running = self._queues.now_running()
        entering, has_backlog = self._admission.entering_tokens(running)
        return Wanted(int(np.add.reduce(running.num_wanted)) + entering, has_backlog)

    def num_tokens(self, request: Hashable) -> int:
        """Returns the known tokens of a request: prompt, sampled ones and drafts."""
        return self._queues.num_tokens(find(self._queues.by_name, request))

    def index(self, request: Hashable) -> int:
        """Returns the index of a request, which no other one has until it is finished.

        `Schedule.index` and `SampledRequests.index` hold it, and `append` takes it, so that a loop
        over arrays looks up no names.
        """
        return find(self._queues.by_name, request).index

    @plain_ints
    def shape(
        self,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        tokens_per_request: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        extra: int | None = None,
        shared_prefixes: int = 0,
        reproducible: bool = False,
    ) -> StepShape:
        """Returns a shape for steps of this scheduler.

        Example::

            mixed = scheduler.shape()
            decode = scheduler.shape(max_query_len=1)

        Args:
          max_tokens: tokens of the step; None: the scheduler's, or less if ``batch_size`` requests
            of ``max_query_len`` tokens have less.
          batch_size: requests of the step; None: the scheduler's.
          tokens_per_request: for a rectangular batch; needs ``chunk_tokens`` of at most as many.
          max_query_len, max_seq_len, shared_prefixes, reproducible: as for `StepShape.for_plan`.
          extra: integers of your own that travel with the upload; None: as many as
            `Schedule.token_ids` needs, and no fewer than a step has tokens, if the scheduler has
            ``tokens``.

        Raises:
          TypeError, ValueError: as for `StepShape.for_plan`.
        """
        options = self._options
        batch = options.batch_size if batch_size is None else batch_size
        check_positive(batch_size=batch, max_tokens=1 if max_tokens is None else max_tokens)
        if tokens_per_request is not None:
            check_positive(tokens_per_request=tokens_per_request)
            if options.chunk_tokens is None or options.chunk_tokens > tokens_per_request:
                raise ValueError(
                    f"tokens_per_request={tokens_per_request} needs chunks of at most as many "
                    f"tokens, and the scheduler has chunk_tokens={options.chunk_tokens}; pass "
                    f"chunk_tokens={tokens_per_request} when you make the Scheduler"
                )
        elif max_tokens is None:
            check_positive(max_query_len=1 if max_query_len is None else max_query_len)
            max_tokens = min(options.max_tokens, batch * (max_query_len or options.max_tokens))
        has_ids = extra is None and options.tokens is not None
        if extra is None:
            extra = batch * tokens_per_request if tokens_per_request else max_tokens or 0
        return StepShape.for_plan(
            self._plan,
            max_requests=self._manager.max_requests,
            max_tokens=max_tokens,
            batch_size=batch,
            tokens_per_request=tokens_per_request,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            forks=options.forks,
            cached_tokens=options.cached_tokens,
            extra=extra,
            shared_prefixes=shared_prefixes,
            reproducible=reproducible,
            token_ids=has_ids,
        )

    # --- requests -----------------------------------------------------------------

    @plain_ints
    def add(
        self,
        request: Hashable,
        num_tokens: int,
        *,
        samples: int = 1,
        max_tokens: int | None = None,
        priority: int = 0,
        encoder_tokens: int | None = None,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        boundaries: Sequence[int] = (),
    ) -> None:
        """Queues a request, or several of one prompt.

        Args:
          request: any hashable name.
          num_tokens: tokens of its prompt.
          samples: how many requests have this prompt: ``request``, and ``(request, 1)`` to
            ``(request, samples - 1)``. The prompt is computed once, and the others fork from
            it: `Schedule.samples` of the step that completes it names those that run then. Any
            other computes the prompt once it gets a row, as far as the cache has lost it.
          max_tokens: the most tokens that it will have, the prompt's included; None: the
            plan's ``max_model_len``.
          priority: any int; lower ones come first, and those of one number as they arrive.
          encoder_tokens: as for `BlockManager.start`.
          salt, extra_keys, boundaries: as for `BlockManager.start`; they need ``tokens``.

        Raises:
          TypeError, ValueError: a name that is in use, more tokens than the plan admits, anything
            that `BlockManager.start` refuses, fewer token ids in the scheduler's ``tokens`` than
            ``num_tokens``, or samples of a scheduler without ``forks``; nothing is added.
        """
        self._change()
        longest = self._plan.max_model_len if max_tokens is None else max_tokens
        check_positive(samples=samples)
        check_int(priority=priority)
        check_at_most(MAX_SAMPLES, samples=samples)
        if samples > 1:
            self._check_forks()
        self._check_lengths(num_tokens, longest, max_tokens)
        encoder_tokens = checked_encoder_tokens(self._plan, encoder_tokens)
        names = [request, *((request, sample) for sample in range(1, samples))]
        check_new_names(names, self._queues.by_name)
        prompt = salt, extra_keys, boundaries, priority
        parent = self._create(request, num_tokens, longest, encoder_tokens, *prompt)
        ids = [self._prompts.first_ids(name, num_tokens, is_new=True) for name in names]
        others = [parent.sample(name, self._queues.next_place(parent.place)) for name in names[1:]]
        for one, of_one in zip([parent, *others], ids, strict=True):
            one.ids = of_one
            self._table.add(one, num_tokens, longest)
        self._queues.enter(parent)
        self._queues.hold(parent, others)

    def fork(self, request: Hashable, into: Sequence[Hashable]) -> None:
        """Starts more samples of a request, which share the blocks of its computed tokens.

        Call it after the step that computed the prompt, and `append` the first token of every
        sample. If no row or no blocks are left for a sample, the state is in the block of a draft,
        or the next step of the request was scheduled already, the sample waits like a new request
        and computes the prompt itself.

        Args:
          request: the request whose computed tokens the samples start with.
          into: names of the samples.

        Raises:
          TypeError, ValueError: a request that does not run or has not computed its prompt, a name
            that is in use, fewer token ids of a sample in the scheduler's ``tokens`` than it
            starts with, or a scheduler without ``forks``; nothing is started.
        """
        self._change()
        queues, table = self._queues, self._table
        donor = find(queues.by_name, request)
        check_new_names(into, queues.by_name)
        self._check_forks()
        computed = queues.num_computed(donor)
        if computed < table.prefill_tokens[donor.index] or donor.row < 0:
            raise ValueError(
                f"request={request!r} has computed {computed} of {queues.num_tokens(donor)} "
                "tokens; fork it after the step that computes its prompt"
            )
        for name in into:
            self._prompts.first_ids(name, computed, is_new=False)
        awaits_copy = self._manager.pending_copies_by_row[donor.row]
        for name in into:
            sample = donor.sample(name, queues.next_place(donor.place))
            table.add(sample, computed, table.max_tokens.item(donor.index))
            # A step that was chosen takes no copy of a block that is shared only now.
            is_late = self._chooser.is_chosen(donor) or awaits_copy
            if is_late or not self._admission.fork(donor, sample):
                queues.wait(sample, needs_token=True)

    def export_blocks(self, request: Hashable) -> ExportedBlocks:
        """Returns the blocks with which a request goes on in another cache.

        The request keeps them, and is not preempted, until you finish it, or append its next token.

        Raises:
          ValueError: an unknown request, one that has tokens to compute, or what
            `BlockManager.export_blocks` refuses.
        """
        self._change()
        known = find(self._queues.by_name, request)
        if not self._queues.needs_token(known) or known.row < 0:
            raise ValueError(
                f"request={request!r} has computed {self._queues.num_computed(known)} of "
                f"{self._queues.num_tokens(known)} tokens; export its blocks after the step that "
                "computes the last one, and before you append the next"
            )
        exporting = self._manager.export_blocks(request)
        self._queues.exporting.add(known)
        return exporting

    def import_blocks(
        self,
        request: Hashable,
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
    ) -> ExportedBlocks | None:
        """Adds a request whose tokens were computed in another cache.

        Write their bytes to the blocks that this returns, as for `BlockManager.import_blocks`, and
        then append the token that was sampled from them (or fork the request first). Until then it
        is not preempted, and computes nothing. To give it up, finish it, once nobody writes there.

        Args:
          request: any hashable name.
          num_tokens: tokens that were computed; at most the scheduler's ``cached_tokens``.
          max_tokens, salt, extra_keys: as for `add`.

        Returns:
          Its blocks; None: no row or too few blocks are free, and nothing is added.

        Raises:
          TypeError, ValueError: as for `add`, more tokens than ``cached_tokens``, or a plan that
            stores encoder tokens; nothing is added.
        """
        self._change()
        longest = self._plan.max_model_len if max_tokens is None else max_tokens
        self._check_lengths(num_tokens, longest, max_tokens)
        check_new_names([request], self._queues.by_name)
        if num_tokens > self._options.cached_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} is more than cached_tokens={self._options.cached_tokens} "
                "that a step takes; pass cached_tokens= when you make the Scheduler, and "
                "make its shapes by Scheduler.shape"
            )
        new = self._create(request, num_tokens, longest, 0, salt, extra_keys, ())
        self._prompts.first_ids(request, num_tokens, is_new=True)
        if not self._admission.has_room_for(new, num_tokens):
            return None
        try:
            exporting = self._manager.import_blocks(request, num_tokens)
        except OutOfBlocksError:
            return None
        self._table.add(new, num_tokens, longest)
        self._queues.run(new, self._manager.requests[request])
        self._queues.exporting.add(new)
        return exporting

    def append[Name: Hashable](self, num_tokens: Mapping[Name, int] | np.ndarray) -> None:
        """Gives requests more tokens to compute: a sampled one, and drafts to verify with it.

        One step computes all of them, unless they are more than a step takes, so that `rewind` can
        take back rejected drafts.

        Args:
          num_tokens: mapping from requests to numbers of tokens, usually 1; or `index` of distinct
            requests that get one token each, int64[N].

        Raises:
          TypeError, ValueError: an unknown request, one whose last token no step has computed
            since the last call, or more tokens than its ``max_tokens``; nothing is appended.
        """
        self._change()
        queues, table = self._queues, self._table
        if isinstance(num_tokens, np.ndarray):
            table.check_index(num_tokens)
            index, counts = num_tokens, np.ones(num_tokens.size, np.int64)
        else:
            index, counts = table.read(num_tokens)
        before, rows = table.num_tokens[index], table.rows[index]
        computed = self._manager.computed_by_row[rows]
        early, waits = computed < before, rows < 0
        some_wait = np.count_nonzero(waits) > 0
        if some_wait:
            early[waits] = table.needs_token[index[waits]] == 0
        if np.count_nonzero(early):
            at = int(early.argmax())
            done = computed[at] if rows[at] >= 0 else 0
            raise ValueError(
                f"request={table.names[index[at]]!r} has computed {done} of its {before[at]} "
                "tokens; append to each request once, after a step that has it in its samples"
            )
        over = before + counts > table.max_tokens[index]
        if np.count_nonzero(over):
            at = int(over.argmax())
            raise ValueError(
                f"request={table.names[index[at]]!r} would have {before[at] + counts[at]} tokens, "
                f"more than its max_tokens={table.max_tokens[index[at]]}; finish it"
            )
        table.num_tokens[index] = before + counts
        table.draft_starts[index] = before
        if np.count_nonzero(is_long := counts > 1 + self._most_drafts):
            self._start_with_one(table.requests[index[is_long]].tolist(), before[is_long] + 1)
        if queues.exporting:
            queues.exporting.difference_update(table.requests[index].tolist())
        if some_wait:
            table.needs_token[index] = False
        elif index.size == len(queues.running):
            self._chooser.is_extended = bool(np.maximum.reduce(counts, initial=1) == 1)

    def _start_with_one(self, requests: Sequence[Request], ends: np.ndarray) -> None:
        """Computes one token before more tokens than drafts; see `BlockManager.step`."""
        for request, end in zip(requests, ends.tolist(), strict=True):
            if request.row >= 0:
                request.chunk_ends = [end]
                self._queues.in_chunks.add(request)
                self._table.draft_starts[request.index] = ANYWHERE

    def rewind[Name: Hashable](self, num_tokens: Mapping[Name, int]) -> None:
        """Removes the last tokens of requests: drafts that were rejected.

        Args:
          num_tokens: mapping from requests to the number of tokens that stay.

        Raises:
          TypeError, ValueError: an unknown request, more tokens than it has, fewer than its
            prompt has, or as `BlockManager.rewind`; nothing is taken back.
        """
        self._change()
        queues = self._queues
        index, counts = self._table.read(num_tokens)
        requests = self._table.requests[index].tolist()
        for request, count in zip(requests, counts.tolist(), strict=True):
            known = queues.num_tokens(request)
            if request in queues.exporting:
                raise ValueError(
                    f"request={request.name!r} is being exported; append its next token before you "
                    "rewind it, or finish it"
                )
            if not request.prompt_tokens <= count <= known:
                raise ValueError(
                    f"num_tokens={count} of request={request.name!r} must be in "
                    f"{request.prompt_tokens}..{known}, the tokens of its prompt and all its "
                    "tokens; give the number of tokens that stay"
                )
        pairs = list(zip(requests, counts.tolist(), strict=True))
        self._prompts.rewind(pairs)
        self._table.num_tokens[index] = counts
        for most in (self._table.draft_starts, self._table.prefill_tokens):
            most[index] = np.minimum(most[index], counts)
        for request in requests:
            self._chooser.forget(request)
            may_copy = request.row >= 0 and self._manager.may_copy_by_row[request.row]
            if may_copy and not self._options.forks:  # no step takes the copy
                self._chooser.preempt(request, may_go_on=False)

    def finish(self, request: Hashable) -> None:
        """Removes a request that has ended or is aborted, and gives back its blocks.

        Raises:
          ValueError: an unknown request.
        """
        self._change()
        known = find(self._queues.by_name, request)
        self._chooser.forget(known)
        if known.row >= 0:
            self._prompts.finish(known)
        else:
            self._prompts.discard_swapped(known)
        self._queues.remove(known)

    def restart(self) -> None:
        """Computes all requests again, the first in line first.

        Call it after `BlockManager.reset`, because the blocks are gone, or for new weights after
        `BlockManager.new_epoch`. After both it may be called in any state, that of an interrupted
        call (KeyboardInterrupt) included. Tokens whose ids are not in the scheduler's ``tokens``
        are forgotten, because the steps that sample them may not have run, and schedules so far
        are to be neither carried out nor answered.
        """
        for request in reversed(self._queues.in_line):
            if request.name in self._manager.requests:
                self._prompts.finish(request)
        self._queues.restart()
        self._chooser.restart()
        for request in self._queues.by_name.values():
            self._prompts.discard_swapped(request)
            self._prompts.forget_unknown(request, self._table)

    # --- steps --------------------------------------------------------------------

    def schedule(self, *, max_tokens: int | None = None) -> Schedule:
        """Chooses the work of the next step, and takes blocks for it.

        A schedule that is not carried out by a `BlockManager.step` comes again as it was, less
        requests that have been finished or rewound since.

        Args:
          max_tokens: the most tokens of this step; None: as many as of any.

        Returns:
          The work, the requests to sample from, those preempted, and the prefix hits. There is work
          unless all requests wait for your answer to earlier ``samples``, or for the blocks of
          older ones that do.

        Raises:
          ValueError: all requests still wait for that when they are scheduled again, or token ids
            are missing in ``tokens``; see ``lookahead_steps``. Nothing is changed.
        """
        max_tokens = self._options.max_tokens if max_tokens is None else max_tokens
        check_positive(max_tokens=max_tokens)
        self._settle()
        return self._chooser.schedule(max_tokens)

    def _change(self) -> None:
        """Notes that the caller changes requests."""
        self._chooser.is_idle = self._chooser.is_extended = False
        self._settle()

    def _settle(self) -> None:
        """Forks the samples of requests whose prompt was computed."""
        queues = self._queues
        for parent in list(queues.parents):
            if queues.num_computed(parent) < parent.prompt_tokens:
                continue
            for at, sample in enumerate(queues.release(parent)):
                is_sampled = at < parent.num_sampled
                if not (is_sampled and self._admission.fork(parent, sample)):
                    queues.wait(sample, needs_token=is_sampled)

    def _create(
        self,
        request: Hashable,
        num_tokens: int,
        longest: int,
        encoder_tokens: int,
        salt: str | None,
        extra_keys: Sequence[ExtraKey],
        boundaries: Sequence[int],
        priority: int = 0,
    ) -> Request:
        """Returns a new request, the last of its priority, which neither waits nor runs yet."""
        check_content(salt, extra_keys)
        if self._options.tokens is None:
            remedy = "pass tokens= when you make the Scheduler"
            check_left_out(remedy, salt=salt, extra_keys=extra_keys, boundaries=boundaries)
        keys = tuple(extra_keys)
        check_ranges(keys, num_tokens)
        check_boundaries(boundaries, num_tokens)
        steady, place = self._plan.steady_blocks(longest), self._queues.next_place((priority,))
        blocks = steady, self._plan.admission_blocks(longest) - steady
        prompt = salt, keys, tuple(boundaries)
        return Request(request, place, num_tokens, encoder_tokens, blocks, *prompt)

    # --- checks -------------------------------------------------------------------

    def _check_forks(self) -> None:
        if not self._options.forks:
            raise ValueError(
                "samples share no blocks with forks=0; pass forks= to the Engine or Scheduler, "
                "and make shapes by Scheduler.shape"
            )

    def _check_lengths(self, num_tokens: int, longest: int, max_tokens: int | None) -> None:
        if not isinstance(num_tokens, int):
            raise TypeError(
                "num_tokens must be an int, the length of the prompt, got "
                f"{type(num_tokens).__name__}; token ids go into Scheduler(tokens=)"
            )
        check_positive(num_tokens=num_tokens, max_tokens=longest)
        if not num_tokens <= longest <= self._plan.max_model_len:
            given = "" if max_tokens is None else f"max_tokens={max_tokens}, which must be at most "
            raise ValueError(
                f"num_tokens={num_tokens} must be at most {given}the plan's "
                f"max_model_len={self._plan.max_model_len}"
            )
