"""Bytes of blocks: addresses, and writes and reads in place.

The only module that turns block ids, stored rows, heads and layers into array indices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jaxkv._src.cache import CacheLayout, KVCache
from jaxkv._src.internal.mesh import check_not_explicit, on_every_device, runs_manually
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.pool._layer import BoundLayer, check_whole
from pallas_kernels import TokenHeadRow


def on_devices(
    function: Callable[..., Any],
    cache: KVCache | BoundLayer,
    *args: Any,
    in_specs: Sequence[Any],
    out_specs: Any,
) -> Any:
    """Calls ``function(cache, *args)``; if the cache is sharded, on every device of its mesh.

    Args:
      cache: a cache, or a layer of one.
      in_specs: PartitionSpecs of ``args``.
      out_specs: PartitionSpecs of the result.
    """
    if runs_manually(cache.layout.axis):
        check_not_explicit(cache, *args)
        return function(cache, *args)
    specs = (cache.partition_specs(), *in_specs)
    return on_every_device(function, cache.layout.mesh, specs, out_specs, cache, *args)


def write_bytes(
    layer: BoundLayer,
    block_ids: Array,
    rows: Array,
    data: Array,
    *,
    start: int = 0,
) -> Array:
    """Writes stored rows, uint8[..., n], each to a row of a block; returns the buffer.

    Args:
      start: bytes of a row before the data.
    """
    extents = layer.form.extents
    width = data.shape[-1] if extents.rows_are_whole else extents.cell_bytes

    def write(pages: Array, index: Array, offsets: Array, **options: Any) -> Array:
        return pallas_kernels.write_rows(
            pages, index, offsets, data.reshape(index.size, width), **options
        )

    return _write(layer, block_ids, rows, write, start)


def write_token_heads(
    layer: BoundLayer,
    block_ids: Array,
    rows: Array,
    keys: Array,
    values: Array,
    packing: TokenHeadRow,
) -> Array:
    """Writes keys and values with a scale for each head to rows of blocks; returns the buffer.

    Args:
      block_ids, rows: int32[T] each, the block of each token and its row there.
      keys, values: [T, heads, width].
    """

    def write(pages: Array, index: Array, offsets: Array, **options: Any) -> Array:
        return pallas_kernels.write_token_heads(
            pages, index, offsets, keys, values, packing, **options
        )

    return _write(layer, block_ids, rows, write)


def _write(
    layer: BoundLayer, block_ids: Array, rows: Array, write: Callable[..., Array], start: int = 0
) -> Array:
    """Calls ``write(pages, indices, offsets)`` with the places of rows; returns the buffer."""
    check_whole(layer.buffer, layer.form.buffer_shape)
    extents = layer.form.extents
    block_ids, rows, head, head_offset = block_ids.reshape(-1), rows.reshape(-1), 0, 0
    if not extents.rows_are_whole:  # a part for each head
        block_ids, rows = block_ids[:, None], rows[:, None]
        head = jnp.arange(extents.heads, dtype=jnp.int32)[None]
        head_offset = head * extents.head_bytes
    tile, row = (0, rows) if extents.tiles == 1 else jnp.divmod(rows, extents.rows)
    index, offsets = jnp.broadcast_arrays(
        _find(layer, block_ids, tile, head),
        extents.start_bytes + start + row * extents.row_bytes + head_offset,
    )
    steps = [extents.row_bytes] if extents.rows > 1 else []
    steps += [] if extents.rows_are_whole else [extents.head_bytes]
    written = write(
        layer.buffer.reshape(-1, extents.extent_bytes),
        index.reshape(-1),
        offsets.reshape(-1),
        align=math.gcd(extents.start_bytes + start, *steps) or extents.extent_bytes,
        implementation=layer.implementation,
    )
    return written.reshape(layer.buffer.shape)


def read_elements(
    layer: BoundLayer, block_ids: Array, dtype: str, part: slice | None = None
) -> Array:
    """Reads all stored rows of blocks: dtype[..., rows, elements of a row with all its heads].

    The null block and ids out of range read as zeros.

    Args:
      part: the bytes to read of each block, if it is one row; None: all.
    """
    check_whole(layer.buffer, layer.form.buffer_shape)
    extents, itemsize = layer.form.extents, jnp.dtype(dtype).itemsize
    row_bytes = extents.heads * extents.cell_bytes if part is None else part.stop - part.start
    part = part or slice(0, extents.data_bytes)
    start, stop = extents.start_bytes + part.start, extents.start_bytes + part.stop
    buffer, index = layer.buffer.reshape(-1, extents.extent_bytes), _find_all(layer, block_ids)

    def gather(buffer: Array, unit: int) -> Array:
        return pallas_kernels.read_extents(buffer, index, slice(start // unit, stop // unit))

    data = _gather(gather, buffer, dtype, (start, stop, extents.extent_bytes))
    if not extents.rows_are_whole:
        cell = extents.cell_bytes // itemsize
        parts = (*block_ids.shape, extents.tiles, extents.heads, extents.rows, cell)
        data = data.reshape(parts).swapaxes(-3, -2)
    return data.reshape(*block_ids.shape, extents.tiles * extents.rows, row_bytes // itemsize)


def read_cells(
    layer: BoundLayer, block_ids: Array, rows: Array, dtype: str, heads: Array | None = None
) -> Array:
    """Reads one stored row each: dtype[..., elements of a row with all its heads].

    The null block and ids out of range read as zeros.

    Args:
      block_ids, rows: int32[...], the blocks, and the rows in them.
      heads: int32 that broadcasts to them, the head of which alone each row is read; None: all.
    """
    check_whole(layer.buffer, layer.form.buffer_shape)
    extents = layer.form.extents
    is_one_part = heads is not None or extents.rows_are_whole
    width, head, head_offset = extents.heads * extents.cell_bytes, 0, 0
    if heads is not None:
        width, head, head_offset = extents.cell_bytes, heads, heads * extents.head_bytes
    elif not is_one_part:  # a part for each head
        block_ids, rows, width = block_ids[..., None], rows[..., None], extents.cell_bytes
        head = jnp.arange(extents.heads, dtype=jnp.int32)
        head = head.reshape(*[1] * (rows.ndim - 1), extents.heads)
        head_offset = head * extents.head_bytes
    tile, row = (0, rows) if extents.tiles == 1 else jnp.divmod(rows, extents.rows)
    index, offsets = jnp.broadcast_arrays(
        _find(layer, block_ids, tile, head),
        extents.start_bytes + row * extents.row_bytes + head_offset,
    )
    buffer = layer.buffer.reshape(-1, extents.extent_bytes)

    def gather(buffer: Array, unit: int) -> Array:
        return pallas_kernels.read_cells(buffer, index, offsets // unit, width // unit)

    sizes = (extents.start_bytes, extents.row_bytes, extents.head_bytes, extents.extent_bytes)
    data = _gather(gather, buffer, dtype, (width, *sizes))
    batch = index.shape if is_one_part else index.shape[:-1]
    return data.reshape(*batch, -1)


def _gather(
    gather: Callable[[Array, int], Array], buffer: Array, dtype: str, sizes: Sequence[int]
) -> Array:
    """Gathers numbers of a dtype from bytes; elements where all sizes, in bytes, are multiples.

    Args:
      gather: takes the buffer, in bytes or in elements, and the bytes of one.
    """
    itemsize = jnp.dtype(dtype).itemsize

    def by_bytes(buffer: Array) -> Array:
        return as_dtype(gather(buffer, 1), dtype)

    def by_elements(buffer: Array) -> Array:
        return as_dtype(gather(as_dtype(buffer, f"uint{8 * itemsize}"), itemsize), dtype)

    if itemsize == 1 or any(size % itemsize for size in sizes):
        return by_bytes(buffer)
    # GPUs gather elements faster than bytes; a CPU would copy the pool for that.
    return lax.platform_dependent(buffer, cuda=by_elements, default=by_bytes)


def as_dtype(array: Array, dtype: str) -> Array:
    """Returns bytes or integers, [..., n], as elements of a dtype that is not narrower."""
    ratio = jnp.dtype(dtype).itemsize // array.dtype.itemsize
    if ratio > 1:
        array = array.reshape(*array.shape[:-1], array.shape[-1] // ratio, ratio)
    return lax.bitcast_convert_type(array, jnp.dtype(dtype))


def to_bytes(array: Array, batch_dims: int) -> Array:
    """Returns an array's bytes, uint8[*batch, bytes]."""
    data = lax.bitcast_convert_type(array, jnp.uint8)
    batch = array.shape[:batch_dims]
    return data.reshape(*batch, math.prod(data.shape[batch_dims:]))


