"""A reader of model configurations that notices the fields which nobody read. No jax.

A field that decides what a cache stores and that the family did not ask for means that
the family does not understand this model: `ConfigReader.check_all_read` refuses it.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv._internal.checks import check_count, check_positive
from jaxkv.hf_config._fields import Config, flatten, model_type_of, unread
from jaxkv.specs import canonical_dtype

MAX_LAYERS = 1_000
KV_QUANTIZATION = ("kv_cache_scheme", "kv_cache_quant_algo")


class ConfigReader:
    """The fields of one configuration, with a record of those that were read."""

    def __init__(self, config: Config) -> None:
        self.model_type = model_type_of(config)
        self._fields = flatten(config)
        self._read: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default when it is absent or null."""
        self._read.add(name)
        value = self._fields.get(name)
        return default if value is None else value

    def has(self, name: str, *, null: bool = True) -> bool:
        """Returns whether the field is there and, with ``null=False``, not null."""
        return name in self._fields and (null or self._fields[name] is not None)

    def state_dtype(self, name: str, default: str | None = None) -> str:
        """Returns a field that holds the dtype of a state."""
        value = self.value(name, default)
        if value is None:
            raise self._lacks(name)
        return canonical_dtype(str(value), name)

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that holds a number of at least 0."""
        value = self.value(name, default)
        if value is None:
            raise self._lacks(name)
        check_count(**{name: value})
        return value

    def inner(self, name: str) -> "ConfigReader":
        """Returns a reader of the fields inside a field."""
        fields = self.value(name)
        if not isinstance(fields, Mapping):
            raise self._lacks(name)
        return ConfigReader({**fields, "model_type": self.model_type})

    def number(self, *names: str, default: int | None = None) -> int:
        """Returns the first of the fields that is set: a number of at least 1."""
        self._read.update(names)
        given = {name: self._fields[name] for name in names if self.has(name, null=False)}
        if not given and default is not None:
            return default
        if not given:
            raise self._lacks(names[0])
        name, value = next(iter(given.items()))
        check_positive(**{name: value})
        return value

    def per_head(self, size: str, heads: str) -> int:
        """Returns a width divided among heads, where the family gives no width of one head."""
        if self.number(size) % self.number(heads):
            raise self.refusal(size, f"it does not divide among {heads}={self.number(heads)}")
        return self.number(size) // self.number(heads)

    def layer_count(self, name: str = "num_hidden_layers") -> int:
        """Returns the number of layers; a number beyond all models is refused, not tried."""
        if self.number(name) > MAX_LAYERS:
            raise self.refusal(name, f"at most {MAX_LAYERS} layers")
        return self.number(name)

    def listed(self, name: str, default: list[Any] | None = None) -> list[Any]:
        """Returns a field that holds a list."""
        value = self.value(name, default)
        if value is None:
            raise self._lacks(name)
        if not isinstance(value, (list, tuple)):
            raise self.refusal(name, "it must be a list")
        return list(value)

    def default(self, **fields: Any) -> None:
        """Sets what the family's configuration class assumes where a file leaves a field out."""
        self._fields = {**fields, **self._fields}

    def ignore(self, *names: str) -> None:
        """Declares fields that do not matter to this family, whatever they hold."""
        self._read.update(names)

    def expect(self, name: str, *allowed: Any) -> Any:
        """Returns a field that may be absent or one of a few values."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, f"understood: {', '.join(map(repr, allowed))}")
        return value

    def refusal(self, name: str, reason: str = "write its layer specs by hand") -> ValueError:
        """Returns the error that says that a field's value is not understood."""
        return ValueError(
            f"{name}={self._fields.get(name)!r} is not understood for "
            f"model_type={self.model_type!r}; {reason}"
        )

    def _lacks(self, name: str) -> ValueError:
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
        """Returns the kind of each layer: the field's entries by their names in ``known``.

        Args:
          known: entry of the field -> kind.
          default: the entries when the field is absent; None: it must be there.
          field: name of the field.
        """
        given = self.listed(field, default)
        unknown = sorted({str(kind) for kind in given} - set(known))
        if unknown:
            listed = ", ".join(known)
            raise self.refusal(field, f"{unknown} are none of the known layer types {listed}")
        self.check_layer_count(field, len(given))
        return [known[str(kind)] for kind in given]

    def letters(self, field: str, known: Mapping[str, str]) -> list[str]:
        """Returns the kind of each layer, from a field that spells it one letter per layer."""
        if not isinstance(self.value(field), str):
            raise self.refusal(field, "it must be one letter per layer")
        if unknown := sorted(set(self.value(field)) - set(known)):
            raise self.refusal(field, f"{unknown} are none of the letters {', '.join(known)}")
        self.check_layer_count(field, len(self.value(field)))
        return [known[letter] for letter in self.value(field)]

    def check_layer_count(self, field: str, count: int) -> None:
        """Refuses a field that names other layers than ``num_hidden_layers``."""
        layers = self.layer_count()
        if count != layers:
            raise ValueError(f"{field} names {count} layers and num_hidden_layers says {layers}")

    def dtype(self) -> str:
        """Returns the dtype of the model."""
        for name in ("torch_dtype", "dtype"):
            if self.value(name) is not None:
                return canonical_dtype(str(self.value(name)), name)
        raise ValueError(
            "the configuration names no dtype (torch_dtype or dtype); add it, or "
            "pass kv_dtype where only keys and values need one"
        )

    def kv_dtype(self, asked: str | None) -> str:
        """Returns the dtype of keys and values: the one asked for, else the model's own."""
        if asked is not None:
            return canonical_dtype(asked, "kv_dtype")
        quantization = self.value("quantization_config", {})
        if not isinstance(quantization, Mapping):
            raise self.refusal("quantization_config", "it must be an object")
        for name in KV_QUANTIZATION:
            if quantization.get(name):
                raise ValueError(
                    f"quantization_config.{name}={quantization[name]!r} quantises the cache; "
                    "pass the kv_dtype that it stands for"
                )
        return self.dtype()

    def check_all_read(self) -> None:
        """Refuses the first set field that concerns attention and that nobody read."""
        if name := unread(self._fields, self._read):
            raise self.refusal(name)
