"""Zeroed arrays, straight on their devices. Knows shapes, dtypes and shardings only."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Shapes = tuple[tuple[int, ...], ...]
Device = jax.Device | jax.sharding.Sharding | None


def zeros(shapes: Shapes, dtype: DTypeLike, device: Device) -> tuple[Array, ...]:
    """One array of zeros for each shape, all of them in one program.

    Args:
      device: a device or a sharding, to which the arrays are then committed; None: the
        default device, uncommitted. All state is placed like this, for mixing the two
        compiles steps twice.
    """
    is_device = isinstance(device, jax.Device)
    sharding = jax.sharding.SingleDeviceSharding(device) if is_device else device
    return _program(shapes, jnp.dtype(dtype), sharding)()


@functools.lru_cache
def _program(
    shapes: Shapes, dtype: jnp.dtype, sharding: jax.sharding.Sharding | None
) -> Callable[[], tuple[Array, ...]]:
    """Kept, so that what is allocated again, after a sleep say, compiles nothing."""
    return jax.jit(
        lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes), out_shardings=sharding
    )
