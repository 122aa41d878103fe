"""The same model over whole requests, without a cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxkv
from jaxkv._src.demo.model import KEY_SCALE, VALUE_SCALE, Model, Params, forward, logits


def logprobs_of(model: Model, layers: Mapping[str, Any], params: Params, ids: Array) -> Array:
    """Returns f32[L, vocab], what each token of one request says of the next, of int32[L]."""
    with jax.default_matmul_precision("highest"):
        x = forward(model, params, ids, jnp.arange(ids.shape[0]), _NoCache(layers))
        return jax.nn.log_softmax(logits(model, params, x))


@dataclasses.dataclass(frozen=True)
class _NoCache:
    """Stands in for a `StepContext` that begins with the first token of its only request."""

    layers: Mapping[str, Any]

    def attend(self, layer: str, queries: Array, keys: Array, values: Array) -> Array:
        """Attends to all tokens so far, whose keys and values are rounded as a page stores them."""
        keys, values = (
            # The barrier keeps XLA from taking the conversion there and back for none.
            jax.lax.optimization_barrier(
                jaxkv.pool.quantize(x, self.layers[layer].dtype, scale)
            ).astype(x.dtype)
            * scale
            for x, scale in ((keys, KEY_SCALE), (values, VALUE_SCALE))
        )
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (jnp.repeat(x, groups, axis=1) for x in (keys, values))
        scores = jnp.einsum("qhd,shd->hqs", queries, keys) / queries.shape[-1] ** 0.5
        seen = jnp.tri(len(queries), dtype=bool)[None]
        return jnp.einsum("hqs,shd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), values)

    def gated_delta(
        self,
        layer: str,
        qkv: Array,
        log_decay: Array,
        beta: Array,
        *,
        conv_weights: Array,
        num_key_heads: int,
    ) -> Array:
        """Token by token: S <- a S + b (v - a S k) k^T, out = S q."""
        value_heads, _, key_size = self.layers[layer].shapes[1]
        ends = num_key_heads * key_size, 2 * num_key_heads * key_size

        def step(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> Any:
            window, state = carry
            new, log_decay, beta = inputs
            window = jnp.concatenate([window, new[None]])
            mixed = jnp.split(jax.nn.silu((window * conv_weights).sum(axis=0)), ends)
            heads = [_unit(x.reshape(num_key_heads, -1)) for x in mixed[:2]]
            query, key = (jnp.repeat(x, value_heads // num_key_heads, axis=0) for x in heads)
            state = state * jnp.exp(log_decay)[:, None, None]
            error = mixed[2].reshape(value_heads, -1) - (state * key[:, None]).sum(axis=-1)
            state = state + (beta[:, None] * error)[..., None] * key[:, None]
            return (window[1:], state), (state * query[:, None]).sum(axis=-1) * key_size**-0.5

        window, state = (jnp.zeros(shape) for shape in self.layers[layer].shapes)
        return jax.lax.scan(step, (window, state), (qkv, log_decay, beta))[1]


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
