"""The prompts of rows, and their blocks that are cached for later prompts. No jax."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS
from jaxkv._src.blocks._prompts import CachedPrompt
from jaxkv._src.blocks._resuming import blocks_to_share
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.offload import OffloadManager
from jaxkv._src.prefixes import MAX_TOKEN, KnownNamespaces, PrefixEvents, PrefixTree, as_tokens
from jaxkv._src.uploads import Batch, Ints


class CachedPrompts:
    """The prompts of rows, and their cached blocks.

    known: prompts with cached blocks.
    epoch: of prompts whose blocks may be cached.
    """

    def __init__(
        self,
        state: RequestState,
        tree: PrefixTree,
        max_checkpoint_blocks: int,
        events: PrefixEvents | None,
        offload: OffloadManager | None,
    ):
        self._state, self._tree, self._events, self._offload = state, tree, events, offload
        self._max_checkpoint_blocks = max_checkpoint_blocks
        smallest = self.smallest_block = min([p.block for p in tree.policies])
        self.known = KnownNamespaces(num_tokens=smallest, max_prompts=state.pool.num_blocks)
        # Tokens of a logical block in each group that caches whole blocks.
        self._whole = tuple(p.block for p in tree.policies if p.by_block)
        self._of: dict[int, CachedPrompt] = {}  # by row
        self._computing: set[int] = set()  # rows whose prompt is not computed yet
        self.epoch = 0

    # --- rows -----------------------------------------------------------------------

    def start(self, row: int, prompt: CachedPrompt) -> None:
        """Gives a row that was just started its prompt."""
        self._of[row] = prompt
        if self._state.computed.item(row) < prompt.tokens.size:
            self._computing.add(row)

    def get(self, row: int) -> CachedPrompt | None:
        """Returns the prompt of a row; None: it was started without tokens."""
        return self._of.get(row)

    def fork(self, donor: int, row: int, num_tokens: int) -> None:
        """Gives a row that was just forked the first tokens of its donor's prompt."""
        prompt = self._of.get(donor)
        if prompt is not None:
            forked = dataclasses.replace(
                prompt,
                tokens=prompt.tokens[:num_tokens],
                chunk_ends=(),
                num_cached=min(prompt.num_cached, self._state.computed.item(row)),
                may_go_on=prompt.may_go_on and num_tokens >= prompt.tokens.size,
                checkpoints=[*prompt.checkpoints],
                chain=None if prompt.chain is None else prompt.chain.copy(),
            )
            self.start(row, forked)

    def num_known(self, row: int) -> int:
        """Returns the number of first tokens of a row whose ids are known."""
        prompt = self._of.get(row)
        return 0 if prompt is None else prompt.tokens.size

    def rewind(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Forgets the tokens after ``num_tokens``, which the requests may replace by others."""
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            prompt = self._of.get(row)
            if prompt is not None and count < prompt.tokens.size:
                prompt.tokens, prompt.may_go_on = prompt.tokens[:count], False
                prompt.num_cached = min(prompt.num_cached, count)

    def differs(self, batch: Batch, computed: np.ndarray, ids: np.ndarray) -> int | None:
        """Returns a row of a step whose token ids are not those of its prompt; None: there is none.

        Args:
          computed: int64[N], tokens of each row before the step.
          ids: int32[T], the token ids of the step.
        """
        ends = batch.ends.tolist() if self._computing else ()
        for row, start, end, count in zip(batch.rows, computed, ends, batch.counts, strict=False):
            if row in self._computing:
                known = self._of[row].tokens[start : start + count] & MAX_TOKEN
                if not np.array_equal(known, ids[end - count :][: known.size]):
                    return int(row)
        return None

    # --- keeping ------------------------------------------------------------------

    def after_step(self, rows: np.ndarray) -> None:
        """Keeps the prompt tokens that the last step of ``rows`` computes."""
        if self._offload is not None:
            self._offload.flush()
        if not self._computing:
            return
        for row in [row for row in rows.tolist() if row in self._computing]:
            prompt, computed = self._of[row], self._state.computed.item(row)
            size = prompt.tokens.size
            # `rewind` shortens the prompt, so the row may have computed more tokens than that.
            count = min(computed, size)
            self._keep(row, prompt, count, is_end=count in prompt.chunk_ends)
            if count == size:
                self._computing.remove(row)

    def finish(self, row: int, tokens: Ints | None, *, caches_end: bool = True) -> None:
        """Keeps what a request computed, before it releases its blocks.

        Args:
          tokens: the token ids after its prompt.
          caches_end: whether to keep its newest states, too.
        """
        prompt = self._of.get(row)
        more = NO_IDS if tokens is None else as_tokens("tokens", tokens)
        if prompt is None:
            return
        if prompt.may_go_on and more.size:
            self._check_answer(row, prompt, more.size)
            prompt.tokens = np.concatenate([prompt.tokens, more], dtype=prompt.tokens.dtype)
        computed = int(self._state.computed[row])
        count = min(computed, prompt.tokens.size)
        spans = self._whole_blocks(row, 0, min(count, prompt.num_cached))
        if not all(self._tree.are_cached(ids).all() for _, ids in spans):
            prompt.num_cached = 0  # those that were kept in place of these may be gone by now
        is_end = 0 < count == computed and not self._state.awaits_copy(row)
        self._keep(row, prompt, count, is_end=is_end and caches_end)

    def _check_answer(self, row: int, prompt: CachedPrompt, count: int) -> None:
        """Raises ValueError for more tokens than a request has computed, and its newest."""
        known = prompt.tokens.size
        most = max(0, int(self._state.max_computed[row]) + 1 - known)
        if count > most:
            raise ValueError(
                f"tokens must be at most {most}, those that the request has got after the {known} "
                f"that it was started with; got {count}: leave the prompt out, and rejected drafts"
            )

    def used(self, row: int) -> None:
        """Forgets a row that has released its blocks; the states that it used are taken last."""
        prompt = self._of.pop(row, None)
        self._computing.discard(row)
        for checkpoint in () if prompt is None else prompt.checkpoints:
            if checkpoint in self._tree.checkpoints:
                self._tree.checkpoints.touch(checkpoint, is_wanted=False)
                self._state.pool.touch(checkpoint.blocks[checkpoint.blocks > 0])

    def _keep(self, row: int, prompt: CachedPrompt, count: int, *, is_end: bool) -> None:
        """Keeps the whole blocks of a row's first ``count`` tokens.

        Args:
          is_end: whether to keep the blocks that hold the end of these tokens, too, if a group
            has states.
        """
        if prompt.namespace.epoch != self.epoch:
            return
        ends = self._ends(row, count) if is_end and self._tree.has_states else None
        if ends is None:
            count = max([count // block * block for block in self._whole], default=0)
            if count <= prompt.num_cached:
                return
        spans = self._whole_blocks(row, prompt.num_cached, count)
        made = self._tree.cache(
            prompt.namespace, prompt.tokens[:count], spans, ends, is_wanted=count in prompt.wanted
        )
        prompt.num_cached = max(prompt.num_cached, count)
        self._state.may_be_shared_until[row] = max(self._state.may_be_shared_until.item(row), count)
        self._state.pool.has_cached = True
        self.known.add(prompt.namespace, prompt.tokens)
        self.announce(prompt, count, spans)
        if made is not None:
            prompt.checkpoints.append(made)
            self._state.note_shared(row)
        self.bound_checkpoints()  # blocks that take the place of copies on the host bring theirs

    def announce(
        self, prompt: CachedPrompt, count: int, spans: Sequence[tuple[int, np.ndarray]]
    ) -> None:
        """Writes into the event log which whole blocks of a prompt's first tokens are cached now.

        Args:
          spans: per group, a logical block and the block ids from there on.
        """
        if self._events is not None and prompt.chain is not None:
            for group, (first, ids) in enumerate(spans):
                kept = np.where(self._tree.are_cached(ids), ids, 0).tolist()
                self._events.stored(prompt.chain, prompt.tokens[:count], group, first, kept)

    def _whole_blocks(self, row: int, kept: int, count: int) -> list[tuple[int, np.ndarray]]:
        """Returns, per group, the first whole block between two positions, and all block ids."""
        found: list[tuple[int, np.ndarray]] = []
        firsts = self._state.allocated_in(row)[1]
        for group, policy in enumerate(self._tree.policies):
            if not policy.by_block:
                found.append((0, NO_IDS))
                continue
            first = max(firsts[group], kept // policy.block)
            end = count // policy.block
            if lost := self._state.lost_ends.item(group, row):
                end = min(end, lost // policy.block - 1)
            found.append((first, self._state.logical_blocks_of(row, group)[first:end]))
        return found

    def _ends(self, row: int, count: int) -> np.ndarray | None:
        """Returns the blocks that hold the end of a row's tokens, int32[G]; None if one is lost.

        0: the tokens end with a whole block.
        """
        if count % self._tree.whole_groups:
            return None
        try:
            spans = blocks_to_share(self._state, row, count)
        except ValueError:
            return None
        ends = np.zeros(len(spans), np.int32)
        for group, policy in enumerate(self._tree.policies):
            if policy.by_checkpoint or (count % policy.block and not policy.is_ring):
                ends[group] = spans[group].block_ids[-1]
        return ends

    def bound_checkpoints(self) -> None:
        """Drops the least recently used checkpoints while they hold too many blocks."""
        tree = self._tree
        while (last := tree.checkpoints.one_too_many(self._max_checkpoint_blocks)) is not None:
            if self._offload is None:
                self._state.pool.uncache(np.array(tree.drop_checkpoint(last), np.int32))
            else:
                ids = last.blocks[last.blocks > 0]
                # Host memory may have given up blocks of this very checkpoint for the others.
                self._state.pool.uncache(np.union1d(ids, self.forget(ids)))

    def forget(self, ids: np.ndarray) -> np.ndarray:
        """Takes cached blocks out of device memory. Returns others that are no longer cached."""
        others = self._tree.forget(ids) if self._offload is None else self._offload.evict(ids)
        if self._events is not None:
            self._events.removed(ids.tolist())
        return np.array(others, np.int32)
