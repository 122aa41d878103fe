"""Block tables as a heat map."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.blocks import NULL_BLOCK
from jaxkv.plotting._style import (
    LABEL,
    PALE,
    SMALL,
    UNUSED,
    axes_inches,
    axes_of,
    check_kind,
    count_of,
    figure_of,
    finish,
    fits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    from jaxkv.block_tables import BlockTables

GAP = 1  # empty columns between groups, at least
CELL, NAME = 0.32, 1.1  # inches: width of a cell, room for the name of a group
MAX_ROWS = 32
ALARM = "#D55E00"


def plot_block_tables(
    tables: "BlockTables",
    *,
    rows: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws the block ids of every row, group beside group. Waits for the device.

    Darker is a smaller id; a number stands in the cell where it fits. Hatched is a null
    entry: a block never taken, or given back before the tables heard of it. Ids that are
    given back later stay until the row is written anew; gathering reads them as 0. Blank is
    what a row does not use.

    Args:
      tables: the state to look at.
      rows: which to draw; None: the first 32 that hold blocks (all of 32 or fewer).
      widths: per group, blocks per row that a step gathers: a line is drawn there, and a
        row that holds more, which a step would report, gets a frame.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: rows that the tables do not have, or widths for another number of groups.
    """
    from jaxkv.block_tables import BlockTables

    check_kind(BlockTables, tables=tables)
    used = np.asarray(tables.num_blocks)
    shown = _choose_rows(used, rows)
    if widths is not None and len(widths) != len(tables.widths):
        raise ValueError(
            f"widths has {len(widths)} groups, the tables have {len(tables.widths)}; give one each"
        )
    most = used[:, shown].max(axis=1, initial=0).tolist()
    # Two more than used: room for what `_mark_width` writes, and a sign that rows go on.
    columns = [min(width, held + 2) for width, held in zip(tables.widths, most, strict=True)]
    cell = min(CELL, 9 / max(sum(columns) + GAP * len(columns), 1))
    rooms = [max(count + GAP, math.ceil(NAME / cell)) for count in columns]
    starts = list(itertools.accumulate(rooms, initial=0))
    ax = axes_of(ax, max(3 + cell * starts[-1], 5), min(1.8 + 0.27 * max(len(shown), 2), 8))
    ax.set(xlim=(0, max(starts[-1] - GAP, 1)), ylim=(max(len(shown), 1), 0))
    image = None
    for group, table in enumerate(tables.tables):
        count = used[group, shown]
        ids = np.ma.array(np.asarray(table)[shown, : columns[group]])
        ids.mask = np.arange(columns[group])[None] >= count[:, None]
        image = _draw_group(ax, ids, starts[group], tables.pool_blocks)
        if widths is not None:
            _mark_width(ax, starts[group], widths[group], count)
    _tick(ax, tables, starts, columns, shown)
    if image is not None:
        bar = figure_of(ax).colorbar(image, ax=ax, pad=0.02, aspect=30)
        bar.set_label("block id", fontsize=LABEL)
        bar.ax.tick_params(labelsize=LABEL)
    return finish(ax, _title(tables, used, shown), ylabel="row")


def _choose_rows(used: np.ndarray, rows: Sequence[int] | None) -> list[int]:
    num_rows = used.shape[1]
    if rows is not None:
        unknown = [row for row in rows if not 0 <= row < num_rows]
        if unknown:
            raise ValueError(f"rows: {unknown} are not in 0..{num_rows - 1}")
        return list(rows)
    if num_rows <= MAX_ROWS:
        return list(range(num_rows))
    return np.flatnonzero(used.any(axis=0))[:MAX_ROWS].tolist()


def _draw_group(ax: "Axes", ids: np.ma.MaskedArray, start: int, pool_blocks: int) -> "QuadMesh":
    """ids: masked where a row does not use them."""
    (height, width), (x_inches, y_inches) = ids.shape, axes_inches(ax)
    cell = x_inches / ax.get_xlim()[1], y_inches / ax.get_ylim()[0]
    ax.barh(height / 2, width, height, left=start, color=PALE, alpha=0.5)
    kept = ~np.ma.getmaskarray(ids)
    image = ax.pcolormesh(
        start + np.arange(width + 1),
        np.arange(height + 1),
        np.ma.masked_equal(ids, NULL_BLOCK),
        cmap="cividis",
        vmin=0,
        vmax=max(pool_blocks - 1, 1),
        edgecolors="white",
        linewidth=0.5 if min(cell) > 0.08 else 0,
    )
    box = {"facecolor": "white", "hatch": UNUSED, "edgecolor": "#777777", "linewidth": 0.4}
    writes = fits(str(pool_blocks - 1), cell[0]) and cell[1] > SMALL / 72
    for row, column in np.argwhere(kept):
        block_id = int(ids.data[row, column])
        if block_id == NULL_BLOCK:
            ax.barh(row + 0.5, 1, 1, left=start + column, **box)
        elif writes:
            ink = "white" if block_id < 0.55 * pool_blocks else "black"
            at = start + column + 0.5, row + 0.5
            style = {"ha": "center", "va": "center", "fontsize": SMALL, "color": ink}
            ax.text(*at, str(block_id), **style)
    return image


def _mark_width(ax: "Axes", start: int, width: int, used: np.ndarray) -> None:
    """A line where a step stops gathering; a frame and a sum where a row goes on."""
    ax.vlines(start + width, 0, len(used), color=ALARM, linewidth=2, clip_on=False)
    frame = {"fill": False, "edgecolor": ALARM, "linewidth": 2}
    for row in np.flatnonzero(used > width):
        ax.barh(row + 0.5, used[row], 0.94, left=start, **frame)
        text, offset = f"{used[row]} > {width}", {"xytext": (3, 0), "textcoords": "offset points"}
        ax.annotate(text, (start + used[row], row + 0.5), va="center", fontsize=SMALL, **offset)


def _tick(
    ax: "Axes",
    tables: "BlockTables",
    starts: Sequence[int],
    columns: Sequence[int],
    shown: Sequence[int],
) -> None:
    step = max(1, -(-len(shown) // 32))
    picked = range(0, len(shown), step)
    ax.set_yticks([line + 0.5 for line in picked], [str(shown[line]) for line in picked])
    middles = [start + count / 2 for start, count in zip(starts, columns, strict=False)]
    names = []
    for index, (group, width) in enumerate(zip(tables.groups, tables.widths, strict=True)):
        drawn = f"{width:,} per row"
        if columns[index] < width:
            drawn = f"{columns[index]} of {width:,} shown"
        names.append(f"group {index}\n{group.stores}\n{drawn}")
    ax.set_xticks(middles, names)
    ax.tick_params(length=0)


def _title(tables: "BlockTables", used: np.ndarray, shown: Sequence[int]) -> str:
    holding = int(used.any(axis=0).sum())
    title = f"{used.sum():,} block ids in {holding:,} of {count_of(tables.max_requests, 'row')}"
    if len(shown) < tables.max_requests:
        title += f", {len(shown)} drawn"
    flags = int(tables.overflow)
    if flags:
        from jaxkv.block_tables import BlockTableError

        title += f"\n{BlockTableError(flags)}"
    return title
