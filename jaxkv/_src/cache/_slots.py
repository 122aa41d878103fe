"""Slots and blocks of a step's requests in one group, for code that reads and writes the pool."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jaxkv._src.internal.indexing import take, take_cells, within
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv

if TYPE_CHECKING:
    from jaxkv._src.cache._batch import StepBatch

PAD_SLOT = -1  # slot of a token that must not be written


def first_columns(batch: "StepBatch", group: int) -> Array:
    """Returns int32[B], the column of each table row at which ``batch.tables`` start."""
    computed, total = (
        cdiv(tokens, batch.layout.context_parallel)
        for tokens in (batch.num_computed_tokens, batch.seq_lens)
    )
    start = batch.layout.growths[group].step_start(computed, total, jnp)
    return jnp.broadcast_to(jnp.asarray(start, jnp.int32), computed.shape)


def token_slots(batch: "StepBatch", group: int) -> Array:
    """Returns the slot of each token in a group, a token array; `PAD_SLOT` for none."""
    layout, growth = batch.layout, batch.layout.growths[group]
    if growth.stores != "tokens":
        raise TypeError(
            f"group {group} stores {growth.stores!r}, which has no slot for each token of a step; "
            "use read_state and write_state for states"
        )
    requests, positions = batch.token_requests, batch.positions
    column, offset = jnp.divmod(positions, layout.column_tokens(group))
    turn, within_turn = jnp.divmod(offset, layout.interleave_tokens)
    mine = turn % layout.context_parallel == layout.context_rank()
    offset = turn // layout.context_parallel * layout.interleave_tokens + within_turn
    column = column - take(first_columns(batch, group), requests)
    ids = take_cells(batch.tables[group], jnp.maximum(requests, 0), column, NULL_BLOCK)
    held = (ids != NULL_BLOCK) & (positions >= 0) & mine
    return jnp.where(held, ids * growth.block_size + offset, PAD_SLOT)


def encoder_slots(batch: "StepBatch", group: int, num_tokens: int) -> Array:
    """Returns int32[B, num_tokens], slots of the encoder's tokens; `PAD_SLOT` past the last."""
    size = batch.layout.growths[group].block_size
    column, offset = jnp.divmod(jnp.arange(num_tokens, dtype=jnp.int32), size)
    ids = take(batch.tables[group].T, column).T
    inside = jnp.arange(num_tokens, dtype=jnp.int32)[None] < batch.encoder_lens[:, None]
    return jnp.where(inside & (ids != NULL_BLOCK), ids * size + offset[None], PAD_SLOT)


def state_blocks(batch: "StepBatch", group: int, at: Array | None, *, reading: bool) -> Array:
    """Returns int32[B], the block of each request's state; -1 for none.

    Args:
      group: of recurrent states.
      at: int32[B], index among the blocks that the step writes; None: the block to resume
        from when reading, the block of the newest token when writing.
    """
    growth, table = batch.layout.growths[group], batch.tables[group]
    if at is None and reading:
        ids = table[:, 0]
    else:
        if at is None:
            last = jnp.maximum(cdiv(batch.seq_lens, growth.block_size), 1) - 1
            last = last if growth.cache_mode != "none" else jnp.zeros_like(last)
            at = last - first_columns(batch, group)
        known = within(at, table.shape[1] - 1)
        ids = jnp.take_along_axis(table, jnp.where(known, at + 1, 0)[:, None], axis=1)[:, 0]
        ids = jnp.where(known, ids, NULL_BLOCK)
    return jnp.where((ids == NULL_BLOCK) | (batch.query_lens == 0), -1, ids)
