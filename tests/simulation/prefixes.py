"""The prefixes that later prompts have to find, written from the definition.

They are in dictionaries, by the story of their tokens: obviously right, not fast.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxkv import BlockManager, ExtraKey
from jaxkv.blocks import PrefixHit
from jaxkv.prefixes import block_keys
from tests.simulation.device import Stories
from tests.simulation.oracle import Known

GONE = -1  # in place of the id of a block that was kept and then evicted
NO_BLOCK = 2**31 - 1  # tokens of a block that has only the newest state


@dataclasses.dataclass(eq=False)
class Prompt:
    """The first tokens of a request, which its cache knows.

    namespace: epoch, salt and adapter.
    codes: its tokens, with the media that they are of.
    story: of its first 0, 1, ... tokens.
    kept: first tokens that are kept, as far as they can be.
    ends: numbers of tokens after which a chunk ends.
    goes_on: whether what the request generates follows these tokens.
    is_computing: whether a step has yet to compute some of them.
    """

    namespace: tuple[int, str | None, str | None]
    extra_keys: Sequence[ExtraKey]
    codes: list[tuple[int, tuple]]
    story: list[int]
    kept: int = 0
    ends: Sequence[int] = ()
    goes_on: bool = True
    is_computing: bool = True

    @property
    def tokens(self) -> list[int]:
        return [token for token, _ in self.codes]

    def cut(self, count: int) -> None:
        """Forgets the tokens after the first ones; others will follow these."""
        if count < len(self.codes):
            self.codes, self.story = self.codes[:count], self.story[: count + 1]
            self.kept, self.goes_on = min(self.kept, count), False


class ReferencePrefixes:
    """The prefixes that prompts can share, and why longer ones cannot.

    Drafts, host memory and a bound on the blocks of states let a manager keep something else.

    prompts: by request; None: it was started without tokens.
    is_exact: whether all that is found here is found by the manager, and no more.
    is_least: whether the manager finds at least as much, as long as nothing is evicted.
    """

    def __init__(self, manager: BlockManager, checkpoint_share: float):
        plan = manager.plan
        self.manager, self.stories = manager, Stories()
        self.growths = [group.growth for group in plan.groups]
        self.sizes = [g.block_size * plan.context_parallel for g in self.growths]
        # Rings are never kept: prefixes end where they hold nothing but whole groups.
        self.rings = [g.stores == "ring" for g in self.growths]
        self.whole = math.lcm(*(g.group_size for g in self.growths))
        self.overwrites = [g.stores == "state" and g.cache_mode != "all" for g in self.growths]
        self.smallest = min(
            NO_BLOCK
            if g.stores == "ring" or (g.stores, g.cache_mode) == ("state", "none")
            else size
            for g, size in zip(self.growths, self.sizes, strict=True)
        )
        has_drafts = any(growth.speculative_blocks for growth in self.growths)
        is_bounded = any(self.overwrites) and checkpoint_share < 1
        may_share = all(growth.kind != "cross" for growth in self.growths)
        has_host = manager.offload_stats() is not None
        self.is_exact = may_share and not (has_drafts or is_bounded or has_host)
        self.is_least = may_share and all(g.stores in ("tokens", "ring") for g in self.growths)
        self.prompts: dict[Hashable, Prompt | None] = {}
        self.epoch = 0
        self.names: dict[tuple[int, int], tuple[str, int, bytes]] = {}  # as `block_ids`
        self.told: dict[tuple[int, bytes], tuple] = {}  # by group and key: what events tell of it
        self._forget()
        self.first_blocks: dict[tuple, dict[tuple, None]] = {}
        self.watch(manager)

    def watch(self, manager: BlockManager) -> None:
        """Notes evictions; a reset gives a manager another pool."""
        evict = manager.block_pool.on_evict

        def on_evict(ids: np.ndarray) -> np.ndarray:
            self._evicted(set(ids.tolist()))
            return evict(ids)

        manager.block_pool.on_evict = on_evict

    def _forget(self) -> None:
        self.block_ids: dict[tuple[int, int], int] = {}  # (story at a block's end, group) -> block
        self.ends: dict[int, dict[int, int]] = {}  # story -> group -> block of a checkpoint
        self.seen: set[int] = set()

    def _evicted(self, ids: set[int]) -> None:
        if not self.is_exact:
            return self._forget()
        for key, block_id in self.block_ids.items():
            if block_id in ids:
                self.block_ids[key] = GONE
        for end in self.ends.values():
            if ids & set(end.values()):
                end.update(dict.fromkeys(end, GONE))

    def new_epoch(self, *, forget: bool) -> None:
        """Forgets all prefixes; with ``forget`` also that they were known."""
        self._forget()
        self.epoch += 1
        if forget:
            self.first_blocks = {}

    # --- requests -------------------------------------------------------------------

    def prompt_of(self, request: Known, extra_keys: Sequence[ExtraKey]) -> Prompt:
        """Returns the prompt of a request that is about to start."""
        namespace = self.epoch, request.salt, request.adapter
        codes = [
            (token, tuple((m, i - start) for m, start, end in request.media if start <= i < end))
            for i, token in enumerate(request.tokens)
        ]
        return Prompt(namespace, extra_keys, codes, self.stories.of(namespace, codes))

    def start(self, name: Hashable, prompt: Prompt, hit: PrefixHit) -> None:
        prompt.ends, prompt.kept = hit.chunk_ends, hit.num_cached_tokens
        self.prompts[name] = prompt

    def fork(self, donor: Hashable, name: Hashable, num_tokens: int, known: int) -> None:
        prompt = self.prompts[donor]
        if prompt is not None:
            lists = {"codes": [*prompt.codes], "story": [*prompt.story]}
            prompt = dataclasses.replace(prompt, **lists, ends=())
            prompt.cut(max(num_tokens, known))
            prompt.kept = min(prompt.kept, num_tokens)
            prompt.is_computing = num_tokens < len(prompt.codes)
        self.prompts[name] = prompt

    def rewind(self, name: Hashable, num_tokens: int) -> None:
        if (prompt := self.prompts[name]) is not None:
            prompt.cut(num_tokens)

    def step(self, work: Mapping[Hashable, int]) -> None:
        """Keeps what a step has computed of prompts."""
        for name, new in work.items():
            prompt = self.prompts[name]
            if prompt is not None and prompt.is_computing:
                computed = self.manager.num_computed_tokens(name)
                count = min(computed, len(prompt.codes))
                # After a rewind the prompt may end where the step began, from a state that stays.
                has_state = computed == count or (computed - new == count and self._stays(count))
                self._keep(name, prompt, count, is_end=has_state and count in prompt.ends)
                prompt.is_computing = count < len(prompt.codes)

    def finish(self, name: Hashable, tokens: Sequence[int] | None) -> Prompt | None:
        """Keeps what a request has computed, before it ends; returns its prompt."""
        prompt = self.prompts.pop(name)
        if prompt is not None:
            if prompt.goes_on:
                prompt.codes += [(token, ()) for token in tokens or ()]
                prompt.story = self.stories.of(prompt.namespace, prompt.codes)
            computed = self.manager.num_computed_tokens(name)
            count = min(computed, len(prompt.codes))
            copies = self.manager.pending_copies_by_row[self.manager.requests[name]]
            prompt.kept = 0  # what was kept in place of its own blocks may be gone by now
            self._keep(name, prompt, count, is_end=0 < count == computed and not copies)
        return prompt

    def _stays(self, count: int) -> bool:
        """Returns whether a step leaves the states after ``count`` tokens, which it begins with."""
        states = [at for at, growth in enumerate(self.growths) if growth.stores == "state"]
        modes = [self.growths[at].cache_mode for at in states]
        return "none" not in modes and not any(count % self.sizes[at] for at in states)

    # --- keeping --------------------------------------------------------------------

    def _keep(self, name: Hashable, prompt: Prompt, count: int, *, is_end: bool) -> None:
        """Keeps the blocks of a request's first tokens that are not kept yet."""
        is_checked = self.is_exact or self.is_least
        if prompt.namespace[0] != self.epoch or not is_checked:
            return
        rows, story, before = self.manager.block_ids(name), prompt.story, prompt.kept
        each = zip(self.sizes, self.overwrites, self.rings, strict=True)
        whole = [size for size, over, ring in each if not (over or ring)]
        is_end &= any(self.overwrites) and count % self.whole == 0
        if not is_end:
            count = max([count // size * size for size in whole], default=0)
            if count <= before:
                return
        prompt.kept = max(before, count)
        self.seen |= set(story[1 : count + 1])
        if len(prompt.codes) >= self.smallest:
            first = tuple(prompt.codes[: self.smallest])
            self.first_blocks.setdefault(first, {})[prompt.namespace] = None
        for group, size in enumerate(self.sizes):
            if self.overwrites[group] or self.rings[group]:
                continue
            for column in range(before // size, count // size):
                key = story[(column + 1) * size], group
                held = rows[group][column] if column < len(rows[group]) else 0
                if held and self.block_ids.get(key, 0) <= 0:
                    self.block_ids[key] = held
                    self._name(prompt, group, column)
        if is_end:
            self._keep_end(rows, story, count)

    def _keep_end(self, rows: Sequence[Sequence[int]], story: Sequence[int], count: int) -> None:
        known = self.ends.get(story[count])
        if known is not None and GONE not in known.values():
            return
        end: dict[int, int] = {}
        for group, size in enumerate(self.sizes):
            if self.rings[group]:
                continue
            if self.growths[group].cache_mode == "none" and self.overwrites[group]:
                end[group] = rows[group][0]
            elif self.overwrites[group] or count % size:
                end[group] = rows[group][math.ceil(count / size) - 1]
        self.ends[story[count]] = end
        # The manager counts a block for each of its ends, and drops ends that have too many.
        blocks = [block_id for end in self.ends.values() for block_id in end.values()]
        self.is_exact &= len(blocks) - blocks.count(GONE) <= self.manager.plan.num_blocks

    def _name(self, prompt: Prompt, group: int, column: int) -> None:
        """Notes the key of a block, and what events tell of it."""
        size, at = self.sizes[group], (prompt.story[(column + 1) * self.sizes[group]], group)
        if at not in self.names:
            cached = [n for n, ring in zip(self.sizes, self.rings, strict=True) if not ring]
            grain, end = math.gcd(*cached), (column + 1) * size
            salt, tokens = prompt.namespace[1], prompt.tokens[:end]
            keys = block_keys(tokens, grain, salt=salt, extra_keys=prompt.extra_keys)
            parent = keys[column * size // grain - 1] if column else None
            self.names[at] = "GPU", group, keys[-1]
            self.told[group, keys[-1]] = parent, tuple(tokens[-size:])

    def check_events(self, stored: set, told: Mapping[tuple[int, bytes], tuple]) -> None:
        """Checks the blocks that the events of a manager have told of."""
        if self.is_exact:
            kept = {self.names[at] for at, block_id in self.block_ids.items() if block_id > 0}
            assert stored == kept, f"stored {stored - kept}, removed {kept - stored}"
            for _, *at in kept:
                assert told[tuple(at)][:2] == self.told[tuple(at)], "an event tells wrong tokens"

    # --- looking up -----------------------------------------------------------------

    def find(self, prompt: Prompt, limit: int) -> tuple[int, tuple[str, ...]]:
        """Returns the tokens of the longest prefix, and by group why there is no longer one."""
        story, seen = prompt.story, 0
        while seen < len(prompt.codes) and story[seen + 1] in self.seen:
            seen += 1
        longest, reasons = self._longest(story, min(seen, limit), limit)
        namespaces = self.first_blocks.get(tuple(prompt.codes[: self.smallest]), ())
        others = [name for name in namespaces if name != prompt.namespace]
        if seen < self.smallest and others and "complete" not in reasons:
            now = [name for name in others if name[0] == self.epoch]
            reason = "other_keys" if now else "other_epoch"
            if any(name[2] == prompt.namespace[2] for name in now):
                reason = "other_salt"
            reasons = (reason,) * len(reasons)
        return longest, reasons

    def check(self, hit: PrefixHit, longest: int, reasons: tuple[str, ...]) -> None:
        """Checks a hit against what `find` has returned."""
        if self.is_least:
            assert hit.num_cached_tokens >= longest, f"a missed hit: {hit}, {longest}"
        if self.is_exact:
            assert hit.num_cached_tokens == longest, (hit, longest, reasons)
            # The manager forgets tokens without blocks, where there are many.
            num_blocks = self.manager.plan.num_blocks
            cached = [n for n, ring in zip(self.sizes, self.rings, strict=True) if not ring]
            most = 4 * num_blocks * min(cached, default=1)
            if len(self.seen) <= most and len(self.first_blocks) <= num_blocks:
                assert hit.reasons == reasons, (hit, reasons)

    def _longest(self, story: Sequence[int], seen: int, limit: int) -> tuple[int, tuple[str, ...]]:
        groups = range(len(self.growths))
        by_end = any(self.overwrites)
        each = zip(self.growths, self.sizes, strict=True)
        sizes = [g.group_size if g.stores == "ring" else size for g, size in each]
        grid = 1 if by_end else math.lcm(*sizes)
        places = [n for n in range(grid, seen + 1, grid) if not by_end or story[n] in self.ends]
        longest = max(
            (n for n in places if all(self._holds(g, n, story) for g in groups)), default=0
        )
        if longest + grid > limit:
            return longest, ("complete",) * len(self.growths)
        if longest + grid > seen:
            short = "shorter_than_a_block" if seen > longest else "never_seen"
            return longest, (short,) * len(self.growths)
        longer = [n for n in places if n > longest]
        return longest, tuple(self._reason(g, longer, story) for g in groups)

    def _holds(self, group: int, count: int, story: Sequence[int]) -> bool:
        return all(block_id > 0 for block_id in self._read(group, count, story))

    def _read(self, group: int, count: int, story: Sequence[int]) -> list[int]:
        """Returns the blocks that the token after ``count`` tokens reads; 0: none was kept."""
        size, growth = self.sizes[group], self.growths[group]
        if self.rings[group]:
            return []
        end = self.ends.get(story[count], {})
        partial = [end.get(group, 0)] if self.overwrites[group] or count % size else []
        if self.overwrites[group] or (growth.stores == "state" and partial):
            return partial
        last = count // size
        first = int(growth.first_visible(count)) // size if growth.stores == "tokens" else last - 1
        whole = [self.block_ids.get((story[(c + 1) * size], group), 0) for c in range(first, last)]
        return whole + partial

    def _reason(self, group: int, longer: Sequence[int], story: Sequence[int]) -> str:
        if any(self.overwrites):
            kept = [n for n in longer if GONE not in self.ends[story[n]].values()]
            if self.overwrites[group]:
                if kept:
                    return "other_groups"
                return "evicted" if longer else "no_checkpoint"
            longer = kept
            if not kept:
                return "other_groups"
        if any(self._holds(group, n, story) for n in longer):
            return "other_groups"
        if any(GONE in self._read(group, n, story) for n in longer):
            return "evicted"
        return "left_window" if self.growths[group].stores == "tokens" else "no_checkpoint"
