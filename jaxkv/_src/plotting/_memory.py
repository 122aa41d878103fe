"""The parts of a worker's memory when as many requests run as fit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxkv._src.internal.checks import check_count, check_kind, check_positive
from jaxkv._src.internal.html import group_colour
from jaxkv._src.internal.text import readable
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import (
    INK,
    PALE,
    UNUSED,
    axes_of,
    byte_unit,
    count_of,
    finish,
    label_bar,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Part(NamedTuple):
    """A part of a worker's memory; ``blocks`` is None for less than a block."""

    name: str
    num_bytes: int
    blocks: int | None
    unused_bytes: int = 0
    group: int | None = None
    requests: int = 0  # that hold the blocks, as many each


def plot_memory(
    plan: Plan, num_tokens: int | None = None, *, worker: int = 0, ax: "Axes | None" = None
) -> "Figure":
    """Draws the parts of a worker's memory when as many requests run as fit.

    One bar, with a row for each part: the blocks that each group holds while all those
    requests decode (hatched: bytes of these blocks that carry no data), the blocks that one
    request in prefill needs beyond those, blocks too few for one more request, blocks that
    no request gets, and bytes too few for a block.

    Args:
      plan: from `plan_cache`.
      num_tokens: length of each request; None: ``plan.max_model_len``.
      worker: index into ``plan.layouts``.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: a length that the plan does not admit, or no such worker.
    """
    check_kind(Plan, plan=plan)
    length = plan.max_model_len if num_tokens is None else num_tokens
    check_positive(num_tokens=length)
    if not plan.admits(length):
        raise ValueError(f"num_tokens={length:,}; the plan admits {plan.max_model_len:,} at most")
    check_count(worker=worker)
    if worker >= len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    parts = [part for part in _split(plan, length, worker) if part.num_bytes]
    ax = axes_of(ax, 9, 1.2 + 0.36 * len(parts))
    total = max(plan.memory_bytes[worker], sum(part.num_bytes for part in parts))
    unit, size = byte_unit(total)
    ax.set(xlim=(0, total / size), ylim=(len(parts) - 0.5, -0.5))
    start = 0
    for line, part in enumerate(parts):
        _draw(ax, line, start / size, part, size)
        start += part.num_bytes
    ax.set_yticks(range(len(parts)), [part.name for part in parts])
    ax.axvline(plan.memory_bytes[worker] / size, color=INK, linewidth=1)
    fit = count_of(plan.requests_that_fit(length), "request")
    title = (
        f"{fit} of {length:,} tokens at once in {readable(plan.memory_bytes[worker])}: "
        f"{plan.num_blocks:,} blocks of {plan.bytes_per_block[worker]:,} bytes"
    )
    return finish(ax, title, xlabel=f"memory, {unit}")


def _split(plan: Plan, length: int, worker: int) -> Sequence[_Part]:
    block = plan.bytes_per_block[worker]
    fit, steady = plan.requests_that_fit(length), plan.steady_blocks_per_group(length)
    parts = []
    for index, (held, group) in enumerate(zip(steady, plan.layouts[worker].groups, strict=True)):
        data = sum(spec.data_bytes for spec in group.specs)
        blocks = fit * held
        unused = blocks * (block - data)
        parts.append(_Part(f"group {index}: {group}", blocks * block, blocks, unused, index, fit))
    share = min(plan.admission_blocks(length) - sum(steady), plan.usable_blocks)
    left = plan.usable_blocks - fit * sum(steady) - share
    rest = plan.memory_bytes[worker] - plan.num_blocks * block
    return [
        *parts,
        _Part("more while one prefills", share * block, share),
        _Part("free, too few for one more", left * block, left),
        _Part("null block and reserved", plan.reserved_blocks * block, plan.reserved_blocks),
        _Part("less than a block", max(rest, 0), None),
    ]


def _draw(ax: "Axes", line: int, left: float, part: _Part, size: int) -> None:
    used = (part.num_bytes - part.unused_bytes) / size
    colour = PALE if part.group is None else group_colour(part.group)
    edge = {"edgecolor": "#666666", "linewidth": 0.6}
    ax.barh(line, used, 0.72, left=left, color=colour, **edge)
    if part.unused_bytes:
        box = {"facecolor": "white", "hatch": UNUSED, "edgecolor": colour, "linewidth": 0.6}
        ax.barh(line, part.unused_bytes / size, 0.72, left=left + used, **box)
    width = part.num_bytes / size
    label_bar(ax, line, left, width, _text(part), colour, filled=used / width)


def _text(part: _Part) -> str:
    text = readable(part.num_bytes)
    if part.blocks is not None:
        each = f"{part.requests:,} x " if part.requests > 1 else ""
        text += f", {each}{count_of(part.blocks // max(part.requests, 1), 'block')}"
    if part.unused_bytes:
        text += f", {100 * part.unused_bytes / part.num_bytes:.0f} % unused"
    return text
