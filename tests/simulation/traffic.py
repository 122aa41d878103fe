"""The common part of random simulations of a scheduler and of a manager."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from jaxkv import BlockManager, ExtraKey, HostMemory, Plan, StepShape
from jaxkv._src.blocks import _steps
from jaxkv._src.offload._memory import block_bytes
from jaxkv._src.uploads import check_fits
from jaxkv.blocks import PrefixHit, Upload
from jaxkv.prefixes import EventLog
from tests.simulation.events import Mirror
from tests.simulation.oracle import Known, Oracle
from tests.simulation.plans import KINDS, random_plan

ALPHABET = (0, 1, 2**31 - 1)
NAMES = [*range(6), "a", "b", ("a", 0), (0, 1), 2.5, None]


class Watched(BlockManager):
    """A manager that checks the sizes of its uploads, and tells what its calls returned.

    resumed: names of requests that were resumed and not started, since somebody has cleared them.
    told: counts of the hits of those that were started, as `PrefixStats` has them.
    reasons: why these were not longer.
    """

    def __init__(self, plan: Plan, **options: Any):
        super().__init__(plan, **options)
        self.resumed: set[Hashable] = set()
        self.told: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def start(self, request: Hashable, tokens: Any = None, **options: Any) -> PrefixHit:
        """Counts the hit."""
        hit = super().start(request, tokens, **options)
        if "not_looked_up" not in hit.reasons:
            known = self._prefixes.cached.num_known(hit.row)
            cached, from_host = hit.num_cached_tokens, hit.num_host_tokens
            self.told.update(requests=1, hits=cached > 0, host_hits=from_host > 0)
            self.told.update(prompt_tokens=known, cached_tokens=cached, host_tokens=from_host)
            self.reasons.update({*hit.reasons} - {"complete", "other_groups"})
        self._check_states()
        return hit

    def step(self, shape: StepShape, work: Any, **options: Any) -> Upload:
        """Checks that an upload holds as much as its shape was checked for: no less, and no more.

        More would go unseen into what follows in the array.
        """
        checked, may_copy = list[int](), self._may_copy()
        until, made = self._state.needs_no_change_until.copy(), self._num_made()

        def check(shape: StepShape, sizes: Sequence[int]) -> None:
            checked.extend([*sizes[5:], 0, 0, 0][:3])
            check_fits(shape, sizes)

        with mock.patch.object(_steps, "check_fits", check):
            upload = super().step(shape, work, **options)
        parts = upload.parts()
        written = [parts[name].size for name in ("entry_ids", "zero_ids", "copy_destinations")]
        assert checked == written, "an upload of other sizes than were checked"
        copied = set(parts["copy_destinations"].tolist())
        for name, row in self.requests.items():
            copies = not copied.isdisjoint(itertools.chain(*self.block_ids(name)))
            assert may_copy[row] or not copies, f"{name!r} copies, and nobody was told of it"
        looked_at = (until < self.computed_by_row) & (self._num_made() == made)
        for name in work:
            may_copy = (looked_at & self.may_copy_by_row)[self.requests[name]]
            assert not may_copy or self._has_to_copy(name), f"{name!r} writes nothing shared"
        self._check_states()
        return upload

    def _num_made(self) -> np.ndarray:
        """Returns how many states were kept of each row, some of them only for a moment."""
        of_rows = map(self._prefixes.cached.get, range(self.max_requests))
        return np.array([0 if prompt is None else len(prompt.checkpoints) for prompt in of_rows])

    def _has_to_copy(self, name: Hashable) -> bool:
        """Returns whether others have, or may find, a block that a request can write next."""
        computed, sizes = self.num_computed_tokens(name), self._state.block_tokens
        each = zip(self.plan.groups, self.block_ids(name), sizes, strict=True)
        ids = [
            ids[0 if g.growth.kind in ("ring", "state") else computed // n :] for g, ids, n in each
        ]
        return bool(self.block_pool.must_copy(np.concatenate(ids).astype(int), 0).any())

    def _check_states(self) -> None:
        """Checks that states have no more blocks than they may, whatever has brought them back."""
        most = self._prefixes.cached._max_checkpoint_blocks
        assert self.prefix_stats().checkpoint_blocks <= most, "more blocks of states than may be"

    def grow(self, work: Any) -> None:
        """Checks that requests copy blocks only if `may_copy_by_row` has said so."""
        may_copy = self._may_copy()
        super().grow(work)
        assert may_copy[self.pending_copies_by_row].all(), "copies that nobody was told of"

    def _may_copy(self) -> np.ndarray:
        return self.may_copy_by_row | self.pending_copies_by_row

    def swap_in(self, request: Hashable) -> PrefixHit:
        """Notes a request that goes on."""
        hit = super().swap_in(request)
        self.resumed.add(request)
        self._check_states()
        return hit


class Simulation:
    """The common part of the traffic of a scheduler and of a manager."""

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        self.draw = random.Random(seed)
        self.kind = self.draw.choice(list(KINDS)) if kind is None else kind
        self.plan = self.random_plan()
        self.log, rows = EventLog(), self.num_rows()
        self.checkpoint_share = self.share()
        self.manager = Watched(
            self.plan,
            max_requests=rows,
            checkpoint_share=self.checkpoint_share,
            events=self.log,
            host_memory=self.host_memory(seed),
        )
        self.oracle, self.mirror = Oracle(self.manager), Mirror(self.manager, self.log)
        self.history = history
        self.requests: dict[Hashable, Known] = {}
        self.forgotten: list[Known] = []  # requests that ended
        self.num_checks = 0
        self.roots = [[self._id() for _ in range(48)] for _ in range(self.draw.choice([1, 2]))]
        self.encoders = itertools.count()
        self.has_encoder = any(g.growth.kind == "cross" for g in self.plan.groups)
        self.has_states = any(g.growth.kind == "state" for g in self.plan.groups)
        # Some hand requests over to other caches; drawn apart, so that the rest stays.
        self.has_peers = not self.has_encoder and random.Random(-5 - seed).random() < 0.25

    def num_rows(self) -> int:
        return self.draw.randint(1, 5)

    def share(self) -> float:
        """Returns the largest share of blocks that may keep states."""
        return self.draw.choice([0.1, 0.5, 1.0])

    def random_plan(self) -> Plan:
        return random_plan(self.draw, self.kind)

    def host_memory(self, seed: int) -> HostMemory | None:
        """Returns host memory for one simulation of two; draws apart, so that the rest stays."""
        draw = random.Random(-1 - seed)
        if draw.random() < 0.5 or any(g.growth.kind == "cross" for g in self.plan.groups):
            return None
        size = max(layout.bytes_per_block for layout in self.plan.layouts)
        smallest = min(filter(None, block_bytes(self.plan)))
        blocks = draw.choice([0, 0.7, 3, 10, self.plan.num_blocks, 1000])
        return HostMemory(
            num_bytes=max(smallest, int(size * blocks)),
            min_tokens=draw.choice([1, 1, 1, 4, 16]),
            max_bytes_per_token=draw.choice([2**20, 2**20, size]),
        )

    def _id(self) -> int:
        return self.draw.choice(ALPHABET)

    def say(self, text: str) -> None:
        self.history.append(text)

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def new_name(self) -> Hashable:
        return self.draw.choice([name for name in NAMES if name not in self.requests])

    def prompt(self) -> list[int]:
        """Returns a prompt that often begins like an earlier one."""
        known = [*self.roots, *self.roots, *(request.tokens for request in self.forgotten[-3:])]
        root = self.draw.choice(known)
        tokens = root[: self.draw.choice([8, 16, len(root), self.draw.randint(0, len(root))])]
        tokens += [self._id() for _ in range(self.draw.choice([0, 1, 3, 6]))]
        return (tokens or [self._id()])[: self.plan.max_model_len - self.draw.randint(0, 3)]

    def new_request(self) -> Known:
        tokens = self.prompt()
        request = Known(self.new_name(), tokens, verified=len(tokens))
        if self.chance(0.15):
            request.salt = self.draw.choice(["x", "y"])
        if self.chance(0.1):
            request.adapter = self.draw.choice(["v", "w"])
        if self.chance(0.15) and len(tokens) > 1:
            start = self.draw.choice([0, self.draw.randrange(len(tokens) - 1)])
            end = self.draw.randint(start + 1, len(tokens))
            request.media = [("i", start, end)]
        if self.has_encoder:
            request.encoder_tokens = self.draw.randint(0, 6)
            request.encoder = next(self.encoders)
        return request

    def keys(self, request: Known) -> dict[str, Any]:
        """Returns the namespace of a request, as `BlockManager.start` takes it."""
        keys = [ExtraKey.mm(*medium) for medium in request.media]
        if request.adapter is not None:
            keys.append(ExtraKey.lora(request.adapter, "/" + request.adapter))
        return {"salt": request.salt, "extra_keys": keys}

    def boundaries(self, request: Known) -> list[int]:
        chosen = self.draw.choices(range(1, len(request.tokens) + 1), k=self.draw.randint(0, 2))
        return sorted(set(chosen)) if self.chance(0.4) else []

    def check_export(self, request: Known) -> None:
        """Checks the blocks of a request that another cache would get, unless it cannot get any.

        A step of it must have run, and the newest state must not lie in the block of a draft.
        """
        row = self.manager.requests[request.name]
        try:
            exported = self.manager.export_blocks(request.name)
        except ValueError:
            is_new = not request.computed or request.unsynced > 0
            has_drafts = any(group.drafts for group in self.oracle.groups)
            copies = self.manager.pending_copies_by_row[row]
            assert is_new or has_drafts or copies, f"{request.name!r} cannot be exported"
        else:
            assert request.unsynced == 0, "blocks are exported whose bytes no step has written"
            self.oracle.check_export(request, exported)

    def forget(self, name: Hashable) -> None:
        self.forgotten.append(self.requests.pop(name))

    def new_epoch(self) -> None:
        self.say("new_epoch()")
        self.manager.new_epoch()
        self.oracle.new_epoch()

    def lose_content(self) -> None:
        """Sleeps at level 2, which no running request survives."""
        self.say("reset_prefixes()")
        self.manager.reset_prefixes()
        self.oracle.new_epoch()
        self.oracle.device.lose_all(range(self.plan.num_blocks))

    def reset(self) -> None:
        """Lets the manager go on without its requests, as after an upload that was never run."""
        self.say("reset()")
        self.manager.reset()
        self.oracle.new_epoch()
        self.oracle.device.goes_on_anew = True
        self.oracle.seen["resets"] += 1
        assert not self.manager.requests and self.manager.prefix_stats().cached_blocks == 0
        assert self.manager.num_free_blocks + self.oracle.sinks == self.plan.num_blocks - 1

    def check(self) -> None:
        self.oracle.check_pool()
        stats = dataclasses.asdict(self.manager.prefix_stats())
        assert stats.pop("reasons") == self.manager.reasons, "reasons of misses"
        assert {**stats, **self.manager.told} == stats, "counts of hits"
        self.mirror.follow()
        self.num_checks += 1
        if self.num_checks % 3 == 0:
            self.oracle.check_rows()
        if self.num_checks % 8 == 0 and not self.has_encoder:
            self.oracle.check_tree()
            for request in (*self.forgotten[-4:], *self.requests.values()):
                if request.tokens:
                    self.oracle.check_cached(request, self.keys(request))

    def refused(self, call: Callable[[], object], *errors: type[Exception]) -> bool:
        """Makes a call that may be refused. Returns whether it was; it then changed nothing."""
        before = self._visible()
        try:
            call()
        except (TypeError, *(errors or (ValueError,))):  # noqa: B030
            assert self._visible() == before, "a refused call changed something"
            return True
        return False

    def _visible(self) -> object:
        manager = self.manager
        names = manager.requests
        ids = {name: manager.block_ids(name) for name in names}
        return names, manager.computed_tokens, ids, manager.num_free_blocks
