"""Writes the parts of an upload, and checks that they fit. No jax."""

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jaxkv._src.internal.checks import check_known, check_not_masked
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.uploads._shape import SIZES, StepShape

Ints = Sequence[int] | Int[np.ndarray, "ints"]


class Batch(NamedTuple):
    """The requests of a step: distinct rows, and at least one new token for each."""

    rows: Int[np.ndarray, "requests"]
    counts: Int[np.ndarray, "requests"]  # new tokens
    ends: Int[np.ndarray, "requests"]  # cumulative sums of counts
    num_tokens: int
    longest: int  # most new tokens of one request

    @classmethod
    def from_counts(cls, rows: np.ndarray, counts: np.ndarray) -> "Batch":
        """Adds up the new tokens of requests."""
        if not rows.size:
            return cls(rows, counts, counts, 0, 0)
        ends = np.add.accumulate(counts)
        return cls(rows, counts, ends, int(ends[-1]), int(np.maximum.reduce(counts)))


class Entries(NamedTuple):
    """Entries of the block tables of all groups, and the rows that they change.

    rows, logical_blocks, ids: ordered by group.
    ends: the end of each group's entries.
    row_lengths: logical blocks of each changed row afterwards.
    """

    rows: Int[np.ndarray, "ids"]
    logical_blocks: Int[np.ndarray, "ids"]
    ids: Int[np.ndarray, "ids"]
    ends: Int[np.ndarray, "groups"]
    changed_rows: Int[np.ndarray, "changed"]
    row_lengths: Int[np.ndarray, "groups changed"]


_REMEDIES = {
    "block_ids": "more cached_tokens=, for prompts whose beginning is in the cache, or forks=",
    "block_copies": "more forks=",
}


def check_fits(shape: StepShape, sizes: Sequence[int]) -> None:
    """Raises ValueError unless a step, whose first `SIZES` are given, fits its shape."""
    if any(map(operator.gt, sizes, shape.largest_step)):
        for name, size, most in zip(SIZES, sizes, shape.largest_step, strict=False):
            if size > most:
                raise ValueError(
                    f"the step needs {name}={size} and its shape has {most}; use "
                    f"{_REMEDIES.get(name, 'a larger shape')} (see StepShape.for_plan)"
                )


def as_int32(name: str, values: Ints) -> Int32[np.ndarray, "ints"]:
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
    shape: StepShape,
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
    shape: StepShape, data: np.ndarray, copies: Sequence[tuple[int, int, int]]
) -> None:
    """Writes copies of blocks: group, source and destination of each, ordered by group."""
    if copies:
        groups, sources, destinations = np.array(copies).T
        ends = groups.searchsorted(np.arange(len(shape.growths)), "right")
        put(shape, data, copy_sources=sources, copy_destinations=destinations, copy_ends=ends)


def put(shape: StepShape, data: np.ndarray, **parts: np.ndarray) -> None:
    """Writes values to the beginning of parts of an upload."""
    fields = shape.format.fields
    for name, values in parts.items():
        start = fields[name].start
        data[start : start + values.size] = values
