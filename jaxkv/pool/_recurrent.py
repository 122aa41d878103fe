"""Recurrent state, read and written whole by block id."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.checks import check_int32
from jaxkv.pool._bytes import from_bytes, read_bytes, to_bytes, write_bytes
from jaxkv.pool._state import KVPool
from jaxkv.specs import StateSpec


def write_state(
    pool: KVPool,
    layer: str,
    block_ids: Array,
    arrays: Sequence[Array],
    *,
    implementation: str | None = None,
) -> KVPool:
    """Writes recurrent state, one per block id.

    Args:
      block_ids: int32[B]; distinct, or out of range for padding.
      arrays: the spec's arrays, each [B, *shape]; cast to the spec's dtypes.
      implementation: of `pallas_kernels.write_rows`.
    """
    check_int32(block_ids=block_ids)
    spec = _state_spec(pool, layer)
    shapes = tuple((*block_ids.shape, *shape) for shape in spec.shapes)
    given = tuple(array.shape for array in arrays)
    if given != shapes:
        raise ValueError(f"arrays have shapes {given}; layer {layer!r} wants {shapes}")
    data = [
        to_bytes(array.astype(dtype), block_ids.ndim)
        for array, dtype in zip(arrays, spec.dtypes, strict=True)
    ]
    return write_bytes(
        pool,
        layer,
        block_ids,
        jnp.zeros_like(block_ids),
        jnp.concatenate(data, axis=-1),
        implementation=implementation,
    )


def read_state(pool: KVPool, layer: str, block_ids: Array) -> tuple[Array, ...]:
    """Recurrent state by block id, int32[B]: the spec's arrays, each [B, *shape]."""
    check_int32(block_ids=block_ids)
    spec = _state_spec(pool, layer)
    data = read_bytes(pool, layer, block_ids)[..., 0, :]  # a state is one row
    ends = np.cumsum(spec.array_bytes)
    return tuple(
        from_bytes(data[..., end - size : end], (*block_ids.shape, *shape), dtype)
        for end, size, shape, dtype in zip(
            ends, spec.array_bytes, spec.shapes, spec.dtypes, strict=True
        )
    )


def _state_spec(pool: KVPool, layer: str) -> StateSpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, StateSpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not state; use read_tokens")
    return spec
