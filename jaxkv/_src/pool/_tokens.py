"""Writes and reads of tokens: keys and values, latent rows, rows of your own format."""

import math

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxkv._src.cache import PAD_SLOT, KVCache, Period, StepBatch, encoder_slots, token_slots
from jaxkv._src.internal.mesh import runs_manually
from jaxkv._src.layout import row_format, rows_per_block
from jaxkv._src.pool._bytes import (
    SAME,
    check_pool,
    flag_period,
    from_bytes,
    locate,
    on_devices,
    read_bytes,
    to_bytes,
    write_bytes,
)
from jaxkv._src.specs import FullAttentionSpec, MLASpec
from pallas_kernels import Implementation

TokenSpec = FullAttentionSpec | MLASpec


def quantize(values: Array, dtype: DTypeLike, scale: Array | float) -> Array:
    """Returns ``values / scale`` in a cache dtype, saturating at the largest finite value.

    To quantize and convert back inside one ``jit``, put `jax.lax.optimization_barrier` in between:
    otherwise XLA removes both conversions.

    Args:
      values: floats of any shape.
      dtype: a float or signed integer dtype; integers are rounded.
      scale: a number, or an array that broadcasts to ``values``.

    Raises:
      TypeError: ``dtype`` is uint8, which holds bytes of your own format.
    """
    if jnp.dtype(dtype) == jnp.uint8:
        raise TypeError(
            "dtype=uint8 holds bytes of your own format, not numbers; pack the rows and use "
            "write_rows"
        )
    scaled = values.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(scaled), info.min, info.max).astype(dtype)
    # Conversion turns values that are too large into NaN (fp8) or Inf, and 0 * Inf is NaN.
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def write_tokens(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    keys: Array,
    values: Array,
    *,
    period: Period = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes the keys and values of a step's tokens into an attention layer.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        cache = jaxkv.write_tokens(cache, "layer", batch, keys, values)    # [T, heads, K] each

    `attend` writes and attends in one call; use this with attention of your own.

    Args:
      cache, batch: from `apply_step`. The batch gives the place of each token.
      layer: name of a layer that stores keys and values.
      keys: [T, heads, K], or [B, T / B, heads, K] for a rectangular batch; any float dtype.
        For cross attention the encoder's keys, [B, E, heads, K].
      values: [T, heads, V], or with the leading axes of ``keys``; any float dtype.
      period: int32[], may be traced: writes layer ``cache.period_layers(layer)[period]`` instead
        of ``layer``. For models that scan over their layers with the cache in the carry.
      implementation: as for `pallas_kernels.write_rows`.

    Returns:
      The cache with the tokens written, in the layer's dtype and divided by its scales; padding
      is not written.

    Raises:
      TypeError: the layer keeps no keys and values, or arrays that are not floats.
      ValueError: shapes that do not fit the layer and the batch, or a layer that shares another
        layer's cache.
    """
    check_batch(cache, batch)
    spec = attention_spec(cache, layer)
    check_owner(cache, layer)
    shape = token_shape(cache, layer, batch, keys=keys)
    heads = spec.num_kv_heads * ranks_of_heads(cache)
    wanted = {"keys": (*shape, heads, spec.head_size), "values": (*shape, heads, spec.value_size)}
    for (name, wants), array in zip(wanted.items(), (keys, values), strict=True):
        if array.shape != wants:
            raise ValueError(
                f"{name} has shape {array.shape}; layer {layer!r} wants {wants}, padded to the "
                "step's shape"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {array.dtype}; pass floats, or stored rows to write_rows"
            )

    def write(
        cache: KVCache, batch: StepBatch, keys: Array, values: Array, period: Period
    ) -> KVCache:
        scales = layer_scales(cache, layer, period)
        parts = [quantize(x, spec.dtype, s) for x, s in zip((keys, values), scales, strict=True)]
        slots = slots_of(cache, layer, batch, shape)
        rows = jnp.concatenate(parts, axis=-1)
        return _write(cache, layer, slots, rows, period, implementation)

    by_head = cache.layout.heads_spec(layer, keys.ndim - 2)
    return on_devices(
        write,
        cache,
        *(batch, keys, values, period),
        in_specs=(SAME, by_head, by_head, SAME),
        out_specs=cache.partition_specs(),
    )


def write_rows(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    rows: Array,
    *,
    mask: Array | None = None,
    period: Period = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes rows in their stored form: MLA latents, or keys and values already quantized.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        rows = jnp.concatenate([keys, values], axis=-1).astype("bfloat16")    # [T, heads, K + V]
        cache = jaxkv.write_rows(cache, "layer", batch, rows)

    Args:
      cache, layer, batch, period, implementation: as for `write_tokens`.
      rows: [T, ...], or [B, T / B, ...] for a rectangular batch; ``token_bytes`` of the layer's
        spec for each token, in the layer's dtype or as uint8.
      mask: bool token array, True for tokens whose rows are written; None: all. If several
        tokens share a row (``compress_ratio``), select one of them: otherwise its content is
        unspecified.

    Returns:
      The cache with the rows written.

    Raises:
      TypeError: the layer keeps no rows of tokens, or rows of another dtype.
      ValueError: shapes that do not fit the layer and the batch.
    """
    check_batch(cache, batch)
    spec = token_spec(cache, layer)
    check_owner(cache, layer)
    check_rank_known(cache, layer, positions=False)
    shape = token_shape(cache, layer, batch, rows=rows)
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[len(shape) :])
    wanted = spec.token_bytes
    wanted *= ranks_of_heads(cache) if cache.layout.has_heads(layer) else 1
    if rows.shape[: len(shape)] != shape or row_bytes != wanted:
        raise ValueError(
            f"rows has shape {rows.shape} of {rows.dtype}; layer {layer!r} stores "
            f"{wanted} bytes for each of {shape} tokens"
        )
    dtype = row_format(spec).dtype
    if dtype != "uint8" and rows.dtype.name not in (dtype, "uint8"):
        raise TypeError(
            f"rows has dtype {rows.dtype}; layer {layer!r} stores {dtype}: cast it, or pass its "
            "bytes as uint8"
        )
    if mask is not None and mask.shape != shape:
        raise ValueError(f"mask has shape {mask.shape}; the batch wants {shape}")

    def write(
        cache: KVCache, batch: StepBatch, rows: Array, mask: Array | None, period: Period
    ) -> KVCache:
        slots = slots_of(cache, layer, batch, shape)
        slots = slots if mask is None else jnp.where(mask, slots, PAD_SLOT)
        return _write(cache, layer, slots, rows, period, implementation)

    by_head = cache.layout.heads_spec(layer, len(shape)) if cache.layout.has_heads(layer) else SAME
    return on_devices(
        write,
        cache,
        *(batch, rows, mask, period),
        in_specs=(SAME, by_head, SAME, SAME),
        out_specs=cache.partition_specs(),
    )


