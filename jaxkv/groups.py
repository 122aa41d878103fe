"""Layers -> groups that share a block table -> the layout of one pool.

Knows how layers of different kinds are cut into groups and which layers lie on the
same bytes. Knows nothing of memory sizes, requests or arrays, and never imports jax.

All groups draw block ids from one pool, and a block belongs to one group at a time, so
layers of different groups can overlay each other: the bytes of a block mean whatever
the group that owns it says. A pool is a row of *slots*; a slot holds one page per block.

- Pages of one size: layer ``i`` of every group lives in slot ``i``.
- One group: every layer has a slot of its own width.
- Several groups of mixed pages: one slot, in which each group packs its layers.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.checks import check_positive
from jaxkv.specs import FullAttentionSpec, LayerSpec, MLASpec, StateSpec

Layers = Mapping[str, LayerSpec]
GROUPINGS = ("auto", "rule", "least_waste", "packed")


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share one block table: equal growth, one block id for all of them."""

    layers: tuple[str, ...]
    specs: tuple[LayerSpec, ...]  # one per layer

    @property
    def spec(self) -> LayerSpec:
        """The spec that speaks for the group wherever only growth matters."""
        return self.specs[0]

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def reserved_blocks(self) -> int:
        return max(spec.reserved_blocks for spec in self.specs)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block's pages, over the layers of the group."""
        return sum(spec.page_bytes for spec in self.specs)

    def __str__(self) -> str:
        return f"{len(self.layers)} {self.spec.kind} @ {self.block_size}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One page per block, and the layers that lie on it."""

    page_bytes: int
    layers: tuple[str, ...]


