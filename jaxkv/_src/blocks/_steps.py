"""The steps of a `BlockManager`: blocks for new tokens, and the uploads. No jax."""

import dataclasses

import numpy as np

from jaxkv._src.blocks._cells import NO_IDS, Changes
from jaxkv._src.blocks._changes import plan_changes
from jaxkv._src.blocks._prefixes import Prefixes
from jaxkv._src.blocks._resuming import check_moved
from jaxkv._src.blocks._rows import RowAllocator, Work
from jaxkv._src.blocks._state import RequestState
from jaxkv._src.blocks._table_updates import TableUpdates, find_updates, write_updates
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning import Plan
from jaxkv._src.prefixes import PrefixGroup, group_by_beginning
from jaxkv._src.uploads import (
    Batch,
    Ints,
    Ring,
    StepShape,
    Upload,
    as_int32,
    check_fits,
    put,
    write_batch,
)


@dataclasses.dataclass(slots=True, eq=False)
class PlannedStep:
    """A step before its upload is packed.

    computed, totals: tokens of each request before and after the step.
    longest: the largest total.
    changes: what is still to be changed; None: nothing.
    updates: what its upload tells the device; None without any.
    version: `RequestState.version` for which this holds.
    taken: the blocks of ``updates.cells``, if the step has taken all of them.
    """

    batch: Batch
    computed: np.ndarray  # int64[N]
    totals: np.ndarray  # int64[N]
    longest: int
    changes: Changes | None
    updates: TableUpdates | None
    version: int
    taken: np.ndarray | None = None  # int32[K]


