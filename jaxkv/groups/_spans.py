"""Which bytes of a block are whose, and a small picture of it for Jupyter."""

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxkv.rich_repr import group_colour, text_colour

if TYPE_CHECKING:
    from jaxkv.groups._layout import PoolLayout

WIDTH, LABEL, ROW, HEAD = 760, 150, 22, 20  # pixels
MAX_SLOTS = 12


class Span(NamedTuple):
    """Bytes of a block, its slots laid end to end, that are one layer's while its group
    owns the block: ``data_bytes`` from ``start``, padded to ``page_bytes``."""

    group: int
    layer: str
    start: int
    data_bytes: int
    page_bytes: int


def slot_starts(layout: "PoolLayout") -> list[int]:
    """Where each slot begins with all slots of a block laid end to end, and the end."""
    starts = [0]
    for slot in layout.slots:
        starts.append(starts[-1] + slot.page_bytes)
    return starts


def layer_spans(layout: "PoolLayout") -> Iterator[Span]:
    """The bytes of every layer that owns a cache, group by group."""
    starts = slot_starts(layout)
    for index, group in enumerate(layout.groups):
        for layer in group.layers:
            place = layout.place_of(layer)
            start = starts[place.slot] + place.offset_bytes
            yield Span(index, layer, start, place.spec.data_bytes, place.spec.page_bytes)


def short_names(layers: Sequence[str]) -> list[str]:
    """Names without the parts, between dots, in which all of them agree."""
    split = [name.split(".") for name in layers]
    if len(layers) < 2 or len({len(parts) for parts in split}) > 1:
        return list(layers)
    differs = [len(set(column)) > 1 for column in zip(*split, strict=True)]
    return [".".join(p for p, keep in zip(parts, differs, strict=True) if keep) for parts in split]


def layout_svg(layout: "PoolLayout") -> str:
    """One row per group, drawn over the bytes of one block: what lies above each other is
    the same memory. Padding is pale; names in full are tooltips."""
    starts = slot_starts(layout)
    shown = min(len(layout.slots), MAX_SLOTS)
    scale = (WIDTH - LABEL) / max(starts[shown], 1)
    height = HEAD + ROW * len(layout.groups)
    note = f", first {shown} slots drawn" if shown < len(layout.slots) else ""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        "font-family='sans-serif' font-size='11' fill='currentColor'>",
        f"<text x='0' y='12'>{layout.bytes_per_block:,} bytes per block in "
        f"{len(layout.slots)} slots{note}</text>",
    ]
    for index, group in enumerate(layout.groups):
        y = HEAD + ROW * index
        name = html.escape(f"group {index}: {group}")
        parts.append(f"<text x='0' y='{y + 15}'>{name}</text>")
    names = dict(
        pair for g in layout.groups for pair in zip(g.layers, short_names(g.layers), strict=True)
    )
    for span in layer_spans(layout):
        if span.start < starts[shown]:
            parts.append(_rectangle(span, names[span.layer], scale))
    parts.append("</svg>")
    return "\n".join(parts)


def _rectangle(span: Span, name: str, scale: float) -> str:
    colour = group_colour(span.group)
    x, y = LABEL + span.start * scale, HEAD + ROW * span.group + 1
    data, page = span.data_bytes * scale, span.page_bytes * scale
    box = f"y='{y}' height='{ROW - 2}' fill='{colour}'"
    title = (
        f"{span.layer}: {span.data_bytes:,} bytes from {span.start:,} of a block, "
        f"{span.page_bytes - span.data_bytes:,} of padding"
    )
    text = ""
    if len(name) * 7 < data:
        text = (
            f"<text x='{x + data / 2:.1f}' y='{y + 14}' text-anchor='middle' "
            f"fill='{text_colour(colour)}'>{html.escape(name)}</text>"
        )
    pale = f"<rect x='{x:.1f}' width='{page:.1f}' {box} fill-opacity='0.35'/>"
    return (
        f"<g><title>{html.escape(title)}</title>{pale if page > data else ''}"
        f"<rect x='{x:.1f}' width='{data:.1f}' {box} stroke='white' stroke-width='0.5'/>"
        f"{text}</g>"
    )
