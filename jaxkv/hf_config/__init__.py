"""The layers that keep a cache, read from a Hugging Face ``config.json``. No jax.

Nothing is guessed: an architecture or an attention field that is not understood is refused by
name. Draft layers for speculative decoding (MTP) are not included.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxkv._internal.checks import check_count, check_positive
from jaxkv.hf_config import _dense, _encoder_decoder, _linear, _mamba, _mla
from jaxkv.hf_config._build import Options
from jaxkv.hf_config._fields import WRAPPERS, flatten, model_type_of
from jaxkv.hf_config._reader import ConfigReader
from jaxkv.specs import CacheMode, EncoderOnlySpec, LayerSpec, SharedKVSpec

PRESETS = pathlib.Path(__file__).parent / "presets"
FAMILIES = (
    _dense.FAMILIES | _mla.FAMILIES | _linear.FAMILIES | _mamba.FAMILIES | _encoder_decoder.FAMILIES
)
CLASS_LENGTHS = {"gemma3_text": 131072}  # the defaults of configuration classes
LENGTHS = "max_position_embeddings", "max_target_positions", "model_max_length"

Config = Mapping[str, Any]


def preset_names() -> tuple[str, ...]:
    """Returns the names of the configurations that ship with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def load_config(name: str) -> dict[str, Any]:
    """Reads the configuration of a model.

    Args:
      name: name of a shipped preset, or path of a ``config.json`` or of the directory that
        holds one.

    Raises:
      ValueError: neither a preset nor a readable JSON object.
    """
    preset, path = PRESETS / f"{name}.json", pathlib.Path(name)
    if preset.is_file():
        path = preset
    elif path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"config={name!r} is neither a readable JSON file ({error}) nor a preset; presets: "
            f"{', '.join(preset_names())}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"config={name!r} holds a {type(config).__name__}, not an object")
    return config


def layers_from_config(
    config: Config,
    *,
    kv_dtype: str | None = None,
    block_size: int | None = None,
    tensor_parallel: int = 1,
    state_cache_mode: CacheMode = "none",
    speculative_tokens: int = 0,
) -> dict[str, LayerSpec | SharedKVSpec | EncoderOnlySpec]:
    """Returns the spec of every layer on one rank, by name and in the order of the model.

    A layer with several caches has several names: ``layers.3.full_attention`` and
    ``layers.3.mamba``.

    Args:
      config: the content of a ``config.json``. Of a multimodal model its ``text_config``
        counts.
      kv_dtype: dtype of keys and values; None: the model's own.
      block_size: tokens per block; None: the family's usual, 16, or 64 for latent attention.
        `plan_cache` takes a multiple of it where a block must hold a recurrent state.
      tensor_parallel: ranks among which KV heads and states are divided.
      state_cache_mode: ``cache_mode`` of a `StateSpec`; of no effect on other layers.
      speculative_tokens: draft tokens, for each of which a recurrent state keeps a block; of
        no effect on other layers.

    Raises:
      TypeError: a configuration or a field of the wrong type.
      ValueError: an architecture or field that is not understood, or a field missing.
    """
    if block_size is not None:
        check_positive(block_size=block_size)
    check_positive(tensor_parallel=tensor_parallel)
    check_count(speculative_tokens=speculative_tokens)
    reader = ConfigReader(config)
    if reader.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={config.get('model_type')!r} (architectures="
            f"{config.get('architectures')}) is not understood; understood: "
            f"{', '.join([*FAMILIES, *WRAPPERS])}. Write its layer specs by hand and pass them to "
            "plan_cache: {'layers.0': FullAttentionSpec(block_size=16, num_kv_heads=8, "
            "head_size=128), ...}"
        )
    options = Options(
        kv_dtype=kv_dtype,
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        state_cache_mode=state_cache_mode,
        speculative_tokens=speculative_tokens,
    )
    layers = FAMILIES[reader.model_type](reader, options)
    reader.check_all_read()
    return layers


def model_len(config: Config) -> int:
    """Returns the model's own longest request, in tokens, YaRN included.

    Args:
      config: the content of a ``config.json``.

    Raises:
      ValueError: the configuration does not say, or names an impossible length.
    """
    fields = flatten(config)
    given = [name for name in LENGTHS if fields.get(name) is not None]
    if not given and model_type_of(config) in CLASS_LENGTHS:
        return CLASS_LENGTHS[model_type_of(config)]
    if not given:
        raise ValueError(f"the configuration lacks {LENGTHS[0]!r}, its longest request")
    check_positive(**{given[0]: fields[given[0]]})
    return max(fields[given[0]], _yarn_len(fields))


def _yarn_len(fields: Config) -> int:
    """Returns the length to which YaRN stretches the trained one; 0 without YaRN.

    Some configurations name the stretched length already, so the larger of the two counts.
    """
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or "yarn" not in (
        scaling.get("rope_type"),
        scaling.get("type"),
    ):
        return 0
    factor, trained = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(trained, int):
        return 0
    if not math.isfinite(factor):
        raise ValueError(f"rope_scaling.factor={factor} must be a finite number")
    return int(factor * trained)


def encoder_len(config: Config) -> int:
    """Returns the longest encoder input, in tokens; 0 without an encoder.

    It is the `Limits.max_encoder_tokens` of a plan for this model.
    """
    length = flatten(config).get("max_source_positions") or 0
    check_count(max_source_positions=length)
    return length
