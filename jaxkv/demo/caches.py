"""Two homes for the model's memory: the paged pool, and dense arrays to compare with."""

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.block_tables import TableGroup
from jaxkv.kernel_blocks import row_format
from jaxkv.pool import (
    KVPool,
    layer_view,
    quantize,
    read_state,
    read_tokens,
    write_state,
    write_tokens,
)
from jaxkv.specs import FullAttentionSpec, LayerSpec, StateSpec

CONTEXT_AXIS = "context"  # of the mesh whose devices share out the positions of a request
KEY_SCALE, VALUE_SCALE = 0.02, 0.02  # per tensor; keys are normalised, values about 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PagedCache:
    """The pool, seen by a batch of B requests and T = B * C tokens in G groups."""

    pool: KVPool
    block_tables: tuple[Array, ...]  # per group int32[B, W], kernel blocks
    slots: Array  # int32[G, T]
    groups: tuple[TableGroup, ...] = dataclasses.field(metadata={"static": True})

    def attend(self, layer: str, keys: Array, values: Array) -> tuple[Self, Array, Array]:
        group = self.pool.layout.place_of(layer).group
        tokens = (-1, *keys.shape[2:])
        scales = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
        new, slots = (keys.reshape(tokens), values.reshape(tokens)), self.slots[group]
        pool = write_tokens(self.pool, layer, slots, *new, **scales)
        form, ids = self.groups[group], self.block_tables[group]
        if form.blocks_per_kv_block > 1:
            keys, values = _read_kernel_blocks(pool, layer, ids, form.blocks_per_kv_block)
        else:
            keys, values = read_tokens(pool, layer, ids, **scales)
        if form.context_parallel > 1:
            keys, values = _of_all_ranks(keys, form), _of_all_ranks(values, form)
        return dataclasses.replace(self, pool=pool), keys, values

    def read_state(self, layer: str) -> tuple[Array, Array]:
        conv, state = read_state(self.pool, layer, self._state_blocks(layer))
        return conv, state

    def write_state(self, layer: str, conv: Array, state: Array) -> Self:
        blocks = self._state_blocks(layer)
        return dataclasses.replace(self, pool=write_state(self.pool, layer, blocks, (conv, state)))

    def _state_blocks(self, layer: str) -> Array:
        return self.block_tables[self.pool.layout.place_of(layer).group][:, 0]


def _read_kernel_blocks(
    pool: KVPool, layer: str, block_ids: Array, blocks_per_kv_block: int
) -> tuple[Array, Array]:
    """As an attention kernel reads: kernel blocks of the layer's typed view, by their ids."""
    rows = layer_view(pool, layer, blocks_per_kv_block=blocks_per_kv_block)[block_ids]
    rows = rows.reshape(block_ids.shape[0], -1, *rows.shape[3:]).astype(jnp.float32)
    width = row_format(pool.layout.place_of(layer).spec).key_elements
    return rows[..., :width] * KEY_SCALE, rows[..., width:] * VALUE_SCALE


def _of_all_ranks(kept: Array, form: TableGroup) -> Array:
    """[B, t, H, D] of each rank -> [B, ranks * t, H, D]: dealt together again, turn by turn."""
    batch, _, *row = kept.shape
    turns = kept.reshape(batch, -1, form.interleave_tokens, *row)
    return lax.all_gather(turns, CONTEXT_AXIS, axis=2).reshape(batch, -1, *row)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DenseCache:
    """Each request's memory in arrays of its own: no pages, nothing shared or reused."""

    keys: Mapping[str, Array]  # dtype[B, max_model_len, H, D]
    values: Mapping[str, Array]
    states: Mapping[str, tuple[Array, Array]]
    positions: Array  # int32[B, C], of the tokens computed now

    @classmethod
    def empty(cls, layers: Mapping[str, LayerSpec], batch: int, max_model_len: int) -> Self:
        keys, values, states = {}, {}, {}
        for name, spec in layers.items():
            if isinstance(spec, FullAttentionSpec):
                rows = (batch, max_model_len, spec.num_kv_heads)
                keys[name] = jnp.zeros((*rows, spec.head_size), spec.dtype)
                values[name] = jnp.zeros((*rows, spec.value_size), spec.dtype)
            elif isinstance(spec, StateSpec):
                pairs = zip(spec.shapes, spec.dtypes, strict=True)
                conv, state = (jnp.zeros((batch, *shape), dtype) for shape, dtype in pairs)
                states[name] = conv, state
        return cls(
            keys=keys, values=values, states=states, positions=jnp.zeros((batch, 1), jnp.int32)
        )

    def attend(self, layer: str, keys: Array, values: Array) -> tuple[Self, Array, Array]:
        request = jnp.arange(keys.shape[0])[:, None]
        beyond = self.keys[layer].shape[1]
        place = request, jnp.where(self.positions < 0, beyond, self.positions)
        dtype = self.keys[layer].dtype
        kept_keys = self.keys[layer].at[place].set(quantize(keys, dtype, KEY_SCALE), mode="drop")
        kept_values = (
            self.values[layer].at[place].set(quantize(values, dtype, VALUE_SCALE), mode="drop")
        )
        cache = dataclasses.replace(
            self,
            keys={**self.keys, layer: kept_keys},
            values={**self.values, layer: kept_values},
        )
        return (
            cache,
            kept_keys.astype(jnp.float32) * KEY_SCALE,
            kept_values.astype(jnp.float32) * VALUE_SCALE,
        )

    def read_state(self, layer: str) -> tuple[Array, Array]:
        return self.states[layer]

    def write_state(self, layer: str, conv: Array, state: Array) -> Self:
        return dataclasses.replace(self, states={**self.states, layer: (conv, state)})
