"""The Mosaic GPU implementation of `paged_attention`: its kernels and their operands."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _capability
from pallas_kernels._mosaic import Ref, written
from pallas_kernels._paged_attention import prefill, prefill_mma
from pallas_kernels._paged_attention.combine import combine
from pallas_kernels._paged_attention.common import LOG2E, PartialSoftmax
from pallas_kernels._paged_attention.decode import decode
from pallas_kernels._paged_attention.decode_block import Outputs
from pallas_kernels._paged_attention.decode_shape import (
    DecodeShape,
    decode_shape,
    decode_size,
    max_queries,
    may_have_many,
    page_and_compute_dtype,
    share_latents,
    step_sizes,
)
from pallas_kernels._paged_attention.limits import list_kernels
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.prefill import PrefillShape
from pallas_kernels._paged_attention.prefill_block import PrefillArrays, launch
from pallas_kernels._paged_attention.prefill_mma_shape import MmaShape
from pallas_kernels._paged_attention.prefill_tasks import (
    QUERIES,
    ROWS,
    list_halves,
    prefill_tiles,
    split_tiles,
)
from pallas_kernels._paged_attention.requests import SharedPrefixes
from pallas_kernels._paged_attention.rounds import in_rounds
from pallas_kernels._paged_attention.rule import Config
from pallas_kernels._paged_attention.shared import (
    PackedRows,
    SharedSplits,
    SharedTiles,
    own_tiles,
    row_stride,
    split_shared,
    tile_shared,
)
from pallas_kernels._paged_attention.tasks import STEP, FixedSplits, Tile, share_out
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    Cut,
    QueryTiles,
    cut_queries,
    one_query_each,
)
from pallas_kernels._paged_attention.token_heads import TokenHeadRow
from pallas_kernels._paged_attention.widen_pages import widen_pages
from pallas_kernels._paged_attention.widened import count_places, describe_places, list_pages

MAX_ELEMENTS = 128 * 128  # keys of a step times the width of values, limited by registers


def attend_mosaic(arrays: AttentionArrays, config: Config) -> tuple[Array, Array]:
    """Returns [T, heads, V], the output, and float32[T, heads], the log-sum-exp.

    One kernel attends from requests with few queries, another from requests with many.
    """
    if config.values_in_keys:
        arrays, config = share_latents(with_whole_steps(arrays, config), config)
    num_tokens, heads, _ = arrays.queries.shape
    out = jax.new_ref(jnp.empty((num_tokens, heads, config.value_width), config.out_dtype))
    size, has_prefill = decode_size(arrays, config), "prefill" in list_kernels(arrays, config)
    if arrays.shared is not None:
        attend_shared = _attend_shared if has_prefill else _decode_shared
        lse = attend_shared(arrays, config, arrays.shared, out)
    elif has_prefill:
        lse = _decode_and_prefill(arrays, config, size, out)
    elif may_have_many(arrays, config, size):
        lse = _decode_all(arrays, config, size, out)
    else:
        tiles = _decode_tiles(arrays, config, Cut(size))
        lse = lse_of_tokens(_decode(arrays, config, tiles, out), tiles, config)
    return written(out), lse


def _decode_and_prefill(arrays: AttentionArrays, config: Config, size: int, out: Ref) -> Array:
    """Writes the output of all queries, and returns their log-sum-exp."""
    tiles = _decode_tiles(arrays, config, Cut(size, is_single=True))
    lse = lse_of_tokens(_decode(arrays, config, tiles, out), tiles, config)
    cut = Cut(QUERIES, align=8, least=size + 1)
    if config.token_head_row is not None:
        return _prefill_widened(arrays, config, config.token_head_row, cut, out, lse)
    tiles = cut_queries(arrays, config, cut)
    lse_prefill = _prefill(arrays, config, tiles, out)
    return jnp.where(tiles.token_tiles[:, None] < 0, lse, lse_prefill)


def _prefill_widened(
    arrays: AttentionArrays, config: Config, row: TokenHeadRow, cut: Cut, out: Ref, lse: Array
) -> Array:
    """Writes the output of prompts, from pages in 16 bits, and adds their log-sum-exp to others.

    The kernel of decodes takes the prompts for whose pages there is no room.
    """
    places, may_exceed = count_places(arrays, config, cut.least)
    held = list_pages(arrays, config, cut.least, places)
    pages = describe_places(arrays, config, places)
    pages = widen_pages(arrays.pages, row, held.ids, held.count, pages)
    widened = arrays._replace(pages=pages, block_tables=held.block_tables)
    tiles = cut_queries(widened, config, cut, held.fits)
    found = _prefill(widened, config.replace(row_packing=None), tiles, out)
    lse = jnp.where(tiles.token_tiles[:, None] < 0, lse, found)
    if may_exceed:
        of_rest = Cut(max_queries(arrays, config), least=cut.least)
        tiles = cut_queries(arrays, config, of_rest, ~held.fits)
        found = lse_of_tokens(_decode(arrays, config, tiles, out), tiles, config)
        lse = jnp.where(tiles.token_tiles[:, None] < 0, lse, found)
    return lse


def _prefill(arrays: AttentionArrays, config: Config, tiles: QueryTiles, out: Ref) -> Array:
    """Writes the output of tiles; returns their log-sum-exp by token, float32[T, heads]."""
    shape, num_tiles = _prefill_shape(arrays, config), tiles.requests.shape[0]
    queries = jnp.pad(arrays.queries, ((0, -arrays.queries.shape[0] % 8), (0, 0), (0, 0)))
    queries = queries.astype(shape.compute)
    tile_splits = split_tiles(arrays, config, tiles, shape.steps.size)
    task_map = prefill_tiles(arrays, config, tiles, shape.steps.size, tile_splits)
    inputs = _prefill_arrays(arrays, config, task_map)
    lse, *splits = _launch(
        *(shape, inputs, queries, arrays.pages),
        num_tiles=num_tiles,
        num_splits=2 * tile_splits.workers if tile_splits else 0,
        out=out,
    )
    # The rows of a warpgroup that was moved back to lie within the queries are shifted, too.
    warpgroup, row = lax.div(tiles.rows, ROWS), lax.rem(tiles.rows, ROWS)
    octets = lax.div(tiles.tokens[tiles.token_tiles], 8) + warpgroup * (ROWS // 8)
    row += jnp.maximum(octets - (queries.shape[0] - ROWS) // 8, 0) * 8
    found = lse[tiles.token_tiles, :, warpgroup, row]
    if tile_splits is None:
        return found
    halves, slots = list_halves(tiles, tile_splits, queries.shape[0])
    lse = _combine_splits(arrays, config, halves, PartialSoftmax(*splits), out)
    slot = slots[tiles.token_tiles]
    return jnp.where(slot[:, None] < 0, found, lse[slot, warpgroup, :, row])


def _combine_splits(
    arrays: AttentionArrays,
    config: Config,
    halves: Array,
    splits: PartialSoftmax[Array],
    out: Ref,
) -> Array:
    """Writes the output of N divided tiles; returns float32[N, 2, heads, 64], the log-sum-exp."""
    per_head = config.replace(kv_heads=config.kv_heads * config.group, group=1)
    numbers = _numbers_of_heads(arrays, config)
    numbers = jnp.pad(numbers, ((0, 0), (0, ROWS - 1)), mode="edge")  # the sink of each row
    num_halves, num_splits = halves.shape[0], splits.out.shape[0]
    lse = jnp.empty((num_halves, per_head.kv_heads, ROWS), jnp.float32)
    outputs = Outputs(out, jax.new_ref(lse))
    given = per_head, halves, None, numbers, outputs, splits
    combine(*given, num_workers=num_halves * num_splits // 2, finished=False)
    return written(outputs.lse).reshape(-1, 2, *lse.shape[1:])


def _decode_all(arrays: AttentionArrays, config: Config, size: int, out: Ref) -> Array:
    """Writes the output of all queries, and returns their log-sum-exp.

    One kernel serves requests of few and of many queries, so that a token has the same bits in a
    decode and in a prompt, or because the GPU has no other. Those of many have larger tiles.
    """
    few = cut_queries(arrays, config, Cut(size, is_single=True))
    many = cut_queries(arrays, config, Cut(max_queries(arrays, config), least=size + 1))
    lse = [
        lse_of_tokens(_decode(arrays, config, tiles, out), tiles, config) for tiles in (few, many)
    ]
    return jnp.where(few.token_tiles[:, None] < 0, lse[1], lse[0])


def _launch(
    shape: PrefillShape | MmaShape,
    inputs: PrefillArrays[Array],
    queries: Array,
    pages: StridedPages,
    **options: Any,
) -> Sequence[Array]:
    """Runs the kernel for many queries; see `launch`."""
    if isinstance(shape, MmaShape):  # cp.async takes slices of matrices
        how, queries = prefill_mma.launch_of(shape), queries.reshape(queries.shape[0], -1)
    else:
        how = prefill.launch_of(shape)
    return launch(how, shape.config, inputs, queries, pages.rows(), **options)


def _prefill_shape(arrays: AttentionArrays, config: Config) -> PrefillShape | MmaShape:
    """Returns the shape of the kernel for many queries, with large steps if they fit."""
    by_mma = MmaShape.choose(arrays, config)
    if by_mma is not None and _capability.instructions_of("prefill") != "wgmma, TMA":
        return by_mma
    large, small = [
        PrefillShape(config, step_sizes(arrays, keys), *page_and_compute_dtype(arrays))
        for keys in (128, 64)
    ]
    fits = large.staged_width and config.value_width * large.keys <= MAX_ELEMENTS
    return large if fits else small


def _prefill_arrays(arrays: AttentionArrays, config: Config, tiles: Array) -> PrefillArrays[Array]:
    return PrefillArrays(tiles, arrays.block_tables, _numbers_of_heads(arrays, config))


def _numbers_of_heads(arrays: AttentionArrays, config: Config) -> Array:
    """Returns the numbers of each query head, as in `PrefillArrays`."""
    scales = jnp.repeat(arrays.key_scale * jnp.float32(config.scale), config.group)
    value_scale = jnp.repeat(arrays.value_scale, config.group)
    no_sinks = jnp.full_like(scales, -jnp.inf)
    sinks = no_sinks if arrays.sinks is None else arrays.sinks * LOG2E
    return jnp.stack([scales, value_scale, sinks], axis=1)


def _decode_tiles(arrays: AttentionArrays, config: Config, cut: Cut) -> QueryTiles:
    if arrays.query_start_loc is None:
        return one_query_each(arrays, config)
    return cut_queries(arrays, config, cut)


def _attend_shared(
    arrays: AttentionArrays, config: Config, shared: SharedPrefixes, out: Ref
) -> Array:
    """Writes the output of one query each; returns their log-sum-exp, float32[T, heads].

    Attends to what requests share for all of them together, by the kernel for many queries, whose
    rows are the query heads of one KV head, and to the rest for each.
    """
    parts = tile_shared(arrays, config, shared)
    rows_config = config.replace(group=1, causal=False)
    shape = _prefill_shape(arrays, rows_config)
    workers = max(1, _capability.max_thread_blocks(1) // config.kv_heads)
    rows = PackedRows.from_tiles(config, parts)
    given = parts.tiles, rows.first_rows, shape.steps.size, workers
    tiles, spans = split_shared(arrays, config, *given)
    queries = rows.take(arrays.queries, config).astype(shape.compute)
    inputs = _prefill_arrays(arrays._replace(sinks=None), rows_config, tiles)
    num_splits = tiles.shape[0]
    splits = _launch(shape, inputs, queries, arrays.pages, num_splits=num_splits)
    splits = PartialSoftmax(*splits)
    common = SharedSplits.from_tiles(config, parts, spans, splits)
    tiles = own_tiles(arrays, config, parts)
    return lse_of_tokens(_decode(arrays, config, tiles, out, common), tiles, config)


def _decode_shared(
    arrays: AttentionArrays, config: Config, shared: SharedPrefixes, out: Ref
) -> Array:
    """Does the same by the kernel of decodes alone, for GPUs without the other."""
    size = max(1, max_queries(arrays, config) * config.group // row_stride(config))
    parts = tile_shared(arrays, config, shared, size)
    shape = decode_shape(arrays, config.replace(causal=False), size * row_stride(config))
    queries = shared_queries(arrays.queries, parts, config, shape.rows).astype(shape.compute)
    queries = jnp.swapaxes(queries, 1, 2)
    tasks = share_out(parts.tiles, shape.num_workers, used_tokens(arrays))
    numbers = tile_numbers(arrays, shape)
    splits = decode(shape, tasks, arrays.block_tables, queries, arrays.pages, numbers)
    tile = Tile(*tasks.tiles.T)
    spans = jnp.stack([tile.first_split, tile.num_splits], axis=1)
    common = SharedSplits.from_tiles(config, parts, spans, splits)
    tiles = own_tiles(arrays, config, parts)
    return lse_of_tokens(_decode(arrays, config, tiles, out, common), tiles, config)


def _decode(
    arrays: AttentionArrays,
    config: Config,
    tiles: QueryTiles,
    out: Ref,
    shared: SharedSplits | None = None,
) -> Array:
    """Writes the output of tiles; returns their log-sum-exp, float32[N, kv_heads, rows]."""
    fixed = FixedSplits.from_config(config, arrays.block_tables.shape[1])
    # Others have parts in other kernels, or must be added up in the same way whatever their number.
    may_finish = fixed is None and shared is None
    shape = decode_shape(arrays, config, tiles.size * config.group, may_finish)
    numbers = tile_numbers(arrays, shape)

    def run(tiles: QueryTiles, queries: Array) -> Array:
        tasks = share_out(tiles, shape.num_workers, used_tokens(arrays), fixed)
        tasks = tasks if shared is None else shared.join(tasks)
        outputs = Outputs(out, jax.new_ref(jnp.empty(queries.shape[:3], jnp.float32)))
        given = shape, tasks, arrays.block_tables, queries, arrays.pages, numbers
        splits = decode(*given, outputs if shape.finishes else None)
        linked = None if shared is None else shared.splits
        given = config, tasks.tiles, splits, numbers, outputs, linked
        combine(*given, num_workers=shape.num_workers, finished=shape.finishes)
        return written(outputs.lse)

    return in_rounds(run, tiles, tile_queries(arrays.queries, tiles, shape), config, fixed)


def with_whole_steps(arrays: AttentionArrays, config: Config) -> AttentionArrays:
    """Returns a call whose tables have whole steps if pages have one token: these are loaded."""
    tables = arrays.block_tables
    if config.page_tokens > 1 or not tables.shape[1] % STEP:
        return arrays
    padding = (0, 0), (0, -tables.shape[1] % STEP)
    return arrays._replace(block_tables=jnp.pad(tables, padding, constant_values=-1))


def used_tokens(arrays: AttentionArrays) -> Array:
    """Returns int32[], the number of tokens before the padding."""
    if arrays.query_start_loc is None:
        return jnp.int32(arrays.queries.shape[0])
    return jnp.clip(arrays.query_start_loc[-1], 0, arrays.queries.shape[0])


def tile_queries(queries: Array, tiles: QueryTiles, shape: DecodeShape) -> Array:
    """Returns [N, kv_heads, rows, K]; rows past a tile's queries are other queries."""
    config, rows = shape.config, tiles.size * shape.config.group
    if tiles.size == 1:
        tiled = queries.reshape(-1, config.kv_heads, config.group, config.key_width)
    else:
        inner = jnp.arange(tiles.size)
        tiled = queries.at[tiles.tokens[:, None] + inner[None]].get(mode="clip")
        tiled = tiled.reshape(-1, tiles.size, config.kv_heads, config.group, config.key_width)
        tiled = jnp.swapaxes(tiled, 1, 2).reshape(-1, config.kv_heads, rows, config.key_width)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, shape.rows - rows), (0, 0)))
    return tiled.astype(shape.compute)


