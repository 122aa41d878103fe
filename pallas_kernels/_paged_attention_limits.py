"""Limits of the Mosaic GPU kernels of `paged_attention`. Needs no Mosaic."""

from jax import Array

MAX_WIDTH = 256  # of keys and of values
MAX_GROUP = 64  # rows of the queries of one token
GRANULE = 8  # rows that a copy of a page has at least


def why_not_paged_attention(queries: Array, pages: Array) -> str | None:
    """Returns why the Mosaic kernels do not take such arrays; None where they do.

    For callers with a fallback of their own: `paged_attention` itself asks here, and raises or
    falls back.

    Args:
      queries, pages: as of `paged_attention`, or anything with their shapes and dtypes.
    """
    if queries.dtype.itemsize != 2:
        return f"queries are {queries.dtype}, and the kernels take bfloat16 and float16"
    if pages.dtype.itemsize != 1 and pages.dtype != queries.dtype:
        return (
            f"pages are {pages.dtype} and queries {queries.dtype}: 16-bit pages must be as "
            "queries are"
        )
    return _why_not_shape(queries.shape, pages.shape)


def _why_not_shape(queries: tuple[int, ...], pages: tuple[int, ...]) -> str | None:
    (_, heads, key_width), (_, tokens, kv_heads, row) = queries, pages
    value_width, group = row - key_width, heads // kv_heads
    if key_width % 64 or value_width % 64:
        return (
            f"keys are {key_width} wide and values {value_width}, and the kernels take multiples "
            "of 64"
        )
    if max(key_width, value_width) > MAX_WIDTH:
        return f"keys or values are wider than {MAX_WIDTH}"
    if group > MAX_GROUP:
        return f"a KV head has {group} query heads, and the kernels take {MAX_GROUP}"
    if tokens % GRANULE:
        return f"pages have {tokens} tokens, and the kernels take multiples of {GRANULE}"
    return None
