"""The blocks that each group holds, step by step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.planning import Plan
from jaxkv.plotting._style import (
    INK,
    axes_of,
    check_kind,
    count_of,
    finish,
    group_style,
    legend_below,
    tick_cells,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_occupancy(
    plan: Plan,
    held_blocks: Sequence[Sequence[int]],
    *,
    preemptions: Sequence[int] = (),
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws the blocks that each group holds at every step, stacked.

    Args:
      plan: of the manager.
      held_blocks: per step, what `BlockManager.held_blocks` returned.
      preemptions: steps at which a request was preempted.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no steps, or steps of another number of groups than the plan has.
    """
    check_kind(Plan, plan=plan)
    lengths = {len(held) for held in held_blocks}
    if lengths != {len(plan.groups)}:
        raise ValueError(
            f"held_blocks has steps of {sorted(lengths)} groups; give at least one step, each with "
            f"the {len(plan.groups)} groups of the plan"
        )
    ax = axes_of(ax, 10, 4)
    edges = np.arange(len(held_blocks) + 1)
    held = np.array(held_blocks).T
    tops = np.cumsum(held, axis=0)
    for group in range(len(plan.groups)):
        label = f"group {group}: {plan.groups[group]}"
        ax.stairs(
            tops[group],
            edges,
            baseline=tops[group] - held[group],
            fill=True,
            label=label,
            linewidth=0,
            **group_style(group),
        )
    ax.axhline(plan.usable_blocks, color=INK, linewidth=1)
    if len(preemptions):
        marks = [plan.usable_blocks] * len(preemptions)
        label = count_of(len(preemptions), "preemption")
        ax.plot(preemptions, marks, "v", color="black", markersize=5, label=label)
    ax.set(xlim=(0, len(held_blocks)), ylim=(0, plan.usable_blocks * 1.08))
    tick_cells(ax, "x", len(held_blocks))
    legend_below(ax)
    peak = 100 * tops[-1].max() / max(plan.usable_blocks, 1)
    title = f"Up to {peak:.0f} % of {plan.usable_blocks:,} usable blocks (the line) are held"
    return finish(ax, title, xlabel="step", ylabel="blocks held")
