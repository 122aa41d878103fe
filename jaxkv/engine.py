"""Results of a `jaxkv.Engine`: an `Output` for each sample, and the `Stats` of its steps."""

from jaxkv._src.engine import Output, Stats

__all__ = ["Output", "Stats"]
