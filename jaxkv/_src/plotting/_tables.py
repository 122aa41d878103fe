"""The picture of block tables: a map of block ids."""

import itertools
import math
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv
from jaxkv._src.plotting._style import (
    LABEL,
    PALE,
    SMALL,
    UNUSED,
    axes_inches,
    axes_of,
    count_of,
    figure_of,
    finish,
    fits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

    from jaxkv._src.cache import KVCache, StepBatch

GAP = 1  # empty columns between groups, at least
CELL, NAME = 0.32, 1.1  # inches: width of a cell, room for the name of a group
MAX_ROWS = 32
FRAME = "#D55E00"


def plot_block_tables(
    cache: "KVCache",
    *,
    batch: "StepBatch | None" = None,
    rows: Sequence[int] | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws the block ids of every row, group next to group. Waits for the device.

    Darker is a smaller id; a number stands in the cell where it fits. Hatched is a null
    entry. Blank is what a row does not use. Ids of blocks that a window gave back stay in
    their column, where no step reads them.

    Args:
      cache: the cache to look at.
      batch: a step of this cache; the columns that each of its requests reads get a frame.
      rows: rows to draw; None: the first 32 that hold blocks (all of 32 or fewer).
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      TypeError: not a cache, or not a batch.
      ValueError: rows that the tables do not have, or a batch of another cache.
    """
    from jaxkv._src.cache import check_cache

    check_cache(cache)
    used = np.asarray(cache.row_lengths)
    shown = _choose_rows(used, rows)
    frames = [] if batch is None else _read_columns(cache, batch, shown)
    grid = _arrange(cache.layout.row_blocks, used[shown].max(axis=0, initial=0).tolist())
    height = min(1.8 + 0.27 * max(len(shown), 2), 8)
    ax = axes_of(ax, max(3 + grid.cell * grid.starts[-1], 5), height)
    ax.set(xlim=(0, max(grid.starts[-1] - GAP, 1)), ylim=(max(len(shown), 1), 0))
    tables, image = np.asarray(cache.block_tables), None
    for group, first in enumerate(cache.layout.column_starts[:-1]):
        count = grid.columns[group]
        ids = tables[shown, first : first + count]
        masked = np.ma.array(ids, mask=np.arange(count) >= used[shown, group, None])
        image = _draw_group(ax, masked, grid.starts[group], cache.num_blocks)
    _draw_frames(ax, grid, frames)
    _tick(ax, cache, grid, shown)
    if image is not None:
        bar = figure_of(ax).colorbar(image, ax=ax, pad=0.02, aspect=30)
        bar.set_label("block id", fontsize=LABEL)
        bar.ax.tick_params(labelsize=LABEL)
    return finish(ax, _title(cache, used, shown, batch), ylabel="row")


class _Grid(NamedTuple):
    """The columns that are drawn of each group, and the place of each group's first one."""

    columns: Sequence[int]
    starts: Sequence[int]  # and the end of the last group
    cell: float  # inches


def _arrange(widths: Sequence[int], used: Sequence[int]) -> _Grid:
    """Places the groups next to each other, given the columns that they have and use."""
    # Two more than used show that rows go on.
    columns = [min(width, most + 2) for width, most in zip(widths, used, strict=True)]
    cell = min(CELL, 9 / max(sum(columns) + GAP * len(columns), 1))
    rooms = [max(count + GAP, math.ceil(NAME / cell)) for count in columns]
    return _Grid(columns, list(itertools.accumulate(rooms, initial=0)), cell)


class _Frame(NamedTuple):
    """Columns of a group, in a line of the picture, that a step reads."""

    line: int
    group: int
    first: int
    end: int


def _choose_rows(used: np.ndarray, rows: Sequence[int] | None) -> list[int]:
    num_rows = used.shape[0]
    if rows is not None:
        check_each(Integral, "the number of a row", rows=rows)
        unknown = [row for row in rows if not 0 <= row < num_rows]
        if unknown:
            raise ValueError(f"rows: {unknown} are not in 0..{num_rows - 1}")
        return list(rows)
    if num_rows <= MAX_ROWS:
        return list(range(num_rows))
    return np.flatnonzero(used.any(axis=1))[:MAX_ROWS].tolist()


def _read_columns(cache: "KVCache", batch: "StepBatch", shown: Sequence[int]) -> list[_Frame]:
    """Returns a frame for all that a step reads in the rows that are drawn."""
    from jaxkv._src.cache import StepBatch

    check_kind(StepBatch, batch=batch)
    if batch.layout != cache.layout:
        raise ValueError("batch belongs to another cache; use one that apply_step returned with it")
    ranks = cache.layout.context_parallel
    computed, total, encoder = (
        np.asarray(array)
        for array in (batch.num_computed_tokens, batch.seq_lens, batch.encoder_lens)
    )
    requests = {row: at for at, row in enumerate(np.asarray(batch.request_rows).tolist())}
    frames = []
    for line, row in enumerate(shown):
        if row not in requests:
            continue
        request = requests[row]
        tokens = cdiv(int(computed[request]), ranks), cdiv(int(total[request]), ranks)
        for group, growth in enumerate(cache.layout.growths):
            source, _, end = growth.live_columns(*tokens, int(encoder[request]))
            first = growth.step_start(*tokens)  # of a state, earlier columns are held alone
            frames.append(_Frame(line, group, int(first), int(end)))
            if 0 <= source < first:
                frames.append(_Frame(line, group, int(source), int(source) + 1))
    return frames


def _draw_frames(ax: "Axes", grid: _Grid, frames: Sequence[_Frame]) -> None:
    style = {"fill": False, "edgecolor": FRAME, "linewidth": 2}
    for line, group, first, end in frames:
        width = min(end, grid.columns[group]) - first
        ax.barh(line + 0.5, width, 0.94, left=grid.starts[group] + first, **style)


def _draw_group(ax: "Axes", ids: np.ma.MaskedArray, start: int, num_blocks: int) -> "QuadMesh":
    """Draws the ids of a group, masked where a row does not use them."""
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
        vmax=max(num_blocks - 1, 1),
        edgecolors="white",
        linewidth=0.5 if min(cell) > 0.08 else 0,
    )
    box = {"facecolor": "white", "hatch": UNUSED, "edgecolor": "#777777", "linewidth": 0.4}
    writes = fits(str(num_blocks - 1), cell[0]) and cell[1] > SMALL / 72
    for row, column in np.argwhere(kept):
        block_id = int(ids.data[row, column])
        if block_id == NULL_BLOCK:
            ax.barh(row + 0.5, 1, 1, left=start + column, **box)
        elif writes:
            ink = "white" if block_id < 0.55 * num_blocks else "black"
            at = start + column + 0.5, row + 0.5
            style = {"ha": "center", "va": "center", "fontsize": SMALL, "color": ink}
            ax.text(*at, str(block_id), **style)
    return image


def _tick(ax: "Axes", cache: "KVCache", grid: _Grid, shown: Sequence[int]) -> None:
    step = max(1, cdiv(len(shown), 32))
    picked = range(0, len(shown), step)
    ax.set_yticks([line + 0.5 for line in picked], [str(shown[line]) for line in picked])
    middles = [start + n / 2 for start, n in zip(grid.starts, grid.columns, strict=False)]
    names = []
    layout = cache.layout
    for group, growth in enumerate(layout.growths):
        width, count = layout.row_blocks[group], grid.columns[group]
        drawn = f"{width:,} per row" if count == width else f"{count} of {width:,} shown"
        names.append(f"group {group}\n{growth.kind} @ {growth.block_size}\n{drawn}")
    ax.set_xticks(middles, names)
    ax.tick_params(length=0)


def _title(
    cache: "KVCache", used: np.ndarray, shown: Sequence[int], batch: "StepBatch | None"
) -> str:
    holding = int(used.any(axis=1).sum())
    title = f"{used.sum():,} block ids in {holding:,} of {count_of(cache.max_requests, 'row')}"
    if len(shown) < cache.max_requests:
        title += f", {len(shown)} drawn"
    if batch is not None:
        title += "; framed: read by the step"
    flags = int(cache.error_flags)
    return f"{title}\n{cache.error(flags)}" if flags else title
