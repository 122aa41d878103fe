"""``jax.jit`` for functions over int32 ids: what is not int32 is refused, not cut down.

jit turns NumPy's int64 into int32 before the function sees it, and 2**32 + 7 into 7. Ids
that silently become other ids are what this package is there to prevent.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxkv.checks import check_int32


def jit_int32[**P, R](
    *names: str, **jit_options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Jits a function with these options and checks, before jax converts them, that the
    named arguments are arrays of int32 (or tuples of such)."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        jitted = jax.jit(function, **jit_options)
        parameters = list(inspect.signature(function).parameters)
        places = [(name, parameters.index(name)) for name in names]

        @functools.wraps(jitted)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, place in places:
                value = args[place] if place < len(args) else kwargs.get(name)
                fields = value._asdict() if hasattr(value, "_asdict") else {}
                arrays = all(hasattr(field, "dtype") for field in fields.values())
                check_int32(**(fields if fields and arrays else {name: value}))
            return jitted(*args, **kwargs)

        return checked

    return decorate
