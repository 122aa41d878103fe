"""A ready-made scheduler: the tokens, admissions and preemptions of each step. No jax."""

from jaxkv._src.scheduler import (
    Schedule,
)

__all__ = [
    "Schedule",
]
