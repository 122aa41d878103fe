"""The books: block ids and progress of all requests, as arrays. NumPy only.

A step is applied to all of its requests and groups at once, with a few calls of NumPy.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._pool import BlockPool
from jaxkv._src.blocks._rules import Rules
from jaxkv._src.blocks._runs import NO_IDS, Run, Runs
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.prefixes import SharedColumns
from jaxkv._src.specs import Growth

RowStep = tuple[int, int, int]  # a row, and its tokens before and after a step


class Changes(NamedTuple):
    """Changes that a step makes to N rows of the books.

    rows: the rows that change.
    fresh: table cells that get a new block.
    copied: bool[K], which of the K runs of ``fresh`` start as a copy of the block that they
      replace. Such a run is a single cell.
    replaces: whether any fresh cell had a block before, which its row then releases.
    dropped: cells whose blocks are released.
    held: [3, G, N] ints, source, first and end of the rows after the step, see `Books`; [3, G]
      for a single row.
    unchanged_until: N ints, the number of tokens up to which each row needs no further change.
    shares: whether any of the rows might write to a shared block; see `Books.any_may_share`.
    given_up: blocks whose content is no longer kept for later prompts.
    """

    rows: np.ndarray  # int64[N]
    fresh: Runs
    copied: np.ndarray
    replaces: bool
    dropped: Runs
    held: np.ndarray | Sequence[Sequence[int]]
    unchanged_until: np.ndarray | Sequence[int]
    shares: bool
    given_up: np.ndarray = NO_IDS


class FewChanges(NamedTuple):
    """Changes that a step makes to a few rows of the books, in plain ints.

    No fresh cell replaces a block.

    rows, fresh, dropped, unchanged_until: as in `Changes`.
    held: per row, source, first and end after the step, each over the groups.
    """

    rows: list[int]
    fresh: list[Run]
    dropped: list[Run]
    held: list[list[list[int]]]
    unchanged_until: list[int]


class Books:
    """Block tables of G groups, and the progress of the requests in their R rows.

    In each group, a row holds the blocks in columns ``first .. end - 1`` and in column ``source``,
    the block of the recurrent state that the next token resumes from. ``source`` is -1 if there
    is none, and may lie inside the range.

    table: int32[R, W], the groups' columns side by side; 0 (null) where a row holds no block.
    computed: int64[R], tokens of each request that are in the cache.
    reached: int64[R], ``computed`` before any rewind.
    resumed: int64[R], ``computed`` before the last step.
    unchanged_until: int64[R], the number of tokens up to which a row needs no change; see `Rules`.
    may_share: bool[R], whether the next tokens of a row may go to a shared or kept block.
    shared_until: int64[R], the number of first tokens whose blocks may be shared or kept.
    encoder_blocks: int64[G, R], the number of blocks of each request's encoder tokens.
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
        self._starts = [0, *itertools.accumulate(row_blocks)]  # first column of each group
        self.starts = np.array(self._starts)
        self.table = np.zeros((max_requests, int(self.starts[-1])), np.int32)
        self._cells = self.table.reshape(-1)  # NumPy indexes one axis much faster than two
        shape = len(growths), max_requests
        self._held = np.zeros((3, *shape), np.int64)  # source, first, end
        self._nothing = np.array([[-1], [0], [0]])  # source, first, end of a row without blocks
        self._held[:] = self._nothing[..., None]
        self.computed = np.zeros(max_requests, np.int64)
        self.reached = np.zeros(max_requests, np.int64)
        self.resumed = np.zeros(max_requests, np.int64)
        self.unchanged_until = np.zeros(max_requests, np.int64)
        self.may_share = np.zeros(max_requests, bool)
        self._has_sharers = False  # whether `may_share` is True for any row
        self.shared_until = np.zeros(max_requests, np.int64)
        self.encoder_blocks = np.zeros(shape, np.int64)

    # --- reading ------------------------------------------------------------------

    def columns_of(self, row: int, group: int) -> np.ndarray:
        """Returns a view of a row's columns in one group, int32[row_blocks[group]]."""
        return self.table[row, self._starts[group] : self._starts[group + 1]]

    def held(self, rows: np.ndarray) -> np.ndarray:
        """Returns a copy of source, first and end of rows, int64[3, G, N]."""
        return self._held.take(rows, axis=2)

    def held_of(self, row: int) -> list[list[int]]:
        """Returns source, first and end of one row, each a list over the groups."""
        return self._held[:, :, row].tolist()

    def any_may_share(self, rows: np.ndarray | list[int]) -> bool:
        """Returns whether the next tokens of any row may go to a block that is shared or kept."""
        if not (self._has_sharers and self.pool.has_shared_blocks):
            return False
        return bool(self.may_share[rows].any())

    def row_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Returns the row lengths that the device keeps, int64[N * G]: one past the last column."""
        if rows.size == 1:
            return self._held[2, :, rows[0]]
        return self._held[2].take(rows, axis=1).T.reshape(-1)

    def blocks_of(self, row: int) -> np.ndarray:
        """Returns the ids of all blocks that a row holds, group by group."""
        spans = self._spans_of(row)
        return np.concatenate([NO_IDS, *(self.table[row, span] for span in spans)])

    def num_blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many blocks rows hold, int64[G]; a shared block counts once per row."""
        source, first, end = self.held(rows)
        apart = (source >= 0) & (source < first)
        return (np.maximum(end - first, 0) + apart).sum(axis=1)

    def _spans_of(self, row: int) -> list[slice]:
        """Returns the columns of ``table`` that a row holds, over all groups."""
        spans: list[slice] = []
        for start, source, first, end in zip(self._starts, *self.held_of(row), strict=False):
            if 0 <= source < first:
                spans.append(slice(start + source, start + source + 1))
            if first < end:
                spans.append(slice(start + first, start + end))
        return spans

    def ids_at(self, runs: Runs) -> np.ndarray:
        """Returns the block ids in runs of cells, int32[cells]."""
        if runs.are_few:
            return np.concatenate([self._cells[span] for span in self._slices(runs.ints)])
        return self._cells[self._cells_of(runs)]

    def _set_ids(self, runs: Sequence[Run], ids: np.ndarray) -> None:
        cells, width, starts, end = self._cells, self.table.shape[1], self._starts, 0
        for group, row, column, count in runs:
            at, begin, end = row * width + starts[group] + column, end, end + count
            if count == 1:
                cells[at] = ids[begin]
            else:
                cells[at : at + count] = ids[begin:end]

    def _cells_of(self, runs: Runs) -> np.ndarray:
        """Returns the index of each cell of runs in the flat table, int64[cells]."""
        groups, rows, columns = runs.cells()
        cells = rows * self.table.shape[1]
        cells += columns
        if len(self.row_blocks) > 1:
            cells += self.starts[groups]
        return cells

    def _slices(self, runs: Sequence[Run]) -> list[slice]:
        """Returns the slice of the flat table of each run."""
        width, starts = self.table.shape[1], self._starts
        return [
            slice(begin := row * width + starts[group] + column, begin + count)
            for group, row, column, count in runs
        ]

    # --- steps --------------------------------------------------------------------

    def apply(self, changes: Changes) -> tuple[np.ndarray, np.ndarray]:
        """Releases the blocks of dropped cells, then takes blocks for fresh cells.

        Returns:
          The ids of the fresh cells, int32[cells]; and the ids that the copied cells had before.
        """
        rows, fresh, dropped = changes.rows, changes.fresh, changes.dropped
        ids = replaced = NO_IDS
        if changes.given_up.size:
            self.pool.give_up(changes.given_up)
        if dropped.num_cells:
            self._drop(dropped)
        if fresh.num_cells:
            ids = self.pool.take(fresh.num_cells)
            if changes.replaces:
                before = self.ids_at(fresh)
                self.pool.release(before[before != NULL_BLOCK])
                replaced = before[fresh.first_cells[changes.copied]]
            if fresh.are_few:
                self._set_ids(fresh.ints, ids)
            else:
                self._cells[self._cells_of(fresh)] = ids
        self._hold(changes)
        if changes.shares:
            self.may_share[rows] = self._shares_source(rows) if self.rules.aligned.size else False
            self._has_sharers = bool(self.may_share.any())
        self.unchanged_until[rows] = changes.unchanged_until
        return ids, replaced

    def apply_few(self, changes: FewChanges) -> np.ndarray:
        """Makes changes, as `apply` does. Returns the ids of the fresh cells, int32[cells]."""
        ids, (rows, fresh, dropped, held, unchanged_until) = NO_IDS, changes
        if dropped:
            self._give_back(self._cells, self._slices(dropped))
        if fresh:
            ids = self.pool.take(sum([count for _, _, _, count in fresh]))
            self._set_ids(fresh, ids)
        for row, of_row, until in zip(rows, held, unchanged_until, strict=True):
            self._held[:, :, row] = of_row
            self.unchanged_until[row] = until
        return ids

    def _hold(self, changes: Changes) -> None:
        """Sets source, first and end of the rows that change."""
        rows, held = changes.rows, changes.held
        if rows.size == 1:
            self._held[:, :, rows[0]] = held
        elif self.rules.has_windows or self.rules.aligned.size:
            self._held[:, :, rows] = held
        else:  # only ends change, and writes to flat arrays are several times faster
            for ends, new in zip(self._held[2], held[2], strict=True):
                ends[rows] = new

    def trim(self, rows: np.ndarray) -> None:
        """Releases the blocks that the next token of each row does not attend to."""
        if not (self.rules.has_windows and rows.size):
            return
        _, first, end = self.held(rows)
        seen = np.maximum(first, self.rules.firsts_visible(self.computed[rows]))
        seen = np.minimum(seen, end)
        dropped = Runs.between(rows, first, seen)
        if dropped.num_cells:
            self._drop(dropped)
            self._held[1, :, rows] = seen.T

    def _drop(self, runs: Runs) -> None:
        if runs.are_few:
            return self._give_back(self._cells, self._slices(runs.ints))
        cells = self._cells_of(runs)
        self.pool.release(self._cells[cells])
        self._cells[cells] = NULL_BLOCK

    def _give_back(self, cells: np.ndarray, spans: Sequence[slice]) -> None:
        """Releases the blocks of spans of cells."""
        parts = [cells[span] for span in spans]
        self.pool.release(np.concatenate(parts) if len(parts) > 1 else parts[0])
        for span in spans:
            cells[span] = NULL_BLOCK

    def advance(self, rows: np.ndarray, computed: np.ndarray, totals: np.ndarray) -> None:
        """Records that a step took rows from ``computed`` to ``totals`` tokens."""
        self.resumed[rows] = computed
        self.computed[rows] = totals
        self.reached[rows] = totals

    def advance_few(self, steps: Iterable[RowStep]) -> None:
        """Records the progress of a few rows, as `advance` does."""
        for row, computed, total in steps:
            self.resumed[row] = computed
            self.computed[row] = self.reached[row] = total

    def _shares_source(self, rows: np.ndarray) -> np.ndarray:
        """Returns whether a step shorter than its `grow` would overwrite a shared "align" state."""
        shared, may_share = np.zeros(rows.size, bool), self.may_share[rows]
        for group in self.rules.aligned:
            source = self._held[0, group, rows]
            ids = self.table[rows, self.starts[group] + np.maximum(source, 0)]
            shared |= (source >= 0) & self.pool.must_copy(ids, self.computed[rows])
        return shared & may_share

    # --- rows ---------------------------------------------------------------------

    def start(self, row: int, encoder_tokens: int) -> None:
        """Resets a row for a new request, which holds no blocks."""
        self._held[:, :, row] = self._nothing
        self.computed[row] = self.reached[row] = self.resumed[row] = 0
        self.unchanged_until[row] = 0
        self.shared_until[row] = 0
        if self._has_sharers:
            self.may_share[row] = False
            self._has_sharers = bool(self.may_share.any())
        for group in self.rules.crossed:
            growth = self.rules.growths[group]
            self.encoder_blocks[group, row] = growth.live_columns(0, 1, encoder_tokens).end

    def finish(self, row: int) -> None:
        """Releases every block of a row and resets it."""
        cells, spans = self.table[row], self._spans_of(row)
        if spans and self.pool.has_kept:
            self._give_back_from_end(cells, spans)
        elif spans:
            self._give_back(cells, spans)
        self.start(row, 0)

    def _give_back_from_end(self, cells: np.ndarray, spans: Sequence[slice]) -> None:
        """Releases blocks in an order that reuses the end of a prefix before its beginning."""
        if len(spans) == 1:
            (span,) = spans
            self.pool.release(cells[span][::-1].copy())
            cells[span] = NULL_BLOCK
            return
        positions: list[np.ndarray] = []
        for span in spans:
            group = bisect.bisect_right(self._starts, span.start) - 1
            block, start = self.rules.of_groups[group].block, self._starts[group]
            positions.append(np.arange(start - span.start, start - span.stop, -1) * block)
        order = np.concatenate(positions).argsort(kind="stable")
        self.pool.release(np.concatenate([cells[span] for span in spans])[order])
        for span in spans:
            cells[span] = NULL_BLOCK

    def fork(
        self, donor: int, row: int, num_tokens: int, columns: Sequence[tuple[int, int, int]]
    ) -> None:
        """Starts a row that shares the blocks of a donor's first ``num_tokens`` tokens.

        Args:
          columns: per group, source, first and end of the columns to share.
        """
        self.start(row, 0)
        self.computed[row] = self.reached[row] = num_tokens
        self.encoder_blocks[:, row] = self.encoder_blocks[:, donor]
        for group, (source, first, end) in enumerate(columns):
            mine, theirs = self.columns_of(row, group), self.columns_of(donor, group)
            mine[first:end] = theirs[first:end]
            self._held[:, group, row] = source, first, end
        self.pool.share(self.blocks_of(row))
        for sharer in (donor, row):
            self.note_shared(sharer, num_tokens)

    def share(self, row: int, num_tokens: int, columns: Sequence[SharedColumns]) -> None:
        """Gives a row that was just started the blocks of a cached prefix."""
        self.computed[row] = self.reached[row] = self.resumed[row] = num_tokens
        for group, (source, first, end, ids) in enumerate(columns):
            self.columns_of(row, group)[first:end] = ids
            self._held[:, group, row] = source, first, end
        self.pool.hold(np.concatenate([part.block_ids for part in columns]))
        ends_inside = any([num_tokens % rule.block for rule in self.rules.of_groups])
        if ends_inside or self.rules.aligned.size:
            self.note_shared(row, num_tokens)
        self.shared_until[row] = num_tokens

    def note_shared(self, row: int, num_tokens: int = 0) -> None:
        """Makes the next step of a row check whether it must copy blocks before it writes.

        Args:
          num_tokens: first tokens of the row whose blocks are shared or kept now.
        """
        self.may_share[row], self.unchanged_until[row] = True, 0
        self._has_sharers = True
        self.shared_until[row] = max(self.shared_until[row], num_tokens)

    def rewind(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Reduces the computed tokens of rows to ``num_tokens``, int64[N]."""
        self.computed[rows] = num_tokens
        if self.rules.aligned.size:
            self.unchanged_until[rows] = 0
        if self.pool.has_shared_blocks:
            for row in rows[num_tokens < self.shared_until[rows]].tolist():
                if self.pool.must_copy(self.blocks_of(row), int(self.computed[row])).any():
                    self.note_shared(row)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        pair, swapped = [first, second], [second, first]
        of_tokens = self.computed, self.reached, self.resumed, self.shared_until
        for array in (self.table, *of_tokens, self.unchanged_until, self.may_share):
            array[pair] = array[swapped]
        for array in (*self._held, self.encoder_blocks):
            array[:, pair] = array[:, swapped]


def holds(held: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns whether rows hold columns of one group, bool of the shape of ``columns``.

    Args:
      held: int64[3, N], source, first and end.
      columns: int64[N] or int64[N, C].
    """
    source, first, end = held.reshape(3, -1, *[1] * (columns.ndim - 1))
    return (columns == source) | ((columns >= first) & (columns < end))
