"""An engine that generates tokens with a model, and its sampler."""

from jaxkv._src.engine._drafts import Drafter, NgramDrafts
from jaxkv._src.engine._engine import Engine
from jaxkv._src.engine._model import ModelOutput
from jaxkv._src.engine._outputs import Output, Stats, TopLogprobs
from jaxkv._src.engine._sampling import Sampling

__all__ = [
    "Drafter",
    "Engine",
    "ModelOutput",
    "NgramDrafts",
    "Output",
    "Sampling",
    "Stats",
    "TopLogprobs",
]
