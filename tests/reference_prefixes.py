"""A reference for prefix caching, written from the definition.

`Content` models the device: it applies uploads, and records for every place of every block the
tokens that its content was computed from. `ReferencePrefixes` is a dictionary of all prefixes that
were kept. Both are written to be obviously right, not fast.
"""

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np

from jaxkv._src.blocks import BlockManager, PrefixHit
from jaxkv._src.specs import Growth
from jaxkv._src.uploads import Upload

GONE = -1  # in place of the id of a block that was kept and then evicted


class Story:
    """Numbers for prefixes of sequences: two have the same number only if they are equal."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, before: Hashable, token: Hashable) -> int:
        return self._numbers.setdefault((before, token), len(self._numbers) + 1)

    def of(self, namespace: Hashable, codes: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of the first 0, 1, ... tokens."""
        start = self.number("namespace", namespace)
        return list(itertools.accumulate(codes, self.number, initial=start))


class Content:
    """A model of the device: block tables, and the origin of the content of every block."""

    def __init__(self, manager: BlockManager):
        plan = manager.plan
        self.growths: list[Growth] = [group.growth for group in plan.groups]
        self.context_parallel = plan.context_parallel
        self.rows = [np.zeros((manager.max_requests, width), np.int64) for width in plan.row_blocks]
        self.blocks: dict[int, dict[int, int]] = {}  # block -> place in it -> number of a story

    def apply(self, upload: Upload) -> None:
        """Applies the changes of an upload, in the order of `apply_step`."""
        parts = upload.parts()
        at = 0
        for group, end in enumerate(parts["entry_ends"].tolist()):
            for i in range(at, end):
                row, column = parts["entry_rows"][i], parts["entry_columns"][i]
                self.rows[group][row, column] = parts["entry_ids"][i]
            at = end
        sources, destinations = parts["copy_sources"].tolist(), parts["copy_destinations"].tolist()
        copied = [dict(self.blocks.get(source, {})) for source in sources]
        self.blocks.update(zip(destinations, copied, strict=True))
        for block_id in parts["zero_ids"].tolist():
            self.blocks[block_id] = {}

    def compute(self, row: int, story: Sequence[int], before: int, total: int) -> None:
        """Checks the content that a request's next tokens read, and writes their own."""
        for group, growth in enumerate(self.growths):
            blocks = self.rows[group][row]
            if growth.stores == "state":
                self._compute_state(growth, blocks, story, before, total)
            else:
                self._compute_tokens(growth, blocks, story, before, total)

    def _compute_tokens(self, growth, blocks, story, before: int, total: int) -> None:
        size = growth.block_size * self.context_parallel
        for position in range(int(growth.first_visible(before)), before):
            found = self.blocks[int(blocks[position // size])].get(position % size)
            assert found == story[position + 1], (
                f"position {position} holds another sequence's token"
            )
        for position in range(before, total):
            block = self.blocks.setdefault(int(blocks[position // size]), {})
            block[position % size] = story[position + 1]

    def _compute_state(self, growth, blocks, story, before: int, total: int) -> None:
        size = growth.block_size
        if before:
            column = 0 if growth.cache_mode == "none" else math.ceil(before / size) - 1
            found = self.blocks[int(blocks[column])].get(0)
            assert found == story[before], f"the state after {before} tokens is another sequence's"
        ends = {total}
        if growth.cache_mode == "all":
            ends |= set(range((before // size + 1) * size, total, size))
        for end in sorted(ends):
            column = 0 if growth.cache_mode == "none" else math.ceil(end / size) - 1
            assert blocks[column] > 0
            self.blocks[int(blocks[column])] = {0: story[end]}


class ReferencePrefixes:
    """The prefixes that can be shared, and why longer ones cannot."""

    def __init__(self, manager: BlockManager):
        self.manager, self.story = manager, Story()
        self.growths = [group.growth for group in manager.plan.groups]
        self.sizes = [g.block_size * manager.plan.context_parallel for g in self.growths]
        self.smallest = min(
            2**31 - 1 if g.stores == "state" and g.cache_mode == "none" else size
            for g, size in zip(self.growths, self.sizes, strict=True)
        )
        self.overwrites = [g.stores == "state" and g.cache_mode != "all" for g in self.growths]
        self.columns: dict[tuple[int, int], int] = {}  # (story at a block's end, group) -> block
        self.ends: dict[int, dict[int, int]] = {}  # story -> group -> block of a checkpoint
        self.seen: set[int] = set()
        self.first_blocks: dict[tuple, list[tuple]] = {}
        self.epoch = 0
        evict = manager.block_pool.on_evict

        def on_evict(ids: np.ndarray) -> np.ndarray:
            self._evicted(set(ids.tolist()))
            return evict(ids)

        manager.block_pool.on_evict = on_evict

    def _evicted(self, ids: set[int]) -> None:
        for key, block_id in self.columns.items():
            if block_id in ids:
                self.columns[key] = GONE
        for end in self.ends.values():
            if ids & set(end.values()):
                end.update(dict.fromkeys(end, GONE))

    def clear(self, *, forget: bool) -> None:
        self.columns, self.ends, self.seen = {}, {}, set()
        self.epoch += 1
        if forget:
            self.first_blocks = {}

    def keep(self, request: Hashable, known: dict, codes, count: int, *, is_end: bool) -> None:
        """Keeps the computed blocks of a request's known tokens that are not kept yet.

        Args:
          known: "namespace" and "story" of the request, and "kept", its number of kept tokens.
        """
        namespace, story = known["namespace"], known["story"]
        if namespace[0] != self.epoch:
            return
        rows = self.manager.block_ids(request)
        whole = [
            count // size * size
            for size, over in zip(self.sizes, self.overwrites, strict=True)
            if not over
        ]
        reach = count if is_end and any(self.overwrites) else max(whole, default=0)
        if not reach or (reach <= known["kept"] and reach < count):
            return
        before, known["kept"] = known["kept"], max(known["kept"], reach)
        self.seen |= set(story[1 : reach + 1])
        if len(codes) >= self.smallest:
            known = self.first_blocks.setdefault(tuple(codes[: self.smallest]), [])
            known.append(namespace)
        for group, size in enumerate(self.sizes):
            if self.overwrites[group]:
                continue
            for column in range(before // size, reach // size):
                key = story[(column + 1) * size], group
                held = rows[group][column] if column < len(rows[group]) else 0
                if held and self.columns.get(key, 0) <= 0:
                    self.columns[key] = held
        if is_end and any(self.overwrites):
            self._keep_end(rows, story, count)

    def _keep_end(self, rows, story, count: int) -> None:
        known = self.ends.get(story[count])
        if known is not None and GONE not in known.values():
            return
        end: dict[int, int] = {}
        for group, size in enumerate(self.sizes):
            if self.growths[group].cache_mode == "none" and self.overwrites[group]:
                end[group] = rows[group][0]
            elif self.overwrites[group] or count % size:
                end[group] = rows[group][math.ceil(count / size) - 1]
        self.ends[story[count]] = end

    # --- looking up ---------------------------------------------------------------

    def check(self, hit: PrefixHit, namespace, codes, story, limit: int) -> None:
        """Raises AssertionError unless a hit is the longest and its reasons are right."""
        seen = 0
        while seen < len(codes) and story[seen + 1] in self.seen:
            seen += 1
        longest, reasons = self._longest(story, min(seen, limit), limit)
        others = [
            n for n in self.first_blocks.get(tuple(codes[: self.smallest]), []) if n != namespace
        ]
        if seen < self.smallest and others and "complete" not in reasons:
            now = [n for n in others if n[0] == namespace[0]]
            reason = "other_keys" if now else "other_epoch"
            reason = "other_salt" if any(n[2] == namespace[2] for n in now) else reason
            reasons = (reason,) * len(reasons)
        assert hit.num_cached_tokens == longest, (hit, longest, reasons)
        assert hit.reasons == reasons, (hit, reasons)

    def _longest(self, story, seen: int, limit: int) -> tuple[int, tuple[str, ...]]:
        groups = range(len(self.growths))
        by_end = any(self.overwrites)
        grid = 1 if by_end else math.lcm(*self.sizes)
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

    def _holds(self, group: int, count: int, story) -> bool:
        return all(block_id > 0 for block_id in self._read(group, count, story))

    def _read(self, group: int, count: int, story) -> list[int]:
        """Returns the blocks that the token after ``count`` tokens reads; 0: none was kept."""
        size, growth = self.sizes[group], self.growths[group]
        end = self.ends.get(story[count], {})
        partial = [end.get(group, 0)] if self.overwrites[group] or count % size else []
        if self.overwrites[group] or (growth.stores == "state" and partial):
            return partial
        last = count // size
        first = int(growth.first_visible(count)) // size if growth.stores == "tokens" else last - 1
        whole = [self.columns.get((story[(c + 1) * size], group), 0) for c in range(first, last)]
        return whole + partial

    def _reason(self, group: int, longer: Sequence[int], story) -> str:
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
