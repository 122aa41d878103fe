"""Indexing of jax arrays that never clamps and never wraps."""

import jax.numpy as jnp
from jax import Array, lax


def within(values: Array, size: int | Array) -> Array:
    """Returns whether each value is in ``0 .. size - 1``."""
    return (values >= 0) & (values < size)


def take(values: Array, indices: Array, fill: int = 0) -> Array:
    """Returns ``values[indices]``, with ``fill`` where an index is out of range."""
    return values.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def gather_bits(*problems: Array) -> Array:
    """Returns, int32[], the bits of all elements of int32 arrays."""
    bits = jnp.int32(0)
    for array in problems:
        bits |= lax.reduce(array.reshape(-1), jnp.int32(0), lax.bitwise_or, (0,))
    return bits


def bit(value: int, where: Array) -> Array:
    """Returns ``value`` where a problem is and 0 elsewhere, int32, one per element."""
    return jnp.where(where, jnp.int32(value), jnp.int32(0))


def group_of(index: Array, ends: Array) -> Array:
    """Returns the group of each index, given where each group's elements end, int32[G].

    Indices past the last end get group G.
    """
    # A comparison with every end: a binary search would be a loop on the device.
    ends = ends.reshape(*[1] * index.ndim, -1)
    return (index[..., None] >= ends).sum(axis=-1, dtype=jnp.int32)
