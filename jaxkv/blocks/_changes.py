"""The effect of a step on the books: which blocks requests take and give back. NumPy only.

One number per request says until which length nothing changes, so a step that changes nothing
costs one comparison.
"""

import numpy as np

from jaxkv._internal.numbers import NULL_BLOCK, cdiv
from jaxkv.blocks._books import Books, Changes, holds
from jaxkv.blocks._pool import OutOfBlocksError
from jaxkv.blocks._runs import NO_RUNS, Runs


def plan_changes(books: Books, rows: np.ndarray, totals: np.ndarray) -> Changes | None:
    """Works out what growing rows to ``totals`` tokens changes; None: nothing.

    Args:
      rows: int64[N], of the requests of a step.
      totals: int64[N], tokens of each after the step.

    Raises:
      OutOfBlocksError: not enough free blocks.
    """
    changing = totals > books.quiet_until[rows]
    aligned = books.rules.aligned
    if aligned.size:  # a shorter chunk than announced needs earlier states
        first = books.held(rows)[1, aligned]
        changing |= (totals <= first * books.rules.block[aligned]).any(0)
    index = changing.nonzero()[0]
    if not index.size:
        return None
    changes = _changes(books, rows[index], totals[index])
    _check_room(books, changes)
    return changes


def _changes(books: Books, rows: np.ndarray, totals: np.ndarray) -> Changes:
    rules, before = books.rules, books.held(rows)
    after = before.copy()
    _, first, end = after
    np.maximum(end, rules.ends(totals), out=end)
    if rules.crossed.size:
        end[rules.crossed] = books.encoder_blocks[rules.crossed][:, rows]
    dropped = NO_RUNS
    if rules.has_windows:  # a block that was given back stays so
        np.maximum(first, rules.firsts_visible(books.computed[rows]), out=first)
        dropped = Runs.between(rows, before[1], np.minimum(first, before[2]))
    if rules.aligned.size:
        end[rules.aligned] = before[2, rules.aligned]  # neither fresh nor dropped so far
    fresh = Runs.between(rows, np.maximum(before[2], first), end)
    if rules.aligned.size:
        _set_aligned(books, rows, totals, after)
        more, less = _aligned_changes(books, rows, before, after)
        fresh, _ = Runs.joined([fresh, more]).by_group()
        dropped, _ = Runs.joined([dropped, less]).by_group()
    if books.pool.has_shared_blocks and books.may_share[rows].any():
        return Changes(rows, *_unshare(books, rows, fresh, after), dropped, after)
    return Changes(rows, fresh, np.zeros(fresh.groups.size, bool), False, dropped, after)


def _set_aligned(books: Books, rows: np.ndarray, totals: np.ndarray, held: np.ndarray) -> None:
    """Sets the columns of "align" states that rows hold: the source and the newest ones."""
    rules, groups = books.rules, books.rules.aligned
    ends = rules.ends(totals)[groups]
    held[0, groups] = cdiv(books.computed[rows], rules.block[groups]) - 1
    held[1, groups] = ends - 1 - rules.drafts[groups]
    held[2, groups] = ends


def _aligned_changes(
    books: Books, rows: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[Runs, Runs]:
    """Returns the fresh and the dropped cells of "align" states.

    A row holds the source and the newest states. Both sets are small, and either may have
    columns that the other lacks, also in between: a shorter chunk can follow an announced
    longer one.
    """
    fresh: list[Runs] = []
    dropped: list[Runs] = []
    for group in books.rules.aligned:
        offsets = np.arange(1 + books.rules.drafts[group, 0])
        for cells, these, those in (
            (fresh, after[:, group], before[:, group]),
            (dropped, before[:, group], after[:, group]),
        ):
            columns = np.column_stack([these[0], these[1][:, None] + offsets])
            only = holds(these, columns) & ~holds(those, columns) & (columns >= 0)
            only[:, 1:] &= columns[:, 1:] != columns[:, :1]  # the source counts once
            index, at = only.nonzero()
            groups = np.full(index.size, group)
            cells.append(Runs.of_cells(groups, rows[index], columns[index, at]))
    return Runs.joined(fresh), Runs.joined(dropped)


def _unshare(
    books: Books, rows: np.ndarray, fresh: Runs, held: np.ndarray
) -> tuple[Runs, np.ndarray, bool]:
    """Adds the shared blocks that rows are about to write: each gets a block of its own.

    Args:
      rows: of the step.
      fresh: cells that the step takes anyway.
      held: int64[3, G, N], by the rows afterwards.

    Returns:
      The fresh cells; which of them start as copies, because their block holds content that
      the request still reads; and whether any of them has a block now.
    """
    shared: list[Runs] = []
    copied: list[np.ndarray] = []
    for index in np.flatnonzero(books.may_share[rows]):
        row = int(rows[index])
        for group in range(len(books.rules.growths)):
            _, first, end = held[:, group, index].tolist()
            columns = _written(books, row, group, first, end)
            ids = books.columns_of(row, group)[columns]
            at = columns[(ids != NULL_BLOCK) & (books.pool.references_of(ids) > 1)]
            shared.append(Runs.of_cells(np.full(at.size, group), np.full(at.size, row), at))
            copied.append(_keeps_content(books, row, group, at))
    cells, copies = Runs.joined(shared), np.concatenate(copied)
    leaves = ~_last_holders(books, cells)
    cells, copies = cells.chosen(leaves), copies[leaves]
    merged, order = Runs.joined([fresh, cells]).by_group()
    is_copied = np.concatenate([np.zeros(fresh.groups.size, bool), copies])[order]
    return merged, is_copied, bool(cells.num_cells)


def _written(books: Books, row: int, group: int, first: int, end: int) -> np.ndarray:
    """Returns the held columns, before ``end``, that the row's next tokens write over."""
    rules = books.rules
    if group in rules.crossed:
        return np.zeros(0, np.int64)
    begin = first if group in rules.aligned else int(books.computed[row] // rules.block[group, 0])
    columns = np.arange(begin, max(begin, end))
    return columns[holds(books.held(np.array([row]))[:, group], columns[None])[0]]


def _keeps_content(books: Books, row: int, group: int, columns: np.ndarray) -> np.ndarray:
    """Returns which written columns hold tokens, or a state, that the request still reads."""
    return columns * books.rules.block[group, 0] < books.computed[row]


def _last_holders(books: Books, cells: Runs) -> np.ndarray:
    """Returns, bool[K], the cells whose block all other holders leave in the same step."""
    ids = books.ids_at(cells)
    named, last, counts = np.unique(ids[::-1], return_index=True, return_counts=True)
    left_by_all = counts == books.pool.references_of(named)
    keeps = np.zeros(ids.size, bool)
    keeps[ids.size - 1 - last[left_by_all]] = True
    return keeps


def _check_room(books: Books, changes: Changes) -> None:
    needed, free = changes.fresh.num_cells, books.pool.num_free_blocks
    if needed <= free:
        return
    returned = 0
    if changes.dropped.num_cells:
        ids = books.ids_at(changes.dropped)
        returned = int((books.pool.references_of(ids) == 1).sum())
    if needed - returned > free:
        raise OutOfBlocksError(needed - returned, free)
