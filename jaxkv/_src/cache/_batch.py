"""The requests of a step as the model sees them: positions, block tables and slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxkv._src.cache._expand import expand_blocks
from jaxkv._src.cache._layout import LayerIndex
from jaxkv._src.cache._requests import BatchRequests
from jaxkv._src.cache._slots import PAD_SLOT, GroupBatch
from jaxkv._src.internal.checks import check_count
from jaxkv._src.internal.numbers import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class StepBatch(BatchRequests):
    """The requests of one step as the model sees them, padded to the step's shape.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        positions = batch.positions                  # int32[T]; -1 for padding
        tables = batch.kernel_block_tables("layer")  # int32[B, W]; 0 for padding
        slots = batch.slot_mapping("layer")          # int32[T]; -1 for padding

    B is the number of requests, T the number of tokens and W the width of a table. In a flat batch
    the tokens of all requests lie end to end, request i at ``query_start_loc[i] :
    query_start_loc[i + 1]``, and a token array is [T]. In a rectangular batch
    (``shape.tokens_per_request``) a token array is [B, T / B], padded after the tokens of each.

    Properties compute their arrays on access; inside ``jit`` XLA merges repeated computations.
    """

    def in_group(self, group: int) -> GroupBatch:
        """Returns the requests with the block table of one group."""
        check_count(group=group)
        if group >= len(self.tables):
            raise ValueError(f"group={group} is not in 0..{len(self.tables) - 1}, the plan's")
        return GroupBatch(self, self.tables[group], self.layout.growths[group])

    def kernel_block_tables(
        self, layer: str, *, layer_index: LayerIndex = None
    ) -> Int32[Array, "requests width"]:
        """Returns the kernel blocks of each request, int32[B, W * k], for a layer's kernel.

        Ids index the block axis of ``layer_view(cache, layer)``, which may hold several layers;
        k is the number of kernel blocks in a block. Padding, and blocks that the request
        lacks, are 0: the null block.

        A table lists the logical blocks that this step reads: all of them for full attention; for
        windows and chunks from the block of the oldest visible token on, see
        `first_positions`; for recurrent states the block to resume from (null for a fresh
        request), followed by the blocks to write.

        Args:
          layer: name of a layer.
          layer_index: index of a layer of the group, may be traced; see `jaxkv.write_tokens`.

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

    def first_positions(self, layer: str) -> Int32[Array, "requests"]:
        """Returns int32[B], the position of the first token of each row of a table."""
        group = self.layout.placement_of(layer).group
        return self.in_group(group).first_positions

    def slot_mapping(
        self, layer: str, *, layer_index: LayerIndex = None
    ) -> Int32[Array, "*tokens"]:
        """Returns the slot of each token in a layer: an int32 token array, -1 for no slot.

        A slot is ``block_id * block_size + offset``, which is also ``kernel_block_id *
        kernel_block_size + offset`` for every kernel block size. Slots index the first two axes
        of ``layer_view(cache, layer)`` in order LBNHC, flattened into one; like
        `kernel_block_tables`, they count the layers before this one in the view. Divide
        them by ``compress_ratio`` where tokens share a row. In a ring only the last tokens of a
        request have slots.

        Args:
          layer: name of a layer that stores tokens.
          layer_index: index of a layer of the group, may be traced; see `jaxkv.write_tokens`.

        Raises:
          TypeError: the layer stores states, or the encoder's tokens.
          ValueError: int32 cannot count the slots of the layer's buffer.
        """
        requests = self.in_group(self.layout.placement_of(layer).group)
        growth, size = requests.growth, requests.growth.block_size
        if growth.stores not in ("tokens", "ring"):
            raise TypeError(
                f"layer={layer!r} stores {growth.stores!r}, which has no slot for each token of a "
                "step; use read_state and write_state for states"
            )
        slots = requests.token_slots
        self.layout.check_ids(layer, layer_index, size, "slots")
        offset = jnp.asarray(self._id_offset(layer, layer_index), jnp.int32)
        return jnp.where((slots < 0) | (offset < 0), PAD_SLOT, slots + offset * size)

    def _id_offset(self, layer: str, layer_index: LayerIndex) -> Array | int:
        """Returns how many blocks precede a layer's in its view; -1 for an unknown layer_index."""
        return self.layout.at_layer_index(layer, layer_index, self.layout.id_offset, -1)
