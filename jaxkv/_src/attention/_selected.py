"""Attention to the tokens that an indexer chose, and the choice of them."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from jaxkv._src.attention._kernel import combine_ranks, pages_of
from jaxkv._src.internal.numbers import cdiv
from jaxkv._src.layout import rows_per_block
from jaxkv._src.pool import BoundLayer, read_cells, token_head_row
from jaxkv._src.specs import MLASpec
from pallas_kernels import (
    AttentionRule,
    PackedRow,
    RequestPages,
    StridedPages,
    TokenHeadRow,
    paged_attention,
)

PART_BYTES = 2**26  # of gathered rows at once, in float32
FEW_QUERIES = 8  # at once for reproducible bits
QUERIES_OF_KERNEL = 512  # at once, which bounds the memory of its splits
KEYS_AT_ONCE = 512  # of an index per round


def attend_to_selected(
    bound: BoundLayer,
    queries: Float[Array, "*tokens heads key_size"],
    sinks: Float[Array, "heads"] | None,
    selected: Int32[Array, "*tokens chosen"],
    rule: AttentionRule,
) -> Float[Array, "*tokens heads value_size"]:
    """Attends from each query to the tokens chosen for it, if the layer's rule shows them."""
    layout, row = bound.layout, bound.form.row
    flat = queries.reshape(-1, *queries.shape[-2:])
    slots = _visible_slots(bound, selected.reshape(len(flat), -1), rule)
    if sinks is not None and layout.context_parallel > 1:  # only one rank counts the sinks
        sinks = jnp.where(jnp.equal(layout.context_rank(), 0), sinks, -jnp.inf)
    size = PART_BYTES // max(4 * row.heads * row.width * slots.shape[1], 1)
    size = FEW_QUERIES if rule.reproducible else max(size, 1)
    attend: Callable[..., tuple[Array, Array]] = _attend
    if takes_rows(bound):
        size, attend = QUERIES_OF_KERNEL, _attend_to_rows
    out, lse = _in_parts(
        lambda queries, slots: attend(bound, queries, sinks, slots, rule), size, flat, slots
    )
    if layout.context_parallel > 1 and layout.axis is not None:
        out = combine_ranks(out, lse, layout.axis)
    return out.astype(queries.dtype).reshape(*queries.shape[:-1], rule.value_width)


def _visible_slots(bound: BoundLayer, selected: Array, rule: AttentionRule) -> Array:
    """Returns int32[T, N], the slots of the chosen tokens; negative for those that are not seen."""
    positions = bound.batch.positions.reshape(-1, 1)
    requests = bound.batch.token_requests.reshape(-1, 1)
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
    spec, seen = bound.form.spec, (slots >= 0)[:, None, None]
    by_heads = token_head_row(spec)
    kv_heads = bound.form.row.heads if by_heads is None else by_heads.kv_heads
    # Rows without a slot read as zeros, so that a weight of 0 never meets a NaN.
    rows = _read(bound, slots, by_heads or (packed_row(spec) if rule.row_packing else None))
    compute = queries.dtype if rule.row_packing else _compute_dtype(rows, queries)
    rows = rows.reshape(*slots.shape, kv_heads, -1).astype(compute)
    width = queries.shape[-1]
    first = 0 if isinstance(spec, MLASpec) else width
    values = rows[..., first : first + (rule.value_width or 0)]
    grouped = queries.reshape(len(queries), kv_heads, -1, width).astype(compute)
    key_scale, value_scale = bound.key_value_scales
    if rule.row_packing is not None:
        key_scale = value_scale = 1.0
    scores = _product("qhgk,qnhk->qhgn", grouped, rows[..., :width])
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
    out = _product("qhgn,qnhv->qhgv", weights.astype(compute), values)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    out = out * (key_scale if isinstance(spec, MLASpec) else value_scale)
    shape = queries.shape[:2]
    return out.reshape(*shape, -1), (jnp.log(total) + highest).reshape(shape)


