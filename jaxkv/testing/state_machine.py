"""A state machine that drives a cache of your own against a reference, request by request.

Knows what a plan promises: which blocks a request must hold, who may share them, and what it
must read. Knows nothing of how the cache under test is made: it calls the methods that a
subclass writes. `JaxkvStateMachine` is such a subclass.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxkv.blocks import NULL_BLOCK, OutOfBlocksError
from jaxkv.planning import Plan
from jaxkv.specs import StateSpec
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

    Set `plan` and write the methods below from `make_cache` to `read_null_block`; `fork` and
    `swap` are driven when they are written. Then ``TestMyCache = MyMachine.TestCase`` for
    unittest and pytest. Add rules of your own over the bundle `requests`.

    Checked, whenever the cache is at rest and between the growth and the writes of a step:

    - *leaks*: free and held blocks are as many as were free at the start, which is at least
      what the plan counts on and leaves out the null block;
    - *null block*: no request holds id 0, or an id out of range, where it needs a block,
      and the null block keeps its bytes;
    - *aliasing*: two entries hold one block only where a fork made them equal;
    - *content*: every request reads, in all that its next token may read, what it wrote, and
      no NaN beside it;
    - *all or nothing*: a request that is refused blocks leaves everything as it was, and the
      only one that holds any is never refused.

    plan: of one worker, for the cache under test.
    max_requests: that run at once.
    unwritten_reads_zero: bytes of a block that its holder has not written must be zeros, as
      when tenants are kept apart. Otherwise anything but NaN passes.
    out_of_blocks: what `grow` raises when blocks run out.
    """

    plan: ClassVar[Plan]
    max_requests: ClassVar[int] = 4
    unwritten_reads_zero: ClassVar[bool] = False
    out_of_blocks: ClassVar[type[Exception]] = OutOfBlocksError

    requests = Bundle("requests")

    # --- to be written in a subclass ----------------------------------------------

    def make_cache(self) -> None:
        """Makes the cache under test, empty, for `plan` and `max_requests`."""
        raise NotImplementedError("make_cache")

    def start(self, request: int) -> None:
        """A request begins; it holds nothing yet."""
        raise NotImplementedError("start")

    def grow(self, request: int, num_computed_tokens: int, num_tokens: int) -> None:
        """The request is about to compute its tokens up to ``num_tokens``.

        Raises:
          out_of_blocks: too few are free, and nothing was changed.
        """
        raise NotImplementedError("grow")

    def write(self, writes: Sequence[Write]) -> None:
        """One step: all layers of all requests of the batch, as `Write` says."""
        raise NotImplementedError("write")

    def finish(self, request: int) -> None:
        """The request ends, or is preempted, and gives everything back."""
        raise NotImplementedError("finish")

    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        raise NotImplementedError("num_free_blocks")

    def block_ids(self, request: int) -> Sequence[Sequence[int]]:
        """Per group of the plan, the request's blocks in order; 0 where it holds none."""
        raise NotImplementedError("block_ids")

    def read_pages(self, request: int, layer: str) -> np.ndarray:
        """uint8[W, data_bytes]: the request's pages of a layer, entry by entry of its row, read
        the way that your attention reads them. Entries that it does not hold may be anything.
        """
        raise NotImplementedError("read_pages")

    def read_null_block(self) -> Iterable[np.ndarray]:
        """The bytes of block 0, in any arrays; they must stay what they are at the start."""
        raise NotImplementedError("read_null_block")

    def fork(self, request: int, donor: int, num_tokens: int) -> None:
        """Optional: starts a request that shares the blocks of a donor's first tokens.

        Only drawn for whole blocks, of plans whose groups all keep tokens.
        """
        raise NotImplementedError("fork")

    def swap(self, first: int, second: int) -> None:
        """Optional: the two requests exchange their rows of the block tables."""
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
        if not sum(part.size for part in self._null_block) and self.plan.layout.slots:
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

    @rule(batch=st.dictionaries(requests, st.integers(0, 15), min_size=1))
    def step(self, batch: dict[int, int]) -> None:
        """Prefill and decode: from one token each, for 0, to all that a step may take, for 15."""
        most = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        self._step({request: 1 + part * (most - 1) // 15 for request, part in batch.items()})

    @rule()
    def decode(self) -> None:
        """One token for every request."""
        self._step(dict.fromkeys(self.computed, 1))

    @rule(target=requests, request=consumes(requests), again=st.booleans())
    def finish_request(self, request: int, again: bool) -> Any:
        """It gives its blocks back; ``again``: it was preempted, and computes its tokens anew."""
        self.finish(request)
        self.reference.finish(request)
        del self.computed[request]
        return self._start(request) if again else multiple()

    @precondition(lambda self: self._can_fork())
    @rule(target=requests, donor=requests, which=st.integers(0, 7))
    def fork_request(self, donor: int, which: int) -> Any:
        lengths = self._shareable(donor)
        if not lengths:
            return multiple()
        request, length = next(self._names), lengths[which % len(lengths)]
        self.fork(request, donor, length)
        self.reference.fork(request, donor, length)
        self.computed[request] = length
        return request

    @precondition(lambda self: _overrides("swap")(self))
    @rule(first=requests, second=requests)
    def swap_requests(self, first: int, second: int) -> None:
        self.swap(first, second)

    # --- invariants ---------------------------------------------------------------

    @invariant()
    def blocks_are_free_or_held_once(self) -> None:
        holders: dict[int, tuple[int, int, int]] = {}  # block -> request, group, entry
        for request in self.computed:
            for group, ids in enumerate(self._rows(request)):
                for entry, block_id in enumerate(ids):
                    if block_id != NULL_BLOCK:
                        self._check_holder(block_id, (request, group, entry), holders)
        free = self.num_free_blocks()
        if free + len(holders) != self._usable_blocks:
            raise AssertionError(
                f"{free} blocks are free and {len(holders)} held, of {self._usable_blocks}: "
                + ("some leaked" if free + len(holders) < self._usable_blocks else "freed twice")
            )

    @invariant()
    def requests_read_what_they_wrote(self) -> None:
        for request, computed in self.computed.items():
            if computed:
                self._check_request(request, computed, computed)
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

    def _step(self, wanted: Mapping[int, int]) -> None:
        totals = {}
        for request, length in wanted.items():
            total = min(self.computed[request] + length, self.plan.max_model_len)
            if total > self.computed[request] and self._grow(request, total):
                totals[request] = total
        self.blocks_are_free_or_held_once()
        for request, total in totals.items():
            self._check_request(request, self.computed[request], total)
        writes: list[Write] = []
        for request, total in totals.items():
            writes += self.reference.write(request, self.computed[request], total)
            self.computed[request] = total
        if totals:
            self.write(writes)

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
        enough = sum(group.spec.max_blocks(total, self.plan.limits) for group in self.plan.groups)
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
                f"block {block_id} is held by {_name(other)} and by {_name(holder)}"
            )

    def _check_request(self, request: int, computed: int, total: int) -> None:
        """What a request holds and reads before it computes the tokens up to ``total``."""
        rows = self._rows(request)
        live = [g.spec.live_blocks(computed, total) for g in self.plan.groups]
        for group, (ids, needed) in enumerate(zip(rows, live, strict=True)):
            missing = [i for i in needed if i >= len(ids) or ids[i] == NULL_BLOCK]
            if missing:
                raise AssertionError(
                    f"{_name((request, group, missing[0]))} holds no block, and computing "
                    f"tokens {computed} to {total} needs one"
                )
        for layer, place in self.reference.layers.items():
            pages = np.asarray(self.read_pages(request, layer))
            wanted = max(live[place.group], default=-1) + 1, place.spec.data_bytes
            fits = pages.ndim == 2 and len(pages) >= wanted[0] and pages.shape[1] == wanted[1]
            if pages.dtype != np.uint8 or not fits:
                raise ValueError(
                    f"read_pages gave {pages.dtype}{list(pages.shape)} for layer {layer!r}; "
                    f"wanted uint8{list(wanted)}, or more entries"
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
                    f"{rows[place.group]}"
                )

    def _can_fork(self) -> bool:
        kinds = [group.spec for group in self.plan.groups]
        tokens_only = not any(isinstance(s, StateSpec) or s.kind == "cross" for s in kinds)
        return _overrides("fork")(self) and tokens_only and len(self.computed) < self.max_requests

    def _shareable(self, donor: int) -> list[int]:
        """Lengths of whole blocks of all groups that a donor still holds what is read of."""
        size = math.lcm(*(group.block_size for group in self.plan.groups))
        most = min(self.computed[donor], self.plan.max_model_len - 1)
        rows = self._rows(donor)
        return [
            length
            for length in range(size, most + 1, size)
            if all(
                ids[entry] != NULL_BLOCK
                for group, ids in zip(self.plan.groups, rows, strict=True)
                for entry in group.spec.live_blocks(length, length)
            )
        ]


def _name(holder: tuple[int, int, int]) -> str:
    return "request {} (group {}, entry {})".format(*holder)


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)
