"""`pack_step`: uploads for schedulers that assign block ids themselves. No jax."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv._src.blocks._format import (
    Batch,
    Ints,
    Sizes,
    as_int32,
    check_batch,
    check_room,
    write_batch,
    write_copies,
    write_entries,
    write_zero_ids,
)
from jaxkv._src.blocks._shape import StepShape, Upload
from jaxkv._src.internal.checks import check_count

MAX_SHOWN = 8  # ids of a group that a repr shows


class TableEntry(NamedTuple):
    """Block ids to write into one row of the block tables.

    row: index of the row.
    block_ids: per group, the ids of consecutive columns.
    starts: per group, the column of the first id, which is the number of ids that the row has
      there already. None: 0 everywhere, so that the ids replace the row.
    """

    row: int
    block_ids: Sequence[Sequence[int]]
    starts: Sequence[int] | None = None

    def __repr__(self) -> str:
        ids = "; ".join(map(_short, self.block_ids))
        starts = "replaced by" if self.starts is None else f"from {tuple(self.starts)} on"
        return f"TableEntry(row={self.row}, {starts} {ids})"


def _short(ids: Sequence[int]) -> str:
    """Formats the ids of a group; a long list is cut and ends with its length."""
    shown = ", ".join(map(str, ids[:MAX_SHOWN]))
    return f"[{shown}]" if len(ids) <= MAX_SHOWN else f"[{shown}, ... {len(ids)} ids]"


def pack_step(
    shape: StepShape,
    *,
    entries: Iterable[TableEntry] = (),
    rows: Ints = (),
    num_computed_tokens: Ints = (),
    num_new_tokens: Ints = (),
    zero_ids: Sequence[Ints] | None = None,
    copies: Sequence[Sequence[tuple[int, int]]] | None = None,
    encoder_lens: Ints = (),
    extra: Ints = (),
) -> Upload:
    """Packs the upload of a step for a scheduler that assigns block ids itself.

    With a `BlockManager`, call its ``step`` instead. Uploads of `pack_step` carry no number, so
    the device cannot detect that one was lost.

    Args:
      shape: the sizes to pad to.
      entries: block ids to write; a later entry for a cell replaces an earlier one.
      rows, num_computed_tokens, num_new_tokens: per request of the batch, its table row, its
        tokens in the cache, and the tokens that the step computes.
      zero_ids: per group, fresh blocks to zero before anything is written; None: none.
      copies: per group, pairs of a source and a destination block, all copied at once,
        before any block is zeroed; None: none.
      encoder_lens: per request, its encoder tokens, for groups of cross attention.
      extra: your own int32s.

    Raises:
      ValueError: an argument does not fit the shape; the message names the argument and its size.
      TypeError: an argument holds values that are not ints.
    """
    groups = len(shape.growths)
    (group, *cells), lengths = list_entries(entries, groups, shape.max_requests)
    zeroed = _listed_ids("zero_ids", zero_ids, groups)
    pairs = [_pairs("copies", of_group) for of_group in copies or ((),) * groups]
    if len(pairs) != groups:
        raise ValueError(
            f"copies has {len(pairs)} groups and the shape has {groups}; give one list per group"
        )
    moved = [(g, *pair) for g, of_group in enumerate(pairs) for pair in of_group.tolist()]
    changed = np.array(list(lengths), np.int32)
    request_rows = as_int32("rows", rows)
    computed = as_int32("num_computed_tokens", num_computed_tokens)
    counts = as_int32("num_new_tokens", num_new_tokens)
    batch = _checked_batch(shape, request_rows, computed, counts)
    encoder = as_int32("encoder_lens", encoder_lens)
    if encoder.size not in (0, request_rows.size):
        raise ValueError(
            f"encoder_lens has {encoder.size} entries for {request_rows.size} rows; give one per "
            "row, or none"
        )
    own = as_int32("extra", extra)
    sizes = Sizes(
        batch_size=changed.size,
        block_ids=group.size,
        zero_ids=sum(of_group.size for of_group in zeroed),
        block_copies=len(moved),
        extra=own.size,
    )
    check_room(shape, sizes)
    data = np.empty(shape.format.size, np.int32)
    write_batch(shape, data, batch, computed, encoder, own)
    row_lengths = np.array(list(lengths.values()), np.int32).reshape(-1, groups).T
    ends = group.searchsorted(np.arange(groups), "right")
    write_entries(shape, data, (cells[0], cells[1], cells[2]), ends, changed, row_lengths)
    ends = np.cumsum([of_group.size for of_group in zeroed])
    write_zero_ids(shape, data, np.concatenate(zeroed), ends)
    write_copies(shape, data, moved)
    return Upload(data=data, shape=shape)


def list_entries(
    entries: Iterable[TableEntry], groups: int, max_requests: int
) -> tuple[tuple[np.ndarray, ...], dict[int, list[int]]]:
    """Returns the cells of all entries, each once, and the new lengths of their rows.

    Cells are groups, rows, columns and block ids, int32[K] each, ordered by group.

    Raises:
      ValueError: an entry does not fit the tables; the message names its row.
      TypeError: an entry holds values that are not ints.
    """
    cells: dict[tuple[int, int, int], int] = {}
    lengths: dict[int, list[int]] = {}
    for entry in entries:
        row, ids, starts = TableEntry(*entry)
        starts = (0,) * groups if starts is None else starts
        if len(ids) != groups or len(starts) != groups:
            raise ValueError(
                f"entries: row {row} has ids for {len(ids)} groups and starts for {len(starts)}; "
                f"the tables have {groups} groups"
            )
        check_count(row=row, **{f"starts[{g}]": start for g, start in enumerate(starts)})
        if row >= max_requests:
            raise ValueError(f"entries: row={row} is not in 0..{max_requests - 1}")
        lengths[row] = [start + len(new) for start, new in zip(starts, ids, strict=True)]
        for group, (start, new) in enumerate(zip(starts, ids, strict=True)):
            for column, block_id in enumerate(new, start):
                cells[group, row, column] = block_id
    ordered = sorted(cells)
    flat = as_int32("entries", np.array(ordered, np.int64).reshape(-1))
    group, row, column = flat.reshape(-1, 3).T
    ids = as_int32("block_ids", [cells[cell] for cell in ordered])
    return (group, row, column, ids), lengths


def _listed_ids(name: str, ids: Sequence[Ints] | None, groups: int) -> list[np.ndarray]:
    if ids is None:
        return [np.zeros(0, np.int32)] * groups
    if len(ids) != groups:
        raise ValueError(
            f"{name} has {len(ids)} groups and the shape has {groups}; give one list per group"
        )
    return [as_int32(name, of_group) for of_group in ids]


def _pairs(name: str, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    try:
        listed = [(source, destination) for source, destination in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be pairs (source, destination); copies takes a list of pairs per group"
        ) from None
    return as_int32(name, [i for pair in listed for i in pair]).reshape(-1, 2)


def _checked_batch(
    shape: StepShape, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray
) -> Batch:
    """Returns the requests of a step; raises ValueError unless they are valid and fit."""
    if not rows.size == computed.size == counts.size:
        raise ValueError(
            f"rows, num_computed_tokens and num_new_tokens differ in length: {rows.size}, "
            f"{computed.size}, {counts.size}"
        )
    if rows.size and (rows.min() < 0 or rows.max() >= shape.max_requests):
        raise ValueError(f"rows must be in 0..{shape.max_requests - 1}, got {rows.tolist()}")
    if np.unique(rows).size < rows.size:
        raise ValueError(f"rows names a row twice: {rows.tolist()}; list each request once")
    if computed.min(initial=0) < 0:
        raise ValueError(f"num_computed_tokens must be at least 0, got {computed.min()}")
    if counts.min(initial=1) < 1:
        raise ValueError(
            f"num_new_tokens must be at least 1, got {counts.min()}; leave such requests out"
        )
    batch = Batch.of(rows, counts)
    check_batch(shape, batch, int((computed.astype(np.int64) + counts).max(initial=0)))
    return batch
