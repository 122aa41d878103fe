"""Attention over the pages of a cache: writes a step's tokens, then attends."""

import dataclasses
from typing import get_args

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int32

from jaxkv._src.attention._kernel import attend_to_layer
from jaxkv._src.attention._rows import packed_row
from jaxkv._src.attention._selected import attend_to_selected, takes_rows
from jaxkv._src.cache import KVCache, LayerIndex, StepBatch
from jaxkv._src.internal.checks import (
    check_array,
    check_choice,
    check_int32,
    check_number,
    check_positive,
)
from jaxkv._src.internal.numbers import INT32_MAX
from jaxkv._src.internal.persistent_jit import persistent_jit
from jaxkv._src.pool import (
    SAME,
    BoundLayer,
    bind,
    check_latents,
    check_tokens,
    on_devices,
    put_back,
    quantize,
    store_rows,
    store_tokens,
    token_head_row,
    token_spec,
)
from jaxkv._src.specs import FullAttentionSpec, MLASpec, RingSpec
from pallas_kernels import AttentionRule, Implementation, LatentPacking


def attend(
    cache: KVCache,
    layer: str,
    batch: StepBatch,
    queries: Float[Array, "*tokens heads key_size"],
    keys: Float[Array, "... key_size"] | None = None,
    values: Float[Array, "*tokens kv_heads value_size"] | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    selected: Int32[Array, "*tokens chosen"]
    | Int32[Array, "*tokens kv_heads chosen"]
    | None = None,
    sparse_block_size: int = 1,
    row_packing: LatentPacking | None = None,
    layer_index: LayerIndex = None,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Float[Array, "*tokens heads value_size"]]:
    """Writes a step's keys and values into a layer, then attends by the layer's own rule.

    Example::

        cache, batch = jaxkv.apply_step(cache, upload)
        for layer in layers:
            ...
            cache, out = jaxkv.attend(cache, layer, batch, queries, keys, values)

    Each token attends to the tokens of its own request up to itself: to all of them (full attention
    and latent vectors), or to its window or chunk; in cross attention, to the encoder's
    tokens. Bytes that its request did not write never reach the output, whatever they hold, because
    values are masked as well as scores. Padding gets zeros.

    Layers that are alike share one trace and one lowering, so loop over them in Python: XLA
    computes once per step what they have in common. In ``jax.lax.scan``, by ``layer_index``, it
    computes that in every iteration, in about ten small kernels.

    A batch of another step than the cache's sets an error flag (`jaxkv.check_errors`). Nothing can
    tell that a model dropped the cache that this function returned, or that a loop kept an old one:
    the keys are lost. `jaxkv.StepContext` and `jaxkv.Engine` thread the cache for you.

    No temporary grows with the pool or with the square of the longest request, provided that the
    keys of each layer depend on the output of the layer before it. Otherwise XLA may write a later
    layer first, and copies the pool for that; make such keys (an encoder's, say) depend on it by
    ``jax.lax.optimization_barrier((keys, values, out_before))``.

    Requests that begin with the same blocks read them together if the step's shape has
    ``shared_prefixes``, in full attention and latent vectors. The bits of a token's output depend
    on its request alone if the shape is ``reproducible``. See `StepShape.for_plan` for both.

    With context parallelism each rank attends to its own positions, and the results are
    combined by their log-sum-exp.

    Args:
      cache, batch: from `apply_step`.
      layer: name of a layer. One that shares another layer's cache gets no keys and values.
      queries: [T, heads, K], or [B, T / B, heads, K] for a rectangular batch. The query heads of
        one KV head are adjacent.
      keys: [T, kv_heads, K], or [B, T / B, kv_heads, K]. For latent vectors [T, K], divided by
        the K scale; for cross attention the encoder's, [B, E, kv_heads, K]. None: nothing is
        written.
      values: [T, kv_heads, V], or with the leading axes of ``keys``; None for latent vectors, or if
        ``keys`` is None.
      scale: factor of the scores; None: ``K ** -0.5``.
      soft_cap: caps scores at ``soft_cap * tanh(score / soft_cap)``; None: no cap.
      sinks: float[heads], logit of each head's attention sink, a key without a value; None: none.
      selected: int32[T, N] or [B, T / B, N], for each query the positions of the tokens that it
        attends to, in any order, each at most once and -1 for none; those that the layer's rule
        hides stay hidden. `top_tokens` chooses them for all heads together, `top_blocks` for each
        KV head: [T, kv_heads, N] or [B, T / B, kv_heads, N]. Mosaic attends to them in latent
        vectors (16 bits, or ``row_packing``), XLA in other layers. None: all that the rule shows.
      sparse_block_size: adjacent tokens that each number in ``selected`` stands for: number i for
        the positions ``i * sparse_block_size`` and on. 1: numbers are positions.
      row_packing: ``"fp8_ds_mla"`` for a layer whose latent vectors are packed into its
        ``bytes_per_token``: 656 for 512 + 64 elements; see `pallas_kernels.PackedRow`. ``attend``
        packs ``keys``, and does not use the K scale. None: elements of the layer's dtype.
      layer_index: int32[], may be traced: attends to layer
        ``cache.stacked_layers(layer)[layer_index]`` instead of ``layer``; see `write_tokens`.
      implementation: as for `pallas_kernels.paged_attention`. None: Mosaic on GPUs that support
        it, if it supports the layer and the queries (16-bit queries, heads of 64 to 256, pages
        whose padding is whole tokens), else XLA.

    Returns:
      The cache with the tokens written, and the output in the queries' dtype: [T, heads, V], or
      [B, T / B, heads, V].

    Raises:
      TypeError: the layer stores no tokens, or tokens that only your own kernel can read
        (nvfp4, ``scale_bytes``, ``bytes_per_token`` without ``row_packing``, ``compress_ratio``,
        ``sink_tokens``); queries that are not floats of 16 bits or more.
      NotImplementedError: ``"mosaic_gpu"`` for what Mosaic does not support; the message says why.
      ValueError: shapes that do not fit the layer and the batch; ``row_packing`` of a layer whose
        vectors have another size; context parallelism without a mesh axis.
    """
    bound = bind(cache, layer, batch, layer_index, implementation)
    rule = _rule(layer, bound, queries, scale, soft_cap, row_packing)
    if sinks is not None:
        check_array(sinks=sinks)
        if sinks.shape != queries.shape[-2:-1]:
            raise ValueError(
                f"sinks has shape {sinks.shape}; wants {queries.shape[-2:-1]}, one per head"
            )
    check_positive(sparse_block_size=sparse_block_size)
    if selected is not None:
        _check_selected(bound, selected, rule)
    elif sparse_block_size != 1:
        raise ValueError(
            f"sparse_block_size={sparse_block_size} is of blocks in selected, which is None"
        )
    _check_written(layer, bound, keys, values)
    options = {"rule": rule, "sparse_block_size": int(sparse_block_size)}
    buffer, out = _attend(bound, queries, keys, values, sinks, selected, **options)
    return put_back(cache, layer, bound, buffer), out


