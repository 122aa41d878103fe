"""Runs of consecutive cells in the block tables of groups. NumPy only."""

import itertools
from collections.abc import Sequence

import numpy as np

FEW = 16  # runs up to which a loop over them is faster than arrays of their cells
NO_IDS = np.zeros(0, np.int32)

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Run = tuple[int, int, int, int]


class Runs:
    """K runs of consecutive cells, each in one row of one group; ordered by group.

    A run is a group, a row, a first column (in the group's table) and a number of cells (at least
    1). Runs are kept as four arrays, int64[K] each, or as a tuple of ints per run, which is faster
    for a few. Each form is made from the other on first use.

    are_few: whether a loop over the runs is faster than arrays of their cells.
    """

    __slots__ = ("_arrays", "_ints", "are_few", "num_cells", "size")

    def __init__(self, arrays: Arrays | None, num_cells: int, ints: Sequence[Run] = ()):
        self._arrays, self._ints, self.num_cells = arrays, ints, num_cells
        self.size = len(ints) if arrays is None else arrays[0].size
        self.are_few = bool(ints) or (self.size <= FEW and num_cells > self.size)

    @classmethod
    def between(cls, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> "Runs":
        """Returns the columns ``begins[g, i] .. ends[g, i] - 1`` of row i in each group g."""
        counts = (ends - begins).reshape(-1)  # flat: NumPy indexes one axis much faster than two
        at = (counts > 0).nonzero()[0]
        if not at.size:
            return NO_RUNS
        if len(begins) == 1:
            groups, index = np.zeros(at.size, np.int64), at
        else:
            groups, index = np.divmod(at, rows.size)
        counts, begins = counts[at], begins.reshape(-1)[at]
        return cls((groups, rows[index], begins, counts), int(np.add.reduce(counts)))

    @classmethod
    def of_cells(cls, groups: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> "Runs":
        """Returns cells as runs of one cell each."""
        return cls((groups, rows, columns, np.ones(groups.size, np.int64)), groups.size)

    @classmethod
    def listed(cls, runs: Sequence[Run]) -> "Runs":
        """Returns runs from tuples of ints, which are ordered by group."""
        return cls(None, sum([count for _, _, _, count in runs]), runs) if runs else NO_RUNS

    @classmethod
    def joined(cls, runs: Sequence["Runs"]) -> "Runs":
        """Returns the concatenation of all runs, not ordered by group."""
        parts = zip(*(part.arrays for part in (NO_RUNS, *runs)), strict=True)
        groups, rows, begins, counts = map(np.concatenate, parts)
        return cls((groups, rows, begins, counts), sum(part.num_cells for part in runs))

    def __reduce__(self):
        return type(self), (self.arrays, self.num_cells)

    @property
    def arrays(self) -> Arrays:
        """Groups, rows, first columns and numbers of cells, int64[K] each."""
        if self._arrays is None:
            groups, rows, begins, counts = np.array(self._ints, np.int64).reshape(-1, 4).T
            self._arrays = groups, rows, begins, counts
        return self._arrays

    @property
    def ints(self) -> Sequence[Run]:
        """Group, row, first column and number of cells of each run."""
        if not self._ints:
            self._ints = list(zip(*(part.tolist() for part in self.arrays), strict=True))
        return self._ints

    def _part(self, at: int) -> np.ndarray:
        if self._arrays is None:
            return np.array([run[at] for run in self._ints], np.int64)
        return self._arrays[at]

    @property
    def groups(self) -> np.ndarray:
        """int64[K]."""
        return self._part(0)

    @property
    def rows(self) -> np.ndarray:
        """int64[K]."""
        return self._part(1)

    @property
    def counts(self) -> np.ndarray:
        """int64[K], cells of each run."""
        return self._part(3)

    @property
    def are_cells(self) -> bool:
        """Whether each run is one cell."""
        return self.num_cells == self.size

    @property
    def first_cells(self) -> np.ndarray:
        """int64[K], the index of each run's first cell among all cells."""
        counts = self.counts
        return np.add.accumulate(counts) - counts

    def num_cells_of(self, which: np.ndarray) -> int:
        """Returns the number of cells in some of the runs, given by a mask."""
        chosen = int(np.count_nonzero(which))
        if chosen in (0, self.size):
            return self.num_cells if chosen else 0
        return int(np.add.reduce(self.counts[which]))

    def chosen(self, which: np.ndarray) -> "Runs":
        """Returns some of the runs, given by a mask or by indices."""
        if self._arrays is None and which.dtype == bool:
            return Runs.listed(list(itertools.compress(self._ints, which.tolist())))
        groups, rows, begins, counts = (part[which] for part in self.arrays)
        return Runs((groups, rows, begins, counts), int(np.add.reduce(counts)))

    def moved(self, rows: np.ndarray) -> "Runs":
        """Returns the same columns in other rows, int64[K]."""
        groups, _, begins, counts = self.arrays
        return Runs((groups, rows, begins, counts), self.num_cells)

    def by_group(self) -> tuple["Runs", np.ndarray]:
        """Returns the runs ordered by group, and their former indices, int64[K]."""
        order = self.groups.argsort(kind="stable")
        return self.chosen(order), order

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns groups, rows and columns of all cells, int64[num_cells] each."""
        groups, rows, begins, counts = self.arrays
        if self.are_cells:
            return groups, rows, begins
        at = np.arange(groups.size).repeat(counts)
        columns = np.arange(self.num_cells) + (begins - self.first_cells)[at]
        return groups[at], rows[at], columns

    def write_cells(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Writes the rows and columns of all cells, into int32[num_cells] each."""
        if not self.are_few:
            _, rows[:], columns[:] = self.cells()
        elif self.are_cells:
            for at, (_, row, column, _) in enumerate(self.ints):
                rows[at], columns[at] = row, column
        else:
            at = 0
            for _, row, begin, count in self.ints:
                rows[at : at + count] = row
                columns[at : at + count] = np.arange(begin, begin + count, dtype=np.int32)
                at += count

    def ends(self, num_groups: int) -> np.ndarray | Sequence[int]:
        """Returns, per group, the number of cells in the group and all groups before it."""
        if num_groups == 1:
            return [self.num_cells]
        if self.are_few:
            counts = [0] * num_groups
            for group, _, _, count in self.ints:
                counts[group] += count
            return list(itertools.accumulate(counts))
        last = self.groups.searchsorted(np.arange(num_groups), "right")
        if self.are_cells:
            return last
        return np.concatenate([[0], np.add.accumulate(self.counts)])[last]


_NONE = np.zeros(0, np.int64)
NO_RUNS = Runs((_NONE, _NONE, _NONE, _NONE), 0)
