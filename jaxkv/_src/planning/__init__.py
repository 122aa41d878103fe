"""Plans: groups of layers, the layout of a block, and the blocks of a pool. No jax."""

from jaxkv._src.planning._admission import KVCacheCapacityError, admit
from jaxkv._src.planning._grouping import Grouping, GroupingFigures, make_groups
from jaxkv._src.planning._layout import Group, LayerPlacement, PoolLayout, PoolTensor, make_layout
from jaxkv._src.planning._longest import longest_model_len
from jaxkv._src.planning._pages import hybrid_block_size, unify_pages
from jaxkv._src.planning._plan import (
    Plan,
    ZeroPolicy,
    check_rows,
    checked_encoder_tokens,
    pool_bytes,
    stores_encoder_tokens,
)
from jaxkv._src.planning._plan_cache import plan_cache
from jaxkv._src.planning._workers import WorkerLayers

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
    "check_rows",
    "checked_encoder_tokens",
    "hybrid_block_size",
    "longest_model_len",
    "make_groups",
    "make_layout",
    "plan_cache",
    "pool_bytes",
    "stores_encoder_tokens",
    "unify_pages",
]
