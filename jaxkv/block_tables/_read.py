"""What a step reads: rows of a padded batch at kernel granularity, and slots."""

import jax.numpy as jnp
from jax import Array, lax

from jaxkv.block_tables._index import bit, take, within
from jaxkv.block_tables._state import (
    BAD_RANK,
    BAD_ROW,
    NO_BLOCK,
    PAD_ROW,
    PAD_SLOT,
    TOO_NARROW,
    BlockTables,
    TableGroup,
    report,
)
from jaxkv.blocks import NULL_BLOCK
from jaxkv.checks import check_count, check_positive, check_same_shape
from jaxkv.jit_int32 import jit_int32


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
    known = within(block_ids, (2**31 - 1) // blocks_per_kv_block)
    first = jnp.where(known, block_ids * blocks_per_kv_block, -blocks_per_kv_block)
    first = jnp.repeat(first, blocks_per_kv_block, axis=-1)
    part = lax.broadcasted_iota(jnp.int32, first.shape, first.ndim - 1) % blocks_per_kv_block
    return jnp.maximum(first + part, -1)


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
    gathered, problems = gather(tables, rows, first_positions, widths)
    return report(tables, problems), gathered


def gather(
    tables: BlockTables, rows: Array, first_positions: Array, widths: tuple[int, ...]
) -> tuple[tuple[Array, ...], Array]:
    """The tables of `gather_block_tables`, and per row, int32[B], what was wrong with it."""
    check_same_shape(rows=rows, first_positions=first_positions)
    if len(widths) != len(tables.groups):
        raise ValueError(f"widths has {len(widths)} groups, the tables have {len(tables.groups)}")
    check_count(**{f"widths[{i}]": width for i, width in enumerate(widths)})
    known = within(rows, tables.max_requests)
    problems = bit(BAD_ROW, ~known & (rows != PAD_ROW))
    gathered = []
    for index, (group, table, width) in enumerate(
        zip(tables.groups, tables.tables, widths, strict=True)
    ):
        used = jnp.where(known, take(tables.num_blocks[index], rows), 0)
        problems |= bit(TOO_NARROW, used > width)
        column = jnp.arange(width, dtype=jnp.int32)[None]
        first_block = _first_token(group, first_positions) // group.dealt_tokens
        seen = (column < used[:, None]) & (column >= first_block[:, None])
        block_ids = table.at[rows, :width].get(
            mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
        )
        block_ids = jnp.pad(block_ids, ((0, 0), (0, max(0, width - table.shape[1]))))
        block_ids = jnp.where(seen, block_ids, NULL_BLOCK)
        kernel_ids = expand_blocks(block_ids, group.blocks_per_kv_block)
        is_null = jnp.repeat(block_ids == NULL_BLOCK, group.blocks_per_kv_block, axis=-1)
        gathered.append(jnp.where(is_null, NULL_BLOCK, kernel_ids))
    return tuple(gathered), problems


@jit_int32("rows", "positions", static_argnames="encoder")
def map_slots(
    tables: BlockTables,
    rows: Array,
    positions: Array,
    *,
    encoder: bool = False,
    rank: Array | int = 0,
) -> tuple[BlockTables, Array]:
    """Where in the pool each token goes: ``block_id * block_size + offset``.

    Since a kernel block id is ``b * k + i``, this is also
    ``kernel_block_id * kernel_block_size + offset``, whatever the kernel block size.

    Args:
      rows, positions: int32 arrays that broadcast to one shape S; a negative position
        or `PAD_ROW` is padding. Positions are those computed now or later: what a window
        left behind may be somebody else's by now.
      encoder: static; the tokens are an encoder's, for groups of cross attention.
      rank: this device's among those that a plan for context parallelism divides the
        positions of a request among (under ``shard_map``, ``lax.axis_index``). They are
        dealt out ``interleave_tokens`` at a time, as many turns to a block as it has room
        for; what another rank was dealt has no slot here.

    Returns:
      The tables (with `NO_BLOCK`, `BAD_ROW` or `BAD_RANK` set where a token has no
      place), and
      int32[G, *S]: the slot, or `PAD_SLOT`. Groups of recurrent state have no slots, and
      groups of cross attention have them for ``encoder`` tokens only.
    """
    slots, problems = find_slots(tables, rows, positions, encoder, rank)
    return report(tables, problems), slots


def find_slots(
    tables: BlockTables, rows: Array, positions: Array, encoder: bool, rank: Array | int
) -> tuple[Array, Array]:
    """The slots of `map_slots`, and per token, int32[*S], why it has none."""
    rows, positions = jnp.broadcast_arrays(rows, positions)
    wanted = (positions >= 0) & (rows != PAD_ROW)
    known = wanted & within(rows, tables.max_requests)
    problems = bit(BAD_ROW, wanted & ~known)
    slots = []
    for index, (group, table) in enumerate(zip(tables.groups, tables.tables, strict=True)):
        if group.stores != ("encoder" if encoder else "tokens"):
            slots.append(jnp.full(rows.shape, PAD_SLOT, jnp.int32))
            continue
        column, offset, mine = _deal(group, positions, rank)
        used = take(tables.num_blocks[index], rows)
        block_id = table.at[rows, column].get(
            mode="fill", fill_value=NULL_BLOCK, wrap_negative_indices=False
        )
        held = known & (column < used) & (block_id != NULL_BLOCK)
        problems |= bit(NO_BLOCK, known & mine & ~held)
        problems |= bit(BAD_RANK, known & ~within(jnp.asarray(rank), group.context_parallel))
        slot = block_id * group.block_size + offset
        slots.append(jnp.where(held & mine, slot, PAD_SLOT))
    return jnp.stack(slots), problems


def _deal(group: TableGroup, positions: Array, rank: Array | int) -> tuple[Array, Array, Array]:
    """Column and offset of each position in the tables of its rank, and whether that is
    this one. By the manager's block size, never the kernel's: a turn may be longer."""
    column, offset = jnp.divmod(positions, group.dealt_tokens)
    turn, within_turn = jnp.divmod(offset, group.interleave_tokens)
    mine = turn % group.context_parallel == rank
    turn_here = turn // group.context_parallel
    return column, turn_here * group.interleave_tokens + within_turn, mine


def _first_token(group: TableGroup, positions: Array) -> Array:
    """Oldest position that a token at ``positions`` can see."""
    if group.sliding_window is not None:
        return jnp.maximum(positions - group.sliding_window + 1, 0)
    if group.chunk_size is not None:
        return positions // group.chunk_size * group.chunk_size
    return jnp.zeros_like(positions)
