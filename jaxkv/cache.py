"""The cache: block tables and pool as one pytree, and the batch of a step.

A `KVCache` carries the layout of its plan, its kernel block sizes and its mesh, so functions that
take a cache need none of them as arguments: they look up a layer's group by its name, and find the
blocks to use in the step's batch.
"""

from jaxkv._src.cache import (
    BAD_BATCH,
    BAD_BLOCK_ID,
    BAD_LAYER_INDEX,
    BAD_LOGICAL_BLOCK,
    BAD_ROW,
    LOST_UPLOAD,
    NO_BLOCK,
    PAD_ROW,
    PAD_SLOT,
    REPEATED_UPLOAD,
    STALE_BATCH,
    TOO_LONG,
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
]
