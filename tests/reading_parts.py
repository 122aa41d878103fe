"""Answers of parts of the code that reads configurations, with every two of their fields."""

import copy
from collections.abc import Iterator
from typing import Any

from jaxkv._src.hf_config import encoder_len, model_len
from jaxkv._src.hf_config._length import LENGTHS
from jaxkv._src.hf_config._weights import _feed_forward
from jaxkv._src.hf_config._weights._matrix import Fields, Matrix
from jaxkv._src.hf_config._weights._quantization import METHODS, read_scheme
from jaxkv._src.hf_config._weights._towers import towers
from jaxkv._src.interop.vllm import cache_order, layer_specs, plan_from_config
from jaxkv._src.interop.vllm._specs import CONVERTERS, convert_spec
from tests.changed_configs import ABSENT, instead, pairs
from tests.test_interop_vllm import CASES, OPTIONS, as_objects, limits_of, recorded_specs

EXPERT_LAYERS = """mlp_layer_types moe_layer_freq is_moe_layer moe_layers expert_layer_period
    expert_layer_offset moe_layer_end_index mlp_only_layers""".split()
DENSE = """use_double_wide_mlp num_kv_shared_layers block_auto_adjust_ff_dim block_multiple_of
    block_ffn_dim_multiplier moe_latent_size""".split()
FEED_FORWARD = (
    *_feed_forward.EXPERTS,
    *_feed_forward.EXPERT_WIDTH,
    *_feed_forward.SHARED,
    *_feed_forward.SHARED_WIDTH,
    *_feed_forward.DENSE_WIDTH,
    *_feed_forward.FIRST,
    *_feed_forward.STEP,
    *EXPERT_LAYERS,
    *DENSE,
)


def answer(question: Any, *args: Any, **options: Any) -> str:
    """The answer to a question, or the kind of the refusal, whose text may be improved."""
    try:
        answered = question(*args, **options)
    except (TypeError, ValueError) as refusal:
        assert str(refusal)
        return type(refusal).__name__
    if isinstance(answered, dict):
        names: dict[Any, list[str]] = {}
        for name, spec in answered.items():
            names.setdefault(spec, []).append(name)
        return f"{list(answered)} {names}"
    return repr(answered)


def of_feed_forward() -> Iterator[str]:
    """Layers with experts and the matrices of layers, for every two fields."""
    names = dict.fromkeys(FEED_FORWARD, (0, 2, 3))
    names |= dict.fromkeys(EXPERT_LAYERS, (0, 2, [1, 0, 2, 1, 0], ["dense", "sparse", "moe"]))
    base = {"hidden_size": 7, "num_hidden_layers": 5, "num_local_experts": 6}
    base |= {"intermediate_size": 11}
    for config in pairs(base, names):
        fields = Fields("mixtral", config)
        yield answer(lambda f: sorted(_feed_forward.expert_layers(f)), fields)
        if not set(config) & set(EXPERT_LAYERS):
            yield answer(lambda f: list(_feed_forward.experts(f, 1, gated=True)), fields)
            yield answer(lambda f: list(_feed_forward.dense(f, 4, gated=False)), fields)
    for name in FEED_FORWARD:
        for value in (-1, True, "x", None, [4, 0, 2, 1, 3], [9], []):
            for kind in ("mixtral", "llama4_text"):
                fields = Fields(kind, base | {name: value})
                yield answer(lambda f: sorted(_feed_forward.expert_layers(f)), fields)
                for layer in (0, 2, 4):
                    yield answer(
                        lambda f, i: [*_feed_forward.experts(f, i, gated=False)], fields, layer
                    )
                    yield answer(
                        lambda f, i: [*_feed_forward.dense(f, i, gated=True)], fields, layer
                    )
                yield answer(lambda f: f.num_layers, fields)


