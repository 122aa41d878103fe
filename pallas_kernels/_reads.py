"""Reads of memory that the same program writes in place."""

from jax import Array, lax


def read_extents(data: Array, extents: Array, columns: slice | None = None) -> Array:
    """Reads rows of an array whose memory later writes of the program reuse.

    All XLA code that reads a pool goes through here. Without the barrier, XLA may compute the
    read once more for each use of its result: then it copies the whole array before the next
    write, or, for a single row on a CPU, reads bytes that this write has already replaced.

    Args:
      data: [extents, elements].
      extents: int32[...], the rows to read.
      columns: elements of a row; None: all.

    Returns:
      [..., elements] in the dtype of ``data``; zeros for rows out of range.
    """
    cells = data.at[extents] if columns is None else data.at[extents, columns]
    read = cells.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return lax.optimization_barrier(read)
