"""Addresses of blocks, for connectors that copy them. No jax."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxkv._src.layout._buffers import PoolBuffers


class BlockDescriptors(NamedTuple):
    """Contiguous bytes of blocks, as transfer libraries take them.

    Two caches of one plan, order and number of devices have as many for the same logical blocks,
    in the same order.

    groups: the group of each descriptor, ascending.
    logical_blocks: the index of its block among the group's ids that were given.
    addresses: its first byte.
    lengths: its bytes.
    """

    groups: Int32[np.ndarray, "descriptors"]
    logical_blocks: Int32[np.ndarray, "descriptors"]
    addresses: Int64[np.ndarray, "descriptors"]
    lengths: Int64[np.ndarray, "descriptors"]


def list_descriptors(
    buffers: PoolBuffers, block_ids: Sequence[np.ndarray], addresses: Sequence[int]
) -> BlockDescriptors:
    """Returns the descriptors of blocks on one device.

    Args:
      buffers: of one device's share of the pool.
      block_ids: per group, int[...], the blocks.
      addresses: of the device's share of each buffer.

    Raises:
      ValueError: another number of groups or buffers, or a block that is not in the pool.
    """
    groups = range(len(buffers.layout.groups))
    if len(block_ids) != len(groups) or len(addresses) != len(buffers.shapes):
        raise ValueError(
            f"block_ids has {len(block_ids)} groups and addresses {len(addresses)} buffers; the "
            f"pool has {len(groups)} and {len(buffers.shapes)}"
        )
    for ids in block_ids:
        if len(ids) and not 0 < min(ids) <= max(ids) < buffers.num_blocks:
            raise ValueError(
                f"block_ids holds {min(ids)} to {max(ids)}; blocks are 1..{buffers.num_blocks - 1}"
            )
    parts = [_parts(buffers, group) for group in groups]
    tables = [
        np.stack(
            np.broadcast_arrays(group, np.arange(len(ids))[:, None], *_locate(ids, part, addresses))
        )
        for group, ids, part in zip(groups, block_ids, parts, strict=True)
    ]
    table = np.concatenate([each.reshape(4, -1) for each in tables], axis=1)
    return BlockDescriptors(
        table[0].astype(np.int32), table[1].astype(np.int32), table[2], table[3]
    )


def _locate(
    ids: np.ndarray, parts: np.ndarray, addresses: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns addresses and lengths of the parts of blocks, int64[blocks, parts]."""
    buffer, offset, stride, length = parts
    base = np.array(addresses, np.int64)[buffer] + offset
    return base + np.asarray(ids, np.int64)[:, None] * stride, length


def _parts(buffers: PoolBuffers, group: int) -> np.ndarray:
    """Returns buffer, offset in it, bytes from block to block, and length: int64[4, parts]."""
    mine, found = buffers.layout.tensors_of(group), list[tuple[int, int, int, int]]()
    for index, (stack, shape) in enumerate(zip(buffers.stacks, buffers.shapes, strict=True)):
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        indices: list[Sequence[int]] = []
        for axis, size in zip(buffers.axes, shape, strict=False):
            every = {"B": [0], "L": [i for i, tensor in enumerate(stack) if tensor in mine]}
            indices.append(every.get(axis, range(size)))
        if "L" not in buffers.axes and stack[0] not in mine:
            continue
        for at in itertools.product(*indices):
            offset = sum(i * stride for i, stride in zip(at, strides, strict=False))
            last = found[-1] if found else (-1, 0, 0, 0)
            if last[0] == index and last[1] + last[3] == offset:  # they adjoin
                found[-1] = (index, last[1], last[2], last[3] + shape[-1])
            else:
                found.append((index, offset, strides[buffers.block_axis], shape[-1]))
    return np.array(found, np.int64).reshape(-1, 4).T
