"""Layer specs: the bytes that one layer stores per block, and the blocks that a request needs.

A *block* is ``block_size`` tokens and the unit of allocation; a *page* is the bytes that one
layer stores for one block. No jax.
"""

from jaxkv._src.specs import (
    CacheMode,
    Growth,
    LayerSpec,
    gated_delta_net_state,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)

__all__ = [
    "CacheMode",
    "Growth",
    "LayerSpec",
    "gated_delta_net_state",
    "kda_state",
    "linear_attention_state",
    "mamba1_state",
    "mamba2_state",
]
