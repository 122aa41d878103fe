"""The Mosaic GPU kernel that combines the segments of latent attention into the output."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import own_buffers
from pallas_kernels._paged_attention_mla_mosaic import Segments
from pallas_kernels._paged_attention_pieces import LOG2E
from pallas_kernels._paged_attention_tasks import TaskMap, Tile
from pallas_kernels._paged_attention_tiles import AttentionRule

# Segments that are loaded at once, because each load waits long for memory.
FEW, MANY, MANY_PER_TILE = 2, 8, 4
LANES = 128  # threads of a warpgroup


def combine_latents(
    rule: AttentionRule,
    tasks: TaskMap,
    segments: Segments,
    sinks: Array,
    value_scale: Array,
    out: Any,
) -> Array:
    """Writes the output of all tiles, and zeros for tokens of padding, into [T, heads, V].

    Args:
      sinks: float32[R], logits times log2(e), one per row of queries of a tile; -inf for none.
      value_scale: float32[1].

    Returns:
      The log-sum-exp, float32[N, 1, R]; undefined for empty tiles.
    """
    num_tiles, rows = tasks.tiles.shape[0], sinks.shape[0]
    together = MANY if tasks.lanes.shape[0] > MANY_PER_TILE * num_tiles else FEW
    call = plgpu.kernel(
        lambda *refs: _Combiner(rule, together, *refs).run(),
        out_type=[jax.ShapeDtypeStruct((num_tiles, 1, rows), jnp.float32)],
        grid=(rows, num_tiles),
        grid_names=("row", "tile"),
        kernel_name="paged_attention_mla_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = [tasks.tiles, tasks.used_tokens, *segments, sinks, value_scale]
    with jax.enable_x64(False):
        return call(*own_buffers(arrays), out)[0]


class _Sum(NamedTuple):
    """A partial softmax of one row."""

    out: Array  # [V]
    highest: Array
    total: Array


class _Combiner:
    """The kernel's references, and the code of one thread block."""

    def __init__(self, rule: AttentionRule, together: int, *refs: Any) -> None:
        self.rule, self.together = rule, together
        self.tiles, self.used_tokens, self.segments = refs[0], refs[1], Segments(*refs[2:5])
        self.sinks, self.value_scale, self.out, self.lse = refs[5:9]
        self.row, self.index = lax.axis_index("row"), lax.axis_index("tile")
        vector = math.gcd(4, rule.value_width // LANES)
        self.layout = plgpu.Layout.WG_STRIDED((rule.value_width,), vec_size=vector)

    def run(self) -> None:
        tile = Tile.load(self.tiles, self.index)
        used_tokens = self.used_tokens[0]
        token = lax.div(self.row, self.rule.group)
        head = lax.rem(self.row, self.rule.group)

        @pl.when(token < tile.count)
        def _() -> None:
            self.out.at[tile.token + token, head][...] = self._finish(self._sum(tile))

        self._clear_padding(used_tokens)

    def _sum(self, tile: Tile) -> _Sum:
        """Adds up the segments of the tile."""
        zeros = jnp.zeros((self.rule.value_width,), jnp.float32)
        start = _Sum(plgpu.layout_cast(zeros, self.layout), jnp.float32(-jnp.inf), jnp.float32(0))

        def add(i: Array, running: _Sum) -> _Sum:
            first = i * self.together
            parts = [running, *[self._load(tile, first + j) for j in range(self.together)]]
            highest = parts[0].highest
            for part in parts[1:]:
                highest = jnp.maximum(highest, part.highest)
            # Nothing seen so far: -inf - -inf is NaN.
            finite = jnp.where(highest > -jnp.inf, highest, 0.0)
            weights = [jnp.exp2(part.highest - finite) for part in parts]
            out, total = jnp.zeros_like(running.out), jnp.float32(0)
            for weight, part in zip(weights, parts, strict=True):
                out, total = out + weight * part.out, total + weight * part.total
            return _Sum(out, highest, total)

        rounds = lax.div(tile.num_segments + (self.together - 1), self.together)
        return lax.fori_loop(0, rounds, add, start)

    def _load(self, tile: Tile, index: Array) -> _Sum:
        """Loads a segment of the tile, or an empty one past the last."""
        number = tile.first_segment + jnp.minimum(index, tile.num_segments - 1)
        out = plgpu.load(self.segments.out.at[number, self.row], layout=self.layout)
        highest = self.segments.highest[number, self.row]
        highest = jnp.where(index < tile.num_segments, highest, -jnp.inf)
        return _Sum(out, highest, self.segments.total[number, self.row])

    def _finish(self, summed: _Sum) -> Array:
        """Returns the output of the row, and writes its log-sum-exp."""
        sink = self.sinks[self.row]
        highest = jnp.maximum(summed.highest, sink)
        finite = jnp.where(highest > -jnp.inf, highest, 0.0)
        shrink = jnp.exp2(summed.highest - finite)
        total = summed.total * shrink + jnp.exp2(sink - finite)
        # Nothing seen: the output is 0, and log(0) is the -inf that the log-sum-exp has to be.
        weight = shrink * self.value_scale[0] / jnp.where(total > 0, total, 1.0)
        self.lse[self.index, 0, self.row] = jnp.log(total) + finite * (1 / LOG2E)
        return (summed.out * weight).astype(self.out.dtype)

    def _clear_padding(self, used_tokens: Array) -> None:
        """Writes zeros to the tokens of padding that this thread block has to clear."""
        num_tokens, num_tiles = self.out.shape[0], self.tiles.shape[0]
        first = jnp.where(self.row < self.rule.group, used_tokens + self.index, num_tokens)
        zeros = jnp.zeros((self.rule.value_width,), self.out.dtype)
        cleared = plgpu.layout_cast(zeros, self.layout)

        @pl.loop(first, num_tokens, step=num_tiles)
        def _(token: Array) -> None:
            self.out.at[token, self.row][...] = cleared
