"""Writes and reads of tokens: keys and values, latent vectors, bytes of your own format."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Num, Shaped

from jaxkv._src.cache import PAD_SLOT, CacheLayout, KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_number
from jaxkv._src.internal.mesh import runs_manually
from jaxkv._src.layout import row_format, rows_per_block
from jaxkv._src.pool._bytes import (
    on_devices,
    read_elements,
    to_bytes,
    write_bytes,
    write_token_heads,
)
from jaxkv._src.pool._layer import SAME, BoundLayer, bind, put_back
from jaxkv._src.specs import (
    PER_TOKEN_HEAD,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    RingSpec,
    canonical_dtype,
)
from pallas_kernels import Implementation, TokenHeadRow

TokenSpec = FullAttentionSpec | MLASpec | RingSpec


def quantize(
    values: Float[Array, "*shape"], dtype: DTypeLike, scale: Num[Array, "..."] | float
) -> Num[Array, "*shape"]:
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
    check_array(values=values)
    if not isinstance(scale, Array | np.ndarray):
        check_number(scale=scale)
    dtype = _dtype_of_numbers(dtype)
    scaled = values.astype(jnp.float32) / jnp.asarray(scale, jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(scaled), info.min, info.max).astype(dtype)
    # Conversion turns values that are too large into NaN (fp8) or Inf, and 0 * Inf is NaN.
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def _dtype_of_numbers(dtype: DTypeLike) -> jnp.dtype:
    name = canonical_dtype(dtype)
    if name in ("uint8", "nvfp4"):
        raise TypeError(
            f"dtype={name} holds bytes of your own format, not numbers; pack the rows and use "
            "write_rows, or read them with read_rows"
        )
    if name in PER_TOKEN_HEAD:
        raise TypeError(
            f"dtype={name} is of rows with a scale for each token and head; use "
            "pallas_kernels.TokenHeadRow, which packs and unpacks them"
        )
    return jnp.dtype(name)


def write_tokens(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    keys: Float[Array, "*tokens kv_heads key_size"],
    values: Float[Array, "*tokens kv_heads value_size"],
    *,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes the keys and values of a step's tokens into an attention layer.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        cache = jaxkv.write_tokens(cache, "layer", batch, keys, values)    # [T, heads, K] each

    `attend` writes and attends in one call; use this with attention of your own.

    Args:
      cache, batch: from `apply_step`. The batch gives the slot of each token.
      layer: name of a layer that stores keys and values.
      keys: [T, heads, K], or [B, T / B, heads, K] for a rectangular batch; any float dtype.
        For cross attention the encoder's keys, [B, E, heads, K].
      values: [T, heads, V], or with the leading axes of ``keys``; any float dtype.
      layer_index: int32[], may be traced: writes layer
        ``cache.stacked_layers(layer)[layer_index]`` instead of ``layer``. For models that scan over
        their layers with the cache in the carry.
      implementation: as for `pallas_kernels.write_rows`.

    Returns:
      The cache with the tokens written, in the layer's dtype and divided by its scales, or by those
      of each token and head (`pallas_kernels.TokenHeadRow` has the rule); padding is not written.

    Raises:
      TypeError: the layer stores no keys and values, or arrays that are not floats.
      ValueError: shapes that do not fit the layer and the batch, or a layer that shares another
        layer's cache.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    check_tokens(layer, bound, keys, values)
    return put_back(cache, layer, bound, _write_tokens(bound, keys, values))


def check_tokens(layer: str, bound: BoundLayer, keys: Array, values: Array) -> None:
    """Raises TypeError or ValueError unless keys and values fit a layer and its batch."""
    spec = _attention_spec(layer, bound.form.spec)
    check_owner(bound.layout, layer)
    shape = _token_shape(bound, keys=keys)
    heads = spec.num_kv_heads * bound.ranks_of_heads
    wanted = {"keys": (*shape, heads, spec.head_size), "values": (*shape, heads, spec.value_size)}
    check_array(keys=keys, values=values)
    for (name, wants), array in zip(wanted.items(), (keys, values), strict=True):
        if array.shape != wants:
            raise ValueError(
                f"{name} has shape {array.shape}; layer {layer!r} wants {wants}, padded to the "
                "step's shape; the last axes are num_kv_heads and head_size"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {array.dtype}; pass floats, or stored rows to write_rows"
            )


def check_latents(layer: str, bound: BoundLayer, rows: Array) -> None:
    """Raises TypeError or ValueError unless latent vectors fit a layer and its batch."""
    spec = token_spec(layer, bound.form.spec)
    check_owner(bound.layout, layer)
    check_array(keys=rows)
    wanted = (*bound.batch.token_shape, spec.head_size)
    if rows.shape != wanted:
        raise ValueError(
            f"keys has shape {rows.shape}; layer {layer!r} wants latent vectors, {wanted}"
        )
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"keys has dtype {rows.dtype}; pass floats, or stored rows to write_rows")


@jax.jit
def _write_tokens(bound: BoundLayer, keys: Array, values: Array) -> Array:
    by_head = bound.form.by_head(keys.ndim - 2)
    specs = {"in_specs": (by_head, by_head), "out_specs": bound.layout.buffer_spec}
    return on_devices(store_tokens, bound, keys, values, **specs)


def store_tokens(bound: BoundLayer, keys: Array, values: Array) -> Array:
    """Writes keys and values on one device; returns the buffer."""
    if (packed := token_head_row(bound.form.spec)) is not None:
        block_ids, rows = _places(bound, keys.shape)
        dtype = jnp.promote_types(keys.dtype, values.dtype)
        keys, values = (
            array.reshape(-1, *array.shape[-2:]).astype(dtype) for array in (keys, values)
        )
        return write_token_heads(bound, block_ids, rows, keys, values, packed)
    pairs = zip((keys, values), bound.key_value_scales, strict=True)
    rows = [quantize(array, bound.form.row.dtype, scale) for array, scale in pairs]
    return store_rows(bound, jnp.concatenate(rows, axis=-1))


def write_rows(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    rows: Shaped[Array, "..."],
    *,
    mask: Bool[Array, "*tokens"] | None = None,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes rows in their stored form: MLA latents, or keys and values already quantized.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        rows = jnp.concatenate([keys, values], axis=-1).astype("bfloat16")    # [T, heads, K + V]
        cache = jaxkv.write_rows(cache, "layer", batch, rows)

    Args:
      cache, layer, batch, layer_index, implementation: as for `write_tokens`.
      rows: [T, ...], or [B, T / B, ...] for a rectangular batch; ``token_bytes`` of the layer's
        spec for each token, in the layer's dtype or as uint8.
      mask: bool token array, True for tokens whose rows are written; None: all. If several
        tokens share a row (``compress_ratio``), select one of them: otherwise its content is
        unspecified.

    Returns:
      The cache with the rows written.

    Raises:
      TypeError: the layer stores no tokens, or rows of another dtype.
      ValueError: shapes that do not fit the layer and the batch.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    _check_rows(layer, bound, rows, mask)
    return put_back(cache, layer, bound, _write_rows(bound, rows, mask))


def _check_rows(layer: str, bound: BoundLayer, rows: Array, mask: Array | None) -> None:
    spec = token_spec(layer, bound.form.spec)
    check_owner(bound.layout, layer)
    check_rank_known(bound.layout, layer, positions=False)
    check_array(rows=rows)
    shape = _token_shape(bound, rows=rows)
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[len(shape) :])
    wanted = spec.token_bytes * (bound.ranks_of_heads if bound.form.has_heads else 1)
    if rows.shape[: len(shape)] != shape or row_bytes != wanted:
        raise ValueError(
            f"rows has shape {rows.shape} of {rows.dtype}; layer {layer!r} stores "
            f"{wanted} bytes for each of {shape} tokens"
        )
    dtype = bound.form.row.dtype
    if dtype != "uint8" and rows.dtype.name not in (dtype, "uint8"):
        raise TypeError(
            f"rows has dtype {rows.dtype}; layer {layer!r} stores {dtype}: cast it, or pass its "
            "bytes as uint8"
        )
    if mask is not None:
        check_array(mask=mask)
        if mask.shape != shape:
            raise ValueError(f"mask has shape {mask.shape}; the batch wants {shape}")


@jax.jit
def _write_rows(bound: BoundLayer, rows: Array, mask: Array | None) -> Array:
    by_head = bound.form.by_head(len(_token_shape(bound, rows=rows)))
    specs = {"in_specs": (by_head, SAME), "out_specs": bound.layout.buffer_spec}
    return on_devices(store_rows, bound, rows, mask, **specs)


def store_rows(bound: BoundLayer, rows: Array, mask: Array | None = None) -> Array:
    """Writes stored rows on one device; returns the buffer."""
    block_ids, places = _places(bound, rows.shape, mask)
    return write_bytes(bound, block_ids, places, to_bytes(rows, block_ids.ndim))


def _places(
    bound: BoundLayer, shape: tuple[int, ...], mask: Array | None = None
) -> tuple[Array, Array]:
    """Returns the block of each token that a step writes, and its row there.

    Blocks are negative for tokens that are not written.

    Args:
      shape: of what is written; an encoder's tokens are its second axis.
    """
    requests, block_size = bound.requests, bound.requests.growth.block_size
    is_encoder = requests.growth.stores == "encoder"
    slots = requests.encoder_slots(shape[1]) if is_encoder else requests.token_slots
    slots = slots if mask is None else jnp.where(mask, slots, PAD_SLOT)
    tokens_per_row = block_size // rows_per_block(bound.form.spec)
    return slots // block_size, slots % block_size // tokens_per_row


def read_tokens(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    *,
    dtype: DTypeLike = jnp.float32,
    layer_index: LayerIndex = None,
) -> tuple[
    Num[Array, "requests tokens kv_heads key_size"],
    Num[Array, "requests tokens kv_heads value_size"],
]:
    """Reads the keys and values of all blocks that a step's requests see.

    For tests and small models, because it copies what it reads::

        cache, batch = jaxkv.apply_step(cache, upload)
        keys, values = jaxkv.read_tokens(cache, "layer", batch)     # [B, W * block_size, heads, K]

    The result also has tokens that attention must not see: tokens outside the window, and those
    that are not written yet. Token i of request b has the position
    ``batch.first_positions(layer)[b] + i``; mask it by that, and by ``batch.seq_lens[b]``.

    Args:
      cache, layer, batch, layer_index: as for `write_tokens`.
      dtype: of the result.

    Returns:
      ``dtype[B, W * block_size, heads, K]`` and the same with V, with scales applied: W blocks,
      from the block of the oldest visible token on.

    Raises:
      TypeError: the layer stores no keys and values.
    """
    bound = bind(cache, layer, batch, layer_index)
    _attention_spec(layer, bound.form.spec)
    check_rank_known(bound.layout, layer, as_bytes=False)
    return _read_tokens(bound, dtype=_dtype_of_numbers(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _read_tokens(bound: BoundLayer, *, dtype: jnp.dtype) -> tuple[Array, Array]:
    width, packed = bound.form.spec.head_size, token_head_row(bound.form.spec)

    def read(bound: BoundLayer) -> tuple[Array, Array]:
        if packed is not None:
            rows = packed.unpack(_load_rows(bound)).astype(dtype)
            return rows[..., :width], rows[..., width:]
        rows = _load_rows(bound).astype(dtype)
        key_scale, value_scale = (jnp.asarray(scale, dtype) for scale in bound.key_value_scales)
        return rows[..., :width] * key_scale, rows[..., width:] * value_scale

    by_head = bound.form.by_head(2)
    return on_devices(read, bound, in_specs=(), out_specs=(by_head, by_head))


def read_rows(
    cache: KVCache, layer: str, batch: StepBatch, *, layer_index: LayerIndex = None
) -> Shaped[Array, "requests rows ..."]:
    """Reads the stored rows of all blocks that a step's requests see.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        rows = jaxkv.read_rows(cache, "layer", batch)      # [B, W * block_size, heads, K + V]

    Like `read_tokens`, but without scales and in the layer's dtype. The rows of a ring come in its
    own order: row i is of the last token whose position is i modulo ``block_size``.

    Args:
      cache, layer, batch, layer_index: as for `write_tokens`.

    Returns:
      [B, W * rows per block, heads, K + V] for keys and values; [B, W * rows per block, width] for
      latent vectors and for bytes.

    Raises:
      TypeError: the layer stores no tokens.
    """
    bound = bind(cache, layer, batch, layer_index)
    token_spec(layer, bound.form.spec)
    check_rank_known(bound.layout, layer)
    return _read_rows(bound)


@jax.jit
def _read_rows(bound: BoundLayer) -> Array:
    return on_devices(_load_rows, bound, in_specs=(), out_specs=bound.form.by_head(2))


def _load_rows(bound: BoundLayer) -> Array:
    """Reads the stored rows of a step's blocks: [B, W * rows, *row] in the layer's dtype."""
    data = read_elements(bound, bound.requests.table, bound.form.row.dtype)
    return data.reshape(data.shape[0], data.shape[1] * data.shape[2], *bound.form.row_shape)


def _token_shape(bound: BoundLayer, **arrays: Array) -> tuple[int, ...]:
    """Returns the leading axes of an array of a layer's tokens, given by its name."""
    ((name, array),) = arrays.items()
    if bound.requests.growth.stores != "encoder":
        return bound.batch.token_shape
    if array.ndim < 3 or array.shape[0] != bound.batch.shape.batch_size:
        raise ValueError(
            f"{name} has shape {array.shape}; cross attention wants the encoder's, "
            f"[{bound.batch.shape.batch_size}, encoder tokens, ...]"
        )
    return array.shape[:2]


