"""Slots and blocks of a step's requests in one group, for code that reads and writes the pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxkv._src.cache._requests import BatchRequests
from jaxkv._src.internal.indexing import take, take_cells, within
from jaxkv._src.internal.numbers import NULL_BLOCK, cdiv
from jaxkv._src.specs import Growth

PAD_SLOT = -1  # slot of a token that must not be written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupBatch:
    """The requests of a step in one group of layers.

    Independent of the group's index, so that groups that grow alike share compilations.
    """

    batch: BatchRequests
    table: Int32[Array, "requests width"]  # logical ids from `first_blocks` on
    growth: Growth = dataclasses.field(metadata={"static": True})

    @property
    def block_tokens(self) -> int:
        """Positions of one logical block, over all ranks together."""
        return self.growth.block_size * self.batch.layout.context_parallel

    @property
    def first_blocks(self) -> Int32[Array, "requests"]:
        """int32[B], the logical block in the first column of each row of ``table``."""
        computed, total = (
            cdiv(tokens, self.batch.layout.context_parallel)
            for tokens in (self.batch.num_computed_tokens, self.batch.seq_lens)
        )
        start = self.growth.step_start(computed, total, jnp)
        return jnp.broadcast_to(jnp.asarray(start, jnp.int32), computed.shape)

    @property
    def first_positions(self) -> Int32[Array, "requests"]:
        """int32[B], the position of the first token of each row of ``table``."""
        return self.first_blocks * self.block_tokens

    @property
    def token_slots(self) -> Int32[Array, "*tokens"]:
        """The slot of each token, an int32 token array; `PAD_SLOT` for none."""
        if self.growth.stores == "ring":
            return self._ring_slots
        return self.slots_at(self.batch.token_requests, self.batch.positions)

    def slots_at(
        self, requests: Int32[Array, "..."], positions: Int32[Array, "..."]
    ) -> Int32[Array, "..."]:
        """Returns the slots of positions of requests; `PAD_SLOT` for those without one here.

        Args:
          requests: int32, of a shape that broadcasts to that of ``positions``.
          positions: int32; one past the newest token has the slot that it will get, if any.
        """
        layout = self.batch.layout
        block, offset = jnp.divmod(positions, self.block_tokens)
        turn, within_turn = jnp.divmod(offset, layout.interleave_tokens)
        mine = turn % layout.context_parallel == layout.context_rank()
        offset = turn // layout.context_parallel * layout.interleave_tokens + within_turn
        column = block - take(self.first_blocks, requests)
        ids = take_cells(self.table, jnp.maximum(requests, 0), column, NULL_BLOCK)
        has_slot = (ids != NULL_BLOCK) & (positions >= 0) & mine
        return jnp.where(has_slot, ids * self.growth.block_size + offset, PAD_SLOT)

    @property
    def _ring_slots(self) -> Int32[Array, "*tokens"]:
        """The slots of tokens in a ring; `PAD_SLOT` for those that later ones would overwrite."""
        requests, positions = self.batch.token_requests, self.batch.positions
        size, at = self.growth.block_size, jnp.maximum(requests, 0)
        ids, total = take(self.table[:, 0], at), take(self.batch.seq_lens, at)
        has_slot = (ids != NULL_BLOCK) & (positions >= jnp.maximum(total - size, 0))
        return jnp.where(has_slot, ids * size + positions % size, PAD_SLOT)

    def encoder_slots(self, num_tokens: int) -> Int32[Array, "requests num_tokens"]:
        """Returns int32[B, num_tokens], slots of the encoder's tokens; `PAD_SLOT` past the last."""
        size = self.growth.block_size
        block, offset = jnp.divmod(jnp.arange(num_tokens, dtype=jnp.int32), size)
        ids = take(self.table.T, block).T
        inside = jnp.arange(num_tokens, dtype=jnp.int32)[None] < self.batch.encoder_lens[:, None]
        return jnp.where(inside & (ids != NULL_BLOCK), ids * size + offset[None], PAD_SLOT)

    def state_blocks(
        self, at: Int32[Array, "requests"] | None, *, reading: bool
    ) -> Int32[Array, "requests"]:
        """Returns int32[B], the block of each request's state; -1 for none.

        Args:
          at: int32[B], index among the blocks that the step writes; None, and -1 when reading: the
            block to resume from when reading, the block of the newest token when writing.
        """
        batch, growth = self.batch, self.growth
        if at is None and not reading:
            last = jnp.maximum(cdiv(batch.seq_lens, growth.block_size), 1) - 1
            at = last - self.first_blocks
            if growth.cache_mode == "none":
                at = self._draft(batch.query_lens)
        ids = self._written(at) if at is not None else self._resumed
        if at is not None and reading:
            ids = jnp.where(at == -1, self._resumed, ids)
        return jnp.where((ids == NULL_BLOCK) | (batch.query_lens == 0), -1, ids)

    @property
    def _resumed(self) -> Array:
        """int32[B], the blocks of the states to resume from; `NULL_BLOCK` for none."""
        if self.growth.cache_mode != "none" or not self.growth.has_drafts:
            return self.table[:, 0]
        draft = self._draft(self.batch.accepted_tokens)
        return jnp.where(draft > 0, self._written(draft), self.table[:, 0])

    def _written(self, at: Array) -> Array:
        """Returns int32[B], blocks that the step writes by index; `NULL_BLOCK` for none."""
        known = within(at, self.table.shape[1] - 1)
        column = jnp.where(known, at + 1, 0)[:, None]
        ids = jnp.take_along_axis(self.table, column, axis=1)[:, 0]
        return jnp.where(known, ids, NULL_BLOCK)

    def _draft(self, num_tokens: Array) -> Array:
        """Returns int32[B], the index of the "none" state after ``num_tokens`` of a step.

        Steps of more tokens than there are blocks store the newest state alone, in the first one.
        """
        has_block = num_tokens <= 1 + self.growth.speculative_blocks
        return jnp.where(has_block, jnp.maximum(num_tokens, 1) - 1, 0)
