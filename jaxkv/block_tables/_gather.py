"""The columns of the block tables that a step reads."""

import jax.numpy as jnp
from jax import Array

from jaxkv._internal.indexing import bit, gather_bits, within
from jaxkv._internal.numbers import NULL_BLOCK, cdiv
from jaxkv.blocks import StepShape
from jaxkv.cache import (
    BAD_BATCH,
    BAD_ROW,
    NO_BLOCK,
    PAD_ROW,
    TOO_LONG,
    KVCache,
    StepBatch,
    check_layout,
    first_columns,
)


def gather_batch(cache: KVCache, data: Array, shape: StepShape) -> tuple[StepBatch, Array]:
    """Returns the batch of a step, and the error flags, int32[].

    Columns that no new token reads are null: their blocks may belong to other requests by now.

    Args:
      cache: whose rows are read.
      data: int32[...], `UploadFormat.batch_fields` of the step's upload.
      shape: of the step.
    """
    check_layout(cache.layout, shape)
    batch = StepBatch(tables=(), data=data, shape=shape, layout=cache.layout)
    rows, lens = batch.request_rows, batch.query_lens
    known = within(rows, cache.max_requests)
    problems = bit(BAD_ROW, (rows != PAD_ROW) & ~known)
    bad = (lens < 0) | (batch.num_computed_tokens < 0) | (lens > shape.max_query_len)
    bad |= batch.query_start_loc[1:] > shape.max_tokens
    problems |= bit(BAD_BATCH, bad) | bit(TOO_LONG, batch.seq_lens > shape.max_seq_len)
    live = known & (lens > 0) & ~bad
    tables = []
    for group in range(len(shape.growths)):
        table, flags = _gather_group(cache, batch, group, live)
        tables.append(table)
        problems |= flags
    batch = StepBatch(tables=tuple(tables), data=data, shape=shape, layout=cache.layout)
    return batch, gather_bits(problems)


def _gather_group(cache: KVCache, batch: StepBatch, group: int, live: Array) -> tuple[Array, Array]:
    """Returns int32[B, W], the columns of a group that a step reads, and int32[B], error flags."""
    growth, width = cache.layout.growths[group], batch.shape.widths[group]
    ranks = cache.layout.context_parallel
    source, first, end = growth.live_columns(
        cdiv(batch.num_computed_tokens, ranks),
        cdiv(batch.seq_lens, ranks),
        batch.encoder_lens,
        jnp,
    )
    index = jnp.arange(width, dtype=jnp.int32)[None]
    first, end = _per_request(first, batch), _per_request(end, batch)
    columns = first_columns(batch, group)[:, None] + index
    wanted = (columns >= first) & (columns < end)
    if growth.stores == "state":  # the source goes in front
        columns = jnp.where(index == 0, _per_request(source, batch), columns - 1)
        wanted = jnp.where(index == 0, columns >= 0, (columns >= first) & (columns < end))
    wanted &= live[:, None]
    start, room = cache.layout.column_starts[group], cache.layout.row_blocks[group]
    rows = batch.request_rows
    lengths = cache.row_lengths.at[rows, group].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    ids = cache.block_tables.at[rows[:, None], jnp.where(columns < room, columns + start, -1)].get(
        mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
    )
    held = wanted & (columns < lengths[:, None]) & (ids != NULL_BLOCK)
    problems = bit(NO_BLOCK, (wanted & ~held).any(axis=1))
    if growth.stores != "state":
        problems |= bit(TOO_LONG, live & (end[:, 0] > first_columns(batch, group) + width))
    return jnp.where(held, ids, NULL_BLOCK), problems


def _per_request(columns: Array | int, batch: StepBatch) -> Array:
    """Returns int32[B, 1] of what may be the same number for every request."""
    columns = jnp.asarray(columns, jnp.int32)
    return jnp.broadcast_to(columns, (batch.shape.batch_size,))[:, None]
