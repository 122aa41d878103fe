"""Model families: published files against hand arithmetic, class defaults against HF's caches.

``golden/configs.json`` holds configurations trimmed to what concerns a cache, decoys included:
files as published, and the class defaults of transformers 5.23 and small files drawn at random
with the shapes that its own models put into their caches in a forward pass on the meta device.
Where such a pass does not run, the shapes are counted from the modeling file.
"""

import collections
import contextlib
import copy
import json
import math
import pathlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
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
from jaxkv._src.hf_config._families import FAMILIES
from jaxkv._src.hf_config._fields import inner_config
from jaxkv._src.hf_config._refused import REFUSED
from jaxkv._src.hf_config._wrappers import WRAPPERS
from jaxkv._src.specs import (
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MLASpec,
    RingSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    StateSpec,
)

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "configs.json").read_text())
RAW = json.loads((pathlib.Path(__file__).parent / "golden" / "published.json").read_text())
PUBLISHED: dict[str, Any] = GOLDEN["published"]
DEFAULTS: dict[str, Any] = GOLDEN["class_defaults"]
BF16, F32 = 2, 4


def expanded(value: Any) -> Any:
    """A configuration whose long lists are stored as the runs of one period."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"items", "runs"}:
        layer_index = [item for times, item in value["runs"] for _ in range(times)]
        return [layer_index[i % len(layer_index)] for i in range(value["items"])]
    return {name: expanded(inner) for name, inner in value.items()}


def innermost(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the language model."""
    found = inner_config(config)
    return config if found is None else innermost(dict(found[1]))


def changed(config: dict[str, Any], field: str, *values: Any) -> dict[str, Any]:
    """Returns the configuration with a field of its language model left out, or set to a value."""
    if found := inner_config(config):
        return {**config, found[0]: changed(dict(found[1]), field, *values)}
    left = {other: value for other, value in config.items() if other != field}
    return {**left, field: values[0]} if values else left


class Row(NamedTuple):
    """A model by hand: of each kind (layers, bytes of one token, window), or bytes of a state.

    length: tokens of the longest request; None: the file names none.
    """

    length: int | None
    full: tuple[int, int] | None = None
    sliding: tuple[int, int, int] | None = None
    latent: tuple[int, int] | None = None
    cross: tuple[int, int] | None = None
    state: tuple[int, int] | None = None
    shared: int = 0
    encoder: int = 0


def kv(heads: int, width: int, itemsize: int = BF16, values: int | None = None) -> int:
    """Bytes of one token of one layer: a key and a value for every KV head."""
    return heads * (width + (values or width)) * itemsize


