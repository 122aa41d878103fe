"""The layers that keep a cache, read from a Hugging Face ``config.json``. No jax.

Nothing is guessed: an architecture or a field of attention that is not understood is refused by
name. Draft layers for speculative decoding (MTP) are not included.

`model_len` and `encoder_len` read the longest request, `count_weights` the bytes of the weights.
`preset_names` lists the configurations that ship with the package.
"""

from jaxkv._src.hf_config import (
    count_weights,
    encoder_len,
    model_len,
    preset_names,
)

__all__ = [
    "count_weights",
    "encoder_len",
    "model_len",
    "preset_names",
]
