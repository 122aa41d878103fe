"""A small checkpoint of random weights, as Hugging Face writes them: `write_folder`."""

import json
import pathlib
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **SIZES,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {
        **SIZES,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 1000.0,
    },
    "gemma3_text": {
        **SIZES,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 12,
        "rope_local_base_freq": 100.0,
        "rope_theta": 1000.0,
        "sliding_window": 5,
    },
}


def write_folder(kind: str, folder: pathlib.Path) -> None:
    """Writes a model of `CONFIGS` in two files, as large checkpoints have several."""
    config = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    arrays = {name: _weight(rng, shape) for name, shape in _shapes(config).items()}
    names = list(arrays)
    file_of = {
        name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)
    }
    for file in set(file_of.values()):
        write_safetensors(folder / file, {n: arrays[n] for n in names if file_of[n] == file})
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(file: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, array in arrays.items():
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape).astype(np.float32)
    return 1 + 0.1 * noise if len(shape) == 1 else noise / np.float32(np.sqrt(shape[1]))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = (config[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, kv_heads = (config[f"num_{n}_heads"] * width for n in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        if config["model_type"] == "gemma3_text":
            layer |= {f"{n}_feedforward_layernorm": (hidden,) for n in ("pre", "post")}
        if config["model_type"] != "llama":
            layer |= {f"self_attn.{n}_norm": (width,) for n in "qk"}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
