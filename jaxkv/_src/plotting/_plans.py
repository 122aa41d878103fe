"""Pictures of a plan: requests against their length, and the parts of the memory."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv._src.internal.checks import check_count, check_kind, check_positive
from jaxkv._src.internal.html import group_colour
from jaxkv._src.internal.text import readable
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import LABEL, PALE, UNUSED, byte_unit, count_of, finish, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = [group_colour(i) for i in (0, 1, 2, 5, 4, 6, 7)]  # without yellow, too pale for a line
LINES, MARKERS = ("-", "--", "-.", ":"), "osD^vP*X"


def plot_length_against_requests(plans: Plan | Mapping[str, Plan]) -> "Figure":
    """Draws the number of requests that run at once against their length.

    Args:
      plans: one plan, or several by name.

    Raises:
      ValueError: no plans, or none that admits a request.
    """
    named = {"": plans} if isinstance(plans, Plan) else plans
    check_kind(Mapping, plans=named)
    check_kind(Plan, **{f"plans[{name!r}]": plan for name, plan in named.items()})
    curves = {name: points for name, plan in named.items() if (points := _points(plan))}
    if not curves:
        raise ValueError("plans has none that admits a request; give at least one that does")
    ax = new_axes(9, 4.2)
    order = sorted(curves, key=lambda name: curves[name][-1][::-1], reverse=True)  # as they end
    for index, name in enumerate(order):
        length, count = curves[name][-1]
        ax.plot(
            *zip(*curves[name], strict=True),
            color=COLOURS[index % len(COLOURS)],
            linestyle=LINES[index % len(LINES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=[-1],
            clip_on=False,
            drawstyle="steps-pre",
            label=f"{name}: {count:,} x {length:,}".removeprefix(": "),
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.margins(x=0)
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    ax.yaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    ax.yaxis.set_minor_formatter("")
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.legend(loc="lower left", bbox_to_anchor=(1.02, 0), frameon=False, fontsize=LABEL)
    memory = {sum(plan.memory_bytes) for plan in named.values()}
    within = f" in {readable(memory.pop())}" if len(memory) == 1 else ""
    title = f"Requests of one length that run at once{within}"
    return finish(ax, title, xlabel="tokens per request", ylabel="requests at once")


def _points(plan: Plan) -> list[tuple[int, int]]:
    """Returns lengths up to the longest, and the number of requests of each that run at once."""
    longest = plan.max_model_len
    lengths = np.geomspace(min(128, max(1, longest // 8)), max(longest, 1), 80).round()
    points = [(n, plan.requests_that_fit(n)) for n in np.unique(lengths.astype(int)).tolist()]
    return [point for point in points if point[1]]


class _Part(NamedTuple):
    """A part of a worker's memory. ``data_bytes`` of it carry data; ``text`` counts its blocks."""

    name: str
    text: str
    num_bytes: int
    data_bytes: int
    colour: str = PALE


def plot_memory(plan: Plan, num_tokens: int | None = None, *, worker: int = 0) -> "Figure":
    """Draws the parts of a worker's memory when as many requests run as fit.

    One bar, with a row for each part: the blocks that each group holds while all those
    requests decode (hatched: bytes of these blocks that carry no data), the blocks that one
    request in prefill needs beyond those, blocks too few for one more request, blocks that
    no request gets, and bytes too few for a block.

    Args:
      plan: from `plan_cache`.
      num_tokens: length of each request; None: ``plan.max_model_len``.
      worker: index into ``plan.layouts``.

    Raises:
      ValueError: a length that the plan does not admit, or no such worker.
    """
    check_kind(Plan, plan=plan)
    length = plan.max_model_len if num_tokens is None else num_tokens
    check_positive(num_tokens=length)
    if not plan.admits(length):
        raise ValueError(f"num_tokens={length:,}; the plan admits {plan.max_model_len:,} at most")
    check_count(worker=worker)
    if worker >= len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    parts = [part for part in _split(plan, length, worker) if part.num_bytes]
    ax = new_axes(9, 1.2 + 0.36 * len(parts))
    unit, size = byte_unit(plan.memory_bytes[worker])
    start = 0
    for row, part in enumerate(parts):
        box = {"height": 0.72, "left": start / size}
        ax.barh(row, part.num_bytes / size, **box, **UNUSED)
        ax.barh(row, part.data_bytes / size, **box, color=part.colour)
        start += part.num_bytes
    ax.set(xlim=(0, start / size), ylim=(len(parts) - 0.5, -0.5))
    ax.set_yticks(range(len(parts)), [part.name for part in parts])
    right = ax.secondary_yaxis("right")
    right.set_yticks(range(len(parts)), [part.text for part in parts], fontsize=LABEL)
    right.spines["right"].set_visible(False)
    right.tick_params(length=0)
    title = (
        f"{count_of(plan.requests_that_fit(length), 'request')} of {length:,} tokens at once in "
        f"{readable(plan.memory_bytes[worker])}: {plan.num_blocks:,} blocks of "
        f"{plan.bytes_per_block[worker]:,} bytes"
    )
    return finish(ax, title, xlabel=f"memory, {unit}")


def _split(plan: Plan, length: int, worker: int) -> Iterator[_Part]:
    """Yields all parts; some may be empty."""
    size, fit = plan.bytes_per_block[worker], plan.requests_that_fit(length)
    steady = plan.steady_blocks_per_group(length)
    for index, (each, group) in enumerate(zip(steady, plan.layouts[worker].groups, strict=True)):
        num_bytes, data = fit * each * size, fit * each * sum(s.data_bytes for s in group.specs)
        text = f"{readable(num_bytes)}, " + (f"{fit:,} x " if fit > 1 else "")
        text += count_of(each, "block")
        if 0 < data < num_bytes:
            text += f", {100 * (1 - data / num_bytes):.0f} % unused"
        yield _Part(f"group {index}: {group}", text, num_bytes, data, group_colour(index))
    prefill = min(plan.admission_blocks(length) - sum(steady), plan.usable_blocks)
    for name, blocks in {
        "more while one prefills": prefill,
        "free, too few for one more": plan.usable_blocks - fit * sum(steady) - prefill,
        "null block and reserved": plan.reserved_blocks,
    }.items():
        text = f"{readable(blocks * size)}, {count_of(blocks, 'block')}"
        yield _Part(name, text, blocks * size, blocks * size)
    rest = max(plan.memory_bytes[worker] - plan.num_blocks * size, 0)
    yield _Part("less than a block", readable(rest), rest, rest)
