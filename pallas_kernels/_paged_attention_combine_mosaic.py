"""The Mosaic GPU kernel that combines segments of decoding into the output."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import own_buffers
from pallas_kernels._paged_attention_decode_mosaic import COLUMNS, Segments
from pallas_kernels._paged_attention_pieces import LOG2E, store
from pallas_kernels._paged_attention_tasks import TaskMap, Tile
from pallas_kernels._paged_attention_tiles import AttentionRule

WIDTH, ROWS = 64, 8  # of the part of the output that a thread block computes
# Several segments are loaded together, to overlap their latencies: many segments by several
# warpgroups, few by one; fewer together for the rest.
MANY, WARPGROUPS, MANY_TOGETHER, MANY_LEFT_OVER = 16, 4, 16, 4
FEW_TOGETHER, FEW_LEFT_OVER = 4, 2


def combine(
    rule: AttentionRule,
    tasks: TaskMap,
    segments: Segments,
    sinks: Array,
    value_scale: Array,
    out: Any,
) -> Array:
    """Writes the output of all tiles, and zeros for padding, into ``out``, [T, heads, V].

    Args:
      sinks: float32[kv_heads, rows], logits in base 2; -inf for none.

    Returns:
      The log-sum-exp, float32[N, kv_heads, rows]; undefined for empty tiles.
    """
    num_tiles, rows = tasks.tiles.shape[0], sinks.shape[1]
    grid = (rule.value_width // WIDTH, rows // ROWS, rule.kv_heads, num_tiles)
    warpgroups = WARPGROUPS if tasks.lanes.shape[0] >= MANY * num_tiles else 1
    call = plgpu.kernel(
        lambda *refs: _Combiner(rule, warpgroups, *refs).run(),
        out_type=[jax.ShapeDtypeStruct((num_tiles, rule.kv_heads, rows), jnp.float32)],
        grid=grid,
        grid_names=("part", "row", "head", "tile"),
        kernel_name="paged_attention_combine",
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((ROWS, WIDTH), out.dtype),
            plgpu.SMEM((warpgroups, WIDTH, ROWS), jnp.float32),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = [tasks.tiles, tasks.used_tokens, *segments, sinks, value_scale]
    with jax.enable_x64(False):
        return call(*own_buffers(arrays), out)[0]


class _Sum(NamedTuple):
    """A partial softmax; or references to several, or the layouts of its parts."""

    out: Any  # [WIDTH, ROWS]
    highest: Any  # [ROWS]
    total: Any  # [ROWS]


def _add_up(parts: list[_Sum]) -> _Sum:
    """Returns the sum of partial softmaxes."""
    highest = parts[0].highest
    for part in parts[1:]:
        highest = jnp.maximum(highest, part.highest)
    # Without a seen key, highest is -inf, and -inf - -inf is NaN.
    finite = jnp.where(highest > -jnp.inf, highest, 0.0)
    out, total = jnp.zeros_like(parts[0].out), jnp.zeros_like(parts[0].total)
    for part in parts:
        weight = jnp.exp2(part.highest - finite)
        total += part.total * weight
        out += part.out * lax.broadcast_in_dim(weight, out.shape, [1])
    return _Sum(out, highest, total)


class _Combiner:
    """The kernel's references, and the code of one thread block."""

    def __init__(self, rule: AttentionRule, warpgroups: int, *refs: Any) -> None:
        self.rule, self.warpgroups = rule, warpgroups
        self.together, self.left_over = FEW_TOGETHER, FEW_LEFT_OVER
        if warpgroups > 1:
            self.together, self.left_over = MANY_TOGETHER, MANY_LEFT_OVER
        self.tiles, self.used_tokens, self.segments = refs[0], refs[1], Segments(*refs[2:5])
        self.sinks, self.value_scale, self.out, self.lse, self.staged = refs[5:10]
        self.parts, self.arrived = _Sum(*refs[10:13]), refs[13]
        self.warpgroup = lax.axis_index("warpgroup")
        self.head, self.index = lax.axis_index("head"), lax.axis_index("tile")
        part, row = lax.axis_index("part"), lax.axis_index("row")
        self.columns, self.rows = pl.ds(part * WIDTH, WIDTH), pl.ds(row * ROWS, ROWS)
        self.first_row = row * ROWS
        self.is_first_part = part == 0

    def run(self) -> None:
        tile = Tile.load(self.tiles, self.index)
        # Loaded early to hide the latency.
        used_tokens, value_scale = self.used_tokens[0], self.value_scale[self.head]
        sinks = self._load_rows(self.sinks.at[self.head])

        @pl.when(tile.count > 0)
        def _() -> None:
            summed = self._sum(tile)
            if self.warpgroups > 1:
                self._hand_over(summed)

            @pl.when(self.warpgroup == 0)
            def _() -> None:
                all_summed = summed if self.warpgroups == 1 else self._sum_of_all()
                self._write(tile, self._finish(all_summed, sinks, value_scale))

        pl.when(self.warpgroup == 0)(lambda: self._clear_padding(used_tokens))

    def _sum(self, tile: Tile) -> _Sum:
        """Returns the sum of this warpgroup's share of the segments of the tile."""
        zeros = jnp.zeros((WIDTH, ROWS), jnp.float32)
        start = _Sum(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), COLUMNS),
        )

        def add(first: Array, count: int, running: _Sum) -> _Sum:
            return _add_up([running, *[self._load(tile, first + j) for j in range(count)]])

        together = self.together
        rounds = lax.div(tile.num_segments, together)
        left_over = tile.num_segments - rounds * together
        last_rounds = lax.div(left_over + (self.left_over - 1), self.left_over)
        own_rounds = lax.div(rounds - self.warpgroup + (self.warpgroups - 1), self.warpgroups)

        def add_own(i: Array, running: _Sum) -> _Sum:
            first = (i * self.warpgroups + self.warpgroup) * together
            return add(first, together, running)

        def add_last(i: Array, running: _Sum) -> _Sum:
            return add(rounds * together + i * self.left_over, self.left_over, running)

        summed = lax.fori_loop(0, own_rounds, add_own, start)
        return lax.fori_loop(0, jnp.where(self.warpgroup == 0, last_rounds, 0), add_last, summed)

    def _hand_over(self, summed: _Sum) -> None:
        """Passes the sum of this warpgroup to the first one."""
        for ref, value in zip(self.parts, summed, strict=True):
            store(ref.at[self.warpgroup], value)
        plgpu.barrier_arrive(self.arrived)

    def _sum_of_all(self) -> _Sum:
        """Waits for the sums of all warpgroups, and returns their sum."""
        plgpu.barrier_wait(self.arrived)
        layouts = _Sum(plgpu.Layout.WGMMA, COLUMNS, COLUMNS)
        return _add_up(
            [
                _Sum(
                    *[
                        plgpu.load(ref.at[index], layout=layout, optimized=False)
                        for ref, layout in zip(self.parts, layouts, strict=True)
                    ]
                )
                for index in range(self.warpgroups)
            ]
        )

    def _write(self, tile: Tile, result: Array) -> None:
        """Writes the tile's rows to their tokens."""
        store(self.staged.T, result.astype(self.staged.dtype))
        plgpu.commit_smem()
        for row in range(ROWS):
            self._write_row(row, tile.token, tile.count)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _load(self, tile: Tile, index: Array) -> _Sum:
        """Loads a segment of the tile; past the last one, an empty segment."""
        number = tile.first_segment + jnp.minimum(index, tile.num_segments - 1)
        penalty = jnp.where(index < tile.num_segments, 0.0, -jnp.inf)
        out = plgpu.load(
            self.segments.out.at[number, self.head, self.columns, self.rows],
            layout=plgpu.Layout.WGMMA,
            optimized=False,
        )
        highest = self._load_rows(self.segments.highest.at[number, self.head])
        total = self._load_rows(self.segments.total.at[number, self.head])
        return _Sum(out, highest + penalty, total)

    def _load_rows(self, ref: Any) -> Array:
        return plgpu.load(ref.at[self.rows], layout=COLUMNS, optimized=False)

    def _finish(self, summed: _Sum, sinks: Array, value_scale: Array) -> Array:
        """Returns the output of all rows, and writes the log-sum-exp of each."""
        highest = jnp.maximum(summed.highest, sinks)
        finite = jnp.where(highest > -jnp.inf, highest, 0.0)
        shrink = jnp.exp2(summed.highest - finite)
        total = summed.total * shrink + jnp.exp2(sinks - finite)
        # Without a seen key, total is 0: the output is 0, and its logarithm -inf, as wanted.
        weight = shrink * value_scale / jnp.where(total > 0, total, 1.0)

        @pl.when(self.is_first_part)
        def _() -> None:
            lse = jnp.log(total) + finite * (1 / LOG2E)
            store(self.lse.at[self.index, self.head, self.rows], lse)

        return summed.out * lax.broadcast_in_dim(weight, summed.out.shape, [1])

    def _write_row(self, row: int, first_token: Array, count: Array | int) -> None:
        """Writes a staged row to its token and head, if the tile has such a token."""
        group = self.rule.group
        token = lax.div(self.first_row + row, group)
        head = self.head * group + lax.rem(self.first_row + row, group)

        @pl.when(token < count)
        def _() -> None:
            plgpu.copy_smem_to_gmem(
                self.staged.at[row], self.out.at[first_token + token, head, self.columns]
            )

    def _clear_padding(self, used_tokens: Array) -> None:
        """Writes zeros for this thread block's share of the padding."""
        num_tokens, num_tiles = self.out.shape[0], self.tiles.shape[0]
        begin = used_tokens + self.index

        @pl.when(begin < num_tokens)
        def _() -> None:
            zeros = plgpu.layout_cast(jnp.zeros((WIDTH, ROWS), jnp.float32), plgpu.Layout.WGMMA)
            store(self.staged.T, zeros.astype(self.staged.dtype))
            plgpu.commit_smem()

            @pl.loop(begin, num_tokens, step=num_tiles)
            def _(token: Array) -> None:
                for row in range(ROWS):
                    self._write_row(row, token, 1)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
