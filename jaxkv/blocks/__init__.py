"""Host bookkeeping: who holds which block, and what the device must be told.

Knows block ids, requests, groups and growth. Knows nothing of bytes or arrays and
never imports jax. Where `jaxkv.block_tables` is the device's picture of the tables,
this module is the truth that the picture is drawn from.

A serving loop calls, per step: `BlockManager.grow` for every scheduled request,
`BlockManager.finish` for every one that ends or is preempted, and then
`BlockManager.take_update` once for all that the device has to learn.
"""

from jaxkv.blocks._manager import ZERO_POLICIES, BlockManager
from jaxkv.blocks._pool import NULL_BLOCK, BlockPool, OutOfBlocksError
from jaxkv.blocks._update import TableEntry, TableUpdate

__all__ = [
    "NULL_BLOCK",
    "ZERO_POLICIES",
    "BlockManager",
    "BlockPool",
    "OutOfBlocksError",
    "TableEntry",
    "TableUpdate",
]
