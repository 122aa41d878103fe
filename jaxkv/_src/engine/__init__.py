"""An engine that generates tokens with a model, and its sampler."""

from jaxkv._src.engine._engine import Engine
from jaxkv._src.engine._sampling import Output, Sampling, Stats

__all__ = ["Engine", "Output", "Sampling", "Stats"]
