"""The longest request that blocks are enough for. No jax."""

from collections import Counter
from collections.abc import Sequence

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.planning._layout import Group
from jaxkv._src.specs import Limits


def longest_admitted(
    groups: Sequence[Group],
    usable_blocks: int,
    max_model_len: int,
    limits: Limits,
    *,
    context_parallel: int = 1,
) -> int:
    """Returns the largest length in ``[0, max_model_len]`` that needs at most ``usable_blocks``.

    0 means that not even one token fits. Bisection is exact, because the need of a group never
    falls as the length grows.
    """
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
