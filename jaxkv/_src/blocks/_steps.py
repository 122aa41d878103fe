"""The steps of a `BlockManager`: blocks for new tokens, and the uploads. No jax.

An upload carries the columns that its own requests need and that the device does not have, as
`RequestState.sent` says. Blocks that other requests have taken wait until these compute.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxkv._src.blocks._cells import NO_CELLS, NO_IDS, Cells
from jaxkv._src.blocks._changes import plan_changes
from jaxkv._src.blocks._format import (
    Batch,
    Ints,
    Sizes,
    as_int32,
    check_batch,
    check_room,
    write_batch,
    write_copies,
    write_entries,
    write_zero_ids,
)
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._rows import RowAllocator, Work
from jaxkv._src.blocks._shape import StepShape, Upload
from jaxkv._src.blocks._state import Changes, Copy, RequestState
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning import Plan

NONE_LAGS = np.zeros(0, bool)


class Ring(Protocol):
    """A source of upload buffers, such as `jaxkv.UploadRing`."""

    def buffer(self, shape: StepShape) -> np.ndarray:
        """Returns int32[shape.format.size] to write a step into."""
        ...

    def seal(self) -> Any:
        """Returns the buffer that was handed out last, as the array that a step reads."""
        ...


class Steps:
    """Takes steps: checks them, changes the state of the requests, and packs the uploads.

    num_uploads: number of uploads so far.
    """

    def __init__(self, plan: Plan, state: RequestState, rows: RowAllocator, prefixes: Prefixes):
        """Creates the steps of a manager, from its parts."""
        self._plan, self._state, self._rows, self._prefixes = plan, state, rows, prefixes
        self._shapes: set[StepShape] = set()  # shapes that passed `_check_shape`
        self._is_anew = False  # whether the next upload is the first one after a reset
        self.num_uploads = 0

    def step(self, shape: StepShape, work: Work, extra: Ints, ring: Ring | None) -> Upload:
        """Takes a step; see `BlockManager.step`."""
        if not isinstance(shape, StepShape) or shape not in self._shapes:
            self._check_shape(shape)
        state, batch = self._state, self._rows.batch(work)
        computed = state.computed[batch.rows]
        totals = computed + batch.counts
        check_batch(shape, batch, self._check_totals(batch, totals))
        own = _as_extra(extra)
        changes = plan_changes(state, batch.rows, computed, totals)
        news = find_news(state, batch.rows, totals, changes)
        check_room(shape, Sizes(extra=own.size) if news is None else news.sizes(own.size))
        data = np.empty(shape.format.size, np.int32) if ring is None else ring.buffer(shape)
        encoder_lens = state.encoder_tokens[batch.rows] if shape.format.has_encoder else NO_IDS
        write_batch(shape, data, batch, computed, encoder_lens, own)
        ids = None
        if changes is not None and news is not None:
            is_told = news.cells is changes.fresh
            taken = state.apply(changes, is_told=is_told)
            ids = taken if is_told else None
        if news is not None:
            write_news(state, shape, data, news, ids)
        state.advance(batch.rows, computed, totals)
        if self._prefixes.is_computing:
            self._prefixes.after_step(batch.rows.tolist())
        return self._numbered(shape, data, ring)

    def grow(self, work: Work) -> None:
        """Gives requests the blocks for their next tokens; see `BlockManager.grow`."""
        batch = self._rows.batch(work)
        computed = self._state.computed[batch.rows]
        totals = computed + batch.counts
        self._check_totals(batch, totals)
        changes = plan_changes(self._state, batch.rows, computed, totals)
        if changes is not None:
            self._state.apply(changes)
            self._state.note_unsent(changes)

    def reset(self) -> None:
        """Lets the next upload go on from any state of the device."""
        self._state.copies.clear()
        self._is_anew = True

    def _numbered(self, shape: StepShape, data: np.ndarray, ring: Ring | None) -> Upload:
        """Counts an upload, writes its number, and returns it."""
        self.num_uploads += 1
        number = (self.num_uploads - 1) % INT32_MAX + 1
        data[0], self._is_anew = -number if self._is_anew else number, False
        return Upload(data=data if ring is None else ring.seal(), shape=shape)

    # --- checks -----------------------------------------------------------------------

    def _check_totals(self, batch: Batch, totals: np.ndarray) -> int:
        """Raises ValueError for a request that grows too long; returns the longest total."""
        if totals.size == 1:
            longest = totals.item()
        else:
            longest = int(np.maximum.reduce(totals)) if totals.size else 0
        if longest > self._plan.max_model_len:
            name = self._rows.name(int(batch.rows[totals.argmax()]))
            raise ValueError(
                f"work: request {name!r} would have {longest} tokens, more than the plan's "
                f"max_model_len={self._plan.max_model_len}; finish the request, or plan for longer "
                "ones"
            )
        return longest

    def _check_shape(self, shape: StepShape) -> None:
        """Raises unless the shape belongs to this manager's plan."""
        if not isinstance(shape, StepShape):
            raise TypeError(f"shape must be a StepShape, got {type(shape).__name__}")
        difference = shape.first_difference(
            growths=self._state.growth.growths,
            num_blocks=self._plan.num_blocks,
            context_parallel=self._plan.context_parallel,
            max_requests=self._state.computed.size,
        )
        if difference is not None:
            name, given, wanted = difference
            raise ValueError(
                f"shape was made for another plan or manager: its {name} is {given!r} and this "
                f"manager's {wanted!r}; use StepShape.for_plan with the same plan and max_requests"
            )
        self._shapes.add(shape)


