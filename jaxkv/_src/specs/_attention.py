"""Layers that store tokens: full, sliding window, chunked, cross, and latent attention."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import ClassVar, override

from jaxkv._src.internal.checks import check_count, check_positive, make_ints_plain
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.specs._base import LayerSpec
from jaxkv._src.specs._dtypes import PER_TOKEN_HEAD, canonical_dtype, check_no_heads, packed_bytes
from jaxkv._src.specs._growth import Growth

SCALE_BYTES, ROW_ALIGN = 4, 32  # of the dtypes per token and head, as `TokenHeadRow` has them


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(LayerSpec):
    """Keys and values of every token: ``block_size * heads * (k + v) * itemsize`` bytes.

    With ``"int8_per_token_head"``, ``"fp8_per_token_head"`` (float8_e4m3fn) or
    ``"int4_per_token_head"`` as dtype, each K and each V of a token and head has a float32 scale:
    ``write_tokens`` and ``attend`` choose it by the largest magnitude. The row of a token is the
    elements of all heads, K then V of each, in 1 or 1/2 bytes; then the scales of K and of V of
    each head; and zeros up to a multiple of 32 bytes, which 4 or 8 heads fill. For heads of 128
    that is 264 and 136 bytes per token and head. `pallas_kernels.TokenHeadRow` packs and unpacks.

    num_kv_heads: KV heads of one rank.
    head_size: width of K, and of V unless ``head_size_v`` says otherwise.
    head_size_v: width of V when it differs from K.
    dtype: of the stored elements: a name such as "bf16" or "fp8_e4m3", or a dtype object.
    scale_bytes: bytes of the scale that each K and each V head of a token carries in the
      page, for formats of your own, which ``write_rows`` stores.
    sink_tokens: tokens whose keys and values all requests share; their blocks are reserved.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: str = "bfloat16"
    scale_bytes: int = 0
    sink_tokens: int = 0
    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_positive(num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if self.head_size_v is not None:
            check_positive(head_size_v=self.head_size_v)
        check_count(scale_bytes=self.scale_bytes, sink_tokens=self.sink_tokens)
        if self.scale_bytes and self.has_scales:
            raise ValueError(
                f"scale_bytes={self.scale_bytes} with dtype={self.dtype!r}, which has scales of "
                "its own; leave it out"
            )
        if self.has_scales:  # refuses odd widths of 4 bits
            check_positive(token_bytes=self.token_bytes)
        super().__post_init__()

    @property
    def has_scales(self) -> bool:
        """Whether rows hold a scale of each token and head, by which values are quantised."""
        return self.dtype in PER_TOKEN_HEAD

    @property
    def value_size(self) -> int:
        """Width of V."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K then V with their scales, for every KV head."""
        widths = self.head_size, self.value_size
        scale = SCALE_BYTES if self.has_scales else self.scale_bytes
        head = sum(packed_bytes(width, self.dtype) + scale for width in widths)
        align = ROW_ALIGN if self.has_scales else 1
        return cdiv(self.num_kv_heads * head, align) * align

    @property
    def data_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="full", block_size=self.block_size, sink_tokens=self.sink_tokens)

    @property
    def interpretation(self) -> Hashable:
        shape = self.num_kv_heads, self.head_size, self.value_size
        return ("kv", self.dtype, self.scale_bytes, *shape)

    @override
    @property
    def reserved_blocks(self) -> int:
        return cdiv(self.sink_tokens, self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last ``sliding_window`` tokens, the current one included."""

    sliding_window: int
    kind: ClassVar[str] = "sliding"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(sliding_window=self.sliding_window)
        super().__post_init__()

    @override
    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="sliding", block_size=self.block_size, window=self.sliding_window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedAttentionSpec(FullAttentionSpec):
    """Keys and values of the current chunk of ``chunk_size`` tokens (Llama 4's local layers)."""

    chunk_size: int
    kind: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(chunk_size=self.chunk_size)
        super().__post_init__()

    @override
    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="chunked", block_size=self.block_size, chunk=self.chunk_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of the encoder's tokens, written once and never grown."""

    kind: ClassVar[str] = "cross"

    @override
    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="cross", block_size=self.block_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec(LayerSpec):
    """One compressed latent vector per token (DeepSeek-V2's multi-head latent attention).

    head_size: elements of a vector (``kv_lora_rank + qk_rope_head_dim``).
    value_size: leading elements that attention reads as the value (``kv_lora_rank``);
      None means all of it.
    dtype: of the stored elements, as for `FullAttentionSpec`.
    bytes_per_token: bytes of a vector when it is not ``head_size`` plain elements, such as 656
      for fp8 latents with their scales and a bf16 rope part (``attend(row_packing="fp8_ds_mla")``).
    compress_ratio: tokens that share one stored vector.
    """

    head_size: int
    value_size: int | None = None
    dtype: str = "bfloat16"
    bytes_per_token: int | None = None
    compress_ratio: int = 1
    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_no_heads(self.dtype, "a latent vector")
        check_positive(block_size=self.block_size, compress_ratio=self.compress_ratio)
        check_positive(head_size=self.head_size)
        if self.bytes_per_token is not None:
            check_positive(bytes_per_token=self.bytes_per_token)
        if self.value_size is not None:
            check_positive(value_size=self.value_size)
            if self.value_size > self.head_size:
                raise ValueError(
                    f"value_size={self.value_size} is more than head_size={self.head_size}; the "
                    "value is a prefix of the vector"
                )
        if self.block_size % self.compress_ratio:
            raise ValueError(
                f"block_size={self.block_size} is not a multiple of "
                f"compress_ratio={self.compress_ratio}; a block must hold whole vectors"
            )
        super().__post_init__()

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored vector."""
        return self.bytes_per_token or packed_bytes(self.head_size, self.dtype)

    @property
    def data_bytes(self) -> int:
        return self.block_size // self.compress_ratio * self.token_bytes

    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="full", block_size=self.block_size)

    @property
    def interpretation(self) -> Hashable:
        return ("mla", self.dtype, self.head_size, self.token_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(MLASpec):
    """Latent vectors, or compressor state, of the last ``sliding_window`` tokens only."""

    sliding_window: int
    kind: ClassVar[str] = "sliding_mla"

    def __post_init__(self) -> None:
        make_ints_plain(self)
        check_positive(sliding_window=self.sliding_window)
        super().__post_init__()

    @override
    @functools.cached_property
    def growth(self) -> Growth:
        return Growth(kind="sliding", block_size=self.block_size, window=self.sliding_window)
