"""Sets blocks of arrays to zero, in place under donation.

One block is one index of an array's block axis; block ids that are out of range are
ignored, so id lists can be padded to a fixed length with -1.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._pages import Blocks, as_integers, rows_of, run, take_apart


def zero_blocks(
    buffers: Any,
    block_ids: Any,
    *,
    block_axis: Any = 0,
    include_null_block: bool = False,
    implementation: str | None = None,
) -> Any:
    """Zeroes blocks of one array, or of every array in a tree, with one kernel launch.

    Works inside your ``jit``, ``lax.scan`` and ``shard_map`` (with ``check_vma=False``),
    and in place where the buffers are donated there. Zero means every byte: NaN, Inf
    and padding go too.

    Args:
      buffers: an array or a tree of arrays; any shape, real numeric dtype.
      block_ids: int32[K], the blocks to zero in every buffer; or a tree like
        ``buffers`` with a list for each. Ids below 0 or beyond a buffer's blocks are
        ignored; an id may repeat.
      block_axis: which axis counts blocks; an int, or a tree of ints like ``buffers``.
      include_null_block: zero block 0 too when it is listed; by default it is left
        alone, since block tables are padded with it and it is never written.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best: Mosaic for the
        buffers whose dtype it stores, where the program is compiled for a GPU that has
        it, and XLA for all else.

    Returns:
      The buffers, same tree, shapes and dtypes.

    Raises:
      TypeError: ids that are not int32, or a buffer dtype the implementation lacks.
      ValueError: an unknown implementation, a block axis out of range, or trees that
        do not match.
      NotImplementedError: ``"mosaic_gpu"`` where jax or the GPU is too old for it. (On
        other devices jax itself refuses to compile the kernel.)
    """
    first_id = 0 if include_null_block else 1
    return run(
        take_apart(buffers, block_axis, block_ids=block_ids),
        implementation,
        mosaic_gpu=functools.partial(_zero_mosaic, first_id),
        xla=functools.partial(_zero_xla, first_id),
    )


def _zero_mosaic(first_id: int, work: list[Blocks], lists: list[tuple[Array, ...]]) -> list[Array]:
    from pallas_kernels._zero_mosaic import zero_pages

    return zero_pages(work, lists, first_id)


def _zero_xla(first_id: int, work: list[Blocks], lists: list[tuple[Array, ...]]) -> list[Array]:
    return [_zero_rows(blocks, lists[blocks.list_index][0], first_id) for blocks in work]


def _zero_rows(blocks: Blocks, block_ids: Array, first_id: int) -> Array:
    if not blocks.pages.size:
        return blocks.pages
    rows = rows_of(blocks, jnp.where(block_ids >= first_id, block_ids, -1)).reshape(-1)
    pages = as_integers(blocks.pages)
    pages = pages.at[rows].set(0, mode="drop", wrap_negative_indices=False)
    return lax.bitcast_convert_type(pages, blocks.pages.dtype)
