"""``jax.jit`` that refuses integers which are not int32 instead of truncating them.

jit turns NumPy's int64 into int32 before the function sees it, and 2**32 + 7 into 7. Silently
truncated ids are exactly the bug that this package exists to prevent.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

from jaxkv._src.internal.checks import check_int32, check_kind, check_positive


class JittedInt32[**P, R]:
    """A jitted function that first checks that named arguments are int32, and ints positive.

    ``lower``, ``trace`` and the like are those of `jax.jit`. They are not attributes of a plain
    function, because a ``jit`` around it would copy them and lose its own.
    """

    def __init__(self, function: Callable[P, R], names: tuple[str, ...], options: dict[str, Any]):
        functools.update_wrapper(self, function)
        self._jitted = jax.jit(function, **options)
        parameters = inspect.signature(function).parameters
        self._parameters = [
            (name, index, parameter.annotation, name in names)
            for index, (name, parameter) in enumerate(parameters.items())
        ]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for name, index, wanted, is_int32 in self._parameters:
            value: Any = args[index] if index < len(args) else kwargs.get(name)
            if dataclasses.is_dataclass(wanted):
                check_kind(wanted, **{name: value})
            if wanted is int:  # static
                check_positive(**{name: value})
            if not is_int32:
                continue
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            of_fields = {f"{name}.{f.name}": getattr(value, f.name) for f in fields}
            check_int32(**(of_fields or {name: value}))
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a function; `help` therefore shows it as one."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._jitted, name)


def jit_int32[**P, R](
    *names: str, **jit_options: Any
) -> Callable[[Callable[P, R]], JittedInt32[P, R]]:
    """Returns a decorator: `jax.jit` with options, and int32 checks on the named arguments."""

    def decorate(function: Callable[P, R]) -> JittedInt32[P, R]:
        return JittedInt32(function, names, jit_options)

    return decorate
