"""Arrays that are created straight on their devices, which may belong to several processes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

Shapes = tuple[tuple[int, ...], ...]
Device = jax.Device | Sharding | None
HOST_MEMORY = "pinned_host"  # jax's name of page-locked host memory


def zeros(shapes: Shapes, dtype: DTypeLike, device: Device) -> tuple[Array, ...]:
    """Returns one array of zeros for each shape, all made by one program.

    Args:
      device: a device or a sharding, to which the arrays are then committed; None: the default
        device, uncommitted. Allocate all state the same way: mixing committed and uncommitted
        arrays compiles each step twice.
    """
    return _zeros(shapes, jnp.dtype(dtype), _sharding(device))()


def copy_to(array: np.ndarray, device: Device) -> Array:
    """Returns a copy of an array of the host, in memory of its own that may be donated.

    `jax.device_put` would compare the array between all processes of the job, those too that
    have no part in the sharding; the caller sees to it that it is the same everywhere.
    """
    return _copy(array.ndim, _sharding(device))(array)


@functools.lru_cache
def _zeros(
    shapes: Shapes, dtype: jnp.dtype, sharding: Sharding | None
) -> Callable[[], tuple[Array, ...]]:
    """Returns the program that allocates, cached so that allocating again compiles nothing."""
    return jax.jit(
        lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes),
        out_shardings=tuple(_spelled_out(sharding, len(shape)) for shape in shapes),
    )


@functools.lru_cache
def _copy(ndim: int, sharding: Sharding | None) -> Callable[[np.ndarray], Array]:
    return jax.jit(jnp.copy, out_shardings=_spelled_out(sharding, ndim))


def _sharding(device: Device) -> Sharding | None:
    return SingleDeviceSharding(device) if isinstance(device, jax.Device) else device


def _spelled_out(sharding: Sharding | None, ndim: int) -> Sharding | None:
    """Returns a sharding as a jitted step returns it: with all axes, on a mesh of explicit ones.

    It is an equal sharding, but not the same argument to a jitted function.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh, spec = sharding.mesh, sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        return sharding
    spec = PartitionSpec(*spec, *[None] * (ndim - len(spec)))
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
