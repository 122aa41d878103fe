"""Free blocks whose content is still kept, the least recently used first. NumPy only."""

import numpy as np


class WarmBlocks:
    """A queue of block ids that ids also leave from its middle.

    Every operation works on slices; an id that leaves leaves a hole, and holes are closed when
    the queue has no more space.
    """

    def __init__(self, num_blocks: int):
        self._ids = np.zeros(2 * num_blocks, np.int32)  # 0: a hole
        self._place_of = np.full(num_blocks, -1, np.int64)
        self._head = self._tail = self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, ids: np.ndarray) -> None:
        """Puts distinct ids, which are not there yet, at the end."""
        if self._tail + ids.size > self._ids.size:
            self._close_holes()
        self._ids[self._tail : self._tail + ids.size] = ids
        self._place_of[ids.astype(np.intp)] = np.arange(self._tail, self._tail + ids.size)
        self._tail += ids.size
        self._size += ids.size

    def remove(self, ids: np.ndarray) -> None:
        """Takes distinct ids, which are there, out of the queue."""
        self._ids[self._place_of[ids]] = 0
        self._place_of[ids] = -1
        self._size -= ids.size

    def pop(self, count: int) -> np.ndarray:
        """Takes the first ``count`` ids, which are there, int32[count]."""
        end = self._head + count
        while np.count_nonzero(self._ids[self._head : end]) < count:
            end = min(end + count, self._tail)
        found = self._ids[self._head : end].nonzero()[0][:count] + self._head
        ids = self._ids[found]
        self._place_of[ids.astype(np.intp)] = -1
        self._head = int(found[-1]) + 1 if count else self._head
        self._size -= count
        return ids

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Returns which ids are there, of the ids' shape."""
        return self._place_of[ids] >= 0

    def _close_holes(self) -> None:
        ids = self._ids[self._head : self._tail]
        ids = ids[ids > 0]
        self._ids[: ids.size] = ids
        self._place_of[ids] = np.arange(ids.size)
        self._head, self._tail = 0, ids.size
