"""Changes of the books that no upload has carried to the device yet. No jax."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv.blocks._books import Changes
from jaxkv.blocks._runs import FEW, NO_IDS, NO_RUNS, Runs
from jaxkv.blocks._write import NO_COPIES, Copies, Entries, Sizes
from jaxkv.prefixes import SharedColumns


class Pending:
    """Table entries, copies and changed rows since the last upload."""

    def __init__(self) -> None:
        self._entries: list[Entries] = []
        self._copies: list[Copies] = []
        self._rows: list[np.ndarray] = []  # whose lengths changed
        self._device_rows: dict[int, int] = {}  # row -> the row that the device has it at

    @property
    def is_empty(self) -> bool:
        return not (self._rows or self._device_rows)

    @property
    def has_copies(self) -> bool:
        """Whether blocks or rows are copied."""
        return bool(self._copies or self._device_rows)

    def clear(self) -> None:
        """Forgets everything, once an upload holds it."""
        self.__init__()

    def add(
        self, changes: Changes, ids: np.ndarray, zeroed: np.ndarray, replaced: np.ndarray
    ) -> None:
        """Notes changes that were applied to the books.

        Args:
          changes: to rows and cells.
          ids: int32[cells], blocks of the fresh cells.
          zeroed: bool[K], the fresh runs whose blocks must be zeroed.
          replaced: the blocks that the copied cells had before.
        """
        if ids.size:
            self._entries.append(Entries(changes.fresh, ids, zeroed))
        self._rows.append(changes.rows)
        if replaced.size:
            groups = changes.fresh.groups[changes.copied]
            new = ids[changes.fresh.first_cells[changes.copied]]
            sources = self._origins(replaced)
            self._copies = [copies.without(new) for copies in self._copies]
            self._copies.append(Copies(groups, sources, new))

    def add_shared(self, row: int, columns: Sequence[SharedColumns]) -> None:
        """Notes that a row shares the blocks of a prefix."""
        runs = [(g, row, part.first, part.block_ids.size) for g, part in enumerate(columns)]
        ids = np.concatenate([part.block_ids for part in columns])
        listed = Runs(None, ids.size, [run for run in runs if run[-1]])
        self._entries.append(Entries(listed, ids, np.zeros(listed.size, bool)))
        self._rows.append(np.array([row]))

    def sizes(self, extra: int) -> Sizes:
        """Returns the sizes of everything pending, and of a step's ``extra``."""
        if self.is_empty:
            return Sizes(extra=extra)
        return Sizes(
            changed_rows=self.changed_rows().size,
            block_ids=sum(entries.runs.num_cells for entries in self._entries),
            zero_ids=sum(entries.num_zeroed for entries in self._entries),
            block_copies=sum(copies.groups.size for copies in self._copies),
            row_copies=len(self.row_copies()),
            extra=extra,
        )

    def num_rows_with(self, rows: np.ndarray) -> int:
        """Returns the rows that change once these do."""
        return _distinct([*self._rows, rows]).size

    def entries(self) -> Entries:
        """Returns all entries, ordered by group; of two for one cell only the later one."""
        if len(self._entries) == 1:
            return self._entries[0]
        if not self._entries:
            return NO_ENTRIES
        return _joined_runs(self._entries) or self._joined_cells()

    def _joined_cells(self) -> Entries:
        parts = [(*e.runs.cells(), e.block_ids, e.of_cells(e.zeroed)) for e in self._entries]
        groups, rows, columns, ids, zeroed = map(np.concatenate, zip(*parts, strict=True))
        cells = (groups * (rows.max() + 1) + rows) * (columns.max() + 1) + columns
        _, last = np.unique(cells[::-1], return_index=True)
        kept = np.sort(groups.size - 1 - last)
        kept = kept[groups[kept].argsort(kind="stable")]
        runs = Runs.of_cells(groups[kept], rows[kept], columns[kept])
        return Entries(runs, ids[kept], zeroed[kept])

    def copies(self) -> Copies:
        """Returns all copies of blocks, ordered by group."""
        if not self._copies:
            return NO_COPIES
        joined = Copies(*map(np.concatenate, zip(*self._copies, strict=True)))
        order = joined.groups.argsort(kind="stable")
        return Copies(*(part[order] for part in joined))

    def changed_rows(self) -> np.ndarray:
        """Returns the rows whose lengths the device must learn, int64[E]."""
        return _distinct(self._rows)

    def row_copies(self) -> np.ndarray:
        """Returns int64[M, 2]: a device row, and the row that its content goes to."""
        pairs = [(device, row) for row, device in self._device_rows.items() if device != row]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _origins(self, sources: np.ndarray) -> np.ndarray:
        """Returns where blocks' content lies now: an upload makes all its copies at once."""
        pairs = [(c.destinations.tolist(), c.sources.tolist()) for c in self._copies]
        origins = {
            block: origin for into, of in pairs for block, origin in zip(into, of, strict=True)
        }
        return np.array([origins.get(block, block) for block in sources.tolist()], np.int32)

    def copy_row(self, source: int, row: int) -> None:
        """Notes that a row begins as a copy of another one."""
        self._device_rows[row] = self._device_rows.get(source, source)
        self._rows.append(np.array([row]))
        for entries in list(self._entries):
            mine = entries.chosen(entries.runs.rows == source)
            if mine.block_ids.size:  # the device does not know these yet, so they are not copied
                runs = mine.runs.moved(np.full_like(mine.runs.rows, row))
                self._entries.append(Entries(runs, mine.block_ids, np.zeros_like(mine.zeroed)))

    def swap_rows(self, first: int, second: int) -> None:
        """Notes that two rows were exchanged."""
        homes = self._device_rows
        homes[first], homes[second] = homes.get(second, second), homes.get(first, first)
        self._rows = [_swapped(rows, first, second) for rows in self._rows]
        self._rows.append(np.array([first, second]))
        self._entries = [
            entries._replace(runs=entries.runs.moved(_swapped(entries.runs.rows, first, second)))
            for entries in self._entries
        ]

    def forget_row(self, row: int) -> None:
        """Drops everything about a row whose request is gone."""
        self._device_rows.pop(row, None)
        if not any((rows == row).any() for rows in self._rows):
            return
        self._rows = [left for rows in self._rows if (left := rows[rows != row]).size]
        gone = [entries.chosen(entries.runs.rows == row) for entries in self._entries]
        kept = [entries.chosen(entries.runs.rows != row) for entries in self._entries]
        self._entries = [entries for entries in kept if entries.block_ids.size]
        self._zero_for_others(gone)
        if self._copies:
            written = np.concatenate([NO_IDS, *(entries.block_ids for entries in self._entries)])
            self._copies = [copies.chosen(written) for copies in self._copies]

    def _zero_for_others(self, gone: Sequence[Entries]) -> None:
        """Zeroes blocks for rows that share them, where the row that was to do so is gone."""
        waiting = {block_id for entries in gone for block_id in entries.zero_ids(1)[0].tolist()}
        for at, entries in enumerate(self._entries if waiting else ()):
            first_ids = entries.block_ids[entries.runs.first_cells].tolist()
            shared = [block_id in waiting for block_id in first_ids]
            waiting.difference_update(itertools.compress(first_ids, shared))
            self._entries[at] = entries._replace(zeroed=entries.zeroed | np.array(shared, bool))


