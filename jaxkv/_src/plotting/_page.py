"""The picture of a page: its rows and kernel blocks."""

from typing import TYPE_CHECKING, Any

from jaxkv._src.internal.checks import check_count, check_kind
from jaxkv._src.internal.html import GROUP_COLOURS, group_colour, text_colour
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import blocks_per_kv_block, row_format, rows_per_block
from jaxkv._src.plotting._style import (
    INK,
    LABEL,
    PALE,
    UNUSED,
    axes_inches,
    axes_of,
    byte_unit,
    count_of,
    finish,
    fits,
    label_bar,
)
from jaxkv._src.specs import LayerSpec, StateSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY = 20  # kernel blocks; of more, only some are named
KEY, VALUE = GROUP_COLOURS[0], GROUP_COLOURS[6]


def plot_page(
    spec: LayerSpec,
    *,
    block_id: int = 1,
    kernel_block_size: int | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draws one page: the rows that a layer stores for one block, and its kernel blocks.

    A row is a token, or the tokens that share one, with the slot of its first token,
    ``block_id * block_size + offset``, next to it. A state is one row. Hatched is padding.

    Args:
      spec: of the layer.
      block_id: the block, by which slots and kernel blocks are numbered.
      kernel_block_size: tokens of a kernel block; None: the block size.
      ax: axes to draw on; None: a new figure.

    Raises:
      ImportError: matplotlib is missing.
      TypeError, ValueError: as `jaxkv.layout.blocks_per_kv_block`.
    """
    check_kind(LayerSpec, spec=spec)
    check_count(block_id=block_id)
    parts = blocks_per_kv_block(
        spec, spec.block_size if kernel_block_size is None else kernel_block_size
    )
    if isinstance(spec, StateSpec):
        return _draw_state(spec, block_id, ax)
    return _draw_rows(spec, block_id, parts, ax)


def _draw_state(spec: StateSpec, block_id: int, ax: "Axes | None") -> "Figure":
    """Draws the arrays of a state, each in a line of its own, over the bytes of the page."""
    sizes = [
        (f"{dtype}{list(shape)}", num_bytes)
        for shape, dtype, num_bytes in zip(spec.shapes, spec.dtypes, spec.array_bytes, strict=True)
    ]
    if spec.page_bytes > spec.data_bytes:
        sizes.append(("padding", spec.page_bytes - spec.data_bytes))
    ax = axes_of(ax, 8, 1.2 + 0.36 * len(sizes))
    unit, size = byte_unit(spec.page_bytes)
    ax.set(xlim=(0, spec.page_bytes / size), ylim=(len(sizes) - 0.5, -0.5))
    start = 0
    for line, (name, num_bytes) in enumerate(sizes):
        colour, hatch = (PALE, UNUSED) if name == "padding" else (group_colour(line), "")
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "#666666"}
        ax.barh(line, num_bytes / size, 0.72, left=start / size, linewidth=0.6, **style)
        label_bar(ax, line, start / size, num_bytes / size, f"{num_bytes:,} bytes", colour)
        start += num_bytes
    ax.set_yticks(range(len(sizes)), [name for name, _ in sizes])
    title = f"Block {block_id}, state layer: one state of {spec.data_bytes:,} bytes"
    return finish(ax, title, xlabel=f"{unit} of the page")


def _draw_rows(spec: LayerSpec, block_id: int, parts: int, ax: "Axes | None") -> "Figure":
    """Draws the rows of tokens, one below the other."""
    rows, padding = rows_per_block(spec), spec.page_bytes - spec.data_bytes
    row_bytes = spec.data_bytes // rows
    # A line of padding is drawn whatever its size: it says that there is some, and how much.
    bottom = rows + max(1, rows // 16) * bool(padding)
    ax = axes_of(ax, 8, min(1.3 + 0.22 * max(bottom, 3), 4.5))
    ax.set(xlim=(0, row_bytes), ylim=(bottom, 0))
    start = 0
    for name, num_bytes, colour in _row_parts(spec, row_bytes):
        ax.barh(rows / 2, num_bytes, rows, left=start, color=colour, edgecolor="white")
        pad = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
        style = {"color": text_colour(colour), "fontsize": LABEL, "bbox": pad}
        middle = (rows // parts - 1) // 2 + 0.5 if parts <= MANY else rows / 2  # of a row
        if fits(name, num_bytes * axes_inches(ax)[0] / row_bytes, LABEL):
            ax.text(start + num_bytes / 2, middle, name, ha="center", va="center", **style)
        start += num_bytes
    if rows <= 32:
        ax.hlines(range(1, rows), 0, row_bytes, color="white", linewidth=0.7)
    if padding:
        box = {"facecolor": PALE, "hatch": UNUSED, "edgecolor": "#999999", "linewidth": 0.5}
        ax.barh((rows + bottom) / 2, row_bytes, bottom - rows, **box)
        style = {"fontsize": LABEL, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
        at = row_bytes / 2, (rows + bottom) / 2
        ax.text(*at, f"{padding:,} bytes of padding", ha="center", va="center", **style)
    _mark_kernel_blocks(ax, block_id, parts, rows // parts)
    _mark_slots(ax, spec.block_size, block_id, rows, parts)
    heads = row_format(spec).heads
    each = spec.block_size // rows
    stored = "token" if each == 1 else f"row of {each} tokens"
    what = f"{count_of(rows, stored)} x {row_bytes:,} bytes = {spec.data_bytes:,} bytes"
    many = f" (K and V of {count_of(heads, 'head')})" if heads > 1 else ""
    return finish(
        ax, f"Block {block_id}, {spec.kind} layer: {what}{many}", xlabel="bytes of the row"
    )


def _row_parts(spec: LayerSpec, row_bytes: int) -> list[tuple[str, int, str]]:
    """Returns name, bytes and colour of the parts of a row."""
    row = row_format(spec)
    if row.key_elements is None:
        return [(f"{row.width} x {row.dtype}", row_bytes, KEY)]
    head_bytes = row_bytes // row.heads
    key_bytes = head_bytes * row.key_elements // row.width
    sizes = ("K", key_bytes, KEY), ("V", head_bytes - key_bytes, VALUE)
    heads = range(row.heads)
    return [(f"{name} {head}", size, colour) for head in heads for name, size, colour in sizes]


def _mark_kernel_blocks(ax: "Axes", block_id: int, parts: int, rows: int) -> None:
    right = ax.secondary_yaxis("right")
    name = "kernel block" if parts > 1 else "block"
    step = cdiv(parts, MANY)
    labels = [f"{name} {block_id * parts + part:,}" for part in range(0, parts, step)]
    middles = [rows * (part + 0.5) for part in range(0, parts, step)]
    right.set_yticks(middles, labels, fontsize=LABEL)
    right.tick_params(length=0)
    if parts > 1:
        width = 1.5 if parts <= MANY else 0.3
        ax.hlines([rows * i for i in range(1, parts)], *ax.get_xlim(), color=INK, linewidth=width)


def _mark_slots(ax: "Axes", block_size: int, block_id: int, rows: int, parts: int) -> None:
    """Writes the slot of the first token of every row, or of some rows where there are many."""
    if rows <= 16:
        step = 1
    elif 1 < parts <= MANY:
        step = max(rows // parts, 1)  # the first row of each kernel block
    else:
        step = cdiv(rows, 8)
    picked = range(0, rows, step)
    slots = [block_id * block_size + row * (block_size // rows) for row in picked]
    ax.set_yticks([row + 0.5 for row in picked], [f"slot {slot:,}" for slot in slots])
    ax.tick_params(axis="y", length=0)
