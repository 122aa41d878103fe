"""TableUpdates of an upload for the device: table cells, zeroed and copied blocks. NumPy only.

It carries the logical blocks that its own requests need and the device does not know, as
`RequestState.synced` says. Blocks that other requests have taken wait until these compute.
"""

from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._cells import NO_CELLS, NO_IDS, Cells, Changes
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.uploads import StepShape, put, write_copies


class TableUpdates(NamedTuple):
    """Changes that an upload tells the device of.

    rows: rows of the step that change.
    cells: cells of those rows that the device does not have yet.
    synced: `RequestState.synced` of the rows afterwards, which are their lengths on the device.
    is_stale: bool[E], or one for all: whether the rows have more blocks than the device knows then.
    num_zeroed, num_copied: blocks to zero and to copy.
    """

    rows: np.ndarray  # int64[E]
    cells: Cells
    synced: np.ndarray  # int64[G, E]
    is_stale: np.ndarray | bool = False
    num_zeroed: int = 0
    num_copied: int = 0


def find_updates(
    state: RequestState, rows: np.ndarray, totals: np.ndarray, changes: Changes | None
) -> TableUpdates | None:
    """Returns the table updates of a step before it makes its changes; None without any.

    Args:
      rows: int64[N], rows of the step.
      totals: int64[N], tokens of each row after the step.
    """
    updates = None
    if (changes is not None and changes.shared) or (
        state.has_stale and np.count_nonzero(state.is_stale[rows])
    ):
        updates = _updates_of_rows(state, rows, totals, changes)
    elif changes is not None:  # the device knows the rows as they were before the changes
        num_zeroed = _num_zeroed(state, changes.fresh, changes) if state.zeroes else 0
        updates = TableUpdates(changes.rows, changes.fresh, changes.allocated[2], False, num_zeroed)
    return _with_copies(state, updates) if state.copies else updates


def _updates_of_rows(
    state: RequestState, rows: np.ndarray, totals: np.ndarray, changes: Changes | None
) -> TableUpdates:
    """Returns the table updates of rows that change or are stale."""
    is_told, growth = state.is_stale[rows], state.growth
    if changes is not None:
        is_told[changes.index] = True
    index = is_told.nonzero()[0]
    rows, totals = rows[index], totals[index]
    held, synced, shared = state.allocated(rows), state.synced.take(rows, axis=1), ()
    if changes is not None:
        at, shared = index.searchsorted(changes.index), changes.shared
        held[:, :, at] = changes.allocated
        if changes.synced is not None:
            synced[:, at] = changes.synced
    source, first, end = held
    needed = growth.end_block(totals)
    for groups in (growth.crossed, growth.aligned):
        if groups.size:  # these need all that they hold
            needed[groups] = end[groups]
    cells = Cells.between(rows, np.maximum(first, synced), needed)
    if growth.aligned.size:
        groups, at = ((source < first) & (source >= synced)).nonzero()
        cells = Cells.joined([cells, Cells(groups, rows[at], source[groups, at])])
    np.maximum(synced, needed, out=synced)
    is_stale = (synced < end).any(axis=0)
    num_zeroed = _num_zeroed(state, cells, changes) if state.zeroes else 0
    return TableUpdates(
        rows, cells, synced, is_stale, num_zeroed, sum(cell.is_read for cell in shared)
    )


def _num_zeroed(state: RequestState, cells: Cells, changes: Changes | None) -> int:
    """Returns how many blocks an upload zeroes: fresh ones, unless they start as copies."""
    if changes is not None and cells is changes.fresh:
        if state.zeroes_all:
            return cells.num
        return int(np.count_nonzero(state.groups_to_zero[cells.groups]))
    ids = state.ids_at(cells)
    fresh = (ids == NULL_BLOCK) | state.pool.is_fresh[ids]
    for cell in () if changes is None else changes.shared:
        at = (cells.groups == cell.group) & (cells.rows == cell.row)
        fresh[at & (cells.logical_blocks == cell.logical_block)] = not cell.is_read
    fresh &= state.groups_to_zero[cells.groups]
    num = int(np.count_nonzero(fresh))
    if state.growth.crossed.size:  # rows share the encoder blocks of a request that only grew
        known = ids[fresh & (ids != NULL_BLOCK)]
        num -= known.size - np.unique(known).size
    return num


def _with_copies(state: RequestState, updates: TableUpdates | None) -> TableUpdates:
    """Adds the copies that earlier calls of `grow` have scheduled.

    The device learns of the cells of these copies at once, so that a later step of their requests
    has no more to tell than others.
    """
    if updates is None:
        updates = TableUpdates(NO_IDS, NO_CELLS, NO_IDS)
    copies, told = state.copies.pending, set(updates.rows.tolist())
    cells = [
        (group, row, logical_block)
        for (group, row, logical_block, *_), new in copies
        if row not in told
        and logical_block == state.synced[group, row]
        and state.logical_blocks_of(row, group)[logical_block] == new
    ]
    more = Cells(*np.array(cells, np.int64).reshape(-1, 3).T)
    num_copied = updates.num_copied + len(copies)
    return updates._replace(cells=Cells.joined([updates.cells, more]), num_copied=num_copied)


def write_updates(
    state: RequestState,
    shape: StepShape,
    data: np.ndarray,
    updates: TableUpdates,
    taken: np.ndarray | None,
) -> None:
    """Writes table updates into an upload, after the changes, and records what the device knows."""
    groups, rows, logical_blocks = cells = updates.cells
    ids = state.ids_at(cells) if taken is None else taken
    ends = state.group_ends(groups)
    put(shape, data, changed_rows=updates.rows, row_lengths=updates.synced.T.reshape(-1))
    if ids.size:
        put(
            shape,
            data,
            entry_rows=rows,
            entry_logical_blocks=logical_blocks,
            entry_ids=ids,
            entry_ends=ends,
        )
    if updates.num_zeroed:
        zeroed = ids
        if taken is None or not state.zeroes_all:
            at = (state.pool.is_fresh[ids] & state.groups_to_zero[groups]).nonzero()[0]
            if state.growth.crossed.size:  # see `_num_zeroed`
                at = np.sort(at[np.unique(ids[at], return_index=True)[1]])
            zeroed, ends = ids[at], state.group_ends(groups[at])
        put(shape, data, zero_ids=zeroed, zero_ends=ends)
        state.pool.is_fresh[zeroed] = False
    if state.copies:
        copies = [(cell.group, cell.block_id, new) for cell, new in state.copies.pending]
        write_copies(shape, data, copies)
        state.copies.clear()
        state.synced[groups, rows] = np.maximum(state.synced[groups, rows], logical_blocks + 1)
    state.mark_synced(updates.rows, updates.synced, updates.is_stale)