@persistent_jit
def _attend(
    bound: BoundLayer,
    queries: Array,
    keys: Array | None,
    values: Array | None,
    sinks: Array | None,
    selected: Array | None,
    *,
    rule: AttentionRule,
    sparse_block_size: int,
) -> tuple[Array | None, Array]:
    """Writes and attends; returns the buffer, None if nothing is written, and the output.

    A jitted function of its own, so that layers that are alike share one trace and one lowering.
    """

    def run(
        bound: BoundLayer,
        queries: Array,
        keys: Array | None,
        values: Array | None,
        sinks: Array | None,
        selected: Array | None,
    ) -> tuple[Array | None, Array]:
        buffer = None
        if selected is not None:  # the index is read before the layer is written: no copies
            keys, values, selected = lax.optimization_barrier((keys, values, selected))
        if keys is not None:
            buffer = _store(bound, keys, values, rule)
            bound = dataclasses.replace(bound, buffer=buffer)
        if selected is not None:
            arrays = queries, sinks, selected
            return buffer, attend_to_selected(bound, *arrays, rule, sparse_block_size)
        return buffer, attend_to_layer(bound, queries, sinks, rule)

    axis = bound.layout.heads_axis
    by_head = PartitionSpec(*[None] * (queries.ndim - 2), axis) if axis else SAME
    of_sinks = PartitionSpec(axis) if axis else SAME
    of_keys = SAME if keys is None else bound.form.by_head(keys.ndim - 2)
    is_by_head = selected is not None and selected.ndim == queries.ndim
    of_selected = bound.form.by_head(queries.ndim - 2) if is_by_head else SAME
    return on_devices(
        run,
        *(bound, queries, keys, values, sinks, selected),
        in_specs=(by_head, of_keys, of_keys, of_sinks, of_selected),
        out_specs=(bound.layout.buffer_spec, by_head),
    )


