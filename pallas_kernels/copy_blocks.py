"""Copies blocks of arrays onto other blocks of them, in place under donation.

One block is one index of an array's block axis. All pairs are copied at once, so chains
and swaps need no order; pairs with an id that is out of range are ignored, so lists can
be padded to a fixed length with -1.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._pages import (
    Blocks,
    Work,
    as_integers,
    as_words,
    from_words,
    rows_of,
    run,
    take_apart,
)


def copy_blocks(
    buffers: Any,
    sources: Any,
    destinations: Any,
    *,
    block_axis: Any = 0,
    disjoint: bool = False,
    implementation: str | None = None,
) -> Any:
    """Copies blocks of one array, or of every array in a tree, with at most two launches.

    Block ``destinations[i]`` becomes what block ``sources[i]`` was before the call, for
    all ``i`` at once. Works inside your ``jit``, ``lax.scan`` and ``shard_map`` (with
    ``check_vma=False``), and in place where the buffers are donated there.

    Args:
      buffers: an array or a tree of arrays; any shape, real numeric dtype.
      sources: int32[K], the blocks to copy, in every buffer; or a tree like ``buffers``
        with a list for each.
      destinations: the same for the blocks to overwrite, as many as sources. A pair is
        ignored when either id is below 0 or beyond a buffer's blocks, and when it would
        overwrite block 0: block tables are padded with that and it is never written. Of
        the other pairs with one destination the last one counts.
      block_axis: which axis counts blocks; an int, or a tree of ints like ``buffers``.
      disjoint: your promise that no block is overwritten by one pair and copied by
        another, as with copy-on-write into fresh blocks. ``"mosaic_gpu"`` then needs one
        launch and no memory; otherwise it needs two, and room for K blocks of every
        buffer. A broken promise leaves a mixture of both contents in the copy.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best: Mosaic for the
        buffers whose dtype it stores, where the program is compiled for a GPU that has
        it, and XLA for all else.

    Returns:
      The buffers, same tree, shapes and dtypes.

    Raises:
      TypeError: ids that are not int32, or a buffer dtype the implementation lacks.
      ValueError: an unknown implementation, a block axis out of range, lists of
        different lengths, or trees that do not match.
      NotImplementedError: ``"mosaic_gpu"`` where jax or the GPU is too old for it. (On
        other devices jax itself refuses to compile the kernel.)
    """
    work = take_apart(buffers, block_axis, sources=sources, destinations=destinations)
    mosaic_gpu = functools.partial(_copy_mosaic, disjoint=disjoint)
    return run(_settle(work), implementation, mosaic_gpu=mosaic_gpu, xla=_copy_xla)


def _settle(work: Work) -> Work:
    """Gives the pairs that do nothing destination -1; the others' ids are all in range.

    What is in range depends on the buffer, so lists are settled once per block count.
    """
    keys = {(blocks.list_index, blocks.num_blocks): None for blocks in work.blocks}
    index = {key: i for i, key in enumerate(keys)}
    lists = [_settle_pairs(work.lists[i], num_blocks) for i, num_blocks in keys]
    blocks = [b._replace(list_index=index[b.list_index, b.num_blocks]) for b in work.blocks]
    return work._replace(blocks=blocks, lists=lists)


def _settle_pairs(pairs: tuple[Array, ...], num_blocks: int) -> tuple[Array, ...]:
    sources, destinations = pairs
    if sources.shape != destinations.shape:
        raise ValueError(
            f"sources and destinations must be pairs, got {sources.size} and {destinations.size}"
        )
    known = (sources >= 0) & (sources < num_blocks)
    known &= (destinations >= 1) & (destinations < num_blocks)
    order = jnp.arange(sources.size, dtype=jnp.int32)
    later = known[None] & (destinations[None] == destinations[:, None])
    loses = (later & (order[None] > order[:, None])).any(axis=1)
    moves = known & ~loses & (sources != destinations)
    return sources, jnp.where(moves, destinations, -1)


def _copy_mosaic(
    work: list[Blocks], lists: list[tuple[Array, ...]], *, disjoint: bool
) -> list[Array]:
    from pallas_kernels._copy_mosaic import copy_pages

    words = [blocks._replace(pages=as_words(blocks.pages)) for blocks in work]
    copied = copy_pages(words, lists, disjoint=disjoint)
    return [from_words(pages, blocks.pages) for pages, blocks in zip(copied, work, strict=True)]


def _copy_xla(work: list[Blocks], lists: list[tuple[Array, ...]]) -> list[Array]:
    return [_copy_rows(blocks, *lists[blocks.list_index]) for blocks in work]


def _copy_rows(blocks: Blocks, sources: Array, destinations: Array) -> Array:
    if not blocks.pages.size:
        return blocks.pages
    num_rows = blocks.pages.shape[0]
    rows = rows_of(blocks, destinations).reshape(-1)
    # What goes nowhere gets distinct rows beyond the buffer, so that all are unique.
    beyond = num_rows + jnp.arange(rows.size, dtype=jnp.int32)
    rows = jnp.where(rows < num_rows, rows, beyond)
    pages = as_integers(blocks.pages)
    copies = pages.at[rows_of(blocks, sources).reshape(-1)].get(
        mode="clip", wrap_negative_indices=False
    )
    pages = pages.at[rows].set(
        copies, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return lax.bitcast_convert_type(pages, blocks.pages.dtype)
