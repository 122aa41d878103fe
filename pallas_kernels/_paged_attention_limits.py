"""Limits of the Mosaic GPU kernels of `paged_attention`. Needs no Mosaic."""

from pallas_kernels._paged_attention_tiles import AttentionArrays, AttentionRule

MAX_WIDTH = 256  # of keys and of values
MAX_GROUP = 64  # rows of the queries of one token
GRANULE = 8  # rows that a copy of a page has at least


def why_not_mosaic(arrays: AttentionArrays, rule: AttentionRule) -> str | None:
    """Returns why the Mosaic kernels do not take these arguments; None when they do."""
    queries, pages = arrays.queries.dtype, arrays.pages.dtype
    if queries.itemsize != 2:
        return f"queries are {queries}, and the kernels take bfloat16 and float16"
    if pages.itemsize != 1 and pages != queries:
        return f"pages are {pages} and queries {queries}: 16-bit pages must be as queries are"
    return _why_not_shape(rule)


def _why_not_shape(rule: AttentionRule) -> str | None:
    if rule.key_width % 64 or rule.value_width % 64:
        return (
            f"keys are {rule.key_width} wide and values {rule.value_width}, and the kernels take "
            "multiples of 64"
        )
    if max(rule.key_width, rule.value_width) > MAX_WIDTH:
        return f"keys or values are wider than {MAX_WIDTH}"
    if rule.group > MAX_GROUP:
        return f"a KV head has {rule.group} query heads, and the kernels take {MAX_GROUP}"
    if rule.page_tokens % GRANULE:
        return f"pages have {rule.page_tokens} tokens, and the kernels take multiples of {GRANULE}"
    return None
