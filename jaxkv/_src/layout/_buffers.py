"""The buffers of a pool: shapes, and the location of every layer in them. No jax."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.text import shown
from jaxkv._src.layout._order import PhysicalOrder
from jaxkv._src.layout._rows import blocks_per_kv_block, row_format
from jaxkv._src.layout._view import LayerExtents, LayerView, PagePlacement
from jaxkv._src.planning import PoolLayout

Tiles = tuple[int | None, ...]  # per group, tokens of a tile; None: blocks are not cut


@dataclasses.dataclass(frozen=True)
class PoolBuffers:
    """The buffers of N blocks of a layout, in one physical order.

    Buffers are ``uint8``. With ``stacked``, the S tensors of one page size share a buffer;
    orders that begin with the block have one buffer for all tensors. Shapes, where extent =
    page / H:

      ============  =================  =====================
      order         one per tensor     stacked
      ============  =================  =====================
      LBNHC, LBHNC  [N, page]          [S, N, page]
      LHBNC         [H, N, extent]     [S, H, N, extent]
      BLNHC, BLHNC                     [N, S, page]
      BHLNC                            [N, H, S, extent]
      ============  =================  =====================

    layout: the layout of a block on one worker.
    num_blocks: blocks of the pool.
    order: one of `jaxkv.layout.ORDERS`.
    stacked: whether tensors share buffers.
    tiles: per group, the tokens of a tile (`PhysicalOrder`); None: blocks are not cut.
    """

    layout: PoolLayout
    num_blocks: int
    order: str
    stacked: bool
    tiles: Tiles

    @functools.cached_property
    def axes(self) -> str:
        """The letters of a buffer's axes, without the last, which counts bytes."""
        axes = PhysicalOrder(self.order).extent_axes
        return axes if self.stacked else axes.replace("L", "")

    @property
    def block_axis(self) -> int:
        """The axis of a buffer that counts blocks."""
        return self.axes.index("B")

    @functools.cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Per buffer, the tensors that it holds."""
        if not self.stacked:
            return tuple((tensor,) for tensor in range(len(self.layout.tensors)))
        stacks: dict[tuple[int, int], list[int]] = {}
        for index, tensor in enumerate(self.layout.tensors):
            stacks.setdefault((tensor.page_bytes, self._heads(index)), []).append(index)
        return tuple(map(tuple, stacks.values()))

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the buffers; their bytes are ``num_blocks * layout.bytes_per_block``."""
        shapes: list[tuple[int, ...]] = []
        for tensors in self.stacks:
            heads = self._heads(tensors[0])
            sizes = {"L": len(tensors), "B": self.num_blocks, "H": heads}
            page = self.layout.tensors[tensors[0]].page_bytes
            shapes.append((*(sizes[axis] for axis in self.axes), page // heads))
        return tuple(shapes)

    def buffer_of(self, layer: str) -> int:
        """Returns the index of the buffer that holds a layer."""
        tensor = self.layout.placement_of(layer).tensor
        return next(i for i, tensors in enumerate(self.stacks) if tensor in tensors)

    def page_placement(self, layer: str) -> PagePlacement:
        """Returns the location of a layer's pages in its buffer."""
        placement = self.layout.placement_of(layer)
        tensors = self.stacks[self.buffer_of(layer)]
        return PagePlacement(
            num_blocks=self.num_blocks,
            num_layers=len(tensors),
            layer=tensors.index(placement.tensor),
            page_bytes=self.layout.tensors[placement.tensor].page_bytes,
            page_offset_bytes=placement.offset_bytes,
        )

    def physical_order(self, layer: str) -> PhysicalOrder:
        """Returns the order and the tiles in which a layer is stored."""
        return PhysicalOrder(self.order, self.tiles[self.layout.placement_of(layer).group])

    def extents(self, layer: str) -> LayerExtents:
        """Returns the extents of a layer in its buffer."""
        spec = self.layout.placement_of(layer).spec
        return self.physical_order(layer).extents(spec, self.page_placement(layer))

    @property
    def counts_through(self) -> bool:
        """Whether one axis of a view counts the blocks of all layers of a buffer."""
        return self.stacked and self.axes.startswith("LB")

    def view(self, layer: str, kernel_block_size: int | None = None) -> LayerView:
        """Returns a layer as a strided array; see `PhysicalOrder.view`."""
        spec, pages = self.layout.placement_of(layer).spec, self.page_placement(layer)
        return self.physical_order(layer).view(spec, pages, kernel_block_size=kernel_block_size)

    def byte_view(self, layer: str) -> LayerView:
        """Returns a layer's bytes as contiguous extents; see `PhysicalOrder.byte_view`."""
        spec, pages = self.layout.placement_of(layer).spec, self.page_placement(layer)
        return self.physical_order(layer).byte_view(spec, pages)

    def stacked_layers(self, layer: str) -> tuple[str, ...]:
        """Returns the layers that ``layer_index=`` indexes: all of the layer's group and spec.

        Args:
          layer: any of them.

        Raises:
          ValueError: they do not lie at one offset in tensors of one buffer, so that an index
            cannot choose among them.
        """
        placement = self.layout.placement_of(layer)
        names = self.layout.groups[placement.group].layers
        names = tuple(
            name for name in names if self.layout.placement_of(name).spec == placement.spec
        )
        buffers = {self.buffer_of(name) for name in names}
        if len({self.layout.placement_of(name).offset_bytes for name in names}) > 1:
            raise ValueError(
                f"layer_index= cannot choose among the layers {list(names)}, which share one page; "
                'plan with grouping="rule", or name each layer'
            )
        if len(buffers) > 1:
            raise ValueError(
                f"layer_index= cannot choose among the layers {list(names)}, which lie in "
                f"{len(buffers)} buffers; make the cache with stacked=True, or name each layer"
            )
        return names

    def __getstate__(self) -> dict[str, object]:  # without cached values
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.num_blocks, self.order, self.stacked, self.tiles))

    def __hash__(self) -> int:  # cached: jit hashes it at every dispatch
        return self._hash

    def _heads(self, tensor: int) -> int:
        """Returns the extents that a tensor's pages are divided among: KV heads, or 1."""
        if PhysicalOrder(self.order).has_whole_pages:
            return 1
        layers = self.layout.tensors[tensor].layers
        heads = {name: row_format(self.layout.placement_of(name).spec).heads for name in layers}
        if len(set(heads.values())) > 1:
            raise ValueError(
                f"order={self.order!r} divides pages among KV heads, and layers that share "
                f"tensor {tensor} differ in them: {heads} (states, latent vectors and tokens "
                "with scales count as one); use LBNHC, LBHNC, BLNHC or BLHNC"
            )
        return next(iter(heads.values()))


