"""Free list and reference counts of block ids, as arrays. No jax."""

from collections.abc import Sequence

import numpy as np

from jaxkv._internal.checks import check_count, check_positive
from jaxkv._internal.numbers import NULL_BLOCK

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


class BlockPool:
    """Free list and reference counts of block ids 1 .. num_blocks - 1.

    Ids come back in the order in which they were freed, so a freed block stays untouched for
    as long as the pool allows. Every operation works on slices: a few NumPy calls, whatever
    the number of ids.
    """

    def __init__(self, num_blocks: int):
        check_positive(num_blocks=num_blocks)
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}; at least 2 (the null block and one more)")
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int32)
        self._num_shared = 0  # references beyond the first of each block
        # A ring: `_num_free` ids from `_head` on, in the order of their release.
        self._free = np.arange(NULL_BLOCK + 1, num_blocks, dtype=np.int32)
        self._head, self._num_free = 0, num_blocks - 1

    def __repr__(self) -> str:
        return f"BlockPool({self.num_blocks:,} blocks, {self.num_free_blocks:,} free)"

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def has_shared_blocks(self) -> bool:
        """Whether any block has more than one holder."""
        return self._num_shared > 0

    def allocate(self, count: int) -> np.ndarray:
        """Takes ``count`` free blocks, int32[count], each with one reference.

        Raises:
          OutOfBlocksError: fewer are free; none is taken.
        """
        check_count(count=count)
        if count > self._num_free:
            raise OutOfBlocksError(count, self._num_free)
        return self.take(count)

    def take(self, count: int) -> np.ndarray:
        """As `allocate`, without its checks: for the books, which know that they are free."""
        stop = self._head + count
        if stop <= self._free.size:
            ids = self._free[self._head : stop].copy()
        else:
            ids = np.concatenate([self._free[self._head :], self._free[: stop - self._free.size]])
        self._head = stop % self._free.size
        self._num_free -= count
        self._references[ids.astype(np.intp)] = 1  # NumPy looks int32 up several times slower
        return ids

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
            return self._append(ids)
        np.subtract.at(self._references, ids, 1)
        gone = ids[self._references[ids] == 0]
        if gone.size > 1:  # an id named twice is freed once, where it was named last
            last = gone.size - 1 - np.unique(gone[::-1], return_index=True)[1]
            gone = gone[np.sort(last)]
        self._num_shared -= ids.size - gone.size
        self._append(gone)

    def _append(self, ids: np.ndarray) -> None:
        """Puts ids at the end of the free list."""
        tail = (self._head + self._num_free) % self._free.size
        first = min(ids.size, self._free.size - tail)
        self._free[tail : tail + first] = ids[:first]
        if first < ids.size:
            self._free[: ids.size - first] = ids[first:]
        self._num_free += ids.size

    def references(self, block_id: int) -> int:
        """Returns the holders of a block; 0: it is free."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id={block_id} is not in 0..{self.num_blocks - 1}")
        return int(self._references[block_id])

    def references_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the holders of each block, int32 of the ids' shape."""
        return self._references[ids]

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
