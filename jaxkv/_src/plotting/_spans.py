"""The bytes of a block that each layer uses, its tensors laid end to end."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxkv._src.planning import PoolLayout


class Span(NamedTuple):
    """The bytes of one layer in a block that its group owns: data, padded to a page."""

    group: int
    layer: str
    start: int
    data_bytes: int
    page_bytes: int


def tensor_starts(layout: PoolLayout) -> list[int]:
    """Returns the first byte of each tensor in a block, and the end of the last one."""
    return list(itertools.accumulate((t.page_bytes for t in layout.tensors), initial=0))


def layer_spans(layout: PoolLayout) -> Iterator[Span]:
    """Yields the bytes of every layer that owns a cache, group by group."""
    starts = tensor_starts(layout)
    for index, group in enumerate(layout.groups):
        for layer in group.layers:
            place = layout.place_of(layer)
            start = starts[place.tensor] + place.offset_bytes
            yield Span(index, layer, start, place.spec.data_bytes, place.spec.page_bytes)


def short_names(layers: Sequence[str]) -> list[str]:
    """Returns names without the parts, between dots, that all of them have in common."""
    split = [name.split(".") for name in layers]
    if len(layers) < 2 or len({len(parts) for parts in split}) > 1:
        return list(layers)
    differs = [len(set(column)) > 1 for column in zip(*split, strict=True)]
    return [".".join(p for p, keep in zip(parts, differs, strict=True) if keep) for parts in split]
