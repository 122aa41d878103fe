"""Keys, values and latent rows of tokens: writes, reads."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxkv.checks import check_int32
from jaxkv.kernel_blocks import row_format, rows_per_block
from jaxkv.pool._bytes import from_bytes, read_bytes, to_bytes, write_bytes
from jaxkv.pool._state import KVPool
from jaxkv.specs import FullAttentionSpec, MLASpec


def quantize(values: Array, dtype: DTypeLike, scale: Array | float) -> Array:
    """``values / scale`` in a cache dtype, saturating at the largest finite value.

    Raises:
      TypeError: uint8 holds bytes, not numbers.
    """
    if jnp.dtype(dtype) == jnp.uint8:
        raise TypeError("a uint8 layer holds bytes of the caller's own format; use write_rows")
    scaled = values.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(scaled), info.min, info.max).astype(dtype)
    # Conversion makes NaN (fp8) or Inf of what is too large, and 0 * Inf is NaN again.
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def write_tokens(
    pool: KVPool,
    layer: str,
    slots: Array,
    keys: Array,
    values: Array,
    *,
    key_scale: Array | float = 1.0,
    value_scale: Array | float = 1.0,
    implementation: str | None = None,
) -> KVPool:
    """Writes keys and values of new tokens of an attention layer.

    Args:
      slots: int32[T], from `map_slots`; distinct, or negative for padding.
      keys: [T, heads, K], any float dtype.
      values: [T, heads, V].
      key_scale, value_scale: per-tensor scales; the cache holds ``x / scale``.
      implementation: of `pallas_kernels.write_rows`.

    Raises:
      TypeError: the layer keeps no keys and values.
      ValueError: shapes that do not fit the layer.
    """
    _check_slots(slots)
    spec = _attention_spec(pool, layer)
    heads = (*slots.shape, spec.num_kv_heads)
    wanted = {"keys": (*heads, spec.head_size), "values": (*heads, spec.value_size)}
    for (name, shape), array in zip(wanted.items(), (keys, values), strict=True):
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; layer {layer!r} wants {shape}, one row per slot"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {array.dtype}; use write_rows for stored rows")
    parts = [quantize(keys, spec.dtype, key_scale), quantize(values, spec.dtype, value_scale)]
    rows = jnp.concatenate(parts, axis=-1)
    return write_rows(pool, layer, slots, rows, implementation=implementation)


def write_rows(
    pool: KVPool, layer: str, slots: Array, rows: Array, *, implementation: str | None = None
) -> KVPool:
    """Writes stored rows as they are: MLA latents, or keys and values already quantised.

    Args:
      slots: int32[T]; the slot of any token of a row names the row, each row once, or a
        negative slot for padding. Of a row named twice, either may be left, or a mix.
      rows: [T, ...], ``token_bytes`` bytes each.
      implementation: of `pallas_kernels.write_rows`.
    """
    _check_slots(slots)
    spec = token_spec(pool, layer)
    row_bytes = to_bytes(rows, slots.ndim)
    if row_bytes.shape != (*slots.shape, spec.token_bytes):
        raise ValueError(
            f"rows has shape {rows.shape} of {rows.dtype}; layer {layer!r} stores "
            f"{spec.token_bytes} bytes for each of {slots.shape} slots"
        )
    dtype = row_shape_of(spec)[1]
    if dtype != "uint8" and rows.dtype.name not in (dtype, "uint8"):
        raise TypeError(
            f"rows has dtype {rows.dtype}; layer {layer!r} stores {dtype}: cast it, or pass its "
            "bytes as uint8"
        )
    tokens_per_row = spec.block_size // rows_per_block(spec)
    return write_bytes(
        pool,
        layer,
        slots // spec.block_size,
        slots % spec.block_size // tokens_per_row,
        row_bytes,
        implementation=implementation,
    )


def _check_slots(slots: Array) -> None:
    check_int32(slots=slots)
    if slots.ndim != 1:
        raise ValueError(
            f"slots has shape {slots.shape}; wants [T], those of one group: batch.slots[group]"
        )


def read_tokens(
    pool: KVPool,
    layer: str,
    block_ids: Array,
    *,
    key_scale: Array | float = 1.0,
    value_scale: Array | float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:
    """Keys and values of whole blocks, written or not: whoever attends must mask.

    Args:
      block_ids: int32[..., W], logical ids.

    Returns:
      ``dtype[..., W * block_size, heads, K]`` and the same with V, scales applied.
    """
    spec = _attention_spec(pool, layer)
    rows = read_rows(pool, layer, block_ids).astype(dtype)
    scales = jnp.asarray(key_scale, dtype), jnp.asarray(value_scale, dtype)
    return rows[..., : spec.head_size] * scales[0], rows[..., spec.head_size :] * scales[1]


def read_rows(pool: KVPool, layer: str, block_ids: Array) -> Array:
    """Stored rows of whole blocks, int32[..., W], in the layer's dtype: [..., W * rows, *row]."""
    check_int32(block_ids=block_ids)
    spec = token_spec(pool, layer)
    row_shape, dtype = row_shape_of(spec)
    data = read_bytes(pool, layer, block_ids)
    rows = block_ids.shape[-1] * rows_per_block(spec)
    return from_bytes(data, (*block_ids.shape[:-1], rows, *row_shape), dtype)


def row_shape_of(spec: FullAttentionSpec | MLASpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one stored row: heads are an axis where a row is keys and values."""
    row = row_format(spec)
    return (row.width,) if row.key_elements is None else (row.heads, row.width), row.dtype


def token_spec(pool: KVPool, layer: str) -> FullAttentionSpec | MLASpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec | MLASpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not tokens; use read_state")
    return spec


def _attention_spec(pool: KVPool, layer: str) -> FullAttentionSpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not keys and values")
    if row_format(spec).key_elements is None:
        raise TypeError(
            f"layer={layer!r} stores scales beside its {spec.dtype} elements; pack its rows "
            "yourself, and use write_rows and read_rows"
        )
    return spec
