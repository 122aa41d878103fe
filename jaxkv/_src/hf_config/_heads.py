"""Families with their own fields for the heads of keys and values. No jax."""

from collections.abc import Mapping

from jaxkv._src.hf_config._build import (
    FULL,
    SLIDING,
    Layers,
    Options,
    full_attention,
    head_size,
    name_layers,
    sliding,
)
from jaxkv._src.hf_config._dense import attention_layers, dense
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._windows import by_list, window_kinds
from jaxkv._src.specs import FullAttentionSpec

# Fields of an attention block of Nemotron-NAS that no published model sets.
NAS_UNKNOWN = "window_length", "num_sink_tokens", "sparsify", "use_prefill_window_in_sink_attention"


def heads_of_all(reader: ConfigReader, options: Options) -> Layers:
    """Families without grouped queries: every head has keys and values of its own."""
    heads = reader.number("num_attention_heads")
    spec = full_attention(
        reader, options, heads=heads, width=reader.per_head("hidden_size", "num_attention_heads")
    )
    return name_layers([[FULL]] * reader.layer_count(), {FULL: spec})


def one_head(reader: ConfigReader, options: Options) -> Layers:
    """Falcon and GPT-BigCode: with ``multi_query``, all heads share one KV head.

    Falcon's new decoder has ``num_kv_heads`` instead.
    """
    several = reader.expect("new_decoder_architecture", True, False)
    shared = reader.expect("multi_query", True, False)
    heads = reader.number("num_attention_heads")
    if several:
        heads = reader.number("num_key_value_heads")
    elif shared or shared is None:
        heads = 1
    reader.ignore("num_key_value_heads")
    width = reader.per_head("hidden_size", "num_attention_heads")
    spec = full_attention(reader, options, heads=heads, width=width)
    return name_layers([[FULL]] * reader.layer_count(), {FULL: spec})


def chatglm(reader: ConfigReader, options: Options) -> Layers:
    """ChatGLM2 to GLM-4 of 2024: ``multi_query_group_num`` KV heads of ``kv_channels``."""
    if not reader.expect("multi_query_attention", True, False):
        raise reader.refusal("multi_query_attention", "files of ChatGLM2 and later have it")
    spec = full_attention(
        reader,
        options,
        heads=reader.number("multi_query_group_num"),
        width=reader.number("kv_channels"),
    )
    return name_layers([[FULL]] * reader.layer_count(), {FULL: spec})


def attn_config(reader: ConfigReader, options: Options) -> Layers:
    """DBRX and MPT: ``attn_config`` gives the number of KV heads."""
    heads = reader.number("num_attention_heads")
    inner = reader.inner("attn_config")
    kind = inner.expect(
        "attn_type", "multihead_attention", "multiquery_attention", "grouped_query_attention"
    )
    if kind in (None, "grouped_query_attention"):
        default = 1 if reader.model_type == "dbrx" else heads  # as their classes assume
        heads = inner.number("kv_n_heads", default=default if kind is None else None)
    elif kind == "multiquery_attention":
        heads = 1
    inner.ignore("kv_n_heads")
    inner.check_all_read()
    reader.ignore("num_key_value_heads")
    width = reader.per_head("hidden_size", "num_attention_heads")
    spec = full_attention(reader, options, heads=heads, width=width)
    return name_layers([[FULL]] * reader.layer_count(), {FULL: spec})


def kv_channels(reader: ConfigReader, options: Options) -> Layers:
    """JetMoE: KV heads of ``kv_channels``."""
    spec = full_attention(reader, options, width=reader.number("kv_channels"))
    return name_layers([[FULL]] * reader.layer_count(), {FULL: spec})


def gpt_neo(reader: ConfigReader, options: Options) -> Layers:
    """GPT-Neo: ``attention_types`` repeats patterns of global and local layers."""
    kinds: list[str] = []
    for entry in reader.listed("attention_types"):
        pair = entry if isinstance(entry, (list, tuple)) else ()
        if len(pair) != 2 or not isinstance(pair[0], list) or not isinstance(pair[1], int):
            raise reader.refusal("attention_types", "understood: [[[kinds], times], ...]")
        kinds += [str(kind) for kind in pair[0]] * min(pair[1], 1_000)
    known = {"global": FULL, "local": SLIDING}
    if reader.listed("attention_layers", kinds) != kinds:
        raise reader.refusal("attention_types", "it contradicts attention_layers")
    kinds = reader.layer_kinds(known, kinds, field="attention_layers")
    return attention_layers(reader, options, kinds, _own_heads, window="window_size")