ROLES = ("linear", "expert", "head", "tower", "other")
MATRICES = [Matrix("layers.1.mlp.up_proj", 50, 70, role, 3) for role in ROLES]
MATRICES += [Matrix("layers.11.mlp.gate", 1, 0), Matrix("lm_head", 257, 129, "head")]
GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 16, "symmetric": True}}
QUANTIZED = {
    "bits": 3, "w_bit": 5, "group_size": 24, "q_group_size": 40, "lm_head": True,
    "weight_block_size": [16, 24], "load_in_4bit": True, "_load_in_4bit": True,
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4", "quant_algo": "FP8",
    "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"],
}  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "weight_block_size": ([16], [16, 24, 8], [0, 0], [1.5, 2], [True, 16], "ab", [16, -1]),
    "quant_algo": ("NVFP4", "nvfp4_awq", "FP8_PB", "W4A8", None),
    "config_groups": tuple(
        {"group_0": {"weights": GROUP["weights"] | change}, **rest}
        for change in (
            {},
            {"type": "float"},
            {"type": "float", "num_bits": 8},
            {"symmetric": False},
        )
        for rest in (
            {},
            {"group_1": GROUP},
            {"group_1": {"weights": "x"}},
            {"group_1": {"weights": None}},
            {"group_1": 1},
            {"group_1": {"weights": GROUP["weights"] | {"group_size": 32}}},
        )
    ),
}
PATTERNS = """layers.1 layers.1. .layers.1 *layers.1* layers.1.mlp mlp mlp.up_proj up_proj lm_head *
    . model.layers.1 model.lm_head language_model.lm_head layers re:lm_head re:.*up_proj re:model.*1
    layers.11 1 *mlp* model.layers.?.mlp.up_proj language_model.model.layers.1 x""".split()


def of_quantizations() -> Iterator[str]:
    """The bytes of matrices by every method, with each of its fields changed."""

    def stored(config: Any, *experts: Any) -> Any:
        scheme = read_scheme(config, *experts)
        return scheme and (
            scheme.name,
            [scheme.stores(m) and scheme.num_bytes(m) for m in MATRICES],
        )

    for config in (None, {}, "fp8", 1, {"quant_method": "x"}, {"quant_algo": "FP8"}, {"bits": 4}):
        yield answer(stored, config)
    for method in METHODS:
        base = QUANTIZED | {"quant_method": method}
        yield answer(stored, base, "fp4")
        yield answer(stored, {"quant_method": method}, "fp8")
        fields = {n: (None, *OTHERS.get(n, ()), *instead(v)) for n, v in QUANTIZED.items()}
        for name, value in ((n, v) for n, values in fields.items() for v in values):
            yield answer(stored, base | {name: value})
        yield from (answer(stored, c) for c in pairs(base, dict.fromkeys(QUANTIZED, (None,))))
    for pattern in PATTERNS:
        for name in ("ignore", "exclude_modules", "llm_int8_skip_modules"):
            config = {"quant_method": "bitsandbytes", name: ["y", pattern]}
            yield answer(stored, config if name != "ignore" else QUANTIZED | config)
    yield answer(stored, {"quant_method": "compressed-tensors", **QUANTIZED, "ignore": PATTERNS})


TOWER = {
    "hidden_size": 6, "embed_dim": 9, "depth": 2, "num_hidden_layers": 3, "mlp_ratio": 2.5,
    "vt_num_hidden_layers": 5, "intermediate_size": 10, "out_hidden_size": 5, "patch_size": 3,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_global_layers": 4, "max_num_tiles": 3,
    "supported_aspect_ratios": [[1, 1], [1, 2]], "image_size": 8, "vision_output_dim": 11,
    "deepstack_visual_indexes": [1, 2, 3], "alignment_intermediate_size": 12,
    "downsample_factor": 3,
}  # fmt: skip
OF_WRAPPERS = "alignment_intermediate_size", "downsample_factor"
TOWERS = """qwen2_vl qwen2_5_vl qwen3_vl glm4v gemma4 mistral3 lighton_ocr llava aya_vision mllama
    idefics3 fuyu llama""".split()


