"""Indexing that never clamps and never wraps."""

import jax.numpy as jnp
from jax import Array, lax


def within(values: Array, size: int | Array) -> Array:
    return (values >= 0) & (values < size)


def take(values: Array, indices: Array, fill: int = 0) -> Array:
    """``values[indices]``, with ``fill`` where an index is out of range."""
    return values.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def gather_bits(*problems: Array) -> Array:
    """int32[]: all bits of int32 arrays of any shape."""
    bits = jnp.int32(0)
    for array in problems:
        bits |= lax.reduce(array.reshape(-1), jnp.int32(0), lax.bitwise_or, (0,))
    return bits


def bit(value: int, where: Array) -> Array:
    """``value`` where a problem is, 0 elsewhere; int32, one per element."""
    return jnp.where(where, jnp.int32(value), jnp.int32(0))
