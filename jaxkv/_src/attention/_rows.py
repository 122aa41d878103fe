"""Stored rows at slots, as attention to chosen tokens and the choice of them read them."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import rows_per_block
from jaxkv._src.pool import BoundLayer, read_cells, token_head_row
from jaxkv._src.specs import MLASpec
from pallas_kernels import AttentionRule, PackedRow, TokenHeadRow

PART_BYTES = 2**26  # of gathered rows at once, in float32


def read_heads(bound: BoundLayer, slots: Array, rule: AttentionRule) -> Array:
    """Returns the rows at slots, [Q, N, kv_heads, elements]; of each head at its own slots."""
    spec = bound.form.spec
    by_heads = token_head_row(spec)
    kv_heads = bound.form.row.heads if by_heads is None else by_heads.kv_heads
    packed = by_heads or (packed_row(spec) if rule.row_packing else None)
    if slots.ndim == 2:
        return read_at(bound, slots, packed).reshape(*slots.shape, kv_heads, -1)
    if packed is None:
        heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
        return read_at(bound, slots, None, heads).swapaxes(1, 2)
    parts = [
        read_at(bound, slots[:, i], packed).reshape(len(slots), slots.shape[2], kv_heads, -1)[
            :, :, i
        ]
        for i in range(kv_heads)
    ]
    return jnp.stack(parts, axis=2)


def packed_row(spec: MLASpec) -> PackedRow:
    """Returns the form of latent vectors that are packed by ``"fp8_ds_mla"``."""
    values = spec.value_size or spec.head_size
    return PackedRow(values, spec.head_size - values)


def index_row(spec: MLASpec) -> PackedRow | None:
    """Returns the form of index keys that are packed, values and scales; None if they are not."""
    is_packed = spec.bytes_per_token is not None and spec.head_size % 128 == 0
    return PackedRow(spec.head_size, 0) if is_packed else None


def read_at(
    bound: BoundLayer,
    slots: Array,
    packed: PackedRow | TokenHeadRow | None,
    heads: Array | None = None,
) -> Array:
    """Returns the stored rows at slots, [..., elements], unpacked; or of one head each."""
    block_size = bound.requests.growth.block_size
    tokens_per_row = block_size // rows_per_block(bound.form.spec)
    ids, rows = slots // block_size, slots % block_size // tokens_per_row
    rows = read_cells(bound, ids, rows, bound.form.row.dtype, heads)
    return rows if packed is None else packed.unpack(rows)


def compute_dtype(rows: Array, queries: Array) -> jnp.dtype:
    """Returns the dtype of products; rows of 8 bits are widened to the dtype of queries."""
    if rows.dtype.itemsize == 1 or rows.dtype == queries.dtype:
        return queries.dtype
    return jnp.dtype(jnp.float32)


def product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(
        subscripts,
        left,
        right,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if right.dtype == jnp.float32 else None,
    )


def in_parts(
    function: Callable[..., tuple[Array, ...]], size: int, *arrays: Array
) -> tuple[Array, ...]:
    """Calls a function of arrays of queries with ``size`` of them at a time, one after another."""
    total = len(arrays[0])
    if total <= size:
        return function(*arrays)
    parts = cdiv(total, size)

    def cut(array: Array) -> Array:
        pads = [(0, parts * size - total)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, pads, constant_values=-1 if array.dtype == jnp.int32 else 0)
        return padded.reshape(parts, size, *array.shape[1:])

    results = lax.map(lambda part: function(*part), tuple(map(cut, arrays)))
    return tuple(
        array.reshape(math.prod(array.shape[:2]), *array.shape[2:])[:total] for array in results
    )
