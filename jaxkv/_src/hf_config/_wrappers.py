"""Multimodal wrappers without a cache beside their language model's. No jax."""

from typing import Any

# Fields in which a wrapper holds its language model, in order of precedence.
INNER = "text_config", "llm_config", "language_config", "thinker_config"

# Fields of a wrapper that sound like a cache but belong to its images or sounds.
NOT_TEXT = (
    "window_size",
    "audio_chunk_size",
    "seconds_per_chunk",
    "acoustic_tokenizer_chunk_size",
)

# Wrappers of a language model whose model type is theirs and "_text", where a file names none.
TEXT = """
    apertus1p5 aria cohere_compass cosmos3_edge deepseek_ocr2 deepseek_v41 diffusion_gemma
    dots3_note ernie4_5_vl_moe gemma3 gemma3n gemma4 gemma4_unified glm4v glm4v_moe glm5_next
    glm_ocr granite4_vision granite_docling hunyuan_vl hy_v4_vl inkling2 inkling2_loop llama4
    minimax_m3 minimax_m3_vl mistral_large4 molmo2 muse_glimmer muse_spark paddleocr_vl qwen2_5_omni
    qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp
    unlimited_ocr
"""
# Model type of a language model -> its other wrappers, where a file names none or is flat.
WRAPPED = {
    "bailing_hybrid": "bailing_moe_v3_vl",
    "cohere2": "aya_vision cohere2_vision",
    "deepseek_v2": "deepseek_vl_v2",
    "deepseek_v3": "kimi_k25 kimi_vl",
    "emu3_text_model": "emu3",
    "ernie4_5_vl_moe_text": "ernie4_5_moe_vl",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "shieldgemma2",
    "glm4v_text": "glm46v glmga",
    "granite": "granite_speech granite_speech_plus",
    "hyperclovax": "hyperclovax_vision_v2",
    "inkling_text": "inkling_mm_model",
    "internlm2": "internvl_chat",
    "kimi_linear": "kimi_k3",
    "kosmos_2_5_text_model": "kosmos-2.5",
    "kosmos_2_text_model": "kosmos-2",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": """
        Llama_Nemotron_Nano_VL deepseek_vl deepseek_vl_hybrid glmasr h2ovl_chat idefics3
        janus llava llava_next llava_next_video perception_lm smolvlm video_llava
        vipllava voxtral
    """,
    "mistral": "idefics2 mistral3",
    "mllama_text_model": "mllama",
    "nemotron_h": "NemotronH_Nano_VL_V2 nemo_speechlm nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo",
    "persimmon": "fuyu",
    "qwen2": """
        NVLM_D audioflamingo3 dots_ocr fast_vlm got_ocr2 internvl llava_onevision musicflamingo
        ovis2 pp_chart2table qwen2_audio vibevoice_asr video_llama_3
    """,
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
    "qwen3": "fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr qwen3_asr",
    "qwen3_5_moe_text": "intern_s2_preview",
    "qwen3_5_text": "minicpm_ocr minicpmv4_6 minicpmv4_7",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_vl_text": "cosmos3_omni",
    "step3_text": "step3_vl",
    "step3p5": "step3p7",
    "step5": "step5_vl",
}
# Wrappers whose files may leave out other sizes than those of the class of their language model.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "glmasr": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 59264},
        "max_position_embeddings": 8192,
    },
    "voxtral": {
        **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 131072, "max_position_embeddings": 131072},
    },
}
WRAPPERS = {name: f"{name}_text" for name in TEXT.split()}
WRAPPERS |= {name: inner for inner, names in WRAPPED.items() for name in names.split()}
