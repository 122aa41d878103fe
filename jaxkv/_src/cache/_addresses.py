"""Addresses of a cache's blocks in the memory of its devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from jaxkv._src.cache._state import KVCache, check_cache
from jaxkv._src.internal.checks import check_kind
from jaxkv._src.layout import BlockDescriptors, list_descriptors


def describe_blocks(
    cache: KVCache, block_ids: Sequence[Int[np.ndarray, "blocks"]]
) -> dict[jax.Device, BlockDescriptors]:
    """Returns the addresses of blocks on each device of this process.

    Addresses hold until a function takes the cache as donated, or it is deleted; a step that works
    in place keeps them. Wait for the steps before (``jax.block_until_ready``): the device does not
    order its work with reads and writes at an address.

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
    buffers, found = cache.layout.buffers, dict[jax.Device, BlockDescriptors]()
    for device in devices:
        addresses = [shard[device].unsafe_buffer_pointer() for shard in shards]
        found[device] = list_descriptors(buffers, block_ids, addresses)
    return found
