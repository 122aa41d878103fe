"""Pictures of a pool, step by step: the requests of each block, and what blocks are used for."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv._src.blocks import BlockManager, BlockUse
from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.internal.html import group_colour
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import (
    INK,
    PALE,
    count_of,
    finish,
    new_axes,
    number_cells,
    write_in,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USES = "of one request", "shared", "cached and free", "free"
USE_COLOURS = group_colour(0), group_colour(2), group_colour(1), PALE


class Holder(NamedTuple):
    """The user of a block: a group of layers, for one request or for several that share it."""

    group: int
    requests: tuple[Hashable, ...]


Snapshot = Mapping[int, Holder]


def snapshot_blocks(manager: BlockManager) -> dict[int, Holder]:
    """Returns the holder of every block that is not free, for `plot_pool_over_time`.

    Blocks of attention sinks are allocated for no request.
    """
    check_kind(BlockManager, manager=manager)
    holders = {
        block_id: Holder(group, ())
        for group, block_ids in enumerate(manager.sink_block_ids)
        for block_id in block_ids
    }
    for request in manager.requests:
        for group, block_ids in enumerate(manager.block_ids(request)):
            for block_id in set(block_ids) - {NULL_BLOCK}:
                before = holders.get(block_id, Holder(group, ()))
                holders[block_id] = before._replace(requests=(*before.requests, request))
    return holders


def plot_pool_over_time(plan: Plan, snapshots: Sequence[Snapshot]) -> "Figure":
    """Draws blocks against steps, coloured by the group that they are allocated to.

    Requests are named where their names fit. The title counts the allocated blocks, and those
    that belonged to another group before, which zeroing is for. Of a plan with one group, it
    says how many blocks are used at most, and how many are shared, which have their own colour.

    Args:
      plan: of the manager.
      snapshots: of `snapshot_blocks`, one per step.

    Raises:
      ValueError: no snapshots, or one with a block or group that the plan does not have.
    """
    check_kind(Plan, plan=plan)
    _check_snapshots(plan, snapshots)
    ax = new_axes(9, min(2.2 + 0.14 * plan.num_blocks, 7))
    one = len(plan.groups) == 1  # whose shared blocks have a colour of their own
    # Of a group, and of what several requests share: block, start, steps, text.
    bars: dict[tuple[int, bool], list[tuple[int, int, int, str]]] = {}
    for block in sorted(set().union(*snapshots)):
        step = 0
        for holder, steps in itertools.groupby(snapshot.get(block) for snapshot in snapshots):
            start, step = step, step + len(list(steps))
            if holder is not None:
                text = ", ".join(map(str, holder[1])) or "sink"
                kind = holder[0], one and len(holder[1]) > 1
                bars.setdefault(kind, []).append((block, start, step - start, text))
    for (group, is_shared), own in sorted(bars.items()):
        blocks, starts, widths, texts = zip(*own, strict=True)
        colour = USE_COLOURS[1] if is_shared else group_colour(group)
        style = {"color": colour, "edgecolor": INK, "linewidth": 0.5}
        name = "shared by several requests" if is_shared else f"group {group}: {plan.groups[group]}"
        write_in(ax, ax.barh(blocks, widths, 1, np.array(starts) - 0.5, label=name, **style), texts)
    ax.set(xlim=(-0.5, len(snapshots) - 0.5), ylim=(plan.num_blocks - 0.5, -0.5))
    number_cells(ax.xaxis, ax.yaxis)
    labels = {"xlabel": "step", "ylabel": "block (0: null block)"}
    return finish(ax, _title(plan, snapshots), legend=True, **labels)


def _check_snapshots(plan: Plan, snapshots: Sequence[Snapshot]) -> None:
    check_each(Mapping, "what snapshot_blocks returned", snapshots=snapshots)
    if not len(snapshots):
        raise ValueError("snapshots is empty; give one of snapshot_blocks(manager) per step")
    for step, snapshot in enumerate(snapshots):
        for block_id, (group, _) in snapshot.items():
            if not (0 <= block_id < plan.num_blocks and 0 <= group < len(plan.groups)):
                raise ValueError(
                    f"snapshots[{step}] has block {block_id} of group {group}; the plan has "
                    f"{plan.num_blocks} blocks and {len(plan.groups)} groups: give the plan of the "
                    "manager"
                )


def _title(plan: Plan, snapshots: Sequence[Snapshot]) -> str:
    if len(plan.groups) > 1:
        allocated, changed = _count_allocated(snapshots)
        return f"{allocated:,} blocks allocated, {changed:,} of them after another group"
    title = f"Up to {max(map(len, snapshots)):,} of {plan.usable_blocks:,} blocks allocated"
    shared = max(sum(len(h[1]) > 1 for h in snapshot.values()) for snapshot in snapshots)
    return title + (f", {shared:,} of them shared" if shared else "")


def _count_allocated(snapshots: Sequence[Snapshot]) -> tuple[int, int]:
    """Counts blocks whose holders are all new, and those of them that another group had before."""
    allocated = changed = 0
    last: dict[int, int] = {}
    for before, snapshot in itertools.pairwise([dict[int, Holder](), *snapshots]):
        for block_id, (group, requests) in snapshot.items():
            old = before.get(block_id)
            if old is None or old[0] != group or not {*old[1]} & {*requests}:
                allocated += old is None or old[0] != group or bool(requests)  # sinks stay
                changed += last.get(block_id, group) != group
            last[block_id] = group
    return allocated, changed


def plot_block_use(uses: Sequence[BlockUse], *, preemptions: Sequence[int] = ()) -> "Figure":
    """Draws the blocks that are allocated, shared, cached and free at every step, stacked.

    Args:
      uses: per step, `BlockManager.block_use`.
      preemptions: steps at which a request was preempted.

    Raises:
      ValueError: no steps.
    """
    check_each(BlockUse, "what BlockManager.block_use was", uses=uses)
    check_each(Integral, "the number of a step", preemptions=preemptions)
    if not uses:
        raise ValueError("uses has no steps; give BlockManager.block_use of at least one")
    ax = new_axes(9, 4)
    edges, below = np.arange(len(uses) + 1) - 0.5, np.zeros(len(uses))
    for name, colour, counts in zip(USES, USE_COLOURS, np.array(uses).T, strict=True):
        if counts.any():
            ax.stairs(below + counts, edges, baseline=below, fill=True, label=name, color=colour)
        below = below + counts
    total, label = int(below.max()), count_of(len(preemptions), "preemption")
    if preemptions:
        ax.plot(preemptions, [total] * len(preemptions), "kv", markersize=5, label=label)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, total * 1.08))
    number_cells(ax.xaxis)
    most = max(own + shared for own, shared, *_ in uses)
    title = f"Up to {most:,} of {count_of(total, 'block')} allocated"
    for name, count in zip(USES[1:3], np.max(uses, axis=0)[1:3], strict=True):
        title += f", {count:,} {name}" if count else ""
    title += f"; {label}" if preemptions else ""
    return finish(ax, title, legend=True, xlabel="step", ylabel="blocks")
