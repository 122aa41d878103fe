"""The steps of a `BlockManager`: blocks for new tokens, and the uploads. No jax.

An upload carries the columns that its own requests need and that the device does not have, as
`RequestState.sent` says. Blocks that other requests have taken wait until these compute.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxkv._src.blocks._cells import NO_CELLS, NO_IDS, Cells
from jaxkv._src.blocks._changes import plan_changes
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._resuming import check_moved
from jaxkv._src.blocks._rows import RowAllocator, Work
from jaxkv._src.blocks._state import Changes, RequestState, SharedCell
from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import PrefixGroup, group_by_beginning
from jaxkv._src.uploads import (
    Batch,
    Ints,
    StepShape,
    Upload,
    as_int32,
    check_fits,
    put,
    write_batch,
    write_copies,
)


class Ring(Protocol):
    """A source of upload buffers, such as `jaxkv.UploadRing`."""

    def buffer(self, shape: StepShape) -> np.ndarray:
        """Returns int32[shape.format.size] to write a step into."""
        ...

    def seal(self) -> Any:
        """Returns the buffer that was handed out last, as the array that a step reads."""
        ...


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
    lags: np.ndarray | bool = False
    num_zeroed: int = 0
    num_copied: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class PlannedStep:
    """A step before its upload is packed.

    computed, totals: tokens of each request before and after the step.
    longest: the largest total.
    changes: what is still to be changed; None: nothing.
    news: what its upload tells; None: nothing.
    version: `RequestState.version` for which this holds.
    taken: the blocks of ``news.cells``, if the step has taken all of them.
    """

    batch: Batch
    computed: np.ndarray  # int64[N]
    totals: np.ndarray  # int64[N]
    longest: int
    changes: Changes | None
    news: News | None
    version: int
    taken: np.ndarray | None = None  # int32[K]


class StepPlanner:
    """Takes steps: checks them, changes the state of the requests, and packs the uploads.

    num_uploads: number of uploads so far.
    """

    def __init__(self, plan: Plan, state: RequestState, rows: RowAllocator, prefixes: Prefixes):
        """Creates the steps of a manager, from its parts."""
        self._plan, self._state, self._rows, self._prefixes = plan, state, rows, prefixes
        self._shapes: set[StepShape] = set()  # shapes that passed `_check_shape`
        self._shared = [  # groups of layers in which a token reads all that are before it
            group
            for group, growth in enumerate(state.growth.growths)
            if growth.stores == "tokens" and min(growth.window, growth.chunk) == INT32_MAX
        ]
        self._beginnings: tuple[object, list[PrefixGroup]] = None, []  # for what, and what is found
        self._grown: PlannedStep | None = None  # the step for which `grow` was called last
        self._is_anew = False  # whether the next upload is the first one after a reset
        self.num_uploads = 0

    def step(self, shape: StepShape, work: Work, extra: Ints, ring: Ring | None) -> Upload:
        """Takes a step; see `BlockManager.step`."""
        if not isinstance(shape, StepShape) or shape not in self._shapes:
            self._check_shape(shape)
        state, step = self._state, self._planned(work)
        batch, computed, news = step.batch, step.computed, step.news
        own = NO_IDS if isinstance(extra, tuple) and not extra else as_int32("extra", extra)
        sizes = batch.rows.size, batch.num_tokens, batch.longest, step.longest, own.size
        if news is not None:
            sizes = *sizes, news.cells.num, news.num_zeroed, news.num_copied
        check_fits(shape, sizes)
        if shape.token_ids and own.size < batch.num_tokens:
            raise ValueError(
                f"extra holds {own.size} token ids for {batch.num_tokens} tokens; pass "
                "extra=schedule.token_ids, or make the shape without token_ids"
            )
        if shape.token_ids and (row := self._prefixes.differs(batch, computed, own)) is not None:
            at = int((batch.rows == row).argmax())
            raise ValueError(
                f"extra holds other token ids for request {self._rows.name(row)!r} than its prompt "
                f"has from token {computed[at]} on; give the ids of tokens that are not computed "
                "yet, in the order of work, or make the shape without token_ids"
            )
        data = np.empty(shape.format.size, np.int32) if ring is None else ring.buffer(shape)
        encoder_lens = state.encoder_tokens[batch.rows] if shape.format.has_encoder else NO_IDS
        write_batch(shape, data, batch, computed, encoder_lens, own)
        self._change(step)
        if news is not None:
            write_news(state, shape, data, news, step.taken)
        if shape.shared_prefixes and self._shared and state.pool.has_shared_blocks:
            self._write_prefixes(shape, data, batch.rows, computed)
        state.advance(batch.rows, computed, step.totals)
        self._prefixes.after_step(batch.rows)
        return self._numbered(shape, data, ring)

    def grow(self, work: Work) -> None:
        """Gives requests the blocks for their next tokens; see `BlockManager.grow`."""
        step = self._grown = self._planned(work)
        if step.changes is not None:
            self._state.note_unsent(step.changes)
            self._change(step)

    def reset(self) -> None:
        """Lets the next upload go on from any state of the device."""
        self._state.copies.clear()
        self._is_anew = True

    def _planned(self, work: Work) -> PlannedStep:
        """Returns the step of ``work``; that of the last `grow`, if it is still valid."""
        state, batch, grown = self._state, self._rows.batch(work), self._grown
        if grown is not None and grown.batch is batch and grown.version == state.version:
            return grown
        computed = state.computed[batch.rows]
        totals = computed + batch.counts
        longest = self._check_totals(batch, totals)
        check_moved(state, batch, self._rows, totals)
        changes = plan_changes(state, batch.rows, computed, totals)
        news = find_news(state, batch.rows, totals, changes)
        return PlannedStep(batch, computed, totals, longest, changes, news, state.version)

    def _change(self, step: PlannedStep) -> None:
        """Makes the changes of a step, after which only its upload is left."""
        changes, news = step.changes, step.news
        if changes is not None:
            taken = self._state.apply(changes)
            if news is not None and news.cells is changes.fresh:
                step.taken = taken
            step.changes, step.version = None, self._state.version

    def _write_prefixes(
        self, shape: StepShape, data: np.ndarray, rows: np.ndarray, computed: np.ndarray
    ) -> None:
        """Writes the requests that begin with the same blocks; looks for them after changes."""
        state = self._state
        key = rows.tobytes(), state.beginnings, shape.shared_prefixes
        if key != self._beginnings[0]:
            ends = state.starts[:-1] + state.held(rows)[2].max(axis=1, initial=0)
            tables = [state.table[rows, state.starts[g] : ends[g]] for g in self._shared]
            sizes = [state.column_tokens[group] for group in self._shared]
            found = group_by_beginning(tables, sizes, computed, shape.shared_prefixes)
            self._beginnings = key, found
        groups = self._beginnings[1]
        if groups:
            members = np.concatenate([group.members for group in groups])
            ends = np.cumsum([group.members.size for group in groups])
            lens = np.array([group.tokens for group in groups])
            data[shape.format.fields["prefix_ends"]] = members.size  # that of groups to spare
            put(shape, data, prefix_members=members, prefix_ends=ends, prefix_lens=lens)

    def _numbered(self, shape: StepShape, data: np.ndarray, ring: Ring | None) -> Upload:
        """Counts an upload, writes its number, and returns it."""
        self.num_uploads += 1
        number = (self.num_uploads - 1) % INT32_MAX + 1
        data[0], self._is_anew = -number if self._is_anew else number, False
        return Upload(data=data if ring is None else ring.seal(), shape=shape)

    # --- checks -----------------------------------------------------------------------

    def _check_totals(self, batch: Batch, totals: np.ndarray) -> int:
        """Raises ValueError for a request that grows too long; returns the largest total."""
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
        shape.check_made_for(
            "manager",
            growths=self._state.growth.growths,
            num_blocks=self._plan.num_blocks,
            context_parallel=self._plan.context_parallel,
            max_requests=self._state.computed.size,
        )
        self._shapes.add(shape)


# --- what an upload tells ---------------------------------------------------------------


def find_news(
    state: RequestState, rows: np.ndarray, totals: np.ndarray, changes: Changes | None
) -> News | None:
    """Returns the news of a step before it makes its changes; None for nothing.

    Args:
      rows: int64[N], rows of the step.
      totals: int64[N], tokens of each row after the step.
    """
    news = None
    if (changes is not None and changes.shared) or (
        state.has_lagging and np.count_nonzero(state.lags[rows])
    ):
        news = _news_of_rows(state, rows, totals, changes)
    elif changes is not None:  # the device knows the rows as they were before the changes
        num_zeroed = _num_zeroed(state, changes.fresh, changes) if state.zeroes else 0
        news = News(changes.rows, changes.fresh, changes.held[2], False, num_zeroed)
    return _with_copies(state, news, changes) if state.copies else news


def _news_of_rows(
    state: RequestState, rows: np.ndarray, totals: np.ndarray, changes: Changes | None
) -> News:
    """Returns the news of rows that change, and of those that lag."""
    is_told, growth = state.lags[rows], state.growth
    if changes is not None:
        is_told[changes.index] = True
    index = is_told.nonzero()[0]
    rows, totals = rows[index], totals[index]
    held, sent, shared = state.held(rows), state.sent.take(rows, axis=1), ()
    if changes is not None:
        at, shared = index.searchsorted(changes.index), changes.shared
        held[:, :, at] = changes.held
        if changes.sent is not None:
            sent[:, at] = changes.sent
    source, first, end = held
    needed = growth.end_column(totals)
    for groups in (growth.crossed, growth.aligned):
        if groups.size:  # these need all that they hold
            needed[groups] = end[groups]
    cells = Cells.between(rows, np.maximum(first, sent), needed)
    if growth.aligned.size:
        groups, at = ((source < first) & (source >= sent)).nonzero()
        cells = Cells.joined([cells, Cells(groups, rows[at], source[groups, at])])
    np.maximum(sent, needed, out=sent)
    lags = (sent < end).any(axis=0)
    num_zeroed = _num_zeroed(state, cells, changes) if state.zeroes else 0
    return News(rows, cells, sent, lags, num_zeroed, sum(cell.is_read for cell in shared))


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
        fresh[at & (cells.columns == cell.column)] = not cell.is_read
    fresh &= state.groups_to_zero[cells.groups]
    num = int(np.count_nonzero(fresh))
    if state.growth.crossed.size:  # rows share the encoder blocks of a request that only grew
        known = ids[fresh & (ids != NULL_BLOCK)]
        num -= known.size - np.unique(known).size
    return num


def _with_copies(state: RequestState, news: News | None, changes: Changes | None) -> News:
    """Adds the copies that earlier calls of `grow` left to news, whoever computes in the step.

    The device learns of the cells of these copies at once, so that a later step of their requests
    has no more to tell than others.
    """
    if news is None:
        nothing = np.zeros((1 + len(state.column_tokens), 0), np.int64)
        news = News(nothing[0], NO_CELLS, nothing[1:])
    gone: set[int] = set()
    if changes is not None:
        dropped = state.ids_at(changes.dropped)
        gone = set(dropped[state.pool.others_of(dropped) == 0].tolist())
    copies = [(copy, new) for copy, new in _copies(state) if new not in gone]
    told = set(news.rows.tolist())
    cells = [
        (group, row, column)
        for (group, row, column, *_), new in copies
        if row not in told
        and column == state.sent[group, row]
        and state.columns_of(row, group)[column] == new
    ]
    more = Cells(*np.array(cells, np.int64).reshape(-1, 3).T)
    num_copied = news.num_copied + len(copies)
    return news._replace(cells=Cells.joined([news.cells, more]), num_copied=num_copied)


def _copies(state: RequestState) -> list[tuple[SharedCell, int]]:
    """Returns the copies to make and their new blocks, of those that are held, by group."""
    new = np.array(list(state.copies), np.int32)
    held = state.pool.references_of(new) > 0
    return sorted((state.copies[block_id], block_id) for block_id in new[held].tolist())


def write_news(
    state: RequestState, shape: StepShape, data: np.ndarray, news: News, taken: np.ndarray | None
) -> None:
    """Writes news into an upload, after the changes were made, and notes what the device has.

    Args:
      taken: the blocks of the cells, if all of them were taken for this step.
    """
    groups, rows, columns = cells = news.cells
    ids = state.ids_at(cells) if taken is None else taken
    ends = state.group_ends(groups)
    put(shape, data, changed_rows=news.rows, row_lengths=news.sent.T.reshape(-1))
    if ids.size:
        put(shape, data, entry_rows=rows, entry_columns=columns, entry_ids=ids, entry_ends=ends)
    if news.num_zeroed:
        zeroed = ids
        if taken is None or not state.zeroes_all:
            at = (state.pool.is_fresh[ids] & state.groups_to_zero[groups]).nonzero()[0]
            if state.growth.crossed.size:  # see `_num_zeroed`
                at = np.sort(at[np.unique(ids[at], return_index=True)[1]])
            zeroed, ends = ids[at], state.group_ends(groups[at])
        put(shape, data, zero_ids=zeroed, zero_ends=ends)
        state.pool.is_fresh[zeroed] = False
    if state.copies:
        copies = _copies(state)
        write_copies(shape, data, [(cell.group, cell.block_id, new) for cell, new in copies])
        state.copies.clear()
        state.sent[groups, rows] = np.maximum(state.sent[groups, rows], columns + 1)
    state.note_sent(news.rows, news.sent, news.lags)
