"""Traits of model types, and the matrices that only single families have. No jax."""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxkv._src.hf_config._weights._matrix import WHOLE, Fields, Matrix, Placed, feed_forward
from jaxkv._src.hf_config._weights._mixers import (
    HEADS,
    States,
    bailing,
    gated_delta_net,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    short_convolution,
)


@dataclasses.dataclass(frozen=True)
class Traits:
    """The traits of a model type that decide which matrices it has.

    gated: whether feed-forward layers have a gate.
    tied: whether the head is the embedding where the configuration does not say.
    query_gate: whether attention has a gate as large as its queries.
    both: whether layers with experts also have a dense feed-forward layer.
    positions: name of the field with the number of learnt positions; None: there are none.
    states: yields the matrices of a layer with a recurrent state; None: there are none.
    """

    gated: bool = True
    tied: bool = False
    query_gate: bool = False
    both: bool = False
    positions: str | None = None
    states: States | None = None


PLAIN = """
    llama mistral ministral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl_text
    qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text qwen2_5_omni_text phi3
    phimoe glm glm4 glm4_moe glm4_moe_lite glm4v_text glm4v_moe_text glm_moe_dsa gpt_oss
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 kimi_k2 granite granitemoe
    granitemoeshared minimax_m2 olmo olmo2 olmo3 olmoe seed_oss internlm2 internlm3 exaone4
    exaone_moe dots1 bailing_moe bailing_moe_v2 mimo mimo_v2_flash llama4_text stablelm cwm
    hyperclovax hy_v3 dbrx chatglm mllama_text_model solar solar_open axk1 exaone baichuan internlm
    helium diffllama bitnet iquestcoder flex_olmo laguna mistral4 pangu_ultra_moe step3p5
    axk2 deepseek_v41_text dots3_note_text hy_v4 hy_v4_vl_text inkling_text inkling2_text
    minimax_m3_text minimax_m3_vl_text mistral_large4_text sarvam_mla sarvam_moe aria_text flint
    granitemoe_swa kolibri1 mellum hunyuan_v1_dense hunyuan_v1_moe iquestloopcoder k2_horizon
    mimo_v2 xing4_0 PanguEmbedded nanbeige
"""
TIED = """
    gemma gemma2 gemma3_text cohere cohere2 cohere2_moe smollm3 ernie4_5 ernie4_5_moe minicpm3
    granite_swa youtu vaultgemma gemma4_unified_text plamo3 spark2_5
"""
TRAITS = {
    **dict.fromkeys(PLAIN.split(), Traits()),
    **dict.fromkeys(TIED.split(), Traits(tied=True)),
    **dict.fromkeys(
        ("phi", "gpt_neox", "gptj", "codegen", "nemotron", "persimmon", "jais2"),
        Traits(gated=False),
    ),
    **dict.fromkeys(("starcoder2", "falcon", "bloom", "mpt"), Traits(gated=False, tied=True)),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode"), Traits(gated=False, tied=True, positions="n_positions")
    ),
    "gpt_neo": Traits(gated=False, tied=True, positions="max_position_embeddings"),
    "opt": Traits(gated=False, tied=True, positions="max_position_embeddings"),
    "apertus": Traits(gated=False),
    "apertus1p5_text": Traits(gated=False),
    "dory": Traits(query_gate=True),
    "glm5_next_text": Traits(states=kimi_delta),
    "qwen4_exp_text": Traits(query_gate=True, states=gated_delta_net),
    "arcee": Traits(gated=False),
    "nanochat": Traits(gated=False),
    "beam": Traits(query_gate=True),
    "gemma4_text": Traits(tied=True, both=True),
    "qwen3_next": Traits(query_gate=True, states=gated_delta_net),
    "qwen3_5_text": Traits(query_gate=True, states=gated_delta_net),
    "qwen3_5_moe_text": Traits(query_gate=True, states=gated_delta_net),
    "lara_mini": Traits(tied=True, states=gated_delta_net),
    "olmo_hybrid": Traits(states=gated_delta_net),
    "bailing_hybrid": Traits(states=bailing),
    "kimi_linear": Traits(states=kimi_delta),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), Traits(states=lightning)),
    "jamba": Traits(states=mamba1),
    "mamba": Traits(tied=True, states=mamba1),
    "falcon_mamba": Traits(tied=True, states=mamba1),
    "mamba2": Traits(states=mamba2),
    "bamba": Traits(states=mamba2),
    "falcon_h1": Traits(states=mamba2),
    "granitemoehybrid": Traits(states=mamba2),
    "nemotron_h": Traits(gated=False, states=mamba2),
    "zamba2": Traits(tied=True, states=mamba2),
    "afmoe": Traits(query_gate=True),
    "lfm2": Traits(tied=True, states=short_convolution),
    "lfm2_moe": Traits(tied=True, states=short_convolution),
}
# Sizes that the class assumes where a file has none.
OF_M3 = {"dense_intermediate_size": 12288, "shared_intermediate_size": 3072}
WIDTHS = {
    **{"beam": 20480, "diffllama": 8192, "exaone4": 16384, "exaone_moe": 16384, "gemma": 24576},
    **{"gemma2": 9216, "gemma3_text": 9216, "gemma4_text": 9216, "gemma4_unified_text": 9216},
    **{"gpt_neox": 24576, "kimi_linear": 9216, "laguna": 8192, "llama": 11008, "mistral": 14336},
    **{"mimo_v2_flash": 16384, "persimmon": 16384, "phi": 8192, "qwen2": 22016},
    **{"starcoder2": 12288, "vaultgemma": 9216},
}
ASSUMED: Mapping[str, Mapping[str, int | str]] = {
    **{name: OF_M3 for name in ("minimax_m3_text", "minimax_m3_vl_text")},
    **{
        name: {"first_k_dense_replace": 1}
        for name in "axk2 dots3_note_text hy_v4 hy_v4_vl_text mistral_large4_text".split()
    },
    "glm5_next_text": {"first_k_dense_replace": 3},
    **{name: {"feed_forward_proj": "gated-gelu"} for name in ("mt5", "umt5")},
    **{name: {"d_rel": 16} for name in ("inkling_text", "inkling2_text")},
    **{name: {"intermediate_size": width} for name, width in WIDTHS.items()},
    "opt": {"ffn_dim": 3072},
    "lfm2": {"block_auto_adjust_ff_dim": True},
}
WITHOUT_FEED_FORWARD = {"mamba", "mamba2", "falcon_mamba"}


