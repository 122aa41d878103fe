"""Layers that keep keys and values: full, sliding window, chunked, cross."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import ClassVar, override

from jaxkv.checks import check_count, check_positive
from jaxkv.specs._base import Limits, TokenSpec, WindowSpec
from jaxkv.specs._dtypes import canonical_dtype, packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(TokenSpec):
    """Keys and values of every token: ``block_size * heads * (k + v) * itemsize`` bytes.

    head_size_v: width of V when it differs from K; None: the same.
    scale_bytes: bytes of the scale that each K and each V head of a token carries in the
      page, for per-token-head quantisation.
    sink_tokens: tokens whose keys and values all requests share and nobody frees.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: str = "bfloat16"
    scale_bytes: int = 0
    sink_tokens: int = 0
    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_positive(num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if self.head_size_v is not None:
            check_positive(head_size_v=self.head_size_v)
        check_count(scale_bytes=self.scale_bytes, sink_tokens=self.sink_tokens)
        super().__post_init__()

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes: K then V with their scales, for every KV head."""
        widths = self.head_size, self.value_size
        head = sum(packed_bytes(width, self.dtype) + self.scale_bytes for width in widths)
        return self.num_kv_heads * head

    @property
    def data_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def growth(self) -> Hashable:
        return ("full", self.block_size, self.sink_tokens)

    @property
    def interpretation(self) -> Hashable:
        shape = self.num_kv_heads, self.head_size, self.value_size
        return ("kv", self.dtype, self.scale_bytes, *shape)

    @override
    @property
    def reserved_blocks(self) -> int:
        return -(-self.sink_tokens // self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(WindowSpec, FullAttentionSpec):
    """Full attention over the last ``sliding_window`` tokens only."""

    kind: ClassVar[str] = "sliding"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedAttentionSpec(FullAttentionSpec):
    """Attention within chunks of ``chunk_size`` tokens (Llama 4's local layers).

    A chunk that does not start on a block boundary straddles one block more.
    """

    chunk_size: int
    kind: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        check_positive(chunk_size=self.chunk_size)
        super().__post_init__()

    @override
    @property
    def growth(self) -> Hashable:
        return ("chunked", self.block_size, self.chunk_size)

    @override
    def first_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    @override
    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        held = min(self.chunk_size + limits.max_in_flight_tokens, num_tokens)
        straddle = self.chunk_size % self.block_size != 0
        return min(-(-held // self.block_size) + straddle, -(-num_tokens // self.block_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of the encoder's tokens, written once and never grown."""

    kind: ClassVar[str] = "cross"

    @override
    @property
    def growth(self) -> Hashable:
        return ("cross", self.block_size)

    @override
    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        return range(-(-encoder_tokens // self.block_size))

    @override
    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        return -(-limits.max_encoder_tokens // self.block_size)

    @override
    def row_blocks(self, num_tokens: int, limits: Limits) -> int:
        return self.max_blocks(num_tokens, limits)
