"""Whole blocks, per group: zeroing and copies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

import pallas_kernels
from jaxkv._src.cache import KVCache, check_cache
from jaxkv._src.internal.checks import check_flag, check_int32, check_same_shape
from jaxkv._src.internal.indexing import group_of
from jaxkv._src.pool._bytes import known_blocks, on_devices
from jaxkv._src.pool._layer import SAME
from pallas_kernels import Implementation


def zero_blocks(
    cache: KVCache,
    block_ids: Int32[Array, "blocks"],
    ends: Int32[Array, "groups"],
    *,
    implementation: Implementation | None = None,
) -> KVCache:
    """Zeroes fresh blocks in the tensors of their groups, including page padding.

    Call it before any write of the same step.

    Args:
      block_ids: int32[Z], ordered by group; the null block and ids out of range are ignored.
      ends: int32[G], where each group's ids end; ids past the last end are padding.
      implementation: as for `pallas_kernels.zero_blocks`.
    """
    kernel = functools.partial(pallas_kernels.zero_blocks, implementation=implementation)
    return _on_buffers(cache, kernel, ends, block_ids=block_ids)


def copy_blocks(
    cache: KVCache,
    sources: Int32[Array, "copies"],
    destinations: Int32[Array, "copies"],
    ends: Int32[Array, "groups"],
    *,
    disjoint: bool = False,
    implementation: Implementation | None = None,
) -> KVCache:
    """Copies blocks, all at once, in the tensors of their groups.

    Block ``destinations[i]`` becomes what ``sources[i]`` was before the call, so a block may be
    both a source and a destination. Pairs with the null block or an id out of range are ignored.

    Args:
      sources, destinations: int32[C], ordered by group.
      ends: int32[G], where each group's pairs end; pairs past the last end are padding.
      disjoint: static; True promises that no destination is also a source, as with copies into
        fresh blocks. Saves temporary memory of the size of all copied blocks.
      implementation: as for `pallas_kernels.copy_blocks`.
    """
    check_flag(disjoint=disjoint)
    check_int32(sources=sources, destinations=destinations)
    check_same_shape(sources=sources, destinations=destinations)
    kernel = functools.partial(
        pallas_kernels.copy_blocks, disjoint=disjoint, implementation=implementation
    )
    return _on_buffers(cache, kernel, ends, sources=sources, destinations=destinations)


def _on_buffers(cache: KVCache, kernel: Callable[..., Any], ends: Array, **ids: Array) -> KVCache:
    """Runs a kernel over the pool's buffers, each with the ids of the groups that it serves.

    In a stack the kernel works on whole blocks, also in tensors where their group has no layer: a
    block belongs to one group at a time, so nobody uses those bytes.
    """
    check_cache(cache)
    check_int32(ends=ends, **ids)
    num_groups = len(cache.layout.growths)
    for name, given in ids.items():
        if given.ndim != 1:
            raise ValueError(f"{name} has shape {given.shape}; wants a flat list of block ids")
    if ends.shape != (num_groups,):
        raise ValueError(f"ends has shape {ends.shape}; wants {(num_groups,)}, one end per group")
    if not cache.buffers:
        return cache
    run, specs = functools.partial(_run, kernel=kernel), cache.partition_specs()
    return on_devices(run, cache, ends, ids, in_specs=(SAME, SAME), out_specs=specs)


def _run(
    cache: KVCache, ends: Array, ids: dict[str, Array], *, kernel: Callable[..., Any]
) -> KVCache:
    layout, buffers = cache.layout.buffers.layout, cache.layout.buffers
    num_groups = len(layout.groups)
    index = jnp.arange(next(iter(ids.values())).shape[0], dtype=jnp.int32)
    group = group_of(index, ends)
    ids = {
        name: jnp.where(known_blocks(cache.layout, given), given, -1) for name, given in ids.items()
    }
    served = [
        tuple(g for g in range(num_groups) if not layout.tensors_of(g).isdisjoint(stack))
        for stack in buffers.stacks
    ]

    def of_groups(groups: tuple[int, ...]) -> dict[str, Array]:
        mine = (group[:, None] == jnp.array(groups, jnp.int32)[None]).any(axis=1)
        return {name: jnp.where(mine, given, -1) for name, given in ids.items()}

    # Buffers that serve the same groups share lists, so that the kernel passes each list once.
    lists = {groups: of_groups(groups) for groups in set(served)}
    by_name = {name: [lists[groups][name] for groups in served] for name in ids}
    done = kernel(list(cache.buffers), block_axis=buffers.block_axis, num_ids=ends[-1], **by_name)
    return dataclasses.replace(cache, buffers=tuple(done))
