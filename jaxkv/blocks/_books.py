"""The books of all requests as arrays: who holds which block. NumPy only.

Everything that happens to the blocks of a step happens to all its requests and groups at once,
in slices.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._internal.numbers import NULL_BLOCK
from jaxkv.blocks._pool import BlockPool
from jaxkv.blocks._rules import Rules
from jaxkv.blocks._runs import NO_IDS, Runs
from jaxkv.specs import Growth

FEW = 16  # runs that are cheaper one after the other than cell by cell


class Changes(NamedTuple):
    """The effect of a step on the books: N rows that change.

    fresh: cells that get a block.
    copied: bool[K], the runs of ``fresh`` whose block starts as a copy of the one that was
      there. They are single cells.
    replaces: whether any fresh cell had a block, which its row gives back.
    dropped: cells whose block is given back.
    held: int64[3, G, N], the columns that the rows hold afterwards; see `Books`.
    """

    rows: np.ndarray  # int64[N]
    fresh: Runs
    copied: np.ndarray
    replaces: bool
    dropped: Runs
    held: np.ndarray


class Books:
    """R rows of block ids in G groups.

    A row holds, in each group, the columns ``first .. end - 1``, and ``source``: that of the
    recurrent state that the next token resumes from, or -1. It may lie inside the range.

    table: int32[R, W], the groups' columns side by side; null where nothing is held.
    computed: int64[R], tokens of each request that are in the cache.
    reached: int64[R], the same before any rewind.
    resumed: int64[R], the same before the last step.
    quiet_until: int64[R], the longest total up to which nothing changes; see `Rules`.
    may_share: bool[R], whether a row's next tokens may hit a block of several holders.
    encoder_blocks: int64[G, R], columns of the groups that store the encoder's tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        growths: Sequence[Growth],
        row_blocks: Sequence[int],
        *,
        max_requests: int,
        context_parallel: int,
    ):
        self.pool, self.rules = pool, Rules(growths, context_parallel)
        self.row_blocks = tuple(row_blocks)
        self.starts = np.array([0, *itertools.accumulate(row_blocks)])  # first column of a group
        self._starts = self.starts[:-1].tolist()
        self.table = np.zeros((max_requests, int(self.starts[-1])), np.int32)
        shape = len(growths), max_requests
        self._held = np.zeros((3, *shape), np.int64)  # source, first, end
        self._held[0] = -1
        self.computed = np.zeros(max_requests, np.int64)
        self.reached = np.zeros(max_requests, np.int64)
        self.resumed = np.zeros(max_requests, np.int64)
        self.quiet_until = np.zeros(max_requests, np.int64)
        self.may_share = np.zeros(max_requests, bool)
        self.encoder_blocks = np.zeros(shape, np.int64)

    # --- reading ------------------------------------------------------------------

    def columns_of(self, row: int, group: int) -> np.ndarray:
        """Returns a view of a row's columns in one group, int32[row_blocks[group]]."""
        return self.table[row, self.starts[group] : self.starts[group + 1]]

    def held(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64[3, G, N], a copy of source, first and end of rows."""
        return self._held.take(rows, axis=2)

    def held_of(self, row: int, group: int) -> tuple[int, int, int]:
        """Returns source, first and end of one row in one group."""
        source, first, end = self._held[:, group, row].tolist()
        return source, first, end

    def row_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64[N, G], columns of each row that the device must know."""
        return self._held[2].take(rows, axis=1).T

    def blocks_of(self, row: int) -> np.ndarray:
        """Returns the ids of all blocks that a row holds, group by group."""
        ids = np.concatenate([self.table[row, span] for span in self._spans_of(row)])
        return ids[ids != NULL_BLOCK]

    def num_blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64[G], the blocks that rows hold (a shared block counts for each)."""
        source, first, end = self.held(rows)
        apart = (source >= 0) & (source < first)
        return (np.maximum(end - first, 0) + apart).sum(axis=1)

    def _spans_of(self, row: int) -> list[slice]:
        """Returns the columns of the table, of all groups, that a row holds."""
        spans: list[slice] = []
        held = zip(self._starts, *self._held[:, :, row].tolist(), strict=True)
        for start, source, first, end in held:
            if 0 <= source < first:
                spans.append(slice(start + source, start + source + 1))
            spans.append(slice(start + first, start + max(first, end)))
        return spans

    def ids_at(self, runs: Runs) -> np.ndarray:
        """Returns int32[cells], the blocks of runs of cells."""
        if not runs.are_cells and runs.groups.size <= FEW:
            return np.concatenate([self.table[row, span] for row, span in self._slices(runs)])
        groups, rows, columns = runs.cells()
        return self.table[rows, columns + self.starts[groups]]

    def _set_ids(self, runs: Runs, ids: np.ndarray) -> None:
        if not runs.are_cells and runs.groups.size <= FEW:
            begin = 0
            for row, span in self._slices(runs):
                end = begin + span.stop - span.start
                self.table[row, span] = ids[begin:end]
                begin = end
        else:
            groups, rows, columns = runs.cells()
            self.table[rows, columns + self.starts[groups]] = ids

    def _slices(self, runs: Runs) -> list[tuple[int, slice]]:
        begins = runs.begins + self.starts[runs.groups]
        spans = map(slice, begins.tolist(), (begins + runs.counts).tolist())
        return list(zip(runs.rows.tolist(), spans, strict=True))

    # --- steps --------------------------------------------------------------------

    def apply(self, changes: Changes) -> tuple[np.ndarray, np.ndarray]:
        """Gives back the blocks that are dropped, then takes the fresh ones.

        Returns:
          int32[cells], the ids of the fresh cells; and the blocks that the copied ones had.
        """
        rows, fresh, dropped = changes.rows, changes.fresh, changes.dropped
        ids = replaced = NO_IDS
        if dropped.num_cells:
            self._drop(dropped)
        if fresh.num_cells:
            ids = self.pool.take(fresh.num_cells)
            if changes.replaces:
                before = self.ids_at(fresh)
                self.pool.release(before[before != NULL_BLOCK])
                replaced = before[fresh.first_cells[changes.copied]]
            self._set_ids(fresh, ids)
        self._held[:, :, rows] = changes.held
        if self.pool.has_shared_blocks or changes.replaces:
            self.may_share[rows] &= self._shares_source(rows)
        self.quiet_until[rows] = self.rules.quiet_until(self.computed[rows], changes.held)
        return ids, replaced

    def trim(self, rows: np.ndarray) -> None:
        """Gives back the blocks that the next token of rows does not see."""
        if not (self.rules.has_windows and rows.size):
            return
        _, first, end = self.held(rows)
        seen = np.maximum(first, self.rules.firsts_visible(self.computed[rows]))
        seen = np.minimum(seen, end)
        dropped = Runs.between(rows, first, seen)
        if dropped.num_cells:
            self._drop(dropped)
            self._held[1, :, rows] = seen.T

    def _drop(self, cells: Runs) -> None:
        self.pool.release(self.ids_at(cells))
        self._set_ids(cells, np.zeros(cells.num_cells, np.int32))

    def advance(self, rows: np.ndarray, totals: np.ndarray) -> None:
        """Notes that rows have computed their tokens up to ``totals``."""
        self.resumed[rows] = self.computed[rows]
        self.computed[rows] = totals
        self.reached[rows] = totals

    def _shares_source(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether a shorter chunk than announced would write a shared "align" state."""
        shared = np.zeros(rows.size, bool)
        for group in self.rules.aligned:
            source = self._held[0, group, rows]
            ids = self.table[rows, self.starts[group] + np.maximum(source, 0)]
            shared |= (source >= 0) & (self.pool.references_of(ids) > 1)
        return shared

    # --- rows ---------------------------------------------------------------------

    def start(self, row: int, encoder_tokens: int) -> None:
        """Begins a row that holds nothing."""
        self._held[0, :, row], self._held[1:, :, row] = -1, 0
        self.computed[row] = self.reached[row] = self.resumed[row] = 0
        self.quiet_until[row] = 0
        self.may_share[row] = False
        for group in self.rules.crossed.tolist():
            growth = self.rules.growths[group]
            self.encoder_blocks[group, row] = growth.live_columns(0, 1, encoder_tokens).end

    def finish(self, row: int) -> None:
        """Gives back every block of a row."""
        spans = self._spans_of(row)
        ids = np.concatenate([self.table[row, span] for span in spans])
        self.pool.release(ids[ids != NULL_BLOCK])
        for span in spans:
            self.table[row, span] = NULL_BLOCK
        self.start(row, 0)

    def fork(
        self, donor: int, row: int, num_tokens: int, columns: Sequence[tuple[int, int, int]]
    ) -> None:
        """Begins a row that shares the blocks of a donor's first ``num_tokens`` tokens.

        Args:
          columns: per group, source, first and end of the columns to share.
        """
        self.start(row, 0)
        self.advance(np.array([row]), np.array([num_tokens]))
        self.encoder_blocks[:, row] = self.encoder_blocks[:, donor]
        for group, (source, first, end) in enumerate(columns):
            mine, theirs = self.columns_of(row, group), self.columns_of(donor, group)
            mine[first:end] = theirs[first:end]
            self._held[:, group, row] = source, first, end
        self.pool.share(self.blocks_of(row))
        self.may_share[[donor, row]] = True
        self.quiet_until[[donor, row]] = 0  # the next step of either looks at its blocks again

    def rewind(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Sets the computed tokens of rows back."""
        self.computed[rows] = num_tokens
        if self.rules.aligned.size:
            self.quiet_until[rows] = 0
        if self.pool.has_shared_blocks:
            for row in rows.tolist():
                if (self.pool.references_of(self.blocks_of(row)) > 1).any():
                    self.may_share[row], self.quiet_until[row] = True, 0

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        pair, swapped = [first, second], [second, first]
        of_tokens = self.computed, self.reached, self.resumed
        for array in (self.table, *of_tokens, self.quiet_until, self.may_share):
            array[pair] = array[swapped]
        for array in (*self._held, self.encoder_blocks):
            array[:, pair] = array[:, swapped]


def holds(held: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns whether rows hold columns of one group, [N] or [N, C].

    Args:
      held: int64[3, N], source, first and end.
    """
    source, first, end = held.reshape(3, -1, *[1] * (columns.ndim - 1))
    return (columns == source) | ((columns >= first) & (columns < end))
