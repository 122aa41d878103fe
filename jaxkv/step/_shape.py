"""The sizes of a step, where its integers lie, and what it hands to kernels."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.checks import check_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of a step; static, so each distinct shape is one compilation.

    Choose a few (decode, prefill) before serving starts and pad to them.

    entries: rows of the tables that change; at most ``max_requests``.
    block_ids: new ids over all entries and groups. A request that computes n tokens needs
      at most ``ceil(n / block_size) + 1`` of each group that keeps tokens.
    zero_ids: fresh blocks to zero, per group: as many as one group is given, 0 where the
      plan zeroes none. What is too small is refused before anything is sent, and the same
      update can be packed into a larger shape.
    copies: blocks to copy, per group.
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
    copies: int = 0
    tokens: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.widths, int):
            raise TypeError(
                f"widths={self.widths} must be a tuple, one per group; use tables.widths"
            )
        object.__setattr__(self, "widths", tuple(self.widths))
        sizes = dataclasses.asdict(self)
        widths = sizes.pop("widths")
        check_count(**sizes, **{f"widths[{i}]": width for i, width in enumerate(widths)})
        if (self.block_ids and not self.entries) or (self.tokens and not self.batch):
            raise ValueError(
                f"block_ids={self.block_ids} need entries and tokens={self.tokens} need a batch; "
                f"got entries={self.entries} and batch={self.batch}"
            )

    @functools.cached_property
    def fields(self) -> Mapping[str, slice]:
        """Every part of the upload, in order, and where it lies."""
        groups = len(self.widths)
        lengths = {
            "rows": self.entries,
            "overwrite": self.entries,
            "firsts": self.entries * groups,
            "counts": self.entries * groups,
            "block_ids": self.block_ids,
            "owners": self.block_ids,
            "zero_ids": self.zero_ids * groups,
            "copy_sources": self.copies * groups,
            "copy_destinations": self.copies * groups,
            "batch_rows": self.batch,
            "first_positions": self.batch,
            "token_ends": self.batch,
            "extra": self.extra,
        }
        ends = itertools.accumulate(lengths.values(), initial=0)
        return {
            name: slice(start, stop)
            for name, (start, stop) in zip(lengths, itertools.pairwise(ends), strict=True)
        }

    @functools.cached_property
    def size(self) -> int:
        """int32s in the upload."""
        return self.fields["extra"].stop

    @functools.cached_property
    def padding(self) -> np.ndarray:
        """An upload that is all padding, to copy and write over. Read-only."""
        upload = np.zeros(self.size, np.int32)
        for name in ("rows", "zero_ids", "copy_sources", "copy_destinations", "batch_rows"):
            upload[self.fields[name]] = -1
        upload[self.fields["owners"]] = self.entries * len(self.widths)
        upload.flags.writeable = False
        return upload

    def split(self, upload: Any) -> dict[str, Any]:
        """Views of the parts of an upload, NumPy or jax, by name.

        Flat, except ``firsts`` and ``counts``, [entries, groups], and what there is of
        blocks to zero and to copy, [groups, ...].
        """
        parts = {name: upload[where] for name, where in self.fields.items()}
        groups = len(self.widths)
        for name in ("firsts", "counts"):
            parts[name] = parts[name].reshape(self.entries, groups)
        parts["zero_ids"] = parts["zero_ids"].reshape(groups, self.zero_ids)
        for name in ("copy_sources", "copy_destinations"):
            parts[name] = parts[name].reshape(groups, self.copies)
        return parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepBatch:
    """What a step's kernels need: G groups, B requests, T tokens, Z blocks to zero.

    block_tables is a tuple, per group int32[B, widths[g] * blocks_per_kv_block], in the order of
    the batch. Tokens lie end to end: those of batch entry i end before ``token_ends[i]``.

    All that is small lies in one array and is cut when it is asked for: inside a ``jit``
    that is free, and a step on its own returns one array instead of eight.
    """

    block_tables: tuple[Array, ...]  # per group int32[B, widths[g] * blocks_per_kv_block]
    data: Array  # int32[shape.size + (2 + G) * T], the upload and what was made for tokens
    shape: StepShape = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        widths = tuple(table.shape[-1] for table in self.block_tables)
        return (
            f"StepBatch({self.shape.batch} requests, {self.shape.tokens} tokens, tables of "
            f"{widths} blocks, with padding)"
        )

    @property
    def rows(self) -> Array:
        """int32[B], `PAD_ROW` for padding."""
        return self._uploaded("batch_rows")

    @property
    def first_positions(self) -> Array:
        """int32[B], position of the first token computed now."""
        return self._uploaded("first_positions")

    @property
    def token_ends(self) -> Array:
        """int32[B], tokens computed now by this and all earlier requests."""
        return self._uploaded("token_ends")

    @property
    def lengths(self) -> Array:
        """int32[B], tokens computed now."""
        return jnp.diff(self.token_ends, prepend=0)

    @property
    def zero_ids(self) -> Array:
        """int32[G, Z], the blocks to zero; -1 for padding."""
        return self._uploaded("zero_ids").reshape(len(self.shape.widths), -1)

    @property
    def extra(self) -> Array:
        """int32[shape.extra]."""
        return self._uploaded("extra")

    @property
    def token_rows(self) -> Array:
        """int32[T], the row of the tables (no index into the batch), `PAD_ROW` for padding."""
        return self._of_tokens[0]

    @property
    def positions(self) -> Array:
        """int32[T], -1 for padding."""
        return self._of_tokens[1]

    @property
    def slots(self) -> Array:
        """int32[G, T], `PAD_SLOT` for padding."""
        return self._of_tokens[2:]

    @property
    def _of_tokens(self) -> Array:
        num_rows = 2 + len(self.shape.widths)
        return self.data[self.shape.size :].reshape(num_rows, self.shape.tokens)

    def _uploaded(self, name: str) -> Array:
        return self.data[self.shape.fields[name]]
