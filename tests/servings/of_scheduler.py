"""Random servings of an engine over `Scheduler`."""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

from jaxkv import ExtraKey, OutOfBlocksError, Scheduler, StepShape
from jaxkv.blocks import Upload
from jaxkv.scheduler import Schedule
from tests.servings.oracle import Known
from tests.servings.plans import most_drafts
from tests.servings.traffic import NAMES, Serving

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


class SchedulerServing(Serving):
    """An engine over `Scheduler`, from arrivals to its last token.

    ahead: steps that the host is ahead of the ids of the tokens that it samples.
    """

    def __init__(self, seed: int, kind: str | None, history: list[str]):
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
        self.ahead = draw.choice([0, 0, 0, 1, 2, 5])
        self.scheduler = Scheduler(
            self.manager,
            tokens=self.known if self.has_tokens else None,
            steps_ahead=self.ahead,
            **self.options,
        )
        self.shape = StepShape.for_plan(
            plan,
            max_requests=self.manager.max_requests,
            cached_tokens=plan.max_model_len if cached is None else cached,
            **sizes,
        )
        self.discards = draw.choice([0, 0, 0.05, 0.3])
        self.edits = draw.random() < 0.4
        self.drafts = most_drafts(plan) if not self.ahead and draw.random() < 0.5 else 0
        in_step = min(sizes["max_tokens"], plan.limits.max_in_flight_tokens)
        self.drafts = min(self.drafts, in_step - 1)  # one step verifies them
        self.limits: dict[Hashable, int] = {}
        self.prompts: dict[Hashable, int] = {}  # tokens that cannot be rewound
        self.ages: dict[Hashable, tuple[int, ...]] = {}
        self.preempted: dict[Hashable, Any] = {}  # stories, states and partial rows
        self.counter = itertools.count()
        self.late: dict[Hashable, deque[tuple[int, int]]] = {}  # positions whose ids arrive late
        self.time = self.idle = 0
        self.siblings: dict[Hashable, list[Known]] = {}  # requests of one prompt
        self.lost: Schedule | None = None  # not carried out, and must come again
        self.uploads = -1  # when the last schedule was chosen
        self.say(f"plan of {self.kind}: {[g.growth for g in plan.groups]}")
        self.say(f"{plan.num_blocks} blocks, max_model_len={plan.max_model_len}, {plan.limits}")
        self.say(f"max_requests={self.manager.max_requests}, {self.options}, ahead={self.ahead}")

    # --- the whole serving ------------------------------------------------------------

    def run(self, num_requests: int) -> Counter[str]:
        """Serves random traffic until each request has ended."""
        arrivals = num_requests
        while arrivals or self.requests:
            if arrivals and (len(self.requests) < 8) and self.chance(0.25):
                for _ in range(min(arrivals, self.draw.choice([1, 1, 3]))):
                    self.add()
                    arrivals -= 1
                if self.has_tokens and not self.ahead and self.chance(0.3):
                    self.hide()
            if self.chance(0.3):
                self.disturb()
            self.step()
            if self.time > 6_000:
                raise AssertionError(f"requests starve: {list(self.requests)}")
        assert not self.scheduler.has_work, "an engine without requests has work"
        assert not self.manager.requests and not self.scheduler.running
        assert not self.scheduler.waiting
        self.check()
        return self.oracle.seen

    def disturb(self) -> None:
        """Makes one of the calls that an engine makes between two steps."""
        calls: list[Callable[[], object]] = [self.add_wrong, self.abort, self.abort]
        calls += [self.edit] * 2 * self.edits + [self.fork_running]
        if self.chance(0.1):
            calls += [self.new_epoch]
        if self.chance(0.1) and not self.manager.requests:
            calls += [self.lose_content]
        if self.chance(0.1):
            calls += [self.restart, self.reset]
        self.draw.choice(calls)()

    # --- requests ---------------------------------------------------------------------

    def add(self) -> None:
        request = self.new_request()
        name, count = request.name, len(request.tokens)
        limit = self.draw.choice([count, self.draw.randint(count, self.plan.max_model_len)])
        keys, boundaries = self.keys(request), self.boundaries(request)
        samples = self.draw.choice([1, 1, 1, 2, 3]) if self.options["forks"] else 1
        others = [(name, number) for number in range(1, samples)]
        if any(other in self.requests for other in others):
            samples, others = 1, []
        self.say(
            f"tokens[{name!r}] = {request.tokens}; add({name!r}, {count}, max_tokens={limit}, "
            f"encoder_tokens={request.encoder_tokens}, boundaries={boundaries}, "
            f"samples={samples}, **{keys})"
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
            **keys,
        )
        age = (next(self.counter),)
        for each in (name, *others):
            own = dataclasses.replace(request, name=each, tokens=list(request.tokens))
            self.requests[each], self.limits[each], self.prompts[each] = own, limit, count
            self.ages[each] = age if each is name else (*age, next(self.counter))
            self.late[each] = deque()
        family = [self.requests[each] for each in (name, *others)]
        self.siblings |= {each: family for each in (name, *others)}

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
        self.scheduler.finish(name)
        self.forget(name)
        for of_request in (self.known, self.limits, self.prompts, self.ages, self.late):
            del of_request[name]
        self.join()
        self.siblings.pop(name, None)

    def reset(self) -> None:
        super().reset()
        self.restart()

    def restart(self) -> None:
        """Computes all requests again; tokens that are still to arrive are forgotten."""
        self.say("restart()")
        self.scheduler.restart()
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
        self.prompts[new] = self.prompts[donor.name]
        self.ages[new] = (*self.ages[donor.name], next(self.counter))
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
        count = min(1 + self.draw.randint(0, self.drafts), self.limits[name] - len(request.tokens))
        first = len(request.tokens)
        request.tokens += [self._id() for _ in range(count)]
        request.verified = first + 1
        if self.ahead:
            self.late[name].append((first, self.time + self.ahead))
        else:
            self.known[name][:] = request.tokens
        self.say(f"append({{{name!r}: {count}}}) = {request.tokens[first:]}")
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
        if request.name in self.manager.requests:
            self.oracle.rewind(request, num_tokens)
            assert self.manager.num_computed_tokens(request.name) == request.computed
        else:
            request.story = []
        del request.tokens[num_tokens:]
        del self.known[request.name][num_tokens:]

    def edit(self) -> None:
        """Replaces the last tokens of a request by others, computed or not."""
        names = [n for n in self.requests if not self.drafting(n)]
        if not names or self.ahead:
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
        missing, computed = len(request.tokens) - count, request.computed
        self._rewound(request, count)
        request.verified = count
        self.known[name][:] = request.tokens
        if computed < count:  # tokens follow once all of these are computed
            return self.after_change()
        more = [self._id() for _ in range(missing)]
        request.tokens += more
        request.verified = len(request.tokens)
        self.known[name][:] = request.tokens
        self.say(f"append({{{name!r}: {missing}}}) = {more}")
        self.scheduler.append({name: missing})
        self.after_change()

    def after_change(self) -> None:
        """Notes a call after which another schedule may be right."""
        self.lost = None

    # --- steps ------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        parked = {n: self.manager.num_parked_tokens(n) for n in self.scheduler.waiting}
        running, cut = set(self.scheduler.running), None
        if not self.has_states and self.chance(0.1):
            cut = self.draw.choice([1, 3])
        schedule = self.scheduler.schedule(max_tokens=cut)
        is_new, self.uploads = self.uploads != self.manager.num_uploads, self.manager.num_uploads
        if is_new:
            assert cut is None or sum(schedule.work.values()) <= cut, "more tokens than asked for"
            assert running.isdisjoint(schedule.hits), "a hit is told twice"
            assert running.issuperset(schedule.preempted), "one that waits is preempted"
            if schedule.preempted:
                oldest = min(self.ages[name] for name in schedule.preempted)
                younger = [n for n in self.scheduler.running if self.ages[n] > oldest]
                assert not younger, f"one older than {younger} is preempted"
        self.say(
            f"schedule({cut}) = {schedule.work}, preempted {schedule.preempted}, "
            f"hits { {n: h.num_cached_tokens for n, h in schedule.hits.items()} }"
        )
        for name in schedule.preempted:
            request = self.requests[name]
            if request.story:  # or the schedule comes again
                self.preempted[name] = request.story, request.states, request.partial
            request.story = []
            self.oracle.is_fresh_epoch = False  # requests of any epoch may be parked
        self.oracle.seen["preemptions"] += len(schedule.preempted)
        for name, hit in schedule.hits.items():
            request = self.requests.get(name)  # None: one that `add_wrong` added
            if request is not None and not request.story:
                self.oracle.begin(request, hit.num_cached_tokens)
                before, count = self.preempted.get(name, ([],)), hit.num_cached_tokens
                # One that got no blocks after its start is parked with what it began with.
                if parked.get(name) == count > 0 and len(before[0]) == count + 1:
                    request.story, request.states, request.partial = before
                    self.oracle.resume(request)
        return schedule

    def step(self) -> None:
        self.time += 1
        self.reveal()
        had_work = self.scheduler.has_work
        schedule = self.schedule()
        self._check_schedule(schedule)
        self._check_progress(schedule, had_work)
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
        self._check_budgets(schedule, upload)
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
        for request in self.scheduler._queues.running.values():
            known = self.manager._prefixes.kept.num_known(request.row)
            assert (request.num_known or 0) == known, f"{request.name!r}: {known} known ids"

    def check_wanted(self) -> None:
        """Checks the tokens of which the caller is told that they wait to be computed."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        entering = waiting[: self.manager.max_requests - len(running)]
        known = {name: self.requests[name] for name in (*running, *entering)}
        left = {name: len(each.tokens) - max(each.computed, 0) for name, each in known.items()}
        wanted = self.scheduler.wanted_tokens
        if all(len(self.siblings.get(name, [name])) == 1 for name in waiting):
            assert wanted == sum(left.values()), "wanted tokens"
        else:  # samples that wait for the prompt of another one compute nothing themselves
            assert wanted >= sum(left[name] for name in running), "wanted tokens"

    def handle(self, schedule: Schedule) -> None:
        """Handles the results of a step: forks, rejected drafts, next tokens, ends."""
        for name in schedule.samples:
            if not self.drafting(name) and self.chance(0.05):
                self.fork(name, is_ready=True)
            self.sample(name)

    def reveal(self) -> None:
        """Fills in the ids that have arrived."""
        for name, late in self.late.items():
            while late and late[0][1] <= self.time:
                position, _ = late.popleft()
                ids = self.known[name]
                assert position == len(ids)
                ids.append(self.requests[name].tokens[position])

    def _check_schedule(self, schedule: Schedule) -> None:
        work, running = schedule.work, self.scheduler.running
        assert sum(work.values()) <= self.shape.max_tokens
        assert len(work) <= self.shape.batch_size
        assert set(work) <= set(running) and set(self.manager.requests) == set(running)
        assert set(schedule.preempted) <= set(self.scheduler.waiting)
        assert self.options["preemption"] or not schedule.preempted
        for index, (name, count) in enumerate(work.items()):
            request = self.requests[name]
            left = len(request.tokens) - request.computed
            assert 1 <= count <= left, f"{name!r} computes {count} of {left} tokens"
            assert schedule.samples.get(name) == (index if count == left else None), "samples"
        for name in set(schedule.samples) - set(work):
            leader = list(work)[schedule.samples[name]]
            assert leader in schedule.samples, "the prompt is not computed"
            assert self.requests[leader] in self.siblings[name], "samples of one prompt"
        if self.has_tokens:
            assert schedule.token_ids.tolist() == self._ids(work), "token ids"
        for queue in (running, self.scheduler.waiting):
            assert list(queue) == sorted(queue, key=self.ages.__getitem__), "not by age"
        if self.lost is not None:
            again = {n: c for n, c in self.lost.work.items() if n in self.requests}
            assert work == again or not again, f"{work} instead of the lost {again}"

    def _check_budgets(self, schedule: Schedule, upload: Upload) -> None:
        """Checks what a step takes of ``cached_tokens`` and ``forks``."""
        cached, longest = self.options["cached_tokens"], self.plan.max_model_len
        taken = sum(self.requests[name].unsent for name in schedule.work)
        assert taken <= (longest if cached is None else cached), f"{taken} cached tokens"
        copied = set(upload.parts()["copy_destinations"].tolist())
        ids = [self.manager.block_ids(name) for name in self.manager.requests]
        copying = sum(not copied.isdisjoint(itertools.chain(*of_groups)) for of_groups in ids)
        assert copying <= self.options["forks"], f"{copying} requests copy blocks"

    def _ids(self, work: dict[Hashable, int]) -> list[int]:
        """Returns the token ids of a step, -1 for those that the host does not know yet."""
        ids: list[int] = []
        for name, count in work.items():
            first, known = self.requests[name].computed, self.known[name]
            known = known + [-1] * (first + count - len(known))
            ids += known[first : first + count]
        return ids

    def _check_progress(self, schedule: Schedule, had_work: bool) -> None:
        if schedule.work or schedule.preempted or not had_work:
            self.idle = 0
            return
        self.idle += 1
        assert self.idle < 4 + self.ahead, "has_work is True and schedules are empty: a livelock"
