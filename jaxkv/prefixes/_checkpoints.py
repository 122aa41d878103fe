"""States that are kept in the middle of prompts, and which of them give way. NumPy only."""

import numpy as np

EVICTED = -1  # in place of a block id: it was kept once
WANTED_PART = 0.75  # of the room for checkpoints, as long as others ask for the rest


class Checkpoint:
    """Blocks that hold the end of a prefix, where that is not the end of a block.

    position: tokens of the prefix.
    blocks: int32[G], the state of each group that overwrites its states, and the last block of
      each other group if the prefix ends inside it; 0 where neither is needed, `EVICTED` where
      it is gone.
    is_wanted: whether another prompt is known to go on from here: a boundary that was named, or
      where two prompts parted, or that was shared.
    """

    __slots__ = ("blocks", "is_wanted", "position")

    def __init__(self, position: int, blocks: np.ndarray, *, is_wanted: bool):
        self.position, self.blocks, self.is_wanted = position, blocks, is_wanted

    @property
    def num_blocks(self) -> int:
        return int(np.count_nonzero(self.blocks))

    @property
    def is_kept(self) -> bool:
        return bool((self.blocks >= 0).all())


class Checkpoints:
    """All checkpoints, the least recently used first.

    Most prompts end where no other one goes on, so the checkpoints of their ends give way before
    those that are wanted, as long as the latter leave them some room.
    """

    def __init__(self) -> None:
        self._queues: dict[bool, dict[Checkpoint, None]] = {False: {}, True: {}}  # by is_wanted
        self._num_blocks = {False: 0, True: 0}

    @property
    def num_blocks(self) -> int:
        """Blocks that checkpoints name."""
        return sum(self._num_blocks.values())

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._queues[checkpoint.is_wanted]

    def add(self, checkpoint: Checkpoint) -> None:
        """Notes a checkpoint as the last one used."""
        self._queues[checkpoint.is_wanted][checkpoint] = None
        self._num_blocks[checkpoint.is_wanted] += checkpoint.num_blocks

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint."""
        del self._queues[checkpoint.is_wanted][checkpoint]
        self._num_blocks[checkpoint.is_wanted] -= checkpoint.num_blocks

    def touch(self, checkpoint: Checkpoint, *, is_wanted: bool) -> None:
        """Notes that a checkpoint was used, and whether it is wanted from now on."""
        self.remove(checkpoint)
        checkpoint.is_wanted |= is_wanted
        self.add(checkpoint)

    def one_too_many(self, max_blocks: int) -> Checkpoint | None:
        """Returns the checkpoint that gives way when there are more blocks than that."""
        if self.num_blocks <= max_blocks:
            return None
        crowds = self._num_blocks[True] > WANTED_PART * max_blocks
        return next(iter(self._queues[crowds or not self._queues[False]]))
