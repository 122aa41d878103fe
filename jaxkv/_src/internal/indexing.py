"""Indexing of jax arrays that never clamps and never wraps."""

import functools
import operator

import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.internal.numbers import INT32_MAX

FEW_ENDS = 32


def within(values: Array, size: int | Array) -> Array:
    """Returns whether each value is in ``0 .. size - 1``."""
    return (values >= 0) & (values < size)


def take(values: Array, indices: Array, fill: int = 0) -> Array:
    """Returns ``values[indices]``, with ``fill`` where an index is out of range."""
    return values.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def take_cells(table: Array, rows: Array, columns: Array, fill: int) -> Array:
    """Returns ``table[rows, columns]``, with ``fill`` where the column is out of range.

    Args:
      table: int32[R, W], not empty.
      rows, columns: int32 of shapes that broadcast; rows must be in range.
    """
    width = table.shape[1]
    inside = within(columns, width)
    columns = jnp.where(inside, columns, 0)
    if table.size <= INT32_MAX:
        # XLA fuses the gather of one index into what uses it; it writes pairs of indices first.
        cells = table.reshape(-1).at[rows * width + columns]
    else:
        cells = table.at[rows, columns]
    return jnp.where(inside, cells.get(mode="promise_in_bounds", wrap_negative_indices=False), fill)


def gather_bits(*problems: Array) -> Array:
    """Returns, int32[], the bits of all elements of int32 arrays."""
    return lax.reduce(lay_over(*problems), jnp.int32(0), lax.bitwise_or, (0,))


def lay_over(*problems: Array) -> Array:
    """Returns the bits of int32 arrays laid over each other, as long as the longest of them.

    XLA reduces arrays of different sizes in a kernel each, and this one in one kernel.
    """
    flat = [array.reshape(-1) for array in problems]
    size = max(array.size for array in flat)
    return functools.reduce(operator.or_, [jnp.pad(a, (0, size - a.size)) for a in flat])


def bit(value: int, where: Array) -> Array:
    """Returns ``value`` where a problem is and 0 elsewhere, int32, one per element."""
    return jnp.where(where, jnp.int32(value), jnp.int32(0))


def group_of(index: Array, ends: Array) -> Array:
    """Returns the group of each index, given where each group's elements end, int32[G].

    Indices past the last end get group G.
    """
    # A comparison with every end: a binary search would be a loop on the device. XLA fuses a few
    # of them into what uses the groups, and reduces many in a kernel of its own.
    if ends.size <= FEW_ENDS:
        passed = [(index >= end).astype(jnp.int32) for end in ends]
        return functools.reduce(operator.add, passed, jnp.zeros_like(index))
    ends = ends.reshape(*[1] * index.ndim, -1)
    return (index[..., None] >= ends).sum(axis=-1, dtype=jnp.int32)
