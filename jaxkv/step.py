"""One upload and one dispatch per serving step.

Knows how a step's integers lie in one int32 buffer, and how to take them out again
inside a jitted function. Knows nothing of models or bytes.

On the host, `pack_step` writes everything the device has to learn into a fresh NumPy
array (fresh each time: an asynchronous call may still be reading the last one). On the
device, `apply_step` updates the tables and returns what the step's kernels need.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.block_tables import (
    PAD_GROUP,
    PAD_ROW,
    BlockTables,
    TableEntries,
    append_block_ids,
    gather_block_tables,
    map_slots,
)
from jaxkv.blocks import TableEntry, TableUpdate
from jaxkv.checks import check_count
from jaxkv.jit_int32 import jit_int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of a step; static, so each distinct shape is one compilation.

    Choose a few (decode, prefill) before serving starts and pad to them.

    entries, block_ids: table entries, and ids over all of them.
    zero_ids: fresh blocks to zero, per group.
    batch: requests.
    tokens: tokens of the whole batch laid end to end; 0: the caller maps slots itself.
    widths: per group, blocks per gathered row.
    extra: int32s of the caller's own that ride in the same upload (token ids, say).
    """

    entries: int
    block_ids: int
    zero_ids: int
    batch: int
    widths: tuple[int, ...]
    tokens: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        check_count(**self.fields(), tokens=self.tokens)
        check_count(**{f"widths[{i}]": width for i, width in enumerate(self.widths)})
        if (self.block_ids and not self.entries) or (self.tokens and not self.batch):
            raise ValueError(
                f"block_ids={self.block_ids} need entries and tokens={self.tokens} need a batch; "
                f"got entries={self.entries} and batch={self.batch}"
            )

    def fields(self) -> dict[str, int]:
        """Name and length of every part of the upload, in order."""
        return {
            "rows": self.entries,
            "groups": self.entries,
            "overwrite": self.entries,
            "block_ids": self.block_ids,
            "entry_of_id": self.block_ids,
            "zero_ids": self.zero_ids * len(self.widths),
            "batch_rows": self.batch,
            "first_positions": self.batch,
            "lengths": self.batch,
            "extra": self.extra,
        }

    @property
    def size(self) -> int:
        """int32s in the upload."""
        return sum(self.fields().values())

    def split(self, upload):
        """Views of the parts of an upload, NumPy or jax, by name."""
        ends = list(itertools.accumulate(self.fields().values()))
        return {
            name: upload[end - length : end]
            for (name, length), end in zip(self.fields().items(), ends, strict=True)
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """What a step's kernels need: G groups, B requests, T tokens, Z fresh blocks."""

    rows: Array  # int32[B], PAD_ROW for padding
    first_positions: Array  # int32[B], position of the first token computed now
    lengths: Array  # int32[B], tokens computed now
    block_tables: tuple[Array, ...]  # per group int32[B, widths[g] * blocks_per_kv_block]
    zero_ids: Array  # int32[G, Z], -1 for padding
    token_rows: Array  # int32[T], PAD_ROW for padding
    positions: Array  # int32[T], -1 for padding
    slots: Array  # int32[G, T], PAD_SLOT for padding
    extra: Array  # int32[shape.extra]


def compose_entries(entries: Iterable[TableEntry]) -> list[TableEntry]:
    """Merges entries that name the same row and group, in order, into one each."""
    composed: dict[tuple[int, int], TableEntry] = {}
    for entry in entries:
        if entry.group < 0:
            raise ValueError(f"entries: group={entry.group} of row {entry.row} must be >= 0")
        before = composed.get((entry.row, entry.group))
        if before is not None and not entry.overwrite:
            ids = (*before.block_ids, *entry.block_ids)
            entry = dataclasses.replace(before, block_ids=ids)
        composed[entry.row, entry.group] = entry
    return list(composed.values())


def pack_entries(
    entries: Iterable[TableEntry], *, max_entries: int, max_block_ids: int
) -> TableEntries:
    """Table entries as padded NumPy arrays, for `append_block_ids` on its own.

    Raises:
      ValueError: more entries or ids than the arrays hold, a negative group, or a
        number beyond int32.
    """
    shape = StepShape(entries=max_entries, block_ids=max_block_ids, zero_ids=0, batch=0, widths=())
    parts = shape.split(np.empty(shape.size, np.int32))
    _write_entries(parts, entries)
    return TableEntries(*(parts[name] for name in TableEntries._fields))


def pack_step(
    shape: StepShape,
    *,
    update: TableUpdate,
    rows: Sequence[int],
    first_positions: Sequence[int],
    lengths: Sequence[int],
    extra: Sequence[int] | np.ndarray = (),
) -> np.ndarray:
    """Packs one step into a fresh int32[shape.size].

    Args:
      shape: what to pad to.
      update: from `BlockManager.take_update`. Keep it until the pack has succeeded: an
        update that did not fit can be packed again into a larger shape.
      rows, first_positions, lengths: per request of the batch, its table row, the
        position of its first token computed now, and how many are.
      extra: the caller's own int32s.

    Raises:
      ValueError: something does not fit the shape; the message names it and its size.
    """
    if len(update.zero_ids) != len(shape.widths):
        raise ValueError(
            f"update has {len(update.zero_ids)} groups and shape.widths {len(shape.widths)}; "
            "give a width per group"
        )
    if not len(rows) == len(first_positions) == len(lengths):
        raise ValueError(
            f"rows, first_positions and lengths differ in length: {len(rows)}, "
            f"{len(first_positions)}, {len(lengths)}"
        )
    if min(lengths, default=0) < 0:
        raise ValueError(f"lengths must be >= 0, got {min(lengths)}")
    if len(set(rows)) < len(rows):
        raise ValueError(f"rows names a row twice: {list(rows)}; a request is in a batch once")
    if shape.tokens:
        _check_room("tokens", sum(lengths), shape.tokens)
    upload = np.empty(shape.size, np.int32)
    parts = shape.split(upload)
    _write_entries(parts, update.entries)
    zero_ids = parts["zero_ids"].reshape(len(shape.widths), -1)
    for part, ids in zip(zero_ids, update.zero_ids, strict=True):
        _fill(part, "zero_ids", ids, -1)
    _fill(parts["batch_rows"], "batch", rows, PAD_ROW)
    _fill(parts["first_positions"], "batch", first_positions, 0)
    _fill(parts["lengths"], "batch", lengths, 0)
    _fill(parts["extra"], "extra", extra, 0)
    return upload


@jit_int32("upload", static_argnames="shape")
def apply_step(
    tables: BlockTables, upload: Array, *, shape: StepShape
) -> tuple[BlockTables, StepBatch]:
    """Appends, expands, gathers and maps slots: all of a step's table work, in your jit.

    Args:
      tables: before the step; donate them in your ``jit``, or use `apply_step_donating`.
      upload: int32[shape.size], from `pack_step`.
      shape: static, the one the upload was packed with.
    """
    if upload.shape != (shape.size,):
        raise ValueError(f"upload has shape {upload.shape}; this step shape wants ({shape.size},)")
    parts = shape.split(upload)
    entries = TableEntries(*(parts[name] for name in TableEntries._fields))
    tables = append_block_ids(tables, entries)
    rows, first, lengths = parts["batch_rows"], parts["first_positions"], parts["lengths"]
    tables, block_tables = gather_block_tables(tables, rows, first, widths=shape.widths)
    token_rows, positions = lay_out_tokens(rows, first, lengths, num_tokens=shape.tokens)
    tables, slots = map_slots(tables, token_rows, positions)
    return tables, StepBatch(
        rows=rows,
        first_positions=first,
        lengths=lengths,
        block_tables=block_tables,
        zero_ids=parts["zero_ids"].reshape(len(shape.widths), -1),
        token_rows=token_rows,
        positions=positions,
        slots=slots,
        extra=parts["extra"],
    )


apply_step_donating = jax.jit(apply_step, static_argnames="shape", donate_argnames="tables")
"""`apply_step` for use outside a ``jit``: the tables given are consumed."""


def lay_out_tokens(
    rows: Array, first_positions: Array, lengths: Array, *, num_tokens: int
) -> tuple[Array, Array]:
    """Row and position of every token of a batch laid end to end, padded to num_tokens.

    Args:
      rows, first_positions, lengths: int32[B].
      num_tokens: static; at least the sum of the lengths.

    Returns:
      int32[num_tokens] each; `PAD_ROW` and -1 past the last token.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = jnp.cumsum(lengths)
    # A comparison with every end: a binary search would be a loop on the device.
    request = (token[:, None] >= ends[None]).sum(axis=1, dtype=jnp.int32)
    start = (ends - lengths).at[request].get(mode="fill", fill_value=0)
    first = first_positions.at[request].get(mode="fill", fill_value=0)
    row = rows.at[request].get(mode="fill", fill_value=PAD_ROW)
    inside = row != PAD_ROW
    return jnp.where(inside, row, PAD_ROW), jnp.where(inside, first + token - start, -1)


def _write_entries(parts: dict[str, np.ndarray], entries: Iterable[TableEntry]) -> None:
    composed = compose_entries(entries)
    counts = [len(entry.block_ids) for entry in composed]
    _fill(parts["rows"], "entries", [entry.row for entry in composed], 0)
    _fill(parts["groups"], "entries", [entry.group for entry in composed], PAD_GROUP)
    _fill(parts["overwrite"], "entries", [entry.overwrite for entry in composed], 0)
    ids = list(itertools.chain.from_iterable(entry.block_ids for entry in composed))
    _fill(parts["block_ids"], "block_ids", ids, 0)
    owners = np.repeat(np.arange(len(composed)), counts)
    _fill(parts["entry_of_id"], "block_ids", owners, len(parts["rows"]))


def _fill(part: np.ndarray, name: str, values: Sequence[int] | np.ndarray, padding: int) -> None:
    _check_room(name, len(values), len(part))
    given = np.asarray(values)
    if given.size and not np.issubdtype(given.dtype, np.integer) and given.dtype != bool:
        raise TypeError(f"{name} must be ints, got {given.dtype}")
    limits = np.iinfo(np.int32)
    if given.size and not (limits.min <= given.min() and given.max() <= limits.max):
        raise ValueError(f"{name} holds a value that int32 does not")
    part[: len(values)] = given
    part[len(values) :] = padding


def _check_room(name: str, count: int, room: int) -> None:
    if count > room:
        raise ValueError(
            f"the step needs {count} {name} and its shape has {room}; use a larger one"
        )
