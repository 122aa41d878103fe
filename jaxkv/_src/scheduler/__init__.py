"""A ready-made scheduler: the tokens, admissions and preemptions of each step. No jax."""

from jaxkv._src.scheduler._scheduler import Order, Scheduler
from jaxkv._src.scheduler._step import Schedule

__all__ = ["Order", "Schedule", "Scheduler"]
