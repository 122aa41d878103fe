"""What one layer stores per block, and which blocks a request must hold for it.

Knows bytes, tokens and blocks of a single layer. Knows nothing of other layers,
of pools or of memory, and never imports jax: planning has to run anywhere.

Words: a *block* is ``block_size`` tokens and the unit of allocation; a *page* is
what one layer stores for one block. A request of ``num_tokens`` tokens, of which
``num_computed_tokens`` are already in the cache, must hold the blocks that
`LayerSpec.live_blocks` names; `LayerSpec.max_blocks` bounds their number over the
whole life of a request, and that bound is what admission charges.
"""

import abc
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar

from jaxkv.checks import check_count, check_positive

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
DTYPE_ALIASES: dict[str, str] = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def canonical_dtype(dtype: str, argument: str = "dtype") -> str:
    """Returns the jax name of a cache dtype, from its own name or a short alias.

    Raises:
      ValueError: the dtype is not one that a cache page can hold.
    """
    name = DTYPE_ALIASES.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        known = ", ".join(sorted({*DTYPE_BYTES, *DTYPE_ALIASES}))
        raise ValueError(f"{argument}={dtype!r} is not a cache dtype; use one of {known}")
    return name


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec(abc.ABC):
    """Base of every layer kind.

    block_size: tokens per block.
    page_bytes_padded: bytes reserved per page when that is more than the data, so
      that pages of different layers line up in one pool. None: no padding.
    """

    block_size: int
    page_bytes_padded: int | None = None
    kind: ClassVar[str] = "layer"

    def __post_init__(self) -> None:
        check_positive(block_size=self.block_size)
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

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding included: what the pool reserves."""
        return self.page_bytes_padded or self.data_bytes

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
class _TokenSpec(LayerSpec):
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
class FullAttentionSpec(_TokenSpec):
    """Keys and values of every token: ``block_size * heads * (k + v) * itemsize`` bytes.

    head_size_v: width of V when it differs from K; None: the same.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: str = "bfloat16"
    kind: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        check_positive(num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if self.head_size_v is not None:
            check_positive(head_size_v=self.head_size_v)
        super().__post_init__()

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes: K then V, for every KV head."""
        width = self.head_size + self.value_size
        return self.num_kv_heads * width * DTYPE_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def growth(self) -> Hashable:
        return ("full", self.block_size)

    @property
    def interpretation(self) -> Hashable:
        return ("kv", self.dtype, self.num_kv_heads, self.head_size, self.value_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Full attention over the last ``sliding_window`` tokens only.

    With F tokens in flight a request holds at most ``min(window - 1 + F, L)`` tokens;
    they may straddle one block more than they fill, but never more than ``ceil(L / b)``.
    """

    sliding_window: int
    kind: ClassVar[str] = "sliding"

    def __post_init__(self) -> None:
        check_positive(sliding_window=self.sliding_window)
        super().__post_init__()

    @property
    def growth(self) -> Hashable:
        return ("sliding", self.block_size, self.sliding_window)

    def first_token(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        held = min(self.sliding_window - 1 + limits.max_in_flight_tokens, num_tokens)
        return min(-(-held // self.block_size) + 1, -(-num_tokens // self.block_size))


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

    @property
    def growth(self) -> Hashable:
        return ("chunked", self.block_size, self.chunk_size)

    def first_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        held = min(self.chunk_size + limits.max_in_flight_tokens, num_tokens)
        straddle = self.chunk_size % self.block_size != 0
        return min(-(-held // self.block_size) + straddle, -(-num_tokens // self.block_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of the encoder's tokens, written once and never grown."""

    kind: ClassVar[str] = "cross"

    @property
    def growth(self) -> Hashable:
        return ("cross", self.block_size)

    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        return range(-(-encoder_tokens // self.block_size))

    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        return -(-limits.max_encoder_tokens // self.block_size)

    def row_blocks(self, num_tokens: int, limits: Limits) -> int:
        return self.max_blocks(num_tokens, limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec(_TokenSpec):
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
        return self.bytes_per_token or self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        return self.block_size // self.compress_ratio * self.token_bytes

    @property
    def growth(self) -> Hashable:
        return ("full", self.block_size)

    @property
    def interpretation(self) -> Hashable:
        return ("mla", self.dtype, self.head_size, self.token_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec(LayerSpec):
    """Recurrent state (mamba, gated delta net, linear attention): one page, any length.

    shapes, dtypes: the arrays of one state, stored back to back in one page.
    cache_mode: ``"none"`` keeps the running state only; ``"align"`` also the one at
      the last block boundary, so that a prefix can be resumed; ``"all"`` keeps one
      state per block.
    speculative_blocks: extra states for speculative tokens.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cache_mode: str = "none"
    speculative_blocks: int = 0
    kind: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(canonical_dtype(d, "dtypes") for d in self.dtypes))
        if any(isinstance(shape, int) for shape in self.shapes):
            raise TypeError(f"shapes must be a tuple of shapes, got {self.shapes!r}")
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(
                f"shapes and dtypes must name the same arrays, at least one; got "
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            )
        for shape in self.shapes:
            check_positive(**{f"shapes[{i}]": size for i, size in enumerate(shape)})
        if self.cache_mode not in ("none", "align", "all"):
            raise ValueError(f'cache_mode={self.cache_mode!r}; use "none", "align" or "all"')
        check_count(speculative_blocks=self.speculative_blocks)
        super().__post_init__()

    @property
    def array_bytes(self) -> tuple[int, ...]:
        """Bytes of each array of one state, in the order they lie in the page."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in pairs)

    @property
    def data_bytes(self) -> int:
        return sum(self.array_bytes)

    @property
    def growth(self) -> Hashable:
        return ("state", self.block_size, self.cache_mode, self.speculative_blocks)

    @property
    def interpretation(self) -> Hashable:
        return ("state", self.shapes, self.dtypes)

    def live_blocks(
        self, num_computed_tokens: int, num_tokens: int, *, encoder_tokens: int = 0
    ) -> Sequence[int]:
        last = max(-(-num_tokens // self.block_size), 1) - 1
        if self.cache_mode == "none":
            return range(1 + self.speculative_blocks)
        if self.cache_mode == "all":
            return range(last + 1 + self.speculative_blocks)
        newest = range(last, last + 1 + self.speculative_blocks)
        source = -(-num_computed_tokens // self.block_size) - 1  # the state to resume from
        return newest if source in newest or source < 0 else (source, *newest)

    def max_blocks(self, num_tokens: int, limits: Limits) -> int:
        running = {"none": 1, "align": 2, "all": -(-num_tokens // self.block_size)}
        return running[self.cache_mode] + self.speculative_blocks

    def row_blocks(self, num_tokens: int, limits: Limits) -> int:
        indices = 1 if self.cache_mode == "none" else -(-num_tokens // self.block_size)
        return indices + self.speculative_blocks
