"""Bytes of the dtypes that a cache page can hold, by name because NumPy has no fp8. No jax."""

from typing import Any

from jaxkv._src.internal.text import shown

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
NVFP4_GROUP = 16  # elements that share one fp8 scale, stored next to them
# Bits of an element of keys and values that have a scale for each token and head.
PER_TOKEN_HEAD: dict[str, int] = {
    "int8_per_token_head": 8,
    "fp8_per_token_head": 8,
    "int4_per_token_head": 4,
}
DTYPE_ALIASES: dict[str, str] = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def canonical_dtype(dtype: Any, argument: str = "dtype") -> str:
    """Returns jax's name of a cache dtype.

    Args:
      dtype: jax's own name, a short alias such as "bf16", or a dtype object: anything with a
        ``name``, or a scalar type such as ``jnp.bfloat16``.
      argument: its name, for errors.

    Raises:
      ValueError: the dtype is not one that a cache page can hold.
    """
    given = dtype
    if not isinstance(dtype, str):
        given = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    name = DTYPE_ALIASES.get(str(given), str(given))
    packed = {"nvfp4", *PER_TOKEN_HEAD}
    if name not in packed | set(DTYPE_BYTES):
        known = ", ".join(sorted({*DTYPE_BYTES, *DTYPE_ALIASES, *packed}))
        raise ValueError(f"{argument}={shown(dtype)} is not a cache dtype; use one of {known}")
    return name


def packed_bytes(elements: int, dtype: str) -> int:
    """Returns the bytes of contiguous elements.

    nvfp4 packs two elements into a byte and adds one byte of scale for each 16 elements. The scales
    of each token and head are not counted.

    Args:
      elements: how many there are.
      dtype: jax's name of their dtype, from `canonical_dtype`.

    Raises:
      ValueError: elements of nvfp4 that are not a multiple of 16, or of 4 bits that are odd.
    """
    if dtype in PER_TOKEN_HEAD:
        if elements * PER_TOKEN_HEAD[dtype] % 8:
            raise ValueError(f"head_size={elements} must be even for {dtype}")
        return elements * PER_TOKEN_HEAD[dtype] // 8
    if dtype != "nvfp4":
        return elements * DTYPE_BYTES[dtype]
    if elements % NVFP4_GROUP:
        raise ValueError(f"head_size={elements} must be a multiple of {NVFP4_GROUP} for nvfp4")
    return elements // 2 + elements // NVFP4_GROUP


def check_no_heads(dtype: str, kind: str) -> None:
    """Raises ValueError for a dtype that has a scale for each head, which these rows lack."""
    if dtype in PER_TOKEN_HEAD:
        raise ValueError(
            f"dtype={dtype!r} has a scale for each head of keys and values, and {kind} has no "
            "heads; use another dtype"
        )
