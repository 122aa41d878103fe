"""The content of a cache, from the definition: a dense cache of its own for every request.

Has no block ids and no pool: each request has NumPy arrays that no other request touches. What
requests write is random, but the same for equal tokens after equal ones.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkv._src.internal.checks import check_count, check_kind
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.internal.text import shown
from jaxkv._src.layout import row_format, rows_per_block
from jaxkv._src.planning import Plan
from jaxkv._src.specs import CrossAttentionSpec, LayerSpec, RingSpec, StateSpec

LARGEST_MARK = 0x7B  # as the top byte of an element: finite in fp8, int8, f16, bf16 and f32


class Write(NamedTuple):
    """The rows that a request writes into one layer in one step.

    request, layer: the request, and the layer's name.
    positions: int32[n], the tokens whose rows these are. Of tokens that share a compressed
      row only one is named; a state has one row, of the last token, and with
      ``cache_mode="all"`` one of the last token of every block.
    rows: uint8[n, row_bytes], a row's bytes in any order that you like (of heads, of keys and
      values), as long as they are read back in the same one. Viewed as the layer's dtype, all
      numbers are finite, and some are NaN when read as a narrower dtype. The arrays of a state
      follow each other.
    """

    request: Hashable
    layer: str
    positions: np.ndarray
    rows: np.ndarray


class _Pages(NamedTuple):
    """A request's part of one layer, by logical block."""

    data: np.ndarray  # uint8[W, data_bytes]
    written: np.ndarray  # bool[W, data_bytes]
    rejected: np.ndarray  # bool[W, data_bytes], written for drafts that were rejected
    tokens: np.ndarray  # int64[W], those that the state in each logical block has seen


