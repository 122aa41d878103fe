"""`pack_step`: uploads for schedulers that assign block ids themselves. No jax."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._src.internal.checks import check_count, check_kind
from jaxkv._src.internal.text import shown
from jaxkv._src.uploads._shape import StepShape, Upload
from jaxkv._src.uploads._write import (
    Batch,
    Entries,
    Ints,
    as_int32,
    check_fits,
    put,
    write_batch,
    write_copies,
)

MAX_SHOWN = 8  # ids of a group that a repr shows


class TableEntry(NamedTuple):
    """Block ids to write into one row of the block tables.

    row: index of the row.
    block_ids: per group, the ids of consecutive logical blocks.
    starts: per group, the logical block of the first id, which is the number of ids that the row
      has there already. None: 0 everywhere, so that the ids replace the row.
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
    accepted_tokens: Ints = (),
    extra: Ints = (),
) -> Upload:
    """Packs the upload of a step for a scheduler that assigns block ids itself.

    With a `BlockManager`, call its ``step`` instead. Uploads of `pack_step` carry no number, so
    the device cannot detect that one was lost.

    Args:
      shape: the sizes to pad to.
      entries: block ids to write; a later one for the same logical block replaces an earlier one.
      rows, num_computed_tokens, num_new_tokens: per request of the batch, its table row, its
        tokens in the cache, and the tokens that the step computes.
      zero_ids: per group, fresh blocks to zero before anything is written; None: none.
      copies: per group, pairs of a source and a destination block, all copied at once,
        before any block is zeroed; None: none.
      encoder_lens: per request, its encoder tokens, for groups of cross attention.
      accepted_tokens: per request, how many tokens of its last step were accepted, all of them if
        it had no drafts, 0 before its first step; for states of ``cache_mode="none"`` with
        ``speculative_blocks``, which need it.
      extra: your own int32s.

    Raises:
      ValueError: an argument does not fit the shape; the message names the argument and its size.
      TypeError: an argument holds values that are not ints.
    """
    check_kind(StepShape, shape=shape)
    groups = len(shape.growths)
    listed = list_entries(entries, groups, shape.max_requests)
    zeroed = [as_int32("zero_ids", ids) for ids in _by_group("zero_ids", zero_ids, groups)]
    copied = [
        (group, *pair)
        for group, pairs in enumerate(_by_group("copies", copies, groups))
        for pair in _pairs(pairs).tolist()
    ]
    computed = as_int32("num_computed_tokens", num_computed_tokens)
    batch = _batch(
        shape, as_int32("rows", rows), computed, as_int32("num_new_tokens", num_new_tokens)
    )
    encoder, accepted = _per_request(shape, batch, computed, encoder_lens, accepted_tokens)
    own = as_int32("extra", extra)
    num_rows = max(batch.rows.size, listed.changed_rows.size)
    longest = int((computed.astype(np.int64) + batch.counts).max(initial=0))
    changes = listed.ids.size, sum(ids.size for ids in zeroed), len(copied)
    check_fits(shape, (num_rows, batch.num_tokens, batch.longest, longest, own.size, *changes))
    data = np.empty(shape.format.size, np.int32)
    write_batch(shape, data, batch, computed, encoder, accepted, own)
    put(shape, data, changed_rows=listed.changed_rows, row_lengths=listed.row_lengths.T.reshape(-1))
    parts = zip(("rows", "logical_blocks", "ids", "ends"), listed, strict=False)
    put(shape, data, **{f"entry_{name}": part for name, part in parts})
    ends = np.cumsum([ids.size for ids in zeroed])
    put(shape, data, zero_ids=np.concatenate(zeroed), zero_ends=ends)
    write_copies(shape, data, copied)
    return Upload(data=data, shape=shape)


def _per_request(
    shape: StepShape, batch: Batch, computed: np.ndarray, encoder_lens: Ints, accepted_tokens: Ints
) -> tuple[np.ndarray, np.ndarray]:
    """Returns encoder tokens and accepted tokens, int32[B] each, or empty arrays."""
    encoder = as_int32("encoder_lens", encoder_lens)
    if encoder.size not in (0, batch.rows.size):
        raise ValueError(
            f"encoder_lens has {encoder.size} entries for {batch.rows.size} rows; give one per "
            "row, or none"
        )
    accepted = as_int32("accepted_tokens", accepted_tokens)
    is_needed = shape.format.has_drafts and computed.any()
    if accepted.size != batch.rows.size and (accepted.size or is_needed):
        raise ValueError(
            f"accepted_tokens has {accepted.size} entries for {batch.rows.size} rows; give one per "
            "row, so that states with speculative_blocks are resumed after the accepted drafts"
        )
    if accepted.size and ((accepted < 0) | (accepted > computed)).any():
        raise ValueError(
            f"accepted_tokens={accepted.tolist()} must be from 0 to num_computed_tokens="
            f"{computed.tolist()}"
        )
    return encoder, accepted