def _own_heads(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    heads = reader.number("num_attention_heads")
    width = reader.per_head("hidden_size", "num_attention_heads")
    return full_attention(reader, options, heads=heads, width=width)


def hunyuan(reader: ConfigReader, options: Options) -> Layers:
    """Hunyuan: full attention. Cross-layer attention, which shares caches, is refused."""
    reader.expect("use_cla", False)
    if reader.expect("use_mla", False) is False:
        reader.ignore("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    reader.ignore("cla_share_factor")
    if reader.value("attention_head_dim") is not None:
        reader.expect("head_dim", reader.number("attention_head_dim"))
        reader.default(head_dim=reader.number("attention_head_dim"))
    return dense(reader, options)


def mimo_attention(reader: ConfigReader, options: Options, kind: str) -> FullAttentionSpec:
    """Returns the spec of a MiMo-V2 layer, which has twice the KV heads if it has a window."""
    heads = reader.number("num_key_value_heads") * (2 if kind == SLIDING else 1)
    return full_attention(reader, options, heads=heads, value_width=reader.number("v_head_dim"))


def mimo_v2(reader: ConfigReader, options: Options) -> Layers:
    """MiMo-V2, 2.5 and 2.6: windows and full layers, with values that are narrower than the keys.

    Files of its makers write 1 in ``hybrid_layer_pattern`` for a layer with a window, which is
    ``sliding_window_size`` tokens before the current one.
    """
    if reader.value("hybrid_layer_pattern") is None and reader.model_type != "mimo_v2_flash":
        raise reader.lacks("hybrid_layer_pattern")
    if reader.value("hybrid_layer_pattern") is None:
        return attention_layers(reader, options, window_kinds(reader, by_list), mimo_attention)
    known = {"0": FULL, "1": SLIDING}
    kinds = reader.layer_kinds(known, field="hybrid_layer_pattern")
    if kinds != reader.layer_kinds({FULL: FULL, SLIDING: SLIDING}, kinds):
        raise reader.refusal("hybrid_layer_pattern", "it contradicts layer_types")
    full = mimo_attention(reader, options, FULL)
    local = full_attention(
        reader,
        options,
        heads=reader.number("swa_num_key_value_heads"),
        width=reader.number("swa_head_dim"),
        value_width=reader.number("swa_v_head_dim"),
    )
    window = reader.number("sliding_window_size")
    reader.expect("sliding_window", window)
    reader.ignore("attention_chunk_size", "add_swa_attention_sink_bias")
    reader.ignore("add_full_attention_sink_bias")
    specs = {FULL: full, SLIDING: sliding(local, window + 1)}
    return name_layers([[kind] for kind in kinds], specs)


def nemotron_nas(reader: ConfigReader, options: Options) -> Layers:
    """Nemotron-NAS: ``block_configs`` gives the layers that attend, and the queries per KV head."""
    blocks = reader.listed("block_configs")
    reader.check_layer_count("block_configs", len(blocks))
    heads, width = reader.number("num_attention_heads"), head_size(reader)
    layers: Layers = {}
    for i, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise reader.refusal("block_configs", "each block must say its attention")
        if set_fields := [name for name in NAS_UNKNOWN if attention.get(name)]:
            raise reader.refusal("block_configs", f"{set_fields} of an attention must be unset")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        queries = attention.get("n_heads_in_group")
        if not isinstance(queries, int) or queries < 1 or heads % queries:
            raise reader.refusal("block_configs", f"n_heads_in_group={queries!r} of {heads} heads")
        layers[f"layers.{i}.{FULL}"] = full_attention(
            reader, options, heads=heads // queries, width=width
        )
    reader.ignore("num_key_value_heads", "num_key_value_heads_per_layer")
    return layers
