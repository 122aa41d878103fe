"""The picture of a block: the layers of every group over its bytes."""

from typing import TYPE_CHECKING, Any

from jaxkv._src.internal.checks import check_kind, check_positive
from jaxkv._src.internal.html import group_colour, text_colour
from jaxkv._src.internal.text import describe_unused
from jaxkv._src.planning import PoolLayout
from jaxkv._src.plotting._spans import Span, layer_spans, short_names, tensor_starts
from jaxkv._src.plotting._style import (
    INK,
    LABEL,
    PALE,
    UNUSED,
    axes_inches,
    axes_of,
    byte_unit,
    count_of,
    finish,
    fits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.8  # of the row of a group


def plot_layout(layout: PoolLayout, *, max_tensors: int = 12, ax: "Axes | None" = None) -> "Figure":
    """Draws one block, tensor by tensor, and in a row per group the layers that lie on it.

    Layers above each other share the same memory, which belongs to one group at a time.
    Hatched bytes hold no data: padding of a page, and tensors in which a group has no layer.

    Args:
      layout: ``plan.layout``, or one of ``plan.layouts``.
      max_tensors: tensors to draw; the title says when there are more.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      TypeError: not a layout.
    """
    check_kind(PoolLayout, layout=layout)
    check_positive(max_tensors=max_tensors)
    shown = min(max_tensors, len(layout.tensors))
    starts = tensor_starts(layout)[: shown + 1]
    ax = axes_of(ax, 10, min(1.5 + 0.5 * len(layout.groups), 9))
    unit, size = byte_unit(starts[-1])
    rows = range(len(layout.groups))
    empty = {"facecolor": "white", "hatch": UNUSED, "edgecolor": "#bbbbbb", "linewidth": 0}
    ax.barh(rows, starts[-1] / size, BAR, **empty)
    names = {
        name: short
        for group in layout.groups
        for name, short in zip(group.layers, short_names(group.layers), strict=True)
    }
    inch = axes_inches(ax)[0] / max(starts[-1], 1)
    for span in layer_spans(layout):
        if span.start < starts[-1]:
            _draw(ax, span, names[span.layer], size, inch)
    for start in starts:
        ax.axvline(start / size, color=INK, linewidth=1)
    ax.set(xlim=(0, max(starts[-1] / size, 1e-9)), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(rows, [_row_name(layout, index) for index in rows])
    unused = [layout.bytes_per_block - sum(s.data_bytes for s in g.specs) for g in layout.groups]
    more = "" if shown == len(layout.tensors) else f" (first {shown} drawn)"
    tensors = f"{count_of(len(layout.tensors), 'tensor')}{more}"
    title = f"A block is {layout.bytes_per_block:,} bytes in {tensors}; {describe_unused(unused)}"
    return finish(ax, title, xlabel=f"{unit} of the block (lines: tensors, boxes: layers)")


def _draw(ax: "Axes", span: Span, name: str, size: int, inch: float) -> None:
    colour = group_colour(span.group)
    box: dict[str, Any] = {"height": BAR, "left": span.start / size}
    if span.page_bytes > span.data_bytes:
        pale = {"facecolor": PALE, "hatch": UNUSED, "edgecolor": colour, "linewidth": 0.5}
        ax.barh(span.group, span.page_bytes / size, **box, **pale)
    fill = {"color": colour, "edgecolor": "white", "linewidth": 0.6}
    ax.barh(span.group, span.data_bytes / size, **box, **fill)
    if fits(name, span.data_bytes * inch, LABEL):
        middle = (span.start + span.data_bytes / 2) / size
        ink = text_colour(colour)
        ax.text(middle, span.group, name, ha="center", va="center", fontsize=LABEL, color=ink)


def _row_name(layout: PoolLayout, index: int) -> str:
    group = layout.groups[index]
    readers = sum(owner in group.layers for _, owner in layout.shared)
    return f"group {index}: {group}" + (f"\n+ {readers} layers that share" if readers else "")
