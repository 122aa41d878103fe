"""Checks of a cache under test: who holds which block, and what requests read."""

from collections.abc import Sequence

import numpy as np

from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.specs import Growth
from jaxkv._src.testing._cache_under_test import CacheUnderTest
from jaxkv._src.testing._extra import extra
from jaxkv._src.testing._texts import Texts
from jaxkv._src.testing.reference_cache import ReferenceCache

with extra():
    from hypothesis.stateful import invariant


class CheckedCache(CacheUnderTest):
    """The checks of `jaxkv.testing.CacheStateMachine`, and what it knows about its requests.

    computed: tokens in the cache, of every running request.
    reference: what requests wrote.
    texts: token ids of requests.
    """

    computed: dict[int, int]
    reference: ReferenceCache
    texts: Texts

    def _begin_checks(self) -> None:
        """Notes the empty cache, and checks it."""
        self._usable_blocks = self.num_free_blocks()
        self._null_block = [np.array(part) for part in self.read_null_block()]
        if not sum(part.size for part in self._null_block) and self.plan.layout.tensors:
            raise ValueError("read_null_block gave no bytes; wanted those of block 0")
        if not self.plan.usable_blocks <= self._usable_blocks < self.plan.num_blocks:
            raise AssertionError(
                f"{self._usable_blocks} blocks are free at the start; the plan counts on "
                f"{self.plan.usable_blocks} and has {self.plan.num_blocks} with the null block"
            )

    @invariant()
    def blocks_are_free_or_held_once(self) -> None:
        holders: dict[int, tuple[int, int, int]] = {}  # block -> request, group, logical block
        for request in self.computed:
            for group, ids in enumerate(self._rows(request)):
                for logical_block, block_id in enumerate(ids):
                    if block_id != NULL_BLOCK:
                        self._check_holder(block_id, (request, group, logical_block), holders)
        free = self.num_free_blocks()
        if free + len(holders) != self._usable_blocks:
            raise AssertionError(
                f"{free} blocks are free and {len(holders)} allocated, of {self._usable_blocks}: "
                + ("some leaked" if free + len(holders) < self._usable_blocks else "freed twice")
            )

    @invariant()
    def requests_read_what_they_wrote(self) -> None:
        for request, computed in self.computed.items():
            if computed:
                self._check_content(request, self._check_held(request, computed, computed))
        for before, after in zip(self._null_block, self.read_null_block(), strict=True):
            if not np.array_equal(_raw(before), _raw(after)):
                raise AssertionError("the null block was written; drop what goes to block 0")

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
                f"block {block_id} belongs to {_name(other)} and to {_name(holder)}; two may share "
                "what a fork shares until one of them writes into it, and what equal prompts wrote"
            )

    def _check_held(self, request: int, computed: int, total: int) -> Sequence[Sequence[int]]:
        """Checks that a request holds the blocks to compute its tokens up to ``total``.

        Returns:
          Their logical blocks, per group.
        """
        rows = self._rows(request)
        growths = [group.growth for group in self.plan.groups]
        live = [needed_blocks(growth, computed, total) for growth in growths]
        if request in self.texts.running:  # of a shared prefix, a request holds no earlier states
            firsts = [_first_held(growth, computed) for growth in growths]
            live = [[i for i in of if i >= at] for at, of in zip(firsts, live, strict=True)]
        for group, (ids, needed) in enumerate(zip(rows, live, strict=True)):
            missing = [i for i in needed if i >= len(ids) or ids[i] == NULL_BLOCK]
            if missing:
                raise AssertionError(
                    f"{_name((request, group, missing[0]))} holds no block, and computing "
                    f"tokens {computed} to {total} needs one"
                )
        return live

    def _check_content(self, request: int, live: Sequence[Sequence[int]]) -> None:
        """Checks what a request reads from its live logical blocks, given per group."""
        for layer, place in self.reference.layers.items():
            pages = np.asarray(self.read_pages(request, layer))
            wanted = max(live[place.group], default=-1) + 1, place.spec.data_bytes
            fits = pages.ndim == 2 and len(pages) >= wanted[0] and pages.shape[1] == wanted[1]
            if pages.dtype != np.uint8 or not fits:
                raise ValueError(
                    f"read_pages gave {pages.dtype}{list(pages.shape)} for layer {layer!r}; "
                    f"wanted uint8{list(wanted)}, or more logical blocks"
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


def needed_blocks(growth: Growth, computed: int, total: int) -> Sequence[int]:
    """Returns the logical blocks that a request needs for its tokens up to ``total``.

    At rest that is the state to resume from, without blocks for drafts, and a ring only within a
    group of tokens.
    """
    if growth.stores == "ring" and total == computed:
        return range(1 if computed % growth.group_size else 0)
    if growth.stores != "state" or total > computed:
        return growth.live_blocks(computed, total)
    source = int(growth.live_range(computed, total).source)
    return range(source, source + 1) if computed else ()


def _first_held(growth: Growth, computed: int) -> int:
    """Returns the first logical block that a request holds after a prefix that it found."""
    is_state = growth.stores == "state" and computed > 0
    return int(growth.live_range(computed, computed + 1).source) if is_state else 0


def _name(holder: tuple[int, int, int]) -> str:
    return "request {} (group {}, logical block {})".format(*holder)


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)
