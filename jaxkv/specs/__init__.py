"""Layer specs: the bytes that one layer stores per block, and the blocks that a request holds.

A *block* is ``block_size`` tokens and the unit of allocation; a *page* is the bytes that one
layer stores for one block. No jax.
"""

from jaxkv.specs._attention import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from jaxkv.specs._base import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec
from jaxkv.specs._dtypes import canonical_dtype, packed_bytes
from jaxkv.specs._growth import CacheMode, Growth, LiveColumns, first_visible_token
from jaxkv.specs._state import (
    StateSpec,
    gated_delta_net_state,
    heads_per_rank,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)

__all__ = [
    "CacheMode",
    "ChunkedAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlySpec",
    "FullAttentionSpec",
    "Growth",
    "LayerSpec",
    "Limits",
    "LiveColumns",
    "MLASpec",
    "SharedKVSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StateSpec",
    "canonical_dtype",
    "first_visible_token",
    "gated_delta_net_state",
    "heads_per_rank",
    "kda_state",
    "linear_attention_state",
    "mamba1_state",
    "mamba2_state",
    "packed_bytes",
]
