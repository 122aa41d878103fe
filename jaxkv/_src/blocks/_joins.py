"""Merges the table entries of several changes, so that each cell occurs once. NumPy only."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv._src.blocks._runs import FEW, NO_IDS, NO_RUNS, Runs
from jaxkv._src.blocks._write import Entries

# First column of a run, number of columns, index of its first id, whether its blocks are zeroed.
Piece = tuple[int, int, int, bool]
NO_ENTRIES = Entries(NO_RUNS, NO_IDS, np.zeros(0, bool))


def joined_entries(parts: Sequence[Entries]) -> Entries:
    """Returns all entries, ordered by group; later entries of a cell replace earlier ones."""
    if len(parts) < 2:
        return parts[0] if parts else NO_ENTRIES
    are_few = sum(part.runs.size for part in parts) <= FEW and all(p.runs.are_few for p in parts)
    return _joined_runs(parts) if are_few else _joined_cells(parts)


def _joined_cells(parts: Sequence[Entries]) -> Entries:
    listed = [(*e.runs.cells(), e.block_ids, e.of_cells(e.zeroed)) for e in parts]
    groups, rows, columns, ids, zeroed = map(np.concatenate, zip(*listed, strict=True))
    cells = (groups * (rows.max() + 1) + rows) * (columns.max() + 1) + columns
    _, last = np.unique(cells[::-1], return_index=True)
    kept = np.sort(groups.size - 1 - last)
    kept = kept[groups[kept].argsort(kind="stable")]
    runs = Runs.of_cells(groups[kept], rows[kept], columns[kept])
    return Entries(runs, ids[kept], zeroed[kept])


def _joined_runs(parts: Sequence[Entries]) -> Entries:
    """Returns the same entries as `_joined_cells`, by a loop over runs."""
    pieces: dict[tuple[int, int], list[Piece]] = {}  # by group and row
    at = 0
    for part in parts:
        for (group, row, *run), zeroed in zip(part.runs.ints, part.zeroed.tolist(), strict=True):
            begin, count = run
            earlier = pieces.get((group, row), ())
            left = [rest for piece in earlier for rest in _outside(piece, begin, begin + count)]
            pieces[group, row] = [*left, (begin, count, at, zeroed)]
            at += count
    ids = np.concatenate([part.block_ids for part in parts])
    found = sorted(
        (group, at, row, begin, count, zeroed)
        for (group, row), of_row in pieces.items()
        for begin, count, at, zeroed in of_row
    )
    return Entries(
        Runs.listed([(group, row, begin, count) for group, _, row, begin, count, _ in found]),
        np.concatenate([ids[at : at + count] for _, at, _, _, count, _ in found]),
        np.array([each[-1] for each in found], bool),
    )


def _outside(piece: Piece, begin: int, end: int) -> Iterator[Piece]:
    """Yields the parts of a piece outside the columns ``begin .. end - 1``."""
    first, count, at, zeroed = piece
    if end <= first or first + count <= begin:
        yield piece
        return
    if first < begin:
        yield first, begin - first, at, zeroed
    if end < first + count:
        yield end, first + count - end, at + end - first, zeroed
