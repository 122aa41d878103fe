"""Allocation of the cache of a plan, and its scales."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from jaxkv._src.cache._layout import CacheLayout
from jaxkv._src.cache._state import KVCache, check_cache
from jaxkv._src.internal.allocation import Device, copy_to, zeros
from jaxkv._src.internal.checks import (
    check_count,
    check_flag,
    check_kind,
    check_number,
    check_positive,
    plain_ints,
)
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.text import shown
from jaxkv._src.layout import Order, blocks_per_kv_block, plan_buffers
from jaxkv._src.planning import Plan, check_rows

Scale = tuple[float | Float[Array, ""], float | Float[Array, ""]]
MAX_SCALE = float(np.finfo(np.float32).max)


@knows_remedies()
@plain_ints
def make_cache(
    plan: Plan,
    *,
    max_requests: int,
    kernel_block_sizes: Sequence[int] | None = None,
    order: Order = "LBNHC",
    stacked: bool | None = None,
    interleave_tokens: int = 1,
    scales: Scale | Mapping[str, Scale] | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    device: Device = None,
    worker: int = 0,
    rank: int | None = None,
    tables_only: bool = False,
) -> KVCache:
    """Allocates the block tables and the pool of a plan on the device, filled with zeros.

    Example::

        plan = jaxkv.plan_cache(layers, memory_bytes, max_model_len=8192)
        cache = jaxkv.make_cache(plan, max_requests=256)

    Args:
      plan: from `plan_cache`.
      max_requests: rows of the block tables, one for each request that runs at the same time.
      kernel_block_sizes: per group, the tokens of a block of its attention kernel; each must
        divide the group's block size. None: the block sizes of the plan.
      order: physical order of layer, block, head, token and content: one of
        `jaxkv.layout.ORDERS`, "NHD" or "HND".
      stacked: True: one buffer for all tensors of one page size. False: one buffer per tensor.
        Each array of a jitted call costs the host some microseconds, and ``layer_index=`` needs the
        stack; but a kernel then sees one buffer of all layers, whose ids run through all of
        them. None: stacked, unless int32 cannot count the slots of all layers together.
      interleave_tokens: with context parallelism, consecutive positions that a rank gets at a
        time; must divide every block size.
      scales: K and V scales of the cache, for all layers or by layer: the pool stores
        ``x / scale``. None: no scales, the pool stores ``x``. Layers whose dtype has a scale for
        each token and head do not use them.
      mesh, axis: shards the pool over one axis of a mesh: by position with context parallelism,
        else by KV head; the plan is that of one rank. Block ids mean the same on all devices.
        Tables and scales are replicated, and so is the pool over the other axes of the mesh.
        Devices may belong to several processes: all of them make the same call, and each
        process holds its own shards.
      device: a device for all arrays, or a sharding that replicates them,
        ``NamedSharding(mesh, PartitionSpec())``; None: the default device. Arrays are committed
        to it.
      worker: index into ``plan.layouts``.
      rank: with context parallelism, this process's rank, if no mesh axis gives it.
      tables_only: True: no pool, for engines that keep buffers of their own.

    Returns:
      A cache with empty rows and a pool of zeros.

    Raises:
      TypeError, ValueError: arguments that contradict the plan or each other: kernel block
        sizes that do not divide a group's blocks, or that cut overlaid blocks in different
        ways where nothing is zeroed; an order that the layout cannot have; an unknown worker or
        mesh axis.
    """
    check_rows(plan, max_requests)
    check_positive(interleave_tokens=interleave_tokens)
    check_flag(tables_only=tables_only, stacked=True if stacked is None else stacked)
    _check_devices(mesh, axis, device)
    if device is None and mesh is None:
        device = _default_device()
    layout = _make_layout(
        plan,
        max_requests=max_requests,
        kernel_block_sizes=kernel_block_sizes,
        order=order,
        stacked=stacked,
        interleave_tokens=interleave_tokens,
        worker=worker,
        rank=rank,
        has_buffers=not tables_only,
        mesh=_mesh_of(device) if mesh is None else mesh,
        axis=axis,
    )
    same = device if mesh is None else NamedSharding(mesh, PartitionSpec())
    split = device if mesh is None else NamedSharding(mesh, layout.buffer_spec)
    shapes = ((max_requests, layout.table_offsets[-1] + len(plan.groups)), (2,))
    rows, status = zeros(shapes, jnp.int32, same)
    buffers: tuple[Array, ...] = ()
    if layout.has_buffers:
        buffers = zeros(_global_shapes(layout), jnp.uint8, split)
    return KVCache(
        rows=rows,
        status=status,
        buffers=buffers,
        scales=_make_scales(layout, scales, same),
        layout=layout,
    )


def set_scales(cache: KVCache, scales: Scale | Mapping[str, Scale]) -> KVCache:
    """Returns the cache with new K and V scales, for all layers or for the named ones.

    Stored bytes stay as they are: set scales before a layer is written, or write it again::

        cache = jaxkv.make_cache(plan, max_requests=256, scales=(1.0, 1.0))
        cache = jaxkv.set_scales(cache, {"layer": (0.5, 0.25)})

    Args:
      cache: made with ``scales``.
      scales: ``(K scale, V scale)``, floats or f32[], or a mapping from layers to such pairs.

    Raises:
      TypeError: scales that are not pairs of numbers.
      ValueError: a cache without scales, an unknown layer, or a scale that is not positive.
    """
    check_cache(cache)
    if cache.scales is None:
        raise ValueError(
            "the cache has no scales; make it with scales=(1.0, 1.0) to set them later"
        )
    number = cache.layout.layer_numbers
    is_set = np.zeros((len(number), 1), bool)
    rows: list[Any] = [np.zeros(2, np.float32)] * len(number)
    for layer, pair in _by_layer(cache.layout, scales).items():
        index = number[cache.layout.owner_of(layer)]
        is_set[index], rows[index] = True, _as_row(pair)
    # NumPy arrays if possible: jax moves them to the cache's devices, on explicit meshes too.
    stack = np.stack if all(isinstance(row, np.ndarray) for row in rows) else jnp.stack
    return dataclasses.replace(cache, scales=jnp.where(is_set, stack(rows), cache.scales))


def _as_row(pair: Scale) -> Any:
    """Returns a pair as f32[2], of jax where a scale is traced."""
    if any(isinstance(scale, jax.core.Tracer) for scale in pair):
        return jnp.stack([jnp.asarray(scale, jnp.float32) for scale in pair])
    return np.array([np.asarray(scale) for scale in pair], np.float32)


def _check_devices(mesh: Mesh | None, axis: str | None, device: Device) -> None:
    if axis is not None:
        check_kind(str, "the name of an axis", axis=axis)
    if axis is not None and mesh is None:
        raise ValueError(f"axis={axis!r} was given without mesh=: pass the mesh with this axis")
    if mesh is not None and device is not None:
        raise ValueError("mesh= and device= both say where the cache lies: pass only one of them")
    if mesh is not None:
        check_kind(Mesh, "a jax.sharding.Mesh", mesh=mesh)
    if device is not None and not isinstance(device, jax.Device | jax.sharding.Sharding):
        raise TypeError(f"device must be a jax.Device or a Sharding, got {shown(device)}")
    if isinstance(device, jax.sharding.Sharding) and not device.is_fully_replicated:
        raise ValueError(
            f"device={device} would shard every array of the cache; pass mesh= and axis= to "
            "shard only the pool"
        )
    if mesh is None:
        return
    if axis is None:
        raise ValueError(
            f"mesh= with {mesh.size} devices was given without axis=: pass one of its axes "
            f"{mesh.axis_names} as axis= to shard the pool over it, or replace mesh= by "
            "device=NamedSharding(mesh, PartitionSpec()) to replicate the cache"
        )
    if axis not in mesh.shape:
        raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {mesh.axis_names}")
    if not mesh.local_devices:
        raise ValueError(
            f"no device of the mesh belongs to process {jax.process_index()}: make the cache only "
            "in processes that have devices in its mesh"
        )


def _default_device() -> Device:
    """Returns the default device, as a sharding if jax.set_mesh has set a mesh of it."""
    with jax.ensure_compile_time_eval():  # also while make_cache is traced for its shapes
        sharding = jnp.zeros(0).sharding
    devices = sharding.device_set
    if len(devices) > 1:
        raise ValueError(
            f"jax.set_mesh has set a mesh of {len(devices)} devices: pass mesh= and axis= to "
            "shard the pool over one of its axes, or "
            "device=NamedSharding(mesh, PartitionSpec()) to replicate the cache"
        )
    mesh = _mesh_of(sharding)
    return next(iter(devices)) if mesh is None else NamedSharding(mesh, PartitionSpec())


def _mesh_of(device: Device) -> Mesh | None:
    mesh = device.mesh if isinstance(device, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def _make_layout(
    plan: Plan,
    *,
    max_requests: int,
    kernel_block_sizes: Sequence[int] | None,
    order: str,
    stacked: bool | None,
    interleave_tokens: int,
    worker: int,
    rank: int | None,
    has_buffers: bool,
    mesh: Mesh | None,
    axis: str | None,
) -> CacheLayout:
    _check_share(plan, worker, rank, mesh, axis)
    for group in plan.groups:
        if group.block_size % interleave_tokens:
            raise ValueError(
                f"interleave_tokens={interleave_tokens} does not divide the block size "
                f"{group.block_size} of a group; pass a divisor of every block size"
            )
    buffers = plan_buffers(
        plan.layouts[worker],
        plan.num_blocks,
        order=order,
        stacked=stacked,
        kernel_block_sizes=kernel_block_sizes,
        groups_to_zero=plan.groups_to_zero,
    )
    sizes = kernel_block_sizes or [None] * len(plan.groups)
    return CacheLayout(
        growths=tuple(group.growth for group in plan.groups),
        blocks_per_kv_block=tuple(
            1 if size is None else blocks_per_kv_block(group.specs[0], size)
            for group, size in zip(plan.groups, sizes, strict=True)
        ),
        row_blocks=plan.row_blocks,
        buffers=buffers,
        has_buffers=has_buffers,
        max_requests=max_requests,
        context_parallel=plan.context_parallel,
        interleave_tokens=interleave_tokens,
        rank=rank,
        mesh=mesh,
        axis=axis,
    )


def _check_share(
    plan: Plan, worker: int, rank: int | None, mesh: Mesh | None, axis: str | None
) -> None:
    """Checks that the plan has such a worker, and a rank for each device of the axis."""
    check_count(worker=worker)
    if worker >= len(plan.layouts):
        raise ValueError(
            f"worker={worker} is not in 0..{len(plan.layouts) - 1}, the workers of the plan"
        )
    if rank is not None:
        check_count(rank=rank)
        if rank >= plan.context_parallel:
            raise ValueError(
                f"rank={rank} is not in 0..{plan.context_parallel - 1}; the plan has "
                f"context_parallel={plan.context_parallel}"
            )
    if (rank is None) == (axis is None) and plan.context_parallel > 1:
        raise ValueError(
            f"the plan has context_parallel={plan.context_parallel}: pass either mesh= and axis=, "
            "or rank= if each process makes a cache for its own rank"
        )
    ranks = 1 if mesh is None or axis is None else mesh.shape[axis]
    if axis is not None and plan.context_parallel not in (1, ranks):
        raise ValueError(
            f"axis={axis!r} has {ranks} devices and the plan "
            f"context_parallel={plan.context_parallel}; pass context_parallel={ranks} to plan_cache"
        )


def _global_shapes(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the buffers, over all devices of the axis together."""
    if layout.axis is None:
        return layout.buffers.shapes
    split = len(layout.buffer_spec) - 1
    return tuple(
        (*shape[:split], shape[split] * layout.num_ranks, *shape[split + 1 :])
        for shape in layout.buffers.shapes
    )


