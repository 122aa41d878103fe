"""Operations that change rows: append, overwrite, release, move, swap."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv.block_tables._index import flag, take, within
from jaxkv.block_tables._state import (
    BAD_BLOCK_ID,
    BAD_ROW,
    DUPLICATE,
    PAD_GROUP,
    ROW_FULL,
    UNSORTED,
    BlockTables,
)
from jaxkv.checks import check_same_shape
from jaxkv.jit_int32 import jit_int32


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
    in_range = given & within(entries.rows, num_rows) & within(entries.groups, num_groups)
    cell = jnp.where(in_range, entries.groups * num_rows + entries.rows, num_groups * num_rows)

    owner = entries.entry_of_id
    owner = jnp.where(within(owner, num_entries), owner, num_entries)
    uses = jnp.zeros(num_groups * num_rows, jnp.int32).at[cell].add(1, mode="drop")
    alone = take(uses, cell) == 1
    used = take(tables.num_blocks.reshape(-1), cell)
    start = jnp.where(entries.overwrite != 0, 0, used)
    ones = jnp.ones(num_ids, jnp.int32)
    count = jnp.zeros(num_entries, jnp.int32).at[owner].add(ones, mode="drop")
    fits = start + count <= take(jnp.array(tables.widths, jnp.int32), entries.groups)
    foreign = ~within(entries.block_ids, tables.pool_blocks)
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
    column = jnp.arange(num_ids, dtype=jnp.int32) + take(start - first_id, owner)
    target = take(jnp.where(accepted, entries.groups, -1), owner, fill=-1)
    row = take(entries.rows, owner)
    # Ids that go elsewhere get distinct rows beyond the table, so that all are unique.
    elsewhere = num_rows + jnp.arange(num_ids, dtype=jnp.int32)
    new_tables = tuple(
        table.at[jnp.where(target == group, row, elsewhere), column].set(
            entries.block_ids, mode="drop", unique_indices=True, wrap_negative_indices=False
        )
        for group, table in enumerate(tables.tables)
    )
    flags = (
        flag(BAD_ROW, given & ~in_range)
        | flag(DUPLICATE, in_range & ~alone)
        | flag(ROW_FULL, in_range & ~fits)
        | flag(BAD_BLOCK_ID, given & ~sound)
        | flag(UNSORTED, unsorted)
    )
    return dataclasses.replace(
        tables, tables=new_tables, num_blocks=num_blocks, overflow=tables.overflow | flags
    )


@jit_int32("rows")
def release_rows(tables: BlockTables, rows: Array) -> BlockTables:
    """Empties rows, int32[M], in every group. Naming a row twice is harmless."""
    known = within(rows, tables.max_requests)
    target = jnp.where(known, rows, tables.max_requests)
    return dataclasses.replace(
        tables,
        num_blocks=tables.num_blocks.at[:, target].set(0, mode="drop"),
        overflow=tables.overflow | flag(BAD_ROW, ~known),
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
    known = within(sources, num_rows) & within(destinations, num_rows)
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
        overflow=tables.overflow | flag(BAD_ROW, ~known) | flag(DUPLICATE, clash),
    )


@jit_int32("first", "second")
def swap_rows(tables: BlockTables, first: Array, second: Array) -> BlockTables:
    """Exchanges ``first[i]`` with ``second[i]``, int32[M] each, all pairs at once."""
    return move_rows(tables, jnp.concatenate([first, second]), jnp.concatenate([second, first]))


def _equal_pairs(values: Array) -> Array:
    return values[:, None] == values[None]
