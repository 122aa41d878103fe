"""Calls of kernels whose records are given by their fields."""

import dataclasses
from typing import Any

from pallas_kernels import AttentionRule, RequestPages, paged_attention

OF_REQUESTS, OF_RULE = (
    {field.name for field in dataclasses.fields(record)} for record in (RequestPages, AttentionRule)
)


def attend(
    queries: Any, pages: Any, block_tables: Any, seq_lens: Any, starts: Any = None, **options: Any
) -> Any:
    """Calls `paged_attention` with requests and a rule of these fields."""
    of_requests = {name: options.pop(name) for name in OF_REQUESTS & {*options}}
    rule = AttentionRule(**{name: options.pop(name) for name in OF_RULE & {*options}})
    of_requests.setdefault("query_start_loc", starts)
    requests = RequestPages(block_tables, seq_lens, **of_requests)
    return paged_attention(queries, pages, requests, rule, **options)
