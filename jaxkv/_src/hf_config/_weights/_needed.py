"""Fields that a file must name, because its class assumes what no other size tells. No jax."""

from jaxkv._src.hf_config._weights._feed_forward import EXPERTS, FIRST, SHARED, SHARED_WIDTH
from jaxkv._src.hf_config._weights._matrix import Fields

LAYERS_WITH_EXPERTS = (
    *("mlp_layer_types", *FIRST, "is_moe_layer", "moe_layers", "moe_layers_enum"),
    *("mlp_only_layers", "moe_layer_freq"),
)
OF_EXPERTS = SHARED + SHARED_WIDTH, LAYERS_WITH_EXPERTS
# Fields, one of which a file must name, though it may be null -> model types that assume a value.
NEEDED = {
    EXPERTS: """
        aria_text cohere2_moe dbrx flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid
        granitemoeshared hunyuan_v1_moe jamba llama4_text minimax minimax_m1 minimax_m2
        minimax_m3_text minimax_m3_vl_text minimax_text_01 mixtral olmoe phimoe
    """,
    ("ffn_config",): "dbrx",
    SHARED + SHARED_WIDTH: """
        afmoe aria_text axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
        ernie4_5_moe exaone_moe flint glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text
        glm_moe_dsa granitemoehybrid hy_v3 hy_v4 hy_v4_vl_text inkling_text kimi_k2 kimi_linear
        kolibri1 laguna lara_mini mistral4 mistral_large4_text nemotron_h qwen2_moe qwen3_next
        qwen4_exp_text sarvam_mla sarvam_moe solar_open step3p5
        xing4_0
    """,
    LAYERS_WITH_EXPERTS: """
        afmoe axk1 beam deepseek_v3 deepseek_v32 ernie4_5_moe exaone_moe flint glm4_moe
        glm4_moe_lite glm4v_moe_text glm_moe_dsa hy_v3 kimi_k2 kimi_linear laguna mimo_v2
        mimo_v2_flash sarvam_mla sarvam_moe step3p5 xing4_0
    """,
    ("q_lora_rank",): """
        axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm5_next_text
        glm_moe_dsa hy_v4 hy_v4_vl_text kimi_k2 minicpm3 mistral4 xing4_0 youtu
    """,
    ("index_n_heads", "indexer_n_heads"): """
        axk2 deepseek_v32 dots3_note_text glm5_next_text glm_moe_dsa hy_v4 hy_v4_vl_text
        mistral_large4_text
    """,
    ("hidden_size_per_layer_input",): "gemma4_text",
    ("expert_layer_period",): "jamba",
}
FREQUENCY = "moe_layer_freq"  # a list of layers, or a number that leaves the first ones open


def check_needed(fields: Fields) -> None:
    """Raises ValueError for a file that leaves out what its class would assume."""
    for names, model_types in NEEDED.items():
        if names in OF_EXPERTS and not fields.first(*EXPERTS):
            continue
        given = any(name in fields.values for name in names if name != FREQUENCY)
        if FREQUENCY in names:
            given |= fields.listed(FREQUENCY) is not None
        if not given and fields.model_type in model_types.split():
            raise fields.lacks(*names)
