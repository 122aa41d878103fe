"""Sleep: a cache gives its device memory back for a while, and takes it again."""

from jaxkv._src.sleeping._cache import PARTS, Part, SleepError, SleepingCache, sleep, wake_up
from jaxkv._src.sleeping._closed_over import ClosedOverError, check_not_closed_over
from jaxkv._src.sleeping._template import CacheTemplate

__all__ = [
    "PARTS",
    "CacheTemplate",
    "ClosedOverError",
    "Part",
    "SleepError",
    "SleepingCache",
    "check_not_closed_over",
    "sleep",
    "wake_up",
]