# Sources: config.json of each model, and the shapes of k_proj and v_proj in transformers or, for
# files with code of their own, in vLLM 0.33. Heads x width; hidden / heads where none is named.
ROWS = {
    "Qwen2.5-7B": Row(131072, full=(28, kv(4, 3584 // 28))),
    "DeepSeek-R1-Distill-Qwen-32B": Row(131072, full=(64, kv(8, 5120 // 40))),
    "Qwen1.5-MoE-A2.7B": Row(8192, full=(24, kv(16, 2048 // 16))),
    "Qwen2-VL-7B": Row(32768, full=(28, kv(4, 128))),
    "Qwen2.5-VL-72B": Row(128000, full=(80, kv(8, 8192 // 64))),
    "Qwen3-VL-8B": Row(262144, full=(36, kv(8, 128))),
    "Qwen3-VL-235B-A22B": Row(262144, full=(94, kv(4, 128))),
    "Qwen3-Omni-30B-A3B": Row(65536, full=(48, kv(4, 128))),
    "Qwen2.5-Omni-7B": Row(32768, full=(28, kv(4, 128))),
    "Qwen2-Audio-7B": Row(8192, full=(32, kv(32, 128))),  # sizes are those of the class
    "LLaMA-7B": Row(2048, full=(32, kv(32, 128))),  # names no KV heads: one each
    "Vicuna-7B-16k": Row(4 * 4096, full=(32, kv(32, 128))),
    "Llama-3.2-11B-Vision": Row(
        131072,
        full=(32, kv(8, 128)),
        cross=(8, kv(8, 128)),
        encoder=4 * ((448 // 14) ** 2 + 1),
    ),
    "Mixtral-8x7B": Row(32768, full=(32, kv(8, 128))),
    "Mistral-7B-v0.1": Row(32768, sliding=(32, kv(8, 128), 4096)),
    "Ministral-3-8B": Row(262144, full=(34, kv(8, 128))),
    "Pixtral-12B": Row(1024000, full=(40, kv(8, 128))),
    "LLaVA-1.5-7B": Row(4096, full=(32, kv(32, 128))),  # sizes are those of the class
    "LLaVA-v1.6-Mistral-7B": Row(32768, full=(32, kv(8, 128))),
    "Phi-2": Row(2048, full=(32, kv(32, 2560 // 32))),
    "Phi-3-mini-4k": Row(4096, sliding=(32, kv(32, 3072 // 32), 2047)),
    "Phi-4": Row(16384, full=(40, kv(10, 5120 // 40))),
    "Phi-3.5-MoE": Row(131072, sliding=(32, kv(8, 128), 131072)),
    "Gemma-7B": Row(8192, full=(28, kv(16, 256))),
    "PaliGemma-3B": Row(8192, full=(18, kv(1, 256, F32))),
    "Gemma-3-4B": Row(131072, full=(5, kv(4, 256)), sliding=(29, kv(4, 256), 1024)),
    "Gemma-3n-E4B": Row(
        32768, full=(4, kv(2, 256)), sliding=(16, kv(2, 256), 512), shared=15
    ),  # 20 of 35 layers own a cache, every fifth is full
    "Gemma-4-26B-A4B": Row(131072, full=(5, kv(2, 512)), sliding=(25, kv(8, 256), 1024)),
    "Gemma-4-31B": Row(131072, full=(10, kv(4, 512)), sliding=(50, kv(16, 256), 1024)),
    "Gemma-4-E2B": Row(131072, full=(3, kv(1, 512)), sliding=(12, kv(1, 256), 512), shared=20),
    "Gemma-4-E4B": Row(131072, full=(4, kv(2, 512)), sliding=(20, kv(2, 256), 512), shared=18),
    "Gemma-4-12B": Row(262144, full=(8, kv(1, 512)), sliding=(40, kv(8, 256), 1024)),
    "gpt-oss-120b": Row(131072, full=(18, kv(8, 64)), sliding=(18, kv(8, 64), 128)),
    "DeepSeek-V2-Lite": Row(163840, latent=(27, (512 + 64) * BF16)),
    "DeepSeek-VL2-tiny": Row(4096, full=(12, kv(10, 1280 // 10))),
    "Kimi-K2": Row(131072, latent=(61, (512 + 64) * BF16)),
    "Kimi-K2.5": Row(262144, latent=(61, (512 + 64) * BF16)),
    "Moonlight-16B-A3B": Row(8192, latent=(27, (512 + 64) * BF16)),
    "GLM-4.7-Flash": Row(202752, latent=(47, (512 + 64) * BF16)),
    "MiniCPM3-4B": Row(32768, latent=(62, (256 + 32) * BF16)),
    "LongCat-Flash": Row(131072, latent=(2 * 28, (512 + 64) * BF16)),
    "GLM-4-9B-Chat-2024": Row(131072, full=(40, kv(2, 128))),
    "GLM-4.5-Air": Row(131072, full=(46, kv(8, 128))),
    "GLM-4.5V": Row(65536, full=(46, kv(8, 128))),
    "MiniMax-M2": Row(196608, full=(62, kv(8, 128))),
    "MiniMax-M1": Row(10240000, full=(10, kv(8, 128)), state=(70, 64 * 128 * 128 * F32)),
    "Command-R": Row(131072, full=(40, kv(64, 8192 // 64))),  # model_max_length
    "Command-A": Row(131072, full=(16, kv(8, 128)), sliding=(48, kv(8, 128), 4096)),
    "OLMo-2-7B": Row(4096, full=(32, kv(32, 128, F32))),
    "OLMo-3-32B": Row(65536, full=(16, kv(8, 128)), sliding=(48, kv(8, 128), 4096)),
    "StarCoder2-7B": Row(16384, sliding=(32, kv(4, 4608 // 36), 4096)),
    "SmolLM3-3B": Row(65536, full=(36, kv(4, 2048 // 16))),
    "Step3": Row(65536, full=(61, kv(1, 256))),
    "Phi-4-mini": Row(131072, sliding=(32, kv(8, 128), 262144)),
    "ERNIE-4.5-VL-28B-A3B": Row(131072, full=(28, kv(4, 128))),
    "Seed-OSS-36B": Row(524288, full=(64, kv(8, 128))),
    "ERNIE-4.5-21B-A3B": Row(131072, full=(28, kv(4, 2560 // 20))),
    "Hunyuan-A13B": Row(32768, full=(32, kv(8, 128))),
    "EXAONE-4.0-32B": Row(131072, full=(16, kv(8, 128)), sliding=(48, kv(8, 128), 4096)),
    "EXAONE-4.0-1.2B": Row(65536, full=(30, kv(8, 64))),
    "EXAONE-3.5-7.8B": Row(32768, full=(32, kv(8, 128))),
    "InternLM2.5-7B": Row(2 * 32768, full=(32, kv(8, 128))),  # dynamic scaling
    "InternVL2.5-8B": Row(2 * 32768, full=(32, kv(8, 128))),
    "Granite-3.3-8B": Row(131072, full=(40, kv(8, 128))),
    "Granite-4.0-micro": Row(131072, full=(40, kv(8, 2560 // 40))),
    "Bamba-9B": Row(
        262144,
        full=(3, kv(8, 128)),
        state=(29, (3 * (128 * 64 + 2 * 128) + 128 * 64 * 128) * BF16),
    ),
    "Mamba-2.8B": Row(None, state=(64, (3 * 5120 + 5120 * 16) * F32)),
    "Codestral-Mamba-7B": Row(
        None, state=(64, (3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128) * BF16)
    ),
    "Falcon-7B": Row(2048, full=(32, kv(1, 4544 // 71))),
    "Falcon-40B": Row(2048, full=(60, kv(8, 8192 // 128))),
    "Zamba-7B": Row(
        4096, full=(13, kv(16, 2 * 3712 // 16)), state=(76, (3 * 7424 + 7424 * 16) * BF16)
    ),
    "Nemotron-4-Mini-4B": Row(4096, full=(32, kv(8, 128))),
    "RecurrentGemma-2B": Row(
        None, sliding=(8, kv(1, 256, F32), 2048), state=(18, (3 * 2560 + 2560) * F32)
    ),
    "LFM2-1.2B": Row(128000, full=(6, kv(8, 2048 // 32)), state=(10, 2 * 2048 * BF16)),
    "LFM2-8B-A1B": Row(128000, full=(6, kv(8, 2048 // 32)), state=(18, 2 * 2048 * BF16)),
    "DBRX": Row(32768, full=(40, kv(8, 6144 // 48))),
    "StableLM-2-1.6B": Row(4096, full=(24, kv(32, 2048 // 32))),
    "GPT-2": Row(1024, full=(12, kv(12, 768 // 12, F32))),
    "StarCoder": Row(8192, full=(40, kv(1, 6144 // 48, F32))),
    "OPT-6.7B": Row(2048, full=(32, kv(32, 128))),
    "Pythia-6.9B": Row(2048, full=(32, kv(32, 128))),
    "GPT-Neo-1.3B": Row(2048, full=(12, kv(16, 128, F32)), sliding=(12, kv(16, 128, F32), 256)),
    "BLOOM-7B1": Row(2048, full=(30, kv(32, 128))),
    "MPT-7B": Row(2048, full=(32, kv(32, 128))),
    "Whisper-small": Row(
        448, full=(12, kv(12, 64, F32)), cross=(12, kv(12, 64, F32)), encoder=1500
    ),
    "Flan-T5-XL": Row(512, full=(24, kv(32, 64, F32)), cross=(24, kv(32, 64, F32)), encoder=512),
    "Apertus-8B": Row(65536, full=(32, kv(8, 128))),
    "dots.llm1": Row(32768, full=(62, kv(32, 128))),
    "Ling-lite": Row(16384, full=(28, kv(4, 128))),
    "MiMo-7B": Row(32768, full=(36, kv(8, 128))),
    "MiMo-V2-Flash": Row(
        262144, full=(9, kv(4, 192, BF16, 128)), sliding=(39, kv(8, 192, BF16, 128), 129)
    ),
    "Baichuan-7B": Row(4096, full=(32, kv(32, 128))),
    "Qwen-7B": Row(8192, full=(32, kv(32, 128))),  # the smaller of two lengths
    "OLMo-Hybrid-7B": Row(
        65536,
        full=(8, kv(30, 3840 // 30)),
        state=(24, (3 * (2 * 30 * 96 + 30 * 192) + 30 * 192 * 96) * BF16),
    ),
    "SmolVLM-2B": Row(8192, full=(24, kv(32, 64))),
    "Idefics2-8B": Row(32768, full=(32, kv(8, 128))),  # sizes are those of the class
}


def row_of(config: dict[str, Any]) -> Row:
    """Returns what the configuration is read as, in the form of a row by hand."""
    found: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    count: collections.Counter[str] = collections.Counter()
    names = {"full": "full", "sliding": "sliding", "mla": "latent", "cross": "cross"}
    for spec in layers_from_config(config).values():
        if isinstance(spec, EncoderOnlySpec):
            continue
        if isinstance(spec, SharedKVSpec):
            count["shared"] += 1
            continue
        name = "state" if isinstance(spec, StateSpec) else names[spec.kind]
        count[name] += 1
        size = spec.data_bytes if name == "state" else spec.data_bytes // spec.block_size
        window = (spec.sliding_window,) if isinstance(spec, SlidingWindowSpec) else ()
        found[name].add((size, *window))
    assert all(len(kinds) == 1 for kinds in found.values()), found
    try:
        length = model_len(config)
    except ValueError:
        length = None
    fields: dict[str, Any] = {name: (count[name], *next(iter(v))) for name, v in found.items()}
    return Row(length, shared=count["shared"], encoder=encoder_len(config), **fields)


@pytest.mark.parametrize("name", ROWS)
def test_a_published_file_is_read_as_counted_by_hand(name: str) -> None:
    assert row_of(expanded(PUBLISHED[name])) == ROWS[name]


def raw_layers(config: dict[str, Any]) -> collections.Counter[tuple[Any, ...]]:
    """Of each kind of layer: bytes of a row, its tokens, and its window, or bytes of a state."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for name, spec in layers_from_config(config).items():
        kind = name.split(".", 2)[2]
        if not isinstance(spec, LayerSpec):
            found["shared", kind] += 1
        elif isinstance(spec, StateSpec):
            found[kind, spec.data_bytes] += 1
        else:
            ratio, window = getattr(spec, "compress_ratio", 1), getattr(spec, "sliding_window", 0)
            found[kind, spec.data_bytes * ratio // spec.block_size, ratio, window] += 1
    return found


@pytest.mark.parametrize("name", RAW)
def test_a_file_as_published_is_read_and_counted_as_derived_by_hand(name: str) -> None:
    row, config = RAW[name], expanded(RAW[name]["config"])
    assert raw_layers(config) == {tuple(kind): count for count, *kind in row["layers"]}
    if "parameters" in row:
        assert count_weights(config).parameters == row["parameters"]
    if "counted" in row:  # of the classes of transformers 5.24, norms and biases included
        assert count_weights(config).parameters == pytest.approx(row["counted"], rel=1e-3)
    if "num_bytes" in row:
        assert count_weights(config).num_bytes == pytest.approx(row["num_bytes"], rel=1e-3)


# Without these a model has none of what they describe, or what transformers' class assumes.
OPTIONAL = {
    *("layer_types", "kv_source_layers", "mamba_ssm_dtype", "n_input_layers", "n_recurrent_loops"),
    *("indexer_head_dim", "ple_layer_ids", "loop_config", "loop_num_passes", "sparse_config"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_field_that_a_file_leaves_out_is_refused_or_changes_no_layer(name: str) -> None:
    config = expanded(RAW[name]["config"])
    for field in {*innermost(config)} - OPTIONAL - {"model_type"}:
        less = changed(config, field)
        try:
            layers = layers_from_config(less)
        except ValueError:
            continue
        assert layers == layers_from_config(config), field
        with contextlib.suppress(ValueError):
            count_weights(less)


def test_what_chooses_the_tokens_of_step_5_follows_its_sparse_config() -> None:
    config = expanded(RAW["Step-5-preview"]["config"])
    rings = layers_from_config(config, block_size=8, tensor_parallel=4, speculative_tokens=3)
    ring = rings["layers.3.region_ring"]
    assert isinstance(ring, RingSpec) and ring.block_size == 8 + 3  # more than a page's 6 rows
    off = changed(config, "sparse_config", {"enabled": False})
    kinds = {name.split(".", 2)[2] for name in layers_from_config(off)}
    assert kinds == {"full_attention", "sliding_attention"} and len(layers_from_config(off)) == 92


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("PLaMo-3 of its class", "interleaved_sliding_window", [None] * 32, "it contradicts the"),
        ("MiMo-V2.6-Pro of 2 layers", "layer_types", ["full_attention"] * 2, "contradicts layer_"),
        ("IQuest-Q1 of its class", "last_layers_types", ["linear"] * 3, "none of the known types"),
        ("IQuest-Q1 of its class", "num_hybrid_layers_block", 20, "num_hidden_layers says 88"),
        ("Nanbeige of its class", "loop_share_kv", True, "understood: False"),
        ("Solar-Open2-250B", "gqa_layers", [0, 48], "numbers of layers below 48"),
        ("Nemotron-H Puzzle, sizes of a test", "block_configs", [{}] * 4, "contradicts layers_bl"),
        ("Nemotron-H Puzzle, sizes of a test", "block_configs", [{"kv": 1}], "an entry may hold b"),
        ("MiniCPM-SALA", "mixer_types", ["mamba"], "are none of minicpm4, minicpm, standard"),
        ("K2-Horizon-MoVA, sizes of a sketch", "mova_num_experts", 8, "=8 may give the size of w"),
    ],
)
def test_a_field_of_the_newest_models_that_does_not_fit_is_refused(
    name: str, field: str, value: object, message: str
) -> None:
    config = changed(expanded(RAW[name]["config"]), field, value)
    with pytest.raises(ValueError, match=message):
        layers_from_config(config)
        count_weights(config)


# Files of Gemma 4 and Ling name in their place what RAW and ROWS have.
DERIVED = {kind: row["derived"] for kind, row in DEFAULTS.items() if "derived" in row}


@pytest.mark.parametrize("model_type", DERIVED)
def test_fields_that_a_class_derives_may_be_left_out(model_type: str) -> None:
    config, names = expanded(DEFAULTS[model_type]["config"]), DERIVED[model_type]
    for left_out in ([name] for name in names):
        assert layers_of(without(config, *left_out)) == layers_of(config)
    assert layers_of(without(config, *names)) == layers_of(config)


@pytest.mark.parametrize("field", ["routed_expert_hidden", "moe_proj_size", "ffn_rank"])
def test_a_size_that_nothing_reads_is_refused_in_a_count(field: str) -> None:
    config = load_config("qwen3-8b")
    with pytest.raises(ValueError, match=f"{field}=3584 may give the size of weights"):
        count_weights({**config, field: 3584})


def test_every_published_file_is_checked() -> None:
    assert set(PUBLISHED) == set(ROWS) | {"Nemotron-Super-49B"}


def test_nemotron_nas_has_heads_of_its_own_in_every_layer() -> None:
    layers = layers_from_config(PUBLISHED["Nemotron-Super-49B"])
    heads = {name: spec.num_kv_heads for name, spec in attention(layers)}
    assert heads == {"layers.0.full_attention": 64 // 8, "layers.2.full_attention": 64 // 16}


@pytest.mark.parametrize("queries", [0, 9, 63, 65, "8"])
def test_nemotron_nas_has_the_same_queries_for_every_kv_head(queries: object) -> None:
    config = copy.deepcopy(PUBLISHED["Nemotron-Super-49B"])
    config["block_configs"][2]["attention"]["n_heads_in_group"] = queries
    with pytest.raises(ValueError, match=f"n_heads_in_group={queries!r} of 64 heads"):
        layers_from_config(config)


@pytest.mark.parametrize("name", ["window_length", "num_sink_tokens", "sparsify"])
def test_nemotron_nas_that_drops_tokens_is_refused(name: str) -> None:
    config = copy.deepcopy(PUBLISHED["Nemotron-Super-49B"])
    config["block_configs"][2]["attention"][name] = 4
    with pytest.raises(ValueError, match=rf"block_configs=.*'{name}'.* must be unset"):
        layers_from_config(config)


def attention(layers: Mapping[str, object]) -> Iterator[tuple[str, FullAttentionSpec]]:
    return ((n, s) for n, s in layers.items() if isinstance(s, FullAttentionSpec))


# --- class defaults ---------------------------------------------------------------


def kept(config: dict[str, Any]) -> collections.Counter[tuple[Any, ...]]:
    """The layers of a configuration in the form of the golden file."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for spec in layers_from_config(config, kv_dtype="bfloat16").values():
        if isinstance(spec, StateSpec):
            found["state", spec.data_bytes] += 1
        elif isinstance(spec, MLASpec):
            found["mla", 1, spec.head_size, 0] += 1
        elif isinstance(spec, FullAttentionSpec):
            window = (spec.sliding_window,) if isinstance(spec, SlidingWindowSpec) else ()
            shape = spec.num_kv_heads, spec.head_size, spec.value_size
            found[spec.kind, *shape, *window] += 1
    return found


def recorded(keeps: list[list[Any]]) -> collections.Counter[tuple[Any, ...]]:
    """The layers that the golden file names, with the bytes of a state for its shapes."""
    expected: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for times, kind, *shape in keeps:
        if kind == "state":  # inputs of a convolution but the current one, then a matrix
            convolution, matrix, itemsize = shape
            shape = [convolution * BF16 + matrix * itemsize]
        expected[kind, *shape] += times
    return expected


@pytest.mark.parametrize(
    "number", range(len(GOLDEN["drawn"])), ids=lambda i: GOLDEN["drawn"][i]["config"]["model_type"]
)
def test_small_files_are_read_as_transformers_fills_its_cache(number: int) -> None:
    sampled = GOLDEN["drawn"][number]  # fields left out at random are those of the class
    assert kept(sampled["config"]) == recorded(sampled["keeps"])


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_class_defaults_are_read_as_transformers_fills_its_cache(model_type: str) -> None:
    config = expanded(DEFAULTS[model_type]["config"])
    assert kept(config) == recorded(DEFAULTS[model_type]["keeps"])
    if (length := DEFAULTS[model_type]["length"]) is None:
        with pytest.raises(ValueError, match="longest request"):
            model_len(config)
    else:
        assert model_len(config) == length


def test_a_class_assumes_the_values_of_transformers() -> None:
    assumed = {
        (model_type, name): value
        for model_type, family in FAMILIES.items()
        for name, value in {**family.defaults, **family.inner}.items()
    }
    assert assumed.pop(("dots1", "use_sliding_window")) is True  # its class has no such field
    assert assumed == {(kind, name): DEFAULTS[kind]["config"][name] for kind, name in assumed}
    config = DEFAULTS["mistral"]["config"]
    shorter = {name: value for name, value in config.items() if name != "sliding_window"}
    assert config["sliding_window"] == 4096 and kept(shorter) == kept(config)


# Types with modeling code in their own repository, which share the entry of a checked type.
ALIASES = {
    **dict.fromkeys(["Yi", "internlm", "minicpm", "orion", "solar", "xverse"], "granite"),
    "bailing_moe_v2": "bailing_moe",
    **dict.fromkeys(["minicpmo", "minicpmv"], "mimo"),
    **dict.fromkeys(["phi3_v", "phi4mm"], "phi3"),
    "hunyuan": "hunyuan_v1_moe",
    "pangu_ultra_moe": "kimi_k2",
    "minimax_m3_text": "minimax_m3_vl_text",
}
BY_PRESET = {  # in test_hf_config.py
    *("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
    *("qwen3_5_text", "qwen3_5_moe_text", "minimax_text_01"),
}


def test_every_type_that_is_read_is_checked_by_one_of_the_tables() -> None:
    checked = {inner for row in DEFAULTS.values() for inner in types_in(row["config"])}
    checked |= {inner for config in PUBLISHED.values() for inner in types_in(config)}
    checked |= {inner for row in RAW.values() for inner in types_in(row["config"])}
    assert set(FAMILIES) - checked == {*ALIASES, *BY_PRESET}
    for alias, other in ALIASES.items():
        assert FAMILIES[alias] is FAMILIES[other] and other in checked


def types_in(config: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for inner in config.values():
        if isinstance(inner, Mapping):
            yield from types_in(inner)


@pytest.mark.parametrize("model_type", GOLDEN["refused"])
def test_a_type_with_another_kind_of_cache_is_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type='{model_type}' .*is refused: \w+ "):
        layers_from_config({"model_type": model_type})


def test_every_wrapper_holds_a_type_that_is_read_or_refused() -> None:
    assert set(WRAPPERS.values()) <= {*FAMILIES, *REFUSED}


# Language models of the wrappers of whose files none is recorded, by the code in their repository.
HELD = {
    **dict.fromkeys(["Llama_Nemotron_Nano_VL", "h2ovl_chat"], "llama"),
    **dict.fromkeys(["NVLM_D", "ovis2", "dots_ocr"], "qwen2"),
    "intern_s2_preview": "qwen3_5_moe_text",
    **dict.fromkeys(["minicpm_ocr", "minicpmv4_6", "minicpmv4_7"], "qwen3_5_text"),
    **{"NemotronH_Nano_VL_V2": "nemotron_h", "kimi_vl": "deepseek_v3"},
    **{"ernie4_5_moe_vl": "ernie4_5_vl_moe_text", "bailing_moe_v3_vl": "bailing_hybrid"},
    **{name: f"{name}_text" for name in "diffusion_gemma minimax_m3 unlimited_ocr".split()},
}


def test_a_language_model_without_a_type_is_the_one_that_its_wrapper_has() -> None:
    files = [expanded(row["config"]) for row in (*DEFAULTS.values(), *RAW.values())]
    files += [*map(expanded, PUBLISHED.values()), *map(load_config, preset_names())]
    named = dict(HELD)
    for config in files:
        kind, inner = config.get("model_type"), innermost(config).get("model_type")
        if innermost(config) is not config and inner and named.setdefault(kind, inner) == inner:
            assert layers_of(changed(config, "model_type")) == layers_of(config), kind
    assert named == WRAPPERS


# --- files that leave out layer_types ---------------------------------------------

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
WINDOW = {**SIZES, "sliding_window": 64}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
DELTA = {"linear_num_heads": 4, "linear_head_dim": 64, "linear_conv_kernel_dim": 4}
MAMBA1 = {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
LETTERS = {
    **{"full_attention": "F", "sliding_attention": "S", "mamba": "M", "linear_attention": "L"},
    **{"mla": "F", "short_convolution": "C", "recurrent": "R"},
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {  # by the __post_init__ of each class, by hand
    "qwen2": ({**WINDOW, "use_sliding_window": True, "max_window_layers": 4}, "FFFFSSS"),
    "qwen3": ({**WINDOW, "use_sliding_window": False, "max_window_layers": 4}, "FFFFFFF"),
    "dots1": ({**WINDOW, "max_window_layers": 5}, "FFFFFSS"),
    "mistral": (SIZES, "SSSSSSS"),
    "ministral": (SIZES, "SSSSSSS"),
    "gemma2": (WINDOW, "SFSFSFS"),
    "gemma3_text": ({**WINDOW, "sliding_window_pattern": 3}, "SSFSSFS"),
    "gemma3n_text": ({**WINDOW, "num_kv_shared_layers": 0}, "SSSSFSS"),
    "gemma4_text": ({**WINDOW, "_sliding_window_pattern": 7, "global_head_dim": 64}, "SSSSSSF"),
    "cohere2": ({**WINDOW, "layer_switch": 3}, "SSFSSFS"),
    "exaone4": ({**WINDOW, "sliding_window_pattern": "LLG"}, "SSFSSFS"),
    "exaone_moe": (SIZES, "SSSFSSS"),
    "olmo3": (WINDOW, "SSSFSSS"),
    "afmoe": ({**WINDOW, "global_attn_every_n_layers": 2}, "SFSFSFS"),
    "granite_swa": (WINDOW, "FSSSFSS"),
    "cwm": (WINDOW, "FSSSFSS"),
    "gpt_neo": (
        {
            **{"hidden_size": 512, "num_heads": 8, "window_size": 256},
            "attention_types": [[["global", "local"], 2], [["local"], 3]],
        },
        "FSFSSSS",
    ),
    "bailing_hybrid": ({**LATENT, **DELTA, "layer_group_size": 3}, "LLFLLFF"),
    "jamba": ({**SIZES, **MAMBA1, "attn_layer_period": 3, "attn_layer_offset": 1}, "MFMMFMM"),
    "zamba": (  # hybrid: the third layer and, of those after it, 1: attention, then mamba
        {
            **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{**MAMBA1, "attn_layer_period": 3, "attn_layer_offset": 1},
        },
        "MMFMMFMMM",
    ),
    "lfm2": ({**SIZES, "conv_L_cache": 3, "full_attn_idxs": [1, 4]}, "CFCCFCC"),
    "recurrent_gemma": (
        {
            **SIZES,
            **{"block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4},
            "attention_window_size": 64,
        },
        "RRSRRSR",
    ),
}


@pytest.mark.parametrize("model_type", KINDS)
def test_layers_have_the_kind_that_the_class_gives_them(model_type: str) -> None:
    config, kinds = KINDS[model_type]
    layers = layers_from_config(
        {"num_hidden_layers": 7, "num_layers": 7, **config, "model_type": model_type},
        kv_dtype="bfloat16",
    )
    assert "".join(LETTERS[name.rsplit(".", 1)[1]] for name in layers) == kinds


# By the same code of the classes. The others need a window, wherever layer_types is left out.
FULL_WITHOUT_WINDOW = set(
    """
    qwen2 dots1 mistral ministral ministral3 phi3 phi3_v phi4mm mixtral starcoder2 phi4_multimodal
    phimoe exaone4 exaone_moe cohere_compass_text
    """.split()
)
REFUSED_WITHOUT_WINDOW = set(
    """
    gemma2 vaultgemma gpt_oss gemma3_text gemma3n_text gemma4_text cohere2 olmo3 afmoe
    cwm granite_swa granitemoe_swa
    """.split()
)


@pytest.mark.parametrize("pattern", ["LGLG", "LLL", "GLL", "LLX"])
def test_a_pattern_is_one_period_that_ends_with_a_full_layer(pattern: str) -> None:
    config = SIZES | KINDS["exaone4"][0] | {"model_type": "exaone4", "num_hidden_layers": 7}
    with pytest.raises(ValueError, match=r"sliding_window_pattern=.* such as 'LLLG'"):
        layers_from_config(config | {"sliding_window_pattern": pattern}, kv_dtype="bfloat16")


@pytest.mark.parametrize("model_type", sorted(FULL_WITHOUT_WINDOW | REFUSED_WITHOUT_WINDOW))
def test_without_a_window_all_layers_are_full_or_the_window_is_missed(model_type: str) -> None:
    """Whatever the pattern of the file is."""
    config = SIZES | KINDS.get(model_type, ({},))[0] | {"num_hidden_layers": 7}
    config |= {"model_type": model_type, "sliding_window": None}
    if model_type in REFUSED_WITHOUT_WINDOW:
        with pytest.raises(ValueError, match="the configuration lacks 'sliding_window'"):
            layers_from_config(config, kv_dtype="bfloat16")
        return
    layers = layers_from_config(config, kv_dtype="bfloat16")
    assert [name.rsplit(".", 1)[1] for name in layers] == ["full_attention"] * 7


@pytest.mark.parametrize(
    ("name", "field", "kind"),
    [
        ("Bamba-9B", "attn_layer_indices", "full_attention"),
        ("Llama-3.2-11B-Vision", "cross_attention_layers", "cross_attention"),
    ],
)
def test_the_layers_of_a_list_are_numbered_from_0(name: str, field: str, kind: str) -> None:
    config = expanded(PUBLISHED[name])
    text = config.get("text_config", config)
    for numbers in ([0], [text["num_hidden_layers"] - 1]):
        text[field] = numbers
        layers = layers_from_config(config)
        assert [key for key in layers if key.endswith(kind)] == [f"layers.{numbers[0]}.{kind}"]
    text[field] = [text["num_hidden_layers"]]
    with pytest.raises(ValueError, match=rf"{field}=.* numbers of the"):
        layers_from_config(config)


def test_both_names_of_the_convolution_of_ling_have_one_value() -> None:
    config = {**LATENT, **DELTA, "layer_group_size": 3, "num_hidden_layers": 7}
    config |= {**SIZES, "model_type": "bailing_hybrid", "torch_dtype": "bfloat16"}
    layers = layers_from_config(config)
    assert layers_from_config(config | {"short_conv_kernel_size": 4}) == layers
    with pytest.raises(ValueError, match=r"short_conv_kernel_size=3 .*; understood: 4"):
        layers_from_config(config | {"short_conv_kernel_size": 3})


def test_kinds_and_indices_of_lfm2_agree_where_a_file_has_both() -> None:
    config = {**SIZES, "model_type": "lfm2", "num_hidden_layers": 3, "conv_L_cache": 3}
    config |= {"torch_dtype": "bfloat16"}
    kinds, indices = ["conv", "full_attention", "conv"], {"full_attn_idxs": [1]}
    layers = layers_from_config(config | {"layer_types": kinds})
    assert layers == layers_from_config(config | indices)
    assert layers == layers_from_config(config | indices | {"layer_types": kinds})
    with pytest.raises(ValueError, match=r"full_attn_idxs=.* contradicts layer_types"):
        layers_from_config(config | indices | {"layer_types": sorted(kinds)})


@pytest.mark.parametrize(
    ("attn_type", "heads"),
    [("multihead_attention", 8), ("multiquery_attention", 1), ("grouped_query_attention", 2)],
)
def test_mpt_shares_heads_by_its_attn_config(attn_type: str, heads: int) -> None:
    config = {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 2}
    config["attn_config"] = {"attn_type": attn_type, "kv_n_heads": 2}
    layers = layers_from_config(config, kv_dtype="bfloat16")
    assert {spec.num_kv_heads for _, spec in attention(layers)} == {heads}
    del config["attn_config"]["kv_n_heads"]
    if attn_type == "grouped_query_attention":
        with pytest.raises(ValueError, match="the configuration lacks 'kv_n_heads'"):
            layers_from_config(config, kv_dtype="bfloat16")
    else:
        assert layers_from_config(config, kv_dtype="bfloat16") == layers
    config["attn_config"]["sliding_window_size"] = 64
    with pytest.raises(ValueError, match="sliding_window_size=64 is not understood"):
        layers_from_config(config | {"attn_config": config["attn_config"] | {"kv_n_heads": 2}})


@pytest.mark.parametrize(
    ("config", "own", "usual", "other"),
    [
        (PUBLISHED["GPT-2"], "n_layer", "num_hidden_layers", 13),
        (load_config("granite-4.0-h-tiny"), "layers_block_type", "layer_types", ["mamba"] * 40),
    ],
    ids=["GPT-2", "Granite"],
)
def test_a_field_under_two_names_must_have_one_value(config, own, usual, other) -> None:
    value = config.get(own, config.get(usual))
    fields = {name: config[name] for name in config if name not in (own, usual)}
    layers = layers_from_config(config)
    for names in ([own], [usual], [own, usual]):
        assert layers_from_config(fields | dict.fromkeys(names, value)) == layers
    with pytest.raises(ValueError, match=f"{own}=.* contradicts {usual}="):
        layers_from_config(fields | {own: value, usual: other})


@pytest.mark.parametrize("key", ["7", "-1", "x"])
def test_per_layer_config_must_name_layers_of_the_model(key: str) -> None:
    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 7, "torch_dtype": "bfloat16"}
    narrow = layers_from_config({**config, "per_layer_config": {"06": {"head_dim": 32}}})
    assert [spec.head_size for _, spec in attention(narrow)] == [64] * 6 + [32]
    with pytest.raises(ValueError, match="per_layer_config"):
        layers_from_config({**config, "per_layer_config": {key: {"head_dim": 32}}})


@pytest.mark.parametrize("field", ["global_head_dim", "num_global_key_value_heads"])
def test_full_layers_of_gemma_4_have_one_shape_in_both_of_its_forms(field: str) -> None:
    text = load_config("gemma-4-31b")["text_config"] | {"torch_dtype": "bfloat16"}
    own = {
        "head_dim": text["global_head_dim"],
        "num_key_value_heads": text["num_global_key_value_heads"],
    }
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    by_layer = text | {"per_layer_config": {str(i): own for i in full}}
    assert layers_from_config(by_layer) == layers_from_config(text)
    with pytest.raises(ValueError, match=f"{field}={2 * text[field]} is not understood"):
        layers_from_config(by_layer | {field: 2 * text[field]})


@pytest.mark.parametrize(
    ("field", "values"),
    [("head_dim", (8, 16)), ("num_key_value_heads", (1, 2)), ("sliding_window", (8, 16))],
)
def test_a_field_of_one_layer_counts_there_as_if_all_layers_had_it(
    field: str, values: tuple[int, int]
) -> None:
    """In every class that has the field, where its layers may differ at all."""
    answered = set()
    for model_type, row in DEFAULTS.items():
        config = expanded(row["config"])
        fields = innermost(config)
        if not fields.get(field) or "per_layer_config" in fields:
            continue
        usual = layers_of(config)
        numbers = {name: int(name.split(".")[1]) for name in usual}
        by_layer = {str(n): {field: values[n % 3]} for n in numbers.values() if n % 3 < 2}
        try:
            found = layers_of(changed(config, "per_layer_config", by_layer))
        except ValueError as refusal:
            assert "per_layer_config=" in str(refusal)
            continue
        turns = *(layers_of(changed(config, field, value)) for value in values), usual
        wanted = {name: turns[n % 3][name] for name, n in numbers.items()}
        assert found == wanted, model_type
        answered |= {model_type} if found != usual else set()
    assert answered >= {"gemma2", "mistral"}


def without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The configuration without these fields, wherever they stand."""
    return {
        name: without(value, *names) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in names
    }


def layers_of(config: dict[str, Any]) -> dict[str, Any]:
    return layers_from_config(config, **fp8_or_bf16(config))


def fp8_or_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dtype of keys that every family takes, but for one that keeps fp8 only."""
    is_v4 = str(config.get("model_type")).startswith("deepseek_v4")
    return {} if is_v4 else {"kv_dtype": "bf16"}


def test_a_dtype_is_read_under_either_of_its_names() -> None:
    """In every file, wherever it stands; with one, nothing is left to what a family ships."""
    files = [expanded(row["config"]) for row in DEFAULTS.values()]
    files += [*map(expanded, PUBLISHED.values()), *map(load_config, preset_names())]
    names = "torch_dtype", "dtype"
    for config in files:
        plain = without(config, *names)
        inside = [changed(plain, name, "float16") for name in names]
        given = [*inside, *({**plain, name: "float16"} for name in names)]
        old, *others = (layers_from_config(config) for config in given)
        assert all(layers == old for layers in others), config.get("model_type")
        assert {shipped_dtype(config) for config in given} == {None}, config.get("model_type")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2"])
def test_sizes_are_left_to_the_class_inside_of_a_wrapper_only(model_type: str) -> None:
    with pytest.raises(ValueError, match="the configuration lacks"):
        layers_from_config({"model_type": model_type, "torch_dtype": "bfloat16"})


# --- damaged configurations -------------------------------------------------------

MUTATIONS = 4_000
ODD: tuple[Any, ...] = (
    *(None, 0, 1, -1, 3, 10**30, 1.5, math.inf, math.nan, True, False, "", "x", "LLLG", "auto"),
    *([], [1], [None], ["full_attention"], ["x"], [[1]], {}, {"a": 1}, b"x", (1,)),
    *({"0": {"head_dim": 64}}, {"factor": math.inf}, {"attn_type": 5}),
    *([{"attention": {}}], [[["global"], 3]], [[["x"], "y"]]),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"kv_dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"tensor_parallel": 2}),
    {"kv_dtype": "bf16", "block_size": 32, "speculative_tokens": 2},
)


def damaged(rng: random.Random, config: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The configuration with up to three fields left out, replaced, added or exchanged."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = config
        while inner := [v for v in at.values() if isinstance(v, dict)]:
            if rng.random() < 0.3:
                break
            at = rng.choice(inner)
        name = rng.choice([*at, "model_type"])
        how = rng.randrange(4)
        if how == 0:
            at.pop(name, None)
        else:
            name = rng.choice(list(others)) if how == 1 else name
            value = rng.choice(ODD) if how < 3 else rng.choice(list(others.values()))
            at[name] = copy.deepcopy(value)
    return config


def tables() -> dict[tuple[str, str], str]:
    """The tables of the modules that read files, as text."""
    return {
        (module, name): repr(value)
        for module in sorted(sys.modules)
        if module.startswith("jaxkv._src.hf_config")
        for name, value in vars(sys.modules[module]).items()
        if isinstance(value, dict | list | set) and not name.startswith("__")
    }


TABLES = tables()


def test_a_file_is_read_alike_whatever_was_read_before() -> None:
    given = [row["config"] for row in DEFAULTS.values()]
    given = list(map(expanded, [*given, *map(load_config, preset_names()), *PUBLISHED.values()]))
    before = copy.deepcopy(given)
    for config in given:
        with contextlib.suppress(ValueError):  # DeepSeek V4 keeps fp8 only
            layers_from_config(config, kv_dtype="bfloat16")
    assert given == before
    now = tables()
    assert [table for table in TABLES if now[table] != TABLES[table]] == []
    jamba = load_config("jamba-v0.1")
    count = jamba["num_hidden_layers"]
    with pytest.raises(ValueError, match=r"layer_types=.*\['mlp'\] are none of the known"):
        layers_from_config({**jamba, "layer_types": ["mlp"] * count})


def every_config() -> list[dict[str, Any]]:
    """All presets and golden files."""
    rows = *DEFAULTS.values(), *GOLDEN["drawn"], *RAW.values()
    golden = [*PUBLISHED.values(), *(row["config"] for row in rows)]
    return [*map(expanded, golden), *map(load_config, preset_names())]


def test_options_change_bytes_and_never_which_layers_there_are() -> None:
    """Drafts and resumable states only add bytes; two ranks hold all bytes between them."""
    undivided = 0
    for config in every_config():
        dtype = fp8_or_bf16(config)
        plain = layers_from_config(config, **dtype)
        drafts = layers_from_config(config, **dtype, speculative_tokens=2, state_cache_mode="align")
        assert {n: type(s) for n, s in drafts.items()} == {n: type(s) for n, s in plain.items()}
        assert total_bytes(drafts) >= total_bytes(plain)
        try:
            half = layers_from_config(config, **dtype, tensor_parallel=2)
        except ValueError as refusal:
            assert "tensor_parallel=2" in str(refusal)
            undivided += 1
        else:
            assert {n: type(s) for n, s in half.items()} == {n: type(s) for n, s in plain.items()}
            assert total_bytes(plain) <= 2 * total_bytes(half) <= 2 * total_bytes(plain)
    assert undivided <= 3  # with an odd number of heads


def total_bytes(layers: Mapping[str, object]) -> int:
    return sum(spec.data_bytes for spec in layers.values() if isinstance(spec, LayerSpec))


def test_a_damaged_configuration_is_answered_or_refused() -> None:
    rng = random.Random(14)
    configs = every_config()
    others = {name: value for config in configs for name, value in config.items()}
    questions: list[Callable[..., object]] = [layers_from_config, model_len, encoder_len]
    answers: collections.Counter[str] = collections.Counter()
    for _ in range(MUTATIONS):
        config = damaged(rng, rng.choice(configs), others)
        options = rng.choice(OPTIONS)
        for question in [*questions, shipped_dtype]:
            try:
                question(config, **(options if question is layers_from_config else {}))
                answers["answered"] += 1
            except (ValueError, TypeError) as refusal:
                assert str(refusal)
                answers["refused"] += 1
    assert min(answers.values()) > MUTATIONS // 2
