"""Code that the Mosaic kernels of `paged_attention` share: operands, pages and masks."""

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import Ref, full_like, widen
from pallas_kernels._paged_attention.partial import PartialSoftmax as PartialSoftmax
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.steps import Steps

# Four numbers a row, in the threads that have the row in the layout of wgmma.
FOURS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# 32 rows, each in a quarter of a warp, whose warps have 8 columns of 32 each.
ROWS_32 = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 32), (32, 8), (8, 8), (2,))),
    warp_dims=(-6,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
LOG2E = math.log2(math.e)


def multiply(left: Array | Ref, right: Ref) -> Array:
    """Returns the product of two matrices in float32, by wgmma."""

    def run(product: Ref) -> Array:
        plgpu.wgmma(product, left, right)
        return product[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def add_product(sums: Array, left: Array | Ref, right: Ref) -> Array:
    """Returns float32 sums plus the product of two matrices, by wgmma."""
    if not _mosaic.OPERANDS_IN_REGISTERS:
        return sums + multiply(left, right)
    start: Ref = plgpu.ACC.init(sums)
    result: Ref = pl.run_state(lambda sums: plgpu.wgmma(sums, left, right))(start)
    return result


def add_up(
    parts: Sequence[PartialSoftmax[Array]], *, in_order: bool = False
) -> PartialSoftmax[Array]:
    """Returns the softmax of the keys of all parts.

    Args:
      in_order: adds one part after another, so that the bits do not depend on how many parts are
        added at once. Parts that saw no key change no bit.
    """
    if in_order and len(parts) > 2:
        return functools.reduce(lambda left, right: add_up([left, right]), parts)
    highest = parts[0].highest
    for part in parts[1:]:
        highest = lax.max(highest, part.highest)
    finite = finite_or_zero(highest)
    out, total = full_like(parts[0].out, 0), full_like(parts[0].total, 0)
    last_axes = range(out.ndim - highest.ndim, out.ndim)
    for part in parts:
        weight = jnp.exp2(part.highest - finite)
        total += part.total * weight
        out += part.out * lax.broadcast_in_dim(weight, out.shape, last_axes)
    return PartialSoftmax(out, highest, total)


def finite_or_zero(highest: Array) -> Array:
    """Replaces -inf, of what sees no key, because -inf - -inf is NaN."""
    return lax.select(highest > -jnp.inf, highest, full_like(highest, 0))


def normalize(
    highest: Array, total: Array, sinks: Array, value_scale: Array
) -> tuple[Array, Array]:
    """Returns the factors of the sums of values, and the log-sum-exp; see `PartialSoftmax`.

    Args:
      sinks: logits in base 2; -inf for none.
    """
    finite = finite_or_zero(lax.max(highest, sinks))
    shrink = jnp.exp2(highest - finite)
    total = total * shrink + jnp.exp2(sinks - finite)
    # Without a seen key, total is 0: the output is 0, and its logarithm -inf, as wanted.
    weight = shrink * value_scale / lax.select(total > 0, total, full_like(total, 1))
    return weight, jnp.log(total) + finite * (1 / LOG2E)


def add_columns(total: Array, weights: Array) -> Array:
    """Returns [rows, 8] plus the columns of [rows, n], column i to column i % 8.

    Each thread adds its own numbers, while sums of rows would need the numbers of other threads.

    Args:
      weights: n is 8 times a power of 2.
    """
    rows, width = weights.shape
    while width > 8:
        width //= 2
        left = lax.slice(weights, (0, 0), (rows, width))
        weights = left + lax.slice(weights, (0, width), (rows, 2 * width))
    return total + weights


class Bounds(Protocol):
    """The numbers of a tile that determine the keys which its queries see."""

    @property
    def end(self) -> Array: ...
    @property
    def chunk_offset(self) -> Array: ...
    @property
    def rank(self) -> Array: ...


def sees(config: Config, tile: Bounds, queries: Array, keys: Array) -> Array:
    """Returns whether queries see keys, given the positions of both."""
    seen = keys < tile.end
    if config.causal:
        seen &= keys < config.allocated_before(queries + 1, tile.rank)
    if config.sliding_window is not None:
        seen &= keys > queries - config.sliding_window
    if config.chunk_size is not None:
        seen &= keys >= queries - lax.rem(queries + tile.chunk_offset, config.chunk_size)
    return seen


def cap(config: Config, products: Array, scale: Array) -> tuple[Array, Array | float]:
    """Returns scores, and the factor that converts them to base 2."""
    if config.soft_cap is None:
        return products, scale * LOG2E
    # tanh by exp2, because the approximate tanh has errors of 1 / 2,000.
    grown = jnp.exp2(products * (scale * (2 * LOG2E / config.soft_cap)))
    return 1.0 - 2.0 / (grown + 1.0), config.soft_cap * LOG2E


def zero_unseen(
    source: Ref,
    target: Ref,
    steps: Steps,
    holes: Array,
    key: Array,
    seen: tuple[Array, Array],
) -> None:
    """Copies 64 or 32 rows of values to a buffer, with zeros for rows that no query sees.

    Values that no query sees may be NaN, and 0 * NaN is NaN.

    Args:
      key: position of the first row, a multiple of 64 from the beginning of its step, or that.
      seen: first position that a query sees, and one past the last.
    """
    begin, end = seen
    layout = plgpu.Layout.WGMMA if source.shape[0] % 64 == 0 else ROWS_32
    loaded = source[...] if layout is plgpu.Layout.WGMMA else plgpu.load(source, layout=layout)
    if loaded.dtype != target.dtype:
        loaded = widen(loaded, target.dtype)
    values = plgpu.layout_cast(loaded, layout)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
    keys = row + key
    known = steps.is_allocated(row + lax.rem(key, steps.size), holes)
    known &= (keys >= begin) & (keys < end)
    target[...] = lax.select(known, values, full_like(values, 0))
