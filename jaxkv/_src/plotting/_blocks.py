"""Pictures of one block and one page: tensors, layers, rows, physical orders."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv._src.internal.checks import check_count, check_kind
from jaxkv._src.internal.html import group_colour
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import describe_unused
from jaxkv._src.layout import blocks_per_kv_block, row_format, rows_per_block
from jaxkv._src.planning import PoolLayout
from jaxkv._src.plotting._style import (
    INK,
    LABEL,
    UNUSED,
    byte_unit,
    count_of,
    finish,
    new_axes,
    write_in,
)
from jaxkv._src.specs import LayerSpec, StateSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAX_TENSORS = 12  # of more, the first are drawn


def plot_layout(layout: PoolLayout) -> "Figure":
    """Draws one block, tensor by tensor, and in a row per group the layers that lie on it.

    Layers above each other share the same memory, which belongs to one group at a time.
    Hatched bytes hold no data: padding of a page, and tensors in which a group has no layer.

    Args:
      layout: ``plan.layout``, or one of ``plan.layouts``.

    Raises:
      TypeError: not a layout.
    """
    check_kind(PoolLayout, layout=layout)
    starts = list(itertools.accumulate((t.page_bytes for t in layout.tensors), initial=0))
    end = starts[: MAX_TENSORS + 1][-1]
    rows = range(len(layout.groups))
    ax = new_axes(9, min(1.5 + 0.5 * len(rows), 9))
    unit, size = byte_unit(end)
    ax.barh(rows, end / size, 0.8, **UNUSED)
    for row, group in enumerate(layout.groups):
        places = [layout.placement_of(layer) for layer in group.layers]
        at = [starts[place.tensor] + place.offset_bytes for place in places]
        shown = [i for i, start in enumerate(at) if start < end]
        bars = ax.barh(
            [row] * len(shown),
            [places[i].spec.data_bytes / size for i in shown],
            0.8,
            left=[at[i] / size for i in shown],
            color=group_colour(row),
            edgecolor="white",
        )
        names = short_names(group.layers)
        write_in(ax, bars, [names[i] for i in shown])
    ax.vlines([start / size for start in starts if start <= end], -0.5, len(rows) - 0.5, INK, lw=1)
    ax.set(xlim=(0, max(end / size, 1e-9)), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(rows, [_row_name(layout, row) for row in rows])
    unused = [layout.bytes_per_block - sum(s.data_bytes for s in g.specs) for g in layout.groups]
    tensors = count_of(len(layout.tensors), "tensor")
    if MAX_TENSORS < len(layout.tensors):
        tensors += f" (first {MAX_TENSORS} drawn)"
    title = f"A block is {layout.bytes_per_block:,} bytes in {tensors}; {describe_unused(unused)}"
    return finish(ax, title, xlabel=f"{unit} of the block (lines: tensors, boxes: layers)")


def _row_name(layout: PoolLayout, row: int) -> str:
    group = layout.groups[row]
    readers = sum(owner in group.layers for _, owner in layout.shared)
    return f"group {row}: {group}" + (f"\n+ {readers} layers that share" if readers else "")


def short_names(layers: Sequence[str]) -> list[str]:
    """Returns names without the parts, between dots, that all of them have in common."""
    split = [name.split(".") for name in layers]
    if len(layers) < 2 or len({len(parts) for parts in split}) > 1:
        return list(layers)
    differs = [len(set(column)) > 1 for column in zip(*split, strict=True)]
    return [".".join(p for p, keep in zip(parts, differs, strict=True) if keep) for parts in split]


MANY = 16  # rows or kernel blocks; of more, only some are named
COLOURS = group_colour(0), group_colour(6)  # of keys and values


def plot_page(
    spec: LayerSpec,
    *,
    block_id: int = 1,
    kernel_block_size: int | None = None,
) -> "Figure":
    """Draws one page: the rows that a layer stores for one block, and its kernel blocks.

    A row is a token, or the tokens that share one, with the slot of its first token,
    ``block_id * block_size + offset``, next to it. A state is one row. Hatched is padding.

    Args:
      spec: of the layer.
      block_id: the block, by which slots and kernel blocks are numbered.
      kernel_block_size: tokens of a kernel block; None: the block size.

    Raises:
      TypeError, ValueError: as `jaxkv.layout.blocks_per_kv_block`.
    """
    check_kind(LayerSpec, spec=spec)
    check_count(block_id=block_id)
    size = spec.block_size if kernel_block_size is None else kernel_block_size
    num_parts = blocks_per_kv_block(spec, size)
    names, sizes, rows = _row(spec)
    row_bytes = sizes.sum()
    bottom = spec.page_bytes / row_bytes  # padding as high as rows of as many bytes
    ax = new_axes(8, min(1.5 + 0.22 * max(bottom, 3), 4.5))
    unit, unit_bytes = byte_unit(row_bytes)
    left, end = (np.cumsum(sizes) - sizes) / unit_bytes, row_bytes / unit_bytes
    colours = [COLOURS[i % 2] for i in range(len(names))]
    ax.barh(bottom / 2, end, bottom, **UNUSED)
    shown = (rows / 2, sizes / unit_bytes, rows, left)
    bars = ax.barh(*shown, color=colours, edgecolor="white")
    write_in(ax, bars, names)
    for text, colour in zip(ax.texts, colours, strict=True):  # over the lines
        text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1})
    if rows <= 2 * MANY:
        ax.hlines(range(1, rows), 0, end, "white", linewidth=0.7)
    ends = np.arange(num_parts + 1) * rows / num_parts
    ax.hlines(ends[1:-1], 0, end, INK, linewidth=1.5 if num_parts <= MANY else 0.3)
    ax.set(xlim=(0, end), ylim=(bottom, 0), yticks=[])
    if not isinstance(spec, StateSpec):
        slots = np.arange(0, rows, cdiv(rows, MANY))
        first = block_id * spec.block_size + slots * (spec.block_size // rows)
        ax.set_yticks(slots + 0.5, [f"slot {slot:,}" for slot in first])
    named, kind = range(0, num_parts, cdiv(num_parts, MANY)), "kernel " * (num_parts > 1)
    right = ax.secondary_yaxis("right")
    texts = [f"{kind}block {block_id * num_parts + part:,}" for part in named]
    right.set_yticks([(ends[i] + ends[i + 1]) / 2 for i in named], texts, fontsize=LABEL)
    for axis in (ax, right):
        axis.tick_params(axis="y", length=0)
    stored = "state" if isinstance(spec, StateSpec) else "row"
    return finish(ax, _title(spec, block_id, names, rows), xlabel=f"{unit} of a {stored}")


def _row(spec: LayerSpec) -> tuple[list[str], np.ndarray, int]:
    """Returns the names of the parts of a row, their bytes, and the rows of a page."""
    if isinstance(spec, StateSpec):
        arrays = zip(spec.dtypes, spec.shapes, strict=True)
        names = [f"{dtype}{list(shape)}" for dtype, shape in arrays]
        return names, np.array(spec.array_bytes), 1
    row, rows = row_format(spec), rows_per_block(spec)
    row_bytes = spec.data_bytes // rows
    if row.key_elements is None:
        return [f"{row.width} x {row.dtype}"], np.array([row_bytes]), rows
    names = [f"{name} {head}" for head in range(row.heads) for name in "KV"]
    elements = np.array([row.key_elements, row.width - row.key_elements] * row.heads)
    return names, elements * row_bytes // elements.sum(), rows


def _title(spec: LayerSpec, block_id: int, names: Sequence[str], rows: int) -> str:
    if isinstance(spec, StateSpec):
        stored = f"one state of {spec.data_bytes:,} bytes, {' and '.join(names)}"
    else:
        each = spec.block_size // rows
        what = count_of(rows, "token" if each == 1 else f"row of {each} tokens")
        stored = f"{what} x {spec.data_bytes // rows:,} bytes = {spec.data_bytes:,} bytes"
        if (heads := row_format(spec).heads) > 1:
            stored += f" (K and V of {heads} heads)"
    padding = spec.page_bytes - spec.data_bytes
    more = f"\nand {padding:,} bytes of padding" if padding else ""
    return f"Block {block_id}, {spec.kind} layer: {stored}{more}"
