"""The effect of a step of a few requests on the books, in plain ints. NumPy only.

It is the same as that of `jaxkv.blocks._changes`, in a fraction of the time that NumPy takes to
look at arrays of one element.
"""

import operator
from collections.abc import Sequence

import numpy as np

from jaxkv._internal.numbers import INT32_MAX
from jaxkv.blocks._books import Books, Changes
from jaxkv.blocks._runs import Run, Runs
from jaxkv.blocks._sharing import shared_cells

FEW = 8  # rows times groups that cost less as ints than as arrays
_group = operator.itemgetter(0)


def are_few(books: Books, rows: np.ndarray) -> bool:
    """Returns whether `changes_of_few` works the changes of rows out, and more quickly."""
    return rows.size * len(books.rules.growths) <= FEW and not books.rules.aligned.size


def changes_of_few(
    books: Books, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """As `jaxkv.blocks._changes.plan_changes`, for a few rows without "align" states."""
    quiet, numbers = books.quiet_until.item, (rows.tolist(), computed.tolist(), totals.tolist())
    asked = [each for each in zip(*numbers, strict=True) if each[2] > quiet(each[0])]
    if not asked:
        return None
    if len(asked) < rows.size:
        rows = np.array([row for row, _, _ in asked])
    shares = books.any_may_share(rows)
    fresh: list[Run] = []
    dropped: list[Run] = []
    held: list[list[list[int]]] = []
    quiet_until: list[int] = []
    for row, done, total in asked:
        of_row = books.held_of(row)
        quiet_until.append(_grow(books, row, done, total, of_row, fresh, dropped))
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
    until, given_back = np.array(quiet_until), Runs.listed(dropped)
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
    """Adds the cells that a row takes and gives back; returns until when nothing more changes.

    Args:
      held: source, first and end of each group; set to what the row holds afterwards.
    """
    _, firsts, ends = held
    quiet_until = INT32_MAX
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
        if until < quiet_until:
            quiet_until = until
        if before > begin:
            begin = before
        if end > begin:
            fresh.append((group, row, begin, end - begin))
            ends[group] = end
    return quiet_until
