"""Constants and integer arithmetic. No jax."""

from typing import Any

INT32_MAX = 2**31 - 1  # block ids, slots and positions are int32 on the device

MAX_SAMPLES = 2**20  # of one prompt, each of which is an object on the host

NULL_BLOCK = 0  # reserved, never allocated; block tables are padded with it


def cdiv(numerator: Any, denominator: Any) -> Any:
    """Returns ``ceil(numerator / denominator)`` of ints or integer arrays."""
    return -(-numerator // denominator)
