"""Gathers the part of the block tables that a step reads."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from jaxkv._src.cache import PAD_ROW, CacheFlags, KVCache, StepBatch, check_layout
from jaxkv._src.internal.indexing import bit, take_cells, within
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv
from jaxkv._src.uploads import StepShape

MISSING, UNREAD = -1, -2  # instead of a cell, where a block should be and where none is read


def gather_batch(
    cache: KVCache, data: Int32[Array, "ints"], shape: StepShape
) -> tuple[StepBatch, Int32[Array, "requests"]]:
    """Returns the batch of a step, and the error flags of its requests.

    Logical blocks that no new token reads are null: the blocks may be another request's by now.

    Args:
      cache: whose rows are read.
      data: `UploadFormat.batch_fields` of the step's upload.
      shape: of the step.
    """
    check_layout(cache.layout, shape)
    nothing = jnp.zeros((shape.batch_size, 0), jnp.int32)
    batch = StepBatch(
        block_ids=nothing, data=data, status=cache.status, shape=shape, layout=cache.layout
    )
    rows, lens = batch.request_rows, batch.query_lens
    known = within(rows, cache.max_requests)
    bad = (lens < 0) | (batch.num_computed_tokens < 0) | (lens > shape.max_query_len)
    bad |= batch.query_start_loc[1:] > shape.max_tokens
    bad |= batch.query_start_loc[0] != 0
    if shape.max_query_len == 1 and not batch.is_rectangular:  # token i is of request i
        index = jnp.arange(shape.batch_size, dtype=jnp.int32)
        bad |= (lens > 0) & (batch.query_start_loc[:-1] != index)
    problems = bit(CacheFlags.BAD_ROW, (rows != PAD_ROW) & ~known) | bit(CacheFlags.BAD_BATCH, bad)
    problems |= bit(CacheFlags.TOO_LONG, batch.seq_lens > shape.max_seq_len)
    live = known & (lens > 0) & ~bad
    runs = [run for group in range(len(shape.growths)) for run in _runs(batch, group)]
    for run in runs:
        problems |= bit(CacheFlags.TOO_LONG, live & (run.end > run.start + run.width))
    block_ids, missing = _gather_runs(cache, jnp.where(live, rows, 0), live, runs)
    problems |= lax.reduce(bit(CacheFlags.NO_BLOCK, missing), jnp.int32(0), lax.bitwise_or, (1,))
    return dataclasses.replace(batch, block_ids=block_ids), problems


class _Run(NamedTuple):
    """Logical blocks ``start .. start + width - 1`` of a group; ``first .. end - 1`` are read.

    first: not negative.
    """

    group: int
    width: int
    start: Int32[Array, "requests"]
    first: Int32[Array, "requests"]
    end: Int32[Array, "requests"]


def _runs(batch: StepBatch, group: int) -> list[_Run]:
    """Returns the logical blocks of a group that the table of a step lists."""
    growth, width = batch.layout.growths[group], batch.shape.widths[group]
    ranks = batch.layout.context_parallel
    source, first, end = (
        _per_request(blocks, batch)
        for blocks in growth.live_range(
            cdiv(batch.num_computed_tokens, ranks),
            cdiv(batch.seq_lens, ranks),
            batch.encoder_lens,
            jnp,
        )
    )
    start = batch.in_group(group).first_blocks
    if growth.stores != "state":
        return [_Run(group, width, start, first, end)]
    return [  # the source goes in front
        _Run(group, 1, source, jnp.zeros_like(source), source + 1),
        _Run(group, width - 1, start, first, end),
    ]


def _gather_runs(cache: KVCache, rows: Array, live: Array, runs: list[_Run]) -> tuple[Array, Array]:
    """Returns the block ids of runs side by side, and whether each is missing, [B, ...] both.

    All runs take one gather.
    """
    lengths = cache.row_lengths.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)
    parts = []
    for run in runs:
        blocks = run.start[:, None] + jnp.arange(run.width, dtype=jnp.int32)[None]
        wanted = live[:, None] & (blocks >= run.first[:, None]) & (blocks < run.end[:, None])
        allocated = wanted & (blocks < lengths[:, run.group, None])
        cells = blocks + cache.layout.table_offsets[run.group]
        parts.append(jnp.where(allocated, cells, jnp.where(wanted, MISSING, UNREAD)))
    cells = parts[0]
    if len(parts) > 1:  # the barrier keeps XLA from computing them once per use
        cells = lax.optimization_barrier(jnp.concatenate(parts, axis=1))
    ids = take_cells(cache.rows, rows[:, None], cells, NULL_BLOCK)
    return ids, (cells != UNREAD) & (ids == NULL_BLOCK)


def _per_request(numbers: Array | int, batch: StepBatch) -> Array:
    """Returns int32[B], also if all requests have the same number."""
    numbers = jnp.asarray(numbers, jnp.int32)
    return jnp.broadcast_to(numbers, (batch.shape.batch_size,))
