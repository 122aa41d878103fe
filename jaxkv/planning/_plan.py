"""A plan: blocks, the longest request, and what runs at once."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jaxkv.checks import check_count, check_positive
from jaxkv.groups import Group, PoolLayout
from jaxkv.planning._text import (
    describe_groups,
    describe_unused,
    describe_zeroing,
    difference,
    plan_html,
    readable,
)
from jaxkv.specs import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec

NULL_BLOCKS = 1  # block 0

MAX_SLOTS = 2**31 - 1  # slot ids are int32

WorkerLayers = Mapping[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]


class KVCacheCapacityError(ValueError):
    """The pool cannot hold one request of the length asked for.

    needed_blocks: what such a request needs at most.
    usable_blocks: what the pool has, without the null block.
    longest_len: the longest request that fits; 0 when none does.
    plan: what was refused; its groups and figures hold, only the length does not fit.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_blocks: int,
        usable_blocks: int,
        longest_len: int,
        plan: "Plan",
    ):
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.usable_blocks = usable_blocks
        self.longest_len = longest_len
        self.plan = plan

    def __reduce__(self):  # from one process of a serving stack to another
        return functools.partial(type(self), **vars(self)), self.args


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A pool that is known to hold a request of ``max_model_len`` tokens.

    groups: over the layers of all workers.
    layouts: one per worker; they share group indices and block ids.
    num_blocks: blocks in every worker's pool, null block included.
    reserved_blocks: blocks that no request gets: the null block, attention sinks, and
      what the caller keeps back for copies on write.
    max_model_len: longest request the pool admits, at most the model's own length.
    limits: what the scheduler promised; the admission figure depends on it.
    memory_bytes: the budget of each worker.
    context_parallel: ranks among which the tokens of a request are divided.
    """

    groups: tuple[Group, ...]
    layouts: tuple[PoolLayout, ...]
    num_blocks: int
    reserved_blocks: int
    max_model_len: int
    limits: Limits
    memory_bytes: tuple[int, ...]
    context_parallel: int = 1

    @property
    def layout(self) -> PoolLayout:
        """The layout of the only worker."""
        if len(self.layouts) != 1:
            raise ValueError(f"this plan has {len(self.layouts)} workers; use plan.layouts[i]")
        return self.layouts[0]

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can get."""
        return max(0, self.num_blocks - self.reserved_blocks)

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Pool bytes that one block takes, on each worker."""
        return tuple(layout.bytes_per_block for layout in self.layouts)

    @property
    def unused_bytes_per_block(self) -> tuple[int, ...]:
        """Per group: bytes of a block that carry no data while the group owns it.

        Over all workers: padding of its pages, and slots in which it has no layer.
        """
        total = sum(self.bytes_per_block)
        per_group = zip(*(layout.groups for layout in self.layouts), strict=True)
        return tuple(
            total - sum(spec.data_bytes for group in groups for spec in group.specs)
            for groups in per_group
        )

    @property
    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: must its fresh blocks be zeroed, on any worker?"""
        flags = [layout.groups_to_zero() for layout in self.layouts]
        return tuple(any(per_worker) for per_worker in zip(*flags, strict=True))

    def local_tokens(self, num_tokens: int) -> int:
        """Tokens of a request that one context-parallel rank keeps: ``ceil(L / ranks)``."""
        return -(-num_tokens // self.context_parallel)

    def blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Most blocks of each group that one request of this length ever holds."""
        local = self.local_tokens(num_tokens)
        return tuple(group.spec.max_blocks(local, self.limits) for group in self.groups)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Per group, entries that a table row of the longest request needs."""
        local = self.local_tokens(self.max_model_len)
        return tuple(group.spec.row_blocks(local, self.limits) for group in self.groups)

    def admission_blocks(self, num_tokens: int) -> int:
        """What admission charges: ``sum_g max_blocks_g(L)`` with a full step in flight."""
        return sum(self.blocks_per_group(num_tokens))

    def steady_blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks of each group that a request of this length holds while it decodes, with one
        token in flight."""
        limits = dataclasses.replace(self.limits, max_in_flight_tokens=1)
        local = self.local_tokens(num_tokens)
        return tuple(group.spec.max_blocks(local, limits) for group in self.groups)

    def steady_blocks(self, num_tokens: int) -> int:
        """What a request of this length holds while it decodes, in all groups."""
        return sum(self.steady_blocks_per_group(num_tokens))

    def admits(self, num_tokens: int) -> bool:
        """Can a request of this length, alone, always get its blocks?"""
        check_count(num_tokens=num_tokens)
        return num_tokens <= self.max_model_len

    def requests_that_fit(self, num_tokens: int) -> int:
        """Requests of this length that run at once, one prefilling and the rest decoding.

        ``(usable - in_flight_share) // steady`` where the in-flight share, admission
        minus steady blocks, is counted once. Several that prefill side by side may each
        straddle a block more; then one is preempted, and waits.
        """
        check_positive(num_tokens=num_tokens)
        if num_tokens > self.max_model_len:
            return 0
        steady = self.steady_blocks(num_tokens)
        share = self.admission_blocks(num_tokens) - steady
        return max(0, self.usable_blocks - share) // max(steady, 1)

    def tokens_that_fit(self, num_tokens: int) -> int:
        """Tokens that run at once in requests of this length and one shorter one.

        ``R * L + r`` where R = `requests_that_fit` and r is the longest request, below L,
        whose admission need the blocks left over can hold.
        """
        count = self.requests_that_fit(num_tokens)
        if not count:
            return 0
        left = self.usable_blocks - count * self.steady_blocks(num_tokens)
        return count * num_tokens + self._longest(left, num_tokens - 1)

    def _longest(self, usable_blocks: int, max_model_len: int) -> int:
        ranks = self.context_parallel
        return longest_admitted(
            self.groups, usable_blocks, max_model_len, self.limits, context_parallel=ranks
        )

    def __repr__(self) -> str:
        block = max(self.bytes_per_block, default=0)
        return (
            f"Plan({len(self.groups)} groups, {self.num_blocks:,} blocks of {block:,} bytes, "
            f"requests up to {self.max_model_len:,} tokens)"
        )

    def _repr_html_(self) -> str:
        """What `print` shows, with the three figures of the longest request in rows of their
        own: what admission charges, what it holds while it decodes, how many fit."""
        return plan_html(self)

    def __str__(self) -> str:
        """The plan in eight lines."""
        length = self.max_model_len
        need, steady = self.admission_blocks(length), self.steady_blocks(length)
        fit, given = self.requests_that_fit(length), sum(self.memory_bytes)
        used = sum(self.num_blocks * size for size in self.bytes_per_block)
        slots = max(len(layout.slots) for layout in self.layouts)
        rows = {
            "layers": f"{sum(len(group.layers) for group in self.groups)} with a cache",
            "groups": describe_groups(self.groups),
            "block": f"{max(self.bytes_per_block):,} bytes in {slots} slot{'s' * (slots != 1)}, "
            f"{describe_unused(self.unused_bytes_per_block)}",
            "memory": f"{given:,} bytes ({readable(given)}) given, {difference(given - used)}",
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
            "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode; "
            f"{self.tokens_that_fit(length):,} tokens in all",
            "zero new blocks": describe_zeroing(self.groups_to_zero),
        }
        return "\n".join(f"{name:<16} {text}" for name, text in rows.items())


def needed_blocks(groups: Sequence[Group], num_tokens: int, limits: Limits) -> int:
    return sum(group.spec.max_blocks(num_tokens, limits) for group in groups)


def longest_admitted(
    groups: Sequence[Group],
    usable_blocks: int,
    max_model_len: int,
    limits: Limits,
    *,
    context_parallel: int = 1,
) -> int:
    """Largest length in ``[0, max_model_len]`` whose need is at most ``usable_blocks``.

    Exact: the need of every group never falls as the length grows, so bisection finds
    the last length that fits. 0 when not even one token does.
    """
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if needed_blocks(groups, -(-middle // context_parallel), limits) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low
