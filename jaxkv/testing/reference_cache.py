"""What every request of a cache must read, from the definition: a cache of its own.

Knows what requests wrote, entry by entry of their rows. Knows nothing of block ids, of the
pool or of who shares what: each request has NumPy arrays that nobody else touches.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv.kernel_blocks import row_format, rows_per_block
from jaxkv.planning import Plan
from jaxkv.specs import LayerSpec, StateSpec, TokenSpec

LARGEST_MARK = 0x7B  # as the top byte of an element: finite in fp8, int8, f16, bf16 and f32


class Write(NamedTuple):
    """What a request writes into one layer in one step.

    request, layer: whose, and the layer's name.
    positions: int32[n], the tokens whose rows these are. Of tokens that share a compressed
      row only one is named; a state has one row, of the last token.
    rows: uint8[n, row_bytes]. View them as the layer's dtype: all numbers are finite, and
      some are NaN to whoever reads them as a narrower dtype. The arrays of a state follow
      each other.
    """

    request: Hashable
    layer: str
    positions: np.ndarray
    rows: np.ndarray


class _Pages(NamedTuple):
    """A request's part of one layer, by entry of its row, and which bytes it wrote."""

    data: np.ndarray  # uint8[W, data_bytes]
    written: np.ndarray  # bool[W, data_bytes]


