"""Groups of layers, and the bytes of a block that each layer uses. No jax."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxkv._src.internal.checks import check_each, check_kind
from jaxkv._src.internal.text import shown
from jaxkv._src.specs import Growth, LayerSpec


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers of equal growth, which share one block table: a block id holds for all of them.

    layers: names of the layers.
    specs: one per layer.
    """

    layers: tuple[str, ...]
    specs: tuple[LayerSpec, ...]

    @property
    def growth(self) -> Growth:
        """The rule that says which blocks of the group a request needs."""
        return self.specs[0].growth

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.specs[0].block_size

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the group takes from the pool once, for attention sinks."""
        return max(spec.reserved_blocks for spec in self.specs)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block's pages, over the layers of the group."""
        return sum(spec.page_bytes for spec in self.specs)

    def __str__(self) -> str:
        if not self.layers:  # this worker has none of them
            return "0 layers"
        return f"{len(self.layers)} {self.specs[0].kind} @ {self.block_size}"

    def __repr__(self) -> str:
        return f"Group({self}, {self.page_bytes:,} bytes per block)"


@dataclasses.dataclass(frozen=True)
class PoolTensor:
    """One part of the pool: a page per block, and the layers that share it.

    page_bytes: bytes of a page.
    layers: one of each group, or the packed layers of several.
    """

    page_bytes: int
    layers: tuple[str, ...]

    def __repr__(self) -> str:
        return f"PoolTensor({self.page_bytes:,} bytes, {len(self.layers)} layers)"


class LayerPlacement(NamedTuple):
    """The location of one layer: a group, a tensor of the pool, and an offset in its page."""

    group: int  # index of the group, and of the block table that the layer reads
    tensor: int
    offset_bytes: int
    spec: LayerSpec


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The tensors that one block consists of, and the placement of every layer in them.

    groups: the groups, restricted to the layers of one worker.
    tensors: the parts of a block; a group has layers in the first ones, as many as it needs.
    shared: pairs (layer, the layer whose cache it reads).
    """

    groups: tuple[Group, ...]
    tensors: tuple[PoolTensor, ...]
    shared: tuple[tuple[str, str], ...] = ()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all tensors together."""
        return sum(tensor.page_bytes for tensor in self.tensors)

    def __repr__(self) -> str:
        return (
            f"PoolLayout({len(self.groups)} groups in {len(self.tensors)} tensors, "
            f"{self.bytes_per_block:,} bytes per block)"
        )

    def placement_of(self, layer: str) -> LayerPlacement:
        """Returns the placement of a layer, or of the layer whose cache it shares.

        Raises:
          TypeError: not the name of a layer.
          ValueError: the layer keeps no cache on this worker.
        """
        if not isinstance(layer, str):
            raise TypeError(
                f"layer must be the name of a layer, got {shown(layer)}; in a loop over layers "
                "pass the name of any layer of the group and the traced index as layer_index="
            )
        if layer not in self._places:
            raise ValueError(f"layer={layer!r} has no cache here; use one of {list(self._places)}")
        return self._places[layer]

    def tensors_of(self, group: int) -> frozenset[int]:
        """Returns the tensors that hold a group's layers."""
        return frozenset(self._places[layer].tensor for layer in self.groups[group].layers)

    def group_bytes(self, group: int) -> int:
        """Returns the bytes of one block in the tensors that hold a group's layers."""
        return sum(self.tensors[index].page_bytes for index in self.tensors_of(group))

    def groups_to_zero(self) -> tuple[bool, ...]:
        """Returns, per group, whether a fresh block can hold bytes of another meaning.

        That is so when a layer of the group shares bytes with a layer of another group that
        reads them differently: in dtype, quantisation or geometry. Different dtypes inside one
        group do not matter, because there the same bytes always belong to the same layer.
        """
        flags = [False] * len(self.groups)
        for tensor in self.tensors:
            readers = [self._places[layer] for layer in tensor.layers]
            for reader in readers:
                flags[reader.group] |= any(_misread(reader, other) for other in readers)
        return tuple(flags)

    @functools.cached_property
    def _places(self) -> dict[str, LayerPlacement]:
        tensors = {layer: i for i, tensor in enumerate(self.tensors) for layer in tensor.layers}
        placements: dict[str, LayerPlacement] = {}
        for index, group in enumerate(self.groups):
            used: dict[int, int] = {}  # tensor -> bytes that the group's layers take there
            for layer, spec in zip(group.layers, group.specs, strict=True):
                tensor = tensors[layer]
                placements[layer] = LayerPlacement(index, tensor, used.get(tensor, 0), spec)
                used[tensor] = used.get(tensor, 0) + spec.page_bytes
        return placements | {layer: placements[owner] for layer, owner in self.shared}

    def __getstate__(self) -> dict[str, object]:  # cached values stay behind
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.tensors, self.shared))

    def __hash__(self) -> int:  # cached: jit hashes the layout at every dispatch
        return self._hash


