"""A step of decoding in which each warp attends to 16 of 64 keys, and waits for no other warp.

Keys and values have a scale for each token and head, and go from bytes in shared memory through
registers into mma. Maxima, weights and sums are those of a warp, though arrays here look like
those of all; they are merged when a part of a tile ends.
"""

from collections.abc import Callable
from typing import cast, override

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._fragments import (
    Encoding,
    as_keys,
    as_values,
    encodings,
    highest_of_warps,
    merge_warps,
    turn_in_warps,
    warps,
)
from pallas_kernels._mosaic import Ref, add_by_mma, full_like
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import LOG2E
from pallas_kernels._paged_attention.decode_block import COLUMNS
from pallas_kernels._paged_attention.decode_steps import DecodeSteps, RunningSoftmax, Step, WarpSums
from pallas_kernels._paged_attention.tasks import STEP
from pallas_kernels._warp_rows import (
    GROUP,
    commit_copies,
    copy_rows,
    load_scales,
    load_words,
    wait_for_copies,
)

LEAST_SCALE = 2.0**-110  # of values; below that of any magnitude that is stored


class WarpSteps(DecodeSteps):
    """Computes steps, with keys for each warp.

    Weights are multiplied by the scales of their values, and ``highest`` includes these, because
    float16 would not hold all scales.
    """

    @override
    def _start(self) -> RunningSoftmax:
        parts, columns = self.config.value_width // GROUP, self.shape.rows
        zeros = _zeros(warps() * GROUP, columns)
        lowest = plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), COLUMNS)
        products = _zeros(STEP, columns)
        for (factor, bias), query in self._query_parts():
            if bias:
                added = _splat((STEP, GROUP), -factor * bias)
                products = add_by_mma(products, added, query)
        return RunningSoftmax(
            [zeros] * parts, lowest, _zeros(STEP, columns), WarpSums(zeros, products)
        )

    @override
    def _step(
        self, here: Step, scale: Array, running: RunningSoftmax, refill: Callable[[], None]
    ) -> RunningSoftmax:
        shape, stage = (STEP, self.shape.rows), here.stage
        own = _own(running)
        if _mosaic.OPERANDS_IN_REGISTERS:
            wait_for_copies(self.shape.stages - 1)
        else:
            self.copies.wait(self.smem.loaded_full, stage, here.is_last)
        key_width, value_width = self.config.stored_widths
        key_scales, value_scales = load_scales(self.smem.scales.at[stage], self.head)
        key_scales = key_scales * (1 / self._encodings(values=False)[0].factor)
        keys = self._load(stage, 0, key_width, transposed=False)
        products = self._multiply_words(keys, own.products)
        values = self._load(stage, key_width, value_width, transposed=True)
        refill()
        products = products * lax.broadcast_in_dim(key_scales, shape, [0])
        scores, factor = common.cap(self.config, products, scale)
        seen = self._seen(here, shape)
        scores = scores * factor
        added = jnp.log(lax.max(value_scales, full_like(value_scales, LEAST_SCALE))) * LOG2E
        scaled = scores + lax.broadcast_in_dim(added, shape, [0])
        scores, scaled = [
            lax.select(seen, given, full_like(given, -jnp.inf)) for given in (scores, scaled)
        ]
        highest = lax.max(running.highest, highest_of_warps(scaled))
        finite = common.finite_or_zero(highest)
        shrink = jnp.exp2(running.highest - finite)
        finite = lax.broadcast_in_dim(finite, shape, [1])
        total = running.total * lax.broadcast_in_dim(shrink, shape, [1]) + jnp.exp2(scores - finite)
        right = turn_in_warps(jnp.exp2(scaled - finite).astype(jnp.float16))
        shrunk = lax.broadcast_in_dim(shrink, own.weights.shape, [1])
        ones = _splat((warps() * GROUP, STEP // warps()), 1.0)
        weights = add_by_mma(own.weights * shrunk, ones, right)
        out: list[Array] = []
        for sums, left in zip(running.out, self._widen_words(values), strict=True):
            out.append(add_by_mma(sums * shrunk, left, right))
        return RunningSoftmax(out, highest, total, own._replace(weights=weights))

    def _encodings(self, *, values: bool) -> list[Encoding]:
        return encodings(self.shape.page, self.shape.is_4_bit, values=values)

    def _query_parts(self) -> list[tuple[Encoding, Ref]]:
        """Returns the queries, `GROUP` columns each, and the encoding of keys there."""
        kinds, width = self._encodings(values=False), self.config.key_width
        return [
            (kinds[first * len(kinds) // width], self.query.at[:, first : first + GROUP].T)
            for first in range(0, width, GROUP)
        ]

    @override
    def _refill(self, follows: Array, granule_rows: list[Array], stage: Array) -> None:
        super()._refill(follows, granule_rows, stage)
        if _mosaic.OPERANDS_IN_REGISTERS:
            commit_copies()

    @override
    def _fetch(self, granule_rows: list[Array], stage: Array | int) -> None:
        row = self.config.token_head_row
        if row is None or not _mosaic.OPERANDS_IN_REGISTERS:
            return super()._fetch(granule_rows, stage)
        layout = plgpu.Layout.WGMMA.reduce(1)
        key = plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=layout)
        granule = lax.div(key, self.steps.granule)
        rows = lax.broadcast(granule_rows[0], (STEP,))
        for j, first_row in enumerate(granule_rows[1:], 1):
            rows = lax.select(granule == j, lax.broadcast(first_row, (STEP,)), rows)
        rows = plgpu.layout_cast(rows + lax.rem(key, self.steps.granule), layout)
        head = plgpu.layout_cast(lax.broadcast(self.head, (STEP,)), layout)
        target, scales = self.smem.loaded.at[stage], self.smem.scales.at[stage]
        how = {"first": row.first_scale, "swizzle": self.shape.swizzle}
        copy_rows(self.operands.pages, target, scales, rows, head, **how)

    def _load(self, stage: Array, start: int, width: int, *, transposed: bool) -> list[Array]:
        """Loads some bytes of the rows of a step."""
        rows, swizzle = self.smem.loaded.at[stage], self.shape.swizzle
        return [
            load_words(rows, first, swizzle=swizzle, transposed=transposed)
            for first in range(start, start + width, GROUP)
        ]

    def _multiply_words(self, keys: list[Array], products: Array) -> Array:
        """Returns the products of a step's keys and the queries, added to others."""
        parts = [as_keys(words, self.shape.page, self.shape.is_4_bit) for words in keys]
        queries = self._query_parts()
        for i, words in enumerate(parts):
            for j, part in enumerate(words):
                products = add_by_mma(products, part, queries[i + j * len(parts)][1])
        return products

    def _widen_words(self, values: list[Array]) -> list[Array]:
        """Returns the values of a step as left operands of 32 columns each."""
        parts = [as_values(words, self.shape.page, self.shape.is_4_bit) for words in values]
        return [part for half in zip(*parts, strict=True) for part in half]

    @override
    def _merge(self, running: RunningSoftmax) -> RunningSoftmax:
        shape, weights = (STEP, self.shape.rows), _own(running).weights
        everywhere = lax.broadcast_in_dim(running.highest, shape, [1])
        highest = plgpu.layout_cast(everywhere, plgpu.Layout.WGMMA).max(axis=0)
        shrink = jnp.exp2(running.highest - common.finite_or_zero(highest))
        total = running.total * lax.broadcast_in_dim(shrink, shape, [1])
        shrunk = lax.broadcast_in_dim(shrink, weights.shape, [1])
        kinds, out = self._encodings(values=True), list[Array]()
        for i, sums in enumerate(running.out):
            factor, bias = kinds[i * len(kinds) // len(running.out)]
            decoded = sums * (1 / factor) - weights * bias if bias else sums * (1 / factor)
            out.append(decoded * shrunk)
        return RunningSoftmax([merge_warps(out, self.smem.merged)], highest, total)


def _own(running: RunningSoftmax) -> WarpSums:
    return cast(WarpSums, running.of_warps)  # those of `WarpSteps` have them


def _zeros(rows: int, columns: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def _splat(shape: tuple[int, int], value: float) -> Array:
    """Returns a left operand of one number."""
    layout = plgpu.Layout.MMA_LHS(jnp.float16)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float16), layout)
