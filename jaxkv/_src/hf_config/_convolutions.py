"""LFM2 and RecurrentGemma: short convolutions next to attention layers. No jax."""

from jaxkv._src.hf_config._build import (
    FULL,
    SLIDING,
    Layers,
    Options,
    full_attention,
    head_size,
    name_layers,
    sliding,
    state,
)
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.specs import LayerSpec

CONV, RECURRENT = "short_convolution", "recurrent"


def lfm2(reader: ConfigReader, options: Options) -> Layers:
    """LFM2 and LFM3: convolutions that keep their last inputs, and attention in some layers.

    A convolution over ``conv_L_cache`` tokens keeps the inputs of the ``conv_L_cache - 1`` tokens
    before the current one, each ``conv_dim`` wide (the hidden size where absent).
    """
    kinds = _lfm2_kinds(reader)
    specs: dict[str, LayerSpec] = {}
    if CONV in kinds:
        width = _width_per_rank(reader, options, "conv_dim")
        rows = reader.number("conv_L_cache") - 1 + options.speculative_tokens
        specs[CONV] = state(((rows, width),), (reader.dtype(),), options)
    if set(kinds) - {CONV}:
        specs[FULL] = full = full_attention(reader, options, width=head_size(reader))
        if SLIDING in kinds:
            specs[SLIDING] = sliding(full, reader.number("sliding_window"))
    reader.ignore("sliding_window", "conv_dim", "conv_L_cache", "conv_dim_out")
    reader.ignore("num_key_value_heads", "head_dim")
    return name_layers([(kind,) for kind in kinds], specs)


def _width_per_rank(reader: ConfigReader, options: Options, name: str) -> int:
    """Returns a rank's share of a width, which is the hidden size where a file names none."""
    width, ranks = reader.number(name, "hidden_size"), options.tensor_parallel
    if width % ranks:
        raise ValueError(f"{name}={width} does not divide among tensor_parallel={ranks}")
    return width // ranks


def _lfm2_kinds(reader: ConfigReader) -> list[str]:
    """Returns the kind of every layer; ``layer_types`` and ``full_attn_idxs`` must agree."""
    known = {FULL: FULL, "conv": CONV} | (
        {SLIDING: SLIDING} if reader.has("sliding_window") else {}
    )
    count = reader.layer_count()
    indices = reader.listed("full_attn_idxs", list(range(count)))
    indexed = [FULL if i in indices else "conv" for i in range(count)]
    if reader.model_type != "lfm2":  # only the class of LFM2 derives the kinds from the indices
        return reader.layer_kinds(known)
    kinds = reader.layer_kinds(known, indexed)
    if reader.value("full_attn_idxs") is not None and kinds != [known[kind] for kind in indexed]:
        raise reader.refusal("full_attn_idxs", "it contradicts layer_types")
    return kinds


def recurrent_gemma(reader: ConfigReader, options: Options) -> Layers:
    """RecurrentGemma (arXiv 2404.07839): a pattern of recurrent and local layers.

    A recurrent layer keeps the last inputs of its convolution, and a float32 value for each
    of ``lru_width`` channels.
    """
    known = {"recurrent": RECURRENT, "attention": SLIDING}
    blocks = [str(block) for block in reader.listed("block_types")]
    if not blocks or set(blocks) - set(known):
        raise reader.refusal("block_types", f"understood: {', '.join(known)}")
    kinds = [known[blocks[i % len(blocks)]] for i in range(reader.layer_count())]
    width = _width_per_rank(reader, options, "lru_width")
    rows = reader.number("conv1d_width") - 1 + options.speculative_tokens
    shapes = (rows, width), (width,)
    full = full_attention(reader, options, width=head_size(reader))
    specs: dict[str, LayerSpec] = {
        SLIDING: sliding(full, reader.number("attention_window_size")),
        RECURRENT: state(shapes, (reader.dtype(), "float32"), options),
    }
    return name_layers([(kind,) for kind in kinds], specs)
