"""The task map of decoding, computed on the device: steps of keys, divided evenly among lanes.

The steps of all tiles form one line. A lane is an equal part of it, for one thread block per KV
head, so that a long request takes no more time than its bytes cost. The part of a tile that one
lane computes is a segment. Lane l and tile t share at most one segment, and its number is l + t,
because both ascend along the line.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._paged_attention.tiles import QueryTiles

STEP = 64  # keys of a step
MAX_COMPARED = 2048  # tiles whose numbers are compared in pairs


class Tile(NamedTuple):
    """The numbers of a tile that kernels read: columns of `TaskMap.tiles`.

    request: row of the block tables.
    token: index of the first row among the tokens.
    count: rows that are queries of the request.
    position: position of the first row in the request.
    chunk_offset, rank: as in `AttentionArrays`.
    begin, end: no query of the tile sees keys outside ``begin`` to ``end - 1``.
    first_step: the request's first step that the tile sees.
    line_begin, line_end: the tile's steps on the line of all steps, ``line_end`` excluded.
    first_segment, num_segments: the segments of the tile.
    """

    request: Array
    token: Array
    count: Array
    position: Array
    chunk_offset: Array
    rank: Array
    end: Array
    begin: Array
    first_step: Array
    line_begin: Array
    line_end: Array
    first_segment: Array
    num_segments: Array

    @classmethod
    def load(cls, tiles: jax.Ref, index: Array) -> Self:
        """Loads a row of `TaskMap.tiles` within a kernel."""
        return cls(*[tiles[index, column] for column in range(len(cls._fields))])


class Lane(NamedTuple):
    """Columns of `TaskMap.lanes`: the tiles of a lane, and its steps on the line."""

    first_tile: Array
    last_tile: Array
    line_begin: Array
    line_end: Array

    @classmethod
    def load(cls, lanes: jax.Ref, index: Array) -> Self:
        """Loads a row of `TaskMap.lanes` within a kernel."""
        return cls(*[lanes[index, column] for column in range(len(cls._fields))])


class TaskMap(NamedTuple):
    """The work of a call.

    tiles: int32[N, ...], a `Tile` per row.
    lanes: int32[L, 4], a `Lane` per row.
    used_tokens: int32[1], the number of tokens before the padding.
    """

    tiles: Array
    lanes: Array
    used_tokens: Array

    @property
    def num_segments(self) -> int:
        """Returns the most segments that there can be."""
        return self.tiles.shape[0] + self.lanes.shape[0]


def share_out(tiles: QueryTiles, num_lanes: int, used_tokens: Array) -> TaskMap:
    """Divides the steps of tiles among lanes."""
    steps = (tiles.ends + (STEP - 1)) // STEP - tiles.begins // STEP
    steps = jnp.where(tiles.ends > tiles.begins, steps, 0)
    line_ends = _running_sum(steps)
    line_begins, total = line_ends - steps, line_ends[-1]
    least, longer = total // num_lanes, total % num_lanes  # ``longer`` lanes have one step more
    lanes = jnp.arange(num_lanes, dtype=jnp.int32)
    begins = lanes * least + jnp.minimum(lanes, longer)
    ends = begins + least + (lanes < longer).astype(jnp.int32)
    busy = begins < ends
    lane = Lane(
        first_tile=jnp.where(busy, _tile_at(line_ends, begins), 0),
        last_tile=jnp.where(busy, _tile_at(line_ends, ends - 1), -1),
        line_begin=begins,
        line_end=ends,
    )

    def lane_of(step: Array) -> Array:
        later = step - longer * (least + 1)
        return jnp.where(later < 0, step // (least + 1), longer + later // jnp.maximum(least, 1))

    first_lane, last_lane = lane_of(line_begins), lane_of(line_ends - 1)
    tile = Tile(
        request=tiles.requests,
        token=tiles.tokens,
        count=tiles.counts,
        position=tiles.positions,
        chunk_offset=tiles.chunk_offsets,
        rank=tiles.ranks,
        end=tiles.ends,
        begin=tiles.begins,
        first_step=tiles.begins // STEP,
        line_begin=line_begins,
        line_end=line_ends,
        first_segment=first_lane + jnp.arange(steps.shape[0], dtype=jnp.int32),
        num_segments=jnp.where(steps > 0, last_lane - first_lane + 1, 0),
    )
    return TaskMap(jnp.stack(tile, axis=1), jnp.stack(lane, axis=1), used_tokens.reshape(1))


def _running_sum(counts: Array) -> Array:
    """Returns the sums of counts up to each of them."""
    if counts.size > MAX_COMPARED:
        return jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(counts.size, dtype=jnp.int32)  # one kernel, where a scan takes several
    return jnp.where(index[None] <= index[:, None], counts[None], 0).sum(axis=1, dtype=jnp.int32)


def _tile_at(line_ends: Array, steps: Array) -> Array:
    """Returns the tile that each step of the line belongs to."""
    found = jnp.searchsorted(line_ends, steps, side="right", method="compare_all")
    return found.astype(jnp.int32)
