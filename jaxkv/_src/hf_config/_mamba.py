"""Families with mamba layers, most of them next to attention layers. No jax."""

from collections.abc import Sequence

from jaxkv._src.hf_config._build import (
    FULL,
    MAMBA,
    Layers,
    Options,
    full_attention,
    head_size,
    name_layers,
    state,
)
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import LayerSpec, StateSpec, mamba1_state, mamba2_state

KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "mamba2": MAMBA,
}


def mamba1_spec(
    reader: ConfigReader,
    options: Options,
    inner: int,
    *,
    state_size: str = "mamba_d_state",
    conv: str = "mamba_d_conv",
) -> StateSpec:
    """Returns the spec of a mamba1 state (arXiv 2312.00752) of ``inner`` channels."""
    shapes = mamba1_state(
        inner_size=inner,
        state_size=reader.number(state_size),
        conv_kernel=reader.number(conv),
        tensor_parallel=options.tensor_parallel,
    )
    return state(shapes, (reader.dtype(), reader.dtype()), options)


def jamba(reader: ConfigReader, options: Options) -> Layers:
    """Jamba: mamba1 layers, and full attention in some.

    Layer i is full where ``i % attn_layer_period == attn_layer_offset``.
    """
    inner = reader.number("mamba_expand") * reader.number("hidden_size")
    mamba = mamba1_spec(reader, options, inner)
    period, offset = reader.number("attn_layer_period"), reader.count("attn_layer_offset")
    count = reader.layer_count()
    default = ["attention" if i % period == offset else "mamba" for i in range(count)]
    layers = [(kind,) for kind in reader.layer_kinds(KINDS, default)]
    attention = full_attention(reader, options, width=head_size(reader))
    return name_layers(layers, {FULL: attention, MAMBA: mamba})


