"""What the host tells the device once per step."""

from collections.abc import Sequence
from typing import NamedTuple


class TableEntry(NamedTuple):
    """New ids for one row, per group: appended, or replacing all that the row holds."""

    row: int
    block_ids: Sequence[Sequence[int]]
    overwrite: bool = False


class TableUpdate(NamedTuple):
    """What one step changes: table entries, and per group the fresh ids to zero."""

    entries: Sequence[TableEntry]
    zero_ids: Sequence[Sequence[int]]
