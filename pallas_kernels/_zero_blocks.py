"""Zeroing of blocks of arrays, in place under donation."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels._arguments import (
    IdLists,
    Ids,
    PagedBuffer,
    Tree,
    flatten_arguments,
    page_indices,
    unflatten_pages,
)
from pallas_kernels._bitcast import as_integers
from pallas_kernels._capability import Implementation
from pallas_kernels._dispatch import run
from pallas_kernels._in_place import write_extents


def zero_blocks[T](
    buffers: T,
    block_ids: Tree[Ids],
    *,
    block_axis: Tree[int] = 0,
    num_ids: Int32[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> T:
    """Zeroes blocks of one array, or of every array in a tree, with one kernel launch.

    Example::

        pool = jnp.full((4, 16, 2, 64), jnp.nan)               # 4 blocks
        ids = jnp.array([1, 3, -1], jnp.int32)                 # -1 is padding
        pool = pallas_kernels.zero_blocks(pool, ids)

    A block is one index of an array's block axis. All of its bytes become zero, including NaN, Inf
    and padding.

    Args:
      buffers: an array or a tree of arrays; any shape, real numeric dtype.
      block_ids: the blocks to zero in every buffer; or a tree like ``buffers``
        with a list for each. An id may repeat. Ids below 0 and ids beyond a buffer's
        blocks are ignored, so lists can be padded with -1.
      block_axis: the axis that counts blocks; an int, or a tree of ints like ``buffers``.
      num_ids: may be traced: only the first ``num_ids`` entries of every list count,
        and ``"mosaic_gpu"`` does no work for the rest. It is clamped to 0 and to the length of a
        list. None: all entries count.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best; see `pallas_kernels`.

    Returns:
      The buffers, same tree, shapes and dtypes.

    Raises:
      TypeError: ids that are not int32, or a buffer dtype that the implementation cannot store.
      ValueError: an unknown implementation, a block axis out of range, or trees that
        do not match.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    arguments = flatten_arguments(buffers, block_axis, num_ids, block_ids=block_ids)
    zeroed = run(
        *(arguments.buffers, arguments.ids, implementation),
        kernel="zero_blocks",
        mosaic_gpu=_zero_mosaic,
        xla=_zero_xla,
    )
    return unflatten_pages(buffers, zeroed)


def _zero_mosaic(buffers: list[PagedBuffer], ids: IdLists) -> list[Array]:
    from pallas_kernels._zero_blocks_mosaic import zero_pages

    return zero_pages(buffers, ids)


def _zero_xla(buffers: list[PagedBuffer], ids: IdLists) -> list[Array]:
    return [_zero_buffer(buffer, ids) for buffer in buffers]


def _zero_buffer(buffer: PagedBuffer, ids: IdLists) -> Array:
    if not buffer.pages.size:
        return buffer.pages
    (block_ids,) = ids.lists[buffer.list_index]
    block_ids = jnp.where(ids.is_counted(block_ids.size), block_ids, -1)
    pages, indices = as_integers(buffer.pages), page_indices(buffer, block_ids)
    zeros = jnp.zeros((indices.size, pages.shape[1]), pages.dtype)
    pages = write_extents(pages, indices, 0, zeros, unique=False)  # an id may repeat
    return lax.bitcast_convert_type(pages, buffer.pages.dtype)
