"""The parts of an upload: their names, order and lengths. No jax."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._src.specs import Growth

#: parts that are ordered by group, by the part that holds the end of each group in them
BY_GROUP = {
    "entry_ends": ("entry_rows", "entry_logical_blocks", "entry_ids"),
    "zero_ends": ("zero_ids",),
    "copy_ends": ("copy_sources", "copy_destinations"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadFormat:
    """The parts of an upload of one shape; see `StepShape` for the sizes."""

    growths: tuple[Growth, ...]
    batch_size: int
    block_ids: int
    zero_ids: int
    block_copies: int
    extra: int
    shared_prefixes: int

    @functools.cached_property
    def has_encoder(self) -> bool:
        """Whether a group stores the encoder's tokens."""
        return any(growth.stores == "encoder" for growth in self.growths)

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether the next state of a request depends on how many of its drafts were accepted."""
        return any(
            growth.stores == "state" and growth.cache_mode == "none" and growth.has_drafts
            for growth in self.growths
        )

    @functools.cached_property
    def fields(self) -> Mapping[str, slice]:
        """Slices of all parts of an upload, by name, in order."""
        groups = len(self.growths)
        lengths = {"number": 1}
        # The requests of the step, which a `StepBatch` keeps.
        lengths |= dict.fromkeys(("request_rows", "num_computed_tokens"), self.batch_size)
        lengths["query_start_loc"] = self.batch_size + 1
        lengths["encoder_lens"] = self.batch_size if self.has_encoder else 0
        lengths["accepted_tokens"] = self.batch_size if self.has_drafts else 0
        lengths["prefix_members"] = self.batch_size if self.shared_prefixes else 0
        lengths |= dict.fromkeys(("prefix_ends", "prefix_lens"), self.shared_prefixes)
        lengths["extra"] = self.extra
        # Changes of the cache.
        lengths["changed_rows"] = self.batch_size
        lengths["row_lengths"] = self.batch_size * groups
        most = self.block_ids, self.zero_ids, self.block_copies
        for (ends, parts), length in zip(BY_GROUP.items(), most, strict=True):
            lengths |= dict.fromkeys(parts, length)
            lengths[ends] = groups
        ends = itertools.pairwise(itertools.accumulate(lengths.values(), initial=0))
        return {name: slice(*where) for name, where in zip(lengths, ends, strict=True)}

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
        parts["row_lengths"] = parts["row_lengths"].reshape(self.batch_size, len(self.growths))
        return parts
