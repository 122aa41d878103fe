"""Rows with a scale for each token and head, by their definition in NumPy."""

import ml_dtypes
import numpy as np

HIGHEST = {"int8_per_token_head": 127, "fp8_per_token_head": 448, "int4_per_token_head": 7}
BY_HEADS = tuple(HIGHEST)


def pack_by_heads(dtype: str, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns uint8[..., bytes] of keys [..., heads, K] and values [..., heads, V]."""
    parts, scales = zip(*[_quantize(dtype, array) for array in (keys, values)], strict=True)
    leading, heads = keys.shape[:-2], keys.shape[-2]
    elements = np.concatenate(parts, axis=-1)
    elements = elements.reshape(*leading, heads * elements.shape[-1])
    pairs = np.stack(scales, axis=-1).view(np.uint8).reshape(*leading, heads * 8)
    spare = np.zeros((*leading, -(elements.shape[-1] + pairs.shape[-1]) % 32), np.uint8)
    return np.concatenate([elements, pairs, spare], axis=-1)


def unpack_by_heads(
    dtype: str, rows: np.ndarray, heads: int, key: int, value: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values, float32, of rows of bytes; NaN of any kind where a scale is NaN."""
    bits, leading = 4 if dtype.startswith("int4") else 8, rows.shape[:-1]
    ends = np.cumsum([heads * (key + value) * bits // 8, heads * 8])
    elements, scales, _ = np.split(np.ascontiguousarray(rows), ends, axis=-1)
    elements = elements.reshape(*leading, heads, (key + value) * bits // 8)
    scales = np.ascontiguousarray(scales).view(np.float32).reshape(*leading, heads, 2, 1)
    parts = np.split(elements, [key * bits // 8], axis=-1)
    with np.errstate(invalid="ignore"):
        keys, values = [_widen(dtype, part) * scales[..., i, :] for i, part in enumerate(parts)]
    return keys, values


@np.errstate(invalid="ignore", over="ignore")
def _quantize(dtype: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    highest, array = HIGHEST[dtype], array.astype(np.float32)
    largest = abs(array).max(axis=-1, keepdims=True)
    is_plain = (largest >= 2.0**-100) & np.isfinite(largest)
    factor = (highest / np.where(is_plain, largest, 1).astype(np.float64)).astype(np.float32)
    scaled = np.where(is_plain, array * factor, np.float32(0))
    scale = np.where(np.isfinite(largest), is_plain * largest, np.float32(np.nan))
    scale = (scale * np.float32(1 / highest))[..., 0].astype(np.float32)
    if dtype == "fp8_per_token_head":
        return scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale
    numbers = np.rint(scaled).clip(-highest, highest).astype(np.int8)
    if dtype == "int8_per_token_head":
        return numbers.view(np.uint8), scale
    low, high = np.split((numbers + 8).astype(np.uint8), 2, axis=-1)
    return low + 16 * high, scale


def _widen(dtype: str, elements: np.ndarray) -> np.ndarray:
    if dtype == "int4_per_token_head":
        halves = np.concatenate([elements % 16, elements // 16], axis=-1)
        return halves.astype(np.float32) - 8
    kind = np.int8 if dtype == "int8_per_token_head" else ml_dtypes.float8_e4m3fn
    return np.ascontiguousarray(elements).view(kind).astype(np.float32)
