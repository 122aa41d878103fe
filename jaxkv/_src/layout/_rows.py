"""The format of one stored row, and the kernel blocks of a block. No jax."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxkv._src.internal.checks import check_positive
from jaxkv._src.internal.text import shown
from jaxkv._src.specs import FullAttentionSpec, LayerSpec, MLASpec, RingSpec, StateSpec


class RowFormat(NamedTuple):
    """One stored row of a layer.

    heads: KV heads; 1 for a row that is not K and V.
    width: elements per head.
    dtype: of the elements; "uint8" for bytes of several dtypes.
    key_elements: how many of a head's elements are K, the rest being V; None: the row is
      something else (a latent vector, packed bytes, a state).
    """

    heads: int
    width: int
    dtype: str
    key_elements: int | None


def row_format(spec: LayerSpec) -> RowFormat:
    """Returns the format of a layer's rows; bytes unless they are plain elements of one dtype."""
    if isinstance(spec, FullAttentionSpec):
        # Scales lie next to the elements.
        if spec.has_scales or spec.scale_bytes or spec.dtype == "nvfp4":
            return RowFormat(1, spec.token_bytes, "uint8", None)
        width = spec.head_size + spec.value_size
        return RowFormat(spec.num_kv_heads, width, spec.dtype, spec.head_size)
    if isinstance(spec, MLASpec | RingSpec):
        if getattr(spec, "bytes_per_token", None) is None and spec.dtype != "nvfp4":
            return RowFormat(1, spec.head_size, spec.dtype, None)
        return RowFormat(1, spec.token_bytes, "uint8", None)
    return RowFormat(1, spec.data_bytes, "uint8", None)  # a state: arrays of several dtypes


def rows_per_block(spec: LayerSpec) -> int:
    """Returns the rows that a layer stores per block; 1 for a state."""
    check_spec(spec)
    return 1 if isinstance(spec, StateSpec) else spec.block_size // tokens_per_row([spec])


def blocks_per_kv_block(spec: LayerSpec, kernel_block_size: int) -> int:
    """Returns the kernel blocks, and so kernel ids, of one block of a layer.

    Args:
      spec: of the layer.
      kernel_block_size: tokens of a kernel block.

    Raises:
      TypeError: a spec that keeps no cache, or a size that is not an int.
      ValueError: a size that does not divide the block, holds no whole rows, or would split
        a state.
    """
    check_kernel_block_size(spec, kernel_block_size)
    return spec.block_size // kernel_block_size


def tokens_per_row(specs: Iterable[LayerSpec]) -> int:
    """Returns the fewest tokens that hold whole rows of every spec."""
    return math.lcm(*(getattr(spec, "compress_ratio", 1) for spec in specs))


def check_kernel_block_size(spec: LayerSpec, size: int, name: str = "kernel_block_size") -> None:
    """Raises as `blocks_per_kv_block` does, under the name of the argument."""
    check_spec(spec)
    check_positive(**{name: size})
    ratio = tokens_per_row([spec])
    if isinstance(spec, StateSpec) and size != spec.block_size:
        raise ValueError(
            f"{name}={size} would split a state, which is read whole; "
            f"use its block_size={spec.block_size}"
        )
    if spec.block_size % size:
        raise ValueError(
            f"{name}={size} does not divide "
            f"block_size={spec.block_size} of this {spec.kind} layer; use a divisor"
        )
    if size % ratio:
        raise ValueError(
            f"{name}={size} does not hold whole rows of this {spec.kind} layer, "
            f"which stores one for compress_ratio={ratio} tokens; use a multiple of {ratio} that "
            f"divides block_size={spec.block_size}"
        )


def check_spec(spec: LayerSpec) -> None:
    """Raises TypeError for a spec that keeps no cache of its own."""
    if not isinstance(spec, LayerSpec):
        raise TypeError(
            f"spec={shown(spec)} keeps no cache of its own and has no kernel blocks; pass a "
            "LayerSpec"
        )
