"""The device side of a step: block tables, copies and zeroing, in one dispatch."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jaxkv._src.block_tables import TableEntries, append_block_ids, gather_batch, report
from jaxkv._src.cache import CacheFlags, KVCache, StepBatch, check_cache, check_layout
from jaxkv._src.internal.checks import check_choice, check_int32, check_kind
from jaxkv._src.internal.indexing import bit
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.persistent_jit import run_persistent
from jaxkv._src.pool import copy_blocks, on_devices, zero_blocks
from jaxkv._src.uploads import Upload
from pallas_kernels import Implementation


def apply_step(
    cache: KVCache, upload: Upload, *, implementation: Implementation | None = None
) -> tuple[KVCache, StepBatch]:
    """Brings a cache up to date with a step, before the model runs.

    Copies blocks, zeroes fresh blocks, writes new block ids into the tables, and gathers the tables
    of the step's requests::

        @jax.jit(donate_argnums=1, compiler_options=jaxkv.step.COMPILER_OPTIONS)
        def step(params, cache, upload):
            cache, batch = jaxkv.apply_step(cache, upload)
            ...

    Call it inside your own jitted step, where it costs least. Pass ``cache`` and ``upload`` to that
    step as arguments; never close over them. The options keep XLA from counting a donated
    pool more than once (`jaxkv.step`).

    Args:
      cache: as the previous step returned it.
      upload: from `BlockManager.step` or `pack_step`.
      implementation: of the kernels, as for `pallas_kernels.zero_blocks`.

    Returns:
      The cache, and the `StepBatch` of this step, for `attend` and for the model.

    Raises:
      TypeError: an upload that is not int32, or arguments of other types.
      ValueError: an upload of another plan than the cache's.
    """
    check_cache(cache)
    check_kind(Upload, "what BlockManager.step returned", upload=upload)
    shape = upload.shape
    check_layout(cache.layout, shape)
    check_int32(upload=upload.data)
    if implementation is not None:
        check_choice(get_args(Implementation), implementation=implementation)
    if upload.data.shape != (shape.format.size,):
        raise ValueError(
            f"upload has shape {upload.data.shape}; its step shape wants {(shape.format.size,)}"
        )
    same = PartitionSpec()

    def apply(cache: KVCache, data: Array) -> tuple[KVCache, StepBatch]:
        upload = Upload(data=data, shape=shape)
        state, of_batch = run_persistent(_apply, cache, upload, implementation=implementation)
        rows, status, buffers = state
        cache = dataclasses.replace(cache, rows=rows, status=status, buffers=buffers)
        block_ids, data = of_batch
        sizes = {"shape": shape, "layout": cache.layout}
        return cache, StepBatch(block_ids=block_ids, data=data, status=status, **sizes)

    cache, batch = on_devices(
        apply,
        cache,
        _on_device(upload.data),
        in_specs=(same,),
        out_specs=(cache.partition_specs(), same),
    )
    return cache, dataclasses.replace(batch, status=_shared(cache.status))


def _shared(status: Array) -> Array:
    """Returns the status of a cache for its batch, which outlives the cache if that is donated.

    Inside ``jit`` it is the same value, by which `attend` knows without comparing that both are of
    one step.
    """
    return status if isinstance(status, jax.core.Tracer) else jnp.copy(status)


def _on_device(data: Array | np.ndarray) -> Array | np.ndarray:
    """Returns an upload in device memory; one of a ring is in page-locked host memory."""
    if jax.typeof(data).memory_space == jax.memory.Space.Host:
        return jax.device_put(data, jax.memory.Space.Device)
    return data


def _apply(
    cache: KVCache, upload: Upload, *, implementation: Implementation | None
) -> tuple[tuple[Array, Array, tuple[Array, ...]], tuple[Array, Array]]:
    """Returns rows, status and buffers of the cache, and block ids and data of the batch."""
    shape = upload.shape
    parts = shape.format.split(jnp.asarray(upload.data))
    number = parts["number"][0]
    bad_number = _check_number(cache, number)
    cache = dataclasses.replace(cache, status=_next_status(cache.status, number))
    cache = append_block_ids(cache, _entries(parts))
    batch, bad_batch = gather_batch(
        cache, jnp.asarray(upload.data)[shape.format.batch_fields], shape
    )
    cache = report(cache, bad_number, bad_batch)
    if shape.block_copies:  # before zeroing: a source may be free, and fresh, by now
        pairs = parts["copy_sources"], parts["copy_destinations"]
        cache = copy_blocks(cache, *pairs, parts["copy_ends"], implementation=implementation)
    if shape.zero_ids:
        cache = zero_blocks(
            cache, parts["zero_ids"], parts["zero_ends"], implementation=implementation
        )
    return (cache.rows, cache.status, cache.buffers), (batch.block_ids, batch.data)


def _entries(parts: dict[str, Array]) -> TableEntries:
    return TableEntries(
        rows=parts["entry_rows"],
        logical_blocks=parts["entry_logical_blocks"],
        block_ids=parts["entry_ids"],
        ends=parts["entry_ends"],
        changed_rows=parts["changed_rows"],
        row_lengths=parts["row_lengths"],
    )


def _check_number(cache: KVCache, number: Array) -> Array:
    """Returns the flags, int32[], of lost and of repeated uploads.

    Numbers wrap from the largest int32 to 1. 0 is not numbered, and -n is n after a reset: both
    follow any other number.
    """
    last = jnp.where(cache.status[1] == INT32_MAX, 0, cache.status[1])
    problems = bit(CacheFlags.LOST_UPLOAD, number > last + 1)
    return problems | bit(CacheFlags.REPEATED_UPLOAD, (number > 0) & (number <= last))


def _next_status(status: Array, number: Array) -> Array:
    """Returns the status before an upload's own errors: elementwise, so that XLA need not copy it.

    The first upload after a reset clears the flags of steps whose results were given up.
    """
    is_flags = jnp.arange(2, dtype=jnp.int32) == 0
    before = jnp.where(number < 0, 0, status)
    return jnp.where(is_flags, before, jnp.where(number == 0, status, jnp.abs(number)))
