"""Checks of the arguments of the kernels: arrays as matrices of pages, and lists of block ids."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Int32, Shaped

type Tree[T] = T | Sequence["Tree[T]"] | Mapping[str, "Tree[T]"]
Ids = Int32[Array, " ids"]


def check_choice(choices: Sequence[str], **values: str | None) -> None:
    """Raises ValueError for the first value that is neither one of the choices nor None."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, str) or value not in choices):
            listed = ", ".join(map(repr, choices))
            raise ValueError(f"{name}={shown(value)}; use one of {listed} or None")


def shown(value: object) -> str:
    """Returns the beginning of a value's text, on one line."""
    return " ".join(repr(value).split())[:80]


def as_number(name: str, value: float) -> float:
    """Returns a finite number as a float."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={shown(value)} must be a finite number, or None")
    return number


def check_type(kind: type, **values: object) -> None:
    """Raises TypeError for the first value that is not of a type."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")


def as_dtype(name: str, value: DTypeLike, choices: Sequence[str]) -> jnp.dtype:
    """Returns a dtype; raises TypeError unless it is one of the choices."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in choices:
        given = shown(value) if dtype is None else dtype
        raise TypeError(f"{name} must be one of {', '.join(choices)}, got {given}")
    return dtype


def as_array(name: str, value: ArrayLike) -> Array:
    """Returns numbers as a `jax.Array`; raises TypeError for what holds none."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__}") from None


class PagedBuffer(NamedTuple):
    """An array as a matrix of pages: the parts of a block, one per index before the block axis.

    pages: block b of outer index o is page o * num_blocks + b.
    num_blocks: blocks along the array's block axis.
    list_index: index of the buffer's ids in `IdLists.lists`.
    """

    pages: Shaped[Array, "outer*num_blocks page"]
    num_blocks: int
    list_index: int = 0

    @property
    def outer(self) -> int:
        """Indices before the block axis; 0 for a buffer without blocks."""
        return self.pages.shape[0] // self.num_blocks if self.num_blocks else 0


class IdLists(NamedTuple):
    """Block ids of all buffers; buffers that share lists have them here once.

    lists: for each distinct combination of arguments a tuple of lists, one per argument.
    num_ids: how many entries of every list count; None: all.
    """

    lists: Sequence[tuple[Ids, ...]]
    num_ids: Int32[Array, ""] | None = None

    def is_counted(self, length: int) -> Bool[Array, " length"]:
        """Returns which entries of a list of that length count."""
        index = jnp.arange(length, dtype=jnp.int32)
        return index < (length if self.num_ids is None else self.num_ids)


class Arguments(NamedTuple):
    """The arguments of a call as kernels take them."""

    buffers: list[PagedBuffer]
    ids: IdLists


def unflatten_pages[T](buffers: T, pages: Sequence[Array]) -> T:
    """Returns pages as a tree of arrays like ``buffers``."""
    leaves, tree = jax.tree.flatten(buffers)
    pairs = zip(pages, leaves, strict=True)
    return tree.unflatten(array.reshape(jnp.shape(leaf)) for array, leaf in pairs)


def flatten_arguments(
    buffers: object, block_axis: Tree[int], num_ids: Array | None, **id_lists: Tree[Ids]
) -> Arguments:
    """Checks the arguments of a kernel, and arranges them as pages and distinct lists.

    Raises:
      TypeError: ids that are not int32[K], ``num_ids`` that is not int32[], a block axis that is
        not an int, or a buffer that is not real and numeric.
      ValueError: a block axis out of range, or trees that do not match.
    """
    leaves, tree = jax.tree.flatten(buffers)
    axes = match_tree(tree, block_axis, "block_axis")
    named = [match_tree(tree, given, name) for name, given in id_lists.items()]
    per_buffer = list(zip(*named, strict=True))
    distinct = {tuple(map(id, lists)): lists for lists in per_buffer}
    index = {key: i for i, key in enumerate(distinct)}
    paged = [
        as_pages(as_array("buffers", buffer), axis, index[tuple(map(id, lists))])
        for buffer, lists, axis in zip(leaves, per_buffer, axes, strict=True)
    ]
    checked = [
        tuple(as_ids(ids, name) for name, ids in zip(id_lists, lists, strict=True))
        for lists in distinct.values()
    ]
    return Arguments(paged, IdLists(checked, as_count(num_ids)))


def match_tree[T](tree: jax.tree_util.PyTreeDef, values: Tree[T], name: str) -> list[T]:
    """Returns one value per buffer: the same for all, or from a tree like the buffers'."""
    leaves, values_tree = jax.tree.flatten(values)
    if values_tree == tree:
        return leaves
    if len(leaves) == 1 and jax.tree_util.treedef_is_leaf(values_tree):
        return leaves * tree.num_leaves
    raise ValueError(
        f"{name} must be one value, or a tree like buffers', {tree}; got {values_tree}; one "
        "value is an int, or an int32 array of ids: not a list"
    )


def as_ids(ids: Array, name: str) -> Array:
    """Returns a list of ids or offsets as a `jax.Array`.

    Checks the dtype first, because jax truncates int64 to int32, which makes 7 of 2**32 + 7.
    """
    dtype = getattr(ids, "dtype", type(ids).__name__)
    if str(dtype) != "int32" or ids.ndim != 1:
        raise TypeError(f"{name} must be int32[K], got {dtype}{list(jnp.shape(ids))}")
    return jnp.asarray(ids)


def as_count(num_ids: Array | None) -> Array | None:
    """Returns ``num_ids`` as a `jax.Array`, or None."""
    if num_ids is None:
        return None
    dtype = getattr(num_ids, "dtype", type(num_ids).__name__)
    if str(dtype) != "int32" or num_ids.ndim != 0:
        raise TypeError(f"num_ids must be int32[] or None, got {dtype}{list(jnp.shape(num_ids))}")
    return jnp.asarray(num_ids)


def as_pages(buffer: Array, axis: int, list_index: int) -> PagedBuffer:
    """Checks one buffer and its block axis, and returns its pages."""
    if not isinstance(axis, int):
        raise TypeError(f"block_axis must be an int, got {type(axis).__name__}")
    if not -buffer.ndim <= axis < buffer.ndim:
        raise ValueError(f"block_axis={axis} is not an axis of a buffer of shape {buffer.shape}")
    if not jnp.issubdtype(buffer.dtype, jnp.number) or jnp.iscomplexobj(buffer):
        raise TypeError(f"buffers must be real and numeric, got {buffer.dtype}")
    axis %= buffer.ndim
    num_pages, page = math.prod(buffer.shape[: axis + 1]), math.prod(buffer.shape[axis + 1 :])
    return PagedBuffer(buffer.reshape(num_pages, page), buffer.shape[axis], list_index)


def page_indices(buffer: PagedBuffer, block_ids: Array) -> Array:
    """Returns the pages of blocks, int32[outer * K]; ids out of range become pages out of range."""
    num_pages = buffer.pages.shape[0]
    known = (block_ids >= 0) & (block_ids < buffer.num_blocks)
    starts = buffer.num_blocks * jnp.arange(buffer.outer, dtype=jnp.int32)
    return jnp.where(known[None], starts[:, None] + block_ids[None], num_pages).reshape(-1)
