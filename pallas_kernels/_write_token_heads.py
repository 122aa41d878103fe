"""Writes of keys and values that get a scale for each token and head, in place under donation."""

import functools
import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt8

from pallas_kernels import _capability
from pallas_kernels._arguments import as_array, as_ids, check_type
from pallas_kernels._capability import Implementation
from pallas_kernels._dispatch import choose
from pallas_kernels._paged_attention import TokenHeadRow
from pallas_kernels._write_rows import SHORT_BYTES, check_align, write_rows

STORED_BYTES = 8  # at once, by a thread
FIRST_FP8 = (8, 9)  # compute capability that converts to fp8


def write_token_heads(
    pages: UInt8[Array, "blocks page"],
    block_ids: Int32[Array, " rows"],
    offsets: Int32[Array, " rows"],
    keys: Float[Array, "rows kv_heads key_width"],
    values: Float[Array, "rows kv_heads value_width"],
    row: TokenHeadRow,
    *,
    align: int = 1,
    implementation: Implementation | None = None,
) -> UInt8[Array, "blocks page"]:
    """Writes ``row.pack(keys, values)`` as `write_rows` does, to the bit the same.

    Example::

        row = pallas_kernels.TokenHeadRow("int8_per_token_head", 8, 128, 128)
        pages = jnp.zeros((4, 16 * row.row_bytes), jnp.uint8)            # 4 blocks of 16 tokens
        block_ids, tokens = jnp.array([2, 2], jnp.int32), jnp.array([0, 1], jnp.int32)
        keys = values = jnp.ones((2, 8, 128), jnp.bfloat16)
        offsets = row.row_bytes * tokens
        pages = pallas_kernels.write_token_heads(pages, block_ids, offsets, keys, values, row)

    Mosaic finds the scales, packs and writes in one kernel, which reads keys and values once. It
    takes keys as wide as values, of a power of two of elements, in rows that are not short; for
    others XLA packs, and `write_rows` writes.

    Args:
      pages, block_ids, offsets: as for `write_rows`.
      keys, values: of one float dtype.
      row: the form of a row.
      align: a divisor of every offset, in bytes.
      implementation: as for `write_rows`.

    Returns:
      The pages, same shape and dtype.

    Raises:
      TypeError: pages that are not uint8, keys and values that are not floats of one dtype, ids or
        offsets that are not int32, or another form of a row.
      ValueError: shapes that do not fit the row or each other, or ``align`` < 1.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    pages, keys, values = (
        as_array(name, array)
        for name, array in (("pages", pages), ("keys", keys), ("values", values))
    )
    ids, offsets = as_ids(block_ids, "block_ids"), as_ids(offsets, "offsets")
    check_type(TokenHeadRow, row=row)
    _check(pages, ids, offsets, keys, values, row, align)
    packed = functools.partial(_write_packed, pages, ids, offsets, keys, values, row, align)
    if not _is_one_kernel(pages, keys, row, align) or not ids.size:
        return packed(implementation)

    def write() -> Array:
        from pallas_kernels._write_token_heads_mosaic import write_pages

        aligned = jnp.where(offsets % align == 0, offsets, -1)
        return write_pages(pages, ids, aligned, keys, values, row)

    return choose(
        implementation,
        None,
        kernels=["write_token_heads"],
        mosaic_gpu=write,
        xla=functools.partial(packed, "xla"),
    )


def _write_packed(
    pages: Array,
    block_ids: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    row: TokenHeadRow,
    align: int,
    implementation: Implementation | None,
) -> Array:
    rows = row.pack(keys, values)
    return write_rows(pages, block_ids, offsets, rows, align=align, implementation=implementation)


def _check(
    pages: Array,
    ids: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    row: TokenHeadRow,
    align: int,
) -> None:
    if pages.dtype != jnp.uint8:
        raise TypeError(f"pages must be uint8, got {pages.dtype}")
    if pages.ndim != 2 or pages.shape[1] < row.row_bytes:
        raise ValueError(
            f"pages must be uint8[N, page] with the {row.row_bytes} bytes of a row in a page, "
            f"got shape {pages.shape}"
        )
    if len(ids) != len(offsets):
        raise ValueError(
            f"block_ids and offsets must have one length, got {len(ids)} and {len(offsets)}"
        )
    check_align(align)
    for name, array, width in (("keys", keys, row.key_width), ("values", values, row.value_width)):
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype != keys.dtype:
            raise TypeError(
                f"keys and values must be floats of one dtype, got {keys.dtype} and {values.dtype}"
            )
        if array.shape != (len(ids), row.kv_heads, width):
            raise ValueError(
                f"{name} must be float[{len(ids)}, {row.kv_heads}, {width}] by block_ids and row, "
                f"got shape {array.shape}"
            )


def _is_one_kernel(pages: Array, keys: Array, row: TokenHeadRow, align: int) -> bool:
    """Returns whether the Mosaic kernel takes the call on the default device."""
    lanes = row.key_bytes // STORED_BYTES  # of a warp, for a key
    is_even = row.key_width == row.value_width and row.key_bytes % STORED_BYTES == 0
    takes_fp8 = (_capability.compute_capability() or _capability.WITHOUT_GPU) >= FIRST_FP8
    return (
        is_even
        and lanes in (4, 8, 16, 32)
        and row.row_bytes >= SHORT_BYTES
        and math.gcd(align, pages.shape[-1]) % STORED_BYTES == 0
        and keys.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and (takes_fp8 or row.packing != "fp8_per_token_head")
    )
