"""Layers from a config.json: published models planned as vLLM plans them, and refusals by name."""

import collections
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from jaxkv._src.hf_config import (
    count_weights,
    encoder_len,
    layers_from_config,
    load_config,
    model_len,
    preset_names,
    shipped_dtype,
)
from jaxkv._src.hf_config._fields import CONCERNS, HARMLESS
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.specs import (
    CrossAttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    Limits,
    MLASpec,
    SharedKVSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    StateSpec,
)

MEMORY = 40 * 2**30
LIMITS = Limits(max_in_flight_tokens=16384)


class Row(NamedTuple):
    """One model as vLLM 0.33 plans it in 40 GiB.

    groups: layers@block of every group, sorted.
    zero: whether groups reuse blocks of another format.
    longest: the longest request that fits, when that is less than the model's own length.
    """

    groups: str
    bytes_per_block: int
    blocks_per_request: int
    num_blocks: int
    zero: bool = False
    longest: int | None = None


ROWS = {
    "llama-3.1-8b": Row("32@16", 2_097_152, 8192, 20480),
    "llama-3.1-70b": Row("80@16", 5_242_880, 8192, 8192, longest=131056),
    "qwen3-8b": Row("36@16", 2_359_296, 2560, 18204),
    "qwen3-32b": Row("64@16", 4_194_304, 2560, 10240),
    "qwen3-235b-a22b": Row("94@16", 3_080_192, 16384, 13943, longest=223072),
    "gemma-2-9b": Row("2x21@16", 2_752_512, 512 + 512, 15603),
    "gemma-2-27b": Row("2x23@16", 3_014_656, 512 + 512, 14246),
    "gemma-3-4b": Row("4@16 6x5@16", 327_680, 14726, 131072),
    "gemma-3-12b": Row("6x8@16", 1_048_576, 13637, 40960),
    "gemma-3-27b": Row("2x8@16 4x9@16 10@16", 1_310_720, 14726, 32768),
    "gemma-4-26b-a4b": Row("5x5@16 5@32", 655_360, 13637, 65536, zero=True),
    "gemma-4-31b": Row("5x10@16 10@32", 2_621_440, 13637, 16384, zero=True),
    "gemma-4-e2b": Row("3@16 4x3@32", 98_304, 10308, 436906, zero=True),
    "gemma-4-e4b": Row("4@16 5x4@32", 262_144, 10837, 163840, zero=True),
    "gpt-oss-20b": Row("2x12@16", 393_216, 1033 + 8192, 109226),
    "gpt-oss-120b": Row("2x18@16", 589_824, 9225, 72817),
    "llama-4-scout": Row("4x12@16", 786_432, 3 * 1536 + 8192, 54613),
    "llama-4-maverick": Row("4x12@16", 786_432, 3 * 1536 + 8192, 54613),
    "mistral-7b-v0.1": Row("32@16", 2_097_152, 1281, 20480),
    "deepseek-v3": Row("61@64", 4_497_408, 2560, 9549),
    "deepseek-v3.2": Row("122@64", 3_076_352, 2560, 13961),
    "qwen3-next-80b-a3b": Row("4x12@544", 13_369_344, 3 + 482, 3212, zero=True),
    "qwen3.5-35b-a3b": Row("4x10@1056", 21_626_880, 3 + 249, 1985, zero=True),
    "qwen3.5-397b-a17b": Row("4x15@2096", 64_389_120, 3 + 126, 667, zero=True),
    "qwen3.5-4b": Row("4x8@528", 17_301_504, 3 + 497, 2482, zero=True),
    "jamba-v0.1": Row("8x4@80", 1_310_720, 7 + 3277, 32768, zero=True),
    "nemotron-h-8b": Row("7x4@1040", 17_039_360, 6 + 127, 2520, zero=True),
    "nemotron-nano-9b-v2": Row("3@1312 7x4@1312", 21_495_808, 7 + 100, 1998, zero=True),
    "falcon-h1-7b": Row("2x44@1568", 70_647_808, 1 + 168, 607, zero=True),
    "falcon-h1-24-layers": Row("2x24@1568", 38_535_168, 1 + 84, 1114, zero=True),
    "granite-4.0-h-tiny": Row("10x4@400", 3_276_800, 9 + 328, 13107, zero=True),
    "zamba2-2.7b": Row("7x9@48", 8_847_360, 6 + 86, 4854, zero=True),
    "kimi-linear-48b-a3b": Row("6@1920 3x7@1920", 15_482_880, 3 + 547, 2774, zero=True),
    "minimax-text-01": Row("8x10@1024", 41_943_040, 7 + 977, 1024, zero=True),
    "whisper-large-v3": Row("2x32@16", 2_621_440, 28 + 94, 16384),
}

STATE_PAGES = {
    "qwen3-next-80b-a3b": 1_097_728,
    "qwen3.5-35b-a3b": 2_146_304,
    "qwen3.5-4b": 2_146_304,
    "qwen3.5-397b-a17b": 4_268_032,
    "jamba-v0.1": 311_296,
    "nemotron-h-8b": 4_255_744,
    "nemotron-nano-9b-v2": 5_316_608,
    "falcon-h1-7b": 1_594_368,
    "falcon-h1-24-layers": 1_594_368,
    "granite-4.0-h-tiny": 806_400,
    "zamba2-2.7b": 686_848,
    "kimi-linear-48b-a3b": 2_170_880,
    "minimax-text-01": 4_194_304,
}

OTHER_PRESETS = {"qwen3-next-demo", "qwen3-30b-a3b", "deepseek-v4-flash", "deepseek-v4-pro"}


def own_caches(config: dict[str, Any], **options: Any) -> dict[str, LayerSpec]:
    layers = layers_from_config(config, **options)
    return {name: spec for name, spec in layers.items() if isinstance(spec, LayerSpec)}


def only[Spec: LayerSpec](layers: dict[str, LayerSpec], kind: type[Spec]) -> Spec:
    """The one spec of exactly this class that the layers have."""
    specs = {spec for spec in layers.values() if type(spec) is kind}
    assert len(specs) == 1, specs
    (spec,) = specs
    assert isinstance(spec, kind)
    return spec


