"""Free list and reference counts of block ids."""

from collections import deque
from collections.abc import Sequence

from jaxkv.checks import check_count, check_positive

NULL_BLOCK = 0  # reserved, never handed out; tables are padded with it


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than asked for. Nothing was changed.

    needed_blocks, free_blocks: what was asked for and what there is.
    """

    def __init__(self, needed_blocks: int, free_blocks: int):
        super().__init__(
            f"{needed_blocks} blocks needed and {free_blocks} free; finish a request, or "
            "preempt one (finish it, and compute it again later)"
        )
        self.needed_blocks = needed_blocks
        self.free_blocks = free_blocks

    def __reduce__(self):  # from one process of a serving stack to another
        return type(self), (self.needed_blocks, self.free_blocks)


class BlockPool:
    """Free list and reference counts of block ids 1 .. num_blocks - 1.

    Ids come back in the order they were freed, so a freed block stays untouched for as
    long as the pool allows. Every operation takes O(1) per block.
    """

    def __init__(self, num_blocks: int):
        check_positive(num_blocks=num_blocks)
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}; at least 2 (the null block and one more)")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_blocks:,} blocks, {self.num_free_blocks:,} free)"

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, each with one reference.

        Raises:
          OutOfBlocksError: fewer are free; none is taken.
        """
        check_count(count=count)
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a reference, for each time it is named, to blocks that are held already."""
        self._check_held(tuple(dict.fromkeys(block_ids)))
        for block_id in block_ids:
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference per id; a block without references becomes free.

        Raises:
          ValueError: an id that is not held, the null block, or one id more often than
            it has references. Nothing is freed then.
        """
        self._check_held(block_ids)
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        """How many holders a block has; 0: it is free."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id={block_id} is not in 0..{self.num_blocks - 1}")
        return self._references[block_id]

    def _check_held(self, block_ids: Sequence[int]) -> None:
        counts: dict[int, int] = {}
        for block_id in block_ids:
            if not isinstance(block_id, int):
                raise TypeError(f"block_ids must be ints, got {block_id!r}")
            counts[block_id] = counts.get(block_id, 0) + 1
            in_pool = NULL_BLOCK < block_id < self.num_blocks
            held = self._references[block_id] if in_pool else 0
            if counts[block_id] > held:
                raise ValueError(
                    f"block_ids holds {block_id} {counts[block_id]} time(s) but it has {held} "
                    f"references; pass ids in 1..{self.num_blocks - 1} that are held"
                )