def of_towers() -> Iterator[str]:
    """The matrices of the towers of wrappers, with each of their fields changed."""

    def matrices(kind: str, vision: Any, **outer: Any) -> Any:
        return list(towers({"model_type": kind, "vision_config": vision, **outer}, 13))

    flat = {name: v for name, v in TOWER.items() if name != "max_num_tiles"}
    for kind in TOWERS:
        for base in (TOWER, flat):
            for name, value in base.items():
                others = [{}, *({name: v} for v in (*instead(value), 2.5, [1]))]
                left = {n: v for n, v in base.items() if n != name}
                yield from (answer(matrices, kind, left | other) for other in others)
            yield from (
                answer(matrices, kind, config)
                for config in pairs(base, dict.fromkeys(base, (None,)))
            )
        audio = {"model_type": "gemma4_audio", "hidden_size": 6, "num_hidden_layers": 3}
        for vision in (None, {}, 1, audio, flat | {"model_type": "gemma4_audio"}):
            yield answer(matrices, kind, vision, audio_config=audio, downsample_factor=5)
            yield answer(matrices, kind, vision, audio_config=flat, text_config={"a": 1})
            yield answer(matrices, kind, flat, alignment_intermediate_size=20)
        bare = {name: v for name, v in flat.items() if name not in OF_WRAPPERS}
        yield answer(matrices, kind, bare, alignment_intermediate_size=20, downsample_factor=5)


ROPE = [
    {"rope_type": "linear", "type": "yarn", "factor": 4.0},
    {"type": "dynamic", "factor": 2},
    {"factor": 2.0},
    {"type": "linear", "factor": 1},
    {"full": {"type": "linear", "factor": 3}, "sliding": {"type": "linear", "factor": 2}},
    {"type": "linear"},
    {"type": "linear", "factor": 0.5},
    *({"type": "linear", "factor": v} for v in (0, -1, True, "x", 1e308)),
]
LONGEST = ("max_source_positions", "max_encoder_position_embeddings", "model_max_length")


def of_lengths() -> Iterator[str]:
    """The longest requests and encoder inputs, for every two fields that name one."""
    names: dict[str, tuple[Any, ...]] = dict.fromkeys((*LENGTHS, *LONGEST), (0, 10, 30, "x"))
    names |= {"rope_scaling": tuple(ROPE), "rope_parameters": (ROPE[0], ROPE[4], 1)}
    for kind in ("llama", "gemma3_text", "gpt2", "whisper", "t5", "mllama_text_model", "x"):
        base = {"model_type": kind, "seq_length": 20}
        yield from (answer(model_len, config) for config in pairs(base, names))
        yield from (
            answer(encoder_len, config) for config in pairs(base, dict.fromkeys(LONGEST, (0, 7)))
        )
        for length in (None, True, 2**53, 2**53 + 1):
            for scaling in ROPE[:2]:
                config = base | {"seq_length": length, "rope_scaling": scaling}
                yield answer(model_len, config)
    tiles = {"max_num_tiles": 4, "image_size": 30, "patch_size": 7}
    for name, size in tiles.items():
        for value in (*instead(size), size):
            config = {"model_type": "mllama", "vision_config": tiles | {name: value}}
            yield answer(encoder_len, config)
    yield answer(encoder_len, {"model_type": "mllama", "vision_config": 1})


# Fields that some class of vLLM's specs has, and values of them.
SPEC_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("sliding_window attention_chunk_size non_causal bounded_replay".split(), ()),
    **dict.fromkeys("extra_retained_tokens num_prefill_checkpoint_blocks rotated".split(), ()),
    **dict.fromkeys("is_draft dcp_sharded max_tp_shards alignment page_size_padded".split(), ()),
    **dict.fromkeys("num_head_slots head_size_v tokens_per_state num_heads shapes".split(), ()),
    "kv_quant_mode": (*range(3, 8), "NVFP4", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD"),
    "state_content_bytes": (64, 66, 67, 72, 80, 128, 130, 132, 136, 576, 656, 1152),
    "cache_dtype_str": ("fp8_ds_mla", "auto"),
    "cache_role": ("indexer", "Role.INDEXER", "sparse"),
    "dtype": ("uint8", "torch.float16", "int8", "float8_e5m2"),
    "mamba_cache_mode": ("all", "align", "none"),
    "type": (*CONVERTERS, "SinkFullAttentionSpec"),
}


