"""Slots and blocks of a step's requests in one group, for code that reads and writes the pool."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.internal.indexing import take, take_cells, within
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv
from jaxkv._src.specs import Growth

if TYPE_CHECKING:
    from jaxkv._src.cache._batch import StepBatch

PAD_SLOT = -1  # slot of a token that must not be written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupBatch:
    """The requests of a step in one group of layers.

    It does not say which group, so that what is compiled for one serves all groups that grow alike.
    """

    batch: "StepBatch"
    table: Array  # int32[B, W], logical ids from `first_columns` on
    growth: Growth = dataclasses.field(metadata={"static": True})

    @property
    def column_tokens(self) -> int:
        """The positions that one column covers, over all ranks together."""
        return self.growth.block_size * self.batch.layout.context_parallel

    @property
    def first_columns(self) -> Array:
        """int32[B], the column of each table row at which ``table`` starts."""
        computed, total = (
            cdiv(tokens, self.batch.layout.context_parallel)
            for tokens in (self.batch.num_computed_tokens, self.batch.seq_lens)
        )
        start = self.growth.step_start(computed, total, jnp)
        return jnp.broadcast_to(jnp.asarray(start, jnp.int32), computed.shape)

    @property
    def first_positions(self) -> Array:
        """int32[B], the position of the first token of each row of ``table``."""
        return self.first_columns * self.column_tokens

    @property
    def token_slots(self) -> Array:
        """The slot of each token, an int32 token array; `PAD_SLOT` for none."""
        batch, layout = self.batch, self.batch.layout
        requests, positions = batch.token_requests, batch.positions
        column, offset = jnp.divmod(positions, self.column_tokens)
        turn, within_turn = jnp.divmod(offset, layout.interleave_tokens)
        mine = turn % layout.context_parallel == layout.context_rank()
        offset = turn // layout.context_parallel * layout.interleave_tokens + within_turn
        column = column - take(self.first_columns, requests)
        ids = take_cells(self.table, jnp.maximum(requests, 0), column, NULL_BLOCK)
        held = (ids != NULL_BLOCK) & (positions >= 0) & mine
        return jnp.where(held, ids * self.growth.block_size + offset, PAD_SLOT)

    def encoder_slots(self, num_tokens: int) -> Array:
        """Returns int32[B, num_tokens], slots of the encoder's tokens; `PAD_SLOT` past the last."""
        size = self.growth.block_size
        column, offset = jnp.divmod(jnp.arange(num_tokens, dtype=jnp.int32), size)
        ids = take(self.table.T, column).T
        inside = jnp.arange(num_tokens, dtype=jnp.int32)[None] < self.batch.encoder_lens[:, None]
        return jnp.where(inside & (ids != NULL_BLOCK), ids * size + offset[None], PAD_SLOT)

    def state_blocks(self, at: Array | None, *, reading: bool) -> Array:
        """Returns int32[B], the block of each request's state; -1 for none.

        Args:
          at: int32[B], index among the blocks that the step writes; None: the block to resume
            from when reading, the block of the newest token when writing.
        """
        growth, table, batch = self.growth, self.table, self.batch
        if at is None and reading:
            ids = table[:, 0]
        else:
            if at is None:
                last = jnp.maximum(cdiv(batch.seq_lens, growth.block_size), 1) - 1
                last = last if growth.cache_mode != "none" else jnp.zeros_like(last)
                at = last - self.first_columns
            known = within(at, table.shape[1] - 1)
            ids = jnp.take_along_axis(table, jnp.where(known, at + 1, 0)[:, None], axis=1)[:, 0]
            ids = jnp.where(known, ids, NULL_BLOCK)
        return jnp.where((ids == NULL_BLOCK) | (batch.query_lens == 0), -1, ids)


def first_columns(batch: "StepBatch", group: int) -> Array:
    """Returns `GroupBatch.first_columns` of a group."""
    return batch.in_group(group).first_columns
