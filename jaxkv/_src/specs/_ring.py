"""Layers that keep the last tokens of a request in one block. No jax."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import ClassVar

from jaxkv._src.internal.checks import check_positive, make_ints_plain
from jaxkv._src.specs._base import LayerSpec
from jaxkv._src.specs._dtypes import canonical_dtype, check_no_heads, packed_bytes
from jaxkv._src.specs._growth import Growth


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingSpec(LayerSpec):
    """A row for each of the last ``block_size`` tokens, in one block per request.

    For rows that a layer compresses in groups of tokens: the ring keeps those of the group that is
    not whole yet. The token at position p lies in row ``p % block_size``, where
    `jaxkv.write_rows` writes it and `jaxkv.read_rows` finds it. No request shares its ring, and no
    prefix keeps one: cached prefixes end at whole groups, where nothing of a ring is read.

    block_size: rows of the ring: ``group_size``, and one for each draft that a step verifies.
    group_size: tokens that are compressed together.
    head_size: elements of a row.
    dtype: of the elements, as for `FullAttentionSpec`.
    """

    group_size: int
    head_size: int
    dtype: str = "bfloat16"
    kind: ClassVar[str] = "ring"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_no_heads(self.dtype, "a row of a ring")
        check_positive(group_size=self.group_size, head_size=self.head_size)
        super().__post_init__()
        if self.block_size < self.group_size:
            raise ValueError(
                f"block_size={self.block_size} is less than group_size={self.group_size}; a ring "
                "holds a whole group, and a row for each draft"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one row."""
        return packed_bytes(self.head_size, self.dtype)

    @property
    def data_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="ring", block_size=self.block_size, group_size=self.group_size)

    @property
    def interpretation(self) -> Hashable:
        return ("ring", self.dtype, self.head_size)
