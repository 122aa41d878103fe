"""The layers that keep a cache, read from a Hugging Face ``config.json``. No jax.

Nothing is guessed: an architecture or a field of attention that is not understood is refused by
name. Draft layers for speculative decoding (MTP) are not included.
"""

from jaxkv.hf_config._files import load_config, preset_names
from jaxkv.hf_config._layers import layers_from_config, shipped_dtype
from jaxkv.hf_config._length import encoder_len, model_len
from jaxkv.hf_config._weights import Weights, count_weights

__all__ = [
    "Weights",
    "count_weights",
    "encoder_len",
    "layers_from_config",
    "load_config",
    "model_len",
    "preset_names",
    "shipped_dtype",
]
