"""The requests of a step as the model sees them: positions, block tables and slots."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache._expand import expand_blocks
from jaxkv._src.cache._layout import CacheLayout, LayerIndex
from jaxkv._src.cache._slots import PAD_SLOT, GroupBatch
from jaxkv._src.internal.checks import check_count
from jaxkv._src.internal.indexing import group_of, take
from jaxkv._src.internal.numbers import NULL_BLOCK
from jaxkv._src.uploads import StepShape

PAD_ROW = -1  # table row of a batch entry that is padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """The requests of one step as the model sees them, padded to the step's shape.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        positions = batch.positions                  # int32[T]; -1 for padding
        tables = batch.kernel_block_tables("layer")  # int32[B, W]; 0 for padding
        slots = batch.slot_mapping("layer")          # int32[T]; -1 for padding

    B is the number of requests, T the number of tokens and W the width of a table. In a flat batch
    the tokens of all requests lie end to end: those of request i are at ``query_start_loc[i] :
    query_start_loc[i + 1]``, and a token array is [T]. In a rectangular batch
    (``shape.tokens_per_request``) a token array is [B, T / B], padded after the tokens of each.

    Properties compute their arrays on access; inside ``jit`` XLA merges repeated computations.
    """

    block_ids: Array  # int32[B, ...], the `tables` of all groups side by side
    data: Array  # int32[...], `UploadFormat.batch_fields` of the upload
    status: Array  # int32[2], `KVCache.status` after the step's upload
    shape: StepShape = dataclasses.field(metadata={"static": True})
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"StepBatch({self.shape!r})"

    @property
    def tables(self) -> tuple[Array, ...]:
        """Per group int32[B, W_g], logical ids from `first_columns` on."""
        ends = itertools.accumulate(self.shape.widths, initial=0)
        return tuple(self.block_ids[:, start:end] for start, end in itertools.pairwise(ends))

    def in_group(self, group: int) -> GroupBatch:
        """Returns the requests with the block table of one group."""
        check_count(group=group)
        if group >= len(self.tables):
            raise ValueError(f"group={group} is not in 0..{len(self.tables) - 1}, the plan's")
        return GroupBatch(self, self.tables[group], self.layout.growths[group])

    # --- requests -----------------------------------------------------------------

    @property
    def request_rows(self) -> Array:
        """int32[B], each request's row of the block tables; `PAD_ROW` for padding."""
        return self._uploaded("request_rows")

    @property
    def num_computed_tokens(self) -> Array:
        """int32[B], tokens of each request that were in the cache before this step."""
        return self._uploaded("num_computed_tokens")

    @property
    def query_start_loc(self) -> Array:
        """int32[B + 1], this step's tokens of all earlier requests; the last entry is the total."""
        return self._uploaded("query_start_loc")

    @property
    def query_lens(self) -> Array:
        """int32[B], tokens that each request computes in this step; 0 for padding."""
        return jnp.diff(self.query_start_loc)

    @property
    def seq_lens(self) -> Array:
        """int32[B], tokens of each request, including this step's; 0 for padding."""
        return self.num_computed_tokens + self.query_lens

    @property
    def last_tokens(self) -> Array:
        """int32[B], index of each request's last token in a token array; 0 for padding.

        It indexes [T] in a flat batch, and the request's own row in a rectangular one.
        """
        last = self.query_lens if self.is_rectangular else self.query_start_loc[1:]
        return jnp.where(self.query_lens > 0, last - 1, 0)

    @property
    def encoder_lens(self) -> Array:
        """int32[B], encoder tokens of each request; 0 without cross attention."""
        if not self.shape.format.has_encoder:
            return jnp.zeros(self.shape.batch_size, jnp.int32)
        return self._uploaded("encoder_lens")

    @property
    def accepted_tokens(self) -> Array:
        """int32[B], tokens of each request's last step that were accepted, for states of drafts.

        0 without states of ``cache_mode="none"`` that have ``speculative_blocks``.
        """
        if not self.shape.format.has_drafts:
            return jnp.zeros(self.shape.batch_size, jnp.int32)
        return self._uploaded("accepted_tokens")

    @property
    def prefix_groups(self) -> tuple[Array, Array, Array]:
        """Groups of requests that read what they begin with together, if the shape has room.

        Returns:
          ``members``, int32[B], requests by their index in the batch, group after group, then -1;
          ``ends``, int32[G], where the members of each group end; ``lens``, int32[G], the tokens
          that those of each group have in common blocks.
        """
        names = ("prefix_members", "prefix_ends", "prefix_lens")
        members, ends, lens = (self._uploaded(name) for name in names)
        return members, ends, lens

    @property
    def extra(self) -> Array:
        """int32[shape.extra], the ``extra`` integers that you passed to `BlockManager.step`."""
        return self._uploaded("extra")

    # --- tokens -------------------------------------------------------------------

    @property
    def is_rectangular(self) -> bool:
        """Whether token arrays are [B, T / B] instead of [T]."""
        return self.shape.tokens_per_request is not None

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of token arrays: [T], or [B, T / B] for a rectangular batch."""
        if self.shape.tokens_per_request is None:
            return (self.shape.max_tokens,)
        return self.shape.batch_size, self.shape.tokens_per_request

    @property
    def token_requests(self) -> Array:
        """int32 token array, the index of each token's request in the batch; -1 for padding."""
        if self.is_rectangular:
            requests = jnp.arange(self.shape.batch_size, dtype=jnp.int32)[:, None]
            inside = self._token_offsets < self.query_lens[:, None]
        elif self.shape.max_query_len == 1:  # token i is that of request i, see `gather_batch`
            requests = jnp.arange(self.shape.max_tokens, dtype=jnp.int32)
            inside = take(self.query_start_loc, requests + 1) == requests + 1
        else:
            ends = self.query_start_loc[1:]
            requests = group_of(jnp.arange(self.shape.max_tokens, dtype=jnp.int32), ends)
            inside = requests < self.shape.batch_size
        return jnp.where(inside, requests, -1)

    @property
    def positions(self) -> Array:
        """int32 token array, the position of each token in its request; -1 for padding."""
        return _positions(self)

    @property
    def _token_offsets(self) -> Array:
        """int32[1, T / B], the columns of a rectangular batch."""
        return jnp.arange(self.token_shape[-1], dtype=jnp.int32)[None]

    # --- layers -------------------------------------------------------------------

    def kernel_block_tables(self, layer: str, *, layer_index: LayerIndex = None) -> Array:
        """Returns the kernel blocks of each request, int32[B, W * k], for a layer's kernel.

        Ids index the block axis of ``layer_view(cache, layer)``, which may hold several layers;
        k is the number of kernel blocks in a block. Padding, and blocks that the request does
        not hold, are 0: the null block.

        A table lists the columns that this step reads: all of them for full attention; for
        windows and chunks those from the block of the oldest visible token on, see
        `first_positions`; for recurrent states the block to resume from (null for a fresh
        request), followed by the blocks to write.

        Args:
          layer: name of a layer.
          period: index of a layer of the group, may be traced; see `jaxkv.write_tokens`.

        Raises:
          ValueError: int32 cannot count the kernel blocks of the layer's buffer.
        """
        group = self.layout.placement_of(layer).group
        ids, parts = self.tables[group], self.layout.blocks_per_kv_block[group]
        self.layout.check_ids(layer, layer_index, parts, "kernel blocks")
        offset = self._id_offset(layer, layer_index)
        is_null = (ids == NULL_BLOCK) | (jnp.asarray(offset, jnp.int32) < 0)
        kernel_ids = expand_blocks(ids + offset, parts)
        return jnp.where(jnp.repeat(is_null, parts, axis=-1), NULL_BLOCK, kernel_ids)

    def first_positions(self, layer: str) -> Array:
        """Returns int32[B], the position of the first token of each row of a table."""
        group = self.layout.placement_of(layer).group
        return self.in_group(group).first_positions

    def slot_mapping(self, layer: str, *, layer_index: LayerIndex = None) -> Array:
        """Returns the slot of each token in a layer: an int32 token array, -1 for no slot.

        A slot is ``block_id * block_size + offset``, which is also ``kernel_block_id *
        kernel_block_size + offset`` for every kernel block size. Slots index the first two axes
        of ``layer_view(cache, layer)`` in order LBNHC, flattened into one; like
        `kernel_block_tables`, they count the layers that lie before this one in the view. Divide
        them by ``compress_ratio`` where tokens share a row.

        Args:
          layer: name of a layer that stores tokens.
          period: index of a layer of the group, may be traced; see `jaxkv.write_tokens`.

        Raises:
          TypeError: the layer stores states, or the encoder's tokens.
          ValueError: int32 cannot count the slots of the layer's buffer.
        """
        requests = self.in_group(self.layout.placement_of(layer).group)
        growth, size = requests.growth, requests.growth.block_size
        if growth.stores != "tokens":
            raise TypeError(
                f"layer={layer!r} stores {growth.stores!r}, which has no slot for each token of a "
                "step; use read_state and write_state for states"
            )
        slots = requests.token_slots
        self.layout.check_ids(layer, layer_index, size, "slots")
        offset = jnp.asarray(self._id_offset(layer, layer_index), jnp.int32)
        return jnp.where((slots < 0) | (offset < 0), PAD_SLOT, slots + offset * size)

    def _id_offset(self, layer: str, layer_index: LayerIndex) -> Array | int:
        """Returns how many blocks precede a layer's in its view; -1 for an unknown period."""
        return self.layout.at_layer_index(layer, layer_index, self.layout.id_offset, -1)

    def _uploaded(self, name: str) -> Array:
        where, start = self.shape.format.fields[name], self.shape.format.batch_fields.start
        return self.data[where.start - start : where.stop - start]


@jax.jit  # because models ask for positions in every layer
def _positions(batch: StepBatch) -> Array:
    requests = batch.token_requests
    starts = batch._token_offsets
    if not batch.is_rectangular:
        starts = jnp.arange(batch.shape.max_tokens, dtype=jnp.int32)
        starts = starts - take(batch.query_start_loc, requests)
    return jnp.where(requests >= 0, take(batch.num_computed_tokens, requests) + starts, -1)
