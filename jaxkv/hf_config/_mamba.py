"""Families with mamba layers next to attention layers. No jax."""

from collections.abc import Sequence

from jaxkv.hf_config._build import (
    FULL,
    MAMBA,
    Layers,
    Options,
    full_attention,
    head_size,
    name_layers,
    state,
)
from jaxkv.hf_config._reader import ConfigReader
from jaxkv.specs import StateSpec, mamba1_state, mamba2_state

KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "mamba2": MAMBA,
}


def jamba(reader: ConfigReader, options: Options) -> Layers:
    """Jamba: mamba1 layers, and full attention in some.

    Layer i is full where ``i % attn_layer_period == attn_layer_offset``.
    """
    shapes = mamba1_state(
        inner_size=reader.number("mamba_expand") * reader.number("hidden_size"),
        state_size=reader.number("mamba_d_state"),
        conv_kernel=reader.number("mamba_d_conv"),
        tensor_parallel=options.tensor_parallel,
    )
    mamba = state(shapes, (reader.dtype(), reader.dtype()), options)
    period, offset = reader.number("attn_layer_period"), reader.count("attn_layer_offset")
    count = reader.layer_count()
    default = ["attention" if i % period == offset else "mamba" for i in range(count)]
    layers = [(kind,) for kind in reader.layer_kinds(KINDS, default)]
    attention = full_attention(reader, options, width=head_size(reader))
    return name_layers(layers, {FULL: attention, MAMBA: mamba})


def _mamba2(
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
      width: of a head.
      dtype: of the matrix state; None: the model's.
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
    """Nemotron-H: M is mamba2, * full attention, - and E keep nothing.

    The matrix state is float32 unless ``mamba_ssm_cache_dtype`` says otherwise.
    """
    reader.ignore("chunk_size")
    mamba = _mamba2(
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


def _nemotron_layers(reader: ConfigReader) -> list[Sequence[str]]:
    letters = {"M": MAMBA, "*": FULL, "-": "mlp", "E": "moe"}
    if reader.has("hybrid_override_pattern", null=False):
        reader.ignore("layers_block_type", "layer_types")
        kinds = reader.letters("hybrid_override_pattern", letters)
    else:
        known = KINDS | {"mlp": "mlp", "moe": "moe"}
        kinds = reader.layer_kinds(known, field="layers_block_type")
    return [(kind,) if kind in (MAMBA, FULL) else () for kind in kinds]


def _head_width(reader: ConfigReader) -> int:
    """Returns ``mamba_d_head``; ``"auto"`` divides the inner width among the heads."""
    if reader.value("mamba_d_head") != "auto":
        return reader.number("mamba_d_head")
    inner = reader.number("mamba_expand", default=2) * reader.number("hidden_size")
    if inner % reader.number("mamba_n_heads"):
        raise reader.refusal("mamba_n_heads", f"it does not divide the inner width {inner}")
    return inner // reader.number("mamba_n_heads")


def falcon_h1(reader: ConfigReader, options: Options) -> Layers:
    """Falcon-H1: full attention and mamba2 side by side in every layer."""
    width = _head_width(reader)
    inner = reader.number("mamba_d_ssm")
    if inner != reader.number("mamba_n_heads") * width:
        raise reader.refusal("mamba_d_ssm", "it is mamba_n_heads * mamba_d_head")
    reader.ignore("mamba_expand")
    mamba = _mamba2(reader, options, heads="mamba_n_heads", width=width, groups="mamba_n_groups")
    layers = [(FULL, MAMBA)] * reader.layer_count()
    return name_layers(layers, {FULL: full_attention(reader, options), MAMBA: mamba})


def granite_hybrid(reader: ConfigReader, options: Options) -> Layers:
    """Granite-4-H: mamba2 and full attention layers as ``layer_types`` lists them."""
    width = _head_width(reader)
    inner = reader.number("mamba_expand", default=2) * reader.number("hidden_size")
    if inner != reader.number("mamba_n_heads") * width:
        raise reader.refusal("mamba_expand", "hidden_size times it is n_heads * d_head")
    mamba = _mamba2(reader, options, heads="mamba_n_heads", width=width, groups="mamba_n_groups")
    reader.ignore("layers_block_type")
    field = "layer_types" if reader.has("layer_types") else "layers_block_type"
    layers = [(kind,) for kind in reader.layer_kinds(KINDS, field=field)]
    attention = full_attention(reader, options, width=head_size(reader))
    return name_layers(layers, {FULL: attention, MAMBA: mamba})


def zamba2(reader: ConfigReader, options: Options) -> Layers:
    """Zamba2: mamba2 everywhere, and before it full attention in ``hybrid`` layers.

    Two attention blocks share their weights among all hybrid layers, yet every use has
    a cache of its own. Attention sees hidden state and embedding together, hence heads
    of ``2 * hidden / heads``.
    """
    reader.ignore("hybrid_layer_ids", "chunk_size", "kv_channels", "mamba_dt_rank")
    hidden, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    inner, mamba_heads = reader.number("mamba_expand") * hidden, reader.number("n_mamba_heads")
    width = reader.number("mamba_headdim", default=inner // mamba_heads)
    mamba = _mamba2(reader, options, heads="n_mamba_heads", width=width, groups="mamba_ngroups")
    known = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": "hybrid"}
    kinds = reader.layer_kinds(known, field="layers_block_type")
    layers = [(FULL, MAMBA) if kind == "hybrid" else (MAMBA,) for kind in kinds]
    attention_width = reader.number("attention_head_dim", default=2 * hidden // heads)
    attention = full_attention(reader, options, width=attention_width)
    return name_layers(layers, {FULL: attention, MAMBA: mamba})


FAMILIES = {
    "jamba": jamba,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
    "zamba2": zamba2,
}
