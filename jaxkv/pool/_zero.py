"""Clearing of fresh blocks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.checks import check_int32
from jaxkv.pool._bytes import rows_of
from jaxkv.pool._state import KVPool
from pallas_kernels import zero_blocks


def zero_new_blocks(pool: KVPool, zero_ids: Array, *, implementation: str | None = None) -> KVPool:
    """Zeroes fresh blocks in the slots of the groups that got them, padding included.

    Call it before anything of the same step writes.

    Args:
      zero_ids: int32[G, Z], per group the fresh ids; anything out of range is ignored.
      implementation: of `pallas_kernels.zero_blocks`.
    """
    check_int32(zero_ids=zero_ids)
    num_groups = len(pool.layout.groups)
    if zero_ids.ndim != 2 or zero_ids.shape[0] != num_groups:
        raise ValueError(f"zero_ids has shape {zero_ids.shape}; the pool has {num_groups} groups")
    if not pool.buffers:
        return pool
    slots_of = [pool.layout.slots_of(group) for group in range(num_groups)]
    users = [tuple(slot in s for s in slots_of) for slot in range(len(pool.layout.slots))]
    # Slots with the same users share one list, which the kernel then passes once.
    lists = {u: jnp.where(np.array(u)[:, None], zero_ids, -1).reshape(-1) for u in set(users)}
    per_slot = [lists[u] for u in users]
    if not pool.stacked:
        zeroed = zero_blocks(list(pool.buffers), per_slot, implementation=implementation)
        return dataclasses.replace(pool, buffers=tuple(zeroed))
    rows = jnp.concatenate([rows_of(pool, i, ids) for i, ids in enumerate(per_slot)])
    stack = pool.buffers[0]
    flat = stack.reshape(-1, stack.shape[-1])
    zeroed = zero_blocks(flat, rows, include_null_block=True, implementation=implementation)
    return dataclasses.replace(pool, buffers=(zeroed.reshape(stack.shape),))
