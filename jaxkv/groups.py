"""Layers -> groups that share a block table -> the layout of one pool.

Knows how layers of different kinds are cut into groups and which layers lie on the
same bytes. Knows nothing of memory sizes, requests or arrays, and never imports jax.

All groups draw block ids from one pool. A pool is a row of *slots*; a slot holds one
page per block. Layer ``i`` of every group lives in slot ``i``: a block belongs to one
group at a time, so layers of different groups can overlay each other, and the bytes
of a block mean whatever the group that owns it says.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxkv.checks import check_positive
from jaxkv.specs import FullAttentionSpec, LayerSpec, MLASpec, StateSpec


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

    def __str__(self) -> str:
        return f"{len(self.layers)} {self.spec.kind} @ {self.block_size}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One page per block, and the layers that lie on it, at most one per group."""

    page_bytes: int
    layers: tuple[str, ...]


class Place(NamedTuple):
    """Where one layer lives: the group whose ids it reads, its slot, what it stores."""

    group: int
    slot: int
    spec: LayerSpec


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Where every layer lives.

    groups: the groups, restricted to the layers of one worker.
    slots: what one block is made of.
    """

    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]

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

    def groups_to_zero(self) -> tuple[bool, ...]:
        """Per group: can a fresh block hold bytes that another meaning wrote?

        True iff one of the group's slots also carries a layer of another group whose
        bytes are read differently (dtype, quantisation or geometry). Different dtypes
        inside one group do not matter: the same id always means the same layer there.
        """
        meanings: list[set[object]] = [set() for _ in self.slots]
        for group in self.groups:
            for layer, spec in zip(group.layers, group.specs, strict=True):
                meanings[self._places[layer].slot].add(spec.interpretation)
        return tuple(
            any(len(meanings[self._places[layer].slot]) > 1 for layer in group.layers)
            for group in self.groups
        )

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        slots = {layer: i for i, slot in enumerate(self.slots) for layer in slot.layers}
        return {
            layer: Place(index, slots[layer], spec)
            for index, group in enumerate(self.groups)
            for layer, spec in zip(group.layers, group.specs, strict=True)
        }

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.slots))

    def __hash__(self) -> int:  # cached: jit hashes the layout at every dispatch
        return self._hash


def unify_pages(layers: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Gives every layer a page of the same bytes, the largest among them.

    A smaller page grows by taking more tokens per block where that divides; state
    pages, and attention pages that do not divide, are padded instead.

    Raises:
      ValueError: no layers, or an MLA page that neither divides nor may be padded.
    """
    if not layers:
        raise ValueError("layers is empty: there is no page to unify")
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return {name: _with_page(name, spec, page_bytes) for name, spec in layers.items()}


def _with_page(name: str, spec: LayerSpec, page_bytes: int) -> LayerSpec:
    if spec.page_bytes == page_bytes:
        return spec
    ratio, remainder = divmod(page_bytes, spec.page_bytes)
    if remainder == 0 and not isinstance(spec, StateSpec) and spec.page_bytes_padded is None:
        return dataclasses.replace(spec, block_size=spec.block_size * ratio)
    if isinstance(spec, MLASpec):
        raise ValueError(
            f"layers[{name!r}]: its {spec.page_bytes}-byte MLA page does not divide the "
            f"{page_bytes}-byte page of the pool, and MLA kernels take no padding; choose "
            "a block_size whose page divides it"
        )
    return dataclasses.replace(spec, page_bytes_padded=page_bytes)


def make_groups(layers: Mapping[str, LayerSpec]) -> tuple[Group, ...]:
    """Cuts layers into groups, each with one growth.

    Equal growth throughout: one group, whatever the page widths. Otherwise pages are
    unified, layers bucketed by spec in order of first appearance, and buckets cut into
    groups of about the smallest bucket's size (the largest's, when that is less than
    1.5 times the smallest), so that slots are shared evenly.

    Raises:
      ValueError: pages that cannot be unified.
    """
    if not layers:
        return ()
    if len({spec.growth for spec in layers.values()}) == 1:
        return (Group(tuple(layers), tuple(layers.values())),)
    buckets: dict[LayerSpec, list[str]] = {}
    for name, spec in unify_pages(layers).items():
        buckets.setdefault(spec, []).append(name)
    sizes = [len(names) for names in buckets.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups = []
    for spec, names in buckets.items():
        count = -(-len(names) // size)
        for part in (names[i::count] for i in range(count)):
            groups.append(Group(tuple(part), (spec,) * len(part)))
    return tuple(groups)


def make_layout(groups: Sequence[Group], layers: Sequence[str] | None = None) -> PoolLayout:
    """Lays the layers of one worker into slots.

    Args:
      groups: from `make_groups`, over the layers of all workers.
      layers: the layers that live on this worker; None: all of them. A worker without
        any (a pipeline stage of encoder layers, say) gets a pool of no slots.
    """
    here = None if layers is None else set(layers)
    unknown = (here or set()) - {name for group in groups for name in group.layers}
    if unknown:
        raise ValueError(f"layers {sorted(unknown)} are in none of the groups")
    kept = tuple(_restrict(group, here) for group in groups)
    if len(kept) == 1:  # one group overlays nothing: every layer has a slot of its own width
        pairs = zip(kept[0].layers, kept[0].specs, strict=True)
        return PoolLayout(kept, tuple(Slot(spec.page_bytes, (name,)) for name, spec in pairs))
    slots = []
    for i in range(max((len(group.layers) for group in kept), default=0)):
        members = [(g.layers[i], g.specs[i]) for g in kept if i < len(g.layers)]
        names = tuple(name for name, _ in members)
        slots.append(Slot(max(spec.page_bytes for _, spec in members), names))
    return PoolLayout(kept, tuple(slots))


def _restrict(group: Group, here: set[str] | None) -> Group:
    if here is None:
        return group
    pairs = [p for p in zip(group.layers, group.specs, strict=True) if p[0] in here]
    return Group(tuple(name for name, _ in pairs), tuple(spec for _, spec in pairs))


def hybrid_block_size(spec: FullAttentionSpec | MLASpec, state_page_bytes: int) -> int:
    """Smallest multiple of the attention block whose page holds a whole state page.

    State pages are far larger than 16 tokens of keys and values; to let both overlay
    one pool the attention block grows: ``a * ceil(state_page / (a * token_bytes))``
    with ``a`` the block size asked for (at least 128 for MLA).
    """
    check_positive(state_page_bytes=state_page_bytes)
    step = max(spec.block_size, 128) if isinstance(spec, MLASpec) else spec.block_size
    return step * -(-state_page_bytes // (step * spec.token_bytes))
