"""Refusals that name the argument, what was given and what is wanted. No jax."""

from collections.abc import Mapping
from typing import Any, ClassVar


class FlagsError(RuntimeError):
    """What the device set bits for. Subclasses say what went wrong and what each bit means.

    flags: the bits.
    """

    what: ClassVar[str]
    reasons: ClassVar[Mapping[int, str]]

    def __init__(self, flags: int):
        reasons = "; ".join(text for bit, text in self.reasons.items() if flags & bit)
        super().__init__(f"{self.what}: {reasons}")
        self.flags = flags

    def __reduce__(self):  # from one process of a serving stack to another
        return type(self), (self.flags,)


def check_positive(**values: int) -> None:
    """Raises TypeError or ValueError for the first value that is not an int >= 1."""
    _check_at_least(1, values)


def check_count(**values: int) -> None:
    """Raises TypeError or ValueError for the first value that is not an int >= 0."""
    _check_at_least(0, values)


def _check_at_least(least: int, values: dict[str, int]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_int32(**arrays: Any) -> None:
    """Raises TypeError for the first value that is not an array of int32."""
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", type(array).__name__)
        if getattr(dtype, "str", None) != "<i4":  # cheaper than its name, on the hot path
            raise TypeError(f"{name} must be an array of int32, got {dtype}")


def check_same_shape(**arrays: Any) -> None:
    """Raises ValueError unless all the arrays have one shape."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"these must have one shape: {listed}")
