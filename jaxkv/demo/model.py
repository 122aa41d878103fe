"""A decoder of the Qwen3-Next shape: three gated delta nets to one full attention.

Knows weights and arithmetic. Where keys, values and states are kept is a `Cache`'s
business, so the same model runs over the paged pool and over plain dense arrays.

Shapes: B requests, C tokens of each computed now, H heads. Padding tokens have a
negative position and lie behind the real ones.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, dict[str, Array]]


class Cache(Protocol):
    """What a layer remembers, by layer name."""

    def attend(self, layer: str, keys: Array, values: Array) -> tuple[Self, Array, Array]:
        """Stores [B, C, H, D] new keys and values; returns those of all positions."""
        ...

    def read_state(self, layer: str) -> tuple[Array, Array]:
        """Convolution inputs [B, K - 1, channels] and matrix state [B, H, V, D]."""
        ...

    def write_state(self, layer: str, conv: Array, state: Array) -> Self: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A configuration and its layers in order; static, to be closed over by a jit."""

    config: Mapping[str, Any]
    layers: tuple[str, ...]


def init_params(model: Model, key: Array) -> Params:
    """Random weights, each matrix scaled by the square root of its fan-in."""
    config = model.config
    hidden, ffn, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, width = (
        config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    channels, value_heads = _channels(config), config["linear_num_value_heads"]
    value_width = value_heads * config["linear_value_head_dim"]
    mlp = {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "full_attention": {
            "query": (hidden, heads * width),
            "query_gate": (hidden, heads * width),
            "key": (hidden, kv_heads * width),
            "value": (hidden, kv_heads * width),
            "out": (heads * width, hidden),
            **mlp,
        },
        "linear_attention": {
            "qkv": (hidden, channels),
            "out_gate": (hidden, value_width),
            "beta": (hidden, value_heads),
            "decay": (hidden, value_heads),
            "conv": (config["linear_conv_kernel_dim"], channels),
            "out": (value_width, hidden),
            **mlp,
        },
    }
    wanted = {layer: shapes[layer.rsplit(".", 1)[1]] for layer in model.layers}
    wanted["head"] = {"embed": (vocab, hidden), "unembed": (hidden, vocab)}
    params: Params = {}
    for layer, matrices in wanted.items():
        params[layer] = {}
        for name, shape in matrices.items():
            key, use = jax.random.split(key)
            params[layer][name] = jax.random.normal(use, shape) / math.sqrt(shape[0])
    return params


def forward[C: Cache](
    model: Model, params: Params, tokens: Array, positions: Array, cache: C
) -> tuple[C, Array]:
    """Computes tokens[B, C] at positions[B, C]; logits[B, vocab] after the last of each."""
    config = model.config
    x = params["head"]["embed"][tokens] * math.sqrt(config["hidden_size"])
    for layer in model.layers:
        weights = params[layer]
        mix = _attention if layer.endswith("full_attention") else _delta_net
        cache, mixed = mix(config, weights, layer, _norm(config, x), positions, cache)
        x = x + mixed
        h = _norm(config, x)
        x = x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
    last = jnp.maximum((positions >= 0).sum(axis=1) - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return cache, _norm(config, x) @ params["head"]["unembed"]


def _attention(config, weights, layer, x, positions, cache):
    """Gated attention over everything the cache holds. Masks logits, and only those:
    like JAX's own paged attention it multiplies the values of masked positions by zero,
    so a NaN in a stale byte of a block reaches the output."""
    width = config["head_dim"]

    def split(y):
        return y.reshape(*y.shape[:-1], -1, width)

    query = _rotate(config, _norm(config, split(x @ weights["query"])), positions)
    key = _rotate(config, _norm(config, split(x @ weights["key"])), positions)
    cache, keys, values = cache.attend(layer, key, split(x @ weights["value"]))
    groups = query.shape[2] // keys.shape[2]
    query = query.reshape(*query.shape[:2], keys.shape[2], groups, width)
    scores = jnp.einsum("bchgd,bthd->bhgct", query, keys) / math.sqrt(width)
    seen = jnp.arange(keys.shape[1])[None, None] <= positions[..., None]
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    mixed = jnp.einsum("bhgct,bthd->bchgd", jax.nn.softmax(scores), values)
    mixed = mixed.reshape(*x.shape[:2], -1)
    return cache, (mixed * jax.nn.sigmoid(x @ weights["query_gate"])) @ weights["out"]


def _delta_net(config, weights, layer, x, positions, cache):
    """Gated delta rule, token by token: S <- a S + b (v - a S k) k^T, out = S q."""
    key_heads, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_heads, value_size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    split_at = (key_heads * key_size, 2 * key_heads * key_size)
    repeat = value_heads // key_heads

    def heads(y, size):
        return y.reshape(y.shape[0], -1, size)

    def step(carry, inputs):
        conv, state = carry
        qkv, beta, decay, valid = inputs
        window = jnp.concatenate([conv, qkv[:, None]], axis=1)
        mixed = jax.nn.silu((window * weights["conv"][None]).sum(axis=1))
        query, key, value = jnp.split(mixed, split_at, axis=-1)
        query = jnp.repeat(_unit(heads(query, key_size)), repeat, axis=1) / math.sqrt(key_size)
        key = jnp.repeat(_unit(heads(key, key_size)), repeat, axis=1)
        kept = state * decay[..., None, None]
        error = heads(value, value_size) - (kept * key[:, :, None]).sum(axis=-1)
        new_state = kept + (beta[..., None] * error)[..., None] * key[:, :, None]
        out = (new_state * query[:, :, None]).sum(axis=-1)
        conv = jnp.where(valid[:, None, None], window[:, 1:], conv)
        state = jnp.where(valid[:, None, None, None], new_state, state)
        return (conv, state), out

    # A request starts from a zero state, whatever its block held: as production
    # kernels do, the state is masked, not trusted to be cleared.
    fresh = positions[:, 0] == 0
    conv, state = cache.read_state(layer)
    conv = jnp.where(fresh[:, None, None], 0, conv)
    state = jnp.where(fresh[:, None, None, None], 0, state)
    beta = jax.nn.sigmoid(x @ weights["beta"])
    decay = jnp.exp(-jax.nn.softplus(x @ weights["decay"]))
    inputs = (x @ weights["qkv"], beta, decay, positions >= 0)
    by_token = [jnp.moveaxis(y, 1, 0) for y in inputs]
    (conv, state), out = lax.scan(step, (conv, state), by_token)
    cache = cache.write_state(layer, conv, state)
    out = _norm(config, jnp.moveaxis(out, 0, 1)).reshape(*x.shape[:2], -1)
    return cache, (out * jax.nn.silu(x @ weights["out_gate"])) @ weights["out"]


def _channels(config) -> int:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return 2 * keys + config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _norm(config, x: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])


def _unit(x: Array) -> Array:
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _rotate(config, x: Array, positions: Array) -> Array:
    """Rotary embedding of the leading ``partial_rotary_factor`` of each head."""
    half = int(x.shape[-1] * config["partial_rotary_factor"]) // 2
    frequency = config["rope_theta"] ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = positions[..., None, None].astype(x.dtype) * frequency[None, None, None]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    turned = (
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
    )
    return jnp.concatenate([*turned, rest], axis=-1)