NO_ENTRIES = Entries(NO_RUNS, NO_IDS, np.zeros(0, bool))


def _joined_runs(parts: Sequence[Entries]) -> Entries | None:
    """Returns entries ordered by group, if they are few runs and name no cell twice."""
    if sum(part.runs.size for part in parts) > FEW or not all(p.runs.are_few for p in parts):
        return None
    runs = [run for part in parts for run in part.runs.ints]
    for (group, row, begin, count), after in itertools.pairwise(sorted(runs)):
        if (group, row) == after[:2] and begin + count > after[2]:
            return None
    zeroed = itertools.chain.from_iterable(part.zeroed.tolist() for part in parts)
    ends = itertools.accumulate(run[3] for run in runs)
    ids = np.concatenate([part.block_ids for part in parts])
    found = sorted(zip(runs, zeroed, ends, strict=True), key=lambda each: each[0][0])
    return Entries(
        Runs.listed([run for run, _, _ in found]),
        np.concatenate([ids[end - run[3] : end] for run, _, end in found]),
        np.array([is_zeroed for _, is_zeroed, _ in found], bool),
    )


def _distinct(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Returns each row once; the rows of one change are distinct already."""
    listed = list(rows)
    if len(listed) == 1:
        return listed[0]
    if all(part.size == 1 for part in listed):
        return np.array(sorted({int(part[0]) for part in listed}), np.int64)
    return np.unique(np.concatenate([np.zeros(0, np.int64), *listed]))


def _swapped(rows: np.ndarray, first: int, second: int) -> np.ndarray:
    return np.where(rows == first, second, np.where(rows == second, first, rows))
