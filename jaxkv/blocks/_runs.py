"""Runs of cells in the tables of a pool's groups. NumPy only."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_IDS = np.zeros(0, np.int32)


class Runs(NamedTuple):
    """K runs of consecutive cells, each in one row of one group; ordered by group."""

    groups: np.ndarray  # int64[K]
    rows: np.ndarray  # int64[K]
    begins: np.ndarray  # int64[K], the first column, in the table of the group
    counts: np.ndarray  # int64[K], cells, at least 1
    num_cells: int

    @classmethod
    def between(cls, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> "Runs":
        """Returns the columns ``begins[g, i] .. ends[g, i] - 1`` of row i in each group g."""
        counts = ends - begins
        groups, index = (counts > 0).nonzero()
        if not groups.size:
            return NO_RUNS
        counts = counts[groups, index]
        return cls(groups, rows[index], begins[groups, index], counts, int(np.add.reduce(counts)))

    @classmethod
    def of_cells(cls, groups: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> "Runs":
        """Returns cells as runs of one cell each."""
        return cls(groups, rows, columns, np.ones(groups.size, np.int64), groups.size)

    @classmethod
    def joined(cls, runs: Sequence["Runs"]) -> "Runs":
        """Returns the runs of all, one after the other, in no order of groups."""
        parts = zip(*(part[:4] for part in (NO_RUNS, *runs)), strict=True)
        groups, rows, begins, counts = map(np.concatenate, parts)
        return cls(groups, rows, begins, counts, sum(part.num_cells for part in runs))

    @property
    def are_cells(self) -> bool:
        """Whether each run is one cell."""
        return self.num_cells == self.groups.size

    @property
    def first_cells(self) -> np.ndarray:
        """int64[K], the index of each run's first cell among all cells."""
        return np.add.accumulate(self.counts) - self.counts

    def chosen(self, which: np.ndarray) -> "Runs":
        """Returns some of the runs, given by a mask or by indices."""
        groups, rows, begins, counts = (part[which] for part in self[:4])
        return Runs(groups, rows, begins, counts, int(np.add.reduce(counts)))

    def by_group(self) -> tuple["Runs", np.ndarray]:
        """Returns the runs ordered by group, and the order, int64[K]."""
        order = self.groups.argsort(kind="stable")
        return self.chosen(order), order

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns groups, rows and columns of all cells."""
        if self.are_cells:
            return self.groups, self.rows, self.begins
        at = np.arange(self.groups.size).repeat(self.counts)
        columns = np.arange(self.num_cells) + (self.begins - self.first_cells)[at]
        return self.groups[at], self.rows[at], columns

    def ends(self, num_groups: int) -> np.ndarray:
        """Returns int64[num_groups], the cells of each group and all groups before it."""
        last = self.groups.searchsorted(np.arange(num_groups), "right")
        if self.are_cells:
            return last
        return np.concatenate([[0], np.add.accumulate(self.counts)])[last]


_NONE = np.zeros(0, np.int64)
NO_RUNS = Runs(_NONE, _NONE, _NONE, _NONE, 0)
