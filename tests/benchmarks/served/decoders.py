"""Decoders of published sizes in plain JAX over a step of jaxkv, with random weights.

The arithmetic per token is as in the published models; what costs no time next to it (norm
offsets, scaled embeddings, soft caps) is left out. Over a mesh, heads and widths of feed-forward
layers are divided among the devices, and XLA adds up their products (GSPMD).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv

Params = dict[str, Any]
AXIS = "heads"  # of the mesh
# Axes of weights that are divided among the devices; of those before them and all others, none.
DIVIDED = {
    **{"embed": 0, "head": 1, "up": 2, "down": 0, "qkv": 1, "out": 0},
    **{"qkvz": 1, "ba": 2, "decay": 1, "q_latent": 1, "keys": 0, "values": 0},
}


class Step(Protocol):
    """The part of `jaxkv.StepContext` that a decoder calls; a step without a cache has it, too."""

    token_ids: Array
    positions: Array
    last_tokens: Array

    def attend(self, layer: str, queries: Array, *arrays: Array, **options: Any) -> Array: ...

    def gated_delta(self, layer: str, *arrays: Array, **options: Any) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The widths of a decoder.

    layers: name -> spec, as `jaxkv.layers_from_config` returns them.
    key_heads: heads of the keys of recurrent layers.
    gated: whether attention layers gate their outputs (Qwen3.5).
    norms_heads: whether queries and keys are normed by head.
    latent: (rank, rotary, plain, value) widths of latent attention.
    mesh: of one axis of type Auto, over which the layers are divided; None: one device.
    """

    layers: Mapping[str, Any]
    hidden: int
    heads: int
    ffn: int
    vocab: int
    theta: float = 500_000.0
    key_heads: int = 0
    gated: bool = False
    norms_heads: bool = False
    latent: tuple[int, int, int, int] = (0, 0, 0, 0)
    tied: bool = False
    mesh: Mesh | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, kv_dtype: str | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Reads the widths of a preset, or of a smaller model of the same type."""
        text = {**config, **config.get("text_config", {})}
        kind = text["model_type"]
        latent = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        tied = text.get("tie_word_embeddings")
        return cls(
            layers=jaxkv.layers_from_config(
                config, kv_dtype=kv_dtype, tensor_parallel=mesh.size if mesh else 1
            ),
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            ffn=text["intermediate_size"],
            vocab=text["vocab_size"],
            key_heads=text.get("linear_num_key_heads", 0),
            gated=kind.startswith("qwen3_5"),
            norms_heads=kind.startswith(("qwen3", "gemma3")),
            latent=tuple(text.get(name, 0) for name in latent),
            tied=kind.startswith("gemma3") if tied is None else tied,
            mesh=mesh,
        )

    @property
    def ranks(self) -> int:
        """Devices, each of which has what the layers' specs say."""
        return self.mesh.size if self.mesh else 1

    # --- weights ----------------------------------------------------------------------

    def init_params(self, key: Array, dtype: Any = jnp.bfloat16) -> Params:
        """Returns random weights; each matrix keeps the size of what it multiplies."""
        keys, specs = jax.random.split(key, len(self.layers) + 2), self.layers.values()
        make = jax.jit(self._init_layer, static_argnums=(1, 2))  # compiled once for each spec
        layers = [make(key, spec, dtype) for key, spec in zip(keys[2:], specs, strict=True)]
        ends = jax.jit(self._init_ends, static_argnums=1)(keys[:2], dtype)
        return ends | {"layers": layers}

    def _init_ends(self, keys: Array, dtype: Any) -> Params:
        embed = jax.random.normal(keys[0], (self.vocab, self.hidden), dtype)
        params = {"embed": embed, "norm": jnp.ones(self.hidden, dtype)}
        if not self.tied:
            params["head"] = _matrix(keys[1], self.hidden, self.vocab, dtype)
        return self._divided(params)

    def _divided(self, params: Params) -> Params:
        """Divides the weights among the devices, by the axes of `DIVIDED`."""
        axes = {name: [None] * DIVIDED[name] + [AXIS] for name in params if name in DIVIDED}
        return {name: self._placed(w, *axes.get(name, ())) for name, w in params.items()}

    def _placed(self, x: Array, *axes: str | None) -> Array:
        """Places an array over the mesh, along its axes; without axes, all of it on each device."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*axes)))

    def _init_layer(self, key: Array, spec: Any, dtype: Any) -> Params:
        keys, hidden = jax.random.split(key, 8), self.hidden
        p = {
            "norms": jnp.ones((2, hidden), dtype),
            "up": _matrix(keys[0], hidden, 2, self.ffn, dtype),
            "down": _matrix(keys[1], self.ffn, hidden, dtype),
        }
        if isinstance(spec, jaxkv.StateSpec):
            p |= self._init_states(keys, spec, dtype)
        elif isinstance(spec, jaxkv.MLASpec):
            p |= self._init_latent(keys, dtype)
        else:
            kv_heads, size = self.ranks * spec.num_kv_heads, spec.head_size
            rows = self.heads // kv_heads * (1 + self.gated) + 2
            p |= {
                "qkv": _matrix(keys[2], hidden, kv_heads, rows, size, dtype),
                "head_norms": jnp.ones((2, size), dtype),
                "out": _matrix(keys[3], self.heads * size, hidden, dtype),
            }
        return self._divided(p)

    def _init_states(self, keys: Array, spec: Any, dtype: Any) -> Params:
        rows, channels, heads, width = self._state_sizes(spec)
        return {
            "qkvz": _matrix(keys[2], self.hidden, channels + heads * width, dtype),
            "ba": _matrix(keys[3], self.hidden, 2, heads, dtype),
            "conv": _matrix(keys[4], rows + 1, channels, dtype),
            "decay": jax.random.normal(keys[5], (2, heads), jnp.float32),
            "gate_norm": jnp.ones(width, dtype),
            "out": _matrix(keys[6], heads * width, self.hidden, dtype),
        }

    def _init_latent(self, keys: Array, dtype: Any) -> Params:
        rank, rotary, plain, value = self.latent
        columns = self._latent_rows + rank + rotary
        return {
            "q_latent": _matrix(keys[2], self.hidden, columns, dtype),
            "latent_norm": jnp.ones(rank, dtype),
            "keys": _matrix(keys[4], self.heads, plain, rank, dtype, fan_in=plain),
            "values": _matrix(keys[5], self.heads, rank, value, dtype, fan_in=rank),
            "out": _matrix(keys[6], self.heads * value, self.hidden, dtype),
        }

    def _state_sizes(self, spec: Any) -> tuple[int, int, int, int]:
        """Returns rows and channels of the convolution, and heads and width, of all devices."""
        (rows, channels), (heads, width, _) = spec.shapes
        return rows, channels * self.ranks, heads * self.ranks, width

    # --- the model --------------------------------------------------------------------

    def forward(self, params: Params, step: Step) -> Array:
        """Returns the logits of each request's last token, f32[B, vocab]."""
        return self.head(params, self.hidden_states(params, step)[step.last_tokens])

    def hidden_states(self, params: Params, step: Step) -> Array:
        """Returns the hidden states of all tokens, [T, hidden]."""
        x = self._placed(params["embed"][step.token_ids])
        for name, p in zip(self.layers, params["layers"], strict=True):
            x = x + self._placed(self._mix(p, step, name, _norm(x, p["norms"][0])))
            x = x + self._placed(_feed_forward(_norm(x, p["norms"][1]), p["up"], p["down"]))
        return x

    def head(self, params: Params, hidden: Array) -> Array:
        """Returns the logits of hidden states, f32[N, vocab]."""
        head = params["embed"].T if self.tied else params["head"]
        return (_norm(hidden, params["norm"]) @ head).astype(
            jnp.float32
        )  # in f32 XLA would convert the matrix for one row

    def _mix(self, p: Params, step: Step, name: str, x: Array) -> Array:
        spec = self.layers[name]
        if isinstance(spec, jaxkv.StateSpec):
            return self._gated_delta(p, step, name, x)
        if isinstance(spec, jaxkv.MLASpec):
            return self._latent(p, step, name, x)
        return self._attention(p, step, name, x)

    def _attention(self, p: Params, step: Step, name: str, x: Array) -> Array:
        shape = len(x), self.heads, self.layers[name].head_size
        rows = jnp.einsum("th,hkrd->tkrd", x, p["qkv"])  # those of each KV head side by side
        of_queries = self.heads // rows.shape[1]
        ends = [of_queries, of_queries * (1 + self.gated), rows.shape[2] - 1]
        q, gate, k, v = jnp.split(rows, ends, axis=2)
        q, k, v = q.reshape(shape), k[:, :, 0], v[:, :, 0]
        if self.norms_heads:
            q, k = _norm(q, p["head_norms"][0]), _norm(k, p["head_norms"][1])
        q, k = (_rotate(rows, step.positions, self.theta) for rows in (q, k))
        out = step.attend(name, q, k, v)
        if self.gated:
            out = out * jax.nn.sigmoid(gate.reshape(shape))
        return out.reshape(len(x), -1) @ p["out"]

    @property
    def _latent_rows(self) -> int:
        """Rows of all heads' queries in latent attention."""
        _, rotary, plain, _ = self.latent
        return self.heads * (plain + rotary)

    def _latent(self, p: Params, step: Step, name: str, x: Array) -> Array:
        """DeepSeek-V2 (arXiv 2405.04434), with the keys' matrix absorbed into the queries."""
        rank, rotary, plain, _ = self.latent
        q, row = jnp.split(x @ p["q_latent"], [self._latent_rows], axis=-1)
        q = q.reshape(len(x), self.heads, plain + rotary)
        shared = _rotate(row[:, None, rank:], step.positions, self.theta)[:, 0]
        row = jnp.concatenate([_norm(row[:, :rank], p["latent_norm"]), shared], axis=-1)
        q = jnp.concatenate(
            [
                jnp.einsum("thd,hdr->thr", q[..., :plain], p["keys"]),
                _rotate(q[..., plain:], step.positions, self.theta),
            ],
            axis=-1,
        )
        out = step.attend(name, q, row, scale=(plain + rotary) ** -0.5)
        return jnp.einsum("thr,hrv->thv", out, p["values"]).reshape(len(x), -1) @ p["out"]

    def _gated_delta(self, p: Params, step: Step, name: str, x: Array) -> Array:
        """Gated delta net (arXiv 2412.06464), with a gate on its normed outputs."""
        _, channels, heads, width = self._state_sizes(self.layers[name])
        qkv, z = jnp.split(x @ p["qkvz"], [channels], axis=-1)
        b, a = jnp.moveaxis(jnp.einsum("th,hcn->tcn", x, p["ba"]), 1, 0)
        log_decay = -jnp.exp(p["decay"][0]) * jax.nn.softplus(a.astype(jnp.float32) + p["decay"][1])
        out = step.gated_delta(
            name,
            qkv,
            log_decay,
            jax.nn.sigmoid(b.astype(jnp.float32)),
            conv_weights=p["conv"],
            num_key_heads=self.key_heads,
        )
        out = _norm(out, p["gate_norm"]) * jax.nn.silu(z.reshape(out.shape))
        return out.astype(x.dtype).reshape(len(x), heads * width) @ p["out"]


def _matrix(key: Array, *shape: Any, fan_in: int = 0) -> Array:
    *shape, dtype = shape
    scale = (fan_in or shape[0]) ** -0.5
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


# jit: traced and lowered once for all layers.


@jax.jit
def _feed_forward(x: Array, up: Array, down: Array) -> Array:
    both = jnp.einsum("th,hcf->tcf", x, up)
    return (jax.nn.silu(both[:, 0]) * both[:, 1]) @ down


@jax.jit
def _norm(x: Array, weights: Array) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weights


@functools.partial(jax.jit, static_argnums=2)
def _rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotates the halves of each head of [T, heads, width] by its position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.maximum(positions, 0)[:, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
