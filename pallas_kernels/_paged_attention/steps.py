"""Steps over the keys of a request, and where their rows lie. Does not import Mosaic."""

import functools
import math
import operator
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from pallas_kernels._mosaic import Ref

GRANULE = 8  # rows; a copy of a page begins at a multiple of it, and has a multiple of it


class Steps(NamedTuple):
    """Steps over the keys of a request, and the granules that make up a step.

    size: keys of a step.
    page_tokens: tokens of a page.
    num_pages: pages of the pool.
    width: logical blocks of the block tables.
    page_rows, head_rows: rows from one page, and from one head, to the next. If ``head_rows`` is 0,
      all heads are in one row, at multiples of ``head_columns``.
    """

    size: int
    page_tokens: int
    num_pages: int
    width: int
    page_rows: int
    head_rows: int
    head_columns: int

    @property
    def granule(self) -> int:
        """Returns the tokens of a granule, which lie in one page and are copied at once."""
        return math.gcd(self.page_tokens, self.size)

    @property
    def granules(self) -> int:
        return self.size // self.granule

    @property
    def by_row(self) -> bool:
        """Returns whether rows are copied one by one: pages have one token."""
        return self.page_tokens == 1

    def find(self, tables: "Ref", request: Array, step: Array) -> list["Granule"]:
        """Returns the granules of a step; past the tables, of another page."""
        first = step * self.granules
        return [self._granule(tables, request, first + j) for j in range(self.granules)]

    def _granule(self, tables: "Ref", request: Array, granule: Array) -> "Granule":
        per_page, logical_block, inner = self.page_tokens // self.granule, granule, None
        if per_page > 1:
            logical_block, inner = lax.div(granule, per_page), lax.rem(granule, per_page)
        page = tables[request, lax.min(logical_block, self.width - 1)]
        return Granule(page, (page >= 0) & (page < self.num_pages), inner)

    def rows(self, found: list["Granule"], first_row: Array) -> list[Array]:
        """Returns the first row of each granule; holes are read from another page.

        Args:
          first_row: first row of the head in the first page, a multiple of `GRANULE`.
        """
        first_octet, octets = lax.div(first_row, GRANULE), self.granule // GRANULE
        rows: list[Array] = []
        for page, allocated, inner in found:
            page = lax.select(allocated, page, jnp.int32(0))
            octet = first_octet + page * (self.page_rows // GRANULE)
            octet = octet if inner is None else octet + inner * octets
            rows.append(octet * GRANULE)  # Mosaic must see that it is a multiple
        return rows

    def holes(self, found: list["Granule"]) -> Array:
        """Returns a bit for each hole, to be masked."""
        bits = [
            lax.select(granule.allocated, jnp.int32(0), jnp.int32(1 << j))
            for j, granule in enumerate(found)
        ]
        return functools.reduce(operator.or_, bits)

    def find_holes(self, tables: "Ref", request: Array, step: Array) -> Array:
        """Returns the bits of a step that is not loaded: in a loop, which takes less code."""
        first = step * self.granules

        def add(j: Array, bits: Array) -> Array:
            allocated = self._granule(tables, request, first + j).allocated
            return lax.select(allocated, bits, bits | lax.shift_left(jnp.int32(1), j))

        return lax.fori_loop(0, self.granules, add, jnp.int32(0))

    def head(self, first_row: Array, head: Array) -> tuple[Array, Array | int]:
        """Returns the first row of a head in the first page, and its first column."""
        return first_row + head * self.head_rows, head * self.head_columns

    def is_allocated(self, keys: Array, holes: Array) -> Array:
        """Returns whether the keys at these indices of a step are in no hole."""
        bit = lax.div(keys, self.granule)
        return ((lax.broadcast(holes, keys.shape) >> bit) & 1) == 0


class Granule(NamedTuple):
    """A granule of a step.

    A hole is a granule whose page has no keys.

    page: its page.
    allocated: whether the page has keys.
    inner: its number among the granules of the page; None: a page has one.
    """

    page: Array
    allocated: Array
    inner: Array | None
