"""Pictures of one block and one page: tensors, layers, tokens."""

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

MAX_TENSORS = 12  # the first are drawn
MAX_NAMES = 16  # of slots and of kernel blocks


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
    pages = [tensor.page_bytes for tensor in layout.tensors[:MAX_TENSORS]]
    starts = list(itertools.accumulate(pages, initial=0))
    ax = new_axes(9, min(1.5 + 0.5 * len(layout.groups), 9))
    unit, size = byte_unit(starts[-1])
    names = []
    for row, group in enumerate(layout.groups):
        placed = zip(
            _short_names(group.layers), map(layout.placement_of, group.layers), strict=True
        )
        drawn = [(name, at) for name, at in placed if at.tensor < len(pages)]
        ax.barh(row, starts[-1] / size, 0.8, **UNUSED)
        bars = ax.barh(
            [row] * len(drawn),
            [at.spec.data_bytes / size for _, at in drawn],
            0.8,
            left=[(starts[at.tensor] + at.offset_bytes) / size for _, at in drawn],
            color=group_colour(row),
            edgecolor="white",
        )
        write_in(ax, bars, [name for name, _ in drawn])
        readers = sum(owner in group.layers for _, owner in layout.shared)
        shared = f"\n+ {readers} layers that share" if readers else ""
        names.append(f"group {row}: {group}{shared}")
    ax.vlines([start / size for start in starts], -0.5, len(names) - 0.5, INK, lw=1)
    ax.set(xlim=(0, max(starts[-1] / size, 1e-9)), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    unused = [layout.bytes_per_block - sum(s.data_bytes for s in g.specs) for g in layout.groups]
    tensors = count_of(len(layout.tensors), "tensor")
    tensors += f" (first {MAX_TENSORS} drawn)" if MAX_TENSORS < len(layout.tensors) else ""
    title = f"A block is {layout.bytes_per_block:,} bytes in {tensors}; {describe_unused(unused)}"
    return finish(ax, title, xlabel=f"{unit} of the block (lines: tensors, boxes: layers)")


def _short_names(layers: Sequence[str]) -> list[str]:
    """Returns names without the parts, between dots, that all of them have in common."""
    split = [name.split(".") for name in layers]
    if len(layers) < 2 or len({len(parts) for parts in split}) > 1:
        return list(layers)
    differs = [len({*parts}) > 1 for parts in zip(*split, strict=True)]
    return [".".join(itertools.compress(parts, differs)) for parts in split]


def plot_page(
    spec: LayerSpec,
    *,
    block_id: int = 1,
    kernel_block_size: int | None = None,
) -> "Figure":
    """Draws one page: the vectors that a layer stores for one block, and its kernel blocks.

    A row is a token, or several that share one vector, named by the slot of the first,
    ``block_id * block_size + offset``. A state is one row. Hatched is padding.

    Args:
      spec: of the layer.
      block_id: numbers slots and kernel blocks.
      kernel_block_size: tokens of a kernel block; None: the block size.

    Raises:
      TypeError, ValueError: kernel blocks that do not divide a block.
    """
    check_kind(LayerSpec, spec=spec)
    check_count(block_id=block_id)
    size = spec.block_size if kernel_block_size is None else kernel_block_size
    num_parts = blocks_per_kv_block(spec, size)
    names, sizes, rows, title = _contents(spec)
    row_bytes = int(sizes.sum())
    bottom = spec.page_bytes / row_bytes  # padding is as high as rows of its bytes
    unit, unit_bytes = byte_unit(row_bytes)
    ax, end = new_axes(8, min(1.5 + 0.22 * max(bottom, 3), 4.5)), row_bytes / unit_bytes
    ax.barh(bottom / 2, end, bottom, **UNUSED)
    lefts, colours = (np.cumsum(sizes) - sizes) / unit_bytes, (group_colour(0), group_colour(6))
    for i, (name, left) in enumerate(zip(names, lefts, strict=True)):
        bar = ax.barh(rows / 2, sizes[i] / unit_bytes, rows, left, color=colours[i % 2], ec="white")
        write_in(ax, bar, [name])
        ax.texts[-1].set_bbox({"facecolor": colours[i % 2], "edgecolor": "none", "pad": 1})
    if rows <= 2 * MAX_NAMES:
        ax.hlines(range(1, rows), 0, end, "white", linewidth=0.7)
    edges = np.arange(num_parts + 1) * rows / num_parts
    ax.hlines(edges[1:-1], 0, end, INK, linewidth=1.5 if num_parts <= MAX_NAMES else 0.3)
    ax.set(xlim=(0, end), ylim=(bottom, 0), yticks=[])
    if not isinstance(spec, StateSpec):
        first = np.arange(0, rows, cdiv(rows, MAX_NAMES))
        slots = block_id * spec.block_size + first * (spec.block_size // rows)
        ax.set_yticks(first + 0.5, [f"slot {slot:,}" for slot in slots])
    named, kind = range(0, num_parts, cdiv(num_parts, MAX_NAMES)), "kernel " * (num_parts > 1)
    right = ax.secondary_yaxis("right")
    texts = [f"{kind}block {block_id * num_parts + part:,}" for part in named]
    right.set_yticks([edges[i : i + 2].mean() for i in named], texts, fontsize=LABEL)
    for axis in (ax, right):
        axis.tick_params(axis="y", length=0)
    padding = spec.page_bytes - spec.data_bytes
    more = f"\nand {padding:,} bytes of padding" if padding else ""
    return finish(ax, f"Block {block_id}, {spec.kind} layer: {title}{more}", xlabel=unit)


def _contents(spec: LayerSpec) -> tuple[list[str], np.ndarray, int, str]:
    """Returns the parts of a row, their bytes, the rows of a page, and all of it as text."""
    if isinstance(spec, StateSpec):
        names = [f"{dtype}{list(shape)}" for shape, dtype in spec.arrays]
        text = f"one state of {spec.data_bytes:,} bytes, {' and '.join(names)}"
        return names, np.array(spec.array_bytes), 1, text
    row, rows = row_format(spec), rows_per_block(spec)
    row_bytes, each = spec.data_bytes // rows, spec.block_size // rows
    what = count_of(rows, "token" if each == 1 else f"row of {each} tokens")
    text = f"{what} x {row_bytes:,} bytes = {spec.data_bytes:,} bytes"
    if row.key_elements is None:
        return [f"{row.width} x {row.dtype}"], np.array([row_bytes]), rows, text
    names = [f"{name} {head}" for head in range(row.heads) for name in "KV"]
    elements = np.array([row.key_elements, row.width - row.key_elements] * row.heads)
    text += f" (K and V of {row.heads} heads)" if row.heads > 1 else ""
    return names, elements * row_bytes // elements.sum(), rows, text
