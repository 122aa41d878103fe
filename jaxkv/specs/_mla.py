"""Layers that keep one compressed latent row per token, or per several tokens."""

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

from jaxkv.checks import check_positive
from jaxkv.specs._base import TokenSpec, WindowSpec
from jaxkv.specs._dtypes import canonical_dtype, packed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec(TokenSpec):
    """One compressed latent row per token (DeepSeek's multi-head latent attention).

    head_size: elements of a row (``kv_lora_rank + qk_rope_head_dim``).
    bytes_per_token: bytes of a row when it is not ``head_size`` plain elements,
      such as 656 for fp8 latents with their scales and a bf16 rope part.
    compress_ratio: tokens that share one stored row.
    """

    head_size: int
    dtype: str = "bfloat16"
    bytes_per_token: int | None = None
    compress_ratio: int = 1
    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_positive(head_size=self.head_size, compress_ratio=self.compress_ratio)
        if self.bytes_per_token is not None:
            check_positive(bytes_per_token=self.bytes_per_token)
        if self.block_size % self.compress_ratio:
            raise ValueError(
                f"block_size={self.block_size} is not a multiple of "
                f"compress_ratio={self.compress_ratio}; a block must hold whole rows"
            )
        super().__post_init__()

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored row."""
        return self.bytes_per_token or packed_bytes(self.head_size, self.dtype)

    @property
    def data_bytes(self) -> int:
        return self.block_size // self.compress_ratio * self.token_bytes

    @property
    def growth(self) -> Hashable:
        return ("full", self.block_size, 0)

    @property
    def interpretation(self) -> Hashable:
        return ("mla", self.dtype, self.head_size, self.token_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(WindowSpec, MLASpec):
    """Latent rows, or compressor state, of the last ``sliding_window`` tokens only."""

    kind: ClassVar[str] = "sliding_mla"
