"""Whole blocks, per group: clearing of fresh ones, copies.

In orders that begin with the block (B), a block goes whole, whatever slots its group has:
it is one run of bytes, and one group's at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

import pallas_kernels
from jaxkv.blocks import NULL_BLOCK
from jaxkv.checks import check_int32, check_same_shape
from jaxkv.pool._bytes import rows_of
from jaxkv.pool._state import KVPool


def zero_new_blocks(pool: KVPool, zero_ids: Array, *, implementation: str | None = None) -> KVPool:
    """Zeroes fresh blocks in the slots of the groups that got them, padding included.

    Call it before anything of the same step writes.

    Args:
      zero_ids: int32[G, Z], per group the fresh ids; anything out of range is ignored.
      implementation: of `pallas_kernels.zero_blocks`.
    """

    def kernel(buffers: Any, zero_ids: Any, block_axis: int = 0) -> Any:
        return pallas_kernels.zero_blocks(
            buffers, zero_ids, block_axis=block_axis, implementation=implementation
        )

    return _on_slots(pool, kernel, zero_ids=zero_ids)


def copy_blocks(
    pool: KVPool,
    sources: Array,
    destinations: Array,
    *,
    disjoint: bool = False,
    implementation: str | None = None,
) -> KVPool:
    """Copies blocks, all at once, in the slots of the groups that they belong to.

    Block ``destinations[g, i]`` becomes what ``sources[g, i]`` was before the call, so a
    block may be both. The null block is neither read nor written; a pair that names it
    or an id out of range is ignored.

    Args:
      sources, destinations: int32[G, C]; -1 for padding.
      disjoint: static; you promise that no destination is a source too, as with copies
        into fresh blocks. Saves temporary memory as large as what is copied.
      implementation: of `pallas_kernels.copy_blocks`.
    """
    check_int32(sources=sources, destinations=destinations)
    check_same_shape(sources=sources, destinations=destinations)
    sources = jnp.where(sources == NULL_BLOCK, -1, sources)  # to the kernel, a block like others
    kernel = functools.partial(
        pallas_kernels.copy_blocks, disjoint=disjoint, implementation=implementation
    )
    return _on_slots(pool, kernel, sources=sources, destinations=destinations)


def _on_slots(pool: KVPool, kernel: Callable[..., Any], **ids: Array) -> KVPool:
    """Runs a kernel over the pool's buffers, each with the ids of the groups that use it."""
    check_int32(**ids)
    num_groups = len(pool.layout.groups)
    for name, given in ids.items():
        if given.ndim != 2 or given.shape[0] != num_groups:
            raise ValueError(f"{name} has shape {given.shape}; the pool has {num_groups} groups")
    if not pool.buffers:
        return pool
    pool.check_whole()
    slots_of = [set(pool.layout.slots_of(group)) for group in range(num_groups)]
    users = [
        tuple(group for group in range(num_groups) if slot in slots_of[group])
        for slot in range(len(pool.layout.slots))
    ]
    if pool.order.startswith("B"):  # a block is one run, and one group's at a time: all of it
        users = [tuple(sorted({group for of in users for group in of}))]
    # Slots with the same users share their lists, which the kernel then passes once.
    lists = {
        of: {name: jnp.concatenate([given[g] for g in of]) for name, given in ids.items()}
        for of in set(users)
    }
    if not pool.stacked or len(lists) == 1:
        by_name = {name: [lists[of][name] for of in users[: len(pool.buffers)]] for name in ids}
        return _with_buffers(
            pool, kernel(list(pool.buffers), block_axis=pool.block_axis, **by_name)
        )
    # Slots with different users: the stack as one long buffer, where null blocks are rows.
    rows = {
        name: jnp.concatenate(
            [rows_of(pool, slot, lists[of][name]) for slot, of in enumerate(users)]
        )
        for name in ids
    }
    stack = pool.buffers[0]
    flat = kernel(stack.reshape(-1, stack.shape[-1]), **rows)
    return _with_buffers(pool, [flat.reshape(stack.shape)])


def _with_buffers(pool: KVPool, buffers: list[Array]) -> KVPool:
    return dataclasses.replace(pool, buffers=tuple(buffers))
