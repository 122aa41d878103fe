"""Free list and reference counts of block ids, as arrays. No jax."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._internal.checks import check_count, check_positive
from jaxkv._internal.numbers import NULL_BLOCK
from jaxkv.blocks._warm import WarmBlocks

# Warm blocks are evicted several at a time, so that a step that takes a few rarely has to.
EVICTED_AT_ONCE, LEAST_PART = 64, 256
Ids = Sequence[int] | np.ndarray


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than asked for. Nothing was changed.

    needed_blocks, free_blocks: blocks asked for, and free ones.
    """

    def __init__(self, needed_blocks: int, free_blocks: int):
        super().__init__(
            f"{needed_blocks} blocks needed and {free_blocks} free; finish a request, or "
            "preempt one (finish it, and compute it again later)"
        )
        self.needed_blocks = needed_blocks
        self.free_blocks = free_blocks

    def __reduce__(self):  # errors travel between the processes of a serving stack
        return type(self), (self.needed_blocks, self.free_blocks)


class BlockUse(NamedTuple):
    """Blocks by what they are used for, the null block not among them.

    own: with one holder.
    shared: with several.
    warm: free, and their content is kept for other requests.
    cold: free, and empty.
    """

    own: int
    shared: int
    warm: int
    cold: int


class BlockPool:
    """Free list and reference counts of block ids 1 .. num_blocks - 1.

    Ids come back in the order in which they were freed, so a freed block stays untouched for
    as long as the pool allows. A free block whose content is kept is warm: it is taken after
    all others, the one that was freed first before the others, and may get holders again.
    Every operation works on slices: a few NumPy calls, whatever the number of ids.

    kept_until: int64[num_blocks], the position before which no token of a block may be written
      over; 0: its content is not kept. Written by whoever keeps it.
    has_kept: whether any content may be kept.
    on_evict: called with warm blocks that are about to be taken; returns other blocks whose
      content is of no use any more.
    """

    def __init__(self, num_blocks: int):
        check_positive(num_blocks=num_blocks)
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}; at least 2 (the null block and one more)")
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int32)
        self._num_shared = 0  # references beyond the first of each block
        # A ring: `_num_cold` ids from `_head` on, in the order of their release.
        self._free = np.arange(NULL_BLOCK + 1, num_blocks, dtype=np.int32)
        self._head, self._num_cold = 0, num_blocks - 1
        self._warm = WarmBlocks(num_blocks)
        self.kept_until = np.zeros(num_blocks, np.int64)
        self.has_kept = False
        self.on_evict: Callable[[np.ndarray], np.ndarray] = _nothing_more

    def __repr__(self) -> str:
        return f"BlockPool({self.num_blocks:,} blocks, {self.num_free_blocks:,} free)"

    @property
    def num_free_blocks(self) -> int:
        """Blocks without holders, warm ones included."""
        return self._num_cold + len(self._warm)

    @property
    def use(self) -> BlockUse:
        """Blocks by what they are used for."""
        own = int(np.count_nonzero(self._references == 1))
        held = int(np.count_nonzero(self._references))
        return BlockUse(own, held - own, len(self._warm), self._num_cold)

    @property
    def has_shared_blocks(self) -> bool:
        """Whether a holder may have to copy a block before it writes there."""
        return self._num_shared > 0 or self.has_kept

    def allocate(self, count: int) -> np.ndarray:
        """Takes ``count`` free blocks, int32[count], each with one reference.

        Raises:
          OutOfBlocksError: fewer are free; none is taken.
        """
        check_count(count=count)
        if count > self.num_free_blocks:
            raise OutOfBlocksError(count, self.num_free_blocks)
        return self.take(count)

    def take(self, count: int) -> np.ndarray:
        """As `allocate`, without its checks: for the books, which know that they are free."""
        if count > self._num_cold:
            spare = min(EVICTED_AT_ONCE, self.num_blocks // LEAST_PART)
            self._evict(count - self._num_cold + spare)
        stop = self._head + count
        if stop <= self._free.size:
            ids = self._free[self._head : stop].copy()
        else:
            ids = np.concatenate([self._free[self._head :], self._free[: stop - self._free.size]])
        self._head = stop % self._free.size
        self._num_cold -= count
        self._references[ids.astype(np.intp)] = 1  # NumPy looks int32 up several times slower
        return ids

    def _evict(self, count: int) -> None:
        """Makes warm blocks cold, at most ``count`` of them."""
        ids = self._warm.pop(min(count, len(self._warm)))
        others = self.on_evict(ids)
        self._append(ids)
        if others.size:
            self.cool(others)

    def give_up(self, ids: np.ndarray) -> None:
        """Lets the only holders of blocks write over content that is kept."""
        self.cool(self.on_evict(ids))

    @contextlib.contextmanager
    def ignoring(self, ids: np.ndarray) -> Iterator[None]:
        """Works out changes as if the content of some blocks were not kept."""
        kept_until = self.kept_until[ids]
        self.kept_until[ids] = 0
        try:
            yield
        finally:
            self.kept_until[ids] = kept_until

    def cool(self, ids: np.ndarray) -> None:
        """Makes those of some blocks cold that are warm: their content is no longer kept."""
        warm = ids[self._warm.contains(ids)]
        self._warm.remove(warm)
        self._append(warm)

    def warm_again(self, ids: np.ndarray) -> None:
        """Lets those of some blocks that are warm be taken last."""
        warm = ids[self._warm.contains(ids)]
        self._warm.remove(warm)
        self._warm.push(warm)

    def hold(self, ids: np.ndarray) -> None:
        """Adds one reference to each of some blocks that are held or warm. They are distinct."""
        ids = ids.astype(np.intp)  # quicker to look up by
        self._references[ids] += 1
        warm = ids[self._warm.contains(ids)]
        self._warm.remove(warm)
        self._num_shared += ids.size - warm.size

    def share(self, block_ids: Ids) -> None:
        """Adds one reference per id to blocks that are held already.

        Raises:
          ValueError: an id that is not held. Nothing is shared then.
        """
        ids = self._held(block_ids, each_at_least=1)
        np.add.at(self._references, ids, 1)
        self._num_shared += ids.size

    def free(self, block_ids: Ids) -> None:
        """Drops one reference per id; a block without references becomes free.

        Raises:
          ValueError: an id that is not held, the null block, or one id more often than
            it has references. Nothing is freed then.
        """
        self.release(self._held(block_ids))

    def release(self, ids: np.ndarray) -> None:
        """As `free`, without its checks: for the books, which know whose the ids are."""
        if not self._num_shared:  # every block has one reference
            self._references[ids.astype(np.intp)] = 0
            return self._give_back(ids)
        np.subtract.at(self._references, ids, 1)
        gone = ids[self._references[ids] == 0]
        if gone.size > 1:  # an id named twice is freed once, where it was named last
            last = gone.size - 1 - np.unique(gone[::-1], return_index=True)[1]
            gone = gone[np.sort(last)]
        self._num_shared -= ids.size - gone.size
        self._give_back(gone)

    def _give_back(self, ids: np.ndarray) -> None:
        """Puts blocks that nobody holds where they are taken from."""
        if self.has_kept:
            is_kept = self.kept_until[ids.astype(np.intp)] > 0
            num_kept = int(np.count_nonzero(is_kept))
            if num_kept == ids.size:
                return self._warm.push(ids)
            if num_kept:
                self._warm.push(ids[is_kept])
                ids = ids[~is_kept]
        self._append(ids)

    def _append(self, ids: np.ndarray) -> None:
        """Puts ids at the end of the cold ones."""
        tail = (self._head + self._num_cold) % self._free.size
        first = min(ids.size, self._free.size - tail)
        self._free[tail : tail + first] = ids[:first]
        if first < ids.size:
            self._free[: ids.size - first] = ids[first:]
        self._num_cold += ids.size

    def references(self, block_id: int) -> int:
        """Returns the holders of a block; 0: it is free."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id={block_id} is not in 0..{self.num_blocks - 1}")
        return int(self._references[block_id])

    def references_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the holders of each block, int32 of the ids' shape."""
        return self._references[ids]

    def must_copy(self, ids: np.ndarray, position: int | np.ndarray) -> np.ndarray:
        """Returns whether a holder that writes from a position on must copy its block first."""
        return (self._references[ids] > 1) | (self.kept_until[ids] > position)

    def _held(self, block_ids: Ids, each_at_least: int | None = None) -> np.ndarray:
        ids = np.asarray(block_ids)
        if not ids.size:
            return np.zeros(0, np.int32)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"block_ids must be a flat sequence of ints, got {block_ids!r}")
        named, counts = np.unique(ids, return_counts=True)
        in_pool = (named > NULL_BLOCK) & (named < self.num_blocks)
        held = np.where(in_pool, self._references[np.where(in_pool, named, 0)], 0)
        bad = np.flatnonzero(held < (counts if each_at_least is None else each_at_least))
        if bad.size:
            raise ValueError(
                f"block_ids holds {named[bad[0]]} {counts[bad[0]]} time(s) but it has "
                f"{held[bad[0]]} references; pass ids in 1..{self.num_blocks - 1} that are held"
            )
        return ids.astype(np.int32)


def _nothing_more(ids: np.ndarray) -> np.ndarray:
    return ids[:0]
