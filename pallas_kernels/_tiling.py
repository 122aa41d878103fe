"""Tiling of pages: how a page is cut into strips for one warpgroup, and into work items."""

from typing import NamedTuple

THREADS = 128  # one warpgroup
ACCESS_BYTES = 16  # widest load or store of one thread
# Measured on an H200: a kernel over many buffers has code for each, and it runs at the
# speed at which instructions arrive. So a strip is short, and a loop runs over strips.
ACCESSES = 2  # of a thread per strip, when the page is large enough
ITEM_BYTES = 8192  # of a work item: enough to pay for finding it


class Tiling(NamedTuple):
    """A page cut into strips, and strips gathered into work items.

    The last strip is shifted back to end with the page. It may overlap its neighbour, which
    is harmless because both write the same bytes there, and saves code for a remainder.
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
    """Cuts a page of ``page`` elements; returns None when it is too short for one warpgroup.

    Args:
      alignment: elements that the start of every page is a multiple of; 0 where pages
        start at multiples of their length.
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
