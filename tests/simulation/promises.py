"""Checks of every schedule, from what `Scheduler` promises."""

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from jaxkv._src.scheduler._requests import MOST_PASSES
from jaxkv.blocks import Upload
from jaxkv.scheduler import Schedule
from tests.simulation.oracle import Known

if TYPE_CHECKING:
    from tests.simulation.of_scheduler import SchedulerSimulation


class Promises:
    """Checks the schedules of a simulation.

    ends: by request, the numbers of tokens after which a chunk of its prompt has to end.
    newest: by request, the tokens before its newest ones, which one step computes.
    prefills: by request, the tokens that it had when it started.
    idle: empty schedules one after the other.
    evicted: blocks that had been evicted before the last schedule was chosen.
    found: by waiting request, the cached tokens that it had then.
    passes: by waiting request, how many started that were behind it in line; `MOST_PASSES` if it
      ran before.
    """

    def __init__(self, simulation: "SchedulerSimulation"):
        self._simulation, self._scheduler = simulation, simulation.scheduler
        self._manager, self._plan = simulation.manager, simulation.plan
        self.ends: dict[Hashable, set[int]] = {}
        self.newest: dict[Hashable, int] = {}
        self.prefills: dict[Hashable, int] = {}
        self.idle = self.evicted = 0
        self.found: dict[Hashable, int] = {}
        self.passes: dict[Hashable, int] = {}

    def before(self) -> None:
        """Notes which prefixes a schedule that is about to be chosen can find."""
        simulation, manager = self._simulation, self._manager
        self.evicted = manager.prefix_stats().evicted_blocks
        waiting = [r.name for r in self._scheduler._queues.waiting] if simulation.has_tokens else []
        self.found = {
            name: manager.find_prefix(request.tokens, **simulation.keys(request)).num_cached_tokens
            for name in waiting
            if (request := simulation.requests.get(name)) is not None
        }

    def check_new(
        self, schedule: Schedule, running: tuple[Hashable, ...], cut: int | None, *, had_work: bool
    ) -> None:
        """Checks a schedule that was just chosen.

        Args:
          running: the requests that ran before.
          cut: the most tokens of it; None: those of any.
          had_work: whether it was to have work.
        """
        simulation, work = self._simulation, schedule.work
        assert cut is None or sum(work.values()) <= cut, "more tokens than asked for"
        assert schedule.hits.keys().isdisjoint(running), "a hit is told twice"
        assert set(running).issuperset(schedule.preempted), "one that waits is preempted"
        if schedule.preempted:
            first = min(simulation.places[name] for name in schedule.preempted)
            may_be = set(self._scheduler.running) - {
                r.name for r in self._scheduler._queues.exporting
            }
            later = [name for name in may_be if simulation.places[name] > first]
            assert not later, f"one before {later} is preempted"
        self._check_passes(schedule)
        for name, count in work.items():
            request = simulation.requests.get(name)
            inside = range(request.computed + 1, request.computed + count) if request else ()
            crossed = self.ends.get(name, set()).intersection(inside)
            crossed = {end for end in crossed if end <= self.newest.get(name, end)}
            assert not crossed, f"a chunk of {name!r} passes {crossed}"
            has_drafts = request is not None and len(request.tokens) > request.verified
            if has_drafts and request.computed == self.newest.get(name):
                left = len(request.tokens) - request.computed
                assert count == left or left > self._most_new(), f"{name!r}: {count} of {left}"
        self._check_hits(schedule)
        self._check_progress(schedule, had_work and cut is None)  # drafts may need more than that
        most = simulation.options["max_tokens"] if cut is None else cut
        is_full = sum(work.values()) >= min(most, simulation.options["max_tokens"])
        if not (is_full or len(work) >= simulation.shape.batch_size or schedule.preempted):
            self._check_complete(schedule, running)

    def _check_passes(self, schedule: Schedule) -> None:
        """Checks that few requests start before one that was there before them."""
        places = self._simulation.places
        for one in self._scheduler._queues.waiting:
            if one.name not in places:
                continue
            behind = [n for n in schedule.hits if n in places and places[n] > places[one.name]]
            self.passes[one.name] = self.passes.get(one.name, 0) + len(behind)
            assert self.passes[one.name] <= MOST_PASSES or not behind, f"{one.name!r} waits"
        self.passes |= dict.fromkeys(schedule.preempted, MOST_PASSES)

    def _most_new(self) -> int:
        """Returns the most tokens after computed ones that one step has to take together."""
        growths = [group.growth for group in self._plan.groups]
        drafts = [g.speculative_blocks for g in growths if g.cache_mode == "align"]
        most = 1 + min([n for n in drafts if n], default=self._plan.max_model_len)
        limit = self._plan.limits.max_in_flight_tokens
        return min(self._simulation.options["max_tokens"], limit, most)

    def _check_hits(self, schedule: Schedule) -> None:
        """Checks that requests start with all of their prefix that the cache held before."""
        simulation, stats = self._simulation, self._manager.prefix_stats()
        copies = any(
            g.growth.kind == "state" and g.growth.cache_mode != "all" for g in self._plan.groups
        )
        shares = not simulation.has_encoder and (simulation.options["forks"] or not copies)
        if not shares or stats.evicted_blocks > self.evicted or self._manager.offload_stats():
            return
        for name, hit in schedule.hits.items():
            found = self.found.get(name, 0)
            if found <= min(self._simulation.most_cached, self.newest.get(name, found)):
                assert hit.num_cached_tokens >= found, f"{name!r} starts with less than {found}"

    def begin(self, schedule: Schedule) -> None:
        """Notes after which tokens the chunks of requests that start have to end."""
        simulation = self._simulation
        for name, hit in schedule.hits.items():
            self.ends[name] = set(hit.chunk_ends)
            if name in simulation.requests:
                self.prefills[name] = len(simulation.requests[name].tokens)
            if (
                size := simulation.options["chunk_tokens"]
            ) is not None and name in simulation.requests:
                self.ends[name].update(range(size, len(simulation.requests[name].tokens), size))

    def rewound(self, name: Hashable, num_tokens: int) -> None:
        """Notes that other tokens may follow the first ones of a request."""
        self.ends[name] = {end for end in self.ends.get(name, ()) if end <= num_tokens}
        for most in (self.newest, self.prefills):
            most[name] = min(most.get(name, num_tokens), num_tokens)

    def check(self, schedule: Schedule) -> None:
        """Checks a schedule, whether it was just chosen or comes again."""
        simulation, work, running = self._simulation, schedule.work, self._scheduler.running
        assert sum(work.values()) <= simulation.shape.max_tokens
        assert len(work) <= simulation.shape.batch_size
        assert set(work) <= set(running) and set(self._manager.requests) == set(running)
        assert set(schedule.preempted) <= set(self._scheduler.waiting)
        assert simulation.options["preemption"] or not schedule.preempted
        for index, (name, count) in enumerate(work.items()):
            request = simulation.requests[name]
            left = len(request.tokens) - request.computed
            assert 1 <= count <= left, f"{name!r} computes {count} of {left} tokens"
            assert schedule.samples.get(name) == (index if count == left else None), "samples"
        for name in set(schedule.samples) - set(work):
            parent = list(work)[schedule.samples[name]]
            assert parent in schedule.samples, "the prompt is not computed"
            assert simulation.requests[parent] in simulation.siblings[name], "samples of one prompt"
        assert len(schedule.samples) - len(work) <= simulation.manager.max_requests - len(running)
        if simulation.has_tokens and not simulation.hides_drafts:
            assert schedule.token_ids.tolist() == self._ids(schedule), "token ids"
        for queue in (running, self._scheduler.waiting):
            assert list(queue) == sorted(queue, key=simulation.places.__getitem__), "not in line"

    def check_started(self, schedule: Schedule) -> None:
        """Checks that the samples of a step run, once it is carried out."""
        if not any(group.growth.speculative_blocks for group in self._plan.groups):
            waiting = set(schedule.samples).difference(self._scheduler.running)
            assert not waiting, f"samples that share no blocks: {waiting}"

    def check_budgets(self, schedule: Schedule, upload: Upload) -> None:
        """Checks what a step takes of ``cached_tokens`` and ``forks``."""
        simulation = self._simulation
        taken = sum(simulation.requests[name].unsynced for name in schedule.work)
        assert taken <= self._simulation.most_cached, f"{taken} cached tokens"
        copied = set(upload.parts()["copy_destinations"].tolist())
        ids = [self._manager.block_ids(name) for name in self._manager.requests]
        copying = sum(not copied.isdisjoint(itertools.chain(*of_groups)) for of_groups in ids)
        assert copying <= simulation.options["forks"], f"{copying} requests copy blocks"

    def check_books(self) -> None:
        """Checks that the scheduler counts its requests as the manager and the caller do."""
        queues = self._scheduler._queues
        running = {request.name: request for request in queues.running}
        assert {n: r.row for n, r in running.items()} == self._manager.requests
        unsynced = [self._simulation.requests[name].unsynced for name in running]
        assert max(unsynced, default=0) <= self._simulation.most_cached, (
            "no step has room for these"
        )
        assert queues.in_chunks <= {*queues.running}, "chunks"
        assert queues.exporting <= {*queues.running}, "requests that do not run are handed over"
        if not self._simulation.options["preemption"]:
            limits = [self._simulation.limits[name] for name in running]
            assert self._room_at_longest(limits) >= 0, "more run than fit at their longest"
        with_ends = {request for request in queues.running if request.chunk_ends}
        assert with_ends <= queues.in_chunks, "ends of chunks that no step looks at"
        table, indices = queues.table, [request.index for request in queues.by_name.values()]
        assert sorted(indices + table._free) == list(range(len(table.rows)))
        for name, request in queues.by_name.items():
            assert table.names[request.index] == name and table.requests[request.index] is request
            wanted = len(self._simulation.requests[name].tokens)
            assert self._scheduler.num_tokens(name) == wanted, f"{name!r}: known tokens"
            assert table.rows[request.index] == request.row
            started = table.prefill_tokens[request.index]
            assert request.row < 0 or started <= wanted, f"{name!r} started with {started} tokens"
            parent = request.parent
            assert parent is None or request in parent.samples, "a sample without its leader"

    def _ids(self, schedule: Schedule) -> list[int]:
        """Returns the token ids of a step, -1 for those that the host does not know yet."""
        ids: list[int] = []
        for name, count in schedule.work.items():
            first, known = self._simulation.requests[name].computed, self._simulation.known[name]
            known = known + [-1] * (first + count - len(known))
            ids += known[first : first + count]
        return ids

    def _check_progress(self, schedule: Schedule, had_work: bool) -> None:
        if schedule.work or schedule.preempted or not had_work:
            self.idle = 0
            return
        self.idle += 1
        most = 4 + self._simulation.lookahead
        assert self.idle < most, "has_work is True and schedules are empty: a livelock"

    def _check_complete(self, schedule: Schedule, running: tuple[Hashable, ...]) -> None:
        """Checks that a step with room to spare leaves nobody out who fits for certain."""
        simulation, longest = (
            self._simulation,
            self._plan.admission_blocks(self._plan.max_model_len),
        )
        self._check_admitted(schedule, longest)
        # Decodes with drafts get what prompts leave of a step, although it may not be enough.
        is_late = schedule.hits and simulation.options["order"] == "prefill_first"
        drafting = [self._together(r) for n in running if (r := simulation.requests.get(n))]
        if (is_late and any(drafting)) or self._manager.num_free_blocks < longest:
            return
        for name in set(running) - set(schedule.work):
            request = simulation.requests.get(name)
            if request is None or self._together(request) or request.unsynced:
                continue
            has_work = len(request.tokens) > request.computed
            row = self._manager.requests[name]
            copies, has_room = self._manager.may_copy_by_row, self._manager.pending_copies_by_row
            may_wait = (copies[row] and not has_room[row]) or self._manager.is_loading(name)
            assert not has_work or may_wait, f"{name!r} is left out"

    def _check_admitted(self, schedule: Schedule, longest: int) -> None:
        """Checks that the first waiting request was admitted if it fits."""
        simulation, waiting = self._simulation, self._scheduler._queues.waiting
        running = [simulation.requests.get(name) for name in self._scheduler.running]
        if not waiting or len(running) == self._manager.max_requests or None in running:
            return
        name = waiting[0].name
        if name not in simulation.requests or name in simulation.unanswered:
            return
        first, held = simulation.requests[name], 0
        if self._together(first):
            return
        if simulation.has_tokens:
            if len(simulation.known[name]) < len(first.tokens):
                return
            found = self._manager.find_prefix(first.tokens, **simulation.keys(first))
            # The schedule may have found what it evicted later.
            has_evicted = self._manager.prefix_stats().evicted_blocks > self.evicted
            cached = max(found.num_cached_tokens, self.found.get(name, 0) if has_evicted else 0)
            # With host memory, a request that was resumed since may have brought the prefix back.
            may_be_late = self._manager.offload_stats() is not None
            if cached and (may_be_late or not self._fits(schedule, cached)):
                return
            held = found.num_allocated_blocks if cached and not has_evicted else 0
        if self._manager.num_swapped_tokens(name):
            return
        limits = [simulation.limits[request.name] for request in (*running, first)]
        if not simulation.options["preemption"]:
            room = self._room_at_longest(limits)
        else:
            needed = [
                self._plan.admission_blocks(min(len(request.tokens) + 1, limit))
                for request, limit in zip((*running, first), limits, strict=True)
            ]
            reserved = [
                max(0, blocks - sum(self._manager.allocated_blocks(request.name)))
                for request, blocks in zip(running, needed, strict=False)
                if request.computed < self.prefills.get(request.name, 0)
                # Nobody starts while one that runs lacks blocks.
                or (request.name not in schedule.work and len(request.tokens) > request.computed)
            ]
            room = self._manager.num_free_blocks - sum(reserved) - (needed[-1] - held)
            # The blocks that are copied are free after the step only.
            room -= int(self._manager.pending_copies_by_row.sum()) * len(self._plan.groups)
            if not all(group.growth.keeps_all_tokens for group in self._plan.groups):
                room -= longest  # windows and states make the need an estimate
        assert room < 0, f"{name!r} fits, and is not admitted"

    def _room_at_longest(self, limits: Sequence[int]) -> int:
        """Returns the blocks that are left while requests have as many tokens as they ever have.

        One of them computes its prompt then.
        """
        steady = [self._plan.steady_blocks(limit) for limit in limits]
        whole = [self._plan.admission_blocks(limit) for limit in limits]
        share = max([w - s for w, s in zip(whole, steady, strict=True)], default=0)
        return self._plan.usable_blocks - sum(steady) - share

    def _together(self, request: Known) -> bool:
        """Returns whether one step has to compute several tokens of a request."""
        size = len(request.tokens)
        return size > self.newest.get(request.name, size) + 1

    def _fits(self, schedule: Schedule, num_cached: int) -> bool:
        """Returns whether a step has room for the cached tokens of one more request."""
        used = sum(self._simulation.requests[name].unsynced for name in schedule.work)
        return num_cached <= self._simulation.most_cached - used and not self._simulation.has_states
