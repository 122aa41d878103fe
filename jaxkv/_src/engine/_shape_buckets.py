"""The shapes of an engine's steps, and the choice among them. No jax."""

import bisect
import math
from collections.abc import Sequence
from typing import Any

from jaxkv._src.engine._samples import RECORD_SIZE
from jaxkv._src.internal.numbers import INT32_MAX, cdiv
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
# Groups of requests that read the blocks that they begin with together; and bytes that they have to
# save a layer, which take as long to read as the kernels take that groups add: 25 us on an H200.
PREFIX_GROUPS, LEAST_SAVED_BYTES = 32, 2**27


class ShapeBuckets:
    """Shapes of steps in which every request computes one token, and of all others.

    decode: by number of requests: 8, 32, then powers of two and their halves between them.
      None in a reproducible engine, whose steps have one shape.
    shared: every second of them, from the largest down, with room for groups of requests; those
      with which groups may save enough.
    least_saved: tokens that these have to save.
    drafted: of steps that verify drafts, by number of tokens, each of which is sampled from.
    mixed: by number of tokens: few, because each takes seconds to compile, and large ones are
      filled by `fill`; a prompt alone has to fill a small one, so that these are closer.
    shapes: all of these, the smallest first.
    to_trace: the shape in which a model is checked.
    """

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        max_requests: int,
        max_tokens: int,
        prefix_groups: int = 0,
        reproducible: bool = False,
        has_targets: bool = False,
        drafts: int = 0,
    ):
        """Chooses the shapes.

        Args:
          prefix_groups: groups of requests that read the blocks that they begin with together.
          has_targets: whether an upload holds the token after each request's last, too.
          drafts: the most of a request in a step.
        """
        if max_tokens < max_requests:
            raise ValueError(
                f"max_tokens={max_tokens} is less than max_requests={max_requests}: a step holds a "
                "token of each"
            )

        def shape(tokens: int, requests: int, samples: int = 0, **options: Any) -> StepShape:
            options |= {"max_tokens": tokens, "batch_size": requests, "reproducible": reproducible}
            extra = tokens + (samples or requests) * RECORD_SIZE + requests * has_targets
            return scheduler.shape(extra=extra, **options)

        def decode(size: int, groups: int = 0) -> StepShape:
            groups = min(groups, size // 2)  # of two requests at least
            return shape(size, size, max_query_len=1, shared_prefixes=groups)

        sizes: Sequence[int] = () if reproducible else _of_decodes(max_requests)
        self.decode = {size: decode(size) for size in sizes}
        self.least_saved, longest = _least_saved(plan), plan.max_model_len
        coarse = sizes[::-2][::-1] if prefix_groups else ()
        may_save = [size for size in coarse if (size - 1) * longest >= self.least_saved]
        self.shared = {size: decode(size, prefix_groups) for size in may_save}
        each = 1 + drafts
        most = min(READING, max_tokens, max_requests * each)
        self.drafted = {
            size: shape(size, min(size, max_requests), size, max_query_len=min(size, each))
            for size in (_of_decodes(most) if drafts else ())
        }
        smallest = min(max_tokens, max(SMALLEST_MIXED, max_requests))
        sizes = [max_tokens] if reproducible else _of_prompts(smallest, max_tokens)
        self.mixed = {size: shape(size, max_requests) for size in sizes}
        # Tokens and requests differ in number, so that logits of all tokens are told from those of
        # each request's last.
        self.to_trace = shape(max_tokens + (max_tokens == max_requests), max_requests)
        of_kinds = self.decode, self.shared, self.drafted, self.mixed
        self.shapes = [shape for of_kind in of_kinds for shape in of_kind.values()]

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

    def fitting(
        self, schedule: Schedule, *, may_decode: bool = True, num_saved: int = 0
    ) -> StepShape:
        """Returns the smallest shape that holds a schedule.

        Args:
          may_decode: whether it may be one of decodes.
          num_saved: tokens that groups of its requests would save.
        """
        shapes, wanted = self.mixed, schedule.num_tokens
        if self.decode and may_decode and wanted == len(schedule.work):
            # A prompt of which one token is computed may have several samples.
            wanted = max(wanted, len(schedule.samples))
            shapes = self.shared if self.shared and num_saved >= self.least_saved else self.decode
        return next(shape for size, shape in shapes.items() if size >= wanted)

    def fitting_drafts(self, num_tokens: int) -> StepShape:
        """Returns the smallest shape for drafts that holds so many tokens."""
        return next(shape for size, shape in self.drafted.items() if size >= num_tokens)


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


def _least_saved(plan: Plan) -> int:
    """Returns the tokens that groups have to save: of the widest layer that keeps them all."""
    kept = [group for group in plan.groups if group.growth.keeps_all_tokens]
    widths = [spec.page_bytes / group.block_size for group in kept for spec in group.specs]
    return math.ceil(LEAST_SAVED_BYTES / max(widths)) if widths else INT32_MAX


def count_prefix_groups(plan: Plan, given: int | None, *, reproducible: bool, pays: bool) -> int:
    """Returns the groups of an engine that is ``given`` a number of them, or None.

    Args:
      pays: whether kernels of the device read what groups share together.
    """
    if given is not None:
        return given
    return PREFIX_GROUPS if pays and not reproducible and plan.context_parallel == 1 else 0


def check_reproducible(plan: Plan, *, decode_steps: int, shared_prefixes: int | None) -> None:
    """Raises ValueError for what makes bits depend on other requests."""
    if any(group.growth.stores == "state" for group in plan.groups):
        raise ValueError(
            "reproducible=True does not hold for recurrent layers, whose sums depend on the chunks "
            "of a prompt; leave it out"
        )
    if decode_steps > 1 or shared_prefixes:
        more = f" and shared_prefixes={shared_prefixes}" if shared_prefixes else ""
        raise ValueError(
            "reproducible=True needs steps of one shape; leave out "
            f"decode_steps={decode_steps}{more}"
        )
