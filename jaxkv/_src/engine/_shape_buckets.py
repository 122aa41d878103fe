"""The shapes of an engine's steps, and the choice among them. No jax."""

import bisect
from collections.abc import Sequence
from typing import Any

from jaxkv._src.engine._samples import RECORD_SIZE
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.planning import Plan
from jaxkv._src.scheduler import Schedule, Scheduler, Wanted
from jaxkv._src.uploads import StepShape

# Tokens that take as long as the weights take to be read: 163 on an H200 in bf16. A step takes
# about the time of so many besides its own.
READING = 256
SMALLEST_MIXED = 16  # tokens
# What a token of padding counts as, in tokens: others may come and take its place, and surely do
# where they wait already.
PADDING, PADDING_OF_BACKLOG = 1, 8


class ShapeBuckets:
    """Shapes of steps in which every request computes one token, and of all others.

    decode: by number of requests: 8, 32, then powers of two and their halves between them.
      None in a reproducible engine, whose steps have one shape.
    mixed: by number of tokens: few, because each takes seconds to compile, and large ones are
      filled by `fill`; a prompt alone has to fill a small one, so that these are closer.
    shapes: all of these, the smallest first.
    to_trace: the shape in which a model is checked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_requests: int,
        max_tokens: int,
        shared_prefixes: int = 0,
        reproducible: bool = False,
        has_targets: bool = False,
    ):
        """Chooses the shapes.

        Args:
          has_targets: whether an upload holds the token after each request's last, too.
        """
        if max_tokens < max_requests:
            raise ValueError(
                f"max_tokens={max_tokens} is less than max_requests={max_requests}: a step holds a "
                "token of each"
            )

        def shape(tokens: int, requests: int, **options: Any) -> StepShape:
            options |= {"max_tokens": tokens, "batch_size": requests, "reproducible": reproducible}
            extra = tokens + requests * (RECORD_SIZE + has_targets)
            return scheduler.shape(extra=extra, **options)

        def decode(size: int) -> StepShape:
            groups = min(shared_prefixes, size // 2)  # of two requests at least
            return shape(size, size, max_query_len=1, shared_prefixes=groups)

        sizes: Sequence[int] = () if reproducible else _of_decodes(max_requests)
        self.decode = {size: decode(size) for size in sizes}
        smallest = min(max_tokens, max(SMALLEST_MIXED, max_requests))
        sizes = [max_tokens] if reproducible else _of_prompts(smallest, max_tokens)
        self.mixed = {size: shape(size, max_requests) for size in sizes}
        # Tokens and requests differ in number, so that logits of all tokens are told from those of
        # each request's last.
        self.to_trace = shape(max_tokens + (max_tokens == max_requests), max_requests)
        self.shapes = [*self.decode.values(), *self.mixed.values()]

    def fill(self, wanted: Wanted, decodes: int) -> int:
        """Returns the most tokens of a step for which so many wait, ``decodes`` of them decodes.

        Of a large step that takes all of them, and smaller ones that they fill, it is the one by
        which they are done first. Requests that decode get a token in each.
        """
        sizes, padding = list(self.mixed), PADDING_OF_BACKLOG if wanted.has_backlog else PADDING

        def best(tokens: int) -> tuple[int, int]:
            """Returns the time of all steps, in tokens, and the tokens of the first."""
            at = min(bisect.bisect_left(sizes, tokens), len(sizes) - 1)
            found = READING + sizes[at] + padding * max(0, sizes[at] - tokens), sizes[at]
            for size in sizes[bisect.bisect_right(sizes, decodes) : at]:
                count = cdiv(tokens - size, size - decodes)  # of steps that are full
                rest, _ = best(tokens - count * (size - decodes))
                found = min(found, (count * (READING + size) + rest, size))
            return found

        return best(wanted.tokens)[1]

    def fitting(self, schedule: Schedule, *, may_decode: bool = True) -> StepShape:
        """Returns the smallest shape that holds a schedule; none of decodes unless it may."""
        shapes, wanted = self.mixed, schedule.num_tokens
        if self.decode and may_decode and wanted == len(schedule.work):
            # A prompt of which one token is computed may have several samples.
            shapes, wanted = self.decode, max(wanted, len(schedule.samples))
        return next(shape for size, shape in shapes.items() if size >= wanted)


def _of_decodes(largest: int) -> Sequence[int]:
    """Returns sizes of decode steps.

    Those below 64 take about as long as the weights to read. A step of one request would not be
    faster than one of eight: XLA multiplies a single row without tensor cores.
    """
    sizes = [8, 32, 64]
    while sizes[-1] < largest:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2] if sizes[-1] >= 128 else [sizes[-1] * 2]
    return [size for size in sizes if size < largest] + [largest]


def _of_prompts(smallest: int, largest: int) -> Sequence[int]:
    """Returns ``largest`` and its quarters, small multiples of `READING`, and ``smallest``."""
    sizes = [largest]
    while sizes[-1] // 4 > 3 * READING:
        sizes.append(sizes[-1] // 4)
    for size in (3 * READING, 2 * READING, READING):
        if smallest <= size <= 3 / 4 * sizes[-1]:
            sizes.append(size)
    if sizes[-1] >= 2 * smallest:
        sizes.append(smallest)
    return sizes[::-1]


def check_reproducible(plan: Plan, *, decode_steps: int, shared_prefixes: int) -> None:
    """Raises ValueError for what makes bits depend on other requests."""
    if any(group.growth.stores == "state" for group in plan.groups):
        raise ValueError(
            "reproducible=True does not hold for recurrent layers, whose sums depend on the chunks "
            "of a prompt; leave it out"
        )
    if decode_steps > 1 or shared_prefixes:
        raise ValueError(
            f"reproducible=True needs steps of one shape; leave out decode_steps={decode_steps} "
            f"and shared_prefixes={shared_prefixes}"
        )
