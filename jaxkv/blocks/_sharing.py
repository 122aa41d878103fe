"""Shared blocks that a step is about to write: who gets a block of its own. No jax."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv._internal.numbers import NULL_BLOCK
from jaxkv.blocks._books import Books
from jaxkv.blocks._pool import BlockPool
from jaxkv.blocks._runs import Run

Columns = Sequence[Sequence[int]]  # source, first and end of a row, of each group
#: one cell, its block, and whether the request still reads what is in it, so that it is copied
Shared = tuple[Run, int, bool]


def shared_cells(books: Books, rows: Iterable[int], after: Iterable[Columns]) -> list[Shared]:
    """Returns the cells of rows whose shared block the step writes: each gets one of its own.

    Args:
      rows: of the step.
      after: what each of them holds afterwards.
    """
    found: list[Shared] = []
    for row, held in zip(rows, after, strict=True):
        if books.may_share[row]:
            found += _of_row(books, row, held)
    return _without_last_holders(books.pool, found) if found else found


def _of_row(books: Books, row: int, after: Columns) -> list[Shared]:
    found: list[Shared] = []
    computed, before = int(books.computed[row]), books.held_of(row)
    for group, rule in enumerate(books.rules.of_groups):
        ids = books.columns_of(row, group)
        held, then = [part[group] for part in before], [part[group] for part in after]
        for column in _written(rule.kind, computed // rule.block, held, then):
            block_id = int(ids[column])
            if block_id != NULL_BLOCK and books.pool.must_copy(block_id, computed):
                is_read = _keeps_content(column * rule.block, computed)
                found.append(((group, row, column, 1), block_id, is_read))
    return found


def _written(
    kind: str, next_column: int, held: Sequence[int], then: Sequence[int]
) -> Iterable[int]:
    """Returns the columns of a group that a row holds and that its next tokens write over.

    Args:
      next_column: of the next token.
      held, then: source, first and end before the step and after it.
    """
    source, first, end = held
    if kind == "aligned":
        return [at for at in range(then[1], then[2]) if at == source or first <= at < end]
    return range(0) if kind == "cross" else range(max(first, next_column), end)


def _keeps_content(position: int, computed: int) -> bool:
    """Returns whether a written block that begins at a position holds what is still read."""
    return position < computed


def _without_last_holders(pool: BlockPool, shared: Sequence[Shared]) -> list[Shared]:
    """Leaves out the last cell of each block that all others leave in the same step."""
    leaving: dict[int, list[Run]] = {}
    for cell, block_id, _ in shared:
        leaving.setdefault(block_id, []).append(cell)
    others = pool.others_of(np.array(list(leaving))).tolist()
    keeps = {
        cells[-1]
        for (block_id, cells), count in zip(leaving.items(), others, strict=True)
        if len(cells) > count and not pool.kept_until[block_id]
    }
    return [each for each in shared if each[0] not in keeps]
