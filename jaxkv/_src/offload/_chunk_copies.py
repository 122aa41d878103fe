"""Chunks of blocks as arrays of their own: taken from a pool, and put into it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxkv._src.cache import CacheLayout, KVCache
from jaxkv._src.pool import SAME, on_devices

# For each `Part` of a group an array [blocks, *axes of the buffer], uint32 where pages allow it:
# a GPU copies words several times as fast as bytes.
ChunkArrays = tuple[Array, ...]
WORD = 4  # bytes


class Part(NamedTuple):
    """The tensors of a buffer that hold layers of a group, which are its first ones.

    shape: of one block in them, on one device.
    """

    buffer: int
    shape: tuple[int, ...]


@functools.cache
def parts_of(layout: CacheLayout, group: int) -> tuple[Part, ...]:
    """Returns the parts of a pool that hold the layers of a group."""
    buffers = layout.buffers
    wanted = buffers.layout.tensors_of(group)
    found: list[Part] = []
    for index, (stack, shape) in enumerate(zip(buffers.stacks, buffers.shapes, strict=True)):
        count = sum(tensor in wanted for tensor in stack)
        of_block = list(shape)
        of_block[buffers.block_axis] = 1
        if "L" in buffers.axes:
            of_block[buffers.axes.index("L")] = count
        if count:
            found.append(Part(index, tuple(of_block)))
    return tuple(found)


@functools.partial(jax.jit, static_argnames="group")
def take(cache: KVCache, block_ids: Array, *, group: int) -> ChunkArrays:
    """Returns copies of N blocks of a group.

    Args:
      block_ids: int32[N], blocks of the pool.
    """

    def run(cache: KVCache, block_ids: Array) -> ChunkArrays:
        return tuple(_take(cache, part, block_ids) for part in parts_of(cache.layout, group))

    specs = _specs(cache.layout, group)
    return on_devices(run, cache, block_ids, in_specs=(SAME,), out_specs=specs)


@functools.partial(jax.jit, static_argnames="group", donate_argnums=0)
def put(cache: KVCache, into: Array, chunk: ChunkArrays, *, group: int) -> tuple[KVCache, Array]:
    """Overwrites blocks of a group with the blocks of a chunk, in place.

    Args:
      into: int32[2, N], blocks of the pool, and the index of each in the chunk; a pair may
        be there several times.

    Returns:
      The cache, and an array that is ready when it is.
    """

    def run(cache: KVCache, into: Array, chunk: ChunkArrays) -> KVCache:
        block_ids, indices = into
        buffers = list(cache.buffers)
        for part, blocks in zip(parts_of(cache.layout, group), chunk, strict=True):
            buffers[part.buffer] = _put(
                cache, part, buffers[part.buffer], block_ids, indices, blocks
            )
        return dataclasses.replace(cache, buffers=tuple(buffers))

    loaded = on_devices(
        *(run, cache, into, chunk),
        in_specs=(SAME, _specs(cache.layout, group)),
        out_specs=cache.partition_specs(),
    )
    return loaded, into[0, 0] + 0


def _take(cache: KVCache, part: Part, block_ids: Array) -> Array:
    shape, block_axis = part.shape, cache.layout.buffers.block_axis

    def gather(buffer: Array, block_ids: Array) -> Array:
        size = (*shape[:-1], buffer.shape[-1])
        slice_of = lambda i: lax.dynamic_slice(buffer, _start(part, block_axis, i), size)  # noqa: E731
        return jax.vmap(slice_of)(block_ids)

    buffer = cache.buffers[part.buffer]
    if not _has_words(part):
        return gather(buffer, block_ids)
    return lax.platform_dependent(
        buffer,
        block_ids,
        cuda=lambda buffer, ids: gather(_words(buffer), ids),
        default=lambda buffer, ids: _words(gather(buffer, ids)),  # a CPU would copy the pool
    )


def _put(
    cache: KVCache, part: Part, buffer: Array, block_ids: Array, indices: Array, blocks: Array
) -> Array:
    block_axis = cache.layout.buffers.block_axis

    def write(buffer: Array, block_ids: Array, indices: Array, blocks: Array) -> Array:
        for i in range(blocks.shape[0]):
            block = lax.dynamic_index_in_dim(blocks, indices[i], keepdims=False)
            start = _start(part, block_axis, block_ids[i])
            buffer = lax.dynamic_update_slice(buffer, block, start)
        return buffer

    if not _has_words(part):
        return write(buffer, block_ids, indices, blocks)
    return lax.platform_dependent(
        *(buffer, block_ids, indices, blocks),
        cuda=lambda buffer, *others: _bytes(write(_words(buffer), *others)),
        default=lambda buffer, ids, indices, blocks: write(buffer, ids, indices, _bytes(blocks)),
    )


def _start(part: Part, block_axis: int, block_id: Array) -> list[Array | int]:
    """Returns the index of a block in its buffer."""
    start: list[Array | int] = [0] * len(part.shape)
    start[block_axis] = block_id
    return start


def _specs(layout: CacheLayout, group: int) -> tuple[PartitionSpec, ...]:
    return (PartitionSpec(None, *layout.buffer_spec),) * len(parts_of(layout, group))


def _has_words(part: Part) -> bool:
    return part.shape[-1] % WORD == 0


def _words(array: Array) -> Array:
    words = array.reshape(*array.shape[:-1], array.shape[-1] // WORD, WORD)
    return lax.bitcast_convert_type(words, jnp.uint32)


def _bytes(array: Array) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    return data.reshape(*array.shape[:-1], array.shape[-1] * WORD)
