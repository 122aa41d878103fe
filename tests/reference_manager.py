"""A reference block manager in plain Python: one request and one block at a time.

Written to be obviously right, not fast. A step first releases all dropped blocks, by group, then
by request. Then it takes blocks group by group: first for the new columns of every request, then
for the private copies of shared blocks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxkv._src.planning import Plan
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    LayerSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)

NEVER = 2**62


class OutOfBlocks(Exception):
    """Fewer blocks are free than a step takes."""


class Request:
    """One running request: its row, its progress, and per group the block in each column."""

    def __init__(self, row: int, groups: int, encoder_tokens: int):
        self.row, self.computed, self.encoder_tokens = row, 0, encoder_tokens
        self.reached = 0  # computed tokens before any rewind
        self.resumed = 0  # computed tokens before the last step
        #: per group, the first end of a block whose "all" state may lie in the block of a draft
        self.lost = [NEVER] * groups
        self.blocks: list[dict[int, int]] = [{} for _ in range(groups)]
        self.lengths = [0] * groups  # columns of the table row that are in use
        self.firsts = [0] * groups  # per group, columns before this one were released


class Change(NamedTuple):
    """A block that a request takes for a column.

    copied: the shared block that it replaces, if the request still reads that one's content.
    """

    request: object
    group: int
    column: int
    block_id: int
    copied: int | None


class ReferenceManager:
    """A block manager that keeps everything in dictionaries."""

    def __init__(self, plan: Plan, *, max_requests: int):
        self.plan = plan
        self.specs = [group.specs[0] for group in plan.groups]
        sinks = sum(group.reserved_blocks for group in plan.groups)
        self.free = deque(range(1 + sinks, plan.num_blocks))
        self.references: dict[int, int] = {}
        self.free_rows = deque(range(max_requests))
        self.requests: dict[object, Request] = {}

    # --- requests -----------------------------------------------------------------

    def start(self, name: object, encoder_tokens: int = 0) -> None:
        row = self.free_rows.popleft()
        self.requests[name] = Request(row, len(self.specs), encoder_tokens)

    def finish(self, name: object) -> None:
        request = self.requests.pop(name)
        for held in request.blocks:
            for column in sorted(held):
                self._release(held[column])
        self.free_rows.append(request.row)

    def fork(self, donor: object, name: object, num_tokens: int) -> None:
        """Starts a request on a donor's prefix; KeyError if the donor lacks a block of it."""
        source = self.requests[donor]
        taken = []
        for group, spec in enumerate(self.specs):
            columns = self._prefix(spec, source, num_tokens)
            taken.append({column: source.blocks[group][column] for column in columns})
        self.start(name, source.encoder_tokens)
        request = self.requests[name]
        request.computed, request.blocks = num_tokens, taken
        request.reached = request.resumed = num_tokens
        request.lost = [end if end <= num_tokens else NEVER for end in source.lost]
        for group, spec in enumerate(self.specs):
            request.lengths[group] = max(taken[group], default=-1) + 1
            if not isinstance(spec, StateSpec | CrossAttentionSpec):
                size = spec.block_size * self.plan.context_parallel
                request.lengths[group] = -(-num_tokens // size)
                request.firsts[group] = _oldest_visible(spec, num_tokens) // size
        for held in taken:
            for block_id in held.values():
                self.references[block_id] += 1

    def rewind(self, name: object, num_tokens: int) -> None:
        """Reduces progress; KeyError if the request lacks a block that its next token reads."""
        request = self.requests[name]
        for group, spec in enumerate(self.specs):
            if isinstance(spec, StateSpec):
                drafted = request.reached - request.resumed <= 1 + spec.speculative_blocks
                drafted = drafted and num_tokens > request.resumed
                kept = num_tokens in (0, request.computed)
                kept = kept or self._is_kept(spec, request, num_tokens)
                if not drafted and not kept:
                    raise KeyError(group)
                if spec.cache_mode != "none" and num_tokens:
                    request.blocks[group][(num_tokens - 1) // spec.block_size]
            elif not isinstance(spec, CrossAttentionSpec):
                if _oldest_visible(spec, num_tokens) // spec.block_size < request.firsts[group]:
                    raise KeyError(group)
        request.computed = num_tokens

    def trim(self, names: Sequence[object]) -> None:
        """Releases the blocks that the next token of each request does not attend to."""
        for group, spec in enumerate(self.specs):
            if isinstance(spec, StateSpec | CrossAttentionSpec):
                continue
            size = spec.block_size * self.plan.context_parallel
            for name in names:
                request = self.requests[name]
                first = _oldest_visible(spec, request.computed) // size
                first = min(max(request.firsts[group], first), request.lengths[group])
                for column in sorted(request.blocks[group]):
                    if column < first:
                        self._release(request.blocks[group].pop(column))
                request.firsts[group] = first

    # --- steps --------------------------------------------------------------------

    def grow(self, work: Mapping[object, int]) -> list[Change]:
        """Gives every request the blocks of its next tokens, or raises and changes nothing."""
        wanted = {name: self._wanted(self.requests[name], n) for name, n in work.items()}
        dropped, fresh, shared = [], [], []
        for group, spec in enumerate(self.specs):
            for name in work:
                request, held = self.requests[name], self.requests[name].blocks[group]
                for column in _dropped(spec, held, wanted[name][group]):
                    dropped.append((name, group, column))
                for column in wanted[name][group]:
                    if column not in held and column >= request.firsts[group]:
                        fresh.append((name, group, column))
            for name in work:
                for column in self._written(group, self.requests[name], wanted[name][group]):
                    shared.append((name, group, column))
        shared = self._still_shared(shared)
        freed = sum(self.references[self._block(*cell)] == 1 for cell in dropped)
        if len(fresh) + len(shared) - freed > len(self.free):
            raise OutOfBlocks
        for name, group, column in dropped:
            self._release(self.requests[name].blocks[group].pop(column))
        changes = []
        for group in range(len(self.specs)):
            for cell in [c for c in fresh if c[1] == group]:
                changes.append(self._take(*cell, None))
            for cell in [c for c in shared if c[1] == group]:
                changes.append(self._take(*cell, self._block(*cell)))
        for change in changes:
            if change.copied is not None:
                self._release(change.copied)
        for name in work:
            self._set_lengths(name, wanted[name])
        return [self.with_content(change) for change in changes]

    def compute(self, work: Mapping[object, int]) -> None:
        for name, count in work.items():
            request = self.requests[name]
            request.resumed = request.computed
            request.computed += count
            request.reached = request.computed
            for group, spec in enumerate(self.specs):
                if request.resumed < request.lost[group]:
                    request.lost[group] = _lost_end(spec, request.resumed, request.computed)

    # --- definitions --------------------------------------------------------------

    def _wanted(self, request: Request, count: int) -> list[list[int]]:
        """Returns, per group, the columns that a request must hold to compute its next tokens."""
        computed, total = request.computed, request.computed + count
        return [self._columns(spec, request, computed, total) for spec in self.specs]

    def _columns(self, spec: LayerSpec, request: Request, computed: int, total: int) -> list[int]:
        size = spec.block_size * self.plan.context_parallel
        if isinstance(spec, CrossAttentionSpec):
            return list(range(-(-request.encoder_tokens // size)))
        if isinstance(spec, StateSpec):
            last = (total - 1) // size
            drafts = range(1, 1 + spec.speculative_blocks)
            if spec.cache_mode == "none":
                return [0, *drafts]
            newest = [last, *(last + draft for draft in drafts)]
            if spec.cache_mode == "all":
                return [*range(last), *newest]
            source = [(computed - 1) // size] if computed else []
            return [*source, *(column for column in newest if column not in source)]
        first = _oldest_visible(spec, computed) // size
        return list(range(first, (total - 1) // size + 1))

    def _prefix(self, spec: LayerSpec, donor: Request, num_tokens: int) -> list[int]:
        """Returns the columns that a fork at ``num_tokens`` shares; KeyError for a lost state."""
        if isinstance(spec, CrossAttentionSpec):
            return sorted(donor.blocks[self.specs.index(spec)])
        if not num_tokens:
            return []
        size = spec.block_size * self.plan.context_parallel
        last = (num_tokens - 1) // size
        if not isinstance(spec, StateSpec):
            return list(range(_oldest_visible(spec, num_tokens) // size, last + 1))
        newest = num_tokens == donor.computed
        if not newest and not self._is_kept(spec, donor, num_tokens):
            raise KeyError(num_tokens)
        if newest and 1 < donor.reached - donor.resumed <= 1 + spec.speculative_blocks:
            running = (donor.reached - 1) // size if spec.cache_mode == "align" else last
            if num_tokens > donor.resumed + 1 or last != running:
                raise KeyError(num_tokens)  # the state may lie in the block of a draft
        return {"none": [0], "align": [last], "all": list(range(last + 1))}[spec.cache_mode]

    def _is_kept(self, spec: StateSpec, request: Request, num_tokens: int) -> bool:
        """Returns whether a block keeps the state after these tokens although newer ones exist.

        With "align", a step that crosses the end of a block does not write the state there. It
        writes the newest state, and keeps the one that it resumed from, unless that may be a
        draft's.
        """
        resumed = num_tokens == 0
        if spec.cache_mode == "all":
            resumed = num_tokens < request.lost[self.specs.index(spec)]
        resumed = resumed or (num_tokens == request.resumed and not spec.speculative_blocks)
        return spec.cache_mode != "none" and num_tokens % spec.block_size == 0 and resumed

    def _written(self, group: int, request: Request, wanted: Sequence[int]) -> list[int]:
        """Returns the held columns that the request's next tokens may write over."""
        spec, held = self.specs[group], request.blocks[group]
        if isinstance(spec, CrossAttentionSpec):
            return []
        begin = request.computed // (spec.block_size * self.plan.context_parallel)
        if isinstance(spec, StateSpec) and spec.cache_mode == "none":
            begin = 0
        if isinstance(spec, StateSpec) and spec.cache_mode == "align":
            begin = max(wanted) - spec.speculative_blocks
            held = {column: held[column] for column in held if column in wanted}
        return sorted(column for column in held if column >= begin)

    def _still_shared(self, cells: list[tuple]) -> list[tuple]:
        """Returns the cells whose block must be replaced, because others still hold it.

        If all holders of a block replace it in one step, the last one keeps it.
        """
        shared = [cell for cell in cells if self.references[self._block(*cell)] > 1]
        kept = []
        for index, cell in enumerate(shared):
            block_id = self._block(*cell)
            leaving = [i for i, other in enumerate(shared) if self._block(*other) == block_id]
            if len(leaving) < self.references[block_id] or index != leaving[-1]:
                kept.append(cell)
        return kept

    def with_content(self, change: Change) -> Change:
        """Clears ``copied`` if the request no longer reads what the column holds."""
        if change.copied is None:
            return change
        spec, request = self.specs[change.group], self.requests[change.request]
        if isinstance(spec, StateSpec) and spec.cache_mode == "none":
            holds = change.column == 0 and request.computed > 0
        else:
            size = spec.block_size * self.plan.context_parallel
            holds = change.column * size < request.computed
        return change if holds else change._replace(copied=None)

    def _set_lengths(self, name: object, wanted: Sequence[Sequence[int]]) -> None:
        request = self.requests[name]
        for group, (spec, columns) in enumerate(zip(self.specs, wanted, strict=True)):
            length = max(columns, default=-1) + 1
            if not (isinstance(spec, StateSpec) and spec.cache_mode == "align"):
                length = max(length, request.lengths[group])
            request.lengths[group] = length
            if not isinstance(spec, StateSpec) and columns:
                request.firsts[group] = max(request.firsts[group], columns[0])

    def _take(self, name: object, group: int, column: int, copied: int | None) -> Change:
        block_id = self.free.popleft()
        self.references[block_id] = 1
        self.requests[name].blocks[group][column] = block_id
        return Change(name, group, column, block_id, copied)

    def _block(self, name: object, group: int, column: int) -> int:
        return self.requests[name].blocks[group][column]

    def _release(self, block_id: int) -> None:
        self.references[block_id] -= 1
        if not self.references[block_id]:
            self.free.append(block_id)


def _oldest_visible(spec: LayerSpec, position: int) -> int:
    """Returns the oldest position that the token at ``position`` attends to."""
    oldest = position
    while oldest > 0 and _sees(spec, position, oldest - 1):
        oldest -= 1
    return oldest


def _sees(spec: LayerSpec, query: int, key: int) -> bool:
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return query - key < spec.sliding_window
    if isinstance(spec, ChunkedAttentionSpec):
        return key // spec.chunk_size == query // spec.chunk_size
    return True


def _dropped(spec: LayerSpec, held: dict[int, int], wanted: Sequence[int]) -> list[int]:
    """Returns the held columns that are no longer needed, ascending."""
    if isinstance(spec, StateSpec):
        return sorted(c for c in held if spec.cache_mode == "align" and c not in wanted)
    return sorted(column for column in held if wanted and column < wanted[0])


def _lost_end(spec: LayerSpec, before: int, total: int) -> int:
    """Returns the first end of a block whose "all" state a step may leave in a draft's block."""
    if isinstance(spec, StateSpec) and spec.cache_mode == "all":
        if total - before <= 1 + spec.speculative_blocks:
            for end in range(before + 2, total + 1):
                if end % spec.block_size == 0:
                    return end
    return NEVER
