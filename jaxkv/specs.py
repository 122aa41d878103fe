"""Layer specs: the bytes that one layer stores per block, and the blocks that a request needs.

A *block* is ``block_size`` tokens and the unit of allocation; a *page* is the bytes that one
layer stores for one block. No jax.

A `LayerSpec` is any spec that keeps a cache; its `Growth` says which blocks requests take.
`gated_delta_net_state`, `kda_state`, `linear_attention_state`, `mamba1_state` and `mamba2_state`
make a `jaxkv.StateSpec` from the sizes of a layer.
"""

from jaxkv._src.specs import (
    Growth,
    LayerSpec,
    gated_delta_net_state,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
)

__all__ = [
    "Growth",
    "LayerSpec",
    "gated_delta_net_state",
    "kda_state",
    "linear_attention_state",
    "mamba1_state",
    "mamba2_state",
]