def _store(bound: BoundLayer, keys: Array, values: Array | None, rule: AttentionRule) -> Array:
    """Writes a step's keys and values on one device; returns the buffer."""
    if values is not None:
        return store_tokens(bound, keys, values)
    if rule.row_packing is None:
        rows = quantize(keys, bound.form.row.dtype, bound.key_value_scales[0])
    else:
        rows = packed_row(bound.form.spec).pack(keys)
    return store_rows(bound, rows)


def _check_written(layer: str, bound: BoundLayer, keys: Array | None, values: Array | None) -> None:
    """Raises TypeError or ValueError unless these can be written into a layer."""
    spec = bound.form.spec
    if keys is None:
        if values is not None:
            raise ValueError("values without keys: pass both, or neither to attend without writing")
    elif isinstance(spec, FullAttentionSpec):
        if values is None:
            raise ValueError(
                f"values is None; layer {layer!r} stores keys and values: pass both, or neither to "
                "attend without writing"
            )
        check_tokens(layer, bound, keys, values)
    elif values is not None:
        raise ValueError(
            f"values were given, but layer={layer!r} stores latent vectors: pass them as keys, "
            "and None as values"
        )
    else:
        check_latents(layer, bound, keys)


def _check_selected(bound: BoundLayer, selected: Array, rule: AttentionRule) -> None:
    """Raises TypeError, ValueError or NotImplementedError unless these can be attended to."""
    check_int32(selected=selected)
    shape, spec = bound.batch.token_shape, bound.form.spec
    heads = 1 if isinstance(spec, MLASpec) else spec.num_kv_heads * bound.ranks_of_heads
    if selected.shape[:-1] not in (shape, (*shape, heads)) or not selected.shape[-1]:
        raise ValueError(
            f"selected has shape {selected.shape}; this batch wants {(*shape, 'N')}, the positions "
            f"that each query attends to, or {(*shape, heads, 'N')}, those of each KV head"
        )
    if not rule.causal:
        raise ValueError("selected chooses tokens of the request itself, not of an encoder")
    if bound.implementation == "mosaic_gpu" and not takes_rows(bound):
        raise NotImplementedError(
            "implementation='mosaic_gpu' attends to selected tokens of latent vectors whose pages "
            "are whole rows alone; XLA does: pass None"
        )


def _rule(
    layer: str,
    bound: BoundLayer,
    queries: Array,
    scale: float | None,
    soft_cap: float | None,
    row_packing: LatentPacking | None,
) -> AttentionRule:
    """Checks that attention can read the tokens of a layer, and returns its rule."""
    spec, growth = _attended_spec(layer, bound), bound.requests.growth
    check_number(
        scale=1.0 if scale is None else scale, soft_cap=1.0 if soft_cap is None else soft_cap
    )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive; None means no cap")
    if row_packing is not None:
        _check_packing(layer, spec, row_packing)
    else:
        _check_readable(layer, spec)
    _check_queries(layer, bound, spec, queries)
    return AttentionRule(
        scale=spec.head_size**-0.5 if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        sliding_window=None if growth.window == INT32_MAX else growth.window,
        chunk_size=None if growth.chunk == INT32_MAX else growth.chunk,
        causal=growth.stores == "tokens",
        value_width=spec.value_size or spec.head_size,
        row_packing=token_head_row(spec) or row_packing,
        reproducible=bound.batch.shape.reproducible,
        out_dtype="float32" if bound.layout.context_parallel > 1 else None,
    )


