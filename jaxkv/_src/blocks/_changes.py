"""Changes that a step makes to the books: blocks that rows take and release. NumPy only.

`Books.unchanged_until` has, for each row, the number of tokens up to which it needs no change, so
a step that changes nothing costs one comparison.
"""

import numpy as np

from jaxkv._src.blocks._books import Books, Changes, holds
from jaxkv._src.blocks._few_changes import are_few, changes_of_few
from jaxkv._src.blocks._pool import OutOfBlocksError
from jaxkv._src.blocks._runs import NO_IDS, NO_RUNS, Runs
from jaxkv._src.blocks._sharing import shared_cells
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv


def plan_changes(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Returns the changes that let rows grow to ``totals`` tokens; None if there are none.

    Args:
      rows: int64[N], table rows of the requests of a step.
      computed, totals: int64[N], tokens of each row before and after the step.

    Raises:
      OutOfBlocksError: too few blocks are free.
    """
    changes = _changes_now(books, rows, computed, totals)
    if changes is None:
        return None
    needed, free = _blocks_needed(books, changes), books.pool.num_free_blocks
    if needed > free:
        kept = _kept_only(books, changes)
        if needed - kept.size > free:
            raise OutOfBlocksError(needed, free)
        with books.pool.ignoring(kept):  # `Books.apply` gives them up, if the step is accepted
            again = _changes_now(books, rows, computed, totals)
        changes = changes if again is None else again._replace(given_up=kept)
    return changes


def _changes_now(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Returns the changes as `plan_changes` does, even if too few blocks are free."""
    if are_few(books, rows.size):
        return changes_of_few(books, rows, computed, totals)
    changing, aligned = totals > books.unchanged_until[rows], books.rules.aligned
    if aligned.size:  # a step shorter than its `grow` needs earlier states
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
    if rules.has_windows:  # a released column never gets a block again
        np.maximum(first, rules.firsts_visible(computed), out=first)
        dropped = Runs.between(rows, before[1], np.minimum(first, before[2]))
    if rules.aligned.size:
        end[rules.aligned] = before[2, rules.aligned]  # `_aligned_changes` handles these groups
    taken = np.maximum(before[2], first) if rules.has_windows else before[2]
    fresh = Runs.between(rows, taken, end)
    if rules.aligned.size:
        _set_aligned(books, rows, totals, after)
        more, less = _aligned_changes(books, rows, before, after)
        fresh, _ = Runs.joined([fresh, more]).by_group()
        dropped, _ = Runs.joined([dropped, less]).by_group()
    until = rules.unchanged_until(computed, after)
    held = after if rows.size > 1 else after[:, :, 0]
    if books.any_may_share(rows):
        return Changes(rows, *_unshare(books, rows, fresh, after), dropped, held, until, True)
    return Changes(rows, fresh, np.zeros(fresh.size, bool), False, dropped, held, until, False)


def _set_aligned(books: Books, rows: np.ndarray, totals: np.ndarray, held: np.ndarray) -> None:
    """Sets source, first and end of "align" states in ``held``, for rows after the step."""
    rules, groups = books.rules, books.rules.aligned
    ends = rules.ends(totals)[groups]
    held[0, groups] = cdiv(books.computed[rows], rules.block[groups]) - 1
    held[1, groups] = ends - 1 - rules.drafts[groups]
    held[2, groups] = ends


def _aligned_changes(
    books: Books, rows: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[Runs, Runs]:
    """Returns the fresh and the dropped cells of "align" states.

    A row holds the source and the newest states. The columns before and after the step are
    compared one by one, because a step that is shorter than its `grow` can move them back.
    """
    fresh: list[Runs] = []
    dropped: list[Runs] = []
    for group in books.rules.aligned:
        offsets = np.arange(1 + books.rules.drafts[group, 0])
        for cells, inside, outside in (
            (fresh, after[:, group], before[:, group]),
            (dropped, before[:, group], after[:, group]),
        ):
            columns = np.column_stack([inside[0], inside[1][:, None] + offsets])
            only = holds(inside, columns) & ~holds(outside, columns) & (columns >= 0)
            only[:, 1:] &= columns[:, 1:] != columns[:, :1]  # the source counts once
            index, at = only.nonzero()
            groups = np.full(index.size, group)
            cells.append(Runs.of_cells(groups, rows[index], columns[index, at]))
    return Runs.joined(fresh), Runs.joined(dropped)


def _unshare(
    books: Books, rows: np.ndarray, fresh: Runs, held: np.ndarray
) -> tuple[Runs, np.ndarray, bool]:
    """Adds a fresh cell for each shared block that a row is about to write.

    Args:
      rows: int64[N], rows of the step.
      fresh: cells that get a block anyway.
      held: int64[3, G, N], source, first and end of the rows after the step.

    Returns:
      All fresh cells; which of their runs start as copies, bool[K], because the request still
      reads the shared block; and whether any shared block is replaced.
    """
    shared = shared_cells(books, rows.tolist(), held.transpose(2, 0, 1).tolist())
    cells = Runs.listed([cell for cell, _, _ in shared])
    merged, order = Runs.joined([fresh, cells]).by_group()
    copies = [False] * fresh.size + [is_read for _, _, is_read in shared]
    return merged, np.array(copies, bool)[order], bool(shared)


def _blocks_needed(books: Books, changes: Changes) -> int:
    """Returns how many free blocks changes need, beyond those that they release first."""
    needed = changes.fresh.num_cells
    if needed > books.pool.num_free_blocks and changes.dropped.num_cells:
        ids = books.ids_at(changes.dropped)
        needed -= int((books.pool.others_of(ids) == 0).sum())
    return needed


def _kept_only(books: Books, changes: Changes) -> np.ndarray:
    """Returns the blocks with one holder that are replaced because their content is kept.

    When blocks run out, the holder overwrites that content instead.
    """
    if not changes.replaces:
        return NO_IDS
    ids = books.ids_at(changes.fresh)
    ids = ids[ids != NULL_BLOCK]
    return ids[books.pool.others_of(ids) == 0]
