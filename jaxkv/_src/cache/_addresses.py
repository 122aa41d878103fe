"""Addresses of a cache's blocks in the memory of its devices."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxkv._src.cache._state import KVCache, check_cache
from jaxkv._src.internal.checks import check_kind
from jaxkv._src.layout import BlockPieces, pieces_of


def block_pieces(cache: KVCache, block_ids: Sequence[np.ndarray]) -> dict[jax.Device, BlockPieces]:
    """Returns where blocks lie, on each device of this process.

    Addresses hold until a function takes the cache as donated, or it is deleted; a step that works
    in place keeps them. Wait for the steps before (``jax.block_until_ready``), because whoever
    reads or writes at an address is not in the device's order of work.

    Args:
      cache: a cache with buffers.
      block_ids: per group, from `BlockManager.export_blocks` or ``import_blocks``.

    Raises:
      ValueError: a cache of block tables only, another number of groups, or a block that is not in
        the pool.
    """
    check_cache(cache)
    check_kind(Sequence, "block ids per group", block_ids=block_ids)
    if not cache.layout.has_buffers:
        raise ValueError("the cache has block tables only; its owner knows where blocks lie")
    shards = [
        {shard.device: shard.data for shard in buffer.addressable_shards}
        for buffer in cache.buffers
    ]
    devices = [shard.device for shard in cache.status.addressable_shards]
    places = {device: [of[device].unsafe_buffer_pointer() for of in shards] for device in devices}
    buffers = cache.layout.buffers
    return {device: pieces_of(buffers, block_ids, place) for device, place in places.items()}
