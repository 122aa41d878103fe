"""Where every layer lives: slots of a block, offsets, and which bytes are overlaid."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxkv.specs import LayerSpec


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
        if not self.layers:  # none of them on this worker
            return "0 layers"
        return f"{len(self.layers)} {self.spec.kind} @ {self.block_size}"

    def __repr__(self) -> str:
        return f"Group({self}, {self.page_bytes:,} bytes per block)"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One page per block, and the layers that lie on it."""

    page_bytes: int
    layers: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Slot({self.page_bytes:,} bytes, {len(self.layers)} layers)"


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

    def __repr__(self) -> str:
        return (
            f"PoolLayout({len(self.groups)} groups in {len(self.slots)} slots, "
            f"{self.bytes_per_block:,} bytes per block)"
        )

    def _repr_html_(self) -> str:
        from jaxkv.groups._spans import layout_svg  # for Jupyter only: planning starts without it

        return layout_svg(self)

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
