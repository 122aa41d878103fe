"""Operations that change rows: append, overwrite, release, move, swap."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv.block_tables._index import bit, take, within
from jaxkv.block_tables._state import (
    BAD_BLOCK_ID,
    BAD_ROW,
    DUPLICATE,
    MISPLACED,
    PAD_ROW,
    ROW_FULL,
    BlockTables,
    report,
)
from jaxkv.checks import check_same_shape
from jaxkv.jit_int32 import jit_int32


class TableEntries(NamedTuple):
    """Table entries as arrays: E entries of G groups, and the K ids of all of them.

    Made by `jaxkv.step.pack_entries`, which also composes entries that name one row twice;
    the device drops and reports such pairs.
    """

    rows: Array  # int32[E], PAD_ROW: no entry
    overwrite: Array  # int32[E], 1: replace the row, 0: append
    firsts: Array  # int32[E, G], where the ids of each begin
    counts: Array  # int32[E, G], and how many they are
    block_ids: Array  # int32[K], by entry, then by group
    owners: Array  # int32[K], entry * G + group; E * G: padding

    def __repr__(self) -> str:
        entries, groups = self.counts.shape
        ids = self.block_ids.shape[0]
        return f"TableEntries({entries} entries of {groups} groups, {ids} ids, with padding)"


@jit_int32("entries")
def append_block_ids(tables: BlockTables, entries: TableEntries) -> BlockTables:
    """Appends ids to, or replaces, the rows that the entries name; all groups at once.

    An entry is applied whole or not at all. It is dropped, and reported by `overflow`,
    when its row is out of range or named by another entry too, when one of its ids is
    outside the pool or not where ``firsts`` and ``counts`` say, or when its row lacks room in
    any group.
    """
    return report(*append(tables, entries))


def append(tables: BlockTables, entries: TableEntries) -> tuple[BlockTables, Array]:
    """`append_block_ids`, and per entry, int32[E], why it was dropped; 0: it was not."""
    num_groups, num_rows = tables.num_blocks.shape
    num_entries, num_ids = _check_shapes(entries, num_groups)
    counts = entries.counts
    known = within(entries.rows, num_rows)

    place = jnp.arange(num_ids, dtype=jnp.int32) - take(entries.firsts.reshape(-1), entries.owners)
    placed = within(place, take(counts.reshape(-1), entries.owners))
    entry, group = jnp.divmod(entries.owners, max(num_groups, 1))
    named, own, foreign, misplaced = _tally(tables, entries, entry, placed)
    used = tables.num_blocks.at[:, entries.rows].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    start = jnp.where(entries.overwrite[:, None] != 0, 0, used.T)
    fits = (start + counts <= jnp.array(tables.widths, jnp.int32)[None]).all(axis=1)
    complete = (own + foreign == counts.sum(axis=1)) & (misplaced == 0)
    complete &= within(counts, num_ids + 1).all(axis=1)  # sums of larger ones would wrap
    problems = bit(BAD_ROW, ~known & ((entries.rows != PAD_ROW) | (counts != 0).any(axis=1)))
    problems |= bit(DUPLICATE, known & (named > 1)) | bit(ROW_FULL, known & ~fits)
    problems |= bit(BAD_BLOCK_ID, known & (foreign > 0))
    problems |= bit(MISPLACED, known & (named == 1) & ~complete)

    # What goes nowhere gets distinct rows beyond the table, so that all are unique.
    nowhere = num_rows + jnp.arange(max(num_entries, num_ids), dtype=jnp.int32)
    accepted = known & (problems == 0)
    target = jnp.where(accepted, entries.rows, nowhere[:num_entries])
    arrives = placed & (take(accepted.astype(jnp.int32), entry) != 0)
    row, column = take(entries.rows, entry), place + take(start.reshape(-1), entries.owners)
    new_tables = tuple(
        table.at[jnp.where(arrives & (group == index), row, nowhere[:num_ids]), column].set(
            entries.block_ids, mode="drop", unique_indices=True, wrap_negative_indices=False
        )
        for index, table in enumerate(tables.tables)
    )
    num_blocks = tables.num_blocks.at[:, target].set(
        (start + counts).T, mode="drop", unique_indices=True
    )
    return dataclasses.replace(tables, tables=new_tables, num_blocks=num_blocks), problems


def _check_shapes(entries: TableEntries, num_groups: int) -> tuple[int, int]:
    check_same_shape(rows=entries.rows, overwrite=entries.overwrite)
    check_same_shape(block_ids=entries.block_ids, owners=entries.owners)
    check_same_shape(firsts=entries.firsts, counts=entries.counts)
    if entries.counts.shape != (*entries.rows.shape, num_groups):
        raise ValueError(
            f"counts has shape {entries.counts.shape}; {entries.rows.shape[0]} entries of tables "
            f"with {num_groups} groups want {(*entries.rows.shape, num_groups)}"
        )
    return entries.rows.shape[0], entries.block_ids.shape[0]


def _tally(tables: BlockTables, entries: TableEntries, entry: Array, placed: Array) -> Array:
    """Per entry, int32[4, E]: entries that name its row; and of the ids for that row, those
    of the pool, those not of the pool, and those out of place. One scatter counts all."""
    num_rows, nowhere = tables.max_requests, 4 * tables.max_requests
    known = within(entries.rows, num_rows)
    row = take(jnp.where(known, entries.rows, nowhere), entry, nowhere)
    kind = jnp.where(within(entries.block_ids, tables.pool_blocks), 1, 2)
    kind = jnp.where(placed, kind, 3) * num_rows
    counted = jnp.concatenate([jnp.where(known, entries.rows, nowhere), row + kind])
    counts = jnp.zeros(nowhere, jnp.int32).at[counted].add(1, mode="drop")
    return (
        counts.reshape(4, num_rows)
        .at[:, jnp.where(known, entries.rows, nowhere)]
        .get(mode="fill", fill_value=0)
    )


@jit_int32("rows")
def release_rows(tables: BlockTables, rows: Array) -> BlockTables:
    """Empties rows, int32[M], in every group. Naming a row twice is harmless."""
    known = within(rows, tables.max_requests)
    target = jnp.where(known, rows, tables.max_requests)
    emptied = tables.num_blocks.at[:, target].set(0, mode="drop")
    return report(dataclasses.replace(tables, num_blocks=emptied), bit(BAD_ROW, ~known))


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
    moved_tables = dataclasses.replace(
        tables,
        tables=tuple(
            table.at[target].set(table.at[source].get(mode="fill"), mode="drop")
            for table in tables.tables
        ),
        num_blocks=emptied.at[:, target].set(moved, mode="drop"),
    )
    return report(moved_tables, bit(BAD_ROW, ~known) | bit(DUPLICATE, clash))


@jit_int32("first", "second")
def swap_rows(tables: BlockTables, first: Array, second: Array) -> BlockTables:
    """Exchanges ``first[i]`` with ``second[i]``, int32[M] each, all pairs at once."""
    return move_rows(tables, jnp.concatenate([first, second]), jnp.concatenate([second, first]))


def _equal_pairs(values: Array) -> Array:
    return values[:, None] == values[None]
