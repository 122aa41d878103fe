"""Pictures of a pool, step by step: who holds each block, and what blocks are used for."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
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
    legend_below,
    new_axes,
    number_cells,
    write_in,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USES = "of one request", "shared", "cached and free", "free"
USE_COLOURS = group_colour(0), group_colour(2), group_colour(1), PALE


class Holder(NamedTuple):
    """The holder of a block: a group of layers, for one request or for several that share it."""

    group: int
    requests: tuple[Hashable, ...]


Snapshot = Mapping[int, Holder]


class _Patch(NamedTuple):
    """Consecutive blocks that one holder has from step ``start`` to before step ``stop``."""

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


def plot_pool_over_time(plan: Plan, snapshots: Sequence[Snapshot]) -> "Figure":
    """Draws blocks against steps, coloured by the group that holds them.

    The names of holders stand where they fit. The title counts the blocks that
    were allocated, and those of them that another group held before: zeroing is for these. Of
    a plan with one group, it says how many blocks are used at most, and how many are shared.

    Args:
      plan: of the manager.
      snapshots: of `snapshot_blocks`, one per step.

    Raises:
      ValueError: no snapshots, or one with a block or group that the plan does not have.
    """
    check_kind(Plan, plan=plan)
    _check_snapshots(plan, snapshots)
    ax = new_axes(9, min(2.2 + 0.14 * plan.num_blocks, 7))
    patches = list(_patches(plan.num_blocks, snapshots))
    for group in sorted({patch.holder.group for patch in patches}):
        own = [patch for patch in patches if patch.holder.group == group]
        bars = ax.barh(
            [patch.first_block + (patch.num_blocks - 1) / 2 for patch in own],
            [patch.stop - patch.start for patch in own],
            [patch.num_blocks for patch in own],
            [patch.start - 0.5 for patch in own],
            color=group_colour(group),
            edgecolor=INK,
            linewidth=0.5,
            label=f"group {group}: {plan.groups[group]}",
        )
        write_in(ax, bars, [", ".join(map(str, p.holder.requests)) or "sink" for p in own])
    ax.set(xlim=(-0.5, len(snapshots) - 0.5), ylim=(plan.num_blocks - 0.5, -0.5))
    number_cells(ax, "xy")
    legend_below(ax)
    return finish(ax, _title(plan, snapshots), xlabel="step", ylabel="block (0: null block)")


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


def _patches(num_blocks: int, snapshots: Sequence[Snapshot]) -> Iterator[_Patch]:
    """Yields rectangles of one holder: stretches of steps, joined over neighbouring blocks."""
    growing: dict[tuple[int, int, Holder], _Patch] = {}
    for block in range(num_blocks):
        step, now = 0, dict[tuple[int, int, Holder], _Patch]()
        for holder, steps in itertools.groupby(snapshot.get(block) for snapshot in snapshots):
            start, step = step, step + len(list(steps))
            if holder is not None:
                key = start, step, Holder(*holder)
                before = growing.pop(key, _Patch(key[2], block, 0, start, step))
                now[key] = before._replace(num_blocks=before.num_blocks + 1)
        yield from growing.values()
        growing = now
    yield from growing.values()


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
    tops = np.cumsum(uses, axis=1)
    edges = np.arange(len(uses) + 1) - 0.5
    below = np.zeros(len(uses))
    for label, colour, top in zip(USES, USE_COLOURS, tops.T, strict=True):
        if (top > below).any():
            ax.stairs(top, edges, baseline=below, fill=True, label=label, color=colour)
        below = top
    label = count_of(len(preemptions), "preemption")
    if preemptions:
        ax.plot(preemptions, [below.max()] * len(preemptions), "kv", markersize=5, label=label)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, below.max() * 1.08))
    number_cells(ax, "x")
    legend_below(ax)
    title = f"Up to {tops[:, 1].max():,} of {count_of(int(below.max()), 'block')} allocated"
    title += "".join(
        f", {most:,} {name}"
        for name, most in zip(USES[1:3], np.max(uses, axis=0)[1:3], strict=True)
        if most
    )
    if preemptions:
        title += f"; {label}"
    return finish(ax, title, xlabel="step", ylabel="blocks")
