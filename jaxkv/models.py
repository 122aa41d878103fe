"""A Hugging Face ``config.json`` -> the layers that keep a cache.

Knows field names of model configurations. Knows nothing of memory or arrays, never
imports jax, and never guesses: an architecture or an attention field that it does not
understand is refused by name.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxkv.checks import check_positive
from jaxkv.groups import hybrid_block_size
from jaxkv.specs import FullAttentionSpec, LayerSpec, StateSpec, canonical_dtype

PRESETS = pathlib.Path(__file__).parent / "presets"

Config = Mapping[str, Any]


def preset_names() -> tuple[str, ...]:
    """Names of the configurations that ship with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def load_config(name: str) -> dict[str, Any]:
    """Reads a configuration: a shipped preset by name, or a path to a ``config.json``.

    Raises:
      ValueError: neither a preset nor a readable JSON object.
    """
    path = PRESETS / f"{name}.json"
    path = path if path.is_file() else pathlib.Path(name)
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"config={name!r} is neither a readable JSON file ({error}) nor a preset; presets: "
            f"{', '.join(preset_names())}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"config={name!r} holds a {type(config).__name__}, not an object")
    return config


def layers_from_config(
    config: Config, *, kv_dtype: str | None = None, block_size: int = 16
) -> dict[str, LayerSpec]:
    """Layer name -> what it stores, in order of the model's layers.

    Args:
      config: the content of a ``config.json``.
      kv_dtype: dtype of keys and values; None: the model's own.
      block_size: tokens per block asked for. Hybrid models get the multiple of it
        whose attention page holds a whole state page.

    Raises:
      ValueError: an architecture or field that is not understood, or a field missing.
    """
    check_positive(block_size=block_size)
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} (architectures={config.get('architectures')}) is not "
            f"understood; understood: {', '.join(_FAMILIES)}. Write its layer specs by hand"
        )
    dtype = _dtype(config) if kv_dtype is None else canonical_dtype(kv_dtype, "kv_dtype")
    return _FAMILIES[model_type](config, dtype, block_size)


def model_len(config: Config) -> int:
    """The model's own longest request, in tokens."""
    return _field(config, "max_position_embeddings")


def _qwen3_next(config: Config, kv_dtype: str, block_size: int) -> dict[str, LayerSpec]:
    """Gated delta net layers, and full attention at every ``full_attention_interval``.

    State of a gated delta net: the last ``conv - 1`` inputs of its convolution over
    queries, keys and values, and a (value x key) matrix for each value head.
    """
    if config.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={config['sliding_window']!r} is not understood for qwen3_next"
        )
    attention = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=_field(config, "num_key_value_heads"),
        head_size=_field(config, "head_dim"),
        dtype=kv_dtype,
    )
    key_heads, key_size = (
        _field(config, "linear_num_key_heads"),
        _field(config, "linear_key_head_dim"),
    )
    value_heads, value_size = (
        _field(config, "linear_num_value_heads"),
        _field(config, "linear_value_head_dim"),
    )
    channels = 2 * key_heads * key_size + value_heads * value_size
    state = StateSpec(
        block_size=block_size,
        shapes=(
            (_field(config, "linear_conv_kernel_dim") - 1, channels),
            (value_heads, value_size, key_size),
        ),
        dtypes=(_dtype(config), config.get("mamba_ssm_dtype", _dtype(config))),
    )
    tokens = hybrid_block_size(attention, state.page_bytes)
    specs = {
        "full_attention": dataclasses.replace(attention, block_size=tokens),
        "linear_attention": dataclasses.replace(state, block_size=tokens),
    }
    kinds = _qwen3_next_kinds(config)
    unknown = set(kinds) - set(specs)
    if unknown:
        raise ValueError(f"layer_types {sorted(unknown)} are not understood for qwen3_next")
    return {f"layers.{i}.{kind}": specs[kind] for i, kind in enumerate(kinds)}


def _qwen3_next_kinds(config: Config) -> list[str]:
    count = _field(config, "num_hidden_layers")
    if "layer_types" in config:
        if len(config["layer_types"]) != count:
            raise ValueError(
                f"layer_types names {len(config['layer_types'])} layers and num_hidden_layers "
                f"says {count}"
            )
        return list(config["layer_types"])
    interval = _field(config, "full_attention_interval")
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]


_FAMILIES = {"qwen3_next": _qwen3_next}


def _field(config: Config, name: str) -> int:
    if name not in config:
        raise ValueError(f"the configuration lacks {name!r}, which its model_type needs")
    check_positive(**{name: config[name]})
    return config[name]


def _dtype(config: Config) -> str:
    for name in ("torch_dtype", "dtype"):
        if name in config:
            return config[name]
    raise ValueError("the configuration names no dtype (torch_dtype or dtype)")
