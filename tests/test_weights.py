"""The bytes of a model's weights: published checkpoints, model classes, arithmetic by hand."""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as hst

from jaxkv._src.hf_config import count_weights, load_config
from jaxkv._src.hf_config._fields import inner_config, nested
from jaxkv._src.hf_config._weights._feed_forward import (
    DENSE_WIDTH,
    EXPERT_WIDTH,
    dense,
    expert_layers,
    experts,
)
from jaxkv._src.hf_config._weights._matrix import Fields, Matrix
from jaxkv._src.hf_config._weights._needed import NEEDED
from jaxkv._src.hf_config._weights._quantization import (
    EXPERTS,
    HEAD,
    LAYERS,
    SKIPPED,
    TOWER,
    Scheme,
    read_scheme,
)
from jaxkv._src.hf_config._weights._towers import TOWER_OF, towers
from jaxkv._src.hf_config._weights._traits import ASSUMED, t5, whisper

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "parameters.json").read_text())
PRESETS = tuple(GOLDEN["presets"])
INDEX = "total_size of its model.safetensors.index.json"
CARD = "size of its one file, on the model card"

LLAMA = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
QWEN_7B = {
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "sliding_window": None,
}
PHI = {
    "model_type": "phi3",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "sliding_window": 2047,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 163840,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
MISTRAL_AWQ = load_config("mistral-7b-v0.1") | {
    "torch_dtype": "float16",
    "quantization_config": AWQ,
}

PUBLISHED: list[tuple[str, dict[str, Any], int, str]] = [
    ("Llama-3.1-8B", load_config("llama-3.1-8b"), 16_060_522_496, INDEX),
    ("Mistral-7B-v0.1", load_config("mistral-7b-v0.1"), 14_483_464_192, INDEX),
    ("Qwen2.5-7B", QWEN_7B | {"model_type": "qwen2"}, 15_231_233_024, INDEX),
    ("Qwen3-8B", load_config("qwen3-8b"), 16_381_470_720, INDEX),
    ("Qwen3-30B-A3B", load_config("qwen3-30b-a3b"), 61_064_245_248, INDEX),
    ("Mixtral-8x7B", MIXTRAL, 93_405_585_408, INDEX),
    ("Phi-3-mini-4k", PHI, 7_642_159_104, INDEX),
    ("gemma-2-9b-it", load_config("gemma-2-9b"), 18_483_411_968, INDEX),
    ("gemma-3-4b-it, with images", load_config("gemma-3-4b"), 8_600_158_944, INDEX),
    (
        "Qwen2.5-VL-7B, with images",
        QWEN_7B | {"model_type": "qwen2_5_vl", "vision_config": QWEN_VISION},
        16_584_333_312,
        INDEX,
    ),
    ("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, 31_412_968_448, INDEX),
    ("DeepSeek-V3, fp8 and drafts", load_config("deepseek-v3"), 688_586_727_753, INDEX),
    ("gpt-oss-20b, mxfp4", load_config("gpt-oss-20b"), 13_761_264_768, INDEX),
    ("gpt-oss-120b, mxfp4", load_config("gpt-oss-120b"), 65_248_815_744, INDEX),
    ("Mistral-7B-v0.1-AWQ", MISTRAL_AWQ, 4_150_000_000, CARD),
]


@pytest.mark.parametrize(("name", "config", "num_bytes", "source"), PUBLISHED)
def test_bytes_equal_published_checkpoints(name, config, num_bytes, source) -> None:
    counted = count_weights(config, drafts="drafts" in name).num_bytes
    assert abs(counted / num_bytes - 1) < 0.005, (name, source)


def test_parameters_equal_the_model_classes() -> None:
    """116 model types and 35 presets, without norms and biases."""
    models = [(model["config"], model["parameters"]) for model in GOLDEN["models"]]
    presets = [(load_config(name), count) for name, count in GOLDEN["presets"].items()]
    assert len({config["model_type"] for config, _ in models}) >= 115 and len(presets) >= 35
    off = [
        (config["model_type"], counted, count)
        for config, count in models + presets
        if abs((counted := count_weights(config).parameters) / count - 1) > 0.0075
    ]
    assert not off


# What a class assumes, but for these, no other field of a file tells.
TELLING = {*itertools.chain(*NEEDED), *DENSE_WIDTH, *EXPERT_WIDTH}


def test_a_size_that_a_file_leaves_out_is_refused_or_the_one_that_its_class_assumes() -> None:
    for model in GOLDEN["models"]:
        *_, inner = nested(model["config"])
        parameters = count_weights(model["config"]).parameters
        assumed = ASSUMED.get(str(inner.get("model_type")), {})
        for field in TELLING & {*inner} - {*assumed}:
            less = without(model["config"], field)
            try:
                counted = count_weights(less).parameters
            except ValueError:
                continue
            assert counted == parameters, (model["config"], field)


def without(config: dict[str, Any], field: str) -> dict[str, Any]:
    """The configuration without a field of its language model."""
    if (found := inner_config(config)) is None:
        return {name: value for name, value in config.items() if name != field}
    return {**config, found[0]: without(dict(found[1]), field)}


LATENT = {"kv_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 11, "v_head_dim": 13}
LATENT |= {"first_k_dense_replace": 1, "n_routed_experts": 0, "n_shared_experts": None}
AFTER_QUERIES = 7 * (5 + 4) + 5 * 3 * (11 + 13) + 3 * 13 * 7
LOW_RANK = 7 * 17 + 17 * 3 * (11 + 4)
MIXERS: dict[str, tuple[dict[str, Any], int]] = {  # of one layer, 7 wide, of 3 heads
    "deepseek_v2": ({**LATENT, "q_lora_rank": None}, 7 * 3 * (11 + 4) + AFTER_QUERIES),
    "deepseek_v3": ({**LATENT, "q_lora_rank": 17}, LOW_RANK + AFTER_QUERIES),
    "deepseek_v32": (
        {**LATENT, "q_lora_rank": 17, "index_n_heads": 2, "index_head_dim": 19},
        LOW_RANK + AFTER_QUERIES + 17 * 2 * 19 + 7 * 19 + 7 * 2,
    ),
    "mamba": (
        {"state_size": 5, "conv_kernel": 4, "time_step_rank": 3, "intermediate_size": 14},
        7 * 2 * 14 + 14 * 4 + 14 * (3 + 2 * 5) + 3 * 14 + 14 * 5 + 14 * 7,
    ),
    "mamba2": (
        {"state_size": 5, "conv_kernel": 4, "num_heads": 2, "head_dim": 7, "n_groups": 1},
        7 * (2 * 14 + 2 * 5 + 2) + (14 + 2 * 5) * 4 + 14 * 7,
    ),
    "qwen3_next": (
        {
            **{"linear_num_key_heads": 2, "linear_key_head_dim": 3, "linear_conv_kernel_dim": 4},
            **{"linear_num_value_heads": 4, "linear_value_head_dim": 5, "num_experts": 0},
            **{"layer_types": ["linear_attention"], "num_key_value_heads": 3, "head_dim": 8},
            "shared_expert_intermediate_size": 0,
        },
        7 * (2 * 6 + 2 * 20) + 7 * 2 * 4 + (2 * 6 + 20) * 4 + 20 * 7,
    ),
    "lfm2": ({"conv_L_cache": 3, "full_attn_idxs": []}, 3 * 7 * 7 + 7 * 7 + 7 * 3),
}


@pytest.mark.parametrize("model_type", MIXERS)
def test_the_matrices_of_a_mixer_equal_a_count_by_hand(model_type: str) -> None:
    fields, parameters = MIXERS[model_type]
    config = {"hidden_size": 7, "num_hidden_layers": 1, "num_attention_heads": 3, "expand": 2}
    config |= {"vocab_size": 0, "intermediate_size": 0, "max_position_embeddings": 64}
    counted = count_weights(config | fields | {"model_type": model_type})
    assert counted.parameters == parameters


OF_EXPERTS = {"hidden_size": 7, "num_experts": 5, "moe_intermediate_size": 11}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("model_type", "fields", "hidden", "shared"),  # what an expert reads; width of the shared ones
    [
        ("any", {}, 7, 0),
        ("any", {"n_shared_experts": 2}, 7, 2 * 11),
        ("any", {"n_shared_experts": 2, "shared_expert_intermediate_size": 13}, 7, 2 * 13),
        ("any", {"shared_expert_intermediate_size": 13}, 7, 13),
        ("any", {"n_shared_experts": 0, "shared_expert_intermediate_size": 13}, 7, 0),
        ("any", {"moe_latent_size": 3}, 3, 0),
        (
            "nemotron_h",
            {
                "moe_latent_size": 3,
                "n_shared_experts": 1,
                "moe_shared_expert_intermediate_size": 13,
            },
            3,
            13,
        ),
        ("llama4_text", {}, 7, 11),
        (  # Hunyuan has lists of a number for each layer
            "any",
            {"num_experts": [3, 5], "moe_intermediate_size": [2, 11], "num_shared_expert": [1, 2]},
            7,
            2 * 11,
        ),
    ],
)
def test_the_matrices_of_experts_equal_a_count_by_hand(
    model_type: str, fields: dict[str, Any], hidden: int, shared: int, gated: bool
) -> None:
    into_and_back = 2 + gated
    matrices = list(experts(Fields(model_type, OF_EXPERTS | fields), 1, gated=gated))
    routed = sum(matrix.parameters for matrix in matrices if matrix.role == "expert")
    assert routed == 5 * into_and_back * hidden * 11
    projections = 2 * 7 * hidden if "moe_latent_size" in fields else 0
    others = 5 * 7 + projections + into_and_back * 7 * shared
    assert sum(matrix.parameters for matrix in matrices) == routed + others


@pytest.mark.parametrize(
    ("fields", "width"),  # of the last of four layers
    [
        ({}, 4 * 7),
        ({"intermediate_size": 11}, 11),
        ({"intermediate_size": 11, "intermediate_size_mlp": 13}, 13),  # Llama 4
        ({"intermediate_size": [1, 2, 3, 11]}, 11),
        ({"intermediate_size": 11, "use_double_wide_mlp": True, "num_kv_shared_layers": 1}, 22),
        ({"intermediate_size": 11, "use_double_wide_mlp": True, "num_kv_shared_layers": 0}, 11),
        ({"intermediate_size": 30, "block_auto_adjust_ff_dim": True, "block_multiple_of": 8}, 24),
        (
            {
                **{"intermediate_size": 30, "block_auto_adjust_ff_dim": True},
                **{"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 7},
            },
            35,
        ),
    ],
)
def test_a_dense_layer_is_as_wide_as_its_fields_say(fields: dict[str, Any], width: int) -> None:
    of = Fields("gpt2", {"hidden_size": 7, "num_hidden_layers": 4} | fields)
    (up, down) = dense(of, 3, gated=False)
    assert (up.outputs, up.inputs, down.outputs, down.inputs) == (width, 7, 7, width)
    if "num_kv_shared_layers" in fields:
        assert next(iter(dense(of, 2, gated=False))).outputs == 11


def test_towers_keep_their_dtype_where_the_layers_are_quantised() -> None:
    def saved_bytes(config: dict[str, Any]) -> int:
        quantised = config | {"quantization_config": {"quant_method": "fp8"}}
        return count_weights(config).num_bytes - count_weights(quantised).num_bytes

    wrappers = [m["config"] for m in GOLDEN["models"] if "vision_config" in m["config"]]
    assert len(wrappers) > 20
    for config in wrappers:
        assert saved_bytes(config) == saved_bytes(config | {"vision_config": None}), config


OWN_TOWERS: dict[str, tuple[dict[str, int | list[str] | dict[str, Any]], int]] = {
    "dots3_note_vision_encoder": (  # a dense layer, one of 3 experts and one of 5
        {
            **{"hidden_size": 7, "num_hidden_layers": 3, "intermediate_size": 11},
            **{"moe_intermediate_size": 13, "num_local_experts": 5, "patch_size": 2},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"per_layer_config": {"1": {"num_local_experts": 3}}},
            **{"adapter_in_dim": 7, "adapter_merge_size": 2, "adapter_out_dim": 17},
        },
        3 * 4 * 49 + 3 * 7 * 11 + 8 * (7 + 3 * 7 * 13) + 7 * 12 + 28 * (28 + 17),
    ),
    "dots3_note_audio_encoder": (
        {
            **{"hidden_size": 7, "num_hidden_layers": 2, "intermediate_size": 11},
            **{"downsample_hidden_size": 5, "conv_output_size": 20},
            **{"adapter_input_size": 7, "adapter_out_dim": 17},
        },
        2 * (4 * 49 + 3 * 7 * 11) + 9 * (5 + 25 + 25) + 20 * 7 + 17 * (7 + 17),
    ),
    "inkling_audio": ({"n_mel_bins": 3, "mel_vocab_size": 5, "text_hidden_size": 7}, 3 * 5 * 7),
    # Scales of 1, 25, 100 pixels and 200 of two frames, in 3, 128, 320 and 640 channels; the layers
    # are nearest to 1, 600^(1/6) = 2.9, 8.4, 24.5, 71, 207 and 600 pixels.
    "inkling_vision": (
        {
            **{"patch_size": 10, "temporal_patch_size": 2, "num_channels": 3, "n_layers": 6},
            "text_hidden_size": 7,
        },
        3 * 3 + 3 * 25 * 128 + 128 * 128 + 128 * 4 * 320 + 320 * 2 * 640 + 640 * 7,
    ),
}


OWN_TOWERS |= {
    # Two stages of 3 and 6 channels, the latter with attention, of 2 blocks each.
    "apertus1p5_vision_tokenizer": (
        {
            **{"base_channels": 3, "latent_channels": 5, "channel_multiplier": [1, 2]},
            **{"attn_resolutions": [8], "resolution": 16, "num_res_blocks": 2},
            **{"codebook_size": 11, "embed_dim": 7},
        },
        9 * (3 * 3 + 4 * 9 + 9)
        + 9 * (3 * 6 + 3 * 36)
        + 3 * 6
        + 2 * 4 * 36
        + 4 * 9 * 36
        + 4 * 36
        + 9 * 6 * 5
        + (11 + 5) * 7,
    ),
    "wavtokenizer_encoder": (
        {
            **{"num_filters": 4, "kernel_size": 7, "upsampling_ratios": [3, 2], "hidden_size": 5},
            **{"num_residual_layers": 2, "num_lstm_layers": 1, "last_kernel_size": 3},
        },
        7 * 4
        + 2 * (4 * 2 * 4 + 16)
        + 4 * 8 * 4
        + 2 * (8 * 4 * 4 + 64)
        + 8 * 16 * 6
        + 8 * 16 * 16
        + 3 * 16 * 5,
    ),
}


@pytest.mark.parametrize("kind", OWN_TOWERS)
def test_a_tower_of_its_own_kind_equals_a_count_by_hand(kind: str) -> None:
    fields, parameters = OWN_TOWERS[kind]
    config = {"model_type": "dots3_note", "vision_config": {"model_type": kind, **fields}}
    assert sum(m.parameters for m in towers(config | {"text_config": {}}, 7)) == parameters


def test_a_tower_has_what_its_class_assumes_where_a_file_leaves_it_out() -> None:
    for kind, fields in GOLDEN["towers"].items():
        usual = [outer for outer, tower in TOWER_OF.items() if tower == kind]
        outer = usual[0] if usual else kind.removesuffix("_vision")
        vision = {"hidden_size": 64, "depth": 3, "out_hidden_size": 5, "mlp_ratio": 2, **fields}
        vision["intermediate_size"] = fields.get("intermediate_size", 128)
        config = {"model_type": outer, "text_config": {}, "vision_config": vision}
        right = sum(matrix.parameters for matrix in towers(config, 7))
        for field in fields:
            less = {name: value for name, value in vision.items() if name != field}
            if field == "intermediate_size":
                del less["mlp_ratio"]
            for named in ({}, {"model_type": kind}):
                config["vision_config"] = less | named
                assert sum(matrix.parameters for matrix in towers(config, 7)) == right, (
                    kind,
                    field,
                )
    config["vision_config"] = {"model_type": "of mine", "hidden_size": 64, "depth": 3}
    with pytest.raises(ValueError, match="lacks 'intermediate_size', which sizes the weights"):
        list(towers(config, 7))


def test_towers_are_read_by_the_names_of_their_makers() -> None:
    def counted(outer: str, **vision: Any) -> int:
        config = {"model_type": outer, "text_config": {}, "vision_config": vision}
        return sum(matrix.parameters for matrix in towers(config, 7))

    kimi = {"hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3}
    makers = {f"vt_{name}": size for name, size in kimi.items()}
    assert counted("kimi_k25", **makers) == counted("kimi_k25", **kimi)
    step = counted("step3p7", model_type="perception_encoder", width=1536, layers=47)
    layers = 47 * (4 * 1536**2 + 2 * 1536 * 8960)
    assert step == layers + 1536 * 3 * 14**2 + 7 * (1536 + 7)


def test_the_experts_of_dots3_see_are_listed_or_those_of_its_class() -> None:
    fields, _ = OWN_TOWERS["dots3_note_vision_encoder"]
    vision = {"model_type": "dots3_note_vision_encoder", **fields}
    del vision["mlp_layer_types"], vision["per_layer_config"], vision["num_local_experts"]
    config = {"model_type": "dots3_note", "text_config": {}, "vision_config": vision}

    def experts(**changes: Any) -> list[int]:
        config["vision_config"] = vision | changes
        return [m.parameters // 7 for m in towers(config, 7) if m.name == "visual.gate"]

    assert experts(pyramid_num_routed=[-1, 3, 5]) == [3, 5]
    assert experts(num_hidden_layers=42) == [*range(4, 65, 4), 64]
    with pytest.raises(ValueError, match="lacks 'mlp_layer_types'"):
        experts()


def by_hand(linear: float, other: float) -> int:
    """The bytes of `LLAMA` with so many for each element of its layers, and of all else."""
    attention = 256 * (256 + 128 + 128 + 256)
    return int(2 * (attention + 3 * 256 * 512) * linear + 2 * 1000 * 256 * other)


@pytest.mark.parametrize(
    ("quantization", "linear", "other"),
    [
        (None, 2, 2),
        (AWQ, 0.5 + 2.5 / 128, 2),  # a 16-bit scale and a 4-bit zero for each 128
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 1 + 3 / 128, 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, 0.5 + 2.5 / 64, 2),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, 1 + 4 / (64 * 128), 2),
        ({"quant_method": "mxfp4"}, 2, 2),  # experts alone
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            0.5 + 1 / 64,
            2,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16, 2),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 128},
                    }
                },
            },
            0.5 + 2 / 128,
            2,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 4,
                            "type": "int",
                            "group_size": 128,
                            "symmetric": False,  # a 4-bit zero for each 128
                        },
                    }
                },
            },
            0.5 + 2.5 / 128,
            2,
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["layers"]}, 2, 2),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["model.layers.0"],  # one of two
            },
            (3 + 4 / 128**2) / 2,
            2,
        ),
    ],
)
def test_quantised_layers_take_the_bytes_of_their_elements_and_scales(
    quantization, linear, other
) -> None:
    with_cache = quantization and quantization | {"kv_cache_scheme": {"num_bits": 8}}
    for name, config in (
        ("quantization_config", quantization),
        ("quantization_config", with_cache),
        ("compression_config", with_cache),
    ):
        counted = count_weights(LLAMA | {name: config})
        assert counted.num_bytes == by_hand(linear, other)
        assert counted.parameters == by_hand(1, 1)
        wrapper = {"model_type": "llava", "text_config": LLAMA}
        inside = {"model_type": "llava", "text_config": LLAMA | {name: config}}
        assert count_weights(wrapper | {name: config}) == counted == count_weights(inside)


