"""Errors that the device found, raised on the host."""

from typing import ClassVar, Protocol

from jax import Array

from jaxkv._src.internal.checks import FlagsError, check_known


class Flagged(Protocol):
    """State in which jitted functions set error flags, such as a cache or page lists."""

    error: ClassVar[type[FlagsError]]

    @property
    def error_flags(self) -> Array: ...


def check_errors(state: Flagged) -> None:
    """Raises an error if a jitted function dropped anything since the state was made.

    Waits for the device, so call it every hundred steps or so, not in every step::

        jaxkv.check_errors(cache)

    Args:
      state: a `KVCache`, or the page lists of `jaxkv.attention`.

    Raises:
      CacheError, PageListError: at least one error flag is set; the message explains each.
      TypeError: a state without error flags.
    """
    if not hasattr(type(state), "error"):
        raise TypeError(f"state must be a cache or page lists, got {type(state).__name__}")
    check_known(state=state.error_flags)
    flags = int(state.error_flags)
    if flags:
        raise type(state).error(flags)
