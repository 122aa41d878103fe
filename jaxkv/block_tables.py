"""Block tables on the device: immutable state, jit-safe functions, no host sync.

Knows rows, groups and block ids. Knows nothing of who owns a block (`jaxkv.blocks`) or
of the bytes in it (`jaxkv.pool`).

Every operation is jitted, ``state -> state``, and leaves its argument valid; inside your
own ``jit`` it becomes part of it, and there you may donate the tables. Rows and ids that
are out of range never clamp or wrap: what they ask for is dropped whole, and a bit of
`BlockTables.overflow` remembers it until `check_overflow` raises it on the host.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.blocks import NULL_BLOCK
from jaxkv.checks import check_count, check_positive, check_same_shape
from jaxkv.jit_int32 import jit_int32
from jaxkv.planning import Plan
from jaxkv.specs import CrossAttentionSpec, LayerSpec, StateSpec

PAD_SLOT = -1  # slot of a token that must not be written
PAD_ROW = -1  # row of a batch entry that is padding
PAD_GROUP = -1  # group of a table entry that is padding

BAD_ROW = 1
BAD_BLOCK_ID = 2
ROW_FULL = 4
DUPLICATE = 8
TOO_NARROW = 16
NO_BLOCK = 32
UNSORTED = 64
_REASONS = {
    BAD_ROW: "a row or group out of range",
    BAD_BLOCK_ID: "a block id outside the pool",
    ROW_FULL: "more blocks for a row than it has entries",
    DUPLICATE: "two entries for one row in a single call",
    TOO_NARROW: "a gathered width smaller than a row's blocks",
    NO_BLOCK: "a slot for a position whose block was never given",
    UNSORTED: "ids that do not lie by entry, in order",
}


class BlockTableError(RuntimeError):
    """A table operation was dropped on the device. ``flags``: the bits that say why."""

    def __init__(self, flags: int):
        reasons = "; ".join(text for bit, text in _REASONS.items() if flags & bit)
        super().__init__(f"block table operations were dropped: {reasons}")
        self.flags = flags


class TableGroup(NamedTuple):
    """What the device must know of a group. Static: part of the compiled program."""

    block_size: int
    blocks_per_kv_block: int
    stores: str  # "tokens", "encoder" for the encoder's tokens, or "state" (no slots)
    sliding_window: int | None
    chunk_size: int | None


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


class TableEntries(NamedTuple):
    """Table entries as arrays: E entries, and the K ids of all of them in a row.

    Made by `jaxkv.step.pack_entries`, which also composes entries that name one row of
    one group twice; the device drops and reports such pairs.
    """

    rows: Array  # int32[E]
    groups: Array  # int32[E], PAD_GROUP: no entry
    overwrite: Array  # int32[E], 1: replace the row, 0: append
    block_ids: Array  # int32[K], by entry, in order
    entry_of_id: Array  # int32[K], ascending; E: padding


def make_block_tables(
    plan: Plan,
    *,
    max_requests: int,
    kernel_block_sizes: Sequence[int] | None = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> BlockTables:
    """Empty tables for a plan.

    Args:
      plan: gives the groups, the pool and the longest row.
      max_requests: rows.
      kernel_block_sizes: per group, the tokens per block that its attention kernel
        works on; each must divide the group's block size. None: the block size.
      device: a device or a (replicated) sharding, the same as the pool's; None: the
        default device.

    Raises:
      ValueError: a kernel block size that does not divide the block size, or a plan for
        context parallelism.
    """
    check_positive(max_requests=max_requests)
    if plan.context_parallel > 1:
        raise ValueError(
            f"plan.context_parallel={plan.context_parallel}: tables do not divide positions among "
            "ranks yet; plan with context_parallel=1"
        )
    specs = [group.spec for group in plan.groups]
    kernel_sizes = [spec.block_size for spec in specs]
    if kernel_block_sizes is not None:
        kernel_sizes = list(kernel_block_sizes)
    if len(kernel_sizes) != len(specs):
        raise ValueError(f"kernel_block_sizes has {len(kernel_sizes)} groups, not {len(specs)}")
    for spec, kernel_size in zip(specs, kernel_sizes, strict=True):
        _check_kernel_size(spec, kernel_size)
    widths = [spec.row_blocks(plan.max_model_len, plan.limits) for spec in specs]
    shapes = [*((max_requests, width) for width in widths), (len(specs), max_requests), ()]

    def allocate() -> list[Array]:
        return [jnp.zeros(shape, jnp.int32) for shape in shapes]

    # Placed as `make_pool` places the pool: mixing the two would compile steps twice.
    *tables, num_blocks, overflow = jax.jit(allocate, out_shardings=as_sharding(device))()
    return BlockTables(
        tables=tuple(tables),
        num_blocks=num_blocks,
        overflow=overflow,
        groups=tuple(
            TableGroup(
                block_size=spec.block_size,
                blocks_per_kv_block=spec.block_size // kernel_size,
                stores=_stores(spec),
                sliding_window=getattr(spec, "sliding_window", None),
                chunk_size=getattr(spec, "chunk_size", None),
            )
            for spec, kernel_size in zip(specs, kernel_sizes, strict=True)
        ),
        pool_blocks=plan.num_blocks,
    )


def _stores(spec: LayerSpec) -> str:
    if isinstance(spec, CrossAttentionSpec):
        return "encoder"
    return "state" if isinstance(spec, StateSpec) else "tokens"


def _check_kernel_size(spec: LayerSpec, kernel_size: int) -> None:
    check_positive(kernel_block_sizes=kernel_size)
    ratio = getattr(spec, "compress_ratio", 1)
    if isinstance(spec, StateSpec) and kernel_size != spec.block_size:
        raise ValueError(
            f"kernel_block_sizes: {kernel_size} would split a state, which is read whole; use its "
            f"block size {spec.block_size}"
        )
    if spec.block_size % kernel_size or kernel_size % ratio:
        raise ValueError(
            f"kernel_block_sizes: {kernel_size} does not divide the block size {spec.block_size}, "
            f"or holds no whole rows of {ratio} tokens"
        )


def as_sharding(
    device: jax.Device | jax.sharding.Sharding | None,
) -> jax.sharding.Sharding | None:
    """A device as the sharding that ``jit`` takes."""
    return jax.sharding.SingleDeviceSharding(device) if isinstance(device, jax.Device) else device


def check_overflow(tables: BlockTables) -> None:
    """Raises what the device dropped. Waits for the tables, so call it off the hot path.

    Raises:
      BlockTableError: at least one operation since the tables were made was dropped.
    """
    flags = int(tables.overflow)
    if flags:
        raise BlockTableError(flags)


@jit_int32("block_ids", static_argnames="blocks_per_kv_block")
def expand_blocks(block_ids: Array, blocks_per_kv_block: int) -> Array:
    """Logical block ids -> ids of the kernel blocks that they consist of.

    Args:
      block_ids: int32[..., N].
      blocks_per_kv_block: kernel blocks in a logical block.

    Returns:
      int32[..., N * blocks_per_kv_block]: id ``b`` becomes ``b * k .. b * k + k - 1``; an id
      that is negative, or whose kernel ids int32 does not hold, becomes -1.
    """
    check_positive(blocks_per_kv_block=blocks_per_kv_block)
    known = _within(block_ids, (2**31 - 1) // blocks_per_kv_block)
    first = jnp.where(known, block_ids * blocks_per_kv_block, -blocks_per_kv_block)
    first = jnp.repeat(first, blocks_per_kv_block, axis=-1)
    part = lax.broadcasted_iota(jnp.int32, first.shape, first.ndim - 1) % blocks_per_kv_block
    return jnp.maximum(first + part, -1)


@jit_int32("entries")
def append_block_ids(tables: BlockTables, entries: TableEntries) -> BlockTables:
    """Appends ids to, or replaces, the rows that the entries name; all groups at once.

    An entry is applied whole or not at all. It is dropped, and reported by `overflow`,
    when its row or group is out of range, one of its ids is outside the pool, its row
    has no room, or another entry names the same row and group. When ``entry_of_id`` does
    not ascend, all of them are dropped.
    """
    check_same_shape(rows=entries.rows, groups=entries.groups, overwrite=entries.overwrite)
    check_same_shape(block_ids=entries.block_ids, entry_of_id=entries.entry_of_id)
    num_groups, num_rows = tables.num_blocks.shape
    num_entries, num_ids = entries.rows.shape[0], entries.block_ids.shape[0]
    given = entries.groups != PAD_GROUP
    in_range = given & _within(entries.rows, num_rows) & _within(entries.groups, num_groups)
    cell = jnp.where(in_range, entries.groups * num_rows + entries.rows, num_groups * num_rows)

    owner = entries.entry_of_id
    owner = jnp.where(_within(owner, num_entries), owner, num_entries)
    uses = jnp.zeros(num_groups * num_rows, jnp.int32).at[cell].add(1, mode="drop")
    alone = _take(uses, cell) == 1
    used = _take(tables.num_blocks.reshape(-1), cell)
    start = jnp.where(entries.overwrite != 0, 0, used)
    ones = jnp.ones(num_ids, jnp.int32)
    count = jnp.zeros(num_entries, jnp.int32).at[owner].add(ones, mode="drop")
    fits = start + count <= _take(jnp.array(tables.widths, jnp.int32), entries.groups)
    foreign = ~_within(entries.block_ids, tables.pool_blocks)
    sound = ~jnp.zeros(num_entries, bool).at[owner].max(foreign, mode="drop")
    unsorted = (owner[1:] < owner[:-1]).any()
    accepted = in_range & alone & fits & sound & ~unsorted

    num_blocks = (
        tables.num_blocks.reshape(-1)
        .at[jnp.where(accepted, cell, num_groups * num_rows)]
        .set(start + count, mode="drop")
        .reshape(num_groups, num_rows)
    )
    first_id = jnp.cumsum(count) - count
    column = jnp.arange(num_ids, dtype=jnp.int32) + _take(start - first_id, owner)
    target = _take(jnp.where(accepted, entries.groups, -1), owner, fill=-1)
    row = _take(entries.rows, owner)
    # Ids that go elsewhere get distinct rows beyond the table, so that all are unique.
    elsewhere = num_rows + jnp.arange(num_ids, dtype=jnp.int32)
    new_tables = tuple(
        table.at[jnp.where(target == group, row, elsewhere), column].set(
            entries.block_ids, mode="drop", unique_indices=True, wrap_negative_indices=False
        )
        for group, table in enumerate(tables.tables)
    )
    flags = (
        _flag(BAD_ROW, given & ~in_range)
        | _flag(DUPLICATE, in_range & ~alone)
        | _flag(ROW_FULL, in_range & ~fits)
        | _flag(BAD_BLOCK_ID, given & ~sound)
        | _flag(UNSORTED, unsorted)
    )
    return dataclasses.replace(
        tables, tables=new_tables, num_blocks=num_blocks, overflow=tables.overflow | flags
    )


@jit_int32("rows")
def release_rows(tables: BlockTables, rows: Array) -> BlockTables:
    """Empties rows, int32[M], in every group. Naming a row twice is harmless."""
    known = _within(rows, tables.max_requests)
    target = jnp.where(known, rows, tables.max_requests)
    return dataclasses.replace(
        tables,
        num_blocks=tables.num_blocks.at[:, target].set(0, mode="drop"),
        overflow=tables.overflow | _flag(BAD_ROW, ~known),
    )


@jit_int32("sources", "destinations")
def move_rows(tables: BlockTables, sources: Array, destinations: Array) -> BlockTables:
    """Moves rows, all at once: what was at ``sources[i]`` ends at ``destinations[i]``.

    A source that is no destination ends empty. Moving a row onto itself does nothing,
    so such pairs serve as padding. A pair is dropped and reported when a row is out of
    range, or when another pair has the same source or destination.

    Args:
      sources, destinations: int32[M].
    """
    check_same_shape(sources=sources, destinations=destinations)
    num_rows = tables.max_requests
    known = _within(sources, num_rows) & _within(destinations, num_rows)
    moving = known & (sources != destinations)
    alike = _equal_pairs(sources) | _equal_pairs(destinations)
    clash = moving & ((alike & moving[None]).sum(axis=1) > 1)
    accepted = moving & ~clash
    source = jnp.where(accepted, sources, num_rows)
    target = jnp.where(accepted, destinations, num_rows)
    moved = tables.num_blocks.at[:, source].get(mode="fill", fill_value=0)
    emptied = tables.num_blocks.at[:, source].set(0, mode="drop")
    return dataclasses.replace(
        tables,
        tables=tuple(
            table.at[target].set(table.at[source].get(mode="fill"), mode="drop")
            for table in tables.tables
        ),
        num_blocks=emptied.at[:, target].set(moved, mode="drop"),
        overflow=tables.overflow | _flag(BAD_ROW, ~known) | _flag(DUPLICATE, clash),
    )


@jit_int32("first", "second")
def swap_rows(tables: BlockTables, first: Array, second: Array) -> BlockTables:
    """Exchanges ``first[i]`` with ``second[i]``, int32[M] each, all pairs at once."""
    return move_rows(tables, jnp.concatenate([first, second]), jnp.concatenate([second, first]))


@jit_int32("rows", "first_positions", static_argnames="widths")
def gather_block_tables(
    tables: BlockTables, rows: Array, first_positions: Array, *, widths: tuple[int, ...]
) -> tuple[BlockTables, tuple[Array, ...]]:
    """Rows of a padded batch, at kernel granularity, as attention kernels take them.

    Args:
      rows: int32[B], `PAD_ROW` for padding.
      first_positions: int32[B], position of the first token that each row computes
        now; blocks that no such token can see read as null.
      widths: per group, blocks per row to return; static. Bucket it: copying full
        rows of a long-context table costs more than the step needs.

    Returns:
      The tables (with `TOO_NARROW` or `BAD_ROW` set where a row did not fit or does not
      exist), and per group int32[B, width * blocks_per_kv_block]; tails, padding and
      null blocks read 0.
    """
    check_same_shape(rows=rows, first_positions=first_positions)
    if len(widths) != len(tables.groups):
        raise ValueError(f"widths has {len(widths)} groups, the tables have {len(tables.groups)}")
    check_count(**{f"widths[{i}]": width for i, width in enumerate(widths)})
    known = _within(rows, tables.max_requests)
    flags = _flag(BAD_ROW, ~known & (rows != PAD_ROW))
    gathered = []
    for index, (group, table, width) in enumerate(
        zip(tables.groups, tables.tables, widths, strict=True)
    ):
        used = jnp.where(known, _take(tables.num_blocks[index], rows), 0)
        flags |= _flag(TOO_NARROW, used > width)
        column = jnp.arange(width, dtype=jnp.int32)[None]
        first_block = _first_token(group, first_positions) // group.block_size
        seen = (column < used[:, None]) & (column >= first_block[:, None])
        block_ids = table.at[rows, :width].get(
            mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
        )
        block_ids = jnp.pad(block_ids, ((0, 0), (0, max(0, width - table.shape[1]))))
        block_ids = jnp.where(seen, block_ids, NULL_BLOCK)
        kernel_ids = expand_blocks(block_ids, group.blocks_per_kv_block)
        is_null = jnp.repeat(block_ids == NULL_BLOCK, group.blocks_per_kv_block, axis=-1)
        gathered.append(jnp.where(is_null, NULL_BLOCK, kernel_ids))
    return dataclasses.replace(tables, overflow=tables.overflow | flags), tuple(gathered)


@jit_int32("rows", "positions", static_argnames="encoder")
def map_slots(
    tables: BlockTables, rows: Array, positions: Array, *, encoder: bool = False
) -> tuple[BlockTables, Array]:
    """Where in the pool each token goes: ``block_id * block_size + offset``.

    Since a kernel block id is ``b * k + i``, this is also
    ``kernel_block_id * kernel_block_size + offset``, whatever the kernel block size.

    Args:
      rows, positions: int32 arrays that broadcast to one shape S; a negative position
        or `PAD_ROW` is padding. Positions are those computed now or later: what a window
        left behind may be somebody else's by now.
      encoder: static; the tokens are an encoder's, for groups of cross attention.

    Returns:
      The tables (with `NO_BLOCK` or `BAD_ROW` set where a token has no place), and
      int32[G, *S]: the slot, or `PAD_SLOT`. Groups of recurrent state have no slots, and
      groups of cross attention have them for ``encoder`` tokens only.
    """
    rows, positions = jnp.broadcast_arrays(rows, positions)
    wanted = (positions >= 0) & (rows != PAD_ROW)
    known = wanted & _within(rows, tables.max_requests)
    flags = _flag(BAD_ROW, wanted & ~known)
    slots = []
    for index, (group, table) in enumerate(zip(tables.groups, tables.tables, strict=True)):
        if group.stores != ("encoder" if encoder else "tokens"):
            slots.append(jnp.full(rows.shape, PAD_SLOT, jnp.int32))
            continue
        column = positions // group.block_size
        used = _take(tables.num_blocks[index], rows)
        block_id = table.at[rows, column].get(
            mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
        )
        held = known & (column < used) & (block_id != NULL_BLOCK)
        flags |= _flag(NO_BLOCK, known & ~held)
        slot = block_id * group.block_size + positions % group.block_size
        slots.append(jnp.where(held, slot, PAD_SLOT))
    return dataclasses.replace(tables, overflow=tables.overflow | flags), jnp.stack(slots)


def _first_token(group: TableGroup, positions: Array) -> Array:
    """Oldest position that a token at ``positions`` can see."""
    if group.sliding_window is not None:
        return jnp.maximum(positions - group.sliding_window + 1, 0)
    if group.chunk_size is not None:
        return positions // group.chunk_size * group.chunk_size
    return jnp.zeros_like(positions)


def _equal_pairs(values: Array) -> Array:
    return values[:, None] == values[None]


def _within(values: Array, size: int) -> Array:
    return (values >= 0) & (values < size)


def _take(values: Array, indices: Array, fill: int = 0) -> Array:
    """``values[indices]``, with ``fill`` where an index is out of range."""
    return values.at[indices].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def _flag(bit: int, where: Array) -> Array:
    return jnp.where(where.any(), jnp.int32(bit), jnp.int32(0))
