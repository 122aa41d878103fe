"""The form of a pool in a physical order: shapes, places, tiles; refusals by name.

Knows numbers only; the arrays are in `_state`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxkv.groups import PoolLayout
from jaxkv.kernel_blocks import CacheLayout, LayerRuns, blocks_per_kv_block, row_format

Tiles = tuple[int | None, ...]  # per group, tokens of a tile; None: blocks are not cut


class Form(NamedTuple):
    """How many blocks of a layout lie in which order, in one buffer or one per slot."""

    layout: PoolLayout
    num_blocks: int
    order: str
    stacked: bool

    @property
    def axes(self) -> str:
        """What the axes of a buffer count, but for the last, the bytes of a run."""
        axes = CacheLayout(self.order).run_axes
        return axes if self.stacked else axes.replace("L", "")

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the buffers.

        Raises:
          ValueError: slots that one buffer cannot hold, or heads that cannot be dealt out.
        """
        pages = [slot.page_bytes for slot in self.layout.slots]
        heads = [self._heads(slot) for slot in range(len(pages))]
        asks = "stacked=True" if self.order.startswith("L") else f"order={self.order!r}"
        for found, what in ((pages, "page size in bytes"), (heads, "number of KV heads")):
            if self.stacked and len(set(found)) > 1:
                raise ValueError(
                    f"{asks} needs slots of one {what}; this layout has {sorted(set(found))}"
                )
        shapes: list[tuple[int, ...]] = []
        for page, head_runs in zip(pages, heads, strict=True):
            sizes = {"L": len(pages), "B": self.num_blocks, "H": head_runs}
            shapes.append((*(sizes[axis] for axis in self.axes), page // head_runs))
        return shapes[:1] if self.stacked else shapes

    def where(self, layer: str) -> dict[str, Any]:
        """A layer's place in its buffer, as `CacheLayout.view` and `CacheLayout.runs` take it."""
        place = self.layout.place_of(layer)
        return {
            "num_blocks": self.num_blocks,
            "num_layers": len(self.layout.slots) if self.stacked else 1,
            "layer": place.slot if self.stacked else 0,
            "page_bytes": self.layout.slots[place.slot].page_bytes,
            "page_offset_bytes": place.offset_bytes,
        }

    def tiles(self, kernel_block_sizes: Sequence[int | None] | None) -> Tiles:
        """Tiles for views at these sizes; None where whole blocks have such a view anyway.

        Raises:
          ValueError: sizes that a group does not divide into, or that would let a group
            read stale bytes of another; more runs than int32 counts.
        """
        groups = self.layout.groups
        tiles: Tiles = (None,) * len(groups)
        if kernel_block_sizes is not None:
            if len(kernel_block_sizes) != len(groups):
                raise ValueError(
                    f"kernel_block_sizes has {len(kernel_block_sizes)} entries; the layout has "
                    f"{len(groups)} groups"
                )
            tiles = tuple(self._tile(i, size) for i, size in enumerate(kernel_block_sizes))
        cuts = {
            i: group.block_size // (tile or group.block_size)
            for i, (group, tile) in enumerate(zip(groups, tiles, strict=True))
            if group.layers
        }
        self._check_overlays(cuts)
        runs = max((math.prod(shape[:-1]) for shape in self.shapes()), default=0)
        if runs * max(cuts.values(), default=1) > 2**31 - 1:
            raise ValueError(
                f"{runs * max(cuts.values()):,} contiguous runs of bytes in one buffer are more "
                "than int32 counts; use larger kernel_block_sizes, or a buffer per slot"
            )
        return tiles

    def _heads(self, slot: int) -> int:
        """Runs that a slot's pages are dealt out to: the KV heads of its layers, or 1."""
        if CacheLayout(self.order).has_whole_pages:
            return 1
        layers = self.layout.slots[slot].layers
        heads = {name: row_format(self.layout.place_of(name).spec).heads for name in layers}
        if len(set(heads.values())) > 1:
            raise ValueError(
                f"order={self.order!r} deals pages out among KV heads, and layers that share slot "
                f"{slot} differ in them: {heads} (states, latent rows and rows with scales count "
                "as one); use LBNHC, LBHNC, BLNHC or BLHNC"
            )
        for layer in layers:
            self._runs(layer, None)
        return next(iter(heads.values()))

    def _tile(self, group: int, size: int | None) -> int | None:
        members = self.layout.groups[group]
        if size is None or not members.layers:
            return None
        for spec in members.specs:
            try:
                blocks_per_kv_block(spec, size)
            except (TypeError, ValueError) as error:
                raise type(error)(f"kernel_block_sizes[{group}]: {error}") from error
        if size == members.block_size:
            return None
        if all(self._runs(layer, None).rows_run_on for layer in members.layers):
            return None  # tiles would lie where the rows lie anyway
        for layer in members.layers:
            self._runs(layer, size)
        return size

    def _runs(self, layer: str, tile: int | None) -> LayerRuns:
        spec, cache = self.layout.place_of(layer).spec, CacheLayout(self.order, tile)
        try:
            if tile is not None or not cache.has_whole_pages:
                cache.view(spec, **self.where(layer), kernel_block_size=tile)  # or it refuses
            return cache.runs(spec, **self.where(layer))
        except ValueError as error:
            raise ValueError(f"layer={layer!r} in order={self.order!r}: {error}") from error

    def _check_overlays(self, cuts: dict[int, int]) -> None:
        """Groups that are not zeroed must cut common bytes alike, or one reads the other's."""
        zeroed, slots = self.layout.groups_to_zero(), range(len(self.layout.slots))
        for together in [slots] if self.order.startswith("B") else [[slot] for slot in slots]:
            here = {
                group: cut
                for group, cut in cuts.items()
                if not self.layout.slots_of(group).isdisjoint(together)
            }
            stale = [group for group in here if not zeroed[group]]
            if stale and len(set(here.values())) > 1:
                raise ValueError(
                    f"kernel_block_sizes: groups {list(here)} overlay each other and would cut a "
                    f"block into {list(here.values())} tiles, while fresh blocks of groups {stale} "
                    "are not zeroed; choose sizes that give them as many kernel blocks per block, "
                    "or order='LBNHC' and pages without padding"
                )


def choose_form(layout: PoolLayout, num_blocks: int, order: str, stacked: bool | None) -> Form:
    """The form asked for: in orders that begin with the block, one buffer holds all slots."""
    cache = CacheLayout(order)
    if cache.has_whole_blocks and stacked is False:
        raise ValueError(
            f"stacked=False: order={order!r} lays all layers of a block side by side in one "
            "buffer; leave stacked out, or use an order that begins with L"
        )
    return Form(layout, num_blocks, cache.order, bool(stacked) or cache.has_whole_blocks)