def traits_of(model_type: str) -> Traits:
    """Returns the traits of a model type.

    Raises:
      ValueError: the model type is not in the table.
    """
    if model_type not in TRAITS:
        raise ValueError(f"the sizes of the weights of model_type={model_type!r} are not known")
    return TRAITS[model_type]


def nemotron_kinds(fields: Fields) -> list[str]:
    """Returns the kind of every Nemotron-H layer: "mlp", "moe", or a kind that mixes tokens."""
    letters = fields.first("hybrid_override_pattern")
    if isinstance(letters, str):
        return [{"-": "mlp", "E": "moe"}.get(letter, "mixer") for letter in letters]
    kinds = list(fields.listed("layers_block_type", "layer_types") or ())
    if len(kinds) != fields.num_layers:
        raise ValueError(
            f"layers_block_type names {len(kinds)} layers and num_hidden_layers says "
            f"{fields.num_layers}"
        )
    return kinds


def per_layer_embeddings(fields: Fields) -> Iterable[Placed]:
    """Yields the embeddings that every layer of Gemma 3n and 4 has, and their projections."""
    width = fields.number("hidden_size_per_layer_input", default=0)
    if not width:
        return
    layers, hidden = fields.num_layers, fields.hidden
    tokens = fields.number("vocab_size_per_layer_input", "vocab_size")
    yield (0,), Matrix("embed_tokens_per_layer", tokens, layers * width, "other")
    yield (0,), Matrix("per_layer_model_projection", layers * width, hidden)
    for layer in range(layers):
        yield (layer,), Matrix("per_layer_input_gate", width, hidden, max_ranks=WHOLE)
        yield (layer,), Matrix("per_layer_projection", hidden, width, max_ranks=WHOLE)


