"""A step as a model sees it, and an engine that generates tokens with a model."""

from jaxkv._src.engine._context import StepContext
from jaxkv._src.engine._engine import Engine
from jaxkv._src.engine._sampling import Output, Sampling, Stats

__all__ = ["Engine", "Output", "Sampling", "Stats", "StepContext"]
