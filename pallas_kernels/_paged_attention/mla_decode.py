"""The Mosaic GPU kernel that attends to latent vectors, whose value is a prefix of their key.

A thread block has 64 rows of queries (heads of one or several tokens) and takes its keys 64 at a
time. One warpgroup scores them and adds up the left half of the output, a second one adds up the
right half, and a third one loads. Weights go from the first to the second through shared memory.
Two thread blocks with the same keys are a pair: each loads half of the keys for both.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float32

from pallas_kernels import _capability
from pallas_kernels._mosaic import Ref, Scratch, call_unfused, store, store_first_rows, tiled
from pallas_kernels._paged_attention import common, mla_rows
from pallas_kernels._paged_attention.common import PartialSoftmax, add_product, multiply
from pallas_kernels._paged_attention.decode_shape import SCALE, DecodeShape
from pallas_kernels._paged_attention.mla_latents import (
    COLUMNS,
    HALVES,
    NARROW,
    Latents,
    PackedLatents,
    WidenedLatents,
    opaque_zero,
)
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.steps import Granule
from pallas_kernels._paged_attention.tasks import STEP, TaskMap, Tile, Worker, load_row, split_steps

ROWS = 64  # of queries, in a thread block
UNSEEN = -1e30  # a score below all others; -inf would need care in every step
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def is_paired(shape: DecodeShape) -> bool:
    """Returns whether pairs of thread blocks share their loads: each copy has to halve evenly."""
    return shape.rows % (2 * ROWS) == 0 and shape.steps.granule % 16 == 0


def _choose_latents(shape: DecodeShape) -> type[Latents]:
    if shape.config.row_packing is not None:
        return PackedLatents
    return WidenedLatents if shape.widens else Latents


def num_workers(shape: DecodeShape) -> int:
    """Returns the number of workers that the steps of a call are divided among."""
    return max(1, _capability.max_thread_blocks(1) // (shape.rows // ROWS))


def decode_latents(
    shape: DecodeShape,
    tasks: TaskMap,
    bounds: Array,
    tables: Array,
    queries: Array,
    pages: StridedPages,
    numbers: Array,
) -> PartialSoftmax[Array]:
    """Attends from all tiles, and returns the partial softmax of each split.

    Args:
      bounds: int32[N]; below this step a tile sees all keys, and all of them are in pages. For
        pages of one token: the keys that it sees, fewer than ``tasks`` count or as many.
      tables: int32[B, W], the block tables.
      queries: [N, 1, R, K]; R: all rows, or fewer than `ROWS`.
      numbers: as `decode` takes them.

    Returns:
      ``out`` float32[S, R, V], ``highest`` and ``total`` float32[S, rows]; undefined where S counts
      more splits than there are.
    """
    config, rows = shape.config, shape.rows
    results = (tasks.num_splits, rows)
    paired = is_paired(shape)
    call = plgpu.kernel(
        lambda *refs: _Decoder(shape, _Operands.from_refs(*refs[:-1]), refs[-1]).run(),
        out_type=[
            jax.ShapeDtypeStruct(
                (tasks.num_splits, queries.shape[2], config.value_width), jnp.float32
            ),
            jax.ShapeDtypeStruct(results, jnp.float32),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ],
        grid=(rows // ROWS // (2 if paired else 1), tasks.workers.shape[0]),
        grid_names=("row", "worker"),
        cluster=(2,) if paired else (),
        cluster_names=("pair",) if paired else (),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_mla_decode",
        scratch_types=[_Scratch.from_shape(shape)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # threads read only what they wrote or waited for
            reduction_scratch_bytes=0,  # maxima and sums of rows stay within warps
        ),
    )
    first_row = pages.first_row().reshape(1)
    arrays = [tasks.tiles, tasks.workers, bounds, tables, queries, numbers, first_row]
    return PartialSoftmax(*call_unfused(call, [*arrays, *_choose_latents(shape).views(pages)]))


class _Operands(NamedTuple):
    """References to the arrays of a call, to views of its pages, and to the results."""

    tiles: Ref
    workers: Ref
    bounds: Ref
    tables: Ref
    queries: Ref
    numbers: Ref
    first_row: Ref
    pages: tuple[Ref, ...]
    splits: PartialSoftmax[Ref]

    @classmethod
    def from_refs(cls, *refs: Ref) -> Self:
        tiles, workers, bounds, tables, queries, numbers, first_row, *rest = refs
        arrays = tiles, workers, bounds, tables, queries, numbers, first_row
        return cls(*arrays, tuple(rest[:-3]), PartialSoftmax(*rest[-3:]))


class _Scratch[T](NamedTuple):
    """Shared memory and barriers: their types, or references to them.

    query: the queries of a tile.
    loaded: stages of rows as they are loaded.
    weights: of the keys of a step.
    shrink: the factor by which the output shrinks.
    rows: of the pool, in pages of one token; -1 for those that are zeros.
    loaded_full, loaded_free: barriers, one for each stage of ``loaded``.
    weighed: barrier; the weights are there, and the factor.
    taken: barrier; the second warpgroup no longer needs these two.
    others: all that a kind of rows needs besides.
    """

    query: T
    loaded: T
    weights: T
    shrink: T
    rows: T
    query_full: T
    query_free: T
    loaded_full: T
    loaded_free: T
    weighed: T
    taken: T
    others: list[T]

    @classmethod
    def from_shape(cls, shape: DecodeShape) -> "_Scratch[Scratch]":
        """Returns the types for a kernel."""
        kind = _choose_latents(shape)
        loaded, others = kind.scratch(shape)
        free: Scratch = plgpu.Barrier(num_barriers=kind.stages, num_arrivals=HALVES)
        if is_paired(shape):
            free = plgpu.ClusterBarrier(
                collective_axes=("pair",), num_barriers=kind.stages, num_arrivals=HALVES
            )
        copies = 1 if shape.steps.by_row else shape.steps.granules * kind.num_copies
        return cls(
            query=tiled((1, ROWS, shape.config.key_width), shape.compute),
            loaded=loaded,
            weights=tiled((1, ROWS, STEP), shape.compute),
            shrink=plgpu.SMEM((ROWS,), jnp.float32),
            rows=plgpu.SMEM((2, STEP), jnp.int32),
            query_full=plgpu.Barrier(),
            query_free=plgpu.Barrier(),
            loaded_full=plgpu.Barrier(num_barriers=kind.stages, num_arrivals=copies),
            loaded_free=free,
            weighed=plgpu.Barrier(),
            taken=plgpu.Barrier(),
            others=others,
        )


class _KVSplit:
    """The steps of a tile that one worker takes, as indices on the line of all steps.

    opens, closes: whether it is the first one of the tile in this worker, or the last one.
    """

    def __init__(self, decoder: "_Decoder", index: Array) -> None:
        worker, self.index = decoder.worker, index
        tile, self.full_steps = load_row(Tile, decoder.operands.tiles, index), jnp.int32(0)
        bound = decoder.operands.bounds[index]
        self.begin = jnp.maximum(worker.line_begin, tile.line_begin)
        self.end = jnp.minimum(worker.line_end, tile.line_end)
        self.shift = tile.first_step - tile.line_begin  # from indices on the line to steps
        if decoder.steps.by_row:
            tile = tile._replace(end=bound)
            self.end = jnp.minimum(self.end, lax.div(bound + (STEP - 1), STEP) - self.shift)
        else:
            self.full_steps = bound
        self.tile = tile
        self.number = decoder.number + index
        self.opens: Array | bool = True
        self.closes: Array | bool = True

    @property
    def full(self) -> Array:
        """Returns where steps that need masks begin."""
        return jnp.maximum(self.begin, jnp.minimum(self.full_steps - self.shift, self.end))

    def ranges(self, steps: int) -> tuple[Array, Array]:
        """Returns the first of the fixed ranges that this split meets, and one past the last."""
        first, last = self.begin + self.shift, self.end + self.shift
        return lax.div(first, steps), lax.div(last + (steps - 1), steps)

    def cut(self, k: Array, steps: int) -> Self:
        """Returns the part of the split that lies in a fixed range."""
        part, tile = copy.copy(self), self.tile
        part.begin = jnp.maximum(self.begin, k * steps - self.shift)
        part.end = jnp.minimum(self.end, (k + 1) * steps - self.shift)
        part.number = tile.first_split + k - lax.div(tile.first_step, steps)
        part.opens, part.closes = part.begin == self.begin, part.end == self.end
        return part


class _Softmax(NamedTuple):
    """A running softmax of the first warpgroup.

    Each thread adds up a part of ``total``; the sum of the parts is taken at the end.
    """

    out: Float32[Array, "rows values/2"]
    highest: Float32[Array, " rows"]
    total: Float32[Array, "rows 8"]


class _Decoder:
    """The code of one thread block."""

    def __init__(self, shape: DecodeShape, operands: _Operands, scratch: _Scratch[Ref]) -> None:
        self.shape, self.config, self.steps = shape, shape.config, shape.steps
        self.operands, self.smem = operands, scratch
        kind = _choose_latents(shape)
        self.latents = kind(shape, operands.pages, scratch.loaded, *scratch.others)
        self.widened = self.latents if isinstance(self.latents, WidenedLatents) else None
        self.first_page_row = operands.first_row[0]
        self.number = lax.axis_index("worker")
        self.worker = load_row(Worker, operands.workers, self.number)
        self.paired = is_paired(shape)
        row = lax.axis_index("row")
        if self.paired:
            row = row * 2 + lax.axis_index("pair")
        self.rows = pl.ds(row * ROWS, ROWS)
        # The others of a thread block are whatever lies in memory: no row depends on another.
        held = min(operands.queries.shape[2], ROWS)
        self.held, self.held_rows = held, pl.ds(row * ROWS, held)
        self.first_row = row * ROWS
        self.half = self.config.value_width // HALVES

    def run(self) -> None:
        for warpgroup, work in enumerate((self._score_all, self._add_all, self._load_all)):
            pl.when(lax.axis_index("warpgroup") == warpgroup)(work)

    def _each_split(self, work: Callable[[_KVSplit], None]) -> None:
        worker = self.worker

        @pl.loop(worker.first_tile, worker.last_tile + 1)
        def _(index: Array) -> None:
            kv_split, fixed = _KVSplit(self, index), split_steps(self.config)

            @pl.when(kv_split.end > kv_split.begin)
            def _() -> None:
                if fixed is None:
                    work(kv_split)
                else:
                    pl.loop(*kv_split.ranges(fixed))(lambda k: work(kv_split.cut(k, fixed)))

    def _stage(self, line_step: Array) -> Array:
        return lax.rem(line_step - self.worker.line_begin, self.latents.stages)

    def _find(self, kv_split: _KVSplit, line_step: Array) -> list[Granule]:
        request, step = kv_split.tile.request, line_step + kv_split.shift
        return self.steps.find(self.operands.tables, request, step)

    # The third warpgroup loads.

    def _load_all(self) -> None:
        plgpu.set_max_registers(40, action="decrease")
        self._each_split(self._load)
        if self.paired:  # the other thread block signals this one, which must not end before
            for stage in range(self.latents.stages):
                used = self.worker.line_end - self.worker.line_begin > stage
                pl.when(used)(lambda s=stage: plgpu.barrier_wait(self.smem.loaded_free.at[s]))

    def _load(self, kv_split: _KVSplit) -> None:
        first = kv_split.begin == self.worker.line_begin

        @pl.when(kv_split.opens)
        def _() -> None:
            pl.when(~first)(lambda: plgpu.barrier_wait(self.smem.query_free))
            source = self.operands.queries.at[kv_split.index, 0, self.held_rows]
            target = self.smem.query.at[0, pl.ds(0, self.held)]
            plgpu.copy_gmem_to_smem(source, target, self.smem.query_full)

        load = self._load_rows if self.steps.by_row else self._load_granules
        pl.loop(kv_split.begin, kv_split.end)(lambda line_step: load(kv_split, line_step))

    def _load_granules(self, kv_split: _KVSplit, line_step: Array) -> None:
        # Ids take long to load: ask for them before waiting for a stage.
        granules = self.steps.rows(self._find(kv_split, line_step), self.first_page_row)
        stage, n = self._free_stage(line_step), self.steps.granule
        for j, granule in enumerate(granules):
            axes = "pair" if self.paired else None
            self.latents.fetch(granule, stage, j * n, self.smem.loaded_full, axes)

    def _load_rows(self, kv_split: _KVSplit, line_step: Array) -> None:
        found = self._find_rows(kv_split, line_step)
        stage = self._free_stage(line_step)
        self.latents.fetch_rows(found, self._row_numbers(line_step), stage)
        self._finish_rows(kv_split, line_step)

    def _free_stage(self, line_step: Array) -> Array:
        """Waits until the stage of a step is free, and returns it."""
        stage = self._stage(line_step)
        used = line_step - self.worker.line_begin >= self.latents.stages
        pl.when(used)(lambda: plgpu.barrier_wait(self.smem.loaded_free.at[stage]))
        return stage

    def _find_rows(self, kv_split: _KVSplit, line_step: Array) -> Array:
        """Returns the rows of a step, in pages of one token."""
        tile, key = kv_split.tile, (line_step + kv_split.shift) * STEP
        table = self.operands.tables.at[tile.request, pl.ds(key, STEP)]
        seen, first = (tile.begin, tile.end), self.first_page_row
        return mla_rows.find_rows(self.steps, table, key, seen, first)

    def _row_numbers(self, line_step: Array) -> Ref:
        """Returns where the rows of a step are noted, until it is scored."""
        return self.smem.rows.at[lax.rem(line_step - self.worker.line_begin, 2)]

    def _finish_rows(self, kv_split: _KVSplit, line_step: Array) -> None:
        """Waits for the rows of a step; those of the first two steps are asked for together."""

        def finish(line_step: Array, pending: int) -> None:
            mla_rows.finish(pending)
            plgpu.barrier_arrive(self.smem.loaded_full.at[self._stage(line_step)])

        if self.latents.stages == 1:
            return finish(line_step, 0)
        begin = kv_split.begin
        pl.when(line_step == begin + 1)(lambda: finish(begin, 1))
        pl.when((line_step > begin) | (kv_split.end == begin + 1))(lambda: finish(line_step, 0))

    # The first warpgroup scores, and adds up the left half of the output.

    def _score_all(self) -> None:
        plgpu.set_max_registers(232, action="increase")
        self._each_split(self._score)

    def _score(self, kv_split: _KVSplit) -> None:
        """Attends from the rows to the keys of a split, without the right half of the output."""
        scale = self.operands.numbers[0, SCALE]

        def step(masked: bool) -> Callable[[Array, _Softmax], _Softmax]:
            return lambda i, running: self._score_step(kv_split, i, scale, masked, running)

        pl.when(kv_split.opens)(lambda: plgpu.barrier_wait(self.smem.query_full))
        running = _Softmax(
            self._no_output(),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA),
        )
        running = lax.fori_loop(kv_split.begin, kv_split.full, step(False), running)
        running = lax.fori_loop(kv_split.full, kv_split.end, step(True), running)
        pl.when(kv_split.closes)(lambda: plgpu.barrier_arrive(self.smem.query_free))
        # A row that saw nothing has weights of keys that it does not see.
        known, slot = running.highest > UNSEEN, (kv_split.number, self.rows)
        store(self.operands.splits.highest.at[slot], jnp.where(known, running.highest, -jnp.inf))
        store(self.operands.splits.total.at[slot], jnp.where(known, running.total.sum(axis=1), 0.0))
        self._store_output(kv_split, 0, running.out)

    def _score_step(
        self, kv_split: _KVSplit, line_step: Array, scale: Array, masked: bool, running: _Softmax
    ) -> _Softmax:
        """Adds 64 keys to the running softmax."""
        stage = self._stage(line_step)
        plgpu.barrier_wait(self.smem.loaded_full.at[stage])
        if self.widened is not None:
            self._widen(self.widened, kv_split, line_step, masked, 0)
            plgpu.barrier_wait(self.widened.full)
        products = multiply(
            self.smem.query.at[opaque_zero(line_step)], self.latents.keys(line_step, stage).T
        )
        scores, factor = common.cap(self.config, products, scale)
        if masked:
            scores = jnp.where(self._seen(kv_split, line_step), scores * factor, UNSEEN)
            factor = 1.0
        highest = jnp.maximum(running.highest, scores.max(axis=1) * factor)
        shrink = jnp.exp2(running.highest - highest)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(highest, scores.shape, [0]))
        used = line_step > self.worker.line_begin
        pl.when(used)(lambda: plgpu.barrier_wait(self.smem.taken))
        self.smem.weights[0] = weights.astype(self.shape.compute)
        store(self.smem.shrink, shrink)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.weighed)
        total = running.total * lax.broadcast_in_dim(shrink, running.total.shape, [0])
        total = common.add_columns(total, weights)
        out = self._add_values(running.out, shrink, line_step, 0)
        if self.widened is None:
            plgpu.barrier_arrive(self.smem.loaded_free.at[stage])
        return _Softmax(out, highest, total)

    def _seen(self, kv_split: _KVSplit, line_step: Array) -> Array:
        """Returns bool[ROWS, STEP], whether each row sees each key of a step."""
        shape, layout = (ROWS, STEP), plgpu.Layout.WGMMA
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + self.first_row
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        queries = lax.div(row, self.config.group) + kv_split.tile.position
        keys = key + (line_step + kv_split.shift) * STEP
        seen = common.sees(self.config, kv_split.tile, queries, keys)
        if self.steps.by_row:
            numbers = self._row_numbers(line_step)
            rows = plgpu.load(numbers, layout=mla_rows.OF_KEYS, optimized=False)
            return seen & (lax.broadcast_in_dim(rows, shape, [1]) >= 0)
        if self.widened is None:
            holes = self._clean_values(kv_split, line_step, 0)
        else:
            holes = self.steps.holes(self._find(kv_split, line_step))
        return seen & self.steps.is_allocated(key, holes)

    # The second warpgroup adds up the right half of the output.

    def _add_all(self) -> None:
        plgpu.set_max_registers(232, action="increase")
        self._each_split(self._add)

    def _add(self, kv_split: _KVSplit) -> None:
        """Adds up the right half of a split's output."""

        def step(masked: bool) -> Callable[[Array, Array], Array]:
            return lambda line_step, out: self._add_step(kv_split, line_step, masked, out)

        out = lax.fori_loop(kv_split.begin, kv_split.full, step(False), self._no_output())
        out = lax.fori_loop(kv_split.full, kv_split.end, step(True), out)
        self._store_output(kv_split, 1, out)

    def _add_step(self, kv_split: _KVSplit, line_step: Array, masked: bool, out: Array) -> Array:
        stage = self._stage(line_step)
        plgpu.barrier_wait(self.smem.loaded_full.at[stage])
        if self.widened is not None:
            self._widen(self.widened, kv_split, line_step, masked, 1)
            plgpu.barrier_arrive(self.widened.full)
        elif masked and not self.steps.by_row:
            self._clean_values(kv_split, line_step, 1)
        plgpu.barrier_wait(self.smem.weighed)
        shrink = plgpu.load(self.smem.shrink, layout=PER_ROW, optimized=False)
        out = self._add_values(out, shrink, line_step, 1)
        plgpu.barrier_arrive(self.smem.taken)
        if self.widened is None:
            plgpu.barrier_arrive(self.smem.loaded_free.at[stage])
        return out

    # The first two warpgroups share what follows.

    def _no_output(self) -> Array:
        zeros = jnp.zeros((ROWS, self.half), jnp.float32)
        return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def _add_values(self, out: Array, shrink: Array, line_step: Array, half: int) -> Array:
        """Returns half of an output, shrunk, and with the weighted values of a step added."""
        out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        weights, columns = (
            self.smem.weights.at[opaque_zero(line_step)],
            pl.ds(half * self.half, self.half),
        )
        values = self.latents.values(line_step, self._stage(line_step), columns)
        return add_product(out, weights, values)

    def _widen(
        self, rows: WidenedLatents, kv_split: _KVSplit, line_step: Array, masked: bool, half: int
    ) -> None:
        """Widens the columns of a step that belong to a half, and frees the stage they were in."""
        stage, known = self._stage(line_step), None
        if masked and not self.steps.by_row:
            known = self._known(kv_split, line_step)
        rows.widen(line_step, stage, half, known)
        plgpu.barrier_arrive(self.smem.loaded_free.at[stage])

    def _known(self, kv_split: _KVSplit, line_step: Array) -> Array:
        """Returns bool[STEP, COLUMNS], whether any row of the tile may see each key of a step."""
        row = plgpu.broadcasted_iota(jnp.int32, (STEP, COLUMNS), 0, layout=NARROW)
        keys, tile = row + (line_step + kv_split.shift) * STEP, kv_split.tile
        allocated = self.steps.is_allocated(row, self.steps.holes(self._find(kv_split, line_step)))
        return allocated & (keys >= tile.begin) & (keys < tile.end)

    def _clean_values(self, kv_split: _KVSplit, line_step: Array, half: int) -> Array:
        """Writes zeros over the values of a half that no row of the tile sees.

        Scores of these keys are masked, whether they are computed before this or after it.

        Returns:
          A bit for each hole of the step.
        """
        tile, stage = kv_split.tile, self._stage(line_step)
        key = (line_step + kv_split.shift) * STEP
        holes = self.steps.holes(self._find(kv_split, line_step))
        plgpu.commit_smem()  # also a barrier, because the compiler adds none; so is the one below

        @pl.when((key < tile.begin) | (key + STEP > tile.end) | (holes != 0))
        def _() -> None:
            for first in range(half * self.half, (half + 1) * self.half, COLUMNS):
                part = self.smem.loaded.at[stage, :, pl.ds(first, COLUMNS)]
                common.zero_unseen(part, part, self.steps, holes, key, (tile.begin, tile.end))

        plgpu.commit_smem()
        return holes

    def _store_output(self, kv_split: _KVSplit, half: int, out: Array) -> None:
        columns = pl.ds(half * self.half, self.half)
        target = self.operands.splits.out.at[kv_split.number, self.held_rows, columns]
        store_first_rows(target, out)
