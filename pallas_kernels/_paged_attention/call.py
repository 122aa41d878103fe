"""Attention over keys and values in pages."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels._arguments import check_choice
from pallas_kernels._capability import Implementation, Kernel
from pallas_kernels._dispatch import choose
from pallas_kernels._paged_attention.arguments import check_arguments
from pallas_kernels._paged_attention.limits import why_not_paged_attention
from pallas_kernels._paged_attention.packed import RowPacking
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    AttentionRule,
    Cut,
    Interleaving,
    SharedPrefixes,
    cut_queries,
    one_query_each,
)
from pallas_kernels._paged_attention.xla import attend_xla


def paged_attention(
    queries: Any,
    pages: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any = None,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    key_scale: Any = 1.0,
    value_scale: Any = 1.0,
    key_width: int | None = None,
    value_width: int | None = None,
    row_packing: RowPacking | None = None,
    causal: bool = True,
    first_positions: Any = None,
    interleaving: Interleaving | None = None,
    reproducible: bool = False,
    shared_prefixes: SharedPrefixes | None = None,
    max_query_len: int | None = None,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Attends from the newest tokens of each request to its keys and values in pages.

    Example::

        queries = jnp.ones((2, 4, 64))                         # one query for each of 2 requests
        pages = jnp.ones((8, 16, 2, 128))                      # 8 blocks of 16 tokens; K and V
        tables = jnp.array([[1, 2], [3, -1]], jnp.int32)       # the blocks of each request
        seq_lens = jnp.array([20, 7], jnp.int32)
        out = pallas_kernels.paged_attention(queries, pages, tables, seq_lens)     # [2, 4, 64]

    One call serves decodes, drafts, chunks of prompts and whole prompts, in any mixture. A query
    sees the keys of its own request up to its own position, which must be in the pages already.
    Bytes that no query sees never reach the output, whatever they hold (NaN, Inf): bytes at and
    past a request's length, below its window, and in pages of other requests. Works inside your
    ``jit``, ``lax.scan`` and ``shard_map`` (with ``check_vma=False``). One compilation serves all
    lengths, and no temporary grows with the pages.

    Args:
      queries: [T, heads, K], the queries of B requests end to end; float32, bfloat16 or float16.
        The query heads of one KV head are adjacent.
      pages: [blocks, tokens, kv_heads, K + V], each key followed by its value; float32, bfloat16,
        float16, float8_e4m3fn, float8_e5m2 or int8. Or `StridedPages`, for pages in another
        order, with padding, or among other bytes.
      block_tables: int32[B, W], the pages of each request in the order of its tokens. An id below
        0 or at least ``blocks`` holds no keys.
      seq_lens: int32[B], tokens of each request, including those of its queries; 0 for padding.
      query_start_loc: int32[B + 1], the index of each request's first query; the last entry is
        the number of queries, and ``queries`` past it are padding. The last query of a request is
        its last token. None: one query per request, T = B, the fastest case of ``"mosaic_gpu"``.
      scale: factor of the scores; None: ``K ** -0.5``.
      sliding_window: number of keys that a query sees, including its own; None: no window.
      chunk_size: tokens of a chunk; a query sees only keys of its own chunk. None: no chunks.
      soft_cap: caps scores at ``soft_cap * tanh(score / soft_cap)``; None: no cap.
      sinks: float[heads], a logit per head that counts as a key without a value; None: none.
      key_scale: factor of the stored keys, positive; a number, float[], or float[kv_heads].
      value_scale: factor of the stored values, likewise.
      key_width: elements of a key, K; None: as wide as a query.
      value_width: elements of a value, V; None: all elements of a row that follow its key. If rows
        are only keys, [blocks, tokens, kv_heads, K], the value is the first V elements of its key.
      row_packing: ``"fp8_ds_mla"`` for latent rows packed into bytes, as vLLM stores those of
        DeepSeek-V3.2; see `PackedRow`. Pages are uint8[blocks, tokens, 1, V + V / 32 + 2 (K - V)]:
        a row has V values in float8_e4m3fn, a float32 scale for each 128 of them, and the rest of
        the key in bfloat16. Values times their scales are rounded to the dtype of queries. Pass
        ``value_width`` with it. None: a row has elements of the dtype of ``pages``.
      causal: False: queries see all keys of their request, at any position.
      first_positions: int32[B], position of the first token in each row of ``block_tables``, for
        tables that leave out blocks below a window; None: 0.
      interleaving: for pages that hold only one rank's share of the positions of every request;
        ``seq_lens`` still count all positions. None: the pages hold all positions.
      reproducible: True: the bits of a token's output depend on its own position, query and keys
        alone, not on other requests, on rows, page ids or the lengths of arrays, nor on whether its
        request has one query in this call or many. Splits are then fixed ranges of positions, and
        prompts take the kernel of decodes, which is slower for them. Holds between calls of one
        implementation on one kind of device, with equal rules, page size and dtypes; of ``"xla"``
        on CPUs only, because XLA chooses GEMMs on GPUs by their shapes.
      shared_prefixes: groups of requests that begin with the same pages, which are then read once
        for a whole group; see `SharedPrefixes`. For one query each, without a window, a chunk or
        ``interleaving``, and not ``reproducible``. Of each group, as many whole steps of 64 tokens
        count as come before the last token of every member. Latent rows with more than 32 heads
        are read for each request all the same, because their products take longer. None, or groups
        that share 0 tokens: nothing is shared.
      max_query_len: most queries of a request; None: T. Few spare a batch of drafts the kernel for
        many. A request with more is served all the same, but slowly.
      out_dtype: dtype of the output; None: that of queries. Use float32 for outputs that are to be
        combined; ``"mosaic_gpu"`` computes them in the dtype of queries all the same.
      return_lse: also return the log-sum-exp of the scores and sinks, by which outputs over
        several parts of a sequence can be combined.
      implementation: ``"mosaic_gpu"`` or ``"xla"``. None: Mosaic GPU for arguments that it
        supports, if the program is compiled for a GPU that supports it; else XLA.

    Returns:
      [T, heads, V] in ``out_dtype``, zeros for padding and for queries that see no key. With
      ``return_lse`` a pair: this, and float32[T, heads], -inf for padding and where there is
      neither a key nor a sink.

    Raises:
      TypeError: a dtype that is not listed above.
      ValueError: shapes that do not fit, a window, chunk or cap that is not positive, a window or
        chunk with ``interleaving`` or without ``causal``, an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` with a jax that is too old, a GPU that does not run it,
        or arguments that it does not support. (On other devices jax itself refuses to compile the
        kernel.)
    """
    rule, arrays = check_arguments(
        *(queries, pages, block_tables, seq_lens, query_start_loc),
        scale=scale,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        key_width=key_width,
        value_width=value_width,
        row_packing=row_packing,
        causal=causal,
        first_positions=first_positions,
        interleaving=interleaving,
        reproducible=reproducible,
        shared_prefixes=shared_prefixes,
        max_query_len=max_query_len,
        out_dtype=out_dtype,
    )
    out, lse = _run(arrays, rule, implementation)
    return (out, lse) if return_lse else out


