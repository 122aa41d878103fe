"""Calls by names that a function does not have: what to write instead. No jax."""

import functools
import inspect
from collections.abc import Callable, Mapping

from jaxkv._src.internal.text import shown

NONE: Mapping[str, str] = {}


def knows_remedies[**P, R](
    remedies: Mapping[str, str] = NONE,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function, or ``__init__``, say what to write for options that it does not have.

    Args:
      remedies: what to do instead, by options of other engines.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = inspect.unwrap(function).__code__  # a signature would take long at import
        count = code.co_argcount
        first = code.co_varnames[:count]
        options = code.co_varnames[count:][: code.co_kwonlyargcount]
        title = getattr(function, "__qualname__", "").removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in first and name not in options:
                    remedy = remedies.get(name, f"its options are {', '.join(options)}")
                    raise TypeError(f"{title} has no option {name}={shown(value)}; {remedy}")
            if named := dict(zip(options, args[len(first) :], strict=False)):
                written = ", ".join(f"{name}={shown(value)}" for name, value in named.items())
                raise TypeError(f"{title} takes its options by name; write {written}")
            return function(*args, **kwargs)

        return call

    return decorate
