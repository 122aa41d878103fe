"""Sets blocks of arrays to zero, in place under donation.

One block is one index of an array's block axis; block ids that are out of range are
ignored, so id lists can be padded to a fixed length with -1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _mosaic_gpu

IMPLEMENTATIONS = ("mosaic_gpu", "xla")


class Blocks(NamedTuple):
    """One array seen as rows of pages.

    pages: dtype[rows, page], where rows = outer * num_blocks.
    list_index: which of the id lists, int32[K] each, names its blocks; several arrays
      may share one, and the kernel then gets it once.
    """

    pages: Array
    list_index: int
    num_blocks: int


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
    leaves, tree = jax.tree.flatten(buffers)
    lists = _match(tree, block_ids, "block_ids")
    axes = _match(tree, block_axis, "block_axis")
    distinct = {id(ids): ids for ids in lists}
    index = {key: i for i, key in enumerate(distinct)}
    ids = [_without_null(given, include_null_block) for given in distinct.values()]
    work = [
        _as_pages(jnp.asarray(buffer), index[id(given)], axis)
        for buffer, given, axis in zip(leaves, lists, axes, strict=True)
    ]
    match implementation:
        case None:
            zeroed = _zero_pages_where_best(work, ids)
        case "xla":
            zeroed = _zero_pages_xla(work, ids)
        case "mosaic_gpu":
            _check_mosaic(work)
            zeroed = _mosaic_gpu.zero_pages(work, ids)
        case _:
            raise ValueError(
                f"implementation={implementation!r}; use one of {IMPLEMENTATIONS} or None"
            )
    return tree.unflatten(
        pages.reshape(jnp.shape(buffer)) for pages, buffer in zip(zeroed, leaves, strict=True)
    )


def default_implementation() -> str:
    """The implementation that ``None`` stands for on the default device."""
    return "xla" if _mosaic_gpu.why_unsupported() else "mosaic_gpu"


def _zero_pages_where_best(work: list[Blocks], ids: list[Array]) -> list[Array]:
    """Mosaic on a GPU that has it and for dtypes that it stores, XLA for the rest."""
    if default_implementation() == "xla":
        return _zero_pages_xla(work, ids)
    stored = [blocks for blocks in work if _mosaic_gpu.stores(blocks.pages.dtype)]
    others = [blocks for blocks in work if not _mosaic_gpu.stores(blocks.pages.dtype)]

    def with_pages(pages: list[Array]) -> list[Blocks]:
        pairs = zip(stored, pages, strict=True)
        return [blocks._replace(pages=traced) for blocks, traced in pairs]

    # A program may be compiled for the CPU of a machine that has a GPU.
    zeroed = lax.platform_dependent(
        [blocks.pages for blocks in stored],
        ids,
        cuda=lambda pages, ids: _mosaic_gpu.zero_pages(with_pages(pages), ids),
        default=lambda pages, ids: _zero_pages_xla(with_pages(pages), ids),
    )
    by_kernel, by_xla = iter(zeroed), iter(_zero_pages_xla(others, ids))
    return [
        next(by_kernel if _mosaic_gpu.stores(blocks.pages.dtype) else by_xla) for blocks in work
    ]


def _zero_pages_xla(work: list[Blocks], ids: list[Array]) -> list[Array]:
    return [_zero_rows(blocks, ids[blocks.list_index]) for blocks in work]


def _zero_rows(blocks: Blocks, block_ids: Array) -> Array:
    if not blocks.pages.size:
        return blocks.pages
    dtype = blocks.pages.dtype
    # XLA's CPU backend scatters narrow floats by way of float32 and loses NaN payloads
    # of blocks that should stay, so those go through as integers.
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if narrow else dtype
    pages = lax.bitcast_convert_type(blocks.pages, bits)
    rows = _rows_of(blocks, block_ids)
    pages = pages.at[rows].set(0, mode="drop", wrap_negative_indices=False)
    return lax.bitcast_convert_type(pages, dtype)


def _rows_of(blocks: Blocks, block_ids: Array) -> Array:
    """Rows to zero, int32[outer * K]; ids out of range become rows out of range."""
    num_rows = blocks.pages.shape[0]
    known = (block_ids >= 0) & (block_ids < blocks.num_blocks)
    starts = jnp.arange(0, num_rows, blocks.num_blocks, dtype=jnp.int32)
    rows = starts[:, None] + block_ids[None]
    return jnp.where(known[None], rows, num_rows).reshape(-1)


def _without_null(block_ids: Any, include_null_block: bool) -> Array:
    # Before jax sees it: it would cut int64 down to int32, and 2**32 + 7 to 7.
    dtype = getattr(block_ids, "dtype", type(block_ids).__name__)
    if str(dtype) != "int32" or block_ids.ndim != 1:
        raise TypeError(f"block_ids must be int32[K], got {dtype}{list(jnp.shape(block_ids))}")
    ids = jnp.asarray(block_ids)
    return ids if include_null_block else jnp.where(ids >= 1, ids, -1)


def _as_pages(buffer: Array, list_index: int, axis: int) -> Blocks:
    if not isinstance(axis, int):
        raise TypeError(f"block_axis must be an int, got {axis!r}")
    if not -buffer.ndim <= axis < buffer.ndim:
        raise ValueError(f"block_axis={axis} is out of range for a buffer of shape {buffer.shape}")
    if not jnp.issubdtype(buffer.dtype, jnp.number) or jnp.iscomplexobj(buffer):
        raise TypeError(f"buffers must be real and numeric, got {buffer.dtype}")
    axis %= buffer.ndim
    num_blocks, page = buffer.shape[axis], math.prod(buffer.shape[axis + 1 :])
    rows = math.prod(buffer.shape[: axis + 1])
    return Blocks(buffer.reshape(rows, page), list_index, num_blocks)


def _match(tree: jax.tree_util.PyTreeDef, values: Any, name: str) -> list[Any]:
    """One value per buffer: the same for all, or taken from a tree of the same form."""
    leaves, values_tree = jax.tree.flatten(values)
    if values_tree == tree:
        return leaves
    if len(leaves) == 1 and jax.tree_util.treedef_is_leaf(values_tree):
        return leaves * tree.num_leaves
    raise ValueError(f"{name} is neither one value nor a tree like buffers: {values_tree}")


def _check_mosaic(work: list[Blocks]) -> None:
    reason = _mosaic_gpu.why_unsupported(any_platform=True)
    if reason:
        raise NotImplementedError(f'implementation="mosaic_gpu": {reason}; use "xla"')
    for blocks in work:
        if not _mosaic_gpu.stores(blocks.pages.dtype):
            raise TypeError(
                f'implementation="mosaic_gpu" cannot store {blocks.pages.dtype}; use "xla" or one '
                f"of {', '.join(_mosaic_gpu.DTYPES)}"
            )
