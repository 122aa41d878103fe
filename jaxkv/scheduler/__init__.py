"""A scheduler to take along: who computes how many tokens, who starts, who gives way. No jax."""

from jaxkv.scheduler._scheduler import Order, Scheduler
from jaxkv.scheduler._step import Schedule

__all__ = ["Order", "Schedule", "Scheduler"]
