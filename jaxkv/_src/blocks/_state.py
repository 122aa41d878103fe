"""The block tables and the progress of all requests, as arrays. NumPy only."""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS, Cells, Changes
from jaxkv._src.blocks._copies import PendingCopies
from jaxkv._src.blocks._pool import BlockPool
from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import SharedBlocks
from jaxkv._src.specs import GrowthTable


class RequestState:
    """Block tables of G groups, and the progress of the requests in their R rows.

    In each group, a row has allocated the logical blocks ``first .. end - 1`` and ``source``, the
    block of the recurrent state that the next token resumes from. ``source`` is -1 if there is
    none, and may lie inside the range.

    table: int32[R, W], the groups' logical blocks side by side; 0 (null) where none is allocated.
    starts: int64[G + 1], first logical block of each group in ``table``.
    computed: int64[R], tokens of each request that are in the cache.
    max_computed: int64[R], ``computed`` before any rewind.
    step_start: int64[R], ``computed`` before the last step.
    needs_no_change_until: int64[R], the number of tokens up to which a row holds what it must.
    may_share: bool[R], whether the next tokens of a row may go to a shared or cached block.
    may_be_shared_until: int64[R], number of first positions whose blocks may be shared or cached.
    encoder_tokens: int64[R].
    encoder_blocks: int64[G, R], the logical blocks of each request's encoder tokens.
    lost_ends: int64[G, R], the first end of a block of "all" states whose state may lie in the
      block of a draft instead of its own; 0: none does.
    synced: int64[G, R], allocated logical blocks below this one are on the device as they are here.
    is_stale: bool[R], whether a row has blocks that the device does not know.
    has_stale: whether any row is stale.
    unsynced_tokens: int64[R], computed tokens of a row that the device knows nothing of yet.
    copies: those that the next upload makes.
    groups_to_zero: bool[G], whether fresh blocks of a group are zeroed.
    zeroes, zeroes_all: whether those of any group are, or those of all groups.
    computed_by_row, unsynced_tokens_by_row: read-only views.
    version: number of changes so far.
    beginnings: a new object after every change of the first blocks of rows, or of their computed
      tokens other than by steps.
    """

    def __init__(self, pool: BlockPool, plan: Plan, max_requests: int):
        growths = [group.growth for group in plan.groups]
        growth = GrowthTable(growths, context_parallel=plan.context_parallel)
        self.pool, self.growth, self.row_blocks = pool, growth, tuple(plan.row_blocks)
        self.groups_to_zero = np.array(plan.groups_to_zero, bool)
        self.zeroes, self.zeroes_all = any(plan.groups_to_zero), all(plan.groups_to_zero)
        self._starts = [0, *itertools.accumulate(self.row_blocks)]
        self.starts, self._each_group = np.array(self._starts), np.arange(len(growth.growths))
        self.table = np.zeros((max_requests, self._starts[-1]), np.int32)
        self._cells = self.table.reshape(-1)  # NumPy indexes one axis much faster than two
        groups, shape = len(growth.growths), (len(growth.growths), max_requests)
        self.block_tokens: list[int] = growth.block_tokens[:, 0].tolist()
        self._allocated = np.zeros((3, *shape), np.int64)  # source, first, end
        self._nothing = np.array([[-1], [0], [0]])  # source, first, end of a row without blocks
        self._allocated[:] = self._nothing[..., None]
        # NumPy writes one axis much faster than two; see `_in_groups`.
        self._firsts, self._ends = self._allocated[1].reshape(-1), self._allocated[2].reshape(-1)
        self._numbers = np.zeros((7 + 3 * groups, max_requests), np.int64)  # all 0 in a free row
        self.computed, self.max_computed, self.step_start = self._numbers[:3]
        self.needs_no_change_until, self.may_be_shared_until = self._numbers[3:5]
        self.encoder_tokens, self.unsynced_tokens = self._numbers[5:7]
        self.encoder_blocks, self.synced, self.lost_ends = self._numbers[7:].reshape(3, *shape)
        self._synced_by_group = self.synced.reshape(-1)
        self._in_each_group = np.arange(groups * max_requests).reshape(shape)
        self._row_begins = np.arange(max_requests) * self.table.shape[1]
        self.may_share = np.zeros(max_requests, bool)
        self.is_stale, self.has_stale = np.zeros(max_requests, bool), False
        self.copies = PendingCopies(pool)
        self.version, self.beginnings = 0, object()
        self.computed_by_row = _read_only(self.computed)
        self.unsynced_tokens_by_row = _read_only(self.unsynced_tokens)

    # --- reading ------------------------------------------------------------------

    def logical_blocks_of(self, row: int, group: int) -> np.ndarray:
        """Returns a view of a row's logical blocks in one group, int32[row_blocks[group]]."""
        return self.table[row, self._starts[group] : self._starts[group + 1]]

    def allocated(self, rows: np.ndarray) -> np.ndarray:
        """Returns a copy of source, first and end of rows, int64[3, G, N]."""
        return self._allocated.take(rows, axis=2)

    def allocated_in(self, row: int) -> list[list[int]]:
        """Returns source, first and end of one row, each a list over the groups."""
        return self._allocated[:, :, row].tolist()

    def blocks_of(self, row: int) -> np.ndarray:
        """Returns the ids of all blocks that a row holds, group by group."""
        return np.concatenate([NO_IDS, *(self.table[row, span] for span in self._spans_of(row))])

    def num_blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many blocks rows hold, int64[G]; a shared block counts once per row."""
        source, first, end = self.allocated(rows)
        apart = (source >= 0) & (source < first)
        return (np.maximum(end - first, 0) + apart).sum(axis=1)

    def ids_at(self, cells: Cells) -> np.ndarray:
        """Returns the block ids of cells, int32[K]."""
        return self._cells[self._at(cells)]

    def accepted(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many tokens of its last step each row has after rewinds, int64[N]."""
        return np.maximum(self.computed[rows] - self.step_start[rows], 0)

    def awaits_copy(self, row: int) -> bool:
        """Returns whether the next upload copies into a block of a row."""
        return bool(self.copies) and self.copies.go_into(self.blocks_of(row))

    def may_copy(self, rows: np.ndarray | slice) -> np.ndarray:
        """Returns whether the next step of each row may copy a block, bool[N].

        What others share of a block that a row has gone on to write is what it leaves as it is.
        """
        return self.may_share[rows] & (self.may_be_shared_until[rows] >= self.computed[rows])

    def drop_unread_copies(self) -> None:
        """Drops the copies into blocks that no row reads since it was rewound.

        Otherwise one step would copy several blocks of a row and group, for which shapes have no
        room.
        """
        for (group, _, logical_block, *_), block_id in self.copies.pending:
            holders = self.table[:, self._starts[group] + logical_block] == block_id
            if not (self.computed[holders] > logical_block * self.block_tokens[group]).any():
                self.copies.drop(block_id)

    def _at(self, cells: Cells) -> np.ndarray:
        """Returns the index of each cell in the flat table, int64[K]."""
        at = self._row_begins[cells.rows] + cells.logical_blocks
        if len(self.row_blocks) > 1:
            at += self.starts[cells.groups]
        return at

    def _in_groups(self, rows: np.ndarray) -> np.ndarray:
        """Returns the indices of rows in all groups, where these lie end to end, int64[G * N]."""
        one = len(self.row_blocks) == 1
        return rows if one else self._in_each_group.take(rows, axis=1).reshape(-1)

    def group_ends(self, groups: np.ndarray) -> np.ndarray:
        """Returns the end of each group among the ascending groups of K cells, int64[G]."""
        return groups.searchsorted(self._each_group, "right")

    # --- steps --------------------------------------------------------------------

    def apply(self, changes: Changes) -> np.ndarray:
        """Releases blocks of dropped cells, takes others, and returns these ordered by group."""
        rows, fresh, shared, ids = changes.rows, changes.fresh, changes.shared, NO_IDS
        if changes.given_up.size:
            self.pool.give_up(changes.given_up)
        if changes.dropped.num:
            self._drop(changes.dropped)
        if shared:
            fresh = Cells.joined([fresh, Cells(*np.array([cell[:3] for cell in shared]).T)])
        if fresh.num:
            ids = self.pool.take(fresh.num)
            self._cells[self._at(fresh)] = ids
            if self.zeroes:
                self.pool.is_fresh[ids] = True
        if shared:
            for cell in shared:
                if cell.is_read:
                    new = self.logical_blocks_of(cell.row, cell.group)[cell.logical_block]
                    self.copies.add(int(new), cell)
            self.pool.release(np.array([cell.block_id for cell in shared], np.int32))
        at = self._in_groups(rows)
        self._ends[at] = changes.allocated[2].reshape(-1)
        if self.growth.has_windows or self.growth.aligned.size:
            self._firsts[at] = changes.allocated[1].reshape(-1)
            if self.growth.aligned.size:
                self._allocated[0, :, rows] = changes.allocated[0].T
        self.needs_no_change_until[rows] = changes.needs_no_change_until
        self.may_share[rows] = self._shares_source(rows) if self.growth.aligned.size else False
        return ids

    def mark_synced(
        self, rows: np.ndarray, synced: np.ndarray, is_stale: np.ndarray | bool
    ) -> None:
        """Records what the device knows of rows, int64[G, N], and whether they are still stale."""
        self._synced_by_group[self._in_groups(rows)] = synced.reshape(-1)
        if self.has_stale or is_stale is not False:
            self.is_stale[rows] = is_stale
            self.unsynced_tokens[rows] = 0
            self.has_stale = bool(np.count_nonzero(self.is_stale))

    def mark_unsynced(self, changes: Changes) -> None:
        """Records that the device does not know of changes yet."""
        if changes.synced is not None:
            self.synced[:, changes.rows] = changes.synced
        self.is_stale[changes.rows] = self.has_stale = True

    def trim(self, rows: np.ndarray) -> None:
        """Releases the blocks that the next token of each row does not attend to."""
        if not (self.growth.has_windows and rows.size):
            return
        self.version += 1
        first = self.allocated(rows)[1]
        seen = np.maximum(first, self.growth.first_block(self.computed[rows]))
        dropped = Cells.between(rows, first, seen)
        if dropped.num:
            self._drop(dropped)
            self._allocated[1, :, rows] = seen.T

    def _drop(self, cells: Cells) -> None:
        at = self._at(cells)
        self.pool.release(self._cells[at])
        self._cells[at] = NULL_BLOCK

    def advance(self, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray) -> None:
        """Records that a step took rows from ``computed`` to ``totals`` tokens."""
        self.version += 1
        self.step_start[rows] = computed
        self.computed[rows] = totals
        self.max_computed[rows] = totals
        for group in self.growth.drafted:
            self.lost_ends[group, rows] = self._lost_ends(group, rows, computed, totals)

    def _lost_ends(
        self, group: int, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray
    ) -> np.ndarray:
        """Returns ``lost_ends`` of rows after a step.

        A step that verifies drafts writes the state after its first token into its own block, and
        those after the drafts into the blocks that follow, wherever the ends of blocks lie.
        """
        size, lost = self.block_tokens[group], self.lost_ends[group, rows]
        lost[computed < lost] = 0  # computed anew after a rewind
        end = ((computed + 1) // size + 1) * size
        is_short = totals - computed <= 1 + self.growth.speculative_blocks[group, 0]
        return np.where((lost == 0) & is_short & (end <= totals), end, lost)

    def _shares_source(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether a step shorter than its `grow` would overwrite a shared "align" state."""
        shared, may_share = np.zeros(rows.size, bool), self.may_share[rows]
        for group in self.growth.aligned:
            source = self._allocated[0, group, rows]
            ids = self.table[rows, self.starts[group] + np.maximum(source, 0)]
            shared |= (source >= 0) & self.pool.must_copy(ids, self.computed[rows])
        return shared & may_share

    # --- rows ---------------------------------------------------------------------

    def start(self, row: int, encoder_tokens: int) -> None:
        """Resets a row for a new request, which holds no blocks."""
        self.version += 1
        self.beginnings = object()  # the row may be in a group
        self._allocated[:, :, row] = self._nothing
        self._numbers[:, row] = 0
        self.encoder_tokens[row] = encoder_tokens
        if self.has_stale:
            self.is_stale[row] = False
            self.has_stale = bool(self.is_stale.any())
        self.may_share[row] = False
        for group in self.growth.crossed.tolist():
            growth = self.growth.growths[group]
            self.encoder_blocks[group, row] = growth.live_range(0, 1, encoder_tokens).end

    def finish(self, row: int) -> None:
        """Releases every block of a row and resets it."""
        cells, spans = self.table[row], self._spans_of(row)
        if spans:
            ids = np.concatenate([cells[span] for span in spans])
            self.pool.release(ids[self._from_end(spans)] if self.pool.has_cached else ids)
            for span in spans:
                cells[span] = NULL_BLOCK
        self.start(row, 0)

    def _spans_of(self, row: int) -> list[slice]:
        """Returns the logical blocks of ``table`` that a row holds, over all groups."""
        spans: list[slice] = []
        for start, source, first, end in zip(self._starts, *self.allocated_in(row), strict=False):
            if 0 <= source < first:
                spans.append(slice(start + source, start + source + 1))
            if first < end:
                spans.append(slice(start + first, start + end))
        return spans

    def _from_end(self, spans: Sequence[slice]) -> np.ndarray:
        """Returns an order of blocks that reuses the end of a prefix before its beginning."""
        at = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        group = self.starts.searchsorted(at, "right") - 1
        positions = (at - self.starts[group]) * self.growth.block_tokens[group, 0]
        return (-positions).argsort(kind="stable")

    def fork(self, donor: int, row: int, num_tokens: int, blocks: Sequence[SharedBlocks]) -> None:
        """Starts a row that shares the blocks of a donor's first ``num_tokens`` tokens."""
        self.start(row, int(self.encoder_tokens[donor]))
        until = self.go_on(row, num_tokens, blocks, self.lost_ends[:, donor])
        self.note_shared(donor, until)

    def go_on(
        self, row: int, num_tokens: int, blocks: Sequence[SharedBlocks], lost_ends: np.ndarray
    ) -> int:
        """Gives a row that was just started the blocks of another one, or of its own from before.

        Args:
          lost_ends: int64[G], those of that row.

        Returns:
          The number of first positions whose blocks may be shared.
        """
        self.share(row, num_tokens, blocks)
        self.lost_ends[:, row] = lost_ends
        ends = [part.end * n for part, n in zip(blocks, self.block_tokens, strict=True)]
        until = max([num_tokens, *(end for end in ends if end < INT32_MAX)])
        self.note_shared(row, until)
        return until

    def share(
        self,
        row: int,
        num_tokens: int,
        blocks: Sequence[SharedBlocks],
        *,
        are_allocated: bool = False,
    ) -> None:
        """Gives a row that was just started the blocks of a prefix.

        Args:
          are_allocated: whether the row holds them already.
        """
        self.computed[row] = self.max_computed[row] = self.step_start[row] = num_tokens
        self.unsynced_tokens[row] = self.may_be_shared_until[row] = num_tokens
        for group, (source, first, end, ids) in enumerate(blocks):
            self.logical_blocks_of(row, group)[first:end] = ids
            self._allocated[:, group, row] = source, first, end
        if not are_allocated:
            self.pool.hold(np.concatenate([part.block_ids for part in blocks]))
        ends_inside = any([num_tokens % tokens for tokens in self.block_tokens])
        if ends_inside or self.growth.aligned.size:
            self.note_shared(row)
        self.is_stale[row] = self.has_stale = True

    def note_shared(self, row: int, num_tokens: int = 0) -> None:
        """Makes the next step of a row check whether it must copy blocks before it writes.

        Args:
          num_tokens: first positions of the row whose blocks are shared or cached now.
        """
        self.may_share[row], self.needs_no_change_until[row] = True, 0
        self.may_be_shared_until[row] = max(self.may_be_shared_until[row], num_tokens)

    def rewind(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Reduces the computed tokens of rows to ``num_tokens``, int64[N]."""
        self.version += 1
        self.beginnings = object()  # tokens of a group may be computed anew
        self.computed[rows] = num_tokens
        if self.pool.may_copy_on_write:
            for row in rows[num_tokens < self.may_be_shared_until[rows]].tolist():
                if self.pool.must_copy(self.blocks_of(row), int(self.computed[row])).any():
                    self.note_shared(row)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array[:]
    view.flags.writeable = False
    return view


def holds(held: np.ndarray, logical_blocks: np.ndarray) -> np.ndarray:
    """Returns whether rows have allocated logical blocks of one group, bool of their shape.

    Args:
      held: int64[3, N], source, first and end.
      logical_blocks: int64[N] or int64[N, C].
    """
    source, first, end = held.reshape(3, -1, *[1] * (logical_blocks.ndim - 1))
    return (logical_blocks == source) | ((logical_blocks >= first) & (logical_blocks < end))
