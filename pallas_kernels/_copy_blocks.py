"""Copies of blocks onto other blocks of the same arrays, in place under donation."""

import functools

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
from pallas_kernels._bitcast import as_integers, as_words, from_words
from pallas_kernels._capability import Implementation
from pallas_kernels._dispatch import run
from pallas_kernels._in_place import read_extents, write_extents


def copy_blocks[T](
    buffers: T,
    sources: Tree[Ids],
    destinations: Tree[Ids],
    *,
    block_axis: Tree[int] = 0,
    num_ids: Int32[Array, ""] | None = None,
    disjoint: bool = False,
    implementation: Implementation | None = None,
) -> T:
    """Copies blocks of one array, or of every array in a tree, with at most two kernel launches.

    Example::

        pool = jnp.arange(24.0).reshape(4, 6)                  # 4 blocks
        sources, destinations = jnp.array([0, 1], jnp.int32), jnp.array([1, 0], jnp.int32)
        pool = pallas_kernels.copy_blocks(pool, sources, destinations)     # swaps blocks 0 and 1

    A block is one index of an array's block axis. Block ``destinations[i]`` becomes what block
    ``sources[i]`` was before the call, for all ``i`` at once, so the order of pairs does not matter
    in chains and swaps.

    Args:
      buffers: an array or a tree of arrays; any shape, real numeric dtype.
      sources: the blocks to copy in every buffer; or a tree like ``buffers`` with a
        list for each.
      destinations: the blocks to overwrite, as many as sources, given in the same way. A pair
        is ignored if either id is below 0 or beyond a buffer's blocks, so lists can be padded
        with -1. Of several valid pairs with the same destination, the last one counts.
      block_axis: the axis that counts blocks; an int, or a tree of ints like ``buffers``.
      num_ids: may be traced: only the first ``num_ids`` pairs of every list count,
        and ``"mosaic_gpu"`` moves no bytes for the rest. It is clamped to 0 and to the length of
        a list. None: all pairs count.
      disjoint: True promises that no block is both a source and a destination, as with
        copy-on-write into fresh blocks. ``"mosaic_gpu"`` then needs one launch and no memory;
        otherwise two launches, and memory for K blocks of every buffer. If the promise is
        broken, a copy may mix old and new content.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best; see `pallas_kernels`.

    Returns:
      The buffers, same tree, shapes and dtypes.

    Raises:
      TypeError: ids that are not int32, or a buffer dtype that the implementation cannot store.
      ValueError: an unknown implementation, a block axis out of range, lists of
        different lengths, or trees that do not match.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    arguments = flatten_arguments(
        buffers, block_axis, num_ids, sources=sources, destinations=destinations
    )
    masked, ids = mask_noop_pairs(arguments.buffers, arguments.ids)
    copied = run(
        *(masked, ids, implementation),
        kernel="copy_blocks",
        mosaic_gpu=functools.partial(_copy_mosaic, disjoint=disjoint),
        xla=_copy_xla,
    )
    return unflatten_pages(buffers, copied)


def mask_noop_pairs(buffers: list[PagedBuffer], ids: IdLists) -> tuple[list[PagedBuffer], IdLists]:
    """Returns lists in which every pair that does nothing has the destination -1.

    The range of ids depends on the buffer, so there is one list for each number of blocks.
    """
    keys = {(buffer.list_index, buffer.num_blocks): None for buffer in buffers}
    index = {key: i for i, key in enumerate(keys)}
    lists = [_mask_pairs(ids, list_index, num_blocks) for list_index, num_blocks in keys]
    masked = [
        buffer._replace(list_index=index[buffer.list_index, buffer.num_blocks])
        for buffer in buffers
    ]
    return masked, IdLists(lists, ids.num_ids)


def _mask_pairs(ids: IdLists, list_index: int, num_blocks: int) -> tuple[Array, Array]:
    sources, destinations = ids.lists[list_index]
    if sources.shape != destinations.shape:
        raise ValueError(
            f"sources and destinations must have one length, got {sources.size} and "
            f"{destinations.size}"
        )
    known = (sources >= 0) & (sources < num_blocks)
    known &= (destinations >= 0) & (destinations < num_blocks)
    known &= ids.is_counted(sources.size)
    order = jnp.arange(sources.size, dtype=jnp.int32)
    same = known[None] & (destinations[None] == destinations[:, None])
    overruled = (same & (order[None] > order[:, None])).any(axis=1)
    transfers = known & ~overruled & (sources != destinations)
    return sources, jnp.where(transfers, destinations, -1)


def _copy_mosaic(buffers: list[PagedBuffer], ids: IdLists, *, disjoint: bool) -> list[Array]:
    from pallas_kernels._copy_blocks_mosaic import copy_pages

    words = [buffer._replace(pages=as_words(buffer.pages)) for buffer in buffers]
    copied = copy_pages(words, ids, disjoint=disjoint)
    return [from_words(pages, buffer.pages) for pages, buffer in zip(copied, buffers, strict=True)]


def _copy_xla(buffers: list[PagedBuffer], ids: IdLists) -> list[Array]:
    return [_copy_buffer(buffer, *ids.lists[buffer.list_index]) for buffer in buffers]


def _copy_buffer(buffer: PagedBuffer, sources: Array, destinations: Array) -> Array:
    if not buffer.pages.size:
        return buffer.pages
    pages = as_integers(buffer.pages)
    copies = read_extents(pages, page_indices(buffer, sources))
    pages = write_extents(pages, page_indices(buffer, destinations), 0, copies)
    return lax.bitcast_convert_type(pages, buffer.pages.dtype)