def named(question: Any, *args: Any, **options: Any) -> str:
    """The answer to a question, or the kind of whatever error objects of wrong kinds raise."""
    try:
        return repr(question(*args, **options))
    except Exception as error:
        return type(error).__name__


def of_vllm_specs() -> Iterator[str]:
    """The layers of vLLM's specs, with each of their fields left out or changed, and with two."""
    specs = {repr(spec): spec for spec in recorded_specs()}
    for text in sorted(specs):
        spec = specs[text]
        for options in ({"kv_dtype": None, "value_size": None}, OPTIONS):
            yield named(convert_spec, "layer", spec, **options)
            yield named(convert_spec, "layer", as_objects(spec), **options)
        for name in sorted({*spec, *SPEC_FIELDS}):
            left = {n: v for n, v in spec.items() if n != name}
            yield named(convert_spec, "layer", left, **OPTIONS)
            values = *SPEC_FIELDS.get(name, ()), *ABSENT, *instead(spec.get(name))
            for value in values:
                yield named(convert_spec, "layer", left | {name: value}, **OPTIONS)
            if name in spec or name in ("kv_quant_mode", "state_content_bytes"):
                for value in (*SPEC_FIELDS.get(name, ()), None):
                    for mode in SPEC_FIELDS["kv_quant_mode"]:
                        two = left | {name: value, "kv_quant_mode": mode}
                        yield named(convert_spec, "layer", two, kv_dtype="fp8", value_size=64)
        for value_size in (0, 1, 64, 512, 576, 1000):
            yield named(convert_spec, "layer", spec, kv_dtype="fp8_e5m2", value_size=value_size)


def of_vllm_configs() -> Iterator[str]:
    """The layers and plans of vLLM's configurations, with each of their fields changed."""
    return (line for case in CASES.values() for line in _of_vllm_case(case))


def _of_vllm_case(case: dict[str, Any]) -> Iterator[str]:
    first, *rest = case["configs"]
    options = {"max_model_len": case["max_model_len"], "limits": limits_of(case), **OPTIONS}

    def plan(config: Any, **more: Any) -> Any:
        made = plan_from_config([config, *rest], **options | more)
        return made.groups, made.num_blocks, made.memory_bytes, made.layouts

    for field in (*first, "hisparse_host_num_blocks", "kv_cache_layout"):
        left = {n: v for n, v in first.items() if n != field}
        values = ABSENT if field not in first else instead(first[field])
        for config in (left, *(left | {field: value} for value in values)):
            yield named(layer_specs, config, **OPTIONS)
            if field in ("num_blocks", "kv_cache_layout"):
                yield named(cache_order, config)
                yield named(plan, config)
    for index, tensor in enumerate(first["kv_cache_tensors"]):
        page, blocks = case["page_bytes"][tensor["layers"][0]], first["num_blocks"]
        for stride in (page * 2, page // 2, page // 3, page, page * blocks, page * blocks // 2):
            for more in (-1, 0, 1, blocks):
                config = copy.deepcopy(first)
                config["kv_cache_tensors"][index]["layer_stride"] = stride + more
                yield named(layer_specs, config, **OPTIONS)
    for shared in ({}, {"x": "layers.0.attn"}, {"x": "y"}):
        for parallel in (1, 2):
            yield named(plan, first, shared=shared, context_parallel=parallel)
    yield named(plan, first, max_model_len=10**6)
    yield named(plan, first, max_model_len=10**6, fit_max_model_len=True)


PARTS = {
    "feed-forward layers": of_feed_forward,
    "quantizations": of_quantizations,
    "towers": of_towers,
    "lengths": of_lengths,
    "specs of vLLM": of_vllm_specs,
    "configurations of vLLM": of_vllm_configs,
}
