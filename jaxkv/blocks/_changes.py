"""The effect of a step on the books: which blocks requests take and give back. NumPy only.

One number per request says until which length nothing changes, so a step that changes nothing
costs one comparison.
"""

import numpy as np

from jaxkv._internal.numbers import INT32_MAX, NULL_BLOCK, cdiv
from jaxkv.blocks._books import Books, Changes, holds
from jaxkv.blocks._pool import OutOfBlocksError
from jaxkv.blocks._runs import NO_IDS, NO_RUNS, Run, Runs

FEW = 8  # rows times groups that cost less as ints than as arrays


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
    changing = totals > books.quiet_until[rows]
    aligned = books.rules.aligned
    if aligned.size:  # a shorter chunk than announced needs earlier states
        first = books.held(rows)[1, aligned]
        changing |= (totals <= first * books.rules.block[aligned]).any(0)
    index = changing.nonzero()[0]
    if not index.size:
        return None
    rows, computed, totals = rows[index], computed[index], totals[index]
    changes = _changes_now(books, rows, computed, totals)
    needed, free = _blocks_needed(books, changes), books.pool.num_free_blocks
    if needed > free:
        kept = _kept_only(books, changes)
        if needed - kept.size > free:
            raise OutOfBlocksError(needed, free)
        with books.pool.ignoring(kept):  # nothing is given up before the step is accepted
            changes = _changes_now(books, rows, computed, totals)
        changes = changes._replace(given_up=kept)
    return changes


def _changes_now(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes:
    is_plain = not (books.rules.aligned.size or books.any_may_share(rows))
    if is_plain and rows.size * len(books.rules.growths) <= FEW:
        return _changes_of_few(books, rows, computed, totals)
    return _changes(books, rows, computed, totals)


def _changes_of_few(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes:
    """As `_changes`, in plain ints, for rows without shared blocks and "align" states."""
    held = books.held(rows)
    _, firsts, ends = held.tolist()
    quiet_until = [INT32_MAX] * rows.size
    tokens = computed.tolist(), totals.tolist()
    asked = list(zip(range(rows.size), rows.tolist(), *tokens, strict=True))
    fresh: list[Run] = []
    dropped: list[Run] = []
    for group, rule in enumerate(books.rules.of_groups):
        block, drafts, kind = rule.block, rule.drafts, rule.kind
        for i, row, done, total in asked:
            first, before = firsts[group][i], ends[group][i]
            if kind == "cross":
                end, until = int(books.encoder_blocks[group, row]), INT32_MAX
            else:
                end = -(-total // block) + drafts
                end = end if end > before else before
                until = (end - drafts) * block
            if kind == "window":
                seen, left = rule.seen(done, first)
                if seen > first:
                    if before > first:
                        dropped.append((group, row, first, min(seen, before) - first))
                    held[1, group, i] = first = seen
                until = left if left < until else until
            begin = before if before > first else first
            if end > begin:
                fresh.append((group, row, begin, end - begin))
                held[2, group, i] = end
            if until < quiet_until[i]:
                quiet_until[i] = until
    none, until = np.zeros(len(fresh), bool), np.array(quiet_until)
    return Changes(rows, Runs.listed(fresh), none, False, Runs.listed(dropped), held, until)


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
    if books.any_may_share(rows):
        return Changes(rows, *_unshare(books, rows, fresh, after), dropped, after, until)
    return Changes(rows, fresh, np.zeros(fresh.size, bool), False, dropped, after, until)


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
            computed = int(books.computed[row])
            at = columns[(ids != NULL_BLOCK) & books.pool.must_copy(ids, computed)]
            shared.append(Runs.of_cells(np.full(at.size, group), np.full(at.size, row), at))
            copied.append(_keeps_content(books, row, group, at))
    cells, copies = Runs.joined(shared), np.concatenate(copied)
    leaves = ~_last_holders(books, cells)
    cells, copies = cells.chosen(leaves), copies[leaves]
    merged, order = Runs.joined([fresh, cells]).by_group()
    is_copied = np.concatenate([np.zeros(fresh.size, bool), copies])[order]
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
    left_by_all &= books.pool.kept_until[named] == 0
    keeps = np.zeros(ids.size, bool)
    keeps[ids.size - 1 - last[left_by_all]] = True
    return keeps


def _blocks_needed(books: Books, changes: Changes) -> int:
    """Returns the free blocks that changes need, besides those that they give back first."""
    needed = changes.fresh.num_cells
    if needed > books.pool.num_free_blocks and changes.dropped.num_cells:
        ids = books.ids_at(changes.dropped)
        needed -= int((books.pool.references_of(ids) == 1).sum())
    return needed


def _kept_only(books: Books, changes: Changes) -> np.ndarray:
    """Returns the blocks that are replaced only because their content is kept.

    When blocks run out, their only holder writes over them instead.
    """
    if not changes.replaces:
        return NO_IDS
    ids = books.ids_at(changes.fresh)
    ids = ids[ids != NULL_BLOCK]
    return ids[books.pool.references_of(ids) == 1]
