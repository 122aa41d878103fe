"""Host side: a step's integers into one fresh buffer. NumPy only."""

import array
import functools
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
    upload = shape.padding.copy()
    _write_entries(shape, memoryview(upload), entries)
    parts = shape.split(upload)
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
    upload = np.empty(shape.size, np.int32)
    write_step(
        shape,
        upload,
        update=update,
        rows=rows,
        first_positions=first_positions,
        lengths=lengths,
        copies=copies,
        extra=extra,
    )
    return upload


def write_step(
    shape: StepShape,
    upload: np.ndarray,
    *,
    update: TableUpdate,
    rows: Ints,
    first_positions: Ints,
    lengths: Ints,
    copies: Sequence[Sequence[tuple[int, int]]] = (),
    extra: Ints = (),
) -> None:
    """`pack_step` into an array of the caller's, int32[shape.size]; see there."""
    out = memoryview(upload)  # NumPy's own assignments cost three times as much
    out[:] = shape.padding
    _write_entries(shape, out, update.entries)
    _write_groups(shape, out, "zero_ids", update.zero_ids, "update")
    if len(copies):
        copies = _checked_pairs(copies)
        for side, name in enumerate(("copy_sources", "copy_destinations")):
            ids = [[pair[side] for pair in group] for group in copies]
            _write_groups(shape, out, name, ids, "copies")
    _write_batch(shape, out, rows, first_positions, lengths)
    if len(extra):
        _write(out, shape.fields["extra"], extra, "extra")


def _write_batch(
    shape: StepShape, out: memoryview, rows: Ints, first_positions: Ints, lengths: Ints
) -> None:
    if not len(rows) == len(first_positions) == len(lengths):
        raise ValueError(
            f"rows, first_positions and lengths differ in length: {len(rows)}, "
            f"{len(first_positions)}, {len(lengths)}"
        )
    _write(out, shape.fields["batch_rows"], rows, "rows")
    _write(out, shape.fields["first_positions"], first_positions, "first_positions")
    _write(out, shape.fields["token_ends"], lengths, "lengths")
    start = shape.fields["batch_rows"].start
    _check_rows(bytes(out[start : start + len(rows)]))
    first, ends = (
        np.frombuffer(out[shape.fields[name]], np.int32)
        for name in ("first_positions", "token_ends")
    )
    for name, values in (("first_positions", first), ("lengths", ends)):
        if values.size and values.min() < 0:
            raise ValueError(f"{name} must be >= 0, got {values.min()}")
    total = int(ends.sum(dtype=np.int64))
    _check_room("tokens", total, shape.tokens or 2**31 - 1)
    ends.cumsum(out=ends)


@functools.lru_cache(maxsize=16)  # a batch decodes for many steps before it changes
def _check_rows(rows: bytes) -> None:
    listed = np.frombuffer(rows, np.int32).tolist()
    if min(listed, default=0) < 0:
        raise ValueError(f"rows must be >= 0, got {min(listed)}; leave padding to the packer")
    if len(set(listed)) < len(listed):
        raise ValueError(f"rows names a row twice: {listed}; a request is in a batch once")


def _write_entries(shape: StepShape, out: memoryview, entries: Sequence[TableEntry]) -> None:
    # A serving step has hundreds of entries: what is done for each is left to C.
    if not entries:
        return
    rows, ids, overwrite = zip(*entries, strict=True)
    if min(rows) < 0:
        raise ValueError(f"entries: row={min(rows)} must be >= 0")
    if set(map(len, ids)) != {len(shape.widths)}:
        given = dict(zip(rows, map(len, ids), strict=True))
        raise ValueError(
            f"entries have ids for {given} groups by row and shape.widths has "
            f"{len(shape.widths)}; use the widths of tables of the same plan"
        )
    if len(set(rows)) < len(rows):
        rows, ids, overwrite = zip(*compose_entries(entries), strict=True)
    fields, lists = shape.fields, list(itertools.chain.from_iterable(ids))
    counts = np.fromiter(map(len, lists), np.int32, len(lists))
    _write(out, fields["rows"], rows, "entries")
    _write(out, fields["overwrite"], overwrite, "entries")
    _write(out, fields["counts"], counts, "entries")
    _write(out, fields["firsts"], counts.cumsum(dtype=np.int32) - counts, "entries")
    _write(out, fields["block_ids"], list(itertools.chain.from_iterable(lists)), "block_ids")
    owners = np.arange(len(counts), dtype=np.int32).repeat(counts)
    _write(out, fields["owners"], owners, "block_ids")


def _checked_pairs(copies: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    try:
        return [[(source, destination) for source, destination in group] for group in copies]
    except (TypeError, ValueError):
        raise ValueError(
            "copies must be, per group, a list of pairs (source block, destination block)"
        ) from None


def _write_groups(
    shape: StepShape, out: memoryview, field: str, ids: Sequence[Ints], name: str
) -> None:
    """A row of ids per group."""
    num_groups = len(shape.widths)
    if len(ids) != num_groups:
        raise ValueError(
            f"{name} has {len(ids)} groups and shape.widths {num_groups}; "
            "give one of each per group"
        )
    where = shape.fields[field]
    room = (where.stop - where.start) // max(num_groups, 1)
    for group, group_ids in enumerate(ids):
        start = where.start + group * room
        named = "copies" if name == "copies" else field
        _write(out, slice(start, start + room), group_ids, named)


def _write(out: memoryview, where: slice, values: Ints, name: str) -> None:
    """Writes values into a part of the upload, which has padding behind them."""
    count = len(values)
    _check_room(name, count, where.stop - where.start)
    if count:
        out[where.start : where.start + count] = _as_int32(name, values)


def _as_int32(name: str, values: Ints) -> array.array[int] | np.ndarray:
    if not isinstance(values, np.ndarray):
        try:
            return array.array("i", values)  # checks each, in C
        except OverflowError:
            raise ValueError(f"{name} holds a value that int32 does not") from None
        except TypeError as error:
            raise TypeError(f"{name} must be ints: {error}") from None
    if values.ndim != 1:
        raise ValueError(f"{name} must be a flat list, got an array of shape {values.shape}")
    if values.dtype == np.int32:
        return np.ascontiguousarray(values)
    if not (np.issubdtype(values.dtype, np.integer) or values.dtype == bool):
        raise TypeError(f"{name} must be ints, got {values.dtype}")
    limits = np.iinfo(np.int32)
    if not (limits.min <= values.min() and values.max() <= limits.max):
        raise ValueError(f"{name} holds a value that int32 does not")
    return np.ascontiguousarray(values, np.int32)


def _check_room(name: str, count: int, room: int) -> None:
    if count > room:
        raise ValueError(
            f"the step needs {count} {name} and its shape has {room}; use a larger one"
        )
