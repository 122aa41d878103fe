"""The Mosaic GPU implementation of `paged_attention` for latent vectors."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._mosaic import written
from pallas_kernels._paged_attention.decode_shape import (
    SINKS,
    DecodeShape,
    page_and_compute_dtype,
    step_sizes,
)
from pallas_kernels._paged_attention.mla_combine import combine_latents
from pallas_kernels._paged_attention.mla_decode import ROWS, decode_latents, num_workers
from pallas_kernels._paged_attention.mosaic import (
    lse_of_tokens,
    shared_queries,
    tile_numbers,
    tile_queries,
    used_tokens,
)
from pallas_kernels._paged_attention.partial import PartialSoftmax
from pallas_kernels._paged_attention.prefill_tasks import has_holes
from pallas_kernels._paged_attention.requests import SharedPrefixes
from pallas_kernels._paged_attention.rounds import in_rounds
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.shared import (
    SharedSplits,
    own_tiles,
    row_stride,
    tile_shared,
)
from pallas_kernels._paged_attention.tasks import (
    STEP,
    FixedSplits,
    TaskMap,
    Tile,
    share_out,
    spread,
)
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    Cut,
    QueryTiles,
    cut_queries,
    one_query_each,
)

MAX_QUERIES = 8  # of a tile


def attend_latents(arrays: AttentionArrays, config: Config) -> tuple[Array, Array]:
    """Returns [T, heads, V], the output, and float32[T, heads], the log-sum-exp."""
    num_tokens, heads, _ = arrays.queries.shape
    out = jax.new_ref(jnp.empty((num_tokens, heads, config.value_width), config.out_dtype))
    if arrays.shared is not None:
        tiles, common = _attend_shared(arrays, config, arrays.shared)
    elif arrays.query_start_loc is None:
        tiles, common = one_query_each(arrays, config), None
    else:
        tiles, common = cut_queries(arrays, config, Cut(_tile_size(arrays, config))), None
    fixed = FixedSplits.from_config(config, arrays.block_tables.shape[1])
    if _are_alike(arrays, config, fixed):
        config = config.replace(causal=False)  # a request's last token sees all keys
    filled = tiles.size * config.group  # rows past the queries of a tile are empty
    shape = _shape(arrays, config, filled)
    numbers = tile_numbers(arrays, shape)
    given = shape._replace(rows=filled) if filled < ROWS and filled % 8 == 0 else shape

    def run(tiles: QueryTiles, queries: Array) -> Array:
        tasks, splits = _decode(arrays, shape, tiles, queries, numbers, fixed)
        tasks = tasks if common is None else common.join(tasks)
        used = numbers[:, : SINKS + filled]
        return combine_latents(config, tasks, splits, used, out, common, arrays.seq_lens)

    lse = in_rounds(run, tiles, tile_queries(arrays.queries, tiles, given), config, fixed)
    return written(out), lse_of_tokens(lse, tiles, config)


def _attend_shared(
    arrays: AttentionArrays, config: Config, shared: SharedPrefixes
) -> tuple[QueryTiles, SharedSplits]:
    """Attends to what requests share; returns the tiles of the rest, and the splits."""
    parts = tile_shared(arrays, config, shared)
    shape = _shape(arrays, config.replace(causal=False), parts.tiles.size * row_stride(config))
    queries = shared_queries(arrays.queries, parts, config, shape.rows).astype(shape.compute)
    queries = jnp.swapaxes(queries, 1, 2)
    numbers = tile_numbers(arrays, shape)
    tasks, splits = _decode(arrays, shape, parts.tiles, queries, numbers, None)
    tile = Tile(*tasks.tiles.T)
    spans = jnp.stack([tile.first_split, tile.num_splits], axis=1)
    return own_tiles(arrays, config, parts), SharedSplits.from_tiles(config, parts, spans, splits)


def _shape(arrays: AttentionArrays, config: Config, rows: int) -> DecodeShape:
    page, compute = page_and_compute_dtype(arrays)
    return DecodeShape(config, step_sizes(arrays, STEP), -(-rows // ROWS) * ROWS, page, compute)


def _decode(
    arrays: AttentionArrays,
    shape: DecodeShape,
    tiles: QueryTiles,
    queries: Array,
    numbers: Array,
    fixed: FixedSplits | None,
) -> tuple[TaskMap, PartialSoftmax[Array]]:
    """Attends from tiles; returns their tasks, and the softmax of each split."""
    tables, workers = arrays.block_tables, num_workers(shape)
    if shape.steps.by_row:  # whole steps of it are loaded
        tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % STEP)), constant_values=-1)
    if _are_alike(arrays, shape.config, fixed):
        tasks = spread(tables.shape[0], tables.shape[1] // STEP, workers)
        bounds = arrays.seq_lens
    else:
        tasks = share_out(tiles, workers, used_tokens(arrays), fixed)
        bounds = _full_steps(arrays, shape.config, tiles)
        bounds = tiles.ends if shape.steps.by_row else bounds
    return tasks, decode_latents(shape, tasks, bounds, tables, queries, arrays.pages, numbers)


def _are_alike(arrays: AttentionArrays, config: Config, fixed: FixedSplits | None) -> bool:
    """Returns whether each request has one query and about as many keys: tokens chosen for it."""
    alone = arrays.query_start_loc is None and arrays.shared is None and fixed is None
    limited = config.sliding_window is not None or config.chunk_size is not None
    return alone and config.page_tokens == 1 and not limited and config.ranks == 1


def _tile_size(arrays: AttentionArrays, config: Config) -> int:
    """Returns the queries of a tile: as many as a request has on average, or as fill its rows."""
    per_request = -(-arrays.queries.shape[0] // arrays.block_tables.shape[0])
    usual = 1 << (per_request - 1).bit_length()
    return min(MAX_QUERIES, max(usual, ROWS // config.group))


def _full_steps(arrays: AttentionArrays, config: Config, tiles: QueryTiles) -> Array:
    """Returns int32[N]: below this step all queries of a tile see all keys, none in a hole.

    With and without masks, scores differ in their last bits, and the other queries of a tile decide
    which steps have masks: for reproducible bits, all have.
    """
    limited = config.sliding_window is not None or config.chunk_size is not None
    if limited or config.reproducible or config.page_tokens == 1:
        return jnp.zeros_like(tiles.positions)
    seen_by_all = tiles.ends
    if config.causal:
        seen_by_all = config.allocated_before(tiles.positions + 1, arrays.rank)
        seen_by_all = jnp.clip(seen_by_all, 0, tiles.ends)
    return jnp.where(has_holes(arrays, config, tiles), 0, seen_by_all // STEP)
