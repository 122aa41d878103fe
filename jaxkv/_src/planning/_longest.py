"""The longest request that blocks are enough for. No jax."""

from collections import Counter
from collections.abc import Sequence

from jaxkv._src.internal.checks import check_count, check_each, check_kind, check_positive
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.planning._layout import Group
from jaxkv._src.specs import Limits


def longest_model_len(
    groups: Sequence[Group],
    usable_blocks: int,
    max_model_len: int,
    limits: Limits,
    *,
    context_parallel: int = 1,
) -> int:
    """Returns the longest request, in tokens, that a number of blocks is enough for.

    It is what `plan_cache` fits ``max_model_len`` to: the largest length in ``[0,
    max_model_len]`` at which the groups together need at most ``usable_blocks``. Bisection is
    exact, because the need of a group never falls as the length grows.

    Args:
      groups: groups of layers, such as ``plan.groups``.
      usable_blocks: blocks that requests can get, without the null block.
      max_model_len: tokens of the longest request that is asked for.
      limits: the most that the scheduler asks of one step.
      context_parallel: ranks among which the tokens of a request are divided.

    Returns:
      Tokens; 0 if not even one fits.
    """
    check_each(Group, "a Group", groups=groups)
    check_count(usable_blocks=usable_blocks, max_model_len=max_model_len)
    check_kind(Limits, limits=limits)
    check_positive(context_parallel=context_parallel)
    growths = Counter(group.growth for group in groups).items()
    sizes = limits.max_in_flight_tokens, limits.max_encoder_tokens

    def need(num_tokens: int) -> int:
        return sum(count * growth.max_blocks(num_tokens, *sizes) for growth, count in growths)

    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if need(cdiv(middle, context_parallel)) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low
