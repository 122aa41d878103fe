"""Bytes of the dtypes that a cache page can hold, by name; numpy has no fp8 or fp4."""

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
NVFP4_GROUP = 16  # elements that share one fp8 scale, stored beside them
DTYPE_ALIASES: dict[str, str] = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def canonical_dtype(dtype: str, argument: str = "dtype") -> str:
    """Returns the jax name of a cache dtype, from its own name or a short alias.

    Raises:
      ValueError: the dtype is not one that a cache page can hold.
    """
    if not isinstance(dtype, str):
        raise ValueError(
            f"{argument}={dtype!r} is not the name of a dtype; write a string such as 'bf16'"
        )
    name = DTYPE_ALIASES.get(dtype, dtype)
    if name != "nvfp4" and name not in DTYPE_BYTES:
        known = ", ".join(sorted({*DTYPE_BYTES, *DTYPE_ALIASES, "nvfp4"}))
        raise ValueError(f"{argument}={dtype!r} is not a cache dtype; use one of {known}")
    return name


def packed_bytes(elements: int, dtype: str) -> int:
    """Bytes of a run of elements; nvfp4 packs two to a byte and adds a scale for each 16.

    Raises:
      ValueError: nvfp4 elements that are not a multiple of 16.
    """
    if dtype != "nvfp4":
        return elements * DTYPE_BYTES[dtype]
    if elements % NVFP4_GROUP:
        raise ValueError(f"head_size={elements} must be a multiple of {NVFP4_GROUP} for nvfp4")
    return elements // 2 + elements // NVFP4_GROUP
