"""Functions of the block tables: append, gather. Pure, jitted, without a host sync.

Rows and ids that are out of range never clamp or wrap: what they ask for is dropped, and an
error flag of the cache remembers it until `jaxkv.check_errors` raises it on the host.
"""

from jaxkv._src.block_tables._append import (
    TableEntries,
    append_block_ids,
    pack_entries,
    report,
)
from jaxkv._src.block_tables._gather import gather_batch

__all__ = [
    "TableEntries",
    "append_block_ids",
    "gather_batch",
    "pack_entries",
    "report",
]