@pytest.mark.parametrize(
    "skipped",
    [
        ["model.layers.0.mlp.down_proj", "lm_head"],
        ["re:.*layers.0.mlp.down_proj$"],
        ["*layers.0.mlp.down_proj"],
        ["language_model.model.layers.0.mlp.down_proj"],
    ],
)
def test_modules_that_are_not_quantised_keep_the_dtype_of_the_model(skipped) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    whole = count_weights(LLAMA | {"quantization_config": fp8}).num_bytes
    fewer = fp8 | {"modules_to_not_convert": skipped}
    left = count_weights(LLAMA | {"quantization_config": fewer}).num_bytes
    assert left - whole == 256 * 512 - 4 * (256 // 128) * (512 // 128)


@pytest.mark.parametrize("other", SKIPPED)
@pytest.mark.parametrize("one", SKIPPED)
def test_modules_are_not_quantised_if_any_list_names_them(one: str, other: str) -> None:
    """Also next to a list that is empty, or null."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def stored_bytes(lists: dict[str, Any]) -> int:
        return count_weights(LLAMA | {"quantization_config": fp8 | lists}).num_bytes

    whole, names = stored_bytes({}), ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj"]
    matrix = 256 * 512 - 4 * (256 // 128) * (512 // 128)
    assert stored_bytes({one: names[:1]} | {other: names[1:]}) - whole == matrix * len({one, other})
    for empty in ([], None):
        assert stored_bytes({other: empty} | {one: names}) - whole == matrix * 2


def test_experts_in_fp4_lie_next_to_layers_in_fp8() -> None:
    """DeepSeek-V4-Flash is stored in about 160 GB, drafts included."""
    with_drafts = count_weights(load_config("deepseek-v4-flash"), drafts=True)
    assert abs(with_drafts.num_bytes / 160e9 - 1) < 0.02
    assert with_drafts.stored == "mxfp4, fp8, bfloat16"


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({}, range(9)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [5]}, [1, 3, 7]),  # Qwen counts from 1
        ({"first_k_dense_replace": 3, "moe_layer_freq": 2}, [4, 6, 8]),  # DeepSeek from 0
        (  # ERNIE from 1, of all layers and not of those that may have experts
            {"moe_layer_start_index": 3, "moe_layer_end_index": 7, "moe_layer_interval": 2},
            [3, 5, 7],
        ),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, [1, 5]),
    ],
)
def test_the_layers_with_experts_follow_the_rule(rule: dict, layers: Sequence[int]) -> None:
    fields = Fields("any", {"num_hidden_layers": 9, "num_experts": 4, **rule})
    assert expert_layers(fields) == frozenset(layers)


@given(*[hst.integers(1, 9)] * 2, hst.integers(0, 4), hst.integers(1, 4), hst.integers(1, 3))
def test_every_matrix_has_whole_bytes_and_scales_of_its_own(
    outputs, inputs, group, rows, count
) -> None:
    """4 bits for each element and 12 for each tile that has one, in whole bytes."""
    scheme = Scheme("any", 4, group=group, rows=rows, scale_bits=12)
    elements = itertools.product(range(outputs), range(inputs))
    tiles = {(output // rows, entry // group if group else 0) for output, entry in elements}
    num_bytes = -(-(outputs * inputs * 4 + len(tiles) * 12) // 8)
    assert scheme.num_bytes(Matrix("any", outputs, inputs, "expert", count)) == count * num_bytes


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}


INT4 = {"num_bits": 4, "type": "int"}
BITS_AND_BYTES = {"quant_method": "bitsandbytes"}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({"quant_method": "AWQ"}, Scheme("awq int4", 4, 128, scale_bits=16 + 4)),
        (AWQ | {"bits": 8, "group_size": 64}, Scheme("awq int8", 8, 64, scale_bits=16 + 8)),
        (
            {"quant_method": "awq", "w_bit": 8, "q_group_size": 64},
            Scheme("awq int8", 8, 64, scale_bits=16 + 8),
        ),
        (AWQ | {"group_size": -1}, Scheme("awq int4", 4, 0, scale_bits=16 + 4)),
        ({"quant_method": "gptq"}, Scheme("gptq int4", 4, 128, scale_bits=16 + 4)),
        (
            {"quant_method": "auto-round", "bits": 2, "group_size": 32, "lm_head": True},
            Scheme("gptq int2", 2, 32, scale_bits=16 + 2, roles=LAYERS | HEAD),
        ),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8", 8)),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            Scheme("fp8", 8, group=128, rows=64),
        ),
        ({"quant_method": "mxfp4"}, Scheme("mxfp4", 4, 32, scale_bits=8, roles=EXPERTS)),
        (
            BITS_AND_BYTES | {"load_in_8bit": True},
            Scheme("bitsandbytes int8", 8, roles=LAYERS | TOWER),
        ),
        (
            BITS_AND_BYTES | {"_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            Scheme("bitsandbytes nf4", 4, 64, roles=LAYERS | TOWER),
        ),
        (
            BITS_AND_BYTES | {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            Scheme("bitsandbytes fp4", 4, 64, scale_bits=8, roles=LAYERS | TOWER),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, Scheme("modelopt fp8", 8)),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
            Scheme("modelopt nvfp4", 4, 16, scale_bits=8),
        ),
        (
            compressed(num_bits=4, type="float", group_size=16),
            Scheme("compressed-tensors fp4", 4, 16, scale_bits=8, roles=LAYERS | HEAD),
        ),
        (
            compressed(num_bits=8, type="float"),
            Scheme("compressed-tensors fp8", 8, scale_bits=16, roles=LAYERS | HEAD),
        ),
        (
            compressed(**INT4, group_size=-1),
            Scheme("compressed-tensors int4", 4, scale_bits=16, roles=LAYERS | HEAD),
        ),
        (
            compressed(**INT4, group_size=32, symmetric=False),
            Scheme("compressed-tensors int4", 4, 32, scale_bits=16 + 4, roles=LAYERS | HEAD),
        ),
    ],
)
def test_a_method_stores_elements_and_scales_as_its_fields_say(
    config: dict[str, Any], scheme: Scheme
) -> None:
    assert read_scheme(config) == scheme


def test_a_decoder_attends_twice_in_every_layer_and_an_encoder_once() -> None:
    sizes = {"d_model": 7, "num_heads": 2, "d_kv": 3, "d_ff": 0, "vocab_size": 0}
    fields = Fields("t5", {**sizes, "num_layers": 1, "num_decoder_layers": 5})
    attention = (1 + 2 * 5) * 4 * 6 * 7
    assert sum(matrix.parameters for _, matrix in t5(fields)) == attention
    for proj, matrices in ((None, 2), ("relu", 2), ("gated-gelu", 3), ("gated-silu", 3)):
        given = {**fields.values, "d_ff": 5, "feed_forward_proj": proj}
        counted = sum(matrix.parameters for _, matrix in t5(Fields("t5", given)))
        assert counted == attention + (1 + 5) * matrices * 5 * 7
    sizes = {"d_model": 7, "encoder_ffn_dim": 3, "decoder_ffn_dim": 2, "vocab_size": 0}
    sizes |= {"max_source_positions": 4, "max_target_positions": 5, "num_mel_bins": 6}
    fields = Fields("whisper", {**sizes, "encoder_layers": 1, "decoder_layers": 5})
    layers = (1 + 2 * 5) * 4 * 7 * 7 + 2 * 3 * 7 + 5 * 2 * 2 * 7
    assert sum(m.parameters for _, m in whisper(fields)) == layers + (4 + 5) * 7 + 3 * 7 * (7 + 6)


def test_layers_that_read_the_cache_of_another_have_no_keys_and_values() -> None:
    config = {"model_type": "gemma4_text", "hidden_size": 7, "num_hidden_layers": 6, "head_dim": 5}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "global_head_dim": 11}
    config |= {"sliding_window": 8, "vocab_size": 0, "intermediate_size": 0}
    config |= {"hidden_size_per_layer_input": 0}
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
    sliding, full = 7 * 5 * 2 * (2 + 1), 7 * 11 * 2 * (2 + 1)
    shared = 7 * 5 * 2 * 2 + 7 * 11 * 2 * 2
    for count, parameters in ((0, 3 * (sliding + full)), (2, 2 * (sliding + full) + shared)):
        counted = count_weights({**config, "num_kv_shared_layers": count})
        assert counted.parameters == parameters


@pytest.mark.parametrize("wrapper", ["llava", "gemma3"])
@pytest.mark.parametrize("inside", [None, False, True])
@pytest.mark.parametrize("outside", [None, False, True])
def test_a_wrapper_says_whether_the_head_is_the_embedding(wrapper, inside, outside) -> None:
    """Its language model says it if the wrapper does not, and then the class: Gemma's is."""
    text = LLAMA if wrapper == "llava" else load_config("gemma-3-4b")["text_config"]
    config = {"model_type": wrapper, "text_config": text | {"tie_word_embeddings": inside}}
    head = text["vocab_size"] * text["hidden_size"]
    tied = next((flag for flag in (outside, inside) if flag is not None), wrapper == "gemma3")
    untied = count_weights(config | {"tie_word_embeddings": False}).parameters
    counted = count_weights(config | {"tie_word_embeddings": outside}).parameters
    assert untied - counted == head * tied


def test_a_file_without_a_dtype_counts_as_bfloat16() -> None:
    nameless = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert count_weights(nameless) == count_weights(LLAMA)
    assert count_weights(LLAMA | {"torch_dtype": "float32"}).num_bytes == by_hand(4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size=None does not give the sizes of the weights"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method='aqlm'"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "X"}}, "quant_algo"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
        ({"quantization_config": AWQ | {"group_size": -2}}, "group_size=-2 must be an int"),
        ({"quantization_config": AWQ | {"group_size": "64"}}, "group_size='64' must be an int"),
        ({"model_type": "xverse"}, "the weights of model_type='xverse' are not known"),
        (
            {"model_type": "h2ovl_chat", "llm_config": LLAMA, "vision_config": {"depth": 1}},
            "model_type='h2ovl_chat' are not known; pass the content of llm_config to count what",
        ),
        (
            {"vision_config": {"depth": 1}},
            "the sizes of the vision_config of model_type='llama' are not known",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        count_weights(LLAMA | changes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_of_a_dense_model_has_a_kv_head_at_least(ranks: int) -> None:
    """`LLAMA` has 4 heads of 64, and 2 for keys and values."""
    queries, values, width = 256 * 256, 256 * 2 * 64, 3 * 256 * 512
    layer = 2 * queries // ranks + 2 * values // min(ranks, 2) + width // ranks
    table, weights = 1000 * 256 // ranks, count_weights(LLAMA)
    both = weights.bytes_per_gpu(tensor_parallel=ranks, pipeline_parallel=2)
    assert both == (2 * (layer + table),) * 2  # the embedding, and the head
    tied = count_weights(LLAMA | {"tie_word_embeddings": True})
    assert tied.bytes_per_gpu(tensor_parallel=ranks) == (2 * (2 * layer + table),)
    assert tied.bytes_per_gpu(tensor_parallel=ranks, pipeline_parallel=2) == both


def test_ranks_do_not_divide_the_down_projections_of_latents_nor_routers() -> None:
    """A dense layer, then one of 6 experts and a shared one; 16 heads and an indexer, 4 ranks."""
    config = {"model_type": "deepseek_v32", "hidden_size": 7, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 16, "kv_lora_rank": 5, "qk_rope_head_dim": 4}
    config |= {"qk_nope_head_dim": 11, "v_head_dim": 13, "q_lora_rank": 17, "vocab_size": 100}
    config |= {"index_n_heads": 2, "index_head_dim": 19, "intermediate_size": 8}
    config |= {"n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 12}
    config |= {"first_k_dense_replace": 1, "max_position_embeddings": 64}
    config |= {"tie_word_embeddings": False}
    whole = 7 * 17 + 7 * (5 + 4) + 17 * 2 * 19 + 7 * 19 + 7 * 2
    heads = 17 * 16 * (11 + 4) + 5 * 16 * (11 + 13) + 16 * 13 * 7
    dense, experts_of_layer, router = 3 * 7 * 8, (6 + 1) * 3 * 7 * 12, 6 * 7
    assert count_weights(config).bytes_per_gpu(tensor_parallel=4, pipeline_parallel=2) == (
        2 * (whole + (heads + dense + 7 * 100) // 4),
        2 * (whole + router + (heads + experts_of_layer + 7 * 100) // 4),
    )


def test_the_layers_of_a_hybrid_lie_on_the_stages_that_they_are_of() -> None:
    """Mamba2 with one group for all ranks, a feed-forward layer, attention; 3 stages, 2 ranks."""
    config = {"model_type": "nemotron_h", "hidden_size": 8, "hybrid_override_pattern": "M-*-"}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1}
    config |= {"head_dim": 6, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 1}
    config |= {"ssm_state_size": 3, "conv_kernel": 4, "intermediate_size": 10, "vocab_size": 100}
    config |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    inner, of_groups, width = 4 * 5, 2 * 3, 2 * 8 * 10
    mamba = (8 * (2 * inner + 4) + 4 * inner + inner * 8) // 2 + of_groups * (8 + 4)
    attention = 2 * 8 * 4 * 6 // 2 + 2 * 8 * 6
    table = 8 * 100 // 2
    counted = count_weights(config).bytes_per_gpu(tensor_parallel=2, pipeline_parallel=3)
    assert counted == (
        2 * (mamba + table),
        2 * (width // 2 + attention),  # the stage before the last has the layer that is left
        2 * (width // 2 + table),
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_stages_have_all_of_a_model_and_ranks_no_less_than_their_share(drafts: bool) -> None:
    for config in [*(model["config"] for model in GOLDEN["models"]), *map(load_config, PRESETS)]:
        weights = count_weights(config, drafts=drafts)
        whole, layers = weights.num_bytes, weights.num_layers
        assert weights.bytes_per_gpu() == (whole,)
        for stages in {min(layers, n) for n in (2, 3, layers)}:
            sizes = weights.bytes_per_gpu(pipeline_parallel=stages)
            copies = sum(part.num_bytes for part in weights.parts if len(part.layers) > 1)
            assert whole <= sum(sizes) <= whole + copies * (stages - 1)
            of_ranks = weights.bytes_per_gpu(pipeline_parallel=stages, tensor_parallel=4)
            for size, of_rank in zip(sizes, of_ranks, strict=True):
                assert size <= 4 * of_rank <= 4 * size, config["model_type"]
        with pytest.raises(ValueError, match=rf"must lie in 1\.\.{layers}"):
            weights.bytes_per_gpu(pipeline_parallel=layers + 1)
