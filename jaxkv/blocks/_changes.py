"""The effect of a step on the books: which blocks requests take and give back. NumPy only.

One number per request says until which length nothing changes, so a step that changes nothing
costs one comparison.
"""

import numpy as np

from jaxkv._internal.numbers import NULL_BLOCK, cdiv
from jaxkv.blocks._books import Books, Changes, holds
from jaxkv.blocks._few_changes import are_few, changes_of_few
from jaxkv.blocks._pool import OutOfBlocksError
from jaxkv.blocks._runs import NO_IDS, NO_RUNS, Runs
from jaxkv.blocks._sharing import shared_cells


def plan_changes(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Works out what growing rows to ``totals`` tokens changes; None: nothing.

    Args:
      rows: int64[N], of the requests of a step.
      computed, totals: int64[N], tokens of each before and after the step.

    Raises:
      OutOfBlocksError: not enough free blocks.
    """
    changes = _changes_now(books, rows, computed, totals)
    if changes is None:
        return None
    needed, free = _blocks_needed(books, changes), books.pool.num_free_blocks
    if needed > free:
        kept = _kept_only(books, changes)
        if needed - kept.size > free:
            raise OutOfBlocksError(needed, free)
        with books.pool.ignoring(kept):  # nothing is given up before the step is accepted
            again = _changes_now(books, rows, computed, totals)
        changes = changes if again is None else again._replace(given_up=kept)
    return changes


def _changes_now(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """As `plan_changes`, whether there are blocks for them or not."""
    if are_few(books, rows):
        return changes_of_few(books, rows, computed, totals)
    changing, aligned = totals > books.quiet_until[rows], books.rules.aligned
    if aligned.size:  # a shorter chunk than announced needs earlier states
        first = books.held(rows)[1, aligned]
        changing |= (totals <= first * books.rules.block[aligned]).any(0)
    index = changing.nonzero()[0]
    if not index.size:
        return None
    return _changes(books, rows[index], computed[index], totals[index])


def _changes(books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray) -> Changes:
    rules, before = books.rules, books.held(rows)
    after = before.copy()
    first, end = after[1], after[2]
    np.maximum(end, rules.ends(totals), out=end)
    if rules.crossed.size:
        end[rules.crossed] = books.encoder_blocks[rules.crossed][:, rows]
    dropped = NO_RUNS
    if rules.has_windows:  # a block that was given back stays so
        np.maximum(first, rules.firsts_visible(computed), out=first)
        dropped = Runs.between(rows, before[1], np.minimum(first, before[2]))
    if rules.aligned.size:
        end[rules.aligned] = before[2, rules.aligned]  # neither fresh nor dropped so far
    taken = np.maximum(before[2], first) if rules.has_windows else before[2]
    fresh = Runs.between(rows, taken, end)
    if rules.aligned.size:
        _set_aligned(books, rows, totals, after)
        more, less = _aligned_changes(books, rows, before, after)
        fresh, _ = Runs.joined([fresh, more]).by_group()
        dropped, _ = Runs.joined([dropped, less]).by_group()
    until = rules.quiet_until(computed, after)
    held = after if rows.size > 1 else after[:, :, 0]
    if books.any_may_share(rows):
        return Changes(rows, *_unshare(books, rows, fresh, after), dropped, held, until, True)
    return Changes(rows, fresh, np.zeros(fresh.size, bool), False, dropped, held, until, False)


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
    shared = shared_cells(books, rows.tolist(), held.transpose(2, 0, 1).tolist())
    cells = Runs.listed([cell for cell, _, _ in shared])
    merged, order = Runs.joined([fresh, cells]).by_group()
    copies = [False] * fresh.size + [is_read for _, _, is_read in shared]
    return merged, np.array(copies, bool)[order], bool(shared)


def _blocks_needed(books: Books, changes: Changes) -> int:
    """Returns the free blocks that changes need, besides those that they give back first."""
    needed = changes.fresh.num_cells
    if needed > books.pool.num_free_blocks and changes.dropped.num_cells:
        ids = books.ids_at(changes.dropped)
        needed -= int((books.pool.others_of(ids) == 0).sum())
    return needed


def _kept_only(books: Books, changes: Changes) -> np.ndarray:
    """Returns the blocks that are replaced only because their content is kept.

    When blocks run out, their only holder writes over them instead.
    """
    if not changes.replaces:
        return NO_IDS
    ids = books.ids_at(changes.fresh)
    ids = ids[ids != NULL_BLOCK]
    return ids[books.pool.others_of(ids) == 0]
