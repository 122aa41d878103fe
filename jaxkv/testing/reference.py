"""What tables, pool and zeroing must do, from the definitions: lists, loops and bytes."""

import copy
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv.block_tables import (
    BAD_BLOCK_ID,
    BAD_ROW,
    DUPLICATE,
    NO_BLOCK,
    ROW_FULL,
    TOO_NARROW,
)
from jaxkv.blocks import TableEntry
from jaxkv.groups import PoolLayout
from jaxkv.kernel_blocks import LAYOUT_ALIASES, row_format, rows_per_block
from jaxkv.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    LayerSpec,
    SlidingWindowSpec,
    StateSpec,
    packed_bytes,
)


class ReferenceTables:
    """Block tables as lists of lists; ``flags`` collects what was dropped and why."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        widths: Sequence[int],
        *,
        max_requests: int,
        pool_blocks: int,
        kernel_block_sizes: Sequence[int] | None = None,
        context_parallel: int = 1,
        interleave_tokens: int = 1,
        rank: int = 0,
    ):
        self.specs, self.widths, self.pool_blocks = specs, widths, pool_blocks
        self.kernel_block_sizes = kernel_block_sizes or [spec.block_size for spec in specs]
        self.context_parallel, self.rank = context_parallel, rank
        self.interleave_tokens = interleave_tokens
        self.rows: list[list[list[int]]] = [[[] for _ in range(max_requests)] for _ in specs]
        self.flags = 0

    @property
    def max_requests(self) -> int:
        return len(self.rows[0])

    def append(self, entries: Iterable[TableEntry]) -> None:
        """Entries of one row compose in order, then apply whole or not at all."""
        by_row: dict[int, list[TableEntry]] = {}
        for entry in entries:
            by_row.setdefault(entry.row, []).append(entry)
        for row, parts in by_row.items():
            self.flags |= self._try_append(row, parts)

    def _try_append(self, row: int, parts: list[TableEntry]) -> int:
        if not 0 <= row < self.max_requests:
            return BAD_ROW
        groups = range(len(self.specs))
        ids = [_compose(self.rows[group][row], group, parts) for group in groups]
        flags = 0
        for group in groups:
            new = _compose([], group, parts)
            flags |= 0 if all(0 <= i < self.pool_blocks for i in new) else BAD_BLOCK_ID
            flags |= ROW_FULL if len(ids[group]) > self.widths[group] else 0
        if not flags:
            for group in groups:
                self.rows[group][row] = ids[group]
        return flags

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self.max_requests:
                self.flags |= BAD_ROW
                continue
            for table in self.rows:
                table[row] = []

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pairs = list(zip(sources, destinations, strict=True))
        known = [p for p in pairs if all(0 <= row < self.max_requests for row in p)]
        if len(known) < len(pairs):
            self.flags |= BAD_ROW
        moving = [p for p in known if p[0] != p[1]]
        clear = [p for p in moving if sum(q[0] == p[0] or q[1] == p[1] for q in moving) == 1]
        if len(clear) < len(moving):
            self.flags |= DUPLICATE
        before = copy.deepcopy(self.rows)
        for group, table in enumerate(self.rows):
            for source, _ in clear:
                table[source] = []
            for source, destination in clear:
                table[destination] = list(before[group][source])

    def gather(
        self, rows: Sequence[int], first_positions: Sequence[int], widths: Sequence[int]
    ) -> list[np.ndarray]:
        """Per group int32[B, width * kernel blocks per block]."""
        gathered = []
        for group, (spec, width) in enumerate(zip(self.specs, widths, strict=True)):
            parts = spec.block_size // self.kernel_block_sizes[group]
            table = np.zeros((len(rows), width * parts), np.int32)
            for i, (row, first) in enumerate(zip(rows, first_positions, strict=True)):
                if not 0 <= row < self.max_requests:
                    self.flags |= BAD_ROW if row != -1 else 0
                    continue
                ids = self.rows[group][row]
                self.flags |= TOO_NARROW if len(ids) > width else 0
                for j, block_id in enumerate(ids[:width]):
                    last_position = (j + 1) * spec.block_size - 1
                    if block_id and last_position >= _oldest_seen(spec, first):
                        for k in range(parts):
                            table[i, j * parts + k] = block_id * parts + k
            gathered.append(table)
        return gathered

    def slots(self, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """int32[G, T], through kernel blocks as an attention kernel would find them."""
        slots = np.full((len(self.specs), len(rows)), -1, np.int32)
        for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if position < 0 or row == -1:
                continue
            if not 0 <= row < self.max_requests:
                self.flags |= BAD_ROW
                continue
            for group, spec in enumerate(self.specs):
                if isinstance(spec, StateSpec | CrossAttentionSpec):
                    continue
                place = self._dealt(position)
                if place is None:
                    continue
                block_id = dict(enumerate(self.rows[group][row])).get(place // spec.block_size)
                if not block_id:
                    self.flags |= NO_BLOCK
                    continue
                kernel = self.kernel_block_sizes[group]
                part, offset = divmod(place % spec.block_size, kernel)
                kernel_block = block_id * (spec.block_size // kernel) + part
                slots[group, t] = kernel_block * kernel + offset
        return slots

    def _dealt(self, position: int) -> int | None:
        """How many positions before this one went to the same rank; None: not to this one.

        Dealt out one turn after the other, as cards are.
        """
        turn, within = divmod(position, self.interleave_tokens)
        round_, rank = divmod(turn, self.context_parallel)
        return round_ * self.interleave_tokens + within if rank == self.rank else None


def _compose(ids: list[int], group: int, parts: list[TableEntry]) -> list[int]:
    for part in parts:
        ids = [*([] if part.overwrite else ids), *part.block_ids[group]]
    return ids


def _oldest_seen(spec: LayerSpec, position: int) -> int:
    """Oldest position that the token at ``position`` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - (spec.sliding_window - 1))
    if isinstance(spec, ChunkedAttentionSpec):
        return position - position % spec.chunk_size
    return 0


