"""Two memories for the model: the paged cache, and none at all, to compare with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxkv
from jaxkv._src.demo.model import Model, Params, Tokens, causal_attention, forward, logits
from jaxkv._src.layout import row_format
from jaxkv._src.specs import FullAttentionSpec, StateSpec
from pallas_kernels import Implementation, default_implementation

KEY_SCALE, VALUE_SCALE = 0.02, 0.02  # per tensor; keys are normalised, values about 1


@dataclasses.dataclass(frozen=True, eq=False)
class PagedMemory:
    """A cache in the middle of a step.

    own_attention: reads kernel blocks of the cache by itself, as an engine's kernel does, and
      masks logits only; otherwise attention is `jaxkv.attend`.
    """

    step: jaxkv.StepContext
    tokens: Tokens
    own_attention: bool
    implementation: Implementation

    def attend(self, layer: str, queries: Array, keys: Array, values: Array) -> Array:
        if self.own_attention:
            return self.step.call(self._own_attention, layer, queries, keys, values)
        implementation = "xla" if self.implementation == "xla" else None
        narrow = self._narrow(layer, queries)
        out = self.step.attend(layer, narrow, keys, values, implementation=implementation)
        return out.astype(queries.dtype)

    def _own_attention(self, cache, layer, batch, queries, keys, values):
        cache = jaxkv.write_tokens(
            cache, layer, batch, keys, values, implementation=self.implementation
        )
        keys, values = _read_kernel_blocks(cache, layer, batch)
        positions = self.tokens.to_requests(batch.positions)
        seen = jnp.arange(keys.shape[1])[None, None] <= positions[..., None]
        out = causal_attention(self.tokens.to_requests(queries), keys, values, seen)
        return cache, self.tokens.to_tokens(out)

    def _narrow(self, layer: str, queries: Array) -> Array:
        """Returns queries in 16 bits where Mosaic attends, because the model computes in f32."""
        pages = jnp.dtype(row_format(self.step.batch.layout.place_of(layer).spec).dtype)
        if self.implementation != "mosaic_gpu" or pages.itemsize > 2:
            return queries
        return queries.astype(pages if pages.itemsize == 2 else jnp.float16)

    def gated_delta(
        self, layer: str, qkv: Array, log_decay: Array, beta: Array, conv: Array, key_heads: int
    ) -> Array:
        return self.step.gated_delta(
            *(layer, qkv, log_decay, beta),
            conv_weights=conv,
            num_key_heads=key_heads,
            implementation="xla" if self.implementation == "xla" else None,
        )


def forward_step(
    model: Model,
    own_attention: bool,
    implementation: Implementation | None,
    params: Params,
    step: jaxkv.StepContext,
) -> Array:
    """Computes a step. Returns f32[B, vocab], the logits of each request's last token."""
    tokens = tokens_of(step)
    kernels = implementation or default_implementation()
    with jax.default_matmul_precision("highest"):
        memory = PagedMemory(step, tokens, own_attention, kernels)
        x = forward(model, params, tokens, memory)
        return logits(model, params, x[step.last_tokens])


def tokens_of(step: jaxkv.StepContext) -> Tokens:
    """Returns the tokens of a step, and where those of each request are."""
    batch = step.batch
    offsets = jnp.arange(batch.shape.max_query_len, dtype=jnp.int32)[None]
    index = batch.query_start_loc[:-1, None] + offsets
    beyond = batch.shape.max_tokens
    index = jnp.where(offsets < batch.query_lens[:, None], index, beyond)
    return Tokens(step.token_ids, step.positions, index)


def _read_kernel_blocks(
    cache: jaxkv.KVCache, layer: str, batch: jaxkv.StepBatch
) -> tuple[Array, Array]:
    """Reads kernel blocks of the layer's typed view by their ids."""
    rows = jaxkv.layer_view(cache, layer)[batch.kernel_block_tables(layer)]
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:]).astype(jnp.float32)
    width = row_format(cache.layout.place_of(layer).spec).key_elements
    return rows[..., :width] * KEY_SCALE, rows[..., width:] * VALUE_SCALE


@dataclasses.dataclass(frozen=True, eq=False)
class NoMemory:
    """Whole requests at once: nothing is kept, paged or shared. Keys and values are rounded."""

    layers: Mapping[str, object]
    tokens: Tokens

    def attend(self, layer: str, queries: Array, keys: Array, values: Array) -> Array:
        spec = self.layers[layer]
        if not isinstance(spec, FullAttentionSpec):
            raise TypeError(f"layer={layer!r} is not attention")
        # The barrier keeps XLA from taking the conversion there and back for none.
        rounded = [
            jax.lax.optimization_barrier(jaxkv.pool.quantize(x, spec.dtype, scale)).astype(x.dtype)
            * scale
            for x, scale in ((keys, KEY_SCALE), (values, VALUE_SCALE))
        ]
        queries, keys, values = map(self.tokens.to_requests, (queries, *rounded))
        index = jnp.arange(keys.shape[1])
        seen = (index[None] <= index[:, None])[None]
        return self.tokens.to_tokens(causal_attention(queries, keys, values, seen))

    def gated_delta(
        self, layer: str, qkv: Array, log_decay: Array, beta: Array, conv: Array, key_heads: int
    ) -> Array:
        """Token by token: S <- a S + b (v - a S k) k^T, out = S q."""
        spec, batch = self.layers[layer], self.tokens.by_request.shape[0]
        if not isinstance(spec, StateSpec):
            raise TypeError(f"layer={layer!r} is not recurrent")
        value_heads, _, key_size = spec.shapes[1]

        def split(mixed: Array) -> list[Array]:
            """Returns a query, a key and a value for each head, [B, H, ...]."""
            ends = key_heads * key_size, 2 * key_heads * key_size
            query, key, value = jnp.split(mixed, ends, axis=-1)
            query, key = (
                jnp.repeat(_unit(x.reshape(batch, key_heads, -1)), value_heads // key_heads, axis=1)
                for x in (query, key)
            )
            return [query * key_size**-0.5, key, value.reshape(batch, value_heads, -1)]

        def step(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> Any:
            window, state = carry
            new, log_decay, beta = inputs
            window = jnp.concatenate([window, new[:, None]], axis=1)
            query, key, value = split(jax.nn.silu((window * conv[None]).sum(axis=1)))
            state = state * jnp.exp(log_decay)[..., None, None]
            error = value - (state * key[:, :, None]).sum(axis=-1)
            state = state + (beta[..., None] * error)[..., None] * key[:, :, None]
            return (window[:, 1:], state), (state * query[:, :, None]).sum(axis=-1)

        window, state = (jnp.zeros((batch, *shape), jnp.float32) for shape in spec.shapes)
        by_token = [jnp.moveaxis(self.tokens.to_requests(x), 1, 0) for x in (qkv, log_decay, beta)]
        _, out = jax.lax.scan(step, (window, state), tuple(by_token))
        return self.tokens.to_tokens(jnp.moveaxis(out, 0, 1))


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