def list_entries(entries: Iterable[TableEntry], groups: int, max_requests: int) -> Entries:
    """Returns the logical blocks of all entries, each once, and the new lengths of their rows.

    Raises:
      ValueError: an entry does not fit the tables; the message names its row.
      TypeError: an entry holds values that are not ints.
    """
    cells: dict[tuple[int, int, int], int] = {}
    lengths: dict[int, list[int]] = {}
    check_kind(Iterable, "an iterable of TableEntry", entries=entries)
    for entry in entries:
        check_kind(tuple, "TableEntry objects", entries=entry)
        row, ids, starts = TableEntry(*entry)
        starts = (0,) * groups if starts is None else starts
        if not hasattr(ids, "__len__") or not hasattr(starts, "__len__"):
            raise TypeError(
                f"entries: row {row} has block_ids={shown(ids)} and starts={shown(starts)}; give "
                "a list of ids, and a start, for each group"
            )
        if len(ids) != groups or len(starts) != groups:
            raise ValueError(
                f"entries: row {row} has ids for {len(ids)} groups and starts for {len(starts)}; "
                f"the tables have {groups} groups"
            )
        if any(np.ndim(of_group) != 1 for of_group in ids):
            raise TypeError(
                f"entries: row {row} has block_ids={shown(ids)}; give a list for each group"
            )
        check_count(row=row, **{f"starts[{g}]": start for g, start in enumerate(starts)})
        if row >= max_requests:
            raise ValueError(f"entries: row={row} is not in 0..{max_requests - 1}")
        lengths[row] = [start + len(new) for start, new in zip(starts, ids, strict=True)]
        for group, (start, new) in enumerate(zip(starts, ids, strict=True)):
            for logical_block, block_id in enumerate(new, start):
                cells[group, row, logical_block] = block_id
    ordered = sorted(cells)
    flat = as_int32("entries", [*itertools.chain.from_iterable(ordered)])
    group, row, logical_block = flat.reshape(-1, 3).T
    row_lengths = as_int32("starts", [*itertools.chain.from_iterable(lengths.values())])
    return Entries(
        row,
        logical_block,
        as_int32("block_ids", [cells[cell] for cell in ordered]),
        group.searchsorted(np.arange(groups), "right"),
        np.array(list(lengths), np.int32),
        row_lengths.reshape(-1, groups).T,
    )


def _by_group(name: str, lists: Sequence[Any] | None, groups: int) -> Sequence[Any]:
    """Returns one list per group; empty ones for None."""
    if lists is None:
        return [()] * groups
    if not hasattr(lists, "__len__") or len(lists) != groups:
        given = f"{len(lists)} groups" if hasattr(lists, "__len__") else repr(lists)
        raise ValueError(
            f"{name} has {given} and the shape has {groups} groups; give one list per group"
        )
    return lists


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    try:
        listed = [(source, destination) for source, destination in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            "copies must be pairs (source, destination); copies takes a list of pairs per group"
        ) from None
    return as_int32("copies", [i for pair in listed for i in pair]).reshape(-1, 2)


def _batch(shape: StepShape, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray) -> Batch:
    """Returns the requests of a step; raises ValueError unless they are valid."""
    if not rows.size == computed.size == counts.size:
        raise ValueError(
            f"rows, num_computed_tokens and num_new_tokens differ in length: {rows.size}, "
            f"{computed.size}, {counts.size}"
        )
    if rows.size and (rows.min() < 0 or rows.max() >= shape.max_requests):
        raise ValueError(f"rows must be in 0..{shape.max_requests - 1}, got {rows.tolist()}")
    if np.unique(rows).size < rows.size:
        raise ValueError(f"rows names a row twice: {rows.tolist()}; list each request once")
    if (computed < 0).any():
        raise ValueError(f"num_computed_tokens must be at least 0, got {computed.min()}")
    if (counts < 1).any():
        raise ValueError(
            f"num_new_tokens must be at least 1, got {counts.min()}; leave such requests out"
        )
    return Batch.from_counts(rows, counts)
