"""Plans: groups of layers, the layout of a block, the blocks of a pool, and its capacity. No jax.

The memory budget is an argument; no device is probed. Everything is counted in blocks, because
blocks are what the allocator hands out. Block 0 is the null block: it is never handed out, and
pads block tables.

All groups draw block ids from one pool and a block belongs to one group at a time, so layers
of different groups can overlay each other: the group that owns a block decides the meaning of
its bytes.
"""

from jaxkv.planning._admission import KVCacheCapacityError, admit
from jaxkv.planning._grouping import Grouping, GroupingFigures, make_groups
from jaxkv.planning._layout import Group, LayerPlacement, PoolLayout, PoolTensor, make_layout
from jaxkv.planning._pages import hybrid_block_size, unify_pages
from jaxkv.planning._plan import Plan, ZeroPolicy
from jaxkv.planning._plan_cache import plan_cache
from jaxkv.planning._workers import WorkerLayers

__all__ = [
    "Group",
    "Grouping",
    "GroupingFigures",
    "KVCacheCapacityError",
    "LayerPlacement",
    "Plan",
    "PoolLayout",
    "PoolTensor",
    "WorkerLayers",
    "ZeroPolicy",
    "admit",
    "hybrid_block_size",
    "make_groups",
    "make_layout",
    "plan_cache",
    "unify_pages",
]
