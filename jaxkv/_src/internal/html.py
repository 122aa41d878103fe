"""Colours and plain HTML tables, for Jupyter. No jax, no matplotlib.

Tables load nothing from elsewhere, and their text takes the page's own colour, so that it can
be read on light and dark themes.
"""

import html
from collections.abc import Iterable, Sequence

# Okabe and Ito's palette for all kinds of colour vision. Neighbours differ in lightness too,
# so that they stay apart in a greyscale print. The order is fixed: index = group.
GROUP_COLOURS = (
    "#0072B2",  # blue
    "#E69F00",  # orange
    "#009E73",  # green
    "#F0E442",  # yellow
    "#CC79A7",  # purple
    "#D55E00",  # vermilion
    "#56B4E9",  # sky
    "#999999",  # grey
)

_CELL = "padding:2px 10px;text-align:left;border:1px solid #8888"


def group_colour(group: int) -> str:
    """Returns the colour of a group, ``#rrggbb``; beyond the palette, paler ones of it."""
    turn, index = divmod(group, len(GROUP_COLOURS))
    return paler(GROUP_COLOURS[index], 0.6**turn)


def paler(colour: str, share: float) -> str:
    """Returns a share of a colour ``#rrggbb`` on white."""
    parts = (255 - share * (255 - int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02X}" for part in parts)


def text_colour(background: str) -> str:
    """Returns black or white, whichever reads better on a colour ``#rrggbb``."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 115 else "#ffffff"


def html_table(
    rows: Iterable[Sequence[object]], *, caption: object = "", header: Sequence[object] = ()
) -> str:
    """Returns an HTML table; all text is escaped."""
    lines = ["<table style='border-collapse:collapse'>"]
    if caption:
        lines.append(
            f"<caption style='text-align:left;padding:2px 0'>{html.escape(str(caption))}</caption>"
        )
    if header:
        lines.append(_row("th", header))
    lines += [_row("td", row) for row in rows]
    return "\n".join([*lines, "</table>"])


def _row(tag: str, cells: Sequence[object]) -> str:
    texts = (f"<{tag} style='{_CELL}'>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{''.join(texts)}</tr>"
