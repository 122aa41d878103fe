"""Writes and reads of recurrent states."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32, Shaped

from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_int32, check_kind
from jaxkv._src.internal.mesh import runs_manually
from jaxkv._src.pool._bytes import on_devices, read_elements, to_bytes, write_bytes
from jaxkv._src.pool._layer import SAME, BoundLayer, bind, put_back
from jaxkv._src.pool._tokens import check_owner
from jaxkv._src.specs import StateSpec
from pallas_kernels import Implementation


def write_state(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    arrays: Sequence[Shaped[Array, "requests ..."]],
    *,
    at: Int32[Array, "requests"] | None = None,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes one recurrent state per request of a step.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)         # zeros for a fresh request
        cache = jaxkv.write_state(cache, "state", batch, [0.5 * state + 1])

    Args:
      cache, layer, batch, layer_index: as for `write_tokens`.
      arrays: the spec's arrays, each [B, *shape]; cast to the spec's dtypes.
      at: int32[B], index among the blocks that the step writes: the running state comes first,
        followed by one block per draft (``speculative_blocks``); with ``cache_mode="all"`` there
        is one per block that the step's tokens touch; -1: none. None: the block of the newest
        token, which a step that may verify drafts does not accept.
      implementation: as for `pallas_kernels.write_rows`.

    Returns:
      The cache with the states written; rows of padding write nothing.

    Raises:
      TypeError: the layer stores no states, or ``at`` is not int32.
      ValueError: shapes that do not fit the layer and the batch.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = _state_spec(layer, bound, at)
    check_owner(bound.layout, layer)
    shapes = tuple((batch.shape.batch_size, *shape) for shape in spec.shapes)
    check_kind(Sequence, "a list of arrays", arrays=arrays)
    check_array(**{f"arrays[{i}]": array for i, array in enumerate(arrays)})
    given = tuple(array.shape for array in arrays)
    if given != shapes:
        raise ValueError(f"arrays have shapes {given}; layer {layer!r} wants {shapes}")
    if at is None and spec.speculative_blocks and batch.shape.max_query_len > 1:
        raise ValueError(
            f"layer={layer!r} has speculative_blocks={spec.speculative_blocks}, and a step may "
            "verify drafts: call write_state for the state after each of its tokens, with at="
        )
    return put_back(cache, layer, bound, _write_state(bound, tuple(arrays), at))


@jax.jit
def _write_state(bound: BoundLayer, arrays: tuple[Array, ...], at: Array | None) -> Array:
    def write(bound: BoundLayer, arrays: tuple[Array, ...], at: Array | None) -> Array:
        ids = bound.requests.state_blocks(at, reading=False)
        # Otherwise XLA may write one array before another is read, and copies the pool for that.
        arrays = lax.optimization_barrier(arrays)
        for array, dtype, part in zip(arrays, spec.dtypes, _parts(spec), strict=True):
            data = to_bytes(array.astype(dtype), 1)
            buffer = write_bytes(bound, ids, jnp.zeros_like(ids), data, start=part.start)
            bound = dataclasses.replace(bound, buffer=buffer)
        return bound.buffer

    spec = bound.form.spec
    given = bound, arrays, at
    return on_devices(write, *given, in_specs=(SAME, SAME), out_specs=bound.layout.buffer_spec)


def read_state(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    at: Int32[Array, "requests"] | None = None,
    layer_index: LayerIndex = None,
) -> tuple[Shaped[Array, "requests ..."], ...]:
    """Reads the state that each request of a step resumes from.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        (state,) = jaxkv.read_state(cache, "state", batch)         # [B, *shape], one per array

    A request that has computed nothing reads zeros, whatever its block held before, so that no
    request reads another's state. Padding reads zeros, too.

    Args:
      cache, layer, batch, layer_index: as for `write_tokens`.
      at: int32[B], reads these blocks instead, indexed as for `write_state`; -1, or None: the block
        to resume from. That is the one after the accepted drafts with ``cache_mode="none"``; with
        another mode a layer with ``speculative_blocks`` needs ``at``, to say which they are.

    Returns:
      The spec's arrays, each [B, *shape].

    Raises:
      TypeError: the layer stores no states, or ``at`` is not int32.
      ValueError: ``at`` of another shape.
    """
    bound = bind(cache, layer, batch, layer_index)
    spec = _state_spec(layer, bound, at)
    if at is None and spec.speculative_blocks and spec.cache_mode != "none":
        raise ValueError(
            f"layer={layer!r} has cache_mode={spec.cache_mode!r} and speculative_blocks="
            f"{spec.speculative_blocks}: pass at=, the blocks of the states after the accepted "
            "drafts, and -1 for requests that had none"
        )
    return _read_state(bound, at)


@jax.jit
def _read_state(bound: BoundLayer, at: Array | None) -> tuple[Array, ...]:
    def read(bound: BoundLayer, at: Array | None) -> tuple[Array, ...]:
        ids = bound.requests.state_blocks(at, reading=True)
        if at is not None:
            ids = jnp.where(bound.batch.num_computed_tokens > 0, ids, -1)
        return tuple(
            read_elements(bound, ids, dtype, part).reshape(*ids.shape, *shape)
            for part, shape, dtype in zip(_parts(spec), spec.shapes, spec.dtypes, strict=True)
        )

    spec = bound.form.spec
    return on_devices(read, bound, at, in_specs=(SAME,), out_specs=SAME)


def _parts(spec: StateSpec) -> list[slice]:
    """Returns the bytes of each array of a state."""
    ends = itertools.accumulate(spec.array_bytes, initial=0)
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _state_spec(layer: str, bound: BoundLayer, at: Array | None) -> StateSpec:
    spec, layout = bound.form.spec, bound.layout
    if not isinstance(spec, StateSpec):
        raise TypeError(
            f"layer={layer!r} stores tokens, not states; use read_tokens and write_tokens, or "
            "read_rows and write_rows for latent vectors"
        )
    if spec.replay:
        raise ValueError(
            f"layer={layer!r} has replay={spec.replay}: its pages hold checkpoints and inputs, "
            "which gated_delta, mamba2 and linear_attention read and write; plan it with replay=0"
        )
    if layout.axis is not None and not runs_manually(layout.axis):
        raise ValueError(
            f"layer={layer!r} stores states, and jaxkv does not know which of their axes are "
            f"divided over mesh axis {layout.axis!r}: call this inside jax.shard_map, with "
            "cache.partition_specs() for the cache"
        )
    if at is not None:
        check_int32(at=at)
        wanted = (bound.batch.shape.batch_size,)
        if at.shape != wanted:
            raise ValueError(f"at has shape {at.shape}; wants {wanted}, one block per request")
    return spec
