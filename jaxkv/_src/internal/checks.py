"""Refusals that name the argument, the value given and the value wanted. No jax."""

import dataclasses
import functools
import numbers
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeGuard

from jaxkv._src.internal.text import shown


def _is_foreign_int(value: object) -> TypeGuard[numbers.Integral]:
    """Returns whether a value is an int of NumPy's, say; without an import of NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, int)


def plain_ints[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Converts NumPy's ints among a function's arguments to Python's, because 32 bits overflow."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        numpy_ints: Any = {k: int(v) for k, v in kwargs.items() if _is_foreign_int(v)}
        kwargs.update(numpy_ints)
        plain: Any = [int(one) if _is_foreign_int(one) else one for one in args]
        return function(*plain, **kwargs)

    return call


def make_ints_plain(data: Any) -> None:
    """Makes NumPy's ints in the fields of a frozen dataclass Python's; see `plain_ints`."""
    for field in dataclasses.fields(data):
        if _is_foreign_int(value := getattr(data, field.name)):
            object.__setattr__(data, field.name, int(value))


def check_not_masked(**values: Any) -> None:
    """Raises TypeError for the first value that is a masked array, whose mask would be lost."""
    numpy = sys.modules.get("numpy")  # which has made what there is of these
    for name, value in values.items():
        if numpy is not None and isinstance(value, numpy.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array; pass {name}.compressed(), without masked values, or "
                f"{name}.data"
            )


def check_int(**values: int) -> None:
    """Raises TypeError for the first value that is not an int."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            given = f"{shown(value)} ({type(value).__name__})"
            raise TypeError(f"{name} must be an int, got {given}{_remedy(value, int, '__index__')}")


def check_positive(**values: int) -> None:
    """Raises TypeError or ValueError for the first value that is not an int >= 1."""
    _check_at_least(1, values)


def check_count(**values: int) -> None:
    """Raises TypeError or ValueError for the first value that is not an int >= 0."""
    _check_at_least(0, values)


def _check_at_least(least: int, values: dict[str, int]) -> None:
    check_int(**values)
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_at_most(most: int, /, **values: int) -> None:
    """Raises ValueError for the first int that is more than ``most``."""
    for name, value in values.items():
        if value > most:
            raise ValueError(f"{name}={value} must be at most {most}")


def _remedy(value: object, kind: type, method: str) -> str:
    """Returns how to make a number of a value that is much like one, and so has a ``method``."""
    if "Tracer" in type(value).__name__:
        return "; it is traced, and has to be known before: pass it from outside of jit"
    is_like = method and hasattr(value, method) and not isinstance(value, bool)
    return f"; pass {kind.__name__}(...)" if is_like else ""


def check_number(**values: float) -> None:
    """Raises TypeError for the first value that is neither an int nor a float."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            given = f"{shown(value)} ({type(value).__name__})"
            remedy = _remedy(value, float, "__float__")
            raise TypeError(f"{name} must be a number, got {given}{remedy}")


def check_flag(**values: bool) -> None:
    """Raises TypeError for the first value that is not a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            remedy = _remedy(value, bool, "dtype")
            raise TypeError(f"{name} must be True or False, got {shown(value)}{remedy}")


def check_kind(kind: Any, wanted: str | None = None, /, **values: object) -> None:
    """Raises TypeError for the first value that is not a ``kind``, which ``wanted`` describes."""
    for name, value in values.items():
        if not isinstance(value, kind):
            wanted = wanted or f"a {kind.__name__}"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")


def check_each(kind: Any, wanted: str, /, **lists: Any) -> None:
    """Raises TypeError unless each value is a list of ``kind``, which ``wanted`` describes."""
    for name, values in lists.items():
        if not isinstance(values, Collection) or getattr(values, "ndim", 1) == 0:
            raise TypeError(f"{name} must be a list, each entry {wanted}; got {shown(values)}")
        for index, value in enumerate(values):
            if not isinstance(value, kind):
                raise TypeError(f"{name}[{index}] must be {wanted}, got {shown(value)}")


def check_array(**values: Any) -> None:
    """Raises TypeError for the first value that is not an array of numbers, of jax or NumPy."""
    for name, value in values.items():
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise TypeError(f"{name} must be an array, got {type(value).__name__}")
        if getattr(value.dtype, "kind", "V") in "OSUMm":  # which jax has not
            raise TypeError(f"{name} must be an array of numbers, got {value.dtype}")


def check_known(**values: Any) -> None:
    """Raises TypeError for the first value that jax traces."""
    for name, value in values.items():
        if remedy := _remedy(value, int, ""):
            raise TypeError(f"{name} is a {type(value).__name__}{remedy}")


def check_left_out(remedy: str, /, **options: Any) -> None:
    """Raises ValueError for the first option of a prompt that is given where no tokens are."""
    for name, value in options.items():
        if value is not None and not (isinstance(value, Sequence) and not value):
            raise ValueError(
                f"{name}={shown(value)} has no effect without tokens; {remedy}, or leave {name} out"
            )


def check_choice(choices: Collection[str], **values: str) -> None:
    """Raises ValueError for the first value that is not one of the choices."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}={shown(value)}; use one of {', '.join(map(repr, choices))}")


def check_name(name: Hashable) -> None:
    """Raises TypeError unless the name of a request is hashable."""
    try:
        hash(name)
    except TypeError:
        raise TypeError(
            f"request={shown(name)} must be a hashable name, such as an int or a str"
        ) from None


def check_new_names(names: Sequence[Hashable], taken: Collection[Hashable]) -> None:
    """Raises TypeError or ValueError unless names are hashable, distinct, and none is taken."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"into must be a sequence of names, got {shown(names)}; pass a list of names"
        )
    for name in names:
        check_name(name)
        if name in taken:
            raise ValueError(
                f"request={shown(name)} is in use; finish it first, or use another name"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{shown(list(names))} names a request twice; give each its own name")


def check_int32(**arrays: Any) -> None:
    """Raises TypeError for the first value that is not an array of int32."""
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", type(array).__name__)
        if getattr(dtype, "str", None) != "<i4":  # cheaper than comparing names, on the hot path
            raise TypeError(f"{name} must be an array of int32, got {dtype}")


def check_same_shape(**arrays: Any) -> None:
    """Raises ValueError unless all the arrays have one shape."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these must have one shape: {listed}")
