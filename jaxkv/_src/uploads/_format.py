"""An upload as an array: its parts, checks of their sizes, and how they are written. No jax."""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxkv._src.internal.checks import check_known, check_not_masked
from jaxkv._src.internal.numbers import INT32_MAX

if TYPE_CHECKING:
    from jaxkv._src.uploads._shape import StepShape


Ints = Sequence[int] | np.ndarray


SIZES = ("batch_size", "max_tokens", "max_query_len", "max_seq_len")  # of a `StepShape`
SIZES += ("extra", "block_ids", "zero_ids", "block_copies")
#: parts that are ordered by group, by the part that holds the end of each group in them
BY_GROUP = {
    "entry_ends": ("entry_rows", "entry_columns", "entry_ids"),
    "zero_ends": ("zero_ids",),
    "copy_ends": ("copy_sources", "copy_destinations"),
}


class UploadFormat:
    """The parts of an upload of one shape: their names, order and lengths."""

    def __init__(self, shape: "StepShape"):
        self._shape = shape

    @functools.cached_property
    def has_encoder(self) -> bool:
        """Whether a group stores the encoder's tokens."""
        return any(growth.stores == "encoder" for growth in self._shape.growths)

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether the next state of a request depends on how many of its drafts were accepted."""
        return any(
            growth.stores == "state" and growth.cache_mode == "none" and growth.has_drafts
            for growth in self._shape.growths
        )

    @functools.cached_property
    def fields(self) -> Mapping[str, slice]:
        """Slices of all parts of an upload, by name, in order."""
        shape, groups = self._shape, len(self._shape.growths)
        lengths = {"number": 1}
        # The requests of the step, which a `StepBatch` keeps.
        lengths |= dict.fromkeys(("request_rows", "num_computed_tokens"), shape.batch_size)
        lengths["query_start_loc"] = shape.batch_size + 1
        lengths["encoder_lens"] = shape.batch_size if self.has_encoder else 0
        lengths["accepted_tokens"] = shape.batch_size if self.has_drafts else 0
        lengths["prefix_members"] = shape.batch_size if shape.shared_prefixes else 0
        lengths |= dict.fromkeys(("prefix_ends", "prefix_lens"), shape.shared_prefixes)
        lengths["extra"] = shape.extra
        # Changes of the cache.
        lengths["changed_rows"] = shape.batch_size
        lengths["row_lengths"] = shape.batch_size * groups
        most = shape.block_ids, shape.zero_ids, shape.block_copies
        for (ends, parts), length in zip(BY_GROUP.items(), most, strict=True):
            lengths |= dict.fromkeys(parts, length)
            lengths[ends] = groups
        ends = itertools.pairwise(itertools.accumulate(lengths.values(), initial=0))
        return {name: slice(*where) for name, where in zip(lengths, ends, strict=True)}

    @functools.cached_property
    def room(self) -> tuple[int, ...]:
        """The largest step of the shape, in the order of `SIZES`."""
        return tuple(getattr(self._shape, name) for name in SIZES)

    @functools.cached_property
    def batch_fields(self) -> slice:
        """The part of an upload that a `StepBatch` keeps."""
        return slice(self.fields["request_rows"].start, self.fields["extra"].stop)

    @functools.cached_property
    def size(self) -> int:
        """Number of int32s in an upload."""
        return self.fields["copy_ends"].stop

    @functools.cached_property
    def padding(self) -> np.ndarray:
        """An upload of a step without requests, int32[size]. Read-only."""
        upload = np.zeros(self.size, np.int32)
        for name in (
            *("request_rows", "prefix_members", "changed_rows", "entry_rows", "zero_ids"),
            *("copy_sources", "copy_destinations"),
        ):
            upload[self.fields[name]] = -1
        upload.flags.writeable = False
        return upload

    def split(self, upload: Any) -> dict[str, Any]:
        """Returns views of the parts of an upload, NumPy or jax, by name."""
        parts = {name: upload[where] for name, where in self.fields.items()}
        parts["row_lengths"] = parts["row_lengths"].reshape(
            self._shape.batch_size, len(self._shape.growths)
        )
        return parts


class Batch(NamedTuple):
    """The requests of a step: distinct rows, and at least one new token for each."""

    rows: np.ndarray  # int[N]
    counts: np.ndarray  # int[N], new tokens
    ends: np.ndarray  # int[N], cumulative sums of counts
    num_tokens: int
    longest: int  # most new tokens of one request

    @classmethod
    def of(cls, rows: np.ndarray, counts: np.ndarray) -> "Batch":
        if not rows.size:
            return cls(rows, counts, counts, 0, 0)
        ends = np.add.accumulate(counts)
        return cls(rows, counts, ends, int(ends[-1]), int(np.maximum.reduce(counts)))


class Entries(NamedTuple):
    """K cells of the block tables of G groups, and the E rows that they change.

    rows, columns, ids: int[K], ordered by group.
    ends: int[G], the end of each group's cells.
    changed_rows: int[E].
    row_lengths: int[G, E], columns in use of each changed row afterwards.
    """

    rows: np.ndarray
    columns: np.ndarray
    ids: np.ndarray
    ends: np.ndarray
    changed_rows: np.ndarray
    row_lengths: np.ndarray


_REMEDIES = {
    "block_ids": "more cached_tokens=, for prompts whose beginning is in the cache, or forks=",
    "block_copies": "more forks=",
}


def check_fits(shape: "StepShape", sizes: Sequence[int]) -> None:
    """Raises ValueError unless a step, whose first `SIZES` are given, fits its shape."""
    if any(map(operator.gt, sizes, shape.format.room)):
        for name, size, room in zip(SIZES, sizes, shape.format.room, strict=False):
            if size > room:
                raise ValueError(
                    f"the step needs {name}={size} and its shape has {room}; use "
                    f"{_REMEDIES.get(name, 'a larger shape')} (see StepShape.for_plan)"
                )


def as_int32(name: str, values: Ints) -> np.ndarray:
    """Returns flat ints as int32[N].

    Raises:
      TypeError: values that are not ints.
      ValueError: a value that does not fit int32, or an array that is not flat.
    """
    if type(values) is not np.ndarray:
        check_known(**{name: values})
        check_not_masked(**{name: values})
    array = np.asarray(values)
    if not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1:
        given = f"an array of shape {array.shape}" if array.ndim else type(values).__name__
        raise ValueError(f"{name} must be a flat list of ints, got {given}")
    if array.dtype == np.int32:
        return array
    is_ints = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    # NumPy has no dtype for ints that are larger still.
    if not is_ints and (
        isinstance(values, np.ndarray) or not all(isinstance(n, Integral) for n in values)
    ):
        raise TypeError(f"{name} must be ints, got {array.dtype}")
    if not is_ints or array.min() < -INT32_MAX - 1 or array.max() > INT32_MAX:
        raise ValueError(f"{name} holds a value that does not fit int32")
    return array.astype(np.int32)


def write_batch(
    shape: "StepShape",
    data: np.ndarray,
    batch: Batch,
    computed: np.ndarray,
    encoder_lens: np.ndarray,
    accepted: np.ndarray,
    extra: np.ndarray,
) -> None:
    """Fills an upload with padding and the requests of a step, and the caller's own integers."""
    fields, size = shape.format.fields, batch.rows.size
    rows, positions = fields["request_rows"].start, fields["num_computed_tokens"].start
    ends = fields["query_start_loc"].start
    data[:] = shape.format.padding
    data[rows : rows + size] = batch.rows
    data[positions : positions + size] = computed
    if size:
        data[ends + 1 : ends + 1 + size] = batch.ends
        data[ends + 1 + size : ends + 1 + shape.batch_size] = batch.num_tokens
    if shape.format.has_encoder:
        put(shape, data, encoder_lens=encoder_lens)
    if shape.format.has_drafts:
        put(shape, data, accepted_tokens=accepted)
    if extra.size:
        put(shape, data, extra=extra)


def write_copies(
    shape: "StepShape", data: np.ndarray, copies: Sequence[tuple[int, int, int]]
) -> None:
    """Writes copies of blocks: group, source and destination of each, ordered by group."""
    if copies:
        groups, sources, destinations = np.array(copies).T
        ends = groups.searchsorted(np.arange(len(shape.growths)), "right")
        put(shape, data, copy_sources=sources, copy_destinations=destinations, copy_ends=ends)


def put(shape: "StepShape", data: np.ndarray, **parts: np.ndarray) -> None:
    """Writes values to the beginning of parts of an upload."""
    fields = shape.format.fields
    for name, values in parts.items():
        start = fields[name].start
        data[start : start + values.size] = values
