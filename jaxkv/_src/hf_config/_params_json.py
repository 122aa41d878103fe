"""Mistral's ``params.json``, by the names of Transformers. No jax.

The names, and what follows from them, are those of vllm/transformers_utils/configs/mistral.py,
version 0.33. Other fields stay as they are, so that those which decide what a cache stores are
refused.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv._src.internal.text import shown

NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
}
# Where some experts are shared by all tokens, or vectors are latent, a model is DeepSeek-V3's.
OF_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "num_experts_per_tok": "num_experts_per_tok",
}


def is_mistral(params: Mapping[str, Any]) -> bool:
    """Returns whether a file without a ``model_type`` is Mistral's: Meta's names no hidden_dim."""
    return "model_type" not in params and {"dim", "n_layers", "head_dim", "hidden_dim"} <= {*params}


def from_mistral(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``params.json`` as the ``config.json`` of the same model."""
    text = {NAMES.get(name, name): value for name, value in params.items()}
    text.setdefault("tie_word_embeddings", False)
    text.pop("max_batch_size", None)
    longest = text.pop("max_seq_len", None)  # Mistral-Large-3 names both, and may be asked for less
    if longest is not None and text.get("max_position_embeddings") is None:
        text["max_position_embeddings"] = longest
    _give_kinds(text)
    _give_windows(text)
    if yarn := text.pop("yarn", None):
        names = "factor", "original_max_position_embeddings"
        scaling = {name: yarn[name] for name in names if name in yarn}
        text["rope_parameters"] = {"rope_type": "yarn", **scaling}
    if quantization := text.pop("quantization", None):
        text["quantization_config"] = _quantization(quantization)
    return _with_towers(text)


def _give_kinds(text: dict[str, Any]) -> None:
    """Gives a model its type, and its experts and latent vectors their names."""
    experts, is_latent = text.pop("moe", None), bool(text.get("qk_nope_head_dim"))
    if experts is not None and not isinstance(experts, Mapping):
        raise ValueError(f"moe={shown(experts)} of a params.json must be an object")
    if is_latent or (experts or {}).get("num_shared_experts"):
        text["model_type"] = "deepseek_v3"
        if is_latent:
            text.pop("head_dim", None)  # of its queries
        if experts:
            text |= {OF_EXPERTS[name]: v for name, v in experts.items() if name in OF_EXPERTS}
        else:
            depth = text["num_hidden_layers"]
            text |= {"n_routed_experts": None, "first_k_dense_replace": depth}
    elif experts:
        text |= {"model_type": "mixtral", "num_local_experts": experts.get("num_experts")}
        text["num_experts_per_tok"] = experts.get("num_experts_per_tok")
    else:
        text["model_type"] = "ministral3"


def _give_windows(text: dict[str, Any]) -> None:
    """Gives layers their kinds, where a list has their windows in turn: null for none."""
    windows = text.get("sliding_window")
    if not isinstance(windows, list):
        text.setdefault("sliding_window", None)
        return
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"sliding_window={shown(windows)} of a params.json: windows must be alike")
    depth = text["num_hidden_layers"]
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    text["layer_types"] = (kinds * depth)[:depth] if kinds else None
    text["sliding_window"] = next(iter(sizes), None)


def _quantization(given: Any) -> Any:
    """Returns the ``quantization_config`` of a file's own form."""
    if not isinstance(given, Mapping) or "qformat_weight" not in given:
        return given
    if given["qformat_weight"] != "fp8_e4m3":
        raise ValueError(f"quantization={shown(given)} of a params.json is not understood")
    dynamic = given.get("qscheme_act") == "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "dynamic" if dynamic else "static"}


def _with_towers(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the language model alone, or in the wrapper of its encoder of images or sounds."""
    towers = text.pop("multimodal", None) or {}
    images = towers.get("vision_encoder_args") or text.pop("vision_encoder", None)
    sounds = (towers.get("whisper_model_args") or {}).get("encoder_args")
    if sounds and sounds.get("causal"):
        return {"model_type": "voxtral_realtime", "text_config": text, "audio_config": sounds}
    if sounds:
        audio = {NAMES.get(name, name): value for name, value in sounds.items()}
        return {"model_type": "voxtral", "text_config": text, "audio_config": audio}
    if images:
        vision = {"model_type": "pixtral", **images}
        return {"model_type": "mistral3", "text_config": text, "vision_config": vision}
    return text
