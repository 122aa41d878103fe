"""Bytes of blocks: where they lie, and how they are written and read in place.

The only module that turns block ids, stored rows, heads and periods into array indices.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

import pallas_kernels
from jaxkv._src.block_tables import report
from jaxkv._src.cache import BAD_PERIOD, KVCache, Period
from jaxkv._src.internal.indexing import bit, within
from jaxkv._src.internal.mesh import check_not_explicit, on_every_device, runs_manually
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.layout import LayerExtents
from pallas_kernels import Implementation

SAME = PartitionSpec()


class Located(NamedTuple):
    """The place of a layer: its buffer, its extents, and the index of the first one.

    first: int, or int32[] for a traced period; -1 for a period that does not exist.
    """

    buffer: int
    extents: LayerExtents
    first: Array | int


def locate(cache: KVCache, layer: str, period: Period = None) -> Located:
    """Finds a layer, or the layer of its group that a traced period names.

    Raises:
      TypeError, ValueError: an unknown layer, a cache without a pool, a bad period (see
        `CacheLayout.of_period`), or a sharded pool outside ``shard_map``.
    """
    buffers = cache.layout.buffers
    cache.layout.place_of(layer)
    check_pool(cache)
    _check_whole(cache)
    first = cache.layout.of_period(layer, period, lambda name: buffers.extents(name).first, -1)
    return Located(buffers.buffer_of(layer), buffers.extents(layer), first)


def check_pool(cache: KVCache) -> None:
    """Raises ValueError for a cache that has no pool."""
    if not cache.buffers:
        raise ValueError("the cache has no pool: make it without tables_only=True")


def flag_period(cache: KVCache, layer: str, period: Period) -> KVCache:
    """Returns the cache with `BAD_PERIOD` set where a traced period does not exist."""
    if period is None or isinstance(period, int):
        return cache
    count = len(cache.layout.buffers.period_layers(layer))
    return report(cache, bit(BAD_PERIOD, ~within(jnp.asarray(period), count)))


def on_devices(
    function: Callable[..., Any],
    cache: KVCache,
    *args: Any,
    in_specs: Sequence[Any],
    out_specs: Any,
) -> Any:
    """Calls ``function(cache, *args)``; if the cache is sharded, on every device of its mesh.

    Args:
      in_specs: PartitionSpecs of ``args``.
      out_specs: PartitionSpecs of the result.
    """
    if runs_manually(cache.layout.axis):
        check_not_explicit(cache, *args)
        return function(cache, *args)
    specs = (cache.partition_specs(), *in_specs)
    return on_every_device(function, cache.layout.mesh, specs, out_specs, cache, *args)


def with_buffer(cache: KVCache, index: int, buffer: Array) -> KVCache:
    """Returns the cache with one buffer replaced by an array of its size, in any shape."""
    buffers = list(cache.buffers)
    buffers[index] = buffer.reshape(buffers[index].shape)
    return dataclasses.replace(cache, buffers=tuple(buffers))


def write_bytes(
    cache: KVCache,
    located: Located,
    block_ids: Array,
    rows: Array,
    data: Array,
    *,
    implementation: Implementation | None,
) -> KVCache:
    """Writes stored rows, uint8[..., n], each to a row of a block."""
    extents = located.extents
    block_ids, rows = block_ids.reshape(-1), rows.reshape(-1)
    width, head, head_offset = extents.cell_bytes * extents.heads, 0, 0
    if not extents.rows_are_whole:  # a piece for each head
        block_ids, rows = block_ids[:, None], rows[:, None]
        width, head = extents.cell_bytes, jnp.arange(extents.heads, dtype=jnp.int32)[None]
        head_offset = head * extents.head_bytes
    tile, row = (0, rows) if extents.tiles == 1 else jnp.divmod(rows, extents.rows)
    index, offsets = jnp.broadcast_arrays(
        _find(cache, located, block_ids, tile, head),
        extents.start_bytes + row * extents.row_bytes + head_offset,
    )
    steps = [extents.row_bytes] if extents.rows > 1 else []
    steps += [] if extents.rows_are_whole else [extents.head_bytes]
    written = pallas_kernels.write_rows(
        cache.buffers[located.buffer].reshape(-1, extents.extent_bytes),
        index.reshape(-1),
        offsets.reshape(-1),
        data.reshape(index.size, width),
        align=math.gcd(extents.start_bytes, *steps) or extents.extent_bytes,
        implementation=implementation,
    )
    return with_buffer(cache, located.buffer, written)


def read_bytes(cache: KVCache, located: Located, block_ids: Array) -> Array:
    """Reads all stored rows of blocks: uint8[..., rows, bytes of a row with all its heads].

    The null block and ids out of range read as zeros.
    """
    extents = located.extents
    index = _find_all(cache, located, block_ids)
    buffer = cache.buffers[located.buffer].reshape(-1, extents.extent_bytes)
    data = buffer.at[index, extents.start_bytes : extents.start_bytes + extents.data_bytes].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    if not extents.rows_are_whole:
        pieces = (*block_ids.shape, extents.tiles, extents.heads, extents.rows, extents.cell_bytes)
        data = data.reshape(pieces).swapaxes(-3, -2)
    num_rows = extents.tiles * extents.rows
    return data.reshape(*block_ids.shape, num_rows, extents.heads * extents.cell_bytes)


def to_bytes(array: Array, batch_dims: int) -> Array:
    """Returns an array's bytes, uint8[*batch, bytes]."""
    data = lax.bitcast_convert_type(array, jnp.uint8)
    batch = array.shape[:batch_dims]
    return data.reshape(*batch, math.prod(data.shape[batch_dims:]))


