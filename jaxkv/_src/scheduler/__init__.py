"""A ready-made scheduler: the tokens, admissions and preemptions of each step. No jax."""

from jaxkv._src.scheduler._options import Order
from jaxkv._src.scheduler._schedule import Schedule, Wanted
from jaxkv._src.scheduler._scheduler import Scheduler

__all__ = ["Order", "Schedule", "Scheduler", "Wanted"]
