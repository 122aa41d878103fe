"""The bytes of a pool, from the definitions: loops over what lies before each byte."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv._src.layout import ORDER_ALIASES, row_format, rows_per_block
from jaxkv._src.planning import PoolLayout
from jaxkv._src.specs import packed_bytes


class ReferencePool:
    """The bytes of a pool in any physical order, found by counting what lies before them.

    memory: uint8[bytes], all buffers one after the other.
    tensors: views of it, per tensor uint8[num_blocks, page], or where pages are divided
      among H heads uint8[num_blocks, H, page / H].
    """

    def __init__(
        self,
        layout: PoolLayout,
        num_blocks: int,
        fill: int = 0,
        *,
        order: str = "LBNHC",
        kernel_block_sizes: Sequence[int] | None = None,
    ):
        self.layout, self.num_blocks = layout, num_blocks
        self.order = ORDER_ALIASES.get(order, order)
        self.kernel_block_sizes = kernel_block_sizes
        self.memory = np.full(num_blocks * layout.bytes_per_block, fill, np.uint8)
        self.tensors = [self._tensor(tensor) for tensor in range(len(layout.tensors))]
        self._addresses: dict[str, np.ndarray] = {}

    def write(self, layer: str, block_id: int, offset: int, data: np.ndarray) -> None:
        """Writes the bytes of ``data`` into the layer's rows of a block; null is refused.

        offset: into the rows as they come, all heads of one before the next row.
        """
        if 0 < block_id < self.num_blocks:
            raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.memory[self.addresses(layer)[block_id, offset : offset + len(raw)]] = raw

    def page(self, layer: str, block_id: int) -> np.ndarray:
        """Returns the bytes of the layer's rows of a block; zeros for null and unknown blocks."""
        addresses = self.addresses(layer)
        known = 0 < block_id < self.num_blocks
        return self.memory[addresses[block_id]] if known else np.zeros_like(addresses[0], np.uint8)

    def copy(self, sources: Sequence[Sequence[int]], destinations: Sequence[Sequence[int]]) -> None:
        """Copies blocks, per group and all at once, in the tensors that hold its layers."""
        before = [tensor.copy() for tensor in self.tensors]
        for group, pairs in enumerate(zip(sources, destinations, strict=True)):
            for tensor in self._tensors_of(group):
                for source, destination in zip(*pairs, strict=True):
                    if 0 < source < self.num_blocks and 0 < destination < self.num_blocks:
                        self.tensors[tensor][destination] = before[tensor][source]

    def zero(self, zero_ids: Sequence[Iterable[int]]) -> None:
        """Zeroes the listed blocks, per group, in the tensors that hold its layers."""
        for group, ids in enumerate(zero_ids):
            for tensor in self._tensors_of(group):
                for block_id in ids:
                    if 0 < block_id < self.num_blocks:
                        self.tensors[tensor][block_id] = 0

    def addresses(self, layer: str) -> np.ndarray:
        """Returns where in `memory` each byte of the layer's rows lies: int[num_blocks, bytes]."""
        if layer not in self._addresses:
            self._addresses[layer] = self._walk(layer)
        return self._addresses[layer]

    def _walk(self, layer: str) -> np.ndarray:
        """Visits all extents of the layer's buffer in physical order, and its rows in them."""
        place = self.layout.placement_of(layer)
        spec, page = place.spec, self.layout.tensors[place.tensor].page_bytes
        sizes = self.kernel_block_sizes
        tiles = spec.block_size // (spec.block_size if sizes is None else sizes[place.group])
        heads, width, dtype, _ = row_format(spec)
        rows, cell = rows_per_block(spec) // tiles, packed_bytes(width, dtype)
        one_buffer = self.order.startswith("B")
        counts = {"B": self.num_blocks * tiles, "H": heads, "N": rows}
        counts["L"] = len(self.tensors) if one_buffer else 1
        outer = self.order[: 1 + max(self.order.index("L"), self.order.index("B"))]
        inner = self.order[len(outer) : -1]
        run = page // tiles // (heads if "H" in outer else 1)
        cursor = 0 if one_buffer else self._start(place.tensor)
        first = np.zeros((counts["B"], rows, heads), int)  # byte of each head of each row
        for outside in itertools.product(*(range(counts[axis]) for axis in outer)):
            if outside[outer.index("L")] == (place.tensor if one_buffer else 0):
                at = cursor + place.offset_bytes // tiles
                for inside in itertools.product(*(range(counts[axis]) for axis in inner)):
                    index = dict(zip(outer + inner, outside + inside, strict=True))
                    first[index["B"], index["N"], index["H"]] = at
                    at += cell
            cursor += run
        return (first[..., None] + np.arange(cell)).reshape(self.num_blocks, -1)

    def _start(self, tensor: int) -> int:
        return self.num_blocks * sum(s.page_bytes for s in self.layout.tensors[:tensor])

    def _tensor(self, tensor: int) -> np.ndarray:
        """uint8[num_blocks, page], or with an axis of heads before the bytes of a run."""
        page, blocks = self.layout.tensors[tensor].page_bytes, self.num_blocks
        place = self.layout.placement_of(self.layout.tensors[tensor].layers[0])
        heads = row_format(place.spec).heads
        if self.order == "BHLNC":
            return self.memory.reshape(blocks, heads, -1, page // heads)[:, :, tensor]
        if self.order.startswith("B"):
            return self.memory.reshape(blocks, -1, page)[:, tensor]
        pages = self.memory[self._start(tensor) :][: blocks * page]
        if self.order == "LHBNC":
            return pages.reshape(heads, blocks, -1).swapaxes(0, 1)
        return pages.reshape(blocks, page)

    def _tensors_of(self, group: int) -> Iterable[int]:
        """Returns the tensors of a group's layers; all, where a block lies in one piece."""
        held = self.layout.tensors_of(group)
        return range(len(self.tensors)) if held and self.order.startswith("B") else held
