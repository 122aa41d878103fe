"""Transfers of blocks between device and host memory, and their counts. NumPy only."""

import dataclasses
from typing import NamedTuple

import numpy as np


class Chunk(NamedTuple):
    """Blocks of one group that are copied together, side by side in host memory.

    number: its name; no other chunk of a manager ever has it.
    group: index of the group.
    block_ids: int32[N], their blocks in device memory; -1: a load leaves this one out.
    """

    number: int
    group: int
    block_ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Transfers:
    """Blocks that are copied between the memories before the step that was packed with them.

    All stores read before any load writes, because a stored block may be one to load into. A load
    may read what one of the stores has brought. Nothing reads or writes the blocks of later loads
    before these, so that their copies to the device run next to a step.

    number: counts the transfers of a manager, from 1.
    stores, loads: chunks to copy to host memory, and from it.
    lookahead: numbers of the chunks that the next transfers load first, to start their copies now.
    dropped: numbers of chunks that nobody uses after these loads.
    is_anew: whether the manager was reset: all chunks of earlier transfers are dropped, and
      ``number`` may follow any other.
    """

    number: int
    stores: tuple[Chunk, ...]
    loads: tuple[Chunk, ...]
    dropped: tuple[int, ...]
    is_anew: bool = False
    lookahead: tuple[int, ...] = ()

    def __repr__(self) -> str:
        stored = sum(chunk.block_ids.size for chunk in self.stores)
        loaded = sum(int((chunk.block_ids >= 0).sum()) for chunk in self.loads)
        return f"Transfers(number {self.number}: {stored} blocks to the host, {loaded} back)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Counts of a manager's transfers so far, and of its host memory now.

    stored_blocks, stored_bytes: copied to host memory.
    loaded_blocks, loaded_bytes: copied back; bytes include blocks that share a chunk with these.
    evicted_blocks: taken from host memory for others.
    skipped_blocks: evicted from device memory and not stored: no memory, or no use.
    swapped_out_requests, swapped_in_requests, swapped_in_tokens: by `BlockManager.swap_out` and
      ``swap_in``.
    num_bytes, used_bytes: of host memory, and of the blocks that are there.
    """

    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    evicted_blocks: int
    skipped_blocks: int
    swapped_out_requests: int
    swapped_in_requests: int
    swapped_in_tokens: int
    num_bytes: int
    used_bytes: int


COUNTED = tuple(field.name for field in dataclasses.fields(OffloadStats))[:-2]
