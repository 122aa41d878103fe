"""The picture of block tables."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv._src.internal.checks import check_kind
from jaxkv._src.internal.html import group_colour, paler
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv
from jaxkv._src.plotting._style import PALE, UNUSED, count_of, finish, new_axes, write_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxkv._src.cache import KVCache, StepBatch

MAX_ROWS = 32
MORE, GAP = 2, 1  # cells: unused ones after the last that is used, and between groups


def plot_block_tables(cache: "KVCache", *, batch: "StepBatch | None" = None) -> "Figure":
    """Draws the block ids of every row, group next to group. Waits for the device.

    An id is written where it fits. Hatched is a null entry, grey what a row does not
    use. Ids of blocks that a window freed stay; no step reads them. Of a
    cache with more than 32 rows, the first 32 with blocks are drawn.

    Args:
      cache: the cache to look at.
      batch: a step of this cache; what its requests do not read is paler.

    Raises:
      TypeError: not a cache, or not a batch.
      ValueError: a batch of another cache.
    """
    from jaxkv._src.cache import check_cache

    check_cache(cache)
    tables, used = np.asarray(cache.block_tables), np.asarray(cache.row_lengths)
    read = np.ones_like(tables, bool) if batch is None else _read(cache, batch)
    rows = np.arange(len(used))
    if len(rows) > MAX_ROWS:
        rows = np.flatnonzero(used.any(axis=1))[:MAX_ROWS]
    layout, most = cache.layout, used[rows].max(axis=0, initial=0)
    shown = np.minimum(layout.row_blocks, most + MORE).tolist()
    starts = np.cumsum([0, *(max(count, 3) + GAP for count in shown)])  # 3: as wide as a name
    ax = new_axes(np.clip(1.5 + 0.32 * starts[-1], 4, 12), min(2 + 0.27 * len(rows), 8))
    names = []
    for group, (growth, count) in enumerate(zip(layout.growths, shown, strict=True)):
        entries = slice(first := layout.table_offsets[group], first + count)
        is_used = np.arange(count) < used[rows, group, None]
        ax.barh(range(len(rows)), count, 1, starts[group] - 0.5, color=PALE, alpha=0.5)
        cells = tables[rows, entries], is_used, read[rows, entries]
        _draw_ids(ax, group_colour(group), starts[group] - 0.5, *cells)
        width = layout.row_blocks[group]
        drawn = f"{width:,} per row" if count == width else f"{count} of {width:,} shown"
        names.append(f"group {group}\n{growth.kind} @ {growth.block_size}\n{drawn}")
    ax.set_xticks(starts[:-1] + (np.array(shown) - 1) / 2, names)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlim=(-0.5, starts[-1] - GAP - 0.5), ylim=(max(len(rows), 1) - 0.5, -0.5))
    ax.tick_params(length=0)
    filled_rows = int(used.any(axis=1).sum())
    title = f"{used.sum():,} block ids in {filled_rows:,} of {count_of(cache.max_requests, 'row')}"
    title += f", {len(rows)} drawn" if len(rows) < cache.max_requests else ""
    flags = int(cache.error_flags)
    title += f"\n{cache.error(flags)}" if flags else ""
    title += "\npaler: not read by the step" if batch else ""
    return finish(ax, title, ylabel="row")


def _draw_ids(
    ax: "Axes", colour: str, left: float, ids: np.ndarray, is_used: np.ndarray, is_read: np.ndarray
) -> None:
    """Draws the entries of a group, [rows, blocks], from ``left`` on, and writes ids in them."""
    filled = is_used & (ids != NULL_BLOCK)
    styles: tuple[tuple[np.ndarray, dict[str, Any]], ...] = (
        (is_used & ~filled, UNUSED),
        (filled & is_read, {"color": colour, "edgecolor": "white"}),
        (filled & ~is_read, {"color": paler(colour, 0.35), "edgecolor": "white"}),
    )
    for where, style in styles:
        lines, at = np.nonzero(where)
        bars = ax.barh(lines, 1, 1, left + at, **style)
        write_in(ax, bars, [str(i) if i != NULL_BLOCK else "" for i in ids[where]])


def _read(cache: "KVCache", batch: "StepBatch") -> np.ndarray:
    """Returns bool[rows, columns], the entries of the tables that the requests of a step read."""
    from jaxkv._src.cache import StepBatch

    check_kind(StepBatch, batch=batch)
    if batch.layout != cache.layout:
        raise ValueError("batch belongs to another cache; use one that apply_step returned with it")
    layout, read = cache.layout, np.zeros(cache.block_tables.shape, bool)
    lengths = batch.num_computed_tokens, batch.seq_lens, batch.encoder_lens
    requests = zip(*(np.asarray(x).tolist() for x in (batch.request_rows, *lengths)), strict=True)
    for row, computed, total, encoder in requests:
        tokens = cdiv(computed, layout.context_parallel), cdiv(total, layout.context_parallel)
        for start, growth in zip(layout.table_offsets, layout.growths, strict=False):
            source, _, end = growth.live_range(*tokens, encoder)
            first = growth.step_start(*tokens)  # of a state, earlier ones are only allocated
            read[row, start + int(first) : start + int(end)] = True
            if source >= 0:
                read[row, start + int(source)] = True
    return read
