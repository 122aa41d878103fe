"""Groups of layers: by vLLM's rule, packed, or with the least waste. No jax."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from jaxkv._src.internal.checks import check_choice, check_kind
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.planning._layout import Group
from jaxkv._src.planning._pages import Layers, grow_for_states, unifiable, unify_grown
from jaxkv._src.specs import LayerSpec

Grouping = Literal["auto", "rule", "least_waste", "packed"]


class GroupingFigures(NamedTuple):
    """A grouping, and the requests that it runs at once.

    grouping: "rule", "packed" or "least_waste", as for `make_groups`.
    num_groups: block tables that each request has.
    requests: requests of one length that run at once.
    longest_len: tokens of the longest request that fits.
    """

    grouping: str
    num_groups: int
    requests: int
    longest_len: int


def make_groups(
    layers: Layers,
    *,
    grouping: Grouping = "auto",
    cost: Callable[[Sequence[Group]], float | tuple[float, ...]] | None = None,
) -> tuple[Group, ...]:
    """Cuts layers into groups, each with one growth.

    If all layers have the same growth, they make one group, whatever the widths of their pages.
    Otherwise attention blocks are first enlarged until their page holds a state page, if there
    are states. The rest depends on ``grouping``:

    - ``"rule"``: pages are unified (`unify_pages`), layers bucketed by spec in order of first
      appearance, and buckets cut into groups of about the smallest bucket's size (the
      largest's, when that is less than 1.5 times the smallest), so that tensors are shared
      evenly. This is vLLM's rule.
    - ``"packed"``: pages keep their sizes and layers are bucketed by growth. Layers that keep
      all tokens stay in one group; the others are cut into groups that are not wider.
    - ``"auto"``: by the rule where pages can be unified, else packed.
    - ``"least_waste"``: the grouping of least ``cost`` among all group sizes that the rule
      could take and all widths that packing could.

    Args:
      layers: layer name -> spec.
      grouping: see above.
      cost: gives the cost of a grouping, for ``"least_waste"``; by default bytes per block times
        groups. `plan_cache` counts the requests that run at once.

    Raises:
      ValueError: an unknown grouping, or pages that cannot be unified.
    """
    check_choice(get_args(Grouping), grouping=grouping)
    if cost is not None and not callable(cost):
        raise TypeError(f"cost must be a function of groups, or None; got {type(cost).__name__}")
    check_kind(Mapping, "a mapping from names to specs", layers=layers)
    check_kind(LayerSpec, **{f"layers[{name!r}]": spec for name, spec in layers.items()})
    if not layers:
        return ()
    if len({spec.growth for spec in layers.values()}) == 1:
        return (Group(tuple(layers), tuple(layers.values())),)
    layers = grow_for_states(layers)
    unify = unifiable(layers)
    if grouping == "packed" or (grouping == "auto" and not unify):
        return _pack(layers)
    if grouping == "least_waste":
        cut = _cut_groupings(layers) if unify else ()
        candidates = itertools.chain(cut, _packed_groupings(layers))
        return min(candidates, key=cost or _default_cost)
    buckets = _buckets(unify_grown(layers), key=lambda spec: spec)
    sizes = [len(names) for names in buckets]
    return _cut(buckets, max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes))


def _cut_groupings(layers: Layers) -> Iterable[tuple[Group, ...]]:
    """Yields each grouping that a group size gives, from the largest size to 1."""
    buckets = _buckets(unify_grown(layers), key=lambda spec: spec)
    sizes: dict[tuple[int, ...], int] = {}
    for size in range(max(map(len, buckets)), 0, -1):
        sizes.setdefault(tuple(cdiv(len(bucket), size) for bucket in buckets), size)
    return (_cut(buckets, size) for size in sizes.values())


def _default_cost(groups: Sequence[Group]) -> int:
    return len(groups) * max(group.page_bytes for group in groups)


def _buckets(layers: Layers, key: Callable[[LayerSpec], object]) -> list[dict[str, LayerSpec]]:
    buckets: dict[object, dict[str, LayerSpec]] = {}
    for name, spec in layers.items():
        buckets.setdefault(key(spec), {})[name] = spec
    return list(buckets.values())


def _split(bucket: Layers, count: int) -> list[Group]:
    """Distributes the layers over ``count`` groups, so that pipeline stages get some of each."""
    pairs = list(bucket.items())
    parts = (pairs[i::count] for i in range(count))
    return [Group(tuple(name for name, _ in p), tuple(spec for _, spec in p)) for p in parts]


def _cut(buckets: Sequence[Layers], size: int) -> tuple[Group, ...]:
    """Cuts buckets into groups of at most ``size`` layers."""
    return tuple(group for b in buckets for group in _split(b, cdiv(len(b), size)))


def _pack(layers: Layers) -> tuple[Group, ...]:
    """Keeps layers that keep all tokens in one group, and makes no other group wider."""
    buckets = _buckets(layers, key=lambda spec: spec.growth)
    whole = [_width(bucket, 1) for bucket in buckets]
    growths = [next(iter(bucket.values())).growth for bucket in buckets]
    full = [w for w, growth in zip(whole, growths, strict=True) if growth.keeps_all_tokens]
    return _fewest(buckets, max(full or [min(whole)]))


def _packed_groupings(layers: Layers) -> Iterable[tuple[Group, ...]]:
    """Yields the packed grouping of every width that a group can have."""
    buckets = _buckets(layers, key=lambda spec: spec.growth)
    widths = {_width(bucket, n) for bucket in buckets for n in range(1, len(bucket) + 1)}
    return (_fewest(buckets, width) for width in sorted(widths, reverse=True))


def _width(bucket: Layers, count: int) -> int:
    """Returns the bytes of the widest of ``count`` groups."""
    pages = [spec.page_bytes for spec in bucket.values()]
    return max(sum(pages[i::count]) for i in range(count))


def _fewest(buckets: Sequence[Layers], width: int) -> tuple[Group, ...]:
    """Splits each bucket into as few groups as possible, none wider than ``width`` bytes.

    A single layer that is wider makes a group of its own.
    """
    groups: list[Group] = []
    for bucket in buckets:
        limit = max(width, _width(bucket, len(bucket)))
        counts = range(1, len(bucket) + 1)
        groups += _split(bucket, next(n for n in counts if _width(bucket, n) <= limit))
    return tuple(groups)
