"""Llama, Qwen3 and Gemma 3 in plain JAX: `load` a folder, then `forward` in an engine."""

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
KINDS = "llama", "qwen3", "gemma3_text"


def load(folder: str | pathlib.Path, dtype: Any = None) -> tuple[Config, dict[str, Any]]:
    """Reads ``config.json`` and all ``*.safetensors`` of a folder.

    Weights are cast to ``dtype``, which the config then names, so that the cache is of it, too.
    """
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in KINDS:
        raise ValueError(f"model_type={config['model_type']!r}; this reads {', '.join(KINDS)}")
    flat: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in read_safetensors(file):
            matrix = array.T if array.ndim == 2 and "embed" not in name else array
            flat[name.removeprefix("model.")] = jnp.asarray(matrix, dtype)
    layers = range(config["num_hidden_layers"])
    params: dict[str, Any] = {"layers": [_under(flat, f"layers.{i}.") for i in layers]}
    params |= {"embed": flat["embed_tokens.weight"], "norm": flat["norm.weight"]}
    if "lm_head.weight" in flat:
        params["head"] = flat["lm_head.weight"]
    if is_gemma(config):  # its norms multiply by 1 + weight
        params = jax.tree.map(lambda x: 1 + x if x.ndim == 1 else x, params)
    return with_dtype(config, dtype), params


def with_dtype(config: Config, dtype: Any) -> Config:
    """Returns the config of the same model in ``dtype``; None: in its own."""
    if dtype is None:
        return config
    named = {name: value for name, value in config.items() if name != "torch_dtype"}
    return named | {"dtype": jnp.dtype(dtype).name}


def cache_memory(params: dict[str, Any]) -> int:
    """Returns bytes for the cache: on a GPU what is left, but for 4 GiB for the model's arrays."""
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(0.9 * stats["bytes_limit"]) - weights - 4 * 2**30
    return max(weights, 2**20)  # a CPU says nothing of its memory


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


def hidden_states(config: Config, params: dict[str, Any], step: jaxkv.StepContext) -> Array:
    """Returns the hidden states of a step's tokens, [T, hidden_size]."""
    eps, gemma = config["rms_norm_eps"], is_gemma(config)
    x = params["embed"][step.token_ids]
    if gemma:
        x = x * jnp.asarray(config["hidden_size"] ** 0.5, x.dtype)
    for name, layer in zip(layer_names(config), params["layers"], strict=True):

        def norm(x: Array, which: str, weights: dict[str, Array] = layer) -> Array:
            return rms_norm(x, weights[f"{which}_layernorm"], eps)

        out = attention(config, layer, norm(x, "input"), step, name)
        x = x + (norm(out, "post_attention") if gemma else out)
        h = norm(x, "pre_feedforward" if gemma else "post_attention")
        gate = h @ layer["mlp.gate_proj"]
        gate = jax.nn.gelu(gate, approximate=True) if gemma else jax.nn.silu(gate)
        out = (gate * (h @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
        x = x + (norm(out, "post_feedforward") if gemma else out)
    return x


def head(config: Config, params: dict[str, Any], hidden: Array) -> Array:
    """Returns the logits of hidden states, f32[N, vocab]."""
    hidden = rms_norm(hidden, params["norm"], config["rms_norm_eps"])
    weights = params["head"] if "head" in params else params["embed"].T
    return (hidden @ weights).astype(jnp.float32)


def layer_names(config: Config) -> list[str]:
    """Returns the layers' names in the plan, such as ``layers.0.sliding_attention``."""
    return list(jaxkv.layers_from_config(config))


def attention(config, layer, x, step, name):
    width, eps = head_dim(config), config["rms_norm_eps"]
    angles = rope_angles(config, step.positions, name.rpartition(".")[2])

    def heads(kind: str) -> Array:
        y = (x @ layer[f"self_attn.{kind}_proj"]).reshape(len(x), -1, width)
        norm = layer.get(f"self_attn.{kind}_norm")  # Qwen3 and Gemma 3 have them
        return y if norm is None else rms_norm(y, norm, eps)

    queries, keys = rotate(heads("q"), angles), rotate(heads("k"), angles)
    scale = config.get("query_pre_attn_scalar", 256) ** -0.5 if is_gemma(config) else None
    out = step.attend(name, queries, keys, heads("v"), scale=scale)
    return out.reshape(len(x), -1) @ layer["self_attn.o_proj"]


def is_gemma(config: Config) -> bool:
    return config["model_type"] == "gemma3_text"


def head_dim(config: Config) -> int:
    default = 256 if is_gemma(config) else config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim") or default


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def rope_angles(config: Config, positions: Array, kind: str = "full_attention") -> Array:
    """Returns f32[T, 1, head_dim / 2], for one kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", 1e6 if is_gemma(config) else 1e4)
    if kind in rope:  # one for each kind
        rope = rope[kind]
    elif kind == "sliding_attention":
        rope, theta = {}, config.get("rope_local_base_freq", 1e4)
    half = head_dim(config) // 2
    frequency = rope.get("rope_theta", theta) ** (-np.arange(half) / half)
    how = rope.get("rope_type", rope.get("type", "default"))
    if how == "llama3":  # long waves are stretched, short ones are kept
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / rope["factor"])
    elif how == "linear":
        frequency = frequency / rope["factor"]
    elif how != "default":
        raise ValueError(f"rope_type={how!r}; this knows default, linear and llama3")
    return positions[:, None, None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)


def rotate(x: Array, angles: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
