"""A step as a model sees it, and an engine that generates tokens with a model."""

from jaxkv._src.engine._context import StepContext

__all__ = ["StepContext"]
