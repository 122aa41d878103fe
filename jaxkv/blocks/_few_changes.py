"""Changes that a step of a few requests makes to the books, in plain ints. NumPy only.

The results equal those of `jaxkv.blocks._changes`. For a few numbers, plain ints take a fraction
of the time of NumPy arrays.
"""

import operator
from collections.abc import Sequence

import numpy as np

from jaxkv._internal.numbers import INT32_MAX
from jaxkv.blocks._books import Books, Changes
from jaxkv.blocks._runs import Run, Runs
from jaxkv.blocks._sharing import shared_cells

FEW = 8  # rows times groups up to which ints are faster than arrays
_group = operator.itemgetter(0)


def are_few(books: Books, rows: np.ndarray) -> bool:
    """Returns whether `changes_of_few` supports these rows and is faster than arrays."""
    return rows.size * len(books.rules.growths) <= FEW and not books.rules.aligned.size


def changes_of_few(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Returns the changes that let a few rows grow, even if too few blocks are free.

    The arguments are those of `jaxkv.blocks._changes.plan_changes`. Groups of "align" states are
    not supported.
    """
    limit, numbers = books.unchanged_until.item, (rows.tolist(), computed.tolist(), totals.tolist())
    asked = [each for each in zip(*numbers, strict=True) if each[2] > limit(each[0])]
    if not asked:
        return None
    if len(asked) < rows.size:
        rows = np.array([row for row, _, _ in asked])
    shares = books.any_may_share(rows)
    fresh: list[Run] = []
    dropped: list[Run] = []
    held: list[list[list[int]]] = []
    unchanged_until: list[int] = []
    for row, done, total in asked:
        of_row = books.held_of(row)
        unchanged_until.append(_grow(books, row, done, total, of_row, fresh, dropped))
        held.append(of_row)
    shared = shared_cells(books, [each[0] for each in asked], held) if shares else []
    if shared or len(asked) > 1:
        fresh += [cell for cell, _, _ in shared]
        fresh.sort(key=_group)
        dropped.sort(key=_group)
    copied = np.zeros(len(fresh), bool)
    if shared:
        copies = {cell for cell, _, is_read in shared if is_read}
        copied[:] = [run in copies for run in fresh]
    after = held[0] if len(held) == 1 else np.array(held).transpose(1, 2, 0)
    until, given_back = np.array(unchanged_until), Runs.listed(dropped)
    return Changes(rows, Runs.listed(fresh), copied, bool(shared), given_back, after, until, shares)


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
            end = needed if needed > before else before
            until = (end - drafts) * block
        if kind == "sliding" or kind == "chunked":
            if kind == "sliding":
                seen = (computed + 1 - window) // block
                seen = seen if seen > first else first
                left = (seen + 1) * block + window - 1
            else:
                left = computed - computed % chunk + chunk
                seen = max(first, (left - chunk) // block)
            until = left if left < until else until
            if seen > first:
                if before > first:
                    dropped.append((group, row, first, min(seen, before) - first))
                firsts[group] = begin = seen
        if until < unchanged_until:
            unchanged_until = until
        if before > begin:
            begin = before
        if end > begin:
            fresh.append((group, row, begin, end - begin))
            ends[group] = end
    return unchanged_until
