"""Attention of queries to keys and values that lie in pages."""

from typing import Any, get_args

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import _capability
from pallas_kernels._capability import Implementation
from pallas_kernels._paged_attention_arguments import check_arguments
from pallas_kernels._paged_attention_limits import why_not_paged_attention
from pallas_kernels._paged_attention_tiles import AttentionArrays, AttentionRule, Deal
from pallas_kernels._paged_attention_xla import attend_xla


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
    causal: bool = True,
    first_positions: Any = None,
    deal: Deal | None = None,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Attends from the last tokens of each request to its keys and values, which lie in pages.

    Decoding, speculation, chunks of a prefill and whole prompts are one call, in any mixture. A
    query sees the keys of its own request up to its own position, which must be in the pages
    already. Bytes that no query sees never reach the output, whatever they hold (NaN, Inf):
    those at and past a request's length, below its window, and in pages of other requests.
    Works inside your ``jit``, ``lax.scan`` and ``shard_map`` (with ``check_vma=False``); one
    compilation serves all lengths, and no temporary grows with the pages.

    Args:
      queries: [T, heads, K], the queries of B requests end to end; float32, bfloat16 or float16.
        The heads of one KV head lie side by side.
      pages: [blocks, tokens, kv_heads, K + V], a key and its value side by side; of a
        dtype of queries, float8_e4m3fn, float8_e5m2 or int8. Or `StridedPages`, where pages lie in
        another order, with padding or among other bytes.
      block_tables: int32[B, W], the pages of each request in the order of its tokens. An id below
        0 or at least ``blocks`` holds no keys.
      seq_lens: int32[B], tokens of each request, the queries' own among them. 0 for a row of
        padding.
      query_start_loc: int32[B + 1], where each request's queries begin; its last entry is the
        number of queries, and what follows in ``queries`` is padding. None: one query each, T = B,
        which ``"mosaic_gpu"`` attends from fastest. The last query of a request is its last token.
      scale: of the scores; None: ``K ** -0.5``.
      sliding_window: keys that a query sees, its own among them; None: all.
      chunk_size: a query sees only keys of its own chunk of so many tokens; None: all.
      soft_cap: caps scores at ``soft_cap * tanh(score / soft_cap)``; None: no cap.
      sinks: float[heads], a logit per head that counts as a key without a value; None: none.
      key_scale: what a stored key is multiplied by, positive; a number, float[], or
        float[kv_heads].
      value_scale: the same of values.
      key_width: elements of a row of ``pages`` that are its key, K; None: as wide as a query.
      value_width: elements of a value, V; None: what follows the key in a row. Of rows that are
        keys alone, [blocks, tokens, kv_heads, K], a value is the first V elements.
      causal: False: queries see all keys of their request, whatever their position.
      first_positions: int32[B], the position of the first token in each row of ``block_tables``,
        for tables without what lies below a window; None: 0.
      deal: for pages that hold one rank's share of every request's positions; ``seq_lens`` count
        all of them. None: pages hold all.
      out_dtype: of the output; None: that of queries. float32 where parts are to be combined;
        ``"mosaic_gpu"`` rounds them to the dtype of queries all the same.
      return_lse: also return the log-sum-exp, by which outputs over several parts of a
        sequence can be combined. It counts the sinks.
      implementation: ``"mosaic_gpu"`` or ``"xla"``. By default Mosaic GPU attends where the
        program is compiled for a GPU that runs it and the arguments are of a kind that it takes,
        and XLA everywhere else, also for rows that are keys alone.

    Returns:
      [T, heads, V] in ``out_dtype``, zeros for padding and for queries that see no key.
      With ``return_lse`` a pair of it and float32[T, heads], -inf where there is nothing.

    Raises:
      TypeError: a dtype that is not one of those above.
      ValueError: shapes that do not fit, a window, chunk or cap that is not positive, a window or
        chunk with ``deal`` or without ``causal``, an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` where jax or the GPU is too old for it, or for
        arguments that it does not take. (On other devices jax itself refuses to compile it.)
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
        causal=causal,
        first_positions=first_positions,
        deal=deal,
        out_dtype=out_dtype,
    )
    out, lse = _run(arrays, rule, implementation)
    return (out, lse) if return_lse else out


def _run(
    arrays: AttentionArrays, rule: AttentionRule, implementation: Implementation | None
) -> tuple[Array, Array]:
    """Runs the implementation of that name, or the best one if None."""
    if implementation not in (None, *get_args(Implementation)):
        choices = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation={implementation!r}; use one of {choices} or None")
    if not arrays.queries.size or not arrays.block_tables.size or not arrays.pages.data.size:
        return _see_nothing(arrays, rule)
    unsupported = why_not_paged_attention(arrays, rule)
    if implementation == "mosaic_gpu":
        unsupported = _capability.why_unsupported(any_platform=True) or unsupported
        if unsupported:
            raise NotImplementedError(f'implementation="mosaic_gpu": {unsupported}; use "xla"')
        return _attend_mosaic(arrays, rule)
    # The kernel of latent rows has to be asked for: its masks have run only in interpret mode.
    is_xla = implementation == "xla" or unsupported or rule.values_in_keys
    if is_xla or _capability.default_implementation() == "xla":
        return attend_xla(arrays, rule)
    # A program may be compiled for the CPU of a machine that has a GPU.
    return lax.platform_dependent(
        cuda=lambda: _attend_mosaic(arrays, rule), default=lambda: attend_xla(arrays, rule)
    )


def _see_nothing(arrays: AttentionArrays, rule: AttentionRule) -> tuple[Array, Array]:
    """Returns the output of a call without queries or without keys."""
    shape = arrays.queries.shape[:2]
    lse = jnp.full(shape, -jnp.inf, jnp.float32)
    return jnp.zeros((*shape, rule.value_width), rule.out_dtype), lse


def _attend_mosaic(arrays: AttentionArrays, rule: AttentionRule) -> tuple[Array, Array]:
    if rule.values_in_keys:
        from pallas_kernels._paged_attention_mla import attend_latents as attend
    else:
        from pallas_kernels._paged_attention_mosaic import attend_mosaic as attend
    out, lse = attend(arrays, rule._replace(out_dtype=arrays.queries.dtype))
    return out.astype(rule.out_dtype), lse
