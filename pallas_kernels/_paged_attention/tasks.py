"""The task map of decoding, computed on the device: steps of keys, divided evenly among lanes.

The steps of all tiles form one line. A lane is an equal part of it, for one thread block per KV
head, so that a long request takes no more time than its bytes cost. The part of a tile that one
lane computes is a segment. Worker l and tile t share at most one segment, and its number is l + t,
because both ascend along the line.

For bits that do not depend on the other requests, segments are fixed ranges of positions instead,
and a lane takes whole segments. The segments of a tile are numbered from ``first_split`` on.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tiles import QueryTiles, count_ended

STEP = 64  # keys of a step
MAX_COMPARED = 2048  # tiles whose numbers are compared in pairs
# Steps of a fixed segment. Those of latent rows are longer, because their results are wider.
SPLIT, LATENT_SPLIT = 16, 32


def split_steps(config: Config) -> int | None:
    """Returns the steps of a fixed segment; None if lanes decide where a segment ends."""
    if not config.reproducible:
        return None
    return LATENT_SPLIT if config.values_in_keys else SPLIT


class Tile(NamedTuple):
    """The numbers of a tile that kernels read: columns of `TaskMap.tiles`.

    request: row of the block tables.
    token: index of the first row among the tokens.
    skip, count: rows ``skip`` to ``count - 1`` are queries of the request.
    position: position of the first row in the request.
    chunk_offset, rank: as in `AttentionArrays`.
    begin, end: no query of the tile sees keys outside ``begin`` to ``end - 1``.
    first_step: the request's first step that the tile sees.
    line_begin, line_end: the tile's steps on the line of all steps, ``line_end`` excluded.
    first_split, num_splits: the segments of the tile.
    used_tokens: the number of tokens before the padding, in every row.
    """

    request: Array
    token: Array
    skip: Array
    count: Array
    position: Array
    chunk_offset: Array
    rank: Array
    end: Array
    begin: Array
    first_step: Array
    line_begin: Array
    line_end: Array
    first_split: Array
    num_splits: Array
    used_tokens: Array

    @classmethod
    def load(cls, tiles: jax.Ref, index: Array) -> Self:
        """Loads a row of `TaskMap.tiles` within a kernel."""
        return cls(*[tiles[index, column] for column in range(len(cls._fields))])

    @classmethod
    def load_one(cls, tiles: jax.Ref, index: Array, field: str) -> Array:
        """Loads one field of a row: fewer operations to compile."""
        return tiles[index, cls._fields.index(field)]


class Link(NamedTuple):
    """Splits that a tile takes a part in, and its first row in them.

    Columns that follow those of a `Tile`.
    """

    first_split: Array
    num_splits: Array
    first_row: Array

    @classmethod
    def load(cls, tiles: jax.Ref, index: Array) -> Self:
        """Loads the link of a tile within a kernel."""
        first = len(Tile._fields)
        return cls(*[tiles[index, first + column] for column in range(len(cls._fields))])


class Worker(NamedTuple):
    """Columns of `TaskMap.lanes`: the tiles of a lane, and its steps on the line."""

    first_tile: Array
    last_tile: Array
    line_begin: Array
    line_end: Array

    @classmethod
    def load(cls, workers: jax.Ref, index: Array) -> Self:
        """Loads a row of `TaskMap.lanes` within a kernel."""
        return cls(*[workers[index, column] for column in range(len(cls._fields))])


class TaskMap(NamedTuple):
    """The work of a call.

    tiles: a `Tile` per row.
    workers: a `Worker` per row.
    num_splits: the most splits that there can be.
    """

    tiles: Int32[Array, "tiles fields"]
    workers: Int32[Array, "workers fields"]
    num_splits: int


def share_out(
    tiles: QueryTiles, num_workers: int, used_tokens: Array, fixed: "FixedSplits | None" = None
) -> TaskMap:
    """Divides the steps of tiles among lanes; with ``fixed``, in whole segments of fixed ranges."""
    first_steps, num_tiles = lax.div(tiles.begins, STEP), tiles.begins.shape[0]
    steps = lax.div(tiles.ends + (STEP - 1), STEP) - first_steps
    # Tiles without keys, such as those of padding, take none: each would take all of its latencies.
    steps = jnp.where(tiles.ends > tiles.begins, steps, 0)
    line_ends = running_sum(steps)
    line_begins, total = line_ends - steps, line_ends[-1]
    # ``longer`` lanes have one step more.
    least, longer = lax.div(total, num_workers), lax.rem(total, num_workers)
    workers = jnp.arange(num_workers)
    begins = workers * least + jnp.minimum(workers, longer)
    ends = begins + least + (workers < longer).astype(jnp.int32)

    def worker_of(step: Array) -> Array:
        later = step - longer * (least + 1)
        shorter = longer + lax.div(later, jnp.maximum(least, 1))
        return jnp.where(later < 0, lax.div(step, least + 1), shorter)

    if fixed is None:
        first_worker, last_worker = worker_of(line_begins), worker_of(line_ends - 1)
        first_splits = first_worker + jnp.arange(num_tiles)
        num_splits = jnp.where(steps > 0, last_worker - first_worker + 1, 0)
        most = num_tiles + num_workers
    else:
        begins = _to_splits((line_begins, line_ends, first_steps), begins, fixed)
        ends = jnp.append(begins[1:], total)
        last = lax.div(first_steps + steps - 1, fixed.steps)
        num_splits = jnp.where(steps > 0, last - lax.div(first_steps, fixed.steps) + 1, 0)
        first_splits = jnp.arange(num_tiles) * fixed.per_tile
        most = num_tiles * fixed.per_tile
    busy = begins < ends
    worker = Worker(
        first_tile=jnp.where(busy, count_ended(line_ends, begins), 0),
        last_tile=jnp.where(busy, count_ended(line_ends, ends - 1), -1),
        line_begin=begins,
        line_end=ends,
    )
    tile = Tile(
        request=tiles.requests,
        token=tiles.tokens,
        skip=tiles.skips,
        count=tiles.counts,
        position=tiles.positions,
        chunk_offset=tiles.chunk_offsets,
        rank=tiles.ranks,
        end=tiles.ends,
        begin=tiles.begins,
        first_step=first_steps,
        line_begin=line_begins,
        line_end=line_ends,
        first_split=first_splits,
        num_splits=num_splits,
        used_tokens=jnp.broadcast_to(used_tokens, steps.shape),
    )
    return TaskMap(jnp.stack(tile, axis=1), jnp.stack(worker, axis=1), most)


class FixedSplits(NamedTuple):
    """Splits of ``steps`` steps each from position 0 on; a tile has at most ``per_tile``."""

    steps: int
    per_tile: int

    @classmethod
    def from_config(cls, config: Config, table_width: int) -> Self | None:
        """Returns the segments of a call; None if lanes decide where a segment ends."""
        steps = split_steps(config)
        if steps is None:
            return None
        return cls(steps, -(-table_width * config.page_tokens // (steps * STEP)))


def _to_splits(line: tuple[Array, Array, Array], places: Array, fixed: FixedSplits) -> Array:
    """Transfers places on the line of all steps to the nearest beginning or end of a segment."""
    line_begins, line_ends, first_steps = line
    tile = jnp.minimum(count_ended(line_ends, places), line_ends.shape[0] - 1)
    shift = (first_steps - line_begins)[tile]  # from places to steps
    step = places + shift
    below = jnp.maximum(step // fixed.steps * fixed.steps, first_steps[tile])
    above = jnp.minimum((step // fixed.steps + 1) * fixed.steps, line_ends[tile] + shift)
    moved = jnp.where(step - below <= above - step, below, above) - shift
    return jnp.where(places < line_ends[-1], moved, places)


def running_sum(counts: Array) -> Array:
    """Returns the sums of counts up to each of them."""
    if counts.size > MAX_COMPARED:
        return jnp.cumsum(counts)
    index = jnp.arange(counts.size)  # one kernel, where a scan takes several
    return jnp.where(index[None] <= index[:, None], counts[None], 0).sum(axis=1)
