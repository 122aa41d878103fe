"""Tiling of pages into strips for one warpgroup, and into work items."""

from typing import NamedTuple

THREADS = 128  # one warpgroup
ACCESS_BYTES = 16  # widest load or store of one thread
# A kernel over many buffers has code for each of them, and on an H200 instruction fetch limited it.
# So a strip is short, and a loop runs over strips.
ACCESSES = 2  # of a thread per strip, if the page is large enough
ITEM_BYTES = 8192  # of a work item; enough to outweigh the work of finding it


class Tiling(NamedTuple):
    """A page cut into strips, which are gathered into work items.

    The last strip is shifted back to end with the page, so that no code for a remainder is needed.
    It may overlap the strip before it, which is harmless: both write the same bytes there.
    """

    width: int  # elements per strip
    vector: int  # elements per access of one thread
    strips: int  # per page
    strips_per_item: int

    @property
    def items(self) -> int:
        """Work items per page."""
        return -(-self.strips // self.strips_per_item)


def tile_page(page: int, itemsize: int, alignment: int = 0) -> Tiling | None:
    """Cuts a page of ``page`` elements; returns None if it is too short for one warpgroup.

    Args:
      alignment: every page starts at a multiple of this many elements; 0: pages start at
        multiples of their length.
    """
    vector = ACCESS_BYTES // itemsize
    while page % vector or alignment % vector or page < THREADS * vector:
        vector //= 2
        if vector == 0:
            return None
    widths = [THREADS * vector * n for n in range(ACCESSES, 0, -1) if page >= THREADS * vector * n]
    width = min(widths, key=lambda width: -(-page // width) * width)  # the least overlap
    strips = -(-page // width)
    items = max(1, round(strips * width * itemsize / ITEM_BYTES))
    return Tiling(width, vector, strips, -(-strips // items))
