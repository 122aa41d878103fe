"""Layer specs: the bytes that one layer stores per block, and the blocks that a request holds."""

from jaxkv._src.specs._attention import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from jaxkv._src.specs._base import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec
from jaxkv._src.specs._dtypes import PER_TOKEN_HEAD, canonical_dtype, packed_bytes
from jaxkv._src.specs._growth import (
    PLAIN_INTS,
    CacheMode,
    Growth,
    GrowthTable,
    LiveRange,
    first_visible_token,
)
from jaxkv._src.specs._ring import RingSpec
from jaxkv._src.specs._state import (
    StateSpec,
    gated_delta_net_state,
    heads_per_rank,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)

__all__ = [
    "PER_TOKEN_HEAD",
    "PLAIN_INTS",
    "CacheMode",
    "ChunkedAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlySpec",
    "FullAttentionSpec",
    "Growth",
    "GrowthTable",
    "LayerSpec",
    "Limits",
    "LiveRange",
    "MLASpec",
    "RingSpec",
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
