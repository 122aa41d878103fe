"""The cache: block tables and pool as one pytree, and the batch of a step."""

from jaxkv._src.cache._addresses import block_pieces
from jaxkv._src.cache._batch import PAD_ROW, StepBatch
from jaxkv._src.cache._errors import check_errors
from jaxkv._src.cache._expand import expand_blocks
from jaxkv._src.cache._layout import CacheLayout, LayerIndex
from jaxkv._src.cache._make import make_cache, set_scales
from jaxkv._src.cache._slots import PAD_SLOT, GroupBatch, first_columns
from jaxkv._src.cache._state import (
    BAD_BATCH,
    BAD_BLOCK_ID,
    BAD_LAYER_INDEX,
    BAD_LOGICAL_BLOCK,
    BAD_ROW,
    LOST_UPLOAD,
    NO_BLOCK,
    REPEATED_UPLOAD,
    STALE_BATCH,
    TOO_LONG,
    CacheError,
    KVCache,
    check_cache,
    check_layout,
)

__all__ = [
    "BAD_BATCH",
    "BAD_BLOCK_ID",
    "BAD_LAYER_INDEX",
    "BAD_LOGICAL_BLOCK",
    "BAD_ROW",
    "LOST_UPLOAD",
    "NO_BLOCK",
    "PAD_ROW",
    "PAD_SLOT",
    "REPEATED_UPLOAD",
    "STALE_BATCH",
    "TOO_LONG",
    "CacheError",
    "CacheLayout",
    "GroupBatch",
    "KVCache",
    "LayerIndex",
    "StepBatch",
    "block_pieces",
    "check_cache",
    "check_errors",
    "check_layout",
    "expand_blocks",
    "first_columns",
    "make_cache",
    "set_scales",
]