def known_blocks(layout: CacheLayout, block_ids: Array) -> Array:
    """Returns whether ids name blocks of the pool other than the null block."""
    return (block_ids > NULL_BLOCK) & (block_ids < layout.num_blocks)


def _find(layer: BoundLayer, block_ids: Array, tile: Array | int, head: Array | int) -> Array:
    """Returns indices of extents in their buffer; -1 for the null block and ids out of range."""
    extents = layer.form.extents
    known = known_blocks(layer.layout, block_ids) & (layer.first >= 0)
    index = block_ids if extents.tiles == 1 else block_ids * extents.tiles + tile
    index = layer.first + (index if extents.tile_step == 1 else index * extents.tile_step)
    if extents.head_step:
        index = index + head * extents.head_step
    return jnp.where(known, index, -1)


def _find_all(layer: BoundLayer, block_ids: Array) -> Array:
    """Returns the extents of each block: int32[..., tiles, heads], or [...] for a single one."""
    extents = layer.form.extents
    heads = extents.heads if extents.head_step else 1
    if extents.tiles * heads == 1:
        return _find(layer, block_ids, 0, 0)
    part = jnp.arange(extents.tiles * heads, dtype=jnp.int32)
    part = part.reshape(*[1] * block_ids.ndim, extents.tiles, heads)
    return _find(layer, block_ids[..., None, None], part // heads, part % heads)