def _as_extra(extra: Ints) -> np.ndarray:
    return NO_IDS if isinstance(extra, tuple) and not extra else as_int32("extra", extra)


# --- what an upload tells ---------------------------------------------------------------


class News(NamedTuple):
    """Changes that an upload tells the device of.

    rows: rows of the step that change.
    cells: cells of those rows that the device does not have yet.
    sent: `RequestState.sent` of the rows afterwards, which are their lengths on the device.
    lags: bool[E], or one for all: whether the rows hold more than the device has then.
    num_zeroed, num_copied: blocks to zero and to copy.
    """

    rows: np.ndarray  # int64[E]
    cells: Cells
    sent: np.ndarray  # int64[G, E]
    lags: np.ndarray | bool
    num_zeroed: int
    num_copied: int

    def sizes(self, extra: int) -> Sizes:
        """Returns what the changes take of a step's shape, next to ``extra`` int32s."""
        return Sizes(self.rows.size, self.cells.num, self.num_zeroed, self.num_copied, extra)


def find_news(
    state: RequestState, rows: np.ndarray, totals: np.ndarray, changes: Changes | None
) -> News | None:
    """Returns the news of a step before it makes its changes; None for nothing.

    Args:
      rows: int64[N], rows of the step.
      totals: int64[N], tokens of each row after the step.
    """
    news, lags = None, state.lags.take(rows) if state.has_lagging else NONE_LAGS
    if np.count_nonzero(lags) or (changes is not None and changes.shared):
        told = lags if lags.size else np.zeros(rows.size, bool)
        news = _news_of_rows(state, rows, totals, told, changes)
    elif changes is not None:  # the device knows the rows as they were before the changes
        cells = changes.fresh
        num_zeroed = _num_zeroed(state, cells, changes) if state.zeroes else 0
        news = News(changes.rows, cells, changes.held[2], False, num_zeroed, 0)
    if state.copies:
        if news is None:
            nothing = np.zeros((3, len(state.column_tokens), 0), np.int64)
            news = News(nothing[0, 0], NO_CELLS, nothing[0], False, 0, 0)
        copied, cells = _pending_copies(state, changes, set(news.rows.tolist()))
        cells = Cells.joined([news.cells, cells])
        news = news._replace(cells=cells, num_copied=news.num_copied + copied)
    return news


def _news_of_rows(
    state: RequestState,
    rows: np.ndarray,
    totals: np.ndarray,
    told: np.ndarray,
    changes: Changes | None,
) -> News:
    """Returns the news of rows that change, and of those that lag.

    Args:
      told: bool[N], the rows of the step that lag.
    """
    if changes is not None:
        told[changes.index] = True
    index, growth = told.nonzero()[0], state.growth
    rows = rows[index]
    held, sent = state.held(rows), state.sent.take(rows, axis=1)
    if changes is not None:
        at = (np.add.accumulate(told) - 1)[changes.index]
        held[:, :, at] = changes.held
        if changes.sent is not None:
            sent[:, at] = changes.sent
    source, first, end = held
    needed = growth.end_column(totals[index])
    for groups in (growth.crossed, growth.aligned):
        if groups.size:  # these need all that they hold
            needed[groups] = end[groups]
    cells = Cells.between(rows, np.maximum(first, sent), needed)
    if growth.aligned.size:
        groups, at = ((source < first) & (source >= sent)).nonzero()
        cells = Cells.joined([cells, Cells(groups, rows[at], source[groups, at])])
        sent[growth.aligned] = 0  # the newest state may have moved back
    np.maximum(sent, needed, out=sent)
    lags = sent < end
    num_zeroed = _num_zeroed(state, cells, changes) if state.zeroes else 0
    num_copied = 0 if changes is None else sum(cell.is_read for cell in changes.shared)
    lags = lags.any(axis=0) if np.count_nonzero(lags) else False
    return News(rows, cells, sent, lags, num_zeroed, num_copied)


