"""Block tables, from the definitions: lists and loops."""

from collections.abc import Iterable, Sequence

from jaxkv._src.cache import CacheFlags
from jaxkv._src.planning import Plan, check_rows
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    LayerSpec,
    RingSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from jaxkv._src.uploads import TableEntry


class ReferenceTables:
    """The rows of every group, as lists of cells, each with the last id written.

    cells: per group and row, block ids by logical block.
    lengths: per group and row, logical blocks in use; ids past them are stale.
    flags: error flags of everything that was dropped, as `jaxkv.cache` names them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        max_requests: int,
        kernel_block_sizes: Sequence[int] | None = None,
        interleave_tokens: int = 1,
        rank: int = 0,
    ):
        check_rows(plan, max_requests)
        self.plan, self.max_requests, self.rank = plan, max_requests, rank
        self.specs = [group.specs[0] for group in plan.groups]
        self.kernel_block_sizes = kernel_block_sizes or [spec.block_size for spec in self.specs]
        self.interleave_tokens = interleave_tokens
        self.cells = [[[0] * width for _ in range(max_requests)] for width in plan.row_blocks]
        self.lengths = [[0] * max_requests for _ in plan.row_blocks]
        self.flags = 0

    def append(self, entries: Iterable[TableEntry]) -> None:
        """Writes entries; of two for one cell the later counts, and of two lengths of a row.

        Ids that the pool does not have become null.
        """
        cells: dict[tuple[int, int, int], int] = {}
        lengths: dict[tuple[int, int], int] = {}
        for row, block_ids, starts in entries:
            starts = [0] * len(block_ids) if starts is None else starts
            for group, (start, ids) in enumerate(zip(starts, block_ids, strict=True)):
                lengths[group, row] = start + len(ids)
                cells |= {(group, row, start + i): block_id for i, block_id in enumerate(ids)}
        for (group, row, logical_block), block_id in cells.items():
            known = 0 <= block_id < self.plan.num_blocks
            inside = logical_block < len(self.cells[group][row])
            self.flags |= 0 if known else CacheFlags.BAD_BLOCK_ID
            self.flags |= 0 if inside else CacheFlags.BAD_LOGICAL_BLOCK
            if inside:
                self.cells[group][row][logical_block] = block_id if known else 0
        for (group, row), length in lengths.items():
            fits = length <= len(self.cells[group][row])
            self.flags |= 0 if fits else CacheFlags.BAD_LOGICAL_BLOCK
            self.lengths[group][row] = length if fits else 0

    def row(self, group: int, row: int) -> list[int]:
        """Returns the logical blocks of a row that are in use."""
        return self.cells[group][row][: self.lengths[group][row]]

    def logical_blocks(
        self, group: int, computed: int, total: int, encoder_tokens: int = 0
    ) -> list[int | None]:
        """Returns the logical blocks that a step of one request lists, in order; None: none."""
        spec = self.specs[group]
        size = spec.block_size * self.plan.context_parallel
        if isinstance(spec, CrossAttentionSpec):
            return list(range(-(-encoder_tokens // size)))
        if isinstance(spec, RingSpec):
            return [0]
        if not isinstance(spec, StateSpec):
            oldest = min(p for p in range(computed + 1) if _sees(spec, computed, p))
            return [*sorted({p // size for p in range(oldest, total)})]
        newest = (total - 1) // size
        source = (computed - 1) // size if computed else None
        match spec.cache_mode:
            case "none":
                source, first, newest = None if source is None else 0, 0, 0
            case "align":
                first = newest
            case _:
                first = computed // size
        return [source, *range(first, newest + 1 + spec.speculative_blocks)]

    def table(
        self, group: int, row: int, computed: int, total: int, encoder_tokens: int = 0
    ) -> list[int]:
        """Returns the kernel blocks that a step of one request lists; null where one is missing."""
        parts = self.specs[group].block_size // self.kernel_block_sizes[group]
        ids = self.row(group, row)
        listed: list[int] = []
        for logical_block in self.logical_blocks(group, computed, total, encoder_tokens):
            block_id = (
                ids[logical_block] if logical_block is not None and logical_block < len(ids) else 0
            )
            if logical_block is not None and not block_id:
                self.flags |= CacheFlags.NO_BLOCK
            listed += [block_id * parts + part if block_id else 0 for part in range(parts)]
        return listed

    def slot(self, group: int, row: int, position: int, total: int = 0) -> int:
        """Returns the slot of a token, found through its kernel block; -1 for none.

        Args:
          total: tokens of the request after the step, for a ring.
        """
        spec = self.specs[group]
        if isinstance(spec, RingSpec):
            if position < total - spec.block_size:
                return -1  # a later token of the step overwrites it
            position %= spec.block_size
        index = self._own_index(position)
        if isinstance(spec, StateSpec | CrossAttentionSpec) or index is None:
            return -1
        ids = self.row(group, row)
        logical_block, offset = divmod(index, spec.block_size)
        if logical_block >= len(ids) or not ids[logical_block]:
            return -1
        kernel = self.kernel_block_sizes[group]
        part, offset = divmod(offset, kernel)
        return (ids[logical_block] * (spec.block_size // kernel) + part) * kernel + offset

    def _own_index(self, position: int) -> int | None:
        """Returns how many earlier positions went to this rank; None: this one went elsewhere.

        Ranks take turns, of ``interleave_tokens`` positions each.
        """
        turn, within = divmod(position, self.interleave_tokens)
        round_, rank = divmod(turn, self.plan.context_parallel)
        return round_ * self.interleave_tokens + within if rank == self.rank else None


def _sees(spec: LayerSpec, query: int, key: int) -> bool:
    """Returns whether the token at one position attends to the token at another."""
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return key <= query and query - key < spec.sliding_window
    if isinstance(spec, ChunkedAttentionSpec):
        return key <= query and key // spec.chunk_size == query // spec.chunk_size
    return key <= query
