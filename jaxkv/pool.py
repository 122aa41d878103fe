"""The bytes: raw buffers, typed reads and writes of one layer, zeroing of fresh blocks.

Knows the layout that a plan made and turns (layer, block id) into bytes. Knows nothing
of requests or tables: it is given slots and block ids.

A pool is ``uint8``, so that layers of different groups can lie on the same bytes: fp8
keys and values of one group, fp32 recurrent state of another. A token's row is
``[head, K then V]``; the rows of a block follow each other. Writes scatter the bytes of
the new rows and reads bitcast what they gathered, so no operation here ever makes a
typed copy of the pool, on any backend.

All functions are jit-safe and return a new pool; donate the old one in your ``jit`` and
every one of them works in place. Slots and ids that are out of range, and the null
block, are never written and read as zeros.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxkv.block_tables import as_sharding
from jaxkv.blocks import NULL_BLOCK
from jaxkv.checks import check_int32, check_positive
from jaxkv.groups import PoolLayout
from jaxkv.planning import Plan
from jaxkv.specs import FullAttentionSpec, MLASpec, StateSpec
from pallas_kernels import zero_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KVPool:
    """N blocks in S slots: one buffer per slot, or one stacked buffer for all of them."""

    buffers: tuple[Array, ...]  # S x uint8[N, page], or stacked: 1 x uint8[S, N, page]
    layout: PoolLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.buffers[0].shape[-2] if self.buffers else 0

    @property
    def stacked(self) -> bool:
        return any(buffer.ndim == 3 for buffer in self.buffers)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.size for buffer in self.buffers)

    def __repr__(self) -> str:
        form = "stacked" if self.stacked else "one buffer per slot"
        slots = len(self.layout.slots)
        return f"KVPool({self.num_blocks} blocks, {slots} slots, {form}, {self.num_bytes:,} bytes)"


def pool_shapes(
    layout: PoolLayout, num_blocks: int, *, stacked: bool = False
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the buffers; their bytes are ``num_blocks * layout.bytes_per_block``."""
    check_positive(num_blocks=num_blocks)
    pages = [slot.page_bytes for slot in layout.slots]
    if not stacked:
        return tuple(jax.ShapeDtypeStruct((num_blocks, page), jnp.uint8) for page in pages)
    if len(set(pages)) > 1:
        raise ValueError(
            f"stacked=True needs slots of one page size; this layout has {sorted(set(pages))} bytes"
        )
    shapes = [(len(pages), num_blocks, page) for page in pages[:1]]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)