def _misread(place: LayerPlacement, other: LayerPlacement) -> bool:
    """Returns whether two layers of different groups read common bytes in different ways."""
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
    """Lays the layers of one worker out in tensors.

    With pages of one size, layer ``i`` of every group lies in tensor ``i``. With one group, every
    layer has a tensor of its own width. Several groups of mixed pages share one tensor, in which
    each group packs its layers.

    Args:
      groups: from `make_groups`, over the layers of all workers.
      layers: the layers of this worker; by default all of them. A worker without any (a pipeline
        stage of encoder layers, say) gets a pool of no tensors.
      shared: layer -> the layer on this worker whose cache it reads.

    Raises:
      ValueError: layers that are in no group, or that share the cache of a layer elsewhere.
    """
    check_each(Group, "a Group", groups=groups)
    if layers is not None:
        check_each(str, "the name of a layer", layers=layers)
    here = None if layers is None else set(layers)
    kept = tuple(_restrict(group, here) for group in groups)
    if here is not None and sum(len(group.layers) for group in kept) < len(here):
        unknown = here.difference(*(group.layers for group in groups))
        raise ValueError(f"layers {sorted(unknown)} are in none of the groups; group them first")
    if shared is not None:
        check_kind(Mapping, "a mapping from layers to layers", shared=shared)
        _check_shared(groups, here, shared)
    return PoolLayout(kept, tuple(_tensors(kept)), tuple((shared or {}).items()))


def _check_shared(
    groups: Sequence[Group], here: set[str] | None, shared: Mapping[str, str]
) -> None:
    names = {name for group in groups for name in group.layers}
    for layer, owner in shared.items():
        if layer in names:
            raise ValueError(
                f"layers[{layer!r}] both owns a cache and shares the cache of {owner!r}"
            )
        if owner not in names:
            raise ValueError(
                f"layers[{layer!r}] shares the cache of {owner!r}, which is no layer with a cache "
                "of its own; name one that is"
            )
        if owner not in (names if here is None else here):
            raise ValueError(
                f"layers[{layer!r}] shares the cache of {owner!r}, which is not on its worker; put "
                "both on one worker (pipeline_parallel=1 does)"
            )


def _tensors(groups: Sequence[Group]) -> Iterable[PoolTensor]:
    if len(groups) == 1:  # one group overlays nothing
        pairs = zip(groups[0].layers, groups[0].specs, strict=True)
        return [PoolTensor(spec.page_bytes, (name,)) for name, spec in pairs]
    pages = {spec.page_bytes for group in groups for spec in group.specs}
    if len(pages) > 1:
        names = tuple(name for group in groups for name in group.layers)
        return [PoolTensor(max(group.page_bytes for group in groups), names)]
    longest = max((len(group.layers) for group in groups), default=0)
    members = [
        tuple(group.layers[i] for group in groups if i < len(group.layers)) for i in range(longest)
    ]
    return [PoolTensor(page, names) for names in members for page in pages]


def _restrict(group: Group, here: set[str] | None) -> Group:
    if here is None:
        return group
    kept = list(map(here.__contains__, group.layers))
    return Group(
        tuple(itertools.compress(group.layers, kept)), tuple(itertools.compress(group.specs, kept))
    )