def from_bytes(data: Array, shape: Sequence[int], dtype: str) -> Array:
    """Returns bytes as an array of that shape and dtype."""
    itemsize = jnp.dtype(dtype).itemsize
    split = (*shape, itemsize) if itemsize > 1 else tuple(shape)
    return lax.bitcast_convert_type(data.reshape(split), jnp.dtype(dtype))


def known_blocks(cache: KVCache, block_ids: Array) -> Array:
    """Returns whether ids name blocks of the pool other than the null block."""
    return (block_ids > NULL_BLOCK) & (block_ids < cache.num_blocks)


def _find(
    cache: KVCache, located: Located, block_ids: Array, tile: Array | int, head: Array | int
) -> Array:
    """Returns indices of extents in their buffer; -1 for the null block and ids out of range."""
    extents, known = located.extents, known_blocks(cache, block_ids)
    if not isinstance(located.first, int):
        known &= located.first >= 0
    index = block_ids if extents.tiles == 1 else block_ids * extents.tiles + tile
    index = located.first + (index if extents.tile_step == 1 else index * extents.tile_step)
    if extents.head_step:
        index = index + head * extents.head_step
    return jnp.where(known, index, -1)


def _find_all(cache: KVCache, located: Located, block_ids: Array) -> Array:
    """Returns the extents of each block: int32[..., tiles, heads], or [...] for a single one."""
    extents = located.extents
    heads = extents.heads if extents.head_step else 1
    if extents.tiles * heads == 1:
        return _find(cache, located, block_ids, 0, 0)
    part = jnp.arange(extents.tiles * heads, dtype=jnp.int32)
    part = part.reshape(*[1] * block_ids.ndim, extents.tiles, heads)
    return _find(cache, located, block_ids[..., None, None], part // heads, part % heads)


def _check_whole(cache: KVCache) -> None:
    """Raises ValueError unless every buffer has the shape that the layout gives.

    Outside ``shard_map`` a sharded pool has larger buffers, and a write would reach only the part
    of the first device.
    """
    for buffer, shape in zip(cache.buffers, cache.layout.buffers.shapes, strict=True):
        if buffer.shape != shape:
            raise ValueError(
                f"a buffer of the pool has shape {buffer.shape} and the layout {shape}: the pool "
                "is sharded; call this inside jax.shard_map, with cache.partition_specs()"
            )
