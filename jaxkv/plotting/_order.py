"""The physical orders: which element lies where."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.checks import check_count, check_positive
from jaxkv.kernel_blocks import LAYOUT_ORDERS, CacheLayout
from jaxkv.plotting._style import SMALL, axes_of, count_of, finish, new_figure
from jaxkv.rich_repr import text_colour
from jaxkv.specs import FullAttentionSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {"L": "layer", "B": "block", "H": "head", "N": "token"}


def plot_order(
    order: str | CacheLayout,
    *,
    num_layers: int = 2,
    num_blocks: int = 3,
    num_heads: int = 2,
    block_size: int = 4,
    block_id: int = 1,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws a physical order: memory from left to right, and above it whose each element is.

    Each cell is one head of one token of one layer, K and V together. A row per axis shows
    its index, the axis that changes slowest on top. Black below: where one block of one
    layer lies; grey: the same block of the other layers.

    Args:
      order: one of `LAYOUT_ORDERS`, ``"NHD"``, ``"HND"``, or a `CacheLayout`.
      num_layers, num_blocks, num_heads, block_size: of the toy cache to draw; small.
      block_id: the block to mark, of layer 0.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: an unknown order, sizes below 1, tiles that do not divide the block size,
        or a block beyond the last.
    """
    layout = order if isinstance(order, CacheLayout) else CacheLayout(order)
    check_count(block_id=block_id)
    sizes = {"L": num_layers, "B": num_blocks, "H": num_heads, "N": block_size}
    check_positive(num_layers=num_layers, num_heads=num_heads)
    if block_id >= num_blocks:
        raise ValueError(f"block_id={block_id} is not one of num_blocks={num_blocks}")
    index = _addresses(layout, sizes)
    letters = layout.order.replace("C", "")
    ax = axes_of(ax, 10, 2.2)
    for line, letter in enumerate(letters):
        _draw_axis(ax, line, index[letter], sizes[letter])
    ours = index["B"] == block_id
    first = ours & (index["L"] == 0)
    _mark_runs(ax, len(letters) + 0.15, first, "black")
    _mark_runs(ax, len(letters) + 0.15, ours & ~first, "#999999")
    names = [AXIS_NAMES[letter] for letter in letters]
    ax.set_yticks(
        [*(line + 0.5 for line in range(len(letters))), len(letters) + 0.5],
        [*names, f"block {block_id}"],
    )
    ax.set(xlim=(0, len(ours)), ylim=(len(letters) + 0.9, 0), xticks=[])
    ax.tick_params(length=0)
    one, every = count_of(_runs(first), "run"), count_of(_runs(ours), "run")
    tiles = f" in tiles of {layout.tile_tokens} tokens" if layout.tile_tokens else ""
    runs = f"block {block_id} of layer 0 is {one} of memory, of all layers {every}"
    figure = finish(ax, f"{layout.order}{tiles}: {runs}")
    ax.spines[["left", "bottom"]].set_visible(False)
    return figure


def plot_orders(orders: Sequence[str | CacheLayout] = LAYOUT_ORDERS, **sizes: int) -> "Figure":
    """`plot_order` for several orders, one below the other.

    Args:
      orders: None given: all six.
      sizes: the numbers that `plot_order` takes.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no orders, or as `plot_order`.
    """
    if not orders or isinstance(orders, str):
        raise ValueError(f"orders={orders!r} must be a sequence of at least one; write ('NHD',)")
    figure = new_figure(10, 1.95 * len(orders))
    for order, ax in zip(orders, figure.subplots(len(orders), squeeze=False)[:, 0], strict=True):
        plot_order(order, ax=ax, **sizes)
    return figure


def _addresses(layout: CacheLayout, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Per axis, its index at every address, worked out from the views' strides."""
    spec = FullAttentionSpec(
        block_size=sizes["N"], num_kv_heads=sizes["H"], head_size=1, dtype="f32"
    )
    total = sizes["L"] * sizes["B"] * sizes["H"] * sizes["N"]
    index = {letter: np.zeros(total, int) for letter in "LBHN"}
    # Whole blocks of tiles may have no strides; tiles, read as kernel blocks, always do.
    tokens = layout.tile_tokens or sizes["N"]
    where = {"num_blocks": sizes["B"], "num_layers": sizes["L"], "kernel_block_size": tokens}
    for layer in range(sizes["L"]):
        view = layout.view(spec, layer=layer, **where)
        axes = [letter for letter in view.axes if letter != "C"]
        steps = dict(zip(view.axes, view.strides, strict=True))
        width = view.shape[view.axes.index("C")]
        grid = np.indices([view.shape[view.axes.index(letter)] for letter in axes])
        offsets = sum(steps[letter] * grid[i] for i, letter in enumerate(axes)) + view.offset
        at = np.asarray(offsets).reshape(-1) // width
        index["L"][at] = layer
        for i, letter in enumerate(axes):
            index[letter][at] = grid[i].reshape(-1)
    index["B"], part = np.divmod(index["B"], sizes["N"] // tokens)
    index["N"] += part * tokens
    return index


def _draw_axis(ax: "Axes", line: int, values: np.ndarray, size: int) -> None:
    """A row of runs of equal values, darker for larger ones, each with its number."""
    for start, stop in _spans(values):
        value = int(values[start])
        shade = 0.95 - 0.55 * value / max(size - 1, 1)
        colour = f"#{int(86 * shade):02x}{int(180 * shade):02x}{int(255 * shade):02x}"
        box = {"color": colour, "edgecolor": "white", "linewidth": 0.8}
        ax.barh(line + 0.5, stop - start, 0.94, left=start, **box)
        at = (start + stop) / 2, line + 0.5
        ink = text_colour(colour)
        ax.text(*at, str(value), ha="center", va="center", fontsize=SMALL, color=ink)


def _mark_runs(ax: "Axes", top: float, where: np.ndarray, colour: str) -> None:
    for start, stop in _spans(where):
        if where[start]:
            ax.barh(top + 0.3, stop - start - 0.16, 0.5, left=start + 0.08, color=colour)


def _spans(values: np.ndarray) -> Iterable[tuple[int, int]]:
    ends = [0, *(np.flatnonzero(np.diff(values.astype(int))) + 1).tolist(), len(values)]
    return itertools.pairwise(ends)


def _runs(where: np.ndarray) -> int:
    return sum(bool(where[start]) for start, _ in _spans(where))
