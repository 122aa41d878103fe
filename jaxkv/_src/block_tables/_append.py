"""Operations that change rows of the block tables."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jaxkv._src.cache import PAD_ROW, CacheFlags, CacheLayout, KVCache
from jaxkv._src.internal.checks import check_at_most, check_count, check_positive, check_same_shape
from jaxkv._src.internal.indexing import bit, gather_bits, group_of, take, within
from jaxkv._src.internal.jit_int32 import jit_int32
from jaxkv._src.internal.numbers import INT32_MAX, NULL_BLOCK
from jaxkv._src.uploads import TableEntry, list_entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TableEntries:
    """Block ids to write into the tables: K ids of G groups, E rows that change.

    ``block_ids[k]`` becomes logical block ``logical_blocks[k]`` of ``rows[k]`` in its group. Ids of
    group g end before ``ends[g]``. Ids from ``ends[-1]`` on, and of row `PAD_ROW`, are padding.
    """

    rows: Int32[Array, "ids"]
    logical_blocks: Int32[Array, "ids"]  # of the row and the group
    block_ids: Int32[Array, "ids"]  # ordered by group
    ends: Int32[Array, "groups"]
    changed_rows: Int32[Array, "changed"]  # distinct; PAD_ROW for padding
    row_lengths: Int32[Array, "changed groups"]  # logical blocks of each changed row afterwards

    def __repr__(self) -> str:
        rows, groups = self.row_lengths.shape
        return f"TableEntries({self.rows.shape[0]} ids of {groups} groups, {rows} rows)"


def pack_entries(
    entries: Iterable[TableEntry],
    *,
    num_groups: int,
    max_requests: int,
    max_block_ids: int,
    max_rows: int,
) -> TableEntries:
    """Packs entries into padded NumPy arrays, for `append_block_ids` on its own.

    Args:
      entries: a later one for the same logical block replaces an earlier one.
      num_groups, max_requests: groups and rows of the tables.
      max_block_ids, max_rows: ids and rows to pad to.

    Raises:
      ValueError: more ids or rows than the arrays hold, or ids for another number of groups.
    """
    check_positive(num_groups=num_groups, max_requests=max_requests)
    check_count(max_block_ids=max_block_ids, max_rows=max_rows)
    sizes = {"num_groups": num_groups, "max_block_ids": max_block_ids, "max_rows": max_rows}
    check_at_most(INT32_MAX, **sizes)
    listed = list_entries(entries, num_groups, max_requests)
    most = {
        "max_block_ids": (listed.ids, max_block_ids),
        "max_rows": (listed.changed_rows, max_rows),
    }
    for name, (needed, given) in most.items():
        if needed.size > given:
            raise ValueError(f"the entries need {name}={needed.size}, got {given}")

    def padded(values: np.ndarray, size: int, padding: int = PAD_ROW) -> Any:
        more = np.full((size - len(values), *values.shape[1:]), padding, np.int32)
        return np.concatenate([values, more], dtype=np.int32)

    return TableEntries(
        rows=padded(listed.rows, max_block_ids),
        logical_blocks=padded(listed.logical_blocks, max_block_ids),
        block_ids=padded(listed.ids, max_block_ids),
        ends=padded(listed.ends, num_groups),
        changed_rows=padded(listed.changed_rows, max_rows),
        row_lengths=padded(listed.row_lengths.T, max_rows, 0),
    )


@jit_int32("entries")
def append_block_ids(cache: KVCache, entries: TableEntries) -> KVCache:
    """Writes block ids that requests were given into their rows, for all groups at once.

    Nothing clamps and nothing wraps: an entry whose row or logical block is out of range is
    dropped, and an id that the pool does not have becomes the null block; `check_errors` reports
    both. Entries must name distinct logical blocks, and distinct changed rows.

    Args:
      cache: before the step.
      entries: of `pack_entries`, or the parts of an `Upload`.

    Raises:
      TypeError: entries that are not int32.
      ValueError: shapes that do not fit each other or the tables.
    """
    layout = cache.layout
    _check_shapes(entries, len(layout.growths))
    index = jnp.arange(entries.rows.shape[0], dtype=jnp.int32)
    group = group_of(index, entries.ends)
    is_entry = (entries.rows != PAD_ROW) & (group < len(layout.growths))
    known_row = within(entries.rows, layout.max_requests)
    widths = jnp.array(layout.row_blocks, jnp.int32)
    known_logical_block = within(entries.logical_blocks, take(widths, group))
    known_id = within(entries.block_ids, layout.num_blocks)
    problems = bit(CacheFlags.BAD_ROW, is_entry & ~known_row)
    problems |= bit(CacheFlags.BAD_LOGICAL_BLOCK, is_entry & known_row & ~known_logical_block)
    problems |= bit(CacheFlags.BAD_BLOCK_ID, is_entry & ~known_id)
    starts = jnp.array(layout.table_offsets[:-1], jnp.int32)
    ids = _Cells(
        entries.rows,
        entries.logical_blocks + take(starts, group),
        jnp.where(known_id, entries.block_ids, NULL_BLOCK),
        is_entry & known_row & known_logical_block,
    )
    lengths, bad_rows = _length_cells(entries, layout)
    return report(_set_cells(cache, [ids, lengths]), problems, bad_rows)


class _Cells(NamedTuple):
    """Values of cells of ``cache.rows``, and whether each is written."""

    rows: Int32[Array, "*cells"]
    columns: Int32[Array, "*cells"]
    values: Int32[Array, "*cells"]
    written: Bool[Array, "*cells"]


def _length_cells(entries: TableEntries, layout: CacheLayout) -> tuple[_Cells, Array]:
    """Returns the cells that hold the lengths of rows, [E, G], and error flags, int32[E, G]."""
    known = within(entries.changed_rows, layout.max_requests)[:, None]
    widths = jnp.array(layout.row_blocks, jnp.int32)
    fits = (entries.row_lengths >= 0) & (entries.row_lengths <= widths[None])
    problems = bit(CacheFlags.BAD_ROW, ~known & (entries.changed_rows != PAD_ROW)[:, None])
    problems |= bit(CacheFlags.BAD_LOGICAL_BLOCK, known & ~fits)
    shape = entries.row_lengths.shape
    columns = layout.table_offsets[-1] + jnp.arange(shape[1], dtype=jnp.int32)
    values = jnp.where(fits, entries.row_lengths, 0)
    rows = jnp.broadcast_to(entries.changed_rows[:, None], shape)
    cells = _Cells(rows, jnp.broadcast_to(columns, shape), values, jnp.broadcast_to(known, shape))
    return cells, problems


def _set_cells(cache: KVCache, cells: Sequence[_Cells]) -> KVCache:
    """Writes cells, all of them distinct, in one scatter."""
    rows, columns, values, written = (
        jnp.concatenate([part.reshape(-1) for part in parts]) for parts in zip(*cells, strict=True)
    )
    # What goes nowhere gets distinct rows beyond the table, so that all are unique.
    index = cache.max_requests + jnp.arange(rows.size, dtype=jnp.int32)
    changed = cache.rows.at[jnp.where(written, rows, index), columns].set(
        values, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return dataclasses.replace(cache, rows=changed)


def report(cache: KVCache, *problems: Array) -> KVCache:
    """Adds error flags, int32 arrays of any shape, to those that the cache remembers."""
    is_flags = jnp.arange(2, dtype=jnp.int32) == 0  # elementwise, so that XLA need not copy it
    status = cache.status | jnp.where(is_flags, gather_bits(*problems), 0)
    return dataclasses.replace(cache, status=status)


def _check_shapes(entries: TableEntries, num_groups: int) -> None:
    check_same_shape(
        rows=entries.rows, logical_blocks=entries.logical_blocks, block_ids=entries.block_ids
    )
    wanted = {
        "ends": (entries.ends, (num_groups,)),
        "row_lengths": (entries.row_lengths, (*entries.changed_rows.shape, num_groups)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; tables with {num_groups} groups want {shape}"
            )
