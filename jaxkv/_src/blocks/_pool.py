"""Free list and reference counts of block ids, as arrays. No jax."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxkv._src.internal.checks import check_count, check_positive
from jaxkv._src.internal.id_queue import IdQueue
from jaxkv._src.internal.numbers import NULL_BLOCK

# An eviction frees a few more blocks than a step needs, so that most steps evict none.
MAX_SPARE_BLOCKS, BLOCKS_PER_SPARE = 64, 256


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than a call needs. The call changed nothing.

    needed_blocks: free blocks that the call needs.
    free_blocks: free blocks that the pool has.
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
    """Number of blocks by use, without the null block.

    own: blocks with one holder.
    shared: blocks with several holders.
    evictable: free blocks whose content is cached for later requests.
    uncached: free blocks whose content is not cached.
    """

    own: int
    shared: int
    evictable: int
    uncached: int


class BlockPool:
    """Free list and reference counts of block ids 1 .. num_blocks - 1.

    Blocks are taken in the order in which they were freed, so a freed block stays untouched for
    as long as the pool allows. A free block whose content is cached is evictable, and may be
    allocated again. Evictable blocks are taken when no other block is free, the least recently
    freed first. Every operation is a few NumPy calls, whatever the number of ids. A block with one
    holder, the most frequent case, has no count of its own.

    read_only_until: int64[num_blocks], the position before which no token of a block may be
      overwritten; 0: its content is not cached. `Prefixes` writes it, and that of blocks in host
      memory, in ``all_read_only_until``.
    is_fresh: bool[num_blocks], whether a block was taken and not zeroed since. `RequestState` and
      the uploads write it, in plans that zero blocks.
    has_cached: whether the content of any block may be kept.
    on_evict: called with evictable blocks whose content is about to be lost; returns other blocks
      whose content is useless without theirs.
    on_take: called with blocks that were free.
    """

    def __init__(self, num_blocks: int, num_host_ids: int = 0):
        check_positive(num_blocks=num_blocks)
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks} must be at least 2: the null block and one to hand out"
            )
        self.num_blocks = num_blocks
        self._more_holders = np.zeros(num_blocks, np.int32)  # references beyond the first
        self._num_shared = 0  # sum of `_more_holders`
        self._uncached, self._evictable = IdQueue(num_blocks), IdQueue(num_blocks)
        self._uncached.push(np.arange(NULL_BLOCK + 1, num_blocks))
        # Filled now, as in `IdQueue`.
        self.all_read_only_until = np.full(num_blocks + num_host_ids, 0, np.int64)
        self.read_only_until = self.all_read_only_until[:num_blocks]
        self.is_fresh = np.full(num_blocks, False)
        self.has_cached = False
        self.connect(on_take=lambda ids: None, on_evict=lambda ids: ids[:0])

    def __repr__(self) -> str:
        return f"BlockPool({self.num_blocks:,} blocks, {self.num_free_blocks:,} free)"

    def connect(
        self,
        *,
        on_take: Callable[[np.ndarray], object],
        on_evict: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Sets what the pool calls when it takes blocks and when it evicts some."""
        self.on_take, self.on_evict = on_take, on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks without holders, evictable ones included."""
        return self._uncached.size + self._evictable.size

    @property
    def use(self) -> BlockUse:
        """Number of blocks by use."""
        held = self.num_blocks - 1 - self.num_free_blocks
        shared = int(np.count_nonzero(self._more_holders))
        return BlockUse(held - shared, shared, self._evictable.size, self._uncached.size)

    @property
    def has_shared_blocks(self) -> bool:
        """Whether any block has several holders."""
        return self._num_shared > 0

    @property
    def may_copy_on_write(self) -> bool:
        """Whether a holder may have to copy a block before it writes there."""
        return self._num_shared > 0 or self.has_cached

    def allocate(self, count: int) -> np.ndarray:
        """Takes ``count`` free blocks, int32[count], each with one reference.

        Raises:
          OutOfBlocksError: fewer blocks are free; none is taken.
        """
        check_count(count=count)
        if count > self.num_free_blocks:
            raise OutOfBlocksError(count, self.num_free_blocks)
        return self.take(count)

    def take(self, count: int) -> np.ndarray:
        """Takes ``count`` blocks, int32[count]; the caller has checked that as many are free."""
        if count > self._uncached.size:
            spare = min(MAX_SPARE_BLOCKS, self.num_blocks // BLOCKS_PER_SPARE)
            self._evict(count - self._uncached.size + spare)
        ids = self._uncached.pop(count)
        self.on_take(ids)
        return ids

    def _evict(self, count: int) -> None:
        """Evicts evictable blocks, at most ``count`` of them."""
        ids = self._evictable.pop(min(count, self._evictable.size))
        others = self.on_evict(ids)
        self._uncached.push(ids)
        if others.size:
            self.uncache(others)

    def give_up(self, ids: np.ndarray) -> None:
        """Forgets the cached content of blocks with one holder, which may then overwrite it."""
        self.uncache(self.on_evict(ids))

    def uncache(self, ids: np.ndarray) -> None:
        """Makes evictable blocks of ``ids`` plain free ones; their content is no longer cached."""
        self._uncached.push(ids[self._evictable.remove(ids)])

    def touch(self, ids: np.ndarray) -> None:
        """Moves the evictable blocks of ``ids`` to the end of their queue, to be taken last."""
        self._evictable.push(ids[self._evictable.remove(ids)])

    def hold(self, ids: np.ndarray) -> None:
        """Adds one reference to each of ``ids``: distinct allocated or evictable blocks."""
        held = ids[~self._evictable.remove(ids)]
        self._more_holders[held] += 1
        self._num_shared += held.size

    def release(self, ids: np.ndarray) -> None:
        """Drops one reference per id of allocated blocks; those without references become free."""
        if self._num_shared:
            ids = self._left_by_all(ids)
        if self.has_cached:
            ids = ids.astype(np.intp, copy=False)  # intp indexes faster than int32
            read_only_until = self.read_only_until[ids]
            if np.count_nonzero(read_only_until):
                self._evictable.push(ids[read_only_until > 0])
                ids = ids[read_only_until == 0]
        self._uncached.push(ids)

    def _left_by_all(self, ids: np.ndarray) -> np.ndarray:
        """Drops one reference per id. Returns blocks without any, in order of last mention."""
        np.subtract.at(self._more_holders, ids, 1)
        gone = ids[self._more_holders[ids] < 0]
        self._more_holders[gone] = 0
        if gone.size > 1:
            last = gone.size - 1 - np.unique(gone[::-1], return_index=True)[1]
            gone = gone[np.sort(last)]
        self._num_shared -= ids.size - gone.size
        return gone

    def references_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of holders of each block, int64 of the ids' shape."""
        is_allocated = (ids != NULL_BLOCK) & ~(
            self._uncached.contains(ids) | self._evictable.contains(ids)
        )
        return np.where(is_allocated, 1 + self._more_holders[ids], 0)

    def others_of(self, ids: int | np.ndarray) -> np.ndarray:
        """Returns each allocated block's holders beyond the first one, int32 of the ids' shape."""
        return self._more_holders[ids]

    def must_copy(self, ids: int | np.ndarray, position: int | np.ndarray) -> np.ndarray:
        """Returns whether a holder must copy a block before it writes from a position on."""
        return (self._more_holders[ids] > 0) | (self.read_only_until[ids] > position)