def plan_buffers(
    layout: PoolLayout,
    num_blocks: int,
    *,
    order: str,
    stacked: bool | None,
    kernel_block_sizes: Sequence[int | None] | None,
    groups_to_zero: Sequence[bool],
) -> PoolBuffers:
    """Chooses the buffers of a pool.

    Args:
      layout: the layout of a block on one worker.
      num_blocks: blocks of the pool.
      order: a physical order, as for `jaxkv.make_cache`.
      stacked: True, False, or None: stacked unless the slots of a buffer's layers, counted
        through, pass int32.
      kernel_block_sizes: per group, the tokens of a kernel block; None: the block size.
      groups_to_zero: per group, whether fresh blocks are zeroed, as `Plan.groups_to_zero`.

    Raises:
      TypeError: kernel block sizes that are not a sequence of ints.
      ValueError: an order that does not suit the layout, kernel block sizes that do not divide
        a group's blocks or that would let a group read stale bytes of another, or more extents
        than int32 counts.
    """
    physical = PhysicalOrder(order)
    if physical.has_whole_blocks and stacked is False:
        raise ValueError(
            f"stacked=False: order={order!r} lays all layers of a block side by side in one "
            "buffer; leave stacked at None, or use an order that begins with L"
        )
    whole = (None,) * len(layout.groups)
    stack = stacked is not False
    buffers = PoolBuffers(layout, num_blocks, physical.order, stack, whole)
    if stacked is None and not physical.has_whole_blocks and not _slots_fit(buffers):
        buffers = dataclasses.replace(buffers, stacked=False)
    _check_pages(buffers)
    tiles = tuple(
        _tile(buffers, group, size)
        for group, size in enumerate(_checked_sizes(layout, kernel_block_sizes))
    )
    _check_cuts(buffers, tiles, groups_to_zero)
    return dataclasses.replace(buffers, tiles=tiles)


def _slots_fit(buffers: PoolBuffers) -> bool:
    """Returns whether the slots of all layers of each buffer, counted through, fit into int32."""
    layout = buffers.layout
    groups = [group for group in layout.groups if group.layers]  # here, on this worker
    sizes = [group.block_size for group in groups if group.growth.stores != "state"]
    longest = max(map(len, buffers.stacks), default=0)
    return longest * buffers.num_blocks * max(sizes, default=1) <= INT32_MAX


