"""Indexing that never clamps and never wraps."""

import jax.numpy as jnp
from jax import Array


def within(values: Array, size: int | Array) -> Array:
    return (values >= 0) & (values < size)


def take(values: Array, indices: Array, fill: int = 0) -> Array:
    """``values[indices]``, with ``fill`` where an index is out of range."""
    return values.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def bit(value: int, where: Array) -> Array:
    """``value`` where a problem is, 0 elsewhere; int32, one per element."""
    return jnp.where(where, jnp.int32(value), jnp.int32(0))
