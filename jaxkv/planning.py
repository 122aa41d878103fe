"""Plans: groups of layers, the layout of a block, the blocks of a pool, and its capacity. No jax.

The memory budget is an argument; no device is probed. Everything is counted in blocks, because
blocks are what the allocator gives. Block 0 is the null block: it is never allocated, and
pads block tables.

All groups draw block ids from one pool and a block belongs to one group at a time, so layers
of different groups can overlay each other: the group that owns a block decides the meaning of
its bytes.
"""

from jaxkv._src.planning import (
    Group,
    PoolLayout,
    ZeroPolicy,
    hybrid_block_size,
    longest_model_len,
    make_groups,
    make_layout,
    pool_bytes,
)

__all__ = [
    "Group",
    "PoolLayout",
    "ZeroPolicy",
    "hybrid_block_size",
    "longest_model_len",
    "make_groups",
    "make_layout",
    "pool_bytes",
]