def _check_pages(buffers: PoolBuffers) -> None:
    """Raises ValueError unless the order suits the layout's pages."""
    physical = PhysicalOrder(buffers.order)
    pages = sorted({tensor.page_bytes for tensor in buffers.layout.tensors})
    if physical.has_whole_blocks and len(pages) > 1:
        raise ValueError(
            f"order={buffers.order!r} needs tensors of one page size in bytes; this layout has "
            f"{pages}"
        )
    if physical.has_whole_blocks and len(buffers.stacks) > 1:
        raise ValueError(
            f"order={buffers.order!r} needs tensors of one number of KV heads; this layout has "
            f"{sorted({buffers._heads(tensors[0]) for tensors in buffers.stacks})}"
        )
    if not physical.has_whole_pages:
        for group in buffers.layout.groups:
            for layer in group.layers:
                _layer_extents(buffers, layer, None)


def _checked_sizes(
    layout: PoolLayout, kernel_block_sizes: Sequence[int | None] | None
) -> Sequence[int | None]:
    if kernel_block_sizes is None:
        return (None,) * len(layout.groups)
    if not isinstance(kernel_block_sizes, Sequence):
        raise TypeError(
            f"kernel_block_sizes={shown(kernel_block_sizes)} must be a sequence, one per group"
        )
    if len(kernel_block_sizes) != len(layout.groups):
        raise ValueError(
            f"kernel_block_sizes has {len(kernel_block_sizes)} entries; the plan has "
            f"{len(layout.groups)} groups"
        )
    return kernel_block_sizes


def _tile(buffers: PoolBuffers, group: int, size: int | None) -> int | None:
    """Returns the tile for views at this size; None: whole blocks have such a view anyway."""
    members = buffers.layout.groups[group]
    if size is None or not members.layers:
        return None
    for spec in members.specs:
        try:
            blocks_per_kv_block(spec, size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"kernel_block_sizes[{group}]: {error}") from error
    if size == members.block_size:
        return None
    if all(_layer_extents(buffers, layer, None).rows_are_evenly_spaced for layer in members.layers):
        return None  # tiles would lie where the rows lie anyway
    for layer in members.layers:
        _layer_extents(buffers, layer, size)
    return size


def _layer_extents(buffers: PoolBuffers, layer: str, tile: int | None) -> LayerExtents:
    spec, pages = buffers.layout.placement_of(layer).spec, buffers.page_placement(layer)
    order = PhysicalOrder(buffers.order, tile)
    try:
        if tile is not None or not order.has_whole_pages:
            order.view(spec, pages, kernel_block_size=tile)  # raises unless there is one
        return order.extents(spec, pages)
    except ValueError as error:
        raise ValueError(f"layer={layer!r} in order={buffers.order!r}: {error}") from error


def _check_cuts(buffers: PoolBuffers, tiles: Tiles, groups_to_zero: Sequence[bool]) -> None:
    layout = buffers.layout
    cuts = {
        i: group.block_size // (tile or group.block_size)
        for i, (group, tile) in enumerate(zip(layout.groups, tiles, strict=True))
        if group.layers
    }
    _check_overlays(cuts, groups_to_zero)
    extents = max((math.prod(shape[:-1]) for shape in buffers.shapes), default=0)
    if extents * max(cuts.values(), default=1) > INT32_MAX:
        raise ValueError(
            f"{extents * max(cuts.values()):,} contiguous extents of bytes in one buffer are more "
            "than int32 counts; use larger kernel_block_sizes, or stacked=False"
        )


def _check_overlays(cuts: dict[int, int], groups_to_zero: Sequence[bool]) -> None:
    """Raises if groups that are not zeroed cut the bytes they share in different ways.

    One would then read what the other wrote at the same id. All groups of a worker have
    layers in its first tensor.
    """
    stale = [group for group in cuts if not groups_to_zero[group]]
    if stale and len(set(cuts.values())) > 1:
        raise ValueError(
            f"kernel_block_sizes: groups {list(cuts)} overlay each other and would cut a "
            f"block into {list(cuts.values())} tiles, while fresh blocks of groups {stale} "
            "are not zeroed; choose sizes that give them as many kernel blocks per block, "
            "order='LBNHC' and pages without padding, or plan with zero_policy='always'"
        )