def read_tokens(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    dtype: DTypeLike = jnp.float32,
    period: Period = None,
) -> tuple[Array, Array]:
    """Reads the keys and values of all blocks that a step's requests see.

    For tests and small models, because it copies what it reads::

        cache, batch = jaxkv.apply_step(cache, upload)
        keys, values = jaxkv.read_tokens(cache, "layer", batch)     # [B, W * block_size, heads, K]

    The result also has tokens that attention must not see: tokens outside the window, and those
    that are not written yet. Token i of request b has the position
    ``batch.first_positions(layer)[b] + i``; mask it by that, and by ``batch.seq_lens[b]``.

    Args:
      cache, layer, batch, period: as for `write_tokens`.
      dtype: of the result.

    Returns:
      ``dtype[B, W * block_size, heads, K]`` and the same with V, with scales applied: W blocks,
      beginning with that of the oldest visible token.

    Raises:
      TypeError: the layer keeps no keys and values.
    """
    check_batch(cache, batch)
    spec = attention_spec(cache, layer)
    check_rank_known(cache, layer)

    def read(cache: KVCache, batch: StepBatch, period: Period) -> tuple[Array, Array]:
        rows = _read(cache, layer, batch, period).astype(dtype)
        key_scale, value_scale = (
            jnp.asarray(scale, dtype) for scale in layer_scales(cache, layer, period)
        )
        return rows[..., : spec.head_size] * key_scale, rows[..., spec.head_size :] * value_scale

    by_head = cache.layout.heads_spec(layer, 2)
    return on_devices(
        read, cache, batch, period, in_specs=(SAME, SAME), out_specs=(by_head, by_head)
    )


