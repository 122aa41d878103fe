"""Checks of the arguments of `paged_attention`."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels._arguments import (
    as_array,
    as_dtype,
    as_number,
    check_choice,
    check_type,
    shown,
)
from pallas_kernels._paged_attention.packed import GROUP, LatentPacking, PackedRow
from pallas_kernels._paged_attention.pages import StridedPages, check_pages
from pallas_kernels._paged_attention.requests import Interleaving, RequestPages, SharedPrefixes
from pallas_kernels._paged_attention.rule import AttentionRule, Config
from pallas_kernels._paged_attention.shared import is_worth_sharing
from pallas_kernels._paged_attention.tasks import STEP, split_steps
from pallas_kernels._paged_attention.tiles import AttentionArrays
from pallas_kernels._paged_attention.token_heads import TokenHeadPacking, TokenHeadRow

QUERY_DTYPES = ("float32", "bfloat16", "float16")
PAGE_DTYPES = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
INT32_MAX = 2**31 - 1


def check_arguments(
    queries: Array,
    pages: Array | StridedPages,
    requests: RequestPages,
    rule: AttentionRule,
    sinks: Array | None,
    *,
    key_scale: Array | float,
    value_scale: Array | float,
) -> tuple[Config, AttentionArrays]:
    """Checks the arguments of a call, and returns its constants and its arrays.

    Raises:
      TypeError, ValueError: an argument that does not fit.
    """
    check_type(RequestPages, requests=requests)
    check_type(AttentionRule, rule=rule)
    check_type(bool, causal=rule.causal, reproducible=rule.reproducible)
    if requests.interleaving is not None:
        _check_interleaving(requests.interleaving)
    queries, pages = as_array("queries", queries), check_pages(pages)
    as_dtype("queries", queries.dtype, QUERY_DTYPES)
    _check_row_packing(rule.row_packing, pages)
    value_width = _as_count("value_width", rule.value_width)
    _check_widths(queries, pages, value_width, rule.row_packing)
    config = _configure(queries, pages, requests, rule)
    _check_rule(config)
    heads, kv_heads = queries.shape[1], config.kv_heads
    arrays = AttentionArrays(
        queries,
        pages,
        *_check_requests(requests, config, queries.shape[0]),
        sinks=None if sinks is None else _as_float("sinks", sinks, (heads,)),
        key_scale=_as_scale("key_scale", key_scale, kv_heads),
        value_scale=_as_scale("value_scale", value_scale, kv_heads),
        shared=_as_shared(config, requests.shared_prefixes, requests.query_start_loc),
    )
    return config, arrays


def _configure(
    queries: Array, pages: StridedPages, requests: RequestPages, rule: AttentionRule
) -> Config:
    """Returns a rule with its defaults filled in, and the shapes of a call."""
    (num_tokens, heads, key_width), interleaving = queries.shape, requests.interleaving
    scale, soft_cap = rule.scale, rule.soft_cap
    width, packed = _as_count("value_width", rule.value_width), rule.row_packing
    by_heads = packed if isinstance(packed, TokenHeadRow) else None
    kv_heads = pages.kv_heads if by_heads is None else by_heads.kv_heads
    if width is None:
        width = pages.width - key_width if by_heads is None else by_heads.value_width
    out_dtype = queries.dtype if rule.out_dtype is None else rule.out_dtype
    return Config(
        scale=key_width**-0.5 if scale is None else _positive("scale", scale),
        soft_cap=None if soft_cap is None else _positive("soft_cap", soft_cap),
        sliding_window=_as_count("sliding_window", rule.sliding_window),
        chunk_size=_as_count("chunk_size", rule.chunk_size),
        causal=rule.causal,
        value_width=width,
        row_packing=rule.row_packing,
        reproducible=rule.reproducible,
        out_dtype=as_dtype("out_dtype", out_dtype, QUERY_DTYPES),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        key_width=key_width,
        page_tokens=pages.tokens,
        values_in_keys=by_heads is None and (packed is not None or pages.width == key_width),
        ranks=1 if interleaving is None else interleaving.ranks,
        interleave_tokens=1 if interleaving is None else interleaving.interleave_tokens,
        max_queries=_as_count("max_query_len", requests.max_query_len) or max(1, num_tokens),
    )


def _check_requests(
    requests: RequestPages, config: Config, num_tokens: int
) -> tuple[Array, Array, Array | None, Array, Array]:
    """Checks and returns ``block_tables`` to ``rank`` of `AttentionArrays`."""
    block_tables = _as_int32("block_tables", requests.block_tables, 2)
    batch, page_tokens = block_tables.shape[0], config.page_tokens
    seq_lens = _as_int32("seq_lens", requests.seq_lens, 1, batch)
    query_start_loc = requests.query_start_loc
    if query_start_loc is not None:
        query_start_loc = _as_int32("query_start_loc", query_start_loc, 1, batch + 1)
    elif num_tokens != batch:
        raise ValueError(
            f"queries has {num_tokens} tokens for {batch} requests; pass query_start_loc, because "
            "without it each request has one query"
        )
    if block_tables.shape[1] * page_tokens > INT32_MAX:
        raise ValueError(
            f"block_tables has rows of {block_tables.shape[1]} pages of {page_tokens} tokens, "
            "more than int32 counts; pass fewer pages"
        )
    chunk_offsets = jnp.zeros_like(seq_lens)
    if requests.first_positions is not None:
        first_positions = _as_int32("first_positions", requests.first_positions, 1, batch)
        if config.reproducible:
            block_tables, first_positions = _whole_splits(config, block_tables, first_positions)
        seq_lens = seq_lens - first_positions
        chunk_offsets = first_positions % (config.chunk_size or 1)
    rank = 0 if requests.interleaving is None else requests.interleaving.rank
    rank = jnp.asarray(rank, jnp.int32)
    return block_tables, seq_lens, query_start_loc, chunk_offsets, rank


def _as_shared(
    config: Config, shared: SharedPrefixes | None, query_start_loc: Array | None
) -> SharedPrefixes | None:
    """Checks prefixes that requests share; returns None if no group fits."""
    if shared is None:
        return None
    check_type(SharedPrefixes, shared_prefixes=shared)
    members, ends, lens = shared
    members = _as_int32("shared_prefixes.members", members, 1, jnp.size(members))
    ends = _as_int32("shared_prefixes.ends", ends, 1, jnp.size(ends))
    lens = _as_int32("shared_prefixes.lens", lens, 1, ends.shape[0])
    refused = {
        "query_start_loc": query_start_loc is not None,
        "sliding_window": config.sliding_window is not None,
        "chunk_size": config.chunk_size is not None,
        "interleaving": config.ranks > 1,
        "causal=False": not config.causal,
        "reproducible": config.reproducible,
    }
    if any(refused.values()):
        named = " and ".join(name for name, given in refused.items() if given)
        raise ValueError(f"shared_prefixes does not go with {named}; leave out one or the other")
    if not members.size or not ends.size or not is_worth_sharing(config):
        return None
    return SharedPrefixes(members, ends, lens)


def _whole_splits(
    config: Config, block_tables: Array, first_positions: Array
) -> tuple[Array, Array]:
    """Returns tables that begin with a fixed split: pages before the first one have no keys."""
    per_split = STEP * (split_steps(config) or 1)
    pages_per_split = math.lcm(config.page_tokens, per_split) // config.page_tokens
    moved = (first_positions // config.page_tokens) % pages_per_split
    index = (
        jnp.arange(block_tables.shape[1] + pages_per_split - 1, dtype=jnp.int32)[None]
        - moved[:, None]
    )
    rows = jnp.arange(block_tables.shape[0], dtype=jnp.int32)[:, None]
    tables = block_tables.at[rows, index].get(
        mode="fill", fill_value=-1, wrap_negative_indices=False
    )
    return tables, first_positions - moved * config.page_tokens


def _check_interleaving(given: Interleaving) -> None:
    check_type(Interleaving, interleaving=given)
    for name in ("ranks", "interleave_tokens"):
        if _as_count(f"interleaving.{name}", getattr(given, name)) is None:
            raise ValueError(f"interleaving.{name}=None must be an int of at least 1")
    if isinstance(given.rank, int) and not 0 <= given.rank < given.ranks:
        raise ValueError(f"interleaving.rank={given.rank} must be in 0..{given.ranks - 1}")


def _check_row_packing(
    row_packing: LatentPacking | TokenHeadRow | None, pages: StridedPages
) -> None:
    if not isinstance(row_packing, TokenHeadRow):
        check_choice(get_args(LatentPacking), row_packing=row_packing)
    if row_packing is not None and jnp.dtype(pages.dtype) != jnp.uint8:
        raise TypeError(f"pages must be uint8 with row_packing={row_packing!r}, got {pages.dtype}")
    if row_packing is None:
        as_dtype("pages", pages.dtype, PAGE_DTYPES)


def _check_widths(
    queries: Array,
    pages: StridedPages,
    value_width: int | None,
    row_packing: LatentPacking | TokenHeadRow | None,
) -> None:
    if queries.ndim != 3:
        raise ValueError(f"queries must be [T, heads, K], got shape {queries.shape}")
    (_, heads, key_size), kv_heads, row = queries.shape, pages.kv_heads, pages.width
    if isinstance(row_packing, TokenHeadRow):
        _check_token_heads(key_size, pages, value_width, row_packing)
        kv_heads = row_packing.kv_heads
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(
            f"queries has {heads} heads; wants a multiple of the {kv_heads} KV heads of pages"
        )
    if not pages.tokens:
        raise ValueError("pages has blocks of 0 tokens; wants at least 1")
    if isinstance(row_packing, TokenHeadRow):
        return
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


def _check_token_heads(
    key_size: int, pages: StridedPages, value_width: int | None, row: TokenHeadRow
) -> None:
    check_choice(get_args(TokenHeadPacking), **{"row_packing.packing": row.packing})
    for name, number in row._asdict().items():
        if name != "packing" and _as_count(f"row_packing.{name}", number) is None:
            raise ValueError(f"row_packing.{name}=None must be an int of at least 1")
    if row.is_4_bit and (row.key_width % 2 or row.value_width % 2):
        raise ValueError(f"row_packing={row} has odd widths, of which 4 bits do not fill bytes")
    given = pages.kv_heads, pages.width, key_size, value_width or row.value_width
    if given != (1, row.row_bytes, row.key_width, row.value_width):
        raise ValueError(
            f"queries are {key_size} wide, value_width={value_width} and rows of pages "
            f"{pages.kv_heads} x {pages.width} bytes; with row_packing={row} rows must be "
            f"1 x {row.row_bytes} bytes"
        )


def _check_packed_widths(
    key_size: int, row: int, value_width: int | None, row_packing: LatentPacking
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


def _check_rule(config: Config) -> None:
    limited = config.sliding_window is not None or config.chunk_size is not None
    if limited and (config.ranks > 1 or not config.causal):
        what = "interleaving" if config.ranks > 1 else "causal=False"
        raise ValueError(
            f"{what} does not go with sliding_window or chunk_size; pass one or the other"
        )


def _as_int32(name: str, array: Array, ndim: int, length: int | None = None) -> Array:
    """Returns ids or lengths as a `jax.Array`, after a check of their dtype."""
    dtype, shape = getattr(array, "dtype", type(array).__name__), jnp.shape(array)
    wanted = ["B", "W"][:ndim] if length is None else [str(length)]
    if str(dtype) != "int32" or len(shape) != ndim:
        raise TypeError(f"{name} must be int32[{', '.join(wanted)}], got {dtype}{list(shape)}")
    if length is not None and shape[0] != length:
        raise ValueError(f"{name} must be int32[{length}], got {dtype}{list(shape)}")
    return jnp.asarray(array)


def _as_scale(name: str, scale: Array | float, kv_heads: int) -> Array:
    shape = jnp.shape(scale)
    return jnp.broadcast_to(_as_float(name, scale, shape if shape == () else (kv_heads,)), kv_heads)


def _as_float(name: str, array: Array | float, shape: tuple[int, ...]) -> Array:
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
