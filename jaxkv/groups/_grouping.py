"""Layers -> groups: by the rule, packed, or with the least waste."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxkv.groups._layout import Group
from jaxkv.groups._pages import Layers, unifiable, unify_pages
from jaxkv.specs import LayerSpec

GROUPINGS = ("auto", "rule", "least_waste", "packed")


def make_groups(
    layers: Layers,
    *,
    grouping: str = "auto",
    cost: Callable[[Sequence[Group]], Any] | None = None,
) -> tuple[Group, ...]:
    """Cuts layers into groups, each with one growth.

    Layers of equal growth throughout make one group, whatever their page widths.
    Otherwise it depends on ``grouping``:

    - ``"rule"``: pages are unified, layers bucketed by spec in order of first
      appearance, and buckets cut into groups of about the smallest bucket's size (the
      largest's, when that is less than 1.5 times the smallest), so that slots are
      shared evenly. What vLLM does.
    - ``"packed"``: pages keep their sizes and layers are bucketed by growth. Those that
      keep all tokens stay in one group; the others are cut so as to be no wider.
    - ``"auto"``: by the rule where pages can be unified, else packed.
    - ``"least_waste"``: the one of least ``cost`` among all group sizes that the rule could
      take and all widths that packing could.

    Args:
      layers: layer name -> spec.
      grouping: see above.
      cost: what a grouping costs, for ``"least_waste"``; None: bytes per block times
        groups.

    Raises:
      ValueError: an unknown grouping, or pages that cannot be unified.
    """
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping={grouping!r}; use one of {GROUPINGS}")
    if not layers:
        return ()
    if len({spec.growth for spec in layers.values()}) == 1:
        return (Group(tuple(layers), tuple(layers.values())),)
    unify = unifiable(layers)
    if grouping == "packed" or (grouping == "auto" and not unify):
        return _pack(layers)
    if grouping == "least_waste":
        cut = _cut_groupings(layers) if unify else ()
        candidates = itertools.chain(cut, _packed_groupings(layers))
        return min(candidates, key=cost or _default_cost)
    buckets = _buckets(unify_pages(layers), key=lambda spec: spec)
    sizes = [len(names) for names in buckets]
    return _cut(buckets, max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes))


def _cut_groupings(layers: Layers) -> Iterable[tuple[Group, ...]]:
    """Every group size, the largest, which makes the fewest groups, first."""
    buckets = _buckets(unify_pages(layers), key=lambda spec: spec)
    return (_cut(buckets, size) for size in range(max(map(len, buckets)), 0, -1))


def _default_cost(groups: Sequence[Group]) -> int:
    return len(groups) * max(group.page_bytes for group in groups)


def _buckets(layers: Layers, key: Callable[[LayerSpec], object]) -> list[dict[str, LayerSpec]]:
    buckets: dict[object, dict[str, LayerSpec]] = {}
    for name, spec in layers.items():
        buckets.setdefault(key(spec), {})[name] = spec
    return list(buckets.values())


def _split(bucket: Layers, count: int) -> list[Group]:
    """``count`` groups; taking every count-th layer spreads them over pipeline stages."""
    pairs = list(bucket.items())
    parts = (pairs[i::count] for i in range(count))
    return [Group(tuple(name for name, _ in p), tuple(spec for _, spec in p)) for p in parts]


def _cut(buckets: Sequence[Layers], size: int) -> tuple[Group, ...]:
    """Groups of at most ``size`` layers."""
    return tuple(group for b in buckets for group in _split(b, -(-len(b) // size)))


def _pack(layers: Layers) -> tuple[Group, ...]:
    """Layers that keep all tokens stay together, and nothing is wider than they are."""
    buckets = _buckets(layers, key=lambda spec: spec.growth)
    whole = [_width(bucket, 1) for bucket in buckets]
    kinds = [next(iter(bucket.values())).kind for bucket in buckets]
    full = [w for w, kind in zip(whole, kinds, strict=True) if kind in ("full", "mla")]
    return _fewest(buckets, max(full or [min(whole)]))


def _packed_groupings(layers: Layers) -> Iterable[tuple[Group, ...]]:
    """For every width that a group can have: the fewest groups none of which is wider."""
    buckets = _buckets(layers, key=lambda spec: spec.growth)
    widths = {_width(bucket, n) for bucket in buckets for n in range(1, len(bucket) + 1)}
    return (_fewest(buckets, width) for width in sorted(widths, reverse=True))


def _width(bucket: Layers, count: int) -> int:
    """Bytes of the widest of ``count`` groups."""
    pages = [spec.page_bytes for spec in bucket.values()]
    return max(sum(pages[i::count]) for i in range(count))


def _fewest(buckets: Sequence[Layers], width: int) -> tuple[Group, ...]:
    """The fewest groups of each growth none of which is wider, as far as single layers go."""
    groups: list[Group] = []
    for bucket in buckets:
        limit = max(width, _width(bucket, len(bucket)))
        counts = range(1, len(bucket) + 1)
        groups += _split(bucket, next(n for n in counts if _width(bucket, n) <= limit))
    return tuple(groups)
