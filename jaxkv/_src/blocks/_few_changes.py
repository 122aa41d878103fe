"""Changes that a step of a few requests makes to the books, in plain ints. NumPy only.

The results equal those of `jaxkv.blocks._changes`. For a few numbers, plain ints take a fraction
of the time of NumPy arrays.
"""

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv._src.blocks._books import Books, Changes, FewChanges, RowStep
from jaxkv._src.blocks._runs import Run, Runs
from jaxkv._src.blocks._sharing import shared_cells
from jaxkv._src.internal.numbers import INT32_MAX

_group = operator.itemgetter(0)


def are_few(books: Books, num_rows: int) -> bool:
    """Returns whether ints are faster than arrays for a number of rows, and supported."""
    return num_rows <= books.rules.few_rows


def grow_rows(books: Books, steps: Iterable[RowStep]) -> FewChanges:
    """Returns the changes that let a few rows grow, as if no block was shared.

    Groups of "align" states are not supported.
    """
    changes = FewChanges([], [], [], [], [])
    rows, fresh, dropped, held, unchanged_until = changes
    limit = books.unchanged_until.item
    for row, computed, total in steps:
        if total > limit(row):
            of_row = books.held_of(row)
            unchanged_until.append(_grow(books, row, computed, total, of_row, fresh, dropped))
            rows.append(row)
            held.append(of_row)
    if len(rows) > 1:
        fresh.sort(key=_group)
        dropped.sort(key=_group)
    return changes


def changes_of_few(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Returns the changes that let a few rows grow, even if too few blocks are free.

    The arguments are those of `jaxkv.blocks._changes.plan_changes`. Groups of "align" states are
    not supported.
    """
    steps = zip(rows.tolist(), computed.tolist(), totals.tolist(), strict=True)
    changing, fresh, dropped, held, until = grow_rows(books, steps)
    if not changing:
        return None
    if len(changing) < rows.size:
        rows = np.array(changing)
    shares = books.any_may_share(rows)
    shared = shared_cells(books, changing, held) if shares else []
    if shared:
        fresh = sorted([*fresh, *(cell for cell, _, _ in shared)], key=_group)
    copied = np.zeros(len(fresh), bool)
    if shared:
        copies = {cell for cell, _, is_read in shared if is_read}
        copied[:] = [run in copies for run in fresh]
    after = held[0] if len(held) == 1 else np.array(held).transpose(1, 2, 0)
    taken, given_back = Runs.listed(fresh), Runs.listed(dropped)
    return Changes(rows, taken, copied, bool(shared), given_back, after, until, shares)


def _grow(
    books: Books,
    row: int,
    computed: int,
    total: int,
    held: Sequence[list[int]],
    fresh: list[Run],
    dropped: list[Run],
) -> int:
    """Appends the cells that a row takes to ``fresh``, and those that it releases to ``dropped``.

    Args:
      held: source, first and end, each a list over the groups; updated in place.

    Returns:
      The number of tokens up to which the row needs no further change.
    """
    _, firsts, ends = held
    unchanged_until = INT32_MAX
    for group, (block, drafts, window, chunk, kind) in enumerate(books.rules.of_groups):
        first = begin = firsts[group]
        end = before = ends[group]
        if kind == "cross":
            end, until = int(books.encoder_blocks[group, row]), INT32_MAX
        else:
            needed = -(-total // block) + drafts
            if needed > before:
                end = needed
            until = (end - drafts) * block
        if kind == "sliding":
            seen = (computed + 1 - window) // block
            if seen > first:
                begin = seen
            left = (begin + 1) * block + window - 1
            until = left if left < until else until
        elif kind == "chunked":
            left = computed - computed % chunk + chunk
            begin = max(first, (left - chunk) // block)
            until = min(left, until)
        if begin > first:
            firsts[group] = begin
            if before > first:
                dropped.append((group, row, first, min(begin, before) - first))
        if until < unchanged_until:
            unchanged_until = until
        if before > begin:
            begin = before
        if end > begin:
            fresh.append((group, row, begin, end - begin))
            ends[group] = end
    return unchanged_until
