"""Llama and Qwen3 from a Hugging Face folder, in plain JAX: `load`, then `forward` in an engine."""

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

import jaxkv

Config = dict[str, Any]
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def load(folder: str | pathlib.Path, dtype: Any = None) -> tuple[Config, dict[str, Any]]:
    """Reads ``config.json`` and all ``*.safetensors`` of a folder; casts weights to ``dtype``."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ("llama", "qwen3"):
        raise ValueError(f"model_type={config['model_type']!r}; this reads llama and qwen3")
    flat: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in read_safetensors(file):
            matrix = array.T if array.ndim == 2 and "embed" not in name else array
            flat[name.removeprefix("model.")] = jnp.asarray(matrix, dtype)
    layers = range(config["num_hidden_layers"])
    params: dict[str, Any] = {"layers": [_under(flat, f"layers.{i}.") for i in layers]}
    params |= {"embed": flat["embed_tokens.weight"], "norm": flat["norm.weight"]}
    if not config.get("tie_word_embeddings"):
        params["head"] = flat["lm_head.weight"]
    return config, params


def read_safetensors(file: pathlib.Path):
    """Yields the names and the arrays of a file: eight bytes of length, a JSON header, bytes."""
    data = np.memmap(file, np.uint8, mode="r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            array = data[start + first : start + end].view(DTYPES[entry["dtype"]])
            yield name, array.reshape(entry["shape"])


def _under(flat: dict[str, Array], prefix: str) -> dict[str, Array]:
    """Returns the weights of a layer by their names in it: ``self_attn.q_proj`` and so on."""
    names = [name for name in flat if name.startswith(prefix)]
    return {name.removeprefix(prefix).removesuffix(".weight"): flat[name] for name in names}


def forward(config: Config, params: dict[str, Any], step: jaxkv.StepContext) -> Array:
    """Computes the tokens of a step; returns f32[B, vocab], the logits of the last ones."""
    eps = config["rms_norm_eps"]
    x = params["embed"][step.token_ids]
    angles = rope_angles(config, step.positions)
    for i, layer in enumerate(params["layers"]):
        h = rms_norm(x, layer["input_layernorm"], eps)
        x = x + attention(config, layer, h, angles, step, f"layers.{i}.full_attention")
        h = rms_norm(x, layer["post_attention_layernorm"], eps)
        gate = jax.nn.silu(h @ layer["mlp.gate_proj"])
        x = x + (gate * (h @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
    x = rms_norm(x[step.last_tokens], params["norm"], eps)
    head = params["head"] if "head" in params else params["embed"].T
    return (x @ head).astype(jnp.float32)


def attention(config, layer, x, angles, step, name):
    width = head_dim(config)

    def heads(kind: str) -> Array:
        y = (x @ layer[f"self_attn.{kind}_proj"]).reshape(len(x), -1, width)
        norm = layer.get(f"self_attn.{kind}_norm")  # Qwen3 has them
        return y if norm is None else rms_norm(y, norm, config["rms_norm_eps"])

    queries, keys = rotate(heads("q"), angles), rotate(heads("k"), angles)
    out = step.attend(name, queries, keys, heads("v"))
    return out.reshape(len(x), -1) @ layer["self_attn.o_proj"]


def head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def rope_angles(config: Config, positions: Array) -> Array:
    """Returns f32[T, 1, head_dim / 2]."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    half = head_dim(config) // 2
    frequency = theta ** (-np.arange(half) / half)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":  # long waves are stretched, short ones are kept
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / rope["factor"])
    elif kind != "default":
        raise ValueError(f"rope_type={kind!r}; this knows default and llama3")
    return positions[:, None, None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)


def rotate(x: Array, angles: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
