"""Bytes of blocks: where they lie, and how they are written and read in place.

The one place where block ids, stored rows and heads become indices of arrays.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jaxkv.blocks import NULL_BLOCK
from jaxkv.kernel_blocks import LayerRuns
from jaxkv.pool._state import KVPool


def runs_of(pool: KVPool, layer: str) -> LayerRuns:
    """Where a layer lies in its buffer."""
    pool.check_whole()
    spec = pool.layout.place_of(layer).spec
    return pool.cache_layout(layer).runs(spec, **pool.form.where(layer))


def buffer_of(pool: KVPool, layer: str) -> Array:
    """The buffer that holds a layer."""
    return pool.buffers[0 if pool.stacked else pool.layout.place_of(layer).slot]


def with_buffer(pool: KVPool, layer: str, buffer: Array) -> KVPool:
    """The pool with the buffer that holds a layer replaced, given in any shape."""
    index = 0 if pool.stacked else pool.layout.place_of(layer).slot
    buffers = list(pool.buffers)
    buffers[index] = buffer.reshape(buffers[index].shape)
    return dataclasses.replace(pool, buffers=tuple(buffers))


def find_runs(
    pool: KVPool, runs: LayerRuns, block_ids: Array, tile: Array | int, head: Array | int
) -> Array:
    """Indices of runs in their buffer; -1 for the null block and ids out of range."""
    index = block_ids if runs.tiles == 1 else block_ids * runs.tiles + tile
    index = runs.first_run + (index if runs.tile_runs == 1 else index * runs.tile_runs)
    if runs.head_runs:
        index = index + head * runs.head_runs
    return jnp.where(_known(pool, block_ids), index, -1)


def rows_of(pool: KVPool, slot: int, block_ids: Array) -> Array:
    """Rows of blocks in a stack that begins with L, seen as [rows, run]; -1 for no row.

    int32[heads * K] where the stack has an axis of heads, else int32[K].
    """
    known = _known(pool, block_ids)
    heads = math.prod(pool.buffers[0].shape[1 : pool.block_axis])
    firsts = [(slot * heads + head) * pool.num_blocks for head in range(heads)]
    return jnp.concatenate([jnp.where(known, first + block_ids, -1) for first in firsts])


def _known(pool: KVPool, block_ids: Array) -> Array:
    return (block_ids > NULL_BLOCK) & (block_ids < pool.num_blocks)


def write_bytes(
    pool: KVPool,
    layer: str,
    block_ids: Array,
    rows: Array,
    data: Array,
    *,
    implementation: str | None,
) -> KVPool:
    """Writes stored rows, uint8[..., n], each at its index within a block."""
    runs = runs_of(pool, layer)
    block_ids, rows = block_ids.reshape(-1), rows.reshape(-1)
    width, head, head_offset = runs.cell_bytes * runs.heads, 0, 0
    if not runs.rows_are_whole:  # a piece for each head
        block_ids, rows = block_ids[:, None], rows[:, None]
        width, head = runs.cell_bytes, jnp.arange(runs.heads, dtype=jnp.int32)[None]
        head_offset = head * runs.head_bytes
    tile, row = (0, rows) if runs.tiles == 1 else jnp.divmod(rows, runs.rows)
    index, offsets = jnp.broadcast_arrays(
        find_runs(pool, runs, block_ids, tile, head),
        runs.start_bytes + row * runs.row_bytes + head_offset,
    )
    steps = [runs.row_bytes] if runs.rows > 1 else []
    steps += [] if runs.rows_are_whole else [runs.head_bytes]
    written = pallas_kernels.write_rows(
        buffer_of(pool, layer).reshape(-1, runs.run_bytes),
        index.reshape(-1),
        offsets.reshape(-1),
        data.reshape(index.size, width),
        align=math.gcd(runs.start_bytes, *steps) or runs.run_bytes,
        implementation=implementation,
    )
    return with_buffer(pool, layer, written)


def read_bytes(pool: KVPool, layer: str, block_ids: Array) -> Array:
    """All stored rows of blocks, uint8[..., rows, bytes of a row], heads in a row."""
    runs = runs_of(pool, layer)
    index = _all_runs(pool, runs, block_ids)
    buffer = buffer_of(pool, layer).reshape(-1, runs.run_bytes)
    data = buffer.at[index, runs.start_bytes : runs.start_bytes + runs.data_bytes].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    if not runs.rows_are_whole:
        pieces = (*block_ids.shape, runs.tiles, runs.heads, runs.rows, runs.cell_bytes)
        data = data.reshape(pieces).swapaxes(-3, -2)
    num_rows = runs.tiles * runs.rows
    return data.reshape(*block_ids.shape, num_rows, runs.heads * runs.cell_bytes)


def _all_runs(pool: KVPool, runs: LayerRuns, block_ids: Array) -> Array:
    """The runs of each block: int32[..., tiles, heads apart], no more axes than it takes."""
    heads = runs.heads if runs.head_runs else 1
    if runs.tiles * heads == 1:
        return find_runs(pool, runs, block_ids, 0, 0)
    part = jnp.arange(runs.tiles * heads, dtype=jnp.int32)
    part = part.reshape(*[1] * block_ids.ndim, runs.tiles, heads)
    return find_runs(pool, runs, block_ids[..., None, None], part // heads, part % heads)


def to_bytes(array: Array, batch_dims: int) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    batch = array.shape[:batch_dims]
    return data.reshape(*batch, math.prod(data.shape[batch_dims:]))


def from_bytes(data: Array, shape: Sequence[int], dtype: str) -> Array:
    itemsize = jnp.dtype(dtype).itemsize
    split = (*shape, itemsize) if itemsize > 1 else tuple(shape)
    return lax.bitcast_convert_type(data.reshape(split), jnp.dtype(dtype))
