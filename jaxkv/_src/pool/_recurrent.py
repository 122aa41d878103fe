"""Writes and reads of recurrent states."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache import KVCache, Period, StepBatch, state_blocks
from jaxkv._src.internal.checks import check_int32
from jaxkv._src.internal.mesh import runs_manually
from jaxkv._src.pool._bytes import (
    SAME,
    flag_period,
    from_bytes,
    locate,
    on_devices,
    read_bytes,
    to_bytes,
    write_bytes,
)
from jaxkv._src.pool._tokens import check_batch, check_owner
from jaxkv._src.specs import StateSpec
from pallas_kernels import Implementation


def write_state(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    arrays: Sequence[Array],
    *,
    at: Array | None = None,
    period: Period = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes one recurrent state per request of a step.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)         # zeros for a fresh request
        cache = jaxkv.write_state(cache, "state", batch, [0.5 * state + 1])

    Args:
      cache, layer, batch, period: as for `write_tokens`.
      arrays: the spec's arrays, each [B, *shape]; cast to the spec's dtypes.
      at: int32[B], index among the blocks that the step writes: the running state comes first,
        followed by one block per draft (``speculative_blocks``); with ``cache_mode="all"`` there
        is one per block that the step's tokens touch. None: the block of the newest token.
      implementation: as for `pallas_kernels.write_rows`.

    Returns:
      The cache with the states written; rows of padding write nothing.

    Raises:
      TypeError: the layer keeps no states, or ``at`` is not int32.
      ValueError: shapes that do not fit the layer and the batch.
    """
    spec = _state_spec(cache, layer, batch, at)
    check_owner(cache, layer)
    shapes = tuple((batch.shape.batch_size, *shape) for shape in spec.shapes)
    given = tuple(array.shape for array in arrays)
    if given != shapes:
        raise ValueError(f"arrays have shapes {given}; layer {layer!r} wants {shapes}")

    def write(
        cache: KVCache, batch: StepBatch, arrays: Sequence[Array], at: Array | None, period: Period
    ) -> KVCache:
        group = cache.layout.place_of(layer).group
        ids = state_blocks(batch, group, at, reading=False)
        data = [
            to_bytes(array.astype(dtype), 1)
            for array, dtype in zip(arrays, spec.dtypes, strict=True)
        ]
        cache = write_bytes(
            cache,
            locate(cache, layer, period),
            ids,
            jnp.zeros_like(ids),
            jnp.concatenate(data, axis=-1),
            implementation=implementation,
        )
        return flag_period(cache, layer, period)

    return on_devices(
        write,
        cache,
        *(batch, list(arrays), at, period),
        in_specs=(SAME,) * 4,
        out_specs=cache.partition_specs(),
    )


def read_state(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    at: Array | None = None,
    period: Period = None,
) -> tuple[Array, ...]:
    """Reads the state that each request of a step resumes from.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)         # [B, *shape], one per array

    A request that has computed nothing reads zeros, whatever its block held before, so that no
    request reads another's state. Padding reads zeros, too.

    Args:
      cache, layer, batch, period: as for `write_tokens`.
      at: int32[B], reads these blocks instead, indexed as for `write_state`: for example the
        state after the accepted drafts. None: the block to resume from.

    Returns:
      The spec's arrays, each [B, *shape].

    Raises:
      TypeError: the layer keeps no states, or ``at`` is not int32.
      ValueError: ``at`` of another shape.
    """
    spec = _state_spec(cache, layer, batch, at)

    def read(
        cache: KVCache, batch: StepBatch, at: Array | None, period: Period
    ) -> tuple[Array, ...]:
        ids = state_blocks(batch, cache.layout.place_of(layer).group, at, reading=True)
        if at is not None:
            ids = jnp.where(batch.num_computed_tokens > 0, ids, -1)
        data = read_bytes(cache, locate(cache, layer, period), ids)[..., 0, :]
        ends = np.cumsum(spec.array_bytes)
        return tuple(
            from_bytes(data[..., end - size : end], (*ids.shape, *shape), dtype)
            for end, size, shape, dtype in zip(
                ends, spec.array_bytes, spec.shapes, spec.dtypes, strict=True
            )
        )

    return on_devices(read, cache, batch, at, period, in_specs=(SAME,) * 3, out_specs=SAME)


def _state_spec(cache: KVCache, layer: str, batch: StepBatch, at: Array | None) -> StateSpec:
    check_batch(cache, batch)
    spec = cache.layout.place_of(layer).spec
    if not isinstance(spec, StateSpec):
        raise TypeError(
            f"layer={layer!r} keeps tokens, not states; use read_tokens and write_tokens, or "
            "read_rows and write_rows for latent rows"
        )
    if cache.layout.axis is not None and not runs_manually(cache.layout.axis):
        raise ValueError(
            f"layer={layer!r} stores states, and jaxkv does not know which of their axes are "
            f"divided over mesh axis {cache.layout.axis!r}: call this inside jax.shard_map, with "
            "cache.partition_specs() for the cache"
        )
    if at is not None:
        check_int32(at=at)
        if at.shape != (batch.shape.batch_size,):
            raise ValueError(
                f"at has shape {at.shape}; wants {(batch.shape.batch_size,)}, one block per request"
            )
    return spec
