"""The demo's model by its definition: one request in NumPy, token by token and head by head."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Weights = Mapping[str, np.ndarray]


def logprobs_of(config: Config, params: Mapping[str, Weights], ids: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities of each next token, f64[L, vocab]."""
    head, eps = params["head"], config["rms_norm_eps"]
    x = head["embed"][ids].astype(float) * np.sqrt(config["hidden_size"])
    for layer, weights in params.items():
        if layer == "head":
            continue
        mix = _attention if layer.endswith("full_attention") else _delta_net
        x = x + mix(config, weights, _norm(x, eps))
        h = _norm(x, eps)
        x = x + (_silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
    logits = _norm(x, eps) @ head["unembed"]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _attention(config: Config, weights: Weights, x: np.ndarray) -> np.ndarray:
    width, eps = config["head_dim"], config["rms_norm_eps"]
    query, key, value = (
        (x @ weights[name]).reshape(len(x), -1, width) for name in ("query", "key", "value")
    )
    query, key = (_turned(config, _norm(array, eps)) for array in (query, key))
    heads, out = query.shape[1], np.zeros(query.shape)
    for token in range(len(x)):
        for h in range(heads):
            of = h * key.shape[1] // heads  # neighbours share a head of keys
            weight = np.exp(key[: token + 1, of] @ query[token, h] / np.sqrt(width))
            out[token, h] = weight @ value[: token + 1, of] / weight.sum()
    return (out.reshape(len(x), -1) * _sigmoid(x @ weights["query_gate"])) @ weights["out"]


def _turned(config: Config, x: np.ndarray) -> np.ndarray:
    """Returns [L, heads, D] with pairs of elements turned, each as a complex number."""
    half = int(x.shape[-1] * config["partial_rotary_factor"]) // 2
    turned = x.copy()
    for position in range(len(x)):
        for i in range(half):
            angle = position * config["rope_theta"] ** (-i / half)
            pair = (x[position, :, i] + 1j * x[position, :, half + i]) * np.exp(1j * angle)
            turned[position, :, i], turned[position, :, half + i] = pair.real, pair.imag
    return turned


def _delta_net(config: Config, weights: Weights, x: np.ndarray) -> np.ndarray:
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    beta, decay = _sigmoid(x @ weights["beta"]), 1 / (1 + np.exp(x @ weights["decay"]))
    kernel = len(weights["conv"])
    before = np.concatenate([np.zeros((kernel - 1, weights["conv"].shape[1])), x @ weights["qkv"]])
    states, out = np.zeros((heads, size, key_size)), np.zeros((len(x), heads, size))
    for token in range(len(x)):
        mixed = _silu((before[token : token + kernel] * weights["conv"]).sum(axis=0))
        query, key, value = np.split(mixed, [key_heads * key_size, 2 * key_heads * key_size])
        for h in range(heads):
            of = h * key_heads // heads
            q, k = (array.reshape(key_heads, -1)[of] for array in (query, key))
            q, k = (array / np.sqrt(array @ array + 1e-6) for array in (q, k))
            state = decay[token, h] * states[h]
            error = value.reshape(heads, -1)[h] - state @ k
            states[h] = state + beta[token, h] * np.outer(error, k)
            out[token, h] = states[h] @ q / np.sqrt(key_size)
    out = _norm(out, config["rms_norm_eps"]).reshape(len(x), -1)
    return (out * _silu(x @ weights["out_gate"])) @ weights["out"]


def _norm(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)