def check_rank_known(
    layout: CacheLayout, layer: str, *, positions: bool = True, as_bytes: bool = True
) -> None:
    """Raises ValueError outside ``shard_map`` if the parts of all ranks do not form an array.

    Args:
      positions: whether that holds for positions, too, which context parallelism divides.
      as_bytes: whether rows that are bytes come as such, without an axis of heads.
    """
    if layout.axis is None or runs_manually(layout.axis):
        return
    parts = "its own positions" if positions and layout.context_parallel > 1 else ""
    spec = layout.placement_of(layer).spec
    if as_bytes and isinstance(spec, FullAttentionSpec) and row_format(spec).key_elements is None:
        parts = "the bytes of its own heads, which have no axis of heads"
    if parts:
        raise ValueError(
            f"layer={layer!r}: each rank of mesh axis {layout.axis!r} stores {parts}; call this "
            "inside jax.shard_map, with cache.partition_specs() for the cache"
        )


def check_owner(layout: CacheLayout, layer: str) -> None:
    """Raises ValueError for a layer that shares another layer's cache."""
    owner = layout.owner_of(layer)
    if owner != layer:
        raise ValueError(
            f"layer={layer!r} shares the cache of {owner!r} and writes nothing; leave its write "
            "out, or pass attend no keys"
        )


