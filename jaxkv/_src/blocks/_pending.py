"""Changes to the books that no upload has carried to the device yet. No jax."""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxkv._src.blocks._books import Books, Changes, FewChanges
from jaxkv._src.blocks._joins import joined_entries
from jaxkv._src.blocks._runs import NO_IDS, Runs
from jaxkv._src.blocks._shape import StepShape
from jaxkv._src.blocks._write import (
    NO_COPIES,
    Copies,
    Entries,
    Sizes,
    write_copies,
    write_entries,
    write_zero_ids,
)
from jaxkv._src.prefixes import SharedColumns

NO_ROWS = np.zeros(0, np.int64)
NO_ROW_COPIES = np.zeros((0, 2), np.int64)


class Pending:
    """Table entries, copies and changed rows since the last upload.

    zeroes: whether the fresh blocks of any group are zeroed.
    zeroes_all: whether those of all groups are.
    """

    def __init__(self, groups_to_zero: Sequence[bool]):
        """Starts empty. ``groups_to_zero`` tells whether the fresh blocks of a group are zeroed."""
        self._zeroed = np.array(groups_to_zero, bool)
        self.zeroes, self.zeroes_all = any(groups_to_zero), all(groups_to_zero)
        self._forget()

    def _forget(self) -> None:
        self._entries: list[Entries] = []
        self._copies: list[Copies] = []
        self._rows: list[np.ndarray] = []  # rows whose lengths changed
        self._device_rows: dict[int, int] = {}  # row -> the device's row with its content

    @property
    def is_empty(self) -> bool:
        return not (self._rows or self._device_rows)

    def to_zero(self, changes: Changes) -> np.ndarray:
        """Returns which fresh runs have blocks to zero, bool[K]: not those that are copied."""
        if not changes.replaces and self.zeroes == self.zeroes_all:
            return ~changes.copied if self.zeroes else changes.copied
        return self._zeroed[changes.fresh.groups] & ~changes.copied

    # --- noting -------------------------------------------------------------------

    def add(
        self, changes: Changes, ids: np.ndarray, zeroed: np.ndarray, replaced: np.ndarray
    ) -> None:
        """Records changes that were applied to the books.

        Args:
          changes: the changes.
          ids: int32[cells], block ids of the fresh cells.
          zeroed: bool[K], the result of `to_zero` for the changes.
          replaced: the block ids that the copied cells had before.
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

    def add_few(self, changes: FewChanges, ids: np.ndarray) -> None:
        """Records changes as `add` does; the plan zeroes the blocks of all groups, or of none."""
        if changes.fresh:
            zeroed = np.full(len(changes.fresh), self.zeroes)
            self._entries.append(Entries(Runs.listed(changes.fresh), ids, zeroed))
        if changes.rows:
            self._rows.append(np.array(changes.rows))

    def add_shared(self, row: int, columns: Sequence[SharedColumns]) -> None:
        """Records that a row starts with the blocks of a cached prefix."""
        runs = [(g, row, part.first, part.block_ids.size) for g, part in enumerate(columns)]
        ids = np.concatenate([part.block_ids for part in columns])
        listed = Runs(None, ids.size, [run for run in runs if run[-1]])
        self._entries.append(Entries(listed, ids, np.zeros(listed.size, bool)))
        self._rows.append(np.array([row]))

    def _origins(self, sources: np.ndarray) -> np.ndarray:
        """Returns the blocks that have the content of ``sources`` before the next upload.

        An upload makes all its copies at once, so none may read what another one writes.
        """
        pairs = [(c.destinations.tolist(), c.sources.tolist()) for c in self._copies]
        origins = {
            block: origin for into, of in pairs for block, origin in zip(into, of, strict=True)
        }
        return np.array([origins.get(block, block) for block in sources.tolist()], np.int32)

    def copy_row(self, source: int, row: int) -> None:
        """Records that a row starts as a copy of another row."""
        self._device_rows[row] = self._device_rows.get(source, source)
        self._rows.append(np.array([row]))
        for entries in list(self._entries):
            mine = entries.chosen(entries.runs.rows == source)
            if mine.block_ids.size:  # the device's row lacks these entries, so its copy does too
                runs = mine.runs.moved(np.full_like(mine.runs.rows, row))
                self._entries.append(Entries(runs, mine.block_ids, np.zeros_like(mine.zeroed)))

    def swap_rows(self, first: int, second: int) -> None:
        """Records that two rows were exchanged."""
        homes = self._device_rows
        homes[first], homes[second] = homes.get(second, second), homes.get(first, first)
        self._rows = [_swapped(rows, first, second) for rows in self._rows]
        self._rows.append(np.array([first, second]))
        self._entries = [
            entries._replace(runs=entries.runs.moved(_swapped(entries.runs.rows, first, second)))
            for entries in self._entries
        ]

    def forget_row(self, row: int) -> None:
        """Drops the pending changes of a row whose request has finished."""
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
            left = [copies.chosen(written) for copies in self._copies]
            self._copies = [copies for copies in left if copies.groups.size]

    def _zero_for_others(self, gone: Sequence[Entries]) -> None:
        """Lets other rows zero the blocks that they share with dropped entries."""
        waiting = {block_id for entries in gone for block_id in entries.zero_ids(1)[0].tolist()}
        for at, entries in enumerate(self._entries if waiting else ()):
            first_ids = entries.block_ids[entries.runs.first_cells].tolist()
            shared = [block_id in waiting for block_id in first_ids]
            waiting.difference_update(itertools.compress(first_ids, shared))
            self._entries[at] = entries._replace(zeroed=entries.zeroed | np.array(shared, bool))

    # --- uploading ----------------------------------------------------------------

    def sizes(self, extra: int, changes: Changes | None, zeroed: np.ndarray) -> Sizes:
        """Returns the sizes of all pending changes, together with those of the next step.

        Args:
          extra: number of extra int32s of the step.
          changes: those of the step; None if it changes nothing.
          zeroed: bool[K], the result of `to_zero` for ``changes``.
        """
        if changes is None:
            return self._sizes(extra, NO_ROWS)
        fresh = changes.fresh
        copied = int(np.count_nonzero(changes.copied)) if changes.replaces else 0
        zeros = fresh.num_cells_of(zeroed)
        return self._sizes(extra, changes.rows, fresh.num_cells, zeros, copied)

    def sizes_with_few(self, extra: int, changes: FewChanges, num_fresh: int) -> Sizes:
        """Returns what `sizes` does, for changes that take ``num_fresh`` blocks; see `add_few`."""
        rows = np.array(changes.rows) if changes.rows else NO_ROWS
        return self._sizes(extra, rows, num_fresh, num_fresh if self.zeroes else 0)

    def _sizes(
        self, extra: int, rows: np.ndarray, fresh: int = 0, zeroed: int = 0, copied: int = 0
    ) -> Sizes:
        if self.is_empty:
            return Sizes(rows.size, fresh, zeroed, copied, 0, extra)
        return Sizes(
            changed_rows=_distinct([*self._rows, rows] if rows.size else self._rows).size,
            block_ids=fresh + sum([entries.runs.num_cells for entries in self._entries]),
            zero_ids=zeroed + sum([entries.num_zeroed for entries in self._entries]),
            block_copies=copied + sum([copies.groups.size for copies in self._copies]),
            row_copies=len(self._row_copies()),
            extra=extra,
        )

    def write(self, shape: StepShape, data: np.ndarray, books: Books) -> None:
        """Writes all pending changes into an upload, and clears them."""
        entries, changed = joined_entries(self._entries), _distinct(self._rows)
        write_entries(shape, data, entries, changed, books.row_lengths(changed))
        if self.zeroes:
            write_zero_ids(shape, data, *entries.zero_ids(len(shape.growths)))
        if self._copies or self._device_rows:
            write_copies(shape, data, self._block_copies(), self._row_copies())
        self._forget()

    def _block_copies(self) -> Copies:
        """Returns all block copies, ordered by group."""
        if len(self._copies) < 2:
            return self._copies[0] if self._copies else NO_COPIES
        joined = Copies(*map(np.concatenate, zip(*self._copies, strict=True)))
        order = joined.groups.argsort(kind="stable")
        return Copies(*(part[order] for part in joined))

    def _row_copies(self) -> np.ndarray:
        """Returns pairs of a device row and the row that its content goes to, int64[M, 2]."""
        if not self._device_rows:
            return NO_ROW_COPIES
        pairs = [(device, row) for row, device in self._device_rows.items() if device != row]
        return np.array(pairs, np.int64).reshape(-1, 2)


def _distinct(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns each row once; the rows of one change are distinct already."""
    if len(parts) == 1:
        return parts[0]
    if all([part.size == 1 for part in parts]):
        return np.array(sorted({part.item() for part in parts}))
    return np.unique(np.concatenate([NO_ROWS, *parts]))


def _swapped(rows: np.ndarray, first: int, second: int) -> np.ndarray:
    return np.where(rows == first, second, np.where(rows == second, first, rows))
