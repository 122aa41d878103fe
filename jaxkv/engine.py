"""Outputs of `jaxkv.Engine`, and its counts."""

from jaxkv._src.engine import Output, Stats

__all__ = ["Output", "Stats"]
