"""Families with gated delta nets, Kimi delta attention or linear attention. No jax."""

import dataclasses

from jaxkv._src.hf_config._build import (
    FULL,
    LINEAR,
    MLA,
    MLA_BLOCK,
    SLIDING,
    Layers,
    Options,
    full_attention,
    head_size,
    latent_attention,
    name_layers,
    sliding,
    state,
)
from jaxkv._src.hf_config._fields import Config
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import (
    LayerSpec,
    StateSpec,
    gated_delta_net_state,
    kda_state,
    linear_attention_state,
)

CONV = "linear_conv_kernel_dim"


def qwen3_next(reader: ConfigReader, options: Options) -> Layers:
    """Qwen3-Next, Qwen3.5 and OLMo hybrid: gated delta nets, and some layers of full attention.

    Every ``full_attention_interval``-th layer is full, unless ``layer_types`` lists the kinds.
    The state of a gated delta net (arXiv 2412.06464) is the last ``conv - 1`` inputs of its
    convolution over queries, keys and values, and a (value x key) matrix for each value head.
    ``mamba_ssm_dtype`` is the dtype of the matrices. Without that field, Qwen3-Next keeps them
    in the model's dtype; Qwen3.5 must name it.
    """
    delta_net = qwen3_next_state(reader, options)
    width = head_size(reader) if reader.model_type == "olmo_hybrid" else None
    attention = full_attention(reader, options, width=width)
    layers = [(kind,) for kind in _qwen3_next_kinds(reader)]
    return name_layers(layers, {FULL: attention, LINEAR: delta_net})


def berrylm(reader: ConfigReader, options: Options) -> Layers:
    """BerryLM: Kimi delta attention with the shapes of gated delta nets, and full attention.

    vllm/model_executor/models/berrylm.py: matrices are float32. Every fourth layer is full, unless
    the file says otherwise.
    """
    reader.default(full_attention_interval=4)
    kinds = reader.layer_kinds({FULL: FULL, LINEAR: LINEAR}, by_interval(reader))
    reader.default(mamba_ssm_dtype="float32")
    specs = {FULL: full_attention(reader, options), LINEAR: qwen3_next_state(reader, options)}
    return name_layers([(kind,) for kind in kinds], specs)


def gigachat(reader: ConfigReader, options: Options) -> Layers:
    """GigaChat 3.5: gated delta nets, and the latent attention of ``full_attention_layers``.

    vllm/model_executor/models/gigachat3_5.py. Those are numbered from 0; a file may have
    ``layer_types`` instead, or null as ``linear_attention_type``: all layers are full.
    """
    count, known = reader.layer_count(), {FULL: MLA, LINEAR: LINEAR}
    reader.expect("linear_use_short_conv", True)
    reader.expect("num_krope_heads", 1)
    full = reader.listed("full_attention_layers", [])
    if reader.has("linear_attention_type") and reader.value("linear_attention_type") is None:
        full = list(range(count))
    if any(not isinstance(i, int) or not 0 <= i < count for i in full):
        raise reader.refusal(
            "full_attention_layers", f"it must hold numbers of layers below {count}"
        )
    default = [FULL if i in full else LINEAR for i in range(count)]
    kinds = reader.layer_kinds(known, default)
    if full and kinds != [known[kind] for kind in default]:
        raise reader.refusal("full_attention_layers", "it contradicts layer_types")
    if MLA not in kinds:
        raise reader.lacks("full_attention_layers")
    specs: dict[str, LayerSpec] = {MLA: latent_attention(reader, options)}
    if LINEAR in kinds:
        specs[LINEAR] = qwen3_next_state(reader, options)
    return name_layers([(kind,) for kind in kinds], specs)


def lara(reader: ConfigReader, options: Options) -> Layers:
    """Lara-4-Mini: gated delta nets, windows and full attention in turn, by ``layer_types``.

    modeling_lara_mini.py of transformers 5.24; without the list, its pattern of five layers.
    """
    default = [LARA[i % len(LARA)] for i in range(reader.layer_count())]
    kinds = reader.layer_kinds({FULL: FULL, SLIDING: SLIDING, LINEAR: LINEAR}, default)
    attention = full_attention(reader, options)
    window = sliding(attention, reader.number("sliding_window", default=512))
    specs = {FULL: attention, SLIDING: window, LINEAR: qwen3_next_state(reader, options)}
    return name_layers([(kind,) for kind in kinds], specs)


LARA = LINEAR, SLIDING, LINEAR, FULL, SLIDING


