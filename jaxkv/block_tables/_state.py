"""The state: rows of block ids for every group, and what was dropped."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.allocation import Device, zeros
from jaxkv.block_tables._index import gather_bits
from jaxkv.checks import FlagsError, check_positive
from jaxkv.kernel_blocks import blocks_per_kv_block
from jaxkv.planning import Plan
from jaxkv.rich_repr import html_table
from jaxkv.specs import CrossAttentionSpec, LayerSpec, StateSpec

PAD_SLOT = -1  # slot of a token that must not be written

PAD_ROW = -1  # row of a batch entry, or of a table entry, that is padding

BAD_ROW = 1

BAD_BLOCK_ID = 2

ROW_FULL = 4

DUPLICATE = 8

TOO_NARROW = 16

NO_BLOCK = 32

MISPLACED = 64

BAD_RANK = 128

MAX_SHOWN = 8  # rows, and ids of a row, that Jupyter is shown

_REASONS = {
    BAD_ROW: "a row out of range",
    BAD_BLOCK_ID: "a block id outside the pool",
    ROW_FULL: "more blocks for a row than it has entries",
    DUPLICATE: "two entries for one row in a single call",
    TOO_NARROW: "a gathered width smaller than a row's blocks",
    NO_BLOCK: "a slot for a position whose block was never given: it was not grown for, or an "
    "update was lost",
    BAD_RANK: "a context-parallel rank out of range",
    MISPLACED: "ids that do not lie by entry and group, in order",
}


class BlockTableError(FlagsError):
    """A table operation was dropped on the device. ``flags``: the bits that say why."""

    what, reasons = "block table operations were dropped", _REASONS


class TableGroup(NamedTuple):
    """What the device must know of a group. Static: part of the compiled program."""

    block_size: int
    blocks_per_kv_block: int
    stores: str  # "tokens", "encoder" for the encoder's tokens, or "state" (no slots)
    sliding_window: int | None
    chunk_size: int | None
    context_parallel: int = 1  # ranks among which positions are dealt out
    interleave_tokens: int = 1  # positions that a rank is dealt at a time

    @property
    def dealt_tokens(self) -> int:
        """Positions of all ranks together that one column of the tables stands for."""
        return self.block_size * self.context_parallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockTables:
    """The blocks of every request: R rows, and per group g up to M_g blocks a row.

    Entries at and past a row's `num_blocks` are leftovers that no function returns.
    """

    tables: tuple[Array, ...]  # per group int32[R, M_g], logical block ids
    num_blocks: Array  # int32[G, R], entries in use
    overflow: Array  # int32[], sticky bits
    groups: tuple[TableGroup, ...] = dataclasses.field(metadata={"static": True})
    pool_blocks: int = dataclasses.field(metadata={"static": True})

    @property
    def max_requests(self) -> int:
        return self.num_blocks.shape[1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Entries of a row, per group."""
        return tuple(table.shape[1] for table in self.tables)

    def __repr__(self) -> str:
        return (
            f"BlockTables({self.max_requests} rows, {self.widths} blocks a row in "
            f"{len(self.groups)} groups, pool of {self.pool_blocks} blocks)"
        )

    def _repr_html_(self) -> str | None:
        """The first rows, read from the device; None (Jupyter then shows the repr) where
        there is nothing to read: inside ``jit``, or once the tables are donated."""
        try:
            used = np.asarray(self.num_blocks)[:, :MAX_SHOWN]
            ids = [np.asarray(table[:MAX_SHOWN, :MAX_SHOWN]) for table in self.tables]
        except (jax.errors.TracerArrayConversionError, RuntimeError):
            return None
        texts = [
            [_ids_text(*pair) for pair in zip(group, counts.tolist(), strict=True)]
            for group, counts in zip(ids, used, strict=True)
        ]
        rows = zip(range(used.shape[1]), *texts, strict=True)
        stores = [f"group {index} ({group.stores})" for index, group in enumerate(self.groups)]
        return html_table(rows, caption=repr(self), header=["row", *stores])


def _ids_text(ids: np.ndarray, used: int) -> str:
    text = ", ".join(map(str, ids[:used].tolist()))
    return text if used <= len(ids) else f"{text}, ... ({used} ids)"


def make_block_tables(
    plan: Plan,
    *,
    max_requests: int,
    kernel_block_sizes: Sequence[int] | None = None,
    interleave_tokens: int = 1,
    device: Device = None,
) -> BlockTables:
    """Empty tables for a plan.

    Args:
      plan: gives the groups, the pool and the longest row.
      max_requests: rows.
      kernel_block_sizes: per group, the tokens per block that its attention kernel
        works on; each must divide the group's block size. None: the block size.
      interleave_tokens: with context parallelism, positions that a rank is dealt at a
        time; must divide every block size.
      device: a device or a (replicated) sharding, the same as the pool's; None: the
        default device.

    Raises:
      ValueError: a kernel block size, or an interleave, that does not divide the block
        size.
    """
    check_positive(max_requests=max_requests, interleave_tokens=interleave_tokens)
    specs = [group.spec for group in plan.groups]
    kernel_sizes = [spec.block_size for spec in specs]
    if isinstance(kernel_block_sizes, int):
        raise TypeError(
            f"kernel_block_sizes={kernel_block_sizes} must be a sequence, one per group"
        )
    if kernel_block_sizes is not None:
        kernel_sizes = list(kernel_block_sizes)
    if len(kernel_sizes) != len(specs):
        raise ValueError(
            f"kernel_block_sizes has {len(kernel_sizes)} entries; the plan has {len(specs)} groups"
        )
    groups = tuple(
        _table_group(spec, kernel_size, plan.context_parallel, interleave_tokens)
        for spec, kernel_size in zip(specs, kernel_sizes, strict=True)
    )
    shapes = [*((max_requests, width) for width in plan.row_blocks), (len(specs), max_requests), ()]

    *tables, num_blocks, overflow = zeros(tuple(shapes), jnp.int32, device)
    return BlockTables(
        tables=tuple(tables),
        num_blocks=num_blocks,
        overflow=overflow,
        groups=groups,
        pool_blocks=plan.num_blocks,
    )


def _table_group(
    spec: LayerSpec, kernel_size: int, context_parallel: int, interleave_tokens: int
) -> TableGroup:
    if spec.block_size % interleave_tokens:
        raise ValueError(
            f"interleave_tokens={interleave_tokens} does not divide the block size "
            f"{spec.block_size}; a block would end in the middle of a rank's turn"
        )
    return TableGroup(
        block_size=spec.block_size,
        blocks_per_kv_block=blocks_per_kv_block(spec, kernel_size),
        stores=_stores(spec),
        sliding_window=getattr(spec, "sliding_window", None),
        chunk_size=getattr(spec, "chunk_size", None),
        context_parallel=context_parallel,
        interleave_tokens=interleave_tokens,
    )


def _stores(spec: LayerSpec) -> str:
    if isinstance(spec, CrossAttentionSpec):
        return "encoder"
    return "state" if isinstance(spec, StateSpec) else "tokens"


def report(tables: BlockTables, problems: Array) -> BlockTables:
    """Adds bits, an int32 array of any shape, to those that the tables remember."""
    return dataclasses.replace(tables, overflow=tables.overflow | gather_bits(problems))


def check_overflow(tables: BlockTables) -> None:
    """Raises what the device dropped. Waits for the tables, so call it off the hot path.

    Raises:
      BlockTableError: at least one operation since the tables were made was dropped.
    """
    flags = int(tables.overflow)
    if flags:
        raise BlockTableError(flags)
