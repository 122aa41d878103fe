"""What every kernel here is given: arrays seen as rows of pages, and lists of block ids.

Checks arguments by name and finds the implementation; knows nothing of how a kernel works.
"""

import math
from collections.abc import Callable, Sequence
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


class Work(NamedTuple):
    """A call taken apart: arrays as pages, the distinct id lists, and the way back.

    lists: one tuple of int32[K] per distinct combination of lists.
    """

    blocks: list[Blocks]
    lists: list[tuple[Array, ...]]
    shapes: list[tuple[int, ...]]
    tree: jax.tree_util.PyTreeDef

    def rebuild(self, pages: Sequence[Array]) -> Any:
        """The buffers again, from their pages."""
        pairs = zip(pages, self.shapes, strict=True)
        return self.tree.unflatten(array.reshape(shape) for array, shape in pairs)


def take_apart(buffers: Any, block_axis: Any, **id_lists: Any) -> Work:
    """Checks the arguments of a kernel and arranges them as pages.

    Raises:
      TypeError: ids that are not int32[K], a block axis that is no int, or a buffer that
        is not real and numeric.
      ValueError: a block axis out of range, or trees that do not match.
    """
    leaves, tree = jax.tree.flatten(buffers)
    axes = match_tree(tree, block_axis, "block_axis")
    named = [match_tree(tree, given, name) for name, given in id_lists.items()]
    per_buffer = list(zip(*named, strict=True))
    distinct = {tuple(map(id, lists)): lists for lists in per_buffer}
    index = {key: i for i, key in enumerate(distinct)}
    blocks = [
        as_pages(jnp.asarray(buffer), index[tuple(map(id, lists))], axis)
        for buffer, lists, axis in zip(leaves, per_buffer, axes, strict=True)
    ]
    checked = [
        tuple(as_ids(ids, name) for name, ids in zip(id_lists, lists, strict=True))
        for lists in distinct.values()
    ]
    return Work(blocks, checked, [jnp.shape(leaf) for leaf in leaves], tree)


def match_tree(tree: jax.tree_util.PyTreeDef, values: Any, name: str) -> list[Any]:
    """One value per buffer: the same for all, or taken from a tree of the same form."""
    leaves, values_tree = jax.tree.flatten(values)
    if values_tree == tree:
        return leaves
    if len(leaves) == 1 and jax.tree_util.treedef_is_leaf(values_tree):
        return leaves * tree.num_leaves
    raise ValueError(f"{name} is neither one value nor a tree like buffers: {values_tree}")


def as_ids(ids: Any, name: str) -> Array:
    # Before jax sees it: it would cut int64 down to int32, and 2**32 + 7 to 7.
    dtype = getattr(ids, "dtype", type(ids).__name__)
    if str(dtype) != "int32" or ids.ndim != 1:
        raise TypeError(f"{name} must be int32[K], got {dtype}{list(jnp.shape(ids))}")
    return jnp.asarray(ids)


def as_pages(buffer: Array, list_index: int, axis: int) -> Blocks:
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


def rows_of(blocks: Blocks, block_ids: Array) -> Array:
    """Rows of blocks, int32[outer, K]; ids out of range become rows out of range."""
    num_rows = blocks.pages.shape[0]
    known = (block_ids >= 0) & (block_ids < blocks.num_blocks)
    starts = jnp.arange(0, num_rows, max(blocks.num_blocks, 1), dtype=jnp.int32)
    return jnp.where(known[None], starts[:, None] + block_ids[None], num_rows)


def as_integers(pages: Array) -> Array:
    """The same bytes in a dtype whose scatter keeps them.

    XLA's CPU backend scatters narrow floats by way of float32 and loses NaN payloads of
    blocks that should stay.
    """
    dtype = pages.dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if narrow else dtype
    return lax.bitcast_convert_type(pages, bits)


def as_words(pages: Array, whole: int = 0) -> Array:
    """The same bytes as 32-bit words where they make whole words, for kernels that move
    bytes: narrower elements travel through registers one by one.

    whole: elements that must make whole words too, besides the page.
    """
    ratio = 4 // pages.dtype.itemsize
    if ratio <= 1 or pages.shape[1] % ratio or whole % ratio:
        return pages
    return lax.bitcast_convert_type(
        pages.reshape(pages.shape[0], pages.shape[1] // ratio, ratio), jnp.uint32
    )


def from_words(words: Array, like: Array) -> Array:
    """The way back of `as_words`."""
    return lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)


Implementation = Callable[[list[Blocks], list[tuple[Array, ...]]], list[Array]]


def run(
    work: Work, implementation: str | None, *, mosaic_gpu: Implementation, xla: Implementation
) -> Any:
    """Runs a kernel's implementation of that name, or the best where None is given.

    Raises:
      ValueError: an unknown name.
      NotImplementedError, TypeError: ``"mosaic_gpu"`` cannot do this.
    """
    match implementation:
        case None:
            pages = _run_best(work, mosaic_gpu, xla)
        case "xla":
            pages = xla(work.blocks, work.lists)
        case "mosaic_gpu":
            _check_mosaic(work.blocks)
            pages = mosaic_gpu(work.blocks, work.lists)
        case _:
            raise ValueError(
                f"implementation={implementation!r}; use one of {IMPLEMENTATIONS} or None"
            )
    return work.rebuild(pages)


def default_implementation() -> str:
    """The implementation that ``None`` stands for on the default device."""
    return "xla" if _mosaic_gpu.why_unsupported() else "mosaic_gpu"


def _run_best(work: Work, mosaic_gpu: Implementation, xla: Implementation) -> list[Array]:
    """Mosaic on a GPU that has it and for dtypes that it stores, XLA for the rest."""
    if default_implementation() == "xla":
        return xla(work.blocks, work.lists)
    stored = [blocks for blocks in work.blocks if _mosaic_gpu.stores(blocks.pages.dtype)]
    others = [blocks for blocks in work.blocks if not _mosaic_gpu.stores(blocks.pages.dtype)]

    def with_pages(pages: list[Array]) -> list[Blocks]:
        pairs = zip(stored, pages, strict=True)
        return [blocks._replace(pages=traced) for blocks, traced in pairs]

    # A program may be compiled for the CPU of a machine that has a GPU.
    done = lax.platform_dependent(
        [blocks.pages for blocks in stored],
        work.lists,
        cuda=lambda pages, lists: mosaic_gpu(with_pages(pages), lists),
        default=lambda pages, lists: xla(with_pages(pages), lists),
    )
    by_kernel, by_xla = iter(done), iter(xla(others, work.lists))
    return [
        next(by_kernel if _mosaic_gpu.stores(blocks.pages.dtype) else by_xla)
        for blocks in work.blocks
    ]


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
