"""The requests of a step as the model sees them: positions, tables and slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._internal.indexing import group_of, take, within
from jaxkv._internal.numbers import INT32_MAX, NULL_BLOCK, cdiv
from jaxkv.blocks import StepShape
from jaxkv.cache._expand import expand_blocks
from jaxkv.cache._layout import CacheLayout, Period

PAD_SLOT = -1  # slot of a token that must not be written

PAD_ROW = -1  # table row of a batch entry that is padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """The requests of a step: B requests, T tokens, G groups; padded to the shape.

    In a flat batch the tokens of all requests lie end to end, those of request i at
    ``query_start_loc[i] : query_start_loc[i + 1]``, and token arrays are [T]. In a rectangular
    batch (``shape.tokens_per_request``) they are [B, T / B], each request's tokens first.

    Arrays are computed when they are asked for: inside ``jit`` XLA computes each once.
    """

    tables: tuple[Array, ...]  # per group int32[B, W_g], logical ids from `first_columns` on
    data: Array  # int32[...], `StepShape.batch_fields` of the upload
    shape: StepShape = dataclasses.field(metadata={"static": True})
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"StepBatch({self.shape!r})"

    # --- requests -----------------------------------------------------------------

    @property
    def request_rows(self) -> Array:
        """int32[B], rows of the block tables; `PAD_ROW` for padding."""
        return self._uploaded("request_rows")

    @property
    def num_computed_tokens(self) -> Array:
        """int32[B], tokens of each request that were in the cache before this step."""
        return self._uploaded("num_computed_tokens")

    @property
    def query_start_loc(self) -> Array:
        """int32[B + 1], new tokens of all earlier requests; the last entry counts them all."""
        return self._uploaded("query_start_loc")

    @property
    def query_lens(self) -> Array:
        """int32[B], tokens that each request computes in this step; 0 for padding."""
        return jnp.diff(self.query_start_loc)

    @property
    def seq_lens(self) -> Array:
        """int32[B], tokens of each request, this step's included; 0 for padding."""
        return self.num_computed_tokens + self.query_lens

    @property
    def last_tokens(self) -> Array:
        """int32[B], where each request's last token stands in a token array; 0 for padding.

        An index into [T] in a flat batch, and into the row of the request in a rectangular one.
        """
        last = self.query_lens if self.is_rectangular else self.query_start_loc[1:]
        return jnp.where(self.query_lens > 0, last - 1, 0)

    @property
    def encoder_lens(self) -> Array:
        """int32[B], encoder tokens of each request; 0 without cross attention."""
        if not self.shape.has_encoder:
            return jnp.zeros(self.shape.batch_size, jnp.int32)
        return self._uploaded("encoder_lens")

    @property
    def extra(self) -> Array:
        """int32[shape.extra], your own ints of the upload."""
        return self._uploaded("extra")

    # --- tokens -------------------------------------------------------------------

    @property
    def is_rectangular(self) -> bool:
        return self.shape.tokens_per_request is not None

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of token arrays: [T], or [B, T / B] for a rectangular batch."""
        if self.shape.tokens_per_request is None:
            return (self.shape.max_tokens,)
        return self.shape.batch_size, self.shape.tokens_per_request

    @property
    def token_requests(self) -> Array:
        """int32, a token array: the index of each token's request in the batch; -1 for padding."""
        if self.is_rectangular:
            requests = jnp.arange(self.shape.batch_size, dtype=jnp.int32)[:, None]
            inside = self._token_offsets < self.query_lens[:, None]
        else:
            ends = self.query_start_loc[1:]
            requests = group_of(jnp.arange(self.shape.max_tokens, dtype=jnp.int32), ends)
            inside = requests < self.shape.batch_size
        return jnp.where(inside, requests, -1)

    @property
    def positions(self) -> Array:
        """int32, a token array: the position of each token in its request; -1 for padding."""
        requests = self.token_requests
        starts = self._token_offsets
        if not self.is_rectangular:
            starts = jnp.arange(self.shape.max_tokens, dtype=jnp.int32)
            starts = starts - take(self.query_start_loc, requests)
        return jnp.where(requests >= 0, take(self.num_computed_tokens, requests) + starts, -1)

    @property
    def _token_offsets(self) -> Array:
        """int32[1, T / B], of a rectangular batch."""
        return jnp.arange(self.token_shape[-1], dtype=jnp.int32)[None]

    # --- what a layer reads and writes --------------------------------------------

    def block_tables(self, layer: str, *, period: Period = None) -> Array:
        """Returns the kernel blocks of each request, int32[B, W * k], for a layer's kernel.

        Ids index the block axis of ``layer_view(cache, layer)``, which may hold several layers;
        k is the kernel blocks per block. Padding, and blocks that the request does not hold,
        are 0: the null block.

        Tables list the columns of the row that this step reads: all of them for full
        attention; from the block of the oldest visible token on for windows and chunks, see
        `first_positions`; for recurrent states the block to resume from (null for a fresh
        request), then those to write.

        Args:
          layer: name of a layer.
          period: traced index of a layer of the group; see `jaxkv.write_tokens`.
        """
        group = self.layout.place_of(layer).group
        ids, parts = self.tables[group], self.layout.blocks_per_kv_block[group]
        self._check_count(layer, parts, "kernel blocks")
        offset = self.id_offset(layer, period)
        is_null = (ids == NULL_BLOCK) | (jnp.asarray(offset, jnp.int32) < 0)
        kernel_ids = expand_blocks(ids + offset, parts)
        return jnp.where(jnp.repeat(is_null, parts, axis=-1), NULL_BLOCK, kernel_ids)

    def first_positions(self, layer: str) -> Array:
        """Returns int32[B], the position of the first token of each row of `block_tables`."""
        group = self.layout.place_of(layer).group
        return self.first_columns(group) * self.layout.dealt_tokens(group)

    def slot_mapping(self, layer: str, *, period: Period = None) -> Array:
        """Returns where each token's row of a layer lies: a token array, -1 for no slot.

        A slot is ``block_id * block_size + offset``, which is also ``kernel_block_id *
        kernel_block_size + offset`` for every kernel block size. Slots index the first two axes
        of ``layer_view(cache, layer)`` in order LBNHC, taken as one: they begin behind the
        layers that lie before this one in the view, as `block_tables` does. Divide them by
        ``compress_ratio`` where tokens share a row.

        Args:
          layer: name of a layer that stores tokens.
          period: traced index of a layer of the group; see `jaxkv.write_tokens`.

        Raises:
          TypeError: the layer stores states, or the encoder's tokens.
        """
        group = self.layout.place_of(layer).group
        size, slots = self.layout.growths[group].block_size, self.token_slots(group)
        self._check_count(layer, size, "slots")
        offset = jnp.asarray(self.id_offset(layer, period), jnp.int32)
        return jnp.where((slots < 0) | (offset < 0), PAD_SLOT, slots + offset * size)

    # --- for jaxkv's own readers --------------------------------------------------

    def id_offset(self, layer: str, period: Period) -> Array | int:
        """Returns the blocks before a layer's in its view, int32[] for a traced period.

        -1 for a traced period that does not exist.
        """
        return self.layout.of_period(layer, period, self.layout.id_offset, -1)

    def first_columns(self, group: int) -> Array:
        """Returns int32[B], the column of the table row that `tables` start at."""
        computed, total = self._local(self.num_computed_tokens), self._local(self.seq_lens)
        start = self.layout.growths[group].step_start(computed, total, jnp)
        return jnp.broadcast_to(jnp.asarray(start, jnp.int32), computed.shape)

    def token_slots(self, group: int) -> Array:
        """Returns the slot of each token in a group, a token array; `PAD_SLOT` for none."""
        layout, growth = self.layout, self.layout.growths[group]
        if growth.stores != "tokens":
            raise TypeError(
                f"group {group} stores {growth.stores}, which have no slot per token: use "
                "read_state and write_state for states"
            )
        requests, positions = self.token_requests, self.positions
        column, offset = jnp.divmod(positions, layout.dealt_tokens(group))
        turn, within_turn = jnp.divmod(offset, layout.interleave_tokens)
        mine = turn % layout.context_parallel == layout.context_rank()
        offset = turn // layout.context_parallel * layout.interleave_tokens + within_turn
        column = column - take(self.first_columns(group), requests)
        ids = (
            self.tables[group]
            .at[requests, column]
            .get(mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False)
        )
        held = (ids != NULL_BLOCK) & (positions >= 0) & mine
        return jnp.where(held, ids * growth.block_size + offset, PAD_SLOT)

    def encoder_slots(self, group: int, num_tokens: int) -> Array:
        """Returns int32[B, num_tokens], slots of the encoder's tokens; `PAD_SLOT` past the last."""
        size = self.layout.growths[group].block_size
        column, offset = jnp.divmod(jnp.arange(num_tokens, dtype=jnp.int32), size)
        ids = take(self.tables[group].T, column).T
        inside = jnp.arange(num_tokens, dtype=jnp.int32)[None] < self.encoder_lens[:, None]
        return jnp.where(inside & (ids != NULL_BLOCK), ids * size + offset[None], PAD_SLOT)

    def state_blocks(self, group: int, at: Array | None, *, reading: bool) -> Array:
        """Returns int32[B], the block of each request's state; -1 for none.

        Args:
          group: of recurrent states.
          at: int32[B], which of the blocks to write, counted from the first; None: the block
            to resume from when reading, the block of the newest token when writing.
        """
        growth, table = self.layout.growths[group], self.tables[group]
        if at is None and reading:
            ids = table[:, 0]
        else:
            if at is None:
                last = jnp.maximum(cdiv(self.seq_lens, growth.block_size), 1) - 1
                last = last if growth.cache_mode != "none" else jnp.zeros_like(last)
                at = last - self.first_columns(group)
            known = within(at, table.shape[1] - 1)
            ids = jnp.take_along_axis(table, jnp.where(known, at + 1, 0)[:, None], axis=1)[:, 0]
            ids = jnp.where(known, ids, NULL_BLOCK)
        return jnp.where((ids == NULL_BLOCK) | (self.query_lens == 0), -1, ids)

    def _check_count(self, layer: str, per_block: int, what: str) -> None:
        """Raises ValueError where int32 does not count the parts of a layer's view."""
        blocks = self.layout.id_offset(layer) + self.layout.num_blocks
        if blocks * per_block > INT32_MAX:
            raise ValueError(
                f"the {what} before the end of layer={layer!r} in its buffer are more than int32 "
                "counts; make the cache with stacked=False"
            )

    def _local(self, num_tokens: Array) -> Array:
        return cdiv(num_tokens, self.layout.context_parallel)

    def _uploaded(self, name: str) -> Array:
        where, start = self.shape.fields[name], self.shape.batch_fields.start
        return self.data[where.start - start : where.stop - start]