def _make_scales(
    layout: CacheLayout, scales: Scale | Mapping[str, Scale] | None, device: Device
) -> Array | None:
    if scales is None:
        return None
    table = np.ones((len(layout.layer_numbers), 2), np.float32)
    for layer, pair in _by_layer(layout, scales).items():
        table[layout.layer_numbers[layout.owner_of(layer)]] = [np.asarray(s) for s in pair]
    return copy_to(table, device)


def _is_positive(scale: float | Array) -> bool:
    """Returns whether a scale is a positive float32. Arrays of jax pass: they may be traced."""
    return isinstance(scale, Array) or bool(0 < scale <= MAX_SCALE and np.float32(scale) > 0)


def _by_layer(layout: CacheLayout, scales: Scale | Mapping[str, Scale]) -> Mapping[str, Scale]:
    """Returns the pair of each named layer, or of all layers if none is named."""
    if not isinstance(scales, Mapping):
        scales = dict.fromkeys(layout.layer_numbers, scales)
    for pair in scales.values():
        if not isinstance(pair, Sequence) or [np.ndim(scale) for scale in pair] != [0, 0]:
            raise TypeError(
                f"scales must be pairs (K scale, V scale) of numbers, got {shown(pair)}"
            )
        for scale in pair:
            if not isinstance(scale, Array | np.ndarray):
                check_number(scales=scale)
        if not all(_is_positive(scale) for scale in pair):
            raise ValueError(f"scales must be finite float32 greater than 0, got {shown(pair)}")
    return scales
