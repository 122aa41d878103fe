"""A decoder of the Qwen3-Next shape: three gated delta nets to one full attention.

Weights and arithmetic only. A `Memory` keeps keys, values and states, so that the same model
runs over the paged cache and over plain dense arrays.

Shapes: T tokens of B requests, up to Q of each, H heads.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, dict[str, Array]]


class Tokens(NamedTuple):
    """The tokens of a step."""

    ids: Array  # int32[T]
    positions: Array  # int32[T], in the request; -1 for padding
    by_request: Array  # int32[B, Q], index of each request's tokens; T for padding

    def to_requests(self, x: Array) -> Array:
        """Returns [B, Q, ...] of [T, ...]; zeros for padding."""
        return x.at[self.by_request].get(mode="fill", fill_value=0)

    def to_tokens(self, x: Array) -> Array:
        """Returns [T, ...] of [B, Q, ...]; zeros for padding."""
        flat = jnp.zeros((self.ids.shape[0], *x.shape[2:]), x.dtype)
        return flat.at[self.by_request].set(x, mode="drop")


class Memory(Protocol):
    """Memory of the layers for earlier tokens, by layer name."""

    def attend(self, layer: str, queries: Array, keys: Array, values: Array) -> Array:
        """Keeps [T, H, D] new keys and values. Returns the attention's output, as the queries."""
        ...

    def gated_delta(
        self, layer: str, qkv: Array, log_decay: Array, beta: Array, conv: Array, key_heads: int
    ) -> Array:
        """Passes [T, channels] through a gated delta net. Returns [T, H, V].

        Args:
          log_decay, beta: [T, H].
          conv: [K, channels], weights of the convolution that comes first.
          key_heads: heads of queries and of keys.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A configuration and its layers in order; static."""

    config: Mapping[str, Any]
    layers: tuple[str, ...]


def init_params(model: Model, key: Array) -> Params:
    """Returns random weights, each matrix scaled by the square root of its fan-in."""
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


def forward(model: Model, params: Params, tokens: Tokens, memory: Memory) -> Array:
    """Computes all tokens. Returns what each of them says, [T, hidden]."""
    config = model.config
    x = params["head"]["embed"][tokens.ids] * math.sqrt(config["hidden_size"])
    for layer in model.layers:
        weights = params[layer]
        mix = _attention if layer.endswith("full_attention") else _delta_net
        x = x + mix(config, weights, layer, _norm(config, x), tokens, memory)
        h = _norm(config, x)
        x = x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]
    return x


def logits(model: Model, params: Params, x: Array) -> Array:
    """Returns f32[..., vocab] of what tokens say."""
    return _norm(model.config, x) @ params["head"]["unembed"]


def causal_attention(queries: Array, keys: Array, values: Array, seen: Array) -> Array:
    """Attends from [B, Q, H, D] to [B, S, H', D] where bool[B, Q, S] allows it.

    Masks logits, and only those: as many kernels do, it multiplies the values of masked
    positions by zero, so that a NaN among them reaches the output.
    """
    groups = queries.shape[2] // keys.shape[2]
    split = queries.reshape(*queries.shape[:2], keys.shape[2], groups, queries.shape[3])
    scores = jnp.einsum("bqhgd,bshd->bhgqs", split, keys) / math.sqrt(queries.shape[3])
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    mixed = jnp.einsum("bhgqs,bshd->bqhgd", jax.nn.softmax(scores), values)
    return mixed.reshape(queries.shape)


def _attention(config, weights, layer, x, tokens, memory):
    """Gated attention over everything that the request has said."""
    width = config["head_dim"]

    def split(y):
        return y.reshape(*y.shape[:-1], -1, width)

    query = _rotate(config, _norm(config, split(x @ weights["query"])), tokens.positions)
    key = _rotate(config, _norm(config, split(x @ weights["key"])), tokens.positions)
    mixed = memory.attend(layer, query, key, split(x @ weights["value"]))
    gate = jax.nn.sigmoid(x @ weights["query_gate"])
    return (mixed.reshape(gate.shape) * gate) @ weights["out"]


def _delta_net(config, weights, layer, x, tokens, memory):
    """Gated delta net, whose states hold everything that the request has said."""
    beta = jax.nn.sigmoid(x @ weights["beta"])
    log_decay = -jax.nn.softplus(x @ weights["decay"])
    given = x @ weights["qkv"], log_decay, beta, weights["conv"]
    out = memory.gated_delta(layer, *given, config["linear_num_key_heads"])
    out = _norm(config, out).reshape(x.shape[0], -1)
    return (out * jax.nn.silu(x @ weights["out_gate"])) @ weights["out"]


def _channels(config) -> int:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return 2 * keys + config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _norm(config, x: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])


def _rotate(config, x: Array, positions: Array) -> Array:
    """Turns the leading ``partial_rotary_factor`` of each head by the token's position."""
    half = int(x.shape[-1] * config["partial_rotary_factor"]) // 2
    frequency = config["rope_theta"] ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = positions[..., None, None].astype(x.dtype) * frequency[None, None]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    turned = (
        first * jnp.cos(angle) - second * jnp.sin(angle),
        second * jnp.cos(angle) + first * jnp.sin(angle),
    )
    return jnp.concatenate([*turned, rest], axis=-1)
