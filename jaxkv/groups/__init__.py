"""Layers -> groups that share a block table -> the layout of one pool.

Knows how layers of different kinds are cut into groups and which layers lie on the
same bytes. Knows nothing of memory sizes, requests or arrays, and never imports jax.

All groups draw block ids from one pool, and a block belongs to one group at a time, so
layers of different groups can overlay each other: the bytes of a block mean whatever
the group that owns it says. A pool is a row of *slots*; a slot holds one page per block.

- Pages of one size: layer ``i`` of every group lives in slot ``i``.
- One group: every layer has a slot of its own width.
- Several groups of mixed pages: one slot, in which each group packs its layers.
"""

from jaxkv.groups._grouping import GROUPINGS, make_groups
from jaxkv.groups._layout import Group, Place, PoolLayout, Slot, make_layout
from jaxkv.groups._pages import Layers, hybrid_block_size, unify_pages

__all__ = [
    "GROUPINGS",
    "Group",
    "Layers",
    "Place",
    "PoolLayout",
    "Slot",
    "hybrid_block_size",
    "make_groups",
    "make_layout",
    "unify_pages",
]
