"""The kernels, from the definitions: lists and loops."""

from collections.abc import Iterable, Sequence

import numpy as np


def reference_zero_blocks(
    buffer: np.ndarray,
    block_ids: Iterable[int],
    *,
    block_axis: int = 0,
) -> np.ndarray:
    """Returns a copy of ``buffer`` with the listed blocks zeroed; ids out of range do nothing."""
    zeroed = buffer.copy()
    by_block = np.moveaxis(zeroed, block_axis, 0)
    for block_id in block_ids:
        if 0 <= block_id < len(by_block):
            by_block[block_id] = 0
    return zeroed


def reference_copy_blocks(
    buffer: np.ndarray,
    sources: Iterable[int],
    destinations: Iterable[int],
    *,
    block_axis: int = 0,
) -> np.ndarray:
    """Returns a copy of ``buffer`` after all pairs at once; of one destination the last counts."""
    copied = buffer.copy()
    before, after = np.moveaxis(buffer, block_axis, 0), np.moveaxis(copied, block_axis, 0)
    for source, destination in zip(sources, destinations, strict=True):
        if 0 <= source < len(before) and 0 <= destination < len(before):
            after[destination] = before[source]
    return copied


def reference_write_rows(
    pages: np.ndarray,
    block_ids: Iterable[int],
    offsets: Iterable[int],
    rows: Sequence[np.ndarray],
    *,
    align: int = 1,
) -> np.ndarray:
    """Returns a copy of ``pages`` with the rows that lie within a page written into it."""
    written = pages.copy()
    num_pages, page = pages.shape
    for block_id, offset, row in zip(block_ids, offsets, rows, strict=True):
        inside = 0 <= offset and offset + len(row) <= page
        if 0 <= block_id < num_pages and inside and offset % align == 0:
            written[block_id, offset : offset + len(row)] = row
    return written
