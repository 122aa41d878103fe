"""Host-side bookkeeping: block ids, requests and their progress, and step uploads. No jax.

`BlockManager` has the authoritative block tables, and the device follows its uploads. A serving
loop calls `BlockManager.step` once per step, and `BlockManager.finish` for requests that end.

Its methods return these: `PrefixHit` from ``start``, `Upload` from ``step``, `ExportedBlocks` from
``export_blocks``; with host memory, `Transfers` of a `Chunk` each for `jaxkv.HostBlocks`, and
`OffloadStats`.
"""

from jaxkv._src.blocks import ExportedBlocks, PrefixHit
from jaxkv._src.offload import Chunk, OffloadStats, Transfers
from jaxkv._src.uploads import Upload

__all__ = [
    "Chunk",
    "ExportedBlocks",
    "OffloadStats",
    "PrefixHit",
    "Transfers",
    "Upload",
]
