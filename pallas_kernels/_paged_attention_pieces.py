"""The pieces that the Mosaic kernels of `paged_attention` share: operands, pages and masks."""

import math
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._paged_attention_limits import GRANULE
from pallas_kernels._paged_attention_tiles import AttentionRule

LOG2E = math.log2(math.e)
# Interpret mode knows no wgmma with an operand in registers, and no wgmma that adds to what is
# there: with False, operands go through shared memory, and sums are made apart.
OPERANDS_IN_REGISTERS = True


def tiled(shape: tuple[int, ...], dtype: Any, align: int = 0) -> Any:
    """Returns shared memory in the layout that wgmma and the copy engine want.

    Args:
      align: elements that the columns to use begin at multiples of; 0: the last axis.
    """
    item = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, (align or shape[-1]) * item)
    transforms = plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def store(ref: Any, value: Array) -> None:
    """Stores what is too little, or too oddly laid out, for a store of whole cache lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11 stores all as it comes
        ref[...] = value


def multiply(left: Any, right: Any) -> Array:
    """Returns a product of matrices in float32, by wgmma."""

    def run(product: Any) -> Array:
        plgpu.wgmma(product, left, right)
        return product[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


class Steps(NamedTuple):
    """Steps of so many keys of a request, and the granules of pages that make them up.

    size: keys of a step. num_pages: of the pool. width: of the block tables.
    page_rows, head_rows: from a page and from a head to the next. Without the latter, heads lie
      side by side, at multiples of ``head_columns``.
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
        """Returns the tokens that one copy brings: they lie in one page."""
        return math.gcd(self.page_tokens, self.size)

    @property
    def granules(self) -> int:
        return self.size // self.granule

    def locate(
        self, tables: Any, request: Array, step: Array, first_row: Array
    ) -> tuple[list[Array], Array]:
        """Returns the rows where the granules of a step begin, and a bit for each hole.

        What lies past the tables or is a hole is read from some page, and must be masked.

        Args:
          first_row: of the head in the first page.
        """
        per_page = self.page_tokens // self.granule
        places: list[Array] = []
        holes = jnp.int32(0)
        for j in range(self.granules):
            index = step * self.granules + j
            column = jnp.minimum(lax.div(index, per_page), self.width - 1)
            page = tables[request, column]
            held = (page >= 0) & (page < self.num_pages)
            inner = lax.rem(index, per_page) * self.granule
            place = first_row + jnp.where(held, page, 0) * self.page_rows + inner
            places.append(pl.multiple_of(place, GRANULE))
            holes |= jnp.where(held, 0, 1 << j)
        return places, holes

    def head(self, first_row: Any, head: Array) -> tuple[Array, Array | int]:
        """Returns the first row of a head in the first page, and its first column."""
        return first_row[0] + head * self.head_rows, head * self.head_columns

    def held(self, place: Array, holes: Array) -> Array:
        """Returns whether the keys at some places of a step lie in pages."""
        bit = lax.div(place, self.granule)
        return ((lax.broadcast(holes, place.shape) >> bit) & 1) == 0


class Bounds(Protocol):
    """The numbers of a tile that say which keys its queries see."""

    @property
    def end(self) -> Array: ...
    @property
    def chunk_offset(self) -> Array: ...
    @property
    def rank(self) -> Array: ...


def sees(rule: AttentionRule, tile: Bounds, queries: Array, keys: Array) -> Array:
    """Returns whether queries see keys, by their positions."""
    seen = keys < tile.end
    if rule.causal:
        seen &= keys < rule.held_before(queries + 1, tile.rank)
    if rule.window is not None:
        seen &= keys > queries - rule.window
    if rule.chunk is not None:
        seen &= keys >= queries - lax.rem(queries + tile.chunk_offset, rule.chunk)
    return seen


def cap(rule: AttentionRule, products: Array, scale: Array) -> tuple[Array, Array | float]:
    """Returns scores, and what to multiply them by to make them powers of two."""
    if rule.soft_cap is None:
        return products, scale * LOG2E
    # tanh by exp2, because the approximate one is off by 1 in 2,000.
    grown = jnp.exp2(products * (scale * (2 * LOG2E / rule.soft_cap)))
    return 1.0 - 2.0 / (grown + 1.0), rule.soft_cap * LOG2E


def zero_unseen(
    source: Any, target: Any, steps: Steps, holes: Array, key: Array, seen: tuple[Array, Array]
) -> None:
    """Copies 64 rows of values to a buffer, with zeros where no query sees them.

    They may be NaN there, and 0 * NaN is NaN.

    Args:
      key: position of the first row; it begins a step, or is a multiple of 64 within it.
      seen: the first position that a query sees, and the one past the last.
    """
    begin, end = seen
    values = plgpu.layout_cast(source[...].astype(target.dtype), plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    keys = row + key
    known = steps.held(row + lax.rem(key, steps.size), holes)
    known &= (keys >= begin) & (keys < end)
    target[...] = jnp.where(known, values, jnp.zeros_like(values))