def sizes(row: Row) -> list[tuple[int, int]]:
    """(block size, layers) of every group, sorted."""
    found = re.findall(r"(?:(\d+)x)?(\d+)@(\d+)", row.groups)
    pairs = [(int(block), int(layers)) for n, layers, block in found for _ in range(int(n or 1))]
    return sorted(pairs)


def planned(config: dict[str, Any], **options: Any) -> Plan:
    return plan_cache(
        layers_from_config(config, **options),
        MEMORY,
        max_model_len=model_len(config),
        fit_max_model_len=True,
        limits=dataclasses.replace(LIMITS, max_encoder_tokens=encoder_len(config)),
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_published_model_is_planned_as_vllm_plans_it(name: str) -> None:
    config, row = load_config(name), ROWS[name]
    plan = planned(config)
    assert sorted((group.block_size, len(group.layers)) for group in plan.groups) == sizes(row)
    assert plan.bytes_per_block == (row.bytes_per_block,)
    assert plan.num_blocks == row.num_blocks
    assert plan.admission_blocks(model_len(config)) == row.blocks_per_request
    assert plan.max_model_len == (row.longest or model_len(config))
    assert plan.groups_to_zero == (row.zero,) * len(plan.groups)


def test_every_preset_is_checked() -> None:
    assert list(preset_names()) == sorted(set(ROWS) | OTHER_PRESETS)


@pytest.mark.parametrize("name", STATE_PAGES)
def test_a_state_takes_the_bytes_that_vllm_counts(name: str) -> None:
    assert only(own_caches(load_config(name)), StateSpec).data_bytes == STATE_PAGES[name]


@pytest.mark.parametrize("name", STATE_PAGES)
def test_hybrid_layers_have_the_block_asked_for_and_planning_enlarges_it(name: str) -> None:
    config = load_config(name)
    usual = 64 if name == "kimi-linear-48b-a3b" else 16
    for asked, block_size in ((None, usual), (32, 32)):
        layers = own_caches(config, block_size=asked)
        assert {spec.block_size for spec in layers.values()} == {block_size}
    assert {group.block_size for group in planned(config).groups} == {sizes(ROWS[name])[0][0]}


def test_resumable_states_take_one_block_more_each() -> None:
    plan = planned(load_config("qwen3-next-80b-a3b"), state_cache_mode="align")
    assert plan.admission_blocks(262_144) == 6 + 482


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("qwen3.5-4b", {}, 8),
        ("nemotron-h-8b", {"state_cache_mode": "all", "block_size": 32}, 8),
        ("nemotron-h-8b", {"state_cache_mode": "all", "block_size": 12}, 0),
        ("qwen3.5-4b", {"speculative_tokens": 2}, 0),
        ("falcon-h1-24-layers", {}, 0),  # keys of 256
        ("kimi-linear-48b-a3b", {}, 0),  # a decay for each key channel
    ],
)
def test_states_have_rings_where_a_kernel_takes_them(name: str, options: Any, wanted: int) -> None:
    layers = layers_from_config(load_config(name), replay="auto", **options)
    assert {spec.replay for spec in layers.values() if isinstance(spec, StateSpec)} == {wanted}


def test_speculative_tokens_add_states_and_convolution_rows() -> None:
    config = load_config("qwen3-next-80b-a3b")
    state = only(own_caches(config, speculative_tokens=2), StateSpec)
    assert state.shapes[0] == (5, 8192)
    assert state.growth.max_blocks(1000, 1, 0) == 3
    state = only(own_caches(config, speculative_tokens=2, replay=8), StateSpec)
    assert state.growth.max_blocks(1000, 1, 0) == 1 and state.growth.max_drafts == 2
    config = load_config("kimi-linear-48b-a3b")
    state = only(own_caches(config, speculative_tokens=3), StateSpec)
    assert state.shapes[0][0] == 6


@pytest.mark.parametrize("name", ["qwen3-8b", "jamba-v0.1", "falcon-h1-7b", "minimax-text-01"])
def test_ranks_divide_heads_and_states(name: str) -> None:
    whole, half = (own_caches(load_config(name), tensor_parallel=ranks) for ranks in (1, 2))
    assert {name: 2 * spec.token_bytes for name, spec in attention(half).items()} == {
        name: spec.token_bytes for name, spec in attention(whole).items()
    }
    if name in STATE_PAGES and name != "falcon-h1-7b":  # its one group is repeated
        assert 2 * only(half, StateSpec).data_bytes == STATE_PAGES[name]


def attention(layers: dict[str, LayerSpec]) -> dict[str, FullAttentionSpec]:
    return {name: spec for name, spec in layers.items() if isinstance(spec, FullAttentionSpec)}


def test_latent_rows_stay_whole_on_every_rank_and_begin_with_the_value() -> None:
    config = load_config("deepseek-v3")
    assert own_caches(config, tensor_parallel=8) == own_caches(config)
    row = only(own_caches(config), MLASpec)
    assert (row.head_size, row.value_size, row.block_size) == (512 + 64, 512, 64)


def test_an_fp8_cache_doubles_the_attention_block_of_a_hybrid() -> None:
    config = load_config("qwen3-next-80b-a3b")
    assert {group.block_size for group in planned(config, kv_dtype="fp8_e4m3").groups} == {1072}
    layers = own_caches(config, kv_dtype="fp8_e4m3")
    assert only(layers, StateSpec).data_bytes == STATE_PAGES["qwen3-next-80b-a3b"]


def test_names_follow_the_layers_of_the_model() -> None:
    assert list(layers_from_config(load_config("qwen3-next-80b-a3b")))[:4] == [
        "layers.0.linear_attention",
        "layers.1.linear_attention",
        "layers.2.linear_attention",
        "layers.3.full_attention",
    ]
    falcon = list(layers_from_config(load_config("falcon-h1-7b")))
    assert falcon[:3] == ["layers.0.full_attention", "layers.0.mamba", "layers.1.full_attention"]
    zamba = list(layers_from_config(load_config("zamba2-2.7b")))
    assert zamba[6:8] == ["layers.6.full_attention", "layers.6.mamba"]
    nemotron = list(layers_from_config(load_config("nemotron-h-8b")))
    assert nemotron[:5] == [
        *(f"layers.{i}.mamba" for i in (0, 2, 4, 6)),
        "layers.7.full_attention",
    ]


