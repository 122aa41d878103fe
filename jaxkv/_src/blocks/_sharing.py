"""Cells whose shared block a step is about to write, and which must replace it. No jax."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv._src.blocks._books import Books
from jaxkv._src.blocks._pool import BlockPool
from jaxkv._src.blocks._runs import Run
from jaxkv._src.internal.numbers import NULL_BLOCK

Columns = Sequence[Sequence[int]]  # source, first and end of a row, each over the groups
#: a cell, its block, and whether the block is copied, because the request still reads it
Shared = tuple[Run, int, bool]


def shared_cells(books: Books, rows: Iterable[int], after: Iterable[Columns]) -> list[Shared]:
    """Returns the cells that need a block of their own, because the step writes a shared one.

    Args:
      rows: rows of the step.
      after: source, first and end of each row after the step.
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
    """Returns the columns of a group that a row holds and that its next tokens may overwrite.

    Args:
      kind: the kind of the group's `Rule`.
      next_column: column of the next token.
      held, then: source, first and end of the row before and after the step.
    """
    source, first, end = held
    if kind == "aligned":
        return [at for at in range(then[1], then[2]) if at == source or first <= at < end]
    return range(0) if kind == "cross" else range(max(first, next_column), end)


def _keeps_content(position: int, computed: int) -> bool:
    """Returns whether a block that begins at ``position`` holds tokens that are still read."""
    return position < computed


def _without_last_holders(pool: BlockPool, shared: Sequence[Shared]) -> list[Shared]:
    """Drops the last cell of each block that all its holders are about to write in this step.

    The last holder keeps the block, unless its content is kept for later prompts.
    """
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