def hyper_connections(fields: Fields) -> Iterable[Placed]:
    """Yields the mixers of the residual streams of Qwen3.8-Flash-Next: two a layer, and a last."""
    if fields.model_type != "qwen4_exp_text":
        return
    rank, last = fields.number("hc_lowrank", default=320), fields.num_layers - 1
    width = fields.hidden * fields.number("hc_count", default=4)
    for layer in (*range(last + 1), *range(last + 1), last):
        yield (layer,), Matrix("hyper_connection", width, rank, count=2, max_ranks=WHOLE)


def whisper(fields: Fields) -> Iterable[Placed]:
    """Yields the matrices of Whisper. Its encoder lies on the first stage."""
    hidden, tokens = fields.number("d_model"), fields.number("vocab_size")
    layers = fields.number("decoder_layers")
    for part, blocks in (("encoder", 1), ("decoder", 2)):
        width = fields.number(f"{part}_ffn_dim")
        for layer in range(fields.number(f"{part}_layers")):
            place = (layer if part == "decoder" else 0,)
            yield place, Matrix(f"{part}.attn", hidden, hidden, count=4 * blocks)
            for matrix in feed_forward(part, hidden, width, gated=False):
                yield place, matrix
    positions = fields.number("max_source_positions") + fields.number("max_target_positions")
    yield (0,), Matrix("positions", positions, hidden, "other", max_ranks=WHOLE)
    yield (0, layers - 1), Matrix("embed_tokens", tokens, hidden, "other")
    yield (0,), Matrix("conv", hidden, 3 * (hidden + fields.number("num_mel_bins")), "other")


def t5(fields: Fields) -> Iterable[Placed]:
    """Yields the matrices of T5 and its relatives; newer ones have gates and an untied head.

    The encoder lies on the first stage.
    """
    hidden, inner = fields.number("d_model"), fields.number("num_heads") * fields.number("d_kv")
    width, gated = fields.number("d_ff"), str(fields.first("feed_forward_proj")).startswith("gated")
    encoder = fields.number("num_layers")
    decoder = fields.number("num_decoder_layers", default=encoder)
    places = [(1, 0)] * encoder + [(2, layer) for layer in range(decoder)]
    for blocks, layer in places:
        yield (layer,), Matrix("attn", inner, hidden, count=4 * blocks)
        for matrix in feed_forward("mlp", hidden, width, gated=gated):
            yield (layer,), matrix
    table = Matrix("embed_tokens", fields.number("vocab_size"), hidden, "other")
    if fields.first("tie_word_embeddings") in (None, True):
        yield (0, decoder - 1), table
    else:
        yield from (((0,), table), ((decoder - 1,), table))


ENCODER_DECODERS = {"whisper": whisper, "t5": t5, "mt5": t5, "umt5": t5}


def zamba2_blocks(fields: Fields) -> Iterable[Placed]:
    """Yields Zamba2's attention blocks, which its hybrid layers share, and what each adds."""
    kinds = fields.first("layers_block_type", "layer_types") or ()
    uses = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
    hidden, width = fields.hidden, fields.number("intermediate_size", default=4 * fields.hidden)
    blocks, rank = fields.number("num_mem_blocks", default=1), fields.number("adapter_rank")
    heads = fields.number(*HEADS, least=1)
    size = fields.number("attention_head_dim", default=2 * hidden // heads)
    shared = [
        Matrix("shared.qkv_proj", 3 * heads * size, 2 * hidden, count=blocks),
        Matrix("shared.o_proj", hidden, heads * size, count=blocks),
        *feed_forward("shared.mlp", hidden, width, gated=True, count=blocks),
    ]
    own = [
        Matrix("linear", hidden, hidden),
        Matrix("shared.adapter_in", rank, hidden),
        Matrix("shared.adapter_out", 2 * width, rank),
    ]
    if fields.first("use_shared_attention_adapter"):
        own.append(Matrix("shared.attention_adapter_in", 3 * rank, 2 * hidden))
        own.append(Matrix("shared.attention_adapter_out", 3 * heads * size, rank))
    yield from ((uses or (0,), matrix) for matrix in shared)
    yield from (((layer,), matrix) for layer in uses for matrix in own)
