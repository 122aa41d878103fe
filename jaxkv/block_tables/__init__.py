"""Block tables on the device: immutable state, jit-safe functions, no host sync.

Knows rows, groups and block ids. Knows nothing of who owns a block (`jaxkv.blocks`) or
of the bytes in it (`jaxkv.pool`).

Every operation is jitted, ``state -> state``, and leaves its argument valid; inside your
own ``jit`` it becomes part of it, and there you may donate the tables. Rows and ids that
are out of range never clamp or wrap: what they ask for is dropped whole, and a bit of
`BlockTables.overflow` remembers it until `check_overflow` raises it on the host.
"""

from jaxkv.block_tables._read import expand_blocks, gather_block_tables, map_slots
from jaxkv.block_tables._state import (
    BAD_BLOCK_ID,
    BAD_RANK,
    BAD_ROW,
    DUPLICATE,
    MISPLACED,
    NO_BLOCK,
    PAD_ROW,
    PAD_SLOT,
    ROW_FULL,
    TOO_NARROW,
    BlockTableError,
    BlockTables,
    TableGroup,
    check_overflow,
    make_block_tables,
)
from jaxkv.block_tables._update import (
    TableEntries,
    append_block_ids,
    move_rows,
    release_rows,
    swap_rows,
)

__all__ = [
    "BAD_BLOCK_ID",
    "BAD_RANK",
    "BAD_ROW",
    "DUPLICATE",
    "MISPLACED",
    "NO_BLOCK",
    "PAD_ROW",
    "PAD_SLOT",
    "ROW_FULL",
    "TOO_NARROW",
    "BlockTableError",
    "BlockTables",
    "TableEntries",
    "TableGroup",
    "append_block_ids",
    "check_overflow",
    "expand_blocks",
    "gather_block_tables",
    "make_block_tables",
    "map_slots",
    "move_rows",
    "release_rows",
    "swap_rows",
]
