"""The plan: blocks, the longest request, and the requests that run at once. No jax."""

import dataclasses
import functools
from typing import Literal, get_args

from jaxkv._internal.checks import check_choice, check_count, check_positive
from jaxkv._internal.html import html_table
from jaxkv._internal.numbers import cdiv
from jaxkv._internal.text import describe_unused, readable
from jaxkv.planning._layout import Group, PoolLayout
from jaxkv.planning._longest import longest_admitted
from jaxkv.planning._text import (
    GroupingFigures,
    describe_choice,
    describe_groups,
    describe_zeroing,
    difference,
)
from jaxkv.specs import Limits

ZeroPolicy = Literal["never", "when_needed", "always"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A pool that is known to hold a request of ``max_model_len`` tokens.

    groups: over the layers of all workers.
    layouts: one per worker; they share group indices and block ids.
    num_blocks: blocks in every worker's pool, null block included.
    reserved_blocks: blocks that no request gets: the null block and attention sinks.
    max_model_len: longest request the pool admits, at most the model's own length.
    limits: the most that the scheduler asks of one step; admission depends on it.
    memory_bytes: the budget of each worker.
    context_parallel: ranks among which the tokens of a request are divided.
    zero_policy: groups whose fresh blocks are zeroed; see `plan_cache`.
    request_len: tokens of a usual request; None: nobody said.
    compared: what the chosen grouping buys, and then what others would; () if `plan_cache`
      compared none. All are counted in requests of ``compared_len`` tokens.
    warning: what costs most of the requests, and what to change; "": nothing does.
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
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits must be a Limits, got {self.limits!r}")

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

        They are the padding of its pages, and tensors in which it has no layer, over all
        workers together.
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

    def local_tokens(self, num_tokens: int) -> int:
        """Returns the tokens of a request that one context-parallel rank keeps."""
        return cdiv(num_tokens, self.context_parallel)

    def _max_blocks(self, num_tokens: int, in_flight_tokens: int) -> tuple[int, ...]:
        local, encoder = self.local_tokens(num_tokens), self.limits.max_encoder_tokens
        return tuple(g.growth.max_blocks(local, in_flight_tokens, encoder) for g in self.groups)

    def blocks_per_group(self, num_tokens: int) -> tuple[int, ...]:
        """Returns, per group, the most blocks that one request of this length ever holds."""
        return self._max_blocks(num_tokens, self.limits.max_in_flight_tokens)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Columns of a block-table row of the longest request, per group."""
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
        steady = self.steady_blocks(num_tokens)
        share = self.admission_blocks(num_tokens) - steady
        return max(0, self.usable_blocks - share) // max(steady, 1)

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
        return longest_admitted(
            self.groups, usable_blocks, max_model_len, self.limits, context_parallel=ranks
        )

    def __repr__(self) -> str:
        block = max(self.bytes_per_block, default=0)
        return (
            f"Plan({len(self.groups)} groups, {self.num_blocks:,} blocks of {block:,} bytes, "
            f"requests up to {self.max_model_len:,} tokens)"
        )

    @property
    def compared_len(self) -> int:
        """Tokens of the requests by which groupings are compared: usual ones, else the longest."""
        return self.max_model_len if self.request_len is None else self.request_len

    def _repr_html_(self) -> str:
        """The plan as a table, for Jupyter."""
        length, block = self.max_model_len, sum(self.bytes_per_block)
        charged, steady = self.admission_blocks(length), self.steady_blocks(length)
        rows = {
            "groups": describe_groups(self.groups),
            "block": f"{block:,} bytes, {describe_unused(self.unused_bytes_per_block)}",
            "memory": readable(sum(self.memory_bytes)),
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "admission charges": f"{charged:,} blocks, {readable(charged * block)}",
            "held while it decodes": f"{steady:,} blocks, {readable(steady * block)}",
            "run at once": f"{self.requests_that_fit(length):,} requests",
            "tokens in all": f"{self.tokens_that_fit(length):,}",
            "zero new blocks": describe_zeroing(self.zero_policy, self.groups_to_zero),
        }
        if len(self.layouts) > 1:
            workers = f"{len(self.layouts)}; bytes are of all together"
            rows = {"workers": workers, **rows}
        rows |= self._more_rows()
        return html_table(rows.items(), caption=f"Plan for requests up to {length:,} tokens")

    def __str__(self) -> str:
        """The plan in eight lines, and a line on each of: usual requests, groupings, a warning."""
        length = self.max_model_len
        need, steady = self.admission_blocks(length), self.steady_blocks(length)
        fit, given = self.requests_that_fit(length), sum(self.memory_bytes)
        used = sum(self.num_blocks * size for size in self.bytes_per_block)
        tensors = max(len(layout.tensors) for layout in self.layouts)
        rows = {
            "layers": f"{sum(len(group.layers) for group in self.groups)} with a cache",
            "groups": describe_groups(self.groups),
            "block": f"{max(self.bytes_per_block):,} bytes in {tensors} "
            f"tensor{'s' * (tensors != 1)}, {describe_unused(self.unused_bytes_per_block)}",
            "memory": f"{given:,} bytes ({readable(given)}) given, {difference(given - used)}",
            "blocks": f"{self.num_blocks:,} of which {self.usable_blocks:,} usable",
            "longest request": f"{length:,} tokens: admission charges {need:,} blocks",
            "such requests": f"{fit:,} run at once, {steady:,} blocks each once they decode; "
            f"{self.tokens_that_fit(length):,} tokens in all",
            "zero new blocks": describe_zeroing(self.zero_policy, self.groups_to_zero),
        }
        rows |= self._more_rows()
        return "\n".join(f"{name:<16} {text}" for name, text in rows.items())

    def _more_rows(self) -> dict[str, str]:
        rows: dict[str, str] = {}
        if self.request_len is not None:
            fit, steady = (
                f(self.request_len) for f in (self.requests_that_fit, self.steady_blocks)
            )
            rows["usual requests"] = (
                f"{self.request_len:,} tokens: {fit:,} run at once, {steady:,} blocks each once "
                "they decode"
            )
        if self.compared:
            rows["grouping"] = describe_choice(self.compared, self.compared_len)
        return rows | ({"warning": self.warning} if self.warning else {})
