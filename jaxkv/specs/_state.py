"""Layers that keep a recurrent state: mamba, gated delta nets, linear attention."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, override

from jaxkv.checks import check_count, check_positive
from jaxkv.specs._base import LayerSpec, Limits
from jaxkv.specs._dtypes import canonical_dtype, packed_bytes
from jaxkv.specs._tensor_parallel import divide

Shapes = tuple[tuple[int, ...], ...]


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
        if isinstance(self.dtypes, str):
            raise TypeError(f"dtypes={self.dtypes!r} must be a tuple of names; add a comma")
        object.__setattr__(self, "dtypes", tuple(canonical_dtype(d, "dtypes") for d in self.dtypes))
        if any(isinstance(shape, int) for shape in self.shapes):
            raise TypeError(f"shapes must be a tuple of shapes, got {self.shapes!r}")
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(
                f"shapes and dtypes must name the same arrays, at least one; got "
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            )
        if "nvfp4" in self.dtypes:
            raise ValueError("dtypes: nvfp4 packs heads of keys and values, not states")
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
        return tuple(packed_bytes(math.prod(shape), dtype) for shape, dtype in pairs)

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

    @override
    def row_blocks(self, num_tokens: int, limits: Limits) -> int:
        indices = 1 if self.cache_mode == "none" else -(-num_tokens // self.block_size)
        return indices + self.speculative_blocks


def mamba1_state(
    *, inner_size: int, state_size: int, conv_kernel: int, tensor_parallel: int = 1
) -> Shapes:
    """Shapes of one mamba1 state on one rank: convolution inputs, and state per channel."""
    inner = divide("inner_size", inner_size, tensor_parallel)
    return (conv_kernel - 1, inner), (inner, state_size)


def mamba2_state(
    *,
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Shapes of one mamba2 state on one rank.

    The convolution runs over inputs and two group projections; groups that do not
    divide among the ranks are repeated until each rank has at least one.
    """
    check_positive(tensor_parallel=tensor_parallel)
    if num_groups % tensor_parallel:
        num_groups = tensor_parallel
    channels = num_heads * head_size + 2 * num_groups * state_size
    heads = divide("num_heads", num_heads, tensor_parallel)
    rows = conv_kernel - 1 + speculative_tokens
    return (rows, divide("channels", channels, tensor_parallel)), (heads, head_size, state_size)


def gated_delta_net_state(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_size: int,
    value_size: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Shapes of one gated delta net state on one rank (Qwen3-Next): convolution inputs
    over queries, keys and values, and a (value x key) matrix for each value head."""
    channels = 2 * num_key_heads * key_size + num_value_heads * value_size
    heads = divide("num_value_heads", num_value_heads, tensor_parallel)
    rows = conv_kernel - 1 + speculative_tokens
    return (rows, divide("channels", channels, tensor_parallel)), (heads, value_size, key_size)


def kda_state(
    *,
    num_heads: int,
    head_size: int,
    conv_kernel: int,
    speculative_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Shapes:
    """Shapes of one Kimi delta attention state on one rank: q, k and v all have heads."""
    channels = divide("num_heads * head_size", num_heads * head_size, tensor_parallel)
    heads = divide("num_heads", num_heads, tensor_parallel)
    rows = conv_kernel - 1 + speculative_tokens
    return (rows, 3 * channels), (heads, head_size, head_size)


def linear_attention_state(*, num_heads: int, head_size: int, tensor_parallel: int = 1) -> Shapes:
    """Shape of one linear attention state on one rank (MiniMax): a matrix per head."""
    return ((divide("num_heads", num_heads, tensor_parallel), head_size, head_size),)
