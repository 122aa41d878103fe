"""Pages of recurrent states, and where they lie in memory."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels._reads import read_extents


class StatePages(NamedTuple):
    """One array of each state, in pages among other bytes: padding, other arrays, other layers.

    The array of page p lies in extent ``first + p * page_step``, a row of ``data``, from byte
    ``start`` on. Only ``data`` and ``first`` may be traced.

    data: [extents, elements] of ``dtype``; or uint8[extents, bytes], which is better on backends
      where XLA would copy a whole pool to convert it.
    dtype: dtype of the array.
    shape: shape of the array of one page.
    num_pages: number of pages.
    first: extent of the first page.
    page_step: extents from one page to the next.
    start: bytes of an extent before the array.
    """

    data: Array
    dtype: DTypeLike
    shape: tuple[int, ...]
    num_pages: int
    first: Array | int = 0
    page_step: int = 1
    start: int = 0

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the array of one page."""
        return math.prod(self.shape) * self.itemsize

    @property
    def extent_bytes(self) -> int:
        return self.data.shape[1] * self.data.dtype.itemsize

    def as_elements(self) -> Self:
        """Returns the same pages with ``data`` in their dtype: without a copy on GPUs."""
        width = self.extent_bytes // self.itemsize
        return self._replace(data=as_rows(self.data, self.dtype, width))

    def knows(self, ids: Array) -> Array:
        """Returns which ids are those of pages."""
        return (ids >= 0) & (ids < self.num_pages)

    def read(self, ids: Array) -> Array:
        """Reads the arrays of pages int32[...]: [..., *shape], zeros for ids out of range."""
        extents = jnp.where(self.knows(ids), self.first + ids * self.page_step, -1)
        unit = self.data.dtype.itemsize
        columns = slice(self.start // unit, (self.start + self.num_bytes) // unit)
        data = read_extents(self.data, extents, columns)
        return self._as_elements(data, (*ids.shape, *self.shape))

    def write(self, ids: Array, arrays: Array) -> Array:
        """Returns ``data`` with [N, *shape] written to pages int32[N]; bad ids write nothing."""
        known = self.knows(ids)
        beyond = self.data.shape[0] + jnp.arange(ids.size, dtype=jnp.int32)  # unique, and dropped
        extents = jnp.where(known, self.first + ids * self.page_step, beyond)
        data = lax.bitcast_convert_type(arrays.astype(self.dtype), self.data.dtype)
        unit = self.data.dtype.itemsize
        offsets = jnp.full_like(extents, self.start // unit)
        return lax.scatter(
            self.data,
            jnp.stack([extents, offsets], axis=-1),
            data.reshape(ids.size, self.num_bytes // unit),
            lax.ScatterDimensionNumbers(
                update_window_dims=(1,),
                inserted_window_dims=(0,),
                scatter_dims_to_operand_dims=(0, 1),
            ),
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )

    def _as_elements(self, data: Array, shape: tuple[int, ...]) -> Array:
        if data.dtype == self.dtype:
            return data.reshape(shape)
        return lax.bitcast_convert_type(data.reshape(*shape, self.itemsize), jnp.dtype(self.dtype))


def as_rows(data: Array, dtype: DTypeLike, width: int) -> Array:
    """Returns ``data`` as rows of elements of a wider dtype, or its own, without a copy on GPUs."""
    dtype, size = jnp.dtype(dtype), jnp.dtype(dtype).itemsize // data.dtype.itemsize
    if data.dtype == dtype:
        return data.reshape(-1, width)
    return lax.bitcast_convert_type(data.reshape(-1, width, size), dtype)


def from_rows(rows: Array, like: Array) -> Array:
    """Undoes `as_rows`."""
    if rows.dtype == like.dtype:
        return rows.reshape(like.shape)
    return lax.bitcast_convert_type(rows, like.dtype).reshape(like.shape)
