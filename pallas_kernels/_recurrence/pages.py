"""Pages of recurrent states, and where they lie in memory."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int32, Shaped

from pallas_kernels._bitcast import as_elements
from pallas_kernels._in_place import read_extents, write_extents


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

    data: Shaped[Array, "extents elements"]
    dtype: DTypeLike
    shape: tuple[int, ...]
    num_pages: int
    first: Int32[Array, ""] | int = 0
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

    def typed(self) -> Self:
        """Returns the same pages with ``data`` in their dtype: without a copy on GPUs."""
        width = self.extent_bytes // self.itemsize
        return self._replace(data=as_elements(self.data, self.dtype, (-1, width)))

    def are_beside(self, other: "StatePages") -> bool:
        """Returns whether other arrays lie in the extents of the same pages."""
        first, others = self.first, other.first
        same = first is others or (
            isinstance(first, int) and isinstance(others, int) and first == others
        )
        form = self.num_pages, self.page_step
        return same and self.data is other.data and form == (other.num_pages, other.page_step)

    def contains(self, ids: Array) -> Array:
        """Returns which ids are in range."""
        return (ids >= 0) & (ids < self.num_pages)

    def read(self, ids: Array) -> Array:
        """Reads the arrays of pages int32[...]: [..., *shape], zeros for ids out of range."""
        unit = self.data.dtype.itemsize
        columns = slice(self.start // unit, (self.start + self.num_bytes) // unit)
        data = read_extents(self.data, self._extents(ids), columns)
        return as_elements(data, self.dtype, (*ids.shape, *self.shape))

    def write(self, ids: Array, arrays: Array) -> Array:
        """Returns ``data`` with [N, *shape] written to pages int32[N]; bad ids write nothing."""
        data = lax.bitcast_convert_type(arrays.astype(self.dtype), self.data.dtype)
        unit = self.data.dtype.itemsize
        rows = data.reshape(ids.size, self.num_bytes // unit)
        return write_extents(self.data, self._extents(ids), self.start // unit, rows)

    def _extents(self, ids: Array) -> Array:
        """Returns the extents of pages; -1 for ids out of range."""
        return jnp.where(self.contains(ids), self.first + ids * self.page_step, -1)
