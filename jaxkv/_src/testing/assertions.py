"""Assertions over arrays, trees of them and jitted functions: pointers, bytes, compiled memory.

chex has others: ``chex.assert_trees_all_equal`` and its kin, ``chex.assert_max_traces``.
"""

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxkv._src.testing._extra import extra

with extra():
    import chex


def assert_in_place(
    fn: Callable[..., PyTree],
    *args: PyTree,
    donate_argnums: int | Sequence[int] = (0,),
    max_temp_bytes: int | None = None,
) -> PyTree:
    """Fails unless ``fn``, jitted and donating, works on the donated buffers themselves.

    Three things must hold. The lowered program promises each donated array to an output;
    the compiled one keeps the promise and needs little temporary memory (an array that is
    copied and copied back keeps its pointer too); and run, it returns the same pointers.

    Args:
      fn: to be jitted, or jitted already; bind static arguments with ``functools.partial``.
      args: its arguments. The donated ones are consumed, whole trees of them.
      donate_argnums: which of them to donate, as in ``jax.jit``.
      max_temp_bytes: most bytes of temporary memory, on each device. None: less than half
        of the largest donated array; give it where they differ in size, or a copy of a small
        one passes. Use arrays of a megabyte or more: every program needs
        some kilobytes, on a CPU as many as the rows that it touches.

    Returns:
      What ``fn`` returned.

    Raises:
      AssertionError: a donated array is not reused, or the bound is passed.
      ValueError: nothing is donated.
    """
    numbers = [donate_argnums] if isinstance(donate_argnums, int) else list(donate_argnums)
    donated = jax.tree.leaves([args[number] for number in numbers])
    if not all(isinstance(leaf, jax.Array) for leaf in donated) or not donated:
        raise ValueError(
            f"donate_argnums={donate_argnums} must name arguments made of jax arrays; pass "
            "NumPy arrays through jnp.asarray"
        )
    with warnings.catch_warnings():  # that donated buffers were not usable is said below
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jax.jit(fn, donate_argnums=tuple(numbers)).lower(*args)
        compiled = lowered.compile()
    _check_promised(lowered.as_text(), donated)
    _check_memory(compiled.memory_analysis(), donated, max_temp_bytes)
    before = [_pointers(leaf) for leaf in donated]
    outputs = compiled(*args)
    after = [_pointers(leaf) for leaf in jax.tree.leaves(outputs)]
    moved = [leaf for leaf, where in zip(donated, before, strict=True) if where not in after]
    if moved:
        raise AssertionError(
            f"donated and not returned at the same address: {_describe(moved)}; on a CPU, holding "
            "a NumPy view of a donated array has this effect too"
        )
    return outputs


def _check_promised(text: str, donated: Sequence[jax.Array]) -> None:
    # Which of the two jax writes depends on whether it or XLA pairs inputs and outputs.
    promised = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    if promised < len(donated):
        raise AssertionError(
            f"{promised} of {len(donated)} donated arrays can become an output; donated were "
            f"{_describe(donated)}: return an array of the same shape and dtype for each"
        )


def _check_memory(memory: Any, donated: Sequence[jax.Array], max_temp_bytes: int | None) -> None:
    sizes = [leaf.addressable_shards[0].data.nbytes for leaf in donated]  # of one device
    if memory.alias_size_in_bytes < sum(sizes):
        raise AssertionError(
            f"{memory.alias_size_in_bytes:,} of {sum(sizes):,} donated bytes are reused; the rest "
            "is copied"
        )
    bound = (max(sizes) - 1) // 2 if max_temp_bytes is None else max_temp_bytes
    if memory.temp_size_in_bytes > bound:
        raise AssertionError(
            f"the program needs {memory.temp_size_in_bytes:,} bytes of temporary memory and may "
            f"take {bound:,}: something donated is copied on the way"
        )


def _pointers(array: Any) -> tuple[int, ...]:
    """Returns the address of each part of a jax array; nothing for anything else."""
    if not isinstance(array, jax.Array):
        return ()
    return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)


def _describe(arrays: Sequence[jax.Array]) -> str:
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)


def assert_same_bytes(got: PyTree, expected: PyTree) -> None:
    """Fails unless two trees agree in structure, shapes, dtypes and every byte.

    Stricter than ``chex.assert_trees_all_equal``: NaN of two payloads differ, so do 0.0 and
    -0.0. Arrays may be NumPy's or jax's.

    Raises:
      AssertionError: names the leaf that differs.
    """
    got, expected = jax.tree.map(np.asarray, (got, expected))
    chex.assert_trees_all_equal_structs(got, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_equal(*jax.tree.map(_bytes, (got, expected)))


def _bytes(array: np.ndarray) -> np.ndarray:
    """uint8[*shape, itemsize]."""
    if array.dtype == object:
        raise TypeError(f"a leaf is a {type(array.item()).__name__}, not an array; pass its arrays")
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    return contiguous[..., None].view(np.uint8)


@contextlib.contextmanager
def assert_unchanged(tree: PyTree) -> Generator[None]:
    """Wraps code that must leave the arrays of a tree alone: same bytes, not donated.

    ::

        with assert_unchanged(cache):
            new = append_block_ids(cache, entries)

    Raises:
      AssertionError: an array was written, deleted or donated.
    """
    before = jax.tree.map(np.array, tree)
    yield
    gone = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and leaf.is_deleted()
    ]
    if gone:
        raise AssertionError(f"deleted or donated: {', '.join(gone)}")
    assert_same_bytes(tree, before)
