"""`BlockManager`: the blocks and the progress of every running request. No jax."""

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Concatenate

import numpy as np

from jaxkv._src.blocks._pool import BlockPool, BlockUse, OutOfBlocksError
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._prompts import PrefixHit, PrefixMatch, PrefixStats
from jaxkv._src.blocks._resuming import (
    ExportedBlocks,
    blocks_to_share,
    check_rewind,
    export_blocks,
    import_blocks,
)
from jaxkv._src.blocks._rows import RowAllocator, RowWork
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.blocks._steps import StepPlanner
from jaxkv._src.internal.checks import (
    check_count,
    check_kind,
    check_name,
    check_number,
    check_positive,
    plain_ints,
)
from jaxkv._src.internal.html import html_table
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.internal.unique import Unique
from jaxkv._src.offload import HostMemory, OffloadManager, OffloadStats, Transfers
from jaxkv._src.planning import Plan, check_rows, checked_encoder_tokens, stores_encoder_tokens
from jaxkv._src.prefixes import EventLog, ExtraKey, PrefixEvents
from jaxkv._src.uploads import Ints, Ring, StepShape, Upload

MAX_SHOWN = 8  # requests in the table that Jupyter shows


def _alone[**P, R](
    method: Callable[Concatenate["BlockManager", P], R],
) -> Callable[Concatenate["BlockManager", P], R]:
    """Refuses a call that begins before another thread's call of the same manager has ended."""

    @functools.wraps(method)
    def call(self: "BlockManager", *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            # One instruction that no signal and no thread interrupts. A lock would stay acquired
            # if a KeyboardInterrupt came between its acquisition and the `try` below.
            del self._is_idle
        except AttributeError:
            raise RuntimeError(
                f"{method.__name__} was called during another call of the same BlockManager; let "
                "one thread own it, or guard every call with one lock"
            ) from None
        try:
            return method(self, *args, **kwargs)
        finally:
            self._is_idle = True

    return call


class BlockManager(Unique):
    """Keeps track of the blocks and the progress of every running request, on the host.

    Example::

        manager = jaxkv.BlockManager(plan, max_requests=256)
        manager.start("a")
        upload = manager.step(shape, {"a": 40})   # the first 40 tokens of request "a"
        ...                                       # run the step on the device
        upload = manager.step(shape, {"a": 1})    # its next token
        manager.finish("a")

    A call that raises changes nothing; call `reset` after one that was interrupted
    (KeyboardInterrupt). One thread owns it; calls that overlap raise RuntimeError.
    """

    why = (
        "two managers would give the blocks of one cache to different requests; make another from "
        "the plan, which can be pickled, and start the requests again"
    )

    @knows_remedies()
    @plain_ints
    def __init__(
        self,
        plan: Plan,
        *,
        max_requests: int,
        checkpoint_share: float = 0.1,
        events: EventLog | None = None,
        host_memory: HostMemory | None = None,
    ):
        """Creates a manager whose blocks are all free.

        Args:
          plan: from `plan_cache`.
          max_requests: rows of the block tables, as given to `make_cache`.
          checkpoint_share: largest share of all blocks that may cache recurrent states for later
            prompts, 0.0 to 1.0; the least recently used states are dropped first.
          events: log to which the manager writes the whole blocks that it caches for later prompts,
            evicts and clears; None: their keys are not computed. See `jaxkv.prefixes`.
          host_memory: memory for cached blocks that are evicted from the device; call
            `take_transfers` for every step then. None: evicted blocks are forgotten.
        """
        check_rows(plan, max_requests)
        check_number(checkpoint_share=checkpoint_share)
        if not 0 <= checkpoint_share <= 1:
            raise ValueError(f"checkpoint_share={checkpoint_share} must be from 0.0 to 1.0")
        if events is not None:
            check_kind(EventLog, "an EventLog", events=events)
        self._plan, self._max_requests, self._host_memory = plan, max_requests, host_memory
        self._checkpoint_blocks = int(checkpoint_share * plan.num_blocks)
        parts = self._new_parts(events)
        self._state, self._rows, self._offload, self._prefixes, self._steps = parts
        self._is_idle = True  # missing during a call that changes anything

    def _new_parts(
        self, events: EventLog | PrefixEvents | None
    ) -> tuple[RequestState, RowAllocator, OffloadManager | None, Prefixes, StepPlanner]:
        plan, memory = self._plan, self._host_memory
        offload = None if memory is None else _offload(memory, plan)
        pool = BlockPool(plan.num_blocks, 0 if offload is None else offload.pool.num_ids)
        for group in plan.groups:  # the first ones, of attention sinks
            pool.allocate(group.reserved_blocks)
        state = RequestState(pool, plan, self._max_requests)
        rows = RowAllocator(self._max_requests, plan.limits.max_in_flight_tokens)
        most = self._checkpoint_blocks
        prefixes = Prefixes(state, plan, checkpoint_blocks=most, events=events, offload=offload)
        return state, rows, offload, prefixes, StepPlanner(plan, state, rows, prefixes)

    def __repr__(self) -> str:
        pool = self.block_pool
        return (
            f"BlockManager({len(self._rows.by_name)} of {self._max_requests} rows taken, "
            f"{pool.num_free_blocks:,} of {self.plan.usable_blocks:,} blocks free)"
        )

    def _repr_html_(self) -> str:
        held = [
            (request, row, self._state.computed[row], *self._state.num_blocks_of(np.array([row])))
            for request, row in itertools.islice(self._rows.by_name.items(), MAX_SHOWN)
        ]
        groups = [f"blocks of group {index}" for index in range(len(self._plan.groups))]
        more = f"; {MAX_SHOWN} of them shown" if len(self._rows.by_name) > MAX_SHOWN else ""
        header = ["request", "row", "computed tokens", *groups]
        return html_table(held, caption=f"{self!r}{more}", header=header)

    # --- reading ------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that the manager was made for."""
        return self._plan

    @property
    def max_requests(self) -> int:
        """Rows of the block tables."""
        return self._max_requests

    @property
    def block_pool(self) -> BlockPool:
        """The free list and the reference counts of all blocks."""
        return self._state.pool

    @property
    def sink_block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Per group, the blocks of attention sinks, which all requests share."""
        ends = itertools.accumulate([group.reserved_blocks for group in self._plan.groups])
        starts = NULL_BLOCK + 1, *(NULL_BLOCK + 1 + end for end in ends)
        return tuple([tuple(range(*span)) for span in itertools.pairwise(starts)])

    @property
    def num_uploads(self) -> int:
        """Number of uploads so far. Each upload carries its number, which wraps past int32."""
        return self._steps.num_uploads

    @property
    def requests(self) -> Mapping[Hashable, int]:
        """Running requests and the table row of each: a view that follows the manager."""
        return types.MappingProxyType(self._rows.by_name)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests can still take, including evictable ones."""
        return self.block_pool.num_free_blocks

    @property
    def computed_tokens(self) -> Mapping[Hashable, int]:
        """Running requests and the tokens of each that are in the cache, after all uploads."""
        rows = np.fromiter(self._rows.by_name.values(), np.int64, len(self._rows.by_name))
        return dict(zip(self._rows.by_name, self._state.computed[rows].tolist(), strict=True))

    @property
    def computed_by_row(self) -> np.ndarray:
        """Computed tokens by table row, int64[max_requests], read-only; 0 for free rows."""
        return self._state.computed_by_row

    def num_computed_tokens(self, request: Hashable) -> int:
        """Returns the tokens of a request that are in the cache, after all uploads so far."""
        return int(self._state.computed[self._rows.row(request)])

    def num_known_tokens(self, request: Hashable) -> int:
        """Returns the first tokens of a request whose ids the manager knows; see `finish`."""
        return self._prefixes.cached.num_known(self._rows.row(request))

    def block_ids(self, request: Hashable) -> tuple[tuple[int, ...], ...]:
        """Returns, per group, the block ids of a request's row in order; 0 (null) for no block."""
        row, state = self._rows.row(request), self._state
        ends = state.allocated_in(row)[2]
        return tuple(
            tuple(state.logical_blocks_of(row, group)[:end].tolist())
            for group, end in enumerate(ends)
        )

    def allocated_blocks(self, *requests: Hashable) -> tuple[int, ...]:
        """Returns, per group, how many blocks requests hold; a shared block counts once for each.

        Args:
          requests: running requests; all of them if none is given.
        """
        rows = (
            [self._rows.row(name) for name in requests] if requests else self._rows.by_name.values()
        )
        rows = np.fromiter(rows, np.int64, len(rows))
        return tuple(self._state.num_blocks_of(rows).tolist())

    # --- requests -----------------------------------------------------------------

    @_alone
    @plain_ints
    def start(
        self,
        request: Hashable,
        tokens: Ints | PrefixMatch | None = None,
        *,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        boundaries: Sequence[int] = (),
        max_cached_tokens: int | None = None,
        encoder_tokens: int | None = None,
    ) -> PrefixHit:
        """Gives a request a table row, and the blocks that already hold a prefix of its prompt.

        Without ``tokens`` the request starts with no blocks, and none of its blocks are cached for
        later prompts. With ``tokens`` its first step continues after ``num_cached_tokens`` of the
        returned hit, and whole blocks of its prompt are cached for later prompts from the step that
        computes them on, until other requests need the memory. With recurrent states, a request
        continues after a cached state, which may lie after any token. A request that is about to
        write into a shared or cached block gets a copy of it in the same step, whose shape has to
        hold the copy: see ``forks`` and ``cached_tokens`` of `StepShape.for_plan`.

        Args:
          request: any hashable name.
          tokens: token ids of the prompt, int[N], fastest as a NumPy array; or the result of
            `find_prefix` for them, which includes the salt and the extra keys.
          salt: requests share blocks only with requests of the same salt.
          extra_keys: other inputs that the cached content depends on, such as adapters and images.
          boundaries: numbers of tokens after which later prompts may differ, such as the end of a
            system prompt; recurrent states are cached there. See `PrefixHit.chunk_ends`.
          max_cached_tokens: the longest prefix to share; None: all but the last token.
          encoder_tokens: encoder tokens of the request; a plan with cross attention needs it.

        Raises:
          TypeError: tokens that are not ints.
          ValueError: the request is already running, no row is free, the plan does not admit that
            many tokens or encoder tokens, or has cross attention and ``encoder_tokens`` is missing;
            a boundary is not in the prompt, or a salt or extra keys are given together with a
            `PrefixMatch`.
        """
        encoder_tokens = checked_encoder_tokens(self._plan, encoder_tokens)
        self._rows.check_new([request])
        prompt = tokens, salt, extra_keys, max_cached_tokens
        looked_up = self._prefixes.look_up(*prompt, boundaries)
        self._prefixes.loads.discard_swapped(request)
        row = self._rows.take(request)
        self._state.start(row, encoder_tokens)
        if looked_up is None:
            groups = len(self._plan.groups)
            return PrefixHit(row, 0, (0,) * groups, ("not_looked_up",) * groups, ())
        return self._prefixes.start(row, *looked_up)

    @_alone
    @plain_ints
    def fork(
        self,
        donor: Hashable,
        into: Sequence[Hashable],
        *,
        num_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Starts requests that share the blocks of a running request's first tokens.

        A request that is about to write into a shared block gets a copy of it in the same step,
        whose shape needs room for the copy: see ``forks`` of `StepShape.for_plan`.

        Args:
          donor: a running request.
          into: names of the new requests.
          num_tokens: tokens of the prefix; None: all that the donor has computed.
          prompt_tokens: first tokens of the donor's prompt that the new requests have, too, and
            compute as far as they are not in the prefix.

        Raises:
          TypeError: ``into`` is not a sequence of names.
          ValueError: a new request is already running, too few rows are free, or the donor no
            longer holds the blocks of the prefix.
        """
        row = self._rows.row(donor)
        computed = int(self._state.computed[row])
        num_tokens = computed if num_tokens is None else num_tokens
        check_count(num_tokens=num_tokens, prompt_tokens=prompt_tokens)
        if num_tokens > computed:
            raise _past(num_tokens, computed, donor)
        self._rows.check_new(into)
        shared = blocks_to_share(self._state, row, num_tokens)
        for name in into:
            self._prefixes.loads.discard_swapped(name)
            new = self._rows.take(name)
            self._state.fork(row, new, num_tokens, shared)
            self._prefixes.cached.fork(row, new, max(num_tokens, prompt_tokens))

    @_alone
    def finish(self, request: Hashable, tokens: Ints | None = None) -> None:
        """Releases the row and the blocks of a request that ended or is preempted.

        Args:
          request: a running request.
          tokens: token ids that the request generated, if it was started with ``tokens``: its
            answer, without the prompt and without rejected drafts. The whole blocks of those that
            it computed are cached, for later prompts that begin with them.

        Raises:
          TypeError, ValueError: the request is not running, tokens are not token ids, or more than
            it can have generated. It goes on running.
        """
        self._prefixes.cached.finish(self._rows.row(request), tokens)
        self._end(request)

    @_alone
    def swap_out(self, request: Hashable, tokens: Ints | None = None) -> bool:
        """Releases the row of a request that is preempted, and keeps its blocks for `swap_in`.

        The blocks count as free. As soon as others need them, they go to host memory; if that has
        no room for all of them, they are forgotten, and so they are by `new_epoch`, `reset` and
        `reset_prefixes`. The names of swapped-out requests are free for others: `start` and `fork`
        forget what was swapped out under them.

        Args:
          request: a running request.
          tokens: as for `finish`, which then takes only those after them.

        Returns:
          Whether it is swapped out. A request is ended as by `finish` if it has computed nothing,
          if its next upload copies one of its blocks, or if its state may lie in the block of a
          draft.

        Raises:
          TypeError, ValueError: as for `finish`, or the manager has no ``host_memory``.
        """
        row = self._rows.row(request)
        if self._offload is None:
            raise ValueError(
                "swap_out needs host_memory= of BlockManager; finish the request instead"
            )
        is_swapped_out = self._prefixes.loads.swap_out(request, row, tokens)
        self._end(request)
        return is_swapped_out

    @_alone
    def swap_in(self, request: Hashable) -> PrefixHit:
        """Gives a swapped-out request a row, and all tokens that it had computed.

        Raises:
          ValueError: `num_swapped_tokens` of the request is 0, it runs, or no row is free.
        """
        self._rows.check_new([request])
        if not self._prefixes.loads.num_swapped_tokens(request):
            raise ValueError(
                f"request={request!r} has no swapped-out tokens that fit now; start it, which "
                "computes its tokens again, or wait until more blocks are free"
            )
        row = self._rows.take(request)
        self._state.start(row, 0)
        return self._prefixes.loads.swap_in(request, row)

    def num_swapped_tokens(self, request: Hashable) -> int:
        """Returns the tokens with which `swap_in` would continue a request now.

        0: it is not swapped out, its blocks are gone, loading them is not worth it (`HostMemory`),
        or too few blocks are free.
        """
        check_name(request)
        return self._prefixes.loads.num_swapped_tokens(request)

    @_alone
    def discard_swapped(self, request: Hashable) -> None:
        """Discards the swapped-out state of a request, if there is any."""
        check_name(request)
        self._prefixes.loads.discard_swapped(request)

    def export_blocks(self, request: Hashable) -> ExportedBlocks:
        """Returns the blocks with which a request can go on in another cache.

        Its steps up to now must have run before anybody reads them; `jaxkv.pool.describe_blocks`
        returns their addresses. They stay the request's own: finish it once they are copied.

        Raises:
          ValueError: the request is not running, has computed no token in a step since it was
            started, forked or resumed, or its newest state may lie in the block of a draft.
        """
        return export_blocks(self._state, self._rows.row(request))

    @_alone
    @plain_ints
    def import_blocks(self, request: Hashable, num_tokens: int) -> ExportedBlocks:
        """Starts a request that has computed its first tokens in another cache.

        Write the bytes that `export_blocks` of a request with as many tokens names to the blocks
        that this returns, in the same order: after the steps that were packed before have run, and
        before that of this request is started. With host memory, some of the blocks may have to go
        there first: carry out `take_transfers` before anybody writes. The tokens count as
        ``cached_tokens`` of its first step. None of the blocks are cached for later prompts.

        Raises:
          OutOfBlocksError: too few blocks are free; nothing is changed.
          TypeError, ValueError: ``num_tokens`` is not a positive int or more than the plan's
            ``max_model_len``, the request is already running, no row is free, or the plan stores
            encoder tokens; nothing is changed.
          RuntimeError: the transfers of the last step were not taken.
        """
        self._check_transfers_taken()
        check_positive(num_tokens=num_tokens)
        if num_tokens > self._plan.max_model_len:
            raise ValueError(
                f"num_tokens={num_tokens} is more than the plan's "
                f"max_model_len={self._plan.max_model_len}"
            )
        self._rows.check_new([request])
        row = self._rows.take(request)
        try:
            self._state.start(row, 0)
            imported = import_blocks(self._state, row, num_tokens)
        except (OutOfBlocksError, ValueError):
            self._rows.give_back(request)
            raise
        self._prefixes.loads.discard_swapped(request)
        if self._offload is not None:
            self._offload.flush()
        return imported

    def _end(self, request: Hashable) -> None:
        row = self._rows.row(request)
        self._state.finish(row)
        self._prefixes.cached.used(row)
        self._rows.give_back(request)

    @_alone
    def trim(self, requests: Iterable[Hashable]) -> None:
        """Releases the blocks that the next token of each request no longer attends to.

        These are blocks that left a sliding window or a chunk in the request's last step. Its next
        step would release them as well; call `trim` for requests that skip steps, to make room for
        others. `rewind` then refuses to go back to tokens that need these blocks.

        Raises:
          ValueError: a request is not running; nothing is released.
        """
        if isinstance(requests, str) or not isinstance(requests, Iterable):
            raise TypeError(f"requests must list names of requests, got {requests!r}")
        rows = list(dict.fromkeys([self._rows.row(name) for name in requests]))
        self._state.trim(np.array(rows, np.int64))

    @_alone
    def rewind[Name: Hashable](self, num_tokens: Mapping[Name, int]) -> None:
        """Reduces the computed tokens of requests after their drafts were rejected: all or none.

        The requests keep their blocks, and their next step overwrites the rejected tokens. A
        recurrent state cannot be undone, so a layer with states needs a block for each draft
        (``speculative_blocks``), or a ring that takes them (``replay`` and ``speculative_tokens``);
        its next step then goes on from the state after the tokens that stay.

        Tokens of a prompt that are not computed yet can be taken back, too: other tokens may follow
        then.

        Args:
          num_tokens: mapping from running requests to the tokens of each that stay; at most those
            that were computed, or that it was started with.

        Raises:
          TypeError: ``num_tokens`` does not map requests to ints.
          ValueError: more tokens than the request has, or so few that no block holds what the next
            token reads; nothing is changed.
        """
        if not isinstance(num_tokens, Mapping):
            raise TypeError(
                "num_tokens must map requests to the tokens that stay in the cache, got "
                f"{type(num_tokens).__name__}"
            )
        for name, count in num_tokens.items():
            check_count(num_tokens=count)
            row = self._rows.row(name)
            computed = int(self._state.computed[row])
            if count > max(computed, self._prefixes.cached.num_known(row)):
                raise _past(count, computed, name)
        rows = np.array([self._rows.by_name[name] for name in num_tokens], np.int64)
        counts = np.array(list(num_tokens.values()), np.int64)
        stay = np.minimum(counts, self._state.computed[rows])
        check_rewind(self._state, list(num_tokens), rows, stay)
        self._state.rewind(rows, stay)
        self._prefixes.cached.rewind(rows, counts)

    @_alone
    def reset(self) -> None:
        """Finishes all requests and forgets all prefixes, whatever the device has run.

        The way on after an upload was packed that no step has run, which the next step reports as
        lost: start the requests again, with the same cache. (An upload that is still there can
        simply be run, as long as it is run before the next one.) Also the way on after a call that
        was interrupted, because everything but the counts starts again.
        """
        parts = self._new_parts(self._prefixes.events)
        *_, offload, prefixes, steps = parts
        steps.follow(self._steps)
        prefixes.follow(self._prefixes)
        if offload is not None and self._offload is not None:
            offload.follow(self._offload)
        self._state, self._rows, self._offload, self._prefixes, self._steps = parts

    # --- prefixes -----------------------------------------------------------------

    @property
    def block_use(self) -> BlockUse:
        """Number of blocks by use: own, shared, evictable or uncached."""
        return self.block_pool.use

    @property
    def may_copy_by_row(self) -> np.ndarray:
        """Whether the next step of a row may copy a block or a state first, bool[max_requests].

        Each such request counts as one of the ``forks`` of a step.
        """
        return self._state.may_copy(slice(None))

    @property
    def pending_copies_by_row(self) -> np.ndarray:
        """Rows to whose blocks the next upload copies, in any case, bool[max_requests].

        `grow` has chosen these copies. Each such row counts as one of the ``forks`` of the next
        step, whether its request computes in it or not.
        """
        pending = np.zeros(self._max_requests, bool)
        if self._state.copies:
            pending[
                [row for row in self._rows.by_name.values() if self._state.awaits_copy(row)]
            ] = True
        return pending

    def is_loading(self, request: Hashable) -> bool:
        """Returns whether the next step of a request would wait for host memory.

        Steps without it run next to the copies, and bring the request closer to its own step.
        """
        return self._prefixes.loads.are_read_by([self._rows.row(request)])

    @property
    def unsynced_tokens_by_row(self) -> np.ndarray:
        """Computed tokens of rows that the device does not have yet, int64[max_requests].

        A request that was forked, or started with a cached prefix, sends its whole row with its
        first step. These tokens count as ``cached_tokens`` of that step. 0 for all other rows.
        Read-only.
        """
        return self._state.unsynced_tokens_by_row

    def find_prefix(
        self,
        tokens: Ints | PrefixMatch,
        *,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKey] = (),
        max_cached_tokens: int | None = None,
    ) -> PrefixMatch:
        """Looks up the cached prefix of a prompt, without starting a request.

        Args:
          tokens: token ids of the prompt; or the result of an earlier call, which is looked up
            again if the cache has changed since.
          salt, extra_keys, max_cached_tokens: as for `start`.

        Raises:
          TypeError, ValueError: as for `start`.
        """
        return self._prefixes.find(tokens, salt, extra_keys, max_cached_tokens)

    def prefix_stats(self) -> PrefixStats:
        """Returns counts of lookups, hits and evictions since the manager was made."""
        return self._prefixes.stats()

    def offload_stats(self) -> OffloadStats | None:
        """Returns what host memory holds, and counts of its transfers; None without host memory."""
        return None if self._offload is None else self._offload.stats()

    @_alone
    def new_epoch(self) -> None:
        """Starts a new epoch, whose requests share no blocks with those of earlier epochs.

        Call it when the weights of the model change. Running requests continue, and none of their
        blocks are cached for later prompts.
        """
        self._prefixes.new_epoch()

    @_alone
    def reset_prefixes(self) -> None:
        """Forgets all prefixes, including the record of those that were evicted.

        Call it when the pool has lost its content, as after `jaxkv.wake_up` from level 2.
        """
        self._prefixes.reset()

    # --- steps --------------------------------------------------------------------

    @_alone
    def step[Name: Hashable](
        self,
        shape: StepShape,
        work: Mapping[Name, int],
        *,
        extra: Ints = (),
        ring: Ring | None = None,
    ) -> Upload:
        """Gives all requests of a step the blocks for their new tokens, and packs the upload.

        Either all requests get their blocks or none does. Afterwards the manager counts the new
        tokens as computed, so run each step on the device before the next one.

        The manager cannot see what is computed, except by token ids: if the shape says that
        ``extra`` begins with them (``token_ids`` of `StepShape`), it refuses too few, and others
        than those of the prompt that a request was started with, as in another order than ``work``
        or from before a prefix hit. `num_computed_tokens` says where the rest of a prompt begins;
        more tokens are new ones, because a step may go on past a prompt.

        Args:
          shape: the sizes that the upload is padded to.
          work: mapping from requests to the number of tokens that each computes in this step, in
            the order of the batch.
          extra: integers of your own that travel with the upload, at most ``shape.extra``.
          ring: an `UploadRing`, to pack into page-locked memory; None: a new NumPy array.

        Returns:
          The upload, for `apply_step`.

        Raises:
          OutOfBlocksError: too few blocks are free; nothing is changed.
          TypeError, ValueError: a request is not running or computes more tokens than the plan
            admits, the step does not fit the shape, or token ids are missing; nothing is changed.
        """
        self._check_transfers_taken()
        if ring is not None and not hasattr(ring, "buffer"):
            raise TypeError(f"ring must be an UploadRing or None, got {type(ring).__name__}")
        return self._steps.step(shape, work, extra, ring)

    @_alone
    def shared_tokens[Name: Hashable](self, work: Mapping[Name, int], *, groups: int) -> int:
        """Returns the tokens that groups of requests save in a step of one token for each.

        For the choice of a shape: with ``shared_prefixes=groups`` (`StepShape.for_plan`) a group
        reads the blocks that its requests begin with once; without, each request reads its own.

        Args:
          work: as for `step`.
          groups: groups at most.

        Raises:
          TypeError, ValueError: a request is not running; groups below 0.
        """
        check_count(groups=groups)
        return self._steps.shared_tokens(work, groups)

    def _check_transfers_taken(self) -> None:
        if self._offload is not None and self._offload.is_due:
            raise RuntimeError(
                "the last transfers were not taken; call take_transfers after each step and "
                "import, and carry them out before that step runs, and before anybody writes to "
                "those blocks"
            )

    @_alone
    def take_transfers(self) -> Transfers | None:
        """Returns the blocks that change memory before the step that was packed last; None: none.

        Carry them out before that step runs, by `jaxkv.HostBlocks.transfer`; after `import_blocks`,
        before anybody writes to its blocks. A manager without ``host_memory`` has none.
        """
        return None if self._offload is None else self._offload.take_transfers()

    def work_by_row(self, rows: np.ndarray, num_tokens: np.ndarray) -> RowWork:
        """Returns work for `step` and `grow`, which then look up no names.

        It stays valid when requests start or finish, but is then read by name.

        Args:
          rows: int64[N], distinct table rows of running requests, in the order of the batch.
          num_tokens: int64[N], new tokens of each.

        Raises:
          ValueError: no request runs in one of the rows.
        """
        return self._rows.work(rows, num_tokens)

    @_alone
    def grow[Name: Hashable](self, work: Mapping[Name, int]) -> None:
        """Gives requests the blocks for their next tokens: all of the requests, or none.

        For schedulers that decide on one request at a time; `step` then uses these blocks. A
        repeated call is harmless, and so is a step of fewer tokens.

        Args:
          work: as for `step`.

        Raises:
          OutOfBlocksError: too few blocks are free; nothing is changed.
          TypeError, ValueError: a request is not running, or computes more tokens than the plan
            admits; nothing is changed.
        """
        self._steps.grow(work)


def _offload(memory: HostMemory, plan: Plan) -> OffloadManager:
    check_kind(HostMemory, host_memory=memory)
    if stores_encoder_tokens(plan):
        raise ValueError(
            "host_memory=: a plan that stores encoder tokens keeps no blocks; leave it out"
        )
    return OffloadManager(memory, plan)


def _past(num_tokens: int, computed: int, request: Hashable) -> ValueError:
    return ValueError(
        f"num_tokens={num_tokens} is more than the {computed} tokens that {request!r} has computed"
    )
