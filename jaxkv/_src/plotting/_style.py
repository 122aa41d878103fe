"""Figures, colours, labels and units of all pictures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxkv._src.internal.html import text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

LABEL = 9  # points
INK, PALE = "#333333", "#e4e4e4"
UNUSED: dict[str, Any] = {  # bytes without data
    "facecolor": "white",
    "hatch": "////",
    "edgecolor": "#bbbbbb",
    "linewidth": 0,
}


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure, to show in Jupyter; width and height in inches."""
    try:
        from jaxkv._src.plotting._figure import NotebookFigure
    except ImportError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        message = 'jaxkv.plotting draws with matplotlib: pip install "jaxkv[plot]"'
        raise ImportError(message, name="matplotlib") from error
    return NotebookFigure(figsize=(width, height), layout="constrained")


def new_axes(width: float, height: float) -> "Axes":
    """Returns the only axes of a new figure."""
    return new_figure(width, height).subplots()


def finish(ax: "Axes", title: str, *, legend: bool = False, **labels: str) -> "Figure":
    """Sets title, labels and a legend below, removes texts that do not fit, returns the figure."""
    label(ax, title, **labels)
    figure = cast("Figure", ax.get_figure(root=True))
    if legend:
        style = {"frameon": False, "fontsize": LABEL, "ncols": 4}
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", **style)
    return remove_tight(figure)


def label(ax: "Axes", title: str, **labels: str) -> None:
    """Sets title and labels."""
    ax.set_title(title, loc="left", fontsize=10.5)
    for axis, text in labels.items():
        getattr(ax, f"set_{axis}")(text, fontsize=LABEL)
    ax.tick_params(labelsize=LABEL)
    ax.spines[["top", "right"]].set_visible(False)


def remove_tight(figure: "Figure") -> "Figure":
    """Removes texts that do not fit into their bars; sizes are known once all is drawn."""
    figure.draw_without_rendering()
    for text in [text for ax in figure.axes for text in ax.texts]:
        size, bar = text.get_window_extent(), cast(Any, text).xycoords.get_window_extent()
        if size.width > bar.width or 0.9 * size.height > bar.height:
            text.remove()
    return figure


def write_in(ax: "Axes", bars: "BarContainer", texts: Sequence[str]) -> None:
    """Writes a text into the middle of each bar; `finish` removes those that do not fit."""
    from matplotlib.colors import to_hex

    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for bar, text in zip(bars, texts, strict=True):
        style["color"] = text_colour(to_hex(bar.get_facecolor()))
        ax.annotate(text, (0.5, 0.5), xycoords=bar, **style).set_in_layout(False)


def number_cells(*axes: Any) -> None:
    """Numbers the cells of an axis, whose middles lie at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(14, integer=True))


def byte_unit(num_bytes: int) -> tuple[str, int]:
    """Returns a unit, and its bytes, for an axis that reaches ``num_bytes``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= 2 * size:
            return unit, size
    return "bytes", 1


def count_of(number: int, noun: str) -> str:
    """Returns ``1 block`` or ``2 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
