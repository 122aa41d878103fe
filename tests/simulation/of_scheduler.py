"""Simulations of an engine over `Scheduler`."""

import dataclasses
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

from jaxkv import ExtraKey, OutOfBlocksError, Plan, Scheduler, StepShape
from jaxkv.blocks import ExportedBlocks
from jaxkv.scheduler import Schedule
from tests.simulation.oracle import Known
from tests.simulation.plans import ROOM, most_drafts, random_plan
from tests.simulation.promises import Promises
from tests.simulation.traffic import NAMES, Simulation

WRONG_PROMPTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "negative ids": lambda n: {"ids": [-1] * n},
    "ids past int32": lambda n: {"ids": [2**31] * n},
    "ids of floats": lambda n: {"ids": [1.5] * n},
    "ids of None": lambda n: {"ids": [None] * n},
    "nested ids": lambda n: {"ids": [[1]] * n},
    "text": lambda n: {"ids": "x" * n},
    "a medium past the prompt": lambda n: {"extra_keys": [ExtraKey.mm("x", 0, n + 1)]},
    "media that overlap": lambda n: {
        "extra_keys": [ExtraKey.mm("x", 0, 2), ExtraKey.mm("y", 1, 3)]
    },
    "a boundary of 2.5": lambda n: {"boundaries": [2.5]},
    "a boundary past the prompt": lambda n: {"boundaries": [n + 1]},
    "a boundary that is a text": lambda n: {"boundaries": ["1"]},
}


