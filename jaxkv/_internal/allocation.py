"""Zeroed arrays, allocated straight on their devices."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Shapes = tuple[tuple[int, ...], ...]
Device = jax.Device | jax.sharding.Sharding | None


def zeros(shapes: Shapes, dtype: DTypeLike, device: Device) -> tuple[Array, ...]:
    """Returns one array of zeros for each shape, all made by one program.

    Args:
      device: a device or a sharding, to which the arrays are then committed; None: the default
        device, uncommitted. Allocate all state the same way: mixing committed and uncommitted
        arrays compiles each step twice.
    """
    is_device = isinstance(device, jax.Device)
    sharding = jax.sharding.SingleDeviceSharding(device) if is_device else device
    return _program(shapes, jnp.dtype(dtype), sharding)()


@functools.lru_cache
def _program(
    shapes: Shapes, dtype: jnp.dtype, sharding: jax.sharding.Sharding | None
) -> Callable[[], tuple[Array, ...]]:
    """Returns the program that allocates, kept so that allocating again compiles nothing."""
    return jax.jit(
        lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes), out_shardings=sharding
    )