class ReferenceCache:
    """A dense cache for each request: draws its writes, and tells what it must read."""

    def __init__(self, plan: Plan, *, seed: int = 0):
        """Starts without requests.

        Args:
          plan: of one worker. Layers of cross attention are left out: no step writes the
            encoder's tokens.
          seed: of the bytes to write.
        """
        check_kind(Plan, "what plan_cache returned", plan=plan)
        check_count(seed=seed)
        self.plan = plan
        self.layers = {
            layer: plan.layout.placement_of(layer)
            for group in plan.layout.groups
            for layer in group.layers
            if group.growth.stores != "encoder"
        }
        self._rng = np.random.default_rng(seed)
        self._pages: dict[tuple[Hashable, str], _Pages] = {}
        self._reached: dict[Hashable, int] = {}  # tokens of each request before any rewind
        self._namespaces: dict[Hashable, Hashable] = {}
        self._sampled: dict[tuple[str, Hashable, tuple[int, ...]], np.ndarray] = {}

    def start(
        self, request: Hashable, namespace: Hashable = None, prefix: Sequence[int] = ()
    ) -> None:
        """Makes the cache of a request, in place of the one that it may have had.

        Args:
          namespace: requests of one namespace write equal bytes for equal tokens after equal
            ones, if `write` is told the tokens; None: each of its writes is drawn anew.
          prefix: tokens that are in the cache already; none: it is empty.
        """
        self._reached[request] = len(prefix)
        self._namespaces[request] = namespace
        for layer, place in self.layers.items():
            shape = self.plan.row_blocks[place.group], place.spec.data_bytes
            self._pages[request, layer] = _Pages(
                data=np.zeros(shape, np.uint8),
                written=np.zeros(shape, bool),
                rejected=np.zeros(shape, bool),
                tokens=np.zeros(shape[0], np.int64),
            )
            if prefix:
                self._compute(request, layer, 0, prefix)
                self._forget_the_rest(self._pages[request, layer], place.spec, len(prefix))

    def _forget_the_rest(self, pages: _Pages, spec: LayerSpec, num_tokens: int) -> None:
        """Expects anything in the rest of a block: others may have filled it up."""
        if isinstance(spec, RingSpec):
            self._reject(pages, spec, 0, num_tokens)  # no prefix keeps a ring
            return
        logical_block, after = divmod(num_tokens, spec.block_size)
        if after and not isinstance(spec, StateSpec):
            pages.rejected[logical_block] |= ~pages.written[logical_block]

    def fork(self, request: Hashable, donor: Hashable, num_tokens: int) -> None:
        """Makes the cache of a request that starts with another's first tokens and its states."""
        self.start(request, self._namespaces[donor])
        self._reached[request] = num_tokens
        for layer, place in self.layers.items():
            end = -(-num_tokens // place.spec.block_size)
            shared = range(end)
            if isinstance(place.spec, StateSpec) and place.spec.cache_mode != "all":
                shared = range(min(end, 1)) if place.spec.cache_mode == "none" else shared[-1:]
            if isinstance(place.spec, RingSpec):  # after whole groups, each begins its own
                shared = range(1 if num_tokens % place.spec.group_size else 0)
            both = zip(self._pages[request, layer], self._pages[donor, layer], strict=True)
            for mine, other in both:
                mine[shared] = other[shared]

    def finish(self, request: Hashable) -> None:
        """Forgets a request."""
        for layer in self.layers:
            del self._pages[request, layer]

    def write(
        self,
        request: Hashable,
        num_computed_tokens: int,
        num_tokens: int,
        tokens: Sequence[int] = (),
    ) -> tuple[Write, ...]:
        """Computes the tokens up to ``num_tokens``: draws and notes the rows of every layer.

        Args:
          tokens: the request's first ``num_tokens`` token ids, if it has a namespace.
        """
        self._reached[request] = num_tokens
        known = tokens if self._namespaces[request] is not None else range(num_tokens)
        if len(known) != num_tokens:
            raise ValueError(f"tokens has {len(known)} ids; wanted the first {num_tokens}")
        return tuple(
            self._compute(request, layer, num_computed_tokens, known) for layer in self.layers
        )

    def _compute(
        self, request: Hashable, layer: str, computed: int, tokens: Sequence[int]
    ) -> Write:
        """Notes what a request writes into one layer for its tokens after the computed ones."""
        spec, pages = self.layers[layer].spec, self._pages[request, layer]
        positions = _row_positions(spec, computed, len(tokens))
        rows = self._rows_of(request, layer, positions, tokens)
        for position, row in zip(positions.tolist(), rows, strict=True):
            logical_block, offset = locate_in_row(spec, position)
            pages.data[logical_block, offset : offset + len(row)] = row
            pages.written[logical_block, offset : offset + len(row)] = True
            pages.rejected[logical_block, offset : offset + len(row)] = False
            pages.tokens[logical_block] = position + 1
        return Write(request, layer, positions, rows)

    def _rows_of(
        self, request: Hashable, layer: str, positions: np.ndarray, tokens: Sequence[int]
    ) -> np.ndarray:
        """Returns uint8[n, row_bytes]: drawn anew, or as they were for the same tokens."""
        spec, namespace = self.layers[layer].spec, self._namespaces[request]
        if namespace is None:
            return self._draw_rows(spec, len(positions))
        shared = 1 if isinstance(spec, StateSpec) else spec.block_size // rows_per_block(spec)
        rows = []
        for position in positions.tolist():  # a row is made of all its tokens and those before
            seen = tuple(tokens[: (position // shared + 1) * shared])
            key = layer, namespace, seen
            if key not in self._sampled:
                self._sampled[key] = self._draw_rows(spec, 1)[0]
            rows.append(self._sampled[key])
        return np.stack(rows)

    def rewind(self, request: Hashable, num_tokens: int) -> None:
        """Sets a request back to its first tokens, which the cache under test agreed to.

        Raises:
          AssertionError: no block holds the state after ``num_tokens`` tokens: it should have
            been refused. Drafts of the last step have a block each (``speculative_blocks``).
        """
        for layer, place in self.layers.items():
            pages, reached = self._pages[request, layer], self._reached[request]
            if not isinstance(place.spec, StateSpec):
                self._reject(pages, place.spec, num_tokens, reached)
                continue
            logical_block, _ = locate_in_row(place.spec, max(num_tokens - 1, 0))
            past_drafts = reached - num_tokens > place.spec.speculative_blocks
            if num_tokens and past_drafts and pages.tokens[logical_block] != num_tokens:
                raise AssertionError(
                    f"request {request}, layer {layer!r} was set back to {num_tokens} tokens, "
                    f"and the state in logical block {logical_block} has seen "
                    f"{pages.tokens[logical_block]}"
                )
            later = pages.tokens > num_tokens
            later[logical_block] = False
            pages.rejected[later] |= pages.written[later]
            pages.written[later] = False

    def _reject(self, pages: _Pages, spec: LayerSpec, kept: int, reached: int) -> None:
        """Forgets the rows of rejected tokens: they read as anything but NaN."""
        rows = rows_per_block(spec)
        shared, row_bytes = spec.block_size // rows, spec.data_bytes // rows
        for position in range(cdiv(kept, shared) * shared, reached, shared):
            logical_block, offset = locate_in_row(spec, position)
            where = logical_block, slice(offset, offset + row_bytes)
            pages.rejected[where] |= pages.written[where]
            pages.written[where] = False

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

    def share(self, group: int, logical_block: int, first: Hashable, second: Hashable) -> bool:
        """Returns whether both requests may hold one block there: they wrote the same into it."""
        layers = [layer for layer, place in self.layers.items() if place.group == group]
        pairs = [(self._pages[first, layer], self._pages[second, layer]) for layer in layers]
        return any((a.written | a.rejected)[logical_block].any() for a, _ in pairs) and all(
            (
                a.rejected[logical_block]
                | b.rejected[logical_block]
                | (a.data[logical_block] == b.data[logical_block])
                & (a.written[logical_block] == b.written[logical_block])
            ).all()
            for a, b in pairs
        )

    def find_problem(
        self,
        request: Hashable,
        layer: str,
        logical_blocks: Sequence[int],
        pages: np.ndarray,
        *,
        unwritten_reads_zero: bool,
    ) -> str | None:
        """Returns what is wrong with the pages that a request reads of a layer; None: nothing.

        Args:
          logical_blocks: the ones that the next token may read.
          pages: uint8[W, data_bytes], what was read, by logical block of the row.
          unwritten_reads_zero: what the request did not write must read as zeros;
            otherwise as anything but NaN, which attention does not mask.
        """
        for logical_block in logical_blocks:
            mine, written, rejected = (
                part[logical_block] for part in self._pages[request, layer][:3]
            )
            got = pages[logical_block]
            if _has_nan(self.layers[layer].spec, got):
                return f"logical block {logical_block} reads as NaN, and no request wrote that"
            for wrong, what in (
                (written & (got != mine), "which the request wrote as"),
                (
                    ~(written | rejected) & (got != 0) & unwritten_reads_zero,
                    "which nobody wrote; wanted",
                ),
            ):
                if wrong.any():
                    at = int(wrong.argmax())
                    return (
                        f"logical block {logical_block} has {got[at]:#04x} at byte {at}, {what} "
                        f"{mine[at]:#04x}"
                    )
        return None


def locate_in_row(spec: LayerSpec, position: int) -> tuple[int, int]:
    """Returns the logical block, and the byte of its page, at which a token's row begins.

    A state of ``cache_mode="none"`` stays in logical block 0, as a ring does.
    """
    check_count(position=position)
    if isinstance(spec, RingSpec):
        return 0, position % spec.block_size * spec.token_bytes
    if isinstance(spec, StateSpec):
        return (0 if spec.cache_mode == "none" else position // spec.block_size), 0
    if not isinstance(spec, LayerSpec) or isinstance(spec, CrossAttentionSpec):
        raise TypeError(f"spec={shown(spec)} stores neither tokens nor a state")
    logical_block, token = divmod(position, spec.block_size)
    rows = rows_per_block(spec)
    return logical_block, token * rows // spec.block_size * (spec.data_bytes // rows)


def _row_positions(spec: LayerSpec, computed: int, total: int) -> np.ndarray:
    """Returns one token for each row that the tokens ``computed .. total - 1`` write."""
    if isinstance(spec, StateSpec):
        size = spec.block_size if spec.cache_mode == "all" else total
        blocks = range(computed // size, (total - 1) // size + 1)
        return np.array([min((block + 1) * size, total) - 1 for block in blocks], np.int32)
    if isinstance(spec, RingSpec):  # it keeps no more
        computed = max(computed, total - spec.block_size)
    shared = spec.block_size // rows_per_block(spec)  # tokens of one row
    rows = range(computed // shared, (total - 1) // shared + 1)
    return np.array([max(row * shared, computed) for row in rows], np.int32)


def _runs(spec: LayerSpec) -> list[tuple[np.dtype, int]]:
    """Returns the dtypes in a page, in order, and the bytes of each."""
    if isinstance(spec, StateSpec):
        pairs = zip(spec.arrays, spec.array_bytes, strict=True)
        return [(jnp.dtype(dtype), num_bytes) for (_, dtype), num_bytes in pairs]
    return [(jnp.dtype(row_format(spec).dtype), spec.data_bytes)]


def _has_nan(spec: LayerSpec, page: np.ndarray) -> bool:
    start = 0
    for dtype, num_bytes in _runs(spec):
        part = np.ascontiguousarray(page[start : start + num_bytes]).view(dtype)
        if jnp.issubdtype(dtype, jnp.floating) and np.isnan(part.astype(np.float32)).any():
            return True
        start += num_bytes
    return False
