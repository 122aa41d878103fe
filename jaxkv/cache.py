"""The cache: block tables and pool as one pytree, and the batch of a step.

A `KVCache` carries the layout of its plan, its kernel block sizes and its mesh, so functions that
take a cache need none of them as arguments: they look up a layer's group by its name, and find the
blocks to use in the step's batch.
"""

from jaxkv._src.cache import PAD_ROW, PAD_SLOT, CacheFlags

__all__ = [
    "PAD_ROW",
    "PAD_SLOT",
    "CacheFlags",
]
