"""Host-side bookkeeping: block ids, requests and their progress, and step uploads. No jax.

`BlockManager` holds the authoritative block tables, and the device follows its uploads. A serving
loop calls `BlockManager.step` once per step, and `BlockManager.finish` for requests that end.
"""

from jaxkv._src.blocks import HandedBlocks, PrefixHit
from jaxkv._src.tier import Chunk, Moves, TierStats
from jaxkv._src.uploads import Upload

__all__ = [
    "Chunk",
    "HandedBlocks",
    "Moves",
    "PrefixHit",
    "TierStats",
    "Upload",
]
