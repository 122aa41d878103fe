"""Blocks in page-locked host memory, and their copies to and from a pool."""

from jaxkv._src.moving._host_blocks import HostBlocks, MoveError

__all__ = ["HostBlocks", "MoveError"]