def qwen3_next_state(reader: ConfigReader, options: Options) -> StateSpec:
    """Returns the spec of a gated delta net from its usual fields."""
    shapes = gated_delta_net_state(
        num_key_heads=reader.number("linear_num_key_heads"),
        num_value_heads=reader.number("linear_num_value_heads"),
        key_size=reader.number("linear_key_head_dim"),
        value_size=reader.number("linear_value_head_dim"),
        conv_kernel=reader.number("linear_conv_kernel_dim"),
        speculative_tokens=options.speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    default = None if reader.model_type.startswith("qwen3_5") else reader.dtype()
    matrix_dtype = reader.state_dtype("mamba_ssm_dtype", default)
    return state(shapes, (reader.dtype(), matrix_dtype), options)


def _qwen3_next_kinds(reader: ConfigReader) -> list[str]:
    known = {FULL: FULL, LINEAR: LINEAR}
    if reader.value("layer_types") is not None:
        kinds = reader.layer_kinds(known)
        if reader.value("full_attention_interval") is not None and kinds != by_interval(reader):
            raise reader.refusal("full_attention_interval", "it contradicts layer_types")
        return kinds
    return by_interval(reader)


def by_interval(reader: ConfigReader) -> list[str]:
    interval, count = reader.number("full_attention_interval"), reader.layer_count()
    return [LINEAR if (i + 1) % interval else FULL for i in range(count)]


def kimi_linear(reader: ConfigReader, options: Options) -> Layers:
    """Kimi-Linear (arXiv 2510.26692): Kimi delta attention, and some layers of latent attention.

    The matrix state is float32. ``full_attn_layers`` in ``linear_attn_config`` numbers the latent
    layers from 1; files of transformers 5 have ``layer_types`` instead.
    """
    if reader.value("linear_attn_config") is None:
        if reader.value("layer_types") is None:
            raise reader.lacks("linear_attn_config")
        kinds = reader.layer_kinds({FULL: MLA, LINEAR: LINEAR})
        delta = delta_attention(reader, options, "linear_num_heads", "linear_head_dim", CONV)
    else:
        linear = reader.inner("linear_attn_config")
        delta = delta_attention(
            linear, options, "num_heads", "head_dim", "short_conv_kernel_size", reader
        )
        kinds = _listed_kinds(reader, linear)
        linear.check_all_read()
    specs = {MLA: latent_attention(reader, options), LINEAR: delta}
    return name_layers([(kind,) for kind in kinds], specs)


def _listed_kinds(reader: ConfigReader, linear: ConfigReader) -> list[str]:
    """Returns the kind of every layer from two lists of layer numbers, which begin at 1."""
    full, rest = linear.listed("full_attn_layers"), linear.listed("kda_layers")
    layers = range(1, reader.layer_count() + 1)
    if len(full) + len(rest) != len(layers) or any(i not in full + rest for i in layers):
        raise reader.refusal(
            "linear_attn_config", "its two lists must name every layer once, from 1"
        )
    return [MLA if i in full else LINEAR for i in layers]


def delta_attention(
    reader: ConfigReader,
    options: Options,
    heads: str,
    width: str,
    conv: str,
    outer: ConfigReader | None = None,
) -> StateSpec:
    """Returns the spec of Kimi delta attention from the fields of these names."""
    if options.replay == "auto":
        options = dataclasses.replace(options, replay=0)
    elif options.replay:
        raise ValueError(
            f"replay={options.replay}: the layers of this model have a decay for each key channel, "
            "which are not replayed; pass replay=0"
        )
    shapes = kda_state(
        num_heads=reader.number(heads),
        head_size=reader.number(width),
        conv_kernel=reader.number(conv),
        speculative_tokens=options.speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    dtypes = (outer or reader).dtype(), "float32"
    return state(shapes, dtypes, options, block_size=MLA_BLOCK)


def bailing_hybrid(reader: ConfigReader, options: Options) -> Layers:
    """Ling 2.5 and 3: linear attention, and latent attention in the last layer of every group.

    Ling 3 has Kimi delta attention, and latent attention in the layers past the last whole group,
    too, as in vLLM 0.33. Ling 2.5 has lightning attention, whose state is a matrix for each head;
    its files have the same ``model_type``, and are told apart by ``architectures`` or, without
    them, by having no convolution.
    """
    group, count = reader.number("layer_group_size"), reader.layer_count()
    last = count if is_lightning(reader.fields) else count // group * group
    kinds = [LINEAR if (i + 1) % group and i < last else FULL for i in range(count)]
    kinds = reader.layer_kinds({FULL: MLA, LINEAR: LINEAR}, kinds)
    width = "head_dim" if reader.value("linear_head_dim") is None else "linear_head_dim"
    heads = "linear_num_heads" if reader.has("linear_num_heads") else "num_attention_heads"
    if is_lightning(reader.fields):
        shapes = linear_attention_state(
            num_heads=reader.number(heads),
            head_size=head_size(reader),
            tensor_parallel=options.tensor_parallel,
        )
        linear = state(shapes, (reader.dtype(),), options, block_size=MLA_BLOCK)
    else:
        conv = CONV if reader.has(CONV) else "short_conv_kernel_size"
        reader.expect("short_conv_kernel_size", reader.number(conv))
        linear = delta_attention(reader, options, heads, width, conv)
    specs = {MLA: latent_attention(reader, options), LINEAR: linear}
    return name_layers([(kind,) for kind in kinds], specs)


def is_lightning(fields: Config) -> bool:
    """Returns whether a file of ``bailing_hybrid`` is one of Ling 2.5."""
    named = "".join(map(str, fields.get("architectures") or ()))
    if "MoeV2" in named or "MoeV3" in named:
        return "MoeV2" in named
    return fields.get("short_conv_kernel_size") is None and fields.get(CONV) is None


def minimax(reader: ConfigReader, options: Options) -> Layers:
    """MiniMax-Text-01 and M1: linear attention, and full attention in some layers.

    ``attn_type_list`` has 0 for a linear layer, which keeps a float32 matrix for each head, and 1
    for a full one.
    """
    shapes = linear_attention_state(
        num_heads=reader.number("num_attention_heads"),
        head_size=head_size(reader),
        tensor_parallel=options.tensor_parallel,
    )
    matrices = state(shapes, ("float32",), options)
    if reader.has("attn_type_list"):
        kinds = reader.layer_kinds({"0": LINEAR, "1": FULL}, field="attn_type_list")
    else:
        kinds = reader.layer_kinds({FULL: FULL, LINEAR: LINEAR})
    attention = full_attention(reader, options, width=head_size(reader))
    return name_layers([(kind,) for kind in kinds], {FULL: attention, LINEAR: matrices})