def _run(
    arrays: AttentionArrays, rule: AttentionRule, implementation: Implementation | None
) -> tuple[Array, Array]:
    """Runs the given implementation, or with None the best one."""
    check_choice(get_args(Implementation), implementation=implementation)
    if not arrays.queries.size or not arrays.block_tables.size or not arrays.pages.data.size:
        return _see_nothing(arrays, rule)
    with jax.enable_x64(False):  # tasks are counted in int32, even for callers with x64
        return choose(
            implementation,
            why_not_paged_attention(arrays, rule),
            kernels=_kernels_of(arrays, rule),
            mosaic_gpu=lambda: _attend_mosaic(arrays, rule),
            xla=lambda: attend_xla(arrays, rule),
        )


def _kernels_of(arrays: AttentionArrays, rule: AttentionRule) -> list[Kernel]:
    """Returns the kernels that a call may launch."""
    if rule.values_in_keys:
        return ["latents", "combine_latents"]
    may_prefill = arrays.query_start_loc is not None or arrays.shared is not None
    return ["decode", "combine", *(["prefill"] if may_prefill else [])]


def _see_nothing(arrays: AttentionArrays, rule: AttentionRule) -> tuple[Array, Array]:
    """Returns the output of a call that has no queries or no keys."""
    shape = arrays.queries.shape[:2]
    lse = jnp.full(shape, -jnp.inf, jnp.float32)
    if arrays.sinks is not None and all(shape) and arrays.block_tables.shape[0]:
        one_each = arrays.query_start_loc is None
        tiles = one_query_each(arrays, rule) if one_each else cut_queries(arrays, rule, Cut(1))
        lse = jnp.where(tiles.of_token[:, None] < 0, -jnp.inf, arrays.sinks)
    return jnp.zeros((*shape, rule.value_width), rule.out_dtype), lse


def _attend_mosaic(arrays: AttentionArrays, rule: AttentionRule) -> tuple[Array, Array]:
    if rule.values_in_keys:
        from pallas_kernels._paged_attention.mla import attend_latents as attend
    else:
        from pallas_kernels._paged_attention.mosaic import attend_mosaic as attend
    out, lse = attend(arrays, rule._replace(out_dtype=arrays.queries.dtype))
    return out.astype(rule.out_dtype), lse
