"""Attention over keys and values in pages."""

from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Num

from pallas_kernels._arguments import check_choice
from pallas_kernels._capability import Implementation
from pallas_kernels._dispatch import choose
from pallas_kernels._paged_attention.arguments import check_arguments
from pallas_kernels._paged_attention.limits import (
    by_latents_kernel,
    list_kernels,
    why_not_paged_attention,
)
from pallas_kernels._paged_attention.pages import StridedPages
from pallas_kernels._paged_attention.requests import RequestPages
from pallas_kernels._paged_attention.rule import AttentionRule, Config
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    Cut,
    cut_queries,
    one_query_each,
)
from pallas_kernels._paged_attention.xla import attend_xla

Output = Float[Array, "tokens heads value_width"]
LogSumExp = Float32[Array, "tokens heads"]
DEFAULT = AttentionRule()


def paged_attention(
    queries: Float[Array, "tokens heads key_width"],
    pages: Num[Array, "blocks page_tokens kv_heads width"] | StridedPages,
    requests: RequestPages,
    rule: AttentionRule = DEFAULT,
    *,
    sinks: Float[Array, " heads"] | None = None,
    key_scale: Float[Array, " kv_heads"] | float = 1.0,
    value_scale: Float[Array, " kv_heads"] | float = 1.0,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Output | tuple[Output, LogSumExp]:
    """Attends from the newest tokens of each request to its keys and values in pages.

    Example::

        queries = jnp.ones((2, 4, 64))                         # one query for each of 2 requests
        pages = jnp.ones((8, 16, 2, 128))                      # 8 blocks of 16 tokens; K and V
        tables = jnp.array([[1, 2], [3, -1]], jnp.int32)       # the blocks of each request
        requests = pallas_kernels.RequestPages(tables, seq_lens=jnp.array([20, 7], jnp.int32))
        out = pallas_kernels.paged_attention(queries, pages, requests)             # [2, 4, 64]

    One call serves decodes, drafts, chunks of prompts and whole prompts, in any mixture. A query
    sees the keys of its own request up to its own position, which must be in the pages already.
    Bytes that no query sees never reach the output, whatever they are (NaN, Inf): bytes at and past
    a request's length, below its window, and in pages of other requests. One compilation serves all
    lengths, and no temporary grows with the pages.

    Args:
      queries: the queries of all requests end to end; float32, bfloat16 or float16. The query heads
        of one KV head are adjacent.
      pages: each key followed by its value; float32, bfloat16, float16, float8_e4m3fn, float8_e5m2
        or int8. Or `StridedPages`, for pages in another order, with padding, or among other bytes.
      requests: the pages, the lengths and the queries of each request.
      rule: the keys that a query sees, their scores, and formats; static.
      sinks: a logit per head that counts as a key without a value, or None.
      key_scale: factor of the stored keys, positive; one for all KV heads, or one each.
      value_scale: factor of the stored values, likewise.
      return_lse: also returns the log-sum-exp of the scores and sinks, to combine outputs over
        several parts of a sequence.
      implementation: ``"mosaic_gpu"``, ``"xla"``, or None for the best; see `pallas_kernels`.

    Returns:
      The output, zeros for padding and for queries that see no key. With ``return_lse`` a pair: the
      output, and the log-sum-exp, -inf for padding and where there is neither a key nor a sink.

    Raises:
      TypeError: a dtype that is not listed above.
      ValueError: shapes that do not fit, a window, chunk or cap that is not positive, a window or
        chunk with ``interleaving`` or without ``causal``, an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` where it is not supported.
    """
    config, arrays = check_arguments(
        queries, pages, requests, rule, sinks, key_scale=key_scale, value_scale=value_scale
    )
    out, lse = _run(arrays, config, implementation)
    return (out, lse) if return_lse else out


def _run(
    arrays: AttentionArrays, config: Config, implementation: Implementation | None
) -> tuple[Output, LogSumExp]:
    """Runs the given implementation, or with None the best one."""
    check_choice(get_args(Implementation), implementation=implementation)
    if not arrays.queries.size or not arrays.block_tables.size or not arrays.pages.data.size:
        return _see_nothing(arrays, config)
    with jax.enable_x64(False):  # tasks are counted in int32, even for callers with x64
        return choose(
            implementation,
            why_not_paged_attention(arrays, config),
            kernels=list_kernels(arrays, config),
            mosaic_gpu=lambda: _attend_mosaic(arrays, config),
            xla=lambda: attend_xla(arrays, config),
        )


def _see_nothing(arrays: AttentionArrays, config: Config) -> tuple[Output, LogSumExp]:
    """Returns the output of a call that has no queries or no keys."""
    shape = arrays.queries.shape[:2]
    lse = jnp.full(shape, -jnp.inf, jnp.float32)
    if arrays.sinks is not None and all(shape) and arrays.block_tables.shape[0]:
        one_each = arrays.query_start_loc is None
        tiles = one_query_each(arrays, config) if one_each else cut_queries(arrays, config, Cut(1))
        lse = jnp.where(tiles.token_tiles[:, None] < 0, -jnp.inf, arrays.sinks)
    return jnp.zeros((*shape, config.value_width), config.out_dtype), lse


def _attend_mosaic(arrays: AttentionArrays, config: Config) -> tuple[Output, LogSumExp]:
    if by_latents_kernel(config):
        from pallas_kernels._paged_attention.mla import attend_latents as attend
    else:
        from pallas_kernels._paged_attention.mosaic import attend_mosaic as attend
    out, lse = attend(arrays, config.replace(out_dtype=arrays.queries.dtype))
    return out.astype(config.out_dtype), lse
