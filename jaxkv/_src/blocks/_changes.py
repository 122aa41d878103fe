"""Changes that a step makes to rows: blocks that they take, release and replace. NumPy only.

`RequestState.needs_no_change_until` has, for each row, the number of tokens up to which it needs no
change, so a step that changes nothing costs one comparison.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxkv._src.blocks._cells import NO_CELLS, Cells, Changes, SharedCell
from jaxkv._src.blocks._pool import OutOfBlocksError
from jaxkv._src.blocks._state import RequestState, holds
from jaxkv._src.internal.numbers import NULL_BLOCK


def plan_changes(
    state: RequestState, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
) -> Changes | None:
    """Returns the changes that let rows grow to ``totals`` tokens; None if there are none.

    Args:
      rows: int64[N], table rows of the requests of a step.
      computed, totals: int64[N], tokens of each row before and after the step.

    Raises:
      OutOfBlocksError: too few blocks are free.
    """
    changing, aligned = totals > state.needs_no_change_until[rows], state.growth.aligned
    if aligned.size:  # a step shorter than its `grow` needs earlier states
        first = state.allocated(rows)[1, aligned]
        changing |= (totals <= first * state.growth.block_tokens[aligned]).any(0)
    index = changing.nonzero()[0]
    if not index.size:
        return None
    rows = rows[index]
    changes = _growth_of_rows(state, index, rows, computed[index], totals[index])
    shared: list[SharedCell] = []
    if state.pool.may_copy_on_write and np.count_nonzero(state.may_share[rows]):
        shared = _shared_cells(state, rows, changes.allocated)
    needed, free = _blocks_needed(state, changes, shared), state.pool.num_free_blocks
    if needed > free:  # holders overwrite what is only cached
        kept = {cell.block_id for cell in shared if not state.pool.others_of(cell.block_id)}
        if needed - len(kept) > free:
            raise OutOfBlocksError(needed - len(kept), free)
        shared = [cell for cell in shared if cell.block_id not in kept]
        changes = changes._replace(given_up=np.array(list(kept), np.int32))
    return _with_shared(state, changes, shared) if shared else changes


def _blocks_needed(state: RequestState, changes: Changes, shared: Sequence[SharedCell]) -> int:
    """Returns how many free blocks changes need, beyond those that they release first."""
    needed = changes.fresh.num + len(shared)
    if needed > state.pool.num_free_blocks and changes.dropped.num:
        needed -= int((state.pool.others_of(state.ids_at(changes.dropped)) == 0).sum())
    return needed


def _with_shared(state: RequestState, changes: Changes, shared: Sequence[SharedCell]) -> Changes:
    """Adds cells that get a block of their own to changes; the device has to learn of them."""
    synced = state.synced.take(changes.rows, axis=1) if changes.synced is None else changes.synced
    at = {row: i for i, row in enumerate(changes.rows.tolist())}
    for group, row, logical_block, *_ in shared:
        synced[group, at[row]] = min(synced[group, at[row]], logical_block)
    return changes._replace(shared=shared, synced=synced)


def _growth_of_rows(
    state: RequestState,
    index: np.ndarray,
    rows: np.ndarray,
    computed: np.ndarray,
    totals: np.ndarray,
) -> Changes:
    """Returns the changes of rows, but for blocks that are shared."""
    growth, before, aligned = state.growth, state.allocated(rows), state.growth.aligned
    after = before.copy()
    first, end = after[1], after[2]
    np.maximum(end, growth.end_block(totals), out=end)
    if growth.crossed.size:
        end[growth.crossed] = state.encoder_blocks[growth.crossed][:, rows]
    if aligned.size:
        end[aligned] = before[2, aligned]  # `_aligned_changes` handles these groups
    dropped = NO_CELLS
    if growth.has_windows:  # a released logical block never gets a block again
        np.maximum(first, growth.first_block(computed), out=first)
        dropped = Cells.between(rows, before[1], first)
    fresh, synced = Cells.between(rows, before[2], end), None
    if aligned.size:
        synced = state.synced.take(rows, axis=1)
        after[:, aligned] = growth.aligned_range(computed, totals)
        more, less = _aligned_changes(state, rows, before, after, synced)
        fresh, dropped = Cells.joined([fresh, more]), Cells.joined([dropped, less])
    until = growth.needs_no_change_until(computed, after)
    return Changes(rows, fresh, dropped, (), after, until, synced, index)


def _aligned_changes(
    state: RequestState, rows: np.ndarray, before: np.ndarray, after: np.ndarray, synced: np.ndarray
) -> tuple[Cells, Cells]:
    """Returns fresh and dropped cells of "align" states; lowers ``synced`` to the fresh ones.

    A row holds the source and the newest states. Its logical blocks before and after the step are
    compared one by one, because a step that is shorter than its `grow` can move them back.
    """
    fresh, dropped = [NO_CELLS], [NO_CELLS]
    for group in state.growth.aligned:
        offsets = np.arange(1 + state.growth.speculative_blocks[group, 0])
        for cells, inside, outside in (
            (fresh, after[:, group], before[:, group]),
            (dropped, before[:, group], after[:, group]),
        ):
            logical_blocks = np.column_stack([inside[0], inside[1][:, None] + offsets])
            only = (
                holds(inside, logical_blocks)
                & ~holds(outside, logical_blocks)
                & (logical_blocks >= 0)
            )
            only[:, 1:] &= logical_blocks[:, 1:] != logical_blocks[:, :1]  # the source counts once
            index, at = only.nonzero()
            cells.append(Cells(np.full(index.size, group), rows[index], logical_blocks[index, at]))
            if cells is fresh:
                np.minimum.at(synced[group], index, logical_blocks[index, at])
    return Cells.joined(fresh), Cells.joined(dropped)


# --- shared blocks ----------------------------------------------------------------------


def _shared_cells(state: RequestState, rows: np.ndarray, after: np.ndarray) -> list[SharedCell]:
    """Returns the cells that need a block of their own, because the step writes a shared one.

    Args:
      rows: int64[N], rows of the step.
      after: int64[3, G, N], source, first and end of each row after the step.
    """
    shared: list[SharedCell] = []
    writers: Counter[int] = Counter()
    may_copy = state.may_copy(rows)
    after = after[..., may_copy].transpose(2, 1, 0)
    for row, held in zip(rows[may_copy].tolist(), after.tolist(), strict=True):
        for cell in _of_row(state, row, held):
            # Of holders that all write in this step, the last one keeps a block that is not kept.
            writers[cell.block_id] += 1
            others = state.pool.others_of(cell.block_id)
            if writers[cell.block_id] <= others or state.pool.read_only_until[cell.block_id]:
                shared.append(cell)
    # By group, so that blocks are taken and given back group by group.
    return sorted(shared, key=lambda cell: cell.group)


def _of_row(state: RequestState, row: int, after: Sequence[Sequence[int]]) -> Iterator[SharedCell]:
    """Yields the cells of a row whose block the row may not overwrite with its next tokens."""
    computed, before = int(state.computed[row]), zip(*state.allocated_in(row), strict=True)
    for group, (held, (_, first, end)) in enumerate(zip(before, after, strict=True)):
        ids, tokens = state.logical_blocks_of(row, group), state.block_tokens[group]
        for logical_block in _written(state, group, computed // tokens, held):
            block_id = int(ids[logical_block])
            if first <= logical_block < end and block_id != NULL_BLOCK:
                if state.pool.must_copy(block_id, computed):
                    is_read = logical_block * tokens < computed
                    yield SharedCell(group, row, logical_block, block_id, is_read)


def _written(
    state: RequestState, group: int, next_block: int, held: Sequence[int]
) -> Iterable[int]:
    """Returns the allocated logical blocks of a row that its next tokens may overwrite."""
    source, first, end = held
    if group in state.growth.crossed:
        return ()
    if group in state.growth.aligned:  # the newest state may move back to any of them
        return sorted({*range(first, end), source})
    return range(max(first, next_block), end)
