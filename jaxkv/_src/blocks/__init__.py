"""Host-side bookkeeping: block ids, requests and their progress, and step uploads. No jax."""

from jaxkv._src.blocks._manager import BlockManager
from jaxkv._src.blocks._pack import TableEntry, list_entries, pack_step
from jaxkv._src.blocks._pool import BlockPool, BlockUse, OutOfBlocksError
from jaxkv._src.blocks._prompts import PrefixHit, PrefixMatch, PrefixStats
from jaxkv._src.blocks._shape import StepShape, Upload

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockUse",
    "OutOfBlocksError",
    "PrefixHit",
    "PrefixMatch",
    "PrefixStats",
    "StepShape",
    "TableEntry",
    "Upload",
    "list_entries",
    "pack_step",
]
