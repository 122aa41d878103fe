"""The cache: block tables and pool as one pytree, and the batch of a step."""

from jaxkv._src.cache._addresses import describe_blocks
from jaxkv._src.cache._batch import StepBatch
from jaxkv._src.cache._expand import expand_blocks
from jaxkv._src.cache._flags import CacheError, CacheFlags
from jaxkv._src.cache._layout import CacheLayout, LayerIndex
from jaxkv._src.cache._make import make_cache, set_scales
from jaxkv._src.cache._requests import PAD_ROW, BatchRequests
from jaxkv._src.cache._slots import PAD_SLOT, GroupBatch
from jaxkv._src.cache._state import KVCache, check_cache, check_errors, check_layout

__all__ = [
    "PAD_ROW",
    "PAD_SLOT",
    "BatchRequests",
    "CacheError",
    "CacheFlags",
    "CacheLayout",
    "GroupBatch",
    "KVCache",
    "LayerIndex",
    "StepBatch",
    "check_cache",
    "check_errors",
    "check_layout",
    "describe_blocks",
    "expand_blocks",
    "make_cache",
    "set_scales",
]
