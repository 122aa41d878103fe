"""`OffloadManager`, bookkeeping of blocks evicted to host memory and loaded back. NumPy only."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.offload._host_pool import HostBlockPool
from jaxkv._src.offload._memory import HostMemory, block_bytes
from jaxkv._src.offload._transfers import COUNTED, Chunk, OffloadStats, Transfers
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import CachedPrefix, PrefixEvents, PrefixTree

NO_IDS = np.zeros(0, np.int64)
NO_LOAD, LOOKAHEAD, LATER = range(3)  # of a load into a block: the transfers that have it
LOOKAHEAD_BYTES = 2**28  # of loads whose copies run next to one step: what 50 GB/s bring in 5 ms


class OffloadManager:
    """The blocks of a prefix tree in host memory, under ids past those of the device.

    The tree knows a block by its id on the device as long as it is there. A block that was loaded
    stays in host memory, too, so that it need not be stored again. Bookkeeping is ahead of
    content: the transfers that `flush` returns next carry out what a call changes, before any step
    writes to the blocks. Only loads may come later, until a step needs them: some are
    copied next to each step, and then loaded by the transfers after it.

    lookahead_bytes: the most bytes of these.
    """

    def __init__(self, memory: HostMemory, plan: Plan):
        """Starts with empty host memory."""
        self._memory = memory
        sizes = block_bytes(plan)
        _check_size(memory.num_bytes, min(sizes), plan.num_blocks)
        self.pool = HostBlockPool(sizes, memory.num_bytes, plan.num_blocks)
        # Blocks on the device and on the host that are copies of each other; 0: there is none.
        self._copy_of = np.zeros(plan.num_blocks + self.pool.num_ids, np.int64)
        self._stores: dict[int, int] = {}  # host block -> block on the device
        self._loads: dict[int, int] = {}  # block on the device -> host block, since `flush`
        self._later: list[Chunk] = []  # other loads, which no transfers have had yet
        self._lookahead: list[Chunk] = []  # the first loads of the next transfers, in any case
        self._load_of = np.full(plan.num_blocks, NO_LOAD)  # of each block on the device
        self.lookahead_bytes, self._is_urgent = LOOKAHEAD_BYTES, False
        self._pinned: set[int] = set()  # chunks of loads since `flush`
        self._flushed: Transfers | None = None
        self._number, self._is_anew = 0, False
        self._counts: Counter[str] = Counter()

    def attach(self, tree: PrefixTree, events: PrefixEvents | None) -> None:
        """Names the tree whose blocks these are, and the events of what host memory holds."""
        self._tree, self._events = tree, events
        tree.on_recomputed = self._pair

    # --- to the host ----------------------------------------------------------------

    def evict(self, ids: np.ndarray) -> np.ndarray:
        """Takes blocks out of device memory, and forgets those that do not fit into host memory.

        Args:
          ids: int[N], cached blocks on the device.

        Returns:
          Other blocks on the device that are no longer cached.
        """
        ids = self._go_back(ids.astype(np.int64))
        chosen, groups = self._chosen(ids)
        sizes = self.pool.block_bytes[groups]
        others = self._make_room(int(sizes.sum()))
        # A checkpoint that lost a block may have released others of these.
        fits = self._tree.read_only_until[chosen] > 0
        fits &= np.cumsum(sizes * fits) <= self.pool.num_bytes - self.pool.used_bytes
        chosen = chosen[fits]
        if chosen.size:
            into = self.pool.take(groups[fits])
            if self._events is not None:
                self._events.stored_on_host(chosen.tolist(), into.tolist())
            self._tree.move(chosen, into)
            self._stores.update(zip(into.tolist(), chosen.tolist(), strict=True))
        left = ids[self._tree.read_only_until[ids] > 0]
        self._counts["skipped_blocks"] += left.size
        return np.concatenate([others, self._forget(left)])

    def _go_back(self, ids: np.ndarray) -> np.ndarray:
        """Returns blocks without those that the host still has as they are."""
        copies = self._copy_of[ids]
        # A request may have written on behind the end of a prefix that it began with.
        is_same = (copies > 0) & (self._tree.read_only_until[ids] <= self._tree.same_before[ids])
        if is_same.any():
            self._tree.move(ids[is_same], copies[is_same])
            self.pool.touch(copies[is_same])
        self._part(ids[copies > 0])
        self._release(copies[(copies > 0) & ~is_same].tolist())
        return ids[~is_same]

    def _release(self, host_ids: list[int]) -> None:
        """Frees blocks of host memory."""
        self.pool.release(host_ids)
        self._announce_gone(host_ids)

    def _announce_gone(self, host_ids: list[int]) -> None:
        if self._events is not None:
            self._events.removed(host_ids)

    def _part(self, ids: np.ndarray) -> None:
        """Notes that blocks are copies of no others any more."""
        self._copy_of[self._copy_of[ids]] = 0
        self._copy_of[ids] = 0

    def _pair(self, host_ids: np.ndarray, ids: np.ndarray) -> None:
        """Notes that blocks are copies of each other."""
        self._copy_of[ids], self._copy_of[host_ids] = host_ids, ids

    def _chosen(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks to store, as many as host memory can hold, and their groups."""
        here = ids[self._load_of[ids] == NO_LOAD]  # the content of others is not there yet
        inside = [block_id for block_id in here.tolist() if self._tree.is_inside(block_id)]
        groups = np.array([self._tree.group_of(block_id) for block_id in inside], np.int64)
        # The last ones were used last.
        fit = np.cumsum(self.pool.block_bytes[groups][::-1])[::-1] <= self.pool.num_bytes
        return np.array(inside, np.int64)[fit], groups[fit]

    def _make_room(self, num_bytes: int) -> np.ndarray:
        """Drops the oldest chunks until as many bytes are free, if they can be.

        Returns:
          Blocks on the device that are no longer cached.
        """
        others = [NO_IDS]
        if self.pool.num_bytes - self.pool.used_bytes >= num_bytes:
            return NO_IDS
        spared = self._swapped().union(self._pins())
        while self.pool.num_bytes - self.pool.used_bytes < num_bytes:
            gone = self.pool.oldest(spared)
            if gone is None:
                break
            self._counts["evicted_blocks"] += len(gone)
            self._announce_gone(gone)
            ids = np.array(gone, np.int64)
            here = self._copy_of[ids] > 0  # the tree knows these by their id on the device
            self._part(ids[here])
            others.append(self._forget(ids[~here]))
        return np.concatenate(others)

    def _swapped(self) -> frozenset[int]:
        """Returns the chunks of preempted requests, which others do not push out."""
        ids = np.concatenate([NO_IDS, *(swapped.blocks for swapped in self._tree.swapped)])
        numbers = self.pool.chunks(ids[ids >= self.pool.first_id])
        # Blocks of one chunk are adjacent, mostly, and a set is slow for each number.
        return frozenset(numbers[np.flatnonzero(np.diff(numbers, prepend=-2))].tolist())

    def _forget(self, ids: np.ndarray) -> np.ndarray:
        """Forgets blocks in either memory. Returns others on the device, no longer cached."""
        return self.let_go(self._tree.forget(ids)) if ids.size else NO_IDS

    def let_go(self, freed: Sequence[int]) -> np.ndarray:
        """Frees the host memory of blocks no longer cached. Returns those on the device."""
        others = np.array(freed, np.int64)
        on_host = others >= self.pool.first_id
        self._release(others[on_host].tolist())
        others = others[~on_host]
        copied = others[self._copy_of[others] > 0]
        self._release(self._copy_of[copied].tolist())
        self._part(copied)
        return others

    # --- back -------------------------------------------------------------------------

    def choose(self, find: Callable[..., CachedPrefix]) -> CachedPrefix:
        """Returns the longest prefix; that in device memory, if a load is not worth it.

        Args:
          find: finds the longest one, in device memory if ``on_device``.
        """
        found = find()
        ids = np.concatenate([NO_IDS, *(blocks.block_ids for blocks in found.shared)])
        ids = ids[ids >= self.pool.first_id]
        if not ids.size:
            return found
        here = find(on_device=True)
        gained = found.num_tokens - here.num_tokens
        if self.is_worth_it(gained, ids):
            return found._replace(num_host_tokens=gained)
        return here._replace(reasons=("on_host",) * len(here.reasons))

    def is_worth_it(self, num_tokens: int, host_ids: np.ndarray) -> bool:
        """Returns whether to load blocks, int64[N], rather than compute their tokens."""
        return self._memory.is_worth_it(num_tokens, self.pool.bytes_to_load(host_ids))

    def load(self, host_ids: np.ndarray, take: Callable[[int], np.ndarray]) -> np.ndarray:
        """Brings blocks to the device.

        Args:
          host_ids: int64[N], blocks that the tree knows by these ids.
          take: takes as many blocks of the device, int[N]; it may evict others.

        Returns:
          These blocks, int64[N].
        """
        chunks = {*self.pool.chunks(host_ids).tolist()} - self._pinned
        self._pinned |= {number for number in chunks if self.pool.pin(number)}
        into = take(host_ids.size).astype(np.int64)
        self._tree.move(host_ids, into)
        self._pair(host_ids, into)
        self._loads.update(zip(into.tolist(), host_ids.tolist(), strict=True))
        self._load_of[into] = LATER
        return into

    @property
    def has_loads(self) -> bool:
        """Whether there are loads that the next transfers need not have."""
        return bool(self._loads or self._later)

    def await_loads(self, ids: np.ndarray) -> bool:
        """Returns whether any of the blocks, int[N], on the device waits for such a load."""
        return bool((self._load_of[ids] == LATER).any())

    def require_all(self) -> None:
        """Makes the next transfers do all loads, because the step after them needs some."""
        self._is_urgent = True

    def give_up(self, ids: np.ndarray) -> None:
        """Forgets loads into blocks, whose content nobody reads any more."""
        if not (self._lookahead or self.has_loads):
            return
        self._load_of[ids] = NO_LOAD
        for block_id in ids.tolist():
            self._loads.pop(block_id, None)
        for chunks in (self._lookahead, self._later):
            for at, (number, group, into) in enumerate(chunks):
                chunks[at] = Chunk(number, group, np.where(np.isin(into, ids), -1, into))
        later = self._later
        self._later = [chunk for chunk in later if (chunk.block_ids >= 0).any()]
        for chunk in later:
            if (chunk.block_ids < 0).all():
                self.pool.unpin(chunk.number)

    # --- transfers --------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether `take_transfers` has any to return."""
        return self._flushed is not None

    def take_transfers(self) -> Transfers | None:
        """Returns the last transfers; None: there are none, or they were taken."""
        transfers, self._flushed = self._flushed, None
        return transfers

    def flush(self) -> None:
        """Returns the transfers before the step that is being packed.

        Later changes, including the tokens of that step, are transferred before the next step.
        """
        has_loads = self._lookahead or self.has_loads
        if not (self.pool.has_changed or has_loads or self._is_anew):
            return
        stores = tuple(self.pool.flush(self._stores, {*self._loads.values()}))
        loads = tuple(self._next_loads())
        dropped = self.pool.settle()
        self._number += 1
        dropped = () if self._is_anew else dropped  # all of them are
        lookahead = tuple([chunk.number for chunk in self._lookahead])
        self._flushed = Transfers(self._number, stores, loads, dropped, self._is_anew, lookahead)
        for what, chunks in (("stored", stores), ("loaded", loads)):
            ids = np.concatenate([NO_IDS, *(chunk.block_ids for chunk in chunks)])
            self._counts[f"{what}_blocks"] += int(np.count_nonzero(ids >= 0))
            self._counts[f"{what}_bytes"] += sum(map(self._bytes_of, chunks))
        self._stores.clear()
        self._loads.clear()
        self._is_anew = False

    def _next_loads(self) -> list[Chunk]:
        """Returns the loads of the next transfers, and chooses the lookahead."""
        loads, new = self._lookahead, self.pool.loads(self._loads)
        for chunk in new:
            self.pool.pin(chunk.number)
        rest = self._later + new
        if self._is_urgent:
            loads, rest = loads + rest, rest[:0]
        for number in (*self._pinned, *(chunk.number for chunk in loads)):
            self.pool.unpin(number)
        self._pinned.clear()
        sizes = np.cumsum([self._bytes_of(chunk) for chunk in rest])
        end = max(1, int(np.count_nonzero(sizes <= self.lookahead_bytes)))
        self._lookahead, self._later, self._is_urgent = rest[:end], rest[end:], False
        self._load_of[:] = NO_LOAD
        for which, chunks in ((LOOKAHEAD, self._lookahead), (LATER, self._later)):
            for chunk in chunks:
                self._load_of[chunk.block_ids[chunk.block_ids >= 0]] = which
        return loads

    def _pins(self) -> list[int]:
        """Returns the chunks of loads, each as often as it is pinned for them."""
        return [*self._pinned, *(chunk.number for chunk in (*self._lookahead, *self._later))]

    def _bytes_of(self, chunk: Chunk) -> int:
        return chunk.block_ids.size * self.pool.block_bytes.item(chunk.group)

    # --- forgetting, counting -----------------------------------------------------------

    def clear(self, cached: np.ndarray) -> np.ndarray:
        """Empties host memory, after a tree has forgotten all blocks.

        Args:
          cached: these blocks.

        Returns:
          Those of them on the device.
        """
        self.pool.release(self.pool.alive.tolist())
        self._copy_of[:] = 0
        return cached[cached < self.pool.first_id]

    def follow(self, before: "OffloadManager") -> None:
        """Resets; the next transfers start afresh, from empty host memory."""
        self._counts, self.lookahead_bytes = before._counts, before.lookahead_bytes
        self._number, self._is_anew = before._number, True

    def count(self, **counts: int) -> None:
        """Adds to counts of `OffloadStats`."""
        self._counts.update(counts)

    def stats(self) -> OffloadStats:
        """Returns the counts so far."""
        return OffloadStats(
            **{name: self._counts[name] for name in COUNTED},
            num_bytes=self.pool.num_bytes,
            used_bytes=self.pool.used_bytes,
        )


def _check_size(num_bytes: int, block: int, num_blocks: int) -> None:
    """Raises ValueError for memory that holds no block, or more blocks than have ids."""
    if num_bytes < block:
        raise ValueError(
            f"host_memory: num_bytes={num_bytes} holds no block; the smallest has "
            f"{block:,} bytes; give it more, or leave host_memory out"
        )
    if num_blocks + 2 * (num_bytes // block) > INT32_MAX:
        raise ValueError(
            f"host_memory: num_bytes={num_bytes} holds more blocks than int32 counts; give it at "
            f"most {(INT32_MAX - num_blocks) // 2 * block}"
        )
