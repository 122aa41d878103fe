"""Reads and writes of memory that one program reads and writes in place, for XLA."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, Shaped


def read_extents(
    data: Shaped[Array, "extents elements"],
    extents: Int32[Array, "..."],
    columns: slice | None = None,
) -> Shaped[Array, "... elements"]:
    """Reads rows of an array whose memory later writes of the program reuse.

    XLA code that reads a pool and writes it goes through here. Without the barrier, XLA may compute
    the read once more for each use of its result: then it copies the whole array before the next
    write, or, for a single row on a CPU, reads bytes that this write has already replaced.

    Args:
      data: any dtype.
      extents: the rows to read.
      columns: elements of a row; None: all.

    Returns:
      The rows; zeros for rows out of range.
    """
    cells = data.at[extents] if columns is None else data.at[extents, columns]
    read = cells.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return lax.optimization_barrier(read)


def read_cells(
    data: Shaped[Array, "extents elements"],
    extents: Int32[Array, "..."],
    offsets: Int32[Array, "..."],
    width: int,
) -> Shaped[Array, "... width"]:
    """Reads a part of a row for each index, as `read_extents` does.

    Args:
      data: any dtype.
      extents, offsets: the rows to read, and the first element of each part.
      width: elements of a part.

    Returns:
      The parts; zeros for those out of range.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(extents.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    read = lax.gather(
        data,
        jnp.stack([extents, offsets], axis=-1),
        numbers,
        slice_sizes=(1, width),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )
    return lax.optimization_barrier(read)


def write_extents(
    data: Shaped[Array, "extents elements"],
    extents: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"] | int,
    rows: Shaped[Array, "rows width"],
    *,
    unique: bool = True,
) -> Shaped[Array, "extents elements"]:
    """Writes ``rows[i]`` to ``data[extents[i], offsets[i] :]``, in place.

    The XLA paths of all kernels write through here. XLA turns a scatter of a single row into an
    update of a slice, and on a CPU copies the whole array in case the row is out of range; so a
    second row, which is dropped, goes with it.

    Args:
      data: any dtype.
      extents: a row is dropped if its extent is out of range.
      offsets: the first element of each row in its extent, or one for all; a row that does not lie
        within is dropped.
      rows: in the dtype of ``data``.
      unique: whether no two rows that are written have one extent and overlap.
    """
    offsets = jnp.broadcast_to(jnp.asarray(offsets, jnp.int32), extents.shape)
    if extents.size == 1:
        extents, offsets = jnp.pad(extents, (0, 1), constant_values=-1), jnp.pad(offsets, (0, 1))
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    known = (extents >= 0) & (extents < data.shape[0])
    # What is dropped gets distinct rows beyond the array, so that all are unique.
    beyond = data.shape[0] + jnp.arange(extents.size, dtype=jnp.int32)
    return lax.scatter(
        data,
        jnp.stack([jnp.where(known, extents, beyond), offsets], axis=-1),
        rows,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        ),
        unique_indices=unique,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
