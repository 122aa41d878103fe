"""The books of blocks in host memory: which are there, and which move in a step. No jax."""

from jaxkv._src.tier._books import HostTier
from jaxkv._src.tier._memory import HostMemory
from jaxkv._src.tier._moves import Chunk, Moves, TierStats
from jaxkv._src.tier._room import HostRoom, chunk_sizes

__all__ = ["Chunk", "HostMemory", "HostRoom", "HostTier", "Moves", "TierStats", "chunk_sizes"]