def _attended_spec(layer: str, bound: BoundLayer) -> FullAttentionSpec | MLASpec:
    """Returns the spec of a layer that queries attend to."""
    spec, layout = token_spec(layer, bound.form.spec), bound.layout
    if isinstance(spec, RingSpec):
        raise TypeError(
            f"layer={layer!r} is a ring of tokens that are not compressed yet, to which no query "
            "attends; use write_rows and read_rows"
        )
    if layout.context_parallel > 1 and layout.axis is None:
        raise ValueError(
            f"cache has context_parallel={layout.context_parallel} and no mesh axis over "
            "which attend could combine the ranks; pass mesh= and axis= to make_cache"
        )
    return spec


def _check_queries(
    layer: str, bound: BoundLayer, spec: FullAttentionSpec | MLASpec, queries: Array
) -> None:
    """Checks the shape and the dtype of queries."""
    check_array(queries=queries)
    if not jnp.issubdtype(queries.dtype, jnp.floating) or queries.dtype.itemsize < 2:
        raise TypeError(
            f"queries has dtype {queries.dtype}, which attend cannot compute in; cast it to "
            "bfloat16, float16 or float32"
        )
    shape, ranks = bound.batch.token_shape, bound.ranks_of_heads
    kv_heads = 1 if isinstance(spec, MLASpec) else spec.num_kv_heads
    heads = queries.shape[-2] if queries.ndim == len(shape) + 2 else 0
    wanted = (*shape, heads, spec.head_size)
    if queries.shape != wanted or not heads or heads % (kv_heads * ranks):
        raise ValueError(
            f"queries has shape {queries.shape}; layer {layer!r} and this batch want "
            f"({', '.join(map(str, shape))}, heads, head_size={spec.head_size}), heads a multiple "
            f"of {'' if isinstance(spec, MLASpec) else 'num_kv_heads='}{kv_heads * ranks}"
            + (f" ({kv_heads} on each of {ranks} devices)" if ranks > 1 else "")
        )


def _check_packing(
    layer: str, spec: FullAttentionSpec | MLASpec, row_packing: LatentPacking
) -> None:
    """Raises ValueError unless the vectors of a layer have the size of packed ones."""
    check_choice(get_args(LatentPacking), row_packing=row_packing)
    if not isinstance(spec, MLASpec):
        raise ValueError(
            f"row_packing={row_packing!r}, but layer={layer!r} stores no latent vectors"
        )
    wanted = packed_row(spec).row_bytes
    if spec.bytes_per_token != wanted or spec.compress_ratio > 1:
        raise ValueError(
            f"row_packing={row_packing!r} packs vectors of layer={layer!r} into {wanted} bytes; "
            f"the layer has bytes_per_token={spec.bytes_per_token} and compress_ratio="
            f"{spec.compress_ratio}; wants {wanted} and 1"
        )


def _check_readable(layer: str, spec: FullAttentionSpec | MLASpec) -> None:
    """Raises TypeError if attention cannot read the tokens of a layer without ``row_packing``."""
    unread, remedy = _unreadable(spec), ""
    if unread and isinstance(spec, MLASpec) and spec.bytes_per_token == packed_row(spec).row_bytes:
        remedy = "pass row_packing='fp8_ds_mla' if its vectors are packed like that, or "
    if unread.startswith("compress_ratio"):  # DeepSeek-V4 and V4.1, in vLLM 0.33
        remedy = (
            "a vector of a group of tokens is made by weights of the model, and shares one softmax "
            "with the layer's window of tokens, so that neither can be read alone; "
        )
    if unread:
        raise TypeError(
            f"layer={layer!r} has {unread}, which attend cannot read; {remedy}write them with "
            "write_rows and attend with your own kernel over layer_view"
        )


def _unreadable(spec: FullAttentionSpec | MLASpec) -> str:
    """Returns the field of a spec that keeps attention from reading its tokens, or ""."""
    if isinstance(spec, MLASpec):
        if spec.bytes_per_token is not None:
            return f"bytes_per_token={spec.bytes_per_token}"
        if spec.compress_ratio > 1:
            return f"compress_ratio={spec.compress_ratio}"
    elif spec.scale_bytes:
        return f"scale_bytes={spec.scale_bytes}"
    elif spec.sink_tokens:
        return f"sink_tokens={spec.sink_tokens}"
    return f"dtype={spec.dtype!r}" if spec.dtype in ("nvfp4", "uint8") else ""
