"""The base of every layer spec, and the layers that own no cache. No jax."""

import abc
import dataclasses
import functools
from collections.abc import Hashable
from typing import ClassVar

from jaxkv._src.internal.checks import check_count, check_kind, check_positive, make_ints_plain
from jaxkv._src.specs._growth import Growth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds of what one step computes; admission depends on them.

    max_in_flight_tokens: most tokens of one request that one step computes, times the steps
      that asynchronous scheduling may have in flight at once.
    max_encoder_tokens: longest encoder input, for cross attention.
    """

    max_in_flight_tokens: int = 8192
    max_encoder_tokens: int = 0

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(max_in_flight_tokens=self.max_in_flight_tokens)
        check_count(max_encoder_tokens=self.max_encoder_tokens)


@dataclasses.dataclass(frozen=True)
class SharedKVSpec:
    """A layer that reads the keys and values of another layer and owns none."""

    layer: str  # name of the layer that owns them

    def __post_init__(self) -> None:
        check_kind(str, "the name of a layer", layer=self.layer)


@dataclasses.dataclass(frozen=True)
class EncoderOnlySpec:
    """A layer that attends within one pass and keeps nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec(abc.ABC):
    """Base of every layer kind: the bytes of one page, and the growth of a request.

    block_size: tokens per block.
    page_bytes_padded: bytes reserved per page when that is more than the data, so that pages
      of different layers line up in one pool; None for no padding.
    page_alignment_bytes: pages are rounded up to a multiple of this.
    """

    block_size: int
    page_bytes_padded: int | None = None
    page_alignment_bytes: int = 1
    kind: ClassVar[str] = "layer"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(block_size=self.block_size, page_alignment_bytes=self.page_alignment_bytes)
        if self.page_bytes_padded is None:
            return
        check_positive(page_bytes_padded=self.page_bytes_padded)
        if self.page_bytes_padded < self.data_bytes:
            raise ValueError(
                f"page_bytes_padded={self.page_bytes_padded} is smaller than the "
                f"{self.data_bytes} bytes of data in a page of this {self.kind} layer; "
                "pad to at least that"
            )

    @property
    @abc.abstractmethod
    def data_bytes(self) -> int:
        """Bytes of one page that carry data."""

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes of one page, padding included: what the pool reserves."""
        if self.page_bytes_padded is not None:
            return self.page_bytes_padded
        return -(-self.data_bytes // self.page_alignment_bytes) * self.page_alignment_bytes

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the layer takes from the pool once, whatever requests do."""
        return 0

    @property
    @abc.abstractmethod
    def growth(self) -> Growth:
        """The blocks that a request holds; layers of equal growth may share one table."""

    @property
    @abc.abstractmethod
    def interpretation(self) -> Hashable:
        """The element types of a page's bytes and their arrangement."""
