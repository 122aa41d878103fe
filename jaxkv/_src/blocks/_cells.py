"""Cells of the block tables of several groups, and changes of them. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_IDS = np.zeros(0, np.int32)


class Cells(NamedTuple):
    """K cells of block tables, ordered by group.

    groups, rows, logical_blocks: int64[K]; logical blocks count from the first one of the group.
    """

    groups: np.ndarray
    rows: np.ndarray
    logical_blocks: np.ndarray

    @property
    def num(self) -> int:
        """K."""
        return self.groups.size

    @classmethod
    def between(cls, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> "Cells":
        """Returns logical blocks ``begins[g, i] .. ends[g, i] - 1`` of row i in each group g.

        Args:
          rows: int64[N].
          begins, ends: int64[G, N].
        """
        # NumPy searches and indexes one axis much faster than two.
        at = (ends > begins).reshape(-1).nonzero()[0]
        if not at.size:
            return NO_CELLS
        groups, index = np.divmod(at, rows.size)
        logical_blocks = begins.reshape(-1)[at]
        counts = ends.reshape(-1)[at] - logical_blocks
        num = int(np.add.reduce(counts))
        if num == at.size:
            return cls(groups, rows[index], logical_blocks)
        run = np.arange(at.size).repeat(counts)
        offsets = logical_blocks - (np.add.accumulate(counts) - counts)
        return cls(groups[run], rows[index[run]], np.arange(num) + offsets[run])

    @classmethod
    def joined(cls, parts: Sequence["Cells"]) -> "Cells":
        """Returns the cells of all parts, ordered by group."""
        groups, rows, logical_blocks = map(np.concatenate, zip(*parts, strict=True))
        order = groups.argsort(kind="stable")
        return cls(groups[order], rows[order], logical_blocks[order])


NO_CELLS = Cells(*np.zeros((3, 0), np.int64))


class SharedCell(NamedTuple):
    """A cell whose block is shared or cached, and which its row is about to write.

    block_id: that block.
    is_read: whether the row still reads its content, so that the new block starts as a copy.
    """

    group: int
    row: int
    logical_block: int
    block_id: int
    is_read: bool


class Changes(NamedTuple):
    """Changes that a step makes to N rows.

    rows: the rows.
    fresh: cells without a block that get one.
    dropped: cells whose blocks are released.
    shared: cells that get a new block in place of a shared or cached one.
    allocated: source, first and end of the rows after the step, see `RequestState`.
    needs_no_change_until: see `RequestState`.
    synced: `RequestState.synced` of the rows after these changes; None if they leave it as it is.
    index: index of each row in the step.
    given_up: blocks whose content is no longer cached for later prompts.
    """

    rows: np.ndarray  # int64[N]
    fresh: Cells
    dropped: Cells
    shared: Sequence[SharedCell]
    allocated: np.ndarray  # int64[3, G, N]
    needs_no_change_until: np.ndarray  # int64[N]
    synced: np.ndarray | None  # int64[G, N]
    index: np.ndarray  # int64[N]
    given_up: np.ndarray = NO_IDS
