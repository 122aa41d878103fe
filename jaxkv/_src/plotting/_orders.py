"""The physical orders: the owner of every element of memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv._src.internal.text import shown
from jaxkv._src.layout import ORDERS, PhysicalOrder
from jaxkv._src.plotting._style import count_of, label, new_figure, remove_tight, write_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {"L": "layer", "B": "block", "H": "head", "N": "token"}
SIZES = {"L": 2, "B": 3, "H": 2, "N": 4}  # of the toy cache
BLOCK = 1  # that is marked


def plot_orders(orders: Sequence[str | PhysicalOrder] = ORDERS) -> "Figure":
    """Draws memory in several physical orders, one below the other, and the owner of each element.

    The cache is a toy. Each cell is one head of one token of one layer, K and V together. A row
    per axis shows its index, the slowest axis on top. The marks below are one block: of layer 0
    in black, of the other layers in grey.

    Args:
      orders: of `jaxkv.layout.ORDERS`, ``"NHD"``, ``"HND"``, or `PhysicalOrder`; left out: all six.

    Raises:
      ValueError: no orders, unknown ones, or tiles that do not divide a block of 4 tokens.
    """
    if not isinstance(orders, Sequence) or isinstance(orders, str) or not orders:
        raise ValueError(
            f"orders={shown(orders)} must be a sequence of at least one; write ('NHD',)"
        )
    parsed = [o if isinstance(o, PhysicalOrder) else PhysicalOrder(o) for o in orders]
    owners = [_owners(order) for order in parsed]
    figure = new_figure(9, 1.95 * len(parsed))
    axes = figure.subplots(len(parsed), squeeze=False).flat
    for ax, order, owned in zip(axes, parsed, owners, strict=True):
        _draw(ax, order, owned)
    return remove_tight(figure)


def _draw(ax: "Axes", order: PhysicalOrder, owners: dict[str, np.ndarray]) -> None:
    for line, (letter, values) in enumerate(owners.items()):
        starts, widths = _runs(values)
        index = values[starts]
        shades = (0.95 - 0.55 * index / (SIZES[letter] - 1))[:, None] * [0.34, 0.7, 1.0]
        bars = ax.barh([line] * len(index), widths, 0.94, starts, color=shades, edgecolor="white")
        write_in(ax, bars, list(map(str, index)))
    marked = owners["B"] == BLOCK
    first = marked & (owners["L"] == 0)
    for where, colour in ((first, "black"), (marked & ~first, "#999999")):
        starts, widths = (values[where[_runs(where)[0]]] for values in _runs(where))
        ax.barh(4, widths - 0.16, 0.5, starts + 0.08, color=colour)
    ax.set_yticks(range(5), [*(AXIS_NAMES[letter] for letter in owners), f"block {BLOCK}"])
    ax.set(xlim=(0, len(marked)), ylim=(4.4, -0.5), xticks=[])
    ax.tick_params(length=0)
    tiles = f" in tiles of {order.tile_tokens} tokens" if order.tile_tokens else ""
    one, every = (count_of(int(w[_runs(w)[0]].sum()), "extent") for w in (first, marked))
    label(ax, f"{order.order}{tiles}: block 1 of layer 0 is {one}, of all layers {every}")
    ax.spines[:].set_visible(False)


def _owners(order: PhysicalOrder) -> dict[str, np.ndarray]:
    """Returns the layer, block, head and token of each cell of memory, the slowest axis first."""
    tile = order.tile_tokens or SIZES["N"]
    if SIZES["N"] % tile:
        raise ValueError(f"tile_tokens={tile} does not divide the {SIZES['N']} tokens of a block")
    tiles = SIZES["N"] // tile  # of a block, which lie like blocks
    letters = order.order.replace("C", "")
    shape = SIZES | {"B": SIZES["B"] * tiles, "N": tile}
    index = np.indices([shape[letter] for letter in letters]).reshape(4, -1)
    owners = dict(zip(letters, index, strict=True))
    owners["B"], part = np.divmod(owners["B"], tiles)
    owners["N"] = owners["N"] + part * tile
    return owners


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and the widths of the runs of equal values."""
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    return starts, np.diff(np.r_[starts, len(values)])
