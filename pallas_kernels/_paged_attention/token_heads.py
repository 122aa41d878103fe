"""Keys and values in 8 and 4 bits: packed rows, with a scale for each token and head."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._bitcast import as_elements

TokenHeadPacking = Literal["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]
SCALE_BYTES, ROW_ALIGN = 4, 32
LEAST = 2.0**-100  # heads of lesser magnitudes are zeros: their reciprocals could be infinite
# The largest stored number, and the dtype of elements.
HIGHEST = {"int8_per_token_head": 127.0, "fp8_per_token_head": 448.0, "int4_per_token_head": 7.0}
ELEMENTS = {
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
    "int4_per_token_head": "uint8",
}
BIAS = 8  # of elements in 4 bits


class TokenHeadRow(NamedTuple):
    """The row of a token: keys and values of all heads, then their scales.

    Elements come first, for each head its key and then its value, in int8 or float8_e4m3fn. In 4
    bits a byte has element i of a key, plus 8, in its lower half, and element ``i + key_width / 2``
    in its upper half; of a value likewise. A float32 scale of the key and one of the value of each
    head follow, and zeros up to a multiple of 32 bytes.

    In float32, an element x of a key is stored as ``round(x * (highest / m))``, and the scale of
    the key is ``m * (1 / highest)``: m is the largest magnitude in the key, and ``highest`` 127,
    448 or 7. ``highest / m`` is divided in float64, because XLA's division of float32 is not exact
    on GPUs. Elements are rounded to even, and clipped to plus or minus ``highest``. If m is below
    2**-100, elements and scale are 0; if it is Inf or NaN, elements are 0 and the scale is NaN.

    packing: ``"int8_per_token_head"``, ``"fp8_per_token_head"`` or ``"int4_per_token_head"``.
    kv_heads: KV heads of the row.
    key_width, value_width: elements of a key and of a value; even in 4 bits.
    """

    packing: TokenHeadPacking
    kv_heads: int
    key_width: int
    value_width: int

    @property
    def is_4_bit(self) -> bool:
        """Whether a byte has two elements."""
        return self.packing == "int4_per_token_head"

    @property
    def elements(self) -> str:
        """The dtype of stored elements, and uint8 of bytes with two of them."""
        return ELEMENTS[self.packing]

    @property
    def key_bytes(self) -> int:
        """Bytes of the elements of a key."""
        return self.key_width // (1 + self.is_4_bit)

    @property
    def value_bytes(self) -> int:
        """Bytes of the elements of a value."""
        return self.value_width // (1 + self.is_4_bit)

    @property
    def head_bytes(self) -> int:
        """Bytes of the elements of a head: its key and its value."""
        return self.key_bytes + self.value_bytes

    @property
    def first_scale(self) -> int:
        """Byte of the row at which the scales begin."""
        return self.kv_heads * self.head_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        data = self.first_scale + self.kv_heads * 2 * SCALE_BYTES
        return -(-data // ROW_ALIGN) * ROW_ALIGN

    def pack(self, keys: Array, values: Array) -> Array:
        """Packs float[..., kv_heads, key_width] and [..., kv_heads, value_width].

        Returns:
          uint8[..., row_bytes].
        """
        stored, scales = zip(*[self._quantize(array) for array in (keys, values)], strict=True)
        elements = jnp.concatenate(stored, axis=-1)
        scales = lax.bitcast_convert_type(jnp.stack(scales, axis=-1), jnp.uint8)
        sizes = self._sizes()
        elements, scales = [
            part.reshape(*keys.shape[:-2], size)
            for part, size in zip((elements, scales), sizes, strict=False)
        ]
        spare = jnp.zeros((*keys.shape[:-2], sizes[2]), jnp.uint8)
        return jnp.concatenate([elements, scales, spare], axis=-1)

    def unpack(self, rows: Array) -> Array:
        """Unpacks uint8[..., row_bytes] into float32[..., kv_heads, key_width + value_width]."""
        elements, scales = self.split(rows)
        widths = jnp.array([self.key_width, self.value_width])
        total = self.key_width + self.value_width
        return elements * jnp.repeat(scales, widths, axis=-1, total_repeat_length=total)

    def split(self, rows: Array) -> tuple[Array, Array]:
        """Returns the elements of rows, uint8[..., row_bytes], and their scales, without a product.

        Returns:
          float32[..., kv_heads, key_width + value_width], which 16 bits hold without rounding, and
          float32[..., kv_heads, 2].
        """
        # Where a program packs what it unpacks, XLA for GPUs leaves out the rounding to fp8.
        rows, leading = lax.optimization_barrier(rows), rows.shape[:-1]
        elements, scales, _ = lax.split(rows, self._sizes(), axis=rows.ndim - 1)
        elements = elements.reshape(*leading, self.kv_heads, self.head_bytes)
        scales = as_elements(scales, jnp.float32, (*leading, self.kv_heads, 2))
        halves = lax.split(elements, (self.key_bytes, self.value_bytes), axis=elements.ndim - 1)
        return jnp.concatenate([self._widen(half) for half in halves], axis=-1), scales

    def _sizes(self) -> tuple[int, int, int]:
        """Returns the bytes of the elements of a row, of its scales and of its zeros."""
        scales = self.kv_heads * 2 * SCALE_BYTES
        return self.first_scale, scales, self.row_bytes - self.first_scale - scales

    def _quantize(self, array: Array) -> tuple[Array, Array]:
        """Returns the bytes of the elements of heads, and their scales, float32."""
        highest, array = HIGHEST[self.packing], array.astype(jnp.float32)
        largest = jnp.abs(array).max(axis=-1)
        is_plain = (largest >= LEAST) & (largest < jnp.inf)
        factor = _divide_exactly(highest, jnp.where(is_plain, largest, 1))
        scale = largest * jnp.float32(1 / highest)
        scale = jnp.where(is_plain, scale, jnp.where(largest < LEAST, 0, jnp.nan))
        scaled = jnp.where(is_plain[..., None], array * factor[..., None], 0)
        if self.packing == "fp8_per_token_head":
            stored = jnp.clip(scaled, -highest, highest).astype(jnp.float8_e4m3fn)
            return lax.bitcast_convert_type(stored, jnp.uint8), scale
        rounded = jnp.clip(jnp.round(scaled), -highest, highest).astype(jnp.int8)
        if not self.is_4_bit:
            return lax.bitcast_convert_type(rounded, jnp.uint8), scale
        low, high = jnp.split((rounded + BIAS).astype(jnp.uint8), 2, axis=-1)
        return low | (high << 4), scale

    def _widen(self, elements: Array) -> Array:
        """Returns bytes as the numbers that they store, float32."""
        if self.is_4_bit:
            halves = elements & 15, elements >> 4
            return jnp.concatenate(halves, axis=-1).astype(jnp.float32) - BIAS
        return lax.bitcast_convert_type(elements, jnp.dtype(self.elements)).astype(jnp.float32)


def _divide_exactly(numerator: float, array: Array) -> Array:
    """Returns a quotient that is rounded alike on all devices, float32."""
    with jax.enable_x64(True):
        wide = lax.convert_element_type(array, jnp.float64)
        quotient = lax.div(lax.full_like(wide, numerator), wide)
        return lax.convert_element_type(quotient, jnp.float32)
