"""Prefixes that requests share: tiles whose rows are the queries of several requests."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.prefill_tasks import QUERIES, PrefillTile, has_holes
from pallas_kernels._paged_attention.requests import SharedPrefixes
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.tasks import STEP, Link, TaskMap, running_sum
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    QueryTiles,
    count_ended,
    one_query_each,
)

LATENT_ROWS = 64  # of a tile; others are as large as in prefill
MAX_LATENT_GROUP = 32  # query heads of latent rows


class SharedTiles(NamedTuple):
    """Tiles of the parts that requests share, and where each request is in them.

    tiles: rows of a tile are queries of ``size`` requests of one group; all see keys 0 to ``ends``.
    requests: the request of each query of a tile; any, past its count.
    request_tiles: the tile of each request; -1 for none.
    slots: the slot of each request in its tile.
    lens: shared tokens of each request; 0 for none.
    """

    tiles: QueryTiles
    requests: Int32[Array, "tiles size"]
    request_tiles: Int32[Array, " requests"]
    slots: Int32[Array, " requests"]
    lens: Int32[Array, " requests"]


class PackedRows(NamedTuple):
    """Rows of shared tiles one after another; each tile begins at a multiple of 8.

    requests, heads: the request of each row, and the query head within its KV head; any, of rows
      to spare, of which there are enough for a tile to be read from any row on.
    first_rows: the first row of each tile.
    """

    requests: Int32[Array, " rows"]
    heads: Int32[Array, " rows"]
    first_rows: Int32[Array, " tiles"]

    @classmethod
    def from_tiles(cls, config: Config, shared: SharedTiles) -> Self:
        stride, counts = row_stride(config), shared.tiles.counts
        sizes = -(-counts * stride // 8) * 8
        ends = running_sum(sizes)
        num_used = shared.request_tiles.shape[0] * stride + 8 * counts.shape[0]  # at most
        row = jnp.arange(-(-num_used // 8) * 8 + QUERIES)
        tile = jnp.minimum(count_ended(ends, row), counts.shape[0] - 1)
        within = row - (ends - sizes)[tile]
        slot = jnp.minimum(within // stride, shared.tiles.size - 1)
        heads = jnp.minimum(within % stride, config.group - 1)
        return cls(shared.requests[tile, slot], heads, ends - sizes)

    def take(self, queries: Array, config: Config) -> Array:
        """Returns the rows of queries, [rows, kv_heads, K]."""
        by_group = queries.reshape(-1, config.kv_heads, config.group, config.key_width)
        return by_group[self.requests, :, self.heads]


class SharedSplits(NamedTuple):
    """The splits of shared tiles, and which of them each request takes a part in.

    links: a `Link` per row.
    splits: of the shared tiles.
    """

    links: Int32[Array, "requests 3"]
    splits: PartialSoftmax[Array]

    @classmethod
    def from_tiles(
        cls, config: Config, shared: SharedTiles, spans: Array, splits: PartialSoftmax[Array]
    ) -> Self:
        """Returns the splits, given int32[N, 2]: the first of each tile, and their number."""
        found = shared.request_tiles >= 0
        span = spans[jnp.maximum(shared.request_tiles, 0)]
        link = Link(
            first_split=span[:, 0],
            num_splits=jnp.where(found, span[:, 1], 0),
            first_row=shared.slots * row_stride(config),
        )
        return cls(jnp.stack(link, axis=1), splits)

    def join(self, tasks: TaskMap) -> TaskMap:
        """Returns tasks with the links of each tile after its numbers: one array, one launch."""
        return tasks._replace(tiles=jnp.concatenate([tasks.tiles, self.links], axis=1))


def row_stride(config: Config) -> int:
    """Returns the rows from one request of a tile to the next: even, as pairs are loaded."""
    return config.group + config.group % 2


def is_worth_sharing(config: Config) -> bool:
    """Returns whether reading takes longer than products, which fails for wide latent vectors."""
    return not config.values_in_keys or config.group <= MAX_LATENT_GROUP


def tile_size(config: Config) -> int:
    """Returns the requests of a tile: as many as fill its rows."""
    return max(1, (LATENT_ROWS if config.values_in_keys else QUERIES) // row_stride(config))


def tile_shared(
    arrays: AttentionArrays, config: Config, shared: SharedPrefixes, size: int | None = None
) -> SharedTiles:
    """Cuts groups of requests into tiles of ``size``; None: of as many as fill the rows of one."""
    size, batch = size or tile_size(config), arrays.block_tables.shape[0]
    ends = jnp.clip(shared.ends, 0, shared.members.shape[0])
    counts = jnp.maximum(jnp.diff(ends, prepend=0), 0)
    begins = ends - counts
    member = jnp.arange(shared.members.shape[0])
    group = count_ended(ends, member)
    known = (group < ends.shape[0]) & (shared.members >= 0) & (shared.members < batch)
    group = jnp.minimum(group, ends.shape[0] - 1)
    lens = _lens(arrays, shared, known, group)

    # As groups and members both ascend, tiles are numbered by both, and no sum is needed.
    first_tiles = jnp.arange(ends.shape[0]) + begins // size
    index = jnp.arange(ends.shape[0] + member.shape[0] // size)
    groups = count_ended(first_tiles, index) - 1
    first = begins[groups] + (index - first_tiles[groups]) * size
    used = (first < ends[groups]) & (lens[groups] > 0)
    members = jnp.clip(shared.members, 0, batch - 1)
    slots = jnp.arange(size)[None]
    zeros = jnp.zeros_like(index)
    tiles = QueryTiles(
        size,
        requests=members.at[begins[groups]].get(mode="clip"),
        counts=jnp.where(used, jnp.minimum(ends[groups] - first, size), 0),
        ends=jnp.where(used, lens[groups], 0),
        **dict.fromkeys(("tokens", "skips", "positions", "chunk_offsets", "ranks"), zeros),
        **dict.fromkeys(("begins", "token_tiles", "rows"), zeros),
    )
    # The index of each request among the members, found by comparison: one kernel, no scatter.
    is_member = known & (lens[group] > 0)
    is_member = is_member[None] & (members[None] == jnp.arange(batch)[:, None])
    member_of = jnp.where(is_member, member[None], -1).max(axis=1)
    group_of = group[member_of]
    within, found = member_of - begins[group_of], member_of >= 0
    return SharedTiles(
        tiles,
        requests=members.at[first[:, None] + slots].get(mode="clip"),
        request_tiles=jnp.where(found, first_tiles[group_of] + within // size, -1),
        slots=jnp.where(found, within % size, 0),
        lens=jnp.where(found, lens[group_of], 0),
    )


def split_shared(
    arrays: AttentionArrays,
    config: Config,
    tiles: QueryTiles,
    first_rows: Array,
    keys: int,
    workers: int,
) -> tuple[Array, Array]:
    """Divides the keys of N tiles into about as many equal splits as there are workers.

    Args:
      first_rows: int32[N], of each tile among the queries, a multiple of 8.
      keys: keys of a step.

    Returns:
      int32[N + workers, ...], a `PrefillTile` per split, and int32[N, 2], the first split of each
      tile, and their number.
    """
    steps = -(-tiles.ends // keys)
    each = jnp.maximum(-(-steps.sum() // workers), 1)
    counts = -(-steps // each)
    ends = running_sum(counts)
    index = jnp.arange(steps.shape[0] + workers)
    tile_index = jnp.minimum(count_ended(ends, index), steps.shape[0] - 1)
    first = (index - (ends - counts)[tile_index]) * each
    last = jnp.minimum(first + each, steps[tile_index])
    holed = has_holes(arrays, config, tiles)[tile_index]
    zeros = jnp.zeros_like(index)
    kv_split = PrefillTile(
        index=index,
        request=tiles.requests[tile_index],
        octet=first_rows[tile_index] // 8,
        count=tiles.counts[tile_index] * row_stride(config),
        end=tiles.ends[tile_index],
        first_step=first,
        full_begin=first,
        full_end=jnp.where(holed, first, jnp.minimum(last, tiles.ends[tile_index] // keys)),
        last_step=last,
        has_holes=holed.astype(jnp.int32),
        num_tiles=zeros + ends[-1],
        heads_together=zeros + config.kv_heads,
        first_row=jnp.broadcast_to(arrays.pages.first_row(), index.shape),
        **dict.fromkeys(("skip", "position", "chunk_offset", "rank", "begin"), zeros),
    )
    return jnp.stack(kv_split, axis=1), jnp.stack([ends - counts, counts], axis=1)


def own_tiles(arrays: AttentionArrays, config: Config, shared: SharedTiles) -> QueryTiles:
    """Returns one tile per request, of the keys that are not in a shared part."""
    tiles = one_query_each(arrays, config)
    return tiles._replace(begins=jnp.maximum(tiles.begins, shared.lens))


def _lens(arrays: AttentionArrays, shared: SharedPrefixes, known: Array, group: Array) -> Array:
    """Returns the shared tokens of each group: whole steps, and fewer than any member has."""
    groups = jnp.arange(shared.ends.shape[0])[:, None]
    least = arrays.seq_lens.at[shared.members].get(mode="clip") - 1
    of_group = known[None] & (group[None] == groups)
    least = jnp.where(of_group, least[None], jnp.iinfo(jnp.int32).max).min(axis=1)
    return jnp.maximum(jnp.minimum(shared.lens, least), 0) // STEP * STEP
