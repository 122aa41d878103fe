"""Uploads, and arguments of `pack_step`, from vLLM's `SchedulerOutput`. No jax."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK, cdiv
from jaxkv._src.interop.vllm._fields import get
from jaxkv._src.interop.vllm._output import Arrival, read_arrivals, read_copies, read_work
from jaxkv._src.interop.vllm._split import split
from jaxkv._src.planning import Plan, check_rows
from jaxkv._src.uploads import StepShape, TableEntry, Upload, pack_step

Ids = tuple[tuple[int, ...], ...]  # per group, the block ids of a request


class StepChanges(NamedTuple):
    """A step of vLLM's scheduler, as the arguments of `jaxkv.pack_step` with the same names.

    Requests are in the order of ``num_scheduled_tokens``.
    """

    entries: tuple[TableEntry, ...]
    rows: list[int]
    num_computed_tokens: list[int]
    num_new_tokens: list[int]
    zero_ids: list[list[int]]
    copies: list[list[tuple[int, int]]]


class _Request(NamedTuple):
    """The row and the block ids of a request, as in a worker of vLLM."""

    row: int
    ids: Ids


class _NewBlocks(NamedTuple):
    """New block ids of a request, and the logical index of the first one, per group."""

    request: str
    num_computed_tokens: int
    starts: tuple[int, ...]
    ids: Ids

    def entry(self, row: int) -> TableEntry:
        return TableEntry(row, self.ids, self.starts)


class SchedulerTables:
    """The block tables of a vLLM scheduler's requests.

    vLLM's scheduler sends only new block ids, and its workers have to remember the others.
    """

    def __init__(self, plan: Plan, *, max_requests: int):
        """Creates tables without requests.

        Args:
          plan: from `plan_from_config`.
          max_requests: rows of the block tables; at least ``max_num_seqs`` of vLLM.
        """
        check_rows(plan, max_requests)
        self._plan, self._max_requests = plan, max_requests
        self._requests: dict[str, _Request] = {}

    @property
    def rows(self) -> dict[str, int]:
        """Request -> row, for all requests that have a row."""
        return {name: request.row for name, request in self._requests.items()}

    def block_ids(self, request: str) -> Ids:
        """Returns the block ids that a request's row lists, per group."""
        return self._requests[request].ids

    def follow(self, scheduler_output: object) -> StepChanges:
        """Applies a step to the tables and returns it, for callers who pack it themselves.

        Finished and preempted requests lose their rows; other requests without work keep theirs.
        Fresh blocks are zeroed by ``plan.groups_to_zero``, because vLLM zeroes by another rule; of
        ``new_block_ids_to_zero`` only blocks that a request already had (a failed load) count.
        ``num_computed_tokens`` is the scheduler's; with asynchronous scheduling and drafts, vLLM's
        workers correct it, and so must you.

        Args:
          scheduler_output: vLLM's object, or a mapping with its fields.

        Raises:
          ValueError: more requests than rows, block ids for another number of groups, an unknown
            request, or a copy of a block that no request holds. Nothing has changed then.
        """
        changes, self._requests = self._next(scheduler_output)
        return changes

    def pack(
        self,
        shape: StepShape,
        scheduler_output: object,
        *,
        extra: Sequence[int] = (),
        encoder_lens: Sequence[int] = (),
        accepted_tokens: Sequence[int] = (),
    ) -> tuple[Upload, ...]:
        """Applies a step to the tables and packs it into uploads, the last with the requests.

        A prefix hit may list more blocks than fit into the shape. Earlier uploads, without
        requests, then bring the first of them: apply all uploads in order with the same compiled
        step, and discard the results of the earlier ones.

        Args:
          shape: the sizes to pad to.
          scheduler_output: vLLM's object, or a mapping with its fields.
          extra, encoder_lens, accepted_tokens: as for `jaxkv.pack_step`.

        Raises:
          ValueError: as for `follow` and `pack_step`. Nothing has changed then.
        """
        changes, requests = self._next(scheduler_output)
        *earlier, (entries, zero_ids) = split(shape, changes.entries, changes.zero_ids)
        uploads = [pack_step(shape, entries=part, zero_ids=ids) for part, ids in earlier]
        rest = changes._replace(entries=tuple(entries), zero_ids=zero_ids)._asdict()
        own = {"encoder_lens": encoder_lens, "accepted_tokens": accepted_tokens, "extra": extra}
        uploads.append(pack_step(shape, **rest, **own))
        self._requests = requests
        return tuple(uploads)

    def _next(self, output: Any) -> tuple[StepChanges, dict[str, _Request]]:
        """Returns a step, and the allocated blocks after it."""
        requests = dict(self._requests)
        preempted = get(output, "preempted_req_ids", None) or ()
        for request in (*get(output, "finished_req_ids"), *preempted):
            requests.pop(request, None)
        arrivals = list(read_arrivals(output))
        additions = [
            self._take(requests, arrival)
            for arrival in arrivals
            if self._changes_row(requests, arrival)
        ]
        step = read_work(output, {new.request: new.num_computed_tokens for new in arrivals})
        copies = self._copies(output, requests, additions, step)
        changes = StepChanges(
            entries=tuple(new.entry(requests[new.request].row) for new in additions),
            rows=[requests[request].row for request, _, _ in step],
            num_computed_tokens=[computed for _, computed, _ in step],
            num_new_tokens=[count for _, _, count in step],
            zero_ids=self._zero_ids(output, requests, additions, copies),
            copies=copies,
        )
        return changes, requests

    def _changes_row(self, requests: Mapping[str, _Request], arrival: Arrival) -> bool:
        """Returns whether an arrival changes a row; raises ValueError if it is invalid."""
        groups, ids = len(self._plan.groups), arrival.block_ids
        if ids is not None and len(ids) != groups:
            raise ValueError(
                f"request {arrival.request!r} has block ids of {len(ids)} groups and the plan has "
                f"{groups}; plan from the KVCacheConfig of this scheduler"
            )
        if not arrival.replaces and arrival.request not in requests:
            raise ValueError(
                f"request {arrival.request!r} is not known; pass every SchedulerOutput, in order"
            )
        return arrival.replaces or (ids is not None and any(ids))

    def _take(self, requests: dict[str, _Request], arrival: Arrival) -> _NewBlocks:
        """Gives a request its new blocks, and a row if it has none."""
        groups, request = len(self._plan.groups), arrival.request
        new = tuple(map(tuple, arrival.block_ids or ((),) * groups))
        before = requests.get(request)
        row = self._free_row(requests) if before is None else before.row
        old = ((),) * groups if before is None or arrival.replaces else before.ids
        requests[request] = _Request(row, tuple(a + b for a, b in zip(old, new, strict=True)))
        starts = tuple(len(of_group) for of_group in old)
        return _NewBlocks(request, arrival.num_computed_tokens, starts, new)

    def _free_row(self, requests: Mapping[str, _Request]) -> int:
        taken = {other.row for other in requests.values()}
        row = next((row for row in range(self._max_requests) if row not in taken), None)
        if row is None:
            raise ValueError(
                f"max_requests={self._max_requests} rows are taken; make tables, cache and shapes "
                "with at least vLLM's max_num_seqs rows"
            )
        return row

    def _zero_ids(
        self,
        output: Any,
        requests: Mapping[str, _Request],
        additions: Sequence[_NewBlocks],
        copies: Sequence[Sequence[tuple[int, int]]],
    ) -> list[list[int]]:
        """Returns, per group, the blocks to zero before the step."""
        zeroed: list[dict[int, None]] = [{} for _ in self._plan.groups]
        for group, needed in enumerate(self._plan.groups_to_zero):
            for new in additions if needed else ():
                start = self._first_without_content(group, new.num_computed_tokens)
                fresh = new.ids[group][max(0, start - new.starts[group]) :]
                zeroed[group] |= dict.fromkeys(fresh)
        listed = set(get(output, "new_block_ids_to_zero", None) or ())
        listed -= {block for new in additions for of_group in new.ids for block in of_group}
        for request in requests.values() if listed else ():  # blocks of a failed load
            for group, ids in enumerate(request.ids):
                zeroed[group] |= dict.fromkeys(listed.intersection(ids))
        kept = {NULL_BLOCK, *(target for of_group in copies for _, target in of_group)}
        return [[block for block in ids if block not in kept] for ids in zeroed]

    def _first_without_content(self, group: int, num_computed_tokens: int) -> int:
        """Returns the first logical block without content of a request's computed tokens."""
        growth = self._plan.groups[group].growth
        if (
            growth.block_tokens == INT32_MAX or growth.stores == "encoder"
        ):  # the first step writes all of it
            return INT32_MAX if num_computed_tokens else 0
        return cdiv(num_computed_tokens, growth.block_size * self._plan.context_parallel)

    def _copies(
        self,
        output: Any,
        requests: Mapping[str, _Request],
        additions: Sequence[_NewBlocks],
        step: Sequence[tuple[str, int, int]],
    ) -> list[list[tuple[int, int]]]:
        """Returns the block copies by group: the group of the new target, or of the source.

        A row still lists blocks that its request has freed, so the group of a source is the one
        whose blocks its request reads in this step.
        """
        copies: list[list[tuple[int, int]]] = [[] for _ in self._plan.groups]
        pairs = read_copies(output)
        group_of: dict[int, int] = {}
        for request, computed, count in step if pairs else ():
            local = self._plan.local_tokens(computed), self._plan.local_tokens(computed + count)
            for group, ids in enumerate(requests[request].ids):
                live = self._plan.groups[group].growth.live_blocks(*local)
                group_of |= {ids[i]: group for i in live if i < len(ids)}
        for new in additions if pairs else ():
            group_of |= {block: group for group, ids in enumerate(new.ids) for block in ids}
        for source, target in pairs:
            group = group_of.get(target, group_of.get(source))
            if group is None:
                raise ValueError(
                    f"kv_cache_block_copies: no request of this step holds block {source} or "
                    f"{target}"
                )
            copies[group].append((source, target))
        return copies
