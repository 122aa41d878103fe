"""Families with gated delta nets, Kimi delta attention or linear attention. No jax."""

from jaxkv.hf_config._build import (
    FULL,
    LINEAR,
    MLA,
    MLA_BLOCK,
    Layers,
    Options,
    full_attention,
    latent_attention,
    name_layers,
    state,
)
from jaxkv.hf_config._reader import ConfigReader
from jaxkv.specs import gated_delta_net_state, kda_state, linear_attention_state


def qwen3_next(reader: ConfigReader, options: Options) -> Layers:
    """Qwen3-Next and Qwen3.5: gated delta nets, and some layers of full attention.

    Every ``full_attention_interval``-th layer is full, unless ``layer_types`` lists the kinds.
    State of a gated delta net (arXiv 2412.06464): the last ``conv - 1`` inputs of its
    convolution over queries, keys and values, and a (value x key) matrix for each value
    head, in ``mamba_ssm_dtype``. Qwen3-Next without that field keeps it in the model's
    dtype; Qwen3.5 must name it.
    """
    shapes = gated_delta_net_state(
        num_key_heads=reader.number("linear_num_key_heads"),
        num_value_heads=reader.number("linear_num_value_heads"),
        key_size=reader.number("linear_key_head_dim"),
        value_size=reader.number("linear_value_head_dim"),
        conv_kernel=reader.number("linear_conv_kernel_dim"),
        speculative_tokens=options.speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    default = reader.dtype() if reader.model_type == "qwen3_next" else None
    matrix_dtype = reader.state_dtype("mamba_ssm_dtype", default)
    delta_net = state(shapes, (reader.dtype(), matrix_dtype), options)
    attention = full_attention(reader, options)
    layers = [(kind,) for kind in _qwen3_next_kinds(reader)]
    return name_layers(layers, {FULL: attention, LINEAR: delta_net})


def _qwen3_next_kinds(reader: ConfigReader) -> list[str]:
    known = {FULL: FULL, LINEAR: LINEAR}
    if reader.value("layer_types") is not None:
        reader.ignore("full_attention_interval")
        return reader.layer_kinds(known)
    interval = reader.number("full_attention_interval")
    count = reader.layer_count()
    return [LINEAR if (i + 1) % interval else FULL for i in range(count)]


def kimi_linear(reader: ConfigReader, options: Options) -> Layers:
    """Kimi-Linear (arXiv 2510.26692): Kimi delta attention, and some latent attention.

    The matrix state is float32. ``full_attn_layers`` counts the latent layers from 1.
    """
    linear = reader.inner("linear_attn_config")
    shapes = kda_state(
        num_heads=linear.number("num_heads"),
        head_size=linear.number("head_dim"),
        conv_kernel=linear.number("short_conv_kernel_size"),
        speculative_tokens=options.speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    delta = state(shapes, (reader.dtype(), "float32"), options, block_size=MLA_BLOCK)
    full, rest = linear.listed("full_attn_layers"), linear.listed("kda_layers")
    linear.check_all_read()
    layers = range(1, reader.layer_count() + 1)
    if len(full) + len(rest) != len(layers) or any(i not in full + rest for i in layers):
        raise reader.refusal("linear_attn_config", "its two lists name every layer once, from 1")
    kinds = [(MLA,) if i in full else (LINEAR,) for i in layers]
    return name_layers(kinds, {MLA: latent_attention(reader, options), LINEAR: delta})


def minimax(reader: ConfigReader, options: Options) -> Layers:
    """MiniMax-Text-01 and M1: linear attention, and full attention in some layers.

    ``attn_type_list`` has 0 for a linear layer, which keeps a float32 matrix for each head,
    and 1 for a full one.
    """
    shapes = linear_attention_state(
        num_heads=reader.number("num_attention_heads"),
        head_size=reader.number("head_dim"),
        tensor_parallel=options.tensor_parallel,
    )
    matrices = state(shapes, ("float32",), options)
    if reader.has("attn_type_list"):
        kinds = reader.layer_kinds({"0": LINEAR, "1": FULL}, field="attn_type_list")
    else:
        kinds = reader.layer_kinds({FULL: FULL, LINEAR: LINEAR})
    attention = full_attention(reader, options)
    return name_layers([(kind,) for kind in kinds], {FULL: attention, LINEAR: matrices})


FAMILIES = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "kimi_linear": kimi_linear,
    "minimax_text_01": minimax,
    "minimax_m1": minimax,
    "minimax": minimax,
}
