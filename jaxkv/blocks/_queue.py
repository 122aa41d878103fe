"""Free blocks in the order in which they are taken. NumPy only."""

import numpy as np


class BlockQueue:
    """A queue of block ids that ids also leave from its middle.

    Every operation works on slices. An id that leaves leaves a hole, and when the queue has no
    more space, its ids move to the beginning and close the holes. Places are looked up only when
    somebody asks for ids, which most ids never are.

    size: ids in the queue.
    """

    def __init__(self, num_blocks: int):
        # 0: a hole, or past the end. Written now, so that no step waits for fresh memory.
        self._ids = np.full(2 * num_blocks, 0, np.int32)
        # Of the ids before `_noted` where they are; of others some place, which may be another's.
        self._place_of = np.full(num_blocks, -1, np.int32)
        self._head = self._tail = self._noted = self.size = 0

    def push(self, ids: np.ndarray) -> None:
        """Puts distinct ids, which are not there yet, at the end."""
        if self._tail + ids.size > self._ids.size:
            self._make_space()
        self._ids[self._tail : self._tail + ids.size] = ids
        self._tail += ids.size
        self.size += ids.size

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Takes those of some distinct ids that are there out of the queue. Returns which."""
        ids = ids.astype(np.intp, copy=False)
        is_there = self.contains(ids)
        there = ids if is_there.all() else ids[is_there]
        self._ids[self._place_of[there]] = 0
        self.size -= there.size
        return is_there

    def pop(self, count: int) -> np.ndarray:
        """Takes the first ``count`` ids, which are there, int32[count]."""
        end = self._head + count
        if self.size < self._tail - self._head:  # there are holes
            while np.count_nonzero(self._ids[self._head : end]) < count:
                end = min(end + count, self._tail)
            found = self._ids[self._head : end].nonzero()[0][:count] + self._head
            ids = self._ids[found]
            end = int(found[-1]) + 1 if count else self._head
        else:
            ids = self._ids[self._head : end].copy()
        self._head = end
        self.size -= count
        return ids

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Returns which ids are there, of the ids' shape."""
        ids = ids.astype(np.intp, copy=False)  # quicker to look up by than int32
        if self._noted < self._tail:
            begin = max(self._noted, self._head)
            new = self._ids[begin : self._tail].astype(np.intp)
            self._place_of[new] = np.arange(begin, self._tail, dtype=np.int32)
            self._noted = self._tail
        places = self._place_of[ids]
        return (places >= self._head) & (self._ids.take(places, mode="clip") == ids)

    def _make_space(self) -> None:
        """Moves all ids to the beginning; their places are noted anew."""
        ids = self._ids[self._head : self._tail]
        ids = ids[ids > 0] if self.size < ids.size else ids
        self._ids[: ids.size] = ids
        self._ids[ids.size : self._tail] = 0
        self._head, self._tail, self._noted = 0, ids.size, 0