def token_head_row(spec: LayerSpec) -> TokenHeadRow | None:
    """Returns the form of rows with a scale for each token and head; None: rows are others."""
    if not isinstance(spec, FullAttentionSpec) or not spec.has_scales:
        return None
    packing: Any = spec.dtype  # one of `PER_TOKEN_HEAD`
    return TokenHeadRow(packing, spec.num_kv_heads, spec.head_size, spec.value_size)


def token_spec(layer: str, spec: LayerSpec) -> TokenSpec:
    """Returns the spec of a layer that stores rows of tokens; raises TypeError for others."""
    if not isinstance(spec, TokenSpec):
        raise TypeError(
            f"layer={layer!r} stores states, not tokens; use the function of its kind, such as "
            "gated_delta, or read_state and write_state"
        )
    return spec


def _attention_spec(layer: str, spec: LayerSpec) -> FullAttentionSpec:
    """Returns the spec of a layer that stores keys and values; raises TypeError for others."""
    if not isinstance(spec, FullAttentionSpec):
        raise TypeError(
            f"layer={layer!r} stores {spec.kind}, not keys and values; use write_rows and "
            "read_rows for latent vectors, write_state and read_state for states"
        )
    if row_format(spec).key_elements is None and not spec.has_scales:
        raise TypeError(
            f"layer={layer!r} stores scales next to its {spec.dtype} elements; pack its rows "
            "yourself, and use write_rows and read_rows"
        )
    return spec
