"""The way in which the configurations of some model types are read. No jax."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The way in which the configurations of some model types are read.

    read: takes a `ConfigReader` and the options, and returns the layers.
    names: the family's own name of a field -> the usual name.
    same: field -> the field whose value the class takes where a file leaves it out or null.
    defaults: what the class assumes where a file leaves a field out.
    inner: the same, where a file inside of a wrapper leaves it out.
    ignored: fields that do not matter to the family, whatever they hold.
    dtype: what the family ships, where its files name none.
    encoder: what an encoder of the family reads: "tokens", "frames" or "tiles"; None: has none.
    """

    read: Callable[..., dict[str, Any]]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    dtype: str | None = None
    encoder: Literal["tokens", "frames", "tiles"] | None = None
