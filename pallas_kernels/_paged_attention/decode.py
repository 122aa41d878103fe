"""The Mosaic GPU kernel that decodes: a few queries of a request over all of its keys.

Operands are swapped (scores are keys times queries), so that 16 keys are the rows of an mma and
the query heads of one KV head its columns. A thread block has four warps, which also load, so
that several thread blocks fit on an SM and hide each other's latencies. 16-bit pages are used in
place in shared memory; 8-bit pages are widened to 16 bits, keys in registers, values through shared
memory. Where tokens and heads have scales, and queries are few, each warp has keys of its own; see
`WarpSteps`. A tile that one thread block serves whole may be finished there; the others are
combined by another kernel.

Memory is the bound, so that mma, which all GPUs have, costs a Hopper less than 1 % next to its own
wgmma. What differs between GPUs is how they copy: see `Copies`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._fragments import interleave
from pallas_kernels._mosaic import Ref, call_unfused, store
from pallas_kernels._paged_attention import common
from pallas_kernels._paged_attention.common import PartialSoftmax
from pallas_kernels._paged_attention.decode_block import (
    COLUMNS,
    DecodeOperands,
    DecodeScratch,
    Outputs,
)
from pallas_kernels._paged_attention.decode_rows import RowSteps, packed_queries
from pallas_kernels._paged_attention.decode_shape import (
    SCALE,
    SINKS,
    VALUE_SCALE,
    DecodeShape,
)
from pallas_kernels._paged_attention.decode_steps import (
    DecodeSteps,
    RunningSoftmax,
    Step,
    over_keys,
)
from pallas_kernels._paged_attention.decode_warps import WarpSteps
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.tasks import (
    TaskMap,
    Tile,
    Worker,
    load_field,
    load_row,
    split_steps,
)


def decode(
    shape: DecodeShape,
    tasks: TaskMap,
    tables: Array,
    queries: Array,
    pages: StridedPages,
    numbers: Array,
    outputs: Outputs | None = None,
) -> PartialSoftmax[Array]:
    """Attends from all tiles, and returns the partial softmax of each split.

    Args:
      tables: int32[B, W].
      queries: [N, kv_heads, rows, K].
      numbers: float32[kv_heads, 2 + rows]: `SCALE`, `VALUE_SCALE` and from `SINKS` on logits of the
        rows in base 2, -inf for none.
      outputs: the results of tiles that are one split, which are finished and not returned; None:
        all are returned.

    Returns:
      ``out`` float32[S, kv_heads, V, rows], of one window of values after another, ``highest`` and
      ``total`` float32[S, kv_heads, rows]; undefined where S counts more splits
      than there are.
    """
    config, rows = shape.config, shape.rows
    results = (tasks.num_splits, config.kv_heads, rows)
    decoder = _WarpDecoder if shape.by_warp else _RowDecoder if shape.by_row else _Decoder
    queries = interleave(queries, shape.page, shape.is_4_bit) if shape.by_warp else queries
    queries = packed_queries(queries, config) if shape.is_packed else queries
    threads: dict[str, Any] = {}
    params = plgpu.CompilerParams(approx_math=True)
    if shape.warpgroups > 1:
        threads = {"num_threads": shape.warpgroups, "thread_name": "warpgroup"}
    if shape.has_own_barriers:
        params = dataclasses.replace(
            params,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # see `over_keys`
        )
    call = plgpu.kernel(
        lambda *refs: decoder(
            shape, DecodeOperands.from_refs(*refs[:-1], shape=shape), refs[-1]
        ).run(),
        out_type=[
            jax.ShapeDtypeStruct(
                (*results[:2], sum(width for _, width in config.value_parts), results[2]),
                jnp.float32,
            ),
            jax.ShapeDtypeStruct(results, jnp.float32),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ],
        grid=(config.kv_heads // shape.warpgroups, shape.num_workers),
        grid_names=("head", "worker"),
        **threads,
        kernel_name="paged_attention_decode",
        scratch_types=[DecodeScratch.from_shape(shape)],
        compiler_params=params,
    )
    first_row = pages.first_row().reshape(1)
    arrays = [tasks.tiles, tasks.workers, tables, queries, numbers, first_row]
    if config.token_head_row is None:
        arrays.append(pages.rows())
    else:
        arrays += [pages.rows_as(dtype) for dtype in (shape.page, "float32")]
    return PartialSoftmax(*call_unfused(call, arrays, outputs or ()))


class _Part(NamedTuple):
    """The steps of a tile that a worker takes."""

    tile: Tile
    index: Array
    first_step: Array
    num_steps: Array


_Carry = tuple[RunningSoftmax, Array]  # and a bit for each hole of the steps being loaded


class _Decoder(DecodeSteps):
    """The code of one thread block."""

    def run(self) -> None:
        worker = load_row(Worker, self.operands.workers, self.worker)

        @pl.loop(worker.first_tile, worker.last_tile + 1)
        def _(index: Array) -> None:
            tile = load_row(Tile, self.operands.tiles, index)
            begin = lax.max(worker.line_begin, tile.line_begin)
            num_steps = lax.min(worker.line_end, tile.line_end) - begin
            part = _Part(tile, index, tile.first_step + begin - tile.line_begin, num_steps)
            pl.when(num_steps > 0)(lambda: self._attend(part))

        if self.operands.outputs is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _attend(self, part: _Part) -> None:
        """Attends from a tile's queries to the keys of a part."""
        source = self.operands.queries.at[part.index, self.head]
        self.copies.start_query(source, self.query, self.smem.query_full, self.warpgroup)
        stages, granules = self.shape.stages, self.shape.hole_bits

        def begin(stage: Array, holes: Array) -> Array:
            granule_rows, found = self._locate(part.tile, part.first_step + stage)
            self._refill(stage < part.num_steps, granule_rows, stage)
            return holes | (found << (stage * granules))

        holes = lax.fori_loop(0, stages, begin, jnp.int32(0))
        self.copies.finish_query(source, self.query, self.smem.query_full, self.warpgroup)
        scale = self.operands.numbers[self.head, SCALE]

        def step(i: Array, carry: _Carry) -> _Carry:
            running, holes = carry
            stage, number = lax.rem(i, stages), part.first_step + i
            # Loads the ids of a later step before the wait for this one, to hide the latency.
            granule_rows, found = self._locate(part.tile, number + stages)
            mask, shift = (1 << granules) - 1, stage * granules
            is_last = i + stages >= part.num_steps
            here = Step(part.tile, number, stage, (holes >> shift) & mask, is_last)

            def refill() -> None:
                self._free(stage)
                self._refill(~is_last, granule_rows, stage)

            running = self._step(here, scale, running, refill)
            return running, (holes & ~(mask << shift)) | (found << shift)

        self._each_step(part, step, holes)

    def _each_step(
        self, part: _Part, step: Callable[[Array, _Carry], _Carry], holes: Array
    ) -> None:
        """Takes the steps of a part, and stores the results of its splits."""
        fixed, start = split_steps(self.config), (self._start(), holes)
        if fixed is None:
            running, _ = lax.fori_loop(0, part.num_steps, step, start)
            self._close(part, running)
            return
        tile, first_step = part.tile, part.first_step
        first_number = tile.first_split - lax.div(tile.first_step, fixed)

        def step_of_splits(i: Array, carry: _Carry) -> _Carry:
            running, holes = step(i, carry)
            end = first_step + i + 1
            closes = (lax.rem(end, fixed) == 0) | (i + 1 == part.num_steps)
            number = first_number + lax.div(end - 1, fixed)
            pl.when(closes)(lambda: self._store(number, running))
            # The next step multiplies the sums by 0.
            highest = running.highest + jnp.where(closes, -jnp.inf, 0.0)
            return running._replace(highest=highest), holes

        lax.fori_loop(0, part.num_steps, step_of_splits, start)

    def _close(self, part: _Part, running: RunningSoftmax) -> None:
        """Writes the results of a part: of a whole tile, or of a split."""
        number, outputs = self.worker + part.index, self.operands.outputs
        if outputs is None:
            self._store(number, running)
            return
        is_whole = load_field(Tile, self.operands.tiles, part.index, "num_splits") == 1
        pl.when(is_whole)(lambda: self._finish(part, outputs, running))
        pl.when(~is_whole)(lambda: self._store(number, running))

    def _finish(self, part: _Part, outputs: Outputs, running: RunningSoftmax) -> None:
        """Writes the output of a whole tile, and its log-sum-exp."""
        numbers, rows = self.operands.numbers, pl.ds(SINKS, self.shape.rows)
        sinks = plgpu.load(numbers.at[self.head, rows], layout=COLUMNS, optimized=False)
        total = over_keys("add", running.total, self.reduced)
        scale = numbers[self.head, VALUE_SCALE]
        weight, lse = common.normalize(running.highest, total, sinks, scale)
        store(outputs.lse.at[part.index, self.head], lse)
        for first_row in range(0, self.shape.rows, self.shape.staged):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is read
            rows = slice(first_row, first_row + self.shape.staged)
            for staged, out in zip(self.smem.staged, running.out, strict=True):
                scaled = out * lax.broadcast_in_dim(weight, out.shape, [1])
                store(staged.T, scaled[:, rows].astype(staged.dtype))
            plgpu.commit_smem()
            self._write_rows(part.index, outputs.out, first_row)

    def _write_rows(self, index: Array, out: Ref, first_row: int) -> None:
        """Writes the staged rows that are queries of a tile to their tokens and heads."""
        group, staged, tiles = self.config.group, self.shape.staged, self.operands.tiles
        # Loaded again, to have more registers before.
        first_token, count = [load_field(Tile, tiles, index, field) for field in ("token", "count")]
        # Copies of 8 rows are in tiles 64 wide, into which some outputs do not divide.
        most = staged if self.config.value_width % 64 == 0 else 4
        together = math.gcd(group, staged, most)

        @pl.loop(0, lax.min(count * group - first_row, staged), step=together)
        def _(row: Array) -> None:
            token, head = lax.div(first_row + row, group), lax.rem(first_row + row, group)
            target = first_token + token, pl.ds(self.head * group + head, together)
            rows = pl.ds(row, together)
            for (first, width), source in zip(
                self.config.value_parts, self.smem.staged, strict=True
            ):
                plgpu.copy_smem_to_gmem(source.at[rows], out.at[(*target, pl.ds(first, width))])

    def _store(self, number: Array, running: RunningSoftmax) -> None:
        """Stores the results of a split."""
        running = self._merge(running)
        slot, rows = (number, self.head), pl.ds(0, self.shape.rows)
        first = 0
        for out in running.out:
            store(self.operands.splits.out.at[(*slot, pl.ds(first, len(out)), rows)], out)
            first += len(out)
        store(self.operands.splits.highest.at[(*slot, rows)], running.highest)
        total = over_keys("add", running.total, self.reduced)
        store(self.operands.splits.total.at[(*slot, rows)], total)


class _WarpDecoder(WarpSteps, _Decoder):
    """The same, with keys for each warp."""


class _RowDecoder(RowSteps, _Decoder):
    """The same, of rows that are copied by their numbers."""