class ReferencePool:
    """The bytes of a pool in any physical order, found by counting what lies before them.

    memory: uint8[bytes], all buffers one after the other.
    slots: views of it, per slot uint8[num_blocks, page], or where pages are dealt out
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
        self.order = LAYOUT_ALIASES.get(order, order)
        self.kernel_block_sizes = kernel_block_sizes
        self.memory = np.full(num_blocks * layout.bytes_per_block, fill, np.uint8)
        self.slots = [self._slot(slot) for slot in range(len(layout.slots))]
        self._addresses: dict[str, np.ndarray] = {}

    def write(self, layer: str, block_id: int, offset: int, data: np.ndarray) -> None:
        """Writes the bytes of ``data`` into the layer's rows of a block; null is refused.

        offset: into the rows as they come, all heads of one before the next row.
        """
        if 0 < block_id < self.num_blocks:
            raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.memory[self.addresses(layer)[block_id, offset : offset + len(raw)]] = raw

    def page(self, layer: str, block_id: int) -> np.ndarray:
        """The bytes of the layer's rows of a block; zeros for null and unknown blocks."""
        addresses = self.addresses(layer)
        known = 0 < block_id < self.num_blocks
        return self.memory[addresses[block_id]] if known else np.zeros_like(addresses[0], np.uint8)

    def copy(self, sources: Sequence[Sequence[int]], destinations: Sequence[Sequence[int]]) -> None:
        """Per group, copies blocks, all at once, in the slots that hold its layers."""
        before = [slot.copy() for slot in self.slots]
        for group, pairs in enumerate(zip(sources, destinations, strict=True)):
            for slot in self._slots_of(group):
                for source, destination in zip(*pairs, strict=True):
                    if 0 < source < self.num_blocks and 0 < destination < self.num_blocks:
                        self.slots[slot][destination] = before[slot][source]

    def zero(self, zero_ids: Sequence[Iterable[int]]) -> None:
        """Per group, zeroes the listed blocks in the slots that hold its layers."""
        for group, ids in enumerate(zero_ids):
            for slot in self._slots_of(group):
                for block_id in ids:
                    if 0 < block_id < self.num_blocks:
                        self.slots[slot][block_id] = 0

    def addresses(self, layer: str) -> np.ndarray:
        """Where in `memory` each byte of the layer's rows lies: int[num_blocks, bytes]."""
        if layer not in self._addresses:
            self._addresses[layer] = self._walk(layer)
        return self._addresses[layer]

    def _walk(self, layer: str) -> np.ndarray:
        """Visits all runs of the layer's buffer in physical order, and its rows in them."""
        place = self.layout.place_of(layer)
        spec, page = place.spec, self.layout.slots[place.slot].page_bytes
        sizes = self.kernel_block_sizes
        tiles = spec.block_size // (spec.block_size if sizes is None else sizes[place.group])
        heads, width, dtype, _ = row_format(spec)
        rows, cell = rows_per_block(spec) // tiles, packed_bytes(width, dtype)
        one_buffer = self.order.startswith("B")
        counts = {"B": self.num_blocks * tiles, "H": heads, "N": rows}
        counts["L"] = len(self.slots) if one_buffer else 1
        outer = self.order[: 1 + max(self.order.index("L"), self.order.index("B"))]
        inner = self.order[len(outer) : -1]
        run = page // tiles // (heads if "H" in outer else 1)
        cursor = 0 if one_buffer else self._start(place.slot)
        first = np.zeros((counts["B"], rows, heads), int)  # byte of each head of each row
        for outside in itertools.product(*(range(counts[axis]) for axis in outer)):
            if outside[outer.index("L")] == (place.slot if one_buffer else 0):
                at = cursor + place.offset_bytes // tiles
                for inside in itertools.product(*(range(counts[axis]) for axis in inner)):
                    index = dict(zip(outer + inner, outside + inside, strict=True))
                    first[index["B"], index["N"], index["H"]] = at
                    at += cell
            cursor += run
        return (first[..., None] + np.arange(cell)).reshape(self.num_blocks, -1)

    def _start(self, slot: int) -> int:
        return self.num_blocks * sum(s.page_bytes for s in self.layout.slots[:slot])

    def _slot(self, slot: int) -> np.ndarray:
        """uint8[num_blocks, page], or with an axis of heads before the bytes of a run."""
        page, blocks = self.layout.slots[slot].page_bytes, self.num_blocks
        place = self.layout.place_of(self.layout.slots[slot].layers[0])
        heads = row_format(place.spec).heads
        if self.order == "BHLNC":
            return self.memory.reshape(blocks, heads, -1, page // heads)[:, :, slot]
        if self.order.startswith("B"):
            return self.memory.reshape(blocks, -1, page)[:, slot]
        pages = self.memory[self._start(slot) :][: blocks * page]
        if self.order == "LHBNC":
            return pages.reshape(heads, blocks, -1).swapaxes(0, 1)
        return pages.reshape(blocks, page)

    def _slots_of(self, group: int) -> Iterable[int]:
        """Slots that hold layers of a group; all, where a block lies in one piece."""
        held = self.layout.slots_of(group)
        return range(len(self.slots)) if held and self.order.startswith("B") else held
