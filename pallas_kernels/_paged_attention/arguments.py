"""Checks of the arguments of `paged_attention`."""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels._arguments import (
    as_array,
    as_dtype,
    as_number,
    check_choice,
    check_type,
    shown,
)
from pallas_kernels._paged_attention.packed import GROUP, PackedRow, RowPacking
from pallas_kernels._paged_attention.pages import StridedPages, check_pages
from pallas_kernels._paged_attention.shared import is_worth_sharing
from pallas_kernels._paged_attention.tasks import STEP, split_steps
from pallas_kernels._paged_attention.tiles import (
    AttentionArrays,
    AttentionRule,
    Interleaving,
    SharedPrefixes,
)

QUERY_DTYPES = ("float32", "bfloat16", "float16")
PAGE_DTYPES = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
INT32_MAX = 2**31 - 1


def check_arguments(
    queries: Any,
    pages: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    *,
    scale: float | None,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    sinks: Any,
    key_scale: Any,
    value_scale: Any,
    key_width: int | None,
    value_width: int | None,
    row_packing: RowPacking | None,
    causal: bool,
    first_positions: Any,
    interleaving: Interleaving | None,
    reproducible: bool,
    shared_prefixes: SharedPrefixes | None,
    max_query_len: int | None,
    out_dtype: DTypeLike | None,
) -> tuple[AttentionRule, AttentionArrays]:
    """Checks the arguments of a call, and returns its rule and its arrays.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    check_type(bool, causal=causal, reproducible=reproducible)
    if interleaving is not None:
        _check_interleaving(interleaving)
    key_width = _as_count("key_width", key_width)
    value_width = _as_count("value_width", value_width)
    queries, pages = as_array("queries", queries), check_pages(pages)
    as_dtype("queries", queries.dtype, QUERY_DTYPES)
    _check_row_packing(row_packing, pages)
    _check_widths(queries, pages, key_width, value_width, row_packing)
    (num_tokens, heads, key_size), kv_heads = queries.shape, pages.kv_heads
    block_tables = _as_int32("block_tables", block_tables, 2)
    batch = block_tables.shape[0]
    seq_lens = _as_int32("seq_lens", seq_lens, 1, batch)
    if query_start_loc is not None:
        query_start_loc = _as_int32("query_start_loc", query_start_loc, 1, batch + 1)
    elif num_tokens != batch:
        raise ValueError(
            f"queries has {num_tokens} tokens for {batch} requests; pass query_start_loc, because "
            "without it each request has one query"
        )
    if block_tables.shape[1] * pages.tokens > INT32_MAX:
        raise ValueError(
            f"block_tables has rows of {block_tables.shape[1]} pages of {pages.tokens} tokens, "
            "more than int32 counts; pass fewer columns"
        )
    rule = AttentionRule(
        kv_heads=kv_heads,
        group=heads // kv_heads if kv_heads else 0,
        key_width=key_size,
        value_width=pages.width - key_size if value_width is None else value_width,
        page_tokens=pages.tokens,
        scale=key_size**-0.5 if scale is None else _positive("scale", scale),
        window=_as_count("sliding_window", sliding_window),
        chunk=_as_count("chunk_size", chunk_size),
        soft_cap=None if soft_cap is None else _positive("soft_cap", soft_cap),
        causal=causal,
        values_in_keys=row_packing is not None or pages.width == key_size,
        row_packing=row_packing,
        ranks=1 if interleaving is None else interleaving.ranks,
        interleave_tokens=1 if interleaving is None else interleaving.interleave_tokens,
        reproducible=reproducible,
        max_queries=_as_count("max_query_len", max_query_len) or max(1, num_tokens),
        out_dtype=as_dtype(
            "out_dtype", queries.dtype if out_dtype is None else out_dtype, QUERY_DTYPES
        ),
    )
    _check_rule(rule)
    chunk_offsets = jnp.zeros_like(seq_lens)
    if first_positions is not None:
        first_positions = _as_int32("first_positions", first_positions, 1, batch)
        if reproducible:
            block_tables, first_positions = _whole_splits(rule, block_tables, first_positions)
        seq_lens = seq_lens - first_positions
        chunk_offsets = first_positions % (rule.chunk or 1)
    arrays = AttentionArrays(
        queries,
        pages,
        block_tables,
        jnp.maximum(seq_lens, 0),
        query_start_loc,
        chunk_offsets=chunk_offsets,
        rank=jnp.asarray(0 if interleaving is None else interleaving.rank, jnp.int32),
        sinks=None if sinks is None else _as_float("sinks", sinks, (heads,)),
        key_scale=_as_scale("key_scale", key_scale, kv_heads),
        value_scale=_as_scale("value_scale", value_scale, kv_heads),
        shared=_as_shared(rule, shared_prefixes, query_start_loc),
    )
    return rule, arrays


def _as_shared(
    rule: AttentionRule, shared: SharedPrefixes | None, query_start_loc: Array | None
) -> SharedPrefixes | None:
    """Checks beginnings that requests share; returns None if there is room for no group."""
    if shared is None:
        return None
    check_type(SharedPrefixes, shared_prefixes=shared)
    members, ends, lens = shared
    members = _as_int32("shared_prefixes.members", members, 1, jnp.size(members))
    ends = _as_int32("shared_prefixes.ends", ends, 1, jnp.size(ends))
    lens = _as_int32("shared_prefixes.lens", lens, 1, ends.shape[0])
    refused = {
        "query_start_loc": query_start_loc is not None,
        "sliding_window": rule.window is not None,
        "chunk_size": rule.chunk is not None,
        "interleaving": rule.ranks > 1,
        "causal=False": not rule.causal,
        "reproducible": rule.reproducible,
    }
    if any(refused.values()):
        named = " and ".join(name for name, given in refused.items() if given)
        raise ValueError(f"shared_prefixes does not go with {named}; leave out one or the other")
    if not members.size or not ends.size or not is_worth_sharing(rule):
        return None
    return SharedPrefixes(members, ends, lens)


def _whole_splits(
    rule: AttentionRule, block_tables: Array, first_positions: Array
) -> tuple[Array, Array]:
    """Returns tables that begin with a fixed segment: pages before the first one hold no keys."""
    per_split = STEP * (split_steps(rule) or 1)
    columns = math.lcm(rule.page_tokens, per_split) // rule.page_tokens
    moved = (first_positions // rule.page_tokens) % columns
    index = jnp.arange(block_tables.shape[1] + columns - 1, dtype=jnp.int32)[None] - moved[:, None]
    rows = jnp.arange(block_tables.shape[0], dtype=jnp.int32)[:, None]
    tables = block_tables.at[rows, index].get(
        mode="fill", fill_value=-1, wrap_negative_indices=False
    )
    return tables, first_positions - moved * rule.page_tokens


def _check_interleaving(given: Interleaving) -> None:
    check_type(Interleaving, interleaving=given)
    for name in ("ranks", "interleave_tokens"):
        if _as_count(f"interleaving.{name}", getattr(given, name)) is None:
            raise ValueError(f"interleaving.{name}=None must be an int of at least 1")
    if isinstance(given.rank, int) and not 0 <= given.rank < given.ranks:
        raise ValueError(f"interleaving.rank={given.rank} must be in 0..{given.ranks - 1}")


def _check_row_packing(row_packing: RowPacking | None, pages: StridedPages) -> None:
    check_choice(get_args(RowPacking), row_packing=row_packing)
    if row_packing is not None and jnp.dtype(pages.dtype) != jnp.uint8:
        raise TypeError(f"pages must be uint8 with row_packing={row_packing!r}, got {pages.dtype}")
    if row_packing is None:
        as_dtype("pages", pages.dtype, PAGE_DTYPES)


def _check_widths(
    queries: Array,
    pages: StridedPages,
    key_width: int | None,
    value_width: int | None,
    row_packing: RowPacking | None,
) -> None:
    if queries.ndim != 3:
        raise ValueError(f"queries must be [T, heads, K], got shape {queries.shape}")
    (_, heads, key_size), kv_heads, row = queries.shape, pages.kv_heads, pages.width
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(
            f"queries has {heads} heads; wants a multiple of the {kv_heads} KV heads of pages"
        )
    if not pages.tokens:
        raise ValueError("pages has blocks of 0 tokens; wants at least 1")
    if key_width is not None and key_width != key_size:
        raise ValueError(f"key_width={key_width} must be the width of queries, {key_size}")
    if row_packing is not None:
        _check_packed_widths(key_size, row, value_width, row_packing)
        return
    if value_width is None and not 0 < key_size < row:
        raise ValueError(
            f"queries are {key_size} wide and rows of pages {row}; a row must be a key as wide as "
            "a query, followed by its value; pass value_width if the value is a part of the key"
        )
    if value_width is not None and (
        not 0 < value_width <= row or row not in (key_size, key_size + value_width)
    ):
        raise ValueError(
            f"value_width={value_width}, queries are {key_size} wide and rows of pages {row}; a "
            "row must be a key that begins with its value, or a key followed by its value"
        )


def _check_packed_widths(
    key_size: int, row: int, value_width: int | None, row_packing: RowPacking
) -> None:
    if value_width is None or value_width % GROUP or not 0 < value_width < key_size:
        raise ValueError(
            f"value_width={value_width} with row_packing={row_packing!r}; pass a multiple of "
            f"{GROUP} that is less than the width of queries, {key_size}"
        )
    wanted = PackedRow(value_width, key_size - value_width).row_bytes
    if row != wanted:
        raise ValueError(
            f"a row of pages is {row} bytes; with row_packing={row_packing!r}, queries {key_size} "
            f"wide and value_width={value_width} it must be {wanted}"
        )


def _check_rule(rule: AttentionRule) -> None:
    limited = rule.window is not None or rule.chunk is not None
    if limited and (rule.ranks > 1 or not rule.causal):
        what = "interleaving" if rule.ranks > 1 else "causal=False"
        raise ValueError(
            f"{what} does not go with sliding_window or chunk_size; pass one or the other"
        )


def _as_int32(name: str, array: Any, ndim: int, length: int | None = None) -> Array:
    """Returns ids or lengths as a `jax.Array`, after a check of their dtype."""
    dtype, shape = getattr(array, "dtype", type(array).__name__), jnp.shape(array)
    wanted = ["B", "W"][:ndim] if length is None else [str(length)]
    if str(dtype) != "int32" or len(shape) != ndim:
        raise TypeError(f"{name} must be int32[{', '.join(wanted)}], got {dtype}{list(shape)}")
    if length is not None and shape[0] != length:
        raise ValueError(f"{name} must be int32[{length}], got {dtype}{list(shape)}")
    return jnp.asarray(array)


def _as_scale(name: str, scale: Any, kv_heads: int) -> Array:
    shape = jnp.shape(scale)
    return jnp.broadcast_to(_as_float(name, scale, shape if shape == () else (kv_heads,)), kv_heads)


def _as_float(name: str, array: Any, shape: tuple[int, ...]) -> Array:
    given = as_array(name, array)
    if given.shape != shape:
        wanted = f"{list(shape)}" if name == "sinks" else f"a number or {list(shape)}"
        raise ValueError(f"{name} has shape {given.shape}; wants {wanted}, one per head")
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise TypeError(f"{name} must be floats, got {given.dtype}")
    return given.astype(jnp.float32)


def _as_count(name: str, count: int | None) -> int | None:
    if count is None:
        return None
    number = math.nan if isinstance(count, jax.Array | np.ndarray) else as_number(name, count)
    if not number >= 1 or number != int(number):
        raise ValueError(f"{name}={shown(count)} must be an int of at least 1, or None")
    return min(int(number), INT32_MAX)


def _positive(name: str, number: float) -> float:
    if as_number(name, number) <= 0:
        raise ValueError(f"{name}={number} must be positive and finite, or None")
    return float(number)
