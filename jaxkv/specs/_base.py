"""What every layer kind has in common, and the layers that own no cache."""

import abc
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import ClassVar, override

from jaxkv.checks import check_count, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler promises never to exceed; admission bounds depend on it.

    max_in_flight_tokens: most tokens of one request that one step computes (times
      the number of steps that may be in flight at once under async scheduling).
    max_encoder_tokens: longest encoder input, for cross attention.
    """

    max_in_flight_tokens: int = 8192
    max_encoder_tokens: int = 0

    def __post_init__(self) -> None:
        check_positive(max_in_flight_tokens=self.max_in_flight_tokens)
        check_count(max_encoder_tokens=self.max_encoder_tokens)


@dataclasses.dataclass(frozen=True)
class SharedKVSpec:
    """A layer that reads the keys and values of another one and owns none."""

    layer: str  # the layer that owns them


@dataclasses.dataclass(frozen=True)
class EncoderOnlySpec:
    """A layer that attends within one pass and keeps nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec(abc.ABC):
    """Base of every layer kind.

    block_size: tokens per block.
    page_bytes_padded: bytes reserved per page when that is more than the data, so
      that pages of different layers line up in one pool. None: no padding.
    page_alignment_bytes: pages are rounded up to a multiple of this.
    """

    block_size: int
    page_bytes_padded: int | None = None
    page_alignment_bytes: int = 1
    kind: ClassVar[str] = "layer"

    def __post_init__(self) -> None:
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
    def growth(self) -> Hashable:
        """Layers with equal growth need the same blocks and may share one table."""

    @property
    @abc.abstractmethod
    def interpretation(self) -> Hashable:
        """How the bytes of a page are read: element types and their arrangement."""

    @abc.abstractmethod
    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        """Indices (position // block_size) of the blocks that a request must hold.

        The request has ``num_computed_tokens`` tokens in the cache and is about to
        compute those up to ``num_tokens``. Ascending, without repeats.
        """

    @abc.abstractmethod
    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        """Most blocks that a request growing to ``num_tokens`` tokens ever holds."""

    def row_blocks(self, num_tokens: int, limits: Limits) -> int:
        """Entries that a table row needs: held blocks stay at their own index."""
        return -(-num_tokens // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSpec(LayerSpec):
    """A layer that stores something for every token (as opposed to one state)."""

    def first_token(self, num_computed_tokens: int) -> int:
        """Oldest token that the next computed token may still read."""
        del num_computed_tokens
        return 0

    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        first = self.first_token(num_computed_tokens) // self.block_size
        return range(first, -(-num_tokens // self.block_size))

    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        return -(-num_tokens // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSpec(TokenSpec):
    """A layer that reads its last ``sliding_window`` tokens only.

    With F tokens in flight a request holds at most ``min(w - 1 + F, L)`` tokens. They may
    straddle one block more than they fill, but never more than ``ceil(L / b)``, which
    vLLM forgets: it refuses requests that fit when the window is about as long as they.
    """

    sliding_window: int

    def __post_init__(self) -> None:
        check_positive(sliding_window=self.sliding_window)
        super().__post_init__()

    @property
    def growth(self) -> Hashable:
        return ("sliding", self.block_size, self.sliding_window)

    @override
    def first_token(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @override
    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        held = min(self.sliding_window - 1 + limits.max_in_flight_tokens, num_tokens)
        return min(-(-held // self.block_size) + 1, -(-num_tokens // self.block_size))
