"""Bookkeeping of blocks in host memory, and their transfers in each step. No jax."""

from jaxkv._src.offload._host_pool import HostBlockPool, chunk_sizes
from jaxkv._src.offload._manager import OffloadManager
from jaxkv._src.offload._memory import HostMemory
from jaxkv._src.offload._transfers import Chunk, OffloadStats, Transfers

__all__ = [
    "Chunk",
    "HostBlockPool",
    "HostMemory",
    "OffloadManager",
    "OffloadStats",
    "Transfers",
    "chunk_sizes",
]
