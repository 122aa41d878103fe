"""Bytes of blocks: where they lie, and how they are written and read in place."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jaxkv.blocks import NULL_BLOCK
from jaxkv.pool._state import KVPool


def pages_of(pool: KVPool, layer: str) -> tuple[Array, int]:
    """The buffer that holds a layer, as uint8[rows, page], and the layer's slot in it."""
    pool.check_whole()
    slot = pool.layout.place_of(layer).slot
    if pool.stacked:
        return pool.buffers[0].reshape(-1, pool.buffers[0].shape[-1]), slot
    return pool.buffers[slot], 0


def rows_of(pool: KVPool, slot: int, block_ids: Array) -> Array:
    """Rows of blocks in their buffer; -1 for the null block and ids out of range."""
    known = (block_ids > NULL_BLOCK) & (block_ids < pool.num_blocks)
    return jnp.where(known, slot * pool.num_blocks + block_ids, -1)


def write_bytes(
    pool: KVPool,
    layer: str,
    block_ids: Array,
    offsets: Array,
    data: Array,
    *,
    align: int,
    implementation: str | None,
) -> KVPool:
    """Writes bytes, uint8[..., n], at an offset into each block's page.

    align: what all offsets are multiples of; 0: all of them are 0.
    """
    pages, slot = pages_of(pool, layer)
    start = pool.layout.place_of(layer).offset_bytes
    written = pallas_kernels.write_rows(
        pages,
        rows_of(pool, slot, block_ids).reshape(-1),
        start + offsets.reshape(-1),
        data.reshape(block_ids.size, data.shape[-1]),
        align=math.gcd(start, align) or pages.shape[1],
        implementation=implementation,
    )
    return with_pages(pool, layer, written)


def with_pages(pool: KVPool, layer: str, pages: Array) -> KVPool:
    """The pool with the buffer that holds a layer replaced."""
    index = 0 if pool.stacked else pool.layout.place_of(layer).slot
    buffers = list(pool.buffers)
    buffers[index] = pages.reshape(buffers[index].shape)
    return dataclasses.replace(pool, buffers=tuple(buffers))


def read_bytes(pool: KVPool, layer: str, block_ids: Array, num_bytes: int) -> Array:
    """The first ``num_bytes`` of each block's page, uint8[..., num_bytes]."""
    pages, slot = pages_of(pool, layer)
    rows, start = rows_of(pool, slot, block_ids), pool.layout.place_of(layer).offset_bytes
    return pages.at[rows, start : start + num_bytes].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )


def to_bytes(array: Array, batch_dims: int) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    batch = array.shape[:batch_dims]
    return data.reshape(*batch, math.prod(data.shape[batch_dims:]))


def from_bytes(data: Array, shape: Sequence[int], dtype: str) -> Array:
    itemsize = jnp.dtype(dtype).itemsize
    split = (*shape, itemsize) if itemsize > 1 else tuple(shape)
    return lax.bitcast_convert_type(data.reshape(split), jnp.dtype(dtype))
