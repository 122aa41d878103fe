"""Host-side bookkeeping: block ids, requests and their progress, and step uploads. No jax.

`BlockManager` holds the authoritative block tables, and the device follows its uploads. A serving
loop calls `BlockManager.step` once per step, and `BlockManager.finish` for requests that end.
"""

from jaxkv.blocks._manager import BlockManager
from jaxkv.blocks._pack import TableEntry, list_entries, pack_step
from jaxkv.blocks._pool import BlockPool, BlockUse, OutOfBlocksError
from jaxkv.blocks._prompts import FoundPrefix, PrefixHit, PrefixStats
from jaxkv.blocks._shape import StepShape, Upload

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockUse",
    "FoundPrefix",
    "OutOfBlocksError",
    "PrefixHit",
    "PrefixStats",
    "StepShape",
    "TableEntry",
    "Upload",
    "list_entries",
    "pack_step",
]
