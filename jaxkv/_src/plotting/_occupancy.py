"""The blocks that each group holds, and what blocks are used for, step by step."""

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv._src.blocks import BlockUse
from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import (
    INK,
    PALE,
    axes_of,
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
    check_each(Collection, "what BlockManager.held_blocks returned", held_blocks=held_blocks)
    check_each(Integral, "the number of a step", preemptions=preemptions)
    lengths = {len(held) for held in held_blocks}
    if lengths != {len(plan.groups)}:
        raise ValueError(
            f"held_blocks has steps of {sorted(lengths)} groups; give at least one step, each with "
            f"the {len(plan.groups)} groups of the plan"
        )
    ax = axes_of(ax, 10, 4)
    labels = [f"group {index}: {group}" for index, group in enumerate(plan.groups)]
    styles = [group_style(index) for index in range(len(plan.groups))]
    tops = _stack(ax, np.array(held_blocks).T, labels, styles)
    ax.axhline(plan.usable_blocks, color=INK, linewidth=1)
    _mark(ax, preemptions, plan.usable_blocks)
    ax.set(ylim=(0, plan.usable_blocks * 1.08))
    legend_below(ax)
    peak = 100 * tops.max() / max(plan.usable_blocks, 1)
    title = f"Up to {peak:.0f} % of {plan.usable_blocks:,} usable blocks (the line) are held"
    return finish(ax, title, xlabel="step", ylabel="blocks held")


def plot_block_use(
    uses: Sequence[BlockUse], *, preemptions: Sequence[int] = (), ax: "Axes | None" = None
) -> "Figure":
    """Draws the blocks that are held, shared, warm and cold at every step, stacked.

    Args:
      uses: per step, `BlockManager.block_use`.
      preemptions: steps at which a request was preempted.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no steps.
    """
    check_each(BlockUse, "what BlockManager.block_use was", uses=uses)
    check_each(Integral, "the number of a step", preemptions=preemptions)
    if not uses:
        raise ValueError("uses has no steps; give BlockManager.block_use of at least one")
    ax = axes_of(ax, 10, 4)
    labels = ["one holder", "shared by several", "warm: free, and kept", "cold: free"]
    styles = [group_style(0), group_style(2), group_style(1), {"facecolor": PALE}]
    tops = _stack(ax, np.array(uses).T, labels, styles)
    _mark(ax, preemptions, int(tops.max()))
    ax.set(ylim=(0, tops.max() * 1.08))
    legend_below(ax)
    shared = 100 * max(use.shared / max(use.own + use.shared, 1) for use in uses)
    title = f"Up to {shared:.0f} % of the blocks that are held have several holders"
    return finish(ax, title, xlabel="step", ylabel="blocks")


def _stack(
    ax: "Axes",
    values: np.ndarray,
    labels: Sequence[str],
    styles: Sequence[Mapping[str, Any]],
) -> np.ndarray:
    """Draws rows of values, [rows, steps], on top of each other. Returns the topmost edge."""
    edges = np.arange(values.shape[1] + 1)
    tops = np.cumsum(values, axis=0)
    for row, label, style in zip(range(len(values)), labels, styles, strict=True):
        below = tops[row] - values[row]
        ax.stairs(tops[row], edges, baseline=below, fill=True, label=label, linewidth=0, **style)
    ax.set(xlim=(0, values.shape[1]))
    tick_cells(ax, "x", values.shape[1])
    return tops[-1]


def _mark(ax: "Axes", preemptions: Sequence[int], height: int) -> None:
    if len(preemptions):
        label = count_of(len(preemptions), "preemption")
        marks = [height] * len(preemptions)
        ax.plot(preemptions, marks, "v", color="black", markersize=5, label=label)
