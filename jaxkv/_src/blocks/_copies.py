"""Copies of blocks that the next upload makes. NumPy only."""

import numpy as np

from jaxkv._src.blocks._cells import SharedCell
from jaxkv._src.blocks._pool import BlockPool, OutOfBlocksError


class PendingCopies:
    """Cells whose blocks start as copies, by these blocks, until an upload makes all of them.

    The ``block_id`` of a cell has the content before that upload, and stays as it is until then.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._of: dict[int, SharedCell] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def pending(self) -> list[tuple[SharedCell, int]]:
        """The copies to make, by group, and the block of each, if it is still allocated."""
        new = np.array(list(self._of), np.int32)
        held = new[self._pool.references_of(new) > 0]
        return sorted((self._of[block_id], block_id) for block_id in held.tolist())

    @property
    def sources(self) -> np.ndarray:
        """Blocks that are copied, int64[N]."""
        return np.unique(np.array([cell.block_id for cell, _ in self.pending], np.int64))

    def go_into(self, ids: np.ndarray) -> bool:
        """Returns whether any of ``ids`` starts as a copy."""
        return bool(self._of) and not self._of.keys().isdisjoint(ids.tolist())

    def add(self, new: int, cell: SharedCell) -> None:
        """Schedules a copy of the block of ``cell`` into a new block."""
        self._pool.is_fresh[new] = False
        # An upload makes all its copies at once, so none may read what another one writes.
        before = self._of.get(cell.block_id)
        self._of[new] = cell if before is None else cell._replace(block_id=before.block_id)

    def forget(self, ids: np.ndarray) -> None:
        """Forgets the copies into blocks that were given back since, and are taken again now."""
        for block_id in ids.tolist() if self._of else ():
            self._of.pop(block_id, None)

    def drop(self, block_id: int) -> None:
        """Cancels the copy; the block starts empty."""
        del self._of[block_id]
        self._pool.is_fresh[block_id] = True

    def clear(self) -> None:
        """Forgets all copies, which an upload has now."""
        self._of.clear()

    def take_to_load(self, count: int) -> np.ndarray:
        """Takes blocks whose content comes from the host before the next upload, int32[count].

        The caller has checked that as many are free next to `sources`.
        """
        sources = self.sources
        ids = self._pool.take(count + sources.size)
        is_source = np.isin(ids, sources)
        spare = np.concatenate([ids[is_source], ids[~is_source][count:]])
        ids = ids[~is_source][:count]
        self._pool.release(spare)
        self._pool.is_fresh[ids] = False
        return ids

    def allocate_to_load(self, count: int) -> np.ndarray:
        """Takes blocks as `take_to_load`; raises OutOfBlocksError if too few are free."""
        needed = count + self.sources.size
        if needed > self._pool.num_free_blocks:
            raise OutOfBlocksError(needed, self._pool.num_free_blocks)
        return self.take_to_load(count)
