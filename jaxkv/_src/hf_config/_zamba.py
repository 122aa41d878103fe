"""Zamba: mamba in every layer, and attention blocks that share weights but no cache. No jax."""

from jaxkv._src.hf_config._build import FULL, MAMBA, Layers, Options, full_attention, name_layers
from jaxkv._src.hf_config._mamba import mamba1_spec, mamba2_spec
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import StateSpec


def zamba(reader: ConfigReader, options: Options) -> Layers:
    """Zamba: mamba1 in every layer; full attention comes before it in ``hybrid`` layers."""
    count = reader.layer_count()
    period, offset = reader.number("attn_layer_period"), reader.count("attn_layer_offset")
    rest = ["hybrid" if i % period == offset else "mamba" for i in range(count - 3)]
    reader.default(layers_block_type=["mamba", "mamba", "hybrid", *rest][:count])
    reader.ignore("n_mamba_heads")
    inner = reader.number("mamba_expand") * reader.number("hidden_size")
    return _shared_attention(reader, options, mamba1_spec(reader, options, inner))


def zamba2(reader: ConfigReader, options: Options) -> Layers:
    """Zamba2: mamba2 in every layer; full attention comes before it in ``hybrid`` layers."""
    reader.ignore("hybrid_layer_ids", "chunk_size", "kv_channels", "mamba_dt_rank", "lora_rank")
    hidden = reader.number("hidden_size")
    inner, mamba_heads = reader.number("mamba_expand") * hidden, reader.number("n_mamba_heads")
    width = reader.number("mamba_headdim", default=inner // mamba_heads or None)
    mamba = mamba2_spec(reader, options, heads="n_mamba_heads", width=width, groups="mamba_ngroups")
    return _shared_attention(reader, options, mamba)


def _shared_attention(reader: ConfigReader, options: Options, mamba: StateSpec) -> Layers:
    """Returns the layers of Zamba from ``layers_block_type``.

    All hybrid layers share the weights of the attention blocks, but each has a cache of its own.
    Attention reads hidden state and embedding together, so heads are ``2 * hidden / heads`` wide.
    """
    known = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": "hybrid"}
    kinds = reader.layer_kinds(known, field="layers_block_type")
    layers = [(FULL, MAMBA) if kind == "hybrid" else (MAMBA,) for kind in kinds]
    hidden, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    width = reader.number("attention_head_dim", default=2 * hidden // heads or None)
    attention = full_attention(reader, options, width=width)
    return name_layers(layers, {FULL: attention, MAMBA: mamba})
