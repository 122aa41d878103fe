"""Blocks in page-locked host memory, their copies to and from a pool, and their addresses."""

from jaxkv._src.moving._addresses import block_pieces
from jaxkv._src.moving._host_blocks import HostBlocks, MoveError

__all__ = ["HostBlocks", "MoveError", "block_pieces"]
