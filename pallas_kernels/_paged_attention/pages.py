"""Pages of keys and values, and where they lie in memory."""

import math
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int32, Shaped

from pallas_kernels._arguments import as_array
from pallas_kernels._bitcast import as_elements
from pallas_kernels._in_place import read_extents


class StridedPages(NamedTuple):
    """Pages of keys and values among other bytes: padding, other layers, other heads.

    Head h of page p lies in extent ``first + p * page_step + h * head_step``, a row of ``data``. In
    that extent the page begins at byte ``start``, with one token after another, each with all
    of its heads; or one head after another, each with all of its tokens (``heads_first``). Only
    ``data`` and ``first`` may be traced.

    data: elements of ``dtype``; or bytes, uint8, which is better on backends where XLA would copy a
      whole pool to convert it.
    dtype: dtype of keys and values.
    num_pages: number of pages.
    tokens: tokens of a page.
    kv_heads: KV heads of a token.
    width: elements of one head of a token: its key, followed by its value.
    first: extent of the first head of the first page.
    page_step: extents from one page to the next.
    head_step: extents from one head to the next; 0: all heads of a page lie in one extent.
    start: bytes of an extent before the page, or the head.
    heads_first: whether the tokens of a head are adjacent; must be True with a ``head_step``.
    """

    data: Shaped[Array, "extents elements"]
    dtype: DTypeLike
    num_pages: int
    tokens: int
    kv_heads: int
    width: int
    first: Int32[Array, ""] | int = 0
    page_step: int = 1
    head_step: int = 0
    start: int = 0
    heads_first: bool = False

    @classmethod
    def from_array(cls, pages: Array, *, heads_first: bool = False) -> Self:
        """Describes an array [blocks, tokens, kv_heads, width], or with heads before tokens."""
        blocks, tokens, kv_heads, width = pages.shape
        if heads_first:
            tokens, kv_heads = kv_heads, tokens
        data = pages.reshape(blocks, math.prod(pages.shape[1:]))
        return cls(data, pages.dtype, blocks, tokens, kv_heads, width, heads_first=heads_first)

    @classmethod
    def from_rows(cls, pages: Self) -> Self:
        """Describes all rows of the data of pages of one head as pages of one token each."""
        elements = pages.row_width * pages.itemsize // pages.data.dtype.itemsize
        data = pages.data.reshape(-1, elements)
        return cls(data, pages.dtype, len(data), tokens=1, kv_heads=1, width=pages.width)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def elements(self) -> int:
        """Returns the elements of a page that lie in one extent."""
        return self.tokens * self.width * (1 if self.head_step else self.kv_heads)

    @property
    def row_width(self) -> int:
        """Returns the elements of a row: of one head, or of all adjacent heads of a token."""
        return self.width if self.heads_first else self.kv_heads * self.width

    @property
    def rows_per_extent(self) -> int:
        """Returns the rows of an extent; 0 if extents or ``start`` are not whole rows."""
        row_bytes = self.row_width * self.itemsize
        extent_bytes = self.data.shape[1] * self.data.dtype.itemsize
        fits = extent_bytes % row_bytes == 0 and self.start % row_bytes == 0
        return extent_bytes // row_bytes if fits else 0

    @property
    def page_rows(self) -> int:
        """Returns the rows from one page to the next."""
        return self.page_step * self.rows_per_extent

    @property
    def head_rows(self) -> int:
        """Returns the rows from one head to the next; 0 if a row has all heads."""
        return self.head_step * self.rows_per_extent or self.heads_first * self.tokens

    @property
    def start_row(self) -> int:
        """Returns the rows of an extent before the page, or the head."""
        return self.start // (self.row_width * self.itemsize)

    def first_row(self) -> Array:
        """Returns int32[], the row at which the first page begins."""
        return jnp.asarray(self.first * self.rows_per_extent + self.start_row, jnp.int32)

    def rows(self) -> Array:
        """Returns all rows of the data, [rows, row_width], without a copy on GPUs."""
        return as_elements(self.data, self.dtype, (-1, self.row_width))

    def rows_as(self, dtype: DTypeLike) -> Array:
        """Returns all rows, if they are bytes, as elements of another dtype."""
        return as_elements(self.data, dtype, (-1, self.row_width // jnp.dtype(dtype).itemsize))

    def read(self, ids: Array) -> Array:
        """Reads the pages int32[...]: [..., tokens, kv_heads, width]; unspecified for bad ids."""
        extents = self.first + ids[..., None] * self.page_step
        if self.head_step:
            heads = jnp.arange(self.kv_heads, dtype=jnp.int32)
            extents = extents + lax.broadcast(heads * self.head_step, ids.shape)
        unit = self.data.dtype.itemsize
        end = self.start + self.elements * self.itemsize
        columns = slice(self.start // unit, end // unit)
        data = read_extents(self.data, extents, columns)
        inner = (self.tokens, self.kv_heads, self.width)
        if self.heads_first:
            inner = (self.kv_heads, self.tokens, self.width)
        rows = as_elements(data, self.dtype, (*ids.shape, *inner))
        return jnp.swapaxes(rows, -3, -2) if self.heads_first else rows


def check_pages(pages: Array | StridedPages) -> StridedPages:
    """Checks pages, which may be given as an array, and returns them as `StridedPages`."""
    if not isinstance(pages, StridedPages):
        array = as_array("pages", pages)
        if array.ndim != 4:
            raise ValueError(
                f"pages must be [blocks, tokens, kv_heads, K + V], got shape {array.shape}"
            )
        return StridedPages.from_array(array)
    data, needed = pages.data, pages.start + pages.elements * pages.itemsize
    if data.ndim != 2 or data.dtype not in (jnp.uint8, jnp.dtype(pages.dtype)):
        raise ValueError(
            f"pages.data must be [extents, n] of uint8 or {jnp.dtype(pages.dtype)}, got "
            f"{data.dtype}{list(data.shape)}"
        )
    if needed > data.shape[1] * data.dtype.itemsize or pages.start % data.dtype.itemsize:
        raise ValueError(
            f"pages end at byte {needed} of an extent, from start={pages.start} on, and extents "
            f"have {data.shape[1]} elements of {data.dtype}; a page must lie within its extent, "
            "and start be a multiple of the element size"
        )
    if pages.head_step and not pages.heads_first:
        raise ValueError(f"pages has head_step={pages.head_step}, which needs heads_first=True")
    return pages
