"""What one layer stores per block, and which blocks a request must hold for it.

Knows bytes, tokens and blocks of a single layer. Knows nothing of other layers,
of pools or of memory, and never imports jax: planning has to run anywhere.

Words: a *block* is ``block_size`` tokens and the unit of allocation; a *page* is
what one layer stores for one block. A request of ``num_tokens`` tokens, of which
``num_computed_tokens`` are already in the cache, must hold the blocks that
`LayerSpec.live_blocks` names; `LayerSpec.max_blocks` bounds their number over the
whole life of a request, and that bound is what admission charges.
"""

from jaxkv.specs._attention import (
    ChunkedAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from jaxkv.specs._base import EncoderOnlySpec, LayerSpec, Limits, SharedKVSpec, TokenSpec
from jaxkv.specs._dtypes import canonical_dtype, packed_bytes
from jaxkv.specs._mla import MLASpec, SlidingWindowMLASpec
from jaxkv.specs._state import (
    StateSpec,
    gated_delta_net_state,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)
from jaxkv.specs._tensor_parallel import heads_per_rank

__all__ = [
    "ChunkedAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlySpec",
    "FullAttentionSpec",
    "LayerSpec",
    "Limits",
    "MLASpec",
    "SharedKVSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StateSpec",
    "TokenSpec",
    "canonical_dtype",
    "gated_delta_net_state",
    "heads_per_rank",
    "kda_state",
    "linear_attention_state",
    "mamba1_state",
    "mamba2_state",
    "packed_bytes",
]
