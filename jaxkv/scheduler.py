"""A ready-made scheduler: the tokens, admissions and preemptions of each step. No jax."""

from jaxkv._src.scheduler import (
    Order,
    Schedule,
)

__all__ = [
    "Order",
    "Schedule",
]
