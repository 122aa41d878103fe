"""The Mosaic GPU kernel that prefills: many queries of a request over all of its keys.

Two warpgroups with 64 queries each of one head take turns on the tensor cores, a third one loads
keys and values. Steps of keys that every query sees come without masks.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _paged_attention_pieces as pieces
from pallas_kernels._mosaic import own_buffers
from pallas_kernels._paged_attention_pieces import LOG2E, Steps, multiply, store, tiled
from pallas_kernels._paged_attention_prefill_tasks import KEYS, QUERIES, PrefillTile
from pallas_kernels._paged_attention_tiles import AttentionRule

WARPGROUPS = 2  # that compute
ROWS = QUERIES // WARPGROUPS
SLOTS = 2  # steps that are loaded ahead
UNSEEN = -1e30  # a score below all others; -inf would need care in every step
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


class PrefillShape(NamedTuple):
    """Constants of a compiled kernel."""

    rule: AttentionRule
    steps: Steps
    dtype: jnp.dtype


class PrefillArrays(NamedTuple):
    """Arrays of a call, or references to them.

    tiles: int32[N, ...], a `PrefillTile` per row. num_tiles: int32[1], how many of them count.
    scales: float32[kv_heads], of scores. sinks: float32[heads], in powers of two; -inf for none.
    """

    tiles: Any
    num_tiles: Any
    block_tables: Any
    scales: Any
    value_scale: Any
    sinks: Any


def prefill(
    shape: PrefillShape, arrays: PrefillArrays, queries: Array, pages: Array, out: Any
) -> Array:
    """Writes the output of tiles of queries into [T, heads, V].

    Returns:
      The log-sum-exp, float32[N, heads, 2, 64]; undefined for what is no query of a tile.
    """
    num_tiles, heads = arrays.tiles.shape[0], queries.shape[1]
    call = plgpu.kernel(
        lambda *refs: _Prefiller(shape, *refs).run(),
        out_type=[jax.ShapeDtypeStruct((num_tiles, heads, WARPGROUPS, ROWS), jnp.float32)],
        grid=(heads, num_tiles),
        grid_names=("head", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    flat = pages.reshape(pages.shape[0] * shape.rule.page_tokens, -1)
    with jax.enable_x64(False):
        return call(*own_buffers([*arrays, queries]), flat, out)[0]


def _scratch(shape: PrefillShape) -> list[Any]:
    rule, dtype = shape.rule, shape.dtype
    align = math.gcd(rule.key_width, rule.value_width)
    scratch = [
        tiled((WARPGROUPS, ROWS, rule.key_width), dtype),
        tiled((SLOTS, KEYS, rule.key_width), dtype, align),
        tiled((SLOTS, KEYS, rule.value_width), dtype, align),
        plgpu.SMEM((WARPGROUPS, ROWS, rule.value_width), dtype),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=shape.steps.granules),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=shape.steps.granules),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    ]
    if not pieces.OPERANDS_IN_REGISTERS:
        scratch.append(tiled((WARPGROUPS, ROWS, KEYS), dtype))
    return scratch


class _Softmax(NamedTuple):
    out: Array  # [ROWS, V]
    highest: Array  # [ROWS]
    total: Array  # [ROWS]


class _Prefiller:
    """The kernel's references, and the code of one thread block."""

    def __init__(self, shape: PrefillShape, *refs: Any) -> None:
        self.rule, self.steps, self.dtype = shape
        self.arrays = PrefillArrays(*refs[:6])
        self.queries, self.pages, self.out, self.lse = refs[6:10]
        self.query, self.keys, self.values, self.staged = refs[10:14]
        self.query_full, self.keys_full, self.values_full = refs[14:17]
        self.keys_free, self.values_free, self.turn = refs[17:20]
        self.weights: Any = refs[20] if len(refs) > 20 else None
        self.head, self.warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
        self.kv_head = lax.div(self.head, self.rule.group)
        # The last queries of a request see the most keys, so they go first.
        self.index = self.arrays.num_tiles[0] - 1 - lax.axis_index("tile")

    def run(self) -> None:
        @pl.when(self.warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            pl.when(self.index >= 0)(lambda: self._compute(self._tile()))

        @pl.when(self.warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            pl.when(self.index >= 0)(lambda: self._load(self._tile()))

    def _tile(self) -> PrefillTile:
        return PrefillTile.load(self.arrays.tiles, self.index)

    # What the third warpgroup does.

    def _load(self, tile: PrefillTile) -> None:
        rule = self.rule
        row = self.kv_head * (rule.key_width + rule.value_width)
        keys, values = pl.ds(row, rule.key_width), pl.ds(row + rule.key_width, rule.value_width)

        @pl.loop(tile.first_step, tile.last_step)
        def _(step: Array) -> None:
            count = step - tile.first_step
            slot, is_used = lax.rem(count, SLOTS), count >= SLOTS
            # Ids are far away: they are asked for before slots are waited for.
            places, _ = self._locate(tile, step)
            for columns, buffer, full, free in (
                (keys, self.keys, self.keys_full, self.keys_free),
                (values, self.values, self.values_full, self.values_free),
            ):
                pl.when(is_used)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                self._fetch(places, columns, buffer.at[slot], full.at[slot])

    def _fetch(self, places: list[Array], columns: pl.Slice, buffer: Any, full: Any) -> None:
        """Begins to load the keys or the values of a step."""
        n = self.steps.granule
        for j, place in enumerate(places):
            source = self.pages.at[pl.ds(place * n, n), columns]
            plgpu.copy_gmem_to_smem(source, buffer.at[pl.ds(j * n, n)], full)

    def _locate(self, tile: PrefillTile, step: Array) -> tuple[list[Array], Array]:
        return self.steps.locate(self.arrays.block_tables, tile.request, step)

    # What the other two do.

    def _compute(self, tile: PrefillTile) -> None:
        index = self.warpgroup
        # Tiles begin at multiples of 8 tokens; the last one may be pushed back into the array.
        last_octet = self.queries.shape[0] // 8 - ROWS // 8
        octet = jnp.minimum(tile.octet + index * (ROWS // 8), last_octet)
        shift = (octet - tile.octet) * 8  # of this warpgroup's first row, in rows of the tile
        source = self.queries.at[pl.ds(octet * 8, ROWS), self.head]
        plgpu.copy_gmem_to_smem(source, self.query.at[index], self.query_full.at[index])
        plgpu.barrier_wait(self.query_full.at[index])
        pl.when(index == 1)(self._swap)
        position = tile.position + shift
        running = self._start()
        if self.rule.window is not None or self.rule.chunk is not None:
            running = self._steps(tile, position, tile.first_step, tile.full_begin, True, running)
        running = self._steps(tile, position, tile.full_begin, tile.full_end, False, running)
        running = self._steps(tile, position, tile.full_end, tile.last_step, True, running)
        pl.when(index == 0)(self._swap)
        begin = jnp.maximum(tile.skip, index * ROWS) - shift
        end = jnp.minimum(tile.count, (index + 1) * ROWS) - shift
        self._write(running, octet, begin, end)

    def _start(self) -> _Softmax:
        zeros = jnp.zeros((ROWS, self.rule.value_width), jnp.float32)
        return _Softmax(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
        )

    def _swap(self) -> None:
        """Hands the tensor cores over, and waits for them."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def _steps(
        self,
        tile: PrefillTile,
        position: Array,
        begin: Array,
        end: Array,
        masked: bool,
        running: _Softmax,
    ) -> _Softmax:
        def step(i: Array, running: _Softmax) -> _Softmax:
            return self._step(tile, position, i, masked, running)

        return lax.fori_loop(begin, end, step, running)

    def _step(
        self, tile: PrefillTile, position: Array, step: Array, masked: bool, running: _Softmax
    ) -> _Softmax:
        """Adds a step of keys to a running softmax."""
        slot = lax.rem(step - tile.first_step, SLOTS)
        holes = jnp.int32(0)
        if masked:
            _, holes = self._locate(tile, step)
            plgpu.barrier_wait(self.values_full.at[slot])
            self._clean_values(tile, step, slot, holes)
        plgpu.barrier_wait(self.keys_full.at[slot])

        def score(product: Any) -> Array:
            plgpu.wgmma(product, self.query.at[self.warpgroup], self.keys.at[slot].T)
            self._swap()
            return product[...]

        scores = pl.run_scoped(score, plgpu.ACC((ROWS, KEYS), jnp.float32))
        plgpu.barrier_arrive(self.keys_free.at[slot])
        scores, scale = pieces.cap(self.rule, scores, self.arrays.scales[self.kv_head])
        if masked:
            scores = jnp.where(self._seen(tile, position, step, holes), scores * scale, UNSEEN)
            scale = 1.0
        highest = jnp.maximum(running.highest, scores.max(axis=1) * scale)
        shrink = jnp.exp2(running.highest - highest)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(highest, scores.shape, [0]))
        out = running.out * lax.broadcast_in_dim(shrink, running.out.shape, [0])
        narrow = weights.astype(self.dtype)
        total = running.total * shrink + weights.sum(axis=1)
        out, total, highest, narrow = lax.optimization_barrier((out, total, highest, narrow))
        plgpu.barrier_arrive(self.turn)  # the softmax is done
        if not masked:
            plgpu.barrier_wait(self.values_full.at[slot])
        plgpu.barrier_wait(self.turn)  # the tensor cores are free
        out = self._add_product(out, narrow, self.values.at[slot])
        plgpu.barrier_arrive(self.values_free.at[slot])
        return _Softmax(out, highest, total)

    def _seen(self, tile: PrefillTile, position: Array, step: Array, holes: Array) -> Array:
        """Returns bool[ROWS, KEYS]: which keys of a step each query sees."""
        shape, layout = (ROWS, KEYS), plgpu.Layout.WGMMA
        place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        queries = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + position
        seen = pieces.sees(self.rule, queries, place + step * KEYS, tile.end)
        return seen & self.steps.held(place, holes)

    def _add_product(self, out: Array, weights: Array, values: Any) -> Array:
        """Returns an output plus that of some more values."""
        if pieces.OPERANDS_IN_REGISTERS:
            start: Any = plgpu.ACC.init(out)
            sums: Any = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values))(start)
            return sums
        staged: Any = self.weights.at[self.warpgroup]
        staged[...] = weights
        plgpu.commit_smem()
        return out + multiply(staged, values)

    def _clean_values(self, tile: PrefillTile, step: Array, slot: Array, holes: Array) -> None:
        """Writes zeros over the values that no query of the tile sees.

        Both warpgroups do it, and write the same.
        """
        key = step * KEYS

        @pl.when((key < tile.begin) | (key + KEYS > tile.end) | (holes != 0))
        def _() -> None:
            for first in range(0, KEYS, 64):
                part = self.values.at[slot, pl.ds(first, 64)]
                seen = tile.begin, tile.end
                pieces.zero_unseen(part, part, self.steps, holes, key + first, seen)
            plgpu.commit_smem()

    def _write(self, running: _Softmax, octet: Array, begin: Array, end: Array) -> None:
        """Writes the rows from ``begin`` to below ``end`` to their tokens."""
        index, sink = self.warpgroup, self.arrays.sinks[self.head]
        highest = jnp.maximum(running.highest, sink)
        shrink = jnp.exp2(running.highest - highest)
        # A query that saw nothing has weights of keys that it does not see.
        shrink = jnp.where(running.highest > UNSEEN, shrink, 0.0)
        total = running.total * shrink + jnp.exp2(sink - highest)
        weight = shrink * self.arrays.value_scale[self.kv_head] / jnp.where(total > 0, total, 1.0)
        lse = jnp.log(total) + highest * (1 / LOG2E)
        store(self.lse.at[self.index, self.head, index], lse)
        out = running.out * lax.broadcast_in_dim(weight, running.out.shape, [0])
        # Values of a query that saw nothing may have been infinite.
        known = lax.broadcast_in_dim(total, out.shape, [0]) > 0
        out = jnp.where(known, out, jnp.zeros_like(out))
        staged = self.staged.at[index]
        store(staged, out.astype(self.dtype))
        plgpu.commit_smem()
        whole = (begin == 0) & (end == ROWS)

        @pl.when(whole)
        def _() -> None:
            plgpu.copy_smem_to_gmem(staged, self.out.at[pl.ds(octet * 8, ROWS), self.head])

        @pl.when(~whole)
        def _() -> None:
            @pl.loop(begin, end)
            def _(row: Array) -> None:
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(row, 1)], self.out.at[pl.ds(octet * 8 + row, 1), self.head]
                )

        plgpu.wait_smem_to_gmem(0)