def _scores_of_rows(
    bound: BoundLayer,
    queries: Float[Array, "queries heads key_size"],
    weights: Float[Array, "queries heads"],
    requests: Int32[Array, "queries"],
    visible: Int32[Array, "queries"],
    num_rows: int,
) -> Float32[Array, "queries rows"]:
    """Returns the scores of the stored rows of each query's request; -inf for those not visible.

    Args:
      requests: the request of each query.
      visible: rows that each query sees: those before this one.
      num_rows: the most rows of a request.
    """
    spec = bound.form.spec
    ratio = bound.requests.growth.block_size // rows_per_block(spec)
    packed = index_row(spec)

    def one_round(i: Array, scores: Array) -> Array:
        numbers = i * KEYS_AT_ONCE + jnp.arange(KEYS_AT_ONCE, dtype=jnp.int32)[None]
        seen = numbers < visible[:, None]
        slots = bound.requests.slots_at(requests[:, None], jnp.where(seen, numbers * ratio, -1))
        keys = _read(bound, slots, packed)
        compute = _compute_dtype(keys, queries)
        found = _product("qhk,qnk->qhn", queries.astype(compute), keys.astype(compute))
        found = jnp.maximum(found * bound.key_value_scales[0], 0)
        found = (found * weights.astype(jnp.float32)[:, :, None]).sum(axis=1)
        found = jnp.where((slots >= 0) & seen, found, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, found, i * KEYS_AT_ONCE, axis=1)

    rounds = cdiv(num_rows, KEYS_AT_ONCE)
    scores = jnp.full((len(queries), rounds * KEYS_AT_ONCE), -jnp.inf, jnp.float32)
    needed = cdiv(jnp.max(visible, initial=0), KEYS_AT_ONCE)
    return lax.fori_loop(0, jnp.minimum(needed, rounds), one_round, scores)[:, :num_rows]


def choose_rows(
    bound: BoundLayer,
    queries: Float[Array, "*tokens heads key_size"],
    weights: Float[Array, "*tokens heads"],
    count: int,
) -> Int32[Array, "*tokens count"]:
    """Returns the rows of the highest scores for each query, highest first; -1 for none."""
    batch, requests = bound.batch, bound.requests
    ratio = requests.growth.block_size // rows_per_block(bound.form.spec)
    num_rows = requests.table.shape[1] * requests.block_tokens // ratio
    flat = queries.reshape(-1, *queries.shape[-2:])

    def choose(queries: Array, weights: Array, of: Array, positions: Array) -> tuple[Array]:
        visible = jnp.where(of < 0, 0, (positions + 1) // ratio)
        scores = _scores_of_rows(bound, queries, weights, of, visible, num_rows)
        if bound.layout.context_parallel > 1 and bound.layout.axis is not None:
            scores = lax.pmax(scores, bound.layout.axis)
        highest, rows = lax.top_k(scores, min(count, num_rows))
        rows = jnp.where(highest > -jnp.inf, rows.astype(jnp.int32), -1)
        return (jnp.pad(rows, ((0, 0), (0, count - rows.shape[1])), constant_values=-1),)

    by_row = KEYS_AT_ONCE * bound.form.spec.head_size + num_rows
    (chosen,) = _in_parts(
        choose,
        max(PART_BYTES // (4 * by_row), 1),
        *(flat, weights.reshape(flat.shape[:2])),
        *(batch.token_requests.reshape(-1), batch.positions.reshape(-1)),
    )
    return chosen.reshape(*queries.shape[:-2], count)


def packed_row(spec: MLASpec) -> PackedRow:
    """Returns the form of latent vectors that are packed by ``"fp8_ds_mla"``."""
    values = spec.value_size or spec.head_size
    return PackedRow(values, spec.head_size - values)


def index_row(spec: MLASpec) -> PackedRow | None:
    """Returns the form of index keys that are packed, values and scales; None if they are not."""
    is_packed = spec.bytes_per_token is not None and spec.head_size % 128 == 0
    return PackedRow(spec.head_size, 0) if is_packed else None


def _read(bound: BoundLayer, slots: Array, packed: PackedRow | TokenHeadRow | None) -> Array:
    """Returns the stored rows at slots, [..., elements], unpacked."""
    block_size = bound.requests.growth.block_size
    tokens_per_row = block_size // rows_per_block(bound.form.spec)
    rows = read_cells(
        bound, slots // block_size, slots % block_size // tokens_per_row, bound.form.row.dtype
    )
    return rows if packed is None else packed.unpack(rows)


def _compute_dtype(rows: Array, queries: Array) -> jnp.dtype:
    """Returns the dtype of products; rows of 8 bits are widened to the dtype of queries."""
    if rows.dtype.itemsize == 1 or rows.dtype == queries.dtype:
        return queries.dtype
    return jnp.dtype(jnp.float32)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(
        subscripts,
        left,
        right,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if right.dtype == jnp.float32 else None,
    )


def _in_parts(
    function: Callable[..., tuple[Array, ...]], size: int, *arrays: Array
) -> tuple[Array, ...]:
    """Calls a function of arrays of queries with ``size`` of them at a time, one after another."""
    total = len(arrays[0])
    if total <= size:
        return function(*arrays)
    parts = cdiv(total, size)

    def cut(array: Array) -> Array:
        pads = [(0, parts * size - total)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, pads, constant_values=-1 if array.dtype == jnp.int32 else 0)
        return padded.reshape(parts, size, *array.shape[1:])

    results = lax.map(lambda part: function(*part), tuple(map(cut, arrays)))
    return tuple(
        array.reshape(math.prod(array.shape[:2]), *array.shape[2:])[:total] for array in results
    )
