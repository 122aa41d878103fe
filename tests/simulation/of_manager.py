"""Simulations of a manager alone."""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from jaxkv import OutOfBlocksError, StepShape
from jaxkv.blocks import ExportedBlocks, Upload
from tests.simulation.oracle import Known
from tests.simulation.plans import most_drafts
from tests.simulation.prefixes import ReferencePrefixes
from tests.simulation.traffic import NAMES, Simulation


class ManagerSimulation(Simulation):
    """Every call of a manager, in any order."""

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        super().__init__(seed, kind, history)
        most = self.manager.max_requests
        self.shape = StepShape.for_plan(
            self.plan,
            max_requests=most,
            max_tokens=most * self.plan.max_model_len,
            forks=most,
            cached_tokens=most * self.plan.max_model_len,
        )
        self.drafts = most_drafts(self.plan)
        self.prefixes = ReferencePrefixes(self.manager, self.checkpoint_share)
        self.finds = random.Random(-6 - seed)  # drawn apart, so that the rest stays

    def run(self, num_calls: int) -> Counter[str]:
        """Makes random calls, then finishes all requests."""
        calls = self.calls()
        for _ in range(num_calls):
            (call,) = self.draw.choices(list(calls), list(calls.values()))
            is_full = len(self.requests) == self.manager.max_requests
            if self.requests and not (call == self.start and is_full):
                call()
            elif not self.requests:
                self.lose_content() if self.chance(0.03) else self.start()
            if self.chance(0.01):
                self.new_epoch()
            if self.chance(0.005):
                self.reset()
            self.check()
        for name in list(self.requests):
            self.end(name)
        assert not self.manager.requests
        self.check()
        return self.oracle.seen

    def calls(self) -> dict[Callable[[], object], float]:
        """Returns the calls to draw from, and how often each comes."""
        calls: dict[Callable[[], object], float] = {self.start: 8, self.step: 10, self.finish: 3}
        others = self.grow, self.fork, self.rewind, self.trim, self.hand_over, self.grow_and_share
        calls |= {call: self.draw.choice([0, 0.3, 1, 4]) for call in others}
        if self.has_peers:
            calls |= {self.receive: 2, self.export: 2}
        return calls

    def meanwhile(self) -> None:
        """Takes the time between the lookup of a prompt and its start."""

    def reset(self) -> None:
        super().reset()
        self.prefixes.watch(self.manager)
        self.prefixes.new_epoch(forget=True)
        self.prefixes.prompts.clear()
        for name in list(self.requests):
            self.forget(name)

    def lose_content(self) -> None:
        super().lose_content()
        self.prefixes.new_epoch(forget=True)

    def new_epoch(self) -> None:
        super().new_epoch()
        self.prefixes.new_epoch(forget=False)

    def check(self) -> None:
        super().check()
        self.prefixes.check_events(self.mirror.stored, self.mirror.told)

    def start(self) -> None:
        request, options = self.new_request(), {}
        name, tokens = request.name, list(request.tokens)
        keys, boundaries = self.keys(request), self.boundaries(request)
        extra_keys = keys["extra_keys"]
        if self.chance(0.2):
            options["max_cached_tokens"] = self.draw.randint(0, len(tokens))
        self.say(f"start({name!r}, {tokens}, boundaries={boundaries}, {keys}, {options})")
        if self.chance(0.1):  # nothing of it is kept
            hit = self.manager.start(name, encoder_tokens=request.encoder_tokens)
            self.prefixes.prompts[name] = None
        else:
            given: Any = tokens
            if self.chance(0.3):
                given, keys = self.manager.find_prefix(tokens, **keys), {}
                most = self.finds.choice([None, 0, len(tokens) // 2])
                given = self.manager.find_prefix(given, max_cached_tokens=most)
                self.meanwhile()
            prompt = self.prefixes.prompt_of(request, extra_keys)
            limit = min(len(tokens) - 1, options.get("max_cached_tokens", len(tokens)))
            wanted = self.prefixes.find(prompt, limit)
            hit = self.manager.start(
                *(name, given),
                boundaries=boundaries,
                encoder_tokens=request.encoder_tokens,
                **keys,
                **options,
            )
            self.prefixes.check(hit, *wanted)
            self.prefixes.start(name, prompt, hit)
        self.say(f"    hit {hit.num_cached_tokens}, {hit.reasons}")
        self.requests[name] = request
        self.oracle.begin(request, hit.num_cached_tokens)

    def receive(self) -> None:
        """Starts a request whose first tokens another cache has computed."""
        if len(self.requests) == self.manager.max_requests:
            return
        request = self.new_request()
        name, count = request.name, self.draw.randint(1, len(request.tokens))
        self.say(f"import_blocks({name!r}, {count}) of {request.tokens}")
        handed: list[ExportedBlocks] = []
        if self.refused(
            lambda: handed.append(self.manager.import_blocks(name, count)), OutOfBlocksError
        ):
            self.say("    refused")
            assert not self.oracle.fits(count), "blocks that fit are refused"
            return
        self.requests[name], self.prefixes.prompts[name] = request, None
        self.oracle.receive(request, handed[0])

    def export(self) -> None:
        """Checks the blocks that another cache would get of a request."""
        self.check_export(self.requests[self.draw.choice(list(self.requests))])

    def finish(self) -> None:
        self.end(self.draw.choice(list(self.requests)))

    def end(self, name: Hashable) -> None:
        request, prompt = self.requests[name], self.prefixes.prompts[name]
        more = None
        if prompt is not None and self.chance(0.7):
            newest = min(len(request.tokens), request.computed + 1)
            end = self.draw.choice([newest, request.computed])
            more = request.tokens[len(prompt.codes) : end]
        self.say(f"finish({name!r}, {more})")
        self.prefixes.finish(name, more)
        self.manager.finish(name, more)
        self.forget(name)

    def grow_and_share(self) -> None:
        """Forks or ends a request that has grown, and lets others grow, before any step."""
        self.grow()
        self.draw.choice([self.fork, self.fork, self.finish])()
        if self.requests:
            self.grow()

    def fork(self) -> None:
        donor = self.requests[self.draw.choice(list(self.requests))]
        count = max(0, donor.computed - self.draw.choice([0, 0, 0, 1, 4, 99]))
        self.fork_into(donor, count, self.draw.randint(1, 3))

    def fork_into(self, donor: Known, count: int, samples: int) -> None:
        room = self.manager.max_requests - len(self.requests)
        names = [name for name in NAMES if name not in self.requests]
        into = self.draw.sample(names, min(room, samples))
        known = self.manager._prefixes.cached.num_known(self.manager.requests[donor.name])
        known = self.finds.choice([0, self.finds.randint(0, known)])
        options = {"num_tokens": count, "prompt_tokens": known}
        self.say(f"fork({donor.name!r}, {into}, {options})")
        if self.refused(lambda: self.manager.fork(donor.name, into, **options)):
            self.say("    refused")
            has_drafts = any(group.drafts for group in self.oracle.groups)
            assert count < donor.computed or has_drafts, "a fork of all tokens is refused"
            return
        for name in into:
            tokens = donor.tokens[: max(count, known)]
            tokens += [self._id() for _ in range(self.draw.randint(0, 4))]
            tokens = tokens[: self.plan.max_model_len]
            request = Known(name, tokens, donor.salt, donor.adapter, donor.media)
            request.encoder_tokens, request.verified = donor.encoder_tokens, len(tokens)
            self.oracle.fork(donor, request, count, known)
            found = self.manager._prefixes.cached.num_known(self.manager.requests[name])
            assert found <= max(count, known), "a fork knows tokens that it does not share"
            self.requests[name] = request
            self.prefixes.fork(donor.name, name, count, known)

    def hand_over(self) -> None:
        """Forks a request and finishes it, as an engine does with a prompt of several samples."""
        donor = self.requests[self.draw.choice(list(self.requests))]
        if len(self.requests) < self.manager.max_requests:
            self.fork_into(donor, donor.computed, self.draw.randint(1, 3))
        self.end(donor.name)

    def rewind(self) -> None:
        request = self.requests[self.draw.choice(list(self.requests))]
        name = request.name
        count = max(0, request.computed - self.draw.choice([0, 1, 1, 2, 4, 99]))
        prompt = self.prefixes.prompts[name]
        waits = prompt is not None and prompt.goes_on and request.computed < len(prompt.codes)
        if prompt and waits and not self.has_encoder and self.chance(0.5):
            count = self.draw.randint(request.computed, len(prompt.codes))
        states = [columns.keys() for columns in request.states.values()]
        is_known = count == 0 or count >= request.computed or all(count in of for of in states)
        if not is_known and self.oracle.may_resume(request, count):
            return  # an engine knows which states it wrote
        kept, row = self.manager._prefixes.cached, self.manager.requests[name]
        known = min(count, kept.num_known(row))
        self.say(f"rewind({{{name!r}: {count}}})")
        if self.refused(lambda: self.manager.rewind({name: count})):
            self.say("    refused")
            assert count < request.computed, "a rewind to where a request is, is refused"
            # Before the last step, states may lie in blocks of drafts, and after the first end of a
            # block for which that is so, only a step of drafts is sure; "align" moves on in `grow`.
            count_of_step = request.reached - request.resumed
            is_sure = is_known and count > request.resumed
            is_sure &= not any(
                g.is_window
                or (g.open and count_of_step > 1 + g.block - g.open)
                or g.mode == "align"
                or (g.drafts and count_of_step > 1 + g.drafts)
                for g in self.oracle.groups
            )
            assert not is_sure, "a rewind to known states is refused"
            return
        assert kept.num_known(row) == known, "known tokens"
        self.oracle.rewind(request, count)
        request.tokens[count:] = [self._id() for _ in request.tokens[count:]]
        request.verified = len(request.tokens)
        self.prefixes.rewind(name, count)

    def trim(self) -> None:
        names = self.draw.choices(list(self.requests), k=2)
        self.say(f"trim({names})")
        self.manager.trim(names)

    def work(self) -> dict[Hashable, int]:
        work: dict[Hashable, int] = {}
        most = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        for name in self.draw.sample(list(self.requests), self.draw.randint(1, len(self.requests))):
            room = min(most, self.plan.max_model_len - self.requests[name].computed)
            left = len(self.requests[name].tokens) - self.requests[name].computed
            if room:
                rest = min(room, max(left, 1))  # of the prompt
                counts = [1, rest, rest, self.draw.randint(1, room)]
                work[name] = 1 if self.has_moved(name) else self.draw.choice(counts)
        return work

    def has_moved(self, name: Hashable) -> bool:
        """Returns whether drafts have left the state of a request in another block."""
        request = self.requests[name]
        return any(
            group.mode == "align"
            and request.states[group.index].get(request.computed, 0)
            > group.newest_block(request.computed)
            for group in self.oracle.groups
        )

    def grow(self) -> None:
        work = self.work()
        self.say(f"grow({work})")
        if self.refused(lambda: self.manager.grow(work), OutOfBlocksError):
            self.say("    refused")

    def step(self) -> None:
        work = self.work()
        self.say(f"step({work})")
        for name, count in work.items():
            request = self.requests[name]
            missing = request.computed + count - len(request.tokens)
            request.tokens += [self._id() for _ in range(missing)]
            drafts = 0 if count > 1 + self.drafts else self.draw.choice([0, count - 1])
            request.verified = request.computed + count - drafts
        uploads: list[Upload] = []
        if self.refused(
            lambda: uploads.append(self.manager.step(self.shape, work)), OutOfBlocksError
        ):
            self.say("    refused")
            if self.chance(0.5):
                self.finish()
            return
        if self.chance(0.01):  # the upload never runs
            return self.reset()
        self.oracle.step(uploads[0], self.requests, work)
        self.prefixes.step(work)
