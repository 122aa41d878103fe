"""Figures, colours, hatches, labels and units of all pictures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv._src.internal.html import GROUP_COLOURS, group_colour, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE, LABEL, SMALL = 10.5, 9, 7.5  # points
INK, PALE = "#333333", "#e4e4e4"
UNUSED = "////"  # hatch of bytes without data
HATCHES = ("", "///", "...", "", "\\\\\\", "xxx", "|||", "---")


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure; width and height in inches.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from jaxkv._src.plotting._figure import NotebookFigure
    except ImportError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        message = 'jaxkv.plotting draws with matplotlib: pip install "jaxkv[plot]"'
        raise ImportError(message, name="matplotlib") from error
    return NotebookFigure(figsize=(width, height), layout="constrained")


def axes_of(ax: "Axes | None", width: float, height: float) -> "Axes":
    """Returns the axes to draw on: those given, or the only ones of a new figure."""
    if ax is None:
        return new_figure(width, height).subplots()
    if not hasattr(ax, "get_figure"):
        raise TypeError(f"ax must be matplotlib Axes or None, got {type(ax).__name__}")
    figure_of(ax)  # before anything is drawn, which fails in matplotlib's own words
    return ax


def figure_of(ax: "Axes") -> "Figure":
    """Returns the figure of axes; raises ValueError for axes without one."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax belongs to no figure any more; pass axes that are still in use")
    return figure


def finish(ax: "Axes", title: str, **labels: str) -> "Figure":
    """Sets title and labels, and leaves no frame but the axes that carry ticks."""
    ax.set_title(title, loc="left", fontsize=TITLE)
    for axis, text in labels.items():
        getattr(ax, f"set_{axis}")(text, fontsize=LABEL)
    ax.tick_params(labelsize=LABEL)
    ax.spines[["top", "right"]].set_visible(False)
    return figure_of(ax)


def group_style(group: int) -> dict[str, Any]:
    """Returns fill and hatch of a group. Beyond the palette, hatches shift against colours."""
    turn, index = divmod(group, len(GROUP_COLOURS))
    hatch = HATCHES[(index + turn) % len(HATCHES)]
    return {"facecolor": group_colour(group), "hatch": hatch, "edgecolor": "#00000066"}


def axes_inches(ax: "Axes") -> tuple[float, float]:
    """Returns the width and height that axes will have, roughly, to judge whether text fits."""
    figure = figure_of(ax)
    box = ax.get_position()
    return box.width * figure.get_figwidth(), box.height * figure.get_figheight()


def tick_cells(ax: "Axes", axis: str, count: int) -> None:
    """Numbers cells, 0 to count - 1, in their middles: each, or every 2nd, 5th, 10th ... one."""
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    step = next(step for step in steps if count <= 14 * step)
    picked = range(0, count, step)
    getattr(ax, f"set_{axis}ticks")([i + 0.5 for i in picked], [f"{i:,}" for i in picked])


def label_bar(
    ax: "Axes", line: float, left: float, width: float, text: str, colour: str, filled: float = 1.0
) -> None:
    """Writes a text into the filled part of a bar if it fits, else next to it, else over it."""
    low, high = ax.get_xlim()
    inch = axes_inches(ax)[0] / (high - low)
    right = left + width
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    if fits(text, width * filled * inch, LABEL):
        at, align, shift = left + width * filled / 2, "center", 0
        style["color"] = text_colour(colour)
    elif fits(text, (high - right) * inch, LABEL):
        at, align, shift = right, "left", 4
    elif fits(text, (left - low) * inch, LABEL):
        at, align, shift = left, "right", -4
    else:
        half = min(text_inches(text, LABEL) / inch, high - low) / 2
        at = min(max(left + width / 2, low + half), high - half)
        align, shift = "center", 0
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    ax.annotate(text, (at, line), (shift, 0), ha=align, fontsize=LABEL, **style)


def legend_below(ax: "Axes") -> None:
    """Adds a legend under the axis labels, if there is anything to name."""
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        ax.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.55 / axes_inches(ax)[1]),
            ncols=min(4, len(handles)),
            frameon=False,
            fontsize=LABEL,
            handlelength=2.2,
            handleheight=1.2,
        )


def text_inches(text: str, points: float) -> float:
    """Returns the rough width of a text."""
    return len(text) * points * 0.62 / 72


def fits(text: str, width_inches: float, points: float = SMALL) -> bool:
    """Returns whether a text is narrower than this."""
    return text_inches(text, points) < width_inches


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Returns the nearest positions, in the same order, that are at least ``gap`` apart."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    clusters: list[list[int]] = []
    for index in order:
        clusters.append([index])
        while len(clusters) > 1 and _bottom(positions, clusters[-1], gap) < (
            _bottom(positions, clusters[-2], gap) + gap * len(clusters[-2])
        ):
            last = clusters.pop()
            clusters[-1] += last
    return [
        _bottom(positions, cluster, gap) + gap * cluster.index(i)
        for i in range(len(positions))
        for cluster in clusters
        if i in cluster
    ]


def _bottom(positions: Sequence[float], cluster: Sequence[int], gap: float) -> float:
    """Returns the start of a cluster that is set at the gap around its own middle."""
    middle = sum(positions[i] for i in cluster) / len(cluster)
    return middle - gap * (len(cluster) - 1) / 2


def byte_unit(num_bytes: int) -> tuple[str, int]:
    """Returns a unit, and its bytes, for an axis that reaches ``num_bytes``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 2 * size:
            return unit, size
    return "bytes", 1


def count_of(number: int, noun: str) -> str:
    """Returns ``1 block`` or ``2 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