def read_rows(cache: KVCache, layer: str, batch: StepBatch, *, period: Period = None) -> Array:
    """Reads the stored rows of all blocks that a step's requests see.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        rows = jaxkv.read_rows(cache, "layer", batch)      # [B, W * block_size, heads, K + V]

    Like `read_tokens`, but without scales and in the layer's dtype.

    Args:
      cache, layer, batch, period: as for `write_tokens`.

    Returns:
      [B, W * rows per block, heads, K + V] for keys and values; [B, W * rows per block, width] for
      latent rows, and for rows of bytes.

    Raises:
      TypeError: the layer keeps no rows of tokens.
    """
    check_batch(cache, batch)
    token_spec(cache, layer)
    check_rank_known(cache, layer)

    def read(cache: KVCache, batch: StepBatch, period: Period) -> Array:
        return _read(cache, layer, batch, period)

    by_head = cache.layout.heads_spec(layer, 2) if cache.layout.has_heads(layer) else SAME
    return on_devices(read, cache, batch, period, in_specs=(SAME, SAME), out_specs=by_head)


def _read(cache: KVCache, layer: str, batch: StepBatch, period: Period) -> Array:
    """Reads the stored rows of a step's blocks: [B, W * rows, *row] in the layer's dtype."""
    block_ids = batch.tables[cache.layout.place_of(layer).group]
    row_shape, dtype = row_shape_of(token_spec(cache, layer))
    data = read_bytes(cache, locate(cache, layer, period), block_ids)
    return from_bytes(data, (data.shape[0], data.shape[1] * data.shape[2], *row_shape), dtype)