def test_layers_that_share_read_the_last_owner_of_their_kind() -> None:
    layers = layers_from_config(load_config("gemma-4-e2b"))
    shared = {name: spec.layer for name, spec in layers.items() if isinstance(spec, SharedKVSpec)}
    assert len(layers) == 35 and len(shared) == 20
    assert set(shared.values()) == {"layers.13.sliding_attention", "layers.14.full_attention"}
    assert shared["layers.19.full_attention"] == "layers.14.full_attention"


def test_the_encoder_of_whisper_keeps_nothing() -> None:
    assert encoder_len(load_config("whisper-large-v3")) == 1500
    assert encoder_len(load_config("llama-3.1-8b")) == 0
    lengths = {"max_encoder_position_embeddings": 96, "max_position_embeddings": 64}
    assert (
        encoder_len({"model_type": "led", **lengths, "max_decoder_position_embeddings": 32}) == 96
    )
    layers = layers_from_config(load_config("whisper-large-v3"))
    kinds = [type(spec) for spec in layers.values()]
    assert kinds == [EncoderOnlySpec] * 32 + [FullAttentionSpec, CrossAttentionSpec] * 32


def test_deepseek_v32_can_keep_plain_latents() -> None:
    config = load_config("deepseek-v3.2")
    rows = {spec.data_bytes for spec in own_caches(config, kv_dtype="bf16").values()}
    assert rows == {64 * 1152, 64 * 132}
    assert own_caches(config, kv_dtype="fp8_e4m3") == own_caches(config)


def test_glm_5_is_latent_attention_with_an_indexer() -> None:
    config = load_config("deepseek-v3.2") | {"model_type": "glm_moe_dsa", "num_hidden_layers": 78}
    layers = own_caches(config | {"indexer_types": ["full"] * 78})
    assert len(layers) == 156
    assert sum(spec.page_bytes for spec in layers.values()) == 78 * 64 * (656 + 132)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full", "full", "shared", "shared", "shared", "full"]},
        {"index_topk_pattern": "FFSSSF"},
        {"index_topk_freq": 4},  # from layer 1 on, by the offset that is the default
        {"index_topk_freq": 4, "indexer_types": ["full", "full", *["shared"] * 3, "full"]},
    ],
)
def test_layers_that_reuse_the_picks_of_another_keep_no_index_keys(changes) -> None:
    layers = own_caches(preset("deepseek-v3.2", num_hidden_layers=6, **changes))
    assert [name for name in layers if "indexer" in name] == [
        f"layers.{i}.indexer" for i in (0, 1, 5)
    ]
    assert len(layers) == 6 + 3


V4 = {
    "deepseek-v4-flash": (1_002_240, {"mla": 41, "indexer": 21, "sliding_mla": 43}),
    "deepseek-v4-pro": (1_435_968, {"mla": 61, "indexer": 30, "sliding_mla": 61}),
}


@pytest.mark.parametrize("name", V4)
def test_deepseek_v4_has_its_kinds_of_layers_pages_and_windows(name: str) -> None:
    layers = own_caches(load_config(name))
    counts = V4[name][1] | {"compressor_state": V4[name][1]["mla"]}
    counts["indexer_compressor_state"] = counts["indexer"]
    kinds = [layer.rsplit(".", 1)[1] for layer in layers]
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    full = [spec for spec in layers.values() if type(spec) is MLASpec]
    assert sum(spec.page_bytes for spec in full) == V4[name][0]
    assert {(s.block_size, s.compress_ratio, s.data_bytes, s.page_bytes) for s in full} == {
        (256, 4, 64 * 584, 37_440),
        (256, 128, 2 * 584, 1_728),
        (256, 4, 64 * 132, 8_640),
    }
    windows = {s for s in layers.values() if isinstance(s, SlidingWindowMLASpec)}
    assert {(s.block_size, s.sliding_window, s.dtype, s.token_bytes) for s in windows} == {
        (64, 128, "uint8", 584),
        (4, 8, "float32", 4 * 2048),
        (4, 8, "float32", 4 * 512),
        (8, 128, "float32", 4 * 1024),
    }


