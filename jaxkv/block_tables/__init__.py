"""Block tables on the device: immutable state, jit-safe functions, no host sync.

Knows rows, groups and block ids. Knows nothing of who owns a block (`jaxkv.blocks`) or
of the bytes in it (`jaxkv.pool`).

Every operation is jitted, ``state -> state``, and leaves its argument valid; inside your
own ``jit`` it becomes part of it, and there you may donate the tables. Rows and ids that
are out of range never clamp or wrap: what they ask for is dropped whole, and a bit of
`BlockTables.overflow` remembers it until `check_overflow` raises it on the host.
"""

from jaxkv.block_tables._read import expand_blocks as expand_blocks
from jaxkv.block_tables._read import gather_block_tables as gather_block_tables
from jaxkv.block_tables._read import map_slots as map_slots
from jaxkv.block_tables._state import BAD_BLOCK_ID as BAD_BLOCK_ID
from jaxkv.block_tables._state import BAD_RANK as BAD_RANK
from jaxkv.block_tables._state import BAD_ROW as BAD_ROW
from jaxkv.block_tables._state import DUPLICATE as DUPLICATE
from jaxkv.block_tables._state import MISPLACED as MISPLACED
from jaxkv.block_tables._state import NO_BLOCK as NO_BLOCK
from jaxkv.block_tables._state import PAD_ROW as PAD_ROW
from jaxkv.block_tables._state import PAD_SLOT as PAD_SLOT
from jaxkv.block_tables._state import ROW_FULL as ROW_FULL
from jaxkv.block_tables._state import TOO_NARROW as TOO_NARROW
from jaxkv.block_tables._state import BlockTableError as BlockTableError
from jaxkv.block_tables._state import BlockTables as BlockTables
from jaxkv.block_tables._state import TableGroup as TableGroup
from jaxkv.block_tables._state import check_overflow as check_overflow
from jaxkv.block_tables._state import make_block_tables as make_block_tables
from jaxkv.block_tables._update import TableEntries as TableEntries
from jaxkv.block_tables._update import append_block_ids as append_block_ids
from jaxkv.block_tables._update import move_rows as move_rows
from jaxkv.block_tables._update import release_rows as release_rows
from jaxkv.block_tables._update import swap_rows as swap_rows
