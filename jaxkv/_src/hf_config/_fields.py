"""The fields of a configuration that describe the language model and its cache. No jax."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._src.hf_config._wrappers import INNER, NOT_TEXT, WRAPPERS

Config = Mapping[str, Any]

# Parts of names. A field with one may decide what attention and state layers store.
CONCERNS = re.compile(
    r"window|chunk|kv|key_value|head_dim|headdim|head_size|layer_type|block_type|pattern"
    r"|layer_config|per_layer_config|block_config|hybrid|interval|attn_type|attn_layer|full_att"
    r"|sparse_att|sparse_config|cross_|multi_query|mamba|ssm|conv|d_state|state_size|n_?groups"
    r"|linear|lora_rank|^index_|indexer|compress|no_rope|bidirectional|encoder_decoder"
    r"|other_setting|use_cla$|use_mla$|sinks?(_|$)"
)

# Fields that match, but change only arithmetic: no shape, and not how long tokens are kept.
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
    mtp_hybrid_override_pattern clip_qkv qkv_bias kv_layernorm activation_sparsity_pattern
    use_qkv_bias attention_qkv_bias add_qkv_bias no_kv_bias conv_bias hidden_mamba_act
    chunk_size_feed_forward multi_query_group_norm use_linear_bias linear_bias
    bias_linear tp_columnwise_linear linear_a_log_max linear_a_log_min linear_dt_max linear_dt_min
    linear_allow_neg_eigval linear_use_gate compressor_rope_theta num_kv_groups linear_dt_init_floor
    moe_layer_interval mla_scale_kv_lora conv_use_xavier_init
    index_share_for_mtp_iteration linear_silu share_encoder_decoder_embeddings spatial_conv_size
    temporal_conv_size
    """.split()
)

DTYPES = "torch_dtype", "dtype"
# Class of a model -> model type of its files, which name none.
BY_CLASS = {"LongcatCausalLM": "longcat"}
# Fields that a language model takes from its wrapper, unless it has them itself.
INHERITED = frozenset(
    {*DTYPES, "quantization_config", "compression_config", "model_type", "architectures"}
)


def unread(fields: Config, read: set[str]) -> list[str]:
    """Returns the fields that are set, decide what layers store, and were not read."""
    return [
        name
        for name, value in fields.items()
        if value and name not in read and name not in HARMLESS and CONCERNS.search(name)
    ]


def check_config(config: Any) -> None:
    """Raises TypeError unless given the content of a ``config.json``."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be the content of a config.json, got {type(config).__name__}; read it "
            "with load_config(path or preset), or call to_dict() on a configuration object"
        )


def inner_config(config: Config) -> tuple[str, Config] | None:
    """Returns the name and content of the field that holds the language model, or None."""
    check_config(config)
    for name in INNER:
        if isinstance(config.get(name), Mapping):
            return name, config[name]
    return None


def nested(config: Config) -> Iterable[Config]:
    """Yields a configuration without its language model's, then the latter, and so on inwards."""
    found = inner_config(config)
    if found is None:
        yield config
        return
    name, inner = found
    yield {key: value for key, value in config.items() if key not in (name, *NOT_TEXT)}
    yield from nested(inner)


def flatten(config: Config) -> dict[str, Any]:
    """Returns the language model's fields, and those that it inherits from its wrapper.

    They are few, because Transformers builds the language model from its own fields alone: the
    ``head_dim`` of a wrapper may belong to its audio encoder.
    """
    fields: dict[str, Any] = {}
    for level in nested(config):
        if any(level.get(name) is not None for name in DTYPES):  # under either name
            fields = {name: value for name, value in fields.items() if name not in DTYPES}
        inherited = {n: v for n, v in fields.items() if n in INHERITED and level.get(n) is None}
        fields = {**level, **inherited}
    return fields


def outside(config: Config) -> dict[str, Any]:
    """Returns the fields of the wrappers around the language model."""
    *outer, inner = nested(config)
    return {name: v for level in outer for name, v in level.items() if name not in inner}


def contradictions(config: Config) -> dict[str, Any]:
    """Returns the fields that a wrapper and its language model give different values.

    The values are the wrapper's. A null of the language model contradicts, too: it may say that
    there is no window.
    """
    *outer, inner = nested(config)
    return {
        name: value
        for level in outer
        for name, value in level.items()
        if name not in INHERITED and value is not None and inner.get(name, value) != value
    }


def model_type_of(config: Config) -> str:
    """Returns the model type of the language model.

    Raises:
      ValueError: an unknown wrapper around the language model.
    """
    found, outer = inner_config(config), str(config.get("model_type"))
    if config.get("model_type") is None:
        classes = config.get("architectures")
        names = classes if isinstance(classes, list) else []
        outer = next((BY_CLASS[name] for name in names if name in BY_CLASS), outer)
    if found is None:
        return WRAPPERS.get(outer, outer)
    name, inner = found
    if outer not in WRAPPERS:
        raise ValueError(
            f"model_type={outer!r} with a {name} is none of the {len(WRAPPERS)} wrappers that are "
            f"understood; pass the content of {name} if the rest of the model keeps no cache"
        )
    return model_type_of({**inner, "model_type": inner.get("model_type") or WRAPPERS[outer]})
