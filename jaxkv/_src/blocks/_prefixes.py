"""Prefix caching: keeps the blocks of prompts, and finds them for later prompts. No jax."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS
from jaxkv._src.blocks._parking import ParkedRequest
from jaxkv._src.blocks._prompts import (
    CachedPrompt,
    PrefixHit,
    PrefixMatch,
    PrefixStats,
)
from jaxkv._src.blocks._resuming import columns_to_share
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.internal.checks import check_count
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import (
    MAX_TOKEN,
    CachedPrefix,
    EventGroup,
    EventLog,
    ExtraKey,
    GroupKind,
    KeyChain,
    KnownNamespaces,
    Namespace,
    Node,
    PrefixEvents,
    PrefixPolicy,
    PrefixTree,
    SharedColumns,
    TokenCodes,
    as_tokens,
    check_boundaries,
    check_content,
    find,
)
from jaxkv._src.tier import HostTier
from jaxkv._src.uploads import Batch, Ints


class Prefixes:
    """The prompts that the manager remembers, and the blocks that it keeps of them.

    has_encoder: whether a group stores encoder tokens; nothing is shared then.
    """

    def __init__(
        self,
        state: RequestState,
        plan: Plan,
        *,
        checkpoint_blocks: int,
        events: EventLog | None = None,
        tier: HostTier | None = None,
    ):
        growth, pool = state.growth, state.pool
        self._events = None if events is None else PrefixEvents(events, _event_groups(plan))
        self._state, self._max_checkpoint_blocks = state, checkpoint_blocks
        shares_rows = [
            any(getattr(spec, "compress_ratio", 1) > 1 for spec in group.specs)
            for group in plan.groups
        ]
        policies = [
            PrefixPolicy(*of_group)
            for of_group in zip(growth.growths, state.column_tokens, shares_rows, strict=True)
        ]
        # tokens of a column in each group that keeps whole columns
        self._whole = tuple(policy.block for policy in policies if not policy.by_checkpoint)
        self._smallest = min((policy.block for policy in policies), default=1)
        self._tier, frozen_before = tier, pool.frozen_before
        if tier is not None:  # which has more ids
            frozen_before = np.full(pool.num_blocks + tier.room.num_ids, 0, np.int64)
            pool.frozen_before = frozen_before[: pool.num_blocks]
        self._tree = PrefixTree(
            policies,
            frozen_before,
            max_tokens=4 * frozen_before.size * self._smallest,
            host_ids=pool.num_blocks,
        )
        if tier is not None:
            tier.attach(self._tree, self._events)
        self.has_encoder = bool(growth.crossed.size)
        self._prompts: dict[int, CachedPrompt] = {}  # by row
        self._computing: set[int] = set()  # rows whose prompt is not computed yet
        self._parked: dict[Hashable, ParkedRequest] = {}
        self._epoch = 0
        self._known = KnownNamespaces(num_tokens=self._smallest, max_prompts=pool.num_blocks)
        self._codes = TokenCodes()
        self._counts = Counter(
            requests=0, hits=0, prompt_tokens=0, cached_tokens=0, host_tokens=0, evicted_blocks=0
        )
        self._reasons: Counter[str] = Counter()
        pool.on_evict = self._evicted

    # --- requests -----------------------------------------------------------------

    def find(
        self,
        tokens: Ints | PrefixMatch,
        salt: str | None,
        extra_keys: Sequence[ExtraKey],
        max_cached_tokens: int | None,
    ) -> PrefixMatch:
        """Finds the longest cached prefix of a prompt; reuses a `PrefixMatch` that is valid."""
        if isinstance(tokens, PrefixMatch):
            known = tokens
            if salt is not None or extra_keys:
                raise ValueError("salt and extra_keys are those of find_prefix; leave them out")
            if known.state is self._tree.state:
                self._tree.touch(known.path)
                limit = _limit(known.tokens, max_cached_tokens)
                if limit == known.limit:
                    return known
                found = self._find(known.path, known.found.num_seen, limit)
                return known._replace(limit=limit, found=found)
            tokens, salt, extra_keys = known.tokens & MAX_TOKEN, known.salt, known.extra_keys
        namespace, encoded = self._encode(tokens, salt, extra_keys)
        limit = _limit(encoded, max_cached_tokens)
        path, seen = self._tree.walk(namespace, encoded)
        self._tree.touch(path)
        found = self._find(path, seen, limit)
        of_prompt = namespace, encoded, salt, tuple(extra_keys)
        return PrefixMatch(*of_prompt, path, limit, found, self._tree.state, self._state.pool)

    def _find(self, path: Sequence[Node], num_seen: int, limit: int) -> CachedPrefix:
        """Returns the longest cached prefix, including blocks on the host that are worth a load."""
        find_it = functools.partial(find, self._tree, path, num_seen, limit)
        return find_it() if self._tier is None else self._tier.choose(find_it)

    def look_up(
        self,
        tokens: Ints | PrefixMatch,
        salt: str | None,
        extra_keys: Sequence[ExtraKey],
        max_cached_tokens: int | None,
        boundaries: Sequence[int],
    ) -> tuple[CachedPrompt, CachedPrefix]:
        """Finds the prefix of a prompt, for `start`; the arguments are of `BlockManager.start`."""
        prefix = self.find(tokens, salt, extra_keys, max_cached_tokens)
        namespace, encoded, found = prefix.namespace, prefix.tokens, prefix.found
        check_boundaries(boundaries, encoded.size)
        if found.num_host_tokens and not self._can_load(found.columns):
            found = find(self._tree, prefix.path, found.num_seen, prefix.limit, on_device=True)
            found = found._replace(reasons=("on_host",) * len(found.reasons))
        found = found._replace(reasons=self._known.reasons(namespace, encoded, found))
        if found.checkpoint is not None:
            self._tree.checkpoints.touch(found.checkpoint, is_wanted=True)
        self._counts.update(
            requests=1,
            hits=found.num_tokens > 0,
            prompt_tokens=encoded.size,
            cached_tokens=found.num_tokens,
            host_tokens=found.num_host_tokens,
        )
        self._reasons.update({*found.reasons} - {"complete", "other_groups"})
        ends, wanted = self._chunk_ends(encoded.size, found, boundaries)
        prompt = CachedPrompt(
            namespace,
            encoded,
            chunk_ends=ends,
            wanted=wanted,
            num_kept=found.num_tokens,
            checkpoints=[] if found.checkpoint is None else [found.checkpoint],
            chain=None if self._events is None else KeyChain(prefix.salt, prefix.extra_keys),
        )
        return prompt, found

    def start(self, row: int, prompt: CachedPrompt, found: CachedPrefix) -> PrefixHit:
        """Gives a row that was just started its prompt, and the blocks of its prefix."""
        self._prompts[row] = prompt
        self._computing.add(row)
        if found.num_host_tokens:
            columns = self._loaded(found.columns, found.num_tokens, prompt)
            found = found._replace(columns=tuple(columns))
        if found.num_tokens:
            self._state.share(row, found.num_tokens, found.columns)
        self._bound_checkpoints()  # a load may have brought one
        shared = tuple([columns.block_ids.size for columns in found.columns])
        numbers = row, found.num_tokens, shared
        return PrefixHit(*numbers, found.reasons, prompt.chunk_ends, found.num_host_tokens)

    # --- blocks in host memory ----------------------------------------------------

    def _split(self, columns: Sequence[SharedColumns]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks of columns on the device, and those in host memory."""
        ids = np.concatenate([NO_IDS, *(part.block_ids for part in columns)])
        on_host = ids >= self._state.pool.num_blocks
        return ids[~on_host], ids[on_host].astype(np.int64)

    def _can_load(self, columns: Sequence[SharedColumns]) -> bool:
        """Returns whether blocks are free for those of columns that are in host memory."""
        pool, (here, on_host) = self._state.pool, self._split(columns)
        num_warm = int(np.count_nonzero(pool.references_of(here) == 0))
        needed = on_host.size + self._state.copy_sources.size
        return needed <= pool.num_free_blocks - num_warm

    def _loaded(
        self, columns: Sequence[SharedColumns], num_tokens: int, prompt: CachedPrompt | None
    ) -> Sequence[SharedColumns]:
        """Returns columns whose blocks are all on the device, once the next moves are made.

        Args:
          num_tokens: the tokens whose columns these are.
          prompt: these tokens.
        """
        pool, (here, on_host) = self._state.pool, self._split(columns)
        if self._tier is None or not on_host.size:
            return columns
        pool.hold(here)  # or the blocks that are taken may be these
        into = self._tier.load(on_host, self._state.take_to_load)
        pool.release(np.concatenate([here, into]))  # warm, until the request holds them
        new = dict(zip(on_host.tolist(), into.tolist(), strict=True))
        columns = [
            part._replace(
                block_ids=np.array([new.get(i, i) for i in part.block_ids.tolist()], np.int32)
            )
            for part in columns
        ]
        if prompt is not None:
            known = min(num_tokens, prompt.tokens.size)
            ends = [known // policy.block for policy in self._tree.policies]
            whole = zip(columns, ends, strict=True)
            self._announce(
                prompt, [(p.first, p.block_ids[: max(0, end - p.first)]) for p, end in whole]
            )
        return columns

    # --- preempted requests -------------------------------------------------------

    def park(self, name: Hashable, row: int, tokens: Ints | None) -> bool:
        """Keeps all that a row's next token reads, before it releases its blocks.

        Returns:
          Whether all of it is kept; otherwise the whole blocks of its tokens are, as by `finish`.
        """
        parked = ParkedRequest.of(self._state, self._tree.policies, row, self._prompts.get(row))
        self.finish(row, tokens, keeps_end=parked is None)
        if parked is None or self._tier is None:
            return False
        self._tree.park(parked.blocks)
        self._state.pool.has_kept = True
        self._parked[name] = parked
        self._tier.count(parked_requests=1)
        return True

    def num_parked_tokens(self, name: Hashable) -> int:
        """Returns the tokens that `resume` brings back; 0: it cannot."""
        parked = self._parked.get(name)
        if parked is None or self._tier is None or not parked.num_tokens:
            return 0
        columns = parked.columns_now()
        _, on_host = self._split(columns)
        is_worth_it = not on_host.size or self._tier.is_worth_it(parked.num_tokens, on_host)
        return parked.num_tokens if is_worth_it and self._can_load(columns) else 0

    def resume(self, name: Hashable, row: int) -> PrefixHit:
        """Gives a row that was just started all that was parked; `num_parked_tokens` is not 0."""
        parked = self._parked[name]
        count, prompt, columns = parked.num_tokens, parked.prompt, parked.columns_now()
        is_on_host = self._split(columns)[1].size > 0
        columns = self._loaded(columns, count, prompt)
        self._state.go_on(row, count, columns, parked.lost_ends)
        self.unpark(name)
        ends: tuple[int, ...] = ()
        if prompt is not None:
            self._prompts[row] = prompt
            ends = tuple([end for end in prompt.chunk_ends if end > count])
            if count < prompt.tokens.size:
                self._computing.add(row)
        if self._tier is not None:
            self._tier.count(resumed_requests=1, resumed_tokens=count)
        self._bound_checkpoints()
        shared = tuple([part.block_ids.size for part in columns])
        reasons = ("complete",) * len(columns)
        return PrefixHit(row, count, shared, reasons, ends, count if is_on_host else 0)

    def unpark(self, name: Hashable) -> None:
        """Forgets a request that was parked, if it was."""
        parked = self._parked.pop(name, None)
        if parked is not None and self._tier is not None and parked.num_tokens:
            freed = self._tier.let_go(self._tree.drop_checkpoint(parked.blocks))
            self._state.pool.cool(freed)

    def _chunk_ends(
        self, num_tokens: int, found: CachedPrefix, boundaries: Sequence[int]
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """Returns the numbers of tokens after which the states of a prompt are to be kept.

        Returns:
          The ``chunk_ends`` and ``wanted`` of a `CachedPrompt`.
        """
        if not self._tree.has_states:
            return (), frozenset()
        limit = num_tokens - 1
        wanted = set(boundaries)
        if found.num_seen - found.num_tokens >= self._smallest:
            wanted.add(min(found.num_seen, limit))
        ends = sorted(end for end in {*wanted, limit} if found.num_tokens < end <= limit)
        return tuple(ends), frozenset(wanted)

    def fork(self, donor: int, row: int, num_tokens: int) -> None:
        """Gives a forked row the first tokens of its donor's prompt."""
        prompt = self._prompts.get(donor)
        if prompt is not None:
            self._prompts[row] = dataclasses.replace(
                prompt,
                tokens=prompt.tokens[:num_tokens],
                chunk_ends=(),
                num_kept=min(prompt.num_kept, num_tokens),
                may_go_on=prompt.may_go_on and num_tokens >= prompt.tokens.size,
                checkpoints=[*prompt.checkpoints],
                chain=None if prompt.chain is None else prompt.chain.copy(),
            )

    def num_known(self, row: int) -> int:
        """Returns the number of first tokens of a row whose ids are known."""
        prompt = self._prompts.get(row)
        return 0 if prompt is None else prompt.tokens.size

    def rewind(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Forgets the tokens after ``num_tokens``, which the requests may replace by others."""
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            prompt = self._prompts.get(row)
            if prompt is not None and count < prompt.tokens.size:
                prompt.tokens, prompt.may_go_on = prompt.tokens[:count], False
                prompt.num_kept = min(prompt.num_kept, count)

    def differs(self, batch: Batch, computed: np.ndarray, ids: np.ndarray) -> int | None:
        """Returns a row of a step whose token ids are not those of its prompt; None: there is none.

        Args:
          computed: int64[N], tokens of each row before the step.
          ids: int32[T], the token ids of the step.
        """
        ends = batch.ends.tolist() if self._computing else ()
        for row, start, end, count in zip(batch.rows, computed, ends, batch.counts, strict=False):
            if row in self._computing:
                known = self._prompts[row].tokens[start : start + count] & MAX_TOKEN
                if not np.array_equal(known, ids[end - count :][: known.size]):
                    return int(row)
        return None

    # --- keeping ------------------------------------------------------------------

    def after_step(self, rows: np.ndarray) -> None:
        """Keeps the prompt tokens that the last step of ``rows`` computes."""
        if self._tier is not None:
            self._tier.seal()
        if not self._computing:
            return
        for row in [row for row in rows.tolist() if row in self._computing]:
            prompt, computed = self._prompts[row], self._state.computed.item(row)
            size = prompt.tokens.size
            count = min(computed, size)
            # `rewind` shortens the prompt, so the row may have computed more tokens than that.
            is_end = count == computed and count in prompt.chunk_ends
            self._keep(row, prompt, count, is_end=is_end)
            if count == size:
                self._computing.remove(row)

    def finish(self, row: int, tokens: Ints | None, *, keeps_end: bool = True) -> None:
        """Keeps what a request computed, before it releases its blocks.

        Args:
          tokens: the token ids after its prompt.
          keeps_end: whether to keep its newest states, too.
        """
        prompt = self._prompts.get(row)
        more = NO_IDS if tokens is None else as_tokens("tokens", tokens)
        if prompt is None:
            return
        if prompt.may_go_on and more.size:
            prompt.tokens = np.concatenate([prompt.tokens, more], dtype=prompt.tokens.dtype)
        computed = int(self._state.computed[row])
        count = min(computed, prompt.tokens.size)
        columns = self._whole_columns(row, 0, min(count, prompt.num_kept))
        if not all(self._tree.keeps(ids).all() for _, ids in columns):
            prompt.num_kept = 0  # those that were kept in place of these may be gone by now
        is_end = 0 < count == computed and not self._state.awaits_copy(row)
        self._keep(row, prompt, count, is_end=is_end and keeps_end)

    def used(self, row: int) -> None:
        """Forgets a row that has released its blocks; the states that it used are taken last."""
        prompt = self._prompts.pop(row, None)
        self._computing.discard(row)
        for checkpoint in () if prompt is None else prompt.checkpoints:
            if checkpoint in self._tree.checkpoints:
                self._tree.checkpoints.touch(checkpoint, is_wanted=False)
                self._state.pool.warm_again(checkpoint.blocks[checkpoint.blocks > 0])

    def _keep(self, row: int, prompt: CachedPrompt, count: int, *, is_end: bool) -> None:
        """Keeps the whole blocks of a row's first ``count`` tokens.

        Args:
          is_end: whether to keep the blocks that hold the end of these tokens, too, if a group
            has states.
        """
        if prompt.namespace.epoch != self._epoch:
            return
        ends = self._ends(row, count) if is_end and self._tree.has_states else None
        if ends is None:
            count = max([count // block * block for block in self._whole], default=0)
            if count <= prompt.num_kept:
                return
        columns = self._whole_columns(row, prompt.num_kept, count)
        made = self._tree.keep(
            prompt.namespace, prompt.tokens[:count], columns, ends, is_wanted=count in prompt.wanted
        )
        prompt.num_kept = max(prompt.num_kept, count)
        self._state.may_be_shared_until[row] = max(self._state.may_be_shared_until.item(row), count)
        self._state.pool.has_kept = True
        self._known.add(prompt.namespace, prompt.tokens)
        self._announce(prompt, columns)
        if made is not None:
            prompt.checkpoints.append(made)
            self._state.note_shared(row)
            self._bound_checkpoints()

    def _announce(self, prompt: CachedPrompt, columns: Sequence[tuple[int, np.ndarray]]) -> None:
        """Writes the whole blocks that are kept now into the event log.

        Args:
          columns: per group, a column and the blocks from that column on.
        """
        if self._events is not None and prompt.chain is not None:
            for group, (first, ids) in enumerate(columns):
                kept = np.where(self._tree.keeps(ids), ids, 0).tolist()
                self._events.stored(prompt.chain, prompt.tokens, group, first, kept)

    def _whole_columns(self, row: int, kept: int, count: int) -> list[tuple[int, np.ndarray]]:
        """Returns, per group, the first whole column between two positions, and all block ids."""
        found: list[tuple[int, np.ndarray]] = []
        _, firsts, ends = self._state.held_of(row)
        for group, policy in enumerate(self._tree.policies):
            if policy.by_checkpoint:
                found.append((0, NO_IDS))
                continue
            first = max(firsts[group], kept // policy.block)
            end = min(ends[group], count // policy.block)
            if lost := self._state.lost_ends.item(group, row):
                end = min(end, lost // policy.block - 1)
            found.append((first, self._state.columns_of(row, group)[first:end]))
        return found

    def _ends(self, row: int, count: int) -> np.ndarray | None:
        """Returns the blocks that hold the end of a row's tokens, int32[G]; None if one is lost.

        0: the tokens end with a whole block.
        """
        try:
            columns = columns_to_share(self._state, row, count)
        except ValueError:
            return None
        ends = np.zeros(len(columns), np.int32)
        for group, policy in enumerate(self._tree.policies):
            if policy.by_checkpoint or count % policy.block:
                ends[group] = columns[group].block_ids[-1]
        return ends

    def _bound_checkpoints(self) -> None:
        tree = self._tree
        while (last := tree.checkpoints.one_too_many(self._max_checkpoint_blocks)) is not None:
            if self._tier is None:
                self._state.pool.cool(np.array(tree.drop_checkpoint(last), np.int32))
            else:
                ids = last.blocks[last.blocks > 0]
                self._state.pool.cool(np.concatenate([ids, self._forget(ids)]))

    def _evicted(self, ids: np.ndarray) -> np.ndarray:
        """Forgets evicted blocks. Returns other blocks whose content is useless without theirs."""
        self._counts["evicted_blocks"] += ids.size
        return self._forget(ids)

    def _forget(self, ids: np.ndarray) -> np.ndarray:
        """Takes kept blocks out of device memory. Returns others that are no longer kept."""
        others = self._tree.forget(ids) if self._tier is None else self._tier.evict(ids)
        if self._events is not None:
            self._events.removed(ids.tolist())
        return np.array(others, np.int32)

    # --- resetting and counting ---------------------------------------------------

    def new_epoch(self) -> None:
        """Forgets all kept blocks, but remembers that their prompts were cached."""
        self._epoch += 1
        self._parked.clear()
        pool, kept = self._state.pool, self._tree.clear()
        pool.cool(kept if self._tier is None else self._tier.clear(kept))
        pool.has_kept = False
        if self._events is not None:
            self._events.cleared()

    def reset(self) -> None:
        """Forgets everything."""
        self.new_epoch()
        self._known.clear()
        self._codes = TokenCodes()

    def stats(self) -> PrefixStats:
        """Returns the counts so far."""
        return PrefixStats(
            **self._counts,
            reasons=dict(self._reasons),
            kept_blocks=int(np.count_nonzero(self._state.pool.frozen_before)),
            checkpoint_blocks=self._tree.checkpoints.num_blocks,
        )

    # --- tokens -------------------------------------------------------------------

    def _encode(
        self, tokens: Ints, salt: str | None, extra_keys: Sequence[ExtraKey]
    ) -> tuple[Namespace, np.ndarray]:
        """Returns the namespace of a prompt, and the codes of its tokens, int[N]."""
        check_content(salt, extra_keys)
        if self._codes.is_full:
            self.reset()
        codes = self._codes.encode(tokens, [key for key in extra_keys if key.end is not None])
        if not codes.size:
            raise ValueError("tokens is empty; give the token ids of the prompt, at least one")
        adapters = frozenset([key for key in extra_keys if key.end is None])
        return Namespace(self._epoch, salt, adapters), codes


def _event_groups(plan: Plan) -> list[EventGroup]:
    """Returns the groups of a plan as events describe them."""
    return [
        EventGroup(
            index=index,
            kind=cast(GroupKind, group.specs[0].kind),
            block_size=group.block_size * plan.context_parallel,
            window=group.growth.window if group.growth.kind == "sliding" else None,
        )
        for index, group in enumerate(plan.groups)
    ]


def _limit(tokens: np.ndarray, max_cached_tokens: int | None) -> int:
    """Returns the most tokens of a prompt that may be shared."""
    if max_cached_tokens is None:
        return tokens.size - 1
    check_count(max_cached_tokens=max_cached_tokens)
    return min(tokens.size - 1, max_cached_tokens)
