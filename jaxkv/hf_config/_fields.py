"""The fields of a configuration that describe the language model and its cache. No jax."""

import re
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

# Multimodal wrapper -> the model type of its language model, when that names none.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Parts of the names of fields that decide what attention and state layers store.
CONCERNS = re.compile(
    r"window|chunk|kv|key_value|head_dim|headdim|head_size|layer_type|block_type|pattern"
    r"|layer_config|hybrid|interval|attn_type|attn_layer|full_att|sparse_att|cross_"
    r"|mamba|ssm|conv|d_state|state_size|n_?groups|linear|lora_rank|^index_|indexer"
    r"|compress|no_rope|bidirectional|encoder_decoder|sinks?(_|$)"
)

# Fields that match and change arithmetic only, never a shape or a lifetime.
HARMLESS = frozenset(
    """
    q_lora_rank o_lora_rank mlp_layer_types compress_rope_theta indexer_rope_interleave
    for_llm_compressor gated_linear_unit mamba_use_mlp use_mamba_kernels mamba_dt_rank
    mamba_dt_min mamba_dt_max mamba_dt_limit mamba_dt_init_floor mamba_conv_bias mamba_proj_bias
    mamba_chunk_size mamba_hidden_act mamba_norm_before_gate mamba_rms_norm use_conv_bias
    use_mambapy mamba_inner_layernorms add_bias_linear ssm_multipliers ssm_in_multiplier
    ssm_out_multiplier full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor
    linear_attn_beta_factor layernorm_full_attention_alpha layernorm_full_attention_beta
    layernorm_linear_attention_alpha layernorm_linear_attention_beta mtp_layers_block_type
    mtp_hybrid_override_pattern
    """.split()
)

DTYPES = "torch_dtype", "dtype"


def unread(fields: Config, read: set[str]) -> str | None:
    """Returns the first field that is set, decides what layers store, and was not read."""
    for name, value in fields.items():
        concerns = CONCERNS.search(name) and name not in HARMLESS
        if concerns and value and name not in read:
            return name
    return None


def flatten(config: Config) -> dict[str, Any]:
    """Returns the language model's fields; a multimodal wrapper's fill what it leaves open."""
    _check_config(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {name: value for name, value in config.items() if name != "text_config"}
    if any(text.get(name) is not None for name in DTYPES):  # under either name
        outer = {name: value for name, value in outer.items() if name not in DTYPES}
    # A null of the text model counts: it says that there is no window, for one.
    return outer | dict(text)


def model_type_of(config: Config) -> str:
    """Returns the model type of the language model.

    Raises:
      ValueError: a wrapper around the language model that is not known.
    """
    _check_config(config)
    outer, text = str(config.get("model_type")), config.get("text_config")
    if not isinstance(text, Mapping):
        return WRAPPERS.get(outer, outer)
    if outer not in WRAPPERS:
        raise ValueError(
            f"model_type={outer!r} with a text_config is not understood; understood wrappers: "
            f"{', '.join(WRAPPERS)}. Pass its text_config alone if it is a plain decoder"
        )
    return str(text.get("model_type") or WRAPPERS[outer])


def _check_config(config: Any) -> None:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be the content of a config.json, got {type(config).__name__}; read it "
            "with load_config(path or preset), or call to_dict() on a configuration object"
        )
