"""Fields of vLLM's objects, read by attribute or by key. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv._src.internal.checks import check_positive

MISSING: Any = object()
NEUTRAL = (None, False)  # values of an unused field


def get(given: Any, name: str, default: Any = MISSING) -> Any:
    """Returns a field of an object or a mapping.

    Raises:
      TypeError: the field is missing and has no default.
    """
    value = (
        given.get(name, MISSING) if isinstance(given, Mapping) else getattr(given, name, MISSING)
    )
    if value is not MISSING:
        return value
    if default is MISSING:
        raise TypeError(
            f"{_type_name(given)} has no {name!r}; pass vLLM's own object, or a mapping with it"
        )
    return default


def _type_name(given: Any) -> str:
    return given.get("type", "a mapping") if isinstance(given, Mapping) else type(given).__name__


class SpecFields:
    """The fields of one layer's spec, with a record of those that were read.

    type: name of the spec's class.
    what: class and layer, as errors name them.
    """

    def __init__(self, layer: str, given: Any):
        self._given, self._read = given, {"type"}
        self.type = get(given, "type", None) if isinstance(given, Mapping) else type(given).__name__
        self.what = f"{self.type} of {layer!r}"
        if not isinstance(self.type, str):
            raise TypeError(
                f"the spec of {layer!r} is a mapping without 'type'; add the name of its class, "
                "such as 'FullAttentionSpec'"
            )

    def get(self, name: str, default: Any = MISSING) -> Any:
        """Returns a field, and records it as read."""
        self._read.add(name)
        return get(self._given, name, default)

    def count(self, name: str) -> int:
        """Returns a field that holds an int of at least 1."""
        value = self.get(name)
        check_positive(**{f"{self.what}: {name}": value})
        return value

    def ignore(self, *names: str) -> None:
        """Records fields as read because they change neither bytes nor blocks."""
        self._read |= set(names)

    def refuse(self, name: str, why: str) -> None:
        """Raises ValueError if a field is used.

        Args:
          name: name of the field.
          why: reason, and what to change.
        """
        value = self.get(name, None)
        if value not in NEUTRAL:
            raise ValueError(f"{self.what}: {name}={value!r} {why}")

    def check_all_read(self) -> None:
        """Raises ValueError for a field that is used but was never read."""
        for name in self._names() - self._read:
            value = get(self._given, name)
            if value not in NEUTRAL:
                raise ValueError(
                    f"{self.what}: {name}={value!r} is not understood and may change the bytes of "
                    "a block; plan without it"
                )

    def _names(self) -> set[str]:
        if isinstance(self._given, Mapping):
            return set(self._given)
        if dataclasses.is_dataclass(self._given):
            return {field.name for field in dataclasses.fields(self._given)}
        return set(vars(self._given))