class StepPlanner:
    """Takes steps: checks them, changes the state of the requests, and packs the uploads.

    num_uploads: number of uploads so far.
    """

    def __init__(self, plan: Plan, state: RequestState, rows: RowAllocator, prefixes: Prefixes):
        """Creates the steps of a manager, from its parts."""
        self._plan, self._state, self._rows = plan, state, rows
        self._cached, self._loads = prefixes.cached, prefixes.loads
        self._shape: object = self  # the shape that passed `_check_shape` last
        self._shapes: set[StepShape] = set()  # all that passed
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
        if shape is not self._shape:
            self._check_shape(shape)
        state, step = self._state, self._planned(work)
        batch, computed, updates = step.batch, step.computed, step.updates
        own = NO_IDS if isinstance(extra, tuple) and not extra else as_int32("extra", extra)
        sizes = batch.rows.size, batch.num_tokens, batch.longest, step.longest, own.size
        if updates is not None:
            sizes = *sizes, updates.cells.num, updates.num_zeroed, updates.num_copied
        check_fits(shape, sizes)
        if shape.token_ids and own.size < batch.num_tokens:
            raise ValueError(
                f"extra holds {own.size} token ids for {batch.num_tokens} tokens; pass "
                "extra=schedule.token_ids, or make the shape without token_ids"
            )
        if shape.token_ids and (row := self._cached.differs(batch, computed, own)) is not None:
            at = int((batch.rows == row).argmax())
            raise ValueError(
                f"extra holds other token ids for request {self._rows.name(row)!r} than its prompt "
                f"has from token {computed[at]} on; give the ids of tokens that are not computed "
                "yet, in the order of work, or make the shape without token_ids"
            )
        data = np.empty(shape.format.size, np.int32) if ring is None else ring.buffer(shape)
        encoder_lens = state.encoder_tokens[batch.rows] if shape.format.has_encoder else NO_IDS
        accepted = state.accepted(batch.rows) if shape.format.has_drafts else NO_IDS
        write_batch(shape, data, batch, computed, encoder_lens, accepted, own)
        self._change(step)
        self._loads.before_step(batch.rows)
        if updates is not None:
            write_updates(state, shape, data, updates, step.taken)
        if groups := self._find_groups(batch.rows, computed, shape.shared_prefixes):
            _write_groups(shape, data, groups)
        state.advance(batch.rows, computed, step.totals)
        self._cached.after_step(batch.rows)
        return self._numbered(shape, data, ring)

    def grow(self, work: Work) -> None:
        """Gives requests the blocks for their next tokens; see `BlockManager.grow`."""
        step = self._grown = self._planned(work)
        if step.changes is not None:
            self._state.mark_unsynced(step.changes)
            self._change(step)

    def follow(self, before: "StepPlanner") -> None:
        """Counts on; the next upload goes on from any state of the device."""
        self.num_uploads, self._is_anew = before.num_uploads, True

    def _planned(self, work: Work) -> PlannedStep:
        """Returns the step of ``work``; that of the last `grow`, if it is still valid."""
        state, batch, grown = self._state, self._rows.batch(work), self._grown
        if grown is not None and grown.version == state.version and _are_equal(grown.batch, batch):
            return grown
        if state.copies:
            state.drop_unread_copies()
        computed = state.computed[batch.rows]
        totals = computed + batch.counts
        longest = self._check_totals(batch, totals)
        check_moved(state, batch, self._rows, totals)
        changes = plan_changes(state, batch.rows, computed, totals)
        updates = find_updates(state, batch.rows, totals, changes)
        return PlannedStep(batch, computed, totals, longest, changes, updates, state.version)

    def _change(self, step: PlannedStep) -> None:
        """Makes the changes of a step, after which only its upload is left."""
        changes, updates = step.changes, step.updates
        if changes is not None:
            taken = self._state.apply(changes)
            if updates is not None and updates.cells is changes.fresh:
                step.taken = taken
            step.changes, step.version = None, self._state.version

    def shared_tokens(self, work: Work, most: int) -> int:
        """Returns the tokens that groups save; see `BlockManager.shared_tokens`."""
        rows = self._rows.batch(work).rows
        return sum(
            group.saved for group in self._find_groups(rows, self._state.computed[rows], most)
        )

    def _find_groups(self, rows: np.ndarray, computed: np.ndarray, most: int) -> list[PrefixGroup]:
        """Returns the requests that begin with the same blocks; looks for them after changes."""
        state = self._state
        if not most or not self._shared or not state.pool.has_shared_blocks:
            return []
        key = rows.tobytes(), state.beginnings, most
        if key != self._beginnings[0]:
            ends = state.starts[:-1] + state.allocated(rows)[2].max(axis=1, initial=0)
            tables = [state.table[rows, state.starts[g] : ends[g]] for g in self._shared]
            sizes = [state.block_tokens[group] for group in self._shared]
            self._beginnings = key, group_by_beginning(tables, sizes, computed, most)
        return self._beginnings[1]

    def _numbered(self, shape: StepShape, data: np.ndarray, ring: Ring | None) -> Upload:
        """Counts an upload, writes its number, and returns it."""
        self.num_uploads += 1
        number = (self.num_uploads - 1) % INT32_MAX + 1
        data[0], self._is_anew = -number if self._is_anew else number, False
        return Upload(data=data if ring is None else ring.flush(), shape=shape)

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
        if shape not in self._shapes:
            shape.check_made_for(
                "manager",
                growths=self._state.growth.growths,
                num_blocks=self._plan.num_blocks,
                context_parallel=self._plan.context_parallel,
                max_requests=self._state.computed.size,
            )
            self._shapes.add(shape)
        self._shape = shape


def _write_groups(shape: StepShape, data: np.ndarray, groups: list[PrefixGroup]) -> None:
    """Writes requests that begin with the same blocks."""
    members = np.concatenate([group.members for group in groups])
    ends = np.cumsum([group.members.size for group in groups])
    lens = np.array([group.tokens for group in groups])
    data[shape.format.fields["prefix_ends"]] = members.size  # that of groups to spare
    put(shape, data, prefix_members=members, prefix_ends=ends, prefix_lens=lens)


def _are_equal(a: Batch, b: Batch) -> bool:
    return a is b or (np.array_equal(a.rows, b.rows) and np.array_equal(a.counts, b.counts))
