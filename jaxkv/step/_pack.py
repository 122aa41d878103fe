"""Host side: a step's integers into one fresh buffer. NumPy only."""

import array
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.blocks import TableEntry, TableUpdate
from jaxkv.step._shape import StepShape

if TYPE_CHECKING:
    from jaxkv.block_tables import TableEntries

Ints = Sequence[int] | np.ndarray


def compose_entries(entries: Iterable[TableEntry]) -> list[TableEntry]:
    """Merges entries that name the same row, in order, into one each."""
    composed: dict[int, TableEntry] = {}
    for entry in itertools.starmap(TableEntry, entries):
        before = composed.get(entry.row)
        if before is not None and not entry.overwrite:
            both = zip(before.block_ids, entry.block_ids, strict=True)
            entry = before._replace(block_ids=[[*old, *new] for old, new in both])
        composed[entry.row] = entry
    return list(composed.values())


def pack_entries(
    entries: Sequence[TableEntry], *, num_groups: int, max_entries: int, max_block_ids: int
) -> "TableEntries":
    """Table entries as padded NumPy arrays, for `append_block_ids` on its own.

    Raises:
      ValueError: more entries or ids than the arrays hold, a negative row, ids for
        another number of groups, or a number beyond int32.
    """
    from jaxkv.block_tables import TableEntries

    shape = StepShape(
        entries=max_entries,
        block_ids=max_block_ids,
        zero_ids=0,
        batch=0,
        widths=(0,) * num_groups,
    )
    parts = shape.split(np.empty(shape.size, np.int32))
    _write_entries(parts, entries, num_groups)
    parts["ends"] = parts["ends"].reshape(max_entries, num_groups)
    return TableEntries(*(parts[name] for name in TableEntries._fields))


def pack_step(
    shape: StepShape,
    *,
    update: TableUpdate,
    rows: Ints,
    first_positions: Ints,
    lengths: Ints,
    copies: Sequence[Sequence[tuple[int, int]]] = (),
    extra: Ints = (),
) -> np.ndarray:
    """Packs one step into a fresh int32[shape.size].

    Args:
      shape: what to pad to.
      update: from `BlockManager.take_update`. Keep it until the pack has succeeded: an
        update that did not fit can be packed again into a larger shape.
      rows, first_positions, lengths: per request of the batch, its table row, the
        position of its first token computed now, and how many are.
      copies: per group, pairs of a source and a destination block, applied at once after
        zeroing; none when left out.
      extra: the caller's own int32s.

    Raises:
      ValueError: something does not fit the shape; the message names it and its size.
      TypeError: something is not made of ints.
    """
    num_groups = len(shape.widths)
    for name, given in (("update", update.zero_ids), ("copies", copies or shape.widths)):
        if len(given) != num_groups:
            raise ValueError(
                f"{name} has {len(given)} groups and shape.widths {num_groups}; "
                "give one of each per group"
            )
    upload = np.empty(shape.size, np.int32)
    parts = shape.split(upload)
    _write_entries(parts, update.entries, num_groups)
    _write_groups(parts["zero_ids"], "zero_ids", update.zero_ids)
    if shape.copies or copies:
        pairs = copies or [()] * num_groups
        for side, name in enumerate(("copy_sources", "copy_destinations")):
            _write_groups(parts[name], "copies", [[p[side] for p in group] for group in pairs])
    _write_batch(shape, parts, rows, first_positions, lengths)
    _fill(parts["extra"], "extra", extra, 0)
    return upload


def _write_batch(
    shape: StepShape, parts: dict, rows: Ints, first_positions: Ints, lengths: Ints
) -> None:
    if not len(rows) == len(first_positions) == len(lengths):
        raise ValueError(
            f"rows, first_positions and lengths differ in length: {len(rows)}, "
            f"{len(first_positions)}, {len(lengths)}"
        )
    batch_rows, ends = parts["batch_rows"], parts["token_ends"]
    _fill(batch_rows, "batch", rows, -1)
    _fill(parts["first_positions"], "batch", first_positions, 0)
    _fill(ends, "batch", lengths, 0)
    if ends.size and ends.min() < 0:
        raise ValueError(f"lengths must be >= 0, got {ends.min()}")
    if len(set(batch_rows[: len(rows)].tolist())) < len(rows):
        raise ValueError(f"rows names a row twice: {list(rows)}; a request is in a batch once")
    ends.cumsum(out=ends)
    if shape.tokens:
        _check_room("tokens", int(ends[-1]), shape.tokens)


def _write_entries(parts: dict, entries: Sequence[TableEntry], num_groups: int) -> None:
    # A serving step has hundreds of entries: what is done for each is left to C.
    rows, ids, overwrite = zip(*entries, strict=True) if entries else ((), (), ())
    if len(set(rows)) < len(rows):
        rows, ids, overwrite = zip(*compose_entries(entries), strict=True)
    if rows and min(rows) < 0:
        raise ValueError(f"entries: row={min(rows)} must be >= 0")
    if set(map(len, ids)) - {num_groups}:
        given = dict(zip(rows, map(len, ids), strict=True))
        raise ValueError(f"entries have ids for {given} groups by row; each wants {num_groups}")
    lists = list(itertools.chain.from_iterable(ids))
    counts = list(map(len, lists))
    flat_ids = list(itertools.chain.from_iterable(lists))
    _fill(parts["rows"], "entries", rows, -1)
    _fill(parts["overwrite"], "entries", overwrite, 0)
    _fill(parts["block_ids"], "block_ids", flat_ids, 0)
    ends, owners = parts["ends"], parts["owners"]
    _fill(ends, "entries", counts, 0)
    owners[: len(flat_ids)] = np.arange(len(counts), dtype=np.int32).repeat(ends[: len(counts)])
    owners[len(flat_ids) :] = len(ends)
    ends.cumsum(out=ends)


def _write_groups(part: np.ndarray, name: str, ids: Sequence[Ints]) -> None:
    """A row of ids per group, padded with -1."""
    if not part.size and not any(map(len, ids)):
        return
    for row, group_ids in zip(part.reshape(len(ids), -1), ids, strict=True):
        _fill(row, name, group_ids, -1)


def _fill(part: np.ndarray, name: str, values: Ints, padding: int) -> None:
    count = len(values)
    _check_room(name, count, len(part))
    if count < len(part):
        part[count:] = padding
    if count:
        part[:count] = _as_int32(name, values)


def _as_int32(name: str, values: Ints) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        try:
            return np.frombuffer(array.array("i", values), np.int32)  # checks each, in C
        except OverflowError:
            raise ValueError(f"{name} holds a value that int32 does not") from None
        except TypeError as error:
            raise TypeError(f"{name} must be ints: {error}") from None
    if values.dtype == np.int32:
        return values
    if not (np.issubdtype(values.dtype, np.integer) or values.dtype == bool):
        raise TypeError(f"{name} must be ints, got {values.dtype}")
    limits = np.iinfo(np.int32)
    if not (limits.min <= values.min() and values.max() <= limits.max):
        raise ValueError(f"{name} holds a value that int32 does not")
    return values


def _check_room(name: str, count: int, room: int) -> None:
    if count > room:
        raise ValueError(
            f"the step needs {count} {name} and its shape has {room}; use a larger one"
        )
