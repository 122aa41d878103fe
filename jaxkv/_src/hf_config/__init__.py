"""The layers that keep a cache, read from a Hugging Face ``config.json``. No jax."""

from jaxkv._src.hf_config._files import load_config, preset_names
from jaxkv._src.hf_config._layers import layers_from_config, shipped_dtype
from jaxkv._src.hf_config._length import encoder_len, model_len
from jaxkv._src.hf_config._weights import (
    Weights,
    count_weights,
    layers_per_stage,
    num_layers,
)

__all__ = [
    "Weights",
    "count_weights",
    "encoder_len",
    "layers_from_config",
    "layers_per_stage",
    "load_config",
    "model_len",
    "num_layers",
    "preset_names",
    "shipped_dtype",
]
