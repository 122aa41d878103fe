"""`IdQueue`, a queue of ids as an array. NumPy only."""

import numpy as np


class IdQueue:
    """A first-in, first-out queue of ids 1 .. num_ids - 1 that can also be removed from its middle.

    Every operation works on slices. A removed id leaves a hole, and when the array is full, all
    ids move to its beginning, which closes the holes. `contains` notes the indices of ids when it
    needs them, because most ids are never looked up.

    size: ids in the queue.
    """

    def __init__(self, num_ids: int):
        # 0: a hole, or past the end. Filled now, so that no step waits for page faults.
        self._ids = np.full(2 * num_ids, 0, np.int32)
        # The index of each id before `_noted`; an old index of all other ids. intp, because NumPy
        # indexes with it several times as fast as with int32.
        self._index_of = np.full(num_ids, 0, np.intp)
        self._head = self._tail = self._noted = self.size = 0

    def push(self, ids: np.ndarray) -> None:
        """Appends distinct ids that are not in the queue."""
        if self._tail + ids.size > self._ids.size:
            self._make_space()
        self._ids[self._tail : self._tail + ids.size] = ids
        self._tail += ids.size
        self.size += ids.size

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Removes distinct ids that are in the queue. Returns which were, bool[N]."""
        ids = ids.astype(np.intp, copy=False)
        is_there = self.contains(ids)
        there = ids if is_there.all() else ids[is_there]
        self._ids[self._index_of[there]] = 0
        self.size -= there.size
        return is_there

    def pop(self, count: int) -> np.ndarray:
        """Removes the first ``count`` ids, int32[count]; the queue must hold that many."""
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
        """Returns which ids are in the queue, bool of the ids' shape."""
        ids = ids.astype(np.intp, copy=False)
        if self._noted < self._tail:
            begin = max(self._noted, self._head)
            new = self._ids[begin : self._tail].astype(np.intp)
            self._index_of[new] = np.arange(begin, self._tail)
            self._noted = self._tail
        at = self._index_of[ids]
        return (at >= self._head) & (self._ids[at] == ids)

    def _make_space(self) -> None:
        """Transfers all ids to the beginning of the array; their noted indices become invalid."""
        ids = self._ids[self._head : self._tail]
        ids = ids[ids > 0] if self.size < ids.size else ids
        self._ids[: ids.size] = ids
        self._ids[ids.size : self._tail] = 0
        self._head, self._tail, self._noted = 0, ids.size, 0