class Place(NamedTuple):
    """Where one layer lives: the group whose ids it reads, its slot, the offset of its
    bytes in the slot's page, and what it stores there."""

    group: int
    slot: int
    offset_bytes: int
    spec: LayerSpec


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Where every layer lives.

    groups: the groups, restricted to the layers of one worker.
    slots: what one block is made of.
    shared: pairs (layer, layer whose cache it reads).
    """

    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    shared: tuple[tuple[str, str], ...] = ()

    @property
    def bytes_per_block(self) -> int:
        return sum(slot.page_bytes for slot in self.slots)

    def place_of(self, layer: str) -> Place:
        """Where a layer lives.

        Raises:
          ValueError: the layer keeps no cache on this worker.
        """
        if layer not in self._places:
            raise ValueError(f"layer={layer!r} has no cache here; use one of {list(self._places)}")
        return self._places[layer]

    def slots_of(self, group: int) -> frozenset[int]:
        """The slots in which a group's layers lie."""
        return frozenset(self._places[layer].slot for layer in self.groups[group].layers)

    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: can a fresh block hold bytes that another meaning wrote?

        True iff bytes of one of the group's layers are also bytes of a layer of another
        group that reads them differently (dtype, quantisation or geometry). Different
        dtypes inside one group do not matter: there the same id always means the same
        layer.
        """
        flags = [False] * len(self.groups)
        for slot in self.slots:
            readers = [self._places[layer] for layer in slot.layers]
            for place in readers:
                flags[place.group] |= any(_misread(place, other) for other in readers)
        return tuple(flags)

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        slots = {layer: i for i, slot in enumerate(self.slots) for layer in slot.layers}
        places: dict[str, Place] = {}
        for index, group in enumerate(self.groups):
            used: dict[int, int] = {}  # slot -> bytes that the group's layers take there
            for layer, spec in zip(group.layers, group.specs, strict=True):
                slot = slots[layer]
                places[layer] = Place(index, slot, used.get(slot, 0), spec)
                used[slot] = used.get(slot, 0) + spec.page_bytes
        return places | {layer: places[owner] for layer, owner in self.shared}

    def __getstate__(self) -> dict[str, object]:  # a hash is worth nothing elsewhere
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.slots, self.shared))

    def __hash__(self) -> int:  # cached: jit hashes the layout at every dispatch
        return self._hash


def _misread(place: Place, other: Place) -> bool:
    """Do two layers of different groups read common bytes in different ways?"""
    if place.group == other.group:
        return False
    start, end = place.offset_bytes, place.offset_bytes + place.spec.page_bytes
    other_end = other.offset_bytes + other.spec.page_bytes
    overlap = start < other_end and other.offset_bytes < end
    alike = (start, place.spec.interpretation) == (other.offset_bytes, other.spec.interpretation)
    return overlap and not alike


def unify_pages(layers: Layers) -> dict[str, LayerSpec]:
    """Gives every layer a page of the same bytes, the largest among them.

    A smaller page grows by taking more tokens per block where that divides; state
    pages, and attention pages that do not divide, are padded instead.

    Raises:
      ValueError: no layers, or an MLA page that neither divides nor may be padded.
    """
    if not layers:
        raise ValueError("layers is empty: there is no page to unify")
    page_bytes = max(spec.page_bytes for spec in layers.values())
    unified: dict[LayerSpec, LayerSpec] = {}  # models repeat few specs over many layers
    for name, spec in layers.items():
        if spec not in unified:
            unified[spec] = _with_page(name, spec, page_bytes)
    return {name: unified[spec] for name, spec in layers.items()}


def _with_page(name: str, spec: LayerSpec, page_bytes: int) -> LayerSpec:
    if spec.page_bytes == page_bytes:
        return spec
    if _scales_to(spec, page_bytes):
        return dataclasses.replace(spec, block_size=spec.block_size * page_bytes // spec.page_bytes)
    if isinstance(spec, MLASpec):
        raise ValueError(
            f"layers[{name!r}]: its {spec.page_bytes}-byte MLA page does not divide the "
            f"{page_bytes}-byte page of the pool, and MLA kernels take no padding; choose a "
            'block_size whose page divides it, or grouping="packed"'
        )
    return dataclasses.replace(spec, page_bytes_padded=page_bytes)


def _scales_to(spec: LayerSpec, page_bytes: int) -> bool:
    """Can the page be reached by taking more tokens per block?"""
    grows = not isinstance(spec, StateSpec) and spec.page_bytes == spec.data_bytes
    return grows and page_bytes % spec.page_bytes == 0


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
    unifiable = _unifiable(layers)
    if grouping == "packed" or (grouping == "auto" and not unifiable):
        return _pack(layers)
    if grouping == "least_waste":
        cut = _cut_groupings(layers) if unifiable else ()
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


def _unifiable(layers: Layers) -> bool:
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return all(
        spec.page_bytes == page_bytes or not isinstance(spec, MLASpec)
        for spec in set(layers.values())
        if not _scales_to(spec, page_bytes)
    )


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


def make_layout(
    groups: Sequence[Group],
    layers: Sequence[str] | None = None,
    *,
    shared: Mapping[str, str] | None = None,
) -> PoolLayout:
    """Lays the layers of one worker into slots.

    Args:
      groups: from `make_groups`, over the layers of all workers.
      layers: the layers that live on this worker; None: all of them. A worker without
        any (a pipeline stage of encoder layers, say) gets a pool of no slots.
      shared: layer -> the layer on this worker whose cache it reads.

    Raises:
      ValueError: layers that are in no group, or shared with a layer elsewhere.
    """
    here = None if layers is None else set(layers)
    names = {name for group in groups for name in group.layers}
    unknown = (here or set()) - names
    if unknown:
        raise ValueError(f"layers {sorted(unknown)} are in none of the groups")
    kept = tuple(_restrict(group, here) for group in groups)
    for layer, owner in (shared or {}).items():
        if layer in names:
            raise ValueError(f"layers[{layer!r}] both owns a cache and shares that of {owner!r}")
        if owner not in (names if here is None else here):
            raise ValueError(
                f"layers[{layer!r}] shares the cache of {owner!r}, which is not on its worker; put "
                "both on one (pipeline_parallel=1 does)"
            )
    return PoolLayout(kept, tuple(_slots(kept)), tuple((shared or {}).items()))


def _slots(groups: Sequence[Group]) -> Iterable[Slot]:
    if len(groups) == 1:  # one group overlays nothing
        pairs = zip(groups[0].layers, groups[0].specs, strict=True)
        return [Slot(spec.page_bytes, (name,)) for name, spec in pairs]
    pages = {spec.page_bytes for group in groups for spec in group.specs}
    if len(pages) > 1:
        names = tuple(name for group in groups for name in group.layers)
        return [Slot(max(group.page_bytes for group in groups), names)]
    longest = max((len(group.layers) for group in groups), default=0)
    members = [
        tuple(group.layers[i] for group in groups if i < len(group.layers)) for i in range(longest)
    ]
    return [Slot(page, names) for names in members for page in pages]


def _restrict(group: Group, here: set[str] | None) -> Group:
    if here is None:
        return group
    pairs = [p for p in zip(group.layers, group.specs, strict=True) if p[0] in here]
    return Group(tuple(name for name, _ in pairs), tuple(spec for _, spec in pairs))


def hybrid_block_size(spec: FullAttentionSpec | MLASpec, state_page_bytes: int) -> int:
    """Smallest multiple of the attention block whose page holds a whole state page.

    State pages are far larger than 16 tokens of keys and values; to let both overlay
    one pool the attention block grows: ``a * ceil(state_page / (a * token_bytes))``
    with ``a`` the block size asked for (for MLA, its least common multiple with 128).
    """
    check_positive(state_page_bytes=state_page_bytes)
    is_mla = isinstance(spec, MLASpec)
    step = math.lcm(spec.block_size, 128) if is_mla else spec.block_size
    step_bytes = dataclasses.replace(spec, block_size=step, page_bytes_padded=None).data_bytes
    return step * -(-state_page_bytes // step_bytes)
