"""Keys, values and latent rows of tokens: typed views, writes, reads."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxkv.checks import check_int32, check_positive
from jaxkv.kernel_blocks import row_format, rows_per_block
from jaxkv.pool._bytes import from_bytes, pages_of, read_bytes, to_bytes, with_pages, write_bytes
from jaxkv.pool._state import KVPool
from jaxkv.specs import FullAttentionSpec, MLASpec


def layer_view(pool: KVPool, layer: str, *, blocks_per_kv_block: int = 1) -> Array:
    """A token layer's part of the pool as its own dtype, for attention kernels.

    On a GPU this costs nothing inside ``jit``: XLA passes the same bytes on. XLA's CPU
    backend does copy, so prefer `read_tokens` there.

    Returns:
      dtype[N * k, block_size / k, heads, K + V widths] with k = blocks_per_kv_block; for
      MLA dtype[N * k, rows / k, row]. For a stacked pool, slot by slot: ``S * N * k``.

    Raises:
      ValueError: a padded page, or a block that does not split into k parts.
    """
    spec = _token_spec(pool, layer)
    row_shape, dtype = _row_shape(spec)
    rows = rows_per_block(spec)
    check_positive(blocks_per_kv_block=blocks_per_kv_block)
    if rows % blocks_per_kv_block:
        raise ValueError(f"blocks_per_kv_block={blocks_per_kv_block} does not divide {rows} rows")
    pages, _ = pages_of(pool, layer)
    if pages.shape[1] != spec.data_bytes:
        raise ValueError(
            f"layer={layer!r} has {spec.data_bytes} of {pages.shape[1]} bytes of each page, so "
            "its blocks are not contiguous; use read_tokens and write_tokens"
        )
    shape = (pages.shape[0] * blocks_per_kv_block, rows // blocks_per_kv_block, *row_shape)
    return from_bytes(pages.reshape(-1), shape, dtype)


def with_layer_view(pool: KVPool, layer: str, view: Array) -> KVPool:
    """The way back: the pool with a layer's part replaced by what a kernel made of it.

    Args:
      view: as `layer_view` returned it, of any ``blocks_per_kv_block``.
    """
    wanted = jax.eval_shape(lambda pool: layer_view(pool, layer), pool)
    if view.size != wanted.size or view.dtype != wanted.dtype:
        raise ValueError(
            f"view is {view.dtype}{list(view.shape)}; layer {layer!r} wants as many elements as "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    return with_pages(pool, layer, to_bytes(view, 1))


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
    check_int32(slots=slots)
    spec = _attention_spec(pool, layer)
    heads = (*slots.shape, spec.num_kv_heads)
    wanted = {"keys": (*heads, spec.head_size), "values": (*heads, spec.value_size)}
    for (name, shape), array in zip(wanted.items(), (keys, values), strict=True):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; layer {layer!r} wants {shape}")
    parts = [quantize(keys, spec.dtype, key_scale), quantize(values, spec.dtype, value_scale)]
    rows = jnp.concatenate(parts, axis=-1)
    return write_rows(pool, layer, slots, rows, implementation=implementation)


def write_rows(
    pool: KVPool, layer: str, slots: Array, rows: Array, *, implementation: str | None = None
) -> KVPool:
    """Writes stored rows as they are: MLA latents, or keys and values already quantised.

    Args:
      slots: int32[T]; the slot of any token of a row names the row.
      rows: [T, ...], ``token_bytes`` bytes each.
      implementation: of `pallas_kernels.write_rows`.
    """
    check_int32(slots=slots)
    spec = _token_spec(pool, layer)
    row_bytes = to_bytes(rows, slots.ndim)
    if row_bytes.shape != (*slots.shape, spec.token_bytes):
        raise ValueError(
            f"rows has shape {rows.shape} of {rows.dtype}; layer {layer!r} stores "
            f"{spec.token_bytes} bytes for each of {slots.shape} slots"
        )
    tokens_per_row = spec.block_size // rows_per_block(spec)
    offsets = slots % spec.block_size // tokens_per_row * spec.token_bytes
    return write_bytes(
        pool,
        layer,
        slots // spec.block_size,
        offsets,
        row_bytes,
        align=spec.token_bytes,
        implementation=implementation,
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
    spec = _token_spec(pool, layer)
    row_shape, dtype = _row_shape(spec)
    data = read_bytes(pool, layer, block_ids, spec.data_bytes)
    rows = block_ids.shape[-1] * rows_per_block(spec)
    return from_bytes(data, (*block_ids.shape[:-1], rows, *row_shape), dtype)


def _row_shape(spec: FullAttentionSpec | MLASpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one stored row: heads are an axis where a row is keys and values."""
    row = row_format(spec)
    return (row.width,) if row.key_elements is None else (row.heads, row.width), row.dtype


def _token_spec(pool: KVPool, layer: str) -> FullAttentionSpec | MLASpec:
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
