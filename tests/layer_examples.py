"""Small layers of every kind, and strategies that draw them, for tests of planning."""

import functools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from jaxkv._src.planning import Group, Plan, plan_cache, unify_pages
from jaxkv._src.specs import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    RingSpec,
    SlidingWindowSpec,
    StateSpec,
)

Layers = dict[str, LayerSpec]

MAX_LEN = 40
TERABYTE = 2**40
KV = {"block_size": 16, "num_kv_heads": 2, "head_size": 8}


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**KV | changes)


def sliding(window: int = 6, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(sliding_window=window, **KV | changes)


def chunked(chunk: int = 6, **changes: Any) -> ChunkedAttentionSpec:
    return ChunkedAttentionSpec(chunk_size=chunk, **KV | changes)


def cross(**changes: Any) -> CrossAttentionSpec:
    return CrossAttentionSpec(**KV | changes)


def mla(**changes: Any) -> MLASpec:
    return MLASpec(**{"block_size": 64, "head_size": 576} | changes)


def state(**changes: Any) -> StateSpec:
    fields = {"block_size": 16, "shapes": ((3, 8), (2, 4)), "dtypes": ("bf16", "f32")}
    return StateSpec(**fields | changes)


ATTENTION: dict[str, st.SearchStrategy[Any]] = {
    "block_size": st.sampled_from([1, 2, 3, 4, 8]),
    "num_kv_heads": st.sampled_from([1, 2, 3]),
    "head_size": st.just(4),
    "head_size_v": st.sampled_from([None, 2]),
    "dtype": st.sampled_from(["fp8", "bf16", "f32"]),
}
ROWS: dict[str, st.SearchStrategy[Any]] = {
    "head_size": st.sampled_from([4, 16]),
    "bytes_per_token": st.none() | st.just(32),
}
LATENT = st.builds(
    MLASpec, block_size=st.sampled_from([2, 4, 8]), compress_ratio=st.integers(1, 2), **ROWS
) | st.builds(MLASpec, block_size=st.just(1), **ROWS)
STATES = st.builds(
    StateSpec,
    block_size=st.sampled_from([1, 2, 4, 8]),
    shapes=st.sampled_from([((4,), (3, 4)), ((5, 40), (3,))]),
    dtypes=st.sampled_from([("f32", "f32"), ("bf16", "f32")]),
    cache_mode=st.sampled_from(["none", "align", "all"]),
    speculative_blocks=st.integers(0, 2),
)
TOKEN_SPECS = st.one_of(
    st.builds(FullAttentionSpec, **ATTENTION),
    st.builds(SlidingWindowSpec, sliding_window=st.integers(1, 12), **ATTENTION),
    st.builds(ChunkedAttentionSpec, chunk_size=st.integers(1, 12), **ATTENTION),
    st.builds(CrossAttentionSpec, **ATTENTION),
    LATENT,
)
RINGS = st.sampled_from([(1, 1), (4, 4), (5, 3), (8, 2)]).map(
    lambda sizes: RingSpec(block_size=sizes[0], group_size=sizes[1], head_size=4)
)
SPECS = TOKEN_SPECS | STATES | RINGS
LIMITS = st.builds(
    Limits, max_in_flight_tokens=st.integers(1, 10), max_encoder_tokens=st.integers(1, 12)
)


def by_name(specs: Sequence[LayerSpec]) -> Layers:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


def can_be_unified(layers: Layers) -> bool:
    """Whether no MLA page would have to be padded."""
    try:
        unify_pages(layers)
    except ValueError:
        return False
    return True


MODELS = (
    st.lists(SPECS, min_size=1, max_size=4)
    .flatmap(lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    .map(by_name)
    .filter(can_be_unified)
)


def need(groups: Sequence[Group], num_tokens: int, limits: Limits) -> int:
    """The most blocks that a request of this length ever holds, over all groups."""
    sizes = limits.max_in_flight_tokens, limits.max_encoder_tokens
    return sum(group.growth.max_blocks(num_tokens, *sizes) for group in groups)


def plan_of(layers: Layers, num_blocks: int, max_model_len: int, **options: Any) -> Plan:
    """A plan of this many blocks, whatever their bytes."""
    make = functools.partial(plan_cache, memory_bytes=TERABYTE, override_beyond_memory=True)
    return make(layers, max_model_len=max_model_len, num_blocks_override=num_blocks, **options)