def mamba2_spec(
    reader: ConfigReader,
    options: Options,
    *,
    heads: str,
    width: int,
    groups: str,
    state_size: str = "mamba_d_state",
    conv: str = "mamba_d_conv",
    dtype: str | None = None,
) -> StateSpec:
    """Returns the spec of a mamba2 state (arXiv 2405.21060).

    Args:
      reader: the configuration.
      options: the arguments of `layers_from_config`.
      heads, groups, state_size, conv: the family's names of these fields.
      width: width of a head.
      dtype: dtype of the matrix state; None: the model's.
    """
    shapes = mamba2_state(
        num_heads=reader.number(heads),
        head_size=width,
        state_size=reader.number(state_size),
        num_groups=reader.number(groups),
        conv_kernel=reader.number(conv),
        speculative_tokens=options.speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    return state(shapes, (reader.dtype(), dtype or reader.dtype()), options)


def nemotron_h(reader: ConfigReader, options: Options) -> Layers:
    """Nemotron-H: layers M are mamba2 and layers * full attention; layers - and E keep nothing.

    The matrix state is float32 unless ``mamba_ssm_cache_dtype`` says otherwise.
    """
    reader.ignore("chunk_size")
    mamba = mamba2_spec(
        reader,
        options,
        heads="mamba_num_heads",
        width=reader.number("mamba_head_dim"),
        groups="n_groups",
        state_size="ssm_state_size",
        conv="conv_kernel",
        dtype=reader.state_dtype("mamba_ssm_cache_dtype", "float32"),
    )
    attention = full_attention(
        reader, options, width=reader.number("head_dim", "attention_head_dim")
    )
    return name_layers(_nemotron_layers(reader), {FULL: attention, MAMBA: mamba})


def nemotron_puzzle(reader: ConfigReader, options: Options) -> Layers:
    """Nemotron-H Puzzle: Nemotron-H whose layers with experts differ, as ``block_configs`` says.

    vllm/model_executor/models/nemotron_h.py; configs/nemotron_h.py of SGLang 0.5.23.
    """
    blocks = reader.listed("block_configs")
    of_experts = {"block_type", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"}
    if any(not isinstance(block, dict) or {*block} - of_experts for block in blocks):
        raise reader.refusal("block_configs", f"an entry may hold {', '.join(sorted(of_experts))}")
    kinds = [block.get("block_type") for block in blocks]
    if reader.listed("layers_block_type", kinds) != kinds:
        raise reader.refusal("block_configs", "it contradicts layers_block_type")
    reader.default(layers_block_type=kinds)
    reader.ignore("mtp_block_configs")
    return nemotron_h(reader, options)


def _nemotron_layers(reader: ConfigReader) -> list[Sequence[str]]:
    """Returns the caches of every layer, from a list or from letters, which must agree.

    Files of transformers 5 leave out ``num_hidden_layers``, which is the length of the list.
    """
    letters = {"M": MAMBA, "*": FULL, "-": "mlp", "E": "moe"}
    known = KINDS | {"mlp": "mlp", "moe": "moe"}
    spelled = reader.value("hybrid_override_pattern") is not None
    field = "layers_block_type" if reader.has("layers_block_type", null=False) else "layer_types"
    if spelled:
        kinds = reader.letters("hybrid_override_pattern", letters)
    else:
        reader.default(num_hidden_layers=len(reader.listed(field)))
        kinds = reader.layer_kinds(known, field=field)
    if spelled and reader.value(field) is not None:
        if reader.layer_kinds(known, field=field) != kinds:
            raise reader.refusal("hybrid_override_pattern", f"it contradicts {field}")
    return [(kind,) if kind in (MAMBA, FULL) else () for kind in kinds]


def _head_width(reader: ConfigReader) -> int:
    """Returns ``mamba_d_head``; ``"auto"`` divides the inner width among the heads."""
    if reader.value("mamba_d_head") != "auto":
        return reader.number("mamba_d_head")
    inner = reader.number("mamba_expand", default=2) * reader.number("hidden_size")
    if inner % reader.number("mamba_n_heads"):
        raise reader.refusal("mamba_n_heads", f"it must divide the inner width {inner}")
    return inner // reader.number("mamba_n_heads")


def falcon_h1(reader: ConfigReader, options: Options) -> Layers:
    """Falcon-H1: full attention and mamba2 in parallel in every layer."""
    width = _head_width(reader)
    inner = reader.number("mamba_d_ssm")
    if inner != reader.number("mamba_n_heads") * width:
        raise reader.refusal("mamba_d_ssm", "it must be mamba_n_heads * mamba_d_head")
    reader.ignore("mamba_expand")
    mamba = mamba2_spec(
        reader, options, heads="mamba_n_heads", width=width, groups="mamba_n_groups"
    )
    layers = [(FULL, MAMBA)] * reader.layer_count()
    attention = full_attention(reader, options, width=head_size(reader))
    return name_layers(layers, {FULL: attention, MAMBA: mamba})


def granite_hybrid(reader: ConfigReader, options: Options) -> Layers:
    """Granite-4-H and Bamba: mamba2 layers and full attention layers, told apart by lists.

    Granite's dense models have the same type, full attention in every layer, and mamba fields
    without a meaning.
    """
    kinds = _granite_kinds(reader)
    specs: dict[str, LayerSpec] = {}
    if MAMBA in kinds:
        width = _head_width(reader)
        inner = reader.number("mamba_expand", default=2) * reader.number("hidden_size")
        if inner != reader.number("mamba_n_heads") * width:
            raise reader.refusal(
                "mamba_expand", "times hidden_size it must be mamba_n_heads * mamba_d_head"
            )
        specs[MAMBA] = mamba2_spec(
            reader, options, heads="mamba_n_heads", width=width, groups="mamba_n_groups"
        )
    if FULL in kinds:
        specs[FULL] = full_attention(reader, options, width=head_size(reader))
    reader.ignore("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand")
    reader.ignore("mamba_n_groups", "mamba_n_heads", "num_key_value_heads", "head_dim")
    return name_layers([(kind,) for kind in kinds], specs)


def _granite_kinds(reader: ConfigReader) -> list[str]:
    full = reader.listed("attn_layer_indices", [])  # Bamba
    count = reader.layer_count()
    if any(not isinstance(i, int) or not 0 <= i < count for i in full):
        raise reader.refusal("attn_layer_indices", f"numbers of the {count} layers")
    if full or reader.model_type == "bamba":
        return [FULL if i in full else MAMBA for i in range(count)]
    return reader.layer_kinds(KINDS)


def mamba(reader: ConfigReader, options: Options) -> Layers:
    """Mamba and Falcon-Mamba: mamba1 in every layer, ``expand * hidden_size`` channels wide."""
    inner = reader.number("expand", default=2) * reader.number("hidden_size")
    if reader.number("intermediate_size", default=inner) != inner:
        raise reader.refusal("intermediate_size", f"it must be expand * hidden_size={inner}")
    spec = mamba1_spec(reader, options, inner, state_size="state_size", conv="conv_kernel")
    return name_layers([(MAMBA,)] * reader.layer_count(), {MAMBA: spec})


def mamba2(reader: ConfigReader, options: Options) -> Layers:
    """Mamba2 (Codestral-Mamba): mamba2 in every layer."""
    inner = reader.number("expand", default=2) * reader.number("hidden_size")
    if reader.number("num_heads") * reader.number("head_dim") != inner:
        raise reader.refusal("num_heads", f"times head_dim it must be expand * hidden_size={inner}")
    reader.ignore("chunk_size")
    spec = mamba2_spec(
        reader,
        options,
        heads="num_heads",
        width=reader.number("head_dim"),
        groups="n_groups",
        state_size="state_size",
        conv="conv_kernel",
    )
    return name_layers([(MAMBA,)] * reader.layer_count(), {MAMBA: spec})
