"""A picture of the pool over time: which group holds how many blocks."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxkv.demo.engine import Report
from jaxkv.planning import Plan

STATE_COLOURS = ("#2a6f97", "#468faf", "#89c2d9", "#a9d6e5")
TOKEN_COLOURS = ("#e07a5f", "#f2a65a", "#f4d35e")


def plot_occupancy(plan: Plan, report: Report, path: pathlib.Path) -> None:
    """Writes a PNG: blocks held by each group at every step, and each preemption."""
    held = np.array(report.occupancy).T
    steps = np.arange(held.shape[1])
    labels, colours = _legend(plan)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(steps, held, labels=labels, colors=colours, step="post")
    axes.axhline(plan.usable_blocks, color="black", linewidth=1)
    axes.text(0, plan.usable_blocks, f" {plan.usable_blocks} usable blocks", va="bottom")
    if report.preemptions:
        marks = np.full(len(report.preemptions), plan.usable_blocks)
        label = f"preemption ({len(report.preemptions)})"
        axes.plot(report.preemptions, marks, "v", color="#9b2226", markersize=5, label=label)
    axes.set(
        title=f"One pool, {len(plan.groups)} groups: {report.blocks_allocated} blocks handed out "
        f"of {plan.usable_blocks}",
        xlabel="engine step",
        ylabel="blocks held",
        xlim=(0, len(steps) - 1),
        ylim=(0, plan.usable_blocks * 1.12),
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def _legend(plan: Plan) -> tuple[Sequence[str], Sequence[str]]:
    labels, colours = [], []
    counts = {"state": 0, "token": 0}
    for index, group in enumerate(plan.groups):
        kind = "state" if group.spec.kind == "state" else "token"
        palette = STATE_COLOURS if kind == "state" else TOKEN_COLOURS
        colours.append(palette[counts[kind] % len(palette)])
        counts[kind] += 1
        labels.append(f"group {index}: {len(group.layers)} {group.spec.kind} layers")
    return labels, colours
