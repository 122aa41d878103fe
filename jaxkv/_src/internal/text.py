"""Values as text: byte counts for plans and pictures, what was given for errors. No jax."""

from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 80  # characters


def shown(value: Any) -> str:
    """Returns the text of a value for an error, on one line; only the beginning of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def readable(num_bytes: int) -> str:
    """Returns bytes as ``1,536 B`` or ``1.50 MiB``: exact below 10 KiB, else two decimals."""
    if num_bytes < 10 * 2**10:
        return f"{num_bytes:,} B"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes / 2**10:.2f} KiB"


def gib(num_bytes: float) -> str:
    """Returns bytes as ``"6.04 GiB"``, with two significant digits below 0.1 GiB."""
    size = num_bytes / 2**30
    return f"{size:,.2f} GiB" if size >= 0.1 or not size else f"{size:.2g} GiB"


def describe_unused(unused: Sequence[int]) -> str:
    """Returns a text on the bytes of a block that carry no data, given per group."""
    least, most = min(unused, default=0), max(unused, default=0)
    if most == 0:
        return "all used"
    return f"{most:,} unused" if least == most else f"{least:,} to {most:,} unused, by group"
