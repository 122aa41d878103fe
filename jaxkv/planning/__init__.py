"""How many blocks a memory budget gives, how long a request fits, how many fit at once.

Knows groups, bytes and blocks. Takes the budget as an argument and never probes a
device; knows nothing of arrays or requests, and never imports jax.

Everything is counted in blocks, because blocks are what the allocator hands out: a
budget in bytes that ignores rounding or the null block admits requests which then wait
for ever. Block 0 is the null block: reserved, never handed out, the padding of tables.
"""

from jaxkv.planning._plan import (
    MAX_SLOTS,
    NULL_BLOCKS,
    KVCacheCapacityError,
    Plan,
    WorkerLayers,
    longest_admitted,
)
from jaxkv.planning._plan_cache import plan_cache

__all__ = [
    "MAX_SLOTS",
    "NULL_BLOCKS",
    "KVCacheCapacityError",
    "Plan",
    "WorkerLayers",
    "longest_admitted",
    "plan_cache",
]
