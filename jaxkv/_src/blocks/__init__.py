"""Host-side bookkeeping: block ids, requests and their progress. No jax."""

from jaxkv._src.blocks._manager import BlockManager
from jaxkv._src.blocks._pool import BlockPool, BlockUse, OutOfBlocksError
from jaxkv._src.blocks._prompts import PrefixHit, PrefixMatch, PrefixStats
from jaxkv._src.blocks._resuming import ExportedBlocks
from jaxkv._src.blocks._rows import RowWork

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockUse",
    "ExportedBlocks",
    "OutOfBlocksError",
    "PrefixHit",
    "PrefixMatch",
    "PrefixStats",
    "RowWork",
]
