"""Copies of arrays to page-locked host memory and back, in chunks."""

import collections
import contextlib
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jaxkv._src.internal.allocation import HOST_MEMORY, zeros


class ArrayTemplate(NamedTuple):
    """The properties that tell arrays apart for `jit`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    committed: bool  # to its devices; `jit` compiles one program for each case

    @classmethod
    def from_array(cls, array: Array) -> "ArrayTemplate":
        return cls(array.shape, array.dtype, array.sharding, array.committed)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def zeros(self) -> Array:
        with self.as_default():
            (array,) = zeros((self.shape,), self.dtype, self.sharding if self.committed else None)
            return array

    def put(self, chunk: Array) -> Array:
        """Copies a part of the array from the host to the devices of the array."""
        if self.committed:
            return jax.device_put(chunk, self.sharding)
        # A copy of jax's own host array would be committed. NumPy shares its bytes.
        with self.as_default():
            return jax.device_put(np.asarray(chunk), may_alias=False)

    def as_default(self) -> contextlib.AbstractContextManager[object]:
        """Makes the array's device the default, to which uncommitted arrays go."""
        if self.committed:
            return contextlib.nullcontext()
        return jax.default_device(next(iter(self.sharding.device_set)))


class HostCopy(NamedTuple):
    """A copy of an array on the host, in chunks along one axis; without chunks: zeros."""

    template: ArrayTemplate
    axis: int
    chunks: tuple[Array, ...]

    @classmethod
    def without_content(cls, array: Array) -> "HostCopy":
        return cls(ArrayTemplate.from_array(array), 0, ())


def to_host(arrays: Sequence[Array], chunk_bytes: int) -> list[HostCopy]:
    """Copies arrays to the host, and waits for the copies; does not delete the arrays.

    Arrays larger than a chunk take the device memory of two chunks in addition.
    """
    copies: list[HostCopy] = []
    made: list[Array] = []
    cut: list[Array] = []
    pending: collections.deque[Array] = collections.deque()
    try:
        for array in arrays:
            axis, bounds = _cut(array, chunk_bytes)
            host = array.sharding.with_memory_kind(HOST_MEMORY)
            start_of_array = len(made)
            for start, size in bounds:
                _wait_for_room(pending)
                cut = [] if len(bounds) == 1 else [_take(array, _index(start), size, axis)]
                made.append(jax.device_put(cut[0] if cut else array, host))
                pending.append(made[-1])
            copies.append(
                HostCopy(ArrayTemplate.from_array(array), axis, tuple(made[start_of_array:]))
            )
        jax.block_until_ready(made)
    except BaseException:
        _delete([*made, *cut])  # a traceback would keep them alive
        raise
    return copies


def to_device(copies: Sequence[HostCopy]) -> list[Array]:
    """Copies arrays back to their devices, and waits for them; does not delete the copies."""
    arrays: list[Array] = []
    pending: collections.deque[Array] = collections.deque()
    try:
        for copy in copies:
            arrays.append(_restored(copy, pending))
        return jax.block_until_ready(arrays)
    except BaseException:
        _delete([*arrays, *pending])
        raise


def _restored(copy: HostCopy, pending: collections.deque[Array]) -> Array:
    """Restores one array. ``pending`` holds chunks in flight, of this array and earlier ones."""
    template, axis, chunks = copy
    if len(chunks) == 1:
        return template.put(chunks[0])
    array = template.zeros()
    start = 0
    try:
        for chunk in chunks:
            _wait_for_room(pending)
            pending.append(template.put(chunk))
            with template.as_default():
                array = _insert(array, pending[-1], _index(start), axis)
            start += chunk.shape[axis]
        return array
    except BaseException:
        array.delete()
        raise


def _delete(arrays: Sequence[Array]) -> None:
    for array in arrays:
        array.delete()


def _index(start: int) -> Array:
    """Returns an index on the device; explicitly, because of transfer guards."""
    return jax.device_put(np.int32(start))


def _wait_for_room(pending: collections.deque[Array]) -> None:
    """Waits until fewer than two transfers are in flight: two keep the bus busy."""
    while len(pending) > 1:
        pending.popleft().block_until_ready()


def _cut(array: Array, chunk_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns an axis that is not sharded, and (start, size) of the chunks along it."""
    shard = array.sharding.shard_shape(array.shape)
    num_bytes = math.prod(shard) * array.dtype.itemsize
    whole = [axis for axis, size in enumerate(array.shape) if shard[axis] == size]
    if num_bytes <= chunk_bytes or not whole:
        return 0, [(0, array.shape[0] if array.ndim else 1)]
    axis = max(whole, key=lambda axis: array.shape[axis])
    length = array.shape[axis]
    step = max(1, chunk_bytes * length // num_bytes)
    return axis, [(start, min(step, length - start)) for start in range(0, length, step)]


@functools.partial(jax.jit, static_argnames=("size", "axis"))
def _take(array: Array, start: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(array, start, size, axis)


@functools.partial(jax.jit, static_argnames="axis", donate_argnames="array")
def _insert(array: Array, chunk: Array, start: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(array, chunk, start, axis)
