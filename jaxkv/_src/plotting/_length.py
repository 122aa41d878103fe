"""The requests that run at once, for every length."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxkv._src.internal.checks import check_each, check_kind, check_positive
from jaxkv._src.internal.html import GROUP_COLOURS
from jaxkv._src.internal.text import readable
from jaxkv._src.planning import Plan
from jaxkv._src.plotting._style import INK, LABEL, axes_of, finish, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Yellow is too pale for a line.
CURVES = tuple("#000000" if colour == "#F0E442" else colour for colour in GROUP_COLOURS)
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def plot_length_against_requests(
    plans: Plan | Mapping[str, Plan],
    lengths: Sequence[int] | None = None,
    *,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws the number of requests that run at once against their length.

    Args:
      plans: one plan, or several by name.
      lengths: tokens per request; None: from about 128 tokens to the longest that a plan admits.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no plans, or lengths that none of them admits.
    """
    named = {"": plans} if isinstance(plans, Plan) else plans
    check_kind(Mapping, plans=named)
    if not named:
        raise ValueError("plans is empty; give at least one")
    check_kind(Plan, **{f"plans[{name!r}]": plan for name, plan in named.items()})
    longest = max(plan.max_model_len for plan in named.values())
    lengths = _lengths(longest) if lengths is None else lengths
    check_each(int, "a number of tokens", lengths=lengths)
    check_positive(**{f"lengths[{i}]": length for i, length in enumerate(lengths)})
    ax = axes_of(ax, 9, 4.2)
    ends: dict[str, tuple[int, tuple[int, int]]] = {}
    shown: list[int] = []
    for index, (name, plan) in enumerate(named.items()):
        points = [(n, plan.requests_that_fit(n)) for n in {*lengths, plan.max_model_len}]
        points = sorted((n, fit) for n, fit in points if fit)
        if points:
            _draw_curve(ax, index, points)
            ends[name] = index, points[-1]
            shown += [length for length, _ in points]
    if not ends:
        raise ValueError(f"lengths: none of {list(lengths)} fits into any plan; give shorter ones")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(min(shown), max(max(shown), min(shown) + 1))
    _label_ends(ax, ends)
    _tick(ax)
    title = "Requests of one length that run at once"
    memory = {sum(plan.memory_bytes) for plan in named.values()}
    if len(memory) == 1:
        title += f" in {readable(memory.pop())}"
    return finish(ax, title, xlabel="tokens per request", ylabel="requests at once")


def _lengths(longest: int) -> list[int]:
    """Returns eight lengths per doubling, and the ends."""
    first = min(128, max(1, longest // 8))
    steps = range(8 * max(0, int(math.log2(longest / first))) + 8)
    return sorted({min(longest, round(first * 2 ** (step / 8))) for step in steps} | {longest})


def _draw_curve(ax: "Axes", index: int, points: Sequence[tuple[int, int]]) -> None:
    style = {"color": CURVES[index % len(CURVES)], "linestyle": LINES[index % len(LINES)]}
    ax.plot(*zip(*points, strict=True), drawstyle="steps-pre", linewidth=1.8, **style)
    marker = MARKERS[index % len(MARKERS)]
    ax.plot(*points[-1], marker, color=style["color"], markeredgecolor=INK, clip_on=False)


def _label_ends(ax: "Axes", ends: Mapping[str, tuple[int, tuple[int, int]]]) -> None:
    """Names each curve and its last point at the right margin, tied to it by a thin line."""
    low, high = (math.log(limit) for limit in ax.get_ylim())
    heights = [(math.log(fit) - low) / (high - low) for _, (_, fit) in ends.values()]
    moved = spread(heights, 0.075)
    beyond = max(0.0, max(moved) - 1)
    for height, (name, (index, (length, fit))) in zip(moved, ends.items(), strict=True):
        text = f"{name}: {fit:,} x {length:,}" if name else f"{fit:,} x {length:,}"
        colour = CURVES[index % len(CURVES)]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)}
        where = {"xytext": (1.03, height - beyond), "textcoords": "axes fraction"}
        ax.annotate(text, (length, fit), va="center", fontsize=LABEL, arrowprops=line, **where)


def _tick(ax: "Axes") -> None:
    from matplotlib.ticker import LogLocator

    low, high = ax.get_ylim()
    if high < 300 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: _short(value))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.grid(color="#dddddd", linewidth=0.6)


def _short(tokens: float) -> str:
    """Returns tokens as people say them: 1k for 1024."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"
