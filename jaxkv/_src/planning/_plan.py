"""The plan: blocks, the longest request, and the requests that run at once. No jax."""

import dataclasses
import functools
from typing import Literal, get_args

from jaxkv._src.internal.checks import check_choice, check_count, check_kind, check_positive
from jaxkv._src.internal.html import html_table
from jaxkv._src.internal.numbers import INT32_MAX, cdiv
from jaxkv._src.internal.text import describe_unused, readable
from jaxkv._src.planning._grouping import GroupingFigures
from jaxkv._src.planning._layout import Group, PoolLayout
from jaxkv._src.planning._longest import longest_model_len
from jaxkv._src.planning._text import (
    describe_choice,
    describe_difference,
    describe_groups,
    describe_zeroing,
)
from jaxkv._src.specs import Limits

ZeroPolicy = Literal["never", "when_needed", "always"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a cache: groups of layers, and a pool that holds one longest request at least.

    groups: groups of layers, over all workers.
    layouts: one per worker; they share group indices and block ids.
    num_blocks: blocks in every worker's pool, null block included.
    reserved_blocks: blocks that no request gets: the null block and attention sinks.
    max_model_len: longest request the pool admits, at most the model's own length.
    limits: the most that the scheduler asks of one step; admission depends on it.
    memory_bytes: the budget of each worker.
    context_parallel: ranks among which the tokens of a request are divided.
    zero_policy: groups whose fresh blocks are zeroed; see `plan_cache`.
    request_len: tokens of a usual request, if given.
    compared: the figures of the chosen grouping, then of the others, in requests of
      ``compared_len`` tokens; () if `plan_cache` compared none.
    warning: a choice that costs over half of the requests, and what to change; "" if none does.
    """

    groups: tuple[Group, ...]
    layouts: tuple[PoolLayout, ...]
    num_blocks: int
    reserved_blocks: int
    max_model_len: int
    limits: Limits
    memory_bytes: tuple[int, ...]
    context_parallel: int = 1
    zero_policy: ZeroPolicy = "when_needed"
    request_len: int | None = None
    compared: tuple[GroupingFigures, ...] = ()
    warning: str = ""

    def __post_init__(self) -> None:
        check_positive(max_model_len=self.max_model_len, context_parallel=self.context_parallel)
        check_choice(get_args(ZeroPolicy), zero_policy=self.zero_policy)
        check_kind(Limits, limits=self.limits)

    @property
    def layout(self) -> PoolLayout:
        """The layout of the only worker.

        Raises:
          ValueError: the plan has several workers.
        """
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

        They are the padding of its pages and the tensors in which it has no layer, summed over
        all workers.
        """
        total = sum(self.bytes_per_block)
        per_group = zip(*(layout.groups for layout in self.layouts), strict=True)
        return tuple(
            total - sum(spec.data_bytes for group in groups for spec in group.specs)
            for groups in per_group
        )

    @functools.cached_property
    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: whether its fresh blocks are zeroed before a layer reads them."""
        if self.zero_policy != "when_needed":
            return (self.zero_policy == "always",) * len(self.groups)
        flags = [layout.groups_to_zero() for layout in self.layouts]
        return tuple(any(per_worker) for per_worker in zip(*flags, strict=True))

    @property
    def compared_len(self) -> int:
        """Tokens of the requests that groupings are compared for: usual ones, else the longest."""
        return self.max_model_len if self.request_len is None else self.request_len

    def local_tokens(self, num_tokens: int) -> int:
        """Returns the tokens of a request that one context-parallel rank keeps."""
        check_count(num_tokens=num_tokens)
        return cdiv(num_tokens, self.context_parallel)

    def _max_blocks(self, num_tokens: int, in_flight_tokens: int) -> tuple[int, ...]:
        local, encoder = self.local_tokens(num_tokens), self.limits.max_encoder_tokens
        return tuple(g.growth.max_blocks(local, in_flight_tokens, encoder) for g in self.groups)

    def blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Returns, per group, the most blocks that one request of this length ever holds."""
        return self._max_blocks(num_tokens, self.limits.max_in_flight_tokens)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Logical blocks of the longest request in the block table, per group."""
        local, encoder = self.local_tokens(self.max_model_len), self.limits.max_encoder_tokens
        return tuple(group.growth.row_blocks(local, encoder) for group in self.groups)

    def admission_blocks(self, num_tokens: int) -> int:
        """Returns the blocks that admission charges: `blocks_per_group`, summed."""
        return sum(self.blocks_per_group(num_tokens))

    def steady_blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Returns, per group, the blocks of a request that decodes, one token in flight."""
        return self._max_blocks(num_tokens, 1)

    def steady_blocks(self, num_tokens: int) -> int:
        """Returns the blocks that a request of this length holds while it decodes."""
        return sum(self.steady_blocks_per_group(num_tokens))

    def admits(self, num_tokens: int) -> bool:
        """Returns whether a request of this length, alone, always gets its blocks."""
        check_count(num_tokens=num_tokens)
        return num_tokens <= self.max_model_len

    def requests_that_fit(self, num_tokens: int) -> int:
        """Returns the requests of this length that `jaxkv.Scheduler` runs at once, in any order.

        ``(usable - in_flight_share) // steady`` where the in-flight share, admission minus
        steady blocks, is counted once: prompts share the tokens of a step, and requests that
        sit a step out give back what left their windows (`BlockManager.trim`). A scheduler
        that lets every prompt keep its share until it decodes runs ``usable // admission``.
        """
        check_positive(num_tokens=num_tokens)
        if num_tokens > self.max_model_len:
            return 0
        others = self.usable_blocks - self.admission_blocks(num_tokens)  # beside the first one
        return max(0, 1 + others // self.steady_blocks(num_tokens))

    def tokens_that_fit(self, num_tokens: int) -> int:
        """Returns the tokens that run at once in requests of this length and one shorter one.

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
        return longest_model_len(
            self.groups, usable_blocks, max_model_len, self.limits, context_parallel=ranks
        )

    def __repr__(self) -> str:
        block = max(self.bytes_per_block, default=0)
        return (
            f"Plan({len(self.groups)} groups, {self.num_blocks:,} blocks of {block:,} bytes, "
            f"requests up to {self.max_model_len:,} tokens)"
        )

    def __str__(self) -> str:
        length = self.max_model_len
        need, steady = self.admission_blocks(length), self.steady_blocks(length)
        fit, given = self.requests_that_fit(length), sum(self.memory_bytes)
        used = self.num_blocks * sum(self.bytes_per_block)
        tensors = max(len(layout.tensors) for layout in self.layouts)
        rows = {
            "layers": f"{sum(len(group.layers) for group in self.groups)} with a cache",
            "groups": describe_groups(self.groups),
            "block": f"{max(self.bytes_per_block):,} bytes in {tensors} "
            f"tensor{'s' * (tensors != 1)}, {describe_unused(self.unused_bytes_per_block)}",
            "memory": f"{given:,} bytes ({readable(given)}) given, "
            f"{describe_difference(given - used)}",
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
            "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode; "
            f"{self.tokens_that_fit(length):,} tokens in all",
            "zero new blocks": describe_zeroing(self.zero_policy, self.groups_to_zero),
        }
        return "\n".join(f"{name:<16} {text}" for name, text in (rows | self._more_rows()).items())

    def _repr_html_(self) -> str:
        length, block = self.max_model_len, sum(self.bytes_per_block)
        charged, steady = self.admission_blocks(length), self.steady_blocks(length)
        workers = {"workers": f"{len(self.layouts)}; bytes are of all together"}
        rows = {
            "groups": describe_groups(self.groups),
            "block": f"{block:,} bytes, {describe_unused(self.unused_bytes_per_block)}",
            "memory": readable(sum(self.memory_bytes)),
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "admission charges": f"{charged:,} blocks, {readable(charged * block)}",
            "while it decodes": f"{steady:,} blocks, {readable(steady * block)}",
            "run at once": f"{self.requests_that_fit(length):,} requests",
            "tokens in all": f"{self.tokens_that_fit(length):,}",
            "zero new blocks": describe_zeroing(self.zero_policy, self.groups_to_zero),
        }
        rows = (workers if len(self.layouts) > 1 else {}) | rows | self._more_rows()
        return html_table(rows.items(), caption=f"Plan for requests up to {length:,} tokens")

    def _more_rows(self) -> dict[str, str]:
        """Returns rows for usual requests, for groupings and for a warning, where there are any."""
        rows: dict[str, str] = {}
        if self.request_len is not None:
            fit = self.requests_that_fit(self.request_len)
            steady = self.steady_blocks(self.request_len)
            rows["usual requests"] = (
                f"{self.request_len:,} tokens: {fit:,} run at once, {steady:,} blocks each once "
                "they decode"
            )
        if self.compared:
            rows["grouping"] = describe_choice(self.compared, self.compared_len)
        return rows | ({"warning": self.warning} if self.warning else {})


def check_rows(plan: Plan, max_requests: int) -> None:
    """Raises TypeError or ValueError unless a plan can have tables of this many rows."""
    check_kind(Plan, "what plan_cache returned", plan=plan)
    check_positive(max_requests=max_requests)
    most = INT32_MAX // (sum(plan.row_blocks) + len(plan.groups) or 1)
    if max_requests > most:
        raise ValueError(
            f"max_requests={max_requests:,} rows have more cells than int32 counts; set it to at "
            f"most {most:,}, the requests that run at the same time"
        )


def stores_encoder_tokens(plan: Plan) -> bool:
    """Returns whether layers of a plan attend to an encoder's tokens."""
    return any(group.growth.stores == "encoder" for group in plan.groups)


def checked_encoder_tokens(plan: Plan, encoder_tokens: int | None) -> int:
    """Returns the encoder tokens of a request; raises TypeError or ValueError for a wrong number.

    None means none, and is refused by a plan that stores encoder tokens.
    """
    if encoder_tokens is None:
        if stores_encoder_tokens(plan):
            raise ValueError(
                "encoder_tokens is missing, and the plan has cross attention: pass the number of "
                "the request's encoder tokens; 0 if it has none, for which cross attention "
                "returns zeros"
            )
        return 0
    check_count(encoder_tokens=encoder_tokens)
    if encoder_tokens > plan.limits.max_encoder_tokens:
        raise ValueError(
            f"encoder_tokens={encoder_tokens} is more than the plan admits: "
            f"limits.max_encoder_tokens={plan.limits.max_encoder_tokens}"
        )
    return encoder_tokens


def pool_bytes(plan: Plan) -> tuple[int, ...]:
    """Returns the bytes of the pool on each worker: its blocks times the bytes of one.

    The null block counts as any other. These are the bytes that `jaxkv.make_cache` allocates for
    keys, values and states (``cache.num_bytes``); the block tables come on top.
    """
    check_kind(Plan, "what plan_cache returned", plan=plan)
    return tuple(plan.num_blocks * block for block in plan.bytes_per_block)
