"""The picture of a pool over time: the holder of every block."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager
from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.internal.html import group_colour, text_colour
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import (
    INK,
    SMALL,
    axes_inches,
    axes_of,
    finish,
    fits,
    group_style,
    legend_below,
    tick_cells,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Holder(NamedTuple):
    """The holder of a block: a group of layers, for one request or for several that share it."""

    group: int
    requests: tuple[Hashable, ...]


Snapshot = Mapping[int, Holder]


class _Patch(NamedTuple):
    """Consecutive blocks that one holder has from step ``start`` to step ``stop``."""

    holder: Holder
    first_block: int
    num_blocks: int
    start: int
    stop: int


def snapshot_blocks(manager: BlockManager) -> dict[int, Holder]:
    """Returns the holder of every block that is not free, for `plot_pool_over_time`.

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
    its largest patch, if it fits. The title counts the blocks that were handed out, and those
    of them that another group held before: zeroing is for these.

    Args:
      plan: of the manager.
      snapshots: of `snapshot_blocks`, one per step.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no snapshots, or one with a block or group that the plan does not have.
    """
    check_kind(Plan, plan=plan)
    cells, holders = _cells(plan, snapshots)
    ax = axes_of(ax, 10, min(2.2 + 0.14 * plan.num_blocks, 7))
    ax.set(xlim=(0, cells.shape[1]), ylim=(cells.shape[0], 0))
    patches = list(_patches(cells, holders))
    for group in sorted({patch.holder.group for patch in patches}):
        _fill(ax, f"group {group}: {plan.groups[group]}", group, patches)
    tick_cells(ax, "y", cells.shape[0])
    tick_cells(ax, "x", cells.shape[1])
    _draw_boundaries(ax, cells)
    _label(ax, patches)
    legend_below(ax)
    handed, changed = _count_hand_overs(patches)
    title = f"{handed:,} blocks handed out, {changed:,} of them from one group to another"
    return finish(ax, title, xlabel="step", ylabel="block (0: null block)")


def _cells(plan: Plan, snapshots: Sequence[Snapshot]) -> tuple[np.ndarray, list[Holder]]:
    """Returns int[num_blocks, steps], holders counted from 1 and 0 for free; and the holders."""
    check_each(Mapping, "what snapshot_blocks returned", snapshots=snapshots)
    if not len(snapshots):
        raise ValueError("snapshots is empty; give one of snapshot_blocks(manager) per step")
    cells = np.zeros((plan.num_blocks, len(snapshots)), int)
    numbers: dict[Holder, int] = {}
    for step, snapshot in enumerate(snapshots):
        for block_id, holder in snapshot.items():
            if not (0 <= block_id < plan.num_blocks and 0 <= holder.group < len(plan.groups)):
                raise ValueError(
                    f"snapshots[{step}] has block {block_id} of group {holder.group}; the plan has "
                    f"{plan.num_blocks} blocks and {len(plan.groups)} groups: give the plan of the "
                    "manager"
                )
            cells[block_id, step] = numbers.setdefault(Holder(*holder), len(numbers) + 1)
    return cells, list(numbers)


def _patches(cells: np.ndarray, holders: Sequence[Holder]) -> Iterator[_Patch]:
    """Yields rectangles of one holder: stretches of time, joined over neighbouring blocks."""
    growing: dict[tuple[int, int, int], _Patch] = {}
    for block, row in enumerate(cells):
        ends = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        now = {}
        for start, stop in itertools.pairwise(ends):
            if number := int(row[start]):
                key = start, stop, number
                before = growing.pop(key, _Patch(holders[number - 1], block, 0, start, stop))
                now[key] = before._replace(num_blocks=before.num_blocks + 1)
        yield from growing.values()
        growing = now
    yield from growing.values()


def _fill(ax: "Axes", label: str, group: int, patches: Sequence[_Patch]) -> None:
    """Draws the patches of a group."""
    from matplotlib.collections import PolyCollection

    boxes = []
    for patch in patches:
        if patch.holder.group == group:
            top, bottom = patch.first_block, patch.first_block + patch.num_blocks
            left, right = patch.start, patch.stop
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    style = group_style(group)
    ax.add_collection(PolyCollection(boxes, label=label, linewidth=0, antialiased=False, **style))


def _draw_boundaries(ax: "Axes", cells: np.ndarray) -> None:
    """Draws a line wherever two neighbouring cells have different holders."""
    from matplotlib.collections import LineCollection

    padded = np.pad(cells, 1)
    lines = []
    for block, step in np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]):
        lines.append([(step, block), (step + 1, block)])
    for block, step in np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]):
        lines.append([(step, block), (step, block + 1)])
    width = 0.7 if len(lines) < 4000 else 0.3
    ax.add_collection(LineCollection(lines, color=INK, linewidth=width, capstyle="projecting"))


def _label(ax: "Axes", patches: Sequence[_Patch]) -> None:
    """Writes each holder's name once, into its largest patch, where it fits."""
    width, height = axes_inches(ax)
    per_step = width / max(ax.get_xlim()[1], 1)
    per_block = height / max(ax.get_ylim()[0], 1)
    largest: dict[Holder, _Patch] = {}
    for patch in patches:
        best = largest.get(patch.holder)
        if best is None or _area(patch) > _area(best):
            largest[patch.holder] = patch
    for holder, patch in largest.items():
        text = ", ".join(map(str, holder.requests)) or "sink"
        box = (patch.stop - patch.start) * per_step, patch.num_blocks * per_block
        if fits(text, box[0]) and box[1] > SMALL / 72:
            at = (patch.start + patch.stop) / 2, patch.first_block + patch.num_blocks / 2
            colour = group_colour(holder.group)
            pad = {"facecolor": colour, "edgecolor": "none", "pad": 0.5}
            style = {"ha": "center", "va": "center", "fontsize": SMALL, "bbox": pad}
            ax.text(*at, text, color=text_colour(colour), **style)


def _area(patch: _Patch) -> int:
    return patch.num_blocks * (patch.stop - patch.start)


def _count_hand_overs(patches: Sequence[_Patch]) -> tuple[int, int]:
    """Counts the blocks handed out, and of those the ones that another group had before."""
    handed = changed = 0
    last: dict[int, _Patch] = {}
    for patch in sorted(patches, key=lambda patch: patch.start):
        for block in range(patch.first_block, patch.first_block + patch.num_blocks):
            before = last.get(block)
            last[block] = patch
            if before is None or not _goes_on(before, patch):
                handed += 1
                changed += before is not None and before.holder.group != patch.holder.group
    return handed, changed


def _goes_on(before: _Patch, patch: _Patch) -> bool:
    """Returns whether a patch is the same holding as before, which others joined or left."""
    both = {*before.holder.requests} & {*patch.holder.requests}
    return before.stop == patch.start and before.holder.group == patch.holder.group and bool(both)
