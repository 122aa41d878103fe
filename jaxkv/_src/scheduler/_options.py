"""`Options`, the arguments of `Scheduler`. No jax."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.internal.checks import check_choice, check_count, check_flag, check_positive
from jaxkv._src.internal.numbers import INT32_MAX

Order = Literal["decode_first", "prefill_first"]
type Tokens[Name: Hashable] = Mapping[Name, Sequence[int] | np.ndarray]
# Of requests that start in one step: samples of long prompts, or prompts that begin alike. Without
# room for many, few start at a time; with it, a step of 256 requests takes 5 us more on an H100.
CACHED_TOKENS = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The arguments of `Scheduler`, checked."""

    manager: BlockManager
    max_tokens: int
    batch_size: int
    order: Order
    preemption: bool
    forks: int
    tokens: Tokens[Any] | None
    most_cached_tokens: int | None
    chunk_tokens: int | None
    lookahead_steps: int

    def __post_init__(self) -> None:
        check_positive(max_tokens=self.max_tokens, batch_size=self.batch_size)
        check_flag(preemption=self.preemption)
        if self.batch_size > self.manager.max_requests:
            raise ValueError(
                f"batch_size={self.batch_size} is more than max_requests="
                f"{self.manager.max_requests} of the manager; a request is in a batch once"
            )
        check_positive(chunk_tokens=1 if self.chunk_tokens is None else self.chunk_tokens)
        most_cached = 0 if self.most_cached_tokens is None else self.most_cached_tokens
        check_count(
            forks=self.forks, lookahead_steps=self.lookahead_steps, cached_tokens=most_cached
        )
        check_choice(get_args(Order), order=self.order)
        if self.tokens is not None and not isinstance(self.tokens, Mapping):
            kind = type(self.tokens).__name__
            raise TypeError(f"tokens must map requests to token ids, got {kind}")
        if self.manager.requests:
            raise ValueError(
                f"manager runs {len(self.manager.requests)} requests; pass a new manager"
            )

    @functools.cached_property
    def cached_tokens(self) -> int:
        """Tokens of requests that start, fork or come from elsewhere, in one step."""
        if self.most_cached_tokens is not None:
            return self.most_cached_tokens
        if not (self.shares or self.forks or self.swaps):
            return 0
        longest = self.manager.plan.max_model_len
        return min(self.manager.max_requests * longest, max(longest, CACHED_TOKENS))

    @functools.cached_property
    def has_states(self) -> bool:
        """Whether a group overwrites its states.

        A request that starts with a prefix then copies the state at its end.
        """
        growths = [group.growth for group in self.manager.plan.groups]
        return any(g.stores == "state" and g.cache_mode != "all" for g in growths)

    @functools.cached_property
    def has_windows(self) -> bool:
        """Whether a group gives back blocks that no later token reads."""
        kinds = {group.growth.kind for group in self.manager.plan.groups}
        return not kinds.isdisjoint(("sliding", "chunked"))

    @functools.cached_property
    def forks_late(self) -> bool:
        """Whether samples fork from one of the same prompt that has computed more tokens.

        It still has all that they read then: no window has left them, and no newer state or
        compressed row has taken their place.
        """
        groups = self.manager.plan.groups
        specs = [spec for group in groups for spec in group.specs]
        keeps_all = all(group.growth.keeps_all_tokens for group in groups)
        has_rows = all(getattr(spec, "compress_ratio", 1) == 1 for spec in specs)
        return self.forks > 0 and keeps_all and has_rows

    @property
    def most_drafts(self) -> int:
        """Drafts after which "align" states may lie in another block; a prompt is longer."""
        growths = [group.growth for group in self.manager.plan.groups]
        aligned = [g for g in growths if g.cache_mode == "align" and g.has_drafts]
        return min([growth.speculative_blocks for growth in aligned], default=INT32_MAX)

    @property
    def swaps(self) -> bool:
        """Whether preempted requests are swapped out, because there is host memory."""
        return self.manager.offload_stats() is not None

    @property
    def shares(self) -> bool:
        """Whether requests share prefixes."""
        stored = {group.growth.stores for group in self.manager.plan.groups}
        may_share = "encoder" not in stored and (not self.has_states or self.forks > 0)
        return self.tokens is not None and may_share
