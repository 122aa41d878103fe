"""Offsets of a step's integers in its upload. No jax."""

import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxkv._src.blocks._shape import StepShape


class UploadFormat:
    """The parts of an upload of one shape: their names, order and lengths."""

    def __init__(self, shape: "StepShape"):
        self._shape = shape

    @functools.cached_property
    def has_encoder(self) -> bool:
        """Whether a group stores the encoder's tokens."""
        return any(growth.stores == "encoder" for growth in self._shape.growths)

    @functools.cached_property
    def fields(self) -> Mapping[str, slice]:
        """Slices of all parts of an upload, by name, in order."""
        lengths = {"number": 1, **self._batch_lengths, **self._change_lengths}
        ends = itertools.accumulate(lengths.values(), initial=0)
        return {
            name: slice(start, stop)
            for name, (start, stop) in zip(lengths, itertools.pairwise(ends), strict=True)
        }

    @functools.cached_property
    def starts(self) -> Mapping[str, int]:
        """Offset of each part of an upload, in int32s."""
        return {name: where.start for name, where in self.fields.items()}

    @functools.cached_property
    def room(self) -> tuple[int, ...]:
        """The most that a step changes, in the order of `jaxkv.blocks._write.Sizes`."""
        shape = self._shape
        changes = (shape.block_ids, shape.zero_ids, shape.block_copies)
        return (shape.batch_size, *changes, shape.extra)

    @property
    def _batch_lengths(self) -> dict[str, int]:
        """Lengths of the fields that describe the requests of a step."""
        return {
            "request_rows": self._shape.batch_size,
            "num_computed_tokens": self._shape.batch_size,
            "query_start_loc": self._shape.batch_size + 1,
            "encoder_lens": self._shape.batch_size if self.has_encoder else 0,
            "extra": self._shape.extra,
        }

    @property
    def _change_lengths(self) -> dict[str, int]:
        """Lengths of the fields that change the cache."""
        groups = len(self._shape.growths)
        return {
            "changed_rows": self._shape.batch_size,
            "row_lengths": self._shape.batch_size * groups,
            "entry_rows": self._shape.block_ids,
            "entry_columns": self._shape.block_ids,
            "entry_ids": self._shape.block_ids,
            "entry_ends": groups,
            "zero_ids": self._shape.zero_ids,
            "zero_ends": groups,
            "copy_sources": self._shape.block_copies,
            "copy_destinations": self._shape.block_copies,
            "copy_ends": groups,
        }

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
            *("request_rows", "changed_rows", "entry_rows", "zero_ids"),
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
