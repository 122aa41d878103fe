"""A table of requests at once, by dtype of keys and values and by block size. No jax."""

import dataclasses
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from jaxkv._src.cli.amounts import gib
from jaxkv._src.cli.costs import attention_dtypes, bytes_per_request
from jaxkv._src.cli.question import Question, answer
from jaxkv._src.cli.tries import BLOCK_SIZES
from jaxkv._src.specs import canonical_dtype

DTYPES = "bf16", "fp8_e4m3", "nvfp4"
COLUMN = 15


def cells(question: Question) -> list[dict[str, Any]]:
    """Returns the figures of every dtype, the model's own first, and of every block size.

    A cell has 0 requests if the plan holds none of that length, and None if the model cannot have
    that dtype or block size.
    """
    length = question.request_len or answer(question).longest
    sizes = sorted({*BLOCK_SIZES, question.block_size or BLOCK_SIZES[0]})
    return [_cell(question, d, size, length) for d in _dtypes(question) for size in sizes]


def _dtypes(question: Question) -> list[str]:
    own = attention_dtypes(question.layers())[:1]
    return list(dict.fromkeys([*own, *map(canonical_dtype, DTYPES)]))


def _cell(question: Question, dtype: str, block_size: int, length: int) -> dict[str, Any]:
    changed = dataclasses.replace(question, kv_dtype=dtype, block_size=block_size)
    then, asked = answer(changed), {"kv_dtype": dtype, "block_size": block_size}
    if then.plan is None:
        return asked | {"request_len": length, "requests": None, "bytes_per_request": None}
    requests = then.plan.requests_that_fit(length) if then.admitted else 0
    size = bytes_per_request(then.plan, length)
    return asked | {"request_len": length, "requests": requests, "bytes_per_request": size}


def table(question: Question) -> str:
    """Returns the cells as text: requests at once and, in brackets, the GiB of each.

    Block sizes that make no difference share a column.
    """
    found = cells(question)
    rows: dict[str, list[str]] = {}
    for cell in found:
        text = "-"
        if cell["requests"] is not None:
            text = f"{cell['requests']:,} ({cell['bytes_per_request'] / 2**30:.3g})"
        rows.setdefault(cell["kv_dtype"], []).append(text)
    sizes = list(dict.fromkeys(str(cell["block_size"]) for cell in found))
    room = gib(min(question.memory_bytes))
    columns = zip(sizes, zip(*rows.values(), strict=True), strict=True)
    alike = [(list(group), texts) for texts, group in groupby(columns, key=lambda pair: pair[1])]
    sizes = [same[0][0] + (f" to {same[-1][0]}" if same[1:] else "") for same, _ in alike]
    rows = {name: [texts[i] for _, texts in alike] for i, name in enumerate(rows)}
    head = f"requests of {found[0]['request_len']:,} tokens at once in {room} (GiB of one)"
    lines = [head, _line("block size", sizes), *(_line(name, row) for name, row in rows.items())]
    return "\n".join(lines)


def _line(name: str, texts: Iterable[str]) -> str:
    return (f"{name:<16} " + "".join(f"{text:<{COLUMN}}" for text in texts)).rstrip()
