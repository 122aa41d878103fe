"""An entry of the table of model types. No jax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A way to read the configurations of some model types.

    read: takes a `ConfigReader` and `Options`, and returns the layers.
    names: own name of a field -> its usual name.
    same: field -> the field whose value it takes where a file has none, or null.
    defaults: values that the class assumes where a file has none.
    inner: the same, for a language model inside of a wrapper only.
    ignored: fields that change no cache, whatever they hold.
    dtype: dtype that the family ships, where its files name none.
    encoder: input of the family's encoder; None: it has no encoder.
    """

    read: Callable[..., dict[str, Any]]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    dtype: str | None = None
    encoder: Literal["tokens", "frames", "tiles"] | None = None
