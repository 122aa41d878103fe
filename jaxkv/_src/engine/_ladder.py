"""The shapes of an engine's steps, and the choice among them. No jax."""

from collections.abc import Sequence

from jaxkv._src.blocks import StepShape
from jaxkv._src.scheduler import Schedule, Scheduler

FULL_ENOUGH = 0.75  # of a step's tokens; below that, a smaller step takes what fits
SMALLEST_MIXED = 16  # tokens; smaller steps take as long


class Ladder:
    """Shapes of steps in which every request computes one token, and of all others.

    decode: by number of requests: powers of two, and ``max_requests``.
    mixed: by number of tokens: ``max_tokens`` and its halves.
    """

    def __init__(self, scheduler: Scheduler, max_requests: int, max_tokens: int):
        if max_tokens < max_requests:
            raise ValueError(
                f"max_tokens={max_tokens} is less than max_requests={max_requests}: a step holds a "
                "token of each"
            )
        self.decode = {
            size: scheduler.shape(batch_size=size, max_tokens=size, max_query_len=1)
            for size in _doubling(1, max_requests)
        }
        smallest = min(max_tokens, max(SMALLEST_MIXED, max_requests))
        self.mixed = {
            size: scheduler.shape(max_tokens=size) for size in _doubling(smallest, max_tokens)
        }

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes, the smallest first."""
        return [*self.decode.values(), *self.mixed.values()]

    def fill(self, wanted: int) -> int:
        """Returns the most tokens of a step for which so many wait: what fills a shape well."""
        sizes = list(self.mixed)
        above = next((size for size in sizes if size >= wanted), sizes[-1])
        below = sizes[max(0, sizes.index(above) - 1)]
        return below if wanted < FULL_ENOUGH * above else above

    def fitting(self, schedule: Schedule) -> StepShape:
        """Returns the smallest shape that holds a schedule."""
        tokens = sum(schedule.work.values())
        if tokens > len(schedule.work):
            return next(shape for size, shape in self.mixed.items() if size >= tokens)
        # A prompt of which one token is computed may have several samples.
        most = max(tokens, len(schedule.samples))
        return next(shape for size, shape in self.decode.items() if size >= most)


def _doubling(smallest: int, largest: int) -> Sequence[int]:
    """Returns ``largest`` and its halves, down to ``smallest``; from 1 on, powers of two."""
    sizes = [largest]
    if smallest == 1:
        return [2**i for i in range((largest - 1).bit_length())] + sizes
    while sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    return sizes[::-1]
