"""A state machine that drives a cache of your own against a reference, request by request.

It checks the promises of a plan: the blocks that a request must hold, who may share them, and
the content that it must read. The cache under test is reached through the methods that a
subclass writes.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.planning import Plan
from jaxkv._src.testing._cache_under_test import overrides
from jaxkv._src.testing._checked_cache import CheckedCache, needed_blocks
from jaxkv._src.testing._extra import extra
from jaxkv._src.testing._texts import ALPHABET, Text, Texts
from jaxkv._src.testing.reference_cache import ReferenceCache, Write

with extra():
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        Bundle,
        RuleBasedStateMachine,
        consumes,
        initialize,
        multiple,
        precondition,
        rule,
    )


PROMPTS = st.tuples(  # which text, the part of it that a prompt begins with, more tokens, salt
    st.integers(0, 7),
    st.integers(0, 15),
    st.lists(st.integers(0, ALPHABET - 1), max_size=2),
    st.sampled_from([None, None, None, "salt"]),
)
Prompt = tuple[int, int, Sequence[int], str | None]


class CacheStateMachine(CheckedCache, RuleBasedStateMachine):
    """Serves random requests from your cache, and checks it after every step.

    Requests are numbered from 1: ``requests_0`` of a printed story starts request 1. To shrink a
    failure may take minutes; for a quick answer leave `hypothesis.Phase.shrink` out.

    Set `plan` and write the methods from `make_cache` to `read_null_block`; `fork`, `rewind`,
    `start_prompt` and `new_epoch` are driven when they are written. Then
    ``TestMyCache = MyMachine.TestCase`` for unittest and pytest. Add rules of your own over the
    bundle `requests`.

    Checked, after every rule and between the growth and the writes of a step:

    - *leaks*: free and held blocks are as many as were free at the start, which is at least
      what the plan counts on and leaves out the null block;
    - *null block*: no request holds id 0, or an id out of range, where it needs a block,
      and the null block keeps its bytes;
    - *aliasing*: two requests hold one block only in the same logical block, after a fork or with
      equal prompts, and until one of them writes something else into it;
    - *content*: every request reads, in all that its next token may read, what it wrote, and
      no NaN next to it; a prompt reads what the same tokens wrote under the same salt, in the
      same epoch;
    - *all or nothing*: a request that is refused blocks leaves everything as it was, and the
      only one that holds any is never refused.

    plan: of one worker, for the cache under test.
    max_requests: that run at once.
    unwritten_reads_zero: bytes of a block that its holder has not written must be zeros, as
      when tenants are kept apart. Otherwise anything but NaN passes.
    copies_on_write: forks are drawn of all tokens that the donor computed, too, and of plans
      with states: partial blocks and states then have to be copied before they are written.
    out_of_blocks: the error that `grow` raises when blocks run out.
    """

    requests = Bundle("requests")

    # --- rules --------------------------------------------------------------------

    @initialize(target=requests, count=st.integers(0, 7), prompts=st.booleans())
    def begin(self, count: int, prompts: bool = False) -> object:
        """Makes an empty cache and starts up to ``1 + count`` requests, with prompts or without."""
        if not isinstance(getattr(self, "plan", None), Plan):
            raise TypeError(f"set plan in {type(self).__name__}, to what plan_cache returned")
        self.computed = {}
        self._names = itertools.count(1)
        self.reference = ReferenceCache(self.plan)
        self.texts = Texts(max(1, self.plan.max_model_len - 1))
        self.make_cache()
        self._begin_checks()
        new = range(min(1 + count, self.max_requests))
        if prompts and self._has_prompts():
            return multiple(*(self._start_cut(i, 15 - 2 * i, (), None) for i in new))
        return multiple(*(self._start() for _ in new))

    @precondition(lambda self: len(self.computed) < self.max_requests)
    @rule(target=requests)
    def start_request(self) -> int:
        return self._start()

    @precondition(lambda self: self._has_prompts() and len(self.computed) < self.max_requests)
    @rule(target=requests, prompt=PROMPTS)
    def start_request_with_prompt(self, prompt: Prompt) -> int:
        """Starts a request whose prompt begins like a fixed one, or like that of an ended one."""
        return self._start_cut(*prompt)

    @precondition(lambda self: self._has_prompts() and len(self.computed) < self.max_requests)
    @rule(prompt=PROMPTS, length=st.integers(0, 15))
    def serve_request_with_prompt(self, prompt: Prompt, length: int) -> None:
        """Computes a prompt in steps of one length, and finishes the request."""
        request = self._start_cut(*prompt)
        wanted, before = len(self.texts.running[request].tokens), -1
        while before < self.computed[request] < wanted:
            before = self.computed[request]
            self.step({request: length})
        self._finish(request)

    @rule(
        batch=st.dictionaries(requests, st.integers(0, 15), min_size=1),
        preempt=st.booleans(),
        look=st.booleans(),
    )
    def step(self, batch: dict[int, int], preempt: bool = False, look: bool = True) -> None:
        """Computes a step of prefill and decode.

        batch: requests, and how much each computes: 0: one token; 15: all that a step may take.
        preempt: requests outside of the batch give way to those that are refused blocks.
        look: requests also read between the growth and the writes.
        """
        most = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        wanted = {request: 1 + part * (most - 1) // 15 for request, part in batch.items()}
        self._step(wanted, preempt, look)

    @precondition(lambda self: self.computed)
    @rule(preempt=st.booleans(), look=st.booleans())
    def decode(self, preempt: bool = False, look: bool = True) -> None:
        """Computes one token of every request; ``preempt``: the last ones give way to the first."""
        self._step(dict.fromkeys(self.computed, 1), preempt, look)

    # Events after which nothing is different are not offered: Hypothesis disables some rules in
    # every story, and a story without steps is worth nothing.

    @precondition(lambda self: any(self.computed.values()))
    @rule(target=requests, request=consumes(requests), again=st.booleans())
    def finish_request(self, request: int, again: bool) -> object:
        """Finishes a request; ``again``: it was preempted, and computes its tokens again."""
        if again:
            return self._restart(request)
        self._finish(request)
        return multiple()

    @precondition(lambda self: self._prefixes())
    @rule(target=requests, which=st.integers(0, 15))
    def fork_request(self, which: int) -> object:
        """Starts a request with the first tokens of another one."""
        prefixes = self._prefixes()
        donor, length = prefixes[which % len(prefixes)]
        request = next(self._names)
        if not self.fork(request, donor, length):
            return multiple()
        self.reference.fork(request, donor, length)
        self.texts.fork(request, donor, length)
        self.computed[request] = length
        return request

    @precondition(lambda self: overrides("rewind")(self) and self._drafted())
    @rule(which=st.integers(0, 7), count=st.integers(1, 3))
    def reject_drafts(self, which: int, count: int) -> None:
        """Sets a request back by a few tokens."""
        drafted = self._drafted()
        request = drafted[which % len(drafted)]
        kept = max(1, self.computed[request] - count)
        if self.rewind(request, kept):
            self.reference.rewind(request, kept)
            self.texts.rewind(request, kept)
            self.computed[request] = kept

    @precondition(lambda self: overrides("new_epoch")(self) and self.texts.num_ended >= 3)
    @rule()
    def begin_new_epoch(self) -> None:
        """Changes the weights: later prompts find nothing that was computed before."""
        self.new_epoch()
        self.texts.begin_epoch()

    # --- how ----------------------------------------------------------------------

    def _start(self, request: int | None = None) -> int:
        request = next(self._names) if request is None else request
        self.start(request)
        self.reference.start(request)
        self.computed[request] = 0
        return request

    def _start_cut(self, which: int, part: int, more: Sequence[int], salt: str | None) -> int:
        return self._start_prompt(next(self._names), self.texts.cut(which, part, more), salt)

    def _start_prompt(self, request: int, prompt: Sequence[int], salt: str | None) -> int:
        found = self.start_prompt(request, prompt, salt)
        if not 0 <= found < len(prompt):
            raise AssertionError(
                f"start_prompt found {found} tokens of a prompt of {len(prompt)}; the last one has "
                "to be computed, for what follows it"
            )
        text = self.texts.start(request, prompt, salt)
        self.reference.start(request, text.namespace, prompt[:found])
        self.computed[request] = found
        return request

    def _finish(self, request: int) -> Text | None:
        """Ends a request. Returns its text, if it has one."""
        text = None
        if request in self.texts.running:
            self.texts.first(request, self.computed[request] + 1)  # one is not computed yet
            text = self.texts.finish(request)
            self.finish_prompt(request, text.tokens[text.num_prompt_tokens :])
        else:
            self.finish(request)
        self.reference.finish(request)
        del self.computed[request]
        return text

    def _step(self, wanted: Mapping[int, int], preempt: bool, look: bool) -> None:
        totals: dict[int, int] = {}
        self._waiting: dict[int, Text | None] = {}
        for request, length in wanted.items():
            if request in self._waiting:
                continue
            computed = self.computed[request]
            total = min(computed + length, self.plan.max_model_len)
            if total == computed:  # as long as it may be: it begins anew
                self._restart(request)
                continue
            total = self.chunk_end(request, computed, total)
            if self._grow(request, total) or (preempt and self._make_way(request, total, totals)):
                totals[request] = total
        self.blocks_are_free_or_held_once()
        for request, total in totals.items():
            live = self._check_held(request, self.computed[request], total)
            if look:
                self._check_content(request, live)
        writes: list[Write] = []
        for request, total in totals.items():
            tokens = self.texts.first(request, total)
            writes += self.reference.write(request, self.computed[request], total, tokens)
            self.computed[request] = total
        if totals:
            self.write(writes)
        for request, text in self._waiting.items():
            self._resume(request, text)

    def _restart(self, request: int) -> int:
        return self._resume(request, self._finish(request))

    def _resume(self, request: int, text: Text | None) -> int:
        """Starts a request that was finished: all its text is now its prompt, if it fits."""
        if text is None:
            return self._start(request)
        most = len(text.tokens) if len(text.tokens) < self.plan.max_model_len else 1
        prompt = text.tokens[: max(most, text.num_prompt_tokens // 2)]
        return self._start_prompt(request, prompt, text.namespace[1])

    def _make_way(self, request: int, total: int, batch: Collection[int]) -> bool:
        """Preempts requests outside of the batch until one of them is given its blocks."""
        for other in list(self.computed)[::-1]:
            if other not in (request, *batch) and any(map(any, self._rows(other))):
                self._waiting[other] = self._finish(other)
                if self._grow(request, total):
                    return True
        return False

    def _grow(self, request: int, total: int) -> bool:
        before = {name: self._rows(name) for name in self.computed}
        free = self.num_free_blocks()
        try:
            self.grow(request, self.computed[request], total)
            return True
        except self.out_of_blocks:
            pass
        after = {name: self._rows(name) for name in self.computed}
        if (after, self.num_free_blocks()) != (before, free):
            changes = [f"free blocks: {free} -> {self.num_free_blocks()}"]
            changes += [f"request {n}: {before[n]} -> {after[n]}" for n in before]
            raise AssertionError(
                f"request {request} was refused blocks, and something changed: {'; '.join(changes)}"
            )
        enough = self.plan.admission_blocks(total)
        if free >= enough:
            raise AssertionError(
                f"request {request} was refused blocks with {free} free; it never holds more than "
                f"{enough}"
            )
        if not any(any(ids) for name in before if name != request for ids in before[name]):
            raise AssertionError(f"request {request} was refused blocks, and no other holds any")
        return False

    def _has_prompts(self) -> bool:
        return overrides("start_prompt")(self)

    def _drafted(self) -> list[int]:
        """Returns the requests that can be set back.

        The reference has one state for all tokens of a step, so it cannot tell which state a
        prompt keeps whose step was one of drafts.
        """
        has_states = any(group.growth.speculative_blocks for group in self.plan.groups)
        left_out = self.texts.running if has_states else {}
        return [name for name, done in self.computed.items() if done > 1 and name not in left_out]

    def _prefixes(self) -> list[tuple[int, int]]:
        """Returns what a request can start with now: pairs of a donor and a number of tokens."""
        stored = {group.growth.stores for group in self.plan.groups}
        copied = {"tokens", "ring", "state"}  # the latter two are written again and again
        tokens_only = stored <= (copied if self.copies_on_write else {"tokens"})
        if not (overrides("fork")(self) and tokens_only):
            return []
        if len(self.computed) == self.max_requests:
            return []
        return [(donor, length) for donor in self.computed for length in self._shareable(donor)]

    def _shareable(self, donor: int) -> list[int]:
        """Returns the prefixes of a donor that can be shared: their live blocks are held."""
        growths = [group.growth for group in self.plan.groups]
        size = math.lcm(*(g.group_size if g.stores == "ring" else g.block_size for g in growths))
        most = min(self.computed[donor], self.plan.max_model_len - 1)
        lengths = list(range(size, most + 1, size))
        modes = {g.growth.cache_mode for g in self.plan.groups if g.growth.stores == "state"}
        if modes - {"all"}:
            lengths.clear()  # a state is at hand after the newest token only
        if self.copies_on_write and most == self.computed[donor] > 0:
            lengths.append(most)
        rows = self._rows(donor)
        return [
            length
            for length in lengths
            if all(
                ids[logical_block] != NULL_BLOCK
                for group, ids in zip(self.plan.groups, rows, strict=True)
                for logical_block in needed_blocks(group.growth, length, length)
            )
        ]
