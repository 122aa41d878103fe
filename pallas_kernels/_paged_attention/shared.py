"""Beginnings that requests share: tiles whose rows are the queries of several requests."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.tasks import STEP, TaskMap, Tile, running_sum
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    AttentionRule,
    QueryTiles,
    SharedPrefixes,
    count_ended,
    one_query_each,
)

ROWS, FEW_ROWS, WIDE = 64, 32, 128  # of a tile; few if groups are small or values are wider
MAX_LATENT_GROUP = 32  # query heads of latent rows


class SharedTiles(NamedTuple):
    """N tiles of the parts that requests share, and where each of B requests is in them.

    tiles: rows of a tile are queries of ``size`` requests of one group; all see keys 0 to ``ends``.
    requests: int32[N, size], the request of each query of a tile; any, past its count.
    of_request: int32[B], the tile of each request; -1 for none.
    slots: int32[B], the place of each request in its tile.
    lens: int32[B], shared tokens of each request; 0 for none.
    """

    tiles: QueryTiles
    requests: Array
    of_request: Array
    slots: Array
    lens: Array


class SharedSegments(NamedTuple):
    """The segments of shared tiles, and which of them each of B requests takes a part in; or refs.

    links: int32[B, 3], a `Link` per row.
    segments: of decoding the shared tiles.
    """

    links: Any
    segments: PartialSoftmax

    @classmethod
    def of(
        cls, rule: AttentionRule, shared: SharedTiles, tasks: TaskMap, segments: PartialSoftmax
    ) -> Self:
        """Returns the segments, after the tiles of ``tasks`` were decoded."""
        found = shared.of_request >= 0
        tile = Tile(*tasks.tiles[jnp.maximum(shared.of_request, 0)].T)
        link = Link(
            first_segment=tile.first_segment,
            num_segments=jnp.where(found, tile.num_segments, 0),
            first_row=shared.slots * row_stride(rule),
        )
        return cls(jnp.stack(link, axis=1), segments)


class Link(NamedTuple):
    """Segments that a request takes a part in, and its first row in them."""

    first_segment: Array
    num_segments: Array
    first_row: Array

    @classmethod
    def load(cls, links: jax.Ref, index: Array) -> Self:
        """Loads a row of `SharedSegments.links` within a kernel."""
        return cls(*[links[index, column] for column in range(len(cls._fields))])


def row_stride(rule: AttentionRule) -> int:
    """Returns the rows from one request of a tile to the next: even, as pairs are loaded."""
    return rule.group + rule.group % 2


def is_worth_sharing(rule: AttentionRule) -> bool:
    """Returns whether reading takes longer than the products of latent rows, of which some do."""
    return not rule.values_in_keys or rule.group <= MAX_LATENT_GROUP


def tile_size(rule: AttentionRule, shared: SharedPrefixes) -> int:
    """Returns the requests of a tile: as many as fill its rows.

    Twice as many rows take almost twice the time, so that few are better for groups that fit.
    """
    stride = row_stride(rule)
    usual = shared.members.shape[0] // shared.ends.shape[0] * stride  # rows of a group
    is_small = usual <= FEW_ROWS or rule.value_width > WIDE
    rows = FEW_ROWS if is_small and not rule.values_in_keys else ROWS
    return max(1, rows // stride)


def tile_shared(
    arrays: AttentionArrays, rule: AttentionRule, shared: SharedPrefixes
) -> SharedTiles:
    """Cuts groups of requests into tiles of as many as fill the rows of one."""
    size, batch = tile_size(rule, shared), arrays.block_tables.shape[0]
    ends = jnp.clip(shared.ends, 0, shared.members.shape[0])
    counts = jnp.maximum(jnp.diff(ends, prepend=0), 0)
    begins = ends - counts
    place = jnp.arange(shared.members.shape[0], dtype=jnp.int32)
    group = count_ended(ends, place)
    known = (group < ends.shape[0]) & (shared.members >= 0) & (shared.members < batch)
    group = jnp.minimum(group, ends.shape[0] - 1)
    lens = _lens(arrays, shared, known, group)

    tile_ends = running_sum(-(-counts // size))
    first_tiles = tile_ends + counts // -size
    index = jnp.arange(ends.shape[0] + place.shape[0] // size, dtype=jnp.int32)
    of_tile = jnp.minimum(count_ended(tile_ends, index), ends.shape[0] - 1)
    first = begins[of_tile] + (index - first_tiles[of_tile]) * size
    used = (index < tile_ends[-1]) & (lens[of_tile] > 0)
    members = jnp.clip(shared.members, 0, batch - 1)
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(index)
    tiles = QueryTiles(
        size,
        requests=members.at[begins[of_tile]].get(mode="clip"),
        tokens=zeros,
        skips=zeros,
        counts=jnp.where(used, jnp.clip(ends[of_tile] - first, 0, size), 0),
        positions=zeros,
        chunk_offsets=zeros,
        ranks=zeros,
        begins=zeros,
        ends=jnp.where(used, lens[of_tile], 0),
        of_token=zeros,
        rows=zeros,
    )
    # The place of each request among the members, found by comparison: one kernel, no scatter.
    is_place = known & (lens[group] > 0)
    is_place = is_place[None] & (members[None] == jnp.arange(batch, dtype=jnp.int32)[:, None])
    place_of = jnp.where(is_place, place[None], -1).max(axis=1)
    group_of = group[place_of]
    within, found = place_of - begins[group_of], place_of >= 0
    return SharedTiles(
        tiles,
        requests=members.at[first[:, None] + slots].get(mode="clip"),
        of_request=jnp.where(found, first_tiles[group_of] + within // size, -1),
        slots=jnp.where(found, within % size, 0),
        lens=jnp.where(found, lens[group_of], 0),
    )


def own_tiles(arrays: AttentionArrays, rule: AttentionRule, shared: SharedTiles) -> QueryTiles:
    """Returns one tile per request, of the keys that are not in a shared part."""
    tiles = one_query_each(arrays, rule)
    return tiles._replace(begins=jnp.maximum(tiles.begins, shared.lens))


def _lens(arrays: AttentionArrays, shared: SharedPrefixes, known: Array, group: Array) -> Array:
    """Returns the shared tokens of each group: whole steps, and fewer than any member has."""
    groups = jnp.arange(shared.ends.shape[0], dtype=jnp.int32)[:, None]
    least = arrays.seq_lens.at[shared.members].get(mode="clip") - 1
    of_group = known[None] & (group[None] == groups)
    least = jnp.where(of_group, least[None], jnp.iinfo(jnp.int32).max).min(axis=1)
    return jnp.maximum(jnp.minimum(shared.lens, least), 0) // STEP * STEP
