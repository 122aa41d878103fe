"""The physical orders: the place of every element in memory."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv._src.internal.checks import check_count, check_positive
from jaxkv._src.internal.html import text_colour
from jaxkv._src.internal.text import shown
from jaxkv._src.layout import ORDERS, PagePlacement, PhysicalOrder
from jaxkv._src.plotting._style import SMALL, axes_of, count_of, finish, new_figure
from jaxkv._src.specs import FullAttentionSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {"L": "layer", "B": "block", "H": "head", "N": "token"}


def plot_order(
    order: str | PhysicalOrder,
    *,
    num_layers: int = 2,
    num_blocks: int = 3,
    num_heads: int = 2,
    block_size: int = 4,
    block_id: int = 1,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws memory in a physical order from left to right, and the owner of each element.

    Each cell is one head of one token of one layer, K and V together. A row per axis shows
    its index, the slowest axis on top. The marks below are one block: of layer 0 in black, of
    the other layers in grey.

    Args:
      order: one of `jaxkv.layout.ORDERS`, ``"NHD"``, ``"HND"``, or a `PhysicalOrder`.
      num_layers, num_blocks, num_heads, block_size: of the toy cache to draw; small.
      block_id: the block to mark.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: an unknown order, sizes below 1, tiles that do not divide the block size,
        or a block beyond the last.
    """
    physical = order if isinstance(order, PhysicalOrder) else PhysicalOrder(order)
    check_count(block_id=block_id)
    sizes = {"L": num_layers, "B": num_blocks, "H": num_heads, "N": block_size}
    check_positive(num_layers=num_layers, num_blocks=num_blocks, num_heads=num_heads)
    if block_id >= num_blocks:
        raise ValueError(f"block_id={block_id} is not one of num_blocks={num_blocks}")
    index = _addresses(physical, sizes)
    letters = physical.order.replace("C", "")
    ax = axes_of(ax, 10, 2.2)
    for line, letter in enumerate(letters):
        _draw_axis(ax, line, index[letter], sizes[letter])
    marked = index["B"] == block_id
    first = marked & (index["L"] == 0)
    _mark(ax, len(letters) + 0.15, first, "black")
    _mark(ax, len(letters) + 0.15, marked & ~first, "#999999")
    names = [AXIS_NAMES[letter] for letter in letters]
    ax.set_yticks(
        [*(line + 0.5 for line in range(len(letters))), len(letters) + 0.5],
        [*names, f"block {block_id}"],
    )
    ax.set(xlim=(0, len(marked)), ylim=(len(letters) + 0.9, 0), xticks=[])
    ax.tick_params(length=0)
    figure = finish(ax, _title(physical, block_id, _count_extents(first), _count_extents(marked)))
    ax.spines[["left", "bottom"]].set_visible(False)
    return figure


def plot_orders(orders: Sequence[str | PhysicalOrder] = ORDERS, **sizes: int) -> "Figure":
    """Draws `plot_order` for several orders, one below the other.

    Args:
      orders: the orders; left out: all six.
      sizes: the numbers that `plot_order` takes.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: no orders, or as `plot_order`.
    """
    if not isinstance(orders, Sequence) or isinstance(orders, str) or not orders:
        raise ValueError(
            f"orders={shown(orders)} must be a sequence of at least one; write ('NHD',)"
        )
    figure = new_figure(10, 1.95 * len(orders))
    for order, ax in zip(orders, figure.subplots(len(orders), squeeze=False)[:, 0], strict=True):
        plot_order(order, ax=ax, **sizes)
    return figure


def _title(order: PhysicalOrder, block_id: int, one: int, every: int) -> str:
    tiles = f" in tiles of {order.tile_tokens} tokens" if order.tile_tokens else ""
    return (
        f"{order.order}{tiles}: block {block_id} of layer 0 is {count_of(one, 'extent')}, "
        f"of all layers {count_of(every, 'extent')}"
    )


def _addresses(order: PhysicalOrder, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns the index on each axis at every address, worked out from the views' strides."""
    spec = FullAttentionSpec(
        block_size=sizes["N"], num_kv_heads=sizes["H"], head_size=1, dtype="f32"
    )
    total = sizes["L"] * sizes["B"] * sizes["H"] * sizes["N"]
    cell_bytes = spec.token_bytes // sizes["H"]
    index = {letter: np.zeros(total, int) for letter in "LBHN"}
    # Whole blocks of tiles may have no strides; tiles, read as kernel blocks, always do.
    tokens = order.tile_tokens or sizes["N"]
    for layer in range(sizes["L"]):
        place = PagePlacement(num_blocks=sizes["B"], num_layers=sizes["L"], layer=layer)
        view = order.view(spec, place, kernel_block_size=tokens)
        axes = [letter for letter in view.axes if letter != "C"]
        steps = dict(zip(view.axes, view.strides_bytes, strict=True))
        grid = np.indices([view.shape[view.axes.index(letter)] for letter in axes])
        offsets = sum(steps[letter] * grid[i] for i, letter in enumerate(axes)) + view.offset_bytes
        at = np.asarray(offsets).reshape(-1) // cell_bytes
        index["L"][at] = layer
        for i, letter in enumerate(axes):
            index[letter][at] = grid[i].reshape(-1)
    index["B"], tile = np.divmod(index["B"], sizes["N"] // tokens)
    index["N"] += tile * tokens
    return index


def _draw_axis(ax: "Axes", line: int, values: np.ndarray, size: int) -> None:
    """Draws a row of stretches of equal values, darker for larger ones, each with its number."""
    for start, stop in _stretches(values):
        value = int(values[start])
        shade = 0.95 - 0.55 * value / max(size - 1, 1)
        colour = f"#{int(86 * shade):02x}{int(180 * shade):02x}{int(255 * shade):02x}"
        box = {"color": colour, "edgecolor": "white", "linewidth": 0.8}
        ax.barh(line + 0.5, stop - start, 0.94, left=start, **box)
        at = (start + stop) / 2, line + 0.5
        ink = text_colour(colour)
        ax.text(*at, str(value), ha="center", va="center", fontsize=SMALL, color=ink)


def _mark(ax: "Axes", top: float, where: np.ndarray, colour: str) -> None:
    for start, stop in _stretches(where):
        if where[start]:
            ax.barh(top + 0.3, stop - start - 0.16, 0.5, left=start + 0.08, color=colour)


def _stretches(values: np.ndarray) -> Iterable[tuple[int, int]]:
    """Yields the start and the end of every stretch of equal values."""
    ends = [0, *(np.flatnonzero(np.diff(values.astype(int))) + 1).tolist(), len(values)]
    return itertools.pairwise(ends)


def _count_extents(where: np.ndarray) -> int:
    return sum(bool(where[start]) for start, _ in _stretches(where))
