"""The table of model types, each with the way to read it. No jax."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxkv._src.hf_config import (
    _convolutions,
    _deepseek_v41,
    _dense,
    _encoder_decoder,
    _gemma,
    _heads,
    _hybrids,
    _indexed,
    _inkling,
    _linear,
    _local,
    _mamba,
    _mla,
    _step5,
    _zamba,
)
from jaxkv._src.hf_config._family import Family
from jaxkv._src.hf_config._fields import Config, check_config, model_type_of
from jaxkv._src.hf_config._reader import ConfigReader
from jaxkv._src.hf_config._windows import (
    Rule,
    all_full,
    all_windowed,
    by_list,
    from_layer,
    idle,
    periodic,
    without_rope,
)

# Shared by several families: field -> the field whose value it takes where a file has none.
HEADS = {"num_key_value_heads": "num_attention_heads"}
# Shared by several families: own name of a field -> its usual name.
GPT = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
}
N_LAYERS = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "max_seq_len": "max_position_embeddings",
}
BLOOM = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size"}
INKLING = {
    "sliding_window": "sliding_window_size",
    "sconv_kernel_size": "conv_kernel_size",
    "model_max_length": "max_position_embeddings",
}
SWITCH = {"layer_switch": "sliding_window_pattern"}
STEP = {"num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts"}
NUM_LAYERS = {"num_layers": "num_hidden_layers"}
# Sizes that the class assumes where a published wrapper does not give them.
SEVEN_BILLION = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
GEMMA = {"head_dim": 256, "max_position_embeddings": 8192}
GEMMA3 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def _dense_family(
    rule: Rule = all_full, attention: _dense.Attention = _dense.derived, **options: Any
) -> Family:
    """Returns a family that `dense` reads by a rule; options are fields of `Family`."""
    read = functools.partial(_dense.dense, rule=rule, attention=attention)
    return Family(read=read, **options)


def _each(types: str, family: Family) -> dict[str, Family]:
    """Returns the same family for every model type of a list."""
    return dict.fromkeys(types.split(), family)


DENSE: Mapping[str, Family] = {
    # Full attention. Where a file names none: as many KV heads as heads, and head_dim is
    # hidden_size / num_attention_heads.
    "llama": _dense_family(same=HEADS, inner={**SEVEN_BILLION, "max_position_embeddings": 2048}),
    **_each(
        """
        Yi apertus apertus1p5_text arcee aria_text baichuan cohere deepseek_ocr2_text
        diffllama flex_olmo granite granite4_vision_text granitemoe granitemoeshared hyperclovax
        internlm internlm2 jais2 minicpm nanochat nemotron olmo olmo2 olmoe orion phi solar xverse
        """,
        _dense_family(same=HEADS),
    ),
    "doge": _dense_family(same=HEADS, ignored=("keep_window_size",)),
    "exaone": _dense_family(names=NUM_LAYERS),
    "qwen": _dense_family(same=HEADS, names={"kv_channels": "head_dim"}),
    **_each(
        "hunyuan hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text",
        Family(read=_heads.hunyuan, same=HEADS),
    ),
    # The same, but a file must name its KV heads, because the class assumes another number.
    **_each(
        """
        PanguEmbedded bitnet chameleon emu3_text_model glm4v_text glm_ocr_text granite_docling_text
        stablelm
        """,
        _dense_family(),
    ),
    **_each("ernie4_5_moe ernie4_5_vl_moe_text", Family(read=_dense.ernie_moe)),
    **_each("glm4_moe glm4v_moe_text", _dense_family(attention=_dense.floored)),
    # The same, and a file must name head_dim as well.
    **_each(
        """
        cosmos3_edge_text ernie4_5 glm glm4 helium hy_v3 internlm3 iquestcoder molmo2_text
        paddleocr_vl_text sarvam_moe seed_oss solar_open
        """,
        _dense_family(attention=_dense.given),
    ),
    "minimax_m2": Family(read=_dense.minimax_m2),
    # A window that use_sliding_window may turn off.
    "qwen2": _dense_family(
        rule=from_layer,
        inner={**SEVEN_BILLION, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    **_each(
        "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text mimo minicpmv minicpmo",
        _dense_family(rule=from_layer, ignored=("audio_chunk_length", "chunk_input")),
    ),
    **_each("qwen3 qwen3_vl_text", _dense_family(rule=from_layer, attention=_dense.given)),
    **_each("qwen3_moe qwen3_vl_moe_text qwen2_moe", _dense_family(rule=idle)),
    "qwen3_omni_moe_text": _dense_family(rule=idle, attention=_dense.floored),
    **_each("bailing_moe bailing_moe_v2", _dense_family(rule=idle)),
    "dots1": _dense_family(
        rule=from_layer,
        defaults={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62},
    ),
    "k2_horizon": _dense_family(
        rule=from_layer, attention=_dense.given, ignored=("rope_head_dim",)
    ),
    "smollm3": _dense_family(rule=without_rope),
    # A window in every layer, or in none.
    "mistral": Family(
        read=_dense.mistral,
        inner={**SEVEN_BILLION, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    **_each("phi3 phi3_v phi4mm", Family(read=_dense.phi3, same=HEADS)),
    "phi4_multimodal": Family(read=_dense.phi3),
    **_each("mixtral starcoder2 phimoe", _dense_family(rule=all_windowed)),
    "ministral3": _dense_family(rule=all_windowed, attention=_dense.given),
    "ministral": Family(read=_dense.mistral),
    # Layers with a window and full layers in turn.
    "gemma2": Family(read=_gemma.alternating, inner={**GEMMA, "sliding_window": 4096}),
    "vaultgemma": Family(read=_gemma.alternating),
    "gpt_oss": Family(read=_gemma.alternating, dtype="bfloat16"),
    "gemma": Family(read=_gemma.gemma, defaults=GEMMA),
    "gemma3_text": Family(read=_gemma.gemma3, defaults=GEMMA3),
    "gemma3n_text": Family(read=_gemma.gemma3n),
    "gemma4_text": Family(read=_gemma.gemma4),
    "gemma4_unified_text": Family(read=_gemma.gemma4, dtype="bfloat16"),
    "llama4_text": Family(read=_gemma.llama4),
    "cohere2": Family(read=_dense.cohere2, same=HEADS, names=SWITCH),
    "cohere_compass_text": Family(read=_dense.listed_or_full, same=HEADS),
    "cohere2_moe": Family(read=_dense.cohere2_moe, same=HEADS, names=SWITCH),
    **_each(
        "exaone4 exaone_moe",
        _dense_family(
            rule=periodic(4, "sliding_window_pattern", null=True), defaults={"sliding_window": 4096}
        ),
    ),
    "olmo3": _dense_family(rule=periodic(4), same=HEADS),
    "afmoe": _dense_family(
        rule=periodic(4, "global_attn_every_n_layers"), attention=_dense.given, same=HEADS
    ),
    "cwm": _dense_family(rule=periodic(4, first=True), attention=_dense.given),
    **_each("granite_swa granitemoe_swa", _dense_family(rule=periodic(4, first=True))),
    **_each(
        "beam flint kolibri1 laguna mellum muse_glimmer_text muse_spark_text spark2_5",
        _dense_family(rule=by_list, attention=_dense.given),
    ),
    "step3p5": Family(read=_local.step3p5, names=STEP),
    "step5": Family(read=_step5.step5, names={**STEP, "max_seq_len": "max_position_embeddings"}),
    "step3_text": _dense_family(
        attention=_dense.given,
        names={
            "num_attention_groups": "num_key_value_heads",
            "max_position_embedding": "max_position_embeddings",
        },
        ignored=("num_dense_kv_a_proj",),
    ),
    "dory": Family(read=_local.dory),
    **_each("minimax_m3_text minimax_m3_vl_text", Family(read=_indexed.minimax_m3)),
    **_each("inkling_text inkling2_text", Family(read=_inkling.inkling, names=INKLING)),
    "inkling2_loop_text": Family(read=_inkling.inkling2_loop, names=INKLING),
    **_each("mimo_v2 mimo_v2_flash", Family(read=_heads.mimo_v2)),
    "plamo3": Family(read=_local.plamo3, names={"window_size": "sliding_window"}),
    "iquestloopcoder": Family(read=_local.loop_coder),
    "iquest_q1": Family(read=_local.iquest_q1),
    "nanbeige": Family(read=_local.nanbeige, same=HEADS),
    # Heads that other fields describe.
    **_each(
        "gpt2 gptj gpt_neox_japanese codegen ctrl", Family(read=_heads.heads_of_all, names=GPT)
    ),
    **_each("biogpt gpt_neox opt persimmon", Family(read=_heads.heads_of_all)),
    "bloom": Family(read=_heads.heads_of_all, names=BLOOM),
    "xglm": Family(
        read=_heads.heads_of_all,
        names={
            "num_layers": "num_hidden_layers",
            "attention_heads": "num_attention_heads",
            "d_model": "hidden_size",
        },
    ),
    "git": Family(read=_heads.heads_of_all),
    **_each(
        "kosmos_2_text_model kosmos_2_5_text_model",
        Family(
            read=_heads.heads_of_all,
            names={
                "layers": "num_hidden_layers",
                "attention_heads": "num_attention_heads",
                "embed_dim": "hidden_size",
            },
        ),
    ),
    "falcon": Family(
        read=_heads.one_head,
        names={
            **BLOOM,
            "n_head_kv": "num_key_value_heads",
            "num_kv_heads": "num_key_value_heads",
        },
        defaults={"max_position_embeddings": 2048},
        same=HEADS,
    ),
    "gpt_bigcode": Family(read=_heads.one_head, names=GPT),
    "gpt_neo": Family(
        read=_heads.gpt_neo,
        names={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
    ),
    "chatglm": Family(read=_heads.chatglm, names=NUM_LAYERS),
    **_each("dbrx mpt", Family(read=_heads.attn_config, names=N_LAYERS)),
    "jetmoe": Family(read=_heads.kv_channels),
    "nemotron-nas": Family(read=_heads.nemotron_nas),
}
LATENT: Mapping[str, Family] = {
    **_each(
        """
        axk1 deepseek_v3 kimi_k2 glm4_moe_lite glm4_moe_lite_plus_plus minicpm3 mistral4
        pangu_ultra_moe sarvam_mla xing4_0 youtu
        """,
        Family(read=_mla.deepseek_v3),
    ),
    "deepseek_v2": Family(read=_mla.deepseek_v2),
    **_each("longcat_flash longcat_flash_ngram", Family(read=_mla.longcat)),
    "longcat": Family(read=_mla.longcat, dtype="bfloat16"),
    **_each("deepseek_v32 glm_moe_dsa", Family(read=_mla.deepseek_v32)),
    "deepseek_v4": Family(read=_mla.deepseek_v4),
    "deepseek_v41_text": Family(read=_deepseek_v41.deepseek_v41),
    **_each("axk2 hy_v4 hy_v4_vl_text mistral_large4_text", Family(read=_indexed.indexed_latents)),
    "dots3_note_text": Family(read=_indexed.dots3),
}
STATES: Mapping[str, Family] = {
    **_each("qwen3_next qwen3_5_text qwen3_5_moe_text", Family(read=_linear.qwen3_next)),
    "olmo_hybrid": Family(read=_linear.qwen3_next, same=HEADS),
    "glm5_next_text": Family(read=_indexed.glm5_next),
    "qwen4_exp_text": Family(read=_indexed.qwen4_exp),
    "kimi_linear": Family(read=_linear.kimi_linear),
    "lara_mini": Family(read=_linear.lara),
    "alice_ai": Family(read=_hybrids.alice_ai),
    "minicpm_sala": Family(read=_hybrids.minicpm_sala),
    "solar_open2": Family(read=_hybrids.solar_open2),
    "berrylm": Family(read=_linear.berrylm),
    "gigachat3_5": Family(read=_linear.gigachat),
    "bailing_hybrid": Family(read=_linear.bailing_hybrid),
    **_each("minimax_text_01 minimax_m1 minimax", Family(read=_linear.minimax)),
    **_each("mamba falcon_mamba", Family(read=_mamba.mamba)),
    "mamba2": Family(read=_mamba.mamba2),
    "jamba": Family(read=_mamba.jamba),
    "bamba": Family(read=_mamba.granite_hybrid),
    "granitemoehybrid": Family(
        read=_mamba.granite_hybrid, names={"layers_block_type": "layer_types"}
    ),
    "falcon_h1": Family(read=_mamba.falcon_h1),
    "nemotron_h": Family(read=_mamba.nemotron_h),
    "nemotron_h_puzzle": Family(read=_mamba.nemotron_puzzle),
    "zamba": Family(read=_zamba.zamba),
    "zamba2": Family(read=_zamba.zamba2, names={"state_size": "mamba_d_state"}),
    **_each("lfm2 lfm2_moe lfm3", Family(read=_convolutions.lfm2)),
    "recurrent_gemma": Family(
        read=_convolutions.recurrent_gemma, same=HEADS, names={"_block_types": "block_types"}
    ),
}
ENCODERS: Mapping[str, Family] = {
    "whisper": Family(read=_encoder_decoder.bart, encoder="frames"),
    **_each(
        """
        bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart mvp nllb-moe
        pegasus pegasus_x plbart
        """,
        Family(read=_encoder_decoder.bart, encoder="tokens", ignored=("attention_window",)),
    ),
    **_each(
        "t5 mt5 umt5 longt5 switch_transformers",
        Family(read=_encoder_decoder.t5, encoder="tokens"),
    ),
    "mllama_text_model": Family(read=_encoder_decoder.mllama, encoder="tiles"),
}
FAMILIES: Mapping[str, Family] = {**DENSE, **LATENT, **STATES, **ENCODERS}


def open_config(config: Config, kv_dtype: str | None = None) -> tuple[ConfigReader, Family | None]:
    """Returns a reader of a configuration and its family, or None for an unknown one."""
    check_config(config)
    family = FAMILIES.get(model_type_of(config))
    return ConfigReader(config, family, kv_dtype), family
