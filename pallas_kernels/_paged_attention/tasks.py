"""The task map of decoding, computed on the device: steps of keys, divided evenly among workers.

The steps of all tiles form one line. A worker, one thread block per KV head, takes an equal part of
the line, so that a long request takes no more time than its bytes cost. The part of a tile that one
worker computes is a split. Worker w and tile t share at most one split, number w + t, because both
ascend along the line.

For bits that do not depend on the other requests, splits are fixed ranges of positions instead,
and a worker takes whole splits. The splits of a tile are numbered from ``first_split`` on.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tiles import QueryTiles, count_ended

STEP = 64  # keys of a step
MAX_COMPARED = 2048  # tiles whose numbers are compared in pairs
# Steps of a fixed split. Splits of latent vectors are longer, because their results are wider.
SPLIT, LATENT_SPLIT = 16, 32


def split_steps(config: Config) -> int | None:
    """Returns the steps of a fixed split; None if workers decide where a split ends."""
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
    first_split, num_splits: the splits of the tile.
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


class Link(NamedTuple):
    """Splits that a tile takes a part in, and its first row in them.

    Columns after the columns of a `Tile`.
    """

    first_split: Array
    num_splits: Array
    first_row: Array


class Worker(NamedTuple):
    """Columns of `TaskMap.workers`: the tiles of a worker, and its steps on the line."""

    first_tile: Array
    last_tile: Array
    line_begin: Array
    line_end: Array


def load_row[T: NamedTuple](
    kind: type[T], table: jax.Ref, index: Array | int, first_column: int = 0
) -> T:
    """Loads a record from a row of a table of such records, within a kernel."""
    columns = range(first_column, first_column + len(kind._fields))
    return kind(*[table[index, column] for column in columns])


def load_field(kind: type[NamedTuple], table: jax.Ref, index: Array | int, field: str) -> Array:
    """Loads one field of a record: fewer operations to compile."""
    return table[index, kind._fields.index(field)]


class TaskMap(NamedTuple):
    """The work of a call.

    tiles: a `Tile` per row.
    workers: a `Worker` per row.
    num_splits: the most splits that there can be.
    even: the steps of each worker, if they are fixed, and more than the tiles may have; else None.
    """

    tiles: Int32[Array, "tiles fields"]
    workers: Int32[Array, "workers fields"]
    num_splits: int
    even: "Even | None" = None


class Even(NamedTuple):
    """The steps of each worker: ``least``, and one more for the first ``longer`` workers."""

    least: Array | int
    longer: Array | int

    def worker_of(self, index: Array) -> Array:
        """Returns the worker that takes a step, by its index on the line."""
        later = index - self.longer * (self.least + 1)
        shorter = self.longer + lax.div(later, jnp.maximum(self.least, 1))
        return jnp.where(later < 0, lax.div(index, self.least + 1), shorter)

    def num_splits(self, tile: Tile, length: Array) -> Array:
        """Returns the splits of a tile that sees the first ``length`` keys alone."""
        steps = jnp.minimum(lax.div(length + (STEP - 1), STEP), tile.line_end - tile.line_begin)
        last = self.worker_of(tile.line_begin + steps - 1)
        return jnp.where(steps > 0, last - self.worker_of(tile.line_begin) + 1, 0)


class _Line(NamedTuple):
    """The steps of all tiles, one tile after another: where each tile begins and ends on the line.

    first_steps: the request's first step that each tile sees.
    """

    begins: Int32[Array, " tiles"]
    ends: Int32[Array, " tiles"]
    first_steps: Int32[Array, " tiles"]

    @classmethod
    def from_tiles(cls, tiles: QueryTiles) -> Self:
        """Lines up the steps of tiles."""
        first_steps = lax.div(tiles.begins, STEP)
        steps = lax.div(tiles.ends + (STEP - 1), STEP) - first_steps
        # Tiles without keys, such as padding, take none: each would take all of its latencies.
        steps = jnp.where(tiles.ends > tiles.begins, steps, 0)
        ends = running_sum(steps)
        return cls(ends - steps, ends, first_steps)


def share_out(
    tiles: QueryTiles, num_workers: int, used_tokens: Array, fixed: "FixedSplits | None" = None
) -> TaskMap:
    """Divides the steps of tiles among workers; with ``fixed``, in whole splits of fixed ranges."""
    line = _Line.from_tiles(tiles)
    total = line.ends[-1]
    # The first ``longer`` workers have one step more than the others.
    least, longer = lax.div(total, num_workers), lax.rem(total, num_workers)
    workers = jnp.arange(num_workers)
    begins = workers * least + jnp.minimum(workers, longer)
    ends = begins + least + (workers < longer).astype(jnp.int32)
    if fixed is None:
        first_splits, num_splits = _number_splits(line, least, longer)
        most = tiles.begins.shape[0] + num_workers
    else:
        begins = _to_splits(line, begins, fixed)
        ends = jnp.append(begins[1:], total)
        first_splits, num_splits = _number_fixed_splits(line, fixed)
        most = tiles.begins.shape[0] * fixed.per_tile
    busy = begins < ends
    worker = Worker(
        first_tile=jnp.where(busy, count_ended(line.ends, begins), 0),
        last_tile=jnp.where(busy, count_ended(line.ends, ends - 1), -1),
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
        first_step=line.first_steps,
        line_begin=line.begins,
        line_end=line.ends,
        first_split=first_splits,
        num_splits=num_splits,
        used_tokens=jnp.broadcast_to(used_tokens, line.ends.shape),
    )
    return TaskMap(jnp.stack(tile, axis=1), jnp.stack(worker, axis=1), most)


def spread(num_tiles: int, steps: int, num_workers: int) -> TaskMap:
    """Divides steps of tiles, as many of each and one query of a request, before the call.

    Nothing is computed on the device. A tile may turn out shorter: some workers have less then.
    """
    total = num_tiles * steps
    # No more than it takes for the most steps of one: fewer workers serve two tiles then.
    num_workers = max(1, -(-total // max(1, -(-total // num_workers))))
    least, longer = divmod(total, num_workers)
    workers = np.arange(num_workers)
    begins = workers * least + np.minimum(workers, longer)
    ends = begins + least + (workers < longer)
    first_tiles, last_tiles = begins // max(steps, 1), (ends - 1) // max(steps, 1)
    busy = begins < ends
    by_worker = np.where(busy, first_tiles, 0), np.where(busy, last_tiles, -1), begins, ends
    index = np.arange(num_tiles)
    first = np.searchsorted(ends, index * steps, side="right")
    last = np.searchsorted(ends, (index + 1) * steps - 1, side="right")
    by_tile = dict.fromkeys(Tile._fields, np.zeros_like(index)) | {
        "request": index,
        "token": index,
        "count": np.ones_like(index),
        "line_begin": index * steps,
        "line_end": (index + 1) * steps,
        "first_split": first + index,
        "num_splits": last - first + 1,
        "used_tokens": np.full_like(index, num_tiles),
    }
    tiles, by_workers = [
        jnp.asarray(np.stack(columns, axis=1), jnp.int32)
        for columns in (list(by_tile.values()), by_worker)
    ]
    return TaskMap(tiles, by_workers, num_tiles + num_workers, Even(least, longer))


def _number_splits(line: _Line, least: Array, longer: Array) -> tuple[Array, Array]:
    """Returns the first split of each tile, and how many it has, if workers decide where."""
    even = Even(least, longer)
    first, last = even.worker_of(line.begins), even.worker_of(line.ends - 1)
    numbers = first + jnp.arange(first.shape[0])
    return numbers, jnp.where(line.ends > line.begins, last - first + 1, 0)


def _number_fixed_splits(line: _Line, fixed: "FixedSplits") -> tuple[Array, Array]:
    """Returns the first split of each tile, and how many it has, of fixed ranges."""
    steps = line.ends - line.begins
    last = lax.div(line.first_steps + steps - 1, fixed.steps)
    num_splits = jnp.where(steps > 0, last - lax.div(line.first_steps, fixed.steps) + 1, 0)
    return jnp.arange(steps.shape[0]) * fixed.per_tile, num_splits


class FixedSplits(NamedTuple):
    """Splits of ``steps`` steps each from position 0 on; a tile has at most ``per_tile``."""

    steps: int
    per_tile: int

    @classmethod
    def from_config(cls, config: Config, table_width: int) -> Self | None:
        """Returns the splits of a call; None if workers decide where a split ends."""
        steps = split_steps(config)
        if steps is None:
            return None
        return cls(steps, -(-table_width * config.page_tokens // (steps * STEP)))


def _to_splits(line: _Line, indices: Array, fixed: FixedSplits) -> Array:
    """Moves indices on the line to the nearest beginning or end of a split."""
    tile = jnp.minimum(count_ended(line.ends, indices), line.ends.shape[0] - 1)
    shift = (line.first_steps - line.begins)[tile]  # from indices to steps
    step = indices + shift
    below = jnp.maximum(step // fixed.steps * fixed.steps, line.first_steps[tile])
    above = jnp.minimum((step // fixed.steps + 1) * fixed.steps, line.ends[tile] + shift)
    moved = jnp.where(step - below <= above - step, below, above) - shift
    return jnp.where(indices < line.ends[-1], moved, indices)


def running_sum(counts: Array) -> Array:
    """Returns the sums of counts up to each of them."""
    if counts.size > MAX_COMPARED:
        return jnp.cumsum(counts)
    index = jnp.arange(counts.size)  # one kernel, where a scan takes several
    return jnp.where(index[None] <= index[:, None], counts[None], 0).sum(axis=1)
