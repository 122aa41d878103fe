"""Plans: groups of layers, the layout of a block, the blocks of a pool, and its capacity. No jax.

The memory budget is an argument; no device is probed. Everything is counted in blocks, because
blocks are what the allocator gives. Block 0 is the null block: it is never allocated, and
pads block tables.

All groups draw block ids from one pool and a block belongs to one group at a time, so layers
of different groups can overlay each other: the group that owns a block decides the meaning of
its bytes.

`jaxkv.plan_cache` does all of this: `make_groups` divides the layers, and a `PoolLayout` per worker
says where each `Group` lies in a block. `pool_bytes` are the bytes of the pool, and `memory_for`
what weights leave of a GPU for it.
"""

from jaxkv._src.gpu_memory import memory_for
from jaxkv._src.planning import (
    Group,
    PoolLayout,
    make_groups,
    pool_bytes,
)

__all__ = [
    "Group",
    "PoolLayout",
    "make_groups",
    "memory_for",
    "pool_bytes",
]
