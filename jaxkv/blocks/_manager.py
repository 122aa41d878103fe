"""The blocks of every running request, over all groups of one pool."""

import bisect
import dataclasses
import itertools
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from jaxkv.blocks._pool import NULL_BLOCK, BlockPool, OutOfBlocksError
from jaxkv.blocks._update import TableEntry, TableUpdate
from jaxkv.checks import check_count, check_positive
from jaxkv.planning import Plan
from jaxkv.rich_repr import html_table

MAX_ROWS = 8  # that Jupyter is shown

ZERO_POLICIES = ("never", "when_needed", "always")


@dataclasses.dataclass(slots=True)
class _Holding:
    """The blocks that one request holds: per group its row, null where nothing is held."""

    row: int
    block_ids: list[list[int]]
    first_live: list[int]  # per group: no block is held below this index
    encoder_tokens: int


class _Change(NamedTuple):
    """What growing does to one group of one request, in indices into its row."""

    fresh: list[int]  # to allocate
    dropped: list[int]  # to give back
    first_live: int


class BlockManager:
    """Blocks of every running request, over all groups of one pool.

    Not thread-safe; one scheduler owns it.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        max_requests: int,
        zero_policy: str = "when_needed",
    ):
        """Starts with every block free.

        Args:
          plan: says how many blocks there are and how each group of layers grows.
          max_requests: rows of the block tables.
          zero_policy: which fresh blocks to list for zeroing. ``"never"``: none.
            ``"when_needed"``: those of groups whose bytes another group reads
            differently. ``"always"``: all, so that no tenant sees another's bytes.
        """
        check_positive(max_requests=max_requests)
        self._max_requests = max_requests
        if zero_policy not in ZERO_POLICIES:
            raise ValueError(f"zero_policy={zero_policy!r}; use one of {ZERO_POLICIES}")
        self.pool = BlockPool(plan.num_blocks)
        #: per group, the blocks of attention sinks, which all requests share
        self.sink_block_ids = tuple(self.pool.allocate(g.reserved_blocks) for g in plan.groups)
        self._plan = plan
        self._specs = tuple(group.spec for group in plan.groups)
        self._zero = {
            "never": (False,) * len(self._specs),
            "when_needed": plan.groups_to_zero,
            "always": (True,) * len(self._specs),
        }[zero_policy]
        self._requests: dict[Hashable, _Holding] = {}
        self._free_rows = deque(range(max_requests))
        self._entries: dict[int, TableEntry] = {}  # by row
        self._zero_ids: list[list[int]] = [[] for _ in self._specs]

    def __repr__(self) -> str:
        pool = self.pool
        return (
            f"BlockManager({len(self._requests)} of {self._max_requests} rows taken, "
            f"{pool.num_free_blocks:,} of {pool.num_blocks:,} blocks free)"
        )

    def _repr_html_(self) -> str:
        def counts(holding: _Holding) -> list[int]:
            return [sum(i != NULL_BLOCK for i in ids) for ids in holding.block_ids]

        held = [
            (request, holding.row, *counts(holding))
            for request, holding in itertools.islice(self._requests.items(), MAX_ROWS)
        ]
        groups = [f"blocks of group {index}" for index in range(len(self._specs))]
        more = f"; {MAX_ROWS} of them shown" if len(self._requests) > MAX_ROWS else ""
        return html_table(held, caption=f"{self!r}{more}", header=["request", "row", *groups])

    @property
    def requests(self) -> Mapping[Hashable, int]:
        """Running requests and the table row of each."""
        return {request: holding.row for request, holding in self._requests.items()}

    def held_blocks(self) -> tuple[int, ...]:
        """Per group, table entries that hold a block (a shared block counts for each)."""
        rows = [holding.block_ids for holding in self._requests.values()]
        return tuple(
            sum(block_id != NULL_BLOCK for row in rows for block_id in row[group])
            for group in range(len(self._specs))
        )

    def block_ids(self, request: Hashable) -> tuple[tuple[int, ...], ...]:
        """Per group, the ids of the request's blocks in order; null where none is held."""
        return tuple(tuple(ids) for ids in self._holding(request).block_ids)

    def start(
        self,
        request: Hashable,
        *,
        shared_block_ids: Sequence[Sequence[int]] | None = None,
        encoder_tokens: int = 0,
    ) -> int:
        """Gives a request a table row and no blocks yet. Returns the row.

        Args:
          request: any hashable name.
          shared_block_ids: per group, the leading blocks of a prefix that another
            request computed; they are shared, not copied and not zeroed.
          encoder_tokens: for cross attention.

        Raises:
          ValueError: the request runs already, or no row is free.
        """
        check_count(encoder_tokens=encoder_tokens)
        if encoder_tokens > self._plan.limits.max_encoder_tokens:
            raise ValueError(
                f"encoder_tokens={encoder_tokens} is more than the plan admits: "
                f"limits.max_encoder_tokens={self._plan.limits.max_encoder_tokens}"
            )
        if request in self._requests:
            raise ValueError(f"request={request!r} is running already; finish it first")
        if not self._free_rows:
            raise ValueError(
                f"request={request!r} finds no free row: {len(self._requests)} requests run; "
                "raise max_requests or finish one"
            )
        prefix = [list(ids) for ids in shared_block_ids or [()] * len(self._specs)]
        if len(prefix) != len(self._specs):
            raise ValueError(
                f"shared_block_ids has {len(prefix)} groups; the pool has {len(self._specs)}"
            )
        self._check_prefix(prefix)
        self.pool.share([i for ids in prefix for i in ids if i != NULL_BLOCK])
        row = self._free_rows.popleft()
        self._requests[request] = _Holding(row, prefix, [0] * len(prefix), encoder_tokens)
        self._entries[row] = TableEntry(row, [list(ids) for ids in prefix], overwrite=True)
        return row

    def missing_blocks(self, request: Hashable, num_computed_tokens: int, num_tokens: int) -> int:
        """Free blocks that `grow` would take, beyond those it gives back itself."""
        holding = self._holding(request)
        return self._missing(holding, self._changes(holding, num_computed_tokens, num_tokens))

    def _missing(self, holding: _Holding, changes: Sequence[_Change]) -> int:
        returned = sum(self.pool.references(i) == 1 for i in _dropped_ids(holding, changes))
        return max(0, sum(len(change.fresh) for change in changes) - returned)

    def grow(self, request: Hashable, num_computed_tokens: int, num_tokens: int) -> None:
        """Makes the request hold every block it needs to compute up to ``num_tokens``.

        Blocks that fell out of a window are given back first, so they may be handed
        out again at once: every step that reads them must have been dispatched.

        Args:
          request: a running request.
          num_computed_tokens: its tokens already in the cache.
          num_tokens: its tokens in the cache after the step.

        Raises:
          OutOfBlocksError: not enough free blocks; nothing is changed.
        """
        holding = self._holding(request)
        changes = self._changes(holding, num_computed_tokens, num_tokens)
        missing = self._missing(holding, changes)
        if missing > self.pool.num_free_blocks:
            raise OutOfBlocksError(missing, self.pool.num_free_blocks)
        self.pool.free(_dropped_ids(holding, changes))
        for group, change in enumerate(changes):
            for index in change.dropped:
                holding.block_ids[group][index] = NULL_BLOCK
            holding.first_live[group] = change.first_live
            if change.fresh:
                self._extend(holding, group, change.fresh)

    def finish(self, request: Hashable) -> None:
        """Gives back the request's row and drops its reference to every block."""
        holding = self._holding(request)
        self.pool.free([i for ids in holding.block_ids for i in ids if i != NULL_BLOCK])
        nothing = [()] * len(self._specs)
        self._entries[holding.row] = TableEntry(holding.row, nothing, overwrite=True)
        self._free_rows.append(holding.row)
        del self._requests[request]

    def take_update(self) -> TableUpdate:
        """Everything that changed since the last call; call it once per step, and keep the
        answer until it has been packed: it is not given a second time.

        At most one entry per row, so the order of entries does not matter.
        """
        update = TableUpdate(
            tuple(self._entries.values()),
            # A block may have changed hands since the last call; zero it once.
            tuple(tuple(dict.fromkeys(ids)) for ids in self._zero_ids),
        )
        self._entries = {}
        self._zero_ids = [[] for _ in self._specs]
        return update

    def swap_rows(self, first: int, second: int) -> None:
        """Follows `jaxkv.block_tables.swap_rows`: whoever had one row has the other now.

        Swap on the device before the next update is applied there.
        """
        rows = {first: second, second: first}
        for row in rows:
            if not 0 <= row < self._max_requests:
                raise ValueError(f"row {row} is not in 0..{self._max_requests - 1}")
        for holding in self._requests.values():
            holding.row = rows.get(holding.row, holding.row)
        self._free_rows = deque(rows.get(row, row) for row in self._free_rows)
        moved = [
            entry._replace(row=rows.get(entry.row, entry.row)) for entry in self._entries.values()
        ]
        self._entries = {entry.row: entry for entry in moved}

    def _check_prefix(self, prefix: Sequence[Sequence[int]]) -> None:
        for room, ids in zip(self._plan.row_blocks, prefix, strict=True):
            if len(ids) > room:
                raise ValueError(f"shared_block_ids has {len(ids)} blocks for a row of {room}")

    def _holding(self, request: Hashable) -> _Holding:
        if request not in self._requests:
            raise ValueError(f"request={request!r} is not running; start it first")
        return self._requests[request]

    def _changes(
        self, holding: _Holding, num_computed_tokens: int, num_tokens: int
    ) -> list[_Change]:
        check_count(num_computed_tokens=num_computed_tokens, num_tokens=num_tokens)
        if num_computed_tokens > num_tokens:
            raise ValueError(
                f"num_computed_tokens={num_computed_tokens} is more than num_tokens={num_tokens}; "
                "the second counts those of the first, too"
            )
        if num_tokens > self._plan.max_model_len:
            raise ValueError(
                f"num_tokens={num_tokens} is more than the plan's max_model_len="
                f"{self._plan.max_model_len}; finish the request, or plan for longer ones"
            )
        limit = self._plan.limits.max_in_flight_tokens
        if num_tokens - num_computed_tokens > limit:
            raise ValueError(
                f"num_tokens={num_tokens} computes {num_tokens - num_computed_tokens} tokens in a "
                f"step; the plan counts on limits.max_in_flight_tokens={limit}"
            )
        changes = []
        for spec, ids, start in zip(
            self._specs, holding.block_ids, holding.first_live, strict=True
        ):
            live = spec.live_blocks(
                self._plan.local_tokens(num_computed_tokens),
                self._plan.local_tokens(num_tokens),
                encoder_tokens=holding.encoder_tokens,
            )
            _check_still_held(live, ids, start, num_computed_tokens)
            first = max(start, min(live[0] if live else start, len(ids)))
            fresh = list(live[bisect.bisect_left(live, len(ids)) :])
            # A range has no holes, so only what lies below it can fall out.
            stop = first if isinstance(live, range) else len(ids)
            held = (i for i in range(start, stop) if ids[i] != NULL_BLOCK)
            changes.append(_Change(fresh, [i for i in held if i not in live], first))
        return changes

    def _extend(self, holding: _Holding, group: int, fresh: list[int]) -> None:
        """Allocates blocks for the indices in ``fresh``, all beyond the row's end."""
        ids = holding.block_ids[group]
        start = len(ids)
        new_ids = self.pool.allocate(len(fresh))
        ids.extend([NULL_BLOCK] * (fresh[-1] + 1 - start))
        for index, block_id in zip(fresh, new_ids, strict=True):
            ids[index] = block_id
        if self._zero[group]:
            self._zero_ids[group].extend(new_ids)
        pending = self._entries.get(holding.row)
        if pending is None:
            pending = TableEntry(holding.row, [()] * len(self._specs))
        block_ids = list(pending.block_ids)
        block_ids[group] = [*block_ids[group], *ids[start:]]
        self._entries[holding.row] = pending._replace(block_ids=block_ids)


def _check_still_held(live: Sequence[int], ids: list[int], start: int, computed: int) -> None:
    """Refuses to go back to blocks that were given back or skipped."""
    # A range has no holes: it is held from ``start`` on.
    known = live[:1] if isinstance(live, range) else live
    if any(i < start or (i < len(ids) and ids[i] == NULL_BLOCK) for i in known if i < len(ids)):
        raise ValueError(
            f"num_computed_tokens={computed} needs a block that the request does not hold: it was "
            "given back, because an earlier call said that more was computed, or never taken, "
            'because cache_mode="align" keeps only the states that earlier calls announced'
        )


def _dropped_ids(holding: _Holding, changes: Sequence[_Change]) -> list[int]:
    return [
        ids[index]
        for ids, change in zip(holding.block_ids, changes, strict=True)
        for index in change.dropped
    ]