def make_pool(
    plan: Plan,
    *,
    worker: int = 0,
    stacked: bool = False,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> KVPool:
    """Allocates the pool of one worker, zeroed, straight on the device.

    Args:
      plan: gives blocks and layout.
      worker: index into ``plan.layouts``.
      stacked: one buffer for all slots, which suits models that loop over layers; one
        per slot suits unrolled ones and is faster there.
      device: a device or a sharding; None: the default device.
    """
    if not 0 <= worker < len(plan.layouts):
        raise ValueError(f"worker={worker}: the plan has {len(plan.layouts)} workers")
    layout = plan.layouts[worker]
    shapes = pool_shapes(layout, plan.num_blocks, stacked=stacked)

    def allocate():
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    return KVPool(buffers=jax.jit(allocate, out_shardings=as_sharding(device))(), layout=layout)


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
    row_shape, dtype = _row_format(spec)
    rows = spec.data_bytes // spec.token_bytes
    check_positive(blocks_per_kv_block=blocks_per_kv_block)
    if rows % blocks_per_kv_block:
        raise ValueError(f"blocks_per_kv_block={blocks_per_kv_block} does not divide {rows} rows")
    pages, _ = _pages(pool, layer)
    if pages.shape[1] != spec.data_bytes:
        raise ValueError(
            f"layer={layer!r} has {spec.data_bytes} of {pages.shape[1]} bytes of each page, so "
            "its blocks are not contiguous; use read_tokens and write_tokens"
        )
    shape = (pages.shape[0] * blocks_per_kv_block, rows // blocks_per_kv_block, *row_shape)
    return _from_bytes(pages.reshape(-1), shape, dtype)


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
    return _with_pages(pool, layer, _to_bytes(view, 1))


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
) -> KVPool:
    """Writes keys and values of new tokens of an attention layer.

    Args:
      slots: int32[T], from `map_slots`; distinct, or negative for padding.
      keys: [T, heads, K], any float dtype.
      values: [T, heads, V].
      key_scale, value_scale: per-tensor scales; the cache holds ``x / scale``.

    Raises:
      TypeError: the layer keeps no keys and values.
      ValueError: shapes that do not fit the layer.
    """
    spec = _attention_spec(pool, layer)
    heads = (*slots.shape, spec.num_kv_heads)
    wanted = {"keys": (*heads, spec.head_size), "values": (*heads, spec.value_size)}
    for (name, shape), array in zip(wanted.items(), (keys, values), strict=True):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; layer {layer!r} wants {shape}")
    parts = [quantize(keys, spec.dtype, key_scale), quantize(values, spec.dtype, value_scale)]
    return write_rows(pool, layer, slots, jnp.concatenate(parts, axis=-1))


def write_rows(pool: KVPool, layer: str, slots: Array, rows: Array) -> KVPool:
    """Writes stored rows as they are: MLA latents, or keys and values already quantised.

    Args:
      slots: int32[T]; the slot of any token of a row names the row.
      rows: [T, ...], ``token_bytes`` bytes each.
    """
    check_int32(slots=slots)
    spec = _token_spec(pool, layer)
    row_bytes = _to_bytes(rows, slots.ndim)
    if row_bytes.shape != (*slots.shape, spec.token_bytes):
        raise ValueError(
            f"rows has shape {rows.shape} of {rows.dtype}; layer {layer!r} stores "
            f"{spec.token_bytes} bytes for each of {slots.shape} slots"
        )
    ratio = spec.compress_ratio if isinstance(spec, MLASpec) else 1
    offsets = slots % spec.block_size // ratio * spec.token_bytes
    return _write(pool, layer, slots // spec.block_size, offsets, row_bytes)


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
    row_shape, dtype = _row_format(spec)
    data = _read(pool, layer, block_ids, spec.data_bytes)
    rows = block_ids.shape[-1] * (spec.data_bytes // spec.token_bytes)
    return _from_bytes(data, (*block_ids.shape[:-1], rows, *row_shape), dtype)


def write_state(pool: KVPool, layer: str, block_ids: Array, arrays: Sequence[Array]) -> KVPool:
    """Writes recurrent state, one per block id.

    Args:
      block_ids: int32[B]; distinct, or out of range for padding.
      arrays: the spec's arrays, each [B, *shape]; cast to the spec's dtypes.
    """
    check_int32(block_ids=block_ids)
    spec = _state_spec(pool, layer)
    shapes = tuple((*block_ids.shape, *shape) for shape in spec.shapes)
    given = tuple(array.shape for array in arrays)
    if given != shapes:
        raise ValueError(f"arrays have shapes {given}; layer {layer!r} wants {shapes}")
    data = [
        _to_bytes(array.astype(dtype), block_ids.ndim)
        for array, dtype in zip(arrays, spec.dtypes, strict=True)
    ]
    offsets = jnp.zeros_like(block_ids)
    return _write(pool, layer, block_ids, offsets, jnp.concatenate(data, axis=-1))


def read_state(pool: KVPool, layer: str, block_ids: Array) -> tuple[Array, ...]:
    """Recurrent state by block id, int32[B]: the spec's arrays, each [B, *shape]."""
    check_int32(block_ids=block_ids)
    spec = _state_spec(pool, layer)
    data = _read(pool, layer, block_ids, spec.data_bytes)
    ends = np.cumsum(spec.array_bytes)
    return tuple(
        _from_bytes(data[..., end - size : end], (*block_ids.shape, *shape), dtype)
        for end, size, shape, dtype in zip(
            ends, spec.array_bytes, spec.shapes, spec.dtypes, strict=True
        )
    )


def zero_new_blocks(pool: KVPool, zero_ids: Array, *, implementation: str | None = None) -> KVPool:
    """Zeroes fresh blocks in the slots of the groups that got them, padding included.

    Call it before anything of the same step writes.

    Args:
      zero_ids: int32[G, Z], per group the fresh ids; anything out of range is ignored.
      implementation: of `pallas_kernels.zero_blocks`.
    """
    check_int32(zero_ids=zero_ids)
    num_groups = len(pool.layout.groups)
    if zero_ids.ndim != 2 or zero_ids.shape[0] != num_groups:
        raise ValueError(f"zero_ids has shape {zero_ids.shape}; the pool has {num_groups} groups")
    if not pool.buffers:
        return pool
    slots_of = [pool.layout.slots_of(group) for group in range(num_groups)]
    users = [tuple(slot in s for s in slots_of) for slot in range(len(pool.layout.slots))]
    # Slots with the same users share one list, which the kernel then passes once.
    lists = {u: jnp.where(np.array(u)[:, None], zero_ids, -1).reshape(-1) for u in set(users)}
    per_slot = [lists[u] for u in users]
    if not pool.stacked:
        zeroed = zero_blocks(list(pool.buffers), per_slot, implementation=implementation)
        return dataclasses.replace(pool, buffers=tuple(zeroed))
    rows = jnp.concatenate([_row(pool, i, ids) for i, ids in enumerate(per_slot)])
    stack = pool.buffers[0]
    flat = stack.reshape(-1, stack.shape[-1])
    zeroed = zero_blocks(flat, rows, include_null_block=True, implementation=implementation)
    return dataclasses.replace(pool, buffers=(zeroed.reshape(stack.shape),))


def _pages(pool: KVPool, layer: str) -> tuple[Array, int]:
    """The buffer that holds a layer, as uint8[rows, page], and the layer's slot in it."""
    slot = pool.layout.place_of(layer).slot
    if pool.stacked:
        return pool.buffers[0].reshape(-1, pool.buffers[0].shape[-1]), slot
    return pool.buffers[slot], 0


def _row(pool: KVPool, slot: int, block_ids: Array) -> Array:
    """Rows of blocks in their buffer; -1 for the null block and ids out of range."""
    known = (block_ids > NULL_BLOCK) & (block_ids < pool.num_blocks)
    return jnp.where(known, slot * pool.num_blocks + block_ids, -1)


def _write(pool: KVPool, layer: str, block_ids: Array, offsets: Array, data: Array) -> KVPool:
    """Writes bytes, uint8[..., n], at an offset into each block's page."""
    pages, slot = _pages(pool, layer)
    rows = _row(pool, slot, block_ids).reshape(-1)
    # What goes nowhere gets distinct rows beyond the pool, so that all are unique.
    beyond = pages.shape[0] + jnp.arange(rows.size, dtype=jnp.int32)
    offsets = pool.layout.place_of(layer).offset_bytes + offsets.reshape(-1)
    start = jnp.stack([jnp.where(rows < 0, beyond, rows), offsets], axis=-1)
    written = lax.scatter(
        pages,
        start,
        data.reshape(rows.size, data.shape[-1]),
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        ),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return _with_pages(pool, layer, written)


def _with_pages(pool: KVPool, layer: str, pages: Array) -> KVPool:
    """The pool with the buffer that holds a layer replaced."""
    index = 0 if pool.stacked else pool.layout.place_of(layer).slot
    buffers = list(pool.buffers)
    buffers[index] = pages.reshape(buffers[index].shape)
    return dataclasses.replace(pool, buffers=tuple(buffers))


def _read(pool: KVPool, layer: str, block_ids: Array, num_bytes: int) -> Array:
    """The first ``num_bytes`` of each block's page, uint8[..., num_bytes]."""
    pages, slot = _pages(pool, layer)
    rows, start = _row(pool, slot, block_ids), pool.layout.place_of(layer).offset_bytes
    return pages.at[rows, start : start + num_bytes].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )


def _to_bytes(array: Array, batch_dims: int) -> Array:
    data = lax.bitcast_convert_type(array, jnp.uint8)
    batch = array.shape[:batch_dims]
    return data.reshape(*batch, math.prod(data.shape[batch_dims:]))


def _from_bytes(data: Array, shape: Sequence[int], dtype: str) -> Array:
    itemsize = jnp.dtype(dtype).itemsize
    split = (*shape, itemsize) if itemsize > 1 else tuple(shape)
    return lax.bitcast_convert_type(data.reshape(split), jnp.dtype(dtype))


def _row_format(spec: FullAttentionSpec | MLASpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one stored row; bytes for rows of mixed content."""
    if isinstance(spec, FullAttentionSpec):
        if _is_mixed(spec):
            return (spec.token_bytes,), "uint8"
        return (spec.num_kv_heads, spec.head_size + spec.value_size), spec.dtype
    if spec.bytes_per_token is None:
        return (spec.head_size,), spec.dtype
    return (spec.bytes_per_token,), "uint8"


def _is_mixed(spec: FullAttentionSpec) -> bool:
    """Are scales stored beside the elements?"""
    return bool(spec.scale_bytes) or spec.dtype == "nvfp4"


def _token_spec(pool: KVPool, layer: str) -> FullAttentionSpec | MLASpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec | MLASpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not tokens; use read_state")
    return spec


def _attention_spec(pool: KVPool, layer: str) -> FullAttentionSpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, FullAttentionSpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not keys and values")
    if _is_mixed(spec):
        raise TypeError(
            f"layer={layer!r} stores scales beside its {spec.dtype} elements; pack its rows "
            "yourself, and use write_rows and read_rows"
        )
    return spec


def _state_spec(pool: KVPool, layer: str) -> StateSpec:
    spec = pool.layout.place_of(layer).spec
    if not isinstance(spec, StateSpec):
        raise TypeError(f"layer={layer!r} keeps {spec.kind}, not state; use read_tokens")
    return spec
