"""Blocks that come back from host memory: of prefixes, and of preempted requests. No jax."""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks._caching import CachedPrompts
from jaxkv._src.blocks._cells import NO_IDS
from jaxkv._src.blocks._prompts import CachedPrompt, PrefixHit
from jaxkv._src.blocks._resuming import blocks_to_share
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.offload import OffloadManager
from jaxkv._src.prefixes import Checkpoint, PrefixPolicy, PrefixTree, SharedBlocks
from jaxkv._src.uploads import Ints


@dataclasses.dataclass(frozen=True, eq=False)
class SwappedRequest:
    """A preempted request, and all that it goes on with.

    blocks: its blocks, group by group, wherever they lie now.
    spans: their logical blocks, with the ids of when it was swapped out.
    lost_ends: see `RequestState`.
    prompt: None: it was started without tokens.
    """

    blocks: Checkpoint
    spans: Sequence[SharedBlocks]
    lost_ends: np.ndarray
    prompt: CachedPrompt | None

    @classmethod
    def from_row(
        cls,
        state: RequestState,
        policies: Sequence[PrefixPolicy],
        row: int,
        prompt: CachedPrompt | None,
    ) -> "SwappedRequest | None":
        """Returns the request of a row; None if it has nothing, or no block has its newest state.

        That is so after a step of drafts, whose state may lie in the block of one of them, and
        while the next upload copies into one of its blocks.
        """
        count = state.computed.item(row)
        if not count or state.awaits_copy(row):
            return None
        try:
            spans = blocks_to_share(state, row, count)
        except ValueError:
            return None
        groups = np.repeat(range(len(spans)), [part.block_ids.size for part in spans])
        ends = [NO_IDS]
        for policy, part, block in zip(policies, spans, state.block_tokens, strict=True):
            whole = (np.arange(part.first, part.end) + 1) * block
            ends.append(whole.clip(0, policy.until(count)))
        ids = np.concatenate([NO_IDS, *(part.block_ids for part in spans)])
        blocks = Checkpoint(count, ids, np.concatenate(ends), groups, is_wanted=True)
        return cls(blocks, spans, state.lost_ends[:, row].copy(), prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that it has computed; 0: a block of them is gone."""
        return self.blocks.position if self.blocks.is_cached else 0

    def blocks_now(self) -> list[SharedBlocks]:
        """Returns its spans, with the ids that the blocks have now."""
        return _with_ids(self.spans, self.blocks.blocks)


def _with_ids(spans: Sequence[SharedBlocks], block_ids: np.ndarray) -> list[SharedBlocks]:
    """Returns spans with other block ids, group by group."""
    ends = np.cumsum([part.block_ids.size for part in spans])
    each = zip(spans, np.split(block_ids, ends[:-1]), strict=True)
    return [part._replace(block_ids=ids) for part, ids in each]


class HostLoads:
    """Loads of blocks from host memory, for prefixes and for preempted requests.

    swapped: preempted requests by name.
    _taken: blocks that were taken although they may be loaded, because they were to be copied.
    """

    def __init__(
        self,
        state: RequestState,
        tree: PrefixTree,
        cached: CachedPrompts,
        offload: OffloadManager | None,
    ):
        self._state, self._tree, self._cached, self._offload = state, tree, cached, offload
        self.swapped: dict[Hashable, SwappedRequest] = {}
        self._taken = NO_IDS

    def on_take(self, ids: np.ndarray) -> None:
        """Gives up loads into blocks, unless the next upload copies these before they change."""
        self._state.copies.forget(ids)
        self._give_up(np.concatenate([self._taken, ids]))

    def _give_up(self, ids: np.ndarray) -> None:
        """Gives up loads into taken blocks; into those that are to be copied only later."""
        is_copied = np.isin(ids, self._state.copies.sources)
        self._taken = ids[is_copied]
        if self._offload is not None:
            self._offload.give_up(ids[~is_copied])

    def _split(self, spans: Sequence[SharedBlocks]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of blocks on the device, and of blocks in host memory."""
        ids = np.concatenate([NO_IDS, *(part.block_ids for part in spans)])
        on_host = ids >= self._state.pool.num_blocks
        return ids[~on_host], ids[on_host].astype(np.int64)

    def fits(self, spans: Sequence[SharedBlocks]) -> bool:
        """Returns whether enough blocks are free to load those that are in host memory."""
        pool, (here, on_host) = self._state.pool, self._split(spans)
        num_evictable = int(np.count_nonzero(pool.references_of(here) == 0))
        needed = on_host.size + self._state.copies.sources.size
        return needed <= pool.num_free_blocks - num_evictable

    def load(
        self, spans: Sequence[SharedBlocks], num_tokens: int, prompt: CachedPrompt | None
    ) -> Sequence[SharedBlocks]:
        """Returns the spans with all blocks on the device, after the next transfers."""
        pool, (here, on_host) = self._state.pool, self._split(spans)
        if self._offload is None or not on_host.size:
            return spans
        ids = np.concatenate([part.block_ids for part in spans])
        pool.hold(here)  # or the blocks that are taken may be these
        into = self._offload.load(on_host, self._state.copies.take_to_load)
        pool.release(np.concatenate([here, into]))  # evictable, until the request takes them
        ids[ids >= pool.num_blocks] = into
        spans = _with_ids(spans, ids)
        if prompt is not None:
            parts = [(part.first, part.block_ids) for part in spans]
            self._cached.announce(prompt, num_tokens, parts)
        return spans

    def are_read_by(self, rows: Sequence[int]) -> bool:
        """Returns whether steps of rows read what the next transfers need not load."""
        if self._offload is None or not self._offload.has_loads:
            return False
        started = [row for row in rows if self._state.unsynced_tokens[row]]
        return any(self._offload.await_loads(self._state.blocks_of(row)) for row in started)

    def before_step(self, rows: np.ndarray) -> None:
        """Requires all loads before a step of ``rows`` that needs some of them."""
        if self._taken.size:  # a copy of them may have been dropped
            self._give_up(self._taken)
        if self._offload is not None and self._offload.has_loads:
            is_copied = self._offload.await_loads(self._state.copies.sources)
            if is_copied or not rows.size or self.are_read_by(rows.tolist()):
                self._offload.require_all()

    # --- preempted requests -------------------------------------------------------

    def swap_out(self, name: Hashable, row: int, tokens: Ints | None) -> bool:
        """Keeps all that a row's next token reads, before it releases its blocks.

        Returns:
          Whether all of it is cached; otherwise the whole blocks of its tokens are, as by `finish`.
        """
        swapped = SwappedRequest.from_row(
            self._state, self._tree.policies, row, self._cached.get(row)
        )
        self._cached.finish(row, tokens, caches_end=swapped is None)
        if swapped is None or self._offload is None:
            return False
        self._tree.swap_out(swapped.blocks)
        self._state.pool.has_cached = True
        self.swapped[name] = swapped
        self._offload.count(swapped_out_requests=1)
        return True

    def num_swapped_tokens(self, name: Hashable) -> int:
        """Returns the tokens that `swap_in` brings back; 0: it cannot."""
        swapped = self.swapped.get(name)
        if swapped is None or self._offload is None or not swapped.num_tokens:
            return 0
        spans = swapped.blocks_now()
        _, on_host = self._split(spans)
        is_worth_it = not on_host.size or self._offload.is_worth_it(swapped.num_tokens, on_host)
        return swapped.num_tokens if is_worth_it and self.fits(spans) else 0

    def swap_in(self, name: Hashable, row: int) -> PrefixHit:
        """Gives a new row all that was swapped out; `num_swapped_tokens` is not 0."""
        swapped = self.swapped[name]
        count, prompt, spans = swapped.num_tokens, swapped.prompt, swapped.blocks_now()
        is_on_host = self._split(spans)[1].size > 0
        spans = self.load(spans, count, prompt)
        self._state.go_on(row, count, spans, swapped.lost_ends)
        self.discard_swapped(name)
        ends: tuple[int, ...] = ()
        if prompt is not None:
            self._cached.start(row, prompt)
            ends = tuple([end for end in prompt.chunk_ends if end > count])
        if self._offload is not None:
            self._offload.count(swapped_in_requests=1, swapped_in_tokens=count)
        self._cached.bound_checkpoints()
        shared = tuple([part.block_ids.size for part in spans])
        reasons = ("complete",) * len(spans)
        return PrefixHit(row, count, shared, reasons, ends, count if is_on_host else 0)

    def discard_swapped(self, name: Hashable) -> None:
        """Discards the swapped-out state of a request, if there is any."""
        swapped = self.swapped.pop(name, None)
        if swapped is not None and self._offload is not None and swapped.num_tokens:
            freed = self._offload.let_go(self._tree.drop_checkpoint(swapped.blocks))
            self._state.pool.uncache(freed)