def _num_zeroed(state: RequestState, cells: Cells, changes: Changes | None) -> int:
    """Returns how many blocks an upload zeroes: fresh ones, unless they start as copies."""
    zeroed, num = state.groups_to_zero, 0
    if changes is not None:
        num = changes.fresh.num
        if num and not state.zeroes_all:
            num = int(np.count_nonzero(zeroed[changes.fresh.groups]))
        if cells is changes.fresh:
            return num
    taken = state.ids_at(cells)  # by an earlier `grow`
    taken = taken[state.pool.is_fresh[taken] & zeroed[cells.groups]]
    # Rows share the encoder blocks of a request that only grew.
    num += np.unique(taken).size if state.growth.crossed.size else taken.size
    if changes is not None and changes.shared:
        told = set(zip(*(part.tolist() for part in cells), strict=True))
        fresh = [cell for cell in changes.shared if zeroed[cell.group] and not cell.is_read]
        num += sum(cell[:3] in told for cell in fresh)
    return num


def _pending_copies(
    state: RequestState, changes: Changes | None, rows: set[int]
) -> tuple[int, Cells]:
    """Returns how many copies earlier calls of `grow` left, and their cells outside this step.

    The device learns of these cells together with the copies, so that a later step of their
    requests has no more to tell than others.

    Args:
      rows: rows of which the upload tells anyway.
    """
    gone: set[int] = set()
    if changes is not None:
        dropped = state.ids_at(changes.dropped)
        gone = set(dropped[state.pool.others_of(dropped) == 0].tolist())
    copies = [(copy, new) for copy, new in _copies(state) if new not in gone]
    cells = [
        (group, row, column)
        for (group, row, column, _), new in copies
        if row not in rows
        and column == state.sent[group, row]
        and state.columns_of(row, group)[column] == new
    ]
    return len(copies), Cells(*np.array(cells, np.int64).reshape(-1, 3).T)


def _copies(state: RequestState) -> list[tuple[Copy, int]]:
    """Returns the copies to make and their new blocks, ordered by group.

    Blocks that were given back need no copy any more.
    """
    new = np.array(list(state.copies), np.int32)
    held = state.pool.references_of(new) > 0
    return sorted((state.copies[block_id], block_id) for block_id in new[held].tolist())


def write_news(
    state: RequestState, shape: StepShape, data: np.ndarray, news: News, ids: np.ndarray | None
) -> None:
    """Writes news into an upload, after the changes were made, and notes what the device has.

    Args:
      ids: the blocks of the cells, if all of them were taken just now.
    """
    groups, rows, columns = cells = news.cells
    are_fresh = ids is not None
    ids = state.ids_at(cells) if ids is None else ids
    ends = state.group_ends(groups)
    write_entries(shape, data, (rows, columns, ids), ends, news.rows, news.sent)
    if news.num_zeroed and are_fresh and state.zeroes_all:
        write_zero_ids(shape, data, ids, ends)
    elif news.num_zeroed:
        fresh = state.groups_to_zero[groups]
        if not are_fresh:
            fresh &= state.pool.is_fresh[ids]
        at = fresh.nonzero()[0]
        if state.growth.crossed.size:  # rows share the encoder blocks of a request that only grew
            at = np.sort(at[np.unique(ids[at], return_index=True)[1]])
        write_zero_ids(shape, data, ids[at], state.group_ends(groups[at]))
        state.pool.is_fresh[ids[at]] = False
    if state.copies:
        copies = _copies(state)
        write_copies(shape, data, [(copy.group, copy.source, new) for copy, new in copies])
        state.copies.clear()
        state.sent[groups, rows] = np.maximum(state.sent[groups, rows], columns + 1)
    state.note_sent(news.rows, news.sent, news.lags)
