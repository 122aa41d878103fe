"""A reader of model configurations that records the fields it was asked for. No jax.

If a field decides what a cache stores and the family did not read it, the family does not
understand this model: `ConfigReader.check_all_read` refuses it.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv._src.hf_config._family import Family
from jaxkv._src.hf_config._fields import (
    Config,
    contradictions,
    flatten,
    inner_config,
    model_type_of,
    outside,
    unread,
)
from jaxkv._src.hf_config._wrappers import OWN_SIZES
from jaxkv._src.internal.checks import check_count, check_positive
from jaxkv._src.internal.text import shown
from jaxkv._src.specs import canonical_dtype

MAX_LAYERS = 1_000
QUANTIZATION = "quantization_config", "compression_config"  # the latter in older files
MODEL_DTYPES = ("bfloat16", "float16", "float32")


class ConfigReader:
    """The fields of one configuration, with a record of those that were read."""

    def __init__(
        self, config: Config, family: Family | None = None, kv_dtype: str | None = None
    ) -> None:
        self.model_type = model_type_of(config)
        self.wrapper = None if inner_config(config) is None else config.get("model_type")
        self._fields = flatten(config)
        self._outside = outside(config)
        self._contradictions = contradictions(config)
        self.read: set[str] = set()
        self._asked_dtype = None if kv_dtype is None else canonical_dtype(kv_dtype, "kv_dtype")
        self._shipped_dtype = family.dtype if family else None
        self._layers: dict[int, ConfigReader] = {}
        if family is not None:
            self._rename(family.names)
            self.default(**family.defaults)
            if self.wrapper is not None:
                self.default(**OWN_SIZES.get(str(self.wrapper), family.inner))
            self.ignore(*family.ignored)
            for name, other in family.same.items():
                if self._fields.get(name) is None:
                    self._fields[name] = self._fields.get(other)

    def _rename(self, names: Mapping[str, str]) -> None:
        """Gives fields their usual names; refuses a field that has two values under two names."""
        for own, usual in names.items():
            self.read.add(own)
            given, other = self._fields.get(own), self._fields.get(usual)
            if given is not None and other is not None and given != other:
                raise self.refusal(own, f"it contradicts {usual}={shown(other)}")
            if given is not None:
                self._fields[usual] = given

    @property
    def fields(self) -> Config:
        """All fields of the language model, by their usual names."""
        return self._fields

    def value(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default when it is absent or null."""
        self.read.add(name)
        value = self._fields.get(name)
        if name in self._contradictions:
            other = self._contradictions[name]
            where = "outside of the language model"
            raise self.refusal(name, f"it contradicts {name}={shown(other)} {where}")
        return default if value is None else value

    def has(self, name: str, *, null: bool = True) -> bool:
        """Returns whether the field is there and, with ``null=False``, not null."""
        return name in self._fields and (null or self._fields[name] is not None)

    def state_dtype(self, name: str, default: str | None = None) -> str:
        """Returns a field that holds the dtype of a state."""
        value = self.value(name, default)
        if value is None:
            raise self.lacks(name)
        return canonical_dtype(str(value), name)

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that holds an int of at least 0."""
        value = self.value(name, default)
        if value is None:
            raise self.lacks(name)
        check_count(**{name: value})
        return value

    def inner(self, name: str) -> "ConfigReader":
        """Returns a reader of the fields inside a field."""
        fields = self.value(name)
        if not isinstance(fields, Mapping):
            raise self.lacks(name)
        return ConfigReader({**fields, "model_type": self.model_type})

    def number(self, *names: str, default: int | None = None) -> int:
        """Returns the first of the fields that is set: an int of at least 1."""
        self.read.update(names)
        given = [name for name in names if self.has(name, null=False)]
        if not given and default is not None:
            return default
        if not given:
            raise self.lacks(names[0])
        check_positive(**{given[0]: self.value(given[0])})
        return self._fields[given[0]]

    def per_head(self, size: str, heads: str) -> int:
        """Returns the width of a head, as a total width over a number of heads."""
        if self.number(size) % self.number(heads):
            raise self.refusal(size, f"it must divide among {heads}={self.number(heads)}")
        return self.number(size) // self.number(heads)

    def layer_count(self, name: str = "num_hidden_layers") -> int:
        """Returns the number of layers, `MAX_LAYERS` at most."""
        if self.number(name) > MAX_LAYERS:
            raise self.refusal(name, f"it must be at most {MAX_LAYERS} layers")
        return self.number(name)

    def at_layer(self, layer: int) -> "ConfigReader":
        """Returns a reader with the fields that ``per_layer_config`` changes for one layer."""
        changes = self.value("per_layer_config", {})
        if not isinstance(changes, Mapping) or not all(
            str(key).isdecimal() and isinstance(value, Mapping) for key, value in changes.items()
        ):
            raise self.refusal("per_layer_config", "it must map numbers of layers to fields")
        if not changes:
            return self
        if not self._layers:
            self._open_layers({int(key): value for key, value in changes.items()})
        return self._layers.get(layer, self)

    def _open_layers(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Makes a reader for every distinct set of changes; all share the record of fields."""
        alike: dict[str, ConfigReader] = {}
        for layer, fields in changes.items():
            if layer >= self.layer_count():
                raise self.refusal("per_layer_config", f"the model has no layer {layer}")
            key = repr(sorted((str(name), repr(value)) for name, value in fields.items()))
            if key not in alike:
                alike[key] = copy.copy(self)
                alike[key]._fields = {**self._fields, **fields}
            self._layers[layer] = alike[key]

    def listed(self, name: str, default: list[Any] | None = None) -> list[Any]:
        """Returns a field that holds a list."""
        value = self.value(name, default)
        if value is None:
            raise self.lacks(name)
        if not isinstance(value, (list, tuple)):
            raise self.refusal(name, "it must be a list")
        return list(value)

    def default(self, **fields: Any) -> None:
        """Sets the values of fields that the file leaves out."""
        self._fields = {**fields, **self._fields}

    def ignore(self, *names: str) -> None:
        """Records fields as read because they change no cache of this family."""
        self.read.update(names)

    def expect(self, name: str, *allowed: Any) -> Any:
        """Returns a field that must be absent, null or one of the allowed values."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, f"understood: {', '.join(map(repr, allowed))}")
        return value

    def refusal(self, name: str, reason: str = "write its layer specs by hand") -> ValueError:
        """Returns the error for a value that is not understood."""
        return ValueError(
            f"{name}={shown(self._fields.get(name))} is not understood for "
            f"model_type={self.model_type!r}; {reason}"
        )

    def lacks(self, name: str) -> ValueError:
        """Returns the error for a missing field."""
        return ValueError(
            f"the configuration lacks {name!r}, which model_type={self.model_type!r} needs"
        )

    def layer_kinds(
        self,
        known: Mapping[str, str],
        default: list[str] | None = None,
        *,
        field: str = "layer_types",
    ) -> list[str]:
        """Returns the kind of each layer, from a field with an entry per layer.

        Entries of layers that draft tokens may follow, and are left out.

        Args:
          known: entry of the field -> kind.
          default: the entries if the field is absent; None: it must be there.
          field: name of the field.
        """
        given = self.without_drafts(self.listed(field, default))
        unknown = sorted({str(kind) for kind in given} - set(known))
        if unknown:
            listed = ", ".join(known)
            raise self.refusal(field, f"{unknown} are none of the known layer types {listed}")
        self.check_layer_count(field, len(given))
        return [known[str(kind)] for kind in given]

    def without_drafts(self, entries: list[Any]) -> list[Any]:
        """Returns entries of layers without those of layers that draft tokens."""
        drafts = self.count("num_nextn_predict_layers", self.count("num_mtp_layers", 0))
        count = self.layer_count()
        return entries[:count] if len(entries) == count + drafts else entries

    def letters(self, field: str, known: Mapping[str, str]) -> list[str]:
        """Returns the kind of each layer, from a field with a letter per layer."""
        if not isinstance(self.value(field), str):
            raise self.refusal(field, "it must hold one letter per layer")
        if unknown := sorted(set(self.value(field)) - set(known)):
            raise self.refusal(field, f"{unknown} are none of the letters {', '.join(known)}")
        self.check_layer_count(field, len(self.value(field)))
        return [known[letter] for letter in self.value(field)]

    def check_layer_count(self, field: str, count: int) -> None:
        """Refuses a field with another number of layers than ``num_hidden_layers``."""
        layers = self.layer_count()
        if count != layers:
            raise ValueError(f"{field} names {count} layers and num_hidden_layers says {layers}")

    def named_dtype(self) -> str | None:
        """Returns the dtype that the configuration names, or None."""
        for name in ("torch_dtype", "dtype"):
            if self.value(name) is not None:
                return canonical_dtype(str(self.value(name)), name)
        return None

    def dtype(self) -> str:
        """Returns the model's dtype: the named one, else the shipped one, else ``kv_dtype``."""
        if dtype := self.named_dtype() or self._shipped_dtype:
            return dtype
        if self._asked_dtype in MODEL_DTYPES:
            return self._asked_dtype
        raise ValueError(
            "the configuration names no dtype (torch_dtype or dtype); "
            + (
                "add it, because states do not have the dtype of keys and values"
                if self._asked_dtype
                else "pass kv_dtype, for example 'bfloat16', or add it"
            )
        )

    def kv_dtype(self, asked: str | None) -> str:
        """Returns the dtype of keys and values: the one asked for, else the model's own."""
        self.ignore(*QUANTIZATION)
        if asked is not None:
            return canonical_dtype(asked, "kv_dtype")
        for field in QUANTIZATION:
            quantization = self.value(field, {})
            if not isinstance(quantization, Mapping):
                raise self.refusal(field, "it must be an object")
            if found := [*_cache_fields(field, quantization)]:
                listed = ", ".join(f"{name}={shown(value)}" for name, value in found)
                raise ValueError(f"{listed} quantises the cache; pass its dtype as kv_dtype")
        return self.dtype()

    def check_all_read(self) -> None:
        """Refuses all fields at once that concern attention, are set, and were not read."""
        every = [self.fields, *(at.fields for at in self._layers.values()), self._outside]
        found = {name: fields[name] for fields in every for name in unread(fields, self.read)}
        if found:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in found.items())
            raise ValueError(
                f"{listed} {'is' if len(found) == 1 else 'are'} not understood for "
                f"model_type={self.model_type!r}; write its layer specs by hand"
            )


def _cache_fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields within a quantization that say how the cache is quantised, by their paths.

    compressed-tensors names a ``kv_cache_scheme`` at the top, modelopt a ``kv_cache_quant_algo``
    in ``quantization``, and quark a ``kv_cache_group`` in ``export``.
    """
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        path = f"{name}.{key}"
        if "kv_cache" not in str(key).lower():
            yield from _cache_fields(path, inner)
        elif inner and str(inner).lower() not in ("none", "auto"):
            yield path, inner