def shared_queries(queries: Array, shared: SharedTiles, config: Config, rows: int) -> Array:
    """Returns [N, rows, kv_heads, K]; rows past a tile's queries are other queries, or zeros."""
    tiled = queries[shared.requests].reshape(
        *shared.requests.shape, config.kv_heads, config.group, config.key_width
    )
    tiled = jnp.swapaxes(tiled, 2, 3)
    spare = row_stride(config) - config.group
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, spare), (0, 0), (0, 0)))
    tiled = tiled.reshape(tiled.shape[0], -1, config.kv_heads, config.key_width)
    return jnp.pad(tiled, ((0, 0), (0, rows - tiled.shape[1]), (0, 0), (0, 0)))


def tile_numbers(arrays: AttentionArrays, shape: DecodeShape) -> Array:
    """Returns the numbers of each KV head that `decode` takes, in one array for one launch."""
    config = shape.config
    sinks = jnp.full((config.kv_heads, shape.rows), -jnp.inf, jnp.float32)
    if arrays.sinks is not None:
        heads = jnp.arange(shape.rows) % config.group
        sinks = arrays.sinks.reshape(config.kv_heads, config.group)[:, heads] * LOG2E
    scales = arrays.key_scale * jnp.float32(config.scale), arrays.value_scale
    return jnp.concatenate([jnp.stack(scales, axis=1), sinks], axis=1)


def lse_of_tokens(lse: Array, tiles: QueryTiles, config: Config) -> Array:
    """Gathers the log-sum-exp of tiles by token: float32[T, heads], -inf for padding."""
    columns = tiles.rows[:, None] * config.group + jnp.arange(config.group)[None]
    found = lse[tiles.token_tiles[:, None], :, columns]
    found = jnp.swapaxes(found, 1, 2).reshape(found.shape[0], -1)
    return jnp.where(tiles.token_tiles[:, None] < 0, -jnp.inf, found)
