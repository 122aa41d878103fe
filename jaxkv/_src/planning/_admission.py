"""Admission: a plan that holds its longest request, or a refusal with what to change. No jax."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.planning._layout import Group
from jaxkv._src.planning._longest import longest_model_len
from jaxkv._src.planning._plan import Plan
from jaxkv._src.planning._text import describe_groups
from jaxkv._src.specs import Limits


class KVCacheCapacityError(ValueError):
    """The pool cannot hold one request of the length asked for.

    needed_blocks: the most blocks that such a request holds.
    usable_blocks: blocks of the pool, without the null block.
    longest_len: the longest request that fits; 0 when none does.
    plan: the refused plan; all of it is right except ``max_model_len``.
    """

    def __init__(
        self, message: str, *, needed_blocks: int, usable_blocks: int, longest_len: int, plan: Plan
    ):
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.usable_blocks = usable_blocks
        self.longest_len = longest_len
        self.plan = plan

    def __reduce__(self):  # errors travel between the processes of a serving stack
        return functools.partial(type(self), **vars(self)), self.args


def admit(
    plan: Plan,
    *,
    fit_max_model_len: bool = False,
    blocks_argument: str | None = None,
    remedy: str = "",
) -> Plan:
    """Returns the plan if its pool holds its longest request, or refuses it.

    Args:
      plan: groups, layouts and blocks, as `plan_cache` or another engine has settled them.
      fit_max_model_len: shorten ``max_model_len`` to the longest that fits.
      blocks_argument: name of the argument that sets the number of blocks, if not the memory.
      remedy: one more thing to change; ends the message of a refusal.

    Raises:
      KVCacheCapacityError: a request of ``max_model_len`` (with fitting: of one token, or of
        ``request_len``) needs more blocks than there are.
      ValueError: no encoder tokens for cross attention; context parallelism for groups that do
        not keep all tokens; a pool whose slots pass int32.
    """
    check_kinds(plan.groups, plan.context_parallel, plan.limits)
    _check_slots(plan.groups, plan.num_blocks)
    longest = longest_fit(plan)
    if longest < (1 if fit_max_model_len else plan.max_model_len):
        raise _capacity_error(plan, longest, "max_model_len", blocks_argument, remedy)
    if plan.request_len is not None and longest < plan.request_len:
        raise _capacity_error(plan, longest, "request_len", blocks_argument, remedy)
    if longest > INT32_MAX:
        raise ValueError(
            f"max_model_len={longest:,} has positions beyond int32; set it to at most {INT32_MAX:,}"
        )
    return (
        plan if longest == plan.max_model_len else dataclasses.replace(plan, max_model_len=longest)
    )


def longest_fit(plan: Plan) -> int:
    """Returns the longest request, up to ``max_model_len``, that the pool of a plan holds."""
    return longest_model_len(
        plan.groups,
        plan.usable_blocks,
        plan.max_model_len,
        plan.limits,
        context_parallel=plan.context_parallel,
    )


def check_kinds(groups: Sequence[Group], context_parallel: int, limits: Limits) -> None:
    """Raises ValueError for groups that these limits or context parallelism cannot serve."""
    if not limits.max_encoder_tokens and any(group.growth.kind == "cross" for group in groups):
        raise ValueError(
            "limits.max_encoder_tokens=0, but layers with cross attention keep the encoder's "
            "tokens; set it to the longest encoder input"
        )
    partial = [group for group in groups if not group.growth.keeps_all_tokens]
    if context_parallel > 1 and partial:
        raise ValueError(
            f"context_parallel={context_parallel} needs groups that keep all tokens, and "
            f"{describe_groups(partial)} do not; use context_parallel=1"
        )


def _check_slots(groups: Sequence[Group], num_blocks: int) -> None:
    """Raises unless the slots of a layer, ``block_id * block_size + offset``, fit into int32."""
    sizes = [group.block_size for group in groups if group.growth.stores != "state"]
    largest = max(sizes, default=1)  # of states a block's id alone has to fit
    if num_blocks * largest > INT32_MAX:
        raise ValueError(
            f"a pool of {num_blocks:,} blocks of {largest} tokens has slots beyond int32; "
            f"set num_blocks_override to at most {INT32_MAX // largest:,}"
        )


def _capacity_error(
    plan: Plan, longest: int, length_argument: str, blocks_argument: str | None, remedy: str
) -> KVCacheCapacityError:
    length = getattr(plan, length_argument)
    needed = plan.admission_blocks(length)
    total = needed + plan.reserved_blocks
    bytes_wanted = total * max(plan.bytes_per_block)
    shorter = f"set {length_argument} to at most {longest:,} or " if longest else ""
    more = (
        f"{blocks_argument} to at least {total:,}"
        if blocks_argument
        else f"memory_bytes to at least {bytes_wanted:,} ({total:,} blocks)"
    )
    return KVCacheCapacityError(
        f"{length_argument}={length:,} needs {needed:,} blocks and the pool has "
        f"{plan.usable_blocks:,} usable ones; {shorter}raise {more}{remedy}",
        needed_blocks=needed,
        usable_blocks=plan.usable_blocks,
        longest_len=longest,
        plan=plan,
    )
