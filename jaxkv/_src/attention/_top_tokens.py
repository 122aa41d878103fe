"""The choice of the tokens to attend to, by the keys of an index."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxkv._src.attention._rows import index_row
from jaxkv._src.attention._scores import choose_rows
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import check_array, check_positive
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.persistent_jit import persistent_jit
from jaxkv._src.pool import (
    SAME,
    BoundLayer,
    bind,
    check_latents,
    on_devices,
    put_back,
    quantize,
    store_rows,
    token_spec,
)
from jaxkv._src.specs import MLASpec
from pallas_kernels import Implementation


def top_tokens(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Float[Array, "*tokens heads key_size"],
    weights: Float[Array, "*tokens heads"],
    keys: Float[Array, "*tokens key_size"] | None = None,
    *,
    count: int,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Int32[Array, "*tokens count"]]:
    """Writes a step's index keys into a layer, then chooses the tokens to attend to by them.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        cache, chosen = jaxkv.top_tokens(
            cache, "indexer", batch, index_queries, weights, index_keys, count=2048
        )
        cache, out = jaxkv.attend(cache, "layer", batch, queries, latents, selected=chosen)

    The score of a token for a query is that of DeepSeek's indexer: the sum over its heads of
    ``weights * max(queries @ key, 0)``, in float32. The tokens of the query's own request up to
    itself compete. Bytes that its request did not write are never chosen, whatever they hold.

    `top_blocks` chooses blocks of tokens for each KV head (MiniMax-M3). Attention over compressed
    vectors (DeepSeek-V4) is planned and stored, and left to your own kernels.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer of one key per token: an `MLASpec`. With ``compress_ratio``, one key
        for each of its groups of tokens: those that are whole compete, and the result has the
        numbers of groups, of which group i is of the positions ``i * compress_ratio`` and on
        (``sparse_block_size=compress_ratio`` tells `attend` that). With
        ``bytes_per_token`` for it (132 for 128 elements): float8_e4m3fn and a float32 scale for
        each 128 elements, which this function packs ``keys`` into.
      queries: [T, heads, K], or [B, T / B, heads, K] for a rectangular batch.
      weights: [T, heads], or [B, T / B, heads].
      keys: [T, K], or [B, T / B, K]. None: nothing is written; `write_rows` writes the keys of
        groups.
      count: tokens to choose.
      layer_index, implementation: as for `attend`; XLA scores and chooses.

    Returns:
      The cache with the keys written, and int32[T, count] or [B, T / B, count]: positions, of the
      highest score first and of equal ones the first; -1 after the last, and for padding.

    Raises:
      TypeError: a layer of another kind, or arrays that are not floats.
      ValueError: shapes that do not fit the layer and the batch; keys for groups.
    """
    check_positive(count=count)
    bound = bind(cache, layer, batch, layer_index, implementation)
    spec = index_spec(layer, bound)
    shape = bound.batch.token_shape
    check_index_queries(layer, bound, queries)
    _check_floats("weights", weights)
    if weights.shape != (wanted := (*shape, queries.shape[-2])):
        raise ValueError(f"weights has shape {weights.shape}; wants {wanted}")
    if keys is not None:
        if spec.compress_ratio > 1:
            raise ValueError(
                f"keys were given, but layer={layer!r} has one for each {spec.compress_ratio} "
                "tokens: write those of whole groups with write_rows, and pass None"
            )
        check_latents(layer, bound, keys)
    buffer, chosen = _choose(bound, queries, weights, keys, count=int(count))
    return put_back(cache, layer, bound, buffer), chosen


def check_index_queries(layer: str, bound: BoundLayer, queries: Array) -> None:
    """Raises TypeError or ValueError unless these are queries of an index for a step."""
    _check_floats("queries", queries)
    shape, width = bound.batch.token_shape, bound.form.spec.head_size
    heads = queries.shape[-2] if queries.ndim == len(shape) + 2 else 0
    if not heads or queries.shape != (*shape, heads, width):
        raise ValueError(
            f"queries has shape {queries.shape}; layer {layer!r} and this batch want "
            f"{(*shape, 'heads', width)}"
        )


def _check_floats(name: str, array: Array) -> None:
    check_array(**{name: array})
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise TypeError(f"{name} has dtype {array.dtype}; wants floats of 16 bits or more")


def index_spec(layer: str, bound: BoundLayer) -> MLASpec:
    """Returns the spec of a layer of index keys; raises TypeError for others."""
    spec = token_spec(layer, bound.form.spec)
    if not isinstance(spec, MLASpec) or bound.requests.growth.window != INT32_MAX:
        raise TypeError(f"layer={layer!r} is no layer of one key per token; an index is an MLASpec")
    packed = index_row(spec)
    if spec.bytes_per_token != (None if packed is None else packed.row_bytes):
        raise TypeError(
            f"layer={layer!r} has bytes_per_token={spec.bytes_per_token}, which is no key of an "
            "index: that has elements of a dtype, or 132 bytes for each 128 elements"
        )
    return spec


@persistent_jit
def _choose(
    bound: BoundLayer, queries: Array, weights: Array, keys: Array | None, *, count: int
) -> tuple[Array | None, Array]:
    def run(
        bound: BoundLayer, queries: Array, weights: Array, keys: Array | None
    ) -> tuple[Array | None, Array]:
        buffer, bound = store_keys(bound, keys)
        return buffer, choose_rows(bound, queries, weights, count)

    return on_devices(
        run,
        *(bound, queries, weights, keys),
        in_specs=(SAME, SAME, SAME),
        out_specs=(bound.layout.buffer_spec, SAME),
    )


def store_keys(bound: BoundLayer, keys: Array | None) -> tuple[Array | None, BoundLayer]:
    """Writes index keys; returns the buffer, None if there are none, and the layer with them."""
    if keys is None:
        return None, bound
    packed = index_row(bound.form.spec)
    if packed is not None:
        rows = packed.pack(keys)
    else:
        rows = quantize(keys, bound.form.row.dtype, bound.key_value_scales[0])
    buffer = store_rows(bound, rows)
    return buffer, dataclasses.replace(bound, buffer=buffer)