class ReferenceCache:
    """A dense cache for each request: draws what it writes, and knows what it must read."""

    def __init__(self, plan: Plan, *, seed: int = 0):
        """Starts without requests.

        Args:
          plan: of one worker. Layers of cross attention are left out: no step writes the
            encoder's tokens.
          seed: of the bytes to write.
        """
        self.plan = plan
        self.layers = {
            layer: plan.layout.place_of(layer)
            for group in plan.layout.groups
            for layer in group.layers
            if group.spec.kind != "cross"
        }
        self._rng = np.random.default_rng(seed)
        self._pages: dict[tuple[Hashable, str], _Pages] = {}

    def start(self, request: Hashable) -> None:
        """An empty cache for a request, also for one that had one before."""
        for layer, place in self.layers.items():
            shape = self.plan.row_blocks[place.group], place.spec.data_bytes
            self._pages[request, layer] = _Pages(np.zeros(shape, np.uint8), np.zeros(shape, bool))

    def fork(self, request: Hashable, donor: Hashable, num_tokens: int) -> None:
        """A cache that begins with the whole blocks of another's first tokens."""
        self.start(request)
        for layer, place in self.layers.items():
            count = num_tokens // place.spec.block_size
            both = zip(self._pages[request, layer], self._pages[donor, layer], strict=True)
            for mine, other in both:
                mine[:count] = other[:count]

    def finish(self, request: Hashable) -> None:
        for layer in self.layers:
            del self._pages[request, layer]

    def write(
        self, request: Hashable, num_computed_tokens: int, num_tokens: int
    ) -> tuple[Write, ...]:
        """Computes the tokens up to ``num_tokens``: what is new in every layer, noted here."""
        writes = []
        for layer, place in self.layers.items():
            positions = _row_positions(place.spec, num_computed_tokens, num_tokens)
            rows = self._draw_rows(place.spec, len(positions))
            pages = self._pages[request, layer]
            for position, row in zip(positions.tolist(), rows, strict=True):
                entry, offset = place_in_row(place.spec, position)
                pages.data[entry, offset : offset + len(row)] = row
                pages.written[entry, offset : offset + len(row)] = True
            writes.append(Write(request, layer, positions, rows))
        return tuple(writes)

    def _draw_rows(self, spec: LayerSpec, count: int) -> np.ndarray:
        """uint8[count, row_bytes]: the top byte of each element is drawn, the others 0xFF."""
        parts = []
        for dtype, num_bytes in _runs(spec):
            row_bytes, itemsize = num_bytes // rows_per_block(spec), dtype.itemsize
            elements = np.full((count, row_bytes // itemsize, itemsize), 0xFF, np.uint8)
            marks = self._rng.integers(1, LARGEST_MARK, elements.shape[:2], np.uint8, endpoint=True)
            elements[..., -1] = marks
            parts.append(elements.reshape(count, row_bytes))
        return np.concatenate(parts, axis=-1)

    def share(self, group: int, entry: int, first: Hashable, second: Hashable) -> bool:
        """May both requests hold one block there? They wrote the same into it, and something."""
        layers = [layer for layer, place in self.layers.items() if place.group == group]
        pairs = [(self._pages[first, layer], self._pages[second, layer]) for layer in layers]
        return any(mine.written[entry].any() for mine, _ in pairs) and all(
            np.array_equal(a[entry], b[entry])
            for mine, other in pairs
            for a, b in zip(mine, other, strict=True)
        )

    def find_problem(
        self,
        request: Hashable,
        layer: str,
        entries: Sequence[int],
        pages: np.ndarray,
        *,
        unwritten_reads_zero: bool,
    ) -> str | None:
        """What is wrong with the pages that a request reads of a layer; None: nothing.

        Args:
          entries: of the request's row, those whose blocks the next token may read.
          pages: uint8[W, data_bytes], what was read, by entry of the row.
          unwritten_reads_zero: what the request did not write must read as zeros;
            otherwise as anything but NaN, which attention multiplies by zero and keeps.
        """
        for entry in entries:
            mine, written = (part[entry] for part in self._pages[request, layer])
            got = pages[entry]
            if _has_nan(self.layers[layer].spec, got):
                return f"entry {entry} reads as NaN, and no request wrote that"
            for wrong, what in (
                (written & (got != mine), "which the request wrote as"),
                (~written & (got != 0) & unwritten_reads_zero, "which nobody wrote; wanted"),
            ):
                if wrong.any():
                    at = int(wrong.argmax())
                    return f"entry {entry} has {got[at]:#04x} at byte {at}, {what} {mine[at]:#04x}"
        return None


def place_in_row(spec: LayerSpec, position: int) -> tuple[int, int]:
    """Where a token's row lies: the entry of the request's row of blocks, and the byte of
    the page. A state of ``cache_mode="none"`` stays in entry 0."""
    if isinstance(spec, StateSpec):
        return (0 if spec.cache_mode == "none" else position // spec.block_size), 0
    if not isinstance(spec, TokenSpec):
        raise TypeError(f"spec={spec!r} stores neither tokens nor a state")
    entry, token = divmod(position, spec.block_size)
    rows = rows_per_block(spec)
    return entry, token * rows // spec.block_size * (spec.data_bytes // rows)


def _row_positions(spec: LayerSpec, computed: int, total: int) -> np.ndarray:
    """One token for each row that the tokens ``computed .. total - 1`` write."""
    if isinstance(spec, StateSpec):
        return np.array([total - 1], np.int32)
    shared = spec.block_size // rows_per_block(spec)  # tokens of one row
    rows = range(computed // shared, (total - 1) // shared + 1)
    return np.array([max(row * shared, computed) for row in rows], np.int32)


def _runs(spec: LayerSpec) -> list[tuple[np.dtype, int]]:
    """Dtypes in a page, in order, and the bytes of each."""
    if isinstance(spec, StateSpec):
        pairs = zip(spec.dtypes, spec.array_bytes, strict=True)
        return [(jnp.dtype(dtype), num_bytes) for dtype, num_bytes in pairs]
    return [(jnp.dtype(row_format(spec).dtype), spec.data_bytes)]


def _has_nan(spec: LayerSpec, page: np.ndarray) -> bool:
    start = 0
    for dtype, num_bytes in _runs(spec):
        part = np.ascontiguousarray(page[start : start + num_bytes]).view(dtype)
        if jnp.issubdtype(dtype, jnp.floating) and np.isnan(part.astype(np.float32)).any():
            return True
        start += num_bytes
    return False
