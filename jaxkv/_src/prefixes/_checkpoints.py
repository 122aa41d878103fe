"""Checkpoints of prefixes, and the order in which they are evicted. NumPy only."""

import numpy as np

EVICTED = -1  # instead of the id of a block that was cached and then evicted
WANTED_PART = 0.75  # share of the checkpoint blocks above which wanted ones are evicted first


class Checkpoint:
    """A position at which a request can go on, and blocks that it needs there.

    At a position in a prompt these are the blocks besides whole ones. A preempted request has a
    checkpoint of its own, with all the blocks that it reads next, which no prompt finds.

    position: tokens before it.
    blocks: int32[N], one per group: the block with the state for a group that overwrites its
      states, and the last block for any other group if the prefix ends inside it; 0 where a group
      needs neither, `EVICTED` where the block is gone.
    ends: int64[N], the position before which each block may not be written.
    groups: int64[N], the group of each block; None if there is one of every group, in order.
    is_wanted: whether other prompts are expected to continue here: the caller named this boundary,
      two prompts parted here, or a request has shared the prefix.
    """

    __slots__ = ("blocks", "ends", "groups", "is_wanted", "position")

    def __init__(
        self,
        position: int,
        blocks: np.ndarray,
        ends: np.ndarray,
        groups: np.ndarray | None = None,
        *,
        is_wanted: bool,
    ):
        self.position, self.blocks, self.ends, self.groups = position, blocks, ends, groups
        self.is_wanted = is_wanted

    @property
    def num_blocks(self) -> int:
        return int(np.count_nonzero(self.blocks))

    @property
    def is_cached(self) -> bool:
        return bool((self.blocks >= 0).all())

    def group_of(self, block_id: int) -> int:
        """Returns the group of a block."""
        at = int((self.blocks == block_id).argmax())
        return at if self.groups is None else self.groups.item(at)

    def until(self, block_id: int) -> int:
        """Returns the position before which a block may not be written."""
        return self.ends.item((self.blocks == block_id).argmax())


class Checkpoints:
    """All checkpoints, the least recently used first.

    Most prompts end where no other prompt continues. Checkpoints of such ends are evicted before
    wanted ones, unless these have over `WANTED_PART` of the blocks. Checkpoints with a
    block in host memory, or of preempted requests, are not in this order.
    """

    def __init__(self) -> None:
        self._queues: dict[bool, dict[Checkpoint, None]] = {False: {}, True: {}}  # by is_wanted
        self._num_blocks = {False: 0, True: 0}

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all checkpoints; a block of two of them counts twice."""
        return sum(self._num_blocks.values())

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._queues[checkpoint.is_wanted]

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint as the most recently used one."""
        self._queues[checkpoint.is_wanted][checkpoint] = None
        self._num_blocks[checkpoint.is_wanted] += checkpoint.num_blocks

    def remove(self, checkpoint: Checkpoint) -> bool:
        """Removes a checkpoint. Returns whether it was here."""
        is_here = checkpoint in self
        if is_here:
            del self._queues[checkpoint.is_wanted][checkpoint]
            self._num_blocks[checkpoint.is_wanted] -= checkpoint.num_blocks
        return is_here

    def touch(self, checkpoint: Checkpoint, *, is_wanted: bool) -> None:
        """Marks a checkpoint as just used, and as wanted from now on if ``is_wanted``."""
        is_here = self.remove(checkpoint)
        checkpoint.is_wanted |= is_wanted
        if is_here:
            self.add(checkpoint)

    def one_too_many(self, max_blocks: int) -> Checkpoint | None:
        """Returns the checkpoint to evict if checkpoints have more than ``max_blocks`` blocks."""
        if self.num_blocks <= max_blocks:
            return None
        crowds = self._num_blocks[True] > WANTED_PART * max_blocks
        return next(iter(self._queues[crowds]))  # others are there unless the wanted ones crowd
