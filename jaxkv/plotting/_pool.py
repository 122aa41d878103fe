"""The pool over time: who holds which block."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.blocks import NULL_BLOCK, BlockManager
from jaxkv.planning import Plan
from jaxkv.plotting._style import (
    INK,
    SMALL,
    axes_inches,
    axes_of,
    check_kind,
    finish,
    fits,
    group_style,
    legend_below,
    tick_cells,
)
from jaxkv.rich_repr import group_colour, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Holder(NamedTuple):
    """Who holds a block: a group of layers, for one request or for several that share it."""

    group: int
    requests: tuple[Hashable, ...]


Snapshot = Mapping[int, Holder]


class _Run(NamedTuple):
    """Blocks ``first_block .. last_block`` that one holder has from step to step."""

    holder: Holder
    first_block: int
    num_blocks: int
    start: int
    stop: int


def snapshot_blocks(manager: BlockManager) -> dict[int, Holder]:
    """Who holds which block now; take one per step for `plot_pool_over_time`.

    Blocks of attention sinks are held for no request.
    """
    check_kind(BlockManager, manager=manager)
    held = {
        block_id: Holder(group, ())
        for group, block_ids in enumerate(manager.sink_block_ids)
        for block_id in block_ids
    }
    for request in manager.requests:
        for group, block_ids in enumerate(manager.block_ids(request)):
            for block_id in block_ids:
                if block_id != NULL_BLOCK:
                    before = held.get(block_id, Holder(group, ()))
                    held[block_id] = before._replace(requests=(*before.requests, request))
    return held


def plot_pool_over_time(
    plan: Plan, snapshots: Sequence[Snapshot], *, ax: "Axes | None" = None
) -> "Figure":
    """Draws blocks against steps, coloured by the group that holds them.

    Black lines part holders: requests, or groups of one request. A holder's name stands in
    the largest patch that it fits. The title counts the blocks that came to a group whose
    bytes the block had last held for another one: those that zeroing is for.

    Args:
      plan: gives groups and blocks.
      snapshots: from `snapshot_blocks`, one per step.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no snapshots, or one with a block or group that the plan does not have.
    """
    check_kind(Plan, plan=plan)
    cells, holders = _cells(plan, snapshots)
    ax = axes_of(ax, 10, min(2.2 + 0.14 * plan.num_blocks, 7))
    ax.set(xlim=(0, cells.shape[1]), ylim=(cells.shape[0], 0))
    runs = list(_runs(cells, holders))
    for group in sorted({run.holder.group for run in runs}):
        _fill(
            ax, group, [run for run in runs if run.holder.group == group], str(plan.groups[group])
        )
    tick_cells(ax, "y", cells.shape[0])
    tick_cells(ax, "x", cells.shape[1])
    _draw_boundaries(ax, cells)
    _label(ax, runs)
    legend_below(ax)
    handed, changed = _count_hand_overs(runs)
    title = f"{handed:,} blocks handed out, {changed:,} of them from one group to another"
    return finish(ax, title, xlabel="step", ylabel="block (0: null block)")


def _cells(plan: Plan, snapshots: Sequence[Snapshot]) -> tuple[np.ndarray, list[Holder]]:
    """int[num_blocks, steps]: which holder, counted from 1; 0 is free."""
    if not len(snapshots):
        raise ValueError("snapshots is empty; give one of snapshot_blocks(manager) per step")
    cells = np.zeros((plan.num_blocks, len(snapshots)), int)
    numbers: dict[Holder, int] = {}
    for step, snapshot in enumerate(snapshots):
        check_kind(Mapping, **{f"snapshots[{step}]": snapshot})
        for block_id, holder in snapshot.items():
            if not (0 <= block_id < plan.num_blocks and 0 <= holder.group < len(plan.groups)):
                raise ValueError(
                    f"snapshots[{step}] has block {block_id} of group {holder.group}; the plan has "
                    f"{plan.num_blocks} blocks and {len(plan.groups)} groups: give the plan of the "
                    "manager"
                )
            cells[block_id, step] = numbers.setdefault(Holder(*holder), len(numbers) + 1)
    return cells, list(numbers)


def _runs(cells: np.ndarray, holders: Sequence[Holder]) -> Iterator[_Run]:
    """Rectangles of one holder: runs in time, joined over neighbouring blocks."""
    open_runs: dict[tuple[int, int, int], _Run] = {}
    for block, row in enumerate(cells):
        ends = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        now = {}
        for start, stop in itertools.pairwise(ends):
            if number := int(row[start]):
                key = start, stop, number
                before = open_runs.pop(key, _Run(holders[number - 1], block, 0, start, stop))
                now[key] = before._replace(num_blocks=before.num_blocks + 1)
        yield from open_runs.values()
        open_runs = now
    yield from open_runs.values()


def _fill(ax: "Axes", group: int, runs: Sequence[_Run], name: str) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(x, y) for x, y in ((r.start, 0), (r.stop, 0), (r.stop, 1), (r.start, 1))] for r in runs
    ]
    boxes = [
        [(x, run.first_block + y * run.num_blocks) for x, y in box]
        for run, box in zip(runs, corners, strict=True)
    ]
    style = group_style(group)
    collection = PolyCollection(
        boxes, label=f"group {group}: {name}", linewidth=0, antialiased=False, **style
    )
    ax.add_collection(collection)


def _draw_boundaries(ax: "Axes", cells: np.ndarray) -> None:
    """A line wherever two neighbouring cells have different holders."""
    from matplotlib.collections import LineCollection

    padded = np.pad(cells, 1)
    lines = []
    for block, step in np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]):
        lines.append([(step, block), (step + 1, block)])
    for block, step in np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]):
        lines.append([(step, block), (step, block + 1)])
    width = 0.7 if len(lines) < 4000 else 0.3
    ax.add_collection(LineCollection(lines, color=INK, linewidth=width, capstyle="projecting"))


def _label(ax: "Axes", runs: Sequence[_Run]) -> None:
    """Each holder's name once, in its largest patch, where it fits."""
    width, height = axes_inches(ax)
    per_step = width / max(ax.get_xlim()[1], 1)
    per_block = height / max(ax.get_ylim()[0], 1)
    largest: dict[Holder, _Run] = {}
    for run in runs:
        best = largest.get(run.holder)
        if best is None or _area(run) > _area(best):
            largest[run.holder] = run
    for holder, run in largest.items():
        text = ", ".join(map(str, holder.requests)) or "sink"
        box = (run.stop - run.start) * per_step, run.num_blocks * per_block
        if fits(text, box[0]) and box[1] > SMALL / 72:
            at = (run.start + run.stop) / 2, run.first_block + run.num_blocks / 2
            colour = group_colour(holder.group)
            pad = {"facecolor": colour, "edgecolor": "none", "pad": 0.5}
            ax.text(
                *at,
                text,
                ha="center",
                va="center",
                fontsize=SMALL,
                color=text_colour(colour),
                bbox=pad,
            )


def _area(run: _Run) -> int:
    return run.num_blocks * (run.stop - run.start)


def _count_hand_overs(runs: Sequence[_Run]) -> tuple[int, int]:
    """Blocks handed out, and of those the ones that another group had before."""
    handed = changed = 0
    last: dict[int, _Run] = {}
    for run in sorted(runs, key=lambda run: run.start):
        for block in range(run.first_block, run.first_block + run.num_blocks):
            before = last.get(block)
            last[block] = run
            if before is None or not _goes_on(before, run):
                handed += 1
                changed += before is not None and before.holder.group != run.holder.group
    return handed, changed


def _goes_on(before: _Run, run: _Run) -> bool:
    """Is this the same holding, which others joined or left?"""
    both = {*before.holder.requests} & {*run.holder.requests}
    return before.stop == run.start and before.holder.group == run.holder.group and bool(both)
