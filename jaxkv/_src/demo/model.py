"""A decoder of the Qwen3-Next shape: three gated delta nets to one full attention.

Shapes: T tokens of all requests of a step, H heads.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxkv
from pallas_kernels import default_implementation

Params = dict[str, dict[str, Array]]
KEY_SCALE, VALUE_SCALE = 0.02, 0.02  # of 8-bit pages; keys are normalised, values about 1


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A configuration and its layers in order; static.

    query_dtype: of the queries that attend; see `query_dtype`.
    """

    config: Mapping[str, Any]
    layers: tuple[str, ...]
    query_dtype: str = "float32"


def query_dtype(kv_dtype: str) -> str:
    """Returns the dtype of queries that the attention kernel of this device takes."""
    if default_implementation() != "mosaic_gpu" or kv_dtype == "f32":
        return "float32"
    return "bfloat16" if kv_dtype == "bf16" else "float16"


def init_params(model: Model, key: Array) -> Params:
    """Returns random weights, each matrix scaled by the square root of its fan-in."""
    c, hidden = model.config, model.config["hidden_size"]
    queries, keys = (c[n] * c["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    heads, ffn = c["linear_num_value_heads"], c["intermediate_size"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    outputs = {
        "full_attention": {"query": queries, "query_gate": queries, "key": keys, "value": keys},
        "linear_attention": {"qkv": channels, "out_gate": values, "beta": heads, "decay": heads},
    }
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    for layer in model.layers:
        kind = layer.rsplit(".", 1)[1]
        shapes[layer] = {name: (hidden, size) for name, size in outputs[kind].items()}
        shapes[layer] |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        shapes[layer]["out"] = (queries if kind == "full_attention" else values, hidden)
        if kind == "linear_attention":
            shapes[layer]["conv"] = (c["linear_conv_kernel_dim"], channels)
    shapes["head"] = {"embed": (c["vocab_size"], hidden), "unembed": (hidden, c["vocab_size"])}
    every = [(layer, name) for layer, matrices in shapes.items() for name in matrices]
    params: Params = {layer: {} for layer in shapes}
    for use, (layer, name) in zip(jax.random.split(key, len(every)), every, strict=True):
        shape = shapes[layer][name]
        params[layer][name] = jax.random.normal(use, shape) / math.sqrt(shape[0])
    return params


def forward_step(model: Model, params: Params, step: jaxkv.StepContext) -> Array:
    """Computes a step of an engine. Returns f32[B, vocab], for each request's last token."""
    with jax.default_matmul_precision("highest"):
        x = forward(model, params, step.token_ids, step.positions, step)
        return logits(model, params, x[step.last_tokens])


def forward(model: Model, params: Params, ids: Array, positions: Array, step: Any) -> Array:
    """Computes tokens, [T, hidden]. ``step``, a `StepContext`, remembers those before them."""
    config = model.config
    x = params["head"]["embed"][ids] * math.sqrt(config["hidden_size"])
    for layer in model.layers:
        weights, h = params[layer], _norm(config, x)
        if layer.endswith("full_attention"):
            x = x + _attention(model, weights, layer, h, positions, step)
        else:
            x = x + _delta_net(config, weights, layer, h, step)
        h = _norm(config, x)
        x = x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
    return x


def logits(model: Model, params: Params, x: Array) -> Array:
    """Returns f32[..., vocab], the logits of what `forward` returns."""
    return _norm(model.config, x) @ params["head"]["unembed"]


def _attention(model: Model, weights, layer, x, positions, step):
    config = model.config

    def split(name):
        return (x @ weights[name]).reshape(x.shape[0], -1, config["head_dim"])

    query, key = (
        _rotate(config, _norm(config, split(name)), positions) for name in ("query", "key")
    )
    mixed = step.attend(layer, query.astype(model.query_dtype), key, split("value"))
    gate = jax.nn.sigmoid(x @ weights["query_gate"])
    return (mixed.astype(x.dtype).reshape(gate.shape) * gate) @ weights["out"]


def _delta_net(config, weights, layer, x, step):
    out = step.gated_delta(
        layer,
        x @ weights["qkv"],
        -jax.nn.softplus(x @ weights["decay"]),
        jax.nn.sigmoid(x @ weights["beta"]),
        conv_weights=weights["conv"],
        num_key_heads=config["linear_num_key_heads"],
    )
    out = _norm(config, out).reshape(x.shape[0], -1)
    return (out * jax.nn.silu(x @ weights["out_gate"])) @ weights["out"]


def _norm(config, x: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])


def _rotate(config, x: Array, positions: Array) -> Array:
    """Turns the leading ``partial_rotary_factor`` of each head by the token's position."""
    half = int(x.shape[-1] * config["partial_rotary_factor"]) // 2
    frequency = config["rope_theta"] ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, None].astype(x.dtype) * frequency[None, None]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    turned = (
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
    )
    return jnp.concatenate([*turned, rest], axis=-1)
