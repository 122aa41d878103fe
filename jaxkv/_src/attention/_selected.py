"""Attention to the tokens that an indexer chose."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxkv._src.attention._kernel import combine_ranks, pages_of
from jaxkv._src.attention._rows import (
    PART_BYTES,
    compute_dtype,
    in_parts,
    product,
    read_heads,
)
from jaxkv._src.pool import BoundLayer
from jaxkv._src.specs import MLASpec
from pallas_kernels import AttentionRule, RequestPages, StridedPages, paged_attention

FEW_QUERIES = 8  # at once for reproducible bits
QUERIES_OF_KERNEL = 512  # at once, which bounds the memory of its splits


def attend_to_selected(
    bound: BoundLayer,
    queries: Float[Array, "*tokens heads key_size"],
    sinks: Float[Array, "heads"] | None,
    selected: Int32[Array, "*tokens chosen"] | Int32[Array, "*tokens kv_heads chosen"],
    rule: AttentionRule,
    sparse_block_size: int,
) -> Float[Array, "*tokens heads value_size"]:
    """Attends from each query to the tokens chosen for it, if the layer's rule shows them."""
    layout, row = bound.layout, bound.form.row
    flat = queries.reshape(-1, *queries.shape[-2:])
    by_head = selected.ndim == queries.ndim and not isinstance(bound.form.spec, MLASpec)
    heads = selected.shape[-2:-1] if by_head else ()
    selected = selected.reshape(len(flat), *heads, selected.shape[-1])
    slots = _visible_slots(bound, selected, rule, sparse_block_size)
    if sinks is not None and layout.context_parallel > 1:  # only one rank counts the sinks
        sinks = jnp.where(jnp.equal(layout.context_rank(), 0), sinks, -jnp.inf)
    size = PART_BYTES // max(4 * row.heads * row.width * slots.shape[-1], 1)
    size = FEW_QUERIES if rule.reproducible else max(size, 1)
    attend: Callable[..., tuple[Array, Array]] = _attend
    if takes_rows(bound):
        size, attend = QUERIES_OF_KERNEL, _attend_to_rows
    out, lse = in_parts(
        lambda queries, slots: attend(bound, queries, sinks, slots, rule), size, flat, slots
    )
    if layout.context_parallel > 1 and layout.axis is not None:
        out = combine_ranks(out, lse, layout.axis)
    return out.astype(queries.dtype).reshape(*queries.shape[:-1], rule.value_width)


def _visible_slots(
    bound: BoundLayer, selected: Array, rule: AttentionRule, sparse_block_size: int
) -> Array:
    """Returns the slots of the chosen tokens, int32[T, N] or [T, kv_heads, N].

    They are negative for those that are not seen.
    """
    column = (-1, *[1] * (selected.ndim - 1))
    positions = bound.batch.positions.reshape(column)
    requests = bound.batch.token_requests.reshape(column)
    if sparse_block_size > 1:
        known = (selected >= 0) & (selected <= positions // sparse_block_size)
        first = jnp.where(known, selected, 0)[..., None] * sparse_block_size
        offsets = jnp.arange(sparse_block_size, dtype=jnp.int32)
        tokens = first + offsets.reshape(*[1] * selected.ndim, -1)
        tokens = jnp.where(known[..., None], tokens, -1)
        selected = tokens.reshape(*selected.shape[:-1], -1)
    seen = (selected >= 0) & (selected <= positions)
    if rule.sliding_window is not None:
        seen &= selected > positions - rule.sliding_window
    if rule.chunk_size is not None:
        seen &= selected // rule.chunk_size == positions // rule.chunk_size
    return bound.requests.slots_at(requests, jnp.where(seen, selected, -1))


def takes_rows(bound: BoundLayer) -> bool:
    """Returns whether the kernel of latent vectors can read single rows of a layer."""
    return isinstance(bound.form.spec, MLASpec) and pages_of(bound).rows_per_extent > 0


def _attend_to_rows(
    bound: BoundLayer, queries: Array, sinks: Array | None, slots: Array, rule: AttentionRule
) -> tuple[Array, Array]:
    """Does the same as `_attend` by the kernels of pages, whose pages are single rows."""
    pages = pages_of(bound)
    page, row = jnp.divmod(slots, pages.tokens)
    known = (slots >= 0) & (page < pages.num_pages) & (bound.first >= 0)
    row = jnp.where(known, pages.first_row() + page * pages.page_rows + row, -1)
    rows = StridedPages.from_rows(pages)
    numbers = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    ends = jnp.where(known, numbers, 0).max(axis=1)
    key_scale = 1.0 if rule.row_packing else bound.key_value_scales[0]
    out, lse = paged_attention(
        queries,
        rows,
        RequestPages(row, ends),
        dataclasses.replace(rule, causal=False, sliding_window=None, chunk_size=None),
        sinks=sinks,
        key_scale=key_scale,
        value_scale=key_scale,
        return_lse=True,
        implementation=bound.implementation,
    )
    return out, lse


def _attend(
    bound: BoundLayer, queries: Array, sinks: Array | None, slots: Array, rule: AttentionRule
) -> tuple[Array, Array]:
    """Returns float32[Q, heads, V], the output, and float32[Q, heads], the log-sum-exp."""
    spec = bound.form.spec
    seen = jnp.expand_dims(slots >= 0, 2 if slots.ndim == 3 else (1, 2))
    # Rows without a slot read as zeros, so that a weight of 0 never meets a NaN.
    rows = read_heads(bound, slots, rule)
    compute = queries.dtype if rule.row_packing else compute_dtype(rows, queries)
    rows, kv_heads, width = rows.astype(compute), rows.shape[2], queries.shape[-1]
    first = 0 if isinstance(spec, MLASpec) else width
    values = rows[..., first : first + (rule.value_width or 0)]
    grouped = queries.reshape(len(queries), kv_heads, -1, width).astype(compute)
    key_scale, value_scale = bound.key_value_scales
    if rule.row_packing is not None:
        key_scale = value_scale = 1.0
    scores = product("qhgk,qnhk->qhgn", grouped, rows[..., :width])
    scores = scores * (key_scale * (1.0 if rule.scale is None else rule.scale))
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    highest = scores.max(axis=-1, initial=-jnp.inf)
    logits = jnp.full(grouped.shape[1:3], -jnp.inf) if sinks is None else sinks
    logits = logits.astype(jnp.float32).reshape(1, *grouped.shape[1:3])
    highest = jnp.maximum(highest, logits)
    highest = jnp.where(highest > -jnp.inf, highest, 0)
    weights = jnp.exp(scores - highest[..., None])
    total = weights.sum(axis=-1) + jnp.exp(logits - highest)
    out = product("qhgn,qnhv->qhgv", weights.astype(compute), values)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    out = out * (key_scale if isinstance(spec, MLASpec) else value_scale)
    shape = queries.shape[:2]
    return out.reshape(*shape, -1), (jnp.log(total) + highest).reshape(shape)