class SchedulerSimulation(Simulation):
    """An engine over `Scheduler`, from arrivals to its last token.

    ahead: steps that the host is ahead of the ids of the tokens that it samples.
    """

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        # Short prompts that grow until the pool is full, so that requests are preempted often.
        self.is_crowd = random.Random(-2 - seed).random() < 0.3
        super().__init__(seed, kind, history)
        draw, plan = self.draw, self.plan
        self.known: dict[Hashable, list[int]] = {}  # the scheduler's tokens
        sizes = {
            "max_tokens": draw.choice([1, 2, 4, 8, 16, 64]),
            "forks": draw.choice([0, 1, 2, 4]),
        }
        batch = draw.choice([None, None, 1, 2])
        if batch is not None:
            sizes["batch_size"] = min(batch, self.manager.max_requests)
        cached = draw.choice([None, None, 4, 16, plan.max_model_len])
        self.has_tokens = draw.random() < 0.8
        self.options = {
            "order": draw.choice(["decode_first", "prefill_first"]),
            "preemption": draw.random() < 0.8,
            "cached_tokens": cached,
            "chunk_tokens": draw.choice([None, None, None, 3, 8]),
            **sizes,
        }
        self.lookahead = draw.choice([0, 0, 0, 1, 2, 5])
        self.scheduler = Scheduler(
            self.manager,
            tokens=self.known if self.has_tokens else None,
            lookahead_steps=self.lookahead,
            **self.options,
        )
        every = self.manager.max_requests * plan.max_model_len
        self.most_cached = every if cached is None else cached
        self.shape = StepShape.for_plan(
            plan,
            max_requests=self.manager.max_requests,
            cached_tokens=self.most_cached,
            **sizes,
        )
        self.discards = draw.choice([0, 0, 0.05, 0.3])
        self.edits = draw.random() < 0.4
        self.drafts = most_drafts(plan) if not self.lookahead and draw.random() < 0.5 else 0
        in_step = min(sizes["max_tokens"], plan.limits.max_in_flight_tokens)
        self.drafts = min(self.drafts, in_step - 1)  # one step verifies them
        self.limits: dict[Hashable, int] = {}
        self.prompts: dict[Hashable, int] = {}  # tokens that cannot be rewound
        self.places: dict[Hashable, tuple[int, ...]] = {}
        self.preempted: dict[Hashable, Any] = {}  # stories, states and partial rows
        self.cut: set[Hashable] = set()  # requests of which not all that they compute is kept
        self.counter = itertools.count()
        self.late: dict[Hashable, deque[tuple[int, int]]] = {}  # positions whose ids arrive late
        self.time = 0
        self.siblings: dict[Hashable, list[Known]] = {}  # requests of one prompt
        self.lost: Schedule | None = None  # not carried out, and must come again
        self.uploads = -1  # when the last schedule was chosen
        self.answers: dict[Hashable, int] | None = None  # to all samples of a step at once
        self.priorities = random.Random(-8 - seed)
        self.has_priorities = self.priorities.random() < 0.6
        self.is_slow = random.Random(-3 - seed).random() < 0.3
        self.unanswered: list[Hashable] = []  # samples that a slow host answers later
        self.was_empty = False  # the last schedule
        self.hides_drafts = self.drafts > 0 and random.Random(-4 - seed).random() < 0.3
        self.promises = Promises(self)
        self.say(f"plan of {self.kind}: {[g.growth for g in plan.groups]}")
        self.say(f"{plan.num_blocks} blocks, max_model_len={plan.max_model_len}, {plan.limits}")
        self.say(
            f"max_requests={self.manager.max_requests}, {self.options}, ahead={self.lookahead}"
        )

    def random_plan(self) -> Plan:
        return random_plan(self.draw, self.kind, room=(1, 1.2) if self.is_crowd else ROOM)

    def num_rows(self) -> int:
        return 5 if self.is_crowd else super().num_rows()

    def prompt(self) -> list[int]:
        return super().prompt()[: self.draw.randint(1, 6) if self.is_crowd else None]

    # --- the whole simulation ------------------------------------------------------------

    def run(self, num_requests: int) -> Counter[str]:
        """Serves random traffic until each request has ended."""
        arrivals = num_requests
        while arrivals or self.requests:
            if arrivals and (len(self.requests) < 8) and self.chance(0.25):
                for _ in range(min(arrivals, self.draw.choice([1, 1, 3]))):
                    self.receive() if self.has_peers and self.chance(0.5) else self.add()
                    arrivals -= 1
                if self.has_tokens and not self.lookahead and self.chance(0.3):
                    self.hide()
            if self.chance(0.3):
                self.disturb()
            self.step()
            if self.time > 6_000:
                raise AssertionError(f"requests starve: {list(self.requests)}")
        assert not self.scheduler.has_work, "an engine without requests has work"
        assert not self.manager.requests and not self.scheduler.running
        assert not self.scheduler.waiting
        queues = self.scheduler._queues
        left = [queues.by_name, queues.running, queues.waiting, queues.parents, queues.in_chunks]
        assert not any(left) and not queues.exporting, f"a scheduler remembers requests: {left}"
        self.check()
        return self.oracle.seen

    def disturb(self) -> None:
        """Makes one of the calls that an engine makes between two steps."""
        calls: list[Callable[[], object]] = [self.add_wrong, self.abort, self.abort]
        calls += [self.edit] * 2 * self.edits + [self.fork_running, self.mistake]
        if self.chance(0.1):
            calls += [self.new_epoch]
        if self.chance(0.1) and not self.manager.requests:
            calls += [self.lose_content]
        if self.chance(0.1):
            calls += [self.restart, self.reset]
        self.draw.choice(calls)()

    # --- requests ---------------------------------------------------------------------

    def keys(self, request: Known) -> dict[str, Any]:
        return super().keys(request) if self.has_tokens else {}

    def boundaries(self, request: Known) -> list[int]:
        sampled = super().boundaries(request)
        return sampled if self.has_tokens else []

    def add(self) -> None:
        request = self.new_request()
        name, count = request.name, len(request.tokens)
        limit = self.draw.choice([count, self.draw.randint(count, self.plan.max_model_len)])
        if self.is_crowd:
            limit = min(count + self.draw.randint(8, 20), self.plan.max_model_len)
        keys, boundaries = self.keys(request), self.boundaries(request)
        samples = self.draw.choice([1, 1, 1, 2, 3]) if self.options["forks"] else 1
        priority = self.priorities.choice([-1, 0, 0, 5]) if self.has_priorities else 0
        others = [(name, number) for number in range(1, samples)]
        if any(other in self.requests for other in others):
            samples, others = 1, []
        self.say(
            f"tokens[{name!r}] = {request.tokens}; add({name!r}, {count}, max_tokens={limit}, "
            f"encoder_tokens={request.encoder_tokens}, boundaries={boundaries}, "
            f"samples={samples}, priority={priority}, **{keys})"
        )
        for each in (name, *others):
            self.known[each] = list(request.tokens)
        self.scheduler.add(
            name,
            count,
            samples=samples,
            max_tokens=limit,
            encoder_tokens=request.encoder_tokens,
            boundaries=boundaries,
            priority=priority,
            **keys,
        )
        place = (priority, next(self.counter))
        for each in (name, *others):
            own = dataclasses.replace(request, name=each, tokens=list(request.tokens))
            self.requests[each], self.limits[each], self.prompts[each] = own, limit, count
            self.places[each] = place if each is name else (*place, next(self.counter))
            self.late[each] = deque()
        family = [self.requests[each] for each in (name, *others)]
        self.siblings |= {each: family for each in (name, *others)}

    def receive(self) -> None:
        """Adds a request whose tokens another cache has computed, if there is room for it."""
        request = self.new_request()
        name, count = request.name, len(request.tokens)
        limit = self.draw.randint(count, self.plan.max_model_len)
        self.known[name] = list(request.tokens)
        self.say(f"import_blocks({name!r}, {count}, max_tokens={limit}) of {request.tokens}")
        exporting: list[ExportedBlocks | None] = []
        if self.refused(
            lambda: exporting.append(
                self.scheduler.import_blocks(name, count, max_tokens=limit, **self.keys(request))
            )
        ):
            assert count > self.scheduler._options.cached_tokens, "a step has room for its tokens"
        if not exporting or exporting[0] is None:
            self.say("    refused")
            del self.known[name]
            return
        self.requests[name], self.limits[name], self.prompts[name] = request, limit, count
        self.places[name] = (0, next(self.counter))
        self.late[name], self.siblings[name] = deque(), [request]
        self.cut.add(name)
        self.oracle.receive(request, exporting[0])
        self.unanswered.append(name)

    def export(self, name: Hashable) -> None:
        """Hands a request over to another cache, and lets it go on here all the same."""
        self.say(f"export_blocks({name!r})")
        self.check_export(self.requests[name])
        self.refused(lambda: self.scheduler.export_blocks(name))

    def add_wrong(self) -> None:
        """Adds a request that cannot be served, and must stop no other."""
        what, count = self.draw.choice(list(WRONG_PROMPTS)), self.draw.randint(3, 6)
        options = WRONG_PROMPTS[what](count)
        if not self.has_tokens and "boundaries" not in options:
            return
        name = "wrong"
        self.say(f"add({name!r}, {count}) with {what}")
        self.known[name] = options.pop("ids", [0] * count)
        if not self.refused(lambda: self.scheduler.add(name, count, **options)):
            self.schedule()  # may take it, and must not raise
            self.scheduler.finish(name)
            self.lost = None
        del self.known[name]
        assert name not in self.scheduler.waiting + self.scheduler.running, "half-added"

    def mistake(self) -> None:
        """Makes a call that has to be refused."""
        if not self.requests:
            return
        name = self.draw.choice(list(self.requests))
        scheduler, known, computed = self.scheduler, *self.sizes(name)
        calls: dict[str, Callable[[], object]] = {
            "of more tokens": lambda: scheduler.rewind({name: known + 1}),
            "into the prompt": lambda: scheduler.rewind({name: self.prompts[name] - 1}),
            "of a name in use": lambda: scheduler.add(name, 1),
            "to nobody": lambda: scheduler.append({name: 1, "nobody": 1}),
            "of nobody": lambda: scheduler.finish("nobody"),
        }
        if name not in self.unanswered and computed < known:
            calls["too early"] = lambda: scheduler.append({name: 1})
        if name not in scheduler.running or not self.options["forks"]:
            calls["of one that waits"] = lambda: scheduler.fork(name, ["nobody"])
        what = self.draw.choice(list(calls))
        self.say(f"a call {what}: {name!r}")
        assert self.refused(calls[what]), f"a call {what} is accepted"

    def sizes(self, name: Hashable) -> tuple[int, int]:
        """Returns the tokens of a request, known and computed ones."""
        return len(self.requests[name].tokens), max(self.requests[name].computed, 0)

    def hide(self) -> None:
        """Schedules while the ids of the youngest waiting request are missing."""
        if not self.scheduler.waiting:
            return
        name = self.scheduler.waiting[-1]
        self.say(f"without tokens[{name!r}]:")
        kept, self.known[name] = self.known[name], []
        try:
            self.lost = self.schedule()
        except ValueError as error:
            self.say(f"    {error}")
            self.oracle.seen["missing ids"] += 1
        self.known[name] = kept
        assert set(self.manager.requests) == set(self.scheduler.running), "half-started"

    def abort(self) -> None:
        if self.requests and self.chance(0.3):
            self.finish(self.draw.choice(list(self.requests)))

    def finish(self, name: Hashable) -> None:
        self.say(f"finish({name!r})")
        request, num_cached = self.requests[name], self.num_to_keep(name)
        self.scheduler.finish(name)
        self.check_whole(request, num_cached)
        assert not self.manager.num_swapped_tokens(name), "one that has ended is still parked"
        self.cut.discard(name)
        self.forget(name)
        self.unanswered = [other for other in self.unanswered if other != name]
        self.promises.newest.pop(name, None)
        self.preempted.pop(name, None)
        for of_request in (self.known, self.limits, self.prompts, self.places, self.late):
            del of_request[name]
        self.join()
        self.siblings.pop(name, None)

    def num_to_keep(self, name: Hashable) -> int:
        """Returns the computed tokens of a request that are kept for others when it ends."""
        request, is_old = self.requests[name], self.requests[name].epoch < self.oracle.epoch
        if not self.has_tokens or name in self.cut or name not in self.scheduler.running or is_old:
            return 0
        return max(0, min(request.computed, request.verified, len(self.known[name])))

    def check_whole(self, request: Known, num_tokens: int) -> None:
        """Checks that whole blocks of a request that has just ended are found by others."""
        plan = self.manager.plan
        keeps_all = all(group.growth.keeps_all_tokens for group in plan.groups)
        if num_tokens and keeps_all and not request.media:
            size = math.lcm(*[group.block_size * plan.context_parallel for group in plan.groups])
            found = self.manager.find_prefix([*request.tokens, 0], **self.keys(request))
            wanted = num_tokens // size * size
            # The tree may know a copy in host memory that is not worth a load, if these blocks are
            # those of a parked fork, too.
            is_on_host = found.found.reasons[0] == "on_host" and found.found.num_seen >= wanted
            assert found.num_cached_tokens >= wanted or is_on_host, "nobody finds them"

    def new_epoch(self) -> None:
        super().new_epoch()
        self.preempted.clear()  # what was parked is forgotten

    def reset(self) -> None:
        super().reset()
        self.restart()

    def restart(self) -> None:
        """Computes all requests again; tokens that are still to arrive are forgotten."""
        self.say("restart()")
        self.scheduler.restart()
        self.unanswered.clear()
        self.preempted.clear()
        self.oracle.seen["restarts"] += 1
        assert not self.manager.requests and not self.scheduler.running
        for name, request in self.requests.items():
            request.story = []
            if self.has_tokens:
                del request.tokens[len(self.known[name]) :]
            self.known[name][:] = request.tokens
            request.verified = min(request.verified, len(request.tokens))
            self.late[name].clear()
            assert self.scheduler.num_tokens(name) == len(request.tokens), "restarted tokens"
        self.after_change()

    def fork_running(self) -> None:
        running = [name for name in self.scheduler.running if not self.drafting(name)]
        if running and self.chance(0.5):
            self.fork(self.draw.choice(running))

    def fork(self, name: Hashable, *, is_ready: bool = False) -> None:
        """Forks a request, and gives each sample a token of its own."""
        if len(self.requests) > len(NAMES) - 4 or not self.options["forks"]:
            return
        donor, into = self.requests[name], []
        for _ in range(self.draw.randint(1, 3)):
            into.append(self.draw.choice([n for n in NAMES if n not in [*self.requests, *into]]))
        if donor.computed >= self.limits[name] or donor.computed < 1:
            return
        self.say(f"fork({name!r}, {into})")
        for new in into:
            self.known[new] = self.known[name][: donor.computed]
        if self.refused(lambda: self.scheduler.fork(name, into)):
            assert not is_ready, "a fork after the step that computed the prompt is refused"
            self.say("    refused")
            for new in into:
                del self.known[new]
            return
        for new in into:
            self._forked(donor, new)
            self.sample(new)
        self.after_change()

    def _forked(self, donor: Known, new: Hashable) -> None:
        request = Known(
            *(new, donor.tokens[: donor.computed], donor.salt, donor.adapter),
            media=donor.media,
            encoder_tokens=donor.encoder_tokens,
            encoder=donor.encoder,
            verified=donor.computed,
        )
        self.requests[new], self.limits[new] = request, self.limits[donor.name]
        if donor.name in self.cut:
            self.cut.add(new)
        self.prompts[new] = self.prompts[donor.name]
        self.places[new] = (*self.places[donor.name], next(self.counter))
        self.late[new] = deque(at for at in self.late[donor.name] if at[0] < donor.computed)
        if new in self.scheduler.running:
            self.oracle.fork(donor, request, donor.computed)
        assert self.scheduler.num_tokens(new) == donor.computed

    # --- tokens -----------------------------------------------------------------------

    def drafting(self, name: Hashable) -> bool:
        request = self.requests[name]
        return request.verified < len(request.tokens)

    def sample(self, name: Hashable) -> None:
        """Handles the result of a request: rejects drafts, and appends a token and new drafts."""
        request = self.requests[name]
        drafts = len(request.tokens) - request.verified
        if drafts:
            accepted = request.verified + self.draw.randint(0, drafts)
            if accepted < len(request.tokens):
                self._reject(request, accepted)
            request.verified = accepted
        if len(request.tokens) >= self.limits[name] or self.chance(0.03):
            self.finish(name)
            return
        first, is_turn = len(request.tokens), not self.lookahead and self.chance(0.05)
        count = 1 + self.draw.randint(0, 7 if is_turn else self.drafts)
        count = min(count, self.limits[name] - first)
        request.tokens += [self._id() for _ in range(count)]
        request.verified = first + (count if is_turn else 1)
        self.promises.newest[name] = first
        if self.lookahead:
            self.late[name].append((first, self.time + self.lookahead))
        else:
            end = request.verified if self.hides_drafts else None
            self.known[name][:] = request.tokens[:end]
        self.say(f"append({{{name!r}: {count}}}) = {request.tokens[first:]}")
        if self.answers is not None:
            self.answers[name] = count
            return
        self.scheduler.append({name: count})
        self.join()

    def join(self) -> None:
        """Notes the samples that have just forked from the request with their prompt."""
        for name, family in self.siblings.items():
            request = self.requests.get(name)
            if request is not None and name in self.manager.requests and not request.story:
                known = [other for other in family if other.computed >= request.verified]
                known.sort(key=lambda other: other.name in self.manager.requests)
                self.oracle.fork(known[-1], request, request.verified)

    def _reject(self, request: Known, accepted: int) -> None:
        self.say(f"rewind({{{request.name!r}: {accepted}}}), drafts rejected")
        try:
            self.scheduler.rewind({request.name: accepted})
        except ValueError as error:
            raise AssertionError(f"rejected drafts cannot be rewound: {error}") from error
        self._rewound(request, accepted)

    def _rewound(self, request: Known, num_tokens: int) -> None:
        self.preempted.pop(request.name, None)
        if request.story:
            self.oracle.rewind(request, num_tokens)
        if request.name in self.manager.requests:
            assert self.manager.num_computed_tokens(request.name) == request.computed
        else:
            self.stop(request)
        self.promises.rewound(request.name, num_tokens)
        self.cut.add(request.name)
        del request.tokens[num_tokens:]
        del self.known[request.name][num_tokens:]

    def edit(self) -> None:
        """Replaces the last tokens of a request by others, computed or not."""
        names = [n for n in self.requests if not self.drafting(n)]
        if not names or self.lookahead:
            return
        request = self.requests[self.draw.choice(names)]
        name, count = request.name, self.draw.randint(1, len(request.tokens))
        if any(m[2] > count for m in request.media) or count == len(request.tokens):
            return
        runs = name in self.manager.requests
        if self.has_states and runs and count < request.computed:
            known = [columns.keys() for columns in request.states.values()]
            if not all(count in of_group for of_group in known):
                return  # an engine knows which states it wrote
        self.say(f"rewind({{{name!r}: {count}}}), other tokens follow")
        if self.refused(lambda: self.scheduler.rewind({name: count})):
            self.say("    refused")
            assert count < max(self.prompts[name], request.computed), "drafts cannot be rewound"
            return
        is_awaited = name in self.unanswered  # by the scheduler, even if it was preempted
        self.unanswered = [other for other in self.unanswered if other != name]
        missing, computed = len(request.tokens) - count, request.computed
        self._rewound(request, count)
        request.verified = count
        self.known[name][:] = request.tokens
        if computed < count and not is_awaited:  # tokens follow once these are computed
            return self.after_change()
        more = [self._id() for _ in range(missing)]
        self.promises.newest[name] = count
        request.tokens += more
        request.verified = len(request.tokens)
        self.known[name][:] = request.tokens
        self.say(f"append({{{name!r}: {missing}}}) = {more}")
        self.scheduler.append({name: missing})
        self.after_change()

    def _visible(self) -> object:
        scheduler = self.scheduler
        counts = [scheduler.num_tokens(name) for name in self.requests]
        return super()._visible(), scheduler.running, scheduler.waiting, counts

    def after_change(self) -> None:
        """Notes a call after which another schedule may be right."""
        self.lost = None

    # --- steps ------------------------------------------------------------------------

    def stop(self, request: Known) -> None:
        """Notes that a request waits; if it ran until now, it may be parked."""
        if request.story:  # or the schedule comes again
            self.preempted[request.name] = request.story, request.states, request.partial
            self.oracle.is_fresh_epoch = False  # requests of any epoch may be parked
        request.story = []

    def schedule(self) -> Schedule:
        self.manager.resumed.clear()
        running, had_work, cut = self.scheduler.running, self.scheduler.has_work, None
        self.promises.before()
        if not self.has_states and self.chance(0.1):
            cut = self.draw.choice([1, 3])
        schedule = self.scheduler.schedule(max_tokens=cut)
        self.was_empty = not schedule.work
        is_new, self.uploads = self.uploads != self.manager.num_uploads, self.manager.num_uploads
        self.say(
            f"schedule({cut}) = {schedule.work}, preempted {schedule.preempted}, "
            f"hits { {n: h.num_cached_tokens for n, h in schedule.hits.items()} }"
        )
        for name in schedule.preempted:
            self.stop(self.requests[name])
        self.oracle.seen["preemptions"] += len(schedule.preempted)
        for name, hit in schedule.hits.items():
            request = self.requests.get(name)  # None: one that `add_wrong` added
            if request is not None and not request.story:
                epoch, count = request.epoch, hit.num_cached_tokens
                self.oracle.begin(request, count)
                before = self.preempted.pop(name, ([],))
                if name in self.manager.resumed:
                    request.epoch = epoch
                else:
                    self.cut.discard(name)
                # One that got no blocks after its start is parked with what it began with.
                if name in self.manager.resumed and len(before[0]) == count + 1:
                    request.story, request.states, request.partial = before
                    self.oracle.resume(request)
        self.promises.begin(schedule)
        if is_new:
            self.promises.check_new(schedule, running, cut, had_work=had_work)
        return schedule

    def step(self) -> None:
        self.time += 1
        self.reveal()
        self.answer_late()
        schedule = self.schedule()
        self.promises.check(schedule)
        if self.lost is not None:
            again = {n: c for n, c in self.lost.work.items() if n in self.requests}
            assert schedule.work == again or not again, f"{schedule.work} instead of {again}"
        if self.chance(self.discards):
            self.say("    not carried out")
            self.oracle.seen["lost schedules"] += 1
            self.lost = schedule
            self.check()
            return
        self.lost = None
        try:
            upload = self.manager.step(self.shape, schedule.work)
        except (ValueError, OutOfBlocksError) as error:
            raise AssertionError(f"a schedule is refused: {error}") from error
        self.promises.check_budgets(schedule, upload)
        if self.chance(0.003):  # the upload never runs
            return self.reset()
        self.oracle.step(upload, self.requests, schedule.work)
        self.check()
        if self.chance(0.003):  # before its samples are answered
            return self.restart()
        self.handle(schedule)
        self.check_wanted()

    def check(self) -> None:
        super().check()
        self.promises.check_books()

    def check_wanted(self) -> None:
        """Checks the tokens of which the caller is told that they wait to be computed."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        entering = waiting[: self.manager.max_requests - len(running)]
        known = {name: self.requests[name] for name in (*running, *waiting)}
        left = {name: len(each.tokens) - max(each.computed, 0) for name, each in known.items()}
        (wanted, has_backlog), of_running = self.scheduler.wanted(), sum(map(left.get, running))
        assert wanted >= of_running, "wanted tokens"
        # Samples that wait for the prompt of another one compute nothing themselves.
        if all(len(self.siblings.get(name, [name])) == 1 for name in waiting):
            plan, each = self.manager.plan, len(running) + len(entering)
            most = each * plan.admission_blocks(plan.max_model_len)
            has_room = most <= self.manager.num_free_blocks
            some = itertools.chain(*[itertools.combinations(waiting, n) for n in range(each + 1)])
            started = [sum(left[name] for name in of) for of in ([entering] if has_room else some)]
            assert wanted - of_running in started, "wanted tokens"
            sizes = [len(self.requests[name].tokens) for name in waiting]
            assert has_backlog == (wanted < of_running + sum(sizes)), "backlog"

    def handle(self, schedule: Schedule) -> None:
        """Handles the results of a step: forks, rejected drafts, next tokens, ends."""
        self.scheduler.append({})  # lets samples of one prompt start
        self.join()
        self.promises.check_started(schedule)
        self.answers = {} if self.chance(0.7) else None
        for name in schedule.samples:
            if self.is_slow and self.chance(0.3):
                self.unanswered.append(name)
                continue
            is_certain = not self.drafting(name)
            if is_certain and self.chance(0.05):
                self.fork(name, is_ready=True)
            if self.has_peers and is_certain and name in self.manager.requests and self.chance(0.3):
                self.export(name)
            self.sample(name)
        if self.answers:
            self.scheduler.append(self.answers)
            self.join()
        self.answers = None

    def answer_late(self) -> None:
        """Handles results of earlier steps; all of them, if nothing else can go on."""
        waits = self.was_empty or self.promises.idle or len(self.unanswered) == len(self.requests)
        for name in self.unanswered.copy():
            if waits or self.chance(0.5):
                self.unanswered.remove(name)
                self.sample(name)

    def reveal(self) -> None:
        """Fills in the ids that have arrived."""
        for name, late in self.late.items():
            while late and late[0][1] <= self.time:
                position, _ = late.popleft()
                ids = self.known[name]
                assert position == len(ids)
                ids.append(self.requests[name].tokens[position])
