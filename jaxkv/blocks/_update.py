"""What the host tells the device once per step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """New ids for one row of one group: appended, or replacing the row's content."""

    row: int
    group: int
    block_ids: tuple[int, ...]
    overwrite: bool = False


@dataclasses.dataclass(frozen=True)
class TableUpdate:
    """What one step changes: table entries, and per group the fresh ids to zero."""

    entries: tuple[TableEntry, ...]
    zero_ids: tuple[tuple[int, ...], ...]
