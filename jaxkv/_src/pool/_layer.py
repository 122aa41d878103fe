"""One layer of a cache in a step, with all that its functions need."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float32, Int32, UInt8

from jaxkv._src.cache import (
    BatchRequests,
    CacheFlags,
    CacheLayout,
    GroupBatch,
    KVCache,
    LayerIndex,
    StepBatch,
    check_cache,
)
from jaxkv._src.internal.checks import check_kind
from jaxkv._src.internal.indexing import bit
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.layout import LayerExtents, RowFormat, row_format
from jaxkv._src.specs import FullAttentionSpec
from pallas_kernels import Implementation, import_mosaic

SAME = PartitionSpec()


class LayerForm(NamedTuple):
    """All that the compiled functions of a layer depend on; equal for layers that are alike.

    spec: of the layer.
    extents: of the layer, counted from its first one.
    buffer_shape: of the buffer that holds it, on one device.
    layout: of the cache.
    """

    spec: Any  # a LayerSpec, whose kind `bind` leaves to the caller to check
    extents: LayerExtents
    buffer_shape: tuple[int, ...]
    layout: CacheLayout

    @property
    def row(self) -> RowFormat:
        """The format of one stored row."""
        return row_format(self.spec)

    @property
    def has_heads(self) -> bool:
        """Whether rows have an axis of heads: whether they hold K and V."""
        return self.row.key_elements is not None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one stored row, with an axis of heads if there is one."""
        return (self.row.heads, self.row.width) if self.has_heads else (self.row.width,)

    def by_head(self, dim: int) -> PartitionSpec:
        """Returns the PartitionSpec of keys, values, queries or rows with heads on axis ``dim``."""
        axis = self.layout.heads_axis
        if axis is None or not isinstance(self.spec, FullAttentionSpec):
            return SAME
        return PartitionSpec(*[None] * dim, axis)


