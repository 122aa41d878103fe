"""The static description of a cache: its tables, its pool and its mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int32

from jaxkv._src.internal.checks import check_int32
from jaxkv._src.internal.indexing import take
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.layout import PoolBuffers
from jaxkv._src.planning import LayerPlacement
from jaxkv._src.specs import Growth

LayerIndex = Int32[Array, ""] | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything about a cache that a compiled program depends on, except array shapes.

    growths: per group, the rule by which requests take blocks.
    blocks_per_kv_block: per group, kernel blocks per block.
    row_blocks: per group, logical blocks of a table row.
    buffers: shapes of the pool's buffers, and the location of every layer in them.
    has_buffers: False for a cache of block tables only.
    max_requests: rows of the tables.
    context_parallel: ranks among which the positions of a request are divided.
    interleave_tokens: consecutive positions that a rank gets at a time.
    rank: this process's rank, if no mesh axis gives it.
    mesh, axis: the mesh and the axis that shard the pool: by position with context
      parallelism, else by KV head. None: the pool is not sharded.
    """

    growths: tuple[Growth, ...]
    blocks_per_kv_block: tuple[int, ...]
    row_blocks: tuple[int, ...]
    buffers: PoolBuffers
    has_buffers: bool
    max_requests: int
    context_parallel: int
    interleave_tokens: int
    rank: int | None
    mesh: Mesh | None
    axis: str | None

    @property
    def num_blocks(self) -> int:
        return self.buffers.num_blocks

    @property
    def heads_axis(self) -> str | None:
        """The mesh axis over which KV heads are divided; None: they are not divided."""
        return self.axis if self.context_parallel == 1 else None

    @property
    def num_ranks(self) -> int:
        """Devices among which the pool is divided."""
        return 1 if self.mesh is None or self.axis is None else self.mesh.shape[self.axis]

    @functools.cached_property
    def table_offsets(self) -> tuple[int, ...]:
        """Per group, where its logical blocks begin in a row of the tables; then the row's end."""
        return tuple(itertools.accumulate(self.row_blocks, initial=0))

    @functools.cached_property
    def layer_numbers(self) -> dict[str, int]:
        """Layer that owns a cache -> its number, group by group; see `KVCache.scales`."""
        groups = self.buffers.layout.groups
        names = [name for group in groups for name in group.layers]
        return {name: index for index, name in enumerate(names)}

    def placement_of(self, layer: str) -> LayerPlacement:
        """Returns the placement of a layer; see `PoolLayout.placement_of`."""
        return self.buffers.layout.placement_of(layer)

    def owner_of(self, layer: str) -> str:
        """Returns the layer whose cache a layer reads: itself, or the one that it shares."""
        self.placement_of(layer)
        return dict(self.buffers.layout.shared).get(layer, layer)

    def context_rank(self) -> int | jax.Array:
        """Returns the rank of this device in context parallelism.

        Raises:
          ValueError: a mesh axis gives the rank, and the call is outside ``shard_map`` over it.
        """
        if self.context_parallel == 1:
            return 0
        if self.axis is None:
            return 0 if self.rank is None else self.rank
        if self.axis not in jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"mesh axis {self.axis!r} divides the positions of each request, so slots are "
                "known only inside jax.shard_map over that axis: call this there"
            )
        return jax.lax.axis_index(self.axis)

    @functools.cached_property
    def buffer_spec(self) -> PartitionSpec:
        """PartitionSpec of every buffer of the pool: by heads, or by the bytes of its pages."""
        if self.axis is None:
            return PartitionSpec()
        split = (self.buffers.axes + "H").index("H")
        return PartitionSpec(*[None] * split, self.axis)

    def id_offset(self, layer: str) -> int:
        """Returns how many blocks precede a layer's in its `layer_view`.

        If tensors are stacked in front of the block axis, a view merges both into one axis.
        """
        if not self.buffers.counts_through:
            return 0
        return self.buffers.page_placement(layer).layer * self.num_blocks

    def check_ids(self, layer: str, layer_index: LayerIndex, per_block: int, what: str) -> None:
        """Raises ValueError if int32 cannot count the parts of the view of each layer asked for."""
        names = (layer,) if layer_index is None else self.buffers.stacked_layers(layer)
        last = max(names, key=self.id_offset)
        parts = (self.id_offset(last) + self.num_blocks) * per_block
        if parts > INT32_MAX:
            raise ValueError(
                f"layer={last!r} ends after {parts:,} {what} of its buffer, which is more than "
                "int32 counts; make the cache with stacked=False"
            )

    def at_layer_index(
        self, layer: str, layer_index: LayerIndex, number_of: Callable[[str], int], fill: int
    ) -> Array | int:
        """Returns a number of a layer, or of the layer of its group that an index names.

        Args:
          layer: any layer of the group.
          layer_index: see `jaxkv.write_tokens`.
          number_of: layer -> number.
          fill: the result for a traced index out of range.

        Raises:
          TypeError: an index that is neither an int nor int32.
          ValueError: an index that is not a scalar, layers that cannot be indexed
            (`KVCache.stacked_layers`), or an int out of range.
        """
        if layer_index is None:
            return number_of(layer)
        names = self.buffers.stacked_layers(layer)
        numbers = [number_of(name) for name in names]
        if isinstance(layer_index, int):
            if not 0 <= layer_index < len(names):
                raise ValueError(
                    f"layer_index={layer_index} is not in 0..{len(names) - 1}: layer={layer!r} has "
                    f"{len(names)} layers of its kind in its group"
                )
            return numbers[layer_index]
        check_int32(layer_index=layer_index)
        if layer_index.shape:
            raise ValueError(
                f"layer_index has shape {layer_index.shape}; pass the index of one layer, int32[]"
            )
        return take(jnp.array(numbers, jnp.int32), jnp.asarray(layer_index), fill)

    def __repr__(self) -> str:
        return (
            f"CacheLayout({len(self.growths)} groups, {self.num_blocks:,} blocks, "
            f"{self.max_requests} rows, {self.buffers.order})"
        )

    def __getstate__(self) -> dict[str, object]:  # without cached values
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # cached: jit hashes the layout at every dispatch
        return self._hash
