"""A step of decoding: 64 keys of a request, added to the softmax of its queries."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Float32

from pallas_kernels import _instructions as instructions
from pallas_kernels import _mosaic
from pallas_kernels._mosaic import (
    Ref,
    add_by_mma,
    full_like,
    sync_warps,
    widen,
    widen_finite,
    widen_halves,
    widen_halves_to_bf16,
)
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import add_product, multiply
from pallas_kernels._paged_attention.copies import copies_of
from pallas_kernels._paged_attention.decode_block import COLUMNS, DecodeOperands, DecodeScratch
from pallas_kernels._paged_attention.decode_shape import SCALES, WARPS, DecodeShape
from pallas_kernels._paged_attention.pairs_of_warps import multiply_in_pairs
from pallas_kernels._paged_attention.rule import MAX_PART, PART
from pallas_kernels._paged_attention.tasks import STEP, Tile
from pallas_kernels._paged_attention.token_heads import SCALE_BYTES

NARROW = plgpu.Layout.WGMMA_8BIT
HEADS = SCALES // 2  # whose scales are copied together
MAX_LOADED = 256 * 8  # elements of queries that are loaded at once: registers are short


class WarpSums(NamedTuple):
    """Parts that only a running softmax of warps has; see `WarpSteps`.

    weights: the sum of the weights, in each row.
    products: those of the queries with what encodings add to keys.
    """

    weights: Float32[Array, "values columns"]
    products: Float32[Array, "keys columns"]


class RunningSoftmax(NamedTuple):
    """A running softmax. ``total`` is per key and column, and summed at the end."""

    out: list[Float32[Array, "values columns"]]  # for each part of the values
    highest: Float32[Array, " columns"]
    total: Float32[Array, "keys columns"]
    of_warps: WarpSums | None = None


class Step(NamedTuple):
    """A step: its tile, its number, its stage, a bit for each hole, and whether it is the last
    or almost the last: fewer steps than stages follow.
    """

    tile: Tile
    step: Array
    stage: Array
    holes: Array
    is_last: Array


def over_keys(operation: Literal["max", "add"], array: Array, reduced: Ref) -> Array:
    """Returns the sum or maximum of each column, [keys, columns].

    Args:
      reduced: float32[warps * columns], where warps exchange all columns at one barrier; the caller
        has another one between maxima. None: Mosaic's memory, which is there once for all
        warpgroups, and takes 8 columns at a time.
    """
    if reduced is None or not _mosaic.OPERANDS_IN_REGISTERS:
        return array.max(axis=0) if operation == "max" else array.sum(axis=0)
    (keys, columns), is_max = array.shape, operation == "max"
    result = instructions.struct((columns,), jnp.float32, COLUMNS)
    combine = arith.maximumf if is_max else arith.addf

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)
    def reduce(_: Any, given: Any, scratch: Any) -> Any:
        lane, warp = instructions.mask(utils.thread_idx(), 3), utils.warp_idx(sync=False)
        warp = instructions.mask(warp, WARPS - 1)  # of the warpgroup
        base, pair = utils.memref_ptr(scratch), ir.VectorType.get((2,), ir.F32Type.get())

        def place(warp: Any, block: int) -> Any:
            index = arith.addi(arith.muli(warp, instructions.word(columns // 2)), lane)
            index = arith.addi(index, instructions.word(4 * block))
            return utils.getelementptr(base, [index], pair)

        if not is_max:
            utils.warpgroup_barrier()
        for block, registers in enumerate(given.registers.reshape(-1, keys // 32)):
            found = functools.reduce(combine, registers)
            numbers = [instructions.extract(found, i) for i in range(2)]
            for distance in (4, 8, 16):
                numbers = [combine(one, utils.shfl_bfly(one, distance)) for one in numbers]
            llvm.store(instructions.pack(numbers), place(warp, block))
        utils.warpgroup_barrier()
        found = []
        for block in range(columns // 8):
            of_warps = [llvm.load(pair, place(instructions.word(i), block)) for i in range(WARPS)]
            found.append(functools.reduce(combine, of_warps))
        if not is_max:
            utils.warpgroup_barrier()
        return instructions.as_fragments(found, result.shape, jnp.float32, COLUMNS)

    return reduce(array, reduced)


class DecodeSteps:
    """Loads and computes steps, in one thread block."""

    def __init__(
        self, shape: DecodeShape, operands: DecodeOperands, scratch: DecodeScratch[Ref]
    ) -> None:
        self.shape, self.config, self.steps = shape, shape.config, shape.steps
        self.operands, self.smem, self.copies = operands, scratch, copies_of(shape)
        self.head, self.worker = lax.axis_index("head"), lax.axis_index("worker")
        self.query, self.weights, self.reduced = scratch.query, scratch.weights, scratch.reduced
        self.warpgroup: Array | int = 0
        if shape.warpgroups > 1:
            self.warpgroup = lax.axis_index("warpgroup")
            self.head = self.head * shape.warpgroups + self.warpgroup
            self.query, self.weights, self.reduced = [
                part.at[self.warpgroup] for part in (self.query, self.weights, self.reduced)
            ]
        self.first_row, column = self.steps.head(operands.first_row[0], self.head)
        self.columns = pl.ds(column, shape.width)

    def _start(self) -> RunningSoftmax:
        rows, columns = plgpu.Layout.WGMMA, self.shape.rows
        return RunningSoftmax(
            [
                plgpu.layout_cast(jnp.zeros((width, columns), jnp.float32), rows)
                for _, width in self.config.value_parts
            ],
            plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((STEP, columns), jnp.float32), rows),
        )

    def _locate(self, tile: Tile, step: Array) -> tuple[list[Array], Array]:
        """Returns the rows of a step, as `_fetch` takes them, and a bit for each hole."""
        found = self.steps.find(self.operands.tables, tile.request, step)
        return self.steps.rows(found, self.first_row), self.steps.holes(found)

    def _fetch(self, granule_rows: list[Array], stage: Array | int) -> None:
        """Starts loading the keys and values of a step."""
        n, by_heads, scales = self.steps.granule, self.config.token_head_row, self.operands.scales
        for j, row in enumerate(granule_rows):
            source = self.operands.pages.at[pl.ds(row, n), self.columns]
            target = self.smem.loaded.at[stage, pl.ds(j * n, n)]
            self.copies.start(source, target, self.smem.loaded_full, stage)
            if by_heads is not None and scales is not None:
                first = by_heads.first_scale // SCALE_BYTES
                pair = pl.ds(first + SCALES * lax.div(self.head, HEADS), SCALES)
                source = scales.at[pl.ds(row, n), pair]
                target = self.smem.scales.at[stage, pl.ds(j * n, n)]
                self.copies.start(source, target, self.smem.loaded_full, stage)

    def _free(self, stage: Array) -> None:
        """Tells that a warpgroup has used a stage; the one that loads waits for the other one."""
        if self.smem.loaded_free is not None:
            plgpu.barrier_arrive(self.smem.loaded_free.at[stage])
            wait = functools.partial(plgpu.barrier_wait, self.smem.loaded_free.at[stage])
            pl.when(self.warpgroup == 0)(wait)

    def _refill(self, follows: Array, granule_rows: list[Array], stage: Array) -> None:
        """Starts loading a step, if one follows, by one of the warpgroups."""
        if self.shape.warpgroups > 1:
            follows &= self.warpgroup == 0
        pl.when(follows)(lambda: self._fetch(granule_rows, stage))

    def _step(
        self, here: Step, scale: Array, running: RunningSoftmax, refill: Callable[[], None]
    ) -> RunningSoftmax:
        """Adds the 64 keys in a stage to a running softmax, and calls for others in their place."""
        shape, stage = (STEP, self.shape.rows), here.stage
        self._wait(stage, here.is_last)
        products, value_scales = self._multiply_keys(stage), None
        if self.config.token_head_row is not None:
            key_scales, value_scales = self._load_scales(stage)
            products = products * lax.broadcast_in_dim(key_scales, shape, [0])
        scores, factor = common.cap(self.config, products, scale)
        seen = self._seen(here, shape)
        scores = lax.select(seen, scores * factor, full_like(scores, -jnp.inf))
        highest = lax.max(running.highest, over_keys("max", scores, self.reduced))
        finite = common.finite_or_zero(highest)
        shrink = jnp.exp2(running.highest - finite)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(finite, shape, [1]))
        total = running.total * lax.broadcast_in_dim(shrink, shape, [1]) + weights
        if value_scales is not None:  # NaN of tokens that no query sees
            weights = weights * lax.broadcast_in_dim(value_scales, shape, [0])
            weights = lax.select(seen, weights, full_like(weights, 0))
        self.copies.store_weights(self.weights.T, weights.astype(self.shape.value_compute))
        self._clean_values(here)
        self._commit()
        out = self._add_values(running.out, shrink, stage)
        refill()
        return RunningSoftmax(out, highest, total)

    def _wait(self, stage: Array, is_last: Array) -> None:
        self.copies.wait(self.smem.loaded_full, stage, is_last)

    def _commit(self) -> None:
        """Lets all warps read what others stored."""
        if self.shape.has_own_barriers:
            sync_warps()
        else:
            self.copies.commit()

    def _values(self, stage: Array) -> Ref:
        """Returns the values of a step as they were loaded."""
        return self.smem.loaded.at[stage, :, pl.ds(*self.config.stored_value)]

    def _merge(self, running: RunningSoftmax) -> RunningSoftmax:
        """Returns the softmax of all warps, but for its totals."""
        return running

    def _multiply_keys(self, stage: Array) -> Array:
        """Returns the products of a step's keys and the queries, [STEP, columns]."""
        width = self.config.stored_widths[0]
        keys = self.smem.loaded.at[stage, :, pl.ds(0, width)]
        if self.shape.by_wgmma:
            return multiply(keys, self.query.T)
        if self.shape.by_pairs and _mosaic.OPERANDS_IN_REGISTERS:
            return multiply_in_pairs(keys, self.query, self.weights)
        zeros = jnp.zeros((STEP, self.shape.rows), jnp.float32)
        products = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        left = plgpu.Layout.MMA_LHS(self.shape.compute)
        if self.shape.is_4_bit:
            lower, upper = widen_halves(plgpu.load(keys, layout=left, optimized=False))
            query = self.query.at[:, pl.ds(width, width)]
            products = add_by_mma(products, upper, query.T) * (1 / 16)
            return add_by_mma(products, lower, self.query.at[:, pl.ds(0, width)].T)
        together = width
        if width * self.shape.rows > MAX_LOADED:
            tile = self.shape.swizzle // self.shape.page.itemsize
            together = max(math.gcd(width, 64), tile)
        for first in range(0, width, together):
            columns = pl.ds(first, together)
            part = keys.at[:, columns]
            if self.shape.widens:
                loaded = plgpu.load(part, layout=left, optimized=False)
                part = widen(loaded, self.shape.compute)
            products = add_by_mma(products, part, self.query.at[:, columns].T)
        return products

    def _load_scales(self, stage: Array) -> tuple[Array, Array]:
        """Returns the scales of the keys and of the values of a step, float32[STEP]."""
        loaded = plgpu.load(self.smem.scales.at[stage], layout=common.FOURS, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 1, layout=common.FOURS)
        column -= 2 * lax.rem(self.head, HEADS)
        found = [lax.select(column == i, loaded, full_like(loaded, 0)) for i in range(2)]
        rows = plgpu.Layout.WGMMA.reduce(1)
        key_scales, value_scales = [plgpu.layout_cast(own.sum(axis=1), rows) for own in found]
        return key_scales, value_scales

    def _add_values(self, before: list[Array], shrink: Array, stage: Array) -> list[Array]:
        """Returns the sums of values, shrunk, plus the values of a step times their weights."""
        values = self._values(stage) if self.smem.widened is None else self.smem.widened
        by_wgmma, weights = self.shape.by_wgmma, self.weights.T
        if not by_wgmma:  # once for all parts
            weights = plgpu.load(weights, layout=plgpu.Layout.MMA_RHS(self.shape.value_compute))
        if self.shape.by_pairs:  # which exchange sums in the memory of weights
            sync_warps()
        out: list[Array] = []
        for (first, width), sums in zip(self.config.value_parts, before, strict=True):
            part = values.at[:, pl.ds(first, width)].T
            sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [1])
            add = add_product if by_wgmma else add_by_mma
            out.append(add(sums, part, weights))
        return out

    def _seen(self, here: Step, shape: tuple[int, int]) -> Array:
        """Returns bool[STEP, columns]: which keys of a step each query sees."""
        tile = here.tile
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        queries = lax.div(column, self.config.group) + tile.position
        seen = common.sees(self.config, tile, queries, key + here.step * STEP)
        return seen & self._is_allocated(here, key)

    def _is_allocated(self, here: Step, key: Array) -> Array:
        """Returns whether the keys at these indices of a step are in no hole."""
        return self.steps.is_allocated(key, here.holes)

    def _clean_values(self, here: Step) -> None:
        """Writes a step's values in 16 bits, with zeros where no query sees them.

        With scales no element becomes NaN, and the weights of those that are not seen are 0.
        """
        tile, step, stage, holes, _ = here
        values = self._values(stage)
        clean = values if self.smem.widened is None else self.smem.widened
        if self.config.token_head_row is not None:
            width = self.config.stored_widths[1]
            for i, part in enumerate(self._widen_values(plgpu.load(values, layout=NARROW))):
                clean.at[:, pl.ds(i * width, width)][...] = part
            return
        key = step * STEP
        partial = (key < tile.begin) | (key + STEP > tile.end) | (holes != 0)

        @pl.when(partial)
        def _() -> None:
            width = PART if self.config.value_width > MAX_PART else self.config.value_width
            for first in range(0, self.config.value_width, width):  # registers are short
                source, target = [ref.at[:, pl.ds(first, width)] for ref in (values, clean)]
                seen = tile.begin, tile.end
                common.zero_unseen(source, target, self.steps, holes, key, seen)
            if self.shape.has_own_barriers:
                plgpu.commit_smem()  # before copies that follow

        if self.smem.widened is not None:

            @pl.when(~partial)
            def _() -> None:
                loaded = plgpu.load(values, layout=NARROW)
                clean[...] = widen(loaded, self.shape.compute)

    def _widen_values(self, loaded: Array) -> Sequence[Array]:
        """Returns elements that have scales in bfloat16; of bytes of two first the lower ones."""
        if self.shape.is_4_bit:
            return widen_halves_to_bf16(loaded)
        is_int = self.shape.page == jnp.int8
        return [widen(loaded, jnp.bfloat16) if is_int else widen_finite(loaded)]
