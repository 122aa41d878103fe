"""A state machine that drives a cache of your own against a reference, request by request.

It checks the promises of a plan: the blocks that a request must hold, who may share them, and
the content that it must read. The cache under test is reached through the methods that a
subclass writes; `JaxkvStateMachine` is such a subclass.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxkv._internal.numbers import NULL_BLOCK
from jaxkv.blocks import OutOfBlocksError
from jaxkv.planning import Plan
from jaxkv.specs import Growth
from jaxkv.testing._extra import extra
from jaxkv.testing.reference_cache import ReferenceCache, Write

with extra(__name__):
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        Bundle,
        RuleBasedStateMachine,
        consumes,
        initialize,
        invariant,
        multiple,
        precondition,
        rule,
    )


def _overrides(method: str) -> Callable[["CacheStateMachine"], bool]:
    base = getattr(CacheStateMachine, method)
    return lambda machine: getattr(type(machine), method) is not base


class CacheStateMachine(RuleBasedStateMachine):
    """Serves random requests from your cache, and checks it after every step.

    Requests are numbered from 1: ``requests_0`` of a printed story starts request 1. To shrink a
    failure may take minutes; for a quick answer leave `hypothesis.Phase.shrink` out.

    Set `plan` and write the methods below from `make_cache` to `read_null_block`; `fork`,
    `rewind` and `swap` are driven when they are written. Then
    ``TestMyCache = MyMachine.TestCase`` for unittest and pytest. Add rules of your own over the
    bundle `requests`.

    Checked, whenever the cache is at rest and between the growth and the writes of a step:

    - *leaks*: free and held blocks are as many as were free at the start, which is at least
      what the plan counts on and leaves out the null block;
    - *null block*: no request holds id 0, or an id out of range, where it needs a block,
      and the null block keeps its bytes;
    - *aliasing*: two requests hold one block only in the same column, after a fork, and until
      one of them writes into it;
    - *content*: every request reads, in all that its next token may read, what it wrote, and
      no NaN beside it;
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

    plan: ClassVar[Plan]
    max_requests: ClassVar[int] = 4
    unwritten_reads_zero: ClassVar[bool] = False
    copies_on_write: ClassVar[bool] = False
    out_of_blocks: ClassVar[type[Exception]] = OutOfBlocksError

    requests = Bundle("requests")

    # --- to be written in a subclass ----------------------------------------------

    def make_cache(self) -> None:
        """Makes the cache under test, empty, for `plan` and `max_requests`."""
        raise NotImplementedError("make_cache")

    def start(self, request: int) -> None:
        """Starts a request, which holds nothing yet."""
        raise NotImplementedError("start")

    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Gives a request the blocks to compute its tokens up to ``num_tokens``.

        Raises:
          out_of_blocks: too few are free, and nothing was changed.
        """
        raise NotImplementedError("grow")

    def write(self, writes: Sequence[Write]) -> None:
        """Runs one step: writes the rows of all layers of all requests of the batch."""
        raise NotImplementedError("write")

    def finish(self, request: int) -> None:
        """Takes everything back from a request that ends or is preempted."""
        raise NotImplementedError("finish")

    def num_free_blocks(self) -> int:
        """Returns the blocks that can be handed out."""
        raise NotImplementedError("num_free_blocks")

    def block_ids(self, request: int) -> Sequence[Sequence[int]]:
        """Returns, per group of the plan, the request's blocks in order; 0 where it holds none."""
        raise NotImplementedError("block_ids")

    def read_pages(self, request: int, layer: str) -> np.ndarray:
        """Returns uint8[W, data_bytes]: the request's pages of a layer, by column of its row.

        Read them the way that your attention reads them, for the next token of the request.
        Columns that it does not hold may be anything.
        """
        raise NotImplementedError("read_pages")

    def read_null_block(self) -> Iterable[np.ndarray]:
        """Returns the bytes of block 0, in any arrays; they must not change."""
        raise NotImplementedError("read_null_block")

    def is_at_rest(self) -> bool:
        """Returns whether requests may read now (optional).

        False: what was finished, forked, rewound or swapped reaches the cache with its next step.
        """
        return True

    def fork(self, request: int, donor: int, num_tokens: int) -> bool:
        """Starts a request that shares the blocks of a donor's first tokens (optional).

        Drawn for whole blocks, of plans whose groups all keep tokens; see `copies_on_write`.
        Returns whether it did: False, with nothing changed, when no block that can be shared
        holds the state after those tokens.
        """
        raise NotImplementedError("fork")

    def rewind(self, request: int, num_tokens: int) -> bool:
        """Sets a request back to its first tokens, after drafts were rejected (optional).

        Returns whether it did: False, with nothing changed, when a block that the next token
        reads was given back, or holds a later state.
        """
        raise NotImplementedError("rewind")

    def swap(self, first: int, second: int) -> None:
        """Exchanges the rows of two requests in the block tables (optional)."""
        raise NotImplementedError("swap")

    # --- rules --------------------------------------------------------------------

    @initialize(target=requests, count=st.integers(0, 7))
    def begin(self, count: int) -> Any:
        """An empty cache and up to ``1 + count`` requests."""
        if not isinstance(getattr(self, "plan", None), Plan):
            raise TypeError(f"set plan in {type(self).__name__}, to what plan_cache returned")
        self.computed: dict[int, int] = {}  # tokens in the cache, of every running request
        self._names = itertools.count(1)
        self.reference = ReferenceCache(self.plan)
        self.make_cache()
        self._usable_blocks = self.num_free_blocks()
        self._null_block = [np.array(part) for part in self.read_null_block()]
        if not sum(part.size for part in self._null_block) and self.plan.layout.tensors:
            raise ValueError("read_null_block gave no bytes; wanted those of block 0")
        if not self.plan.usable_blocks <= self._usable_blocks < self.plan.num_blocks:
            raise AssertionError(
                f"{self._usable_blocks} blocks are free at the start; the plan counts on "
                f"{self.plan.usable_blocks} and has {self.plan.num_blocks} with the null block"
            )
        return multiple(*(self._start() for _ in range(min(1 + count, self.max_requests))))

    @precondition(lambda self: len(self.computed) < self.max_requests)
    @rule(target=requests)
    def start_request(self) -> int:
        return self._start()

    @rule(
        batch=st.dictionaries(requests, st.integers(0, 15), min_size=1),
        preempt=st.booleans(),
        look=st.booleans(),
    )
    def step(self, batch: dict[int, int], preempt: bool = False, look: bool = True) -> None:
        """Prefill and decode: from one token each, for 0, to all that a step may take, for 15.

        preempt: requests outside of the batch give way to those that are refused blocks.
        look: requests also read between the growth and the writes.
        """
        most = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        wanted = {request: 1 + part * (most - 1) // 15 for request, part in batch.items()}
        self._step(wanted, preempt, look)

    @precondition(lambda self: self.computed)
    @rule(preempt=st.booleans(), look=st.booleans())
    def decode(self, preempt: bool = False, look: bool = True) -> None:
        """One token for every request; ``preempt``: the last ones give way to the first."""
        self._step(dict.fromkeys(self.computed, 1), preempt, look)

    # Events after which nothing is different are not offered: Hypothesis disables some rules in
    # every story, and a story without steps is worth nothing.

    @precondition(lambda self: any(self.computed.values()))
    @rule(target=requests, request=consumes(requests), again=st.booleans())
    def finish_request(self, request: int, again: bool) -> Any:
        """It gives its blocks back; ``again``: it was preempted, and computes its tokens anew."""
        self._finish(request)
        return self._start(request) if again else multiple()

    @precondition(lambda self: self._prefixes())
    @rule(target=requests, which=st.integers(0, 15))
    def fork_request(self, which: int) -> Any:
        """A request starts with the tokens of another one."""
        prefixes = self._prefixes()
        donor, length = prefixes[which % len(prefixes)]
        request = next(self._names)
        if not self.fork(request, donor, length):
            return multiple()
        self.reference.fork(request, donor, length)
        self.computed[request] = length
        return request

    @precondition(lambda self: _overrides("rewind")(self) and self._drafted())
    @rule(which=st.integers(0, 7), count=st.integers(1, 3))
    def reject_drafts(self, which: int, count: int) -> None:
        """Sets a request back by a few tokens."""
        drafted = self._drafted()
        request = drafted[which % len(drafted)]
        kept = max(1, self.computed[request] - count)
        if self.rewind(request, kept):
            self.reference.rewind(request, kept)
            self.computed[request] = kept

    @precondition(lambda self: _overrides("swap")(self) and any(self.computed.values()))
    @rule(first=requests, second=requests)
    def swap_requests(self, first: int, second: int) -> None:
        self.swap(first, second)

    # --- invariants ---------------------------------------------------------------

    @invariant()
    def blocks_are_free_or_held_once(self) -> None:
        holders: dict[int, tuple[int, int, int]] = {}  # block -> request, group, column
        for request in self.computed:
            for group, ids in enumerate(self._rows(request)):
                for column, block_id in enumerate(ids):
                    if block_id != NULL_BLOCK:
                        self._check_holder(block_id, (request, group, column), holders)
        free = self.num_free_blocks()
        if free + len(holders) != self._usable_blocks:
            raise AssertionError(
                f"{free} blocks are free and {len(holders)} held, of {self._usable_blocks}: "
                + ("some leaked" if free + len(holders) < self._usable_blocks else "freed twice")
            )

    @invariant()
    def requests_read_what_they_wrote(self) -> None:
        if not self.is_at_rest():
            return
        for request, computed in self.computed.items():
            if computed:
                self._check_content(request, self._check_held(request, computed, computed))
        for before, after in zip(self._null_block, self.read_null_block(), strict=True):
            if not np.array_equal(_raw(before), _raw(after)):
                raise AssertionError("the null block was written; drop what goes to block 0")

    # --- how ----------------------------------------------------------------------

    def _start(self, request: int | None = None) -> int:
        request = next(self._names) if request is None else request
        self.start(request)
        self.reference.start(request)
        self.computed[request] = 0
        return request

    def _finish(self, request: int) -> None:
        self.finish(request)
        self.reference.finish(request)
        del self.computed[request]

    def _step(self, wanted: Mapping[int, int], preempt: bool, look: bool) -> None:
        totals: dict[int, int] = {}
        for request, length in wanted.items():
            total = min(self.computed[request] + length, self.plan.max_model_len)
            if total == self.computed[request]:  # as long as it may be: it begins anew
                self._restart(request)
            elif self._grow(request, total) or (preempt and self._make_way(request, total, totals)):
                totals[request] = total
        self.blocks_are_free_or_held_once()
        for request, total in totals.items():
            live = self._check_held(request, self.computed[request], total)
            if look:
                self._check_content(request, live)
        writes: list[Write] = []
        for request, total in totals.items():
            writes += self.reference.write(request, self.computed[request], total)
            self.computed[request] = total
        if totals:
            self.write(writes)

    def _restart(self, request: int) -> None:
        self._finish(request)
        self._start(request)

    def _make_way(self, request: int, total: int, batch: Collection[int]) -> bool:
        """Preempts requests outside of the batch until one of them is given its blocks."""
        for other in list(self.computed)[::-1]:
            if other not in (request, *batch) and any(map(any, self._rows(other))):
                self._restart(other)
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

    def _rows(self, request: int) -> list[list[int]]:
        rows = [np.asarray(ids, np.int64) for ids in self.block_ids(request)]
        if len(rows) != len(self.plan.groups) or any(ids.ndim != 1 for ids in rows):
            raise TypeError(
                f"block_ids gave {self.block_ids(request)!r}; wanted a list of block ids for each "
                f"of the plan's {len(self.plan.groups)} groups"
            )
        return [ids.tolist() for ids in rows]

    def _check_holder(
        self,
        block_id: int,
        holder: tuple[int, int, int],
        holders: dict[int, tuple[int, int, int]],
    ) -> None:
        if not 0 < block_id < self.plan.num_blocks:
            raise AssertionError(
                f"{_name(holder)} holds block {block_id}, which is not in the pool"
            )
        other = holders.setdefault(block_id, holder)
        if other is holder:
            return
        alike = other[0] != holder[0] and other[1:] == holder[1:]
        if not (alike and self.reference.share(*holder[1:], other[0], holder[0])):
            raise AssertionError(
                f"block {block_id} is held by {_name(other)} and by {_name(holder)}; two may hold "
                "what a fork shares until one of them writes into it"
            )

    def _check_held(self, request: int, computed: int, total: int) -> list[Sequence[int]]:
        """Checks that a request holds the blocks to compute its tokens up to ``total``.

        Returns:
          Their columns, per group.
        """
        rows = self._rows(request)
        live = [_needed(g.growth, computed, total) for g in self.plan.groups]
        for group, (ids, needed) in enumerate(zip(rows, live, strict=True)):
            missing = [i for i in needed if i >= len(ids) or ids[i] == NULL_BLOCK]
            if missing:
                raise AssertionError(
                    f"{_name((request, group, missing[0]))} holds no block, and computing "
                    f"tokens {computed} to {total} needs one"
                )
        return live

    def _check_content(self, request: int, live: Sequence[Sequence[int]]) -> None:
        """Checks what a request reads from its live columns, given per group."""
        for layer, place in self.reference.layers.items():
            pages = np.asarray(self.read_pages(request, layer))
            wanted = max(live[place.group], default=-1) + 1, place.spec.data_bytes
            fits = pages.ndim == 2 and len(pages) >= wanted[0] and pages.shape[1] == wanted[1]
            if pages.dtype != np.uint8 or not fits:
                raise ValueError(
                    f"read_pages gave {pages.dtype}{list(pages.shape)} for layer {layer!r}; "
                    f"wanted uint8{list(wanted)}, or more columns"
                )
            problem = self.reference.find_problem(
                request,
                layer,
                live[place.group],
                pages,
                unwritten_reads_zero=self.unwritten_reads_zero,
            )
            if problem:
                raise AssertionError(
                    f"request {request}, layer {layer!r}: {problem}; its blocks are "
                    f"{self._rows(request)[place.group]}"
                )

    def _drafted(self) -> list[int]:
        """Returns the requests that can be set back."""
        return [request for request, computed in self.computed.items() if computed > 1]

    def _prefixes(self) -> list[tuple[int, int]]:
        """Returns what a request can start with now: pairs of a donor and a number of tokens."""
        stored = {group.growth.stores for group in self.plan.groups}
        tokens_only = stored <= ({"tokens", "state"} if self.copies_on_write else {"tokens"})
        if not (_overrides("fork")(self) and tokens_only):
            return []
        if len(self.computed) == self.max_requests:
            return []
        return [(donor, length) for donor in self.computed for length in self._shareable(donor)]

    def _shareable(self, donor: int) -> list[int]:
        """Returns the prefixes of a donor that can be shared: their live blocks are held."""
        size = math.lcm(*(group.block_size for group in self.plan.groups))
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
                ids[column] != NULL_BLOCK
                for group, ids in zip(self.plan.groups, rows, strict=True)
                for column in _needed(group.growth, length, length)
            )
        ]


def _needed(growth: Growth, computed: int, total: int) -> Sequence[int]:
    """Returns the columns that a request needs for its tokens up to ``total``.

    At rest that is the state to resume from, without blocks for drafts.
    """
    if growth.stores != "state" or total > computed:
        return growth.live_blocks(computed, total)
    source = int(growth.live_columns(computed, total).source)
    return range(source, source + 1) if computed else ()


def _name(holder: tuple[int, int, int]) -> str:
    return "request {} (group {}, column {})".format(*holder)


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)