def _write(
    cache: KVCache,
    layer: str,
    slots: Array,
    rows: Array,
    period: Period,
    implementation: Implementation | None,
) -> KVCache:
    spec = token_spec(cache, layer)
    tokens_per_row = spec.block_size // rows_per_block(spec)
    cache = write_bytes(
        cache,
        locate(cache, layer, period),
        jnp.where(slots < 0, -1, slots // spec.block_size),
        slots % spec.block_size // tokens_per_row,
        to_bytes(rows, slots.ndim),
        implementation=implementation,
    )
    return flag_period(cache, layer, period)


def slots_of(cache: KVCache, layer: str, batch: StepBatch, shape: tuple[int, ...]) -> Array:
    """Returns the slots of the tokens, or of the encoder's tokens, that a step writes."""
    group = cache.layout.place_of(layer).group
    if cache.layout.growths[group].stores == "encoder":
        return encoder_slots(batch, group, shape[1])
    return token_slots(batch, group)


def token_shape(cache: KVCache, layer: str, batch: StepBatch, **arrays: Array) -> tuple[int, ...]:
    """Returns the leading axes of an array of a layer's tokens, given by its name."""
    ((name, array),) = arrays.items()
    growth = cache.layout.growths[cache.layout.place_of(layer).group]
    if growth.stores != "encoder":
        return batch.token_shape
    if array.ndim < 3 or array.shape[0] != batch.shape.batch_size:
        raise ValueError(
            f"{name} has shape {array.shape}; cross attention wants the encoder's, "
            f"[{batch.shape.batch_size}, encoder tokens, ...]"
        )
    return array.shape[:2]


def check_batch(cache: KVCache, batch: StepBatch) -> None:
    """Raises TypeError or ValueError unless the batch belongs to a step of this cache."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    if not isinstance(batch, StepBatch):
        raise TypeError(
            f"batch must be the StepBatch that apply_step returned, got {type(batch).__name__}"
        )
    if batch.layout != cache.layout:
        raise ValueError(
            "batch belongs to another cache; use the one that apply_step returned with this cache"
        )


def check_rank_known(cache: KVCache, layer: str, *, positions: bool = True) -> None:
    """Raises ValueError outside ``shard_map`` if the parts of all ranks do not form an array.

    Args:
      positions: whether that holds for positions, too, which context parallelism divides.
    """
    layout = cache.layout
    if layout.axis is None or runs_manually(layout.axis):
        return
    parts = "its own positions" if positions and layout.context_parallel > 1 else ""
    if isinstance(layout.place_of(layer).spec, FullAttentionSpec) and not layout.has_heads(layer):
        parts = "the bytes of its own heads, which have no axis of heads"
    if parts:
        raise ValueError(
            f"layer={layer!r}: each rank of mesh axis {layout.axis!r} holds {parts}; call this "
            "inside jax.shard_map, with cache.partition_specs() for the cache"
        )


def check_owner(cache: KVCache, layer: str) -> None:
    """Raises ValueError for a layer that shares another layer's cache."""
    owner = cache.layout.owner_of(layer)
    if owner != layer:
        raise ValueError(
            f"layer={layer!r} shares the cache of {owner!r} and writes nothing; leave its write "
            "out, or pass attend no keys"
        )


def layer_scales(
    cache: KVCache, layer: str, period: Period = None
) -> tuple[Array | float, Array | float]:
    """Returns the K and the V scale of a layer, f32[] each; 1.0 if the cache has none."""
    if cache.scales is None:
        return 1.0, 1.0
    layout = cache.layout
    index = layout.of_period(layer, period, lambda x: layout.layer_index[layout.owner_of(x)], 0)
    return cache.scales[index, 0], cache.scales[index, 1]


def ranks_of_heads(cache: KVCache) -> int:
    """Returns how many ranks' KV heads an array holds here: 1 inside ``shard_map``."""
    layout = cache.layout
    check_pool(cache)
    if layout.heads_axis is None or not _is_sharded(cache):
        return 1
    return layout.num_ranks


def _is_sharded(cache: KVCache) -> bool:
    shapes = (buffer.shape for buffer in cache.buffers)
    return any(got != own for got, own in zip(shapes, cache.layout.buffers.shapes, strict=True))


def row_shape_of(spec: TokenSpec) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype of one stored row, with an axis of heads if it holds K and V."""
    row = row_format(spec)
    return (row.width,) if row.key_elements is None else (row.heads, row.width), row.dtype


def token_spec(cache: KVCache, layer: str) -> TokenSpec:
    """Returns the spec of a layer that stores rows of tokens; raises TypeError for others."""
    spec = cache.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec | MLASpec):
        raise TypeError(f"layer={layer!r} keeps states, not tokens; use read_state and write_state")
    return spec


def attention_spec(cache: KVCache, layer: str) -> FullAttentionSpec:
    """Returns the spec of a layer that stores keys and values; raises TypeError for others."""
    spec = cache.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec):
        raise TypeError(
            f"layer={layer!r} keeps {spec.kind}, not keys and values; use write_rows and read_rows "
            "for latent rows, write_state and read_state for states"
        )
    if row_format(spec).key_elements is None:
        raise TypeError(
            f"layer={layer!r} stores scales next to its {spec.dtype} elements; pack its rows "
            "yourself, and use write_rows and read_rows"
        )
    return spec