class LayerLocation(NamedTuple):
    """The location of a layer in a cache.

    form: shared with all layers that are alike.
    group: index of its group.
    buffer: index of the buffer that holds it.
    first: its first extent in that buffer.
    number: its row of `KVCache.scales`.
    """

    form: LayerForm
    group: int
    buffer: int
    first: int
    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BoundLayer:
    """A layer of a cache in a step: what a function that is compiled once for alike layers takes.

    Layers that are alike differ in arrays alone, so one trace and one lowering serve them.
    """

    buffer: UInt8[Array, "..."]  # the buffer of the pool that stores the layer
    first: Int32[Array, ""]  # the layer's first extent; -1: no layer has this index
    scales: Float32[Array, "layers 2"] | None  # of all layers of the cache; None: 1
    number: Int32[Array, ""]  # the layer's row of `scales`
    requests: GroupBatch
    form: LayerForm = dataclasses.field(metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> BatchRequests:
        """The requests of the step."""
        return self.requests.batch

    @property
    def layout(self) -> CacheLayout:
        """The layout of the cache."""
        return self.form.layout

    @property
    def key_value_scales(self) -> tuple[Array | float, Array | float]:
        """The factors by which reads multiply stored K and V, float32[] each."""
        if self.scales is None:
            return 1.0, 1.0
        pair = lax.dynamic_index_in_dim(self.scales, self.number, keepdims=False)
        return pair[0], pair[1]

    @property
    def ranks_of_heads(self) -> int:
        """The number of ranks whose KV heads an array holds here: 1 inside ``shard_map``."""
        is_sharded = self.buffer.shape != self.form.buffer_shape
        return self.layout.num_ranks if is_sharded and self.layout.heads_axis else 1

    def partition_specs(self) -> Any:
        """Returns the sharding for ``jax.shard_map``: a tree of PartitionSpecs."""
        same: Any = SAME
        return dataclasses.replace(
            self,
            buffer=self.layout.buffer_spec,
            first=same,
            scales=same,
            number=same,
            requests=same,
        )


def bind(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> BoundLayer:
    """Resolves a layer, or the layer of its group that an index names, in a step.

    Args:
      implementation: of the kernels.

    Raises:
      TypeError, ValueError: arguments of other types, a batch of another cache, an unknown layer,
        a cache without a pool, or a bad layer_index (see `CacheLayout.at_layer_index`).
    """
    check_batch(cache, batch)
    layout = cache.layout
    layout.placement_of(layer)
    check_pool(cache)
    location = locate(layout, layer)
    first = layout.at_layer_index(layer, layer_index, lambda name: locate(layout, name).first, -1)
    number = layout.at_layer_index(layer, layer_index, lambda name: locate(layout, name).number, 0)
    import_mosaic(implementation)
    return BoundLayer(
        buffer=cache.buffers[location.buffer],
        first=_as_int32(first),
        scales=cache.scales,
        number=_as_int32(number),
        requests=batch.in_group(location.group),
        form=location.form,
        implementation=implementation,
    )


def put_back(cache: KVCache, layer: str, bound: BoundLayer, buffer: Array | None = None) -> KVCache:
    """Returns the cache after a function of a layer: with its buffer, and with error flags.

    The flags tell of errors of the batch, which the cache already has if it is the one that
    `apply_step` returned, of a batch of another step, and of a layer_index that does not exist.
    """
    status, of_batch = cache.status, bound.batch.status
    if of_batch is not status or not isinstance(bound.first, np.integer):
        status = _status_after(status, of_batch, bound.first)
    if buffer is None:
        return dataclasses.replace(cache, status=status)
    buffers = list(cache.buffers)
    buffers[locate(cache.layout, layer).buffer] = buffer
    return dataclasses.replace(cache, status=status, buffers=tuple(buffers))


@jax.jit
def _status_after(status: Array, of_batch: Array, first: Array) -> Array:
    # The number passes through in a form in which XLA sees that it stays the same, and so merges
    # the comparisons of all layers.
    number = status[1]
    flags = bit(CacheFlags.STALE_BATCH, number != of_batch[1])
    flags |= bit(CacheFlags.BAD_LAYER_INDEX, first < 0)
    return jnp.stack([status[0] | of_batch[0] | flags, number])


@functools.lru_cache(maxsize=4096)
def locate(layout: CacheLayout, layer: str) -> LayerLocation:
    """Returns the location of a layer in the caches of a layout.

    Raises:
      TypeError, ValueError: an unknown layer.
    """
    placement, buffers = layout.placement_of(layer), layout.buffers
    index, extents = buffers.buffer_of(layer), buffers.extents(layer)
    shape = buffers.shapes[index]
    extents = _cut_to_layer(extents, math.prod(shape))
    form = LayerForm(placement.spec, extents._replace(first=0), shape, layout)
    number = layout.layer_numbers[layout.owner_of(layer)]
    return LayerLocation(form, placement.group, index, extents.first, number)


def _cut_to_layer(extents: LayerExtents, num_bytes: int) -> LayerExtents:
    """Cuts extents into parts of the layer's size, if these fill an extent.

    Layers that lie side by side in a page then differ in their first extent alone.
    """
    size = extents.data_bytes
    parts = extents.extent_bytes // size
    if extents.extent_bytes % size or extents.start_bytes % size or num_bytes // size > INT32_MAX:
        return extents
    return extents._replace(
        extent_bytes=size,
        first=extents.first * parts + extents.start_bytes // size,
        tile_step=extents.tile_step * parts,
        head_step=extents.head_step * parts,
        start_bytes=0,
    )


def check_pool(cache: KVCache) -> None:
    """Raises TypeError or ValueError unless a cache has a pool."""
    check_cache(cache)
    if not cache.buffers:
        raise ValueError("the cache has no pool: make it without tables_only=True")


def check_whole(buffer: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a buffer has the shape that the layout gives.

    Outside ``shard_map`` a sharded pool has larger buffers, and a write would reach only the part
    of the first device.
    """
    if buffer.shape != shape:
        raise ValueError(
            f"a buffer of the pool has shape {buffer.shape} and the layout {shape}: the pool "
            "is sharded; call this inside jax.shard_map, with cache.partition_specs()"
        )


def check_batch(cache: KVCache, batch: StepBatch) -> None:
    """Raises TypeError or ValueError unless the batch belongs to a step of this cache."""
    check_cache(cache)
    check_kind(StepBatch, "the StepBatch that apply_step returned", batch=batch)
    if batch.layout is not cache.layout and batch.layout != cache.layout:
        raise ValueError(
            "batch belongs to another cache; use the one that apply_step returned with this cache"
        )


def _as_int32(number: Array | int) -> Any:
    return np.int32(number) if isinstance(number, int) else number
