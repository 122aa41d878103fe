"""What the host tells the device once per step."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_IDS = 8  # of a group that a repr shows


class TableEntry(NamedTuple):
    """New ids for one row, per group: appended, or replacing all that the row holds."""

    row: int
    block_ids: Sequence[Sequence[int]]
    overwrite: bool = False

    def __repr__(self) -> str:
        ids = "; ".join(map(_short, self.block_ids))
        return f"TableEntry(row={self.row}, {'overwrite' if self.overwrite else 'append'} {ids})"


class TableUpdate(NamedTuple):
    """What one step changes: table entries, and per group the fresh ids to zero."""

    entries: Sequence[TableEntry]
    zero_ids: Sequence[Sequence[int]]

    def __repr__(self) -> str:
        ids = sum(len(group) for entry in self.entries for group in entry.block_ids)
        zeroed = "; ".join(map(_short, self.zero_ids))
        return f"TableUpdate(entries: {len(self.entries)}, ids: {ids}, zero: {zeroed})"


def _short(ids: Sequence[int]) -> str:
    """The ids of a group, of many the first ones and how many they are."""
    shown = ", ".join(map(str, ids[:MAX_IDS]))
    return f"[{shown}]" if len(ids) <= MAX_IDS else f"[{shown}, ... {len(ids)} ids]"