def test_deepseek_v4_by_layer_types_is_the_same_model() -> None:
    kinds = {0: "sliding_attention"} | {
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    config = load_config("deepseek-v4-flash")
    ratios = config.pop("compress_ratios")
    renamed = config | {"layer_types": [kinds[ratio] for ratio in ratios]}
    assert layers_from_config(renamed) == layers_from_config(load_config("deepseek-v4-flash"))


def llama(**changes: Any) -> dict[str, Any]:
    return load_config("llama-3.1-8b") | changes


# Other ways to tell layers: (changes to Llama 3.1 8B, kinds of the layers).
PLAIN = {"head_dim": 128, "num_hidden_layers": 4}
FULL, SLIDING = "full_attention", "sliding_attention"
SPELLINGS = {
    "mistral without a window": ({"model_type": "mistral", "sliding_window": None}, [FULL]),
    "mistral by its default": ({"model_type": "mistral"}, [SLIDING]),
    "ministral 3": ({"model_type": "ministral3"}, [FULL]),
    "ministral": ({"model_type": "ministral", "sliding_window": 4096}, [SLIDING]),
    "ministral by layer": (
        {
            "model_type": "ministral",
            "sliding_window": 4096,
            "layer_types": [SLIDING, FULL, FULL, FULL],
        },
        [SLIDING, FULL],
    ),
    "glm 4": ({"model_type": "glm4"}, [FULL]),
    "minimax m2": ({"model_type": "minimax_m2", "attn_type_list": [1] * 4}, [FULL]),
    "minimax, all full": ({"model_type": "minimax", "layer_types": [FULL] * 4}, [FULL]),
    "qwen 3 with an idle window": (
        {"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False},
        [FULL],
    ),
    "gpt-oss by its default": (
        {"model_type": "gpt_oss", "sliding_window": 128},
        [SLIDING, FULL, SLIDING, FULL],
    ),
    "nemotron by list": (
        {
            **load_config("nemotron-h-8b"),
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba", "mlp", "attention", "moe"],
        },
        ["mamba", FULL],
    ),
    "nemotron by the list of other models": (
        {
            **load_config("nemotron-h-8b"),
            "hybrid_override_pattern": None,
            "layers_block_type": None,
            "layer_types": ["mamba", "mlp", "attention", "moe"],
        },
        ["mamba", FULL],
    ),
}


@pytest.mark.parametrize(("changes", "kinds"), SPELLINGS.values(), ids=SPELLINGS)
def test_families_may_tell_their_layers_in_other_ways(
    changes: dict[str, Any], kinds: list[str]
) -> None:
    layers = own_caches(llama() | PLAIN | changes | {"num_hidden_layers": 4})
    found = [name.rsplit(".", 1)[1] for name in layers]
    assert found[: len(kinds)] == kinds and set(found) == set(kinds)
    assert {s.sliding_window for s in layers.values() if isinstance(s, SlidingWindowSpec)} <= {
        128,
        4096,
    }


def test_a_multimodal_model_is_read_by_its_text_config() -> None:
    gemma = load_config("gemma-3-4b")
    text = {"torch_dtype": "bfloat16", **gemma["text_config"]}
    assert layers_from_config(text) == layers_from_config(gemma)
    assert model_len(gemma) == 131072


QUANTIZED_CACHES = {
    "compressed-tensors": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "modelopt": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    "modelopt, nested": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    "quark": {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}},
    "quark, 0.10": {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8"}}}},
}


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("tool", QUANTIZED_CACHES)
def test_quantised_checkpoints_name_their_cache_dtype(field: str, tool: str) -> None:
    config = llama() | {field: QUANTIZED_CACHES[tool]}
    with pytest.raises(ValueError, match=rf"{field}\..*kv_cache.*pass its dtype as kv_dtype"):
        layers_from_config(config)
    assert only(own_caches(config, kv_dtype="fp8"), FullAttentionSpec).dtype == "float8_e4m3fn"


@pytest.mark.parametrize("value", [None, [], {}, "none", "auto"])
def test_a_quantization_may_leave_the_cache_out(value: object) -> None:
    config = llama() | {"quantization_config": {"export": {"kv_cache_group": value}}}
    assert layers_from_config(config) == layers_from_config(llama())


ARITHMETIC = {
    "deepseek-v4-flash": {"hc_sinkhorn_iters": 20, "o_lora_rank": 1024, "index_topk": 512},
    "deepseek-v3.2": {"indexer_rope_interleave": True, "q_lora_rank": 1536},
    "falcon-h1-7b": {"mamba_use_mlp": True, "mamba_chunk_size": 128, "mamba_rms_norm": False},
    "gemma-2-9b": {"sliding_window_size": 4096, "attn_logit_softcapping": 50.0},
    "gpt-oss-20b": {"attention_bias": True, "initial_context_length": 4096},
    "nemotron-h-8b": {"chunk_size": 128, "use_conv_bias": True, "mamba_proj_bias": False},
    "zamba2-2.7b": {"gated_linear_unit": True, "hybrid_layer_ids": [6], "chunk_size": 256},
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_fields_that_only_change_arithmetic_are_let_through(name: str) -> None:
    config = load_config(name)
    assert layers_from_config(config | ARITHMETIC[name]) == layers_from_config(config)


def test_a_file_without_a_dtype_needs_kv_dtype() -> None:
    config = load_config("llama-3.1-8b")
    del config["torch_dtype"]
    with pytest.raises(ValueError, match=r"torch_dtype.*pass kv_dtype"):
        layers_from_config(config)
    asked = layers_from_config(config, kv_dtype="bfloat16")
    assert asked == layers_from_config(load_config("llama-3.1-8b"))


def test_states_without_a_dtype_take_the_one_asked_for_if_a_model_may_have_it() -> None:
    config = load_config("jamba-v0.1")
    del config["torch_dtype"]
    for dtype in ("bfloat16", "float16", "float32"):
        asked = layers_from_config(config, kv_dtype=dtype)
        assert asked == layers_from_config(config | {"torch_dtype": dtype})
    with pytest.raises(ValueError, match=r"names no dtype.*states"):
        layers_from_config(config, kv_dtype="fp8")


def test_a_file_without_a_dtype_has_the_one_that_its_family_ships() -> None:
    config = load_config("gpt-oss-20b")
    assert "torch_dtype" not in config and shipped_dtype(config) == "bfloat16"
    assert {spec.dtype for spec in attention(own_caches(config)).values()} == {"bfloat16"}
    assert shipped_dtype(config | {"torch_dtype": "float16"}) is None
    half = own_caches(config | {"torch_dtype": "float16"})
    assert {spec.dtype for spec in attention(half).values()} == {"float16"}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    return load_config(name) | changes


def qwen_next(**changes: Any) -> dict[str, Any]:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    return preset("qwen3-next-80b-a3b", layer_types=kinds, **changes)


MLLAMA = llama(model_type="mllama_text_model", num_hidden_layers=2)
REFUSALS = {
    "sliding_window_size=2048": preset("gemma-2-9b", sliding_window_size=2048),
    "attention_sink=4": llama(attention_sink=4),
    "num_sink_tokens=4": llama(num_sink_tokens=4),
    "sliding_window": preset("gemma-2-9b", sliding_window=None),
    "sliding_window'": preset("gpt-oss-20b", sliding_window=None),
    "sliding_window must": llama(model_type="mistral", sliding_window=0),
    "torch_dtype=": llama(torch_dtype=["bfloat16"]),
    "model_type=['llama']": llama(model_type=["llama"]),
    "attention_k_eq_v": {
        **load_config("gemma-4-31b"),
        "text_config": {**load_config("gemma-4-31b")["text_config"], "attention_k_eq_v": "yes"},
    },
    "num_kv_shared_layers=36 is not understood": {
        **load_config("gemma-4-e2b"),
        "text_config": {**load_config("gemma-4-e2b")["text_config"], "num_kv_shared_layers": 36},
    },
    "model_type": llama(model_type="mllama"),
    "model_type='unheard_of' with a text_config is none of the": {
        "model_type": "unheard_of",
        "text_config": llama(),
    },
    "model_type='bert' is refused: it is an encoder": llama(model_type="bert"),
    "model_type='musicgen' is refused: its positions are": {"model_type": "musicgen"},
    "sliding_window=4096": llama(sliding_window=4096),
    "attention_chunk_size=8192": llama(attention_chunk_size=8192),
    "kv_lora_rank=512": llama(kv_lora_rank=512),
    "index_topk_freq=4 is not understood for model_type='deepseek_v32'; it contradicts": preset(
        "deepseek-v3.2", index_topk_freq=4, indexer_types=["full"] * 61
    ),
    "sparse_config": llama(sparse_config={"topk": 64}),
    "v_head_dim=3 is": llama(per_layer_config={"5": {"num_key_value_heads": 1, "v_head_dim": 3}}),
    "attention_other_setting": llama(attention_other_setting={"head_dim": 64}),
    "sliding_window=4096, kv_lora_rank=512 are not understood": llama(
        sliding_window=4096, kv_lora_rank=512
    ),
    "num_hidden_layers=32": {
        "model_type": "llava",
        "num_hidden_layers": 31,
        "text_config": llama(),
    },
    "sliding_window_pattern=4": preset("gemma-3-4b", sliding_window_pattern=4),
    "full_attention_interval": qwen_next(full_attention_interval=3),
    "use_sliding_window=False": preset(
        "qwen3-8b", layer_types=["sliding_attention"] * 36, sliding_window=4096
    ),
    "hybrid_override_pattern=": preset("nemotron-h-8b", layers_block_type=["attention"] * 52),
    "indexer_types": preset("deepseek-v3.2", indexer_types=["full", "shared"]),
    "index_head_dim=128": preset("deepseek-v3", index_head_dim=128),
    "num_kv_shared_layers=35 is not understood": {  # all of one kind, and no owner among them
        **load_config("gemma-4-e2b"),
        "text_config": {
            **load_config("gemma-4-e2b")["text_config"],
            **{"num_kv_shared_layers": 35, "layer_types": ["full_attention"] * 35},
        },
    },
    "num_kv_shared_layers=4": llama(num_kv_shared_layers=4),
    "compress_ratios": llama(compress_ratios=[4]),
    "compress_ratios=": preset("deepseek-v4-flash", compress_ratios=[8] * 43),
    "head_dim=256": preset("deepseek-v4-flash", head_dim=256),
    "layers_block_type": llama(layers_block_type=["attention"] * 32),
    "hybrid_override_pattern='M'": llama(hybrid_override_pattern="M"),
    "hybrid_override_pattern": preset("nemotron-h-8b", hybrid_override_pattern="M?"),
    "attn_type_list": llama(attn_type_list=[0, 1]),
    "attn_type_list=": preset(
        "llama-3.1-8b", model_type="minimax_m2", head_dim=128, attn_type_list=[0] * 32
    ),
    "use_sliding_window=True": preset("qwen3-235b-a22b", use_sliding_window=True),
    "layer_types": preset("qwen3-8b", layer_types=["mamba"] * 36),
    "dual_chunk_attention_config": preset("qwen3-8b", dual_chunk_attention_config={"a": 1}),
    "an encoder, which attends in both directions, keeps no cache": {
        **load_config("gemma-3-4b")["text_config"],
        **{"model_type": "gemma3_text", "use_bidirectional_attention": True},
    },
    "full_attn_mod=2 is not understood": llama(model_type="phi3", full_attn_mod=2),
    "diffusers writes such a file, of a FluxPipeline": {"_class_name": "FluxPipeline"},
    "an adapter; pass the config.json of its base model, a/b": {
        **{"peft_type": "LORA", "base_model_name_or_path": "a/b"},
    },
    "pass the config.json of Transformers": {"dim": 5120, "n_layers": 40},
    "use_bidirectional_attention='all'": preset("gemma-2-9b", use_bidirectional_attention="all"),
    "head_dim'": preset("gemma-2-9b", head_dim=None),
    "v_head_dim=64": llama(v_head_dim=64),
    "cross_attention_layers": llama(cross_attention_layers=[3]),
    "numbers of the 2 layers": MLLAMA | {"cross_attention_layers": ["1"]},
    "linear_attn_config": preset("kimi-linear-48b-a3b", linear_attn_config=None),
    "linear_attn_config=": preset(
        "kimi-linear-48b-a3b",
        linear_attn_config=load_config("kimi-linear-48b-a3b")["linear_attn_config"]
        | {"kda_layers": [1]},
    ),
    "its two lists must name every layer once": preset(
        "kimi-linear-48b-a3b",
        num_hidden_layers=2,
        linear_attn_config=load_config("kimi-linear-48b-a3b")["linear_attn_config"]
        | {"full_attn_layers": [1], "kda_layers": [1]},
    ),
    "conv_window=3 is": preset(
        "kimi-linear-48b-a3b",
        linear_attn_config=load_config("kimi-linear-48b-a3b")["linear_attn_config"]
        | {"conv_window": 3},
    ),
    "index_topk=2048": llama(index_topk=2048),
    "num_hidden_layers=1000000000000": llama(num_hidden_layers=10**12),
    "hidden_size=4095": llama(hidden_size=4095),
    "layer_types=5": llama(layer_types=5),
    "quantization_config='fp8'": llama(quantization_config="fp8"),
    "mamba_ssm_cache_dtype": preset("nemotron-h-8b", mamba_ssm_cache_dtype="float64"),
    "lacks 'head_dim'": preset("nemotron-h-8b", head_dim=None, attention_head_dim=None),
    "mamba_d_ssm": preset("falcon-h1-7b", mamba_d_ssm=1024),
    "mamba_expand": preset("granite-4.0-h-tiny", mamba_expand=3),
    "mamba_ssm_dtype": preset("qwen3-next-demo", model_type="qwen3_5_text", mamba_ssm_dtype=None),
    "layers_block_type'": preset("zamba2-2.7b", layers_block_type=None),
    "lacks 'mamba_headdim'": preset("zamba2-2.7b", mamba_headdim=None, n_mamba_heads=10**6),
    "lacks 'attention_head_dim'": preset(
        "zamba2-2.7b", attention_head_dim=None, num_attention_heads=10**6
    ),
}


@pytest.mark.parametrize(("message", "config"), REFUSALS.items(), ids=REFUSALS)
def test_what_is_not_understood_is_refused_by_name(message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        layers_from_config(config)


def test_ratios_of_draft_layers_add_no_layer() -> None:
    ratios = load_config("deepseek-v4-flash")["compress_ratios"]
    with_draft = preset("deepseek-v4-flash", compress_ratios=[*ratios, 0])
    assert layers_from_config(with_draft) == layers_from_config(load_config("deepseek-v4-flash"))
    with pytest.raises(ValueError, match="compress_ratios"):
        layers_from_config(preset("deepseek-v4-flash", compress_ratios=[*ratios, 0, 0]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deepseek-v4-flash", {"kv_dtype": "bf16"}, "kv_dtype"),
        ("deepseek-v3.2", {"kv_dtype": "int8"}, "kv_dtype"),
        ("deepseek-v4-flash", {"block_size": 16}, "block_size"),
        ("qwen3-8b", {"tensor_parallel": 3}, "tensor_parallel"),
        ("qwen3-8b", {"tensor_parallel": 0}, "tensor_parallel"),
        ("jamba-v0.1", {"state_cache_mode": "some"}, "cache_mode"),
        ("qwen3-8b", {"speculative_tokens": -1}, "speculative_tokens"),
    ],
)
def test_bad_options_are_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_from_config(load_config(name), **options)


def test_a_null_of_the_text_model_counts_unless_its_wrapper_says_more() -> None:
    text = {**load_config("mistral-7b-v0.1"), "sliding_window": None, "torch_dtype": None}
    wrapper = {"model_type": "mistral3", "torch_dtype": "float16", "text_config": text}
    layers = own_caches(wrapper)
    assert {(spec.kind, spec.token_bytes) for spec in attention(layers).values()} == {
        ("full", 4096)
    }
    (dtype,) = {spec.dtype for spec in attention(layers).values()}
    assert dtype == "float16"
    with pytest.raises(ValueError, match=r"sliding_window=None .* contradicts sliding_window=512"):
        layers_from_config({**wrapper, "sliding_window": 512})
    windows = {**wrapper, "text_config": text | {"sliding_window": 512}}
    assert own_caches({**windows, "sliding_window": None}) == own_caches(windows) != layers


def test_a_wrapper_lends_its_language_model_a_dtype_and_no_shape() -> None:
    text = {k: v for k, v in load_config("llama-3.1-8b").items() if k != "torch_dtype"}
    wrapper = {"model_type": "musicflamingo", "dtype": "bfloat16", "head_dim": 1280}
    layers = own_caches({**wrapper, "text_config": text})
    assert {spec.token_bytes for spec in attention(layers).values()} == {2 * 8 * 128 * 2}


def test_the_language_model_is_found_in_a_wrapper_of_a_wrapper() -> None:
    text = load_config("qwen3-235b-a22b") | {"model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text}
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    assert layers_from_config(config) == layers_from_config(load_config("qwen3-235b-a22b"))
    assert model_len(config) == model_len(load_config("qwen3-235b-a22b"))


@pytest.mark.parametrize("level", ["wrapper", "wrapper within"])
def test_every_wrapper_around_a_language_model_counts_alike(level: str) -> None:
    text = load_config("qwen3-235b-a22b") | {"model_type": None, "torch_dtype": None}

    def layers(**fields: Any) -> dict[str, Any]:
        outer, inner = (fields, {}) if level == "wrapper" else ({}, fields)
        thinker = {"model_type": "qwen3_omni_moe_thinker", **inner, "text_config": text}
        return layers_from_config(
            {"model_type": "qwen3_omni_moe", **outer, "thinker_config": thinker}
        )

    half = {"torch_dtype": "float16"}
    plain = layers(dtype="float16")
    assert plain == layers_from_config(load_config("qwen3-235b-a22b") | half)
    assert layers(**half, window_size=112, audio_chunk_size=8, head_dim=128) == plain
    for name, value in (("num_hidden_layers", 31), ("head_dim", 64), ("kv_lora_rank", 512)):
        with pytest.raises(ValueError, match=rf"{name}={value}"):
            layers(**half, **{name: value})
    for name in ("quantization_config", "compression_config"):
        with pytest.raises(ValueError, match=rf"{name}.kv_cache_scheme.*quantises the cache"):
            layers(**half, **{name: {"kv_cache_scheme": {"num_bits": 8}}})


def test_a_field_that_is_named_harmless_would_be_refused_otherwise() -> None:
    assert all(CONCERNS.search(name) for name in HARMLESS)
    for name in HARMLESS:
        assert layers_from_config(llama(**{name: 1})) == layers_from_config(llama()), name


def test_the_dtype_of_the_text_model_comes_before_its_wrapper() -> None:
    text = load_config("gemma-3-4b")["text_config"]
    text = {k: v for k, v in text.items() if k != "torch_dtype"} | {"dtype": "float32"}
    wrapper = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (dtype,) = {spec.dtype for spec in layers_from_config(wrapper).values()}
    assert dtype == "float32"


def test_gemma_3_files_may_leave_out_the_values_of_their_class() -> None:
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    whole = load_config("gemma-3-4b")
    text = whole["text_config"]
    assert set(left_out) <= set(text)
    text = {name: value for name, value in text.items() if name not in left_out}
    config = {**whole, "text_config": text}
    assert layers_from_config(config) == layers_from_config(whole)
    assert model_len(config) == 131072


SCALINGS = {  # (RoPE scaling, length of a model of 4,096 tokens), as in vLLM 0.33
    "linear, as in Vicuna-16k": ({"type": "linear", "factor": 4.0}, 16384),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, 10240),
    "yarn, with the stretched length in the file": ({"rope_type": "yarn", "factor": 4.0}, 4096),
    "llama 3": ({"rope_type": "llama3", "factor": 8.0}, 4096),
    "longrope": ({"type": "longrope", "long_factor": [1.0]}, 4096),
    "a null kind": ({"rope_type": None, "type": "yarn", "factor": 4.0}, 4096),
    "no factor": ({"type": "linear", "factor": None}, 4096),
    "by layer type": (
        {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}},
        32768,
    ),
    "the largest of several": (
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0},
        },
        32768,
    ),
}


@pytest.mark.parametrize(("scaling", "length"), SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_lengthens_a_request(field: str, scaling: dict, length: int) -> None:
    assert model_len(llama(max_position_embeddings=4096, rope_scaling=None) | {field: scaling}) == (
        length
    )


def gemma3_text(**changes: Any) -> dict[str, Any]:
    text = load_config("gemma-3-4b")["text_config"]
    return {"model_type": "gemma3", "text_config": text | changes}


@pytest.mark.parametrize("wrapper", ["gemma3", "shieldgemma2"])
def test_gemma_3_names_its_length_after_scaling(wrapper: str) -> None:
    config = gemma3_text(rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert model_len(config | {"model_type": wrapper}) == 131072


def test_two_fields_that_name_a_period_must_agree() -> None:
    def layers(**patterns: int) -> Any:
        return layers_from_config(gemma3_text(**patterns), kv_dtype="bfloat16")

    assert layers(_sliding_window_pattern=4, sliding_window_pattern=4) == (
        layers(sliding_window_pattern=4)
    )
    with pytest.raises(ValueError, match=r"sliding_window_pattern=5 .*another field says 4"):
        layers(_sliding_window_pattern=4, sliding_window_pattern=5)


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0, -4.0])
def test_a_rope_factor_must_be_finite_and_positive(kind: str, factor: float) -> None:
    scaling = {"rope_type": kind, "factor": factor}
    with pytest.raises(ValueError, match=rf"rope_scaling\.factor={factor} must be a finite"):
        model_len(llama(rope_scaling=scaling))
    with pytest.raises(ValueError, match=rf"rope_parameters\.full_attention\.factor={factor} must"):
        model_len(gemma3_text(rope_parameters={"full_attention": scaling}))
    with pytest.raises(TypeError, match=r"factor='4' must be a number"):
        model_len(llama(rope_scaling={"type": kind, "factor": "4"}))


@pytest.mark.parametrize(("length", "factor"), [(4096, 1e308), (10**400, 2.0), (2**53 + 1, 2.0)])
def test_a_scaled_length_beyond_the_numbers_is_refused(length: int, factor: float) -> None:
    scaling = {"type": "linear", "factor": factor}
    with pytest.raises(
        ValueError, match=r"cannot be multiplied by a RoPE factor of .* give a max_model_len"
    ):
        model_len(llama(max_position_embeddings=length, rope_scaling=scaling))
    assert model_len(llama(max_position_embeddings=length, rope_scaling=None)) == length
    double = llama(max_position_embeddings=2**53, rope_scaling=scaling | {"factor": 2})
    assert model_len(double) == 2**54


def test_the_refusal_of_an_unknown_type_names_the_nearest_ones() -> None:
    nearest = r"model_type='qwen3_mo' \(arch.* the nearest .*: qwen3_moe, (\w+, ){3}\w+\. Write"
    with pytest.raises(ValueError, match=nearest):
        layers_from_config(llama(model_type="qwen3_mo"))
    with pytest.raises(ValueError, match=nearest):  # though the wrapper is understood
        layers_from_config({"model_type": "llava", "text_config": llama(model_type="qwen3_mo")})
    with pytest.raises(ValueError, match=r"the nearest .*: llava_next_video, "):
        layers_from_config(llama(model_type="llava_next_videos"))
    with pytest.raises(ValueError, match=r"=None \(.*=\['Unheard'\]\) is not understood\. Write"):
        layers_from_config({"architectures": ["Unheard"]})
    names = {name: 1 for name in "hgfedcbaji"}
    with pytest.raises(ValueError, match=r"no model_type.*; it has a, b, c, d, e, f, g, h. Write"):
        layers_from_config(names)


def test_a_model_has_at_most_1000_layers() -> None:
    neo = {"model_type": "gpt_neo", "hidden_size": 512, "num_heads": 8, "window_size": 256}
    for config in (
        lambda count: llama(num_hidden_layers=count),
        lambda count: (
            neo
            | {"num_layers": count, "attention_types": [[["global"], 1], [["local"], count - 1]]}
        ),
    ):
        assert len(layers_from_config(config(1000), kv_dtype="bf16")) == 1000
        with pytest.raises(ValueError, match=r"=1001 .* at most 1000 layers"):
            layers_from_config(config(1001), kv_dtype="bf16")


def test_the_smallest_length_counts_unless_the_file_names_the_models_own() -> None:
    assert model_len(llama(seq_length=8192)) == 8192
    assert model_len(llama(max_position_embeddings=8192, model_max_length=131072)) == 131072


@pytest.mark.parametrize("field", ["attention_head_dim", "mamba_headdim"])
def test_zamba_2_files_may_leave_out_the_widths_of_heads(field: str) -> None:
    config = load_config("zamba2-2.7b")
    assert field in config
    shorter = {name: value for name, value in config.items() if name != field}
    assert layers_from_config(shorter) == layers_from_config(config)


# --- what cannot be read ----------------------------------------------------------


def test_a_configuration_is_read_from_a_file_a_directory_or_the_presets(tmp_path) -> None:
    config = {"model_type": "llama"}
    with pytest.raises(ValueError, match=r"config=.*No such file"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(str(tmp_path)) == load_config(str(tmp_path / "config.json")) == config
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"\(No such file or directory\)$"):  # no presets are told
        load_config("nowhere.json")
    assert load_config("llama-3.1-8b")["model_type"] == "llama"


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen/Qwen3-8B"])
@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_path_that_exists_goes_before_a_preset(
    kind: Callable[[str], Any], is_folder: bool, name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(kind(name))["model_type"] == "qwen3"
    path = pathlib.Path(name, "config.json") if is_folder else pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model_type": "of mine"}))
    assert load_config(kind(name)) == {"model_type": "of mine"}


# What Mistral publishes as params.json; parameters by hand, without norms.
OF_MISTRAL: dict[str, Any] = {
    **{"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32},
    **{"n_kv_heads": 8, "norm_eps": 1e-5, "vocab_size": 32768, "rope_theta": 1e6},
}
TABLES, ATTENTION = 2 * 32768 * 4096, 32 * 4096 * 128 * (2 * 32 + 2 * 8)
LARGE_3 = {
    **{"dim": 7168, "head_dim": 192, "hidden_dim": 16384, "n_layers": 61, "vocab_size": 131072},
    **{"n_heads": 128, "n_kv_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_seq_len": 262144},
    "moe": {"expert_hidden_dim": 4096, "first_k_dense_replace": 3, "num_experts": 128}
    | {"num_experts_per_tok": 4, "num_shared_experts": 1, "route_every_n": 1},
    "yarn": {"factor": 36, "original_max_position_embeddings": 8192, "apply_scale": False},
    **{"max_position_embeddings": 294912, "llama_4_scaling": {"beta": 0.1}},
}
LATENT = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
EXPERTS = 58 * 7168 * (128 + 3 * 129 * 4096)
PARAMS_FILES: dict[str, tuple[dict[str, Any], dict[tuple[str, int], int], int]] = {
    "dense": ({}, {("full", 4096): 32}, TABLES + ATTENTION + 32 * 3 * 4096 * 14336),
    "experts": (
        {"moe": {"num_experts": 8, "num_experts_per_tok": 2}, "tied_embeddings": True},
        {("full", 4096): 32},
        TABLES // 2 + ATTENTION + 32 * 8 * (3 * 4096 * 14336 + 4096),
    ),
    "windows": (
        {"sliding_window": [None, 512, 512, 512], "max_seq_len": 9},
        {("full", 4096): 8, ("sliding", 4096): 24},
        TABLES + ATTENTION + 32 * 3 * 4096 * 14336,
    ),
    "latent": (
        LARGE_3,
        {("mla", 1152): 61},
        2 * 131072 * 7168 + 61 * LATENT + 3 * 3 * 7168 * 16384 + EXPERTS,
    ),
}


@pytest.mark.parametrize("name", PARAMS_FILES)
def test_a_params_json_of_mistral_is_read_by_the_names_of_transformers(name: str, tmp_path) -> None:
    changes, kinds, parameters = PARAMS_FILES[name]
    (tmp_path / "params.json").write_text(json.dumps(OF_MISTRAL | changes))
    config = load_config(tmp_path)
    layers = own_caches(config, kv_dtype="bf16").values()
    found = collections.Counter((s.kind, s.data_bytes // s.block_size) for s in layers)
    assert found == kinds
    assert count_weights(config).parameters == parameters
    if "max_seq_len" in changes:
        assert model_len(config) == changes.get("max_position_embeddings", 9)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # goes first
    assert load_config(tmp_path) == {"model_type": "llama"}


def test_the_towers_of_a_params_json_are_those_of_its_wrapper(tmp_path) -> None:
    def read(**changes: Any) -> dict[str, Any]:
        (tmp_path / "params.json").write_text(json.dumps(OF_MISTRAL | changes))
        return load_config(tmp_path / "params.json")

    vision = {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 14, "intermediate_size": 256}
    alone = count_weights(read()).parameters
    tower = 2 * (4 * 64**2 + 3 * 64 * 256) + 64 * 3 * 14**2 + 4096 * (64 + 4096)
    given = [read(vision_encoder=vision), read(multimodal={"vision_encoder_args": vision})]
    assert [count_weights(config).parameters for config in given] == [alone + tower] * 2
    for causal, message in ((True, "encoder keeps a cache of its own"), (False, None)):
        config = read(
            multimodal={"whisper_model_args": {"encoder_args": {"causal": causal, "dim": 64}}}
        )
        if message is None:
            assert len(layers_from_config(config, kv_dtype="bf16")) == 32
            assert config["audio_config"] == {"causal": False, "hidden_size": 64}
            continue
        with pytest.raises(ValueError, match=message):
            layers_from_config(config, kv_dtype="bf16")
    with pytest.raises(ValueError, match=r"params.json; load_config\(path\) reads it"):
        layers_from_config(OF_MISTRAL)
    for wrong in ({"sliding_window": [4, 8]}, {"quantization": {"qformat_weight": "int3"}}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* of a params.json"):
            read(**wrong)
    quantized = read(quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"})
    assert count_weights(quantized).stored.startswith("fp8")


@pytest.mark.parametrize("before", ["/models/", "./", "../", "~/", "models/qwen/", "/"])
def test_a_mistyped_path_is_no_preset(before: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a preset nor .*did you mean qwen3-8b"):
        load_config(f"{before}Qwen3-8B")


def qwen(**changes: Any) -> dict[str, Any]:
    return preset("qwen3-next-80b-a3b", **changes)


def qwen_without(name: str) -> dict[str, Any]:
    config = qwen()
    del config[name]
    return config


QWEN_FIELDS = [
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_hidden_layers",
    "full_attention_interval",
]
BAD_INPUTS: list[tuple[str, Callable[[], object]]] = [
    ("config='no-such-model' .* presets are deepseek", lambda: load_config("no-such-model")),
    ("config", lambda: load_config(os.devnull)),
    ("config must be the content", lambda: layers_from_config("qwen3-8b")),
    ("model_type", lambda: layers_from_config({})),
    ("model_type", lambda: layers_from_config(qwen(model_type="llama"))),
    ("block_size", lambda: layers_from_config(qwen(), block_size=0)),
    ("kv_dtype", lambda: layers_from_config(qwen(), kv_dtype="fp4")),
    ("max_position_embeddings", lambda: model_len({})),
    ("sliding_window", lambda: layers_from_config(qwen(sliding_window=4096))),
    ("layer_types", lambda: layers_from_config(qwen(layer_types=["mamba"] * 48))),
    ("layer_types", lambda: layers_from_config(qwen(layer_types=["mamba"]))),
    ("torch_dtype", lambda: layers_from_config(qwen_without("torch_dtype"))),
    *[(name, lambda name=name: layers_from_config(qwen_without(name))) for name in QWEN_FIELDS],
    *[(name, lambda name=name: layers_from_config(qwen(**{name: "4"}))) for name in QWEN_FIELDS],
]


@pytest.mark.parametrize(
    ("message", "call"), BAD_INPUTS, ids=[str(i) for i in range(len(BAD_INPUTS))]
)
def test_bad_input_is_refused_by_name(message: str, call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\b{message}\b"):
        call()
