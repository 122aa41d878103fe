"""Rows per kernel block, kernel blocks per block, and what a row is: the one source of each."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxkv.checks import check_positive
from jaxkv.specs import FullAttentionSpec, LayerSpec, MLASpec, StateSpec


def blocks_per_kv_block(spec: LayerSpec, kernel_block_size: int) -> int:
    """Kernel blocks, and so kernel ids, that one block of a layer consists of.

    ``blocks_per_kv_block * rows_per_kernel_block == rows_per_block``, always.

    Args:
      spec: what the layer stores.
      kernel_block_size: tokens of a kernel block.

    Raises:
      TypeError: a spec that keeps no cache, or a size that is no int.
      ValueError: a size that does not divide the block, holds no whole rows, or would
        split a state.
    """
    check_kernel_block_size(spec, kernel_block_size)
    return spec.block_size // kernel_block_size


def rows_per_kernel_block(spec: LayerSpec, kernel_block_size: int) -> int:
    """Rows that a layer stores for one kernel block; 1 for a state, which is read whole.

    Args, raises: as `blocks_per_kv_block`.
    """
    return rows_per_block(spec) // blocks_per_kv_block(spec, kernel_block_size)


def rows_per_block(spec: LayerSpec) -> int:
    """Rows that a layer stores for one block: tokens over tokens per row; 1 for a state."""
    check_spec(spec)
    return 1 if isinstance(spec, StateSpec) else spec.block_size // tokens_per_row([spec])


class RowFormat(NamedTuple):
    """One stored row of a layer, as `jaxkv.pool` writes it.

    key_elements: the first so many of a head's elements are K and the rest V; None: the
      row is something else, under one head (a latent row, packed bytes, a state).
    """

    heads: int
    width: int  # elements per head
    dtype: str
    key_elements: int | None


def row_format(spec: LayerSpec) -> RowFormat:
    """What one row of a layer holds; bytes where it is not plain elements of one dtype."""
    if isinstance(spec, FullAttentionSpec):
        if spec.scale_bytes or spec.dtype == "nvfp4":  # scales beside the elements
            return RowFormat(1, spec.token_bytes, "uint8", None)
        width = spec.head_size + spec.value_size
        return RowFormat(spec.num_kv_heads, width, spec.dtype, spec.head_size)
    if isinstance(spec, MLASpec):
        if spec.bytes_per_token is None and spec.dtype != "nvfp4":
            return RowFormat(1, spec.head_size, spec.dtype, None)
        return RowFormat(1, spec.token_bytes, "uint8", None)
    return RowFormat(1, spec.data_bytes, "uint8", None)  # a state: arrays of several dtypes


def tokens_per_row(specs: Iterable[LayerSpec]) -> int:
    """Tokens that a kernel block must be a multiple of to hold whole rows of every spec."""
    return math.lcm(*(getattr(spec, "compress_ratio", 1) for spec in specs))


def check_kernel_block_size(spec: LayerSpec, size: int, name: str = "kernel_block_size") -> None:
    """Raises as `blocks_per_kv_block` says, under the name of the argument."""
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
            f"{name}={size} holds no whole rows of this {spec.kind} layer, "
            f"which stores one for compress_ratio={ratio} tokens; use a multiple of {ratio} that "
            f"divides block_size={spec.block_size}"
        )


def check_spec(spec: LayerSpec) -> None:
    if not isinstance(spec, LayerSpec):
        raise TypeError(
            f"spec={spec!r} keeps no cache of its own and has no kernel blocks; pass a LayerSpec"
        )
